# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf train` and `dflash-hf plan`: train a drafter for a target, or continue one; say what that will need.

    dflash-hf train --target Qwen/Qwen3-4B --completions FILE [--config FILE.yaml] [--field value ...]
    dflash-hf train --accelerate_config two_pairs --config recipes/qwen3.6-27b/config.yaml --completions FILE
    dflash-hf plan --target Qwen/Qwen3-4B --completions FILE --dry_run_gpus 4x96

A new drafter's shape, taps and mask token follow from the target. `plan` takes the options of `train` and loads no
weights; with `--preflight true` it tries everything out on the machine. Neither trains.
"""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, TrainingArguments, set_seed

from .adapting import adapt
from .callbacks import ProfileCallback, end_together
from .chats import is_remote
from .checkpoint_format import GEOMETRY
from .cli import errors_in_one_line, parse_config, refuse_unused
from .configuration_dflash import DFlashDraftConfig
from .configuration_dflash2 import DFlash2DraftConfig, target_scales
from .documents import read_manifest
from .frozen_target import FrozenTarget, random_target, read_target_config, synthetic_documents
from .modeling_dflash import DFlashDraftModel
from .modeling_dflash2 import DFlash2DraftModel
from .planning import Plan, RanksCallback, check_memory, check_ranks, make_plan, preflight
from .prefetch import place_target, placements
from .topology import planned_placements
from .trainer import DFlashTrainer, documents_reader, new_drafter_config
from .training_args import DFlashTrainingArguments, check_scripted
from .writing import check_writable


SHAPE = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types", "mask_token_id")
# Where transformers writes to if nothing is said.
TRAINERS_DEFAULT = TrainingArguments.output_dir or "trainer_output"
CHANGEABLE = ("block_size", "sliding_window", "target_layer_ids")


@dataclass
class TrainArguments:
    """What to train, on what, and what to do in place of training."""

    target: str = field(metadata={"help": "Hub id or folder of the target."})
    completions: str | None = field(
        default=None, metadata={"help": "Folder of `dflash-hf tokenize`, or JSON or Parquet of answered chats."}
    )
    eval_completions: str | None = field(
        default=None, metadata={"help": "Documents (their eval split) or chats to evaluate on."}
    )
    drafter: str | None = field(default=None, metadata={"help": "Drafter to continue; a new one if unset."})
    accelerate_config: str | None = field(
        default=None,
        metadata={"help": "Start the processes of this configuration: one_pair, two_pairs, ... or a file."},
    )
    dflash2: bool = field(
        default=False, metadata={"help": "Train a DFlash 2 drafter; it starts as the DFlash drafter that is given."}
    )
    conv_kernel_size: int | None = field(default=None, metadata={"help": "Slots that a DFlash 2 convolution reads."})
    conv_group_size: int | None = field(default=None, metadata={"help": "Channels that share a DFlash 2 correction."})
    selector_rank: int | None = field(
        default=None, metadata={"help": "Width of the selector's codebooks; 64 or less for a small vocabulary."}
    )
    selector_top_k: int | None = field(default=None, metadata={"help": "Candidates of a slot of the selector."})
    # A new drafter's shape, by default the target's; the last three change one that continues.
    num_layers: int | None = field(default=None, metadata={"help": "Layers of a new drafter."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Attention heads of a new drafter."})
    num_key_value_heads: int | None = field(default=None, metadata={"help": "Key-value heads of a new drafter."})
    head_dim: int | None = field(default=None, metadata={"help": "Size of an attention head of a new drafter."})
    intermediate_size: int | None = field(default=None, metadata={"help": "MLP size of a new drafter."})
    layer_types: list[str] | None = field(
        default=None, metadata={"help": "sliding_attention or full_attention for each layer of a new drafter."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Token id of a slot to be drafted; by default one that the target reserves."}
    )
    block_size: int | None = field(default=None, metadata={"help": "Slots per block, the known anchor included."})
    sliding_window: int | None = field(default=None, metadata={"help": "Window of the sliding layers in tokens."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Target layers that are read."})
    # In place of training
    dry_run: bool = field(default=False, metadata={"help": "Say what the run needs, without loading any weights."})
    dry_run_gpus: str | None = field(
        default=None, metadata={"help": "Plan for GPUs that are not here, by number and GB: 4x96."}
    )
    gpu: str | None = field(
        default=None, metadata={"help": "What the planned GPUs are (H100), or TFLOP/s of their bf16 product."}
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

    def __post_init__(self) -> None:
        """Exactly one source of documents, and only real ones for a real target."""
        for name in ("target", "drafter", "random_target_config"):
            _check_exists(name, vars(self)[name])
        if self.accelerate_config is not None:
            raise ValueError("accelerate_config belongs on the command line, since it starts the processes.")
        if (self.completions is None) == (self.num_synthetic_documents == 0):
            raise ValueError(
                f"completions is {self.completions} and num_synthetic_documents is {self.num_synthetic_documents}: "
                "give --completions FILE to train, or --num_synthetic_documents N to measure."
            )
        if self.random_target_config and self.completions:
            raise ValueError(
                "random_target_config has no tokenizer for completions. Give --num_synthetic_documents N with it."
            )
        if self.num_synthetic_documents:
            refuse_unused(self, ("eval_completions",), "beside synthetic documents")
        if self.dry_run and self.preflight:
            raise ValueError("dry_run loads nothing and preflight loads everything: give one of them.")
        given = [name for name in ("num_layers", *SHAPE) if vars(self)[name] is not None]
        if self.drafter is not None and given:
            raise ValueError(
                f"{', '.join(given)} cannot be given with drafter={self.drafter}: a drafter that continues keeps its "
                "shape and mask token. Leave them out, or leave out the drafter to train a new one."
            )
        if not self.dflash2:
            refuse_unused(self, GEOMETRY, "without dflash2")
        self.gpus()

    def gpus(self) -> tuple[int, float] | None:
        """Number and bytes of memory of the GPUs that a dry run is to plan for, None for those that are here."""
        if self.dry_run_gpus is None:
            return None
        number, _, gigabytes = self.dry_run_gpus.partition("x")
        try:
            gpus = int(number), float(gigabytes) * 1e9
        except ValueError:
            gpus = 0, 0.0
        if gpus[0] < 1 or not 0 < gpus[1] < float("inf"):
            raise ValueError(f"dry_run_gpus is {self.dry_run_gpus!r}; expected NUMBERxGIGABYTES, such as 4x96.")
        return gpus


def _check_exists(name: str, given: str | None) -> None:
    """Refuse a path to nothing, which would be taken for the name of a Hub repository."""
    if given is None or Path(given).exists():
        return
    if given.count("/") > 1 or given.startswith(("/", ".", "~")):
        raise ValueError(
            f"{name}: {given} is neither a repository id (owner/name) nor a folder or file in {Path.cwd()}."
        )


def main(argv: Sequence[str] | None = None, default_config: Path | None = None, plan: bool = False) -> None:
    """Train, or with `plan` say what training would need; `default_config` holds only where no target is named."""
    description, prog = __doc__.split("\n")[0], f"dflash-hf {'plan' if plan else 'train'}"
    words = sys.argv[1:] if argv is None else argv
    names_target = any(word.split("=")[0] == "--target" for word in words)
    recipe, args = parse_config(
        (TrainArguments, DFlashTrainingArguments),
        words,
        default_config=None if names_target else default_config,
        description=description,
        prog=prog,
    )
    recipe.dry_run = recipe.dry_run or (plan and not recipe.preflight)
    if args.output_dir == TRAINERS_DEFAULT:
        args.output_dir = f"outputs/{Path(recipe.target).name.lower()}"
    with errors_in_one_line(prog):
        check_scripted(args, recipe.eval_completions is not None)
        resumed_checkpoint(args)
        if recipe.gpus() is None:
            devices = placements(args)  # stops at once where the layout does not fit the GPUs
            if recipe.compare_ranks_steps:
                check_ranks(recipe.compare_ranks_steps, args.world_size)
            _tell_of_idle_gpus(args, devices)
        if args.process_index == 0:
            check_writable(Path(str(args.output_dir)))
    set_seed(args.seed)
    with end_together():
        run = Run(recipe, args)
        run.dry_run() if recipe.dry_run else run.train()


def _tell_of_idle_gpus(args: DFlashTrainingArguments, devices: list) -> None:
    used = {device for placement in devices for device in (placement.drafter, *placement.target)}
    visible = torch.cuda.device_count() if args.device.type == "cuda" else 0
    if visible > len(used) and args.process_index == 0:
        print(f"{len(used)} of {visible} GPUs are used; --accelerate_config two_pairs uses four, in two pairs.")


def resumed_checkpoint(args: DFlashTrainingArguments) -> str | bool | None:
    """What to resume from: "true" means the last checkpoint in output_dir, as in Python."""
    resume = {"true": True, "false": None}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    if isinstance(resume, str) and not is_remote(resume) and not Path(resume).is_dir():
        raise ValueError(
            f"resume_from_checkpoint is {resume!r}, which is not a folder in {Path.cwd()}. Give a checkpoint-N of an "
            "earlier run, or true for the newest complete one of output_dir."
        )
    return resume


class Run:
    """One run of the command, from its options."""

    def __init__(self, recipe: TrainArguments, args: DFlashTrainingArguments):
        self.recipe, self.args = recipe, args
        with errors_in_one_line("dflash-hf train"):
            self.target_config = self._read_target_config()
            self.tokenizer = None if recipe.random_target_config else AutoTokenizer.from_pretrained(recipe.target)
            self.drafter_config = self._drafter_config()
            self.documents, self.eval_documents = self._read_documents()

    def _read_target_config(self) -> PreTrainedConfig:
        name = self.recipe.random_target_config or self.recipe.target
        try:
            return read_target_config(name)
        except OSError as error:
            raise OSError(f"The configuration of the target {name} cannot be read: {error}") from error

    def _drafter_config(self) -> DFlashDraftConfig:
        """The drafter's configuration, without its weights where it continues a trained one."""
        given = {name: vars(self.recipe)[name] for name in (*SHAPE, *CHANGEABLE)}
        given = {name: value for name, value in given.items() if value is not None}
        if self.recipe.drafter is not None:
            config = DFlashDraftConfig.from_pretrained(self.recipe.drafter, **given)
            return DFlash2DraftConfig.from_dict(config.to_dict(), **self._own()) if self.recipe.dflash2 else config
        if self.recipe.sliding_window is not None:
            given["use_sliding_window"] = True
        if self.recipe.num_layers is not None:
            given["num_hidden_layers"] = self.recipe.num_layers
        if self.recipe.dflash2:
            given |= {"kind": DFlash2DraftConfig, **self._own()}
        return new_drafter_config(self.target_config, self.tokenizer, **given)

    def _own(self) -> dict[str, Any]:
        """The fields of DFlash 2 that are given, and those of the target's logits."""
        given = {name: value for name in GEOMETRY if (value := vars(self.recipe)[name]) is not None}
        return given | target_scales(self.target_config)

    def _read_documents(self) -> tuple[Any, Any]:
        """Documents to train on and to evaluate on."""
        recipe, args, config = self.recipe, self.args, self.drafter_config
        if recipe.num_synthetic_documents:
            length, mask = min(recipe.synthetic_length, args.row_length), config.mask_token_id or 0
            count = recipe.num_synthetic_documents
            return synthetic_documents(count, length, config.vocab_size, mask, args.seed), None
        assert recipe.completions is not None and self.tokenizer is not None  # checked
        documents = documents_reader(args, recipe.target, self.tokenizer)
        evaluation = None
        if recipe.eval_completions is not None:
            # Of tokenised documents the part that was set apart for evaluation.
            is_tokenized = read_manifest(recipe.eval_completions) is not None
            evaluation = documents(recipe.eval_completions, split="eval" if is_tokenized else "train")
        return documents(recipe.completions), evaluation

    def plan(self, **changes: Any) -> Plan:
        """The plan, with training arguments changed."""
        args, gpus = copy.copy(self.args), self.recipe.gpus()
        vars(args).update(changes)
        world_size, capacity = args.world_size, None
        if gpus is not None:
            devices, capacity = planned_placements(gpus[0], args.target_layout), gpus[1]
            world_size = len(devices)
        else:
            devices = placements(args)
            if args.device.type == "cuda":
                capacity = float(torch.cuda.get_device_properties(args.device).total_memory)
        return make_plan(
            self.target_config,
            self.drafter_config,
            args,
            devices,
            self.documents,
            world_size,
            self.recipe.gpu,
            capacity,
        )

    def check_memory(self, plan: Plan) -> None:
        """Refuse a run that does not fit."""
        if self.recipe.check_memory and plan.capacity is not None:
            gpus = self.recipe.gpus()
            check_memory(plan, self.plan, torch.cuda.device_count() if gpus is None else gpus[0])

    def dry_run(self) -> None:
        """Print the plan and write it to `dry_run.json` in the output folder."""
        with errors_in_one_line("dflash-hf train"):
            plan = self.plan()
            if self.args.process_index == 0:
                print(plan.report())
                folder = Path(str(self.args.output_dir))
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "dry_run.json").write_text(json.dumps(asdict(plan), indent=2))
            self.check_memory(plan)
            if self.args.process_index == 0:
                config = {"cpu": "cpu", "paired": "one_pair"}.get(plan.layout, "one_gpu")
                config = "two_pairs" if plan.world_size == 2 else config
                print(f"{'to start it':<16} dflash-hf train --accelerate_config {config} ... with the same options")

    def _load_target(self, taps: list[int] | None) -> FrozenTarget:
        """The target on its device or devices, before the trainer is made, which then takes it as it is."""
        recipe, args = self.recipe, self.args
        device, spread = place_target(args)
        given, args.target_model_init_kwargs = args.target_model_init_kwargs or {}, None
        # A JSON string becomes a dict in TrainingArguments, and every configuration has taps.
        assert isinstance(given, dict) and taps is not None
        options = {"compile_target": args.compile_target, "allow_slow_target": args.allow_slow_target}
        options["final_states"] = args.compares
        if not recipe.random_target_config:
            return FrozenTarget(recipe.target, taps, device=device, **options, **{**spread, **given})
        if device is None:
            raise SystemExit("random_target_config needs one device: set target_layout to paired or shared.")
        return random_target(
            self.target_config, taps, device, given.get("dtype", torch.bfloat16), args.seed, **options
        )

    def _load_drafter(self) -> DFlashDraftModel:
        """A trained drafter with its changes, or one with random weights, drawn on its device."""
        if self.recipe.drafter is None:
            with self.args.device:
                return DFlashDraftModel.class_of(self.drafter_config)(self.drafter_config)
        changes = {name: vars(self.recipe)[name] for name in CHANGEABLE}
        drafter = adapt(DFlashDraftModel.from_pretrained(self.recipe.drafter), **changes)
        return (
            DFlash2DraftModel.from_dflash(drafter, self.args.seed, **self._own()) if self.recipe.dflash2 else drafter
        )

    def train(self) -> None:
        """Train, save, evaluate; or the preflight."""
        recipe, args = self.recipe, self.args
        with errors_in_one_line("dflash-hf train"):
            if args.device.type == "cuda" and recipe.check_memory:
                self.check_memory(self.plan())
        drafter = self._load_drafter()
        target = self._load_target(drafter.config.target_layer_ids)

        def make_trainer(arguments: DFlashTrainingArguments, eval_dataset: Any) -> DFlashTrainer:
            return DFlashTrainer(
                model=drafter,
                target_model=target,
                args=arguments,
                train_dataset=self.documents,
                eval_dataset=eval_dataset,
                processing_class=self.tokenizer,
                recipe={"script": "dflash-hf train", **asdict(recipe)},
            )

        if recipe.preflight:
            preflight(make_trainer, args, target, recipe.preflight_upload_to)
            return
        trainer = make_trainer(args, self.eval_documents)
        if recipe.profile_steps:
            start = args.measure_alone_steps + 5
            trainer.add_callback(ProfileCallback(str(args.output_dir), recipe.profile_steps, start))
        if recipe.compare_ranks_steps:
            pause = trainer.throughput.pause
            trainer.add_callback(RanksCallback(str(args.output_dir), recipe.compare_ranks_steps, pause))
        trainer.train(resume_from_checkpoint=resumed_checkpoint(args))
        trainer.save_state()
        if recipe.random_target_config:
            return  # nothing was learned
        trainer.save_model()
        if self.eval_documents is not None:
            metrics = trainer.evaluate()
            trainer.log_metrics("eval", metrics)
            trainer.save_metrics("eval", metrics)
        if args.process_index == 0:
            print(f"The drafter is in {args.output_dir}; next: dflash-hf validate {args.output_dir}")
            if (said := trainer.learned_nothing()) is not None:
                print(said)
