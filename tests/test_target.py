# SPDX-License-Identifier: Apache-2.0
"""The frozen target: a document's context is that of the document alone, and a shared model stays as it was."""

import copy
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import HIDDEN_SIZE, MASK_TOKEN_ID, VOCAB_SIZE, dense_target, hybrid_target, llama_target
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3Model

from dflash_hf import DFlashDraftConfig, FrozenTarget
from dflash_hf.frozen_target import FrozenHead


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
    assert not features.requires_grad
    assert_close(features[0], alone(target, document))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_h1_packed_documents_have_the_features_of_each_alone(family, order):
    """Documents of 9 and 13 tokens and more, in any order and row, with padding behind: as if each were alone."""
    target = frozen(family)
    members = documents(9, 13, 1, 6)
    first, *others = (members[i] for i in order)
    ids, lengths = pack([[first, *others[:2]], [others[2]]], width=32)
    features = target.context_hidden_states(ids, lengths)
    for row, documents_of_row in enumerate([[first, *others[:2]], [others[2]]]):
        start = 0
        for document in documents_of_row:
            end = start + len(document)
            assert_close(features[row, start:end], alone(target, document))
            start = end
        assert torch.equal(features[row, start:], torch.zeros_like(features[row, start:]))


def test_h1_documents_padded_to_the_longest_beside_them_have_the_features_of_each_alone(family):
    """Documents of nearly one length share a forward, right-padded."""
    target = frozen(family)
    members = documents(40, 39, 38, 40)
    ids, lengths = pack([members[:2], members[2:]], width=80)
    features = target.context_hidden_states(ids, lengths)
    for row, start, document in ((0, 0, 0), (0, 40, 1), (1, 0, 2), (1, 38, 3)):
        piece = features[row, start : start + len(members[document])]
        assert_close(piece, alone(target, members[document]))


def test_h1_changing_a_document_leaves_the_next_bit_identical(family):
    target = frozen(family)
    first, second = documents(9, 13)
    ids, lengths = pack([[first, second]], width=24)
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
    with torch.no_grad():
        output = target.model.get_decoder()(
            input_ids=torch.cat([first, second])[None],
            position_ids=positions,
            output_hidden_states=True,
            use_cache=False,
        )
    packed = torch.cat([output.hidden_states[i + 1] for i in target.target_layer_ids], dim=-1)[0, 9:]
    assert (packed - alone(target, second)).abs().max() > 1e-3


def test_h3_h4_the_target_gets_neither_a_mask_nor_three_dimensional_positions(family):
    target, calls = frozen(family), []

    def record(module, args, kwargs):
        calls.append({name: value for name, value in kwargs.items() if value is not None})

    handle = target.model.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    ids, lengths = pack([documents(9, 13)], width=24)
    target.context_hidden_states(ids, lengths)
    handle.remove()
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


@pytest.mark.parametrize(
    "taps", [[6], [-1], [1, 1], [3, 1], [1, 7], [], [-2, 3]], ids=lambda taps: "_".join(map(str, taps)) or "none"
)
def test_md1_refuses_taps_out_of_range_repeated_or_unsorted(taps):
    with pytest.raises(ValueError, match="target_layer_ids"):
        FrozenTarget(dense_target(), taps)


def test_md2_refuses_the_last_layer():
    model = dense_target()
    with pytest.raises(ValueError, match=r"target_layer_ids=\[1, 5\].*0\.\.4.*final norm"):
        FrozenTarget(model, [1, 5])
    assert FrozenTarget(model, [1, 4]).target_layer_ids == [1, 4]


def test_nothing_after_the_last_tap_runs(family):
    target, ran = frozen(family), []
    last = TAPS[family][-1]
    decoder = target.model.get_decoder()
    modules = {f"layer {i}": layer for i, layer in enumerate(decoder.layers)}
    modules |= {"norm": decoder.norm, "head": target.model.lm_head}
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: ran.append(name))
        for name, module in modules.items()
    ]
    target.context_hidden_states(torch.arange(10)[None])
    for handle in handles:
        handle.remove()
    assert ran == [f"layer {i}" for i in range(last + 1)]


def test_documents_of_similar_length_run_together_with_little_padding():
    target, shapes = frozen("dense"), []
    target.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    ids, lengths = pack([documents(30, 10, 31), documents(10, 32)], width=80)
    target.context_hidden_states(ids, lengths)
    assert sorted(shapes) == [(2, 10), (3, 32)]


def test_a_whole_row_is_one_document_where_no_lengths_are_given():
    target, ids = frozen("dense"), torch.arange(24).view(2, 12)
    assert torch.equal(target.context_hidden_states(ids), target.context_hidden_states(ids, [[12], [12]]))


def test_rows_without_documents_are_zero_and_a_batch_of_them_an_error():
    target, ids = frozen("dense"), torch.arange(24).view(2, 12)
    features = target.context_hidden_states(ids, [[], [5]])
    assert torch.equal(features[0], torch.zeros_like(features[0]))
    with pytest.raises(ValueError, match="no document"):
        target.context_hidden_states(ids, [[], []])
    with pytest.raises(ValueError, match="Row 1 holds documents of 13 tokens"):
        target.context_hidden_states(ids, [[5], [6, 7]])


def test_the_target_is_frozen(family):
    model = TARGETS[family]().train()
    target = FrozenTarget(model, TAPS[family])
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not isinstance(target, torch.nn.Module)
    modes = []
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
    assert len(after) == len(states)
    assert all(torch.equal(a, b) for a, b in zip(after, states, strict=True))
    assert model.config.to_dict() == config


