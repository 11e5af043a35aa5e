# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are complete or absent, with a checksum for each file."""

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from .writing import only_writer


# --- The manifest of a checkpoint: its files with sizes and checksums, by which a complete one is known.


MANIFEST_NAME = "checkpoint_manifest.json"
# A pickle of the arguments that nothing here reads again.
UNLISTED = (MANIFEST_NAME, "training_args.bin")
# A checksum is that of so many bytes, so that threads compute those of a large file side by side.
PART_BYTES = 2**28

NUM_THREADS = 8


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32_of(path: Path) -> list[str]:
    """The CRC-32 in hexadecimal of each 256 MiB of the file: fast enough for the 20 GB of a checkpoint."""
    starts = range(0, max(path.stat().st_size, 1), PART_BYTES)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(lambda start: _crc32(path, start, PART_BYTES), starts))


def _crc32(path: Path, start: int, length: int) -> str:
    checksum = 0
    with path.open("rb") as file:
        file.seek(start)
        while part := file.read(min(2**22, length)):
            checksum = zlib.crc32(part, checksum)
            length -= len(part)
    return f"{checksum:08x}"


def _has_crc32(path: Path, expected: str | list[str]) -> bool:
    # Earlier versions wrote that of the whole file.
    return expected == (_crc32(path, 0, path.stat().st_size) if isinstance(expected, str) else crc32_of(path))


def make_manifest(folder: Path, with_hashes: bool = False) -> dict[str, Any]:
    """Names, sizes in bytes and checksums of the files of a checkpoint; hashes where they travel."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in UNLISTED):
        entry: dict[str, Any] = {"size": path.stat().st_size}
        if with_hashes:
            entry["sha256"] = sha256_of(path)
        else:
            entry["crc32"] = crc32_of(path)
        files[path.relative_to(folder).as_posix()] = entry
    return {"format": 1, "files": files}


def files_of(manifest: str | bytes) -> dict[str, dict[str, Any]]:
    """The files that the text of a manifest lists, each with its size in bytes.

    Raises:
        ValueError: It is no manifest, or lists nothing.
    """
    content = json.loads(manifest)
    files = content.get("files") if isinstance(content, dict) else None
    if not files or not isinstance(files, dict):
        raise ValueError("it lists no files")
    if not all(isinstance(entry, dict) and isinstance(entry.get("size"), int) for entry in files.values()):
        raise ValueError("it has no size of a file")
    return files


def manifest_problems(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint by its manifest, one sentence each; nothing for a complete one."""
    folder = Path(folder)
    try:
        files = files_of((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [f"it has no {MANIFEST_NAME}, which is written last"]
    except ValueError:
        return [f"its {MANIFEST_NAME} cannot be read"]
    except OSError as error:
        return [f"its {MANIFEST_NAME} cannot be read ({error.strerror})"]
    return [problem for name, entry in files.items() if (problem := _file_problem(folder / name, name, entry))]


def _file_problem(path: Path, name: str, entry: dict[str, Any]) -> str | None:
    try:
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
        if "sha256" in entry and sha256_of(path) != entry["sha256"]:
            return f"{name} has another hash"
        if "crc32" in entry and not _has_crc32(path, entry["crc32"]):
            return f"{name} has another checksum"
    except OSError as error:
        # Such as a bad sector, or a file of another user.
        return f"{name} cannot be read ({error.strerror})"
    return None


# --- Checkpoints that are complete or absent: written aside, listed in a manifest, renamed and flushed to disk.


# Left alone by Trainer and by pushes of the folder it lies in.
STAGING_PREFIX = "_push-"

# Neither Trainer nor a push to the Hub looks at a folder of this name.
SNAPSHOT_PREFIX = "_upload-"


def check_writable(folder: Path) -> None:
    """Make a folder and something in it, and remove the latter.

    Raises:
        OSError: Nothing could be written there.
    """
    probe = folder / f"{ASIDE_PREFIX}probe"
    try:
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()
    except OSError as error:
        raise OSError(
            f"Nothing could be written into output_dir={str(folder)!r} ({error}). Make it writable, or give "
            "another one."
        ) from error


logger = logging.get_logger(__name__)

# Neither Trainer nor a push to the Hub looks at a folder of this name.
ASIDE_PREFIX = "_incomplete-"

REPLACED_PREFIX = f"{ASIDE_PREFIX}replaced-"

SPARE_BYTES = 16 * 2**20

_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


class DiskSpaceError(OSError):
    """The next checkpoint does not fit on the disk."""


# Folders


def step_of(folder: str | Path) -> int | None:
    """The step of a folder named checkpoint-N, else None."""
    match = _CHECKPOINT.match(Path(folder).name)
    return int(match[1]) if match else None


def publish(aside: Path, final: Path) -> None:
    """Give a finished folder its name, in the place of an older one of that name, and flush it to disk.

    In this order, since a kill loses nothing that was written, and a disk of 1 GB/s takes 20 seconds. What a machine
    loses that goes down meanwhile is known by the checksums.
    """
    replaced = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    _remove(replaced)
    if os.path.lexists(final):
        # Both are complete, so a kill between the two renames leaves the new one to be found.
        final.rename(replaced)
    try:
        aside.rename(final)
        for path in [*final.rglob("*"), final, final.parent]:
            _flush(path)
    except OSError:
        if not aside.exists():
            final.rename(aside)
        if os.path.lexists(replaced):
            replaced.rename(final)
        raise
    _remove(replaced)


def _remove(path: Path) -> None:
    """Remove what stands under a name, and not what a link points to."""
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


def clean_up(output_dir: str | Path) -> None:
    """Give finished folders that a kill left aside their names, and remove the unfinished ones."""
    for aside in sorted(Path(output_dir).glob(f"{ASIDE_PREFIX}*")):
        is_replaced = aside.name.startswith(REPLACED_PREFIX)
        final = aside.with_name(aside.name.removeprefix(REPLACED_PREFIX).removeprefix(ASIDE_PREFIX))
        # A machine that went down may have lost what took the place of an older one.
        is_needed = not final.exists() or (is_replaced and bool(manifest_problems(final)))
        if step_of(final) is None or not is_needed or manifest_problems(aside):
            _remove(aside)
        elif is_replaced:
            _remove(final)
            aside.rename(final)
        else:
            publish(aside, final)


def last_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a folder, saying which newer ones are skipped and why."""
    folders = [f for f in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.is_dir() and step_of(f) is not None]
    for folder in sorted(folders, key=lambda f: step_of(f) or 0, reverse=True):
        problems = manifest_problems(folder)
        if not problems:
            return folder
        logger.warning(f"{folder} is incomplete and skipped: {'; '.join(problems)}.")
    return None


# Disk space


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, only_model: bool) -> int:
    """Bytes that a checkpoint takes, moments of Adam included even before its first step."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    if only_model:
        return parameters
    states = [] if optimizer is None else [t for s in optimizer.state.values() for t in s.values()]
    held = sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor))
    return parameters + (held or 2 * parameters)


