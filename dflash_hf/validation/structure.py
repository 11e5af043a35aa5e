# SPDX-License-Identifier: Apache-2.0
"""Rules on what kind of model `config.json` describes: its class, sizes and layers."""

import copy
import dataclasses
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING, Qwen3Config

from ..config_rules import LAYER_TYPES, OTHER_LAYOUTS
from .checkpoint import (
    ALL,
    ENGINES,
    SERVERS,
    SIZES,
    STRICT,
    Checkpoint,
    Finding,
    Rule,
    absent,
    enumerate_some,
    is_integer,
    is_number,
    is_size,
    others,
    show,
)


# Another layout -> the readers that have code of their own for it.
_SERVED_BY = {"DFlash 2": ENGINES, "speculators": ("vLLM",)}


def _check_architectures(checkpoint: Checkpoint) -> list[Finding]:
    architectures = checkpoint.raw.get("architectures")
    if architectures == ["DFlashDraftModel"]:
        return []
    second = architectures == ["DFlash2DraftModel"]
    refusing = () if second else SERVERS
    return [
        Finding(
            f"architectures={show(architectures)}",
            'architectures=["DFlashDraftModel"]',
            "vLLM and SGLang look up the drafter's class by this name.",
            "Set it if the tensors are those of a DFlash drafter; else use the code that made the checkpoint.",
            errors=refusing if architectures is None else (*refusing, "transformers"),
            warnings=SERVERS if second else (),
        )
    ]


def _check_layout(checkpoint: Checkpoint) -> list[Finding]:
    findings = []
    for where, fields in (("", checkpoint.raw), ("dflash_config.", checkpoint.nested)):
        for name, layout in OTHER_LAYOUTS.items():
            if fields.get(name):
                findings.append(_other_layout(f"{where}{name}={show(fields[name])}", layout))
        drafted = fields.get("draft_vocab_size")
        if drafted is not None and drafted != checkpoint.raw.get("vocab_size"):
            findings.append(
                Finding(
                    f"{where}draft_vocab_size={show(drafted)}, vocab_size={show(checkpoint.raw.get('vocab_size'))}",
                    "the target's vocabulary",
                    "Only vLLM maps a vocabulary of the drafter's own; the others use the target's head.",
                    "Serve it with vLLM, after checking that d2t is among the tensors.",
                    errors=others("vLLM"),
                    warnings=("vLLM",),
                )
            )
    return findings


def _other_layout(found: str, layout: str) -> Finding:
    served = _SERVED_BY.get(layout, ())
    unchecked = f" {enumerate_some(served)} may have code for it, which these rules do not check." if served else ""
    return Finding(
        found,
        "DFlash: slot k drafts the token at its own position, and only the target's head follows",
        f"This announces {layout}.{unchecked}",
        "Convert it first." if layout == "speculators" else "Serve it as the project that made it says.",
        errors=others(*served),
        warnings=served,
    )


def _check_model_type(checkpoint: Checkpoint) -> list[Finding]:
    model_type = checkpoint.raw.get("model_type")
    why = "The servers and dflash's command line read config.json through AutoConfig, which finds its class by it."
    remedy = 'Write model_type="qwen3", as published drafters have it.'
    if model_type is None:
        return [absent("model_type", why, remedy, STRICT, ("z-lab",))]
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return []
    found, expected = f"model_type={show(model_type)}", "a type that transformers knows"
    return [Finding(found, expected, why, remedy, SERVERS, others(*SERVERS))]


def _check_dflash_config(checkpoint: Checkpoint) -> list[Finding]:
    raw = checkpoint.raw
    if "dflash_config" not in raw or isinstance(raw["dflash_config"], dict):
        return []
    is_null = raw["dflash_config"] is None
    return [
        Finding(
            f"dflash_config={show(raw['dflash_config'])}",
            "an object, or no such field",
            "dflash looks fields up in it without a check." if is_null else "Every reader looks fields up in it.",
            'Write "dflash_config": {"target_layer_ids": [...], "mask_token_id": ...}.',
            errors=("z-lab",) if is_null else ALL,
        )
    ]


def _check_sizes(checkpoint: Checkpoint) -> list[Finding]:
    raw = checkpoint.raw
    findings = []
    remedy = "Write it as it was trained."
    lacking = [name for name in (*SIZES, "rms_norm_eps") if raw.get(name) is None]
    if lacking:
        why = "Readers fill in the defaults of the model type, and the tensors do not fit or are read wrongly."
        findings.append(absent(enumerate_some(lacking, 9), why, remedy))
    for name in (*SIZES, "rms_norm_eps"):
        value: Any = raw.get(name)
        valid = is_size(value, name) if name != "rms_norm_eps" else is_number(value) and value > 0
        if value is not None and not valid:
            findings.append(
                Finding(f"{name}={show(value)}", "a plausible positive number", "It is a size.", remedy, errors=ALL)
            )
    heads: Any = raw.get("num_attention_heads")
    shared: Any = raw.get("num_key_value_heads")
    if not findings and heads % shared:
        why = "Query heads share keys in equal groups."
        found = f"num_attention_heads={heads}, num_key_value_heads={shared}"
        findings.append(Finding(found, "a multiple", why, remedy, errors=ALL))
    return findings


def _check_field_types(checkpoint: Checkpoint) -> list[Finding]:
    # Sizes and layer types have rules of their own.
    typed = {field.name for field in dataclasses.fields(Qwen3Config)} - {*SIZES, "layer_types"}
    given = {name: checkpoint.raw[name] for name in checkpoint.raw.keys() & typed}
    if _type_problem(given) is None:
        return []
    # One field at a time, since the class stops at the first.
    found = (_type_problem({name: value}) for name, value in sorted(given.items()))
    problems = [problem for problem in found if problem is not None]
    if not problems:
        return []
    why = "Every reader reads config.json through a configuration class, and those of transformers 5 check types."
    remedy = "Write a value of the right type, or remove the field."
    return [Finding("\n".join(problems), "values of the declared types", why, remedy, errors=ALL)]


