# SPDX-License-Identifier: Apache-2.0
"""The target ahead of the drafter: a thread, copies between devices, and where the time of a step goes."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch._dynamo import callback, convert_frame
from transformers import TrainerCallback
from transformers.utils import logging

from .frozen_target import FrozenTarget
from .packed_targets import THREAD, NotCompiled
from .topology import Placement, device_map_arguments, local_world_size, place
from .training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)
Batch = dict[str, Any]
Lengths = Sequence[Sequence[int]]

# Where a thread stands that waits for a lock of the compiler.
COMPILER_DOORS = (callback.__file__, convert_frame.__file__)


class CompileGate:
    """A compilation begins once all threads that are ahead have left their regions, and none enters one meanwhile.

    torch's tracing changes `nn.Module.__call__` and a flag for all threads, so there is one gate for the process.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._inside: set[threading.Thread] = set()
        self._closed = False

    def install(self) -> None:
        """Make compilations wait; to be called again now and then, as torch._dynamo.reset() forgets whom to call."""
        with self._changed:
            handler = torch._dynamo.callback_handler
            if self._on_start not in handler.start_callbacks:
                handler.register_start_callback(self._on_start)
            if self._on_end not in handler.end_callbacks:
                handler.register_end_callback(self._on_end)

    def dismiss(self, thread: threading.Thread) -> None:
        """No compilation waits for this thread any more, wherever it is."""
        with self._changed:
            self._inside.discard(thread)
            self._changed.notify_all()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """The region; it raises NotCompiled when something in it had to be compiled first."""
        thread = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside.add(thread)
        THREAD.ahead, THREAD.refused = True, False
        try:
            yield
        except Exception as error:
            if THREAD.refused and not isinstance(error, NotCompiled):
                # The compiler makes an error of its own of what it is refused with.
                raise NotCompiled("The target compiles functions of its own.") from error
            raise
        finally:
            THREAD.ahead = False
            self.dismiss(thread)

    def _on_start(self, args: callback.CallbackArgs) -> None:
        """Called when the first of the compilations that go on together begins."""
        if THREAD.ahead:
            if args.callback_trigger is callback.CallbackTrigger.CUDAGRAPH_RECORDING:
                return  # graphs, which nothing is traced for, belong to the thread that records them
            # A function that the user compiled: left to the training thread, as everything that has to be compiled.
            THREAD.refused = True
            raise NotCompiled("A thread that is ahead does not compile.")
        with self._changed:
            self._closed = True
            while not all(_waits_for_compiler(thread) for thread in self._inside):
                self._changed.wait(0.05)

    def _on_end(self, args: callback.CallbackArgs) -> None:
        """Called when the last of them has ended, or when [`_on_start`] raised."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()


def _waits_for_compiler(thread: threading.Thread) -> bool:
    """Whether a thread is about to compile what the user made, held up by the one that compiles: it will not move."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename in COMPILER_DOORS


GATE = CompileGate()


class Span:
    """A stretch of time that begins now, on the host or in a CUDA stream; read without waiting for it."""

    def __init__(self, device: torch.device, stream: "torch.cuda.Stream | None" = None):
        self._stream = (stream or torch.cuda.current_stream(device)) if device.type == "cuda" else None
        self._start: Any = self._now()
        self._end: Any = None

    def end(self) -> "Span":
        self._end = self._now()
        return self

    def seconds(self) -> float | None:
        """None until the end has been set and, in a stream, reached."""
        if self._end is None or (self._stream is not None and not self._end.query()):
            return None
        return self._end - self._start if self._stream is None else self._start.elapsed_time(self._end) / 1e3

    def _now(self) -> Any:
        if self._stream is None:
            return perf_counter()
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))


class Features(NamedTuple):
    """Hidden states on their way: `[B, T, K * D]`, usable behind `ready`; and by name the spans that they took."""

    states: torch.Tensor
    spans: list[tuple[str, Span]]
    ready: "torch.cuda.Event | None" = None


