# SPDX-License-Identifier: Apache-2.0
"""Whether what a run is told acts: compilation, weights of slots, metric, optimizer and schedule, made for a try."""

import re
from dataclasses import fields
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from transformers import Trainer, get_scheduler
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from .objectives import compares_distributions
from .refused_options import refuse_effectless


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


__all__ = ["check_effects"]
