# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf evaluate`: what it asks, decodes, writes, keeps and refuses."""

import io
import json
import os
import shutil
import signal
import sys

import pytest
import tiny
import torch
from engines import start_engine
from oracle import drafter_for
from safetensors.torch import load_file, save_file
from tiny import refused

import dflash_hf
from dflash_hf import acceptance, command_evaluate, generation, serving
from dflash_hf.command_evaluate import EvaluationArguments, Results, main
from dflash_hf.model_card import read_results, write_facts


torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and two drafters for it, saved, and one that does not fit."""
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
    path.write_bytes(tiny.json_lines(rows))
    return path


@pytest.fixture
def run(capsys, tmp_path):
    """Runs the command in this process; gives its results, its table and what it printed."""

    def call(*words):
        output = tmp_path / "results"
        main([*map(str, words), "--output_dir", str(output)])
        assert (output / "acceptance.png").stat().st_size > 5000
        return written(tmp_path), (output / "results.md").read_text(), capsys.readouterr().out

    return call


@pytest.fixture
def words(folders, prompt_file):
    """Makes the words of a quick run with some drafters."""

    def make(*drafters, **given):
        options = {"target": folders / "target", "prompts": prompt_file, "max_new_tokens": 6, "device": "cpu"} | given
        named = [word for name, value in options.items() for word in (f"--{name}", *str(value).split())]
        return ["--drafters", *(folders / drafter for drafter in drafters), *named]

    return make


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(serving.time, "sleep", lambda seconds: None)
    with start_engine() as start:
        yield start


def written(folder):
    return json.loads((folder / "results" / "results.json").read_text())


# --- what is measured ---


@pytest.mark.parametrize("batch_size", [1, 2])
def test_several_drafters_side_by_side(run, words, folders, batch_size):
    given = {"max_new_tokens": 12, "dtype": "float32", "batch_size": batch_size}
    results, table, printed = run(*words("first", "second", **given))
    assert results["definition"] in table and f"{'one' if batch_size == 1 else 2} sequence" in table
    assert [str(folders / name) for name in ("first", "second")] == list(results["drafters"])
    for name, report in results["drafters"].items():
        assert report["lossless"] is True and (report["num_prompts"], report["batch_size"]) == (3, batch_size)
        assert results["walked"][name] == pytest.approx(report["acceptance_length"])
        assert list(report["by_source"]) == ["chat", "maths"] and list(report["by_language"]) == ["en", "de"]
        assert report["speed_up"] == pytest.approx(report["tokens_per_second"] / report["plain_tokens_per_second"])
        low, high = report["speed_up_interval"]
        assert 0 < low <= report["speed_up"] * 1.001 and report["speed_up"] <= high * 1.001
        assert sum(report["committed_histogram"]) == report["forwards"] and report["by_position"][0]["position"] == 0
        assert f"| {name} | {report['acceptance_length']:.2f} |" in table
    assert "3 of 3" in table and "| chat | 2 |" in table and "| maths | 1 |" in table and "| de | 1 |" in table
    settings = results["settings"]
    assert settings["versions"]["torch"] == torch.__version__
    assert settings["versions"]["dflash_hf"] == dflash_hf.__version__
    # A speed-up says nothing without it.
    assert (settings["device"], settings["target_dtype"]) == ("cpu", "torch.float32") and "CPU" in settings["hardware"]
    assert table.split("\nSettings:")[0] in printed + "\n"
    # They fill a card.
    rows = read_results(results, str(folders / "second")).rows
    assert [row.prompts for row in rows] == ["chat", "maths", "all"]
    with refused(ValueError, folders / "first"):
        read_results(results)


def test_the_number_of_drafts_is_chosen_by_what_rounds_cost(run, words, folders, tmp_path):
    drafter = str(folders / "first")
    results, table, _ = run(*words("first", draft_lengths="1 2 9", batch_sizes="1 2", num_draft_tokens=2))
    told = results["draft_lengths"][drafter]
    # Longer blocks than the drafter's are left out.
    assert list(told["acceptance_lengths"]) == ["1", "2"] and results["drafters"][drafter]["block_size"] == 3
    assert told["acceptance_lengths"]["2"] == pytest.approx(results["drafters"][drafter]["acceptance_length"])
    assert [(cost["batch_size"], cost["num_draft_tokens"]) for cost in told["costs"]] == [
        (size, count) for size in (1, 2) for count in (0, 1, 2)
    ]
    assert all(cost["target_seconds"] > 0 for cost in told["costs"])
    assert (tmp_path / "results" / "draft_lengths.png").stat().st_size > 5000
    # What was measured elsewhere is taken in its place.
    costs = [{"batch_size": 1, "num_draft_tokens": k, "target_seconds": [1.0, 0.1, 0.1][k]} for k in range(3)]
    (tmp_path / "costs.json").write_text(json.dumps({"costs": costs}))
    results, table, _ = run(*words("first", draft_lengths="1 2", costs=tmp_path / "costs.json"))
    assert results["draft_lengths"][drafter]["tokens_per_second"]["1"]["0"] == 1.0 and "--speculative-config" in table


def test_a_machine_that_slows_down_changes_no_speed_up(run, words, monkeypatch):
    """Each prompt is decoded in all ways before the next one, so that a drift of the machine falls on all alike."""
    order, plain, decode = [], acceptance._plain_batch, acceptance._decode_batch
    monkeypatch.setattr(acceptance, "_plain_batch", lambda *args: order.append("plain") or plain(*args))
    monkeypatch.setattr(acceptance, "_decode_batch", lambda *args: order.append("drafter") or decode(*args))
    results, *_ = run(*words("first", "second", check_walk="false"))
    # After the warm-ups.
    assert order[3:] == ["plain", "drafter", "drafter"] * 3 and results["walked"] == {}


def test_a_target_is_quantised_as_it_is_loaded(run, words, monkeypatch):
    """By quanto on a CPU; the answers are then its own."""
    quantisation = {"quantization_config": {"quant_method": "quanto", "weights": "int8"}}
    targets, load = [], command_evaluate.load_target
    monkeypatch.setattr(command_evaluate, "load_target", lambda *args: targets.append(load(*args)) or targets[-1])
    given = ["--target_model_init_kwargs", json.dumps(quantisation)]
    results, _, _ = run(*words("first", dtype="float32", num_prompts=1), *given)
    assert any(type(module).__name__ == "QLinear" for module in targets[0][0].modules())
    assert next(iter(results["drafters"].values()))["lossless"] is True
    assert results["settings"]["target_model_init_kwargs"] == quantisation


@pytest.fixture
def modes(monkeypatch) -> list:
    """The values of `enable_thinking` that prompts are written out with."""
    seen, encode = [], command_evaluate.prompt_token_ids
    monkeypatch.setattr(command_evaluate, "prompt_token_ids", lambda *args: seen.append(args[2]) or encode(*args))
    return seen


def test_n11_a_drafter_is_measured_in_the_mode_that_it_was_trained_in(run, words, folders, tmp_path, modes, caplog):
    for name, facts in (
        ("off", {"recipe": {"enable_thinking": False}}),
        ("on", {"recipe": {"enable_thinking": False}, "data": {"manifest": {"thinking": True}}}),
        ("inferred", {"data": {"manifest": {"thinking": "inferred"}}}),
    ):
        shutil.copytree(folders / "first", tmp_path / name)
        write_facts({"format": 1, **facts}, tmp_path / name)
    # Drafters and what is given; the mode, and the drafters that a warning is about.
    sampled = {"temperature": 0.9, "top_k": 50, "seed": 3, "enable_thinking": "true"}
    for names, given, mode, warned in (
        (["off"], {}, False, ["mode"]),
        (["inferred"], {}, None, []),
        (["off"], sampled, True, ["off"]),
        (["off", "on"], {}, None, ["off", "on"]),
    ):
        caplog.clear()
        results, table, _ = run(*words(*(tmp_path / name for name in names), num_prompts=1, **given))
        assert modes.pop() is mode and all(name in caplog.text for name in warned)
        report = next(iter(results["drafters"].values()))
        assert report["lossless"] is (None if given else True) and ("not compared" in table) == bool(given)
        # The walk agrees with sampled answers too.
        assert next(iter(results["walked"].values())) == report["acceptance_length"] and report["num_prompts"] == 1


def test_a_target_whose_caches_cannot_be_rolled_back_is_measured_without(run, words, monkeypatch):
    monkeypatch.setattr(generation, "LinearAttentionLayer", generation.DynamicLayer)
    with refused(SystemExit, "Layer 0", "use_cache=False"):
        run(*words("first", num_prompts=1))
    results, _, _ = run(*words("first", num_prompts=1, use_cache="false"))
    assert next(iter(results["drafters"].values()))["lossless"] is True and results["finished"]


# --- servers ---


def test_n12_a_server_is_reported_alike(run, start, prompt_file, monkeypatch):
    figures, make = [], acceptance.new_figure
    monkeypatch.setattr(acceptance, "new_figure", lambda *args: figures.append(make(*args)) or figures[-1])
    (engine, url), (_, other), (_, plain) = start("vllm"), start("vllm"), start("sglang", plain=True)
    results, table, _ = run(
        "--server", url, other, "--plain_server", plain, "--prompts", prompt_file, "--max_new_tokens", 20,
        "--top_k", 5, "--temperature", 0.7, "--enable_thinking", "true", "--drafters", "org/One-DFlash", "two",
    )  # fmt: skip
    report, _ = results["servers"].values()
    assert report["acceptance_length"] == 3.0 and report["num_prompts"] == 3 and len(report["answers"]) == 3
    groups = [(group["source"], group["language"]) for group in report["groups"]]
    assert groups == [("chat", "en"), ("chat", "de"), ("maths", None)]
    assert results["plain_tokens_per_second"] > 0
    assert f"| {url} | vllm | 3.00 |" in table and "the server's counters" in table
    assert {b["max_tokens"] for b in engine.requests} == {20} and {b["top_k"] for b in engine.requests} == {5}
    assert {b["chat_template_kwargs"]["enable_thinking"] for b in engine.requests} == {True}
    # The answer in the file is not given to the server.
    assert engine.requests[-1]["messages"] == [{"role": "user", "content": "2+2"}]
    # No address is in the plot.
    figure, (axes,) = figures[-1]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["One-DFlash", "two"] and "One-DFlash, two" in figure.get_suptitle()
    assert "Qwen3.6-27B" in figure.get_suptitle() and "3 prompts" in figure.get_suptitle()


def test_what_a_server_answered_before_an_error_is_kept(run, start, prompt_file, tmp_path, monkeypatch):
    monkeypatch.setattr(command_evaluate, "WRITE_EVERY", 0.0)
    engine, url = start("vllm", refuses="2+2")
    seen, answer = [], engine.answer

    def look(body):
        path = tmp_path / "results" / "results.json"
        seen.append(written(tmp_path)["servers"][url]["num_prompts"] if path.exists() else 0)
        return answer(body)

    engine.answer = look
    with refused(SystemExit, 400, "2+2"):
        run("--server", url, "--prompts", prompt_file)
    (report,) = written(tmp_path)["servers"].values()
    assert report["num_prompts"] == 2 and report["acceptance_length"] == 3.0 and not written(tmp_path)["finished"]
    assert seen == [0, 1]


# --- what an interrupt, a full disk and a broken model take along ---


@pytest.mark.parametrize("stop", [KeyboardInterrupt, FloatingPointError])
def test_an_interrupt_loses_nothing_that_was_computed(run, words, monkeypatch, tmp_path, stop):
    """And a kill a minute, here 0 seconds."""
    seen, keep, calls, decode = [], Results.keep, [], acceptance.speculative_generate_batch

    def keep_and_look(*args):
        keep(*args)
        seen.append([drafter["num_prompts"] for drafter in written(tmp_path)["drafters"].values()])
        return args[2]

    def interrupted(*args, **kwargs):
        calls.append(1)
        # Two warm-ups, two prompts by both drafters, and the third by the first.
        if len(calls) == 8:
            raise stop
        return decode(*args, **kwargs)

    monkeypatch.setattr(Results, "keep", keep_and_look)
    monkeypatch.setattr(command_evaluate, "WRITE_EVERY", 0.0)
    monkeypatch.setattr(acceptance, "speculative_generate_batch", interrupted)
    with pytest.raises(SystemExit if stop is FloatingPointError else stop):
        run(*words("first", "second"))
    assert seen == [[1], [1, 1], [2, 1], [2, 2], [3, 2]]
    results = written(tmp_path)
    second = list(results["drafters"].values())[1]
    assert (results["finished"], results["walked"], list(second["by_source"])) == (False, {}, ["chat"])
    assert "did not finish" in (tmp_path / "results" / "results.md").read_text()
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert names == ["acceptance.png", "results.json", "results.md"]


def test_a_disk_that_is_full_at_the_end_takes_no_figure_along(run, words, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command_evaluate, "replace_file", full)
    monkeypatch.setattr(command_evaluate, "WRITE_EVERY", 0.0)
    with refused(SystemExit, "No space left"):
        run(*words("first", num_prompts=1))
    printed = capsys.readouterr()
    assert "| drafter | acceptance length |" in printed.out and "1 of 1" in printed.out
    # After the prompt, and after the walk.
    assert printed.err.count("could not be written") == 2 and "did not finish" not in printed.out


def test_a_terminal_that_cannot_show_a_name_takes_no_file_along(run, words, monkeypatch, tmp_path):
    prompts = tmp_path / "grüße.jsonl"
    prompts.write_text('{"prompt": "a"}')
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with refused(SystemExit, "ascii"):
        run(*words("first", prompts=prompts))
    assert written(tmp_path)["finished"]
    assert "| grüße | 1 |" in (tmp_path / "results" / "results.md").read_text()


def test_the_second_of_two_signals_does_not_end_the_writing(run, words, monkeypatch, tmp_path):
    """A scheduler's signal ends the run in order, and what it sends while the results are written does nothing."""
    before, write = signal.getsignal(signal.SIGTERM), Results.write

    def write_under_a_signal(results):
        signal.raise_signal(signal.SIGTERM)
        write(results)

    monkeypatch.setattr(command_evaluate, "walked_acceptance_length", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(Results, "write", write_under_a_signal)
    with pytest.raises(SystemExit) as ended:
        run(*words("first"))
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) == before
    assert next(iter(written(tmp_path)["drafters"].values()))["num_prompts"] == 3


