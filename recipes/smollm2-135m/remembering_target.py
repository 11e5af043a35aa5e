# SPDX-License-Identifier: Apache-2.0
"""A target that runs over each document once, however often its hidden states are asked for.

Shapes: B rows, T packed tokens, K taps, D hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from dflash_hf import FrozenTarget
from dflash_hf.packed_targets import Piece, groups_in_order


class RememberingTarget(FrozenTarget):
    """A [`FrozenTarget`] for data that is small enough: all hidden states that it ever computed stay on its device.

    Of SmolLM2-135M with five taps a token takes 11.5 KB in fp32. Epochs, evaluations and several trainers share them,
    so that all but the first pass over the data cost the drafter's work alone. Arguments are those of `FrozenTarget`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._states: dict[bytes, torch.Tensor] = {}

    def remember(self, documents: Sequence[dict[str, Any]]) -> None:
        """Run over documents with `input_ids` in large forwards, so that no step has to."""
        ids = [torch.as_tensor(document["input_ids"]) for document in documents]
        pieces = [Piece(index, 0, len(document)) for index, document in enumerate(ids)]
        with tqdm(total=sum(map(len, ids)), desc="target", unit="token", unit_scale=True, disable=None) as bar:
            # The shortest first: equal lengths share an attention call.
            for group in groups_in_order(sorted(pieces, key=lambda piece: piece.length)):
                row = torch.cat([ids[piece.row] for piece in group])
                self.all_hidden_states(row[None], [[piece.length for piece in group]])
                bar.update(len(row))

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
        if not all(key in self._states for *_, key in places):
            states = super().all_hidden_states(input_ids, lengths)
            self._states |= {key: states[row, start:stop].clone() for row, start, stop, key in places}
            return states
        first = self._states[places[0][-1]]
        states = first.new_zeros(*input_ids.shape, first.shape[-1])
        for row, start, stop, key in places:
            states[row, start:stop] = self._states[key]
        return states


def _documents(input_ids: torch.Tensor, lengths: Iterable[Sequence[int]]) -> Iterator[tuple[int, int, int, bytes]]:
    """Row, first position, end and token ids of each document."""
    for row, (ids, row_lengths) in enumerate(zip(input_ids.cpu().numpy(), lengths, strict=True)):
        start = 0
        for length in row_lengths:
            yield row, start, start + length, ids[start : start + length].tobytes()
            start += length
