# SPDX-License-Identifier: Apache-2.0
"""The files of a published drafter: two spellings of one configuration, and exactly the tensors it names.

The functions look at `config.json` as a plain dictionary and at tensor headers, never at weights. This file ships with
every saved drafter as remote code, so it imports only its shipped neighbours.
"""

import json
from pathlib import Path
from typing import Any

from .checkpoint_tensors import (
    WEIGHT_DTYPES,
    TensorHeaders,
    dtype_problems,
    expected_tensors,
    joined_headers,
    read_tensor_headers,
    tensor_problems,
)
from .config_rules import field_problems, layout_problems, missing_problems


# What a folder of an adapter holds in place of config.json and model.safetensors, as peft names it.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Fields that stand at the top level or in `dflash_config`.
OWN_FIELDS = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers")


def normalize_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Read a drafter's `config.json` in either spelling into one.

    Args:
        raw: The file as a dictionary: flat or nested, saved by transformers 4.57 or 5.

    Returns:
        A copy with `block_size`, `target_layer_ids`, `mask_token_id`, `num_target_layers`, `is_causal`, `dtype` (a
        name such as "bfloat16", or None) and `rope_parameters` (`rope_type`, `rope_theta`, ...) at the top level, and
        what else `dflash_config` holds still in it. `rope_theta`, `rope_scaling` and `torch_dtype` are gone.

    Raises:
        ValueError: With every problem found, one a line: conflicting or missing fields, another layout, fields that
            some readers apply and others ignore.
    """
    config, problems = read_config(raw)
    if problems:
        raise ValueError(problem_report("config.json is not that of a drafter this package can load", problems))
    return config


def read_config(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """[`normalize_config`] with the problems returned, for reports that go on to the tensors."""
    if not isinstance(raw, dict):
        return {}, [f"config.json holds {raw!r}: expected an object with the fields of a drafter. Copy it again."]
    nested = raw.get("dflash_config")
    if nested is not None and not isinstance(nested, dict):
        return dict(raw), [f"dflash_config is {nested!r}: expected an object such as {{'mask_token_id': 151669}}."]
    config, problems = lift_nested(raw, nested or {})
    config["rope_parameters"], rope_problems = _read_rope(raw)
    config["dtype"], name_problems = _read_dtype(raw)
    for name in ("rope_theta", "rope_scaling", "torch_dtype"):
        config.pop(name, None)
    problems += rope_problems + name_problems
    problems += layout_problems(raw, nested or {}, config["rope_parameters"])
    problems += missing_problems(config) + field_problems(config)
    config["is_causal"], causal_problems = _read_causality(config, nested or {})
    return config, problems + causal_problems


def is_adapter_folder(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no whole drafter."""
    return not (Path(folder) / "config.json").is_file() and (Path(folder) / ADAPTER_CONFIG).is_file()


def refuse_adapter(folder: str | Path) -> None:
    """Refuse the folder of an adapter where a whole drafter is to be read.

    Args:
        folder: A local folder; anything else passes.

    Raises:
        ValueError: Saying how to make a drafter of it.
    """
    if is_adapter_folder(folder):
        raise ValueError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}) and no whole drafter. {merging_advice(folder)}"
        )


def merging_advice(folder: str | Path) -> str:
    """How to make a drafter of an adapter."""
    merged = (
        f" {folder}/merged is one, as recipes/adapt_drafter.py leaves it." if Path(folder, "merged").is_dir() else ""
    )
    return (
        f"Give the folder of the merged drafter.{merged} To make one: "
        f"dflash_hf.training.drafter_adapters.merge_adapter({str(folder)!r}).save_pretrained(NEW_FOLDER, "
        "dtype=torch.bfloat16)."
    )


def problem_report(headline: str, problems: list[str]) -> str:
    """One message for several problems."""
    return "\n".join([f"{headline}:", *(f"  - {problem}" for problem in problems)])


