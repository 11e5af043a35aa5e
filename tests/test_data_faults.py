# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with real data: odd rows, odd files, odd names, damaged outputs, addresses that hold secrets."""

import functools
import gzip
import json
import random
from collections import Counter
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tokenize_job import (
    TOKENIZER,
    answers,
    cache,  # noqa: F401
    chat,
    lines,
    recipe,
    source,
    tokenize,
    tree,
    zstd,
)
from tiny import byte_tokenizer

from dflash_hf.chats import RowError, open_filesystem, read_chats, refuse_credentials
from dflash_hf.documents import FileCounts, open_documents, stored_lengths
from dflash_hf.rendering import Document
from dflash_hf.serving import CompletionServer
from dflash_hf.tokenizing import RowTokenizer, TokenizeOptions, load_documents, read_completions, tokenize_conversation


USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
# Opens a thinking block in the prompt and writes tool calls, as Qwen's templates do.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content if m.reasoning_content is string else '' }}</think>\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}{% for k, v in call.function.arguments|items %}"
    " {{ k }}={{ v }}{% endfor %}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def calls(*functions) -> dict:
    return {
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": f} for f in functions]}]
    }


def with_kwargs(value) -> dict:
    return {"messages": [USER, ANSWER], "chat_template_kwargs": value}


