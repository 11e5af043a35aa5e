# SPDX-License-Identifier: Apache-2.0
"""The frozen target: a document's context is that of the document alone, and a shared model stays as it was."""

import copy
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from runs import make_documents, make_trainer
from tiny import (
    HIDDEN_SIZE,
    MASK_TOKEN_ID,
    VOCAB_SIZE,
    byte_tokenizer,
    dense_target,
    hybrid_target,
    llama_target,
    refused,
    tiny_drafter,
)
from torch import nn
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from transformers import (
    AutoModelForCausalLM,
    QuantoConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Model,
)

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, FrozenTarget
from dflash_hf import frozen_target as frozen_targets
from dflash_hf import generation as decoding_state
from dflash_hf.acceptance import DecodingSettings, plain_answers
from dflash_hf.frozen_target import (
    FEWEST_TOKENS,
    FrozenHead,
    keep_tuned_kernels,
    load_model,
    mask_token_for,
    random_target,
    refuse_slow,
    synthetic_documents,
    varied_lengths,
)
from dflash_hf.generation import speculative_generate


torch.set_num_threads(1)

TARGETS = {"dense": dense_target, "tied_llama": llama_target, "hybrid": hybrid_target}
TAPS = {"dense": [0, 2, 4], "tied_llama": [1, 4], "hybrid": [2, 3, 6]}


@pytest.fixture(params=TARGETS)
def family(request):
    return request.param


def frozen(family: str) -> FrozenTarget:
    return FrozenTarget(TARGETS[family](), TAPS[family])


def documents(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def pack(rows: list[list[torch.Tensor]], width: int, padding: int = 7) -> tuple[torch.Tensor, list[list[int]]]:
    """Packed rows [B, width] of documents, and their lengths."""
    ids = torch.full((len(rows), width), padding)
    for row, members in zip(ids, rows, strict=True):
        joined = torch.cat(members)
        row[: len(joined)] = joined
    return ids, [[len(member) for member in members] for members in rows]


@torch.no_grad()
def alone(target: FrozenTarget, document: torch.Tensor) -> torch.Tensor:
    """Features by their definition: tap i is `hidden_states[i + 1]` of a plain forward of the whole decoder."""
    output = target.model.get_decoder()(input_ids=document[None], output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[i + 1] for i in target.target_layer_ids], dim=-1)[0]


