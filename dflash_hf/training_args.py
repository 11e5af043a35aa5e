# SPDX-License-Identifier: Apache-2.0
"""The arguments of a training, and which of transformers' are refused.

Refused is what would train another model than the one asked for, or cost GPU hours, without a word. What transformers,
torch and peft refuse themselves is theirs to refuse; settings that an optimizer does not read are theirs to pass over.
"""

import math
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames

from .chats import check_address
from .frozen_target import refuse_token
from .losses import OBJECTIVES, SLOT_WEIGHTS, Objective, compares_distributions, make_objective
from .topology import FEATURE_COPIES, LAYOUTS, check_world_size


# What may differ on resuming once `allow_resume_changes` names it.
CHANGES = ("target", "tokenizer", "data", "rows")
SELECTOR_ARGUMENTS = (
    *("selector_alpha", "selector_objective", "selector_inject", "selector_cut_off", "selector_warmup_steps"),
)
# Arguments that decide what is learned from them: changing one on the way is a choice, of which a resume tells.
LEARNING_ARGUMENTS = (
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("muon", "num_anchors", "max_anchors_per_row", "context_noise", "objective", "loss_gamma", "dpace_alpha"),
    *("slot_weights", "loss_temperature", "cross_entropy_share", *SELECTOR_ARGUMENTS),
    *("bf16", "fp16", "tf32", "ignore_data_skip", "target_model_init_kwargs"),
)
# What names an objective, itself first, and its settings.
OBJECTIVE_ARGUMENTS = (
    *("objective", "loss_gamma", "dpace_alpha", "slot_weights", "loss_temperature", "cross_entropy_share"),
    *SELECTOR_ARGUMENTS[:-1],
)
FINITE = sys.float_info.max
ABOVE_0 = sys.float_info.min
# (names, smallest value, largest value, both in words); nan is outside of all.
RANGES: tuple[tuple[tuple[str, ...], float, float, str], ...] = (
    (
        ("learning_rate", "weight_decay", "warmup_steps", "context_noise", "selector_alpha"),
        0,
        FINITE,
        "0 or more, and finite",
    ),
    (("max_grad_norm",), 0, math.inf, "0 (no clipping) or more"),
    (("adam_beta1", "adam_beta2"), 0, math.nextafter(1, 0), "in [0, 1)"),
    (("adam_epsilon", "loss_gamma"), ABOVE_0, FINITE, "more than 0, and finite"),
    (("dpace_alpha", "cross_entropy_share"), 0, 1, "in [0, 1]"),
    (("loss_temperature",), 1e-3, FINITE, "finite and at least 0.001, where the target's logits do not overflow"),
    (
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("num_anchors", "row_length", "max_anchors_per_row", "max_length"),
            *("loss_chunk_blocks", "max_nonfinite_steps"),
        ),
        *(1, FINITE, "at least 1"),
    ),
    (("seed", "data_seed"), 0, 2**32 - 1, "in 0 to 4294967295"),
    (
        ("dataloader_num_workers", "prefetch_depth", "measure_alone_steps", "selector_warmup_steps"),
        0,
        FINITE,
        "0 or more",
    ),
    (("logging_steps", "save_steps", "eval_steps"), 0, FINITE, "a number of steps, or below 1 a share of all steps"),
)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "objective": OBJECTIVES,
    "slot_weights": (None, *SLOT_WEIGHTS),
    "selector_objective": (None, *OBJECTIVES),
    "target_layout": LAYOUTS,
    "feature_copies": FEATURE_COPIES,
    "drafter_attn_implementation": (None, "flex_attention", "sdpa", "eager"),
}

