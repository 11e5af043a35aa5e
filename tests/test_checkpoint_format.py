# SPDX-License-Identifier: Apache-2.0
"""Every way in which a checkpoint can be wrong is said before a weight is loaded, and nothing wrong loads."""

import copy
import json
import math
import shutil

import pytest
import torch
from published import FULL, PUBLISHED, QWEN3_8B, QWEN36_27B, SLIDING, small, small_tensors, write_folder
from tiny import refused
from transformers import AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.checkpoint_format import checkpoint_problems, expected_tensors, normalize_config, read_config


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_expected_tensors_are_those_of_the_format(name):
    config = small(PUBLISHED[name])
    expected = expected_tensors(normalize_config(config))
    assert expected == {name: tuple(tensor.shape) for name, tensor in small_tensors(config).items()}


def test_the_full_size():
    expected = expected_tensors(normalize_config(QWEN36_27B))
    assert len(expected) == 58 and expected["fc.weight"] == (5120, 25600)
    assert sum(math.prod(shape) for shape in expected.values()) == 1_730_213_120


# Tensors

SMALL = small(QWEN3_8B, num_hidden_layers=2, layer_types=[FULL] * 2, attention_bias=True)

# How a tensor is spoiled: its name and value -> what is there instead.
SPOILS = {
    "removed": lambda name, tensor: {},
    "renamed": lambda name, tensor: {f"{name}s": tensor},
    "renamed_with_prefix": lambda name, tensor: {f"model.{name}": tensor},
    "doubled_with_prefix": lambda name, tensor: {name: tensor, f"model.{name}": tensor.clone()},
    "longer": lambda name, tensor: {name: torch.cat([tensor, tensor])},
    "transposed": lambda name, tensor: {name: tensor.T.contiguous()},
    "one_more_dimension": lambda name, tensor: {name: tensor[None]},
    "int8": lambda name, tensor: {name: tensor.to(torch.int8)},
    "float64": lambda name, tensor: {name: tensor.double()},
    "float8": lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn)},
    "mixed": lambda name, tensor: {name: tensor.float()},
}


@pytest.mark.parametrize("name", small_tensors(SMALL))
def test_a_spoiled_tensor_is_named_and_nothing_loads(tmp_path, name):
    """Of each tensor each fault."""
    for kind, spoil in SPOILS.items():
        tensors = small_tensors(SMALL)
        tensor = tensors.pop(name)
        if kind == "transposed" and tensor.ndim == 1:
            continue
        write_folder(tmp_path, SMALL, {**tensors, **spoil(name, tensor)})
        with refused(ValueError, "" if kind == "mixed" else name):
            DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_every_way_to_load_refuses_a_spoiled_tensor(tmp_path, spoil):
    tensors = small_tensors(SMALL)
    spoilt = spoil("fc.weight", tensors.pop("fc.weight"))
    write_folder(tmp_path, SMALL, {**tensors, **spoilt})
    assert any("fc.weight" in problem for problem in checkpoint_problems(tmp_path))
    for load in (DFlashDraftModel.from_pretrained, AutoModel.from_pretrained):
        with refused(ValueError, "fc.weight"):
            load(tmp_path)


