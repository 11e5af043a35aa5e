# SPDX-License-Identifier: Apache-2.0
"""The teacher-forced walk: the acceptance length of given answers, without decoding.

The drafter drafts a block at every token of an answer, many at once; then the walk follows the anchors that decoding
would visit: from an answer's first token, each anchor's right drafts and the target's own next token lead to the next
anchor. On token ids that the target wrote greedily, with the same weights, types and kernels, these are the very
verifications of speculative decoding. On other texts it says how the drafter fits the text.

Shapes: B rows, T tokens, A anchors, b block size, K taps, D hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..configuration_dflash import DFlashDraftConfig
from ..data.collator import DataCollatorForDFlash
from ..data.packing import Documents, PackedDataset, document_lengths
from ..generation import evaluation_mode
from ..masking import block_position_ids, training_masks
from ..modeling_dflash import DFlashDraftModel
from ..target.frozen_target import FrozenTarget
from ..target.head import FrozenHead
from ..training.losses import CHUNK_LOGITS, IGNORE_INDEX
from .checks import check_drafter


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


__all__ = ["WalkSums", "WalkedAnswer", "follow", "right_drafts", "walk_batch", "walk_documents"]
