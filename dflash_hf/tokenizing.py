# SPDX-License-Identifier: Apache-2.0
"""From rows to documents: in memory, or by a job over files, which a killed run resumes.

Both go by `RowTokenizer.documents`, which counts in `FileCounts` what became of each row. The job gives each of its
processes one file after the other and writes a `DocumentFolder`.
"""

import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pyarrow as pa
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .chats import (
    RESERVED_TEMPLATE_KWARGS,
    RowError,
    SourceError,
    SourceFile,
    list_files,
    open_filesystem,
    read_chats,
    read_rows,
)
from .documents import (
    DOCUMENT_FEATURES,
    MANIFEST_NAME,
    Address,
    DocumentFolder,
    FileCounts,
    StorageOptions,
    Stored,
    check_documents_fit,
    make_manifest,
    open_documents,
    read_manifest,
    remarks,
    thinking_mode,
    tokenizer_identity,
)
from .rendering import ChatFormat, Document, Draft, cut, drafts_of, windows


logger = logging.getLogger(__name__)

# Called with (bytes read, tokens made) since the last call.
OnProgress: TypeAlias = Callable[[int, int], None]
# A file's record, or the error that kept the file from being read.
Result: TypeAlias = dict[str, Any] | SourceError

# Rows keep their place in Arrow too, among fields of their own.
SOURCE_KEY = "_dflash_source"
# A chunk is encoded in one batch and written as one row group. The limits bound the memory of a process.
CHUNK_ROWS = 256
CHUNK_CHARACTERS = 1_000_000
# Why a document is left out; the other reasons are of rows.
EMPTY, TOO_LONG = "empty answer", "prompt too long"


