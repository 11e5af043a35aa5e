# SPDX-License-Identifier: Apache-2.0
"""Who sees whom: the one predicate against its slow twin, what is made of it, and transformers' sdpa on CUDA."""

import copy
import itertools

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_loss, naive_mask, pack_rows, packed_forward, random_drafter, random_inputs, visible
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf import FrozenTarget, masking
from dflash_hf.frozen_target import varied_lengths
from dflash_hf.generation import DecodingState
from dflash_hf.masking import (
    block_position_ids,
    block_tiles,
    chunked_attention_forward,
    chunked_mask,
    make_mask_mod,
    materialize,
    register_sdpa_attention,
    small_tiles,
    training_masks,
    whole_heads_attention,
    written_block_mask,
)
from dflash_hf.trainer import compile_layers


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


def predicate_and_mask(layout):
    """The predicate of a layout, and its naive mask `[B, Q, T + Q]`."""
    rows, *kind = layout
    return (f(rows.anchor_positions, rows.document_ids, *kind) for f in (make_mask_mod, naive_mask))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(layouts())
def test_p1_the_predicate_equals_the_naive_mask_on_random_layouts(layout):
    mask_mod, expected = predicate_and_mask(layout)
    num_rows, queries, keys = shape = expected.shape
    pointwise = create_mask(mask_mod, num_rows, 1, queries, keys, device="cpu")[:, 0]
    assert torch.equal(pointwise, expected)
    boolean = materialize(mask_mod, "sdpa", shape, torch.device("cpu"), torch.float32)
    assert torch.equal(boolean[:, 0], expected)
    additive = materialize(mask_mod, "eager", shape, torch.device("cpu"), torch.float32)
    assert torch.equal(additive[:, 0] == 0, expected)
    assert expected.any(-1).all(), "a query without a key makes NaN"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts(), st.integers(2, 20))
def test_p3_the_written_tiles_are_those_of_the_dense_mask_on_random_layouts(layout, tile):
    rows, block_size, causal, window = layout
    _, expected = predicate_and_mask(layout)
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


def test_p3_long_rows_have_few_tiles_and_full_ones_among_them():
    """Four documents of 512 tokens with 64 anchors each: the context of a tile ends at its largest anchor."""
    anchors = torch.cat([torch.arange(8, 512, 8)[:64] + 512 * d for d in range(4)])[None]
    documents = torch.arange(4).repeat_interleave(512)[None]
    for window in (None, 64):
        partial, full = block_tiles(anchors, documents, 16, window)
        mask_mod = make_mask_mod(anchors, documents, 16, window is not None, window)
        evaluated = create_block_mask(mask_mod, 1, None, anchors.shape[1] * 16, 2048 + anchors.shape[1] * 16, "cpu")
        written = written_block_mask(mask_mod, anchors, documents, 16, window)
        assert written.shape == evaluated.shape
        assert torch.equal(written.to_dense(), evaluated.to_dense())
        assert torch.equal((partial | full)[:, None].int(), evaluated.to_dense())
        assert window is not None or full.any()
        assert (partial | full).float().mean() < 0.15


@settings(max_examples=50, deadline=None, derandomize=True)
@given(layouts(), st.integers(1, 40))
def test_the_chunked_mask_equals_the_naive_mask_on_random_layouts(layout, chunk_queries):
    rows, block_size, _, window = layout
    mask_mod, expected = predicate_and_mask(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "CHUNK_QUERIES", chunk_queries)
        chunked = chunked_mask(mask_mod, rows.anchor_positions, rows.document_ids, block_size, window)
    assert torch.equal(chunked.dense()[:, 0], expected)


