# SPDX-License-Identifier: Apache-2.0
"""The training recipe with a target of random weights: dry run, preflight, profile, and what it refuses."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from tiny import hybrid_target
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashDraftConfig, DFlashTrainingArguments, checkpointing
from dflash_hf.callbacks import copy_overlap
from dflash_hf.cli import parse_config
from dflash_hf.frozen_target import random_target, read_target_config, synthetic_documents
from dflash_hf.planning import TARGET_EFFICIENCY, check_copy, check_memory, check_upload, make_plan
from dflash_hf.topology import place


ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
CONFIG = ["--config", str(RECIPES / "qwen3.6-27b" / "config.yaml")]
SHAPE = ["--num_layers", "2", "--num_attention_heads", "2", "--num_key_value_heads", "1", "--head_dim", "32"]
SHAPE += ["--intermediate_size", "64", "--layer_types", "sliding_attention", "full_attention"]
SHAPE += ["--sliding_window", "16", "--block_size", "4", "--target_layer_ids", "1", "4", "--mask_token_id", "260"]
SMALL = ["--row_length", "64", "--num_anchors", "8", "--bf16", "false", "--use_cpu", "true", "--disable_tqdm", "true"]
SMALL += ["--target_model_init_kwargs", '{"dtype": "float32"}', "--logging_steps", "1"]
SMALL += ["--gradient_accumulation_steps", "1", "--num_synthetic_documents", "12", "--synthetic_length", "32"]


def load_recipe(monkeypatch, name: str = "train_qwen36.py"):
    spec = importlib.util.spec_from_file_location("train_recipe", RECIPES / name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_recipe", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The recipe's main with a tiny target's configuration."""
    config = hybrid_target().config
    config.save_pretrained(tmp_path / "target")
    module = load_recipe(monkeypatch)

    def main(*words: str) -> Path:
        output = tmp_path / "output"
        arguments = ["train_qwen36.py", "--random_target_config", str(tmp_path / "target" / "config.json")]
        arguments += [*SHAPE, *SMALL, "--output_dir", str(output), *words]
        monkeypatch.setattr(sys, "argv", arguments)
        module.main()
        return output

    return main


def test_the_dry_run_says_what_a_run_needs(run, capsys):
    output = run("--dry_run", "true", "--num_train_epochs", "3")
    plan = json.loads((output / "dry_run.json").read_text())
    assert (plan["documents"], plan["tokens"], plan["rows"]) == (12, 384, 6)
    assert (plan["steps_per_epoch"], plan["total_steps"], plan["anchors_per_row"]) == (6, 18, 16)
    assert plan["devices"] == {"0": ["cpu", "cpu"]} and plan["hours_per_epoch"] > 0
    assert "hours per epoch" in capsys.readouterr().out


def test_the_dry_run_plans_for_gpus_that_are_not_here(run, capsys):
    plan = json.loads((run("--dry_run", "true", "--dry_run_gpus", "4x96") / "dry_run.json").read_text())
    assert plan["devices"] == {"0": ["cuda:2", "cuda:0"], "1": ["cuda:3", "cuda:1"]}
    assert (plan["layout"], plan["world_size"], plan["steps_per_epoch"]) == ("paired", 2, 3)
    one = run("--dry_run", "true", "--dry_run_gpus", "1x80", "--check_memory", "false")
    assert json.loads((one / "dry_run.json").read_text())["layout"] == "shared"
    with pytest.raises(SystemExit, match="needs about 2 GB on one GPU, which has 0 GB"):
        run("--dry_run", "true", "--dry_run_gpus", "2x0.00001")
    for words in (["--dry_run", "true", "--dry_run_gpus", "4"], ["--dry_run_gpus", "4x96"], ["--dry_run_gpus", "0x9"]):
        with pytest.raises(SystemExit, match="NUMBERxGIGABYTES, such as 4x96"):
            run(*words)


def test_the_dry_run_refuses_what_does_not_fit_together(run):
    with pytest.raises(SystemExit, match=r"(?s)error: .*target_layer_ids"):
        run("--dry_run", "true", "--target_layer_ids", "1", "7")
    with pytest.raises(SystemExit, match=r"(?s)error: .*mask_token_id"):
        run("--dry_run", "true", "--mask_token_id", "9999")


