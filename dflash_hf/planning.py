# SPDX-License-Identifier: Apache-2.0
"""A run before its first step: devices, memory and hours, and every part tried once on the machine itself."""

import copy
import errno
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from huggingface_hub import HfApi
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, TrainerCallback
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from .configuration_dflash import DFlashDraftConfig
from .configuration_dflash2 import DFlash2DraftConfig
from .data_collator import check_documents, check_token_ids
from .frozen_target import FrozenTarget, check_fits
from .modeling_dflash import DFlashDraftModel
from .operations import count_operations, drafter_weights, passed_weights, product_rate
from .packing import Documents, PackedDataset
from .prefetch import FeatureTransfer, feature_copies
from .topology import Placement
from .trainer import DFlashTrainer, row_anchors
from .training_args import DFlashTrainingArguments


logger = logging.get_logger(__name__)

# Shares of a bf16 matrix product's rate that each half reaches on an H200 (`recipes/qwen3.6-27b/README.md`).
TARGET_EFFICIENCY = 0.76
DRAFTER_EFFICIENCY = 0.74
# Dense bf16 TFLOP/s by their makers' data sheets, and the share that a matrix product reaches (780 of an H200's 989).
GPU_TFLOPS = {
    "A100": 312, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "L4": 121, "L40S": 362, "A6000": 155,
    "RTX 6000 Ada": 364, "RTX PRO 6000": 504, "RTX 4090": 165, "RTX 5090": 210,
}  # fmt: skip
REACHED_SHARE = 0.79
# What the estimated part of a memory need may be wrong by.
ESTIMATE_MARGIN = 0.15
# Logits of one chunk of the loss, in fp32 with their gradient and softmax.
CHUNK_BYTES = 3 * 4 * 2**27
# fp32 weights, gradients and AdamW's two moments; a checkpoint has no gradients.
STATE_BYTES, CHECKPOINT_BYTES = 16, 12
# Host memory of a rank beside the data: libraries, CUDA, workers.
RANK_HOST_BYTES = 8e9

COPY_BYTES = 2**28
ALL_REDUCE_SECONDS = 60

RANKS_NAME = "ranks.json"
# JSON has no infinity, and this is more than any weight.
LARGEST = torch.finfo(torch.float32).max

MakeTrainer = Callable[[DFlashTrainingArguments, Any], DFlashTrainer]


@dataclass
class Need:
    """What a kind of device must hold, in bytes: `exact` is weights and optimizer, `total` the peak as estimated."""

    name: str
    exact: float
    total: float

    def verdict(self, capacity: float) -> str:
        """Whether it fits into `capacity` bytes; only the estimated part has a margin."""
        margin = ESTIMATE_MARGIN * (self.total - self.exact)
        if self.total + margin <= capacity:
            return "fits"
        return "may fit" if self.total - margin <= capacity else "does not fit"


