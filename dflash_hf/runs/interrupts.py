# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, SIGINT, SIGHUP or the launcher's end end a run after a step, with a checkpoint, the same on every rank."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.utils import logging

from .host_copies import HostCopy
from .launcher_end import LAUNCHER_ENDED, forget_launcher, watch_launcher


logger = logging.get_logger(__name__)

# EX_TEMPFAIL of sysexits.h: nothing is wrong, start again to go on.
INTERRUPTED_STATUS = 75
# The last is what a terminal sends when it is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# No signal has this number.
NO_MORE = b"\0"
# A launcher and its ranks often get the same signal, and the launcher passes its own on: within this many seconds it
# is one request.
SAME_REQUEST_S = 1.0


def spare_workers(dataloader: Any) -> Any:
    """Make the workers of a DataLoader outlive a signal that a scheduler sends to all processes of a run.

    The step that is running needs its batches, and torch ends the run with an error as soon as one of its workers has
    died of a signal. This holds for forked workers, which are the default on Linux up to Python 3.13. Workers end with
    the loader, when the process that made them says so, or when it is gone.

    Args:
        dataloader: A DataLoader that accelerate has prepared; it is changed and returned.
    """
    initialise = partial(_ignore_signals, dataloader.worker_init_fn)
    # Accelerate's own holds one of torch's, which makes the workers, and passes its arguments on when batches of a
    # resumed run are skipped.
    dataloader.worker_init_fn = dataloader.base_dataloader.worker_init_fn = initialise
    return dataloader


def _ignore_signals(initialise: Callable[[int], None] | None, worker_id: int) -> None:
    if initialise is not None:
        initialise(worker_id)
    parent = multiprocessing.parent_process()
    # A worker that was not forked has threads of libraries by now, which would take the signal; it stays as it is.
    if parent is None or sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The process that made the worker ends it by SIGTERM where it cannot ask, so it depends on the sender.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_for_parent, args=(parent.pid,), daemon=True).start()


def _end_for_parent(parent: int | None) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


class TrainingInterrupted(SystemExit):
    """Ends the process with status 75 after the checkpoint of an interrupted run was written."""

    def __init__(self, step: int):
        super().__init__(INTERRUPTED_STATUS)
        self.step = step


class Interrupts(TrainerCallback):
    """Waits for signals during training and ends it after the step in which every rank knows of one.

    Args:
        world_size (`int`): Ranks of the run. A single one knows at once; several add up a number in each step.
    """

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.received: signal.Signals | None = None
        self.stopping = self.evaluation_is_due = self.saves_last = False
        self._evaluates_epochs = False
        self._first: float | None = None
        self._agreed: HostCopy | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._watches_launcher = False

    def install(self) -> None:
        """Take over the signals until [`remove`] (in the main thread; elsewhere they stay as they are)."""
        self.received, self._first, self._agreed = None, None, None
        self.stopping = self.evaluation_is_due = self.saves_last = False
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Training runs outside the main thread, where signals cannot be handled: none is.")
            return
        # Python runs a handler only between two instructions of the main thread, which may hang in a collective; the
        # byte that the interpreter writes for each signal is read by a thread, so that a second signal always ends it.
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in SIGNALS if LAUNCHER_ENDED is None else (*SIGNALS, LAUNCHER_ENDED):
            # A run under nohup outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        self._thread = threading.Thread(target=self._read, args=(self._pipe[0],), name="interrupts", daemon=True)
        self._thread.start()
        try:
            self._watches_launcher = watch_launcher()
        except OSError as error:
            logger.warning(f"The run goes on after the end of a launcher that passes no signal on ({error}).")

    def remove(self) -> None:
        """Give the signals back."""
        if self._pipe is None:
            return
        if self._watches_launcher:
            forget_launcher()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        # Closing the pipe would not end the thread: processes that were forked meanwhile hold its other end too.
        os.write(self._pipe[1], NO_MORE)
        if self._thread is not None:
            self._thread.join()
        os.close(self._pipe[1])
        self._before, self._pipe, self._thread = {}, None, None

    def pass_on(self) -> None:
        """Send a signal that came too late to end the run (in its last step, say) to whoever handles it now."""
        if self.received is not None and not self.stopping:
            signal.raise_signal(self.received)

    def _read(self, descriptor: int) -> None:
        while (number := os.read(descriptor, 1)) != NO_MORE:
            if number[0] in SIGNALS:
                self._receive(signal.Signals(number[0]))
            elif number[0] == LAUNCHER_ENDED and self.received is None:
                # After a signal of its own, such as one from the keyboard, this says nothing new. A signal that
                # comes later is the first one that somebody sends to this process.
                self.received = signal.SIGTERM
                logger.warning(
                    "The launcher has ended, by a signal that it did not pass on: training ends after this step with "
                    f"a checkpoint and status {INTERRUPTED_STATUS}."
                )
        os.close(descriptor)

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self.received = now, self.received or number
            logger.warning(
                f"{number.name}: training ends after this step with a checkpoint and status {INTERRUPTED_STATUS}. "
                "Send it once more to end at once."
            )
        elif now - self._first > SAME_REQUEST_S:
            os._exit(128 + number)

    def flag(self, device: torch.device | str) -> torch.Tensor:
        """1 if this rank knows of a signal, to be added up over the ranks together with something else."""
        return torch.full((), float(self.received is not None), device=device)

    def agree(self, total: torch.Tensor) -> None:
        """Take the sum of the flags, which the host reads at the end of the step, when it has long arrived."""
        self._agreed = HostCopy(total)

    def _is_agreed(self) -> bool:
        if self.world_size == 1:
            return self.received is not None
        return self._agreed is not None and self._agreed.read().item() > 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._evaluates_epochs = args.eval_strategy == IntervalStrategy.EPOCH

    def on_step_end(self, args, state, control, **kwargs):
        if not self._is_agreed():
            return
        control.should_save = True
        # After the last step the run ends by itself.
        self.saves_last = state.global_step >= state.max_steps
        if self.saves_last:
            return
        ends_epoch = self._evaluates_epochs and float(state.epoch).is_integer()
        self.evaluation_is_due = control.should_evaluate or ends_epoch
        if self.evaluation_is_due:
            logger.warning(
                f"The evaluation that is due at step {state.global_step} is left out until the run goes on."
            )
        self.stopping, control.should_evaluate = True, False
        control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        # Everything that waits for a checkpoint has been called for this one by now. What Trainer does at the end of
        # a finished run (reload the best checkpoint, delete the others) must not happen to one that goes on later.
        if self.stopping:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            if state.is_world_process_zero and folder.exists() and not args.save_only_model:
                logger.warning(
                    f"The run is interrupted after step {state.global_step} of {state.max_steps}. "
                    f"resume_from_checkpoint=True goes on from {folder}."
                )
            raise TrainingInterrupted(state.global_step)


__all__ = ["INTERRUPTED_STATUS", "Interrupts", "TrainingInterrupted", "spare_workers"]
