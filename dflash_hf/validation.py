# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM, SGLang, z-lab's `dflash` and transformers will all load a drafter as it was trained."""

import argparse
import copy
import dataclasses
import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import list_repo_files, metadata_load, parse_safetensors_file_metadata, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
    SafetensorsParsingError,
    StrictDataclassClassValidationError,
    StrictDataclassFieldValidationError,
)
from safetensors import safe_open
from transformers import CONFIG_MAPPING, Qwen3Config
from yaml import YAMLError

from .chats import without_secrets
from .checkpoint_format import (
    LAYER_TYPES,
    MAX_LAYERS,
    OTHER_LAYOUTS,
    WEIGHT_DTYPES,
    TensorHeaders,
    expected_tensors,
    is_adapter_folder,
    joined_headers,
    merging_advice,
    read_config,
    read_tensor_headers,
    tensor_problems,
)
from .configuration_dflash import DFlashDraftConfig


# --- What the rules of [`validation`] look at and what they return.


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


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, for whom, and what to do about it.

    Args:
        found: What the checkpoint says.
        expected: What it should say.
        why: What the readers do with it.
        remedy: The way out.
        errors: Readers that refuse the checkpoint, or draft otherwise than it was trained.
        warnings: Readers that get by, in some releases or for the time being.
    """

    found: str
    expected: str
    why: str
    remedy: str
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """What can be known of a drafter without reading its weights, and where they lie.

    Args:
        name: The folder or repository, as given.
        revision: The repository's revision.
        files: File names.
        config: `config.json` as it was written; None when it could not be read.
        headers: Name -> (dtype, shape) of every tensor; None when they could not be read.
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

    @cached_property
    def expected(self) -> dict[str, tuple[int, ...]] | None:
        """Names and shapes of the tensors the configuration asks for; None when its sizes do not tell."""
        if self.taps is None or not all(is_size(self.raw.get(name), name) for name in SIZES):
            return None
        return expected_tensors({**self.raw, "target_layer_ids": self.taps})

    @cached_property
    def bare_headers(self) -> TensorHeaders:
        """The headers under names without the prefix "model.", which SGLang and transformers strip."""
        return {name.removeprefix("model."): header for name, header in (self.headers or {}).items()}


@dataclass(frozen=True)
class Rule:
    """One requirement.

    Args:
        id: Its name in reports.
        title: The requirement in a few words.
        readers: Whom it concerns.
        check: Returns what violates it; None when that cannot be told.
    """

    id: str
    title: str
    readers: tuple[str, ...]
    check: Callable[[Checkpoint], list[Finding] | None]


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_size(value: Any, name: str) -> bool:
    return is_integer(value) and 0 < value <= (MAX_LAYERS if name == "num_hidden_layers" else value)


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


def absent(name: str, why: str, remedy: str, errors: tuple[str, ...] = ALL, warnings: tuple[str, ...] = ()) -> Finding:
    """A field that `config.json` lacks."""
    return Finding(f"no {name}", "the field in config.json", why, remedy, errors, warnings)


# --- The rule on the weights themselves, which are read where they lie in a local folder.


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


# --- Reading what most rules of [`validation`] look at, without the weights; what cannot be read is a finding.


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


# --- Rules on what kind of model `config.json` describes: its class, sizes and layers.


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


# --- Rules on the rotary embedding that `config.json` describes.


def _check_rope_theta(checkpoint: Checkpoint) -> list[Finding]:
    raw = checkpoint.raw
    remedy = "Write rope_theta and rope_parameters with the base that the drafter was trained with."
    spelled = {name: raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)}
    for name, value in spelled.items():
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            why = "A drafter's layers all rotate alike."
            return [Finding(f"{name}={show(value)}", "one flat set of values", why, remedy, errors=ALL)]
    bases = {f"{name}.rope_theta": value["rope_theta"] for name, value in spelled.items() if "rope_theta" in value}
    if raw.get("rope_theta") is not None:
        bases["rope_theta"] = raw["rope_theta"]
    if not bases:
        return [absent("rope_theta", "Readers fill in 10,000, or the base of a foreign model_type.", remedy)]
    valid = all(is_number(base) and base > 0 for base in bases.values())
    kinds = [_without_theta(value) for value in spelled.values()]
    if valid and len(set(bases.values())) == 1 and (len(kinds) < 2 or kinds[0] == kinds[1]):
        return []
    found = ", ".join(f"{name}={show(value)}" for name, value in {**spelled, **bases}.items())
    why = "Readers differ in which one they apply."
    return [Finding(found, "one positive base and one kind of scaling", why, remedy, errors=ALL)]


