# SPDX-License-Identifier: Apache-2.0
"""Speculators DFlash checkpoints, laid out by hand as speculators 0.9.0 saves them, into the published layout."""

import copy
import json

import pytest
import torch
from naive import random_drafter
from published import FULL, SLIDING
from safetensors.torch import load_file, save_file
from tiny import dense_target, refused, tiny_drafter

from dflash_hf import DFlashDraftModel, FrozenTarget
from dflash_hf.convert_speculators import convert_speculators


def speculators_config(drafter: DFlashDraftModel, target_folder: str | None, **changes) -> dict:
    """The `config.json` of speculators for a drafter, field by field; `changes` reach into the layers' fields too."""
    ours = drafter.config
    same = ("attention_bias", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings")
    same += ("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "sliding_window")
    layer = {
        **{name: ours.to_dict()[name] for name in (*same, "use_sliding_window", "vocab_size")},
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": list(ours.layer_types or []),
        "max_window_layers": 28,
        "model_type": "qwen3",
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "transformers_version": "5.19.0",
        "use_cache": True,
    }
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [tap + 1 for tap in ours.target_layer_ids or []],
        "block_size": ours.block_size,
        "draft_vocab_size": ours.vocab_size,
        "dtype": "float32",
        "mask_token_id": ours.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": ours.block_size - 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": target_folder},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": "5.19.0",
    }
    for name, value in changes.items():
        (layer if name in layer and name not in config else config)[name] = value
    return config


def write_speculators(folder, config: dict, tensors: dict[str, torch.Tensor]):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    """The configuration of a target of six layers; the drafter's other sizes do not come from it."""
    folder = tmp_path_factory.mktemp("target")
    dense_target().config.save_pretrained(folder)
    return str(folder)


LAYERS = {
    "biases": ({"layer_types": [FULL, FULL], "attention_bias": True}, {}),
    "no_layer_types": ({"layer_types": [FULL, FULL]}, {"layer_types": None}),
    "sliding_and_full": ({"layer_types": [SLIDING, FULL], "window": 6}, {}),
    "sliding_not_causal": (
        {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": False},
        {"sliding_window_non_causal": True},
    ),
    # Without a sliding layer the flag says nothing.
    "flag_without_sliding": ({"layer_types": [FULL]}, {"sliding_window_non_causal": True}),
}


@pytest.mark.parametrize(("fields", "changes"), LAYERS.values(), ids=LAYERS)
def test_a_converted_drafter_computes_what_its_weights_say(tmp_path, caplog, target_folder, fields, changes):
    drafter = random_drafter(**fields)
    config = speculators_config(drafter, target_folder, **changes)
    source = write_speculators(tmp_path / "source", config, drafter.state_dict())
    convert_speculators(source, tmp_path / "converted")
    converted = DFlashDraftModel.from_pretrained(tmp_path / "converted")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor), name
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 15, 64)
    with torch.no_grad():
        states = [model(noise, context).last_hidden_state for model in (converted, drafter)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)
    new, expected = converted.config.to_dict(), drafter.config.to_dict()
    for name in ("auto_map", "transformers_version", "_name_or_path", "dtype", "max_window_layers"):
        new.pop(name, None)
        expected.pop(name, None)
    assert new == expected
    # Servers count the window otherwise than speculators trains it, which is told.
    told = ["sliding_window" in r.getMessage() for r in caplog.records if r.name == "dflash_hf.convert_speculators"]
    assert told == [True] * (SLIDING in fields["layer_types"])


def test_taps_are_one_lower_and_ascending(tmp_path, target_folder):
    """The context that `fc` gives is that of speculators, whose id i is `hidden_states[i]` of the target."""
    target, ids = dense_target(), [4, 1, 2]
    drafter = tiny_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1, 3])
    source = speculators_config(drafter, target_folder, aux_hidden_state_layer_ids=ids)
    source["transformer_layer_config"]["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    write_speculators(tmp_path / "source", source, drafter.state_dict())
    converted = convert_speculators(tmp_path / "source", tmp_path / "converted")
    assert converted.config.target_layer_ids == [0, 1, 3] and converted.config.num_target_layers == 6
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        states = target(tokens, output_hidden_states=True).hidden_states
        expected = drafter.fc(torch.cat([states[i] for i in ids], dim=-1))
        context = FrozenTarget(target, converted.config.target_layer_ids).context_hidden_states(tokens)
        torch.testing.assert_close(converted.fc(context), expected, rtol=0, atol=1e-5)


def test_dtype_shards_and_training_only_tensors(tmp_path):
    drafter = random_drafter([FULL]).to(torch.bfloat16)
    extra = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.zeros(50, 32)}
    tensors = drafter.state_dict() | extra
    source = write_speculators(tmp_path / "source", speculators_config(drafter, None, dtype="bfloat16"), tensors)
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + (i > 4)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in {*weight_map.values()}:
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert_speculators(source, tmp_path / "converted", num_target_layers=6)
    saved = load_file(tmp_path / "converted" / "model.safetensors")
    assert saved.keys() == drafter.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in drafter.state_dict().items())
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["dtype"] == "bfloat16"


