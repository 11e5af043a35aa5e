# SPDX-License-Identifier: Apache-2.0
"""Who sees whom: one predicate, and the dense mask, block mask and chunked attention made from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DFlashCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# --- Tile sizes with which flex attention fits the shared memory of the GPU at hand.


# Below this, what flex attention chooses for data-centre GPUs may not fit. Workstation and consumer GPUs have 101,376.
ENOUGH_SHARED_MEMORY = 160_000


def flex_kernel_options(device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> dict[str, int] | None:
    """`kernel_options` of flex attention for a device, None where its own choice fits.

    Args:
        device: The device of the queries.
        dtype: Type of queries and keys.
        head_dim: Channels of a head.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # its type stub lacks the field
    memory = properties.shared_memory_per_block_optin
    return None if memory >= ENOUGH_SHARED_MEMORY else small_tiles(dtype, head_dim)


def small_tiles(dtype: torch.dtype, head_dim: int = 128) -> dict[str, int]:
    """Tiles that fit 100 KB of shared memory with heads of up to 256.

    Args:
        dtype: Type of queries and keys.
        head_dim: Channels of a head.

    Returns:
        Options whose names start with the pass they are for. The forward holds a tile of queries and, per stage, one
        of keys and one of values; the backward one each of keys, values, queries and output gradients.
    """
    rows = 64 if dtype.itemsize <= 2 else 32
    if head_dim > 128:
        rows //= 2
    forward = {"BLOCK_M": rows, "BLOCK_N": rows, "num_stages": 2, "num_warps": 4}
    backward = {
        "BLOCK_M1": rows,
        "BLOCK_N1": rows,
        "BLOCK_M2": rows,
        "BLOCK_N2": rows,
        "num_stages": 1,
        "num_warps": 4,
    }
    return {f"fwd_{name}": value for name, value in forward.items()} | {
        f"bwd_{name}": value for name, value in backward.items()
    }


# --- The tiles of flex attention's mask, written down from anchors and document bounds.


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


# --- Attention of many blocks on a CPU, in chunks of sorted anchors.


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


# --- Which key a drafted slot sees: one predicate, from which the mask of every attention backend is made.


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


# --- transformers' sdpa attention, kept from a kernel of torch that reads the wrong rows of a mask.


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


# --- The mask of flex attention for one packed row of documents, written down from where they start.


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
