# SPDX-License-Identifier: Apache-2.0
"""From rows to documents: in memory, or into a folder that a killed job resumes.

Both go by `RowTokenizer.documents`, which counts in `FileCounts` what became of each row. A folder of documents has

- `settings.json`, written first: what its documents depend on besides the files;
- `train/NAME.parquet` and `eval/NAME.parquet`, the shards of the file NAME: each appears whole or not at all, with the
  file's counts as its record, the training shard last;
- `manifest.json`, written last: the settings, the sums of the records, and the records.
"""

import dataclasses
import glob
import hashlib
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, Features, load_dataset
from datasets.exceptions import DatasetGenerationError
from fsspec.implementations.local import LocalFileSystem
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .chats import (
    RESERVED_TEMPLATE_KWARGS,
    RowError,
    SourceError,
    SourceFile,
    describe,
    explained,
    list_files,
    open_filesystem,
    read_chats,
    read_rows,
)
from .rendering import ChatFormat, Document, Draft, cut, drafts_of, windows
from .writing import only_writer


logger = logging.getLogger(__name__)

Address: TypeAlias = str | os.PathLike
StorageOptions: TypeAlias = Mapping[str, Any] | None
# Called with (bytes read, tokens made) since the last call; both are negative where a file fails.
OnProgress: TypeAlias = Callable[[int, int], None]

# Rows keep their place in Arrow too, among fields of their own.
SOURCE_KEY = "_dflash_source"
# A chunk is encoded in one batch and written as one row group. The limits bound the memory of a process.
CHUNK_ROWS = 256
CHUNK_CHARACTERS = 1_000_000
# Tokens of a bin of the histogram of lengths.
HISTOGRAM_BIN = 256
EXAMPLES_PER_REASON = 3
# Why a document is left out; the other reasons are of rows.
EMPTY, TOO_LONG = "empty answer", "prompt too long"
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("supervised_spans", pa.list_(pa.list_(pa.int32()))),
        ("row", pa.int64()),
        ("truncated", pa.bool_()),
        ("source", pa.string()),
        ("language", pa.string()),
    ]
)
# Columns of documents in memory.
DOCUMENT_FEATURES = Features.from_arrow_schema(pa.schema(list(SCHEMA)[:3]))


# --- The one path from rows to documents.


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the documents, besides the tokenizer and the rows.

    Args:
        max_length: Tokens of a document that are kept.
        long_documents: "cut" what lies beyond `max_length`, or make "windows": documents that together supervise every
            answer token once, each behind all that precedes it, and therefore longer than `max_length`.
        merge_turns: Whether turns become one document where the template leaves the earlier ones as they were.
        last_turn_only: Whether only a conversation's last answer is supervised.
        enable_thinking: Handed to the template unless None, where a row has no `chat_template_kwargs` of its own.
        preserve_thinking: The same, whether the template keeps the thinking of earlier turns.
        infer_thinking: Whether enable_thinking follows from each answer: True where it holds thinking, else False.
        template_kwargs: Further arguments of the template, such as `{"date_string": "26 Jul 2024"}`.
        eos_token_ids: Ids that end a turn besides the tokenizer's own.
        eval_fraction: Share of the conversations that go into the evaluation split, by a hash of their prompts.
        source: Name for the `source` column of rows that have none; by default the file's name.
    """

    max_length: int | None = None
    long_documents: Literal["cut", "windows"] = "cut"
    merge_turns: bool = True
    last_turn_only: bool = False
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    infer_thinking: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: list[int] = field(default_factory=list)
    eval_fraction: float = 0.0
    source: str | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, got {self.max_length}.")
        if self.long_documents not in ("cut", "windows"):
            raise ValueError(f"long_documents must be 'cut' or 'windows', got {self.long_documents!r}.")
        if self.long_documents == "windows" and self.max_length is None:
            raise ValueError("long_documents='windows' needs max_length, the tokens of a window.")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction must be at least 0 and below 1, got {self.eval_fraction}.")
        if names := ", ".join(sorted(RESERVED_TEMPLATE_KWARGS & self.template_kwargs.keys())):
            raise ValueError(f"template_kwargs holds {names}: only variables of the template may be given.")
        if self.infer_thinking and self.enable_thinking is not None:
            raise ValueError("Give enable_thinking for all rows or infer_thinking from each answer, not both.")

    def chat_format(self, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """How the target's template renders chats; refuses a tokenizer that cannot."""
        kwargs = {"enable_thinking": self.enable_thinking, "preserve_thinking": self.preserve_thinking}
        return ChatFormat.of(tokenizer, self.eos_token_ids, self.infer_thinking, **kwargs | self.template_kwargs)


