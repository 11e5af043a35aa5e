# SPDX-License-Identifier: Apache-2.0
"""What watches a run: steps that are not finite are left out, signals end it with a checkpoint, some are profiled."""

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.launcher.api import LaunchConfig
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Documents or parameters named in a message; a step may hold hundreds.
MAX_NAMED = 20
RESUME = "Resume from the last checkpoint; only finite weights are saved."
# EX_TEMPFAIL of sysexits.h: nothing is wrong, start again to go on.
INTERRUPTED_STATUS = 75
# The last is what a terminal sends when it is closed.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Ends the thread that reads signals; no signal has this number.
NO_MORE = b"\0"
# A launcher and its ranks often get the same signal, and the launcher passes its own on: within this many seconds it
# is one request.
SAME_REQUEST_S = 1.0
# torch.distributed.elastic, by which `accelerate launch` starts several ranks, sets the first for each. The second is
# how long it waits between passing SIGTERM on and killing, by default the third.
LAUNCHED = "TORCHELASTIC_RUN_ID"
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
GRACE_SECONDS = 30
# The rate at which weights went from an H200 into a file; half of the grace is left for the steps that end first.
BYTES_PER_SECOND = 1e9


class HostCopy:
    """A copy of a small tensor on its way to the host; reading it waits only where it has not arrived yet."""

    def __init__(self, tensor: torch.Tensor):
        # From a GPU it goes into pinned memory, which leaves the host free to queue the next kernels.
        self._tensor = tensor.detach().to("cpu", non_blocking=True, copy=True)
        self._event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    @property
    def is_immediate(self) -> bool:
        """Whether reading never waits."""
        return self._event is None

    def read(self) -> torch.Tensor:
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class NonFiniteTrainingError(RuntimeError):
    """Too many steps in a row whose loss or gradients were not finite, or weights that are not finite themselves."""


@dataclass
class _MicroBatch:
    """What the device knows of one micro-batch, read only when its step was left out."""

    documents: list[list[int]]
    lengths: list[list[int]]
    context_sums: torch.Tensor  # [B, T], not finite where any of a token's hidden states is not
    loss_is_finite: torch.Tensor | None = None


def _broken_documents(batches: list[_MicroBatch]) -> list[int]:
    """The documents that have a token with non-finite hidden states."""
    broken = []
    for batch in batches:
        rows = zip(batch.documents, batch.lengths, torch.isfinite(batch.context_sums).cpu(), strict=True)
        for documents, lengths, finite in rows:
            parts = finite[: sum(lengths)].split(lengths)
            broken += [document for document, part in zip(documents, parts, strict=True) if not part.all()]
    return broken


@dataclass
class _Step:
    number: int
    flag: HostCopy
    micro_batches: list[_MicroBatch]


