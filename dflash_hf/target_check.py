# SPDX-License-Identifier: Apache-2.0
"""The start-up check of a packed target: documents must not see each other, whatever the kernels do."""

from collections.abc import Callable, Sequence

import torch

from .target_dense import CannotPack
from .target_packing import MAX_FORWARD_TOKENS


# Two short documents that end within a chunk of the kernels and behind one.
CHECKED_LENGTHS = (70, 90)
# Fewest tokens of the checked row: kernels that tune themselves do so at the first call, for good.
FEWEST_TOKENS = 1024
# Largest relative difference, by the precision of the hidden states: two ways of rounding through all layers.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
LOW_PRECISION_TOLERANCE = 0.1

Reader = Callable[[torch.Tensor, Sequence[Sequence[int]]], torch.Tensor]


def packing_fault(packed: Reader, references: dict[str, Reader], vocab_size: int, tokens: int) -> str | None:
    """What is wrong with a packed path, by two short documents; None if it may be used.

    Args:
        packed: `context_hidden_states` on the packed path.
        references: `context_hidden_states` on paths to agree with, by what they are called.
        vocab_size: Ids to draw from.
        tokens: Tokens of the row to check with, a third document included: those of the batches to come, so that what
            is compiled or tuned now fits them; at least `FEWEST_TOKENS`, at most one forward's.
    """
    first, second = CHECKED_LENGTHS
    length = min(max(tokens, FEWEST_TOKENS), MAX_FORWARD_TOKENS)
    ids = torch.randint(0, vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    lengths = [[first, second, length - first - second]]
    try:
        features = packed(ids, lengths)[0, : first + second]
    except CannotPack as reason:
        return str(reason)
    tolerance = TOLERANCES.get(features.dtype, LOW_PRECISION_TOLERANCE)
    for name, reference in references.items():
        expected = reference(ids[:, : first + second], [[first, second]])[0]
        for document in (slice(0, first), slice(first, None)):
            error = _relative_error(features[document], expected[document])
            if not error <= tolerance:
                return f"features differ from {name} by {error:.2g} of their size, where {tolerance:g} is allowed"
    ids[0, :first] = (ids[0, :first] + 1) % vocab_size
    if not torch.equal(packed(ids, lengths)[0, first : first + second], features[first:]):
        return "a document's features change with those of the document before it"
    return None


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return ((actual.float() - expected).norm() / expected.norm()).item()
