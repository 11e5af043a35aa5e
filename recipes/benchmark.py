# SPDX-License-Identifier: Apache-2.0
"""Time the target, the transfer, the drafter's step and the whole step on the devices that are there.

    python recipes/benchmark.py                                  # a tiny shape, also without a GPU
    python recipes/benchmark.py --shape qwen3.6-27b --cases 2048x512,8192x512,8192x1536 --compile --output results.json
    python recipes/benchmark.py --shape qwen3.6-27b --sweep --compile --output sweep.json
    python recipes/benchmark.py --shape smollm2-135m --parts target --num_documents 32 --cases 2048x256,8192x256

Weights and tokens are random. Time is the median over repeats; the first step, with compilation, is reported apart.
Results are printed and, after every part, written as JSON. That the step is right is what the tests are for: they hold
it against a naive twin. Shapes: T tokens of a row, N anchors, b block size, K taps, D hidden size.
"""

import gc
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_hf import DataCollatorForDFlash, DFlash2DraftModel, DFlashDraftConfig, DFlashDraftModel, FrozenTarget
from dflash_hf.cli import parse_config
from dflash_hf.data_collator import IGNORE_INDEX
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import DPace, drafter_loss, make_objective
from dflash_hf.operations import Operations, batch_operations, drafter_weights, passed_weights, product_rate
from dflash_hf.optimizers import MuonWithAdamW
from dflash_hf.packed_targets import PackedDense
from dflash_hf.selector_losses import selector_terms
from dflash_hf.trainer import add_context_noise, compile_layers


PARTS = ("target", "transfer", "drafter", "step")
# The others compare with the target's distribution, which the drafter's part does not have.
OBJECTIVES = ("cross_entropy", "dpace")
SLIDING, FULL = "sliding_attention", "full_attention"
ONE_BY_ONE = "target, documents one by one"


# --- Shapes, weights and batches


@dataclass(frozen=True)
class Case:
    """One row of tokens and the blocks drafted from it."""

    num_tokens: int
    num_anchors: int

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.num_anchors}"

    @staticmethod
    def parse(text: str) -> "Case":
        tokens, _, anchors = text.strip().partition("x")
        if not (tokens.isdigit() and anchors.isdigit() and int(tokens) and int(anchors)):
            raise ValueError(f"The case {text!r} should be TOKENSxANCHORS, for example 2048x512.")
        return Case(int(tokens), int(anchors))


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim",)


def sized(*values: int) -> dict[str, int]:
    """Values of the fields named `SIZES`."""
    return dict(zip(SIZES, values, strict=True))


