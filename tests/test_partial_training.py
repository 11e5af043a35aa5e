# SPDX-License-Identifier: Apache-2.0
"""Adapters and frozen parts: only what is named moves, merging changes nothing, resuming is exact."""

import json

import pytest
import torch
from runs import make_trainer
from safetensors.torch import load_file
from tiny import MASK_TOKEN_ID, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, validate_checkpoint
from dflash_hf.adapters import TARGET_MODULES, add_adapter, load_adapter, lora_config, merge_adapter
from dflash_hf.adapting import plain_drafter


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture(scope="module")
def base(target, tmp_path_factory):
    """A published drafter, in bf16 as published ones are."""
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    folder = tmp_path_factory.mktemp("base")
    DFlashDraftModel(config).save_pretrained(folder, dtype=torch.bfloat16)
    return folder


def adapted(folder, target, base, peft_config=None, **overrides):
    overrides = {"max_steps": 6, "save_steps": 3, "learning_rate": 1e-2, **overrides}
    peft_config = lora_config(4) if peft_config is None else peft_config
    return make_trainer(
        folder, target, drafter=DFlashDraftModel.from_pretrained(base), peft_config=peft_config, **overrides
    )


def inputs_of(drafter):
    torch.manual_seed(1)
    config = drafter.config
    noise = torch.randn(2, config.block_size, config.hidden_size)
    return {"noise_embeds": noise, "context_hidden_states": torch.randn(2, 9, 2 * config.hidden_size)}


@torch.no_grad()
def hidden_states(drafter):
    return drafter.eval()(**inputs_of(drafter)).last_hidden_state


@pytest.fixture(scope="module")
def run(target, base, tmp_path_factory):
    """A finished run: its trainer and its folder."""
    folder = tmp_path_factory.mktemp("adapted")
    trainer = adapted(folder, target, base)
    trainer.train()
    trainer.save_model()
    return trainer, folder


def test_only_the_adapter_moves_and_only_the_adapter_is_saved(run, base):
    trainer, folder = run
    before = load_file(base / "model.safetensors")
    named = dict(trainer.model.named_parameters())
    moved = {name for name, p in named.items() if p.requires_grad}
    assert moved and all("lora_" in name for name in moved)
    # Every matrix has one, and B starts at zero: what is not zero was trained.
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in moved} == set(TARGET_MODULES)
    assert all(named[name].abs().max() > 0 for name in moved if "lora_B" in name)
    kept = {name.removeprefix("base_model.model.").replace(".base_layer", ""): p for name, p in named.items()}
    assert all(torch.equal(kept[name], tensor.float()) for name, tensor in before.items())
    assert not (folder / "model.safetensors").exists() and not (folder / "checkpoint-6" / "model.safetensors").exists()
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == len(moved) and all("lora_" in name for name in saved)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and not (folder / "README.md").exists()


def test_merged_equals_the_adapter_and_is_a_valid_checkpoint(run, base, tmp_path):
    trainer, folder = run
    expected = hidden_states(trainer.model)
    assert (hidden_states(DFlashDraftModel.from_pretrained(base, dtype=torch.float32)) - expected).abs().max() > 1e-2
    copy = plain_drafter(trainer.model)
    torch.testing.assert_close(hidden_states(copy), expected, rtol=1e-6, atol=1e-6)
    merged = merge_adapter(folder)
    torch.testing.assert_close(hidden_states(merged), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden_states(load_adapter(folder)), expected, rtol=0, atol=0)
    # The adapter is still there to be trained.
    assert any(p.requires_grad for p in trainer.model.parameters())
    merged.save_pretrained(tmp_path, dtype=torch.bfloat16)
    report = validate_checkpoint(tmp_path)
    assert report.ok, report
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def test_an_adapter_resumes_exactly(run, target, base, tmp_path):
    trainer, folder = run
    resumed = adapted(tmp_path, target, base)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    expected = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in resumed.model.named_parameters())


def test_a_checkpoint_of_something_else_is_not_resumed(run, target, base, tmp_path):
    _, folder = run
    whole = make_trainer(tmp_path, target, drafter=DFlashDraftModel.from_pretrained(base), max_steps=6)
    with pytest.raises(ValueError, match="is of an adapter, and this run trains a whole drafter"):
        whole.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    other = adapted(tmp_path, target, base, lora_config(2))
    with pytest.raises(ValueError, match=r"another adapter: r 4 there and 2 here"):
        other.train(resume_from_checkpoint=str(folder / "checkpoint-3"))


def test_under_autocast_the_frozen_drafter_stays_in_bf16(target, base, tmp_path):
    trainer = adapted(tmp_path, target, base, bf16=True, max_steps=1)
    types = {p.dtype for name, p in trainer.model.named_parameters() if "lora_" not in name}
    assert types == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


def test_an_adapter_needs_a_base_with_a_name_and_no_second_choice(target, base, tmp_path):
    with pytest.raises(ValueError, match="has no name"):
        make_trainer(tmp_path, target, peft_config=lora_config(4))
    with pytest.raises(ValueError, match="both given"):
        adapted(tmp_path, target, base, trainable_modules=["fc"])
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        load_adapter(base)


@pytest.mark.parametrize("modules", [["fc", "hidden_norm"], ["layers.1", "norm"]])
def test_named_modules_are_trained_and_nothing_else(target, base, tmp_path, modules):
    drafter = DFlashDraftModel.from_pretrained(base)
    trainer = make_trainer(
        tmp_path, target, drafter=drafter, trainable_modules=modules, max_steps=2, save_strategy="no"
    )
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer.train()
    moved = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if any(name.startswith(f"{module}.") for module in modules)}


@pytest.mark.parametrize("modules", [["layer"], []])
def test_a_module_that_is_not_there_is_named_with_those_that_are(target, base, tmp_path, modules):
    with pytest.raises(ValueError, match=r"the drafter has no .*'fc', 'hidden_norm'.*'layers.1'"):
        make_trainer(tmp_path, target, drafter=DFlashDraftModel.from_pretrained(base), trainable_modules=modules)


@pytest.mark.parametrize("part", [{"peft_config": lora_config(2)}, {"trainable_modules": ["layers.1"]}])
def test_checkpointed_layers_train_the_same_part_the_same(target, base, tmp_path, part):
    """Frozen inputs of a checkpointed layer must not cut off its gradients."""
    weights = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            tmp_path / str(checkpointing),
            target,
            drafter=DFlashDraftModel.from_pretrained(base),
            activation_checkpointing=checkpointing,
            max_steps=2,
            save_strategy="no",
            learning_rate=1e-2,
            **part,
        )
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        weights.append({name: p for name, p in trainer.model.named_parameters() if p.requires_grad})
        # The first step of an adapter moves B, the second A too.
        assert all(not torch.equal(p, start[name]) for name, p in weights[-1].items())
    for name, parameter in weights[0].items():
        torch.testing.assert_close(parameter, weights[1][name], rtol=1e-4, atol=1e-5)


def test_hb1_saving_an_adapter_asks_the_hub_nothing(base, tmp_path, monkeypatch):
    def ask(*args, **kwargs):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", ask)
    drafter = DFlashDraftModel.from_pretrained(base)
    drafter.config._name_or_path = "org/base-DFlash"
    add_adapter(drafter, lora_config(2)).save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "org/base-DFlash"