def check_disk_space(folder: str | Path, needed: int) -> None:
    """Raises if a checkpoint of so many bytes does not fit on the disk of a folder.

    Raises:
        DiskSpaceError: Naming what is needed and what is there.
    """
    free, needed = shutil.disk_usage(folder).free, int(1.01 * needed) + SPARE_BYTES
    if free < needed:
        raise DiskSpaceError(
            f"The next checkpoint needs {needed / 2**30:.2f} GiB and the disk of {folder} has {free / 2**30:.2f} GiB "
            "free. Free some, set save_total_limit, or give another output_dir; checkpoints that are there are kept."
        )


# Writing


def decided_by_main(trainer: Any, function: Callable[[], Any]) -> Any:
    """What `function` returns on the main rank, on every rank; what it raises there is raised on all of them."""
    outcome: list[Any] = [None]
    if trainer.args.process_index == 0:
        try:
            outcome = [(function(), None)]
        # Whatever it is, the other ranks are waiting to hear of it.
        except Exception as error:
            outcome = [(None, error)]
    if trainer.args.world_size > 1:
        broadcast_object_list(outcome)
    value, raised = outcome[0]
    if raised is not None:
        raise raised
    return value


def write_checkpoint(trainer: Any, run_dir: Path, write_more: Callable[[Path], None]) -> Path:
    """Write the checkpoint of the present step, all ranks together.

    Args:
        trainer: The Trainer that trains.
        run_dir: Folder of the checkpoints.
        write_more: Called by the main rank with the unfinished folder.

    Returns:
        The checkpoint's folder.

    Raises:
        DiskSpaceError: Before anything is written.
    """
    args, name = trainer.args, f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    aside, final = run_dir / f"{ASIDE_PREFIX}{name}", run_dir / name

    decided_by_main(trainer, lambda: _prepare(trainer, aside))
    _all_ranks(trainer, aside, lambda: _write_files(trainer, aside, final, write_more))
    _all_ranks(trainer, aside, lambda: _finish(aside, final) if args.should_save else None)
    return final


