# SPDX-License-Identifier: Apache-2.0
"""Who sees whom: the one predicate against its slow twin, and what follows from it in the drafter's own gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_loss, naive_mask, pack_rows, packed_forward, random_drafter, random_inputs, visible
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dflash_hf import masking as chunked_attention
from dflash_hf.masking import (
    block_position_ids,
    block_tiles,
    chunked_mask,
    make_mask_mod,
    materialize,
    small_tiles,
    training_masks,
    written_block_mask,
)


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
FULL, SLIDING = "full_attention", "sliding_attention"
# One rounding of each product comes to 1.5e-5 of hidden states as large as these (S1).
ROUNDING = 5e-5


@st.composite
def layouts(draw):
    """Rows of one to three documents with anchors anywhere in them, some unused, with padding, and a mask's kind."""
    block_size = draw(st.integers(2, 5))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        anchors = [sorted(draw(st.sets(st.integers(0, n - 1), max_size=min(n, 3)))) for n in lengths]
        rows.append(list(zip(lengths, anchors, strict=True)))
    # One unused anchor at least where a layout happens to have no anchor at all: masks have no empty axis.
    unused = draw(st.integers(0, 2)) if any(a for row in rows for _, a in row) else 1
    packed = pack_rows(rows, padding=draw(st.integers(0, 4)), unused=unused)
    window = draw(st.none() | st.integers(block_size, block_size + 8))
    return packed, block_size, draw(st.booleans()), window


@settings(max_examples=50, deadline=None, derandomize=True)
@given(layouts())
def test_p1_the_predicate_equals_the_naive_mask_on_random_layouts(layout):
    rows, block_size, causal, window = layout
    expected = naive_mask(rows.anchor_positions, rows.document_ids, block_size, causal, window)
    num_rows, queries, keys = expected.shape
    mask_mod = make_mask_mod(rows.anchor_positions, rows.document_ids, block_size, causal, window)
    pointwise = create_mask(mask_mod, num_rows, 1, queries, keys, device="cpu")[:, 0]
    assert torch.equal(pointwise, expected)
    shape = (num_rows, queries, keys)
    boolean = materialize(mask_mod, "sdpa", shape, torch.device("cpu"), torch.float32)
    assert torch.equal(boolean[:, 0], expected)
    additive = materialize(mask_mod, "eager", shape, torch.device("cpu"), torch.float32)
    assert torch.equal(additive[:, 0] == 0, expected)
    assert expected.any(-1).all(), "a query without a key makes NaN"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts(), st.integers(2, 20))