def assert_close(actual, expected):
    """Equal but for rounding: one of each product comes to 1.4e-5 of the largest value (S1)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5 * max(1.0, expected.abs().max().item()))


def hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_features_are_the_hidden_states_of_a_plain_forward(family):
    target = frozen(family)
    (document,) = documents(21)
    features = target.context_hidden_states(document[None])
    assert features.shape == (1, 21, len(TAPS[family]) * HIDDEN_SIZE)
    assert_close(features[0], alone(target, document))


@pytest.mark.parametrize(
    ("lengths", "order"),
    [((9, 13, 1, 6), [0, 1, 2, 3]), ((9, 13, 1, 6), [1, 3, 0, 2]), ((40, 39, 38, 40), [3, 0, 2, 1])],
)
def test_h1_packed_documents_have_the_features_of_each_alone(family, lengths, order):
    """Any order and row, with padding behind, also beside documents of nearly one length: as if each were alone."""
    target = frozen(family)
    members = documents(*lengths)
    first, *others = (members[i] for i in order)
    rows = [[first, *others[:2]], [others[2]]]
    ids, lengths = pack(rows, width=130)
    features = target.context_hidden_states(ids, lengths)
    for row, documents_of_row in enumerate(rows):
        start = 0
        for document in documents_of_row:
            end = start + len(document)
            assert_close(features[row, start:end], alone(target, document))
            start = end
        assert torch.equal(features[row, start:], torch.zeros_like(features[row, start:]))


def test_h1_changing_a_document_leaves_the_next_bit_identical(family):
    target = frozen(family)
    ids, lengths = pack([documents(9, 13)], width=24)
    before = target.context_hidden_states(ids, lengths)
    ids[0, :9] = (ids[0, :9] + 100) % 256
    ids[0, 22:] = 3
    after = target.context_hidden_states(ids, lengths)
    assert torch.equal(before[0, 9:], after[0, 9:])
    assert (before[0, :9] != after[0, :9]).any(dim=-1).all()


def test_h1_a_packed_forward_of_the_hybrid_target_would_differ():
    """The case is real: restarting position ids alone do not keep documents apart in a hybrid target."""
    target = frozen("hybrid")
    first, second = documents(9, 13)
    positions = torch.cat([torch.arange(9), torch.arange(13)])[None]
    ids = torch.cat([first, second])[None]
    with torch.no_grad():
        output = target.model.get_decoder()(
            input_ids=ids, position_ids=positions, output_hidden_states=True, use_cache=False
        )
    packed = torch.cat([output.hidden_states[i + 1] for i in target.target_layer_ids], dim=-1)[0, 9:]
    assert (packed - alone(target, second)).abs().max() > 1e-3


def test_h3_h4_the_target_gets_neither_a_mask_nor_three_dimensional_positions(family):
    target, calls = frozen(family), []

    def record(module, args, kwargs):
        calls.append({name: value for name, value in kwargs.items() if value is not None})

    with target.model.get_decoder().register_forward_pre_hook(record, with_kwargs=True):
        target.context_hidden_states(*pack([documents(9, 13)], width=24))
    assert calls
    for call in calls:
        assert "attention_mask" not in call
        assert "position_ids" not in call or call["position_ids"].dim() == 2
        assert call["use_cache"] is False


def test_m4_a_feature_comes_from_its_own_prefix_and_lies_at_its_own_index(family):
    """Changing token t of distinct ids leaves the features before t alone and changes the one stored at t."""
    target, ids = frozen(family), torch.arange(40, 60)[None]
    before = target.context_hidden_states(ids, [[12, 8]])
    for position in (0, 5, 11, 12, 19):
        changed = ids.clone()
        changed[0, position] = 200
        after = target.context_hidden_states(changed, [[12, 8]])
        end_of_document = 12 if position < 12 else 20
        differs = (before != after).any(dim=-1)[0]
        assert not differs[:position].any() and not differs[end_of_document:].any()
        assert differs[position]


def test_md1_taps_are_the_outputs_of_exactly_these_layers():
    """Layer i adds 10^i to zeros, so that the digits of a feature name the layers it went through."""
    model = dense_target()
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    for index, layer in enumerate(model.get_decoder().layers):
        layer.forward = lambda hidden_states, *args, _index=index, **kwargs: hidden_states + 10.0**_index
    features = FrozenTarget(model, [0, 1, 4]).context_hidden_states(torch.zeros(1, 3, dtype=torch.long))
    expected = torch.tensor([1.0, 11.0, 11111.0]).repeat_interleave(HIDDEN_SIZE)
    assert torch.equal(features, expected.expand(1, 3, -1))


@pytest.mark.parametrize("taps", [[6], [1, 1], [3, 1], [], [-2, 3], [1, 5]], ids=str)
def test_md1_md2_taps_out_of_range_repeated_unsorted_or_of_the_last_layer_are_refused(taps):
    with refused(ValueError, "target_layer_ids", taps):
        FrozenTarget(dense_target(), taps)
    assert FrozenTarget(dense_target(), [1, 4]).target_layer_ids == [1, 4]


def test_nothing_after_the_last_tap_runs(family):
    target, ran = frozen(family), []
    decoder = target.model.get_decoder()
    modules = {f"layer {i}": layer for i, layer in enumerate(decoder.layers)}
    modules |= {"norm": decoder.norm, "head": target.model.lm_head}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
    target.context_hidden_states(torch.arange(10)[None])
    assert ran == [f"layer {i}" for i in range(TAPS[family][-1] + 1)]


def test_rows_without_documents_are_zero_and_a_batch_of_them_an_error():
    target, ids = frozen("dense"), torch.arange(24).view(2, 12)
    assert torch.equal(target.context_hidden_states(ids), target.context_hidden_states(ids, [[12], [12]]))
    assert not target.context_hidden_states(ids, [[], [5]])[0].any()
    with refused(ValueError, "no document"):
        target.context_hidden_states(ids, [[], []])
    with refused(ValueError, "Row 1", 13):
        target.context_hidden_states(ids, [[5], [6, 7]])


def test_the_target_is_frozen(family):
    model, modes = TARGETS[family]().train(), []
    target = FrozenTarget(model, TAPS[family])
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not isinstance(target, nn.Module)
    target.layers[0].register_forward_hook(lambda *args: modes.append(torch.is_grad_enabled()))
    with torch.enable_grad():
        assert not target.context_hidden_states(torch.arange(8)[None]).requires_grad
    assert modes == [False]


def test_a_model_that_is_passed_in_generates_as_before(family):
    model = TARGETS[family]()
    prompt, depth, config = torch.arange(5, 17)[None], len(model.get_decoder().layers), model.config.to_dict()
    before = model.generate(prompt, max_new_tokens=8, do_sample=False)
    states = model(prompt, output_hidden_states=True).hidden_states
    target = FrozenTarget(model, TAPS[family])
    target.context_hidden_states(prompt)
    assert target.model is model and len(model.get_decoder().layers) == depth
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), before)
    after = model(prompt, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(after, states, strict=True))
    assert model.config.to_dict() == config


def test_no_hooks_are_left_behind_by_a_forward_that_fails(family):
    target = frozen(family)
    with pytest.raises(IndexError):
        target.context_hidden_states(torch.full((1, 8), VOCAB_SIZE))
    assert hooks(target.model) == 0
    layer = target.layers[TAPS[family][-1]]
    original = layer.forward

    def broken(*args, **kwargs):
        raise MemoryError("out of memory")

    layer.forward = broken
    with pytest.raises(MemoryError):
        target.context_hidden_states(torch.arange(8)[None])
    layer.forward = original
    assert hooks(target.model) == 0
    features = target.context_hidden_states(torch.arange(8)[None])[0]
    assert hooks(target.model) == 0
    assert_close(features, alone(target, torch.arange(8)))


def test_a_folder_is_loaded_cut_and_equal(family, tmp_path):
    model = TARGETS[family]()
    model.save_pretrained(tmp_path)
    whole = FrozenTarget(model, TAPS[family])
    cut = FrozenTarget(tmp_path if family == "dense" else str(tmp_path), TAPS[family])
    assert len(cut.layers) == TAPS[family][-1] + 1 == len(cut.model.get_decoder().layers)
    # The drafter is checked against the depth that the target has on disk.
    assert cut.config.num_hidden_layers == model.config.num_hidden_layers
    ids, lengths = pack([documents(9, 13)], width=24)
    assert torch.equal(cut.context_hidden_states(ids, lengths), whole.context_hidden_states(ids, lengths))
    assert torch.equal(cut.model.lm_head.weight, model.lm_head.weight)
    half = FrozenTarget(tmp_path, TAPS[family], dtype=torch.bfloat16)
    assert half.context_hidden_states(ids, lengths).dtype == torch.bfloat16


def test_a_run_can_be_measured_on_random_weights_and_tokens():
    config = dense_target().config
    target, same = (random_target(config, [1, 3], "cpu", "bfloat16") for _ in range(2))
    assert len(target.layers) == 4 and target.model.dtype == torch.bfloat16
    rows = synthetic_documents(3, 32, VOCAB_SIZE, MASK_TOKEN_ID)
    ids = torch.tensor([row["input_ids"] for row in rows])
    assert ids.shape == (3, 32) and not (ids == MASK_TOKEN_ID).any() and rows[0]["supervised_spans"] == [[2, 32]]
    assert torch.equal(target.context_hidden_states(ids), same.context_hidden_states(ids))


def test_a_multimodal_target_is_read_by_its_text_layers(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN_SIZE}
    config = Qwen3_5Config(text_config=hybrid_target().config.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    whole, cut = FrozenTarget(model, [1, 3]), FrozenTarget(tmp_path, [1, 3])
    ids, lengths = pack([documents(9, 13)], width=24)
    features = whole.context_hidden_states(ids, lengths)
    assert_close(features[0, 9:22], alone(whole, ids[0, 9:22]))
    assert_close(cut.context_hidden_states(ids, lengths), features)
    drafter = DFlashDraftConfig.from_target_config(
        config, num_hidden_layers=1, target_layer_ids=[1, 3], mask_token_id=MASK_TOKEN_ID
    )
    whole.check_drafter(drafter)
    cut.check_drafter(drafter)


def test_a_target_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "missing", str(tmp_path / "missing"), tmp_path / "empty"):
        with refused((OSError, ValueError), Path(target).name):
            FrozenTarget(target, [1])
    with refused(ValueError, "target_model_init_kwargs"):
        FrozenTarget(dense_target(), [1, 3], dtype="bfloat16")
    with refused(TypeError, "int"):
        FrozenTarget(3, [1])
    with refused(ValueError, "meta"):
        FrozenTarget(dense_target().to("meta"), [1])
    with refused(ValueError, "Qwen3Model", "head"):
        FrozenHead(Qwen3Model(dense_target(num_layers=1).config), "cpu")


def test_hb1_no_such_id_without_a_network_is_an_error_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with refused(OSError, "no-such/target"):
        FrozenTarget("no-such/target", [1])
    assert time.monotonic() - start < 5


def test_weights_go_straight_to_a_gpu(monkeypatch):
    given = {}

    def loaded(name, output_loading_info, **kwargs):
        given.update(kwargs)
        return dense_target(), {"missing_keys": set()}

    monkeypatch.setattr(frozen_targets.AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(frozen_targets, "resolve_revision", lambda name, revision, **places: revision)
    for device, arguments, expected in (
        ("cuda:1", {"dtype": "auto"}, {"device_map": {"": "cuda:1"}, "dtype": "auto"}),
        ("cuda:1", {"device_map": "auto"}, {"device_map": "auto"}),
        ("cpu", {}, {}),
    ):
        given.clear()
        load_model("some/target", device, arguments)
        assert given == expected


def test_a_slow_target_is_refused_on_a_gpu_before_it_is_loaded(tmp_path, monkeypatch):
    hybrid_target().save_pretrained(tmp_path / "hybrid")
    dense_target().save_pretrained(tmp_path / "dense")
    monkeypatch.setattr(frozen_targets, "load_model", lambda *args: pytest.fail("the weights were loaded"))
    with refused(ValueError, "6 of", "flash-linear-attention", "allow_slow_target"):
        FrozenTarget(tmp_path / "hybrid", [1, 3], device="cuda")
    for name, slow in (("hybrid", True), ("dense", False)):
        with pytest.raises(pytest.fail.Exception, match="loaded"):
            FrozenTarget(tmp_path / name, [1, 3], device="cuda", allow_slow_target=slow)
    monkeypatch.setattr(frozen_targets, "delta_kernels_available", lambda: True)
    refuse_slow(hybrid_target().config)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (None, None, None),
        ("hidden_size", 128, 64),
        ("num_target_layers", 9, 6),
        ("target_layer_ids", [1, 4], [1, 3]),
        ("vocab_size", 264, 272),
        ("mask_token_id", 272, 272),
    ],
)
def test_check_drafter_names_what_differs(field, value, expected):
    target, config = FrozenTarget(dense_target(), [1, 3]), tiny_drafter(dense_target(), target_layer_ids=[1, 3]).config
    if field is None:
        return target.check_drafter(config)
    setattr(config, field, value)
    with refused(ValueError, field, value, expected):
        target.check_drafter(config)


@pytest.mark.parametrize("family", ["dense", "tied_llama"])
def test_md5_the_head_and_embedding_are_the_loaded_targets_own(family):
    """Tied or not: the tensors of the loaded model, no copies of them on the same device."""
    model = TARGETS[family]()
    pair = FrozenHead(model, "cpu")
    assert pair.head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert pair.embedding.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert (pair.embedding.weight is pair.head.weight) == (family == "tied_llama")
    states = torch.randn(2, 3, HIDDEN_SIZE)
    assert torch.equal(pair.logits(states), states @ model.lm_head.weight.T)
    assert pair.vocab_size == VOCAB_SIZE
    assert FrozenHead(model.bfloat16(), "cpu").logits(states).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["dense", "tied_llama"])
def test_md5_a_copy_on_another_device_keeps_tied_weights_shared(family):
    """`cpu:0` is not equal to the `cpu` that the target says it is on, and so stands for another device."""
    model = TARGETS[family]()
    pair = FrozenHead(model, torch.device("cpu", 0))
    assert pair.head.weight is not model.lm_head.weight
    assert (pair.embedding.weight is pair.head.weight) == (family == "tied_llama")
    assert torch.equal(pair.head.weight, model.lm_head.weight)
    assert torch.equal(pair.embedding.weight, model.get_input_embeddings().weight)
    assert not pair.head.weight.requires_grad and not pair.embedding.weight.requires_grad
    moved = FrozenHead(model, "meta")
    assert moved.head.weight.is_meta and moved.embedding.weight.is_meta
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_noise_embeds_are_the_raw_rows_of_anchor_and_mask():
    model, anchors, mask = dense_target(), torch.tensor([[3, 5], [7, 9]]), MASK_TOKEN_ID
    embeds = FrozenHead(model, "cpu").noise_embeds(anchors, mask, block_size=3)
    ids = torch.tensor([[3, mask, mask, 5, mask, mask], [7, mask, mask, 9, mask, mask]])
    assert torch.equal(embeds, model.get_input_embeddings().weight[ids])
    # A scale or norm that the target's embedding module applies is not the drafter's.
    scaled = copy.deepcopy(model)
    scaled.get_input_embeddings().forward = lambda ids: 1000 * scaled.get_input_embeddings().weight[ids]
    assert torch.equal(FrozenHead(scaled, "cpu").noise_embeds(anchors, mask, 3), embeds)


def test_a_target_wrapped_by_peft_gives_its_adapted_hidden_states():
    target = dense_target()
    ids = torch.arange(1, 12)[None]
    plain = FrozenTarget(target, [1, 3]).context_hidden_states(ids)
    wrapped = get_peft_model(target, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted = FrozenTarget(wrapped, [1, 3]).context_hidden_states(ids)
    expected = wrapped(ids, output_hidden_states=True).hidden_states
    assert not torch.allclose(adapted, plain)
    torch.testing.assert_close(adapted, torch.cat([expected[2], expected[4]], dim=-1), rtol=1e-5, atol=1e-5)


# --- Targets of many families: their features, logits and answers are their own, whatever is odd in them.

SMALL = {
    "vocab_size": 277, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 16, "shared_expert_intermediate_size": 32,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
FAMILIES = {
    "Qwen3": {"head_dim": 20, "hidden_size": 60, "vocab_size": 271},
    "Qwen3Moe": {**EXPERTS, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "Gemma2": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "Gemma3Text": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "GptOss": {**WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo3": WINDOW,
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 12.0},
    "Cohere2": {**WINDOW, "logit_scale": 0.25},
    "Mistral": WINDOW,
    "Starcoder2": WINDOW,
    "Nemotron": {},
    "StableLm": {},
    "Qwen3Next": {**EXPERTS, **DELTA},
    "Qwen3_5MoeText": {**EXPERTS, **DELTA},
}
LENGTHS = [[1, 1, 2, 5, 3, 17, 9], [38], [1] * 38, [0, 5, 0, 33]]


def make(family, **overrides):
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.generation_config.eos_token_id = None
    return model


def check_features(model, packed):
    taps, generator = [0, 2], torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, rows, (len(LENGTHS), 38), generator=generator)
    features = FrozenTarget(model, taps, packed=packed).context_hidden_states(ids, LENGTHS)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in filter(None, lengths):
            states = model(ids[row : row + 1, start : start + length], output_hidden_states=True, use_cache=False)
            expected = torch.cat([states.hidden_states[tap + 1] for tap in taps], dim=-1)[0]
            actual = features[row, start : start + length]
            assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max(), (row, start)
            start += length


def test_layers_that_hand_nothing_on_to_their_attention_are_not_packed():
    check_features(make("Nemotron"), packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_documents_features_are_those_of_the_document_alone(family, packed):
    check_features(make(family, **FAMILIES[family]), packed)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Granite", {"logits_scaling": 4.0}),
        ("HyperCLOVAX", {"logits_scaling": 4.0}),
        ("Cohere2", {"logit_scale": 0.25}),
        ("FalconH1", {"lm_head_multiplier": 0.25, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
        ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_drafted_logits_are_scaled_as_the_targets_are(family, overrides):
    model, seen = make(family, **overrides), []
    with model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])):
        logits = model(torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(FrozenHead(model, "cpu").logits(seen[0]), logits)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_targets_own_whatever_is_accepted(family, block_size, monkeypatch):
    """Drafts are right up to a random slot, from prompts shorter than any window or convolution on."""
    model, draws, budget = make(family, **FAMILIES[family]), random.Random(7), 40
    rows = model.get_input_embeddings().weight.shape[0]
    config = DFlashDraftConfig.from_target_config(
        model.config, block_size=block_size, mask_token_id=rows - 1, target_layer_ids=[1], num_hidden_layers=1
    )
    drafter, place = DFlashDraftModel(config).eval(), {}
    original_draft, original_commit = decoding_state.draft_forward, decoding_state.DecodingState.commit

    def draft(*args, **kwargs):
        logits, states = original_draft(*args, **kwargs)
        logits = torch.zeros_like(logits)
        right = draws.choice([0, 1, block_size - 1, draws.randrange(block_size)])
        for k, token in enumerate(place["answer"][place["at"] + 1 : place["at"] + block_size]):
            logits[k, (token + (k >= right)) % rows] = 5.0
        return logits, states

    def commit(self, counts):
        place["at"] += counts[0]
        original_commit(self, counts)

    prompts = [[draws.randrange(rows) for _ in range(length)] for length in (1, 2, 3, 4, 7, 20)]
    answers = plain_answers(model, prompts, DecodingSettings(budget + block_size), progress=False)
    monkeypatch.setattr(decoding_state, "draft_forward", draft)
    monkeypatch.setattr(decoding_state.DecodingState, "commit", commit)
    for prompt, answer in zip(prompts, answers, strict=True):
        place.update(at=0, answer=answer.output_ids)
        output = speculative_generate(model, drafter, torch.tensor([prompt]), budget)
        assert output.sequences[0, len(prompt) :].tolist() == answer.output_ids[:budget]
        assert max(output.committed) > 1


# --- Quantised targets: nothing is cast or trained, and the head multiplies in a type that can.


class Int8Linear(nn.Module):
    """A linear layer that stores integers, as most quantisers replace one."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Buffer(scale.detach())

    def forward(self, x):
        if x.dtype != self.scale.dtype:
            raise TypeError(f"the layer multiplies in {self.scale.dtype}, not {x.dtype}")
        return nn.functional.linear(x, self.weight.to(self.scale.dtype) * self.scale)


