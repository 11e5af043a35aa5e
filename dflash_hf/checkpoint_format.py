# SPDX-License-Identifier: Apache-2.0
"""What a drafter's files must hold, as one table of rules; this file ships with every saved drafter as remote code.

A rule looks at a [`Checkpoint`], which is `config.json` as it was written and the headers of the tensors. It yields a
[`Finding`] for each fault, which `dflash-hf validate` prints reader by reader, and one sentence (a `str`) for each
fault for which `from_pretrained` refuses the checkpoint.
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    StrictDataclassClassValidationError,
    StrictDataclassFieldValidationError,
)
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, Qwen3Config


READERS = {
    "vLLM": "vLLM 0.33",
    "SGLang": "SGLang 0.5.23",
    "z-lab": "dflash 0.1.0",
    "transformers": "transformers 5.24 with dflash_hf",
}
ALL = tuple(READERS)
SERVERS = ("vLLM", "SGLang")
ENGINES = ("vLLM", "SGLang", "z-lab")
# dflash reads whatever it is given, in the order it is given.
STRICT = ("vLLM", "SGLang", "transformers")

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
)
# More layers than any drafter has: a typing error must not make the reader list millions of tensors.
MAX_LAYERS = 1000
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
WEIGHT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Fields that stand at the top level or in `dflash_config`.
OWN_FIELDS = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers")

# What a folder of an adapter holds in place of config.json and model.safetensors, as peft names it.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

# Field -> the layout that it announces, unless its value is empty.
OTHER_LAYOUTS = {
    "sample_from_anchor": "DSpark (slot j predicts the token after it)",
    **dict.fromkeys(("dspark_config", "markov_rank", "markov_head_type"), "DSpark"),
    **dict.fromkeys(("enable_confidence_head", "shift_label"), "DSpark"),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), "DFlash 2"),
    "dflare_config": "DFlare",
    **dict.fromkeys(("speculators_model_type", "speculators_config", "transformer_layer_config"), "speculators"),
}
# Another layout -> the readers that have code of their own for it.
_SERVED_BY = {"DFlash 2": ENGINES, "speculators": ("vLLM",)}

# Field -> (values that mean "not used", readers that apply it, readers of which only some releases do). The others
# ignore the field without a word.
PARTLY_READ: dict[str, tuple[tuple, tuple[str, ...], tuple[str, ...]]] = {
    "input_embedding_scale": ((None, 1), ("z-lab",), ()),
    "output_multiplier": ((None, 1), ("z-lab",), ()),
    "final_logit_softcapping": ((None, 0), ("z-lab",), ()),
    "logit_scale": ((None, 1), ("vLLM",), ()),
    "use_swa": ((None, False), ("vLLM",), ("SGLang",)),
    "swa_window_size": ((None,), ("vLLM",), ("SGLang",)),
    "attention_sink_bias": ((None, False), ("vLLM",), ("SGLang",)),
    "add_swa_attention_sink_bias": ((None, False), ("vLLM",), ()),
    "attention_value_scale": ((None, 1), (), ("SGLang",)),
    "use_aux_hidden_state": ((None, True), ("vLLM",), ()),
    "is_neox_style": ((None, True), SERVERS, ()),
    "rope_is_neox_style": ((None, True), ("SGLang",), ()),
    "quantization_config": ((None,), ENGINES, ()),
}
# Field of a rotary embedding that turns part of a head, or by several positions -> values that mean "not used".
PARTIAL_ROTATION: dict[str, tuple] = {
    "partial_rotary_factor": (None, 1),
    "mrope_section": (None,),
    "mrope_interleaved": (None, False),
}
EAGLE_TAPS = "eagle_aux_hidden_state_layer_ids"

# Tensor name -> (dtype as safetensors spells it: "BF16", "F32", ...; shape).
TensorHeaders = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, for whom, and what to do about it.

    Args:
        found: What the checkpoint says.
        expected: What it should say.
        why: What the readers do with it.
        remedy: The way out.
        errors: Readers that refuse the checkpoint, or draft otherwise than it was trained; all by default.
        warnings: Readers that get by, in some releases or for the time being.
    """

    found: str
    expected: str
    why: str
    remedy: str
    errors: tuple[str, ...] = ALL
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """What can be known of a drafter without reading its weights, and where they lie.

    Args:
        name: The folder or repository, as given.
        revision: The repository's revision.
        files: File names.
        config: `config.json` as it was written, or the fields of a configuration; None when it could not be read.
        headers: The headers of all tensors; None when they could not be read.
        base_model: The target, where the configuration or the model card names it.
        unreadable: Rule id -> what went wrong while reading.
        folder: Where the weights are; None where only their headers were fetched.
    """

    name: str
    revision: str | None = None
    files: frozenset[str] = frozenset()
    config: dict[str, Any] | None = None
    headers: TensorHeaders | None = None
    base_model: str | None = None
    unreadable: dict[str, Finding] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def raw(self) -> dict[str, Any]:
        return self.config or {}

    @property
    def nested(self) -> dict[str, Any]:
        inner = self.raw.get("dflash_config")
        return inner if isinstance(inner, dict) else {}

    def value(self, name: str) -> Any:
        """The value engines take: that of `dflash_config`, else the top level's."""
        inner = self.nested.get(name)
        return self.raw.get(name) if inner is None else inner

    @property
    def is_foreign(self) -> bool:
        return self.raw.get("model_type") not in (None, "qwen3")

    @property
    def block_size(self) -> int | None:
        value = self.value("block_size")
        return value if is_integer(value) and value >= 2 else None

    @property
    def taps(self) -> list[int] | None:
        value = self.value("target_layer_ids")
        return value if isinstance(value, list) and value and all(is_integer(tap) for tap in value) else None

    @property
    def rope(self) -> dict[str, Any]:
        """`rope_parameters` (transformers 5) and `rope_scaling` (4.57), whichever are written."""
        given = {name: self.raw[name] for name in ("rope_parameters", "rope_scaling") if self.raw.get(name)}
        return {name: _renamed_type(value) if isinstance(value, dict) else value for name, value in given.items()}

    @cached_property
    def expected(self) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of the tensors the configuration asks for; None when its sizes do not tell."""
        if self.taps is None or any(_size_wanted(name, self.raw.get(name)) for name in SIZES):
            return None
        return expected_tensors({**self.raw, "target_layer_ids": self.taps})

    @cached_property
    def bare_headers(self) -> TensorHeaders:
        """The headers under names without the prefix "model.", which SGLang and transformers strip."""
        return {name.removeprefix("model."): header for name, header in (self.headers or {}).items()}


# What a rule yields: what readers make of a fault, why the loader refuses it, None where nothing can be told.
Said = Iterator[Finding | str | None]


@dataclass(frozen=True)
class Rule:
    """One requirement.

    Args:
        id: Its name in reports.
        title: The requirement in a few words.
        readers: Whom it concerns.
        look: Yields what is wrong with a checkpoint, for the report and for the loader.
    """

    id: str
    title: str
    readers: tuple[str, ...]
    look: Callable[[Checkpoint], Said]

    def check(self, checkpoint: Checkpoint) -> list[Finding] | None:
        """What violates it; None when that cannot be told."""
        said = list(self.look(checkpoint))
        return None if None in said else [finding for finding in said if isinstance(finding, Finding)]


def others(*readers: str) -> tuple[str, ...]:
    """All readers but these."""
    return tuple(reader for reader in ALL if reader not in readers)


def enumerate_some(items: Iterable[str], limit: int = 4) -> str:
    """The first few of many names."""
    items = list(items)
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def show(value: Any) -> str:
    """A value as `config.json` spells it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def _is_flat(rope: Any) -> bool:
    return isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())