class StepGuard(TrainerCallback):
    """Leaves out every step whose loss or gradients are not finite, names it, and stops after too many in a row.

    The device decides over a step, and the host reads that decision a step later, so that it never waits.

    Args:
        drafter (`nn.Module`): Whose parameters are looked at once a step was left out.
        max_in_a_row (`int`): Steps left out one after the other that stop the run.
        scaled (`bool`): Whether a gradient scaler (fp16) decides on the device; then steps are only counted here.
    """

    def __init__(self, drafter: nn.Module, max_in_a_row: int, scaled: bool = False):
        self.drafter, self.max_in_a_row, self.scaled = drafter, max_in_a_row, scaled
        self.evaluated: list[_MicroBatch] = []
        self._flag: torch.Tensor | None = None
        self._hook: Any = None
        self._forget()

    def _forget(self) -> None:
        self.in_a_row, self._took_a_step = 0, False
        self._left_out: list[int] = []
        self._current: list[_MicroBatch] = []
        self._pending: list[_Step] = []

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self._forget()
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def see(self, context_hidden_states: torch.Tensor, inputs: dict[str, Any], training: bool) -> None:
        """Remember a micro-batch's hidden states `[B, T, K * D]` by one sum per token."""
        sums = context_hidden_states.detach().sum(-1, dtype=torch.float32)
        seen = _MicroBatch(inputs["documents"], inputs["document_lengths"], sums)
        (self._current if training else self.evaluated).append(seen)

    def marked(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, with gradients that are NaN throughout where it is not finite itself."""
        finite = torch.isfinite(loss.detach())
        if self._current:
            self._current[-1].loss_is_finite = finite
        return loss * torch.where(finite, 1.0, float("nan"))

    def judge(self, grad_norm: torch.Tensor | float, step: int) -> torch.Tensor:
        """Whether a step (counted from 1) is left out, on the device, from the norm of its summed gradients."""
        self._flag = ~torch.isfinite(torch.as_tensor(grad_norm).detach())
        self._pending.append(_Step(step, HostCopy(self._flag), self._current))
        self._current = []
        return self._flag

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._flag is None or self.scaled:
            return
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = self._flag.float()
        elif self._flag.item():
            # Without gradients an optimizer touches neither a parameter nor its state.
            optimizer.zero_grad(set_to_none=True)

    def on_step_end(self, args, state, control, **kwargs):
        # The newest flag may still be on its way.
        keep = 0 if not self._pending or self._pending[-1].flag.is_immediate else 1
        self._settle(len(self._pending) - keep)

    def flush(self) -> None:
        """Read every flag, waiting for the device."""
        self._settle(len(self._pending))

    def take_left_out(self) -> list[int]:
        """The steps left out since this was last asked."""
        steps, self._left_out = self._left_out, []
        return steps

    def finish(self) -> None:
        """Read every flag at the end of a run, which has to have taken a step and left finite weights."""
        self.flush()
        if self.in_a_row and not self._took_a_step:
            raise NonFiniteTrainingError(
                f"All {self.in_a_row} steps of this run were left out: nothing was trained. Look at the documents "
                "named above and at the target's dtype."
            )
        parameter = first_nonfinite_parameter(self.drafter)
        if parameter is not None:
            raise NonFiniteTrainingError(f"The run ended with a drafter whose {parameter} is not finite. {RESUME}")

    def report_evaluation(self, loss: float) -> None:
        """Name the documents of an evaluation whose loss is not finite, and forget what was seen of it."""
        if not math.isfinite(loss):
            broken = _broken_documents(self.evaluated)
            whose = f"not finite in {_named(broken)} of those evaluated" if broken else "finite in this process"
            logger.warning(f"The loss of the evaluation is not finite: the target's hidden states are {whose}.")
        self.evaluated.clear()

    def close(self) -> None:
        """Let go of the optimizer and of what was remembered."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._current, self._pending = None, [], []

    def _settle(self, count: int) -> None:
        settled, self._pending = self._pending[:count], self._pending[count:]
        for step in settled:
            if step.flag.read().item():
                self.in_a_row += 1
                self._left_out.append(step.number)
                self._report(step)
            else:
                self.in_a_row, self._took_a_step = 0, True

    def _report(self, step: _Step) -> None:
        said = f"Step {step.number} was left out: its loss or gradients are not finite. {_blame(step.micro_batches)}"
        parameter = first_nonfinite_parameter(self.drafter)
        if parameter is not None:
            raise NonFiniteTrainingError(
                f"{said} The drafter's own {parameter} is not finite, so no later step can be. {RESUME}"
            )
        if self.in_a_row >= self.max_in_a_row:
            raise NonFiniteTrainingError(
                f"{said} It is the last of {self.in_a_row} in a row (max_nonfinite_steps={self.max_in_a_row}); "
                "weights and checkpoints are unchanged since the last good step. Look at the named documents and at "
                "the target's dtype, or lower the learning rate."
            )
        logger.warning(f"{said} {self.in_a_row} in a row; {self.max_in_a_row} stop the run.")


def _blame(batches: list[_MicroBatch]) -> str:
    broken = _broken_documents(batches)
    if broken:
        return f"The target's hidden states are not finite in {_named(broken)}."
    lost = [batch for batch in batches if batch.loss_is_finite is not None and not batch.loss_is_finite.item()]
    documents = [d for batch in lost or batches for row in batch.documents for d in row]
    what = "The loss is not finite" if lost else "The losses of this process are finite; the step trained here"
    return f"{what} on {_named(documents)}."


def _named(documents: list[int]) -> str:
    shown = ", ".join(map(str, documents[:MAX_NAMED]))
    more = f" and {len(documents) - MAX_NAMED} more" if len(documents) > MAX_NAMED else ""
    return f"document{'s' if len(documents) != 1 else ''} {shown}{more}"


def first_nonfinite_parameter(model: nn.Module) -> str | None:
    """Name of a parameter that holds an infinity or NaN, or None (reads the device once)."""
    named = dict(model.named_parameters())
    finite = torch.stack([torch.isfinite(p.detach()).all() for p in named.values()]).tolist()
    return next((name for name, is_finite in zip(named, finite, strict=True) if not is_finite), None)


def check_can_learn(drafter: nn.Module, groups: list[dict[str, Any]], partial: bool = False) -> None:
    """Refuse a loss that cannot fall, whatever the data, with a ValueError; warn of parameters that are frozen.

    `groups` are the optimizer's: `lr` (or `initial_lr`, before the schedule), and `params` where it exists already.
    `partial` says that a part of the drafter was meant to be frozen.
    """
    if not any(group.get("initial_lr", group["lr"]) for group in groups):
        raise ValueError("The learning rate is 0, so no step would change the drafter. Set learning_rate (6e-4).")
    named = dict(drafter.named_parameters())
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    if len(frozen) == len(named):
        raise ValueError(
            f"None of the drafter's {len(named)} parameters requires a gradient, so no step would change it. Call "
            "drafter.requires_grad_(True)."
        )
    held = {id(parameter) for group in groups for parameter in group.get("params", named.values())}
    if not any(id(parameter) in held for parameter in named.values() if parameter.requires_grad):
        raise ValueError(
            "The optimizer holds none of the drafter's parameters that require a gradient. Make it from "
            "drafter.parameters(), or leave it out."
        )
    if frozen and not partial:
        logger.warning(
            f"{len(frozen)} of the drafter's {len(named)} parameters are frozen and will not be trained: "
            f"{', '.join(frozen[:MAX_NAMED])}{', ...' if len(frozen) > MAX_NAMED else ''}."
        )


class TrainingInterrupted(SystemExit):
    """Ends the process with status 75 after the checkpoint of an interrupted run was written."""

    def __init__(self, step: int):
        super().__init__(INTERRUPTED_STATUS)
        self.step = step


class Interrupts(TrainerCallback):
    """Ends training after the step in which every rank knows of a SIGTERM, SIGINT or SIGHUP.

    Args:
        world_size (`int`): Ranks of the run. A single one knows at once; several add up a number in each step.
    """

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self._evaluates_epochs = False
        self._forget()

    def _forget(self) -> None:
        self.received: signal.Signals | None = None
        self.stopping = self.evaluation_is_due = self.saves_last = False
        self._first: float | None = None
        self._agreed: HostCopy | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Take over the signals (in the main thread; elsewhere they stay as they are).

        A signal that came too late to end the run (in its last step, say) is passed on to whoever handles it then.
        """
        self._forget()
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Training runs outside the main thread, where Python handles no signals: none is handled.")
            yield
            return
        # Python runs a handler only between two instructions of the main thread, which may hang in a collective; the
        # byte that the interpreter writes for each signal is read by a thread, so that a second signal always ends it.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # A run under nohup outlives its terminal.
        taken = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, lambda *_: None) for number in taken}
        thread = threading.Thread(target=self._read, args=(reader,), name="interrupts", daemon=True)
        thread.start()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup_before)
            # Closing the pipe would not end the thread: processes that were forked meanwhile hold its other end too.
            os.write(writer, NO_MORE)
            thread.join()
            os.close(writer)
            os.close(reader)
        if self.received is not None and not self.stopping:
            signal.raise_signal(self.received)

    def _read(self, descriptor: int) -> None:
        while (number := os.read(descriptor, 1)) != NO_MORE:
            if number[0] in SIGNALS:
                self._receive(signal.Signals(number[0]))

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self.received = now, number
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

    def on_train_begin(self, args, state, control, **kwargs):
        self._evaluates_epochs = args.eval_strategy == IntervalStrategy.EPOCH

    def on_step_end(self, args, state, control, **kwargs):
        if self.world_size == 1:
            is_agreed = self.received is not None
        else:
            is_agreed = self._agreed is not None and self._agreed.read().item() > 0
        if not is_agreed:
            return
        control.should_save = True
        # After the last step the run ends by itself.
        self.saves_last = state.global_step >= state.max_steps
        if self.saves_last:
            return
        ends_epoch = self._evaluates_epochs and float(state.epoch).is_integer()
        self.evaluation_is_due = control.should_evaluate or ends_epoch
        if self.evaluation_is_due:
            logger.warning(f"The evaluation that is due at step {state.global_step} is left out until a resume.")
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


def spare_workers(dataloader: Any) -> Any:
    """Make the workers of a DataLoader outlive a signal that a scheduler sends to all processes of a run.

    torch ends the run with an error as soon as a worker has died of a signal. This holds for forked workers, which are
    the default on Linux up to Python 3.13. They end with the loader, when the process that made them says so, or when
    it is gone. `dataloader` is one that accelerate has prepared; it is changed and returned.
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

    def end_for_parent() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=end_for_parent, daemon=True).start()


