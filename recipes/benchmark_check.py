# SPDX-License-Identifier: Apache-2.0
"""The drafter's loss and gradients, computed naively, to hold the fast step against before it is timed."""

import copy
import math
from typing import Any

import torch

from dflash_hf import DFlashDraftModel
from dflash_hf.data_collator import IGNORE_INDEX
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import DecayedCrossEntropy, DPace, Objective


def checked_parameters(drafter: DFlashDraftModel) -> list[str]:
    """Parameters whose gradients are compared: the first and the last that a gradient reaches, and some between."""
    last = len(drafter.layers) - 1
    return [
        "fc.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_norm.weight",
        f"layers.{last}.self_attn.v_proj.weight",
        f"layers.{last}.mlp.down_proj.weight",
        "norm.weight",
    ]


def spread(num_anchors: int, count: int) -> list[int]:
    """Indices of `count` blocks from the first to the last."""
    count = min(count, num_anchors)
    return sorted({round(i * (num_anchors - 1) / max(1, count - 1)) for i in range(count)})


def only_blocks(batch: dict[str, Any], blocks: list[int]) -> dict[str, Any]:
    """The same batch, in the same shapes, of which only some blocks count."""
    labels = torch.full_like(batch["labels"], IGNORE_INDEX)
    labels[:, blocks] = batch["labels"][:, blocks]
    counted = batch["counted_slots"] * 0
    counted[:, blocks] = batch["counted_slots"][:, blocks]
    return {**batch, "labels": labels, "counted_slots": counted}


def _visible(batch: dict[str, Any], blocks: list[int], block_size: int, causal: bool, window: int | None):
    """Dense mask [n * b, T + n * b], written down block by block."""
    anchors, documents = batch["anchor_positions"][0].tolist(), batch["document_ids"][0]
    tokens = torch.arange(len(documents), device=documents.device)
    mask = torch.zeros(len(blocks) * block_size, len(tokens) + len(blocks) * block_size, dtype=torch.bool)
    mask = mask.to(documents.device)
    for i, block in enumerate(blocks):
        anchor = anchors[block]
        for slot in range(block_size):
            seen = (documents == documents[anchor]) & (tokens < anchor)
            own = torch.ones(block_size, dtype=torch.bool, device=documents.device)
            if window is not None:
                seen &= tokens > anchor + slot - window
                own &= torch.arange(block_size, device=documents.device) > slot - window
            if causal:
                own &= torch.arange(block_size, device=documents.device) <= slot
            query, first = i * block_size + slot, len(tokens) + i * block_size
            mask[query, : len(tokens)] = seen
            mask[query, first : first + block_size] = own
    return mask


def _twin(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """The drafter's weights in a module of their own, with eager attention and nothing compiled."""
    config = copy.deepcopy(drafter.config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        twin = DFlashDraftModel(config).eval()
    twin.load_state_dict({n: p.detach() for n, p in drafter.named_parameters()}, assign=True)
    twin.rotary_emb = drafter.rotary_emb
    return twin.requires_grad_(False)


def _weights(objective: Objective, losses: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Weights [n, b-1] of the slots and what their weighted losses are divided by, slot by slot."""
    weights = [[0.0] * losses.shape[1] for _ in losses]
    for row, seen, values in zip(weights, counted.tolist(), losses.tolist(), strict=True):
        slots = [k for k, counts in enumerate(seen) if counts]
        if isinstance(objective, DecayedCrossEntropy):
            for k in slots:
                row[k] = math.exp(-k / objective.gamma)
        elif isinstance(objective, DPace):
            reached = 1.0
            for k in slots:
                reached *= (1 - objective.alpha) * math.exp(-values[k]) + objective.alpha
                for earlier in slots[: slots.index(k) + 1]:
                    row[earlier] += reached
        else:
            raise ValueError(f"The naive loss knows no {type(objective).__name__}; add its formula here.")
    total = sum(map(sum, weights)) if isinstance(objective, DecayedCrossEntropy) else counted.sum().item()
    return torch.tensor(weights, device=losses.device), total


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropies [n, b-1] in fp32, 0 where nothing counts."""
    counted = labels != IGNORE_INDEX
    return -logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * counted


def naive_head_loss(
    hidden: torch.Tensor, head: FrozenHead, labels: torch.Tensor, objective: Objective, blocks: list[int]
) -> tuple[float, torch.Tensor]:
    """Loss of all blocks of one row from the drafter's output `[N, b, D]`, and the gradient of some blocks of it.

    Returns:
        The normalised loss, and its gradient `[blocks, b, D]`.
    """
    hidden = hidden.detach()
    with torch.no_grad():
        parts = zip(hidden[:, 1:].split(32), labels[:, 1:].split(32), strict=True)
        losses = torch.cat([_losses(head.logits(h), part) for h, part in parts])
    weights, normalizer = _weights(objective, losses, labels[:, 1:] != IGNORE_INDEX)
    some = hidden[blocks].requires_grad_(True)
    loss = (weights[blocks] * _losses(head.logits(some[:, 1:]), labels[blocks, 1:])).sum() / normalizer
    (gradient,) = torch.autograd.grad(loss, some)
    return (weights * losses).sum().item() / normalizer, gradient


def naive_loss(
    drafter: DFlashDraftModel,
    head: FrozenHead,
    batch: dict[str, Any],
    context: torch.Tensor,
    objective: Objective,
    blocks: list[int],
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of some blocks of one row and its gradients, in fp32 with dense masks and whole logits.

    Returns:
        The normalised loss, and the gradients of [`checked_parameters`].
    """
    twin, config, device = _twin(drafter), drafter.config, context.device
    parameters = dict(twin.named_parameters())
    names = checked_parameters(drafter)
    for name in names:
        parameters[name].requires_grad_(True)
    block_size: Any = config.block_size
    anchors = batch["anchor_positions"][:, blocks]
    ids = torch.full((1, len(blocks), block_size), config.mask_token_id, device=device)
    ids[..., 0] = batch["input_ids"][0, anchors[0]]
    first = batch["position_ids"][0, anchors[0]]
    positions = (first[:, None] + torch.arange(block_size, device=device)).flatten()[None]
    masks = {}
    for index, layer_type in enumerate(config.layer_types or []):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        visible = _visible(batch, blocks, block_size, config.layer_is_causal(index), window)
        masks[layer_type] = torch.zeros(visible.shape, device=device).masked_fill(~visible, -torch.inf)[None, None]
    hidden = twin(
        noise_embeds=head.embedding_weight[ids.flatten(1)].float(),
        context_hidden_states=context.float(),
        attention_mask=masks,
        position_ids=torch.cat([batch["position_ids"], positions], dim=1),
    ).last_hidden_state
    labels = batch["labels"][0, blocks, 1:]
    losses = _losses(head.logits(hidden.view(len(blocks), block_size, -1)[:, 1:]), labels)
    weights, normalizer = _weights(objective, losses.detach(), labels != IGNORE_INDEX)
    loss = (weights * losses).sum() / normalizer
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names])
    return loss.item(), dict(zip(names, gradients, strict=True))


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()
