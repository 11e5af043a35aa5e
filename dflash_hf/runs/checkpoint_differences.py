# SPDX-License-Identifier: Apache-2.0
"""How far apart the weights of several runs are after the same step, from their checkpoints."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint_format import ADAPTER_WEIGHTS
from ..checkpoint_tensors import TensorHeaders, file_headers, read_tensor_headers
from .checkpointing import step_of


def common_step(folders: Sequence[Path]) -> int:
    """The newest step of which every run has a checkpoint.

    Args:
        folders: Output folders of runs.

    Raises:
        ValueError: There is none, naming the steps that each one has.
    """
    steps = [{step for path in folder.glob("*") if (step := step_of(path)) is not None} for folder in folders]
    common = set.intersection(*steps)
    if not common:
        had = "; ".join(
            f"{folder}: {', '.join(map(str, sorted(own))) or 'none'}"
            for folder, own in zip(folders, steps, strict=True)
        )
        raise ValueError(
            f"There is no step of which all runs have a {PREFIX_CHECKPOINT_DIR}-N to be compared ({had}). Train each "
            "with --save_strategy steps, the same --save_steps and, since weights are enough, --save_only_model true."
        )
    return max(common)


def weight_differences(first: Path, other: Path) -> dict[str, Any]:
    """The difference of two drafters' weights, or of two adapters', read one tensor after the other.

    Args:
        first: Folder with safetensors files.
        other: The same; its weights are compared with the first one's.

    Returns:
        `relative_difference`, the norm of the difference of all weights over that of the first one's;
        `largest_difference` of a single weight, absolute; and `largest_in`, the tensor that has it.

    Raises:
        ValueError: They hold other tensors, a file is broken, or a weight is not finite.
        FileNotFoundError: A folder holds no weights.
    """
    headers = _same_headers(first, other)
    squares, reference, largest, largest_in = 0.0, 0.0, 0.0, next(iter(headers))
    with ExitStack() as stack:
        tensors, others = (_open(folder, stack) for folder in (first, other))
        for name, file in sorted(tensors.items()):
            values = file.get_tensor(name).float()
            if not values.numel():
                continue
            difference = others[name].get_tensor(name).float().sub_(values)
            squares += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
            reference += torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2
            if not math.isfinite(squares + reference):
                raise ValueError(f"{name} is not finite in {first} or {other}: there is no difference to speak of.")
            if (own := difference.abs_().max().item()) > largest:
                largest, largest_in = own, name
    relative = math.sqrt(squares / reference) if reference else math.sqrt(squares)
    return {"relative_difference": relative, "largest_difference": largest, "largest_in": largest_in}


def _same_headers(first: Path, other: Path) -> TensorHeaders:
    """The headers of the first one, after a look at those of the other."""
    headers = _headers(first)
    shapes = [{name: shape for name, (_, shape) in own.items()} for own in (headers, _headers(other))]
    if shapes[0] != shapes[1]:
        different = sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n))
        raise ValueError(
            f"{other} does not hold the tensors of {first}: {len(different)} are missing in one of them or of another "
            f"shape, such as {', '.join(different[:3])}. Compare runs of the same drafter."
        )
    return headers


def _headers(folder: Path) -> TensorHeaders:
    adapter = folder / ADAPTER_WEIGHTS
    return file_headers(adapter) if adapter.exists() else read_tensor_headers(folder)


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor."""
    adapter = folder / ADAPTER_WEIGHTS
    paths = [adapter] if adapter.exists() else sorted(folder.glob("*.safetensors"))
    files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dictionary)


__all__ = ["common_step", "weight_differences"]
