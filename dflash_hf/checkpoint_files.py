# SPDX-License-Identifier: Apache-2.0
"""Where a drafter's files lie and what tensors they hold, told from their headers; `checkpoint_format` has the rules.

This file ships with every saved drafter as remote code.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open


# What a folder of an adapter holds in place of config.json and model.safetensors, as peft names it.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"

# Tensor name -> (dtype as safetensors spells it: "BF16", "F32", ...; shape).
TensorHeaders = dict[str, tuple[str, tuple[int, ...]]]
WEIGHT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def fetch_checkpoint(path_or_repo: str | Path, subfolder: str = "", **download: Any) -> Path:
    """The local folder of a drafter, downloaded where it is a repository on the Hub.

    Args:
        path_or_repo: A local folder or a repository id.
        subfolder: Folder inside it.
        **download: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`, as for
            [`~huggingface_hub.snapshot_download`].

    Raises:
        OSError: There is no such folder or repository, or it cannot be reached.
    """
    folder = Path(path_or_repo)
    if not folder.is_dir():
        # All weights that engines would read, so that a file left over in the repository is seen.
        names = ("config.json", "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt")
        patterns = [f"{subfolder}/{name}" if subfolder else name for name in names]
        try:
            folder = Path(snapshot_download(str(path_or_repo), allow_patterns=patterns, **download))
        except (HFValidationError, OSError) as error:
            raise OSError(
                f"The drafter {str(path_or_repo)!r} is no folder here, and the Hub does not give it to this "
                f"account. Check the spelling, the path, the login or the network. ({error})"
            ) from error
    return folder / subfolder


def is_adapter_folder(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no whole drafter."""
    return not (Path(folder) / "config.json").is_file() and (Path(folder) / ADAPTER_CONFIG).is_file()


def refuse_adapter(folder: str | Path) -> None:
    """Raise a `ValueError` that says how to make a drafter of it, if a folder is that of an adapter."""
    if is_adapter_folder(folder):
        raise ValueError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}) and no whole drafter. {merging_advice(folder)}"
        )


def merging_advice(folder: str | Path) -> str:
    """How to make a drafter of an adapter."""
    merged = Path(folder, "merged")
    left = f" {merged} is one, as dflash-hf adapt leaves it." if merged.is_dir() else ""
    return (
        f"Give the folder of the merged drafter.{left} To make one: "
        f"dflash_hf.adapters.merge_adapter({str(folder)!r}).save_pretrained(NEW_FOLDER, dtype=torch.bfloat16)."
    )


def state_dict_headers(state_dict: dict[str, torch.Tensor]) -> TensorHeaders:
    """The headers that the tensors of a model would have in a file."""
    spelled = {getattr(torch, name): code for code, name in WEIGHT_DTYPES.items()}
    return {name: (spelled.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in state_dict.items()}


def read_tensor_headers(folder: str | Path) -> TensorHeaders:
    """Name, dtype and shape of every tensor in a folder, from the headers of its safetensors files.

    Args:
        folder: A local folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Raises:
        FileNotFoundError: The folder has no safetensors file.
        ValueError: A file is broken, a tensor lies in two files, or the index and the files disagree.
    """
    folder = Path(folder)
    return joined_headers(folder, {path.name: file_headers(path) for path in sorted(folder.glob("*.safetensors"))})


def file_headers(path: Path) -> TensorHeaders:
    """The headers of one safetensors file; a `ValueError` if it is broken."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in tensors.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}): copy it again.") from error


def joined_headers(folder: Path, files: dict[str, TensorHeaders]) -> TensorHeaders:
    """The headers of all safetensors files of a drafter, which may lie elsewhere than the rest of its folder.

    Args:
        folder: A local folder with `model.safetensors.index.json`, if there is one.
        files: The headers of each file by its name.

    Raises:
        FileNotFoundError: There is no tensor.
        ValueError: A tensor lies in two files, or the index and the files disagree.
    """
    headers: TensorHeaders = {}
    where: dict[str, str] = {}
    # Engines read every safetensors file of a folder, so a second copy of a tensor may win in one of them.
    for file, own in files.items():
        for name, header in own.items():
            if name in where:
                raise ValueError(
                    f"{name} lies in {where[name]} and in {file}: readers differ in which one they take. Remove the "
                    "file that is left over from an earlier save."
                )
            headers[name], where[name] = header, file
    if not headers:
        pickles = ", ".join(sorted(path.name for path in folder.glob("pytorch_model*.bin")))
        found = f" ({pickles} is there, but pickles can run code and are not read)" if pickles else ""
        raise FileNotFoundError(
            f"{folder} has no safetensors file with tensors{found}: expected model.safetensors or its shards. Save "
            "the drafter as safetensors with the code that made it."
        )
    if (folder / INDEX).exists():
        _check_index(folder, where)
    elif shards := sorted({*where.values()} - {"model.safetensors"}):
        raise ValueError(
            f"{', '.join(shards)} in {folder} is in no index: expected one file model.safetensors, or shards with "
            f"{INDEX}. Remove the file, or copy the index."
        )
    return headers


def _check_index(folder: Path, where: dict[str, str]) -> None:
    """Hold the index of shards against the file in which each tensor lies."""
    index = folder / INDEX
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{index} is not readable JSON ({error}): copy it again.") from error
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{index} has no mapping `weight_map` of tensors to files: copy the folder again.")
    missing = sorted({*listed.values()} - {*where.values()})
    if missing:
        raise ValueError(
            f"{INDEX} in {folder} names files that are not there or hold no tensor: {', '.join(missing)}. Copy the "
            "folder again, or remove an index that is left over."
        )
    wrong = sorted(name for name in {*listed, *where} if listed.get(name) != where.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{INDEX} in {folder} says that {name} lies in {listed.get(name)}, and it lies in {where.get(name)} "
            f"({len(wrong)} tensors differ so): copy the folder again, or remove an index that is left over."
        )
