# SPDX-License-Identifier: Apache-2.0
"""Values of training arguments that would only fail, or spoil the run, after the target has been loaded."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

from ..runs.record import CHANGES
from ..target.feature_transfer import FEATURE_COPIES
from ..target.loading import refuse_token
from ..target.topology import LAYOUTS
from .objectives import objective_of


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


__all__ = ["check_values", "refuse_options"]
