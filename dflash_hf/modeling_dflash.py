# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter: a Qwen3 decoder whose blocks of noise attend to the target's hidden states.

Shapes: B rows, Q noise slots, C context rows, K taps, D hidden size.
"""

import copy
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DFlashCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import CONFIG_NAME
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.hub import extract_commit_hash

from .checkpoint_files import WEIGHT_DTYPES, fetch_checkpoint, read_tensor_headers, refuse_adapter, state_dict_headers
from .checkpoint_format import checkpoint_problems, field_problems, refuse, tensor_problems
from .configuration_dflash import DFlashDraftConfig
from .masking import (
    ChunkedMask,
    Mask,
    chunked_attention_forward,
    decoding_masks,
    flex_kernel_options,
    register_sdpa_attention,
)


# Here, so that it holds where this file is loaded as remote code too.
register_sdpa_attention()

_DOWNLOAD_ARGUMENTS = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download")
# Path components that wrappers put into the names of a state dict: DDP, torch.compile, FSDP, activation checkpointing.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def _checked_config(path: str, config: Any, kwargs: dict[str, Any]) -> tuple[DFlashDraftConfig, torch.dtype]:
    """The configuration to build a drafter from and the dtype of its tensors, after the checkpoint was checked.

    `config` is one to use instead of `config.json`, a path to one, or None; its fields are taken out of `kwargs`.
    """
    folder = fetch_checkpoint(path, **{n: kwargs[n] for n in _DOWNLOAD_ARGUMENTS if kwargs.get(n) is not None})
    refuse_adapter(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise OSError(f"{path} has no config.json, so it holds no drafter.")
    headline = f"{path} is not a drafter that this package can load"
    # A configuration that was read as another class has that class's defaults where the file has none.
    if config is None or (isinstance(config, PreTrainedConfig) and not isinstance(config, DFlashDraftConfig)):
        refuse(headline, checkpoint_problems(folder))
    names = {field.name for field in fields(DFlashDraftConfig)} - {"dtype"}
    overrides = {name: kwargs.pop(name) for name in names & kwargs.keys()}
    if not isinstance(config, PreTrainedConfig):
        config = DFlashDraftConfig.from_pretrained(folder if config is None else config, **overrides)
    config = DFlashDraftConfig.from_base_config(config)
    refuse(headline, checkpoint_problems(folder, vars(config)))
    stored, _ = next(iter(read_tensor_headers(folder).values()))
    # Which commit of the Hub it is; an adapter or another run can ask for the same one again.
    config._commit_hash = None if folder == Path(path) else extract_commit_hash(str(folder / CONFIG_NAME), None)
    return config, getattr(torch, WEIGHT_DTYPES[stored])


def _unwrapped(state_dict: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Names as in a published drafter, and tensors in the dtype asked for; None keeps the one that is held."""
    named = {".".join(p for p in name.split(".") if p not in _WRAPPERS): t for name, t in state_dict.items()}
    if dtype is None:
        return named
    if not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in WEIGHT_DTYPES.values():
        raise ValueError(
            f"dtype is {dtype!r}: readers of a drafter take torch.bfloat16, torch.float16 and torch.float32. Leave it "
            "out to keep what is held."
        )
    # The copy goes to the CPU: during training the device has no room for it.
    return {name: t.detach().to("cpu", dtype) for name, t in named.items()}


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings `[B, S, head_dim]` to `[B, heads, S, head_dim]`."""
    return states * cos[:, None] + rotate_half(states) * sin[:, None]


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    def _apply(self, fn, recurse=True):
        # Casting the drafter must not round the frequencies: in bf16 the positions of a long text would collapse.
        inv_freq, original = self.inv_freq, self.original_inv_freq
        super()._apply(fn, recurse)
        if not self.inv_freq.is_meta and not inv_freq.is_meta:
            self.inv_freq = inv_freq.to(self.inv_freq.device)  # type: ignore[assignment]
            self.original_inv_freq = original.to(self.original_inv_freq.device)  # type: ignore[assignment]
        return self


class DFlashAttention(Qwen3Attention):
    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # Read by sdpa only where no mask is given, which happens on layers that see everything.
        self.is_causal = config.layer_is_causal(layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Mask = None,
        cache: Cache | None = None,
        kernel_options: dict[str, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, num_slots = hidden_states.shape[:2]
        key = torch.cat([self.k_proj(context_hidden_states), self.k_proj(hidden_states)], dim=1)
        value = torch.cat([self.v_proj(context_hidden_states), self.v_proj(hidden_states)], dim=1)
        query = self.q_norm(self.q_proj(hidden_states).view(rows, num_slots, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(key.view(*key.shape[:2], -1, self.head_dim)).transpose(1, 2)
        value = value.view(*value.shape[:2], -1, self.head_dim).transpose(1, 2)
        cos, sin = position_embeddings
        # The norms' fp32 weights give fp32 under autocast, where flex attention would then run in fp32 too.
        query = _rotate(query, cos[:, -num_slots:], sin[:, -num_slots:]).to(value.dtype)
        key = _rotate(key, cos, sin).to(value.dtype)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        attention: Callable = chunked_attention_forward
        if not isinstance(attention_mask, ChunkedMask):
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            kernel_options=kernel_options,
        )
        return self.o_proj(output.reshape(rows, num_slots, -1)), weights


class DFlashDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: DFlashDraftConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DFlashAttention(config, layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Mask = None,
        cache: Cache | None = None,
        kernel_options: dict[str, int] | None = None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(
            normed, context_hidden_states, position_embeddings, attention_mask, cache, kernel_options
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDraftModel(Qwen3PreTrainedModel):
    """A drafter that turns blocks of masked tokens into hidden states for the target's own head.

    It has neither embeddings nor a head: both are the frozen target's.
    """

    config: DFlashDraftConfig
    config_class = DFlashDraftConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012
    # What publishes a drafter; `publishing` sets it, which does not ship with a drafter.
    publisher: ClassVar[Callable[..., str] | None] = None
    # Flash attention takes no mask per query, which many anchors in one row need.
    _supports_flash_attn = False

    def __init__(self, config: PreTrainedConfig):
        # Where this file is loaded as remote code, the configuration was read as the class of its model type.
        config = DFlashDraftConfig.from_base_config(config)
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids or []) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([self.make_layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def class_of(cls, config: PreTrainedConfig) -> "type[DFlashDraftModel]":
        """The class of a configuration's drafter: that of DFlash 2 where it is imported, and the configuration its."""
        kinds = (kind for kind in cls.__subclasses__() if kind.config_class is not cls.config_class)
        return next((kind for kind in kinds if kind.config_class is type(config)), cls)

    @staticmethod
    def make_layer(config: Any, layer_idx: int) -> nn.Module:
        return DFlashDecoderLayer(config, layer_idx)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, Mask] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Draft one block after its context, or many blocks of packed documents at once.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, Q, D]`):
                The target's embeddings of `[anchor token, mask, ..., mask]`, one or more blocks.
            context_hidden_states (`torch.Tensor` of shape `[B, C, K * D]`):
                Outputs of the tapped target layers, concatenated. With a cache: only the rows it does not hold yet.
            attention_mask (`dict` or `torch.Tensor`, *optional*):
                For many blocks, the masks per layer type from [`masking.training_masks`]. For one block, None or a
                2-D mask over all keys (cached, context, block) that is 0 on padding.
            position_ids (`torch.LongTensor` of shape `[B, C + Q]`, *optional*):
                Positions of the context rows and of the slots within their document. By default the block follows
                the context, which follows the cache.
            cache (`Cache`, *optional*):
                Keys and values of earlier context; it grows by `C + Q` rows, of which the caller crops the block.
            use_cache (`bool`, *optional*):
                Make a `DFlashCache` when none is given.

        Returns:
            `BaseModelOutputWithPast` whose `last_hidden_state` `[B, Q, D]` goes through the target's head.
        """
        num_context, num_slots = context_hidden_states.shape[1], noise_embeds.shape[1]
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
        past = cache.get_seq_length() if cache is not None else 0
        if isinstance(cache, DFlashCache):
            cache.set_previous_accepted_tokens(num_context)
        if position_ids is None:
            position_ids = past + torch.arange(num_context + num_slots, device=noise_embeds.device)[None]
        if not isinstance(attention_mask, dict):
            attention_mask = decoding_masks(self.config, noise_embeds, num_context, attention_mask, cache)

        context_hidden_states = self.hidden_norm(self.fc(context_hidden_states))
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.dtype
        kernel_options = flex_kernel_options(noise_embeds.device, dtype)
        hidden_states = noise_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types or [], strict=True):
            mask = attention_mask[layer_type]
            hidden_states = layer(
                hidden_states, context_hidden_states, position_embeddings, mask, cache, kernel_options
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a published drafter, after its configuration and its tensor headers were checked.

        Args:
            pretrained_model_name_or_path: A local folder, a repository id, or None with `config` and `state_dict`.
            config: A configuration to use instead of the checkpoint's own.
            **kwargs: As for [`~transformers.PreTrainedModel.from_pretrained`]. `dtype` is that of the stored tensors
                by default, whatever `config.json` says; fields of the configuration override it.

        Raises:
            OSError: The folder or repository cannot be read.
            ValueError: With everything that is wrong with the checkpoint, one a line, before a weight is loaded.
        """
        path, dtype = pretrained_model_name_or_path, kwargs.pop("torch_dtype", None)
        dtype = kwargs.pop("dtype", None) or dtype
        with_info = kwargs.pop("output_loading_info", False)
        if path is None:
            config = DFlashDraftConfig.from_base_config(config)
            problems = tensor_problems(vars(config), state_dict_headers(kwargs["state_dict"]))
            refuse("state_dict is not that of a drafter", problems)
            stored = next(iter(kwargs["state_dict"].values())).dtype
        else:
            config, stored = _checked_config(path, config, kwargs)
            if config._commit_hash is not None:
                # The weights of the commit that was checked, whatever is pushed meanwhile.
                kwargs["revision"] = config._commit_hash
        if not isinstance(config, cls.config_class):
            raise ValueError(f"{path} is a DFlash drafter: {cls.__name__}.from_dflash makes one of DFlash 2 of it.")
        dtype = stored if dtype in (None, "auto") else dtype
        loaded: Any = super(DFlashDraftModel, cls.class_of(config)).from_pretrained(
            path, *model_args, config=config, dtype=dtype, output_loading_info=True, **kwargs
        )
        model, info = loaded
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
        left = [f"{kind}: {sorted(map(str, info[kind]))}" for kind in kinds if info[kind]]
        refuse(f"{path} was not loaded as it is: leave out key_mapping and ignore_mismatched_sizes", left)
        return (model, info) if with_info else model

    def save_pretrained(self, save_directory, dtype: torch.dtype | None = None, **kwargs) -> None:  # type: ignore[override]
        """Write the layout of the published drafters, and the code that loads it where this package is missing.

        Args:
            save_directory: Folder to write to.
            dtype (`torch.dtype`, *optional*): bf16, fp16 or fp32 for the written tensors; None keeps what is held,
                as training checkpoints need it. The drafter itself is not changed.
            **kwargs: As for [`~transformers.PreTrainedModel.save_pretrained`].

        Raises:
            ValueError: When the tensors are not exactly those of the configuration.
            OSError: When the folder cannot be written.
        """
        if self._hf_peft_config_loaded:
            super().save_pretrained(save_directory, **kwargs)
            return
        exported = self._exported(dtype, kwargs.pop("state_dict", None))
        if kwargs.get("is_main_process", True):
            # An index left by an earlier, sharded save would point readers to shards that are gone.
            (Path(save_directory) / "model.safetensors.index.json").unlink(missing_ok=True)
        try:
            PreTrainedModel.save_pretrained(exported, save_directory, **kwargs)
        except SafetensorError as error:
            raise OSError(f"The drafter cannot be written to {save_directory} ({error}): look at its disk.") from error

    def push_to_hub(  # type: ignore[override]
        self, repo_id: str, dtype: torch.dtype | None = torch.bfloat16, **kwargs
    ) -> str:
        """Publish the drafter as `OWNER/NAME`, in bf16 by default, with its card, in one commit; needs dflash_hf.

        `kwargs` are those of [`publishing.push_drafter`], such as `private`, `revision`, `token` and `options`.
        """
        if DFlashDraftModel.publisher is None:
            raise ImportError("Publishing a drafter needs dflash_hf: load it with dflash_hf.DFlashDraftModel.")
        return DFlashDraftModel.publisher(self, repo_id, dtype, **kwargs)

    def _exported(self, dtype: torch.dtype | None, state_dict: dict[str, torch.Tensor] | None) -> "DFlashDraftModel":
        """A drafter that holds the tensors to be written, so that what is saved and what is said of it agree."""
        tensors = _unwrapped(self.state_dict() if state_dict is None else state_dict, dtype)
        config = copy.deepcopy(self.config)
        problems = [*tensor_problems(vars(config), state_dict_headers(tensors)), *field_problems(vars(config))]
        refuse("The drafter cannot be saved", problems)
        # What it was read with may name files that are not written.
        config.auto_map = None
        with torch.device("meta"):
            exported = type(self)(config)
        exported.load_state_dict(tensors, assign=True)
        exported.model_tags = self.model_tags
        return exported


# save_pretrained copies this file and its neighbours, so that AutoModel loads the folder with trust_remote_code.
DFlashDraftModel.register_for_auto_class("AutoModel")

__all__ = ["DFlashDraftModel"]
