# SPDX-License-Identifier: Apache-2.0
"""A folder of documents: opened as it was written, made again where it is damaged, refused where it means another."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import (
    CHATML_TEMPLATE,
    byte_tokenizer,
    chat,
    dense_target,
    json_lines,
    refused,
    supervised_texts,
    tiny_drafter,
)

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.documents import (
    MANIFEST_NAME,
    OutputError,
    check_documents_fit,
    format_summary,
    marked_examples,
    open_documents,
    read_manifest,
    stored_lengths,
)
from dflash_hf.packing import PackedDataset
from dflash_hf.tokenizing import TokenizeOptions, load_documents, tokenize_completions, tokenize_files


TOKENIZER = byte_tokenizer()
ROWS = {name: [chat(f"{name}{i}", f"answer {i}" * 4) for i in range(20)] for name in "ab"}
OPTIONS = TokenizeOptions(eval_fraction=0.3)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of documents of two files, `in` beside it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    for name, rows in ROWS.items():
        (tmp_path / "in" / f"{name}.jsonl").write_bytes(json_lines(rows))
    tokenize_again(tmp_path / "out")
    return tmp_path / "out"


def tokenize_again(folder: Path) -> dict:
    return tokenize_files(folder.parent / "in", folder, TOKENIZER, OPTIONS, disable_tqdm=True)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_other_vocabulary():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<other>"])
    return tokenizer


def test_documents_or_completions_by_one_call(folder):
    train, held_out = (load_documents(folder, TOKENIZER, split) for split in ("train", "eval"))
    whole = load_documents(folder.parent / "in", TOKENIZER)
    rows = [row for part in ROWS.values() for row in part]
    assert whole["input_ids"][:] == tokenize_completions(rows, TOKENIZER, disable_tqdm=True)["input_ids"][:]
    assert sorted([*train["input_ids"], *held_out["input_ids"]]) == sorted(whole["input_ids"])
    assert stored_lengths(folder).tolist() == [len(ids) for ids in train["input_ids"]]
    # Memory mapped: the columns lie in files and not in memory.
    assert train.cache_files and held_out.cache_files
    with refused(ValueError, "eval"):
        load_documents(folder.parent / "in", TOKENIZER, "eval")
    with refused(FileNotFoundError, "nowhere"):
        load_documents(folder / "nowhere", TOKENIZER)
    with refused(FileNotFoundError, folder.parent / "in", MANIFEST_NAME):
        open_documents(folder.parent / "in")
    with refused(ValueError, "'test'"):
        open_documents(folder, "test")
    with refused(ValueError, "enable_thinking"):
        load_documents(folder, TOKENIZER, enable_thinking=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.shuffle(seed=1).select(range(3)),
        lambda data: datasets.concatenate_datasets([data, data]),
    ],
)
def test_dt3_another_vocabulary_is_refused_whatever_was_done_to_the_data(folder, change):
    documents = change(open_documents(folder))
    check_documents_fit(documents, byte_tokenizer())
    with refused(ValueError, "260", "261", "tokenizer"):
        check_documents_fit(documents, with_other_vocabulary())


def test_dt3_another_template_is_refused_or_warned_of(folder, caplog):
    documents, other = open_documents(folder), byte_tokenizer(CHATML_TEMPLATE + " ")
    with refused(ValueError, "template", "allow_other_template"):
        check_documents_fit(documents, other)
    check_documents_fit(documents, other, allow_other_template=True)
    assert "another chat template" in caplog.text
    # What no manifest belongs to, and what nothing can be compared with, is passed over.
    check_documents_fit(datasets.Dataset.from_dict({"input_ids": [[1]]}), other)
    check_documents_fit(documents, None)


def test_dt3_the_trainer_takes_documents_and_checks_them(folder):
    torch.manual_seed(0)
    target = dense_target()
    args = DFlashTrainingArguments(
        str(folder.parent / "run"), max_steps=1, row_length=256, num_anchors=4, report_to="none", use_cpu=True
    )

    def trainer(tokenizer, packed=False):
        documents = load_documents(folder, TOKENIZER)
        documents = PackedDataset(documents, 256) if packed else documents
        drafter = tiny_drafter(target, mask_token_id=265)
        return DFlashTrainer(drafter, target, args, train_dataset=documents, processing_class=tokenizer)

    trainer(TOKENIZER).train()
    for packed in (False, True):
        with refused(ValueError, "tokenizer"):
            trainer(with_other_vocabulary(), packed)
    with refused(ValueError, "chat template"):
        trainer(byte_tokenizer(CHATML_TEMPLATE + " "))
    args.allow_other_template = True
    trainer(byte_tokenizer(CHATML_TEMPLATE + " "))


# --- Damage


@pytest.mark.parametrize("name", ["manifest.json", "train/a.jsonl.parquet", "eval/b.jsonl.parquet"])
@pytest.mark.parametrize("damage", ["removed", "empty", "cut", "foreign"])
def test_what_is_damaged_is_named_and_made_again(folder, name, damage):
    before, path = tree(folder), folder / name
    if damage == "removed":
        path.unlink()
    elif damage == "foreign" and name.endswith("parquet"):
        pq.write_table(pa.table({"input_ids": [[1]], "supervised_spans": [[[0, 1]]]}), path)
    else:
        path.write_bytes(path.read_bytes()[: 100 * (damage == "cut")] + b"[]" * (damage == "foreign"))
    with refused(ValueError, path, "again"):
        load_documents(folder, TOKENIZER, "eval" if "eval" in name else "train")
    tokenize_again(folder)
    assert tree(folder) == before


def test_a_shard_of_another_file_or_damaged_within_is_named(folder):
    path = folder / "train" / "b.jsonl.parquet"
    content = bytearray(path.read_bytes())
    path.write_bytes((folder / "train" / "a.jsonl.parquet").read_bytes())
    with refused(ValueError, path):
        stored_lengths(folder)
    content[200:260] = b"\xff" * 60
    path.write_bytes(content)
    with refused(ValueError, path, "Delete"):
        open_documents(folder)


@pytest.mark.parametrize("content", ["", '{"form', "[]", "{}", '{"format": "dflash_hf documents 99"}'])
def test_a_record_that_cannot_be_read_is_named(folder, content):
    (folder / "settings.json").write_text(content)
    with refused(ValueError, folder / "settings.json"):
        tokenize_again(folder)
    (folder / MANIFEST_NAME).write_text(content)
    with refused(ValueError, folder / MANIFEST_NAME, "99" if "99" in content else "None"):
        read_manifest(folder)


def test_documents_of_a_run_that_has_not_ended_or_lacks_files_are_told_of(folder, monkeypatch, caplog):
    (folder.parent / "in" / "c.jsonl.gz").write_bytes(b"broken")
    with monkeypatch.context() as patch:
        patch.setattr("dflash_hf.tokenizing.work_on", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tokenize_again(folder)
    with refused(ValueError, folder / MANIFEST_NAME, "again"):
        load_documents(folder, TOKENIZER)
    tokenize_files(folder.parent / "in", folder, TOKENIZER, OPTIONS, disable_tqdm=True, retries=0)
    load_documents(folder, TOKENIZER)
    assert "1 of its source files" in caplog.text


def test_a_disk_that_is_full_from_the_start_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "a.jsonl").write_bytes(json_lines([chat("a", "b")]))
    monkeypatch.setattr(Path, "write_bytes", full)
    with refused(OutputError, tmp_path / "out", "No space left"):
        tokenize_files(tmp_path / "a.jsonl", tmp_path / "out", TOKENIZER, disable_tqdm=True)
    assert not list((tmp_path / "out").iterdir())


def test_odd_names_of_files_and_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = ["a b#1?", "[z]*", "x::y", "é%20", "new\nline", "{a,b}", "d/[1]/a=b", "\udcff"]
    for number, name in enumerate(names):
        path = tmp_path / "in#[1]" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json_lines([chat(f"q{number}", f"a{number}")]))
    (tmp_path / "in#[1]" / "link.jsonl").symlink_to(path)
    # A folder that the output's name would match as a pattern.
    (tmp_path / "out 1" / "train").mkdir(parents=True)
    for output in ("out [1]", "out ?", "out 1"):
        tokenize_files(tmp_path / "in#[1]", tmp_path / output, TOKENIZER, disable_tqdm=True)
        texts = supervised_texts(open_documents(tmp_path / output), TOKENIZER)
        assert sorted(texts) == sorted(f"a{number}<|im_end|>" for number in (*range(len(names)), len(names) - 1))
    before = tree(tmp_path / "out 1")
    tokenize_files(tmp_path / "in#[1]/", tmp_path / "out 1", TOKENIZER, disable_tqdm=True)
    assert tree(tmp_path / "out 1") == before


# --- For a person


def test_answers_of_several_models_are_told_of(tmp_path):
    """A gateway's log holds those of others than the target, which a drafter is not to learn from."""
    rows = [
        {
            "request": {"messages": [{"role": "user", "content": f"{i}?"}]},
            "response": {"choices": [{"message": {"content": "x"}}], "model": "other"},
        }
        for i in range(4)
    ]
    (tmp_path / "log.jsonl").write_bytes(json_lines(rows))
    alike = tokenize_files(tmp_path / "log.jsonl", tmp_path / "alike", TOKENIZER, disable_tqdm=True)
    assert alike["models"] == {"other": 4} and "other" not in format_summary(alike)
    rows[1]["response"]["model"] = "qwen"
    del rows[2]["response"]["model"]
    (tmp_path / "log.jsonl").write_bytes(json_lines(rows))
    mixed = tokenize_files(tmp_path / "log.jsonl", tmp_path / "mixed", TOKENIZER, disable_tqdm=True)
    assert mixed["models"] == {"other": 2, "qwen": 1} and "other 2, qwen 1" in format_summary(mixed)
    # A manifest of an earlier version has no such counts.
    assert format_summary({name: value for name, value in mixed.items() if name != "models"})


def test_examples_lose_their_middle(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([chat("a", "b" * 50)] * 2))
    tokenize_files(tmp_path / "a.jsonl", tmp_path / "out", TOKENIZER, disable_tqdm=True)
    (text,) = marked_examples(tmp_path / "out", TOKENIZER, 1, characters=20)
    assert text.endswith("⟦bbbbbbbbbb [...] <|im_end|>⟧") and "[...]" in text.split("⟦")[0]
