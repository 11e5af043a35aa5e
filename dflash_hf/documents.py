# SPDX-License-Identifier: Apache-2.0
"""A folder of documents: how it is written, opened, checked against a tokenizer, and summed up for a person.

- `settings.json`, written first: what the documents depend on besides the files that they are made of;
- `train/NAME.parquet` and `eval/NAME.parquet`, the shards of the file NAME: each appears whole or not at all, with the
  file's `FileCounts` as its record, the training shard last;
- `manifest.json`, written last: the settings, the sums of the records, and the records.

A row of a shard is one document: `input_ids` [T], their half-open `supervised_spans` [S, 2], and where they come from.
"""

import glob
import hashlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, Features, load_dataset
from datasets.exceptions import DatasetGenerationError
from fsspec.implementations.local import LocalFileSystem
from transformers import PreTrainedTokenizerBase

from .chats import SourceFile, describe, explained, open_filesystem, parsed
from .writing import only_writer, publish_file


logger = logging.getLogger(__name__)

Address: TypeAlias = str | os.PathLike
StorageOptions: TypeAlias = Mapping[str, Any] | None
# A document as it is stored, by the columns of `SCHEMA`, after the name of its split.
Stored: TypeAlias = tuple[str, dict[str, Any]]

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

MANIFEST_NAME = "manifest.json"
SETTINGS_NAME = "settings.json"
FORMAT = "dflash_hf documents 1"
# Fields of the records that the manifest sums up.
SUMMED = ("rows", "tokens", "supervised_tokens", "truncated", "repeated_tokens")
COUNTED = ("documents", "dropped", "lengths", "template_texts", "models")
# Where a shard's footer keeps the record of its file.
RECORD_KEY = b"dflash_hf"
# Tokens of a bin of the histogram of lengths.
HISTOGRAM_BIN = 256
EXAMPLES_PER_REASON = 3
AGAIN = "Start the `dflash-hf tokenize` command that made the folder again: it makes what is damaged once more."