ONE_DRAFTER = (
    "would cut the drafter into parts. Several GPUs train it by DDP (recipes/accelerate/two_pairs.yaml); "
    "activation_checkpointing=True or optim='adamw_torch_8bit' save memory."
)
LOSES_MASTERS = "leaves the drafter without fp32 masters. Set bf16=True instead."
# Arguments of transformers' Trainer that have to be on or off, and what the other value would do; these first, before
# transformers acts on them.
REFUSED_FIRST: dict[str, tuple[bool, str]] = {
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), (False, ONE_DRAFTER)),
    "use_liger_kernel": (False, "would put Qwen3's kernels into the drafter. Use compile_layers."),
}
REFUSED: dict[str, tuple[bool, str]] = {
    "remove_unused_columns": (False, "would drop every column before the collator. Leave it False."),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), (False, LOSES_MASTERS)),
    "enable_jit_checkpoint": (False, "writes a checkpoint in place. Leave it out: SIGTERM saves one anyway."),
    "label_smoothing_factor": (False, "does not reach a drafter's objective. Leave it 0."),
    "average_tokens_across_devices": (True, "does nothing: a loss is always normalised over all ranks."),
    "auto_find_batch_size": (False, "would start another run, with fewer rows a step. Lower row_length instead."),
    "dataloader_in_order": (True, "would let batches overtake each other, so that a resume skips others."),
}
# Of `accelerator_config`.
REFUSED_OF_ACCELERATOR: dict[str, tuple[bool, str]] = {
    **dict.fromkeys(("split_batches", "dispatch_batches"), (False, "would cut up the rows that each rank reads.")),
    "even_batches": (True, "would leave ranks without a last batch, for which others would wait."),
}
# Arguments of [`DFlashTrainer`] that it would pass on to transformers' Trainer.
REFUSED_OF_TRAINER = {
    "compute_metrics": "would never be called, since no logits are kept. Leave it out.",
    "compute_loss_func": "would never be called: the loss is that of args.objective. Override compute_loss instead.",
    "model_init": "would make another drafter than the one that is checked. Make a trainer per trial (model=None).",
}
# What `accelerate launch` sets, behind ACCELERATE_USE_.
SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")


def _refuse(refused: dict[str, tuple[bool, str]], values: Mapping[str, Any], prefix: str = "") -> None:
    for name, (taken, reason) in refused.items():
        if bool(values[name]) != taken:
            raise ValueError(f"{prefix}{name}={values[name]!r} {reason}")


def check_before(args: Any, environment: MutableMapping[str, str] = os.environ) -> None:
    """Refuse what the parent would act on before anything else could be said, and take what the launcher says.

    A launcher's mixed precision and compilation reach accelerate alone, by the environment, and would leave target,
    head and the record of the run with those of the arguments.
    """
    _refuse(REFUSED_FIRST, vars(args))
    for name in [f"ACCELERATE_USE_{kind}" for kind in SHARDING]:
        if environment.get(name, "").lower() in ("1", "true", "yes"):
            raise ValueError(f"The launcher set {name}={environment[name]}, which {ONE_DRAFTER}")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(f"The launcher set mixed_precision={precision}; expected no, bf16 or fp16.")
    if precision != "no" and not (args.bf16 or args.fp16):
        setattr(args, precision, True)
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no" and not args.torch_compile:
        args.torch_compile, args.torch_compile_backend = True, args.torch_compile_backend or backend


def check_scripted(args: Any, has_evaluation_data: bool) -> None:
    """Refuse, before a target is loaded, evaluations of nothing and what transformers leaves to scripts."""
    if args.do_predict:
        raise ValueError("do_predict=True: nothing is predicted here. Use `dflash-hf evaluate`.")
    if not has_evaluation_data and (args.do_eval or args.eval_on_start or args.eval_strategy.value != "no"):
        raise ValueError(
            f"eval_strategy={args.eval_strategy.value}, do_eval={args.do_eval} and eval_on_start={args.eval_on_start} "
            "ask for evaluations: give data for them (eval_completions, eval_documents)."
        )


def check_trainer_options(given: dict[str, Any], args: Any) -> None:
    """Refuse what [`DFlashTrainer`] was given beyond its own arguments and would ignore."""
    for name, reason in REFUSED_OF_TRAINER.items():
        if given.get(name) is not None:
            raise ValueError(f"{name} {reason}")
    optimizer = (given.get("optimizers") or (None, None))[0]
    if args.muon and (given.get("optimizer_cls_and_kwargs") is not None or optimizer is not None):
        raise ValueError("muon=True would do nothing beside an optimizer that is given. Give one of them.")


def _with_help(cls: Any) -> Any:
    """Give each field of a dataclass the text of its docstring as help, or that of the parent's field."""
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", cls.__doc__ or "", re.MULTILINE)
    texts = {name: " ".join(text.split()).replace("`", "") for name, text in entries}
    for name in cls.__annotations__:
        own, parent = cls.__dataclass_fields__[name], TrainingArguments.__dataclass_fields__.get(name)
        text = texts.get(name) or (parent.metadata["help"] if parent else "")
        own.metadata = MappingProxyType({"help": text, **own.metadata})
    return cls


