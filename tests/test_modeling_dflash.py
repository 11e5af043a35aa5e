# SPDX-License-Identifier: Apache-2.0
"""The drafter and its configuration: training equals decoding, with and without a cache, and bad input is refused."""

import copy
import inspect

import pytest
import torch
from naive import naive_drafter, oracle_forward, pack_rows, packed_forward, random_drafter, random_inputs
from tiny import MASK_TOKEN_ID, dense_target, hybrid_target, llama_target
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, default_target_layer_ids


FULL, SLIDING = "full_attention", "sliding_attention"
QWEN36 = [SLIDING] * 4 + [FULL]

DRAFTERS = {
    "full": {"layer_types": [FULL, FULL]},
    "sliding": {"layer_types": [SLIDING, SLIDING], "window": 7},
    "qwen36_mix": {"layer_types": QWEN36, "window": 6},
    "window_of_one_block": {"layer_types": [SLIDING, FULL], "window": 4},
    "all_causal": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": True},
    "all_bidirectional": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": False},
    "biases": {"layer_types": [SLIDING, FULL], "window": 6, "attention_bias": True},
    "one_tap": {"layer_types": [FULL], "target_layer_ids": [2]},
}
ROWS = {
    # Odd lengths, anchors at position 0, beyond the window, overlapping, at the last token of a document.
    "three_documents": pack_rows([[(23, [0, 1, 9, 18, 22]), (7, [0, 6]), (5, [2])]]),
    "two_rows_padded": pack_rows([[(11, [3, 4]), (9, [0, 8])], [(17, [13])]], padding=3, unused=2),
}


def assert_close(actual, expected):
    """Equal to 5e-5 of the largest value expected, or 5e-5 where all are below one.

    One rounding of each product comes to 1.2e-5 of it (S1).
    """
    tolerance = 5e-5 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def new_cache(drafter):
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    return cache


def cached_round(drafter, cache, noise_embeds, context, first_position, **kwargs):
    """One drafting round as transformers runs it: announce the new context rows, draft, drop the block's keys."""
    num_context, block_size = context.shape[1], noise_embeds.shape[1]
    cache.set_previous_accepted_tokens(num_context)
    positions = first_position + torch.arange(num_context + block_size)[None]
    hidden = drafter(noise_embeds, context, position_ids=positions, cache=cache, **kwargs).last_hidden_state
    cache.crop(-block_size)
    return hidden


def leaves(drafter, rows):
    """The drafter's parameters, noise and context: all that a loss can be differentiated by."""
    noise, context = random_inputs(drafter, rows)
    return [*drafter.parameters(), noise.requires_grad_(), context.requires_grad_()], noise, context


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("twin", ["cached_block", "naive"])
def test_golden_packed_training_equals_one_block_at_a_time(fields, rows, twin):
    """Hidden states and gradients of N anchors in one forward against N forwards of one block of one document."""
    drafter, block_size = random_drafter(**fields), 4
    inputs, noise, context = leaves(drafter, rows)
    packed = packed_forward(drafter, rows, noise, context)
    cotangent = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    packed_loss, single_loss = 0.0, 0.0
    for row, index, start, anchor in rows.blocks:
        slots = slice(index * block_size, (index + 1) * block_size)
        block = noise[row : row + 1, slots]
        if twin == "naive":
            single = naive_drafter(drafter, context[row, start:], block[0], anchor)
        else:
            taps = context[row : row + 1, start : start + anchor]
            single = cached_round(drafter, new_cache(drafter), block, taps, 0)[0]
        assert_close(packed[row, slots], single)
        packed_loss = packed_loss + (packed[row, slots] * cotangent[row, slots]).sum()
        single_loss = single_loss + (single * cotangent[row, slots]).sum()
    for actual, expected in zip(
        torch.autograd.grad(packed_loss, inputs), torch.autograd.grad(single_loss, inputs), strict=True
    ):
        assert expected.abs().max() > 0
        assert_close(actual, expected)


