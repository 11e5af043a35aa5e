# SPDX-License-Identifier: Apache-2.0
"""Files and addresses to rows, and rows of many makes to the same chats, or to an error that names what is wrong."""

import gzip
import json
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from tiny import chat, json_lines, refused

from dflash_hf import chats
from dflash_hf.chats import RowError, list_files, open_filesystem, read_chats, refuse_credentials
from dflash_hf.tokenizing import SOURCE_KEY, read_completions


ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
USER = ASKED[1]
ANSWER = {"role": "assistant", "content": "b"}
WHOLE = [*ASKED, ANSWER]
CHOICE = {"index": 0, "message": {**ANSWER, "reasoning_content": "hm", "tool_calls": None}, "finish_reason": "length"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


def logged(messages=ASKED, **response) -> dict:
    return {"request": {"messages": messages}, "response": response}


def calling(*functions) -> dict:
    """A row whose answer calls functions."""
    return {"messages": [USER, {**ANSWER, "tool_calls": [{"function": function} for function in functions]}]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": WHOLE},
        {"messages": json.dumps(WHOLE)},
        {"messages": ASKED, "completion": "b"},
        {"messages": ASKED, "completion": ANSWER, "prompt": "not looked at"},
        {"messages": WHOLE, "response": "b"},
        {"prompt": ASKED, "completion": [ANSWER]},
        {"prompt": json.dumps(ASKED), "response": "b"},
        {"conversations": [{"from": f, "value": v} for f, v in (("system", "s"), ("human", "a"), ("gpt", "b"))]},
        {"system": "s", "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        {"conversations": WHOLE},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, USER, ANSWER]},
        {"messages": [{**message, "name": None, "tool_calls": None} for message in WHOLE], "tools": None},
        logged(choices=[{"message": ANSWER}]),
        logged(choices=[{"text": "b"}]),
        {"request": {"body": {"messages": ASKED}}, "response": {"body": {"choices": [{"message": {"content": "b"}}]}}},
    ],
)  # fmt: skip
def test_every_make_is_the_same_chat(row):
    (one,) = read_chats(row)
    assert one.messages == WHOLE and one.prompt == ASKED
    assert one.completion_ids is None and not one.is_truncated and one.tools is None


def test_a_prompt_and_a_completion_may_be_plain_text():
    (one,) = read_chats({"prompt": "a", "completion": "b", "reasoning_content": "hm", "finish_reason": "stop"})
    assert one.messages == [USER, {**ANSWER, "reasoning_content": "hm"}]


def test_a_servers_log_gives_one_chat_per_choice_with_its_own_ids_and_end():
    other = {"message": {"role": "assistant", "content": "c"}, "finish_reason": "stop", "token_ids": [1, 2]}
    tools = [{"type": "function", "function": {"name": "f", "strict": None}}]
    row = logged(choices=[CHOICE, other], model="m") | {"dataset": "logs", "language": "de"}
    row["request"] |= {"temperature": 0.7, "tools": tools, "chat_template_kwargs": '{"enable_thinking": false}'}
    first, second = read_chats(row)
    assert first.messages == [*ASKED, {**ANSWER, "reasoning_content": "hm"}] and second.messages[-1]["content"] == "c"
    assert first.is_truncated and not second.is_truncated
    assert first.completion_ids is None and second.completion_ids == [1, 2]
    for one in (first, second):
        assert one.tools == [{"type": "function", "function": {"name": "f"}}]
        assert one.template_kwargs == {"enable_thinking": False}
        assert (one.source, one.language, one.model) == ("logs", "de", "m")


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": CALLS},
        {"tool_calls": json.dumps(CALLS)},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {
            "tool_calls": [
                {"type": "function", "id": None, "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
            ]
        },
        {"function_call": {"name": "f", "arguments": '{"a": 1}'}, "tool_calls": None},
    ],
)
def test_dt4_tool_calls_of_every_make_are_one(message):
    row = {"messages": [USER, {"role": "assistant", "content": None, **message}]}
    before = json.dumps(row)
    assert read_chats(row)[0].messages[1] == {"role": "assistant", "content": "", "tool_calls": CALLS}
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("no messages", []),
        ("no messages", {"messages": "[{"}),
        ("no role", {"messages": ["hello", ANSWER]}),
        ("unknown role", {"conversations": [{"from": "gpt2", "value": "x"}]}),
        ("no answer", chat("a")),
        ("answer first", {"messages": [ANSWER]}),
        ("two answers", {"messages": [USER, ANSWER], "response": "another"}),
        ("broken content", {"messages": [{"role": "user", "content": 3}, ANSWER]}),
        ("broken content", {"messages": [USER, {**ANSWER, "content": [{"type": "thinking", "text": "hm"}]}]}),
        ("image, audio or video", {"messages": [{"role": "user", "content": [{"image": "x"}]}, ANSWER]}),
        ("broken thinking", {"messages": [USER, {**ANSWER, "reasoning_content": ["hm"]}]}),
        ("broken tool calls", {"messages": [USER, {**ANSWER, "tool_calls": 3}]}),
        ("broken tool calls", calling({"arguments": {}})),
        ("broken tools", chat("a", "b", tools='{"name": "f"}')),
        ("broken token ids", chat("a", "b", completion_token_ids=[5, 2**31])),
        ("broken template arguments", chat("a", "b", chat_template_kwargs={"tokenize": True})),
        ("nested too deeply", {"messages": "[" * 100_000}),
        ("no answer", logged(error="overloaded")),
        ("no answer", {"request": {"messages": ASKED}}),
        ("streamed", {"request": {"messages": ASKED}, "response": 'data: {"choices": []}\n\ndata: [DONE]\n\n'}),
        ("streamed", {"request": {"messages": ASKED}, "response": [{"choices": [{"delta": {"content": "a"}}]}]}),
        ("streamed", logged(choices=[{"delta": {"content": "a"}}])),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(reason, row):
    with pytest.raises(RowError) as error:
        read_chats(row)
    assert error.value.reason == reason


