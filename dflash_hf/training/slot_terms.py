# SPDX-License-Identifier: Apache-2.0
"""What is read off the logits of single slots: the cross-entropy, and a divergence from the target's distribution.

Shapes: S slots, V vocabulary, C terms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


IGNORE_INDEX = -100
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


__all__ = ["IGNORE_INDEX", "SlotTerms"]
