# SPDX-License-Identifier: Apache-2.0
"""The loss through the target's frozen head: sums, never means.

Shapes: M blocks, b block size, D hidden size, V vocabulary. Slot 0 of a block is the known anchor and is never
multiplied with the head.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .objectives import DecayedCrossEntropy, DPace, Objective, default_gamma, make_objective
from .slot_terms import IGNORE_INDEX, SlotTerms


# Logits of one chunk are kept only while the chunk is worked on: 2**27 of them in fp32 are half a gigabyte, 2**29 in
# bf16 one, and a GPU needs chunks of some thousand slots to be busy.
CHUNK_LOGITS = 2**27
DEVICE_CHUNK_LOGITS = 2**29


@dataclass
class BlockSums:
    """Sums over blocks on the device of the loss, added up over micro-batches and ranks and read once per log.

    `values` is a vector: loss, normaliser, blocks, committed, full blocks, committed in full blocks, then for slots
    1..b-1 the counted ones, then the right ones.
    """

    values: torch.Tensor

    @staticmethod
    def zeros(block_size: int, device: torch.device | str = "cpu") -> "BlockSums":
        return BlockSums(torch.zeros(6 + 2 * (block_size - 1), device=device))

    def add(self, other: "BlockSums") -> None:
        self.values += other.values.to(self.values.device)

    def metrics(self) -> dict[str, float]:
        """Loss, acceptance length and accuracies of what was added up (reads the device).

        `acceptance_length` is the mean number of tokens that a verification would commit at a random anchor (right
        drafts up to the first wrong one, plus the target's own token), over blocks whose slots all count; over all
        blocks, cut at the end of the answer, where no block is full.
        """
        values = self.values.tolist()
        loss, normalizer, blocks, committed, full, committed_full = values[:6]
        slots = (len(values) - 6) // 2
        counted, right = values[6 : 6 + slots], values[6 + slots :]
        metrics = {
            "loss": loss / max(normalizer, 1e-12),
            "acceptance_length": committed_full / full if full else committed / max(blocks, 1),
            "accuracy": sum(right) / max(sum(counted), 1),
            "full_blocks": full / max(blocks, 1),
        }
        for k in range(slots):
            metrics[f"accuracy_slot_{k + 1}"] = right[k] / max(counted[k], 1)
        return metrics


def _block_sums(
    loss: torch.Tensor, normalizer: torch.Tensor, counted: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    length = counted.sum(dim=1)
    accepted = right.long().cumprod(dim=1).sum(dim=1)
    full = length == counted.shape[1]
    # After the last token of an answer there is no token of the target's own to commit.
    committed = torch.where(full, accepted + 1, torch.minimum(accepted + 1, length))
    scalars = [
        loss,
        normalizer,
        (length > 0).sum(),
        committed.sum(),
        full.sum(),
        (committed * full).sum(),
    ]
    return torch.cat([torch.stack([s.float() for s in scalars]), counted.sum(0).float(), right.sum(0).float()])


@functools.cache
def _compiled_slot_terms(terms: SlotTerms) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Fused into one reading of the logits for the values and one for the gradient."""
    return torch.compile(terms.__call__, dynamic=False)


@dataclass(frozen=True)
class _Chunks:
    """Whole blocks that go through the head together.

    `order` lists the flat indices of the counted slots before all others; a chunk is (first block, end block, first
    entry of `order`, number of entries). On a GPU every chunk has `rows` entries, so that kernels are compiled once:
    those beyond its own are of later chunks or count nothing, and get no weight.
    """

    order: torch.Tensor
    bounds: list[tuple[int, int, int, int]]


def _chunks(labels: torch.Tensor, counted_slots: list[int], chunk_blocks: int) -> _Chunks:
    rows = min(chunk_blocks, labels.shape[0]) * (labels.shape[1] - 1)
    bounds, first_block, first_slot, size = [], 0, 0, 0
    for block, count in enumerate(counted_slots):
        if size + count > rows:
            bounds.append((first_block, block, first_slot, size))
            first_block, first_slot, size = block, first_slot + size, 0
        size += count
    if size:
        bounds.append((first_block, len(counted_slots), first_slot, size))
    uncounted = labels == IGNORE_INDEX
    uncounted[:, 0] = True
    order = uncounted.flatten().to(torch.uint8).argsort(stable=True)
    if labels.device.type != "cpu":
        order = nn.functional.pad(order, (0, rows))
        bounds = [(*bound[:3], rows) for bound in bounds]
    return _Chunks(order, bounds)


@dataclass(frozen=True)
class TargetStates:
    """The target's own hidden states, from which its distribution follows where an objective compares with it.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, T, D]`): After the target's final norm, ready for its head.
        anchor_positions (`torch.Tensor` of shape `[B, N]`): Row index of each block's anchor, -1 where unused.
    """

    hidden_states: torch.Tensor
    anchor_positions: torch.Tensor

    def at(self, slots: torch.Tensor, block_size: int) -> torch.Tensor:
        """States `[S, D]` that predict the tokens of some slots, given as flat indices into `[B * N * b]`."""
        rows, width = self.hidden_states.shape[:2]
        block, slot = slots // block_size, slots % block_size
        row = block // self.anchor_positions.shape[1]
        # The token k after the anchor is predicted by the state one before it; slots that count nothing may be out of
        # the row.
        position = (self.anchor_positions.flatten()[block] + slot - 1).clamp(0, width - 1)
        return self.hidden_states.reshape(rows * width, -1)[row * width + position]


class _FrozenHeadLoss(torch.autograd.Function):
    """The gradient of the hidden states is taken chunk by chunk in the forward, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, labels, head, objective: Objective, chunks: _Chunks, target):
        needs_grad = ctx.needs_input_grad[0]
        num_blocks, block_size, width = hidden.shape
        flat, flat_labels = hidden.detach().reshape(-1, width), labels.flatten()
        gradient = torch.zeros_like(flat if needs_grad else flat[:0])
        counted = labels[:, 1:] != IGNORE_INDEX
        kind = objective.slot_terms
        terms = torch.zeros(*labels.shape, kind.count, device=hidden.device, dtype=_at_least_fp32(hidden.dtype))
        right = torch.zeros_like(labels, dtype=torch.bool)
        loss = terms.new_zeros(())
        slot_terms = kind if labels.device.type == "cpu" else _compiled_slot_terms(kind)
        for first_block, end_block, first_slot, size in chunks.bounds:
            index = chunks.order[first_slot : first_slot + size]
            # Entries of other chunks, which only fill up this one, count nothing here.
            block = index // block_size
            own = (block >= first_block) & (block < end_block)
            chunk_labels = torch.where(own, flat_labels[index], IGNORE_INDEX)
            expected = None if target is None else head(target.at(index, block_size))
            slots = flat[index].requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                values, is_right = slot_terms(head(slots), chunk_labels, expected)
            terms.view(-1, kind.count)[index] = values.detach().to(terms.dtype)
            right.view(-1)[index] = is_right
            part = slice(first_block, end_block)
            part_loss, part_gradient = _block_loss(objective, terms[part, 1:], counted[part], needs_grad)
            loss = loss + part_loss
            if needs_grad:
                spread = torch.zeros_like(terms)
                assert part_gradient is not None
                spread[part, 1:] = part_gradient
                spread = spread.view(-1, kind.count)[index].to(values.dtype)
                (gradient[index],) = torch.autograd.grad(values, slots, spread)
            del values, slots, expected
        sums = _block_sums(loss, objective.normalizer(counted), counted, right[:, 1:] & counted)
        ctx.save_for_backward(gradient.view(num_blocks if needs_grad else 0, block_size, width))
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss, grad_sums):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None, None


def _block_loss(
    objective: Objective, terms: torch.Tensor, counted: torch.Tensor, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The summed loss of whole blocks and, if asked for, its gradient in their terms `[M, b-1, C]`."""
    if not needs_grad:
        return objective.block_losses(terms, counted).sum(), None
    terms = terms.detach().requires_grad_()
    with torch.enable_grad():
        loss = objective.block_losses(terms, counted).sum()
        (gradient,) = torch.autograd.grad(loss, terms)
    return loss.detach(), gradient


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def frozen_head_loss(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    objective: Objective,
    vocab_size: int,
    chunk_blocks: int | None = None,
    counted_slots: Sequence[int] | np.ndarray | None = None,
    target: TargetStates | None = None,
) -> tuple[torch.Tensor, BlockSums]:
    """Sum of an objective's losses through the target's frozen head, in one pass over chunks of whole blocks.

    Only slots that count are multiplied with the head, the drafter's states and the target's own alike.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, N * b, D]`): The drafter's output.
        labels (`torch.Tensor` of shape `[B, N, b]`): Token of each slot, -100 where it does not count and in slot 0.
        head: The target's frozen head, from `[..., D]` to `[..., V]`; it gets no gradient.
        objective: What is summed.
        vocab_size: `V`, from which the chunk size follows.
        chunk_blocks: Full blocks per chunk; by default as many as keep 2**27 logits on a CPU, 2**29 elsewhere.
        counted_slots (`[B * N]`, *optional*): Number of counted slots of each block, known on the host. Without it
            they are read from the labels, which waits for the device.
        target: The target's own states, which an objective that compares distributions needs; others leave them.

    Returns:
        The sum (not yet normalised; zero with zero gradients where nothing counts) and the sums for metrics.

    Raises:
        ValueError: When the objective compares distributions and `target` is missing.
    """
    compares = objective.slot_terms.divergence is not None
    if compares and target is None:
        raise ValueError(
            f"{objective} compares the drafter's distribution with the target's, so it needs the target's hidden "
            "states after its final norm. Pass `target`, from FrozenTarget(..., final_states=True)."
        )
    block_size = labels.shape[-1]
    labels = labels.flatten(0, -2)
    if chunk_blocks is None:
        limit = CHUNK_LOGITS if labels.device.type == "cpu" else DEVICE_CHUNK_LOGITS
        chunk_blocks = max(1, limit // (vocab_size * (block_size - 1)))
    if counted_slots is None:
        counted_slots = (labels[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
    chunks = _chunks(labels, [int(count) for count in counted_slots], chunk_blocks)
    hidden_states = hidden_states.reshape(labels.shape[0], block_size, -1)
    loss, sums = _FrozenHeadLoss.apply(hidden_states, labels, head, objective, chunks, target if compares else None)
    return loss, BlockSums(sums)


__all__ = [
    "IGNORE_INDEX",
    "BlockSums",
    "DPace",
    "DecayedCrossEntropy",
    "Objective",
    "TargetStates",
    "default_gamma",
    "frozen_head_loss",
    "make_objective",
]
