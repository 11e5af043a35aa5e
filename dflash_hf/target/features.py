# SPDX-License-Identifier: Apache-2.0
"""From packed rows of token ids to the tapped hidden states of their documents, on the packed or the padded path.

Shapes: B rows, T packed tokens, N tokens of a forward, K taps, D hidden size.
"""

from collections.abc import Callable, Sequence

import torch

from .dense import PackedDense
from .packing import MAX_FORWARD_TOKENS, Piece, groups_in_order, groups_of_similar_length, packed_row
from .qwen3_5 import PackedQwen35


PackedForward = PackedQwen35 | PackedDense


def packed_features(forward: PackedForward, input_ids: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """Documents run one after another in rows without padding between them; nothing waits for the device.

    Args:
        forward: The target's forward over one packed row.
        input_ids (`torch.Tensor` of shape `[B, T]`): Token ids on the target's device.
        pieces: The documents, at least one.

    Returns:
        `torch.Tensor` of shape `[B, T, K * D]`; zeros where no document is.
    """
    rows, width = input_ids.shape
    output = None
    for group in groups_in_order(pieces):
        row = packed_row(group, width, min(rows * width, MAX_FORWARD_TOKENS), input_ids.device)
        taps = forward.hidden_states(input_ids.flatten()[row.indices][None], row)
        output = _room(output, taps, rows * width)
        places = row.indices[: row.num_tokens]
        for tap, part in zip(taps, output.chunk(len(taps), dim=-1), strict=True):
            part.index_copy_(0, places, tap[0, : row.num_tokens])
    assert output is not None  # there is at least one document
    return output.view(rows, width, -1)


def padded_features(
    read_taps: Callable[..., list[torch.Tensor]], input_ids: torch.Tensor, pieces: Sequence[Piece]
) -> torch.Tensor:
    """Documents run one per right-padded row, beside others of nearly their length.

    Args:
        read_taps: The target's own forward, giving the outputs of the tapped layers.
        input_ids (`torch.Tensor` of shape `[B, T]`): Token ids on the target's device.
        pieces: The documents, at least one.

    Returns:
        `torch.Tensor` of shape `[B, T, K * D]`; zeros where no document is.
    """
    rows, width = input_ids.shape
    output = None
    for group in groups_of_similar_length(pieces):
        padded = input_ids.new_zeros(len(group), group[0].length)
        for i, (row, start, length) in enumerate(group):
            padded[i, :length] = input_ids[row, start : start + length]
        taps = read_taps(input_ids=padded, use_cache=False)
        output = _room(output, taps, rows * width)
        for tap, part in zip(taps, output.chunk(len(taps), dim=-1), strict=True):
            for i, (row, start, length) in enumerate(group):
                part[row * width + start : row * width + start + length] = tap[i, :length]
    assert output is not None  # there is at least one document
    return output.view(rows, width, -1)


def _room(output: torch.Tensor | None, taps: list[torch.Tensor], tokens: int) -> torch.Tensor:
    """Features `[B * T, K * D]` to be filled, once; the taps of a target spread over devices end on the last."""
    return output if output is not None else taps[-1].new_zeros(tokens, len(taps) * taps[-1].shape[-1])
