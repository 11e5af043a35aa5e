# SPDX-License-Identifier: Apache-2.0
"""Target and drafter as training needs them: loaded, placed and frozen; in fp32, with compiled layers."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..configuration_dflash import DFlashDraftConfig
from ..modeling_dflash import DFlashDraftModel
from ..target.frozen_target import FrozenTarget
from ..target.head import FrozenHead
from ..target.pairs import place_target
from ..training_args import DFlashTrainingArguments
from .adapting import check_continuing
from .objectives import compares_distributions
from .partial_training import check_part, is_adapter, make_trainable
from .refused_options import check_trainer_options


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


def prepare_models(
    drafter: DFlashDraftModel,
    target_model: "str | Path | PreTrainedModel | FrozenTarget",
    args: DFlashTrainingArguments,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: Any,
) -> tuple[nn.Module, FrozenTarget, FrozenHead]:
    """The part of the drafter that is trained, the target, and the target's head on the drafter's device.

    Args:
        drafter: The drafter, changed in place.
        target_model: Hub id, folder, model or frozen target.
        args: The training arguments.
        tokenizer: The target's, if it is known.
        peft_config: Of an adapter, or None.

    Raises:
        ValueError: Drafter and target do not fit together, or cannot be trained so.
    """
    config: Any = drafter.config
    check_part(drafter, peft_config, args.trainable_modules)
    target = frozen_target(target_model, config.target_layer_ids, args, compares_distributions(args.objective))
    check_continuing(config, target, tokenizer)
    head = FrozenHead(target.model, args.device)
    # A frozen drafter under autocast needs no fp32 masters.
    frozen = is_adapter(drafter) or peft_config is not None
    prepare_drafter(drafter, args, keep_dtype=frozen and (args.bf16 or args.fp16))
    return make_trainable(drafter, peft_config, args.trainable_modules, args.seed), target, head


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


def compute_dtype(args: DFlashTrainingArguments, drafter: Any) -> torch.dtype:
    """Type of the drafter's inputs: that of autocast, or of its parameters where there is none."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    return drafter.dtype


def forget_preparation(trainer: Any) -> None:
    """Let a drafter that was only evaluated be prepared anew.

    Preparing for evaluation marks it as prepared, and a later `train()` would leave it without the wrapper that adds
    up the gradients of all ranks.
    """
    trainer.accelerator._models.clear()
    trainer.model._is_accelerate_prepared = False


def compile_layers(model: DFlashDraftModel, **kwargs) -> None:
    """Compile each layer by itself, in place: layers of one kind share their code, so two compilations serve all.

    Args:
        model: The drafter; its parameters keep their names.
        **kwargs: Arguments of `torch.compile`, such as the backend.
    """
    # Training and evaluation, layer kinds and the last, shorter batch are graphs of one function; falling back to
    # uncompiled flex attention would need the memory of all queries times all keys.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    # Data parallel training would cut each layer's graph where a bucket of 25 MB of its parameters is full: pieces
    # that do not fuse, keep more for the backward and round otherwise than one rank's. Gradients cross under the
    # backward of the layers before as it is.
    torch._dynamo.config.optimize_ddp = False
    for layer in model.layers:
        layer.compile(dynamic=False, **kwargs)


__all__ = ["compile_layers", "compute_dtype", "forget_preparation", "load_drafter", "prepare_models"]