@pytest.mark.parametrize("call", [{}, *({"arguments": nothing} for nothing in ("", " ", None, "null", {}, []))])
@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
def test_r3_a_call_without_arguments_has_an_empty_object_of_them(call, field):
    call = {"name": "now", **call}
    answer = {"role": "assistant", "content": None, field: [{"function": call}] if field == "tool_calls" else call}
    (one,) = read_chats({"messages": [USER, answer]})
    assert one.messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    "flag", [{"weight": 0.0}, {"train": False}, {"trainable": 0}, {"loss": False}, {"loss_mask": 0}]
)
def test_r6_flags_of_a_message_say_what_is_not_learnt(flag):
    second = {**ANSWER, "weight": 1, "train": True, "trainable": None}
    (one,) = read_chats({"messages": [{**USER, "weight": 0}, {**ANSWER, **flag}, USER, second]})
    assert one.untrained == {1} and one.messages[1::2] == [ANSWER, ANSWER]
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", **flag}]}
    assert read_chats(shared)[0].untrained == {1}
    with pytest.raises(RowError) as error:
        read_chats({"messages": [USER, {**ANSWER, "weight": 0.5}]})
    assert error.value.reason == "broken weight"


@pytest.mark.parametrize("value", [json.dumps(CALLS[0]["function"]), '[{"name": "f", "arguments": "{\\"a\\": 1}"}]'])
def test_r7_sharegpt_calls_functions_and_observes(value):
    turns = [("human", "a"), ("function_call", value), ("observation", "r"), ("gpt", "b")]
    (one,) = read_chats({"conversations": [{"from": who, "value": text} for who, text in turns]})
    call = {"role": "assistant", "content": "", "tool_calls": CALLS}
    assert one.messages == [USER, call, {"role": "tool", "content": "r"}, ANSWER]


@pytest.mark.parametrize("prompt", ["<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n", "[{}]", [5, 6]])
def test_r2_what_a_field_means_is_decided_by_the_kind_of_row(prompt):
    """A request to /v1/completions was answered as it is; the prompt of other rows is what a user says."""
    choice = {"text": "4", "finish_reason": "stop", "message": None, "delta": None}
    for given in (prompt, [prompt]):
        (one,) = read_chats({"request": {"prompt": given}, "response": {"choices": [choice]}})
        assert one.raw_prompt == prompt and one.messages[1]["content"] == "4"
    if isinstance(prompt, str):
        echoed = {"request": {"prompt": prompt, "echo": True}, "response": {"choices": [{"text": prompt + "4"}]}}
        assert read_chats(json.loads(json.dumps(echoed)))[0].messages[1]["content"] == "4"
        (one,) = read_chats({"prompt": prompt, "completion": '[{"role": "user", "content": "4"}]'})
        assert [message["content"] for message in one.messages] == [prompt, '[{"role": "user", "content": "4"}]']
    with pytest.raises(RowError) as error:
        read_chats({"request": {"prompt": ["a", "b"]}, "response": {"choices": [choice]}})
    assert error.value.reason == "no messages"


# --- Files


