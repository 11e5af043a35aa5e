# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose names are taken, whose disk fails, and whose machine went down while they were flushed."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import make_trainer
from tiny import dense_target

from dflash_hf import checkpointing
from dflash_hf.checkpointing import (
    ASIDE_PREFIX,
    MANIFEST_NAME,
    clean_up,
    last_complete_checkpoint,
    make_manifest,
    manifest_problems,
    publish,
)


NAME = "checkpoint-2"


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "model").write_text(text)
    (folder / MANIFEST_NAME).write_text(json.dumps(make_manifest(folder)))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def a_file(path: Path, elsewhere: Path) -> None:
    path.write_text("x")


def a_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def a_dangling_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere / "nothing")


@pytest.mark.parametrize("name", [NAME, f"{ASIDE_PREFIX}{NAME}", f"{ASIDE_PREFIX}replaced-{NAME}"])
@pytest.mark.parametrize("make", [a_file, a_link, a_dangling_link])
def test_whatever_stands_under_a_name_of_a_checkpoint_is_replaced(tmp_path, name, make):
    """But not what a link points to."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    make(run / name, elsewhere)
    make_trainer(run, dense_target(), max_steps=2, save_steps=2).train()
    assert not manifest_problems(run / NAME) and not (run / NAME).is_symlink()
    assert not list(run.glob("_[!e]*")) and names(elsewhere) == ["kept"]


@pytest.mark.parametrize("broken", ["rename", "fsync"])
def test_a_checkpoint_that_could_not_be_replaced_is_there_again(tmp_path, monkeypatch, broken):
    write(tmp_path / NAME, "old")
    aside = write(tmp_path / f"{ASIDE_PREFIX}{NAME}", "new")
    rename = Path.rename

    def fail(*args):
        raise OSError(errno.EIO, "broken")

    if broken == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "rename", lambda self, to: fail() if self == aside else rename(self, to))
    with pytest.raises(OSError, match="broken"):
        publish(aside, tmp_path / NAME)
    assert (tmp_path / NAME / "model").read_text() == "old"
    assert names(tmp_path) == [f"{ASIDE_PREFIX}{NAME}", NAME]


@pytest.mark.parametrize("lost", ["content", "folder", "nothing"])
def test_what_a_machine_lost_that_went_down_while_it_was_flushed_is_the_replaced_one_again(tmp_path, lost):
    write(tmp_path / f"{ASIDE_PREFIX}replaced-{NAME}", "old")
    if lost != "folder":
        write(tmp_path / NAME, "new")
    if lost == "content":
        (tmp_path / NAME / "model").write_bytes(b"\0" * 3)
    clean_up(tmp_path)
    assert names(tmp_path) == [NAME] and not manifest_problems(tmp_path / NAME)
    assert (tmp_path / NAME / "model").read_text() == ("new" if lost == "nothing" else "old")


@pytest.mark.parametrize("where", ["model", MANIFEST_NAME])
def test_a_checkpoint_that_cannot_be_read_is_skipped(tmp_path, monkeypatch, caplog, where):
    write(tmp_path / "checkpoint-1", "a")
    write(tmp_path / NAME, "b")
    broken, opened = tmp_path / NAME / where, Path.open

    def failing(self, *args, **kwargs):
        if self == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert f"{where} cannot be read" in caplog.text and "Input/output error" in caplog.text


def test_states_are_written_from_the_device_of_the_process(monkeypatch):
    """A thread begins at the first GPU."""
    used: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    nothing = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cuda:1"), save_only_model=False),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
        save_model=lambda folder, _internal_call: None,
        _save_optimizer_and_scheduler=lambda folder: used.append(folder),
        _save_scaler=lambda folder: None,
        _save_rng_state=lambda folder: None,
    )
    checkpointing._write_weights_and_states(nothing, "folder")
    assert used == [torch.device("cuda:1"), "folder"]
