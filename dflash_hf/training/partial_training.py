# SPDX-License-Identifier: Apache-2.0
"""Which part of a drafter is trained: all of it, some of its modules, or an adapter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import is_peft_available, logging

from ..modeling_dflash import DFlashDraftModel


logger = logging.get_logger(__name__)


def check_part(drafter: Any, peft_config: Any, trainable_modules: Any) -> None:
    """Refuse a part of the drafter that cannot be trained, before anything takes long.

    Args:
        drafter: The drafter; it is not changed.
        peft_config: A configuration of peft, or None.
        trainable_modules: As for [`freeze_all_but`], or None.

    Raises:
        ValueError: Both are given, or they do not fit the drafter.
        ImportError: peft is missing.
    """
    if peft_config is None:
        if trainable_modules is not None:
            check_modules(drafter, trainable_modules)
        return
    if trainable_modules is not None:
        raise ValueError(
            f"peft_config and trainable_modules={trainable_modules} were both given: an adapter freezes the drafter "
            "itself. Leave one out, or name the modules in modules_to_save of peft_config."
        )
    if not is_peft_available():
        raise ImportError("peft_config needs peft: pip install 'dflash_hf[peft]'.")
    from .adapter_checks import check_adapter

    check_adapter(drafter, peft_config)


def check_modules(drafter: nn.Module, trainable_modules: Sequence[str]) -> None:
    """Refuse names that are not those of a drafter's modules or parameters.

    Args:
        drafter: The drafter.
        trainable_modules: As for [`freeze_all_but`].

    Raises:
        ValueError: With the names that there are.
    """
    if isinstance(trainable_modules, str):
        raise ValueError(f"trainable_modules={trainable_modules!r} is a text: give a list, [{trainable_modules!r}].")
    names = [name for name, _ in drafter.named_parameters()]
    unknown = [m for m in trainable_modules if not any(name == m or name.startswith(f"{m}.") for name in names)]
    if unknown or not trainable_modules:
        # "layers.1" of "layers.1.mlp.up_proj.weight", "fc" of "fc.weight"
        parts = dict.fromkeys(".".join(name.split(".")[: 1 + name.startswith("layers.")]) for name in names)
        raise ValueError(
            f"trainable_modules={list(trainable_modules)}: the drafter has no {unknown or 'modules that you name'}. "
            f"Give some of {list(parts)}, or parts of them."
        )


def freeze_all_but(drafter: nn.Module, trainable_modules: Sequence[str]) -> None:
    """Train only the named modules; what is not named keeps its weights.

    Args:
        drafter: The drafter, changed in place.
        trainable_modules: Names of modules or parameters, such as "fc", "hidden_norm", "layers.4" or
            "layers.4.self_attn"; all that is inside one is trained.

    Raises:
        ValueError: A name is not one of the drafter's.
    """
    check_modules(drafter, trainable_modules)
    trained = 0
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(any(name == m or name.startswith(f"{m}.") for m in trainable_modules))
        trained += parameter.numel() * parameter.requires_grad
    total = sum(parameter.numel() for parameter in drafter.parameters())
    logger.info(f"Training {', '.join(trainable_modules)}: {trained:,} of {total:,} parameters; the rest is frozen.")


def make_trainable(drafter: DFlashDraftModel, peft_config: Any, trainable_modules: Any, seed: int) -> nn.Module:
    """What is trained: the drafter, or the drafter with an adapter, with all else frozen.

    Args:
        drafter: The drafter, changed in place.
        peft_config: A configuration of peft, or None.
        trainable_modules: As for [`freeze_all_but`], or None.
        seed: Of an adapter's first weights.

    Raises:
        ValueError: They do not fit the drafter; as for [`check_part`].
    """
    if peft_config is None:
        if trainable_modules is not None:
            freeze_all_but(drafter, trainable_modules)
        return drafter
    from .drafter_adapters import add_adapter

    adapter = add_adapter(drafter, peft_config, seed)
    trained, total = adapter.get_nb_trainable_parameters()
    logger.info(f"Training an adapter of {trained:,} parameters; the drafter's {total - trained:,} are frozen.")
    return adapter


def is_adapter(model: Any) -> bool:
    """Whether a model, not wrapped, is a drafter with an adapter."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def plain_drafter(model: Any) -> DFlashDraftModel:
    """The drafter as users load it: an adapter is merged, in a copy.

    Args:
        model: A drafter, or one with an adapter, not wrapped.
    """
    if not is_adapter(model):
        return model
    from .drafter_adapters import merged_copy

    return merged_copy(model)


def check_resumed_part(folder: Path | None, model: Any) -> None:
    """Refuse a checkpoint of an adapter where a whole drafter is trained, and the other way round.

    Args:
        folder: The checkpoint, or None.
        model: What is trained, not wrapped.
    """
    if folder is not None and is_peft_available():
        from .drafter_adapters import check_adapter_checkpoint

        check_adapter_checkpoint(folder, model)


__all__ = ["check_part", "freeze_all_but", "is_adapter", "make_trainable", "plain_drafter"]
