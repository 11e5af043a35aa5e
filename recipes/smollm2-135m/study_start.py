# SPDX-License-Identifier: Apache-2.0
"""Weights that the study's runs start from: random ones, or what the target's own layers have learned.

A drafter whose attention and MLP have the target's shape can take over its layers. What differs is folded in: the
drafter's context does not pass `input_layernorm`, so the weight of that norm goes into the projections behind it; its
queries and keys are normalised, so the norms get the size that the target's have.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from dflash_hf import DFlashDraftModel


MLP = ("gate_proj", "up_proj", "down_proj")
STARTS = ("random", "norm", "last", "spread")


def starting_weights(
    drafter: DFlashDraftModel, target: Any, start: str, seed: int, tap: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A state dict of a drafter's shape.

    Args:
        drafter: The drafter; it is not changed.
        target: The target, with all its layers.
        start: "random"; "norm" with the target's final norm; "last" with its last layers too and a context of the
            last tap alone; "spread" with the layers behind the taps and the mean of the taps.
        seed: Of the random weights.
        tap: Hidden states `[n, D]` of the last tap, from which the sizes of queries and keys are measured.

    Raises:
        ValueError: For an unknown start, or a target whose layers have another shape than the drafter's.
    """
    if start not in STARTS:
        raise ValueError(f"start={start!r} is unknown; choose one of {', '.join(STARTS)}.")
    torch.manual_seed(seed)
    made = DFlashDraftModel(drafter.config)
    decoder = target.get_decoder()
    with torch.no_grad():
        if start != "random":
            made.norm.weight.copy_(decoder.norm.weight)
        if start in ("last", "spread"):
            taps = made.config.target_layer_ids or []
            depth = len(decoder.layers)
            first = depth - len(made.layers)
            sources = list(range(first, depth)) if start == "last" else [index + 1 for index in taps]
            for layer, source in zip(made.layers, sources, strict=True):
                take_over(layer, decoder.layers[source], tap)
            shares = [0.0] * (len(taps) - 1) + [1.0] if start == "last" else [1 / len(taps)] * len(taps)
            identity = torch.eye(made.config.hidden_size)
            made.fc.weight.copy_(torch.cat([share * identity for share in shares], dim=1))
    return {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}


def take_over(layer: Any, source: nn.Module, tap: torch.Tensor) -> None:
    """Copy a Llama layer's weights into a drafter's layer.

    Raises:
        ValueError: When the layers differ in kind or shape.
    """
    if not isinstance(source, LlamaDecoderLayer):
        raise ValueError(f"The target's layers are {type(source).__name__}; only Llama layers are taken over.")
    states = tap.float().cpu()
    states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6)
    scale = source.input_layernorm.weight.detach().float().cpu()
    own, theirs = layer.self_attn, source.self_attn
    projections = ((own.q_proj, theirs.q_proj), (own.k_proj, theirs.k_proj), (own.v_proj, theirs.v_proj))
    pairs = [(module, other.weight.float().cpu() * scale) for module, other in projections]
    pairs += [(own.o_proj, theirs.o_proj.weight)]
    pairs += [(layer.mlp.get_submodule(name), source.mlp.get_parameter(f"{name}.weight")) for name in MLP]
    for module, weight in pairs:
        if module.weight.shape != weight.shape:
            raise ValueError(
                f"A weight of the target has the shape {tuple(weight.shape)} where the drafter's has "
                f"{tuple(module.weight.shape)}: layers are taken over between equal shapes only."
            )
        module.weight.copy_(weight)
    for norm, projection in ((own.q_norm, own.q_proj), (own.k_norm, own.k_proj)):
        norm.weight.fill_((states @ projection.weight.T).square().mean().sqrt().item())
    layer.input_layernorm.weight.fill_(1.0)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
