# SPDX-License-Identifier: Apache-2.0
"""Which devices a process uses: one for the drafter it trains and one or more for the frozen target.

accelerate puts the drafter of local rank r on the r-th visible GPU. The targets follow: with W local ranks, the target
of rank r is on GPU r + W, so that `gpu_ids: 2,3,0,1` in an accelerate configuration trains on GPUs 2 and 3 and runs
the targets on 0 and 1.
"""

import os
from dataclasses import dataclass

import torch


FEATURE_COPIES = ("auto", "peer", "host")
LAYOUTS = ("auto", "paired", "shared", "spread")


@dataclass(frozen=True)
class Placement:
    """The devices of one process: one of the drafter, and one of the target unless that is spread over several.

    `layout` is "cpu", "paired", "shared" or "spread".
    """

    layout: str
    drafter: torch.device
    target: tuple[torch.device, ...]


def place(local_rank: int, local_world_size: int, num_visible: int, layout: str = "auto") -> Placement:
    """Devices of the drafter and the target of one process, from numbers alone.

    Args:
        local_rank: Index of the process on its machine.
        local_world_size: Processes on the machine, W.
        num_visible: GPUs that the processes see, V; 0 trains on the CPU, where every layout is the same.
        layout: `"paired"` (target on GPU rank + W, needs V >= 2W), `"shared"` (both on GPU rank, needs V >= W),
            `"spread"` (the GPUs from W on are dealt out to the targets in equal parts) or `"auto"` (shared where
            V = W, paired where V >= 2W).

    Raises:
        ValueError: The layout does not fit the GPUs; names both counts and what would fit.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"target_layout is {layout!r}, expected one of {', '.join(LAYOUTS)}.")
    if not 0 <= local_rank < local_world_size or num_visible < 0:
        raise ValueError(f"Local rank {local_rank} of {local_world_size} with {num_visible} GPUs is not a process.")
    if num_visible == 0:
        cpu = torch.device("cpu")
        return Placement("cpu", cpu, (cpu,))
    asked = layout
    if layout == "auto":
        layout = "shared" if num_visible == local_world_size else "paired"
    if num_visible < local_world_size * (1 if layout == "shared" else 2):
        raise ValueError(_too_few(asked, local_world_size, num_visible))
    per_rank, rest = divmod(num_visible - local_world_size, local_world_size) if layout == "spread" else (1, 0)
    if rest:
        raise ValueError(
            f"{num_visible - local_world_size} GPUs are left for {local_world_size} targets, which get unequal parts. "
            f"Make {num_visible - rest} of the {num_visible} GPUs visible (gpu_ids, or CUDA_VISIBLE_DEVICES)."
        )
    first = local_rank if layout == "shared" else local_world_size + local_rank * per_rank
    targets = tuple(torch.device("cuda", first + i) for i in range(per_rank))
    return Placement(layout, torch.device("cuda", local_rank), targets)


def _too_few(layout: str, local_world_size: int, num_visible: int) -> str:
    needed = {"auto": "exactly one or at least two for each", "shared": "one for each"}.get(layout, "two for each")
    remedies = [f"--num_processes {num_visible} with target_layout=shared"]
    if pairs := num_visible // 2:
        remedies.insert(0, f"--num_processes {pairs} for {pairs} pair{'s' if pairs > 1 else ''} of GPUs")
    return (
        f"{local_world_size} processes see {num_visible} GPUs, and target_layout={layout} needs {needed}. "
        f"Start {', or '.join(remedies)}, or make more GPUs visible; see recipes/accelerate/."
    )


def planned_placements(num_gpus: int, layout: str = "auto") -> list[Placement]:
    """Placements on a machine that is not here, with as many processes as the layout has use for.

    That is one process per GPU for `"shared"` and for a single GPU, one in all for `"spread"`, and one for every two
    GPUs otherwise. A layout that does not fit so many GPUs is a ValueError.
    """
    if num_gpus < 1:
        raise ValueError(f"There are {num_gpus} GPUs to plan for; expected at least one.")
    ranks = {"shared": num_gpus, "spread": 1}.get(layout, max(num_gpus // 2, 1))
    return [place(rank, ranks, num_gpus, layout) for rank in range(ranks)]


def check_world_size(world_size: int) -> None:
    """Raise a ValueError in a process that was started as one of several but trains in a group of `world_size`."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != world_size:
        raise ValueError(
            f"The launcher started {started} processes, but this one is in a group of {world_size}: each would train "
            "its own drafter. Without a GPU add --use_cpu true, else make the training arguments first of all."
        )


def local_world_size(world_size: int) -> int:
    """Processes on this machine: what the launcher says, or all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def device_map_arguments(devices: tuple[torch.device, ...]) -> dict:
    """Arguments of `from_pretrained` that spread a target evenly over CUDA devices and keep off all others."""
    memory = {device.index: int(0.95 * torch.cuda.mem_get_info(device)[0]) for device in devices}
    return {"device_map": "balanced", "max_memory": memory}