# --- what is refused ---


HERE = {"target": "t", "drafters": ["d"], "prompts": "p"}
SERVED = {"server": ["http://localhost:1"], "prompts": "p"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"target": "x", "drafters": ["y"]}, ["prompts", "presets"]),
        (SERVED | HERE, ["target", "server"]),
        (SERVED | {"num_prompts": 0}, ["num_prompts", 0]),
        (SERVED | {"temperature": -1}, ["temperature", -1]),
        (SERVED | {"server": ["u", "u"]}, ["server", "u u"]),
        (SERVED | {"drafters": ["a", "b"]}, ["drafters", "2", "1"]),
        (HERE | {"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
        (HERE | {"target_model_init_kwargs": {"token": "hf_x"}}, ["token"]),
        (HERE | {"draft_lengths": [0, 3]}, ["draft_lengths", 0]),
        (HERE | {"draft_lengths": [3], "use_cache": False}, ["use_cache", "costs"]),
        # Options that would do nothing.
        (SERVED | {"dtype": "float32"}, ["dtype=float32"]),
        (HERE | {"concurrency": 4}, ["concurrency=4"]),
        (HERE | {"top_p": 0.9, "sample_drafts": True}, ["top_p=0.9", "sample_drafts=True"]),
        (HERE | {"batch_sizes": [4]}, ["batch_sizes=[4]", "draft_lengths"]),
    ],
)
def test_what_cannot_be_run_is_refused_and_what_acts_is_taken(monkeypatch, given, names):
    with refused(ValueError, *names):
        EvaluationArguments(**given)
    EvaluationArguments(**HERE, temperature=0.7, top_p=0.9, top_k=5, sample_drafts=True, dtype="float32")
    EvaluationArguments(**SERVED, temperature=0.7, top_p=0.9, top_k=5, concurrency=4, model="m")
    monkeypatch.setattr(command_evaluate.importlib.util, "find_spec", lambda name: None)
    with refused(ValueError, "dflash_hf[evaluation]"):
        EvaluationArguments(**HERE)


