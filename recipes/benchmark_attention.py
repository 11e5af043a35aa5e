# SPDX-License-Identifier: Apache-2.0
"""Time the drafter's attention on a CPU: chunks of sorted anchors against one dense mask.

    python recipes/benchmark_attention.py [--num_tokens 2048] [--num_anchors 512] [--output attention.json]

Forward and backward of a small drafter over one row, masks included, in turns; the ratio is that of the medians.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.masking import block_position_ids, make_mask_mod, materialize, training_masks


BLOCK_SIZE = 16


def make_drafter(hidden_size: int) -> DFlashDraftModel:
    config = DFlashDraftConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        block_size=BLOCK_SIZE,
        target_layer_ids=[0, 1],
        mask_token_id=63,
        num_target_layers=4,
        attn_implementation="sdpa",
    )
    return DFlashDraftModel(config)


def step(drafter: DFlashDraftModel, inputs: dict, dense: bool) -> tuple[float, list[torch.Tensor]]:
    """Seconds of masks, forward and backward, and the output with all gradients."""
    drafter.zero_grad()
    anchors, documents = inputs["anchors"], inputs["documents"]
    start = time.perf_counter()
    if dense:
        queries = anchors.shape[1] * BLOCK_SIZE
        mask_mod = make_mask_mod(anchors, documents, BLOCK_SIZE, causal=False, window=None)
        shape = (1, queries, documents.shape[1] + queries)
        masks = {"full_attention": materialize(mask_mod, "sdpa", shape, documents.device, torch.float32)}
    else:
        masks = training_masks(drafter.config, anchors, documents)
    output = drafter(inputs["noise"], inputs["context"], masks, inputs["positions"]).last_hidden_state
    output.pow(3).mean().backward()
    seconds = time.perf_counter() - start
    return seconds, [output.detach(), *(p.grad.clone() for p in drafter.parameters() if p.grad is not None)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num_tokens", type=int, default=2048, help="Context tokens of the row, one document.")
    parser.add_argument("--num_anchors", type=int, default=512, help="Blocks of 16 slots.")
    parser.add_argument("--hidden_size", type=int, default=32, help="Width of the drafter.")
    parser.add_argument("--repeats", type=int, default=5, help="Timed steps of each kind.")
    parser.add_argument("--output", type=Path, help="JSON file for the results.")
    options = parser.parse_args(argv)
    if not 0 < options.num_anchors <= options.num_tokens:
        parser.error(
            f"--num_anchors is {options.num_anchors}; expected 1 to {options.num_tokens}, one per token at most."
        )
    torch.manual_seed(0)
    tokens, anchors = options.num_tokens, torch.randperm(options.num_tokens)[: options.num_anchors].sort().values[None]
    drafter, slots = make_drafter(options.hidden_size), anchors.shape[1] * BLOCK_SIZE
    inputs = {
        "anchors": anchors,
        "documents": torch.zeros(1, tokens, dtype=torch.long),
        "positions": block_position_ids(torch.arange(tokens)[None], anchors, BLOCK_SIZE),
        "context": torch.randn(1, tokens, 2 * options.hidden_size),
        "noise": torch.randn(1, slots, options.hidden_size),
    }
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(options.repeats + 1):
        results = {dense: step(drafter, inputs, dense) for dense in (False, True)}
        for dense, (taken, _) in results.items():
            if repeat:
                seconds[dense].append(taken)
    pairs = zip(results[False][1], results[True][1], strict=True)
    difference = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    chunked, dense = (statistics.median(seconds[kind]) for kind in (False, True))
    ratio = dense / chunked
    report = {
        "queries": slots,
        "keys": tokens + slots,
        "chunked_seconds": chunked,
        "dense_seconds": dense,
        "dense_over_chunked": ratio,
        "largest_relative_difference": difference,
    }
    print(f"{slots} x {tokens + slots}: chunks {chunked:.3f} s, one dense mask {dense:.3f} s, {ratio:.1f} times")
    print(f"Output and gradients differ by at most {difference:.1e} of their norms.")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
