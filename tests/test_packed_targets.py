# SPDX-License-Identifier: Apache-2.0
"""The target's packed paths: each document as if alone, checked first, left where they fail."""

import copy
import functools
import logging
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import make_documents, make_trainer
from tiny import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    capped_target,
    dense_target,
    hybrid_target,
    llama_target,
    mixed_target,
    tiny_drafter,
    windowed_target,
)
from torch._dynamo.testing import CompileCounter
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash_hf import FrozenTarget, packed_targets
from dflash_hf import frozen_target as frozen_targets
from dflash_hf.masking import document_block_mask, document_tiles, earliest_keys
from dflash_hf.packed_targets import (
    CHUNK_SIZE,
    IMPLEMENTATION,
    MAX_PADDING,
    ROW_MULTIPLE,
    PackedDense,
    PackedQwen35,
    Piece,
    document_pieces,
    flex_documents,
    groups_in_order,
    groups_of_similar_length,
    packed_row,
)


CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def moe_target():
    torch.manual_seed(0)
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SMALL, num_hidden_layers=6)).eval()


def taps(model) -> list[int]:
    return [1, 2] if model.config.num_hidden_layers == 4 else [1, 3, 4]


def by_flex(model, backend="eager") -> FrozenTarget:
    """A target on the packed path of a GPU; its attention is one graph without a break, run as it stands."""
    frozen = FrozenTarget(model, taps(model))
    flex = torch.compile(flex_documents, backend=backend, fullgraph=True)
    frozen._unchecked = PackedDense(model.get_decoder(), frozen._read_taps, flex)
    return frozen


def one_call_each(model) -> FrozenTarget:
    return FrozenTarget(model, taps(model), packed=True)


# How a target's documents share a row, and the target.
PACKED = {
    "dense": (one_call_each, dense_target),
    "llama": (one_call_each, llama_target),
    "hybrid": (one_call_each, hybrid_target),
    "moe": (one_call_each, moe_target),
    "flex full": (by_flex, lambda: dense_target(num_layers=4)),
    "flex nine heads": (
        by_flex,
        lambda: llama_target(num_layers=4, hidden_size=144, num_attention_heads=9, num_key_value_heads=3),
    ),
    "flex windowed": (by_flex, windowed_target),
    "flex mixed": (by_flex, mixed_target),
    "flex capped": (by_flex, capped_target),
}
LENGTHS = [[9, 13, 70, 1], [5, 65]]


@pytest.fixture(autouse=True)
def _no_variants_of_other_tests():
    torch._dynamo.reset()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (2, 100), generator=torch.Generator().manual_seed(seed))


