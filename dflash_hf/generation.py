# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of one prompt, greedy or sampled, for dense and hybrid targets.

A round drafts a block after the last known token (the anchor), verifies it in one forward of the target and commits
the accepted drafts and the target's own next token. [`DecodingState`] keeps the caches, [`Greedy`] and [`Sampling`]
choose and accept tokens, [`speculative_generate`] runs the rounds.

Shapes: n tokens of the prompt, m generated ones, S tokens of a forward, b slots of a block with its anchor, K layers
of the target that the drafter reads (taps), D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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


__all__ = ["SpeculativeOutput", "speculative_decoding", "speculative_generate"]

logger = logging.get_logger(__name__)

# What `generate` itself gives to a target's forwards; each of ours makes its own.
_OWN_KWARGS = {"attention_mask", "cache", "cache_position", "logits_to_keep", "position_ids", "use_cache"}


def check_drafter(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """Refuse a drafter that was made for another target, and a target without head or without all its layers."""
    if not isinstance(drafter, nn.Module):
        raise ValueError(f"drafter is a {type(drafter).__name__}; load it with DFlashDraftModel.from_pretrained.")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{type(target).__name__} has no output head; load the target with AutoModelForCausalLM.")
    check_fits(drafter.config, target.config, _embedding_table(target).shape[0])
    depth, expected = len(decoder_layers(target)), target.config.get_text_config(decoder=True).num_hidden_layers
    if depth != expected:
        raise ValueError(f"The target has {depth} of its {expected} layers, cut for training. Decode with all of it.")


def prompt_row(target: PreTrainedModel, prompt: Any, name: str = "input_ids") -> torch.Tensor:
    """A prompt of shape `[1, n]` in int64; one that the target cannot read is refused under its `name`."""
    row = torch.as_tensor(prompt)
    if row.dim() != 2 or row.shape[0] != 1 or row.shape[1] == 0 or row.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} has the shape {list(row.shape)} and the type {row.dtype}; expected the token ids of one prompt, "
            "whole numbers of shape [1, n] with n >= 1."
        )
    smallest, largest = torch.stack([row.min(), row.max()]).tolist()
    rows = _embedding_table(target).shape[0]
    if smallest < 0 or largest >= rows:
        raise ValueError(
            f"{name} holds the ids {smallest} to {largest}, the target's embedding has {rows} rows: the prompt was "
            "made with another tokenizer. Use the target's."
        )
    return row.long()


def _embedding_table(target: PreTrainedModel) -> torch.Tensor:
    return target.get_input_embeddings().get_parameter("weight")


