# SPDX-License-Identifier: Apache-2.0
"""Target and drafter by their configurations alone: their weights, and the memory and work that a row takes."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..configuration_dflash import DFlashDraftConfig
from ..modeling_dflash import DFlashDraftModel
from ..training.objectives import compares_distributions
from ..training_args import DFlashTrainingArguments
from .operations import Operations, count_operations, drafter_weights, passed_weights


# Logits of one chunk of the loss, in fp32 with their gradient and softmax.
CHUNK_BYTES = 3 * 4 * 2**27


class DrafterShape:
    """Work and memory of the drafter on a row.

    Args:
        config: The drafter's configuration.
        tokens: Tokens of the row.
        blocks: Blocks of the row, those that only fill it up included.
        args: The training arguments.
    """

    def __init__(self, config: DFlashDraftConfig, tokens: float, blocks: float, args: DFlashTrainingArguments):
        with torch.device("meta"):
            drafter = DFlashDraftModel(config)
        self.config, self.tokens, self.args = config, tokens, args
        # The target's final hidden states then travel too, and go through the head.
        self.compares = compares_distributions(args.objective)
        self.parameters = sum(p.numel() for p in drafter.parameters())
        self.weights = drafter_weights(drafter)
        self.slots = blocks * config.block_size
        self.head = config.vocab_size * config.hidden_size

    def operations(self, anchors: float, target_weights: int) -> Operations:
        """Operations of a row with so many anchors, all slots of whose blocks count."""
        head_slots = anchors * (self.config.block_size - 1)
        return count_operations(
            self.weights, self.head, self.tokens, self.slots, head_slots, self.compares, target_weights
        )

    def bytes(self, beside_target: bool) -> float:
        """Peak memory; the target's embedding and head are the target's own where that is on the same device."""
        # fp32 weights, gradients and AdamW's two moments; embedding and head in bf16.
        return 16.0 * self.parameters + self._activation_bytes() + (0 if beside_target else 2 * 2 * self.head)

    def _activation_bytes(self) -> float:
        """What the backward needs, the context in fp32 with its noise, the prefetched states and one loss chunk."""
        config, args = self.config, self.args
        heads = config.num_attention_heads * config.head_dim
        per_slot = 24 * config.hidden_size + 6 * config.intermediate_size + 8 * heads
        layers = 1 if args.activation_checkpointing else config.num_hidden_layers
        features = self.tokens * config.hidden_size * (len(config.target_layer_ids or []) + self.compares)
        waiting = (args.prefetch_depth + 1) * 2
        batch = args.per_device_train_batch_size
        return batch * (layers * per_slot * self.slots + (2 * 4 + waiting) * features) + CHUNK_BYTES


class TargetShape:
    """Weights and memory of the target, cut after the last tap unless the objective needs its distribution.

    Args:
        config: The target's configuration.
        taps: Layers whose outputs are read.
        args: The training arguments.
    """

    def __init__(self, config: PreTrainedConfig, taps: list[int], args: DFlashTrainingArguments):
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        decoder_layers = model.get_decoder().layers
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers]
        self.parameters = sum(p.numel() for p in model.parameters())
        compares = compares_distributions(args.objective)
        num_read = len(layers) if compares else taps[-1] + 1
        # What is held of the layers, and what a token passes; embedding and head stay on the device beside it.
        read_parameters = sum(layers[:num_read])
        self.passed_parameters = passed_weights(decoder_layers[:num_read], config)
        given = args.target_model_init_kwargs if isinstance(args.target_model_init_kwargs, dict) else {}
        name = str(given.get("dtype") or config.dtype or "float32").removeprefix("torch.")
        size = 2 if name in ("auto", "bfloat16", "float16") else 4
        quantization = given.get("quantization_config") or config.to_dict().get("quantization_config")
        weights = size * (self.parameters - sum(layers)) + read_parameters * (
            size if quantization is None else _quantised_bits(quantization) / 8
        )
        tokens = args.row_length * args.per_device_train_batch_size
        layer = 4 * config.intermediate_size + 16 * config.hidden_size
        # One batch of hidden states is copied away while the next one is made.
        self.bytes = weights + float(tokens * size * (layer + 2 * config.hidden_size * (len(taps) + compares)))


def _quantised_bits(quantization: Any) -> float:
    """Bits of a quantised weight, scales included, from the field that names them; 16 where none does."""
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if values.get("load_in_4bit"):
        return 4.5
    if values.get("load_in_8bit") or values.get("quant_method") == "fp8":
        return 8.5
    return float(values.get("bits", 15.5)) + 0.5


__all__ = ["DrafterShape", "TargetShape"]
