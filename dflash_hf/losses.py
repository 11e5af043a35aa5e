# SPDX-License-Identifier: Apache-2.0
"""Objectives and the loss through the target's frozen head: sums, never means.

Shapes: M blocks, b block size, D hidden size, V vocabulary. Slot 0 of a block is the known anchor and is never
multiplied with the head.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn


IGNORE_INDEX = -100
# Logits of one chunk are kept only while the chunk is worked on: 2**27 of them in fp32 are half a gigabyte, 2**29 in
# bf16 one, and a GPU needs chunks of some thousand slots to be busy.
CHUNK_LOGITS = 2**27
DEVICE_CHUNK_LOGITS = 2**29


class Objective(Protocol):
    """How the slots of a block are weighted."""

    def weights(self, losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Weights `[M, b-1]` from the detached cross-entropies `[M, b-1]` (0 where uncounted) and what counts."""

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        """What the weighted sum is divided by, from `counted [..., b-1]` alone."""


@dataclass(frozen=True)
class DecayedCrossEntropy:
    """Cross-entropy with weights `exp(-(k-1)/gamma)` for slot k, divided by their sum (arXiv 2602.06036).

    Args:
        gamma: Decay length in slots.
    """

    gamma: float

    def _decay(self, counted: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(counted.shape[-1], device=counted.device, dtype=torch.float32)
        return torch.exp(-slots / self.gamma) * counted

    def weights(self, losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return self._decay(counted).to(losses.dtype)

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return self._decay(counted).sum()


@dataclass(frozen=True)
class DPace:
    """Weights that follow the drafter's own probability of reaching a slot, divided by the number of counted slots.

    With q the probability of the label, `s = (1 - alpha) q + alpha` and `w_k = sum over m >= k of s_1 ... s_m`.

    Args:
        alpha: Smoothing in [0, 1]; 1 weights slots by their distance to the end of the chain alone.
    """

    alpha: float = 0.5

    def weights(self, losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        smoothed = (1 - self.alpha) * torch.exp(-losses) + self.alpha
        reached = torch.where(counted, smoothed, torch.ones_like(smoothed)).cumprod(dim=-1) * counted
        return reached.flip(-1).cumsum(dim=-1).flip(-1) * counted

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return counted.sum().float()


def default_gamma(block_size: int) -> float:
    """The paper's decay lengths, 7, 5 and 4 for blocks of 16, 10 and 8."""
    return min(block_size / 2, 7)


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


def _slot_losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy `[S]` in fp32 or better (0 where nothing counts) and whether the largest logit is the label."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
    return losses, logits.detach().argmax(-1) == labels


@functools.cache
def _compiled_slot_losses() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Fused into one reading of the logits for the values and one for the gradient."""
    return torch.compile(_slot_losses, dynamic=False)


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


class _FrozenHeadLoss(torch.autograd.Function):
    """The gradient of the hidden states is taken chunk by chunk in the forward, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, labels, head, objective, chunks: _Chunks):
        needs_grad = ctx.needs_input_grad[0]
        num_blocks, block_size, width = hidden.shape
        flat, flat_labels = hidden.detach().reshape(-1, width), labels.flatten()
        gradient = torch.zeros_like(flat if needs_grad else flat[:0])
        counted = labels[:, 1:] != IGNORE_INDEX
        token_losses = torch.zeros(labels.shape, device=hidden.device, dtype=_at_least_fp32(hidden.dtype))
        right = torch.zeros_like(labels, dtype=torch.bool)
        loss = token_losses.new_zeros(())
        slot_losses = _slot_losses if labels.device.type == "cpu" else _compiled_slot_losses()
        for first_block, end_block, first_slot, size in chunks.bounds:
            index = chunks.order[first_slot : first_slot + size]
            # Entries of other chunks, which only fill up this one, count nothing here.
            block = index // block_size
            own = (block >= first_block) & (block < end_block)
            chunk_labels = torch.where(own, flat_labels[index], IGNORE_INDEX)
            slots = flat[index].requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                logits = head(slots)
                losses, is_right = slot_losses(logits, chunk_labels)
            token_losses.view(-1)[index] = losses.detach().to(token_losses.dtype)
            right.view(-1)[index] = is_right
            part = slice(first_block, end_block)
            weights = objective.weights(token_losses[part, 1:], counted[part])
            loss = loss + (weights * token_losses[part, 1:]).sum()
            if needs_grad:
                spread = torch.zeros_like(token_losses)
                spread[part, 1:] = weights.to(spread.dtype)
                (gradient[index],) = torch.autograd.grad(losses, slots, spread.view(-1)[index].to(losses.dtype))
            del logits, losses, slots
        sums = _block_sums(loss, objective.normalizer(counted), counted, right[:, 1:] & counted)
        ctx.save_for_backward(gradient.view(num_blocks if needs_grad else 0, block_size, width))
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss, grad_sums):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None


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
) -> tuple[torch.Tensor, BlockSums]:
    """Weighted sum of cross-entropies through the target's frozen head, in one pass over chunks of whole blocks.

    Only slots that count are multiplied with the head.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, N * b, D]`): The drafter's output.
        labels (`torch.Tensor` of shape `[B, N, b]`): Token of each slot, -100 where it does not count and in slot 0.
        head: The target's frozen head, from `[..., D]` to `[..., V]`; it gets no gradient.
        objective: Weights of the slots.
        vocab_size: `V`, from which the chunk size follows.
        chunk_blocks: Full blocks per chunk; by default as many as keep 2**27 logits on a CPU, 2**29 elsewhere.
        counted_slots (`[B * N]`, *optional*): Number of counted slots of each block, known on the host. Without it
            they are read from the labels, which waits for the device.

    Returns:
        The weighted sum (not yet normalised; zero with zero gradients where nothing counts) and the sums for
        metrics.
    """
    block_size = labels.shape[-1]
    labels = labels.flatten(0, -2)
    if chunk_blocks is None:
        limit = CHUNK_LOGITS if labels.device.type == "cpu" else DEVICE_CHUNK_LOGITS
        chunk_blocks = max(1, limit // (vocab_size * (block_size - 1)))
    if counted_slots is None:
        counted_slots = (labels[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
    chunks = _chunks(labels, [int(count) for count in counted_slots], chunk_blocks)
    hidden_states = hidden_states.reshape(labels.shape[0], block_size, -1)
    loss, sums = _FrozenHeadLoss.apply(hidden_states, labels, head, objective, chunks)
    return loss, BlockSums(sums)


def make_objective(name: str, block_size: int, gamma: float | None = None, alpha: float = 0.5) -> Objective:
    """An objective by name.

    Args:
        name: "cross_entropy" (the paper's decayed cross-entropy) or "dpace".
        block_size: Slots per block, from which the default `gamma` follows.
        gamma: Decay length of "cross_entropy" in slots.
        alpha: Smoothing of "dpace".

    Raises:
        ValueError: For an unknown name or a value outside its range.
    """
    if name == "cross_entropy":
        gamma = default_gamma(block_size) if gamma is None else gamma
        if not gamma > 0:  # false for nan too
            raise ValueError(f"loss_gamma={gamma} must be positive: it is the decay length of the weights in slots.")
        return DecayedCrossEntropy(gamma)
    if name == "dpace":
        if not 0 <= alpha <= 1:
            raise ValueError(f"dpace_alpha={alpha} must lie in [0, 1]: it mixes the drafter's probability with 1.")
        return DPace(alpha)
    raise ValueError(f"objective={name!r} is unknown; choose 'cross_entropy' or 'dpace'.")


__all__ = [
    "BlockSums",
    "DPace",
    "DecayedCrossEntropy",
    "Objective",
    "default_gamma",
    "frozen_head_loss",
    "make_objective",
]
