# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of a drafter, by peft: trained beside frozen weights, saved alone, merged into the plain format.

This file needs `pip install dflash_hf[peft]`, so it is imported only where an adapter is asked for.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel

from ..modeling_dflash import DFlashDraftModel


# All matrices of a drafter. `fc` reads the target's hidden states, which another target or domain changes first.
TARGET_MODULES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER_CONFIG = "adapter_config.json"


class DrafterAdapter(PeftModel):
    """A drafter with an adapter; `merge_and_unload` gives the plain drafter, `save_pretrained` writes the adapter."""

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the adapter and the name of its base, without asking the Hub anything.

        Args:
            save_directory: Folder to write to.
            **kwargs: As for [`~peft.PeftModel.save_pretrained`].
        """
        # A drafter has no embedding; by default peft compares the vocabularies, for which it asks the Hub.
        super().save_pretrained(save_directory, **{**kwargs, "save_embedding_layers": False})
        # peft also writes a card, which names the base even where that is a local folder.
        (Path(save_directory) / "README.md").unlink(missing_ok=True)


def lora_config(rank: int = 16, alpha: int | None = None, **kwargs: Any) -> LoraConfig:
    """LoRA over all matrices of a drafter.

    Args:
        rank: Rank of the update of each matrix.
        alpha: The update is scaled by `alpha / rank`; twice the rank by default.
        **kwargs: Further arguments of [`~peft.LoraConfig`], such as `target_modules` or `lora_dropout`.
    """
    kwargs = {"target_modules": list(TARGET_MODULES), **kwargs}
    return LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, **kwargs)


def add_adapter(drafter: DFlashDraftModel, peft_config: PeftConfig, seed: int = 0) -> DrafterAdapter:
    """Freeze a drafter and put a new adapter into it.

    Args:
        drafter: A drafter that was loaded from somewhere; its modules are changed in place, its weights stay.
        peft_config: The adapter. Without `target_modules` it adapts all matrices.
        seed: Of the adapter's first weights.

    Raises:
        ValueError: The drafter has no name that an adapter could be loaded upon again.
    """
    name = drafter.config.name_or_path
    if not name:
        raise ValueError(
            "peft_config was given for a drafter that has no name: an adapter is saved without its base, so it could "
            "never be loaded again. Save the drafter (save_pretrained), load it from there (from_pretrained) and "
            "adapt that one; a new drafter is better trained whole."
        )
    peft_config = copy.deepcopy(peft_config)
    if isinstance(peft_config, LoraConfig) and peft_config.target_modules is None:
        peft_config.target_modules = list(TARGET_MODULES)
    peft_config.base_model_name_or_path = str(name)
    peft_config.revision = vars(drafter.config).get("_commit_hash")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DrafterAdapter(drafter, peft_config)


def load_adapter(
    folder: str | Path,
    base: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    is_trainable: bool = False,
) -> DrafterAdapter:
    """Load an adapter and the drafter it was trained for.

    Args:
        folder: A local folder that `DFlashTrainer` wrote.
        base: The drafter, where it is no longer under the name that the adapter has.
        dtype: Type of the drafter's weights; fp32 merges without rounding twice.
        is_trainable: Whether to go on training the adapter.

    Raises:
        ValueError: The folder has no adapter.
    """
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {ADAPTER_CONFIG}: expected a folder that DFlashTrainer(peft_config=...) saved. A whole "
            "drafter is loaded by DFlashDraftModel.from_pretrained."
        )
    config = PeftConfig.from_pretrained(str(folder))
    revision = config.revision if base is None else None
    drafter = DFlashDraftModel.from_pretrained(base or config.base_model_name_or_path, dtype=dtype, revision=revision)
    adapter: Any = DrafterAdapter.from_pretrained(drafter, str(folder), is_trainable=is_trainable)
    return adapter


def merge_adapter(folder: str | Path, base: str | Path | None = None) -> DFlashDraftModel:
    """The drafter that an adapter makes of its base, in fp32: `save_pretrained(..., dtype=torch.bfloat16)` it.

    Args:
        folder: As for [`load_adapter`].
        base: The same.
    """
    return load_adapter(folder, base).merge_and_unload()


def merged_copy(adapter: PeftModel) -> DFlashDraftModel:
    """The merged drafter in fp32 on the CPU, while the adapter goes on training."""
    return copy.deepcopy(adapter).cpu().float().merge_and_unload()  # type: ignore[operator]


def check_adapter_checkpoint(folder: Path, model: torch.nn.Module) -> None:
    """Refuse to resume an adapter as a whole drafter, the other way round, or upon another base.

    Args:
        folder: The checkpoint.
        model: What the run trains, not wrapped.

    Raises:
        ValueError: Naming both.
    """
    path, adapted = folder / ADAPTER_CONFIG, isinstance(model, PeftModel)
    if path.is_file() != adapted:
        there, here = ("an adapter", "a whole drafter") if path.is_file() else ("a whole drafter", "an adapter")
        raise ValueError(
            f"The checkpoint {folder} is of {there}, and this run trains {here}. Resume with the peft_config it was "
            "made with, or without one."
        )
    if isinstance(model, PeftModel):
        saved, own = json.loads(path.read_text()), model.peft_config[model.active_adapter].to_dict()
        names = ("base_model_name_or_path", "revision", "peft_type", "r", "lora_alpha")
        changed = [name for name in names if saved.get(name) != own.get(name)]
        if sorted(saved.get("target_modules") or []) != sorted(own.get("target_modules") or []):
            changed.append("target_modules")
        if changed:
            differences = ", ".join(f"{name} {saved.get(name)} there and {own.get(name)} here" for name in changed)
            raise ValueError(f"The checkpoint {folder} is of another adapter: {differences}. Resume it as it was.")


__all__ = ["DrafterAdapter", "add_adapter", "check_adapter_checkpoint", "load_adapter", "lora_config", "merge_adapter"]
