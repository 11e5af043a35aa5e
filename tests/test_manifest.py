# SPDX-License-Identifier: Apache-2.0
"""Documents of a manifest: opened as they were written, and refused where they mean something else (case DT3)."""

import json
import logging

import datasets
import pytest
import torch
from tiny import CHATML_TEMPLATE, byte_tokenizer, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.documents import MANIFEST_NAME, check_documents_fit, open_documents, read_manifest
from dflash_hf.packing import PackedDataset
from dflash_hf.tokenizing import TokenizeOptions, load_documents, tokenize_completions, tokenize_files


TOKENIZER = byte_tokenizer()
ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"answer {i}" * 4}]}
    for i in range(12)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenize_files(tmp_path / "in", tmp_path / "out", TOKENIZER, TokenizeOptions(eval_fraction=0.3), disable_tqdm=True)
    return tmp_path


def with_other_vocabulary():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<other>"])
    return tokenizer


def test_documents_or_completions_by_one_call(folder):
    train, held_out = (load_documents(folder / "out", TOKENIZER, split) for split in ("train", "eval"))
    whole = load_documents(folder / "in", TOKENIZER)
    assert whole["input_ids"][:] == tokenize_completions(ROWS, TOKENIZER, disable_tqdm=True)["input_ids"][:]
    assert sorted([*train["input_ids"], *held_out["input_ids"]]) == sorted(whole["input_ids"])
    # Memory mapped: the columns lie in files and not in memory.
    assert train.cache_files and held_out.cache_files
    with pytest.raises(ValueError, match="holds no split 'eval'"):
        load_documents(folder / "in", TOKENIZER, "eval")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_documents(folder / "nowhere", TOKENIZER)
    with pytest.raises(FileNotFoundError, match="has no manifest"):
        open_documents(folder / "in")
    with pytest.raises(ValueError, match=r"no document of the split 'test'"):
        open_documents(folder / "out", "test")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.shuffle(seed=1).select(range(3)),
        lambda data: data.train_test_split(test_size=2, seed=0)["train"],
        lambda data: datasets.concatenate_datasets([data, data]),
    ],
)
def test_dt3_another_vocabulary_is_refused_whatever_was_done_to_the_data(folder, change):
    documents = change(open_documents(folder / "out"))
    check_documents_fit(documents, byte_tokenizer())
    with pytest.raises(ValueError, match=r"tokenizer of 260 tokens, and the target's has 261.*own tokenizer"):
        check_documents_fit(documents, with_other_vocabulary())


def test_dt3_another_template_is_refused_or_warned_of(folder, caplog):
    documents = open_documents(folder / "out")
    other = byte_tokenizer(CHATML_TEMPLATE + " ")
    with pytest.raises(ValueError, match=r"another chat template.*allow_other_template=True"):
        check_documents_fit(documents, other)
    with caplog.at_level(logging.WARNING):
        check_documents_fit(documents, other, allow_other_template=True)
    assert "another chat template" in caplog.text
    # What no manifest belongs to, and what nothing can be compared with, is passed over.
    check_documents_fit(datasets.Dataset.from_dict({"input_ids": [[1]]}), other)
    check_documents_fit([{"input_ids": [1]}], other)
    check_documents_fit(documents, None)


def test_an_incomplete_or_foreign_manifest_is_named(folder, caplog):
    path = folder / "out" / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "complete": False, "failed": {"b.jsonl": "broken"}}))
    open_documents(folder / "out")
    assert "1 of its source files could not be read" in caplog.text
    path.write_text(json.dumps({**manifest, "format": "dflash_hf documents 99"}))
    with pytest.raises(ValueError, match="documents 99"):
        read_manifest(folder / "out")


def test_dt3_the_trainer_takes_documents_and_checks_them(folder):
    torch.manual_seed(0)
    target = dense_target()
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=1, block_size=4, num_taps=1, mask_token_id=265
    )
    args = DFlashTrainingArguments(
        output_dir=str(folder / "drafter"), max_steps=1, row_length=256, num_anchors=4, report_to="none", use_cpu=True
    )

    def trainer(tokenizer, args=args, packed=False):
        documents = load_documents(folder / "out", TOKENIZER)
        documents = PackedDataset(documents, 256) if packed else documents
        return DFlashTrainer(
            DFlashDraftModel(config), target, args, train_dataset=documents, processing_class=tokenizer
        )

    trainer(TOKENIZER).train()
    with pytest.raises(ValueError, match="own tokenizer"):
        trainer(with_other_vocabulary())
    with pytest.raises(ValueError, match="own tokenizer"):
        trainer(with_other_vocabulary(), packed=True)
    with pytest.raises(ValueError, match="another chat template"):
        trainer(byte_tokenizer(CHATML_TEMPLATE + " "))
    args.allow_other_template = True
    trainer(byte_tokenizer(CHATML_TEMPLATE + " "))
