# SPDX-License-Identifier: Apache-2.0
"""The arguments of a training, and which of transformers' are refused."""

import os
import re
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from .chats import check_address
from .frozen_target import refuse_token
from .losses import OBJECTIVES, compares_distributions, objective_of
from .topology import FEATURE_COPIES, LAYOUTS, check_world_size


# --- Values of training arguments that would only fail, or spoil the run, after the target has been loaded.

# What may differ on resuming once `allow_resume_changes` names it.
CHANGES = ("target", "tokenizer", "data", "rows")


ATTENTION = ("flex_attention", "sdpa", "eager")

INFINITY = float("inf")
# Trackers that transformers does not list, or not always, among those it finds.
AVAILABILITY_UNKNOWN = {"azure_ml", "flyte"}
# (names, what a value must be, its test, which nan fails too)
NUMBERS: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (("learning_rate", "weight_decay", "warmup_steps"), "0 or more, and finite", lambda v: 0 <= v < INFINITY),
    (("context_noise",), "0 or a positive half-width, such as 0.05", lambda v: 0 <= v < INFINITY),
    (("max_grad_norm",), "0 (no clipping) or more", lambda v: v >= 0),
    (("adam_epsilon",), "more than 0, and finite", lambda v: 0 < v < INFINITY),
    (("adam_beta1", "adam_beta2"), "in [0, 1)", lambda v: 0 <= v < 1),
    (
        (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("num_anchors", "row_length", "max_anchors_per_row", "max_length"),
            *("loss_chunk_blocks", "max_nonfinite_steps"),
        ),
        "at least 1",
        lambda v: 1 <= v < INFINITY,
    ),
    (("seed", "data_seed"), "in 0 to 4294967295", lambda v: 0 <= v < 2**32),
    (("dataloader_num_workers", "prefetch_depth", "measure_alone_steps"), "0 or more", lambda v: 0 <= v < INFINITY),
    (
        ("logging_steps", "save_steps", "eval_steps"),
        "a number of steps, or below 1 a share of all steps",
        lambda v: 0 <= v < INFINITY,
    ),
)


def refuse_options(args: Any) -> None:
    """Refuse a token among the arguments, which checkpoints hold, and a type that the device does not compute in.

    Args:
        args: The [`DFlashTrainingArguments`].

    Raises:
        ValueError: Naming the option, and what to do instead.
    """
    refuse_token(args.target_model_init_kwargs, "be written into every checkpoint with the arguments")
    if args.fp16 and args.device.type == "cpu":
        raise ValueError("fp16=True needs an accelerator; on a CPU leave it out, or set bf16=True.")


def check_values(args: Any) -> None:
    """Refuse numbers out of their range, nan among them, and names that nothing has.

    Args:
        args: The [`DFlashTrainingArguments`].

    Raises:
        ValueError: Naming the field, its value and what it may be.
    """
    values = vars(args)
    for names, expected, holds in NUMBERS:
        for name in names:
            value = values[name]
            if value is not None and not holds(value):
                raise ValueError(f"{name}={value} must be {expected}.")
    if args.max_steps == 0:
        raise ValueError(
            "max_steps=0 would train nothing. Leave it out (-1) to train num_train_epochs, or call evaluate()."
        )
    if args.max_steps < 0 and not 0 < args.num_train_epochs < INFINITY:
        raise ValueError(
            f"num_train_epochs={args.num_train_epochs} must be more than 0, and finite, where max_steps is not given: "
            "nothing would be trained. To evaluate alone, call evaluate()."
        )
    # Raises for a name that it does not know, as the Trainer would later.
    get_reporting_integration_callbacks(args.report_to)
    wanted = set(args.report_to) - AVAILABILITY_UNKNOWN
    # Looking for them imports some.
    missing = wanted - set(get_available_reporting_integrations()) if wanted else None
    if missing:
        raise ValueError(
            f"report_to={args.report_to} needs {', '.join(sorted(missing))}, which this Python does not have. Install "
            "it, or leave it out."
        )
    # The block size only gives a default here.
    objective_of(args, block_size=2)
    for name, choices in (("target_layout", LAYOUTS), ("feature_copies", FEATURE_COPIES)):
        if values[name] not in choices:
            raise ValueError(f"{name}={values[name]!r} must be one of {', '.join(choices)}.")
    unknown = sorted(set(args.allow_resume_changes or []) - set(CHANGES))
    if unknown:
        raise ValueError(f"allow_resume_changes names {unknown}; what may differ is one of {list(CHANGES)}.")
    if args.drafter_attn_implementation not in (None, *ATTENTION):
        raise ValueError(
            f"drafter_attn_implementation={args.drafter_attn_implementation!r} cannot express the drafter's mask; use "
            f"one of {', '.join(ATTENTION)}, or leave it unset for the one that suits the device."
        )
    if args.target_device is not None:
        _check_device(args.target_device, torch.cuda.device_count())


