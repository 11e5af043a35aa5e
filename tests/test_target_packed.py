# SPDX-License-Identifier: Apache-2.0
"""The target's packed path, forced onto the CPU: each document as if alone, checked first, left where it fails."""

import functools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import HIDDEN_SIZE, MASK_TOKEN_ID, VOCAB_SIZE, dense_target, hybrid_target, llama_target
from torch._dynamo.testing import CompileCounter
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, FrozenTarget
from dflash_hf import frozen_target as checks
from dflash_hf import frozen_target as loading
from dflash_hf import frozen_target as target
from dflash_hf import packed_targets as target_kernels
from dflash_hf import packed_targets as target_qwen3_5
from dflash_hf.packed_targets import IMPLEMENTATION, PackedDense, PackedQwen35, Piece, packed_row


def moe_target():
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3_5MoeForCausalLM(config).eval()


TARGETS = {"dense": dense_target, "llama": llama_target, "hybrid": hybrid_target, "moe": moe_target}
TAPS = [1, 3, 4]
LENGTHS = [[9, 13, 70, 1], [5, 65]]


@pytest.fixture(params=TARGETS)
def model(request):
    return TARGETS[request.param]()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (2, 100), generator=torch.Generator().manual_seed(seed))


def assert_close(actual, expected):
    """Equal but for rounding: one of each product comes to 1.4e-5 of the largest value (S1)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5 * max(1.0, expected.abs().max().item()))


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "dflash_hf.frozen_target"]


def assert_each_as_if_alone(features: torch.Tensor, alone: FrozenTarget) -> None:
    """Features of `batch()` are those of each of its documents in a forward of its own, and 0 behind them."""
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            document = batch()[row : row + 1, start : start + length]
            assert_close(features[row, start : start + length], alone.context_hidden_states(document)[0])
            start += length
        assert not features[row, start:].any()


def test_h1_packed_documents_have_the_features_of_each_alone(model, caplog):
    packed, alone = FrozenTarget(model, TAPS, packed=True), FrozenTarget(model, TAPS)
    features = packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is not None and not warnings_of(caplog)
    assert_each_as_if_alone(features, alone)


def test_h1_changing_a_document_leaves_the_others_bit_identical(model):
    packed, ids = FrozenTarget(model, TAPS, packed=True), batch()
    before = packed.context_hidden_states(ids, LENGTHS)
    ids[0, 9:22] = (ids[0, 9:22] + 100) % 256
    ids[0, 93:] = 3
    after = packed.context_hidden_states(ids, LENGTHS)
    assert torch.equal(before[0, :9], after[0, :9]) and torch.equal(before[0, 22:], after[0, 22:])
    assert torch.equal(before[1], after[1])
    assert (before[0, 9:22] != after[0, 9:22]).any(dim=-1).all()


@given(lengths=st.lists(st.lists(st.integers(1, 30), max_size=3), min_size=2, max_size=2).filter(lambda r: any(r)))
@settings(deadline=None, max_examples=15)
def test_h1_any_documents_in_any_rows(lengths):
    for packed, alone in SHARED.values():
        features = packed.context_hidden_states(batch(), lengths)
        assert_close(features, alone.context_hidden_states(batch(), lengths))


SHARED = {
    make: (FrozenTarget(make(), [1, 3], packed=True), FrozenTarget(make(), [1, 3]))
    for make in (dense_target, hybrid_target)
}


def test_documents_beyond_the_tokens_of_a_forward_run_in_further_forwards(model, monkeypatch):
    """Several forwards give the features of one."""
    packed = FrozenTarget(model, TAPS, packed=True)
    expected = packed.context_hidden_states(batch(), LENGTHS)
    groups = []

    def in_small_groups(pieces):
        for piece in pieces:
            groups.append(piece)
            yield [piece]

    monkeypatch.setattr("dflash_hf.frozen_target.groups_in_order", in_small_groups)
    assert_close(packed.context_hidden_states(batch(), LENGTHS), expected)
    assert len(groups) == 6


def test_h3_h4_a_dense_target_gets_no_mask_and_two_dimensional_positions():
    """Restarting 2-D positions, no mask even where a mask of ones would be made, and attention within documents."""
    model, calls = dense_target(), []

    def record(module, args, kwargs):
        calls.append({name: value for name, value in kwargs.items() if value is not None})

    packed = FrozenTarget(model, TAPS, packed=True)
    packed.context_hidden_states(batch(), LENGTHS)
    handle = model.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    layer = model.get_decoder().layers[0].register_forward_pre_hook(record, with_kwargs=True)
    packed.context_hidden_states(batch(), LENGTHS)
    handle.remove()
    layer.remove()
    assert len(calls) == 2
    for call in calls:
        assert "attention_mask" not in call and call["use_cache"] is False
        assert call["position_ids"].dim() == 2
        assert call["position_ids"][0, :24].tolist() == [*range(9), *range(13), 0, 1]


@pytest.mark.parametrize("packed", [False, True])
def test_h3_a_mask_of_ones_from_the_collator_changes_nothing(packed, tmp_path):
    """A collator's all-ones mask would switch packing off in the target's attention: it never arrives there."""
    model = dense_target()
    config = DFlashDraftConfig.from_target_config(
        model.config, num_hidden_layers=1, block_size=4, mask_token_id=MASK_TOKEN_ID, target_layer_ids=[1, 3]
    )
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), row_length=64, num_anchors=4, use_cpu=True, report_to="none", context_noise=0.0
    )
    documents = [{"input_ids": torch.randint(0, 256, (20,)).tolist(), "supervised_spans": [[5, 20]]} for _ in range(3)]
    frozen = FrozenTarget(model, [1, 3], packed=packed)
    trainer = DFlashTrainer(DFlashDraftModel(config), frozen, args, train_dataset=documents)
    inputs = next(iter(trainer.get_train_dataloader()))
    assert len(inputs["document_lengths"][0]) == 3
    loss = trainer.compute_loss(trainer.model, inputs)
    masked = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    assert torch.equal(trainer.compute_loss(trainer.model, masked), loss)
    lengths, alone, start = inputs["document_lengths"][0], FrozenTarget(model, [1, 3]), 0
    features = frozen.context_hidden_states(inputs["input_ids"], inputs["document_lengths"])
    for length in lengths:
        document = inputs["input_ids"][:1, start : start + length]
        assert_close(features[0, start : start + length], alone.context_hidden_states(document)[0])
        start += length


def test_h4_the_hybrid_target_makes_its_positions_two_dimensional(monkeypatch):
    shapes = []
    rotary = hybrid_target().get_decoder().rotary_emb.__class__
    original = rotary.forward

    def forward(self, x, position_ids):
        shapes.append(tuple(position_ids.shape))
        return original(self, x, position_ids)

    packed = FrozenTarget(hybrid_target(), TAPS, packed=True)
    packed.context_hidden_states(batch(), LENGTHS)
    monkeypatch.setattr(rotary, "forward", forward)
    packed.context_hidden_states(batch(), LENGTHS)
    assert shapes == [(1, 256)]


@pytest.mark.parametrize("fault", ["delta_rule", "causal_convolution", "document_attention"])
def test_h1_a_mixer_without_borders_is_noticed_once_and_not_used(fault, monkeypatch, caplog):
    def delta_rule(query, key, value, g, beta, row):
        whole = row._replace(lengths=[sum(row.lengths)])
        return target_kernels.reference_delta_rule(query, key, value, g, beta, whole)

    def causal_convolution(x, weight, bias, position_ids):
        whole = torch.arange(position_ids.shape[1])[None]
        return target_kernels.causal_convolution(x, weight, bias, whole)

    def document_attention(query, key, value, lengths, scaling=None):
        return target_kernels.document_attention(query, key, value, [sum(lengths)], scaling)

    faulty = locals()[fault]
    monkeypatch.setattr(target_qwen3_5, fault, faulty)
    if fault == "delta_rule":
        monkeypatch.setattr(PackedQwen35.__init__, "__defaults__", (False, faulty))
    model = hybrid_target()
    packed = FrozenTarget(model, TAPS, packed=True)
    features = packed.context_hidden_states(batch(), LENGTHS)
    assert_close(features, FrozenTarget(model, TAPS).context_hidden_states(batch(), LENGTHS))
    packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is None
    (warning,) = warnings_of(caplog)
    assert "Qwen3_5ForCausalLM" in warning and "a row of its own" in warning


def test_h1_the_check_sees_a_document_that_only_leaks(monkeypatch, caplog):
    """A path that agrees with the references but lets one document see the one before it is not used either."""
    model = dense_target()
    original = target.packed_features

    def leaking(forward, input_ids, pieces):
        features = original(forward, input_ids, pieces)
        for before, piece in pairwise(pieces):
            features[piece.row, piece.start] += 1e-6 * input_ids[before.row, before.start]
        return features

    monkeypatch.setattr(target, "packed_features", leaking)
    packed = FrozenTarget(model, TAPS, packed=True)
    packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is None
    assert "change with those of the document before it" in warnings_of(caplog)[0]


def test_a_path_that_computes_something_else_is_not_used(monkeypatch, caplog):
    feed_forward = target_qwen3_5._feed_forward
    monkeypatch.setattr(target_qwen3_5, "_feed_forward", lambda layer, h: feed_forward(layer, h) * 1.1)
    packed = FrozenTarget(hybrid_target(), TAPS, packed=True)
    packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is None
    assert "differ from those of each document alone, at layer" in warnings_of(caplog)[0]


def test_a_sliding_window_or_an_unknown_layer_is_never_packed(caplog):
    """Two short documents cannot show a window, so layers that have one say so themselves."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    windowed = MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=8)).eval()
    packed, alone = FrozenTarget(windowed, [1, 2], packed=True), FrozenTarget(windowed, [1, 2])
    assert_close(packed.context_hidden_states(batch(), LENGTHS), alone.context_hidden_states(batch(), LENGTHS))
    assert packed._packed is None
    assert "sliding_window=8" in warnings_of(caplog)[0]

    layers = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8}
    mixed = dense_target(use_sliding_window=True, **layers)
    packed, alone = FrozenTarget(mixed, TAPS, packed=True), FrozenTarget(mixed, TAPS)
    assert_close(packed.context_hidden_states(batch(), LENGTHS), alone.context_hidden_states(batch(), LENGTHS))
    assert packed._packed is None
    assert "full attention" in warnings_of(caplog)[1]

    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    other = Qwen3NextForCausalLM(
        Qwen3NextConfig(**shape, **heads, **linear, linear_value_head_dim=16, num_experts=2, num_experts_per_tok=1,
                        moe_intermediate_size=32, shared_expert_intermediate_size=32)
    ).eval()  # fmt: skip
    packed, alone = FrozenTarget(other, [1, 2], packed=True), FrozenTarget(other, [1, 2])
    assert torch.equal(packed.context_hidden_states(batch(), LENGTHS), alone.context_hidden_states(batch(), LENGTHS))
    assert packed._packed is None
    assert len(warnings_of(caplog)) == 3