class FeatureTransfer:
    """Runs a target's `context_hidden_states` and brings what it gives from the last of its devices to the drafter's.

    With `copies` `"peer"` from GPU to GPU, with `"host"` through pinned host memory, for machines whose peer-to-peer
    copies are slow or not to be trusted.
    """

    def __init__(self, target: Any, target_devices: Sequence[torch.device], device: torch.device, copies: str):
        self._target, self._device, self._through_host = target, device, copies == "host"
        on_cuda = [d for d in target_devices if d.type == "cuda"] if device.type == "cuda" else []
        # Whether the target is on GPUs that the drafter does not use.
        self.is_apart = bool(on_cuda) and device not in on_cuda
        # Always the same streams, whatever thread calls: memory is kept apart by stream.
        self._own_streams = {d: torch.cuda.Stream(d) for d in on_cuda}
        self._copy_streams = {d: torch.cuda.Stream(d) for d in [*on_cuda, device] if on_cuda}

    def run(self, input_ids: torch.Tensor, document_lengths: Lengths, in_order: bool = False) -> Features:
        """Start the target on rows `[B, T]`, best in pinned memory, `in_order` behind the drafter's work so far."""
        if not self._own_streams:
            span = Span(torch.device("cpu"))
            states = self._target.context_hidden_states(input_ids, document_lengths)
            return Features(states.to(self._device, non_blocking=True), [("target_seconds", span.end())])
        with ExitStack() as stack:
            training = torch.cuda.current_stream(self._device)
            # The first device comes last, so that it is the current one during the forward.
            for stream in reversed(self._own_streams.values()):
                stack.enter_context(torch.cuda.stream(stream))
                if in_order:
                    stream.wait_stream(training)
            span = Span([*self._own_streams][-1])
            states = self._target.context_hidden_states(input_ids, document_lengths)
            produced_on = torch.cuda.current_stream(states.device)
            spans = [("target_seconds", span.end())]
        if states.device == self._device:
            return Features(states, spans, produced_on.record_event())
        return self._copy(states, produced_on, spans)

    def receive(self, features: Features) -> torch.Tensor:
        """The hidden states on the drafter's device, for use by the current stream."""
        if features.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(features.ready)
            # They were allocated for another stream, whose next allocation must not take their memory too early.
            features.states.record_stream(stream)
        return features.states

    def _copy(self, states: torch.Tensor, produced_on: torch.cuda.Stream, spans: list) -> Features:
        """On streams of their own, so that the target's next forward does not wait."""
        leaving, arriving = self._copy_streams[states.device], self._copy_streams[self._device]
        leaving.wait_stream(produced_on)
        states.record_stream(leaving)
        # A copy between devices runs on the source's current stream and orders the destination's current one with it.
        with torch.cuda.stream(leaving), torch.cuda.stream(arriving):
            arrived = torch.empty_like(states, device=self._device)
            span = Span(states.device, leaving)
            if self._through_host:
                staged = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
                states = staged.copy_(states, non_blocking=True)
                spans.append(("copy_seconds", span.end()))
                arriving.wait_stream(leaving)
                span = Span(self._device, arriving)
            arrived.copy_(states, non_blocking=True)
            spans.append(("copy_seconds", span.end()))
            return Features(arrived, spans, arriving.record_event())


def known_ahead(
    batches: Iterator[Batch], depth: int, gradient_state: GradientState, on_fetch: Callable[[Batch], Batch]
) -> Iterator[Batch]:
    """An epoch's batches, `depth` more of them fetched, and given to `on_fetch`, than have been handed out.

    accelerate's dataloader marks its last batch in `gradient_state`, where the loop, the loss and the metrics look. So
    the mark is taken off when the batch is fetched, and put back when it is handed out.
    """
    waiting: deque[Batch] = deque()
    dataloader: Any = None
    for batch in batches:
        if dataloader is None:
            # The dataloader has made itself the active one with its first batch.
            dataloader = gradient_state.active_dataloader
        all_fetched = dataloader is not None and dataloader.end_of_dataloader
        if all_fetched:
            dataloader.end_of_dataloader = False
        waiting.append(on_fetch(batch))
        # Only when all are handed out is the dataloader asked again: it then takes itself off accelerate's list.
        while len(waiting) > (0 if all_fetched else depth):
            batch = waiting.popleft()
            if all_fetched and not waiting:
                dataloader.end_of_dataloader = True
            yield batch
    yield from waiting


