# SPDX-License-Identifier: Apache-2.0
"""Rows of JSON: one object a line, or all of them in one list."""

import codecs
import json
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from typing import Any

from .chat_messages import RowError


# Bytes of a line; a longer one, such as a whole file without line ends, is not held in memory.
LARGEST_LINE = 2**28
# Bytes of a list of rows, which is held in memory.
LARGEST_LIST = 2**31


def json_lines(stream: Any) -> Iterator[bytes | RowError]:
    """The lines of a binary stream; one that is too long is an error."""
    while line := stream.readline(LARGEST_LINE):
        if len(line) < LARGEST_LINE or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(LARGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        yield RowError(
            "line too long",
            f"the line has more than {LARGEST_LINE >> 20} MiB: expected one JSON object per line, not one list of "
            f"all: {line[:80]!r}.",
        )


def json_items(stream: Any) -> Iterator[bytes | dict | RowError]:
    """The rows of a `.json` file: of one list, one object, or the lines that such a file may hold as well."""
    first = stream.readline(LARGEST_LINE)
    start = first.removeprefix(codecs.BOM_UTF8)
    # Lines may be more than fit in memory.
    if start.lstrip().startswith(b"{") and isinstance(parse_line(start), dict):
        yield first
        yield from json_lines(stream)
        return
    text = b"".join([first, *islice(iter(lambda: stream.read(2**20), b""), LARGEST_LIST >> 20)])
    if stream.read(1):
        yield RowError(
            "list too long",
            f"the file is no JSON lines, and more than {LARGEST_LIST >> 20} MiB are not read at once: write one JSON "
            f"object per line (`jq -c '.[]' FILE.json > FILE.jsonl`): {text[:80]!r}.",
        )
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield _unreadable("the file is no JSON list", text, error)
        else:
            yield from json_lines(BytesIO(text))
        return
    for row in rows if isinstance(rows, list) else [rows]:
        yield row if isinstance(row, dict) else _no_object(row, json.dumps(row)[:80])


def parse_line(line: bytes) -> dict | RowError:
    """The object of a line, or what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Of an object over several lines, a line is only the beginning.
        is_part = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
        return _unreadable("the line is not JSON", line, error, is_part)
    if isinstance(row, list):
        return _no_object(row, line[:80], f"one object per line, which {_jq(line)} writes of a list")
    return row if isinstance(row, dict) else _no_object(row, line[:80])


def _unreadable(what: str, text: bytes, error: Exception, is_part: bool = False) -> RowError:
    reason, hint = "not JSON", ""
    if isinstance(error, UnicodeDecodeError):
        reason, what = "not UTF-8", f"{what} in UTF-8"
        if b"\0" in text[:80]:
            hint = ". It looks like UTF-16, of which `iconv -f UTF-16 -t UTF-8 FILE` makes UTF-8"
    elif isinstance(error, RecursionError):
        reason, what = "nested too deeply", f"{what}, nested too deeply to be read"
    elif isinstance(error, json.JSONDecodeError):
        if is_part or error.msg == "Extra data":
            hint = f". Expected one whole object per line, which {_jq(text)} writes"
    else:
        reason = "number too long"
    return RowError(reason, f"{what} ({error}){hint}: {text[:80]!r}.")


def _jq(text: bytes) -> str:
    is_list = text.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return f"`jq -c {chr(39) + '.[]' + chr(39) if is_list else '.'} FILE`"


def _no_object(row: Any, text: Any, expected: str = "one object per row") -> RowError:
    return RowError("not JSON", f"expected a JSON object, got {type(row).__name__} ({expected}): {text!r}.")


__all__ = ["json_items", "json_lines", "parse_line"]