def test_the_dry_run_of_a_drafter_that_continues_plans_what_is_changed(monkeypatch, tmp_path):
    module = load_recipe(monkeypatch)
    hybrid_target().config.save_pretrained(tmp_path / "target")
    random = ["--random_target_config", str(tmp_path / "target" / "config.json")]
    new, _ = parse_config((module.RecipeArguments, DFlashTrainingArguments), [*random, *SHAPE, *SMALL, *CONFIG])
    module.drafter_configuration(new).save_pretrained(tmp_path / "drafter")
    words = ["--config", str(RECIPES / "qwen3.6-27b" / "continue.yaml"), "--drafter", str(tmp_path / "drafter")]
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", *words, *random, *SMALL, "--block_size", "8", "--dry_run", "true", "--output_dir", str(tmp_path)],
    )
    module.main()
    eight = json.loads((tmp_path / "dry_run.json").read_text())["drafter_seconds"]
    sys.argv[sys.argv.index("8")] = "4"
    module.main()
    assert eight > 1.5 * json.loads((tmp_path / "dry_run.json").read_text())["drafter_seconds"]
    # A drafter that is not there, and a shape beside one that has its own, are refused by the dry run as by the run.
    folder = sys.argv.index("--drafter") + 1
    sys.argv[folder] += "/nothing"
    with pytest.raises(SystemExit, match=r"error: .*/nothing is neither a folder nor a repository id"):
        module.main()
    sys.argv[folder] = sys.argv[folder].removesuffix("/nothing")
    sys.argv += ["--num_layers", "3"]
    with pytest.raises(SystemExit, match="num_layers cannot be given together with drafter"):
        module.main()


def test_a_run_on_random_weights_writes_losses_times_and_a_profile(run):
    output = run("--max_steps", "14", "--profile_steps", "2", "--measure_alone_steps", "2", "--save_strategy", "no")
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    steps = [{**entry, **entry["details"]} for entry in log if "loss" in entry]
    assert len(steps) == 14
    for name in ("step_seconds", "target_seconds", "wait_seconds", "drafter_seconds", "tokens_per_second"):
        assert all(entry[name] > 0 for entry in steps)
    assert steps[-1]["target_seconds_alone"] > 0 and steps[-1]["drafter_seconds_alone"] > 0
    assert json.loads((output / "profile.json").read_text())["traceEvents"]
    assert json.loads((output / "profile_copies.json").read_text()) == {"steps": [8, 9], "copies": {}}
    assert [entry["in_turn"] for entry in steps] == [1.0] * 2 + [0.0] * 12
    assert not (output / "model.safetensors").exists()
    figures = output / "pairs.json"
    report = [sys.executable, RECIPES / "report_pairs.py", output, output, "--output", figures, "--skip", "1"]
    said = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    assert "largest difference 0 in 14 logs" in said
    (written,) = json.loads(figures.read_text()).values()
    # Not 1 to 3 (two in turn and one behind them), nor 8 to 11 (two profiled, the writing, and one behind).
    assert written["steps"] == 14 - 3 - 4 and written["ratio"] > 0


def write_run(folder, steps: dict[int, float], every: int, in_turn: int, profiled=None, loss=1.0) -> Path:
    """A finished run whose step n took `steps[n]` seconds, logged every so many steps."""
    logs = []
    for last in range(every, len(steps) + 1, every):
        inside = range(last - every + 1, last + 1)
        mean = sum(steps[n] for n in inside) / every
        share = sum(n <= in_turn for n in inside) / every
        entry = {"step": last, "loss": loss, "in_turn": share, "step_seconds": mean, "target_seconds": 0.5}
        logs.append(entry | {"drafter_seconds": 0.75, "wait_seconds": 0.0, "copy_seconds": 0.0})
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [*logs, {"train_runtime": 9, "step": 99}]}))
    if profiled:
        (folder / "profile_copies.json").write_text(json.dumps({"steps": profiled, "copies": {}}))
    return folder


@pytest.mark.parametrize("every", [1, 5])
def test_the_report_leaves_out_steps_and_not_logs(monkeypatch, tmp_path, every):
    """Slow steps: 5 in turn, 3 behind them while the pipe fills, 11 to 13 profiled, 14 with the writing."""
    report = load_recipe(monkeypatch, "report_pairs.py")
    steps = {n: 9.0 if n <= 8 or 11 <= n <= 14 else 1.0 for n in range(1, 31)}
    run = write_run(tmp_path / "run", steps, every, in_turn=5, profiled=[11, 13])
    figures = report.read_run(run, 3)
    assert figures["step_seconds"] == pytest.approx(1.0) and figures["ratio"] == pytest.approx(1 / 0.75)
    # Of single steps 9, 10 and 18 to 30; of logs 21 to 30, since 10, 15 and 20 each hold a step that is left out.
    assert figures["steps"] == {1: 15, 5: 10}[every]
    turns = write_run(tmp_path / "turns", dict.fromkeys(range(1, 31), 1.0), every, in_turn=30)
    assert report.read_run(turns, 3)["steps"] == {1: 27, 5: 25}[every]


