# SPDX-License-Identifier: Apache-2.0
"""Whether ranks train one drafter: the same weights on all of them, and those of one rank that accumulates.

    accelerate launch --multi_gpu --num_processes 2 recipes/smollm2-135m/check_ranks.py --output_dir outputs/ranks-2
    python recipes/smollm2-135m/check_ranks.py --gradient_accumulation_steps 2 --output_dir outputs/ranks-1 \
        --compare_with outputs/ranks-2

Each process has the whole of SmolLM2-135M-Instruct and a drafter of the study's shape, and trains on the recipe's own
chats. `ranks.json` holds the losses and the largest difference between the ranks' weights, `weights.safetensors` the
weights. On a CPU, `--config_file recipes/accelerate/two_pairs.yaml` and `--use_cpu true` replace `--multi_gpu`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from get_target import get_smollm2
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    read_completions,
    tokenize_completions,
)
from dflash_hf.cli import parse_config
from dflash_hf.planning import rank_differences


HERE = Path(__file__).resolve().parent


@dataclass
class CheckArguments:
    target: str | None = field(default=None, metadata={"help": "Folder with SmolLM2-135M-Instruct; fetched if unset."})
    num_layers: int = field(default=5, metadata={"help": "Layers of the drafter."})
    block_size: int = field(default=16, metadata={"help": "Slots per block."})
    mask_token_id: int = field(default=15, metadata={"help": "Token id of a slot to be drafted."})
    completions: str = field(default=str(HERE / "completions.jsonl"), metadata={"help": "Chats to train on."})
    compare_with: str | None = field(default=None, metadata={"help": "Folder of another run to compare with."})


def main() -> None:
    check, args = parse_config((CheckArguments, DFlashTrainingArguments), default_config=HERE / "check_ranks.yaml")
    with args.main_process_first(desc="fetching the target"):
        folder = get_smollm2(check.target)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if args.bf16 else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = read_completions(check.completions)
    set_seed(args.seed)
    config = DFlashDraftConfig.from_target_config(
        target.config,
        num_hidden_layers=check.num_layers,
        block_size=check.block_size,
        mask_token_id=check.mask_token_id,
    )
    trainer = DFlashTrainer(
        model=DFlashDraftModel(config),
        target_model=target,
        args=args,
        train_dataset=tokenize_completions(chats, tokenizer, max_length=args.max_length),
        processing_class=tokenizer,
    )
    trainer.train()
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: tensor.detach() for name, tensor in drafter.named_parameters()}
    results = {
        "world_size": args.world_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "largest_difference_between_ranks": max(rank_differences(drafter).values()) if args.world_size > 1 else 0.0,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    if trainer.is_world_process_zero():
        output_dir = Path(args.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        on_host = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
        save_file(on_host, output_dir / "weights.safetensors")
        if check.compare_with is not None:
            results |= compare(on_host, results["losses"], Path(check.compare_with))
        (output_dir / "ranks.json").write_text(json.dumps(results, indent=1) + "\n")
        print({name: value for name, value in results.items() if name != "losses"})
    trainer.accelerator.end_training()


def compare(weights: dict[str, torch.Tensor], losses: list[float], folder: Path) -> dict[str, float]:
    """How far weights and losses are from those of another run."""
    theirs = load_file(folder / "weights.safetensors")
    own, other = (torch.cat([tensors[name].flatten() for name in weights]) for tensors in (weights, theirs))
    their_losses = json.loads((folder / "ranks.json").read_text())["losses"]
    return {
        "relative_difference_of_weights": ((own - other).norm() / other.norm()).item(),
        "largest_difference_of_weights": (own - other).abs().max().item(),
        "largest_difference_of_losses": max(abs(a - b) for a, b in zip(losses, their_losses, strict=True)),
    }


if __name__ == "__main__":
    main()