@dataclass
class Plan:
    """Figures of a run; memory in bytes, rates in operations per second.

    `target_bytes` and `drafter_bytes` are estimated peaks, for the same device where the layout is shared; of them
    `target_weight_bytes` and `drafter_state_bytes` are exact.
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
    drafter_shape: str
    target_bytes: float
    target_weight_bytes: float
    drafter_bytes: float
    drafter_state_bytes: float
    rate: float
    rate_source: str
    target_seconds: float
    drafter_seconds: float
    step_seconds: float
    hours_per_epoch: float
    total_hours: float
    disk_bytes: float
    host_bytes: float
    capacity: float | None = None

    def needs(self) -> list[Need]:
        """The memory of each kind of device."""
        target = Need("target device", self.target_weight_bytes, self.target_bytes)
        drafter = Need("drafter device", self.drafter_state_bytes, self.drafter_bytes)
        if self.layout in ("shared", "cpu"):
            return [Need("one for both", target.exact + drafter.exact, target.total + drafter.total)]
        return [target, drafter]

    def report(self) -> str:
        """The figures as text, one a line."""
        lines = [("layout", f"{self.layout}, {self.world_size} process{'es' if self.world_size > 1 else ''}")]
        for rank, devices in self.devices.items():
            lines.append((f"rank {rank}", f"target on {', '.join(devices[:-1])}, drafter on {devices[-1]}"))
        for need in self.needs():
            fits = f" of {self.capacity / 1e9:.0f} GB: {need.verdict(self.capacity)}" if self.capacity else ""
            lines.append((need.name, f"{need.total / 1e9:.1f} GB{fits} ({need.exact / 1e9:.1f} GB are exact)"))
        parts = f"target {self.target_seconds:.3g} s, drafter {self.drafter_seconds:.3g} s"
        lines += [
            ("drafter", f"{self.drafter_parameters / 1e9:.3g}B parameters: {self.drafter_shape}"),
            ("data", f"{self.documents:,} documents, {self.tokens:,} tokens, {self.rows:,} rows"),
            ("anchors per row", f"{self.anchors_per_row:,.0f}"),
            ("steps", f"{self.steps_per_epoch:,} an epoch, {self.total_steps:,} in all"),
            ("bf16 product", f"{self.rate / 1e12:.1f} TFLOP/s ({self.rate_source})"),
            ("a step", f"{self.step_seconds:.3g} s: {parts}"),
            ("hours", f"{self.total_hours:.3g} in all, {self.hours_per_epoch:.3g} an epoch"),
            ("disk", f"{self.disk_bytes / 1e9:.0f} GB of checkpoints"),
            ("host memory", f"about {self.host_bytes / 1e9:.0f} GB a machine"),
        ]
        return "\n".join(f"{name:<16} {value}" for name, value in lines)


def make_plan(
    target_config: PreTrainedConfig,
    drafter_config: DFlashDraftConfig,
    args: DFlashTrainingArguments,
    placements: list[Placement],
    documents: Documents,
    world_size: int | None = None,
    gpu: str | None = None,
    capacity: float | None = None,
) -> Plan:
    """What a run needs; no weights are loaded, and target, drafter and data that do not fit together are refused.

    Args:
        target_config: Configuration of the target.
        drafter_config: Configuration of the drafter.
        args: The run's arguments.
        placements: The devices of the ranks on this machine.
        documents: The documents to train on.
        world_size: Ranks on all machines, by default those of this process's run.
        gpu: A name of `GPU_TFLOPS`, or TFLOP/s of a bf16 product; by default measured, or an H200's without a GPU.
        capacity: Bytes of memory of each GPU.
    """
    text_config = target_config.get_text_config(decoder=True)
    check_fits(drafter_config, text_config, text_config.vocab_size)
    check_documents(documents, drafter_config.block_size)
    assert drafter_config.mask_token_id is not None  # the configuration refuses to be without
    check_token_ids(documents, text_config.vocab_size, drafter_config.mask_token_id)
    rows = PackedDataset(documents, args.row_length, seed=args.seed)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    world_size = args.world_size if world_size is None else world_size
    steps = math.ceil(len(rows) / (per_step * world_size))
    total_steps = args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs)
    needs = _needs(text_config, drafter_config, args, placements[0], rows, gpu)
    in_turn = placements[0].drafter == placements[0].target[0] or args.prefetch_depth == 0
    halves = needs["target_seconds"], needs["drafter_seconds"]
    step_seconds = sum(halves) if in_turn else max(halves)
    return Plan(
        layout=placements[0].layout,
        devices={str(i): [*map(str, p.target), str(p.drafter)] for i, p in enumerate(placements)},
        world_size=world_size,
        documents=len(documents),
        tokens=rows.num_tokens,
        rows=len(rows),
        steps_per_epoch=steps,
        total_steps=total_steps,
        **needs,
        step_seconds=step_seconds,
        hours_per_epoch=steps * step_seconds / 3600,
        total_hours=total_steps * step_seconds / 3600,
        disk_bytes=_num_checkpoints(args, steps, total_steps) * CHECKPOINT_BYTES * needs["drafter_parameters"],
        host_bytes=len(placements) * (RANK_HOST_BYTES + CHECKPOINT_BYTES * needs["drafter_parameters"]),
        capacity=capacity,
    )


def _num_checkpoints(args: DFlashTrainingArguments, steps_per_epoch: int, total_steps: int) -> int:
    """Checkpoints that lie on the disk at once, and the finished drafter."""
    strategy = SaveStrategy(args.save_strategy).value
    every = args.save_steps if args.save_steps >= 1 else args.save_steps * total_steps
    saved = {"steps": total_steps / max(every, 1), "no": 0}.get(strategy, total_steps / steps_per_epoch)
    # One more is there while the oldest still is.
    kept = math.inf if args.save_total_limit is None else args.save_total_limit + 1
    return int(min(math.ceil(saved), kept)) + 1


def _rate(gpu: str | None, device: torch.device) -> tuple[float, str]:
    """Operations per second of a bf16 product, and where the figure is from."""
    if gpu is None and device.type == "cuda":
        return product_rate(device), "measured here"
    name = gpu or "H200"
    if name in GPU_TFLOPS:
        known = "" if gpu else "; assumed, name yours with --gpu"
        return GPU_TFLOPS[name] * REACHED_SHARE * 1e12, f"{REACHED_SHARE:.0%} of the data sheet's for {name}{known}"
    try:
        return float(name) * 1e12, "as given"
    except ValueError:
        raise ValueError(
            f"gpu is {gpu!r}; expected TFLOP/s of a bf16 product or one of {', '.join(GPU_TFLOPS)}."
        ) from None


def _needs(
    target_config: PreTrainedConfig,
    config: DFlashDraftConfig,
    args: DFlashTrainingArguments,
    placement: Placement,
    rows: PackedDataset,
    gpu: str | None,
) -> dict[str, Any]:
    """The fields of a plan that are anchors, weights, bytes, rates and seconds, from models without weights."""
    anchors, padded = row_anchors(rows, args)
    blocks = anchors if placement.drafter.type == "cpu" else padded
    with torch.device("meta"):
        drafter = DFlashDraftModel.class_of(config)(config)
        target: Any = AutoModelForCausalLM.from_config(target_config)
    compares, layers = args.compares, target.get_decoder().layers
    assert config.target_layer_ids is not None  # every configuration has taps
    # The others are cut off, unless the objective needs the target's distribution.
    read = layers if compares else layers[: config.target_layer_ids[-1] + 1]
    # The target's final hidden states travel too where they are compared with.
    states, width = len(config.target_layer_ids) + compares, config.hidden_size
    tokens, slots, head = rows.num_tokens / len(rows), blocks * config.block_size, config.vocab_size * width
    exact = float(STATE_BYTES * _parameters(drafter))
    if placement.drafter != placement.target[0]:
        # Embedding and head, in bf16, which are the target's own on the same device.
        exact += 2 * 2 * head
    # Of the blocks some only fill a row up: they are drafted, but do not go through the head.
    head_slots, passed = anchors * (config.block_size - 1), passed_weights(read, target_config)
    work = count_operations(drafter_weights(drafter), head, tokens, slots, head_slots, compares, passed)
    rate, source = _rate(gpu, args.device)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    weights, batch = _target_bytes(target, read, target_config, args, states)
    heads = f"{config.num_attention_heads}/{config.num_key_value_heads} heads of {config.head_dim}"
    return {
        "anchors_per_row": anchors,
        "target_parameters": _parameters(target),
        "drafter_parameters": _parameters(drafter),
        "drafter_shape": f"{config.num_hidden_layers} layers, {heads}, MLP {config.intermediate_size}, blocks of "
        f"{config.block_size}, taps {config.target_layer_ids}, mask token {config.mask_token_id}",
        "target_weight_bytes": weights / len(placement.target),
        "target_bytes": (weights + batch) / len(placement.target),
        "drafter_state_bytes": exact,
        "drafter_bytes": exact + _activation_bytes(config, args, slots, tokens * width * states),
        "rate": rate,
        "rate_source": source,
        "target_seconds": per_step * work.target / (rate * TARGET_EFFICIENCY),
        "drafter_seconds": per_step * work.drafter / (rate * DRAFTER_EFFICIENCY),
    }


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _activation_bytes(config: Any, args: DFlashTrainingArguments, slots: float, features: float) -> float:
    """Peak beside the drafter's state: what the backward needs, prefetched hidden states, one chunk of the loss."""
    # Compiled layers; measured 7% below this at the 27B's shape on an H200.
    per_slot = 20 * config.hidden_size + 5 * config.intermediate_size
    per_slot += 6 * config.num_attention_heads * config.head_dim
    layers = 1 if args.activation_checkpointing else config.num_hidden_layers
    kept = CHUNK_BYTES
    if isinstance(config, DFlash2DraftConfig):
        # What convolutions read on both sides of the sublayers; the codebooks' gradients of a chunk and of all, and
        # that of a chunk's logits once more.
        per_slot += 12 * config.hidden_size if config.conv_kernel_size else 0
        kept += 2 * 2 * 4 * config.vocab_size * config.selector_rank + CHUNK_BYTES // 2
    # The context in fp32 with its noise, and each batch that waits in bf16.
    feature_bytes = features * (2 * 4 + 2 * (args.prefetch_depth + 1))
    return args.per_device_train_batch_size * (layers * per_slot * slots + feature_bytes) + kept


