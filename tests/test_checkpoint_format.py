# SPDX-License-Identifier: Apache-2.0
"""Every way in which a checkpoint can be wrong is said before a weight is loaded, and nothing wrong loads."""

import copy
import json
import math
import shutil

import pytest
import torch
from published import FULL, PUBLISHED, QWEN3_8B, QWEN36_27B, SLIDING, small, small_tensors, write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.checkpoint_files import read_tensor_headers
from dflash_hf.checkpoint_format import (
    checkpoint_problems,
    expected_tensors,
    normalize_config,
    read_config,
    tensor_problems,
)


def refused(folder, match):
    """Neither of the two ways to load takes the folder, and one problem has these words."""
    problems = checkpoint_problems(folder)
    assert any(match in problem for problem in problems), problems
    for load in (DFlashDraftModel.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError) as error:
            load(folder)
        assert match in str(error.value)


# Tensors


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_expected_tensors_are_those_of_the_format(name):
    config = small(PUBLISHED[name])
    expected = expected_tensors(normalize_config(config))
    assert expected == {name: tuple(tensor.shape) for name, tensor in small_tensors(config).items()}


def test_the_full_size():
    expected = expected_tensors(normalize_config(QWEN36_27B))
    assert len(expected) == 58
    assert sum(math.prod(shape) for shape in expected.values()) == 1_730_213_120
    assert expected["fc.weight"] == (5120, 25600)


SMALL = small(QWEN3_8B, num_hidden_layers=2, layer_types=[FULL] * 2, attention_bias=True)
NAMES = list(small_tensors(SMALL))


def renamed(name):
    return name.replace("layers.", "layer.") if name.startswith("layers.") else f"{name}s"


# How a tensor is spoiled: its name and value -> (what is there instead, words of the error).
SPOILS = {
    "removed": lambda name, tensor: ({}, f"{name} is missing"),
    "renamed": lambda name, tensor: ({renamed(name): tensor}, f"{name} is missing"),
    "renamed_with_prefix": lambda name, tensor: ({f"model.{name}": tensor}, f'model.{name} has the prefix "model."'),
    "doubled_with_prefix": lambda name, tensor: (
        {name: tensor, f"model.{name}": tensor.clone()},
        f"model.{name} has the prefix",
    ),
    "longer": lambda name, tensor: ({name: torch.cat([tensor, tensor])}, f"{name} has shape"),
    "transposed": lambda name, tensor: ({name: tensor.T.contiguous()}, f"{name} has shape"),
    "one_more_dimension": lambda name, tensor: ({name: tensor[None]}, f"{name} has shape"),
    "int8": lambda name, tensor: ({name: tensor.to(torch.int8)}, f"{name} has dtype I8"),
    "float64": lambda name, tensor: ({name: tensor.double()}, f"{name} has dtype F64"),
    "float8": lambda name, tensor: ({name: tensor.to(torch.float8_e4m3fn)}, f"{name} has dtype F8_E4M3"),
    "mixed": lambda name, tensor: ({name: tensor.float()}, "different dtypes"),
}


VECTORS = {name for name, tensor in small_tensors(SMALL).items() if tensor.ndim == 1}


@pytest.mark.parametrize(
    ("name", "kind"), [(n, kind) for n in NAMES for kind in SPOILS if not (kind == "transposed" and n in VECTORS)]
)
def test_a_spoiled_tensor_is_named_and_nothing_loads(tmp_path, name, kind):
    tensors = small_tensors(SMALL)
    spoiled, words = SPOILS[kind](name, tensors.pop(name))
    write_folder(tmp_path, SMALL, {**tensors, **spoiled})
    with pytest.raises(ValueError) as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_every_way_to_load_refuses_a_spoiled_tensor(tmp_path, spoil):
    tensors = small_tensors(SMALL)
    spoiled, words = spoil("fc.weight", tensors.pop("fc.weight"))
    refused(write_folder(tmp_path, SMALL, {**tensors, **spoiled}), words)


