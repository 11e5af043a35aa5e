# SPDX-License-Identifier: Apache-2.0
"""Weights compared over the ranks of a run, and of several runs by their checkpoints."""

import json
import runpy
import sys

import pytest
import torch
from runs import finish, start
from safetensors.torch import load_file, save_file
from test_pair_recipe import RECIPES, SHAPE, SMALL, load_recipe, write_run
from tiny import hybrid_target


def recipe(folder: str, *words: str) -> None:
    """Target of a process: the training recipe."""
    sys.argv = ["train_qwen36.py", "--random_target_config", f"{folder}/target/config.json", *SHAPE, *SMALL]
    sys.argv += ["--save_only_model", "true", "--save_strategy", "steps", "--save_steps", "2"]
    sys.argv += ["--max_steps", "4", "--learning_rate", "1e-3", "--dataloader_num_workers", "0", *words]
    runpy.run_path(str(RECIPES / "train_qwen36.py"), run_name="__main__")


def test_two_ranks_of_the_recipe_stay_equal_and_equal_one_that_accumulates(tmp_path, monkeypatch, capsys):
    """One that does not accumulate has seen other rows, which the report shows."""
    log, report = tmp_path / "log", load_recipe(monkeypatch, "report_pairs.py")
    hybrid_target().config.save_pretrained(tmp_path / "target")
    two, one = ["--compare_ranks_steps", "2"], ["--gradient_accumulation_steps", "2"]
    for name, world, words in (("two", 2, two), ("one", 1, one), ("few", 1, [])):
        ranks = start(recipe, str(tmp_path), "--output_dir", str(tmp_path / name), *words, world=world, log=log)
        assert finish(ranks) == [0] * world, log.read_text()[-3000:]
    found = json.loads((tmp_path / "two" / "ranks.json").read_text())
    assert found == {"steps": [2, 4], "largest_difference": [0.0, 0.0], "world_size": 2}
    assert log.read_text().count("between the 2 ranks is 0.") == 2
    folders = [str(tmp_path / name) for name in ("two", "one", "few")]
    monkeypatch.setattr(sys, "argv", ["report_pairs.py", *folders, "--weights", "--output", str(tmp_path / "figures")])
    report.main()
    assert capsys.readouterr().out.count("weights after step 4: relative difference") == 2
    figures = json.loads((tmp_path / "figures").read_text())
    one, few = (figures[folder]["weights"]["relative_difference"] for folder in folders[1:])
    assert one < 1e-5 and few > 1e-3


@pytest.fixture
def report(monkeypatch, tmp_path):
    """report_pairs.py --weights on two folders, the first without logs; checkpoints of equal tensors but for one."""
    module = load_recipe(monkeypatch, "report_pairs.py")
    write_run(tmp_path / "b", dict.fromkeys(range(1, 11), 1.0), 1, in_turn=0)
    weights = {"fc.weight": torch.full((4, 4), 2.0, dtype=torch.bfloat16), "norm.weight": torch.zeros(4)}
    for name, steps in (("a", (5, 10, 15)), ("b", (5, 10))):
        for step in steps:
            (tmp_path / name / f"checkpoint-{step}").mkdir(parents=True)
            save_file(weights, tmp_path / name / f"checkpoint-{step}" / "model.safetensors")
    path = tmp_path / "b" / "checkpoint-10" / "model.safetensors"
    save_file(weights | {"norm.weight": torch.tensor([0.0, -0.5, 0.0, 0.0])}, path)

    def main(*folders: str) -> dict:
        arguments = [str(tmp_path / folder) for folder in folders]
        output = ["--output", str(tmp_path / "figures.json")]
        monkeypatch.setattr(sys, "argv", ["report_pairs.py", *arguments, "--weights", *output])
        module.main()
        return json.loads((tmp_path / "figures.json").read_text())

    return main


