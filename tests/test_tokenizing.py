# SPDX-License-Identifier: Apache-2.0
"""Rows to documents: in memory, and by jobs over files and object stores that a kill cannot spoil."""

import gzip
import json
import logging
import random
import time
from datetime import datetime
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from fsspec.implementations.memory import MemoryFileSystem
from killing import run_and_kill
from moto.backends import get_backend
from moto.server import ThreadedMotoServer
from tiny import CHATML_TEMPLATE, byte_tokenizer, chat, json_lines, refused, supervised_texts

from dflash_hf import rendering, tokenizing
from dflash_hf.chats import list_files
from dflash_hf.documents import DOCUMENT_FEATURES, DocumentFolder, OutputError, format_summary, open_documents
from dflash_hf.tokenizing import (
    TokenizeOptions,
    load_documents,
    read_completions,
    tokenize_completions,
    tokenize_conversation,
    tokenize_files,
)


TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(folder: Path, **files: bytes) -> None:
    """Files of rows in the folder `in`; `__` in a name is a dot."""
    (folder / "in").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / "in" / name.replace("__", ".")).write_bytes(content)


def tokenize(folder: Path, options: TokenizeOptions | None = None, output="out", num_proc=1, **kwargs) -> dict:
    kwargs = {"disable_tqdm": True, "num_proc": num_proc, **kwargs}
    return tokenize_files(folder / "in", folder / output, TOKENIZER, options, **kwargs)


def answers(documents) -> list[str]:
    return supervised_texts(documents, TOKENIZER)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- In memory


def test_a_dataset_of_the_stated_columns_over_several_parts(monkeypatch):
    monkeypatch.setattr(tokenizing, "CHUNK_ROWS", 2)
    rows = [chat("a", str(i)) for i in range(5)]
    documents = tokenize_completions(rows, TOKENIZER, disable_tqdm=True)
    assert documents.features == DOCUMENT_FEATURES
    assert documents["row"][:] == list(range(5)) and answers(documents) == [f"{i}<|im_end|>" for i in range(5)]
    assert {name: documents[3][name] for name in ("input_ids", "supervised_spans")} == (
        tokenize_conversation(rows[3], TOKENIZER)[0]
    )


def test_dt7_cut_within_the_answer_keeps_ids_and_spans_together():
    row = chat("a", "0123456789")
    (whole,) = tokenize_conversation(row, TOKENIZER)
    ((start, stop),) = whole["supervised_spans"]
    for limit in (start + 1, stop - 1):
        (cut,) = tokenize_conversation(row, TOKENIZER, max_length=limit)
        assert cut == {"input_ids": whole["input_ids"][:limit], "supervised_spans": [[start, limit]]}
    assert tokenize_conversation(row, TOKENIZER, max_length=start) == []
    assert tokenize_conversation(row, TOKENIZER, max_length=stop + 5) == [whole]


def test_dt7_answers_cut_away_whole_are_counted_in_one_line(caplog):
    rows = [chat("a", "b", "c" * 50, "d"), chat("e" * 50, "f")]
    documents = tokenize_completions(rows, TOKENIZER, max_length=60, disable_tqdm=True)
    (record,) = caplog.records
    assert answers(documents) == ["b<|im_end|>"]
    assert "dropped 2" in record.message and "max_length=60" in record.message


@pytest.mark.parametrize("rows", [[], [chat("a", "b")]])
def test_nothing_left_is_an_error(rows):
    with refused(ValueError, f"of {len(rows)} chats"):
        tokenize_completions(rows, TOKENIZER, max_length=5, disable_tqdm=True)


@pytest.mark.parametrize(
    "options",
    [{"max_length": 0}, {"eval_fraction": 1}, {"long_documents": "windows"}, {"template_kwargs": {"tools": []}}],
)
def test_options_that_mean_nothing_are_refused(options):
    with refused(ValueError, *options):
        TokenizeOptions(**options)


