# SPDX-License-Identifier: Apache-2.0
"""Shards of documents: Parquet files that appear whole or not at all, on a local disk or in an object store.

What a shard holds depends on its documents alone, to the byte. The training shard of a source file carries the file's
record (what became of its rows), so that its being there says that the file is done.
"""

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from ..one_writer import only_writer
from .documents import Document
from .sources import SourceFile


logger = logging.getLogger(__name__)

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
