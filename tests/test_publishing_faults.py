# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811 (fixtures of other files)
"""Publishing and loading what is damaged, half there or of something else: told by name, and never sent."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import Repository
from runs import make_trainer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_publishing import MASK_TOKEN_ID, RESULTS, contents, drafter, hub
from tiny import dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, publishing
from dflash_hf.adapters import (
    add_adapter,
    check_adapter_checkpoint,
    load_adapter,
    lora_config,
    merge_adapter,
)
from dflash_hf.checkpointing import manifest_problems
from dflash_hf.frozen_target import load_model
from dflash_hf.model_card import load_results, read_facts, read_results, recorded_results
from dflash_hf.publishing import build_repository
from dflash_hf.resuming import target_identity


ROOT = Path(__file__).parents[1]
SETTINGS = {"temperature": 0, "max_new_tokens": 8, "dtype": "x", "versions": {"transformers": "1", "torch": "2"}}


def evaluation(**report):
    return {"drafters": {"a": {"num_prompts": 3, **report}}, "settings": SETTINGS}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "3", "{}", '{"a": {"after": 3}}', "\xff", *map(json.dumps, (
        evaluation(), {"drafters": {"a": 3}, "settings": {}}, {"drafters": {}}, evaluation(acceptance_length=None),
        evaluation(acceptance_length=float("nan")),
    ))],
)  # fmt: skip
def test_results_that_a_card_cannot_tell_are_named_and_end_no_push(tmp_path, caplog, content):
    path = tmp_path / "results.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"results\.json is not what the card reads"):
        load_results(path)
    assert recorded_results(tmp_path) is None


def test_sources_without_a_verification_are_left_out_of_the_table(tmp_path, drafter):
    sources = {"none$x^$": {"acceptance_length": None, "num_prompts": 1}}
    sources |= {name: {"acceptance_length": 1.5, "num_prompts": 1, "slot_acceptance": [0.5]} for name in ("_b$^", "c")}
    results = evaluation(acceptance_length=2.0, by_source=sources)
    assert [row.prompts for row in read_results(results).rows] == ["_b$^", "c", "all"]
    build_repository(drafter, tmp_path / "new", "me/x", results=results)
    assert (tmp_path / "new" / "acceptance.png").stat().st_size > 5000


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"steps": 3}', "\xff"])
def test_a_record_of_the_training_that_cannot_be_read_is_told_of(tmp_path, content):
    (tmp_path / "training.json").write_bytes(content.encode("latin-1"))
    assert read_facts(tmp_path) is None


@pytest.mark.parametrize("names", [["a/p.png", "b/p.png"], ["config.json"], ["README.md"], ["acceptance.png"]])
def test_a_plot_takes_the_place_of_no_other_file(tmp_path, drafter, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"The plot .* cannot be published: .*Rename it"):
        build_repository(drafter, tmp_path / "new", "me/x", results=RESULTS, plots=[tmp_path / n for n in names])
    assert not (tmp_path / "new").exists()


def test_a_plot_of_any_name_is_linked(tmp_path, drafter):
    (tmp_path / "my plot (1).png").write_bytes(b"x")
    built = build_repository(drafter, tmp_path / "new", "me/x", plots=[tmp_path / "my plot (1).png"])
    assert "![my plot (1)](my%20plot%20%281%29.png)" in (built.folder / "README.md").read_text(encoding="utf-8")


def test_a_drafter_that_is_not_finite_is_not_sent(tmp_path, drafter):
    drafter.save_pretrained(tmp_path / "d")
    broken = DFlashDraftModel.from_pretrained(tmp_path / "d")
    broken.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the drafter's fc\.weight holds NaN"):
        build_repository(broken, tmp_path / "new", "me/x")


def test_a_drafter_is_sent_though_its_folder_holds_one_with_more_layers_by_now(hub, drafter, tmp_path, monkeypatch):
    drafter.save_pretrained(tmp_path / "d")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "d")
    config = DFlashDraftConfig.from_target_config(
        dense_target().config, num_hidden_layers=3, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    grown = DFlashDraftModel(config)
    grown.load_state_dict(drafter.state_dict(), strict=False)
    grown.save_pretrained(tmp_path / "d")
    told = []
    monkeypatch.setattr(publishing.logger, "warning", told.append)
    loaded.push_to_hub("me/base")
    assert "is not what is there by now" in told[0]
    assert hub.repositories["me/base"].oid("main")


# Adapters


@pytest.fixture
def adapter(drafter, tmp_path, monkeypatch):
    """An adapter in `adapter`, for the drafter in `base`; a drafter of the same shape in `other`."""
    monkeypatch.chdir(tmp_path)
    drafter.save_pretrained("base")
    weights = {name: tensor + 0.01 for name, tensor in load_file("base/model.safetensors").items()}
    shutil.copytree("base", "other")
    save_file(weights, "other/model.safetensors", metadata={"format": "pt"})
    made = add_adapter(DFlashDraftModel.from_pretrained("base"), lora_config(4))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    made.save_pretrained("adapter")
    return tmp_path / "adapter"


def rewrite(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if "layers.0." not in k}, "14 tensors are missing, unknown"),
        (lambda w: {k.removeprefix("base_model.model."): v for k, v in w.items()}, "60 tensors are missing, unknown"),
        (lambda w: {k: v[:2].clone() for k, v in w.items()}, "of another shape"),
        (lambda w: {**w, "base_model.model.layers.9.x.lora_A.weight": torch.zeros(2)}, "1 tensors are missing"),
    ],
    ids=["missing", "renamed", "shape", "more"],
)
def test_an_adapter_whose_weights_are_not_its_own_is_refused(adapter, change, message):
    made = add_adapter(DFlashDraftModel.from_pretrained("base"), lora_config(4))
    check_adapter_checkpoint(adapter, made)
    rewrite(adapter, change)
    with pytest.raises(ValueError, match=message):
        merge_adapter(adapter)
    # A resumed run would go on from an adapter that is new in part.
    with pytest.raises(ValueError, match=message):
        check_adapter_checkpoint(adapter, made)


def test_an_adapter_that_is_damaged_is_named_and_the_hub_is_not_asked(adapter):
    (adapter / "adapter_model.safetensors").rename("away")
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        merge_adapter(Path("adapter"))
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 50)
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        merge_adapter(adapter)
    for content in ("{", "[]", '{"peft_type": "NONE"}'):
        (adapter / "adapter_config.json").write_text(content)
        with pytest.raises(ValueError, match="is no adapter's configuration"):
            merge_adapter(adapter)


def test_an_adapter_is_put_upon_the_weights_it_was_trained_beside_alone(adapter, monkeypatch):
    expected = merge_adapter(adapter).state_dict()
    shutil.copytree("base", "moved")
    moved = merge_adapter(adapter, base="moved").state_dict()
    assert all(torch.equal(moved[name], tensor) for name, tensor in expected.items())
    # The same weights held in another type are the same base.
    assert load_adapter(adapter, dtype=torch.bfloat16) is not None
    with pytest.raises(ValueError, match="was trained beside other weights than those of other"):
        merge_adapter(adapter, base="other")
    shutil.rmtree("base")
    shutil.copytree("other", "base")
    with pytest.raises(ValueError, match="was trained beside other weights than those of base"):
        merge_adapter(adapter)
    again = add_adapter(DFlashDraftModel.from_pretrained("base"), lora_config(4))
    with pytest.raises(ValueError, match="was trained beside other weights"):
        check_adapter_checkpoint(adapter, again)


def test_a_base_that_was_a_folder_is_not_looked_for_on_the_hub(adapter, monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setattr(DFlashDraftModel, "from_pretrained", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    with pytest.raises(ValueError, match=r"trained for the drafter base, which is no folder here .*Give the drafter"):
        merge_adapter(adapter)


def test_the_commit_of_what_comes_from_the_hub_is_known(hub, drafter, adapter, tmp_path):
    drafter.push_to_hub("me/base")
    dense_target().save_pretrained(tmp_path / "target")
    hub.repositories["me/target"] = Repository()
    commit = hub.repositories["me/target"].commit("main", "Target", contents(tmp_path / "target"))
    target = load_model("me/target", None, {})
    assert target_identity(target)["revision"] == commit
    assert target_identity(load_model(tmp_path / "target", None, {}))["revision"] is None
    base = DFlashDraftModel.from_pretrained("me/base")
    made = add_adapter(base, lora_config(2))
    made.save_pretrained("of-hub")
    before = hub.repositories["me/base"].oid("main")
    assert json.loads(Path("of-hub/adapter_config.json").read_text())["revision"] == before
    # What is pushed later is not what the adapter was trained beside.
    DFlashDraftModel.from_pretrained("other").push_to_hub("me/base")
    assert hub.repositories["me/base"].oid("main") != before
    expected = made.merge_and_unload().state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in merge_adapter("of-hub").state_dict().items())


def test_offline_the_cache_serves_and_what_it_lacks_is_named(hub, drafter, adapter, tmp_path, monkeypatch):
    drafter.push_to_hub("me/base")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    online = DFlashDraftModel.from_pretrained("me/base")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert DFlashDraftModel.from_pretrained("me/base").config._commit_hash == online.config._commit_hash
    with pytest.raises(OSError, match="The drafter 'me/other' is no folder here, and the Hub does not give it"):
        DFlashDraftModel.from_pretrained("me/other")
    (weights,) = (tmp_path / "elsewhere").glob("models--me--base/snapshots/*/model.safetensors")
    weights.resolve().write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        DFlashDraftModel.from_pretrained("me/base")


# Packages that are missing


@pytest.mark.parametrize("recipe", ["publish.py", "adapt_drafter.py"])
def test_peft_is_missed_where_it_is_needed_and_by_name(adapter, monkeypatch, recipe):
    words = ["--drafter", str(adapter), "--repo_id", "me/x", "--dry_run", "true"]
    if recipe == "adapt_drafter.py":
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *args: None)
        monkeypatch.setattr("dflash_hf.documents.read_manifest", lambda *args: None)
        monkeypatch.setattr("dflash_hf.trainer.read_eos_token_ids", lambda *args: [])
        monkeypatch.setattr("dflash_hf.trainer.load_documents", lambda *args, **kwargs: None)
        words = ["--drafter", "base", "--target", "t", "--documents", "d", "--output_dir", "o", "--use_cpu", "true"]
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "dflash_hf.adapters")
    monkeypatch.setattr(sys, "argv", [recipe, *words])
    with pytest.raises(SystemExit, match=r"error: Adapters need peft: pip install 'dflash_hf\[peft\]'"):
        runpy.run_path(str(ROOT / "recipes" / recipe), run_name="__main__")


# Disks that are full


def fill_disk(monkeypatch):
    """Lets the writer of tensors fail as it does where a disk is full: by an error of its own."""

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    monkeypatch.setattr("peft.peft_model.safe_save_file", full)


def test_a_full_disk_is_an_error_of_the_disk_and_leaves_no_half_repository(adapter, drafter, monkeypatch):
    made = load_adapter(adapter)
    fill_disk(monkeypatch)
    for model in drafter, made:
        with pytest.raises(OSError, match=r"cannot be written to .*No space left on device.*look at its disk"):
            model.save_pretrained("new")
    with pytest.raises(OSError, match="No space left"):
        build_repository(drafter, "repository", "me/x")
    assert not Path("repository").exists()


def test_what_ends_no_training_is_told_of(tmp_path, monkeypatch, caplog):
    """A push that cannot be set aside, whatever says so, and the record of the training."""

    def full(*args, **kwargs):
        # As the tokenizers say it.
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("dflash_hf.publishing.write_publishable", full)
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *a, **k: SimpleNamespace(repo_id="me/x"))
    (tmp_path / "training.json.part").mkdir()
    trainer = make_trainer(tmp_path, dense_target(), max_steps=1, save_steps=1, push_to_hub=True, hub_token="x" * 9)
    trainer.train()
    assert "checkpoint-1 cannot be set aside to be pushed to the Hub (No space left" in caplog.text
    assert "training.json could not be written" in caplog.text and manifest_problems(tmp_path / "checkpoint-1") == []
