# SPDX-License-Identifier: Apache-2.0
"""From files, wherever fsspec finds them, to rows, and from rows of many kinds to chats.

- File: a `.jsonl` or `.parquet` file, compressed or not, on a disk or in an object store; `list_files` finds them.
- Row: one JSON object of a file, with its place, "file:line"; `read_rows` reads them.
- Chat: messages as a chat template takes them, with what is known of the last answer; `read_chats` makes one of a row,
  or one per choice of a server's response.

What cannot be used is a `RowError` with a short reason, under which such rows are counted.
"""

import codecs
import gzip
import inspect
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

# --- Addresses of other machines, and what their file systems say, without the credentials that either may hold.


# Here a name before an `@` is a key; Azure has a container there, SSH a user, `hf://datasets/ORG/NAME@` a revision.
KEY_PROTOCOLS = {"http", "https", "s3", "s3a", "gs", "gcs"}
LOCAL_PROTOCOLS = {"file", "local", "memory"}
# Where an address may hold credentials: `://name:password@` (a password may hold slashes) and `?signature=...`.
USER_INFO = re.compile(r"://(?:[^\s@]*:[^\s@]*|[^/\s@]*)@")
QUERY = re.compile(r"(://[^?\s]*)\?\S*")
# Values of environment variables so named are cut out of what a file system says of itself.
SECRET_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
# The extras of this package that install a protocol's file system.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def is_remote(address: Any) -> bool:
    """Whether an address names a protocol, such as `s3://`."""
    return isinstance(address, str) and "://" in address


def check_address(address: str) -> None:
    """Refuses an address of checkpoints that holds credentials or names no place, or whose package is missing."""
    refuse_credentials(address)
    protocol, _, rest = address.partition("://")
    if not is_remote(address) or address != address.strip() or not rest.strip("/"):
        raise ValueError(f"{address!r} is not an address of checkpoints; give one such as s3://bucket/run.")
    fsspec.get_filesystem_class(protocol)


def refuse_credentials(address: str) -> None:
    """Refuse an address of fsspec, also of several links (`zip://*.jsonl::https://...`), that holds a key, a password
    or a query, each of which would be written down with it. The error does not repeat them.
    """
    for link in address.split("::"):
        protocol, found, rest = link.partition("://")
        host, query = rest.partition("/")[0], rest.partition("?")[2]
        # What stands after a colon is a port, or a password, which may hold a slash.
        password = host.rpartition("@")[0].partition(":")[2] or host.partition(":")[2]
        has_password = "@" in rest and bool(password) and not password.isdecimal()
        has_key = "@" in host and protocol in KEY_PROTOCOLS
        # Elsewhere a lone question mark is a letter of a name or of a pattern.
        has_query = "=" in query or ("?" in rest and protocol in ("http", "https"))
        if found and protocol not in LOCAL_PROTOCOLS and (has_password or has_key or has_query):
            raise ValueError(
                f"The {protocol}:// address holds credentials or a query, which would be written into manifests. Put "
                "credentials into the environment or the configuration of the store's package."
            )


def without_secrets(text: str) -> str:
    """A text, cut to 300 characters, without the values of environment variables that hold secrets."""
    for name, value in os.environ.items():
        if len(value) >= 8 and SECRET_VARIABLE.search(name):
            text = text.replace(value, "<" + name + ">")
    return " ".join(text.split())[:300]