@dataclass(frozen=True)
class Shape:
    """A drafter's and its target's configuration, its usual case, and tokens and anchors that a sweep goes through."""

    target: PreTrainedConfig
    drafter: dict[str, Any]
    case: Case
    lengths: list[int]
    anchors: list[int]

    @property
    def sweep(self) -> list[Case]:
        """Rows of growing length with the same anchors, then growing anchors with the same row."""
        tokens, anchors = self.lengths[(len(self.lengths) - 1) // 2], self.anchors[1]
        cases = [Case(n, anchors) for n in self.lengths] + [Case(tokens, n) for n in self.anchors]
        return list(dict.fromkeys(cases))


# A tiny shape, SmolLM2-135M as a small dense target, and the published drafter of Qwen3.6-27B.
SHAPES = {
    "tiny": Shape(
        Qwen3Config(vocab_size=272, tie_word_embeddings=False, **sized(64, 96, 6, 2, 1, 32)),
        sized(64, 128, 2, 4, 2, 16)
        | {"sliding_window": 32, "block_size": 4, "target_layer_ids": [1, 3], "mask_token_id": 270},
        Case(128, 16),
        [64, 128, 256],
        [8, 16, 32],
    ),
    "smollm2-135m": Shape(
        LlamaConfig(
            vocab_size=49152,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            **sized(576, 1536, 30, 9, 3, 64),
        ),
        sized(576, 1536, 5, 9, 3, 64)
        | {"sliding_window": 2048, "block_size": 8, "target_layer_ids": [1, 8, 14, 20, 27], "mask_token_id": 15},
        Case(2048, 256),
        [1024, 2048, 4096, 8192],
        [128, 256, 512],
    ),
    "qwen3.6-27b": Shape(
        Qwen3_5TextConfig(
            vocab_size=248320,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=False,
            **sized(5120, 17408, 64, 24, 4, 256),
        ),
        sized(5120, 17408, 5, 32, 8, 128)
        | {"sliding_window": 2048, "block_size": 16, "target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070},
        Case(2048, 512),
        [2048, 4096, 8192, 16384, 32768],
        [256, 512, 1024, 2048, 4096],
    ),
}


def make_drafter(shape: Shape, device: torch.device, full_attention: bool = False) -> DFlashDraftModel:
    """A random drafter with fp32 masters whose values bf16 can hold, so that bf16 copies of them are equal."""
    fields, layers = dict(shape.drafter), shape.drafter["num_hidden_layers"]
    fields["layer_types"] = [SLIDING] * (layers - 1) + [FULL]
    if full_attention:
        fields |= {"layer_types": [FULL] * layers, "sliding_window": None}
    config = DFlashDraftConfig(
        **fields,
        use_sliding_window=not full_attention,
        vocab_size=shape.target.vocab_size,
        num_target_layers=shape.target.num_hidden_layers,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        attn_implementation="flex_attention" if device.type == "cuda" else "sdpa",
    )
    with device:
        drafter = DFlashDraftModel(config).train()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    return drafter


def make_head(shape: Shape, device: torch.device, dtype: torch.dtype) -> FrozenHead:
    """The embedding and head of a random target without its layers."""
    sizes = sized(shape.target.hidden_size, 8, 1, 1, 1, 8)
    config = Qwen3Config(vocab_size=shape.target.vocab_size, tie_word_embeddings=False, **sizes)
    with device:
        return FrozenHead(AutoModelForCausalLM.from_config(config, dtype=dtype), device)


def make_batch(
    case: Case, config: DFlashDraftConfig, device: torch.device, num_documents: int = 1, seed: int = 0
) -> dict[str, Any]:
    """One row of random tokens as the training's collator makes it, and `loss_mask` `[1, T]`, what is supervised.

    No answer reaches into the last block of its document, so that every block lies within the row.

    Raises:
        ValueError: When the row has no room for so many anchors in so many documents.
    """
    block_size, vocab_size = config.block_size or 0, config.vocab_size or 0
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (case.num_tokens,), generator=generator)
    # They differ by one token at most.
    lengths = [(case.num_tokens + i) // num_documents for i in range(num_documents)]
    room = sum(max(0, length - block_size - 1) for length in lengths)
    if room < case.num_anchors:
        raise ValueError(f"The case {case} has room for {room} anchors in {num_documents} documents. Give fewer.")
    documents = [
        {"document": i, "input_ids": part.tolist(), "supervised_spans": [[0, len(part) - block_size]]}
        for i, part in enumerate(torch.split(ids, lengths))
    ]
    collator = DataCollatorForDFlash(block_size, case.num_anchors, seed, case.num_anchors)
    batch = collator([{"epoch": 0, "documents": documents}])
    mask = [torch.arange(length) < length - block_size for length in lengths]
    batch["loss_mask"] = torch.cat(mask)[None].float()
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def uneven_lengths(num_tokens: int, num_documents: int, seed: int = 0) -> list[int]:
    """Tokens of documents that share a row, short ones more often than long ones."""
    generator = torch.Generator().manual_seed(seed)
    cuts = 1 + torch.randperm(num_tokens - 1, generator=generator)[: num_documents - 1]
    borders = [0, *cuts.sort().values.tolist(), num_tokens]
    return [stop - start for start, stop in pairwise(borders)]


def step_operations(
    drafter: DFlashDraftModel, batch: dict[str, Any], target: FrozenTarget | None = None
) -> Operations:
    """Operations of a step on a batch; the target's where it is given."""
    config: Any = drafter.config
    weights = 0
    if target is not None:
        weights = passed_weights(target.layers, target.model.config.get_text_config(decoder=True))
    head = config.vocab_size * config.hidden_size
    return batch_operations(drafter_weights(drafter), head, batch, target_weights=weights)


# --- Seconds and bytes


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


def profile(side: Side, device: torch.device) -> str:
    """One step by kernel (by operator on CPU), the longest first, as a table."""
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    with torch.profiler.profile(activities=activities) as profiler:
        timed(side, device)
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=100)


# --- The drafter's step, as the trainer runs it


def _adamw_8bit(parameters: list[nn.Parameter], fused: bool) -> Optimizer:
    from torchao.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(parameters, lr=0.0, weight_decay=0.0)
    return optimizer


# As the trainer makes them of `optim: adamw_torch_fused`, `muon: true` and `optim: adamw_torch_8bit`. A rate of 0
# takes as long as any other and leaves all repeats and peers the same weights.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], bool], Optimizer]] = {
    "adamw": lambda parameters, fused: AdamW(parameters, lr=0.0, weight_decay=0.0, fused=fused),
    "muon": lambda parameters, fused: MuonWithAdamW(parameters, lr=0.0, fused=fused),
    "adamw_8bit": _adamw_8bit,
}