@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
def test_golden_packed_training_equals_cached_rounds(fields):
    """One cache over all anchors of a document in turn: each round adds only the context rows since the last one."""
    rows = ROWS["three_documents"]
    drafter = random_drafter(**fields)
    noise, context = random_inputs(drafter, rows)
    with torch.no_grad():
        packed = packed_forward(drafter, rows, noise, context)
        caches, known = {}, {}
        for row, index, start, anchor in rows.blocks:
            cache, done = caches.setdefault(start, new_cache(drafter)), known.get(start, 0)
            slots = slice(index * 4, index * 4 + 4)
            taps = context[:, start + done : start + anchor]
            assert_close(cached_round(drafter, cache, noise[:, slots], taps, done)[0], packed[row, slots])
            known[start] = anchor


@pytest.mark.parametrize("block_size", [2, 3, 5, 16])
def test_golden_odd_block_sizes(block_size):
    drafter = random_drafter([SLIDING, FULL], window=max(6, block_size), block_size=block_size)
    rows = pack_rows([[(13, [2, 7, 12]), (3, [1])]], padding=1, unused=1)
    noise, context = random_inputs(drafter, rows)
    with torch.no_grad():
        packed = packed_forward(drafter, rows, noise, context)
        for row, index, start, anchor in rows.blocks:
            slots = slice(index * block_size, (index + 1) * block_size)
            assert_close(packed[row, slots], naive_drafter(drafter, context[row, start:], noise[row, slots], anchor))


@pytest.mark.parametrize("fields", DRAFTERS.values(), ids=DRAFTERS)
def test_e6_after_each_round_the_cache_holds_committed_context_and_nothing_else(fields):
    drafter = random_drafter(**fields)
    context = torch.randn(1, 20, drafter.fc.in_features)
    used, fresh = new_cache(drafter), new_cache(drafter)
    with torch.no_grad():
        done = 0
        for anchor in (3, 4, 11, 20):
            cached_round(drafter, used, torch.randn(1, 4, 32), context[:, done:anchor], done)
            done = anchor
            assert [used.get_seq_length(i) for i in range(len(drafter.layers))] == [anchor] * len(drafter.layers)
        cached_round(drafter, fresh, torch.randn(1, 4, 32), context, 0)
    for left, right in zip(used.layers, fresh.layers, strict=True):
        assert_close(left.keys, right.keys)
        assert_close(left.values, right.values)


def test_md7_decoding_equals_training_on_either_side_of_the_window():
    """Window 4, anchor 10: only context 7..9 matters to a sliding layer, in training and in decoding alike."""
    drafter = random_drafter([SLIDING], window=4)
    rows = pack_rows([[(12, [10])]])
    noise, context = random_inputs(drafter, rows)
    outside, inside = context.clone(), context.clone()
    outside[:, :7] += 1.0
    inside[:, 7] += 1.0
    with torch.no_grad():
        hidden = packed_forward(drafter, rows, noise, context)
        assert torch.equal(packed_forward(drafter, rows, noise, outside), hidden)
        assert not torch.allclose(packed_forward(drafter, rows, noise, inside), hidden)
        for other in (context, outside):
            assert_close(cached_round(drafter, new_cache(drafter), noise, other[:, :10], 0), hidden)


@pytest.mark.parametrize("cached", [0, 8, 12])
def test_padding_before_the_context_changes_nothing(cached):
    """A 2-D mask over all keys hides left padding; positions count from the first real token."""
    drafter = random_drafter(QWEN36, window=6)
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 13, 64)
    positions = torch.cat([torch.zeros(3, dtype=torch.long), torch.arange(14)])[None]
    mask = (torch.arange(17) >= 3).long()[None]
    with torch.no_grad():
        expected = drafter(noise, context[:, 3:]).last_hidden_state
        cache = new_cache(drafter)
        if cached:
            cache.set_previous_accepted_tokens(cached)
            drafter(noise, context[:, :cached], mask[:, : cached + 4], positions[:, : cached + 4], cache=cache)
            cache.crop(-4)
        cache.set_previous_accepted_tokens(13 - cached)
        actual = drafter(noise, context[:, cached:], mask, positions[:, cached:], cache=cache).last_hidden_state
    assert_close(actual, expected)