def _target_bytes(
    target: Any, read: Any, config: PreTrainedConfig, args: DFlashTrainingArguments, num_states: int
) -> tuple[float, float]:
    """Memory of the target: the layers that run with embedding and head, and the states of a batch."""
    given = args.target_model_init_kwargs if isinstance(args.target_model_init_kwargs, dict) else {}
    name = str(given.get("dtype") or config.dtype or "float32").removeprefix("torch.")
    size = 2 if name in ("auto", "bfloat16", "float16") else 4
    quantization = given.get("quantization_config") or config.to_dict().get("quantization_config")
    layer_size = size if quantization is None else _quantised_bits(quantization) / 8
    outside = _parameters(target) - _parameters(target.get_decoder().layers)
    tokens = args.row_length * args.per_device_train_batch_size
    # One batch of hidden states is copied away while the next one is made.
    states = 4 * config.intermediate_size + 16 * config.hidden_size + 2 * config.hidden_size * num_states
    return size * outside + layer_size * _parameters(read), float(tokens * size * states)


def _quantised_bits(quantization: Any) -> float:
    """Bits of a quantised weight, scales included, from the field that names them; 16 where none does."""
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if values.get("load_in_4bit"):
        return 4.5
    if values.get("load_in_8bit") or values.get("quant_method") == "fp8":
        return 8.5
    return float(values.get("bits", 15.5)) + 0.5


