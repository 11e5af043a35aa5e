# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of a drafter, by peft: trained beside frozen weights, saved alone, merged.

peft says what it cannot adapt. What would be silent is refused here: an adapter on other weights than its own, one
that lacks tensors, and one that could never be loaded again.
"""

import copy
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from .checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, file_headers
from .checkpoint_format import expected_tensors
from .modeling_dflash import DFlashDraftModel


try:
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise ImportError(f"Adapters need peft: pip install 'dflash_hf[peft]' ({error}).") from error


# All matrices of a drafter. `fc` reads the target's hidden states, which another target or domain changes first.
TARGET_MODULES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# What peft has no field for: which weights the adapter was trained beside.
BASE_RECORD = "adapter_base.json"


class DrafterAdapter(PeftModel):
    """A drafter with an adapter; `merge_and_unload` gives the plain drafter, `save_pretrained` writes the adapter."""

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> DFlashDraftModel:
        """The plain drafter, which has no name until it is saved: other weights lie under the base's name."""
        merged = self.base_model.merge_and_unload(*args, **kwargs)  # type: ignore[operator]
        merged.name_or_path = merged.config.name_or_path = ""
        return merged

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:  # type: ignore[override]
        """Refused: servers load whole drafters, and the name of an adapter's base may be a local path."""
        raise ValueError(
            f"{repo_id} would get an adapter alone, which no server loads. Push the merged drafter, by `dflash-hf "
            "publish --drafter FOLDER_OF_THE_ADAPTER` or by push_to_hub of merge_adapter(folder) or of the trainer."
        )

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the adapter and what its base is; the Hub is asked nothing."""
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


# --- Making an adapter.


def check_adapter(drafter: Any, peft_config: Any) -> None:
    """Refuse an adapter that the drafter cannot take, that could not be loaded again, or that does nothing in part."""
    if not isinstance(peft_config, PeftConfig):
        raise ValueError(f"peft_config is a {type(peft_config).__name__}; give one of peft, such as lora_config(16).")
    if isinstance(drafter, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in drafter.modules()):
        raise ValueError(
            "peft_config was given for a drafter that already has an adapter. Leave peft_config out to train that "
            "one, or merge it (merge_adapter), save that drafter and load it from there."
        )
    name = drafter.config.name_or_path
    if not name or (Path(name) / ADAPTER_CONFIG).is_file():
        raise ValueError(
            "peft_config was given for a drafter without a name, so its adapter could never be loaded again. Save the "
            "drafter (save_pretrained) and load it from there (from_pretrained)."
        )
    if isinstance(peft_config, LoraConfig):
        _try_out(drafter, _completed(peft_config))


def _completed(peft_config: PeftConfig) -> PeftConfig:
    """A copy, in which an adapter without `target_modules` adapts all matrices."""
    peft_config = copy.deepcopy(peft_config)
    if isinstance(peft_config, LoraConfig) and peft_config.target_modules is None:
        peft_config.target_modules = list(TARGET_MODULES)
    return peft_config


def _try_out(drafter: DFlashDraftModel, config: Any) -> None:
    """Let peft adapt a drafter without memory, so that what it refuses shows before the target is loaded."""
    # Other ways to start read the weights.
    config.init_lora_weights = True
    try:
        with torch.device("meta"):
            adapter = PeftModel(type(drafter)(copy.deepcopy(drafter.config)), config)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The adapter of rank {config.r} (lora_rank) for {config.target_modules} (lora_modules) does not fit the "
            f"drafter: {error} Its matrices are {list(TARGET_MODULES)}, or paths such as layers.0.self_attn.q_proj."
        ) from error
    if not config.lora_alpha > 0:
        raise ValueError(f"lora_alpha must be above 0, and is {config.lora_alpha}: lora_alpha / r scales the update.")
    # Beside a name that it finds, peft passes over one that it does not.
    targets = [] if isinstance(config.target_modules, str) else config.target_modules
    matrices: Any = adapter.base_model.targeted_module_names
    unknown = [name for name in targets if not _is_among(matrices, name)]
    modules = [name for name, _ in drafter.named_modules()]
    unknown += [name for name in config.modules_to_save or [] if not _is_among(modules, name)]
    if unknown:
        raise ValueError(f"peft_config names {unknown}, which the drafter does not have.")


def _is_among(modules: Iterable[str], name: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for module in modules)


def add_adapter(drafter: DFlashDraftModel, peft_config: PeftConfig, seed: int = 0) -> DrafterAdapter:
    """Freeze a drafter, whose modules are changed in place, and put a new adapter into it, from a seed.

    Without `target_modules` all matrices are adapted. [`check_adapter`] refuses what cannot be.
    """
    check_adapter(drafter, peft_config)
    peft_config = _completed(peft_config)
    peft_config.base_model_name_or_path = str(drafter.config.name_or_path)
    peft_config.revision = vars(drafter.config).get("_commit_hash")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DrafterAdapter(drafter, peft_config)


def merged_copy(adapter: PeftModel) -> DFlashDraftModel:
    """The merged drafter in fp32 on the CPU, while the adapter goes on training."""
    return copy.deepcopy(adapter).cpu().float().merge_and_unload()  # type: ignore[operator]


# --- Loading an adapter onto the weights that it was trained beside.


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
        raise ValueError(f"{folder} has no {ADAPTER_CONFIG}: expected a folder of DFlashTrainer(peft_config=...).")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    # peft makes a class of what is there and checks nothing.
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} does not describe an adapter ({error}). Copy it again."
        ) from error
    name, revision = (config.base_model_name_or_path, config.revision) if base is None else (base, None)
    # The name of a folder that is gone may be somebody else's repository.
    if base is None and revision is None and not (name and Path(name).is_dir()):
        raise ValueError(
            f"The adapter {folder} was trained for the drafter {name}, which is not a folder here (working directory: "
            f"{Path.cwd()}). Give the drafter as base (--base of dflash-hf publish)."
        )
    drafter = DFlashDraftModel.from_pretrained(name, dtype=dtype, revision=revision)
    config.inference_mode = not is_trainable
    adapter = DrafterAdapter(drafter, config)
    _check_weights(folder, adapter, str(name))
    adapter.load_adapter(str(folder), adapter.active_adapter, is_trainable=is_trainable)
    return adapter


def merge_adapter(folder: str | Path, base: str | Path | None = None) -> DFlashDraftModel:
    """The drafter that an adapter makes of its base, in fp32: `save_pretrained(..., dtype=torch.bfloat16)` it.

    Takes the folder and the base of [`load_adapter`].
    """
    merged = load_adapter(folder, base).merge_and_unload()
    # What the run wrote of itself lies there; a card tells that, not what is told of the base.
    merged.name_or_path = merged.config.name_or_path = str(folder)
    return merged


def check_adapter_checkpoint(folder: Path, model: torch.nn.Module) -> None:
    """Refuse to resume an adapter as a whole drafter, the other way round, or upon another base."""
    path, adapted = folder / ADAPTER_CONFIG, isinstance(model, PeftModel)
    if path.is_file() != adapted:
        kinds = ("an adapter", "a whole drafter")
        there, here = kinds if path.is_file() else reversed(kinds)
        raise ValueError(
            f"The checkpoint {folder} is of {there}, and this run trains {here}. Resume with the peft_config it was "
            "made with, or without one."
        )
    if isinstance(model, PeftModel):
        saved, own = json.loads(path.read_text()), model.peft_config[model.active_adapter].to_dict()
        for config in (saved, own):
            config["target_modules"] = sorted(config.get("target_modules") or [])
        names = ("base_model_name_or_path", "revision", "peft_type", "r", "lora_alpha", "target_modules")
        changed = [f"{k} {saved.get(k)} there and {own.get(k)} here" for k in names if saved.get(k) != own.get(k)]
        if changed:
            raise ValueError(f"The checkpoint {folder} is of another adapter: {', '.join(changed)}.")
        _check_weights(folder, model, str(own["base_model_name_or_path"]))


def _check_weights(folder: Path, adapter: PeftModel, base: str) -> None:
    """Refuse a folder with the weights of another adapter, or of one that was trained beside another base."""
    path, record = folder / ADAPTER_WEIGHTS, folder / BASE_RECORD
    if not path.is_file():
        raise ValueError(f"{path}, the adapter's weights, is missing. Copy it again.")
    saved = {name: shape for name, (_, shape) in file_headers(path).items()}
    held = get_peft_model_state_dict(adapter, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in held.items()}
    # What peft does not find it leaves as a new adapter is, which changes nothing.
    if different := sorted(dict(saved.items() ^ expected.items())):
        raise ValueError(
            f"{path} is not of the adapter that its {ADAPTER_CONFIG} describes for {base}: {len(different)} tensors "
            f"are missing, unknown or of another shape ({', '.join(different[:2])}). Copy it again, or give its base."
        )
    # Earlier versions wrote none.
    if record.is_file() and base_digest(adapter) not in record.read_text(encoding="utf-8"):
        raise ValueError(
            f"The adapter {folder} was trained beside other weights than those of {base}, and applying it there "
            "produces garbage. Give the drafter that it was trained for as base."
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
