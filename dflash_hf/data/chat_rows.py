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

import inspect
import json
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chat_messages import RowError, clean_messages, clean_tools, nesting_limited, parsed, without_none


SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
# Finish reasons of an answer that was cut off, so that it has no end of turn.
TRUNCATED = ("length", "max_tokens", "abort", "content_filter", "error")
TOKEN_ID_KEYS = ("completion_token_ids", "token_ids", "output_token_ids", "output_ids")
# Documents hold their ids as int32.
LARGEST_ID = 2**31 - 1
# How a template is called is no matter of a row: these would change what is rendered, or by what.
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
    with nesting_limited():
        own = any(row.get(name) is not None for name in ("messages", "conversations", "prompt"))
        if isinstance(row.get("request"), dict) and (row.get("response") is not None or not own):
            return _read_log(row)
        prompt, completion = _prompt_and_completion(row)
        return [_chat(row, prompt + completion, row)]


def _chat(row: dict, messages: list[dict], answer: dict, model: str | None = None) -> Chat:
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
    reason = _finish_reason(answer.get("finish_reason"))
    # vLLM and SGLang say which stop sequence it was, and which id where it was a token.
    stops = (answer.get("stop_reason"), answer.get("matched_stop"))
    return Chat(
        messages=messages,
        tools=clean_tools(row.get("tools")),
        completion_ids=_completion_ids(ids),
        is_truncated=reason in TRUNCATED,
        stop_text=next((s for s in stops if isinstance(s, str) and s), None) if reason == "stop" else None,
        template_kwargs=template_kwargs(row.get("chat_template_kwargs")),
        source=_name(row.get("source") or row.get("dataset")),
        language=_name(row.get("language")),
        model=model,
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
    if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        if isinstance(completion, str) and completion == messages[-1].get("content"):
            return messages, []
        raise RowError(
            "two answers",
            "the messages end in an answer and the row has a `completion` or `response` besides: keep the one that "
            "the target generated.",
        )
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
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {**rest, "role": role, "content": message.get("value")}


def requested(row: dict) -> dict:
    """What a logged request asked, as fields of the row in place of the request and its response.

    Args:
        row: With a `request`, plain or as a batch file wraps it in `body`. Of it `messages` or `prompt`, `tools` and
            `chat_template_kwargs` count; how it was sampled does not.
    """
    request = row["request"]["body"] if isinstance(row["request"].get("body"), dict) else row["request"]
    asked = {key: request[key] for key in ("tools", "chat_template_kwargs") if request.get(key)}
    asked |= {key: request[key] for key in ("messages", "prompt") if request.get(key) is not None}
    # Such fields beside the request are not what was asked.
    other = ("request", "response", "messages", "prompt")
    return {key: value for key, value in row.items() if key not in other} | asked


def _read_log(row: dict) -> list[Chat]:
    """Chats of a request to a server and what it answered, plain or as a batch file wraps them in `body`."""
    response = row.get("response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    answered = response if isinstance(response, dict) else {}
    choices = answered.get("choices")
    # Chunks in a list, or as the server sent them.
    if isinstance(response, list) or (isinstance(response, str) and response.lstrip().startswith("data:")):
        raise _streamed(response)
    if not isinstance(choices, list) or not choices:
        raise RowError("no answer", f"the response to the request has no `choices`: {str(response)[:80]!r}.")
    asked = requested(row)
    prompt, _ = _prompt_and_completion({key: asked.get(key) for key in ("messages", "prompt")})
    chats = []
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if message is None and isinstance(choice, dict) and isinstance(choice.get("text"), str):
            message = {"content": choice["text"]}
        if not isinstance(message, dict):
            if isinstance(choice, dict) and "delta" in choice:
                raise _streamed(choice)
            raise RowError("no answer", f"a choice of the response has no `message`: {str(choice)[:80]!r}.")
        chats.append(_chat(asked, [*prompt, {**message, "role": "assistant"}], choice, _name(answered.get("model"))))
    return chats


def _streamed(chunks: Any) -> RowError:
    return RowError(
        "streamed",
        "the response was streamed, so its answer lies in pieces: join their `delta`s into one `message`, or let "
        f"recipes/generate_completions.py answer the request again: {str(chunks)[:80]!r}.",
    )


def template_kwargs(value: Any) -> dict[str, Any]:
    """A row's own arguments of the chat template, an object or its JSON.

    Raises:
        RowError: They are something else, or say how the template is called.
    """
    kwargs = without_none(parsed(value) or {})
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise RowError(
            "broken template arguments", f"`chat_template_kwargs` must be an object, got {str(value)[:80]!r}."
        )
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise RowError(
            "broken template arguments",
            f"`chat_template_kwargs` holds {', '.join(reserved)}: only variables of the template may be given.",
        )
    return kwargs


def _finish_reason(value: Any) -> str:
    """The reason in one spelling; SGLang's own endpoint wraps it in an object."""
    value = value.get("type") if isinstance(value, dict) else value
    return value.lower() if isinstance(value, str) else ""


def _completion_ids(ids: Any) -> list[int] | None:
    if ids is None:
        return None
    if not isinstance(ids, list | tuple) or not all(type(i) is int and 0 <= i <= LARGEST_ID for i in ids):
        raise RowError(
            "broken token ids", f"`completion_token_ids` must be a list of token ids, got {str(ids)[:80]!r}."
        )
    return list(ids)


def _name(value: Any) -> str | None:
    # A lone half of a surrogate pair, which JSON can spell, cannot be stored.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) and value else None
