# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding refuses: drafters of other targets, prompts that are none, logits that are no numbers."""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
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

from ..modeling_dflash import DFlashDraftModel
from ..target.checks import check_fits, decoder_layers


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


__all__ = ["check_drafter", "check_finite", "check_request", "check_supported"]