class TestRows:
    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"conversations": [{"from": ["human"], "value": "x"}, {"from": "gpt", "value": "y"}]}, "no role"),
            ({"conversations": [{"from": "Human", "value": "x"}, {"from": "gpt", "value": "y"}]}, "unknown role"),
            (with_kwargs([1]), "broken template arguments"),
            (with_kwargs("no"), "broken template arguments"),
            (with_kwargs({"chat_template": "{{ 'mine' }}"}), "broken template arguments"),
            (with_kwargs({"tokenize": True}), "broken template arguments"),
            ({"messages": [USER, ANSWER], "completion_token_ids": [5, 2**31]}, "broken token ids"),
            ({"messages": [USER, ANSWER], "completion_token_ids": ["5"]}, "broken token ids"),
            (calls("f"), "broken tool calls"),
            (calls({"arguments": {}}), "broken tool calls"),
            ({"messages": [USER, {**ANSWER, "content": [{"type": "thinking", "text": "hm"}]}]}, "broken content"),
            ({"messages": [USER, {**ANSWER, "reasoning_content": ["hm"]}]}, "broken thinking"),
            ({"messages": [USER, ANSWER], "response": "another"}, "two answers"),
            ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, "two answers"),
            ({"messages": "[" * 100_000}, "nested too deeply"),
            (calls({"name": "f", "arguments": "[" * 100_000}), "nested too deeply"),
            ({"messages": [USER, ANSWER], "tools": "[" * 100_000}, "nested too deeply"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, row, reason):
        with pytest.raises(RowError) as error:
            read_chats(row)
        assert error.value.reason == reason

    @pytest.mark.parametrize(
        "message",
        [
            {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"tool_calls": json.dumps([{"function": {"name": "f", "arguments": {"a": 1}}}])},
            {"function_call": {"name": "f", "arguments": '{"a": 1}'}, "tool_calls": None},
        ],
    )
    def test_tool_calls_of_every_make_are_supervised(self, message):
        row = {"messages": [USER, {"role": "assistant", "content": None, **message}]}
        (document,) = tokenize_conversation(row, byte_tokenizer(TEMPLATE))
        assert answers([document]) == ["</think>\n[f a=1]<|im_end|>"]

    @pytest.mark.parametrize("arguments", ["{bad", f'{{"a": {"9" * 5000}}}'])
    def test_arguments_that_are_no_json_are_counted_as_the_template_takes_them(self, arguments):
        with pytest.raises(ValueError, match="template failed"):
            tokenize_conversation(calls({"name": "f", "arguments": arguments}), byte_tokenizer(TEMPLATE))

    @pytest.mark.parametrize("reason", ["length", "LENGTH", {"type": "length", "length": 9}, "error"])
    def test_an_answer_that_was_cut_off_has_no_end(self, reason):
        (document,) = tokenize_conversation({"messages": [USER, ANSWER], "finish_reason": reason}, TOKENIZER)
        assert answers([document]) == ["a"]

    @pytest.mark.parametrize(
        ("stop", "answer"), [("\n\n", "a"), ("<|im_end|>", "a<|im_end|>"), (258, "a<|im_end|>"), (None, "a<|im_end|>")]
    )
    @pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
    def test_an_answer_that_a_stop_sequence_ended_has_no_end_of_turn(self, name, stop, answer):
        choice = {"message": ANSWER, "finish_reason": "stop", name: stop}
        row = {"request": {"messages": [USER]}, "response": {"choices": [choice]}}
        assert answers(tokenize_conversation(row, TOKENIZER)) == [answer]

    def test_an_answer_kept_twice_in_one_row_is_one_answer(self):
        assert len(read_chats({"messages": [USER, ANSWER], "response": "a"})[0].messages) == 2

    def test_template_arguments_may_be_json_and_never_say_how_the_template_is_called(self):
        (chat,) = read_chats(with_kwargs('{"enable_thinking": false, "documents": [], "x": null}'))
        assert chat.template_kwargs == {"enable_thinking": False, "documents": [], "x": None} or (
            chat.template_kwargs == {"enable_thinking": False, "documents": []}
        )
        with pytest.raises(ValueError, match="template_kwargs holds tokenize"):
            TokenizeOptions(template_kwargs={"tokenize": True})

    def test_the_mark_of_hidden_ends_is_refused_where_it_would_be_taken_for_one(self):
        row = {"messages": [USER, {**ANSWER, "content": "\ufdd07\ufdd0 <|im_end|> x"}]}
        with pytest.raises(ValueError, match="no text may hold"):
            tokenize_conversation(row, TOKENIZER)

    def test_no_row_of_json_ends_a_run(self):
        generator = random.Random(0)
        options = TokenizeOptions(eval_fraction=0.5)
        tokenizer = RowTokenizer(options.chat_format(byte_tokenizer(TEMPLATE)), options, FileCounts())
        outcomes: Counter[str] = Counter()
        for _ in range(1500):
            row = random_row(generator)
            try:
                drafts = tokenizer.drafts(row, 0, "place")
                assert all(isinstance(d, Document) for d in tokenizer.format.encode([draft for draft, _ in drafts]))
                outcomes["ok"] += 1
            except RowError as error:
                outcomes[error.reason] += 1
        assert outcomes["ok"] > 100 and len(outcomes) > 10, outcomes


KEYS = (
    "messages",
    "prompt",
    "completion",
    "conversations",
    "request",
    "response",
    "tools",
    "finish_reason",
    "function",
)
KEYS += (
    "completion_token_ids",
    "chat_template_kwargs",
    "source",
    "role",
    "content",
    "reasoning_content",
    "tool_calls",
)
KEYS += ("name", "arguments", "from", "value", "choices", "message", "text", "body", "type", "system", "function_call")
ATOMS = (None, True, 0, -1, 2.5, 2**70, "", "user", "assistant", "gpt", "a", "<think>\nx\n</think>\n\ny", "<|im_end|>")
ATOMS += ("[{", "{}", "[]", '[{"role":"user","content":"a"}]', "\ud800", "\ufdd0", "length", "text", '{"a": 1}')


def random_value(generator: random.Random, depth: int):
    kind = generator.random()
    if depth == 0 or kind < 0.35:
        return generator.choice(ATOMS)
    more = functools.partial(random_value, generator, depth - 1)
    if kind < 0.55:
        return [more() for _ in range(generator.randrange(4))]
    return {generator.choice(KEYS): more() for _ in range(generator.randrange(6))}


