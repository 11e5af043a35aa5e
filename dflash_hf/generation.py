# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding, greedy or sampled, of one or several prompts at once, for dense and hybrid targets.

A round drafts a block after the last known token of each prompt (the anchor), verifies it in one forward of the target
and commits the accepted drafts and the target's own next token. [`DecodingState`] keeps the caches, [`Sampling`]
chooses and accepts tokens, [`_decode`] runs the rounds.

Shapes: B prompts (rows) of n tokens, m generated ones, S tokens of a forward, k drafts of a block of b = k + 1 slots,
K layers of the target that the drafter reads (taps), D hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import (
    DFlashCache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.generation import (
    BaseStreamer,
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
from .modeling_dflash2 import selector_of


__all__ = ["SpeculativeOutput", "speculative_decoding", "speculative_generate", "speculative_generate_batch"]

logger = logging.get_logger(__name__)

# What `generate` itself gives to a target's forwards; each of ours makes its own.
_OWN_KWARGS = {"attention_mask", "cache", "cache_position", "logits_to_keep", "position_ids", "use_cache"}


def check_drafter(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """Refuse a drafter that was made for another target, and a target without head or without all its layers."""
    if target.get_output_embeddings() is None:
        raise ValueError(f"{type(target).__name__} has no output head; load the target with AutoModelForCausalLM.")
    check_fits(drafter.config, target.config, _embedding_table(target).shape[0])
    depth, expected = len(decoder_layers(target)), target.config.get_text_config(decoder=True).num_hidden_layers
    if depth != expected:
        raise ValueError(f"The target has {depth} of its {expected} layers, cut for training. Decode with all of it.")


def draft_count(drafter: DFlashDraftModel, num_draft_tokens: int | None) -> int:
    """The drafts k of a block: those asked for, or all that the drafter was trained for."""
    most = (drafter.config.block_size or 0) - 1
    if num_draft_tokens is not None and not 1 <= num_draft_tokens <= most:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}; this drafter drafts 1 to {most} tokens.")
    return most if num_draft_tokens is None else num_draft_tokens


def prompt_row(target: PreTrainedModel, prompt: Any, name: str = "input_ids") -> torch.Tensor:
    """A prompt of shape `[1, n]` in int64; one that the target cannot read is refused under its `name`."""
    row = torch.as_tensor(prompt)
    if row.dim() != 2 or row.shape[0] != 1 or row.shape[1] == 0 or row.dtype not in (torch.int32, torch.int64):
        given = f"the shape {list(row.shape)} and the type {row.dtype}"
        raise ValueError(f"{name} has {given}; expected token ids of one prompt, whole numbers [1, n] with n >= 1.")
    smallest, largest = torch.stack([row.min(), row.max()]).tolist()
    rows = _embedding_table(target).shape[0]
    if smallest < 0 or largest >= rows:
        given = f"the ids {smallest} to {largest}, the target's embedding has {rows} rows"
        raise ValueError(f"{name} holds {given}. Use the target's own tokenizer.")
    return row.long()


def _embedding_table(target: PreTrainedModel) -> torch.Tensor:
    return target.get_input_embeddings().get_parameter("weight")


def _check_budget(target: PreTrainedModel, longest_prompt: int, max_new_tokens: int, num_drafts: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1, the token of the prefill.")
    known = target.config.get_text_config(decoder=True).to_dict().get("max_position_embeddings")
    # The last block may begin at the last token but one.
    if known is not None and longest_prompt + max_new_tokens + num_drafts - 1 > known:
        # The same words for all prompts, so that they are said once.
        logger.warning_once(
            f"A prompt, max_new_tokens and the last block may exceed the target's max_position_embeddings={known}, "
            "where most targets write nonsense. Shorten prompts or answers."
        )


def _check_finite(**logits: torch.Tensor) -> None:
    """Refuse logits `[.., V]` without a largest number: where both models give none, all drafts would seem right."""
    # One value is read from the device, whatever is checked.
    good = torch.stack([part.amax(dim=-1).isfinite().all() for part in logits.values()]).tolist()
    for name, is_good in zip(logits, good, strict=True):
        if not is_good:
            raise FloatingPointError(
                f"The {name}'s logits hold NaN or infinity: weights are damaged, or hidden states overflow. Check the "
                "checkpoint, or use bfloat16 or float32."
            )


# --- What target and drafter remember of the committed tokens.


# With a block of 16 behind them, the waiting tokens fill a chunk of the recurrent layers' kernels.
MAX_WAITING = 48


class DecodingState:
    """The caches of B prompts that are decoded together; a context manager.

    The first call is `prefill`, and a round is `draft`, `verify`, `commit`. Rows of different lengths end in the same
    column: a shorter one has padding before its first token, which a mask hides. Both models are in eval mode. Without
    `use_cache` every forward reads all known tokens, which also works for a target whose caches cannot be rolled back.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DFlashDraftModel,
        use_cache: bool = True,
        num_draft_tokens: int | None = None,
    ):
        self.target, self.drafter, self.use_cache = target, drafter, use_cache
        self.block_size = 1 + draft_count(drafter, num_draft_tokens)
        self.target_cache, self.drafter_cache = DynamicCache(config=target.config), DFlashCache(config=drafter.config)
        self.drafter_cache.activate_past_recording()
        self.recurrent = _recurrent_layers(target, self.target_cache) if use_cache else []
        self._caching = {"cache": self.target_cache if use_cache else None, "use_cache": use_cache}
        self._transform = logit_transform(target.config.get_text_config(decoder=True))
        # Committed tokens that the target has read, of each row, and of the longest row together with its padding.
        self.lengths: list[int] = []
        self.width = 0
        # The taps that the next draft reads, and all tokens and taps of the last verification.
        self.context = self._read = self._verified = torch.empty(0)
        # What a selector reads beside the logits of the last draft, `[B * k, D]`.
        self._drafted = torch.empty(0)
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

    def prefill(self, input_ids: torch.Tensor, lengths: list[int] | None = None) -> torch.Tensor:
        """Read prompts `[B, S]`, padded on the left to unequal `lengths`; logits `[B, V]` of the tokens after them."""
        self.width = input_ids.shape[1]
        self.lengths = lengths or [self.width] * len(input_ids)
        self.context, logits = self._read_by_target(input_ids, 0)
        self._prefix = input_ids[:, :0] if self.use_cache else input_ids
        _roll_back(self.target_cache, [0])
        return logits[:, 0]

    def draft(self, anchors: torch.Tensor) -> torch.Tensor:
        """Logits `[B * k, V]` of the slots after the anchors `[B, 1]`, the last known tokens."""
        rows = self._padded_rows(self.block_size, self.context.shape[1] + self.block_size, self.drafter.device)
        cache = self.drafter_cache if self.use_cache else None
        logits, self._drafted = draft_forward(
            self.target, self.drafter, anchors, self.context, self.block_size, cache, **rows
        )
        return self._transform(logits)

    def propose(self, anchors: torch.Tensor, sampling: "Sampling") -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Drafts `[B, k]` after the anchors `[B, 1]`, what they were drawn from (see `Sampling`), and the logits."""
        logits = self.draft(anchors).unflatten(0, (len(anchors), -1)).to(anchors.device)
        if (selector := selector_of(self.drafter)) is None:
            return *sampling.propose(logits), logits
        states = self._drafted.view(*logits.shape[:2], -1)
        # As servers do it: top-p and top-k act on the target alone.
        how = (sampling.draft_temperature, sampling.generator)
        return *selector.walk(states, logits, anchors[:, 0], *how), logits

    def verify(self, anchors: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Logits `[B * b, V]` of the tokens after the anchors `[B, 1]` and after each draft `[B, k]`."""
        block = torch.cat([anchors, drafts.view(len(anchors), -1)], dim=1)
        self._read = torch.cat([self._prefix, block], dim=1)
        for layer in self.recurrent:
            layer.may_roll_back = True
        self._verified, logits = self._read_by_target(self._read, block.shape[1])
        return logits.flatten(0, 1)

    def _read_by_target(self, input_ids: torch.Tensor, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._padded_rows(num_new, input_ids.shape[1], input_ids.device)
        return target_forward(self.target, self.drafter, input_ids, max(1, num_new), **self._caching, **rows)

    def commit(self, new_tokens: torch.Tensor) -> None:
        """Keep the anchors and the accepted drafts of the last verification, of which `new_tokens` `[B, m]` follow.

        The last token of each row is its next anchor, which the target has not read as what it is now; -1 is behind
        the tokens of rows that commit fewer.
        """
        counts = [new_tokens.shape[1]] if len(new_tokens) == 1 else (new_tokens >= 0).sum(dim=1).tolist()
        dropped = [self._read.shape[1] - self._prefix.shape[1] - count for count in counts]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.width += max(counts)
        if not self.use_cache:
            self._prefix, self.context = _without_last(self._read, dropped), _without_last(self._verified, dropped)
            return
        _roll_back(self.target_cache, dropped)
        for layer in self.recurrent:
            layer.drop(dropped)
        # All rows give the drafter equally many taps, so that no padding comes between cached and new ones: those that
        # committed fewer tokens give again what they gave before, as far as windows of cached keys reach back.
        num_context = counts[0] if len(counts) == 1 else min(self.block_size, self.context.shape[1] + min(counts))
        # The block's own keys and values are of masked tokens.
        _roll_back(self.drafter_cache, [self.block_size + num_context - count for count in counts])
        taps = _without_last(torch.cat([self.context, self._verified], dim=1), dropped)
        self.context = taps[:, -num_context:]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone, after a `commit` or the `prefill`."""
        index: Any = torch.tensor(rows)
        for cache in (self.target_cache, self.drafter_cache) if self.use_cache else ():
            cache.reorder_cache(index)
        for layer in self.recurrent:
            layer.keep(rows)
        self.context, self._prefix = self.context[rows], self._prefix[rows]
        self.lengths = [self.lengths[row] for row in rows]

    def _padded_rows(self, num_new: int, num_read: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Where rows have padding: a mask of the known and `num_new` tokens, and positions of the last `num_read`."""
        if min(self.lengths) == self.width:
            return {}
        padding = self.width - torch.tensor(self.lengths, device=device)[:, None]
        columns = torch.arange(self.width + num_new, device=device) - padding
        return {"attention_mask": (columns >= 0).long(), "position_ids": columns.clamp(min=0)[:, -num_read:]}


def _shifted(tensor: torch.Tensor, dropped: Sequence[int], dim: int) -> torch.Tensor:
    """Rows moved along `dim` to the right, so that all end alike if the last `min(dropped)` entries are cut off.

    `dropped` are the entries that each row loses at its end; what comes to stand in front of it is left to a mask.
    """
    least = min(dropped)
    if max(dropped) == least:
        return tensor
    moved = torch.tensor(dropped, device=tensor.device)[:, None] - least
    index = (torch.arange(tensor.shape[dim], device=tensor.device) - moved).clamp(min=0)
    shape = [len(dropped) if d == 0 else tensor.shape[d] if d == dim else 1 for d in range(tensor.dim())]
    return torch.take_along_dim(tensor, index.view(shape), dim)


def _without_last(rows: torch.Tensor, dropped: Sequence[int]) -> torch.Tensor:
    """Rows `[B, S, ..]` without the last tokens that each of them loses."""
    return _shifted(rows, dropped, 1)[:, : rows.shape[1] - min(dropped)]


def _roll_back(cache: DynamicCache, dropped: Sequence[int]) -> None:
    """Take the last tokens that each row loses out of the attention layers."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = _shifted(layer.keys, dropped, 2), _shifted(layer.values, dropped, 2)
            # Sliding layers expect the call after every forward, for nothing too.
            layer.crop(-min(dropped))


class _RecurrentLayer:
    """Rolls back a recurrent layer of a hybrid target, whose state holds no single tokens.

    A copy of the state is kept, and the inputs of the tokens committed since then wait: the next verification starts
    from the copy and reads them once more, in this layer alone, in front of its block.
    """

    def __init__(self, mixer: nn.Module, cache: Any):
        self.mixer, self.cache = mixer, cache
        self.snapshot: list[torch.Tensor] = []
        # Inputs `[w, D]` of each row: those that wait, and all of the last verification, the block's behind them.
        self.waiting: list[torch.Tensor] = []
        self.read: list[torch.Tensor] = []
        self.num_new = 0
        # Set for the next forward alone.
        self.may_roll_back = False

    def before(self, mixer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        """Bring the state back to the copy and put the waiting inputs first."""
        if not self.may_roll_back:
            return None
        # The mask is of the block, in which nothing is padding.
        new, kwargs = kwargs["hidden_states"], {**kwargs, "attention_mask": None}
        if not self.snapshot:
            self.waiting = [new[0, :0]] * len(new)
        for state, saved in zip(self._states(), self.snapshot, strict=False):
            state.copy_(saved)
        full = [row for row, inputs in enumerate(self.waiting) if len(inputs) > MAX_WAITING]
        for row in full:
            self._advance(row, kwargs)
        if full or not self.snapshot:
            self.snapshot = [state.clone() for state in self._states()]
        self.read = [torch.cat(parts) for parts in zip(self.waiting, new, strict=True)]
        self.num_new = new.shape[1]
        # The padding is behind the tokens, where it changes nothing but the state that is rolled back.
        return args, {**kwargs, "hidden_states": pad_sequence(self.read, batch_first=True)}

    def _advance(self, row: int, kwargs: dict[str, Any]) -> None:
        """Let the row's waiting inputs into its state."""
        whole = self.cache.conv_states, self.cache.recurrent_states
        parts = [{i: s if s is None else s[row : row + 1] for i, s in states.items()} for states in whole]
        # The mixer writes into these views; not through the module's call, whose hook this is.
        self.cache.conv_states, self.cache.recurrent_states = parts
        self.mixer.forward(**{**kwargs, "hidden_states": self.waiting[row][None]})
        self.cache.conv_states, self.cache.recurrent_states = whole
        self.waiting[row] = self.waiting[row][:0]

    def after(self, mixer: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        """Of the output only the new tokens' is wanted."""
        if self.may_roll_back:
            ends = [len(inputs) for inputs in self.read]
            output = torch.stack([row[end - self.num_new : end] for row, end in zip(output, ends, strict=True)])
        self.may_roll_back = False
        return output

    def drop(self, dropped: Sequence[int]) -> None:
        """The last tokens that were read are not committed."""
        self.waiting = [inputs[: len(inputs) - count] for inputs, count in zip(self.read, dropped, strict=True)]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        self.snapshot = [saved[rows] for saved in self.snapshot]
        self.waiting = [self.waiting[row] for row in rows] if self.waiting else []

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
    target: PreTrainedModel, drafter: DFlashDraftModel, input_ids: torch.Tensor, num_logits: int, **arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps `[B, S, K * D]` of all tokens, for the drafter, and the logits `[B, num_logits, V]` of the last ones."""
    # Entry 0 is the embeddings, so entry i + 1 is the output of layer i.
    entries = [i + 1 for i in drafter.config.target_layer_ids or []]
    outputs = target(input_ids=input_ids, output_hidden_states=entries, logits_to_keep=num_logits, **arguments)
    taps = [outputs.hidden_states[entry].to(drafter.device, drafter.dtype) for entry in entries]
    return torch.cat(taps, dim=-1), outputs.logits


def draft_forward(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    anchors: torch.Tensor,
    context: torch.Tensor,
    block_size: int,
    cache: DFlashCache | None = None,
    **padded_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafter's logits `[B * k, V]` for the slots after the anchors `[B, 1]`, before the target's scale or cap.

    `context` `[B, S, K * D]` holds the taps of the tokens before the anchors that the cache does not hold, on the
    drafter's device; the logits are on the head's. The drafter's hidden states `[B * k, D]` come with them.
    """
    # Not `losses.draft_blocks`, which writes a mask and positions for many anchors of packed rows: with a cache the
    # drafter makes both itself, for one block. Both take their inputs from `block_inputs` and run the same forward.
    config: Any = drafter.config
    # The rows of the table themselves: some targets scale them on their way in.
    table, head = _embedding_table(target), target.get_output_embeddings()
    noise_embeds = block_inputs(table, anchors.to(table.device), config.mask_token_id, block_size)
    output = drafter(noise_embeds.to(drafter.device, drafter.dtype), context, cache=cache, **padded_rows)
    states = output.last_hidden_state[:, 1:].flatten(0, 1)
    return head(states.to(*head_place(table, head))), states


# --- How tokens are proposed and accepted, for B rows at once.


@dataclass
class Sampling:
    """Tokens with the target's distribution after logits processors that look at one position alone; None is greedy.

    With `sample_drafts` drafts are drawn from the drafter's distribution; otherwise its most likely tokens are
    proposed, as servers do by default. The generator, by default the global one, is on the logits' device.
    """

    processors: LogitsProcessorList | None = None
    sample_drafts: bool = False
    generator: torch.Generator | None = None

    @staticmethod
    def of(
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        sample_drafts: bool = False,
        generator: torch.Generator | None = None,
    ) -> "Sampling":
        """The way for settings of [`speculative_generate_batch`], which is greedy at temperature 0."""
        if not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError(
                f"temperature={temperature}, top_p={top_p}, top_k={top_k}: expected temperature >= 0 (0: greedy), "
                "0 < top_p <= 1 (1: all tokens) and top_k >= 0 (0: all tokens)."
            )
        if temperature == 0:
            return Sampling()
        processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
        processors += [TopKLogitsWarper(top_k)] if top_k > 0 else []
        processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        return Sampling(processors, sample_drafts, generator)

    @property
    def draft_temperature(self) -> float:
        """What a selector's scores are divided by to draw drafts; 0 where none are drawn."""
        warpers = (p.temperature for p in self.processors or [] if isinstance(p, TemperatureLogitsWarper))
        return next(warpers, 1.0) if self.sample_drafts else 0.0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Distributions `[..., V]` after the processors, in fp32 or better."""
        rows = logits.flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        # None of the processors reads the ids before a position.
        ids: Any = torch.empty(rows.shape[0], 0, dtype=torch.long, device=rows.device)
        rows = rows if self.processors is None else self.processors(ids, rows)
        return rows.softmax(dim=-1).view(logits.shape)

    def propose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[B, k]` for logits `[B, k, V]`, and what they were drawn from (None: the most likely)."""
        if self.processors is None or not self.sample_drafts:
            return logits.argmax(dim=-1), None
        probabilities = self.probabilities(logits)
        return self._draw(probabilities), probabilities

    def verify(
        self, drafts: torch.Tensor, proposed_from: torch.Tensor | None, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of accepted drafts `[B]`, and the tokens `[B, b]` of which as many and one more are committed.

        `drafts` `[B, k]` were drawn from `proposed_from` `[B, k, V]`; `logits` `[B, b, V]` are the target's. What is
        committed has the target's distribution (Leviathan et al., 2211.17192), or is its own greedy choice.
        """
        if self.processors is None:
            predicted = logits.argmax(dim=-1)
            # Where drafts are right they are the target's own tokens.
            return (drafts == predicted[:, :-1]).long().cumprod(dim=1).sum(dim=1), predicted
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
            said = "There is nothing to draw from: logits hold NaN or infinity"
            raise FloatingPointError(f"{said}. Check the weights, use bfloat16 or float32, or temperature 0.")
        return torch.multinomial(flat, 1, generator=self.generator)[:, 0].view(weights.shape[:-1])


# --- Whole answers.


@dataclass(frozen=True)
class SpeculativeOutput:
    """What was generated after one prompt, and what each verification contributed.

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
    **settings: Any,
) -> SpeculativeOutput:
    """Generate the target's own continuation, several tokens per forward of the target.

    `input_ids` `[1, n]` are one prompt of at least one token; all else is as for [`speculative_generate_batch`].
    """
    return speculative_generate_batch(target, drafter, [input_ids], max_new_tokens, eos_token_id, **settings)[0]


def speculative_generate_batch(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    sample_drafts: bool = False,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    num_draft_tokens: int | None = None,
) -> list[SpeculativeOutput]:
    """Generate the target's own continuations of several prompts at once; one output for each.

    At temperature 0 the tokens are those of the target's greedy decoding of each prompt alone; above it they have the
    distribution of the target's sampling, and one generator draws for all.

    Args:
        target (`PreTrainedModel`): A whole causal language model, dense or hybrid.
        drafter (`DFlashDraftModel`): A drafter made for it, on any device and of any floating type.
        prompts (sequence of `torch.Tensor` of shape `[1, n]`): Of any lengths, at least one token each.
        max_new_tokens: Budget of generated tokens per prompt, at least 1; fewer where an end-of-sequence token comes.
        eos_token_id: One or several ids after which generation stops; None takes those of
            `target.generation_config`, an empty list stops at none.
        temperature: Divides the logits; 0 is greedy.
        top_p: Probability that the most likely tokens kept hold together; 1 keeps all.
        top_k: Number of most likely tokens kept; 0 keeps all.
        sample_drafts: Draw the drafts from the drafter's distribution instead of proposing its most likely tokens.
        generator: Source of the sampling's randomness on the target's device; the global one by default.
        use_cache: False reads all known tokens again in every forward, for targets whose caches cannot be rolled back.
        num_draft_tokens: Drafts of a block, fewer than the drafter's block size; by default all.

    Raises:
        ValueError: For a drafter or prompt of another target, a setting out of range, or caches that cannot go back.
        FloatingPointError: When the target or the drafter computes logits that are not finite numbers.
    """
    check_drafter(target, drafter)
    names = ["input_ids"] if len(prompts) == 1 else [f"Prompt {i}" for i in range(len(prompts))]
    rows = [prompt_row(target, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    sampling = Sampling.of(temperature, top_p, top_k, sample_drafts, generator)
    stop = stop_token_ids(target, eos_token_id)
    answers = [_Answer(row.to(target.device), max_new_tokens, stop) for row in rows]
    _decode(target, drafter, answers, sampling, use_cache, num_draft_tokens)
    return [answer.output() for answer in answers]


@dataclass
class _Answer:
    """What a prompt `[1, n]` is answered with so far."""

    prompt: torch.Tensor
    max_new_tokens: int
    stop: list[int]
    streamer: BaseStreamer | None = None
    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def take(self, tokens: list[int]) -> torch.Tensor:
        """Keep those of the tokens that are within the budget, up to a stop token, and give them back."""
        tokens = tokens[: self.max_new_tokens - len(self.tokens)]
        tokens = tokens[: next((i for i, token in enumerate(tokens, start=1) if token in self.stop), len(tokens))]
        self.tokens += tokens
        new = torch.tensor(tokens)
        if self.streamer is not None:
            self.streamer.put(new)
        return new

    def verified(self, num_accepted: int, tokens: list[int]) -> torch.Tensor:
        """Keep what a verification commits, the accepted drafts and a token more, and give it back."""
        new = self.take(tokens[: num_accepted + 1])
        self.committed.append(len(new))
        self.accepted.append(min(len(new), num_accepted))
        return new

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) == self.max_new_tokens or self.tokens[-1] in self.stop

    def output(self) -> SpeculativeOutput:
        sequences = torch.cat([self.prompt, self.prompt.new_tensor([self.tokens])], dim=1)
        return SpeculativeOutput(sequences, self.committed, self.accepted)


@torch.no_grad()
def _decode(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    answers: list[_Answer],
    sampling: Sampling,
    use_cache: bool = True,
    num_draft_tokens: int | None = None,
) -> None:
    """Complete all answers."""
    lengths, device = [answer.prompt.shape[1] for answer in answers], target.device
    _check_budget(target, max(lengths), answers[0].max_new_tokens, draft_count(drafter, num_draft_tokens))
    with evaluation_mode(target, drafter), DecodingState(target, drafter, use_cache, num_draft_tokens) as state:
        known = pad_sequence([answer.prompt[0] for answer in answers], batch_first=True, padding_side="left")
        logits = state.prefill(known, lengths).to(device)
        _check_finite(target=logits)
        # A verification without drafts.
        _, first = sampling.verify(known[:, :0], None, logits[:, None])
        for answer, tokens in zip(answers, first.tolist(), strict=True):
            answer.take(tokens)
        while going := [row for row, answer in enumerate(answers) if not answer.is_complete]:
            if len(going) < len(answers):
                state.keep(going)
                answers = [answers[row] for row in going]
            anchors = torch.tensor([answer.tokens[-1:] for answer in answers], device=device)
            # The one place where drafts, and what they are drawn from, come out of the drafter's states.
            drafts, proposed_from, draft_logits = state.propose(anchors, sampling)
            # The block always has b slots: how much of it fits is the cut's business.
            logits = state.verify(anchors, drafts).unflatten(0, (len(answers), -1)).to(device)
            _check_finite(target=logits, drafter=draft_logits)
            # Read from the device at once.
            read = torch.column_stack(sampling.verify(drafts, proposed_from, logits)).tolist()
            new = [answer.verified(n, tokens) for answer, (n, *tokens) in zip(answers, read, strict=True)]
            state.commit(pad_sequence(new, batch_first=True, padding_value=-1))


def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DFlashDraftModel | None = None,
    sample_drafts: bool = False,
    generator: torch.Generator | None = None,
    num_draft_tokens: int | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Speculative decoding inside `generate`, which reads sampling, budget and stop tokens as it always does.

        target.generate(**inputs, custom_generate=speculative_decoding, drafter=drafter, max_new_tokens=64)

    Beside what `generate` gives it takes `drafter`, `sample_drafts`, `generator` and `num_draft_tokens` of
    [`speculative_generate_batch`], and a `token_streamer`, which gets the prompt and the tokens of each round and is
    ended however decoding ends. transformers hands no `streamer` to a callable: it would get the prompt and no end.
    Several prompts `[B, n]` are padded on the left, as for any `generate`. Returns the prompts and the generated
    tokens, `[B, n + m]`, padded on the right. Settings and inputs whose effect would be lost are refused.
    """
    if drafter is None:
        raise ValueError("generate was called without a drafter; pass drafter= beside custom_generate=.")
    check_drafter(model, drafter)
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    _check_supported(logits_processor, stopping_criteria, generation_config, mask, model_kwargs)
    if token_streamer is not None and len(input_ids) > 1:
        raise ValueError(f"A token_streamer takes the tokens of one prompt; there are {len(input_ids)}.")
    stop = stop_token_ids(model, generation_config.eos_token_id or [])
    budget = generation_config.max_length - input_ids.shape[1]
    lengths = mask.sum(dim=1).tolist()
    prompts = [prompt_row(model, row[None, len(row) - n :]) for row, n in zip(input_ids, lengths, strict=True)]
    answers = [_Answer(prompt.to(model.device), budget, stop, token_streamer) for prompt in prompts]
    sampling = Sampling(logits_processor, sample_drafts, generator) if generation_config.do_sample else Sampling()
    try:
        if token_streamer is not None:
            token_streamer.put(input_ids.cpu())
        _decode(model, drafter, answers, sampling, num_draft_tokens=num_draft_tokens)
    finally:
        if token_streamer is not None:
            token_streamer.end()
    pad: Any = generation_config.pad_token_id
    padding = pad if pad is not None else next(iter(stop), 0)
    tokens = [input_ids.new_tensor(answer.tokens) for answer in answers]
    return torch.cat([input_ids, pad_sequence(tokens, batch_first=True, padding_value=padding)], dim=1)


def _check_supported(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    attention_mask: torch.Tensor,
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
    if (attention_mask.diff(dim=1) < 0).any():
        lost.append("an attention_mask with zeros behind ones")
    positions = model_kwargs.get("position_ids")
    if positions is not None and ((positions != attention_mask.cumsum(dim=1) - 1) & (attention_mask > 0)).any():
        lost.append("position_ids other than 0, 1, 2, ..")
    # A text's images are None or an empty dict.
    lost += [name for name in sorted(model_kwargs.keys() - _OWN_KWARGS) if model_kwargs[name] not in (None, {})]
    if lost:
        raise ValueError(
            f"generate was called with {', '.join(lost)}, whose effect would be lost. Speculative decoding takes "
            "prompts, temperature, top_k, top_p, min_p, a budget and stop tokens; see the target's generation_config."
        )


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
