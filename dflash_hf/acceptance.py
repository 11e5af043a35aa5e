# SPDX-License-Identifier: Apache-2.0
"""Acceptance length by real decoding.

The acceptance length is the number of tokens committed per verification forward of the target: the accepted drafts
and the target's own next token, so between 1 and the block size. The prefill and its token are not counted. It is
pooled over all prompts (sum of tokens over sum of forwards, not a mean of means). What is committed is cut at the
end-of-sequence token and at the budget, so the last block of an answer often counts less than was right in it; the
value without those blocks is reported beside it.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from .generation import (
    SpeculativeOutput,
    check_drafter,
    check_request,
    evaluation_mode,
    speculative_generate,
    stop_token_ids,
)
from .modeling_dflash import DFlashDraftModel


@dataclass(frozen=True)
class PromptAcceptance:
    """One prompt's decoding.

    Args:
        prompt_ids: Token ids of the prompt.
        output_ids: Generated token ids, the prefill's first.
        committed: Tokens committed by each verification forward.
        lossless: Whether the output is the target's own greedy output; None where that was not checked.
        first_difference: Index in `output_ids` of the first token that differs.
        top2_gap: Difference of the target's two largest logits at that token. Near 0 it is a tie that another order
            of summation decides otherwise, which low precision makes likely; a large gap is a fault.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    committed: list[int]
    lossless: bool | None = None
    first_difference: int | None = None
    top2_gap: float | None = None


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
        return _ratio([prompt.committed for prompt in self.prompts])

    @property
    def acceptance_length_without_last_block(self) -> float:
        """The same without each answer's last verification, which the end of the answer may have cut."""
        return _ratio([prompt.committed[:-1] for prompt in self.prompts])

    @property
    def lossless(self) -> bool | None:
        """Whether every output is the target's own greedy output; None where that was not checked."""
        flags = [prompt.lossless for prompt in self.prompts]
        return None if None in flags else all(flags)

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types; None stands for values without any verification."""
        lengths = {
            name: None if math.isnan(value) else value
            for name, value in (
                ("acceptance_length", self.acceptance_length),
                ("acceptance_length_without_last_block", self.acceptance_length_without_last_block),
            )
        }
        return {
            **lengths,
            "committed_tokens": sum(sum(prompt.committed) for prompt in self.prompts),
            "forwards": sum(len(prompt.committed) for prompt in self.prompts),
            "lossless": self.lossless,
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


def measure_acceptance(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
    check_lossless: bool = True,
    progress: bool = True,
) -> AcceptanceReport:
    """Decode prompts one by one and report the acceptance length (defined at the top of this module).

    Args:
        target: A whole causal language model, dense or hybrid.
        drafter: A drafter made for it.
        prompts: Token ids of each prompt: lists, or tensors of shape `[n]` or `[1, n]`.
        max_new_tokens: Budget of generated tokens per prompt, at least 2: the first is the prefill's.
        eos_token_id: One or several ids after which an answer stops; None takes those of the target's generation
            config, an empty list stops at none.
        check_lossless: Also let the target answer alone and compare, which takes that much longer.
        progress: Show a bar with the speed of the speculative decoding.

    Returns:
        [`AcceptanceReport`].

    Raises:
        ValueError: When a prompt is empty or out of the vocabulary, there is none, the budget leaves nothing to
            verify, or the drafter is another target's.
    """
    check_drafter(target, drafter)
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}; expected at least 2: the first token is the prefill's and is not "
            "counted, so nothing would be verified."
        )
    rows = _prompt_rows(prompts, vocab_size=target.get_input_embeddings().get_parameter("weight").shape[0])
    results: list[PromptAcceptance] = []
    num_tokens, seconds = 0, 0.0
    with tqdm(rows, desc="decoding", unit="prompt", disable=not progress) as bar:
        for input_ids in bar:
            start = time.perf_counter()
            output = decode(target, drafter, input_ids, max_new_tokens, eos_token_id)
            output_ids = output.sequences[0, input_ids.shape[1] :].tolist()
            seconds += time.perf_counter() - start
            num_tokens += len(output_ids)
            comparison = {}
            if check_lossless:
                comparison = _compare_with_greedy(target, input_ids, output_ids, max_new_tokens, eos_token_id)
            results.append(PromptAcceptance(input_ids[0].tolist(), output_ids, output.committed, **comparison))
            pooled = _ratio([result.committed for result in results])
            bar.set_postfix_str(f"{num_tokens / seconds:.1f} tokens/s, acceptance length {pooled:.2f}")
    return AcceptanceReport(results, drafter.config.block_size, max_new_tokens)


def decode(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
) -> SpeculativeOutput:
    """Speculative greedy decoding of one prompt: transformers' own where it serves the target, else ours.

    The target's generation config has no say except for its pad token and, where none are given, its
    end-of-sequence tokens: sampling, beams, repetition penalties, suppressed or forced tokens, minimal lengths, stop
    strings and cache settings are all set aside for the call.

    Args:
        target: A whole causal language model, dense or hybrid.
        drafter: A drafter made for it, on any device and of any floating type.
        input_ids (`torch.Tensor` of shape `[1, n]`): One prompt of at least one token.
        max_new_tokens: Budget of generated tokens, at least 1.
        eos_token_id: One or several ids after which generation stops; None takes those of the target's generation
            config, an empty list stops at none.

    Returns:
        [`SpeculativeOutput`]; both ways count alike.

    Raises:
        ValueError: When the prompt is not one row of tokens, the budget is empty or the drafter is another target's.
    """
    # `_is_stateful` is what `generate` itself asks before it refuses.
    if target._is_stateful or not _has_raw_embeddings(target):
        return speculative_generate(target, drafter, input_ids, max_new_tokens, eos_token_id)
    check_drafter(target, drafter)
    check_request(input_ids, max_new_tokens)
    recorder = _CommitRecorder()
    with evaluation_mode(target, drafter), _count_forwards(target) as calls, _cast_for(target, drafter):
        sequences = _greedy(target, input_ids, max_new_tokens, eos_token_id, drafter, recorder)
    # The prompt is put first, then what each forward commits, of which the first is the prefill.
    prompt, *by_forward = recorder.sizes
    if len(by_forward) != len(calls) or prompt + sum(by_forward) != sequences.shape[1]:
        raise RuntimeError(
            f"generate ran {len(calls)} forwards of the target but streamed {len(by_forward)} pieces of "
            f"{sum(by_forward)} tokens for an answer of {sequences.shape[1] - prompt}: this release of transformers "
            "streams otherwise than expected. Use speculative_generate."
        )
    return SpeculativeOutput(sequences, by_forward[1:])


def _has_raw_embeddings(target: PreTrainedModel) -> bool:
    """Whether the target's embedding module gives the plain rows of its table, which are a drafter's inputs.

    `generate` calls the module; one that scales its rows (Gemma) would give the drafter inputs it was not trained on.
    """
    embedding = target.get_input_embeddings()
    table = embedding.get_parameter("weight")
    ids = torch.arange(min(4, table.shape[0]), device=table.device)
    return torch.equal(embedding(ids), nn.functional.embedding(ids, table))


class _CommitRecorder(BaseStreamer):
    """Keeps the number of tokens in each piece that `generate` streams."""

    def __init__(self):
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


@contextmanager
def _count_forwards(target: PreTrainedModel) -> Iterator[list[None]]:
    """A list that grows by one with every forward of the target."""
    calls: list[None] = []
    handle = target.register_forward_hook(lambda module, args, output: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def _cast_for(target: PreTrainedModel, drafter: DFlashDraftModel) -> Iterator[None]:
    """Let `generate`, which moves tensors but never casts them, run a drafter of another type than the target."""
    dtype = target.get_output_embeddings().weight.dtype

    def cast_inputs(module, args, kwargs):
        for name in ("noise_embeds", "context_hidden_states"):
            kwargs[name] = kwargs[name].to(drafter.dtype)
        return args, kwargs

    def cast_output(module, args, output):
        output.last_hidden_state = output.last_hidden_state.to(dtype)
        return output

    handles = [
        drafter.register_forward_pre_hook(cast_inputs, with_kwargs=True),
        drafter.register_forward_hook(cast_output),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _greedy(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    eos_token_id: int | list[int] | None,
    drafter: DFlashDraftModel | None = None,
    streamer: BaseStreamer | None = None,
) -> torch.Tensor:
    """`generate` with nothing but greedy decoding, whatever the target's generation config says."""
    own, stop = target.generation_config, stop_token_ids(target, eos_token_id)
    plain = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else next(iter(stop), None),
        speculation_type=None if drafter is None else "dflash",
    )
    input_ids = input_ids.to(target.device)
    # `generate` fills what a config leaves open from the target's own, so that one must be out of the way.
    target.generation_config = GenerationConfig()
    try:
        return target.generate(  # type: ignore[operator]
            input_ids,
            generation_config=plain,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=drafter,
            streamer=streamer,
        )
    finally:
        target.generation_config = own