def _without_theta(parameters: dict[str, Any]) -> dict[str, Any]:
    return {("rope_type" if k == "type" else k): v for k, v in parameters.items() if k != "rope_theta"}


def _check_rope_in_full(checkpoint: Checkpoint) -> list[Finding]:
    raw = checkpoint.raw
    spelled = [raw.get(name) for name in ("rope_parameters", "rope_scaling")]
    if not checkpoint.is_foreign or any(isinstance(v, dict) and {"rope_type", "type"} & {*v} for v in spelled):
        return []
    return [
        Finding(
            f"model_type={show(raw.get('model_type'))} without rope_parameters.rope_type",
            'rope_parameters={"rope_type": "default", "rope_theta": ...}',
            "AutoConfig fills in the scaling of the model type (YaRN for gpt_oss), and dflash does not.",
            "Write rope_parameters in full, as the drafter was trained.",
            errors=STRICT,
        )
    ]


def _check_whole_heads(checkpoint: Checkpoint) -> list[Finding]:
    raw, findings = checkpoint.raw, []
    inner = {f"{n}.": raw.get(n) for n in ("rope_parameters", "rope_scaling", "dflash_config")}
    places = {"": raw, **{where: fields for where, fields in inner.items() if isinstance(fields, dict)}}
    neutral = {"partial_rotary_factor": (None, 1), "mrope_section": (None,), "mrope_interleaved": (None, False)}
    for where, fields in places.items():
        for name, values in neutral.items():
            if fields.get(name) not in values:
                why = "SGLang and dflash rotate the whole head by one position, whatever the target does."
                remedy = "Remove it if it was copied from the target; no reader serves a drafter trained with it."
                expected = "a plain rotary embedding"
                findings.append(Finding(f"{where}{name}={show(fields[name])}", expected, why, remedy, errors=ALL))
    return findings


ROTARY_RULES = (
    Rule("rope_theta", "one base of the rotary embedding", ALL, _check_rope_theta),
    Rule("rope_in_full", "no scaling of a foreign type", STRICT, _check_rope_in_full),
    Rule("whole_heads", "no partial rotary embedding", ALL, _check_whole_heads),
)


# --- Rules on the drafter's own fields: block, taps, mask token, and where each of them is written.


