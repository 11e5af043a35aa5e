# SPDX-License-Identifier: Apache-2.0
"""Tiny targets, drafters and a tokenizer, made from nothing, so that the tests need no download."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_hf import DFlashDraftConfig, DFlashDraftModel


VOCAB_SIZE = 272
HIDDEN_SIZE = 64
MASK_TOKEN_ID = 260

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], *names: object) -> Iterator[None]:
    """The block raises `error`, and its message contains every name: the field, the file, the value; no sentence."""
    with pytest.raises(error) as caught:
        yield
    missing = [str(name) for name in names if str(name) not in str(caught.value)]
    assert not missing, f"{missing} in none of: {caught.value}"


def byte_tokenizer(chat_template: str | None = CHATML_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 260 ids: 256 bytes, <|endoftext|>, <|im_start|>, <|im_end|>, <|pad|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_chats(path: Path) -> Path:
    """Twelve chats of one turn as JSON lines, every third one in the split `test`, the others in `train`."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Question {i}?"},
                {"role": "assistant", "content": f"An answer of some length, number {i}."},
            ],
            "split": "test" if i % 3 == 2 else "train",
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _target(model_class: type[PreTrainedModel], config, seed: int, scale: float) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        # Larger weights than the usual 0.02 give a tiny random model peaked, prompt-dependent answers.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 259
    return model


def dense_target(num_layers: int = 6, tied: bool = False, seed: int = 0, **overrides) -> PreTrainedModel:
    """A Qwen3 of 6 layers and 64 hidden units whose attention shape differs from the drafter's."""
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
            "pad_token_id": 259,
            "eos_token_id": 258,
            **overrides,
        }
    )
    return _target(Qwen3ForCausalLM, config, seed, 3.0)


def llama_target(num_layers: int = 6, tied: bool = True, seed: int = 0, **overrides) -> PreTrainedModel:
    """A Llama with a tied head (the SmolLM2 family)."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
            "pad_token_id": 259,
            "bos_token_id": 257,
            "eos_token_id": 258,
            **overrides,
        }
    )
    return _target(LlamaForCausalLM, config, seed, 3.0)


def mixed_target(num_layers: int = 4, window: int = 8) -> PreTrainedModel:
    """A Qwen3 whose layers are windowed and full in turn."""
    types = ["sliding_attention", "full_attention"] * (num_layers // 2)
    return dense_target(num_layers, layer_types=types, sliding_window=window, use_sliding_window=True)


def windowed_target(window: int = 8) -> PreTrainedModel:
    """A Mistral: all layers see a window, and the configuration names no types of layers."""
    return _target(MistralForCausalLM, MistralConfig(**_SMALL, sliding_window=window), 0, 3.0)


def capped_target(window: int = 8) -> PreTrainedModel:
    """A Gemma 2: soft caps of the scores, every other layer windowed, embeddings scaled, eager by default."""
    config = Gemma2Config(**_SMALL, sliding_window=window, attn_logit_softcapping=0.5, query_pre_attn_scalar=4)
    return _target(Gemma2ForCausalLM, config, 0, 3.0)


def gemma3_target(window: int = 8) -> PreTrainedModel:
    """The attention of a Gemma 3 1B: four heads of 256 to one key head, most layers windowed."""
    fields = {**_SMALL, "num_attention_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    return _target(Gemma3ForCausalLM, Gemma3TextConfig(**fields, sliding_window=window), 0, 3.0)


_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def hybrid_target(num_layers: int = 8, tied: bool = False, seed: int = 0, **overrides) -> PreTrainedModel:
    """A Qwen3.5 text model: three gated delta-net layers to one attention layer, partial M-RoPE."""
    config = Qwen3_5TextConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
            "pad_token_id": 259,
            "eos_token_id": 258,
            **overrides,
        }
    )
    return _target(Qwen3_5ForCausalLM, config, seed, 3.0)


def tiny_drafter(target: PreTrainedModel, seed: int = 0, **fields) -> DFlashDraftModel:
    """A drafter of two layers and two taps with blocks of 4 for a tiny target; `fields` are those of its config."""
    torch.manual_seed(seed)
    given = {"num_hidden_layers": 2, "num_taps": 2, "mask_token_id": MASK_TOKEN_ID, "block_size": 4, **fields}
    if "target_layer_ids" in given:
        given.pop("num_taps")
    return DFlashDraftModel(DFlashDraftConfig.from_target_config(target.config, **given))


def chat(*contents: str, **extra) -> dict:
    """A row whose user and assistant say `contents` in turn, with further fields."""
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **extra}


def json_lines(rows) -> bytes:
    """Rows as a file of JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def supervised_texts(documents, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The supervised text of each document, its spans joined."""
    return [
        "".join(tokenizer.decode(row["input_ids"][start:stop]) for start, stop in row["supervised_spans"])
        for row in documents
    ]
