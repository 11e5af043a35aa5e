# SPDX-License-Identifier: Apache-2.0
"""Documents to rows: whole documents share rows of a fixed length, and the rows are reshuffled every epoch.

A document is `{"input_ids": [...], "supervised_spans": [[start, stop], ...]}`: token ids, and the half-open,
ascending, disjoint ranges of them that the target wrote. Shapes: M documents, S spans in all of them.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch


Documents: TypeAlias = Sequence[dict[str, Any]] | datasets.Dataset

DOCUMENT_COLUMNS = ["input_ids", "supervised_spans"]


def seeded_permutation(size: int, seed: int | Sequence[int]) -> np.ndarray:
    """A uniform permutation of `range(size)` that depends on `seed` (one or more non-negative ints) alone."""
    # NumPy promises that the raw stream of a bit generator never changes; `Generator.permutation` has no such promise.
    return np.argsort(np.random.PCG64(seed).random_raw(size), kind="stable")


def listed(values: Any) -> Any:
    """What is in a list; nothing in the null that Arrow may have in its place."""
    return () if values is None else values


def arrow_column(documents: datasets.Dataset, name: str) -> tuple[pa.ChunkedArray, np.ndarray | None]:
    """A stored column, memory-mapped where the data set is, and the stored row of each document (None: the same)."""
    if name not in documents.column_names:
        raise ValueError(
            f"The documents have the columns {documents.column_names}, expected {DOCUMENT_COLUMNS}: tokenise the "
            "conversations first (`tokenize_completions`)."
        )
    # `select`, `shuffle` and `train_test_split` leave the stored rows alone and keep an order in this private table;
    # only with it can lengths be had without reading every token.
    order = documents._indices
    return documents.data.column(name), None if order is None else order.column(0).to_numpy()


def document_lengths(documents: Documents) -> np.ndarray:
    """The number of tokens of each document, int64 [M], without reading the tokens of a `datasets.Dataset`."""
    if not isinstance(documents, datasets.Dataset):
        return np.array([len(listed(document["input_ids"])) for document in documents], dtype=np.int64)
    column, order = arrow_column(documents, "input_ids")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths if order is None else lengths[order]


def document_spans(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """The supervised spans of all documents, int64 [S, 2], and the index of each span's document, int64 [S]."""
    if isinstance(documents, datasets.Dataset):
        column, order = arrow_column(documents, "supervised_spans")
        column = column if order is None else column.take(pa.array(order))
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        # Where no document has a span, Arrow does not know what a span is.
        spans = pc.list_flatten(column)
        spans = spans.cast(pa.list_(pa.int64())) if pa.types.is_null(spans.type) else spans
        sizes = pc.fill_null(pc.list_value_length(spans), 0).to_numpy()
        numbers = pc.list_flatten(spans).to_numpy()
    else:
        per_document = [listed(document["supervised_spans"]) for document in documents]
        pairs = [listed(span) for spans in per_document for span in spans]
        counts = np.array([len(spans) for spans in per_document], dtype=np.int64)
        sizes = np.array([len(pair) for pair in pairs], dtype=np.int64)
        numbers = np.array([number for pair in pairs for number in pair], dtype=np.int64)
    owners = np.repeat(np.arange(len(counts)), counts)
    if (sizes != 2).any():
        raise ValueError(
            f"Document {owners[(sizes != 2).argmax()]} has supervised_spans of which one is not a [start, stop] pair."
        )
    return numbers.astype(np.int64).reshape(-1, 2), owners


def with_sources(documents: datasets.Dataset, chats: Sequence[dict[str, Any]] | datasets.Dataset) -> datasets.Dataset:
    """Documents with the `source` of the chat that each was made from, by their `row`."""
    sources = [chat.get("source") for chat in chats]
    if "source" in documents.column_names or not any(sources):
        return documents
    return documents.add_column("source", [sources[row] for row in documents["row"]])


def _check_lengths(lengths: np.ndarray, row_length: int) -> None:
    if row_length < 1:
        raise ValueError(f"`row_length` is {row_length}, expected a positive number of tokens.")
    if (lengths < 1).any():
        raise ValueError(f"Document {lengths.argmin()} has no tokens: drop empty documents before packing.")
    if (lengths > row_length).any():
        document = (lengths > row_length).argmax()
        raise ValueError(
            f"Document {document} has {lengths[document]} tokens, and a row has row_length={row_length}: raise it, or "
            "tokenise with a max_length no larger than it."
        )


