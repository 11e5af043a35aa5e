# SPDX-License-Identifier: Apache-2.0
"""Rows of many makes: each becomes the same chats, or an error that says what is wrong."""

import json

import pytest

from dflash_hf.chats import RowError, read_chats


ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
ANSWER = {"role": "assistant", "content": "b"}
WHOLE = [*ASKED, ANSWER]
REQUEST = {"model": "m", "messages": ASKED, "temperature": 0.7, "chat_template_kwargs": {"enable_thinking": False}}
CHOICE = {"index": 0, "message": {**ANSWER, "reasoning_content": "hm", "tool_calls": None}, "finish_reason": "length"}
RESPONSE = {"id": "x", "choices": [CHOICE], "usage": {"total_tokens": 9}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": WHOLE},
        {"messages": json.dumps(WHOLE)},
        {"messages": ASKED, "completion": "b"},
        {"messages": ASKED, "completion": ANSWER, "prompt": "not looked at"},
        {"prompt": ASKED, "completion": [ANSWER]},
        {"prompt": json.dumps(ASKED), "response": "b"},
        {"conversations": [{"from": f, "value": v} for f, v in (("system", "s"), ("human", "a"), ("gpt", "b"))]},
        {"system": "s", "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        {"conversations": WHOLE},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, ASKED[1], ANSWER]},
        {"request": {"messages": ASKED}, "response": {"choices": [{"message": ANSWER}]}},
        {"request": {"messages": ASKED}, "response": {"choices": [{"text": "b"}]}},
        {"request": {"body": {"messages": ASKED}}, "response": {"body": {"choices": [{"message": {"content": "b"}}]}}},
    ],
)  # fmt: skip
def test_every_make_is_the_same_chat(row):
    (chat,) = read_chats(row)
    assert chat.messages == WHOLE
    assert chat.prompt == ASKED
    assert chat.completion_ids is None and not chat.is_truncated and chat.tools is None


def test_a_prompt_and_a_completion_may_be_plain_text():
    (chat,) = read_chats({"prompt": "a", "completion": "b", "reasoning_content": "hm", "finish_reason": "stop"})
    assert chat.messages == [{"role": "user", "content": "a"}, {**ANSWER, "reasoning_content": "hm"}]


def test_a_servers_log_gives_one_chat_per_choice_with_its_own_ids_and_end():
    other = {"message": {"role": "assistant", "content": "c"}, "finish_reason": "stop", "token_ids": [1, 2]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "request": {**REQUEST, "tools": tools},
        "response": {**RESPONSE, "choices": [CHOICE, other]},
        "dataset": "logs",
        "language": "de",
    }
    first, second = read_chats(row)
    assert first.messages == [*ASKED, {**ANSWER, "reasoning_content": "hm"}] and second.messages[-1]["content"] == "c"
    assert first.is_truncated and not second.is_truncated
    assert first.completion_ids is None and second.completion_ids == [1, 2]
    for chat in (first, second):
        assert chat.tools == tools and chat.template_kwargs == {"enable_thinking": False}
        assert (chat.source, chat.language) == ("logs", "de")


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ({"request": {"messages": ASKED}, "response": {"error": "overloaded"}}, "no answer", "overloaded"),
        ({"request": {"messages": ASKED}, "response": {"choices": [{}]}}, "no answer", "has no `message`"),
        ({"messages": "[{"}, "no messages", r"list of dicts or the JSON of one, got '\[\{'"),
        ({"conversations": [{"from": "gpt2", "value": "x"}]}, "unknown role", "'gpt2'"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "broken content", "got int"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]}, "broken content", "not text"),
        ({"messages": [{"role": "user", "content": [{"image": "x"}]}, ANSWER]}, "image, audio or video", "message 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url"}]}, ANSWER]},
            "image, audio or video",
            "vide",
        ),
    ],
)
def test_what_cannot_be_used_is_named(row, reason, message):
    with pytest.raises(RowError, match=message) as error:
        read_chats(row)
    assert error.value.reason == reason