def in_int8(model):
    """All linear layers replaced, and a cast of the whole model refused."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))

    def to(*args, **kwargs):
        raise ValueError("this quantised model cannot be moved or cast")

    model.to = model.float = model.bfloat16 = to
    return model


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


IDS = torch.arange(24)[None]


@pytest.mark.parametrize(
    ("packed", "quantisation"),
    [(False, QuantoConfig(weights="int8")), (True, {"quant_method": "quanto", "weights": "int8"})],
)
def test_a_target_that_transformers_quantises_at_loading(packed, quantisation, tmp_path):
    """quanto's int8 weights; features near the exact ones, and a packed document still has its own."""
    dense_target().save_pretrained(tmp_path)
    quantised = FrozenTarget(tmp_path, [1, 3], packed=packed, quantization_config=quantisation)
    assert type(quantised.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    features = quantised.context_hidden_states(IDS, [[9, 13]])
    assert (quantised._packed is not None) == packed
    exact = FrozenTarget(tmp_path, [1, 3]).context_hidden_states(IDS, [[9, 13]])
    assert 1e-4 < relative_error(features, exact) < 0.05
    single = quantised.context_hidden_states(IDS[:, 9:22])
    torch.testing.assert_close(features[:, 9:22], single, rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in quantised.model.parameters())


def test_the_head_multiplies_in_a_type_that_can(monkeypatch):
    """An integer weight names no type to multiply in, so the embedding's is taken; copied or not."""
    hidden, exact = torch.randn(3, HIDDEN_SIZE).bfloat16(), FrozenHead(dense_target(), "cpu")
    model = in_int8(dense_target())
    for on_device in (True, False):
        monkeypatch.setattr(frozen_targets, "is_on", lambda parameter, device, answer=on_device: answer)
        head = FrozenHead(model, "cpu")
        assert (head.head is model.lm_head) == on_device
        assert head.head_dtype == torch.float32 and head.vocab_size == VOCAB_SIZE
        assert relative_error(head.logits(hidden), exact.logits(hidden)) < 0.05
        assert not any(p.requires_grad for p in head.head.parameters())


def test_an_embedding_stored_as_integers_is_refused():
    model = dense_target()
    model.get_input_embeddings().weight = nn.Parameter(
        torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.int8), requires_grad=False
    )
    with refused(ValueError, "embedding", "int8"):
        FrozenHead(model, "cpu")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make_target", [dense_target, hybrid_target])