def test_dt6_text_that_the_template_adds_before_the_answer_is_told_of(caplog):
    tokenizer = byte_tokenizer(
        CHATML_TEMPLATE.replace("\n{{ message", "\n{{ '<x>' if message['role'] == 'assistant' }}{{ message")
    )
    tokenize_completions([chat("a", "b"), chat("c", "d")], tokenizer, disable_tqdm=True)
    (record,) = caplog.records
    assert all(word in record.message for word in ("in 2 answers", "'<x>'", "enable_thinking"))


def test_a_row_is_named_by_its_index_and_its_line_and_skipped_as_asked(tmp_path, caplog):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json_lines([chat("a", "b")]) + b"\n" + json_lines([chat("a")]))
    rows = read_completions(path)
    for source in (rows, Dataset.from_list(rows)):
        with refused(ValueError, "Row 1", f"{path}:3"):
            tokenize_completions(source, TOKENIZER, disable_tqdm=True)
    with refused(ValueError, "The row", f"{path}:3"):
        tokenize_conversation(rows[1], TOKENIZER)
    documents = tokenize_completions([chat("a"), *rows], TOKENIZER, on_error="skip", disable_tqdm=True)
    assert documents["row"][:] == [1]
    assert [any(name in record.message for record in caplog.records) for name in ("Row 0", "Row 2")] == [True] * 2
    with refused(ValueError, "on_error", "ignore"):
        tokenize_completions(rows, TOKENIZER, on_error="ignore")


def test_progress_is_shown_unless_disabled(capsys):
    for is_hidden in (False, True):
        tokenize_completions([chat("a", "b")], TOKENIZER, disable_tqdm=is_hidden)
        assert ("1/1" in capsys.readouterr().err) is not is_hidden


# --- Files to a folder of documents


def test_every_format_gives_the_same_documents(tmp_path):
    rows = [chat("a", f"answer {i}", source="s", language="en") for i in range(5)]
    # With types that JSON lacks.
    typed = [row | {"at": datetime(2024, 1, 1), "raw": b"\xff"} for row in rows]
    pq.write_table(pa.Table.from_pylist(typed), tmp_path / "c.parquet")
    write(
        tmp_path,
        a__jsonl=json_lines(rows),
        b__jsonl__gz=gzip.compress(json_lines(rows)),
        c__parquet=(tmp_path / "c.parquet").read_bytes(),
        d__jsonl=json_lines([chat("a", "text", completion_token_ids=[270, 3, 258])]),
        notes__txt=b"not read",
    )
    manifest = tokenize(tmp_path, TokenizeOptions(source="mine"))
    assert [file["name"] for file in manifest["files"]] == ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.jsonl"]
    documents = open_documents(tmp_path / "out")
    assert answers(documents)[:15] == [f"answer {i}<|im_end|>" for i in range(5)] * 3
    assert documents["row"][:] == [*range(5), *range(5), *range(5), 0]
    assert documents["source"][:] == ["s"] * 15 + ["mine"] and documents["language"][:] == ["en"] * 15 + [None]
    assert documents[3]["input_ids"] == tokenize_conversation(rows[3], TOKENIZER)[0]["input_ids"]
    assert documents[15]["input_ids"][-3:] == [270, 3, 258]


