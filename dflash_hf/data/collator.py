# SPDX-License-Identifier: Apache-2.0
"""Rows to tensors: their anchors, and which tokens the blocks learn.

Shapes: B rows, T tokens, N anchors, b block size.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.utils import logging

from ..training.losses import IGNORE_INDEX
from .anchors import as_spans, document_seed, draw_anchors, shorten_draws, supervised_runs, valid_anchors
from .document_checks import check_spans


logger = logging.get_logger(__name__)


@dataclass
class DataCollatorForDFlash:
    """Turns rows of a `PackedDataset` into the tensors of a training step.

    The batch has `input_ids` [B, T]; `position_ids` [B, T] that restart in each document; `document_ids` [B, T], -1
    in padding; `anchor_positions` [B, N], indices into the row, ascending, unused slots -1 at the end; `labels`
    [B, N, b], where slot k holds the token k after the anchor if all tokens up to it are supervised, else -100;
    `counted_slots`, a numpy array [B, N] with the number of labels of each block that count, which stays on the host;
    `documents` (indices in the data set), `document_lengths` and `noise_seeds`, lists with one int per document; and
    `supervised_runs`, a list of the row's unbroken supervised stretches as [start, stop) indices into the row.

    Args:
        block_size: slots of a block, the anchor's included.
        num_anchors: anchors per document and epoch, fewer where fewer are valid.
        seed: the run's seed, for anchors and noise.
        max_anchors_per_row: cap on the anchors of a row. It cuts the draws of the row's documents in proportion.
            By default a quarter of `row_length`, or of the row's own tokens where that is not given.
        row_length: T. By default that of the longest row in the batch.
        pad_token_id: token id in padding.
        redraw: False gives the anchors of epoch 0 in every epoch, for evaluation.
        pad_anchors_to_multiple_of: N is rounded up to a multiple of this. Together with `row_length` it keeps the
            number of tensor shapes, and so of compilations, small.

    Raises:
        ValueError: a row longer than `row_length`, a negative token id, an empty document, or a span outside its
            document, unsorted or overlapping.
    """

    block_size: int
    num_anchors: int = 512
    seed: int = 0
    max_anchors_per_row: int | None = None
    row_length: int | None = None
    pad_token_id: int = 0
    redraw: bool = True
    pad_anchors_to_multiple_of: int = 1

    _cap_is_logged: ClassVar[bool] = False

    def __post_init__(self):
        minima = {"block_size": 2, "num_anchors": 1, "pad_anchors_to_multiple_of": 1}
        minima |= {name: 1 for name in ("max_anchors_per_row", "row_length") if vars(self)[name] is not None}
        for name, minimum in minima.items():
            if vars(self)[name] < minimum:
                raise ValueError(f"`{name}` is {vars(self)[name]}, expected an integer of at least {minimum}.")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        collated = [self._collate_row(row) for row in rows]
        longest = max(len(row["input_ids"]) for row in collated)
        num_tokens = self.row_length or longest
        if longest > num_tokens:
            documents = next(row["documents"] for row in collated if len(row["input_ids"]) == longest)
            raise ValueError(
                f"The row of the documents {documents} has {longest} tokens, expected at most "
                f"row_length={num_tokens}: every row gets that many. Pack and collate with the same row_length."
            )
        multiple = self.pad_anchors_to_multiple_of
        num_anchors = max(1, *(len(row["anchor_positions"]) for row in collated))
        num_anchors = -(-num_anchors // multiple) * multiple
        shapes_and_padding = {
            "input_ids": ((num_tokens,), self.pad_token_id),
            "position_ids": ((num_tokens,), 0),
            "document_ids": ((num_tokens,), -1),
            "anchor_positions": ((num_anchors,), -1),
            "labels": ((num_anchors, self.block_size), IGNORE_INDEX),
        }
        batch: dict[str, Any] = {}
        for name, (shape, padding) in shapes_and_padding.items():
            batch[name] = torch.full((len(rows), *shape), padding, dtype=torch.int64)
            for padded, row in zip(batch[name], collated, strict=True):
                padded[: len(row[name])] = torch.from_numpy(row[name])
        # Known here without waiting for a device: which slots meet the head.
        batch["counted_slots"] = (batch["labels"] != IGNORE_INDEX).sum(-1).numpy()
        lists = ("documents", "document_lengths", "noise_seeds", "supervised_runs")
        return batch | {name: [row[name] for row in collated] for name in lists}

    def _collate_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """The unpadded entries of one row."""
        epoch = row["epoch"] if self.redraw else 0
        documents = [document["document"] for document in row["documents"]]
        token_ids = [self._token_ids(document) for document in row["documents"]]
        lengths = np.array([len(ids) for ids in token_ids])
        offsets = np.cumsum(lengths) - lengths
        spans = [self._spans(document, length) for document, length in zip(row["documents"], lengths, strict=True)]
        counts = self._num_anchors_per_document(spans, int(lengths.sum()))
        anchors = [
            draw_anchors(local, count, self.seed, epoch, document) + offset
            for local, count, document, offset in zip(spans, counts, documents, offsets, strict=True)
        ]
        input_ids, anchor_positions = np.concatenate(token_ids), np.concatenate(anchors)
        owners = np.repeat(np.arange(len(spans)), [len(local) for local in spans])
        row_spans = np.concatenate(spans) + offsets[owners, None]
        starts, stops = supervised_runs(row_spans, owners)
        return {
            "input_ids": input_ids,
            "position_ids": np.arange(len(input_ids)) - np.repeat(offsets, lengths),
            "document_ids": np.repeat(np.arange(len(lengths)), lengths),
            "anchor_positions": anchor_positions,
            "labels": self._labels(input_ids, anchor_positions, starts, stops),
            "supervised_runs": list(zip(starts.tolist(), stops.tolist(), strict=True)),
            "documents": documents,
            "document_lengths": lengths.tolist(),
            "noise_seeds": [document_seed(self.seed, epoch, document, "noise") for document in documents],
        }

    def _num_anchors_per_document(self, spans: list[np.ndarray], num_tokens: int) -> np.ndarray:
        """The length of each document's prefix of its permutation, under the budget and the row's cap."""
        draws = np.array([min(self.num_anchors, len(valid_anchors(local))) for local in spans])
        # Of the row's own tokens, not of the longest row in the batch: which rows share a batch must not matter.
        cap = self.max_anchors_per_row or max(1, (self.row_length or num_tokens) // 4)
        if draws.sum() > cap and not DataCollatorForDFlash._cap_is_logged:
            DataCollatorForDFlash._cap_is_logged = True
            logger.warning(
                f"The {len(spans)} documents of a row draw {draws.sum()} anchors in all and keep {cap}, the cap per "
                "row, shared in proportion; other rows may be cut too. Raise max_anchors_per_row to keep more, or "
                "lower num_anchors to draw fewer."
            )
        return shorten_draws(draws, cap)

    def _labels(self, input_ids: np.ndarray, anchors: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The labels [N, b] of a row's anchors, each of which lies in one of the supervised stretches."""
        run_stops = stops[np.searchsorted(starts, anchors, side="right") - 1]
        slots = np.arange(self.block_size)
        positions = anchors[:, None] + slots
        counts = (slots > 0) & (positions < run_stops[:, None])
        return np.where(counts, input_ids[np.minimum(positions, len(input_ids) - 1)], IGNORE_INDEX)

    def _token_ids(self, document: dict[str, Any]) -> np.ndarray:
        name, token_ids = f"Document {document['document']}", np.asarray(document["input_ids"])
        if token_ids.ndim != 1 or not token_ids.size or token_ids.dtype.kind not in "iu":
            raise ValueError(
                f"{name} has input_ids of shape {token_ids.shape} and type {token_ids.dtype}, expected a list of one "
                "or more integers. Drop empty documents, or tokenise again."
            )
        if token_ids.min() < 0:
            raise ValueError(
                f"{name} has the token id {token_ids.min()} at position {token_ids.argmin()}, expected none below 0: "
                "ids are rows of the target's embedding. Leave out padding and -100, the collator makes the labels."
            )
        return token_ids.astype(np.int64)

    def _spans(self, document: dict[str, Any], length: int) -> np.ndarray:
        spans = as_spans(document["supervised_spans"], f"Document {document['document']}")
        check_spans(spans, np.full(len(spans), document["document"]), np.full(len(spans), length))
        return spans
