# SPDX-License-Identifier: Apache-2.0
"""From rows to tensors: which anchors are drawn, and their labels.

An anchor is a supervised position whose next token is supervised too; the drafter learns the block of `b` slots that
begins there. Shapes: B rows of T tokens, N anchors in a row, S supervised spans.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers.utils import logging

from .packing import (
    DOCUMENT_COLUMNS,
    Documents,
    arrow_column,
    document_lengths,
    document_spans,
    listed,
    seeded_permutation,
)


logger = logging.get_logger(__name__)

IGNORE_INDEX = -100


# --- Which positions of a document may be anchors, and which of them an epoch draws.


def document_seed(seed: int, epoch: int, document: int, purpose: str) -> int:
    """A 63-bit seed for one use (`purpose`: "anchors", "noise") of one document in one epoch, the same everywhere."""
    digest = hashlib.blake2b(f"{purpose} {seed} {epoch} {document}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def as_spans(supervised_spans: Sequence[Sequence[int]] | np.ndarray | None, name: str = "A document") -> np.ndarray:
    """Spans as an array [S, 2]; null, as Arrow has it for a document without any, is none."""
    spans = np.asarray(listed(supervised_spans), dtype=np.int64)
    if spans.size and (spans.ndim != 2 or spans.shape[1] != 2):
        raise ValueError(f"{name} has supervised_spans of shape {spans.shape}, expected [start, stop] pairs, [S, 2].")
    return spans.reshape(-1, 2)


def supervised_runs(spans: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, stops and documents of the unbroken stretches that spans [S, 2] of the documents `owners` [S] make."""
    opens, closes = np.ones(len(spans), dtype=bool), np.ones(len(spans), dtype=bool)
    # Touching spans of one document are one stretch.
    opens[1:] = (spans[1:, 0] != spans[:-1, 1]) | (owners[1:] != owners[:-1])
    closes[:-1] = opens[1:]
    return spans[opens, 0], spans[closes, 1], owners[opens]


