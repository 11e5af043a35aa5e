# SPDX-License-Identifier: Apache-2.0
"""What a round of speculative decoding costs beside one forward of a block by the target, over the prompt's length.

    python recipes/benchmark_decoding.py                                       # a small hybrid target, also on a CPU
    python recipes/benchmark_decoding.py --shape qwen3.6-27b --output FILE     # the published shapes on a GPU
    python recipes/benchmark_decoding.py --target FOLDER --drafter FOLDER

A round drafts a block, verifies it and keeps what is committed. Random drafters commit next to nothing, so rounds are
made to commit 1 to b tokens in turn, whatever the tokens are: costs do not depend on them. The forwards are those of
the target alone, of one token and of one block after the same prompt, with its cache. Snapshot and rollback copy the
states of a hybrid target's recurrent layers; a verification makes both where it needs them. Times are means over
rounds, after as many untimed ones as it takes to meet every number of tokens: on a GPU each one's first kernels are
loaded or compiled then. The JSON file holds each round's seconds.
"""

import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from benchmark import SHAPES, make_drafter, sized
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.cli import parse_config
from dflash_hf.generation import DecodingState, Sampling, check_drafter


# What is measured, and what it is called in the table.
PARTS = {"token": "forward of a token", "forward": "forward of a block", "draft": "draft", "verify": "verification"}
PARTS |= {"commit": "commit", "round": "round", "snapshot": "snapshot", "rollback": "rollback"}
# The tokens that wait in front of a verification depend on several rounds before it.
WARM_UP_CYCLES = 2


