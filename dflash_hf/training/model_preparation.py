# SPDX-License-Identifier: Apache-2.0
"""Target and drafter as training needs them: loaded, placed and frozen; in fp32, with compiled layers."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration_dflash import DFlashDraftConfig
from ..modeling_dflash import DFlashDraftModel
from ..target.frozen_target import FrozenTarget
from ..target.pairs import place_target
from ..training_args import DFlashTrainingArguments
from .trainer_arguments import check_trainer_options


logger = logging.get_logger(__name__)


def load_drafter(model: DFlashDraftModel | str | Path, args: Any, others: dict[str, Any]) -> Any:
    """The drafter that a trainer was given, with arguments that can train one.

    Args:
        model: The drafter, or its folder or Hub id.
        args: The training arguments.
        others: Further arguments of transformers' Trainer.

    Raises:
        ValueError: One of them is of another kind, or would have no effect.
    """
    if not isinstance(args, DFlashTrainingArguments):
        raise ValueError(
            f"args is a {type(args).__name__}; DFlashTrainer needs DFlashTrainingArguments, which knows the "
            "anchors, the noise and the packing."
        )
    drafter: Any = DFlashDraftModel.from_pretrained(model) if isinstance(model, str | Path) else model
    if not isinstance(drafter.config, DFlashDraftConfig):
        raise ValueError(
            f"model is a {type(drafter).__name__}; DFlashTrainer trains a DFlashDraftModel, and the target goes "
            "into target_model. Swap them, or make a drafter with DFlashDraftConfig.from_target_config."
        )
    check_trainer_options(others, args)
    return drafter


def frozen_target(
    target_model: "str | Path | PreTrainedModel | FrozenTarget",
    taps: list[int] | None,
    args: DFlashTrainingArguments,
    final_states: bool,
) -> FrozenTarget:
    """The target that a trainer was given, loaded and placed.

    Args:
        target_model: Hub id, folder, model or frozen target.
        taps: Layers whose outputs are read.
        args: Where the target goes, and how it is loaded.
        final_states: Whether it also gives the states that its head reads.

    Raises:
        ValueError: It is none of these, or was loaded already and cannot take loading arguments.
    """
    if isinstance(target_model, FrozenTarget):
        if final_states and not target_model.final_states:
            raise ValueError(
                f"objective={args.objective!r} compares with the target's distribution, but the FrozenTarget stops "
                "after its last tap. Make it with final_states=True, or pass the target's id or folder."
            )
        if args.target_model_init_kwargs:
            raise ValueError(
                f"target_model_init_kwargs={args.target_model_init_kwargs} were given together with a FrozenTarget, "
                "which is loaded already. Pass them to FrozenTarget, or pass the target's id or folder."
            )
        return target_model
    if not isinstance(target_model, str | Path | PreTrainedModel):
        raise ValueError(
            f"target_model is a {type(target_model).__name__}; give a Hub id, a folder, a loaded causal language "
            "model or a FrozenTarget."
        )
    device, spread = place_target(args)
    init_kwargs = args.target_model_init_kwargs or {}
    assert isinstance(init_kwargs, dict)  # a JSON string becomes a dict in TrainingArguments
    if isinstance(target_model, str | Path):
        init_kwargs = {**spread, **init_kwargs}
    return FrozenTarget(
        target_model,
        taps or [],
        device=device,
        compile_target=args.compile_target,
        allow_slow_target=args.allow_slow_target,
        final_states=final_states,
        **init_kwargs,
    )


def prepare_drafter(model: DFlashDraftModel, args: DFlashTrainingArguments, keep_dtype: bool = False) -> None:
    """Give a drafter fp32 masters and an attention backend that can train on the device.

    Args:
        model: The drafter, changed in place.
        args: The training arguments.
        keep_dtype: Whether the parameters stay as they are, which a frozen drafter under autocast may.

    Raises:
        ValueError: The attention backend cannot train there.
    """
    if not keep_dtype and any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
        # AdamW steps at these rates vanish in bf16: norm weights would never move.
        logger.info("The drafter's parameters are kept in fp32; use bf16=True for autocast.")
        model.float()
    if args.cpu_for_want_of_gpu and args.process_index == 0:
        logger.warning_once(
            "torch finds no GPU, so target and drafter run on the CPU. If there is one, torch and its driver do not "
            "go together: python -c 'import torch; torch.zeros(1).cuda()' says why. If it is meant, set use_cpu=True."
        )
    implementation = args.drafter_attn_implementation
    if implementation is None:
        implementation = "flex_attention" if args.device.type == "cuda" else "sdpa"
    if implementation == "flex_attention" and args.device.type == "cpu":
        raise ValueError("flex_attention has no backward on CPU; leave drafter_attn_implementation unset for sdpa.")
    model.set_attn_implementation(implementation)
    compiled = args.device.type == "cuda" if args.compile_layers is None else args.compile_layers
    if compiled and not args.torch_compile:
        compile_layers(model)


def compile_layers(model: DFlashDraftModel, **kwargs) -> None:
    """Compile each layer by itself, in place: layers of one kind share their code, so two compilations serve all.

    Args:
        model: The drafter; its parameters keep their names.
        **kwargs: Arguments of `torch.compile`, such as the backend.
    """
    # Training and evaluation, layer kinds and the last, shorter batch are graphs of one function; falling back to
    # uncompiled flex attention would need the memory of all queries times all keys.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in model.layers:
        layer.compile(dynamic=False, **kwargs)


__all__ = ["compile_layers", "frozen_target", "load_drafter", "prepare_drafter"]
