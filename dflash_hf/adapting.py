# SPDX-License-Identifier: Apache-2.0
"""Continuing a drafter: from a published one with named changes, or some of its modules."""

import copy
from collections.abc import Callable, Sequence
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


# --- Which part of a drafter is trained: all of it, some of its modules, or an adapter.


logger = logging.get_logger(__name__)


def check_part(drafter: Any, peft_config: Any, trainable_modules: Sequence[str] | None) -> None:
    """Refuse a part of the drafter that cannot be trained, before anything takes long.

    `peft_config` is one of peft, or `trainable_modules` are names of modules or parameters, such as "fc",
    "hidden_norm", "layers.4" or "layers.4.self_attn".
    """
    if peft_config is not None and trainable_modules is not None:
        raise ValueError(
            f"peft_config and trainable_modules={trainable_modules} were both given: an adapter freezes the drafter "
            "itself. Leave one out, or name the modules in modules_to_save of peft_config."
        )
    if peft_config is not None:
        from .adapters import check_adapter

        check_adapter(drafter, peft_config)
    elif trainable_modules is not None:
        _check_modules(drafter, trainable_modules)


def _check_modules(drafter: nn.Module, trainable_modules: Sequence[str]) -> None:
    if isinstance(trainable_modules, str):
        raise ValueError(f"trainable_modules={trainable_modules!r} is a text: give a list, [{trainable_modules!r}].")
    names = [name for name, _ in drafter.named_parameters()]
    unknown = [module for module in trainable_modules if not any(_is_in(name, [module]) for name in names)]
    if unknown or not trainable_modules:
        # "layers.1" of "layers.1.mlp.up_proj.weight", "fc" of "fc.weight"
        parts = dict.fromkeys(".".join(name.split(".")[: 1 + name.startswith("layers.")]) for name in names)
        raise ValueError(
            f"trainable_modules={list(trainable_modules)}: the drafter has no {unknown or 'modules that you name'}. "
            f"Give some of {list(parts)}, or parts of them."
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


# --- Continuing from a published drafter: named changes of its block size, window and taps, and what must hold first.


def adapt(
    drafter: DFlashDraftModel,
    *,
    block_size: int | None = None,
    sliding_window: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
) -> DFlashDraftModel:
    """Change what is given and leave the rest, one log line per change.

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
    steps: list[tuple[Callable[[DFlashDraftModel, Any], DFlashDraftModel], Any, Any]] = [
        (change_block_size, block_size, config.block_size),
        (change_sliding_window, sliding_window, config.sliding_window),
        (change_target_layer_ids, target_layer_ids and list(target_layer_ids), config.target_layer_ids),
    ]
    changes = [(change, value) for change, value, present in steps if value is not None and value != present]
    # A larger block may need the larger window, and a smaller window the smaller block, to be in place first.
    if isinstance(block_size, int) and block_size > config.block_size:
        changes.sort(key=lambda step: step[0] is change_block_size)
    for change, value in changes:
        drafter = change(drafter, value)
    return drafter


def change_block_size(drafter: DFlashDraftModel, block_size: int) -> DFlashDraftModel:
    """A drafter of blocks of another length, on which no weight depends; [`adapt`] says what may be given."""
    _require_integer("block_size", block_size)
    changed = _rebuilt(drafter, block_size=block_size)
    logger.info(f"block_size: {drafter.config.block_size} -> {block_size}. All weights are kept.")
    return changed


def change_sliding_window(drafter: DFlashDraftModel, sliding_window: int) -> DFlashDraftModel:
    """A drafter whose sliding layers have another window; which layers slide stays, and so does every weight."""
    _require_integer("sliding_window", sliding_window)
    config = drafter.config
    if "sliding_attention" not in (config.layer_types or []):
        raise ValueError(
            f"sliding_window={sliding_window} was given, but layer_types={config.layer_types} has no sliding layer. "
            "Leave it out, or start a new drafter with sliding layers."
        )
    if sliding_window > config.max_position_embeddings:
        raise ValueError(
            f"sliding_window={sliding_window} is larger than max_position_embeddings={config.max_position_embeddings}"
            ", so it would never hide anything. Give a window within the drafter's positions."
        )
    changed = _rebuilt(drafter, sliding_window=sliding_window)
    logger.info(f"sliding_window: {config.sliding_window} -> {sliding_window}. All weights are kept.")
    return changed


def change_target_layer_ids(drafter: DFlashDraftModel, target_layer_ids: Sequence[int]) -> DFlashDraftModel:
    """A drafter that reads other layers of the target.

    The columns of `fc` that read a tap move with it. Those of a new tap start at zero: while taps are only added, the
    drafter computes what it did before. Those of a tap that goes away are dropped.
    """
    for tap in target_layer_ids:
        _require_integer("target_layer_ids", tap)
    taps, previous = list(target_layer_ids), drafter.config.target_layer_ids or []
    if taps and not set(taps) & set(previous):
        raise ValueError(
            f"target_layer_ids={taps} keeps none of the drafter's taps {previous}, so fc would be zero. Keep at least "
            "one of them, or start a new drafter."
        )
    weight = drafter.fc.weight.detach()
    columns = dict(zip(previous, weight.split(drafter.config.hidden_size, dim=1), strict=True))
    zeros = torch.zeros_like(weight[:, : drafter.config.hidden_size])
    # No taps at all are refused by the rules of the format, below.
    moved = torch.cat([columns.get(tap, zeros) for tap in taps], dim=1) if taps else weight
    changed = _rebuilt(drafter, {"fc.weight": moved}, target_layer_ids=taps)
    added, dropped = sorted({*taps} - {*previous}), sorted({*previous} - {*taps})
    logger.info(f"target_layer_ids: {previous} -> {taps}. New, from zero: {added}; dropped: {dropped}.")
    return changed


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
    way_out = (
        "Use the mask_token_id that it was trained with; for a new drafter choose a reserved special token, or a row "
        "of the embedding past the tokenizer's last id."
    )
    if mask in target.eos_token_ids:
        raise ValueError(
            f"mask_token_id={mask} ends the target's texts (eos_token_id of its generation config). {way_out}"
        )
    if tokenizer is not None and (use := _use_of_token(tokenizer, mask)):
        token = tokenizer.convert_ids_to_tokens(mask)
        raise ValueError(f"mask_token_id={mask} is {token!r}, which is a token in use: {use}. {way_out}")


def _use_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    """What the tokenizer uses a token for; None for one that texts do not use."""
    if token_id >= len(tokenizer):
        return None
    ids = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    for name, value in zip(("eos", "bos", "pad", "unk"), ids, strict=True):
        if value == token_id:
            return f"it is the tokenizer's {name} token"
    added = tokenizer.added_tokens_decoder.get(token_id)
    if added is None or not added.special:
        return "the tokenizer writes it for ordinary text"
    templates = tokenizer.chat_template or ""
    if any(added.content in text for text in (templates.values() if isinstance(templates, dict) else [templates])):
        return "the chat template writes it"
    return None


def _rebuilt(drafter: DFlashDraftModel, tensors: dict[str, torch.Tensor] | None = None, **changes) -> DFlashDraftModel:
    """A new drafter with some fields and tensors replaced, where the old one is, in its dtype and mode."""
    config = copy.deepcopy(drafter.config)
    # What the drafter was read with, a causality or a model type of its own, stays with a copy.
    refuse(f"The drafter cannot be changed to {changes}", field_problems({**vars(config), **changes}))
    for name, value in changes.items():
        setattr(config, name, value)
    state_dict = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()} | (tensors or {})
    changed = DFlashDraftModel.from_pretrained(None, config=config, state_dict=state_dict)
    # Loading forgets where the drafter came from, which its model card names.
    changed.name_or_path = changed.config.name_or_path = drafter.config.name_or_path
    return changed.to(drafter.device).train(drafter.training)


def _require_integer(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} holds {value!r}, a {type(value).__name__}: expected whole numbers.")