@_with_help
@dataclass
class DFlashTrainingArguments(TrainingArguments):
    r"""
    [`~transformers.TrainingArguments`] plus what training a drafter needs.

    Defaults that differ from the parent's: the paper's learning rate, schedule, warm-up and epochs, one packed row
    per micro-batch, and `remove_unused_columns=False`, since the drafter's forward names none of the data's columns.

    Args:
        num_anchors: Anchors per document and epoch, i.e. blocks that the drafter learns to draft.
        max_anchors_per_row: Cap on the anchors of one packed row; by default a quarter of its tokens.
        row_length: Tokens of a packed row. Longer documents are refused; cut them when tokenising.
        max_length: Tokens kept of each document when the data holds chats that are tokenised here; `row_length` by
            default.
        enable_thinking: Handed to the chat template where chats are tokenised here; the template's own default if
            unset.
        allow_other_template: Train on documents that another chat template has written than the tokenizer's, with a
            warning.
        context_noise: Half-width of the uniform noise on the target's hidden states in training; 0 switches it off.
        objective: `"cross_entropy"` (the paper's decayed cross-entropy), `"dpace"`, or one that compares with the
            target's distribution, for which all of the target's layers run: `"kl"`, `"total_variation"`, `"lk"`,
            `"lk_hybrid"`, `"expected_acceptance"`. By default that of the drafter to continue, where its folder
            records one, and `"cross_entropy"` for a new one.
        loss_gamma: Decay length in slots of `"cross_entropy"`; `min(block_size / 2, 7)` by default.
        dpace_alpha: Smoothing of `"dpace"`.
        slot_weights: Weights of the slots where distributions are compared: `"dpace"` (the default) or `"decay"`.
        loss_temperature: Temperature of the target's distribution that the drafter is compared with.
        cross_entropy_share: Share of the cross-entropy in an objective that compares distributions.
        selector_alpha: What the loss of a DFlash 2 drafter's selector is multiplied by.
        selector_objective: Of the selector's own distribution over its candidates; by default cross-entropy with the
            weights of the objective.
        selector_inject: Put a true token that is no candidate in the place of the last one; by default the selector
            has no loss there.
        selector_cut_off: Keep the selector's gradients from the drafter's body.
        selector_warmup_steps: Steps in which `selector_alpha` rises from 0.
        muon: Train the matrices with Muon and the norms with AdamW; both take `learning_rate`, as Muon's steps are
            scaled to the size of AdamW's.
        loss_chunk_blocks: Blocks per chunk of the loss; by default as many as keep 2**27 logits.
        target_device: Device of the frozen target, in place of the one that `target_layout` gives.
        target_layout: Where the target of local rank r is: `"paired"` on GPU r + W of W local ranks, `"shared"` on the
            drafter's own, `"spread"` over an equal part of the GPUs from W on; `"auto"` is shared where every rank
            sees one GPU, and paired where there are two or more for each.
        prefetch_depth: Batches that the target works ahead of the drafter, whose hidden states wait in memory; 0 takes
            turns.
        feature_copies: `"peer"` copies hidden states from GPU to GPU, `"host"` through pinned host memory; `"auto"` is
            host where the environment has `NCCL_P2P_DISABLE=1`.
        measure_alone_steps: So many first steps run target and drafter in turn, so that the log says how long each
            takes by itself. A target on GPUs of its own runs each of their batches three times and the last one
            counts, since a GPU that has rested is faster for a while than under load.
        ddp_bf16_compression: Send gradients between ranks in bf16: half the bytes, rounded to 8 bits of mantissa.
        target_model_init_kwargs: Arguments of `from_pretrained` for a target given by id or folder.
        compile_target: Whether to compile, on CUDA, the layers of a Qwen3.5/3.6 target, which takes up to a minute at
            the start, or the attention of other targets over packed documents, which takes some seconds.
        allow_slow_target: Whether a hybrid target may run on CUDA without flash-linear-attention.
        drafter_attn_implementation: `"flex_attention"`, `"sdpa"` or `"eager"`; by default flex on CUDA and sdpa
            elsewhere.
        trainable_modules: Modules of the drafter that are trained, such as `["fc", "hidden_norm"]` or `["layers.4"]`;
            the rest keeps its weights. By default all.
        max_nonfinite_steps: Steps in a row with a loss or gradients that are not finite, each of them left out, that
            stop the run.
        remote_checkpoint_dir: fsspec address (`s3://bucket/run`) to which each finished checkpoint is copied in the
            background. Its package takes the credentials from the environment or its own files; none belong into the
            address.
        allow_resume_changes: What may differ from the resumed checkpoint's run: `"target"`, `"tokenizer"`, `"data"`,
            `"rows"`.
        compile_layers: Compile the drafter's layers one by one, which takes seconds instead of the minutes of a whole
            model; by default on CUDA. `torch_compile` keeps its meaning, the whole model, and switches this off.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "target_model_init_kwargs"]  # noqa: RUF012

    num_anchors: int = 512
    max_anchors_per_row: int | None = None
    row_length: int = 4096
    max_length: int | None = None
    enable_thinking: bool | None = None
    allow_other_template: bool = False
    context_noise: float = 0.05
    objective: str = field(default=None, metadata={"choices": [*OBJECTIVES]})  # type: ignore[assignment]
    loss_gamma: float | None = None
    dpace_alpha: float = 0.5
    slot_weights: str | None = None
    loss_temperature: float = 1.0
    cross_entropy_share: float = 0.0
    selector_alpha: float = 1.0
    selector_objective: str | None = None
    selector_inject: bool = False
    selector_cut_off: bool = False
    selector_warmup_steps: int = 0
    muon: bool = False
    loss_chunk_blocks: int | None = None
    target_device: str | None = None
    target_layout: str = field(default="auto", metadata={"choices": [*LAYOUTS]})
    prefetch_depth: int = 2
    feature_copies: str = field(default="auto", metadata={"choices": [*FEATURE_COPIES]})
    measure_alone_steps: int = 0
    ddp_bf16_compression: bool = False
    target_model_init_kwargs: dict[str, Any] | str | None = None
    compile_target: bool = True
    allow_slow_target: bool = False
    drafter_attn_implementation: str | None = None
    trainable_modules: list[str] | None = None
    max_nonfinite_steps: int = 10
    remote_checkpoint_dir: str | None = None
    allow_resume_changes: list[str] | None = None
    compile_layers: bool | None = None

    # Of the parent, with other defaults.
    learning_rate: float = 6e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.04
    num_train_epochs: float = 6.0
    per_device_train_batch_size: int = 1
    per_device_eval_batch_size: int = 1
    logging_steps: float = 10
    remove_unused_columns: bool = False
    # The parent's filter would log a broken step as a harmless one, and waits for the device in every micro-batch.
    logging_nan_inf_filter: bool = False
    # The drafter's configuration is published: training must not write use_cache=False into it.
    use_cache: bool = True

    def __post_init__(self):
        # The parent checks a GPU's types before it hears that accelerate was told to keep to the CPU, and where there
        # is none at all, ranks would each train alone.
        told = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        self.use_cpu = self.use_cpu or told
        self.cpu_for_want_of_gpu = not self.use_cpu and not torch.accelerator.is_available()
        self.use_cpu = self.use_cpu or self.cpu_for_want_of_gpu
        check_before(self)
        self.objective_given = self.objective is not None
        self.objective = self.objective or "cross_entropy"
        super().__post_init__()
        if self.device.type == "cpu":
            # Pinned memory speeds up copies to an accelerator; without one, torch warns at every dataloader.
            self.dataloader_pin_memory = False
        self._check_values()
        _refuse(REFUSED, vars(self))
        _refuse(REFUSED_OF_ACCELERATOR, vars(self.accelerator_config), "accelerator_config.")
        self._check_weights()
        self._check_optimizer()
        refuse_token(self.target_model_init_kwargs, "be written into every checkpoint with the arguments")
        check_world_size(self.world_size)
        if self.remote_checkpoint_dir is not None:
            check_address(self.remote_checkpoint_dir)

    def _check_values(self) -> None:
        """Numbers in their ranges, names that exist, and arguments that do not contradict each other."""
        values = vars(self)
        for names, smallest, largest, expected in RANGES:
            for name in names:
                if values[name] is not None and not smallest <= values[name] <= largest:
                    raise ValueError(f"{name}={values[name]} must be {expected}.")
        for name, taken in CHOICES.items():
            if values[name] not in taken:
                raise ValueError(f"{name}={values[name]!r} must be one of {', '.join(filter(None, taken))}.")
        if self.max_steps == 0 or (self.max_steps < 0 and not 0 < self.num_train_epochs <= FINITE):
            given = f"max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs}"
            raise ValueError(f"{given} would train nothing: give one of them more than 0, or call evaluate().")
        unknown = sorted(set(self.allow_resume_changes or []) - set(CHANGES))
        if unknown:
            raise ValueError(f"allow_resume_changes names {unknown}; what may differ is one of {list(CHANGES)}.")
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("fp16=True needs an accelerator; on a CPU leave it out, or set bf16=True.")
        if self.compile_layers and self.torch_compile:
            raise ValueError("compile_layers=True compiles layer by layer, torch_compile=True all at once. Give one.")
        metric = self.metric_for_best_model
        if metric is not None and not metric.endswith(("loss", "acceptance_length", "accuracy")):
            raise ValueError(
                f"metric_for_best_model={metric}: choose loss, acceptance_length or accuracy (or SET_loss)."
            )

    def take_objective(self, recipe: dict[str, Any]) -> None:
        """Take the objective of an earlier run's recipe, but for its settings that these arguments have changed."""
        self.objective = recipe.get("objective", "cross_entropy")
        for name in OBJECTIVE_ARGUMENTS[1:]:
            if name in recipe and vars(self)[name] == vars(DFlashTrainingArguments)[name]:
                setattr(self, name, recipe[name])
        self._check_weights()

    def _check_weights(self) -> None:
        """Settings that the objective does not read, so that another one than the one asked for would be trained."""
        unused = {"dpace_alpha"} if self.slot_weights == "decay" else {"loss_gamma"}
        if not self.compares:
            unused = {"slot_weights", "loss_temperature", "cross_entropy_share"}
            unused.add("dpace_alpha" if self.objective == "cross_entropy" else "loss_gamma")
        elif self.objective == "expected_acceptance" and self.cross_entropy_share == 0:
            unused = {"slot_weights", "loss_gamma", "dpace_alpha"}
        for name in sorted(unused):
            if vars(self)[name] != vars(DFlashTrainingArguments)[name]:
                raise ValueError(
                    f"{name}={vars(self)[name]} has no effect on objective={self.objective!r} with "
                    f"slot_weights={self.slot_weights!r}. Leave it out, or choose another objective."
                )

    def _check_optimizer(self) -> None:
        """Optimizers that would ignore what was asked for, and schedules that would fail once the target is loaded."""
        name = OptimizerNames(self.optim).value
        given = [n for n in ("optim_args", "optim_target_modules") if vars(self)[n]]
        if self.muon and (given or name not in ("adamw_torch", "adamw_torch_fused")):
            raise ValueError(
                f"muon=True trains by Muon and AdamW, without optim={name!r} and {given}. Leave them out."
            )
        if not self.muon and ("lomo" in name or "layerwise" in name):
            what = "steps within the backward, where gradients are neither clipped nor checked"
            raise ValueError(f"optim={name!r} {what}. Choose another one; adamw_torch_8bit saves memory too.")
        settings: Any = self.lr_scheduler_kwargs  # a JSON string became a dict
        get_scheduler(self.lr_scheduler_type, torch.optim.SGD([torch.zeros(1)]), 1, 10**6, settings)

    def make_objective(self, block_size: int) -> Objective:
        """The objective for blocks of a drafter's size."""
        weights = (self.loss_gamma, self.dpace_alpha, self.slot_weights)
        return make_objective(self.objective, block_size, *weights, self.loss_temperature, self.cross_entropy_share)

    @property
    def compares(self) -> bool:
        """Whether an objective compares with the target's distribution, for which all of the target's layers run."""
        return any(compares_distributions(name) for name in (self.objective, self.selector_objective) if name)

    def selector_settings(self, block_size: int, step: int | None) -> dict[str, Any]:
        """What [`selector_losses.SelectorTerms`] takes in a step, or, with None, in an evaluation."""
        risen = 1.0 if step is None else min(1.0, (step + 1) / (self.selector_warmup_steps + 1))
        own = self.selector_objective not in (None, "cross_entropy")
        weights = (self.loss_gamma, self.dpace_alpha, self.slot_weights, self.loss_temperature)
        return {
            "alpha": self.selector_alpha * risen,
            "inject": self.selector_inject,
            "cut_off": self.selector_cut_off,
            "objective": make_objective(str(self.selector_objective), block_size, *weights) if own else None,
        }

    def __getstate__(self) -> dict[str, Any]:
        # Every checkpoint holds a pickle of the arguments, which must not hold a token.
        return {name: None if name.endswith("_token") else value for name, value in vars(self).items()}

    @property
    def n_gpu(self) -> int:
        """1 with any GPU: one process trains one drafter, so several visible GPUs never mean `nn.DataParallel`."""
        return min(super().n_gpu, 1)