def _anchors_of_runs(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """The number of valid anchors of each supervised stretch of the documents, and the stretch's document."""
    starts, stops, owners = supervised_runs(*document_spans(documents))
    return np.maximum(stops - starts - 1, 0), owners


def num_valid_anchors(documents: Documents) -> np.ndarray:
    """The number of valid anchors of each document, int64 [M]."""
    anchors, owners = _anchors_of_runs(documents)
    return np.bincount(owners, weights=anchors, minlength=len(documents)).astype(np.int64)


def share_of_countable_slots(documents: Documents, block_size: int) -> float:
    """The share of the drafted slots (1 to b-1) of all valid anchors that have a label: 1.0 for endless answers."""
    # The anchors of a stretch of m+1 tokens have 1, 2, .., m tokens ahead of them, of which a block takes up to b-1.
    anchors, drafted = _anchors_of_runs(documents)[0], block_size - 1
    cut = np.minimum(anchors, drafted)
    countable = cut * (cut + 1) // 2 + (anchors - cut) * drafted
    return float(countable.sum() / max(1, drafted * anchors.sum()))


def valid_anchors(supervised_spans: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
    """The positions of a document that may be anchors, ascending: supervised, and the next token is too.

    Args:
        supervised_spans: half-open, ascending, disjoint [start, stop] pairs, in tokens from the document's start.
    """
    spans = as_spans(supervised_spans)
    starts, stops, _ = supervised_runs(spans, np.zeros(len(spans), dtype=np.int64))
    counts = np.maximum(stops - starts - 1, 0)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def draw_anchors(
    supervised_spans: Sequence[Sequence[int]] | np.ndarray, num_anchors: int, seed: int, epoch: int, document: int
) -> np.ndarray:
    """Draws `min(num_anchors, valid)` anchors of a document without replacement.

    They are the first ones of a permutation drawn from (seed, epoch, document) alone: a smaller `num_anchors` gives a
    subset.

    Args:
        supervised_spans: As in [`valid_anchors`].
        num_anchors: anchors wanted (the paper's number is 512).
        seed, epoch: the run's seed; every epoch draws anew.
        document: the document's index in the data set.

    Returns:
        int64 array of positions in the document, ascending.
    """
    valid = valid_anchors(supervised_spans)
    order = seeded_permutation(len(valid), document_seed(seed, epoch, document, "anchors"))
    return np.sort(valid[order[:num_anchors]])


def shorten_draws(draws: np.ndarray, cap: int) -> np.ndarray:
    """Cuts the numbers of anchors per document to `cap` in all, in proportion, each keeping one where possible."""
    if draws.sum() <= cap:
        return draws
    counts = np.zeros_like(draws)
    if np.count_nonzero(draws) >= cap:
        counts[np.argsort(-draws, kind="stable")[:cap]] = 1
        return counts
    shared = draws > 0
    left = cap
    # A document whose share is less than one keeps one anchor; what is left is shared out among the others.
    while (below_one := shared & (draws * left < draws[shared].sum())).any():
        counts[below_one] = 1
        left -= int(np.count_nonzero(below_one))
        shared &= ~below_one
    shares = np.where(shared, draws * left, 0)
    total = draws[shared].sum()
    counts += shares // total
    largest_remainders = np.argsort(-(shares % total), kind="stable")
    counts[largest_remainders[: cap - counts.sum()]] += 1
    return counts


# --- Whether documents can be learned from: their token ids, their supervised spans and the length of their answers.


def check_documents(documents: Documents, block_size: int) -> None:
    """Raises if no document has a valid anchor; warns if the answers are too short to fill half of the blocks.

    Raises:
        ValueError: nothing to learn from, token ids or spans that are not whole numbers, or a span outside its
            document, unsorted or overlapping.
    """
    _check_types(documents)
    spans, owners = document_spans(documents)
    _check_spans(spans, owners, document_lengths(documents)[owners])
    share = share_of_countable_slots(documents, block_size)
    if share == 0.0:
        raise ValueError(
            f"None of the {len(documents)} documents has two neighbouring supervised tokens: there is nothing to "
            "learn from. Check that the conversations have answers and that max_length does not cut them all off."
        )
    if share < 0.5:
        logger.warning(
            f"Only {share:.1%} of the drafted slots can ever count: the answers are shorter than the block of "
            f"{block_size}. A smaller block_size trains on the same tokens for less."
        )


def _check_types(documents: Documents) -> None:
    """Raises for token ids, or numbers of spans, that are null, text or fractions."""
    if isinstance(documents, datasets.Dataset):
        if not any(_has_null(documents, name) for name in DOCUMENT_COLUMNS):
            return
        documents = documents.with_format(None)
    for index, document in enumerate(documents):
        spans = [number for span in listed(document["supervised_spans"]) for number in listed(span)]
        _whole_numbers(document["input_ids"], f"Document {index} has input_ids")
        _whole_numbers(spans, f"Document {index} has supervised_spans")


def _whole_numbers(numbers: Any, whose: str) -> np.ndarray:
    """A list of whole numbers as an array; refuses anything else, which would be rounded or read as something else."""
    array = np.asarray(listed(numbers))
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise ValueError(f"{whose} of type {array.dtype}, {array.ndim} deep, expected a list of whole numbers.")
    return array.astype(np.int64)


def _has_null(documents: datasets.Dataset, name: str) -> bool:
    """Whether a number of a stored column is null; refuses a column of another type."""
    column, _ = arrow_column(documents, name)
    kind, depth, expected = column.type, 0, DOCUMENT_COLUMNS.index(name) + 1
    while pa.types.is_nested(kind) and kind.num_fields == 1:
        kind, depth = kind.field(0).type, depth + 1
    # Where no document has a span, Arrow does not know what a span is.
    if not (pa.types.is_integer(kind) and depth == expected) and not (pa.types.is_null(kind) and depth <= expected):
        raise ValueError(f"The data set has {name} of the type {column.type}, expected lists of whole numbers.")
    for _ in range(depth):
        column = pc.list_flatten(column)
    return column.null_count > 0


def _check_spans(spans: np.ndarray, owners: np.ndarray, lengths: np.ndarray) -> None:
    """Raises for the first span [S, 2] that is not within its document's tokens [S] and behind the span before."""
    earliest = np.zeros(len(spans), dtype=np.int64)
    earliest[1:] = np.where(owners[1:] == owners[:-1], spans[:-1, 1], 0)
    faults = (spans[:, 0] < earliest) | (spans[:, 1] < spans[:, 0]) | (spans[:, 1] > lengths)
    if faults.any():
        fault = int(faults.argmax())
        raise ValueError(
            f"Document {owners[fault]} has the supervised span {spans[fault].tolist()}, expected one from "
            f"{earliest[fault]} on within its {lengths[fault]} tokens: cut, sort and merge the spans."
        )


def check_token_ids(documents: Documents, embedding_rows: int, mask_token_id: int) -> None:
    """Refuse ids that the target's embedding does not have, and the mask token.

    Raises:
        ValueError: Naming the first document with such an id.
    """
    first = 0
    for tokens, lengths in _token_batches(documents):
        faults = np.flatnonzero((tokens < 0) | (tokens >= embedding_rows) | (tokens == mask_token_id))
        if len(faults):
            document = first + int(np.searchsorted(np.cumsum(lengths), faults[0], side="right"))
            if tokens[faults[0]] == mask_token_id:
                raise ValueError(
                    f"mask_token_id={mask_token_id} occurs in the input_ids of document {document}, where it would be "
                    "taken for a slot to draft. Leave such documents out; a new drafter can have another mask token."
                )
            raise ValueError(
                f"Document {document} holds the token id {tokens[faults[0]]}, which is outside the target's embedding "
                f"of {embedding_rows} rows: the data was made with another tokenizer. Tokenise it with the target's."
            )
        first += len(lengths)


def _token_batches(documents: Documents) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(all token ids of a batch of documents, length of each)."""
    if isinstance(documents, datasets.Dataset):
        # Arrow holds the ids of many documents in one array: no Python list is made.
        for table in documents.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=1000):
            for chunk in table["input_ids"].chunks:
                yield chunk.flatten().to_numpy(), pc.list_value_length(chunk).to_numpy()
    else:
        for document in documents:
            yield np.asarray(document["input_ids"]), np.array([len(document["input_ids"])])


# --- Rows to tensors: their anchors, and which tokens the blocks learn.


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
        ValueError: a row longer than `row_length`, an empty document, or a span outside its document, unsorted or
            overlapping.
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
                f"row_length={num_tokens}: pack and collate with the same row_length."
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
        token_ids = [
            _whole_numbers(d["input_ids"], f"Document {d['document']} has input_ids") for d in row["documents"]
        ]
        lengths = np.array([len(ids) for ids in token_ids])
        if not lengths.all():
            raise ValueError(f"Document {documents[lengths.argmin()]} has no input_ids: drop empty documents.")
        offsets = np.cumsum(lengths) - lengths
        spans = [as_spans(d["supervised_spans"], f"Document {d['document']}") for d in row["documents"]]
        owners = np.repeat(np.arange(len(spans)), [len(local) for local in spans])
        joined = np.concatenate(spans)
        _check_spans(joined, np.array(documents)[owners], lengths[owners])
        counts = self._num_anchors_per_document(spans, int(lengths.sum()))
        anchors = [
            draw_anchors(local, count, self.seed, epoch, document) + offset
            for local, count, document, offset in zip(spans, counts, documents, offsets, strict=True)
        ]
        input_ids, anchor_positions = np.concatenate(token_ids), np.concatenate(anchors)
        starts, stops, _ = supervised_runs(joined + offsets[owners, None], owners)
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
                f"The {len(spans)} documents of a row draw {draws.sum()} anchors and keep {cap} in all; other rows "
                "may be cut too. Raise max_anchors_per_row to keep more, or lower num_anchors to draw fewer."
            )
        return shorten_draws(draws, cap)

    def _labels(self, input_ids: np.ndarray, anchors: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The labels [N, b] of a row's anchors, each of which lies in one of the supervised stretches."""
        run_stops = stops[np.searchsorted(starts, anchors, side="right") - 1]
        slots = np.arange(self.block_size)
        positions = anchors[:, None] + slots
        counts = (slots > 0) & (positions < run_stops[:, None])
        return np.where(counts, input_ids[np.minimum(positions, len(input_ids) - 1)], IGNORE_INDEX)