def state_tensors(optimizer: Optimizer | None) -> list[torch.Tensor]:
    """What an optimizer keeps between steps, quantised states as the plain tensors that they consist of."""
    states = [] if optimizer is None else optimizer.state.values()
    return [part for state in states for tensor in state.values() for part in _parts(tensor)]


def _parts(tensor: Any) -> list[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        return []
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


class DrafterStep:
    """Forward and backward of the drafter on one batch; with an optimizer, clipping and its step too.

    Args:
        drafter: The drafter with fp32 masters on its device.
        head: The target's embedding and head there.
        args: The benchmark's arguments.
        batch: A batch of the collator there.
        context: The target's hidden states `[1, T, K * D]` there, as the target gives them.
        mixed_precision: Whether the forward runs under bf16 autocast, as with the trainer's `bf16=True`.
        optimizer: Name of the optimizer whose step belongs to it.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        head: FrozenHead,
        args: "BenchmarkArguments",
        batch: dict[str, Any],
        context: torch.Tensor,
        mixed_precision: bool,
        optimizer: str | None = None,
    ):
        self.drafter, self.head, self.batch, self.context = drafter, head, batch, context
        self.objective = make_objective(args.objective, drafter.config.block_size or 0)
        self.context_noise = args.context_noise
        self.dtype = torch.bfloat16 if mixed_precision else torch.float32
        if args.activation_checkpointing:
            drafter.activation_checkpointing_enable()
        if args.compile:
            compile_layers(drafter)
        self.model: Any = drafter
        if mixed_precision:
            # As accelerate prepares it for the trainer: autocast around the forward, fp32 out of it.
            autocast = torch.autocast(context.device.type, torch.bfloat16)
            self.model = convert_outputs_to_fp32(autocast(drafter.forward))
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = OPTIMIZERS[optimizer](list(drafter.parameters()), context.device.type == "cuda")

    def __call__(self, context: torch.Tensor | None = None) -> torch.Tensor:
        """The normalised loss, as `DFlashTrainer.compute_loss` has it from the hidden states on, and its gradients."""
        context = self.context if context is None else context
        if self.context_noise > 0:
            noise = (self.batch["document_lengths"], self.batch["noise_seeds"], self.context_noise, self.dtype)
            context = add_context_noise(context, *noise)
        config: Any = self.drafter.config
        given = (config, self.batch, context.to(self.dtype), self.head, self.objective)
        loss, _, _ = drafter_loss(self.model, *given, selection=selector_terms(self.drafter, self.batch))
        normalizer = self.objective.normalizer(self.batch["labels"][..., 1:] != IGNORE_INDEX)
        loss = loss / normalizer.clamp(min=1e-12)
        loss.backward()
        if self.optimizer is not None:
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
        return loss.detach()

    def side(self, name: str, step: Any = None, others: Sequence[torch.Tensor] = ()) -> Side:
        """This step, or one around it, for timing; `others` are further tensors that it needs on the device."""
        tensors = [t for t in self.batch.values() if isinstance(t, torch.Tensor)]
        head = [*self.head.embedding.parameters(), *self.head.head.parameters()]
        shared = num_bytes([self.context, *tensors, *head, *others])
        return Side(name, step or self, list(self.drafter.parameters()), shared, lambda: state_tensors(self.optimizer))


# --- The target and the way from it to the drafter


def make_targets(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[FrozenTarget, FrozenTarget | None]:
    """A random target of the shape, without the layers that no tap needs, and its twin.

    The twin runs the same layers with a call of attention for each document; None where not all attention is full.
    """
    with device:
        model = AutoModelForCausalLM.from_config(shape.target, dtype=dtype)
    taps = shape.drafter["target_layer_ids"]
    target = FrozenTarget(model, taps, compile_target=True)
    twin = FrozenTarget(model, taps, packed=True) if PackedDense.fits(model.get_decoder()) else None
    del model.get_decoder().layers[taps[-1] + 1 :]
    return target, twin


def target_side(target: FrozenTarget, input_ids: torch.Tensor, lengths: list[list[int]], name: str = "target") -> Side:
    """The target's forward to the hidden states of a batch."""
    input_ids = input_ids.to(target.device)
    shared = num_bytes(list(target.model.parameters()))
    return Side(name, lambda: target.context_hidden_states(input_ids, lengths), (), shared)


def transfer_side(context: torch.Tensor, source: torch.device, device: torch.device) -> Side:
    """The hidden states' way from the target's device: straight, or through pinned memory on a single GPU."""
    states = context.to(source, copy=True)
    if source != device:
        return Side("transfer", lambda: states.to(device, non_blocking=True), (), num_bytes([states]))
    if device.type != "cuda":
        return Side("transfer", states.clone, (), num_bytes([states]))
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)

    def through_host():
        host.copy_(states, non_blocking=True)
        return host.to(device, non_blocking=True)

    return Side("transfer", through_host, (), num_bytes([states]))


