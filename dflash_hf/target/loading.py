# SPDX-License-Identifier: Apache-2.0
"""Targets and what belongs to them, by Hub id or folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ResolvedRevision
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import resolve_revision

from .checks import refuse_slow


def take_model(
    model: str | Path | PreTrainedModel,
    device: torch.device | str | None,
    allow_slow_target: bool,
    init_kwargs: dict[str, Any],
) -> PreTrainedModel:
    """A target that was given, loaded where it is not.

    Args:
        model: Hub id, folder or loaded model.
        device: Where it will run; None leaves that open.
        allow_slow_target: Whether a hybrid target may run on CUDA without flash-linear-attention.
        init_kwargs: Arguments of `from_pretrained`.

    Raises:
        TypeError: It is none of these.
        ValueError: It has no weights, is loaded already and cannot take arguments, or would be far too slow.
        OSError: There is no such model.
    """
    if not isinstance(model, str | Path | nn.Module):
        raise TypeError(
            f"The target is a {type(model).__name__}; give a Hub id, a folder or a loaded causal language model."
        )
    if init_kwargs and isinstance(model, nn.Module):
        raise ValueError(
            f"target_model_init_kwargs={init_kwargs} were given together with a loaded target model: they are "
            "arguments of from_pretrained. Pass the target's id or folder, or leave them out."
        )
    if isinstance(model, str | Path):
        if not allow_slow_target and device is not None and torch.device(device).type == "cuda":
            refuse_slow(load_config(model, init_kwargs))
        model = load_model(model, device, init_kwargs)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"The target {type(model).__name__} has parameters on the meta device, so it has no weights to "
            "run with. Load it with from_pretrained, without offloading."
        )
    return model


def refuse_token(init_kwargs: Any, place: str) -> None:
    """Refuse a token among arguments of `from_pretrained` that are kept.

    Args:
        init_kwargs: The arguments, as a dict, their JSON or None.
        place: What would happen to it.

    Raises:
        ValueError: There is one.
    """
    if isinstance(init_kwargs, dict) and "token" in init_kwargs:
        raise ValueError(
            f"target_model_init_kwargs holds a token, which would {place}. Set the environment variable HF_TOKEN, or "
            "log in with `hf auth login`."
        )


def load_config(name: str | Path, init_kwargs: dict) -> PreTrainedConfig:
    with _explained(name):
        return AutoConfig.from_pretrained(name, return_unused_kwargs=True, **init_kwargs)[0]


def load_model(name: str | Path, device: torch.device | str | None, init_kwargs: dict) -> PreTrainedModel:
    """Load a target with all its weights; its configuration's `_commit_hash` says which commit of the Hub they are.

    Args:
        name: Hub id or folder.
        device: Where it is loaded to; None for the CPU.
        init_kwargs: Arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        OSError: There is no such model, or its files are damaged.
        ValueError: A weight of it is not there: transformers would go on with random numbers.
    """
    if device is not None and torch.device(device).type == "cuda":
        # Weights go straight to the device, which some quantised ones must.
        init_kwargs = {"device_map": {"": str(torch.device(device))}, **init_kwargs}
    # transformers loads all files of one commit, and does not tell of which.
    places = {key: init_kwargs[key] for key in ("token", "cache_dir", "local_files_only") if key in init_kwargs}
    revision = resolve_revision(name, init_kwargs.get("revision"), **places)
    if isinstance(revision, ResolvedRevision):
        init_kwargs = {**init_kwargs, "revision": revision}
    with _explained(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **init_kwargs)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"The target {str(name)!r} has no {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} "
            f"({len(missing)} of its weights), which would be random. Copy it again, or give a whole causal language "
            "model with its head."
        )
    model.config._commit_hash = revision.resolved if isinstance(revision, ResolvedRevision) else None
    return model


@contextmanager
def _explained(name: str | Path) -> Iterator[None]:
    if isinstance(name, Path) and not name.is_dir():
        raise OSError(f"There is no target folder {name}. Give a folder with config.json and weights, or a Hub id.")
    try:
        yield
    except (SafetensorError, json.JSONDecodeError) as error:
        raise OSError(
            f"The target {str(name)!r} cannot be loaded: a file of it is damaged ({error}). Copy it again."
        ) from error
    except OSError as error:
        raise OSError(
            f"The target {str(name)!r} cannot be loaded: it is neither a folder with config.json and weights nor a "
            f"model that the Hub gives to this account. Check the spelling, the path or the login. ({error})"
        ) from error


def eos_token_ids(generation_config: GenerationConfig) -> list[int]:
    """Ids after which a target stops generating."""
    ids = generation_config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def read_eos_token_ids(name: str) -> list[int]:
    """[`eos_token_ids`] of a target whose weights need not be there.

    Args:
        name: Hub id or folder.

    Raises:
        OSError, ValueError: It has neither a generation config nor a configuration.
    """
    try:
        generation_config = GenerationConfig.from_pretrained(name)
    except OSError:
        # Not every model has the file; transformers then derives it from the configuration.
        config = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
        generation_config = GenerationConfig.from_model_config(config)
    return eos_token_ids(generation_config)


__all__ = ["eos_token_ids", "load_config", "load_model", "read_eos_token_ids", "refuse_token", "take_model"]