# Field -> (values that mean "not used", readers that apply it, readers of which only some releases do).
_PARTLY_READ: dict[str, tuple[tuple, tuple[str, ...], tuple[str, ...]]] = {
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


def _check_block_size(checkpoint: Checkpoint) -> list[Finding]:
    value = checkpoint.value("block_size")
    if value is None:
        why = "dflash and SGLang then draft 16 slots; vLLM is told a number, and nothing says which."
        return [absent("block_size", why, "Write it as it was trained.", others("vLLM"), ("vLLM",))]
    if checkpoint.block_size is not None:
        return []
    why = "A block holds the known anchor and at least one slot to draft."
    return [Finding(f"block_size={show(value)}", "an integer of at least 2", why, "Correct it.", errors=ALL)]


def _check_target_layer_ids(checkpoint: Checkpoint) -> list[Finding]:
    value, remedy = checkpoint.value("target_layer_ids"), "Write the layers that the drafter was trained on."
    if value is None:
        why = "dflash and SGLang guess layers from the depths, and vLLM has a default: the features are others."
        return [absent("dflash_config.target_layer_ids", why, remedy)]
    if checkpoint.taps is not None:
        return []
    why = "They index the target's layers."
    return [Finding(f"target_layer_ids={show(value)}", "a list of layer indices", why, remedy, errors=ALL)]


def _check_tap_order(checkpoint: Checkpoint) -> list[Finding] | None:
    taps = checkpoint.taps
    if taps is None:
        return None
    if all(a < b for a, b in pairwise(taps)):
        return []
    why = "vLLM and SGLang collect features in the order of the layers, whatever the order of this list."
    remedy = "Sort the list, and the column blocks of fc.weight with it."
    return [Finding(f"target_layer_ids={taps}", "ascending, each layer once", why, remedy, errors=STRICT)]


def _check_tap_range(checkpoint: Checkpoint) -> list[Finding] | None:
    taps, depth = checkpoint.taps, checkpoint.value("num_target_layers")
    if taps is None:
        return None
    found = f"target_layer_ids={taps}, num_target_layers={show(depth)}"
    remedy = "Correct whichever is wrong. A drafter trained on the last layer has to be trained again."
    if min(taps) < 0:
        why = "Some read a negative index from the end, others refuse it."
        return [Finding(found, "indices from 0", why, remedy, errors=ALL)]
    if not is_integer(depth):
        return None
    expected = f"indices up to {depth - 2}"
    if max(taps) >= depth:
        return [Finding(found, expected, "The target has no such layer.", remedy, errors=ALL)]
    if max(taps) == depth - 1:
        why = "SGLang cannot read after the last layer; vLLM reads before the final norm, dflash after it."
        return [Finding(found, expected, why, remedy, ("SGLang", "transformers"), ("vLLM", "z-lab"))]
    return []


def _check_num_target_layers(checkpoint: Checkpoint) -> list[Finding]:
    depth, name = checkpoint.value("num_target_layers"), "num_target_layers"
    remedy = "Write the number of decoder layers of the target at the top level."
    if depth is None:
        why = "dflash stops without it, and SGLang checks target_layer_ids against it."
        return [absent(name, why, remedy, ("z-lab", "transformers"), ("SGLang",))]
    if not is_integer(depth) or depth < 2:
        return [Finding(f"{name}={show(depth)}", "a number of layers", "It is a depth.", remedy, others("vLLM"))]
    if checkpoint.raw.get(name) is None:
        return [absent(f"{name} at the top level", "dflash reads it only there.", remedy, ("z-lab",))]
    return []


def _check_mask_token_id(checkpoint: Checkpoint) -> list[Finding]:
    mask, vocab_size = checkpoint.value("mask_token_id"), checkpoint.raw.get("vocab_size")
    remedy = "Write the id that the drafter was trained with."
    if mask is None:
        why = "vLLM and dflash stop; SGLang takes the id of a token <|MASK|>, which it may add to the tokenizer."
        return [absent("dflash_config.mask_token_id", why, remedy)]
    found = f"mask_token_id={show(mask)}"
    if not is_integer(mask) or mask < 0 or (is_integer(vocab_size) and mask >= vocab_size):
        why = "Its row of the target's embedding stands for a slot to be drafted."
        return [Finding(found, f"an id below vocab_size={vocab_size}", why, remedy, errors=ALL)]
    ends = checkpoint.raw.get("eos_token_id")
    if mask in (ends if isinstance(ends, list) else [ends]) or mask == checkpoint.raw.get("pad_token_id"):
        why = "A slot to be drafted looks like the end of the text."
        expected = "a reserved token that texts do not use"
        return [Finding(f"{found}, the eos or pad token", expected, why, remedy, ("transformers",), ENGINES)]
    return []


def _check_same_spelling(checkpoint: Checkpoint) -> list[Finding]:
    # vLLM takes the block size from its command line and the depth from the target.
    unread = {"block_size": ("vLLM",), "num_target_layers": ("vLLM",)}
    findings = []
    for name, inner in checkpoint.nested.items():
        top = checkpoint.raw.get(name)
        if top is None or inner == top or name == "is_causal":
            continue
        skipped = (*unread.get(name, ()), *(("transformers",) if inner is None else ()))
        findings.append(
            Finding(
                f"{name}={show(top)} at the top level and {show(inner)} in dflash_config",
                "one value",
                "Readers differ in which one they apply, and nothing says which one was trained.",
                "Remove one of them.",
                errors=others(*skipped),
            )
        )
    return findings


def _check_both_spellings(checkpoint: Checkpoint) -> list[Finding]:
    raw, nested, findings = checkpoint.raw, checkpoint.nested, []
    if raw.get("block_size") is None and nested.get("block_size") is not None:
        why = "generate() reads config.block_size, which only this package's configuration finds in dflash_config."
        findings.append(absent("block_size at the top level", why, "Write it there too.", (), ("transformers",)))
    flat = [n for n in ("target_layer_ids", "mask_token_id") if nested.get(n) is None and raw.get(n) is not None]
    if flat:
        why = "Published drafters have it there, and releases of vLLM differ in whether they look elsewhere."
        name = f"{enumerate_some(flat)} in dflash_config"
        findings.append(absent(name, why, "Write it there too.", (), ("vLLM",)))
    parameters = raw.get("rope_parameters")
    if raw.get("rope_theta") is None and isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        why = "Readers on transformers 4 do not know rope_parameters and rotate with a base of 10,000."
        findings.append(absent("rope_theta at the top level", why, "Write it there too.", (), ENGINES))
    return findings


def _check_partly_read(checkpoint: Checkpoint) -> list[Finding]:
    findings = []
    for where, fields in (("", checkpoint.raw), ("dflash_config.", checkpoint.nested)):
        for name, (neutral, applying, in_part) in _PARTLY_READ.items():
            if fields.get(name) in neutral:
                continue
            reading = " and ".join((*applying, *(f"some releases of {reader}" for reader in in_part)))
            findings.append(
                Finding(
                    f"{where}{name}={show(fields[name])}",
                    f"no such field, or {show(neutral[-1])}",
                    f"Only {reading} would apply it; the others ignore it without a word.",
                    "Remove it if the drafter was trained without it; else use only readers that apply it.",
                    errors=others(*applying, *in_part),
                    warnings=in_part,
                )
            )
    return findings


def _check_mask_embedding(checkpoint: Checkpoint) -> list[Finding]:
    if "mask_embedding.pt" not in checkpoint.files:
        return []
    return [
        Finding(
            "a file mask_embedding.pt",
            "slots that use the target's embedding of mask_token_id",
            "Only vLLM and some releases of SGLang put this vector in place of the target's own.",
            "Remove it if the drafter was trained without it; else use only readers that apply it.",
            errors=("z-lab", "transformers"),
            warnings=("SGLang",),
        )
    ]


def _check_eagle_taps(checkpoint: Checkpoint) -> list[Finding]:
    name, taps = "eagle_aux_hidden_state_layer_ids", checkpoint.taps
    shifted = checkpoint.value(name)
    if not shifted:
        return []
    agrees = taps is not None and shifted == [tap + 1 for tap in taps]
    return [
        Finding(
            f"{name}={show(shifted)}, target_layer_ids={taps}",
            f"no {name}",
            "vLLM prefers it and counts from the embeddings, that is one higher; the others ignore it.",
            "Remove it, after checking that target_layer_ids holds the layers the drafter was trained on.",
            errors=("transformers",) if agrees else ("vLLM", "transformers"),
            warnings=("vLLM",) if agrees else (),
        )
    ]


def _check_remote_code(checkpoint: Checkpoint) -> list[Finding]:
    auto_map, findings = checkpoint.raw.get("auto_map"), []
    for name, reference in auto_map.items() if isinstance(auto_map, dict) else ():
        path = f"{str(reference).split('.')[0]}.py"
        # "owner/name--module.Class" lies in another repository.
        if not isinstance(reference, str) or path in checkpoint.files or "--" in path:
            continue
        findings.append(
            Finding(
                f"auto_map names {show(reference)} for {name}, and there is no {path}",
                f"the file {path}, or no such entry",
                "trust_remote_code=True fails on it; without it AutoModel needs `import dflash_hf` before.",
                f"Remove the entry, or copy {path}.",
                # The servers read the configuration through AutoConfig, but bring a model class of their own.
                warnings=STRICT if name == "AutoConfig" else ("transformers",),
            )
        )
    return findings


def _check_loader(checkpoint: Checkpoint) -> list[Finding]:
    try:
        _, problems = read_config(checkpoint.raw)
        if not problems and is_size(checkpoint.raw["num_hidden_layers"], "num_hidden_layers"):
            DFlashDraftConfig.from_dict(copy.deepcopy(checkpoint.raw))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Some value is of a type that no reader expects.
        problems = [f"{type(error).__name__}: {error}"]
    if not problems:
        return []
    return [
        Finding(
            "\n".join(problems),
            "a configuration without gaps and contradictions",
            "DFlashDraftModel.from_pretrained refuses it rather than guess.",
            "Follow each line; the other rules tell what the other readers make of it.",
            errors=("transformers",),
        )
    ]


FIELD_RULES = (
    Rule("block_size", "at least two slots", ALL, _check_block_size),
    Rule("target_layer_ids", "a list of layers", ALL, _check_target_layer_ids),
    Rule("tap_order", "ascending, each layer once", STRICT, _check_tap_order),
    Rule("tap_range", "layers before the last one", ALL, _check_tap_range),
    Rule("num_target_layers", "the target's depth", others("vLLM"), _check_num_target_layers),
    Rule("mask_token_id", "an id inside the vocabulary", ALL, _check_mask_token_id),
    Rule("same_spelling", "two spellings agree", ALL, _check_same_spelling),
    Rule("both_spellings", "written where each reader looks", ALL, _check_both_spellings),
    Rule("partly_read", "no field that only some apply", ALL, _check_partly_read),
    Rule("mask_embedding", "no file mask_embedding.pt", others("vLLM"), _check_mask_embedding),
    Rule("eagle_taps", "no second list of taps", ("vLLM", "transformers"), _check_eagle_taps),
    Rule("remote_code", "auto_map names files that exist", STRICT, _check_remote_code),
    Rule("loader", "dflash_hf accepts config.json", ("transformers",), _check_loader),
)


# --- Rules on the tensors, by their headers.


def _some(problems: list[str], limit: int = 3) -> str:
    more = [f"... and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n".join(problems[:limit] + more)


def _shapes(headers: TensorHeaders) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in headers.items()}


def _check_tensors_missing(checkpoint: Checkpoint) -> list[Finding] | None:
    expected = checkpoint.expected
    if expected is None:
        return None
    missing = {name: shape for name, shape in expected.items() if name not in checkpoint.bare_headers}
    if not missing:
        return []
    return [
        Finding(
            f"{len(missing)} of {len(expected)} tensors missing: {enumerate_some(missing)}",
            "every tensor that config.json asks for",
            "vLLM, SGLang and dflash go on with random values in their place and say little or nothing.",
            "Copy or save the drafter again, or correct config.json.",
            errors=ALL,
        )
    ]


def _check_tensor_prefix(checkpoint: Checkpoint) -> list[Finding]:
    prefixed = [name for name in checkpoint.headers or {} if name.startswith("model.")]
    if not prefixed:
        return []
    return [
        Finding(
            f'{len(prefixed)} names with the prefix "model.": {enumerate_some(prefixed)}',
            "names without prefix",
            "vLLM puts the prefix there itself and knows no such name; SGLang and dflash strip it.",
            "Rename the tensors.",
            errors=("vLLM", "transformers"),
        )
    ]


def _check_tensors_unexpected(checkpoint: Checkpoint) -> list[Finding] | None:
    expected = checkpoint.expected
    if expected is None:
        return None
    unexpected = {name: header for name, header in checkpoint.bare_headers.items() if name not in expected}
    own = {name: header for name, header in unexpected.items() if "embed_tokens" in name or "lm_head" in name}
    unknown = {name: header for name, header in unexpected.items() if name not in own}
    findings = []
    for part, errors, why in (
        (unknown, ("vLLM", "transformers"), "vLLM refuses unknown names; SGLang and dflash ignore them."),
        (own, ("transformers",), "vLLM drafts with this embedding or head; SGLang and dflash ignore it."),
    ):
        if part:
            remedy = "Remove them if the drafter was trained without them, or correct config.json."
            found = f"{len(part)} tensor(s) that config.json does not ask for: {enumerate_some(part)}"
            findings.append(Finding(found, "no other tensors", why, remedy, errors, others(*errors)))
    return findings


def _check_tensor_shapes(checkpoint: Checkpoint) -> list[Finding] | None:
    expected = checkpoint.expected
    if expected is None:
        return None
    shapes = {name: shape for name, shape in _shapes(checkpoint.bare_headers).items() if name in expected}
    # One dtype for all, since a rule of its own looks at dtypes.
    problems = tensor_problems({n: expected[n] for n in shapes}, {n: ("BF16", shape) for n, shape in shapes.items()})
    if not problems:
        return []
    why = "Readers stop while they load the weights, most of them naming a fused parameter."
    remedy = "Correct whichever is wrong: config.json, or the code that saved the tensors."
    return [Finding(_some(problems), "the shapes that config.json asks for", why, remedy, errors=ALL)]


def _check_tensor_dtypes(checkpoint: Checkpoint) -> list[Finding]:
    headers = checkpoint.headers or {}
    strange = {name: header for name, header in headers.items() if header[0] not in WEIGHT_DTYPES}
    usual = {name: header for name, header in headers.items() if name not in strange}
    findings = []
    for part, errors, warnings, why in (
        (strange, ALL, (), "Readers cast it without its scales, so that the values mean something else."),
        (usual, ("transformers",), ENGINES, "The engines cast all of them to the dtype that they serve in."),
    ):
        problems = tensor_problems(_shapes(part), part)
        if problems:
            expected = f"one of {enumerate_some(WEIGHT_DTYPES)} for all tensors"
            remedy = "Save the drafter in one dtype; published ones are in bfloat16."
            findings.append(Finding(_some(problems), expected, why, remedy, errors, warnings))
    return findings


TENSOR_RULES = (
    Rule("tensors_missing", "all tensors", ALL, _check_tensors_missing),
    Rule("tensor_prefix", "names without prefix", ("vLLM", "transformers"), _check_tensor_prefix),
    Rule("tensors_unexpected", "no other tensors", ALL, _check_tensors_unexpected),
    Rule("tensor_shapes", "shapes as config.json says", ALL, _check_tensor_shapes),
    Rule("tensor_dtypes", "bf16, fp16 or fp32, all alike", ALL, _check_tensor_dtypes),
)


# --- Whether vLLM, SGLang, z-lab's `dflash` and transformers will all load a drafter as it was trained.


_WIDTH = 100

_CELLS = {"ok": "ok", "warning": "warning", "error": "ERROR", "unchecked": "?", "unconcerned": "-"}


def _unreadable(rule_id: str):
    return lambda checkpoint: [checkpoint.unreadable[rule_id]] if rule_id in checkpoint.unreadable else []


_FILE_RULES = tuple(
    Rule(rule_id, title, ALL, _unreadable(rule_id))
    for rule_id, title in (
        ("folder", "the folder or repository is there"),
        ("config_file", "config.json is a JSON object"),
        ("weights_file", "the tensor headers can be read"),
    )
)

RULES = (*_FILE_RULES, *STRUCTURE_RULES, *ROTARY_RULES, *FIELD_RULES, *TENSOR_RULES, *VALUE_RULES)


@dataclass(frozen=True)
class RuleResult:
    """What became of one rule.

    Args:
        rule: The rule.
        findings: What violates it; None where that could not be told.
    """

    rule: Rule
    findings: list[Finding] | None

    def status(self, reader: str) -> str:
        """One of "ok", "warning", "error", "unchecked" and "unconcerned" for one of `READERS`."""
        if any(reader in finding.errors for finding in self.findings or []):
            return "error"
        if any(reader in finding.warnings for finding in self.findings or []):
            return "warning"
        if reader not in self.rule.readers:
            return "unconcerned"
        return "unchecked" if self.findings is None else "ok"


@dataclass(frozen=True)
class ValidationReport:
    """All rules, what they found, and how to serve the drafter; `print` it for a table.

    Args:
        checkpoint: What was looked at.
        results: One result per rule, in the order of `RULES`.
    """

    checkpoint: Checkpoint
    results: list[RuleResult]

    @property
    def ok(self) -> bool:
        """Whether no reader has an error. Warnings do not count."""
        return not any(finding.errors for result in self.results for finding in result.findings or [])

    def ok_for(self, reader: str) -> bool:
        """Whether one of `READERS` has no error."""
        return all(result.status(reader) != "error" for result in self.results)

    def findings(self, rule_id: str) -> list[Finding]:
        """What violates one rule."""
        return next(result for result in self.results if result.rule.id == rule_id).findings or []

    def status(self, rule_id: str, reader: str) -> str:
        """What became of one rule for one of `READERS`, as in [`RuleResult.status`]."""
        return next(result for result in self.results if result.rule.id == rule_id).status(reader)

    def serving_commands(self) -> dict[str, str]:
        """For each of `READERS`, the command or snippet that drafts with this checkpoint."""
        return serving_commands(self.checkpoint)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "checkpoint": self.checkpoint.name,
            "revision": self.checkpoint.revision,
            "ok": self.ok,
            "readers": {name: {"version": READERS[name], "ok": self.ok_for(name)} for name in READERS},
            "summary": _summary(self.checkpoint),
            "rules": [_result_to_dict(result) for result in self.results],
            "serving": self.serving_commands(),
        }

    def __str__(self) -> str:
        return "\n".join(_report_lines(self))


