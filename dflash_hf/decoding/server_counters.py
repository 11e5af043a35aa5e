# SPDX-License-Identifier: Apache-2.0
"""What vLLM and SGLang say about the drafts they verified, in their metrics and in their answers."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


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


def vllm_counters(page: str) -> Verifications:
    """What a vLLM server has verified since its start.

    Args:
        page: Its `/metrics`.

    Raises:
        CountersMissing: When it does not speculate.
    """
    samples = list(_samples(page))

    def total(name: str) -> float:
        found = [value for sample, _, value in samples if sample in (name, f"{name}_total")]
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
            by_slot[int(position[1])] = by_slot.get(int(position[1]), 0) + value
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
    if len(states) > 1:
        raise CountersMissing(f"it runs {len(states)} data-parallel workers, whose means cannot be pooled. Run one.")
    length = states[0].get("avg_spec_accept_length")
    if not length:
        return Verifications()
    samples = list(_samples(page or ""))
    tokens = [value for name, _, value in samples if name == "sglang:generation_tokens_total"]
    requests = [value for name, _, value in samples if name == "sglang:num_requests_total"]
    if not tokens or not requests:
        raise CountersMissing(
            "it gives the mean acceptance length since its start and no number of tokens, so what was before cannot "
            "be taken off. Start it with --enable-metrics."
        )
    # The first token of an answer is the prefill's.
    verified = sum(tokens) - sum(requests)
    return Verifications(verified / length, verified - verified / length)


def own_verifications(answer: dict[str, Any]) -> Verifications | None:
    """An answer's own verifications, from its JSON or the last chunk of its stream, where the engine gives them."""
    vllm = (answer.get("metrics") or {}).get("speculative_decoding")
    if vllm:
        histogram = {int(accepted): count for accepted, count in (vllm.get("acceptance_histogram") or {}).items()}
        return Verifications(vllm["num_spec_steps"], vllm["num_accepted_draft_tokens"], _at_least(histogram))
    choices = answer.get("choices") or [{}]
    sglang = answer.get("meta_info") or choices[0].get("meta_info") or {}
    if "spec_verify_ct" not in sglang:
        return None
    histogram = dict(enumerate(sglang.get("spec_accept_histogram") or []))
    # The first token is the prefill's.
    accepted = answer["usage"]["completion_tokens"] - 1 - sglang["spec_verify_ct"]
    return Verifications(sglang["spec_verify_ct"], accepted, _at_least(histogram))


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each sample of a Prometheus text page."""
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match and _is_number(match[3]):
            yield match[1], match[2] or "", float(match[3])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _at_least(histogram: dict[int, float]) -> list[float]:
    """From the number of forwards that accepted 0, 1, .. drafts: those that accepted at least 1, 2, .."""
    most = max((accepted for accepted, count in histogram.items() if count), default=0)
    return [sum(count for accepted, count in histogram.items() if accepted >= k) for k in range(1, most + 1)]


__all__ = ["CountersMissing", "Verifications", "own_verifications", "sglang_counters", "vllm_counters"]