@dataclass
class DecodingBenchmarkArguments:
    shape: Literal["small-hybrid", "qwen3.6-27b"] | None = field(
        default=None, metadata={"help": "Random weights of this shape; small-hybrid unless a target is given."}
    )
    target: str | None = field(default=None, metadata={"help": "Folder or Hub id of a target instead of a shape."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id of its drafter."})
    prompt_lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048, 4096, 8192], metadata={"help": "Tokens of the prompts."}
    )
    num_rounds: int = field(default=32, metadata={"help": "Timed rounds for each prompt."})
    dtype: Literal["bfloat16", "float16", "float32"] | None = field(
        default=None, metadata={"help": "bfloat16 on a GPU, float32 elsewhere."}
    )
    device: str | None = field(default=None, metadata={"help": "Device; a GPU if there is one."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the results."})

    def __post_init__(self) -> None:
        if bool(self.target) != bool(self.drafter) or (self.target and self.shape):
            raise ValueError("Give a target together with its drafter, or a shape, or nothing.")
        if self.num_rounds < 1 or min(self.prompt_lengths) < 1:
            raise ValueError("num_rounds and prompt_lengths must be at least 1.")


def main(argv: Sequence[str] | None = None) -> None:
    (args,) = parse_config(DecodingBenchmarkArguments, argv, description=(__doc__ or "").split("\n")[0])
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    torch.manual_seed(0)
    target, drafter = load_models(args, device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {dtype}, blocks of {drafter.config.block_size}")
    print(f"Target: {target.num_parameters() / 1e6:.1f}M parameters; drafter: {drafter.num_parameters() / 1e6:.1f}M.")
    results = {"arguments": asdict(args), "device": name, "dtype": str(dtype), "torch": torch.__version__}
    results |= {"transformers": transformers.__version__, "rows": []}
    print(f"\n| prompt | {' | '.join(PARTS.values())} | round / block |")
    print("|---" * (len(PARTS) + 2) + "|")
    for length in args.prompt_lengths:
        row = measure(target, drafter, length, args.num_rounds)
        results["rows"].append(row)
        times = " | ".join(f"{row[part] * 1e3:.2f} ms" for part in PARTS)
        print(f"| {length} | {times} | {row['ratio']:.2f} |", flush=True)
        if args.output:
            Path(args.output).parent.mkdir(parents=True, exist_ok=True)
            Path(args.output).write_text(json.dumps(results, indent=1) + "\n")
    ratios = [row["ratio"] for row in results["rows"]]
    print(f"\nOn average a round takes {statistics.mean(ratios):.2f} times a forward of a block by the target.")


def load_models(
    args: DecodingBenchmarkArguments, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """The target and the drafter in eval mode."""
    if args.target:
        drafter = DFlashDraftModel.from_pretrained(args.drafter).to(device, dtype)
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device)
        check_drafter(target, drafter)
        return target.eval(), drafter.eval()
    if args.shape == "qwen3.6-27b":
        shape = SHAPES[args.shape]
        with device:
            target = AutoModelForCausalLM.from_config(shape.target, dtype=dtype)
        drafter = make_drafter(shape, device).to(dtype)
        drafter.set_attn_implementation("sdpa")
        return target.eval(), drafter.eval()
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    heads |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    config = Qwen3_5TextConfig(vocab_size=1024, tie_word_embeddings=False, **heads, **sized(512, 1536, 16, 4, 1, 128))
    target = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    fields = {"num_hidden_layers": 1, "num_taps": 3, "block_size": 16, "mask_token_id": 1000}
    drafter = DFlashDraftModel(DFlashDraftConfig.from_target_config(config, **fields))
    return target.eval(), drafter.to(device, dtype).eval()


@torch.no_grad()
def measure(target: PreTrainedModel, drafter: DFlashDraftModel, prompt_length: int, num_rounds: int) -> dict[str, Any]:
    """Mean seconds of the forward and of each part of a round after a prompt."""
    device, block_size, vocab_size = target.device, drafter.config.block_size or 0, target.config.vocab_size
    clock = Clock(device)
    prompt = torch.randint(0, vocab_size, (1, prompt_length), device=device)
    block = torch.randint(0, vocab_size, (1, block_size), device=device)
    cache = DynamicCache(config=target.config)
    target(prompt, cache=cache, use_cache=True, logits_to_keep=1)
    seconds: dict[str, list[float]] = {name: [] for name in PARTS if name != "round"}
    # Every number of tokens equally often, small ones and large ones in turn.
    commits = (
        [1 + (5 * i) % block_size for i in range(block_size)] if block_size % 5 else list(range(1, block_size + 1))
    )
    with DecodingState(target, drafter) as state:
        state.prefill(prompt)
        for index in range(-WARM_UP_CYCLES * block_size, num_rounds):
            row = {}
            # Alone they always have the same two shapes, which few rounds warm up.
            alone = (("token", block[:, :1]), ("forward", block)) if index >= -4 else ()
            for name, tokens in alone:
                copied = copy.deepcopy(cache)
                row[name], _ = clock(partial(target, tokens, cache=copied, use_cache=True))
            states = recurrent_states(state.target_cache)
            row["snapshot"], saved = clock(lambda states=states: [part.clone() for part in states])
            row["rollback"], _ = clock(lambda a=states, b=saved: [to.copy_(of) for to, of in zip(a, b, strict=True)])
            row["draft"], drafts = clock(lambda: state.propose(block[:, :1], Sampling())[0][0])
            row["verify"], _ = clock(lambda drafts=drafts: state.verify(block[:, :1], drafts).argmax(dim=-1))
            row["commit"], _ = clock(partial(state.commit, block[:, : commits[index % block_size]]))
            for name, value in row.items() if index >= 0 else ():
                seconds[name].append(value)
    # Means over rounds that commit more and less: their costs differ, and a median would hide the dear ones.
    means = {name: statistics.mean(_without_outliers(values)) for name, values in seconds.items()}
    means["round"] = means["draft"] + means["verify"] + means["commit"]
    ratio = means["round"] / means["forward"]
    return {"prompt_length": prompt_length} | means | {"ratio": ratio, "seconds_of_each_round": seconds}


def recurrent_states(cache: Cache) -> list[torch.Tensor]:
    """The states of a hybrid target's recurrent layers; none of a dense one."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    kept = [part for layer in layers for part in (layer.conv_states, layer.recurrent_states)]
    return [state for part in kept for state in part.values() if state is not None]


def _without_outliers(seconds: Sequence[float]) -> list[float]:
    """Values up to three times the median: the others are other programs'."""
    limit = 3 * statistics.median(seconds)
    return [value for value in seconds if value <= limit]


class Clock:
    """Seconds of a call on a device, and its result; on a CPU its time of the processor, whatever else runs there."""

    def __init__(self, device: torch.device):
        self.device = device
        self.now = time.process_time if device.type == "cpu" else time.perf_counter

    def __call__(self, call: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        start = self.now()
        result = call()
        self._wait()
        return self.now() - start, result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


if __name__ == "__main__":
    main()
