# SPDX-License-Identifier: Apache-2.0
"""Files of rows, wherever fsspec finds them: a folder, `s3://`, `gs://`, `hf://datasets/...`, `memory://`.

Credentials come from the environment, as each file system's own tools read them; `storage_options` go to the file
system as they are (for S3 `{"endpoint_url": ...}`, `{"anon": true}`).
"""

import codecs
import gzip
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from .addresses import describe, refuse_credentials
from .chat_messages import RowError
from .json_rows import json_items, json_lines, parse_line


SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
# Folders hold `.json` files of other kinds too, such as settings, so that these are read where they are named.
JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")
NAMED_SUFFIXES = (*SUFFIXES, *JSON_SUFFIXES)
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# A file is what it begins with, whatever its name: stores unpack, and people rename. No line of JSON begins so.
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "Parquet"}
KINDS = {"gz": "gzip", "zst": "zstd", "parquet": "Parquet"}
# Rows of a Parquet file that are held at once.
PARQUET_BATCH = 128
# A file of up to so many bytes is fetched by one request.
WHOLE_BYTES = 16 * 2**20


class SourceError(OSError):
    """A file of rows cannot be read to its end."""


@dataclass(frozen=True)
class SourceFile:
    """One file of rows."""

    name: str  # below the address that was listed
    path: str  # within the file system
    place: str  # for messages
    size: int  # in bytes
    version: str  # the store's etag, or the time of the last change

    @property
    def label(self) -> str:
        """The name as text: bytes of it that are no UTF-8 are replaced."""
        return self.name.encode("utf-8", "replace").decode()


def open_filesystem(
    address: str | os.PathLike, storage_options: Mapping[str, Any] | None = None
) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of an address, and the address within it.

    Raises:
        ValueError: No file system is known for the address, its package is not installed, or it holds credentials.
    """
    address = os.fspath(address)
    if not address:
        raise ValueError("The address is empty: give a file, a folder or an fsspec address.")
    refuse_credentials(address)
    try:
        return fsspec.core.url_to_fs(address, **(storage_options or {}))
    except ImportError as error:
        extra = EXTRAS.get(address.partition("://")[0])
        install = f"pip install 'dflash_hf[{extra}]'" if extra else "install the package that it names"
        raise ValueError(f"{address} cannot be opened ({error}): {install}.") from error
    except ValueError as error:
        raise ValueError(f"{address} cannot be opened ({error}): expected a folder or an fsspec address.") from error


@contextmanager
def explained(address: str | os.PathLike, doing: str) -> Iterator[None]:
    """Names the address and what may help where a file system fails, which has its own errors for each store."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"No such file or folder: {address} ({error}).") from error
    except Exception as error:
        raise OSError(
            f"{doing} {address} failed ({describe(error)}). Check the address and the credentials "
            "in the environment (for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, for Google Cloud "
            "GOOGLE_APPLICATION_CREDENTIALS), or pass storage_options."
        ) from error


def list_files(
    address: str | os.PathLike, storage_options: Mapping[str, Any] | None = None, recursive: bool = True
) -> list[SourceFile]:
    """Lists the files of rows at an address, in sorted order.

    Args:
        address: A file, a folder, or a pattern with `*`. A `.json` file is found by its name, or by a pattern that
            ends so, and not in a folder.
        storage_options: Arguments of the file system.
        recursive: Whether to look into folders of the folder.

    Raises:
        FileNotFoundError: Nothing is there, or no file whose name ends in one of `SUFFIXES`.
        ValueError: A single file of another kind, a pipe, or an unknown file system.
        OSError: The store cannot be listed.
    """
    address = os.fspath(address)
    fs, path = open_filesystem(address, storage_options)
    with explained(address, "Listing"):
        if "*" in path:
            found = {name: i for name, i in fs.glob(path, detail=True).items() if i.get("type") != "directory"}
        else:
            found = fs.find(path, detail=True, maxdepth=None if recursive else 1)
        if not found and not fs.exists(path):
            raise FileNotFoundError(f"give a {' or '.join(NAMED_SUFFIXES)} file, or a folder of them")
    root = path.partition("*")[0].rpartition("/")[0] if "*" in path else path
    if list(found) == [path] and not path.endswith(NAMED_SUFFIXES):
        _check_is_file(address, found[path])
        raise ValueError(f"{address} ends in neither of {NAMED_SUFFIXES}, so its format is unknown.")
    suffixes = NAMED_SUFFIXES if "*" in path and path.endswith(NAMED_SUFFIXES) else SUFFIXES
    names = [name for name in sorted(found) if name == path or _is_rows(name, suffixes)]
    for name in names:
        _check_is_file(name, found[name])
    if not names:
        raise FileNotFoundError(
            f"The folder {address} holds no file that ends in one of {SUFFIXES}. A .json file is read where it is "
            "named, or all of a folder by FOLDER/*.json."
        )
    return [_source_file(fs, address, root, name, found[name]) for name in names]


