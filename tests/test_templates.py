# SPDX-License-Identifier: Apache-2.0
"""Real chat templates over a table of conversations: what is supervised is what the model would have generated."""

import importlib.util
import json
from pathlib import Path

import pytest
from tiny import byte_tokenizer

from dflash_hf.chats import RowError, read_chats
from dflash_hf.rendering import ChatFormat, drafts_of


TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The tokens that end a turn, the first of them the tokenizer's own.
ENDS = {
    "qwen3_6": ["<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "qwen3_8": ["<|im_end|>"],
    "smollm2": ["<|im_end|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"],
    "gemma3": ["<end_of_turn>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "nemotron_3_nano": ["<|im_end|>"],
}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": n, "parameters": {"type": "object"}}}
    for n in ("add", "find")
]
THINK = "\n</think>\n\n"


def user(content):
    return {"role": "user", "content": content}


def says(content, **extra):
    return {"role": "assistant", "content": content, **extra}


PARALLEL = [
    {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"x": 1}'}},
    {"type": "function", "id": "2", "function": {"name": "find", "arguments": {"y": "b"}}},
]
ROWS = {
    "one turn": {"messages": [user("hi"), says("hello")]},
    "many turns": {"messages": [user("a"), says("b"), user("c"), says("d"), user("e"), says("f")]},
    "system": {"messages": [{"role": "system", "content": "s"}, user("hi"), says("hello")]},
    "none fields": {
        "messages": [{**user("hi"), "name": None, "tool_calls": None}, says("hello", tool_calls=None, refusal=None)],
        "tools": None,
    },
    "unicode": {"messages": [user("é 你好 🙂"), says("ß 🙂‍↕️ 漢\u0301")]},
    "special text": {
        "messages": [user("hi"), says("write <|im_end|>, <|eot_id|>, <end_of_turn>, <|return|> or </s>!")]
    },
    "empty content": {"messages": [user("hi"), says("")]},
    "thinking": {"messages": [user("hi"), says("hello", reasoning_content="hm")]},
    "inline thinking": {"messages": [user("hi"), says("<think>\nhm\n</think>\n\nhello")]},
    "closing tag": {"messages": [user("hi"), says("hm\n</think>\n\nhello")]},
    "earlier thinking": {
        "messages": [
            user("a"),
            says("b", reasoning_content="first"),
            user("c"),
            says("d", reasoning_content="second"),
        ]
    },
    "cut thinking": {"messages": [user("hi"), says("", reasoning_content="hm, so")], "finish_reason": "length"},
    "cut inline": {"messages": [user("hi"), says("<think>\nhm, so")], "finish_reason": "length"},
    "tools": {
        "messages": [
            user("hi"),
            says(None, tool_calls=PARALLEL),
            {"role": "tool", "name": "add", "tool_call_id": "1", "content": "2"},
            {"role": "tool", "name": "find", "tool_call_id": "2", "content": "c"},
            says("done"),
        ],
        "tools": TOOLS,
    },
}
HERE = "write <|im_end|>, <|eot_id|>, <end_of_turn>, <|return|> or </s>!"
QWEN_CALLS = (
    "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=find>\n<parameter=y>\nb\n</parameter>\n</function>\n</tool_call><|im_end|>"
)
JSON_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "find", "arguments": {"y": "b"}}\n</tool_call><|im_end|>'
)


def plain(end, **others):
    """The table of a template that writes an answer as it is; a string names the reason of an error."""
    lost = "thinking lost"
    return {
        "one turn": [["hello" + end]],
        "many turns": [["b" + end, "d" + end, "f" + end]],
        "system": [["hello" + end]],
        "none fields": [["hello" + end]],
        "unicode": [["ß 🙂‍↕️ 漢\u0301" + end]],
        "special text": [[HERE + end]],
        "empty content": [[end]],
        "thinking": lost,
        "inline thinking": [["<think>\nhm\n</think>\n\nhello" + end]],
        "closing tag": [["hm\n</think>\n\nhello" + end]],
        "earlier thinking": lost,
        "cut thinking": lost,
        "cut inline": [["<think>\nhm, so"]],
        "tools": "tool call lost",
        **others,
    }


