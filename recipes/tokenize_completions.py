# SPDX-License-Identifier: Apache-2.0
"""Turn files of completions into token ids for training, from and to a folder or an object store.

    python recipes/tokenize_completions.py --completions s3://bucket/answers --target Qwen/Qwen3.6-27B \
        --output s3://bucket/documents --max_length 4096 --num_proc 16

reads `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and `.parquet` (a Hub data set: `hf://datasets/ORG/NAME`), and a `.json` that
is named. Credentials come from the environment. Stopped at any point, the same command goes on at the first unfinished
file. The exit status is 0 where all is finished, 1 where some files could not be read (they are named; the rest is
finished), 2 where nothing could be done.
"""

import os
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from dflash_hf.cli import parse_config
from dflash_hf.documents import format_summary, marked_examples, plot_lengths, stored_lengths
from dflash_hf.frozen_target import read_eos_token_ids
from dflash_hf.packing import pack_documents
from dflash_hf.tokenizing import TokenizeOptions, tokenize_files


@dataclass
class TokenizeArguments:
    """What is tokenised for which target, and how."""

    completions: str = field(metadata={"help": "File, folder, pattern or fsspec address of the completions."})
    target: str = field(metadata={"help": "Hub id or folder of the target, whose tokenizer and template are used."})
    output: str = field(metadata={"help": "Folder or fsspec address of the documents."})
    max_length: int | None = field(default=None, metadata={"help": "Tokens of a document that are kept."})
    long_documents: str = field(default="cut", metadata={"help": "cut beyond max_length, or windows."})
    merge_turns: bool = field(default=True, metadata={"help": "Turns of a conversation in one document if possible."})
    last_turn_only: bool = field(default=False, metadata={"help": "Supervise only the last answer."})
    enable_thinking: bool | None = field(default=None, metadata={"help": "Handed to the chat template if given."})
    preserve_thinking: bool | None = field(default=None, metadata={"help": "Handed to the chat template if given."})
    infer_thinking: bool = field(default=False, metadata={"help": "enable_thinking where an answer holds thinking."})
    template_kwargs: dict[str, Any] | None = field(default=None, metadata={"help": "Further template arguments."})
    eos_token_ids: list[int] | None = field(
        default=None, metadata={"help": "Ids that end a turn; by default those of the target's generation config."}
    )
    eval_fraction: float = field(default=0.0, metadata={"help": "Share of the conversations kept for evaluation."})
    source: str | None = field(default=None, metadata={"help": "Name of the data where rows have none; the file's."})
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


def target_eos_ids(target: str) -> list[int]:
    """Ids that end the target's turns; none where there is only a tokenizer."""
    try:
        return read_eos_token_ids(target)
    except (OSError, ValueError):
        return []


def report(arguments: TokenizeArguments, tokenizer: PreTrainedTokenizerBase, manifest: dict[str, Any]) -> None:
    """Print the summary, and show what is supervised."""
    print(format_summary(manifest))
    empty = [split for split in ("train", "eval") if not manifest["documents"].get(split)]
    if arguments.eval_fraction and len(empty) == 1:
        print(
            f"eval_fraction={arguments.eval_fraction} leaves no document of the split {empty[0]}: conversations are "
            "drawn by their prompts, and these are few. Tokenise rows of your own choice apart, and name both folders."
        )
    if arguments.plot:
        plot_lengths(manifest, arguments.plot)
    if not manifest["documents"].get("train"):
        return
    options = arguments.storage_options if arguments.output_storage_options is None else None
    options = options or arguments.output_storage_options
    if arguments.examples:
        shown = marked_examples(arguments.output, tokenizer, arguments.examples, storage_options=options)
        for number, text in enumerate(shown, start=1):
            print(f"--- document {number}, supervised between ⟦ and ⟧ ---\n{text}")
    if arguments.row_length:
        lengths = stored_lengths(arguments.output, storage_options=options)
        short = lengths[lengths <= arguments.row_length]
        rows = pack_documents(short, arguments.row_length)
        fill = short.sum() / max(len(rows) * arguments.row_length, 1)
        print(f"{len(short):,} documents fill {len(rows):,} rows of {arguments.row_length:,} tokens to {fill:.2%}")
        if len(short) < len(lengths):
            print(
                f"{len(lengths) - len(short):,} documents, of up to {lengths.max():,} tokens, are longer than that, "
                "which training refuses: give it a larger row_length, or tokenise into another folder with "
                f"--max_length {arguments.row_length}"
            )
    print(
        f"The documents are in {arguments.output}; next: recipes/train_qwen36.py --completions {arguments.output}, or "
        f"dflash-hf adapt --documents {arguments.output} for a drafter that there is"
    )


def main(arguments: TokenizeArguments) -> int:
    """Tokenise, report, and return the exit status."""
    try:
        if arguments.row_length is not None and arguments.row_length < 1:
            raise ValueError(f"row_length must be at least 1 token, got {arguments.row_length}.")
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        eos = target_eos_ids(arguments.target) if arguments.eos_token_ids is None else arguments.eos_token_ids
        names = ("max_length", "long_documents", "merge_turns", "last_turn_only", "enable_thinking")
        names += ("preserve_thinking", "infer_thinking", "eval_fraction", "source")
        options = TokenizeOptions(
            **{name: getattr(arguments, name) for name in names},
            template_kwargs=arguments.template_kwargs or {},
            eos_token_ids=eos,
        )
        manifest = tokenize_files(
            arguments.completions,
            arguments.output,
            tokenizer,
            options,
            storage_options=arguments.storage_options,
            output_storage_options=arguments.output_storage_options,
            num_proc=arguments.num_proc,
            retries=arguments.retries,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool as error:
        print(
            f"error: {error} It may have run out of memory: start the same command with fewer processes (--num_proc); "
            "what is finished stays.",
            file=sys.stderr,
        )
        return 2
    report(arguments, tokenizer, manifest)
    if not sum(manifest["documents"].values()):
        print("error: no document is left to train on; the reasons are above", file=sys.stderr)
        return 2
    if manifest["failed"]:
        print(
            f"error: {len(manifest['failed'])} files could not be read; the rest is finished, and the same command "
            "tries them again",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    logging.set_verbosity_warning()
    try:
        sys.exit(main(parse_config(TokenizeArguments, description=__doc__.split("\n")[0])[0]))
    except KeyboardInterrupt:
        sys.exit("interrupted: what is finished stays, and the same command goes on")
