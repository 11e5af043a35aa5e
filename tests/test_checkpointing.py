# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are complete or absent, whatever the disk does, and only those beyond the limit are deleted."""

import errno
import gc
import json
import os
import shutil
import threading
import zlib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import finish, make_documents, make_trainer, start
from tiny import dense_target, refused
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import dflash_hf.resuming
from dflash_hf import DFlashTrainer, checkpointing
from dflash_hf.checkpointing import (
    MANIFEST_NAME,
    DiskSpaceError,
    clean_up,
    last_complete_checkpoint,
    make_manifest,
    manifest_problems,
    rotate,
)
from dflash_hf.resuming import RECORD_NAME


HOUR = 3600
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """Folder of a run of 4 steps with a checkpoint after each second one."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer(folder, target, max_steps=4, save_steps=2, hub_token="hf_planted").train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that folder, to be broken."""
    return shutil.copytree(trained, tmp_path / "run")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-*"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def turn_a_bit(path: Path, index: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 4
    path.write_bytes(data)


def test_a_checkpoint_lists_every_file_but_the_pickled_arguments(trained):
    folder = trained / "checkpoint-4"
    listed = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    there = {path.name for path in folder.iterdir()} - {MANIFEST_NAME, "training_args.bin"}
    assert set(listed) == there and {"model.safetensors", "optimizer.pt", RECORD_NAME, "trainer_state.json"} <= there
    assert manifest_problems(folder) == [] and names(trained) == ["checkpoint-2", "checkpoint-4"]
    assert not any(b"hf_planted" in path.read_bytes() for path in trained.rglob("*") if path.is_file())


FAULTS = {
    "truncated": (lambda folder: cut(folder / "optimizer.pt"), "optimizer.pt"),
    "missing": (lambda folder: (folder / "rng_state.pth").unlink(), "rng_state.pth"),
    "a bit": (lambda folder: turn_a_bit(folder / "optimizer.pt", 5000), "optimizer.pt"),
    "half a manifest": (lambda folder: cut(folder / MANIFEST_NAME), MANIFEST_NAME),
    "a bit of the weights": (lambda folder: turn_a_bit(folder / "model.safetensors"), "model.safetensors"),
    "a bit of the state": (lambda folder: turn_a_bit(folder / "trainer_state.json", 40), "trainer_state.json"),
    "no object": (lambda folder: (folder / MANIFEST_NAME).write_bytes(b"\xff[]"), MANIFEST_NAME),
    "no files": (lambda folder: (folder / MANIFEST_NAME).write_text('{"files": {"a": {}}}'), MANIFEST_NAME),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_incomplete_checkpoint_is_skipped_with_a_warning(run, target, caplog, fault):
    """Of one that is named, an error says what is wrong with it."""
    spoil, name = FAULTS[fault]
    spoil(run / "checkpoint-4")
    assert last_complete_checkpoint(run) == run / "checkpoint-2"
    assert any("checkpoint-4" in message and name in message for message in caplog.messages)
    trainer = make_trainer(run, target, max_steps=4, save_steps=2)
    with refused(ValueError, "checkpoint-4", name):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 2 and manifest_problems(run / "checkpoint-4") == []


def test_checksums_of_parts_find_a_changed_byte(run, monkeypatch):
    """Of a file of many parts, by its hash, and by the manifest of an earlier version: one checksum a file."""
    monkeypatch.setattr(checkpointing, "PART_BYTES", 1000)
    folder, weights = run / "checkpoint-4", run / "checkpoint-4" / "model.safetensors"
    manifest, data = make_manifest(folder), weights.read_bytes()
    checksums = manifest["files"]["model.safetensors"]["crc32"]
    assert checksums == [f"{zlib.crc32(data[i : i + 1000]):08x}" for i in range(0, len(data), 1000)]
    whole = json.loads(json.dumps(manifest))
    for name, entry in whole["files"].items():
        entry["crc32"] = f"{zlib.crc32((folder / name).read_bytes()):08x}"
    for written in (manifest, whole, make_manifest(folder, with_hashes=True)):
        (folder / MANIFEST_NAME).write_text(json.dumps(written))
        assert manifest_problems(folder) == []
        turn_a_bit(weights, 1500)
        assert len(manifest_problems(folder)) == 1
        weights.write_bytes(data)


@pytest.mark.parametrize("replaced", ["whole", "broken", None])
def test_what_a_kill_left_aside_is_taken_or_removed(run, replaced):
    """A kill between the manifest and the rename leaves a whole checkpoint; a lost disk, what it took the place of."""
    name = "_incomplete-checkpoint-4" if replaced is None else "_incomplete-replaced-checkpoint-4"
    shutil.copytree(run / "checkpoint-4", run / name)
    inode = (run / name / "model.safetensors").stat().st_ino
    if replaced is None:
        shutil.rmtree(run / "checkpoint-4")
    if replaced == "broken":
        cut(run / "checkpoint-4" / "model.safetensors")
    part = shutil.copytree(run / "checkpoint-2", run / "_incomplete-checkpoint-6")
    (part / MANIFEST_NAME).unlink()
    clean_up(run)
    assert names(run) == ["checkpoint-2", "checkpoint-4"] and not manifest_problems(run / "checkpoint-4")
    assert ((run / "checkpoint-4" / "model.safetensors").stat().st_ino == inode) == (replaced != "whole")


def test_where_no_checkpoint_is_complete_none_is_resumed(run, target, tmp_path):
    (run / "checkpoint-4" / MANIFEST_NAME).unlink()
    cut(run / "checkpoint-2" / "model.safetensors")
    for resume, said in ((True, run), (str(tmp_path / "nowhere"), "nowhere")):
        with refused(ValueError, "resume_from_checkpoint", said):
            make_trainer(run, target).train(resume_from_checkpoint=resume)


# Disks


def test_a_disk_that_cannot_keep_a_file_is_an_error(target, tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with refused(OSError, "step 1", "Input/output error"):
        make_trainer(tmp_path, target, max_steps=1, save_steps=1).train()
    assert not list(tmp_path.glob("*checkpoint-*"))


@pytest.mark.parametrize(("step", "left"), [(0, []), (3, ["checkpoint-2"])])
def test_a_disk_that_fills_up_stops_the_run_before_the_next_checkpoint_is_written(
    target, tmp_path, monkeypatch, step, left
):
    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10, 10, 2**20))

    trainer = make_trainer(tmp_path, target, max_steps=6, save_steps=2, callbacks=[Fill()])
    if step == 0:
        Fill().on_step_end(None, trainer.state, None)
    with refused(DiskSpaceError, "0.02 GiB", "0.00 GiB", tmp_path, "save_total_limit"):
        trainer.train()
    assert names(tmp_path) == left and trainer.state.global_step == (4 if step else 0)


