# SPDX-License-Identifier: Apache-2.0
"""Outputs of single layers out of a target's own forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import nn


class _LastTapRead(Exception):
    """Ends the target's forward: nothing after the last tap is needed."""


def read_taps(
    decoder: nn.Module, layers: nn.ModuleList, target_layer_ids: Sequence[int], final_states: bool, **inputs
) -> list[torch.Tensor]:
    """Outputs of the tapped layers, each `[B, T, D]`.

    Args:
        decoder: The target without its head.
        layers: Its layers.
        target_layer_ids: The taps.
        final_states: Whether all layers run, and the states after the final norm come last.
        **inputs: Of the decoder.
    """
    final = []
    with _hooks(layers, target_layer_ids, final_states) as taps, suppress(_LastTapRead):
        output = decoder(**inputs)
        final = [output.last_hidden_state]
    return [taps[i] for i in target_layer_ids] + final


@contextmanager
def _hooks(
    layers: nn.ModuleList, target_layer_ids: Sequence[int], final_states: bool
) -> Iterator[dict[int, torch.Tensor]]:
    """Hooks live only during a forward, so that a model shared with the user stays as it was."""
    taps: dict[int, torch.Tensor] = {}

    def read(index: int):
        def hook(module, args, output):
            taps[index] = output[0] if isinstance(output, tuple) else output
            if index == target_layer_ids[-1] and not final_states:
                raise _LastTapRead

        return hook

    handles = [layers[i].register_forward_hook(read(i)) for i in target_layer_ids]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["read_taps"]