ROWS = [chat("é", "a"), chat("b", "c")]
LINE = json.dumps(ROWS[1])


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", json_lines(ROWS).replace(b"\n", b"\r\n\r\n")),
        ("a.jsonl", b"\xef\xbb\xbf\n" + json_lines(ROWS).rstrip()),
        ("a.jsonl.gz", gzip.compress(json_lines(ROWS[:1])) + gzip.compress(json_lines(ROWS[1:]))),
        ("a.jsonl.zst", zstd(json_lines(ROWS[:1])) + zstd(json_lines(ROWS[1:]))),
        ("a.jsonl", gzip.compress(json_lines(ROWS))),
        ("a.jsonl.gz", zstd(json_lines(ROWS))),
        ("a.parquet", gzip.compress(json_lines(ROWS))),
        ("a.json", json_lines(ROWS)),
        ("a.json", b"\xef\xbb\xbf\n" + json.dumps(ROWS, ensure_ascii=False).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS, indent=2).encode())),
    ],
    # Not the bytes, which hold the time: workers that collect a second apart would name the tests differently.
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_is_what_it_holds_whatever_its_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    rows = read_completions(tmp_path / name)
    assert [row["messages"] for row in rows] == [row["messages"] for row in ROWS]
    assert all(row[SOURCE_KEY].startswith(f"{tmp_path / name}:") for row in rows)


def test_file_gzip_and_folder_give_the_same_rows_in_sorted_order(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(json_lines(ROWS[1:]) + b"\n" + json_lines([{"prompt": "x", "_source": "mine"}]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(ROWS[:1])))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "c.parquet")
    for name in ("notes.txt", ".b.jsonl", "settings.json"):
        (tmp_path / name).write_text("not read")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    rows = read_completions(tmp_path)
    places = [
        f"{tmp_path}/{place}" for place in ("a.jsonl.gz:1", "b.jsonl:1", "b.jsonl:3", "c.parquet:1", "c.parquet:2")
    ]
    assert [row.pop(SOURCE_KEY) for row in rows] == places
    assert rows == [*ROWS, {"prompt": "x", "_source": "mine"}, *ROWS]
    assert len(read_completions(f"{tmp_path}/*.parquet")) == 2


UNLIKE_ROWS = [
    chat("a", "a\nb"),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "xy"]}, ANSWER]},
    {"messages": [USER, {**ANSWER, "reasoning_content": "hm", "weight": None}], "source": None},
    calling({"name": "f", "arguments": {"x": {"y": 1, "z": None}}}, {"name": "g", "arguments": '{"w": null}'}),
    calling({"name": "f", "arguments": {"x": ["1", 2]}}) | {"tools": [{"name": "f", "x": {"anyOf": [1, "a"]}}]},
    {"prompt": "a", "completion": "b", "tools": [{"name": "g", "parameters": {"y": None}}]},
    logged(choices=[{"text": "c", "finish_reason": "length"}], model="m"),
    {"request": {"prompt": "p"}, "response": {"choices": [{"text": "d"}]}, "chat_template_kwargs": {"x": True}},
]


def test_r1_a_row_is_the_same_whatever_it_is_stored_in(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(UNLIKE_ROWS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(UNLIKE_ROWS)))
    data = load_dataset("json", data_files=f"{tmp_path}/a.jsonl", split="train", cache_dir=f"{tmp_path}/cache")
    assert "Json" in str(data.features)
    data.to_parquet(tmp_path / "c.parquet")
    # As a reader that does not know Arrow's JSON type writes it again.
    table = pq.read_table(tmp_path / "c.parquet", arrow_extensions_enabled=False).replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "d.parquet")
    expected = [one for row in UNLIKE_ROWS for one in read_chats(row)]
    assert [one for row in data for one in read_chats(row)] == expected
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.parquet"):
        assert [one for row in read_completions(tmp_path / name) for one in read_chats(row)] == expected, name


