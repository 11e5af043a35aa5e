# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf publish`: what it shows, sends and refuses."""

import json
import shutil
import sys

import pytest
import torch
from tiny import dense_target, refused, tiny_drafter

from dflash_hf import DFlashDraftModel
from dflash_hf.adapters import add_adapter, lora_config
from dflash_hf.command_publish import main
from dflash_hf.model_card import write_facts


REPO = "me/tiny-DFlash"
RESULTS = {"seen": {"after": {"acceptance_length": 2.5, "num_prompts": 3, "max_new_tokens": 16}}}


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    """The folder of a run: a drafter, its results, and what is not published."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    tiny_drafter(dense_target()).save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "optimizer.pt").write_bytes(b"large")
    (folder / "curve.png").write_bytes(b"x")
    return folder


def test_it_shows_what_it_would_send_and_sends_it(hub, drafter, capsys):
    words = ["--drafter", str(drafter), "--repo_id", REPO, "--base_model", "org/target"]
    main([*words, "--dry_run", "true", "--limits", "A limit.", "--fp32", "true", "--output_dir", "kept"])
    shown = capsys.readouterr().out
    sizes = dict(line.rsplit(None, 2)[:2] for line in shown.splitlines() if line.endswith(" kB"))
    assert 150 < float(sizes["model.safetensors"]) < 170 < float(sizes["fp32/model.safetensors"])
    assert "| chats it was trained on | 3 | 2.50 |" in shown and "- A limit." in shown and "![curve]" in shown
    assert not hub.calls and (drafter.parent / "kept" / "README.md").is_file()
    main([*words, "--private", "true", "--tag", "v1", "--commit_message", "Mine", "--revision", "try"])
    assert "Published: " in capsys.readouterr().out
    repository = hub.repositories[REPO]
    assert [message for _, message, _ in repository.commits] == ["initial commit", "Mine"]
    assert repository.private and repository.tags["v1"] == repository.branches["try"]
    files = repository.tree("v1")
    assert "optimizer.pt" not in files and json.loads(files["results.json"]) == RESULTS and "curve.png" in files


def test_what_fails_is_said_in_one_line(hub, drafter, monkeypatch):
    words = ["--drafter", str(drafter), "--repo_id", REPO]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refused(SystemExit, REPO, "401", "HF_TOKEN"):
        main(words)
    with refused(SystemExit, "base", drafter):
        main([*words, "--base", str(drafter)])
    with refused(SystemExit, "adapted_from"):
        main([*words, "--adapted_from", str(drafter)])


def test_an_adapter_whose_base_has_moved_is_published_by_naming_it(drafter, tmp_path, capsys, monkeypatch):
    adapter = tmp_path / "adapter"
    add_adapter(DFlashDraftModel.from_pretrained(drafter), lora_config(2)).save_pretrained(str(adapter))
    shutil.move(drafter, tmp_path / "moved")
    write_facts({"format": 1, "adapter": {"default": {"r": 2, "type": "LORA"}}, "recipe": {}}, adapter)
    words = ["--drafter", str(adapter), "--repo_id", REPO, "--dry_run", "true"]
    with refused(SystemExit, drafter, "--base"):
        main(words)
    words += ["--base", str(tmp_path / "moved")]
    for more, told in (
        (["--adapted_from", "org/first-DFlash"], "adapted from [org/first-DFlash](https://huggingface.co/org/first-"),
        # Without its name the card still says so.
        ([], "adapted from a drafter that"),
    ):
        main([*words, *more])
        shown = capsys.readouterr().out
        assert told in shown and str(tmp_path) not in shown
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "dflash_hf.adapters")
    with refused(SystemExit, "peft", "pip install"):
        main(words)


def test_weights_are_published_in_bf16_and_merged(drafter, tmp_path):
    adapter = tmp_path / "adapter"
    add_adapter(DFlashDraftModel.from_pretrained(drafter), lora_config(2)).save_pretrained(str(adapter))
    main(["--drafter", str(adapter), "--repo_id", REPO, "--dry_run", "true", "--output_dir", "out"])
    merged, first = (DFlashDraftModel.from_pretrained(folder) for folder in ("out", drafter))
    assert merged.dtype == torch.bfloat16
    # A new adapter changes nothing.
    assert all(torch.equal(p, first.state_dict()[name].bfloat16()) for name, p in merged.state_dict().items())
