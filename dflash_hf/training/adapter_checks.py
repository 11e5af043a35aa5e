# SPDX-License-Identifier: Apache-2.0
"""What an adapter of a drafter must be, checked before the target is loaded.

This file needs `pip install dflash_hf[peft]`, so it is imported only where an adapter is asked for.
"""

import re
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint_format import ADAPTER_CONFIG


try:
    from peft import LoraConfig, PeftConfig, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise ImportError(f"Adapters need peft: pip install 'dflash_hf[peft]' ({error}).") from error


# All matrices of a drafter. `fc` reads the target's hidden states, which another target or domain changes first.
TARGET_MODULES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_adapter(drafter: Any, peft_config: Any) -> None:
    """Refuse an adapter that the drafter cannot take, that could not be loaded again, or of which a part does nothing.

    Args:
        drafter: The drafter, without an adapter.
        peft_config: The adapter.

    Raises:
        ValueError: Saying what was given, what was expected, and what to do.
    """
    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}; give a configuration of peft, such as lora_config(16) of "
            "dflash_hf.training.drafter_adapters."
        )
    _check_base(drafter)
    config = peft_config.to_dict()
    modules = dict(drafter.named_modules())
    adapted = _adapted(modules, config.get("target_modules"))
    saved = config.get("modules_to_save") or []
    if unknown := [name for name in saved if not any(_is_named(module, name) for module in modules)]:
        raise ValueError(
            f"modules_to_save of peft_config names {unknown}, of which the drafter has none. Leave it out."
        )
    if isinstance(peft_config, LoraConfig):
        _check_rank(config["r"], config["lora_alpha"], [matrix.weight.shape for matrix in adapted.values()])


def _check_base(drafter: Any) -> None:
    if isinstance(drafter, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in drafter.modules()):
        raise ValueError(
            "peft_config was given for a drafter that has an adapter already. To go on training that one, leave "
            "peft_config out (load_adapter(folder, is_trainable=True)); to put another on top, merge it first "
            "(merge_adapter), save the drafter (save_pretrained) and load it from there."
        )
    name = drafter.config.name_or_path
    if not name or (Path(name) / ADAPTER_CONFIG).is_file():
        raise ValueError(
            "peft_config was given for a drafter that has no name: an adapter is saved without its base, so it could "
            "never be loaded again. Save the drafter (save_pretrained), load it from there (from_pretrained) and "
            "adapt that one; a new drafter is better trained whole."
        )


def _is_named(module: str, name: str) -> bool:
    """Whether peft takes a module for the one of that name: all of its path, or the end of it."""
    return module == name or module.endswith(f".{name}")


def _adapted(modules: dict[str, nn.Module], target_modules: Any) -> dict[str, nn.Linear]:
    """The matrices that `target_modules` names; a pattern must match nothing else, each name of a list some."""
    matrices = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    if target_modules is None or target_modules == "all-linear":
        return matrices
    if isinstance(target_modules, str):
        found = [name for name in modules if re.fullmatch(target_modules, name)]
        unknown = [name for name in found if name not in matrices] if found else [target_modules]
    else:
        found = [name for name in matrices if any(_is_named(name, target) for target in target_modules)]
        unknown = sorted(t for t in target_modules if not any(_is_named(name, t) for name in matrices))
    if unknown or not found:
        given = target_modules if isinstance(target_modules, str) else sorted(target_modules)
        raise ValueError(
            f"target_modules of the adapter (lora_modules of recipes/adapt_drafter.py) are {given!r}: the drafter has "
            f"no matrix {unknown or 'of an empty list'}. Give some of {list(TARGET_MODULES)}, or all of a path, such "
            "as layers.0.self_attn.q_proj; leave them out for all matrices."
        )
    return {name: matrices[name] for name in found}


def _check_rank(rank: Any, alpha: Any, shapes: list[Any]) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(
            f"The adapter's rank (r, or lora_rank of recipes/adapt_drafter.py) is {rank!r}; expected a whole number "
            "of at least 1, such as 16. To train the drafter itself leave peft_config out (--lora_rank 0)."
        )
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise ValueError(
            f"lora_alpha is {alpha!r}; expected more than 0, such as {2 * rank} for rank {rank}: the update is scaled "
            "by lora_alpha / rank, and would count nothing or turn round."
        )
    own, adapter = sum(rows * columns for rows, columns in shapes), sum(rank * sum(shape) for shape in shapes)
    if adapter > own:
        fitting = own // sum(sum(shape) for shape in shapes)
        raise ValueError(
            f"The adapter's rank {rank} is too large: its {adapter:,} parameters are more than the {own:,} of the "
            f"matrices that they change. Give at most {fitting}, or train the drafter itself (without "
            "peft_config; --lora_rank 0)."
        )


__all__ = ["TARGET_MODULES", "check_adapter"]
