# SPDX-License-Identifier: Apache-2.0
"""How the documents of a batch share the forwards of the target: in one packed row, or in rows of similar length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch


# Documents run through the target together while padding stays below this share of the tokens.
MAX_PADDING = 0.05
# Tokens of one forward of the target, so that its memory does not grow with the batch.
MAX_FORWARD_TOKENS = 16384
# A packed row is a multiple of this long: few shapes to compile, and products of sizes that tensor cores like.
ROW_MULTIPLE = 128
# Tokens per chunk of the gated delta rule's kernels.
CHUNK_SIZE = 64


class Piece(NamedTuple):
    """A document's place in the batch: its row, first token and length in tokens."""

    row: int
    start: int
    length: int


def document_pieces(document_lengths: Sequence[Sequence[int]], width: int) -> list[Piece]:
    """Places of all documents of packed rows.

    Args:
        document_lengths: Lengths in tokens of the documents of each row, in order.
        width: Tokens of a row.

    Raises:
        ValueError: When a row's documents are longer than the row.
    """
    pieces = []
    for row, lengths in enumerate(document_lengths):
        if sum(lengths) > width:
            raise ValueError(
                f"Row {row} holds documents of {sum(lengths)} tokens together but is {width} tokens wide: the lengths "
                "belong to other rows. Pass the document_lengths of this batch."
            )
        start = 0
        for length in lengths:
            if length > 0:
                pieces.append(Piece(row, start, length))
            start += length
    return pieces


def groups_of_similar_length(pieces: Iterable[Piece], max_tokens: int = MAX_FORWARD_TOKENS) -> Iterator[list[Piece]]:
    """Documents by falling length, in groups that one right-padded forward takes.

    Args:
        pieces: The documents.
        max_tokens: Tokens of a group, padding included; a longer document makes a group of its own.

    Returns:
        Groups whose padding is below `MAX_PADDING` of their tokens.
    """

    def fits(longest: int, count: int, tokens: int) -> bool:
        padded = longest * count
        return padded <= max_tokens and padded * (1 - MAX_PADDING) <= tokens

    return _groups(sorted(pieces, key=lambda p: -p.length), fits)


def groups_in_order(pieces: Iterable[Piece], max_tokens: int = MAX_FORWARD_TOKENS) -> Iterator[list[Piece]]:
    """Documents in their order, in groups of at most `max_tokens` tokens that one packed forward takes."""
    return _groups(pieces, lambda first, count, tokens: tokens <= max_tokens)


def _groups(pieces: Iterable[Piece], fits: Callable[[int, int, int], bool]) -> Iterator[list[Piece]]:
    """Documents in their order, a new group wherever one more does not fit: its first length, documents and tokens."""
    group: list[Piece] = []
    tokens = 0
    for piece in pieces:
        if group and not fits(group[0].length, len(group) + 1, tokens + piece.length):
            yield group
            group, tokens = [], 0
        group.append(piece)
        tokens += piece.length
    if group:
        yield group


class PackedRow(NamedTuple):
    """One packed row of N tokens: the documents one after another, then padding that counts as a last document.

    Args:
        lengths: Lengths in tokens of the documents and of the padding; their sum is N.
        num_tokens: Tokens that belong to documents.
        indices (`torch.Tensor` of shape `[N]`): Where each token lies in the flattened batch.
        position_ids (`torch.Tensor` of shape `[1, N]`): Positions, restarting with each document.
        boundaries (`torch.Tensor` of shape `[len(lengths) + 1]`): First token of each document, and N.
        chunks (`torch.Tensor` of shape `[C, 2]`): Document and number in it of each chunk of `CHUNK_SIZE` tokens.
    """

    lengths: list[int]
    num_tokens: int
    indices: torch.Tensor
    position_ids: torch.Tensor
    boundaries: torch.Tensor
    chunks: torch.Tensor


def packed_row(pieces: Sequence[Piece], width: int, full_length: int, device: torch.device) -> PackedRow:
    """Pack documents into one row; everything is made on the host and copied without waiting for the device.

    Args:
        pieces: The documents.
        width: Tokens of a row of the batch.
        full_length: Tokens of a forward of all rows; the packed row gets this length wherever the padding allows it,
            so that most forwards have one shape.
        device: Where the target runs.
    """
    num_tokens = sum(piece.length for piece in pieces)
    full = _round_up(full_length)
    length = full if (1 - MAX_PADDING) * full <= num_tokens <= full else _round_up(num_tokens)
    lengths = [piece.length for piece in pieces]
    if length > num_tokens:
        lengths.append(length - num_tokens)
    firsts = [piece.row * width + piece.start for piece in pieces] + [0] * (length > num_tokens)
    sizes, starts = torch.tensor(lengths), torch.tensor(firsts)
    boundaries = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    positions = torch.arange(length) - boundaries[:-1].repeat_interleave(sizes)
    indices = starts.repeat_interleave(sizes) + positions
    indices[num_tokens:] = indices[0]
    counts = (sizes + CHUNK_SIZE - 1) // CHUNK_SIZE
    documents = torch.arange(len(lengths)).repeat_interleave(counts)
    numbers = torch.arange(len(documents)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    tensors = (indices, positions[None], boundaries, torch.stack([documents, numbers], dim=1))
    return PackedRow(lengths, num_tokens, *(_copied(tensor, device) for tensor in tensors))


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Only a copy from pinned memory leaves the host free to go on."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _round_up(length: int) -> int:
    return -(-length // ROW_MULTIPLE) * ROW_MULTIPLE