def validate_checkpoint(folder_or_repo: str | Path, revision: str | None = None) -> ValidationReport:
    """Check a drafter against what each of its readers needs.

    Args:
        folder_or_repo: A local folder, whose weights are looked through for NaN, or a repository of the Hub, of which
            the small files and the headers of the tensors are fetched.
        revision: Branch, tag or commit of a repository.

    Returns:
        A report with every problem of every rule; `.ok` says whether there is no error, `print` shows a table and the
        serving commands. What cannot be read (no such folder, broken files) is a problem like the others.

    Raises:
        ValueError: `revision` is given for a local folder.

    Example:
        >>> print(validate_checkpoint("z-lab/Qwen3.6-27B-DFlash"))  # doctest: +SKIP
    """
    path = Path(folder_or_repo)
    if path.exists():
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} was given for the local {path}: only repositories of the Hub have revisions. "
                "Leave it out, or give a repository."
            )
        checkpoint = read_folder(path, str(folder_or_repo))
    else:
        checkpoint = read_repository(str(folder_or_repo), revision)
    return ValidationReport(checkpoint, [RuleResult(rule, _apply(rule, checkpoint)) for rule in RULES])


def _apply(rule: Rule, checkpoint: Checkpoint) -> list[Finding] | None:
    if rule in _FILE_RULES:
        skipped = "folder" in checkpoint.unreadable and rule.id != "folder"
    else:
        skipped = (checkpoint.headers if rule in TENSOR_RULES else checkpoint.config) is None
    return None if skipped else rule.check(checkpoint)