def test_dt7_cut_windows_and_marks(tmp_path):
    long = chat("a", "0123456789" * 14)
    whole = tokenize_conversation(long, TOKENIZER)[0]
    start, total = whole["supervised_spans"][0]
    others = [chat("b" * 200, "c"), *(chat("d", text, finish_reason="length") for text in ("e", ""))]
    write(tmp_path, a__jsonl=json_lines([long, *others]))
    manifest = tokenize(tmp_path, TokenizeOptions(max_length=60))
    assert manifest["dropped"] == {"empty answer": 1, "prompt too long": 1}
    cut, short = open_documents(tmp_path / "out")
    assert cut["input_ids"] == whole["input_ids"][:60] and cut["supervised_spans"] == [[start, 60]]
    assert cut["truncated"] and short["truncated"] and answers([short]) == ["e"]
    manifest = tokenize(tmp_path, TokenizeOptions(max_length=60, long_documents="windows"), "windows")
    documents = [row for row in open_documents(tmp_path / "windows") if row["row"] == 0]
    assert [row["supervised_spans"] for row in documents] == [[[start, 60]], [[60, 120]], [[120, total]]]
    assert all(row["input_ids"] == whole["input_ids"][: row["supervised_spans"][0][1]] for row in documents)
    assert [row["truncated"] for row in documents] == [True, True, False]
    assert manifest["repeated_tokens"] == 60 + 120 and "180 tokens" in format_summary(manifest)


def test_turns_merge_or_only_the_last_counts(tmp_path):
    write(tmp_path, a__jsonl=json_lines([chat("a", "b", "c", "d")]))
    found = []
    for name, options in (("merged", {}), ("apart", {"merge_turns": False}), ("last", {"last_turn_only": True})):
        tokenize(tmp_path, TokenizeOptions(**options), name)
        found.append(answers(open_documents(tmp_path / name)))
    assert found == [["b<|im_end|>d<|im_end|>"], ["b<|im_end|>", "d<|im_end|>"], ["d<|im_end|>"]]


def test_the_evaluation_split_goes_by_prompt_and_is_stable(tmp_path):
    rows = [chat(f"question {i}", f"answer {k}") for i in range(200) for k in range(2)]
    write(tmp_path, a__jsonl=json_lines(rows), b__jsonl=json_lines([chat("question 7", "another")]))
    counts = tokenize(tmp_path, TokenizeOptions(eval_fraction=0.25))["documents"]
    assert sum(counts.values()) == 401 and 60 < counts["eval"] < 140

    def questions(split, output="out"):
        documents = open_documents(tmp_path / output, split)
        return {TOKENIZER.decode(row["input_ids"][: row["supervised_spans"][0][0]]) for row in documents}

    assert not questions("train") & questions("eval")
    random.Random(0).shuffle(rows)
    write(tmp_path, a__jsonl=json_lines(rows))
    tokenize(tmp_path, TokenizeOptions(eval_fraction=0.25), "again")
    assert questions("eval") == questions("eval", "again")


def test_chunks_and_processes_do_not_show(tmp_path, monkeypatch):
    rows = [chat(f"q{i}", "x" * (i % 50)) for i in range(100)]
    write(tmp_path, a__jsonl=json_lines(rows), b__jsonl=json_lines(rows[:30]), c__jsonl=b"")
    tokenize(tmp_path, output="one")
    tokenize(tmp_path, output="two", num_proc=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    monkeypatch.setattr(tokenizing, "CHUNK_CHARACTERS", 300)
    tokenize(tmp_path, output="small")
    small, one = open_documents(tmp_path / "small"), open_documents(tmp_path / "one")
    assert small["input_ids"][:] == one["input_ids"][:] and len(one) == 130
    assert pq.ParquetFile(tmp_path / "small/train/a.jsonl.parquet").num_row_groups > 5


def test_a_template_that_writes_the_date_asks_for_one(tmp_path, caplog):
    write(tmp_path, a__jsonl=json_lines([chat("a", "b")]))
    dated = byte_tokenizer("{{ date if date is defined else strftime_now('%d %b %Y') }}" + CHATML_TEMPLATE)
    tokenize_files(tmp_path / "in", tmp_path / "x", dated, disable_tqdm=True)
    assert "template_kwargs" in caplog.text
    caplog.clear()
    options = TokenizeOptions(template_kwargs={"date": "26 Jul 2024"})
    tokenize_files(tmp_path / "in", tmp_path / "y", dated, options, disable_tqdm=True)
    assert not caplog.records
    assert TOKENIZER.decode(open_documents(tmp_path / "y")[0]["input_ids"]).startswith("26 Jul 2024<|im_start|>")


# --- Rows and files that cannot be used


def with_part(part: dict) -> dict:
    return {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "b"}]}


