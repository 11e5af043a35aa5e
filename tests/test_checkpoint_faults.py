# SPDX-License-Identifier: Apache-2.0
"""Checkpoints beside clocks that jump, disks that turn bits, and file systems that flush no folders."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import make_trainer
from tiny import dense_target

from dflash_hf import checkpointing
from dflash_hf.checkpointing import last_complete_checkpoint, manifest_problems, rotate


HOUR = 3600


@pytest.fixture(scope="module")
def target():
    return dense_target()


def folders_left(tmp_path, steps_and_times, now, limit, best=None):
    for step, changed in steps_and_times:
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (changed, changed))
    state = SimpleNamespace(global_step=now, best_model_checkpoint=best and str(tmp_path / f"checkpoint-{best}"))
    rotate(SimpleNamespace(args=SimpleNamespace(should_save=True, save_total_limit=limit), state=state), tmp_path)
    return sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("steps_and_times", "now", "limit", "best", "left"),
    [
        ([(10, 0), (20, HOUR), (30, 2 * HOUR)], 30, 2, None, [20, 30]),
        # The clock was set back before the newest was written.
        ([(10, 5 * HOUR), (20, 6 * HOUR), (30, HOUR)], 30, 2, None, [20, 30]),
        ([(10, 5 * HOUR), (20, 6 * HOUR), (30, HOUR)], 30, 1, None, [30]),
        ([(10, 5 * HOUR), (20, 6 * HOUR), (30, HOUR)], 30, 2, 10, [10, 30]),
        # Copied to another disk in any order.
        ([(10, HOUR), (20, HOUR), (9, HOUR)], 20, 2, None, [10, 20]),
        # Of another run, which went further.
        ([(900, HOUR), (1000, HOUR), (10, 0)], 10, 2, None, [10, 1000]),
        ([(900, HOUR), (1000, HOUR), (10, 0), (20, 0)], 20, 2, None, [10, 20]),
        ([(10, 0), (20, 0)], 20, None, None, [10, 20]),
        ([(10, 0), (20, 0)], 20, 1, 10, [10, 20]),
    ],
)
def test_old_checkpoints_are_those_of_earlier_steps(tmp_path, steps_and_times, now, limit, best, left):
    assert folders_left(tmp_path, steps_and_times, now, limit, best) == left


def test_a_folder_that_merely_looks_like_a_checkpoint_is_never_deleted(tmp_path):
    (tmp_path / "checkpoint-10-keep").mkdir()
    assert folders_left(tmp_path, [(20, 0), (30, HOUR)], 30, 1) == [10, 30]
    assert (tmp_path / "checkpoint-10-keep").exists()


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_of(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(checkpointing.logger, "warning", told.append)
    (tmp_path / "moved").mkdir()
    (tmp_path / "run").mkdir()
    # As of one that was moved to another disk.
    (tmp_path / "run" / "checkpoint-10").symlink_to(tmp_path / "moved")
    assert folders_left(tmp_path / "run", [(20, 0), (30, HOUR)], 30, 1) == [10, 30]
    assert len(told) == 1 and "checkpoint-10 could not be deleted" in told[0]


def test_a_clock_that_is_set_back_costs_no_checkpoint(target, tmp_path):
    make_trainer(tmp_path, target, max_steps=2, save_steps=1, save_total_limit=2).train()
    for folder in tmp_path.glob("checkpoint-*"):
        later = folder.stat().st_mtime + 24 * HOUR
        os.utime(folder, (later, later))
    resumed = make_trainer(tmp_path, target, max_steps=4, save_steps=1, save_total_limit=2)
    resumed.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


@pytest.fixture(scope="module")
def run(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, target, max_steps=4, save_steps=2).train()
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_bit_that_turned_is_found_before_anything_is_trained_on(run, target, tmp_path, name):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    data = bytearray((copy / "checkpoint-4" / name).read_bytes())
    data[len(data) // 2] ^= 4
    (copy / "checkpoint-4" / name).write_bytes(data)
    assert manifest_problems(copy / "checkpoint-4") == [f"{name} has another checksum"]
    assert last_complete_checkpoint(copy) == copy / "checkpoint-2"
    with pytest.raises(ValueError, match=rf"is incomplete: {name} has another checksum"):
        make_trainer(copy, target, max_steps=6).train(resume_from_checkpoint=str(copy / "checkpoint-4"))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_flushes_no_folders_gets_its_checkpoints(target, tmp_path, monkeypatch, number):
    original = os.fsync

    def fsync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(number, os.strerror(number))
        original(descriptor)

    monkeypatch.setattr(checkpointing.os, "fsync", fsync)
    make_trainer(tmp_path, target, max_steps=1, save_steps=1).train()
    assert manifest_problems(tmp_path / "checkpoint-1") == []


def test_a_disk_that_cannot_keep_a_file_is_an_error(target, tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpointing.os, "fsync", fsync)
    with pytest.raises(OSError, match="could not be written"):
        make_trainer(tmp_path, target, max_steps=1, save_steps=1).train()
    assert not list(tmp_path.glob("checkpoint-*"))
