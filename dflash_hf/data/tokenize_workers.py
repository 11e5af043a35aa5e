# SPDX-License-Identifier: Apache-2.0
"""The processes that tokenise files side by side, one file after the other in each."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .shards import ShardWriter
from .sources import SourceError, SourceFile, open_filesystem
from .tokenizing import FileTokenizer, TokenizeOptions, write_with_retries


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


__all__ = ["FilesProgress", "Job", "bar_of_files", "work_on"]
