# SPDX-License-Identifier: Apache-2.0
"""Which positions of a document may be anchors, and which of them an epoch draws.

Everything random depends on (seed, epoch, document) alone, so that workers, batches, ranks and a resumed run agree.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from .packing import Documents, document_spans, seeded_permutation


def document_seed(seed: int, epoch: int, document: int, purpose: str) -> int:
    """A 63-bit seed for one use (`purpose`: "anchors", "noise") of one document in one epoch, the same everywhere."""
    digest = hashlib.blake2b(f"{purpose} {seed} {epoch} {document}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def as_spans(supervised_spans: Sequence[Sequence[int]] | np.ndarray | None, name: str = "A document") -> np.ndarray:
    """Spans as an array [S, 2]; null, as Arrow has it for a document without any, is none."""
    spans = np.asarray([] if supervised_spans is None else supervised_spans, dtype=np.int64)
    if spans.size and (spans.ndim != 2 or spans.shape[1] != 2):
        raise ValueError(
            f"{name} has supervised_spans of shape {spans.shape}, expected [S, 2]: half-open [start, stop] pairs, for "
            "example [[12, 40]]."
        )
    return spans.reshape(-1, 2)


def _opens_run(spans: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Whether each span [S, 2] does not continue the one before: touching spans of one document make one stretch."""
    opens = np.ones(len(spans), dtype=bool)
    opens[1:] = (spans[1:, 0] != spans[:-1, 1]) | (owners[1:] != owners[:-1])
    return opens


def supervised_runs(spans: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of the unbroken supervised stretches."""
    opens, closes = _opens_run(spans, owners), np.ones(len(spans), dtype=bool)
    closes[:-1] = opens[1:]
    return spans[opens, 0], spans[closes, 1]


def valid_anchors(supervised_spans: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
    """The positions of a document that may be anchors: those that are supervised and whose next token is too.

    Args:
        supervised_spans: half-open, ascending, disjoint [start, stop] pairs, in tokens from the document's start.

    Returns:
        int64 array of positions in the document, ascending.
    """
    spans = as_spans(supervised_spans)
    starts, stops = supervised_runs(spans, np.zeros(len(spans), dtype=np.int64))
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
        supervised_spans: half-open, ascending, disjoint [start, stop] pairs, in tokens from the document's start.
        num_anchors: anchors wanted (the paper's number is 512).
        seed: the run's seed.
        epoch: every epoch draws anew.
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


def num_valid_anchors(documents: Documents) -> np.ndarray:
    """The number of valid anchors of each document, int64 [M].

    Args:
        documents: documents as dicts or as a `datasets.Dataset`.
    """
    spans, owners = document_spans(documents)
    starts, stops = supervised_runs(spans, owners)
    per_run, run_owners = np.maximum(stops - starts - 1, 0), owners[_opens_run(spans, owners)]
    return np.bincount(run_owners, weights=per_run, minlength=len(documents)).astype(np.int64)


__all__ = [
    "as_spans",
    "document_seed",
    "draw_anchors",
    "num_valid_anchors",
    "shorten_draws",
    "supervised_runs",
    "valid_anchors",
]
