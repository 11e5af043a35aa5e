# SPDX-License-Identifier: Apache-2.0
"""A profile of some training steps: the trace, and how much of the copying between devices other work covers."""

import json
from bisect import bisect_left
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback


class ProfileCallback(TrainerCallback):
    """Profiles `num_steps` steps and writes `profile.json` (a trace for chrome://tracing) and `profile_copies.json`.

    The latter holds the first and last profiled step, counted from 1, as `steps`, and [`copy_overlap`] as `copies`.
    Both profiling and the writing, which falls into the step behind, make steps longer.

    Args:
        folder: Where to write.
        num_steps: Steps to profile.
        start: The first of them, 0-based: later than compilation and the filling of the pipe.
    """

    def __init__(self, folder: str | Path, num_steps: int, start: int = 5):
        self.folder = Path(folder)
        self.start, self.stop = start, start + num_steps
        self._profile: profile | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.start and state.is_world_process_zero:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities = [ProfilerActivity.CUDA]
            self._profile = profile(activities=activities)
            self._profile.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self._profile is not None and state.global_step == self.stop:
            self._finish(args.device.index, state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if self._profile is not None:
            self._finish(args.device.index, state.global_step)

    def _finish(self, device: int | None, last_step: int) -> None:
        assert self._profile is not None
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / "profile.json"
        self._profile.export_chrome_trace(str(trace))
        self._profile = None
        copies = copy_overlap(json.loads(trace.read_text())["traceEvents"], device or 0)
        found = {"steps": [self.start + 1, last_step], "copies": copies}
        (self.folder / "profile_copies.json").write_text(json.dumps(found, indent=2))


def copy_overlap(events: list[dict[str, Any]], device: int = 0) -> dict[str, dict[str, float]]:
    """Seconds of each kind of copy in a trace, and of them those in which a kernel ran on the drafter's device.

    Args:
        events: `traceEvents` of a chrome trace, times in microseconds.
        device: Index of the drafter's device.

    Returns:
        For each kind of copy (`"Memcpy PtoP"`, ...): `count`, `gigabytes`, `seconds`, `covered_seconds`.
    """
    on_device = [e for e in events if e.get("cat") == "kernel" and e["args"].get("device") == device]
    kernels = _merged([(e["ts"], e["ts"] + e["dur"]) for e in on_device])
    starts = [start for start, _ in kernels]
    copies: dict[str, dict[str, float]] = {}
    for event in events:
        if event.get("cat") != "gpu_memcpy":
            continue
        name = event["name"].split(" (")[0]
        entry = copies.setdefault(name, {"count": 0, "gigabytes": 0.0, "seconds": 0.0, "covered_seconds": 0.0})
        start, end = event["ts"], event["ts"] + event["dur"]
        entry["count"] += 1
        entry["gigabytes"] += event.get("args", {}).get("bytes", 0) / 1e9
        entry["seconds"] += (end - start) / 1e6
        near = kernels[max(0, bisect_left(starts, start) - 1) : bisect_left(starts, end)]
        entry["covered_seconds"] += sum(max(0, min(end, b) - max(start, a)) for a, b in near) / 1e6
    return copies


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


__all__ = ["ProfileCallback", "copy_overlap"]
