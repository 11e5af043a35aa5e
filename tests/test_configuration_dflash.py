# SPDX-License-Identifier: Apache-2.0
"""The configuration of a drafter: made for a target, checked, read and written in both spellings."""

import copy
import json

import pytest
import torch
from published import FULL, NESTED, PUBLISHED, QWEN36_27B, SLIDING
from tiny import MASK_TOKEN_ID, dense_target, hybrid_target, llama_target, refused
from transformers import Qwen3Config

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, default_target_layer_ids


def draft_config(target=None, **fields):
    fields = {"mask_token_id": MASK_TOKEN_ID, "num_hidden_layers": 2, **fields}
    return DFlashDraftConfig.from_target_config((target or dense_target()).config, **fields)


SLIDING_FIELDS = {"num_hidden_layers": 1, "layer_types": [SLIDING], "block_size": 8, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"mask_token_id": None}, ["mask_token_id"]),
        ({"mask_token_id": 272}, ["mask_token_id", 272]),
        ({"mask_token_id": 258}, ["mask_token_id", 258, "eos"]),
        ({"mask_token_id": 7, "eos_token_id": [3, 7]}, ["mask_token_id", 7, "eos"]),
        ({"target_layer_ids": []}, ["target_layer_ids"]),
        ({"target_layer_ids": [1, 6]}, ["target_layer_ids", [1, 6], "0..4"]),
        ({"target_layer_ids": [-1, 2]}, ["target_layer_ids", [-1, 2], "0..4"]),
        ({"target_layer_ids": [1, 1]}, ["target_layer_ids", [1, 1]]),
        ({"target_layer_ids": [1, 5]}, ["target_layer_ids", [1, 5], "last layer"]),
        ({"target_layer_ids": [1, 2], "num_taps": 2}, ["target_layer_ids", "num_taps"]),
        ({"block_size": 1}, ["block_size", 1]),
        ({**SLIDING_FIELDS, "sliding_window": 7}, ["sliding_window", 7, "block_size", 8]),
        ({**SLIDING_FIELDS, "use_sliding_window": False, "sliding_window": 64}, ["use_sliding_window"]),
        ({**SLIDING_FIELDS, "sliding_window": None}, ["sliding_window"]),
        # Without layer_types, Qwen3's own rule makes layers from max_window_layers on sliding.
        ({**SLIDING_FIELDS, "layer_types": None, "sliding_window": 7, "max_window_layers": 0}, ["sliding_window", 7]),
        ({"hidden_size": 128}, ["hidden_size", 128, 64]),
        ({"num_target_layers": None, "target_layer_ids": [1]}, ["num_target_layers"]),
    ],
)
def test_md1_md2_md7_bad_fields_are_refused(fields, names):
    with refused(ValueError, *names):
        draft_config(**fields)


@pytest.mark.parametrize("top_level", [8, 16])
def test_e7_a_top_level_block_size_that_contradicts_the_nested_one_is_refused(top_level):
    """Also where the top level says what is the default."""
    nested = {"block_size": 24 - top_level, "target_layer_ids": [1, 3], "mask_token_id": 49}
    with refused(ValueError, "block_size", 8, 16):
        DFlashDraftConfig(block_size=top_level, dflash_config=nested, num_target_layers=6)


def test_e7_fields_are_those_of_dflash_config():
    nested = {"block_size": 8, "target_layer_ids": [1, 3], "mask_token_id": 49}
    config = DFlashDraftConfig(dflash_config=nested, num_target_layers=6)
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (8, [1, 3], 49)
    assert config.dflash_config == nested


def test_causality_by_layer():
    fields = {"use_sliding_window": True, "sliding_window": 64, "layer_types": [SLIDING, FULL]}
    for is_causal, expected in ((None, [True, False]), (True, [True, True]), (False, [False, False])):
        config = draft_config(**fields, is_causal=is_causal)
        assert [config.layer_is_causal(i) for i in range(2)] == expected


