# SPDX-License-Identifier: Apache-2.0
"""Documents and their shards that are damaged, of other types or beyond all size: named before anything is trained."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, LargeList, List, Value
from tiny import byte_tokenizer

from dflash_hf import chats as json_rows
from dflash_hf import rendering
from dflash_hf.data_collator import DataCollatorForDFlash, check_documents, check_token_ids
from dflash_hf.documents import OutputError, open_documents, stored_lengths
from dflash_hf.packing import PackedDataset
from dflash_hf.tokenizing import load_documents, tokenize_files


TOKENIZER = byte_tokenizer()
GOOD = {"input_ids": [1, 2, 3], "supervised_spans": [[0, 3]]}


def document(ids=(1, 2, 3), spans=((0, 3),)):
    as_list = lambda value: list(map(as_list, value)) if isinstance(value, tuple | list) else value  # noqa: E731
    return {"input_ids": as_list(ids), "supervised_spans": as_list(spans)}


@pytest.mark.parametrize("make", [list, Dataset.from_list, lambda rows: Dataset.from_list(rows[::-1]).select([1, 0])])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (document(ids=(1, None, 3)), "Document 0 has input_ids of the type"),
        (document(spans=((0, None),)), "Document 0 has supervised_spans of the type"),
        (document(spans=(None,)), "Document 0 has a supervised span that is not a .start, stop. pair"),
        (document(spans=((0, 1, 2),)), "Document 0 has a supervised span that is not a .start, stop. pair"),
    ],
)
def test_null_is_named_with_its_document(make, broken, message):
    with pytest.raises(ValueError, match=message):
        check_documents(make([broken, GOOD]), 4)


@pytest.mark.parametrize("make", [list, Dataset.from_list])
@pytest.mark.parametrize(
    ("ids", "spans"),
    [((1.5, 2.0, 3.0), ((0, 3),)), (("1", "2"), ((0, 2),)), (((1, 2), (3, 4)), ((0, 2),)), ((1, 2), ((0.0, 2.0),))],
)
def test_other_types_are_named(make, ids, spans):
    with pytest.raises(ValueError, match=r"(input_ids|supervised_spans) of the type .*expected lists of whole"):
        check_documents(make([document(ids, spans)]), 4)


@pytest.mark.parametrize("make", [list, Dataset.from_list])
def test_a_document_whose_spans_are_null_has_none(make):
    documents = make([GOOD, {"input_ids": [5, 6], "supervised_spans": None}])
    check_documents(documents, 4)
    check_token_ids(documents, 272, 260)
    rows = PackedDataset(documents, 8)
    batch = DataCollatorForDFlash(4, max_anchors_per_row=8)([rows[0]])
    assert batch["anchor_positions"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "features",
    [
        {"input_ids": LargeList(Value("int64")), "supervised_spans": LargeList(LargeList(Value("int32")))},
        {"input_ids": List(Value("uint16"), length=3), "supervised_spans": List(List(Value("uint8"), length=2))},
    ],
)
def test_lists_of_every_kind_are_read(features):
    data = {name: [value] for name, value in GOOD.items()}
    documents = Dataset.from_dict(data, features=Features(features))
    check_documents(documents, 4)
    assert DataCollatorForDFlash(4)([PackedDataset(documents, 8)[0]])["labels"].tolist()[0][0] == [-100, 2, 3, -100]


# Shards


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of documents of two files."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    for name in "ab":
        rows = [{"prompt": name * k, "completion": "x" * k} for k in range(1, 40)]
        (tmp_path / "in" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize_files(tmp_path / "in", tmp_path / "out", TOKENIZER, disable_tqdm=True)
    return tmp_path / "out"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        Path.unlink,
        lambda path: pq.write_table(pa.table({"input_ids": [[1]], "supervised_spans": [[[0, 1]]]}), path),
        lambda path: path.write_bytes((path.parent / "a.jsonl.parquet").read_bytes()),
    ],
    ids=["cut off", "missing", "of something else", "of another file"],
)
def test_a_shard_that_is_not_the_manifests_is_named_and_made_anew(folder, damage):
    damage(folder / "train" / "b.jsonl.parquet")
    for read in (lambda: load_documents(folder, TOKENIZER), lambda: stored_lengths(folder)):
        with pytest.raises(ValueError, match=r"b\.jsonl\.parquet is missing, damaged or not the one .*Start the"):
            read()
    tokenize_files(folder.parent / "in", folder, TOKENIZER, disable_tqdm=True)
    assert len(load_documents(folder, TOKENIZER)) == 78


def test_a_shard_that_is_damaged_within_is_named(folder):
    path = folder / "train" / "b.jsonl.parquet"
    content = bytearray(path.read_bytes())
    content[200:260] = b"\xff" * 60
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"are damaged within .*train/b\.jsonl\.parquet\. Delete them"):
        open_documents(folder)
    path.unlink()
    tokenize_files(folder.parent / "in", folder, TOKENIZER, disable_tqdm=True)
    assert len(open_documents(folder)) == 78


# Sizes


def test_a_text_beyond_all_size_is_counted_and_not_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "LARGEST_TEXT", 1000)
    rows = [("a", "b"), ("a", "b" * 2000), ("a" * 2000, "b")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in rows))
    manifest = tokenize_files(tmp_path / "a.jsonl", tmp_path / "out", TOKENIZER, disable_tqdm=True)
    assert manifest["dropped"] == {"text too long": 2} and manifest["documents"] == {"train": 1}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_without_line_ends_is_not_held_in_memory(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(json_rows, "LARGEST_LINE", 2**16)
    good = json.dumps({"prompt": "a", "completion": "b"})
    content = f"{good}\n[{','.join([good] * 100_000)}]\n{good}".encode()
    content = gzip.compress(content) if suffix else content
    (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
    tracemalloc.start()
    manifest = tokenize_files(tmp_path / f"a.jsonl{suffix}", tmp_path / "out", TOKENIZER, retries=0, disable_tqdm=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manifest["dropped"] == {"line too long": 1} and manifest["documents"] == {"train": 2}
    assert peak < 3_500_000


def test_a_disk_that_is_full_from_the_start_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"Writing to .*out failed .*No space left.*start the same command again"):
        tokenize_files(tmp_path / "a.jsonl", tmp_path / "out", TOKENIZER, disable_tqdm=True)
    assert not list((tmp_path / "out").iterdir())
