# SPDX-License-Identifier: Apache-2.0
"""What a folder of documents says of itself, and opening it for training.

A folder holds `manifest.json`, `train/NAME.parquet` and, with an evaluation split, `eval/NAME.parquet`, one of each
per source file. The manifest names the tokenizer and the chat template by their hashes, all options, and each source
file with its size, its version (etag) and what became of its rows.
"""

import glob
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from .addresses import describe
from .shards import read_record
from .sources import explained, open_filesystem


logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
# Written before the first shard: what the documents of a folder depend on besides the files.
SETTINGS_NAME = "settings.json"
# Documents of a shard that are held at once.
BATCH_DOCUMENTS = 256
FORMAT = "dflash_hf documents 1"
# Fields that say what the ids mean and how the text was written; they travel with the opened data set.
FIELDS = {"files": list, "documents": dict, "complete": bool, "failed": dict, "vocabulary_hash": str}
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