def serving_commands(checkpoint: Checkpoint) -> dict[str, str]:
    """For each of `READERS`, the command or snippet that drafts with this checkpoint.

    Args:
        checkpoint: The drafter. Where its block size is unknown the commands say `BLOCK_SIZE`, and `TARGET` stands for
            a target that neither the configuration nor the card names.

    Returns:
        Text by reader; empty without a readable `config.json`.
    """
    if checkpoint.config is None:
        return {}
    name, revision, size = checkpoint.name, checkpoint.revision, checkpoint.block_size
    target = checkpoint.base_model or "TARGET"
    speculative = {
        "method": "dflash",
        "model": name,
        **({"revision": revision} if revision else {}),
        "num_speculative_tokens": "BLOCK_SIZE - 1" if size is None else size - 1,
    }
    speculative_config = shlex.quote(json.dumps(speculative))
    gap = " " if len(speculative_config) < _WIDTH - 30 else " \\\n        "
    draft_revision = f" \\\n    --speculative-draft-model-revision {shlex.quote(revision)}" if revision else ""
    return {
        "vLLM": f"vllm serve {shlex.quote(target)} \\\n    --speculative-config{gap}{speculative_config}",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
            f"    --speculative-algorithm DFLASH \\\n"
            f"    --speculative-draft-model-path {shlex.quote(name)} \\\n"
            f"    --speculative-num-draft-tokens {size or 'BLOCK_SIZE'}{draft_revision}"
        ),
        "z-lab": _snippet(checkpoint, target, "dflash", "dense targets only")
        + "output_ids = drafter.spec_generate(\n"
        + "    target, input_ids, max_new_tokens=256, stop_token_ids=[tokenizer.eos_token_id]\n)",
        "transformers": _snippet(
            checkpoint, target, "dflash_hf", "for targets that generate() accepts: no hybrid ones"
        )
        + "output_ids = target.generate(\n"
        + '    input_ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=256\n)',
    }