def scaled(**rope):
    return {"rope_parameters": {"rope_theta": 5e5, **rope}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MROPE = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
TARGETS = {
    "qwen3": lambda: dense_target(**scaled(rope_type="linear", factor=4.0)),
    "llama": lambda: llama_target(**scaled(**LLAMA3, original_max_position_embeddings=1024)),
    "qwen3_5": lambda: hybrid_target(**scaled(**MROPE)),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_md6_nothing_of_the_targets_attention_is_inherited(target):
    """Only the base of RoPE is taken over; the whole of the drafter's own head is rotated."""
    target = target()
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    config = draft_config(target, num_taps=2, **shape)
    saved = config.to_dict()
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert {name: saved[name] for name in shape} == shape
    foreign = {"partial_rotary_factor", "mrope_section", "linear_num_key_heads", "full_attention_interval"}
    assert saved.keys().isdisjoint(foreign)
    assert config.layer_types == [FULL, FULL]
    assert (config.hidden_size, config.vocab_size) == (64, 272)
    assert config.num_target_layers == target.config.num_hidden_layers
    expected = 5e5 ** -(torch.arange(0, 128, 2).float() / 128)
    torch.testing.assert_close(DFlashDraftModel(config).rotary_emb.inv_freq, expected)
    # The default shape does not depend on the target's heads.
    default, other = draft_config(target), draft_config(dense_target(head_dim=16, num_attention_heads=8))
    assert all(default.to_dict()[name] == other.to_dict()[name] for name in shape)


def test_the_shape_of_a_large_drafter_is_that_of_the_published_ones():
    target = dense_target()
    target.config.update({"hidden_size": 5120, "head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 4})
    config = draft_config(target, num_taps=2)
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


@pytest.mark.parametrize(("num_target_layers", "num_taps", "largest"), [(6, 5, 3), (7, 5, 4), (5, 3, 2), (2, 1, 0)])
def test_md2_too_few_layers_for_the_taps_names_the_largest_number(num_target_layers, num_taps, largest):
    with refused(ValueError, f"num_taps={num_taps}", num_target_layers, largest):
        default_target_layer_ids(num_target_layers, num_taps)
    assert not largest or len(set(default_target_layer_ids(num_target_layers, largest))) == largest


# Reading and writing

SPELLINGS = {
    "flat_4.57": {},
    "torch_dtype": {"dtype": None, "torch_dtype": "bfloat16"},
    "transformers_5": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000}},
    "both": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000000}, "torch_dtype": "torch.bfloat16"},
    "nested": {"block_size": None, "dflash_config": {**QWEN36_27B["dflash_config"], "block_size": 16}},
    "flat_taps": {"dflash_config": None, **QWEN36_27B["dflash_config"]},
    "old_rope_key": {"rope_scaling": {"type": "default"}},
}


@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_is_read_alike(changes):
    raw = {name: value for name, value in {**QWEN36_27B, **changes}.items() if value is not None}
    given = copy.deepcopy(raw)
    config = DFlashDraftConfig.from_dict(raw)
    assert raw == given
    assert config == DFlashDraftConfig.from_dict(QWEN36_27B) and config.dtype == torch.bfloat16


@pytest.mark.parametrize("name", PUBLISHED)
def test_md6_both_spellings_are_written_in_full(tmp_path, name):
    config = DFlashDraftConfig.from_dict(copy.deepcopy(PUBLISHED[name]))
    # As a Trainer leaves it; a drafter that is served has one.
    config.use_cache = False
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    theta = PUBLISHED[name].get("rope_theta") or PUBLISHED[name]["rope_parameters"]["rope_theta"]
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == theta
    # Null would give a foreign type its own scaling.
    assert saved["rope_scaling"] == (None if saved["model_type"] == "qwen3" else {"rope_type": "default"})
    assert saved["block_size"] == saved["dflash_config"]["block_size"]
    assert saved["architectures"] == ["DFlashDraftModel"] and saved["use_cache"] is True
    assert "_name_or_path" not in saved
    assert saved.keys() >= set(Qwen3Config().to_dict()) & set(QWEN36_27B) | {"num_target_layers", "dflash_config"}
    assert DFlashDraftConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_md6_scaled_rope_survives_in_both_spellings(model_type):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = DFlashDraftConfig.from_dict({**QWEN36_27B, "model_type": model_type, "rope_scaling": scaling})
    saved = config.to_dict()
    assert saved["rope_scaling"] == scaling and saved["model_type"] == model_type
    assert saved["rope_parameters"] == {**scaling, "rope_theta": 10000000}
    assert DFlashDraftConfig.from_dict(saved).rope_parameters == config.rope_parameters


@pytest.mark.parametrize(
    ("layer_types", "is_causal", "written"),
    [
        ([SLIDING] * 5, True, None),
        ([SLIDING] * 5, False, False),
        ([SLIDING] * 4 + [FULL], True, True),
        ([SLIDING] * 4 + [FULL], False, False),
        ([FULL] * 5, False, None),
        ([FULL] * 5, None, None),
    ],
)
def test_causality_is_written_where_it_differs_from_the_layers_own(layer_types, is_causal, written):
    config = DFlashDraftConfig.from_dict({**QWEN36_27B, "layer_types": layer_types, "is_causal": is_causal})
    saved = config.to_dict()
    assert saved.get("is_causal") is written
    again = DFlashDraftConfig.from_dict(saved)
    assert [again.layer_is_causal(i) for i in range(5)] == [config.layer_is_causal(i) for i in range(5)]


def test_unknown_fields_are_kept():
    saved = DFlashDraftConfig.from_dict({**NESTED, "trained_on": {"tokens": 3}}).to_dict()
    assert saved["trained_on"] == {"tokens": 3}
    assert saved["dflash_config"]["name"] == "drafter" and saved["auto_map"] == QWEN36_27B["auto_map"]
