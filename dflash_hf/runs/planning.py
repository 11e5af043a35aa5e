# SPDX-License-Identifier: Apache-2.0
"""What a run will need, from configurations and documents alone: devices, memory, tokens, steps and hours."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from ..configuration_dflash import DFlashDraftConfig
from ..data.anchors import num_valid_anchors
from ..data.document_checks import check_documents, check_token_ids
from ..data.packing import Documents, PackedDataset
from ..target.checks import check_fits
from ..target.topology import Placement
from ..training.batches import ANCHOR_BUCKET
from ..training_args import DFlashTrainingArguments
from .model_shapes import DrafterShape, TargetShape
from .operations import product_rate


# Shares of a bf16 matrix product's rate that each half reaches on an H200 (`recipes/qwen3.6-27b/README.md`).
TARGET_EFFICIENCY = 0.76
DRAFTER_EFFICIENCY = 0.74
# An H200's rate in operations per second, taken where there is no GPU to measure.
ASSUMED_RATE = 780e12
# What an estimate of memory may be wrong by.
ESTIMATE_MARGIN = 0.15
GIGABYTE = 1e9


@dataclass
class Plan:
    """Figures of a run; memory in bytes per device, rates in operations per second.

    `target_bytes` and `drafter_bytes` are estimates of the peak, for the same device where the layout is shared.
    """

    layout: str
    devices: dict[str, list[str]]
    world_size: int
    documents: int
    tokens: int
    rows: int
    anchors_per_row: float
    steps_per_epoch: int
    total_steps: int
    target_parameters: int
    drafter_parameters: int
    target_bytes: float
    drafter_bytes: float
    rate: float
    rate_is_measured: bool
    target_seconds: float
    drafter_seconds: float
    step_seconds: float
    hours_per_epoch: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def report(self) -> str:
        """The figures as text, one a line."""
        shared = self.layout in ("shared", "cpu")
        memory = [f"target device    {self.target_bytes / GIGABYTE:7.1f} GB"]
        memory += [f"drafter device   {self.drafter_bytes / GIGABYTE:7.1f} GB"]
        if shared:
            memory = [f"one device holds both: {(self.target_bytes + self.drafter_bytes) / GIGABYTE:.1f} GB"]
        source = "measured here" if self.rate_is_measured else "assumed, an H200's"
        lines = [
            f"layout           {self.layout}, {self.world_size} process{'es' if self.world_size > 1 else ''}",
            *(
                f"rank {rank:<11} target on {', '.join(devices[:-1])}, drafter on {devices[-1]}"
                for rank, devices in self.devices.items()
            ),
            *memory,
            f"data             {self.documents:,} documents, {self.tokens:,} tokens, {self.rows:,} rows",
            f"anchors per row  {self.anchors_per_row:,.0f}",
            f"steps            {self.steps_per_epoch:,} an epoch, {self.total_steps:,} in all",
            f"bf16 product     {self.rate / 1e12:.1f} TFLOP/s ({source})",
            f"a step           {self.step_seconds:.3g} s: target {self.target_seconds:.3g} s, drafter "
            f"{self.drafter_seconds:.3g} s",
            f"hours per epoch  {self.hours_per_epoch:.3g}",
        ]
        return "\n".join(lines)


def make_plan(
    target_config: PreTrainedConfig,
    drafter_config: DFlashDraftConfig,
    args: DFlashTrainingArguments,
    placements: list[Placement],
    documents: Documents,
    world_size: int | None = None,
) -> Plan:
    """What a run needs, after checking target, drafter and data against each other; no weights are loaded.

    Args:
        target_config: The target's configuration.
        drafter_config: The drafter's configuration.
        args: The training arguments.
        placements: Devices of the ranks on this machine.
        documents: Tokenised documents.
        world_size: Ranks on all machines; those of this process's run by default.

    Raises:
        ValueError: When drafter and target, or drafter and data, do not fit together.
    """
    text_config = target_config.get_text_config(decoder=True)
    _check_together(text_config, drafter_config, documents)
    rows = PackedDataset(documents, args.row_length, seed=args.seed)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    world_size = args.world_size if world_size is None else world_size
    steps = math.ceil(len(rows) / (per_step * world_size))
    anchors, blocks = _anchors(rows, args, on_gpu=placements[0].drafter.type != "cpu")
    shared = placements[0].drafter == placements[0].target[0]
    target = TargetShape(text_config, drafter_config.target_layer_ids or [], args)
    drafter = DrafterShape(drafter_config, rows.num_tokens / len(rows), blocks, args)
    is_measured = args.device.type == "cuda"
    rate = product_rate(args.device) if is_measured else ASSUMED_RATE
    # Blocks that only fill up a row are drafted, but not compared with anything.
    work = drafter.operations(anchors, target.passed_parameters)
    target_seconds = per_step * work.target / (rate * TARGET_EFFICIENCY)
    drafter_seconds = per_step * work.drafter / (rate * DRAFTER_EFFICIENCY)
    in_turn = shared or args.prefetch_depth == 0
    step_seconds = (sum if in_turn else max)((target_seconds, drafter_seconds))
    return Plan(
        layout=placements[0].layout,
        devices={str(i): [*map(str, p.target), str(p.drafter)] for i, p in enumerate(placements)},
        world_size=world_size,
        documents=len(documents),
        tokens=rows.num_tokens,
        rows=len(rows),
        anchors_per_row=anchors,
        steps_per_epoch=steps,
        total_steps=args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs),
        target_parameters=target.parameters,
        drafter_parameters=drafter.parameters,
        target_bytes=target.bytes / len(placements[0].target),
        drafter_bytes=drafter.bytes(beside_target=shared),
        rate=rate,
        rate_is_measured=is_measured,
        target_seconds=target_seconds,
        drafter_seconds=drafter_seconds,
        step_seconds=step_seconds,
        hours_per_epoch=steps * step_seconds / 3600,
    )


def _check_together(target_config: PreTrainedConfig, drafter_config: DFlashDraftConfig, documents: Documents) -> None:
    check_fits(drafter_config, target_config, target_config.vocab_size)
    check_documents(documents, drafter_config.block_size)
    assert drafter_config.mask_token_id is not None  # the configuration refuses to be without
    check_token_ids(documents, target_config.vocab_size, drafter_config.mask_token_id)


def check_memory(plan: Plan, total_bytes: int, num_visible: int) -> None:
    """Refuse a layout that cannot fit its GPUs even if the estimate is `ESTIMATE_MARGIN` too high.

    Args:
        plan: The run's figures.
        total_bytes: Memory of a GPU.
        num_visible: GPUs that the processes see.

    Raises:
        ValueError: Naming the command that would work on these GPUs.
    """
    both = plan.target_bytes + plan.drafter_bytes
    needed = both if plan.layout == "shared" else max(plan.target_bytes, plan.drafter_bytes)
    if needed * (1 - ESTIMATE_MARGIN) <= total_bytes:
        return
    if plan.layout == "shared" and num_visible > 1:
        config = "two_pairs" if num_visible >= 4 else "one_pair"
        remedy = f"accelerate launch --config_file recipes/accelerate/{config}.yaml recipes/train_qwen36.py ..."
    elif plan.target_bytes > plan.drafter_bytes:
        remedy = "a quantised target (quantization_config in target_model_init_kwargs), or target_layout=spread"
    else:
        remedy = "fewer anchors (num_anchors, max_anchors_per_row), or activation_checkpointing"
    raise ValueError(
        f"Layout {plan.layout} needs about {needed / GIGABYTE:.0f} GB on one GPU, which has "
        f"{total_bytes / GIGABYTE:.0f} GB. With {num_visible} visible GPUs, use: {remedy}. If you know better, pass "
        "--check_memory false."
    )


def _anchors(rows: PackedDataset, args: DFlashTrainingArguments, on_gpu: bool) -> tuple[float, float]:
    """Mean anchors of a row, and those that are computed: on a GPU all rows are padded to the largest one's."""
    draws = np.minimum(num_valid_anchors(rows.documents), args.num_anchors)
    cap = args.max_anchors_per_row or max(1, args.row_length // 4)
    mean = min(float(draws.sum()), cap * len(rows)) / len(rows)
    if not on_gpu:
        return mean, mean
    largest = min(cap, rows.largest_row_sum(draws))
    return mean, -(-largest // ANCHOR_BUCKET) * ANCHOR_BUCKET


__all__ = ["Plan", "check_memory", "make_plan"]
