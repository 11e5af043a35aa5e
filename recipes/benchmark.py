# SPDX-License-Identifier: Apache-2.0
"""Time the target, the transfer, the drafter's step and the whole step on the devices that are there.

    python recipes/benchmark.py                                  # a tiny shape, also without a GPU
    python recipes/benchmark.py --shape qwen3.6-27b --cases 2048x512,8192x512,8192x1536 --compile --output results.json
    python recipes/benchmark.py --shape qwen3.6-27b --sweep --compile --output sweep.json
    python recipes/benchmark.py --shape qwen3.6-27b --compile --variants plain,float8 --optimizer adamw,adamw_8bit
    python recipes/benchmark.py --shape smollm2-135m --parts target --num_documents 32 --cases 2048x256,8192x256

Weights and tokens are random. Before a step is timed, its loss and gradients are held against a naive twin. Time is
the median over repeats; the first step, with compilation, is reported apart. Results are printed and, after every
part, written as JSON.
"""

import gc
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark_arguments import BenchmarkArguments, words
from benchmark_check import checked_parameters, relative_difference
from benchmark_parts import (
    DrafterStep,
    feature_difference,
    make_targets,
    step_side,
    target_side,
    transfer_side,
)
from benchmark_peers import PEERS
from benchmark_report import describe, profile_table, quantity, table
from benchmark_shapes import (
    Case,
    Shape,
    make_batch,
    make_drafter,
    make_head,
    step_operations,
    uneven_lengths,
)
from benchmark_timing import Side, measure, num_bytes, profile
from benchmark_variants import (
    FLOAT8_TOLERANCES,
    compare_steps,
    float8_recipe,
    make_variant,
    state_tensors,
)

from dflash_hf import DFlashDraftModel, FrozenTarget
from dflash_hf.cli import parse_config
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import Objective, make_objective
from dflash_hf.operations import product_rate


