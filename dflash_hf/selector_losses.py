# SPDX-License-Identifier: Apache-2.0
"""The loss of a DFlash 2 drafter's selector, on the true predecessor of each slot, and what the selector would choose.

Up to the first wrong slot of a walk the predecessor is the true token, so what is right here is what a walk accepts.

Shapes: M blocks, b slots of a block, S slots that go through the head together, D width, V vocabulary, K candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from .data_collator import IGNORE_INDEX
from .losses import Objective, slot_divergence, slot_weighting
from .modeling_dflash2 import selector_of


# Cross-entropy of a token that is no candidate, for weights that follow from it: it is never chosen.
OUTSIDE = 50.0


@dataclass(frozen=True)
class SelectorTerms:
    """What a selector adds to the loss of a batch: its terms of single slots, and their sum over blocks.

    Args:
        selector: The drafter's `candidate_selector`.
        predecessors (`torch.Tensor` of shape `[M, b]`): True token before each slot, as [`true_predecessors`] has it.
        alpha: What the selector's loss is multiplied by.
        inject: Put a true token that is no candidate in the place of the last one. Otherwise its slot is left out.
        cut_off: Keep the selector's gradients from the drafter's body.
        objective: Of the selector's own distribution over its candidates; by default cross-entropy with the weights
            of the drafter's objective.
    """

    selector: Any
    predecessors: torch.Tensor
    alpha: float = 1.0
    inject: bool = False
    cut_off: bool = False
    objective: Any = None

    @property
    def compares(self) -> bool:
        return self.objective is not None and self.objective.slot_terms.divergence is not None

    @property
    def count(self) -> int:
        return 2 if self.compares else 1

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        states: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        index: torch.Tensor,
        target_logits: Any,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Terms `[S, 1 or 2]` (0 where nothing counts); whether choice and candidates hold the label, `[S]` each.

        Args:
            weights: The selector's parameters in their order.
            states, logits: Of the slots, `[S, D]` and `[S, V]`.
            labels: True tokens `[S]`, -100 where nothing counts.
            index: Places of the slots in the flat `[M * b]`.
            target_logits: The target's at the same places, where they are compared.
        """
        if self.cut_off:
            states, logits = states.detach(), logits.detach()
        candidates = self.selector.candidates(logits)
        inside = (candidates == labels[:, None]).any(dim=-1)
        counts = labels != IGNORE_INDEX
        if self.inject:
            last = logits.detach().gather(-1, candidates).argmin(dim=-1, keepdim=True)
            kept = candidates.gather(-1, last)
            candidates = candidates.scatter(-1, last, torch.where((counts & ~inside)[:, None], labels[:, None], kept))
        named = dict(zip(dict(self.selector.named_parameters()), weights, strict=True))
        before = self.predecessors.flatten()[index][:, None]
        given = (states, logits.gather(-1, candidates), candidates, before)
        scores = functional_call(self.selector, named, given)[:, 0]
        log_q, is_label = scores.log_softmax(dim=-1), candidates == labels[:, None]
        losses = torch.where(is_label.any(dim=-1), -torch.where(is_label, log_q, 0.0).sum(dim=-1), OUTSIDE)
        terms = [losses]
        if self.compares:
            terms.append(slot_divergence(self.objective, target_logits, log_q, candidates))
        chosen = candidates.gather(-1, scores.detach().argmax(dim=-1, keepdim=True))[:, 0]
        values = torch.where(counts[:, None], torch.stack(terms, dim=-1), 0.0)
        return values, (inside & (chosen == labels), inside)

    def block_losses(
        self, base: Objective, terms: torch.Tensor, counted: torch.Tensor, inside: torch.Tensor
    ) -> torch.Tensor:
        """Losses `[M, b-1]`, by the terms `[M, b-1, C]` of both, what counts and which labels are candidates."""
        own = terms[..., base.slot_terms.count :]
        if self.compares:
            return self.objective.block_losses(own, counted)
        if self.objective is None:
            losses = slot_weighting(base).weights(terms[..., 0].detach(), counted) * own[..., 0]
        else:
            losses = self.objective.block_losses(own, counted)
        return losses if self.inject else losses * inside


def true_predecessors(anchor_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The true token before each slot, `[M, b]`, of anchors' tokens `[B, N]` and labels `[B, N, b]`.

    That of slot 0, which is not drafted, and those behind the end of a block's chain are 0.
    """
    shifted = labels.clamp(min=0).roll(1, dims=-1)
    shifted[..., 0], shifted[..., 1] = 0, anchor_ids
    return shifted.flatten(0, -2)


def selector_terms(drafter: Any, inputs: dict[str, Any], **settings: Any) -> SelectorTerms | None:
    """The terms of a batch of [`DataCollatorForDFlash`]; None for a drafter that has no selector."""
    selector = selector_of(drafter)
    if selector is None:
        return None
    anchor_ids = inputs["input_ids"].gather(1, inputs["anchor_positions"].clamp(min=0))
    return SelectorTerms(selector, true_predecessors(anchor_ids, inputs["labels"]), **settings)
