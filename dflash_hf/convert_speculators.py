# SPDX-License-Identifier: Apache-2.0
"""DFlash checkpoints of the vllm-project/speculators format into the layout of the published drafters.

Their `config.json` keeps the drafter's Qwen3 fields in `transformer_layer_config` and names the taps
`aux_hidden_state_layer_ids`, one higher than here: their id i is the input of target layer i, that is the output of
layer i - 1. The tensors of the drafter itself have the same names.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.utils import logging

from .checkpoint_files import fetch_checkpoint, read_tensor_headers
from .checkpoint_format import (
    DFLASH2,
    EAGLE_TAPS,
    GEOMETRY,
    OTHER_LAYOUTS,
    PARTIAL_ROTATION,
    PARTLY_READ,
    SIZES,
    refuse,
    rule_problems,
)
from .configuration_dflash import DFlashDraftConfig
from .modeling_dflash import DFlashDraftModel


logger = logging.get_logger(__name__)

# Fields of transformer_layer_config that their layers read, whatever model type it names: the layers are Qwen3's.
_LAYER_FIELDS = (
    *SIZES,
    *("attention_bias", "attention_dropout", "initializer_range", "layer_types", "rms_norm_eps", "sliding_window"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "rope_scaling", "rope_theta"),
    # Refused below unless neutral.
    *("hidden_act", EAGLE_TAPS, *PARTIAL_ROTATION, *PARTLY_READ),
)
# Copies of the target's tensors that only their training reads.
_TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
# Embeddings, head and vocabulary of the drafter's own.
_OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")


def convert_speculators(
    folder: str | Path, output: str | Path, *, num_target_layers: int | None = None, **download: Any
) -> DFlashDraftModel:
    """Write a speculators DFlash checkpoint anew in the published drafters' layout, in the dtype it has.

    Weights keep their values; with taps out of order, the columns of `fc` follow them. On sliding layers the result
    differs from what speculators trains: there every slot of a block sees the `sliding_window` tokens before the
    anchor, while servers count the window from the slot itself, so slot j sees j + 1 tokens fewer.

    Args:
        folder: Local folder, or repository on the Hub.
        output: Folder to write.
        num_target_layers: Number of decoder layers of the target; read from the target that the checkpoint names by
            default.
        **download: As for [`checkpoint_files.fetch_checkpoint`].

    Returns:
        The drafter that was written.

    Raises:
        OSError: The checkpoint or the target's configuration cannot be read.
        ValueError: With everything that the published layout cannot hold, one a line.
    """
    source = fetch_checkpoint(folder, **download)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    names = [name for name in read_tensor_headers(source) if name not in _TRAINING_ONLY]
    refuse(f"{folder} cannot be converted", [*_problems(raw, names)])
    if num_target_layers is None:
        num_target_layers = _target_depth(raw, str(folder))
    config = DFlashDraftConfig.from_dict(_config_dict(raw, num_target_layers))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
    tensors["fc.weight"] = _sorted_columns(tensors, raw["aux_hidden_state_layer_ids"], config.hidden_size)
    drafter = DFlashDraftModel.from_pretrained(None, config=config, state_dict=tensors)
    drafter.save_pretrained(output)
    if "sliding_attention" in (config.layer_types or []):
        logger.warning(
            f"Slot j of the sliding layers sees j + 1 tokens fewer than {folder} was trained with: servers count "
            f"sliding_window={config.sliding_window} from the slot itself. Measure the acceptance length."
        )
    return drafter


def _problems(raw: dict[str, Any], names: list[str]) -> Iterator[object]:
    """What the published layout has no place for."""
    kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind not in ("dflash", "dflash2"):
        yield f"speculators_model_type is {kind!r}: expected 'dflash' or 'dflash2', which are converted."
    elif not isinstance(layer, dict):
        yield f"transformer_layer_config is {layer!r}: expected the fields of the drafter's layers. Copy it again."
    else:
        ids = raw.get("aux_hidden_state_layer_ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i > 0 for i in ids):
            yield f"aux_hidden_state_layer_ids is {ids!r}: expected outputs of target layers, that is ids from 1 on."
        elif len(set(ids)) < len(ids):
            yield f"aux_hidden_state_layer_ids={ids} names a layer twice: readers expect each once."
        # Its own fields announce a layout of its own, which is the one that is converted.
        own = ("speculators", *["DFlash 2"] * (kind == "dflash2"))
        fields = {name: value for name, value in raw.items() if OTHER_LAYOUTS.get(name) not in own}
        yield from rule_problems("layout", {**fields, "vocab_size": layer.get("vocab_size")})
        width, hidden_size = raw.get("target_hidden_size"), layer.get("hidden_size")
        if width not in (None, hidden_size):
            yield (
                f"target_hidden_size is {width} and hidden_size {hidden_size}: they must be equal, since the "
                "published layout uses the target's embeddings and head."
            )
        yield from (
            f"{name} is the drafter's own, where the published layout has the target's. If it is an unchanged copy of "
            "the target's, save the checkpoint again without it."
            for name in _OF_THE_TARGET
            if name in names
        )


def _target_depth(raw: dict[str, Any], folder: str) -> int:
    name = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if name is None:
        raise ValueError(
            f"{folder} does not name its target (speculators_config.verifier.name_or_path), whose depth is needed. "
            "Pass num_target_layers."
        )
    try:
        return AutoConfig.from_pretrained(name).get_text_config(decoder=True).num_hidden_layers
    except OSError as error:
        raise OSError(
            f"The configuration of the target {name!r} that {folder} names cannot be read, and its depth is needed. "
            f"Pass num_target_layers. ({error})"
        ) from error


def _config_dict(raw: dict[str, Any], num_target_layers: int) -> dict[str, Any]:
    """The `config.json` of the published layout."""
    layer = raw["transformer_layer_config"]
    config = {name: layer[name] for name in _LAYER_FIELDS if name in layer}
    if config.get("layer_types") is None:
        config["layer_types"] = ["full_attention"] * layer["num_hidden_layers"]
    slides = "sliding_attention" in config["layer_types"]
    # Full-attention layers are bidirectional there too; sliding ones are causal unless this says otherwise.
    is_dflash2 = raw["speculators_model_type"] == "dflash2"
    is_causal = False if slides and raw.get("sliding_window_non_causal", is_dflash2) else None
    if is_dflash2:
        config["dflash_config"] = {name: raw.get(name) for name in GEOMETRY}
    return config | {
        "architectures": [DFLASH2 if is_dflash2 else "DFlashDraftModel"],
        "block_size": raw.get("block_size"),
        "dtype": raw.get("dtype"),
        "is_causal": is_causal,
        "mask_token_id": raw.get("mask_token_id"),
        "model_type": "qwen3",
        "num_target_layers": num_target_layers,
        "sliding_window": layer.get("sliding_window") if slides else None,
        "target_layer_ids": sorted(i - 1 for i in raw["aux_hidden_state_layer_ids"]),
        "tie_word_embeddings": False,
        "use_sliding_window": slides,
    }


def _sorted_columns(tensors: dict[str, torch.Tensor], ids: list[int], hidden_size: int) -> torch.Tensor:
    """`fc.weight` for ascending taps, which other readers demand and speculators does not."""
    weight = tensors.get("fc.weight")
    if weight is None or weight.shape != (hidden_size, len(ids) * hidden_size):
        found = None if weight is None else list(weight.shape)
        raise ValueError(
            f"fc.weight has shape {found}: {len(ids)} taps of width {hidden_size} need "
            f"{[hidden_size, len(ids) * hidden_size]}. Correct aux_hidden_state_layer_ids."
        )
    columns = weight.split(hidden_size, dim=1)
    return torch.cat([columns[i] for i in sorted(range(len(ids)), key=ids.__getitem__)], dim=1)