def random_row(generator: random.Random):
    """A chat with something odd in it."""
    if generator.random() < 0.2:
        return random_value(generator, 5)
    messages: list = [USER, *({**ANSWER, "role": generator.choice(("user", "assistant"))} for _ in range(2)), ANSWER]
    row: dict = {"messages": [dict(message) for message in messages]}
    if generator.random() < 0.2:
        row = {"request": {"messages": [dict(USER)]}, "response": {"choices": [{"message": dict(ANSWER)}]}}
    place = generator.choice([row, *row.get("messages", [row])])
    place[generator.choice(KEYS)] = random_value(generator, 3)
    return row


class TestFiles:
    ROWS = (chat("a", "b"), chat("c", "d"))

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.jsonl", lines(ROWS).replace(b"\n", b"\r\n")),
            ("a.jsonl", b"\xef\xbb\xbf" + lines(ROWS)),
            ("a.jsonl", b"\xef\xbb\xbf\n\n" + lines(ROWS).rstrip()),
            ("a.jsonl", gzip.compress(lines(ROWS))),
            ("a.jsonl", gzip.compress(lines(ROWS[:1])) + gzip.compress(lines(ROWS[1:]))),
            ("a.jsonl", zstd(lines(ROWS))),
            ("a.jsonl.gz", zstd(lines(ROWS[:1])) + zstd(lines(ROWS[1:]))),
            ("a.parquet", gzip.compress(lines(ROWS))),
        ],
        ids=["crlf", "mark", "mark-alone", "gzip", "gzips", "zstd", "zstds-as-gzip", "gzip-as-parquet"],
    )
    def test_a_file_is_what_it_holds_whatever_its_name(self, tmp_path, name, content):
        source(tmp_path, **{name.replace(".", "__"): content})
        manifest = tokenize(tmp_path)
        assert answers(open_documents(tmp_path / "out")) == ["b<|im_end|>", "d<|im_end|>"]
        assert not manifest["dropped"] and manifest["rows"] == 2
        assert len(read_completions(tmp_path / "in")) == 2

    def test_parquet_by_any_name_with_types_that_json_lacks(self, tmp_path):
        rows = [
            {"messages": [{**m, "at": datetime(2024, 1, 1), "raw": b"\xff"} for m in row["messages"]]}
            for row in self.ROWS
        ]
        (tmp_path / "in").mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "a.jsonl")
        assert sum(tokenize(tmp_path, TokenizeOptions(eval_fraction=0.5))["documents"].values()) == 2

    def test_a_line_that_is_nested_too_deeply_is_counted(self, tmp_path):
        source(tmp_path, a__jsonl=b'{"messages": ' + b"[" * 100_000 + b"\n" + lines(self.ROWS))
        manifest = tokenize(tmp_path)
        assert manifest["dropped"] == {"nested too deeply": 1} and manifest["documents"] == {"train": 2}

    @pytest.mark.parametrize("extra", [{"source": "x\ud800"}, {"language": "\ud800"}, {"dataset": "\ud800"}])
    def test_names_that_are_no_unicode_are_stored_in_part(self, tmp_path, extra):
        source(tmp_path, a__jsonl=lines([chat("a", "b", **extra)]))
        tokenize(tmp_path)
        (document,) = open_documents(tmp_path / "out")
        assert "?" in document["source"] or document["language"] == "?"

    def test_odd_names_of_files_and_folders(self, tmp_path):
        names = [
            "a b#1?",
            "[z]*",
            "x::y",
            "é%20",
            "new\nline",
            "{a,b}",
            "d/[1]/a=b",
            b"\xff".decode("utf-8", "surrogateescape"),
        ]
        for number, name in enumerate(names):
            path = tmp_path / "in#[1]" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lines([chat(f"q{number}", f"a{number}")]))
        # A folder that the output's name would match as a pattern.
        (tmp_path / "out 1" / "train").mkdir(parents=True)
        for output in ("out [1]", "out ?", "out 1"):
            recipe.tokenize_files(tmp_path / "in#[1]", tmp_path / output, TOKENIZER, disable_tqdm=True)
            documents = open_documents(tmp_path / output)
            assert sorted(answers(documents)) == [f"a{number}<|im_end|>" for number in range(len(names))]
        before = tree(tmp_path / "out 1")
        recipe.tokenize_files(tmp_path / "in#[1]/", tmp_path / "out 1", TOKENIZER, disable_tqdm=True)
        assert tree(tmp_path / "out 1") == before
        shards = {shard for file in json.loads(before["manifest.json"])["files"] for shard in file["shards"].values()}
        assert shards == {name for name in before if name.endswith(".parquet")}