def test_a_drafter_trains_beside_a_quantised_target(make_target, packed, tmp_path):
    """Whose integer layers can be neither cast nor moved."""
    model = in_int8(make_target())
    exact = FrozenTarget(make_target(), [1, 3]).context_hidden_states(IDS, [[9, 13]])
    quantised = FrozenTarget(model, [1, 3], packed=packed)
    assert 1e-4 < relative_error(quantised.context_hidden_states(IDS, [[9, 13]]), exact) < 0.05
    assert (quantised._packed is not None) == packed
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drafter = tiny_drafter(model, target_layer_ids=[1, 3])
    start = drafter.fc.weight.clone()
    trainer = make_trainer(tmp_path, quantised, drafter=drafter, max_steps=2, learning_rate=1e-2, save_strategy="no")
    trainer.train()
    assert not torch.equal(drafter.fc.weight, start)
    assert all(torch.isfinite(torch.tensor(log["loss"])) for log in trainer.state.log_history if "loss" in log)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- cuDNN's attention plans anew for every shape, so decoding and packed documents leave it out.


@pytest.fixture
def attention_calls(monkeypatch):
    """Whether cuDNN was allowed, for each call of attention; the switch is put back."""
    seen, attend = [], nn.functional.scaled_dot_product_attention
    before = torch.backends.cuda.cudnn_sdp_enabled()

    def attention(*args, **kwargs):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield seen
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("before", [True, False])
def test_decoding_leaves_cudnn_out_and_gives_it_back(attention_calls, before):
    torch.backends.cuda.enable_cudnn_sdp(before)
    target, prompt = dense_target(), torch.arange(1, 8)[None]
    drafter = tiny_drafter(target)
    speculative_generate(target, drafter, prompt, max_new_tokens=6)
    speculative_generate(target, drafter, prompt, max_new_tokens=6, use_cache=False)
    plain_answers(target, [prompt], DecodingSettings(4), progress=False)
    FrozenTarget(target, [1]).context_hidden_states(prompt)
    assert attention_calls and not any(attention_calls)
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