def pack_documents(lengths: Sequence[int] | np.ndarray, row_length: int) -> list[list[int]]:
    """Packs whole documents into rows by best fit, longest first; the result depends on the arguments alone.

    Args:
        lengths: tokens of each document [M].
        row_length: tokens that a row holds.

    Returns:
        The indices of the documents of each row.

    Raises:
        ValueError: a document is empty or longer than a row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    _check_lengths(lengths, row_length)
    rows: list[list[int]] = []
    # The rows that have a certain space left, and those spaces: there are at most `row_length` of them, so that
    # finding the tightest one stays cheap whatever the number of rows.
    rows_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        tightest = bisect_left(spaces, length)
        if tightest < len(spaces):
            space = spaces[tightest]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del rows_by_space[space], spaces[tightest]
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(document)
        left = space - length
        if left not in rows_by_space:
            rows_by_space[left] = []
            insort(spaces, left)
        rows_by_space[left].append(row)
    return rows


class PackedDataset(torch.utils.data.Dataset):
    """Rows of whole documents, as the data collator takes them.

    Which documents share a row depends on their lengths, `seed` and the epoch alone: documents of one length change
    places from epoch to epoch, so the number of rows stays the same. An item is `{"epoch": int, "documents":
    [{"document": int, "input_ids": [...], "supervised_spans": [...]}, ...]}`; `document` is the index in `documents`.

    Args:
        documents: dicts, or a `datasets.Dataset`, which stays on disk. A `source` of each is kept for reports.
        row_length: tokens that a row holds.
        seed: with the epoch, decides which of several documents of one length goes into which row.

    Raises:
        ValueError: no documents, or one that is empty or longer than a row.
    """

    def __init__(self, documents: Documents, row_length: int, seed: int = 0):
        if len(documents) == 0:
            raise ValueError("There are no documents: check the data file and its filters.")
        lengths = document_lengths(documents)
        _check_lengths(lengths, row_length)
        self._with_sources = documents
        if isinstance(documents, datasets.Dataset):
            documents = documents.select_columns(DOCUMENT_COLUMNS).with_format(None)
        self.documents = documents
        self.row_length = row_length
        self.seed = seed
        self.num_tokens = int(lengths.sum())
        # Arrays, not lists: worker processes share them without copying. Places are numbered in packing order, longest
        # first; an epoch says which document takes which place.
        longest_first = np.argsort(-lengths, kind="stable")
        self._lengths = lengths
        rows = pack_documents(lengths[longest_first], row_length)
        self._places = np.concatenate([np.array(row) for row in rows])
        self._row_starts = np.cumsum([0] + [len(row) for row in rows])
        self._epoch, self._members = -1, self._places

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    @property
    def sources(self) -> list[str] | None:
        """What each document's `source` says it comes from, "other" where it says nothing; None where none does."""
        documents = self._with_sources
        if isinstance(documents, datasets.Dataset):
            sources = list(documents["source"]) if "source" in documents.column_names else []
        else:
            sources = [document.get("source") for document in documents]
        return [str(source or "other") for source in sources] if any(sources) else None

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        epoch, row = index if isinstance(index, tuple) else (0, index)
        if not 0 <= row < len(self):
            raise IndexError(f"Row {row} does not exist: there are {len(self)} rows, from 0 to {len(self) - 1}.")
        members = self._members_of(epoch)[self._row_starts[row] : self._row_starts[row + 1]].tolist()
        items = [(member, self.documents[member]) for member in members]
        documents = [{"document": i} | {name: item[name] for name in DOCUMENT_COLUMNS} for i, item in items]
        return {"epoch": epoch, "documents": documents}

    def largest_row_sum(self, values: np.ndarray) -> int:
        """A bound, in every epoch, on the sum of `values` (one per document, [M], >= 0) of a row's documents."""
        # Documents of one length change places, so each place counts as the largest value of its length.
        largest = np.zeros(self.row_length + 1, dtype=np.int64)
        np.maximum.at(largest, self._lengths, values)
        longest_first = np.sort(self._lengths)[::-1]
        return int(np.add.reduceat(largest[longest_first[self._places]], self._row_starts[:-1]).max())

    def _members_of(self, epoch: int) -> np.ndarray:
        """The documents of all rows in one epoch, one row after the other."""
        if epoch != self._epoch:
            # Files often hold related chats side by side, and a fixed mix would show the same documents together in
            # every epoch: the shuffle decides among those of one length.
            shuffled = seeded_permutation(len(self._lengths), [self.seed, epoch])
            longest_first = shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
            self._epoch, self._members = epoch, longest_first[self._places]
        return self._members


class RowSampler(torch.utils.data.Sampler[tuple[int, int]]):
    """Yields `(epoch, row)` for every row, in an order that depends on (seed, epoch) alone.

    The epoch travels with the row, so a worker that fetches ahead draws the anchors of the epoch that the row is for.

    Args:
        num_rows: rows of the `PackedDataset`.
        seed: a non-negative int.
    """

    def __init__(self, num_rows: int, seed: int = 0):
        self.num_rows, self.seed, self.epoch = num_rows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for row in seeded_permutation(self.num_rows, [self.seed, self.epoch]).tolist():
            yield self.epoch, row
