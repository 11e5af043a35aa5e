# SPDX-License-Identifier: Apache-2.0
"""Arguments of transformers' Trainer, and of accelerate's launcher, that are refused or taken over, by tables."""

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any


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


__all__ = ["check_before", "check_scripted", "check_trainer_options", "refuse_effectless"]
