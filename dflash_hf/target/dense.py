# SPDX-License-Identifier: Apache-2.0
"""A target without recurrent layers over one packed row of documents, through transformers' attention interface.

Shapes: N packed tokens, D hidden size, K taps, H heads, Hk key heads, d head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from ..flex_tiles import flex_kernel_options
from .compiled import compiled as compiled_function
from .compiled import refuse_uncompiled
from .document_masks import document_block_mask
from .kernels import document_attention
from .packing import PackedRow


IMPLEMENTATION = "dflash_documents"
# What a layer may ask of its attention that attention within documents does not do.
REFUSED = ("s_aux", "position_bias")
REFUSED_BY_LOOP = ("sliding_window", "softcap", *REFUSED)
# Head sizes that flex attention's kernels have on all GPUs.
FLEX_HEAD_SIZES = range(16, 257)
FLEX_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class CannotPack(Exception):
    """The target's attention does something that the packed path does not."""


class OneByOne:
    """Attention within documents by one call for each run of documents of one length: right anywhere.

    A GPU finishes each call before the host has launched the next.

    Args:
        row: The documents.
    """

    def __init__(self, row: PackedRow):
        self.row = row

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            module: The layer's attention.
            query, key, value (`torch.Tensor` of shape `[1, H or Hk, N, d]`): Its inputs.
            scaling: Factor of the scores; `d ** -0.5` by default.
            options: What else the layer asks for.

        Returns:
            `torch.Tensor` of shape `[1, N, H, d]`.

        Raises:
            CannotPack: When the layer asks for more.
        """
        _refuse(REFUSED_BY_LOOP, options)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return document_attention(query, key, value, self.row.lengths, scaling)


class AllAtOnce:
    """Attention within documents by one call of flex attention, whatever the documents, windows and soft caps.

    Args:
        flex: [`flex_documents`], compiled: without a compiler it would hold all scores of the row at once.
        layer_types: Types of the target's layers by index; None where its configuration names none.
        window: Window of the sliding ones.
        row: The documents.
    """

    def __init__(
        self, flex: Callable[..., torch.Tensor], layer_types: list[str] | None, window: int | None, row: PackedRow
    ):
        self.flex, self.layer_types, self.window, self.row = flex, layer_types, window, row
        self.masks: dict[int | None, BlockMask] = {}

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of one layer, as [`OneByOne`] has it, windows and soft caps included."""
        _refuse(REFUSED, options)
        if query.shape[-1] not in FLEX_HEAD_SIZES:
            raise CannotPack(f"its heads have {query.shape[-1]} channels, which flex attention has no kernel for")
        self._check_window(module, sliding_window)
        if sliding_window not in self.masks:
            self.masks[sliding_window] = document_block_mask(self.row.position_ids, sliding_window)
        tiles = flex_kernel_options(query.device, query.dtype, query.shape[-1])
        return self.flex(module, query, key, value, self.masks[sliding_window], scaling, softcap, tiles)

    def _check_window(self, module: Any, given: int | None) -> None:
        """The documents of the start-up check are shorter than most windows, so a missing one is found here."""
        if self.layer_types is None:
            return
        layer_type = self.layer_types[module.layer_idx]
        expected = self.window if layer_type == "sliding_attention" else None
        if given != expected:
            raise CannotPack(
                f"layer {module.layer_idx} is {layer_type} and hands sliding_window={given} to its attention, where "
                f"{expected} is expected"
            )


def flex_documents(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scaling: float | None,
    softcap: float | None,
    kernel_options: dict[str, int] | None,
) -> torch.Tensor:
    """transformers' flex attention, made to be compiled as a whole.

    Compiled here and not by transformers, whose one compiled function the drafter may use too: the compiler keeps
    few variants of a function, and beyond them flex attention would hold all scores at once.
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
        compiled: Whether attention is one compiled call per layer, which [`PackedDense.compiles`] must allow; the
            first forward then takes some seconds more. Otherwise documents attend one by one.
    """

    def __init__(self, decoder: nn.Module, read_taps: Callable[..., list[torch.Tensor]], compiled: bool = False):
        self.decoder: Any = decoder
        self.read_taps = read_taps
        self.attention: Callable[[PackedRow], Callable[..., torch.Tensor]] = OneByOne
        if compiled:
            self.attention = self.all_at_once(compiled_function(flex_documents))

    def all_at_once(self, flex: Callable[..., torch.Tensor]) -> Callable[[PackedRow], AllAtOnce]:
        """[`AllAtOnce`] for this target's layers, by [`flex_documents`] as some compiler made it."""
        fields = self.decoder.config.to_dict()
        return partial(AllAtOnce, flex, fields.get("layer_types"), fields.get("sliding_window"))

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
        """Outputs of the tapped layers, K tensors of shape `[1, N, D]`.

        Positions are two-dimensional and there is no mask: three-dimensional ones, or a mask of ones, would tell
        transformers that the row is one document.

        Args:
            input_ids (`torch.Tensor` of shape `[1, N]`): Token ids.
            row: The documents.
        """
        with _attention_within_documents(self.decoder.config):
            return self.read_taps(
                input_ids=input_ids, position_ids=row.position_ids, use_cache=False, attend=self.attention(row)
            )


def _kinds(config: Any) -> set[str]:
    return set(config.to_dict().get("layer_types") or ["full_attention"])


@contextmanager
def _attention_within_documents(config: Any) -> Iterator[None]:
    """Only during the forward, so that a model shared with the user stays as it was."""
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before


def _refuse(names: tuple[str, ...], options: dict[str, Any]) -> None:
    for name in names:
        if options.get(name) is not None:
            raise CannotPack(f"its attention uses {name}={options[name]}")


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attend: Callable[..., torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if attend is None:
        raise CannotPack("its layers hand nothing on to their attention")
    return attend(module, query, key, value, **options), None


AttentionInterface.register(IMPLEMENTATION, _attention)