def _snippet(checkpoint: Checkpoint, target: str, package: str, note: str) -> str:
    revision = f", revision={checkpoint.revision!r}" if checkpoint.revision else ""
    return (
        f"from {package} import DFlashDraftModel  # {note}\n"
        f"target = AutoModelForCausalLM.from_pretrained({target!r}, dtype=torch.bfloat16)\n"
        f"drafter = DFlashDraftModel.from_pretrained({checkpoint.name!r}{revision}, dtype=torch.bfloat16)\n"
    )


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    headers = checkpoint.headers
    return {
        "tensors": None if headers is None else len(headers),
        "parameters": None if headers is None else sum(prod(shape) for _, shape in headers.values()),
        "dtypes": None if headers is None else sorted({dtype for dtype, _ in headers.values()}),
        "values_read": headers is not None and checkpoint.folder is not None,
        "block_size": checkpoint.block_size,
        "target_layer_ids": checkpoint.taps,
        "num_target_layers": checkpoint.value("num_target_layers"),
        "base_model": checkpoint.base_model,
    }


def _result_to_dict(result: RuleResult) -> dict[str, Any]:
    findings = [
        {
            "errors": list(finding.errors),
            "warnings": list(finding.warnings),
            "found": finding.found,
            "expected": finding.expected,
            "why": finding.why,
            "remedy": finding.remedy,
        }
        for finding in result.findings or []
    ]
    status = {reader: result.status(reader) for reader in READERS}
    return {"id": result.rule.id, "title": result.rule.title, "status": status, "findings": findings}