def _renamed_type(rope: dict[str, Any]) -> dict[str, Any]:
    return {("rope_type" if name == "type" else name): value for name, value in rope.items()}


def _without_theta(rope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def _absent(
    name: str, why: str, remedy: str, errors: tuple[str, ...] = ALL, warnings: tuple[str, ...] = ()
) -> Finding:
    return Finding(f"no {name}", "the field in config.json", why, remedy, errors, warnings)


def _missing(name: str) -> str:
    return (
        f"{name} is missing: readers would fill in a value of their own. Write it into config.json as it was trained."
    )


def _not_an_integer(name: str, value: Any) -> str:
    return f"{name} is {value!r}: expected an integer. Write the number itself."


# --- Rules on what kind of model `config.json` describes: its class, sizes and layers.


def _architectures(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("architectures")
    if given == ["DFlashDraftModel"]:
        return
    second = given == ["DFlash2DraftModel"]
    refusing = () if second else SERVERS
    yield Finding(
        f"architectures={show(given)}",
        'architectures=["DFlashDraftModel"]',
        "vLLM and SGLang look up the drafter's class by this name.",
        "Set it if the tensors are those of a DFlash drafter; else use the code that made the checkpoint.",
        errors=refusing if given is None else (*refusing, "transformers"),
        warnings=SERVERS if second else (),
    )
    if given is not None:
        yield (
            f"architectures is {given}: expected ['DFlashDraftModel'], the only layout this package trains (DFlash 2, "
            "DSpark, DFlare and others compute something else). Use the code that made the checkpoint."
        )


def _layout(checkpoint: Checkpoint) -> Said:
    vocab_size = checkpoint.raw.get("vocab_size")
    for where, fields in (("", checkpoint.raw), ("dflash_config.", checkpoint.nested)):
        for name, layout in OTHER_LAYOUTS.items():
            if fields.get(name):
                yield from _other_layout(f"{where}{name}", fields[name], layout)
        drafted = fields.get("draft_vocab_size")
        if drafted is not None and drafted != vocab_size:
            yield Finding(
                f"{where}draft_vocab_size={show(drafted)}, vocab_size={show(vocab_size)}",
                "the target's vocabulary",
                "Only vLLM maps a vocabulary of the drafter's own; the others use the target's head.",
                "Serve it with vLLM, after checking that d2t is among the tensors.",
                errors=others("vLLM"),
                warnings=("vLLM",),
            )
            yield (
                f"{where}draft_vocab_size is {drafted} and vocab_size is {vocab_size}: a vocabulary of the drafter's "
                "own is not supported, since the target's head is used. Use the code that made the checkpoint."
            )


def _other_layout(name: str, value: Any, layout: str) -> Said:
    served, foreign = _SERVED_BY.get(layout, ()), layout == "speculators"
    unchecked = f" {enumerate_some(served)} may have code for it, which these rules do not check." if served else ""
    yield Finding(
        f"{name}={show(value)}",
        "DFlash: slot k drafts the token at its own position, and only the target's head follows",
        f"This announces {layout}.{unchecked}",
        "Convert it first." if foreign else "Serve it as the project that made it says.",
        errors=others(*served),
        warnings=served,
    )
    way_out = "convert it with dflash_hf.convert_speculators" if foreign else "use the code that made the checkpoint"
    yield f"{name} is {value!r}: this is the layout of {layout}, which is not the one trained here; {way_out}."


def _model_type(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("model_type")
    why = "The servers and dflash's command line read config.json through AutoConfig, which finds its class by it."
    remedy = 'Write model_type="qwen3", as published drafters have it.'
    if given is None:
        yield _absent("model_type", why, remedy, STRICT, ("z-lab",))
        yield _missing("model_type")
    elif not isinstance(given, str) or given not in CONFIG_MAPPING:
        expected = "a type that transformers knows"
        yield Finding(f"model_type={show(given)}", expected, why, remedy, SERVERS, others(*SERVERS))


def _dflash_config(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("dflash_config", {})
    if not isinstance(given, dict):
        yield Finding(
            f"dflash_config={show(given)}",
            "an object, or no such field",
            "dflash looks fields up in it without a check."
            if given is None
            else "Every reader looks fields up in it.",
            'Write "dflash_config": {"target_layer_ids": [...], "mask_token_id": ...}.',
            errors=("z-lab",) if given is None else ALL,
        )


def _sizes(checkpoint: Checkpoint) -> Said:
    given = {name: checkpoint.raw.get(name) for name in (*SIZES, "rms_norm_eps")}
    remedy = "Write it as it was trained."
    lacking = [name for name, value in given.items() if value is None]
    if lacking:
        why = "Readers fill in the defaults of the model type, and the tensors do not fit or are read wrongly."
        yield _absent(enumerate_some(lacking, 9), why, remedy)
        yield from map(_missing, lacking)
    wanted = {name: _size_wanted(name, value) for name, value in given.items() if value is not None}
    for name, expected in wanted.items():
        if expected is not None:
            found = f"{name}={show(given[name])}"
            yield Finding(found, "a plausible positive number", "It is a size.", remedy)
            yield f"{name} is {given[name]!r}: expected {expected}"
    heads: Any = given["num_attention_heads"]
    shared: Any = given["num_key_value_heads"]
    if not lacking and not any(wanted.values()) and heads % shared:
        found = f"num_attention_heads={heads}, num_key_value_heads={shared}"
        yield Finding(found, "a multiple", "Query heads share keys in equal groups.", remedy)
        yield (
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}: query heads share keys "
            "in equal groups. Write both as they were trained."
        )


def _size_wanted(name: str, value: Any) -> str | None:
    """What a size should be, where it is something else."""
    if name == "rms_norm_eps":
        return None if _is_positive(value) else "a positive number. Write the number itself."
    if not is_integer(value):
        return "an integer. Write the number itself."
    if name == "num_hidden_layers" and value > MAX_LAYERS:
        return f"at most {MAX_LAYERS}. Write it as it was trained."
    return None if value > 0 else "a positive number. Write it as it was trained."


def _field_types(checkpoint: Checkpoint) -> Said:
    raw = checkpoint.raw
    # Sizes and layer types have rules of their own; token ids are held against the vocabulary.
    typed = {field.name for field in dataclasses.fields(Qwen3Config)} - {*SIZES, "layer_types"}
    typed |= {"vocab_size"} if is_integer(raw.get("vocab_size")) else set()
    given = {name: raw[name] for name in sorted(raw.keys() & typed)}
    if _type_problem(given) is not None:
        # One field at a time, since the class stops at the first.
        problems = [problem for name, value in given.items() if (problem := _type_problem({name: value})) is not None]
        if problems:
            yield Finding(
                "\n".join(problems),
                "values of the declared types",
                "Every reader reads config.json through a configuration class, and those of transformers 5 check "
                "types.",
                "Write a value of the right type, or remove the field.",
            )
    for name in ("attention_bias", "use_sliding_window"):
        if raw.get(name) is not None and not isinstance(raw[name], bool):
            yield f"{name} is {raw[name]!r}: expected true or false."
    if checkpoint.is_foreign and raw.get("attention_bias") is None:
        yield _derived("attention_bias", raw)
    dtypes = _dtype_names(raw)
    if len({*dtypes.values()}) > 1:
        yield f"dtype and torch_dtype differ, {dtypes}: readers differ in which one they apply. Keep one."
    dtype = next(iter(dtypes.values()), None)
    if dtype is not None and dtype not in WEIGHT_DTYPES.values():
        known = list(WEIGHT_DTYPES.values())
        yield f"dtype is {dtype!r}: expected one of {known}. Save the drafter in one of them."


def _type_problem(given: dict[str, Any]) -> str | None:
    """What transformers' configuration class says of the type of a field."""
    try:
        Qwen3Config(**copy.deepcopy(given))
    except StrictDataclassFieldValidationError as error:
        return str(error).splitlines()[-1].strip()
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassClassValidationError) as error:
        return None if len(given) == 1 else str(error)
    return None


def _dtype_names(raw: dict[str, Any]) -> dict[str, str]:
    """The dtype in both spellings, of transformers 5 and of 4."""
    return {n: str(raw[n]).removeprefix("torch.") for n in ("dtype", "torch_dtype") if raw.get(n) is not None}


def _derived(name: str, raw: dict[str, Any]) -> str:
    """A field is missing that readers do not derive alike."""
    return (
        f"{name} is missing, which readers derive in different ways where model_type is {raw.get('model_type')!r} and "
        f"use_sliding_window is {raw.get('use_sliding_window')}: write it into config.json as it was trained."
    )


def _activation(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("hidden_act")
    if given not in (None, "silu"):
        yield Finding(
            f"hidden_act={show(given)}",
            'hidden_act="silu"',
            "The servers' MLP computes SiLU and refuses every other name.",
            "Correct the name if the drafter was trained with SiLU; serve it with dflash otherwise.",
            errors=STRICT,
        )
        yield _applied_by_some("hidden_act", given, "silu")


def _layer_types(checkpoint: Checkpoint) -> Said:
    raw = checkpoint.raw
    kinds, number = raw.get("layer_types"), raw.get("num_hidden_layers")
    remedy = "Write one entry per layer as it was trained."
    if kinds is None:
        if checkpoint.is_foreign or raw.get("use_sliding_window"):
            errors = STRICT if checkpoint.is_foreign else ("transformers",)
            why = "Readers derive it from the defaults of the model type, use_sliding_window and max_window_layers."
            yield _absent("layer_types", why, remedy, errors, others(*errors))
            yield _derived("layer_types", raw)
        return
    is_list = isinstance(kinds, list)
    unknown = sorted({str(kind) for kind in kinds} - {*LAYER_TYPES}) if is_list else []
    if not is_list or unknown or len(kinds) != number:
        expected = f"{number} entries out of {enumerate_some(LAYER_TYPES)}"
        why = "Most readers refuse a layer of another kind or a list of another length, and the rest misread it."
        yield Finding(f"layer_types={show(kinds)}", expected, why, remedy)
    if not is_list:
        yield f"layer_types is {kinds!r}: expected a list with one entry per layer."
    if unknown:
        yield f"layer_types holds {unknown}: every layer must be one of {list(LAYER_TYPES)}."
    if is_list and len(kinds) != number:
        yield (
            f"layer_types has {len(kinds)} entries and num_hidden_layers is {number}: one per layer is needed. "
            "Correct whichever is wrong."
        )


def _sliding_window(checkpoint: Checkpoint) -> Said:
    raw, block_size = checkpoint.raw, checkpoint.block_size
    window: Any = raw.get("sliding_window")
    kinds, switch = raw.get("layer_types"), raw.get("use_sliding_window")
    if window is not None and not is_integer(window):
        yield _not_an_integer("sliding_window", window)
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return
    remedy = "Write use_sliding_window=true and the sliding_window that the drafter was trained with."
    if not switch:
        found = f"use_sliding_window={show(switch)} beside sliding_attention layers"
        why = "Qwen3's configuration then drops the window: vLLM and SGLang refuse, dflash lets the layers see all."
        errors, warnings = (("z-lab", "transformers"), SERVERS) if checkpoint.is_foreign else (ALL, ())
        yield Finding(found, "use_sliding_window=true", why, remedy, errors, warnings)
    if not is_integer(window) or window < 1:
        found = f"sliding_window={show(window)} beside sliding_attention layers"
        why = "vLLM and SGLang refuse; dflash lets these layers see the whole context."
        yield Finding(found, "a number of tokens", why, remedy)
    elif block_size is not None and window < block_size:
        found, why = (
            f"sliding_window={window}, block_size={block_size}",
            "Late slots of a block do not see the anchor.",
        )
        yield Finding(found, "a window of at least one block", why, remedy, ("transformers",), ENGINES)
    if not switch or window is None:
        yield (
            f"layer_types holds sliding_attention but use_sliding_window={switch} and sliding_window={window}: "
            "readers would drop the window silently. Set use_sliding_window=True and sliding_window, or make every "
            "layer full_attention."
        )
    elif is_integer(window) and window < (block_size or 1):
        yield (
            f"sliding_window={window} is smaller than block_size={block_size}: slots of one block would not see their "
            "anchor. Use a window of at least one block."
        )


def _causality(checkpoint: Checkpoint) -> Said:
    top, kinds = checkpoint.raw.get("is_causal"), checkpoint.raw.get("layer_types")
    if top is not None and not isinstance(top, bool):
        why = 'Engines take its truth value, so that the word "false" means true.'
        yield Finding(f"is_causal={show(top)}", "true, false or no such field", why, "Correct it.")
        yield f"is_causal is {top!r}: expected true or false."
    by_layer = {kind == "sliding_attention" for kind in kinds} if isinstance(kinds, list) else {False}
    for name in ("causal", "is_causal"):
        inner = checkpoint.nested.get(name)
        if inner is None or inner == top or (top is None and isinstance(inner, bool) and by_layer == {inner}):
            continue
        reading = ("vLLM",) if name == "causal" and top is None else ()
        yield Finding(
            f"dflash_config.{name}={show(inner)}, is_causal={show(top)} at the top level",
            "is_causal at the top level, or no such field where only sliding layers are causal",
            f"SGLang and dflash read only the top level{'; vLLM also reads this one' if reading else ''}.",
            f"Write is_causal={show(inner)} at the top level if it was trained so; else remove the nested one.",
            errors=("transformers",),
            warnings=others("transformers", *reading),
        )
        yield (
            f"dflash_config.{name} is {inner} and is_causal at the top level is {top}: some readers apply the first, "
            f"others only the second. Write is_causal={inner} at the top level if the drafter was trained so, else "
            f"remove dflash_config.{name}."
        )


# --- Rules on the rotary embedding that `config.json` describes.


def _rope_theta(checkpoint: Checkpoint) -> Said:
    raw, rope = checkpoint.raw, checkpoint.rope
    expected = "one positive base and one kind of scaling"
    remedy = "Write rope_theta and rope_parameters with the base that the drafter was trained with."
    for name, value in rope.items():
        if not _is_flat(value):
            why = "A drafter's layers all rotate alike."
            yield Finding(f"{name}={show(value)}", "one flat set of values", why, remedy)
            yield f"{name} is {value!r}: expected one flat set of values, since all layers rotate alike."
            return
    written = _rope_bases(raw, rope)
    kinds = [_without_theta(value) for value in rope.values()]
    if not written:
        yield _absent("rope_theta", "Readers fill in 10,000, or the base of a foreign model_type.", remedy)
    elif not all(_is_positive(base) for base in written.values()) or len({*written.values()}) > 1 or _differ(kinds):
        bases = {name if name == "rope_theta" else f"{name}.rope_theta": base for name, base in written.items()}
        found = ", ".join(f"{name}={show(value)}" for name, value in {**rope, **bases}.items())
        yield Finding(found, expected, "Readers differ in which one they apply.", remedy)
    yield from _rope_refusals(rope, {name: base for name, base in written.items() if base is not None}, kinds)


def _rope_bases(raw: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The base of the rotary embedding by each field that has one."""
    bases = {name: value["rope_theta"] for name, value in rope.items() if "rope_theta" in value}
    return bases if raw.get("rope_theta") is None else {**bases, "rope_theta": raw["rope_theta"]}


def _differ(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)


def _rope_refusals(rope: dict[str, Any], bases: dict[str, Any], kinds: list[dict[str, Any]]) -> Iterator[str]:
    """What the loader refuses: no base, several, or one that it cannot use; two kinds of scaling or an unknown one."""
    if not bases:
        yield (
            "rope_theta is missing, here and in rope_parameters: readers would fill in a base of their own. Write the "
            "base that the drafter was trained with (10000000 for Qwen3.5 and 3.6)."
        )
    elif _differ([*bases.values()]):
        yield f"rope_theta has several values, {bases}: readers differ in which one they apply. Keep one."
    elif not _is_positive(base := next(iter(bases.values()))):
        yield f"rope_theta is {base!r}: expected a positive number. Write the number itself."
    if _differ(kinds):
        yield (
            f"rope_parameters is {rope['rope_parameters']} and rope_scaling is {rope['rope_scaling']}: readers differ "
            "in which one they apply. Keep one, or make them equal."
        )
    for kind in kinds[:1]:
        if kind.get("rope_type") not in (None, *ROPE_TYPES):
            yield f"rope_type is {kind['rope_type']!r}: expected one of {list(ROPE_TYPES)}."


def _rope_in_full(checkpoint: Checkpoint) -> Said:
    model_type = checkpoint.raw.get("model_type")
    flat = [value for value in checkpoint.rope.values() if _is_flat(value)]
    scaled = [kind for kind in map(_without_theta, flat) if kind and "rope_type" not in kind]
    if scaled:
        yield f"RoPE has {scaled[0]} and no rope_type: readers would guess or ignore them. Write rope_type."
    if not checkpoint.is_foreign or any("rope_type" in value for value in flat):
        return
    yield Finding(
        f"model_type={show(model_type)} without rope_parameters.rope_type",
        'rope_parameters={"rope_type": "default", "rope_theta": ...}',
        "AutoConfig fills in the scaling of the model type (YaRN for gpt_oss), and dflash does not.",
        "Write rope_parameters in full, as the drafter was trained.",
        errors=STRICT,
    )
    yield (
        f"model_type is {model_type!r} and RoPE is not written in full: readers would fill in the type's own scaling. "
        "Write rope_parameters with rope_type and rope_theta, as the drafter was trained."
    )


def _whole_heads(checkpoint: Checkpoint) -> Said:
    inner = {f"{n}.": checkpoint.raw.get(n) for n in ("rope_parameters", "rope_scaling", "dflash_config")}
    places = {"": checkpoint.raw, **{where: fields for where, fields in inner.items() if isinstance(fields, dict)}}
    for where, fields in places.items():
        for name, neutral in PARTIAL_ROTATION.items():
            if fields.get(name) not in neutral:
                yield Finding(
                    f"{where}{name}={show(fields[name])}",
                    "a plain rotary embedding",
                    "SGLang and dflash rotate the whole head by one position, whatever the target does.",
                    "Remove it if it was copied from the target; no reader serves a drafter trained with it.",
                )
                yield _applied_by_some(f"{where}{name}", fields[name], neutral[-1])


# --- Rules on the drafter's own fields: block, taps, mask token, and where each of them is written.


def _block_size(checkpoint: Checkpoint) -> Said:
    value = checkpoint.value("block_size")
    if value is None:
        why = "dflash and SGLang then draft 16 slots; vLLM is told a number, and nothing says which."
        yield _absent("block_size", why, "Write it as it was trained.", others("vLLM"), ("vLLM",))
        yield _missing("block_size")
    elif checkpoint.block_size is None:
        why = "A block holds the known anchor and at least one slot to draft."
        yield Finding(f"block_size={show(value)}", "an integer of at least 2", why, "Correct it.")
        if is_integer(value):
            yield (
                f"block_size is {value}: a block holds the known anchor and at least one slot to draft, so it must be "
                "at least 2."
            )
        else:
            yield _not_an_integer("block_size", value)


def _target_layer_ids(checkpoint: Checkpoint) -> Said:
    value, remedy = checkpoint.value("target_layer_ids"), "Write the layers that the drafter was trained on."
    if checkpoint.taps is not None:
        return
    if value is None:
        why = "dflash and SGLang guess layers from the depths, and vLLM has a default: the features are others."
        yield _absent("dflash_config.target_layer_ids", why, remedy)
    else:
        why = "They index the target's layers."
        yield Finding(f"target_layer_ids={show(value)}", "a list of layer indices", why, remedy)
    if value:
        yield f"target_layer_ids is {value!r}: expected a list of layer indices."
    else:
        yield (
            "target_layer_ids is missing: give the 0-based target layers the drafter reads, or build the "
            "configuration with DFlashDraftConfig.from_target_config(target_config, mask_token_id=...)."
        )


def _tap_order(checkpoint: Checkpoint) -> Said:
    taps = checkpoint.taps
    if taps is None:
        yield None
    elif any(b <= a for a, b in pairwise(taps)):
        why = "vLLM and SGLang collect features in the order of the layers, whatever the order of this list."
        remedy = "Sort the list, and the column blocks of fc.weight with it."
        yield Finding(f"target_layer_ids={taps}", "ascending, each layer once", why, remedy, errors=STRICT)
        yield f"target_layer_ids={taps} must be unique and ascending, as every reader expects them."


def _tap_range(checkpoint: Checkpoint) -> Said:
    taps = checkpoint.taps
    depth: Any = checkpoint.value("num_target_layers")
    if taps is None or (min(taps) >= 0 and not is_integer(depth)):
        yield None
        return
    found = f"target_layer_ids={taps}, num_target_layers={show(depth)}"
    remedy = "Correct whichever is wrong. A drafter trained on the last layer has to be trained again."
    if min(taps) < 0:
        why = "Some read a negative index from the end, others refuse it."
        yield Finding(found, "indices from 0", why, remedy)
    elif max(taps) >= depth:
        yield Finding(found, f"indices up to {depth - 2}", "The target has no such layer.", remedy)
    elif max(taps) == depth - 1:
        why = "SGLang cannot read after the last layer; vLLM reads before the final norm, dflash after it."
        errors = ("SGLang", "transformers")
        yield Finding(found, f"indices up to {depth - 2}", why, remedy, errors, others(*errors))
    if is_integer(depth) and (min(taps) < 0 or max(taps) >= depth - 1):
        yield (
            f"target_layer_ids={taps} must lie in 0..{depth - 2} for a target of {depth} layers. The last layer "
            f"({depth - 1}) is refused because engines disagree on whether its output is read before or after the "
            "final norm."
        )


def _num_target_layers(checkpoint: Checkpoint) -> Said:
    depth, name = checkpoint.value("num_target_layers"), "num_target_layers"
    remedy = "Write the number of decoder layers of the target at the top level."
    if depth is None:
        why = "dflash stops without it, and SGLang checks target_layer_ids against it."
        yield _absent(name, why, remedy, ("z-lab", "transformers"), ("SGLang",))
        yield "num_target_layers is missing: give the number of decoder layers of the target."
    elif not is_integer(depth) or depth < 2:
        yield Finding(f"{name}={show(depth)}", "a number of layers", "It is a depth.", remedy, others("vLLM"))
        if not is_integer(depth):
            yield _not_an_integer(name, depth)
    elif checkpoint.raw.get(name) is None:
        yield _absent(f"{name} at the top level", "dflash reads it only there.", remedy, ("z-lab",))


def _mask_token_id(checkpoint: Checkpoint) -> Said:
    mask = checkpoint.value("mask_token_id")
    vocab_size: Any = checkpoint.raw.get("vocab_size")
    found, remedy = f"mask_token_id={show(mask)}", "Write the id that the drafter was trained with."
    eos, pad = checkpoint.raw.get("eos_token_id"), checkpoint.raw.get("pad_token_id")
    if mask is None:
        why = "vLLM and dflash stop; SGLang takes the id of a token <|MASK|>, which it may add to the tokenizer."
        yield _absent("dflash_config.mask_token_id", why, remedy)
        yield (
            "mask_token_id is missing: give a token id within the target's vocabulary that its texts do not use (a "
            "reserved special token, or a row of the embedding past the tokenizer's last id)."
        )
    elif not is_integer(mask) or mask < 0 or (is_integer(vocab_size) and mask >= vocab_size):
        why = "Its row of the target's embedding stands for a slot to be drafted."
        yield Finding(found, f"an id below vocab_size={vocab_size}", why, remedy)
        if not is_integer(mask):
            yield _not_an_integer("mask_token_id", mask)
        elif is_integer(vocab_size):
            rows = f"the target's embedding of {vocab_size} rows"
            yield f"mask_token_id={mask} is outside {rows}; choose an id in 0..{vocab_size - 1}."
    elif mask == pad or mask in (eos if isinstance(eos, list) else [eos]):
        why = "A slot to be drafted looks like the end of the text."
        expected = "a reserved token that texts do not use"
        yield Finding(f"{found}, the eos or pad token", expected, why, remedy, ("transformers",), ENGINES)
        yield (
            f"mask_token_id={mask} equals the eos or pad token (eos_token_id={eos}, pad_token_id={pad}): a slot to "
            "draft would look like the end of the text. Choose a reserved token that texts do not use."
        )


def _same_spelling(checkpoint: Checkpoint) -> Said:
    # vLLM takes the block size from its command line and the depth from the target.
    unread = {"block_size": ("vLLM",), "num_target_layers": ("vLLM",)}
    for name, inner in checkpoint.nested.items():
        top = checkpoint.raw.get(name)
        if top is None or inner == top or name == "is_causal":
            continue
        skipped = (*unread.get(name, ()), *(("transformers",) if inner is None else ()))
        yield Finding(
            f"{name}={show(top)} at the top level and {show(inner)} in dflash_config",
            "one value",
            "Readers differ in which one they apply, and nothing says which one was trained.",
            "Remove one of them.",
            errors=others(*skipped),
        )
        if inner is not None:
            yield (
                f"{name} is {top} at the top level and {inner} in dflash_config: readers differ in which one they "
                "apply. Keep one of them, or make them equal."
            )


def _both_spellings(checkpoint: Checkpoint) -> Said:
    raw, nested, remedy = checkpoint.raw, checkpoint.nested, "Write it there too."
    if raw.get("block_size") is None and nested.get("block_size") is not None:
        why = "generate() reads config.block_size, which only this package's configuration finds in dflash_config."
        yield _absent("block_size at the top level", why, remedy, (), ("transformers",))
    flat = [n for n in ("target_layer_ids", "mask_token_id") if nested.get(n) is None and raw.get(n) is not None]
    if flat:
        why = "Published drafters have it there, and releases of vLLM differ in whether they look elsewhere."
        yield _absent(f"{enumerate_some(flat)} in dflash_config", why, remedy, (), ("vLLM",))
    parameters = raw.get("rope_parameters")
    if raw.get("rope_theta") is None and isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        why = "Readers on transformers 4 do not know rope_parameters and rotate with a base of 10,000."
        yield _absent("rope_theta at the top level", why, remedy, (), ENGINES)


def _partly_read(checkpoint: Checkpoint) -> Said:
    for where, fields in (("", checkpoint.raw), ("dflash_config.", checkpoint.nested)):
        for name, (neutral, applying, in_part) in PARTLY_READ.items():
            if fields.get(name) in neutral:
                continue
            reading = " and ".join((*applying, *(f"some releases of {reader}" for reader in in_part)))
            yield Finding(
                f"{where}{name}={show(fields[name])}",
                f"no such field, or {show(neutral[-1])}",
                f"Only {reading} would apply it; the others ignore it without a word.",
                "Remove it if the drafter was trained without it; else use only readers that apply it.",
                errors=others(*applying, *in_part),
                warnings=in_part,
            )
            yield _applied_by_some(f"{where}{name}", fields[name], neutral[-1])


def _applied_by_some(name: str, value: Any, neutral: Any) -> str:
    return (
        f"{name} is {value!r}: some readers apply it and others ignore it, so the drafter would compute different "
        f"things in each. Only {neutral!r} is supported; remove the field if the drafter was trained without it."
    )


def _mask_embedding(checkpoint: Checkpoint) -> Said:
    if "mask_embedding.pt" in checkpoint.files:
        yield Finding(
            "a file mask_embedding.pt",
            "slots that use the target's embedding of mask_token_id",
            "Only vLLM and some releases of SGLang put this vector in place of the target's own.",
            "Remove it if the drafter was trained without it; else use only readers that apply it.",
            errors=("z-lab", "transformers"),
            warnings=("SGLang",),
        )
        yield (
            "mask_embedding.pt holds an embedding for mask slots that some readers apply and others ignore. Remove it "
            "if the drafter was trained with the target's own embedding of mask_token_id."
        )


def _eagle_taps(checkpoint: Checkpoint) -> Said:
    shifted, taps = checkpoint.value(EAGLE_TAPS), checkpoint.taps
    if not shifted:
        return
    agrees = taps is not None and shifted == [tap + 1 for tap in taps]
    yield Finding(
        f"{EAGLE_TAPS}={show(shifted)}, target_layer_ids={taps}",
        f"no {EAGLE_TAPS}",
        "vLLM prefers it and counts from the embeddings, that is one higher; the others ignore it.",
        "Remove it, after checking that target_layer_ids holds the layers the drafter was trained on.",
        errors=("transformers",) if agrees else ("vLLM", "transformers"),
        warnings=("vLLM",) if agrees else (),
    )
    yield _applied_by_some(EAGLE_TAPS, shifted, [])


def _remote_code(checkpoint: Checkpoint) -> Said:
    auto_map = checkpoint.raw.get("auto_map")
    for name, reference in auto_map.items() if isinstance(auto_map, dict) else ():
        path = f"{str(reference).split('.')[0]}.py"
        # "owner/name--module.Class" lies in another repository.
        if isinstance(reference, str) and path not in checkpoint.files and "--" not in path:
            yield Finding(
                f"auto_map names {show(reference)} for {name}, and there is no {path}",
                f"the file {path}, or no such entry",
                "trust_remote_code=True fails on it; without it AutoModel needs `import dflash_hf` before.",
                f"Remove the entry, or copy {path}.",
                errors=(),
                # The servers read the configuration through AutoConfig, but bring a model class of their own.
                warnings=STRICT if name == "AutoConfig" else ("transformers",),
            )


CONFIG_RULES = (
    Rule("architectures", "the class the servers look up", STRICT, _architectures),
    Rule("layout", "no other kind of drafter", ALL, _layout),
    Rule("model_type", "a type that AutoConfig knows", ALL, _model_type),
    Rule("dflash_config", "an object", ALL, _dflash_config),
    Rule("sizes", "all sizes, and heads that divide", ALL, _sizes),
    Rule("field_types", "values of the declared types", ALL, _field_types),
    Rule("activation", "SiLU", STRICT, _activation),
    Rule("layer_types", "one known kind per layer", ALL, _layer_types),
    Rule("sliding_window", "a window for sliding layers", ALL, _sliding_window),
    Rule("causality", "said where every reader looks", ALL, _causality),
    Rule("rope_theta", "one base of the rotary embedding", ALL, _rope_theta),
    Rule("rope_in_full", "no scaling of a foreign type", STRICT, _rope_in_full),
    Rule("whole_heads", "no partial rotary embedding", ALL, _whole_heads),
    Rule("block_size", "at least two slots", ALL, _block_size),
    Rule("target_layer_ids", "a list of layers", ALL, _target_layer_ids),
    Rule("tap_order", "ascending, each layer once", STRICT, _tap_order),
    Rule("tap_range", "layers before the last one", ALL, _tap_range),
    Rule("num_target_layers", "the target's depth", others("vLLM"), _num_target_layers),
    Rule("mask_token_id", "an id inside the vocabulary", ALL, _mask_token_id),
    Rule("same_spelling", "two spellings agree", ALL, _same_spelling),
    Rule("both_spellings", "written where each reader looks", ALL, _both_spellings),
    Rule("partly_read", "no field that only some apply", ALL, _partly_read),
    Rule("mask_embedding", "no file mask_embedding.pt", others("vLLM"), _mask_embedding),
    Rule("eagle_taps", "no second list of taps", ("vLLM", "transformers"), _eagle_taps),
    Rule("remote_code", "auto_map names files that exist", STRICT, _remote_code),
)
# What a configuration in memory is held to as well; the others are about how a file spells it.
_HELD_IN_MEMORY = (
    *(_sizes, _layer_types, _sliding_window, _causality, _rope_theta, _block_size),
    *(_target_layer_ids, _tap_order, _tap_range, _num_target_layers, _mask_token_id),
)


# --- Rules on the tensors, by their headers.


def _tensors_missing(checkpoint: Checkpoint) -> Said:
    expected = checkpoint.expected
    if expected is None:
        yield None
        return
    missing = [name for name in expected if name not in checkpoint.bare_headers]
    if missing:
        yield Finding(
            f"{len(missing)} of {len(expected)} tensors missing: {enumerate_some(missing)}",
            "every tensor that config.json asks for",
            "vLLM, SGLang and dflash go on with random values in their place and say little or nothing.",
            "Copy or save the drafter again, or correct config.json.",
        )


def _tensor_prefix(checkpoint: Checkpoint) -> Said:
    prefixed = [name for name in checkpoint.headers or {} if name.startswith("model.")]
    if prefixed:
        yield Finding(
            f'{len(prefixed)} names with the prefix "model.": {enumerate_some(prefixed)}',
            "names without prefix",
            "vLLM puts the prefix there itself and knows no such name; SGLang and dflash strip it.",
            "Rename the tensors.",
            errors=("vLLM", "transformers"),
        )


def _tensors_unexpected(checkpoint: Checkpoint) -> Said:
    expected = checkpoint.expected
    if expected is None:
        yield None
        return
    unexpected = [name for name in checkpoint.bare_headers if name not in expected]
    own = [name for name in unexpected if "embed_tokens" in name or "lm_head" in name]
    for names, errors, why in (
        (
            [name for name in unexpected if name not in own],
            ("vLLM", "transformers"),
            "vLLM refuses unknown names; SGLang and dflash ignore them.",
        ),
        (own, ("transformers",), "vLLM drafts with this embedding or head; SGLang and dflash ignore it."),
    ):
        if names:
            found = f"{len(names)} tensor(s) that config.json does not ask for: {enumerate_some(names)}"
            remedy = "Remove them if the drafter was trained without them, or correct config.json."
            yield Finding(found, "no other tensors", why, remedy, errors, others(*errors))


def _tensor_shapes(checkpoint: Checkpoint) -> Said:
    if checkpoint.expected is None:
        yield None
        return
    problems = shape_problems(checkpoint.expected, checkpoint.bare_headers)
    if problems:
        why = "Readers stop while they load the weights, most of them naming a fused parameter."
        remedy = "Correct whichever is wrong: config.json, or the code that saved the tensors."
        yield Finding(_first(problems), "the shapes that config.json asks for", why, remedy)


def _tensor_dtypes(checkpoint: Checkpoint) -> Said:
    headers = checkpoint.headers or {}
    strange = {name: header for name, header in headers.items() if header[0] not in WEIGHT_DTYPES}
    usual = {name: header for name, header in headers.items() if name not in strange}
    for part, errors, warnings, why in (
        (strange, ALL, (), "Readers cast it without its scales, so that the values mean something else."),
        (usual, ("transformers",), ENGINES, "The engines cast all of them to the dtype that they serve in."),
    ):
        problems = dtype_problems(part)
        if problems:
            expected = f"one of {enumerate_some(WEIGHT_DTYPES)} for all tensors"
            remedy = "Save the drafter in one dtype; published ones are in bfloat16."
            yield Finding(_first(problems), expected, why, remedy, errors, warnings)


def _first(problems: list[str], limit: int = 3) -> str:
    more = [f"... and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n".join(problems[:limit] + more)


TENSOR_RULES = (
    Rule("tensors_missing", "all tensors", ALL, _tensors_missing),
    Rule("tensor_prefix", "names without prefix", ("vLLM", "transformers"), _tensor_prefix),
    Rule("tensors_unexpected", "no other tensors", ALL, _tensors_unexpected),
    Rule("tensor_shapes", "shapes as config.json says", ALL, _tensor_shapes),
    Rule("tensor_dtypes", "bf16, fp16 or fp32, all alike", ALL, _tensor_dtypes),
)


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


def tensor_problems(expected: dict[str, tuple[int, ...]], found: TensorHeaders) -> list[str]:
    """One sentence for each missing, unexpected or wrongly shaped tensor and for each wrong dtype.

    Args:
        expected: From [`expected_tensors`].
        found: From [`read_tensor_headers`].
    """
    missing = [
        f"{name} is missing: readers that do not notice would run it with random values. Copy or save the drafter "
        "again."
        for name in expected
        if name not in found
    ]
    unexpected = [_unexpected(name, expected) for name in found if name not in expected]
    return [*missing, *unexpected, *shape_problems(expected, found), *dtype_problems(found)]


def _unexpected(name: str, expected: Iterable[str]) -> str:
    inner = next((known for known in expected if name.endswith(f".{known}")), None)
    if inner is not None:
        prefix = name.removesuffix(inner)
        return (
            f'{name} has the prefix "{prefix}": published drafters have none and engines refuse it. Rename it to '
            f"{inner}."
        )
    if name.split(".")[-1] in ("d2t", "t2d"):
        return f"{name} maps a vocabulary of the drafter's own, which is not supported: the target's head is used."
    return f"{name} is not a tensor of this configuration. Remove it, or correct config.json."


def shape_problems(expected: dict[str, tuple[int, ...]], found: TensorHeaders) -> list[str]:
    """Tensors whose shape is not the one expected; those that are not expected at all are not looked at."""
    problems = []
    for name, (_, shape) in found.items():
        wanted = expected.get(name, shape)
        if shape != wanted:
            transposed = ", which is its transpose" if shape == wanted[::-1] else ""
            problems.append(
                f"{name} has shape {list(shape)}{transposed}: config.json asks for {list(wanted)}. Correct whichever "
                "is wrong."
            )
    return problems


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


# --- What loading makes of the rules: one error with all problems, and one spelling of the configuration.


def refuse(headline: str, problems: list[str]) -> None:
    """Raise a `ValueError` with all problems, one a line, if there are any."""
    if problems:
        raise ValueError(problem_report(headline, problems))


def problem_report(headline: str, problems: list[str]) -> str:
    """One message for several problems."""
    return "\n".join([f"{headline}:", *(f"  - {problem}" for problem in problems)])


def _sentences(looks: Iterable[Callable[[Checkpoint], Said]], checkpoint: Checkpoint) -> list[str]:
    return [said for look in looks for said in look(checkpoint) if isinstance(said, str)]


def field_problems(config: dict[str, Any]) -> list[str]:
    """Values of a configuration in memory that contradict each other or the format, one sentence each.

    Args:
        config: Fields at the top level, the drafter's own ones included.
    """
    return _sentences(_HELD_IN_MEMORY, Checkpoint("", config=config))


def spelling_problems(config: dict[str, Any]) -> list[str]:
    """Fields that `dflash_config` repeats with another value, one sentence each."""
    return _sentences([_same_spelling], Checkpoint("", config=config))


def normalize_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Read a drafter's `config.json` in either spelling into one.

    Args:
        raw: The file as a dictionary: flat or nested, saved by transformers 4.57 or 5.

    Returns:
        A copy with `block_size`, `target_layer_ids`, `mask_token_id`, `num_target_layers`, `is_causal`, `dtype` (a
        name such as "bfloat16", or None) and `rope_parameters` (`rope_type`, `rope_theta`, ...) at the top level, and
        what else `dflash_config` holds still in it. `rope_theta`, `rope_scaling` and `torch_dtype` are gone.

    Raises:
        ValueError: With every problem found, one a line.
    """
    config, problems = read_config(raw)
    refuse("config.json is not that of a drafter this package can load", problems)
    return config


def read_config(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """[`normalize_config`] with the problems returned, for reports that go on to the tensors."""
    if not isinstance(raw, dict):
        return {}, [f"config.json holds {raw!r}: expected an object with the fields of a drafter. Copy it again."]
    nested = raw.get("dflash_config")
    if nested is not None and not isinstance(nested, dict):
        return dict(raw), [f"dflash_config is {nested!r}: expected an object such as {{'mask_token_id': 151669}}."]
    checkpoint = Checkpoint("", config=raw)
    problems = _sentences((rule.look for rule in CONFIG_RULES), checkpoint)
    config = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    for name in OWN_FIELDS:
        config[name] = checkpoint.nested.get(name) if raw.get(name) is None else raw[name]
    config["is_causal"] = raw.get("is_causal")
    moved = {*OWN_FIELDS, "causal", "is_causal"}
    config["dflash_config"] = {name: value for name, value in checkpoint.nested.items() if name not in moved}
    config["rope_parameters"] = _one_rope(checkpoint)
    config["dtype"] = next(iter(_dtype_names(raw).values()), None)
    return config, problems


def _one_rope(checkpoint: Checkpoint) -> dict[str, Any]:
    """One set of RoPE parameters out of `rope_theta`, `rope_scaling` and `rope_parameters`; empty if none is flat."""
    rope = checkpoint.rope
    if not all(_is_flat(value) for value in rope.values()):
        return {}
    kind = next((_without_theta(value) for value in rope.values()), {})
    bases = [base for base in _rope_bases(checkpoint.raw, rope).values() if base is not None]
    return {"rope_type": "default", **kind, **({"rope_theta": bases[0]} if bases else {})}


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
    checkpoint = Checkpoint(str(folder), config=config, files=frozenset(path.name for path in folder.iterdir()))
    problems += _sentences([_mask_embedding], checkpoint)
    try:
        found = read_tensor_headers(folder)
    except (FileNotFoundError, ValueError) as error:
        return [*problems, str(error)]
    if checkpoint.expected is None:
        return problems + dtype_problems(found)
    return problems + tensor_problems(checkpoint.expected, found)


# --- Folders, repositories and the headers of their tensors.


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
    left = (
        f" {folder}/merged is one, as recipes/adapt_drafter.py leaves it." if Path(folder, "merged").is_dir() else ""
    )
    return (
        f"Give the folder of the merged drafter.{left} To make one: "
        f"dflash_hf.adapters.merge_adapter({str(folder)!r}).save_pretrained(NEW_FOLDER, dtype=torch.bfloat16)."
    )


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


def state_dict_headers(state_dict: dict[str, torch.Tensor]) -> TensorHeaders:
    """The headers that the tensors of a model would have in a file."""
    spelled = {getattr(torch, name): code for code, name in WEIGHT_DTYPES.items()}
    return {name: (spelled.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in state_dict.items()}


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
    _check_index(folder, where)
    return headers


def _check_index(folder: Path, where: dict[str, str]) -> None:
    """Hold the index of shards against the file in which each tensor lies."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        shards = sorted({*where.values()} - {"model.safetensors"})
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