def _check_is_file(address: str, info: dict) -> None:
    # To open a pipe that nobody writes to takes for ever.
    if info.get("type") == "other":
        raise ValueError(
            f"{address} is a pipe or a device, which cannot be read twice: write its rows into a file, such as "
            "rows.jsonl, and give that."
        )


def _is_rows(path: str, suffixes: tuple[str, ...]) -> bool:
    return path.endswith(suffixes) and not path.rpartition("/")[2].startswith(".")


def _source_file(fs: fsspec.AbstractFileSystem, address: str, root: str, path: str, info: dict) -> SourceFile:
    name = path.rpartition("/")[2] if path == root else path[len(root) :].lstrip("/")
    place = address if path == root else f"{address.partition('*')[0].rstrip('/')}/{name}"
    if "*" in address:
        place = fs.unstrip_protocol(path)
    versions = (info.get(key) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created"))
    version = next((str(value).strip('"') for value in versions if value), "")
    return SourceFile(name, path, place, int(info.get("size") or 0), version)


def read_rows(fs: fsspec.AbstractFileSystem, file: SourceFile) -> Iterator[tuple[str, dict | RowError, int]]:
    """Rows in order, each with its place and the bytes read so far; what is broken is a `RowError`.

    The place is "file:line", of Parquet and of a list "file:row".

    Raises:
        SourceError: The file cannot be read, or not to its end; names file and line.
    """
    number = 0
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(_opened(fs, file))
            kind = _kind(raw, file)
            if kind == "Parquet":
                items: Iterator[Any] = _parquet_rows(raw)
            else:
                read = json_items if file.path.endswith(JSON_SUFFIXES) else json_lines
                items = read(stack.enter_context(_decompressed(raw, kind)))
        # Each store, format and compression has its own errors.
        except Exception as error:
            raise _source_error(file, number, error) from error
        while True:
            try:
                item = next(items, None)
            except Exception as error:
                raise _source_error(file, number, error) from error
            if item is None:
                return
            number += 1
            if isinstance(item, bytes):
                if number == 1:
                    item = item.removeprefix(codecs.BOM_UTF8)
                if not item.strip():
                    continue
                item = parse_line(item)
            # Parquet is read from several places at once, so that the position in the file says nothing.
            yield f"{file.place}:{number}", item, 0 if kind == "Parquet" else raw.tell()


def _opened(fs: fsspec.AbstractFileSystem, file: SourceFile) -> Any:
    if file.size <= WHOLE_BYTES and not isinstance(fs, LocalFileSystem):
        return io.BytesIO(fs.cat_file(file.path))
    return fs.open(file.path, "rb")


def _kind(raw: Any, file: SourceFile) -> str:
    start = raw.read(4)
    raw.seek(0)
    found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    return found or KINDS.get(file.path.rpartition(".")[2], "")


def _source_error(file: SourceFile, number: int, error: Exception) -> SourceError:
    kind = KINDS.get(file.path.rpartition(".")[2])
    what = f"not a whole {kind} file" if kind and not isinstance(error, FileNotFoundError) else "cannot be read"
    return SourceError(f"{file.place}:{number + 1}: {what} ({describe(error)}): copy or write the file again.")


def _decompressed(raw: BinaryIO, kind: str) -> Any:
    if kind == "gzip":
        return gzip.open(raw, "rb")
    if kind == "zstd":
        # Several frames in a row are one file, and a frame that is cut off is an error.
        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))
    # Files of some stores know no longest line.
    return io.BufferedReader(raw, 2**20)


def _parquet_rows(raw: BinaryIO) -> Iterator[dict]:
    for batch in pq.ParquetFile(raw).iter_batches(batch_size=PARQUET_BATCH):
        yield from batch.to_pylist()