def test_r7_hidden_files_are_left_out_and_every_other_one_is_read_or_told_of(tmp_path, caplog):
    for name in (".ipynb_checkpoints/a.jsonl", "b.JSONL", "c.ndjson", "sub/.d.jsonl", "sub/e.Jsonl.GZ", "notes.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(json_lines(ROWS))
    names = [file.name for file in list_files(tmp_path)]
    assert names == ["b.JSONL", "c.ndjson", "sub/e.Jsonl.GZ"] == [f.name for f in list_files(f"{tmp_path}/**")]
    assert "notes.csv" in caplog.text
    assert [file.name for file in list_files(tmp_path / ".ipynb_checkpoints")] == ["a.jsonl"]


def test_r7_a_file_that_is_written_again_is_another_at_an_equal_size_and_time_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(ROWS))
    (before,), times = list_files(path), path.stat()
    assert list_files(path) == [before]
    time.sleep(0.02)
    path.write_bytes(json_lines(ROWS[::-1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    (after,) = list_files(path)
    assert (after.size, path.stat().st_mtime_ns) == (before.size, times.st_mtime_ns) and after != before


def test_a_list_of_rows_is_read_where_it_is_named(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    (tmp_path / "object.json").write_text(json.dumps(ROWS[0], indent=2))
    assert read_completions(tmp_path / "list.json")[1] == {**ROWS[1], SOURCE_KEY: f"{tmp_path}/list.json:2"}
    assert len(read_completions(f"{tmp_path}/*.json")) == 3
    with refused(FileNotFoundError, tmp_path, "FOLDER/*.json"):
        read_completions(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.jsonl", f"{LINE}\n{{\n", 2),
        ("a.jsonl", f'{LINE}\n{{"messages": "\xff"}}', 2),
        ("a.jsonl", f"{LINE}{LINE}", 1),
        ("a.jsonl", f'{{"x": {"9" * 5000}}}', 1),
        ("a.json", f"{LINE}\n\n{{\n{LINE}", 3),
        ("a.json", f"[{LINE},{LINE}"[:-10], 1),
        ("a.json", "[" * 100_000, 1),
    ],
)
def test_broken_line_names_file_and_line_and_is_skipped_as_asked(tmp_path, caplog, name, text, place):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with refused(ValueError, f"{name}:{place}: "):
        read_completions(tmp_path / name)
    good = tmp_path / name.replace("a.", "z.")
    good.write_text(LINE)
    rows = read_completions(f"{tmp_path}/*{good.suffix}", on_error="skip")
    assert rows[-1][SOURCE_KEY].endswith(f"{good}:1") and f"{name}:{place}: " in caplog.text


def test_a_file_that_ends_early_or_is_something_else_is_named(tmp_path, caplog):
    whole = gzip.compress(json_lines(chat("a", os.urandom(200).hex()) for _ in range(400)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "c.jsonl").write_bytes(json_lines([chat("a", "last")]))
    with refused(ValueError, "a.jsonl.gz:"):
        read_completions(tmp_path)
    rows = read_completions(tmp_path, on_error="skip")
    assert 1 < len(rows) < 400 and rows[-1]["messages"][1]["content"] == "last"
    assert "b.parquet:1" in caplog.text


def test_paths_that_hold_nothing_are_errors(tmp_path):
    for path in (tmp_path / "missing", tmp_path, f"{tmp_path}/*.json"):
        with refused(FileNotFoundError, path):
            read_completions(path)
    (tmp_path / "chats.csv").write_text("a")
    with refused(ValueError, "chats.csv"):
        read_completions(tmp_path / "chats.csv")
    (tmp_path / "chats.jsonl").write_text("\n[]\n")
    with refused(ValueError, tmp_path, "1 broken"):
        read_completions(tmp_path, on_error="skip")
    with refused(ValueError, "on_error", "stop"):
        read_completions(tmp_path, on_error="stop")


# --- Addresses


SECRET = "s3cretS3CRET"


@pytest.mark.parametrize(
    "address",
    [
        f"s3://AKIAKEY:{SECRET}@bucket/x",
        f"s3://AKIAKEY:{SECRET}/a+b@bucket/x",
        f"https://{SECRET}@127.0.0.1/x.jsonl",
        f"https://127.0.0.1/x.jsonl?X-Amz-Signature={SECRET}",
        f"zip://*.jsonl::https://user:{SECRET}@127.0.0.1/x.zip",
        f"sftp://user:{SECRET}@127.0.0.1/x",
    ],
)
def test_an_address_with_credentials_is_refused_without_repeating_them(address):
    for opened in (open_filesystem, list_files, chats.check_address):
        with pytest.raises(ValueError) as error:
            opened(address)
        assert "credentials" in str(error.value) and SECRET not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        "abfs://container@account.dfs.core.windows.net/run",
        "sftp://user@host:22/run",
        "hf://datasets/org/name@revision/run",
        "s3://bucket/run?.jsonl",
        "memory://a:b@c",
        "/a:b@c?d",
    ],
)
def test_a_container_a_user_and_a_revision_are_no_credentials(address):
    refuse_credentials(address)


def test_secrets_are_cut_out_of_what_a_store_says_and_of_records(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert SECRET not in chats.describe(PermissionError(f"the key {SECRET} is refused"))
    record = {"data": [f"s3://key:{SECRET}@bucket/x", f"https://a/b?sig={SECRET}", "a@b?c"]}
    assert chats.without_credentials(record) == {"data": ["s3://bucket/x", "https://a/b", "a@b?c"]}
