# SPDX-License-Identifier: Apache-2.0
"""Files of completions to a folder of documents: what comes in and out, resuming, bad input, the recipe."""

import gzip
import importlib.util
import json
import random
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from killing import run_and_kill
from tiny import CHATML_TEMPLATE, byte_tokenizer

from dflash_hf.documents import (
    DocumentFolder,
    OutputError,
    format_summary,
    marked_examples,
    open_documents,
    plot_lengths,
)
from dflash_hf.tokenizing import TokenizeOptions, tokenize_conversation, tokenize_files


TOKENIZER = byte_tokenizer()
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def load_recipe(name: str):
    """Import a recipe by its file: its folder is no package."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


recipe = load_recipe("tokenize_completions")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def chat(*contents: str, **extra) -> dict:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **extra}


def lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


def tokenize(
    folder: Path, options: TokenizeOptions | None = None, output: str = "out", num_proc: int = 1, **kwargs
) -> dict:
    kwargs = {"disable_tqdm": True, "num_proc": num_proc, **kwargs}
    return tokenize_files(folder / "in", folder / output, TOKENIZER, options, **kwargs)


def source(folder: Path, **files: bytes) -> None:
    (folder / "in").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / "in" / name.replace("__", ".")).write_bytes(content)


def answers(documents) -> list[str]:
    """The supervised text of each document."""
    return [
        "".join(TOKENIZER.decode(row["input_ids"][start:stop]) for start, stop in row["supervised_spans"])
        for row in documents
    ]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestDocuments:
    def test_every_format_gives_the_same_documents(self, tmp_path):
        rows = [chat("a", f"answer {i}", source="s", language="en") for i in range(5)]
        plain = lines(rows)
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, tmp_path / "d.parquet")
        source(
            tmp_path,
            a__jsonl=plain,
            b__jsonl__gz=gzip.compress(plain[:100]) + gzip.compress(plain[100:]),
            c__jsonl__zst=zstd(plain[:100]) + zstd(plain[100:]),
            d__parquet=(tmp_path / "d.parquet").read_bytes(),
            notes__txt=b"not read",
        )
        manifest = tokenize(tmp_path)
        assert [file["name"] for file in manifest["files"]] == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"]
        documents = open_documents(tmp_path / "out")
        assert answers(documents) == [f"answer {i}<|im_end|>" for i in range(5)] * 4
        assert documents["row"][:] == list(range(5)) * 4
        assert set(documents["source"][:]) == {"s"} and set(documents["language"][:]) == {"en"}
        assert documents[3]["input_ids"] == tokenize_conversation(rows[3], TOKENIZER)[0]["input_ids"]

    def test_dt7_cut_windows_and_marks(self, tmp_path):
        whole = tokenize_conversation(chat("a", "0123456789" * 14), TOKENIZER)[0]
        start = whole["supervised_spans"][0][0]
        rows = [
            chat("a", "0123456789" * 14),
            chat("b" * 200, "c"),
            chat("d", "e", finish_reason="length"),
            chat("f", "", finish_reason="length"),
        ]
        source(tmp_path, a__jsonl=lines(rows))
        manifest = tokenize(tmp_path, TokenizeOptions(max_length=60))
        assert manifest["dropped"] == {"empty answer": 1, "prompt too long": 1}
        cut, short = open_documents(tmp_path / "out")
        assert cut["input_ids"] == whole["input_ids"][:60] and cut["supervised_spans"] == [[start, 60]]
        assert cut["truncated"] and short["truncated"] and answers([short]) == ["e"]
        manifest = tokenize(tmp_path, TokenizeOptions(max_length=60, long_documents="windows"), "windows")
        documents = [row for row in open_documents(tmp_path / "windows") if row["row"] == 0]
        total = len(whole["input_ids"])
        spans = [row["supervised_spans"] for row in documents]
        assert spans == [[[start, 60]], [[60, 120]], [[120, total]]]
        assert all(row["input_ids"] == whole["input_ids"][: row["supervised_spans"][0][1]] for row in documents)
        assert [row["truncated"] for row in documents] == [True, True, False]
        assert manifest["repeated_tokens"] == 60 + 120
        assert "are context that windows repeat" in format_summary(manifest)

    def test_turns_merge_or_only_the_last_counts(self, tmp_path):
        source(tmp_path, a__jsonl=lines([chat("a", "b", "c", "d")]))
        tokenize(tmp_path, output="merged")
        tokenize(tmp_path, TokenizeOptions(merge_turns=False), "apart")
        tokenize(tmp_path, TokenizeOptions(last_turn_only=True), "last")
        found = {name: answers(open_documents(tmp_path / name)) for name in ("merged", "apart", "last")}
        assert found == {
            "merged": ["b<|im_end|>d<|im_end|>"],
            "apart": ["b<|im_end|>", "d<|im_end|>"],
            "last": ["d<|im_end|>"],
        }

    def test_the_evaluation_split_goes_by_prompt_and_is_stable(self, tmp_path):
        rows = [chat(f"question {i}", f"answer {k}") for i in range(200) for k in range(2)]
        source(tmp_path, a__jsonl=lines(rows), b__jsonl=lines([chat("question 7", "another")]))
        manifest = tokenize(tmp_path, TokenizeOptions(eval_fraction=0.25))
        counts = manifest["documents"]
        assert sum(counts.values()) == 401 and 60 < counts["eval"] < 140

        def questions(split, output="out"):
            documents = open_documents(tmp_path / output, split)
            return {TOKENIZER.decode(row["input_ids"][: row["supervised_spans"][0][0]]) for row in documents}

        assert not questions("train") & questions("eval")
        assert manifest["options"]["eval_fraction"] == 0.25
        random.Random(0).shuffle(rows)
        (tmp_path / "in" / "a.jsonl").write_bytes(lines(rows))
        tokenize(tmp_path, TokenizeOptions(eval_fraction=0.25), "again")
        assert questions("eval") == questions("eval", "again")

    def test_recorded_ids_are_used_as_they_are(self, tmp_path):
        source(tmp_path, a__jsonl=lines([chat("a", "text", completion_token_ids=[270, 3, 258])]))
        tokenize(tmp_path)
        assert open_documents(tmp_path / "out")[0]["input_ids"][-3:] == [270, 3, 258]

    def test_chunks_and_processes_do_not_show(self, tmp_path, monkeypatch):
        rows = [chat(f"q{i}", "x" * (i % 50)) for i in range(100)]
        source(tmp_path, a__jsonl=lines(rows), b__jsonl=lines(rows[:30]), c__jsonl=b"")
        tokenize(tmp_path, output="one")
        tokenize(tmp_path, output="two", num_proc=2)
        assert tree(tmp_path / "one") == tree(tmp_path / "two")
        monkeypatch.setattr("dflash_hf.tokenizing.CHUNK_CHARACTERS", 300)
        tokenize(tmp_path, output="small")
        small, one = open_documents(tmp_path / "small"), open_documents(tmp_path / "one")
        assert small["input_ids"][:] == one["input_ids"][:] and len(one) == 130
        assert pq.ParquetFile(tmp_path / "small/train/a.jsonl.parquet").num_row_groups > 5


class TestBadInput:
    ROWS = (
        (b'{"messages": [', "not JSON"),
        (b'["messages"]', "not JSON"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (lines([chat("a", "\ud83d")]).strip(), "broken Unicode"),
        (b"{}", "no messages"),
        (lines([{"messages": [{"content": "a"}, {"role": "assistant", "content": "b"}]}]).strip(), "no role"),
        (lines([{"messages": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]}]).strip(),
         "unknown role"),
        (lines([{"messages": [{"role": "assistant", "content": "b"}]}]).strip(), "answer first"),
        (lines([chat("a")]).strip(), "no answer"),
        (lines([chat(" ", "b")]).strip(), "empty prompt"),
        (lines([{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                              {"role": "assistant", "content": "b"}]}]).strip(), "image, audio or video"),
        (lines([{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
                              {"role": "assistant", "content": "b"}]}]).strip(), "image, audio or video"),
    )  # fmt: skip

    def test_each_is_counted_by_its_reason_and_named_and_nothing_else_is_lost(self, tmp_path):
        good = lines([chat("a", "b")])
        content = good + b"\n".join(row for row, _ in self.ROWS) + b"\n" + good
        source(tmp_path, a__jsonl=content, b__jsonl=good)
        manifest = tokenize(tmp_path)
        expected: dict[str, int] = {}
        for _, reason in self.ROWS:
            expected[reason] = expected.get(reason, 0) + 1
        assert manifest["dropped"] == expected
        assert manifest["rows"] == len(self.ROWS) + 3 and manifest["documents"] == {"train": 3}
        examples = manifest["files"][0]["dropped_examples"]
        for number, (_, reason) in enumerate(self.ROWS, start=2):
            assert any(f"a.jsonl:{number}: " in example for example in examples[reason])
        summary = format_summary(manifest)
        assert "dropped 1: unknown role" in summary and "'asistant'" in summary

    def test_a_template_that_raises_or_breaks_its_prompt_is_counted(self, tmp_path):
        source(tmp_path, a__jsonl=lines([chat("a", "b"), chat("bad", "c"), chat("odd", "d")]))
        template = (
            "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
            "{% if messages[0]['content'] == 'odd' and add_generation_prompt %}odd{% endif %}" + CHATML_TEMPLATE
        )
        manifest = tokenize_files(
            tmp_path / "in", tmp_path / "out", byte_tokenizer(template), TokenizeOptions(), disable_tqdm=True
        )
        assert manifest["dropped"] == {"prompt is no prefix": 1, "template failed": 1}
        assert "no bad words" in format_summary(manifest) and "at character 0" in format_summary(manifest)

    def test_a_template_that_writes_the_date_asks_for_one(self, tmp_path, caplog):
        source(tmp_path, a__jsonl=lines([chat("a", "b")]))
        dated = byte_tokenizer(
            "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + CHATML_TEMPLATE
        )
        tokenize_files(tmp_path / "in", tmp_path / "x", dated, disable_tqdm=True)
        assert "today's date" in caplog.text
        caplog.clear()
        options = TokenizeOptions(template_kwargs={"date_string": "26 Jul 2024"})
        tokenize_files(tmp_path / "in", tmp_path / "y", dated, options, disable_tqdm=True)
        assert not caplog.records
        assert TOKENIZER.decode(open_documents(tmp_path / "y")[0]["input_ids"]).startswith("26 Jul 2024<|im_start|>")

    def test_a_tokenizer_without_a_template_and_missing_addresses_are_errors_at_once(self, tmp_path):
        source(tmp_path, a__jsonl=lines([chat("a", "b")]))
        with pytest.raises(ValueError, match="no chat template"):
            tokenize_files(tmp_path / "in", tmp_path / "out", byte_tokenizer(None))
        with pytest.raises(FileNotFoundError, match="nowhere"):
            tokenize_files(tmp_path / "nowhere", tmp_path / "out", TOKENIZER)
        with pytest.raises(ValueError, match="at least 0 and below 1, got 1"):
            TokenizeOptions(eval_fraction=1)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("num_proc", [1, 2])
    def test_a_broken_file_is_named_and_leaves_nothing(self, tmp_path, num_proc):
        whole = gzip.compress(lines(chat("a", str(i) * 300) for i in range(600)))
        source(
            tmp_path,
            a__jsonl__gz=whole[: len(whole) // 2],
            b__jsonl=lines([chat("a", "b")]),
            c__parquet=b"PAR1 not really",
            d__jsonl__zst=zstd(lines(chat("a", str(i)) for i in range(99)))[:-9],
        )
        manifest = tokenize(tmp_path, num_proc=num_proc, retry_wait=0.0)
        assert sorted(manifest["failed"]) == ["a.jsonl.gz", "c.parquet", "d.jsonl.zst"]
        assert "a.jsonl.gz:" in manifest["failed"]["a.jsonl.gz"]
        assert "not a whole gzip file" in manifest["failed"]["a.jsonl.gz"]
        assert "not a whole Parquet file" in manifest["failed"]["c.parquet"]
        assert set(tree(tmp_path / "out")) == {"settings.json", "manifest.json", "train/b.jsonl.parquet"}
        (tmp_path / "in" / "a.jsonl.gz").write_bytes(whole)
        manifest = tokenize(tmp_path, num_proc=num_proc, retries=0)
        assert sorted(manifest["failed"]) == ["c.parquet", "d.jsonl.zst"] and manifest["documents"] == {"train": 601}

    @pytest.mark.parametrize("num_proc", [1, 2])
    def test_a_full_disk_ends_the_run_and_what_is_finished_stays(self, tmp_path, monkeypatch, num_proc):
        source(tmp_path, **{f"{name}__jsonl": lines([chat("a", name)]) for name in "abcd"})
        publish = DocumentFolder.publish

        def full(self, temporary, path):
            if path.endswith("c.jsonl.parquet"):
                raise OSError(28, "No space left on device")
            publish(self, temporary, path)

        monkeypatch.setattr(DocumentFolder, "publish", full)
        with pytest.raises(OutputError, match=r"No space left on device.*the same command again"):
            tokenize(tmp_path, num_proc=num_proc)
        assert "train/a.jsonl.parquet" in tree(tmp_path / "out")
        assert not [name for name in tree(tmp_path / "out") if name.endswith(".tmp") or "manifest" in name]
        monkeypatch.setattr(DocumentFolder, "publish", publish)
        assert tokenize(tmp_path, num_proc=num_proc)["documents"] == {"train": 4}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with eight files and what an undisturbed run makes of them, and how long that takes."""
    folder = tmp_path_factory.mktemp("work")
    generator = random.Random(0)
    for number in range(8):
        rows = [chat(f"q{i}", "word " * generator.randrange(100, 400)) for i in range(150)]
        source(folder, **{f"part{number}__jsonl": lines(rows)})
    start = time.monotonic()
    tokenize(folder, TokenizeOptions(eval_fraction=0.2), "whole", num_proc=2)
    return folder, tree(folder / "whole"), time.monotonic() - start