def assert_close(actual, expected):
    """Equal but for rounding: one of each product comes to 1.4e-5 of the largest value (S1)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5 * max(1.0, expected.abs().max().item()))


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "dflash_hf.frozen_target"]


@pytest.mark.parametrize("name", PACKED)
def test_h1_packed_documents_have_the_features_of_each_alone(name, caplog):
    """Under any autocast; and a changed document leaves the others bit-identical, a shared model as it was."""
    pack, make = PACKED[name]
    model = make()
    logits, config = model(batch()).logits, model.config.to_dict()
    packed, alone = pack(model), FrozenTarget(model, taps(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is not None and not warnings_of(caplog)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            document = batch()[row : row + 1, start : start + length]
            assert_close(features[row, start : start + length], alone.context_hidden_states(document)[0])
            start += length
        assert not features[row, start:].any()
    assert torch.equal(packed.context_hidden_states(batch(), LENGTHS), features)
    ids = batch()
    ids[0, 9:22] = (ids[0, 9:22] + 100) % 256
    ids[0, 93:] = 3
    after = packed.context_hidden_states(ids, LENGTHS)
    assert torch.equal(features[0, :9], after[0, :9]) and torch.equal(features[0, 22:], after[0, 22:])
    assert torch.equal(features[1], after[1])
    assert (features[0, 9:22] != after[0, 9:22]).any(dim=-1).all()
    assert_close(packed.context_hidden_states(batch()[:1]), alone.context_hidden_states(batch()[:1]))
    assert model.config.to_dict() == config and model.config._attn_implementation != IMPLEMENTATION
    assert torch.equal(model(batch()).logits, logits)
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


SHARED = [
    (FrozenTarget(make(), [1, 3], packed=True), FrozenTarget(make(), [1, 3])) for make in (dense_target, hybrid_target)
]


@given(lengths=st.lists(st.lists(st.integers(1, 30), max_size=3), min_size=2, max_size=2).filter(lambda r: any(r)))
@settings(deadline=None, max_examples=15)
def test_h1_any_documents_in_any_rows(lengths):
    for packed, alone in SHARED:
        features = packed.context_hidden_states(batch(), lengths)
        assert_close(features, alone.context_hidden_states(batch(), lengths))


@pytest.mark.parametrize("make", [dense_target, hybrid_target])
def test_documents_beyond_the_tokens_of_a_forward_run_in_further_forwards(make, monkeypatch):
    """Several forwards give the features of one."""
    packed, groups = one_call_each(make()), []
    expected = packed.context_hidden_states(batch(), LENGTHS)

    def in_small_groups(pieces):
        for piece in pieces:
            groups.append(piece)
            yield [piece]

    monkeypatch.setattr(frozen_targets, "groups_in_order", in_small_groups)
    assert_close(packed.context_hidden_states(batch(), LENGTHS), expected)
    assert len(groups) == 6


def test_h3_h4_a_dense_target_gets_no_mask_and_two_dimensional_positions():
    """Restarting 2-D positions, no mask even where a mask of ones would be made, and attention within documents."""
    model, calls = dense_target(), []

    def record(module, args, kwargs):
        calls.append({name: value for name, value in kwargs.items() if value is not None})

    packed = one_call_each(model)
    packed.context_hidden_states(batch(), LENGTHS)
    for module in (model.get_decoder(), model.get_decoder().layers[0]):
        module.register_forward_pre_hook(record, with_kwargs=True)
    packed.context_hidden_states(batch(), LENGTHS)
    assert len(calls) == 2
    for call in calls:
        assert "attention_mask" not in call and call["use_cache"] is False
        assert call["position_ids"].dim() == 2
        assert call["position_ids"][0, :24].tolist() == [*range(9), *range(13), 0, 1]


def test_h4_the_hybrid_target_makes_its_positions_two_dimensional(monkeypatch):
    model, shapes = hybrid_target(), []
    packed = one_call_each(model)
    packed.context_hidden_states(batch(), LENGTHS)
    model.get_decoder().rotary_emb.register_forward_pre_hook(lambda module, args: shapes.append(args[1].shape))
    packed.context_hidden_states(batch(), LENGTHS)
    assert shapes == [(1, 256)]


@pytest.mark.parametrize("packed", [False, True])
def test_h3_a_mask_of_ones_from_the_collator_changes_nothing(packed, tmp_path):
    """A collator's all-ones mask would switch packing off in the target's attention: it never arrives there."""
    model = dense_target()
    frozen, drafter = FrozenTarget(model, [1, 3], packed=packed), tiny_drafter(model, target_layer_ids=[1, 3])
    documents = make_documents(3)
    trainer = make_trainer(tmp_path, frozen, documents, drafter, row_length=128, context_noise=0.0)
    inputs = next(iter(trainer.get_train_dataloader()))
    assert len(inputs["document_lengths"][0]) == 3
    loss = trainer.compute_loss(trainer.model, inputs)
    masked = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    assert torch.equal(trainer.compute_loss(trainer.model, masked), loss)


@pytest.mark.parametrize("fault", ["delta_rule", "causal_convolution", "document_attention"])
def test_h1_a_mixer_without_borders_is_noticed_once_and_not_used(fault, monkeypatch, caplog):
    original = getattr(packed_targets, fault)

    def delta_rule(query, key, value, g, beta, row):
        return original(query, key, value, g, beta, row._replace(lengths=[sum(row.lengths)]))

    def causal_convolution(x, weight, bias, position_ids):
        return original(x, weight, bias, torch.arange(position_ids.shape[1])[None])

    def document_attention(query, key, value, lengths, scaling=None):
        return original(query, key, value, [sum(lengths)], scaling)

    monkeypatch.setattr(packed_targets, fault, locals()[fault])
    model = hybrid_target()
    packed = one_call_each(model)
    features = packed.context_hidden_states(batch(), LENGTHS)
    assert_close(features, FrozenTarget(model, taps(model)).context_hidden_states(batch(), LENGTHS))
    packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is None
    (warning,) = warnings_of(caplog)
    assert "Qwen3_5ForCausalLM" in warning


def test_h1_the_check_sees_what_leaks_differs_or_does_not_run(monkeypatch, caplog):
    """A document that sees a little of the one before it, another forward, and one that cannot be compiled here."""
    packed_features, feed_forward = frozen_targets.packed_features, packed_targets._feed_forward

    def leaking(forward, input_ids, pieces):
        features = packed_features(forward, input_ids, pieces)
        for before, piece in pairwise(pieces):
            features[piece.row, piece.start] += 1e-6 * input_ids[before.row, before.start]
        return features

    def uncompiled(*args):
        raise RuntimeError("no C compiler\nand a long story")

    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def check(make, module, name, broken) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, broken)
            packed = one_call_each(make())
            packed.context_hidden_states(batch(), LENGTHS)
            assert packed._packed is None

    check(dense_target, frozen_targets, "packed_features", leaking)
    check(hybrid_target, packed_targets, "_feed_forward", lambda layer, h: feed_forward(layer, h) * 1.1)
    check(hybrid_target, packed_targets, "_feed_forward", uncompiled)
    with pytest.raises(torch.OutOfMemoryError):
        check(hybrid_target, packed_targets, "_feed_forward", out_of_memory)
    leak, different, compiler = warnings_of(caplog)
    assert "before it" in leak and "layer" in different and "no C compiler)" in compiler


def kept_window():
    """A layer that keeps its window to itself: the check's documents are too short to show that one is missing."""
    model = mixed_target()
    model.get_decoder().layers[2].self_attn.sliding_window = None
    return model


