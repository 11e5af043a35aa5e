# SPDX-License-Identifier: Apache-2.0
"""The start-up check of a packed target: documents must not see each other, whatever the kernels do."""

from collections.abc import Callable, Sequence

import torch

from .dense import CannotPack
from .packing import MAX_FORWARD_TOKENS


# Two short documents that end within a chunk of the kernels and behind one.
CHECKED_LENGTHS = (70, 90)
# Fewest tokens of the checked row: kernels that tune themselves do so at the first call, for good.
FEWEST_TOKENS = 1024
# Largest relative difference per layer up to a tap, by the precision of the hidden states. Two right ways of rounding
# differ by about a third of it; a layer that computes something else soon differs by far more.
TOLERANCES = {torch.float64: 1e-7, torch.float32: 2e-3}
LOW_PRECISION_TOLERANCE = 0.01

Reader = Callable[[torch.Tensor, Sequence[Sequence[int]]], torch.Tensor]


def packing_fault(
    packed: Reader, reference: Reader, target_layer_ids: Sequence[int], vocab_size: int, tokens: int
) -> str | None:
    """What is wrong with a packed path, by two short documents; None if it may be used.

    Args:
        packed: `context_hidden_states` on the packed path.
        reference: `context_hidden_states` of each document alone.
        target_layer_ids: Taps of both.
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
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        # A compiler that is missing, a kernel that it cannot make for this device, or a forward that takes no more
        # arguments than it names.
        return f"it does not run here ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    expected = reference(ids[:, : first + second], [[first, second]])[0]
    for document in (slice(0, first), slice(first, None)):
        difference = _difference(features[document], expected[document], target_layer_ids)
        if difference:
            return f"features differ from those of each document alone, {difference}"
    ids[0, :first] = (ids[0, :first] + 1) % vocab_size
    if not torch.equal(packed(ids, lengths)[0, first : first + second], features[first:]):
        return "a document's features change with those of the document before it"
    return None


def _difference(actual: torch.Tensor, expected: torch.Tensor, target_layer_ids: Sequence[int]) -> str | None:
    """The first tap that differs by more than its layers' rounding may."""
    per_layer = TOLERANCES.get(actual.dtype, LOW_PRECISION_TOLERANCE)
    parts = (tensor.float().chunk(len(target_layer_ids), dim=-1) for tensor in (actual, expected))
    for layer, tap, expected_tap in zip(target_layer_ids, *parts, strict=True):
        error = ((tap - expected_tap).norm() / expected_tap.norm()).item()
        allowed = min(per_layer * (layer + 1), 0.5)
        if not error <= allowed:
            return f"at layer {layer} by {error:.2g} of their size, where {allowed:.2g} is allowed"
    return None