BAD = [
    (b'{"messages": [', "not JSON"),
    (b'["messages"]', "not JSON"),
    (b'{"messages": "\xff"}', "not UTF-8"),
    (b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
    (json_lines([chat("a", "\ud83d")]), "broken Unicode"),
    (json_lines([{"messages": [{"role": "asistant", "content": "b"}]}]), "unknown role"),
    (json_lines([chat("a")]), "no answer"),
    (json_lines([chat(" ", "b")]), "empty prompt"),
    (json_lines([with_part({"type": "image_url", "image_url": {"url": "x"}})]), "image, audio or video"),
    (json_lines([chat("bad", "c")]), "template failed"),
    (json_lines([chat("odd", "d")]), "prompt is no prefix"),
    (json_lines([chat("a", "b" * 2000)]), "text too long"),
]


def test_each_is_counted_by_its_reason_and_named_and_nothing_else_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "LARGEST_TEXT", 1000)
    template = (
        "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
        "{% if messages[0]['content'] == 'odd' and add_generation_prompt %}odd{% endif %}" + CHATML_TEMPLATE
    )
    good = json_lines([chat("a", "b", source="x\ud800")])
    content = good + b"\n".join(row.strip() for row, _ in BAD) + b"\n" + good
    write(tmp_path, a__jsonl=content, b__jsonl=good)
    manifest = tokenize_files(tmp_path / "in", tmp_path / "out", byte_tokenizer(template), disable_tqdm=True)
    reasons = [reason for _, reason in BAD]
    assert manifest["dropped"] == {reason: reasons.count(reason) for reason in reasons}
    assert manifest["rows"] == len(BAD) + 3 and manifest["documents"] == {"train": 3}
    examples = manifest["files"][0]["dropped_examples"]
    for number, reason in enumerate(reasons, start=2):
        assert any(f"a.jsonl:{number}: " in example for example in examples[reason])
        assert reason in format_summary(manifest)
    # Half a surrogate pair, which JSON can spell, cannot be stored.
    assert set(open_documents(tmp_path / "out")["source"]) == {"x?"}


