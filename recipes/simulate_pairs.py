# SPDX-License-Identifier: Apache-2.0
"""Time the prefetcher with sleeps in place of both halves: a step should last as long as its slower half.

    python recipes/simulate_pairs.py [--depth 2] [--steps 30] [--total_seconds 0.25] [--output simulated_pairs.json]

The target sleeps, then its hidden states are really copied; the drafter sleeps. No GPU is needed.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate.state import GradientState

from dflash_hf.prefetch import FeatureTransfer, Prefetcher, Throughput


CPU = torch.device("cpu")
RATIOS = ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))


class SleepingTarget:
    """Sleeps, then gives hidden states of zeros."""

    device = CPU

    def __init__(self, seconds: float, shape: tuple[int, ...] = (1, 1024, 320)):
        self.seconds = seconds
        self.states = torch.zeros(shape, dtype=torch.bfloat16)
        self.copy_seconds: list[float] = []

    def context_hidden_states(self, input_ids, document_lengths=None) -> torch.Tensor:
        time.sleep(self.seconds)
        start = time.perf_counter()
        copied = self.states.clone()
        self.copy_seconds.append(time.perf_counter() - start)
        return copied


def batches(count: int):
    for number in range(count):
        yield {
            "input_ids": torch.tensor([[number]]),
            "document_lengths": [[1]],
            "anchor_positions": torch.tensor([[0]]),
        }


def simulate(target_seconds: float, drafter_seconds: float, depth: int, steps: int) -> dict[str, float]:
    """Mean seconds of a step once the pipe is filled, beside the slower half plus the copy.

    Args:
        target_seconds: Sleep of the target for each batch.
        drafter_seconds: Sleep of the drafter for each batch.
        depth: Batches that the target works ahead.
        steps: Batches.
    """
    target = SleepingTarget(target_seconds)
    throughput = Throughput(CPU, [CPU])
    prefetcher = Prefetcher(FeatureTransfer(target, [CPU], CPU, "peer"), CPU, depth, throughput)
    ends = []
    # What a dataloader that is over left in this process would end the batches too early.
    GradientState._reset_state()
    for batch in prefetcher.look_ahead(batches(steps), GradientState()):
        prefetcher.context_hidden_states(batch)
        time.sleep(drafter_seconds)
        ends.append(time.perf_counter())
    prefetcher.close()
    filled = depth + 1
    copy = sum(target.copy_seconds) / len(target.copy_seconds)
    step = (ends[-1 - filled] - ends[filled]) / (len(ends) - 1 - 2 * filled)
    ideal = max(target_seconds, drafter_seconds) + copy
    return {
        "target_seconds": target_seconds,
        "drafter_seconds": drafter_seconds,
        "copy_seconds": copy,
        "step_seconds": step,
        "ideal_seconds": ideal,
        "ratio": step / ideal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--depth", type=int, default=2, help="Batches that the target works ahead.")
    parser.add_argument("--steps", type=int, default=30, help="Steps for each ratio.")
    parser.add_argument("--total_seconds", type=float, default=0.25, help="Target and drafter together.")
    parser.add_argument("--output", default="outputs/simulated_pairs.json", help="Where to write the figures.")
    options = parser.parse_args()
    results = []
    print("target : drafter      step     slower half + copy   ratio")
    for a, b in RATIOS:
        unit = options.total_seconds / (a + b)
        result = simulate(a * unit, b * unit, options.depth, options.steps)
        results.append(result)
        print(
            f"{a:6} : {b:<7} {result['step_seconds']:8.4f} s {result['ideal_seconds']:16.4f} s {result['ratio']:9.3f}"
        )
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    Path(options.output).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
