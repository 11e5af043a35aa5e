# SPDX-License-Identifier: Apache-2.0
"""The target works on later batches in a thread of its own while the drafter trains on this one."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from transformers.utils import logging

from .compile_gate import GATE
from .compiled import NotCompiled
from .feature_transfer import Features, FeatureTransfer
from .lookahead import LookAhead
from .pending import PENDING, PendingContext
from .throughput import Throughput


logger = logging.get_logger(__name__)

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
        self._look_ahead: LookAhead | None = None
        self._waiting: deque[PendingContext] = deque()
        self._running: PendingContext | None = None
        # Batches ordered, begun by the worker, and taken by the drafter or passed over.
        self._ordered = self._started = self._taken = 0
        self._failed = False
        # The batch that the worker left to the training thread; it waits until that one has run.
        self._left: PendingContext | None = None
        self._num_left = 0
        # Where the drafter's device took up its last `depth` batches.
        self._taken_events: deque[torch.cuda.Event] = deque(maxlen=max(depth, 1))

    def look_ahead(self, epoch_iterator: Iterator[dict[str, Any]], gradient_state: GradientState) -> LookAhead:
        """The epoch's batches, each handed to the target `depth` batches before it is due.

        Args:
            epoch_iterator: Batches of an accelerate dataloader, on the host or on the drafter's device.
            gradient_state: accelerate's state.
        """
        if self._look_ahead is None or self._look_ahead.batches is not epoch_iterator:
            self._discard()
            self._look_ahead = LookAhead(epoch_iterator, self.depth, gradient_state, self._on_fetch)
        return self._look_ahead

    def context_hidden_states(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Hidden states `[B, T, K * D]` of a batch on the drafter's device: those that were prefetched, or new ones.

        Raises:
            BaseException: Whatever the target raised on this batch.
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
                self._wait_for(lambda: not self._running and (not self._waiting or not self._may_start()))

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
        self._look_ahead = self._running = None
        self._alone_left = self._alone_batches
        self._forget()

    def _on_fetch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Order a batch's hidden states and send the rest of it to the drafter's device."""
        pending = PendingContext(batch)
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
            self._taken = pending.number
            if not pending.is_done:
                # An error that is behind this batch has been raised, and the loop goes on nevertheless.
                self._failed = False
            while self._waiting and self._waiting[0].number < pending.number:
                self._waiting.popleft()
                self._started += 1
            if self._left is not None and self._left.number < pending.number:
                self._left = None
            self._changed.notify_all()
            self._wait_for(lambda: pending.is_done or pending.is_left)
        if not pending.is_done:
            self._run_left(pending)
        with self._changed:
            self._taken += 1
            if self._device.type == "cuda":
                self._taken_events.append(_recorded_event(self._device))
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
                while self._waiting and self._waiting[0].number <= pending.number:
                    self._waiting.popleft()
                    self._started = self._taken = pending.number + 1
                self._changed.notify_all()

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
        self._ordered = self._started = self._taken = 0
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
        return may_go_on and self._started - self._taken < self.depth

    def _take_up_of(self, number: int) -> "torch.cuda.Event | None":
        """Where the drafter's device took up a batch, one of its last `depth`; None before there was one."""
        oldest = self._taken - len(self._taken_events)
        return self._taken_events[number - oldest] if self._taken_events and number >= oldest else None

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._is_own() and not (self._waiting and self._may_start()):
                    self._changed.wait()
                if not self._is_own():
                    return
                pending = self._running = self._waiting.popleft()
                pending.start_after = self._take_up_of(self._started - self.depth)
                self._started += 1
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


def _recorded_event(device: torch.device) -> torch.cuda.Event:
    """An event at the end of what a device's current stream has to do; waiting for it leaves the processor free."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


__all__ = ["PENDING", "PendingContext", "Prefetcher"]