def _check_device(name: str, num_visible: int) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"target_device={name!r} is no device of torch; expected cpu or cuda:N. Leave it unset to let "
            "target_layout place the target."
        ) from error
    if device.type == "cuda" and (device.index or 0) >= num_visible:
        raise ValueError(
            f"target_device={name!r} is not there: this process sees {num_visible} GPUs, counted from 0. Make more "
            "visible (gpu_ids, CUDA_VISIBLE_DEVICES), or leave it unset to let target_layout place the target."
        )


# --- Arguments of transformers' Trainer, and of accelerate's launcher, that are refused or taken over, by tables.


@dataclass(frozen=True)
class Refusal:
    """Values of some arguments that cannot be taken.

    Args:
        names: The arguments.
        refused: Whether a value is one of them.
        reason: What it would do, and what to do instead, after "name=value".
    """

    names: tuple[str, ...]
    refused: Callable[[Any], Any]
    reason: str


NO_PREDICTIONS = (
    "is about predictions and compute_metrics, and none are kept here: evaluation adds up the loss and the acceptance "
    "batch by batch. Leave it out."
)

ONE_DRAFTER = (
    "would cut the drafter into parts, while its checkpoints, the guard of its steps and the copies of hidden states "
    "take it whole. Leave it out: a drafter fits one GPU with its optimizer, and several GPUs train one by DDP "
    "(recipes/accelerate/two_pairs.yaml); to save memory set activation_checkpointing=True or "
    "optim='adamw_torch_8bit'."
)

# As they are given, before transformers makes anything of them.
REFUSED_FIRST = (
    Refusal(("deepspeed", "fsdp", "parallelism_config"), bool, ONE_DRAFTER),
    Refusal(
        ("use_liger_kernel",),
        bool,
        "would put kernels for Qwen3 into the drafter, which is built otherwise. Leave it out: the drafter's layers "
        "are compiled on a GPU (compile_layers), and its loss never holds the logits.",
    ),
)

REFUSED = (
    Refusal(
        ("remove_unused_columns",),
        bool,
        "would drop every column before the collator, since the drafter's forward takes hidden states, not token ids. "
        "Leave it False.",
    ),
    Refusal(
        ("bf16_full_eval", "fp16_full_eval"),
        bool,
        "casts the drafter itself, so that a later training step would have no fp32 masters. Leave it False; with "
        "bf16=True evaluation runs under autocast already.",
    ),
    Refusal(
        ("enable_jit_checkpoint",),
        bool,
        "would write a checkpoint in place, where a kill leaves half of it. Leave it False: DFlashTrainer ends a run "
        "at SIGTERM and SIGINT with a checkpoint of its own.",
    ),
    Refusal(
        ("neftune_noise_alpha",),
        lambda value: value is not None,
        "is noise on token embeddings, which are the target's here. Leave it out; context_noise is the noise on the "
        "target's hidden states.",
    ),
    Refusal(
        ("train_sampling_strategy",),
        lambda value: value != "random",
        "has no effect: rows are packed, and shuffled from the seed and the epoch alone. Leave it out.",
    ),
    Refusal(
        ("length_column_name",),
        lambda value: value != "length",
        "has no effect: rows are packed from the lengths of the token ids themselves. Leave it out.",
    ),
    Refusal(
        ("label_smoothing_factor",),
        bool,
        "has no effect on a drafter's objective, which follows the target's own tokens. Leave it 0.",
    ),
    Refusal(
        ("label_names",),
        lambda value: value not in (None, ["labels"]),
        "has no effect: the collator makes the labels of the blocks itself. Leave it out.",
    ),
    Refusal(
        ("average_tokens_across_devices",),
        lambda value: not value,
        "has no effect: a loss is normalised over all ranks, so that it does not depend on which rank has which rows. "
        "Leave it True.",
    ),
    Refusal(
        ("auto_find_batch_size",),
        bool,
        "would begin the run anew with fewer rows per step when memory runs out, which is another run. Leave it "
        "False; lower row_length, max_anchors_per_row or prefetch_depth, or set activation_checkpointing=True, and "
        "keep the rows per step by gradient_accumulation_steps.",
    ),
    Refusal(("include_for_metrics", "batch_eval_metrics"), bool, NO_PREDICTIONS),
    Refusal(("eval_do_concat_batches",), lambda value: not value, NO_PREDICTIONS),
    Refusal(
        ("dataloader_in_order",),
        lambda value: not value,
        "would let batches overtake each other, so that a resumed run would skip others than were trained on. Leave "
        "it True.",
    ),
)