class TestResume:
    def test_a_file_is_finished_only_when_all_its_shards_are_there(self, tmp_path, monkeypatch):
        source(tmp_path, a__jsonl=lines(chat(f"q{i}", "b") for i in range(20)))
        options = TokenizeOptions(eval_fraction=0.5)
        publish, published = DocumentFolder.publish, []

        def full(self, temporary, path):
            if len(published) == 2:
                raise OSError(28, "No space left on device")
            published.append(path)
            publish(self, temporary, path)

        monkeypatch.setattr(DocumentFolder, "publish", full)
        with pytest.raises(OutputError):
            tokenize(tmp_path, options)
        assert set(tree(tmp_path / "out")) == {"settings.json", "eval/a.jsonl.parquet"}
        monkeypatch.setattr(DocumentFolder, "publish", publish)
        assert sum(tokenize(tmp_path, options)["documents"].values()) == 20

    def test_an_output_within_its_own_input_is_refused(self, tmp_path):
        source(tmp_path, a__jsonl=lines([chat("a", "b")]))
        for address in (tmp_path, tmp_path / "*"):
            with pytest.raises(ValueError, match="lies within"):
                tokenize_files(address, tmp_path / "out", TOKENIZER, disable_tqdm=True)

    def test_finished_files_are_not_read_again_and_other_options_are_refused(self, tmp_path, monkeypatch):
        source(tmp_path, **{f"{name}__jsonl": lines([chat("a", name)]) for name in "abc"})
        tokenize(tmp_path)
        before = tree(tmp_path / "out")
        (tmp_path / "out/train/b.jsonl.parquet").unlink()
        (tmp_path / "out/shard-left.tmp").write_bytes(b"from a killed run")
        opened = []
        original = sys.modules["dflash_hf.tokenizing"].read_rows
        monkeypatch.setattr(
            "dflash_hf.tokenizing.read_rows", lambda fs, file: opened.append(file.name) or original(fs, file)
        )
        tokenize(tmp_path)
        assert opened == ["b.jsonl"] and tree(tmp_path / "out") == before
        with pytest.raises(ValueError, match=r"made otherwise \(max_length: None then, 9 now"):
            tokenize(tmp_path, TokenizeOptions(max_length=9))
        with pytest.raises(ValueError, match="vocabulary_hash"):
            other = byte_tokenizer()
            other.add_tokens(["new"])
            tokenize_files(tmp_path / "in", tmp_path / "out", other, disable_tqdm=True)

    def test_a_changed_file_is_made_again(self, tmp_path):
        source(tmp_path, a__jsonl=lines([chat("a", "old")]), b__jsonl=lines([chat("a", "c")]))
        tokenize(tmp_path)
        time.sleep(0.01)
        source(tmp_path, a__jsonl=lines([chat("a", "new")]))
        tokenize(tmp_path)
        assert answers(open_documents(tmp_path / "out")) == ["new<|im_end|>", "c<|im_end|>"]

    def check_killed(self, folder: Path, expected: dict[str, bytes], output: str, is_time) -> None:
        options = TokenizeOptions(eval_fraction=0.2)
        run_and_kill(is_time, tokenize, folder, options, output, 2)
        tokenize(folder, options, output, num_proc=2)
        assert tree(folder / output) == expected

    @pytest.mark.parametrize("num_shards", [0, 3])
    def test_killed_and_started_again_gives_the_same_bytes(self, work, num_shards):
        folder, expected, _ = work
        output = f"killed{num_shards}"

        def is_time():
            found = list((folder / output).rglob("*.parquet" if num_shards else "*.tmp"))
            return len(found) >= max(1, num_shards)

        self.check_killed(folder, expected, output, is_time)

    @pytest.mark.slow
    @pytest.mark.parametrize("moment", range(20))
    def test_killed_at_any_moment(self, work, moment):
        folder, expected, duration = work
        output = folder / f"moment{moment}"
        begun: list[float] = []

        def is_time():
            # The process takes a while to start, so the clock runs from the first thing that it writes.
            if not begun and (output / "settings.json").exists():
                begun.append(time.monotonic())
            return bool(begun) and time.monotonic() - begun[0] > duration * (moment + 0.5) / 20

        self.check_killed(folder, expected, output.name, is_time)