def without_credentials(value: Any) -> Any:
    """JSON whose addresses have lost what is before an `@` and after a `?`, where credentials would be."""
    if isinstance(value, dict):
        return {name: without_credentials(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_credentials(part) for part in value]
    return QUERY.sub(r"\1", USER_INFO.sub("://", value)) if isinstance(value, str) else value


def describe(error: BaseException) -> str:
    """Kind and text of an error, without secrets."""
    return without_secrets(f"{type(error).__name__}: {error}")


def open_filesystem(
    address: str | os.PathLike, storage_options: Mapping[str, Any] | None = None
) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of an address, and the address within it; raises ValueError where that cannot be."""
    address = os.fspath(address)
    if not address:
        raise ValueError("The address is empty: give a file, a folder or an fsspec address.")
    refuse_credentials(address)
    try:
        return fsspec.core.url_to_fs(address, **(storage_options or {}))
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(address.partition("://")[0])
        what = f"pip install 'dflash_hf[{extra}]'" if extra else "expected a folder or an fsspec address"
        raise ValueError(f"{address} cannot be opened ({error}): {what}.") from error


@contextmanager
def explained(address: str | os.PathLike, doing: str) -> Iterator[None]:
    """Names the address and what may help where a file system fails, which has its own errors for each store."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"No such file or folder: {address} ({error}).") from error
    except Exception as error:
        raise OSError(
            f"{doing} {address} failed ({describe(error)}). Check the address and the credentials in the environment "
            "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...), or pass storage_options."
        ) from error


# --- Files of rows: a folder, a pattern, `s3://`, `gs://`, `hf://datasets/...`, `memory://`.


SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst", ".parquet")
# Folders hold `.json` files of other kinds too, such as settings, so that these are read where they are named.
JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")
NAMED_SUFFIXES = (*SUFFIXES, *JSON_SUFFIXES)
# A file is what it begins with, whatever its name: stores unpack, and people rename.
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "Parquet"}
KINDS = {"gz": "gzip", "zst": "zstd", "parquet": "Parquet"}
# A file of up to so many bytes is fetched by one request.
WHOLE_BYTES = 16 * 2**20


def _shown(value: Any) -> str:
    return repr(value[:80] if isinstance(value, str | bytes) else str(value)[:80])


class SourceError(OSError):
    """A file of rows cannot be read to its end."""


