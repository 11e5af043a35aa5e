# SPDX-License-Identifier: Apache-2.0
"""Tokenise the study's chats into one small file, for machines that have neither the chats nor the Hub.

    python recipes/smollm2-135m/study_data.py --data FOLDER --target FOLDER --output study.npz

The folder holds `train.jsonl.gz` and `dev_greedy.jsonl.gz`. The file holds, for each of them, the token ids of all
documents one after another as uint16, their lengths, and their supervised spans with the number of them per document.
"""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, HfArgumentParser

from dflash_hf import tokenize_completions


SPLITS = ("train", "dev_greedy")


@dataclass
class DataArguments:
    """Where the chats and the target's tokenizer are, and where the tokens go."""

    data: str = field(metadata={"help": "Folder with train.jsonl.gz and dev_greedy.jsonl.gz."})
    target: str = field(metadata={"help": "Folder with the target; its tokenizer and end-of-turn ids are used."})
    output: str = field(default="study.npz", metadata={"help": "File to write."})
    max_length: int = field(default=512, metadata={"help": "Tokens kept of each training document."})


def main() -> None:
    arguments = HfArgumentParser(DataArguments).parse_args_into_dataclasses()[0]
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    eos = GenerationConfig.from_pretrained(arguments.target).eos_token_id
    arrays: dict[str, np.ndarray] = {}
    for split in SPLITS:
        rows = read_chats(Path(arguments.data) / f"{split}.jsonl.gz")
        # Answers to decode are walked whole.
        max_length = arguments.max_length if split == "train" else None
        documents = tokenize_completions(rows, tokenizer, max_length=max_length, eos_token_ids=eos)
        arrays |= {f"{split}_{name}": array for name, array in pack_arrays(list(documents)).items()}
        lengths = arrays[f"{split}_lengths"]
        print(f"{split}: {len(lengths)} documents, {lengths.sum()} tokens, the longest of {lengths.max()}.")
    np.savez_compressed(arguments.output, **arrays)  # type: ignore[arg-type]
    print(f"{arguments.output}: {Path(arguments.output).stat().st_size / 2**20:.1f} MiB")


def read_chats(path: Path) -> list[dict[str, Any]]:
    """Rows of a gzipped JSONL file.

    Raises:
        FileNotFoundError: When there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; --data names a folder with {path.name}.")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def pack_arrays(documents: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Documents as four flat arrays.

    Raises:
        ValueError: When a token id needs more than 16 bits.
    """
    token_ids = np.concatenate([np.asarray(document["input_ids"]) for document in documents])
    if token_ids.max() >= 2**16:
        raise ValueError(f"The token id {token_ids.max()} does not fit 16 bits; this file is for small vocabularies.")
    spans = [np.asarray(document["supervised_spans"]).reshape(-1, 2) for document in documents]
    return {
        "input_ids": token_ids.astype(np.uint16),
        "lengths": np.array([len(document["input_ids"]) for document in documents], dtype=np.int32),
        "spans": np.concatenate(spans).astype(np.int32),
        "span_counts": np.array([len(rows) for rows in spans], dtype=np.int32),
    }


def read_documents(path: str | Path, split: str) -> list[dict[str, Any]]:
    """Documents of one split of a file written by this script, as the collator takes them."""
    with np.load(path) as arrays:
        token_ids, lengths, spans, counts = (
            arrays[f"{split}_{name}"] for name in ("input_ids", "lengths", "spans", "span_counts")
        )
    ids = np.split(token_ids.astype(np.int64), np.cumsum(lengths)[:-1])
    rows = np.split(spans.astype(np.int64), np.cumsum(counts)[:-1])
    return [{"input_ids": i, "supervised_spans": s} for i, s in zip(ids, rows, strict=True)]


if __name__ == "__main__":
    main()