def test_threads_that_work_at_the_same_time_share_it(attention_calls):
    first, second = varied_lengths(), varied_lengths()
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(RuntimeError, match="mine"), varied_lengths():
        raise RuntimeError("mine")
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("depth", [0, 2])
def test_g2_a_trainer_leaves_cudnn_out_all_along(attention_calls, tmp_path, depth):
    """The switch is the whole process's: the target's thread must not choose the drafter's kernels now and then."""
    trainer = make_trainer(tmp_path, dense_target(), prefetch_depth=depth, max_steps=3, eval_dataset=make_documents(2))
    trainer.train()
    trainer.evaluate()
    assert len(attention_calls) > 3 and not any(attention_calls)
    assert torch.backends.cuda.cudnn_sdp_enabled()


# --- Where tuned kernels are kept for the next run, and what is said before they are tuned.


@pytest.fixture
def triton_home(tmp_path, monkeypatch):
    # Set first, so that what the code sets is taken back.
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    return tmp_path


def test_kernels_tuned_for_any_device_and_by_any_library_lie_in_one_folder(triton_home, monkeypatch):
    """Without it inductor chooses a folder by the device, and only in processes that compile a kernel themselves."""
    assert triton_cache_dir(0) != triton_cache_dir(1)
    folder = keep_tuned_kernels()
    assert folder == triton_home / ".triton" / "cache" and folder.is_dir()
    assert {triton_cache_dir(0), triton_cache_dir(1), os.environ["TRITON_CACHE_DIR"]} == {str(folder)}
    monkeypatch.setenv("TRITON_CACHE_DIR", "/some/where")
    assert keep_tuned_kernels() == Path("/some/where") and os.environ["TRITON_CACHE_DIR"] == "/some/where"


