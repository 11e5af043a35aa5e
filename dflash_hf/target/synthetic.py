# SPDX-License-Identifier: Apache-2.0
"""A target of random weights and documents of random tokens, for measuring speed and memory without any download."""

from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from .frozen_target import FrozenTarget


def read_target_config(name: str) -> PreTrainedConfig:
    """The text model's configuration of a target.

    Args:
        name: A configuration file, a folder or a Hub id.
    """
    return AutoConfig.from_pretrained(name).get_text_config(decoder=True)


def random_target(
    config: PreTrainedConfig,
    target_layer_ids: list[int],
    device: torch.device | str,
    dtype: torch.dtype | str = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> FrozenTarget:
    """A target with the shape of a real one and random weights, made on its device: nothing passes through the host.

    Its speed and memory are those of the real one; what a drafter learns from it is worth nothing.

    Args:
        config: The text model's configuration.
        target_layer_ids: Taps.
        device: Where the target runs.
        dtype: Type of the weights, a torch type or its name.
        seed: Seed of the weights.
        **options: Further arguments of [`FrozenTarget`].
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    start = perf_counter()
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    target = FrozenTarget(model, target_layer_ids, **options)
    # Nobody else's, so that it may be cut as one that is loaded is.
    del target.layers[target_layer_ids[-1] + 1 :]
    # The target waited for its device.
    target.startup.seconds["load_target"] = perf_counter() - start
    return target


def synthetic_documents(
    count: int, length: int, vocab_size: int, mask_token_id: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Documents of random tokens whose first sixteenth is a prompt and whose rest is supervised.

    Args:
        count: Documents.
        length: Tokens of each.
        vocab_size: Token ids are drawn below it.
        mask_token_id: Never drawn.
        seed: Seed of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size - 1, (count, length), generator=generator)
    ids += ids >= mask_token_id
    return [{"input_ids": row.tolist(), "supervised_spans": [[length // 16, length]]} for row in ids]


__all__ = ["random_target", "read_target_config", "synthetic_documents"]
