# SPDX-License-Identifier: Apache-2.0
"""Who sees whom: one predicate, and the dense mask, block mask and chunked attention made from it.

B rows of T context tokens and N blocks, each of b = `block_size` slots: Q = N * b queries. Keys are the context and
then the slots. `anchor_positions` `[B, N]` are row indices of the anchors, -1 for unused blocks; `document_ids`
`[B, T]` is the document of each token, whose tokens are neighbours, -1 for padding; `window` is a layer's sliding
window in tokens, or None. Any order of anchors is right, and sorted ones are the fastest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DFlashCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# --- Flex attention: tiles that fit the GPU at hand, and the block mask written down without evaluating the predicate.


# Below this, what flex attention chooses for data-centre GPUs may not fit. Workstation and consumer GPUs have 101,376.
ENOUGH_SHARED_MEMORY = 160_000

# Queries and keys of a tile of the block mask.
TILE = 128


def flex_kernel_options(device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> dict[str, int] | None:
    """`kernel_options` of flex attention for a device and its queries' type; None where its own choice fits."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # its type stub lacks the field
    memory = properties.shared_memory_per_block_optin
    return None if memory >= ENOUGH_SHARED_MEMORY else small_tiles(dtype, head_dim)


def small_tiles(dtype: torch.dtype, head_dim: int = 128) -> dict[str, int]:
    """Tiles that fit 100 KB of shared memory with heads of up to 256 channels, by options of both passes.

    The forward holds a tile of queries and, per stage, one of keys and one of values; the backward one each of keys,
    values, queries and output gradients.
    """
    rows = 64 if dtype.itemsize <= 2 else 32
    if head_dim > 128:
        rows //= 2
    forward = {f"fwd_{name}": rows for name in ("BLOCK_M", "BLOCK_N")}
    backward = {f"bwd_{name}": rows for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}
    stages = {"fwd_num_stages": 2, "fwd_num_warps": 4, "bwd_num_stages": 1, "bwd_num_warps": 4}
    return forward | backward | stages