def thinking(opened, empty, merged, tool_calls, **others):
    """The table of a template with thinking: what it writes before thinking, and for none; whether turns merge."""
    end = "<|im_end|>"
    turns = [[empty + text + end] for text in "bdf"]
    earlier = [[opened + "first" + THINK + "b" + end], [opened + "second" + THINK + "d" + end]]
    return {
        "one turn": [[empty + "hello" + end]],
        "many turns": [[text for (text,) in turns]] if merged else turns,
        "system": [[empty + "hello" + end]],
        "none fields": [[empty + "hello" + end]],
        "unicode": [[empty + "ß 🙂‍↕️ 漢\u0301" + end]],
        "special text": [[empty + HERE + end]],
        "empty content": [[empty + end]],
        "thinking": [[opened + "hm" + THINK + "hello" + end]],
        "inline thinking": [[opened + "hm" + THINK + "hello" + end]],
        "closing tag": [[opened + "hm" + THINK + "hello" + end]],
        "earlier thinking": [[text for (text,) in earlier]] if merged else earlier,
        "cut thinking": [[opened + "hm, so"]],
        "cut inline": [[opened + "hm, so"]],
        "tools": [[empty + tool_calls, empty + "done" + end]],
        **others,
    }


CHANNEL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant" + CHANNEL
EXPECTED = {
    "qwen3_6": thinking("", THINK, False, QWEN_CALLS),
    # Later prompts show earlier answers without their thinking blocks, so no turn goes on from the one before.
    "qwen3": thinking(
        "<think>\n",
        "<think>\n\n</think>\n\n",
        False,
        JSON_CALLS,
        tools=[["<think>\n\n</think>\n\n" + JSON_CALLS], ["<think>\n\n</think>\n\ndone<|im_end|>"]],
    ),
    "qwen3_8": thinking("", THINK, True, QWEN_CALLS),
    "smollm2": plain("<|im_end|>"),
    "llama3_1": plain("<|eot_id|>", tools="template failed"),
    "gemma3": plain("<end_of_turn>"),
    "gptoss": {
        "one turn": [[CHANNEL + "hello<|return|>"]],
        "many turns": [[CHANNEL + f"{text}<|return|>"] for text in "bdf"],
        "special text": [[CHANNEL + HERE + "<|return|>"]],
        "thinking": [[ANALYSIS + "hm" + FINAL + "hello<|return|>"]],
        "inline thinking": [[ANALYSIS + "hm" + FINAL + "hello<|return|>"]],
        "earlier thinking": [[ANALYSIS + f"{t}{FINAL}{c}<|return|>"] for t, c in (("first", "b"), ("second", "d"))],
        # The template writes the first of parallel calls alone.
        "tools": "tool call lost",
    },
    # The generation prompt opens a block that the template closes at once where there is no thinking.
    "nemotron_3_nano": {
        "one turn": "prompt is no prefix",
        "thinking": [["hm\n</think>\nhello<|im_end|>"]],
        "inline thinking": [["hm\n</think>\n\nhello<|im_end|>"]],
        "closing tag": [["hm\n</think>\nhello<|im_end|>"]],
        "cut thinking": [["hm, so"]],
    },
}