def test_a_disk_that_is_full_while_a_checkpoint_is_written_leaves_the_older_ones(target, tmp_path, monkeypatch):
    """States are written beside the weights, in a thread whose error is the run's."""
    original = DFlashTrainer._save_optimizer_and_scheduler

    def full(trainer, folder):
        original(trainer, folder)
        if "checkpoint-4" in folder:
            cut(Path(folder, "optimizer.pt"))
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DFlashTrainer, "_save_optimizer_and_scheduler", full)
    with refused(OSError, "step 4", "No space left on device"):
        make_trainer(tmp_path, target, max_steps=6, save_steps=2).train()
    assert names(tmp_path) == ["checkpoint-2"] and not manifest_problems(tmp_path / "checkpoint-2")


def failing_runs(folder: str) -> None:
    """Target of a process: what a rank gets to hear when the first rank fails at something of its own."""
    heard = []
    trainer = make_trainer(Path(folder) / "run", max_steps=2, save_steps=1)

    def broken(*args):
        raise RuntimeError("broken on the first rank")

    for resume, name in (("memory://nowhere/run", "fetch_checkpoint"), (None, "publish"), (None, "make_manifest")):
        module = dflash_hf.resuming if name == "fetch_checkpoint" else checkpointing
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
    for rank, cause in ((0, "broken on the first rank"), (1, "another rank")):
        fetched, *written = json.loads((tmp_path / f"heard-{rank}.json").read_text())
        assert fetched == "RuntimeError: broken on the first rank"
        assert len(written) == 2 and all("step 1" in text and cause in text for text in written)
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


# Which are kept


def folders_left(tmp_path, steps_and_times, now, limit, best=None, is_over=False):
    for step, changed in steps_and_times:
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (changed, changed))
    state = SimpleNamespace(global_step=now, best_model_checkpoint=best and str(tmp_path / f"checkpoint-{best}"))
    args = SimpleNamespace(should_save=True, save_total_limit=limit)
    rotate(SimpleNamespace(args=args, state=state), tmp_path, is_over)
    return sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("steps_and_times", "now", "limit", "best", "left"),
    [
        ([(10, 0), (20, HOUR), (30, 2 * HOUR)], 30, 2, None, [20, 30]),
        # The clock was set back before the newest was written.
        ([(10, 5 * HOUR), (20, 6 * HOUR), (30, HOUR)], 30, 2, None, [20, 30]),
        ([(10, 5 * HOUR), (20, 6 * HOUR), (30, HOUR)], 30, 2, 10, [10, 30]),
        # Copied to another disk in any order.
        ([(10, HOUR), (20, HOUR), (9, HOUR)], 20, 2, None, [10, 20]),
        ([(10, 0), (20, 0)], 20, None, None, [10, 20]),
        ([(10, 0), (20, 0)], 20, 1, 10, [10, 20]),
    ],
)
def test_old_checkpoints_are_those_of_earlier_steps(tmp_path, steps_and_times, now, limit, best, left):
    assert folders_left(tmp_path, steps_and_times, now, limit, best) == left


