# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are complete or absent: written aside, listed in a manifest with checksums, flushed, renamed."""

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from .writing import ASIDE_PREFIX, REPLACED_PREFIX, check_writable, only_writer, publish, remove


logger = logging.get_logger(__name__)

MANIFEST_NAME = "checkpoint_manifest.json"
# A pickle of the arguments that nothing here reads again.
UNLISTED = (MANIFEST_NAME, "training_args.bin")
# A checksum is that of so many bytes, so that threads compute those of a large file side by side.
PART_BYTES = 2**28
NUM_THREADS = 8

# Folders on the way to the Hub and to a remote address, which Trainer and pushes of the output folder leave alone.
STAGING_PREFIX = "_push-"
SNAPSHOT_PREFIX = "_upload-"
# Checkpoints of what ran in the folder before; pushes of the output folder leave it alone too.
EARLIER_PREFIX = "_earlier_"

SPARE_BYTES = 16 * 2**20

_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")


class DiskSpaceError(OSError):
    """The next checkpoint does not fit on the disk."""


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def crc32_of(path: Path, part_bytes: int = 0) -> list[str]:
    """The CRC-32 in hexadecimal of each part of a file, 256 MiB by default: fast enough for 20 GB."""
    part_bytes = part_bytes or PART_BYTES

    def crc32(start: int) -> str:
        checksum, left = 0, part_bytes
        with path.open("rb") as file:
            file.seek(start)
            while data := file.read(min(2**22, left)):
                checksum = zlib.crc32(data, checksum)
                left -= len(data)
        return f"{checksum:08x}"

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(crc32, range(0, max(path.stat().st_size, 1), part_bytes)))


def make_manifest(folder: Path, with_hashes: bool = False) -> dict[str, Any]:
    """Names, sizes in bytes and checksums of the files of a checkpoint; hashes where they travel."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in UNLISTED):
        checksum = {"sha256": sha256_of(path)} if with_hashes else {"crc32": crc32_of(path)}
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, **checksum}
    return {"format": 1, "files": files}


def files_of(manifest: str | bytes) -> dict[str, dict[str, Any]]:
    """The files that the text of a manifest lists, each with its size in bytes.

    Raises:
        ValueError: It is not a manifest, lists nothing, or a file outside the checkpoint's folder.
    """
    content = json.loads(manifest)
    files = content.get("files") if isinstance(content, dict) else None
    if not files or not isinstance(files, dict):
        raise ValueError("it lists no files")
    if not all(isinstance(entry, dict) and isinstance(entry.get("size"), int) for entry in files.values()):
        raise ValueError("it lacks the size of a file")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise ValueError("it lists a file outside the checkpoint")
    return files


def manifest_problems(folder: str | Path) -> list[str]:
    """What is wrong with a checkpoint by its manifest, one sentence each; nothing for a complete one."""
    path = Path(folder, MANIFEST_NAME)
    try:
        files = files_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [f"it has no {MANIFEST_NAME}, which is written last"]
    except (OSError, ValueError) as error:
        return [f"its {MANIFEST_NAME} cannot be read ({error})"]
    return [f"{name} {found}" for name, entry in files.items() if (found := _problem(path.parent / name, entry))]


def _problem(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        size, crc32 = path.stat().st_size, entry.get("crc32")
        if size != entry["size"]:
            return f"has {size} bytes instead of {entry['size']}"
        if "sha256" in entry and sha256_of(path) != entry["sha256"]:
            return "has another hash"
        # Earlier versions wrote the checksum of the whole file.
        own = None if crc32 is None else crc32_of(path) if isinstance(crc32, list) else crc32_of(path, size)[0]
        return None if own == crc32 else "has another checksum"
    except OSError as error:
        # Such as a bad sector, or a file of another user.
        return f"cannot be read ({error.strerror})"


def step_of(folder: str | Path) -> int | None:
    """The step of a folder named checkpoint-N, else None."""
    match = _CHECKPOINT.match(Path(folder).name)
    return int(match[1]) if match else None


def checkpoints_in(output_dir: str | Path) -> dict[int, Path]:
    """The checkpoints of a folder, complete or not, by step in ascending order."""
    folders = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    return dict(sorted((step, path) for path in folders if (step := step_of(path)) is not None))


def clean_up(output_dir: str | Path) -> None:
    """Give complete checkpoints that a kill left aside their names, and remove everything else that is aside."""
    for aside in sorted(Path(output_dir).glob(f"{ASIDE_PREFIX}*")):
        final = aside.with_name(aside.name.removeprefix(REPLACED_PREFIX).removeprefix(ASIDE_PREFIX))
        # A machine that went down may have lost what took the place of an older one.
        if step_of(final) is None or manifest_problems(aside) or not manifest_problems(final):
            remove(aside)
        elif aside.name.startswith(REPLACED_PREFIX):
            remove(final)
            aside.rename(final)
        else:
            publish(aside, final)


def last_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a folder, saying which newer ones are skipped and why."""
    for folder in reversed(checkpoints_in(output_dir).values()):
        problems = manifest_problems(folder)
        if not problems:
            return folder
        logger.warning(f"{folder} is incomplete and skipped: {'; '.join(problems)}.")
    return None