def qwen3_next():
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, intermediate_size=96, num_hidden_layers=4)).eval()


@pytest.mark.parametrize(
    ("pack", "make", "named"),
    [
        (one_call_each, windowed_target, "sliding_window=8"),
        (one_call_each, mixed_target, "full attention"),
        (one_call_each, qwen3_next, "Qwen3NextForCausalLM"),
        (by_flex, kept_window, "layer 2"),
        (by_flex, lambda: dense_target(num_layers=4, head_dim=8), "8 channels"),
    ],
)
def test_what_a_packed_path_cannot_do_is_not_packed(pack, make, named, caplog):
    model = make()
    packed, alone = pack(model), FrozenTarget(model, taps(model))
    assert_close(packed.context_hidden_states(batch(), LENGTHS), alone.context_hidden_states(batch(), LENGTHS))
    assert packed._packed is None and alone._packed is None
    assert named in warnings_of(caplog)[0]


def test_what_flex_attention_does_not_do_is_not_compiled():
    chunked = dense_target(num_layers=4)
    chunked.config.layer_types = ["chunked_attention"] * 4
    for model, compiles in ((capped_target(), True), (dense_target().double(), False), (chunked, False)):
        assert PackedDense.compiles(model.get_decoder()) == compiles


def test_layers_compile_once_each_kind_for_all_layers_and_lengths():
    """Five graphs without a break, and five more when a second length asks for any length."""
    counter, names = CompileCounter(), ("delta_inputs", "delta_outputs", "attention_inputs", "attention_outputs")
    decoder = hybrid_target().get_decoder()
    stack, plain = PackedQwen35(decoder, [2, 6]), PackedQwen35(decoder, [2, 6])
    for name in (*names, "feed_forward"):
        setattr(stack, name, torch.compile(getattr(plain, name), backend=counter, fullgraph=True))
    for lengths in ([100], [40, 80], [300], [600]):
        row = packed_row([Piece(i, 0, n) for i, n in enumerate(lengths)], 600, 128, CPU)
        ids = torch.zeros_like(row.position_ids)
        with torch.no_grad():
            for actual, expected in zip(stack.hidden_states(ids, row), plain.hidden_states(ids, row), strict=True):
                assert_close(actual, expected)
    assert counter.frame_count == 10


