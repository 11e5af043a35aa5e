# SPDX-License-Identifier: Apache-2.0
"""What target and drafter remember of the committed tokens while one prompt is decoded.

Keys and values are cropped after every round. The states of a hybrid target's recurrent layers cannot be cropped, so
they are copied before a verification. Where the verification commits fewer tokens than it read, the copy comes back
and the committed tokens are put in front of the next verification, in those layers alone: their inputs there are
known, and no other layer needs them again. Their kernels work on chunks of 64 tokens, so tokens may wait there for
some rounds, at almost no cost, until a copy with them inside is made.

Shapes: S tokens of one forward, K taps, D hidden size, b block size, V vocabulary. There is one row.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DFlashCache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ..modeling_dflash import DFlashDraftModel
from ..target.checks import decoder_layers
from ..target.head import block_inputs, head_place, logit_transform
from ..target.varied_lengths import varied_lengths


# With a block of 16 behind them, the waiting tokens fill a chunk of the recurrent layers' kernels.
MAX_WAITING = 48


class DecodingState:
    """The caches of one prompt's decoding; use as a context manager.

    A round is `draft`, `verify`, `commit`; the first call is `prefill`.

    Args:
        target: A whole causal language model, dense or hybrid, in eval mode.
        drafter: A drafter made for it, in eval mode.
    """

    def __init__(self, target: PreTrainedModel, drafter: DFlashDraftModel):
        self.target, self.drafter = target, drafter
        self.target_cache, self.drafter_cache = DynamicCache(config=target.config), DFlashCache(config=drafter.config)
        self.drafter_cache.activate_past_recording()
        self.recurrent = _RecurrentLayers(target, self.target_cache)
        self._transform = logit_transform(target.config.get_text_config(decoder=True))
        # Taps of committed tokens that the drafter has not read.
        self.context = self._verified = torch.empty(0)

    def __enter__(self) -> "DecodingState":
        with ExitStack() as stack:
            stack.enter_context(self.recurrent.hooks())
            stack.enter_context(varied_lengths())
            self._contexts = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._contexts.close()

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read the prompt `[1, S]`; returns the logits `[1, V]` of the token after it."""
        self.context, logits = target_forward(
            self.target, self.drafter, input_ids, num_logits=1, cache=self.target_cache, use_cache=True
        )
        self._crop_target(0)
        return logits[0]

    def draft(self, anchor: torch.Tensor) -> torch.Tensor:
        """Logits `[b - 1, V]` of the slots after the anchor `[1, 1]`, the last known token."""
        logits = draft_forward(self.target, self.drafter, anchor, self.context, cache=self.drafter_cache)
        # The block's own keys and values are of masked tokens.
        self.drafter_cache.crop(-self.drafter.config.block_size)
        self.context = self.context[:, :0]
        return self._transform(logits)

    def verify(self, anchor: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Logits `[b, V]` of the tokens after the anchor `[1, 1]` and after each draft `[b - 1]`."""
        block = torch.cat([anchor, drafts[None]], dim=1)
        with self.recurrent.recording():
            self._verified, logits = target_forward(
                self.target, self.drafter, block, num_logits=block.shape[1], cache=self.target_cache, use_cache=True
            )
        return logits[0]

    def commit(self, new_tokens: torch.Tensor) -> None:
        """Keep the anchor and the accepted drafts of the last verification.

        Args:
            new_tokens (`torch.Tensor` of shape `[1, m]`): What was committed. Its last token is the next anchor and
                was not read by the target as what it is now.
        """
        committed = new_tokens.shape[1]
        self._crop_target(self._verified.shape[1] - committed)
        self.recurrent.keep(self._verified.shape[1], committed)
        self.context = self._verified[:, :committed]

    def _crop_target(self, num_tokens: int) -> None:
        for layer in self.target_cache.layers:
            if isinstance(layer, DynamicLayer):
                # Sliding layers expect the call after every forward, for nothing too.
                layer.crop(-num_tokens)


class UncachedDecodingState:
    """Decoding without caches: every forward reads all known tokens again. Slow, and right for any target.

    Args:
        target: A whole causal language model in eval mode.
        drafter: A drafter made for it, in eval mode.
    """

    def __init__(self, target: PreTrainedModel, drafter: DFlashDraftModel):
        self.target, self.drafter = target, drafter
        self.known = torch.empty(1, 0, dtype=torch.long)
        self._transform = logit_transform(target.config.get_text_config(decoder=True))
        self.context = torch.empty(0)

    def __enter__(self) -> "UncachedDecodingState":
        return self

    def __exit__(self, *error) -> None:
        pass

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As [`DecodingState.prefill`]."""
        self.known = input_ids
        self.context, logits = target_forward(self.target, self.drafter, input_ids, num_logits=1, use_cache=False)
        return logits[0]

    def draft(self, anchor: torch.Tensor) -> torch.Tensor:
        """As [`DecodingState.draft`]."""
        self.known = torch.cat([self.known, anchor], dim=1)
        context = self.context[:, : self.known.shape[1] - 1]
        return self._transform(draft_forward(self.target, self.drafter, anchor, context))

    def verify(self, anchor: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """As [`DecodingState.verify`]."""
        tokens = torch.cat([self.known, drafts[None]], dim=1)
        self.context, logits = target_forward(
            self.target, self.drafter, tokens, num_logits=len(drafts) + 1, use_cache=False
        )
        return logits[0]

    def commit(self, new_tokens: torch.Tensor) -> None:
        """As [`DecodingState.commit`]."""
        # The last one is the next anchor, which the next draft adds.
        self.known = torch.cat([self.known, new_tokens[:, :-1]], dim=1)


class _RecurrentLayers:
    """The recurrent layers of a hybrid target; none for a dense one.

    Raises:
        ValueError: When the target keeps states of a kind that cannot be rolled back here.
    """

    def __init__(self, target: PreTrainedModel, cache: DynamicCache):
        self.cache = cache
        self.mixers: dict[int, nn.Module] = {}
        layers = decoder_layers(target)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
            mixer = dict(layers[index].named_children()).get("linear_attn")
            if type(layer) is LinearAttentionLayer and mixer is not None:
                self.mixers[index] = mixer
            elif not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionLayer):
                raise ValueError(
                    f"Layer {index} of {type(target).__name__} keeps its state in a {type(layer).__name__}, which "
                    "cannot be rolled back to the committed tokens. Decode with use_cache=False."
                )
        self._record, self._num_new = False, 0
        # By layer: states before the waiting tokens, the inputs of those, and all inputs of the last verification.
        self._snapshots: dict[int, list[torch.Tensor]] = {}
        self._waiting: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Hooks on the layers while they decode."""
        handles = []
        for index, mixer in self.mixers.items():
            handles.append(mixer.register_forward_pre_hook(partial(self._before, index), with_kwargs=True))
            handles.append(mixer.register_forward_hook(partial(self._after, index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A forward that may be rolled back."""
        self._record = True
        yield
        self._record = False

    def keep(self, num_read: int, num_kept: int) -> None:
        """Of the tokens that the last recorded forward read only the first are committed."""
        for index, inputs in self._inputs.items():
            if num_kept < num_read:
                self._waiting[index] = inputs[:, : inputs.shape[1] - num_read + num_kept]
            else:
                # The states are those of the committed tokens.
                self._waiting.pop(index, None)
                del self._snapshots[index]

    def _before(self, index: int, mixer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """Bring the states back to the copy and put the waiting tokens first."""
        if not self._record:
            return None
        waiting = self._waiting.get(index)
        if waiting is not None:
            for state, saved in zip(self._states(index), self._snapshots[index], strict=True):
                state.copy_(saved)
            if waiting.shape[1] > MAX_WAITING:
                # Not through the module's call, whose hook this is.
                mixer.forward(**{**kwargs, "hidden_states": waiting})
                waiting = None
        if waiting is None:
            self._snapshots[index] = [state.clone() for state in self._states(index)]
        new = kwargs["hidden_states"]
        self._inputs[index] = new if waiting is None else torch.cat([waiting, new], dim=1)
        self._num_new = new.shape[1]
        return args, {**kwargs, "hidden_states": self._inputs[index]}

    def _after(self, index: int, mixer: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        """Of the output only the new tokens' is wanted."""
        return output[:, -self._num_new :] if self._record else output

    def _states(self, index: int) -> list[torch.Tensor]:
        layer: Any = self.cache.layers[index]
        states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return [state for state in states if state is not None]


def target_forward(
    target: PreTrainedModel, drafter: DFlashDraftModel, input_ids: torch.Tensor, num_logits: int, **cache_arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps `[1, S, K * D]` of all tokens, for the drafter, and the logits `[1, num_logits, V]` of the last ones."""
    layer_ids = drafter.config.target_layer_ids
    assert layer_ids is not None  # its configuration refuses that
    # Entry 0 is the embeddings, so entry i + 1 is the output of layer i.
    entries = [i + 1 for i in layer_ids]
    outputs = target(input_ids=input_ids, output_hidden_states=entries, logits_to_keep=num_logits, **cache_arguments)
    taps = [outputs.hidden_states[entry].to(drafter.device, drafter.dtype) for entry in entries]
    return torch.cat(taps, dim=-1), outputs.logits


def draft_forward(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    anchor: torch.Tensor,
    context: torch.Tensor,
    cache: DFlashCache | None = None,
) -> torch.Tensor:
    """The drafter's logits for the slots after an anchor, before the target's scale or cap on logits.

    Args:
        target: The target, whose embeddings and head the drafter uses.
        drafter: The drafter.
        anchor (`torch.Tensor` of shape `[1, 1]`): The last known token.
        context (`torch.Tensor` of shape `[1, S, K * D]`): Taps of the tokens before it that the cache does not hold,
            on the drafter's device.
        cache: The drafter's keys and values of the tokens before those.

    Returns:
        `torch.Tensor` of shape `[b - 1, V]` on the head's device.
    """
    mask_token_id, block_size = drafter.config.mask_token_id, drafter.config.block_size
    assert mask_token_id is not None and block_size is not None  # its configuration refuses that
    # The rows of the table themselves: some targets scale them on their way in.
    table, head = target.get_input_embeddings().get_parameter("weight"), target.get_output_embeddings()
    noise_embeds = block_inputs(table, anchor.to(table.device), mask_token_id, block_size)
    output = drafter(noise_embeds.to(drafter.device, drafter.dtype), context, cache=cache)
    return head(output.last_hidden_state[0, 1:].to(*head_place(table, head)))


__all__ = ["DecodingState", "UncachedDecodingState"]
