# SPDX-License-Identifier: Apache-2.0
"""Chats become documents: token ids, and the spans of them that the target itself has generated.

`chat_rows` says what a row may be. A document is `{"input_ids": [...], "supervised_spans": [[start, stop]]}`,
half-open: the prompt exactly as at inference, then one answer, encoded apart from the prompt because generated tokens
never merge with it. For more than fits in memory, and for object stores: `tokenizing`.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from datasets import Dataset, Features, List, Value, concatenate_datasets
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .chat_rows import read_chats
from .documents import Document, Turn, cut, drafts_of
from .rendering import ChatFormat
from .sources import SourceError, list_files, open_filesystem, read_rows


logger = logging.getLogger(__name__)

# Rows keep it in Arrow too, among fields of their own.
SOURCE_KEY = "_dflash_source"
DOCUMENT_FEATURES = Features(
    {"input_ids": List(Value("int32")), "supervised_spans": List(List(Value("int32"))), "row": Value("int64")}
)
# Python lists of ids take many times the memory of Arrow's, so they are handed over in portions.
DOCUMENTS_PER_PART = 1000


def read_completions(
    path: str | os.PathLike,
    on_error: Literal["raise", "skip"] = "raise",
    storage_options: dict[str, Any] | None = None,
) -> list[dict]:
    """Reads the rows of a `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.parquet` file, or of all such files directly in a
    folder, in sorted order; or of a `.json` file, compressed or not, of one list of rows.

    Args:
        path: File or folder, or an fsspec address of one. Blank lines are passed over.
        on_error: What to do with a line that is not a JSON object: "raise", or "skip" it with a warning.
        storage_options: Arguments of the address's file system.

    Returns:
        One dict per row, with "file:line" (of Parquet or a list, "file:row") under the key `_dflash_source`, so that
        later errors can name the place.

    Raises:
        FileNotFoundError: No such path, or a folder without such files.
        ValueError: A broken line, or no row at all.
    """
    _check_on_error(on_error)
    rows: list[dict] = []
    num_skipped = 0
    fs, _ = open_filesystem(path, storage_options)
    for file in list_files(path, storage_options, recursive=False):
        try:
            for place, row, _ in read_rows(fs, file):
                if isinstance(row, dict):
                    rows.append({**row, SOURCE_KEY: place})
                    continue
                if on_error == "raise":
                    raise ValueError(f"{place}: {row}")
                num_skipped += 1
                logger.warning("Skipped a line. %s: %s", place, row)
        except SourceError as error:
            if on_error == "raise":
                raise ValueError(str(error)) from error
            num_skipped += 1
            logger.warning("Skipped the rest of a file. %s", error)
    if num_skipped:
        logger.warning("%s: skipped %d broken lines and kept %d rows.", path, num_skipped, len(rows))
    if not rows:
        raise ValueError(f"{path} holds no row ({num_skipped} broken lines skipped): give one JSON object per line.")
    return rows


def tokenize_conversation(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    enable_thinking: bool | None = None,
    preserve_thinking: bool | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    merge_turns: bool = False,
) -> list[dict[str, list]]:
    """Turns one chat into one document per assistant turn, by the tokenizer's own chat template.

    Args:
        row: A chat, see `chat_rows`.
        tokenizer: The target's tokenizer, with its chat template.
        max_length: Tokens of a document that are kept; an answer that lies wholly beyond gives no document.
        enable_thinking: Handed to the template unless None; the value the answers were generated with.
        preserve_thinking: Handed to the template unless None: whether it keeps the thinking of earlier turns.
        eos_token_ids: Ids that end a turn besides `tokenizer.eos_token_id`: those of the target's generation config.
        merge_turns: Whether turns become one document where the template leaves the earlier ones as they were.

    Returns:
        Documents `{"input_ids": [...], "supervised_spans": [[start, stop]]}` in the order of the turns.

    Raises:
        ValueError: Something in the row, or what the template makes of it, cannot be used; names the row's place.
    """
    _check_max_length(max_length)
    chat = ChatFormat.of(
        tokenizer, eos_token_ids, enable_thinking=enable_thinking, preserve_thinking=preserve_thinking
    )
    try:
        turns = _turns(chat, row)
    except ValueError as error:
        raise ValueError(f"{_row_name(row)}: {error}") from error
    return [_as_dict(document) for document in _documents(chat, turns, max_length, merge_turns)[0]]


def tokenize_completions(
    rows: Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    enable_thinking: bool | None = None,
    preserve_thinking: bool | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    merge_turns: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    disable_tqdm: bool = False,
) -> Dataset:
    """Turns chats into a dataset with the columns `input_ids`, `supervised_spans` and `row` (index of the chat).

    Args:
        rows: Chats, as `read_completions` or a `datasets.Dataset` gives them.
        tokenizer, max_length, enable_thinking, preserve_thinking, eos_token_ids, merge_turns: As in
            `tokenize_conversation`.
        on_error: What to do with a chat that cannot be used: "raise", or "skip" it with a warning.
        disable_tqdm: Whether to hide the progress bar.

    Raises:
        ValueError: A chat that cannot be used, named by index and place; or no document at all.
    """
    _check_on_error(on_error)
    _check_max_length(max_length)
    chat = ChatFormat.of(
        tokenizer, eos_token_ids, enable_thinking=enable_thinking, preserve_thinking=preserve_thinking
    )
    parts: list[Dataset] = []
    documents: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    template_texts: Counter[str] = Counter()
    for index, row in enumerate(tqdm(rows, desc="Tokenizing", unit=" chats", disable=disable_tqdm)):
        counts["rows"] += 1
        try:
            turns = _turns(chat, row)
        except ValueError as error:
            if on_error == "raise":
                raise ValueError(f"{_row_name(row, index)}: {error}") from error
            counts["skipped"] += 1
            logger.warning("Skipped %s: %s", _row_name(row, index), error)
            continue
        kept, dropped = _documents(chat, turns, max_length, merge_turns)
        documents += [{**_as_dict(document), "row": index} for document in kept]
        counts["dropped"] += dropped
        template_texts.update(turn.template_text for turn in turns if turn.template_text)
        if len(documents) >= DOCUMENTS_PER_PART:
            parts.append(Dataset.from_list(documents, features=DOCUMENT_FEATURES))
            documents = []
    if documents:
        parts.append(Dataset.from_list(documents, features=DOCUMENT_FEATURES))
    _report(counts, template_texts, max_length, nothing_left=not parts)
    return concatenate_datasets(parts)


def _turns(chat: ChatFormat, row: Any) -> list[Turn]:
    return [turn for one in read_chats(row) for turn in chat.turns(one)]


def _documents(
    chat: ChatFormat, turns: list[Turn], max_length: int | None, merge_turns: bool
) -> tuple[list[Document], int]:
    """What is left of the turns within `max_length`, and how many documents are not."""
    whole = chat.encode(drafts_of(turns, merge_turns))
    kept = [short for document in whole if (short := cut(document, max_length))]
    return kept, len(whole) - len(kept)


def _as_dict(document: Document) -> dict[str, list]:
    return {"input_ids": document.input_ids.tolist(), "supervised_spans": document.supervised_spans}


def _report(counts: Counter[str], template_texts: Counter[str], max_length: int | None, nothing_left: bool) -> None:
    skipped = f"skipped {counts['skipped']} of {counts['rows']} chats"
    dropped = f"dropped {counts['dropped']} answers that are empty or lie wholly beyond max_length={max_length}"
    if nothing_left:
        raise ValueError(
            f"No document is left to train on: {skipped}, {dropped}. Give chats that hold answers of the target, and "
            "a max_length above the length of their prompts."
        )
    if counts["skipped"]:
        logger.warning("Tokenizing %s; each has its own warning above.", skipped)
    if counts["dropped"]:
        logger.warning("Tokenizing %s.", dropped)
    for text, _ in template_texts.most_common(1):
        logger.warning(
            "In %d answers the template wrote text of its own before the content, most often %r; it is supervised as "
            "generated text. If the target did not generate it, pass the enable_thinking the answers were generated "
            "with, or give `completion_token_ids`.",
            template_texts.total(),
            text,
        )


def _row_name(row: Any, index: int | None = None) -> str:
    source = row.get(SOURCE_KEY) if isinstance(row, dict) else None
    name = "The row" if index is None else f"Row {index}"
    return f"{name} ({source})" if isinstance(source, str) else name


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")


def _check_max_length(max_length: int | None) -> None:
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1 token, got {max_length}.")
