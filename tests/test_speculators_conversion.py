# SPDX-License-Identifier: Apache-2.0
"""Speculators DFlash checkpoints, laid out by hand as speculators 0.9.0 saves them, into the published layout."""

import copy
import json

import pytest
import torch
from naive import random_drafter
from safetensors.torch import load_file, save_file
from tiny import dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, FrozenTarget
from dflash_hf.convert_speculators import convert_speculators


FULL, SLIDING = "full_attention", "sliding_attention"


def speculators_config(drafter: DFlashDraftModel, target_folder: str | None, **changes) -> dict:
    """The `config.json` of speculators for a drafter, field by field; `changes` reach into the layers' fields too."""
    ours = drafter.config
    layer = {
        "attention_bias": ours.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": ours.head_dim,
        "hidden_act": "silu",
        "hidden_size": ours.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": ours.intermediate_size,
        "layer_types": list(ours.layer_types or []),
        "max_position_embeddings": ours.max_position_embeddings,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": ours.num_attention_heads,
        "num_hidden_layers": ours.num_hidden_layers,
        "num_key_value_heads": ours.num_key_value_heads,
        "pad_token_id": None,
        "rms_norm_eps": ours.rms_norm_eps,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        "sliding_window": ours.sliding_window,
        "tie_word_embeddings": False,
        "transformers_version": "5.19.0",
        "use_cache": True,
        "use_sliding_window": ours.use_sliding_window,
        "vocab_size": ours.vocab_size,
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
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": ours.block_size - 1,
                    "verifier_accept_k": 1,
                }
            ],
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


def hidden_states(drafter: DFlashDraftModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise, context = torch.randn(1, 4, 32, generator=generator), torch.randn(1, 15, 64, generator=generator)
    with torch.no_grad():
        return drafter(noise, context).last_hidden_state


LAYERS = {
    "full": ({"layer_types": [FULL, FULL]}, {}),
    "biases": ({"layer_types": [FULL], "attention_bias": True}, {}),
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
    torch.testing.assert_close(hidden_states(converted), hidden_states(drafter), rtol=0, atol=1e-6)
    new, expected = converted.config.to_dict(), drafter.config.to_dict()
    ignored = {"auto_map", "transformers_version", "_name_or_path", "dtype", "max_window_layers"}
    assert {k: v for k, v in new.items() if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }
    slides = SLIDING in fields["layer_types"]
    warnings = [r.getMessage() for r in caplog.records if r.name == "dflash_hf.convert_speculators"]
    assert ["window of the sliding layers changes at its edge" in m for m in warnings] == [True] * slides


def test_taps_are_one_lower_and_ascending(tmp_path, target_folder):
    """The context that `fc` gives is that of speculators, whose id i is `hidden_states[i]` of the target."""
    target = dense_target()
    ids = [4, 1, 2]
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=1, mask_token_id=260, target_layer_ids=[0, 1, 3], block_size=4
    )
    drafter = DFlashDraftModel(config)
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


def test_dtype_shards_and_training_only_tensors(tmp_path, target_folder):
    drafter = random_drafter([FULL]).to(torch.bfloat16)
    config = speculators_config(drafter, None, dtype="bfloat16")
    tensors = drafter.state_dict() | {
        "verifier_norm.weight": torch.ones(32),
        "verifier_lm_head.weight": torch.zeros(50, 32),
    }
    source = tmp_path / "source"
    write_speculators(source, config, tensors)
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    (source / "model.safetensors").unlink()
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, source / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert_speculators(source, tmp_path / "converted", num_target_layers=6)
    saved = load_file(tmp_path / "converted" / "model.safetensors")
    assert saved.keys() == drafter.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in drafter.state_dict().items())
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["dtype"] == "bfloat16"


REFUSED = {
    "not_speculators": ({"speculators_model_type": None}, "this is no speculators checkpoint"),
    "other_model": ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
    "dflash2": ({"speculators_model_type": "dflash2"}, "speculators_model_type is 'dflash2'"),
    "draft_vocabulary": ({"draft_vocab_size": 32}, "draft_vocab_size is 32 and vocab_size is 50"),
    "sample_from_anchor": ({"sample_from_anchor": True}, "slot j predicts the token after it"),
    "target_width": ({"target_hidden_size": 48}, "target_hidden_size is 48 and hidden_size 32"),
    "no_taps": ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
    "embedding_as_tap": ({"aux_hidden_state_layer_ids": [0, 2]}, "id 0 is the target's embedding"),
    "tap_twice": ({"aux_hidden_state_layer_ids": [2, 2]}, "names a layer twice"),
    "last_layer": ({"aux_hidden_state_layer_ids": [2, 6]}, r"layers in 0\.\.4"),
    "too_few_taps": ({"aux_hidden_state_layer_ids": [2]}, r"fc.weight has shape \[32, 64\]: 1 taps"),
    "no_mask": ({"mask_token_id": None}, "mask_token_id is missing"),
    "no_block_size": ({"block_size": None}, "block_size is missing"),
    "no_layer_config": ({"transformer_layer_config": None}, "transformer_layer_config is None"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "rope_per_layer_type": ({"rope_parameters": {FULL: {"rope_theta": 1.0}}}, "expected one flat set of values"),
    "sliding_without_window": ({"layer_types": [SLIDING]}, "sliding_window=None beside sliding_attention layers"),
    "conv": ({"conv_kernel_size": 4}, "This is the layout of DFlash 2"),
    "unnamed_target": ({"speculators_config": None}, "does not name its target .* Pass num_target_layers"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_published_layout_cannot_hold_is_refused(tmp_path, target_folder, changes, message):
    drafter = random_drafter([FULL])
    config = speculators_config(drafter, target_folder, **copy.deepcopy(changes))
    source = write_speculators(tmp_path / "source", config, drafter.state_dict())
    with pytest.raises(ValueError, match=message):
        convert_speculators(source, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("embed_tokens.weight", (50, 32), "embeddings of the drafter's own"),
        ("lm_head.weight", (50, 32), "a head of the drafter's own"),
        ("t2d", (50,), "a map to a vocabulary"),
        ("d2t", (50,), "a map from a vocabulary"),
        ("layers.0.self_attn.g_proj.weight", (4, 32), "is not a tensor of this configuration"),
        ("norm.weight", None, "norm.weight is missing"),
        ("fc.weight", None, "fc.weight has shape None"),
        ("layers.0.mlp.up_proj.weight", (32, 48), "which is its transpose"),
    ],
)
def test_tensors_that_the_published_layout_has_no_place_for_are_refused(tmp_path, target_folder, name, shape, message):
    drafter = random_drafter([FULL])
    tensors = {key: tensor for key, tensor in drafter.state_dict().items() if key != name}
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    source = write_speculators(tmp_path / "source", speculators_config(drafter, target_folder), tensors)
    with pytest.raises(ValueError, match=message):
        convert_speculators(source, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_a_target_that_cannot_be_read_is_an_error_with_a_way_out(tmp_path):
    drafter = random_drafter([FULL])
    config = speculators_config(drafter, str(tmp_path / "nowhere"))
    source = write_speculators(tmp_path / "source", config, drafter.state_dict())
    with pytest.raises(OSError, match="Pass num_target_layers"):
        convert_speculators(source, tmp_path / "converted")
    assert convert_speculators(source, tmp_path / "converted", num_target_layers=6).config.num_target_layers == 6
