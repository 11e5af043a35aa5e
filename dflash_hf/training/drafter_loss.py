# SPDX-License-Identifier: Apache-2.0
"""From a batch and the target's hidden states to the loss: what training, evaluation and the benchmark run.

Shapes: B rows, T tokens, N anchors, b block size, K taps, D hidden size.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..masking import block_position_ids, training_masks
from ..target.head import FrozenHead
from .losses import BlockSums, Objective, TargetStates, frozen_head_loss


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


__all__ = ["drafter_loss"]
