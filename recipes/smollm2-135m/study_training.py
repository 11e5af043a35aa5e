# SPDX-License-Identifier: Apache-2.0
"""One run of the study: the trainer's step over hidden states that are at hand, and the walk at a few points.

The step is that of `DFlashTrainer` without its loop: the same collator, masks, loss, clipping, optimizer and schedule.
"""

import importlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from study_batches import Batches, on_device
from study_features import Features
from study_start import starting_weights
from torch import nn
from transformers import get_scheduler

from dflash_hf import DFlashDraftModel
from dflash_hf.acceptance import WalkSums, walk_batch
from dflash_hf.data_collator import DataCollatorForDFlash
from dflash_hf.frozen_target import FrozenHead, FrozenTarget
from dflash_hf.losses import BlockSums, drafter_loss, make_objective
from dflash_hf.optimizers import MuonWithAdamW
from dflash_hf.packing import PackedDataset
from dflash_hf.trainer import add_context_noise


@dataclass(frozen=True)
class Run:
    """The settings of one run; defaults are those of the reference.

    Args:
        name: Name in the table.
        reason: Why it is tried.
        seed: Of weights, order, anchors and noise.
        steps: Optimizer steps, over which the schedule goes.
        objective, gamma, alpha, slot_weights, temperature, cross_entropy_share: As for [`make_objective`].
        rows: Rows of a step.
        row_length: Tokens of a row.
        num_anchors: Anchors per document.
        row_anchors: Cap on the anchors of a row; `num_anchors` by default.
        padded_anchors: Anchors that every row is padded to; `row_anchors` by default. Runs that agree in it, and in
            rows and their length, share the compiled layers.
        packed: Whether documents share rows.
        context_noise: Half-width of the noise on the context.
        learning_rate, weight_decay, beta2, max_grad_norm: Of the optimizer.
        muon: Whether Muon steps the matrices.
        eight_bit: Whether AdamW keeps its state in 8 bits, by torchao.
        schedule: "cosine" or "warmup_stable_decay", which decays over the last `decay` of the steps.
        warmup: Share of the steps.
        ema: Decay of an average of the weights that is evaluated in their place; 0 for none.
        start: Weights to start from, see [`starting_weights`].
    """

    name: str
    reason: str = ""
    seed: int = 0
    steps: int = 256
    objective: str = "dpace"
    gamma: float | None = None
    alpha: float = 0.5
    slot_weights: str | None = None
    temperature: float = 1.0
    cross_entropy_share: float = 0.0
    rows: int = 32
    row_length: int = 512
    num_anchors: int = 128
    row_anchors: int | None = None
    padded_anchors: int | None = None
    packed: bool = False
    context_noise: float = 0.0
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    muon: bool = False
    eight_bit: bool = False
    schedule: str = "cosine"
    decay: float = 0.3
    warmup: float = 0.04
    ema: float = 0.0
    start: str = "random"

    @property
    def key(self) -> str:
        return f"{self.name}-s{self.seed}-{self.steps}"


