# SPDX-License-Identifier: Apache-2.0
"""Reading chats, and turning them into token ids with supervised spans."""

import gzip
import json
import logging

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHATML_TEMPLATE, byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_hf.documents import DOCUMENT_FEATURES
from dflash_hf.tokenizing import SOURCE_KEY, read_completions, tokenize_completions, tokenize_conversation


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
TOOL_TEMPLATE = (
    "{% if tools is not none %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}{% if 'tool_calls' in m %}"
    "{% for call in m['tool_calls'] %}[{{ call['function']['name'] }}"
    "{% for key, value in call['function']['arguments'] | items %} {{ key }}={{ value }}{% endfor %}]{% endfor %}"
    "{% if not m['tool_calls'] %}{{ raise_exception('no calls') }}{% endif %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The opening tag of the generation prompt is missing from the rendered chat.
UNLIKE_TEMPLATE = CHATML_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "b", "tool_calls": None},
    ],
    "tools": json.dumps([{"type": "function", "function": {"name": "f"}}]),
    "finish_reason": None,
    "completion_token_ids": None,
}
TOKENIZER = byte_tokenizer()


def chat(*contents: str, **extra) -> dict:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **extra}


def texts(documents, tokenizer) -> list[tuple[str, str]]:
    """(text before the span, text of the span) of documents whose only span reaches to their end."""
    pairs = []
    for document in documents:
        ((start, stop),) = document["supervised_spans"]
        assert stop == len(document["input_ids"])
        pairs.append(
            (tokenizer.decode(document["input_ids"][:start]), tokenizer.decode(document["input_ids"][start:]))
        )
    return pairs


def answers(row, tokenizer, **kwargs) -> list[str]:
    return [answer for _, answer in texts(tokenize_conversation(row, tokenizer, **kwargs), tokenizer)]


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


class TestSpans:
    def test_dt1_span_is_answer_and_end_of_turn_and_ids_are_those_of_a_single_render(self, tokenizer):
        row = chat("a", "b")
        (document,) = tokenize_conversation(row, tokenizer)
        whole = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert document["input_ids"] == whole[:-1]  # all but the newline that the template writes after the turn
        assert texts([document], tokenizer) == [
            ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "b<|im_end|>")
        ]

    # Without "<" no answer spells the end of turn, at which its document would rightly stop.
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.text(max_size=12), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
    )
    def test_dt1_any_text_comes_back_from_the_span(self, question, answer):
        (pair,) = texts(tokenize_conversation(chat(question, answer), TOKENIZER), TOKENIZER)
        assert pair == (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", f"{answer}<|im_end|>")

    def test_one_document_per_assistant_turn_in_their_order(self, tokenizer):
        row = chat("a", "b", "c", "d", "e")
        pairs = texts(tokenize_conversation(row, tokenizer), tokenizer)
        assert [answer for _, answer in pairs] == ["b<|im_end|>", "d<|im_end|>"]
        assert pairs[1][0].endswith("assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")

    def test_answer_is_encoded_apart_from_the_prompt(self):
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

    def test_answer_gets_no_space_from_a_sentencepiece_tokenizer(self):
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

    def test_dt6_opening_tag_of_the_generation_prompt_is_not_supervised(self):
        tokenizer = byte_tokenizer(THINK_TEMPLATE)
        row = chat("a", "b")
        row["messages"][1]["reasoning_content"] = "hm"
        for enable_thinking in (None, True):
            ((prompt, answer),) = texts(
                tokenize_conversation(row, tokenizer, enable_thinking=enable_thinking), tokenizer
            )
            assert prompt.endswith("<|im_start|>assistant\n<think>\n")
            assert answer == "hm\n</think>\n\nb<|im_end|>"

    def test_dt6_empty_thinking_of_the_generation_prompt_is_not_supervised(self):
        tokenizer = byte_tokenizer(THINK_TEMPLATE)
        ((prompt, answer),) = texts(tokenize_conversation(chat("a", "b"), tokenizer, enable_thinking=False), tokenizer)
        assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert answer == "b<|im_end|>"

    def test_dt6_text_that_the_template_adds_before_the_answer_is_reported(self, caplog):
        tokenizer = byte_tokenizer(THINK_TEMPLATE)
        tokenize_completions([chat("a", "b"), chat("c", "d")], tokenizer, disable_tqdm=True)
        (record,) = caplog.records
        assert "In 2 answers" in record.message and "'</think>'" in record.message
        assert "enable_thinking" in record.message
        caplog.clear()
        tokenize_completions([chat("a", "b")], tokenizer, enable_thinking=False, disable_tqdm=True)
        assert not caplog.records

    def test_enable_thinking_reaches_the_template_only_when_given(self):
        seen = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}"
        tokenizer = byte_tokenizer(seen + CHATML_TEMPLATE)
        for value, text in ((None, "unset"), (True, "True"), (False, "False")):
            ((prompt, _),) = texts(tokenize_conversation(chat("a", "b"), tokenizer, enable_thinking=value), tokenizer)
            assert prompt.startswith(f"{text}<|im_start|>")

    def test_thinking_is_supervised_in_its_own_turn_and_absent_from_later_prompts(self):
        tokenizer = byte_tokenizer(STRIP_TEMPLATE)
        row = chat("a", "<think>x</think>b", "c", "<think>y</think>d")
        (_, first), (prompt, second) = texts(tokenize_conversation(row, tokenizer), tokenizer)
        assert first == "<think>x</think>b<|im_end|>"
        assert "assistant\nb<|im_end|>" in prompt and "think" not in prompt
        assert second == "<think>y</think>d<|im_end|>"


