# SPDX-License-Identifier: Apache-2.0
"""What the rules of [`validation`] look at and what they return."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..checkpoint_format import TensorHeaders, expected_tensors
from ..config_rules import MAX_LAYERS


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