def test_the_report_says_when_nothing_is_left_to_measure(monkeypatch, tmp_path):
    report = load_recipe(monkeypatch, "report_pairs.py")
    run = write_run(tmp_path / "run", dict.fromkeys(range(1, 11), 1.0), 5, in_turn=5)
    with pytest.raises(SystemExit, match=r"every log holds a step that is left out \(1 to 8\)"):
        report.read_run(run, 3)


def test_the_report_says_what_is_no_finished_run(monkeypatch, tmp_path):
    report = load_recipe(monkeypatch, "report_pairs.py")
    with pytest.raises(SystemExit, match=r"no trainer_state\.json: give the output_dir"):
        report.read_run(tmp_path, 3)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": []}))
    with pytest.raises(SystemExit, match="holds no log of a training step"):
        report.read_run(tmp_path, 3)


def test_losses_are_compared_over_the_same_steps_alone(monkeypatch, tmp_path, capsys):
    report = load_recipe(monkeypatch, "report_pairs.py")
    steps = dict.fromkeys(range(1, 21), 1.0)
    runs = [write_run(tmp_path / f"{n}", steps, every, 0, loss=n) for n, every in ((1, 5), (2, 5), (3, 1))]
    monkeypatch.setattr(sys, "argv", ["report_pairs.py", *map(str, runs)])
    report.main()
    printed = capsys.readouterr().out
    assert "largest difference 1 in 4 logs" in printed and "no log of the same steps" in printed


def test_the_preflight_tries_everything_and_leaves_nothing(run, capsys, monkeypatch):
    written = []

    def publish(aside, final):
        written.append(final.name)
        original(aside, final)

    original = checkpointing.publish
    monkeypatch.setattr(checkpointing, "publish", publish)
    output = run("--preflight", "true")
    # A drafter of 1.7 billion parameters writes 21 GB each time.
    assert written == ["checkpoint-2"]
    assert len(json.loads((output / "preflight.json").read_text())) == 4
    assert sorted(path.name for path in output.iterdir()) == ["preflight.json"]
    assert capsys.readouterr().out.count(": ok") == 4


def test_gpus_that_make_no_pairs_stop_the_recipe_at_once(run, monkeypatch):
    monkeypatch.setattr("dflash_hf.prefetch.place", lambda rank, ranks, num_visible, layout: place(0, 2, 3, layout))
    with pytest.raises(SystemExit, match=r"2 processes see 3 GPUs.*--num_processes 1 for 1 pair"):
        run()


def test_the_dry_run_refuses_tokens_that_the_target_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="248320"):
        plan_for("paired", 1, 2, tmp_path, vocab_size=300_000)


@pytest.mark.slow
def test_two_ranks_plan_and_try_out_by_the_shipped_configuration(tmp_path):
    hybrid_target().config.save_pretrained(tmp_path / "target")
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/two_pairs.yaml"]
    words += ["--main_process_port", "0", "recipes/train_qwen36.py", *SHAPE, *SMALL, "--output_dir", str(tmp_path)]
    words += ["--random_target_config", str(tmp_path / "target" / "config.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    for option in ("--dry_run", "--preflight"):
        done = subprocess.run([*words, option, "true"], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "dry_run.json").read_text())["world_size"] == 2
    assert done.stdout.count(": ok") == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_synthetic_documents", "0"], "give --completions FILE to train"),
        (["--completions", "x", "--num_synthetic_documents", "0"], "has no tokenizer for completions"),
    ],
)
def test_missing_and_contradictory_sources_are_refused(run, words, message):
    with pytest.raises(SystemExit, match=message):
        run(*words)


def test_the_random_target_has_the_shape_of_a_loaded_one():
    config = hybrid_target().config
    target = random_target(config, [1, 4], "cpu", "float32", seed=3)
    again = random_target(config, [1, 4], "cpu", "float32", seed=3)
    assert len(target.layers) == 5 and target.config.num_hidden_layers == 8
    states = target.context_hidden_states(torch.arange(20)[None], [[12, 8]])
    assert states.shape == (1, 20, 2 * tiny.HIDDEN_SIZE) and states.isfinite().all() and states.std() > 0
    assert torch.equal(states, again.context_hidden_states(torch.arange(20)[None], [[12, 8]]))
    assert random_target(config, [1, 4], "cpu").model.dtype == torch.bfloat16


