# SPDX-License-Identifier: Apache-2.0
"""The mask of flex attention for one packed row of documents, written down from where they start.

Shapes: N packed tokens.
"""

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..block_masks import TILE, ordered_tiles


def earliest_keys(position_ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """First key that each query of a packed row sees; it sees all from there up to itself.

    Args:
        position_ids (`torch.Tensor` of shape `[1, N]`): Positions, restarting with each document.
        window: Keys that a query sees, itself included; None for all of its document.

    Returns:
        `torch.Tensor` of shape `[N]`.
    """
    index = torch.arange(position_ids.shape[1], device=position_ids.device)
    start = index - position_ids[0]
    return start if window is None else torch.maximum(start, index - (window - 1))


def document_tiles(earliest: torch.Tensor, tile: int = TILE) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles of queries and keys hold a visible pair, and which hold nothing else.

    Args:
        earliest (`torch.Tensor` of shape `[N]`): As [`earliest_keys`] gives it, N a multiple of `tile`.
        tile: Queries and keys per tile.

    Returns:
        (partial, full), boolean `[N / tile, N / tile]`, disjoint.
    """
    # The first key never falls from one query to the next, so those of a tile see one stretch of keys together.
    lower, upper = earliest.view(-1, tile)[:, :1], earliest.view(-1, tile)[:, -1:]
    first = torch.arange(0, len(earliest), tile, device=earliest.device)
    touched = (first + tile > lower) & (first <= first[:, None])
    full = (first >= upper) & (first < first[:, None])
    return touched & ~full, full


def document_block_mask(position_ids: torch.Tensor, window: int | None = None, tile: int = TILE) -> BlockMask:
    """Causal attention within documents and, if any, a window; nothing waits for the device.

    Full and windowed layers differ in a tensor alone, so that one compiled kernel serves both.

    Args:
        position_ids, window: As for [`earliest_keys`].
        tile: As for [`document_tiles`].
    """
    earliest = earliest_keys(position_ids, window)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (kv_idx >= earliest[q_idx]) & (kv_idx <= q_idx)

    partial, full = document_tiles(earliest, tile)
    return BlockMask.from_kv_blocks(
        *ordered_tiles(partial[None, None]),
        *ordered_tiles(full[None, None]),
        BLOCK_SIZE=tile,
        mask_mod=mask_mod,
        seq_lengths=(len(earliest), len(earliest)),
    )