def test_what_is_wrong_shows_before_anything_is_decoded(run, words, folders, tmp_path, monkeypatch):
    """Wrong names, models that do not fit or are damaged, an output folder that cannot be written."""
    monkeypatch.setattr(command_evaluate, "plain_answers", lambda *args, **kwargs: pytest.fail("measured"))
    for name in ("nan", "lacking", "half"):
        shutil.copytree(folders / ("first" if name == "nan" else "target"), tmp_path / name)
    weight, file = "model.layers.1.mlp.up_proj.weight", "model.safetensors"
    damaged = load_file(tmp_path / "nan" / file) | {"norm.weight": torch.full((64,), torch.nan)}
    save_file(damaged, tmp_path / "nan" / file, metadata={"format": "pt"})
    lacking = {k: v for k, v in load_file(tmp_path / "lacking" / file).items() if k != weight}
    save_file(lacking, tmp_path / "lacking" / file, metadata={"format": "pt"})
    os.truncate(tmp_path / "half" / file, 5000)
    for drafters, given, names in (
        (["missing"], {}, ["missing"]),
        (["target"], {}, ["target"]),
        (["other"], {}, ["hidden_size"]),
        (["first"], {"target": folders / "missing"}, ["missing"]),
        (["first"], {"prompts": "missing.jsonl"}, ["missing.jsonl"]),
        (["first", tmp_path / "nan"], {}, [tmp_path / "nan", "NaN"]),
        (["first"], {"target": tmp_path / "lacking"}, [weight]),
        (["first"], {"target": tmp_path / "half"}, [tmp_path / "half"]),
    ):
        with refused(SystemExit, *names):
            run(*words(*drafters, **given))
    # A chat template may write nothing, and a tokenizer may be another target's.
    for ids in ([], [999]):
        monkeypatch.setattr(command_evaluate, "prompt_token_ids", lambda *args, ids=ids: [[5], [6], ids])
        with refused(SystemExit, "Prompt 2"):
            run(*words("first"))
    shutil.rmtree(tmp_path / "results")
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr(command_evaluate, "read_prompts", lambda *args: pytest.fail("read"))
    with refused(SystemExit, "output_dir"):
        run(*words("first"))
