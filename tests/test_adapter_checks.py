# SPDX-License-Identifier: Apache-2.0
"""Adapters that cannot be, and adapters taken for drafters: refused with a way out, before the target is loaded."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from runs import make_trainer
from test_adapt_recipe import workplace  # noqa: F401
from tiny import MASK_TOKEN_ID, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, validate_checkpoint
from dflash_hf import publishing as sending
from dflash_hf.adapters import add_adapter, load_adapter, lora_config, merge_adapter
from dflash_hf.adapting import check_part
from dflash_hf.model_card import model_card, write_facts
from dflash_hf.publishing import without_local_paths
from dflash_hf.validation import read_folder


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        dense_target().config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    DFlashDraftModel(config).save_pretrained(folder, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """The folder of an adapter that changes what its base does."""
    folder = tmp_path_factory.mktemp("adapter")
    model = add_adapter(DFlashDraftModel.from_pretrained(base, dtype=torch.float32), lora_config(2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(
    ("peft_config", "message"),
    [
        ({"r": 4}, r"peft_config is a dict; give one of peft, such as lora_config\(16\)"),
        (lora_config(0), r"rank 0 .*positive integer"),
        (lora_config(-4), r"rank -4 .*positive integer"),
        (lora_config(2.5), r"rank 2\.5 .*does not fit"),
        (lora_config(True), r"rank True .*does not fit"),
        (lora_config(4, 0), r"lora_alpha is 0; expected more than 0"),
        (lora_config(4, -1), r"lora_alpha is -1; expected more than 0"),
        (lora_config(4, target_modules=["qkv"]), r"'qkv'.* not found in the base model.*Its matrices are \['fc'"),
        (lora_config(4, target_modules=["fc", "qproj"]), r"peft_config names \['qproj'\], which the drafter"),
        (lora_config(4, target_modules=["norm"]), r"Target module Qwen3RMSNorm.* is not supported"),
        (lora_config(4, target_modules=[]), r"No `target_modules` passed"),
        (lora_config(4, target_modules="qkv.*"), r"qkv\.\* .*not found in the base model"),
        (lora_config(4, target_modules=r".*\.mlp\..*"), r"Target module SiLU.* is not supported"),
        (
            lora_config(4, modules_to_save=["norm", "head"]),
            r"peft_config names \['head'\], which the drafter does not",
        ),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_before_the_target_is_loaded(base, tmp_path, peft_config, message):
    drafter = DFlashDraftModel.from_pretrained(base)
    # This target could not be loaded.
    with pytest.raises(ValueError, match=message):
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
    drafter = DFlashDraftModel.from_pretrained(base)
    check_part(drafter, lora_config(2, **kwargs), None)
    assert any("lora_A" in name for name, _ in add_adapter(drafter, lora_config(2, **kwargs)).named_parameters())


@pytest.mark.parametrize(
    ("modules", "message"),
    [("fc", r"trainable_modules='fc' is a text: give a list, \['fc'\]"), (["fcc"], r"the drafter has no \['fcc'\]")],
)
def test_modules_that_are_not_there_are_named_before_the_target_is_loaded(base, tmp_path, modules, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, "no/target", drafter=DFlashDraftModel.from_pretrained(base), trainable_modules=modules)


def test_an_adapter_is_not_put_upon_another(base, adapter):
    drafter = DFlashDraftModel.from_pretrained(base)
    adapted = add_adapter(drafter, lora_config(2))
    for model in (drafter, adapted, load_adapter(adapter)):
        with pytest.raises(ValueError, match=r"has an adapter already.*leave peft_config out.*merge it first"):
            add_adapter(model, lora_config(2))


def test_a_merged_drafter_is_not_taken_for_its_base(base, adapter, tmp_path):
    """An adapter that was trained upon it could never be loaded again: under the base's name are other weights."""
    for merged in (merge_adapter(adapter), load_adapter(adapter).merge_and_unload()):
        with pytest.raises(ValueError, match=r"has no name.*Save the drafter \(save_pretrained\)"):
            add_adapter(merged, lora_config(2))
    twice = load_adapter(adapter)
    first = {name: tensor.clone() for name, tensor in twice.merge_and_unload().state_dict().items()}
    assert all(torch.equal(tensor, first[name]) for name, tensor in twice.merge_and_unload().state_dict().items())
    merge_adapter(adapter).save_pretrained(tmp_path / "merged")
    second = add_adapter(DFlashDraftModel.from_pretrained(tmp_path / "merged"), lora_config(2))
    second.save_pretrained(str(tmp_path / "second"))
    loaded = merge_adapter(tmp_path / "second").state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in loaded.items())
    with pytest.raises(ValueError, match="Give the drafter that it was trained for as base"):
        merge_adapter(tmp_path / "second", base)


