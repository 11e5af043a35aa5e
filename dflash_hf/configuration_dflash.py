# SPDX-License-Identifier: Apache-2.0
"""The configuration of a DFlash drafter, in the vocabulary of the published checkpoints."""

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging

from .checkpoint_files import refuse_adapter
from .checkpoint_format import OWN_FIELDS, field_problems, normalize_config, refuse, rule_problems


logger = logging.get_logger(__name__)


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Spread `num_taps` taps over the target's layers as the paper does, from layer 1 to the third from the end.

    Args:
        num_target_layers: Number of decoder layers of the target.
        num_taps: Number of layers to read.

    Returns:
        Layer indices, 0-based and ascending; tap `i` is the output of decoder layer `i`.

    Raises:
        ValueError: The target has no room for so many distinct taps.

    Example:
        >>> default_target_layer_ids(30, 5)
        [1, 8, 14, 20, 27]
    """
    largest = max(num_target_layers - 3, 1 if num_target_layers > 2 else 0)
    if not 1 <= num_taps <= largest:
        raise ValueError(
            f"A target of {num_target_layers} layers has room for 1 to {largest} taps, not for num_taps={num_taps}. "
            "Pass fewer, or target_layer_ids (never the last layer)."
        )
    if num_taps == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)]


@strict
class DFlashDraftConfig(Qwen3Config):
    r"""
    Configuration of a [`DFlashDraftModel`]: a Qwen3 configuration plus what ties a drafter to its target.

    On disk `model_type` stays "qwen3" (or the type it was read with) and the drafter's own fields lie in
    `dflash_config`, since that is what inference engines parse. Everything is written in full and in both spellings
    that exist, since readers differ in their defaults and in the spelling they know.

    Args:
        block_size (`int`, *optional*, defaults to 16):
            Slots drafted in one pass, the known anchor token included.
        target_layer_ids (`list[int]`):
            Taps: 0-based target layers whose outputs the drafter reads, ascending, never the last layer.
        mask_token_id (`int`):
            Token id whose embedding stands for a slot to be drafted.
        num_target_layers (`int`):
            Number of decoder layers of the target.
        is_causal (`bool`, *optional*):
            Whether a slot sees only earlier slots of its block, for all layers. Unset: causal exactly on
            `sliding_attention` layers.
    """

    block_size: int = 16
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    num_target_layers: int | None = None
    is_causal: bool | None = None

    def __new__(cls, *args, **kwargs):
        # Only here is it known whether block_size was given or is the default.
        refuse("The configuration contradicts itself", rule_problems("same_spelling", kwargs))
        return super().__new__(cls)

    def __post_init__(self, **kwargs):
        nested = dict(kwargs.pop("dflash_config", None) or {})
        for name in OWN_FIELDS:
            if (value := nested.pop(name, None)) is not None:
                setattr(self, name, value)
        self._dflash_config_rest = nested
        self._disk_model_type = kwargs.pop("model_type", None) or self.model_type
        # Qwen3Config clears the window where use_sliding_window is off; the message below shows what was given.
        window = self.sliding_window
        super().__post_init__(**kwargs)
        problems = field_problems({**vars(self), "sliding_window": window})
        refuse("The drafter's configuration does not hold", problems)

    @property
    def dflash_config(self) -> dict[str, Any]:
        """The nested part of `config.json` that inference engines read."""
        return {
            **self._dflash_config_rest,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids or []),
        }

    @staticmethod
    def is_its(config_dict: dict[str, Any]) -> bool:
        """Whether the content of a `config.json` asks for this class in place of its parent."""
        return False

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether slots of a block see only earlier slots of the block in this layer."""
        if self.is_causal is not None:
            return self.is_causal
        assert self.layer_types is not None  # Qwen3Config fills it in
        return self.layer_types[layer_idx] == "sliding_attention"

    @classmethod
    def from_target_config(
        cls, target_config: PreTrainedConfig, *, num_taps: int | None = None, **overrides
    ) -> "DFlashDraftConfig":
        """Configure a drafter for a target: its hidden size, vocabulary and depth, a shape of the drafter's own.

        Nothing of the target's attention is taken over (head size, head counts, partial or multimodal rotary
        embedding, RoPE scaling): only the base of its RoPE, as the published drafters have it.

        Args:
            target_config: Configuration of the target, text-only or multimodal.
            num_taps: Number of target layers to read; one per drafter layer by default.
            **overrides: Any field of the configuration; `mask_token_id` is required.

        Returns:
            The drafter's configuration.

        Raises:
            ValueError: When an override contradicts the target or the format.
        """
        if num_taps is not None and "target_layer_ids" in overrides:
            raise ValueError(
                f"num_taps={num_taps} and target_layer_ids={overrides['target_layer_ids']} were both given: keep one."
            )
        target = target_config.get_text_config(decoder=True)
        hidden_size = target.hidden_size
        if overrides.get("hidden_size", hidden_size) != hidden_size:
            raise ValueError(
                f"The drafter's hidden_size is {overrides['hidden_size']} and the target's {hidden_size}, whose "
                "embeddings and head the drafter uses. Leave hidden_size out."
            )
        num_layers = overrides.get("num_hidden_layers", 5)
        if "target_layer_ids" not in overrides:
            taps = default_target_layer_ids(target.num_hidden_layers, num_layers if num_taps is None else num_taps)
            overrides["target_layer_ids"] = taps
        values = {
            "hidden_size": hidden_size,
            "vocab_size": target.vocab_size,
            "num_hidden_layers": num_layers,
            "max_position_embeddings": target.max_position_embeddings,
            "num_target_layers": target.num_hidden_layers,
            "tie_word_embeddings": False,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
            "pad_token_id": target.pad_token_id,
            **_attention_shape(hidden_size),
            **_from_target_or_default(target.to_dict(), hidden_size, overrides),
        }
        return cls(**{**values, **overrides})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):  # type: ignore[override]
        """Read the `config.json` of a published drafter; a `ValueError` lists everything that is wrong with it.

        As [`~transformers.PreTrainedConfig.from_pretrained`], but without a warning for a foreign `model_type`: the
        file is a drafter's all the same.
        """
        refuse_adapter(pretrained_model_name_or_path)
        config_dict, kwargs = cls.get_config_dict(str(pretrained_model_name_or_path), **kwargs)
        if not config_dict:
            raise OSError(f"{pretrained_model_name_or_path} has no config.json, so it holds no drafter.")
        return cls.from_dict(config_dict, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Read the content of a `config.json` in either spelling, saved by transformers 4.57 or 5.

        Args:
            config_dict: The content; it is not changed.
            **kwargs: Fields to override, and `return_unused_kwargs` to get back those that are none.

        Raises:
            ValueError: With everything that is wrong with it, one a line.
        """
        # That of DFlash 2, where it is imported and the file is its.
        for kind in cls.__subclasses__():
            if kind.is_its(config_dict):
                return kind.from_dict(config_dict, **kwargs)
        names = {field.name for field in fields(cls)} - {"dtype"}
        values = {**normalize_config(config_dict), **{k: v for k, v in kwargs.items() if k in names}}
        try:
            return super().from_dict(values, **{k: v for k, v in kwargs.items() if k not in names})
        except StrictDataclassError as error:
            raise ValueError(f"config.json has a field of the wrong type: {error}") from error

    @classmethod
    def from_base_config(cls, config: PreTrainedConfig) -> "DFlashDraftConfig":
        """Take over a drafter's configuration that was read as the class its `model_type` names.

        `AutoConfig` reads it as a `Qwen3Config`, for example, where this package is not imported. One that is not a
        drafter's is a `ValueError`.
        """
        if isinstance(config, cls):
            return config
        others = {field.name for field in fields(type(config))} - {field.name for field in fields(cls)}
        values = {name: value for name, value in config.to_dict().items() if name not in others}
        draft_config = cls.from_dict(values, attn_implementation=config._attn_implementation)
        draft_config.name_or_path = config.name_or_path
        return draft_config

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` of the published drafters, with both spellings of block size and RoPE."""
        output = super().to_dict()
        generic = PreTrainedConfig().to_dict()
        own = {field.name for field in fields(Qwen3Config)} - {field.name for field in fields(PreTrainedConfig)}
        kept = own | {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "transformers_version"}
        output = {k: v for k, v in output.items() if k in kept or k not in generic or v != generic[k]}
        for name in ("target_layer_ids", "mask_token_id", "is_causal", "_dflash_config_rest", "_disk_model_type"):
            output.pop(name, None)
        by_layer = {layer_type == "sliding_attention" for layer_type in self.layer_types or []}
        if self.is_causal is not None and by_layer != {self.is_causal}:
            output["is_causal"] = self.is_causal
        rope = dict(self.rope_parameters or {})
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        plain = scaling == {"rope_type": "default"} and self._disk_model_type == "qwen3"
        # Readers before transformers 5 fill in 10,000 without a rope_theta of the top level.
        output |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
        # Null would give a foreign model type its own scaling.
        output["rope_scaling"] = None if plain else scaling
        output["architectures"] = ["DFlashDraftModel"]
        output["dflash_config"] = self.dflash_config
        output["model_type"] = self._disk_model_type
        # A Trainer switches the cache off while it trains; a drafter that is served has one.
        output["use_cache"] = True
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """All fields: readers of a drafter differ in their defaults, so nothing is left to them."""
        output = self.to_dict()
        output.pop("_name_or_path", None)
        return output


def _attention_shape(hidden_size: int) -> dict[str, int]:
    """32 heads and 8 KV heads of 128 as in the published drafters; smaller ones below a hidden size of 2,048."""
    if hidden_size >= 2048:
        return {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
    head_dim = 64 if hidden_size >= 64 else hidden_size
    num_heads = hidden_size // head_dim
    kv_heads = next(n for n in range(max(num_heads // 3, 1), 0, -1) if num_heads % n == 0)
    return {"head_dim": head_dim, "num_attention_heads": num_heads, "num_key_value_heads": kv_heads}


def _from_target_or_default(target: dict[str, Any], hidden_size: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """MLP size, norm epsilon and RoPE base of the target; not every architecture has them."""
    rope = target.get("rope_parameters") or {}
    # Some targets have one RoPE per layer type; that of the full-attention layers is the long one.
    rope = rope.get("full_attention", rope)
    found = {
        "intermediate_size": (target.get("intermediate_size"), 3 * hidden_size),
        "rms_norm_eps": (target.get("rms_norm_eps"), 1e-6),
        "rope_parameters": (rope.get("rope_theta"), 10_000.0),
    }
    values = {}
    for name, (value, default) in found.items():
        if not isinstance(value, int | float):
            value = default
            if name not in overrides:
                logger.warning(f"The target has no {name} of a kind to take over, so the drafter's is {default}.")
        values[name] = value
    theta = float(values.pop("rope_parameters"))
    return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


__all__ = ["DFlashDraftConfig", "default_target_layer_ids"]