class RowError(ValueError):
    """A row that cannot be used; `reason` is the short name under which such rows are counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class SourceFile:
    """One file of rows."""

    name: str  # below the address that was listed
    path: str  # within the file system
    place: str  # for messages
    size: int  # in bytes
    version: str  # the store's etag or hash, or the times of the last change


def list_files(
    address: str | os.PathLike, storage_options: Mapping[str, Any] | None = None, recursive: bool = True
) -> list[SourceFile]:
    """Lists the files of rows at an address, in sorted order.

    Args:
        address: A file, a folder, or a pattern with `*`. A `.json` file is found by its name, or by a pattern that
            ends so, and not in a folder. Hidden files and folders are left out, and other files are told of.
        storage_options: Arguments of the file system.
        recursive: Whether to look into folders of the folder.

    Raises:
        FileNotFoundError: Nothing is there, or no file whose name ends in one of `SUFFIXES`.
        ValueError: A single file of another kind, or an unknown file system.
        OSError: The store cannot be listed.
    """
    address = os.fspath(address)
    fs, path = open_filesystem(address, storage_options)
    is_pattern = "*" in path
    with explained(address, "Listing"):
        depth = None if recursive else 1
        found = fs.glob(path, detail=True) if is_pattern else fs.find(path, detail=True, maxdepth=depth)
        # A local listing does not say what a link leads to.
        found = {name: fs.info(name) if info.get("islink") else info for name, info in found.items()}
        # A pipe, which is of the type "other", cannot be read twice.
        found = {name: info for name, info in found.items() if info.get("type") not in ("directory", "other")}
        if not found and not fs.exists(path):
            raise FileNotFoundError(f"give a {' or '.join(NAMED_SUFFIXES)} file, or a folder of them")
    if list(found) == [path] and not path.lower().endswith(NAMED_SUFFIXES):
        raise ValueError(f"{address} ends in none of {NAMED_SUFFIXES}, so its format is unknown.")
    suffixes = NAMED_SUFFIXES if is_pattern and path.lower().endswith(NAMED_SUFFIXES) else SUFFIXES
    files = [_source_file(fs, address, path, name, found[name]) for name in sorted(found)]
    files = [file for file in files if file.path == path or "/." not in f"/{file.name}"]
    read = [file for file in files if file.path == path or file.name.lower().endswith(suffixes)]
    if not read:
        raise FileNotFoundError(f"{address} holds no file that ends in one of {SUFFIXES}; .json by FOLDER/*.json.")
    if left := sorted({file.name for file in files} - {file.name for file in read}):
        logger.warning("%s: %d files of other kinds are not read, such as %s.", address, len(left), left[0])
    return read


def _source_file(fs: fsspec.AbstractFileSystem, address: str, listed: str, path: str, info: dict) -> SourceFile:
    if path == listed:
        name, place = path.rpartition("/")[2], address
    elif "*" in listed:
        name, place = path[len(listed.partition("*")[0].rpartition("/")[0]) :].lstrip("/"), fs.unstrip_protocol(path)
    else:
        name = path[len(listed) :].lstrip("/")
        place = f"{address.rstrip('/')}/{name}"
    if isinstance(fs, LocalFileSystem):
        # The time that no program sets changes with a file that is written again, at an equal size and date, too.
        version = f"{info['mtime']} {os.stat(path).st_ctime}"
    else:
        keys = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "created")
        version = next((str(info[key]).strip('"') for key in keys if info.get(key)), "")
    return SourceFile(name, path, place, int(info.get("size") or 0), version)


def read_rows(fs: fsspec.AbstractFileSystem, file: SourceFile) -> Iterator[tuple[str, dict | RowError, int]]:
    """Rows in order, each with its place and the bytes read so far; what is broken is a `RowError`.

    The place is "file:line", of Parquet and of a list "file:row".

    Raises:
        SourceError: The file cannot be read, or not to its end; names file and line.
    """
    number, named = 0, KINDS.get(file.path.lower().rpartition(".")[2])
    is_fetched = file.size <= WHOLE_BYTES and not isinstance(fs, LocalFileSystem)
    try:
        with io.BytesIO(fs.cat_file(file.path)) if is_fetched else fs.open(file.path, "rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), named)
            for number, row in enumerate(_rows(raw, kind, file.path.lower().endswith(JSON_SUFFIXES)), start=1):
                if row is not None:
                    # Parquet is read from several places at once, so that the position in the file says nothing.
                    yield f"{file.place}:{number}", row, 0 if kind == "Parquet" else raw.tell()
    # Each store, format and compression has its own errors.
    except Exception as error:
        what = f"not a whole {named} file" if named and not isinstance(error, FileNotFoundError) else "cannot be read"
        raise SourceError(
            f"{file.place}:{number + 1}: {what} ({describe(error)}): copy or write the file again."
        ) from error


def _rows(raw: Any, kind: str | None, is_json: bool) -> Iterator[dict | RowError | None]:
    """The rows of a file, None for a blank line."""
    stream: gzip.GzipFile | io.BufferedReader
    if kind == "Parquet":
        table = pq.ParquetFile(raw)
        packed = [column for column in table.schema_arrow if "arrow.json" in str(column.type)]
        for batch in table.iter_batches(batch_size=128):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield row | {column.name: _unpacked(row[column.name], column.type) for column in packed}
        return
    if kind == "gzip":
        stream = gzip.GzipFile(fileobj=raw)
    elif kind == "zstd":
        # Several frames in a row are one file, and a frame that is cut off is an error.
        stream = io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))
    else:
        # Files of some stores cannot be peeked into.
        stream = io.BufferedReader(raw, 2**20)
    if stream.peek(3).startswith(codecs.BOM_UTF8):
        stream.read(3)
    yield from (_json_items if is_json else _json_lines)(stream)


def _unpacked(value: Any, kind: pa.DataType) -> Any:
    """A value of a column in which Arrow keeps JSON, such as messages that are unlike each other, as its text."""
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {field.name: _unpacked(value[field.name], field.type) for field in kind}
    return [_unpacked(item, kind.value_type) for item in value] if isinstance(value, list) else value


def _json_lines(stream: Any) -> Iterator[dict | RowError | None]:
    """The row of each line of a binary stream."""
    for line in stream:
        yield _row(_parsed_json(line, "the line is not JSON")) if line.strip() else None


def _json_items(stream: Any) -> Iterator[dict | RowError | None]:
    """The rows of a `.json` file: of one list, one object, or the lines that such a file may hold as well."""
    first = stream.readline()
    # Lines may be more than fit in memory.
    if not first.lstrip().startswith(b"[") and isinstance(row := _parsed_json(first, ""), dict):
        yield row
        yield from _json_lines(stream)
        return
    text = first + stream.read()
    rows = _parsed_json(text, "the file is not a JSON list")
    if isinstance(rows, RowError) and not text.lstrip().startswith(b"["):
        yield from _json_lines(io.BytesIO(text))
    else:
        yield from map(_row, rows if isinstance(rows, list) else [rows])


def _row(value: Any) -> dict | RowError:
    if isinstance(value, dict | RowError):
        return value
    return RowError("not JSON", f"expected a JSON object, got {type(value).__name__}: {_shown(json.dumps(value))}.")


def _parsed_json(text: bytes, what: str) -> Any:
    """What the JSON of a line or file holds, or the error, which begins with `what`, that keeps it from being read."""
    try:
        return json.loads(text)
    except RecursionError:
        reason, said = "nested too deeply", "nested too deeply"
    except UnicodeDecodeError as error:
        reason, said, what = "not UTF-8", str(error), f"{what} in UTF-8"
    except json.JSONDecodeError as error:
        reason, said = "not JSON", f"{error}; expected one whole object per line"
    except ValueError as error:
        reason, said = "number too long", str(error)
    return RowError(reason, f"{what} ({said}): {_shown(text)}.")


# --- Messages as they come from servers, files and Arrow become messages as a chat template takes them.


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {"human": "user", **dict.fromkeys(("observation", "tool_response", "function_response"), "tool")}
SHAREGPT_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call", "tool_call"), "assistant")
# What says of a message that it is not to be learnt from, in the spellings of several trainers.
TRAINED_KEYS = ("weight", "train", "trainable", "training", "loss", "loss_mask")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MEDIA_TYPES = ("image", "audio", "video", "file")
TEXT_TYPES = ("text", "input_text", "output_text")


@contextmanager
def nesting_limited() -> Iterator[None]:
    """What is nested more deeply than Python can follow is a row that cannot be used."""
    try:
        yield
    except RecursionError as error:
        raise RowError("nested too deeply", "lists or objects in the row are nested too deeply to be read.") from error


def clean_messages(messages: Iterable[Any]) -> list[dict]:
    """Messages without what Arrow fills in (case DT4): no None, `content` always there, arguments as dicts."""
    cleaned = []
    for index, message in enumerate(messages):
        try:
            cleaned.append(_clean_message(message))
        except RowError as error:
            raise RowError(error.reason, f"message {index} {error}") from error
    return cleaned


def _clean_message(message: Any) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError("no role", f"must be a dict with a string `role`, got {_shown(message)}.")
    if message["role"] not in ROLES:
        # A misspelt role would be rendered as if it were right.
        raise RowError("unknown role", f"has the role {message['role']!r}, expected one of {', '.join(ROLES)}.")
    message = {"content": "", **without_none(message)}
    if message["role"] == "assistant":
        message = {key: value for key, value in message.items() if key not in TRAINED_KEYS}
    message["content"] = _content(message["content"])
    for key in REASONING_KEYS:
        # Templates pass over anything else.
        if not isinstance(message.get(key, ""), str) and message.pop(key):
            raise RowError("broken thinking", f"has a `{key}` that is not a string.")
    # Some templates ask only whether the key is there, so an empty list must not stay.
    tool_calls = parsed(message.pop("tool_calls", None))
    # The older name, which templates pass over.
    if (call := message.pop("function_call", None)) and not tool_calls:
        tool_calls = [{"type": "function", "function": call}]
    if tool_calls:
        if not isinstance(tool_calls, list):
            raise RowError("broken tool calls", f"must have a list of `tool_calls`, got {_shown(tool_calls)}.")
        message["tool_calls"] = [_with_parsed_arguments(parsed(call)) for call in tool_calls]
    return message


def is_trained(message: dict) -> bool:
    """Whether an answer is to be learnt from, by flags of its own such as `"weight": 0` or `"train": false`."""
    values = [str(message[key]).lower() for key in TRAINED_KEYS if message.get(key) is not None]
    if any(value not in ("0", "0.0", "false", "1", "1.0", "true") for value in values):
        raise RowError("broken weight", f"an answer has the flags {values}, expected 0 or 1, false or true.")
    return not {"0", "0.0", "false"} & set(values)


def _content(content: Any) -> str:
    """The content as text: parts of text are joined, and media is refused, which a text drafter cannot learn from."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        what = f"must have a string or a list of parts as `content`, got {type(content).__name__}."
        raise RowError("broken content", what)
    texts = []
    for part in content:
        fields = part if isinstance(part, dict) else {"text": part}
        kind = fields.get("type") or "text"
        if any(media in str(kind) or media in fields for media in MEDIA_TYPES):
            raise RowError("image, audio or video", f"has a part of the type {kind!r}.")
        if not isinstance(fields.get("text"), str) or kind not in TEXT_TYPES:
            raise RowError("broken content", f"has a part that is not text: {_shown(part)}.")
        texts.append(fields["text"])
    return "".join(texts)


