# SPDX-License-Identifier: Apache-2.0
"""Two minutes on a rented machine before days: every part of a run once, each failure with its way out."""

import copy
import errno
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import torch
import torch.distributed as dist
from huggingface_hub import HfApi
from transformers import TrainerCallback

from ..target.feature_transfer import FeatureTransfer
from ..target.frozen_target import FrozenTarget
from ..target.pairs import feature_copies
from ..training_args import DFlashTrainingArguments


if TYPE_CHECKING:
    from ..trainer import DFlashTrainer

COPY_BYTES = 2**28
ALL_REDUCE_SECONDS = 60


def preflight(
    make_trainer: "Callable[[DFlashTrainingArguments, Any], DFlashTrainer]",
    args: DFlashTrainingArguments,
    target: FrozenTarget,
    upload_to: str | None = None,
) -> dict[str, float]:
    """Try out copies, all-reduce, steps, evaluation, checkpoint, resume and upload.

    Args:
        make_trainer: Makes a trainer from arguments and data to evaluate on; the data are the run's own.
        args: The run's arguments; its output folder gets a folder `preflight`, which is removed at the end.
        target: The loaded target.
        upload_to: A folder or URL (`s3://...`) to upload to, by default `remote_checkpoint_dir` or the output folder;
            the Hub is tried too where `push_to_hub` is set.

    Returns:
        Seconds of each check, also written to `preflight.json` in the output folder.

    Raises:
        RuntimeError: Naming the check that failed, why, and the way out.
    """
    folder = Path(str(args.output_dir)) / "preflight"
    source = target.device
    checks: dict[str, Callable[[], None]] = {
        "copy between the devices of the pair": lambda: check_copy(source, args.device, feature_copies(args, source)),
        "all-reduce between the ranks": lambda: check_all_reduce(args.device),
        "three steps, an evaluation, a checkpoint and its resume": lambda: check_training(make_trainer, args, folder),
        "upload": lambda: check_upload(args, upload_to),
    }
    seconds = {}
    try:
        for name, check in checks.items():
            start = time.perf_counter()
            try:
                check()
            except Exception as error:
                raise RuntimeError(f"Preflight failed at: {name}. {_with_way_out(error)}") from error
            seconds[name] = time.perf_counter() - start
            if args.process_index == 0:
                print(f"preflight: {name}: ok, {seconds[name]:.1f} s", flush=True)
    finally:
        if args.process_index == 0:
            # After a failure too: its half checkpoints may be what fills the disk.
            shutil.rmtree(folder, ignore_errors=True)
    if args.process_index == 0:
        Path(str(args.output_dir)).mkdir(parents=True, exist_ok=True)
        report = Path(str(args.output_dir)) / "preflight.json"
        report.write_text(json.dumps(seconds, indent=2))
        print(f"preflight: all {len(checks)} checks passed; their seconds are in {report}", flush=True)
    return seconds


def _with_way_out(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error}: free space, or give an output_dir on a larger disk."
    if isinstance(error, torch.OutOfMemoryError):
        return f"{error} Lower row_length, max_anchors_per_row or prefetch_depth, or set activation_checkpointing."
    return str(error)


class _FixedStates:
    """Stands in for a target: gives the same states whatever it reads."""

    def __init__(self, states: torch.Tensor):
        self.states = states
        self.device = states.device

    def context_hidden_states(self, input_ids, document_lengths=None) -> torch.Tensor:
        return self.states.clone()