def test_no_hooks_are_left_behind(family):
    target = frozen(family)
    target.context_hidden_states(torch.arange(8)[None])
    assert hooks(target.model) == 0


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
    assert_close(target.context_hidden_states(torch.arange(8)[None])[0], alone(target, torch.arange(8)))


@pytest.mark.parametrize("as_path", [False, True])
def test_a_folder_is_loaded_cut_and_equal(family, tmp_path, as_path):
    model = TARGETS[family]()
    model.save_pretrained(tmp_path)
    whole = FrozenTarget(model, TAPS[family])
    cut = FrozenTarget(tmp_path if as_path else str(tmp_path), TAPS[family])
    assert len(cut.layers) == TAPS[family][-1] + 1 == len(cut.model.get_decoder().layers)
    assert cut.model.num_parameters() < model.num_parameters()
    # The drafter is checked against the depth that the target has on disk.
    assert cut.config.num_hidden_layers == model.config.num_hidden_layers
    ids, lengths = pack([documents(9, 13)], width=24)
    assert torch.equal(cut.context_hidden_states(ids, lengths), whole.context_hidden_states(ids, lengths))
    assert torch.equal(cut.model.lm_head.weight, model.lm_head.weight)


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


def test_init_kwargs_reach_from_pretrained(tmp_path):
    dense_target().save_pretrained(tmp_path)
    target = FrozenTarget(tmp_path, [1, 3], dtype=torch.bfloat16)
    assert target.context_hidden_states(torch.arange(8)[None]).dtype == torch.bfloat16
    assert FrozenTarget(tmp_path, [1, 3]).context_hidden_states(torch.arange(8)[None]).dtype == torch.float32


def test_init_kwargs_with_a_loaded_model_are_refused():
    with pytest.raises(ValueError, match=r"target_model_init_kwargs=.*loaded"):
        FrozenTarget(dense_target(), [1, 3], dtype="bfloat16")


def test_no_such_folder(tmp_path):
    with pytest.raises(OSError, match=r"no target folder .*missing"):
        FrozenTarget(tmp_path / "missing", [1])
    with pytest.raises(OSError, match="missing' cannot be loaded"):
        FrozenTarget(str(tmp_path / "missing"), [1])


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises((OSError, ValueError), match=tmp_path.name):
        FrozenTarget(tmp_path, [1])


def test_hb1_no_such_id_without_a_network_is_an_error_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with pytest.raises(OSError, match=r"'no-such/target' cannot be loaded.*Check the spelling"):
        FrozenTarget("no-such/target", [1])
    assert time.monotonic() - start < 5


def drafter_config(**overrides) -> DFlashDraftConfig:
    values = {"num_hidden_layers": 1, "target_layer_ids": [1, 3], "mask_token_id": MASK_TOKEN_ID, "block_size": 4}
    return DFlashDraftConfig.from_target_config(dense_target().config, **{**values, **overrides})


def test_check_drafter_accepts_a_drafter_made_for_the_target():
    FrozenTarget(dense_target(), [1, 3]).check_drafter(drafter_config())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 128, "hidden_size .*128.* 64"),
        ("num_target_layers", 9, "num_target_layers .*9.* 6"),
        ("target_layer_ids", [1, 4], r"target_layer_ids .*\[1, 4\].*\[1, 3\]"),
        ("vocab_size", 264, "vocab_size .*264.* 272"),
        ("mask_token_id", 272, "mask_token_id=272 .* 272 rows"),
    ],
)
def test_check_drafter_names_what_differs(field, value, message):
    target, config = FrozenTarget(dense_target(), [1, 3]), drafter_config()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=message):
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
    model = dense_target()
    pair = FrozenHead(model, "cpu")
    embeds = pair.noise_embeds(torch.tensor([[3, 5], [7, 9]]), MASK_TOKEN_ID, block_size=3)
    mask = MASK_TOKEN_ID
    ids = torch.tensor([[3, mask, mask, 5, mask, mask], [7, mask, mask, 9, mask, mask]])
    assert torch.equal(embeds, model.get_input_embeddings().weight[ids])
    # A scale or norm that the target's embedding module applies is not the drafter's.
    scaled = copy.deepcopy(model)
    scaled.get_input_embeddings().forward = lambda ids: 1000 * scaled.get_input_embeddings().weight[ids]
    assert torch.equal(FrozenHead(scaled, "cpu").noise_embeds(torch.tensor([[3, 5], [7, 9]]), mask, 3), embeds)


def test_logits_are_multiplied_in_the_heads_type():
    pair = FrozenHead(dense_target().bfloat16(), "cpu")
    assert pair.logits(torch.randn(1, 2, HIDDEN_SIZE)).dtype == torch.bfloat16


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="Qwen3Model has no output head"):
        FrozenHead(Qwen3Model(dense_target(num_layers=1).config), "cpu")


def test_a_target_without_weights_or_of_another_kind_is_refused():
    target = dense_target()
    with pytest.raises(TypeError, match="The target is a int"):
        FrozenTarget(3, [1])
    with pytest.raises(ValueError, match="meta device"):
        FrozenTarget(target.to("meta"), [1])


def test_a_target_wrapped_by_peft_gives_its_adapted_hidden_states():
    target = dense_target()
    ids = torch.arange(1, 12)[None]
    plain = FrozenTarget(target, [1, 3]).context_hidden_states(ids)
    wrapped = get_peft_model(target, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted = FrozenTarget(wrapped, [1, 3]).context_hidden_states(ids)
    expected = wrapped(ids, output_hidden_states=True).hidden_states
    assert not torch.allclose(adapted, plain)
    torch.testing.assert_close(adapted, torch.cat([expected[2], expected[4]], dim=-1), rtol=1e-5, atol=1e-5)
