# SPDX-License-Identifier: Apache-2.0
"""The target's embedding and head beside the drafter: what its blocks are made of, and what its output goes through.

Shapes: B rows, N anchors, b block size, D hidden size, V vocabulary.
"""

import copy
import math
from collections.abc import Callable

import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


# Types that layers multiply in; others only store quantised weights.
COMPUTE_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class FrozenHead:
    """The target's embedding and head on the drafter's device; a tied weight is held once.

    Args:
        target: The target model.
        device: Device of the drafter. Nothing is copied where the target is there already.
    """

    def __init__(self, target: PreTrainedModel, device: torch.device | str):
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"{type(target).__name__} has no output head (get_output_embeddings() is None), but the drafter's "
                "logits go through the target's head. Load the target with AutoModelForCausalLM."
            )
        # One deepcopy of both keeps a tied weight tied.
        pair = nn.ModuleList([embedding, head])
        if not all(is_on(p, device) for p in pair.parameters()):
            # A target spread over devices moves its inputs by hooks, which the copy must not follow.
            pair = remove_hook_from_module(copy.deepcopy(pair), recurse=True).to(device)
        self.embedding, self.head = pair.requires_grad_(False)
        self.embedding_weight: torch.Tensor = self.embedding.get_parameter("weight")
        if self.embedding_weight.dtype not in COMPUTE_TYPES:
            raise ValueError(
                f"The target's embedding is stored as {self.embedding_weight.dtype}, but the drafter reads its rows "
                "as they are. Quantise the target without its embedding, as most methods do."
            )
        self.head_dtype: torch.dtype = head_place(self.embedding_weight, self.head)[1]
        self.vocab_size: int = self.embedding_weight.shape[0]
        self._transform = logit_transform(target.config.get_text_config(decoder=True))

    def noise_embeds(self, anchor_token_ids: torch.Tensor, mask_token_id: int, block_size: int) -> torch.Tensor:
        """[`block_inputs`] from the target's embedding."""
        return block_inputs(self.embedding_weight, anchor_token_ids, mask_token_id, block_size)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of the drafter's output `[..., D]`, multiplied in the type of the head.

        Where the target scales its logits or caps them softly, these are scaled and capped too.
        """
        return self._transform(self.head(hidden_states.to(self.head_dtype)))


def head_place(embedding_weight: torch.Tensor, head: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and type of a head's input."""
    # A quantised head may store integers, or no weight at all; it multiplies in the type of the embedding.
    weight = dict(head.named_parameters()).get("weight", embedding_weight)
    return weight.device, weight.dtype if weight.dtype in COMPUTE_TYPES else embedding_weight.dtype


def logit_transform(config: PreTrainedConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a target does with its logits after the head, by the fields of its configuration that say so."""
    fields = config.to_dict()
    factors = [fields.get(name) or 1.0 for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    # Two families give one field opposite meanings.
    scaling = fields.get("logits_scaling") or 1.0
    factors.append(scaling if config.model_type.startswith("hyperclovax") else 1 / scaling)
    scale, cap = math.prod(factors), fields.get("final_logit_softcapping")

    def transform(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if scale == 1.0 else logits * scale
        return logits if not cap else cap * torch.tanh(logits / cap)

    return transform


def block_inputs(
    embedding_weight: torch.Tensor, anchor_token_ids: torch.Tensor, mask_token_id: int, block_size: int
) -> torch.Tensor:
    """Raw embeddings of `[anchor, mask, ..., mask]` for every block.

    Args:
        embedding_weight (`torch.Tensor` of shape `[V, D]`): The target's embedding table.
        anchor_token_ids (`torch.Tensor` of shape `[B, N]`): Token at each anchor.
        mask_token_id: Token id of a slot to be drafted.
        block_size: Slots per block, `b`.

    Returns:
        `torch.Tensor` of shape `[B, N * b, D]`, without any norm or scale that the target puts on embeddings.
    """
    rows, num_anchors = anchor_token_ids.shape
    ids = anchor_token_ids.new_full((rows, num_anchors, block_size), mask_token_id)
    ids[..., 0] = anchor_token_ids
    return nn.functional.embedding(ids.flatten(1), embedding_weight)


def is_on(parameter: torch.Tensor, device: torch.device | str) -> bool:
    """Whether a parameter is on a device; a device without index means any of its kind that is in use."""
    device = torch.device(device)
    return parameter.device.type == device.type and device.index in (None, parameter.device.index)


__all__ = ["FrozenHead", "block_inputs", "head_place", "logit_transform"]
