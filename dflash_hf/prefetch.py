# SPDX-License-Identifier: Apache-2.0
"""The target ahead of the drafter: a thread, copies between devices, and where the time of a step goes."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch._dynamo import callback, convert_frame
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.utils import logging

from .frozen_target import FrozenTarget
from .packed_targets import THREAD, NotCompiled
from .topology import Placement, device_map_arguments, local_world_size, place
from .training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)


# --- Keeps the threads that run targets ahead out of the way while another thread compiles.


# Where a thread stands that waits for a lock of the compiler.
COMPILER_DOORS = (callback.__file__, convert_frame.__file__)
POLL_SECONDS = 0.05


class CompileGate:
    """While torch compiles in one thread, no other is in its region; one for all of the process.

    torch's tracing changes `nn.Module.__call__` and a flag for all threads. A compilation therefore begins once all
    threads that are ahead have left their regions, and none enters one until it has ended. A thread that is ahead
    holds no lock of the compiler while it is waited for, since it never compiles.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._inside: set[threading.Thread] = set()
        self._closed = False

    def admit(self, thread: threading.Thread) -> None:
        """From now on compilations wait for this thread.

        To be called by the thread that compiles, and again now and then: torch._dynamo.reset() forgets whom to call.
        """
        with self._changed:
            self._threads.add(thread)
            handler = torch._dynamo.callback_handler
            if self._on_start not in handler.start_callbacks:
                handler.register_start_callback(self._on_start)
            if self._on_end not in handler.end_callbacks:
                handler.register_end_callback(self._on_end)

    def dismiss(self, thread: threading.Thread) -> None:
        """Nothing waits for this thread any more, wherever it is; without any, compilations are as they were."""
        with self._changed:
            self._threads.discard(thread)
            self._inside.discard(thread)
            if not self._threads:
                self._uninstall()
            self._changed.notify_all()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """The region: what runs in it runs ahead, at no time together with a compilation.

        It raises NotCompiled when something in it had to be compiled first.
        """
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
            with self._changed:
                self._inside.discard(thread)
                self._changed.notify_all()

    def _uninstall(self) -> None:
        handler = torch._dynamo.callback_handler
        if self._on_start in handler.start_callbacks:
            handler.remove_start_callback(self._on_start)
        if self._on_end in handler.end_callbacks:
            handler.remove_end_callback(self._on_end)
        self._closed = False

    def _on_start(self, args: callback.CallbackArgs) -> None:
        """Called when the first of the compilations that go on together begins."""
        if THREAD.ahead and args.callback_trigger is callback.CallbackTrigger.CUDAGRAPH_RECORDING:
            # Traces nothing, and graphs belong to the thread that records them.
            return
        if THREAD.ahead:
            # A function that the user compiled: left to the training thread, as everything that has to be compiled.
            THREAD.refused = True
            raise NotCompiled("A thread that is ahead does not compile.")
        with self._changed:
            self._closed = True
            while not all(_waits_for_compiler(thread) for thread in self._inside):
                self._changed.wait(POLL_SECONDS)

    def _on_end(self, args: callback.CallbackArgs) -> None:
        """Called when the last of them has ended, or when [`_on_start`] raised: nothing compiles any more."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()


def _waits_for_compiler(thread: threading.Thread) -> bool:
    """Whether a thread is about to compile what the user made, held up by the one that compiles: it will not move."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename in COMPILER_DOORS


GATE = CompileGate()


# --- The target's forward on its own streams, and its hidden states across to the drafter's device.


class Span:
    """A stretch of time, on the host or between two points of a CUDA stream; read without waiting for it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._cuda = device.type == "cuda"
        self._points: list = []

    def mark(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Set the start, then the end, on a stream of the span's device: the current one unless given."""
        if not self._cuda:
            self._points.append(perf_counter())
            return
        point = torch.cuda.Event(enable_timing=True)
        point.record(stream or torch.cuda.current_stream(self._device))
        self._points.append(point)

    @property
    def is_over(self) -> bool:
        """Whether the end has been set and, on a device, reached."""
        return len(self._points) == 2 and (not self._cuda or self._points[1].query())

    @property
    def seconds(self) -> float:
        start, end = self._points
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start


@dataclass
class Features:
    """Hidden states on their way: `[B, T, K * D]`, usable behind `ready`."""

    states: torch.Tensor
    ready: "torch.cuda.Event | None" = None
    target_span: Span | None = None
    copy_spans: list[Span] = field(default_factory=list)


