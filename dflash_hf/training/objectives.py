# SPDX-License-Identifier: Apache-2.0
"""Objectives: how far the drafter is from what is wanted at each slot, and how slots and blocks are weighted.

An objective has two parts. Its *slot terms* are read off the logits of single slots: the cross-entropy with the given
token and, where it compares distributions, one divergence from the target's. Its *block losses* combine the terms of
whole blocks. Both are differentiable, so that the loss can be taken through the frozen head chunk by chunk.

Shapes: S slots, M blocks, b block size, V vocabulary, C terms. All sums, never means.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .slot_terms import SlotTerms


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


__all__ = [
    "OBJECTIVES",
    "SLOT_WEIGHTS",
    "DPace",
    "DecayedCrossEntropy",
    "Distillation",
    "ExpectedAcceptance",
    "Objective",
    "compares_distributions",
    "default_gamma",
    "make_objective",
    "objective_of",
]