def test_a_missing_template_and_wrong_addresses_are_errors_at_once(tmp_path):
    write(tmp_path, a__jsonl=json_lines([chat("a", "b")]))
    with refused(ValueError, "chat_template"):
        tokenize_files(tmp_path / "in", tmp_path / "out", byte_tokenizer(None))
    with refused(FileNotFoundError, "nowhere"):
        tokenize_files(tmp_path / "nowhere", tmp_path / "out", TOKENIZER)
    for address in (tmp_path / "in", tmp_path / "in" / "*"):
        with refused(ValueError, address, tmp_path / "in" / "out"):
            tokenize_files(address, tmp_path / "in" / "out", TOKENIZER)
    assert not (tmp_path / "out").exists() and not (tmp_path / "in" / "out").exists()


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_broken_file_is_named_and_leaves_nothing(tmp_path, num_proc):
    whole = gzip.compress(json_lines(chat("a", str(i) * 300) for i in range(600)))
    good = json_lines([chat("a", "b")])
    write(tmp_path, a__jsonl__gz=whole[: len(whole) // 2], b__jsonl=good, c__parquet=b"PAR1 not really")
    manifest = tokenize(tmp_path, num_proc=num_proc, retry_wait=0.0)
    assert sorted(manifest["failed"]) == ["a.jsonl.gz", "c.parquet"]
    assert "a.jsonl.gz:" in manifest["failed"]["a.jsonl.gz"] and "gzip" in manifest["failed"]["a.jsonl.gz"]
    assert set(tree(tmp_path / "out")) == {"settings.json", "manifest.json", "train/b.jsonl.parquet"}
    write(tmp_path, a__jsonl__gz=whole)
    manifest = tokenize(tmp_path, num_proc=num_proc, retries=-1)
    assert sorted(manifest["failed"]) == ["c.parquet"] and manifest["documents"] == {"train": 601}


def test_a_file_that_is_tried_again_counts_once(tmp_path, monkeypatch):
    write(tmp_path, a__jsonl=json_lines(chat("a", "b" * 500) for _ in range(600)))
    read, attempts, seen = tokenizing.read_rows, [], [0, 0]

    def fails_once(fs, file):
        attempts.append(file.name)
        yield from list(read(fs, file))[: 500 if len(attempts) == 1 else None]
        if len(attempts) == 1:
            raise tokenizing.SourceError("connection reset")

    def on_progress(num_bytes, num_tokens):
        seen[:] = seen[0] + num_bytes, seen[1] + num_tokens

    monkeypatch.setattr(tokenizing, "read_rows", fails_once)
    original = tokenizing.work_on
    monkeypatch.setattr(tokenizing, "work_on", lambda job, files, n, _: original(job, files, n, on_progress))
    manifest = tokenize(tmp_path, retry_wait=0.0)
    assert len(attempts) == 2 and seen == [(tmp_path / "in/a.jsonl").stat().st_size, manifest["tokens"]]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_full_disk_ends_the_run_and_what_is_finished_stays(tmp_path, monkeypatch, num_proc):
    """A file is finished once all its shards are there, the training shard last."""
    write(tmp_path, **{f"{name}__jsonl": json_lines(chat(f"{name}{i}", "b") for i in range(20)) for name in "abcd"})
    options, publish = TokenizeOptions(eval_fraction=0.5), DocumentFolder.publish

    def full(self, temporary, path):
        if path.endswith("train/c.jsonl.parquet"):
            raise OSError(28, "No space left on device")
        publish(self, temporary, path)

    monkeypatch.setattr(DocumentFolder, "publish", full)
    with refused(OutputError, tmp_path / "out", "No space left on device"):
        tokenize(tmp_path, options, num_proc=num_proc)
    left = tree(tmp_path / "out")
    assert {"train/a.jsonl.parquet", "eval/c.jsonl.parquet"} <= left.keys()
    assert not [name for name in left if name.endswith(".tmp") or "manifest" in name or "train/c" in name]
    monkeypatch.setattr(DocumentFolder, "publish", publish)
    assert sum(tokenize(tmp_path, options, num_proc=num_proc)["documents"].values()) == 80


# --- Going on


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with eight files and what an undisturbed run makes of them, and how long that takes."""
    folder = tmp_path_factory.mktemp("work")
    generator = random.Random(0)
    for number in range(8):
        rows = [chat(f"q{i}", "word " * generator.randrange(100, 400)) for i in range(150)]
        write(folder, **{f"part{number}__jsonl": json_lines(rows)})
    start = time.monotonic()
    tokenize(folder, TokenizeOptions(eval_fraction=0.2), "whole", num_proc=2)
    return folder, tree(folder / "whole"), time.monotonic() - start


def check_killed(folder: Path, expected: dict[str, bytes], output: str, is_time) -> None:
    options = TokenizeOptions(eval_fraction=0.2)
    run_and_kill(is_time, tokenize, folder, options, output, 2)
    tokenize(folder, options, output, num_proc=2)
    assert tree(folder / output) == expected


@pytest.mark.parametrize("num_shards", [0, 3])
def test_killed_and_started_again_gives_the_same_bytes(work, num_shards):
    folder, expected, _ = work
    output = f"killed{num_shards}"

    def is_time():
        found = list((folder / output).rglob("*.parquet" if num_shards else "*.tmp"))
        return len(found) >= max(1, num_shards)

    check_killed(folder, expected, output, is_time)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(20))
def test_killed_at_any_moment(work, moment):
    folder, expected, duration = work
    output = folder / f"moment{moment}"
    begun: list[float] = []

    def is_time():
        # The process takes a while to start, so the clock runs from the first thing that it writes.
        if not begun and (output / "settings.json").exists():
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() - begun[0] > duration * (moment + 0.5) / 20

    check_killed(folder, expected, output.name, is_time)


def test_finished_files_are_not_read_again_and_other_options_are_refused(tmp_path, monkeypatch):
    write(tmp_path, **{f"{name}__jsonl": json_lines([chat("a", name)]) for name in "abc"})
    tokenize(tmp_path)
    before = tree(tmp_path / "out")
    (tmp_path / "out/train/b.jsonl.parquet").unlink()
    (tmp_path / "out/shard-left.tmp").write_bytes(b"from a killed run")
    opened, original = [], tokenizing.read_rows
    monkeypatch.setattr(tokenizing, "read_rows", lambda fs, file: opened.append(file.name) or original(fs, file))
    tokenize(tmp_path)
    assert opened == ["b.jsonl"] and tree(tmp_path / "out") == before
    with refused(ValueError, "max_length: None then, 9 now"):
        tokenize(tmp_path, TokenizeOptions(max_length=9))
    other = byte_tokenizer()
    other.add_tokens(["new"])
    with refused(ValueError, "vocabulary_hash"):
        tokenize_files(tmp_path / "in", tmp_path / "out", other, disable_tqdm=True)


def test_a_changed_file_is_made_again(tmp_path):
    write(tmp_path, a__jsonl=json_lines([chat("a", "old")]), b__jsonl=json_lines([chat("a", "c")]))
    tokenize(tmp_path)
    time.sleep(0.01)
    write(tmp_path, a__jsonl=json_lines([chat("a", "new")]))
    tokenize(tmp_path)
    assert answers(open_documents(tmp_path / "out")) == ["new<|im_end|>", "c<|im_end|>"]


# --- Object stores: S3 over HTTP on loopback, and file systems of fsspec


NUM_FILES = 1805  # more than one page of a listing holds


def line(number: int) -> bytes:
    return json_lines([chat(f"question {number}", f"answer {number}")])


@pytest.fixture(scope="module")
def s3():
    """The storage options of an S3 server with many small files, and what puts an object into it without a request."""
    server = ThreadedMotoServer(port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "client_kwargs": {"region_name": "us-east-1"}}
    backend = get_backend("s3")["123456789012"]["aws"]
    for bucket in ("many", "few", "out"):
        backend.create_bucket(bucket, "us-east-1")
    for number in range(NUM_FILES):
        backend.put_object("many", f"answers/{number % 7}/part-{number:04}.jsonl", line(number))
    yield options, lambda bucket, key, value: backend.put_object(bucket, key, value)
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    # A file system that is cached by its arguments would go on with the keys of another test.
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_1805_small_files_are_listed_over_several_pages(s3):
    files = list_files("s3://many/answers", s3[0])
    assert len(files) == NUM_FILES and [file.name for file in files] == sorted(file.name for file in files)
    assert all(file.size == len(line(int(file.name[-10:-6]))) and len(file.version) == 32 for file in files)
    some = list_files("s3://many/answers/0/*.jsonl", s3[0])
    assert [file.name for file in some][:2] == ["part-0000.jsonl", "part-0007.jsonl"]


@pytest.mark.parametrize(
    ("folder", "numbers"),
    [("/0", range(0, 1000, 7)), pytest.param("", range(NUM_FILES), marks=pytest.mark.slow)],
)
def test_dt10_files_of_a_bucket_are_read_and_written_back(s3, tmp_path, folder, numbers):
    address, output = f"s3://many/answers{folder}{'/part-0*' if folder else ''}", f"s3://out/many{folder}"
    run = {"storage_options": s3[0], "disable_tqdm": True}
    manifest = tokenize_files(address, output, TOKENIZER, num_proc=2, **run)
    assert manifest["documents"] == {"train": len(numbers)} and len(manifest["files"]) == len(numbers)
    documents = open_documents(output, storage_options=s3[0], cache_dir=str(tmp_path))
    assert sorted(answers(documents)) == sorted(f"answer {number}<|im_end|>" for number in numbers)
    assert documents["source"][:2] == ["part-0000", "part-0007"]
    # Started again, nothing is read: the shards say that they are finished.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert tokenize_files(address, output, TOKENIZER, **run) == manifest


def test_a_file_that_fails_is_retried_then_named_and_the_rest_is_finished(s3, monkeypatch):
    options, put = s3
    for number in range(4):
        put("few", f"a/{number}.jsonl", line(number))
    s3fs = fsspec.get_filesystem_class("s3")
    opened: list[str] = []
    original = s3fs._cat_file

    async def fails(self, path, **kwargs):
        opened.append(path)
        if path.endswith("2.jsonl") or (path.endswith("1.jsonl") and opened.count(path) < 2):
            raise OSError("connection reset")
        return await original(self, path, **kwargs)

    monkeypatch.setattr(s3fs, "_cat_file", fails)
    run = {"storage_options": options, "disable_tqdm": True, "retry_wait": 0.0, "retries": 2}
    manifest = tokenize_files("s3://few/a", "s3://out/few", TOKENIZER, **run)
    assert opened.count("few/a/2.jsonl") == 3 and opened.count("few/a/1.jsonl") == 2
    assert not manifest["complete"] and len(manifest["files"]) == 3
    (error,) = manifest["failed"].values()
    assert "s3://few/a/2.jsonl" in error and "connection reset" in error
    monkeypatch.setattr(s3fs, "_cat_file", original)
    s3fs.clear_instance_cache()
    manifest = tokenize_files("s3://few/a", "s3://out/few", TOKENIZER, **run)
    assert manifest["complete"] and manifest["documents"] == {"train": 4}


def test_missing_credentials_and_addresses_are_explained(s3, monkeypatch):
    for address in ("s3://few/nowhere", "s3://no-such-bucket/a"):
        with refused(FileNotFoundError, address):
            tokenize_files(address, "s3://out/x", TOKENIZER, storage_options=s3[0])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with refused(OSError, "s3://few/a", "NoCredentialsError", "AWS_ACCESS_KEY_ID", "storage_options"):
        list_files("s3://few/a", s3[0])
    with refused(ValueError, "nosuch://few/a"):
        list_files("nosuch://few/a")


class KeyedFileSystem(MemoryFileSystem):
    """A file system that asks for a key, to see that every call hands it on."""

    protocol = "keyed"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def __init__(self, key=None, **kwargs):
        super().__init__(**kwargs)
        if key != "secret":
            raise PermissionError(f"the key is {key!r}")

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("keyed://"))


def test_dt10_storage_options_reach_every_call():
    fsspec.register_implementation("keyed", KeyedFileSystem, clobber=True)
    run = {"storage_options": {"key": "secret"}}
    fs = KeyedFileSystem(key="secret")
    fs.pipe("/in/a.jsonl", line(1) + line(2))
    fs.pipe("/in/b.jsonl", line(3))
    options = TokenizeOptions(eval_fraction=0.4)
    manifest = tokenize_files("keyed://in", "keyed://out", TOKENIZER, options, disable_tqdm=True, **run)
    splits = [load_documents("keyed://out", TOKENIZER, split, **run) for split in manifest["documents"]]
    found = sorted(answers([row for split in splits for row in split]))
    assert found == [f"answer {i}<|im_end|>" for i in (1, 2, 3)]
    assert len(read_completions("keyed://in", **run)) == 3
    for call in (lambda: list_files("keyed://in"), lambda: open_documents("keyed://out")):
        with refused((OSError, ValueError), "the key is None"):
            call()
    assert "secret" not in json.dumps(manifest)