class Benchmark:
    """One run: its settings, its devices, and the results so far."""

    def __init__(self, args: BenchmarkArguments):
        self.args = args
        self.device = args.drafter_device
        several = self.device.type == "cuda" and torch.cuda.device_count() > 1
        self.target_device = torch.device(args.target_device or ("cuda:1" if several else self.device))
        cuda = self.device.type == "cuda"
        self.mixed_precision = cuda if args.bf16 is None else args.bf16
        self.dtype = torch.bfloat16 if self.mixed_precision else torch.float32
        self.shape: Shape = args.find_shape()
        self.parts, self.variants = words(args.parts), words(args.variants)
        self.optimizers = words(args.optimizer)
        self.cases = args.find_cases()
        self.write_json({})
        torch.manual_seed(0)
        self.rate = product_rate(self.device)
        self.results: dict[str, Any] = {
            "arguments": asdict(args),
            "shape": args.shape_name,
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "target_device": str(self.target_device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "product_tflops": self.rate / 1e12,
            "rows": [],
        }
        compiled = "compiled layers" if args.compile else "nothing but flex attention and the loss compiled"
        print(
            f"{self.results['device']}, torch {torch.__version__}, shape {args.shape_name}, {self.dtype}, {compiled}"
        )
        print(f"A square matrix product runs at {quantity(self.rate, 'FLOP/s')}.")
        print(f"Hours are those of an epoch of {args.epoch_tokens:,.0f} tokens (--epoch_tokens).")

    def write(self) -> None:
        self.write_json(self.results)

    def write_json(self, results: dict[str, Any]) -> None:
        """Replace the output file whole: a run that is killed leaves the rows it had. Nothing yet is a trial."""
        if not self.args.output:
            return
        path = Path(self.args.output)
        aside = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError("it is a folder")
            aside.write_text(json.dumps(results, indent=1) + "\n")
            if results:
                os.replace(aside, path)
            else:
                aside.unlink()
        except OSError as error:
            raise OSError(f"output={str(path)!r} cannot be written ({error}). Give a file that can be.") from error

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
        print(describe(row), flush=True)
        self.write()

    def measure(self, sides: list[Side], device: torch.device | None = None) -> dict[str, dict[str, Any]]:
        return measure(sides, self.args.repeats, self.args.warmup, device or self.device)

    def run(self) -> dict[str, Any]:
        if "drafter" in self.parts:
            drafter = make_drafter(self.shape, self.device, self.args.full_attention)
            head = make_head(self.shape, self.device, self.dtype)
            for case in self.cases:
                self.drafter_part(case, drafter, head)
            del drafter, head
        if {"target", "transfer", "step"} & set(self.parts):
            # Compiled layers hold themselves in cycles; the target needs their memory.
            gc.collect()
            torch.cuda.empty_cache()
            self.target_parts()
        self.write()
        return self.results

    def inputs(self, case: Case, config: Any) -> tuple[dict[str, Any], torch.Tensor]:
        """A batch and hidden states for it."""
        batch = make_batch(case, config, self.device, self.args.num_documents)
        width = len(config.target_layer_ids) * config.hidden_size
        return batch, torch.randn(1, case.num_tokens, width, device=self.device, dtype=self.dtype)

    def objective(self, config: Any) -> Objective:
        return make_objective(self.args.objective, config.block_size)

    def drafter_step(
        self, drafter: DFlashDraftModel, head: FrozenHead, case: Case, variant: str, optimizer: str | None = None
    ) -> DrafterStep:
        batch, context = self.inputs(case, drafter.config)
        return DrafterStep(
            drafter,
            head,
            self.objective(drafter.config),
            batch,
            context,
            self.mixed_precision,
            self.args.context_noise,
            self.args.compile,
            optimizer,
            FLOAT8_TOLERANCES if float8_recipe(variant) else None,
        )

    def checked(self, case: Case, step: DrafterStep, name: str) -> dict[str, Any] | None:
        """The step held against its naive twin, which is its first step, compilation included."""
        if not self.args.checked_blocks:
            return None
        print(f"{case!s:>10} {name}: the first step, held against the naive twin ...", flush=True)
        return step.check(self.args.checked_blocks)

    def drafter_part(self, case: Case, drafter: DFlashDraftModel, head: FrozenHead) -> None:
        """Check and time the drafter's step of one case in turns with the peers', then optimizers and variants."""
        if self.args.recompile:
            torch.compiler.reset()
        first = self.variants[0]
        name = drafter_name(first)
        ours = self.drafter_step(make_variant(drafter, first), head, case, first)
        work = step_operations(drafter, ours.batch).drafter
        check = self.checked(case, ours, name)
        sides, compared = [ours.side(name)], {}
        for peer_name in words(self.args.peers):
            peer = PEERS[peer_name](
                drafter, head, ours.objective, ours.batch, ours.context, mixed_precision=self.mixed_precision
            )
            sides.append(peer.side(peer_name))
            compared[peer_name] = peer
        measured = self.measure(sides)
        if check is not None:
            measured[name]["first_step_seconds"] = check["seconds"]
        equal = {peer_name: compare(ours, peer, self.mixed_precision) for peer_name, peer in compared.items()}
        self.add(case, name, measured[name], work, check=check)
        for peer_name, comparison in equal.items():
            ratio = measured[name]["seconds"] / measured[peer_name]["seconds"]
            self.add(case, peer_name, measured[peer_name], work, comparison=comparison, drafter_time_over_this=ratio)
            if comparison["comparable"] and not comparison["equal"]:
                raise ValueError(f"{peer_name} computes another loss for the same work, so its time compares nothing.")
        if self.args.profile:
            self.results["rows"][-1 - len(equal)]["profile"] = kernels = profile(sides[0], self.device)
            print(profile_table(kernels))
        compared.clear()
        for optimizer in self.optimizers:
            self.optimizer_part(case, optimizer, ours, measured[name], work)
        for variant in self.variants[1:]:
            self.variant_part(case, variant, ours, measured[name], work)

    def variant_part(self, case: Case, variant: str, ours: DrafterStep, measured: dict[str, Any], work: float) -> None:
        """Time another way to take the step, and hold its loss and gradients against the first one's."""
        name = drafter_name(variant)
        step = self.drafter_step(make_variant(ours.drafter, variant), ours.head, case, variant)
        # The comparison needs the same hidden states.
        step.context, step.batch = ours.context, ours.batch
        check = self.checked(case, step, name)
        result = self.measure([step.side(name)])[name]
        if check is not None:
            result["first_step_seconds"] = check["seconds"]
        against = {"name": drafter_name(self.variants[0]), **compare_steps(step, ours)}
        against["time_ratio"] = result["seconds"] / measured["seconds"]
        if result["peak_memory_gb"] is not None:
            against["more_peak_memory_gb"] = result["peak_memory_gb"] - measured["peak_memory_gb"]
        self.add(case, name, result, work, check=check, against=against)

    def optimizer_part(
        self, case: Case, optimizer: str, ours: DrafterStep, measured: dict[str, Any], work: float
    ) -> None:
        """Time the first variant's step with clipping and an optimizer."""
        name = f"{drafter_name(self.variants[0])}+{optimizer}"
        whole = self.drafter_step(ours.drafter, ours.head, case, self.variants[0], optimizer)
        result = self.measure([whole.side(name)])[name]
        added = result["seconds"] - measured["seconds"]
        self.add(
            case,
            name,
            result,
            work,
            optimizer_adds=added / measured["seconds"],
            optimizer_adds_seconds=added,
            optimizer_state_bytes=num_bytes(state_tensors(whole.optimizer)),
        )

    def target_parts(self) -> None:
        """Time the target, the transfer and the whole step, for all cases, with one target."""
        target, twin = make_targets(self.shape, self.target_device, self.dtype)
        drafter = make_drafter(self.shape, torch.device("meta"), self.args.full_attention)
        for case in self.cases:
            batch, context = self.inputs(case, drafter.config)
            if "target" in self.parts:
                work = step_operations(drafter, batch, target).target
                self.target_part(case, target, twin, batch, work)
            if "transfer" in self.parts:
                side = transfer_side(context, self.target_device, self.device)
                result = self.measure([side])["transfer"]
                gigabytes = context.numel() * context.element_size() / 1e9
                self.add(case, "transfer", result, gb_per_second=gigabytes / result["seconds"])
        if "step" in self.parts:
            drafter = make_drafter(self.shape, self.device, self.args.full_attention)
            head = FrozenHead(target.model, self.device)
            for case in self.cases:
                if self.args.recompile:
                    torch.compiler.reset()
                first, optimizer = self.variants[0], (self.optimizers or ["adamw"])[0]
                step = self.drafter_step(make_variant(drafter, first), head, case, first, optimizer)
                work = step_operations(drafter, step.batch, target)
                measured = self.measure([step_side(target, step)])["step"]
                self.add(case, "step", measured, work.target + work.drafter)

    def target_part(
        self, case: Case, target: FrozenTarget, twin: FrozenTarget | None, batch: dict[str, Any], work: float
    ) -> None:
        """Time the target's forward, in turns with its twin where there is one."""
        lengths = batch["document_lengths"]
        if twin is None:
            result = self.measure([target_side(target, batch["input_ids"], lengths)], self.target_device)
            self.add(case, "target", result["target"], work)
            return
        # Neighbours of one length share a call of the twin, which documents of real data seldom do.
        lengths = [uneven_lengths(case.num_tokens, self.args.num_documents)]
        sides = [target_side(target, batch["input_ids"], lengths)]
        sides.append(target_side(twin, batch["input_ids"], lengths, ONE_BY_ONE))
        result = self.measure(sides, self.target_device)
        ratio = result["target"]["seconds"] / result[ONE_BY_ONE]["seconds"]
        difference = feature_difference(target, twin, batch["input_ids"], lengths)
        self.add(case, "target", result["target"], work)
        self.add(
            case, ONE_BY_ONE, result[ONE_BY_ONE], work, target_time_over_this=ratio, feature_difference=difference
        )


ONE_BY_ONE = "target, documents one by one"


def drafter_name(variant: str) -> str:
    return "drafter" if variant == "plain" else f"drafter+{variant}"


def compare(ours: DrafterStep, peer: Any, mixed_precision: bool) -> dict[str, Any]:
    """Losses and gradients of both sides for the same weights, tokens and anchors; equal to the type's rounding."""
    ours.drafter.zero_grad(set_to_none=True)
    noise, ours.context_noise = ours.context_noise, 0.0
    loss, peer_loss = ours().item(), peer().item()
    ours.context_noise = noise
    theirs = dict(peer.model.named_parameters())
    own = dict(ours.drafter.named_parameters())
    scale = peer.factor
    differences = {
        name: relative_difference(theirs[name].grad.float() * scale, own[name].grad)
        for name in checked_parameters(ours.drafter)
    }
    for model in (ours.drafter, peer.model):
        model.zero_grad(set_to_none=True)
    difference = abs(loss - peer_loss) / abs(loss)
    return {
        "loss": loss,
        "peer_loss": peer_loss,
        "relative_loss_difference": difference,
        "relative_gradient_differences": differences,
        "comparable": peer.comparable,
        "equal": difference <= (2e-3 if mixed_precision else 1e-5) and math.isfinite(loss),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = parse_config(BenchmarkArguments, argv, description=__doc__.split("\n")[0])
    results = Benchmark(args).run()
    print("\n" + table(results["rows"]))
    return results


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
