# SPDX-License-Identifier: Apache-2.0
"""What is reported about decoded prompts.

The acceptance length is the number of tokens committed per verification forward of the target: the accepted drafts
and the target's own next token, so between 1 and the block size. The prefill and its token are not counted. It is
pooled over all prompts (sum of tokens over sum of forwards, not a mean of means). What is committed is cut at the
end-of-sequence token and at the budget, so the last block of an answer often counts less than was right in it; the
value without those blocks is reported beside it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PromptAcceptance:
    """One prompt's decoding.

    Args:
        prompt_ids: Token ids of the prompt.
        output_ids: Generated token ids, the prefill's first.
        committed: Tokens committed by each verification forward.
        accepted: Drafts among them.
        lossless: Whether the output is the target's own greedy output; None where that was not checked.
        first_difference: Index in `output_ids` of the first token that differs.
        top2_gap: Difference of the target's two largest logits at that token. A large gap is a fault.
        tie: Whether that gap is within rounding, so that another order of summation decides otherwise.
        seconds: Time of the speculative decoding, the prefill's included.
        plain_seconds: Time that the target alone took for its own answer.
        plain_tokens: Tokens of that answer.
        source: Where the prompt comes from.
        language: Its language.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    committed: list[int]
    accepted: list[int]
    lossless: bool | None = None
    first_difference: int | None = None
    top2_gap: float | None = None
    tie: bool | None = None
    seconds: float | None = None
    plain_seconds: float | None = None
    plain_tokens: int | None = None
    source: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class AcceptanceReport:
    """Decodings of a set of prompts and the acceptance length over them (defined at the top of this module).

    Args:
        prompts: One [`PromptAcceptance`] per prompt, in the order given.
        block_size: Slots per block of the drafter, the largest possible acceptance length.
        max_new_tokens: Budget per prompt.
    """

    prompts: list[PromptAcceptance]
    block_size: int
    max_new_tokens: int

    @property
    def acceptance_length(self) -> float:
        """Committed tokens over verification forwards, pooled; nan where every answer ended with its first token."""
        return _ratio(prompt.committed for prompt in self.prompts)

    @property
    def acceptance_length_without_last_block(self) -> float:
        """The same without each answer's last verification, which the end of the answer may have cut."""
        return _ratio(prompt.committed[:-1] for prompt in self.prompts)

    @property
    def lossless(self) -> bool | None:
        """Whether every output is the target's own greedy output, up to ties; None where that was not checked."""
        flags = [None if prompt.lossless is None else prompt.lossless or bool(prompt.tie) for prompt in self.prompts]
        return None if None in flags else all(flags)

    @property
    def num_ties(self) -> int:
        """Outputs that part from the target's own at a tie."""
        return sum(bool(prompt.tie) for prompt in self.prompts)

    @property
    def slot_acceptance(self) -> list[float]:
        """For slots 1 to b - 1, the share of all blocks that accepted the slot's draft (and so all before it)."""
        accepted = np.array([n for prompt in self.prompts for n in prompt.accepted])
        return [float((accepted >= slot).mean()) if len(accepted) else math.nan for slot in range(1, self.block_size)]

    @property
    def committed_histogram(self) -> list[int]:
        """The number of blocks that committed 1, 2, .., b tokens."""
        committed = [n for prompt in self.prompts for n in prompt.committed]
        return np.bincount(committed, minlength=self.block_size + 1)[1:].tolist()

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the speculative decoding; nan where it was not taken."""
        return _rate((len(prompt.output_ids), prompt.seconds) for prompt in self.prompts)

    @property
    def plain_tokens_per_second(self) -> float:
        """Generated tokens over the time of the target alone; nan where it was not taken."""
        return _rate((prompt.plain_tokens or 0, prompt.plain_seconds) for prompt in self.prompts)

    @property
    def speed_up(self) -> float:
        """Speculative over plain tokens per second."""
        return self.tokens_per_second / self.plain_tokens_per_second

    def by_position(self, width: int) -> list[dict[str, float]]:
        """The acceptance length over the answer, which shows how it decays with the context.

        Args:
            width: Tokens of the answer that share a value.

        Returns:
            For each stretch that holds a block's anchor, its first token (`position`), `blocks` and their
            `acceptance_length`. Token 0 is the prefill's.
        """
        blocks: dict[int, list[int]] = {}
        for prompt in self.prompts:
            position = 0
            for committed in prompt.committed:
                blocks.setdefault(position // width, []).append(committed)
                position += committed
        return [
            {"position": index * width, "blocks": len(values), "acceptance_length": sum(values) / len(values)}
            for index, values in sorted(blocks.items())
        ]

    def groups(self, key: Callable[[PromptAcceptance], str | None]) -> dict[str, "AcceptanceReport"]:
        """Reports of the prompts that share a value of `key` (such as their source), without those that have none."""
        names = dict.fromkeys(name for prompt in self.prompts if (name := key(prompt)) is not None)
        return {name: replace(self, prompts=[p for p in self.prompts if key(p) == name]) for name in names}

    def summary(self) -> dict[str, Any]:
        """The figures over all prompts in JSON types; None stands for values without anything to measure."""
        figures = {
            "acceptance_length": self.acceptance_length,
            "acceptance_length_without_last_block": self.acceptance_length_without_last_block,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speed_up": self.speed_up,
        }
        return {
            **{name: or_none(value) for name, value in figures.items()},
            "slot_acceptance": [or_none(value) for value in self.slot_acceptance],
            "committed_histogram": self.committed_histogram,
            "committed_tokens": sum(sum(prompt.committed) for prompt in self.prompts),
            "forwards": sum(len(prompt.committed) for prompt in self.prompts),
            "num_prompts": len(self.prompts),
            "lossless": self.lossless,
            "num_ties": self.num_ties,
        }

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types, prompt by prompt too."""
        return {
            **self.summary(),
            "block_size": self.block_size,
            "max_new_tokens": self.max_new_tokens,
            "prompts": [{**asdict(prompt), "forwards": len(prompt.committed)} for prompt in self.prompts],
        }

    def bootstrap_interval(
        self, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
    ) -> tuple[float, float]:
        """Percentile bootstrap interval of the pooled acceptance length, drawing whole prompts.

        Args:
            confidence: Share of the resamples inside the interval, between 0 and 1.
            resamples: Number of resamples.
            seed: Of the draws.

        Returns:
            (low, high). One prompt gives an interval without width: it says nothing about others.
        """
        (ratios,) = _resampled_ratios([self], confidence, resamples, seed)
        return _central_interval(ratios, confidence)

    def speed_up_interval(self, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
        """The same of the speed-up; nan where that is."""
        draws = _draws(len(self.prompts), confidence, resamples, seed)
        if math.isnan(self.speed_up):
            return math.nan, math.nan
        times = np.array([[p.seconds, p.plain_seconds] for p in self.prompts])[draws].sum(axis=1)
        tokens = np.array([[len(p.output_ids), p.plain_tokens or 0] for p in self.prompts])[draws].sum(axis=1)
        # A resample of prompts that a coarse clock gave no time has no speed.
        speeds, plain_speeds = np.divide(tokens, times, out=np.full_like(times, np.nan), where=times > 0).T
        return _central_interval(speeds / plain_speeds, confidence)


def bootstrap_difference(
    before: AcceptanceReport,
    after: AcceptanceReport,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of `after - before`, each resample drawing the same prompts for both.

    Args:
        before: Report of one drafter.
        after: Report of another over the same prompts and budget.
        confidence: Share of the resamples inside the interval, between 0 and 1.
        resamples: Number of resamples.
        seed: Of the draws.

    Returns:
        (low, high) of the difference of pooled acceptance lengths.

    Raises:
        ValueError: When the reports are over different prompts or budgets.
    """
    if [p.prompt_ids for p in before.prompts] != [p.prompt_ids for p in after.prompts]:
        raise ValueError(
            f"The reports are over different prompts ({len(before.prompts)} and {len(after.prompts)}, or not the same "
            "tokens in the same order): a paired difference needs each prompt in both. Measure both drafters on one "
            "list of prompts."
        )
    if before.max_new_tokens != after.max_new_tokens:
        raise ValueError(
            f"The reports have budgets of {before.max_new_tokens} and {after.max_new_tokens} new tokens: answers of "
            "other lengths are other data. Measure both with the same max_new_tokens."
        )
    first, second = _resampled_ratios([before, after], confidence, resamples, seed)
    return _central_interval(second - first, confidence)


def or_none(value: float) -> float | None:
    """A number as JSON can hold it: None for nan."""
    return None if math.isnan(value) else value


def _ratio(committed: Iterable[list[int]]) -> float:
    """Tokens per forward over the lists of all prompts; nan without any forward."""
    blocks = [n for tokens in committed for n in tokens]
    return sum(blocks) / len(blocks) if blocks else math.nan


def _rate(tokens_and_seconds: Iterable[tuple[int, float | None]]) -> float:
    """Tokens per second over all prompts; nan where a time is missing."""
    tokens, seconds = 0, 0.0
    for count, time in tokens_and_seconds:
        tokens, seconds = tokens + count, seconds + (math.nan if time is None else time)
    return tokens / seconds if seconds else math.nan


def _resampled_ratios(
    reports: list[AcceptanceReport], confidence: float, resamples: int, seed: int
) -> list[np.ndarray]:
    """The pooled acceptance length of each report in every resample, which draw the same prompts for all reports."""
    draws = _draws(len(reports[0].prompts), confidence, resamples, seed)
    ratios = []
    for report in reports:
        tokens = np.array([sum(prompt.committed) for prompt in report.prompts], dtype=float)
        forwards = np.array([len(prompt.committed) for prompt in report.prompts])
        drawn = forwards[draws].sum(axis=1)
        ratios.append(np.where(drawn > 0, tokens[draws].sum(axis=1) / np.maximum(drawn, 1), np.nan))
    return ratios


def _draws(count: int, confidence: float, resamples: int, seed: int) -> np.ndarray:
    """Indices of the prompts of each resample, `[resamples, count]`."""
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(
            f"confidence is {confidence} and resamples is {resamples}; expected a share between 0 and 1, as 0.95, and "
            "at least one resample, as 2000."
        )
    return np.random.default_rng(seed).integers(0, count, (resamples, count))


def _central_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """The central share of the values that are not nan; a resample without any verification is one."""
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


__all__ = ["AcceptanceReport", "PromptAcceptance", "bootstrap_difference"]
