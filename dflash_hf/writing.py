# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are whole or absent: one process at a time, written aside, flushed, renamed.

What is *aside* lies beside its final name on the same disk, so that renaming it is one step.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Neither Trainer nor a push to the Hub looks at a folder of this name.
ASIDE_PREFIX = "_incomplete-"
REPLACED_PREFIX = f"{ASIDE_PREFIX}replaced-"


class AnotherWriterError(OSError):
    """Another process is writing there."""


@contextmanager
def only_writer(path: str | Path, name: str) -> Iterator[None]:
    """Keep other processes from writing to a folder or file meanwhile; a killed process and a fork hold nothing.

    The lock is the file `.lock` in the folder, or `FILE.lock`. [`AnotherWriterError`] says that another process writes
    there already, and asks for another value of the argument `name`.
    """
    path = Path(path)
    # A marker in place of a lock would outlive a killed run, and keep out the one that goes on from it elsewhere.
    lock = FileLock(path / ".lock" if path.is_dir() else f"{path}.lock", fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except OSError as error:
        # The lock of another user's process cannot even be opened.
        if isinstance(error, Timeout) or (isinstance(error, PermissionError) and Path(lock.lock_file).exists()):
            raise AnotherWriterError(
                f"Another process is writing to {path} (its lock is {lock.lock_file}). Wait for it, end it, or give "
                f"another {name}."
            ) from error
        # Some network file systems know no locks.
        logger.warning_once(f"{path} cannot be locked ({error}): let no other process write there meanwhile.")
    try:
        yield
    finally:
        if lock.is_locked:
            # While it is held: whoever waits for it finds that its file has gone, and makes a new one.
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def check_writable(folder: Path) -> None:
    """Make a folder and something in it, and remove the latter; an OSError says that nothing could be written."""
    probe = folder / f"{ASIDE_PREFIX}probe"
    try:
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()
    except OSError as error:
        said = f"Nothing could be written into output_dir={str(folder)!r} ({error})."
        raise OSError(f"{said} Make it writable, or give another one.") from error


def publish(aside: Path, final: Path) -> None:
    """Give a finished folder its name, once all of it is on the disk, in the place of what has that name.

    Whenever the process or the machine stops, the old one or the new one is complete under one of three names: the
    final one, that of `aside`, or `_incomplete-replaced-NAME`.

    Raises:
        OSError: The disk failed; then what had the name has it still, unless the whole new folder has it.
    """
    for path in [*aside.rglob("*"), aside]:
        _flush(path)
    replaced = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    if os.path.lexists(final):
        remove(replaced)
        final.rename(replaced)
    try:
        aside.rename(final)
    except OSError:
        if os.path.lexists(replaced):
            replaced.rename(final)
        raise
    _flush(final.parent)
    remove(replaced)


def replace_file(path: Path, text: str) -> None:
    """Write a file that is whole, the old or the new one, whenever the process or the machine stops."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text, encoding="utf-8")
    publish_file(aside, path)


def publish_file(aside: Path, final: Path) -> None:
    """Give a finished file its name in one step, once all of it is on the disk."""
    _flush(aside)
    aside.replace(final)
    _flush(final.parent)


def remove(path: Path) -> None:
    """Remove what stands under a name, but not what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems flush no folders.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def linked_copy(folder: Path, copy: Path) -> Path:
    """Hard links to a checkpoint's files, which stay when it is deleted, or copies; `copy` does not exist yet."""
    try:
        return shutil.copytree(folder, copy, copy_function=os.link)
    # A disk without hard links.
    except OSError:
        shutil.rmtree(copy, ignore_errors=True)
        return shutil.copytree(folder, copy)
