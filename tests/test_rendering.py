# SPDX-License-Identifier: Apache-2.0
"""From chats to token ids: what is supervised is what the model would have generated, for real templates too."""

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHATML_TEMPLATE, byte_tokenizer, chat, refused, supervised_texts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_hf.chats import RowError, read_chats
from dflash_hf.documents import FileCounts
from dflash_hf.rendering import ChatFormat, Document, drafts_of
from dflash_hf.tokenizing import RowTokenizer, TokenizeOptions, tokenize_conversation


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
HERE = "write <|im_end|>, <|eot_id|>, <end_of_turn>, <|return|> or </s>!"
ROWS = {
    "one turn": {"messages": [user("hi"), says("hello")]},
    "many turns": {"messages": [user("a"), says("b"), user("c"), says("d"), user("e"), says("f")]},
    "system": {"messages": [{"role": "system", "content": "s"}, user("hi"), says("hello")]},
    "unicode": {"messages": [user("é 你好 🙂"), says("ß 🙂‍↕️ 漢\u0301")]},
    "special text": {"messages": [user("hi"), says(HERE)]},
    "empty content": {"messages": [user("hi"), says("")]},
    "thinking": {"messages": [user("hi"), says("hello", reasoning_content="hm")]},
    "inline thinking": {"messages": [user("hi"), says("<think>\nhm\n</think>\n\nhello")]},
    "closing tag": {"messages": [user("hi"), says("hm\n</think>\n\nhello")]},
    "earlier thinking": {
        "messages": [user("a"), says("b", reasoning_content="first"), user("c"), says("d", reasoning_content="second")]
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


# --- Real templates


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
    # The mark that stands for it meanwhile may not be text.
    with refused(ValueError, "ufdd0"):
        tokenize_conversation({"messages": [user("a"), says("\ufdd07\ufdd0 <|im_end|> x")]}, chat.tokenizer)


# --- Spans


TOKENIZER = byte_tokenizer()
PROMPT = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
# Thinking is opened, or opened and closed at once, by the generation prompt.
THINK_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
# Thinking is part of the content, and that of earlier turns is left out.
STRIP_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The opening tag of the generation prompt is missing from the rendered chat.
UNLIKE_TEMPLATE = CHATML_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def pairs(row, tokenizer=TOKENIZER, **options) -> list[tuple[str, str]]:
    """(text before the span, text of the span) of each document of a row, whose only span reaches to its end."""
    found = []
    for document in tokenize_conversation(row, tokenizer, **options):
        ids, ((start, stop),) = document["input_ids"], document["supervised_spans"]
        assert stop == len(ids)
        found.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])))
    return found


def answers(row, tokenizer=TOKENIZER, **options) -> list[str]:
    return supervised_texts(tokenize_conversation(row, tokenizer, **options), tokenizer)


def test_dt1_span_is_answer_and_end_of_turn_and_ids_are_those_of_a_single_render():
    row = chat("a", "b", "c", "d", "e")
    _, second = tokenize_conversation(row, TOKENIZER)
    whole = TOKENIZER.apply_chat_template(row["messages"][:4], return_dict=False)
    assert second["input_ids"] == whole[:-1]  # all but the newline that the template writes after the turn
    assert pairs(row) == [
        (PROMPT, "b<|im_end|>"),
        (PROMPT + "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", "d<|im_end|>"),
    ]


# Without "<" no answer spells the end of turn, at which its document would rightly stop.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(max_size=12), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12))
def test_dt1_any_text_comes_back_from_the_span(question, answer):
    prompt = PROMPT.replace("user\na", f"user\n{question}")
    assert pairs(chat(question, answer)) == [(prompt, f"{answer}<|im_end|>")]


