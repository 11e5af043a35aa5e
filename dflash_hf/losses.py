# SPDX-License-Identifier: Apache-2.0
"""From a batch to the loss: noise, slot terms, objectives, the target's frozen head."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from .data_collator import IGNORE_INDEX
from .frozen_target import FrozenHead
from .masking import block_position_ids, training_masks


# --- What is read off the logits of single slots: the cross-entropy, and a divergence from the target's distribution.

# How fast the hybrid of arXiv 2602.23881 turns from KL to total variation as the acceptance grows.
LK_DECAY = 3.0


@dataclass(frozen=True)
class SlotTerms:
    """What is read off the logits of single slots; objectives with equal terms share one compiled function.

    Args:
        divergence: None for the cross-entropy alone, else what else is measured against the target's distribution:
            "kl", "total_variation", "lk", "lk_hybrid" or "overlap" (the probability that a draft is accepted).
        temperature: Temperature of the target's distribution; below 1 it is nearer to the target's greedy choice.
    """

    divergence: str | None = None
    temperature: float = 1.0

    @property
    def count(self) -> int:
        return 1 if self.divergence is None else 2

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, target_logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Terms `[S, C]` in fp32 or better (0 where nothing counts) and whether the largest logit is the label.

        Args:
            logits (`torch.Tensor` of shape `[S, V]`): The drafter's.
            labels (`torch.Tensor` of shape `[S]`): The given tokens, -100 where nothing counts.
            target_logits (`torch.Tensor` of shape `[S, V]`): The target's for the same places, for a divergence.
        """
        right = logits.detach().argmax(-1) == labels
        logits = _wide(logits)
        if self.divergence is None:
            losses = nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
            return losses[:, None], right
        assert target_logits is not None  # the loss through the head sees to it
        counts = labels != IGNORE_INDEX
        log_q = logits.log_softmax(-1)
        losses = -log_q.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        log_p = (_wide(target_logits) / self.temperature).log_softmax(-1)
        terms = torch.stack([losses, _DIVERGENCES[self.divergence](log_p, log_q)], dim=-1)
        return torch.where(counts[:, None], terms, 0.0), right


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    p = log_p.exp()
    # Tokens that a head rules out have logits of -inf on both sides, whose difference is no number.
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def _overlap(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The probability that speculative sampling accepts a draft: the sum of the smaller probabilities."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def _total_variation(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return 1 - _overlap(log_p, log_q)


def _lk(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Negative logarithm of the acceptance; its gradient does not vanish where nothing is accepted yet."""
    return -torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)


def _lk_hybrid(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL while little is accepted, total variation once much is."""
    overlap = _overlap(log_p, log_q)
    share = torch.exp(-LK_DECAY * overlap.detach())
    return share * _kl(log_p, log_q) + (1 - share) * (1 - overlap)


_DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "kl": _kl,
    "total_variation": _total_variation,
    "lk": _lk,
    "lk_hybrid": _lk_hybrid,
    "overlap": _overlap,
}


# --- Objectives: how far the drafter is from what is wanted at each slot, and how slots and blocks are weighted.


OBJECTIVES = (
    "cross_entropy",
    "dpace",
    "kl",
    "total_variation",
    "lk",
    "lk_hybrid",
    "expected_acceptance",
)

SLOT_WEIGHTS = ("decay", "dpace")

LOWEST_TEMPERATURE = 1e-3


class Objective(Protocol):
    """What training minimises: the sum of the block losses over the normaliser."""

    @property
    def slot_terms(self) -> SlotTerms:
        """What it needs to know of single slots."""

    def block_losses(self, terms: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Losses `[M, b-1]` from the terms `[M, b-1, C]` (0 where uncounted) and what counts `[M, b-1]`."""

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        """What the sum of the losses is divided by, from `counted [..., b-1]` alone."""


@dataclass(frozen=True)
class DecayedCrossEntropy:
    """Cross-entropy with weights `exp(-(k-1)/gamma)` for slot k, divided by their sum (arXiv 2602.06036).

    Args:
        gamma: Decay length in slots.
    """

    gamma: float

    @property
    def slot_terms(self) -> SlotTerms:
        return SlotTerms()

    def _decay(self, counted: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(counted.shape[-1], device=counted.device, dtype=torch.float32)
        return torch.exp(-slots / self.gamma) * counted

    def weights(self, losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Weights `[M, b-1]` from the detached cross-entropies `[M, b-1]` (0 where uncounted) and what counts."""
        return self._decay(counted).to(losses.dtype)

    def block_losses(self, terms: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return self.weights(terms[..., 0].detach(), counted) * terms[..., 0]

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return self._decay(counted).sum()


@dataclass(frozen=True)
class DPace:
    """Weights that follow the drafter's own probability of reaching a slot, divided by the number of counted slots.

    With q the probability of the label, `s = (1 - alpha) q + alpha` and `w_k = sum over m >= k of s_1 ... s_m`.

    Args:
        alpha: Smoothing in [0, 1]; 1 weights slots by their distance to the end of the chain alone, 0 gives the
            gradient of the expected number of accepted drafts.
    """

    alpha: float = 0.5

    @property
    def slot_terms(self) -> SlotTerms:
        return SlotTerms()

    def weights(self, losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Weights `[M, b-1]` from the detached cross-entropies `[M, b-1]` (0 where uncounted) and what counts."""
        smoothed = (1 - self.alpha) * torch.exp(-losses) + self.alpha
        reached = torch.where(counted, smoothed, torch.ones_like(smoothed)).cumprod(dim=-1) * counted
        return reached.flip(-1).cumsum(dim=-1).flip(-1) * counted

    def block_losses(self, terms: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return self.weights(terms[..., 0].detach(), counted) * terms[..., 0]

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return counted.sum().float()


@dataclass(frozen=True)
class Distillation:
    """A divergence from the target's distribution at every slot, mixed with the cross-entropy.

    Args:
        divergence: "kl", "total_variation", "lk" or "lk_hybrid" (arXiv 2602.23881).
        weighting: Whose weights and normaliser are used.
        temperature: Temperature of the target's distribution.
        cross_entropy_share: Share of the cross-entropy with the given token in [0, 1].
    """

    divergence: str
    weighting: DecayedCrossEntropy | DPace
    temperature: float = 1.0
    cross_entropy_share: float = 0.0

    @property
    def slot_terms(self) -> SlotTerms:
        return SlotTerms(self.divergence, self.temperature)

    def block_losses(self, terms: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        weights = self.weighting.weights(terms[..., 0].detach(), counted)
        return weights * _mixed(self.cross_entropy_share, terms[..., 0], terms[..., 1])

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return self.weighting.normalizer(counted)


@dataclass(frozen=True)
class ExpectedAcceptance:
    """The share of a block that is not expected to be accepted, mixed with a weighted cross-entropy.

    With a the overlap of the drafter's and the target's distributions, slot k is accepted with probability
    `a_1 ... a_k`: its loss is one less that product, so that their sum is the block's length less its expected
    number of accepted drafts.

    Args:
        weighting: Weights of the cross-entropy; the normaliser is the number of counted slots.
        temperature: Temperature of the target's distribution.
        cross_entropy_share: Share of the cross-entropy in [0, 1].
    """

    weighting: DecayedCrossEntropy | DPace
    temperature: float = 1.0
    cross_entropy_share: float = 0.0

    @property
    def slot_terms(self) -> SlotTerms:
        return SlotTerms("overlap", self.temperature)

    def block_losses(self, terms: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        weights = self.weighting.weights(terms[..., 0].detach(), counted)
        accepted = running_products(torch.where(counted, terms[..., 1], 1.0))
        return _mixed(self.cross_entropy_share, weights * terms[..., 0], (1 - accepted) * counted)

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return counted.sum().float()


def _mixed(share: float, cross_entropy: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # A share of 0 leaves out even the infinite cross-entropy of a token that the head rules out.
    return other if share == 0 else share * cross_entropy + (1 - share) * other


def running_products(factors: torch.Tensor) -> torch.Tensor:
    """`cumprod` over the last dimension, of few factors, whose backward does not look for zeros on the host."""
    products = [factors[..., 0]]
    for slot in range(1, factors.shape[-1]):
        products.append(products[-1] * factors[..., slot])
    return torch.stack(products, dim=-1)


def default_gamma(block_size: int) -> float:
    """The paper's decay lengths, 7, 5 and 4 for blocks of 16, 10 and 8."""
    return min(block_size / 2, 7)


def compares_distributions(name: str) -> bool:
    """Whether an objective compares with the target's distribution, for which all of the target's layers run."""
    return name not in ("cross_entropy", "dpace")


def make_objective(
    name: str,
    block_size: int,
    gamma: float | None = None,
    alpha: float = 0.5,
    slot_weights: str | None = None,
    temperature: float = 1.0,
    cross_entropy_share: float = 0.0,
) -> Objective:
    """An objective by name.

    Args:
        name: "cross_entropy" (the paper's decayed cross-entropy), "dpace", "kl", "total_variation", "lk",
            "lk_hybrid" or "expected_acceptance". All but the first two compare with the target's distribution.
        block_size: Slots per block, from which the default `gamma` follows.
        gamma: Decay length of the "decay" weights in slots.
        alpha: Smoothing of the "dpace" weights.
        slot_weights: "decay" or "dpace", for objectives that compare distributions; "dpace" by default.
        temperature: Temperature of the target's distribution.
        cross_entropy_share: Share of the cross-entropy in objectives that compare distributions.

    Raises:
        ValueError: For an unknown name or a value outside its range.
    """
    gamma = default_gamma(block_size) if gamma is None else gamma
    _check(name, gamma, alpha, slot_weights, temperature, cross_entropy_share)
    decay, dpace = DecayedCrossEntropy(gamma), DPace(alpha)
    if name == "cross_entropy":
        return decay
    if name == "dpace":
        return dpace
    weighting = decay if slot_weights == "decay" else dpace
    if name == "expected_acceptance":
        return ExpectedAcceptance(weighting, temperature, cross_entropy_share)
    return Distillation(name, weighting, temperature, cross_entropy_share)


def objective_of(args: Any, block_size: int) -> Objective:
    """The objective of training arguments; [`make_objective`] says what it raises."""
    return make_objective(
        args.objective,
        block_size,
        args.loss_gamma,
        args.dpace_alpha,
        args.slot_weights,
        args.loss_temperature,
        args.cross_entropy_share,
    )


def _check(
    name: str, gamma: float, alpha: float, slot_weights: str | None, temperature: float, cross_entropy_share: float
) -> None:
    if name not in OBJECTIVES:
        raise ValueError(f"objective={name!r} is unknown; choose one of {', '.join(OBJECTIVES)}.")
    # Each test is false for nan too.
    if not gamma > 0:
        raise ValueError(f"loss_gamma={gamma} must be positive: it is the decay length of the weights in slots.")
    if not 0 <= alpha <= 1:
        raise ValueError(f"dpace_alpha={alpha} must lie in [0, 1]: it mixes the drafter's probability with 1.")
    if slot_weights is not None and slot_weights not in SLOT_WEIGHTS:
        raise ValueError(f"slot_weights={slot_weights!r} is unknown; choose {' or '.join(SLOT_WEIGHTS)}.")
    if not LOWEST_TEMPERATURE <= temperature < float("inf"):
        raise ValueError(
            f"loss_temperature={temperature} must be a finite number of at least {LOWEST_TEMPERATURE}: the target's "
            "logits are divided by it, and must not overflow. For its greedy choice alone take a small one, such as "
            "0.1."
        )
    if not 0 <= cross_entropy_share <= 1:
        raise ValueError(f"cross_entropy_share={cross_entropy_share} must lie in [0, 1]: it mixes two losses.")
    if not compares_distributions(name) and (slot_weights, temperature, cross_entropy_share) != (None, 1.0, 0.0):
        raise ValueError(
            f"objective={name!r} reads no distribution of the target and brings its own weights, so slot_weights, "
            "loss_temperature and cross_entropy_share have no effect on it. Leave them unset, or choose an objective "
            f"among {', '.join(OBJECTIVES[2:])}."
        )


# --- The loss through the target's frozen head: sums, never means.


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


# --- From a batch and the target's hidden states to the loss: what training, evaluation and the benchmark run.


def drafter_loss(
    model: nn.Module,
    config: Any,
    inputs: dict[str, Any],
    context_hidden_states: torch.Tensor,
    head: FrozenHead,
    objective: Objective,
    chunk_blocks: int | None = None,
    final_hidden_states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, BlockSums, BaseModelOutputWithPast]:
    """Draft all blocks of a batch and compare them with its labels through the frozen head.

    Args:
        model: The drafter, possibly wrapped for distributed training.
        config: The drafter's [`DFlashDraftConfig`].
        inputs: A batch of [`DataCollatorForDFlash`] on the drafter's device.
        context_hidden_states (`torch.Tensor` of shape `[B, T, K * D]`): The target's hidden states, noise included,
            in the type that the drafter computes in.
        head: The target's embedding and head on the drafter's device.
        objective: What is summed over slots and blocks.
        chunk_blocks: Blocks per chunk of the loss.
        final_hidden_states (`torch.Tensor` of shape `[B, T, D]`): The target's states after its final norm, for an
            objective that compares with its distribution.

    Returns:
        The sum of losses (not yet normalised), the sums for metrics and the drafter's output.
    """
    anchors = inputs["anchor_positions"]
    anchor_ids = inputs["input_ids"].gather(1, anchors.clamp(min=0))
    noise_embeds = head.noise_embeds(anchor_ids, config.mask_token_id, config.block_size)
    noise_embeds = noise_embeds.to(context_hidden_states.dtype)
    outputs = model(
        noise_embeds=noise_embeds,
        context_hidden_states=context_hidden_states,
        attention_mask=training_masks(config, anchors, inputs["document_ids"], noise_embeds.dtype),
        position_ids=block_position_ids(inputs["position_ids"], anchors, config.block_size),
    )
    # Batches of other collators have no counts on the host; they are then read from the labels.
    counted_slots = inputs["counted_slots"].ravel() if "counted_slots" in inputs else None
    loss, sums = frozen_head_loss(
        outputs.last_hidden_state,
        inputs["labels"],
        head.logits,
        objective,
        head.vocab_size,
        chunk_blocks,
        counted_slots,
        None if final_hidden_states is None else TargetStates(final_hidden_states, anchors),
    )
    return loss, sums, outputs


# --- Noise on the target's hidden states: a document's own, however documents are spread over rows and ranks.


def add_context_noise(
    context_hidden_states: torch.Tensor,
    document_lengths: list[list[int]],
    noise_seeds: list[list[int]],
    half_width: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Add uniform noise in `(-half_width, half_width)`, drawn per document from the document's own seed.

    Args:
        context_hidden_states (`torch.Tensor` of shape `[B, T, K * D]`): The target's hidden states, left as they are.
        document_lengths: Lengths in tokens of the documents of each row.
        noise_seeds: One seed per document.
        half_width: Bound of the noise; 0 returns the input itself.
        dtype: Type of the result, by default that of the input; the sum is taken in fp32 at least.

    Returns:
        `torch.Tensor` of shape `[B, T, K * D]`. However documents are spread over rows, batches and ranks, each sees
        the same noise.
    """
    if half_width == 0:
        return context_hidden_states
    # Document by document, so that no more than one of them is held in fp32.
    noisy = context_hidden_states.to(dtype or context_hidden_states.dtype, copy=True)
    generator = torch.Generator(device=noisy.device)
    wide = torch.promote_types(context_hidden_states.dtype, torch.float32)
    for row, (lengths, seeds) in enumerate(zip(document_lengths, noise_seeds, strict=True)):
        start = 0
        for length, seed in zip(lengths, seeds, strict=True):
            part = (row, slice(start, start + length))
            generator.manual_seed(seed)
            noise = torch.empty_like(context_hidden_states[part], dtype=torch.float32)
            # Noise is small beside large hidden states: summed in bf16 most of it would be rounded away.
            noise = noise.uniform_(-half_width, half_width, generator=generator)
            noisy[part] = (context_hidden_states[part].to(wide) + noise).to(noisy.dtype)
            start += length
    return noisy