def test_p2_all_layers_and_lengths_share_two_graphs():
    """One for the first length and one for any, with full and sliding layers alike; one tile takes a third."""
    counter = CompileCounter()
    packed = by_flex(mixed_target(), counter)
    packed.context_hidden_states(torch.zeros(1, 1100, dtype=torch.long), [[700, 400]])
    assert packed._packed is not None and counter.frame_count == 1
    for lengths in ([500, 100], [300], [600] * 2, [40] * 20, [150, 1, 1]):
        packed.context_hidden_states(torch.zeros(1, sum(lengths), dtype=torch.long), [lengths])
    assert counter.frame_count == 2
    for width in (90, 128):
        packed.context_hidden_states(torch.zeros(1, width, dtype=torch.long), [[width]])
    assert counter.frame_count == 3


def test_h6_the_reference_rule_is_the_loop_even_where_a_kernel_is_installed(monkeypatch):
    """transformers puts an installed kernel in the place of its function; a check of kernels must not meet it."""
    exported = packed_targets.torch_chunk_gated_delta_rule

    @functools.wraps(exported)
    def kernel(*args, **kwargs):
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(packed_targets, "torch_chunk_gated_delta_rule", kernel)
    query, value, gate = torch.randn(1, 128, 2, 8), torch.randn(1, 128, 4, 8), torch.randn(1, 128, 4)
    row = packed_row([Piece(0, 0, 100)], 100, 100, CPU)
    inputs = (query, query.flip(1), value, -gate.exp(), gate.sigmoid())
    output = packed_targets.reference_delta_rule(*inputs, row)
    first, _ = exported(*(tensor[:, :100] for tensor in inputs), use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(output[:, :100], first)


@pytest.mark.parametrize(
    ("versions", "available"), [({"fla-core": "0.6.0"}, True), ({"fla-core": "0.5.1"}, False), ({}, False)]
)
def test_kernels_that_take_no_borders_do_not_count(versions, available, monkeypatch):
    monkeypatch.setattr(packed_targets, "is_flash_linear_attention_available", lambda: bool(versions))
    monkeypatch.setattr(packed_targets.metadata, "packages_distributions", lambda: {"fla": list(versions)})
    monkeypatch.setattr(packed_targets.metadata, "version", versions.__getitem__)
    assert packed_targets.delta_kernels_available.__wrapped__() == available


# --- How documents share forwards: little padding, bounded tokens, and rows whose borders are right.

ROWS = st.lists(st.lists(st.integers(0, 300), max_size=8), min_size=1, max_size=5)


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
    [(8192, 8192, 8192), (7800, 8192, 8192), (7700, 8192, 7808), (1, 8192, 128), (9000, 8192, 9088)],
)
def test_nearly_full_rows_have_one_shape(tokens, full, length):
    assert len(packed_row([Piece(0, 0, tokens)], tokens, full, CPU).indices) == length


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.none() | st.integers(1, 30), st.sampled_from([4, 32]))
@settings(deadline=None, max_examples=60)
def test_the_mask_is_each_pair_of_a_document_within_the_window(lengths, window, tile):
    row = packed_row([Piece(i, 0, n) for i, n in enumerate(lengths)], 40, 128, CPU)
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


# --- What only a CUDA device can show: kernels against loops, compiled or not.

GPU_TAPS = [1, 3, 6]
# Heads of 64 in the delta-net layers: kernels do not have every small size.
HYBRID = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 128, "head_dim": 64}
GPU_LENGTHS = [[9, 13, 300, 1], [64, 65, 200]]
WIDTH = 340


def gpu_batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (2, WIDTH), generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def eager_target(model, taps: list[int]) -> FrozenTarget:
    """A twin that runs each document alone, by transformers' eager attention: no kernel's faults are its own."""
    model = copy.deepcopy(model).cuda()
    model.set_attn_implementation("eager")
    return FrozenTarget(model, taps, packed=False, allow_slow_target=True)


