# SPDX-License-Identifier: Apache-2.0
"""How long a run takes until its first step is done, stage by stage."""

import logging
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback


logger = logging.getLogger(__name__)

# The stages in their order, by what the log calls them.
STAGES = {
    "load_target": "loading the target",
    "first_batch": "first batch",
    "tune_target": "compiling and tuning the target's layers",
    "check_target": "check of the packed target",
    "first_target_forward": "first forward of the target",
    "first_drafter_step": "rest of the first step (the drafter's compilation, loss, optimizer)",
}
# A start that takes longer is told of where everybody sees it.
LONG_SECONDS = 10


class StartupTimes:
    """Seconds of each stage, each measured once; what lies within another stage does not count in that one."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        # When stages began, those that have ended included.
        self._begun: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """Start a stage, unless it has been measured."""
        if stage not in self.seconds:
            self._begun[stage] = perf_counter()

    def end(self, stage: str, device: torch.device) -> None:
        """End a stage that was begun; only then, so once, the host waits for what a device still has to do."""
        if stage not in self._begun or stage in self.seconds:
            return
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        start = self._begun[stage]
        # A stage of another thread that began earlier and goes on meanwhile lies in none.
        within = sum(seconds for other, seconds in self.seconds.items() if self._begun[other] >= start)
        self.seconds[stage] = max(perf_counter() - start - within, 0.0)
        logger.info("Start-up: %s took %.1f s.", STAGES[stage], self.seconds[stage])

    def rounded(self) -> dict[str, float]:
        """Seconds of the stages in their order, to the millisecond."""
        return {stage: round(self.seconds[stage], 3) for stage in STAGES if stage in self.seconds}

    def report(self) -> str:
        """One line: all stages and their sum."""
        parts = ", ".join(f"{STAGES[stage]} {seconds:.1f} s" for stage, seconds in self.rounded().items())
        return f"The start took {sum(self.seconds.values()):.1f} s up to the end of the first step: {parts}."


class StartupCallback(TrainerCallback):
    """Measures what training adds to the start, tells of a long one before and after, and puts it into the record.

    Args:
        trainer: The [`DFlashTrainer`] it belongs to.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._has_told = False

    @property
    def _times(self) -> StartupTimes:
        return self.trainer.target.startup

    def on_train_begin(self, args, state, control, **kwargs):
        self._has_told = False
        notice = self.trainer.target.tuning_notice()
        if notice and state.is_world_process_zero:
            logger.warning(notice)
        self._times.begin("first_batch")

    def on_step_begin(self, args, state, control, **kwargs):
        self._times.end("first_batch", torch.device("cpu"))
        self._times.begin("first_drafter_step")

    def on_step_end(self, args, state, control, **kwargs):
        if self._has_told:
            return
        self._has_told = True
        is_new = "first_drafter_step" not in self._times.seconds
        self._times.end("first_drafter_step", args.device)
        self.trainer.run_record["startup_seconds"] = self._times.rounded()
        if is_new and state.is_world_process_zero:
            is_long = sum(self._times.seconds.values()) > LONG_SECONDS
            logger.log(logging.WARNING if is_long else logging.INFO, self._times.report())


__all__ = ["STAGES", "StartupCallback", "StartupTimes"]
