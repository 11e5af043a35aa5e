# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811 (fixtures of other files)
"""The recipe that measures drafters, given damaged models, odd prompts, full disks and impatient schedulers."""

import importlib.util
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_evaluate_acceptance import RECIPE, folders, prompt_file, run
from test_serving import start

from dflash_hf import serving as server_client
from dflash_hf.acceptance import plot_label
from dflash_hf.prompts import EvaluationPrompt, prompt_token_ids, read_prompts
from dflash_hf.serving import request_body


torch.set_num_threads(1)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def words(folders, prompt_file):
    """Makes the words of a quick run with some drafters."""

    def make(*drafters, **given):
        options = {"target": folders / "target", "prompts": prompt_file, "max_new_tokens": 6, "device": "cpu"} | given
        named = [word for name, value in options.items() for word in (f"--{name}", value)]
        return ["--drafters", *(folders / drafter for drafter in drafters), *named]

    return make


def module():
    return sys.modules["evaluate_acceptance"]


def test_a_damaged_drafter_shows_before_another_is_measured(run, words, folders, tmp_path, monkeypatch):
    shutil.copytree(folders / "first", tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["norm.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(module(), "plain_answers", lambda *args, **kwargs: pytest.fail("measured"))
    with pytest.raises(SystemExit, match=r"error: With .*/nan: The drafter's logits hold NaN"):
        run(*words("first", tmp_path / "nan"))
    content = (tmp_path / "nan" / "model.safetensors").read_bytes()
    (tmp_path / "nan" / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(SystemExit, match=r"/nan/model\.safetensors is not a readable safetensors file"):
        run(*words("first", tmp_path / "nan"))


def test_an_output_folder_that_cannot_be_written_is_refused_at_once(run, words, tmp_path, monkeypatch):
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr(module(), "find_prompts", lambda *args: pytest.fail("read"))
    with pytest.raises(SystemExit, match="Nothing could be written into output_dir="):
        run(*words("first"))


def test_a_disk_that_is_full_at_the_end_takes_no_figure_along(run, words, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module(), "replace_file", full)
    monkeypatch.setattr(module(), "WRITE_EVERY", 0.0)
    with pytest.raises(SystemExit, match=r"the results could not be written to .*No space left"):
        run(*words("first", "second"))
    printed = capsys.readouterr()
    assert "| drafter | acceptance length |" in printed.out and printed.out.count("3 of 3, 0 ties, 0 differ") == 2
    # After each of three prompts by two drafters, and after each walk; neither walk is left out.
    assert printed.err.count("What is measured so far could not be written") == 8
    assert "did not finish" not in printed.out


def test_a_terminal_that_cannot_show_a_name_takes_no_file_along(run, words, monkeypatch, tmp_path):
    prompts = tmp_path / "grüße.jsonl"
    prompts.write_text('{"prompt": "a"}')
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(UnicodeEncodeError):
        run(*words("first", prompts=prompts))
    assert json.loads((tmp_path / "results" / "results.json").read_text())["finished"]
    assert "| grüße | 1 |" in (tmp_path / "results" / "results.md").read_text()


@pytest.mark.parametrize(
    ("ids", "message"), [([], r"Prompt 2 has the shape \[0\]"), ([999], "Prompt 2 holds the ids 999")]
)
def test_prompts_that_are_none_show_before_anything_is_decoded(run, words, monkeypatch, ids, message):
    """A chat template may write nothing, and a tokenizer may be another target's."""
    monkeypatch.setattr(module(), "prompt_token_ids", lambda *args: [[5], [6], ids])
    monkeypatch.setattr(module(), "measure_acceptance", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(SystemExit, match=message):
        run(*words("first"))


def test_a_drafter_that_fails_amid_the_prompts_is_named(run, words, folders, monkeypatch, tmp_path):
    loaded, load, keep = {}, module().load_drafter, module().Results.keep

    def load_and_hold(name, target):
        loaded[name] = load(name, target)
        return loaded[name]

    def keep_and_damage(results, name, report):
        loaded[str(folders / "second")].norm.weight.data.fill_(float("nan"))
        return keep(results, name, report)

    monkeypatch.setattr(module(), "load_drafter", load_and_hold)
    monkeypatch.setattr(module().Results, "keep", keep_and_damage)
    with pytest.raises(FloatingPointError, match=r"With .*/second: The drafter's logits hold NaN"):
        run(*words("first", "second"))
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert list(results["drafters"]) == [str(folders / "first")] and not results["finished"]


def test_results_of_several_drafters_become_a_card(run, words, folders, tmp_path, monkeypatch, capsys):
    run(*words("first", "second"))
    spec = importlib.util.spec_from_file_location("publish", RECIPE.with_name("publish.py"))
    publish = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "publish", publish)
    spec.loader.exec_module(publish)
    asked = ["--drafter", folders / "second", "--repo_id", "a/b", "--base_model", "x/y", "--license", "mit"]
    asked += ["--results", tmp_path / "results" / "results.json", "--dry_run", "true"]
    monkeypatch.setattr(sys, "argv", ["publish.py", *map(str, asked), "--results_drafter", str(folders / "second")])
    publish.main()
    card = capsys.readouterr().out
    assert "| all | 3 | 1.00 | 1.00 to 1.00 |" in card and "| chat | 2 |" in card


def test_a_kill_loses_a_minute_and_not_a_night(run, words, monkeypatch, tmp_path):
    seen, original = [], module().Results.keep

    def keep_and_look(*args):
        report = original(*args)
        drafters = json.loads((tmp_path / "results" / "results.json").read_text())["drafters"]
        seen.append([drafter["num_prompts"] for drafter in drafters.values()])
        return report

    monkeypatch.setattr(module().Results, "keep", keep_and_look)
    monkeypatch.setattr(module(), "WRITE_EVERY", 0.0)
    run(*words("first", "second"))
    assert seen == [[1], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]


def test_the_second_of_two_signals_does_not_end_the_writing(run):
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, module().end_in_order)
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_any_name_can_be_plotted(run, words, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "_own", "a$x^$b":
        shutil.copytree(folders / "first", name)
    results, _, _ = run(*words(Path("_own").absolute(), Path("a$x^$b").absolute()))
    assert len(results["drafters"]) == 2
    assert plot_label("_own") == " _own" and plot_label("a$b") == r"a\$b"


def test_prompts_are_read_as_training_data_is(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_calls": None},
        {"role": "assistant", "content": "4"},
    ]
    row = {"messages": messages, "tools": json.dumps(TOOLS), "chat_template_kwargs": {"enable_thinking": False}}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.messages[0] == {"role": "user", "content": "2+2"} and len(prompt.messages) == 3
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert prompt.tools == TOOLS and prompt.template_kwargs == {"enable_thinking": False}
    # A server takes arguments as text; what the prompt says of thinking goes before what all are asked with.
    body = request_body(prompt, {"chat_template_kwargs": {"enable_thinking": True, "x": 1}})
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert body["tools"] == TOOLS and body["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_tools_and_template_arguments_reach_the_template():
    tokenizer = tiny.byte_tokenizer("{{ enable_thinking }}{{ tools | tojson }}{{ messages[0].content }}")
    prompt = EvaluationPrompt([{"role": "user", "content": "Hi"}], tools=TOOLS, template_kwargs={"enable_thinking": 7})
    (ids,) = prompt_token_ids([prompt], tokenizer, enable_thinking=False)
    assert tokenizer.decode(ids) == f"7{json.dumps(TOOLS)}Hi"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no system') }}", r"fails on prompt 2 \(b\): TemplateError: no system.*begins 'there'"),
        ("{{ messages[0].content + 1 }}", r"fails on prompt 1 \(a\): TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"fails on prompt 1 \(a\): RecursionError"),
    ],
)
def test_a_template_that_fails_names_the_prompt(template, message):
    if template and "raise" in template:
        template = "{% if messages[0].content == 'there' %}" + template + "{% endif %}x"
    prompts = [
        EvaluationPrompt([{"role": "user", "content": text}], name) for text, name in (("hi", "a"), ("there", "b"))
    ]
    with pytest.raises(ValueError, match=message):
        prompt_token_ids(prompts, tiny.byte_tokenizer(template))


def test_a_servers_groups_are_written_as_they_come(run, start, prompt_file, monkeypatch, tmp_path):
    monkeypatch.setattr(server_client.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(module(), "WRITE_EVERY", 0.0)
    engine, url = start("vllm")
    seen, answer = [], engine.answer

    def look(body):
        path = tmp_path / "results" / "results.json"
        seen.append(json.loads(path.read_text())["servers"][url]["num_prompts"] if path.exists() else 0)
        return answer(body)

    engine.answer = look
    run("--server", url, "--prompts", prompt_file)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("fault", ["weight", "head", "half", "index"])
def test_a_damaged_target_is_no_target(run, words, folders, tmp_path, fault):
    damaged = tmp_path / "damaged"
    shutil.copytree(folders / "target", damaged)
    weights = damaged / "model.safetensors"
    if fault in ("weight", "head"):
        name = {"weight": "model.layers.1.mlp.up_proj.weight", "head": "lm_head.weight"}[fault]
        save_file({k: v for k, v in load_file(weights).items() if k != name}, weights, metadata={"format": "pt"})
        message = rf"has no {name} \(1 of its weights\), which would be random"
    elif fault == "half":
        os.truncate(weights, 5000)
        message = "a file of it is damaged"
    else:
        weights.rename(damaged / "model-00001-of-00001.safetensors")
        (damaged / "model.safetensors.index.json").write_text('{"weight_map": {')
        message = "a file of it is damaged"
    with pytest.raises(SystemExit, match=message):
        run(*words("first", target=damaged))
