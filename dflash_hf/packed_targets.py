# SPDX-License-Identifier: Apache-2.0
"""Packed forwards of the target: dense (flex attention) and Qwen3.5/3.6, whose kernels keep documents apart."""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache, partial, wraps
from importlib import metadata
from itertools import groupby
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from packaging.version import Version
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.activations import ACT2FN
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5TextModel,
    apply_rotary_pos_emb,
    torch_chunk_gated_delta_rule,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextModel
from transformers.utils.import_utils import is_flash_linear_attention_available

from .masking import document_block_mask, flex_kernel_options


class NotCompiled(Exception):
    """What runs ahead of the training thread needs something compiled, which only the training thread may do."""


class _Marks(threading.local):
    # Whether the thread is ahead, whether it is within a function that may only run what is compiled, and whether it
    # came upon something that it would have had to compile.
    ahead = run_only = refused = False


THREAD = _Marks()


def compiled_function(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` of a function, which in a thread that is ahead only runs what other threads have compiled.

    `torch._dynamo.run` traces nothing; where nothing compiled fits it runs the function as it stands, so `function`
    begins with [`refuse_uncompiled`]. A wrapper cannot do that here: all would share its code, which the compiler
    keeps only a few variants of. `options` are those of `torch.compile`.
    """
    made = torch.compile(function, **options)
    if made is function or torch._dynamo.config.disable:
        return function  # the compiler is switched off, in any thread
    existing = torch._dynamo.run(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not THREAD.ahead:
            return made(*args, **kwargs)
        THREAD.run_only = True
        try:
            return existing(*args, **kwargs)
        finally:
            THREAD.run_only = False

    return call


def refuse_uncompiled() -> None:
    """First line of a function for [`compiled_function`]: raises NotCompiled where it had to be compiled first."""
    # In this order a compiler sees nothing of threads. is_compiling is true in all threads while one compiles.
    if not torch.compiler.is_dynamo_compiling() and THREAD.run_only:
        raise NotCompiled("Nothing that is compiled fits these arguments.")


def refuse_ahead(what: str) -> None:
    """Leave what is named to the training thread: raises NotCompiled in a thread that is ahead."""
    if THREAD.ahead:
        raise NotCompiled(f"{what} belongs into the training thread.")


# Documents run through the target together while padding stays below this share of the tokens.
MAX_PADDING = 0.05
# Tokens of one forward of the target, so that its memory does not grow with the batch.
MAX_FORWARD_TOKENS = 16384
# A packed row is a multiple of this long: few shapes to compile, and products of sizes that tensor cores like.
ROW_MULTIPLE = 128
# Tokens per chunk of the gated delta rule's kernels.
CHUNK_SIZE = 64


class Piece(NamedTuple):
    """A document's place in the batch: its row, first token and length in tokens."""

    row: int
    start: int
    length: int


def document_pieces(document_lengths: Sequence[Sequence[int]], width: int) -> list[Piece]:
    """Places of all documents in rows of `width` tokens, by the lengths of each row's documents, in order."""
    pieces = []
    for row, lengths in enumerate(document_lengths):
        if sum(lengths) > width:
            raise ValueError(f"Row {row} is {width} tokens wide, its document_lengths {sum(lengths)} together.")
        start = 0
        for length in lengths:
            if length > 0:
                pieces.append(Piece(row, start, length))
            start += length
    return pieces


def groups_of_similar_length(pieces: Iterable[Piece], max_tokens: int = MAX_FORWARD_TOKENS) -> Iterator[list[Piece]]:
    """Documents by falling length, in groups that one right-padded forward takes, with less than `MAX_PADDING`.

    A group has at most `max_tokens`, padding included, unless it is one document.
    """

    def fits(longest: int, count: int, tokens: int) -> bool:
        padded = longest * count
        return padded <= max_tokens and padded * (1 - MAX_PADDING) <= tokens

    return _groups(sorted(pieces, key=lambda p: -p.length), fits)


def groups_in_order(pieces: Iterable[Piece], max_tokens: int = MAX_FORWARD_TOKENS) -> Iterator[list[Piece]]:
    """Documents in their order, in groups of at most `max_tokens` tokens that one packed forward takes."""
    return _groups(pieces, lambda first, count, tokens: tokens <= max_tokens)


def _groups(pieces: Iterable[Piece], fits: Callable[[int, int, int], bool]) -> Iterator[list[Piece]]:
    """Documents in their order; a new group begins where one more does not fit the first length, count and tokens."""
    group: list[Piece] = []
    tokens = 0
    for piece in pieces:
        if group and not fits(group[0].length, len(group) + 1, tokens + piece.length):
            yield group
            group, tokens = [], 0
        group.append(piece)
        tokens += piece.length
    if group:
        yield group


class PackedRow(NamedTuple):
    """One packed row of N tokens: the documents one after another, then padding that counts as a last document."""

    # Tokens of each document and of the padding, N in all, and those that belong to documents.
    lengths: list[int]
    num_tokens: int
    # `[N]`: where each token lies in the flattened batch. `[1, N]`: positions, restarting with each document.
    indices: torch.Tensor
    position_ids: torch.Tensor
    # `[len(lengths) + 1]`: first token of each document, and N.
    boundaries: torch.Tensor
    # `[C, 2]`: document and number in it of each chunk of `CHUNK_SIZE` tokens.
    chunks: torch.Tensor


def packed_row(pieces: Sequence[Piece], width: int, full_length: int, device: torch.device) -> PackedRow:
    """Pack documents of rows of `width` tokens into one; made on the host, and copied without waiting for the device.

    The row gets `full_length`, rounded up, wherever the padding allows it, so that most forwards have one shape.
    """
    num_tokens = sum(piece.length for piece in pieces)
    full = _round_up(full_length)
    length = full if (1 - MAX_PADDING) * full <= num_tokens <= full else _round_up(num_tokens)
    lengths = [piece.length for piece in pieces]
    if length > num_tokens:
        lengths.append(length - num_tokens)
    firsts = [piece.row * width + piece.start for piece in pieces] + [0] * (length > num_tokens)
    sizes, starts = torch.tensor(lengths), torch.tensor(firsts)
    boundaries = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    positions = torch.arange(length) - boundaries[:-1].repeat_interleave(sizes)
    indices = starts.repeat_interleave(sizes) + positions
    indices[num_tokens:] = indices[0]
    counts = (sizes + CHUNK_SIZE - 1) // CHUNK_SIZE
    documents = torch.arange(len(lengths)).repeat_interleave(counts)
    numbers = torch.arange(len(documents)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    tensors = [indices, positions[None], boundaries, torch.stack([documents, numbers], dim=1)]
    if device.type == "cuda":
        # Only a copy from pinned memory leaves the host free to go on.
        tensors = [tensor.pin_memory() for tensor in tensors]
    return PackedRow(lengths, num_tokens, *(tensor.to(device, non_blocking=True) for tensor in tensors))


def _round_up(length: int) -> int:
    return -(-length // ROW_MULTIPLE) * ROW_MULTIPLE


# The first release whose kernels take the chunks of packed documents from the caller.
LINEAR_ATTENTION_FLOOR = "0.6"


@cache
def delta_kernels_available() -> bool:
    """Whether flash-linear-attention is there, recent enough, and has a GPU to run on."""
    if not is_flash_linear_attention_available():
        return False
    versions = [metadata.version(name) for name in metadata.packages_distributions().get("fla", [])]
    return all(Version(version) >= Version(LINEAR_ATTENTION_FLOOR) for version in versions)


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, position_ids: torch.Tensor
) -> torch.Tensor:
    """Depthwise causal convolution of `x` `[1, N, C]`, N at least W, that starts anew in each document; fp32 inside.

    A sum of shifted products, of which and of what surrounds it a compiler makes one kernel. The last column of
    `weight` `[C, 1, W]` is for the token itself.
    """
    kernel = weight[:, 0].float()
    total = x.float() * kernel[:, -1]
    for back in range(1, kernel.shape[-1]):
        earlier = nn.functional.pad(x[:, :-back], (0, 0, back, 0)).float()
        inside = (position_ids >= back)[..., None]
        total = total + torch.where(inside, earlier, 0.0) * kernel[:, -1 - back]
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype)


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """Gated delta rule whose state starts anew in each document; queries and keys are normalised in it.

    Queries and keys are `[1, N, Hk, d]`, values and the result `[1, N, H, d]`; `g` is the logarithm of the decay and
    `beta` how much of a value is written, both `[1, N, H]`. Without its kernel by [`reference_delta_rule`].
    """
    if query.device.type != "cuda" or not delta_kernels_available():
        return reference_delta_rule(query, key, value, g, beta, row)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # The chunks are handed over, since the kernel would wait for the device to count them.
    output, _ = chunk_gated_delta_rule(
        query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=row.boundaries,
        chunk_indices=row.chunks, chunk_size=CHUNK_SIZE,
    )  # fmt: skip
    return output


def reference_delta_rule(*inputs: Any) -> torch.Tensor:
    """[`delta_rule`] by transformers' own loop, one document after another."""
    # What the module exports is the loop only where no kernel is installed; behind it lies the loop itself.
    loop = inspect.unwrap(torch_chunk_gated_delta_rule)
    *tensors, row = inputs
    documents = zip(*(tensor.split(row.lengths, dim=1) for tensor in tensors), strict=True)
    outputs = [loop(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0] for q, k, v, g, beta in documents]
    return torch.cat(outputs, dim=1)


@contextmanager
def transformers_delta_rule() -> Iterator[None]:
    """transformers' Qwen3.5/3.6 layers with the loop in place of a kernel, which could not vouch for itself.

    The layers look the rule up in their module, which offers no other way to choose it.
    """
    with ExitStack() as stack:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
            loop = inspect.unwrap(module.torch_chunk_gated_delta_rule)
            stack.enter_context(patch.object(module, "torch_chunk_gated_delta_rule", loop))
        yield


def document_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scaling: float | None = None
) -> torch.Tensor:
    """Causal attention of each document to itself: queries and result `[1, N, H, d]`, keys and values `[1, N, Hk, d]`.

    Neighbours of one length share a call. Scores are multiplied by `scaling`, by default `d ** -0.5`.
    """
    outputs = []
    start = 0
    for length, neighbours in groupby(lengths):
        count = len(list(neighbours))
        part = slice(start, start + count * length)
        q, k, v = (t[0, part].unflatten(0, (count, length)).transpose(1, 2) for t in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
        start = part.stop
    return torch.cat(outputs)[None]


# --- A target without recurrent layers over one packed row of documents, through transformers' attention interface.


IMPLEMENTATION = "dflash_documents"
# What a layer may ask of its attention that attention within documents does not do.
REFUSED = ("s_aux", "position_bias")
REFUSED_BY_LOOP = ("sliding_window", "softcap", *REFUSED)
# Runs a forward and gives the outputs `[B, T, D]` of the tapped layers.
Reader = Callable[..., list[torch.Tensor]]
# Head sizes that flex attention's kernels have on all GPUs.
FLEX_HEAD_SIZES = range(16, 257)
FLEX_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class CannotPack(Exception):
    """The target's attention does something that the packed path does not."""


def _refuse(names: tuple[str, ...], options: dict[str, Any]) -> None:
    for name in names:
        if options.get(name) is not None:
            raise CannotPack(f"its attention uses {name}={options[name]}")


def flex_documents(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask,
    scaling: float | None, softcap: float | None, kernel_options: dict[str, int] | None,
) -> torch.Tensor:  # fmt: skip
    """transformers' flex attention, made to be compiled as a whole.

    Not by transformers, whose one compiled function the drafter may use too: the compiler keeps few variants of a
    function, and beyond them flex attention would hold all scores at once.
    """
    refuse_uncompiled()
    output, _ = flex_attention_forward(
        module, query, key, value, mask, scaling=scaling, softcap=softcap, kernel_options=kernel_options
    )
    return output


class PackedDense:
    """Runs a target's own forward over one packed row, with attention within documents.

    Args:
        decoder: The text model.
        read_taps: Runs a forward of the decoder and gives the outputs of the tapped layers.
        flex: [`flex_documents`], compiled, which [`PackedDense.compiles`] must allow: one call per layer, whatever the
            documents, windows and soft caps. Uncompiled it would hold all scores of the row at once. By default
            documents attend one by one: right anywhere, but a GPU waits for the host to launch the next.
    """

    def __init__(self, decoder: nn.Module, read_taps: Reader, flex: Callable[..., torch.Tensor] | None = None):
        self.decoder: Any = decoder
        self.read_taps, self.flex = read_taps, flex
        config: Any = decoder.config
        fields = config.to_dict()
        # What layers are expected to ask for; None where the configuration names no types.
        self.layer_types, self.window = fields.get("layer_types"), fields.get("sliding_window")

    def attention(self, row: PackedRow) -> Callable[..., torch.Tensor]:
        """Attention `[1, N, H, d]` of a layer within the row's documents, of queries, keys and values `[1, h, N, d]`.

        A layer that asks for more than this can do raises CannotPack.
        """
        if self.flex is None:
            return partial(self._one_by_one, row)
        return partial(self._all_at_once, cache(partial(document_block_mask, row.position_ids)))

    @staticmethod
    def _one_by_one(
        row: PackedRow, module: nn.Module, *states: torch.Tensor, scaling: float | None = None, **options: Any
    ) -> torch.Tensor:
        _refuse(REFUSED_BY_LOOP, options)
        query, key, value = (tensor.transpose(1, 2) for tensor in states)
        return document_attention(query, key, value, row.lengths, scaling)

    def _all_at_once(
        self, mask: Callable[[int | None], BlockMask], module: Any, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, scaling: float | None = None, sliding_window: int | None = None,
        softcap: float | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        _refuse(REFUSED, options)
        if query.shape[-1] not in FLEX_HEAD_SIZES:
            raise CannotPack(f"its heads have {query.shape[-1]} channels, which flex attention has no kernel for")
        if self.layer_types is not None:
            # The documents of the start-up check are shorter than most windows, so a missing one is found here.
            layer_type = self.layer_types[module.layer_idx]
            expected = self.window if layer_type == "sliding_attention" else None
            if sliding_window != expected:
                raise CannotPack(
                    f"layer {module.layer_idx} is {layer_type} and hands sliding_window={sliding_window} to its "
                    f"attention, where {expected} is expected"
                )
        assert self.flex is not None
        tiles = flex_kernel_options(query.device, query.dtype, query.shape[-1])
        return self.flex(module, query, key, value, mask(sliding_window), scaling, softcap, tiles)

    @staticmethod
    def fits(decoder: nn.Module) -> bool:
        """Whether all layers attend through transformers' interface and by `scaled_dot_product_attention`."""
        config: Any = decoder.config
        return _kinds(config) == {"full_attention"} and config._attn_implementation == "sdpa"

    @staticmethod
    def compiles(decoder: Any) -> bool:
        """Whether flex attention does what all layers need: full and sliding attention, also with soft caps."""
        config = decoder.config
        return (
            decoder._supports_flex_attn
            and _kinds(config) <= {"full_attention", "sliding_attention"}
            and config._attn_implementation in ("sdpa", "eager")
            and decoder.dtype in FLEX_TYPES
        )

    def hidden_states(self, input_ids: torch.Tensor, row: PackedRow) -> list[torch.Tensor]:
        """Outputs of the tapped layers, K tensors of shape `[1, N, D]`, for token ids `[1, N]`.

        Positions are two-dimensional and there is no mask: three-dimensional ones, or a mask of ones, would tell
        transformers that the row is one document.
        """
        config, before = self.decoder.config, self.decoder.config._attn_implementation
        # Only during the forward, so that a model shared with the user stays as it was.
        config._attn_implementation = IMPLEMENTATION
        try:
            return self.read_taps(
                input_ids=input_ids, position_ids=row.position_ids, use_cache=False, attend=self.attention(row)
            )
        finally:
            config._attn_implementation = before


def _kinds(config: Any) -> set[str]:
    return set(config.to_dict().get("layer_types") or ["full_attention"])


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, attend: Callable[..., torch.Tensor] | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if attend is None:
        raise CannotPack("its layers hand nothing on to their attention")
    return attend(module, query, key, value, **options), None


AttentionInterface.register(IMPLEMENTATION, _attention)


# --- The Qwen3.5/3.6 decoder over one packed row of documents, for hidden states only.


class PackedQwen35:
    """Runs the layers of a Qwen3.5/3.6 text model with the borders of documents in every mixer.

    transformers' own forward keeps packed documents apart only with the causal-conv1d extension, which has to be
    built for each torch; this one runs the same modules, changes nothing about them, and lets a compiler fuse all
    that lies between the matrix products and the two mixing kernels.

    `target_layer_ids` ascend. With `compiled` the first forwards take up to a minute. With `final_states` all layers
    run, and what the final norm gives comes behind the taps.
    """

    def __init__(
        self, decoder: nn.Module, target_layer_ids: Sequence[int], compiled: bool = False, *,
        final_states: bool = False,
    ):  # fmt: skip
        self.decoder: Any = decoder
        self.target_layer_ids = list(target_layer_ids)
        self.final_states = final_states
        made: Callable[..., Any] = compiled_function if compiled else lambda function: function
        self.delta_inputs, self.delta_outputs = made(_delta_inputs), made(_delta_outputs)
        self.attention_inputs, self.attention_outputs = made(_attention_inputs), made(_attention_outputs)
        # Experts choose their tokens by data, which no single graph holds.
        dense = isinstance(decoder, Qwen3_5TextModel)
        self.feed_forward = made(_feed_forward) if dense else _feed_forward

    @staticmethod
    def fits(decoder: nn.Module) -> bool:
        """Whether a decoder has these layers."""
        return isinstance(decoder, Qwen3_5TextModel | Qwen3_5MoeTextModel)

    def tapped(self, target_layer_ids: Sequence[int]) -> "PackedQwen35":
        """The same forward, compiled functions included, that reads other layers and ends behind the last one."""
        other = copy(self)
        other.target_layer_ids, other.final_states = list(target_layer_ids), False
        return other

    def hidden_states(self, input_ids: torch.Tensor, row: PackedRow) -> list[torch.Tensor]:
        """Outputs of the tapped layers, K tensors `[1, N, D]`, K + 1 with `final_states`, for token ids `[1, N]`."""
        hidden_states = self.decoder.embed_tokens(input_ids)
        cos, sin = self.decoder.rotary_emb(hidden_states, row.position_ids)
        taps = []
        depth = len(self.decoder.layers) if self.final_states else self.target_layer_ids[-1] + 1
        for index, layer in enumerate(self.decoder.layers[:depth]):
            if layer.block_type == "linear_attention":
                query, key, value, g, beta, z = self.delta_inputs(layer, hidden_states, row.position_ids)
                mixed = delta_rule(query, key, value, g, beta, row)
                hidden_states = self.delta_outputs(layer, hidden_states, mixed, z)
            else:
                query, key, value, gate = self.attention_inputs(layer, hidden_states, cos, sin)
                attended = document_attention(query, key, value, row.lengths, layer.self_attn.scaling)
                hidden_states = self.attention_outputs(layer, hidden_states, attended, gate)
            hidden_states = self.feed_forward(layer, hidden_states)
            if index in self.target_layer_ids:
                taps.append(hidden_states)
        return [*taps, self.decoder.norm(hidden_states)] if self.final_states else taps


def _delta_inputs(layer: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, decay and strength of the delta rule, and the gate of its output."""
    refuse_uncompiled()
    mixer = layer.linear_attn
    x = layer.input_layernorm(hidden_states)
    # Channels are independent, so queries, keys and values are convolved apart, each into a tensor of its own.
    sizes = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    biases = [None] * 3 if mixer.conv1d.bias is None else mixer.conv1d.bias.split(sizes)
    parts = zip(mixer.in_proj_qkv(x).split(sizes, dim=-1), mixer.conv1d.weight.split(sizes), biases, strict=True)
    query, key, value = (
        ACT2FN[mixer.activation](causal_convolution(part, weight, bias, position_ids)) for part, weight, bias in parts
    )
    query, key = (tensor.unflatten(-1, (-1, mixer.head_k_dim)) for tensor in (query, key))
    value = value.unflatten(-1, (-1, mixer.head_v_dim))
    beta = mixer.in_proj_b(x).sigmoid()
    g = -mixer.A_log.float().exp() * nn.functional.softplus(mixer.in_proj_a(x).float() + mixer.dt_bias)
    return query, key, value, g, beta, mixer.in_proj_z(x)


def _delta_outputs(layer: Any, hidden_states: torch.Tensor, mixed: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    refuse_uncompiled()
    mixer = layer.linear_attn
    gated = mixer.norm(mixed.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim))
    return hidden_states + mixer.out_proj(gated.view(*hidden_states.shape[:-1], -1))


def _attention_inputs(
    layer: Any, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values `[1, N, heads, d]`, and the gate of the output."""
    refuse_uncompiled()
    attention = layer.self_attn
    x = layer.input_layernorm(hidden_states)
    query, gate = attention.q_proj(x).unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, dim=-1)
    key = attention.k_proj(x).unflatten(-1, (-1, attention.head_dim))
    value = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))
    query, key = apply_rotary_pos_emb(attention.q_norm(query), attention.k_norm(key), cos, sin, unsqueeze_dim=2)
    return query, key, value, gate


def _attention_outputs(
    layer: Any, hidden_states: torch.Tensor, mixed: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    refuse_uncompiled()
    return hidden_states + layer.self_attn.o_proj((mixed * gate.sigmoid()).flatten(-2))


def _feed_forward(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    refuse_uncompiled()
    output = layer.mlp(layer.post_attention_layernorm(hidden_states))
    return hidden_states + (output[0] if isinstance(output, tuple) else output)
