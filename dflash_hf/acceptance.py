# SPDX-License-Identifier: Apache-2.0
"""The acceptance length of a drafter: by a teacher-forced walk over known answers, and by decoding.

The walk drafts at all tokens of an answer at once and follows the blocks that decoding would verify.

Shapes: B packed rows of T tokens, A anchors of a row, b slots of a block with its anchor, K taps of the target, D
hidden size, V vocabulary.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .configuration_dflash import DFlashDraftConfig
from .data_collator import IGNORE_INDEX, DataCollatorForDFlash
from .frozen_target import FrozenHead, FrozenTarget
from .generation import (
    check_drafter,
    draft_count,
    evaluation_mode,
    prompt_row,
    speculative_generate_batch,
    stop_token_ids,
)
from .losses import CHUNK_LOGITS, draft_blocks
from .modeling_dflash import DFlashDraftModel
from .modeling_dflash2 import selector_of
from .packing import Documents, PackedDataset, document_lengths
from .prompts import EvaluationPrompt, prompt_token_ids
from .serving import ServerReport, or_none


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

logger = logging.get_logger(__name__)

# A text, a chat, a row that holds one, or token ids `[n]` or `[1, n]`.
Prompt: TypeAlias = str | EvaluationPrompt | dict[str, Any] | Sequence[dict[str, Any]] | Sequence[int] | torch.Tensor

DEFINITION = (
    "Acceptance length: tokens committed per verification forward of the target (accepted drafts and the target's own "
    "next token), pooled over all prompts; the prefill and its token are not counted."
)
# Blocks of a row that share a forward where no training batch says how many fit.
CHUNK_ANCHORS = 256
# Logits closer than this, or than two steps of the logits' own type, are decided by the order of summation.
TIE = 1e-4
# Walk and decoding are the same verifications, but for ties.
MAX_DIFFERENCE_OF_WALK = 0.03
# Draws of prompts behind an interval.
RESAMPLES = 2000


# --- The teacher-forced walk.


@dataclass(frozen=True)
class WalkedAnswer:
    """The blocks that decoding one answer, of the document of that index, would verify.

    Each commits its right drafts before the first wrong one (accepted) and the target's own next token, cut at the end
    of the answer. `committed` adds up to the answer's tokens but the first, which is the prefill's.
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
    by: str = "selector",
) -> list[WalkedAnswer]:
    """Walk all answers of a batch of packed rows; one [`WalkedAnswer`] per supervised stretch of two tokens or more.

    Args:
        drafter: The drafter in eval mode, possibly wrapped for distributed training.
        config: Its configuration.
        head: The target's embedding and head on the drafter's device.
        batch: A batch of [`DataCollatorForDFlash`]; rows whose labels count nothing are left out.
        context_hidden_states (`torch.Tensor` of shape `[B, T, K * D]`): In the type that the drafter computes in.
        chunk_anchors: Blocks per row and forward. The default is as many as the batch has anchors for the loss, since
            the drafter may be compiled for that shape; on a CPU at least a quarter of the row's tokens.
        by: What chooses a draft of a DFlash 2 drafter: as it is, its "selector"; its "logits" alone; or, as the best
            that any selector could do, "candidates".
    """
    input_ids, (rows, length) = batch["input_ids"], batch["input_ids"].shape
    counted = (batch["labels"] != IGNORE_INDEX).flatten(1).any(dim=1).tolist()
    runs = [
        (row, start, stop)
        for row, spans in enumerate(batch["supervised_runs"])
        for start, stop in spans
        if counted[row] and stop - start > 1
    ]
    # All tokens of a stretch but its last are anchors. The place behind a row's tokens stands for unused ones.
    used = torch.zeros(rows, length + 1, dtype=torch.bool)
    for row, start, stop in runs:
        used[row, start : stop - 1] = True
    anchors = torch.arange(length + 1).where(used, length).sort(dim=1).values
    anchors = anchors[:, : int(used.sum(dim=1).max())].to(input_ids.device)
    right = torch.zeros(rows, length + 1, dtype=torch.long, device=input_ids.device)
    slots = torch.arange(config.block_size or 0, device=input_ids.device)
    for part in _chunks(anchors, chunk_anchors, batch) if runs else ():
        anchors = part.masked_fill(part == length, -1)
        hidden = draft_blocks(drafter, config, head, batch, context_hidden_states, anchors).last_hidden_state
        # Tokens behind the end of an answer are no matter: `follow` cuts there.
        positions = (part[..., None] + slots).clamp(max=length - 1)
        tokens = input_ids.gather(1, positions.flatten(1)).view(positions.shape)
        right.scatter_(1, part, right_drafts(hidden, tokens, head.logits, head.vocab_size, selector_of(drafter), by))
    # Read once for all chunks.
    num_right, owners = right.tolist(), batch["document_ids"].tolist()
    return [
        WalkedAnswer(batch["documents"][row][owners[row][start]], *follow(num_right[row][start : stop - 1]))
        for row, start, stop in runs
    ]