class TestEndOfTurn:
    def test_other_end_of_turn_ids_cut_the_document_where_generation_stops(self):
        tokenizer = byte_tokenizer(CHATML_TEMPLATE.replace("}<|im_end|>\n{", "}<|pad|>\n<|im_end|>{"))
        assert answers(chat("a", "b"), tokenizer) == ["b<|pad|>\n<|im_end|>"]
        for ids in (259, [259], [256, 259]):
            assert answers(chat("a", "b"), tokenizer, eos_token_ids=ids) == ["b<|pad|>"]

    def test_end_of_turn_already_in_the_content_is_not_doubled(self, tokenizer):
        assert answers(chat("a", "b<|im_end|>"), tokenizer) == ["b<|im_end|>"]

    def test_answer_without_end_of_turn_is_an_error(self):
        tokenizer = byte_tokenizer(CHATML_TEMPLATE.replace("}<|im_end|>\n{", "}\n{"))
        with pytest.raises(ValueError, match=r"ends in 'b\\n', which holds none of the ids \[258\].*eos_token_ids"):
            tokenize_conversation(chat("a", "b"), tokenizer)
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="no eos token"):
            tokenize_conversation(chat("a", "b"), tokenizer)

    def test_truncated_answer_has_no_end_of_turn(self, tokenizer):
        row = chat("a", "b", "c", "d \n", finish_reason="length")
        assert answers(row, tokenizer) == ["b<|im_end|>", "d \n"]
        assert answers({**row, "finish_reason": "stop"}, tokenizer)[1] == "d \n<|im_end|>"
        trimmed = byte_tokenizer(CHATML_TEMPLATE.replace("['content']", "['content'] | trim"))
        assert answers(row, trimmed)[1] == "d"

    def test_truncated_thinking_is_not_closed(self):
        row = chat("a", "", finish_reason="length")
        row["messages"][1]["reasoning_content"] = "hm, so"
        assert answers(row, byte_tokenizer(THINK_TEMPLATE)) == ["hm, so"]

    def test_completion_token_ids_are_used_as_they_are(self, tokenizer):
        row = chat("a", "b", "c", "text that is not looked at", completion_token_ids=[270, 3, 258])
        first, second = tokenize_conversation(row, tokenizer)
        assert texts([first], tokenizer)[0][1] == "b<|im_end|>"
        assert second["input_ids"][-3:] == [270, 3, 258]
        assert tokenizer.decode(second["input_ids"][:-3]).endswith("c<|im_end|>\n<|im_start|>assistant\n")
        assert second["supervised_spans"] == [[len(second["input_ids"]) - 3, len(second["input_ids"])]]

    def test_completion_token_ids_serve_where_the_text_cannot(self):
        row = chat("a", "b", completion_token_ids=[5], finish_reason="length")
        (document,) = tokenize_conversation(row, byte_tokenizer(UNLIKE_TEMPLATE))
        assert document["input_ids"][-1] == 5


