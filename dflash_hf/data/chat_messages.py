# SPDX-License-Identifier: Apache-2.0
"""Messages as they come from servers, files and Arrow become messages as a chat template takes them."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MEDIA_TYPES = ("image", "audio", "video", "file")
TEXT_TYPES = ("text", "input_text", "output_text")


class RowError(ValueError):
    """A row that cannot be used; `reason` is the short name under which such rows are counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


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
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("no role", f"message {i} must be a dict with a string `role`, got {str(message)[:80]!r}.")
        if message["role"] not in ROLES:
            raise RowError(
                "unknown role",
                f"message {i} has the role {message['role']!r}, expected one of {', '.join(ROLES)}: a misspelt role "
                "would be rendered as if it were right.",
            )
        message = {"content": "", **without_none(message)}
        message["content"] = _content(message["content"], i)
        for key in REASONING_KEYS:
            if not isinstance(message.get(key, ""), str) and message.pop(key):
                raise RowError(
                    "broken thinking", f"message {i}: `{key}` must be a string; templates pass over anything else."
                )
        # Some templates ask only whether the key is there, so an empty list must not stay.
        tool_calls = parsed(message.pop("tool_calls", None))
        # The older name, which templates pass over.
        if (call := message.pop("function_call", None)) and not tool_calls:
            tool_calls = [{"type": "function", "function": call}]
        if tool_calls:
            if not isinstance(tool_calls, list):
                raise RowError(
                    "broken tool calls", f"message {i}: `tool_calls` must be a list, got {type(tool_calls).__name__}."
                )
            message["tool_calls"] = [_with_parsed_arguments(call, i) for call in tool_calls]
        cleaned.append(message)
    return cleaned


def _content(content: Any, message_index: int) -> str:
    """The content as text: parts of text are joined, and media is refused, which a text drafter cannot learn from."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(
            "broken content",
            f"message {message_index}: `content` must be a string or a list of parts, got {type(content).__name__}.",
        )
    texts = []
    for part in content:
        kind = (part.get("type") or "text") if isinstance(part, dict) else "text"
        if any(media in str(kind) or (isinstance(part, dict) and media in part) for media in MEDIA_TYPES):
            raise RowError("image, audio or video", f"message {message_index} has a part of the type {kind!r}.")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or kind not in TEXT_TYPES:
            raise RowError(
                "broken content", f"message {message_index} has a part that is no text: {str(part)[:80]!r}."
            )
        texts.append(text)
    return "".join(texts)


def _with_parsed_arguments(tool_call: Any, message_index: int) -> dict:
    if not isinstance(tool_call, dict):
        raise RowError(
            "broken tool calls",
            f"message {message_index}: each of `tool_calls` must be a dict, got {str(tool_call)[:80]!r}.",
        )
    if "function" in tool_call:
        return {**tool_call, "function": _with_parsed_arguments(tool_call["function"], message_index)}
    if not isinstance(tool_call.get("name"), str):
        raise RowError(
            "broken tool calls",
            f"message {message_index}: a tool call has no function with a `name`: {str(tool_call)[:80]!r}.",
        )
    arguments = parsed(tool_call.get("arguments"))
    return {**tool_call, "arguments": arguments} if isinstance(arguments, dict) else tool_call


def parsed(value: Any) -> Any:
    """What a string of JSON holds; other values, and strings of something else, as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def clean_tools(tools: Any) -> list[dict] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise RowError("broken tools", f"`tools` is a string but not JSON ({error}): {tools[:80]!r}.") from error
    else:
        tools = without_none(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            "broken tools", f"`tools` must be a list of dicts or the JSON string of one, got {str(tools)[:80]!r}."
        )
    return tools


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value