def test_an_adapter_taken_for_a_drafter_is_named_with_a_way_out(adapter, base, tmp_path):
    advice = r"holds an adapter \(adapter_config\.json\) and no whole drafter\..*merge_adapter\("
    for read in (DFlashDraftModel.from_pretrained, DFlashDraftConfig.from_pretrained):
        with pytest.raises(ValueError, match=advice):
            read(adapter)
    with pytest.raises(ValueError, match=advice):
        make_trainer(tmp_path, dense_target(), drafter=str(adapter))
    with pytest.raises(ValueError, match=advice):
        load_adapter(adapter, base=adapter)
    report = " ".join(str(validate_checkpoint(adapter)).split())
    assert "It is the folder of an adapter. Give the folder of the merged drafter." in report
    (adapter / "merged").mkdir()
    try:
        with pytest.raises(ValueError, match=f"{adapter}/merged is one"):
            DFlashDraftModel.from_pretrained(adapter)
    finally:
        (adapter / "merged").rmdir()


def test_an_adapter_alone_is_not_pushed(adapter):
    with pytest.raises(ValueError, match=r"me/x would get an adapter alone.*publish\.py --drafter"):
        load_adapter(adapter).push_to_hub("me/x")


def dry_run(monkeypatch, *words: str) -> None:
    arguments = ["publish.py", "--repo_id", "me/x", "--dry_run", "true", *map(str, words)]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "recipes/publish.py"), run_name="__main__")


def test_an_adapter_whose_base_has_moved_is_published_by_naming_it(adapter, base, tmp_path, monkeypatch, capsys):
    config = json.loads((adapter / "adapter_config.json").read_text())
    moved = tmp_path / "adapter"
    moved.mkdir()
    for file in adapter.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    config["base_model_name_or_path"] = "gone"
    (moved / "adapter_config.json").write_text(json.dumps(config))
    facts = {"format": 1, "adapter": {"default": {"r": 2, "type": "LORA"}}, "is_continued": True, "recipe": {}}
    write_facts(facts, moved)
    with pytest.raises(SystemExit, match=r"drafter gone, which is no folder here .*--base of recipes/publish\.py"):
        dry_run(monkeypatch, "--drafter", moved)
    with pytest.raises(SystemExit, match=r"has no effect on .*which is no folder of an adapter"):
        dry_run(monkeypatch, "--drafter", base, "--base", base)
    with pytest.raises(SystemExit, match=r"Give the Hub id of that drafter as adapted_from"):
        dry_run(monkeypatch, "--drafter", moved, "--base", base, "--adapted_from", str(base))
    capsys.readouterr()
    dry_run(monkeypatch, "--drafter", moved, "--base", base, "--adapted_from", "org/first-DFlash")
    shown = capsys.readouterr().out
    assert "It was adapted from [org/first-DFlash](https://huggingface.co/org/first-DFlash)." in shown
    assert "That of org/first-DFlash applies to the weights that it was adapted from." in shown
    assert str(tmp_path) not in shown and str(base) not in shown
    # Without its name the card still says so.
    dry_run(monkeypatch, "--drafter", moved, "--base", base)
    shown = capsys.readouterr().out
    assert "It was adapted from a drafter that this card cannot name." in shown
    assert "That of the first drafter applies to the weights that it was adapted from." in shown


