# SPDX-License-Identifier: Apache-2.0
"""The demo's two acts on a tiny target, what they share, and how the second is left out."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, FrozenTarget
from dflash_hf.validation import validate_checkpoint


ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "recipes" / "smollm2-135m"
SMALL = ["--mask_token_id", "260", "--num_train_epochs", "2", "--max_new_tokens", "8", "--num_train_chats", "4"]
SMALL += ["--num_seen_prompts", "2", "--num_unseen_prompts", "3", "--use_cpu", "true", "--disable_tqdm", "true"]
SMALL += ["--continue_epochs", "3"]


def test_the_trained_drafter_is_sound_small_and_of_this_target():
    folder = FOLDER / "drafter"
    names = ["config.json", "model.safetensors", "training.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    report = validate_checkpoint(folder)
    assert report.ok and "0 warning(s)" in str(report)
    assert (folder / "model.safetensors").stat().st_size < 20e6
    assert "*.safetensors binary" in (ROOT / ".gitattributes").read_text().splitlines()
    config, target = (json.loads(path.read_text()) for path in (folder / "config.json", FOLDER / "target-config.json"))
    assert config["num_target_layers"] == target["num_hidden_layers"]
    assert [config[name] for name in ("hidden_size", "vocab_size")] == [target["hidden_size"], target["vocab_size"]]
    assert "/" not in (folder / "config.json").read_text()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A tiny target, chats and a drafter in bf16 that differs in shape from the first act's."""
    root = tmp_path_factory.mktemp("demo")
    target = tiny.llama_target(num_layers=9)
    target.save_pretrained(root / "target")
    tiny.byte_tokenizer().save_pretrained(root / "target")
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=1, num_taps=5, mask_token_id=tiny.MASK_TOKEN_ID, block_size=4
    )
    DFlashDraftModel(config).save_pretrained(root / "drafter", dtype=torch.bfloat16)
    tiny.write_chats(root / "completions.jsonl")
    return root


def words(folders: Path, output_dir: Path, drafter: str | Path) -> list[str]:
    given = ["--target", folders / "target", "--completions", folders / "completions.jsonl", "--drafter", drafter]
    return [str(word) for word in [*SMALL, *given, "--output_dir", output_dir]]


