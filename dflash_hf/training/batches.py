# SPDX-License-Identifier: Apache-2.0
"""From what a trainer was given to packed rows, their order, and batches of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.state import GradientState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..data.anchors import num_valid_anchors
from ..data.collator import DataCollatorForDFlash
from ..data.conversations import tokenize_completions
from ..data.document_checks import check_documents, check_token_ids
from ..data.manifest import check_documents_fit
from ..data.packing import PackedDataset, RowSampler, with_sources
from ..target.frozen_target import FrozenTarget
from ..training_args import DFlashTrainingArguments
from .losses import IGNORE_INDEX


# Anchor slots of a row are padded to a multiple of this, so that their slots fill whole tiles of the attention.
ANCHOR_BUCKET = 64


def data_seed(args: DFlashTrainingArguments) -> int:
    """The seed of rows, anchors and noise."""
    return args.seed if args.data_seed is None else args.data_seed


def pack_rows(
    data: Any,
    args: DFlashTrainingArguments,
    config: Any,
    target: FrozenTarget,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> PackedDataset | None:
    """Chats or documents to packed rows, checked before any GPU time is spent.

    Args:
        data: Chats, documents or packed rows; None stays None.
        args: Lengths, seed and how chats are tokenised.
        config: The drafter's configuration.
        target: Whose end-of-sequence ids end an answer.
        vocab_size: Rows of the target's head.
        tokenizer: The target's; needed for chats.

    Raises:
        ValueError: The data does not fit target and drafter, or nothing in it can be learned from.
    """
    if data is None:
        return None
    documents = data.documents if isinstance(data, PackedDataset) else _documents(data, args, target, tokenizer)
    check_documents_fit(documents, tokenizer, args.allow_other_template)
    check_documents(documents, config.block_size)
    check_token_ids(documents, vocab_size, config.mask_token_id)
    if isinstance(data, PackedDataset):
        return data
    return PackedDataset(documents, args.row_length, seed=data_seed(args))


def _documents(
    data: Any, args: DFlashTrainingArguments, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase | None
) -> Any:
    """Documents of data that holds chats or documents."""
    if not isinstance(data, Dataset | list | tuple):
        raise ValueError(
            f"The data is a {type(data).__name__}; rows are packed from known lengths, so give a "
            "datasets.Dataset (one split), a list of documents or a PackedDataset."
        )
    if len(data) == 0:
        raise ValueError("The data has no documents; expected at least one. Check the file and its filters.")
    columns = data.column_names if isinstance(data, Dataset) else list(data[0])
    if "messages" in columns:
        if tokenizer is None:
            raise ValueError(
                "The data holds chats (a `messages` column) but no tokenizer was given. Pass the target's "
                "tokenizer as processing_class, or documents with input_ids and supervised_spans."
            )
        documents = tokenize_completions(
            list(data),
            tokenizer,
            max_length=args.max_length or args.row_length,
            enable_thinking=args.enable_thinking,
            eos_token_ids=target.eos_token_ids,
        )
        return with_sources(documents, data)
    rows = [columns] if isinstance(data, Dataset) else data
    for index, names in enumerate(rows):
        if not {"input_ids", "supervised_spans"} <= set(names):
            raise ValueError(
                f"Row {index} of the data has the columns {list(names)}; expected chats (`messages`) or documents "
                "(`input_ids` and `supervised_spans`). Tokenise it with dflash_hf.tokenize_completions(rows, "
                "tokenizer)."
            )
    return data


def make_collator(rows: PackedDataset | None, args: DFlashTrainingArguments, block_size: int) -> DataCollatorForDFlash:
    """The collator of packed rows; where kernels are compiled, all batches have one shape.

    Args:
        rows: What it will collate, if that is known.
        args: Anchors, row length, seed and device.
        block_size: Slots of a block.
    """
    row_length = args.row_length if rows is None else rows.row_length
    cap = args.max_anchors_per_row or max(1, row_length // 4)
    collator = DataCollatorForDFlash(block_size, args.num_anchors, data_seed(args), cap)
    if args.device.type != "cpu":
        if rows is not None:
            draws = np.minimum(num_valid_anchors(rows.documents), args.num_anchors)
            cap = min(cap, rows.largest_row_sum(draws))
        collator.row_length = row_length
        collator.pad_anchors_to_multiple_of = -(-cap // ANCHOR_BUCKET) * ANCHOR_BUCKET
    return collator


def check_blocks(inputs: dict[str, Any], block_size: int) -> None:
    """Refuse a batch whose blocks are not the drafter's.

    Raises:
        ValueError: Naming both sizes.
    """
    if inputs["labels"].shape[-1] != block_size:
        raise ValueError(
            f"The collator makes blocks of {inputs['labels'].shape[-1]} slots, the drafter's block_size is "
            f"{block_size}. Give both the same, or leave data_collator out."
        )


def without_repeated_rows(
    inputs: dict[str, Any], state: GradientState, args: DFlashTrainingArguments, rows_per_rank: int
) -> dict[str, Any]:
    """A batch in which rows that accelerate repeats, so that all ranks have as many, count nothing.

    Args:
        inputs: A batch of the collator; only the last one of an epoch is changed.
        state: accelerate's state, which knows the last batch.
        args: The training arguments.
        rows_per_rank: Rows of a whole batch of one rank.
    """
    remainder = state.remainder
    if remainder < 0 and state.end_of_dataloader and not args.dataloader_drop_last:
        # accelerate does not know it in an epoch that was resumed.
        remainder = len(state.active_dataloader.dataset) % (rows_per_rank * args.world_size)
    if args.world_size > 1 and state.end_of_dataloader and remainder > 0:
        own = max(0, remainder - args.process_index * rows_per_rank)
        labels = inputs["labels"].clone()
        labels[own:] = IGNORE_INDEX
        inputs = {**inputs, "labels": labels}
        if "counted_slots" in inputs:
            counted = inputs["counted_slots"].copy()
            counted[own:] = 0
            inputs["counted_slots"] = counted
    return inputs


def count_tokens(
    inputs: dict[str, Any], what: str, device: torch.device, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    """Tokens of a micro-batch over all ranks, for `include_num_input_tokens_seen`.

    Args:
        inputs: A batch of the collator.
        what: `"all"` with padding, `"non_padding"` without, or `"no"` for 0.
        device: On which tensors can be added up.
        reduce: Adds a tensor up over the ranks.
    """
    if what == "no":
        return 0
    input_ids = inputs["input_ids"]
    own = input_ids.numel() if what == "all" else sum(map(sum, inputs["document_lengths"]))
    return int(reduce(torch.tensor(own, device=device)).item())


class SetEpoch(TrainerCallback):
    """Tells the sampler the epoch; accelerate does not reach it through a resumed, sharded dataloader."""

    def __init__(self, sampler: RowSampler):
        self.sampler = sampler

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.sampler.set_epoch(int((state.epoch or 0) + 1e-6))


__all__ = [
    "SetEpoch",
    "check_blocks",
    "count_tokens",
    "data_seed",
    "make_collator",
    "pack_rows",
    "without_repeated_rows",
]