# Changed fields -> names of the error.
REFUSED = {
    "not_speculators": ({"speculators_model_type": None}, ["speculators_model_type"]),
    "other_model": ({"speculators_model_type": "eagle3"}, ["speculators_model_type", "eagle3"]),
    "draft_vocabulary": ({"draft_vocab_size": 32}, ["draft_vocab_size", 32, 50]),
    "sample_from_anchor": ({"sample_from_anchor": True}, ["sample_from_anchor", "DSpark"]),
    "target_width": ({"target_hidden_size": 48}, ["target_hidden_size", 48, 32]),
    "no_taps": ({"aux_hidden_state_layer_ids": None}, ["aux_hidden_state_layer_ids"]),
    "embedding_as_tap": ({"aux_hidden_state_layer_ids": [0, 2]}, ["aux_hidden_state_layer_ids", [0, 2]]),
    "tap_twice": ({"aux_hidden_state_layer_ids": [2, 2]}, ["aux_hidden_state_layer_ids", [2, 2]]),
    "last_layer": ({"aux_hidden_state_layer_ids": [2, 6]}, ["target_layer_ids", "0..4"]),
    "too_few_taps": ({"aux_hidden_state_layer_ids": [2]}, ["fc.weight", [32, 64], [32, 32]]),
    "no_mask": ({"mask_token_id": None}, ["mask_token_id"]),
    "no_layer_config": ({"transformer_layer_config": None}, ["transformer_layer_config"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    "sliding_without_window": ({"layer_types": [SLIDING]}, ["sliding_window"]),
    "conv": ({"conv_kernel_size": 4}, ["conv_kernel_size", "DFlash 2"]),
    "unnamed_target": ({"speculators_config": None}, ["speculators_config", "num_target_layers"]),
}


@pytest.mark.parametrize(("changes", "names"), REFUSED.values(), ids=REFUSED)
def test_what_the_published_layout_cannot_hold_is_refused(tmp_path, target_folder, changes, names):
    drafter = random_drafter([FULL])
    config = speculators_config(drafter, target_folder, **copy.deepcopy(changes))
    source = write_speculators(tmp_path / "source", config, drafter.state_dict())
    with refused(ValueError, *names):
        convert_speculators(source, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("embed_tokens.weight", (50, 32)), ("lm_head.weight", (50, 32)), ("t2d", (50,)), ("d2t", (50,))),
        *(("layers.0.self_attn.g_proj.weight", (4, 32)), ("norm.weight", None), ("fc.weight", None)),
        ("layers.0.mlp.up_proj.weight", (32, 48)),
    ],
)
def test_tensors_that_the_published_layout_has_no_place_for_are_refused(tmp_path, target_folder, name, shape):
    drafter = random_drafter([FULL])
    tensors = {key: tensor for key, tensor in drafter.state_dict().items() if key != name}
    tensors |= {} if shape is None else {name: torch.zeros(shape)}
    source = write_speculators(tmp_path / "source", speculators_config(drafter, target_folder), tensors)
    with refused(ValueError, name):
        convert_speculators(source, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_a_target_that_cannot_be_read_is_an_error_with_a_way_out(tmp_path):
    drafter = random_drafter([FULL])
    config = speculators_config(drafter, str(tmp_path / "nowhere"))
    source = write_speculators(tmp_path / "source", config, drafter.state_dict())
    with refused(OSError, "nowhere", "num_target_layers"):
        convert_speculators(source, tmp_path / "converted")
    assert convert_speculators(source, tmp_path / "converted", num_target_layers=6).config.num_target_layers == 6
