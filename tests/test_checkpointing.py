# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are complete or absent, and resuming takes complete ones of the same run only."""

import errno
import json
import shutil
import zlib
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from runs import finish, make_documents, make_trainer, start
from tiny import CHATML_TEMPLATE, byte_tokenizer, dense_target
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

import dflash_hf.checkpointing
import dflash_hf.resuming
from dflash_hf import DFlashTrainer, checkpointing
from dflash_hf import checkpointing as checkpoint_manifest
from dflash_hf.checkpointing import (
    MANIFEST_NAME,
    DiskSpaceError,
    clean_up,
    last_complete_checkpoint,
    make_manifest,
    manifest_problems,
)
from dflash_hf.resuming import RECORD_NAME


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """Folder of a run of 4 steps with a checkpoint after each second one."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = {"max_steps": 4, "save_steps": 2, "processing_class": byte_tokenizer(), "hub_token": "hf_planted"}
    make_trainer(folder, target, **arguments).train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that folder, to be broken."""
    return shutil.copytree(trained, tmp_path / "run")


def resume(folder, target, resume=True, **arguments):
    arguments = {"max_steps": 4, "save_steps": 2, "processing_class": byte_tokenizer(), **arguments}
    trainer = make_trainer(folder, target, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


# Completeness


def test_a_checkpoint_lists_every_file_but_the_pickled_arguments(trained):
    folder = trained / "checkpoint-4"
    listed = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    there = {path.name for path in folder.iterdir()} - {MANIFEST_NAME, "training_args.bin"}
    assert set(listed) == there and {"model.safetensors", "optimizer.pt", RECORD_NAME, "trainer_state.json"} <= there
    assert manifest_problems(folder) == []
    assert [path.name for path in sorted(trained.glob("*-*"))] == ["checkpoint-2", "checkpoint-4"]


FAULTS = {
    "truncated": (lambda folder: cut(folder / "optimizer.pt"), r"optimizer.pt has \d+ bytes instead of \d+"),
    "missing": (lambda folder: (folder / "rng_state.pth").unlink(), "rng_state.pth is missing"),
    "no_manifest": (lambda folder: (folder / MANIFEST_NAME).unlink(), f"no {MANIFEST_NAME}"),
    "half_a_manifest": (lambda folder: cut(folder / MANIFEST_NAME), f"{MANIFEST_NAME} cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_incomplete_checkpoint_is_skipped_with_a_warning(run, target, caplog, fault):
    spoil, _ = FAULTS[fault]
    spoil(run / "checkpoint-4")
    assert last_complete_checkpoint(run) == run / "checkpoint-2"
    assert len(caplog.messages) == 1 and "checkpoint-4 is incomplete and skipped" in caplog.messages[0]
    caplog.clear()
    trainer = resume(run, target)
    assert any("checkpoint-4 is incomplete and skipped" in m for m in caplog.messages)
    assert trainer._initial_global_step == 2 and manifest_problems(run / "checkpoint-4") == []


@pytest.mark.parametrize("fault", ["truncated", "missing", "half_a_manifest"])
def test_an_incomplete_checkpoint_given_by_name_is_an_error(run, target, fault):
    spoil, message = FAULTS[fault]
    spoil(run / "checkpoint-4")
    with pytest.raises(ValueError, match=rf"checkpoint-4 is incomplete: .*{message}"):
        resume(run, target, resume=str(run / "checkpoint-4"))


def test_no_complete_checkpoint_is_an_error(run, target, tmp_path):
    for step in (2, 4):
        cut(run / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        resume(run, target)
    with pytest.raises(ValueError, match="is no folder"):
        resume(run, target, resume=str(tmp_path / "nowhere"))


def test_what_a_kill_left_aside_is_taken_or_removed(run):
    """A kill between the manifest and the rename leaves a whole checkpoint, any other one a part."""
    (run / "checkpoint-4").rename(run / "_incomplete-checkpoint-4")
    part = run / "_incomplete-checkpoint-6"
    shutil.copytree(run / "checkpoint-2", part)
    (part / MANIFEST_NAME).unlink()
    assert get_last_checkpoint(run) == str(run / "checkpoint-2")
    clean_up(run)
    assert sorted(path.name for path in run.glob("*-*")) == ["checkpoint-2", "checkpoint-4"]


def test_a_checkpoint_written_again_takes_the_old_ones_place(run, target):
    old = (run / "checkpoint-4" / "model.safetensors").stat().st_ino
    resume(run, target, resume=str(run / "checkpoint-2"))
    assert (run / "checkpoint-4" / "model.safetensors").stat().st_ino != old
    assert sorted(path.name for path in run.glob("*-*")) == ["checkpoint-2", "checkpoint-4"]


def test_hashes_find_a_changed_byte(run):
    folder = run / "checkpoint-4"
    (folder / MANIFEST_NAME).write_text(json.dumps(make_manifest(folder, with_hashes=True)))
    assert manifest_problems(folder) == []
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert manifest_problems(folder) == ["model.safetensors has another hash"]


def test_checksums_of_parts_find_a_changed_byte(run, monkeypatch):
    """Of a file of many parts, and by the manifest of an earlier version, whose checksum is that of the whole file."""
    monkeypatch.setattr(checkpoint_manifest, "PART_BYTES", 1000)
    folder = run / "checkpoint-4"
    manifest = make_manifest(folder)
    checksums = manifest["files"]["model.safetensors"]["crc32"]
    data = bytearray((folder / "model.safetensors").read_bytes())
    assert checksums == [f"{zlib.crc32(data[i : i + 1000]):08x}" for i in range(0, len(data), 1000)]
    whole = json.loads(json.dumps(manifest))
    for name, entry in whole["files"].items():
        entry["crc32"] = f"{zlib.crc32((folder / name).read_bytes()):08x}"
    data[1500] ^= 1
    for written in (manifest, whole):
        (folder / MANIFEST_NAME).write_text(json.dumps(written))
        assert manifest_problems(folder) == []
        original = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data)
        assert manifest_problems(folder) == ["model.safetensors has another checksum"]
        (folder / "model.safetensors").write_bytes(original)


def test_states_that_cannot_be_written_leave_no_checkpoint(target, tmp_path, monkeypatch):
    """They are written beside the weights, in a thread whose error is the run's."""

    def fails(trainer, folder):
        raise OSError("no space for the optimizer")

    monkeypatch.setattr(DFlashTrainer, "_save_optimizer_and_scheduler", fails)
    with pytest.raises(OSError, match=r"step 1 could not be written \(no space for the optimizer\)"):
        make_trainer(tmp_path, target, max_steps=1, save_steps=1).train()
    assert not list(tmp_path.glob("*checkpoint-*"))


def test_a_checkpoint_written_again_on_a_failing_disk_leaves_the_old_one(run, target, monkeypatch):
    old = (run / "checkpoint-4" / "model.safetensors").stat().st_ino

    def fsync(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpointing.os, "fsync", fsync)
    with pytest.raises(OSError, match="could not be written"):
        resume(run, target, resume=str(run / "checkpoint-2"))
    assert (run / "checkpoint-4" / "model.safetensors").stat().st_ino == old
    assert sorted(path.name for path in run.glob("*-*")) == ["checkpoint-2", "checkpoint-4"]


def test_old_checkpoints_are_rotated_and_the_best_is_kept(target, tmp_path):
    trainer = make_trainer(
        tmp_path,
        target,
        max_steps=6,
        save_steps=1,
        save_total_limit=2,
        eval_dataset=make_documents(2),
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="acceptance_length",
        load_best_model_at_end=True,
        learning_rate=1e-9,
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["checkpoint-1", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")


class Counter(TrainerCallback, ExportableState):
    def __init__(self, count: int = 0):
        self.count = count

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {"count": self.count}, "attributes": {}}


def test_the_state_of_callbacks_is_in_the_checkpoint(target, tmp_path):
    make_trainer(tmp_path, target, callbacks=[Counter()], max_steps=2, save_steps=1).train()
    for step in (1, 2):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["stateful_callbacks"]["Counter"] == {"args": {"count": step}, "attributes": {}}
        assert "TrainerControl" in state["stateful_callbacks"]


# Disks


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_for_a_checkpoint_is_an_error_at_the_start(target, tmp_path, monkeypatch):
    monkeypatch.setattr(dflash_hf.checkpointing.shutil, "disk_usage", lambda folder: Usage(10, 10, 2**20))
    trainer = make_trainer(tmp_path, target, max_steps=2)
    with pytest.raises(DiskSpaceError, match=r"needs 0.02 GiB and the disk of .* has 0.00 GiB"):
        trainer.train()
    assert trainer.state.global_step == 0
    make_trainer(tmp_path, target, max_steps=1, save_strategy="no").train()


def test_a_disk_that_fills_up_stops_the_run_before_the_next_checkpoint_is_written(target, tmp_path, monkeypatch):
    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                monkeypatch.setattr(dflash_hf.checkpointing.shutil, "disk_usage", lambda folder: Usage(10, 10, 100))

    with pytest.raises(DiskSpaceError, match="checkpoints that are there are kept"):
        make_trainer(tmp_path, target, max_steps=6, save_steps=2, callbacks=[Fill()]).train()
    assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-2"]


def test_a_disk_that_is_full_while_a_checkpoint_is_written_leaves_the_older_ones(target, tmp_path, monkeypatch):
    original = torch.save

    def full(value, path, *args, **kwargs):
        if "checkpoint-4" in str(path) and "optimizer" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(value, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step 4 could not be written .*No space left on device"):
        make_trainer(tmp_path, target, max_steps=6, save_steps=2).train()
    assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-2"]
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def failing_runs(folder: str) -> None:
    """Target of a process: what a rank gets to hear when the first rank fails at something of its own."""
    heard = []
    trainer = make_trainer(Path(folder) / "run", max_steps=2, save_steps=1)

    def broken(*args):
        raise RuntimeError("broken on the first rank")

    for resume, name in (("memory://nowhere/run", "fetch_checkpoint"), (None, "publish"), (None, "make_manifest")):
        module = dflash_hf.resuming if name == "fetch_checkpoint" else dflash_hf.checkpointing
        original = getattr(module, name)
        if trainer.args.process_index == 0:
            setattr(module, name, broken)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
        setattr(module, name, original)
    trainer.train()
    Path(folder, f"heard-{trainer.args.process_index}.json").write_text(json.dumps(heard))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.state.destroy_process_group()


def test_d1_what_fails_on_one_rank_stops_all_and_none_waits(tmp_path):
    processes = start(failing_runs, str(tmp_path), world=2, log=tmp_path / "log")
    assert finish(processes, timeout=60) == [0, 0], (tmp_path / "log").read_text()[-2000:]
    fetched, *written = json.loads((tmp_path / "heard-0.json").read_text())
    assert fetched == "RuntimeError: broken on the first rank"
    assert all("step 1 could not be written (broken on the first rank)" in text for text in written)
    fetched, *written = json.loads((tmp_path / "heard-1.json").read_text())
    assert fetched == "RuntimeError: broken on the first rank"
    assert len(written) == 2 and all("step 1 could not be written by another rank" in text for text in written)
    assert sorted(path.name for path in (tmp_path / "run").glob("*-*")) == ["checkpoint-1", "checkpoint-2"]


# What a checkpoint records


def test_a_checkpoint_says_what_run_it_is_of(trained, target):
    record = json.loads((trained / "checkpoint-4" / RECORD_NAME).read_text())
    assert record["drafter"]["block_size"] == 4
    assert record["rows"] == {
        "rows_per_step": 1, "seed": 42, "data_seed": None, "row_length": 32, "dataloader_drop_last": False
    }  # fmt: skip
    assert record["data"]["documents"] == 16 and len(record["data"]["digest"]) == 64
    assert record["arguments"]["learning_rate"] == 1e-3 and record["ranks"] == 1
    assert record["versions"]["torch"] == torch.__version__
    assert record["target"]["id"] is not None and len(record["tokenizer"]) == 64
    assert record["git_commit"] is None or len(record["git_commit"].split("+")[0]) == 40


def test_no_token_is_in_a_checkpoint(trained):
    for path in trained.rglob("*"):
        if path.is_file():
            assert b"hf_planted" not in path.read_bytes(), path


CHANGES = {
    "target": ({}, r"target: .*other weights or another dtype"),
    "target_dtype": ({}, r"target: .*other weights or another dtype"),
    "tokenizer": ({"processing_class": byte_tokenizer(CHATML_TEMPLATE + " ")}, "tokenizer: another vocabulary"),
    "data": ({"documents": make_documents(17)}, "data: 16 documents in 16 rows there and 17 in 17"),
    "rows": ({"gradient_accumulation_steps": 2}, "rows: rows_per_step 1 there and 2 here"),
    "seed": ({"seed": 7}, "rows: seed 42 there and 7 here"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_of_another_run_is_refused_unless_said_otherwise(run, target, caplog, change):
    arguments, message = CHANGES[change]
    other = {"target": lambda: dense_target(seed=1), "target_dtype": lambda: dense_target().double()}
    used = other.get(change, lambda: target)()
    with pytest.raises(ValueError, match=rf"is of another run(.|\n)*{message}(.|\n)*allow_resume_changes"):
        resume(run, used, **arguments)
    kind = {"seed": "rows", "target_dtype": "target"}.get(change, change)
    if change == "target_dtype":
        return
    resume(run, used, resume=str(run / "checkpoint-2"), allow_resume_changes=[kind], **arguments)
    assert any("with changes" in m and f"{kind}: " in m for m in caplog.messages)


def test_a_token_that_changed_in_the_data_is_noticed(run, target):
    documents = make_documents(16)
    documents[11]["input_ids"][5] ^= 1
    with pytest.raises(ValueError, match="or other tokens in them"):
        resume(run, target, documents=documents)


def test_a_changed_learning_rate_is_told_of(run, target, caplog):
    resume(run, target, learning_rate=2e-3, resume=str(run / "checkpoint-2"))
    assert any("learning_rate 0.001 there and 0.002 here" in m for m in caplog.messages)


def test_the_same_run_resumes_without_a_warning(run, target, caplog, recwarn):
    """Also where a tokenizer was used in between with padding, which it keeps."""
    tokenizer = byte_tokenizer()
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    resume(run, target, resume=str(run / "checkpoint-2"), processing_class=tokenizer)
    assert not [m for m in caplog.messages if "esum" in m]
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


def test_unknown_changes_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"allow_resume_changes names \['drafter'\]"):
        make_trainer(tmp_path, target, allow_resume_changes=["drafter"])
    with pytest.raises(ValueError, match="enable_jit_checkpoint"):
        make_trainer(tmp_path, target, enable_jit_checkpoint=True)
