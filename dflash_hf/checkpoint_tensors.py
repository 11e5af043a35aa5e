# SPDX-License-Identifier: Apache-2.0
"""The tensors of a published drafter: names, shapes and dtypes, compared by headers without reading weights.

This file ships with every saved drafter as remote code, so it imports nothing of the package.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open


WEIGHT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

TensorHeaders = dict[str, tuple[str, tuple[int, ...]]]


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
        except HFValidationError as error:
            raise FileNotFoundError(f"{path_or_repo} is neither a folder nor a repository id ({error}).") from error
        except OSError as error:
            raise OSError(
                f"The drafter {str(path_or_repo)!r} is no folder here, and the Hub does not give it to this account. "
                f"Check the spelling, the path, the login or the network. ({error})"
            ) from error
    return folder / subfolder


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a drafter, without prefix.

    Args:
        config: As [`normalize_config`] returns it.
    """
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linear = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    if config.get("attention_bias"):
        layer |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    layer |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (hidden, inner)}
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        tensors |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return tensors


def read_tensor_headers(folder: str | Path) -> TensorHeaders:
    """Name, dtype and shape of every tensor in a folder, from the headers of its safetensors files.

    Args:
        folder: A local folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Returns:
        `{name: (dtype, shape)}` with the dtype as safetensors spells it ("BF16", "F32", ...).

    Raises:
        FileNotFoundError: The folder has no safetensors file.
        ValueError: A file is broken, a tensor lies in two files, or the index and the files disagree.
    """
    folder = Path(folder)
    return joined_headers(folder, {path.name: file_headers(path) for path in sorted(folder.glob("*.safetensors"))})


def joined_headers(folder: Path, files: dict[str, TensorHeaders]) -> TensorHeaders:
    """The headers of all safetensors files of a drafter, which may lie elsewhere than the rest of its folder.

    Args:
        folder: A local folder with `model.safetensors.index.json`, if there is one.
        files: The headers of each file by its name.

    Returns:
        As [`read_tensor_headers`].

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
        raise FileNotFoundError(_no_weights(folder))
    _check_index(folder, where)
    return headers


def file_headers(path: Path) -> TensorHeaders:
    """The headers of one safetensors file.

    Raises:
        ValueError: It is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in tensors.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}): copy it again.") from error


def state_dict_headers(state_dict: dict[str, torch.Tensor]) -> TensorHeaders:
    """The headers that the tensors of a model would have in a file."""
    spelled = {getattr(torch, name): code for code, name in WEIGHT_DTYPES.items()}
    return {name: (spelled.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in state_dict.items()}


def _no_weights(folder: Path) -> str:
    pickles = ", ".join(sorted(path.name for path in folder.glob("pytorch_model*.bin")))
    found = f" ({pickles} is there, but pickles can run code and are not read)" if pickles else ""
    return (
        f"{folder} has no safetensors file with tensors{found}: expected model.safetensors or its shards. Save the "
        "drafter as safetensors with the code that made it."
    )


def _check_index(folder: Path, where: dict[str, str]) -> None:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.exists():
        shards = sorted({name for name in where.values() if name != single.name})
        if not shards:
            return
        raise ValueError(
            f"{', '.join(shards)} in {folder} is in no index: expected one file model.safetensors, or shards with "
            "model.safetensors.index.json. Remove the file, or copy the index."
        )
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
            f"{index.name} in {folder} names files that are not there or hold no tensor: {', '.join(missing)}. Copy "
            "the folder again, or remove an index that is left over."
        )
    wrong = sorted(name for name in {*listed, *where} if listed.get(name) != where.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{index.name} in {folder} says that {name} lies in {listed.get(name)}, and it lies in {where.get(name)} "
            f"({len(wrong)} tensors differ so): copy the folder again, or remove an index that is left over."
        )


def tensor_problems(expected: dict[str, tuple[int, ...]], found: TensorHeaders) -> list[str]:
    """Compare tensors with those a configuration names.

    Args:
        expected: From [`expected_tensors`].
        found: From [`read_tensor_headers`].

    Returns:
        One sentence for each missing, unexpected or wrongly shaped tensor and for each wrong dtype.
    """
    problems = [
        f"{name} is missing: readers that do not notice would run it with random values. Copy or save the drafter "
        "again."
        for name in expected
        if name not in found
    ]
    problems += [_unexpected(name, expected) for name in found if name not in expected]
    for name, (_, shape) in found.items():
        wanted = expected.get(name, shape)
        if shape != wanted:
            transposed = ", which is its transpose" if shape == wanted[::-1] else ""
            problems.append(
                f"{name} has shape {list(shape)}{transposed}: config.json asks for {list(wanted)}. Correct whichever "
                "is wrong."
            )
    return problems + dtype_problems(found)


def _unexpected(name: str, expected: dict[str, tuple[int, ...]]) -> str:
    inner = next((n for n in expected if name.endswith(f".{n}")), None)
    if inner is not None:
        prefix = name[: -len(inner)]
        return (
            f'{name} has the prefix "{prefix}": published drafters have none and engines refuse it. Rename it to '
            f"{inner}."
        )
    if name.split(".")[-1] in ("d2t", "t2d"):
        return f"{name} maps a vocabulary of the drafter's own, which is not supported: the target's head is used."
    return f"{name} is not a tensor of this configuration. Remove it, or correct config.json."


def dtype_problems(found: TensorHeaders) -> list[str]:
    """Tensors that are not bf16, fp16 or fp32, or not all the same."""
    problems = [
        f"{name} has dtype {dtype}: expected one of {list(WEIGHT_DTYPES)}. Save the drafter in one of them."
        for name, (dtype, _) in found.items()
        if dtype not in WEIGHT_DTYPES
    ]
    kinds = sorted({dtype for dtype, _ in found.values() if dtype in WEIGHT_DTYPES})
    if len(kinds) > 1:
        examples = ", ".join(f"{next(n for n, (d, _) in found.items() if d == k)} is {k}" for k in kinds)
        problems.append(f"The tensors have different dtypes ({examples}): save the drafter in one of them.")
    return problems
