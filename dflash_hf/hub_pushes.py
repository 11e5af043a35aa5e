# SPDX-License-Identifier: Apache-2.0
"""What goes to the Hub: the publishable bf16 drafter from a folder of its own, and whole checkpoints beside it."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import HubStrategy
from transformers.utils import hf_api, logging
from transformers.utils.hub import PushInProgress

from .remote_checkpoints import linked_copy
from .remote_store import describe


logger = logging.get_logger(__name__)

# Left alone by Trainer and by pushes of the folder it lies in.
STAGING_PREFIX = "_push-"


def write_publishable(trainer: Any, folder: Path) -> None:
    """Write what users of a drafter load: bf16 weights in the published layout, its code and the tokenizer.

    Args:
        trainer: Whose present weights are written; the fp32 masters stay as they are.
        folder: To write to.
    """
    drafter = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    drafter.save_pretrained(folder, dtype=torch.bfloat16)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)


def push_checkpoint(trainer: Any, checkpoint: Path) -> None:
    """Push the present drafter, and the checkpoint where `hub_strategy` says so, in the background.

    Both are pushed from folders of their own, which stay until then: later steps change neither, and a checkpoint may
    be rotated away meanwhile.

    Args:
        trainer: That has just written the checkpoint.
        checkpoint: Its folder, complete.
    """
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    running: PushInProgress | None = trainer.push_in_progress
    if running is not None and not running.is_done() and not args.hub_always_push:
        logger.warning(f"{checkpoint.name} is not pushed to the Hub: the push before it is still going on.")
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    message = f"Training in progress, step {trainer.state.global_step}"
    staging = Path(args.output_dir) / f"{STAGING_PREFIX}{trainer.state.global_step}"
    write_publishable(trainer, staging)
    jobs = [_upload(trainer, staging, message, staging)]
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        last = args.hub_strategy == HubStrategy.CHECKPOINT
        copy = linked_copy(checkpoint, staging.with_name(f"{staging.name}-checkpoint"))
        name = "last-checkpoint" if last else checkpoint.name
        jobs.append(_upload(trainer, copy, f"{message}, checkpoint", copy, path_in_repo=name))
    before = [] if running is None or running.is_done() else running.jobs
    trainer.push_in_progress = PushInProgress([*before, *jobs])  # type: ignore[arg-type, misc]


def _upload(trainer: Any, folder: Path, message: str, temporary: Path, path_in_repo: str | None = None) -> Future:
    future = hf_api().upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=str(folder),
        path_in_repo=path_in_repo,
        commit_message=message,
        token=trainer.args.hub_token,
        revision=trainer.args.hub_revision,
        # Files of an older checkpoint that this one does not have, such as the states of more ranks.
        delete_patterns="*" if path_in_repo == "last-checkpoint" else None,
        # A pickle that nothing reads.
        ignore_patterns=["training_args.bin"],
        run_as_future=True,
    )

    # Who waits for an upload hears of its end before callbacks run; this one ends once its folder is gone.
    settled: Future = Future()

    def done(finished: Future) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        error = None if finished.cancelled() else finished.exception()
        if error is not None:
            logger.warning(f"'{message}' did not arrive at {trainer.hub_model_id}: {describe(error)}")
        settled.set_result(None)

    future.add_done_callback(done)
    return settled


__all__ = ["push_checkpoint", "write_publishable"]
