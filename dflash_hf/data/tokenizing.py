# SPDX-License-Identifier: Apache-2.0
"""One file of completions becomes one shard of documents; what became of each row is counted."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import fsspec
from transformers import PreTrainedTokenizerBase

from .chat_messages import RowError
from .chat_rows import RESERVED_TEMPLATE_KWARGS, Chat, read_chats
from .documents import Document, Draft, cut, drafts_of, windows
from .rendering import ChatFormat
from .shards import OpenShards, Placed, ShardWriter
from .sources import SourceError, SourceFile, read_rows


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
