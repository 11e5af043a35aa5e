# SPDX-License-Identifier: Apache-2.0
"""A run before its first step: devices, memory, hours, and every part tried once on the machine itself."""

import copy
import errno
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import HfApi
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .checkpoint_format import ADAPTER_WEIGHTS, TensorHeaders, file_headers, read_tensor_headers
from .checkpointing import step_of
from .configuration_dflash import DFlashDraftConfig
from .data_collator import check_documents, check_token_ids, num_valid_anchors
from .frozen_target import FrozenTarget, check_fits
from .losses import compares_distributions
from .modeling_dflash import DFlashDraftModel
from .operations import Operations, count_operations, drafter_weights, passed_weights, product_rate
from .packing import Documents, PackedDataset
from .prefetch import FeatureTransfer, feature_copies
from .topology import Placement
from .trainer import ANCHOR_BUCKET
from .training_args import DFlashTrainingArguments


# --- Target and drafter by their configurations alone: their weights, and the memory and work that a row takes.


# Logits of one chunk of the loss, in fp32 with their gradient and softmax.
CHUNK_BYTES = 3 * 4 * 2**27


class DrafterShape:
    """Work and memory of the drafter on a row.

    Args:
        config: The drafter's configuration.
        tokens: Tokens of the row.
        blocks: Blocks of the row, those that only fill it up included.
        args: The training arguments.
    """

    def __init__(self, config: DFlashDraftConfig, tokens: float, blocks: float, args: DFlashTrainingArguments):
        with torch.device("meta"):
            drafter = DFlashDraftModel(config)
        self.config, self.tokens, self.args = config, tokens, args
        # The target's final hidden states then travel too, and go through the head.
        self.compares = compares_distributions(args.objective)
        self.parameters = sum(p.numel() for p in drafter.parameters())
        self.weights = drafter_weights(drafter)
        self.slots = blocks * config.block_size
        self.head = config.vocab_size * config.hidden_size

    def operations(self, anchors: float, target_weights: int) -> Operations:
        """Operations of a row with so many anchors, all slots of whose blocks count."""
        head_slots = anchors * (self.config.block_size - 1)
        return count_operations(
            self.weights, self.head, self.tokens, self.slots, head_slots, self.compares, target_weights
        )

    def bytes(self, beside_target: bool) -> float:
        """Peak memory; the target's embedding and head are the target's own where that is on the same device."""
        # fp32 weights, gradients and AdamW's two moments; embedding and head in bf16.
        return 16.0 * self.parameters + self._activation_bytes() + (0 if beside_target else 2 * 2 * self.head)

    def _activation_bytes(self) -> float:
        """What the backward needs, the context in fp32 with its noise, the prefetched states and one loss chunk."""
        config, args = self.config, self.args
        heads = config.num_attention_heads * config.head_dim
        per_slot = 24 * config.hidden_size + 6 * config.intermediate_size + 8 * heads
        layers = 1 if args.activation_checkpointing else config.num_hidden_layers
        features = self.tokens * config.hidden_size * (len(config.target_layer_ids or []) + self.compares)
        waiting = (args.prefetch_depth + 1) * 2
        batch = args.per_device_train_batch_size
        return batch * (layers * per_slot * self.slots + (2 * 4 + waiting) * features) + CHUNK_BYTES


class TargetShape:
    """Weights and memory of the target, cut after the last tap unless the objective needs its distribution.

    Args:
        config: The target's configuration.
        taps: Layers whose outputs are read.
        args: The training arguments.
    """

    def __init__(self, config: PreTrainedConfig, taps: list[int], args: DFlashTrainingArguments):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        decoder_layers = model.get_decoder().layers
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers]
        self.parameters = sum(p.numel() for p in model.parameters())
        compares = compares_distributions(args.objective)
        num_read = len(layers) if compares else taps[-1] + 1
        # What is held of the layers, and what a token passes; embedding and head stay on the device beside it.
        read_parameters = sum(layers[:num_read])
        self.passed_parameters = passed_weights(decoder_layers[:num_read], config)
        given = args.target_model_init_kwargs if isinstance(args.target_model_init_kwargs, dict) else {}
        name = str(given.get("dtype") or config.dtype or "float32").removeprefix("torch.")
        size = 2 if name in ("auto", "bfloat16", "float16") else 4
        quantization = given.get("quantization_config") or config.to_dict().get("quantization_config")
        weights = size * (self.parameters - sum(layers)) + read_parameters * (
            size if quantization is None else _quantised_bits(quantization) / 8
        )
        tokens = args.row_length * args.per_device_train_batch_size
        layer = 4 * config.intermediate_size + 16 * config.hidden_size
        # One batch of hidden states is copied away while the next one is made.
        self.bytes = weights + float(tokens * size * (layer + 2 * config.hidden_size * (len(taps) + compares)))