def test_answer_is_encoded_apart_from_the_prompt():
    backend = json.loads(TOKENIZER.backend_tokenizer.to_str())
    backend["model"]["vocab"]["ab"] = 256
    backend["model"]["merges"] = [["a", "b"]]
    backend["added_tokens"] = []
    backend = Tokenizer.from_str(json.dumps(backend))
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert tokenizer.tokenize("abab<|im_end|>") == ["ab", "ab", "<|im_end|>"]
    (document,) = tokenize_conversation(chat("a", "bab<|im_end|>"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(document["input_ids"]) == ["a", "b", "ab", "<|im_end|>"]
    assert document["supervised_spans"] == [[1, 4]]


def test_answer_gets_no_space_from_a_sentencepiece_tokenizer():
    vocab = {token: i for i, token in enumerate("▁ab\n<|>imstaruenod_")}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="_"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML_TEMPLATE
    assert tokenizer.tokenize("ab") == ["▁", "a", "b"]
    (document,) = tokenize_conversation(chat("a", "ab"), tokenizer)
    ((start, _),) = document["supervised_spans"]
    assert tokenizer.convert_ids_to_tokens(document["input_ids"][start:]) == ["a", "b", "<|im_end|>"]


def test_dt6_what_the_generation_prompt_opens_and_closes_is_not_supervised():
    tokenizer, row = byte_tokenizer(THINK_TEMPLATE), chat("a", "b")
    empty = (PROMPT + "<think>\n\n</think>\n\n", "b<|im_end|>")
    assert pairs(row, tokenizer, enable_thinking=False) == [empty]
    row["messages"][1]["reasoning_content"] = "hm"
    thinking = (PROMPT + "<think>\n", "hm\n</think>\n\nb<|im_end|>")
    assert pairs(row, tokenizer) == pairs(row, tokenizer, enable_thinking=True) == [thinking]


def test_enable_thinking_reaches_the_template_only_when_given():
    seen = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}"
    tokenizer = byte_tokenizer(seen + CHATML_TEMPLATE)
    for value, text in ((None, "unset"), (True, "True"), (False, "False")):
        ((prompt, _),) = pairs(chat("a", "b"), tokenizer, enable_thinking=value)
        assert prompt.startswith(f"{text}<|im_start|>")


def test_thinking_is_supervised_in_its_own_turn_and_absent_from_later_prompts():
    row = chat("a", "<think>x</think>b", "c", "<think>y</think>d")
    (_, first), (prompt, second) = pairs(row, byte_tokenizer(STRIP_TEMPLATE))
    assert (first, second) == ("<think>x</think>b<|im_end|>", "<think>y</think>d<|im_end|>")
    assert "assistant\nb<|im_end|>" in prompt and "think" not in prompt


# --- Ends of turns


def test_other_end_of_turn_ids_cut_the_document_where_generation_stops():
    tokenizer = byte_tokenizer(CHATML_TEMPLATE.replace("}<|im_end|>\n{", "}<|pad|>\n<|im_end|>{"))
    assert answers(chat("a", "b"), tokenizer) == ["b<|pad|>\n<|im_end|>"]
    for ids in (259, [256, 259]):
        assert answers(chat("a", "b"), tokenizer, eos_token_ids=ids) == ["b<|pad|>"]
    assert answers(chat("a", "b<|im_end|>")) == ["b<|im_end|>"]


def test_answer_without_end_of_turn_is_an_error():
    tokenizer = byte_tokenizer(CHATML_TEMPLATE.replace("}<|im_end|>\n{", "}\n{"))
    with refused(ValueError, "The row", [258], "eos_token_ids"):
        tokenize_conversation(chat("a", "b"), tokenizer)
    tokenizer.eos_token = None
    with refused(ValueError, "eos_token_ids"):
        tokenize_conversation(chat("a", "b"), tokenizer)
    with refused(ValueError, "chat_template"):
        tokenize_conversation(chat("a", "b"), byte_tokenizer(None))


@pytest.mark.parametrize("reason", ["length", "LENGTH", {"type": "length", "length": 9}, "error"])
def test_truncated_answer_has_no_end_of_turn(reason):
    row = chat("a", "b", "c", "d \n", finish_reason=reason)
    assert answers(row) == ["b<|im_end|>", "d \n"]
    assert answers({**row, "finish_reason": "stop"})[1] == "d \n<|im_end|>"
    assert answers(row, byte_tokenizer(CHATML_TEMPLATE.replace("['content']", "['content'] | trim")))[1] == "d"
    cut = chat("a", "", finish_reason=reason)
    cut["messages"][1]["reasoning_content"] = "hm, so"
    assert answers(cut, byte_tokenizer(THINK_TEMPLATE)) == ["hm, so"]


@pytest.mark.parametrize(
    ("stop", "answer"), [("\n\n", "b"), ("<|im_end|>", "b<|im_end|>"), (258, "b<|im_end|>"), (None, "b<|im_end|>")]
)
@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_an_answer_that_a_stop_sequence_ended_has_no_end_of_turn(name, stop, answer):
    choice = {"message": says("b"), "finish_reason": "stop", name: stop}
    assert answers({"request": {"messages": [user("a")]}, "response": {"choices": [choice]}}) == [answer]


def test_completion_token_ids_are_used_as_they_are():
    row = chat("a", "b", "c", "text that is not looked at", completion_token_ids=[270, 3, 258])
    first, second = tokenize_conversation(row, TOKENIZER)
    assert supervised_texts([first], TOKENIZER) == ["b<|im_end|>"]
    assert second["input_ids"][-3:] == [270, 3, 258]
    assert TOKENIZER.decode(second["input_ids"][:-3]).endswith("c<|im_end|>\n<|im_start|>assistant\n")
    assert second["supervised_spans"] == [[len(second["input_ids"]) - 3, len(second["input_ids"])]]
    # They serve where the text cannot.
    cut = chat("a", "b", completion_token_ids=[5], finish_reason="length")
    assert tokenize_conversation(cut, byte_tokenizer(UNLIKE_TEMPLATE))[0]["input_ids"][-1] == 5


# --- Tools


TOOL_TEMPLATE = (
    "{% if tools is not none %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}{% if 'tool_calls' in m %}"
    "{% for call in m['tool_calls'] %}[{{ call['function']['name'] }}"
    "{% for key, value in call['function']['arguments'] | items %} {{ key }}={{ value }}{% endfor %}]{% endfor %}"
    "{% if not m['tool_calls'] %}{{ raise_exception('no calls') }}{% endif %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calling(arguments, **message) -> dict:
    call = {"id": None, "function": {"name": "f", "arguments": arguments}}
    return {"messages": [user("a"), {"role": "assistant", "content": "b", "tool_calls": [call], **message}]}


def test_dt4_none_in_nested_arguments_and_tools_and_empty_lists():
    tokenizer = byte_tokenizer(TOOL_TEMPLATE)
    row = calling({"x": {"y": 1, "z": None}, "w": None}) | {"tools": [{"name": "f", "strict": None}]}
    row["messages"][0]["tool_calls"] = []
    assert pairs(row, tokenizer) == [('tools [{"name": "f"}]\n' + PROMPT, "b[f x={'y': 1}]<|im_end|>")]
    for nothing in (None, [], "", "null", "[]"):
        assert pairs({**row, "tools": nothing}, tokenizer)[0][0] == PROMPT


def test_what_a_template_makes_of_a_chat_is_named_where_it_cannot_be_used():
    with refused(ValueError, "The row", "first 2 messages", "TypeError"):
        tokenize_conversation(calling("no object"), byte_tokenizer(TOOL_TEMPLATE))
    with refused(ValueError, "The row", "TemplateError", "roles must alternate"):
        tokenize_conversation(chat("a", "b"), byte_tokenizer("{{ raise_exception('roles must alternate') }}"))
    with refused(ValueError, f"character {len(PROMPT)}", repr(PROMPT[-20:] + "<think>\n"), "completion_token_ids"):
        tokenize_conversation(chat("a", "b"), byte_tokenizer(UNLIKE_TEMPLATE))
    with refused(ValueError, "surrogates"):
        tokenize_conversation(chat("a", "b\ud83d"), TOKENIZER)


TEXT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name + call.function.arguments }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [TEXT_TEMPLATE, TEXT_TEMPLATE.replace("name + call", "name }}{{ call")])
@pytest.mark.parametrize("arguments", [{"x": "é"}, '{"x": "é"}'])
def test_r5_arguments_are_text_where_the_template_reads_text(template, arguments):
    assert answers(calling(arguments), byte_tokenizer(template)) == ['b[f{"x": "é"}]<|im_end|>']
    assert answers(calling(""), byte_tokenizer(template)) == ["b[f{}]<|im_end|>"]


