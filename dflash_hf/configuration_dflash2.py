# SPDX-License-Identifier: Apache-2.0
"""The configuration of a DFlash 2 drafter: that of a DFlash drafter and seven fields of `dflash_config`."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .checkpoint_format import DFLASH2, DFLASH2_PART, GEOMETRY, SCALES, Checkpoint
from .configuration_dflash import DFlashDraftConfig


def logit_scale_and_cap(config: PreTrainedConfig) -> tuple[float, float | None]:
    """What a target multiplies its logits by after the head, and where it caps them, by its text configuration."""
    fields = config.to_dict()
    factors = [fields.get(name) or 1.0 for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    # Two families give one field opposite meanings.
    scaling = fields.get("logits_scaling") or 1.0
    factors.append(scaling if config.model_type.startswith("hyperclovax") else 1 / scaling)
    return math.prod(factors), fields.get("final_logit_softcapping") or None


def target_scales(target_config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that tell servers what a target does with its logits, which decides over the walk."""
    scale, cap = logit_scale_and_cap(target_config.get_text_config(decoder=True))
    return {"output_multiplier": None if scale == 1 else scale, "final_logit_softcapping": cap}


@strict
class DFlash2DraftConfig(DFlashDraftConfig):
    r"""
    Configuration of a [`DFlash2DraftModel`]: a [`DFlashDraftConfig`] plus convolution, selector and scales.

    Args:
        conv_kernel_size (`int`, *optional*, defaults to 2):
            Slots that a convolution reads, its own included; 0 leaves out the convolutions, for studies.
        conv_group_size (`int`, *optional*, defaults to 16):
            Neighbouring channels that share the dynamic part of a kernel.
        selector_rank (`int`, *optional*, defaults to 256):
            Width of the codebooks; 64 or less for a small vocabulary. 0 leaves out the selector, for studies.
        selector_top_k (`int`, *optional*, defaults to 16):
            Candidates of a slot.
        output_multiplier (`float`, *optional*):
            What the target multiplies its logits by.
        final_logit_softcapping (`float`, *optional*):
            Where the target caps its logits.
        input_embedding_scale (`float`, *optional*):
            What the rows of the target's embedding are multiplied by on their way into the drafter.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    output_multiplier: float | int | None = None
    final_logit_softcapping: float | int | None = None
    input_embedding_scale: float | int | None = None

    def __post_init__(self, **kwargs):
        nested = dict(kwargs.pop("dflash_config", None) or {})
        for name in (*GEOMETRY, *SCALES):
            if (value := nested.pop(name, None)) is not None:
                setattr(self, name, value)
        # Known before the parent checks what is held.
        kwargs["architectures"] = self.architectures = self._class_names
        super().__post_init__(dflash_config=nested, **kwargs)

    @staticmethod
    def is_its(config_dict: dict[str, Any]) -> bool:
        """Whether the content of a `config.json` is that of a DFlash 2 drafter."""
        return Checkpoint("", config=config_dict).is_dflash2

    @property
    def _class_names(self) -> list[str]:
        return [DFLASH2 if self.conv_kernel_size and self.selector_rank else DFLASH2_PART]

    @property
    def dflash_config(self) -> dict[str, Any]:
        """As for DFlash, with the fields of DFlash 2, which servers read nowhere else."""
        scales = {name: value for name in SCALES if (value := getattr(self, name)) is not None}
        return super().dflash_config | {name: getattr(self, name) for name in GEOMETRY} | scales

    @classmethod
    def from_target_config(cls, target_config: PreTrainedConfig, **fields) -> "DFlash2DraftConfig":  # type: ignore[override]
        """As for DFlash; the scale and the cap of the target's logits come too, since they change the walk."""
        return super().from_target_config(target_config, **{**target_scales(target_config), **fields})  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` of the published drafters; that of a part names an architecture that servers refuse."""
        output = {k: v for k, v in super().to_dict().items() if k not in (*GEOMETRY, *SCALES)}
        output["architectures"] = self._class_names
        return output


__all__ = ["DFlash2DraftConfig"]
