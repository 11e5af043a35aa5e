# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes: the target, the copy, the wait for features and the drafter.

Nothing here waits for a device: events are recorded in the step and read when the Trainer logs.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
from transformers import TrainerCallback

from .feature_transfer import Features, Span


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
        # (name, span): those that the device has not reached at one log count in the next.
        self._spans: deque[tuple[str, Span]] = deque()
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
            self._spans.append(("alone_target_seconds" if alone else "target_seconds", features.target_span))
        for span in features.copy_spans:
            self._spans.append(("copy_seconds", span))
        self._open = self._begin()

    def trained(self, step_is_over: bool) -> None:
        """The drafter has been through a micro-batch, the last one of an optimizer step or not."""
        if self._open is not None:
            self._end("alone_drafter_seconds" if self._is_alone else "drafter_seconds", self._open)
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
        figures = {name: sums.get(name, 0.0) / steps for name in ("step_seconds", "wait_seconds", "copy_seconds")}
        figures["in_turn"] = self._in_turn / steps
        for name in HALVES:
            figures[name] = (sums.get(name, 0.0) + sums.get(f"alone_{name}", 0.0)) / steps
        if sums.get("step_seconds"):
            figures["tokens_per_second"] = self._tokens * self._world_size / sums["step_seconds"]
            figures["anchors_per_second"] = self._anchors * self._world_size / sums["step_seconds"]
        self._tokens = self._anchors = self._steps = self._in_turn = 0
        return figures | self.alone() | self._peak_memory()

    def alone(self) -> dict[str, float]:
        """Median seconds per micro-batch of each half while the other one rested, where that was measured."""
        return {f"{name}_alone": median(values) for name, values in self._alone.items() if values}

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
        self._spans.append((name, span))

    def _read_spans(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        unread: deque[tuple[str, Span]] = deque()
        while self._spans:
            name, span = self._spans.popleft()
            if not span.is_over:
                unread.append((name, span))
                continue
            sums[name] = sums.get(name, 0.0) + span.seconds
            half = name.removeprefix("alone_")
            if half in HALVES:
                self._recent[half].append(span.seconds)
            if half != name:
                self._alone[half].append(span.seconds)
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


class ThroughputCallback(TrainerCallback):
    """Marks the ends of micro-batches, and what is no part of a step.

    Args:
        throughput: Where to mark them.
    """

    def __init__(self, throughput: Throughput):
        self.throughput = throughput

    def on_substep_end(self, args, state, control, **kwargs):
        self.throughput.trained(step_is_over=False)

    def on_step_end(self, args, state, control, **kwargs):
        self.throughput.trained(step_is_over=True)

    def on_evaluate(self, args, state, control, **kwargs):
        self.throughput.pause()

    def on_save(self, args, state, control, **kwargs):
        self.throughput.pause()

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.throughput.pause()


__all__ = ["Throughput", "ThroughputCallback"]
