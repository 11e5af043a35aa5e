# SPDX-License-Identifier: Apache-2.0
"""The acceptance length by real decoding, beside the target decoding alone.

[`decoding.report`] says what the acceptance length is.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .decoding.checks import check_drafter
from .decoding.report import AcceptanceReport, PromptAcceptance, bootstrap_difference
from .decoding.walk import walk_documents
from .generation import evaluation_mode, speculative_generate, stop_token_ids
from .modeling_dflash import DFlashDraftModel


logger = logging.get_logger(__name__)

# Logits closer than this, or than two steps of the logits' own type, are decided by the order of summation.
TIE = 1e-4
# Walk and decoding are the same verifications, but for ties.
MAX_DIFFERENCE_OF_WALK = 0.03


@dataclass(frozen=True)
class DecodingSettings:
    """How answers are decoded, plainly and speculatively alike.

    Args:
        max_new_tokens: Budget of generated tokens per prompt, at least 2: the first is the prefill's.
        eos_token_id: One or several ids after which an answer stops; None takes those of the target's generation
            config, an empty list stops at none.
        temperature: Divides the logits; 0 is greedy.
        top_p: Probability that the most likely tokens kept hold together.
        top_k: Number of most likely tokens kept; 0 keeps all.
        sample_drafts: Draw drafts from the drafter's distribution instead of proposing its most likely tokens.
        seed: Of the sampling; every prompt starts from it anew.
        use_cache: As in [`speculative_generate`], for targets whose caches cannot be rolled back.
    """

    max_new_tokens: int
    eos_token_id: int | list[int] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    sample_drafts: bool = False
    seed: int = 0
    use_cache: bool = True

    def __post_init__(self):
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}; expected at least 2: the first token is the prefill's and "
                "is not counted, so nothing would be verified."
            )


@dataclass(frozen=True)
class PlainAnswer:
    """What the target writes alone.

    Args:
        output_ids: Generated token ids.
        seconds: Time of the decoding, the prefill's included.
    """

    output_ids: list[int] = field(repr=False)
    seconds: float


def plain_answers(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    settings: DecodingSettings,
    progress: bool = True,
) -> list[PlainAnswer]:
    """Let the target answer prompts one by one, with nothing of its generation config but pad and stop tokens.

    Args:
        target: A causal language model.
        prompts: Token ids of each prompt: lists, or tensors of shape `[n]` or `[1, n]`.
        settings: How to decode.
        progress: Show a bar with the speed.

    Returns:
        One [`PlainAnswer`] per prompt.
    """
    rows = _prompt_rows(prompts, vocab_size=target.get_input_embeddings().get_parameter("weight").shape[0])
    answers = []
    with evaluation_mode(target), tqdm(rows, desc="decoding plainly", unit="prompt", disable=not progress) as bar:
        for input_ids in bar:
            answers.append(_plain_answer(target, input_ids, settings))
            speed = sum(len(a.output_ids) for a in answers) / sum(a.seconds for a in answers)
            bar.set_postfix_str(f"{speed:.1f} tokens/s")
    return answers


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
    rows = _prompt_rows(prompts, vocab_size=target.get_input_embeddings().get_parameter("weight").shape[0])
    results: list[PromptAcceptance] = []
    with tqdm(rows, desc="decoding", unit="prompt", disable=not progress) as bar:
        for index, input_ids in enumerate(bar):
            result = _decode_prompt(target, drafter, input_ids, settings)
            answer = plain[index] if plain is not None else None
            if answer is None and check_lossless:
                with evaluation_mode(target):
                    answer = _plain_answer(target, input_ids, settings)
            if answer is not None:
                result = replace(result, plain_seconds=answer.seconds, plain_tokens=len(answer.output_ids))
            if answer is not None and settings.temperature == 0:
                result = replace(result, **_compare(target, result, answer.output_ids))
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


def _plain_answer(target: PreTrainedModel, input_ids: torch.Tensor, settings: DecodingSettings) -> PlainAnswer:
    """`generate` with these settings, whatever the target's generation config says."""
    own, stop = target.generation_config, stop_token_ids(target, settings.eos_token_id)
    config = GenerationConfig(
        do_sample=settings.temperature > 0,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else next(iter(stop), None),
    )
    if settings.temperature > 0:
        config.update(temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
        torch.manual_seed(settings.seed)
    input_ids = input_ids.to(target.device)
    # `generate` fills what a config leaves open from the target's own, so that one must be out of the way.
    target.generation_config = GenerationConfig()
    start = time.perf_counter()
    try:
        sequences = target.generate(  # type: ignore[operator]
            input_ids, generation_config=config, attention_mask=torch.ones_like(input_ids)
        )
    finally:
        target.generation_config = own
    output_ids = sequences[0, input_ids.shape[1] :].tolist()
    return PlainAnswer(output_ids, time.perf_counter() - start)


@torch.no_grad()
def _compare(target: PreTrainedModel, result: PromptAcceptance, expected: list[int]) -> dict[str, Any]:
    """Fields of [`PromptAcceptance`] that say whether the output is the expected one."""
    if result.output_ids == expected:
        return {"lossless": True}
    common = min(len(result.output_ids), len(expected))
    first = next((i for i in range(common) if result.output_ids[i] != expected[i]), common)
    known = torch.tensor([result.prompt_ids + expected[:first]], device=target.device)
    with evaluation_mode(target):
        logits = target(input_ids=known, logits_to_keep=1, use_cache=False).logits[0, -1]
    largest, second = logits.float().topk(2).values.tolist()
    tolerance = max(TIE, 2 * torch.finfo(logits.dtype).eps * abs(largest))
    tie = first < common and largest - second <= tolerance
    return {"lossless": False, "first_difference": first, "top2_gap": largest - second, "tie": tie}


def _prompt_rows(prompts: Sequence[Sequence[int] | torch.Tensor], vocab_size: int) -> list[torch.Tensor]:
    """Each prompt as int64 `[1, n]`."""
    rows = []
    for index, prompt in enumerate(prompts):
        ids = torch.as_tensor(prompt)
        row = ids[None] if ids.dim() == 1 else ids
        if row.dim() != 2 or row.shape[0] != 1 or row.shape[1] == 0 or row.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"Prompt {index} has the shape {list(ids.shape)} and the type {ids.dtype}; expected token ids, whole "
                "numbers of shape [n] or [1, n] with n >= 1. Leave empty prompts out, and pass a batch as a list of "
                "its rows."
            )
        if row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(
                f"Prompt {index} holds the ids {row.min().item()} to {row.max().item()}, the target's embedding has "
                f"{vocab_size} rows: the prompt was made with another tokenizer. Use the target's."
            )
        rows.append(row.long())
    if not rows:
        raise ValueError("There is no prompt to decode; give at least one list of token ids.")
    return rows


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