@contextmanager
def end_together() -> Iterator[None]:
    """Put round a training script: all ranks leave the group together when it is done, or some abort at their exit.

    After an error nothing is waited for, so that the launcher sees it at once and ends the other ranks.
    """
    yield
    state = PartialState()
    if state.num_processes > 1:
        state.wait_for_everyone()
        state.destroy_process_group()


def tell_of_grace(checkpoint_bytes: int) -> None:
    """Warn of a launcher that may kill its ranks before a checkpoint is written, once it has passed SIGTERM on."""
    # Earlier versions of torch do not read the variable.
    is_read = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    grace = int(os.environ.get(GRACE, GRACE_SECONDS)) if is_read else GRACE_SECONDS
    if LAUNCHED in os.environ and checkpoint_bytes / BYTES_PER_SECOND > grace / 2:
        logger.warning(
            f"A checkpoint takes {checkpoint_bytes / 1e9:.1f} GB, and the launcher kills its ranks {grace} s after it "
            f"gets SIGTERM. Set {GRACE}=300 in its environment (torch 2.13 reads it, 2.11 does not), or send SIGTERM "
            "to the ranks."
        )


class ProfileCallback(TrainerCallback):
    """Profiles `num_steps` steps and writes `profile.json` (a trace for chrome://tracing) and `profile_copies.json`.

    The latter holds the first and last profiled step, counted from 1, as `steps`, and [`copy_overlap`] as `copies`.
    Both profiling and the writing, which falls into the step behind, make steps longer. `start` is the first step,
    0-based: later than compilation and the filling of the pipe.
    """

    def __init__(self, folder: str | Path, num_steps: int, start: int = 5):
        self.folder = Path(folder)
        self.start, self.num_steps = start, num_steps
        self._profile: profile | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        wait = self.start - state.global_step
        if state.is_world_process_zero and wait >= 0:
            self._profile = profile(
                activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU],
                schedule=schedule(wait=max(0, wait - 1), warmup=min(1, wait), active=self.num_steps, repeat=1),
                on_trace_ready=partial(self._write, state, args.device.index or 0),
            )
            self._profile.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self._profile is None:
            return
        if state.global_step == self.start + self.num_steps:
            # The profiler waits for the drafter's device alone.
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        self._profile.step()

    def on_train_end(self, args, state, control, **kwargs):
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, state: Any, device: int, finished: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / "profile.json"
        finished.export_chrome_trace(str(trace))
        copies = copy_overlap(json.loads(trace.read_text())["traceEvents"], device)
        found = {"steps": [self.start + 1, state.global_step], "copies": copies}
        (self.folder / "profile_copies.json").write_text(json.dumps(found, indent=2))


