# SPDX-License-Identifier: Apache-2.0
"""What a resumed run does beyond loading states: its own arguments act, and a due evaluation is made up for."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from .record import RECORD_NAME, read_record


logger = logging.get_logger(__name__)

# What arguments give an optimizer's groups, and no optimizer changes by itself.
SETTINGS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")
EVALUATION_DUE = "evaluation_due"


class GivenSettings:
    """Learning rate, weight decay and the like as this run's arguments give them.

    The state of an optimizer and of its schedule holds those of the run that saved it, and loading it would let them
    rule, so that a changed argument is ignored.

    Args:
        optimizer (`torch.optim.Optimizer`): Before a state is loaded.
        scheduler: Its schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any):
        self.groups = [{k: group[k] for k in SETTINGS if k in group} for group in optimizer.param_groups]
        self.rates = list(scheduler.base_lrs) if type(scheduler) is LambdaLR else None

    def put_back(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[tuple[float, float]]:
        """Let them act from the next step on.

        Returns:
            The learning rates of the groups, as loaded and as they are now; equal where nothing has changed.
        """
        before = [float(group["lr"]) for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(own)
        if self.rates is not None:
            scheduler.base_lrs = self.rates
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            scheduler._last_lr = [rate * factor for rate, factor in zip(self.rates, factors, strict=True)]
            for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate
        return list(zip(before, (float(group["lr"]) for group in optimizer.param_groups), strict=True))


def check_steps_left(folder: Path, num_steps: int) -> None:
    """Raises for a checkpoint of a later step than the run's last one.

    Raises:
        ValueError: Naming both.
    """
    step = json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"]
    if step > num_steps:
        raise ValueError(
            f"The checkpoint {folder} is of step {step}, and the run ends with step {num_steps}: there is nothing to "
            "train. Raise max_steps or num_train_epochs, or resume from an earlier checkpoint."
        )


def tell_of_schedule(folder: Path, num_steps: int, rates: list[tuple[float, float]]) -> None:
    """Warn of a schedule that is not the saved one, with the learning rate before and after."""
    state = json.loads((folder / TRAINER_STATE_NAME).read_text())
    before, now = rates[0]
    if state["max_steps"] != num_steps or not math.isclose(before, now, rel_tol=1e-9):
        logger.warning(
            f"The schedule is not that of {folder}: {state['max_steps']} steps there and {num_steps} here; after step "
            f"{state['global_step']} the learning rate goes on from {now:.4g} instead of {before:.4g}."
        )


@contextmanager
def own_settings(trainer: Any, checkpoint: str | None) -> Iterator[None]:
    """Around the loading of a checkpoint's optimizer and schedule, after which this run's own arguments act.

    Args:
        trainer: The [`DFlashTrainer`] that loads.
        checkpoint: The checkpoint's folder, or None.

    Raises:
        ValueError: The checkpoint is of a later step than the run's last one.
    """
    if checkpoint is not None:
        check_steps_left(Path(checkpoint), trainer.state.max_steps)
    if checkpoint is None or trainer.is_deepspeed_enabled:
        yield
        return
    given = GivenSettings(trainer.optimizer, trainer.lr_scheduler)
    yield
    rates = given.put_back(trainer.optimizer, trainer.lr_scheduler)
    if trainer.is_world_process_zero():
        tell_of_schedule(Path(checkpoint), trainer.state.max_steps, rates)


class DueEvaluation(TrainerCallback):
    """Makes up for the evaluation that an interrupt left out, so that the best checkpoint is chosen among the same.

    Args:
        trainer: The [`DFlashTrainer`] that trains.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.folder: Path | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        folder, self.folder = self.folder, None
        if folder is None or not (folder / RECORD_NAME).exists() or not read_record(folder).get(EVALUATION_DUE):
            return
        # The parent's own two halves of an evaluation in training; together they are part of its step.
        metrics = self.trainer._evaluate(None, None)
        if self.trainer._determine_best_metric(metrics, None):
            state.best_model_checkpoint = str(folder)


__all__ = ["EVALUATION_DUE", "DueEvaluation", "own_settings"]
