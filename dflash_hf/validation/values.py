# SPDX-License-Identifier: Apache-2.0
"""The rule on the weights themselves, which are read where they lie in a local folder."""

from pathlib import Path

from safetensors import safe_open

from ..checkpoint_tensors import WEIGHT_DTYPES
from .checkpoint import ALL, Checkpoint, Finding, Rule, enumerate_some


def _check_values(checkpoint: Checkpoint) -> list[Finding] | None:
    if checkpoint.folder is None or checkpoint.headers is None:
        return None
    broken = _nonfinite_tensors(checkpoint.folder, checkpoint)
    if not broken:
        return []
    return [
        Finding(
            f"{len(broken)} of {len(checkpoint.headers)} tensors hold NaN or infinity: {enumerate_some(broken)}",
            "finite values",
            "Readers load it without a word, and none of its drafts is accepted.",
            "Copy the file again, or take an earlier checkpoint of the run.",
            errors=ALL,
        )
    ]


def _nonfinite_tensors(folder: Path, checkpoint: Checkpoint) -> list[str]:
    broken = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            names = tensors.keys()
            for name in names:
                dtype, _ = (checkpoint.headers or {}).get(name, ("", ()))
                # Another rule is about other types.
                if dtype in WEIGHT_DTYPES and not tensors.get_tensor(name).isfinite().all():
                    broken.append(name)
    return broken


VALUE_RULES = (Rule("tensor_values", "no NaN, no infinity", ALL, _check_values),)
