# SPDX-License-Identifier: Apache-2.0
"""From a batch and the target's hidden states to the loss: noise, drafted blocks, objectives, the frozen head.

A block of `b` slots stands at each anchor: slot 0 holds the anchor's own token, slots 1 to b-1 are drafted. A slot
counts where its label is a token of a supervised answer; elsewhere the label is -100.

Shapes: B rows, T tokens of a row, N anchors of a row, b slots of a block, M = B * N blocks, D width, K taps, V tokens
of the vocabulary, S slots that go through the head together, C terms of a slot (1, or 2 with a divergence).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .configuration_dflash2 import DFlash2DraftConfig
from .data_collator import IGNORE_INDEX
from .frozen_target import FrozenHead
from .masking import block_position_ids, training_masks


OBJECTIVES = ("cross_entropy", "dpace", "kl", "total_variation", "lk", "lk_hybrid", "expected_acceptance")
SLOT_WEIGHTS = ("decay", "dpace")
# How fast the hybrid of arXiv 2602.23881 turns from KL to total variation as the acceptance grows.
LK_DECAY = 3.0
# Logits of one chunk are kept only while the chunk is worked on: 2**27 of them in fp32 are half a gigabyte, 2**29 in
# bf16 one, and a GPU needs chunks of some thousand slots to be busy.
CHUNK_LOGITS = 2**27
DEVICE_CHUNK_LOGITS = 2**29


# --- Terms of single slots: the cross-entropy, and a divergence from the target's distribution.


@dataclass(frozen=True)
class SlotTerms:
    """What is read off the logits of single slots; objectives with equal terms share one compiled function.

    Beside the cross-entropy that may be a divergence from the target's distribution at some temperature.
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

        Takes the drafter's logits `[S, V]`, the given tokens `[S]` (-100 where nothing counts) and, for a divergence,
        the target's logits `[S, V]` for the same places.
        """
        right = logits.detach().argmax(-1) == labels
        logits = logits.to(_at_least_fp32(logits.dtype))
        if self.divergence is None:
            losses = nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
            return losses[:, None], right
        assert target_logits is not None  # `frozen_head_loss` refuses that
        log_q = logits.log_softmax(-1)
        losses = -log_q.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        log_p = (target_logits.to(_at_least_fp32(target_logits.dtype)) / self.temperature).log_softmax(-1)
        terms = torch.stack([losses, _divergence(self.divergence, log_p, log_q)], dim=-1)
        return torch.where((labels != IGNORE_INDEX)[:, None], terms, 0.0), right


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _divergence(name: str, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The divergence `[S]` of the drafter's log-probabilities `log_q` `[S, V]` from the target's `log_p`."""
    if name == "lk":
        # Negative logarithm of the acceptance, whose gradient does not vanish where nothing is accepted yet.
        return -torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)
    p = log_p.exp()
    # Tokens that a head rules out have logits of -inf on both sides, whose difference is NaN.
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    if name == "kl":
        return kl
    # The probability that speculative sampling accepts a draft.
    overlap = torch.minimum(log_p, log_q).exp().sum(-1)
    if name == "overlap":
        return overlap
    if name == "total_variation":
        return 1 - overlap
    # The hybrid: KL while little is accepted, total variation once much is.
    share = torch.exp(-LK_DECAY * overlap.detach())
    return share * kl + (1 - share) * (1 - overlap)


def slot_divergence(
    objective: "Distillation", target_logits: torch.Tensor, log_q: torch.Tensor, candidates: torch.Tensor
) -> torch.Tensor:
    """The divergence `[S]` of log-probabilities of candidates `[S, K]` from the target, of its logits `[S, V]`."""
    logits = target_logits.to(_at_least_fp32(target_logits.dtype)) / objective.temperature
    return _divergence(objective.divergence, logits.log_softmax(-1).gather(-1, candidates), log_q)


# --- Objectives. Training minimises the sum of `block_losses` over the sum of `normalizer`. Each objective takes
# --- terms [M, b-1, C] (0 where nothing counts) and what counts, [M, b-1].