@pytest.mark.parametrize("causal,window", [(False, None), (True, 9)])
def test_attention_in_chunks_equals_one_dense_call_in_values_and_gradients(causal, window, monkeypatch):
    monkeypatch.setattr(masking, "CHUNK_QUERIES", 12)
    rows = pack_rows([[(30, [2, 7, 9, 29]), (16, [0, 5, 6])], [(41, [12, 13, 40])]], padding=3, unused=1)
    mask_mod = make_mask_mod(rows.anchor_positions, rows.document_ids, 4, causal, window)
    mask = chunked_mask(mask_mod, rows.anchor_positions, rows.document_ids, 4, window)
    assert len(mask.masks) > 2
    module = random_drafter([FULL]).layers[0].self_attn
    torch.manual_seed(0)
    queries, keys = mask.dense().shape[2:]
    states = [
        torch.randn(2, heads, n, 8, dtype=torch.float64, requires_grad=True)
        for n, heads in ((queries, 4), (keys, 2), (keys, 2))
    ]
    results = []
    for attention, given_mask in ((sdpa_attention_forward, mask.dense()), (chunked_attention_forward, mask)):
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
    assert seen(3, True, 3) == seen(3, True, None) == [5, 6, 13]


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_is_causal_overrides_both_layer_types(is_causal):
    """Unset, sliding layers are causal and full ones are not; each type has its own window."""
    rows = pack_rows([[(9, [2, 7]), (6, [0, 5])]], padding=1, unused=1)
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=5, is_causal=is_causal)
    masks = training_masks(drafter.config, rows.anchor_positions, rows.document_ids)
    assert set(masks) == {FULL, SLIDING}
    for layer_type, causal, window in ((FULL, False, None), (SLIDING, True, 5)):
        causal = causal if is_causal is None else is_causal
        expected = naive_mask(rows.anchor_positions, rows.document_ids, 4, causal, window)
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
        assert (reached[anchor:] == 0).all() and (reached[:anchor] > 0).all()
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
    assert positions[0, :28].tolist() == [*range(10), *range(10), 8, 9, 10, 11, 8, 9, 10, 11]


def check_backend(attention):
    rows = pack_rows([[(13, [0, 4, 11]), (9, [3, 8])], [(17, [16])]], padding=3, unused=1)
    reference, other = (random_drafter([SLIDING, FULL], window=5, attention=name) for name in ("sdpa", attention))
    noise, context = random_inputs(reference, rows)
    with torch.no_grad():  # flex attention has no backward on the CPU
        expected = packed_forward(reference, rows, noise, context)
        assert other.config._attn_implementation == attention
        torch.testing.assert_close(packed_forward(other, rows, noise, context), expected, rtol=0, atol=ROUNDING)