# Key of a batch under which its hidden states to come travel to the loss.
PENDING = "pending_context"


@dataclass(eq=False)
class PendingContext:
    """The hidden states of one batch, to come; token ids and lengths of its documents are on the host."""

    input_ids: torch.Tensor
    document_lengths: Lengths
    num_anchors: int
    number: int = 0  # its place among the batches that were ordered
    features: Features | None = None
    error: BaseException | None = None
    is_done: bool = False
    is_taken: bool = False


HALVES = ("target_seconds", "drafter_seconds")


class Throughput(TrainerCallback):
    """Adds up times, tokens and anchors between two logs, and says at the first one and at the end what limits a step.

    `device` is the drafter's. Rates are of all `world_size` processes that train together, which wait for each other
    in every step and are taken to have rows of the same size.
    """

    def __init__(self, device: torch.device, target_devices: Sequence[torch.device], world_size: int = 1):
        self._device, self._target_devices, self._world_size = device, target_devices, world_size
        # (name, whether the other half rested, span): what the device has not reached at one log counts in the next.
        self._spans: list[tuple[str, bool, Span]] = []
        self._alone: dict[str, list[float]] = {name: [] for name in HALVES}
        # Seconds per micro-batch, whose medians leave out compilation, evaluations in between and the like.
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=1000) for name in HALVES}
        # What has begun: a step, and in it a wait for hidden states or the drafter's work on them.
        self._step: Span | None = None
        self._part: Span | None = None
        self._is_alone = self._has_advised = False
        self._tokens = self._anchors = self._steps = self._in_turn = 0

    def waiting(self, num_tokens: int, num_anchors: int) -> None:
        """A micro-batch of so many tokens and anchors is due and its hidden states are asked for."""
        self._tokens += num_tokens
        self._anchors += num_anchors
        self._part = Span(self._device)
        self._step = self._step or Span(self._device)

    def received(self, features: Features, alone: bool) -> None:
        """The hidden states are there (or will be, on the device) and the drafter starts."""
        assert self._part is not None  # `waiting` comes before
        self._is_alone = alone
        spans = [("wait_seconds", self._part.end()), *features.spans]
        self._spans += [(name, alone, span) for name, span in spans]
        self._part = Span(self._device)

    def on_substep_end(self, args, state, control, **kwargs):
        if self._part is not None:
            self._spans.append(("drafter_seconds", self._is_alone, self._part.end()))
            self._part = None

    def on_step_end(self, args, state, control, **kwargs):
        self.on_substep_end(args, state, control)
        if self._step is not None:
            self._spans.append(("step_seconds", self._is_alone, self._step.end()))
            self._steps += 1
            self._in_turn += self._is_alone
            self._step = Span(self._device)

    def pause(self, *args, **kwargs) -> None:
        """Between two steps: what comes now, an evaluation or a checkpoint, is not part of one."""
        self._step = None

    on_epoch_begin = on_evaluate = on_save = pause

    def metrics(self) -> dict[str, float]:
        """Means per optimizer step since the last call, rates, peak memory, and the share of steps taken in turn."""
        sums = dict.fromkeys(("step_seconds", "wait_seconds", "copy_seconds", *HALVES), 0.0)
        spans, self._spans = self._spans, []
        for name, alone, span in spans:
            seconds = span.seconds()
            if seconds is None:
                self._spans.append((name, alone, span))
                continue
            sums[name] += seconds
            if name in HALVES:
                self._recent[name].append(seconds)
                self._alone[name] += [seconds] * alone
        figures = {name: seconds / max(self._steps, 1) for name, seconds in sums.items()}
        figures["in_turn"] = self._in_turn / max(self._steps, 1)
        if sums["step_seconds"]:
            figures["tokens_per_second"] = self._tokens * self._world_size / sums["step_seconds"]
            figures["anchors_per_second"] = self._anchors * self._world_size / sums["step_seconds"]
        self._tokens = self._anchors = self._steps = self._in_turn = 0
        # Per micro-batch, while the other half rested.
        figures |= {f"{name}_alone": median(values) for name, values in self._alone.items() if values}
        if self._device.type == "cuda":
            figures["drafter_peak_gigabytes"] = torch.cuda.max_memory_allocated(self._device) / 1e9
        if others := [d for d in self._target_devices if d.type == "cuda" and d != self._device]:
            figures["target_peak_gigabytes"] = max(map(torch.cuda.max_memory_allocated, others)) / 1e9
        return figures

    def advice(self, depth: int) -> str | None:
        """One sentence: which half limits the step and what would change it; None where no step was timed."""
        if not all(self._recent.values()):
            return None
        target, drafter = (median(self._recent[name]) for name in HALVES)
        medians = f"{target:.3g} s of target, {drafter:.3g} s of drafter a micro-batch"
        shared = self._device in self._target_devices
        if shared and self._device.type == "cpu":
            return f"Both halves share the CPU ({medians})."
        if depth == 0:
            return f"The halves take turns ({medians}): set prefetch_depth to 2, so that they run at the same time."
        if shared:
            return f"Both halves share one GPU ({medians}): another one (target_layout=paired) hides the shorter half."
        if drafter >= target:
            return f"The drafter limits the step ({medians}): give fewer anchors (num_anchors) or longer rows."
        return f"The target limits the step ({medians}): more anchors (num_anchors) cost nothing until both are equal."

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self._has_advised and "tokens_per_second" in (logs or {}):
            self._has_advised = True
            self._advise(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self.metrics()
        self._advise(args, state)

    def _advise(self, args, state) -> None:
        if state.is_world_process_zero and (advice := self.advice(args.prefetch_depth)):
            logger.warning_once(advice)


# A forward that is under way cannot be broken off; a run does not wait longer for it to end.
CLOSING_SECONDS = 30
# Forwards of a target on GPUs of its own on a batch that is measured alone. Under a power limit a GPU that has rested
# is faster for a while than it can be in a run, so only the last one is timed.
FORWARDS_ALONE = 3


class Prefetcher:
    """Runs a frozen target ahead of the drafter, by at most `depth` batches.

    While the drafter trains on one batch, the hidden states of at most `depth` later ones exist or are being
    computed. An error of the target is raised in the training thread when its batch is due, with its own traceback.
    The thread that runs ahead never compiles: a batch that needs it is left to the training thread, which runs it when
    it is due. While the training thread compiles, the other one rests ([`GATE`]).

    With `depth` 0 target and drafter take turns, without a thread; so they do in the first `num_alone` batches of
    a training, to measure each half alone.
    """

    def __init__(
        self, transfer: FeatureTransfer, device: torch.device, depth: int, throughput: Throughput, num_alone: int = 0
    ):
        self._transfer, self._device, self.depth, self._throughput = transfer, device, depth, throughput
        self._measures_alone = num_alone > 0
        # The first batch on a GPU compiles and checks the target, which is safest without a second thread.
        self._alone_batches = self._alone_left = max(num_alone, 1 if device.type == "cuda" else 0)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._epoch: Iterator[Batch] | None = None
        self._batches: Iterator[Batch] = iter(())
        self._waiting: deque[PendingContext] = deque()
        self._running: PendingContext | None = None
        # Batches of the epoch that were ordered, and that were taken by the drafter or passed over.
        self._ordered = self._taken = 0
        self._failed = False
        # The batch that the worker left to the training thread, for which it waits; how many there were.
        self._left: PendingContext | None = None
        self._num_left = 0
        # Where the drafter's device took up its last `depth` batches.
        self._taken_events: deque[torch.cuda.Event] = deque(maxlen=max(depth, 1))

    def look_ahead(self, epoch_iterator: Iterator[Batch], gradient_state: GradientState) -> Iterator[Batch]:
        """The batches of an accelerate dataloader's epoch, each handed to the target `depth` before it is due."""
        if self._epoch is not epoch_iterator:
            with self._changed:
                # Batches that will not be trained on are forgotten; the one under way is waited for.
                self._waiting.clear()
                self._changed.wait_for(lambda: not self._running)
                self._taken_events.clear()
                self._ordered = self._taken = 0
                self._failed, self._left = False, None
            self._epoch = epoch_iterator
            self._batches = known_ahead(epoch_iterator, self.depth, gradient_state, self._on_fetch)
        return self._batches

    def context_hidden_states(self, inputs: Batch) -> torch.Tensor:
        """Hidden states `[B, T, K * D]` of a batch on the drafter's device: prefetched, or new ones."""
        pending = inputs.get(PENDING)
        if pending is None or pending.is_taken:
            self.wait_until_idle()
            features = self._transfer.run(inputs["input_ids"], inputs["document_lengths"], in_order=True)
            return self._transfer.receive(features)
        self._throughput.waiting(sum(map(sum, pending.document_lengths)), pending.num_anchors)
        is_measured = self._measures_alone and self._alone_left > 0
        if self.depth and not self._alone_left:
            features = self._take(pending)
        else:
            for _ in range(FORWARDS_ALONE - 1 if is_measured and self.depth and self._transfer.is_apart else 0):
                self._transfer.run(pending.input_ids, pending.document_lengths, in_order=True)
            features = self._transfer.run(pending.input_ids, pending.document_lengths, in_order=True)
        pending.is_taken = True
        states = self._transfer.receive(features)
        self._throughput.received(features, alone=self.depth == 0 or is_measured)
        if self._alone_left:
            with self._changed:
                self._alone_left -= 1
                # This batch and the ones before it were computed by the training thread.
                self._pass_over(pending.number + 1)
        return states

    def wait_until_idle(self) -> None:
        """Return when the target is at rest, so that the caller may run it or change it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running and not self._may_start())

    def close(self) -> None:
        """Drop what was prefetched and end the thread; a later epoch starts a new one."""
        with self._changed:
            # A thread that is no longer this one's ends with its forward.
            thread, self._thread = self._thread, None
            self._waiting.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(CLOSING_SECONDS)
            GATE.dismiss(thread)
            if thread.is_alive():
                logger.warning(f"The target is busy after {CLOSING_SECONDS} s; its thread ends with the process.")
        self._epoch, self._batches, self._running = None, iter(()), None
        self._alone_left = self._alone_batches

    def _on_fetch(self, batch: Batch) -> Batch:
        """Order a batch's hidden states and send the rest of it to the drafter's device."""
        num_anchors = int((batch["anchor_positions"].cpu() >= 0).sum())
        # Best of a batch on the host: a device gives its token ids when it has come to them.
        pending = PendingContext(batch["input_ids"].cpu(), batch["document_lengths"], num_anchors, self._ordered)
        batch = send_to_device(batch, self._device, non_blocking=True)
        if self.depth:
            if self._thread is None or not self._thread.is_alive():
                # A daemon: a target that never returns cannot keep the process from ending.
                self._thread = threading.Thread(target=self._work, name="dflash-target", daemon=True)
                GATE.install()
                self._thread.start()
            with self._changed:
                self._ordered += 1
                self._waiting.append(pending)
                self._changed.notify_all()
        return {**batch, PENDING: pending}

    def _take(self, pending: PendingContext) -> Features:
        """What the worker computed ahead, or computed here where that needs the compiler."""
        with self._changed:
            GATE.install()
            # An error behind an earlier batch has been raised, and the loop goes on nevertheless.
            self._failed = self._failed and pending.is_done
            # A loop that left batches out will not come back to them.
            if self._left is not None and self._left.number < pending.number:
                self._left = None
            self._pass_over(pending.number)
            self._changed.wait_for(lambda: pending.is_done or self._left is pending)
        if not pending.is_done:
            try:
                pending.features, pending.error = self._transfer.run(pending.input_ids, pending.document_lengths), None
            except BaseException as error:
                pending.error = error
            self._num_left += 1
            if self._num_left == 32:  # no longer those of a start
                logger.warning(
                    "32 batches waited until the target was compiled for them. If this goes on, raise "
                    "torch._dynamo.config.recompile_limit, or train with compile_target=False."
                )
        with self._changed:
            if not pending.is_done:
                pending.is_done, self._left = True, None
            if self._device.type == "cuda":
                # Waiting for such an event leaves the processor free.
                event = torch.cuda.Event(blocking=True)
                self._taken_events.append(torch.cuda.current_stream(self._device).record_event(event))
            self._pass_over(pending.number + 1)
        if pending.error is not None:
            raise pending.error
        assert pending.features is not None  # done without an error
        features, pending.features = pending.features, None
        return features

    def _pass_over(self, number: int) -> None:
        """The drafter takes up the batch of this number next."""
        self._taken = number
        while self._waiting and self._waiting[0].number < number:
            self._waiting.popleft()
        self._changed.notify_all()

    def _may_start(self) -> bool:
        may_go_on = self._alone_left == 0 and not self._failed and self._left is None
        return may_go_on and bool(self._waiting) and self._waiting[0].number - self._taken < self.depth

    def _work(self) -> None:
        """The thread, until it is this prefetcher's no longer."""
        own = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._thread is not own or self._may_start())
                if self._thread is not own:
                    return
                pending = self._running = self._waiting.popleft()
                # Where the drafter's device must be first, so that the target does not run ahead of a slow drafter.
                place = pending.number - self.depth - (self._taken - len(self._taken_events))
                start_after = self._taken_events[place] if place >= 0 else None
            try:
                if start_after is not None:
                    start_after.synchronize()
                with GATE.ahead():
                    pending.features = self._transfer.run(pending.input_ids, pending.document_lengths)
            except BaseException as error:  # whatever it is, the training thread has to see it
                pending.error = error
            with self._changed:
                pending.is_done = not isinstance(pending.error, NotCompiled)
                if self._thread is own:
                    self._running = None
                    self._failed = pending.is_done and pending.error is not None
                    # A loop that has gone past it meanwhile will not run it.
                    self._left = None if pending.is_done or pending.number < self._taken else pending
                self._changed.notify_all()


