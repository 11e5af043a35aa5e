# SPDX-License-Identifier: Apache-2.0
"""Packed documents by one call of flex attention per layer: each as if alone, whatever the windows and caps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_target_packed import LENGTHS, assert_close, assert_each_as_if_alone, batch, warnings_of
from tiny import capped_target, dense_target, llama_target, mixed_target, windowed_target
from torch._dynamo.testing import CompileCounter

from dflash_hf import FrozenTarget
from dflash_hf.frozen_target import packing_fault
from dflash_hf.masking import document_block_mask, document_tiles, earliest_keys
from dflash_hf.packed_targets import PackedDense, Piece, flex_documents, packed_row


TAPS = [1, 2]
TARGETS = {
    "full": lambda: dense_target(num_layers=4),
    "nine heads": lambda: llama_target(num_layers=4, hidden_size=144, num_attention_heads=9, num_key_value_heads=3),
    "windowed": windowed_target,
    "mixed": mixed_target,
    "capped": capped_target,
}


@pytest.fixture(autouse=True)
def _no_variants_of_other_tests():
    torch._dynamo.reset()


def by_flex(model, backend="eager") -> FrozenTarget:
    """A target on the packed path of a GPU; its attention is one graph without a break, run as it stands."""
    frozen = FrozenTarget(model, TAPS)
    packed = PackedDense(model.get_decoder(), frozen._read_taps)
    packed.attention = packed.all_at_once(torch.compile(flex_documents, backend=backend, fullgraph=True))
    frozen._unchecked = packed
    return frozen


@pytest.mark.parametrize("name", TARGETS)
def test_h1_packed_documents_have_the_features_of_each_alone(name, caplog):
    model = TARGETS[name]()
    assert PackedDense.compiles(model.get_decoder())
    packed, alone = by_flex(model), FrozenTarget(model, TAPS)
    config = model.config.to_dict()
    features = packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is not None, warnings_of(caplog)
    assert_each_as_if_alone(features, alone)
    one = packed.context_hidden_states(batch()[:1], [[100]])
    assert_close(one, alone.context_hidden_states(batch()[:1]))
    ids = batch()
    ids[0, 9:22] = (ids[0, 9:22] + 100) % 256
    after = packed.context_hidden_states(ids, LENGTHS)
    assert torch.equal(features[0, :9], after[0, :9]) and torch.equal(features[0, 22:], after[0, 22:])
    assert torch.equal(features[1], after[1])
    assert (features[0, 9:22] != after[0, 9:22]).any(dim=-1).all()
    assert model.config.to_dict() == config and model.config._attn_implementation in ("sdpa", "eager")


def test_p2_all_layers_and_lengths_share_two_graphs():
    """One for the first length and one for any, with full and sliding layers alike; one tile takes a third."""
    counter = CompileCounter()
    model = mixed_target()
    packed = by_flex(model, counter)
    packed.context_hidden_states(torch.zeros(1, 1100, dtype=torch.long), [[700, 400]])
    assert packed._packed is not None and counter.frame_count == 1
    for lengths in ([500, 100], [300], [600] * 2, [40] * 20, [150, 1, 1]):
        width = sum(lengths)
        packed.context_hidden_states(torch.zeros(1, width, dtype=torch.long), [lengths])
    assert counter.frame_count == 2
    for width in (90, 128):
        packed.context_hidden_states(torch.zeros(1, width, dtype=torch.long), [[width]])
    assert counter.frame_count == 3


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.none() | st.integers(1, 30), st.sampled_from([4, 32]))
@settings(deadline=None, max_examples=60)
def test_the_mask_is_each_pair_of_a_document_within_the_window(lengths, window, tile):
    row = packed_row([Piece(i, 0, n) for i, n in enumerate(lengths)], 40, 128, torch.device("cpu"))
    document = [i for i, n in enumerate(row.lengths) for _ in range(n)]
    size = len(document)
    expected = torch.tensor(
        [[document[q] == document[k] and 0 <= q - k < (window or size) for k in range(size)] for q in range(size)]
    )
    mask = document_block_mask(row.position_ids, window, tile)
    index = torch.arange(size)
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index), expected)
    tiles = expected.view(size // tile, tile, size // tile, tile).transpose(1, 2).flatten(2)
    partial, full = document_tiles(earliest_keys(row.position_ids, window), tile)
    assert torch.equal(full, tiles.all(dim=-1))
    assert torch.equal(partial, tiles.any(dim=-1) & ~full)
    assert torch.equal(mask.to_dense()[0, 0].bool(), partial | full)


def test_a_layer_that_keeps_its_window_to_itself_is_not_packed(caplog):
    """The check's documents are shorter than most windows, so they cannot show that one is missing."""
    model = mixed_target()
    model.get_decoder().layers[2].self_attn.sliding_window = None
    packed, alone = by_flex(model), FrozenTarget(model, TAPS)
    assert_close(packed.context_hidden_states(batch(), LENGTHS), alone.context_hidden_states(batch(), LENGTHS))
    assert packed._packed is None
    assert "layer 2 is sliding_attention and hands sliding_window=None" in warnings_of(caplog)[0]


def test_what_flex_attention_has_no_kernel_for_is_not_packed(caplog):
    small = dense_target(num_layers=4, head_dim=8)
    packed = by_flex(small)
    packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is None and "heads have 8 channels" in warnings_of(caplog)[0]
    assert not PackedDense.compiles(dense_target(num_layers=4).double().get_decoder())
    chunked = dense_target(num_layers=4)
    chunked.config.layer_types = ["chunked_attention"] * 4
    assert not PackedDense.compiles(chunked.get_decoder())


def test_a_packed_path_that_cannot_be_compiled_here_is_a_reason_and_no_crash():
    def packed(ids, lengths):
        raise RuntimeError("no C compiler\nand a long story")

    fault = packing_fault(packed, lambda ids, lengths: torch.zeros(1, ids.shape[1], 4), [0], 100, 512)
    assert fault == "it does not run here (RuntimeError: no C compiler)"

    def full(ids, lengths):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        packing_fault(full, full, [0], 100, 512)
