# SPDX-License-Identifier: Apache-2.0
"""Rows of many makes become chats: messages as a chat template takes them, and what is known of the last answer.

A row is one of

- `{"messages": [...]}`, OpenAI style, with `tools`, tool calls and `reasoning_content`;
- `{"prompt": ..., "completion": ...}`, each a string or messages (`messages` may stand for `prompt`);
- `{"conversations": [{"from": ..., "value": ...}]}`, ShareGPT style;
- `{"request": {...}, "response": {...}}`, what an OpenAI-compatible server was asked and answered;

and may have `tools`, `finish_reason`, `completion_token_ids` (the last answer as the target generated it),
`chat_template_kwargs` (such as `{"enable_thinking": false}`), `source` or `dataset`, and `language`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
# Finish reasons of an answer that was cut off, so that it has no end of turn.
TRUNCATED = ("length", "max_tokens", "abort", "content_filter")
MEDIA_TYPES = ("image", "audio", "video", "file")
TOKEN_ID_KEYS = ("completion_token_ids", "token_ids", "output_token_ids", "output_ids")


class RowError(ValueError):
    """A row that cannot be used; `reason` is the short name under which such rows are counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Chat:
    """One conversation, its answers included, ready for a chat template."""

    messages: list[dict]
    tools: list[dict] | None = None
    completion_ids: list[int] | None = None
    is_truncated: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    language: str | None = None

    @property
    def prompt(self) -> list[dict]:
        """The messages before the first answer."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        return self.messages[:first]


def read_chats(row: Any) -> list[Chat]:
    """Turns a row into its chats: one, or one per choice where a server was asked for several.

    Raises:
        RowError: The row cannot be used; says what is wrong with it.
    """
    if not isinstance(row, dict):
        raise RowError("no messages", f"a chat must be a dict with `messages`, got {type(row).__name__}.")
    if isinstance(row.get("request"), dict) and row.get("response") is not None:
        return _read_log(row)
    prompt, completion = _prompt_and_completion(row)
    return [_chat(row, prompt + completion, row)]


def _chat(row: dict, messages: list[dict], answer: dict) -> Chat:
    """A chat of `messages`; `answer` is where the finish reason and the token ids of its last answer stand."""
    messages = clean_messages(messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        roles = [message["role"] for message in messages]
        raise RowError(
            "no answer", f"no message has the role 'assistant', so nothing can be learnt: the roles are {roles}."
        )
    if answers[0] == 0:
        raise RowError("answer first", "the first message is the assistant's: an answer needs a message before it.")
    ids = next((answer[key] for key in TOKEN_ID_KEYS if answer.get(key) is not None), None)
    return Chat(
        messages=messages,
        tools=_clean_tools(row.get("tools")),
        completion_ids=_completion_ids(ids),
        is_truncated=answer.get("finish_reason") in TRUNCATED,
        template_kwargs=_without_none(row.get("chat_template_kwargs") or {}),
        source=_name(row.get("source") or row.get("dataset")),
        language=_name(row.get("language")),
    )


def _prompt_and_completion(row: dict) -> tuple[list, list]:
    """The messages of a row and those that its separate answer adds."""
    if row.get("messages") is not None:
        messages = _message_list(row["messages"], "messages")
    elif row.get("conversations") is not None:
        messages = [_from_sharegpt(m) for m in _message_list(row["conversations"], "conversations")]
        if isinstance(row.get("system"), str) and row["system"]:
            messages = [{"role": "system", "content": row["system"]}, *messages]
    elif row.get("prompt") is not None:
        messages = _as_messages(row["prompt"], "user", "prompt")
    else:
        raise RowError("no messages", "the row has no `messages`: expected a list of {'role': ..., 'content': ...}.")
    completion = next((row[key] for key in ("completion", "response") if row.get(key) is not None), None)
    if completion is None:
        return messages, []
    answer = _as_messages(completion, "assistant", "completion")
    if isinstance(completion, str) and isinstance(row.get("reasoning_content"), str):
        answer[0]["reasoning_content"] = row["reasoning_content"]
    return messages, answer


def _as_messages(value: Any, role: str, name: str) -> list[dict]:
    if isinstance(value, str) and not value.lstrip().startswith('[{"'):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [{"role": role, **value}]
    return _message_list(value, name)


def _message_list(value: Any, name: str) -> list:
    # Columns of unlike messages are often stored as JSON text, since Arrow wants one type.
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError("no messages", f"`{name}` is a string but not JSON ({error}): {value[:80]!r}.") from error
    if not isinstance(value, list | tuple):
        raise RowError("no messages", f"`{name}` must be a list of dicts, got {type(value).__name__}.")
    return list(value)


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict) or "from" not in message:
        return message
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    return {**rest, "role": SHAREGPT_ROLES.get(role, role), "content": message.get("value")}


def _read_log(row: dict) -> list[Chat]:
    """Chats of a request to a server and what it answered, plain or as a batch file wraps them in `body`."""
    request, response = row["request"], row["response"]
    request = request["body"] if isinstance(request.get("body"), dict) else request
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices:
        raise RowError("no answer", f"the response has no `choices`: {str(response)[:80]!r}.")
    prompt, _ = _prompt_and_completion({key: request.get(key) for key in ("messages", "prompt")})
    asked = {**row, **{key: request[key] for key in ("tools", "chat_template_kwargs") if request.get(key)}}
    chats = []
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if message is None and isinstance(choice, dict) and isinstance(choice.get("text"), str):
            message = {"content": choice["text"]}
        if not isinstance(message, dict):
            raise RowError("no answer", f"a choice of the response has no `message`: {str(choice)[:80]!r}.")
        chats.append(_chat(asked, [*prompt, {**message, "role": "assistant"}], choice))
    return chats


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
        message = {"content": "", **_without_none(message)}
        message["content"] = _content(message["content"], i)
        # Some templates ask only whether the key is there, so an empty list must not stay.
        if tool_calls := message.pop("tool_calls", None):
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
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if any(media in str(kind) or (isinstance(part, dict) and media in part) for media in MEDIA_TYPES):
            raise RowError("image, audio or video", f"message {message_index} has a part of the type {kind!r}.")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
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
    if isinstance(tool_call.get("function"), dict):
        return {**tool_call, "function": _with_parsed_arguments(tool_call["function"], message_index)}
    if isinstance(tool_call.get("arguments"), str):
        try:
            arguments = json.loads(tool_call["arguments"])
        except json.JSONDecodeError:
            return tool_call
        if isinstance(arguments, dict):
            return {**tool_call, "arguments": arguments}
    return tool_call


def _clean_tools(tools: Any) -> list[dict] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise RowError("broken tools", f"`tools` is a string but not JSON ({error}): {tools[:80]!r}.") from error
    else:
        tools = _without_none(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            "broken tools", f"`tools` must be a list of dicts or the JSON string of one, got {str(tools)[:80]!r}."
        )
    return tools


def _completion_ids(ids: Any) -> list[int] | None:
    if ids is None:
        return None
    if not isinstance(ids, list | tuple) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise RowError(
            "broken token ids", f"`completion_token_ids` must be a list of token ids, got {str(ids)[:80]!r}."
        )
    return list(ids)


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
