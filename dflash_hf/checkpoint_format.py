# SPDX-License-Identifier: Apache-2.0
"""What a drafter's files must hold, as one table of rules; this file ships with every saved drafter as remote code.

A rule looks at a [`Checkpoint`], which is `config.json` as it was written and the headers of the tensors, and yields a
[`Finding`] for each fault. `dflash-hf validate` prints the findings reader by reader; `from_pretrained` refuses a
checkpoint for those that are errors for transformers, and says the same words.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import type_validator
from transformers import CONFIG_MAPPING, Qwen3Config

from .checkpoint_files import WEIGHT_DTYPES, TensorHeaders, read_tensor_headers


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
OURS = ("transformers",)

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "vocab_size"),
)
# More layers than any drafter has: a typing error must not make the reader list millions of tensors.
MAX_LAYERS = 1000
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# Fields that stand at the top level or in `dflash_config`.
OWN_FIELDS = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers")
# Of DFlash 2, which readers look up in `dflash_config` alone, and its class; a part, for studies, has a name that no
# server knows.
GEOMETRY = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
DFLASH2, DFLASH2_PART = "DFlash2DraftModel", "DFlash2PartDraftModel"
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
EAGLE_TAPS = "eagle_aux_hidden_state_layer_ids"

# Field -> the layout that it announces, unless its value is empty.
OTHER_LAYOUTS = {
    "sample_from_anchor": "DSpark (slot j predicts the token after it)",
    **dict.fromkeys(("dspark_config", "markov_rank", "markov_head_type"), "DSpark"),
    **dict.fromkeys(("enable_confidence_head", "use_confidence_head", "dspark_noise_token_id"), "DSpark"),
    "shift_label": "Domino or DSpark",
    **dict.fromkeys(("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"), "Domino"),
    "projector_type": "a projector of Model-Optimizer",
    **dict.fromkeys(GEOMETRY, "DFlash 2"),
    "dflare_config": "DFlare",
    **dict.fromkeys(("speculators_model_type", "speculators_config", "transformer_layer_config"), "speculators"),
}
# How names of fields begin that announce a layout.
_LAYOUT_PREFIXES = {"lilicorr_": "LiLiCorr", "xpress_": "XPress"}
# Another layout -> the readers that have code of their own for it.
_SERVED_BY = {"DFlash 2": ("z-lab",), "speculators": ("vLLM",), "LiLiCorr": ("SGLang",)}
# Classes of other drafters that servers know -> which servers (vLLM 0.32/0.33, SGLang 0.5.23).
_FOREIGN = {
    **dict.fromkeys(("LiLiCorrDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"), "SGLang"),
    **dict.fromkeys(("DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"), "vLLM 0.33 or SGLang"),
    "Qwen3XPressModel": "code of its own",
}
# Field -> (values that mean "not used", readers that apply it, readers of which only some releases do). The others
# ignore the field without a word.
PARTLY_READ: dict[str, tuple[tuple, tuple[str, ...], tuple[str, ...]]] = {
    "input_embedding_scale": ((None, 1), ("z-lab",), ()),
    "output_multiplier": ((None, 1), ("z-lab",), ()),
    "final_logit_softcapping": ((None, 0), ("z-lab",), ()),
    "logit_scale": ((None, 1), ("vLLM",), ()),
    # As vLLM 0.32/0.33 and SGLang 0.5.23 do. ModelOpt exports use_swa beside full layers: vLLM alone has windows then.
    "use_swa": ((None, False), ("vLLM",), ()),
    "swa_window_size": ((None,), ("vLLM",), ()),
    "attention_sink_bias": ((None, False), SERVERS, ()),
    "add_swa_attention_sink_bias": ((None, False), ("vLLM",), ()),
    "attention_value_scale": ((None, 1), SERVERS, ()),
    "use_aux_hidden_state": ((None, True), ("vLLM",), ()),
    "is_neox_style": ((None, True), SERVERS, ()),
    "rope_is_neox_style": ((None, True), ("SGLang",), ()),
    "quantization_config": ((None,), ("vLLM", "z-lab"), ()),
}
# Field of a rotary embedding that turns part of a head, or by several positions -> values that mean "not used".
PARTIAL_ROTATION: dict[str, tuple] = {
    "partial_rotary_factor": (None, 1),
    "mrope_section": (None,),
    "mrope_interleaved": (None, False),
}


def others(*readers: str) -> tuple[str, ...]:
    """All readers but these."""
    return tuple(reader for reader in ALL if reader not in readers)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, for whom, and what to do about it; `str` makes one text of it.

    Args:
        found: What the checkpoint says; one line a tensor.
        expected: What it should say.
        why: What the readers do with it.
        remedy: The way out.
        errors: Readers that refuse the checkpoint, or draft otherwise than it was trained; all by default.
        warnings: Readers that get by, in some releases or for the time being.
    """

    found: str
    expected: str
    why: str
    remedy: str = "Write it as the drafter was trained."
    errors: tuple[str, ...] = ALL
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}. {self.why} {self.remedy}"


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

    @property
    def levels(self) -> dict[str, dict[str, Any]]:
        """The fields of all levels by what stands before their names."""
        rope = {f"{name}.": value for name, value in self.rope.items() if isinstance(value, dict)}
        return {"": self.raw, "dflash_config.": self.nested, **rope}

    def value(self, name: str) -> Any:
        """The value that engines take: that of `dflash_config`, else the top level's."""
        inner = self.nested.get(name)
        return self.raw.get(name) if inner is None else inner

    @property
    def is_dflash2(self) -> bool:
        """Whether it is a DFlash 2 drafter, or a part of one, by its class."""
        return self.raw.get("architectures") in ([DFLASH2], [DFLASH2_PART])

    @property
    def is_foreign(self) -> bool:
        return self.raw.get("model_type") not in (None, "qwen3")

    @property
    def block_size(self) -> int | None:
        value = self.value("block_size")
        return value if _is_integer(value) and value >= 2 else None

    @property
    def taps(self) -> list[int] | None:
        value = self.value("target_layer_ids")
        return value if isinstance(value, list) and value and all(map(_is_integer, value)) else None

    @property
    def rope(self) -> dict[str, Any]:
        """`rope_parameters` (transformers 5) and `rope_scaling` (4.57), whichever are written."""
        given = {name: self.raw[name] for name in ("rope_parameters", "rope_scaling") if self.raw.get(name)}
        return {name: _renamed_type(value) if isinstance(value, dict) else value for name, value in given.items()}

    @property
    def rope_kinds(self) -> list[dict[str, Any]]:
        """What each flat one of `rope` says but for the base."""
        flat = [value for value in self.rope.values() if _is_flat(value)]
        return [{name: value for name, value in rope.items() if name != "rope_theta"} for rope in flat]

    @property
    def rope_bases(self) -> dict[str, Any]:
        """The base of the rotary embedding by each field that has one."""
        flat = {name: value for name, value in self.rope.items() if _is_flat(value)}
        bases = {name: value["rope_theta"] for name, value in flat.items() if "rope_theta" in value}
        return bases if self.raw.get("rope_theta") is None else {**bases, "rope_theta": self.raw["rope_theta"]}

    @cached_property
    def expected(self) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of the tensors that the configuration asks for; None when its sizes do not tell."""
        if self.taps is None or any(_size_wanted(name, self.raw.get(name)) for name in SIZES):
            return None
        geometry = {name: self.value(name) for name in GEOMETRY} if self.is_dflash2 else {}
        if self.is_dflash2 and not all(map(_is_integer, geometry.values())):
            return None
        return expected_tensors({**self.raw, **geometry, "target_layer_ids": self.taps})

    @cached_property
    def bare_headers(self) -> TensorHeaders:
        """The headers under names without the prefix "model.", which SGLang and transformers strip."""
        return {name.removeprefix("model."): header for name, header in (self.headers or {}).items()}


# What a rule yields: its findings, and None where nothing can be told.
Said = Iterator[Finding | None]
Look = Callable[[Checkpoint], Said]


@dataclass(frozen=True)
class Rule:
    """One requirement: its name in reports, itself in a few words, whom it concerns, and what finds its faults.

    Reports on other drafters leave out what is `of_dflash2`.
    """

    id: str
    title: str
    readers: tuple[str, ...]
    look: Look
    of_dflash2: bool = False

    def check(self, checkpoint: Checkpoint) -> list[Finding] | None:
        """What violates it; None when that cannot be told."""
        said = list(self.look(checkpoint))
        return None if None in said else [finding for finding in said if finding is not None]


def enumerate_some(items: Iterable[str], limit: int = 4) -> str:
    """The first few of many names."""
    items = list(items)
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def _is_flat(rope: Any) -> bool:
    return isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())


def _renamed_type(rope: dict[str, Any]) -> dict[str, Any]:
    return {("rope_type" if name == "type" else name): value for name, value in rope.items()}


def _differ(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)


_REMOVE = "Remove it if the drafter was trained without it; else use only readers that apply it."


def _field(name: str, value: Any, expected: str, why: str, *remedy_and_readers: Any) -> Finding:
    """A finding on the value of a field, or on the absence of one or more."""
    given = "missing" if value is None else _show(value)
    found = f"{name} {'are' if ', ' in name else 'is'} {given}"
    return Finding(found, expected, why, *remedy_and_readers)


# --- Rules on what kind of model `config.json` describes: its class, sizes and layers.


def _architectures(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("architectures")
    if given == [DFLASH2]:
        why = "generate(speculation_type='dflash') would draft with it as plain DFlash, without its selector."
        remedy = "Decode with generate(custom_generate=dflash_hf.generation.speculative_decoding, drafter=drafter)."
        yield _field("architectures", given, "as it is", why, remedy, (), OURS)
    elif given == [DFLASH2_PART]:
        why = "It is a part of DFlash 2, for studies, of which no engine has a class."
        yield _field("architectures", given, f"[{DFLASH2!r}]", why, "Train convolutions and a selector.", ENGINES)
    elif given != ["DFlashDraftModel"]:
        why = "vLLM and SGLang look up the drafter's class by this name."
        known = [name for name in _FOREIGN if isinstance(given, list) and name in given]
        why += "".join(f" {name} is another drafter, which {_FOREIGN[name]} runs." for name in known)
        remedy = "Set it if the tensors are those of a DFlash drafter; else use the code that made the checkpoint."
        errors = (*SERVERS, *(() if given is None else OURS))
        yield _field("architectures", given, "['DFlashDraftModel']", why, remedy, errors)


def _layout(checkpoint: Checkpoint) -> Said:
    vocab_size = checkpoint.raw.get("vocab_size")
    expected = "DFlash: slot k drafts the token at its own position, and only the target's head follows"
    for where, fields in checkpoint.levels.items():
        begun = {name: known for begin, known in _LAYOUT_PREFIXES.items() for name in fields if name.startswith(begin)}
        for name, layout in {**OTHER_LAYOUTS, **begun}.items():
            if fields.get(name) and not (layout == "DFlash 2" and checkpoint.is_dflash2):
                served, why = _SERVED_BY.get(layout, ()), f"This is the layout of {layout}."
                if served and layout != "DFlash 2":
                    why += f" {enumerate_some(served)} may have code for it, which these rules do not check."
                remedy = "Use the code that made the checkpoint."
                if layout == "DFlash 2":
                    why += " vLLM refuses its tensors under this class, SGLang builds it, dflash leaves it out."
                    remedy = f"Write architectures=[{DFLASH2!r}], or remove the fields of DFlash 2."
                if layout == "speculators":
                    remedy = "Convert it with dflash_hf.convert_speculators first."
                yield _field(f"{where}{name}", fields[name], expected, why, remedy, others(*served), served)
        if (drafted := fields.get("draft_vocab_size")) not in (None, vocab_size):
            found = f"{where}draft_vocab_size is {_show(drafted)} and vocab_size is {_show(vocab_size)}"
            why = "Only vLLM maps a vocabulary of the drafter's own; the others use the target's head."
            remedy = "Serve it with vLLM, after checking that d2t is among the tensors."
            yield Finding(found, "the target's vocabulary", why, remedy, others("vLLM"), ("vLLM",))


def _dflash2(checkpoint: Checkpoint) -> Said:
    """Sizes of convolution and selector that go together, for a drafter in memory too."""
    if not checkpoint.is_dflash2:
        return
    is_whole = checkpoint.raw["architectures"] == [DFLASH2]
    values: dict[str, Any] = {name: checkpoint.value(name) for name in GEOMETRY}
    kernel, group, rank, top_k = values.values()
    why = "vLLM stops without one of the four; SGLang leaves the part out that lacks one."
    if not all(_is_integer(value) and value >= 0 for value in values.values()):
        yield Finding(f"dflash_config holds {values}", "four whole numbers", why)
        return
    if is_whole and not all(values.values()):
        remedy = "Train both parts; a study of one keeps the name that this package gives it."
        yield Finding(f"dflash_config holds {values}", "numbers above 0", why, remedy)
    limits = {"hidden_size": checkpoint.raw.get("hidden_size"), "vocab_size": checkpoint.raw.get("vocab_size")}
    hidden, vocab = (value if _is_integer(value) else 0 for value in limits.values())
    block = checkpoint.block_size or kernel
    if kernel and (not group or hidden % group or kernel > block):
        found = f"conv_kernel_size={kernel} and conv_group_size={group} for {hidden} channels in blocks of {block}"
        yield Finding(found, "groups that divide hidden_size, and a kernel of at most one block", "No reader fits it.")
    if rank and not 0 < top_k <= (vocab or top_k):
        found = f"selector_top_k={top_k} of {vocab} tokens"
        yield Finding(found, "1 to vocab_size", "A selector has so many candidates in each slot.")


def _dflash2_fields(checkpoint: Checkpoint) -> Said:
    """Where a file has the fields of DFlash 2."""
    lost = [name for name in (*GEOMETRY, *SCALES) if checkpoint.raw.get(name) and checkpoint.nested.get(name) is None]
    if checkpoint.is_dflash2 and lost:
        why = "vLLM and SGLang look them up there and nowhere else."
        yield _field(f"{enumerate_some(lost, 9)} in dflash_config", None, "the fields of DFlash 2 there", why)
    if checkpoint.is_dflash2 and checkpoint.value("draft_vocab_size") not in (None, checkpoint.raw.get("vocab_size")):
        why = "No reader has a DFlash 2 drafter with a vocabulary of its own."
        yield _field("draft_vocab_size", checkpoint.value("draft_vocab_size"), "the target's vocabulary", why)


def _model_type(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("model_type")
    if not isinstance(given, str) or given not in CONFIG_MAPPING:
        why = "The servers and dflash's command line read config.json through AutoConfig, which finds its class by it."
        remedy, errors = "Write 'qwen3', as published drafters have it.", STRICT if given is None else SERVERS
        yield _field("model_type", given, "a type that transformers knows", why, remedy, errors, others(*errors))


def _dflash_config(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("dflash_config", {})
    if not isinstance(given, dict):
        why = "Readers look fields up in it, dflash even where it is null."
        remedy = 'Write "dflash_config": {"target_layer_ids": [...], "mask_token_id": ...}.'
        errors = ("z-lab",) if given is None else ALL
        yield Finding(f"dflash_config is {_show(given)}", "an object, or no such field", why, remedy, errors)


def _sizes(checkpoint: Checkpoint) -> Said:
    given: dict[str, Any] = {name: checkpoint.raw.get(name) for name in (*SIZES, "rms_norm_eps")}
    lacking = [name for name, value in given.items() if value is None]
    if lacking:
        why = "Readers fill in the defaults of the model type, and the tensors do not fit or are read wrongly."
        yield _field(enumerate_some(lacking, 9), None, "a value in config.json", why)
    wrong = {name: _size_wanted(name, value) for name, value in given.items() if value is not None}
    for name, expected in wrong.items():
        if expected is not None:
            yield _field(name, given[name], expected, "Every reader computes with it.")
    heads, shared = given["num_attention_heads"], given["num_key_value_heads"]
    if not lacking and not any(wrong.values()) and heads % shared:
        found = f"num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}"
        yield Finding(found, "a multiple", "Query heads share keys in equal groups.")


def _size_wanted(name: str, value: Any) -> str | None:
    """What a size should be, where it is something else."""
    if name == "rms_norm_eps":
        return None if _is_positive(value) else "a positive number"
    if not _is_integer(value):
        return "an integer"
    if name == "num_hidden_layers" and value > MAX_LAYERS:
        return f"at most {MAX_LAYERS}"
    return None if value > 0 else "a positive number"


def _field_types(checkpoint: Checkpoint) -> Said:
    raw, wrong = checkpoint.raw, []
    # Sizes and layer types have rules of their own; token ids are held against the vocabulary.
    skipped = {*SIZES, "layer_types"} - ({"vocab_size"} if _is_integer(raw.get("vocab_size")) else set())
    kinds = {f.name: f.type for f in dataclasses.fields(Qwen3Config) if f.name in raw and f.name not in skipped}
    for name, kind in sorted(kinds.items()):
        try:
            type_validator(name, raw[name], kind)
        except TypeError:
            wrong.append(f"{name} is {_show(raw[name])}, not {kind.__name__ if isinstance(kind, type) else kind}")
    if wrong:
        why = "Every reader reads config.json through a configuration class, and those of transformers 5 check types."
        remedy = "Write a value of the right type, or remove the field."
        yield Finding("\n".join(wrong), "values of the declared types", why, remedy)


def _bias_and_dtype(checkpoint: Checkpoint) -> Said:
    """What the other readers derive or cast, and a drafter that is loaded for training must know."""
    if checkpoint.is_foreign and checkpoint.raw.get("attention_bias") is None:
        why = "Readers derive it from model_type in different ways."
        yield _field("attention_bias", None, "a value in config.json", why)
    dtypes = _dtype_names(checkpoint.raw)
    known = [*WEIGHT_DTYPES.values()]
    if len({*dtypes.values()}) > 1:
        found = f"dtype and torch_dtype differ, {dtypes}"
        yield Finding(found, "one dtype", "Readers differ in which one they apply.", "Keep one.")
    elif dtypes and {*dtypes.values()}.isdisjoint(known):
        found = " and ".join(f"{name} is {value!r}" for name, value in dtypes.items())
        yield Finding(found, f"one of {known}", "Readers cast others.", "Save the drafter in one of them.")


def _dtype_names(raw: dict[str, Any]) -> dict[str, str]:
    """The dtype in both spellings, of transformers 5 and of 4."""
    return {n: str(raw[n]).removeprefix("torch.") for n in ("dtype", "torch_dtype") if raw.get(n) is not None}


def _activation(checkpoint: Checkpoint) -> Said:
    given = checkpoint.raw.get("hidden_act")
    if given not in (None, "silu"):
        why = "The servers' MLP computes SiLU and refuses every other name."
        remedy = "Correct the name if the drafter was trained with SiLU; serve it with dflash otherwise."
        yield _field("hidden_act", given, "'silu'", why, remedy, STRICT)


def _layer_types(checkpoint: Checkpoint) -> Said:
    raw = checkpoint.raw
    kinds, number = raw.get("layer_types"), raw.get("num_hidden_layers")
    expected = f"one entry per layer out of {enumerate_some(LAYER_TYPES)}"
    if kinds is None:
        if checkpoint.is_foreign or raw.get("use_sliding_window"):
            errors = STRICT if checkpoint.is_foreign else OURS
            why = "Readers derive it from the defaults of the model type, use_sliding_window and max_window_layers."
            yield _field("layer_types", None, expected, why, Finding.remedy, errors, others(*errors))
        return
    why = "Most readers refuse a layer of another kind or a list of another length, and the rest misread it."
    if not isinstance(kinds, list):
        yield _field("layer_types", kinds, expected, why)
    elif unknown := sorted({str(kind) for kind in kinds} - {*LAYER_TYPES}):
        yield Finding(f"layer_types holds {_show(unknown)}", expected, why)
    elif len(kinds) != number:
        found = f"layer_types has {len(kinds)} entries and num_hidden_layers is {_show(number)}"
        yield Finding(found, expected, why)


def _sliding_window(checkpoint: Checkpoint) -> Said:
    raw, block_size = checkpoint.raw, checkpoint.block_size
    window: Any = raw.get("sliding_window")
    kinds, switch = raw.get("layer_types"), raw.get("use_sliding_window")
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return
    remedy = "Write use_sliding_window=true and the sliding_window that the drafter was trained with."
    if not switch:
        found = f"use_sliding_window={_show(switch)} beside sliding_attention layers"
        why = "Qwen3's configuration then drops the window: vLLM and SGLang refuse, dflash lets the layers see all."
        errors, warnings = (("z-lab", "transformers"), SERVERS) if checkpoint.is_foreign else (ALL, ())
        yield Finding(found, "true", why, remedy, errors, warnings)
    if not _is_integer(window) or window < 1:
        found = f"sliding_window={_show(window)} beside sliding_attention layers"
        why = "vLLM and SGLang refuse; dflash lets these layers see the whole context."
        yield Finding(found, "a number of tokens", why, remedy)
    elif block_size is not None and window < block_size:
        found = f"sliding_window={window} is smaller than block_size={block_size}"
        why = "Late slots of a block do not see the anchor."
        yield Finding(found, "a window of at least one block", why, remedy, OURS, ENGINES)


def _causality(checkpoint: Checkpoint) -> Said:
    top, kinds = checkpoint.raw.get("is_causal"), checkpoint.raw.get("layer_types")
    if top is not None and not isinstance(top, bool):
        why = 'Engines take its truth value, so that the word "false" means true.'
        yield _field("is_causal", top, "true, false or no such field", why)
    by_layer = {kind == "sliding_attention" for kind in kinds} if isinstance(kinds, list) else {False}
    for name in ("causal", "is_causal"):
        inner = checkpoint.nested.get(name)
        if inner is None or inner == top or (top is None and isinstance(inner, bool) and by_layer == {inner}):
            continue
        reading = ("vLLM",) if name == "causal" and top is None else ()
        found = f"dflash_config.{name} is {_show(inner)} and is_causal at the top level is {_show(top)}"
        expected = "is_causal at the top level, or no such field where only sliding layers are causal"
        why = f"SGLang and dflash read only the top level{'; vLLM also reads this one' if reading else ''}."
        remedy = f"Write is_causal={_show(inner)} at the top level if it was trained so; else remove the nested one."
        yield Finding(found, expected, why, remedy, OURS, others("transformers", *reading))


# --- Rules on the rotary embedding that `config.json` describes.


def _rope_theta(checkpoint: Checkpoint) -> Said:
    rope, bases = checkpoint.rope, checkpoint.rope_bases
    values, remedy = [*bases.values()], "Write the base and the scaling that the drafter was trained with."
    why = "Readers differ in which one they apply."
    layered = [name for name, value in rope.items() if not _is_flat(value)]
    if layered:
        expected, why = "one flat set of values", "A drafter's layers all rotate alike."
        yield _field(layered[0], rope[layered[0]], expected, why, remedy)
    elif not bases:
        why = "Readers fill in 10,000, or the base of a foreign model_type."
        yield _field("rope_theta", None, "a positive number", why, remedy)
    elif _differ(values):
        yield Finding(f"rope_theta has several values, {_show(bases)}", "one base", why, remedy)
    elif not _is_positive(values[0]):
        yield _field("rope_theta", values[0], "a positive number", "All positions turn by it.", remedy)
    elif _differ(checkpoint.rope_kinds):
        found = " and ".join(f"{name} is {_show(value)}" for name, value in rope.items())
        yield Finding(found, "one kind of scaling", why, remedy)


def _rope_type(checkpoint: Checkpoint) -> Said:
    """A scaling that transformers would ignore or take for another."""
    for kind in checkpoint.rope_kinds[:1]:
        given = kind.get("rope_type")
        if kind and given not in ROPE_TYPES:
            found = f"RoPE has {_show(kind)} and no rope_type" if given is None else f"rope_type is {_show(given)}"
            yield Finding(found, f"a rope_type out of {list(ROPE_TYPES)}", "Readers guess or ignore the scaling.")


def _rope_in_full(checkpoint: Checkpoint) -> Said:
    if checkpoint.is_foreign and not any("rope_type" in kind for kind in checkpoint.rope_kinds):
        found = f"model_type is {_show(checkpoint.raw['model_type'])} and RoPE is not written in full"
        why = "AutoConfig fills in the scaling of the model type (YaRN for gpt_oss), and dflash does not."
        yield Finding(found, "rope_parameters with rope_type and rope_theta", why, errors=STRICT)


def _whole_heads(checkpoint: Checkpoint) -> Said:
    why = "SGLang and dflash rotate the whole head by one position, whatever the target does."
    remedy = "Remove it if it was copied from the target; no reader serves a drafter trained with it."
    for where, fields in checkpoint.levels.items():
        for name, neutral in PARTIAL_ROTATION.items():
            if fields.get(name) not in neutral:
                yield _field(f"{where}{name}", fields[name], "a plain rotary embedding", why, remedy)


# --- Rules on the drafter's own fields: block, taps, mask token, and where each of them is written.


def _block_size(checkpoint: Checkpoint) -> Said:
    value, expected = checkpoint.value("block_size"), "an integer of at least 2"
    if value is None:
        why = "dflash and SGLang then draft 16 slots; vLLM is told a number, and nothing says which."
        yield _field("block_size", value, expected, why, Finding.remedy, others("vLLM"), ("vLLM",))
    elif checkpoint.block_size is None:
        why = "A block holds the known anchor and at least one slot to draft."
        yield _field("block_size", value, expected, why)


def _target_layer_ids(checkpoint: Checkpoint) -> Said:
    if checkpoint.taps is None:
        why = "dflash and SGLang guess layers from the depths, and vLLM has a default: the features are others."
        remedy = "Write the 0-based layers that it was trained on, as DFlashDraftConfig.from_target_config does."
        value = checkpoint.value("target_layer_ids") or None
        yield _field("target_layer_ids", value, "a list of layer indices", why, remedy)


def _tap_order(checkpoint: Checkpoint) -> Said:
    taps = checkpoint.taps
    if taps is None:
        yield None
    elif any(b <= a for a, b in pairwise(taps)):
        why = "vLLM and SGLang collect features in the order of the layers, whatever the order of this list."
        remedy = "Sort the list, and the column blocks of fc.weight with it."
        yield _field("target_layer_ids", taps, "unique and ascending layers", why, remedy, STRICT)


def _tap_range(checkpoint: Checkpoint) -> Said:
    taps = checkpoint.taps
    depth: Any = checkpoint.value("num_target_layers")
    if taps is None or (min(taps) >= 0 and not _is_integer(depth)):
        yield None
    elif min(taps) < 0 or max(taps) >= depth - 1:
        no_layer = min(taps) < 0 or max(taps) >= depth
        why = "SGLang cannot read after the last layer; vLLM reads before the final norm, dflash after it."
        if no_layer:
            why = "The target has no such layer, and readers differ in what they make of a negative index."
        found = f"target_layer_ids is {taps} and num_target_layers is {_show(depth)}"
        expected = f"layers in 0..{depth - 2}" if _is_integer(depth) else "layers from 0 on"
        remedy = "Correct whichever is wrong. A drafter trained on the last layer has to be trained again."
        errors = ALL if no_layer else ("SGLang", "transformers")
        yield Finding(found, expected, why, remedy, errors, others(*errors))


def _num_target_layers(checkpoint: Checkpoint) -> Said:
    depth, name, expected = checkpoint.value("num_target_layers"), "num_target_layers", "a number of layers"
    remedy = "Write the number of decoder layers of the target at the top level."
    if depth is None:
        why = "dflash stops without it, and SGLang checks target_layer_ids against it."
        yield _field(name, None, expected, why, remedy, ("z-lab", "transformers"), ("SGLang",))
    elif not _is_integer(depth) or depth < 2:
        yield _field(name, depth, expected, "The taps are held against it.", remedy, others("vLLM"))
    elif checkpoint.raw.get(name) is None:
        yield _field(f"{name} at the top level", None, expected, "dflash reads it only there.", remedy, ("z-lab",))


def _mask_token_id(checkpoint: Checkpoint) -> Said:
    mask = checkpoint.value("mask_token_id")
    vocab_size: Any = checkpoint.raw.get("vocab_size")
    eos, pad = checkpoint.raw.get("eos_token_id"), checkpoint.raw.get("pad_token_id")
    expected = f"an id below {_show(vocab_size)}"
    remedy = "Write the id that the drafter was trained with, of a reserved token that texts do not use."
    token = checkpoint.value("mask_token")
    if token is not None and not (isinstance(token, str) and token):
        why = "SGLang 0.5.23 stops at anything else."
        yield _field("mask_token", token, "a text that is not empty, or no such field", why, _REMOVE, ("SGLang",))
    if mask is None:
        why = "vLLM and dflash stop; SGLang takes the id of a token <|MASK|>, which it may add to the tokenizer."
        yield _field("mask_token_id", None, expected, why, remedy)
    elif not _is_integer(mask) or mask < 0 or (_is_integer(vocab_size) and mask >= vocab_size):
        found = f"mask_token_id={_show(mask)} is outside the vocabulary"
        yield Finding(found, expected, "Its row of the target's embedding stands for a slot to be drafted.", remedy)
    elif mask == pad or mask in (eos if isinstance(eos, list) else [eos]):
        found = f"mask_token_id={mask} equals the eos or pad token (eos_token_id={eos}, pad_token_id={pad})"
        why = "A slot to be drafted looks like the end of the text."
        yield Finding(found, "another token", why, remedy, OURS, ENGINES)


def _same_spelling(checkpoint: Checkpoint) -> Said:
    # vLLM takes the block size from its command line and the depth from the target.
    unread = {"block_size": ("vLLM",), "num_target_layers": ("vLLM",)}
    for name, inner in checkpoint.nested.items():
        top = checkpoint.raw.get(name)
        if top is not None and inner != top and name != "is_causal":
            skipped = (*unread.get(name, ()), *(OURS if inner is None else ()))
            found = f"{name} is {_show(top)} at the top level and {_show(inner)} in dflash_config"
            why = "Readers differ in which one they apply, and nothing says which one was trained."
            yield Finding(found, "one value", why, "Remove one of them.", errors=others(*skipped))


def _both_spellings(checkpoint: Checkpoint) -> Said:
    raw, nested = checkpoint.raw, checkpoint.nested

    def absent(place: str, why: str, *warnings: str) -> Finding:
        return _field(place, None, "the same value there too", why, "Write it there too.", (), warnings)

    if raw.get("block_size") is None and nested.get("block_size") is not None:
        why = "generate() reads config.block_size, which only this package's configuration finds in dflash_config."
        yield absent("block_size at the top level", why, *OURS)
    flat = [n for n in ("target_layer_ids", "mask_token_id") if nested.get(n) is None and raw.get(n) is not None]
    if flat:
        why = "Published drafters have it there, and releases of vLLM differ in whether they look elsewhere."
        yield absent(f"{enumerate_some(flat)} in dflash_config", why, "vLLM")
    parameters = raw.get("rope_parameters")
    if raw.get("rope_theta") is None and isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        why = "Readers on transformers 4 do not know rope_parameters and rotate with a base of 10,000."
        yield absent("rope_theta at the top level", why, *ENGINES)


def _partly_read(checkpoint: Checkpoint) -> Said:
    for where, fields in checkpoint.levels.items():
        for name, (neutral, applying, in_part) in PARTLY_READ.items():
            if checkpoint.is_dflash2 and name in SCALES:
                # SGLang asks the target for the scale of the embedding, and no target of it has one.
                applying = others("SGLang") if name == "input_embedding_scale" else ALL
            if fields.get(name) not in neutral and applying != ALL:
                reading = " and ".join((*applying, *(f"some releases of {reader}" for reader in in_part)))
                why = f"Only {reading} would apply it; the others ignore it without a word."
                errors, expected = others(*applying, *in_part), f"no such field, or {_show(neutral[-1])}"
                yield _field(f"{where}{name}", fields[name], expected, why, _REMOVE, errors, in_part)


def _mask_embedding(checkpoint: Checkpoint) -> Said:
    if "mask_embedding.pt" in checkpoint.files:
        found = "mask_embedding.pt holds an embedding for mask slots"
        why = "Only vLLM and some releases of SGLang put this vector in place of the target's own."
        yield Finding(found, "no such file", why, _REMOVE, ("z-lab", "transformers"), ("SGLang",))


def _eagle_taps(checkpoint: Checkpoint) -> Said:
    shifted, taps = checkpoint.value(EAGLE_TAPS), checkpoint.taps
    if shifted:
        agrees = taps is not None and shifted == [tap + 1 for tap in taps]
        errors, warnings = (OURS, ("vLLM",)) if agrees else (("vLLM", "transformers"), ())
        found = f"{EAGLE_TAPS} is {_show(shifted)} and target_layer_ids is {taps}"
        why = "vLLM prefers it and counts from the embeddings, that is one higher; the others ignore it."
        remedy = "Remove it, after checking that target_layer_ids holds the layers the drafter was trained on."
        yield Finding(found, "no such field", why, remedy, errors, warnings)


def _remote_code(checkpoint: Checkpoint) -> Said:
    auto_map = checkpoint.raw.get("auto_map")
    for name, reference in auto_map.items() if isinstance(auto_map, dict) else ():
        path = f"{str(reference).split('.')[0]}.py"
        # "owner/name--module.Class" lies in another repository.
        if isinstance(reference, str) and path not in checkpoint.files and "--" not in path:
            found = f"auto_map names {_show(reference)} for {name}, and there is no {path}"
            why = "trust_remote_code=True fails on it; without it AutoModel needs `import dflash_hf` before."
            # The servers read the configuration through AutoConfig, but bring a model class of their own.
            warnings = STRICT if name == "AutoConfig" else OURS
            remedy = f"Remove the entry, or copy {path}."
            yield Finding(found, f"the file {path}, or no such entry", why, remedy, (), warnings)


CONFIG_RULES = (
    Rule("architectures", "the class the servers look up", STRICT, _architectures),
    Rule("layout", "no other kind of drafter", ALL, _layout),
    Rule("dflash2", "convolution and selector in full", ALL, _dflash2, True),
    Rule("dflash2_fields", "in dflash_config", ALL, _dflash2_fields, True),
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
# What a configuration in memory is held to; the others are about how a file spells it.
_HELD_IN_MEMORY = (
    *(_dflash2, _sizes, _layer_types, _sliding_window, _causality, _rope_theta, _rope_type, _block_size),
    *(_target_layer_ids, _tap_order, _tap_range, _num_target_layers, _mask_token_id),
)
# What `from_pretrained` holds config.json to: the table, and faults that only matter to it.
_HELD_IN_FILE = (*(rule.look for rule in CONFIG_RULES), _rope_type, _bias_and_dtype)


# --- Rules on the tensors, by their headers. Where the configuration does not say which are expected, nothing is told.


def _codebook_names(checkpoint: Checkpoint) -> Said:
    wrong = [f"{name}.weight" for name in CODEBOOKS if f"{name}.weight" in checkpoint.bare_headers]
    if wrong:
        why = "vLLM refuses the names. SGLang drops the tensors without a word, so that its selector does nothing."
        remedy = "Rename them: dflash's class saves them so where it was built, not loaded."
        yield Finding("\n".join(wrong), "the names without .weight", why, remedy, others("z-lab"))


def _tensors_missing(checkpoint: Checkpoint) -> Said:
    held = {name.removesuffix(".weight") if "_codebook" in name else name for name in checkpoint.bare_headers}
    missing = [f"{name} is missing" for name in checkpoint.expected or {} if name not in held]
    if checkpoint.expected is None:
        yield None
    elif missing:
        why = "vLLM, SGLang and dflash go on with random values in its place and say little or nothing."
        remedy = "Copy or save the drafter again, or correct config.json."
        yield Finding("\n".join(missing), "every tensor that config.json asks for", why, remedy)


def _tensor_prefix(checkpoint: Checkpoint) -> Said:
    prefixed = [f'{name} has the prefix "model."' for name in checkpoint.headers or {} if name.startswith("model.")]
    if prefixed:
        why = "vLLM puts the prefix there itself and knows no such name; SGLang and dflash strip it."
        errors = ("vLLM", "transformers")
        yield Finding("\n".join(prefixed), "names without prefix", why, "Rename the tensors.", errors)


def _tensors_unexpected(checkpoint: Checkpoint) -> Said:
    expected = checkpoint.expected
    if expected is None:
        yield None
        return
    named = {f"{name}.weight" for name in CODEBOOKS if name in expected}
    unexpected = [name for name in checkpoint.bare_headers if name not in expected and name not in named]
    own = [name for name in unexpected if "embed_tokens" in name or "lm_head" in name]
    refused = [name for name in unexpected if name not in own]
    for names, errors, why in (
        (refused, ("vLLM", "transformers"), "vLLM refuses unknown names; SGLang and dflash ignore them."),
        (own, OURS, "vLLM drafts with this embedding or head; SGLang and dflash ignore it."),
    ):
        if names:
            found = "\n".join(f"{name} is {_KINDS.get(name, 'not a tensor of this configuration')}" for name in names)
            remedy = "Remove it if the drafter was trained without it, or correct config.json."
            yield Finding(found, "no other tensors", why, remedy, errors, others(*errors))


_KINDS = dict.fromkeys(("d2t", "t2d"), "for a vocabulary of the drafter's own, where the target's head is used")


def _tensor_shapes(checkpoint: Checkpoint) -> Said:
    if checkpoint.expected is None:
        yield None
        return
    wrong = []
    for name, (_, shape) in checkpoint.bare_headers.items():
        wanted = checkpoint.expected.get(name, shape)
        if shape != wanted:
            transposed = ", which is its transpose" if shape == wanted[::-1] else ""
            wrong.append(f"{name} has shape {list(shape)}{transposed}: config.json asks for {list(wanted)}")
    if wrong:
        why = "Readers stop while they load the weights, most of them naming a fused parameter."
        remedy = "Correct whichever is wrong: config.json, or the code that saved the tensors."
        yield Finding("\n".join(wrong), "the shapes that config.json asks for", why, remedy)


def _tensor_dtypes(checkpoint: Checkpoint) -> Said:
    headers = checkpoint.headers or {}
    expected = f"one of {enumerate_some(WEIGHT_DTYPES)} for all tensors"
    remedy = "Save the drafter in one dtype; published ones are in bfloat16."
    strange = [f"{name} has dtype {dtype}" for name, (dtype, _) in headers.items() if dtype not in WEIGHT_DTYPES]
    if strange:
        why = "Readers cast it without its scales, so that the values mean something else."
        yield Finding("\n".join(strange), expected, why, remedy)
    # One tensor of each dtype.
    usual = {dtype: name for name, (dtype, _) in reversed(headers.items()) if dtype in WEIGHT_DTYPES}
    if len(usual) > 1:
        examples = ", ".join(f"{usual[dtype]} is {dtype}" for dtype in sorted(usual))
        why = "The engines cast all of them to the dtype that they serve in."
        yield Finding(f"the tensors have different dtypes ({examples})", expected, why, remedy, OURS, ENGINES)


TENSOR_RULES = (
    Rule("codebook_names", "codebooks without .weight", others("z-lab"), _codebook_names, True),
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
    if kernel := config.get("conv_kernel_size"):
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = (2, kernel, hidden)
            layer[f"{name}.kernel_projection.weight"] = (2 * kernel * (hidden // config["conv_group_size"]), hidden)
    if rank := config.get("selector_rank"):
        tensors |= dict.fromkeys(CODEBOOKS, (config["vocab_size"], rank))
        tensors["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for index in range(config["num_hidden_layers"]):
        tensors |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return tensors


# --- What loading makes of the rules: one error with all problems, and one spelling of the configuration.


def refuse(headline: str, problems: Sequence[object]) -> None:
    """Raise a `ValueError` with all problems, [`Finding`]s or texts, one a line, if there are any."""
    if problems:
        raise ValueError("\n".join([f"{headline}:", *(f"  - {problem}" for problem in problems)]))


def _refusals(looks: Iterable[Look], checkpoint: Checkpoint) -> list[Finding]:
    found = [finding for look in looks for finding in look(checkpoint) if finding is not None]
    return [finding for finding in found if "transformers" in finding.errors]


def field_problems(config: dict[str, Any]) -> list[Finding]:
    """Fields of a configuration in memory, all at the top level, that contradict each other or the format."""
    return _refusals(_HELD_IN_MEMORY, Checkpoint("", config=config))


def rule_problems(rule_id: str, config: dict[str, Any]) -> list[Finding]:
    """What one of `CONFIG_RULES` has against a configuration."""
    return _refusals((rule.look for rule in CONFIG_RULES if rule.id == rule_id), Checkpoint("", config=config))


def tensor_problems(config: dict[str, Any], headers: TensorHeaders) -> list[Finding]:
    """Tensors that are missing or not expected, and wrong shapes and dtypes; `config` is a normalised one."""
    return _refusals((rule.look for rule in TENSOR_RULES), Checkpoint("", config=config, headers=headers))


def checkpoint_problems(folder: str | Path, config: dict[str, Any] | None = None) -> list[str]:
    """Everything that is wrong with a local folder, from its `config.json` and tensor headers.

    Args:
        folder: A drafter's folder.
        config: A configuration to use instead of `config.json`, as [`normalize_config`] returns it.

    Returns:
        One text for each problem; empty for a folder that loads.

    Raises:
        OSError: The folder or its `config.json` cannot be read.
    """
    folder = Path(folder)
    problems: list[object] = []
    if config is None:
        path = folder / "config.json"
        try:
            config, problems[:] = read_config(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            return [f"{path} is not valid JSON ({error}): copy it again."]
    files = frozenset(path.name for path in folder.iterdir())
    problems += _refusals([_mask_embedding], Checkpoint(str(folder), files=files))
    try:
        problems += tensor_problems(config, read_tensor_headers(folder))
    except (FileNotFoundError, ValueError) as error:
        problems.append(error)
    return [*map(str, problems)]


def normalize_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Read a drafter's `config.json`, flat or nested, saved by transformers 4.57 or 5, into one spelling.

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


def read_config(raw: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """[`normalize_config`] with the problems returned, for reports that go on to the tensors."""
    if not isinstance(raw, dict):
        return {}, [Finding(f"config.json holds {raw!r}", "an object", "Readers look fields up in it.")]
    checkpoint = Checkpoint("", config=raw)
    config = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    config |= {name: checkpoint.value(name) for name in OWN_FIELDS}
    config["is_causal"] = raw.get("is_causal")
    moved = {*OWN_FIELDS, "causal", "is_causal"}
    config["dflash_config"] = {name: value for name, value in checkpoint.nested.items() if name not in moved}
    rope = {"rope_type": "default", **next(iter(checkpoint.rope_kinds), {})}
    bases = [base for base in checkpoint.rope_bases.values() if base is not None]
    config["rope_parameters"] = {**rope, **({"rope_theta": bases[0]} if bases else {})}
    config["dtype"] = next(iter(_dtype_names(raw).values()), None)
    return config, _refusals(_HELD_IN_FILE, checkpoint)
