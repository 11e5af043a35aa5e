# SPDX-License-Identifier: Apache-2.0
"""Which key a drafted slot sees: one predicate, from which the mask of every attention backend is made.

Shapes: B rows, T context tokens, N anchors, b block size. Queries are the N*b slots of all blocks; keys are the T
context tokens followed by the same slots.
"""

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DFlashCache

from .block_masks import written_block_mask
from .chunked_attention import ChunkedMask, chunked_mask


MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Mask = torch.Tensor | BlockMask | ChunkedMask | None


def _mask_mod(
    anchor_positions: torch.Tensor,
    anchor_documents: torch.Tensor,
    context_documents: torch.Tensor,
    block_size: int,
    causal: bool,
    window: int | None,
) -> MaskMod:
    """The predicate itself, on index tensors of any broadcastable shape.

    Args:
        anchor_positions (`[B, N]`): Context index at which each block starts.
        anchor_documents (`[B, N]`): Document of each anchor; a value no context token has where the slot is unused.
        context_documents (`[B, T]`): Document of each context token, -1 for padding.
        block_size: Slots per block.
        causal: Whether slot j sees only slots up to j of its block.
        window: Keys at this distance or further are hidden; None for no window.
    """
    num_context = context_documents.shape[1]
    # One more column that belongs to no document lets block keys be looked up without leaving the tensor.
    documents = torch.nn.functional.pad(context_documents, (0, 1), value=-1)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        block, slot = q_idx // block_size, q_idx % block_size
        anchor = anchor_positions[b, block]
        position = kv_idx.clamp(max=num_context)
        # Strictly before the anchor: its own hidden state is not known when drafting.
        context = (documents[b, position] == anchor_documents[b, block]) & (position < anchor)
        key_block, key_slot = (kv_idx - num_context) // block_size, (kv_idx - num_context) % block_size
        own_block = (kv_idx >= num_context) & (key_block == block)
        if window is not None:
            context = context & (anchor + slot - position < window)
            own_block = own_block & (slot - key_slot < window)
        if causal:
            own_block = own_block & (key_slot <= slot)
        return context | own_block

    return mask_mod


def make_mask_mod(
    anchor_positions: torch.Tensor,
    document_ids: torch.Tensor,
    block_size: int,
    causal: bool,
    window: int | None,
) -> MaskMod:
    """The predicate for rows of packed documents with many anchors each.

    Args:
        anchor_positions (`torch.Tensor` of shape `[B, N]`): Row indices of the anchors, -1 for unused slots. Unused
            blocks see only themselves, so that no query is without a key.
        document_ids (`torch.Tensor` of shape `[B, T]`): Document of each token, -1 for padding.
        block_size: Slots per block.
        causal: Whether the layer is causal within a block.
        window: Sliding window in tokens, or None.

    Returns:
        A function of (batch, head, query, key) indices that says whether the query sees the key.
    """
    anchor_documents = document_ids.gather(1, anchor_positions.clamp(min=0))
    anchor_documents = anchor_documents.masked_fill(anchor_positions < 0, -2)
    return _mask_mod(anchor_positions, anchor_documents, document_ids, block_size, causal, window)