def _report_lines(report: ValidationReport) -> Iterator[str]:
    yield from _wrap(_headline(report.checkpoint), "")
    yield ""
    yield f"{'':<18}  {'':<34}  {'vLLM':<8} {'SGLang':<8} {'z-lab':<8} transformers"
    for result in report.results:
        cells = [f"{_CELLS[result.status(reader)]:<8}" for reader in READERS]
        yield f"{result.rule.id:<18}  {result.rule.title:<34}  {' '.join(cells)}".rstrip()
    yield ""
    yield from _wrap(f"Checked against {', '.join(READERS.values())}. -: not concerned. ?: could not be told.", "")
    if report.checkpoint.headers is not None and report.checkpoint.folder is None:
        yield from _wrap(_values_not_read(report.checkpoint), "")
    for result in report.results:
        for finding in result.findings or []:
            yield from _finding_lines(result.rule, finding)
    yield ""
    yield _verdict(report)
    for reader, command in report.serving_commands().items():
        yield ""
        yield f"{READERS[reader]}{'' if report.ok_for(reader) else ' (has errors, see above)'}:"
        yield from textwrap.indent(command, "    ").splitlines()


def _values_not_read(checkpoint: Checkpoint) -> str:
    revision = f" --revision {shlex.quote(checkpoint.revision)}" if checkpoint.revision else ""
    return (
        "Only the headers of the tensors were fetched: the values were not read, and may hold NaN. They are looked "
        f"through once they are here: `hf download {shlex.quote(checkpoint.name)}{revision}`, then this again."
    )