class FeatureTransfer:
    """Runs the target and brings its hidden states to the drafter's device.

    Args:
        target: Gives `context_hidden_states`, as a [`FrozenTarget`] does.
        target_devices: Where its layers are; the hidden states come out on the last one.
        device: The drafter's device.
        copies: `"peer"` copies from GPU to GPU, `"host"` goes through pinned host memory, for machines whose
            peer-to-peer copies are slow or not to be trusted.
    """

    def __init__(self, target: Any, target_devices: Sequence[torch.device], device: torch.device, copies: str):
        self._target = target
        self._device = device
        self._through_host = copies == "host"
        self._cuda_devices = [d for d in target_devices if d.type == "cuda"] if device.type == "cuda" else []
        # Always the same streams, whatever thread calls: memory is kept apart by stream.
        self._own_streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copy_streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def is_apart(self) -> bool:
        """Whether the target is on GPUs that the drafter does not use."""
        return bool(self._cuda_devices) and self._device not in self._cuda_devices

    def run(
        self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]], in_order: bool = False
    ) -> Features:
        """Start the target on packed rows `[B, T]`, best in pinned host memory, and the copy of what it gives.

        With `in_order` it starts behind all that the drafter's device has to do, so that the two halves never run at
        the same time.
        """
        if not self._cuda_devices:
            span = Span(torch.device("cpu"))
            span.mark()
            states = self._target.context_hidden_states(input_ids, document_lengths)
            span.mark()
            return Features(states.to(self._device, non_blocking=True), target_span=span)
        with ExitStack() as stack:
            training = torch.cuda.current_stream(self._device)
            # The first device comes last, so that it is the current one during the forward.
            for device in reversed(self._cuda_devices):
                stream = _stream(self._own_streams, device)
                stack.enter_context(torch.cuda.stream(stream))
                if in_order:
                    stream.wait_stream(training)
            span = Span(self._cuda_devices[-1])
            span.mark()
            states = self._target.context_hidden_states(input_ids, document_lengths)
            produced_on = torch.cuda.current_stream(states.device)
            span.mark()
        if states.device == self._device:
            return Features(states, produced_on.record_event(), span)
        return self._copy(states, produced_on, span)

    def receive(self, features: Features) -> torch.Tensor:
        """The hidden states on the drafter's device, for use by the current stream."""
        if features.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(features.ready)
            # They were allocated for another stream, whose next allocation must not take their memory too early.
            features.states.record_stream(stream)
        return features.states

    def _copy(self, states: torch.Tensor, produced_on: torch.cuda.Stream, span: Span) -> Features:
        """To the drafter's device on streams of their own, so that the target's next forward does not wait."""
        source, destination = states.device, self._device
        leaving, arriving = _stream(self._copy_streams, source), _stream(self._copy_streams, destination)
        leaving.wait_stream(produced_on)
        states.record_stream(leaving)
        spans = [Span(source)]
        # A copy between devices runs on the source's current stream and orders the destination's current one with it.
        with torch.cuda.stream(leaving), torch.cuda.stream(arriving):
            arrived = torch.empty_like(states, device=destination)
            spans[0].mark(leaving)
            if self._through_host:
                staged = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
                staged.copy_(states, non_blocking=True)
                spans[0].mark(leaving)
                arriving.wait_stream(leaving)
                spans.append(Span(destination))
                spans[1].mark(arriving)
                arrived.copy_(staged, non_blocking=True)
                spans[1].mark(arriving)
            else:
                arrived.copy_(states, non_blocking=True)
                spans[0].mark(leaving)
            ready = arriving.record_event()
        return Features(arrived, ready, span, spans)


def _stream(streams: dict[torch.device, torch.cuda.Stream], device: torch.device) -> torch.cuda.Stream:
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


# --- Batches known before they are due, with the training loop seeing nothing of it.