def real_tokenizer(name: str, end: str):
    tokenizer = byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text())
    tokenizer.add_special_tokens({"eos_token": end})
    return tokenizer


@pytest.mark.parametrize(
    ("name", "end"), [("idefics3", "<end_of_utterance>"), ("smolvlm", "<end_of_utterance>"), ("llava_next", "</s>")]
)
def test_r5_content_is_parts_where_the_template_reads_parts(name, end):
    tokenizer = real_tokenizer(name, end)
    ((prompt, answer),) = pairs(chat("why?", "so"), tokenizer)
    assert "why?" in prompt and answer == f" so{end}"
    # Ids that are given are put behind the whole prompt, too.
    ((prompt, _),) = pairs(chat("why?", "so", completion_token_ids=[5]), tokenizer)
    assert "why?" in prompt


def test_r5_deepseek_v3_reads_calls():
    end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    tokenizer = real_tokenizer("deepseekv3", end)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    messages = [user("hi"), says(None, tool_calls=calls), {"role": "tool", "content": "2"}, says("done")]
    ((prompt, answer),) = pairs({"messages": messages}, tokenizer, last_turn_only=True)
    assert 'add\n```json\n{"x": 1}\n```' in prompt and answer.endswith(f"done{end}")


@pytest.mark.parametrize("merge", [False, True])
def test_r6_an_answer_that_is_not_to_be_learnt_from_is_prompt_alone(merge):
    row = chat("a", "b", "c", "d", "e", "f")
    row["messages"][1]["train"] = False
    documents = tokenize_conversation(row, TOKENIZER, merge_turns=merge)
    assert "".join(supervised_texts(documents, TOKENIZER)) == "d<|im_end|>f<|im_end|>"
    plain = tokenize_conversation(chat("a", "b", "c", "d", "e", "f"), TOKENIZER, merge_turns=merge)
    assert documents[-1]["input_ids"] == plain[-1]["input_ids"]
    row["messages"][5]["weight"] = 0
    assert answers(row) == ["d<|im_end|>"]
    with refused(ValueError, "The row"):
        tokenize_conversation(row, TOKENIZER, last_turn_only=True)