class TestToolsAndArrow:
    def test_dt4_arrow_round_trip_leaves_no_none_in_the_text(self):
        tokenizer = byte_tokenizer(TOOL_TEMPLATE)
        other = {"messages": [{"role": "user", "content": "c", "name": "n"}, {"role": "assistant", "content": "d"}]}
        dataset = Dataset.from_list([TOOL_ROW, other])
        assert dataset[0]["messages"][0]["tool_calls"] is None and dataset[0]["messages"][0]["name"] is None
        documents = tokenize_completions(dataset, tokenizer, disable_tqdm=True)
        pairs = texts(documents, tokenizer)
        assert [answer for _, answer in pairs] == ["[f x=1]<|im_end|>", "b<|im_end|>", "d<|im_end|>"]
        assert documents["row"][:] == [0, 0, 1]
        assert pairs[1][0].startswith('tools [{"type": "function", "function": {"name": "f"}}]\n<|im_start|>')
        assert pairs[2][0].startswith("<|im_start|>user\nc<|im_end|>")
        assert not any("None" in prompt + answer for prompt, answer in pairs)

    def test_dt4_arguments_are_a_dict_for_the_template_and_the_row_stays_as_it_was(self):
        before = json.dumps(TOOL_ROW)
        tokenize_conversation(TOOL_ROW, byte_tokenizer(TOOL_TEMPLATE))
        assert json.dumps(TOOL_ROW) == before
        row = json.loads(before.replace(r"{\"x\": 1}", "no object"))
        with pytest.raises(ValueError, match=r"template failed on the first 2 messages \(TypeError.*item pairs"):
            tokenize_conversation(row, byte_tokenizer(TOOL_TEMPLATE))

    def test_dt4_none_in_nested_arguments_and_tools_and_empty_lists(self):
        call = {"name": "f", "arguments": {"x": {"y": 1, "z": None}, "w": None}}
        row = chat("a", "b", tools=[{"name": "f", "strict": None}])
        row["messages"][0]["tool_calls"] = []
        row["messages"][1]["tool_calls"] = [{"id": None, "function": call}]
        ((prompt, answer),) = texts(
            tokenize_conversation(row, byte_tokenizer(TOOL_TEMPLATE)), byte_tokenizer(TOOL_TEMPLATE)
        )
        assert prompt.startswith('tools [{"name": "f"}]\n')
        assert answer == "b[f x={'y': 1}]<|im_end|>"
        for nothing in (None, [], "", "null", "[]"):
            ((prompt, _),) = texts(
                tokenize_conversation({**row, "tools": nothing}, byte_tokenizer(TOOL_TEMPLATE)), byte_tokenizer()
            )
            assert prompt.startswith("<|im_start|>")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tools": "[{"}, r"`tools` must be a list of dicts or the JSON of one, got '\[\{'"),
            ({"tools": '{"name": "f"}'}, "`tools` must be a list of dicts"),
            ({"completion_token_ids": ["x"]}, "`completion_token_ids` must be a list of token ids"),
            ({"completion_token_ids": [-1]}, "`completion_token_ids` must be a list of token ids"),
            ({"messages": [{"role": "user", "tool_calls": 3}]}, "must have a list of `tool_calls`, got '3'"),
            (
                {"messages": [{"role": "user", "tool_calls": ["f"]}]},
                "call without the `name` of a function: 'f'",
            ),
        ],
    )
    def test_broken_extras_are_named(self, tokenizer, change, message):
        with pytest.raises(ValueError, match=message):
            tokenize_conversation({**chat("a", "b"), **change}, tokenizer)