@pytest.fixture
def reference_kernels(monkeypatch):
    """transformers' hybrid layers without flash-linear-attention: each function's own reference."""
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(modeling_qwen3_5, name, getattr(modeling_qwen3_5, name).__wrapped__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_h6_the_packed_path_equals_the_reference_of_transformers(dtype, reference_kernels):
    """Kernels against loops: the reference runs in fp32, one document at a time."""
    model = hybrid_target(**HYBRID)
    expected = eager_target(model, GPU_TAPS).context_hidden_states(gpu_batch(), GPU_LENGTHS)
    packed = FrozenTarget(model.to("cuda", dtype), GPU_TAPS)
    features = packed.context_hidden_states(gpu_batch(), GPU_LENGTHS)
    assert packed._packed is not None
    assert features.dtype == dtype
    assert relative_error(features, expected) < (1e-2 if dtype == torch.float32 else 8e-2)
    for row, lengths in enumerate(GPU_LENGTHS):
        assert not features[row, sum(lengths) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["dense", "hybrid"])
def test_h1_changing_a_document_leaves_the_others_bit_identical(family, compiled):
    model = dense_target(num_layers=8) if family == "dense" else hybrid_target(**HYBRID)
    target = FrozenTarget(model.to("cuda", torch.bfloat16), GPU_TAPS, compile_target=compiled)
    ids = gpu_batch()
    before = target.context_hidden_states(ids, GPU_LENGTHS)
    assert target._packed is not None
    ids[0, 9:22] = (ids[0, 9:22] + 100) % 256
    after = target.context_hidden_states(ids, GPU_LENGTHS)
    assert torch.equal(before[0, :9], after[0, :9])
    assert torch.equal(before[0, 22:], after[0, 22:])
    assert torch.equal(before[1], after[1])
    assert (before[0, 9:22] != after[0, 9:22]).any(dim=-1).all()


@pytest.mark.gpu
def test_h1_h3_a_dense_target_packs_and_equals_each_document_alone():
    model = dense_target(num_layers=8).cuda()
    target = FrozenTarget(model, GPU_TAPS)
    features = target.context_hidden_states(gpu_batch(), GPU_LENGTHS)
    assert target._packed is not None
    expected = eager_target(model, GPU_TAPS).context_hidden_states(gpu_batch(), GPU_LENGTHS)
    assert relative_error(features, expected) < 2e-3


FLEX_ON_GPU = {
    "full": lambda: dense_target(num_layers=8),
    "nine heads": lambda: llama_target(8, hidden_size=576, num_attention_heads=9, num_key_value_heads=3),
    "mixed": mixed_target,
    "heads of 128": lambda: dense_target(num_layers=8, head_dim=128),
    "heads of 256": lambda: dense_target(num_layers=8, head_dim=256),
    "windowed": windowed_target,
    "capped": capped_target,
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in FLEX_ON_GPU), ("mixed", torch.float32)]
)
def test_h1_h3_flex_attention_gives_the_features_of_each_document_alone(name, dtype):
    """Several rows, one of 20 documents, one document, and lengths that the first call has not seen."""
    torch._dynamo.reset()
    model = FLEX_ON_GPU[name]().to("cuda", dtype)
    taps = [1, 2]
    target, alone = FrozenTarget(model, taps, compile_target=True), eager_target(model, taps)
    for lengths in (GPU_LENGTHS, [[*range(1, 21)], [WIDTH]], [[WIDTH], []], [[7], [90, 200]]):
        features = target.context_hidden_states(gpu_batch(), lengths)
        assert target._packed is not None
        assert relative_error(features, alone.context_hidden_states(gpu_batch(), lengths)) < (
            2e-3 if dtype == torch.float32 else 3e-2
        )


