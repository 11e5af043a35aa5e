# SPDX-License-Identifier: Apache-2.0
"""A target that runs over each document once, however often its hidden states are asked for.

Shapes: B rows, T packed tokens, K taps, D hidden size.
"""

from collections.abc import Iterator, Sequence

import torch

from dflash_hf import FrozenTarget


class RememberingTarget(FrozenTarget):
    """A [`FrozenTarget`] for data that is small enough: all hidden states that it ever computed stay in memory.

    Of SmolLM2-135M with five taps a token takes 11.5 KB in fp32. Epochs, evaluations and several trainers share them,
    so that all but the first pass over the data cost the drafter's work alone. Arguments are those of `FrozenTarget`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._states: dict[tuple[int, ...], torch.Tensor] = {}

    def all_hidden_states(
        self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """Those of [`FrozenTarget.all_hidden_states`], remembered where every document of the rows was seen before.

        Args:
            input_ids (`torch.Tensor` of shape `[B, T]`): Packed token ids, best on the host.
            document_lengths: Lengths in tokens of the documents of each row, in order.

        Returns:
            `torch.Tensor` of shape `[B, T, K * D]`, or `[B, T, (K + 1) * D]` with `final_states`.
        """
        lengths = [[input_ids.shape[1]]] * len(input_ids) if document_lengths is None else document_lengths
        places = list(_documents(input_ids, lengths))
        if not all(ids in self._states for *_, ids in places):
            states = super().all_hidden_states(input_ids, lengths)
            self._states |= {ids: states[row, start : start + len(ids)].clone() for row, start, ids in places}
            return states
        first = self._states[places[0][-1]]
        states = first.new_zeros(*input_ids.shape, first.shape[-1])
        for row, start, ids in places:
            states[row, start : start + len(ids)] = self._states[ids]
        return states


def _documents(
    input_ids: torch.Tensor, lengths: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Row, first position and token ids of each document."""
    for row, (ids, row_lengths) in enumerate(zip(input_ids.tolist(), lengths, strict=True)):
        start = 0
        for length in row_lengths:
            yield row, start, tuple(ids[start : start + length])
            start += length
