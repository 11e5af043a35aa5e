# SPDX-License-Identifier: Apache-2.0
"""A server's request log answered again by the target: what is asked, what is left out, what is refused."""

import pytest
from test_generate_completions import as_file, greedy_alone, recipe, run, target  # noqa: F401
from tiny import byte_tokenizer

from dflash_hf.chats import read_chats


USER = {"role": "user", "content": "why?"}
OLD = {"role": "assistant", "content": "the old answer"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "found"}


def logged(messages, message=OLD, **request) -> dict:
    """A row as a proxy keeps it, of a request that another model answered by settings of its own."""
    body = {"model": "other", "messages": messages, "temperature": 0.9, "max_tokens": 7, "stream": False, **request}
    response = {"model": "other", "choices": [{"message": message, "finish_reason": "length", "token_ids": [1, 2]}]}
    return {"id": 3, "request": body, "response": response}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_of_a_log_the_request_is_asked_again(tmp_path, name):
    rows = [logged([USER]), logged([USER], tools=TOOLS, chat_template_kwargs={"enable_thinking": False})]
    expected = [
        {"id": 3, "messages": [USER]},
        {"id": 3, "messages": [USER], "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
    ]
    assert recipe.read_prompts(as_file(tmp_path / name, rows)) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"request": {"body": {"messages": [USER]}}, "response": {"body": {"choices": []}}},
        {"request": {"messages": [USER]}, "response": None},
        {"request": {"messages": [USER]}},
        {"request": {"prompt": "why?"}, "response": {"choices": [{"text": "the old answer"}]}},
        {"request": {"messages": [USER]}, "messages": [OLD], "response": "data: {}"},
    ],
)
def test_how_a_request_was_answered_does_not_matter(tmp_path, row):
    (prompt,) = recipe.read_prompts(as_file(tmp_path / "a.jsonl", [row]))
    assert prompt == {"messages": [USER]}


@pytest.mark.parametrize(
    ("messages", "left"),
    [([USER, OLD], [USER]), ([USER, OLD, OLD], [USER]), ([USER, CALL, RESULT, OLD], [USER, CALL, RESULT])],
)
def test_a_chat_that_ends_in_an_answer_gets_a_new_one_only_where_that_is_asked_for(tmp_path, messages, left):
    row = {"messages": messages, "completion_token_ids": [7], "finish_reason": "stop", "source": "s"}
    for given in (row, {"request": {"messages": messages}, "source": "s"}):
        path = as_file(tmp_path / "a.jsonl", [given])
        with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat ends in an answer already, 'the old answer'\. .*"
                           "give `--drop_answers true`; otherwise leave the row out"):  # fmt: skip
            recipe.read_prompts(path)
        (prompt,) = recipe.read_prompts(path, drop_answers=True)
        assert prompt == {"messages": [recipe.plain(message) for message in left], "source": "s"}
        # What is asked is left as the client sent it.
        assert prompt["messages"][1:2] in ([], [{**CALL, "content": ""}])


@pytest.mark.parametrize("messages", [[OLD], [{"role": "system", "content": "s"}, OLD], []])
def test_what_would_be_no_prompt_without_its_answer_is_refused_either_way(tmp_path, messages):
    path = as_file(tmp_path / "a.jsonl", [{"messages": messages}])
    with pytest.raises(ValueError, match=r'a\.jsonl:1: the last message should come from "user" or "tool"'):
        recipe.read_prompts(path, drop_answers=True)


def test_a_log_is_answered_by_the_target_and_taken_up(target, tmp_path, monkeypatch):  # noqa: F811
    """Parts of text and arguments in JSON text are written out as training data is."""
    parts = {"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "o?"}]}
    path = as_file(tmp_path / "log.jsonl", [logged([USER]), logged([parts]), {"messages": [USER, OLD]}])
    rows = run(target, path, drop_answers=True)
    assert [row["messages"][-1] for row in rows] != [OLD] * 3
    for row, messages in zip(rows, ([USER], [{**USER, "content": "who?"}], [USER]), strict=True):
        assert row.keys() <= {"id", "messages", "finish_reason", "completion_token_ids"}
        assert row["completion_token_ids"] == greedy_alone(target, messages, 12)
        assert [chat.completion_ids for chat in read_chats(row)] == [row["completion_token_ids"]]
    monkeypatch.setattr(recipe, "generate", None)
    assert run(target, path, drop_answers=True) == rows


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"type": "image_url", "image_url": {}}], r"Prompt 2: message 0 has a part of the type 'image_url'"),
        ("raise", r"The chat template fails on prompt 2: TemplateError: no"),
    ],
)
def test_what_the_target_cannot_be_asked_is_named(content, expected):
    template = "{% if messages[0]['content'] == 'raise' %}{{ raise_exception('no') }}{% endif %}"
    prompts = [{"messages": [USER]}, {"messages": [{**USER, "content": content}]}]
    with pytest.raises(ValueError, match=expected):
        recipe.tokenize_prompts(prompts, byte_tokenizer(template), 100)
