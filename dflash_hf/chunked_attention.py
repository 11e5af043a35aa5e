# SPDX-License-Identifier: Apache-2.0
"""Attention of many blocks on a CPU, in chunks of sorted anchors.

A dense mask over all blocks hides nearly all keys: each block sees its own slots and the context before its anchor.
Here a few neighbouring blocks share one call, whose context ends at the largest of their anchors.
Shapes: B rows, T context tokens, N anchors, b block size, H heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .block_masks import document_starts


# Queries of one call: enough to keep the call's own cost small, few enough to cut the context closely.
CHUNK_QUERIES = 256


@dataclass(frozen=True)
class ChunkedMask:
    """The mask of all blocks, cut into chunks of whole blocks.

    Args:
        num_context: Context tokens, T.
        chunk_queries: Queries per chunk; the last may have fewer.
        contexts: First and last (exclusive) context token of each chunk.
        masks: Boolean mask of each chunk over its context and its own slots, `[B, 1, q, context + q]`.
    """

    num_context: int
    chunk_queries: int
    contexts: list[tuple[int, int]]
    masks: list[torch.Tensor]

    def dense(self) -> torch.Tensor:
        """The same mask over all queries and keys, boolean `[B, 1, N * b, T + N * b]`."""
        queries = sum(mask.shape[2] for mask in self.masks)
        dense = self.masks[0].new_zeros(self.masks[0].shape[0], 1, queries, self.num_context + queries)
        first = 0
        for (begin, stop), mask in zip(self.contexts, self.masks, strict=True):
            own, after = slice(self.num_context + first, self.num_context + first + mask.shape[2]), stop - begin
            dense[:, :, first : first + mask.shape[2], begin:stop] = mask[..., :after]
            dense[:, :, first : first + mask.shape[2], own] = mask[..., after:]
            first += mask.shape[2]
        return dense


def chunked_mask(
    mask_mod: Any, anchor_positions: torch.Tensor, document_ids: torch.Tensor, block_size: int, window: int | None
) -> ChunkedMask:
    """Evaluate a predicate only where a block of the chunk can see a key.

    Args:
        mask_mod: The predicate over (batch, head, query, key) indices.
        anchor_positions (`torch.Tensor` of shape `[B, N]`): Row indices of the anchors, -1 for unused slots; sorted
            anchors make it fast. On a CPU, since the bounds are read.
        document_ids (`torch.Tensor` of shape `[B, T]`): Document of each token, -1 for padding.
        block_size: Slots per block.
        window: Sliding window in tokens, or None.
    """
    rows, num_context = document_ids.shape
    queries = anchor_positions.shape[1] * block_size
    chunk = max(1, CHUNK_QUERIES // block_size) * block_size
    start = document_starts(document_ids).gather(1, anchor_positions.clamp(min=0))
    if window is not None:
        start = torch.maximum(start, anchor_positions - window + 1)
    start = start.masked_fill(anchor_positions < 0, num_context)
    row_index = torch.arange(rows)[:, None, None, None]
    contexts, masks = [], []
    for first in range(0, queries, chunk):
        blocks = slice(first // block_size, (first + chunk) // block_size)
        stop = max(int(anchor_positions[:, blocks].max()), 0)
        begin = min(int(start[:, blocks].min()), stop)
        query = torch.arange(first, min(first + chunk, queries))
        key = torch.cat([torch.arange(begin, stop), num_context + query])
        contexts.append((begin, stop))
        masks.append(mask_mod(row_index, torch.zeros(()), query[:, None], key))
    return ChunkedMask(num_context, chunk, contexts, masks)


def chunked_attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: ChunkedMask, **kwargs
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, once per chunk.

    Args:
        module: The attention layer.
        query (`torch.Tensor` of shape `[B, H, N * b, head_dim]`): Slots of all blocks.
        key, value (`torch.Tensor` of shape `[B, H_kv, T + N * b, head_dim]`): Context, then the same slots.
        mask: From [`chunked_mask`].

    Returns:
        `torch.Tensor` of shape `[B, N * b, H, head_dim]`, and None for the weights.
    """
    sizes = [mask.num_context, key.shape[2] - mask.num_context]
    (context_key, own_key), (context_value, own_value) = key.split(sizes, dim=2), value.split(sizes, dim=2)
    # split, unlike slices, gives one gradient of the whole instead of one per chunk.
    parts = zip(
        query.split(mask.chunk_queries, dim=2),
        own_key.split(mask.chunk_queries, dim=2),
        own_value.split(mask.chunk_queries, dim=2),
        mask.contexts,
        mask.masks,
        strict=True,
    )
    outputs = [
        sdpa_attention_forward(
            module,
            chunk_query,
            torch.cat([context_key[:, :, begin:stop], chunk_key], dim=2),
            torch.cat([context_value[:, :, begin:stop], chunk_value], dim=2),
            chunk_mask,
            **kwargs,
        )[0]
        for chunk_query, chunk_key, chunk_value, (begin, stop), chunk_mask in parts
    ]
    return torch.cat(outputs, dim=1), None