def copy_overlap(events: list[dict[str, Any]], device: int = 0) -> dict[str, dict[str, float]]:
    """Seconds of each kind of copy in a trace, and of them those in which a kernel ran on the drafter's device.

    `events` are the `traceEvents` of a chrome trace, with times in microseconds. Each kind (`"Memcpy PtoP"`, ...) gets
    its `count`, `gigabytes`, `seconds` and `covered_seconds`.
    """
    on_device = [e for e in events if e.get("cat") == "kernel" and e["args"].get("device") == device]
    busy: list[tuple[float, float]] = []
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in on_device):
        if busy and start <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(end, busy[-1][1]))
        else:
            busy.append((start, end))
    copies: dict[str, dict[str, float]] = {}
    for event in events:
        if event.get("cat") != "gpu_memcpy":
            continue
        name = event["name"].split(" (")[0]
        entry = copies.setdefault(name, dict.fromkeys(("count", "gigabytes", "seconds", "covered_seconds"), 0.0))
        start, end = event["ts"], event["ts"] + event["dur"]
        entry["count"] += 1
        entry["gigabytes"] += event.get("args", {}).get("bytes", 0) / 1e9
        entry["seconds"] += (end - start) / 1e6
        entry["covered_seconds"] += sum(max(0, min(end, b) - max(start, a)) for a, b in busy) / 1e6
    return copies


class CompressGradients(TrainerCallback):
    """Sends gradients between ranks in bf16; `wrapped_model` gives the drafter as it is wrapped for training."""

    def __init__(self, wrapped_model: Callable[[], Any]):
        self._wrapped_model = wrapped_model
        self._compressed: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        model = self._wrapped_model()
        if isinstance(model, DistributedDataParallel) and model is not self._compressed:
            # A lambda, since DDP ties the name of torch's own hook to builds with CUDA.
            model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
            self._compressed = model