def _check_budget(target: PreTrainedModel, drafter: DFlashDraftModel, prompt_length: int, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1, the token of the prefill.")
    known = target.config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")
    # The last block may begin at the last token but one.
    if known is not None and prompt_length + max_new_tokens + (drafter.config.block_size or 0) - 2 > known:
        # The same words for all prompts, so that they are said once.
        logger.warning_once(
            f"A prompt, max_new_tokens and the last block may need more positions than the target knows "
            f"(max_position_embeddings={known}), where most targets write nonsense. Shorten prompts or answers."
        )


def _check_supported(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse settings and inputs of `generate` whose effect would be lost, by name."""
    known = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    lost = [type(p).__name__ for p in processors if not (generation_config.do_sample and isinstance(p, known))]
    lost += [type(c).__name__ for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    if generation_config.num_beams not in (None, 1):
        lost.append(f"num_beams={generation_config.num_beams}")
    if generation_config.return_dict_in_generate:
        lost.append("return_dict_in_generate")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and not mask.all():
        lost.append("an attention_mask with zeros")
    if positions is not None and (positions != torch.arange(positions.shape[-1]).to(positions)).any():
        lost.append("position_ids other than 0, 1, 2, ..")
    for name, value in model_kwargs.items():
        # A text's images are None or an empty dict.
        is_empty = value is None or (isinstance(value, dict) and not value)
        if name not in _OWN_KWARGS and not is_empty:
            lost.append(name)
    if lost:
        raise ValueError(
            f"generate was called with {', '.join(lost)}, whose effect would be lost. Speculative decoding takes one "
            "prompt, temperature, top_k, top_p, min_p, a budget and stop tokens; see the target's generation_config."
        )


def _check_finite(**logits: torch.Tensor) -> None:
    """Refuse logits `[.., V]` without a largest number: where both models give none, all drafts would seem right."""
    # One value is read from the device, whatever is checked.
    good = torch.stack([part.amax(dim=-1).isfinite().all() for part in logits.values()]).tolist()
    for name, is_good in zip(logits, good, strict=True):
        if not is_good:
            raise FloatingPointError(
                f"The {name}'s logits hold NaN or infinity: its weights are damaged, or its hidden states overflow in "
                "their type. Check the checkpoint, or use bfloat16 or float32."
            )


# --- What target and drafter remember of the committed tokens.


# With a block of 16 behind them, the waiting tokens fill a chunk of the recurrent layers' kernels.
MAX_WAITING = 48


class DecodingState:
    """The caches of one prompt's decoding; a context manager.

    The first call is `prefill`, and a round is `draft`, `verify`, `commit`.
    Both models are in eval mode. Without `use_cache` every forward reads all known tokens, which also works for a
    target whose caches cannot be rolled back.
    """

    def __init__(self, target: PreTrainedModel, drafter: DFlashDraftModel, use_cache: bool = True):
        self.target, self.drafter, self.use_cache = target, drafter, use_cache
        self.target_cache, self.drafter_cache = DynamicCache(config=target.config), DFlashCache(config=drafter.config)
        self.drafter_cache.activate_past_recording()
        self.recurrent = _recurrent_layers(target, self.target_cache) if use_cache else []
        self._caching = {"cache": self.target_cache if use_cache else None, "use_cache": use_cache}
        self._transform = logit_transform(target.config.get_text_config(decoder=True))
        # Taps of committed tokens that the drafter has not read, and all tokens and taps of the last verification.
        self.context = self._read = self._verified = torch.empty(0)
        # Committed tokens that the target reads in every forward; none where it caches them.
        self._prefix = torch.empty(1, 0, dtype=torch.long)
        self._contexts = ExitStack()

    def __enter__(self) -> "DecodingState":
        for layer in self.recurrent:
            self._contexts.enter_context(layer.mixer.register_forward_pre_hook(layer.before, with_kwargs=True))
            self._contexts.enter_context(layer.mixer.register_forward_hook(layer.after))
        self._contexts.enter_context(varied_lengths())
        return self

    def __exit__(self, *error) -> None:
        self._contexts.close()

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read the prompt `[1, S]`; returns the logits `[1, V]` of the token after it."""
        self.context, logits = target_forward(self.target, self.drafter, input_ids, num_logits=1, **self._caching)
        self._prefix = input_ids[:, :0] if self.use_cache else input_ids
        self._crop_target(0)
        return logits[0]

    def draft(self, anchor: torch.Tensor) -> torch.Tensor:
        """Logits `[b - 1, V]` of the slots after the anchor `[1, 1]`, the last known token."""
        cache = self.drafter_cache if self.use_cache else None
        logits = draft_forward(self.target, self.drafter, anchor, self.context, cache)
        if cache is not None:
            # The block's own keys and values are of masked tokens.
            cache.crop(-self.drafter.config.block_size)
            self.context = self.context[:, :0]
        return self._transform(logits)

    def verify(self, anchor: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Logits `[b, V]` of the tokens after the anchor `[1, 1]` and after each draft `[b - 1]`."""
        self._read = torch.cat([self._prefix, anchor, drafts[None]], dim=1)
        for layer in self.recurrent:
            layer.may_roll_back = True
        self._verified, logits = target_forward(
            self.target, self.drafter, self._read, num_logits=1 + len(drafts), **self._caching
        )
        return logits[0]

    def commit(self, new_tokens: torch.Tensor) -> None:
        """Keep the anchor and the accepted drafts of the last verification, of which `new_tokens` `[1, m]` follow.

        The last of them is the next anchor, which the target has not read as what it is now.
        """
        num_kept = self._prefix.shape[1] + new_tokens.shape[1]
        num_dropped = self._read.shape[1] - num_kept
        self._crop_target(num_dropped)
        for layer in self.recurrent:
            layer.drop(num_dropped)
        self.context = self._verified[:, :num_kept]
        if not self.use_cache:
            self._prefix = self._read[:, :num_kept]

    def _crop_target(self, num_tokens: int) -> None:
        for layer in self.target_cache.layers if self.use_cache else []:
            if isinstance(layer, DynamicLayer):
                # Sliding layers expect the call after every forward, for nothing too.
                layer.crop(-num_tokens)


class _RecurrentLayer:
    """Rolls back a recurrent layer of a hybrid target, whose state holds no single tokens.

    A copy of the state is kept, and the inputs of the tokens committed since then wait: the next verification starts
    from the copy and reads them once more, in this layer alone, in front of its block.
    """

    def __init__(self, mixer: nn.Module, cache: Any):
        self.mixer, self.cache = mixer, cache
        self.snapshot: list[torch.Tensor] = []
        self.waiting: torch.Tensor | None = None
        # All inputs of the last verification, and how many of them are the block's.
        self.inputs, self.num_new = torch.empty(0), 0
        # Set for the next forward alone.
        self.may_roll_back = False

    def before(self, mixer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """Bring the state back to the copy and put the waiting inputs first."""
        if not self.may_roll_back:
            return None
        if self.waiting is not None:
            for state, saved in zip(self._states(), self.snapshot, strict=True):
                state.copy_(saved)
            if self.waiting.shape[1] > MAX_WAITING:
                # Not through the module's call, whose hook this is.
                mixer.forward(**{**kwargs, "hidden_states": self.waiting})
                self.waiting = None
        if self.waiting is None:
            self.snapshot = [state.clone() for state in self._states()]
        new = kwargs["hidden_states"]
        self.inputs = new if self.waiting is None else torch.cat([self.waiting, new], dim=1)
        self.num_new = new.shape[1]
        return args, {**kwargs, "hidden_states": self.inputs}

    def after(self, mixer: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        """Of the output only the new tokens' is wanted."""
        output = output[:, -self.num_new :] if self.may_roll_back else output
        self.may_roll_back = False
        return output

    def drop(self, num_tokens: int) -> None:
        """The last tokens that were read are not committed."""
        # Where all are, the state is that of the committed tokens.
        self.waiting = self.inputs[:, :-num_tokens] if num_tokens else None

    def _states(self) -> list[torch.Tensor]:
        states = [*self.cache.conv_states.values(), *self.cache.recurrent_states.values()]
        return [state for state in states if state is not None]


def _recurrent_layers(target: PreTrainedModel, cache: DynamicCache) -> list[_RecurrentLayer]:
    """The recurrent layers of a hybrid target, none of a dense one; sliding layers are made ready to be cropped."""
    recurrent = []
    for index, (module, layer) in enumerate(zip(decoder_layers(target), cache.layers, strict=False)):
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
        mixer = dict(module.named_children()).get("linear_attn")
        if type(layer) is LinearAttentionLayer and mixer is not None:
            recurrent.append(_RecurrentLayer(mixer, layer))
        elif not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionLayer):
            raise ValueError(
                f"Layer {index} of {type(target).__name__} keeps its state in a {type(layer).__name__}, which cannot "
                "be rolled back to the committed tokens. Decode with use_cache=False."
            )
    return recurrent


def target_forward(
    target: PreTrainedModel, drafter: DFlashDraftModel, input_ids: torch.Tensor, num_logits: int, **cache_arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps `[1, S, K * D]` of all tokens, for the drafter, and the logits `[1, num_logits, V]` of the last ones."""
    # Entry 0 is the embeddings, so entry i + 1 is the output of layer i.
    entries = [i + 1 for i in drafter.config.target_layer_ids or []]
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
    """The drafter's logits `[b - 1, V]` for the slots after an anchor `[1, 1]`, before the target's scale or cap.

    `context` `[1, S, K * D]` holds the taps of the tokens before the anchor that the cache does not hold, on the
    drafter's device; the logits are on the head's.
    """
    # Not `losses.draft_blocks`, which writes a mask and positions for many anchors of packed rows: with a cache the
    # drafter makes both itself, for one block. Both take their inputs from `block_inputs` and run the same forward.
    config: Any = drafter.config
    # The rows of the table themselves: some targets scale them on their way in.
    table, head = _embedding_table(target), target.get_output_embeddings()
    noise_embeds = block_inputs(table, anchor.to(table.device), config.mask_token_id, config.block_size)
    output = drafter(noise_embeds.to(drafter.device, drafter.dtype), context, cache=cache)
    return head(output.last_hidden_state[0, 1:].to(*head_place(table, head)))


# --- How tokens are proposed and accepted, for B rows at once.


class Greedy:
    """Most likely tokens only."""

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[B, b - 1]` for logits `[B, b - 1, V]`, and what they were drawn from (None: the most likely)."""
        return logits.argmax(dim=-1), None

    def verify(
        self, drafts: torch.Tensor, proposed_from: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept the drafts `[B, b - 1]` that are the target's own tokens, by its logits `[B, b, V]`.

        `proposed_from` `[B, b - 1, V]` is what `propose` drew them from. Returns the number of accepted drafts `[B]`,
        and the tokens `[B, b]` of which as many and one more are committed.
        """
        predicted = logits.argmax(dim=-1)
        accepted = (drafts == predicted[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        # Where drafts are right they are the target's own tokens.
        return accepted, predicted


@dataclass
class Sampling:
    """Tokens with the target's distribution after logits processors that look at one position alone.

    With `sample_drafts` drafts are drawn from the drafter's distribution; otherwise its most likely tokens are
    proposed, as servers do by default. The generator, by default the global one, is on the logits' device.
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
        """The way for settings of [`speculative_generate`], which is greedy at temperature 0."""
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

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As [`Greedy.propose`]."""
        if not self.sample_drafts:
            return logits.argmax(dim=-1), None
        probabilities = self.probabilities(logits)
        return self._draw(probabilities), probabilities

    def verify(
        self, drafts: torch.Tensor, proposed_from: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accept drafts so that what is committed has the target's distribution (Leviathan et al., 2211.17192)."""
        wanted = self.probabilities(logits)
        if proposed_from is None:
            proposed_from = torch.zeros_like(wanted[:, :-1]).scatter_(-1, drafts[..., None], 1.0)
        proposed_from = proposed_from.to(wanted)
        p = wanted[:, :-1].gather(-1, drafts[..., None])[..., 0]
        q = proposed_from.gather(-1, drafts[..., None])[..., 0]
        chances = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=self.generator)
        accepted = (chances * q < p).long().cumprod(dim=1).sum(dim=1)
        # After the last draft nothing was proposed, so the target's own distribution is left whole.
        left = (wanted - nn.functional.pad(proposed_from, (0, 0, 0, 1))).clamp(min=0)
        rows = torch.arange(len(accepted), device=accepted.device)
        left, own = left[rows, accepted], wanted[rows, accepted]
        # Where p and q are one distribution no draft is rejected, except by rounding.
        left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, own)
        tokens = nn.functional.pad(drafts, (0, 1)).scatter(1, accepted[:, None], self._draw(left)[:, None])
        return accepted, tokens

    def _draw(self, weights: torch.Tensor) -> torch.Tensor:
        """A token for each distribution `[..., V]`, which need not be normalised."""
        flat = weights.flatten(0, -2)
        # Drawing waits for the device anyway.
        if not flat.sum(dim=-1).isfinite().all():
            raise FloatingPointError(
                "There is nothing to draw from: logits hold NaN or infinity. Check the weights, use bfloat16 or "
                "float32, or temperature 0 in place of one very near to it."
            )
        return torch.multinomial(flat, 1, generator=self.generator)[:, 0].view(weights.shape[:-1])


# --- Whole answers.


@dataclass(frozen=True)
class SpeculativeOutput:
    """What was generated, and what each verification contributed.

    Args:
        sequences: The prompt and the `m` generated tokens, `[1, n + m]`, on the target's device.
        committed: Tokens committed by each verification forward (accepted drafts and the target's own next token),
            cut at the end-of-sequence token and at the budget. They add up to `m - 1`: the first is the prefill's.
        accepted: Drafts among them: one fewer, except where a cut leaves drafts alone.
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

    Raises:
        ValueError: For a drafter or prompt of another target, a setting out of range, or caches that cannot go back.
        FloatingPointError: When the target or the drafter computes logits that are not finite numbers.
    """
    check_drafter(target, drafter)
    known = prompt_row(target, input_ids).to(target.device)
    sampling = Sampling.of(temperature, top_p, top_k, sample_drafts, generator)
    stop = stop_token_ids(target, eos_token_id)
    return _decode(target, drafter, known, max_new_tokens, stop, sampling, use_cache)


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
    _check_budget(target, drafter, known.shape[1], max_new_tokens)
    limit = known.shape[1] + max_new_tokens
    committed: list[int] = []
    accepted: list[int] = []
    with evaluation_mode(target, drafter), DecodingState(target, drafter, use_cache) as state:
        logits = state.prefill(known).to(known.device)
        _check_finite(target=logits)
        # A verification without drafts.
        known = torch.cat([known, sampling.verify(known[:, :0], None, logits[None])[1]], dim=1)
        while known.shape[1] < limit and known[0, -1].item() not in stop:
            anchor = known[:, -1:]
            draft_logits = state.draft(anchor)[None].to(known.device)
            drafts, proposed_from = sampling.propose(draft_logits)
            # The block always has b slots: how much of it fits is the cut's business.
            logits = state.verify(anchor, drafts[0])[None].to(known.device)
            _check_finite(target=logits, drafter=draft_logits)
            num_accepted, tokens = sampling.verify(drafts, proposed_from, logits)
            # Those of them within the budget, up to a stop token.
            right = tokens[0, : min(int(num_accepted[0]) + 1, limit - known.shape[1])].tolist()
            num_new = next((i for i, token in enumerate(right, start=1) if token in stop), len(right))
            committed.append(num_new)
            accepted.append(min(num_new, int(num_accepted[0])))
            known = torch.cat([known, tokens[:, :num_new]], dim=1)
            state.commit(tokens[:, :num_new])
    return SpeculativeOutput(known, committed, accepted)


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

    Beside what `generate` gives it takes `drafter`, `sample_drafts` and `generator` of [`speculative_generate`].
    Returns the prompt and the generated tokens, `[1, n + m]`. Several prompts, and settings and inputs whose effect
    would be lost, are refused.
    """
    if drafter is None:
        raise ValueError("generate was called without a drafter; pass drafter= beside custom_generate=.")
    check_drafter(model, drafter)
    _check_supported(logits_processor, stopping_criteria, generation_config, model_kwargs)
    known = prompt_row(model, input_ids)
    sampling: Greedy | Sampling = Greedy()
    if generation_config.do_sample:
        sampling = Sampling(logits_processor, sample_drafts, generator)
    stop = stop_token_ids(model, generation_config.eos_token_id or [])
    return _decode(model, drafter, known, generation_config.max_length - known.shape[1], stop, sampling).sequences


def stop_token_ids(target: PreTrainedModel, eos_token_id: int | list[int] | None) -> list[int]:
    """End-of-sequence ids as a list, by default those of the target's generation config."""
    if eos_token_id is None:
        return eos_token_ids(target.generation_config)
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Models in eval mode, for prompts of any length: no dropout, and no checkpointing, which drops caches."""
    training = [model for model in models if model.training]
    for model in training:
        model.eval()
    try:
        with varied_lengths():
            yield
    finally:
        for model in training:
            model.train()
