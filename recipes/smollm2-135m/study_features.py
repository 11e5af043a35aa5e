# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states of a whole data set, computed once and kept on the device.

Shapes: M documents, S tokens of all of them, B rows, T tokens of a row, K taps, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from dflash_hf.frozen_target import FrozenTarget
from dflash_hf.packed_targets import Piece, groups_in_order


class Features:
    """Hidden states of documents by token, and the batches' rows gathered from them.

    Args:
        target: The target, with `final_states` where objectives compare with its distribution.
        documents: Documents with `input_ids`.
        device: Where the states are kept, in the target's type.
        progress: Name shown beside a bar.
    """

    def __init__(
        self, target: FrozenTarget, documents: Sequence[dict[str, Any]], device: torch.device, progress: str = ""
    ):
        lengths = np.array([len(document["input_ids"]) for document in documents])
        self.starts = np.cumsum(lengths) - lengths
        width, dtype = target.config.hidden_size, next(target.model.parameters()).dtype
        num_tokens = int(lengths.sum())
        # One more row of zeros stands for padding.
        shape = (num_tokens + 1, len(target.target_layer_ids) * width)
        self.context = torch.zeros(shape, dtype=dtype, device=device)
        self.final: torch.Tensor | None = None
        if target.final_states:
            self.final = torch.zeros(num_tokens + 1, width, dtype=dtype, device=device)
        self.padding = num_tokens
        bar = tqdm(total=num_tokens, desc=f"target on {progress}", unit="token", unit_scale=True)
        pieces = [Piece(index, 0, length) for index, length in enumerate(lengths.tolist())]
        # The shortest first: equal lengths share an attention call.
        for pieces_of_group in groups_in_order(sorted(pieces, key=lambda piece: piece.length)):
            group = [piece.row for piece in pieces_of_group]
            ids = np.concatenate([documents[index]["input_ids"] for index in group])
            states = target.all_hidden_states(torch.from_numpy(ids)[None], [lengths[group].tolist()])[0].to(device)
            places = np.concatenate([self.starts[index] + np.arange(lengths[index]) for index in group])
            index = torch.from_numpy(places).to(device)
            self.context[index] = states[:, : self.context.shape[1]]
            if self.final is not None:
                self.final[index] = states[:, self.context.shape[1] :]
            bar.update(len(ids))
        bar.close()

    @property
    def num_bytes(self) -> int:
        tensors = [self.context] if self.final is None else [self.context, self.final]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def places(self, batch: dict[str, Any]) -> torch.Tensor:
        """Index `[B, T]` of each token of a batch of [`DataCollatorForDFlash`] in the states, on the host."""
        index = torch.full(batch["input_ids"].shape, self.padding, dtype=torch.int64)
        for row, (documents, lengths) in enumerate(zip(batch["documents"], batch["document_lengths"], strict=True)):
            places = [self.starts[i] + np.arange(n) for i, n in zip(documents, lengths, strict=True)]
            joined = torch.from_numpy(np.concatenate(places))
            index[row, : len(joined)] = joined
        return index
