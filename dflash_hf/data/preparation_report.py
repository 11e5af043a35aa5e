# SPDX-License-Identifier: Apache-2.0
"""What a person looks at after tokenising: counts, reasons, lengths, and documents with the supervised part marked."""

import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from .manifest import iterate_documents
from .tokenizing import HISTOGRAM_BIN


MARKS = ("⟦", "⟧")
BAR_WIDTH = 40


def format_summary(manifest: Mapping[str, Any]) -> str:
    """The counts of a manifest as text: rows in and out by reason, tokens, and a histogram of the lengths."""
    documents, tokens = sum(manifest["documents"].values()), manifest["tokens"]
    splits = ", ".join(f"{count:,} {split}" for split, count in manifest["documents"].items())
    lines = [
        f"{manifest['rows']:,} rows of {len(manifest['files']):,} files gave {documents:,} documents "
        f"({splits or 'none'})",
        f"{tokens:,} tokens, {manifest['supervised_tokens']:,} of them supervised "
        f"({manifest['supervised_tokens'] / max(tokens, 1):.1%}); {manifest['truncated']:,} documents are cut off",
    ]
    if manifest["repeated_tokens"]:
        lines.append(
            f"{manifest['repeated_tokens']:,} tokens ({manifest['repeated_tokens'] / tokens:.1%}) are context that "
            "windows repeat"
        )
    examples: dict[str, str] = {}
    for file in manifest["files"]:
        for reason, found in file["dropped_examples"].items():
            examples.setdefault(reason, found[0])
    for reason, count in sorted(manifest["dropped"].items(), key=lambda item: -item[1]):
        lines.append(f"dropped {count:,}: {reason}, such as {examples[reason]}")
    for text, count in sorted(manifest["template_texts"].items(), key=lambda item: -item[1])[:1]:
        lines.append(
            f"in {count:,} answers the template wrote {text!r} before the content, and it is supervised as generated "
            "text: if the target did not generate it, pass the enable_thinking the answers were generated with"
        )
    if len(models := manifest.get("models", {})) > 1:
        by = ", ".join(f"{name} {count:,}" for name, count in sorted(models.items(), key=lambda item: -item[1]))
        lines.append(
            f"the answers are of several models ({by}): a drafter learns from those of its own target alone. Unless "
            "these are names of one, leave the others out, or let recipes/generate_completions.py answer them again"
        )
    lines += [f"FAILED {name}: {error}" for name, error in manifest["failed"].items()]
    return "\n".join([*lines, *_histogram(manifest["lengths"])])


def _histogram(lengths: Mapping[str, int]) -> list[str]:
    if not lengths:
        return []
    starts = [int(start) for start in lengths]
    # At most 16 bars, whatever the longest document.
    width = HISTOGRAM_BIN * (max(starts) // HISTOGRAM_BIN // 16 + 1)
    bars: dict[int, int] = {}
    for start, count in zip(starts, lengths.values(), strict=True):
        bars[start // width * width] = bars.get(start // width * width, 0) + count
    most = max(bars.values())
    counts = {start: bars.get(start, 0) for start in range(0, max(bars) + width, width)}
    return [
        f"{start:>7,} to {start + width - 1:>7,} tokens {'#' * round(BAR_WIDTH * count / most):<{BAR_WIDTH}} {count:,}"
        for start, count in counts.items()
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
    address: str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    count: int = 3,
    characters: int = 1200,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Texts of the first documents with what is supervised between ⟦ and ⟧; long stretches lose their middle.

    Args:
        address: Folder of documents.
        tokenizer: The target's tokenizer.
        count: Documents.
        characters: Longest stretch that is shown whole.
        storage_options: Arguments of the address's file system.
    """
    documents = (row for batch in iterate_documents(address, "train", storage_options) for row in batch.to_pylist())
    return [_marked(document, tokenizer, characters) for document in islice(documents, count)]


def _marked(document: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, characters: int) -> str:
    ids, end = document["input_ids"], 0
    parts: list[str] = []
    for start, stop in [*document["supervised_spans"], [len(ids), len(ids)]]:
        parts.append(_shortened(str(tokenizer.decode(ids[end:start])), characters))
        if stop > start:
            parts.append(MARKS[0] + _shortened(str(tokenizer.decode(ids[start:stop])), characters) + MARKS[1])
        end = stop
    return "".join(parts)


def _shortened(text: str, characters: int) -> str:
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} [...] {text[-half:]}"
