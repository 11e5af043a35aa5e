# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding for targets that transformers' `generate` does not speculate with (hybrid ones).

Shapes: n known tokens, K taps, D hidden size, b block size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .modeling_dflash import DFlashDraftModel
from .target import block_inputs, check_fits


@dataclass(frozen=True)
class SpeculativeOutput:
    """What was generated, and what each verification contributed.

    Args:
        sequences (`torch.LongTensor` of shape `[1, n + m]`): The prompt and the `m` generated tokens, on the target's
            device.
        committed (`list[int]`): Tokens committed by each verification forward (accepted drafts and the target's own
            next token), cut at the end-of-sequence token and at the budget. They add up to `m - 1`: the first token
            is the prefill's.
    """

    sequences: torch.Tensor
    committed: list[int]


@torch.no_grad()
def speculative_generate(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
) -> SpeculativeOutput:
    """Generate the target's own greedy continuation, several tokens per forward of the target.

    Args:
        target (`PreTrainedModel`): A whole causal language model, dense or hybrid.
        drafter (`DFlashDraftModel`): A drafter made for it, on any device and of any floating type.
        input_ids (`torch.Tensor` of shape `[1, n]`): One prompt of at least one token.
        max_new_tokens: Budget of generated tokens, at least 1; fewer where an end-of-sequence token comes first.
        eos_token_id: One or several ids after which generation stops; None takes those of
            `target.generation_config`, an empty list stops at none.

    Returns:
        [`SpeculativeOutput`].

    Raises:
        ValueError: When the prompt is not one row of tokens, the budget is empty or the drafter is another target's.
    """
    check_drafter(target, drafter)
    check_request(input_ids, max_new_tokens)
    stop = stop_token_ids(target, eos_token_id)
    known = input_ids.to(target.device)
    limit = known.shape[1] + max_new_tokens
    committed: list[int] = []
    with evaluation_mode(target, drafter):
        context, predicted = _target_forward(target, drafter, known, num_predictions=1)
        known = torch.cat([known, predicted], dim=1)
        while known.shape[1] < limit and known[0, -1].item() not in stop:
            # The anchor's own hidden state is not known yet: the context ends before it.
            drafts = draft_block(target, drafter, known[:, -1:], context[:, : known.shape[1] - 1])
            # Every round recomputes all known tokens. That is exact for recurrent states, which cannot be cropped.
            context, predicted = _target_forward(
                target, drafter, torch.cat([known, drafts], dim=1), num_predictions=drafts.shape[1] + 1
            )
            new = _accepted(drafts, predicted, limit - known.shape[1], stop)
            known = torch.cat([known, new], dim=1)
            committed.append(new.shape[1])
    return SpeculativeOutput(known, committed)


def draft_block(
    target: PreTrainedModel, drafter: DFlashDraftModel, anchor: torch.Tensor, context: torch.Tensor
) -> torch.Tensor:
    """The drafter's most likely tokens for the slots after an anchor.

    Args:
        target: The target, whose embeddings and head the drafter uses.
        drafter: The drafter.
        anchor (`torch.Tensor` of shape `[1, 1]`): The last known token, at position n - 1.
        context (`torch.Tensor` of shape `[1, n - 1, K * D]`): Taps of all tokens before it, on the drafter's device.

    Returns:
        `torch.Tensor` of shape `[1, b - 1]` on the target's device.
    """
    mask_token_id = drafter.config.mask_token_id
    assert mask_token_id is not None  # its configuration refuses that
    table, head = target.get_input_embeddings().get_parameter("weight"), target.get_output_embeddings()
    noise_embeds = block_inputs(table, anchor.to(table.device), mask_token_id, drafter.config.block_size)
    hidden_states = drafter(noise_embeds.to(drafter.device, drafter.dtype), context).last_hidden_state[:, 1:]
    return head(hidden_states.to(head.weight.device, head.weight.dtype)).argmax(dim=-1).to(anchor.device)


def check_drafter(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """Refuse a drafter that was made for another target, and a target without head or without all its layers.

    Raises:
        ValueError: Naming the field, both values and the way out.
    """
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"{type(target).__name__} has no output head (get_output_embeddings() is None), so it writes no tokens. "
            "Load the target with AutoModelForCausalLM."
        )
    check_fits(drafter.config, target.config, target.get_input_embeddings().get_parameter("weight").shape[0])
    text_config = target.config.get_text_config(decoder=True)
    depth = len(target.get_decoder().layers)
    if depth != text_config.num_hidden_layers:
        raise ValueError(
            f"The target has {depth} of its {text_config.num_hidden_layers} layers, as a target that was cut for "
            "training: it gives hidden states but no tokens. Decode with the whole model."
        )


def check_request(input_ids: torch.Tensor, max_new_tokens: int) -> None:
    """Refuse anything but one row of at least one token and a budget of at least one.

    Raises:
        ValueError: Saying what was given.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has the shape {list(input_ids.shape)}; expected [1, n] with n >= 1: prompts are decoded one "
            "by one, from at least one token. Call once per prompt, and put a BOS token where there is no text."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1, the token of the prefill.")


def stop_token_ids(target: PreTrainedModel, eos_token_id: int | list[int] | None) -> list[int]:
    """End-of-sequence ids as a list, by default those of the target's generation config."""
    if eos_token_id is None:
        eos_token_id = target.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Models in eval mode: no dropout, and no gradient checkpointing, which drops caches."""
    training = [model for model in models if model.training]
    try:
        for model in training:
            model.eval()
        yield
    finally:
        for model in training:
            model.train()


def _target_forward(
    target: PreTrainedModel, drafter: DFlashDraftModel, input_ids: torch.Tensor, num_predictions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps `[1, n, K * D]` of all tokens, and the tokens `[1, num_predictions]` that follow the last ones."""
    layer_ids = drafter.config.target_layer_ids
    assert layer_ids is not None  # its configuration refuses that
    # Entry 0 is the embeddings, so entry i + 1 is the output of layer i.
    entries = [i + 1 for i in layer_ids]
    outputs = target(
        input_ids=input_ids, output_hidden_states=entries, logits_to_keep=num_predictions, use_cache=False
    )
    taps = [outputs.hidden_states[entry].to(drafter.device, drafter.dtype) for entry in entries]
    predicted = outputs.logits.float().argmax(dim=-1).to(input_ids.device)
    return torch.cat(taps, dim=-1), predicted


def _accepted(drafts: torch.Tensor, predicted: torch.Tensor, budget: int, stop: list[int]) -> torch.Tensor:
    """The longest right prefix of the drafts and the target's own token after it, cut at budget and stop token.

    Args:
        drafts (`torch.Tensor` of shape `[1, b - 1]`): Drafted tokens.
        predicted (`torch.Tensor` of shape `[1, b]`): The target's tokens for the same slots and one more.
        budget: Tokens that may still be generated.
        stop: End-of-sequence ids.
    """
    num_right = int((drafts == predicted[:, :-1]).cumprod(dim=1).sum())
    # Where drafts are right they are the target's own tokens.
    tokens = predicted[:, : min(num_right + 1, budget)]
    end = next((i for i, token in enumerate(tokens[0].tolist(), start=1) if token in stop), tokens.shape[1])
    return tokens[:, :end]


__all__ = ["SpeculativeOutput", "draft_block", "speculative_generate"]
