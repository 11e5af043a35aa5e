# SPDX-License-Identifier: Apache-2.0
"""What the benchmark runs on: shapes of drafters and targets, random weights and batches, and the work they are.

Shapes: T tokens of a row, N anchors, b block size, K taps, D hidden size, V vocabulary.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

from dflash_hf import DataCollatorForDFlash, DFlashDraftConfig, DFlashDraftModel, FrozenTarget
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.operations import Operations, batch_operations, drafter_weights, passed_weights


SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Case:
    """One row of tokens and the blocks drafted from it."""

    num_tokens: int
    num_anchors: int

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.num_anchors}"

    @staticmethod
    def parse(text: str) -> "Case":
        tokens, _, anchors = text.strip().partition("x")
        if not (tokens.isdigit() and anchors.isdigit() and int(tokens) and int(anchors)):
            raise ValueError(f"The case {text!r} should be TOKENSxANCHORS, for example 2048x512.")
        return Case(int(tokens), int(anchors))

    def document_lengths(self, num_documents: int, block_size: int) -> list[int]:
        """Tokens of the row's documents, which differ by one at most.

        Raises:
            ValueError: When they have no room for the anchors.
        """
        lengths = [(self.num_tokens + i) // num_documents for i in range(num_documents)]
        # An anchor needs its whole block before the end, and two supervised tokens.
        room = sum(max(0, length - block_size - 1) for length in lengths)
        if room < self.num_anchors:
            raise ValueError(
                f"The case {self} has room for {room} anchors in {num_documents} documents of {min(lengths)} tokens "
                f"with blocks of {block_size}. Give fewer anchors or documents, or more tokens."
            )
        return lengths


@dataclass(frozen=True)
class Shape:
    """A drafter's and its target's configuration, and the cases that show how cost grows."""

    drafter: dict[str, Any]
    target: PreTrainedConfig
    case: Case
    sweep: list[Case] = field(default_factory=list)


def _sweep(lengths: list[int], anchors: list[int], middle: Case) -> list[Case]:
    """Rows of growing length with the same anchors, then growing anchors with the same row."""
    cases = [Case(n, middle.num_anchors) for n in lengths] + [Case(middle.num_tokens, n) for n in anchors]
    return list(dict.fromkeys(cases))


def shapes() -> dict[str, Shape]:
    """The shapes by name: a tiny one, SmolLM2-135M as a small dense target, the published drafter of Qwen3.6-27B."""
    return {
        "tiny": Shape(
            drafter={
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "layer_types": [SLIDING, FULL],
                "sliding_window": 32,
                "block_size": 4,
                "target_layer_ids": [1, 3],
                "mask_token_id": 270,
            },
            target=Qwen3Config(
                vocab_size=272,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=6,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                tie_word_embeddings=False,
            ),
            case=Case(128, 16),
            sweep=_sweep([64, 128, 256], [8, 16, 32], Case(128, 16)),
        ),
        "smollm2-135m": Shape(
            drafter={
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 5,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "layer_types": [SLIDING] * 4 + [FULL],
                "sliding_window": 2048,
                "block_size": 8,
                "target_layer_ids": [1, 8, 14, 20, 27],
                "mask_token_id": 15,
            },
            target=LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                max_position_embeddings=8192,
                tie_word_embeddings=True,
            ),
            case=Case(2048, 256),
            sweep=_sweep([1024, 2048, 4096, 8192], [128, 256, 512], Case(2048, 256)),
        ),
        "qwen3.6-27b": Shape(
            drafter={
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "num_hidden_layers": 5,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "layer_types": [SLIDING] * 4 + [FULL],
                "sliding_window": 2048,
                "block_size": 16,
                "target_layer_ids": [1, 16, 31, 46, 61],
                "mask_token_id": 248070,
            },
            target=Qwen3_5TextConfig(
                vocab_size=248320,
                hidden_size=5120,
                intermediate_size=17408,
                num_hidden_layers=64,
                num_attention_heads=24,
                num_key_value_heads=4,
                head_dim=256,
                linear_num_key_heads=16,
                linear_num_value_heads=48,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                tie_word_embeddings=False,
            ),
            case=Case(2048, 512),
            sweep=_sweep(
                [2048, 4096, 8192, 16384, 32768],
                [256, 512, 1024, 2048, 4096],
                Case(8192, 512),
            ),
        ),
    }


def make_drafter(shape: Shape, device: torch.device, full_attention: bool = False) -> DFlashDraftModel:
    """A random drafter with fp32 masters whose values bf16 can hold, so that bf16 copies of them are equal."""
    fields = dict(shape.drafter)
    if full_attention:
        fields |= {"layer_types": [FULL] * fields["num_hidden_layers"], "sliding_window": None}
    config = DFlashDraftConfig(
        **fields,
        use_sliding_window=not full_attention,
        vocab_size=shape.target.vocab_size,
        num_target_layers=shape.target.num_hidden_layers,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        attn_implementation="flex_attention" if device.type == "cuda" else "sdpa",
    )
    with device:
        drafter = DFlashDraftModel(config).train()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    return drafter


def make_head(shape: Shape, device: torch.device, dtype: torch.dtype) -> FrozenHead:
    """The embedding and head of a random target without its layers."""
    config = Qwen3Config(
        vocab_size=shape.target.vocab_size,
        hidden_size=shape.target.hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    with device:
        return FrozenHead(AutoModelForCausalLM.from_config(config, dtype=dtype), device)


def make_batch(
    case: Case, config: DFlashDraftConfig, device: torch.device, num_documents: int = 1, seed: int = 0
) -> dict[str, Any]:
    """One row of random tokens as the training's collator makes it, and `loss_mask` `[1, T]`, what is supervised.

    No answer reaches into the last block of its document, so that every block lies within the row.

    Raises:
        ValueError: When the row has no room for so many anchors or documents.
    """
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (case.num_tokens,), generator=generator)
    lengths = case.document_lengths(num_documents, config.block_size)
    documents = [
        {"document": i, "input_ids": part.tolist(), "supervised_spans": [[0, len(part) - config.block_size]]}
        for i, part in enumerate(torch.split(ids, lengths))
    ]
    collator = DataCollatorForDFlash(
        block_size=config.block_size, num_anchors=case.num_anchors, max_anchors_per_row=case.num_anchors, seed=seed
    )
    batch = collator([{"epoch": 0, "documents": documents}])
    found = int((batch["anchor_positions"] >= 0).sum())
    if found != case.num_anchors:
        raise ValueError(f"The case {case} got {found} anchors: choose documents of similar length.")
    mask = [torch.arange(length) < length - config.block_size for length in lengths]
    batch["loss_mask"] = torch.cat(mask)[None].float()
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def uneven_lengths(num_tokens: int, num_documents: int, seed: int = 0) -> list[int]:
    """Tokens of documents that share a row, short ones more often than long ones."""
    generator = torch.Generator().manual_seed(seed)
    cuts = 1 + torch.randperm(num_tokens - 1, generator=generator)[: num_documents - 1]
    borders = [0, *cuts.sort().values.tolist(), num_tokens]
    return [stop - start for start, stop in pairwise(borders)]


def step_operations(
    drafter: DFlashDraftModel, batch: dict[str, Any], target: FrozenTarget | None = None
) -> Operations:
    """Operations of a step on a batch; the target's where it is given."""
    config: Any = drafter.config
    weights = 0
    if target is not None:
        weights = passed_weights(target.layers, target.model.config.get_text_config(decoder=True))
    head = config.vocab_size * config.hidden_size
    return batch_operations(drafter_weights(drafter), head, batch, target_weights=weights)