# Of `accelerator_config`.
REFUSED_OF_ACCELERATOR = (
    Refusal(
        ("split_batches", "dispatch_batches"),
        bool,
        "would have one rank's batches cut up for the others, while each rank reads its own rows here. Leave it out; "
        "per_device_train_batch_size counts the rows of one rank.",
    ),
    Refusal(
        ("even_batches",),
        lambda value: not value,
        "would leave some ranks without a last batch, for which the others would wait. Leave it True: rows that are "
        "repeated count nothing.",
    ),
    Refusal(
        ("use_seedable_sampler",),
        lambda value: not value,
        "has no effect: rows are shuffled from the seed and the epoch alone. Leave it True.",
    ),
    Refusal(
        ("gradient_accumulation_kwargs",),
        lambda value: "num_steps" in (value or {}),
        "is known too late. Give gradient_accumulation_steps in its place.",
    ),
)

# Set by `accelerate launch`.
SHARDING_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


def check_before(args: Any, environment: MutableMapping[str, str] = os.environ) -> None:
    """Refuse what the parent would act on before anything else could be said, and take what the launcher says.

    A launcher's mixed precision and compilation reach accelerate alone, and would leave the target, the head and the
    record of the run with those of the arguments.

    Args:
        args: The [`DFlashTrainingArguments`] as they were given; `bf16`, `fp16` and `torch_compile` may be changed.
        environment: Where `accelerate launch` writes its settings.

    Raises:
        ValueError: Naming the argument or variable, what it would do and what to do instead.
    """
    _refuse(REFUSED_FIRST, vars(args))
    for name in SHARDING_VARIABLES:
        if environment.get(name, "").lower() in ("1", "true", "yes"):
            raise ValueError(f"The launcher set {name}={environment[name]}, which {ONE_DRAFTER}")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(
            f"The launcher set mixed_precision={precision}, which the trainer does not know. Set it to 'no' and give "
            "bf16=True."
        )
    if precision != "no" and not (args.bf16 or args.fp16):
        setattr(args, precision, True)
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no" and not args.torch_compile:
        args.torch_compile, args.torch_compile_backend = True, args.torch_compile_backend or backend


def refuse_effectless(args: Any) -> None:
    """Refuse arguments that would have no effect or not the one they name.

    Args:
        args: The [`DFlashTrainingArguments`], as the parent left them.

    Raises:
        ValueError: Naming the argument, what it would do and what to do instead.
    """
    _refuse(REFUSED, vars(args))
    _refuse(REFUSED_OF_ACCELERATOR, vars(args.accelerator_config), "accelerator_config.")