def test_the_cpu_default_is_one_document_per_row(model):
    default = FrozenTarget(model, TAPS)
    default.context_hidden_states(batch(), LENGTHS)
    assert default._packed is None and default._unchecked is None


def test_a_shared_model_stays_as_it_was(model):
    before, config = model(batch()).logits, model.config.to_dict()
    packed = FrozenTarget(model, TAPS, packed=True)
    packed.context_hidden_states(batch(), LENGTHS)
    assert packed._packed is not None
    assert model.config._attn_implementation != IMPLEMENTATION
    assert model.config.to_dict() == config
    assert torch.equal(model(batch()).logits, before)
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_features_do_not_depend_on_the_autocast_of_the_caller(model):
    for packed in (False, True):
        frozen = FrozenTarget(model, TAPS, packed=packed)
        expected = frozen.context_hidden_states(batch(), LENGTHS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(frozen.context_hidden_states(batch(), LENGTHS), expected)


def test_layers_compile_once_each_kind_for_all_layers_and_lengths():
    """Five graphs without a break, and five more when a second length asks for any length."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = {f: torch.compile(getattr(target_qwen3_5, f), backend=counter, fullgraph=True) for f in GRAPHS}
    decoder = hybrid_target().get_decoder()
    stack = PackedQwen35(decoder, [2, 6])
    for lengths in ([100], [40, 80], [300], [600]):
        row = packed_row([Piece(i, 0, n) for i, n in enumerate(lengths)], 600, 128, torch.device("cpu"))
        ids = torch.zeros_like(row.position_ids)
        with torch.no_grad():
            reference = PackedQwen35(decoder, [2, 6]).hidden_states(ids, row)
            for name, function in compiled.items():
                setattr(stack, name[1:], function)
            for actual, expected in zip(stack.hidden_states(ids, row), reference, strict=True):
                assert_close(actual, expected)
    assert counter.frame_count == 10


GRAPHS = ("_delta_inputs", "_delta_outputs", "_attention_inputs", "_attention_outputs", "_feed_forward")


def test_a_slow_target_is_refused_on_a_gpu_before_it_is_loaded(tmp_path, monkeypatch):
    hybrid_target().save_pretrained(tmp_path / "hybrid")
    monkeypatch.setattr(loading, "load_model", lambda *args: pytest.fail("the weights were loaded"))
    with pytest.raises(
        ValueError, match=r"6 of the target's 8 layers.*pip install 'flash-linear-attention>=0.6'.*slow_target"
    ):
        FrozenTarget(tmp_path / "hybrid", TAPS, device="cuda")
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        FrozenTarget(tmp_path / "hybrid", TAPS, device="cuda", allow_slow_target=True)
    dense_target().save_pretrained(tmp_path / "dense")
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        FrozenTarget(tmp_path / "dense", TAPS, device="cuda")


def test_a_hybrid_target_is_not_refused_where_its_kernels_are(monkeypatch):
    monkeypatch.setattr(checks, "delta_kernels_available", lambda: True)
    checks.refuse_slow(hybrid_target().config)


def test_h6_the_reference_rule_is_the_loop_even_where_a_kernel_is_installed(monkeypatch):
    """transformers puts an installed kernel in the place of its function; a check of kernels must not meet it."""
    exported = target_kernels.torch_chunk_gated_delta_rule

    @functools.wraps(exported)
    def kernel(*args, **kwargs):
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(target_kernels, "torch_chunk_gated_delta_rule", kernel)
    query, value, gate = torch.randn(1, 128, 2, 8), torch.randn(1, 128, 4, 8), torch.randn(1, 128, 4)
    row = packed_row([Piece(0, 0, 100)], 100, 100, torch.device("cpu"))
    inputs = (query, query.flip(1), value, -gate.exp(), gate.sigmoid())
    output = target_kernels.reference_delta_rule(*inputs, row)
    first, _ = exported(*(tensor[:, :100] for tensor in inputs), use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(output[:, :100], first)


@pytest.mark.parametrize(
    ("versions", "available"), [({"fla-core": "0.6.0"}, True), ({"fla-core": "0.5.1"}, False), ({}, False)]
)
def test_kernels_that_take_no_borders_do_not_count(versions, available, monkeypatch):
    monkeypatch.setattr(target_kernels, "is_flash_linear_attention_available", lambda: bool(versions))
    monkeypatch.setattr(target_kernels.metadata, "packages_distributions", lambda: {"fla": list(versions)})
    monkeypatch.setattr(target_kernels.metadata, "version", versions.__getitem__)
    assert target_kernels.delta_kernels_available.__wrapped__() == available


def test_weights_go_straight_to_a_gpu(monkeypatch):
    given = {}

    def loaded(name, output_loading_info, **kwargs):
        given.update(kwargs)
        return dense_target(), {"missing_keys": set()}

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(loading, "resolve_revision", lambda name, revision, **places: revision)
    loading.load_model("some/target", "cuda:1", {"dtype": "auto"})
    assert given == {"device_map": {"": "cuda:1"}, "dtype": "auto"}
    loading.load_model("some/target", "cuda:1", {"device_map": "auto"})
    assert given["device_map"] == "auto"
    given.clear()
    loading.load_model("some/target", "cpu", {})
    assert given == {}


def test_the_arguments_of_training_reach_the_target(tmp_path):
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.compile_target and not args.allow_slow_target
    assert isinstance(FrozenTarget(dense_target(), TAPS, packed=True)._unchecked, PackedDense)
