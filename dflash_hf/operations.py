# SPDX-License-Identifier: Apache-2.0
"""The floating-point operations of a step, and how many a device does in a second.

Plan, benchmark and the trainer's `total_flos` count here alone, so that their figures can be compared.
"""

import statistics
from collections.abc import Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)


class DrafterWeights(NamedTuple):
    """Weights of a drafter's matrices, by what passes them; made once by [`drafter_weights`]."""

    layers: int
    keys_and_values: int
    fc: int


def drafter_weights(drafter: nn.Module) -> DrafterWeights:
    """Those of a drafter, also with an adapter, not wrapped; on the meta device too."""
    matrices = [(n.split("."), p.numel()) for n, p in drafter.named_parameters() if p.ndim > 1]
    return DrafterWeights(
        layers=sum(size for parts, size in matrices if "layers" in parts),
        keys_and_values=sum(size for parts, size in matrices if "k_proj" in parts or "v_proj" in parts),
        fc=sum(size for parts, size in matrices if "fc" in parts),
    )


def passed_weights(layers: Iterable[nn.Module], config: PreTrainedConfig) -> int:
    """Weights of a target's layers that a token passes; of a mixture's routed experts the share that it is sent to.

    transformers keeps one matrix of all experts, the expert its first dimension.
    """
    chosen = config.to_dict().get("num_experts_per_tok")
    total = 0
    for layer in layers:
        for name, weight in layer.named_parameters():
            is_routed = "experts" in name.split(".") and weight.ndim > 1
            total += weight.numel() * chosen // weight.shape[0] if is_routed and chosen else weight.numel()
            if is_routed and not chosen:
                logger.warning_once(f"{config.model_type} names no num_experts_per_tok: all experts are counted.")
    return total


class Operations(NamedTuple):
    """Operations of a step by where they are done; [`count_operations`] says what is counted."""

    target: float
    layers: float
    context: float
    head: float

    @property
    def drafter(self) -> float:
        """What the drafter's device does."""
        return self.layers + self.context + self.head


def count_operations(
    drafter: DrafterWeights, head_weights: int, num_tokens: float, num_slots: float, num_head_slots: float,
    compares: bool = False, target_weights: int = 0,
) -> Operations:  # fmt: skip
    """Useful operations of the matrix products of a step, as if every weight of the drafter were trained.

    - `target`: 2 for each weight of the layers that run ([`passed_weights`]) and each token. It is a forward alone.
    - `layers`: 6 for each weight of the drafter's layers and each slot: the product, and the gradients of its input
      and of its weights.
    - `context`: 6 for each weight of the layers' keys and values and each token, from which they come too, and 4 for
      each weight of `fc`, whose input is the frozen target's and needs no gradient.
    - `head`: 4 for each weight of the frozen head, which needs no gradient, and each slot that goes through it:
      neither slot 0, the known anchor, nor one that counts nothing. 6 where the target's states go through it too.

    Attention scores, norms, the embedding, what activation checkpointing computes again and what only fills up a chunk
    of the loss are not counted. `num_slots` include slot 0 of each block. `compares` says whether the objective
    compares with the target's distribution.
    """
    return Operations(
        target=2.0 * target_weights * num_tokens,
        layers=6.0 * drafter.layers * num_slots,
        context=(6.0 * drafter.keys_and_values + 4.0 * drafter.fc) * num_tokens,
        head=(6.0 if compares else 4.0) * head_weights * num_head_slots,
    )


def batch_operations(
    drafter: DrafterWeights, head_weights: int, batch: dict[str, Any], compares: bool = False, target_weights: int = 0
) -> Operations:
    """[`count_operations`] of a batch of [`DataCollatorForDFlash`]."""
    labels = batch["labels"]
    # Batches of other collators have no counts on the host, and their labels may be on a device.
    counted = batch["counted_slots"].sum() if "counted_slots" in batch else labels[..., 1:].numel()
    tokens, slots = batch["input_ids"].numel(), labels.numel()
    return count_operations(drafter, head_weights, tokens, slots, int(counted), compares, target_weights)


def product_rate(device: torch.device) -> float:
    """Operations per second of a square matrix product: bf16 of 8192 on CUDA, fp32 of 512 elsewhere."""
    is_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_cuda else (512, torch.float32)
    # Random, since a product of zeros draws less power and runs faster.
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out, seconds = torch.empty_like(a), []
    for _ in range(7):
        start = perf_counter()
        for _ in range(10):
            torch.mm(a, b, out=out)
        if is_cuda:
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    # The first two rounds warm up.
    return 10 * 2 * size**3 / statistics.median(seconds[2:])