class _WeightedCrossEntropy:
    """Its `weights` `[M, b-1]` follow from the detached cross-entropies `[M, b-1]` and from what counts."""

    slot_terms = SlotTerms()
    weights: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def block_losses(self, terms: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return self.weights(terms[..., 0].detach(), counted) * terms[..., 0]


@dataclass(frozen=True)
class DecayedCrossEntropy(_WeightedCrossEntropy):
    """Cross-entropy with weights `exp(-(k-1)/gamma)` for slot k, divided by their sum (arXiv 2602.06036)."""

    gamma: float

    def weights(self, losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(counted.shape[-1], device=counted.device, dtype=torch.float32)
        return torch.exp(-slots / self.gamma) * counted

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        # The losses decide over none of these weights.
        return self.weights(counted, counted).sum()


@dataclass(frozen=True)
class DPace(_WeightedCrossEntropy):
    """Weights that follow the drafter's own probability of reaching a slot, divided by the number of counted slots.

    With q the probability of the label, `s = (1 - alpha) q + alpha` and `w_k = sum over m >= k of s_1 ... s_m`. An
    `alpha` of 1 weights slots by their distance to the end of the chain alone, 0 gives the gradient of the expected
    number of accepted drafts.
    """

    alpha: float = 0.5

    def weights(self, losses: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        smoothed = (1 - self.alpha) * torch.exp(-losses) + self.alpha
        reached = torch.where(counted, smoothed, torch.ones_like(smoothed)).cumprod(dim=-1) * counted
        return reached.flip(-1).cumsum(dim=-1).flip(-1) * counted

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return counted.sum().float()


@dataclass(frozen=True)
class Distillation:
    """A comparison with the target's distribution at a temperature, mixed with a share of weighted cross-entropy.

    The divergence is "kl", "total_variation", "lk" or "lk_hybrid" (arXiv 2602.23881), whose slots are weighted, or
    "overlap", the expected acceptance: slot k is accepted with probability `a_1 ... a_k`, where a is the overlap of
    both distributions. Its loss is one less that product, so that the sum over a block is its length less its
    expected number of accepted drafts, and its normaliser is the number of counted slots.
    """

    divergence: str
    weighting: DecayedCrossEntropy | DPace
    temperature: float = 1.0
    cross_entropy_share: float = 0.0

    @property
    def slot_terms(self) -> SlotTerms:
        return SlotTerms(self.divergence, self.temperature)

    def block_losses(self, terms: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        cross_entropy, compared = terms.unbind(-1)
        weights = self.weighting.weights(cross_entropy.detach(), counted)
        if self.divergence == "overlap":
            losses = (1 - running_products(torch.where(counted, compared, 1.0))) * counted
        else:
            losses = weights * compared
        if self.cross_entropy_share == 0:
            # Leaves out even the infinite cross-entropy of a token that the head rules out.
            return losses
        return self.cross_entropy_share * weights * cross_entropy + (1 - self.cross_entropy_share) * losses

    def normalizer(self, counted: torch.Tensor) -> torch.Tensor:
        return counted.sum().float() if self.divergence == "overlap" else self.weighting.normalizer(counted)


Objective = DecayedCrossEntropy | DPace | Distillation


def slot_weighting(objective: Objective) -> DecayedCrossEntropy | DPace:
    """What weights the slots of an objective."""
    return objective.weighting if isinstance(objective, Distillation) else objective


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
    """An objective by its name in `OBJECTIVES`, of which all but the first two compare with the target's distribution.

    The other arguments are those of [`DFlashTrainingArguments`], which refuse values outside their ranges; the default
    `gamma` follows from the block size. An unknown name is a ValueError.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective={name!r} is unknown; choose one of {', '.join(OBJECTIVES)}.")
    decay, dpace = DecayedCrossEntropy(default_gamma(block_size) if gamma is None else gamma), DPace(alpha)
    if not compares_distributions(name):
        return decay if name == "cross_entropy" else dpace
    divergence = "overlap" if name == "expected_acceptance" else name
    return Distillation(divergence, decay if slot_weights == "decay" else dpace, temperature, cross_entropy_share)


# --- The loss through the target's frozen head: sums, never means.


@dataclass
class BlockSums:
    """Sums over blocks, on the device of the loss, added up over micro-batches and ranks and read once per log.

    `values` holds loss, normaliser, blocks, committed tokens, full blocks, tokens committed in full blocks, then for
    slots 1..b-1 the counted ones, then the right ones. Five more are not zero where a selector chooses: its loss, and
    for the largest logit and for the best candidate the tokens committed in full blocks, then the right slots.
    """

    values: torch.Tensor

    @staticmethod
    def zeros(block_size: int, device: torch.device | str = "cpu") -> "BlockSums":
        return BlockSums(torch.zeros(11 + 2 * (block_size - 1), device=device))

    @staticmethod
    def of(
        loss: torch.Tensor,
        normalizer: torch.Tensor,
        counted: torch.Tensor,
        right: torch.Tensor,
        selector_loss: torch.Tensor,
    ) -> "BlockSums":
        """The sums of some blocks; `counted` `[M, b-1]`, and `right` `[M, b-1, 1 or 3]` (only where counted).

        The three are what a selector chooses, the largest logit and the best candidate.
        """
        length = counted.sum(dim=1)
        accepted = right.long().cumprod(dim=1).sum(dim=1)
        full = length == counted.shape[1]
        # After the last token of an answer the target has no token of its own to commit.
        committed = torch.where(full[:, None], accepted + 1, torch.minimum(accepted + 1, length[:, None]))
        whole = (committed * full[:, None]).sum(0).float()
        scalars = [loss, normalizer, (length > 0).sum(), committed[:, 0].sum(), full.sum(), whole[0]]
        wide = torch.stack([scalar.float() for scalar in scalars])
        sums = torch.cat([wide, counted.sum(0).float(), right[..., 0].sum(0).float()])
        if right.shape[-1] == 1:
            return BlockSums(nn.functional.pad(sums, (0, 5)))
        return BlockSums(torch.cat([sums, selector_loss.float()[None], whole[1:], right[..., 1:].sum((0, 1)).float()]))

    def add(self, other: "BlockSums") -> None:
        self.values += other.values.to(self.values.device)

    def metrics(self) -> dict[str, float]:
        """Loss, acceptance length and accuracies of what was added up (reads the device).

        `acceptance_length` is the mean number of tokens that a verification would commit at a random anchor (right
        drafts up to the first wrong one, plus the target's own token), over blocks whose slots all count; over all
        blocks, cut at the end of the answer, where no block is full. A selector's come with those of the largest logit
        and of the best candidate: what it gains, and what it could.
        """
        *values, selector_loss, argmax_full, oracle_full, argmax_right, inside = self.values.tolist()
        loss, normalizer, blocks, committed, full, committed_full = values[:6]
        slots = (len(values) - 6) // 2
        counted, right = values[6 : 6 + slots], values[6 + slots :]
        metrics = {
            "loss": loss / max(normalizer, 1e-12),
            "acceptance_length": committed_full / full if full else committed / max(blocks, 1),
            "accuracy": sum(right) / max(sum(counted), 1),
            "full_blocks": full / max(blocks, 1),
        }
        if argmax_full or selector_loss:
            metrics |= {
                "selector_loss": selector_loss / max(normalizer, 1e-12),
                "acceptance_length_argmax": argmax_full / max(full, 1),
                "acceptance_length_oracle": oracle_full / max(full, 1),
                "accuracy_argmax": argmax_right / max(sum(counted), 1),
                "candidate_recall": inside / max(sum(counted), 1),
            }
        return metrics | {f"accuracy_slot_{k + 1}": right[k] / max(counted[k], 1) for k in range(slots)}


@dataclass(frozen=True)
class TargetStates:
    """The target's own hidden states `[B, T, D]` after its final norm, of which its distribution follows.

    `anchor_positions` `[B, N]` has the row index of each block's anchor, -1 where unused.
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


# First block, end block, first entry of the order, number of entries.
_Chunk = tuple[int, int, int, int]


def _chunks(
    labels: torch.Tensor, counted_slots: Sequence[int], chunk_blocks: int
) -> tuple[torch.Tensor, list[_Chunk]]:
    """The flat indices of the slots, counted ones first, and chunks of whole blocks of them.

    On a GPU all chunks are of one size, so that kernels are compiled once: entries beyond a chunk's own are of later
    chunks or count nothing, and get no weight.
    """
    rows = min(chunk_blocks, labels.shape[0]) * (labels.shape[1] - 1)
    chunks: list[_Chunk] = []
    first_block = first_slot = size = 0
    for block, count in enumerate(counted_slots):
        if size + count > rows:
            chunks.append((first_block, block, first_slot, size))
            first_block, first_slot, size = block, first_slot + size, 0
        size += count
    if size:
        chunks.append((first_block, len(counted_slots), first_slot, size))
    uncounted = labels == IGNORE_INDEX
    uncounted[:, 0] = True
    order = uncounted.flatten().to(torch.uint8).argsort(stable=True)
    if labels.device.type != "cpu":
        order = nn.functional.pad(order, (0, rows))
        chunks = [(*chunk[:3], rows) for chunk in chunks]
    return order, chunks


@functools.cache
def _compiled_slot_terms(terms: SlotTerms) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Fused into one reading of the logits for the values and one for the gradient."""
    return torch.compile(terms.__call__, dynamic=False)


@dataclass(frozen=True)
class _Learned:
    """The terms of an objective, and behind them those of a selector where there is one ([`SelectorTerms`])."""

    objective: Objective
    selection: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Terms of a slot, and what may be right in it: the choice, or the selector's, the largest logit's and any."""
        own = self.objective.slot_terms.count
        return (own, 1) if self.selection is None else (own + self.selection.count, 3)

    def slots(self, weights: list, states, labels, index, logits, target_logits) -> tuple[torch.Tensor, torch.Tensor]:
        """Terms and what is right `[S, C]` of the slots at some places, by the selector's weights."""
        kind = self.objective.slot_terms
        slot_terms = kind if labels.device.type == "cpu" else _compiled_slot_terms(kind)
        values, right = slot_terms(logits, labels, None if kind.divergence is None else target_logits)
        if self.selection is None:
            return values, right[:, None]
        own, (chosen, inside) = self.selection(weights, states, logits, labels, index, target_logits)
        return torch.cat([values, own.to(values.dtype)], dim=-1), torch.stack([chosen, right, inside], dim=-1)

    def loss(self, terms, counted, right) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum over some blocks, and that of the selector's part."""
        loss = self.objective.block_losses(terms[..., : self.objective.slot_terms.count], counted).sum()
        if self.selection is None:
            return loss, torch.zeros_like(loss)
        own = self.selection.block_losses(self.objective, terms, counted, right[..., 2]).sum()
        return loss + self.selection.alpha * own, own


class _FrozenHeadLoss(torch.autograd.Function):
    """Gradients, of a selector's weights too, are taken chunk by chunk in the forward, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden, labels, head, learned: _Learned, order, chunks, target, *weights):
        needs_grad, (count, kinds) = ctx.needs_input_grad[0], learned.shape
        leaves = [w.detach().requires_grad_(n) for w, n in zip(weights, ctx.needs_input_grad[7:], strict=True)]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        learns = needs_grad or bool(trained)
        num_blocks, block_size, width = hidden.shape
        flat, flat_labels = hidden.detach().reshape(-1, width), labels.flatten()
        gradients = [torch.zeros_like(flat if needs_grad else flat[:0]), *map(torch.zeros_like, trained)]
        counted = labels[:, 1:] != IGNORE_INDEX
        terms = torch.zeros(*labels.shape, count, device=hidden.device, dtype=_at_least_fp32(hidden.dtype))
        right = torch.zeros(*labels.shape, kinds, device=hidden.device, dtype=torch.bool)
        losses = terms.new_zeros(2)
        for first_block, end_block, first_slot, size in chunks:
            index = order[first_slot : first_slot + size]
            # Entries of other chunks, which only fill up this one, count nothing here.
            block = index // block_size
            own = (block >= first_block) & (block < end_block)
            chunk_labels = torch.where(own, flat_labels[index], IGNORE_INDEX)
            expected = None if target is None else head(target.at(index, block_size))
            slots = flat[index].requires_grad_(needs_grad)
            with torch.set_grad_enabled(learns):
                values, is_right = learned.slots(leaves, slots, chunk_labels, index, head(slots), expected)
            terms.view(-1, count)[index] = values.detach().to(terms.dtype)
            right.view(-1, kinds)[index] = is_right
            part = slice(first_block, end_block)
            part_terms = terms[part, 1:].detach().requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                part_loss, selector_loss = learned.loss(part_terms, counted[part], right[part, 1:])
            losses = losses + torch.stack([part_loss, selector_loss]).detach()
            if learns:
                spread = torch.zeros_like(terms)
                (spread[part, 1:],) = torch.autograd.grad(part_loss, part_terms)
                spread = spread.view(-1, count)[index].to(values.dtype)
                found = torch.autograd.grad(values, [*[slots] * needs_grad, *trained], spread)
                if needs_grad:
                    gradients[0][index] = found[0]
                for total, added in zip(gradients[1:], found[needs_grad:], strict=True):
                    total += added
            del values, slots, expected
        right, (loss, selector_loss) = right[:, 1:] & counted[..., None], losses
        sums = BlockSums.of(loss, learned.objective.normalizer(counted), counted, right, selector_loss).values
        gradients[0] = gradients[0].view(num_blocks if needs_grad else 0, block_size, width)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss, grad_sums):
        gradient, *others = (saved * grad_loss.to(saved.dtype) for saved in ctx.saved_tensors)
        of_weights = [others.pop(0) if needed else None for needed in ctx.needs_input_grad[7:]]
        return gradient if ctx.needs_input_grad[0] else None, *[None] * 6, *of_weights


def frozen_head_loss(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    objective: Objective,
    vocab_size: int,
    chunk_blocks: int | None = None,
    counted_slots: Sequence[int] | np.ndarray | None = None,
    target: TargetStates | None = None,
    selection: Any = None,
) -> tuple[torch.Tensor, BlockSums]:
    """Sum of an objective's losses through the target's frozen head, in one pass over chunks of whole blocks.

    Only slots that count are multiplied with the head. Returns the sum (not yet normalised; zero with zero gradients
    where nothing counts) and the sums for metrics.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, N * b, D]`): The drafter's output.
        labels (`torch.Tensor` of shape `[B, N, b]`): Token of each slot, -100 where it does not count.
        head: The target's frozen head, from `[..., D]` to `[..., V]`; it gets no gradient.
        objective: What is summed.
        vocab_size: `V`, from which the default of `chunk_blocks`, the full blocks per chunk, follows.
        counted_slots (`[B * N]`, *optional*): Counted slots of each block; without it the labels are asked, which
            waits for the device.
        target: The target's own states, for an objective that compares distributions.
        selection: A [`selector_losses.SelectorTerms`], whose loss is added.
    """
    compares = objective.slot_terms.divergence is not None or (selection is not None and selection.compares)
    if compares and target is None:
        raise ValueError(f"{objective} needs the target's states: pass `target`, of FrozenTarget(final_states=True).")
    block_size = labels.shape[-1]
    labels = labels.flatten(0, -2)
    if chunk_blocks is None:
        limit = CHUNK_LOGITS if labels.device.type == "cpu" else DEVICE_CHUNK_LOGITS
        chunk_blocks = max(1, limit // (vocab_size * (block_size - 1)))
    if counted_slots is None:
        counted_slots = (labels[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
    order, chunks = _chunks(labels, [int(count) for count in counted_slots], chunk_blocks)
    hidden_states = hidden_states.reshape(labels.shape[0], block_size, -1)
    target = target if compares else None
    weights = () if selection is None else selection.selector.parameters()
    learned = _Learned(objective, selection)
    loss, sums = _FrozenHeadLoss.apply(hidden_states, labels, head, learned, order, chunks, target, *weights)
    return loss, BlockSums(sums)


# --- What training, evaluation, the walk and the benchmark run on a batch.


def draft_blocks(
    drafter: nn.Module,
    config: Any,
    head: FrozenHead,
    inputs: Mapping[str, Any],
    context_hidden_states: torch.Tensor,
    anchor_positions: torch.Tensor,
) -> Any:
    """Run the drafter on the blocks at some anchors of a batch, as training, evaluation and the walk do.

    `inputs` is a batch of [`DataCollatorForDFlash`] on the drafter's device, `context_hidden_states` `[B, T, K * D]`
    are in the type that the drafter computes in, and `anchor_positions` `[B, N]` are indices into rows, -1 where
    unused. The `last_hidden_state` of what it returns has the shape `[B, N * b, D]`.
    """
    anchor_ids = inputs["input_ids"].gather(1, anchor_positions.clamp(min=0))
    noise_embeds = head.noise_embeds(anchor_ids, config.mask_token_id, config.block_size)
    noise_embeds = noise_embeds.to(context_hidden_states.dtype)
    # Convolutions end with each block.
    own = {"block_size": config.block_size} if isinstance(config, DFlash2DraftConfig) else {}
    return drafter(
        noise_embeds=noise_embeds,
        context_hidden_states=context_hidden_states,
        attention_mask=training_masks(config, anchor_positions, inputs["document_ids"], noise_embeds.dtype),
        position_ids=block_position_ids(inputs["position_ids"], anchor_positions, config.block_size),
        **own,
    )


def drafter_loss(
    model: nn.Module,
    config: Any,
    inputs: dict[str, Any],
    context_hidden_states: torch.Tensor,
    head: FrozenHead,
    objective: Objective,
    chunk_blocks: int | None = None,
    final_hidden_states: torch.Tensor | None = None,
    selection: Any = None,
) -> tuple[torch.Tensor, BlockSums, Any]:
    """Draft all blocks of a batch: the sum of losses (not yet normalised), the metrics' sums, the drafter's output.

    `final_hidden_states` `[B, T, D]` are the target's after its final norm, for an objective that compares with its
    distribution; the context comes with its noise. `selection` is the [`selector_losses.SelectorTerms`] of a
    DFlash 2 drafter.
    """
    anchors = inputs["anchor_positions"]
    outputs = draft_blocks(model, config, head, inputs, context_hidden_states, anchors)
    loss, sums = frozen_head_loss(
        outputs.last_hidden_state,
        inputs["labels"],
        head.logits,
        objective,
        head.vocab_size,
        chunk_blocks,
        # Batches of other collators have no counts on the host.
        inputs["counted_slots"].ravel() if "counted_slots" in inputs else None,
        None if final_hidden_states is None else TargetStates(final_hidden_states, anchors),
        selection,
    )
    return loss, sums, outputs


def add_context_noise(
    context_hidden_states: torch.Tensor,
    document_lengths: list[list[int]],
    noise_seeds: list[list[int]],
    half_width: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A copy `[B, T, K * D]` with uniform noise in `(-half_width, half_width)`, drawn from each document's own seed.

    However documents are spread over rows, batches and ranks, each sees the same noise: lengths and seeds are those
    of the documents of each row. A `half_width` of 0 returns the input itself. `dtype` is the result's.
    """
    if half_width == 0:
        return context_hidden_states
    # Document by document, so that no more than one of them is held in fp32.
    noisy = context_hidden_states.to(dtype or context_hidden_states.dtype, copy=True)
    generator = torch.Generator(device=noisy.device)
    wide = _at_least_fp32(context_hidden_states.dtype)
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
