# SPDX-License-Identifier: Apache-2.0
"""Continuing a drafter: which part of it is trained, named changes of its shape, and whether it fits its target."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_peft_available, logging

from .checkpoint_format import field_problems, refuse
from .configuration_dflash import DFlashDraftConfig
from .frozen_target import FrozenTarget
from .modeling_dflash import DFlashDraftModel


logger = logging.get_logger(__name__)


# --- Which part of a drafter is trained: all of it, some modules, or an adapter (adapters.py, which needs peft).


def check_part(drafter: Any, peft_config: Any, trainable_modules: Sequence[str] | None) -> None:
    """Refuse a part of the drafter that cannot be trained, before anything takes long.

    `peft_config` is one of peft, or `trainable_modules` are names of modules or parameters, such as "fc",
    "hidden_norm", "layers.4" or "layers.4.self_attn".
    """
    if peft_config is not None and trainable_modules is not None:
        raise ValueError(
            f"peft_config and trainable_modules={trainable_modules} exclude each other, since an adapter freezes the "
            "drafter. Give one of them, or name the modules in modules_to_save of peft_config."
        )
    if peft_config is not None:
        from .adapters import check_adapter

        check_adapter(drafter, peft_config)
    elif trainable_modules is not None:
        names = [name for name, _ in drafter.named_parameters()]
        unknown = [module for module in trainable_modules if not any(_is_in(name, [module]) for name in names)]
        if unknown or not trainable_modules:
            # "layers.1" of "layers.1.mlp.up_proj.weight", "fc" of "fc.weight"
            parts = dict.fromkeys(".".join(name.split(".")[: 1 + name.startswith("layers.")]) for name in names)
            raise ValueError(
                f"trainable_modules names {unknown}, which the drafter does not have. Give a list of {list(parts)}, "
                "or of parts of them."
            )


def _is_in(name: str, modules: Sequence[str]) -> bool:
    """Whether a parameter is one of the modules or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def make_trainable(
    drafter: DFlashDraftModel, peft_config: Any, trainable_modules: Sequence[str] | None, seed: int
) -> nn.Module:
    """What is trained: the drafter, changed in place, or one with an adapter; all but the checked part is frozen."""
    if peft_config is not None:
        from .adapters import add_adapter

        adapter = add_adapter(drafter, peft_config, seed)
        trained, total = adapter.get_nb_trainable_parameters()
        logger.info(f"Training an adapter of {trained:,} parameters; the drafter's {total - trained:,} are frozen.")
        return adapter
    if trainable_modules is not None:
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(_is_in(name, trainable_modules))
        trained, total = drafter.num_parameters(only_trainable=True), drafter.num_parameters()
        logger.info(
            f"Training {', '.join(trainable_modules)}: {trained:,} of {total:,} parameters, the others frozen."
        )
    return drafter


