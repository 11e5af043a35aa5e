# SPDX-License-Identifier: Apache-2.0
"""One call for training data, tokenised already or not."""

import os
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .conversations import read_completions, tokenize_completions
from .manifest import MANIFEST_NAME, check_documents_fit, open_documents, read_manifest, thinking_mode


def load_documents(
    address: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "train",
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_other_template: bool = False,
    **tokenize_kwargs: Any,
) -> Dataset:
    """Opens a folder of documents, known by its manifest, or reads and tokenises completions on the spot.

    Args:
        address: Folder or fsspec address that `recipes/tokenize_completions.py` wrote, or a file or folder of
            completions that fits in memory.
        tokenizer: The target's tokenizer.
        split: "train" or "eval" of a folder of documents; completions are all "train".
        storage_options: Arguments of the address's file system.
        allow_other_template: As in `check_documents_fit`.
        **tokenize_kwargs: Arguments of `tokenize_completions`, for completions alone.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: The documents do not fit the tokenizer or were tokenised in another mode than `enable_thinking`
            says, there is no such split, or a completion cannot be used.
    """
    manifest = read_manifest(address, storage_options)
    if manifest is None:
        if split != "train":
            raise ValueError(
                f"{address} has no {MANIFEST_NAME}, so it holds no split {split!r}: make one with "
                "recipes/tokenize_completions.py --eval_fraction, or name other completions to evaluate on."
            )
        rows = read_completions(address, storage_options=dict(storage_options or {}))
        return tokenize_completions(rows, tokenizer, **tokenize_kwargs)
    thinking = tokenize_kwargs.get("enable_thinking")
    if thinking not in (None, thinking_mode(manifest)):
        raise ValueError(
            f"enable_thinking={thinking} has no effect on {address}, which was tokenised with "
            f"enable_thinking={thinking_mode(manifest)}. Leave it out, or tokenise anew with "
            f"recipes/tokenize_completions.py --enable_thinking {str(thinking).lower()}."
        )
    documents = open_documents(address, split, storage_options)
    check_documents_fit(documents, tokenizer, allow_other_template)
    return documents