def _with_parsed_arguments(call: Any) -> dict:
    if isinstance(call, dict) and "function" in call:
        return {**call, "function": _with_parsed_arguments(call["function"])}
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise RowError("broken tool calls", f"has a tool call without the `name` of a function: {_shown(call)}.")
    arguments = parsed(call.get("arguments"))
    arguments = arguments.strip() if isinstance(arguments, str) else arguments
    # A call of a function that takes nothing is logged as "", null, or without arguments.
    return {**call, "arguments": arguments or {}} if isinstance(arguments or {}, dict) else call


def parsed(value: Any) -> Any:
    """What a string of JSON holds; other values, and strings of something else, as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    # Python also refuses whole numbers of thousands of digits.
    except ValueError:
        return value


def clean_tools(tools: Any) -> list[dict] | None:
    """The tools of a row, a list or its JSON, without what Arrow fills in; None where there are none."""
    tools = parsed(tools) if isinstance(tools, str) else without_none(tools)
    tools = [parsed(tool) for tool in tools] if isinstance(tools, list) else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowError("broken tools", f"`tools` must be a list of dicts or the JSON of one, got {_shown(tools)}.")
    return tools or None


def without_none(value: Any) -> Any:
    """Nested lists and dicts without the keys whose value is None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


# --- Rows of many makes become chats.


