# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf train` and `plan`: defaults from the target, plan, preflight, measuring runs, and what is refused."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import hybrid_target, refused, write_chats
from transformers import Qwen3Config

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, checkpointing
from dflash_hf.command_train import main
from dflash_hf.remote_checkpoints import remote_steps


RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SHAPE = ["--num_layers", "2", "--num_attention_heads", "2", "--num_key_value_heads", "1", "--head_dim", "32"]
SHAPE += ["--intermediate_size", "64", "--layer_types", "sliding_attention", "full_attention"]
SHAPE += ["--sliding_window", "16", "--block_size", "4", "--target_layer_ids", "1", "4", "--mask_token_id", "260"]
SMALL = ["--row_length", "64", "--num_anchors", "8", "--use_cpu", "true", "--disable_tqdm", "true"]
SMALL += ["--target_model_init_kwargs", '{"dtype": "float32"}', "--logging_steps", "1", "--report_to", "none"]
SMALL += ["--gradient_accumulation_steps", "1"]
SYNTHETIC = ["--num_synthetic_documents", "12", "--synthetic_length", "32", "--target", "none"]


@pytest.fixture
def run(tmp_path):
    """The command with a random target of a tiny target's shape."""
    hybrid_target().config.save_pretrained(tmp_path / "target")
    random = ["--random_target_config", str(tmp_path / "target" / "config.json")]

    def call(*words: str, shape=SHAPE, plan: bool = False) -> Path:
        output = tmp_path / "output"
        main([*random, *shape, *SMALL, *SYNTHETIC, "--output_dir", str(output), *words], plan=plan)
        return output

    return call


def planned(folder: Path) -> dict:
    return json.loads((folder / "dry_run.json").read_text())


def test_the_plan_says_what_a_run_needs(run, capsys):
    plan = planned(run("--num_train_epochs", "3", plan=True))
    assert (plan["documents"], plan["tokens"], plan["rows"]) == (12, 384, 6)
    assert (plan["steps_per_epoch"], plan["total_steps"], plan["anchors_per_row"]) == (6, 18, 16)
    assert plan["devices"] == {"0": ["cpu", "cpu"]} and plan["total_hours"] > 0
    printed = capsys.readouterr().out
    assert "hours" in printed and "dflash-hf train --accelerate_config cpu" in printed
    # `--dry_run true` of the training command is the same.
    assert planned(run("--num_train_epochs", "3", "--dry_run", "true")).keys() == plan.keys()


def test_the_plan_is_for_gpus_that_are_not_here(run, capsys):
    plan = planned(run("--dry_run_gpus", "4x96", plan=True))
    assert plan["devices"] == {"0": ["cuda:2", "cuda:0"], "1": ["cuda:3", "cuda:1"]}
    assert (plan["layout"], plan["world_size"], plan["steps_per_epoch"]) == ("paired", 2, 3)
    assert "two_pairs" in capsys.readouterr().out
    with refused(SystemExit, "drafter device", "does not fit"):
        run("--dry_run_gpus", "2x0.00001", plan=True)
    assert planned(run("--dry_run_gpus", "1x0.0001", "--check_memory", "false", plan=True))["layout"] == "shared"


def test_the_plan_refuses_what_does_not_fit_together(run):
    for words in (["--target_layer_ids", "1", "7"], ["--mask_token_id", "9999"]):
        with refused(SystemExit, words[0].strip("-")):
            run(*words, plan=True)


def test_the_plan_of_a_drafter_that_continues_counts_what_is_changed(run, tmp_path):
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
    config = DFlashDraftConfig.from_target_config(
        hybrid_target().config, num_hidden_layers=2, num_taps=2, mask_token_id=260, block_size=4, **shape
    )
    DFlashDraftModel(config).save_pretrained(tmp_path / "drafter")
    drafter = ["--drafter", str(tmp_path / "drafter"), "--config", str(RECIPES / "qwen3.6-27b" / "continue.yaml")]
    eight, four = (
        planned(run(*drafter, "--block_size", size, shape=[], plan=True))["drafter_seconds"] for size in ("8", "4")
    )
    assert eight > 1.5 * four
    with pytest.raises(SystemExit):
        run(*drafter, "--num_layers", "3", shape=[], plan=True)


def test_n3_defaults_follow_the_target(target_folder, tmp_path, monkeypatch):
    """Nothing of the 27B's recipe reaches another target."""
    monkeypatch.chdir(tmp_path)
    chats, output = write_chats(tmp_path / "chats.jsonl"), tmp_path / "outputs" / target_folder.name.lower()
    main(["--target", str(target_folder), "--completions", str(chats), *SMALL,
          "--max_steps", "1", "--max_length", "64"])  # fmt: skip
    config = DFlashDraftConfig.from_pretrained(output)
    assert (config.hidden_size, config.num_target_layers, config.mask_token_id) == (64, 6, 260)
    assert max(config.target_layer_ids) < 6 and set(config.layer_types) == {"full_attention"}


