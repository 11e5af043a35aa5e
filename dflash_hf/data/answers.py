# SPDX-License-Identifier: Apache-2.0
"""What belongs to one answer: its text, its thinking, and whether a template rendered all of it."""

from collections import Counter

from .chat_messages import REASONING_KEYS, RowError


def last_own_text(message: dict) -> str:
    texts = [message.get(key) for key in ("content", *REASONING_KEYS)]
    return next((text.lstrip() for text in texts if isinstance(text, str) and text.strip()), "")


def has_thinking(message: dict) -> bool:
    return any(message.get(key) for key in REASONING_KEYS) or "</think>" in message["content"]


def with_thinking_apart(message: dict, prompt: str, is_truncated: bool) -> dict | None:
    """The message with the thinking that its content holds as `reasoning_content`, or None where it holds none."""
    content = message["content"]
    if any(message.get(key) for key in REASONING_KEYS):
        return None
    if "</think>" in content:
        thinking, _, content = content.partition("</think>")
    # A cut-off answer without the closing tag is thinking, if it or the prompt opened a block.
    elif is_truncated and (content.lstrip().startswith("<think>") or prompt.rstrip().endswith("<think>")):
        thinking, content = content, ""
    else:
        return None
    thinking = thinking.rpartition("<think>")[2].strip("\n")
    return {**message, "content": content.lstrip("\n"), "reasoning_content": thinking}


def check_complete(message: dict, rendered: str) -> None:
    """Refuses an answer of which the template leaves out the thinking, the content or a tool call."""
    content = message["content"]
    thinking = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "")
    if "</think>" in content:
        inline, _, content = content.rpartition("</think>")
        thinking = thinking or inline.rpartition("<think>")[2]
    parts = [("thinking", thinking.strip()), ("content", content.strip())]
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    names = Counter(str(call.get("name", "")) for call in calls if isinstance(call, dict))
    parts += [("tool call", name) for name, count in names.items() if rendered.count(name) < count]
    for name, text in parts:
        if name == "tool call" or text not in rendered:
            raise RowError(
                f"{name} lost",
                f"the template leaves out the answer's {name}, {text[:60]!r}, so what the target generated cannot be "
                "rebuilt: give `completion_token_ids`, or the template that the target was served with.",
            )


def template_text(answer: str, message: dict) -> str:
    """Text other than blanks that stands before the content of a message that consists of content alone."""
    content = last_own_text(message).rstrip()
    if message.keys() - {"role", "content", "name"} or content not in answer:
        return ""
    return answer.partition(content)[0].strip() if content else ""
