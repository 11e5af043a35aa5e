# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of one prompt, greedy or sampled, for dense and hybrid targets.

Shapes: n tokens of the prompt, m generated ones, b block size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import (
    DFlashCache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from .frozen_target import (
    block_inputs,
    check_fits,
    decoder_layers,
    eos_token_ids,
    head_place,
    logit_transform,
    varied_lengths,
)
from .modeling_dflash import DFlashDraftModel


# --- What speculative decoding refuses: drafters of other targets, prompts that are none, logits that are no numbers.


logger = logging.get_logger(__name__)

# What `generate` itself gives to a target's forwards; each of ours makes its own.
_OWN_KWARGS = {"attention_mask", "cache", "cache_position", "logits_to_keep", "position_ids", "use_cache"}


def check_drafter(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """Refuse a drafter that was made for another target, and a target without head or without all its layers.

    Raises:
        ValueError: Naming the field, both values and the way out.
    """
    if not isinstance(drafter, nn.Module):
        raise ValueError(
            f"drafter is a {type(drafter).__name__}; expected a DFlashDraftModel: load one with "
            "DFlashDraftModel.from_pretrained(FOLDER_OR_ID)."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"{type(target).__name__} has no output head (get_output_embeddings() is None), so it writes no tokens. "
            "Load the target with AutoModelForCausalLM."
        )
    check_fits(drafter.config, target.config, target.get_input_embeddings().get_parameter("weight").shape[0])
    text_config = target.config.get_text_config(decoder=True)
    depth = len(decoder_layers(target))
    if depth != text_config.num_hidden_layers:
        raise ValueError(
            f"The target has {depth} of its {text_config.num_hidden_layers} layers, as a target that was cut for "
            "training: it gives hidden states but no tokens. Decode with the whole model."
        )


def check_request(
    target: PreTrainedModel, drafter: DFlashDraftModel, input_ids: torch.Tensor, max_new_tokens: int
) -> None:
    """Refuse anything but one row of at least one of the target's tokens and a budget of at least one.

    Raises:
        ValueError: Saying what was given.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
        given = f"of the type {input_ids.dtype}" if isinstance(input_ids, torch.Tensor) else f"a {type(input_ids)}"
        raise ValueError(f"input_ids is {given}; expected a tensor of token ids (torch.int64) of shape [1, n].")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has the shape {list(input_ids.shape)}; expected [1, n] with n >= 1: prompts are decoded one "
            "by one, from at least one token. Call once per prompt, and put a BOS token where there is no text."
        )
    smallest, largest = torch.stack([input_ids.min(), input_ids.max()]).tolist()
    rows = target.get_input_embeddings().get_parameter("weight").shape[0]
    if smallest < 0 or largest >= rows:
        raise ValueError(
            f"input_ids holds the ids {smallest} to {largest}, the target's embedding has {rows} rows: the prompt was "
            "made with another tokenizer. Use the target's."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1, the token of the prefill.")
    known = target.config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")
    # The last block may begin at the last token but one.
    if known is not None and input_ids.shape[1] + max_new_tokens + (drafter.config.block_size or 0) - 2 > known:
        # The same words for all prompts, so that they are said once.
        logger.warning_once(
            f"A prompt, max_new_tokens and the last block may need more positions than the target knows "
            f"(max_position_embeddings={known}): behind them the answers of most targets are worth little, and some "
            "targets fail. Shorten prompts or answers."
        )


def check_supported(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse settings and inputs of `generate` whose effect would be lost.

    Raises:
        ValueError: Naming them.
    """
    known = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    others = [type(p).__name__ for p in processors if not (generation_config.do_sample and isinstance(p, known))]
    others += [type(c).__name__ for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    others += [f"num_beams={n}" for n in [generation_config.num_beams] if n not in (None, 1)]
    if generation_config.return_dict_in_generate:
        others.append("return_dict_in_generate")
    if others:
        raise ValueError(
            f"The settings of this call ask for {', '.join(others)}; speculative decoding knows temperature, top_k, "
            "top_p and min_p (with do_sample=True), a budget and end-of-sequence tokens, and returns token ids. Leave "
            "the others out, also in the target's generation_config."
        )
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("The attention_mask has zeros: prompts are decoded one by one, so give them without padding.")
    # A text's images are None or an empty dict.
    given = {name for name, value in model_kwargs.items() if value is not None and not _is_empty_dict(value)}
    inputs = sorted(given - _OWN_KWARGS)
    positions = model_kwargs.get("position_ids")
    if positions is not None and bool((positions != torch.arange(positions.shape[-1]).to(positions)).any()):
        inputs.append("position_ids other than 0, 1, 2, ..")
    if inputs:
        raise ValueError(
            f"generate was called with {', '.join(inputs)}, whose effect would be lost: speculative decoding reads "
            "token ids alone, from the first position on. Leave them out, or generate without the drafter."
        )


def _is_empty_dict(value: Any) -> bool:
    return isinstance(value, dict) and not value


def check_finite(**logits: torch.Tensor) -> None:
    """Refuse logits `[.., V]` without a largest number: where both models give none, all drafts would seem right.

    Raises:
        FloatingPointError: Naming the model.
    """
    # One value is read from the device, whatever is checked.
    good = torch.stack([part.amax(dim=-1).isfinite().all() for part in logits.values()]).tolist()
    for name, is_good in zip(logits, good, strict=True):
        if not is_good:
            raise FloatingPointError(
                f"The {name}'s logits hold NaN or infinity, so there is no most likely token and nothing to compare. "
                "Its weights are damaged, or its hidden states overflow in their type (float16 ends at 65504): check "
                "the checkpoint, or use bfloat16 or float32."
            )


# --- What target and drafter remember of the committed tokens while one prompt is decoded.


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


# --- How drafts are proposed and verified, greedily or so that the target's own distribution is kept.


@dataclass
class Greedy:
    """Most likely tokens only."""

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """A token `[B]` for each row of logits `[B, V]`."""
        return logits.argmax(dim=-1)

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[B, b - 1]` for logits `[B, b - 1, V]`, and what they were drawn from (nothing)."""
        return logits.argmax(dim=-1), None

    def verify(
        self, drafts: torch.Tensor, proposed_from: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept the drafts that are the target's own tokens.

        Args:
            drafts (`torch.Tensor` of shape `[B, b - 1]`): Proposed tokens.
            proposed_from: Not used.
            logits (`torch.Tensor` of shape `[B, b, V]`): The target's, for the same slots and one more.

        Returns:
            The number of accepted drafts `[B]`, and the tokens `[B, b]` of which as many and one more are committed.
        """
        predicted = logits.argmax(dim=-1)
        accepted = (drafts == predicted[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        # Where drafts are right they are the target's own tokens.
        return accepted, predicted


@dataclass
class Sampling:
    """Tokens with the target's distribution after logits processors that look at one position alone.

    Args:
        processors: Temperature, top-k and top-p as transformers applies them.
        sample_drafts: Draw drafts from the drafter's distribution, else propose its most likely tokens (as servers do
            unless told otherwise).
        generator: Source of randomness on the logits' device; the global one by default.
    """

    processors: LogitsProcessorList
    sample_drafts: bool = False
    generator: torch.Generator | None = None

    @staticmethod
    def of(
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        sample_drafts: bool = False,
        generator: torch.Generator | None = None,
    ) -> "Greedy | Sampling":
        """The way for some settings: greedy at temperature 0.

        Args:
            temperature: Divides the logits; 0 is greedy.
            top_p: Probability that the most likely tokens kept hold together; 1 keeps all.
            top_k: Number of most likely tokens kept; 0 keeps all.
            sample_drafts: As in [`Sampling`].
            generator: As in [`Sampling`].

        Raises:
            ValueError: For a value outside its range.
        """
        if not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError(
                f"temperature={temperature}, top_p={top_p}, top_k={top_k}: expected temperature >= 0 (0: greedy), "
                "0 < top_p <= 1 (1: all tokens) and top_k >= 0 (0: all tokens)."
            )
        if temperature == 0:
            return Greedy()
        processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
        if top_k > 0:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            processors.append(TopPLogitsWarper(top_p))
        return Sampling(processors, sample_drafts, generator)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Distributions `[..., V]` after the processors, in fp32 or better."""
        rows = logits.flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        # None of the processors reads the ids before a position.
        ids: Any = torch.empty(rows.shape[0], 0, dtype=torch.long, device=rows.device)
        return self.processors(ids, rows).softmax(dim=-1).view(logits.shape)

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """A token `[B]` for each row of logits `[B, V]`."""
        return self._draw(self.probabilities(logits))

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[B, b - 1]` for logits `[B, b - 1, V]`, and what they were drawn from (None: the most likely)."""
        if not self.sample_drafts:
            return logits.argmax(dim=-1), None
        probabilities = self.probabilities(logits)
        return self._draw(probabilities), probabilities

    def verify(
        self, drafts: torch.Tensor, proposed_from: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept drafts so that what is committed has the target's distribution.

        Args:
            drafts (`torch.Tensor` of shape `[B, b - 1]`): Proposed tokens.
            proposed_from (`torch.Tensor` of shape `[B, b - 1, V]`): What each was drawn from; None where they are the
                drafter's most likely tokens.
            logits (`torch.Tensor` of shape `[B, b, V]`): The target's, for the same slots and one more.

        Returns:
            The number of accepted drafts `[B]`, and the tokens `[B, b]` of which as many and one more are committed.
        """
        wanted = self.probabilities(logits)
        if proposed_from is None:
            proposed_from = torch.zeros_like(wanted[:, :-1]).scatter_(-1, drafts[..., None], 1.0)
        proposed_from = proposed_from.to(wanted)
        p = wanted[:, :-1].gather(-1, drafts[..., None])[..., 0]
        q = proposed_from.gather(-1, drafts[..., None])[..., 0]
        chances = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=self.generator)
        accepted = (chances * q < p).long().cumprod(dim=1).sum(dim=1)
        # After the last draft nothing was proposed, so the target's own distribution is left whole.
        left = (wanted - torch.nn.functional.pad(proposed_from, (0, 0, 0, 1))).clamp(min=0)
        left = left.gather(1, accepted[:, None, None].expand(-1, 1, left.shape[-1]))[:, 0]
        own = wanted.gather(1, accepted[:, None, None].expand(-1, 1, wanted.shape[-1]))[:, 0]
        # Where p and q are one distribution no draft is rejected, except by rounding.
        left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, own)
        tokens = torch.nn.functional.pad(drafts, (0, 1)).scatter(1, accepted[:, None], self._draw(left)[:, None])
        return accepted, tokens

    def _draw(self, weights: torch.Tensor) -> torch.Tensor:
        """A token for each distribution `[..., V]`, which need not be normalised."""
        flat = weights.flatten(0, -2)
        # Drawing waits for the device anyway.
        if not flat.sum(dim=-1).isfinite().all():
            raise FloatingPointError(
                "There is nothing to draw from: logits hold NaN or infinity. The weights of target or drafter are "
                "damaged, their hidden states overflow in their type (use bfloat16 or float32), or the temperature "
                "is so near to 0 that dividing by it overflows (use 0)."
            )
        return torch.multinomial(flat, 1, generator=self.generator)[:, 0].view(weights.shape[:-1])


@dataclass(frozen=True)
class SpeculativeOutput:
    """What was generated, and what each verification contributed.

    Args:
        sequences (`torch.LongTensor` of shape `[1, n + m]`): The prompt and the `m` generated tokens, on the target's
            device.
        committed (`list[int]`): Tokens committed by each verification forward (accepted drafts and the target's own
            next token), cut at the end-of-sequence token and at the budget. They add up to `m - 1`: the first token
            is the prefill's.
        accepted (`list[int]`): Drafts among them: one fewer, except where a cut leaves drafts alone.
    """

    sequences: torch.Tensor
    committed: list[int]
    accepted: list[int]


def speculative_generate(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    sample_drafts: bool = False,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> SpeculativeOutput:
    """Generate the target's own continuation, several tokens per forward of the target.

    At temperature 0 the tokens are those of the target's greedy decoding; above it they have the distribution of the
    target's sampling.

    Args:
        target (`PreTrainedModel`): A whole causal language model, dense or hybrid.
        drafter (`DFlashDraftModel`): A drafter made for it, on any device and of any floating type.
        input_ids (`torch.Tensor` of shape `[1, n]`): One prompt of at least one token.
        max_new_tokens: Budget of generated tokens, at least 1; fewer where an end-of-sequence token comes first.
        eos_token_id: One or several ids after which generation stops; None takes those of
            `target.generation_config`, an empty list stops at none.
        temperature: Divides the logits; 0 is greedy.
        top_p: Probability that the most likely tokens kept hold together; 1 keeps all.
        top_k: Number of most likely tokens kept; 0 keeps all.
        sample_drafts: Draw the drafts from the drafter's distribution instead of proposing its most likely tokens.
        generator: Source of the sampling's randomness on the target's device; the global one by default.
        use_cache: False reads all known tokens again in every forward, for targets whose caches cannot be rolled back.

    Returns:
        [`SpeculativeOutput`].

    Raises:
        ValueError: When the prompt is not one row of the target's tokens, the budget is empty, a sampling setting is
            out of range, the drafter is another target's, or the target's caches cannot be rolled back.
        FloatingPointError: When the target or the drafter computes logits that are no numbers.
    """
    check_drafter(target, drafter)
    check_request(target, drafter, input_ids, max_new_tokens)
    sampling = Sampling.of(temperature, top_p, top_k, sample_drafts, generator)
    stop = stop_token_ids(target, eos_token_id)
    return _decode(target, drafter, input_ids.to(target.device), max_new_tokens, stop, sampling, use_cache)


@torch.no_grad()
def _decode(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    known: torch.Tensor,
    max_new_tokens: int,
    stop: list[int],
    sampling: Greedy | Sampling,
    use_cache: bool = True,
) -> SpeculativeOutput:
    limit = known.shape[1] + max_new_tokens
    committed: list[int] = []
    accepted: list[int] = []
    state_class = DecodingState if use_cache else UncachedDecodingState
    with evaluation_mode(target, drafter), state_class(target, drafter) as state:
        logits = state.prefill(known).to(known.device)
        check_finite(target=logits)
        known = torch.cat([known, sampling.first(logits)[None]], dim=1)
        while known.shape[1] < limit and known[0, -1].item() not in stop:
            anchor = known[:, -1:]
            draft_logits = state.draft(anchor)[None].to(known.device)
            drafts, proposed_from = sampling.propose(draft_logits)
            # The block always has b slots: how much of it fits is the cut's business.
            logits = state.verify(anchor, drafts[0])[None].to(known.device)
            check_finite(target=logits, drafter=draft_logits)
            num_accepted, tokens = sampling.verify(drafts, proposed_from, logits)
            new = _cut(tokens[0].tolist(), int(num_accepted[0]), limit - known.shape[1], stop)
            committed.append(len(new))
            accepted.append(min(len(new), int(num_accepted[0])))
            known = torch.cat([known, tokens[:, : len(new)]], dim=1)
            state.commit(tokens[:, : len(new)])
    return SpeculativeOutput(known, committed, accepted)


def _cut(tokens: list[int], num_accepted: int, budget: int, stop: list[int]) -> list[int]:
    """The accepted drafts and the target's own token after them, cut at the budget and after a stop token."""
    tokens = tokens[: min(num_accepted + 1, budget)]
    end = next((i for i, token in enumerate(tokens, start=1) if token in stop), len(tokens))
    return tokens[:end]


def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DFlashDraftModel | None = None,
    sample_drafts: bool = False,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Speculative decoding inside `generate`, which reads sampling, budget and stop tokens as it always does.

    transformers hands no `streamer` to a callable, so that one is given the prompt alone.

        target.generate(**inputs, custom_generate=speculative_decoding, drafter=drafter, max_new_tokens=64)

    Args:
        model: The target; `generate` gives it and the next four.
        input_ids (`torch.Tensor` of shape `[1, n]`): The prompt.
        logits_processor: What `generate` made of temperature, top-k, top-p and min-p.
        stopping_criteria: Budget and end-of-sequence tokens.
        generation_config: The settings of the call.
        drafter: A drafter made for the target.
        sample_drafts: As in [`speculative_generate`].
        generator: As in [`speculative_generate`].
        **model_kwargs: What `generate` would give to the target's forwards; a prompt needs none of it.

    Returns:
        The prompt and the generated tokens, `[1, n + m]`.

    Raises:
        ValueError: Without a drafter, for several or padded prompts, and for settings and inputs (as images) whose
            effect would be lost.
        FloatingPointError: As [`speculative_generate`].
    """
    if drafter is None:
        raise ValueError("generate was called without a drafter; pass drafter= beside custom_generate=.")
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    check_drafter(model, drafter)
    check_supported(logits_processor, stopping_criteria, generation_config, model_kwargs)
    check_request(model, drafter, input_ids, max_new_tokens)
    sampling: Greedy | Sampling = Greedy()
    if generation_config.do_sample:
        sampling = Sampling(logits_processor, sample_drafts, generator)
    stop = stop_token_ids(model, generation_config.eos_token_id or [])
    return _decode(model, drafter, input_ids, max_new_tokens, stop, sampling).sequences


def stop_token_ids(target: PreTrainedModel, eos_token_id: int | list[int] | None) -> list[int]:
    """End-of-sequence ids as a list, by default those of the target's generation config."""
    if eos_token_id is None:
        return eos_token_ids(target.generation_config)
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Models in eval mode, for prompts of any length: no dropout, and no checkpointing, which drops caches."""
    training = [model for model in models if model.training]
    try:
        for model in training:
            model.eval()
        with varied_lengths():
            yield
    finally:
        for model in training:
            model.train()


__all__ = ["SpeculativeOutput", "speculative_decoding", "speculative_generate"]
