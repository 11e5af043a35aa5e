# SPDX-License-Identifier: Apache-2.0
"""How drafts are proposed and verified, greedily or so that the target's own distribution is kept.

Sampling is speculative rejection sampling (arXiv 2211.17192): a draft x is accepted with probability
min(1, p(x) / q(x)), where p is the target's and q the drafter's distribution after temperature, top-k and top-p; the
first rejected one is replaced by a token from the positive part of p - q. A draft that was not sampled but is the
drafter's most likely token has q(x) = 1.

Shapes: B rows, b block size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass
class Greedy:
    """Most likely tokens only."""

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """A token `[B]` for each row of logits `[B, V]`."""
        return logits.argmax(dim=-1)

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[B, b - 1]` for logits `[B, b - 1, V]`, and what they were drawn from (nothing)."""
        return logits.argmax(dim=-1), None

    def verify(
        self, drafts: torch.Tensor, proposed_from: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept the drafts that are the target's own tokens.

        Args:
            drafts (`torch.Tensor` of shape `[B, b - 1]`): Proposed tokens.
            proposed_from: Not used.
            logits (`torch.Tensor` of shape `[B, b, V]`): The target's, for the same slots and one more.

        Returns:
            The number of accepted drafts `[B]`, and the tokens `[B, b]` of which as many and one more are committed.
        """
        predicted = logits.argmax(dim=-1)
        accepted = (drafts == predicted[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        # Where drafts are right they are the target's own tokens.
        return accepted, predicted


@dataclass
class Sampling:
    """Tokens with the target's distribution after logits processors that look at one position alone.

    Args:
        processors: Temperature, top-k and top-p as transformers applies them.
        sample_drafts: Draw drafts from the drafter's distribution, else propose its most likely tokens (as servers do
            unless told otherwise).
        generator: Source of randomness on the logits' device; the global one by default.
    """

    processors: LogitsProcessorList
    sample_drafts: bool = False
    generator: torch.Generator | None = None

    @staticmethod
    def of(
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        sample_drafts: bool = False,
        generator: torch.Generator | None = None,
    ) -> "Greedy | Sampling":
        """The way for some settings: greedy at temperature 0.

        Args:
            temperature: Divides the logits; 0 is greedy.
            top_p: Probability that the most likely tokens kept hold together; 1 keeps all.
            top_k: Number of most likely tokens kept; 0 keeps all.
            sample_drafts: As in [`Sampling`].
            generator: As in [`Sampling`].

        Raises:
            ValueError: For a value outside its range.
        """
        if not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError(
                f"temperature={temperature}, top_p={top_p}, top_k={top_k}: expected temperature >= 0 (0: greedy), "
                "0 < top_p <= 1 (1: all tokens) and top_k >= 0 (0: all tokens)."
            )
        if temperature == 0:
            return Greedy()
        processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
        if top_k > 0:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            processors.append(TopPLogitsWarper(top_p))
        return Sampling(processors, sample_drafts, generator)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Distributions `[..., V]` after the processors, in fp32 or better."""
        rows = logits.flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        # None of the processors reads the ids before a position.
        ids: Any = torch.empty(rows.shape[0], 0, dtype=torch.long, device=rows.device)
        return self.processors(ids, rows).softmax(dim=-1).view(logits.shape)

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """A token `[B]` for each row of logits `[B, V]`."""
        return self._draw(self.probabilities(logits))

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[B, b - 1]` for logits `[B, b - 1, V]`, and what they were drawn from (None: the most likely)."""
        if not self.sample_drafts:
            return logits.argmax(dim=-1), None
        probabilities = self.probabilities(logits)
        return self._draw(probabilities), probabilities

    def verify(
        self, drafts: torch.Tensor, proposed_from: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept drafts so that what is committed has the target's distribution.

        Args:
            drafts (`torch.Tensor` of shape `[B, b - 1]`): Proposed tokens.
            proposed_from (`torch.Tensor` of shape `[B, b - 1, V]`): What each was drawn from; None where they are the
                drafter's most likely tokens.
            logits (`torch.Tensor` of shape `[B, b, V]`): The target's, for the same slots and one more.

        Returns:
            The number of accepted drafts `[B]`, and the tokens `[B, b]` of which as many and one more are committed.
        """
        wanted = self.probabilities(logits)
        if proposed_from is None:
            proposed_from = torch.zeros_like(wanted[:, :-1]).scatter_(-1, drafts[..., None], 1.0)
        proposed_from = proposed_from.to(wanted)
        p = wanted[:, :-1].gather(-1, drafts[..., None])[..., 0]
        q = proposed_from.gather(-1, drafts[..., None])[..., 0]
        chances = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=self.generator)
        accepted = (chances * q < p).long().cumprod(dim=1).sum(dim=1)
        # After the last draft nothing was proposed, so the target's own distribution is left whole.
        left = (wanted - torch.nn.functional.pad(proposed_from, (0, 0, 0, 1))).clamp(min=0)
        left = left.gather(1, accepted[:, None, None].expand(-1, 1, left.shape[-1]))[:, 0]
        own = wanted.gather(1, accepted[:, None, None].expand(-1, 1, wanted.shape[-1]))[:, 0]
        # Where p and q are one distribution no draft is rejected, except by rounding.
        left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, own)
        tokens = torch.nn.functional.pad(drafts, (0, 1)).scatter(1, accepted[:, None], self._draw(left)[:, None])
        return accepted, tokens

    def _draw(self, weights: torch.Tensor) -> torch.Tensor:
        """A token for each distribution `[..., V]`, which need not be normalised."""
        flat = weights.flatten(0, -2)
        # Drawing waits for the device anyway.
        if not flat.sum(dim=-1).isfinite().all():
            raise FloatingPointError(
                "There is nothing to draw from: logits hold NaN or infinity. The weights of target or drafter are "
                "damaged, their hidden states overflow in their type (use bfloat16 or float32), or the temperature "
                "is so near to 0 that dividing by it overflows (use 0)."
            )
        return torch.multinomial(flat, 1, generator=self.generator)[:, 0].view(weights.shape[:-1])


__all__ = ["Greedy", "Sampling"]