class TestMaxLength:
    def test_dt7_cut_within_the_answer_keeps_ids_and_spans_together(self, tokenizer):
        row = chat("a", "0123456789")
        (whole,) = tokenize_conversation(row, tokenizer)
        ((start, stop),) = whole["supervised_spans"]
        for max_length in (start + 1, start + 4, stop - 1):
            (cut,) = tokenize_conversation(row, tokenizer, max_length=max_length)
            assert cut == {"input_ids": whole["input_ids"][:max_length], "supervised_spans": [[start, max_length]]}
        assert tokenize_conversation(row, tokenizer, max_length=start) == []
        assert tokenize_conversation(row, tokenizer, max_length=stop + 5) == [whole]

    def test_dt7_answers_cut_away_whole_are_counted_in_one_line(self, tokenizer, caplog):
        rows = [chat("a", "b", "c" * 50, "d"), chat("e" * 50, "f")]
        documents = tokenize_completions(rows, tokenizer, max_length=60, disable_tqdm=True)
        assert [answer for _, answer in texts(documents, tokenizer)] == ["b<|im_end|>"]
        (record,) = caplog.records
        assert "dropped 2 answers" in record.message and "max_length=60" in record.message

    def test_nothing_left_is_an_error(self, tokenizer):
        with pytest.raises(ValueError, match=r"No document is left.*dropped 1 answers .*max_length=5"):
            tokenize_completions([chat("a", "b")], tokenizer, max_length=5, disable_tqdm=True)
        with pytest.raises(ValueError, match="No document is left"):
            tokenize_completions([], tokenizer, disable_tqdm=True)
        with pytest.raises(ValueError, match="at least 1 token, got 0"):
            tokenize_completions([chat("a", "b")], tokenizer, max_length=0)


class TestBadRows:
    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ([], "must be a dict with `messages`, got list"),
            ({}, "has no `messages`"),
            ({"messages": "hello"}, "`messages` must be a list of dicts or the JSON of one, got 'hello'"),
            ({"messages": ["hello"]}, "message 0 must be a dict with a string `role`, got 'hello'"),
            ({"messages": [{"role": "user"}, {"content": "b"}]}, "message 1 must be a dict with a string `role`"),
            ({"messages": [{"role": 1, "content": "b"}]}, "message 0 must be a dict with a string `role`"),
            (chat("a"), r"no message has the role 'assistant'.*\['user'\]"),
            ({"messages": []}, "no message has the role 'assistant'"),
            ({"messages": chat("a", "b")["messages"][1:]}, "the first message is the assistant's"),
            (chat("a", "b\ud83d"), "surrogates not allowed"),
        ],
    )
    def test_each_fault_names_the_row(self, tokenizer, row, message):
        with pytest.raises(ValueError, match=f"^The row: .*{message}"):
            tokenize_conversation(row, tokenizer)
        with pytest.raises(ValueError, match=f"^Row 1: .*{message}"):
            tokenize_completions([chat("a", "b"), row], tokenizer, disable_tqdm=True)

    def test_prompt_that_is_no_prefix_shows_the_first_difference(self):
        with pytest.raises(ValueError, match="not the beginning of the rendered chat") as error:
            tokenize_conversation(chat("a", "b"), byte_tokenizer(UNLIKE_TEMPLATE))
        common = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        prompt, whole = common[-20:] + "<think>\n", common[-20:] + "b<|im_end|>\n"
        assert f"at character {len(common)} the prompt has {prompt!r}, the chat {whole!r}." in str(error.value)

    def test_template_that_raises_is_named_with_its_own_words(self, tokenizer):
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(
            ValueError, match=r"The row: the chat template failed.*TemplateError: roles must alternate"
        ):
            tokenize_conversation(chat("a", "b"), tokenizer)

    def test_missing_chat_template_is_an_error_even_when_skipping(self):
        for function, data in ((tokenize_conversation, chat("a", "b")), (tokenize_completions, [chat("a", "b")])):
            with pytest.raises(ValueError, match="no chat template"):
                function(data, byte_tokenizer(chat_template=None))

    def test_skip_warns_of_each_row_and_counts_them(self, tokenizer, caplog):
        rows = [chat("a"), chat("a", "b"), {SOURCE_KEY: "x.jsonl:7"}]
        documents = tokenize_completions(rows, tokenizer, on_error="skip", disable_tqdm=True)
        assert documents["row"][:] == [1]
        assert [record.message[:30] for record in caplog.records[:2]] == [
            "Skipped Row 0: no message has ",
            "Skipped Row 2 (x.jsonl:7): the",
        ]
        assert "skipped 2 of 3 chats" in caplog.records[2].message
        with pytest.raises(ValueError, match="No document is left to train on: skipped 1 of 1 chats"):
            tokenize_completions([chat("a")], tokenizer, on_error="skip", disable_tqdm=True)
        with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', got 'ignore'"):
            tokenize_completions(rows, tokenizer, on_error="ignore")