@torch.no_grad()
def _compare_with_greedy(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    output_ids: list[int],
    max_new_tokens: int,
    eos_token_id: int | list[int] | None,
) -> dict[str, Any]:
    """Fields `lossless`, `first_difference` and `top2_gap` of [`PromptAcceptance`]."""
    with evaluation_mode(target):
        sequences = _greedy(target, input_ids, max_new_tokens, eos_token_id)
        expected = sequences[0, input_ids.shape[1] :].tolist()
        if output_ids == expected:
            return {"lossless": True}
        common = min(len(output_ids), len(expected))
        first = next((i for i in range(common) if output_ids[i] != expected[i]), common)
        known = sequences[:, : input_ids.shape[1] + first]
        logits = target(input_ids=known, logits_to_keep=1, use_cache=False).logits[0, -1].float()
    largest, second = logits.topk(2).values.tolist()
    return {"lossless": False, "first_difference": first, "top2_gap": largest - second}


def _prompt_rows(prompts: Sequence[Sequence[int] | torch.Tensor], vocab_size: int) -> list[torch.Tensor]:
    """Each prompt as int64 `[1, n]`."""
    rows = []
    for index, prompt in enumerate(prompts):
        ids = torch.as_tensor(prompt, dtype=torch.long)
        row = ids[None] if ids.dim() == 1 else ids
        if row.dim() != 2 or row.shape[0] != 1 or row.shape[1] == 0:
            raise ValueError(
                f"Prompt {index} has the shape {list(ids.shape)}; expected token ids of shape [n] or [1, n] with "
                "n >= 1. Leave empty prompts out, and pass a batch as a list of its rows."
            )
        if row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(
                f"Prompt {index} holds the ids {row.min().item()} to {row.max().item()}, the target's embedding has "
                f"{vocab_size} rows: the prompt was made with another tokenizer. Use the target's."
            )
        rows.append(row)
    if not rows:
        raise ValueError("There is no prompt to decode; give at least one list of token ids.")
    return rows