def known_ahead(
    batches: Iterator[dict[str, Any]],
    depth: int,
    gradient_state: GradientState,
    on_fetch: Callable[[dict[str, Any]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """An epoch's batches, of which `depth` more are fetched than have been handed out.

    accelerate's dataloader says with its last batch that it is the last one, and the loop, the loss and the metrics
    read that. So the mark is taken off when the batch is fetched and put back when it is handed out.

    `gradient_state` is accelerate's, which names the dataloader in use. `on_fetch` is called with every batch when it
    is fetched, in order, and gives the batch to hand out.
    """
    waiting: deque[tuple[dict[str, Any], bool]] = deque()
    dataloader: Any = None
    all_fetched = False
    while True:
        while len(waiting) <= depth and not all_fetched:
            batch = next(batches, None)
            if batch is None:
                all_fetched = True
                break
            if dataloader is None:
                # The dataloader has made itself the active one with its first batch.
                dataloader = gradient_state.active_dataloader
            all_fetched = dataloader is not None and dataloader.end_of_dataloader
            if all_fetched:
                dataloader.end_of_dataloader = False
            waiting.append((on_fetch(batch), all_fetched))
        if not waiting:
            # Lets the dataloader take itself off accelerate's list.
            next(batches, None)
            return
        batch, is_last = waiting.popleft()
        if is_last:
            dataloader.end_of_dataloader = True
        yield batch


# Key of a batch under which its hidden states to come travel to the loss.
PENDING = "pending_context"


@dataclass(eq=False)
class PendingContext:
    """The hidden states of one batch, to come; token ids and lengths of its documents are on the host."""

    input_ids: torch.Tensor
    document_lengths: Sequence[Sequence[int]]
    num_tokens: int
    num_anchors: int
    features: Features | None = None
    error: BaseException | None = None
    is_done: bool = False
    is_taken: bool = False
    # Whether the thread that runs ahead left it to the training thread, since something has to be compiled.
    is_left: bool = False
    # Its place among the batches that were ordered.
    number: int = 0
    # Where the drafter's device must be before the target starts, so that it does not run ahead of a slow drafter.
    start_after: "torch.cuda.Event | None" = None


# --- Where the time of a training step goes: the target, the copy, the wait for features and the drafter.


GIGABYTE = 1e9
HALVES = ("target_seconds", "drafter_seconds")


class Throughput:
    """Adds up times, tokens and anchors between two logs.

    Args:
        device: The drafter's device.
        target_devices: The target's devices.
        world_size: Processes that train together. Rates are of all of them, which wait for each other in every step
            and are taken to have rows of the same size.
    """

    def __init__(self, device: torch.device, target_devices: Sequence[torch.device], world_size: int = 1):
        self._device = device
        self._world_size = world_size
        self._target_devices = target_devices
        # (name, whether the other half rested, span): what the device has not reached at one log counts in the next.
        self._spans: list[tuple[str, bool, Span]] = []
        self._alone: dict[str, list[float]] = {name: [] for name in HALVES}
        # Seconds per micro-batch, whose medians leave out compilation, evaluations in between and the like.
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=1000) for name in HALVES}
        self._open: Span | None = None
        self._wait: Span | None = None
        self._step: Span | None = None
        self._is_alone = False
        self._tokens = self._anchors = self._steps = self._in_turn = 0

    def waiting(self, num_tokens: int, num_anchors: int) -> None:
        """A micro-batch of so many tokens and anchors is due and its hidden states are asked for."""
        self._tokens += num_tokens
        self._anchors += num_anchors
        self._wait = self._begin()
        if self._step is None:
            self._step = self._begin()

    def received(self, features: Features, alone: bool) -> None:
        """The hidden states are there (or will be, on the device) and the drafter starts."""
        assert self._wait is not None  # `waiting` comes before
        self._end("wait_seconds", self._wait)
        self._is_alone = alone
        if features.target_span is not None:
            self._spans.append(("target_seconds", alone, features.target_span))
        self._spans += [("copy_seconds", alone, span) for span in features.copy_spans]
        self._open = self._begin()

    def trained(self, step_is_over: bool) -> None:
        """The drafter has been through a micro-batch, the last one of an optimizer step or not."""
        if self._open is not None:
            self._end("drafter_seconds", self._open)
            self._open = None
        if step_is_over and self._step is not None:
            self._end("step_seconds", self._step)
            self._steps += 1
            self._in_turn += self._is_alone
            self._step = self._begin()

    def pause(self) -> None:
        """What follows (an evaluation, a checkpoint) is no part of a step."""
        self._step = None

    def metrics(self) -> dict[str, float]:
        """Means per optimizer step since the last call, rates, and peak memory of both devices.

        `in_turn` is the share of the steps in which the two halves took turns.
        """
        sums = self._read_spans()
        steps = max(self._steps, 1)
        names = ("step_seconds", "wait_seconds", "copy_seconds", *HALVES)
        figures = {name: sums.get(name, 0.0) / steps for name in names}
        figures["in_turn"] = self._in_turn / steps
        if sums.get("step_seconds"):
            figures["tokens_per_second"] = self._tokens * self._world_size / sums["step_seconds"]
            figures["anchors_per_second"] = self._anchors * self._world_size / sums["step_seconds"]
        self._tokens = self._anchors = self._steps = self._in_turn = 0
        # Median seconds per micro-batch of each half while the other one rested, where that was measured.
        figures |= {f"{name}_alone": median(values) for name, values in self._alone.items() if values}
        return figures | self._peak_memory()

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
            return (
                f"Both halves share one device ({medians}), so each slows the other down: a GPU for the target "
                "(target_layout=paired) would hide the shorter one."
            )
        if drafter >= target:
            return (
                f"The drafter limits the step ({medians}): fewer anchors (num_anchors, max_anchors_per_row) make "
                "steps shorter, and the target would be used in full with longer rows."
            )
        return (
            f"The target limits the step ({medians}): more anchors (num_anchors, max_anchors_per_row) cost nothing "
            "until the halves are equal; a faster attention or kernels for the target shorten the step."
        )

    def _begin(self) -> Span:
        span = Span(self._device)
        span.mark()
        return span

    def _end(self, name: str, span: Span) -> None:
        span.mark()
        self._spans.append((name, self._is_alone, span))

    def _read_spans(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        unread = []
        for name, alone, span in self._spans:
            if not span.is_over:
                unread.append((name, alone, span))
                continue
            sums[name] = sums.get(name, 0.0) + span.seconds
            if name in HALVES:
                self._recent[name].append(span.seconds)
            if name in HALVES and alone:
                self._alone[name].append(span.seconds)
        self._spans = unread
        return sums

    def _peak_memory(self) -> dict[str, float]:
        peaks = {}
        if self._device.type == "cuda":
            peaks["drafter_peak_gigabytes"] = torch.cuda.max_memory_allocated(self._device) / GIGABYTE
        others = [d for d in self._target_devices if d.type == "cuda" and d != self._device]
        if others:
            peaks["target_peak_gigabytes"] = max(torch.cuda.max_memory_allocated(d) for d in others) / GIGABYTE
        return peaks


# --- The target works on later batches in a thread of its own while the drafter trains on this one.


# A forward that is under way cannot be broken off; a run does not wait longer for it to end.
CLOSING_SECONDS = 30
# Forwards of the target on a batch that is measured alone. Under a power limit a GPU that has rested while the drafter
# worked is faster for a while than it can be in a run, so only the last one, under its own steady load, is timed.
FORWARDS_ALONE = 3
# So many batches that had to wait for something compiled are no longer those of a start.
MANY_LEFT = 32


class Prefetcher:
    """Runs a frozen target ahead of the drafter, by at most `depth` batches.

    While the drafter trains on one batch, the hidden states of at most `depth` later ones exist or are being
    computed. An error of the target is raised in the training thread when its batch is due, as it is without
    prefetching, with the traceback of where it happened.

    The thread that runs ahead never compiles: a batch that needs it is left to the training thread, which runs it when
    it is due, and the thread goes on behind it. While the training thread compiles, the other one rests ([`GATE`]).

    Args:
        transfer: Runs the target and brings its hidden states to the drafter's device.
        device: The drafter's device.
        depth: Batches in advance; 0 runs target and drafter in turn, without a thread.
        throughput: Told about times and sizes.
        measure_alone_batches: So many first batches of a training run in turn, to measure each half alone. A target
            on GPUs of its own runs each of them `FORWARDS_ALONE` times, the last one timed.
    """

    def __init__(
        self,
        transfer: FeatureTransfer,
        device: torch.device,
        depth: int,
        throughput: Throughput,
        measure_alone_batches: int = 0,
    ):
        self.depth = depth
        self._transfer = transfer
        self._device = device
        self._throughput = throughput
        self._measures_alone = measure_alone_batches > 0
        # The first batch on a GPU compiles and checks the target, which is safest without a second thread.
        self._alone_batches = max(measure_alone_batches, 1 if device.type == "cuda" else 0)
        self._alone_left = self._alone_batches
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # The epoch that is read, and its batches as they are handed out.
        self._epoch: Iterator[dict[str, Any]] | None = None
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._waiting: deque[PendingContext] = deque()
        self._running: PendingContext | None = None
        # Batches ordered, and those of them taken by the drafter or passed over.
        self._ordered = self._taken = 0
        self._failed = False
        # The batch that the worker left to the training thread; it waits until that one has run.
        self._left: PendingContext | None = None
        self._num_left = 0
        # Where the drafter's device took up its last `depth` batches.
        self._taken_events: deque[torch.cuda.Event] = deque(maxlen=max(depth, 1))

    def look_ahead(
        self, epoch_iterator: Iterator[dict[str, Any]], gradient_state: GradientState
    ) -> Iterator[dict[str, Any]]:
        """The batches of an accelerate dataloader's epoch, each handed to the target `depth` before it is due."""
        if self._epoch is not epoch_iterator:
            self._discard()
            self._epoch = epoch_iterator
            self._batches = known_ahead(epoch_iterator, self.depth, gradient_state, self._on_fetch)
        return self._batches

    def context_hidden_states(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Hidden states `[B, T, K * D]` of a batch on the drafter's device: those that were prefetched, or new ones.

        Raises whatever the target raised on this batch.
        """
        pending = inputs.get(PENDING)
        if pending is None or pending.is_taken:
            self.wait_until_idle()
            features = self._transfer.run(inputs["input_ids"], inputs["document_lengths"], in_order=True)
            return self._transfer.receive(features)
        self._throughput.waiting(pending.num_tokens, pending.num_anchors)
        is_ahead = self.depth > 0 and self._alone_left == 0
        features = self._take(pending) if is_ahead else self._run_in_turn(pending)
        pending.is_taken = True
        states = self._transfer.receive(features)
        in_turn = self._measures_alone and self._alone_left > 0
        self._throughput.received(features, alone=self.depth == 0 or in_turn)
        self._count_alone(pending)
        return states

    def wait_until_idle(self) -> None:
        """Return when the target is at rest, so that the caller may run it or change it."""
        with self._changed:
            if not self._is_own():
                self._wait_for(lambda: not self._running and not self._may_start())

    def close(self) -> None:
        """Drop what was prefetched and end the thread; a later epoch starts a new one."""
        with self._changed:
            # A thread that is no longer this one's ends as soon as its forward does.
            thread, self._thread = self._thread, None
            self._waiting.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(CLOSING_SECONDS)
            GATE.dismiss(thread)
            if thread.is_alive():
                logger.warning(
                    f"The target is still busy after {CLOSING_SECONDS} s; its thread ends with the process."
                )
        self._epoch, self._batches, self._running = None, iter(()), None
        self._alone_left = self._alone_batches
        self._forget()

    def _on_fetch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Order a batch's hidden states and send the rest of it to the drafter's device."""
        lengths = batch["document_lengths"]
        num_anchors = int((batch["anchor_positions"].cpu() >= 0).sum())
        # Best of a batch on the host: a device gives its token ids when it has come to them.
        pending = PendingContext(batch["input_ids"].cpu(), lengths, sum(map(sum, lengths)), num_anchors)
        batch = send_to_device(batch, self._device, non_blocking=True)
        if self.depth:
            self._start()
            with self._changed:
                pending.number = self._ordered
                self._ordered += 1
                self._waiting.append(pending)
                self._changed.notify_all()
        return {**batch, PENDING: pending}

    def _take(self, pending: PendingContext) -> Features:
        with self._changed:
            if self._thread is not None:
                GATE.admit(self._thread)
            # A loop that left batches out will not come back to them, so they must not keep this one waiting.
            self._pass_over(pending.number)
            if not pending.is_done:
                # An error that is behind this batch has been raised, and the loop goes on nevertheless.
                self._failed = False
            if self._left is not None and self._left.number < pending.number:
                self._left = None
            self._changed.notify_all()
            self._wait_for(lambda: pending.is_done or pending.is_left)
        if not pending.is_done:
            self._run_left(pending)
        with self._changed:
            self._taken += 1
            if self._device.type == "cuda":
                # Waiting for such an event leaves the processor free.
                event = torch.cuda.Event(blocking=True)
                self._taken_events.append(torch.cuda.current_stream(self._device).record_event(event))
            self._changed.notify_all()
        if pending.error is not None:
            raise pending.error
        assert pending.features is not None  # done without an error
        features, pending.features = pending.features, None
        return features

    def _run_in_turn(self, pending: PendingContext) -> Features:
        """A batch's hidden states, computed by the training thread while the drafter rests."""
        is_measured = self._measures_alone and self._alone_left > 0 and self.depth > 0
        for _ in range(FORWARDS_ALONE - 1 if is_measured and self._transfer.is_apart else 0):
            self._transfer.run(pending.input_ids, pending.document_lengths, in_order=True)
        return self._transfer.run(pending.input_ids, pending.document_lengths, in_order=True)

    def _run_left(self, pending: PendingContext) -> None:
        """Run in the training thread, where compiling is safe, what the worker left to it; then let that one go on."""
        with self._changed:
            self._left = pending
            self._wait_for(lambda: not self._running)
        try:
            pending.features = self._transfer.run(pending.input_ids, pending.document_lengths)
        except BaseException as error:
            pending.error = error
        with self._changed:
            pending.is_done, pending.is_left, self._left = True, False, None
            self._changed.notify_all()
        self._num_left += 1
        if self._num_left == MANY_LEFT:
            logger.warning(
                f"{MANY_LEFT} batches waited for the training thread to run the target, since what was compiled did "
                "not fit them. If this goes on, target and drafter take turns: raise "
                "torch._dynamo.config.recompile_limit, or train with compile_target=False."
            )

    def _wait_for(self, condition) -> None:
        """Wait with the lock held until the worker has brought a condition about; it must be alive to do so."""
        while not condition():
            if self._thread is None or not self._thread.is_alive():
                raise RuntimeError(
                    "The thread that runs the target has ended, so hidden states of later batches will not come. "
                    "Train with prefetch_depth=0 to see the error where it happens."
                )
            self._changed.wait(timeout=1.0)

    def _count_alone(self, pending: PendingContext) -> None:
        if self._alone_left:
            with self._changed:
                self._alone_left -= 1
                # This batch and the ones before it were computed by the training thread.
                self._pass_over(pending.number + 1)
                self._changed.notify_all()

    def _pass_over(self, number: int) -> None:
        """The drafter takes up the batch of this number next."""
        self._taken = number
        while self._waiting and self._waiting[0].number < number:
            self._waiting.popleft()

    def _discard(self) -> None:
        """Forget batches that will not be trained on; the one under way is waited for."""
        with self._changed:
            self._waiting.clear()
            if self._running:
                self._wait_for(lambda: not self._running)
            self._forget()

    def _forget(self) -> None:
        self._waiting.clear()
        self._taken_events.clear()
        self._ordered = self._taken = 0
        self._failed, self._left = False, None

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            if self._thread is not None:
                GATE.dismiss(self._thread)
            # A daemon, so that a target that never returns cannot keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="dflash-target", daemon=True)
            GATE.admit(self._thread)
            self._thread.start()

    def _may_start(self) -> bool:
        may_go_on = self._alone_left == 0 and not self._failed and self._left is None
        return may_go_on and bool(self._waiting) and self._waiting[0].number - self._taken < self.depth

    def _take_up_of(self, number: int) -> "torch.cuda.Event | None":
        """Where the drafter's device took up a batch, one of its last `depth`; None before there was one."""
        oldest = self._taken - len(self._taken_events)
        return self._taken_events[number - oldest] if self._taken_events and number >= oldest else None

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._is_own() and not self._may_start():
                    self._changed.wait()
                if not self._is_own():
                    return
                pending = self._running = self._waiting.popleft()
                pending.start_after = self._take_up_of(pending.number - self.depth)
            try:
                if pending.start_after is not None:
                    pending.start_after.synchronize()
                with GATE.ahead():
                    pending.features = self._transfer.run(pending.input_ids, pending.document_lengths)
            except NotCompiled:
                pending.is_left = True
            except BaseException as error:
                # Whatever it is, the training thread has to see it and end.
                pending.error = error
            with self._changed:
                pending.is_done = not pending.is_left
                if self._is_own():
                    self._failed, self._running = pending.error is not None, None
                    # A loop that has gone past it meanwhile will not run it.
                    self._left = pending if pending.is_left and pending.number >= self._taken else None
                self._changed.notify_all()

    def _is_own(self) -> bool:
        """Whether the calling thread is the one that works for this prefetcher now."""
        return threading.current_thread() is self._thread


# --- From the training arguments to a target beside each drafter: devices, prefetching, gradients between ranks.


def placements(args: DFlashTrainingArguments) -> list[Placement]:
    """Devices of all processes on this machine, with the target on `target_device` where that is given.

    A layout that does not fit the GPUs is a ValueError.
    """
    num_visible = torch.cuda.device_count() if args.device.type == "cuda" else 0
    ranks = local_world_size(args.world_size)
    # With a target device one GPU for each drafter is all that is left to ask of the layout.
    layout = args.target_layout if args.target_device is None else "shared"
    placed = [place(rank, ranks, num_visible, layout) for rank in range(ranks)]
    if args.target_device is None:
        return placed
    given = torch.device(args.target_device)
    return [Placement("shared" if p.drafter == given else "paired", p.drafter, (given,)) for p in placed]


def place_target(args: DFlashTrainingArguments) -> tuple[torch.device | None, dict[str, Any]]:
    """Where the target goes: one device, or the arguments of `from_pretrained` that spread it over several."""
    if args.target_device is not None:
        return torch.device(args.target_device), {}
    if args.device.type not in ("cuda", "cpu"):
        return args.device, {}
    devices = placements(args)[args.local_process_index].target
    return (devices[0], {}) if len(devices) == 1 else (None, device_map_arguments(devices))


def feature_copies(args: DFlashTrainingArguments, source: torch.device) -> str:
    """How hidden states cross from the target's device to the drafter's, `"peer"` or `"host"`."""
    if args.feature_copies != "auto":
        return args.feature_copies
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "host"
    is_crossing = source.type == args.device.type == "cuda" and source != args.device
    return "host" if is_crossing and not torch.cuda.can_device_access_peer(args.device, source) else "peer"


def make_pair(target: FrozenTarget, args: DFlashTrainingArguments) -> tuple[Prefetcher, Throughput]:
    """The prefetcher of a loaded target for this process's drafter, and what times the two."""
    # In the order of the layers: the hidden states come out where the last tap is.
    devices = list(dict.fromkeys(p.device for p in target.model.parameters()))
    last_layer = -1 if target.final_states else target.target_layer_ids[-1]
    last = next(target.layers[last_layer].parameters()).device
    devices = [device for device in devices if device != last] + [last]
    # Final states travel with the context, as one tensor.
    source = SimpleNamespace(context_hidden_states=target.all_hidden_states) if target.final_states else target
    throughput = Throughput(args.device, devices, args.world_size)
    prefetcher = Prefetcher(
        FeatureTransfer(source, devices, args.device, feature_copies(args, last)),
        args.device,
        args.prefetch_depth,
        throughput,
        args.measure_alone_steps * args.gradient_accumulation_steps,
    )
    return prefetcher, throughput


def compress_in_bf16(state, bucket):
    """torch's hook that sends gradients in bf16, under a name that DDP does not tie to builds with CUDA."""
    return bf16_compress_hook(state, bucket)


class PairCallback(TrainerCallback):
    """Times the two halves, and says at the first log and at the end which one limits the step.

    Args:
        throughput: Where to mark and read the times.
        wrapped_model: Gives the drafter as it is wrapped for training.
    """

    def __init__(self, throughput: Throughput, wrapped_model: Callable[[], Any]):
        self.throughput = throughput
        self._wrapped_model = wrapped_model
        self._compressed: Any = None
        self._has_advised = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._has_advised = False
        model = self._wrapped_model()
        if args.ddp_bf16_compression and isinstance(model, DistributedDataParallel) and model is not self._compressed:
            model.register_comm_hook(None, compress_in_bf16)
            self._compressed = model

    def on_substep_end(self, args, state, control, **kwargs):
        self.throughput.trained(step_is_over=False)

    def on_step_end(self, args, state, control, **kwargs):
        self.throughput.trained(step_is_over=True)

    def _pause(self, args, state, control, **kwargs):
        """An evaluation, a checkpoint or the start of an epoch is no part of a step."""
        self.throughput.pause()

    on_evaluate = on_save = on_epoch_begin = _pause

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self._has_advised and "tokens_per_second" in (logs or {}):
            self._has_advised = True
            self._advise(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self.throughput.metrics()
        self._advise(args, state)

    def _advise(self, args, state) -> None:
        advice = self.throughput.advice(args.prefetch_depth)
        if advice is not None and state.is_world_process_zero:
            logger.warning_once(advice)
