# SPDX-License-Identifier: Apache-2.0
"""The acceptance length by real decoding, beside the target decoding alone.

[`decoding.report`] says what the acceptance length is.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from .decoding.checks import check_drafter
from .decoding.plain_answers import DecodingSettings, PlainAnswer, difference, plain_answer, plain_answers, prompt_rows
from .decoding.report import AcceptanceReport, PromptAcceptance, bootstrap_difference
from .decoding.walk import walk_documents
from .generation import speculative_generate
from .modeling_dflash import DFlashDraftModel


logger = logging.get_logger(__name__)

# Walk and decoding are the same verifications, but for ties.
MAX_DIFFERENCE_OF_WALK = 0.03


def measure_acceptance(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    max_new_tokens: int | None = None,
    eos_token_id: int | list[int] | None = None,
    check_lossless: bool = True,
    progress: bool = True,
    *,
    settings: DecodingSettings | None = None,
    plain: Sequence[PlainAnswer] | None = None,
    keep: Callable[[AcceptanceReport], None] | None = None,
) -> AcceptanceReport:
    """Decode prompts one by one and report the acceptance length.

    Args:
        target: A whole causal language model, dense or hybrid.
        drafter: A drafter made for it.
        prompts: Token ids of each prompt: lists, or tensors of shape `[n]` or `[1, n]`.
        max_new_tokens: Budget of generated tokens per prompt, for greedy decoding without `settings`.
        eos_token_id: As in [`DecodingSettings`], for greedy decoding without `settings`.
        check_lossless: Also let the target answer alone and compare, which takes that much longer.
        progress: Show a bar with the speed of the speculative decoding.
        settings: How to decode, where that is not greedy.
        plain: The target's own answers with the same settings, where they are at hand.
        keep: Called with the report so far after each prompt, so that an interrupt loses nothing.

    Returns:
        [`AcceptanceReport`]. Sampled answers differ from run to run, so only greedy ones are compared.

    Raises:
        ValueError: When a prompt is empty or out of the vocabulary, there is none, the budget leaves nothing to
            verify, the plain answers are of other prompts, or the drafter is another target's.
        FloatingPointError: When the target or the drafter computes logits that are no numbers.
    """
    check_drafter(target, drafter)
    if settings is not None and (max_new_tokens is not None or eos_token_id is not None):
        raise ValueError(
            f"max_new_tokens={max_new_tokens} and eos_token_id={eos_token_id} were given beside settings, which have "
            "their own. Give either."
        )
    if plain is not None and len(plain) != len(prompts):
        raise ValueError(
            f"There are {len(plain)} plain answers for {len(prompts)} prompts; expected one for each, in their order."
        )
    settings = settings or DecodingSettings(max_new_tokens or 0, eos_token_id)
    rows = prompt_rows(target, prompts)
    results: list[PromptAcceptance] = []
    with tqdm(rows, desc="decoding", unit="prompt", disable=not progress) as bar:
        for index, input_ids in enumerate(bar):
            result = _decode_prompt(target, drafter, input_ids, settings)
            if plain is not None or check_lossless:
                answer = plain_answer(target, input_ids, settings) if plain is None else plain[index]
                result = _beside(target, result, answer, settings)
            results.append(result)
            report = AcceptanceReport(list(results), drafter.config.block_size or 0, settings.max_new_tokens)
            bar.set_postfix_str(
                f"{report.tokens_per_second:.1f} tokens/s, acceptance length {report.acceptance_length:.2f}"
            )
            if keep is not None:
                keep(report)
    return report


def walked_acceptance_length(
    target: PreTrainedModel, drafter: DFlashDraftModel, report: AcceptanceReport, progress: bool = True
) -> float:
    """The acceptance length of the report's own answers by the teacher-forced walk, and a warning if it is another.

    The two are the same at any temperature as long as drafts are the drafter's likeliest tokens: a draft that is
    rejected is never drawn in its place, so that a sampled answer holds the draft exactly where it was accepted.

    Args:
        target: The target that wrote the answers.
        drafter: The drafter of the report.
        report: Decodings with verifications, greedy or sampled, without `sample_drafts`.
        progress: Show a bar.

    Returns:
        The walk's acceptance length over the same answers; nan where none of them has a verification.
    """
    documents = [
        {
            "input_ids": prompt.prompt_ids + prompt.output_ids,
            "supervised_spans": [[len(prompt.prompt_ids), len(prompt.prompt_ids) + len(prompt.output_ids)]],
        }
        for prompt in report.prompts
    ]
    answers = walk_documents(target, drafter, documents, progress)
    blocks = [committed for answer in answers for committed in answer.committed]
    walked, decoded = sum(blocks) / len(blocks) if blocks else math.nan, report.acceptance_length
    # False where there is nothing to compare.
    if abs(walked - decoded) > MAX_DIFFERENCE_OF_WALK * decoded:
        logger.warning(
            f"On the same token ids the walk gives an acceptance length of {walked:.3f} and decoding {decoded:.3f}: "
            f"they differ by {abs(walked / decoded - 1):.1%}, expected at most {MAX_DIFFERENCE_OF_WALK:.0%}. Drafting "
            "many blocks at once and one after the other should be the same function; one of the two is at fault "
            "(an attention backend, a cache, or kernels that round differently)."
        )
    return walked


def _beside(
    target: PreTrainedModel, result: PromptAcceptance, answer: PlainAnswer, settings: DecodingSettings
) -> PromptAcceptance:
    """A result with what the target's own answer says of it."""
    result = replace(result, plain_seconds=answer.seconds, plain_tokens=len(answer.output_ids))
    if settings.temperature > 0:
        return result
    return replace(result, **difference(target, result.prompt_ids, result.output_ids, answer.output_ids))


def _decode_prompt(
    target: PreTrainedModel, drafter: DFlashDraftModel, input_ids: torch.Tensor, settings: DecodingSettings
) -> PromptAcceptance:
    generator = torch.Generator(target.device).manual_seed(settings.seed) if settings.temperature else None
    start = time.perf_counter()
    output = speculative_generate(
        target,
        drafter,
        input_ids,
        settings.max_new_tokens,
        settings.eos_token_id,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        sample_drafts=settings.sample_drafts,
        generator=generator,
        use_cache=settings.use_cache,
    )
    # Reading the tokens waits for the device.
    output_ids = output.sequences[0, input_ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    return PromptAcceptance(input_ids[0].tolist(), output_ids, output.committed, output.accepted, seconds=seconds)


__all__ = [
    "AcceptanceReport",
    "DecodingSettings",
    "PlainAnswer",
    "PromptAcceptance",
    "bootstrap_difference",
    "measure_acceptance",
    "plain_answers",
    "walked_acceptance_length",
]