def seen_tiles(
    first: torch.Tensor, stop: torch.Tensor, num_keys: int, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles hold a visible pair, and which hold nothing else: boolean `[B, ceil(Q / tile), ceil(keys / tile)]`.

    Each query sees one stretch of keys, from `first` to before `stop`, both `[B, Q]`.
    """
    missing = -first.shape[1] % tile
    # The last tile is filled up with its last query, which adds no pair that the tile does not hold.
    first, stop = (
        torch.cat([bound, bound[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, tile))[..., None]
        for bound in (first, stop)
    )
    key_start = torch.arange(0, num_keys, tile, device=first.device)
    touched = (first < stop) & (first < key_start + tile) & (stop > key_start)
    full = (first.amax(dim=2) <= key_start) & (stop.amin(dim=2) >= key_start + tile)
    return touched.any(dim=2), full


def seen_context(
    anchor_positions: torch.Tensor, document_ids: torch.Tensor, block_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last (exclusive) context token that each slot sees, both `[B, Q]`; T and 0 for unused blocks."""
    num_context = document_ids.shape[1]
    index = torch.arange(num_context, device=document_ids.device).expand_as(document_ids)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    document_starts = torch.where(is_first, index, 0).cummax(dim=1).values
    anchors = anchor_positions[..., None]
    first = document_starts.gather(1, anchor_positions.clamp(min=0))[..., None].expand(-1, -1, block_size)
    if window is not None:
        # It moves the bound by one token for each slot.
        slots = torch.arange(block_size, device=anchors.device)
        first = torch.maximum(first, anchors + slots - window + 1)
    first = first.masked_fill(anchors < 0, num_context)
    return first.flatten(1), anchors.clamp(min=0).expand(-1, -1, block_size).flatten(1)


def block_tiles(
    anchor_positions: torch.Tensor, document_ids: torch.Tensor, block_size: int, window: int | None, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles `[B, ceil(Q / tile), ceil((T + Q) / tile)]` where the predicate decides, and those where all is seen."""
    num_context, queries = document_ids.shape[1], anchor_positions.shape[1] * block_size
    first, stop = seen_context(anchor_positions, document_ids, block_size, window)
    touched, full = seen_tiles(first, stop, num_context + queries, tile)
    query = torch.arange(queries, device=anchor_positions.device)[None]
    own = num_context + query - query % block_size
    touched_own, _ = seen_tiles(own, own + block_size, num_context + queries, tile)
    return (touched | touched_own) & ~full, full


def written_block_mask(
    mask_mod: Callable,
    anchor_positions: torch.Tensor,
    document_ids: torch.Tensor,
    block_size: int,
    window: int | None,
    tile: int = TILE,
) -> BlockMask:
    """The `BlockMask` of [`block_tiles`], in whose partial tiles `mask_mod` decides; nothing waits for the device."""
    partial, full = block_tiles(anchor_positions, document_ids, block_size, window, tile)
    queries = anchor_positions.shape[1] * block_size
    return _tiled_mask(mask_mod, partial, full, (queries, document_ids.shape[1] + queries), tile)


def _tiled_mask(
    mask_mod: Callable, partial: torch.Tensor, full: torch.Tensor, lengths: tuple[int, int], tile: int
) -> BlockMask:
    """A `BlockMask` over (queries, keys) from its tiles `[B, rows, columns]`, the same for all heads."""
    tiles = torch.stack([partial, full])[:, :, None]
    counts = tiles.sum(dim=-1, dtype=torch.int32)
    # All tiles of keys, marked ones first.
    order = tiles.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts[0], order[0], counts[1], order[1], BLOCK_SIZE=tile, mask_mod=mask_mod, seq_lengths=lengths
    )


def earliest_keys(position_ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """First key `[N]` that each query of a packed row sees; it sees all from there up to itself.

    `position_ids` `[1, N]` restart with each document; `window` counts the query itself.
    """
    index = torch.arange(position_ids.shape[1], device=position_ids.device)
    start = index - position_ids[0]
    return start if window is None else torch.maximum(start, index - (window - 1))


def document_tiles(earliest: torch.Tensor, tile: int = TILE) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial and full tiles, each `[N / tile, N / tile]`, of queries that see the keys from `earliest` on."""
    stop = torch.arange(1, len(earliest) + 1, device=earliest.device)
    touched, full = seen_tiles(earliest[None], stop[None], len(earliest), tile)
    return (touched & ~full)[0], full[0]


def document_block_mask(position_ids: torch.Tensor, window: int | None = None, tile: int = TILE) -> BlockMask:
    """Causal attention within the documents of a packed row `[1, N]` and, if any, a window; nothing waits.

    Full and windowed layers differ in a tensor alone, so that one compiled kernel serves both.
    """
    earliest = earliest_keys(position_ids, window)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (kv_idx >= earliest[q_idx]) & (kv_idx <= q_idx)

    partial, full = document_tiles(earliest, tile)
    return _tiled_mask(mask_mod, partial[None], full[None], (len(earliest), len(earliest)), tile)


# --- Attention of many blocks on a CPU, in chunks of sorted anchors.


# Queries of one call: enough to keep the call's own cost small, few enough to cut the context closely.
CHUNK_QUERIES = 256


@dataclass(frozen=True)
class ChunkedMask:
    """The mask of all blocks, cut into chunks of `chunk_queries` slots, or fewer in the last one.

    A chunk sees the context tokens from the first to before the second of its two `contexts`, and its own slots; its
    boolean mask over these is `[B, 1, q, context + q]`.
    """

    num_context: int
    chunk_queries: int
    contexts: list[tuple[int, int]]
    masks: list[torch.Tensor]

    def dense(self) -> torch.Tensor:
        """The same mask over all queries and keys, boolean `[B, 1, Q, T + Q]`."""
        queries = sum(mask.shape[2] for mask in self.masks)
        dense = self.masks[0].new_zeros(self.masks[0].shape[0], 1, queries, self.num_context + queries)
        parts = dense.split(self.chunk_queries, dim=2)
        for index, (part, (begin, stop), mask) in enumerate(zip(parts, self.contexts, self.masks, strict=True)):
            own = self.num_context + index * self.chunk_queries
            part[..., begin:stop] = mask[..., : stop - begin]
            part[..., own : own + mask.shape[2]] = mask[..., stop - begin :]
        return dense


def chunked_mask(
    mask_mod: Any, anchor_positions: torch.Tensor, document_ids: torch.Tensor, block_size: int, window: int | None
) -> ChunkedMask:
    """Evaluate a predicate only where a block of the chunk can see a key; on a CPU alone, since bounds are read."""
    rows, num_context = document_ids.shape
    queries = anchor_positions.shape[1] * block_size
    chunk = max(1, CHUNK_QUERIES // block_size) * block_size
    firsts, stops = seen_context(anchor_positions, document_ids, block_size, window)
    row_index = torch.arange(rows)[:, None, None, None]
    contexts, masks = [], []
    for query in torch.arange(queries).split(chunk):
        stop = int(stops[:, query].max())
        begin = min(int(firsts[:, query].min()), stop)
        key = torch.cat([torch.arange(begin, stop), num_context + query])
        contexts.append((begin, stop))
        masks.append(mask_mod(row_index, torch.zeros(()), query[:, None], key))
    return ChunkedMask(num_context, chunk, contexts, masks)


def chunked_attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: ChunkedMask, **kwargs
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, once per chunk of [`chunked_mask`]: `[B, Q, H, head_dim]`, and None for weights.

    Queries are the slots of all blocks, keys and values the context and then the same slots.
    """
    sizes = [mask.num_context, key.shape[2] - mask.num_context]
    (context_key, own_key), (context_value, own_value) = key.split(sizes, dim=2), value.split(sizes, dim=2)
    # split, unlike slices, gives one gradient of the whole instead of one per chunk.
    chunks = (tensor.split(mask.chunk_queries, dim=2) for tensor in (query, own_key, own_value))
    outputs = []
    for q, k, v, (begin, stop), chunk_mask in zip(*chunks, mask.contexts, mask.masks, strict=True):
        k = torch.cat([context_key[:, :, begin:stop], k], dim=2)
        v = torch.cat([context_value[:, :, begin:stop], v], dim=2)
        outputs.append(sdpa_attention_forward(module, q, k, v, chunk_mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


# --- Which key a drafted slot sees: one predicate, from which the mask of every attention backend is made.


MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

Mask = torch.Tensor | BlockMask | ChunkedMask | None


def make_mask_mod(
    anchor_positions: torch.Tensor,
    document_ids: torch.Tensor,
    block_size: int,
    causal: bool,
    window: int | None,
    anchor_documents: torch.Tensor | None = None,
) -> MaskMod:
    """The predicate: a function of (batch, head, query, key) indices that says whether the query sees the key.

    In a causal layer slot j sees only slots up to j of its block. `anchor_documents` `[B, N]` are given where anchors
    lie behind the context. Unused blocks see only themselves, so that no query is without a key.
    """
    if anchor_documents is None:
        anchor_documents = document_ids.gather(1, anchor_positions.clamp(min=0))
        anchor_documents = anchor_documents.masked_fill(anchor_positions < 0, -2)
    num_context = document_ids.shape[1]
    # One more column that belongs to no document lets block keys be looked up without leaving the tensor.
    documents = torch.nn.functional.pad(document_ids, (0, 1), value=-1)

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


def materialize(
    mask_mod: MaskMod, implementation: str, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor | BlockMask:
    """Evaluate a predicate over (rows, queries, keys) for one attention backend.

    "sdpa" takes a boolean mask, "eager" an additive one in `dtype`, "flex_attention" a `BlockMask`; no other backend
    can express the mask, which is a ValueError.
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
    """Masks for all blocks of packed rows, by the types that the drafter's layers have.

    Sorted anchors make them cheap: flex attention then skips most tiles, and sdpa on a CPU works through chunks of
    neighbouring blocks. `dtype` is that of the additive mask that eager attention wants.
    """
    rows, num_anchors = anchor_positions.shape
    queries = num_anchors * config.block_size
    shape = (rows, queries, document_ids.shape[1] + queries)
    masks: dict[str, Mask] = {}
    for layer_type, _, causal, window in _layer_kinds(config):
        layout = (anchor_positions, document_ids, config.block_size, window)
        mask_mod = make_mask_mod(anchor_positions, document_ids, config.block_size, causal, window)
        if config._attn_implementation == "flex_attention":
            masks[layer_type] = written_block_mask(mask_mod, *layout)
        elif config._attn_implementation == "sdpa" and document_ids.device.type == "cpu":
            masks[layer_type] = chunked_mask(mask_mod, *layout)
        else:
            masks[layer_type] = materialize(mask_mod, config._attn_implementation, shape, document_ids.device, dtype)
    return masks


def _layer_kinds(config: PreTrainedConfig) -> Iterator[tuple[str, int, bool, int | None]]:
    """(layer type, its first layer, whether it is causal, its window) for each type that the drafter has."""
    for layer_type in dict.fromkeys(config.layer_types):
        first = config.layer_types.index(layer_type)
        window = config.sliding_window if layer_type == "sliding_attention" else None
        yield layer_type, first, config.layer_is_causal(first), window


def decoding_masks(
    config: PreTrainedConfig,
    noise_embeds: torch.Tensor,
    num_context: int,
    padding_mask: torch.Tensor | None = None,
    cache: Cache | None = None,
) -> dict[str, Mask]:
    """Masks for one block right after its context, by layer type; None where everything is visible.

    Args:
        config: The drafter's [`DFlashDraftConfig`].
        noise_embeds (`torch.Tensor` of shape `[B, b, D]`): The block's inputs; only its shape is read.
        num_context: New context rows of this forward, which come after those in the cache.
        padding_mask (`torch.Tensor` of shape `[B, cached + num_context + b]`): 0 where a key is padding.
        cache: Keys and values of earlier context.
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
        mask_mod = make_mask_mod(anchor, documents, block_size, causal, window, torch.zeros_like(anchor))
        masks[layer_type] = materialize(
            mask_mod, config._attn_implementation, (rows, block_size, keys), device, noise_embeds.dtype
        )
    return masks


def block_position_ids(position_ids: torch.Tensor, anchor_positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Positions `[B, T + Q]`: those of the context, which restart in each document, and then those of all blocks.

    Slot j of a block is at its anchor's position + j.
    """
    first = position_ids.gather(1, anchor_positions.clamp(min=0))
    slots = torch.arange(block_size, device=position_ids.device)
    blocks = (first[:, :, None] + slots).flatten(1)
    return torch.cat([position_ids, blocks], dim=1)


# --- transformers' sdpa attention, kept from a kernel of torch that reads the wrong rows of a mask.


# Stands for a layer whose keys and values have as many heads as its queries.
_ALL_HEADS = nn.Identity()


def whole_heads_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, whose one key head is copied for all query heads where a mask on CUDA needs it.

    Otherwise transformers expands that head without a copy. torch's memory-efficient kernel (2.11, and its main branch
    in 2026) knows such keys by their stride of 0: where a tile holds a single query, so that Q is 1 more than a
    multiple of 64 or, with large heads, 32, it goes through heads in place of queries, but on to the mask's next row
    for each, behind its end. The last query of all heads but the first is then wrong. Keys of several heads are copied
    by transformers itself, and single queries are not expanded.
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
