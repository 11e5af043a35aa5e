# SPDX-License-Identifier: Apache-2.0
"""Two processes that would write to one place: the second is refused, whatever it runs, and nothing is left behind."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from runs import make_trainer
from tiny import byte_tokenizer, dense_target

from dflash_hf import writing as one_writer
from dflash_hf.tokenizing import tokenize_files
from dflash_hf.writing import AnotherWriterError, only_writer


ROOT = Path(__file__).parents[1]
HOLD = """import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    input()
"""
FORK = """import os, sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    if not os.fork():
        os.read(0, 1)
        os._exit(0)
    print("held", flush=True)
    os.wait()
"""


@pytest.fixture
def held(tmp_path):
    """Lets another process hold a folder or file as our own runs do; gives what ends it."""
    processes = []

    def hold(path):
        lock = path / ".lock" if path.is_dir() else f"{path}.lock"
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path, held):
    process = held(tmp_path)
    refused = pytest.raises(AnotherWriterError, match=r"Another process is writing to .*give another output_dir")
    with refused, only_writer(tmp_path, "output_dir"):
        pytest.fail("wrote")
    process.kill()
    process.wait()
    with only_writer(tmp_path, "output_dir"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_worker_that_outlives_a_killed_run_keeps_nobody_out(tmp_path):
    command = [sys.executable, "-c", FORK, str(tmp_path / ".lock")]
    # A run that ends in order would unlock for its workers too; closing stdin ends the worker.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
        with only_writer(tmp_path, "output_dir"):
            pass


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    told = []
    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(one_writer.logger, "warning_once", told.append)
    with only_writer(tmp_path, "output_dir"):
        pass
    assert "cannot be locked" in told[0]


def test_a_second_training_leaves_the_firsts_half_checkpoint_alone(tmp_path, held):
    target = dense_target()
    half = tmp_path / "_incomplete-checkpoint-1"
    half.mkdir()
    process = held(tmp_path)
    trainer = make_trainer(tmp_path, target, max_steps=1)
    with pytest.raises(AnotherWriterError, match="give another output_dir"):
        trainer.train()
    assert half.exists()
    process.kill()
    process.wait()
    trainer.train()
    # Held during a run alone, also after one that failed.
    with pytest.raises(ValueError, match="is no folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "missing"))
    with only_writer(tmp_path, "output_dir"):
        pass


def test_a_second_tokenizing_leaves_the_firsts_shards_alone(tmp_path, held):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "out").mkdir()
    aside = tmp_path / "out" / "shard-x.tmp"
    aside.write_bytes(b"half")
    held(tmp_path / "out")
    with pytest.raises(AnotherWriterError, match="give another output"):
        tokenize_files(tmp_path / "in", tmp_path / "out", byte_tokenizer(), disable_tqdm=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "shard-x.tmp"]


def test_the_lock_of_another_user_keeps_a_folder_as_ones_own_does(tmp_path, monkeypatch):
    """It cannot be opened. In a folder that cannot be written there is none, and another check says so."""

    def refuse(self, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with only_writer(tmp_path, "output_dir"):
        pass
    (tmp_path / ".lock").touch()
    with pytest.raises(AnotherWriterError, match="output_dir"), only_writer(tmp_path, "output_dir"):
        pass
