# SPDX-License-Identifier: Apache-2.0
"""Configurations laid out as published drafters have them, and folders with small tensors under them."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


FULL, SLIDING = "full_attention", "sliding_attention"

# Field by field as on the Hub.
QWEN36_27B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": None,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": [SLIDING] * 4 + [FULL],
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "pad_token_id": 248044,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "transformers_version": "5.5.3",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
}

_FULL_ATTENTION = {
    "layer_types": [FULL] * 5,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "transformers_version": "4.57.1",
    "use_sliding_window": False,
}
_QWEN3 = {
    **_FULL_ATTENTION,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "eos_token_id": 151645,
    "num_target_layers": 36,
    "pad_token_id": None,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


QWEN3_8B = {**QWEN36_27B, **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288}
# The name of the dtype before transformers 4.56.
QWEN3_4B = {**_without(QWEN3_8B, "dtype"), "torch_dtype": "bfloat16", "hidden_size": 2560, "intermediate_size": 9728}
QWEN35_4B = {
    **QWEN36_27B,
    **_FULL_ATTENTION,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_target_layers": 32,
}
LLAMA31_8B = {
    **QWEN3_8B,
    "block_size": 10,
    "bos_token_id": 128000,
    "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "num_target_layers": 32,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
SIX_LAYERS_EIGHT_TAPS = {
    **QWEN36_27B,
    "dflash_config": {"mask_token_id": 248077, "target_layer_ids": [1, 9, 18, 26, 35, 44, 52, 61]},
    "layer_types": [SLIDING] * 5 + [FULL],
    "max_window_layers": 6,
    "num_hidden_layers": 6,
    "sliding_window": 4096,
}
GPT_OSS_20B = {
    **_without(QWEN3_8B, "rope_theta", "rope_scaling"),
    "attention_bias": True,
    "block_size": 8,
    "bos_token_id": 199998,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 7680,
    "layer_types": [FULL] * 8,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_target_layers": 24,
    "pad_token_id": 199999,
    "rope_parameters": {"rope_theta": 150000, "rope_type": "default"},
    "transformers_version": "5.3.0",
    "vocab_size": 201088,
}
# As transformers 5 saves it: RoPE in one place, the block size in dflash_config.
NESTED = {
    **_without(QWEN36_27B, "block_size", "rope_theta", "rope_scaling"),
    "dflash_config": {**QWEN36_27B["dflash_config"], "block_size": 16, "name": "drafter"},
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "is_causal": False,
}

PUBLISHED = {
    "qwen3.6-27b": QWEN36_27B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-4b": QWEN3_4B,
    "qwen3.5-4b": QWEN35_4B,
    "llama-3.1-8b": LLAMA31_8B,
    "six_layers_eight_taps": SIX_LAYERS_EIGHT_TAPS,
    "gpt-oss-20b": GPT_OSS_20B,
    "nested": NESTED,
}

# No matrix is square, so that each can be told from its transpose.
SMALL_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "head_dim": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def small(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same configuration over small tensors; the vocabulary and the window cost nothing and stay."""
    return {**copy.deepcopy(config), **SMALL_SHAPE, **changes}


def small_tensors(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random tensors under the names that the format prescribes, written down here once more."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    taps = config["dflash_config"]["target_layer_ids"]
    shapes = {"fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {f"layers.{i}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        for name, shape in (("q", (queries, hidden)), ("k", (keys, hidden)), ("v", (keys, hidden))):
            shapes[f"{attention}.{name}_proj.weight"] = shape
        shapes[f"{attention}.o_proj.weight"] = (hidden, queries)
        if config["attention_bias"]:
            sizes = {"q": queries, "k": keys, "v": keys, "o": hidden}
            shapes |= {f"{attention}.{name}_proj.bias": (size,) for name, size in sizes.items()}
        shapes |= {f"{attention}.{n}_norm.weight": (head,) for n in "qk"}
        shapes |= {f"{mlp}.gate_proj.weight": (inner, hidden), f"{mlp}.up_proj.weight": (inner, hidden)}
        shapes[f"{mlp}.down_proj.weight"] = (hidden, inner)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a drafter's folder as it lies on the Hub; by default with tensors in the dtype of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is None:
        tensors = small_tensors(config, getattr(torch, config.get("dtype") or config["torch_dtype"]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def inputs_for(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One block of noise after seven rows of context."""
    generator = torch.Generator().manual_seed(1)
    hidden, taps = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    return {
        "noise_embeds": torch.randn(1, 8, hidden, generator=generator),
        "context_hidden_states": torch.randn(1, 7, taps * hidden, generator=generator),
    }