class Study:
    """What all runs share: the target, its hidden states of all documents, and one compiled drafter.

    Args:
        target: The target, with `final_states`.
        drafter: A drafter on the device; its weights are replaced by each run's.
        train, dev: Documents with `input_ids` and `supervised_spans`.
        device: Where everything is.
        dev_row_length: Tokens of a row of the walk.
        dev_rows: Rows of a batch of the walk.
        dev_anchors: Blocks of a row that share a forward of the walk.
    """

    def __init__(
        self,
        target: FrozenTarget,
        drafter: DFlashDraftModel,
        train: Sequence[dict[str, Any]],
        dev: Sequence[dict[str, Any]],
        device: torch.device,
        dev_row_length: int = 1024,
        dev_rows: int = 16,
        dev_anchors: int = 256,
    ):
        self.target, self.drafter, self.device = target, drafter, device
        self.train, self.dev = train, dev
        self.config: Any = drafter.config
        self.head = FrozenHead(target.model, device)
        self.train_features = Features(target, train, device, "train")
        self.dev_features = Features(target, dev, device, "dev")
        self.dev_anchors = dev_anchors
        self.dev_batches = list(self._dev_batches(dev, dev_row_length, dev_rows))
        self._batches: dict[tuple, Batches] = {}

    def _dev_batches(self, dev: Sequence[dict[str, Any]], row_length: int, rows: int) -> Iterator[dict[str, Any]]:
        dataset = PackedDataset(dev, row_length)
        collator = DataCollatorForDFlash(self.config.block_size, num_anchors=1, row_length=row_length)
        collator.max_anchors_per_row = collator.pad_anchors_to_multiple_of = row_length // 4
        for first in range(0, len(dataset), rows):
            # The last batch is filled up with rows that were walked already, whose answers are left out again.
            batch = collator([dataset[row % len(dataset)] for row in range(first, first + rows)])
            batch["places"] = self.dev_features.places(batch)
            yield on_device(batch, self.device)

    def batches(self, run: Run) -> Batches:
        """The run's batches, shared with all runs of the same data setting."""
        row_anchors = run.row_anchors or run.num_anchors
        padded = run.padded_anchors or row_anchors
        key = (run.rows, run.row_length, run.num_anchors, row_anchors, padded, run.packed)
        if (*key, run.seed) not in self._batches:
            self._batches[*key, run.seed] = Batches(
                self.train, self.train_features, *key, self.config.block_size, run.seed
            )
        return self._batches[*key, run.seed]

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else self.drafter.dtype

    def loss(self, run: Run, batch: dict[str, Any]) -> tuple[torch.Tensor, BlockSums]:
        """The normalised loss of a batch, as `DFlashTrainer` computes it."""
        objective = objective_of(run, self.config.block_size)
        features, places = self.train_features, batch["places"]
        context = features.context[places]
        if run.context_noise:
            context = add_context_noise(
                context, batch["document_lengths"], batch["noise_seeds"], run.context_noise, self.dtype
            )
        final = None
        if objective.slot_terms.divergence is not None:
            assert features.final is not None
            final = features.final[places]
        with self.autocast:
            loss, sums, _ = drafter_loss(
                self.drafter, self.config, batch, context.to(self.dtype), self.head, objective, None, final
            )
        normalizer = objective.normalizer(batch["labels"][..., 1:] != -100)
        return loss / normalizer.clamp(min=1e-12), sums

    @torch.no_grad()
    def walk(self) -> dict[str, float]:
        """The walk over all answers to evaluate on."""
        self.drafter.eval()
        sums, seen = WalkSums.zeros(self.config.block_size), set()
        for batch in self.dev_batches:
            context = self.dev_features.context[batch["places"]].to(self.dtype)
            with self.autocast:
                answers = walk_batch(self.drafter, self.config, self.head, batch, context, self.dev_anchors)
            for answer in answers:
                if answer.document not in seen:
                    sums.add(answer)
            seen |= {answer.document for answer in answers}
        self.drafter.train()
        return sums.metrics()

    def weights(self, run: Run) -> dict[str, torch.Tensor]:
        """What the run starts from."""
        tap = self.train_features.context[:4096, -self.config.hidden_size :]
        return starting_weights(self.drafter, self.target.model, run.start, run.seed, tap)


def objective_of(run: Run, block_size: int):
    return make_objective(
        run.objective, block_size, run.gamma, run.alpha, run.slot_weights, run.temperature, run.cross_entropy_share
    )


def _import_torchao(asked_for: str, module: str) -> Any:
    try:
        return importlib.import_module(module)  # noqa: TID251 - a peer, not ours
    except ImportError as error:
        raise ImportError(
            f"{asked_for} needs torchao, which cannot be imported ({error}). Run `pip install --no-deps torchao`."
        ) from error


def convert_to_float8(drafter: DFlashDraftModel, on_cuda: bool) -> None:
    """Let the layers' matrix products run in fp8 (scales per tensor) from now on; without CUDA, with its rounding."""
    float8 = _import_torchao("float8", "torchao.float8")

    def converts(module: nn.Module, name: str) -> bool:
        return name.startswith("layers.") and isinstance(module, nn.Linear)

    config = float8.Float8LinearConfig(emulate=not on_cuda)
    float8.convert_to_float8_training(drafter, module_filter_fn=converts, config=config)


