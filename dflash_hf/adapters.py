# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of a drafter, by peft: trained beside frozen weights, saved alone, merged."""

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from .checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, file_headers
from .checkpoint_format import expected_tensors
from .modeling_dflash import DFlashDraftModel


# --- What an adapter of a drafter must be, checked before the target is loaded.


try:
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
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
            "dflash_hf.adapters."
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


# --- Low-rank adapters of a drafter.


# What peft has no field for: which weights the adapter was trained beside.
BASE_RECORD = "adapter_base.json"


class DrafterAdapter(PeftModel):
    """A drafter with an adapter; `merge_and_unload` gives the plain drafter, `save_pretrained` writes the adapter."""

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> DFlashDraftModel:
        """The plain drafter, which has no name until it is saved: the weights under that of the base are others.

        Args:
            *args: As for [`~peft.LoraModel.merge_and_unload`].
            **kwargs: The same.
        """
        merged = self.base_model.merge_and_unload(*args, **kwargs)  # type: ignore[operator]
        merged.name_or_path = merged.config.name_or_path = ""
        return merged

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:  # type: ignore[override]
        """Refused: servers load whole drafters, and the name of an adapter's base may be a local path.

        Raises:
            ValueError: Saying what to push.
        """
        raise ValueError(
            f"{repo_id} would get an adapter alone, which no server loads. Push the drafter that it makes: "
            "`recipes/publish.py --drafter FOLDER_OF_THE_ADAPTER`, merge_adapter(folder).push_to_hub(repo_id), or "
            "push_to_hub of the trainer."
        )

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the adapter and the name of its base, without asking the Hub anything.

        Args:
            save_directory: Folder to write to.
            **kwargs: As for [`~peft.PeftModel.save_pretrained`].
        """
        # A drafter has no embedding; by default peft compares the vocabularies, for which it asks the Hub.
        try:
            super().save_pretrained(save_directory, **{**kwargs, "save_embedding_layers": False})
        except SafetensorError as error:
            raise OSError(f"The adapter cannot be written to {save_directory} ({error}): look at its disk.") from error
        # peft also writes a card, which names the base even where that is a local folder.
        (Path(save_directory) / "README.md").unlink(missing_ok=True)
        (Path(save_directory) / BASE_RECORD).write_text(json.dumps({"digest": base_digest(self)}) + "\n")


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
        ValueError: As for [`check_adapter`].
    """
    check_adapter(drafter, peft_config)
    peft_config = copy.deepcopy(peft_config)
    if isinstance(peft_config, LoraConfig) and peft_config.target_modules is None:
        peft_config.target_modules = list(TARGET_MODULES)
    peft_config.base_model_name_or_path = str(drafter.config.name_or_path)
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
        ValueError: The folder has no whole adapter, or its base is not here or has other weights by now.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {ADAPTER_CONFIG}: expected a folder that DFlashTrainer(peft_config=...) saved. A whole "
            "drafter is loaded by DFlashDraftModel.from_pretrained."
        )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    # peft makes a class of what is there and checks nothing.
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} is no adapter's configuration ({error}). Copy it again."
        ) from error
    name, revision = (config.base_model_name_or_path, config.revision) if base is None else (base, None)
    if base is None and revision is None and not (name and Path(name).is_dir()):
        raise ValueError(
            f"The adapter {folder} was trained for the drafter {name}, which is no folder here (working directory: "
            f"{Path.cwd()}). Give the drafter as base (--base of recipes/publish.py)."
        )
    drafter = DFlashDraftModel.from_pretrained(name, dtype=dtype, revision=revision)
    config.inference_mode = not is_trainable
    adapter = DrafterAdapter(drafter, config)
    check_adapter_tensors(folder, adapter)
    check_base(folder, adapter, str(name))
    adapter.load_adapter(str(folder), adapter.active_adapter, is_trainable=is_trainable)
    return adapter


def check_adapter_tensors(folder: Path, adapter: PeftModel) -> None:
    """Refuse weights of another adapter: what peft does not find it leaves as a new adapter is, which changes nothing.

    Args:
        folder: Of the adapter.
        adapter: The adapter that its configuration makes.

    Raises:
        ValueError: Naming the tensors.
    """
    try:
        saved = {name: shape for name, (_, shape) in file_headers(folder / ADAPTER_WEIGHTS).items()}
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}, the adapter's weights. Copy it again.") from None
    held = get_peft_model_state_dict(adapter, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in held.items()}
    if different := sorted(dict(saved.items() ^ expected.items())):
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS} is not of the adapter that its {ADAPTER_CONFIG} describes: {len(different)} "
            f"tensors are missing, unknown or of another shape, such as {', '.join(different[:2])}. Copy it again, or "
            "give the drafter that it was trained for as base, if this one is another."
        )


def base_digest(adapter: PeftModel) -> str:
    """Hash of the ends of each tensor of an adapter's base, the same in every type that it may be held in."""
    base, digest = adapter.get_base_model(), hashlib.sha256()
    own = expected_tensors(vars(base.config))
    for name, tensor in base.state_dict().items():
        name = name.replace(".base_layer", "").replace(".original_module", "")
        # The others are the adapter's.
        if name in own:
            flat = tensor.detach().reshape(-1)
            ends = torch.cat([flat[:8], flat[-8:]]).to("cpu", torch.bfloat16).float()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + ends.numpy().tobytes())
    return digest.hexdigest()


def check_base(folder: Path, adapter: PeftModel, name: str) -> None:
    """Refuse to put an adapter upon other weights than those that it was trained beside.

    Args:
        folder: With what [`DrafterAdapter.save_pretrained`] wrote; that of earlier versions says nothing of the base.
        adapter: The adapter upon some base.
        name: Of the base.

    Raises:
        ValueError: Naming both.
    """
    path = folder / BASE_RECORD
    if path.is_file() and base_digest(adapter) not in path.read_text(encoding="utf-8"):
        raise ValueError(
            f"The adapter {folder} was trained beside other weights than those of {name}: it would change them "
            "into no drafter at all. Give the drafter that it was trained for as base."
        )


def merge_adapter(folder: str | Path, base: str | Path | None = None) -> DFlashDraftModel:
    """The drafter that an adapter makes of its base, in fp32: `save_pretrained(..., dtype=torch.bfloat16)` it.

    Args:
        folder: As for [`load_adapter`].
        base: The same.
    """
    merged = load_adapter(folder, base).merge_and_unload()
    # What the run wrote of itself lies there; a card tells that, not what is told of the base.
    merged.name_or_path = merged.config.name_or_path = str(folder)
    return merged


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
        check_adapter_tensors(folder, model)
        check_base(folder, model, str(own["base_model_name_or_path"]))