def _headline(checkpoint: Checkpoint) -> str:
    summary = _summary(checkpoint)
    parts = []
    if summary["tensors"] is not None:
        parts.append(
            f"{summary['tensors']} tensors, {summary['parameters']:,} parameters, {'/'.join(summary['dtypes'])}"
        )
    if summary["block_size"] is not None:
        parts.append(f"block size {summary['block_size']}")
    if summary["target_layer_ids"] is not None:
        taps = ", ".join(str(tap) for tap in summary["target_layer_ids"])
        parts.append(f"reads layers {taps} of {summary['num_target_layers'] or '?'}")
    name = f"{checkpoint.name}{f' at {checkpoint.revision}' if checkpoint.revision else ''}"
    return f"{name}: {'; '.join(parts) or 'nothing could be read'}"


def _finding_lines(rule: Rule, finding: Finding) -> Iterator[str]:
    yield ""
    for label, readers in (("ERROR", finding.errors), ("warning", finding.warnings)):
        if readers:
            yield f"{label} for {', '.join(readers)}: {rule.id}"
    rows = (("found", finding.found), ("expected", finding.expected), ("why", finding.why), ("do", finding.remedy))
    for label, text in rows:
        lines = text.splitlines()
        for number, line in enumerate(lines):
            head = f"    {label + ':' if number == 0 else '':<10}{'- ' if len(lines) > 1 else ''}"
            yield from _wrap(line, head)


def _wrap(text: str, head: str) -> list[str]:
    later = " " * len(head)
    wrapper = textwrap.TextWrapper(_WIDTH, initial_indent=head, subsequent_indent=later, break_on_hyphens=False)
    return wrapper.wrap(text) or [head.rstrip()]


def _verdict(report: ValidationReport) -> str:
    findings = [finding for result in report.results for finding in result.findings or []]
    errors = sum(bool(finding.errors) for finding in findings)
    warnings = sum(bool(finding.warnings) and not finding.errors for finding in findings)
    if errors:
        bad = ", ".join(reader for reader in READERS if not report.ok_for(reader))
        return f"NOT OK: {errors} error(s), {warnings} warning(s). Do not use it with {bad}."
    return f"OK: no errors, {warnings} warning(s)."


# --- The console command `dflash-hf`.


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dflash-hf SUBCOMMAND ...`.

    Args:
        argv: The words after the command's name; None reads those of the process.

    Returns:
        Exit status: 0, or 1 where a checkpoint has errors. Bad usage ends the process with 2.
    """
    parser = argparse.ArgumentParser(prog="dflash-hf", description="Tools for DFlash drafters.", allow_abbrev=False)
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    _add_validate(subcommands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        parser.error(str(error))


def _add_validate(subcommands) -> None:
    parser = subcommands.add_parser(
        "validate",
        help="check what vLLM, SGLang, dflash and transformers each need of a drafter",
        description="Check a drafter's config.json and tensor headers against what each of its readers needs, and "
        "print the serving command for each. The weights of a local folder are looked through for NaN, those of a "
        "repository are not fetched. Exit status: 0 without errors, 1 with errors.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="FOLDER_OR_REPO", help="a local folder or a repository of the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_validate)


def _validate(args: argparse.Namespace) -> int:

    report = validate_checkpoint(args.checkpoint, revision=args.revision)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