def make_optimizer(run: Run, drafter: nn.Module, on_cuda: bool) -> tuple[torch.optim.Optimizer, Any]:
    """Optimizer and schedule of a run, as the Trainer makes them."""
    betas = (0.9, run.beta2)
    optimizer: torch.optim.Optimizer
    if run.muon and run.eight_bit:
        raise ValueError(f"{run.key} has muon and eight_bit, which are two optimizers: choose one.")
    if run.eight_bit:
        AdamW8bit = _import_torchao("eight_bit", "torchao.optim").AdamW8bit
        optimizer = AdamW8bit(drafter.parameters(), run.learning_rate, betas, weight_decay=run.weight_decay)
    elif run.muon:
        optimizer = MuonWithAdamW(
            drafter.parameters(), run.learning_rate, run.weight_decay, betas=betas, fused=on_cuda
        )
    else:
        optimizer = torch.optim.AdamW(
            drafter.parameters(), run.learning_rate, betas, weight_decay=run.weight_decay, fused=on_cuda
        )
    decays = {"num_decay_steps": round(run.decay * run.steps)} if run.schedule == "warmup_stable_decay" else None
    warmup = math.ceil(run.warmup * run.steps)
    return optimizer, get_scheduler(run.schedule, optimizer, warmup, run.steps, decays)


def train_step(study: Study, run: Run, batch: dict[str, Any], optimizer, scheduler) -> tuple[torch.Tensor, BlockSums]:
    """One optimizer step; nothing waits for the device.

    Returns:
        The norm of the gradients before clipping, and the sums over the step's blocks.
    """
    loss, sums = study.loss(run, batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(study.drafter.parameters(), run.max_grad_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, sums


@contextmanager
def averaged(drafter: nn.Module, average: dict[str, torch.Tensor] | None) -> Iterator[None]:
    """The drafter with averaged weights."""
    if average is None:
        yield
        return
    own = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.load_state_dict(average)
    try:
        yield
    finally:
        drafter.load_state_dict(own)


def train(study: Study, run: Run, fractions: Sequence[float] = (1 / 8, 1 / 4, 1 / 2, 1)) -> dict[str, Any]:
    """Train one run and walk after some fractions of its steps.

    Returns:
        The run's settings and `acceptance_length` by step, `metrics` of the last walk, `losses`, `seconds_per_step`,
        `clipped` (share of the steps), `first_step_seconds`, `tokens` (of the documents, by step), `blocks` and
        `peak_gib`. The drafter holds the weights that were evaluated last.
    """
    drafter, on_cuda = study.drafter, study.device.type == "cuda"
    drafter.load_state_dict(study.weights(run))
    drafter.train()
    batches = study.batches(run)
    batches.prepare(run.steps)
    optimizer, scheduler = make_optimizer(run, drafter, on_cuda)
    average = {n: t.clone() for n, t in drafter.state_dict().items()} if run.ema else None
    points = sorted({max(1, round(fraction * run.steps)) for fraction in fractions})
    clipped = torch.zeros((), device=study.device)
    sums, total = (BlockSums.zeros(study.config.block_size, study.device) for _ in range(2))
    taus: dict[str, float] = {}
    losses: dict[str, float] = {}
    tokens: dict[str, int] = {}
    num_tokens = 0
    metrics: dict[str, float] = {}
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = first_seconds = 0.0
    start = time.perf_counter()
    for step in range(1, run.steps + 1):
        batch = batches[step - 1]
        norm, step_sums = train_step(study, run, batch, optimizer, scheduler)
        num_tokens += sum(map(sum, batch["document_lengths"]))
        clipped += norm > run.max_grad_norm
        sums.add(step_sums)
        if average is not None:
            # The start weighs little from early on.
            share = max(1 - run.ema, 9 / (step + 9))
            torch._foreach_lerp_(list(average.values()), list(drafter.state_dict().values()), share)
        if step == 1:
            # Compilation is not the step's time.
            first_seconds, start = _now(on_cuda) - start, _now(on_cuda)
        if step in points:
            seconds += _now(on_cuda) - start
            tokens[str(step)] = num_tokens
            losses[str(step)] = sums.metrics()["loss"]
            total.add(sums)
            sums.values.zero_()
            with averaged(drafter, average):
                metrics = study.walk()
            taus[str(step)] = metrics["acceptance_length"]
            print(
                f"{run.key} step {step}: loss {losses[str(step)]:.3f}, tau {taus[str(step)]:.3f}, "
                f"{seconds / max(step - 1, 1):.4f} s a step",
                flush=True,
            )
            start = _now(on_cuda)
    if average is not None:
        drafter.load_state_dict(average)
    seconds += _now(on_cuda) - start
    return {
        **asdict(run),
        "acceptance_length": taus,
        "losses": losses,
        "tokens": tokens,
        "metrics": metrics,
        "seconds_per_step": seconds / max(run.steps - 1, 1),
        "first_step_seconds": first_seconds,
        "clipped": clipped.item() / run.steps,
        "blocks": int(total.values[2].item()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None,
    }


def _now(on_cuda: bool) -> float:
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