# --- The one path from rows to documents.


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the documents, besides the tokenizer and the rows."""

    max_length: int | None = field(default=None, metadata={"help": "Tokens of a document that are kept."})
    # Windows are documents that together supervise every answer token once, each behind all that precedes it.
    long_documents: Literal["cut", "windows"] = field(
        default="cut", metadata={"help": "Cut documents at max_length, or make several that are longer, as windows."}
    )
    merge_turns: bool = field(default=True, metadata={"help": "One document of turns that continue each other."})
    last_turn_only: bool = field(default=False, metadata={"help": "Supervise only a conversation's last answer."})
    enable_thinking: bool | None = field(default=None, metadata={"help": "For the template, if a row has no say."})
    preserve_thinking: bool | None = field(default=None, metadata={"help": "The same, for earlier turns' thinking."})
    infer_thinking: bool = field(default=False, metadata={"help": "Set enable_thinking where an answer has thinking."})
    template_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": 'More variables of the template: {"date_string": "26 Jul 2024"}.'}
    )
    eos_token_ids: list[int] = field(default_factory=list, metadata={"help": "Ids that end a turn, too."})
    eval_fraction: float = field(default=0.0, metadata={"help": "Share of conversations for evaluation, by prompt."})
    source: str | None = field(default=None, metadata={"help": "Name of rows' source; by default their file's."})

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


# The place of a document's row for messages, its split, and the columns that do not depend on its tokens.
Origin: TypeAlias = tuple[str, str, dict[str, Any]]


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

    def documents(self, rows: Iterable[tuple[str, Any]]) -> Iterator[list[Stored]]:
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
            source = chat.source or self.options.source or self.source
            columns = {"row": index, "source": source, "language": chat.language}
            origin = place, self._split(chat.prompt), columns
            drafts += [(draft, origin) for draft in drafts_of(turns, self.options.merge_turns)]
        return drafts

    def _split(self, prompt: list[dict]) -> str:
        """The split of a conversation, by its prompt alone, so that reruns agree."""
        if self.options.eval_fraction == 0:
            return "train"
        # Parquet has types that JSON lacks.
        text = json.dumps(prompt, sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "eval" if int.from_bytes(digest, "big") < self.options.eval_fraction * 2**64 else "train"

    def _encoded(self, drafts: list[tuple[Draft, Origin]]) -> list[Stored]:
        stored: list[Stored] = []
        documents = self.format.encode([draft for draft, _ in drafts])
        for whole, (_, (place, split, columns)) in zip(documents, drafts, strict=True):
            for document in self._fitted(whole, place):
                ids, spans = document.input_ids, document.supervised_spans
                columns = {**columns, "input_ids": ids, "supervised_spans": spans, "truncated": document.is_truncated}
                self.counts.add(split, columns)
                stored.append((split, columns))
        return stored

    def _fitted(self, whole: Document, place: str) -> list[Document]:
        """What the length limit leaves of a document; what it leaves nothing of is counted."""
        limit = self.options.max_length
        if not whole.supervised_spans:
            self.counts.drop(EMPTY, place, "the answer holds no token.")
        elif limit is None:
            return [whole]
        elif self.options.long_documents == "windows":
            parts = windows(whole, limit)
            self.counts.repeated_tokens += sum(len(part.input_ids) for part in parts[:-1])
            return parts
        elif short := cut(whole, limit):
            return [short]
        else:
            start = whole.supervised_spans[0][0]
            self.counts.drop(TOO_LONG, place, f"the prompt has {start} tokens of max_length={limit}.")
        return []


# --- In memory.


def read_completions(
    path: Address, on_error: Literal["raise", "skip"] = "raise", storage_options: StorageOptions = None
) -> list[dict]:
    """Reads the rows of a file that `list_files` knows, or of all such files directly in a folder, in sorted order.

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
    skipped: list[str] = []
    fs, _ = open_filesystem(path, storage_options)
    for file in list_files(path, storage_options, recursive=False):
        try:
            for place, row, _ in read_rows(fs, file):
                if isinstance(row, dict):
                    rows.append({**row, SOURCE_KEY: place})
                else:
                    skipped.append(f"{place}: {row}")
                    if on_error == "raise":
                        raise ValueError(skipped[-1])
        except SourceError as error:
            # The rest of the file is lost.
            skipped.append(str(error))
            if on_error == "raise":
                raise ValueError(str(error)) from error
    for message in skipped:
        logger.warning("Skipped %s", message)
    if skipped:
        logger.warning("%s: skipped %d broken lines and kept %d rows.", path, len(skipped), len(rows))
    if not rows:
        raise ValueError(f"{path} holds no row ({len(skipped)} broken lines skipped): give one JSON object per line.")
    return rows


def _in_memory(
    tokenizer: PreTrainedTokenizerBase,
    on_error: Literal["raise", "skip"],
    eos_token_ids: int | Iterable[int] | None = None,
    merge_turns: bool = False,
    **options: Any,
) -> RowTokenizer:
    if unused := {"eval_fraction", "source"} & options.keys():
        raise TypeError(f"{', '.join(sorted(unused))}: only `tokenize_files` takes it, as only a folder keeps it.")
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else list(eos_token_ids or [])
    chosen = TokenizeOptions(merge_turns=merge_turns, eos_token_ids=ids, **options)
    return RowTokenizer(chosen.chat_format(tokenizer), chosen, FileCounts(), None, on_error, allow_empty_prompts=True)


