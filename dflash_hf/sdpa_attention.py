# SPDX-License-Identifier: Apache-2.0
"""transformers' sdpa attention, kept from a kernel of torch that reads the wrong rows of a mask.

Shapes: B rows, H heads, Q queries, S keys, d head size.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# Stands for a layer whose keys and values have as many heads as its queries.
_ALL_HEADS = nn.Identity()


def whole_heads_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, whose one key head is copied for all query heads where a mask on CUDA needs it.

    Otherwise transformers expands that head without a copy. torch's memory-efficient kernel (2.11, and its main branch
    in 2026) knows such keys by their stride of 0: where a tile holds a single query, so that Q is 1 more than a
    multiple of 64 or, with large heads, 32, it goes through heads in place of queries, but on to the mask's next row
    for each, behind its end. The last query of all heads but the first is then wrong. Keys of several heads are copied
    by transformers itself, and single queries are not expanded.

    Args:
        module: The attention layer.
        query (`torch.Tensor` of shape `[B, H, Q, d]`): Queries.
        key, value (`torch.Tensor` of shape `[B, 1 or more, S, d]`): Keys and values.
        attention_mask (`torch.Tensor` of shape `[B, 1 or H, Q, S]`, *optional*): Boolean or additive mask.
        **options: As for transformers' function.

    Returns:
        `torch.Tensor` of shape `[B, Q, H, d]`, and None for the weights.
    """
    heads = query.shape[1]
    if attention_mask is not None and key.is_cuda and key.shape[1] == 1 < heads and query.shape[2] > 1:
        key, value = key.repeat(1, heads, 1, 1), value.repeat(1, heads, 1, 1)
        return sdpa_attention_forward(_ALL_HEADS, query, key, value, attention_mask, **options)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def register_sdpa_attention() -> None:
    """Make [`whole_heads_attention`] the sdpa of all models: targets call it by that name, in `generate` too."""
    # One that somebody else has registered stays.
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
        AttentionInterface.register("sdpa", whole_heads_attention)