class TestDataset:
    def test_features_are_the_stated_ones_over_several_parts(self, tokenizer, monkeypatch):
        monkeypatch.setattr("dflash_hf.tokenizing.CHUNK_ROWS", 2)
        rows = [chat("a", str(i)) for i in range(5)]
        documents = tokenize_completions(rows, tokenizer, disable_tqdm=True)
        assert documents.features == DOCUMENT_FEATURES
        assert documents["row"][:] == list(range(5))
        assert [answer for _, answer in texts(documents, tokenizer)] == [f"{i}<|im_end|>" for i in range(5)]
        assert {key: documents[3][key] for key in ("input_ids", "supervised_spans")} == (
            tokenize_conversation(rows[3], tokenizer)[0]
        )

    def test_progress_bar_is_shown_unless_disabled(self, tokenizer, capsys):
        tokenize_completions([chat("a", "b")], tokenizer)
        assert "1/1" in capsys.readouterr().err
        tokenize_completions([chat("a", "b")], tokenizer, disable_tqdm=True)
        assert capsys.readouterr().err == ""

    def test_text_longer_than_the_tokenizer_expects_is_no_warning(self, tokenizer, caplog):
        tokenizer.model_max_length = 4
        with caplog.at_level(logging.WARNING):
            tokenize_conversation(chat("a", "b"), tokenizer)
        assert not caplog.records


