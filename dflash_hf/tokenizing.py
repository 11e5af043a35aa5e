# SPDX-License-Identifier: Apache-2.0
"""From rows to documents: in memory, or into a folder that a killed job goes on with."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from fsspec.implementations.local import LocalFileSystem
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .chats import (
    RESERVED_TEMPLATE_KWARGS,
    Chat,
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
from .rendering import ChatFormat, Document, Draft, Turn, cut, drafts_of, windows
from .writing import only_writer


# --- Chats become documents: token ids, and the spans of them that the target itself has generated.


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


# --- Shards of documents: Parquet files that appear whole or not at all, on a local disk or in an object store.


RECORD_KEY = b"dflash_hf"

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


class OutputError(OSError):
    """A shard cannot be written; no other will be, so the run ends."""


def shard_name(file: SourceFile, split: str) -> str:
    """A shard's place in the folder: the name of its file, without what URLs and patterns take for something else."""
    name = re.sub(r"[^\w./=+ -]", lambda found: quote(found[0], safe="", errors="surrogateescape"), file.name)
    return f"{split}/{name}.parquet"


@dataclass(frozen=True)
class Placed:
    """A document, and where it is from."""

    document: Document
    row: int
    source: str
    language: str | None


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards below a folder of any file system: aside first, then moved to their place in one step."""

    fs: fsspec.AbstractFileSystem
    root: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other run on this machine writes into the folder meanwhile: it would remove what is aside."""
        if not self.is_local:
            yield
            return
        with _named_errors(self.root):
            os.makedirs(self.root, exist_ok=True)
        with only_writer(self.root, "output"):
            yield

    def open(self, file: SourceFile) -> "OpenShards":
        return OpenShards(self, file)

    def shard_path(self, file: SourceFile, split: str) -> str:
        return f"{self.root}/{shard_name(file, split)}"

    def temporary(self) -> str:
        """A path aside: on a local disk in the output folder, so that moving it is one step."""
        if self.is_local:
            os.makedirs(self.root, exist_ok=True)
        handle, path = tempfile.mkstemp(".tmp", "shard-", self.root if self.is_local else None)
        os.close(handle)
        return path

    def publish(self, temporary: str, path: str) -> None:
        if self.is_local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(temporary, path)
        else:
            self.fs.put_file(temporary, path)
            os.unlink(temporary)

    def write_json(self, name: str, value: Any) -> None:
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        with _named_errors(self.root):
            temporary = self.temporary()
            try:
                # Half a surrogate pair stays JSON's escape of it.
                Path(temporary).write_bytes(text.encode("utf-8", "backslashreplace"))
                self.publish(temporary, f"{self.root}/{name}")
            finally:
                Path(temporary).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        with _named_errors(self.root):
            if self.fs.exists(f"{self.root}/{name}"):
                self.fs.rm_file(f"{self.root}/{name}")

    def clean(self) -> None:
        """Removes what killed runs left aside."""
        if self.is_local:
            for left in Path(self.root).glob("shard-*.tmp"):
                left.unlink(missing_ok=True)


class OpenShards:
    """The shards of one file while they are written; left without `commit`, nothing of them stays."""

    def __init__(self, output: ShardWriter, file: SourceFile):
        self.output = output
        self.file = file
        self.writers: dict[str, tuple[str, pq.ParquetWriter]] = {}

    def __enter__(self) -> "OpenShards":
        return self

    def append(self, split: str, documents: list[Placed]) -> None:
        """Writes documents as one row group."""
        with _named_errors(self.output.root):
            self._writer(split).write_table(_table(documents), row_group_size=len(documents))

    def commit(self, documents: Mapping[str, int], counts: Mapping[str, Any]) -> dict[str, Any]:
        """Moves the shards to their places, the training shard last: with its record it says the file is done."""
        with _named_errors(self.output.root):
            self._writer("train")
            names = {split: shard_name(self.file, split) for split, count in documents.items() if count}
            source = {"name": self.file.name, "size": self.file.size, "version": self.file.version}
            record = {**source, "shards": dict(sorted(names.items())), **counts}
            for split in sorted(self.writers, key=lambda split: split == "train"):
                temporary, writer = self.writers[split]
                writer.add_key_value_metadata({RECORD_KEY: json.dumps(record)})
                writer.close()
                self.output.publish(temporary, self.output.shard_path(self.file, split))
            # JSON turns the keys of the histogram into strings, and a record must be the same fresh and read back.
            return json.loads(json.dumps(record))

    def _writer(self, split: str) -> pq.ParquetWriter:
        if split not in self.writers:
            path = self.output.temporary()
            self.writers[split] = (
                path,
                pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=["source", "language"]),
            )
        return self.writers[split][1]

    def __exit__(self, *exception: Any) -> None:
        for path, writer in self.writers.values():
            with suppress(OSError):
                writer.close()
            Path(path).unlink(missing_ok=True)


