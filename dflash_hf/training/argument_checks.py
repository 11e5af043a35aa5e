# SPDX-License-Identifier: Apache-2.0
"""Values of training arguments that would only fail, or spoil the run, after the target has been loaded."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations import get_reporting_integration_callbacks

from .objectives import objective_of


ATTENTION = ("flex_attention", "sdpa", "eager")
INFINITY = float("inf")
# (names, what a value must be, its test, which nan fails too)
NUMBERS: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (("learning_rate", "weight_decay", "warmup_steps"), "0 or more, and finite", lambda v: 0 <= v < INFINITY),
    (("max_grad_norm",), "0 (no clipping) or more", lambda v: v >= 0),
    (("adam_epsilon",), "more than 0, and finite", lambda v: 0 < v < INFINITY),
    (("adam_beta1", "adam_beta2"), "in [0, 1)", lambda v: 0 <= v < 1),
    (
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        "at least 1",
        lambda v: 1 <= v < INFINITY,
    ),
    (("seed", "data_seed"), "in 0 to 4294967295", lambda v: 0 <= v < 2**32),
    (("dataloader_num_workers",), "0 or more", lambda v: 0 <= v < INFINITY),
    (
        ("logging_steps", "save_steps", "eval_steps"),
        "a number of steps, or below 1 a share of all steps",
        lambda v: 0 <= v < INFINITY,
    ),
)


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
    if args.max_steps <= 0 and not 0 < args.num_train_epochs < INFINITY:
        raise ValueError(
            f"num_train_epochs={args.num_train_epochs} must be more than 0, and finite, where max_steps is not given: "
            "nothing would be trained. To evaluate alone, call evaluate()."
        )
    # Raises for a name that it does not know, as the Trainer would later.
    get_reporting_integration_callbacks(args.report_to)
    # The block size only gives a default here.
    objective_of(args, block_size=2)
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


__all__ = ["check_values"]
