# SPDX-License-Identifier: Apache-2.0
"""Whether the token ids of documents are those that target and drafter know."""

from collections.abc import Iterator

import datasets
import numpy as np
import pyarrow.compute as pc

from .packing import Documents


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


__all__ = ["check_token_ids"]
