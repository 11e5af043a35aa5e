# SPDX-License-Identifier: Apache-2.0
"""The drafter's weights compared over the ranks of a run, which data parallel training keeps equal to the last bit.

They start from rank 0's weights and add up the same gradients in every step. So any difference means that bytes
arrived changed, as on machines whose copies between GPUs are faulty, or that something else changed the weights.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging


logger = logging.get_logger(__name__)

FILE_NAME = "ranks.json"
# JSON has no infinity, and this is more than any weight.
LARGEST = torch.finfo(torch.float32).max


class RanksDifferError(RuntimeError):
    """The ranks of a run train different drafters."""


def check_ranks(every_steps: int, world_size: int) -> None:
    """Refuse a comparison of ranks that compares nothing.

    Args:
        every_steps: How often the ranks are to be compared.
        world_size: Ranks of the run.

    Raises:
        ValueError: There is one rank, or no step.
    """
    if every_steps < 1:
        raise ValueError(f"compare_ranks_steps is {every_steps}; expected 1 or more steps.")
    if world_size < 2:
        raise ValueError(
            f"compare_ranks_steps is {every_steps}, but this run is a single process, whose weights have nothing to "
            "be compared with. Leave it out, or start several ranks: accelerate launch --config_file "
            "recipes/accelerate/two_pairs.yaml."
        )


def rank_differences(model: nn.Module) -> dict[str, float]:
    """Largest absolute difference of each trainable parameter from rank 0's, over all ranks and the same on each.

    Every rank calls this at the same point. It takes the memory of a few copies of the largest parameter, and waits
    for the device once.

    Args:
        model: The drafter, on every rank the same one.

    Returns:
        For each name of a trainable parameter, 0 where all ranks hold the same values (a NaN is equal to a NaN).
    """
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    differences = torch.stack([_difference_from_first(parameter) for parameter in named.values()])
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    return dict(zip(named, differences.tolist(), strict=True))


def _difference_from_first(mine: torch.Tensor) -> torch.Tensor:
    first = mine.clone(memory_format=torch.contiguous_format)
    dist.broadcast(first, src=0)
    same = (mine == first) | (mine.isnan() & first.isnan())
    largest = first.float().sub_(mine.float()).abs_().masked_fill_(same, 0.0).max()
    # The maximum over the ranks of a NaN is undefined.
    return largest.nan_to_num(nan=LARGEST, posinf=LARGEST)


class RanksCallback(TrainerCallback):
    """Compares the drafter's weights over the ranks and ends the run on every rank where they are not equal.

    After each comparison `ranks.json` in `folder` holds the `steps` compared since this start, the
    `largest_difference` in each and the `world_size`.

    Args:
        folder: Where to write.
        every_steps: The ranks are compared after every so many steps.
        pause: Called after a comparison, which is no part of a step that is timed.

    Raises:
        ValueError: At the start of training, where there is nothing to compare.
        RanksDifferError: On every rank, after a step whose weights differ.
    """

    def __init__(self, folder: str | Path, every_steps: int, pause: Callable[[], None] = lambda: None):
        self.path = Path(folder) / FILE_NAME
        self.every_steps, self.pause = every_steps, pause
        self.steps: list[int] = []
        self.largest_difference: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        check_ranks(self.every_steps, args.world_size)
        self.steps, self.largest_difference = [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every_steps:
            return
        differences = rank_differences(model)
        name = max(differences, key=differences.__getitem__)
        self.steps.append(state.global_step)
        self.largest_difference.append(differences[name])
        if state.is_world_process_zero:
            self._write(args.world_size)
            # Who asked for the comparison is to see it; what is merely information is not shown by default.
            logger.warning(
                f"Step {state.global_step}: the largest difference of the drafter's {len(differences)} trainable "
                f"parameters between the {args.world_size} ranks is {differences[name]:g}."
            )
        if differences[name] > 0:
            raise RanksDifferError(_report(differences, name, state.global_step))
        self.pause()

    def _write(self, world_size: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = {"steps": self.steps, "largest_difference": self.largest_difference, "world_size": world_size}
        self.path.write_text(json.dumps(found, indent=2) + "\n")


def _report(differences: dict[str, float], name: str, step: int) -> str:
    different = sum(value > 0 for value in differences.values())
    return (
        f"After step {step} the ranks hold different weights: {name} differs by up to {differences[name]:g}, "
        f"{different} of {len(differences)} trainable parameters differ. Data parallel training keeps them equal to "
        "the last bit, so what went from GPU to GPU arrived changed, or something else than the optimizer changed "
        "them. Set NCCL_P2P_DISABLE=1, try --preflight true, and go on from a checkpoint of a step before the first "
        "difference."
    )


__all__ = ["RanksCallback", "RanksDifferError", "check_ranks", "rank_differences"]
