# SPDX-License-Identifier: Apache-2.0
"""The tiles of flex attention's mask, written down from anchors and document bounds.

Evaluating the predicate over all queries and keys costs time and memory that grow with their product; here the cost
grows with the number of tiles. Shapes: B rows, T context tokens, N anchors, b block size, Q = N * b queries.
"""

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask


TILE = 128


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """Index at which the document of each token starts.

    Args:
        document_ids (`torch.Tensor` of shape `[B, T]`): Document of each token; a document's tokens are neighbours.

    Returns:
        `torch.Tensor` of shape `[B, T]`.
    """
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(is_first, index, 0).cummax(dim=1).values


def block_tiles(
    anchor_positions: torch.Tensor, document_ids: torch.Tensor, block_size: int, window: int | None, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles of queries and keys hold a visible pair, and which hold nothing else.

    Args:
        anchor_positions (`torch.Tensor` of shape `[B, N]`): Row indices of the anchors, -1 for unused slots. Any
            order is right; sorted anchors leave the fewest tiles.
        document_ids (`torch.Tensor` of shape `[B, T]`): Document of each token, -1 for padding.
        block_size: Slots per block.
        window: Sliding window in tokens, or None.
        tile: Queries and keys per tile.

    Returns:
        (partial, full), boolean `[B, ceil(Q / tile), ceil((T + Q) / tile)]`, disjoint: in partial tiles the predicate
        decides, in full ones every query sees every key.
    """
    num_context, queries = document_ids.shape[1], anchor_positions.shape[1] * block_size
    device = anchor_positions.device
    # A block sees the context in [earliest, anchor), where a window moves the bound by one token for each slot.
    used = anchor_positions >= 0
    start = document_starts(document_ids).gather(1, anchor_positions.clamp(min=0))
    earliest_of_first = start if window is None else torch.maximum(start, anchor_positions - window + 1)
    earliest_of_last = start if window is None else torch.maximum(start, anchor_positions + block_size - window)
    anchor = torch.where(used, anchor_positions, 0)

    first_query = torch.arange(0, queries, tile, device=device)
    first_block = first_query // block_size
    last_block = (first_query + tile - 1).clamp(max=queries - 1) // block_size
    # A tile that starts inside a block touches one more.
    offsets = torch.arange(tile // block_size + 2, device=device)
    blocks = torch.minimum(first_block[:, None] + offsets, last_block[:, None])

    key_start = torch.arange(0, num_context + queries, tile, device=device)
    key_stop = key_start + tile
    lower, upper = earliest_of_first[:, blocks, None], anchor[:, blocks, None]
    touched = (lower < upper) & (lower < key_stop) & (upper > key_start)
    own_start, own_stop = num_context + first_block * block_size, num_context + (last_block + 1) * block_size
    own = (own_start[:, None] < key_stop) & (own_stop[:, None] > key_start)
    full = (earliest_of_last[:, blocks].amax(-1)[..., None] <= key_start) & (
        anchor[:, blocks].amin(-1)[..., None] >= key_stop
    )
    return (touched.any(dim=2) | own) & ~full, full


def written_block_mask(
    mask_mod: Callable,
    anchor_positions: torch.Tensor,
    document_ids: torch.Tensor,
    block_size: int,
    window: int | None,
    tile: int = TILE,
) -> BlockMask:
    """The `BlockMask` of [`block_tiles`]; nothing waits for the device.

    Args:
        mask_mod: The predicate, which decides inside partial tiles.
        anchor_positions, document_ids, block_size, window, tile: As for [`block_tiles`].
    """
    partial, full = block_tiles(anchor_positions, document_ids, block_size, window, tile)
    queries = anchor_positions.shape[1] * block_size
    return BlockMask.from_kv_blocks(
        *ordered_tiles(partial[:, None]),
        *ordered_tiles(full[:, None]),
        BLOCK_SIZE=tile,
        mask_mod=mask_mod,
        seq_lengths=(queries, document_ids.shape[1] + queries),
    )


def ordered_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of marked tiles `[B, 1, rows]` and the key tiles, marked ones first, `[B, 1, rows, columns]`."""
    order = tiles.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
