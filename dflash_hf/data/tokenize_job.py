# SPDX-License-Identifier: Apache-2.0
"""Files of completions to a folder of documents, by several processes, resumable.

A run that was stopped at any point, started again, goes on at the first unfinished file and ends in the same bytes.
"""

import dataclasses
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from .manifest import MANIFEST_NAME, SETTINGS_NAME, tokenizer_hash, tokenizer_identity
from .shards import OutputError, ShardWriter, read_record
from .sources import SourceError, SourceFile, explained, list_files, open_filesystem
from .tokenize_workers import Job, bar_of_files, work_on
from .tokenizing import TokenizeOptions


logger = logging.getLogger(__name__)

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


__all__ = ["OutputError", "tokenize_files"]
