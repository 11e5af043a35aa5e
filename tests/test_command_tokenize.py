# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf tokenize`: what a person sees, and the exit status."""

import json
from pathlib import Path

import pytest
from tiny import byte_tokenizer, chat, json_lines

from dflash_hf import command_tokenize


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command over the folder `in`, with further words."""
    byte_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> int:
        given = dict(zip(words[::2], words[1::2], strict=True))
        defaults = {"--completions": "in", "--target": "target", "--output": "out", "--num_proc": "1"}
        return command_tokenize.main([word for option in (defaults | given).items() for word in option])

    return command


def write(**files: bytes) -> None:
    for name, content in files.items():
        Path("in", name.replace("__", ".")).write_bytes(content)


def test_a_person_sees_counts_lengths_and_the_mask(run, capsys):
    write(a__jsonl=json_lines([chat("a", "b", "c", "d"), chat("e", "f" * 600)]), b__jsonl=b"{\n")
    assert run("--plot", "lengths.png", "--row_length", "1024", "--max_length", "1024", "--source", "mine") == 0
    out, err = capsys.readouterr()
    for words in ("3 rows of 2 files gave 2 documents (2 train)", "dropped 1: not JSON", "b.jsonl:1"):
        assert words in out
    assert "assistant\n⟦b<|im_end|>⟧\n<|im_start|>user\nc<|im_end|>" in out
    assert "2 documents fill 1 rows of 1,024 tokens to" in out
    assert "512 to     767 tokens ###" in out and Path("lengths.png").stat().st_size > 1000
    assert "2/2 files" in err and "tokens/s" in err
    options = json.loads(Path("out/manifest.json").read_text())["options"]
    assert options["eos_token_ids"] == [258, 256] and options["source"] == "mine"


def test_the_exit_status_tells(run, capsys):
    write(a__jsonl=json_lines([chat("a", "b")]), b__jsonl__gz=b"broken")
    assert run("--retries", "0") == 1
    out, err = capsys.readouterr()
    assert "FAILED b.jsonl.gz" in out and "1 files" in err
    assert run("--completions", "nowhere", "--output", "x") == 2 and "nowhere" in capsys.readouterr().err
    for words in (["--row_length", "0"], ["--max_lenth", "5"]):
        with pytest.raises(SystemExit) as stopped:
            run(*words)
        assert stopped.value.code == 2 and words[0][2:7] in capsys.readouterr().err
    Path("in", "b.jsonl.gz").unlink()
    write(a__jsonl=b"{}\n")
    assert run("--output", "y") == 2
    assert "no document" in capsys.readouterr().err


def test_documents_longer_than_a_row_are_counted_and_end_no_finished_run(run, capsys, monkeypatch):
    monkeypatch.setattr("dflash_hf.documents.load_dataset", None)  # The report copies nothing.
    write(a__jsonl=json_lines([chat("a", "b"), chat("a", "b" * 300)]))
    assert run("--row_length", "100") == 0
    out = capsys.readouterr().out
    assert "1 documents fill 1 rows of 100 tokens" in out and "1 documents, of up to" in out
    assert "dflash-hf train --completions out" in out


@pytest.mark.parametrize(("fraction", "split"), [("0.001", "eval"), ("0.999", "train")])
def test_too_few_conversations_for_both_splits_are_told_of(run, capsys, fraction, split):
    write(a__jsonl=json_lines([chat("why?", "the answer")]))
    run("--eval_fraction", fraction)
    assert f"eval_fraction={fraction} leaves no document of the split {split}" in capsys.readouterr().out


def test_storage_options_and_credentials_stay_apart(run, capsys):
    write(a__jsonl=json_lines([chat("a", "b")]))
    assert run("--storage_options", '{"auto_mkdir": true}', "--output_storage_options", '{"auto_mkdir": false}') == 0
    for option in ("--completions", "--output"):
        assert run(option, "s3://key:s3cretS3CRET@bucket/x") == 2
        out, err = capsys.readouterr()
        assert "credentials" in err and "s3cretS3CRET" not in out + err


def test_the_documented_command_line_is_understood(monkeypatch):
    given = []
    monkeypatch.setattr(command_tokenize.AutoTokenizer, "from_pretrained", given.append)
    monkeypatch.setattr(command_tokenize, "read_eos_token_ids", lambda target: [1])
    monkeypatch.setattr(command_tokenize, "tokenize_files", lambda *args, **kwargs: 1 / 0)
    words = command_tokenize.__doc__.split("dflash-hf tokenize ")[1].split("\n\n")[0].replace("\\", "").split()
    with pytest.raises(ZeroDivisionError):
        command_tokenize.main(words)
    assert given == ["Qwen/Qwen3.6-27B"]