def check_scripted(args: Any, has_evaluation_data: bool) -> None:
    """Refuse what transformers leaves to scripts and a recipe does not do, and evaluations of nothing.

    Args:
        args: The [`DFlashTrainingArguments`].
        has_evaluation_data: Whether there is anything to evaluate on.

    Raises:
        ValueError: Naming the argument and what to do instead.
    """
    if args.do_predict:
        raise ValueError(
            "do_predict=True: this recipe predicts nothing. Leave it out; recipes/evaluate_acceptance.py measures the "
            "drafter that it saves."
        )
    evaluates = [name for name in ("do_eval", "eval_on_start") if getattr(args, name)]
    if evaluates and not has_evaluation_data:
        # transformers sets do_eval by itself where there is a strategy.
        strategy = args.eval_strategy.value
        what = f"eval_strategy={strategy}" if strategy != "no" else f"{evaluates[0]}=True"
        raise ValueError(f"{what} needs data to evaluate on: give it (eval_completions, eval_documents).")


def check_trainer_options(given: dict[str, Any], args: Any) -> None:
    """Refuse arguments of transformers' Trainer that would have no effect.

    Args:
        given: What [`DFlashTrainer`] was given beyond its own arguments.
        args: The [`DFlashTrainingArguments`].

    Raises:
        ValueError: Naming the argument and what to do instead.
    """
    reasons = {
        "compute_metrics": "compute_metrics would never be called, since no logits are kept: evaluation reports the "
        "loss, the acceptance length and the accuracy per slot. Leave it out.",
        "preprocess_logits_for_metrics": "preprocess_logits_for_metrics would never be called, since no logits are "
        "kept. Leave it out.",
        "compute_loss_func": "compute_loss_func would never be called: the loss is that of args.objective. Leave it "
        "out, or override compute_loss in a subclass.",
        "model_init": "model_init would make another drafter than `model`, after the target and the data were checked "
        "against that one. Leave it out, and make a trainer per trial.",
    }
    for name, reason in reasons.items():
        if given.get(name) is not None:
            raise ValueError(reason)
    optimizers = given.get("optimizers") or (None, None)
    if args.muon and (given.get("optimizer_cls_and_kwargs") is not None or optimizers[0] is not None):
        raise ValueError("muon=True would have no effect beside an optimizer that is given. Give one of them.")


def _refuse(refusals: tuple[Refusal, ...], values: dict[str, Any], prefix: str = "") -> None:
    for refusal in refusals:
        for name in refusal.names:
            if refusal.refused(values[name]):
                raise ValueError(f"{prefix}{name}={values[name]!r} {refusal.reason}")


# --- Whether what a run is told acts: compilation, weights of slots, metric, optimizer and schedule, made for a try.


logger = logging.get_logger(__name__)

# Of one data set or of several by name, each with the prefix "eval_" or without.
METRIC = re.compile(
    r"(.*_)?(loss|accuracy|accuracy_slot_\d+|full_blocks|fully_accepted_blocks|acceptance_slot_\d+"
    r"|acceptance_length(_.+)?)"
)

PLAIN_ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)

OF_SOME_OPTIMIZERS = ("optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon")


def check_effects(args: Any) -> None:
    """Refuse arguments that would have no effect or not the one they name, and names that nothing has.

    Args:
        args: The [`DFlashTrainingArguments`], as the parent left them.

    Raises:
        ValueError: Naming the argument, what it would do and what to do instead.
    """
    refuse_effectless(args)
    if args.dataloader_persistent_workers and not args.dataloader_num_workers:
        raise ValueError(
            "dataloader_persistent_workers=True keeps workers, of which dataloader_num_workers=0 starts none. Give "
            "both, or leave it False."
        )
    if args.compile_layers and args.torch_compile:
        raise ValueError(
            "compile_layers=True and torch_compile=True (or the launcher's dynamo_backend) contradict each other: the "
            "one compiles the drafter's layers one by one, the other the whole drafter. Give one of them."
        )
    if args.torch_compile:
        _check_compilation(args)
    _check_objective(args)
    _tell_of_metric(args)
    _check_optimizer(args)
    _check_schedule(args)


