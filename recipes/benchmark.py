# SPDX-License-Identifier: Apache-2.0
"""Time the target, the transfer, the drafter's step and the whole step on the devices that are there.

    python recipes/benchmark.py                                  # a tiny shape, also without a GPU
    python recipes/benchmark.py --shape qwen3.6-27b --cases 2048x512,8192x512,8192x1536 --compile --output results.json
    python recipes/benchmark.py --shape qwen3.6-27b --sweep --compile --output sweep.json

Weights and tokens are random. Before a step is timed, its loss and gradients are held against a naive twin. Time is
the median over repeats; the first step, with compilation, is reported apart. Results are printed and, after every
part, written as JSON.
"""

import gc
import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark_check import checked_parameters, relative_difference
from benchmark_parts import DrafterStep, make_target, step_side, target_side, transfer_side
from benchmark_peers import PEERS
from benchmark_report import describe, profile_table, table
from benchmark_shapes import Case, Shape, drafter_work, make_batch, make_drafter, make_head, shapes, target_work
from benchmark_timing import Side, measure, product_rate, profile

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import parse_config
from dflash_hf.target.frozen_target import FrozenHead
from dflash_hf.training.losses import Objective, make_objective


PARTS = ("target", "transfer", "drafter", "step")


@dataclass
class BenchmarkArguments:
    """What is timed, at which shape, and how often."""

    shape: str | None = field(
        default=None, metadata={"help": "tiny or qwen3.6-27b; by default the latter on a GPU, else the former."}
    )
    parts: str = field(default="drafter", metadata={"help": f"Commas between some of {', '.join(PARTS)}."})
    num_tokens: int | None = field(default=None, metadata={"help": "Tokens of the row; the shape's own if unset."})
    num_anchors: int | None = field(default=None, metadata={"help": "Blocks of the row; the shape's own if unset."})
    cases: str | None = field(default=None, metadata={"help": "Several rows in one run: 2048x512,8192x1536."})
    sweep: bool = field(default=False, metadata={"help": "Rows and anchors from small to large, as a table."})
    num_documents: int = field(default=1, metadata={"help": "Documents of the row."})
    objective: str = field(default="cross_entropy", metadata={"help": "cross_entropy or dpace."})
    context_noise: float = field(default=0.0, metadata={"help": "Half-width of the noise on the hidden states."})
    full_attention: bool = field(default=False, metadata={"help": "Make all layers of the drafter full."})
    bf16: bool | None = field(
        default=None, metadata={"help": "bf16 autocast over fp32 masters, a bf16 target; by default on a GPU."}
    )
    compile: bool = field(default=False, metadata={"help": "Compile the drafter's layers, as training on a GPU does."})
    gradient_checkpointing: bool = field(
        default=False,
        metadata={"help": "Compute the drafter's layers again in the backward, to save memory."},
    )
    optimizer: bool = field(default=False, metadata={"help": "Also time the drafter's step with clipping and AdamW."})
    peers: str | None = field(default=None, metadata={"help": f"Commas between some of {', '.join(PEERS)}."})
    repeats: int = field(default=10, metadata={"help": "Timed steps, of which the median is reported."})
    warmup: int = field(default=2, metadata={"help": "Steps between the first one and those that are timed."})
    checked_blocks: int = field(
        default=16, metadata={"help": "Blocks whose loss and gradients are held against the naive twin; 0 for none."}
    )
    recompile: bool = field(
        default=True, metadata={"help": "Compile anew for every case, as training at that shape would."}
    )
    profile: bool = field(default=False, metadata={"help": "Also list the drafter's step by kernel."})
    epoch_tokens: float = field(default=1.64e9, metadata={"help": "Tokens of an epoch, for its hours."})
    device: str | None = field(default=None, metadata={"help": "The drafter's device; a GPU if any."})
    target_device: str | None = field(default=None, metadata={"help": "The target's device; the second GPU if any."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the results."})

    def __post_init__(self) -> None:
        for name, known in (("parts", PARTS), ("peers", tuple(PEERS))):
            unknown = set(_words(getattr(self, name))) - set(known)
            if unknown:
                raise ValueError(f"{name} has {sorted(unknown)}; choose from {', '.join(known)}, with commas between.")
        for name, minimum in (("repeats", 1), ("warmup", 0), ("num_documents", 1), ("checked_blocks", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {minimum}.")
        if (self.cases or self.sweep) and (self.num_tokens or self.num_anchors):
            raise ValueError("num_tokens and num_anchors name one case; leave them out beside cases or sweep.")


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


class Benchmark:
    """One run: its settings, its devices, and the results so far."""

    def __init__(self, args: BenchmarkArguments):
        self.args = args
        self.device = torch.device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        several = self.device.type == "cuda" and torch.cuda.device_count() > 1
        self.target_device = torch.device(args.target_device or ("cuda:1" if several else self.device))
        cuda = self.device.type == "cuda"
        self.mixed_precision = cuda if args.bf16 is None else args.bf16
        self.dtype = torch.bfloat16 if self.mixed_precision else torch.float32
        name = args.shape or ("qwen3.6-27b" if cuda else "tiny")
        if name not in shapes():
            raise ValueError(f"shape is {name!r}; choose one of {', '.join(shapes())}.")
        self.shape: Shape = shapes()[name]
        self.parts = _words(args.parts)
        self.cases = self.find_cases()
        for case in self.cases:
            case.document_lengths(args.num_documents, self.shape.drafter["block_size"])
        torch.manual_seed(0)
        self.rate = product_rate(self.device)
        self.results: dict[str, Any] = {
            "arguments": asdict(args),
            "shape": name,
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "target_device": str(self.target_device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "product_tflops": self.rate / 1e12,
            "rows": [],
        }
        compiled = "compiled layers" if args.compile else "nothing but flex attention and the loss compiled"
        print(f"{self.results['device']}, torch {torch.__version__}, shape {name}, {self.dtype}, {compiled}")
        print(f"A square matrix product runs at {self.rate / 1e12:.4g} TFLOP/s.")

    def find_cases(self) -> list[Case]:
        if self.args.sweep:
            return self.shape.sweep
        if self.args.cases:
            return [Case.parse(word) for word in _words(self.args.cases)]
        case = self.shape.case
        return [Case(self.args.num_tokens or case.num_tokens, self.args.num_anchors or case.num_anchors)]

    def write(self) -> None:
        if self.args.output:
            path = Path(self.args.output)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.results, indent=1) + "\n")

    def add(self, case: Case, part: str, measured: dict[str, Any], work: float | None = None, **more: Any) -> None:
        """Add a row to the results, print it and write the file."""
        tokens = case.num_tokens / measured["seconds"]
        row = {"case": str(case), "num_tokens": case.num_tokens, "num_anchors": case.num_anchors, "part": part}
        row |= measured | {"tokens_per_second": tokens, "hours_per_epoch": self.args.epoch_tokens / tokens / 3600}
        if part != "target" and part != "transfer":
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

    def drafter_step(self, drafter: DFlashDraftModel, head: FrozenHead, case: Case, optimize: bool) -> DrafterStep:
        if self.args.gradient_checkpointing:
            drafter.gradient_checkpointing_enable()
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
            optimize,
        )

    def drafter_part(self, case: Case, drafter: DFlashDraftModel, head: FrozenHead) -> None:
        """Check and time the drafter's step of one case, in turns with the peers'."""
        if self.args.recompile:
            torch.compiler.reset()
        ours = self.drafter_step(drafter, head, case, optimize=False)
        work = drafter_work(drafter, case.num_tokens, case.num_anchors)
        check = None
        if self.args.checked_blocks:
            print(f"{case!s:>10} the first step, held against the naive twin ...", flush=True)
            check = ours.check(self.args.checked_blocks)
        sides, compared = [ours.side("drafter")], {}
        for name in _words(self.args.peers):
            peer = PEERS[name](
                drafter, head, ours.objective, ours.batch, ours.context, mixed_precision=self.mixed_precision
            )
            sides.append(peer.side(name))
            compared[name] = peer
        measured = self.measure(sides)
        if check is not None:
            # The check goes through the same graphs, so that it is the first step, compilation included.
            measured["drafter"]["first_step_seconds"] = check["seconds"]
        equal = {name: compare(ours, peer, self.mixed_precision) for name, peer in compared.items()}
        self.add(case, "drafter", measured["drafter"], work, check=check)
        for name, comparison in equal.items():
            ratio = measured["drafter"]["seconds"] / measured[name]["seconds"]
            self.add(case, name, measured[name], work, comparison=comparison, drafter_time_over_this=ratio)
            if comparison["comparable"] and not comparison["equal"]:
                raise ValueError(f"{name} computes another loss for the same work, so its time compares nothing.")
        if self.args.profile:
            self.results["rows"][-1 - len(equal)]["profile"] = kernels = profile(sides[0], self.device)
            print(profile_table(kernels))
        if self.args.optimizer:
            whole = self.drafter_step(drafter, head, case, optimize=True)
            result = self.measure([whole.side("drafter+optimizer")])["drafter+optimizer"]
            added = result["seconds"] / measured["drafter"]["seconds"] - 1
            self.add(case, "drafter+optimizer", result, work, optimizer_adds=added)

    def target_parts(self) -> None:
        """Time the target, the transfer and the whole step, for all cases, with one target."""
        target = make_target(self.shape, self.target_device, self.dtype)
        config = make_drafter(self.shape, torch.device("meta"), self.args.full_attention).config
        for case in self.cases:
            batch, context = self.inputs(case, config)
            if "target" in self.parts:
                result = self.measure([target_side(target, batch)], self.target_device)["target"]
                self.add(case, "target", result, target_work(target.layers, case.num_tokens))
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
                step = self.drafter_step(drafter, head, case, optimize=True)
                work = drafter_work(drafter, case.num_tokens, case.num_anchors)
                work += target_work(target.layers, case.num_tokens)
                self.add(case, "step", self.measure([step_side(target, step)])["step"], work)


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
