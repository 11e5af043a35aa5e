# SPDX-License-Identifier: Apache-2.0
"""A callback that mirrors each finished checkpoint to an fsspec address while training goes on."""

import os
import shutil
import threading
import time
from pathlib import Path

from transformers import TrainerCallback
from transformers.utils import logging

from ..data.addresses import describe
from .checkpoint_manifest import MANIFEST_NAME
from .remote_store import Heartbeat, check_address, remote_steps, upload_checkpoint


logger = logging.get_logger(__name__)

# Neither Trainer nor a push to the Hub looks at a folder of this name.
SNAPSHOT_PREFIX = "_upload-"


class RemoteCheckpointError(OSError):
    """Training ended, and its last checkpoint never arrived at the remote address."""


class RemoteCheckpointCallback(TrainerCallback):
    """Copies each finished checkpoint to `<address>/checkpoint-N` in the background.

    A copy that fails is tried again, waiting longer each time, until it arrives or a newer checkpoint is there, which
    is then copied in its place. Training never waits for a copy before its end.

    Args:
        address (`str`): Such as `s3://bucket/run`; without credentials.
        first_wait, longest_wait (`float`): Seconds before a copy is tried again: doubled from the first on.
        final_attempts (`int`): Tries of the last checkpoint once training has ended.
        stalled_after (`float`): Seconds without any byte going, after training has ended, that end the waiting.
    """

    def __init__(
        self,
        address: str,
        first_wait: float = 1.0,
        longest_wait: float = 60.0,
        final_attempts: int = 5,
        stalled_after: float = 900.0,
    ):
        check_address(address)
        self.address = address.rstrip("/")
        self.first_wait, self.longest_wait, self.final_attempts = first_wait, longest_wait, final_attempts
        self.stalled_after, self._heartbeat = stalled_after, Heartbeat()
        self.arrived: list[str] = []
        self.missing: str | None = None
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._is_ending = False
        self._first_step = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if args.process_index != 0:
            return
        self.arrived, self.missing, self._is_ending = [], None, False
        self._first_step = state.global_step
        self._thread = threading.Thread(target=self._work, name="remote-checkpoints", daemon=True)
        self._thread.start()

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._thread is None or not (folder / MANIFEST_NAME).exists():
            return
        try:
            snapshot = _snapshot(folder)
        except OSError as error:
            self.missing = folder.name
            logger.warning(f"{folder.name} cannot be set aside to be copied to {self.address} ({error}).")
            return
        with self._changed:
            skipped, self._waiting = self._waiting, snapshot
            self._changed.notify_all()
        if skipped is not None:
            self._give_up(skipped)

    def close(self) -> None:
        """Wait for the last checkpoint to arrive, as often as it is tried, and end the thread."""
        if self._thread is None:
            return
        with self._changed:
            self._is_ending = True
            last = self._waiting or self._current
            self._changed.notify_all()
        if last is not None:
            logger.warning(f"Training has ended; waiting for {_name(last)} to arrive at {self.address}.")
        self._heartbeat.call()
        while self._thread.is_alive() and time.monotonic() - self._heartbeat.last < self.stalled_after:
            self._thread.join(0.2)
        if self._thread.is_alive():
            # The thread hangs inside the file system, and does not keep the process from ending.
            self.missing = _name(last) if last is not None else None
            logger.error(f"{self.missing} stopped arriving at {self.address}; it is not waited for any longer.")
        self._thread = None

    def finish(self) -> None:
        """As [`close`].

        Raises:
            RemoteCheckpointError: The last checkpoint never arrived.
        """
        self.close()
        if self.missing is not None:
            raise RemoteCheckpointError(
                f"Training is done, but {self.missing} never arrived at {self.address}; it is in output_dir. Copy it "
                "with dflash_hf.runs.remote_store.upload_checkpoint(folder, address) once the store answers again."
            )

    def _work(self) -> None:
        self._look()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_ending)
                if self._waiting is None:
                    return
                self._current, self._waiting = self._waiting, None
            self._upload(self._current)
            shutil.rmtree(self._current.parent, ignore_errors=True)
            self._current = None

    def _look(self) -> None:
        """Warn of checkpoints beyond the step that this run begins at: of another run, or of one given up."""
        try:
            later = [step for step in remote_steps(self.address) if step > self._first_step]
        # Whatever a file system raises, copies are tried all the same.
        except Exception as error:
            logger.warning(f"{self.address} does not answer ({describe(error)}).")
            return
        if later:
            logger.warning(
                f"{self.address} holds checkpoints of later steps than {self._first_step}, where this run begins: "
                f"{', '.join(map(str, later))}. Give each run an address of its own: "
                "resume_from_checkpoint=True would take those."
            )

    def _upload(self, snapshot: Path) -> None:
        wait, attempts_at_the_end, begin = self.first_wait, 0, time.monotonic()
        while True:
            attempts_at_the_end += self._is_ending
            try:
                upload_checkpoint(snapshot, self.address, lambda: self._waiting is None, self._heartbeat)
            # Whatever a file system raises, training must go on.
            except Exception as error:
                if self._waiting is not None:
                    logger.warning(f"{_name(snapshot)} did not arrive at {self.address}; a newer one takes its place.")
                    return
                if attempts_at_the_end >= self.final_attempts:
                    self.missing = _name(snapshot)
                    logger.error(f"{self.missing} never arrived at {self.address}: {describe(error)}")
                    return
                logger.warning(
                    f"{_name(snapshot)} could not be copied to {self.address} ({describe(error)}); trying again in "
                    f"{wait:g} s."
                )
            else:
                self.arrived.append(_name(snapshot))
                self.missing = None
                seconds = time.monotonic() - begin
                logger.info(f"{_name(snapshot)} is at {self.address} after {seconds:.1f} s.")
                return
            self._heartbeat.call()
            self._sleep(wait)
            wait = min(2 * wait, self.longest_wait)

    def _sleep(self, seconds: float) -> None:
        """Wait, but not once a newer checkpoint is there or training has ended."""
        with self._changed:
            was_ending = self._is_ending
            self._changed.wait_for(lambda: self._waiting is not None or self._is_ending != was_ending, seconds)

    def _give_up(self, snapshot: Path) -> None:
        logger.warning(f"{_name(snapshot)} is not copied to {self.address}: a newer one was finished before its turn.")
        shutil.rmtree(snapshot.parent, ignore_errors=True)


def _name(snapshot: Path) -> str:
    return snapshot.name


def _snapshot(folder: Path) -> Path:
    return linked_copy(folder, folder.parent / f"{SNAPSHOT_PREFIX}{folder.name}-{time.monotonic_ns()}" / folder.name)


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


__all__ = ["RemoteCheckpointCallback", "RemoteCheckpointError", "linked_copy"]