def test_r2_a_prompt_that_holds_the_template_is_used_as_it_is():
    def logged(choice, given=PROMPT):
        return {"request": {"prompt": given}, "response": {"choices": [choice]}}

    assert pairs(logged({"text": "4", "finish_reason": "stop"})) == [(PROMPT, "4<|im_end|>")]
    assert pairs(logged({"text": "4", "finish_reason": "length"})) == [(PROMPT, "4")]
    assert pairs(logged({"text": "4", "finish_reason": "stop", "stop_reason": "\n"})) == [(PROMPT, "4")]
    assert pairs(logged({"text": "4<|im_end|>"})) == [(PROMPT, "4<|im_end|>")]
    assert pairs(logged({"text": "4", "token_ids": [5, 258]})) == [(PROMPT, TOKENIZER.decode([5, 258]))]
    assert tokenize_conversation(logged({"text": "4"}, [7, 8]), TOKENIZER)[0]["input_ids"][:2] == [7, 8]


# --- Whatever a row holds


KEYS = ["messages", "prompt", "completion", "conversations", "request", "response", "tools", "finish_reason", "system"]
KEYS += ["completion_token_ids", "chat_template_kwargs", "source", "role", "content", "reasoning_content", "message"]
KEYS += ["tool_calls", "function_call", "function", "name", "arguments", "from", "value", "choices", "text", "body"]
KEYS += ["type", "weight", "train"]
ATOMS = (None, True, 0, -1, 2.5, 2**70, "", "user", "assistant", "gpt", "a", "<think>\nx\n</think>\n\ny", "<|im_end|>")
ATOMS += ("[{", "{}", "[]", '[{"role":"user","content":"a"}]', "\ud800", "\ufdd0", "length", "text", '{"a": 1}')


def random_value(generator: random.Random, depth: int):
    kind = generator.random()
    if depth == 0 or kind < 0.35:
        return generator.choice(ATOMS)
    if kind < 0.55:
        return [random_value(generator, depth - 1) for _ in range(generator.randrange(4))]
    return {generator.choice(KEYS): random_value(generator, depth - 1) for _ in range(generator.randrange(6))}


def random_row(generator: random.Random):
    """A chat with something odd in it."""
    if generator.random() < 0.2:
        return random_value(generator, 5)
    roles = ["user", *generator.choices(("user", "assistant"), k=2), "assistant"]
    row: dict = {"messages": [{"role": role, "content": "x"} for role in roles]}
    if generator.random() < 0.2:
        row = {"request": {"messages": [user("q")]}, "response": {"choices": [{"message": says("a")}]}}
    place = generator.choice([row, *row.get("messages", [row])])
    place[generator.choice(KEYS)] = random_value(generator, 3)
    return row


@pytest.mark.parametrize("template", [THINK_TEMPLATE, TOOL_TEMPLATE])
def test_no_row_of_json_ends_a_run(template):
    generator, options = random.Random(0), TokenizeOptions(eval_fraction=0.5)
    tokenizer = RowTokenizer(options.chat_format(byte_tokenizer(template)), options, FileCounts())
    outcomes: Counter[str] = Counter()
    for _ in range(1000):
        try:
            drafts = tokenizer.drafts(random_row(generator), 0, "place")
            assert all(isinstance(d, Document) for d in tokenizer.format.encode([draft for draft, _ in drafts]))
            outcomes["ok"] += 1
        except RowError as error:
            outcomes[error.reason] += 1
    assert outcomes["ok"] > 100 and len(outcomes) > 10, outcomes