class OutputError(OSError):
    """A shard cannot be written; no other will be, so the run ends."""


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
        """Counts a row or document that is left out, and keeps the first ones as examples."""
        self.dropped[reason] += 1
        examples = self.dropped_examples.setdefault(reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(f"{place}: {message}"[:400])

    def add(self, split: str, document: dict[str, Any]) -> None:
        """Counts a document that is stored."""
        length = len(document["input_ids"])
        self.documents[split] += 1
        self.tokens += length
        self.supervised_tokens += sum(stop - start for start, stop in document["supervised_spans"])
        self.truncated += document["truncated"]
        self.lengths[length // HISTOGRAM_BIN * HISTOGRAM_BIN] += 1

    def as_dict(self) -> dict[str, Any]:
        """The counts in an order that does not depend on that of the rows."""
        return {k: dict(sorted(v.items())) if isinstance(v, dict) else v for k, v in vars(self).items()}


def make_manifest(settings: dict[str, Any], records: list[dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    """The content of `manifest.json`; `failed` has the error of each file that could not be read."""
    totals: dict[str, Any] = {name: sum(record[name] for record in records) for name in SUMMED}
    for name in COUNTED:
        # Records of an earlier version count no models.
        counter = sum((Counter(record.get(name, {})) for record in records), Counter())
        # Lengths are numbers, which JSON has made texts.
        totals[name] = {key: counter[key] for key in sorted(counter, key=int if name == "lengths" else str)}
    return {**settings, "complete": not failed, "failed": dict(sorted(failed.items())), **totals, "files": records}


def shard_name(file: SourceFile, split: str) -> str:
    """A shard's place in the folder: the name of its file, without what URLs and patterns take for something else."""
    name = re.sub(r"[^\w./=+ -]", lambda found: quote(found[0], safe="", errors="surrogateescape"), file.name)
    return f"{split}/{name}.parquet"


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
        path = f"{self.root}/{name}"
        with explained(self.address, "Reading"):
            return self.fs.cat_file(path) if self.fs.exists(path) else None

    def manifest(self) -> dict | None:
        """The manifest, checked; None where there is none and no run has begun."""
        path, content = f"{self.address}/{MANIFEST_NAME}", self.content(MANIFEST_NAME)
        if content is None:
            if FORMAT.encode() in (self.content(SETTINGS_NAME) or b""):
                raise ValueError(f"{path} is missing: its run has not ended. Start the same command again.")
            return None
        manifest = parsed(content.decode(errors="replace"))
        found = manifest.get("format") if isinstance(manifest, dict) else None
        if found != FORMAT:
            raise ValueError(f"{path} has the format {found!r}, expected {FORMAT!r}. {AGAIN}")
        return manifest

    def manifest_and_shards(self, split: str) -> tuple[dict, list[str]]:
        """The manifest and the names of a split's shards, each of which is the one that the manifest names."""
        manifest = self.manifest()
        if manifest is None:
            raise FileNotFoundError(f"{self.address} has no {MANIFEST_NAME}, which `dflash-hf tokenize` writes.")
        files = [file for file in manifest["files"] if split in file["shards"]]
        if not files:
            raise ValueError(f"{self.address} has no document of the split {split!r}, but {manifest['documents']}.")
        shards = [file["shards"][split] for file in files]
        with explained(self.address, "Reading"), ThreadPoolExecutor(16) as threads:
            records = list(threads.map(self.record, shards))
        for shard, file, record in zip(shards, files, records, strict=True):
            if record != file:
                raise ValueError(f"{self.root}/{shard} is missing, damaged or another than the manifest's. {AGAIN}")
        return manifest, shards

    def record(self, shard: str) -> dict[str, Any] | None:
        """The record of a finished shard, or None where there is no such shard, or none that can be read."""
        path = f"{self.root}/{shard}"
        try:
            with self.fs.open(path, "rb") as raw:
                return json.loads((pq.read_metadata(raw).metadata or {})[RECORD_KEY])
        except FileNotFoundError:
            pass
        # Arrow's errors of a broken file are ValueErrors.
        except (KeyError, ValueError) as error:
            logger.warning("%s is not a whole shard of documents (%s).", path, error)
        return None

    def finished(self, files: list[SourceFile]) -> dict[str, dict[str, Any]]:
        """Records of the files that earlier runs finished, of which every shard is there and nothing has changed."""

        def whole_record(file: SourceFile) -> dict[str, Any] | None:
            record = self.record(shard_name(file, "train"))
            if record is None or any(record[name] != value for name, value in _identity(file).items()):
                return None
            others = [shard for split, shard in record["shards"].items() if split != "train"]
            return record if all(self.record(shard) == record for shard in others) else None

        with explained(self.root, "Listing"):
            present = set(self.fs.find(f"{self.root}/train"))
        done = [file for file in files if f"{self.root}/{shard_name(file, 'train')}" in present]
        with ThreadPoolExecutor(16) as threads:
            records = threads.map(whole_record, done)
        return {file.name: record for file, record in zip(done, records, strict=True) if record is not None}

    def batches(self, shard: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The documents of a shard, or some columns of them."""
        with self.fs.open(f"{self.root}/{shard}", "rb") as raw:
            yield from pq.ParquetFile(raw).iter_batches(256, columns=columns)

    # Writing

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        # Each store has its own errors for a full disk, a refused key or a lost connection.
        try:
            yield
        except Exception as error:
            raise OutputError(
                f"Writing to {self.root} failed ({describe(error)}). Mend that, and start the same command again."
            ) from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other run on this machine writes into the folder meanwhile; what killed runs left aside goes."""
        if not self.is_local:
            yield
            return
        with self.named_errors():
            os.makedirs(self.root, exist_ok=True)
        with only_writer(self.root, "output"):
            self._clean()
            yield
            # Workers of a killed run outlive it by a moment, in which they may still write.
            self._clean()

    def _clean(self) -> None:
        for left in Path(self.root).glob("shard-*.tmp"):
            left.unlink(missing_ok=True)

    @contextmanager
    def aside(self) -> Iterator[str]:
        """A file that goes unless it is published: on a local disk in the folder, so that moving it is one step."""
        with self.named_errors():
            handle, path = tempfile.mkstemp(".tmp", "shard-", self.root if self.is_local else None)
            os.close(handle)
        try:
            yield path
        finally:
            Path(path).unlink(missing_ok=True)

    def publish(self, aside: str, path: str) -> None:
        """Gives a finished file its place."""
        if self.is_local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            publish_file(Path(aside), Path(path))
        else:
            self.fs.put_file(aside, path)

    def remove(self, name: str) -> None:
        with self.named_errors():
            if self.fs.exists(f"{self.root}/{name}"):
                self.fs.rm_file(f"{self.root}/{name}")

    def write_json(self, name: str, value: Any) -> None:
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        with self.aside() as path, self.named_errors():
            # Half a surrogate pair stays JSON's escape of it.
            Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))
            self.publish(path, f"{self.root}/{name}")

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Writes the settings of a new folder; refuses a folder of other settings."""
        content = self.content(SETTINGS_NAME)
        if content is None:
            self.write_json(SETTINGS_NAME, settings)
            return
        old = parsed(content.decode(errors="replace"))
        old = old if isinstance(old, dict) else {}
        old |= old.get("options") or {}
        now = {**settings, **settings["options"]}
        del now["options"]
        changed = [f"{key}: {old.get(key)!r} then, {now[key]!r} now" for key in now if now[key] != old.get(key)]
        if changed:
            raise ValueError(
                f"{self.address}/{SETTINGS_NAME} says that its documents were made otherwise ({'; '.join(changed)}). "
                "Give the same options to go on, or another output."
            )

    def write_shards(self, file: SourceFile, chunks: Iterable[list[Stored]], counts: FileCounts) -> dict[str, Any]:
        """Writes the documents of a file, each chunk as a row group per split, and returns the file's record.

        Where a chunk cannot be made or written, nothing of the file stays.
        """
        options: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["source", "language"]}
        with self.aside() as eval_path, self.aside() as train_path:
            paths = {"eval": eval_path, "train": train_path}
            with self.named_errors():
                writers = {split: pq.ParquetWriter(path, SCHEMA, **options) for split, path in paths.items()}
            try:
                for chunk in chunks:
                    with self.named_errors():
                        for split, writer in writers.items():
                            if documents := [document for of, document in chunk if of == split]:
                                writer.write_table(pa.Table.from_pylist(documents, SCHEMA))
                shards = {split: shard_name(file, split) for split in sorted(counts.documents)}
                record = json.dumps({**_identity(file), "shards": shards, **counts.as_dict()})
                with self.named_errors():
                    # The training shard comes last: with its record it says that the file is done.
                    for split, writer in writers.items():
                        writer.add_key_value_metadata({RECORD_KEY: record})
                        writer.close()
                        if split in shards or split == "train":
                            self.publish(paths[split], f"{self.root}/{shard_name(file, split)}")
            finally:
                for writer in writers.values():
                    with suppress(OSError):
                        writer.close()
        # A record is the same fresh and read back: JSON turns the keys of the histogram into strings.
        return json.loads(record)


def _identity(file: SourceFile) -> dict[str, Any]:
    return {"name": file.name, "size": file.size, "version": file.version}


# --- Opening.


def read_manifest(address: Address, storage_options: StorageOptions = None) -> dict | None:
    """The manifest of a folder of documents, or None where there is none; refuses that of a run that has not ended."""
    return DocumentFolder(address, storage_options).manifest()


def thinking_mode(manifest: dict[str, Any]) -> bool | str | None:
    """The `enable_thinking` of the documents, "inferred" where it followed each answer, None for the default."""
    options = manifest["options"]
    return "inferred" if options["infer_thinking"] else options["enable_thinking"]


def open_documents(
    address: Address, split: str = "train", storage_options: StorageOptions = None, cache_dir: str | None = None
) -> Dataset:
    """Opens a split of a folder of documents, memory mapped from `cache_dir`, by default the cache of `datasets`.

    Raises:
        FileNotFoundError: The folder has no manifest.
        ValueError: It has no document of the split, or a shard is damaged or of another run.
    """
    folder = DocumentFolder(address, storage_options)
    manifest, shards = folder.manifest_and_shards(split)
    if not manifest["complete"]:
        logger.warning("%s lacks rows: %d of its source files could not be read.", address, len(manifest["failed"]))
    # Names are taken for patterns.
    files = {split: [glob.escape(f"{folder.address.rstrip('/')}/{shard}") for shard in shards]}
    options = dict(storage_options or {})
    try:
        data = load_dataset("parquet", data_files=files, split=split, storage_options=options, cache_dir=cache_dir)
    except DatasetGenerationError as error:
        damaged = []
        for shard in shards:
            try:
                for _ in folder.batches(shard):
                    pass
            except (OSError, pa.ArrowException):
                damaged.append(f"{folder.root}/{shard}")
        cause = describe(error.__cause__ or error)
        raise ValueError(f"{damaged or address} is damaged within ({cause}). Delete it. {AGAIN}") from error
    # What the ids mean and how the text was written travels with the data set.
    fields = ("format", "vocabulary_hash", "vocabulary_size", "template_hash")
    identity = {name: manifest[name] for name in fields}
    identity["thinking"] = thinking_mode(manifest)
    identity["manifest_hash"] = _hash(json.dumps(manifest, sort_keys=True))
    data.info.description = json.dumps(identity)
    return data


def stored_lengths(address: Address, split: str = "train", storage_options: StorageOptions = None) -> np.ndarray:
    """The number of tokens of each document of a folder, int64 [M], read shard by shard and copied nowhere."""
    folder = DocumentFolder(address, storage_options)
    shards = folder.manifest_and_shards(split)[1]
    batches = (batch for shard in shards for batch in folder.batches(shard, ["input_ids"]))
    return np.concatenate([pc.list_value_length(batch.column(0)).to_numpy() for batch in batches]).astype(np.int64)


# --- Whether documents fit a tokenizer.


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
    """Refuses documents whose ids mean something else to the target's tokenizer, or of another template (case DT3).

    Documents are those of `open_documents`, also selected, shuffled or concatenated. What no manifest belongs to, and
    what nothing can be compared with, is passed over; `allow_other_template` only warns of another template.
    """
    if tokenizer is None:
        return
    for identity in _identities(documents):
        own = tokenizer_identity(tokenizer)
        if identity["vocabulary_hash"] != own["vocabulary_hash"]:
            sizes = f"{identity['vocabulary_size']} tokens; the target's has {own['vocabulary_size']}"
            raise ValueError(f"The documents were made with another tokenizer, of {sizes}. Tokenise with its own.")
        if identity["template_hash"] != own["template_hash"]:
            message = "The documents were written by another chat template than the target's tokenizer has"
            if not allow_other_template:
                raise ValueError(f"{message}. Tokenise again, or set allow_other_template=True.")
            logger.warning("%s: the drafter learns prompts that the target may never see.", message)


# --- What a person looks at after tokenising: counts, reasons, lengths, and documents with the supervised part marked.


def format_summary(manifest: Mapping[str, Any]) -> str:
    """The counts of a manifest as text: rows in and out by reason, tokens, and a histogram of the lengths."""
    documents, tokens = sum(manifest["documents"].values()), manifest["tokens"]
    supervised = manifest["supervised_tokens"]
    examples: dict[str, list[str]] = {}
    splits = ", ".join(f"{count:,} {split}" for split, count in manifest["documents"].items()) or "none"
    lines = [
        f"{manifest['rows']:,} rows of {len(manifest['files']):,} files gave {documents:,} documents ({splits})",
        f"{tokens:,} tokens, {supervised:,} of them supervised ({supervised / max(tokens, 1):.1%}); "
        f"{manifest['truncated']:,} documents are cut off",
    ]
    if repeated := manifest["repeated_tokens"]:
        lines.append(f"{repeated:,} tokens ({repeated / tokens:.1%}) are context that windows repeat")
    for file in manifest["files"]:
        examples = {**file["dropped_examples"], **examples}
    lines += remarks(manifest, examples)
    if len(models := manifest.get("models", {})) > 1:
        by = ", ".join(f"{name} {count:,}" for name, count in Counter(models).most_common())
        lines.append(
            f"the answers are of several models ({by}), and a drafter learns from those of its own target: unless "
            "these are names of one model, let `dflash-hf generate` answer the others again"
        )
    lines += [f"FAILED {name}: {error}" for name, error in manifest["failed"].items()]
    return "\n".join([*lines, *_histogram(manifest["lengths"])])


def remarks(counts: Mapping[str, Any], examples: Mapping[str, list[str]]) -> list[str]:
    """What was left out, by reason, and what a template added: of the counts of a manifest or of `FileCounts`."""
    found = [
        f"dropped {count:,}: {reason}, such as {examples[reason][0]}"
        for reason, count in Counter(counts["dropped"]).most_common()
    ]
    for text, count in Counter(counts["template_texts"]).most_common(1):
        found.append(
            f"in {count:,} answers the template wrote {text!r} before the content, which is supervised: if the target "
            "did not generate it, pass the enable_thinking that the answers were generated with"
        )
    return found


def _histogram(lengths: Mapping[str, int]) -> list[str]:
    # At most 16 bars, whatever the longest document.
    width = HISTOGRAM_BIN * (max(map(int, lengths), default=0) // HISTOGRAM_BIN // 16 + 1)
    bars: Counter[int] = Counter()
    for start, count in lengths.items():
        bars[int(start) // width * width] += count
    most = max(bars.values(), default=1)
    return [
        f"{start:>7,} to {start + width - 1:>7,} tokens {'#' * round(40 * bars[start] / most):<40} {bars[start]:,}"
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
    """Texts of the first `count` documents, what is supervised between ⟦ and ⟧.

    Stretches of more than `characters` lose their middle.
    """
    folder = DocumentFolder(address, storage_options)
    batches = (batch for shard in folder.manifest_and_shards("train")[1] for batch in folder.batches(shard))

    def text(ids: list[int]) -> str:
        whole, half = str(tokenizer.decode(ids)), characters // 2
        return whole if len(whole) <= characters else f"{whole[:half]} [...] {whole[-half:]}"

    texts = []
    for document in islice((row for batch in batches for row in batch.to_pylist()), count):
        ids, end, parts = document["input_ids"], 0, []
        for start, stop in document["supervised_spans"]:
            parts += [text(ids[end:start]), "⟦", text(ids[start:stop]), "⟧"]
            end = stop
        texts.append("".join([*parts, text(ids[end:])]))
    return texts