@pytest.fixture
def uncompiled():
    """Runs flex attention as plain operators: compiling it takes longer than everything else here together."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@pytest.mark.usefixtures("uncompiled")
def test_m5_backends_agree(attention):
    check_backend(attention)
    # One block after its context, with and without padding before it.
    noise, context, padded = torch.randn(1, 4, 32), torch.randn(1, 9, 64), torch.ones(1, 13, dtype=torch.long)
    padded[:, :2] = 0
    for mask in (None, padded):
        drafters = [random_drafter([SLIDING, FULL], window=5, attention=name) for name in ("sdpa", attention)]
        with torch.no_grad():
            outputs = [drafter(noise, context, mask).last_hidden_state for drafter in drafters]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=ROUNDING)


@pytest.mark.slow
def test_m5_compiled_flex_attention_agrees():
    check_backend("flex_attention")


def test_m5_gradients_of_eager_and_sdpa_agree():
    rows = pack_rows([[(13, [0, 4, 11]), (9, [3, 8])], [(17, [16])]], padding=3, unused=1)
    gradients = []
    for attention in ("sdpa", "eager"):
        drafter = random_drafter([SLIDING, FULL], window=5, attention=attention)
        packed_forward(drafter, rows, *random_inputs(drafter, rows)).pow(3).mean().backward()
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    for sdpa, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(eager, sdpa, rtol=0, atol=ROUNDING)


def test_an_attention_backend_without_masks_per_query_is_refused():
    rows = pack_rows([[(9, [2])]])
    mask_mod = make_mask_mod(rows.anchor_positions, rows.document_ids, 4, True, None)
    with tiny.refused(ValueError, "attn_implementation", "flash_attention_2"):
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
    hidden = packed_forward(drafter, rows, *random_inputs(drafter, rows))
    loss = naive_loss(hidden, torch.full((1, 2, 4), -100), torch.randn(50, 32), gamma=2.0)
    loss.backward()
    assert loss.item() == 0.0 and not any(parameter.grad.any() for parameter in drafter.parameters())


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


# Flex attention on CUDA

LAYERS = {
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 24, "use_sliding_window": True},
    "causal": {"is_causal": True},
}


def values_and_gradients(attention, fields, compiled=False, mixed_precision=False):
    """Hidden states of eight blocks of 16 slots after two documents on the GPU, and gradients of all parameters."""
    target = tiny.dense_target()
    drafter = tiny.tiny_drafter(target, block_size=16, **fields).cuda()
    drafter.set_attn_implementation(attention)
    if compiled:
        compile_layers(drafter)
    rows = pack_rows([[(150, [0, 3, 17, 140]), (90, [0, 1, 50])]], padding=16, unused=1)
    for name, tensor in vars(rows).items():
        if isinstance(tensor, torch.Tensor):
            setattr(rows, name, tensor.cuda())
    noise, context = (tensor.cuda() for tensor in random_inputs(drafter, rows, seed=1))
    with torch.autocast("cuda", torch.bfloat16, enabled=mixed_precision):
        output = packed_forward(drafter, rows, noise, context)
    output.pow(3).sum().backward()
    return [output.detach(), *(parameter.grad for parameter in drafter.parameters())]


@pytest.mark.gpu
@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
def test_flex_attention_and_sdpa_equal_eager_attention_in_values_and_gradients(fields):
    results = [values_and_gradients(attention, fields) for attention in ("eager", "sdpa", "flex_attention")]
    for expected, *others in zip(*results, strict=True):
        for found in others:
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * expected.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_tiles_for_small_shared_memory_change_nothing_but_the_rounding(mixed_precision, monkeypatch):
    results = []
    for enough in (masking.ENOUGH_SHARED_MEMORY, 10**9):
        monkeypatch.setattr(masking, "ENOUGH_SHARED_MEMORY", enough)
        results.append(values_and_gradients("flex_attention", LAYERS["mixed"], True, mixed_precision))
    tolerance = 5e-2 if mixed_precision else 2e-3
    for expected, found in zip(*results, strict=True):
        # In bf16 single elements of a small gradient are rounding alone, so gradients are compared as a whole.
        assert (found - expected).norm() <= tolerance * expected.norm() + 1e-4 * expected.numel() ** 0.5


# One key head under a mask: torch's memory-efficient kernel would read the wrong rows of the mask on CUDA


class Layer(torch.nn.Module):
    num_key_value_groups = 4


@pytest.mark.parametrize(
    ("queries", "key_heads", "masked", "device", "copied"),
    [
        (65, 1, True, "cuda", True),
        (65, 1, False, "cuda", False),
        (65, 2, True, "cuda", False),
        (1, 1, True, "cuda", False),
        (65, 1, True, "cpu", False),
    ],
)
def test_g1_one_key_head_is_copied_only_where_a_mask_on_cuda_needs_it(
    queries, key_heads, masked, device, copied, monkeypatch
):
    calls = []
    monkeypatch.setattr(masking, "sdpa_attention_forward", lambda *args, **options: calls.append(args))
    with FakeTensorMode():
        query = torch.empty(2, 4, queries, 8, device=device)
        key, value = (torch.empty(2, key_heads, 65, 8, device=device) for _ in range(2))
        mask = torch.empty(2, 1, queries, 65, dtype=torch.bool, device=device) if masked else None
        whole_heads_attention(Layer(), query, key, value, mask)
    (module, _, given_key, given_value, _) = calls[0]
    assert (given_key is not key) is (given_value is not value) is copied
    # Neither expanded without a copy, nor once more by transformers.
    assert not copied or (given_key.shape == (2, 4, 65, 8) and given_key.is_contiguous())
    assert hasattr(module, "num_key_value_groups") is not copied


def test_g1_all_models_attend_by_it_unless_somebody_else_has_registered_another(monkeypatch):
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is whole_heads_attention
    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    for registered, expected in ((sdpa_attention_forward, whole_heads_attention), (print, print)):
        monkeypatch.setitem(mapping, "sdpa", registered)
        register_sdpa_attention()
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is expected


# 1 more than a multiple of 64, and of 32 for the tiles of large heads.
LENGTHS = [33, 65, 129]
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
EACH = [pytest.mark.gpu, pytest.mark.parametrize("length", LENGTHS), pytest.mark.parametrize("dtype", TOLERANCES)]


def each(test):
    """On a GPU, at every length and in both precisions."""
    for mark in EACH:
        test = mark(test)
    return test


TARGETS = {"mixed": tiny.mixed_target, "windowed": tiny.windowed_target, "gemma 3": tiny.gemma3_target}


def on_device(name, dtype):
    """A target with sdpa, and its twin with eager attention."""
    model = TARGETS[name]().to("cuda", dtype)
    model.set_attn_implementation("sdpa")
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return model, twin


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).cuda()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Row by row `[..., D]`: one wrong row among many right ones would hide in a whole."""
    errors = (actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert errors.max() < TOLERANCES[actual.dtype] * 2, errors.max()


@each
@pytest.mark.parametrize("head_dim", [32, 256])
@torch.no_grad()
def test_g1_attention_with_one_key_head_sees_its_own_rows_of_the_mask(head_dim, length, dtype):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, length, head_dim, device="cuda", dtype=dtype) for h in (4, 1, 1))
    index = torch.arange(length, device="cuda")
    mask = (index <= index[:, None]) & (index > index[:, None] - 8)
    scores = (query.float() @ key.float().mT * head_dim**-0.5).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ value.float()).transpose(1, 2)
    with varied_lengths():
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), query, key, value, mask.expand(2, 1, -1, -1))
    assert_close(output, expected)


