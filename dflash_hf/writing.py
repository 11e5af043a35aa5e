# SPDX-License-Identifier: Apache-2.0
"""Folders that one process at a time writes into, and copies that stay."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging


# --- One process at a time writes to a folder: a second one would delete what the first has half written.


logger = logging.get_logger(__name__)


def linked_copy(folder: Path, copy: Path) -> Path:
    """Hard links to the files of a checkpoint, which stay when it is rotated away.

    Args:
        folder: The checkpoint.
        copy: A folder on the same disk that does not exist yet.

    Returns:
        The copy.
    """
    try:
        shutil.copytree(folder, copy, copy_function=os.link)
    except OSError:
        logger.warning(f"The disk of {folder.parent} has no hard links: each upload takes a copy of the checkpoint.")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
    return copy


logger = logging.get_logger(__name__)

_held: set[int] = set()


class AnotherWriterError(OSError):
    """Another process is writing there."""


@contextmanager
def only_writer(path: str | Path, name: str) -> Iterator[None]:
    """Keep other processes of this machine from writing to a folder, or to what a file stands for, meanwhile.

    A process that is killed holds nothing any more, and nothing is left behind. Processes forked from this one hold
    nothing either.

    Args:
        path: The folder or file, which is there.
        name: Of the argument that says where it is.

    Raises:
        AnotherWriterError: Another process does so already.
    """
    descriptor = os.open(path, os.O_RDONLY)
    _held.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        _let_go(descriptor)
        raise AnotherWriterError(
            f"Another process is writing to {path}, and two would take each other's files away. Wait for it or end "
            f"it, or give another {name}."
        ) from error
    except OSError as error:
        # Some network file systems know no locks.
        logger.warning_once(f"{path} cannot be locked ({error}): let no other process write there meanwhile.")
    try:
        yield
    finally:
        _let_go(descriptor)


def _let_go(descriptor: int) -> None:
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _let_go_in_child() -> None:
    # A worker that outlives a killed run must not keep the next one out.
    for descriptor in list(_held):
        _let_go(descriptor)


os.register_at_fork(after_in_child=_let_go_in_child)