def test_a_home_that_cannot_be_written_is_told_of_and_left_alone(triton_home, caplog, monkeypatch):
    # As for another user, which the superuser's own rights would hide.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert keep_tuned_kernels() is None and "TRITON_CACHE_DIR" not in os.environ
    assert "TRITON_CACHE_DIR" in caplog.text


@pytest.mark.parametrize(("make_target", "tunes"), [(hybrid_target, True), (dense_target, False)])
def test_only_a_target_that_tunes_kernels_settles_their_folder_and_says_so(
    make_target, tunes, triton_home, monkeypatch
):
    monkeypatch.setattr(FrozenTarget, "device", property(lambda self: torch.device("cuda")))
    target = FrozenTarget(make_target(), [1, 4], compile_target=True, allow_slow_target=True)
    assert ("TRITON_CACHE_DIR" in os.environ) == tunes
    assert (str(triton_home) in (target.tuning_notice() or "")) == tunes
    # Nobody waits for it a second time.
    target._unchecked = None
    assert target.tuning_notice() is None


@pytest.mark.gpu
def test_the_memory_of_a_forward_does_not_grow_with_the_batch():
    """Rows beyond the tokens of one forward run in further forwards."""
    target = FrozenTarget(dense_target(num_layers=8).to("cuda", torch.bfloat16), [1, 3, 6])
    peaks = []
    for rows in (8, 8, 32):
        ids = torch.randint(0, 256, (rows, 4096))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        features = target.context_hidden_states(ids)
        peaks.append(torch.cuda.max_memory_allocated() - before - features.numel() * features.element_size())
        del features
    assert FEWEST_TOKENS < 8 * 4096
    assert peaks[2] < 1.5 * peaks[1]


def test_n3_the_mask_token_is_one_that_no_text_holds():
    config, tokenizer = dense_target().config, byte_tokenizer()
    assert mask_token_for(config, tokenizer) == 260  # the first row past the tokenizer's last id
    assert mask_token_for(dense_target(vocab_size=151936, num_layers=1).config, None) == 151669
    config.vocab_size = len(tokenizer)
    with refused(ValueError, "--mask_token_id", "256 (<|endoftext|>)"):
        mask_token_for(config, tokenizer)
    with refused(ValueError, "mask_token_id", "processing_class"):
        mask_token_for(config, None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>"]})
    config.vocab_size += 1
    assert mask_token_for(config, tokenizer) == 260