class TestRecipe:
    @pytest.fixture
    def target(self, tmp_path) -> Path:
        TOKENIZER.save_pretrained(tmp_path / "target")
        (tmp_path / "target" / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
        return tmp_path / "target"

    def run(self, folder: Path, target: Path, **kwargs) -> int:
        arguments = {"completions": str(folder / "in"), "target": str(target), "output": str(folder / "out")}
        return recipe.main(recipe.TokenizeArguments(**{**arguments, "num_proc": 1, "retries": 0, **kwargs}))

    def test_a_person_sees_counts_lengths_and_the_mask(self, tmp_path, target, capsys):
        source(tmp_path, a__jsonl=lines([chat("a", "b", "c", "d"), chat("e", "f" * 600)]), b__jsonl=b"{\n")
        plot = tmp_path / "lengths.png"
        assert self.run(tmp_path, target, plot=str(plot), row_length=1024, max_length=1024) == 0
        out, err = capsys.readouterr()
        assert "3 rows of 2 files gave 2 documents (2 train)" in out
        assert "dropped 1: not JSON, such as" in out and "b.jsonl:1" in out
        assert "assistant\n⟦b<|im_end|>⟧\n<|im_start|>user\nc<|im_end|>" in out
        assert "2 documents fill 1 rows of 1,024 tokens to" in out
        assert "512 to     767 tokens ###" in out and plot.stat().st_size > 1000
        assert "2/2 files" in err and "tokens/s" in err
        manifest = json.loads((tmp_path / "out/manifest.json").read_text())
        assert manifest["options"]["eos_token_ids"] == [258, 256]

    def test_the_exit_status_tells(self, tmp_path, target, capsys):
        source(tmp_path, a__jsonl=lines([chat("a", "b")]), b__jsonl__gz=b"broken")
        assert self.run(tmp_path, target) == 1
        out, err = capsys.readouterr()
        assert "FAILED b.jsonl.gz" in out and "1 files could not be read" in err
        assert self.run(tmp_path, target, completions=str(tmp_path / "nowhere"), output=str(tmp_path / "x")) == 2
        assert "error: No such file or folder" in capsys.readouterr().err
        (tmp_path / "in" / "b.jsonl.gz").unlink()
        source(tmp_path, a__jsonl=b"{}\n")
        assert self.run(tmp_path, target, output=str(tmp_path / "y")) == 2
        assert "no document is left" in capsys.readouterr().err

    def test_the_documented_command_line_is_understood(self):
        words = Path(recipe.__file__).read_text().split("python recipes/tokenize_completions.py ")[1].split("\n\n")[0]
        arguments = recipe.parse_config(recipe.TokenizeArguments, words.replace("\\", "").split())[0]
        assert arguments.completions.startswith("s3://") and arguments.max_length == 4096


def test_examples_and_plot_from_python(tmp_path):
    source(tmp_path, a__jsonl=lines([chat("a", "b" * 50)]))
    manifest = tokenize(tmp_path)
    (text,) = marked_examples(tmp_path / "out", TOKENIZER, characters=20)
    assert text.endswith("⟦bbbbbbbbbb [...] <|im_end|>⟧") and "[...]" in text.split("⟦")[0]
    plot_lengths(manifest, tmp_path / "lengths.png")
    assert np.sum(list(manifest["lengths"].values())) == 1
