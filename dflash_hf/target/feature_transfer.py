# SPDX-License-Identifier: Apache-2.0
"""The target's forward on its own streams, and its hidden states across to the drafter's device.

On CUDA nothing here waits on the host: events order the target's streams, the copy and the drafter's stream. The
states cross in the target's own type (51 KB a token for five taps of Qwen3.6-27B in bf16).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch


FEATURE_COPIES = ("auto", "peer", "host")


class ContextSource(Protocol):
    """What gives hidden states: a [`FrozenTarget`]."""

    @property
    def device(self) -> torch.device: ...

    def context_hidden_states(
        self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor: ...


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
        target: The target.
        target_devices: Where its layers are; the hidden states come out on the last one.
        device: The drafter's device.
        copies: `"peer"` copies from GPU to GPU, `"host"` goes through pinned host memory, for machines whose
            peer-to-peer copies are slow or not to be trusted.
    """

    def __init__(
        self, target: ContextSource, target_devices: Sequence[torch.device], device: torch.device, copies: str
    ):
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
        self,
        input_ids: torch.Tensor,
        document_lengths: Sequence[Sequence[int]],
        in_order: bool = False,
    ) -> Features:
        """Start the target on packed rows and the copy of what it gives.

        Args:
            input_ids (`torch.Tensor` of shape `[B, T]`): On the target's device or, best, in pinned host memory.
            document_lengths: Lengths in tokens of the documents of each row.
            in_order: Start behind all that the drafter's device has to do, so that the two halves never run at the
                same time.
        """
        if not self._cuda_devices:
            return self._run_on_host(input_ids, document_lengths)
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
            ready = torch.cuda.Event()
            ready.record(produced_on)
            return Features(states, ready, span)
        return self._copy(states, produced_on, span)

    def receive(self, features: Features) -> torch.Tensor:
        """The hidden states on the drafter's device, for use by the current stream."""
        if features.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(features.ready)
            # They were allocated for another stream, whose next allocation must not take their memory too early.
            features.states.record_stream(stream)
        return features.states

    def _run_on_host(self, input_ids: torch.Tensor, document_lengths: Sequence[Sequence[int]]) -> Features:
        span = Span(torch.device("cpu"))
        span.mark()
        states = self._target.context_hidden_states(input_ids, document_lengths)
        span.mark()
        return Features(states.to(self._device, non_blocking=True), target_span=span)

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
            ready = torch.cuda.Event()
            ready.record(arriving)
        return Features(arrived, ready, span, spans)


def _stream(streams: dict[torch.device, torch.cuda.Stream], device: torch.device) -> torch.cuda.Stream:
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


__all__ = ["FEATURE_COPIES", "FeatureTransfer", "Features", "Span"]