def lift_nested(raw: dict[str, Any], nested: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move the drafter's own fields out of `dflash_config`, where they may be repeated but not contradicted."""
    config, rest, problems = dict(raw), dict(nested), []
    for name, value in nested.items():
        if name != "is_causal" and None not in (raw.get(name), value) and raw[name] != value:
            problems.append(
                f"{name} is {raw[name]} at the top level and {value} in dflash_config: readers differ in which one "
                "they apply. Keep one of them, or make them equal."
            )
    for name in OWN_FIELDS:
        value = rest.pop(name, None)
        if config.get(name) is None:
            config[name] = value
    config["dflash_config"] = rest
    return config, problems


def _read_rope(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """One set of RoPE parameters out of `rope_theta`, `rope_scaling` (4.57) and `rope_parameters` (5)."""
    spellings: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = raw.get(name) or {}
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            return {}, [f"{name} is {value!r}: expected one flat set of values, since all layers rotate alike."]
        if value:
            spellings[name] = {("rope_type" if k == "type" else k): v for k, v in value.items()}
    problems = []
    thetas = {name: value["rope_theta"] for name, value in spellings.items() if value.get("rope_theta") is not None}
    if raw.get("rope_theta") is not None:
        thetas["rope_theta"] = raw["rope_theta"]
    if not thetas:
        problems.append(
            "rope_theta is missing, here and in rope_parameters: readers would fill in a base of their own. Write the "
            "base that the drafter was trained with (10000000 for Qwen3.5 and 3.6)."
        )
    elif any(theta != next(iter(thetas.values())) for theta in thetas.values()):
        problems.append(f"rope_theta has several values, {thetas}: readers differ in which one they apply. Keep one.")
    rest = [{k: v for k, v in value.items() if k != "rope_theta"} for value in spellings.values()]
    if len(rest) == 2 and rest[0] != rest[1]:
        problems.append(
            f"rope_parameters is {spellings['rope_parameters']} and rope_scaling is {spellings['rope_scaling']}: "
            "readers differ in which one they apply. Keep one, or make them equal."
        )
    scaled = [value for value in rest if value and "rope_type" not in value]
    if scaled:
        problems.append(f"RoPE has {scaled[0]} and no rope_type: readers would guess or ignore them. Write rope_type.")
    if raw.get("model_type") not in (None, "qwen3") and not any("rope_type" in value for value in rest):
        problems.append(
            f"model_type is {raw['model_type']!r} and RoPE is not written in full: readers would fill in the type's "
            "own scaling. Write rope_parameters with rope_type and rope_theta, as the drafter was trained."
        )
    merged = {"rope_type": "default", **(rest[0] if rest else {})}
    return {**merged, **({"rope_theta": next(iter(thetas.values()))} if thetas else {})}, problems


def _read_dtype(raw: dict[str, Any]) -> tuple[str | None, list[str]]:
    names = {n: str(raw[n]).removeprefix("torch.") for n in ("dtype", "torch_dtype") if raw.get(n) is not None}
    problems = []
    if len(set(names.values())) > 1:
        problems.append(f"dtype and torch_dtype differ, {names}: readers differ in which one they apply. Keep one.")
    dtype = next(iter(names.values()), None)
    if dtype is not None and dtype not in WEIGHT_DTYPES.values():
        problems.append(
            f"dtype is {dtype!r}: expected one of {list(WEIGHT_DTYPES.values())}. Save the drafter in one of them."
        )
    return dtype, problems


def _read_causality(config: dict[str, Any], nested: dict[str, Any]) -> tuple[bool | None, list[str]]:
    """`is_causal`, which only the top level spells for every reader."""
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if k not in ("causal", "is_causal")}
    top, problems = config.get("is_causal"), []
    layer_types = config.get("layer_types")
    if not isinstance(layer_types, list):
        layer_types = ["full_attention"]
    for name in ("causal", "is_causal"):
        inner = nested.get(name)
        as_the_layers = all(inner == (layer_type == "sliding_attention") for layer_type in layer_types)
        if inner is None or inner == top or (top is None and as_the_layers):
            continue
        problems.append(
            f"dflash_config.{name} is {inner} and is_causal at the top level is {top}: some readers apply the first, "
            f"others only the second. Write is_causal={inner} at the top level if the drafter was trained so, else "
            f"remove dflash_config.{name}."
        )
    return top, problems


def checkpoint_problems(folder: str | Path, config: dict[str, Any] | None = None) -> list[str]:
    """Everything that is wrong with a local folder, from its `config.json` and tensor headers.

    Args:
        folder: A drafter's folder.
        config: A configuration to use instead of `config.json`, as [`normalize_config`] returns it.

    Returns:
        One sentence for each problem; empty for a folder that loads.

    Raises:
        OSError: The folder or its `config.json` cannot be read.
    """
    folder = Path(folder)
    problems: list[str] = []
    if config is None:
        path = folder / "config.json"
        try:
            config, problems = read_config(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            return [f"{path} is not valid JSON ({error}): copy it again."]
    if (folder / "mask_embedding.pt").exists():
        problems.append(
            "mask_embedding.pt holds an embedding for mask slots that some readers apply and others ignore. Remove it "
            "if the drafter was trained with the target's own embedding of mask_token_id."
        )
    try:
        found = read_tensor_headers(folder)
    except (FileNotFoundError, ValueError) as error:
        return [*problems, str(error)]
    try:
        expected = expected_tensors(config)
    except (KeyError, TypeError):
        return problems + dtype_problems(found)
    return problems + tensor_problems(expected, found)


__all__ = [
    "OWN_FIELDS",
    "TensorHeaders",
    "checkpoint_problems",
    "expected_tensors",
    "joined_headers",
    "lift_nested",
    "normalize_config",
    "problem_report",
    "read_config",
    "read_tensor_headers",
    "tensor_problems",
]
