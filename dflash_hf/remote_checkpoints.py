# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at an fsspec address (`s3://`, `gs://`, ...), copied while training goes on.

A remote checkpoint is complete once its manifest is there, which is written last and holds a hash of each file.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import DEFAULT_CALLBACK
from transformers import TrainerCallback
from transformers.utils import logging

from .chats import check_address, describe
from .checkpointing import (
    MANIFEST_NAME,
    SNAPSHOT_PREFIX,
    DiskSpaceError,
    check_disk_space,
    files_of,
    make_manifest,
    manifest_problems,
    step_of,
)
from .writing import ASIDE_PREFIX, linked_copy, publish, remove


logger = logging.get_logger(__name__)

# Protocols without folders, where making one may make the bucket: one that is gone must not come back in silence.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "r2", "memory"}


class RemoteCheckpointError(OSError):
    """Training ended, and its last checkpoint never arrived at the remote address."""


def upload_checkpoint(
    folder: Path,
    address: str,
    keep_on: Callable[[], bool] = lambda: True,
    progress: fsspec.Callback = DEFAULT_CALLBACK,
) -> None:
    """Copy a complete checkpoint to `<address>/<its name>`, its manifest with hashes last.

    `keep_on` is asked before each file, and False gives up; `progress` is told of every part that has gone. Whatever
    the file system raises, no manifest is there then.
    """
    system, root = fsspec.core.url_to_fs(f"{address.rstrip('/')}/{folder.name}")
    manifest = make_manifest(folder, with_hashes=True)
    # Listings are cached, and another process may have written since.
    system.invalidate_cache()
    if system.exists(f"{root}/{MANIFEST_NAME}"):
        system.rm_file(f"{root}/{MANIFEST_NAME}")
    for name, entry in manifest["files"].items():
        if not keep_on():
            raise InterruptedError(f"{folder.name} is not wanted any more")
        if address.partition("://")[0] not in OBJECT_STORES:
            system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        progress.call()
        system.put_file(str(folder / name), f"{root}/{name}", callback=progress)
        size = system.info(f"{root}/{name}")["size"]
        if size != entry["size"]:
            raise OSError(f"{name} arrived with {size} bytes instead of {entry['size']}")
    system.pipe_file(f"{root}/{MANIFEST_NAME}", json.dumps(manifest, indent=1).encode())


def remote_steps(address: str) -> list[int]:
    """Steps of the checkpoints at an address that have a manifest, ascending."""
    system, root = fsspec.core.url_to_fs(address.rstrip("/"))
    system.invalidate_cache()
    paths = [path.rstrip("/") for path in system.ls(root, detail=False)] if system.exists(root) else []
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    return sorted(step for path, step in steps.items() if system.exists(f"{path}/{MANIFEST_NAME}"))


def fetch_checkpoint(address: str, output_dir: str | Path) -> Path:
    """Copy a checkpoint from an address into `output_dir`, unless it is there already, and check it by its hashes.

    The address is that of one checkpoint-N, or of a folder of them, of which the newest complete one is taken. Where
    there is none, or half a one, a ValueError says so; an OSError, that the store does not answer.
    """
    address = address.rstrip("/")
    try:
        if step_of(address) is None:
            steps = remote_steps(address)
            if not steps:
                raise ValueError(
                    f"{address} holds no complete checkpoint: no checkpoint-N with a {MANIFEST_NAME}. Look at the "
                    "address, or leave resume_from_checkpoint out to start anew."
                )
            address = f"{address}/checkpoint-{steps[-1]}"
        return _fetch(address, Path(output_dir))
    except (ValueError, DiskSpaceError):
        raise
    # Each store has its own errors, which may name credentials.
    except Exception as error:
        raise OSError(f"The checkpoint at {address} could not be fetched: {describe(error)}") from None


def _fetch(address: str, output_dir: Path) -> Path:
    system, root = fsspec.core.url_to_fs(address)
    try:
        manifest = system.cat_file(f"{root}/{MANIFEST_NAME}")
        files = files_of(manifest)
    except FileNotFoundError:
        raise ValueError(f"{address} has no {MANIFEST_NAME}, which is written last: it is incomplete.") from None
    except ValueError as error:
        raise ValueError(f"The {MANIFEST_NAME} of {address} cannot be read ({error}). Take an older one.") from None
    final = output_dir / Path(root).name
    if not manifest_problems(final) and make_manifest(final, with_hashes=True)["files"] == files:
        logger.warning(f"{final} is the same as {address} and used.")
        return final
    output_dir.mkdir(parents=True, exist_ok=True)
    check_disk_space(output_dir, sum(entry["size"] for entry in files.values()))
    aside = final.with_name(f"{ASIDE_PREFIX}{final.name}")
    remove(aside)
    try:
        for name in files:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            # What is missing is named below.
            with suppress(FileNotFoundError):
                system.get_file(f"{root}/{name}", str(aside / name))
        (aside / MANIFEST_NAME).write_bytes(manifest)
        if problems := manifest_problems(aside):
            raise ValueError(f"{address} is not what its manifest says: {'; '.join(problems)}. Take an older one.")
        if final.exists():
            logger.warning(f"{final} is not the same as {address}, which takes its place.")
        publish(aside, final)
    finally:
        remove(aside)
    return final