def test_all_problems_are_listed_at_once(tmp_path):
    tensors = small_tensors(SMALL)
    del tensors["norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    write_folder(tmp_path, {**SMALL, "use_swa": True}, tensors)
    with pytest.raises(ValueError) as error:
        DFlashDraftModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    for words in (
        "use_swa is True",
        "norm.weight is missing",
        "lm_head.weight is not a tensor",
        "fc.weight has shape [160, 32], which is its transpose",
    ):
        assert words in str(error.value)


def test_a_vocabulary_of_the_drafters_own_is_named(tmp_path):
    tensors = {**small_tensors(SMALL), "d2t": torch.zeros(4, dtype=torch.bfloat16)}
    refused(write_folder(tmp_path, SMALL, tensors), "d2t maps a vocabulary")


# Files


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    torch.save(small_tensors(SMALL), tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin is there, but pickles can run code")


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    refused(tmp_path, "no safetensors file")


def test_a_mask_embedding_of_its_own(tmp_path):
    write_folder(tmp_path, SMALL)
    torch.save(torch.zeros(3), tmp_path / "mask_embedding.pt")
    refused(tmp_path, "mask_embedding.pt holds an embedding")


@pytest.mark.parametrize("kept", [0, 5, 400, -1])
def test_a_broken_file_is_named(tmp_path, kept):
    path = write_folder(tmp_path, SMALL) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, "model.safetensors is not a readable safetensors file")


@pytest.mark.parametrize("text", ["", "{", "[]", '"drafter"'])
def test_a_broken_configuration_is_named(tmp_path, text):
    (write_folder(tmp_path, SMALL) / "config.json").write_text(text)
    assert any("config.json" in problem for problem in checkpoint_problems(tmp_path))
    with pytest.raises(ValueError, match=r"config\.json"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_no_configuration(tmp_path):
    (write_folder(tmp_path, SMALL) / "config.json").unlink()
    with pytest.raises(OSError, match=r"config\.json"):
        DFlashDraftModel.from_pretrained(tmp_path)


def sharded(folder):
    DFlashDraftModel(DFlashDraftConfig.from_dict(small(QWEN3_8B))).save_pretrained(folder, max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return index, sorted(folder.glob("model-*.safetensors"))


def test_shards_have_the_headers_of_one_file(tmp_path):
    sharded(tmp_path)
    headers = read_tensor_headers(tmp_path)
    assert not tensor_problems(normalize_config(small(QWEN3_8B)), headers)
    assert {dtype for dtype, _ in headers.values()} == {"F32"}


def leave_out_a_shard(folder):
    _, shards = sharded(folder)
    shards[1].unlink()
    return "names files that are not there"


def leave_out_the_index(folder):
    sharded(folder)
    (folder / "model.safetensors.index.json").unlink()
    return "is in no index"


def leave_an_old_file(folder):
    sharded(folder)
    write_folder(folder / "old", small(QWEN3_8B, dtype="float32"))
    shutil.copy(folder / "old" / "model.safetensors", folder / "model.safetensors")
    return "readers differ in which one they take"


def leave_an_old_index(folder):
    _, shards = sharded(folder)
    write_folder(folder, small(QWEN3_8B, dtype="float32"))
    for shard in shards:
        shard.unlink()
    return "model.safetensors.index.json"


def name_another_shard(folder):
    index, shards = sharded(folder)
    index["weight_map"]["norm.weight"] = shards[0].name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "says that norm.weight lies in"


def double_a_tensor(folder):
    _, shards = sharded(folder)
    tensors, more = load_file(shards[0]), load_file(shards[1])
    save_file({**more, **dict(list(tensors.items())[:1])}, shards[1], metadata={"format": "pt"})
    return "readers differ in which one they take"


SHARDS = [
    leave_out_a_shard,
    leave_out_the_index,
    leave_an_old_file,
    leave_an_old_index,
    name_another_shard,
    double_a_tensor,
]


@pytest.mark.parametrize("spoil", SHARDS)
def test_shards_that_disagree_are_refused(tmp_path, spoil):
    refused(tmp_path, spoil(tmp_path))


# Configuration

REMOVED = [
    "model_type",
    "block_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "num_target_layers",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
]
TAPS, MASK = QWEN36_27B["dflash_config"]["target_layer_ids"], 248070
ROPE = {"rope_type": "default", "rope_theta": 10000000}


def nested(**changes):
    return {"dflash_config": {**QWEN36_27B["dflash_config"], **changes}}


# Changes to the configuration -> words of the error.
INCONSISTENT = [
    # Two spellings that contradict each other.
    (nested(block_size=8), "block_size is 16 at the top level and 8 in dflash_config"),
    ({"target_layer_ids": TAPS[:4]}, "target_layer_ids is [1, 16, 31, 46] at the top level"),
    ({"mask_token_id": 5}, "mask_token_id is 5 at the top level and 248070"),
    (nested(num_target_layers=36), "num_target_layers is 64 at the top level"),
    (nested(sliding_window=4096), "sliding_window is 2048 at the top level"),
    ({"rope_parameters": {**ROPE, "rope_theta": 10000}}, "rope_theta has several values"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": ROPE}, "rope_scaling is {'rope_type'"),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 10000}}, "rope_theta has several values"),
    ({"torch_dtype": "float16"}, "dtype and torch_dtype differ"),
    # The drafter's own fields.
    ({"dflash_config": {"mask_token_id": MASK}}, "target_layer_ids is missing"),
    ({"dflash_config": {"target_layer_ids": TAPS}}, "mask_token_id is missing"),
    ({"dflash_config": None}, "mask_token_id is missing"),
    ({"dflash_config": [1]}, "dflash_config is [1]"),
    (nested(target_layer_ids=[]), "target_layer_ids is missing"),
    (nested(target_layer_ids=[1, 16, 16, 46, 61]), "unique and ascending"),
    (nested(target_layer_ids=[16, 1, 31, 46, 61]), "unique and ascending"),
    (nested(target_layer_ids=[1, 16, 31, 46, 63]), "final norm"),
    (nested(target_layer_ids=[-1, 16, 31, 46, 61]), "layers in 0..62"),
    (nested(target_layer_ids="1,16"), "target_layer_ids is '1,16'"),
    (nested(mask_token_id=248320), "mask_token_id=248320 is outside"),
    (nested(mask_token_id=248044), "equals the eos or pad token"),
    (nested(mask_token_id="248070"), "mask_token_id='248070'"),
    ({"block_size": 1}, "block_size is 1"),
    ({"block_size": "16"}, "block_size is '16'"),
    ({"num_target_layers": 61}, "no such layer"),
    # Windows.
    ({"use_sliding_window": False}, "use_sliding_window=False"),
    ({"sliding_window": None}, "sliding_window=None"),
    ({"sliding_window": 15}, "sliding_window=15 is smaller than block_size=16"),
    ({"layer_types": [SLIDING] * 4}, "layer_types has 4 entries"),
    ({"layer_types": [SLIDING] * 4 + ["chunked_attention"]}, "layer_types holds ['chunked_attention']"),
    ({"layer_types": "sliding_attention"}, "layer_types is 'sliding_attention'"),
    # RoPE.
    ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss' and RoPE is not written in full"),
    ({"model_type": "gpt_oss", "rope_scaling": {"factor": 2.0}}, "and RoPE is not written in full"),
    ({"model_type": "gpt_oss", "rope_parameters": ROPE, "attention_bias": None}, "attention_bias is missing"),
    ({"rope_parameters": {"full_attention": ROPE}}, "expected one flat set of values"),
    ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor is 0.25"),
    ({"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}, "rope_parameters.mrope_section is [2, 1, 1]"),
    ({"rope_parameters": {**ROPE, "is_neox_style": False}}, "rope_parameters.is_neox_style is False"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_theta": "1e7"}, "rope_theta is '1e7'"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_scaling": {"factor": 4.0}}, "RoPE has {'factor': 4.0} and no rope_type"),
    ({"rope_scaling": {"rope_type": "mystery"}}, "rope_type is 'mystery'"),
    # Other layouts.
    ({"architectures": ["Qwen3ForCausalLM"]}, "architectures is ['Qwen3ForCausalLM']"),
    ({"architectures": ["DFlash2DraftModel"]}, "architectures is ['DFlash2DraftModel']"),
    ({"architectures": ["DSparkDraftModel"]}, "architectures is ['DSparkDraftModel']"),
    ({"architectures": ["DFlareDraftModel"]}, "architectures is ['DFlareDraftModel']"),
    ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    (nested(sample_from_anchor=True), "dflash_config.sample_from_anchor is True"),
    (nested(markov_rank=64), "dflash_config.markov_rank is 64"),
    (nested(conv_kernel_size=4), "dflash_config.conv_kernel_size is 4"),
    (nested(selector_rank=32), "dflash_config.selector_rank is 32"),
    ({"selector_top_k": 8}, "selector_top_k is 8"),
    ({"dflare_config": {"mask_token_id": 4}}, "layout of DFlare"),
    ({"speculators_model_type": "dflash"}, "layout of speculators"),
    ({"draft_vocab_size": 32000}, "draft_vocab_size is 32000 and vocab_size is 248320"),
    # Applied by some readers.
    ({"input_embedding_scale": 2.0}, "input_embedding_scale is 2.0"),
    (nested(output_multiplier=0.5), "dflash_config.output_multiplier is 0.5"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    (nested(use_swa=True), "dflash_config.use_swa is True"),
    (nested(swa_window_size=2048), "dflash_config.swa_window_size is 2048"),
    (nested(attention_sink_bias=True), "dflash_config.attention_sink_bias is True"),
    ({"attention_value_scale": 0.7}, "attention_value_scale is 0.7"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 17]}, "eagle_aux_hidden_state_layer_ids is [2, 17]"),
    (nested(causal=True), "dflash_config.causal is True and is_causal at the top level is None"),
    (nested(causal=False), "dflash_config.causal is False and is_causal at the top level is None"),
    ({"is_causal": False, **nested(causal=True)}, "is_causal at the top level is False"),
    (nested(is_causal=False), "dflash_config.is_causal is False"),
    ({"is_causal": "yes"}, "is_causal is 'yes'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
    # Shape and type.
    ({"dtype": "float64"}, "dtype is 'float64'"),
    ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
    ({"num_key_value_heads": 4}, "num_attention_heads=6 is not a multiple of num_key_value_heads=4"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": 64}, "fc.weight has shape [32, 160]"),
    ({"head_dim": 16}, "layers.0.self_attn.q_proj.weight has shape"),
    ({"num_attention_heads": 8}, "layers.0.self_attn.q_proj.weight has shape"),
    ({"intermediate_size": 32}, "layers.0.mlp.gate_proj.weight has shape"),
    ({"num_hidden_layers": 4, "layer_types": [FULL] * 4}, "layers.4.mlp.down_proj.weight is not a tensor"),
    ({"num_hidden_layers": 6, "layer_types": [FULL] * 6}, "layers.5.mlp.down_proj.weight is missing"),
    ({"attention_bias": True}, "layers.0.self_attn.q_proj.bias is missing"),
    ({"attention_bias": "no"}, "attention_bias is 'no'"),
    (nested(target_layer_ids=[1, 16, 31, 46]), "fc.weight has shape [32, 160]"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
]


@pytest.fixture(scope="module")
def tensors_of_qwen36(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("qwen36"), small(QWEN36_27B)) / "model.safetensors"


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_field_is_named_and_nothing_loads(tmp_path, tensors_of_qwen36, name):
    config = small(QWEN36_27B)
    del config[name]
    shutil.copy(tensors_of_qwen36, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (DFlashDraftModel.from_pretrained, DFlashDraftConfig.from_pretrained):
        with pytest.raises(ValueError, match=name):
            load(tmp_path)


@pytest.mark.parametrize(("changes", "words"), INCONSISTENT, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "")
def test_md8_an_inconsistent_field_is_named_and_nothing_loads(tmp_path, tensors_of_qwen36, changes, words):
    config = {**small(QWEN36_27B), **copy.deepcopy(changes)}
    if changes.get("model_type") == "gpt_oss" and "rope_parameters" in changes:
        del config["rope_scaling"]
    shutil.copy(tensors_of_qwen36, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(words in problem for problem in checkpoint_problems(tmp_path))
    with pytest.raises(ValueError) as error:
        DFlashDraftModel.from_pretrained(tmp_path)
    assert words in str(error.value)
    if words.startswith(("fc.", "layers.")):
        return
    with pytest.raises(ValueError) as error:
        DFlashDraftConfig.from_pretrained(tmp_path)
    assert words in str(error.value)


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
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "use_swa": False,
    "swa_window_size": None,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "eagle_aux_hidden_state_layer_ids": None,
    "sample_from_anchor": False,
    "draft_vocab_size": 248320,
    "partial_rotary_factor": 1.0,
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
    assert raw == QWEN36_27B
    assert normalize_config(normalized) == normalized
    assert normalized.keys().isdisjoint({"rope_theta", "rope_scaling", "torch_dtype"})
    assert normalized["rope_parameters"] == ROPE
