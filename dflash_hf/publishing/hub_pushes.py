# SPDX-License-Identifier: Apache-2.0
"""What goes to the Hub: the publishable bf16 drafter from a folder of its own, and whole checkpoints beside it."""

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import HubStrategy
from transformers.utils import hf_api, logging
from transformers.utils.hub import PushInProgress

from ..data.addresses import describe
from ..runs.remote_checkpoints import linked_copy
from ..training.partial_training import plain_drafter
from .model_card import CardOptions
from .repository import PLOT_NAME, Publication, build_repository
from .sending import full_repo_id, publish, recorded_results
from .training_facts import read_facts


logger = logging.get_logger(__name__)

# Left alone by Trainer and by pushes of the folder it lies in.
STAGING_PREFIX = "_push-"


def write_publishable(trainer: Any, folder: Path) -> None:
    """Write what users of a drafter load: bf16 weights in the published layout, its code and the tokenizer.

    Args:
        trainer: Whose present weights are written; the fp32 masters stay as they are.
        folder: To write to.
    """
    drafter = plain_drafter(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
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
    copy = staging.with_name(f"{staging.name}-checkpoint")
    with_checkpoint = args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
    try:
        write_publishable(trainer, staging)
        if with_checkpoint:
            linked_copy(checkpoint, copy)
    # Tokenizers raise bare exceptions. Other ranks would wait for one that stops here, and the checkpoint is there.
    except Exception as error:
        logger.warning(f"{checkpoint.name} cannot be set aside to be pushed to the Hub ({error}).")
        for folder in (staging, copy):
            shutil.rmtree(folder, ignore_errors=True)
        return
    jobs = [_upload(trainer, staging, message, staging)]
    if with_checkpoint:
        last = args.hub_strategy == HubStrategy.CHECKPOINT
        name = "last-checkpoint" if last else checkpoint.name
        jobs.append(_upload(trainer, copy, f"{message}, checkpoint", copy, path_in_repo=name))
    before = [] if running is None or running.is_done() else running.jobs
    trainer.push_in_progress = PushInProgress([*before, *jobs])  # type: ignore[arg-type, misc]


def build_publication(trainer: Any, folder: Path, repo_id: str, options: CardOptions | None = None) -> Publication:
    """The repository of the present drafter, with what the run and its output folder know.

    Args:
        trainer: Whose present weights are published.
        folder: To write to.
        repo_id: "OWNER/NAME".
        options: What the publisher adds to the card.
    """
    output = Path(trainer.args.output_dir)
    drafter = plain_drafter(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
    plots = [path for path in sorted(output.glob("*.png")) if path.name != PLOT_NAME]
    facts, results = read_facts(output), recorded_results(output)
    return build_repository(drafter, folder, repo_id, facts=facts, results=results, plots=plots, options=options)


def write_card(trainer: Any, options: CardOptions | None = None) -> None:
    """Write the card of the present drafter into the output folder; needs no network.

    Args:
        trainer: Whose drafter it is.
        options: What the publisher adds to the card.
    """
    output = Path(trainer.args.output_dir)
    name = trainer.hub_model_id or output.absolute().name
    with tempfile.TemporaryDirectory() as folder:
        build_publication(trainer, Path(folder), name if "/" in name else f"OWNER/{name}", options)
        shutil.copy(Path(folder, "README.md"), output)


def push_run(
    trainer: Any,
    commit_message: str,
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    tag: str | None = None,
    options: CardOptions | None = None,
) -> str | Future | None:
    """Publish the present drafter of a run.

    Args:
        trainer: The run.
        commit_message: First line of the commit.
        blocking: Whether to wait until all is sent.
        token: Access token; by default `hub_token`, or the environment's.
        revision: Branch; by default `hub_revision`.
        private: Whether a new repository is private; by default `hub_private_repo`.
        tag: Tag of the commit.
        options: What the publisher adds to the card.

    Returns:
        Address of the commit, or a future of it; None on all ranks but the first.
    """
    args = trainer.args
    if not trainer.is_world_process_zero():
        return None
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    trainer._finish_current_push()
    token = token or args.hub_token
    name = trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).absolute().name
    trainer.hub_model_id = repo_id = full_repo_id(name, token)
    staging = Path(args.output_dir) / f"{STAGING_PREFIX}final"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        publication = build_publication(trainer, staging, repo_id, options)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise

    def send() -> str:
        try:
            return publish(
                publication,
                private=args.hub_private_repo if private is None else private,
                revision=revision or args.hub_revision,
                commit_message=commit_message,
                tag=tag,
                token=token,
            )
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    if blocking:
        return send()
    future = hf_api().run_as_future(send)
    future.add_done_callback(_tell_failure)
    trainer.push_in_progress = PushInProgress([future])  # type: ignore[arg-type, misc]
    return future


def _tell_failure(finished: Future) -> None:
    error = None if finished.cancelled() else finished.exception()
    if error is not None:
        logger.warning(str(error))


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


__all__ = ["build_publication", "push_checkpoint", "push_run", "write_publishable"]