class TestRead:
    def test_file_gzip_and_folder_give_the_same_rows_in_sorted_order(self, tmp_path):
        lines = [json.dumps(chat("é", str(i))) for i in range(3)]
        (tmp_path / "b.jsonl").write_text("\n\n".join(lines[1:]) + "\n", encoding="utf-8")
        with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(lines[0])
        (tmp_path / "notes.txt").write_text("not read")
        (tmp_path / ".b.jsonl").write_text("not read")
        rows = read_completions(tmp_path)
        assert [row["messages"] for row in rows] == [json.loads(line)["messages"] for line in lines]
        assert [row[SOURCE_KEY] for row in rows] == [
            f"{tmp_path / 'a.jsonl.gz'}:1",
            f"{tmp_path / 'b.jsonl'}:1",
            f"{tmp_path / 'b.jsonl'}:3",
        ]
        assert read_completions(str(tmp_path / "b.jsonl")) == rows[1:]

    @pytest.mark.parametrize("suffix", [".json", ".json.gz"])
    @pytest.mark.parametrize("indent", [None, 2])
    def test_a_list_of_rows_is_read_where_it_is_named(self, tmp_path, suffix, indent):
        rows = [chat("é", "a"), chat("b", "c")]
        pack = gzip.compress if suffix.endswith("gz") else bytes
        for name, value in (("list", rows), ("object", rows[0])):
            text = "\ufeff\n" + json.dumps(value, indent=indent, ensure_ascii=False)
            (tmp_path / f"{name}{suffix}").write_bytes(pack(text.encode()))
        path = tmp_path / f"list{suffix}"
        assert read_completions(path) == [row | {SOURCE_KEY: f"{path}:{i}"} for i, row in enumerate(rows, start=1)]
        (row,) = read_completions(tmp_path / f"object{suffix}")
        assert row["messages"] == rows[0]["messages"]
        assert len(read_completions(f"{tmp_path}/*{suffix}")) == 3
        with pytest.raises(FileNotFoundError, match=r"all of a folder by FOLDER/\*\.json"):
            read_completions(tmp_path)
        # Such as the settings beside a file of answers.
        (tmp_path / "lines.jsonl").write_text(json.dumps(rows[1]))
        assert len(read_completions(tmp_path)) == len(read_completions(f"{tmp_path}/*")) == 1

    def test_lines_are_read_from_a_json_file(self, tmp_path, caplog):
        path, row = tmp_path / "a.json", json.dumps(chat("a", "b"))
        path.write_text(f"{row}\n\n{{\n{row}")
        with pytest.raises(ValueError, match=r"a\.json:3: the line is not JSON"):
            read_completions(path)
        for text, places in ((f"{row}\n\n{{\n{row}", [":1", ":4"]), (f"\n{{\n{row}\n{row}", [":3", ":4"])):
            path.write_text(text)
            assert [row[SOURCE_KEY][-2:] for row in read_completions(path, on_error="skip")] == places

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('[{"prompt": "a"},\n{"prompt": }]', r"1: the file is no JSON list \(.*line 2 column 12"),
            ('[{"prompt": "a"}, null]', "2: expected a JSON object, got NoneType: 'null'"),
            ('[{"prompt": "a"}, ["b"]]', "2: expected a JSON object, got list"),
            ('"prompt"', "1: expected a JSON object, got str"),
            ("[" * 100_000, "1: the file is no JSON list"),
            ('[{"prompt": "\xff"}]', "1: the file is no JSON list .*utf-8"),
            ("[]", "holds no row"),
            ("", "holds no row"),
        ],
    )
    def test_what_is_no_list_of_rows_is_named(self, tmp_path, text, message):
        (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=rf"a\.json.*{message}"):
            read_completions(tmp_path / "a.json")

    def test_a_list_beyond_all_size_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("dflash_hf.chats.LARGEST_LIST", 2**20)
        (tmp_path / "a.json").write_text("[\n" + json.dumps(chat("a", "b" * 2**20)) + "]")
        with pytest.raises(ValueError, match=r"a\.json:1: the file is no JSON lines, and more than 1 MiB"):
            read_completions(tmp_path / "a.json")

    def test_source_survives_arrow_and_names_the_line_of_a_later_error(self, tmp_path, tokenizer):
        path = tmp_path / "chats.jsonl"
        path.write_text(f"{json.dumps(chat('a', 'b'))}\n\n{json.dumps(chat('a'))}\n")
        rows = read_completions(path)
        for source in (rows, Dataset.from_list(rows)):
            with pytest.raises(ValueError, match=r"^Row 1 \(.*chats\.jsonl:3\): no message has the role"):
                tokenize_completions(source, tokenizer, disable_tqdm=True)
        with pytest.raises(ValueError, match=r"^The row \(.*chats\.jsonl:3\): no message"):
            tokenize_conversation(rows[1], tokenizer)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"messages": [', "the line is not JSON"),
            (b'{"messages": "\xff"}', "the line is not JSON .*utf-8"),
            (b'["messages"]', "expected a JSON object, got list"),
            (b"null", "expected a JSON object, got NoneType"),
        ],
    )
    def test_broken_line_names_file_and_line_and_is_skipped_as_asked(self, tmp_path, caplog, line, message):
        path = tmp_path / "chats.jsonl"
        good = json.dumps(chat("a", "b")).encode()
        path.write_bytes(b"\n".join([good, line, good]))
        with pytest.raises(ValueError, match=rf"chats\.jsonl:2: {message}"):
            read_completions(path)
        assert [row[SOURCE_KEY][-2:] for row in read_completions(path, on_error="skip")] == [":1", ":3"]
        each, total = caplog.records
        assert "chats.jsonl:2: " in each.message
        assert "skipped 1 broken lines and kept 2 rows" in total.message

    def test_gzip_file_that_ends_early_is_reported(self, tmp_path, caplog):
        whole = gzip.compress("\n".join(json.dumps(chat("a", str(i) * 400)) for i in range(400)).encode())
        (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "b.jsonl.gz").write_bytes(b"not gzip")
        (tmp_path / "c.jsonl").write_text(json.dumps(chat("a", "last")))
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz:\d+: not a whole gzip file"):
            read_completions(tmp_path)
        rows = read_completions(tmp_path, on_error="skip")
        assert 1 < len(rows) < 400 and rows[-1]["messages"][1]["content"] == "last"
        assert len(caplog.records) == 3

    def test_paths_that_hold_nothing_are_errors(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"No such file or folder: .*missing"):
            read_completions(tmp_path / "missing")
        with pytest.raises(FileNotFoundError, match="holds no file that ends in"):
            read_completions(tmp_path)
        (tmp_path / "chats.csv").write_text("a")
        with pytest.raises(ValueError, match="ends in neither of"):
            read_completions(tmp_path / "chats.csv")
        (tmp_path / "chats.jsonl").write_text("\n[]\n")
        with pytest.raises(ValueError, match=r"holds no row .1 broken lines skipped"):
            read_completions(tmp_path, on_error="skip")
        with pytest.raises(ValueError, match="on_error must be"):
            read_completions(tmp_path, on_error="stop")