def follow(right: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens committed and drafts accepted by each block that decoding visits in one answer of m + 1 tokens.

    `right` has the number of right drafts before the first wrong one, for the block at each of the first m tokens.
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
    selector: Any = None,
    by: str = "selector",
) -> torch.Tensor:
    """Drafts of each block before the first wrong one, `[B, A]`, from the drafter's output `[B, A * b, D]`.

    `labels` `[B, A, b]` are the text's tokens at each slot, -100 for none; `head` makes logits of `vocab_size`. A
    `selector` is given the true token before each slot, since nothing counts behind a wrong one; `by` is as for
    [`walk_batch`].
    """
    rows, num_anchors, block_size = labels.shape
    slots = hidden_states.reshape(rows * num_anchors, block_size, -1)[:, 1:]
    expected = labels.reshape(rows * num_anchors, block_size)[:, 1:]
    step = max(1, CHUNK_LOGITS // (vocab_size * (block_size - 1)))
    right = []
    before = labels.reshape(rows * num_anchors, block_size)[:, :-1]
    for i in range(0, len(slots), step):
        part, logits = slice(i, i + step), head(slots[i : i + step])
        if selector is not None and by == "candidates":
            right.append((selector.candidates(logits) == expected[part, :, None]).any(dim=-1))
            continue
        if selector is not None and by == "selector":
            largest, tokens = selector.choose(slots[part], logits, before[part].clamp(min=0))
        else:
            largest, tokens = logits.max(dim=-1)
        # Where logits are NaN, no token is meant.
        right.append((tokens == expected[part]) & largest.isfinite())
    return torch.cat(right).long().cumprod(dim=1).sum(dim=1).view(rows, num_anchors)


def _chunks(anchors: torch.Tensor, chunk_anchors: int | None, batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Anchors in pieces; where kernels are compiled, unused anchors fill up the last."""
    on_cpu, length = anchors.device.type == "cpu", batch["input_ids"].shape[1]
    if chunk_anchors is None:
        chunk_anchors = batch["anchor_positions"].shape[1]
        chunk_anchors = max(chunk_anchors, length // 4) if on_cpu else chunk_anchors
    for part in anchors.split(chunk_anchors, dim=1):
        yield part if on_cpu else nn.functional.pad(part, (0, chunk_anchors - part.shape[1]), value=length)


def walk_documents(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    documents: Documents,
    progress: bool = False,
    num_draft_tokens: int | None = None,
) -> list[WalkedAnswer]:
    """Walk the answers of documents; one [`WalkedAnswer`] per supervised stretch of two tokens or more.

    The target wrote the answers. Documents have `input_ids` and `supervised_spans`. Blocks have `num_draft_tokens`
    drafts, by default as many as the drafter was trained for.
    """
    check_drafter(target, drafter)
    config: Any = copy.copy(drafter.config)
    config.block_size = 1 + draft_count(drafter, num_draft_tokens)
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

    The columns of `values` count blocks, committed tokens, blocks whose drafts were all accepted, and for every slot
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


# --- What is reported about decoded prompts.


@dataclass(frozen=True)
class PromptAcceptance:
    """One prompt's decoding: token ids, and for each verification the tokens committed and the drafts among them."""

    prompt_ids: list[int]
    output_ids: list[int]
    committed: list[int]
    accepted: list[int]
    # Whether the output is the target's own greedy one; None where that was not checked.
    lossless: bool | None = None
    # The first token that differs, the gap of the target's two largest logits there (a large one is a fault), and
    # whether that is within rounding, so that another order of summation decides otherwise.
    first_difference: int | None = None
    top2_gap: float | None = None
    tie: bool | None = None
    # The time of the speculative decoding with its prefill; time and tokens of the target's own answer. Prompts of a
    # batch share their time by tokens.
    seconds: float | None = None
    plain_seconds: float | None = None
    plain_tokens: int | None = None
    # Of the prompt, for the tables.
    source: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class AcceptanceReport:
    """Decodings of prompts, in the order given; `DEFINITION` says what the acceptance length is.

    Slots per block (`block_size`, the anchor's included) are the largest possible acceptance length; `max_new_tokens`
    is the budget per prompt, and `batch_size` how many prompts were decoded together.
    """

    prompts: list[PromptAcceptance]
    block_size: int
    max_new_tokens: int
    batch_size: int = 1

    @property
    def acceptance_length(self) -> float:
        """Committed tokens over verification forwards, pooled; nan where every answer ended with its first token."""
        return _mean([n for prompt in self.prompts for n in prompt.committed])

    @property
    def acceptance_length_without_last_block(self) -> float:
        """The same without each answer's last verification, which the end of the answer may have cut."""
        return _mean([n for prompt in self.prompts for n in prompt.committed[:-1]])

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
        accepted = [n for prompt in self.prompts for n in prompt.accepted]
        return [_mean([n >= slot for n in accepted]) for slot in range(1, self.block_size)]

    @property
    def committed_histogram(self) -> list[int]:
        """The number of blocks that committed 1, 2, .., b tokens."""
        committed = [n for prompt in self.prompts for n in prompt.committed]
        return np.bincount(committed, minlength=self.block_size + 1)[1:].tolist()

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the speculative decoding; nan where it was not taken."""
        return _ratio(*self._clocked()[:2].sum(axis=1).tolist())

    @property
    def plain_tokens_per_second(self) -> float:
        """Generated tokens over the time of the target alone; nan where it was not taken."""
        return _ratio(*self._clocked()[2:].sum(axis=1).tolist())

    @property
    def speed_up(self) -> float:
        """Speculative over plain tokens per second."""
        return self.tokens_per_second / self.plain_tokens_per_second

    def _clocked(self) -> np.ndarray:
        """Tokens and seconds of each prompt's speculative and plain answer, `[4, P]`; nan where not taken."""
        rows = [(len(p.output_ids), p.seconds, p.plain_tokens, p.plain_seconds) for p in self.prompts]
        return np.array(rows, dtype=float).reshape(-1, 4).T

    def _counted(self) -> np.ndarray:
        """Committed tokens and verification forwards of each prompt, `[2, P]`."""
        rows = [(sum(prompt.committed), len(prompt.committed)) for prompt in self.prompts]
        return np.array(rows, dtype=float).reshape(-1, 2).T

    def by_position(self, width: int | None = None) -> list[dict[str, float]]:
        """The acceptance length over the answer, which shows how it decays with the context.

        Of each stretch of `width` tokens (a 16th of the budget by default) that holds a block's anchor: its first
        token (`position`; 0 is that of the prefill), `blocks` and their `acceptance_length`.
        """
        width = width or max(1, self.max_new_tokens // 16)
        blocks: dict[int, list[int]] = {}
        for prompt in self.prompts:
            position = 0
            for committed in prompt.committed:
                blocks.setdefault(position // width, []).append(committed)
                position += committed
        return [
            {"position": index * width, "blocks": len(values), "acceptance_length": _mean(values)}
            for index, values in sorted(blocks.items())
        ]

    def groups(self, name: str) -> dict[str, "AcceptanceReport"]:
        """Reports of the prompts that share a `source` or `language`, whichever `name` is, without those of none."""
        values = [vars(prompt)[name] for prompt in self.prompts]
        return {
            value: replace(self, prompts=[p for p, own in zip(self.prompts, values, strict=True) if own == value])
            for value in dict.fromkeys(values)
            if value is not None
        }

    def summary(self) -> dict[str, Any]:
        """The figures over all prompts in JSON types; None stands for values without anything to measure."""
        names = ["acceptance_length", "acceptance_length_without_last_block", "tokens_per_second"]
        names += ["plain_tokens_per_second", "speed_up"]
        return {name: or_none(getattr(self, name)) for name in names} | {
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
        prompts = [{**asdict(prompt), "forwards": len(prompt.committed)} for prompt in self.prompts]
        own = {name: vars(self)[name] for name in ("block_size", "max_new_tokens", "batch_size")}
        return {**self.summary(), **own, "prompts": prompts}

    def bootstrap_interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Percentile bootstrap interval (low, high) of the pooled acceptance length, drawing whole prompts.

        One prompt gives an interval without width, which says nothing about others.
        """
        return _bootstrap(self._counted(), np.divide, confidence)

    def speed_up_interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The same of the speed-up; nan where that is."""
        return _bootstrap(
            self._clocked(), lambda tokens, seconds, *plain: tokens / seconds / np.divide(*plain), confidence
        )


def bootstrap_difference(
    before: AcceptanceReport, after: AcceptanceReport, confidence: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of `after - before`, over the same prompts and budget.

    Each resample draws the same prompts for both. Reports over other prompts or budgets are a `ValueError`.
    """
    sides = [f"{len(r.prompts)} prompts with max_new_tokens={r.max_new_tokens}" for r in (before, after)]
    if sides[0] != sides[1] or [p.prompt_ids for p in before.prompts] != [p.prompt_ids for p in after.prompts]:
        said = f"The reports are over {' and '.join(sides)}, or over different prompts"
        raise ValueError(f"{said}. Measure both drafters on one list.")
    columns = [*before._counted(), *after._counted()]
    return _bootstrap(columns, lambda a, b, *after: np.divide(*after) - a / b, confidence)


def _mean(values: Sequence[int]) -> float:
    return _ratio(sum(values), len(values))


def _ratio(value: float, parts: float) -> float:
    return value / parts if parts else math.nan


def _bootstrap(
    columns: Iterable[np.ndarray], figure: Callable[..., np.ndarray], confidence: float
) -> tuple[float, float]:
    """The central share of a figure of sums over resampled prompts, left out where it is not a number.

    `figure` makes figures `[R]` of the sums `[R]` of each column, which has a value for each prompt.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected a share between 0 and 1.")
    columns = list(columns)
    count = len(columns[0])
    # Without a prompt there is nothing to draw, and all sums are 0.
    draws = np.random.default_rng(0).integers(0, max(1, count), (RESAMPLES, count))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = figure(*(column[draws].sum(axis=1) for column in columns))
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


# --- Decoding prompts, speculatively and by the target alone.


@dataclass(frozen=True)
class DecodingSettings:
    """How answers are decoded, plainly and speculatively alike.

    Args:
        max_new_tokens: Budget of generated tokens per prompt, at least 2: the first is the prefill's.
        eos_token_id, temperature, top_p, top_k, sample_drafts, use_cache, num_draft_tokens: As for
            [`speculative_generate_batch`].
        seed: Of the sampling; every batch of prompts starts from it anew.
        batch_size: Prompts that are decoded together, plainly too.
    """

    max_new_tokens: int
    eos_token_id: int | list[int] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    sample_drafts: bool = False
    seed: int = 0
    use_cache: bool = True
    num_draft_tokens: int | None = None
    batch_size: int = 1

    def __post_init__(self):
        for name, least in (("max_new_tokens", 2), ("batch_size", 1)):
            if vars(self)[name] < least:
                # The token of the prefill is not verified.
                raise ValueError(f"{name} is {vars(self)[name]}; expected at least {least}.")


@dataclass(frozen=True)
class PlainAnswer:
    """What the target writes alone: token ids, and the time of the decoding, the prefill's included."""

    output_ids: list[int] = field(repr=False)
    seconds: float


def trained_mode(drafter: str) -> bool | None:
    """Whether the answers that a drafter (a folder or Hub id) learned from think, by its `training.json`.

    None where that does not say, since they are of both kinds, or where there is no such file.
    """
    name = "training.json"
    try:
        path = Path(drafter, name) if Path(drafter).is_dir() else Path(hf_hub_download(drafter, name))
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, EntryNotFoundError):
        return None
    # Documents that were tokenised before have their own mode, which a recipe cannot change.
    manifest = (facts.get("data") or {}).get("manifest") or {}
    mode = manifest.get("thinking", (facts.get("recipe") or {}).get("enable_thinking"))
    return mode if isinstance(mode, bool) else None


def prompt_rows(
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    processing_class: PreTrainedTokenizerBase | None = None,
    drafter: str | None = None,
) -> list[torch.Tensor]:
    """Each prompt as int64 `[1, n]`; a `ValueError` for none, and for one that the target cannot read."""
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(f"prompts is {prompts!r:.40}; give a list of at least one text, chat or list of token ids.")
    rows: list[Any] = list(prompts)
    is_text = [isinstance(p, str | EvaluationPrompt | dict) or (len(p) > 0 and isinstance(p[0], dict)) for p in rows]
    if any(is_text):
        mode = trained_mode(drafter) if drafter else None
        processing_class = processing_class or AutoTokenizer.from_pretrained(target.name_or_path)
        for index in np.flatnonzero(is_text):
            (rows[index],) = prompt_token_ids([rows[index]], processing_class, mode)
    rows = [torch.as_tensor(ids) for ids in rows]
    return [prompt_row(target, ids[None] if ids.dim() == 1 else ids, f"Prompt {i}") for i, ids in enumerate(rows)]


def in_batches(rows: Sequence[Any], batch_size: int) -> list[Sequence[Any]]:
    """Rows in groups that are decoded together."""
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def plain_answers(
    target: PreTrainedModel, prompts: Sequence[Prompt], settings: DecodingSettings, progress: bool = True
) -> list[PlainAnswer]:
    """Let the target answer prompts, with nothing of its generation config but pad and stop tokens."""
    batches = in_batches(prompt_rows(target, prompts), settings.batch_size)
    bar = tqdm(batches, desc="decoding plainly", unit="batch", disable=not progress)
    return [answer for rows in bar for answer in _plain_batch(target, rows, settings)]


def _plain_batch(
    target: PreTrainedModel, rows: Sequence[torch.Tensor], settings: DecodingSettings
) -> list[PlainAnswer]:
    """`generate` with these settings for prompts at once, whatever the target's generation config says."""
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
    ids, mask = (
        pad_sequence([part[0] for part in parts], batch_first=True, padding_side="left").to(target.device)
        for parts in (rows, [torch.ones_like(row) for row in rows])
    )
    # `generate` fills what a config leaves open from the target's own, so that one must be out of the way.
    target.generation_config = GenerationConfig()
    start = time.perf_counter()
    try:
        with evaluation_mode(target):
            sequences = target.generate(ids, generation_config=config, attention_mask=mask)  # type: ignore[operator]
    finally:
        target.generation_config = own
    answers = sequences[:, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start
    # Padding follows the first stop token.
    answers = [answer[: next((i for i, t in enumerate(answer, 1) if t in stop), len(answer))] for answer in answers]
    return [PlainAnswer(answer, share) for answer, share in zip(answers, _shares(seconds, answers), strict=True)]


def _shares(seconds: float, answers: Sequence[Sequence[int]]) -> list[float]:
    """The time of answers that were decoded together, by their tokens."""
    return [seconds * len(answer) / sum(map(len, answers)) for answer in answers]


def measure_acceptance(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int | None = None,
    eos_token_id: int | list[int] | None = None,
    check_lossless: bool = True,
    progress: bool = True,
    *,
    settings: DecodingSettings | None = None,
    plain: Sequence[PlainAnswer] | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
) -> AcceptanceReport:
    """Decode prompts and report the acceptance length.

    Args:
        target: A whole causal language model, dense or hybrid.
        drafter: A drafter made for it.
        prompts: Each a text or a chat (`[{"role": "user", "content": "..."}]`), which the chat template writes out in
            the drafter's own mode (thinking or not), or token ids: a list, or a tensor of shape `[n]` or `[1, n]`.
        max_new_tokens: Budget of generated tokens per prompt, 512 by default, for greedy decoding without `settings`.
        eos_token_id: As in [`DecodingSettings`], for greedy decoding without `settings`.
        check_lossless: Also let the target answer alone and compare, which takes that much longer. Sampled answers
            differ from run to run, so only greedy ones are compared.
        progress: Show a bar with the speed of the speculative decoding.
        settings: How to decode, where that is not greedy and one prompt after the other.
        plain: The target's own answers with the same settings, where they are at hand.
        processing_class: The tokenizer of texts and chats; by default that of the target's folder or Hub id.

    Raises:
        ValueError: For prompts, settings or plain answers that do not fit, or the drafter of another target.
        FloatingPointError: When the target or the drafter computes logits that are not finite numbers.
    """
    check_drafter(target, drafter)
    if settings is None:
        settings = DecodingSettings(512 if max_new_tokens is None else max_new_tokens, eos_token_id)
    elif max_new_tokens is not None or eos_token_id is not None:
        raise ValueError("max_new_tokens or eos_token_id was given beside settings, which have their own.")
    if plain is not None and len(plain) != len(prompts):
        raise ValueError(f"There are {len(plain)} plain answers for {len(prompts)} prompts; expected one for each.")
    block_size = 1 + draft_count(drafter, settings.num_draft_tokens)
    report = AcceptanceReport([], block_size, settings.max_new_tokens, settings.batch_size)
    batches = in_batches(prompt_rows(target, prompts, processing_class, drafter.name_or_path), settings.batch_size)
    with tqdm(batches, desc="decoding", unit="batch", disable=not progress) as bar:
        for rows in bar:
            results, done = _decode_batch(target, drafter, rows, settings), len(report.prompts)
            if plain is not None or check_lossless:
                own = plain[done:] if plain is not None else _plain_batch(target, rows, settings)
                results = [_compared(target, *pair, settings) for pair in zip(results, own, strict=False)]
            report.prompts.extend(results)
            speed, length = report.tokens_per_second, report.acceptance_length
            bar.set_postfix_str(f"{speed:.1f} tokens/s, acceptance length {length:.2f}")
    return report


def _decode_batch(
    target: PreTrainedModel, drafter: DFlashDraftModel, rows: Sequence[torch.Tensor], settings: DecodingSettings
) -> list[PromptAcceptance]:
    """Decode prompts `[1, n]` together."""
    arguments = asdict(settings)
    seed, _ = arguments.pop("seed"), arguments.pop("batch_size")
    generator = torch.Generator(target.device).manual_seed(seed) if settings.temperature > 0 else None
    start = time.perf_counter()
    outputs = speculative_generate_batch(target, drafter, rows, generator=generator, **arguments)
    # Reading the tokens waits for the device.
    answers = [out.sequences[0, row.shape[1] :].tolist() for out, row in zip(outputs, rows, strict=True)]
    shares = _shares(time.perf_counter() - start, answers)
    return [
        PromptAcceptance(row[0].tolist(), answer, output.committed, output.accepted, seconds=share)
        for row, answer, output, share in zip(rows, answers, outputs, shares, strict=True)
    ]


@torch.no_grad()
def _compared(
    target: PreTrainedModel, result: PromptAcceptance, plain: PlainAnswer, settings: DecodingSettings
) -> PromptAcceptance:
    """A result with the speed of the target's own answer and, where both are greedy, whether it is the same."""
    output_ids, expected = result.output_ids, plain.output_ids
    result = replace(result, plain_seconds=plain.seconds, plain_tokens=len(expected))
    if settings.temperature > 0:
        return result
    if output_ids == expected:
        return replace(result, lossless=True)
    common = min(len(output_ids), len(expected))
    first = next((i for i in range(common) if output_ids[i] != expected[i]), common)
    known = torch.tensor([result.prompt_ids + expected[:first]], device=target.device)
    with evaluation_mode(target):
        logits = target(input_ids=known, logits_to_keep=1, use_cache=False).logits[0, -1]
    largest, second = logits.float().topk(2).values.tolist()
    tolerance = max(TIE, 2 * torch.finfo(logits.dtype).eps * abs(largest))
    tie = first < common and largest - second <= tolerance
    return replace(result, lossless=False, first_difference=first, top2_gap=largest - second, tie=tie)


def walked_length(
    target: PreTrainedModel, drafter: DFlashDraftModel, report: AcceptanceReport, num_draft_tokens: int, progress: bool
) -> float:
    """The acceptance length of the report's own answers with some number of drafts; nan without a verification."""
    rows = [(p.prompt_ids + p.output_ids, len(p.prompt_ids)) for p in report.prompts]
    documents = [{"input_ids": ids, "supervised_spans": [[start, len(ids)]]} for ids, start in rows]
    answers = walk_documents(target, drafter, documents, progress, num_draft_tokens)
    return _mean([n for answer in answers for n in answer.committed])


def walked_acceptance_length(
    target: PreTrainedModel, drafter: DFlashDraftModel, report: AcceptanceReport, progress: bool = True
) -> float:
    """The acceptance length of the report's own answers by the walk (nan without a verification); warns if it differs.

    The two are the same at any temperature as long as drafts are the drafter's likeliest tokens: a rejected draft is
    never drawn in its place, so that a sampled answer holds the draft exactly where it was accepted.
    """
    walked = walked_length(target, drafter, report, report.block_size - 1, progress)
    decoded = report.acceptance_length
    # False where there is nothing to compare.
    if abs(walked - decoded) > MAX_DIFFERENCE_OF_WALK * decoded:
        logger.warning(
            f"On the same token ids the walk gives an acceptance length of {walked:.3f} and decoding {decoded:.3f}, "
            f"more than {MAX_DIFFERENCE_OF_WALK:.0%} apart: an attention backend, a cache or a kernel is at fault."
        )
    return walked


# --- Reports as Markdown tables and plots.


def markdown(reports: Mapping[str, AcceptanceReport], walked: Mapping[str, float]) -> str:
    """Tables of several drafters over the same prompts, with the acceptance lengths that were walked too."""
    rows = []
    for name, report in reports.items():
        lengths = [report.acceptance_length_without_last_block, walked.get(name)]
        row = [name, number(report.acceptance_length), interval(report.bootstrap_interval()), *map(number, lengths)]
        row += [number(report.tokens_per_second, 1), number(report.plain_tokens_per_second, 1)]
        rows.append([*row, number(report.speed_up), interval(report.speed_up_interval()), _losslessness(report)])
    heads = ["drafter", "acceptance length", "95% interval", "without last blocks", "by the walk", "tokens/s"]
    heads += ["plain tokens/s", "speed-up", "its 95% interval", "equal to plain answers"]
    size = max((report.batch_size for report in reports.values()), default=1)
    at_once = "one sequence" if size == 1 else f"{size} sequences"
    parts = [f"{DEFINITION} Speed-ups are of {at_once} at a time.", table(heads, rows)]
    parts.append(_slots({name: report.slot_acceptance for name, report in reports.items()}))
    for title in ("source", "language"):
        groups = [report.groups(title) for report in reports.values()]
        rows = []
        for value in dict.fromkeys(value for group in groups for value in group):
            # Of a run that was interrupted, later drafters may lack some.
            count = max(len(group[value].prompts) for group in groups if value in group)
            taus = [group[value].acceptance_length if value in group else None for group in groups]
            rows.append([value, str(count), *map(number, taus)])
        if rows:
            parts.append(table([title, "prompts", *reports], rows))
    return "\n\n".join(parts) + "\n"


def server_markdown(reports: Mapping[str, ServerReport], plain_tokens_per_second: float | None = None) -> str:
    """Tables of several servers over the same prompts, beside the speed of a server without speculation."""
    plain = plain_tokens_per_second or math.nan
    rows: list[list[str]] = []
    lengths: dict[tuple[str | None, str | None], dict[str, str]] = {}
    for name, report in reports.items():
        cells = [name, report.engine, number(report.verifications.acceptance_length)]
        cells += [number(report.tokens_per_second, 1), number(plain, 1), number(report.tokens_per_second / plain)]
        rows.append([*cells, "its answers" if report.per_request else "the server's counters"])
        for key, part in report.groups.items():
            lengths.setdefault(key, {})[name] = number(part.acceptance_length)
    heads = ["server", "engine", "acceptance length", "tokens/s", "plain tokens/s", "speed-up", "counted from"]
    groups = [
        [source or "-", language or "-", *(cells.get(name, "-") for name in reports)]
        for (source, language), cells in lengths.items()
    ]
    slots = _slots({name: report.summary()["slot_acceptance"] for name, report in reports.items()})
    tables = [table(heads, rows), slots, table(["source", "language", *reports], groups)]
    return "\n\n".join([DEFINITION, *tables]) + "\n"


def _losslessness(report: AcceptanceReport) -> str:
    if report.lossless is None:
        return "not compared"
    equal = sum(bool(prompt.lossless) for prompt in report.prompts)
    other = len(report.prompts) - equal - report.num_ties
    return f"{equal} of {len(report.prompts)}, {report.num_ties} ties, {other} differ"


def _slots(slots: Mapping[str, list[float]]) -> str:
    most = max((len(shares) for shares in slots.values()), default=0)
    rows = [[name, *map(number, shares), *["-"] * (most - len(shares))] for name, shares in slots.items()]
    return table(["acceptance of slot", *map(str, range(1, most + 1))], rows)


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; names of files and sources may hold what separates cells and rows."""
    cleaned = [[" ".join(cell.split()).replace("|", "\\|") for cell in cells] for cells in [heads, *rows]]
    lines = [cleaned[0], ["---"] * len(heads), *cleaned[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def interval(bounds: tuple[float | None, float | None]) -> str:
    """An interval for a table, "-" where it is not known."""
    low, high = map(number, bounds)
    return "-" if "-" in (low, high) else f"{low} to {high}"


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table, "-" where it is not known."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def plot_label(name: str) -> str:
    """A name as matplotlib shows it: between dollars it would be a formula, and with an underscore first be hidden."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def short_names(names: Iterable[str]) -> list[str]:
    """Folders, Hub ids and addresses by their last part, and with those before it where others end alike."""
    parts = [name.rstrip("/").rpartition("://")[2].split("/") for name in names]
    for count in range(1, max(map(len, parts), default=1)):
        short = [" ".join(part[-count:]) for part in parts]
        if len(set(short)) == len(short):
            return short
    return [" ".join(part) for part in parts]


def plot_slots(slots: Mapping[str, Sequence[float]], axes) -> None:
    """Share of all blocks that accept the draft of each slot."""
    for name, shares in slots.items():
        axes.plot(range(1, len(shares) + 1), shares, marker=".", label=plot_label(name))
    axes.set(xlabel="slot", ylabel="share of blocks that accept it", ylim=(0, 1), title="acceptance per slot")
    axes.legend()


def plot_reports(reports: Mapping[str, AcceptanceReport], path: Path, target: str) -> None:
    """Acceptance per slot, committed tokens per block, and the acceptance length over the answer."""
    figure, (slots, histogram, positions) = new_figure(3)
    names = short_names(reports)
    count = max(len(report.prompts) for report in reports.values())
    figure.suptitle(plot_label(f"{short_names([target])[0]} with {', '.join(names)}: {count} prompts"))
    plot_slots({name: report.slot_acceptance for name, report in zip(names, reports.values(), strict=True)}, slots)
    width = 0.8 / len(reports)
    for index, report in enumerate(reports.values()):
        counts = report.committed_histogram
        shares = [count / max(sum(counts), 1) for count in counts]
        histogram.bar([k + 1 + (index + 0.5) * width - 0.4 for k in range(len(shares))], shares, width)
        stretches = report.by_position()
        positions.plot([s["position"] for s in stretches], [s["acceptance_length"] for s in stretches], marker=".")
    histogram.set(xlabel="tokens committed", ylabel="share of blocks", title="committed tokens per block")
    positions.set(xlabel="token of the answer", ylabel="acceptance length", title="acceptance over the answer")
    positions.set_ylim(bottom=1)
    figure.savefig(path, dpi=120)


def plot_servers(reports: Mapping[str, ServerReport], path: Path, drafters: Sequence[str] | None = None) -> None:
    """Acceptance per slot, for the servers that tell it; none of them tells its drafter's name, which may be given."""
    # Ports and engines tell servers of one model apart.
    ports = {url: short_names([url])[0].rpartition(":")[2] for url in reports}
    names = short_names(drafters or [f"{report.engine}, {ports[url]}" for url, report in reports.items()])
    # While servers are still asked there are fewer reports than drafters.
    names = names[: len(reports)]
    slots = {name: shares for name, r in zip(names, reports.values(), strict=True) if (shares := r.slot_acceptance)}
    if slots:
        figure, (axes,) = new_figure(1)
        models = ", ".join(dict.fromkeys(short_names([report.model])[0] for report in reports.values()))
        count = max(len(report.answers) for report in reports.values())
        drafter = ", ".join(names) if drafters else "its server's drafter"
        figure.suptitle(plot_label(f"{models} with {drafter}: {count} prompts"))
        plot_slots(slots, axes)
        figure.savefig(path, dpi=120)


def new_figure(columns: int, height: float = 4.0):
    """A figure without a window, and its axes side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]