def _check_compilation(args: Any) -> None:
    known = [backend.value.lower() for backend in DynamoBackend if backend != DynamoBackend.NO]
    if args.torch_compile_backend.lower() not in known:
        raise ValueError(f"torch_compile_backend={args.torch_compile_backend!r} is none of {', '.join(known)}.")
    if args.torch_compile_mode is not None and args.torch_compile_backend == "inductor":
        from torch._inductor import list_mode_options

        modes = sorted(list_mode_options())
        if args.torch_compile_mode not in modes:
            raise ValueError(f"torch_compile_mode={args.torch_compile_mode!r} is none of {', '.join(modes)}.")


def _check_objective(args: Any) -> None:
    """Weights of slots that the objective does not use."""
    compares = compares_distributions(args.objective)
    if args.objective == "expected_acceptance" and args.cross_entropy_share == 0:
        used = set()
    elif compares:
        used = {"slot_weights", "loss_gamma" if args.slot_weights == "decay" else "dpace_alpha"}
    else:
        used = {"loss_gamma" if args.objective == "cross_entropy" else "dpace_alpha"}
    for name in {"slot_weights", "loss_gamma", "dpace_alpha"} - used:
        if getattr(args, name) != _default(args, name):
            slots = f" with slot_weights={args.slot_weights!r}" if compares else ""
            raise ValueError(
                f"{name}={getattr(args, name)} has no effect on objective={args.objective!r}{slots}: loss_gamma is of "
                "the weights that decay, dpace_alpha of dpace's, and expected_acceptance has neither without a "
                "cross_entropy_share. Leave it out."
            )


def _tell_of_metric(args: Any) -> None:
    """The name of a metric is looked up after the first evaluation, which may come late; a subclass may add some."""
    name = args.metric_for_best_model
    if name is not None and not METRIC.fullmatch(name):
        logger.warning(
            f"metric_for_best_model={name!r} is no metric of an evaluation, so the first one will end the run unless "
            "something adds it. There are loss, acceptance_length (also _SOURCE), accuracy, full_blocks, "
            "fully_accepted_blocks, and accuracy_slot_K and acceptance_slot_K."
        )


def _check_optimizer(args: Any) -> None:
    """An optimizer that can be made, and that reads what is given for it."""
    name = args.optim.value
    if args.muon:
        given = [n for n in ("optim_args", "optim_target_modules") if getattr(args, n)]
        given += [] if args.optim in PLAIN_ADAMW else [f"optim={name!r}"]
        if given:
            raise ValueError(
                f"muon=True trains with torch's Muon and AdamW, on which {', '.join(given)} would have no effect. "
                "Give one of them."
            )
        return
    if "lomo" in name or "layerwise" in name:
        raise ValueError(
            f"optim={name!r} steps within the backward, where gradients are neither clipped nor looked at before they "
            "change the drafter. Choose another one; optim='adamw_torch_8bit' saves memory too."
        )
    if name.startswith(("galore", "apollo")):
        if args.optim_target_modules is None:
            raise ValueError(f"optim={name!r} needs optim_target_modules, such as 'all-linear'.")
        return
    try:
        made = Trainer.get_optimizer_cls_and_kwargs(args)
        given = [n for n in OF_SOME_OPTIMIZERS if getattr(args, n) != _default(args, n)]
        ignored = [n for n in given if _makes(args, n, _default(args, n)) == made] + _ignored_keys(args)
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(f"optim={name!r} with optim_args={args.optim_args!r} cannot be made: {error}.") from error
    if ignored:
        raise ValueError(
            f"{', '.join(ignored)} would have no effect on optim={name!r}. Leave it out, or choose an optimizer that "
            "reads it."
        )


def _ignored_keys(args: Any) -> list[str]:
    """Keys of `optim_args` that the optimizer does not read."""
    pairs = args.optim_args.split(",") if args.optim_args else []
    ignored = []
    for pair in pairs:
        key, others = pair.partition("=")[0].strip(), [other for other in pairs if other != pair]
        try:
            with_it = _makes(args, "optim_args", ",".join([*others, f"{key}=7"]))
            is_read = with_it != _makes(args, "optim_args", ",".join(others))
        except (ValueError, AttributeError):
            is_read = True  # 7 is no value of it
        ignored += [] if is_read else [f"{key} of optim_args"]
    return ignored


