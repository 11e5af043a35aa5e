# SPDX-License-Identifier: Apache-2.0
"""DFlash 2: a DFlash drafter with a short convolution around each sublayer, and a selector of pairs of candidates.

Nothing in the network is sequential: the scores of all pairs of neighbouring candidates come from one product, and
only a walk over small tables is left.

Shapes: B rows, N blocks, b slots of a block, S = b - 1 drafted slots, D hidden size, V vocabulary, G groups of
channels, k taps of a kernel, K candidates of a slot, r rank of the selector.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from .configuration_dflash2 import DFlash2DraftConfig
from .masking import Mask
from .modeling_dflash import DFlashDecoderLayer, DFlashDraftModel


class GroupedDynamicCausalConv(nn.Module):
    """Mixes each slot with those before it in its block, by channel, once on either side of a sublayer.

    A kernel is fixed for each channel (`base_kernel` `[2, k, D]`, the sides first) plus a correction for each group of
    channels, which follows from the sublayer's input.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int):
        super().__init__()
        self.kernel_size, self.num_groups = kernel_size, hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.num_groups, bias=False)

    def prepare(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sublayer's input, made of M blocks `[M, b, D]`, and the corrections `[M, b, k, G]` for `finish`."""
        corrections = self.kernel_projection(states).unflatten(-1, (2, self.kernel_size, self.num_groups))
        before, after = corrections.unbind(-3)
        return self._convolve(states, before, 0), after

    def finish(self, states: torch.Tensor, corrections: torch.Tensor) -> torch.Tensor:
        """What is added to the residual, of the sublayer's output `[M, b, D]`."""
        return self._convolve(states, corrections, 1)

    def _convolve(self, states: torch.Tensor, corrections: torch.Tensor, side: int) -> torch.Tensor:
        # In fp32, as servers add it up.
        dtype = torch.promote_types(states.dtype, torch.float32)
        grouped = states.to(dtype).unflatten(-1, (self.num_groups, -1))
        kernel = self.base_kernel[side].to(dtype).unflatten(-1, (self.num_groups, -1))
        output = torch.zeros_like(grouped)
        for tap in range(self.kernel_size):
            # Slots before the block count as zero: what is padded in front is cut off behind.
            shifted = nn.functional.pad(grouped, (0, 0, 0, 0, tap, -tap))
            output = output + (kernel[tap] + corrections[:, :, tap, :, None].to(dtype)) * shifted
        return output.flatten(-2).to(states.dtype)


class CandidateSelector(nn.Module):
    """Scores each pair of a candidate and its predecessor, given the slot's hidden state.

    The score of candidate j of a slot after token p is its logit plus `<A[p] * q, B[j]>`, with A and B the codebooks
    `[V, r]` and q the projected hidden state.
    """

    def __init__(self, config: DFlash2DraftConfig):
        super().__init__()
        self.top_k = config.selector_top_k
        # Bare parameters: servers do not know the names that an embedding's weights would have.
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def candidates(self, logits: torch.Tensor) -> torch.Tensor:
        """Ids `[.., K]` of the largest logits `[.., V]`, ascending, so that the first of equal ones is taken."""
        return logits.detach().topk(self.top_k, dim=-1).indices.sort(dim=-1).values

    def forward(
        self, states: torch.Tensor, unary: torch.Tensor, candidates: torch.Tensor, predecessors: torch.Tensor
    ) -> torch.Tensor:
        """Scores `[.., P, K]` in fp32 or better of all candidates after each of P predecessors.

        Args:
            states: Hidden states of the slots, `[.., D]`.
            unary: Logits of the candidates, as the target scales and caps its own, `[.., K]`.
            candidates: Their token ids, `[.., K]`.
            predecessors: Token ids of the slot before, `[.., P]`.
        """
        dtype = torch.promote_types(unary.dtype, torch.float32)
        query = self.hidden_projection(states.to(self.hidden_projection.weight.dtype)).to(dtype)[..., None, :]
        left = self.predecessor_codebook[predecessors].to(dtype) * query
        # A product of tensors and no matrix product, which autocast or TF32 would round.
        pairs = (left[..., :, None, :] * self.successor_codebook[candidates].to(dtype)[..., None, :, :]).sum(-1)
        return unary.to(dtype)[..., None, :] + pairs

    def choose(
        self, states: torch.Tensor, logits: torch.Tensor, predecessors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best candidates' scores and ids, `[..]` each, after tokens `[..]` that are known."""
        candidates = self.candidates(logits)
        scores = self(states, logits.gather(-1, candidates), candidates, predecessors[..., None])[..., 0, :]
        best, places = scores.max(dim=-1, keepdim=True)
        return best[..., 0], candidates.gather(-1, places)[..., 0]

    def walk(
        self,
        states: torch.Tensor,
        logits: torch.Tensor,
        anchors: torch.Tensor,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose a token for each slot, the likeliest or a drawn one, after the one chosen before it.

        Args:
            states (`torch.Tensor` of shape `[B, S, D]`): Hidden states of the drafted slots of one block.
            logits (`torch.Tensor` of shape `[B, S, V]`): Their logits, on any device.
            anchors (`torch.Tensor` of shape `[B]`): Token ids before the first slot.
            temperature: 0 takes the largest score.
            generator: Source of randomness, on the logits' device; the global one by default.

        Returns:
            Token ids `[B, S]`, and the distributions `[B, S, V]` that they were drawn from, which are zero but at the
            candidates; None at temperature 0.
        """
        candidates, scores = self._edges(states, logits, anchors)
        if temperature == 0:
            chosen, probabilities = scores.argmax(dim=-1), None
        else:
            probabilities = (scores / temperature).softmax(dim=-1)
            # One for each predecessor, of which the walk passes one.
            drawn = torch.multinomial(probabilities.flatten(0, -2), 1, generator=generator)
            chosen = drawn.view(probabilities.shape[:-1])
        # Places of the anchor, for which any predecessor of the first slot stands, and of the token of each slot.
        path = [torch.zeros_like(candidates[:, 0, :1])]
        for slot in range(chosen.shape[1]):
            path.append(chosen[:, slot].gather(1, path[-1]))
        places = torch.stack(path, dim=1)
        tokens = candidates.gather(-1, places[:, 1:])[..., 0]
        if probabilities is None:
            return tokens, None
        passed = probabilities.gather(2, places[:, :-1, :, None].expand(-1, -1, 1, self.top_k))[:, :, 0]
        return tokens, torch.zeros_like(logits, dtype=passed.dtype).scatter_(-1, candidates, passed)

    def _edges(
        self, states: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates `[B, S, K]` and their scores after each candidate of the slot before, `[B, S, K, K]`."""
        candidates, device = self.candidates(logits), self.hidden_projection.weight.device
        anchors = anchors.to(logits.device)[:, None, None].expand(-1, 1, self.top_k)
        before = torch.cat([anchors, candidates[:, :-1]], dim=1)
        read = (states, logits.gather(-1, candidates), candidates, before)
        return candidates, self(*(tensor.to(device) for tensor in read)).to(logits.device)


def selector_of(drafter: Any) -> CandidateSelector | None:
    """The selector of a drafter, which may be wrapped for training; None where it has none."""
    return getattr(getattr(drafter, "module", drafter), "candidate_selector", None)


class DFlash2DecoderLayer(DFlashDecoderLayer):
    def __init__(self, config: DFlash2DraftConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.block_size = config.block_size
        sizes = (config.hidden_size, config.conv_kernel_size, config.conv_group_size)
        self.attention_conv, self.mlp_conv = GroupedDynamicCausalConv(*sizes), GroupedDynamicCausalConv(*sizes)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Mask = None,
        cache: Cache | None = None,
        kernel_options: dict[str, int] | None = None,
    ) -> torch.Tensor:
        prepared, corrections = self.attention_conv.prepare(self._blocks(self.input_layernorm(hidden_states)))
        attended, _ = self.self_attn(
            prepared.view_as(hidden_states),
            context_hidden_states,
            position_embeddings,
            attention_mask,
            cache,
            kernel_options,
        )
        finished = self.attention_conv.finish(self._blocks(attended), corrections)
        hidden_states = hidden_states + finished.view_as(hidden_states)
        prepared, corrections = self.mlp_conv.prepare(self._blocks(self.post_attention_layernorm(hidden_states)))
        return hidden_states + self.mlp_conv.finish(self.mlp(prepared), corrections).view_as(hidden_states)

    def _blocks(self, states: torch.Tensor) -> torch.Tensor:
        """States `[M, b, D]` of single blocks, of `[B, N * b, D]`; one block may have fewer slots."""
        return states.reshape(-1, min(self.block_size, states.shape[1]), states.shape[2])


class DFlash2DraftModel(DFlashDraftModel):
    """A DFlash drafter with convolutions around its sublayers and a selector behind the target's head.

    Its hidden states go through the target's head as those of DFlash; `candidate_selector` then chooses among the
    likeliest tokens. A configuration without one of both is a part, for studies: `candidate_selector` may be None.
    """

    config: DFlash2DraftConfig
    config_class = DFlash2DraftConfig
    _no_split_modules = ["DFlashDecoderLayer", "DFlash2DecoderLayer"]  # noqa: RUF012

    def __init__(self, config: Any):
        config = DFlash2DraftConfig.from_base_config(config)
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.post_init()

    @staticmethod
    def make_layer(config: Any, layer_idx: int) -> nn.Module:
        return (DFlash2DecoderLayer if config.conv_kernel_size else DFlashDecoderLayer)(config, layer_idx)

    def _init_weights(self, module):
        """New convolutions copy, and a new selector adds nothing: the start of training is a DFlash drafter."""
        super()._init_weights(module)
        if isinstance(module, GroupedDynamicCausalConv):
            copying = torch.zeros_like(module.base_kernel)
            copying[:, 0] = 1
            init.copy_(module.base_kernel, copying)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            # With both at zero neither would get a gradient.
            init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            init.zeros_(module.successor_codebook)

    def forward(self, noise_embeds: torch.Tensor, *args, block_size: int | None = None, **kwargs):
        """As for DFlash, for blocks of `block_size` slots, by default those of the configuration.

        The embeddings are scaled where the configuration says so.
        """
        layer: Any
        for layer in self.layers:
            layer.block_size = block_size or self.config.block_size
        scale = self.config.input_embedding_scale
        return super().forward(noise_embeds if scale in (None, 1) else noise_embeds * scale, *args, **kwargs)

    @classmethod
    def from_dflash(
        cls, drafter: "DFlashDraftModel | str | Path", seed: int = 0, **fields: Any
    ) -> "DFlash2DraftModel":
        """A DFlash 2 drafter that computes, to the bit, what a DFlash drafter does.

        Args:
            drafter: A DFlash drafter, or its folder or Hub id; it is not changed.
            seed: Of the new weights that are not zero.
            **fields: Fields of [`DFlash2DraftConfig`], such as `selector_rank`; the scale and cap of the target's
                logits among them, where it has some.

        Raises:
            ValueError: When the drafter is one of DFlash 2 already, or a field makes no sense for it.
        """
        given = drafter if isinstance(drafter, DFlashDraftModel) else DFlashDraftModel.from_pretrained(drafter)
        if isinstance(given, DFlash2DraftModel):
            raise ValueError(
                f"{given.config.name_or_path or drafter} is a DFlash 2 drafter already: train it as it is."
            )
        attention = {"attn_implementation": given.config._attn_implementation}
        config = DFlash2DraftConfig.from_dict(given.config.to_dict(), **attention, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = cls(config)
        model.to(given.device, given.dtype)
        missing = model.load_state_dict(given.state_dict(), strict=False).missing_keys
        assert all("_conv." in name or name.startswith("candidate_selector.") for name in missing), missing
        # Model cards name where it comes from.
        model.name_or_path = model.config.name_or_path = given.config.name_or_path
        return model.train(given.training)


DFlash2DraftModel.register_for_auto_class("AutoModel")

__all__ = ["DFlash2DraftModel"]
