# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of one prompt, greedy or sampled, for dense and hybrid targets.

Shapes: n tokens of the prompt, m generated ones, b block size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from .decoding.checks import check_drafter, check_finite, check_request, check_supported
from .decoding.sampling import Greedy, Sampling
from .decoding.state import DecodingState, UncachedDecodingState
from .modeling_dflash import DFlashDraftModel
from .target.loading import eos_token_ids
from .target.varied_lengths import varied_lengths


@dataclass(frozen=True)
class SpeculativeOutput:
    """What was generated, and what each verification contributed.

    Args:
        sequences (`torch.LongTensor` of shape `[1, n + m]`): The prompt and the `m` generated tokens, on the target's
            device.
        committed (`list[int]`): Tokens committed by each verification forward (accepted drafts and the target's own
            next token), cut at the end-of-sequence token and at the budget. They add up to `m - 1`: the first token
            is the prefill's.
        accepted (`list[int]`): Drafts among them: one fewer, except where a cut leaves drafts alone.
    """

    sequences: torch.Tensor
    committed: list[int]
    accepted: list[int]


def speculative_generate(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    sample_drafts: bool = False,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> SpeculativeOutput:
    """Generate the target's own continuation, several tokens per forward of the target.

    At temperature 0 the tokens are those of the target's greedy decoding; above it they have the distribution of the
    target's sampling.

    Args:
        target (`PreTrainedModel`): A whole causal language model, dense or hybrid.
        drafter (`DFlashDraftModel`): A drafter made for it, on any device and of any floating type.
        input_ids (`torch.Tensor` of shape `[1, n]`): One prompt of at least one token.
        max_new_tokens: Budget of generated tokens, at least 1; fewer where an end-of-sequence token comes first.
        eos_token_id: One or several ids after which generation stops; None takes those of
            `target.generation_config`, an empty list stops at none.
        temperature: Divides the logits; 0 is greedy.
        top_p: Probability that the most likely tokens kept hold together; 1 keeps all.
        top_k: Number of most likely tokens kept; 0 keeps all.
        sample_drafts: Draw the drafts from the drafter's distribution instead of proposing its most likely tokens.
        generator: Source of the sampling's randomness on the target's device; the global one by default.
        use_cache: False reads all known tokens again in every forward, for targets whose caches cannot be rolled back.

    Returns:
        [`SpeculativeOutput`].

    Raises:
        ValueError: When the prompt is not one row of the target's tokens, the budget is empty, a sampling setting is
            out of range, the drafter is another target's, or the target's caches cannot be rolled back.
        FloatingPointError: When the target or the drafter computes logits that are no numbers.
    """
    check_drafter(target, drafter)
    check_request(target, drafter, input_ids, max_new_tokens)
    sampling = Sampling.of(temperature, top_p, top_k, sample_drafts, generator)
    stop = stop_token_ids(target, eos_token_id)
    return _decode(target, drafter, input_ids.to(target.device), max_new_tokens, stop, sampling, use_cache)


@torch.no_grad()
def _decode(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    known: torch.Tensor,
    max_new_tokens: int,
    stop: list[int],
    sampling: Greedy | Sampling,
    use_cache: bool = True,
) -> SpeculativeOutput:
    limit = known.shape[1] + max_new_tokens
    committed: list[int] = []
    accepted: list[int] = []
    state_class = DecodingState if use_cache else UncachedDecodingState
    with evaluation_mode(target, drafter), state_class(target, drafter) as state:
        logits = state.prefill(known).to(known.device)
        check_finite(target=logits)
        known = torch.cat([known, sampling.first(logits)[None]], dim=1)
        while known.shape[1] < limit and known[0, -1].item() not in stop:
            anchor = known[:, -1:]
            draft_logits = state.draft(anchor)[None].to(known.device)
            drafts, proposed_from = sampling.propose(draft_logits)
            # The block always has b slots: how much of it fits is the cut's business.
            logits = state.verify(anchor, drafts[0])[None].to(known.device)
            check_finite(target=logits, drafter=draft_logits)
            num_accepted, tokens = sampling.verify(drafts, proposed_from, logits)
            new = _cut(tokens[0].tolist(), int(num_accepted[0]), limit - known.shape[1], stop)
            committed.append(len(new))
            accepted.append(min(len(new), int(num_accepted[0])))
            known = torch.cat([known, tokens[:, : len(new)]], dim=1)
            state.commit(tokens[:, : len(new)])
    return SpeculativeOutput(known, committed, accepted)


def _cut(tokens: list[int], num_accepted: int, budget: int, stop: list[int]) -> list[int]:
    """The accepted drafts and the target's own token after them, cut at the budget and after a stop token."""
    tokens = tokens[: min(num_accepted + 1, budget)]
    end = next((i for i, token in enumerate(tokens, start=1) if token in stop), len(tokens))
    return tokens[:end]


def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DFlashDraftModel | None = None,
    sample_drafts: bool = False,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Speculative decoding inside `generate`, which reads sampling, budget and stop tokens as it always does.

    transformers hands no `streamer` to a callable, so that one is given the prompt alone.

        target.generate(**inputs, custom_generate=speculative_decoding, drafter=drafter, max_new_tokens=64)

    Args:
        model: The target; `generate` gives it and the next four.
        input_ids (`torch.Tensor` of shape `[1, n]`): The prompt.
        logits_processor: What `generate` made of temperature, top-k, top-p and min-p.
        stopping_criteria: Budget and end-of-sequence tokens.
        generation_config: The settings of the call.
        drafter: A drafter made for the target.
        sample_drafts: As in [`speculative_generate`].
        generator: As in [`speculative_generate`].
        **model_kwargs: What `generate` would give to the target's forwards; a prompt needs none of it.

    Returns:
        The prompt and the generated tokens, `[1, n + m]`.

    Raises:
        ValueError: Without a drafter, for several or padded prompts, and for settings and inputs (as images) whose
            effect would be lost.
        FloatingPointError: As [`speculative_generate`].
    """
    if drafter is None:
        raise ValueError("generate was called without a drafter; pass drafter= beside custom_generate=.")
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    check_drafter(model, drafter)
    check_supported(logits_processor, stopping_criteria, generation_config, model_kwargs)
    check_request(model, drafter, input_ids, max_new_tokens)
    sampling: Greedy | Sampling = Greedy()
    if generation_config.do_sample:
        sampling = Sampling(logits_processor, sample_drafts, generator)
    stop = stop_token_ids(model, generation_config.eos_token_id or [])
    return _decode(model, drafter, input_ids, max_new_tokens, stop, sampling).sequences


def stop_token_ids(target: PreTrainedModel, eos_token_id: int | list[int] | None) -> list[int]:
    """End-of-sequence ids as a list, by default those of the target's generation config."""
    if eos_token_id is None:
        return eos_token_ids(target.generation_config)
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Models in eval mode, for prompts of any length: no dropout, and no checkpointing, which drops caches."""
    training = [model for model in models if model.training]
    try:
        for model in training:
            model.eval()
        with varied_lengths():
            yield
    finally:
        for model in training:
            model.train()


__all__ = ["SpeculativeOutput", "speculative_decoding", "speculative_generate"]