def placements(args: DFlashTrainingArguments) -> list[Placement]:
    """Devices of all processes on this machine; a layout that does not fit its GPUs is a ValueError."""
    num_visible = torch.cuda.device_count() if args.device.type == "cuda" else 0
    ranks = local_world_size(args.world_size)
    if args.target_device is None:
        return [place(rank, ranks, num_visible, args.target_layout) for rank in range(ranks)]
    # One GPU for each drafter is all that is left to ask of the layout.
    drafters = [place(rank, ranks, num_visible, "shared").drafter for rank in range(ranks)]
    given = torch.device(args.target_device)
    return [Placement("shared" if d == given else "paired", d, (given,)) for d in drafters]


def place_target(args: DFlashTrainingArguments) -> tuple[torch.device | None, dict[str, Any]]:
    """Where the target goes: one device, or the arguments of `from_pretrained` that spread it over several."""
    if args.device.type not in ("cuda", "cpu"):
        return torch.device(args.target_device or args.device), {}
    devices = placements(args)[args.local_process_index].target
    return (devices[0], {}) if len(devices) == 1 else (None, device_map_arguments(devices))


def feature_copies(args: DFlashTrainingArguments, source: torch.device) -> str:
    """How hidden states cross from the target's device to the drafter's, `"peer"` or `"host"`."""
    if args.feature_copies != "auto":
        return args.feature_copies
    is_crossing = source.type == args.device.type == "cuda" and source != args.device
    is_barred = is_crossing and not torch.cuda.can_device_access_peer(args.device, source)
    return "host" if is_barred or os.environ.get("NCCL_P2P_DISABLE") == "1" else "peer"


def make_pair(target: FrozenTarget, args: DFlashTrainingArguments) -> tuple[Prefetcher, Throughput]:
    """The prefetcher of a loaded target for this process's drafter, and what times the two."""
    # In the order of the layers: the hidden states come out where the last tap is.
    last = next(target.layers[-1 if target.final_states else target.target_layer_ids[-1]].parameters()).device
    devices = [*({p.device: None for p in target.model.parameters() if p.device != last}), last]
    source = SimpleNamespace(context_hidden_states=target.all_hidden_states) if target.final_states else target
    throughput = Throughput(args.device, devices, args.world_size)
    transfer = FeatureTransfer(source, devices, args.device, feature_copies(args, last))
    num_alone = args.measure_alone_steps * args.gradient_accumulation_steps
    return Prefetcher(transfer, args.device, args.prefetch_depth, throughput, num_alone), throughput
