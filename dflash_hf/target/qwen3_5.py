# SPDX-License-Identifier: Apache-2.0
"""The Qwen3.5/3.6 decoder over one packed row of documents, for hidden states only.

Shapes: N packed tokens, D hidden size, K taps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel, apply_rotary_pos_emb
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextModel

from .compiled import compiled as compiled_function
from .compiled import refuse_uncompiled
from .kernels import causal_convolution, delta_rule, document_attention
from .packing import PackedRow


class PackedQwen35:
    """Runs the layers of a Qwen3.5/3.6 text model with the borders of documents in every mixer.

    transformers' own forward keeps packed documents apart only with the causal-conv1d extension, which has to be
    built for each torch; this one runs the same modules, changes nothing about them, and lets a compiler fuse all
    that lies between the matrix products and the two mixing kernels.

    Args:
        decoder: The text model.
        target_layer_ids: Taps, ascending.
        compiled: Whether to compile the layers; the first forwards then take up to a minute.
        delta_rule: Gated delta rule to use, [`~kernels.delta_rule`] or its reference.
        final_states: Whether to run all layers and give what the final norm gives behind the taps.
    """

    def __init__(
        self,
        decoder: nn.Module,
        target_layer_ids: Sequence[int],
        compiled: bool = False,
        delta_rule: Callable[..., torch.Tensor] = delta_rule,
        *,
        final_states: bool = False,
    ):
        self.decoder: Any = decoder
        self.target_layer_ids = list(target_layer_ids)
        self.delta_rule = delta_rule
        self.final_states = final_states
        made: Callable[..., Any] = compiled_function if compiled else lambda function: function
        self.delta_inputs, self.delta_outputs = made(_delta_inputs), made(_delta_outputs)
        self.attention_inputs, self.attention_outputs = made(_attention_inputs), made(_attention_outputs)
        # Experts choose their tokens by data, which no single graph holds.
        dense = isinstance(decoder, Qwen3_5TextModel)
        self.feed_forward = made(_feed_forward) if dense else _feed_forward

    @staticmethod
    def fits(decoder: nn.Module) -> bool:
        """Whether a decoder has these layers."""
        return isinstance(decoder, Qwen3_5TextModel | Qwen3_5MoeTextModel)

    def hidden_states(self, input_ids: torch.Tensor, row: PackedRow) -> list[torch.Tensor]:
        """Outputs of the tapped layers.

        Args:
            input_ids (`torch.Tensor` of shape `[1, N]`): Token ids.
            row: The documents.

        Returns:
            K tensors of shape `[1, N, D]`, K + 1 with `final_states`.
        """
        hidden_states = self.decoder.embed_tokens(input_ids)
        cos, sin = self.decoder.rotary_emb(hidden_states, row.position_ids)
        taps = []
        depth = len(self.decoder.layers) if self.final_states else self.target_layer_ids[-1] + 1
        for index, layer in enumerate(self.decoder.layers[:depth]):
            if layer.block_type == "linear_attention":
                *mixed, z = self.delta_inputs(layer, hidden_states, row.position_ids)
                hidden_states = self.delta_outputs(layer, hidden_states, self.delta_rule(*mixed, row), z)
            else:
                query, key, value, gate = self.attention_inputs(layer, hidden_states, cos, sin)
                attended = document_attention(query, key, value, row.lengths, layer.self_attn.scaling)
                hidden_states = self.attention_outputs(layer, hidden_states, attended, gate)
            hidden_states = self.feed_forward(layer, hidden_states)
            if index in self.target_layer_ids:
                taps.append(hidden_states)
        return [*taps, self.decoder.norm(hidden_states)] if self.final_states else taps


def _delta_inputs(layer: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, decay and strength of the delta rule, and the gate of its output."""
    refuse_uncompiled()
    mixer = layer.linear_attn
    x = layer.input_layernorm(hidden_states)
    # Channels are independent, so queries, keys and values are convolved apart, each into a tensor of its own.
    sizes = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    biases = [None] * 3 if mixer.conv1d.bias is None else mixer.conv1d.bias.split(sizes)
    parts = zip(mixer.in_proj_qkv(x).split(sizes, dim=-1), mixer.conv1d.weight.split(sizes), biases, strict=True)
    query, key, value = (
        ACT2FN[mixer.activation](causal_convolution(part, weight, bias, position_ids)) for part, weight, bias in parts
    )
    query, key = (tensor.unflatten(-1, (-1, mixer.head_k_dim)) for tensor in (query, key))
    value = value.unflatten(-1, (-1, mixer.head_v_dim))
    beta = mixer.in_proj_b(x).sigmoid()
    g = -mixer.A_log.float().exp() * nn.functional.softplus(mixer.in_proj_a(x).float() + mixer.dt_bias)
    return query, key, value, g, beta, mixer.in_proj_z(x)


def _delta_outputs(layer: Any, hidden_states: torch.Tensor, mixed: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    refuse_uncompiled()
    mixer = layer.linear_attn
    gated = mixer.norm(mixed.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim))
    return hidden_states + mixer.out_proj(gated.view(*hidden_states.shape[:-1], -1))


def _attention_inputs(
    layer: Any, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values `[1, N, heads, d]`, and the gate of the output."""
    refuse_uncompiled()
    attention = layer.self_attn
    x = layer.input_layernorm(hidden_states)
    query, gate = attention.q_proj(x).unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, dim=-1)
    key = attention.k_proj(x).unflatten(-1, (-1, attention.head_dim))
    value = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))
    query, key = apply_rotary_pos_emb(attention.q_norm(query), attention.k_norm(key), cos, sin, unsqueeze_dim=2)
    return query, key, value, gate


def _attention_outputs(
    layer: Any, hidden_states: torch.Tensor, mixed: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    refuse_uncompiled()
    return hidden_states + layer.self_attn.o_proj((mixed * gate.sigmoid()).flatten(-2))


def _feed_forward(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    refuse_uncompiled()
    output = layer.mlp(layer.post_attention_layernorm(hidden_states))
    return hidden_states + (output[0] if isinstance(output, tuple) else output)