def is_adapter(model: Any) -> bool:
    """Whether a model, not wrapped, is a drafter with an adapter."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def plain_drafter(model: Any) -> DFlashDraftModel:
    """The drafter as users load it, of one that may have an adapter and is not wrapped: merged, in a copy."""
    if not is_adapter(model):
        return model
    from .adapters import merged_copy

    return merged_copy(model)


def check_resumed_part(folder: Path | None, model: Any) -> None:
    """Refuse a checkpoint of an adapter where a whole drafter is trained (not wrapped), and the other way round."""
    if folder is not None and is_peft_available():
        from .adapters import check_adapter_checkpoint

        check_adapter_checkpoint(folder, model)


# --- Named changes of a published drafter's block size, window and taps.


def adapt(
    drafter: DFlashDraftModel,
    *,
    block_size: int | None = None,
    sliding_window: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
) -> DFlashDraftModel:
    """Change what is given and leave the rest, one log line per change.

    No weight depends on block size or window. The columns of `fc` that read a target layer move with it; those of a
    new one start at zero, so while layers are only added, the drafter computes what it did before.

    Args:
        drafter: A drafter to continue from; it is not changed.
        block_size: Slots per block, the known anchor included, such as 8 or 32 in place of 16.
        sliding_window: Window of the sliding layers in tokens, at least one block.
        target_layer_ids: 0-based target layers, ascending, at least one of which the drafter reads already.

    Returns:
        The changed drafter; `drafter` itself where every value is None or the one it has.

    Raises:
        ValueError: When a value makes no sense for this drafter.
    """
    config = drafter.config
    taps = None if target_layer_ids is None else list(target_layer_ids)
    given: dict[str, tuple[Any, Any]] = {
        "block_size": (config.block_size, block_size),
        "sliding_window": (config.sliding_window, sliding_window),
        "target_layer_ids": (config.target_layer_ids or [], taps),
    }
    changes = {name: new for name, (old, new) in given.items() if new is not None and new != old}
    if not changes:
        return drafter
    for value in (block_size, sliding_window, *(taps or [])):
        if value is not None and type(value) is not int:
            raise ValueError(f"{changes} holds {value!r}, which is not a whole number.")
    if "sliding_window" in changes and "sliding_attention" not in (config.layer_types or []):
        raise ValueError(
            f"sliding_window={sliding_window} changes nothing: layer_types={config.layer_types} has no sliding layer."
        )
    changed = _rebuilt(drafter, changes, _moved_columns(drafter, taps) if taps else drafter.fc.weight)
    for name, value in changes.items():
        logger.info(f"{name}: {given[name][0]} -> {value}.")
    return changed


def _moved_columns(drafter: DFlashDraftModel, taps: list[int]) -> torch.Tensor:
    """`fc.weight` `[D, K * D]` for other target layers: kept columns move, new ones are zero."""
    width, previous = drafter.config.hidden_size, drafter.config.target_layer_ids or []
    if not set(taps) & set(previous):
        raise ValueError(
            f"target_layer_ids={taps} keeps none of the drafter's {previous}, so fc would be zero. Keep at least one, "
            "or start a new drafter."
        )
    weight = drafter.fc.weight.detach()
    columns = dict(zip(previous, weight.split(width, dim=1), strict=True))
    return torch.cat([columns.get(tap, torch.zeros_like(weight[:, :width])) for tap in taps], dim=1)


def _rebuilt(drafter: DFlashDraftModel, changes: dict[str, Any], fc_weight: torch.Tensor) -> DFlashDraftModel:
    """A new drafter with some fields and `fc` replaced, where the old one is, in its dtype and mode."""
    config = copy.deepcopy(drafter.config)
    # What the drafter was read with, a causality or a model type of its own, stays with a copy.
    refuse(f"The drafter cannot be changed to {changes}", field_problems({**vars(config), **changes}))
    for name, value in changes.items():
        setattr(config, name, value)
    state_dict = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    state_dict["fc.weight"] = fc_weight.detach().clone()
    changed = DFlashDraftModel.from_pretrained(None, config=config, state_dict=state_dict)
    # Loading forgets where the drafter came from, which its model card names.
    changed.name_or_path = changed.config.name_or_path = drafter.config.name_or_path
    return changed.to(drafter.device).train(drafter.training)


# --- What must hold before a drafter continues.


def check_continuing(
    config: DFlashDraftConfig, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Refuse a target or a tokenizer that a drafter was not made for, before any GPU time is spent.

    The mask token must be past the tokenizer's last one, or one of its added special tokens that neither ends, begins
    nor pads a text nor is written by its chat template.
    """
    target.check_drafter(config)
    mask = config.mask_token_id
    assert mask is not None  # the configuration refuses to be without
    use = None if tokenizer is None else _use_of_token(tokenizer, mask)
    if mask in target.eos_token_ids:
        use = "it ends the target's texts (eos_token_id of its generation config)"
    if use is not None:
        raise ValueError(
            f"mask_token_id={mask} is a token in use: {use}. Use the mask_token_id that the drafter was trained with; "
            "for a new one a reserved special token, or a row of the embedding past the tokenizer's last id."
        )


def _use_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    """What the tokenizer uses a token for; None for one that texts do not use."""
    if token_id >= len(tokenizer):
        return None
    token = tokenizer.convert_ids_to_tokens(token_id)
    ids = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    for name, value in zip(("eos", "bos", "pad", "unk"), ids, strict=True):
        if value == token_id:
            return f"{token!r} is the tokenizer's {name} token"
    added = tokenizer.added_tokens_decoder.get(token_id)
    if added is None or not added.special:
        return f"the tokenizer writes {token!r} for ordinary text"
    templates = tokenizer.chat_template or ""
    if any(added.content in text for text in (templates.values() if isinstance(templates, dict) else [templates])):
        return f"the chat template writes {token!r}"
    return None