class RemoteCheckpointCallback(TrainerCallback):
    """Copies each finished checkpoint to `<address>/checkpoint-N` in the background.

    A copy that fails is tried again until it arrives or a newer checkpoint is there, which is then copied in its
    place. Training never waits for a copy before its end.

    Args:
        address (`str`): Such as `s3://bucket/run`; without credentials.
    """

    # Seconds before a copy is tried again: doubled from the first on.
    first_wait, longest_wait = 1.0, 60.0
    # Tries of the last checkpoint once training has ended, and seconds without any byte going that end the waiting.
    final_attempts, stalled_after = 5, 900.0

    def __init__(self, address: str):
        check_address(address)
        self.address, self._last_progress = address.rstrip("/"), 0.0
        self.arrived: list[str] = []
        self.missing: str | None = None
        # Snapshots: hard links in a folder of their own, so that the checkpoint may be rotated away meanwhile.
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._is_ending = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if args.process_index == 0:
            self.arrived, self.missing, self._is_ending = [], None, False
            work = partial(self._work, state.global_step)
            self._thread = threading.Thread(target=work, name="remote-checkpoints", daemon=True)
            self._thread.start()

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._thread is None or not (folder / MANIFEST_NAME).exists():
            return
        apart = folder.with_name(f"{SNAPSHOT_PREFIX}{folder.name}-{time.monotonic_ns()}")
        try:
            snapshot = linked_copy(folder, apart / folder.name)
        except OSError as error:
            self.missing = folder.name
            logger.warning(f"{folder.name} cannot be set aside to be copied to {self.address} ({error}).")
            return
        with self._changed:
            skipped, self._waiting = self._waiting, snapshot
            self._changed.notify_all()
        if skipped is not None:
            logger.warning(f"{skipped.name} is not copied to {self.address}: a newer one was finished first.")
            remove(skipped.parent)

    def close(self) -> None:
        """Wait for the last checkpoint to arrive, as often as it is tried, and end the thread."""
        if self._thread is None:
            return
        with self._changed:
            self._is_ending = True
            last = self._waiting or self._current
            self._changed.notify_all()
        if last is not None:
            logger.warning(f"Training has ended; waiting for {last.name} to arrive at {self.address}.")
        self._see_progress()
        while self._thread.is_alive() and time.monotonic() - self._last_progress < self.stalled_after:
            self._thread.join(0.2)
        if self._thread.is_alive():
            # The thread hangs inside the file system, and does not keep the process from ending.
            self.missing = last.name if last is not None else None
            logger.error(f"{self.missing} stopped arriving at {self.address}; it is not waited for any longer.")
        self._thread = None

    def finish(self) -> None:
        """[`close`], then raise [`RemoteCheckpointError`] if the last checkpoint never arrived."""
        self.close()
        if self.missing is not None:
            raise RemoteCheckpointError(
                f"Training is done, but {self.missing} never arrived at {self.address}; it is in output_dir. Copy it "
                "with dflash_hf.remote_checkpoints.upload_checkpoint(folder, address)."
            )

    def _work(self, first_step: int) -> None:
        self._tell_of_later(first_step)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_ending)
                if self._waiting is None:
                    return
                self._current, self._waiting = self._waiting, None
            self._upload(self._current)
            remove(self._current.parent)
            self._current = None

    def _tell_of_later(self, first_step: int) -> None:
        """Warn of checkpoints beyond the step that this run begins at: of another run, or of one given up."""
        try:
            later = [step for step in remote_steps(self.address) if step > first_step]
        # Whatever a file system raises, copies are tried all the same.
        except Exception as error:
            logger.warning(f"{self.address} does not answer ({describe(error)}).")
            return
        if later:
            logger.warning(
                f"{self.address} holds checkpoints of later steps than {first_step}, where this run begins: {later}. "
                "resume_from_checkpoint=True would take those; give each run an address of its own."
            )

    def _see_progress(self, *args: Any, **kwargs: Any) -> None:
        self._last_progress = time.monotonic()

    def _upload(self, snapshot: Path) -> None:
        """Try until it arrives, a newer one waits, or the tries after the end of training are used up."""
        wait, attempts_at_the_end, begin = self.first_wait, 0, time.monotonic()
        progress = fsspec.Callback(hooks={"progress": self._see_progress})
        while True:
            attempts_at_the_end += self._is_ending
            try:
                upload_checkpoint(snapshot, self.address, lambda: self._waiting is None, progress)
                break
            # Whatever a file system raises, training must go on.
            except Exception as error:
                said = describe(error)
            if self._waiting is not None:
                logger.warning(f"{snapshot.name} did not arrive at {self.address}; a newer one takes its place.")
                return
            if attempts_at_the_end >= self.final_attempts:
                self.missing = snapshot.name
                logger.error(f"{snapshot.name} never arrived at {self.address}: {said}")
                return
            logger.warning(
                f"{snapshot.name} could not be copied to {self.address} ({said}); trying again in {wait:g} s."
            )
            self._see_progress()
            with self._changed:
                was_ending = self._is_ending
                self._changed.wait_for(lambda: self._waiting or self._is_ending != was_ending, wait)  # noqa: B023
            wait = min(2 * wait, self.longest_wait)
        self.arrived.append(snapshot.name)
        self.missing = None
        logger.info(f"{snapshot.name} is at {self.address} after {time.monotonic() - begin:.1f} s.")