@contextmanager
def _named_errors(root: str) -> Iterator[None]:
    # Each store has its own errors for a full disk, a refused key or a lost connection.
    try:
        yield
    except Exception as error:
        raise OutputError(
            f"Writing to {root} failed ({type(error).__name__}: {error}). What is finished stays; free space or mend "
            "the access, and start the same command again."
        ) from error


def read_record(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """The record of a finished shard, or None where there is no such shard, or none that can be read."""
    try:
        with fs.open(path, "rb") as raw:
            return json.loads((pq.read_metadata(raw).metadata or {})[RECORD_KEY])
    except FileNotFoundError:
        return None
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        logger.warning("%s is not a whole shard of documents (%s).", path, error)
        return None


def _table(placed: list[Placed]) -> pa.Table:
    """Documents in Arrow's columns, made from arrays and not from Python lists of ids."""
    ids = [one.document.input_ids for one in placed]
    spans = [one.document.supervised_spans for one in placed]
    pairs = np.array([pair for document in spans for pair in document], dtype=np.int32).reshape(-1, 2)
    inner = pa.ListArray.from_arrays(np.arange(len(pairs) + 1, dtype=np.int32) * 2, pa.array(pairs.ravel()))
    columns = [
        pa.ListArray.from_arrays(_offsets([len(i) for i in ids]), pa.array(np.concatenate(ids))),
        pa.ListArray.from_arrays(_offsets([len(s) for s in spans]), inner),
        pa.array([one.row for one in placed], pa.int64()),
        pa.array([one.document.is_truncated for one in placed], pa.bool_()),
        pa.array([one.source for one in placed], pa.string()),
        pa.array([one.language for one in placed], pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


# --- What a folder of documents says of itself, and opening it for training.


MANIFEST_NAME = "manifest.json"
# Written before the first shard: what the documents of a folder depend on besides the files.
SETTINGS_NAME = "settings.json"
# Documents of a shard that are held at once.
BATCH_DOCUMENTS = 256

FORMAT = "dflash_hf documents 1"
# Fields without which it is no manifest, and what they hold.
FIELDS = {"files": list, "documents": dict, "complete": bool, "failed": dict, "vocabulary_hash": str}
# Fields that say what the ids mean and how the text was written; they travel with the opened data set.
IDENTITY_FIELDS = ("format", "vocabulary_hash", "vocabulary_size", "template_hash")


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what each token id means: two tokenizers share it if and only if their ids spell the same tokens."""
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return _hash(json.dumps(vocabulary))


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the chat template."""
    return _hash(json.dumps(tokenizer.chat_template, sort_keys=True))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of how texts become ids, which also depends on merges and normalisation."""
    if not tokenizer.is_fast:
        return vocabulary_hash(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return _hash(backend.to_str())


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The fields of a manifest that belong to the tokenizer."""
    return {
        "format": FORMAT,
        "vocabulary_hash": vocabulary_hash(tokenizer),
        "vocabulary_size": len(tokenizer),
        "template_hash": template_hash(tokenizer),
    }


def read_manifest(address: str | os.PathLike, storage_options: Mapping[str, Any] | None = None) -> dict | None:
    """The manifest of a folder of documents, or None where there is none.

    Raises:
        ValueError: The manifest is of another kind or version, or the run that makes the folder has not ended.
    """
    fs, root = open_filesystem(address, storage_options)
    path = f"{root.rstrip('/')}/{MANIFEST_NAME}"
    with explained(address, "Reading"):
        content = fs.cat_file(path) if fs.exists(path) else None
        settings = f"{root.rstrip('/')}/{SETTINGS_NAME}"
        begun = fs.cat_file(settings) if content is None and fs.exists(settings) else b""
    if FORMAT.encode() in begun:
        raise ValueError(
            f"{address} has a {SETTINGS_NAME} but no {MANIFEST_NAME}: the run of tokenize_completions.py that makes "
            "it has not ended. Start the same command again; it goes on where it stopped."
        )
    if content is None:
        return None
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise ValueError(
            f"{address}/{MANIFEST_NAME} is not JSON ({error}): run the tokenize_completions.py command that made the "
            "folder again, which writes it anew."
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        manifest = manifest if isinstance(manifest, dict) else {}
        raise ValueError(
            f"{address}/{MANIFEST_NAME} has the format {manifest.get('format')!r}, expected {FORMAT!r}: tokenise the "
            "completions again with this version."
        )
    if not all(isinstance(manifest.get(name), kind) for name, kind in FIELDS.items()):
        raise ValueError(
            f"{address}/{MANIFEST_NAME} has not the fields of a manifest: run the tokenize_completions.py command "
            "that made the folder again, which writes it anew."
        )
    return manifest


def thinking_mode(manifest: dict[str, Any]) -> bool | str | None:
    """The `enable_thinking` of the documents, "inferred" where it followed each answer, None for the default."""
    options = manifest["options"]
    return "inferred" if options["infer_thinking"] else options["enable_thinking"]


def open_documents(
    address: str | os.PathLike,
    split: str = "train",
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
) -> Dataset:
    """Opens a folder of documents, memory mapped; a remote one is copied into the cache of `datasets` once.

    Args:
        address: Folder or fsspec address that `tokenize_files` wrote.
        split: "train" or "eval".
        storage_options: Arguments of the address's file system.
        cache_dir: Folder of the memory-mapped copy; by default that of `datasets`.

    Raises:
        FileNotFoundError: The folder has no manifest.
        ValueError: It has no such split, or no document in it, or a shard is damaged or of another run.
    """
    manifest, shards = _manifest_and_shards(address, split, storage_options)
    if not manifest["complete"]:
        logger.warning(
            "%s is not complete: %d of its source files could not be read, and their rows are missing.",
            address,
            len(manifest["failed"]),
        )
    base = os.fspath(address).rstrip("/")
    try:
        data = load_dataset(
            "parquet",
            # Names are taken for patterns.
            data_files={split: [glob.escape(f"{base}/{shard}") for shard in shards]},
            split=split,
            storage_options=dict(storage_options or {}),
            cache_dir=cache_dir,
        )
    except DatasetGenerationError as error:
        damaged = ", ".join(_damaged(address, shards, storage_options)) or "which of them cannot be told"
        raise ValueError(
            f"Shards of {address} are damaged within ({describe(error.__cause__ or error)}): {damaged}. Delete them. "
            f"{_again(address)}"
        ) from error
    identity = {name: manifest[name] for name in IDENTITY_FIELDS}
    identity["thinking"] = thinking_mode(manifest)
    data.info.description = json.dumps({**identity, "manifest_hash": _hash(json.dumps(manifest, sort_keys=True))})
    return data


def iterate_documents(
    address: str | os.PathLike,
    split: str = "train",
    storage_options: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of documents in order, read shard by shard and copied nowhere.

    Args:
        address, split, storage_options: As in `open_documents`.
        columns: Those that are read; by default all.

    Raises:
        FileNotFoundError, ValueError: As `open_documents`.
    """
    _, shards = _manifest_and_shards(address, split, storage_options)
    fs, root = open_filesystem(address, storage_options)
    for shard in shards:
        with fs.open(f"{root.rstrip('/')}/{shard}", "rb") as raw:
            yield from pq.ParquetFile(raw).iter_batches(BATCH_DOCUMENTS, columns=columns)


def stored_lengths(
    address: str | os.PathLike, split: str = "train", storage_options: Mapping[str, Any] | None = None
) -> np.ndarray:
    """The number of tokens of each document of a folder, int64 [M]; arguments as in `open_documents`."""
    batches = iterate_documents(address, split, storage_options, ["input_ids"])
    return np.concatenate([pc.list_value_length(batch.column(0)).to_numpy() for batch in batches]).astype(np.int64)


def _manifest_and_shards(
    address: str | os.PathLike, split: str, storage_options: Mapping[str, Any] | None
) -> tuple[dict, list[str]]:
    manifest = read_manifest(address, storage_options)
    if manifest is None:
        raise FileNotFoundError(
            f"{address} has no {MANIFEST_NAME}: expected a folder that recipes/tokenize_completions.py wrote."
        )
    shards = [file["shards"][split] for file in manifest["files"] if split in file["shards"]]
    if not shards:
        raise ValueError(
            f"{address} holds no document of the split {split!r}: it has {manifest['documents']}. An evaluation split "
            "is made by --eval_fraction."
        )
    _check_shards(address, manifest, split, storage_options)
    return manifest, shards


def _check_shards(
    address: str | os.PathLike, manifest: dict, split: str, storage_options: Mapping[str, Any] | None
) -> None:
    """Refuse shards that are not those of which the manifest tells: missing, cut off, or of another run."""
    fs, root = open_filesystem(address, storage_options)
    files = [file for file in manifest["files"] if split in file["shards"]]
    paths = [f"{root.rstrip('/')}/{file['shards'][split]}" for file in files]
    with explained(address, "Reading"), ThreadPoolExecutor(16) as threads:
        records = list(threads.map(lambda path: read_record(fs, path), paths))
    for path, file, record in zip(paths, files, records, strict=True):
        if record != file:
            raise ValueError(f"{path} is missing, damaged or not the one that the manifest names. {_again(address)}")


def _damaged(
    address: str | os.PathLike, shards: list[str], storage_options: Mapping[str, Any] | None
) -> Iterator[str]:
    """Paths of shards whose documents cannot all be read."""
    fs, root = open_filesystem(address, storage_options)
    for shard in shards:
        path = f"{root.rstrip('/')}/{shard}"
        try:
            with fs.open(path, "rb") as raw:
                for _ in pq.ParquetFile(raw).iter_batches(BATCH_DOCUMENTS):
                    pass
        except (OSError, pa.ArrowException):
            yield path


def _again(address: str | os.PathLike) -> str:
    return f"Start the tokenize_completions.py command that made {address} again: it makes what is damaged anew."


def manifest_hashes(documents: Any) -> list[str]:
    """Hashes of the manifests that documents come from, sorted; none for other data sets."""
    identities = _identities(documents) if isinstance(documents, Dataset) else []
    return sorted({identity["manifest_hash"] for identity in identities})


def check_documents_fit(
    documents: Any, tokenizer: PreTrainedTokenizerBase | None, allow_other_template: bool = False
) -> None:
    """Refuses documents whose ids mean something else to a tokenizer, and warns of another template (case DT3).

    Data sets that no manifest belongs to are passed over.

    Args:
        documents: What `open_documents` gave, or what was selected, shuffled or concatenated from it.
        tokenizer: The target's tokenizer; without one nothing can be compared.
        allow_other_template: Whether documents written by another chat template are warned of and not refused.

    Raises:
        ValueError: Another vocabulary, or another template that is not allowed.
    """
    if not isinstance(documents, Dataset) or tokenizer is None:
        return
    for identity in _identities(documents):
        own = tokenizer_identity(tokenizer)
        if identity["vocabulary_hash"] != own["vocabulary_hash"]:
            raise ValueError(
                f"The documents were made with a tokenizer of {identity['vocabulary_size']} tokens, and the target's "
                f"has {own['vocabulary_size']}; their ids do not mean the same (vocabulary "
                f"{identity['vocabulary_hash'][:12]} and {own['vocabulary_hash'][:12]}). Tokenise the completions "
                "with the target's own tokenizer."
            )
        if identity["template_hash"] != own["template_hash"]:
            message = (
                f"The documents were written by another chat template ({identity['template_hash'][:12]}) than the "
                f"target's tokenizer has ({own['template_hash'][:12]}): the drafter learns prompts that the target "
                "may never see."
            )
            if not allow_other_template:
                raise ValueError(f"{message} Tokenise again, or set allow_other_template=True.")
            logger.warning("%s It was allowed.", message)


def _identities(documents: Dataset) -> list[dict]:
    # `concatenate_datasets` joins the descriptions of its parts by empty lines.
    parts = (documents.info.description or "").split("\n\n")
    found = [json.loads(part) for part in parts if part.startswith('{"format": "dflash_hf documents')]
    return [identity for k, identity in enumerate(found) if identity not in found[:k]]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- One file of completions becomes one shard of documents; what became of each row is counted.


# A chunk is encoded in one batch and written as one row group. The limits bound the memory of a process.
CHUNK_ROWS = 256

CHUNK_CHARACTERS = 1_000_000

HISTOGRAM_BIN = 256

EXAMPLES_PER_REASON = 3


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
        if reserved := sorted(RESERVED_TEMPLATE_KWARGS & self.template_kwargs.keys()):
            raise ValueError(
                f"template_kwargs holds {', '.join(reserved)}: only variables of the template may be given."
            )
        if self.infer_thinking and self.enable_thinking is not None:
            raise ValueError("Give enable_thinking for all rows or infer_thinking from each answer, not both.")

    def chat_format(self, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        return ChatFormat.of(
            tokenizer,
            self.eos_token_ids,
            self.infer_thinking,
            enable_thinking=self.enable_thinking,
            preserve_thinking=self.preserve_thinking,
            **self.template_kwargs,
        )


@dataclass
class FileCounts:
    """What became of the rows of one file."""

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
        self.documents[split] += 1
        self.tokens += len(document.input_ids)
        self.supervised_tokens += document.num_supervised
        self.truncated += document.is_truncated
        self.lengths[len(document.input_ids) // HISTOGRAM_BIN * HISTOGRAM_BIN] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class _Entry:
    """A draft with what is written beside its document."""

    draft: Draft
    split: str
    row: int
    source: str
    language: str | None
    place: str


def is_eval(chat: Chat, fraction: float) -> bool:
    """Whether a conversation belongs to the evaluation split: by its prompt alone, so that reruns agree."""
    if fraction == 0:
        return False
    # Parquet has types that JSON lacks.
    prompt = json.dumps(chat.prompt, sort_keys=True, default=str)
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class FileTokenizer:
    """Makes the documents of one file after another.

    Args:
        tokenizer: The target's tokenizer.
        options: What decides the documents.
        on_progress: Called with (bytes read of the file, tokens) made since the last call.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: TokenizeOptions,
        on_progress: Callable[[int, int], None] = lambda num_bytes, num_tokens: None,
    ):
        self.format = options.chat_format(tokenizer)
        self.options = options
        self.on_progress = on_progress

    def write(self, fs: fsspec.AbstractFileSystem, file: SourceFile, output: "ShardWriter") -> dict[str, Any]:
        """Writes the shards of a file and returns its record, as the manifest keeps it.

        Raises:
            SourceError: The file cannot be read; nothing is written then.
            OutputError: A shard cannot be written.
        """
        counts = FileCounts()
        read = 0
        with output.open(file) as shards:
            try:
                for entries, position in self._chunks(fs, file, counts):
                    tokens = self._write_chunk(entries, counts, shards)
                    self.on_progress(max(0, position - read), tokens)
                    read = max(read, position)
            except SourceError:
                self.on_progress(-read, -counts.tokens)
                raise
            self.on_progress(max(0, file.size - read), 0)
            return shards.commit(counts.documents, counts.as_dict())

    def _chunks(
        self, fs: fsspec.AbstractFileSystem, file: SourceFile, counts: FileCounts
    ) -> Iterator[tuple[list[_Entry], int]]:
        """Drafts of some rows, and the bytes of the file read so far."""
        stem = file.label.rpartition("/")[2].partition(".")[0]
        entries: list[_Entry] = []
        num_rows, num_characters, position = 0, 0, 0
        for index, (place, row, position) in enumerate(read_rows(fs, file)):
            counts.rows += 1
            num_rows += 1
            try:
                found = self._entries(row, index, place, stem, counts)
            except RowError as error:
                counts.drop(error.reason, place, str(error))
                continue
            entries += found
            num_characters += sum(len(piece.content) for entry in found for piece in entry.draft.pieces)
            if num_rows >= CHUNK_ROWS or num_characters >= CHUNK_CHARACTERS:
                yield entries, position
                entries, num_rows, num_characters = [], 0, 0
        if entries:
            yield entries, position

    def _entries(self, row: dict | RowError, index: int, place: str, stem: str, counts: FileCounts) -> list[_Entry]:
        if isinstance(row, RowError):
            raise row
        entries = []
        for chat in read_chats(row):
            if not any(message["content"].strip() or "tool_calls" in message for message in chat.prompt):
                raise RowError("empty prompt", "the messages before the first answer hold no text.")
            turns = self.format.turns(chat, self.options.last_turn_only)
            counts.template_texts.update(turn.template_text for turn in turns if turn.template_text)
            counts.models.update([chat.model] if chat.model else [])
            split = "eval" if is_eval(chat, self.options.eval_fraction) else "train"
            source = chat.source or self.options.source or stem
            entries += [
                _Entry(draft, split, index, source, chat.language, place)
                for draft in drafts_of(turns, self.options.merge_turns)
            ]
        return entries

    def _write_chunk(self, entries: list[_Entry], counts: FileCounts, shards: OpenShards) -> int:
        by_split: dict[str, list[Placed]] = {}
        before = counts.tokens
        for entry, whole in zip(entries, self.format.encode([e.draft for e in entries]), strict=True):
            for document in self._fitted(whole, entry, counts):
                counts.add(entry.split, document)
                placed = Placed(document, entry.row, entry.source, entry.language)
                by_split.setdefault(entry.split, []).append(placed)
        for split, documents in by_split.items():
            shards.append(split, documents)
        return counts.tokens - before

    def _fitted(self, whole: Document, entry: _Entry, counts: FileCounts) -> list[Document]:
        """What the length limit leaves of a document; what it leaves nothing of is counted."""
        limit = self.options.max_length
        if not whole.supervised_spans:
            counts.drop("empty answer", entry.place, "the answer holds no token.")
            return []
        if limit is None:
            return [whole]
        if self.options.long_documents == "windows":
            parts = windows(whole, limit)
            counts.repeated_tokens += sum(len(part.input_ids) for part in parts) - len(parts[-1].input_ids)
            return parts
        short = cut(whole, limit)
        if short is None:
            start = whole.supervised_spans[0][0]
            counts.drop("prompt too long", entry.place, f"the prompt has {start} tokens of max_length={limit}.")
            return []
        return [short]


def write_with_retries(
    tokenizer: FileTokenizer,
    fs: fsspec.AbstractFileSystem,
    file: SourceFile,
    output: ShardWriter,
    retries: int,
    wait: float = 1.0,
) -> dict[str, Any]:
    """As `FileTokenizer.write`, reading a file that fails again after `wait`, 2 `wait`, 4 `wait` ... seconds."""
    for attempt in range(retries):
        try:
            return tokenizer.write(fs, file, output)
        except SourceError:
            time.sleep(wait * 2**attempt)
    return tokenizer.write(fs, file, output)


# --- The processes that tokenise files side by side, one file after the other in each.


@dataclass(frozen=True)
class Job:
    """All that a process needs to work on one file after another."""

    address: str
    output: str
    tokenizer: PreTrainedTokenizerBase
    options: TokenizeOptions
    storage_options: dict[str, Any]
    output_storage_options: dict[str, Any]
    retries: int = 3
    retry_wait: float = 1.0

    def writer(self) -> ShardWriter:
        fs, root = open_filesystem(self.output, self.output_storage_options)
        return ShardWriter(fs, root.rstrip("/"))


class FilesProgress:
    """A bar of bytes with files, tokens per second and time left."""

    def __init__(self, bar: tqdm, num_files: int):
        self.bar, self.num_files, self.finished, self.tokens = bar, num_files, 0, 0
        self.start = time.monotonic()

    def update(self, num_bytes: int, num_tokens: int) -> None:
        self.tokens += num_tokens
        rate = self.tokens / max(time.monotonic() - self.start, 1e-9)
        self.bar.set_postfix_str(f"{self.finished}/{self.num_files} files, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update(num_bytes)

    def finish_file(self) -> None:
        self.finished += 1
        self.update(0, 0)


@contextmanager
def bar_of_files(files: list[SourceFile], todo: list[SourceFile], disable: bool) -> Iterator[FilesProgress]:
    """A progress bar, which says how many files earlier runs have finished.

    Args:
        files: All files.
        todo: Those that are still to be worked on.
        disable: Whether to hide it.
    """
    total = sum(file.size for file in todo)
    with tqdm(total=total, desc="Tokenizing", unit="B", unit_scale=True, disable=disable) as bar:
        if len(todo) < len(files):
            bar.write(f"{len(files) - len(todo)} of {len(files)} files are finished already.", file=sys.stderr)
        yield FilesProgress(bar, len(todo))


def work_on(
    job: Job, files: list[SourceFile], num_proc: int, progress: FilesProgress
) -> Iterator[tuple[SourceFile, dict[str, Any] | SourceError]]:
    """Each file with its record, or with the error that kept it from being read, in the order they end.

    Args:
        job: What is the same for all files.
        files: The files.
        num_proc: Processes; up to 1 is this one.
        progress: Told of bytes and tokens.
    """
    if num_proc <= 1:
        tokenizer = FileTokenizer(job.tokenizer, job.options, progress.update)
        fs, _ = open_filesystem(job.address, job.storage_options)
        for file in files:
            yield file, _one_file(job, tokenizer, fs, file)
        return
    # Forked processes start at once and share the tokenizer; where forking is unsafe they import all anew.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    counters = context.Array("q", 2)
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    # The processes share out the cores; threads of the tokenizer within each would fight for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = ProcessPoolExecutor(num_proc, context, _start_worker, (job, counters, os.getpid()))
    try:
        yield from _collect({pool.submit(_work, file): file for file in files}, counters, progress)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _collect(
    pending: dict[Future, SourceFile], counters: Any, progress: FilesProgress
) -> Iterator[tuple[SourceFile, dict[str, Any] | SourceError]]:
    seen = [0, 0]
    while pending:
        done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
        now = list(counters)
        progress.update(now[0] - seen[0], now[1] - seen[1])
        seen = now
        for future in done:
            yield pending.pop(future), future.result()


_worker: dict[str, Any] = {}


def _start_worker(job: Job, counters: Any, parent: int) -> None:
    def add(num_bytes: int, num_tokens: int) -> None:
        with counters.get_lock():
            counters[0] += num_bytes
            counters[1] += num_tokens

    # A killed parent tells nobody: without this its workers would wait for work for ever.
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    fs, _ = open_filesystem(job.address, job.storage_options)
    _worker.update(job=job, tokenizer=FileTokenizer(job.tokenizer, job.options, add), fs=fs)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def _work(file: SourceFile) -> dict[str, Any] | SourceError:
    return _one_file(_worker["job"], _worker["tokenizer"], _worker["fs"], file)


def _one_file(job: Job, tokenizer: FileTokenizer, fs: Any, file: SourceFile) -> dict[str, Any] | SourceError:
    try:
        return write_with_retries(tokenizer, fs, file, job.writer(), job.retries, job.retry_wait)
    except SourceError as error:
        return error


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
    if manifest["repeated_tokens"]:
        lines.append(
            f"{manifest['repeated_tokens']:,} tokens ({manifest['repeated_tokens'] / tokens:.1%}) are context that "
            "windows repeat"
        )
    examples: dict[str, str] = {}
    for file in manifest["files"]:
        for reason, found in file["dropped_examples"].items():
            examples.setdefault(reason, found[0])
    for reason, count in sorted(manifest["dropped"].items(), key=lambda item: -item[1]):
        lines.append(f"dropped {count:,}: {reason}, such as {examples[reason]}")
    for text, count in sorted(manifest["template_texts"].items(), key=lambda item: -item[1])[:1]:
        lines.append(
            f"in {count:,} answers the template wrote {text!r} before the content, and it is supervised as generated "
            "text: if the target did not generate it, pass the enable_thinking the answers were generated with"
        )
    if len(models := manifest.get("models", {})) > 1:
        by = ", ".join(f"{name} {count:,}" for name, count in sorted(models.items(), key=lambda item: -item[1]))
        lines.append(
            f"the answers are of several models ({by}): a drafter learns from those of its own target alone. Unless "
            "these are names of one, leave the others out, or let recipes/generate_completions.py answer them again"
        )
    lines += [f"FAILED {name}: {error}" for name, error in manifest["failed"].items()]
    return "\n".join([*lines, *_histogram(manifest["lengths"])])


def _histogram(lengths: Mapping[str, int]) -> list[str]:
    if not lengths:
        return []
    starts = [int(start) for start in lengths]
    # At most 16 bars, whatever the longest document.
    width = HISTOGRAM_BIN * (max(starts) // HISTOGRAM_BIN // 16 + 1)
    bars: dict[int, int] = {}
    for start, count in zip(starts, lengths.values(), strict=True):
        bars[start // width * width] = bars.get(start // width * width, 0) + count
    most = max(bars.values())
    counts = {start: bars.get(start, 0) for start in range(0, max(bars) + width, width)}
    return [
        f"{start:>7,} to {start + width - 1:>7,} tokens {'#' * round(BAR_WIDTH * count / most):<{BAR_WIDTH}} {count:,}"
        for start, count in counts.items()
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
    address: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    count: int = 3,
    characters: int = 1200,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Texts of the first documents with what is supervised between ⟦ and ⟧; long stretches lose their middle.

    Args:
        address: Folder of documents.
        tokenizer: The target's tokenizer.
        count: Documents.
        characters: Longest stretch that is shown whole.
        storage_options: Arguments of the address's file system.
    """
    documents = (row for batch in iterate_documents(address, "train", storage_options) for row in batch.to_pylist())
    return [_marked(document, tokenizer, characters) for document in islice(documents, count)]


def _marked(document: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, characters: int) -> str:
    ids, end = document["input_ids"], 0
    parts: list[str] = []
    for start, stop in [*document["supervised_spans"], [len(ids), len(ids)]]:
        parts.append(_shortened(str(tokenizer.decode(ids[end:start])), characters))
        if stop > start:
            parts.append(MARKS[0] + _shortened(str(tokenizer.decode(ids[start:stop])), characters) + MARKS[1])
        end = stop
    return "".join(parts)


def _shortened(text: str, characters: int) -> str:
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} [...] {text[-half:]}"


# --- Files of completions to a folder of documents, by several processes, resumable.


SUMMED = ("rows", "tokens", "supervised_tokens", "truncated", "repeated_tokens")

COUNTED = ("documents", "dropped", "lengths", "template_texts", "models")


def tokenize_files(
    address: str | os.PathLike,
    output: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    output_storage_options: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    retries: int = 3,
    retry_wait: float = 1.0,
    disable_tqdm: bool = False,
) -> dict[str, Any]:
    """Tokenises all files of rows at an address into a folder of documents; started again, it goes on.

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
    _warn_of_dates(tokenizer, options)
    if output_storage_options is None:
        output_storage_options = storage_options
    storage = dict(storage_options or {}), dict(output_storage_options or {})
    job = Job(os.fspath(address), os.fspath(output), tokenizer, options, *storage, retries, retry_wait)
    writer = job.writer()
    _check_apart(job, writer)
    files = list_files(address, storage_options)
    with writer.alone():
        return _tokenize(job, writer, files, num_proc, disable_tqdm)


def _tokenize(
    job: Job, writer: ShardWriter, files: list[SourceFile], num_proc: int, disable_tqdm: bool
) -> dict[str, Any]:
    settings = _settings(job)
    _check_settings(writer, job.output, settings)
    writer.clean()
    records = _finished(writer, files)
    todo = [file for file in files if file.name not in records]
    failed = {}
    if todo:
        # Until the run ends, what an earlier one said of the folder does not hold.
        writer.remove(MANIFEST_NAME)
    with bar_of_files(files, todo, disable_tqdm) as progress:
        for file, result in work_on(job, todo, min(num_proc, len(todo)), progress):
            if isinstance(result, SourceError):
                failed[file.name] = str(result)
            else:
                records[file.name] = result
            progress.finish_file()
    writer.clean()
    manifest = _manifest(settings, [records[file.name] for file in files if file.name in records], failed)
    writer.write_json(MANIFEST_NAME, manifest)
    return manifest


def _warn_of_dates(tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> None:
    if "strftime_now" in str(tokenizer.chat_template) and not options.template_kwargs:
        logger.warning(
            "The chat template writes today's date where it is not given one, so a run that goes on tomorrow would "
            "write another: pass the template's variable, such as template_kwargs={'date_string': '26 Jul 2024'}."
        )


def _check_apart(job: Job, writer: ShardWriter) -> None:
    fs, root = open_filesystem(job.address, job.storage_options)
    if fs.protocol == writer.fs.protocol and f"{writer.root}/".startswith(f"{root.partition('*')[0].rstrip('/')}/"):
        raise ValueError(
            f"The output {job.output} lies within {job.address}, so its shards would be read as completions by the "
            "next run. Name a folder beside it."
        )


def _settings(job: Job) -> dict[str, Any]:
    """What the bytes of the output depend on besides the files."""
    return {
        **tokenizer_identity(job.tokenizer),
        "tokenizer_hash": tokenizer_hash(job.tokenizer),
        "completions": job.address.rstrip("/") if "://" in job.address else os.path.normpath(job.address),
        "options": dataclasses.asdict(job.options),
    }


def _check_settings(writer: ShardWriter, output: str, settings: dict[str, Any]) -> None:
    path = f"{writer.root}/{SETTINGS_NAME}"
    with explained(output, "Reading"):
        content = writer.fs.cat_file(path) if writer.fs.exists(path) else None
    if content is None:
        writer.write_json(SETTINGS_NAME, settings)
        return
    try:
        earlier = json.loads(content)
        if not isinstance(earlier, dict) or not isinstance(earlier.get("options"), dict):
            raise ValueError("it has no options")
    except ValueError as error:
        raise ValueError(
            f"{output}/{SETTINGS_NAME}, which says how the documents there were made, cannot be read ({error}). "
            "If they were made by this very command, remove that file; otherwise name another output."
        ) from error
    flat, old = ({**s, **s["options"]} for s in (settings, earlier))
    changed = [f"{key}: {old.get(key)!r} then, {flat.get(key)!r} now" for key in flat if flat[key] != old.get(key)]
    changed = [line for line in changed if not line.startswith("options: ")]
    if changed:
        raise ValueError(
            f"{output} holds documents that were made otherwise ({'; '.join(changed)}). Give the same options to go "
            "on, or another output."
        )


def _finished(writer: ShardWriter, files: list[SourceFile]) -> dict[str, dict[str, Any]]:
    """Records of the files that earlier runs finished and that have not changed since."""
    with explained(writer.root, "Listing"):
        present = set(writer.fs.find(f"{writer.root}/train")) if writer.fs.exists(f"{writer.root}/train") else set()
    done = [file for file in files if writer.shard_path(file, "train") in present]
    with ThreadPoolExecutor(16) as threads:
        records = list(threads.map(lambda file: _whole_record(writer, file), done))
    return {file.name: record for file, record in zip(done, records, strict=True) if record is not None}


def _whole_record(writer: ShardWriter, file: SourceFile) -> dict[str, Any] | None:
    """The record of a file of which every shard is there, or None."""
    record = read_record(writer.fs, writer.shard_path(file, "train"))
    own = {"name": file.name, "size": file.size, "version": file.version}
    if record is None or any(record[name] != value for name, value in own.items()):
        return None
    others = [shard for split, shard in record["shards"].items() if split != "train"]
    return record if all(read_record(writer.fs, f"{writer.root}/{name}") == record for name in others) else None


def _manifest(settings: dict[str, Any], records: list[dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    totals: dict[str, Any] = {name: sum(record[name] for record in records) for name in SUMMED}
    for name in COUNTED:
        counter: Counter = Counter()
        for record in records:
            # Records of an earlier version count no models.
            counter.update(record.get(name, {}))
        numeric = name == "lengths"
        totals[name] = dict(sorted(counter.items(), key=lambda item: int(item[0]) if numeric else item[0]))
    return {**settings, "complete": not failed, "failed": dict(sorted(failed.items())), **totals, "files": records}


# --- One call for training data, tokenised already or not.


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
