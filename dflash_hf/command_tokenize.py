# SPDX-License-Identifier: Apache-2.0
"""Turn files of completions into token ids for training, from and to a folder or an object store.

    dflash-hf tokenize --completions s3://bucket/answers --target Qwen/Qwen3.6-27B \
        --output s3://bucket/documents --max_length 4096 --num_proc 16

reads JSON lines (also compressed) and Parquet, of a Hub data set by `hf://datasets/ORG/NAME`, and a `.json` file that
is named. Credentials come from the environment. Stopped at any point, the same command goes on at the first unfinished
file. The exit status is 0 where all is finished, 1 where some files could not be read (they are named; the rest is
finished), 2 where nothing could be done.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .cli import parse_config
from .documents import format_summary, marked_examples, plot_lengths, stored_lengths
from .frozen_target import read_eos_token_ids
from .packing import pack_documents
from .tokenizing import TokenizeOptions, tokenize_files


@dataclass
class TokenizeArguments:
    """What is tokenised for which target, and what is shown of it."""

    completions: str = field(metadata={"help": "File, folder, pattern or fsspec address of the completions."})
    target: str = field(metadata={"help": "Hub id or folder of the target, whose tokenizer and template are used."})
    output: str = field(metadata={"help": "Folder or fsspec address of the documents."})
    num_proc: int = field(default=os.cpu_count() or 1, metadata={"help": "Processes, each on a file of its own."})
    retries: int = field(default=3, metadata={"help": "How often a file that cannot be read is tried again."})
    storage_options: dict[str, Any] | None = field(
        default=None, metadata={"help": 'File system arguments, such as {"endpoint_url": "http://..."}; no secrets.'}
    )
    output_storage_options: dict[str, Any] | None = field(
        default=None, metadata={"help": "The same for the output; by default those of the completions."}
    )
    row_length: int | None = field(default=None, metadata={"help": "Report how full packed rows of this length get."})
    plot: str | None = field(default=None, metadata={"help": "Image file for the histogram of lengths."})
    examples: int = field(default=3, metadata={"help": "Documents that are shown with their supervised part marked."})

    def __post_init__(self) -> None:
        if self.row_length is not None and self.row_length < 1:
            raise ValueError(f"row_length must be at least 1 token, got {self.row_length}.")
        if self.output_storage_options is None:
            self.output_storage_options = self.storage_options


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise, report, and return the exit status."""
    try:
        classes = (TokenizeArguments, TokenizeOptions)
        arguments, options = parse_config(classes, argv, description=__doc__.split("\n")[0], prog="dflash-hf tokenize")
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        manifest = tokenize_files(
            arguments.completions,
            arguments.output,
            tokenizer,
            replace(options, eos_token_ids=options.eos_token_ids or target_eos_ids(arguments.target)),
            storage_options=arguments.storage_options,
            output_storage_options=arguments.output_storage_options,
            num_proc=arguments.num_proc,
            retries=arguments.retries,
        )
    except (ValueError, OSError) as error:
        return failed(2, str(error))
    except BrokenProcessPool as error:
        return failed(2, f"{error} If memory ran out, start the same command with fewer processes (--num_proc).")
    except KeyboardInterrupt:
        return failed(130, "interrupted: what is finished stays, and the same command goes on.")
    report(arguments, options, tokenizer, manifest)
    if not manifest["documents"]:
        return failed(2, "no document is left to train on; the reasons are above.")
    if manifest["failed"]:
        return failed(1, f"{len(manifest['failed'])} files could not be read; the same command tries them again.")
    return 0


def failed(status: int, message: str) -> int:
    """Say what went wrong, and return the exit status."""
    print(f"error: {message}", file=sys.stderr)
    return status


def target_eos_ids(target: str) -> list[int]:
    """Ids that end the target's turns; none where there is only a tokenizer."""
    try:
        return read_eos_token_ids(target)
    except (OSError, ValueError):
        return []


def report(
    arguments: TokenizeArguments,
    options: TokenizeOptions,
    tokenizer: PreTrainedTokenizerBase,
    manifest: Mapping[str, Any],
) -> None:
    """Print the summary, and show what is supervised."""
    print(format_summary(manifest))
    empty = [split for split in ("train", "eval") if not manifest["documents"].get(split)]
    if options.eval_fraction and len(empty) == 1:
        print(
            f"eval_fraction={options.eval_fraction} leaves no document of the split {empty[0]}: conversations are "
            "drawn by their prompts, and these are few. Tokenise rows of your own choice apart, and name both folders."
        )
    if arguments.plot:
        plot_lengths(manifest, arguments.plot)
    if "train" in empty:
        return
    storage = arguments.output_storage_options
    shown = marked_examples(arguments.output, tokenizer, arguments.examples, storage_options=storage)
    for number, text in enumerate(shown, start=1):
        print(f"--- document {number}, supervised between ⟦ and ⟧ ---\n{text}")
    if arguments.row_length:
        report_rows(stored_lengths(arguments.output, storage_options=storage), arguments.row_length)
    print(
        f"The documents are in {arguments.output}; next: dflash-hf train --completions {arguments.output}, or "
        f"dflash-hf adapt --documents {arguments.output} for a drafter that there is"
    )


def report_rows(lengths: Any, row_length: int) -> None:
    """Print how full rows get, and how many documents are too long for one."""
    short = lengths[lengths <= row_length]
    num_rows = len(pack_documents(short, row_length))
    fill = short.sum() / max(num_rows * row_length, 1)
    print(f"{len(short):,} documents fill {num_rows:,} rows of {row_length:,} tokens to {fill:.2%}")
    if len(short) < len(lengths):
        print(
            f"{len(lengths) - len(short):,} documents, of up to {lengths.max():,} tokens, are longer than that, which "
            f"training refuses: raise its row_length, or tokenise into another folder with --max_length {row_length}"
        )