def materialize(
    mask_mod: MaskMod,
    implementation: str,
    shape: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor | BlockMask:
    """Evaluate a predicate for one attention backend.

    Args:
        mask_mod: Predicate over (batch, head, query, key) indices.
        implementation: "sdpa" (boolean mask), "eager" (additive mask) or "flex_attention" (`BlockMask`).
        shape: (rows, queries, keys).
        device: Device of the mask.
        dtype: Type of an additive mask.

    Raises:
        ValueError: For a backend that cannot express the mask.
    """
    rows, queries, keys = shape
    if implementation == "flex_attention":
        return create_block_mask(mask_mod, B=rows, H=None, Q_LEN=queries, KV_LEN=keys, device=device)
    if implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={implementation!r} cannot express the drafter's mask; use 'flex_attention' (CUDA), "
            "'sdpa' or 'eager'."
        )
    visible = mask_mod(
        torch.arange(rows, device=device)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device),
        torch.arange(queries, device=device)[None, None, :, None],
        torch.arange(keys, device=device)[None, None, None, :],
    )
    if implementation == "sdpa":
        return visible
    return torch.zeros(visible.shape, device=device, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def training_masks(
    config: PreTrainedConfig,
    anchor_positions: torch.Tensor,
    document_ids: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Mask]:
    """Masks for all blocks of packed rows, one per layer type of the drafter.

    Sorted anchors make them cheap: flex attention then skips most tiles, and sdpa on a CPU works through chunks of
    neighbouring blocks.

    Args:
        config: The drafter's [`DFlashDraftConfig`].
        anchor_positions (`torch.Tensor` of shape `[B, N]`): Row indices of the anchors, -1 for unused slots.
        document_ids (`torch.Tensor` of shape `[B, T]`): Document of each token, -1 for padding.
        dtype: Type of the additive mask that eager attention wants.

    Returns:
        `{"full_attention": mask, "sliding_attention": mask}`, for the types that the drafter has.
    """
    rows, num_anchors = anchor_positions.shape
    queries = num_anchors * config.block_size
    shape = (rows, queries, document_ids.shape[1] + queries)
    masks: dict[str, Mask] = {}
    for layer_type, _, causal, window in _layer_kinds(config):
        mask_mod = make_mask_mod(anchor_positions, document_ids, config.block_size, causal, window)
        layout = (anchor_positions, document_ids, config.block_size, window)
        if config._attn_implementation == "flex_attention":
            masks[layer_type] = written_block_mask(mask_mod, *layout)
        elif config._attn_implementation == "sdpa" and document_ids.device.type == "cpu":
            masks[layer_type] = chunked_mask(mask_mod, *layout)
        else:
            masks[layer_type] = materialize(mask_mod, config._attn_implementation, shape, document_ids.device, dtype)
    return masks


def _layer_kinds(config: PreTrainedConfig) -> list[tuple[str, int, bool, int | None]]:
    """(layer type, its first layer, whether it is causal, its window) for each type that the drafter has."""
    return [
        (
            layer_type,
            config.layer_types.index(layer_type),
            config.layer_is_causal(config.layer_types.index(layer_type)),
            config.sliding_window if layer_type == "sliding_attention" else None,
        )
        for layer_type in dict.fromkeys(config.layer_types)
    ]


def decoding_masks(
    config: PreTrainedConfig,
    noise_embeds: torch.Tensor,
    num_context: int,
    padding_mask: torch.Tensor | None = None,
    cache: Cache | None = None,
) -> dict[str, Mask]:
    """Masks for one block right after its context, one per layer type of the drafter.

    Args:
        config: The drafter's [`DFlashDraftConfig`].
        noise_embeds (`torch.Tensor` of shape `[B, Q, D]`): The block's inputs; only its shape is read.
        num_context: New context rows of this forward, which come after those in the cache.
        padding_mask (`torch.Tensor` of shape `[B, cached + num_context + Q]`): 0 where a key is padding.
        cache: Keys and values of earlier context.

    Returns:
        `{"full_attention": mask, "sliding_attention": mask}`; None where everything is visible.
    """
    rows, block_size = noise_embeds.shape[:2]
    device = noise_embeds.device
    masks: dict[str, Mask] = {}
    for layer_type, layer_idx, causal, window in _layer_kinds(config):
        keys, first_key = num_context + block_size, 0
        if cache is not None:
            # DFlashCache adds the context rows itself, other caches count every new key as a query.
            new_keys = block_size if isinstance(cache, DFlashCache) else num_context + block_size
            keys, first_key = cache.get_mask_sizes(new_keys, layer_idx)
        if not causal and window is None and padding_mask is None:
            masks[layer_type] = None
            continue
        context = keys - block_size
        documents = torch.zeros(rows, context, dtype=torch.long, device=device)
        if padding_mask is not None:
            seen = padding_mask[:, first_key : first_key + context].to(device=device, dtype=torch.bool)
            documents = documents.masked_fill(~seen, -1)
        anchor = torch.full((rows, 1), context, dtype=torch.long, device=device)
        mask_mod = _mask_mod(anchor, torch.zeros_like(anchor), documents, block_size, causal, window)
        masks[layer_type] = materialize(
            mask_mod, config._attn_implementation, (rows, block_size, keys), device, noise_embeds.dtype
        )
    return masks


def block_position_ids(position_ids: torch.Tensor, anchor_positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Append the positions of all blocks to those of the context.

    Args:
        position_ids (`torch.Tensor` of shape `[B, T]`): Positions that restart in each document.
        anchor_positions (`torch.Tensor` of shape `[B, N]`): Row indices of the anchors, -1 for unused slots.
        block_size: Slots per block.

    Returns:
        `torch.Tensor` of shape `[B, T + N * block_size]`: slot j of a block is at its anchor's position + j.
    """
    first = position_ids.gather(1, anchor_positions.clamp(min=0))
    slots = torch.arange(block_size, device=position_ids.device)
    blocks = (first[:, :, None] + slots).flatten(1)
    return torch.cat([position_ids, blocks], dim=1)
