# SPDX-License-Identifier: Apache-2.0
"""From the turns of a conversation to documents: what is encoded by itself, what is one document, where it is cut."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Piece:
    """Text or ids that are encoded by themselves."""

    content: str | list[int]
    is_supervised: bool
    # False for what begins a document, and for text that stands where special tokens are only spoken of.
    is_apart: bool = True


@dataclass(frozen=True)
class Turn:
    """One answer: the prompt's text, the answer's pieces, and what text the template put before the message's own."""

    prompt: str
    pieces: list[Piece]
    # None where the answer's text does not tell its ids: then later turns cannot go on from it.
    answer: str | None
    is_truncated: bool = False
    template_text: str = ""


@dataclass(frozen=True)
class Draft:
    """One document before it is encoded."""

    pieces: list[Piece]
    is_truncated: bool


@dataclass(frozen=True)
class Document:
    """Token ids, int32 [T], and the half-open spans of them that the target generated."""

    input_ids: np.ndarray
    supervised_spans: list[list[int]]
    is_truncated: bool = False

    @property
    def num_supervised(self) -> int:
        return sum(stop - start for start, stop in self.supervised_spans)


def drafts_of(turns: Sequence[Turn], merge: bool) -> list[Draft]:
    """One draft per turn, or, with `merge`, one for each run of turns whose prompts go on from the turn before."""
    drafts: list[Draft] = []
    # The text of the last draft, up to which the next prompt must agree with it.
    so_far: str | None = None
    for turn in turns:
        if merge and so_far is not None and turn.prompt.startswith(so_far):
            between = turn.prompt[len(so_far) :]
            pieces = [*drafts.pop().pieces, Piece(between, False), *turn.pieces]
        else:
            pieces = [Piece(turn.prompt, False, is_apart=False), *turn.pieces]
        drafts.append(Draft(pieces, turn.is_truncated))
        so_far = None if turn.answer is None else turn.prompt + turn.answer
    return drafts


def cut(document: Document, max_length: int | None) -> Document | None:
    """The first `max_length` tokens with what is supervised of them, or None where that is nothing."""
    if max_length is None or len(document.input_ids) <= max_length:
        return document if document.supervised_spans else None
    spans = [[start, min(stop, max_length)] for start, stop in document.supervised_spans if start < max_length]
    return Document(document.input_ids[:max_length], spans, True) if spans else None


def windows(document: Document, length: int) -> list[Document]:
    """Documents that together supervise every token once: `length` more tokens each, behind all that precedes them."""
    documents = []
    total = len(document.input_ids)
    for begin in range(0, total, length):
        end = min(begin + length, total)
        spans = [[max(a, begin), min(b, end)] for a, b in document.supervised_spans if a < end and b > begin]
        if spans:
            documents.append(Document(document.input_ids[:end], spans, document.is_truncated or end < total))
    return documents