def set_aside(output_dir: str | Path, step: int) -> None:
    """Move checkpoints beyond the step that a run begins at into a folder of their own: a folder holds one run.

    A later resume_from_checkpoint=True would take the newest of them in place of what this run wrote last.
    """
    beyond = [path for there, path in checkpoints_in(output_dir).items() if there > step]
    if not beyond:
        return
    apart = next(p for n in count(1) if not (p := Path(output_dir, f"{EARLIER_PREFIX}{n}")).exists())
    apart.mkdir()
    for path in beyond:
        path.rename(apart / path.name)
    logger.warning(
        f"{output_dir} held {', '.join(path.name for path in beyond)}, beyond step {step} where this run begins; they "
        f"are in {apart} now. To go on from them, give resume_from_checkpoint={str(apart / beyond[-1].name)!r}."
    )


def rotate(trainer: Trainer, run_dir: Path, is_over: bool = False) -> None:
    """Delete the checkpoints beyond `save_total_limit`: never the best, nor the newest before the run `is_over`.

    Trainer goes by the time of their last change, which a clock that is set back or a copy changes, and takes
    `checkpoint-10-keep` for a checkpoint; here the steps of `checkpoint-N` count.
    """
    limit, state = trainer.args.save_total_limit, trainer.state
    if not trainer.args.should_save or limit is None or limit <= 0:
        return
    folders, best = checkpoints_in(run_dir), Path(state.best_model_checkpoint or "")
    newest = None if is_over else state.global_step
    old = [path for step, path in folders.items() if step != newest and path != best]
    for folder in old[: max(0, len(folders) - limit)]:
        # The new checkpoint is there, and other ranks would wait for one that stops here.
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, only_model: bool) -> int:
    """Bytes that a checkpoint takes, moments of Adam included even before its first step."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    if only_model:
        return parameters
    states = [] if optimizer is None else [t for s in optimizer.state.values() for t in s.values()]
    held = sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor))
    return parameters + (held or 2 * parameters)


def check_disk_space(folder: str | Path, needed: int) -> None:
    """Raises [`DiskSpaceError`] where a checkpoint of so many bytes does not fit on the disk of a folder."""
    free, needed = shutil.disk_usage(folder).free, int(1.01 * needed) + SPARE_BYTES
    if free < needed:
        raise DiskSpaceError(
            f"The next checkpoint needs {needed / 2**30:.2f} GiB and the disk of {folder} has {free / 2**30:.2f} GiB "
            "free. Free some, set save_total_limit, or give another output_dir; checkpoints that are there are kept."
        )


@contextmanager
def writes_alone(trainer: Trainer) -> Iterator[None]:
    """Around a training: one process at a time writes checkpoints into an `output_dir`.

    [`AnotherWriterError`] is raised on all ranks, as is the OSError of a folder that cannot be written.
    """
    folder = Path(str(trainer.args.output_dir))

    def hold() -> None:
        if trainer.args.save_strategy != SaveStrategy.NO:
            check_writable(folder)
        if folder.is_dir():
            stack.enter_context(only_writer(folder, "output_dir"))

    with ExitStack() as stack:
        decided_by_main(trainer, hold)
        yield


def decided_by_main(trainer: Trainer, function: Callable[[], Any]) -> Any:
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
    """Write the checkpoint of the present step into the folder of checkpoints, all ranks together; return its own.

    The main rank calls `write_more` with the unfinished folder. [`DiskSpaceError`] comes before anything is written,
    another OSError on all ranks where one of them could not write; then there is no checkpoint of this step.
    """
    args, state = trainer.args, trainer.state
    final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    aside = final.with_name(f"{ASIDE_PREFIX}{final.name}")

    def prepare() -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        clean_up(run_dir)
        check_disk_space(run_dir, checkpoint_bytes(trainer.model, trainer.optimizer, args.save_only_model))
        aside.mkdir()

    def write() -> None:
        trainer.store_flos()
        _write_weights_and_states(trainer, str(aside))
        if state.best_global_step:
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or best.exists():
                state.best_model_checkpoint = str(best)
        if args.should_save:
            state.stateful_callbacks = _callback_states(trainer)
            state.save_to_json(os.path.join(aside, TRAINER_STATE_NAME))
            write_more(aside)

    def finish() -> None:
        if args.should_save:
            (aside / MANIFEST_NAME).write_text(json.dumps(make_manifest(aside), indent=1) + "\n")
            publish(aside, final)

    decided_by_main(trainer, prepare)
    _on_all_ranks(trainer, aside, write)
    _on_all_ranks(trainer, aside, finish)
    return final


def _on_all_ranks(trainer: Any, aside: Path, function: Callable[[], None]) -> None:
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
            remove(aside)
        raise OSError(
            f"The checkpoint of step {trainer.state.global_step} could not be written"
            f"{f' ({error})' if error else ' by another rank'}; older ones are kept. Look at the disk of "
            f"{aside.parent}."
        ) from error


def _callback_states(trainer: Any) -> dict[str, Any]:
    exported: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            exported.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states if len(states) > 1 else states[0] for name, states in exported.items()}


def _write_weights_and_states(trainer: Any, folder: str) -> None:
    """Trainer's own parts: its `_save_checkpoint` would write all of it under the final name, one after the other."""
    if trainer.args.save_only_model:
        trainer.save_model(folder, _internal_call=True)
        return
    device = trainer.args.device
    # A thread begins at the first GPU, whichever one the process uses.
    use_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    # Each waits for copies to the host and into files, which one thread makes at a fraction of a disk's rate.
    with ThreadPoolExecutor(1, initializer=use_device) as pool:
        states = (trainer._save_optimizer_and_scheduler, trainer._save_scaler, trainer._save_rng_state)
        written = [pool.submit(write, folder) for write in states]
        trainer.save_model(folder, _internal_call=True)
        for state in written:
            state.result()