@pytest.mark.parametrize(("limit", "left"), [(2, ["checkpoint-1", "checkpoint-6"]), (1, ["checkpoint-1"])])
def test_old_checkpoints_are_rotated_and_the_best_is_kept(target, tmp_path, limit, left):
    """What merely looks like a checkpoint stays, also where the last one goes at the end: a limit of 1."""
    (tmp_path / "checkpoint-10-keep").mkdir()
    evaluates = {"eval_dataset": make_documents(2), "eval_strategy": "steps", "eval_steps": 1}
    best = {"metric_for_best_model": "acceptance_length", "load_best_model_at_end": True, "learning_rate": 1e-9}
    arguments = {"max_steps": 6, "save_steps": 1, "save_total_limit": limit, **evaluates, **best}
    trainer = make_trainer(tmp_path, target, **arguments)
    trainer.train()
    assert names(tmp_path) == sorted([*left, "checkpoint-10-keep"])
    assert trainer.args.save_total_limit == limit
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_n5_a_folder_holds_one_run_and_the_checkpoints_of_others_are_moved_aside(run, target, tmp_path, caplog):
    """So the newest one is this run's, whatever the other's steps were."""
    arguments = {"max_steps": 3, "save_steps": 1, "save_total_limit": 2, "learning_rate": 1e-4}
    (run / "checkpoint-10-keep").mkdir()
    make_trainer(run, target, **arguments).train()
    assert names(run) == ["checkpoint-10-keep", "checkpoint-2", "checkpoint-3"]
    assert names(run / "_earlier_1") == ["checkpoint-2", "checkpoint-4"]
    assert any(str(run / "_earlier_1" / "checkpoint-4") in message for message in caplog.messages)
    resumed = make_trainer(run, target, **{**arguments, "max_steps": 4})
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 3
    # From an earlier step: what was written beyond it is kept too.
    caplog.clear()
    make_trainer(run, target, **arguments).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert names(run / "_earlier_2") == ["checkpoint-4"] and last_complete_checkpoint(run) == run / "checkpoint-3"
    other = make_trainer(tmp_path / "other", target, max_steps=5)
    other.train(resume_from_checkpoint=str(run / "_earlier_1"))
    assert other._initial_global_step == 4


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


# A long run


STEPS, FIRST = 2000, 200


class Measure(TrainerCallback):
    """Writes down what there is at some steps."""

    def __init__(self, path: Path):
        self.path, self.figures = path, {}

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step % FIRST or not state.global_step:
            return
        gc.collect()
        modules, inner = list(model.modules()), optimizer.optimizer
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.figures[state.global_step] = {
            "memory": pages * os.sysconf("SC_PAGE_SIZE"),
            "threads": threading.active_count(),
            "hooks": hooks + len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "files": sum(len(files) for _, _, files in os.walk(args.output_dir)),
        }
        self.path.write_text(json.dumps(self.figures))


def soak(folder: str) -> None:
    """Target of a process."""
    path = Path(folder)
    evaluates = {"eval_dataset": make_documents(2), "eval_strategy": "steps", "eval_steps": 50}
    saves = {"save_steps": 50, "save_total_limit": 2, "remote_checkpoint_dir": "file://" + str(path / "mirror")}
    arguments = {"max_steps": STEPS + 1, "logging_steps": 10, "context_noise": 0.05, **evaluates, **saves}
    make_trainer(path / "run", callbacks=[Measure(path / "figures.json")], **arguments).train()


@pytest.mark.slow
def test_nothing_grows_in_2000_steps(tmp_path):
    processes = start(soak, str(tmp_path), log=tmp_path / "log")
    assert finish(processes, timeout=3000) == [0], (tmp_path / "log").read_text()[-2000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    first, last = figures[str(FIRST)], figures[str(STEPS)]
    assert last["memory"] < 1.03 * first["memory"], figures
    assert last["threads"] <= first["threads"] and last["hooks"] <= first["hooks"], figures
    # A checkpoint may be on its way at either moment.
    assert last["descriptors"] <= first["descriptors"] + 2 and last["files"] <= first["files"] + 20, figures
