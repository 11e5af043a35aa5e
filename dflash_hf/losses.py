# SPDX-License-Identifier: Apache-2.0
"""Objectives and the loss through the target's frozen head: sums, never means.

Shapes: M blocks, b block size, D hidden size, V vocabulary. Slot 0 of a block is the known anchor and is never
multiplied with the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


IGNORE_INDEX = -100
# Logits of one chunk are kept in fp32 only while the chunk is worked on: 2**27 of them are half a gigabyte.
CHUNK_LOGITS = 2**27


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


def _chunk(
    hidden: torch.Tensor, labels: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss (differentiable in `hidden [m, b-1, D]`) and sums of some whole blocks with `labels [m, b-1]`."""
    counted = labels != IGNORE_INDEX
    if labels.device.type == "cpu":
        # Which slots count is known without waiting, so the others never meet the head.
        logits = head(hidden[counted]).float()
        losses = nn.functional.cross_entropy(logits, labels[counted], reduction="none")
        token_losses = hidden.new_zeros(labels.shape, dtype=losses.dtype).index_put((counted,), losses)
        right = torch.zeros_like(counted).index_put((counted,), logits.detach().argmax(-1) == labels[counted])
    else:
        logits = head(hidden).float()
        token_losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX
        ).view(labels.shape)
        right = (logits.detach().argmax(-1) == labels) & counted
    loss = (objective.weights(token_losses.detach(), counted) * token_losses).sum()
    return loss, _block_sums(loss.detach(), objective.normalizer(counted), counted, right)


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


class _FrozenHeadLoss(torch.autograd.Function):
    """The gradient of the hidden states is taken chunk by chunk in the forward, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, labels, head, objective, chunk_blocks):
        needs_grad = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden if needs_grad else hidden[:0])
        sums = BlockSums.zeros(labels.shape[1], hidden.device).values
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_blocks):
            part = slice(start, start + chunk_blocks)
            slots = hidden[part, 1:].detach().requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                chunk_loss, chunk_sums = _chunk(slots, labels[part, 1:], head, objective)
            if needs_grad:
                (gradient[part, 1:],) = torch.autograd.grad(chunk_loss, slots)
            loss = loss + chunk_loss.detach()
            sums += chunk_sums
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss, grad_sums):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None


def frozen_head_loss(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    objective: Objective,
    vocab_size: int,
    chunk_blocks: int | None = None,
) -> tuple[torch.Tensor, BlockSums]:
    """Weighted sum of cross-entropies through the target's frozen head, in one pass over chunks of whole blocks.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, N * b, D]`): The drafter's output.
        labels (`torch.Tensor` of shape `[B, N, b]`): Token of each slot, -100 where it does not count and in slot 0.
        head: The target's frozen head, from `[..., D]` to `[..., V]`; it gets no gradient.
        objective: Weights of the slots.
        vocab_size: `V`, from which the chunk size follows.
        chunk_blocks: Blocks per chunk; by default as many as keep 2**27 logits.

    Returns:
        The weighted sum (not yet normalised; zero with zero gradients where nothing counts) and the sums for
        metrics.
    """
    block_size = labels.shape[-1]
    labels = labels.flatten(0, -2)
    if chunk_blocks is None:
        chunk_blocks = max(1, CHUNK_LOGITS // (vocab_size * (block_size - 1)))
    hidden_states = hidden_states.reshape(labels.shape[0], block_size, -1)
    loss, sums = _FrozenHeadLoss.apply(hidden_states, labels, head, objective, chunk_blocks)
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
