# SPDX-License-Identifier: Apache-2.0
"""Files and folders are whole or absent, and of two processes that would write to one place the second is refused."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from runs import make_trainer
from tiny import byte_tokenizer, refused

from dflash_hf import writing
from dflash_hf.tokenizing import tokenize_files
from dflash_hf.writing import AnotherWriterError, linked_copy, only_writer, publish, replace_file


HOLD = """import os, sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    if not os.fork():
        # By now the fork has let go of the lock.
        print("held", flush=True)
        os.read(0, 1)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def held(tmp_path):
    """Lets another process hold a folder or file as our own runs do; its worker outlives it when it is killed."""
    processes = []

    def hold(path):
        words = [sys.executable, "-c", HOLD, str(path / ".lock" if path.is_dir() else f"{path}.lock")]
        processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "held\n"
        return processes[-1]

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    told = []
    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(writing.logger, "warning_once", told.append)
    with only_writer(tmp_path, "output_dir"):
        pass
    assert len(told) == 1 and str(tmp_path) in told[0]


def test_a_second_training_leaves_the_firsts_half_checkpoint_alone(tmp_path, held):
    half = tmp_path / "_incomplete-checkpoint-1"
    half.mkdir()
    process = held(tmp_path)
    trainer = make_trainer(tmp_path, max_steps=1)
    with refused(AnotherWriterError, "output_dir", tmp_path):
        trainer.train()
    assert half.exists()
    process.kill()
    process.wait()
    trainer.train()
    # Held during a run alone, also after one that failed.
    with refused(ValueError, tmp_path / "missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "missing"))
    with only_writer(tmp_path, "output_dir"):
        pass


def test_a_second_tokenizing_leaves_the_firsts_shards_alone(tmp_path, held):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard-x.tmp").write_bytes(b"half")
    held(tmp_path / "out")
    with refused(AnotherWriterError, "output"):
        tokenize_files(tmp_path / "in", tmp_path / "out", byte_tokenizer(), disable_tqdm=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "shard-x.tmp"]


def test_two_runs_do_not_answer_into_one_file(tmp_path, held):
    output = tmp_path / "out.jsonl"
    output.touch()
    process = held(output)
    with refused(AnotherWriterError, "output", output), only_writer(output, "output"):
        pytest.fail("wrote")
    process.kill()
    process.wait()
    with only_writer(output, "output"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_the_lock_of_another_user_keeps_a_folder_as_ones_own_does(tmp_path, monkeypatch):
    """It cannot be opened. In a folder that cannot be written there is none, and another check says so."""

    def refuse(self, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with only_writer(tmp_path, "output_dir"):
        pass
    (tmp_path / ".lock").touch()
    with refused(AnotherWriterError, "output_dir"), only_writer(tmp_path, "output_dir"):
        pass


def folder_of(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("number", [None, errno.EIO, errno.EINVAL, errno.ENOTSUP])
def test_every_file_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch, number):
    """Of what cannot be flushed the old one stays, but for the folders of file systems that flush none."""
    final, aside = folder_of(tmp_path / "final", "old"), folder_of(tmp_path / "_incomplete-final", "new")
    replace_file(tmp_path / "single", "old")
    seen, original = [], os.fsync

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((path.name, (final / "file").read_text()))
        if number == errno.EIO or (number and path.is_dir()):
            raise OSError(number, os.strerror(number))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for write in (lambda: publish(aside, final), lambda: replace_file(tmp_path / "single", "new")):
        with refused(OSError, "Input/output error") if number == errno.EIO else nullcontext():
            write()
    expected = "old" if number == errno.EIO else "new"
    assert (final / "file").read_text() == (tmp_path / "single").read_text() == expected
    if number != errno.EIO:
        assert seen[:3] == [("file", "old"), (aside.name, "old"), (tmp_path.name, "new")]


def test_a_folder_that_cannot_be_renamed_leaves_the_older_one(tmp_path, monkeypatch):
    final, aside = folder_of(tmp_path / "final", "old"), folder_of(tmp_path / "_incomplete-final", "new")
    rename = Path.rename

    def broken(path, other):
        if path == aside:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", broken)
    with refused(OSError, "Input/output error"):
        publish(aside, final)
    assert (final / "file").read_text() == "old"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_linked_copy_outlives_what_it_was_made_of(tmp_path, monkeypatch, has_links):
    folder = folder_of(tmp_path / "folder", "text")

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    copy = linked_copy(folder, tmp_path / "copies" / "folder")
    assert (copy / "file").samefile(folder / "file") == has_links
    writing.remove(folder)
    assert (copy / "file").read_text() == "text"