def test_the_report_compares_the_newest_weights_that_all_runs_have(report, tmp_path, capsys):
    figures = report("a", "b")
    found = figures[str(tmp_path / "b")]["weights"]
    assert found == {
        "step": 10, "relative_difference": 0.5 / 8, "largest_difference": 0.5, "largest_in": "norm.weight"
    }  # fmt: skip
    assert figures[str(tmp_path / "b")]["steps"] == 7 and "weights" not in figures[str(tmp_path / "a")]
    printed = capsys.readouterr().out
    assert "not measured" in printed and "no trainer_state.json" in printed
    assert "weights after step 10: relative difference 0.0625, largest 0.5 in norm.weight" in printed


def test_the_report_says_which_weights_are_missing(report, tmp_path):
    with pytest.raises(SystemExit, match=r"is the only one\. Give several"):
        report("a")
    path = tmp_path / "b" / "checkpoint-10" / "model.safetensors"
    weights = load_file(path)
    save_file({"fc.weight": weights["fc.weight"]}, path)
    with pytest.raises(SystemExit, match=r"1 are missing in one of them or of another shape, such as norm\.weight"):
        report("a", "b")
    save_file(weights | {"norm.weight": torch.full((4,), float("nan"))}, path)
    with pytest.raises(SystemExit, match=r"norm\.weight is not finite in"):
        report("a", "b")
    path.unlink()
    with pytest.raises(SystemExit, match=r"error: .*checkpoint-10"):
        report("a", "b")
    for step in (5, 10):
        (tmp_path / "b" / f"checkpoint-{step}").rename(tmp_path / "b" / f"elsewhere-{step}")
    with pytest.raises(SystemExit, match=r"no step of which .*a: 5, 10, 15; .*b: none\).*--save_only_model true"):
        report("a", "b")


def test_the_report_compares_adapters_and_the_same_weights_in_other_files(report, tmp_path):
    both = [tmp_path / name / "checkpoint-10" for name in "ab"]
    weights = load_file(both[0] / "model.safetensors") | {"empty": torch.zeros(0)}
    for folder, difference in zip(both, (0.0, 0.25), strict=True):
        (folder / "model.safetensors").unlink()
        changed = weights | {"norm.weight": weights["norm.weight"] + difference}
        save_file(changed, folder / "adapter_model.safetensors")
    found = report("a", "b")[str(tmp_path / "b")]["weights"]
    assert found["largest_difference"] == 0.25 and found["largest_in"] == "norm.weight"
    for folder in both:
        (folder / "adapter_model.safetensors").unlink()
    save_file(weights, both[0] / "model.safetensors")
    files = {f"{name}.safetensors": {name: tensor.double()} for name, tensor in weights.items()}
    for file, tensors in files.items():
        save_file(tensors, both[1] / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (both[1] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = report("a", "b")[str(tmp_path / "b")]["weights"]
    assert found["relative_difference"] == 0 and found["largest_in"] in weights


@pytest.mark.parametrize(
    "text",
    ["{", "", "[]", "{}", '{"log_history": null}', '{"log_history": [{"step_seconds": 1.0}]}'],
)
def test_the_report_says_whose_logs_are_broken(report, monkeypatch, tmp_path, text):
    (tmp_path / "b" / "trainer_state.json").write_text(text)
    assert "broken, or not of the" in report("a", "b")[str(tmp_path / "b")]["not_measured"]
    monkeypatch.setattr(sys, "argv", ["report_pairs.py", str(tmp_path / "b")])
    with pytest.raises(SystemExit, match=r"b holds as trainer_state\.json and profile_copies\.json is broken"):
        load_recipe(monkeypatch, "report_pairs.py").main()


def test_a_loss_that_is_not_a_number_is_no_small_difference(report, tmp_path, capsys):
    path = tmp_path / "b" / "trainer_state.json"
    state = json.loads(path.read_text())
    (tmp_path / "a" / "trainer_state.json").write_text(json.dumps(state))
    state["log_history"][5]["loss"] = float("nan")
    path.write_text(json.dumps(state))
    report("a", "b")
    assert "largest difference nan" in capsys.readouterr().out
