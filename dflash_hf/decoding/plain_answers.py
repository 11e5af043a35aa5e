# SPDX-License-Identifier: Apache-2.0
"""What the target answers alone, and whether another answer to the same prompt is the same."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from ..generation import evaluation_mode, stop_token_ids


# Logits closer than this, or than two steps of the logits' own type, are decided by the order of summation.
TIE = 1e-4


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
    rows = prompt_rows(target, prompts)
    answers = []
    with tqdm(rows, desc="decoding plainly", unit="prompt", disable=not progress) as bar:
        for input_ids in bar:
            answers.append(plain_answer(target, input_ids, settings))
            speed = sum(len(a.output_ids) for a in answers) / sum(a.seconds for a in answers)
            bar.set_postfix_str(f"{speed:.1f} tokens/s")
    return answers


def plain_answer(target: PreTrainedModel, input_ids: torch.Tensor, settings: DecodingSettings) -> PlainAnswer:
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
        with evaluation_mode(target):
            sequences = target.generate(  # type: ignore[operator]
                input_ids, generation_config=config, attention_mask=torch.ones_like(input_ids)
            )
    finally:
        target.generation_config = own
    output_ids = sequences[0, input_ids.shape[1] :].tolist()
    return PlainAnswer(output_ids, time.perf_counter() - start)


@torch.no_grad()
def difference(
    target: PreTrainedModel, prompt_ids: list[int], output_ids: list[int], expected: list[int]
) -> dict[str, Any]:
    """Whether an answer is the expected one, as fields of [`PromptAcceptance`].

    Args:
        target: Whose answer is expected.
        prompt_ids: Token ids of the prompt.
        output_ids: Those of the answer.
        expected: Those of the target's own answer.
    """
    if output_ids == expected:
        return {"lossless": True}
    common = min(len(output_ids), len(expected))
    first = next((i for i in range(common) if output_ids[i] != expected[i]), common)
    known = torch.tensor([prompt_ids + expected[:first]], device=target.device)
    with evaluation_mode(target):
        logits = target(input_ids=known, logits_to_keep=1, use_cache=False).logits[0, -1]
    largest, second = logits.float().topk(2).values.tolist()
    tolerance = max(TIE, 2 * torch.finfo(logits.dtype).eps * abs(largest))
    tie = first < common and largest - second <= tolerance
    return {"lossless": False, "first_difference": first, "top2_gap": largest - second, "tie": tie}


def prompt_rows(target: PreTrainedModel, prompts: Sequence[Sequence[int] | torch.Tensor]) -> list[torch.Tensor]:
    """Each prompt as int64 `[1, n]`.

    Raises:
        ValueError: There is none, or one is empty, a batch, or out of the target's vocabulary.
    """
    vocab_size, rows = target.get_input_embeddings().get_parameter("weight").shape[0], []
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


__all__ = ["DecodingSettings", "PlainAnswer", "difference", "plain_answer", "plain_answers", "prompt_rows"]