def check_memory(plan: Plan, replan: Callable[..., Plan], num_visible: int) -> None:
    """Refuse, with a ValueError, a run that does not fit its GPUs; it names changes that were tried and help.

    `replan` makes the plan with some training arguments changed; `num_visible` GPUs are there.
    """
    assert plan.capacity is not None
    lacking = [need for need in plan.needs() if need.verdict(plan.capacity) == "does not fit"]
    if not lacking:
        return
    what = [
        f"{need.name} needs about {need.total / 1e9:.0f} GB ({need.exact / 1e9:.0f} GB exactly)" for need in lacking
    ]
    tried = [text for need in lacking for text in _remedies(plan, need.name, replan, num_visible)]
    raise ValueError(
        f"Layout {plan.layout} does not fit: {'; '.join(what)}, and a GPU has {plan.capacity / 1e9:.0f} GB. "
        f"{'What helps: ' + '; '.join(dict.fromkeys(tried)) + '. ' if tried else ''}"
        "If you know better, pass --check_memory false."
    )


def _remedies(plan: Plan, name: str, replan: Callable[..., Plan], num_visible: int) -> list[str]:
    """Changes of training arguments that make the device `name` fit, or at least need less."""
    changes: list[dict[str, Any]] = []
    if name != "drafter device":
        if plan.layout == "shared" and num_visible > 1:
            changes.append({"target_layout": "paired"})
        if num_visible > 2:
            changes.append({"target_layout": "spread"})
        changes.append({"target_model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}})
    if name != "target device":
        changes.append({"activation_checkpointing": True})
        changes += [{"max_anchors_per_row": int(plan.anchors_per_row) >> halvings} for halvings in (1, 2)]
    before = max(need.total for need in plan.needs() if need.name == name)
    texts = []
    for change in changes:
        needs = replan(**change).needs()
        need = next((need for need in needs if need.name == name), max(needs, key=lambda need: need.total))
        if need.total < before:
            ((key, value),) = change.items()
            words = f"{key} {value if isinstance(value, str) else json.dumps(value)}"
            texts.append(f"--{words} ({need.total / 1e9:.0f} GB: {need.verdict(plan.capacity or 0)})")
    return texts


def preflight(
    make_trainer: MakeTrainer,
    args: DFlashTrainingArguments,
    target: FrozenTarget,
    upload_to: str | None = None,
) -> dict[str, float]:
    """Try out copies, all-reduce, steps, evaluation, checkpoint, resume and upload: seconds of each check.

    They are written to `preflight.json` in the output folder too. A RuntimeError names the check that failed, why, and
    the way out.

    Args:
        make_trainer: Makes a trainer from arguments and data to evaluate on; the data are the run's own.
        args: The run's arguments; its output folder gets a folder `preflight`, which is removed at the end.
        target: The loaded target.
        upload_to: A folder or URL (`s3://...`) to upload to, by default `remote_checkpoint_dir` or the output folder;
            the Hub is tried too where `push_to_hub` is set.
    """
    output, source, is_main = Path(str(args.output_dir)), target.device, args.process_index == 0
    folder, report = output / "preflight", output / "preflight.json"
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
                raise RuntimeError(f"Preflight failed at: {name}. {error}{_advice(error)}") from error
            seconds[name] = time.perf_counter() - start
            if is_main:
                print(f"preflight: {name}: ok, {seconds[name]:.1f} s", flush=True)
    finally:
        if is_main:
            # After a failure too: its half checkpoints may be what fills the disk.
            shutil.rmtree(folder, ignore_errors=True)
    if is_main:
        output.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(seconds, indent=2))
        print(f"preflight: all {len(checks)} checks passed; their seconds are in {report}", flush=True)
    return seconds


def _advice(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ": free space, or give an output_dir on a larger disk."
    if isinstance(error, torch.OutOfMemoryError):
        return " Lower row_length, max_anchors_per_row or prefetch_depth, or set activation_checkpointing."
    return ""


def check_copy(source: torch.device, destination: torch.device, copies: str, num_bytes: int = COPY_BYTES) -> None:
    """Send random bytes the way hidden states go, and raise a RuntimeError where other bytes arrive."""
    expected = torch.randint(0, 2**31 - 1, (num_bytes // 4,), dtype=torch.int32)
    states = expected.to(source)
    target: Any = SimpleNamespace(device=source, context_hidden_states=lambda *args, **kwargs: states.clone())
    transfer = FeatureTransfer(target, [source], destination, copies)
    for _ in range(4):
        arrived = transfer.receive(transfer.run(torch.zeros(1, 1, dtype=torch.long), [[1]]))
        if not torch.equal(arrived.cpu(), expected):
            raise RuntimeError(
                f"Bytes copied from {source} to {destination} ({copies}) arrive changed, as hidden states would. Set "
                "feature_copies=host and NCCL_P2P_DISABLE=1, and look at the machine's IOMMU and ACS settings."
            )


def check_all_reduce(device: torch.device, seconds: float = ALL_REDUCE_SECONDS) -> None:
    """Add up a tensor over all ranks, and raise a RuntimeError where the sum is wrong.

    Where it does not come in time the process says so and ends: a group that hangs cannot be taken down in order.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    values = torch.full((2**22,), float(dist.get_rank() + 1), device=device)
    work: Any = dist.all_reduce(values, async_op=True)
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            said = f"Preflight failed at: all-reduce between the ranks. Nothing came in {seconds:.0f} s. Set "
            said += "NCCL_P2P_DISABLE=1 (and NCCL_IB_DISABLE=1 between machines without InfiniBand), and "
            print(f"{said}NCCL_DEBUG=INFO to see which connection waits.", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.01)
    work.wait()
    world = dist.get_world_size()
    if not bool((values == world * (world + 1) / 2).all()):
        raise RuntimeError("Sums over the ranks are wrong: set NCCL_P2P_DISABLE=1 and try again.")


class _OneCheckpoint(TrainerCallback):
    """Keeps Trainer from a checkpoint at the end too, which for a large drafter takes as long as all of the steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == args.save_steps


def check_training(make_trainer: MakeTrainer, args: DFlashTrainingArguments, folder: Path) -> None:
    """Three steps with an evaluation, a checkpoint after the second, and the third once more from the checkpoint."""
    short = copy.copy(args)
    for name, value in {
        "output_dir": str(folder), "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1,
        "eval_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False, "report_to": [],
        "eval_on_start": False, "logging_strategy": "steps", "save_only_model": False, "save_total_limit": None,
        # Steps of a preflight are no checkpoints of the run, nor do they go on from one.
        "remote_checkpoint_dir": None, "resume_from_checkpoint": None,
    }.items():  # fmt: skip
        setattr(short, name, value)

    def losses_from(checkpoint: str | None) -> tuple[Any, list[float]]:
        trainer: Any = make_trainer(short, None)
        trainer.add_callback(_OneCheckpoint())
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    trainer, losses = losses_from(None)
    documents = trainer.train_dataset.documents
    evaluated = trainer.evaluate([documents[i] for i in range(min(4, len(documents)))])["eval_loss"]
    if not all(map(math.isfinite, [*losses, evaluated])):
        raise RuntimeError(f"Losses {losses} and {evaluated} are not all finite: lower the learning rate.")
    # The optimizer of the first run is as large as that of the second.
    del trainer
    gc.collect()
    _, again = losses_from(str(folder / "checkpoint-2"))
    tolerance = 0 if args.device.type == "cpu" else 1e-2 * abs(losses[-1])
    if len(again) != len(losses) or abs(again[-1] - losses[-1]) > tolerance:
        raise RuntimeError(
            f"The step after the checkpoint had the loss {losses[-1]}, and {again[-1:]} after resuming. Check the "
            "disk, and that all ranks see the same output_dir."
        )


def check_upload(args: DFlashTrainingArguments, upload_to: str | None) -> None:
    """Write a small file where checkpoints will go, read it back and delete it; also on the Hub where it gets them."""
    if args.process_index != 0:
        return
    content = os.urandom(1024)
    place = upload_to or args.remote_checkpoint_dir or str(Path(str(args.output_dir)).resolve())
    url = f"{place.rstrip('/')}/preflight-upload"
    try:
        with fsspec.open(url, "wb", auto_mkdir=True) as file:
            file.write(content)
        filesystem, path = fsspec.core.url_to_fs(url)
        came_back = filesystem.cat_file(path)
        filesystem.rm(path)
    except (OSError, ImportError, ValueError) as error:
        raise RuntimeError(
            f"{url} cannot be written and read ({error}). Check the credentials, the bucket and the fsspec package."
        ) from error
    if came_back != content:
        raise RuntimeError(f"{url} gives back other bytes than were written; use another place.")
    if args.push_to_hub:
        api, name = HfApi(token=args.hub_token), args.hub_model_id or Path(str(args.output_dir)).name
        repo = api.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        api.upload_file(path_or_fileobj=content, path_in_repo="preflight-upload", repo_id=repo)
        api.delete_file("preflight-upload", repo_id=repo)


class RanksDifferError(RuntimeError):
    """The ranks of a run train different drafters, which data parallel training keeps equal to the last bit."""


def check_ranks(every_steps: int, world_size: int) -> None:
    """Refuse, with a ValueError, a comparison of ranks where there is one rank."""
    if world_size < 2:
        raise ValueError(
            f"compare_ranks_steps is {every_steps}, but this run is a single process, whose weights have nothing to "
            "be compared with. Leave it out, or start several ranks (--config_file recipes/accelerate/two_pairs.yaml)."
        )


def rank_differences(model: nn.Module) -> dict[str, float]:
    """Largest absolute difference of each trainable parameter from rank 0's, over all ranks and the same on each.

    Every rank calls this at the same point. A NaN is equal to a NaN. It takes the memory of a few copies of the
    largest parameter, and waits for the device once.
    """
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    largest = []
    for mine in named.values():
        first = mine.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, src=0)
        same = (mine == first) | (mine.isnan() & first.isnan())
        difference = first.float().sub_(mine.float()).abs_().masked_fill_(same, 0.0).max()
        # The maximum over the ranks of a NaN is undefined.
        largest.append(difference.nan_to_num(nan=LARGEST, posinf=LARGEST))
    differences = torch.stack(largest)
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    return dict(zip(named, differences.tolist(), strict=True))


class RanksCallback(TrainerCallback):
    """Compares the drafter's weights over the ranks and ends the run on every rank where they are not equal.

    After each comparison `ranks.json` in `folder` holds the `steps` compared since this start, the
    `largest_difference` in each and the `world_size`.
    `pause` is called after a comparison, which is no part of a step that is timed. [`RanksDifferError`] comes on every
    rank, after a step whose weights differ; at the start of training a ValueError, where there is one rank.
    """

    def __init__(self, folder: str | Path, every_steps: int, pause: Callable[[], None] = lambda: None):
        self.path = Path(folder) / RANKS_NAME
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
            found = {"steps": self.steps, "largest_difference": self.largest_difference, "world_size": args.world_size}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(found, indent=2) + "\n")
            # Who asked for the comparison is to see it; what is merely information is not shown by default.
            logger.warning(
                f"Step {state.global_step}: the largest difference of the drafter's {len(differences)} trainable "
                f"parameters between the {args.world_size} ranks is {differences[name]:g}."
            )
        if differences[name] > 0:
            different = sum(value > 0 for value in differences.values())
            raise RanksDifferError(
                f"After step {state.global_step} the ranks hold different weights: {name} differs by up to "
                f"{differences[name]:g}, {different} of {len(differences)} trainable parameters differ. Set "
                "NCCL_P2P_DISABLE=1, try --preflight true, and go on from a checkpoint before the first difference."
            )
        self.pause()