def test_p3_the_written_tiles_are_those_of_the_dense_mask_on_random_layouts(layout, tile):
    rows, block_size, causal, window = layout
    expected = naive_mask(rows.anchor_positions, rows.document_ids, block_size, causal, window)
    partial, full = block_tiles(rows.anchor_positions, rows.document_ids, block_size, window, tile)
    num_rows, queries, keys = expected.shape
    for row, first_query, first_key in itertools.product(
        range(num_rows), range(0, queries, tile), range(0, keys, tile)
    ):
        pairs = expected[row, first_query : first_query + tile, first_key : first_key + tile]
        place = (row, first_query // tile, first_key // tile)
        assert not (partial[place] and full[place])
        assert pairs.all() if full[place] else (partial[place] or not pairs.any())
        # Nothing is listed for nothing: a slot of a sliding layer may see less than the first one of its block.
        assert pairs.any() or not partial[place] or window is not None or causal
    assert partial.shape == (num_rows, -(-queries // tile), -(-keys // tile))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(layouts())
def test_p3_the_written_block_mask_equals_an_evaluated_one(layout):
    rows, block_size, causal, window = layout
    expected = naive_mask(rows.anchor_positions, rows.document_ids, block_size, causal, window)
    mask_mod = make_mask_mod(rows.anchor_positions, rows.document_ids, block_size, causal, window)
    written = written_block_mask(mask_mod, rows.anchor_positions, rows.document_ids, block_size, window)
    evaluated = create_block_mask(mask_mod, expected.shape[0], None, *expected.shape[1:], device="cpu")
    assert written.shape == evaluated.shape
    # All of these rows are smaller than one 128 x 128 tile, which is listed as soon as any of its pairs is seen.
    assert torch.equal(written.to_dense(), evaluated.to_dense())


def test_p3_long_rows_have_few_tiles_and_full_ones_among_them():
    """Four documents of 512 tokens with 64 anchors each: the context of a tile ends at its largest anchor."""
    anchors = torch.cat([torch.arange(8, 512, 8)[:64] + 512 * d for d in range(4)])[None]
    documents = torch.arange(4).repeat_interleave(512)[None]
    for window in (None, 64):
        partial, full = block_tiles(anchors, documents, 16, window)
        mask_mod = make_mask_mod(anchors, documents, 16, window is not None, window)
        evaluated = create_block_mask(mask_mod, 1, None, anchors.shape[1] * 16, 2048 + anchors.shape[1] * 16, "cpu")
        assert torch.equal((partial | full)[:, None].int(), evaluated.to_dense())
        assert window is not None or full.any()
        assert (partial | full).float().mean() < 0.15


@settings(max_examples=50, deadline=None, derandomize=True)
@given(layouts(), st.integers(1, 40))
def test_the_chunked_mask_equals_the_naive_mask_on_random_layouts(layout, chunk_queries):
    rows, block_size, causal, window = layout
    expected = naive_mask(rows.anchor_positions, rows.document_ids, block_size, causal, window)
    mask_mod = make_mask_mod(rows.anchor_positions, rows.document_ids, block_size, causal, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_attention, "CHUNK_QUERIES", chunk_queries)
        chunked = chunked_mask(mask_mod, rows.anchor_positions, rows.document_ids, block_size, window)
    assert torch.equal(chunked.dense()[:, 0], expected)


@pytest.mark.parametrize("causal,window", [(False, None), (True, 9)])
def test_attention_in_chunks_equals_one_dense_call_in_values_and_gradients(causal, window, monkeypatch):
    monkeypatch.setattr(chunked_attention, "CHUNK_QUERIES", 12)
    rows = pack_rows([[(30, [2, 7, 9, 29]), (16, [0, 5, 6])], [(41, [12, 13, 40])]], padding=3, unused=1)
    mask_mod = make_mask_mod(rows.anchor_positions, rows.document_ids, 4, causal, window)
    mask = chunked_mask(mask_mod, rows.anchor_positions, rows.document_ids, 4, window)
    assert len(mask.masks) > 2
    module = random_drafter([FULL]).layers[0].self_attn
    torch.manual_seed(0)
    queries, keys = mask.dense().shape[2:]
    heads = module.config.num_key_value_heads
    states = [torch.randn(2, heads * groups, n, 8, dtype=torch.float64, requires_grad=True)
              for n, groups in ((queries, module.num_key_value_groups), (keys, 1), (keys, 1))]  # fmt: skip
    results = []
    for attention, given_mask in (
        (sdpa_attention_forward, mask.dense()), (chunked_attention.chunked_attention_forward, mask)
    ):  # fmt: skip
        output = attention(module, *states, given_mask, scaling=0.3)[0]
        results.append([output, *torch.autograd.grad(output.pow(3).sum(), states)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_tiles_fit_the_shared_memory_of_workstation_gpus(dtype, head_dim):
    options = small_tiles(dtype, head_dim)
    stages = options["fwd_num_stages"]
    forward = (options["fwd_BLOCK_M"] + 2 * stages * options["fwd_BLOCK_N"]) * head_dim * dtype.itemsize
    backward = 2 * (options["bwd_BLOCK_M1"] + options["bwd_BLOCK_N1"]) * head_dim * dtype.itemsize
    assert max(forward, backward) < 101_376
    assert all(128 % options[name] == 0 for name in options if "BLOCK" in name)


def test_the_naive_mask_by_hand():
    """Document 0 is tokens 0-4, document 1 tokens 5-8, token 9 is padding; anchors at 3 and 7; block 3, window 3."""

    def seen(query, causal, window):
        return [k for k in range(16) if visible(query, k, [3, 7], [0] * 5 + [1] * 4 + [-1], 3, causal, window)]

    assert seen(0, False, None) == [0, 1, 2, 10, 11, 12]
    assert seen(5, False, None) == [5, 6, 13, 14, 15]
    assert seen(0, True, 3) == [1, 2, 10]
    assert seen(1, True, 3) == [2, 10, 11]
    assert seen(2, True, 3) == [10, 11, 12]
    assert seen(3, True, 3) == [5, 6, 13]
    assert seen(3, True, None) == [5, 6, 13]


def test_masks_by_layer_type():
    """The Qwen3.6 mix: causal with the window on sliding layers, bidirectional without it on full ones."""
    rows = pack_rows([[(9, [2, 7]), (6, [0, 5])]], padding=1, unused=1)
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=5)
    masks = training_masks(drafter.config, rows.anchor_positions, rows.document_ids)
    assert set(masks) == {FULL, SLIDING}
    for layer_type, causal, window in ((FULL, False, None), (SLIDING, True, 5)):
        expected = naive_mask(rows.anchor_positions, rows.document_ids, 4, causal, window)
        assert torch.equal(masks[layer_type].dense()[:, 0], expected)


@pytest.mark.parametrize("is_causal", [True, False])
def test_is_causal_overrides_both_layer_types(is_causal):
    rows = pack_rows([[(9, [2, 7])]])
    drafter = random_drafter([SLIDING, FULL], window=5, is_causal=is_causal)
    masks = training_masks(drafter.config, rows.anchor_positions, rows.document_ids)
    for layer_type, window in ((FULL, None), (SLIDING, 5)):
        expected = naive_mask(rows.anchor_positions, rows.document_ids, 4, is_causal, window)
        assert torch.equal(masks[layer_type].dense()[:, 0], expected)


@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
def test_m1_a_block_reads_nothing_from_its_anchor_on_and_no_other_block(layer_type):
    drafter = random_drafter([layer_type] * 2, window=40, block_size=8)
    rows = pack_rows([[(32, [4, 6, 10])]])
    noise, context = random_inputs(drafter, rows)
    context.requires_grad_()
    noise.requires_grad_()
    hidden = packed_forward(drafter, rows, noise, context).view(3, 8, -1)
    for n, anchor in enumerate([4, 6, 10]):
        to_context, to_noise = torch.autograd.grad(hidden[n].pow(2).sum(), (context, noise), retain_graph=True)
        reached = to_context[0].abs().sum(-1)
        assert (reached[anchor:] == 0).all()
        assert (reached[:anchor] > 0).all()
        assert ((to_noise[0].view(3, 8, -1).abs().sum((1, 2)) > 0) == (torch.arange(3) == n)).all()
        alone = pack_rows([[(32, [anchor])]])
        only = packed_forward(drafter, alone, noise[:, n * 8 : n * 8 + 8], context)
        torch.testing.assert_close(only[0], hidden[n], rtol=0, atol=ROUNDING)


def test_m3_positions_of_a_block_are_those_of_its_own_document():
    """Documents of 10 and 10, anchors at their ninth tokens: both blocks are at 8..11, past the document's end."""
    rows = pack_rows([[(10, [8]), (10, [8])]], unused=1)
    assert rows.anchor_positions.tolist() == [[8, 18, -1]]
    positions = block_position_ids(rows.position_ids, rows.anchor_positions, 4)
    assert positions.shape == (1, 32)
    assert positions[0, :20].tolist() == [*range(10), *range(10)]
    assert positions[0, 20:28].tolist() == [8, 9, 10, 11, 8, 9, 10, 11]


@pytest.fixture
def uncompiled():
    """Runs flex attention as plain operators: compiling it takes longer than everything else here together."""
    with torch.compiler.set_stance("force_eager"):
        yield


def check_backend(attention):
    rows = pack_rows([[(13, [0, 4, 11]), (9, [3, 8])], [(17, [16])]], padding=3, unused=1)
    layers = [SLIDING, FULL]
    reference, other = (random_drafter(layers, window=5, attention=name) for name in ("sdpa", attention))
    noise, context = random_inputs(reference, rows)
    with torch.no_grad():  # flex attention has no backward on the CPU
        expected = packed_forward(reference, rows, noise, context)
        assert other.config._attn_implementation == attention
        torch.testing.assert_close(packed_forward(other, rows, noise, context), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@pytest.mark.usefixtures("uncompiled")
def test_m5_backends_agree(attention):
    check_backend(attention)


@pytest.mark.slow
def test_m5_compiled_flex_attention_agrees():
    check_backend("flex_attention")


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.usefixtures("uncompiled")
def test_m5_backends_agree_on_one_block_after_its_context(attention, padded):
    layers = [SLIDING, FULL]
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 9, 64)
    mask = torch.ones(1, 13, dtype=torch.long) if padded else None
    if mask is not None:
        mask[:, :padded] = 0
    with torch.no_grad():
        outputs = [
            random_drafter(layers, window=5, attention=name)(noise, context, mask).last_hidden_state
            for name in ("sdpa", attention)
        ]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=ROUNDING)


def test_m5_gradients_of_eager_and_sdpa_agree():
    rows = pack_rows([[(13, [0, 4, 11]), (9, [3, 8])], [(17, [16])]], padding=3, unused=1)
    gradients = []
    for attention in ("sdpa", "eager"):
        drafter = random_drafter([SLIDING, FULL], window=5, attention=attention)
        noise, context = random_inputs(drafter, rows)
        packed_forward(drafter, rows, noise, context).pow(3).mean().backward()
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    for sdpa, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(eager, sdpa, rtol=0, atol=ROUNDING)


def test_an_attention_backend_without_masks_per_query_is_refused():
    rows = pack_rows([[(9, [2])]])
    mask_mod = make_mask_mod(rows.anchor_positions, rows.document_ids, 4, True, None)
    with pytest.raises(ValueError, match="flash_attention_2"):
        materialize(mask_mod, "flash_attention_2", (1, 4, 13), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
def test_m6_no_context_and_unused_anchors_give_finite_values_and_change_nothing(layer_type, attention):
    drafter = random_drafter([layer_type] * 2, window=6, attention=attention)
    head = torch.randn(50, 32)
    losses, gradients = [], []
    for unused in (0, 3):
        rows = pack_rows([[(7, [0, 3])]], padding=2, unused=unused)
        torch.manual_seed(0)
        context = torch.randn(1, 9, 64)
        noise = torch.randn(1, 8 + unused * 4, 32)
        labels = torch.full((1, 2 + unused, 4), -100)
        labels[:, :2, 1:] = torch.arange(3)
        drafter.zero_grad()
        hidden = packed_forward(drafter, rows, noise, context)
        assert hidden.isfinite().all()
        losses.append(naive_loss(hidden, labels, head, gamma=2.0))
        losses[-1].backward()
        gradients.append([parameter.grad.clone() for parameter in drafter.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=ROUNDING)
    for with_unused, without in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(with_unused, without, rtol=0, atol=ROUNDING)


def test_m6_only_unused_anchors_give_exactly_zero_gradients():
    drafter = random_drafter([SLIDING, FULL], window=6)
    rows = pack_rows([[(7, [])]], unused=2)
    noise, context = random_inputs(drafter, rows)
    hidden = packed_forward(drafter, rows, noise, context)
    loss = naive_loss(hidden, torch.full((1, 2, 4), -100), torch.randn(50, 32), gamma=2.0)
    loss.backward()
    assert loss.item() == 0.0
    for parameter in drafter.parameters():
        assert (parameter.grad == 0).all()


def test_md7_each_layer_reaches_the_context_of_its_own_type():
    """Window 4, anchor 10: slot j of a sliding layer reaches a context token i iff 10 + j - i < 4."""
    drafter = random_drafter([SLIDING, FULL], window=4)
    rows = pack_rows([[(12, [10])]])
    noise, context = random_inputs(drafter, rows)
    context.requires_grad_()
    outputs = []
    drafter.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    hidden = packed_forward(drafter, rows, noise, context)
    reached = []
    for states in (outputs[0], hidden):
        for slot in range(4):
            (gradient,) = torch.autograd.grad(states[0, slot].pow(2).sum(), context, retain_graph=True)
            reached.append((gradient[0].abs().sum(-1) > 0).nonzero().flatten().tolist())
    assert reached[:4] == [[7, 8, 9], [8, 9], [9], []]
    assert reached[4:] == [list(range(10))] * 4