class TestDamage:
    OPTIONS = TokenizeOptions(eval_fraction=0.5)

    @pytest.mark.parametrize(
        "name", ["manifest.json", "train/a.jsonl.parquet", "eval/a.jsonl.parquet", "train/b.jsonl.parquet"]
    )
    @pytest.mark.parametrize("damage", ["removed", "empty", "cut", "foreign"])
    def test_what_is_damaged_is_made_again(self, tmp_path, name, damage):
        source(tmp_path, **{f"{n}__jsonl": lines(chat(f"{n}{i}", "b") for i in range(20)) for n in "ab"})
        tokenize(tmp_path, self.OPTIONS)
        before = tree(tmp_path / "out")
        path = tmp_path / "out" / name
        if damage == "removed":
            path.unlink()
        elif damage == "foreign" and name.endswith("parquet"):
            pq.write_table(pa.table({"a": [1]}), path)
        else:
            path.write_bytes(path.read_bytes()[: 100 * (damage == "cut")] + b"[]" * (damage == "foreign"))
        tokenize(tmp_path, self.OPTIONS)
        assert tree(tmp_path / "out") == before

    @pytest.mark.parametrize("content", ["", '{"form', "[]", "{}"])
    def test_a_record_that_cannot_be_read_is_named(self, tmp_path, content):
        source(tmp_path, a__jsonl=lines([chat("a", "b")]))
        tokenize(tmp_path)
        (tmp_path / "out/settings.json").write_text(content)
        with pytest.raises(ValueError, match=r"made otherwise \(format: None then, .*settings\.json"):
            tokenize(tmp_path)
        (tmp_path / "out/manifest.json").write_text(content)
        with pytest.raises(ValueError, match=r"out/manifest\.json has the format None"):
            load_documents(tmp_path / "out", TOKENIZER)

    def test_documents_of_a_run_that_has_not_ended_are_no_training_data(self, tmp_path, monkeypatch):
        source(tmp_path, a__jsonl=lines([chat("a", "b")]))
        tokenize(tmp_path)
        source(tmp_path, b__jsonl=lines([chat("c", "d")]))
        monkeypatch.setattr("dflash_hf.tokenizing.work_on", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokenize(tmp_path)
        with pytest.raises(ValueError, match=r"has not ended\. Start the same command again"):
            load_documents(tmp_path / "out", TOKENIZER)
        monkeypatch.undo()
        tokenize(tmp_path)
        assert len(load_documents(tmp_path / "out", TOKENIZER)) == 2


SECRET = "s3cretS3CRET"


@pytest.mark.parametrize(
    "address",
    [
        f"s3://AKIAKEY:{SECRET}@bucket/x",
        f"s3://AKIAKEY:{SECRET}/a+b@bucket/x",
        f"https://user:{SECRET}@127.0.0.1/x.jsonl",
        f"https://{SECRET}@127.0.0.1/x.jsonl",
        f"https://127.0.0.1/x.jsonl?X-Amz-Signature={SECRET}",
        f"zip://*.jsonl::https://user:{SECRET}@127.0.0.1/x.zip",
        f"sftp://user:{SECRET}@127.0.0.1/x",
    ],
)
def test_an_address_with_credentials_is_refused_without_repeating_them(tmp_path, address, capsys):
    TOKENIZER.save_pretrained(tmp_path / "target")
    source(tmp_path, a__jsonl=lines([chat("a", "b")]))
    for completions, output in ((address, tmp_path / "out"), (tmp_path / "in", address)):
        words = [f"--completions={completions}", f"--output={output}", f"--target={tmp_path / 'target'}"]
        assert recipe.main(recipe.parse_config(recipe.TokenizeArguments, words)[0]) == 2
        out, err = capsys.readouterr()
        assert "holds credentials or a query" in err and SECRET not in out + err
    assert not (tmp_path / "out").exists()


# For documents and for checkpoints alike.
@pytest.mark.parametrize(
    "address",
    [
        "abfs://container@account.dfs.core.windows.net/run",
        "sftp://user@host:22/run",
        "hf://datasets/org/name@revision/run",
        "s3://bucket/run?.jsonl",
    ],
)
def test_a_container_a_user_and_a_revision_are_no_credentials(address):
    refuse_credentials(address)


@pytest.mark.parametrize("address", ["memory://a:b@c", "file:///a:b@c", "/a:b@c?d", "a@b"])
def test_other_addresses_are_left_alone(address):
    open_filesystem(address)


def test_secrets_of_the_environment_are_cut_out_of_what_a_store_says(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def refuse(*args, **kwargs):
        raise PermissionError(f"the key {SECRET} is refused")

    source(tmp_path, a__jsonl=lines([chat("a", "b")]))
    monkeypatch.setattr("dflash_hf.chats._opened", refuse)
    failed = tokenize(tmp_path, retries=0)["failed"]
    assert "is refused" in failed["a.jsonl"] and SECRET not in (tmp_path / "out/manifest.json").read_text()


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        (f"http://u:{SECRET}@127.0.0.1:1/v1", "", "holds credentials"),
        (f"http://127.0.0.1:1/v1?key={SECRET}", "", "holds credentials"),
        ("127.0.0.1:8000", "", "is not an address of a server; give one such as"),
        ("http://127.0.0.1:1/v1", f"{SECRET}\nx", "no HTTP header may hold"),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused_at_once(monkeypatch, url, key, message):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match=message) as error:
        CompletionServer(url)
    assert SECRET not in str(error.value)


class TestReport:
    def run(self, folder: Path, **kwargs) -> int:
        TOKENIZER.save_pretrained(folder / "target")
        arguments = {"completions": f"{folder}/in", "target": f"{folder}/target", "output": f"{folder}/out"}
        return recipe.main(recipe.TokenizeArguments(**{**arguments, "num_proc": 1, **kwargs}))

    def test_documents_longer_than_a_row_are_counted_and_end_no_finished_run(self, tmp_path, capsys):
        source(tmp_path, a__jsonl=lines([chat("a", "b"), chat("a", "b" * 300)]))
        assert self.run(tmp_path, row_length=100) == 0
        out = capsys.readouterr().out
        assert "1 documents fill 1 rows of 100 tokens" in out and "1 documents, of up to" in out
        assert f"next: recipes/train_qwen36.py --completions {tmp_path}/out" in out
        assert self.run(tmp_path, row_length=0) == 2

    def test_the_report_copies_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr("dflash_hf.documents.load_dataset", None)
        source(tmp_path, a__jsonl=lines([chat("a", "b"), chat("c", "d")]), b__jsonl=lines([chat("e", "f")]))
        assert self.run(tmp_path, row_length=1000) == 0
        monkeypatch.undo()
        lengths = [len(document["input_ids"]) for document in open_documents(tmp_path / "out")]
        assert stored_lengths(tmp_path / "out").tolist() == lengths and len(lengths) == 3