def _makes(args: Any, name: str, value: Any) -> Any:
    """The optimizer of the arguments with another value of one of them."""
    own = vars(args)[name]
    setattr(args, name, value)
    try:
        return Trainer.get_optimizer_cls_and_kwargs(args)
    finally:
        setattr(args, name, own)


def _check_schedule(args: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    kwargs = dict(args.lr_scheduler_kwargs or {})
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 10**6, scheduler_specific_kwargs=kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs} do not fit "
            f"lr_scheduler_type={args.lr_scheduler_type.value!r}: {error}."
        ) from error


def _default(args: Any, name: str) -> Any:
    return next(field.default for field in fields(args) if field.name == name)


# --- Training arguments of a DFlash drafter; the defaults are the paper's where it gives them.

# Arguments that decide what is learned from them: changing one on the way is a choice, of which a resume tells.
LEARNING_ARGUMENTS = (
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("muon", "num_anchors", "max_anchors_per_row", "context_noise", "objective", "loss_gamma", "dpace_alpha"),
    *("slot_weights", "loss_temperature", "cross_entropy_share"),
    *("bf16", "fp16", "tf32", "ignore_data_skip", "target_model_init_kwargs"),
)


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    r"""
    [`~transformers.TrainingArguments`] plus what training a drafter needs.

    Defaults that differ from the parent's: the paper's learning rate, schedule, warm-up and epochs, one packed row
    per micro-batch, and `remove_unused_columns=False`, since the drafter's forward names none of the data's columns.

    Args:
        num_anchors (`int`, *optional*, defaults to 512):
            Anchors per document and epoch, i.e. blocks that the drafter learns to draft.
        max_anchors_per_row (`int`, *optional*):
            Cap on the anchors of one packed row; by default a quarter of its tokens.
        row_length (`int`, *optional*, defaults to 4096):
            Tokens of a packed row. Longer documents are refused; cut them when tokenising.
        max_length (`int`, *optional*):
            Tokens kept of each document when the data holds chats that are tokenised here; `row_length` by default.
        enable_thinking (`bool`, *optional*):
            Handed to the chat template where chats are tokenised here; the template's own default if unset.
        allow_other_template (`bool`, *optional*, defaults to `False`):
            Train on documents that another chat template has written than the tokenizer's, with a warning.
        context_noise (`float`, *optional*, defaults to 0.05):
            Half-width of the uniform noise on the target's hidden states in training; 0 switches it off.
        objective (`str`, *optional*, defaults to `"cross_entropy"`):
            `"cross_entropy"` (the paper's decayed cross-entropy), `"dpace"`, or one that compares with the target's
            distribution, for which all of the target's layers run: `"kl"`, `"total_variation"`, `"lk"`,
            `"lk_hybrid"`, `"expected_acceptance"`.
        loss_gamma (`float`, *optional*):
            Decay length in slots of `"cross_entropy"`; `min(block_size / 2, 7)` by default.
        dpace_alpha (`float`, *optional*, defaults to 0.5):
            Smoothing of `"dpace"`.
        slot_weights (`str`, *optional*):
            Weights of the slots where distributions are compared: `"dpace"` (the default) or `"decay"`.
        loss_temperature (`float`, *optional*, defaults to 1.0):
            Temperature of the target's distribution that the drafter is compared with.
        cross_entropy_share (`float`, *optional*, defaults to 0.0):
            Share of the cross-entropy in an objective that compares distributions.
        muon (`bool`, *optional*, defaults to `False`):
            Train the matrices with Muon and the norms with AdamW; both take `learning_rate`, as Muon's steps are
            scaled to the size of AdamW's.
        loss_chunk_blocks (`int`, *optional*):
            Blocks per chunk of the loss; by default as many as keep 2**27 logits.
        target_device (`str`, *optional*):
            Device of the frozen target, in place of the one that `target_layout` gives.
        target_layout (`str`, *optional*, defaults to `"auto"`):
            Where the target of local rank r is: `"paired"` on GPU r + W of W local ranks, `"shared"` on the drafter's
            own, `"spread"` over an equal part of the GPUs from W on; `"auto"` is shared where every rank sees one
            GPU, and paired where there are two or more for each.
        prefetch_depth (`int`, *optional*, defaults to 2):
            Batches that the target works ahead of the drafter, whose hidden states wait in memory; 0 takes turns.
        feature_copies (`str`, *optional*, defaults to `"auto"`):
            `"peer"` copies hidden states from GPU to GPU, `"host"` through pinned host memory; `"auto"` is host where
            the environment has `NCCL_P2P_DISABLE=1`.
        measure_alone_steps (`int`, *optional*, defaults to 0):
            So many first steps run target and drafter in turn, so that the log says how long each takes by itself. A
            target on GPUs of its own runs each of their batches three times and the last one counts, since a GPU that
            has rested is faster for a while than under load.
        ddp_bf16_compression (`bool`, *optional*, defaults to False):
            Send gradients between ranks in bf16: half the bytes, rounded to 8 bits of mantissa.
        target_model_init_kwargs (`dict`, *optional*):
            Arguments of `from_pretrained` for a target given by id or folder.
        compile_target (`bool`, *optional*, defaults to `True`):
            Whether to compile, on CUDA, the layers of a Qwen3.5/3.6 target, which takes up to a minute at the start,
            or the attention of other targets over packed documents, which takes some seconds.
        allow_slow_target (`bool`, *optional*, defaults to `False`):
            Whether a hybrid target may run on CUDA without flash-linear-attention.
        drafter_attn_implementation (`str`, *optional*):
            `"flex_attention"`, `"sdpa"` or `"eager"`; by default flex on CUDA and sdpa elsewhere.
        trainable_modules (`list[str]`, *optional*):
            Modules of the drafter that are trained, such as `["fc", "hidden_norm"]` or `["layers.4"]`; the rest keeps
            its weights. By default all.
        max_nonfinite_steps (`int`, *optional*, defaults to 10):
            Steps in a row with a loss or gradients that are not finite, each of them left out, that stop the run.
        remote_checkpoint_dir (`str`, *optional*):
            fsspec address (`s3://bucket/run`) to which each finished checkpoint is copied in the background. Its
            package takes the credentials from the environment or its own files; none belong into the address.
        allow_resume_changes (`list[str]`, *optional*):
            What may differ from the resumed checkpoint's run: `"target"`, `"tokenizer"`, `"data"`, `"rows"`.
        compile_layers (`bool`, *optional*):
            Compile the drafter's layers one by one, which takes seconds instead of the minutes of a whole model; by
            default on CUDA. `torch_compile` keeps its meaning, the whole model, and switches this off.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "target_model_init_kwargs"]  # noqa: RUF012

    num_anchors: int = field(default=512, metadata={"help": "Anchors per document and epoch."})
    max_anchors_per_row: int | None = field(
        default=None, metadata={"help": "Cap on the anchors of a packed row; a quarter of its tokens."}
    )
    row_length: int = field(default=4096, metadata={"help": "Tokens of a packed row."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens kept of each document when chats are tokenised by the trainer."}
    )
    enable_thinking: bool | None = field(default=None, metadata={"help": "Handed to the chat template if given."})
    allow_other_template: bool = field(
        default=False, metadata={"help": "Train on documents written by another chat template, with a warning."}
    )
    context_noise: float = field(
        default=0.05, metadata={"help": "Half-width of the uniform noise on the target's hidden states."}
    )
    objective: str = field(
        default="cross_entropy",
        metadata={"help": f"Objective: {', '.join(OBJECTIVES)}.", "choices": [*OBJECTIVES]},
    )
    loss_gamma: float | None = field(
        default=None, metadata={"help": "Decay length of cross_entropy in slots; min(block_size / 2, 7)."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of dpace."})
    slot_weights: str | None = field(
        default=None, metadata={"help": "Weights of the slots where distributions are compared: dpace or decay."}
    )
    loss_temperature: float = field(default=1.0, metadata={"help": "Temperature of the target's distribution."})
    cross_entropy_share: float = field(
        default=0.0, metadata={"help": "Share of the cross-entropy where distributions are compared."}
    )
    muon: bool = field(default=False, metadata={"help": "Train the matrices with Muon, the norms with AdamW."})
    loss_chunk_blocks: int | None = field(default=None, metadata={"help": "Blocks per chunk of the loss."})
    target_device: str | None = field(
        default=None, metadata={"help": "Device of the frozen target, in place of target_layout's."}
    )
    target_layout: str = field(
        default="auto", metadata={"help": "Where targets are: auto, paired, shared or spread.", "choices": [*LAYOUTS]}
    )
    prefetch_depth: int = field(default=2, metadata={"help": "Batches that the target works ahead; 0 takes turns."})
    feature_copies: str = field(
        default="auto",
        metadata={"help": "How hidden states cross: auto, peer or host.", "choices": [*FEATURE_COPIES]},
    )
    measure_alone_steps: int = field(
        default=0, metadata={"help": "First steps that run in turn, to measure each half by itself."}
    )
    ddp_bf16_compression: bool = field(default=False, metadata={"help": "Send gradients between ranks in bf16."})
    target_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained for a target given by id or folder."}
    )
    compile_target: bool = field(
        default=True, metadata={"help": "Compile on CUDA a Qwen3.5/3.6 target's layers, others' attention."}
    )
    allow_slow_target: bool = field(
        default=False, metadata={"help": "Run a hybrid target on CUDA without flash-linear-attention."}
    )
    drafter_attn_implementation: str | None = field(default=None, metadata={"help": "flex_attention, sdpa or eager."})
    trainable_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules of the drafter that are trained; by default all."}
    )
    max_nonfinite_steps: int = field(
        default=10, metadata={"help": "Steps in a row that are not finite and left out, after which the run stops."}
    )
    remote_checkpoint_dir: str | None = field(
        default=None, metadata={"help": "fsspec address to which each finished checkpoint is copied."}
    )
    allow_resume_changes: list[str] | None = field(
        default=None, metadata={"help": "What may differ on resuming: target, tokenizer, data, rows."}
    )
    compile_layers: bool | None = field(
        default=None, metadata={"help": "Compile the drafter's layers one by one; by default on CUDA."}
    )

    learning_rate: float = field(default=6e-4, metadata={"help": "Initial learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Steps of warm-up, or their share of all steps when below 1."}
    )
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the data."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Packed rows per micro-batch."})
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Packed rows per evaluation batch."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Kept False: the drafter's forward names none of the data's columns."}
    )
    # The parent's filter would log a broken step as a harmless one, and waits for the device in every micro-batch.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave non-finite losses out of the log."})
    # The drafter's configuration is published: training must not write use_cache=False into it.
    use_cache: bool = field(default=True, metadata={"help": "Written into the drafter's configuration."})

    def __post_init__(self):
        # The parent checks a GPU's types before it hears that accelerate was told to keep to the CPU, and where there
        # is none at all, ranks would each train alone.
        told = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        self.use_cpu = self.use_cpu or told
        self.cpu_for_want_of_gpu = not self.use_cpu and not torch.accelerator.is_available()
        self.use_cpu = self.use_cpu or self.cpu_for_want_of_gpu
        check_before(self)
        super().__post_init__()
        if self.device.type == "cpu":
            # Pinned memory speeds up copies to an accelerator; without one, torch warns at every dataloader.
            self.dataloader_pin_memory = False
        check_values(self)
        refuse_options(self)
        check_effects(self)
        check_world_size(self.world_size)
        if self.remote_checkpoint_dir is not None:
            check_address(self.remote_checkpoint_dir)

    def __getstate__(self) -> dict[str, Any]:
        # Every checkpoint holds a pickle of the arguments, which must not hold a token.
        return {name: None if name.endswith("_token") else value for name, value in vars(self).items()}

    @property
    def n_gpu(self) -> int:
        """1 with any GPU: one process trains one drafter, so several visible GPUs never mean `nn.DataParallel`."""
        return min(super().n_gpu, 1)