def step_side(target: FrozenTarget, drafter_step: DrafterStep) -> Side:
    """Target, transfer, drafter and optimizer one after the other, launched without waiting in between."""
    input_ids = drafter_step.batch["input_ids"].to(target.device)
    lengths, device = drafter_step.batch["document_lengths"], drafter_step.context.device

    def step():
        context = target.context_hidden_states(input_ids, lengths)
        return drafter_step(context.to(device, non_blocking=True))

    here = list(target.model.parameters()) if target.device == device else []
    return drafter_step.side("step", step, here)


# --- A peer: the same step, weights, tokens and anchors through SpecForge 0.2.0, which is no requirement. It draws its
# anchors itself, so it gets ours by a subclass. What differs is left as it is: it trains bf16 weights, and multiplies
# the anchors' own slots with the head.


class PeerStep:
    """A peer's forward and backward; `factor` makes its loss and gradients ours."""

    def __init__(self, model: nn.Module, frozen: nn.Module, loss: Callable[[], torch.Tensor], tensors: list[Any]):
        self.model, self.frozen, self.loss, self.tensors, self.factor = model, frozen, loss, tensors, 1.0

    def __call__(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        return loss.detach() * self.factor

    def side(self, name: str) -> Side:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        frozen = [p for p in self.frozen.parameters() if not p.requires_grad]
        tensors = [t for t in self.tensors if isinstance(t, torch.Tensor)]
        return Side(name, self, trained, num_bytes([*frozen, *tensors]))


def specforge_step(ours: DrafterStep) -> PeerStep:
    """SpecForge's online DFlash model, in the type that its trainer uses on the device."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDrafter

    own: Any = ours.drafter.config
    objective: Any = ours.objective
    batch, device = ours.batch, ours.context.device
    anchors = batch["anchor_positions"]

    class FixedAnchors(OnlineDFlashModel):
        def _sample_anchor_positions(self, seq_len, loss_mask, device):
            return anchors, torch.ones_like(anchors, dtype=torch.bool)

    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    dflash = {"mask_token_id": own.mask_token_id, "target_layer_ids": own.target_layer_ids}
    sizes = {"block_size": own.block_size, "num_target_layers": own.num_target_layers}
    same = (*SIZES, "vocab_size", "rms_norm_eps", "sliding_window", "layer_types", "use_sliding_window")
    config = Qwen3Config(
        **{name: vars(own)[name] for name in same},
        **sizes,
        rope_parameters=dict(own.rope_parameters),
        dflash_config=dflash,
        attn_implementation=attention,
    )
    with device:
        model = SpecForgeDrafter(config).train()
    model.load_state_dict(ours.drafter.state_dict())
    if ours.dtype == torch.bfloat16:
        model.to(torch.bfloat16)
        with device:
            # The cast rounds the rotary frequencies too, which would change the loss but not the time.
            model.rotary_emb = Qwen3RotaryEmbedding(config)
    online = FixedAnchors(
        model,
        ours.head.head,
        ours.head.embedding,
        mask_token_id=own.mask_token_id,
        block_size=own.block_size,
        attention_backend=attention,
        num_anchors=anchors.shape[1],
        **(
            {"loss_type": "dpace", "dpace_alpha": objective.alpha}
            if isinstance(objective, DPace)
            else {"loss_type": "dflash", "loss_decay_gamma": objective.gamma}
        ),
    )
    inputs = (batch["input_ids"], ours.context, batch["loss_mask"])
    step = PeerStep(model, online, lambda: online(*inputs)[0], [ours.context, *batch.values()])
    if isinstance(objective, DPace):
        # Its sum is divided by the rows there and by the counted slots here.
        step.factor = 1.0 / (batch["labels"][..., 1:] != IGNORE_INDEX).sum().item()
    return step


PEERS = {"specforge": specforge_step}


def compare(ours: DrafterStep, peer: PeerStep) -> dict[str, Any]:
    """Losses and gradients of both sides for the same weights, tokens and anchors; equal to the type's rounding."""
    ours.drafter.zero_grad(set_to_none=True)
    noise, ours.context_noise = ours.context_noise, 0.0
    loss, peer_loss = ours().item(), peer().item()
    ours.context_noise = noise
    theirs, last = dict(peer.model.named_parameters()), len(ours.drafter.layers) - 1
    # The first and the last that a gradient reaches, and some between.
    names = ["fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_norm.weight"]
    names += [f"layers.{last}.self_attn.v_proj.weight", f"layers.{last}.mlp.down_proj.weight"]
    differences = {}
    for name in names:
        expected, found = ours.drafter.get_parameter(name).grad, theirs[name].grad
        assert expected is not None and found is not None
        differences[name] = relative_difference(found.float() * peer.factor, expected)
    for model in (ours.drafter, peer.model):
        model.zero_grad(set_to_none=True)
    difference = abs(loss - peer_loss) / abs(loss)
    return {
        "loss": loss,
        "peer_loss": peer_loss,
        "relative_loss_difference": difference,
        "relative_gradient_differences": differences,
        "equal": difference <= (2e-3 if ours.dtype == torch.bfloat16 else 1e-5) and math.isfinite(loss),
    }


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()


# --- The program


@dataclass
class BenchmarkArguments:
    """What is timed, at which shape, and how often."""

    shape: str | None = field(
        default=None, metadata={"help": f"{', '.join(SHAPES)}; by default the last on a GPU, else the first."}
    )
    parts: str = field(default="drafter", metadata={"help": f"Commas between some of {', '.join(PARTS)}."})
    cases: str | None = field(
        default=None, metadata={"help": "Rows to time, TOKENSxANCHORS: 2048x512,8192x1536; the shape's own if unset."}
    )
    sweep: bool = field(default=False, metadata={"help": "Rows and anchors from small to large, as a table."})
    num_documents: int = field(default=1, metadata={"help": "Documents of the row."})
    objective: str = field(default="cross_entropy", metadata={"choices": [*OBJECTIVES], "help": "Of the drafter."})
    context_noise: float = field(default=0.0, metadata={"help": "Half-width of the noise on the hidden states."})
    full_attention: bool = field(default=False, metadata={"help": "Make all layers of the drafter full."})
    activation_checkpointing: bool = field(default=False, metadata={"help": "Compute layers again in the backward."})
    bf16: bool | None = field(
        default=None, metadata={"help": "bf16 autocast over fp32 masters, a bf16 target; by default on a GPU."}
    )
    compile: bool = field(default=False, metadata={"help": "Compile the drafter's layers, as training on a GPU does."})
    optimizer: str | None = field(
        default=None,
        metadata={
            "nargs": "?",
            "const": "adamw",
            "help": f"Also time the step with clipping and some of {', '.join(OPTIMIZERS)} (adamw if none is named).",
        },
    )
    peers: str | None = field(default=None, metadata={"help": f"Commas between some of {', '.join(PEERS)}."})
    dflash2_rank: int = field(default=0, metadata={"help": "Also time DFlash 2, its selector of this rank."})
    repeats: int = field(default=10, metadata={"help": "Timed steps, of which the median is reported."})
    warmup: int = field(default=2, metadata={"help": "Steps between the first one and those that are timed."})
    profile: bool = field(default=False, metadata={"help": "Also list the drafter's step by kernel."})
    epoch_tokens: float = field(default=1.64e9, metadata={"help": "Tokens of an epoch, for its hours."})
    device: str | None = field(default=None, metadata={"help": "The drafter's device; a GPU if any."})
    target_device: str | None = field(default=None, metadata={"help": "The target's device; the second GPU if any."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the results."})

    def __post_init__(self) -> None:
        for name, known in (("parts", PARTS), ("peers", PEERS), ("optimizer", OPTIMIZERS), ("shape", SHAPES)):
            unknown = set(words(vars(self)[name])) - set(known)
            if unknown:
                raise ValueError(f"{name} has {sorted(unknown)}; choose from {', '.join(known)}.")
        if self.repeats < 1 or self.num_documents < 1:
            raise ValueError(f"repeats is {self.repeats}, num_documents {self.num_documents}; expected at least 1.")
        if "specforge" in words(self.peers) and self.num_documents > 1:
            raise ValueError(f"num_documents is {self.num_documents}; specforge would let documents see each other.")
        # What is wrong or missing would else show only after the first case's compilation.
        for case in words(self.cases):
            Case.parse(case)
        needed = [*words(self.peers), *(["torchao"] if "adamw_8bit" in words(self.optimizer) else [])]
        for module in needed:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"{module} is not installed; recipes/qwen3.6-27b/README.md says how.")


def words(text: str | None) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


class Benchmark:
    """One run: its settings, its devices, and the results so far."""

    def __init__(self, args: BenchmarkArguments):
        self.args = args
        self.device = torch.device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        cuda = self.device.type == "cuda"
        several = cuda and torch.cuda.device_count() > 1
        self.target_device = torch.device(args.target_device or ("cuda:1" if several else self.device))
        self.mixed_precision = cuda if args.bf16 is None else args.bf16
        self.dtype = torch.bfloat16 if self.mixed_precision else torch.float32
        shape_name = args.shape or ("qwen3.6-27b" if cuda else "tiny")
        self.shape = SHAPES[shape_name]
        given = [Case.parse(word) for word in words(args.cases)] or [self.shape.case]
        self.cases = self.shape.sweep if args.sweep else given
        self.results: dict[str, Any] = {"arguments": asdict(args), "shape": shape_name, "rows": []}
        self.write()
        torch.manual_seed(0)
        self.rate = product_rate(self.device)
        self.results["device"] = torch.cuda.get_device_name(self.device) if cuda else "cpu"
        self.results |= {"torch": torch.__version__, "transformers": transformers.__version__}
        self.results["product_tflops"] = self.rate / 1e12
        print(f"{self.results['device']}, torch {torch.__version__}, shape {shape_name}, {self.dtype}")
        print(f"A square matrix product runs at {self.rate / 1e12:.4g} TFLOP/s.")

    def write(self) -> None:
        """Replace the output file whole: a run that is killed leaves the rows it had."""
        if self.args.output:
            path = Path(self.args.output)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.part")
            aside.write_text(json.dumps(self.results, indent=1) + "\n")
            os.replace(aside, path)

    def add(self, case: Case, part: str, measured: dict[str, Any], work: float | None = None, **more: Any) -> None:
        """Add a row to the results, print it and write the file."""
        tokens = case.num_tokens / measured["seconds"]
        row = {"case": str(case), "num_tokens": case.num_tokens, "num_anchors": case.num_anchors, "part": part}
        row |= measured | {"tokens_per_second": tokens, "hours_per_epoch": self.args.epoch_tokens / tokens / 3600}
        if part not in ("target", ONE_BY_ONE, "transfer"):
            row["anchors_per_second"] = case.num_anchors / measured["seconds"]
        if work is not None:
            row |= {"tflop": work / 1e12, "share_of_product": work / measured["seconds"] / self.rate}
        row |= more
        self.results["rows"].append(row)
        told = {name: value for name, value in more.items() if isinstance(value, float)}
        comparison = more.get("comparison")
        if comparison is not None:
            told |= {name: comparison[name] for name in ("loss", "peer_loss", "equal")}
        said = "".join(f", {name} {value:.6g}" for name, value in told.items())
        print(f"{case!s:>10} {part}: {row['seconds']:.4g} s, {tokens:,.0f} tokens/s{said}", flush=True)
        self.write()

    def measure(self, sides: list[Side], device: torch.device | None = None) -> dict[str, dict[str, Any]]:
        return measure(sides, self.args.repeats, self.args.warmup, device or self.device)

    def run(self) -> dict[str, Any]:
        parts = words(self.args.parts)
        if "drafter" in parts:
            drafter = make_drafter(self.shape, self.device, self.args.full_attention)
            head = make_head(self.shape, self.device, self.dtype)
            for case in self.cases:
                self.drafter_part(case, drafter, head)
            del drafter, head
        if {"target", "transfer", "step"} & set(parts):
            # Compiled layers hold themselves in cycles; the target needs their memory.
            gc.collect()
            torch.cuda.empty_cache()
            self.target_parts(parts)
        return self.results

    def drafter_step(
        self, drafter: DFlashDraftModel, head: FrozenHead, case: Case, optimizer: str | None = None
    ) -> DrafterStep:
        batch, context = self.inputs(case, drafter.config)
        return DrafterStep(drafter, head, self.args, batch, context, self.mixed_precision, optimizer)

    def inputs(self, case: Case, config: Any) -> tuple[dict[str, Any], torch.Tensor]:
        """A batch and hidden states for it."""
        batch = make_batch(case, config, self.device, self.args.num_documents)
        width = len(config.target_layer_ids) * config.hidden_size
        return batch, torch.randn(1, case.num_tokens, width, device=self.device, dtype=self.dtype)

    def drafter_part(self, case: Case, drafter: DFlashDraftModel, head: FrozenHead) -> None:
        """Time the drafter's step of one case in turns with the peers', then with optimizers."""
        # Compiled anew for every case, as training at that shape would be.
        torch.compiler.reset()
        ours = self.drafter_step(drafter, head, case)
        work = step_operations(drafter, ours.batch).drafter
        peers = {name: PEERS[name](ours) for name in words(self.args.peers)}
        if self.args.dflash2_rank:
            grown = DFlash2DraftModel.from_dflash(drafter, selector_rank=self.args.dflash2_rank)
            self.grown_part(case, ours, self.drafter_step(grown, head, case))
        measured = self.measure([ours.side("drafter"), *(peer.side(name) for name, peer in peers.items())])
        equal = {name: compare(ours, peer) for name, peer in peers.items()}
        self.add(case, "drafter", measured["drafter"], work)
        for name, comparison in equal.items():
            ratio = measured["drafter"]["seconds"] / measured[name]["seconds"]
            self.add(case, name, measured[name], work, comparison=comparison, drafter_time_over_this=ratio)
            if not comparison["equal"]:
                raise ValueError(f"{name} computes another loss for the same work, so its time compares nothing.")
        if self.args.profile:
            print(profile(ours.side("drafter"), self.device))
        peers.clear()
        for optimizer in words(self.args.optimizer):
            name, whole = f"drafter+{optimizer}", self.drafter_step(drafter, head, case, optimizer)
            result = self.measure([whole.side(name)])[name]
            added = result["seconds"] / measured["drafter"]["seconds"] - 1
            held = num_bytes(state_tensors(whole.optimizer))
            self.add(case, name, result, work, optimizer_adds=added, optimizer_state_bytes=held)

    def grown_part(self, case: Case, ours: DrafterStep, grown: DrafterStep) -> None:
        """Time DFlash's step and that of the DFlash 2 drafter which it becomes, in turns."""
        measured = self.measure([ours.side("dflash"), grown.side("dflash2")])
        ratio = measured["dflash2"]["seconds"] / measured["dflash"]["seconds"]
        self.add(case, "dflash2", measured["dflash2"], time_over_dflash=ratio)

    def target_parts(self, parts: list[str]) -> None:
        """Time the target, the transfer and the whole step, for all cases, with one target."""
        target, twin = make_targets(self.shape, self.target_device, self.dtype)
        drafter = make_drafter(self.shape, torch.device("meta"), self.args.full_attention)
        for case in self.cases:
            batch, context = self.inputs(case, drafter.config)
            if "target" in parts:
                self.target_part(case, target, twin, batch, step_operations(drafter, batch, target).target)
            if "transfer" in parts:
                result = self.measure([transfer_side(context, self.target_device, self.device)])["transfer"]
                gigabytes = context.numel() * context.element_size() / 1e9
                self.add(case, "transfer", result, gb_per_second=gigabytes / result["seconds"])
        if "step" in parts:
            drafter = make_drafter(self.shape, self.device, self.args.full_attention)
            head = FrozenHead(target.model, self.device)
            for case in self.cases:
                torch.compiler.reset()
                step = self.drafter_step(drafter, head, case, (words(self.args.optimizer) or ["adamw"])[0])
                work = step_operations(drafter, step.batch, target)
                measured = self.measure([step_side(target, step)])["step"]
                self.add(case, "step", measured, work.target + work.drafter)

    def target_part(
        self, case: Case, target: FrozenTarget, twin: FrozenTarget | None, batch: dict[str, Any], work: float
    ) -> None:
        """Time the target's forward, in turns with its twin where there is one."""
        ids, lengths = batch["input_ids"], batch["document_lengths"]
        if twin is None:
            result = self.measure([target_side(target, ids, lengths)], self.target_device)
            self.add(case, "target", result["target"], work)
            return
        # Neighbours of one length share a call of the twin, which documents of real data seldom do.
        lengths = [uneven_lengths(case.num_tokens, self.args.num_documents)]
        sides = [target_side(target, ids, lengths), target_side(twin, ids, lengths, ONE_BY_ONE)]
        result = self.measure(sides, self.target_device)
        ratio = result["target"]["seconds"] / result[ONE_BY_ONE]["seconds"]
        features, expected = (one.context_hidden_states(ids, lengths) for one in (target, twin))
        more = {"target_time_over_this": ratio, "feature_difference": relative_difference(features, expected)}
        self.add(case, "target", result["target"], work)
        self.add(case, ONE_BY_ONE, result[ONE_BY_ONE], work, **more)


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| tokens | anchors | part | time | tokens/s | per anchor | of product | peak memory | first step | h/epoch |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        anchors, share, memory = row.get("anchors_per_second"), row.get("share_of_product"), row["peak_memory_gb"]
        cells = [f"{row['num_tokens']:,}", f"{row['num_anchors']:,}", row["part"], f"{row['seconds']:.4g} s"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{1e3 / anchors:.3g} ms" if anchors else ""]
        cells += ["" if share is None else f"{share:.1%}", "" if memory is None else f"{memory:.1f} GB"]
        cells += [f"{row['first_step_seconds']:.3g} s", f"{row['hours_per_epoch']:.4g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = parse_config(BenchmarkArguments, argv, description=(__doc__ or "").split("\n")[0])
    results = Benchmark(args).run()
    print("\n" + table(results["rows"]))
    return results


if __name__ == "__main__":
    main()
