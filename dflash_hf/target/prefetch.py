# SPDX-License-Identifier: Apache-2.0
"""The target works on later batches in a thread of its own while the drafter trains on this one."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from transformers.utils import logging

from .feature_transfer import Features, FeatureTransfer
from .lookahead import LookAhead
from .throughput import Throughput


logger = logging.get_logger(__name__)

# Key of a batch under which its hidden states to come travel to the loss.
PENDING = "pending_context"
# A forward that is under way cannot be broken off; a run does not wait longer for it to end.
CLOSING_SECONDS = 30


class PendingContext:
    """The hidden states of one batch, to come.

    Args:
        batch: A batch of [`DataCollatorForDFlash`], best on the host: on the drafter's device its token ids are only
            known once the device has come to them.
    """

    def __init__(self, batch: dict[str, Any]):
        self.input_ids: torch.Tensor = batch["input_ids"].cpu()
        self.document_lengths: Sequence[Sequence[int]] = batch["document_lengths"]
        self.num_tokens = sum(sum(lengths) for lengths in self.document_lengths)
        self.num_anchors = int((batch["anchor_positions"].cpu() >= 0).sum())
        self.features: Features | None = None
        self.error: BaseException | None = None
        self.is_done = self.is_taken = False
        # Its place among the batches that were ordered.
        self.number = 0
        # Where the drafter's device must be before the target starts, so that it does not run ahead of a slow drafter.
        self.start_after: torch.cuda.Event | None = None


class Prefetcher:
    """Runs a frozen target ahead of the drafter, by at most `depth` batches.

    While the drafter trains on one batch, the hidden states of at most `depth` later ones exist or are being
    computed. An error of the target is raised in the training thread when its batch is due, as it is without
    prefetching, with the traceback of where it happened.

    Args:
        transfer: Runs the target and brings its hidden states to the drafter's device.
        device: The drafter's device.
        depth: Batches in advance; 0 runs target and drafter in turn, without a thread.
        throughput: Told about times and sizes.
        measure_alone_batches: So many first batches of a training run in turn, to measure each half alone.
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
        if self.depth and self._alone_left == 0:
            features = self._take(pending)
        else:
            features = self._transfer.run(pending.input_ids, pending.document_lengths, in_order=True)
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
            # A loop that left batches out will not come back to them, so they must not keep this one waiting.
            self._taken = pending.number
            if not pending.is_done:
                # An error that is behind this batch has been raised, and the loop goes on nevertheless.
                self._failed = False
            while self._waiting and self._waiting[0].number < pending.number:
                self._waiting.popleft()
                self._started += 1
            self._changed.notify_all()
            self._wait_for(lambda: pending.is_done)
            self._taken += 1
            if self._device.type == "cuda":
                self._taken_events.append(_recorded_event(self._device))
            self._changed.notify_all()
        if pending.error is not None:
            raise pending.error
        assert pending.features is not None  # done without an error
        features, pending.features = pending.features, None
        return features

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
        self._failed = False

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A daemon, so that a target that never returns cannot keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="dflash-target", daemon=True)
            self._thread.start()

    def _may_start(self) -> bool:
        return self._started - self._taken < self.depth and self._alone_left == 0 and not self._failed

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
                pending.features = self._transfer.run(pending.input_ids, pending.document_lengths)
            except BaseException as error:
                # Whatever it is, the training thread has to see it and end.
                pending.error = error
            with self._changed:
                pending.is_done = True
                if self._is_own():
                    self._failed, self._running = pending.error is not None, None
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