def _all_ranks(trainer: Any, aside: Path, function: Callable[[], None]) -> None:
    """A part of writing, which fails on all ranks alike, so that none waits for another; also a barrier."""
    args = trainer.args
    error: Exception | None = None
    try:
        function()
    except Exception as failure:
        error = failure
    failed = trainer.accelerator.reduce(torch.tensor(float(error is not None), device=args.device), reduction="sum")
    if failed.item():
        if args.should_save:
            _remove(aside)
        raise OSError(
            f"The checkpoint of step {trainer.state.global_step} could not be written"
            f"{f' ({error})' if error else ' by another rank'}; older ones are kept. Look at the disk of "
            f"{aside.parent}."
        ) from error


def _finish(aside: Path, final: Path) -> None:
    (aside / MANIFEST_NAME).write_text(json.dumps(make_manifest(aside), indent=1) + "\n")
    publish(aside, final)


def _prepare(trainer: Any, aside: Path) -> None:
    run_dir = aside.parent
    run_dir.mkdir(parents=True, exist_ok=True)
    clean_up(run_dir)
    check_disk_space(run_dir, checkpoint_bytes(trainer.model, trainer.optimizer, trainer.args.save_only_model))
    aside.mkdir()


def _write_files(trainer: Any, aside: Path, final: Path, write_more: Callable[[Path], None]) -> None:
    """What Trainer writes, by its own parts: as a whole it would write under the final name."""
    args, state, folder = trainer.args, trainer.state, str(aside)
    trainer.store_flos()
    _write_weights_and_states(trainer, folder)
    if state.best_global_step:
        best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if best == final or best.exists():
            state.best_model_checkpoint = str(best)
    if args.should_save:
        exported: dict[str, Any] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                exported.setdefault(type(callback).__name__, []).append(callback.state())
        state.stateful_callbacks = {k: v if len(v) > 1 else v[0] for k, v in exported.items()}
        state.save_to_json(os.path.join(folder, "trainer_state.json"))
        write_more(aside)


def _write_weights_and_states(trainer: Any, folder: str) -> None:
    def write_states() -> None:
        trainer._save_optimizer_and_scheduler(folder)
        trainer._save_scaler(folder)
        trainer._save_rng_state(folder)

    if trainer.args.save_only_model:
        trainer.save_model(folder, _internal_call=True)
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        # Both collect what is spread over the ranks, and two collectives at the same time would mix.
        trainer.save_model(folder, _internal_call=True)
        write_states()
    else:
        # Each waits for copies to the host and into files, which one thread makes at a fraction of a disk's rate.
        with ThreadPoolExecutor(1, initializer=_use_device, initargs=(trainer.args.device,)) as pool:
            states = pool.submit(write_states)
            trainer.save_model(folder, _internal_call=True)
            states.result()


def _use_device(device: torch.device) -> None:
    # A thread begins at the first GPU, whichever one the process uses.
    if device.type == "cuda":
        torch.cuda.set_device(device)


# --- One run at a time writes checkpoints into a folder.


def writes_alone(train: Callable[..., Any]) -> Callable[..., Any]:
    """Round a trainer's `train`: the next run would take what this one has half written for what a kill left.

    Raises:
        AnotherWriterError: On all ranks, when another process trains into the same `output_dir`.
        OSError: No checkpoint could be written there.
    """

    @functools.wraps(train)
    def alone(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            decided_by_main(trainer, lambda: _hold_output(trainer, stack))
            return train(trainer, *args, **kwargs)

    return alone


def _hold_output(trainer: Any, stack: ExitStack) -> None:
    folder = Path(trainer.args.output_dir)
    if trainer.args.save_strategy != SaveStrategy.NO:
        check_writable(folder)
    if folder.is_dir():
        stack.enter_context(only_writer(folder, "output_dir"))


# --- Which checkpoints are deleted once there are more than `save_total_limit`.


def rotate(trainer: Any, run_dir: Path) -> None:
    """Delete the checkpoints beyond `save_total_limit`, never the newest or the best.

    Trainer goes by the time of their last change. A clock that is set back, or a copy, makes that another one, and the
    newest checkpoint would be deleted. Here the order is that of the steps; those beyond the present step are of
    another run and go first.

    Args:
        trainer: That has just written a checkpoint.
        run_dir: Folder of the checkpoints.
    """
    limit, now = trainer.args.save_total_limit, trainer.state.global_step
    if not trainer.args.should_save or limit is None or limit <= 0:
        return
    folders = {step: f for f in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (step := step_of(f)) is not None}
    best = trainer.state.best_model_checkpoint
    kept = {step for step, folder in folders.items() if step == now or (best and folder == Path(best))}
    others = sorted(folders.keys() - kept, key=lambda step: (step <= now, step))
    for step in others[: max(0, len(folders) - max(limit, len(kept)))]:
        try:
            shutil.rmtree(folders[step])
        # The new checkpoint is there; other ranks would wait for one that stops here.
        except OSError as error:
            logger.warning(f"The old checkpoint {folders[step]} could not be deleted: {error}")