def test_default_positions_follow_the_cache():
    drafter = random_drafter([SLIDING, FULL], window=6)
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 9, 64)
    with torch.no_grad():
        expected = naive_drafter(drafter, context[0], noise[0], 9)
        assert_close(drafter(noise, context).last_hidden_state[0], expected)
        cache = new_cache(drafter)
        drafter(noise, context[:, :5], cache=cache)
        cache.crop(-4)
        output = drafter(noise, context[:, 5:], cache=cache)
        assert_close(output.last_hidden_state[0], expected)
        assert output.cache is cache
        assert isinstance(drafter(noise, context, use_cache=True).cache, DFlashCache)
        assert drafter(noise, context).cache is None


def test_d3_no_buffer_is_made_or_changed_by_a_forward():
    drafter = random_drafter([SLIDING, FULL], window=6)
    before = {name: buffer.clone() for name, buffer in drafter.named_buffers()}
    packed_forward(drafter, ROWS["two_rows_padded"], *random_inputs(drafter, ROWS["two_rows_padded"]))
    after = dict(drafter.named_buffers())
    assert before.keys() == after.keys()
    for name, buffer in before.items():
        assert torch.equal(after[name], buffer)


def test_d3_from_pretrained_makes_the_same_buffers(tmp_path):
    drafter = random_drafter([SLIDING, FULL], window=6)
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    before = dict(drafter.named_buffers())
    assert before.keys() == dict(loaded.named_buffers()).keys()
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, before[name])


def test_casting_keeps_the_frequencies_in_fp32():
    drafter = random_drafter([FULL], rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    expected = drafter.rotary_emb.inv_freq.clone()
    for cast in (drafter.to(torch.bfloat16), copy.deepcopy(drafter).float(), drafter.half()):
        assert torch.equal(cast.rotary_emb.inv_freq, expected)


def test_bf16_forward_stays_near_fp32():
    drafter = random_drafter(QWEN36, window=6)
    rows = ROWS["three_documents"]
    noise, context = random_inputs(drafter, rows)
    with torch.no_grad():
        expected = packed_forward(drafter, rows, noise, context)
        cast = copy.deepcopy(drafter).to(torch.bfloat16)
        actual = packed_forward(cast, rows, noise.bfloat16(), context.bfloat16())
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).pow(2).mean().sqrt() < 0.05


def test_the_deprecated_name_of_the_cache_reaches_it():
    drafter = random_drafter([SLIDING, FULL], window=6)
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 9, 64)
    caches = new_cache(drafter), new_cache(drafter)
    with torch.no_grad():
        expected = drafter(noise, context, cache=caches[0]).last_hidden_state
        with pytest.warns(FutureWarning, match="past_key_values"):
            actual = drafter(noise, context, past_key_values=caches[1]).last_hidden_state
    assert torch.equal(actual, expected)
    assert caches[1].get_seq_length() == 13
    assert torch.equal(caches[1].layers[1].keys, caches[0].layers[1].keys)


