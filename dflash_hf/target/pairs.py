# SPDX-License-Identifier: Apache-2.0
"""From the training arguments to a target beside each drafter: devices, prefetching, gradients between ranks."""

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging

from ..training_args import DFlashTrainingArguments
from .feature_transfer import FeatureTransfer
from .frozen_target import FrozenTarget, FullDepth
from .prefetch import Prefetcher
from .throughput import Throughput, ThroughputCallback
from .topology import Placement, device_map_arguments, local_world_size, place


logger = logging.get_logger(__name__)


def placement(args: DFlashTrainingArguments) -> Placement:
    """Devices of this process by `target_layout`, for the GPUs that it sees.

    Raises:
        ValueError: When the layout does not fit the GPUs.
    """
    return placements(args)[args.local_process_index]


def placements(args: DFlashTrainingArguments) -> list[Placement]:
    """Devices of all processes on this machine, with the target on `target_device` where that is given."""
    num_visible = torch.cuda.device_count() if args.device.type == "cuda" else 0
    ranks = local_world_size(args.world_size)
    if args.target_device is None:
        return [place(rank, ranks, num_visible, args.target_layout) for rank in range(ranks)]
    # One GPU for each drafter is all that is left to ask of the layout.
    given = torch.device(args.target_device)
    drafters = [place(rank, ranks, num_visible, "shared").drafter for rank in range(ranks)]
    return [Placement("shared" if drafter == given else "paired", drafter, (given,)) for drafter in drafters]


def place_target(args: DFlashTrainingArguments) -> tuple[torch.device | None, dict[str, Any]]:
    """Where the target goes: one device, or the arguments of `from_pretrained` that spread it over several.

    Raises:
        ValueError: When the layout does not fit the GPUs.
    """
    if args.target_device is not None:
        return torch.device(args.target_device), {}
    if args.device.type not in ("cuda", "cpu"):
        return args.device, {}
    devices = placement(args).target
    if len(devices) == 1:
        return devices[0], {}
    return None, device_map_arguments(devices)


def feature_copies(args: DFlashTrainingArguments, source: torch.device) -> str:
    """How hidden states cross from the target's device to the drafter's, `"peer"` or `"host"`."""
    if args.feature_copies != "auto":
        return args.feature_copies
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "host"
    if source.type == args.device.type == "cuda" and source != args.device:
        return "peer" if torch.cuda.can_device_access_peer(args.device, source) else "host"
    return "peer"


def make_pair(target: FrozenTarget, args: DFlashTrainingArguments) -> tuple[Prefetcher, Throughput]:
    """The prefetcher of a loaded target for this process's drafter, and what times the two."""
    # In the order of the layers: the hidden states come out where the last tap is.
    devices = list(dict.fromkeys(p.device for p in target.model.parameters()))
    last_layer = -1 if target.final_states else target.target_layer_ids[-1]
    last = next(target.layers[last_layer].parameters()).device
    devices = [device for device in devices if device != last] + [last]
    source = FullDepth(target) if target.final_states else target
    throughput = Throughput(args.device, devices, args.world_size)
    prefetcher = Prefetcher(
        FeatureTransfer(source, devices, args.device, feature_copies(args, last)),
        args.device,
        args.prefetch_depth,
        throughput,
        args.measure_alone_steps * args.gradient_accumulation_steps,
    )
    return prefetcher, throughput


def pair_accelerator_args(accelerator_args: dict[str, Any], args: DFlashTrainingArguments) -> dict[str, Any]:
    """Arguments of the Accelerator with gradients exchanged during the backward, in the memory they have already.

    Args:
        accelerator_args: The Trainer's arguments of the Accelerator.
        args: The training arguments.
    """
    for handler in accelerator_args.get("kwargs_handlers", []):
        if isinstance(handler, DistributedDataParallelKwargs):
            # Every parameter takes part in every step, so there is no graph to search for those that do not.
            handler.find_unused_parameters = bool(args.ddp_find_unused_parameters)
            # A second copy of the gradients would be 4 bytes for each parameter.
            handler.gradient_as_bucket_view = True
    return accelerator_args


def compress_in_bf16(state, bucket):
    """torch's hook that sends gradients in bf16, under a name that DDP does not tie to builds with CUDA."""
    return bf16_compress_hook(state, bucket)


class PairCallback(ThroughputCallback):
    """Times the two halves, and says at the first log and at the end which one limits the step.

    Args:
        throughput: Where to mark and read the times.
        wrapped_model: Gives the drafter as it is wrapped for training.
    """

    def __init__(self, throughput: Throughput, wrapped_model: Callable[[], Any]):
        super().__init__(throughput)
        self._wrapped_model = wrapped_model
        self._compressed: Any = None
        self._has_advised = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._has_advised = False
        model = self._wrapped_model()
        if args.ddp_bf16_compression and isinstance(model, DistributedDataParallel) and model is not self._compressed:
            model.register_comm_hook(None, compress_in_bf16)
            self._compressed = model

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self._has_advised and "step_seconds" in (logs or {}):
            self._has_advised = True
            self._advise(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self.throughput.metrics()
        self._advise(args, state)

    def _advise(self, args, state) -> None:
        advice = self.throughput.advice(args.prefetch_depth)
        if advice is not None and state.is_world_process_zero:
            logger.warning_once(advice)


__all__ = [
    "PairCallback",
    "feature_copies",
    "make_pair",
    "pair_accelerator_args",
    "place_target",
    "placement",
    "placements",
]
