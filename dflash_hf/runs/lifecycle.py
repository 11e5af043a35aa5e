# SPDX-License-Identifier: Apache-2.0
"""A run's course around its steps: what is checked and found before them, saved between them, and finished after."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ..training.partial_training import check_resumed_part, is_adapter
from .checkpointing import decided_by_main, write_checkpoint
from .guards import check_can_learn, first_nonfinite_parameter
from .interrupts import TrainingInterrupted
from .record import run_record, write_record
from .remote_checkpoints import RemoteCheckpointCallback
from .resumed_state import EVALUATION_DUE
from .resuming import prepare_output, resume_folder


logger = logging.get_logger(__name__)


def begin(trainer: Any, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Check that a run can learn and be saved, write down what it is, and find the checkpoint that it goes on from.

    Args:
        trainer: The [`DFlashTrainer`] that is about to train.
        resume_from_checkpoint: As for [`DFlashTrainer.train`].

    Returns:
        The checkpoint's folder, the same on every rank; None for a run that starts.

    Raises:
        ValueError: The loss cannot fall, or the checkpoint cannot be resumed.
        DiskSpaceError: No checkpoint would fit.
    """
    args, optimizer = trainer.args, trainer.optimizer
    groups = [{"lr": args.learning_rate}] if optimizer is None else optimizer.param_groups
    check_can_learn(trainer.model, groups, partial=is_adapter(trainer.model) or bool(args.trainable_modules))
    decided_by_main(trainer, lambda: prepare_output(trainer))
    trainer.run_record = run_record(trainer)
    folder = decided_by_main(trainer, lambda: resume_folder(trainer, resume_from_checkpoint))
    check_resumed_part(folder, trainer.accelerator.unwrap_model(trainer.model))
    return folder


def save(trainer: Any, run_dir: Path) -> Path | None:
    """Write a checkpoint of the present step, with the run's record in it.

    Args:
        trainer: The [`DFlashTrainer`] that trains.
        run_dir: Folder of the checkpoints.

    Returns:
        The checkpoint's folder; None where the drafter is not finite, of which there is none.
    """
    trainer._guard.flush()
    # Schedule-free optimizers step at other weights than they evaluate and leave behind.
    trainer.optimizer.eval()
    parameter = first_nonfinite_parameter(trainer.model)
    if parameter is not None:
        logger.error(f"No checkpoint of step {trainer.state.global_step}: the drafter's {parameter} is not finite.")
        return None
    record = {**trainer.run_record, EVALUATION_DUE: trainer._interrupts.evaluation_is_due}
    return write_checkpoint(trainer, run_dir, lambda aside: write_record(record, aside))


@contextmanager
def ended_in_order(trainer: Any) -> Iterator[None]:
    """Around the training itself: signals end it with a checkpoint, and nothing that it started is left running.

    Args:
        trainer: The [`DFlashTrainer`] that trains.

    Raises:
        TrainingInterrupted: A signal came.
        NonFiniteTrainingError: The run took no step, or its weights are not finite.
        RemoteCheckpointError: The last checkpoint never arrived at the remote address.
    """
    interrupts, guard = trainer._interrupts, trainer._guard
    interrupts.install()
    try:
        yield
        guard.finish()
        trainer.optimizer.eval()
        _save_late(trainer)
        for mirror in _mirrors(trainer):
            decided_by_main(trainer, mirror.finish)
    except TrainingInterrupted:
        _end_interrupted(trainer)
        raise
    finally:
        for mirror in _mirrors(trainer):
            mirror.close()
        trainer.prefetcher.close()
        guard.close()
        interrupts.remove()
    interrupts.pass_on()


def _save_late(trainer: Any) -> None:
    """Write a checkpoint of a run that writes none, if a signal came behind its last step, such as in an evaluation.

    The signal is passed on, and may end the process before anything else is saved.
    """
    interrupts = trainer._interrupts
    if trainer.args.save_strategy == SaveStrategy.NO and not interrupts.saves_last:
        came = trainer.accelerator.reduce(interrupts.flag(trainer.args.device), reduction="sum")
        if came.item():
            trainer._save_checkpoint(trainer.model, None)


def _mirrors(trainer: Any) -> list[RemoteCheckpointCallback]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, RemoteCheckpointCallback)]


def _end_interrupted(trainer: Any) -> None:
    """What the parent does at the end of a run, which an interrupt passes over."""
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    trainer._finish_current_push()
    for mirror in _mirrors(trainer):
        mirror.close()
    trainer.is_in_train = False
    if trainer.args.world_size > 1:
        # A rank that exits while another one still talks to it aborts.
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.state.destroy_process_group()


__all__ = ["begin", "ended_in_order", "save"]