def _type_problem(given: dict[str, Any]) -> str | None:
    try:
        Qwen3Config(**copy.deepcopy(given))
    except StrictDataclassFieldValidationError as error:
        return str(error).splitlines()[-1].strip()
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassClassValidationError) as error:
        return None if len(given) == 1 else str(error)
    return None


def _check_activation(checkpoint: Checkpoint) -> list[Finding]:
    activation = checkpoint.raw.get("hidden_act")
    if activation in (None, "silu"):
        return []
    return [
        Finding(
            f"hidden_act={show(activation)}",
            'hidden_act="silu"',
            "The servers' MLP computes SiLU and refuses every other name.",
            "Correct the name if the drafter was trained with SiLU; serve it with dflash otherwise.",
            errors=STRICT,
        )
    ]


def _check_layer_types(checkpoint: Checkpoint) -> list[Finding]:
    raw = checkpoint.raw
    layer_types, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    remedy = "Write one entry per layer as it was trained."
    if layer_types is None:
        if not checkpoint.is_foreign and not raw.get("use_sliding_window"):
            return []
        errors = STRICT if checkpoint.is_foreign else ("transformers",)
        why = "Readers derive it from the defaults of the model type, use_sliding_window and max_window_layers."
        return [absent("layer_types", why, remedy, errors, others(*errors))]
    known = isinstance(layer_types, list) and {*map(str, layer_types)} <= {*LAYER_TYPES}
    if known and len(layer_types) == num_layers:
        return []
    expected = f"{num_layers} entries out of {enumerate_some(LAYER_TYPES)}"
    why = "Most readers refuse a layer of another kind or a list of another length, and the rest misread it."
    return [Finding(f"layer_types={show(layer_types)}", expected, why, remedy, errors=ALL)]


def _check_sliding_window(checkpoint: Checkpoint) -> list[Finding]:
    raw, foreign, findings = checkpoint.raw, checkpoint.is_foreign, []
    layer_types, block_size = raw.get("layer_types"), checkpoint.block_size
    window: Any = raw.get("sliding_window")
    if not isinstance(layer_types, list) or "sliding_attention" not in layer_types:
        return []
    remedy = "Write use_sliding_window=true and the sliding_window that the drafter was trained with."
    if not raw.get("use_sliding_window"):
        found = f"use_sliding_window={show(raw.get('use_sliding_window'))} beside sliding_attention layers"
        why = "Qwen3's configuration then drops the window: vLLM and SGLang refuse, dflash lets the layers see all."
        errors, warnings = (("z-lab", "transformers"), SERVERS) if foreign else (ALL, ())
        findings.append(Finding(found, "use_sliding_window=true", why, remedy, errors, warnings))
    if not is_integer(window) or window < 1:
        found = f"sliding_window={show(window)} beside sliding_attention layers"
        why = "vLLM and SGLang refuse; dflash lets these layers see the whole context."
        findings.append(Finding(found, "a number of tokens", why, remedy, errors=ALL))
    elif block_size is not None and window < block_size:
        found, why = (
            f"sliding_window={window}, block_size={block_size}",
            "Late slots of a block do not see the anchor.",
        )
        findings.append(Finding(found, "a window of at least one block", why, remedy, ("transformers",), ENGINES))
    return findings


def _check_causality(checkpoint: Checkpoint) -> list[Finding]:
    top, layer_types, findings = checkpoint.raw.get("is_causal"), checkpoint.raw.get("layer_types"), []
    if top is not None and not isinstance(top, bool):
        why = 'Engines take its truth value, so that the word "false" means true.'
        findings.append(
            Finding(f"is_causal={show(top)}", "true, false or no such field", why, "Correct it.", errors=ALL)
        )
    by_layer = {kind == "sliding_attention" for kind in layer_types} if isinstance(layer_types, list) else {False}
    for name in ("causal", "is_causal"):
        inner = checkpoint.nested.get(name)
        if inner is None or inner == top or (top is None and isinstance(inner, bool) and by_layer == {inner}):
            continue
        reading = ("vLLM",) if name == "causal" and top is None else ()
        findings.append(
            Finding(
                f"dflash_config.{name}={show(inner)}, is_causal={show(top)} at the top level",
                "is_causal at the top level, or no such field where only sliding layers are causal",
                f"SGLang and dflash read only the top level{'; vLLM also reads this one' if reading else ''}.",
                f"Write is_causal={show(inner)} at the top level if it was trained so; else remove the nested one.",
                errors=("transformers",),
                warnings=others("transformers", *reading),
            )
        )
    return findings


STRUCTURE_RULES = (
    Rule("architectures", "the class the servers look up", STRICT, _check_architectures),
    Rule("layout", "no other kind of drafter", ALL, _check_layout),
    Rule("model_type", "a type that AutoConfig knows", ALL, _check_model_type),
    Rule("dflash_config", "an object", ALL, _check_dflash_config),
    Rule("sizes", "all sizes, and heads that divide", ALL, _check_sizes),
    Rule("field_types", "values of the declared types", ALL, _check_field_types),
    Rule("activation", "SiLU", STRICT, _check_activation),
    Rule("layer_types", "one known kind per layer", ALL, _check_layer_types),
    Rule("sliding_window", "a window for sliding layers", ALL, _check_sliding_window),
    Rule("causality", "said where every reader looks", ALL, _check_causality),
)