@dataclass
class FileCounts:
    """What became of the rows of one file; its fields are those of the file's record."""

    rows: int = 0
    documents: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: int = 0
    # Tokens that windows repeat as context.
    repeated_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_examples: dict[str, list[str]] = field(default_factory=dict)
    # Documents by length, in bins of `HISTOGRAM_BIN` tokens.
    lengths: Counter[int] = field(default_factory=Counter)
    template_texts: Counter[str] = field(default_factory=Counter)
    # Answers by the model that a log names.
    models: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, place: str, message: str) -> None:
        self.dropped[reason] += 1
        examples = self.dropped_examples.setdefault(reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(f"{place}: {message}"[:400])

    def add(self, split: str, document: Document) -> None:
        length = len(document.input_ids)
        self.documents[split] += 1
        self.tokens += length
        self.supervised_tokens += sum(stop - start for start, stop in document.supervised_spans)
        self.truncated += document.is_truncated
        self.lengths[length // HISTOGRAM_BIN * HISTOGRAM_BIN] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class Origin:
    """What is stored with a document, and the place of its row for messages."""

    place: str
    split: str
    row: int
    source: str | None
    language: str | None


Placed: TypeAlias = list[tuple[Document, Origin]]


@dataclass(frozen=True)
class RowTokenizer:
    """Makes documents of the rows of one source and counts what becomes of each row."""

    format: ChatFormat
    options: TokenizeOptions
    counts: FileCounts
    # Where rows come from that do not say so themselves.
    source: str | None = None
    # A row that cannot be used raises a ValueError that names it, is skipped with a warning, or only counted.
    on_error: Literal["raise", "skip", "count"] = "count"
    # Whether an answer may follow messages without text.
    allow_empty_prompts: bool = False

    def documents(self, rows: Iterable[tuple[str, Any]]) -> Iterator[Placed]:
        """Documents in order, in chunks that bound the memory, of rows with their names in messages.

        A `RowError` stands in place of a row that could not be read.
        """
        drafts: list[tuple[Draft, Origin]] = []
        num_rows, num_characters = 0, 0
        for index, (place, row) in enumerate(rows):
            self.counts.rows += 1
            num_rows += 1
            try:
                found = self.drafts(row, index, place)
            except RowError as error:
                if self.on_error == "raise":
                    raise ValueError(f"{place}: {error}") from error
                if self.on_error == "skip":
                    logger.warning("Skipped %s: %s", place, error)
                self.counts.drop(error.reason, place, str(error))
                continue
            drafts += found
            num_characters += sum(len(piece.content) for draft, _ in found for piece in draft.pieces)
            if num_rows >= CHUNK_ROWS or num_characters >= CHUNK_CHARACTERS:
                yield self._encoded(drafts)
                drafts, num_rows, num_characters = [], 0, 0
        if drafts:
            yield self._encoded(drafts)

    def drafts(self, row: Any, index: int, place: str) -> list[tuple[Draft, Origin]]:
        """Documents of a row before they are encoded, or its `RowError`."""
        if isinstance(row, RowError):
            raise row
        drafts = []
        for chat in read_chats(row):
            has_prompt = any(message["content"].strip() or "tool_calls" in message for message in chat.prompt)
            if not has_prompt and not self.allow_empty_prompts:
                raise RowError("empty prompt", "the messages before the first answer hold no text.")
            turns = self.format.turns(chat, self.options.last_turn_only)
            self.counts.template_texts.update(turn.template_text for turn in turns if turn.template_text)
            self.counts.models.update([chat.model] if chat.model else [])
            split = "eval" if self._is_eval(chat.prompt) else "train"
            origin = Origin(place, split, index, chat.source or self.options.source or self.source, chat.language)
            drafts += [(draft, origin) for draft in drafts_of(turns, self.options.merge_turns)]
        return drafts

    def _is_eval(self, prompt: list[dict]) -> bool:
        """Whether a conversation belongs to the evaluation split: by its prompt alone, so that reruns agree."""
        if self.options.eval_fraction == 0:
            return False
        # Parquet has types that JSON lacks.
        text = json.dumps(prompt, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.options.eval_fraction * 2**64

    def _encoded(self, drafts: list[tuple[Draft, Origin]]) -> Placed:
        placed = []
        documents = self.format.encode([draft for draft, _ in drafts])
        for document, (_, origin) in zip(documents, drafts, strict=True):
            for fitted in self._fitted(document, origin.place):
                self.counts.add(origin.split, fitted)
                placed.append((fitted, origin))
        return placed

    def _fitted(self, whole: Document, place: str) -> list[Document]:
        """What the length limit leaves of a document; what it leaves nothing of is counted."""
        limit = self.options.max_length
        if not whole.supervised_spans:
            self.counts.drop(EMPTY, place, "the answer holds no token.")
            return []
        if limit is None:
            return [whole]
        if self.options.long_documents == "windows":
            parts = windows(whole, limit)
            self.counts.repeated_tokens += sum(len(part.input_ids) for part in parts[:-1])
            return parts
        if short := cut(whole, limit):
            return [short]
        start = whole.supervised_spans[0][0]
        self.counts.drop(TOO_LONG, place, f"the prompt has {start} tokens of max_length={limit}.")
        return []


def _table(placed: Placed) -> pa.Table:
    columns = {
        "input_ids": [document.input_ids for document, _ in placed],
        "supervised_spans": [document.supervised_spans for document, _ in placed],
        "row": [origin.row for _, origin in placed],
        "truncated": [document.is_truncated for document, _ in placed],
        "source": [origin.source for _, origin in placed],
        "language": [origin.language for _, origin in placed],
    }
    return pa.table(columns, schema=SCHEMA)


# --- In memory.


def read_completions(
    path: Address, on_error: Literal["raise", "skip"] = "raise", storage_options: StorageOptions = None
) -> list[dict]:
    """Reads the rows of a `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.parquet` file, or of all such files directly in a
    folder, in sorted order; or of a `.json` file, compressed or not, of one list of rows.

    Args:
        path: File or folder, or an fsspec address of one. Blank lines are passed over.
        on_error: What to do with a line that is not a JSON object: "raise", or "skip" it with a warning.
        storage_options: Arguments of the address's file system.

    Returns:
        Rows with "file:line" (of Parquet or a list, "file:row") under `_dflash_source`, so that later errors name it.

    Raises:
        FileNotFoundError: Nothing to read at the path.
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


def _in_memory(
    tokenizer: PreTrainedTokenizerBase,
    on_error: Literal["raise", "skip"],
    *,
    max_length: int | None = None,
    enable_thinking: bool | None = None,
    preserve_thinking: bool | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    merge_turns: bool = False,
) -> RowTokenizer:
    options = TokenizeOptions(
        max_length=max_length,
        merge_turns=merge_turns,
        enable_thinking=enable_thinking,
        preserve_thinking=preserve_thinking,
        eos_token_ids=[eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids or []),
    )
    form = options.chat_format(tokenizer)
    return RowTokenizer(form, options, FileCounts(), on_error=on_error, allow_empty_prompts=True)


def tokenize_conversation(row: dict, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[dict[str, list]]:
    """Turns one chat into one document per assistant turn, by the tokenizer's own chat template.

    Args:
        row: A chat, see `read_chats`.
        tokenizer: The target's tokenizer, with its chat template.
        **options: `max_length`, `enable_thinking`, `preserve_thinking`, `eos_token_ids` (one or several) and
            `merge_turns` (False by default), as in `TokenizeOptions`.

    Returns:
        Documents `{"input_ids": [...], "supervised_spans": [[start, stop]]}` in the order of the turns.

    Raises:
        ValueError: Something in the row, or what the template makes of it, cannot be used; names the row's place.
    """
    chunks = _in_memory(tokenizer, "raise", **options).documents([(_row_name(row), row)])
    documents = [document for placed in chunks for document, _ in placed]
    return [{"input_ids": d.input_ids.tolist(), "supervised_spans": d.supervised_spans} for d in documents]


def tokenize_completions(
    rows: Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    on_error: Literal["raise", "skip"] = "raise",
    disable_tqdm: bool = False,
    **options: Any,
) -> Dataset:
    """Turns chats into a dataset with the columns `input_ids`, `supervised_spans` and `row` (index of the chat).

    Args:
        rows: Chats, as `read_completions` or a `datasets.Dataset` gives them.
        tokenizer, **options: As in `tokenize_conversation`.
        on_error: What to do with a chat that cannot be used: "raise", or "skip" it with a warning.
        disable_tqdm: Whether to hide the progress bar.

    Raises:
        ValueError: A chat that cannot be used, named by index and place; or no document at all.
    """
    _check_on_error(on_error)
    in_memory = _in_memory(tokenizer, on_error, **options)
    bar = tqdm(rows, desc="Tokenizing", unit=" chats", disable=disable_tqdm)
    named = ((_row_name(row, index), row) for index, row in enumerate(bar))
    tables = [_table(placed) for placed in in_memory.documents(named) if placed]
    _report(in_memory.counts, in_memory.options.max_length)
    return Dataset(pa.concat_tables(tables).select(list(DOCUMENT_FEATURES)))


def _report(counts: FileCounts, max_length: int | None) -> None:
    num_dropped = counts.dropped[EMPTY] + counts.dropped[TOO_LONG]
    num_skipped = counts.dropped.total() - num_dropped
    skipped = f"skipped {num_skipped} of {counts.rows} chats"
    dropped = f"dropped {num_dropped} answers that are empty or lie wholly beyond max_length={max_length}"
    if not counts.documents:
        raise ValueError(
            f"No document is left to train on: {skipped}, {dropped}. Give chats that hold answers of the target, and "
            "a max_length above the length of their prompts."
        )
    if num_skipped:
        logger.warning("Tokenizing %s; each has its own warning above.", skipped)
    if num_dropped:
        logger.warning("Tokenizing %s.", dropped)
    for text, _ in counts.template_texts.most_common(1):
        logger.warning(
            "In %d answers the template wrote text of its own before the content, most often %r; it is supervised as "
            "generated text. If the target did not generate it, pass the enable_thinking the answers were generated "
            "with, or give `completion_token_ids`.",
            counts.template_texts.total(),
            text,
        )


def _row_name(row: Any, index: int | None = None) -> str:
    source = row.get(SOURCE_KEY) if isinstance(row, dict) else None
    name = "The row" if index is None else f"Row {index}"
    return f"{name} ({source})" if isinstance(source, str) else name


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")


# --- A folder of documents, on a local disk or in an object store.


MANIFEST_NAME = "manifest.json"
SETTINGS_NAME = "settings.json"
FORMAT = "dflash_hf documents 1"
# Fields without which it is not a manifest, and what they hold.
FIELDS = {"files": list, "documents": dict, "complete": bool, "failed": dict, "vocabulary_hash": str}
# Fields that say what the ids mean and how the text was written; they travel with the opened data set.
IDENTITY_FIELDS = ("format", "vocabulary_hash", "vocabulary_size", "template_hash")
# Where a shard's footer keeps the record of its file.
RECORD_KEY = b"dflash_hf"
# Documents of a shard that are held at once.
BATCH_DOCUMENTS = 256


class OutputError(OSError):
    """A shard cannot be written; no other will be, so the run ends."""


def shard_name(file: SourceFile, split: str) -> str:
    """A shard's place in the folder: the name of its file, without what URLs and patterns take for something else."""
    name = re.sub(r"[^\w./=+ -]", lambda found: quote(found[0], safe="", errors="surrogateescape"), file.name)
    return f"{split}/{name}.parquet"


def _identity(file: SourceFile) -> dict[str, Any]:
    return {"name": file.name, "size": file.size, "version": file.version}


class DocumentFolder:
    """A folder of documents of any file system. Files are written aside, then moved to their place in one step."""

    def __init__(self, address: Address, storage_options: StorageOptions = None):
        self.address = os.fspath(address)
        self.fs, root = open_filesystem(address, storage_options)
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    # Reading

    def content(self, name: str) -> bytes | None:
        """What a file holds, or None where there is none."""
        with explained(self.address, "Reading"):
            path = f"{self.root}/{name}"
            return self.fs.cat_file(path) if self.fs.exists(path) else None

    def record(self, shard: str) -> dict[str, Any] | None:
        """The record of a finished shard, or None where there is no such shard, or none that can be read."""
        path = f"{self.root}/{shard}"
        try:
            with self.fs.open(path, "rb") as raw:
                return json.loads((pq.read_metadata(raw).metadata or {})[RECORD_KEY])
        except FileNotFoundError:
            return None
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            logger.warning("%s is not a whole shard of documents (%s).", path, error)
            return None

    def batches(self, split: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Batches of a split's documents in order, or of some columns of them."""
        for shard in self.manifest_and_shards(split)[1]:
            with self.fs.open(f"{self.root}/{shard}", "rb") as raw:
                yield from pq.ParquetFile(raw).iter_batches(BATCH_DOCUMENTS, columns=columns)

    def is_damaged(self, shard: str) -> bool:
        """Whether documents of a shard cannot be read."""
        try:
            with self.fs.open(f"{self.root}/{shard}", "rb") as raw:
                for _ in pq.ParquetFile(raw).iter_batches(BATCH_DOCUMENTS):
                    pass
        except (OSError, pa.ArrowException):
            return True
        return False

    def manifest(self) -> dict | None:
        """The manifest, checked; None where there is none and no run has begun."""
        content = self.content(MANIFEST_NAME)
        if content is None:
            if FORMAT.encode() in (self.content(SETTINGS_NAME) or b""):
                raise ValueError(
                    f"{self.address} has a {SETTINGS_NAME} but no {MANIFEST_NAME}: the run of tokenize_completions.py "
                    "that makes it has not ended. Start the same command again; it goes on where it stopped."
                )
            return None
        path, rewrite = f"{self.address}/{MANIFEST_NAME}", "run the tokenize_completions.py command that made it again"
        try:
            manifest = json.loads(content)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}): {rewrite}.") from error
        found = manifest.get("format") if isinstance(manifest, dict) else None
        if found != FORMAT:
            raise ValueError(
                f"{path} has the format {found!r}, expected {FORMAT!r}: tokenise the completions again with this "
                "version."
            )
        if not all(isinstance(manifest.get(name), kind) for name, kind in FIELDS.items()):
            raise ValueError(f"{path} has not the fields of a manifest: {rewrite}.")
        return manifest

    def manifest_and_shards(self, split: str) -> tuple[dict, list[str]]:
        """The manifest and the names of a split's shards, each of which is the one that the manifest names."""
        manifest = self.manifest()
        if manifest is None:
            raise FileNotFoundError(
                f"{self.address} has no {MANIFEST_NAME}: expected a folder that recipes/tokenize_completions.py wrote."
            )
        files = [file for file in manifest["files"] if split in file["shards"]]
        if not files:
            raise ValueError(
                f"{self.address} holds no document of the split {split!r}: it has {manifest['documents']}. An "
                "evaluation split is made by --eval_fraction."
            )
        shards = [file["shards"][split] for file in files]
        with explained(self.address, "Reading"), ThreadPoolExecutor(16) as threads:
            records = list(threads.map(self.record, shards))
        for shard, file, record in zip(shards, files, records, strict=True):
            if record != file:
                raise ValueError(
                    f"{self.root}/{shard} is missing, damaged or not the one that the manifest names. {self.advice}"
                )
        return manifest, shards

    @property
    def advice(self) -> str:
        return (
            f"Start the tokenize_completions.py command that made {self.address} again: it makes what is damaged anew."
        )

    def finished(self, files: list[SourceFile]) -> dict[str, dict[str, Any]]:
        """Records of the files that earlier runs finished, of which every shard is there and nothing has changed."""

        def whole_record(file: SourceFile) -> dict[str, Any] | None:
            record = self.record(shard_name(file, "train"))
            if record is None or any(record[name] != value for name, value in _identity(file).items()):
                return None
            others = [shard for split, shard in record["shards"].items() if split != "train"]
            return record if all(self.record(shard) == record for shard in others) else None

        with explained(self.root, "Listing"):
            folder = f"{self.root}/train"
            present = set(self.fs.find(folder)) if self.fs.exists(folder) else set()
        done = [file for file in files if f"{self.root}/{shard_name(file, 'train')}" in present]
        with ThreadPoolExecutor(16) as threads:
            records = list(threads.map(whole_record, done))
        return {file.name: record for file, record in zip(done, records, strict=True) if record is not None}

    # Writing

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        # Each store has its own errors for a full disk, a refused key or a lost connection.
        try:
            yield
        except Exception as error:
            raise OutputError(
                f"Writing to {self.root} failed ({type(error).__name__}: {error}). What is finished stays; free space "
                "or mend the access, and start the same command again."
            ) from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other run on this machine writes into the folder meanwhile: it would remove what is aside."""
        if not self.is_local:
            yield
            return
        with self.named_errors():
            os.makedirs(self.root, exist_ok=True)
        with only_writer(self.root, "output"):
            yield

    def temporary(self) -> str:
        """A path aside: on a local disk in the output folder, so that moving it is one step."""
        handle, path = tempfile.mkstemp(".tmp", "shard-", self.root if self.is_local else None)
        os.close(handle)
        return path

    def publish(self, temporary: str, path: str) -> None:
        """Moves a file to its place."""
        if self.is_local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(temporary, path)
        else:
            self.fs.put_file(temporary, path)
            os.unlink(temporary)

    def clean(self) -> None:
        """Removes what killed runs left aside."""
        for left in Path(self.root).glob("shard-*.tmp") if self.is_local else ():
            left.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        with self.named_errors():
            if self.fs.exists(f"{self.root}/{name}"):
                self.fs.rm_file(f"{self.root}/{name}")

    def write_json(self, name: str, value: Any) -> None:
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        with self.named_errors():
            temporary = self.temporary()
            try:
                # Half a surrogate pair stays JSON's escape of it.
                Path(temporary).write_bytes(text.encode("utf-8", "backslashreplace"))
                self.publish(temporary, f"{self.root}/{name}")
            finally:
                Path(temporary).unlink(missing_ok=True)

    def write_shards(self, file: SourceFile, chunks: Iterable[Placed], counts: FileCounts) -> dict[str, Any]:
        """Writes the documents of a file, each chunk as a row group per split, and returns the file's record.

        Where a chunk cannot be made or written, nothing of the file stays.
        """
        writers: dict[str, tuple[str, pq.ParquetWriter]] = {}

        def writer(split: str) -> pq.ParquetWriter:
            if split not in writers:
                path = self.temporary()
                options: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["source", "language"]}
                writers[split] = path, pq.ParquetWriter(path, SCHEMA, **options)
            return writers[split][1]

        try:
            for placed in chunks:
                with self.named_errors():
                    for split in sorted({origin.split for _, origin in placed}):
                        part = [(document, origin) for document, origin in placed if origin.split == split]
                        writer(split).write_table(_table(part), row_group_size=len(part))
            with self.named_errors():
                writer("train")
                return self._commit(file, writers, counts)
        finally:
            for path, open_writer in writers.values():
                with suppress(OSError):
                    open_writer.close()
                Path(path).unlink(missing_ok=True)

    def _commit(
        self, file: SourceFile, writers: dict[str, tuple[str, pq.ParquetWriter]], counts: FileCounts
    ) -> dict[str, Any]:
        """Moves the shards to their places, the training shard last: with its record it says the file is done."""
        shards = {split: shard_name(file, split) for split in sorted(counts.documents)}
        record = {**_identity(file), "shards": shards, **counts.as_dict()}
        for split in sorted(writers, key=lambda split: split == "train"):
            temporary, writer = writers[split]
            writer.add_key_value_metadata({RECORD_KEY: json.dumps(record)})
            writer.close()
            self.publish(temporary, f"{self.root}/{shard_name(file, split)}")
        # JSON turns the keys of the histogram into strings, and a record must be the same fresh and read back.
        return json.loads(json.dumps(record))


def read_manifest(address: Address, storage_options: StorageOptions = None) -> dict | None:
    """The manifest of a folder of documents, or None where there is none.

    Raises:
        ValueError: The manifest has another format, or the run that makes the folder has not ended.
    """
    return DocumentFolder(address, storage_options).manifest()


def thinking_mode(manifest: dict[str, Any]) -> bool | str | None:
    """The `enable_thinking` of the documents, "inferred" where it followed each answer, None for the default."""
    options = manifest["options"]
    return "inferred" if options["infer_thinking"] else options["enable_thinking"]


def open_documents(
    address: Address, split: str = "train", storage_options: StorageOptions = None, cache_dir: str | None = None
) -> Dataset:
    """Opens a folder of documents, memory mapped; a remote one is copied into the cache of `datasets` once.

    Args:
        address: Folder or fsspec address that `tokenize_files` wrote; `storage_options` are for its file system.
        split: "train" or "eval".
        cache_dir: Folder of the memory-mapped copy; by default that of `datasets`.

    Raises:
        FileNotFoundError: The folder has no manifest.
        ValueError: It has no such split, or no document in it, or a shard is damaged or of another run.
    """
    folder = DocumentFolder(address, storage_options)
    manifest, shards = folder.manifest_and_shards(split)
    if not manifest["complete"]:
        logger.warning("%s lacks rows: %d of its source files could not be read.", address, len(manifest["failed"]))
    # Names are taken for patterns.
    files = [glob.escape(f"{folder.address.rstrip('/')}/{shard}") for shard in shards]
    options = dict(storage_options or {})
    try:
        data = load_dataset(
            "parquet", data_files={split: files}, split=split, storage_options=options, cache_dir=cache_dir
        )
    except DatasetGenerationError as error:
        damaged = ", ".join(f"{folder.root}/{shard}" for shard in shards if folder.is_damaged(shard))
        raise ValueError(
            f"Shards of {address} are damaged within ({describe(error.__cause__ or error)}): "
            f"{damaged or 'which of them cannot be told'}. Delete them. {folder.advice}"
        ) from error
    identity = {name: manifest[name] for name in IDENTITY_FIELDS}
    identity["thinking"] = thinking_mode(manifest)
    identity["manifest_hash"] = _hash(json.dumps(manifest, sort_keys=True))
    data.info.description = json.dumps(identity)
    return data


def stored_lengths(address: Address, split: str = "train", storage_options: StorageOptions = None) -> np.ndarray:
    """The number of tokens of each document of a folder, int64 [M], read shard by shard and copied nowhere."""
    batches = DocumentFolder(address, storage_options).batches(split, ["input_ids"])
    return np.concatenate([pc.list_value_length(batch.column(0)).to_numpy() for batch in batches]).astype(np.int64)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The fields of a manifest that belong to the tokenizer.

    Two tokenizers share the vocabulary's hash if and only if their ids spell the same tokens.
    """
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    identity = {
        "format": FORMAT,
        "vocabulary_hash": _hash(json.dumps(vocabulary)),
        "vocabulary_size": len(tokenizer),
        "template_hash": _hash(json.dumps(tokenizer.chat_template, sort_keys=True)),
    }
    if not tokenizer.is_fast:
        return {**identity, "tokenizer_hash": identity["vocabulary_hash"]}
    # How texts become ids also depends on merges and normalisation.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return {**identity, "tokenizer_hash": _hash(backend.to_str())}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def manifest_hashes(documents: Any) -> list[str]:
    """Hashes of the manifests that documents come from, sorted; none for other data sets."""
    return sorted({identity["manifest_hash"] for identity in _identities(documents)})


def _identities(documents: Any) -> list[dict]:
    """What the manifests say that documents come from, none twice."""
    # `concatenate_datasets` joins the descriptions of its parts by empty lines.
    parts = (documents.info.description or "").split("\n\n") if isinstance(documents, Dataset) else []
    found = dict.fromkeys(part for part in parts if part.startswith('{"format": "dflash_hf documents'))
    return [json.loads(part) for part in found]


def check_documents_fit(
    documents: Any, tokenizer: PreTrainedTokenizerBase | None, allow_other_template: bool = False
) -> None:
    """Refuses documents whose ids mean something else to a tokenizer, and warns of another template (case DT3).

    Args:
        documents: What `open_documents` gave, or what was selected, shuffled or concatenated from it. Data sets
            without a manifest are passed over.
        tokenizer: The target's tokenizer; without one nothing can be compared.
        allow_other_template: Whether documents written by another chat template are warned of and not refused.
    """
    if tokenizer is None:
        return
    for identity in _identities(documents):
        own = tokenizer_identity(tokenizer)
        if identity["vocabulary_hash"] != own["vocabulary_hash"]:
            raise ValueError(
                f"The documents were made with a tokenizer of {identity['vocabulary_size']} tokens, and the target's "
                f"has {own['vocabulary_size']}; their ids do not mean the same. Tokenise the completions with the "
                "target's own tokenizer."
            )
        if identity["template_hash"] != own["template_hash"]:
            message = "The documents were written by another chat template than the target's tokenizer has, so the "
            message += "drafter learns prompts that the target may never see."
            if not allow_other_template:
                raise ValueError(f"{message} Tokenise again, or set allow_other_template=True.")
            logger.warning("%s It was allowed.", message)


def load_documents(
    address: Address,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "train",
    *,
    storage_options: StorageOptions = None,
    allow_other_template: bool = False,
    **tokenize_kwargs: Any,
) -> Dataset:
    """Opens a folder of documents, known by its manifest, or reads and tokenises completions on the spot.

    Args:
        address: Folder or fsspec address that `recipes/tokenize_completions.py` wrote, or a file or folder of
            completions that fits in memory; `storage_options` are for its file system.
        tokenizer: The target's tokenizer.
        split: "train" or "eval" of a folder of documents; completions are all "train".
        allow_other_template: As in `check_documents_fit`.
        **tokenize_kwargs: Arguments of `tokenize_completions`, for completions alone.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: The documents do not fit the tokenizer or `enable_thinking`, there is no such split, or a
            completion cannot be used.
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
    thinking, stored = tokenize_kwargs.get("enable_thinking"), thinking_mode(manifest)
    if thinking not in (None, stored):
        raise ValueError(
            f"enable_thinking={thinking} has no effect on {address}, which was tokenised with "
            f"enable_thinking={stored}. Leave it out, or tokenise anew with --enable_thinking {str(thinking).lower()}."
        )
    documents = open_documents(address, split, storage_options)
    check_documents_fit(documents, tokenizer, allow_other_template)
    return documents


# --- The job over files: by several processes, each on one file after the other, resumable.


SUMMED = ("rows", "tokens", "supervised_tokens", "truncated", "repeated_tokens")
COUNTED = ("documents", "dropped", "lengths", "template_texts", "models")


def tokenize_files(
    address: Address,
    output: Address,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions | None = None,
    *,
    storage_options: StorageOptions = None,
    output_storage_options: StorageOptions = None,
    num_proc: int = 1,
    retries: int = 3,
    retry_wait: float = 1.0,
    disable_tqdm: bool = False,
) -> dict[str, Any]:
    """Tokenises all files of rows at an address into a folder of documents; started again, it resumes.

    Args:
        address: File, folder or pattern, local or of any fsspec file system; see `list_files`.
        output: Folder of the documents, local or of any fsspec file system.
        tokenizer: The target's tokenizer, with its chat template.
        options: What decides the documents.
        storage_options: Arguments of the address's file system.
        output_storage_options: Arguments of the output's file system; by default those of the address.
        num_proc: Processes, each on a file of its own.
        retries: How often a file that cannot be read is tried again, after `retry_wait` seconds, then twice that ...
        retry_wait: Seconds before the first retry.
        disable_tqdm: Whether to hide the progress bar.

    Returns:
        The manifest. `manifest["failed"]` names the files that could not be read; all others are finished.

    Raises:
        FileNotFoundError: Nothing to read at the address.
        ValueError: The output holds documents of other options, or the tokenizer cannot render chats.
        OutputError: A shard cannot be written.
    """
    options = options or TokenizeOptions()
    options.chat_format(tokenizer)
    if "strftime_now" in str(tokenizer.chat_template) and not options.template_kwargs:
        logger.warning(
            "The chat template writes today's date where it is not given one, so a run that goes on tomorrow would "
            "write another: pass the template's variable, such as template_kwargs={'date_string': '26 Jul 2024'}."
        )
    if output_storage_options is None:
        output_storage_options = storage_options
    storage = dict(storage_options or {}), dict(output_storage_options or {})
    job = Job(os.fspath(address), os.fspath(output), tokenizer, options, *storage, retries, retry_wait)
    folder = DocumentFolder(output, output_storage_options)
    fs, root = open_filesystem(address, storage_options)
    if fs.protocol == folder.fs.protocol and f"{folder.root}/".startswith(f"{root.partition('*')[0].rstrip('/')}/"):
        raise ValueError(
            f"The output {output} lies within {address}, so its shards would be read as completions by the next run. "
            "Name a folder beside it."
        )
    files = list_files(address, storage_options)
    with folder.alone():
        return _tokenize(job, folder, files, num_proc, disable_tqdm)


def _tokenize(
    job: "Job", folder: DocumentFolder, files: list[SourceFile], num_proc: int, disable_tqdm: bool
) -> dict[str, Any]:
    # What the bytes of the output depend on besides the files.
    settings = {
        **tokenizer_identity(job.tokenizer),
        "completions": job.address.rstrip("/") if "://" in job.address else os.path.normpath(job.address),
        "options": dataclasses.asdict(job.options),
    }
    _check_settings(folder, settings)
    folder.clean()
    records = folder.finished(files)
    todo = [file for file in files if file.name not in records]
    failed = {}
    if todo:
        # Until the run ends, what an earlier one said of the folder does not hold.
        folder.remove(MANIFEST_NAME)
    total = sum(file.size for file in todo)
    with tqdm(total=total, desc="Tokenizing", unit="B", unit_scale=True, disable=disable_tqdm) as bar:
        if records:
            bar.write(f"{len(records)} of {len(files)} files are finished already.", file=sys.stderr)
        progress = FilesProgress(bar, len(todo))
        for file, result in work_on(job, todo, min(num_proc, len(todo)), progress):
            if isinstance(result, SourceError):
                failed[file.name] = str(result)
            else:
                records[file.name] = result
            progress.finished += 1
            progress(0, 0)
    folder.clean()
    manifest = _manifest(settings, [records[file.name] for file in files if file.name in records], failed)
    folder.write_json(MANIFEST_NAME, manifest)
    return manifest


def _check_settings(folder: DocumentFolder, settings: dict[str, Any]) -> None:
    """Writes the settings of a new folder; refuses a folder of other settings."""
    content = folder.content(SETTINGS_NAME)
    if content is None:
        folder.write_json(SETTINGS_NAME, settings)
        return
    try:
        earlier = json.loads(content)
        old = {**earlier, **earlier["options"]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder.address}/{SETTINGS_NAME}, which says how the documents there were made, cannot be read "
            f"({type(error).__name__}: {error}). If this very command made them, remove that file; otherwise name "
            "another output."
        ) from error
    now = {**settings, **settings["options"]}
    changed = [
        f"{key}: {old.get(key)!r} then, {value!r} now"
        for key, value in now.items()
        if key != "options" and value != old.get(key)
    ]
    if changed:
        raise ValueError(
            f"{folder.address} holds documents that were made otherwise ({'; '.join(changed)}). Give the same options "
            "to go on, or another output."
        )


def _manifest(settings: dict[str, Any], records: list[dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    totals: dict[str, Any] = {name: sum(record[name] for record in records) for name in SUMMED}
    for name in COUNTED:
        counter: Counter = Counter()
        for record in records:
            # Records of an earlier version count no models.
            counter.update(record.get(name, {}))
        # Lengths are numbers, which JSON has made texts.
        totals[name] = {key: counter[key] for key in sorted(counter, key=int if name == "lengths" else str)}
    return {**settings, "complete": not failed, "failed": dict(sorted(failed.items())), **totals, "files": records}


class FilesProgress:
    """A bar of bytes with files and tokens per second."""

    def __init__(self, bar: tqdm, num_files: int):
        self.bar, self.num_files, self.finished, self.tokens = bar, num_files, 0, 0
        self.start = time.monotonic()

    def __call__(self, num_bytes: int, num_tokens: int) -> None:
        self.tokens += num_tokens
        rate = self.tokens / max(time.monotonic() - self.start, 1e-9)
        self.bar.set_postfix_str(f"{self.finished}/{self.num_files} files, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update(num_bytes)


@dataclass(frozen=True)
class Job:
    """Makes the documents of one file after another."""

    address: str
    output: str
    tokenizer: PreTrainedTokenizerBase
    options: TokenizeOptions
    storage_options: dict[str, Any]
    output_storage_options: dict[str, Any]
    retries: int
    retry_wait: float

    def result(self, file: SourceFile, on_progress: OnProgress) -> dict[str, Any] | SourceError:
        """The file's record, or, after some retries, the error that keeps it from being read."""
        for attempt in range(self.retries + 1):
            try:
                return self._write(file, on_progress)
            except SourceError as error:
                failure = error
            if attempt < self.retries:
                time.sleep(self.retry_wait * 2**attempt)
        return failure

    def _write(self, file: SourceFile, on_progress: OnProgress) -> dict[str, Any]:
        # Opened by the process that uses them: connections do not survive a fork.
        fs, _ = open_filesystem(self.address, self.storage_options)
        folder = DocumentFolder(self.output, self.output_storage_options)
        counts, told = FileCounts(), [0, 0]

        def report(num_bytes: int, num_tokens: int) -> None:
            on_progress(num_bytes - told[0], num_tokens - told[1])
            told[:] = num_bytes, num_tokens

        def rows() -> Iterator[tuple[str, dict | RowError]]:
            for place, row, position in read_rows(fs, file):
                report(position, counts.tokens)
                yield place, row

        stem = file.label.rpartition("/")[2].partition(".")[0]
        row_tokenizer = RowTokenizer(self.options.chat_format(self.tokenizer), self.options, counts, stem)
        try:
            record = folder.write_shards(file, row_tokenizer.documents(rows()), counts)
        except SourceError:
            report(0, 0)
            raise
        report(file.size, counts.tokens)
        return record


def work_on(
    job: Job, files: list[SourceFile], num_proc: int, on_progress: OnProgress
) -> Iterator[tuple[SourceFile, dict[str, Any] | SourceError]]:
    """Each file with its record, or with the error that kept it from being read, in the order they end.

    Up to one process is this one.
    """
    if num_proc <= 1:
        for file in files:
            yield file, job.result(file, on_progress)
        return
    # Forked processes start at once and share the tokenizer; where forking is unsafe they import all anew.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    counters = context.Array("q", 2)
    # The processes share out the cores; threads of the tokenizer within each would fight for them.
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = ProcessPoolExecutor(num_proc, context, _start_worker, (job, counters, os.getpid()))
    try:
        pending = {pool.submit(_work, file): file for file in files}
        seen = [0, 0]
        while pending:
            done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            now: list[int] = counters[:]
            on_progress(now[0] - seen[0], now[1] - seen[1])
            seen = now
            for future in done:
                yield pending.pop(future), future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


_worker: list[tuple[Job, OnProgress]] = []


def _start_worker(job: Job, counters: Any, parent: int) -> None:
    def add(num_bytes: int, num_tokens: int) -> None:
        with counters.get_lock():
            counters[0] += num_bytes
            counters[1] += num_tokens

    # A killed parent tells nobody: without this its workers would wait for work for ever.
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _worker[:] = [(job, add)]


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def _work(file: SourceFile) -> dict[str, Any] | SourceError:
    job, on_progress = _worker[0]
    return job.result(file, on_progress)


# --- What a person looks at after tokenising: counts, reasons, lengths, and documents with the supervised part marked.


MARKS = ("⟦", "⟧")
BAR_WIDTH = 40


def format_summary(manifest: Mapping[str, Any]) -> str:
    """The counts of a manifest as text: rows in and out by reason, tokens, and a histogram of the lengths."""
    documents, tokens = sum(manifest["documents"].values()), manifest["tokens"]
    splits = ", ".join(f"{count:,} {split}" for split, count in manifest["documents"].items())
    lines = [
        f"{manifest['rows']:,} rows of {len(manifest['files']):,} files gave {documents:,} documents "
        f"({splits or 'none'})",
        f"{tokens:,} tokens, {manifest['supervised_tokens']:,} of them supervised "
        f"({manifest['supervised_tokens'] / max(tokens, 1):.1%}); {manifest['truncated']:,} documents are cut off",
    ]
    if repeated := manifest["repeated_tokens"]:
        lines.append(f"{repeated:,} tokens ({repeated / tokens:.1%}) are context that windows repeat")
    examples: dict[str, str] = {}
    for file in manifest["files"]:
        for reason, found in file["dropped_examples"].items():
            examples.setdefault(reason, found[0])
    for reason, count in Counter(manifest["dropped"]).most_common():
        lines.append(f"dropped {count:,}: {reason}, such as {examples[reason]}")
    for text, count in Counter(manifest["template_texts"]).most_common(1):
        lines.append(
            f"in {count:,} answers the template wrote {text!r} before the content, and it is supervised as generated "
            "text: if the target did not generate it, pass the enable_thinking the answers were generated with"
        )
    if len(models := manifest.get("models", {})) > 1:
        by = ", ".join(f"{name} {count:,}" for name, count in Counter(models).most_common())
        lines.append(
            f"the answers are of several models ({by}): a drafter learns from those of its own target alone. Unless "
            "these are names of one, leave the others out, or let recipes/generate_completions.py answer them again"
        )
    lines += [f"FAILED {name}: {error}" for name, error in manifest["failed"].items()]
    return "\n".join([*lines, *_histogram(manifest["lengths"])])


def _histogram(lengths: Mapping[str, int]) -> list[str]:
    # At most 16 bars, whatever the longest document.
    width = HISTOGRAM_BIN * (max(map(int, lengths), default=0) // HISTOGRAM_BIN // 16 + 1)
    bars: Counter[int] = Counter()
    for start, count in lengths.items():
        bars[int(start) // width * width] += count
    most = max(bars.values(), default=1)
    return [
        f"{start:>7,} to {start + width - 1:>7,} tokens "
        f"{'#' * round(BAR_WIDTH * bars[start] / most):<{BAR_WIDTH}} {bars[start]:,}"
        for start in range(0, max(bars, default=-width) + width, width)
    ]


def plot_lengths(manifest: Mapping[str, Any], path: str | os.PathLike) -> None:
    """Draws the histogram of document lengths into an image file; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    starts = [int(start) for start in manifest["lengths"]]
    axes.bar(starts, list(manifest["lengths"].values()), width=HISTOGRAM_BIN, align="edge")
    axes.set(xlabel="tokens of a document", ylabel="documents", title="Lengths of the documents")
    figure.savefig(path)


def marked_examples(
    address: Address,
    tokenizer: PreTrainedTokenizerBase,
    count: int = 3,
    characters: int = 1200,
    storage_options: StorageOptions = None,
) -> list[str]:
    """Texts of the first documents with what is supervised between ⟦ and ⟧; long stretches lose their middle.

    Args:
        address: Folder of documents; `storage_options` are for its file system.
        tokenizer: The target's tokenizer.
        count: How many documents.
        characters: Longest stretch that is shown whole.
    """
    batches = DocumentFolder(address, storage_options).batches("train")
    documents = (row for batch in batches for row in batch.to_pylist())

    def text(ids: list[int]) -> str:
        whole, half = str(tokenizer.decode(ids)), characters // 2
        return whole if len(whole) <= characters else f"{whole[:half]} [...] {whole[-half:]}"

    texts = []
    for document in islice(documents, count):
        ids, end, parts = document["input_ids"], 0, []
        for start, stop in document["supervised_spans"]:
            parts += [text(ids[end:start]), MARKS[0], text(ids[start:stop]), MARKS[1]]
            end = stop
        texts.append("".join([*parts, text(ids[end:])]))
    return texts