@pytest.mark.gpu
def test_p2_a_compiled_dense_target_does_not_compile_again():
    torch._dynamo.reset()
    target = FrozenTarget(mixed_target(8).to("cuda", torch.bfloat16), GPU_TAPS, compile_target=True)
    target.context_hidden_states(gpu_batch(), GPU_LENGTHS)
    target.context_hidden_states(gpu_batch(), [[200], [100]])
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(5):
            cuts = torch.randperm(WIDTH - 1, generator=torch.Generator().manual_seed(seed))[:12].sort().values + 1
            lengths = cuts.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()
            target.context_hidden_states(gpu_batch(seed), [lengths, [130 + seed]])
    assert target._packed is not None


@pytest.mark.gpu
def test_a_packed_dense_target_launches_one_attention_for_all_documents():
    """The loop launches one for each document, and a GPU waits for the host."""
    model = dense_target(num_layers=8).to("cuda", torch.bfloat16)
    launches = {}
    for compiled in (False, True):
        target = FrozenTarget(model, GPU_TAPS, compile_target=compiled)
        target.context_hidden_states(gpu_batch(), GPU_LENGTHS)
        for lengths in ([[300], [300]], [[*range(1, 25)], [*range(1, 25)]]):
            target.context_hidden_states(gpu_batch(), lengths)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                target.context_hidden_states(gpu_batch(), lengths)
                torch.cuda.synchronize()
            kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            launches[compiled, len(list(chain(*lengths)))] = len(kernels)
    assert launches[True, 48] <= launches[True, 2] + 10
    assert launches[False, 48] > launches[True, 48] + 24 * 7


@pytest.mark.gpu
def test_g3_a_compiled_target_is_as_near_to_fp32_as_the_uncompiled_one(reference_kernels):
    """In bf16 the two round at other places, and differ from each other by as much as from what is right."""
    model = hybrid_target(**HYBRID)
    exact = eager_target(model, GPU_TAPS)
    model.to("cuda", torch.bfloat16)
    targets = [FrozenTarget(model, GPU_TAPS, compile_target=compiled) for compiled in (True, False)]
    for lengths in (GPU_LENGTHS, [[WIDTH], [300, 5]], [[40], []]):
        expected = exact.context_hidden_states(gpu_batch(), lengths)
        compiled, plain = (relative_error(t.context_hidden_states(gpu_batch(), lengths), expected) for t in targets)
        assert all(target._packed is not None for target in targets)
        assert plain < 8e-2 and compiled < 1.3 * plain, (compiled, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["dense", "compiled", "compiled and mixed", "hybrid"])
def test_nothing_waits_for_the_device_after_the_first_call(family):
    model = hybrid_target(**HYBRID)
    if family != "hybrid":
        model = mixed_target(8) if "mixed" in family else dense_target(num_layers=8)
    target = FrozenTarget(model.to("cuda", torch.bfloat16), GPU_TAPS, compile_target="compiled" in family)
    ids = gpu_batch().pin_memory()
    target.context_hidden_states(ids, GPU_LENGTHS)
    assert target._packed is not None
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            features = target.context_hidden_states(ids, [[100, 240], [7, 90, 200]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(features, target.context_hidden_states(ids, [[100, 240], [7, 90, 200]]))


@pytest.mark.gpu
def test_h1_kernels_that_mix_documents_are_not_used(monkeypatch, caplog):
    """Without borders in the delta rule the check must notice, say so once and fall back to the right features."""
    from fla.ops import gated_delta_rule

    original = gated_delta_rule.chunk_gated_delta_rule

    def without_borders(*args, cu_seqlens=None, chunk_indices=None, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(gated_delta_rule, "chunk_gated_delta_rule", without_borders)
    model = hybrid_target(**HYBRID).cuda()
    target = FrozenTarget(model, GPU_TAPS)
    with caplog.at_level(logging.WARNING, logger="dflash_hf.frozen_target"):
        features = target.context_hidden_states(gpu_batch(), GPU_LENGTHS)
        target.context_hidden_states(gpu_batch(), GPU_LENGTHS)
    assert target._packed is None
    assert len([record for record in caplog.records if "own row" in record.message]) == 1
    expected = FrozenTarget(model, GPU_TAPS, packed=False).context_hidden_states(gpu_batch(), GPU_LENGTHS)
    assert relative_error(features, expected) < 1e-5
