# SPDX-License-Identifier: Apache-2.0
"""The acceptance length by real decoding, beside the target decoding alone.

[`AcceptanceReport`] says what the acceptance length is.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .configuration_dflash import DFlashDraftConfig
from .data_collator import IGNORE_INDEX, DataCollatorForDFlash
from .frozen_target import FrozenHead, FrozenTarget
from .generation import check_drafter, evaluation_mode, speculative_generate, stop_token_ids
from .losses import CHUNK_LOGITS
from .masking import block_position_ids, training_masks
from .modeling_dflash import DFlashDraftModel
from .packing import Documents, PackedDataset, document_lengths
from .serving import ServerReport, or_none


# --- The teacher-forced walk: the acceptance length of given answers, without decoding.


# Blocks of a row that share a forward where no training batch says how many fit.
CHUNK_ANCHORS = 256


@dataclass(frozen=True)
class WalkedAnswer:
    """The blocks that decoding one answer would verify.

    Args:
        document: Index of the document in its data set.
        committed: Tokens that each block commits: its right drafts and the target's own next token, cut at the end of
            the answer. They add up to the answer's tokens but the first, which is the prefill's.
        accepted: Right drafts of each block before its first wrong one, cut alike.
    """

    document: int
    committed: list[int]
    accepted: list[int]


@torch.no_grad()
def walk_batch(
    drafter: nn.Module,
    config: DFlashDraftConfig,
    head: FrozenHead,
    batch: Mapping[str, Any],
    context_hidden_states: torch.Tensor,
    chunk_anchors: int | None = None,
) -> list[WalkedAnswer]:
    """Walk all answers of a batch of packed rows.

    Args:
        drafter: The drafter in eval mode, possibly wrapped for distributed training.
        config: Its configuration.
        head: The target's embedding and head on the drafter's device.
        batch: A batch of [`DataCollatorForDFlash`]; rows whose labels count nothing are left out.
        context_hidden_states (`torch.Tensor` of shape `[B, T, K * D]`): The target's hidden states, in the type that
            the drafter computes in.
        chunk_anchors: Blocks per row and forward; by default as many as the batch has anchors for the loss, whose
            shapes the drafter may be compiled for; on a CPU a quarter of the row's tokens, if that is more.

    Returns:
        One [`WalkedAnswer`] per supervised stretch of two tokens or more.
    """
    counted = (batch["labels"] != IGNORE_INDEX).flatten(1).any(dim=1).tolist()
    runs = [
        [(start, stop) for start, stop in spans if stop - start > 1] if is_counted else []
        for spans, is_counted in zip(batch["supervised_runs"], counted, strict=True)
    ]
    anchors, labels = _all_anchors(runs, batch["input_ids"], config.block_size)
    if chunk_anchors is None:
        chunk_anchors = batch["anchor_positions"].shape[1]
        if anchors.device.type == "cpu":
            chunk_anchors = max(chunk_anchors, batch["input_ids"].shape[1] // 4)
    pieces = [anchors.new_zeros(len(runs), 0)]
    for part, part_labels in _chunks(anchors, labels, chunk_anchors):
        hidden = _draft(drafter, config, head, batch, context_hidden_states, part)
        pieces.append(right_drafts(hidden, part_labels, head.logits, head.vocab_size))
    # Read once for all chunks.
    right = torch.cat(pieces, dim=1).tolist()
    answers = []
    for row, spans in enumerate(runs):
        first, documents = 0, batch["documents"][row]
        owners = batch["document_ids"][row].tolist() if spans else []
        for start, stop in spans:
            committed, accepted = follow(right[row][first : first + stop - start - 1])
            answers.append(WalkedAnswer(documents[owners[start]], committed, accepted))
            first += stop - start - 1
    return answers


def follow(right: Sequence[int]) -> tuple[list[int], list[int]]:
    """The blocks that decoding visits in one answer of m + 1 tokens.

    Args:
        right: For the block at each of the first m tokens, the number of right drafts before the first wrong one.

    Returns:
        Tokens committed and drafts accepted by each visited block.
    """
    committed, accepted, anchor = [], [], 0
    while anchor < len(right):
        left = len(right) - anchor
        accepted.append(min(right[anchor], left))
        committed.append(min(right[anchor] + 1, left))
        anchor += committed[-1]
    return committed, accepted


def right_drafts(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> torch.Tensor:
    """Drafts of each block before the first wrong one.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, A * b, D]`): The drafter's output.
        labels (`torch.Tensor` of shape `[B, A, b]`): The answer's token at each slot, -100 behind its end.
        head: The target's head, from `[..., D]` to logits.
        vocab_size: Rows of the head, from which follows how many blocks go through it at once.

    Returns:
        `torch.LongTensor` of shape `[B, A]`.
    """
    rows, num_anchors, block_size = labels.shape
    slots = hidden_states.reshape(rows * num_anchors, block_size, -1)[:, 1:]
    expected = labels.reshape(rows * num_anchors, block_size)[:, 1:]
    step = max(1, CHUNK_LOGITS // (vocab_size * (block_size - 1)))
    right = []
    for i in range(0, len(slots), step):
        largest, tokens = head(slots[i : i + step]).max(dim=-1)
        # Labels behind the end are no token's id, so nothing there is right. Where logits are NaN, no token is meant.
        right.append((tokens == expected[i : i + step]) & largest.isfinite())
    return torch.cat(right).long().cumprod(dim=1).sum(dim=1).view(rows, num_anchors)


def _all_anchors(
    runs: list[list[tuple[int, int]]], input_ids: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors `[B, A]` at every token but the last of each stretch, -1 behind them, and their labels `[B, A, b]`."""
    rows = len(runs)
    longest = max(sum(stop - start - 1 for start, stop in spans) for spans in runs)
    anchors, stops = torch.full((rows, longest), -1), torch.zeros(rows, longest, dtype=torch.long)
    for row, spans in enumerate(runs):
        first = 0
        for start, stop in spans:
            part = slice(first, first + stop - start - 1)
            anchors[row, part], stops[row, part] = torch.arange(start, stop - 1), stop
            first = part.stop
    anchors, stops = anchors.to(input_ids.device), stops.to(input_ids.device)
    slots = torch.arange(block_size, device=input_ids.device)
    positions = anchors[..., None] + slots
    labels = input_ids.gather(1, positions.clamp(0, input_ids.shape[1] - 1).flatten(1)).view(positions.shape)
    counts = (slots > 0) & (positions < stops[..., None])
    return anchors, labels.masked_fill(~counts, IGNORE_INDEX)


def _chunks(
    anchors: torch.Tensor, labels: torch.Tensor, chunk_anchors: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Anchors and labels in pieces; where kernels are compiled, unused anchors fill up the last."""
    for start in range(0, anchors.shape[1], chunk_anchors):
        part, part_labels = anchors[:, start : start + chunk_anchors], labels[:, start : start + chunk_anchors]
        unused = 0 if anchors.device.type == "cpu" else chunk_anchors - part.shape[1]
        yield (
            nn.functional.pad(part, (0, unused), value=-1),
            nn.functional.pad(part_labels, (0, 0, 0, unused), value=IGNORE_INDEX),
        )


def _draft(
    drafter: nn.Module,
    config: DFlashDraftConfig,
    head: FrozenHead,
    batch: Mapping[str, Any],
    context_hidden_states: torch.Tensor,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """The drafter's output `[B, A * b, D]` for the blocks at some anchors of a batch, as in training."""
    mask_token_id, block_size = config.mask_token_id, config.block_size
    assert mask_token_id is not None and block_size is not None  # the configuration refuses that
    anchor_ids = batch["input_ids"].gather(1, anchors.clamp(min=0))
    noise_embeds = head.noise_embeds(anchor_ids, mask_token_id, block_size).to(context_hidden_states.dtype)
    return drafter(
        noise_embeds=noise_embeds,
        context_hidden_states=context_hidden_states,
        attention_mask=training_masks(config, anchors, batch["document_ids"], noise_embeds.dtype),
        position_ids=block_position_ids(batch["position_ids"], anchors, block_size),
    ).last_hidden_state


def walk_documents(
    target: PreTrainedModel, drafter: DFlashDraftModel, documents: Documents, progress: bool = False
) -> list[WalkedAnswer]:
    """Walk the answers of documents, each alone.

    Args:
        target: The model that wrote the answers, with all its layers; it is frozen.
        drafter: A drafter made for it, with an attention backend that knows its training mask.
        documents: Documents as dicts of `input_ids` and `supervised_spans`, or as a `datasets.Dataset`.
        progress: Show a bar.

    Returns:
        One [`WalkedAnswer`] per supervised stretch of two tokens or more, in the order of the documents.

    Raises:
        ValueError: When the drafter is another target's.
    """
    check_drafter(target, drafter)
    config: Any = drafter.config
    frozen, head = FrozenTarget(target, config.target_layer_ids), FrozenHead(target, drafter.device)
    collator = DataCollatorForDFlash(config.block_size, num_anchors=1)
    rows = PackedDataset(documents, int(document_lengths(documents).max()))
    answers: list[WalkedAnswer] = []
    with evaluation_mode(target, drafter):
        for row in tqdm(range(len(rows)), desc="walking", unit="row", disable=not progress):
            batch = collator([rows[row]])
            context = frozen.context_hidden_states(batch["input_ids"], batch["document_lengths"])
            on_device = {k: v.to(drafter.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            context = context.to(drafter.device, drafter.dtype)
            answers += walk_batch(drafter, config, head, on_device, context, CHUNK_ANCHORS)
    return sorted(answers, key=lambda answer: answer.document)


@dataclass
class WalkSums:
    """Sums over walked blocks, one row per source of documents, to be added up over batches and ranks.

    `values` has a column each for blocks, committed tokens, blocks whose drafts were all accepted, and for every slot
    from 1 on the blocks that accepted its draft.
    """

    values: torch.Tensor
    sources: list[str]

    @staticmethod
    def zeros(block_size: int, sources: Sequence[str] = ()) -> "WalkSums":
        return WalkSums(torch.zeros(max(1, len(sources)), 2 + block_size, dtype=torch.long), list(sources))

    def add(self, answer: WalkedAnswer, source: str | None = None) -> None:
        """Add one answer's blocks to those of its source."""
        row = self.values[0 if source is None else self.sources.index(source)]
        num_slots = len(row) - 3
        accepted = torch.tensor(answer.accepted)
        row[0] += len(answer.committed)
        row[1] += sum(answer.committed)
        row[2] += (accepted == num_slots).sum()
        row[3:] += (accepted[:, None] > torch.arange(num_slots)).sum(dim=0)

    def metrics(self) -> dict[str, float]:
        """Acceptance length (in all and by source) and shares of the blocks; empty where nothing was walked."""
        blocks, committed, whole, *accepted = self.values.sum(dim=0).tolist()
        if not blocks:
            return {}
        metrics = {"acceptance_length": committed / blocks, "fully_accepted_blocks": whole / blocks}
        metrics |= {f"acceptance_slot_{k}": count / blocks for k, count in enumerate(accepted, start=1)}
        for source, row in zip(self.sources, self.values.tolist(), strict=False):
            if row[0]:
                metrics[f"acceptance_length_{source}"] = row[1] / row[0]
        return metrics


# --- What the target answers alone, and whether another answer to the same prompt is the same.


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


# --- What is reported about decoded prompts.


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


def _ratio(committed: Iterable[list[int]]) -> float:
    """Tokens per forward over the lists of all prompts; nan without any forward."""
    blocks = [n for tokens in committed for n in tokens]
    return sum(blocks) / len(blocks) if blocks else math.nan


def _rate(tokens_and_seconds: Iterable[tuple[int, float | None]]) -> float:
    """Tokens per second over all prompts; nan where a time is missing."""
    tokens, seconds = 0, 0.0
    for count, taken in tokens_and_seconds:
        tokens, seconds = tokens + count, seconds + (math.nan if taken is None else taken)
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


# --- Acceptance reports as Markdown tables and plots.


DEFINITION = (
    "Acceptance length: tokens committed per verification forward of the target (accepted drafts and the target's own "
    "next token), pooled over all prompts; the prefill and its token are not counted."
)


def markdown(reports: Mapping[str, AcceptanceReport], walked: Mapping[str, float]) -> str:
    """Tables of several drafters over the same prompts.

    Args:
        reports: Report of each drafter by its name.
        walked: Acceptance lengths by the teacher-forced walk, where they were taken.
    """
    rows = []
    for name, report in reports.items():
        rows.append(
            [
                name,
                _number(report.acceptance_length),
                _interval(report.bootstrap_interval()),
                _number(report.acceptance_length_without_last_block),
                _number(walked.get(name, math.nan)),
                _number(report.tokens_per_second, 1),
                _number(report.plain_tokens_per_second, 1),
                _number(report.speed_up),
                _interval(report.speed_up_interval()),
                _losslessness(report),
            ]
        )
    heads = ["drafter", "acceptance length", "95% interval", "without last blocks", "by the walk", "tokens/s"]
    heads += ["plain tokens/s", "speed-up", "its 95% interval", "equal to plain answers"]
    parts = [DEFINITION, _table(heads, rows), _slots({name: r.slot_acceptance for name, r in reports.items()})]
    for title, key in (("source", _source), ("language", _language)):
        groups = {name: report.groups(key) for name, report in reports.items()}
        values = dict.fromkeys(value for group in groups.values() for value in group)
        # Of a run that was interrupted, later drafters may lack some.
        cells = [
            [value, str(max(len(group[value].prompts) for group in groups.values() if value in group))]
            + [_number(group[value].acceptance_length if value in group else math.nan) for group in groups.values()]
            for value in values
        ]
        if cells:
            parts.append(_table([title, "prompts", *groups], cells))
    return "\n\n".join(parts) + "\n"


def server_markdown(reports: Mapping[str, ServerReport], plain_tokens_per_second: float | None = None) -> str:
    """Tables of several servers over the same prompts.

    Args:
        reports: Report of each server by its name.
        plain_tokens_per_second: Of a server without speculation, where one was measured.
    """
    rows: list[list[str]] = []
    group_rows: dict[tuple[str | None, str | None], dict[str, str]] = {}
    names = list(reports)
    for name, report in reports.items():
        speed_up = report.tokens_per_second / plain_tokens_per_second if plain_tokens_per_second else math.nan
        cells = [name, report.engine, _number(report.verifications.acceptance_length)]
        cells += [_number(report.tokens_per_second, 1), _number(plain_tokens_per_second or math.nan, 1)]
        rows.append([*cells, _number(speed_up), "its answers" if report.per_request else "the server's counters"])
        for key, part in report.groups.items():
            group_rows.setdefault(key, {})[name] = _number(part.acceptance_length)
    heads = ["server", "engine", "acceptance length", "tokens/s", "plain tokens/s", "speed-up", "counted from"]
    slots = {name: report.summary()["slot_acceptance"] for name, report in reports.items()}
    groups = [
        [source or "-", language or "-", *(cells.get(name, "-") for name in names)]
        for (source, language), cells in group_rows.items()
    ]
    tables = [_table(heads, rows), _slots(slots), _table(["source", "language", *names], groups)]
    return "\n\n".join([DEFINITION, *tables]) + "\n"


def plot_label(name: str) -> str:
    """A name as matplotlib shows it: between dollars it would be a formula, and with an underscore first be hidden."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def plot_slots(slots: Mapping[str, list[float]], axes) -> None:
    """Share of all blocks that accept the draft of each slot."""
    for name, shares in slots.items():
        axes.plot(range(1, len(shares) + 1), shares, marker=".", label=plot_label(name))
    axes.set(xlabel="slot", ylabel="share of blocks that accept it", ylim=(0, 1), title="acceptance per slot")
    axes.legend()


def plot_reports(reports: Mapping[str, AcceptanceReport], path: Path) -> None:
    """Acceptance per slot, committed tokens per block, and the acceptance length over the answer."""
    figure, (slots, histogram, positions) = _figure(3)
    plot_slots({name: report.slot_acceptance for name, report in reports.items()}, slots)
    width = 0.8 / len(reports)
    for index, report in enumerate(reports.values()):
        counts = report.committed_histogram
        shares = [count / max(sum(counts), 1) for count in counts]
        histogram.bar([k + 1 + (index + 0.5) * width - 0.4 for k in range(len(shares))], shares, width)
        stretches = report.by_position(max(1, report.max_new_tokens // 16))
        positions.plot([s["position"] for s in stretches], [s["acceptance_length"] for s in stretches], marker=".")
    histogram.set(xlabel="tokens committed", ylabel="share of blocks", title="committed tokens per block")
    positions.set(xlabel="token of the answer", ylabel="acceptance length", title="acceptance over the answer")
    positions.set_ylim(bottom=1)
    figure.savefig(path, dpi=120)


def plot_servers(reports: Mapping[str, ServerReport], path: Path) -> None:
    """Acceptance per slot, for the servers that tell it."""
    slots = {name: shares for name, r in reports.items() if (shares := r.summary()["slot_acceptance"])}
    if slots:
        figure, (axes,) = _figure(1)
        plot_slots(slots, axes)
        figure.savefig(path, dpi=120)


def _figure(columns: int):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _source(prompt: PromptAcceptance) -> str | None:
    return prompt.source


def _language(prompt: PromptAcceptance) -> str | None:
    return prompt.language


def _losslessness(report: AcceptanceReport) -> str:
    if report.lossless is None:
        return "not compared"
    equal = sum(bool(prompt.lossless) for prompt in report.prompts)
    other = len(report.prompts) - equal - report.num_ties
    return f"{equal} of {len(report.prompts)}, {report.num_ties} ties, {other} differ"


def _slots(slots: Mapping[str, list[float]]) -> str:
    most = max((len(shares) for shares in slots.values()), default=0)
    cells = [
        [name, *(_number(share) for share in shares + [math.nan] * (most - len(shares)))]
        for name, shares in slots.items()
    ]
    return _table(["acceptance of slot", *(str(k) for k in range(1, most + 1))], cells)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    # Names of files and sources may hold what separates cells and rows.
    cleaned = [[" ".join(cell.split()).replace("|", "\\|") for cell in cells] for cells in [heads, *rows]]
    lines = [cleaned[0], ["---"] * len(heads), *cleaned[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _interval(bounds: tuple[float, float]) -> str:
    low, high = map(_number, bounds)
    return "-" if low == "-" else f"{low} to {high}"


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


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