def _ratio(committed: list[list[int]]) -> float:
    """Tokens per forward over the lists of all prompts; nan without any forward."""
    forwards = sum(len(tokens) for tokens in committed)
    return sum(sum(tokens) for tokens in committed) / forwards if forwards else math.nan


def _resampled_ratios(
    reports: list[AcceptanceReport], confidence: float, resamples: int, seed: int
) -> list[np.ndarray]:
    """The pooled acceptance length of each report in every resample, which draw the same prompts for all reports."""
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(
            f"confidence is {confidence} and resamples is {resamples}; expected a share between 0 and 1, as 0.95, and "
            "at least one resample, as 2000."
        )
    count = len(reports[0].prompts)
    draws = np.random.default_rng(seed).integers(0, count, (resamples, count))
    ratios = []
    for report in reports:
        tokens = np.array([sum(prompt.committed) for prompt in report.prompts], dtype=float)
        forwards = np.array([len(prompt.committed) for prompt in report.prompts])
        drawn = forwards[draws].sum(axis=1)
        ratios.append(np.where(drawn > 0, tokens[draws].sum(axis=1) / np.maximum(drawn, 1), np.nan))
    return ratios


def _central_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """The central share of the values that are not nan; a resample without any verification is one."""
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


__all__ = [
    "AcceptanceReport",
    "PromptAcceptance",
    "bootstrap_difference",
    "decode",
    "measure_acceptance",
]