def test_unknown_arguments_are_refused_and_nothing_swallows_them():
    drafter = random_drafter([FULL])
    with pytest.raises(TypeError, match="past_key_value"):
        drafter(torch.randn(1, 4, 32), torch.randn(1, 9, 64), past_key_value=new_cache(drafter))
    for module in drafter.modules():
        if type(module).__module__.startswith("dflash_hf"):
            kinds = [p.kind for p in inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()]
            assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_the_state_dict_is_that_of_the_published_drafters():
    drafter = random_drafter([SLIDING, FULL], window=6)
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        expected |= {f"layers.{i}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"layers.{i}.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
        expected |= {f"layers.{i}.self_attn.{n}.weight" for n in ("q_norm", "k_norm")}
        expected |= {f"layers.{i}.mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    assert set(drafter.state_dict()) == expected
    assert drafter.fc.weight.shape == (32, 64)
    assert drafter.fc.bias is None


# Configuration


def draft_config(**fields):
    fields = {"mask_token_id": MASK_TOKEN_ID, "num_hidden_layers": 2, **fields}
    return DFlashDraftConfig.from_target_config(dense_target().config, **fields)


SLIDING_FIELDS = {"num_hidden_layers": 1, "layer_types": [SLIDING], "block_size": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"mask_token_id": 272}, "272.*outside"),
        ({"mask_token_id": -1}, "-1.*outside"),
        ({"mask_token_id": 258}, "258 equals the eos or pad"),
        ({"mask_token_id": 259}, "259 equals the eos or pad"),
        ({"mask_token_id": 7, "eos_token_id": [3, 7]}, "7 equals the eos or pad"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [1, 6]}, r"\[1, 6\].*0\.\.4"),
        ({"target_layer_ids": [-1, 2]}, r"\[-1, 2\].*0\.\.4"),
        ({"target_layer_ids": [1, 1]}, "unique and ascending"),
        ({"target_layer_ids": [3, 1]}, "unique and ascending"),
        ({"target_layer_ids": [1, 5]}, "final norm"),
        ({"block_size": 1}, "block_size is 1"),
        ({**SLIDING_FIELDS, "use_sliding_window": True, "sliding_window": 7}, "sliding_window=7.*block_size=8"),
        ({**SLIDING_FIELDS, "use_sliding_window": False, "sliding_window": 64}, "use_sliding_window=False"),
        ({**SLIDING_FIELDS, "use_sliding_window": True, "sliding_window": None}, "sliding_window=None"),
        ({"hidden_size": 128}, "128.*64"),
        ({"num_target_layers": None, "target_layer_ids": [1]}, "num_target_layers is missing"),
    ],
)
def test_md1_md2_md7_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        draft_config(**fields)


def test_md7_a_window_smaller_than_the_block_is_refused_where_layer_types_follow_from_it():
    """Without layer_types, Qwen3's own rule makes layers from max_window_layers on sliding."""
    with pytest.raises(ValueError, match=r"sliding_window=7.*block_size=8"):
        draft_config(block_size=8, use_sliding_window=True, sliding_window=7, max_window_layers=0)


@pytest.mark.parametrize("top_level", [8, 16])
def test_e7_a_top_level_block_size_that_contradicts_the_nested_one_is_refused(top_level):
    nested = {"block_size": 24 - top_level, "target_layer_ids": [1, 3], "mask_token_id": 49}
    with pytest.raises(ValueError, match="block_size"):
        DFlashDraftConfig(block_size=top_level, dflash_config=nested, num_target_layers=6)


def test_e7_fields_are_those_of_dflash_config():
    nested = {"block_size": 8, "target_layer_ids": [1, 3], "mask_token_id": 49}
    config = DFlashDraftConfig(dflash_config=nested, num_target_layers=6)
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (8, [1, 3], 49)
    assert config.dflash_config == nested


def test_causality_by_layer():
    fields = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 64, "layer_types": [SLIDING, FULL]}
    for is_causal, expected in ((None, [True, False]), (True, [True, True]), (False, [False, False])):
        config = draft_config(**fields, is_causal=is_causal)
        assert [config.layer_is_causal(i) for i in range(2)] == expected


