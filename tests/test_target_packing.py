# SPDX-License-Identifier: Apache-2.0
"""How documents share forwards: little padding, bounded tokens, and rows whose borders are right."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_hf.packed_targets import (
    CHUNK_SIZE,
    MAX_PADDING,
    ROW_MULTIPLE,
    Piece,
    document_pieces,
    groups_in_order,
    groups_of_similar_length,
    packed_row,
)


ROWS = st.lists(st.lists(st.integers(0, 300), max_size=8), min_size=1, max_size=5)
CPU = torch.device("cpu")


@given(ROWS)
@settings(deadline=None)
def test_pieces_are_the_documents_where_they_lie(document_lengths):
    width = max(max(map(sum, document_lengths)), 1)
    pieces = document_pieces(document_lengths, width)
    covered = [(p.row, t) for p in pieces for t in range(p.start, p.start + p.length)]
    assert covered == [(row, t) for row, lengths in enumerate(document_lengths) for t in range(sum(lengths))]
    assert [p.length for p in pieces] == [n for lengths in document_lengths for n in lengths if n]


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 20000))
@settings(deadline=None, max_examples=300)
def test_padded_groups_hold_each_document_once_with_little_padding_and_bounded_tokens(lengths, max_tokens):
    pieces = [Piece(i, 0, n) for i, n in enumerate(lengths)]
    groups = list(groups_of_similar_length(pieces, max_tokens))
    assert sorted(p for group in groups for p in group) == sorted(pieces)
    for group in groups:
        padded = len(group) * group[0].length
        assert padded == len(group) * max(p.length for p in group)
        assert padded - sum(p.length for p in group) <= MAX_PADDING * padded
        assert padded <= max_tokens or len(group) == 1
    # Groups are no smaller than the bounds ask for: no document of a group would have fitted into the one before.
    for before, after in pairwise(groups):
        padded = (len(before) + 1) * before[0].length
        tokens = sum(p.length for p in before) + after[0].length
        assert padded > max_tokens or padded - tokens > MAX_PADDING * padded - 1e-6


def test_documents_of_one_length_fill_a_group_up_to_its_tokens():
    pieces = [Piece(i, 0, 100) for i in range(7)]
    assert [len(group) for group in groups_of_similar_length(pieces, max_tokens=300)] == [3, 3, 1]
    assert [len(group) for group in groups_of_similar_length(pieces)] == [7]


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 20000))
@settings(deadline=None)
def test_packed_groups_hold_the_documents_in_order_with_bounded_tokens(lengths, max_tokens):
    pieces = [Piece(i, 0, n) for i, n in enumerate(lengths)]
    groups = list(groups_in_order(pieces, max_tokens))
    assert [p for group in groups for p in group] == pieces
    assert all(sum(p.length for p in group) <= max_tokens or len(group) == 1 for group in groups)
    for before, after in pairwise(groups):
        assert sum(p.length for p in before) + after[0].length > max_tokens


@given(ROWS.filter(lambda rows: any(map(sum, rows))), st.integers(0, 40))
@settings(deadline=None)
def test_a_packed_row_finds_every_token_its_position_and_its_chunk(document_lengths, room):
    width = max(map(sum, document_lengths)) + room
    pieces = document_pieces(document_lengths, width)
    row = packed_row(pieces, width, len(document_lengths) * width, CPU)
    length = len(row.indices)
    assert length % ROW_MULTIPLE == 0 and sum(row.lengths) == length
    assert row.num_tokens == sum(p.length for p in pieces)
    places = [p.row * width + p.start + t for p in pieces for t in range(p.length)]
    assert row.indices[: row.num_tokens].tolist() == places
    assert row.position_ids.tolist() == [[t for n in row.lengths for t in range(n)]]
    borders = row.boundaries.tolist()
    assert borders == [sum(row.lengths[:i]) for i in range(len(row.lengths) + 1)]
    chunks = [[d, c] for d, n in enumerate(row.lengths) for c in range(-(-n // CHUNK_SIZE))]
    assert row.chunks.tolist() == chunks
    # Padding is read from a place of the batch, and is a document of its own.
    assert row.indices.min() >= 0 and row.indices.max() < len(document_lengths) * width
    assert row.lengths[: len(pieces)] == [p.length for p in pieces] and len(row.lengths) - len(pieces) in (0, 1)


@pytest.mark.parametrize(
    ("tokens", "full", "length"),
    [
        (8192, 8192, 8192),
        (7800, 8192, 8192),
        (7700, 8192, 7808),
        (1, 8192, 128),
        (4090, 4090, 4096),
        (9000, 8192, 9088),
    ],
)
def test_nearly_full_rows_have_one_shape(tokens, full, length):
    assert len(packed_row([Piece(0, 0, tokens)], tokens, full, CPU).indices) == length
