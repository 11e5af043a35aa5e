# SPDX-License-Identifier: Apache-2.0
"""What is checked before a drafter is loaded, and what is made ready before it is saved.

This file ships with every saved drafter as remote code, so it imports only its shipped neighbours.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import extract_commit_hash

from .checkpoint_format import checkpoint_problems, problem_report, refuse_adapter
from .checkpoint_tensors import (
    WEIGHT_DTYPES,
    expected_tensors,
    fetch_checkpoint,
    read_tensor_headers,
    state_dict_headers,
    tensor_problems,
)
from .configuration_dflash import DFlashDraftConfig


# Path components that wrappers put into the names of a state dict: DDP, torch.compile, FSDP, activation checkpointing.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def check_checkpoint(
    path: str, config: Any, overrides: dict[str, Any], download: dict[str, Any]
) -> tuple[DFlashDraftConfig, torch.dtype]:
    """Check a folder or repository by its configuration and its tensor headers.

    Args:
        path: Local folder or repository id.
        config: A configuration to use instead of `config.json`, a path to one, or None.
        overrides: Fields of the configuration to replace.
        download: Arguments of [`checkpoint_tensors.fetch_checkpoint`].

    Returns:
        The configuration to build the drafter from, and the dtype of the stored tensors.

    Raises:
        ValueError: With everything that is wrong, one a line.
    """
    folder = fetch_checkpoint(path, **download)
    refuse_adapter(folder)
    headline = f"{path} is not a drafter that this package can load"
    # A configuration that was read as another class has that class's defaults where the file has none.
    if config is None or (isinstance(config, PreTrainedConfig) and not isinstance(config, DFlashDraftConfig)):
        _raise(headline, checkpoint_problems(folder))
    if not isinstance(config, PreTrainedConfig):
        config = DFlashDraftConfig.from_pretrained(folder if config is None else config, **overrides)
    config = DFlashDraftConfig.from_base_config(config)
    _raise(headline, checkpoint_problems(folder, vars(config)))
    stored, _ = next(iter(read_tensor_headers(folder).values()))
    # Which commit of the Hub it is; an adapter or another run can ask for the same one again.
    config._commit_hash = None if folder == Path(path) else extract_commit_hash(str(folder / CONFIG_NAME), None)
    return config, getattr(torch, WEIGHT_DTYPES[stored])


def check_state_dict(config: DFlashDraftConfig, state_dict: dict[str, torch.Tensor], headline: str) -> None:
    """Check the tensors of a model as those of a file are checked.

    Raises:
        ValueError: With everything that is wrong, one a line.
    """
    offloaded = [
        f"{name} is not in memory: its device map offloads it. Move the whole drafter to one device first."
        for name, tensor in state_dict.items()
        if tensor.is_meta
    ]
    _raise(headline, offloaded or tensor_problems(expected_tensors(vars(config)), state_dict_headers(state_dict)))


def check_loading_info(path: str | None, info: dict[str, Any]) -> None:
    """Refuse a model of which any tensor was not loaded.

    Raises:
        ValueError: Naming the tensors.
    """
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    left = [f"{kind}: {sorted(map(str, info[kind]))}" for kind in kinds if info[kind]]
    _raise(f"{path} was not loaded as it is: leave out key_mapping and ignore_mismatched_sizes", left)


def unwrapped_state_dict(state_dict: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Names as in a published drafter, and floating-point tensors in the dtype asked for.

    Args:
        state_dict: Of a drafter, perhaps under a wrapper.
        dtype: bf16, fp16 or fp32; None keeps what is held.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or str(dtype)[6:] not in WEIGHT_DTYPES.values()):
        raise ValueError(
            f"dtype is {dtype!r}: expected torch.bfloat16, torch.float16 or torch.float32, the dtypes that every "
            "reader of a drafter takes. Pass one of them, or leave it out to keep what is held."
        )
    named = {".".join(p for p in name.split(".") if p not in _WRAPPERS): t for name, t in state_dict.items()}
    if dtype is None:
        return named
    # The copy goes to the CPU: during training the device has no room for it.
    return {name: t if t.is_meta else t.detach().to("cpu", dtype) for name, t in named.items()}


def _raise(headline: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(problem_report(headline, problems))