TARGETS = {
    "qwen3": lambda: dense_target(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}),
    "llama": lambda: llama_target(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    ),
    "qwen3_5": lambda: hybrid_target(
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        }
    ),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_md6_nothing_of_the_targets_attention_is_inherited(target):
    """Only the base of RoPE is taken over; the whole of the drafter's own head is rotated."""
    target_config = target().config
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    config = DFlashDraftConfig.from_target_config(
        target_config, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=2, num_taps=2, **shape
    )
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert {name: config.to_dict()[name] for name in shape} == shape
    assert (
        config.to_dict()
        .keys()
        .isdisjoint({"partial_rotary_factor", "mrope_section", "linear_num_key_heads", "full_attention_interval"})
    )
    assert config.layer_types == [FULL, FULL]
    assert (config.hidden_size, config.vocab_size) == (64, 272)
    assert config.num_target_layers == target_config.num_hidden_layers
    expected = 5e5 ** -(torch.arange(0, 128, 2).float() / 128)
    torch.testing.assert_close(DFlashDraftModel(config).rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_md6_the_default_shape_does_not_depend_on_the_targets_heads(target):
    fields = {"mask_token_id": MASK_TOKEN_ID, "num_hidden_layers": 1}
    config = DFlashDraftConfig.from_target_config(target().config, **fields)
    other = DFlashDraftConfig.from_target_config(dense_target(head_dim=16, num_attention_heads=8).config, **fields)
    for name in ("head_dim", "num_attention_heads", "num_key_value_heads"):
        assert config.to_dict()[name] == other.to_dict()[name]


def test_the_shape_of_a_large_drafter_is_that_of_the_published_ones():
    target_config = dense_target(hidden_size=64).config
    target_config.update({"hidden_size": 5120, "head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 4})
    config = DFlashDraftConfig.from_target_config(target_config, mask_token_id=MASK_TOKEN_ID, num_taps=2)
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (128, 32, 8)


@pytest.mark.parametrize(
    ("num_target_layers", "num_taps", "expected"),
    [
        (30, 5, [1, 8, 14, 20, 27]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (30, 1, [15]),
        (3, 1, [1]),
        (8, 5, [1, 2, 3, 4, 5]),
    ],
)
def test_default_taps(num_target_layers, num_taps, expected):
    assert default_target_layer_ids(num_target_layers, num_taps) == expected


@pytest.mark.parametrize(("num_target_layers", "num_taps", "largest"), [(6, 5, 3), (7, 5, 4), (5, 3, 2), (4, 2, 1)])
def test_too_few_layers_for_the_taps_names_the_largest_number(num_target_layers, num_taps, largest):
    with pytest.raises(ValueError, match=f"largest number is {largest}"):
        default_target_layer_ids(num_target_layers, num_taps)
    assert len(set(default_target_layer_ids(num_target_layers, largest))) == largest


def test_md2_a_target_without_a_layer_before_its_last_that_defaults_reach_is_refused():
    with pytest.raises(ValueError, match="layer"):
        DFlashDraftConfig.from_target_config(
            dense_target(num_layers=2).config, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=1
        )


# Decoding with transformers' own loop


DECODERS = {"full": {}, "qwen36_mix": {"layer_types": QWEN36, "sliding_window": 11, "use_sliding_window": True}}


@pytest.mark.parametrize("make_target", [dense_target, llama_target], ids=["qwen3_untied", "llama_tied"])
@pytest.mark.parametrize("fields", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("prompt_length", [2, 17])
def test_e6_generate_is_lossless_and_every_cached_draft_equals_the_uncached_one(
    monkeypatch, make_target, fields, prompt_length
):
    target = make_target(num_layers=8)
    config = DFlashDraftConfig.from_target_config(
        target.config, mask_token_id=MASK_TOKEN_ID, block_size=6, num_hidden_layers=5, **fields
    )
    torch.manual_seed(1)
    drafter = DFlashDraftModel(config).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    prompt = torch.randint(0, 256, (1, prompt_length), generator=torch.Generator().manual_seed(prompt_length))
    greedy = target.generate(prompt, max_new_tokens=48, do_sample=False)
    rounds = []
    oracle = oracle_forward(drafter, target, greedy[0].tolist(), [0, 5, 2, 3, 5, 1], rounds)
    monkeypatch.setattr(drafter, "forward", oracle)
    output = target.generate(
        prompt, max_new_tokens=48, do_sample=False, assistant_model=drafter, speculation_type="dflash"
    )
    assert torch.equal(output, greedy)
    monkeypatch.undo()
    committed = [r["context_hidden_states"].shape[1] for r in rounds[1:]]
    assert {1, 6} <= set(committed), committed
    context, head = [], target.get_output_embeddings()
    for r in rounds:
        context.append(r["context_hidden_states"])
        assert sum(c.shape[1] for c in context) == r["anchor"]
        with torch.no_grad():
            uncached = drafter(r["noise_embeds"], torch.cat(context, dim=1)).last_hidden_state
            assert_close(r["hidden"], uncached)
            assert torch.equal(head(r["hidden"]).argmax(-1), head(uncached).argmax(-1))