@each
@pytest.mark.parametrize("name", TARGETS)
def test_g1_documents_one_per_row_have_the_features_of_eager_attention(name, length, dtype):
    targets = [FrozenTarget(model, [1, 2], packed=False) for model in on_device(name, dtype)]
    assert_close(*(target.context_hidden_states(ids(3, length)) for target in targets))


@each
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_g1_decoding_reads_a_prompt_as_eager_attention_does(use_cache, name, length, dtype):
    results = []
    for model in on_device(name, dtype):
        fields = {"hidden_size": tiny.HIDDEN_SIZE, "vocab_size": tiny.VOCAB_SIZE, "mask_token_id": tiny.MASK_TOKEN_ID}
        fields |= {"target_layer_ids": [1, 2], "num_target_layers": 4, "num_key_value_heads": 1}
        attention = model.config._attn_implementation
        drafter = random_drafter([SLIDING, FULL], window=9, attention=attention, **fields).to("cuda", dtype)
        with DecodingState(model, drafter, use_cache) as state, varied_lengths():
            logits, context = state.prefill(ids(1, length)), state.context
            results.append([context, torch.cat([logits, state.draft(ids(1, 1)), state.verify(ids(1, 1), ids(3))])])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@each
@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_g1_padded_prompts_end_as_with_eager_attention(name, length, dtype):
    prompts, mask = ids(3, length), torch.ones(3, length, dtype=torch.long, device="cuda")
    mask[1, :20] = 0
    logits = [model(prompts, attention_mask=mask, logits_to_keep=5).logits for model in on_device(name, dtype)]
    assert_close(*logits)


@each
@torch.no_grad()
def test_g1_a_drafter_with_one_key_head_drafts_as_with_eager_attention(length, dtype):
    """One block of so many slots after each other anchor of two rows."""
    block_size = {33: 11, 65: 13, 129: 43}[length]
    anchors = [7 * i + 3 for i in range(length // block_size)]
    rows = pack_rows([[(90, anchors)], [(90, anchors)]])
    rows.document_ids, rows.position_ids = rows.document_ids.cuda(), rows.position_ids.cuda()
    rows.anchor_positions = rows.anchor_positions.cuda()
    results = []
    for attention in ("sdpa", "eager"):
        fields = {"num_key_value_heads": 1, "block_size": block_size, "attention": attention, "window": 48}
        drafter = random_drafter([SLIDING, FULL], **fields).to("cuda", dtype)
        inputs = (tensor.to("cuda", dtype) for tensor in random_inputs(drafter, rows))
        with varied_lengths():
            results.append(packed_forward(drafter, rows, *inputs))
    assert results[0].shape[1] == length
    assert_close(*results)
