# SPDX-License-Identifier: Apache-2.0
"""Adapters: only they move and are saved, merging changes nothing, resuming is exact, only their base takes them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from runs import make_trainer
from safetensors.torch import load_file, save_file
from tiny import dense_target, refused, tiny_drafter

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, validate_checkpoint
from dflash_hf.adapters import (
    TARGET_MODULES,
    add_adapter,
    check_adapter_checkpoint,
    load_adapter,
    lora_config,
    merge_adapter,
)
from dflash_hf.adapting import check_part, plain_drafter


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture(scope="module")
def base(target, tmp_path_factory):
    """A published drafter, in bf16 as published ones are."""
    folder = tmp_path_factory.mktemp("base")
    tiny_drafter(target).save_pretrained(folder, dtype=torch.bfloat16)
    return folder


def adapted(folder, target, base, peft_config=None, **overrides):
    overrides = {"max_steps": 6, "save_steps": 3, "learning_rate": 1e-2, **overrides}
    drafter = DFlashDraftModel.from_pretrained(base)
    return make_trainer(folder, target, drafter=drafter, peft_config=peft_config or lora_config(4), **overrides)


@torch.no_grad()
def hidden_states(drafter):
    generator = torch.Generator().manual_seed(1)
    noise, context = (torch.randn(2, *shape, generator=generator) for shape in ((4, 64), (9, 128)))
    return drafter.eval()(noise_embeds=noise, context_hidden_states=context).last_hidden_state


# --- Training one.


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
    # Every matrix has one, and B starts at zero: what is not zero was trained.
    assert all("lora_" in name for name in moved)
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
    torch.testing.assert_close(hidden_states(plain_drafter(trainer.model)), expected, rtol=1e-6, atol=1e-6)
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
    checkpoint = str(run[1] / "checkpoint-3")
    whole = make_trainer(tmp_path, target, drafter=DFlashDraftModel.from_pretrained(base), max_steps=6)
    with refused(ValueError, checkpoint, "an adapter", "a whole drafter"):
        whole.train(resume_from_checkpoint=checkpoint)
    other = adapted(tmp_path, target, base, lora_config(2))
    with refused(ValueError, checkpoint, "r 4 there and 2 here"):
        other.train(resume_from_checkpoint=checkpoint)


def test_under_autocast_the_frozen_drafter_stays_in_bf16(target, base, tmp_path):
    trainer = adapted(tmp_path, target, base, bf16=True, max_steps=1)
    assert {p.dtype for name, p in trainer.model.named_parameters() if "lora_" not in name} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0


@pytest.mark.parametrize("part", [{"peft_config": lora_config(2)}, {"trainable_modules": ["layers.1"]}])
def test_checkpointed_layers_train_the_same_part_the_same(target, base, tmp_path, part):
    """Frozen inputs of a checkpointed layer must not cut off its gradients."""
    trained = []
    for checkpointing in (False, True):
        arguments = {"activation_checkpointing": checkpointing, "save_strategy": "no", "learning_rate": 1e-2, **part}
        drafter = DFlashDraftModel.from_pretrained(base)
        trainer = make_trainer(tmp_path, target, drafter=drafter, max_steps=2, **arguments)
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
        trained.append({name: p for name, p in trainer.model.named_parameters() if p.requires_grad})
        # The first step of an adapter moves B, the second A too.
        assert all(not torch.equal(p, start[name]) for name, p in trained[-1].items())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)


# --- Adapters that cannot be, refused before the target is loaded.


@pytest.mark.parametrize(
    ("peft_config", "names"),
    [
        ({"r": 4}, ["peft_config", "dict"]),
        (lora_config(0), ["lora_rank", "0"]),
        (lora_config(2.5), ["lora_rank", "2.5"]),
        (lora_config(4, 0), ["lora_alpha", "0"]),
        (lora_config(4, target_modules=["qkv"]), ["lora_modules", "qkv", "q_proj"]),
        (lora_config(4, target_modules=["fc", "qproj"]), ["qproj"]),
        (lora_config(4, target_modules=["norm"]), ["lora_modules", "norm"]),
        (lora_config(4, target_modules=[]), ["target_modules"]),
        (lora_config(4, modules_to_save=["norm", "head"]), ["head"]),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_before_the_target_is_loaded(base, tmp_path, peft_config, names):
    drafter = DFlashDraftModel.from_pretrained(base)
    # This target could not be loaded.
    with refused(ValueError, *names):
        make_trainer(tmp_path, "no/target", drafter=drafter, peft_config=peft_config)
    assert not any("lora" in name for name, _ in drafter.named_modules())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"target_modules": ["fc", "layers.0.self_attn.q_proj"]},
        {"target_modules": r"layers\.\d+\.mlp\..*_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"modules_to_save": ["norm", "layers.0.mlp"], "target_modules": ["fc"]},
    ],
)
def test_an_adapter_that_can_be_passes_and_is_made(base, kwargs):
    drafter, config = DFlashDraftModel.from_pretrained(base), lora_config(2, 6, **kwargs)
    check_part(drafter, config, None)
    made = add_adapter(drafter, config)
    assert any("lora_A" in name for name, _ in made.named_parameters())
    assert {module.scaling["default"] for module in made.modules() if isinstance(module, LoraLayer)} == {3.0}


def test_an_adapter_needs_a_base_with_a_name_without_one_and_no_second_choice(target, base, adapter, tmp_path):
    with refused(ValueError, "peft_config", "save_pretrained"):
        make_trainer(tmp_path, target, peft_config=lora_config(4))
    with refused(ValueError, "peft_config", "trainable_modules=['fc']"):
        adapted(tmp_path, target, base, trainable_modules=["fc"])
    drafter = DFlashDraftModel.from_pretrained(base)
    for model in (add_adapter(drafter, lora_config(2)), drafter, load_adapter(adapter)):
        with refused(ValueError, "peft_config", "merge_adapter"):
            add_adapter(model, lora_config(2))


# --- Loading one.


@pytest.fixture
def adapter(target, tmp_path, monkeypatch):
    """An adapter in `adapter`, for the drafter in `base`; a drafter of the same shape in `other`."""
    monkeypatch.chdir(tmp_path)
    tiny_drafter(target).save_pretrained("base")
    weights = {name: tensor + 0.01 for name, tensor in load_file("base/model.safetensors").items()}
    shutil.copytree("base", "other")
    save_file(weights, "other/model.safetensors", metadata={"format": "pt"})
    made = add_adapter(DFlashDraftModel.from_pretrained("base"), lora_config(4))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    made.save_pretrained("adapter")
    return tmp_path / "adapter"


def other_weights(change):
    def spoil(folder):
        weights = load_file(folder / "adapter_model.safetensors")
        save_file(change(weights), folder / "adapter_model.safetensors")

    return spoil


def other_config(text):
    return lambda folder: (folder / "adapter_config.json").write_text(text)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("base_model.model", other_weights(lambda w: {k: v for k, v in w.items() if "layers.0." not in k})),
        ("base_model.model", other_weights(lambda w: {k.removeprefix("base_model.model."): v for k, v in w.items()})),
        ("base_model.model", other_weights(lambda w: {k: v[:2].clone() for k, v in w.items()})),
        ("base_model.model", other_weights(lambda w: {**w, "base_model.model.x.lora_A.weight": torch.zeros(2)})),
        ("adapter_model.safetensors", lambda folder: (folder / "adapter_model.safetensors").unlink()),
        ("adapter_model.safetensors", lambda f: (f / "adapter_model.safetensors").write_bytes(b"\0" * 50)),
        *(("adapter_config.json", other_config(text)) for text in ("{", "[]", '{"peft_type": "NONE"}')),
        ("adapter_config.json", lambda folder: (folder / "adapter_config.json").unlink()),
    ],
)
def test_an_adapter_that_is_damaged_is_named_and_the_hub_is_not_asked(adapter, name, spoil):
    """A resumed run would go on from an adapter that is new in part."""
    made = add_adapter(DFlashDraftModel.from_pretrained("base"), lora_config(4))
    check_adapter_checkpoint(adapter, made)
    spoil(adapter)
    with refused(ValueError, name):
        merge_adapter(Path("adapter"))
    if name == "base_model.model":
        with refused(ValueError, name):
            check_adapter_checkpoint(adapter, made)


def test_an_adapter_is_put_upon_the_weights_it_was_trained_beside_alone(adapter):
    expected = merge_adapter(adapter).state_dict()
    shutil.copytree("base", "moved")
    moved = merge_adapter(adapter, base="moved").state_dict()
    assert all(torch.equal(moved[name], tensor) for name, tensor in expected.items())
    # The same weights held in another type are the same base.
    assert load_adapter(adapter, dtype=torch.bfloat16) is not None
    with refused(ValueError, adapter, "other weights than those of other"):
        merge_adapter(adapter, base="other")
    shutil.rmtree("base")
    shutil.copytree("other", "base")
    with refused(ValueError, adapter, "other weights than those of base"):
        merge_adapter(adapter)
    again = add_adapter(DFlashDraftModel.from_pretrained("base"), lora_config(4))
    with refused(ValueError, adapter, "other weights"):
        check_adapter_checkpoint(adapter, again)


def test_a_merged_drafter_is_not_taken_for_its_base(adapter, tmp_path):
    """An adapter that was trained upon it could never be loaded again: under the base's name are other weights."""
    for merged in (merge_adapter(adapter), load_adapter(adapter).merge_and_unload()):
        with refused(ValueError, "peft_config", "save_pretrained"):
            add_adapter(merged, lora_config(2))
    merge_adapter(adapter).save_pretrained("merged")
    second = add_adapter(DFlashDraftModel.from_pretrained("merged"), lora_config(2))
    second.save_pretrained("second")
    expected = merge_adapter(adapter).state_dict()
    loaded = merge_adapter("second").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    with refused(ValueError, "second", "base"):
        merge_adapter("second", "base")


