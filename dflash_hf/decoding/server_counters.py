# SPDX-License-Identifier: Apache-2.0
"""What vLLM and SGLang say in their metrics about the drafts that they verified since their start."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


# More slots than any block has.
MAX_SLOTS = 1024
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


class CountersMissing(RuntimeError):
    """The server does not say what it verified; the message says why and what to do."""


@dataclass(frozen=True)
class Verifications:
    """What some verifications of the target committed.

    Args:
        forwards: Verification forwards.
        accepted: Accepted drafts over all of them.
        by_slot: Forwards that accepted the draft of slot 1, 2, ..; empty where the server does not tell.
    """

    forwards: float = 0
    accepted: float = 0
    by_slot: list[float] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Accepted drafts and the target's own token, per forward; nan without any forward."""
        return 1 + self.accepted / self.forwards if self.forwards else math.nan

    def since(self, before: "Verifications") -> "Verifications":
        """What came after an earlier count."""
        then = before.by_slot + [0.0] * (len(self.by_slot) - len(before.by_slot))
        by_slot = [new - old for new, old in zip(self.by_slot, then, strict=True)]
        return Verifications(self.forwards - before.forwards, self.accepted - before.accepted, by_slot)

    def went_back(self, before: "Verifications") -> bool:
        """Whether any count is below an earlier one."""
        counts, then = (
            [self.forwards, self.accepted, *self.by_slot],
            [before.forwards, before.accepted, *before.by_slot],
        )
        return len(counts) < len(then) or any(new < old for new, old in zip(counts, then, strict=False))

    @staticmethod
    def total(parts: Iterable["Verifications"]) -> "Verifications":
        """The sum over some parts."""
        parts = list(parts)
        slots = max((len(part.by_slot) for part in parts), default=0)
        by_slot = [sum(part.by_slot[k] for part in parts if k < len(part.by_slot)) for k in range(slots)]
        return Verifications(sum(p.forwards for p in parts), sum(p.accepted for p in parts), by_slot)


def count_of(value: Any, name: str) -> float:
    """A count as a server gives it.

    Args:
        value: What it gives.
        name: As what.

    Raises:
        CountersMissing: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CountersMissing(f"it gives {str(value)[:40]!r} as {name}, where a count is expected. See its log.")
    return value


def vllm_counters(page: str) -> Verifications:
    """What a vLLM server has verified since its start.

    Args:
        page: Its `/metrics`.

    Raises:
        CountersMissing: When it does not speculate, or gives what is no count.
    """
    samples = list(_samples(page))

    def total(name: str) -> float:
        found = [count_of(value, name) for sample, _, value in samples if sample in (name, f"{name}_total")]
        if not found:
            raise CountersMissing(
                f"its metrics lack {name}, so it was started without speculation. Start it with --speculative-config "
                "(`dflash-hf validate DRAFTER` prints the command)."
            )
        return sum(found)

    by_slot: dict[int, float] = {}
    for name, labels, value in samples:
        position = _POSITION.search(labels)
        if name.removesuffix("_total") == "vllm:spec_decode_num_accepted_tokens_per_pos" and position:
            by_slot[int(position[1])] = by_slot.get(int(position[1]), 0) + count_of(value, name)
    if sorted(by_slot) != list(range(len(by_slot))):
        raise CountersMissing(f"its metrics count the slots {sorted(by_slot)[:MAX_SLOTS]}, of which some are missing.")
    return Verifications(
        total("vllm:spec_decode_num_drafts"),
        total("vllm:spec_decode_num_accepted_tokens"),
        [by_slot[k] for k in sorted(by_slot)],
    )


def sglang_counters(info: dict[str, Any], page: str | None) -> Verifications:
    """What an SGLang server has verified since its start.

    Args:
        info: Its `/server_info`, with the mean acceptance length since its start.
        page: Its `/metrics`, whose numbers of tokens and requests turn the mean into counts; None without that page.

    Raises:
        CountersMissing: When the counts cannot be had.
    """
    states = info.get("internal_states") or [{}]
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise CountersMissing(f"its internal_states are {str(states)[:80]!r}, where a list of objects is expected.")
    if len(states) > 1:
        raise CountersMissing(f"it runs {len(states)} data-parallel workers, whose means cannot be pooled. Run one.")
    length = count_of(states[0].get("avg_spec_accept_length") or 0, "avg_spec_accept_length")
    if not length:
        return Verifications()
    if length < 1:
        raise CountersMissing(f"its avg_spec_accept_length is {length}, and each verification commits a token.")
    samples = list(_samples(page or ""))
    names = ("sglang:generation_tokens_total", "sglang:num_requests_total")
    tokens, requests = ([count_of(value, name) for n, _, value in samples if n == name] for name in names)
    if not tokens or not requests:
        raise CountersMissing(
            "it gives the mean acceptance length since its start and no number of tokens, so what was before cannot "
            "be taken off. Start it with --enable-metrics."
        )
    # The first token of an answer is the prefill's.
    verified = sum(tokens) - sum(requests)
    return Verifications(verified / length, verified - verified / length)


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each sample of a Prometheus text page."""
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match:
            yield match[1], match[2] or "", _number(match[3])


def _number(text: str) -> float:
    """A number; nan for what is none, which no count is either."""
    try:
        return float(text)
    except ValueError:
        return math.nan


__all__ = ["CountersMissing", "Verifications", "count_of", "sglang_counters", "vllm_counters"]