def check_copy(source: torch.device, destination: torch.device, copies: str, num_bytes: int = COPY_BYTES) -> None:
    """Send random bytes the way hidden states go, and compare what arrives byte by byte.

    Raises:
        RuntimeError: When other bytes arrive.
    """
    expected = torch.randint(0, 2**31 - 1, (num_bytes // 4,), dtype=torch.int32)
    source_states = expected.to(source)
    transfer = FeatureTransfer(_FixedStates(source_states), [source], destination, copies)
    for _ in range(4):
        arrived = transfer.receive(transfer.run(torch.zeros(1, 1, dtype=torch.long), [[1]]))
        if not torch.equal(arrived.cpu(), expected):
            raise RuntimeError(
                f"Bytes copied from {source} to {destination} ({copies}) arrive changed, so hidden states would too. "
                "Copies between these GPUs cannot be trusted: set feature_copies=host and NCCL_P2P_DISABLE=1, and "
                "look at the machine's IOMMU and ACS settings."
            )


def check_all_reduce(device: torch.device, seconds: float = ALL_REDUCE_SECONDS) -> None:
    """Add up a tensor over all ranks within a time.

    Raises:
        RuntimeError: When the sum is wrong. When it does not come in time the process says so and ends: a group that
            hangs cannot be taken down in order.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    values = torch.full((2**22,), float(dist.get_rank() + 1), device=device)
    work = dist.all_reduce(values, async_op=True)
    deadline = time.monotonic() + seconds
    while work is not None and not work.is_completed():
        if time.monotonic() > deadline:
            print(
                f"Preflight failed at: all-reduce between the ranks. Nothing came in {seconds:.0f} s. Set "
                "NCCL_P2P_DISABLE=1 (and NCCL_IB_DISABLE=1 between machines without InfiniBand), and "
                "NCCL_DEBUG=INFO to see which connection waits.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        time.sleep(0.01)
    if work is not None:
        work.wait()
    world = dist.get_world_size()
    if not bool((values == world * (world + 1) / 2).all()):
        raise RuntimeError("Sums over the ranks are wrong: set NCCL_P2P_DISABLE=1 and try again.")


class _OneCheckpoint(TrainerCallback):
    """Keeps Trainer from a checkpoint at the end too, which for a large drafter takes as long as all of the steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == args.save_steps


def check_training(
    make_trainer: "Callable[[DFlashTrainingArguments, Any], DFlashTrainer]",
    args: DFlashTrainingArguments,
    folder: Path,
) -> None:
    """Three steps with an evaluation and a checkpoint after the second, and the third once more from the checkpoint.

    Raises:
        RuntimeError: When a loss is not finite or the resumed step is another one.
    """
    short = copy.copy(args)
    for name, value in {
        "output_dir": str(folder), "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1,
        "eval_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False, "report_to": [],
        "eval_on_start": False, "logging_strategy": "steps", "save_only_model": False, "save_total_limit": None,
        # Steps of a preflight are no checkpoints of the run, nor do they go on from one.
        "remote_checkpoint_dir": None, "resume_from_checkpoint": None,
    }.items():  # fmt: skip
        setattr(short, name, value)
    trainer: Any = make_trainer(short, None)
    trainer.add_callback(_OneCheckpoint())
    few = [trainer.train_dataset.documents[i] for i in range(min(4, len(trainer.train_dataset.documents)))]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics = trainer.evaluate(few)
    if not all(map(torch.isfinite, torch.tensor([*losses, metrics["eval_loss"]]))):
        raise RuntimeError(f"Losses {losses} and {metrics['eval_loss']} are not all finite: lower the learning rate.")
    # The optimizer of the first run is as large as that of the second.
    del trainer
    gc.collect()
    resumed = make_trainer(short, None)
    resumed.add_callback(_OneCheckpoint())
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    tolerance = 0 if args.device.type == "cpu" else 1e-2 * abs(losses[-1])
    if len(again) != len(losses) or abs(again[-1] - losses[-1]) > tolerance:
        raise RuntimeError(
            f"The step after the checkpoint had the loss {losses[-1]}, and {again[-1:]} after resuming: the "
            "checkpoint does not hold the whole run. Check the disk, and that all ranks see the same output_dir."
        )


def check_upload(args: DFlashTrainingArguments, upload_to: str | None) -> None:
    """Write a small file where checkpoints will go, read it back and delete it.

    Raises:
        RuntimeError: When the place cannot be written to or gives back something else.
    """
    if args.process_index != 0:
        return
    content = os.urandom(1024)
    place = upload_to or args.remote_checkpoint_dir or str(Path(str(args.output_dir)).resolve())
    url = f"{place.rstrip('/')}/preflight-upload"
    try:
        with fsspec.open(url, "wb", auto_mkdir=True) as file:
            file.write(content)
        with fsspec.open(url, "rb") as file:
            came_back = file.read()
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.rm(path)
    except (OSError, ImportError, ValueError) as error:
        raise RuntimeError(
            f"{url} cannot be written and read ({error}). Check the credentials, the bucket and, for s3:// and its "
            "like, that their fsspec package (s3fs, gcsfs) is installed."
        ) from error
    if came_back != content:
        raise RuntimeError(f"{url} gives back other bytes than were written; use another place.")
    if args.push_to_hub:
        _check_hub(args, content)


def _check_hub(args: DFlashTrainingArguments, content: bytes) -> None:
    api, name = HfApi(token=args.hub_token), args.hub_model_id or Path(str(args.output_dir)).name
    try:
        repo = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        api.upload_file(path_or_fileobj=content, path_in_repo="preflight-upload", repo_id=repo)
        api.delete_file("preflight-upload", repo_id=repo)
    except OSError as error:  # the Hub's errors are of this kind
        raise RuntimeError(
            f"The Hub repository {name} cannot be written ({error}). Log in with `hf auth login` or set HF_TOKEN to "
            "a token that may write, and check hub_model_id."
        ) from error


__all__ = ["check_all_reduce", "check_copy", "check_training", "check_upload", "preflight"]