def test_an_adapter_taken_for_a_drafter_is_named_with_a_way_out(adapter, target, tmp_path):
    (adapter / "merged").mkdir()
    for read in (DFlashDraftModel.from_pretrained, DFlashDraftConfig.from_pretrained):
        with refused(ValueError, adapter, "merge_adapter", adapter / "merged"):
            read(adapter)
    with refused(ValueError, adapter, "merge_adapter"):
        make_trainer(tmp_path, target, drafter=str(adapter))
    with refused(ValueError, adapter, "merge_adapter"):
        load_adapter(adapter, base=adapter)
    assert not validate_checkpoint(adapter).ok and "merged drafter" in " ".join(
        str(validate_checkpoint(adapter)).split()
    )


def test_an_adapter_alone_is_not_pushed(adapter):
    with refused(ValueError, "me/x", "--drafter"):
        load_adapter(adapter).push_to_hub("me/x")


def test_hb1_saving_an_adapter_asks_the_hub_nothing(base, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *args, **kwargs: pytest.fail("asked the Hub")
    )
    drafter = DFlashDraftModel.from_pretrained(base)
    drafter.config._name_or_path = "org/base-DFlash"
    add_adapter(drafter, lora_config(2)).save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "org/base-DFlash"


def test_an_adapter_of_a_base_on_the_hub_keeps_its_commit(hub, adapter):
    """What is pushed later is not what the adapter was trained beside."""
    DFlashDraftModel.from_pretrained("base").push_to_hub("me/base")
    made = add_adapter(DFlashDraftModel.from_pretrained("me/base"), lora_config(2))
    made.save_pretrained("of-hub")
    before = hub.repositories["me/base"].oid("main")
    assert json.loads(Path("of-hub/adapter_config.json").read_text())["revision"] == before
    DFlashDraftModel.from_pretrained("other").push_to_hub("me/base")
    assert hub.repositories["me/base"].oid("main") != before
    expected = made.merge_and_unload().state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in merge_adapter("of-hub").state_dict().items())