def _quantised_bits(quantization: Any) -> float:
    """Bits of a quantised weight, scales included, from the field that names them; 16 where none does."""
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if values.get("load_in_4bit"):
        return 4.5
    if values.get("load_in_8bit") or values.get("quant_method") == "fp8":
        return 8.5
    return float(values.get("bits", 15.5)) + 0.5


# --- What a run will need, from configurations and documents alone: devices, memory, tokens, steps and hours.


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


# --- Two minutes on a rented machine before days: every part of a run once, each failure with its way out.


if TYPE_CHECKING:
    from .trainer import DFlashTrainer

COPY_BYTES = 2**28

ALL_REDUCE_SECONDS = 60


def preflight(
    make_trainer: "Callable[[DFlashTrainingArguments, Any], DFlashTrainer]",
    args: DFlashTrainingArguments,
    target: FrozenTarget,
    upload_to: str | None = None,
) -> dict[str, float]:
    """Try out copies, all-reduce, steps, evaluation, checkpoint, resume and upload.

    Args:
        make_trainer: Makes a trainer from arguments and data to evaluate on; the data are the run's own.
        args: The run's arguments; its output folder gets a folder `preflight`, which is removed at the end.
        target: The loaded target.
        upload_to: A folder or URL (`s3://...`) to upload to, by default `remote_checkpoint_dir` or the output folder;
            the Hub is tried too where `push_to_hub` is set.

    Returns:
        Seconds of each check, also written to `preflight.json` in the output folder.

    Raises:
        RuntimeError: Naming the check that failed, why, and the way out.
    """
    folder = Path(str(args.output_dir)) / "preflight"
    source = target.device
    checks: dict[str, Callable[[], None]] = {
        "copy between the devices of the pair": lambda: check_copy(source, args.device, feature_copies(args, source)),
        "all-reduce between the ranks": lambda: check_all_reduce(args.device),
        "three steps, an evaluation, a checkpoint and its resume": lambda: check_training(make_trainer, args, folder),
        "upload": lambda: check_upload(args, upload_to),
    }
    seconds = {}
    try:
        for name, check in checks.items():
            start = time.perf_counter()
            try:
                check()
            except Exception as error:
                raise RuntimeError(f"Preflight failed at: {name}. {_with_way_out(error)}") from error
            seconds[name] = time.perf_counter() - start
            if args.process_index == 0:
                print(f"preflight: {name}: ok, {seconds[name]:.1f} s", flush=True)
    finally:
        if args.process_index == 0:
            # After a failure too: its half checkpoints may be what fills the disk.
            shutil.rmtree(folder, ignore_errors=True)
    if args.process_index == 0:
        Path(str(args.output_dir)).mkdir(parents=True, exist_ok=True)
        report = Path(str(args.output_dir)) / "preflight.json"
        report.write_text(json.dumps(seconds, indent=2))
        print(f"preflight: all {len(checks)} checks passed; their seconds are in {report}", flush=True)
    return seconds


