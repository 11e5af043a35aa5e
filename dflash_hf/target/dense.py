# SPDX-License-Identifier: Apache-2.0
"""A target without recurrent layers over one packed row of documents, through transformers' attention interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from .kernels import document_attention
from .packing import PackedRow


IMPLEMENTATION = "dflash_documents"
# What a layer may ask of its attention that attention within documents does not do.
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")


class CannotPack(Exception):
    """The target's attention does something that the packed path does not."""


class PackedDense:
    """Runs a target's own forward over one packed row, with attention within documents.

    Args:
        decoder: The text model.
        read_taps: Runs a forward of the decoder and gives the outputs of the tapped layers.
    """

    def __init__(self, decoder: nn.Module, read_taps: Callable[..., list[torch.Tensor]]):
        self.decoder: Any = decoder
        self.read_taps = read_taps

    @staticmethod
    def fits(decoder: nn.Module) -> bool:
        """Whether all layers attend through transformers' interface and by `scaled_dot_product_attention`."""
        config: Any = decoder.config
        kinds = set(config.to_dict().get("layer_types") or ["full_attention"])
        return kinds == {"full_attention"} and config._attn_implementation == "sdpa"

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
                input_ids=input_ids, position_ids=row.position_ids, use_cache=False, document_lengths=row.lengths
            )


@contextmanager
def _attention_within_documents(config: Any) -> Iterator[None]:
    """Only during the forward, so that a model shared with the user stays as it was."""
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise CannotPack(f"its attention uses {name}={kwargs[name]}")
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return document_attention(query, key, value, kwargs["document_lengths"], scaling), None


AttentionInterface.register(IMPLEMENTATION, _attention)