def test_a_run_on_random_weights_writes_losses_times_and_a_profile(run):
    output = run("--max_steps", "14", "--profile_steps", "2", "--measure_alone_steps", "2", "--save_strategy", "no")
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    steps = [entry | entry["details"] for entry in log if "loss" in entry]
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
    subprocess.run(report, capture_output=True, text=True, check=True)
    (written,) = json.loads(figures.read_text()).values()
    # Not 1 to 3 (two in turn and one behind them), nor 8 to 11 (two profiled, the writing, and one behind).
    assert written["steps"] == 14 - 3 - 4 and written["ratio"] > 0


def test_the_preflight_tries_everything_and_leaves_nothing(run, capsys, monkeypatch):
    written = []

    def publish(aside, final):
        written.append(final.name)
        original(aside, final)

    original = checkpointing.publish
    monkeypatch.setattr(checkpointing, "publish", publish)
    output = run("--preflight", "true", plan=True)
    # A drafter of 1.7 billion parameters writes 21 GB each time.
    assert written == ["checkpoint-2"]
    assert len(json.loads((output / "preflight.json").read_text())) == 4
    assert sorted(path.name for path in output.iterdir()) == ["preflight.json"]
    assert capsys.readouterr().out.count(": ok") == 4


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--num_synthetic_documents", "0"], ["--completions"]),
        (["--completions", "x", "--num_synthetic_documents", "0"], ["random_target_config"]),
        (["--eval_completions", "x"], ["eval_completions"]),
        (["--drafter", "/nothing/here"], ["drafter", "/nothing/here"]),
        (["--compare_ranks_steps", "10"], ["compare_ranks_steps"]),
        (["--resume_from_checkpoint", "outputs/checkpoint-3"], ["resume_from_checkpoint", "outputs/checkpoint-3"]),
        (["--dry_run", "true", "--preflight", "true"], ["dry_run", "preflight"]),
        (["--dry_run_gpus", "4"], ["dry_run_gpus", "4x96"]),
        (["--accelerate_config", "two_pairs"], ["accelerate_config"]),
    ],
)
def test_missing_and_contradictory_options_are_refused(run, capsys, words, names):
    with pytest.raises(SystemExit) as caught:
        run(*words)
    printed = f"{caught.value} {capsys.readouterr().err}"
    assert all(name in printed for name in names), printed


@pytest.mark.parametrize("objective", ["kl", "expected_acceptance"])
def test_a_run_trains_on_the_targets_distribution_and_its_plan_counts_all_layers(run, objective):
    output = run("--objective", objective, "--max_steps", "2", "--save_strategy", "no")
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert len([entry for entry in log if "loss" in entry]) == 2
    plain, compared = (planned(run("--objective", name, plan=True)) for name in ("cross_entropy", objective))
    assert compared["target_bytes"] > plain["target_bytes"] and compared["target_seconds"] > plain["target_seconds"]


@pytest.mark.parametrize("mode", [[], ["--dry_run", "true"], ["--preflight", "true"]])
def test_an_output_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(run, capsys, mode, tmp_path):
    (tmp_path / "output").write_text("a file in its place")
    with pytest.raises(SystemExit) as caught:
        run(*mode)
    assert "output_dir" in f"{caught.value} {capsys.readouterr().err}" and caught.value.code != 0


def test_a_preflight_leaves_the_runs_remote_checkpoints_alone(run, tmp_path, capsys):
    """Its three steps are no checkpoints of the run, which a later resume would take; the place itself is tried."""
    remote = tmp_path / "remote"
    run("--preflight", "true", "--remote_checkpoint_dir", remote.as_uri(), "--save_only_model", "true", plan=True)
    assert remote.is_dir() and not [*remote.iterdir()] and remote_steps(remote.as_uri()) == []
    assert capsys.readouterr().out.count(": ok") == 4


def test_a_preflight_on_a_full_disk_says_so_and_frees_what_it_wrote(run, monkeypatch, tmp_path):
    def full(trainer, run_dir, write_rest):
        (run_dir / "half").write_bytes(b"0" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_hf.trainer.write_checkpoint", full)
    with refused(RuntimeError, "No space left", "output_dir"):
        run("--preflight", "true", plan=True)
    assert not [*(tmp_path / "output").iterdir()]


def test_the_recipe_of_a_dense_target_makes_the_published_drafters_shape(run, tmp_path):
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    target = Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, vocab_size=151936, **heads)
    target.save_pretrained(tmp_path / "4b")
    given = ["--config", str(RECIPES / "qwen3-4b" / "config.yaml"), "--bf16", "false", "--check_memory", "false"]
    given += ["--random_target_config", str(tmp_path / "4b" / "config.json"), "--block_size", "16"]
    plan = planned(run(*given, shape=[], plan=True))
    # Those of z-lab/Qwen3-4B-DFlash-b16.
    for part in ("5 layers", "32/8 heads of 128", "MLP 9728", "blocks of 16", "[1, 9, 17, 25, 33]", "151669"):
        assert part in plan["drafter_shape"]