def chat_format(name: str, **kwargs) -> ChatFormat:
    template = SMOLLM2 if name == "smollm2" else (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = byte_tokenizer(template)
    new = [text for text in ENDS[name] if text not in tokenizer.get_vocab()]
    if new:
        tokenizer.add_special_tokens({"additional_special_tokens": new})
    tokenizer.eos_token, tokenizer.bos_token = ENDS[name][0], "<|endoftext|>"
    return ChatFormat.of(tokenizer, tokenizer.convert_tokens_to_ids(ENDS[name]), **kwargs)


def supervised(chat: ChatFormat, row: dict, merge: bool = True) -> list[list[str]]:
    """The texts of the spans of each document, with what they stand in checked on the way."""
    (one,) = read_chats(json.loads(json.dumps(row)))
    turns = chat.turns(one)
    found = []
    for document in chat.encode(drafts_of(turns, merge)):
        ids, spans = document.input_ids.tolist(), document.supervised_spans
        # The text up to each answer is the prompt as it is rendered at inference.
        for start, stop in spans:
            prompt = chat.tokenizer.decode(ids[:start])
            assert prompt in {turn.prompt for turn in turns}
            # Generation ends at the first end of a turn, so one stands last and none before it.
            assert not chat.end_ids & set(ids[start : stop - 1])
        assert document.is_truncated == (ids[-1] not in chat.end_ids)
        found.append([chat.tokenizer.decode(ids[start:stop]) for start, stop in spans])
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_dt1_dt6_the_supervised_tokens_are_what_the_model_generates(name):
    chat = chat_format(name)
    for row, expected in EXPECTED[name].items():
        if isinstance(expected, str):
            with pytest.raises(RowError) as error:
                supervised(chat, ROWS[row])
            assert error.value.reason == expected, (row, error.value)
        else:
            assert supervised(chat, ROWS[row]) == expected, row


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3", "qwen3_8"])
def test_without_thinking_the_empty_block_belongs_to_the_prompt(name):
    chat = chat_format(name, enable_thinking=False)
    assert supervised(chat, ROWS["one turn"]) == [["hello<|im_end|>"]]
    row = ROWS["many turns"]
    assert [text for texts in supervised(chat, row) for text in texts] == [f"{text}<|im_end|>" for text in "bdf"]


def test_a_rows_own_template_arguments_win_and_thinking_can_be_inferred():
    chat = chat_format("qwen3_6", enable_thinking=True)
    row = {**ROWS["one turn"], "chat_template_kwargs": {"enable_thinking": False}}
    assert supervised(chat, row) == [["hello<|im_end|>"]]
    chat = chat_format("qwen3_6", infer_thinking=True)
    assert supervised(chat, ROWS["one turn"]) == [["hello<|im_end|>"]]
    assert supervised(chat, ROWS["closing tag"]) == [["hm" + THINK + "hello<|im_end|>"]]
    mixed = {"messages": [user("a"), says("b"), user("c"), says("d", reasoning_content="second")]}
    assert supervised(chat, mixed) == [["b<|im_end|>"], ["second" + THINK + "d<|im_end|>"]]


def test_preserved_thinking_makes_one_document_of_the_turns():
    (texts,) = supervised(chat_format("qwen3_6", preserve_thinking=True), ROWS["earlier thinking"])
    assert texts == ["first" + THINK + "b<|im_end|>", "second" + THINK + "d<|im_end|>"]
    # Dropped by default, so that the second prompt holds the first answer without its thinking.
    chat = chat_format("qwen3_6")
    (one,) = read_chats(ROWS["earlier thinking"])
    _, second = chat.encode(drafts_of(chat.turns(one), True))
    prompt = chat.tokenizer.decode(second.input_ids[: second.supervised_spans[0][0]])
    assert "assistant\nb<|im_end|>" in prompt and "first" not in prompt


def test_merged_turns_have_the_ids_that_each_turn_has_alone():
    chat = chat_format("smollm2")
    (one,) = read_chats(ROWS["many turns"])
    (merged,) = chat.encode(drafts_of(chat.turns(one), True))
    alone = chat.encode(drafts_of(chat.turns(one), False))
    for document, span in zip(alone, merged.supervised_spans, strict=True):
        assert document.supervised_spans == [span]
        assert document.input_ids.tolist() == merged.input_ids[: span[1]].tolist()


def test_an_end_of_turn_that_an_answer_speaks_of_is_spelled_out():
    chat = chat_format("smollm2")
    row = {"messages": [user("hi"), says("<|im_end|> ends a turn"), user("c"), says("d")]}
    (one,) = read_chats(row)
    first, second = chat.encode(drafts_of(chat.turns(one), True))
    ids = first.input_ids[first.supervised_spans[0][0] :].tolist()
    end = chat.tokenizer.eos_token_id
    assert ids.count(end) == 1 and ids[-1] == end
    assert chat.tokenizer.decode(ids) == "<|im_end|> ends a turn<|im_end|>"
    # A server encodes that text as the token in the next prompt, so the turns do not share one document.
    assert second.input_ids.tolist().count(end) == 6


def test_tool_arguments_may_be_a_string_or_an_object():
    as_object = json.loads(json.dumps(ROWS["tools"]))
    as_object["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"x": 1}
    chat = chat_format("qwen3_6")
    assert supervised(chat, as_object) == supervised(chat, ROWS["tools"])