def _with_way_out(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{error}: free space, or give an output_dir on a larger disk."
    if isinstance(error, torch.OutOfMemoryError):
        return f"{error} Lower row_length, max_anchors_per_row or prefetch_depth, or set activation_checkpointing."
    return str(error)


class _FixedStates:
    """Stands in for a target: gives the same states whatever it reads."""

    def __init__(self, states: torch.Tensor):
        self.states = states
        self.device = states.device

    def context_hidden_states(self, input_ids, document_lengths=None) -> torch.Tensor:
        return self.states.clone()


def check_copy(source: torch.device, destination: torch.device, copies: str, num_bytes: int = COPY_BYTES) -> None:
    """Send random bytes the way hidden states go, and compare what arrives byte by byte.

    Raises:
        RuntimeError: When other bytes arrive.
    """
    expected = torch.randint(0, 2**31 - 1, (num_bytes // 4,), dtype=torch.int32)
    source_states = expected.to(source)
    transfer = FeatureTransfer(_FixedStates(source_states), [source], destination, copies)
    for _ in range(4):
        arrived = transfer.receive(transfer.run(torch.zeros(1, 1, dtype=torch.long), [[1]]))
        if not torch.equal(arrived.cpu(), expected):
            raise RuntimeError(
                f"Bytes copied from {source} to {destination} ({copies}) arrive changed, so hidden states would too. "
                "Copies between these GPUs cannot be trusted: set feature_copies=host and NCCL_P2P_DISABLE=1, and "
                "look at the machine's IOMMU and ACS settings."
            )


def check_all_reduce(device: torch.device, seconds: float = ALL_REDUCE_SECONDS) -> None:
    """Add up a tensor over all ranks within a time.

    Raises:
        RuntimeError: When the sum is wrong. When it does not come in time the process says so and ends: a group that
            hangs cannot be taken down in order.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    values = torch.full((2**22,), float(dist.get_rank() + 1), device=device)
    work = dist.all_reduce(values, async_op=True)
    deadline = time.monotonic() + seconds
    while work is not None and not work.is_completed():
        if time.monotonic() > deadline:
            print(
                f"Preflight failed at: all-reduce between the ranks. Nothing came in {seconds:.0f} s. Set "
                "NCCL_P2P_DISABLE=1 (and NCCL_IB_DISABLE=1 between machines without InfiniBand), and "
                "NCCL_DEBUG=INFO to see which connection waits.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        time.sleep(0.01)
    if work is not None:
        work.wait()
    world = dist.get_world_size()
    if not bool((values == world * (world + 1) / 2).all()):
        raise RuntimeError("Sums over the ranks are wrong: set NCCL_P2P_DISABLE=1 and try again.")


class _OneCheckpoint(TrainerCallback):
    """Keeps Trainer from a checkpoint at the end too, which for a large drafter takes as long as all of the steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == args.save_steps


def check_training(
    make_trainer: "Callable[[DFlashTrainingArguments, Any], DFlashTrainer]",
    args: DFlashTrainingArguments,
    folder: Path,
) -> None:
    """Three steps with an evaluation and a checkpoint after the second, and the third once more from the checkpoint.

    Raises:
        RuntimeError: When a loss is not finite or the resumed step is another one.
    """
    short = copy.copy(args)
    for name, value in {
        "output_dir": str(folder), "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1,
        "eval_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False, "report_to": [],
        "eval_on_start": False, "logging_strategy": "steps", "save_only_model": False, "save_total_limit": None,
        # Steps of a preflight are no checkpoints of the run, nor do they go on from one.
        "remote_checkpoint_dir": None, "resume_from_checkpoint": None,
    }.items():  # fmt: skip
        setattr(short, name, value)
    trainer: Any = make_trainer(short, None)
    trainer.add_callback(_OneCheckpoint())
    few = [trainer.train_dataset.documents[i] for i in range(min(4, len(trainer.train_dataset.documents)))]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics = trainer.evaluate(few)
    if not all(map(torch.isfinite, torch.tensor([*losses, metrics["eval_loss"]]))):
        raise RuntimeError(f"Losses {losses} and {metrics['eval_loss']} are not all finite: lower the learning rate.")
    # The optimizer of the first run is as large as that of the second.
    del trainer
    gc.collect()
    resumed = make_trainer(short, None)
    resumed.add_callback(_OneCheckpoint())
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    tolerance = 0 if args.device.type == "cpu" else 1e-2 * abs(losses[-1])
    if len(again) != len(losses) or abs(again[-1] - losses[-1]) > tolerance:
        raise RuntimeError(
            f"The step after the checkpoint had the loss {losses[-1]}, and {again[-1:]} after resuming: the "
            "checkpoint does not hold the whole run. Check the disk, and that all ranks see the same output_dir."
        )


def check_upload(args: DFlashTrainingArguments, upload_to: str | None) -> None:
    """Write a small file where checkpoints will go, read it back and delete it.

    Raises:
        RuntimeError: When the place cannot be written to or gives back something else.
    """
    if args.process_index != 0:
        return
    content = os.urandom(1024)
    place = upload_to or args.remote_checkpoint_dir or str(Path(str(args.output_dir)).resolve())
    url = f"{place.rstrip('/')}/preflight-upload"
    try:
        with fsspec.open(url, "wb", auto_mkdir=True) as file:
            file.write(content)
        with fsspec.open(url, "rb") as file:
            came_back = file.read()
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.rm(path)
    except (OSError, ImportError, ValueError) as error:
        raise RuntimeError(
            f"{url} cannot be written and read ({error}). Check the credentials, the bucket and, for s3:// and its "
            "like, that their fsspec package (s3fs, gcsfs) is installed."
        ) from error
    if came_back != content:
        raise RuntimeError(f"{url} gives back other bytes than were written; use another place.")
    if args.push_to_hub:
        _check_hub(args, content)


def _check_hub(args: DFlashTrainingArguments, content: bytes) -> None:
    api, name = HfApi(token=args.hub_token), args.hub_model_id or Path(str(args.output_dir)).name
    try:
        repo = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        api.upload_file(path_or_fileobj=content, path_in_repo="preflight-upload", repo_id=repo)
        api.delete_file("preflight-upload", repo_id=repo)
    except OSError as error:  # the Hub's errors are of this kind
        raise RuntimeError(
            f"The Hub repository {name} cannot be written ({error}). Log in with `hf auth login` or set HF_TOKEN to "
            "a token that may write, and check hub_model_id."
        ) from error


# --- The drafter's weights compared over the ranks of a run, which data parallel training keeps equal to the last bit.


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


# --- How far apart the weights of several runs are after the same step, from their checkpoints.


def common_step(folders: Sequence[Path]) -> int:
    """The newest step of which every run has a checkpoint.

    Args:
        folders: Output folders of runs.

    Raises:
        ValueError: There is none, naming the steps that each one has.
    """
    steps = [{step for path in folder.glob("*") if (step := step_of(path)) is not None} for folder in folders]
    common = set.intersection(*steps)
    if not common:
        had = "; ".join(
            f"{folder}: {', '.join(map(str, sorted(own))) or 'none'}"
            for folder, own in zip(folders, steps, strict=True)
        )
        raise ValueError(
            f"There is no step of which all runs have a {PREFIX_CHECKPOINT_DIR}-N to be compared ({had}). Train each "
            "with --save_strategy steps, the same --save_steps and, since weights are enough, --save_only_model true."
        )
    return max(common)


def weight_differences(first: Path, other: Path) -> dict[str, Any]:
    """The difference of two drafters' weights, or of two adapters', read one tensor after the other.

    Args:
        first: Folder with safetensors files.
        other: The same; its weights are compared with the first one's.

    Returns:
        `relative_difference`, the norm of the difference of all weights over that of the first one's;
        `largest_difference` of a single weight, absolute; and `largest_in`, the tensor that has it.

    Raises:
        ValueError: They hold other tensors, a file is broken, or a weight is not finite.
        FileNotFoundError: A folder holds no weights.
    """
    headers = _same_headers(first, other)
    squares, reference, largest, largest_in = 0.0, 0.0, 0.0, next(iter(headers))
    with ExitStack() as stack:
        tensors, others = (_open(folder, stack) for folder in (first, other))
        for name, file in sorted(tensors.items()):
            values = file.get_tensor(name).float()
            if not values.numel():
                continue
            difference = others[name].get_tensor(name).float().sub_(values)
            squares += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
            reference += torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2
            if not math.isfinite(squares + reference):
                raise ValueError(f"{name} is not finite in {first} or {other}: there is no difference to speak of.")
            if (own := difference.abs_().max().item()) > largest:
                largest, largest_in = own, name
    relative = math.sqrt(squares / reference) if reference else math.sqrt(squares)
    return {"relative_difference": relative, "largest_difference": largest, "largest_in": largest_in}


def _same_headers(first: Path, other: Path) -> TensorHeaders:
    """The headers of the first one, after a look at those of the other."""
    headers = _headers(first)
    shapes = [{name: shape for name, (_, shape) in own.items()} for own in (headers, _headers(other))]
    if shapes[0] != shapes[1]:
        different = sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n))
        raise ValueError(
            f"{other} does not hold the tensors of {first}: {len(different)} are missing in one of them or of another "
            f"shape, such as {', '.join(different[:3])}. Compare runs of the same drafter."
        )
    return headers


def _headers(folder: Path) -> TensorHeaders:
    adapter = folder / ADAPTER_WEIGHTS
    return file_headers(adapter) if adapter.exists() else read_tensor_headers(folder)


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor."""
    adapter = folder / ADAPTER_WEIGHTS
    paths = [adapter] if adapter.exists() else sorted(folder.glob("*.safetensors"))
    files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dictionary)
