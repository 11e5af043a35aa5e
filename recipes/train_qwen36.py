# SPDX-License-Identifier: Apache-2.0
"""Train a drafter for a target, or continue a published one.

    python recipes/train_qwen36.py --completions FILE [--config recipes/qwen3.6-27b/config.yaml] [--field value ...]
    accelerate launch --config_file recipes/accelerate/two_pairs.yaml recipes/train_qwen36.py --completions FILE
    accelerate launch recipes/train_qwen36.py --completions FILE --config recipes/qwen3.6-27b/continue.yaml

The recipe is a YAML file; any of its fields can be given on the command line. `--dry_run true` says what the run will
need, `--preflight true` tries everything out on the machine; neither trains.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, set_seed

from dflash_hf import (
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
)
from dflash_hf.adapting import adapt
from dflash_hf.callbacks import ProfileCallback, end_together
from dflash_hf.chats import is_remote
from dflash_hf.cli import errors_in_one_line, parse_config, refuse_unused
from dflash_hf.documents import read_manifest
from dflash_hf.frozen_target import FrozenTarget, random_target, read_target_config, synthetic_documents
from dflash_hf.losses import compares_distributions
from dflash_hf.planning import RanksCallback, check_memory, check_ranks, make_plan, preflight
from dflash_hf.prefetch import place_target, placements
from dflash_hf.publishing import check_push
from dflash_hf.topology import planned_placements
from dflash_hf.trainer import documents_reader, settle_objective
from dflash_hf.training_args import check_scripted
from dflash_hf.writing import check_writable


CONFIG = Path(__file__).resolve().parent / "qwen3.6-27b" / "config.yaml"


@dataclass
class RecipeArguments:
    target: str = field(metadata={"help": "Hub id or folder of the target."})
    completions: str | None = field(
        default=None, metadata={"help": "Documents of tokenize_completions.py, or JSON or Parquet of answered chats."}
    )
    eval_completions: str | None = field(
        default=None, metadata={"help": "Documents (their eval split) or chats to evaluate on."}
    )
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

    # Instead of training
    dry_run: bool = field(default=False, metadata={"help": "Say what the run needs, without loading any weights."})
    dry_run_gpus: str | None = field(
        default=None, metadata={"help": "Plan for GPUs that are not here, by number and GB: 4x96."}
    )
    preflight: bool = field(default=False, metadata={"help": "Try devices, steps, checkpoint and upload, then stop."})
    preflight_upload_to: str | None = field(
        default=None,
        metadata={"help": "Where the preflight uploads to; by default remote_checkpoint_dir or the output folder."},
    )
    check_memory: bool = field(default=True, metadata={"help": "Stop where the run cannot fit the GPUs."})
    # For measuring speed and memory without a download
    random_target_config: str | None = field(
        default=None, metadata={"help": "Configuration whose shape a target of random weights gets, for measuring."}
    )
    num_synthetic_documents: int = field(
        default=0, metadata={"help": "Documents of random tokens in place of completions, for measuring."}
    )
    synthetic_length: int = field(default=2048, metadata={"help": "Tokens of a synthetic document."})
    profile_steps: int = field(default=0, metadata={"help": "Steps to profile, from the sixth prefetched one on."})
    compare_ranks_steps: int = field(
        default=0, metadata={"help": "Compare the drafter's weights over the ranks every so many steps."}
    )


def main() -> None:
    recipe, args = parse_config(
        (RecipeArguments, DFlashTrainingArguments), default_config=CONFIG, description=__doc__.split("\n")[0]
    )
    with errors_in_one_line():
        check_sources(recipe)
        check_scripted(args, recipe.eval_completions is not None)
        resumed_checkpoint(args)
        check_shape(recipe)
        settle_objective(args, recipe.drafter)
        if not recipe.dry_run:
            check_push(args)
        if planned_gpus(recipe) is None:
            placements(args)  # stops at once where the layout does not fit the GPUs
            if recipe.compare_ranks_steps:
                check_ranks(recipe.compare_ranks_steps, args.world_size)
        if args.process_index == 0:
            check_writable(Path(args.output_dir))
    set_seed(args.seed)
    with end_together():
        if recipe.dry_run:
            with errors_in_one_line():
                dry_run(recipe, args)
        else:
            train(recipe, args)


def check_sources(recipe: RecipeArguments) -> None:
    """Exactly one source of documents, and real ones only for a real target."""
    counts = {"num_synthetic_documents": 0, "synthetic_length": 4, "profile_steps": 0, "compare_ranks_steps": 0}
    for name, minimum in counts.items():
        value = getattr(recipe, name)
        if value < minimum:
            raise ValueError(f"{name} is {value}; expected {minimum} or more.")
    for name in ("target", "drafter", "random_target_config"):
        check_exists(name, getattr(recipe, name))
    if (recipe.completions is None) == (recipe.num_synthetic_documents == 0):
        raise ValueError(
            f"completions is {recipe.completions} and num_synthetic_documents is {recipe.num_synthetic_documents}: "
            "give --completions FILE to train, or --num_synthetic_documents N to measure."
        )
    if recipe.random_target_config and recipe.completions:
        raise ValueError(
            "random_target_config has no tokenizer for completions, and nothing is learned from random weights. Give "
            "--num_synthetic_documents N with it, or leave it out."
        )
    if not recipe.num_synthetic_documents:
        refuse_unused(recipe, ("synthetic_length",), "without num_synthetic_documents")
    else:
        refuse_unused(recipe, ("eval_completions",), "beside synthetic documents")
    if recipe.dry_run and recipe.preflight:
        raise ValueError("dry_run loads nothing and preflight loads everything: give one of them.")
    if not recipe.preflight:
        refuse_unused(recipe, ("preflight_upload_to",), "without preflight")


def check_exists(name: str, given: str | None) -> None:
    """Refuse a path to nothing, which would be taken for the name of a Hub repository."""
    if given is None or Path(given).exists():
        return
    if given.count("/") > 1 or given.startswith(("/", ".", "~")):
        raise ValueError(
            f"{name}: {given} is neither a folder nor a repository id (owner/name), nor is there such a file (working "
            f"directory: {Path.cwd()}). Check the path."
        )


def resumed_checkpoint(args: DFlashTrainingArguments) -> str | bool | None:
    """What to resume from: "true" means the last checkpoint in output_dir, as in Python."""
    resume = {"true": True, "false": None}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    if isinstance(resume, str) and not is_remote(resume) and not Path(resume).is_dir():
        raise ValueError(
            f"resume_from_checkpoint is {resume!r}, which is no folder here (working directory: {Path.cwd()}). "
            "Give a checkpoint-N of an earlier run, or true for the newest complete one of output_dir."
        )
    return resume


def check_shape(recipe: RecipeArguments) -> None:
    """A drafter that continues has its shape already."""
    fixed = ("num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    given = [name for name in (*fixed, "layer_types", "mask_token_id") if getattr(recipe, name) is not None]
    if recipe.drafter is not None and given:
        raise ValueError(
            f"{', '.join(given)} cannot be given together with drafter={recipe.drafter}: a drafter that continues "
            "keeps its shape and mask token. Leave them out (--config recipes/qwen3.6-27b/continue.yaml has none), or "
            "leave out the drafter to train a new one."
        )


def target_config(recipe: RecipeArguments) -> PreTrainedConfig:
    name = recipe.random_target_config or recipe.target
    try:
        return read_target_config(name)
    except OSError as error:
        raise OSError(f"The configuration of the target {name} cannot be read: {error}") from error


def dry_run(recipe: RecipeArguments, args: DFlashTrainingArguments) -> None:
    """Print the plan and write it to `dry_run.json` in the output folder."""
    drafter_config = drafter_configuration(recipe)
    documents, _ = read_documents(recipe, args, drafter_config)
    gpus = planned_gpus(recipe)
    if gpus is None:
        plan = make_plan(target_config(recipe), drafter_config, args, placements(args), documents)
    else:
        devices = planned_placements(gpus[0], args.target_layout)
        plan = make_plan(target_config(recipe), drafter_config, args, devices, documents, len(devices))
    if args.process_index == 0:
        print(plan.report())
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(args.output_dir) / "dry_run.json").write_text(json.dumps(asdict(plan), indent=2))
    if recipe.check_memory and gpus is not None:
        check_memory(plan, int(gpus[1] * 1e9), gpus[0])
    elif recipe.check_memory:
        refuse_what_cannot_fit(plan, args)


def planned_gpus(recipe: RecipeArguments) -> tuple[int, float] | None:
    """Number and gigabytes of the GPUs that a dry run is to plan for, None for those that are here."""
    if recipe.dry_run_gpus is None:
        return None
    number, _, gigabytes = recipe.dry_run_gpus.partition("x")
    try:
        gpus = int(number), float(gigabytes)
    except ValueError:
        gpus = 0, 0.0
    if gpus[0] < 1 or not 0 < gpus[1] < float("inf") or not recipe.dry_run:
        raise ValueError(
            f"dry_run_gpus is {recipe.dry_run_gpus!r} with dry_run={recipe.dry_run}: expected NUMBERxGIGABYTES, such "
            "as 4x96 for four GPUs of 96 GB, together with --dry_run true. It plans for GPUs that are not here."
        )
    return gpus


def refuse_what_cannot_fit(plan, args: DFlashTrainingArguments) -> None:
    if args.device.type == "cuda":
        total = torch.cuda.get_device_properties(args.device).total_memory
        check_memory(plan, total, torch.cuda.device_count())


def read_documents(recipe: RecipeArguments, args: DFlashTrainingArguments, config: DFlashDraftConfig) -> tuple:
    """Documents to train on and to evaluate on."""
    if recipe.num_synthetic_documents:
        length, mask = min(recipe.synthetic_length, args.row_length), config.mask_token_id or 0
        return synthetic_documents(recipe.num_synthetic_documents, length, config.vocab_size, mask, args.seed), None
    documents = documents_reader(args, recipe.target, AutoTokenizer.from_pretrained(recipe.target))
    assert recipe.completions is not None  # checked
    evaluation = None
    if recipe.eval_completions is not None:
        # Of tokenised documents the part that was set apart for evaluation.
        is_tokenized = read_manifest(recipe.eval_completions) is not None
        evaluation = documents(recipe.eval_completions, split="eval" if is_tokenized else "train")
    return documents(recipe.completions), evaluation


def load_target(recipe: RecipeArguments, args: DFlashTrainingArguments, taps: list[int]) -> FrozenTarget:
    """The target on its device or devices, before the trainer is made, which then takes it as it is."""
    device, spread = place_target(args)
    given, args.target_model_init_kwargs = args.target_model_init_kwargs or {}, None
    assert isinstance(given, dict)  # a JSON string becomes a dict in TrainingArguments
    options = {"compile_target": args.compile_target, "allow_slow_target": args.allow_slow_target}
    options["final_states"] = compares_distributions(args.objective)
    if recipe.random_target_config:
        if device is None:
            raise SystemExit(
                "random_target_config makes a target on one device: set target_layout to paired or shared."
            )
        dtype = given.get("dtype", torch.bfloat16)
        return random_target(target_config(recipe), taps, device, dtype, args.seed, **options)
    return FrozenTarget(recipe.target, taps, device=device, **options, **{**spread, **given})


def train(recipe: RecipeArguments, args: DFlashTrainingArguments) -> None:
    """Train, save, evaluate."""
    with errors_in_one_line():
        drafter_config = drafter_configuration(recipe)
        train_documents, eval_documents = read_documents(recipe, args, drafter_config)
        if args.device.type == "cuda" and recipe.check_memory:
            refuse_what_cannot_fit(
                make_plan(target_config(recipe), drafter_config, args, placements(args), train_documents), args
            )
    if recipe.drafter is None:
        drafter = new_drafter(recipe, args.device)
    else:
        drafter = adapt(
            DFlashDraftModel.from_pretrained(recipe.drafter),
            block_size=recipe.block_size,
            sliding_window=recipe.sliding_window,
            target_layer_ids=recipe.target_layer_ids,
        )
    # Loaded here and not by the trainer, which takes it as it is.
    target = load_target(recipe, args, drafter.config.target_layer_ids)
    tokenizer = None if recipe.random_target_config else AutoTokenizer.from_pretrained(recipe.target)

    def make_trainer(arguments: DFlashTrainingArguments, eval_dataset: Any) -> DFlashTrainer:
        return DFlashTrainer(
            model=drafter,
            target_model=target,
            args=arguments,
            train_dataset=train_documents,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            recipe={"script": Path(__file__).name, **asdict(recipe)},
        )

    if recipe.preflight:
        preflight(make_trainer, args, target, recipe.preflight_upload_to)
        return
    trainer = make_trainer(args, eval_documents)
    if recipe.profile_steps:
        start = args.measure_alone_steps + 5
        trainer.add_callback(ProfileCallback(args.output_dir, recipe.profile_steps, start))
    if recipe.compare_ranks_steps:
        pause = trainer.throughput.pause
        trainer.add_callback(RanksCallback(args.output_dir, recipe.compare_ranks_steps, pause))
    trainer.train(resume_from_checkpoint=resumed_checkpoint(args))
    trainer.save_state()
    if recipe.random_target_config:
        return  # nothing was learned
    trainer.save_model()
    if eval_documents is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.process_index == 0:
        print(f"The drafter is in {args.output_dir}; next: dflash-hf validate {args.output_dir}")


def drafter_configuration(recipe: RecipeArguments) -> DFlashDraftConfig:
    """The drafter's configuration, without its weights where it continues a trained one."""
    if recipe.drafter is not None:
        changes = {name: getattr(recipe, name) for name in ("block_size", "sliding_window", "target_layer_ids")}
        given = {name: value for name, value in changes.items() if value is not None}
        return DFlashDraftConfig.from_pretrained(recipe.drafter, **given)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types")
    names += ("mask_token_id", "block_size", "sliding_window", "target_layer_ids")
    given = {name: getattr(recipe, name) for name in names if getattr(recipe, name) is not None}
    if recipe.sliding_window is not None:
        given["use_sliding_window"] = True
    if recipe.num_layers is not None:
        given["num_hidden_layers"] = recipe.num_layers
    return DFlashDraftConfig.from_target_config(target_config(recipe), **given)


def new_drafter(recipe: RecipeArguments, device: torch.device) -> DFlashDraftModel:
    """A drafter with random weights, drawn on its device, and a shape of its own."""
    with device:
        return DFlashDraftModel(drafter_configuration(recipe))


if __name__ == "__main__":
    main()