# Finish reasons of an answer that was cut off, so that it has no end of turn.
TRUNCATED = ("length", "max_tokens", "abort", "content_filter", "error")
TOKEN_ID_KEYS = ("completion_token_ids", "token_ids", "output_token_ids", "output_ids")
# Documents hold their ids as int32.
LARGEST_ID = 2**31 - 1
# These say how the template is called, which a row must not change.
RESERVED_TEMPLATE_KWARGS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents",
    "add_generation_prompt",
}


@dataclass(frozen=True)
class Chat:
    """One conversation, its answers included, ready for a chat template."""

    messages: list[dict]
    tools: list[dict] | None = None
    completion_ids: list[int] | None = None
    is_truncated: bool = False
    # The stop sequence that ended the last answer; unless it is an end of turn, the target generated none.
    stop_text: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    language: str | None = None
    # Which model a log says has written the last answer.
    model: str | None = None
    # Answers, by the index of their messages, that the row says are not to be learnt from.
    untrained: frozenset[int] = frozenset()
    # What a model was given in place of a rendered prompt: the text or the ids of a request to /v1/completions.
    raw_prompt: str | list[int] | None = None

    @property
    def prompt(self) -> list[dict]:
        """The messages before the first answer."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        return self.messages[:first]


def read_chats(row: Any) -> list[Chat]:
    """The chats of a row, or its `RowError`: one chat, or one per choice where a server was asked for several."""
    if not isinstance(row, dict):
        raise RowError("no messages", f"a chat must be a dict with `messages`, got {type(row).__name__}.")
    with nesting_limited():
        own = any(row.get(name) is not None for name in ("messages", "conversations", "prompt"))
        request = parsed(row.get("request"))
        if isinstance(request, dict) and (row.get("response") is not None or not own):
            return _read_log({**row, "request": request, "response": parsed(row.get("response"))})
        return [_chat(row, _messages(row), row)]


def _chat(row: dict, given: list, answer: dict, **fields: Any) -> Chat:
    """A chat of messages; `answer` is where the finish reason and the token ids of its last answer stand."""
    messages = clean_messages(given)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise RowError("no answer", f"no message has the role 'assistant', only {roles}: nothing can be learnt.")
    if roles[0] == "assistant":
        raise RowError("answer first", "the first message is the assistant's: an answer needs a message before it.")
    ids = next((answer[key] for key in TOKEN_ID_KEYS if answer.get(key) is not None), None)
    is_list = isinstance(ids, list | tuple)
    if ids is not None and not (is_list and all(type(i) is int and 0 <= i <= LARGEST_ID for i in ids)):
        raise RowError("broken token ids", f"`completion_token_ids` must be a list of token ids, got {_shown(ids)}.")
    # SGLang's own endpoint wraps the reason in an object.
    reason = answer.get("finish_reason")
    reason = str(reason.get("type") if isinstance(reason, dict) else reason).lower()
    # vLLM and SGLang say which stop sequence it was, and which id where it was a token.
    stops = (answer.get("stop_reason"), answer.get("matched_stop"))
    return Chat(
        messages=messages,
        tools=clean_tools(row.get("tools")),
        completion_ids=None if ids is None else list(ids),
        is_truncated=reason in TRUNCATED,
        stop_text=next((s for s in stops if isinstance(s, str) and s), None) if reason == "stop" else None,
        template_kwargs=template_kwargs(row.get("chat_template_kwargs")),
        source=_name(row.get("source") or row.get("dataset")),
        language=_name(row.get("language")),
        untrained=frozenset(i for i, m in enumerate(given) if m["role"] == "assistant" and not is_trained(m)),
        **fields,
    )


def _messages(row: dict) -> list:
    """The messages of a row and then those of its separate answer."""
    prompt = _prompt(row)
    completion = next((row[key] for key in ("completion", "response") if row.get(key) is not None), None)
    if completion is None:
        return prompt
    # A text is an answer, whatever it begins with, unless the prompt's messages are stored as the text of JSON too.
    is_packed = any(isinstance(row.get(name), str) and parsed(row[name]) == prompt for name in ("messages", "prompt"))
    is_text = isinstance(completion, str) and not is_packed
    answer = _message_list({"content": completion} if is_text else completion, "completion", "assistant")
    if prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
        if is_text and completion == prompt[-1].get("content"):
            return prompt
        what = "the row has a `completion` or `response` besides the answer in its messages: keep the target's own."
        raise RowError("two answers", what)
    if is_text and isinstance(row.get("reasoning_content"), str):
        answer[0]["reasoning_content"] = row["reasoning_content"]
    return prompt + answer


def _prompt(row: dict) -> list:
    """The messages of a row, a separate answer apart."""
    if row.get("messages") is not None:
        return _message_list(row["messages"], "messages")
    if row.get("conversations") is not None:
        messages = [_from_sharegpt(m) for m in _message_list(row["conversations"], "conversations")]
        has_system = isinstance(row.get("system"), str) and row["system"]
        return [{"role": "system", "content": row["system"]}, *messages] if has_system else messages
    if row.get("prompt") is not None:
        return _message_list(row["prompt"], "prompt", "user")
    raise RowError("no messages", "the row has no `messages`: expected a list of {'role': ..., 'content': ...}.")


def _message_list(value: Any, name: str, role: str | None = None) -> list:
    """Messages of a field: a list, or its JSON; with a role also one message of it, or the text of one."""
    # Columns of unlike messages are often stored as JSON text, since Arrow wants one type.
    messages = parsed(value)
    is_list = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
    if role and isinstance(value, str) and not (messages and is_list):
        return [{"role": role, "content": value}]
    if role and isinstance(value, dict):
        return [{"role": role, **value}]
    if not isinstance(messages, list | tuple):
        raise RowError("no messages", f"`{name}` must be a list of dicts or the JSON of one, got {_shown(value)}.")
    return [parsed(message) for message in messages]


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("from") is None:
        return message
    role, value = message["from"], message.get("value")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    rest["role"] = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ("function_call", "tool_call"):
        return {**rest, "content": value}
    # One call or a list of them, as JSON.
    calls = parsed(value)
    calls = calls if isinstance(calls, list) else [calls]
    return {**rest, "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def requested(row: dict) -> dict:
    """What a logged request asked, as fields of the row in place of the request and its response.

    Of the request `messages` or `prompt`, `tools` and `chat_template_kwargs` count; how it was sampled does not.
    """
    request = _body(row["request"])
    asked = {key: request[key] for key in ("tools", "chat_template_kwargs") if request.get(key)}
    asked |= {key: request[key] for key in ("messages", "prompt") if request.get(key) is not None}
    # Such fields beside the request are not what was asked.
    other = ("request", "response", "messages", "prompt")
    return {key: value for key, value in row.items() if key not in other} | asked


def _body(value: Any) -> Any:
    """A request or a response without what a batch file wraps it in."""
    return value["body"] if isinstance(value, dict) and isinstance(value.get("body"), dict) else value


def _read_log(row: dict) -> list[Chat]:
    """Chats of a request to a server and what it answered."""
    response = _body(row.get("response"))
    answered = response if isinstance(response, dict) else {}
    choices = answered.get("choices")
    choices = [c if isinstance(c, dict) else {} for c in choices] if isinstance(choices, list) else []
    # Chunks in a list, or as the server sent them.
    is_streamed = isinstance(response, list) or (isinstance(response, str) and response.lstrip().startswith("data:"))
    if is_streamed or any(choice.get("delta") is not None and choice.get("message") is None for choice in choices):
        raise RowError(
            "streamed",
            "the response was streamed: join their `delta`s into one `message`, or let "
            f"dflash-hf generate answer the request again: {_shown(response)}.",
        )
    if not choices:
        raise RowError("no answer", f"the response to the request has no `choices`: {_shown(response)}.")
    asked = requested(row)
    raw = None if asked.get("messages") is not None else _raw_prompt(asked.get("prompt"))
    text = raw if isinstance(raw, str) else json.dumps(raw)
    prompt = _prompt({"messages": asked["messages"]}) if raw is None else [{"role": "user", "content": text}]
    is_echoed = raw is not None and _body(row["request"]).get("echo")
    chats = []
    for choice in choices:
        message = choice.get("message")
        if message is None and isinstance(choice.get("text"), str):
            message = {"content": choice["text"].removeprefix(text if is_echoed else "")}
        if not isinstance(message, dict):
            raise RowError("no answer", f"a choice of the response has no `message`: {_shown(choice)}.")
        messages = [*prompt, {**message, "role": "assistant"}]
        chats.append(_chat(asked, messages, choice, model=_name(answered.get("model")), raw_prompt=raw))
    return chats


def _raw_prompt(value: Any) -> str | list[int]:
    """What a request to /v1/completions gave the model as it is: a text or token ids, or a list of one of them."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value)):
        return value
    raise RowError("no messages", f"the request has neither `messages` nor one text as `prompt`: {_shown(value)}.")


def template_kwargs(value: Any) -> dict[str, Any]:
    """A row's own arguments of the chat template, an object or its JSON; none that say how the template is called."""
    kwargs = without_none(parsed(value) or {})
    if not isinstance(kwargs, dict) or RESERVED_TEMPLATE_KWARGS & kwargs.keys():
        what = f"`chat_template_kwargs` must be an object of only variables of the template, got {_shown(value)}."
        raise RowError("broken template arguments", what)
    return kwargs


def _name(value: Any) -> str | None:
    # A lone half of a surrogate pair, which JSON can spell, cannot be stored.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) and value else None