def test_the_shape_of_the_shipped_target_is_that_of_qwen36():
    config = read_target_config(str(RECIPES / "qwen3.6-27b" / "target-config.json"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == 26_895_998_464
    assert config.layer_types[:4] == ["linear_attention"] * 3 + ["full_attention"]


def test_synthetic_documents_never_hold_the_mask():
    documents = synthetic_documents(40, 64, vocab_size=20, mask_token_id=7)
    ids = {token for document in documents for token in document["input_ids"]}
    assert ids == set(range(20)) - {7}
    assert documents[0]["supervised_spans"] == [[4, 64]]


def plan_for(layout: str, ranks: int, gpus: int, tmp_path, vocab_size: int = 1000, **arguments):
    """A plan of the Qwen3.6-27B recipe for GPUs that need not exist."""
    target = read_target_config(str(RECIPES / "qwen3.6-27b" / "target-config.json"))
    values = yaml.safe_load((RECIPES / "qwen3.6-27b" / "config.yaml").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types")
    names += ("mask_token_id", "block_size", "sliding_window", "target_layer_ids")
    shape = {name: values[name] for name in names} | {"num_hidden_layers": 5, "use_sliding_window": True}
    args = DFlashTrainingArguments(output_dir=str(tmp_path), row_length=8192, use_cpu=True, **arguments)
    documents = synthetic_documents(16, 2048, vocab_size, 7)
    places = [place(rank, ranks, gpus, layout) for rank in range(ranks)]
    return make_plan(target, DFlashDraftConfig.from_target_config(target, **shape), args, places, documents)


def test_a_plan_of_a_pair_and_of_one_gpu(tmp_path):
    """62 layers of 23.6 billion weights, 47.2 GB in bf16, 52.3 GB with embedding and head, on 8,192 tokens."""
    pair = plan_for("paired", 1, 2, tmp_path)
    assert pair.drafter_parameters == 1_730_213_120
    work = 2 * 23_597_668_128 * 8192
    assert pair.target_seconds * pair.rate * TARGET_EFFICIENCY == pytest.approx(work)
    assert pair.target_bytes / 1e9 == pytest.approx(56, abs=5)  # with embedding and head
    assert pair.step_seconds == max(pair.target_seconds, pair.drafter_seconds)
    shared = plan_for("shared", 1, 1, tmp_path)
    assert shared.step_seconds == pytest.approx(pair.target_seconds + pair.drafter_seconds)
    assert plan_for("paired", 1, 2, tmp_path, prefetch_depth=0).step_seconds == pytest.approx(shared.step_seconds)
    assert plan_for("spread", 1, 3, tmp_path).target_bytes == pytest.approx(pair.target_bytes / 2)


def test_four_gpus_without_pairs_are_told_the_command_that_works(tmp_path):
    shared = plan_for("auto", 4, 4, tmp_path)
    message = r"needs about \d+ GB on one GPU, which has 96 GB.*two_pairs\.yaml recipes/train_qwen36\.py"
    with pytest.raises(ValueError, match=message):
        check_memory(shared, 96 * 10**9, 4)
    with pytest.raises(ValueError, match=r"one_pair\.yaml"):
        check_memory(shared, 96 * 10**9, 2)
    with pytest.raises(ValueError, match=r"a quantised target|fewer anchors"):
        check_memory(shared, 80 * 10**9, 1)
    check_memory(shared, 141 * 10**9, 1)
    pairs = plan_for("auto", 2, 4, tmp_path)
    check_memory(pairs, 96 * 10**9, 4)
    with pytest.raises(ValueError, match=r"a quantised target|fewer anchors"):
        check_memory(pairs, 40 * 10**9, 4)


def test_a_quantised_target_fits_beside_the_drafter(tmp_path):
    quantised = {"dtype": "bfloat16", "quantization_config": {"load_in_4bit": True}}
    plan = plan_for("auto", 1, 1, tmp_path, target_model_init_kwargs=quantised, max_anchors_per_row=1024)
    assert plan.target_bytes / 1e9 == pytest.approx(22, abs=3)
    check_memory(plan, 96 * 10**9, 1)


def test_a_copy_that_changes_bytes_is_found(monkeypatch):
    check_copy(torch.device("cpu"), torch.device("cpu"), "peer", num_bytes=2**12)

    def corrupted(self, features):
        features.states[17] ^= 1
        return features.states

    monkeypatch.setattr("dflash_hf.planning.FeatureTransfer.receive", corrupted)
    with pytest.raises(RuntimeError, match="feature_copies=host and NCCL_P2P_DISABLE=1"):
        check_copy(torch.device("cpu"), torch.device("cpu"), "peer", num_bytes=2**12)


def test_an_upload_that_fails_says_how_to_mend_it(tmp_path):
    args = SimpleNamespace(process_index=0, output_dir=str(tmp_path), push_to_hub=False)
    check_upload(args, "memory://bucket/run")
    (tmp_path / "file").write_text("")
    # Without an address, where checkpoints will be copied to is tried.
    args.remote_checkpoint_dir = f"{tmp_path}/file"
    with pytest.raises(RuntimeError, match="file/preflight-upload cannot be written"):
        check_upload(args, None)
    with pytest.raises(RuntimeError, match="Check the credentials"):
        check_upload(args, f"{tmp_path}/file")


def test_the_share_of_copies_that_work_covers():
    def event(cat, start, length, device=0, **more):
        return {"cat": cat, "name": "Memcpy PtoP (x)", "ts": start, "dur": length, "args": {"device": device, **more}}

    events = [event("kernel", 0, 10), event("kernel", 8, 12), event("kernel", 0, 99, device=1), event("kernel", 40, 5)]
    events += [event("gpu_memcpy", 15, 10, bytes=10**9), event("gpu_memcpy", 42, 2, bytes=10**9)]
    (copies,) = copy_overlap(events).values()
    assert copies == pytest.approx({"count": 2, "gigabytes": 2.0, "seconds": 12e-6, "covered_seconds": (5 + 2) * 1e-6})


def test_every_accelerate_configuration_says_in_two_lines_what_it_is():
    files = sorted((RECIPES / "accelerate").glob("*.yaml"))
    assert [file.stem for file in files] == ["cpu", "multi_node_pairs", "one_gpu", "one_pair", "two_pairs"]
    for file in files:
        lines = file.read_text().splitlines()
        assert [line.startswith("# ") for line in lines[:3]] == [True, True, False]
        assert lines[1].startswith("# Memory")
        values = yaml.safe_load(file.read_text())
        assert load_config_from_file(str(file)).num_processes == values["num_processes"]
        ranks = values["num_processes"] // values["num_machines"]
        gpus = str(values.get("gpu_ids", "")).split(",") if "gpu_ids" in values else []
        placement = [place(rank, ranks, len(gpus)) for rank in range(ranks)]
        if "pair" in file.stem:  # drafters first in the order of gpu_ids, targets on GPUs 0 and 1
            targets = [gpus[p.target[0].index] for p in placement]
            assert targets == [str(i) for i in range(ranks)]
            assert file.stem == "multi_node_pairs" or all(re.search(rf"GPUs? .*{t}", lines[0]) for t in targets)


def test_the_commands_of_the_readme_parse(monkeypatch):
    """Every training command: its configurations exist and all its options are known."""
    text = (RECIPES / "qwen3.6-27b" / "README.md").read_text()
    commands = [line.split() for line in re.findall(r"^.*train_qwen36\.py.*$", text, flags=re.MULTILINE)]
    commands = [words for words in commands if words[:2] == ["accelerate", "launch"]]
    assert len(commands) >= 6
    module = load_recipe(monkeypatch)
    for words in commands:
        if words[2] == "--config_file":
            assert (ROOT / words[3]).is_file()
        options = words[words.index("recipes/train_qwen36.py") + 1 :]
        parsed = [*options, "--use_cpu", "true"]
        recipe, args = module.parse_config(
            (module.RecipeArguments, DFlashTrainingArguments), parsed, default_config=module.CONFIG
        )
        module.check_sources(recipe)
        assert args.prefetch_depth == 2


def test_the_simulation_of_pairs_measures(monkeypatch):
    """That it runs; what it measures is a benchmark's matter."""
    simulate = load_recipe(monkeypatch, "simulate_pairs.py").simulate
    result = simulate(target_seconds=0.002, drafter_seconds=0.004, depth=2, steps=12)
    assert result["step_seconds"] > 0.004 and result["ratio"] > 0.9


def test_where_there_is_no_gpu_the_arguments_keep_to_the_cpu(tmp_path):
    if not torch.accelerator.is_available():
        assert DFlashTrainingArguments(output_dir=str(tmp_path), bf16=True).use_cpu
