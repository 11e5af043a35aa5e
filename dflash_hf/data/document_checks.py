# SPDX-License-Identifier: Apache-2.0
"""Whether documents can be learned from: their token ids, their supervised spans and the length of their answers."""

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers.utils import logging

from .anchors import supervised_runs
from .packing import DOCUMENT_COLUMNS, Documents, document_lengths, document_spans


logger = logging.get_logger(__name__)


def share_of_countable_slots(documents: Documents, block_size: int) -> float:
    """The share of the drafted slots (1 to b-1) of all valid anchors that have a label: 1.0 for endless answers.

    Args:
        documents: documents as dicts or as a `datasets.Dataset`.
        block_size: slots of a block, the anchor's included.
    """
    spans, owners = document_spans(documents)
    starts, stops = supervised_runs(spans, owners)
    # The anchors of a stretch of m+1 tokens have 1, 2, .., m tokens ahead of them, of which a block takes up to b-1.
    anchors, drafted = np.maximum(stops - starts - 1, 0), block_size - 1
    cut = np.minimum(anchors, drafted)
    countable = cut * (cut + 1) // 2 + (anchors - cut) * drafted
    return float(countable.sum() / max(1, drafted * anchors.sum()))


def check_documents(documents: Documents, block_size: int) -> None:
    """Raises if no document has a valid anchor; warns if the answers are too short to fill half of the blocks.

    Args:
        documents: documents as dicts or as a `datasets.Dataset`.
        block_size: slots of a block, the anchor's included.

    Raises:
        ValueError: nothing to learn from, token ids or spans that are no whole numbers, or a span outside its
            document, unsorted or overlapping.
    """
    check_types(documents)
    spans, owners = document_spans(documents)
    check_spans(spans, owners, document_lengths(documents)[owners])
    share = share_of_countable_slots(documents, block_size)
    if share == 0.0:
        raise ValueError(
            f"None of the {len(documents)} documents has two neighbouring supervised tokens, so there is nothing to "
            "learn from. Check that the conversations have answers and that max_length does not cut them all off."
        )
    if share < 0.5:
        logger.warning(
            f"Only {share:.1%} of the drafted slots can ever count: the answers are shorter than the block of "
            f"{block_size}. A smaller block_size trains on the same tokens for less."
        )


def check_types(documents: Documents) -> None:
    """Raises for token ids, or numbers of spans, that are null, text or fractions.

    Args:
        documents: documents as dicts or as a `datasets.Dataset`.
    """
    if isinstance(documents, datasets.Dataset):
        for name in set(DOCUMENT_COLUMNS) & set(documents.column_names):
            _check_column(documents, name)
        return
    for index, document in enumerate(documents):
        spans = [number for span in _items(document["supervised_spans"]) for number in _items(span)]
        for name, numbers in (("input_ids", _items(document["input_ids"])), ("supervised_spans", spans)):
            array = np.asarray(numbers)
            if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
                _refuse_type(f"Document {index}", name, f"{array.dtype}, {array.ndim} deep")


def _items(values: Any) -> Any:
    """What is in a list; nothing in the null that Arrow may have in its place."""
    return () if values is None else values


def _check_column(documents: datasets.Dataset, name: str) -> None:
    column = documents.data.column(name)
    kind, depth = column.type, 0
    while pa.types.is_nested(kind) and kind.num_fields == 1:
        kind, depth = kind.field(0).type, depth + 1
    expected = DOCUMENT_COLUMNS.index(name) + 1
    # Where no document has a span, Arrow does not know what a span is.
    if not (pa.types.is_integer(kind) and depth == expected) and not (pa.types.is_null(kind) and depth <= expected):
        _refuse_type("The data set", name, column.type)
    flat = column
    for _ in range(depth):
        flat = pc.list_flatten(flat)
    if flat.null_count:
        for index, values in enumerate(documents.with_format(None)[name]):
            numbers = values if expected == 1 else [number for span in _items(values) for number in _items(span)]
            if None in _items(numbers):
                _refuse_type(f"Document {index}", name, "null")


def _refuse_type(whose: str, name: str, kind: Any) -> None:
    raise ValueError(
        f"{whose} has {name} of the type {kind}, expected lists of whole numbers: token ids, and half-open [start, "
        "stop] pairs of their indices. Tokenise again."
    )


def check_spans(spans: np.ndarray, owners: np.ndarray, lengths: np.ndarray) -> None:
    """Raises for the first span [S, 2] that is not within its document's tokens [S] and behind the span before."""
    earliest = np.zeros(len(spans), dtype=np.int64)
    earliest[1:] = np.where(owners[1:] == owners[:-1], spans[:-1, 1], 0)
    faults = (spans[:, 0] < earliest) | (spans[:, 1] < spans[:, 0]) | (spans[:, 1] > lengths)
    if faults.any():
        fault = int(faults.argmax())
        raise ValueError(
            f"Document {owners[fault]} has the supervised span {spans[fault].tolist()}, expected one from "
            f"{earliest[fault]} on within its {lengths[fault]} tokens: spans are half-open, ascending and disjoint. "
            "Cut the spans where the token ids are cut, and sort and merge them."
        )


def check_token_ids(documents: Documents, embedding_rows: int, mask_token_id: int) -> None:
    """Refuse ids that the target's embedding does not have, and the mask token.

    Args:
        documents: Documents with `input_ids`.
        embedding_rows: Rows of the target's embedding.
        mask_token_id: The drafter's mask token.

    Raises:
        ValueError: Naming the first document with such an id.
    """
    first = 0
    for tokens, lengths in _token_batches(documents):
        outside = np.flatnonzero((tokens < 0) | (tokens >= embedding_rows))
        if len(outside):
            raise ValueError(
                f"Document {first + _owner(outside[0], lengths)} holds the token id {tokens[outside[0]]}, which is "
                f"outside the target's embedding of {embedding_rows} rows: the data was made with another tokenizer. "
                "Tokenise it with the target's."
            )
        masks = np.flatnonzero(tokens == mask_token_id)
        if len(masks):
            raise ValueError(
                f"mask_token_id={mask_token_id} occurs in the input_ids of document "
                f"{first + _owner(masks[0], lengths)}: there the drafter would take a known token for a slot to be "
                "drafted. Leave such documents out; for a new drafter, choose a token that texts do not use."
            )
        first += len(lengths)


def _owner(place: int, lengths: np.ndarray) -> int:
    """The document of a batch that a place in its joined token ids lies in."""
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))


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


__all__ = ["check_documents", "check_spans", "check_token_ids", "share_of_countable_slots"]