def test_all_problems_are_listed_at_once(tmp_path):
    tensors = small_tensors(SMALL)
    del tensors["norm.weight"]
    tensors["lm_head.weight"] = tensors["d2t"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(4, dtype=torch.bfloat16)
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    write_folder(tmp_path, {**SMALL, "use_swa": True}, tensors)
    torch.save(torch.zeros(3), tmp_path / "mask_embedding.pt")
    told = ("use_swa", "norm.weight", "lm_head.weight", "d2t", "[160, 32]", "[32, 160]", "mask_embedding.pt")
    with refused(ValueError, *told):
        DFlashDraftModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


# Configuration


@pytest.mark.parametrize("text", ["", "{", "[]", '"drafter"'])
def test_a_broken_configuration_is_named(tmp_path, text):
    (write_folder(tmp_path, SMALL) / "config.json").write_text(text)
    assert any("config.json" in problem for problem in checkpoint_problems(tmp_path))
    with refused(ValueError, "config.json"):
        DFlashDraftModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with refused(OSError, "config.json"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def tensors_of_qwen36(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("qwen36"), small(QWEN36_27B)) / "model.safetensors"


TAPS, MASK = QWEN36_27B["dflash_config"]["target_layer_ids"], 248070
ROPE = {"rope_type": "default", "rope_theta": 10000000}
GPT_OSS = {"model_type": "gpt_oss", "rope_scaling": None, "rope_parameters": ROPE}


def nested(**changes):
    return {"dflash_config": {**QWEN36_27B["dflash_config"], **changes}}


REMOVED = [
    *("model_type", "block_size", "hidden_size", "num_attention_heads", "head_dim", "rms_norm_eps", "vocab_size"),
    *("max_position_embeddings", "num_target_layers", "rope_theta", "layer_types", "sliding_window"),
    "use_sliding_window",
]
# A changed field of config.json, with what else must be said beside its name. tests/examples.py has many more.
INCONSISTENT = [
    # Two spellings that contradict each other.
    (nested(block_size=8), ["block_size", 16, 8]),
    ({"target_layer_ids": TAPS[:4]}, ["target_layer_ids", TAPS[:4], TAPS]),
    ({"rope_parameters": {**ROPE, "rope_theta": 10000}}, ["rope_theta", 10000]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": ROPE}, ["rope_scaling", "yarn"]),
    ({"torch_dtype": "float16"}, ["torch_dtype", "float16"]),
    # The drafter's own fields.
    ({"dflash_config": None}, ["mask_token_id"]),
    (nested(target_layer_ids=[16, 1, 31, 46, 61]), ["target_layer_ids", "[16, 1, "]),
    (nested(target_layer_ids=[1, 16, 31, 46, 63]), ["target_layer_ids", "0..62"]),
    (nested(target_layer_ids="1,16"), ["target_layer_ids", "'1,16'"]),
    (nested(mask_token_id=248044), ["mask_token_id", 248044, "eos"]),
    (nested(mask_token_id="248070"), ["mask_token_id", "'248070'"]),
    ({"num_target_layers": 61}, ["num_target_layers", 61]),
    # Layers and windows.
    ({"sliding_window": 15}, ["sliding_window", 15, "block_size", 16]),
    ({"layer_types": [SLIDING] * 4}, ["layer_types", 4]),
    ({"layer_types": [SLIDING] * 4 + ["chunked_attention"]}, ["layer_types", "chunked_attention"]),
    ({"is_causal": False, **nested(causal=True)}, ["dflash_config.causal", "is_causal"]),
    # RoPE.
    ({"model_type": "gpt_oss"}, ["model_type", "gpt_oss", "RoPE"]),
    ({**GPT_OSS, "attention_bias": None}, ["attention_bias"]),
    ({"rope_parameters": {"full_attention": ROPE}}, ["rope_parameters", "full_attention"]),
    ({"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}, ["rope_parameters.mrope_section"]),
    ({"rope_theta": "1e7"}, ["rope_theta", "'1e7'"]),
    ({"rope_scaling": {"factor": 4.0}}, ["rope_type", "4.0"]),
    ({"rope_scaling": {"rope_type": "mystery"}}, ["rope_type", "mystery"]),
    # Other layouts, and fields that some readers apply.
    ({"architectures": ["DSparkDraftModel"]}, ["architectures", "DSparkDraftModel"]),
    (nested(sample_from_anchor=True), ["dflash_config.sample_from_anchor", "DSpark"]),
    ({"selector_top_k": 8}, ["selector_top_k", "DFlash 2"]),
    ({"speculators_model_type": "dflash"}, ["speculators_model_type", "convert_speculators"]),
    ({"draft_vocab_size": 32000}, ["draft_vocab_size", 32000, 248320]),
    (nested(output_multiplier=0.5), ["dflash_config.output_multiplier", 0.5]),
    ({"rope_parameters": {**ROPE, "is_neox_style": False}}, ["rope_parameters.is_neox_style"]),
    # Shapes that the tensors do not have.
    ({"num_key_value_heads": 4}, ["num_attention_heads=6", "num_key_value_heads=4"]),
    ({"head_dim": 16}, ["layers.0.self_attn.q_proj.weight"]),
    ({"num_hidden_layers": 4, "layer_types": [FULL] * 4}, ["layers.4.mlp.down_proj.weight"]),
    ({"num_hidden_layers": 6, "layer_types": [FULL] * 6}, ["layers.5.mlp.down_proj.weight"]),
    (nested(target_layer_ids=[1, 16, 31, 46]), ["fc.weight", "[32, 160]", "[32, 128]"]),
]
CHANGES = [*(({name: "removed"}, [name]) for name in REMOVED), *INCONSISTENT]


@pytest.mark.parametrize(("changes", "names"), CHANGES, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "")
def test_md8_an_inconsistent_field_is_named_and_nothing_loads(tmp_path, tensors_of_qwen36, changes, names):
    config = {**small(QWEN36_27B), **copy.deepcopy(changes)}
    config = {name: value for name, value in config.items() if value != "removed"}
    shutil.copy(tensors_of_qwen36, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused(ValueError, *names):
        DFlashDraftModel.from_pretrained(tmp_path)
    if not names[0].startswith(("fc.", "layers.")):
        with refused(ValueError, *names):
            DFlashDraftConfig.from_pretrained(tmp_path)


JUNK = [None, "x", "", [], {}, -1, 0, 1.5, True, [1, "a"], {"a": 1}, [[1]], {"rope_type": [1]}, float("nan")]


@pytest.mark.parametrize("name", [*QWEN36_27B, "rope_parameters", "is_causal", "torch_dtype", "draft_vocab_size"])
def test_junk_is_refused_or_harmless_and_never_a_crash(name):
    for value in JUNK:
        for changes in ({name: value}, nested(**{name: value})):
            raw = {**QWEN36_27B, **copy.deepcopy(changes)}
            read_config(raw)
            try:
                config = DFlashDraftConfig.from_dict(raw)
            except ValueError:
                continue
            assert expected_tensors(vars(config)).keys() >= expected_tensors(normalize_config(QWEN36_27B)).keys()
            assert config.rope_parameters["rope_theta"] in (10000000, 1.5)
            assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (16, TAPS, MASK)


NEUTRAL = {
    **dict.fromkeys(
        ("input_embedding_scale", "output_multiplier", "attention_value_scale", "partial_rotary_factor"), 1.0
    ),
    **dict.fromkeys(("use_swa", "attention_sink_bias", "sample_from_anchor"), False),
    **dict.fromkeys(("final_logit_softcapping", "swa_window_size", "eagle_aux_hidden_state_layer_ids"), None),
    "draft_vocab_size": 248320,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_value_is_no_problem_at_either_level(name):
    for changes in ({name: NEUTRAL[name]}, nested(**{name: NEUTRAL[name]})):
        assert read_config({**QWEN36_27B, **changes})[1] == []
        DFlashDraftConfig.from_dict({**QWEN36_27B, **changes})


@pytest.mark.parametrize(
    ("layer_types", "causal", "top"),
    [([FULL] * 5, False, None), ([SLIDING] * 5, True, None), ([SLIDING] * 4 + [FULL], True, True)],
)
def test_a_nested_causality_that_says_what_the_layers_do_is_no_problem(layer_types, causal, top):
    config = {**QWEN36_27B, "layer_types": layer_types, "is_causal": top, **nested(causal=causal)}
    assert normalize_config(config)["is_causal"] is top


def test_reading_changes_nothing_of_what_is_given():
    raw = copy.deepcopy(QWEN36_27B)
    normalized = normalize_config(raw)
    assert raw == QWEN36_27B and normalize_config(normalized) == normalized
    assert normalized.keys().isdisjoint({"rope_theta", "rope_scaling", "torch_dtype"})
    assert normalized["rope_parameters"] == ROPE