@pytest.fixture
def demo(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("demo")


def play(demo, monkeypatch, given: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", *given])
    demo.main()


def assert_act(folder: Path, block_size: int) -> dict:
    """Results of one act, as far as all acts are alike."""
    results = json.loads((folder / "results.json").read_text())
    assert len(results["answers"]) == 3 and all(answer["equal"] for answer in results["answers"])
    assert [answer["prompt"] for answer in results["answers"]] == ["Question 2?", "Question 5?", "Question 8?"]
    for name, number in (("seen", 2), ("unseen", 3)):
        before, after = results[name]["before"], results[name]["after"]
        assert before["num_prompts"] == after["num_prompts"] == number and after["forwards"] > 0
        assert after["lossless"] and after["speed_up"] > 0 and after["block_size"] == block_size
        low, high = results[name]["after_interval"]
        assert 1 <= low <= after["acceptance_length"] <= high <= block_size
    assert results["evaluation"]["eval_acceptance_length"] >= 1
    assert (folder / "training.png").stat().st_size > 0
    assert DFlashDraftModel.from_pretrained(folder).config.block_size == block_size
    return results


def test_the_demo_plays_two_acts(folders, tmp_path):
    script = [sys.executable, "recipes/smollm2-135m/demo.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    given = [*script, *words(folders, tmp_path, folders / "drafter")]
    done = subprocess.run(given, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = assert_act(tmp_path, 8), assert_act(tmp_path / "continued", 4)
    walked, decoded = first["evaluation"]["walked_acceptance_length"], first["unseen"]["after"]["acceptance_length"]
    assert walked == pytest.approx(decoded, abs=1e-4)
    # The second act starts as the drafter came, and trains all of it.
    assert "speed_up" in second["unseen"]["before"] and second["unseen"]["before"]["speed_up"] > 0
    came, went = (DFlashDraftModel.from_pretrained(folder) for folder in (folders / "drafter", tmp_path / "continued"))
    assert all(not torch.equal(a.float(), b) for a, b in zip(came.parameters(), went.parameters(), strict=True))
    # Both acts show the same table and their speeds, and the end holds them together.
    assert done.stdout.count("| 3 unseen") == done.stdout.count("\nunseen chats: ") == 2
    for name in ("seen", "unseen"):
        taus = [
            results[name][when]["acceptance_length"]
            for results, when in ((first, "after"), (second, "before"), (second, "after"))
        ]
        said = "{} chats: {:.2f} after learning from nothing, {:.2f} by the trained drafter as it came, {:.2f} after"
        assert said.format(name.capitalize(), *taus) in done.stdout
    settings = torch.load(tmp_path / "continued" / "training_args.bin", weights_only=False)
    assert (settings.objective, settings.learning_rate, settings.num_train_epochs) == ("dpace", 1.2e-3, 3)


def test_the_target_answers_and_runs_over_each_chat_once(demo, monkeypatch, folders, tmp_path):
    computed, answered, played = [], [], []
    stage = importlib.import_module("demo_stage")
    all_hidden_states, plain_answers = FrozenTarget.all_hidden_states, stage.plain_answers

    def counted_states(self, input_ids, document_lengths=None):
        for ids, lengths in zip(input_ids, document_lengths, strict=True):
            computed.extend(tuple(part.tolist()) for part in ids[: sum(lengths)].split(lengths))
        return all_hidden_states(self, input_ids, document_lengths)

    def counted_answers(target, prompts, settings):
        answered.extend(map(tuple, prompts))
        return plain_answers(target, prompts, settings)

    monkeypatch.setattr(FrozenTarget, "all_hidden_states", counted_states)
    monkeypatch.setattr(stage, "plain_answers", counted_answers)
    monkeypatch.setattr(demo, "walked_acceptance_length", lambda *args: 1.0)
    monkeypatch.setattr(demo, "report", lambda act, *others: played.append(act))
    play(demo, monkeypatch, words(folders, tmp_path, folders / "drafter"))
    assert len(played) == 2
    # Four chats to train on and four to evaluate on, in two epochs and two evaluations of two acts.
    assert len(computed) == len(set(computed)) == 8
    assert len(answered) == len(set(answered)) == 5


@pytest.mark.parametrize("drafter", ["missing", "null"])
def test_without_a_trained_drafter_the_demo_ends_after_its_first_act(
    demo, monkeypatch, folders, tmp_path, capsys, drafter
):
    """It says so once where the drafter is missing, and keeps quiet where none is wanted."""
    missing = tmp_path / "missing"
    monkeypatch.setattr(demo, "TRAINED_DRAFTER", missing)
    play(demo, monkeypatch, words(folders, tmp_path / "run", missing if drafter == "missing" else drafter))
    assert_act(tmp_path / "run", 8)
    shown = capsys.readouterr().out
    said = int(drafter == "missing")
    assert shown.count("no second act") == shown.count(demo.TRAIN_COMMAND) == shown.count(str(missing)) == said
    assert not (tmp_path / "run" / "continued").exists()


def test_a_drafter_that_cannot_be_continued_is_refused_before_the_first_act(demo, monkeypatch, folders, tmp_path):
    other = tiny.llama_target(num_layers=6)
    config = DFlashDraftConfig.from_target_config(
        other.config, num_hidden_layers=1, num_taps=2, mask_token_id=tiny.MASK_TOKEN_ID, block_size=4
    )
    DFlashDraftModel(config).save_pretrained(tmp_path / "other")
    monkeypatch.setattr(demo.Stage, "play", lambda *args: pytest.fail("an act began"))
    with pytest.raises(ValueError, match="num_target_layers"):
        play(demo, monkeypatch, words(folders, tmp_path / "run", tmp_path / "other"))
    with pytest.raises(OSError, match="no-such-folder"):
        play(demo, monkeypatch, words(folders, tmp_path / "run", tmp_path / "no-such-folder"))
    with pytest.raises(ValueError, match="objective='none' is unknown"):
        given = words(folders, tmp_path / "run", folders / "drafter")
        play(demo, monkeypatch, [*given, "--continue_objective", "none"])


def test_remembered_states_are_those_of_the_target(demo, monkeypatch):
    target, taps = tiny.llama_target(num_layers=6), [1, 4]
    plain, remembering = (
        FrozenTarget(target, taps),
        importlib.import_module("remembering_target").RememberingTarget(target, taps),
    )
    rows = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    lengths = [[5, 4], [12]]
    expected = plain.context_hidden_states(rows, lengths)
    assert torch.equal(remembering.context_hidden_states(rows, lengths), expected)
    runs = []
    read_taps = FrozenTarget._read_taps
    monkeypatch.setattr(FrozenTarget, "_read_taps", lambda self, **kw: runs.append(1) or read_taps(self, **kw))
    # Again, in rows of another order and shape; what a caller does to its tensor stays its own.
    remembering.context_hidden_states(rows, lengths).zero_()
    assert torch.equal(remembering.context_hidden_states(rows, lengths), expected)
    assert torch.equal(remembering.context_hidden_states(rows[1:]), expected[1:])
    moved = torch.cat([rows[:1, 5:9], rows[:1, :5], torch.zeros(1, 2, dtype=torch.long)], dim=1)
    states = remembering.context_hidden_states(moved, [[4, 5]])
    assert torch.equal(states[0, :4], expected[0, 5:9]) and torch.equal(states[0, 4:9], expected[0, :5])
    assert not states[0, 9:].any() and not runs
    # One document that is new makes the target run again.
    remembering.context_hidden_states(rows, [[5, 5], [12]])
    assert runs
