# SPDX-License-Identifier: Apache-2.0
"""Train a drafter for a target, or continue a published one.

    python recipes/train_qwen36.py --completions FILE [--config recipes/qwen3.6-27b/config.yaml] [--field value ...]
    accelerate launch recipes/train_qwen36.py --completions FILE --config recipes/qwen3.6-27b/continue.yaml

The recipe is a YAML file; any of its fields can be given on the command line.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, set_seed

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    read_completions,
    tokenize_completions,
)
from dflash_hf.adapting import adapt, check_continuing
from dflash_hf.cli import parse_config
from dflash_hf.target import FrozenTarget


CONFIG = Path(__file__).resolve().parent / "qwen3.6-27b" / "config.yaml"


@dataclass
class RecipeArguments:
    completions: str = field(metadata={"help": "JSON lines (or a folder of them) of chats that the target answered."})
    target: str = field(metadata={"help": "Hub id or folder of the target."})
    eval_completions: str | None = field(default=None, metadata={"help": "Chats to evaluate on."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter to continue; a new one if unset."})
    # A new drafter's shape; of these, block_size, sliding_window and target_layer_ids change one that continues.
    num_layers: int | None = field(default=None, metadata={"help": "Layers of a new drafter."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Attention heads of a new drafter."})
    num_key_value_heads: int | None = field(default=None, metadata={"help": "Key-value heads of a new drafter."})
    head_dim: int | None = field(default=None, metadata={"help": "Size of an attention head of a new drafter."})
    intermediate_size: int | None = field(default=None, metadata={"help": "MLP size of a new drafter."})
    layer_types: list[str] | None = field(
        default=None, metadata={"help": "sliding_attention or full_attention for each layer of a new drafter."}
    )
    mask_token_id: int | None = field(default=None, metadata={"help": "Token id of a slot to be drafted."})
    block_size: int | None = field(default=None, metadata={"help": "Slots per block, the known anchor included."})
    sliding_window: int | None = field(default=None, metadata={"help": "Window of the sliding layers in tokens."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Target layers that are read."})


def main() -> None:
    recipe, args = parse_config(
        (RecipeArguments, DFlashTrainingArguments), default_config=CONFIG, description=__doc__.split("\n")[0]
    )
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(recipe.target)
    drafter = new_drafter(recipe) if recipe.drafter is None else continued_drafter(recipe)
    # Loaded here, since tokenising asks it for its end-of-turn ids; the trainer then takes it as it is.
    init_kwargs, args.target_model_init_kwargs = args.target_model_init_kwargs or {}, None
    device = args.target_device or args.device
    target = FrozenTarget(
        recipe.target,
        drafter.config.target_layer_ids,
        device=device,
        compile_target=args.compile_target,
        allow_slow_target=args.allow_slow_target,
        **init_kwargs,
    )

    def documents(path: str):
        return tokenize_completions(
            read_completions(path),
            tokenizer,
            max_length=args.max_length or args.row_length,
            enable_thinking=args.enable_thinking,
            eos_token_ids=target.eos_token_ids,
        )

    train_documents = documents(recipe.completions)
    check_continuing(drafter.config, target, tokenizer, train_documents)
    trainer = DFlashTrainer(
        model=drafter,
        target_model=target,
        args=args,
        train_dataset=train_documents,
        eval_dataset=documents(recipe.eval_completions) if recipe.eval_completions else None,
        processing_class=tokenizer,
    )
    # "true" means the last checkpoint in output_dir, as in Python.
    resume = {"true": True, "false": None}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    if recipe.eval_completions:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    print(f"The drafter is in {args.output_dir}; next: dflash-hf validate {args.output_dir}")


def new_drafter(recipe: RecipeArguments) -> DFlashDraftModel:
    """A drafter with random weights and a shape of its own."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types")
    names += ("mask_token_id", "block_size", "sliding_window", "target_layer_ids")
    given = {name: getattr(recipe, name) for name in names if getattr(recipe, name) is not None}
    if recipe.sliding_window is not None:
        given["use_sliding_window"] = True
    if recipe.num_layers is not None:
        given["num_hidden_layers"] = recipe.num_layers
    target_config = AutoConfig.from_pretrained(recipe.target)
    return DFlashDraftModel(DFlashDraftConfig.from_target_config(target_config, **given))


def continued_drafter(recipe: RecipeArguments) -> DFlashDraftModel:
    """A trained drafter, with the changes that the recipe names."""
    fixed = ("num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    given = [name for name in (*fixed, "layer_types", "mask_token_id") if getattr(recipe, name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be given together with drafter={recipe.drafter}: a drafter that continues "
            "keeps its shape and mask token. Leave them out, or leave out the drafter to train a new one."
        )
    return adapt(
        DFlashDraftModel.from_pretrained(recipe.drafter),
        block_size=recipe.block_size,
        sliding_window=recipe.sliding_window,
        target_layer_ids=recipe.target_layer_ids,
    )


if __name__ == "__main__":
    main()
