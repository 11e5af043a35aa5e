# SPDX-License-Identifier: Apache-2.0
"""Seconds, bytes and floating-point operations: how the benchmark measures, whatever it measures."""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm


@dataclass
class Side:
    """Something that is timed, alone or in turns with others.

    Args:
        name: Its name in the report.
        step: One step; gradients are left in `parameters`.
        parameters: What the step trains; their gradients are dropped after each step.
        shared_bytes: What it needs on the device besides `parameters` and what the step itself allocates.
        states: The tensors of an optimizer, of which there are none before the first step.
    """

    name: str
    step: Callable[[], Any]
    parameters: Sequence[nn.Parameter] = ()
    shared_bytes: int = 0
    states: Callable[[], Sequence[torch.Tensor]] = tuple

    @property
    def resident_bytes(self) -> int:
        return self.shared_bytes + num_bytes(self.parameters) + num_bytes(self.states())


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def synchronize(device: torch.device) -> None:
    """Wait for all visible accelerators: a step may run on two of them."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def timed(side: Side, device: torch.device) -> tuple[float, int | None]:
    """Seconds of one step and the most bytes that its side alone needs on the device (None on CPU)."""
    cuda = device.type == "cuda"
    synchronize(device)
    before = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    side.step()
    synchronize(device)
    seconds = time.perf_counter() - start
    # Counted from what is there before the step, so that other sides' weights do not appear in this one's peak.
    peak = torch.cuda.max_memory_allocated(device) - before + side.resident_bytes if cuda else None
    for parameter in side.parameters:
        parameter.grad = None
    return seconds, peak


def measure(sides: Sequence[Side], repeats: int, warmup: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Time all sides in turns, so that a change of the machine's clock meets all of them.

    Returns:
        For each side `seconds` (the median), `all_seconds`, `first_step_seconds` (compilation included),
        `peak_memory_gb` and, of it, `resident_memory_gb`, which is there before the step.
    """
    results: dict[str, dict[str, Any]] = {}
    for side in sides:
        first, _ = timed(side, device)
        results[side.name] = {"first_step_seconds": first, "all_seconds": [], "peak_memory_gb": None}
        results[side.name]["resident_memory_gb"] = side.resident_bytes / 1e9
    names = ", ".join(side.name for side in sides)
    for index in tqdm(range(warmup + repeats), desc=names, unit="step", leave=False, disable=None):
        for side in sides:
            seconds, peak = timed(side, device)
            result = results[side.name]
            if index >= warmup:
                result["all_seconds"].append(seconds)
            if peak is not None:
                result["peak_memory_gb"] = max(result["peak_memory_gb"] or 0.0, peak / 1e9)
    for result in results.values():
        result["seconds"] = statistics.median(result["all_seconds"])
    return results


# In this order: the first pattern that a name has decides.
GROUPS = {
    "attention": r"flex|flash|fmha|attention|sdpa|triton_tem(?!.*mm)",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|triton_tem|aten::(mm|addmm|bmm|matmul|linear)$",
    "loss": r"cross_entropy|softmax|nll|argmax|frozen_?head|amax|logsumexp",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "copies": r"memcpy|memset|direct_copy|aten::(copy_|cat|fill_|zero_)$",
}


def kernel_group(name: str) -> str:
    """The group of a kernel by its name; what fits none is elementwise work, fused or not."""
    for group, pattern in GROUPS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return "elementwise"


def profile(side: Side, device: torch.device, rows: int = 30) -> dict[str, Any]:
    """Profile one step by kernel (by operator on CPU): seconds by group, and the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = device.type == "cuda"
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        timed(side, device)
    kernels = []
    for event in profiler.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if cuda and (not on_device or event.is_user_annotation):
            continue  # an operator or a named range, whose kernels are listed themselves
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
        if seconds > 0:
            kernels.append({"name": event.key, "calls": event.count, "seconds": seconds})
    kernels.sort(key=lambda kernel: -kernel["seconds"])
    groups: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        kernel["group"] = kernel_group(kernel["name"])
        groups[kernel["group"]] += kernel["seconds"]
    return {"seconds_by_group": dict(sorted(groups.items(), key=lambda g: -g[1])), "kernels": kernels[:rows]}