@pytest.mark.parametrize("name", ["org/base-DFlash", None])
def test_what_a_drafter_was_adapted_from_is_told_through_local_folders(base, tmp_path, name):
    """Adapted twice: the second time from a folder, whose record names what the first was adapted from."""
    first = tmp_path / "first"
    DFlashDraftModel.from_pretrained(base).save_pretrained(first)
    write_facts({"format": 1, "recipe": {}, "continued_from": name}, first)
    trainer = make_trainer(
        tmp_path / "run", dense_target(), drafter=DFlashDraftModel.from_pretrained(first), max_steps=1,
        save_strategy="no", trainable_modules=["fc"],
    )  # fmt: skip
    trainer.train()
    facts = json.loads((tmp_path / "run" / "training.json").read_text())
    assert facts["continued_from"] == name and facts["is_continued"] is True
    told = f"[{name}](https://huggingface.co/{name})" if name else "a drafter that this card cannot name"
    assert f"It was adapted from {told}." in str(model_card(read_folder(first, "me/x"), facts))


def test_drafters_in_folders_of_one_name_all_stay_in_published_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [str(tmp_path / part / "merged") for part in "abc"]
    results = {"drafters": {name: index for index, name in enumerate(names)}}
    assert without_local_paths(results) == {"drafters": {"merged": 0, "merged (2)": 1, "merged (3)": 2}}


ADAPT = (
    "--drafter z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B --output_dir adapted --row_length 256 --use_cpu true"
)


def adapt(monkeypatch, words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["adapt_drafter.py", *ADAPT.split(), *words.split()])
    runpy.run_path(str(ROOT / "recipes/adapt_drafter.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora_modules qkv", r"\{'qkv'\} \(lora_modules\) does not fit"),
        ("--lora_rank -1", r"rank -1 \(lora_rank\) .*does not fit"),
        ("--trainable_modules layers.9", r"the drafter has no \['layers\.9'\]"),
    ],
)
def test_the_recipe_refuses_a_part_before_it_reads_documents(workplace, monkeypatch, words, message):  # noqa: F811
    with pytest.raises(SystemExit, match=message):
        adapt(monkeypatch, f"--documents nowhere.jsonl {words}")


def test_the_recipe_refuses_to_resume_another_adapter_before_it_measures(workplace, monkeypatch):  # noqa: F811
    words = "--documents requests.jsonl --num_anchors 8 --max_steps 2 --save_strategy steps --save_steps 1"
    adapt(monkeypatch, f"{words} --lora_rank 4")
    monkeypatch.setattr(DFlashTrainer, "evaluate", None)
    with pytest.raises(SystemExit, match=r"is of another adapter: r 4 there and 2 here"):
        adapt(
            monkeypatch,
            f"{words} --lora_rank 2 --eval_documents requests.jsonl --resume_from_checkpoint true",
        )


@pytest.mark.parametrize("kind", ["loaded", "fp32", "merged", "trained", "gone"])
def test_a_drafter_that_was_trained_since_is_not_published_with_the_record_of_its_folder(
    base, adapter, tmp_path, monkeypatch, kind
):
    folder = tmp_path / "drafter"
    if kind == "merged":
        folder.mkdir()
        for file in adapter.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        drafter = merge_adapter(folder)
    else:
        DFlashDraftModel.from_pretrained(base).save_pretrained(folder)
        drafter = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32 if kind == "fp32" else None)
    facts = {"format": 1, "recipe": {}}
    write_facts(facts, folder)
    if kind == "trained":
        with torch.no_grad():
            drafter.layers[1].mlp.up_proj.weight[3, 4] += 1
    if kind == "gone":
        (folder / "config.json").unlink()
    built = []
    monkeypatch.setattr(sending, "build_repository", lambda *args, **kwargs: built.append(kwargs))
    monkeypatch.setattr(sending, "publish", lambda publication, **kwargs: "address")
    drafter.push_to_hub("me/x")
    assert [kwargs["facts"] for kwargs in built] == [None if kind in ("trained", "gone") else facts]