def tokenize_conversation(row: dict, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[dict[str, list]]:
    """Turns one chat into one document per assistant turn, by the tokenizer's own chat template.

    Args:
        row: A chat, see `read_chats`.
        tokenizer: The target's tokenizer, with its chat template.
        **options: Those of `TokenizeOptions` but `eval_fraction` and `source`; `eos_token_ids` may be one id, and
            `merge_turns` is False by default.

    Returns:
        Documents `{"input_ids": [...], "supervised_spans": [[start, stop]]}` in the order of the turns.

    Raises:
        ValueError: Something in the row, or what the template makes of it, cannot be used; names the row's place.
    """
    chunks = _in_memory(tokenizer, "raise", **options).documents([(_name("The row", row), row)])
    documents = [document for chunk in chunks for _, document in chunk]
    return [{"input_ids": d["input_ids"].tolist(), "supervised_spans": d["supervised_spans"]} for d in documents]


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
    named = ((_name(f"Row {index}", row), row) for index, row in enumerate(bar))
    schema = DOCUMENT_FEATURES.arrow_schema
    tables = [
        pa.Table.from_pylist([document for _, document in chunk], schema) for chunk in in_memory.documents(named)
    ]
    counts = in_memory.counts
    found = remarks(vars(counts), counts.dropped_examples)
    if not counts.documents:
        raise ValueError(f"No document is left to train on, of {counts.rows} chats: {'; '.join(found)}")
    for remark in found:
        logger.warning("Tokenizing %d chats: %s", counts.rows, remark)
    return Dataset(pa.concat_tables(tables))


def _name(name: str, row: Any) -> str:
    place = row.get(SOURCE_KEY) if isinstance(row, dict) else None
    return f"{name} ({place})" if isinstance(place, str) else name


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")


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
        address: Folder that `tokenize_files` wrote, or a file or folder of completions that fits in memory; on any
            fsspec file system, which gets `storage_options`.
        tokenizer: The target's tokenizer.
        split: "train" or "eval" of a folder of documents; completions are all "train".
        allow_other_template: As in `check_documents_fit`.
        **tokenize_kwargs: Arguments of `tokenize_completions`, for completions alone.

    Raises:
        ValueError: The documents do not fit the tokenizer or `enable_thinking`, there is no such split, or a
            completion cannot be used.
    """
    manifest = read_manifest(address, storage_options)
    if manifest is None:
        if split != "train":
            raise ValueError(f"{address} holds no split {split!r}: tokenise it first, with --eval_fraction.")
        rows = read_completions(address, storage_options=storage_options)
        return tokenize_completions(rows, tokenizer, **tokenize_kwargs)
    thinking, stored = tokenize_kwargs.get("enable_thinking"), thinking_mode(manifest)
    if thinking not in (None, stored):
        raise ValueError(
            f"enable_thinking={thinking} has no effect on {address}, which was tokenised with "
            f"enable_thinking={stored}. Leave it out, or tokenise anew."
        )
    documents = open_documents(address, split, storage_options)
    check_documents_fit(documents, tokenizer, allow_other_template)
    return documents


# --- The job over files: by several processes, each on one file after the other, resumable.


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
    if "strftime_now" in str(tokenizer.chat_template) and not options.template_kwargs:
        logger.warning(
            "The chat template writes today's date, so a run that goes on tomorrow would write another: pass the "
            "template's variable, such as template_kwargs={'date_string': '26 Jul 2024'}."
        )
    if output_storage_options is None:
        output_storage_options = storage_options
    job = Job(
        os.fspath(address),
        os.fspath(output),
        options.chat_format(tokenizer),
        options,
        dict(storage_options or {}),
        dict(output_storage_options or {}),
        retries,
        retry_wait,
    )
    folder = DocumentFolder(output, output_storage_options)
    fs, root = open_filesystem(address, storage_options)
    if fs.protocol == folder.fs.protocol and f"{folder.root}/".startswith(f"{root.partition('*')[0].rstrip('/')}/"):
        raise ValueError(f"The output {output} lies within {address}, whose rows it would join: name another folder.")
    files = list_files(address, storage_options)
    with folder.alone():
        return job.run(folder, files, num_proc, disable_tqdm)


@dataclass(frozen=True)
class Job:
    """Makes the documents of files."""

    address: str
    output: str
    format: ChatFormat
    options: TokenizeOptions
    storage_options: dict[str, Any]
    output_storage_options: dict[str, Any]
    retries: int
    retry_wait: float

    def run(
        self, folder: DocumentFolder, files: list[SourceFile], num_proc: int, disable_tqdm: bool
    ) -> dict[str, Any]:
        """Makes the documents of all files that are not finished, and returns the manifest."""
        # What the bytes of the output depend on besides the files.
        settings = {
            **tokenizer_identity(self.format.tokenizer),
            "completions": self.address.rstrip("/") if "://" in self.address else os.path.normpath(self.address),
            "options": dataclasses.asdict(self.options),
        }
        folder.write_settings(settings)
        records = folder.finished(files)
        todo = [file for file in files if file.name not in records]
        failed = {}
        if todo:
            # Until the run ends, what an earlier one said of the folder does not hold.
            folder.remove(MANIFEST_NAME)
        total, start, num_finished, num_tokens = sum(file.size for file in todo), time.monotonic(), 0, 0
        with tqdm(total=total, desc="Tokenizing", unit="B", unit_scale=True, disable=disable_tqdm) as bar:
            if records:
                bar.write(f"{len(records)} of {len(files)} files are finished already.", file=sys.stderr)

            def on_progress(more_bytes: int, more_tokens: int) -> None:
                nonlocal num_tokens
                num_tokens += more_tokens
                rate = num_tokens / max(time.monotonic() - start, 1e-9)
                bar.set_postfix_str(f"{num_finished}/{len(todo)} files, {rate:,.0f} tokens/s", refresh=False)
                bar.update(more_bytes)

            for file, result in work_on(self, todo, min(num_proc, len(todo)), on_progress):
                if isinstance(result, SourceError):
                    failed[file.name] = str(result)
                else:
                    records[file.name] = result
                num_finished += 1
                on_progress(0, 0)
        manifest = make_manifest(settings, [records[file.name] for file in files if file.name in records], failed)
        folder.write_json(MANIFEST_NAME, manifest)
        return manifest

    def result(self, file: SourceFile, on_progress: OnProgress) -> Result:
        """The file's record, or, after some retries, the error that keeps it from being read."""
        # Bytes and tokens of this file that the bar has counted: what is read again counts once.
        seen = [0, 0]

        def report(position: int, num_tokens: int) -> None:
            on_progress(position - seen[0], num_tokens - seen[1])
            seen[:] = position, num_tokens

        for seconds in [*(self.retry_wait * 2**k for k in range(self.retries)), None]:
            try:
                return self._write(file, report)
            except SourceError as error:
                failure = error
                time.sleep(seconds or 0.0)
        return failure

    def _write(self, file: SourceFile, report: Callable[[int, int], None]) -> dict[str, Any]:
        """Writes the shards of a file and returns its record; `report` takes the bytes read and the tokens made."""
        # Opened by the process that uses them: connections do not survive a fork.
        fs, _ = open_filesystem(self.address, self.storage_options)
        folder = DocumentFolder(self.output, self.output_storage_options)
        counts = FileCounts()

        def rows() -> Iterator[tuple[str, dict | RowError]]:
            for place, row, position in read_rows(fs, file):
                report(position, counts.tokens)
                yield place, row

        # Bytes of a name that are not UTF-8 are replaced.
        stem = file.name.encode("utf-8", "replace").decode().rpartition("/")[2].partition(".")[0]
        documents = RowTokenizer(self.format, self.options, counts, stem).documents(rows())
        record = folder.write_shards(file, documents, counts)
        report(file.size, counts.tokens)
        return record


def work_on(
    job: Job, files: list[SourceFile], num_proc: int, on_progress: OnProgress
) -> Iterator[tuple[SourceFile, Result]]:
    """Each file with its result, in the order they end. Up to one process is this one."""
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


# The job of a worker process, and what takes its progress.
_worker: list[tuple[Job, OnProgress]] = []


def _start_worker(job: Job, counters: Any, parent: int) -> None:
    def add(num_bytes: int, num_tokens: int) -> None:
        with counters.get_lock():
            counters[0] += num_bytes
            counters[1] += num_tokens

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    # A killed parent tells nobody: without this its workers would wait for work for ever.
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker[:] = [(job, add)]


def _work(file: SourceFile) -> Result:
    job, on_progress = _worker[0]
    return job.result(file, on_progress)
