# SPDX-License-Identifier: Apache-2.0
"""Reading what most rules of [`validation`] look at, without the weights; what cannot be read is a finding."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import list_repo_files, metadata_load, parse_safetensors_file_metadata, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError, SafetensorsParsingError
from yaml import YAMLError

from ..checkpoint_format import (
    TensorHeaders,
    is_adapter_folder,
    joined_headers,
    merging_advice,
    read_tensor_headers,
)
from ..data.addresses import without_secrets
from .checkpoint import ALL, Checkpoint, Finding


_SMALL_FILES = ["*.json", "*.py", "README.md", "mask_embedding.pt"]
# What answers in place of the Hub, such as the login page of a network, sends no JSON.
_NETWORK_ERRORS = (OSError, HTTPError, HFValidationError, json.JSONDecodeError)


def read_folder(path: Path, name: str, revision: str | None = None) -> Checkpoint:
    """Read a local folder.

    Args:
        path: The folder.
        name: What to call it in reports and serving commands.
        revision: The revision of the repository it is a copy of.

    Returns:
        What could be read, and what went wrong with the rest.
    """
    unreadable: dict[str, Finding] = {}
    if not path.is_dir():
        found, why = f"{path} is a file", "A drafter is a folder with config.json and safetensors files."
        unreadable["folder"] = Finding(found, "a folder or a repository", why, "Give its folder.", errors=ALL)
        return Checkpoint(name, revision, unreadable=unreadable)
    config = _read_config_file(path / "config.json", unreadable)
    headers = None
    try:
        headers = read_tensor_headers(path)
    except (OSError, ValueError) as error:
        unreadable["weights_file"] = _broken_weights(str(error))
    files = frozenset(entry.name for entry in path.iterdir())
    return Checkpoint(name, revision, files, config, headers, _base_model(path, config), unreadable, path)


def _read_config_file(path: Path, unreadable: dict[str, Finding]) -> dict[str, Any] | None:
    why, remedy = "Every reader starts with it.", "Copy it again, from the folder the drafter was saved to."
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if is_adapter_folder(path.parent):
            remedy = f"It is the folder of an adapter. {merging_advice(path.parent)}"
        found = f"no file {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error}"
    except ValueError as error:
        found = f"{path} is not valid JSON: {error}"
    else:
        if isinstance(config, dict):
            return config
        found = f"{path} holds {type(config).__name__}, not an object"
    unreadable["config_file"] = Finding(found, "config.json with an object", why, remedy, errors=ALL)
    return None


def _broken_weights(found: str) -> Finding:
    expected = "model.safetensors, or all shards with model.safetensors.index.json"
    why = "The tensors' names and shapes are looked up in the headers of these files."
    return Finding(found, expected, why, "Copy the files again, or save the drafter again.", errors=ALL)


def read_repository(name: str, revision: str | None) -> Checkpoint:
    """Read a repository of the Hub: its small files, and of its weights only the headers.

    Args:
        name: Repository id.
        revision: Branch, tag or commit; None for the default branch.

    Returns:
        What could be read, and what went wrong with the rest.
    """
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES))
    except _NETWORK_ERRORS as error:
        return Checkpoint(name, revision, unreadable={"folder": _no_repository(name, error)})
    cached = {path.name for path in folder.glob("*.safetensors")}
    unreadable: dict[str, Finding] = {}
    headers = None
    try:
        files = [file for file in list_repo_files(name, revision=revision) if file.endswith(".safetensors")]
        # Engines read those of the folder itself.
        files = sorted(file for file in files if "/" not in file)
        if cached and cached >= set(files):
            return read_folder(folder, name, revision)
        headers = _fetch_headers(name, revision, folder, files)
    except _NETWORK_ERRORS as error:
        if cached and not _lacks_shards(folder, cached):
            return read_folder(folder, name, revision)
        unreadable["weights_file"] = _not_fetched(f"{name}: {without_secrets(str(error))}")
    except _BrokenWeightsError as error:
        unreadable["weights_file"] = _broken_weights(f"{name}: {without_secrets(str(error))}")
    config = _read_config_file(folder / "config.json", unreadable)
    names = frozenset(entry.name for entry in folder.iterdir())
    return Checkpoint(name, revision, names, config, headers, _base_model(folder, config), unreadable)


def _no_repository(name: str, error: Exception) -> Finding:
    found = f"no folder {name}, and no such repository: {without_secrets(str(error))}"
    expected = "a folder, or a repository that can be reached"
    remedy = (
        "Check the spelling, the revision, the network and the access token (HF_TOKEN, or `hf auth login`), "
        "without which a private repository is not found."
    )
    return Finding(found, expected, "There is nothing to look at.", remedy, errors=ALL)


class _BrokenWeightsError(Exception):
    """The Hub answers, and what it holds are not the weights of a drafter."""


def _fetch_headers(name: str, revision: str | None, folder: Path, files: list[str]) -> TensorHeaders:
    if not files:
        raise _BrokenWeightsError("there is no safetensors file. Push the drafter saved as safetensors")
    headers: dict[str, TensorHeaders] = {}
    try:
        for file in files:
            tensors = parse_safetensors_file_metadata(name, file, revision=revision).tensors
            headers[file] = {tensor: (info.dtype, tuple(info.shape)) for tensor, info in tensors.items()}
    except SafetensorsParsingError as error:
        raise _BrokenWeightsError(str(error)) from error
    try:
        return joined_headers(folder, headers)
    except (FileNotFoundError, ValueError) as error:
        raise _BrokenWeightsError(str(error)) from error


def _lacks_shards(folder: Path, cached: set[str]) -> bool:
    """Whether the index names files that were never downloaded; what cannot be told is looked at by other rules."""
    try:
        listed = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
        return not cached.issuperset(listed.values())
    except FileNotFoundError:
        return "model.safetensors" not in cached
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _not_fetched(found: str) -> Finding:
    found = found.replace(": ", ": the tensors' headers cannot be fetched: ", 1)
    why = "The tensors' names and shapes are looked up in the first bytes of the safetensors files."
    remedy = "Check the network and the access token (HF_TOKEN, or `hf auth login`), or validate a local folder."
    return Finding(found, "headers that can be fetched", why, remedy, errors=ALL)


def _base_model(folder: Path, config: dict[str, Any] | None) -> str | None:
    """The target, where `config.json` or the model card names it."""
    named = (config or {}).get("base_model")
    if named is None and (folder / "README.md").is_file():
        try:
            named = (metadata_load(folder / "README.md") or {}).get("base_model")
        except (ValueError, YAMLError):
            # A card that cannot be read names nothing; no reader of the drafter looks at it.
            return None
    named = named[0] if isinstance(named, list) and named else named
    return named if isinstance(named, str) else None
