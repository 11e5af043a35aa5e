# SPDX-License-Identifier: Apache-2.0
"""What a target must be: the one that its drafter was made for, with layers that can be read and are fast enough."""

from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..configuration_dflash import DFlashDraftConfig
from .kernels import LINEAR_ATTENTION_FLOOR, delta_kernels_available


def check_fits(drafter_config: DFlashDraftConfig, target_config: PreTrainedConfig, embedding_rows: int) -> None:
    """Refuse a drafter that was made for another target.

    Args:
        drafter_config: The drafter's configuration.
        target_config: The target's configuration, text-only or multimodal.
        embedding_rows: Rows of the target's embedding.

    Raises:
        ValueError: Naming the field, both values and the way out.
    """
    mask = drafter_config.mask_token_id
    if mask is not None and mask >= embedding_rows:
        raise ValueError(
            f"mask_token_id={mask} is outside the target's embedding of {embedding_rows} rows; choose an id in "
            f"0..{embedding_rows - 1} that texts do not use."
        )
    text_config = target_config.get_text_config(decoder=True)
    expected = {
        "hidden_size": text_config.hidden_size,
        "num_target_layers": text_config.num_hidden_layers,
        "vocab_size": embedding_rows,  # engines size the shared head by it
    }
    for name, value in expected.items():
        given = getattr(drafter_config, name)
        if given != value:
            raise ValueError(
                f"The drafter's {name} is {given}, the target's is {value}: a drafter works only with the target "
                "whose hidden states, embeddings and head it was made for. Load that target, or make a drafter with "
                "DFlashDraftConfig.from_target_config(target.config, ...)."
            )


def decoder_layers(model: Any) -> nn.ModuleList:
    decoder = model.get_decoder()
    layers = dict(decoder.named_children()).get("layers")
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} keeps its decoder layers in another place than `get_decoder().layers`, so they "
            "cannot be read. Targets of the Llama and Qwen families and most others are supported."
        )
    return layers


def check_taps(taps: list[int], depth: int) -> None:
    """Refuse layers that cannot be read.

    Args:
        taps: 0-based indices of the layers.
        depth: Layers that the target has.

    Raises:
        ValueError: They are not ascending, or not the target's, or the last one is among them.
    """
    if not taps or any(b <= a for a, b in pairwise(taps)) or taps[0] < 0:
        raise ValueError(f"target_layer_ids={taps} must be layer indices, unique and ascending, at least one.")
    if taps[-1] >= depth - 1:
        raise ValueError(
            f"target_layer_ids={taps} must lie in 0..{depth - 2}: the target has {depth} layers and the last one "
            "is refused, since its entry in hidden_states is after the final norm while a hook sees it before."
        )


def refuse_slow(config: PreTrainedConfig) -> None:
    """Refuse a hybrid target that would run its reference loops on a GPU.

    Args:
        config: The target's configuration.

    Raises:
        ValueError: When it has linear attention and flash-linear-attention is missing or too old.
    """
    kinds = config.get_text_config(decoder=True).to_dict().get("layer_types") or []
    if "linear_attention" in kinds and not delta_kernels_available():
        raise ValueError(
            f"{kinds.count('linear_attention')} of the target's {len(kinds)} layers are linear attention, and without "
            f"flash-linear-attention {LINEAR_ATTENTION_FLOOR} or newer they run transformers' reference loop, which "
            "is right and far too slow on a GPU. "
            f"`pip install 'flash-linear-attention>={LINEAR_ATTENTION_FLOOR}'`, or pass allow_slow_target=True."
        )


__all__ = ["check_fits", "check_taps", "decoder_layers", "refuse_slow"]
