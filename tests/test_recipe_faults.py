# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around the training recipe: refused at once, or ended without leaving anything behind."""

import errno
import json

import pytest
import torch
from test_pair_recipe import plan_for, run  # noqa: F401

from dflash_hf.planning import preflight
from dflash_hf.remote_checkpoints import remote_steps


@pytest.mark.parametrize("objective", ["kl", "expected_acceptance"])
def test_the_recipe_trains_on_the_targets_distribution(run, objective):  # noqa: F811
    output = run("--objective", objective, "--max_steps", "2", "--save_strategy", "no")
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert len([entry for entry in log if "loss" in entry]) == 2


def test_a_plan_counts_all_layers_where_the_target_gives_its_distribution(tmp_path):
    plain, compared = (plan_for("paired", 1, 2, tmp_path, objective=o) for o in ("cross_entropy", "kl"))
    assert compared.target_seconds / plain.target_seconds == pytest.approx(64 / 62, rel=1e-2)
    assert compared.drafter_seconds > plain.drafter_seconds and compared.target_bytes > plain.target_bytes


@pytest.mark.parametrize("mode", [[], ["--dry_run", "true"], ["--preflight", "true"]])
def test_an_output_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(run, mode, tmp_path):  # noqa: F811
    (tmp_path / "output").write_text("a file in its place")
    with pytest.raises(SystemExit, match=r"written into output_dir=.*give another one") as caught:
        run(*mode)
    assert caught.value.code != 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_synthetic_documents", "-3"], "num_synthetic_documents is -3; expected 0 or more"),
        (["--synthetic_length", "1"], "synthetic_length is 1"),
        (["--profile_steps", "-1"], "profile_steps is -1"),
        (["--compare_ranks_steps", "-1"], "compare_ranks_steps is -1"),
        (["--compare_ranks_steps", "10"], r"a single process, .*two_pairs\.yaml"),
        (["--target", "/no/target"], "target: /no/target is neither a folder"),
        (["--drafter", "./drafter"], r"drafter: \./drafter is neither .*owner/name"),
        (["--random_target_config", "/no/config.json"], "random_target_config: /no/config.json is neither"),
        (["--resume_from_checkpoint", "outputs/checkpoint-3"], r"no folder here.*or true"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_before_anything_is_loaded(run, words, message):  # noqa: F811
    with pytest.raises(SystemExit, match=message):
        run(*words)


def test_a_preflight_leaves_the_runs_remote_checkpoints_alone(run, tmp_path, capsys):  # noqa: F811
    """Its three steps are no checkpoints of the run, which a later resume would take; the place itself is tried."""
    remote = tmp_path / "remote"
    run("--preflight", "true", "--remote_checkpoint_dir", remote.as_uri())
    assert remote.is_dir() and not [*remote.iterdir()] and remote_steps(remote.as_uri()) == []
    assert capsys.readouterr().out.count(": ok") == 4


@pytest.mark.parametrize("words", [["--save_only_model", "true"], ["--logging_strategy", "no"]])
def test_a_preflight_tries_resuming_however_the_run_saves_and_logs(run, words):  # noqa: F811
    output = run("--preflight", "true", *words)
    assert len(json.loads((output / "preflight.json").read_text())) == 4


def test_a_preflight_on_a_full_disk_says_so_and_frees_what_it_wrote(run, monkeypatch, tmp_path):  # noqa: F811
    def full(trainer, run_dir, write_rest):
        (run_dir / "half").write_bytes(b"0" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dflash_hf.trainer.write_checkpoint", full)
    with pytest.raises(RuntimeError, match=r"Preflight failed at: three steps.*No space left.*output_dir on a larger"):
        run("--preflight", "true")
    assert not [*(tmp_path / "output").iterdir()]


def test_a_preflight_that_fails_by_memory_names_what_needs_less(monkeypatch, tmp_path):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("dflash_hf.planning.check_copy", out_of_memory)
    target = type("Target", (), {"device": torch.device("cpu")})
    args = type(
        "Arguments",
        (),
        {"output_dir": str(tmp_path), "process_index": 0, "feature_copies": "peer", "device": target.device},
    )
    with pytest.raises(RuntimeError, match=r"copy between the devices.*prefetch_depth"):
        preflight(lambda *_: None, args, target)
