# SPDX-License-Identifier: Apache-2.0
"""One script, started by plain python, by `accelerate launch` and as two gloo ranks: the same training each time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


SCRIPT = '''
import json
import os
import sys

import torch
from accelerate import PartialState
from tiny import MASK_TOKEN_ID, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments


def documents(num_supervised):
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in num_supervised:
        length = int(torch.randint(17, 30, (1,), generator=generator))
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "supervised_spans": [[length - number, length]] if number else []})
    return made


class Recorded(DFlashTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            self.counted.append(int((inputs["labels"] != -100).sum()))
            self.anchors.append(inputs["anchor_positions"].tolist())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def run(num_supervised, rows_per_step, evaluate=False, train=True, resume=None, **arguments):
    """Train with plain SGD, so that a wrong factor of the gradients shows."""
    # Asking accelerate before the arguments have set it up would make this one process.
    world = int(os.environ.get("WORLD_SIZE", 1))
    target = dense_target()
    torch.manual_seed(0)
    drafter = DFlashDraftModel(
        DFlashDraftConfig.from_target_config(
            target.config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
        )
    )
    values = dict(
        output_dir=sys.argv[1] + "/run", row_length=32, num_anchors=8, max_anchors_per_row=64, max_steps=2,
        warmup_steps=0, learning_rate=0.5, optim="sgd", max_grad_norm=0.0, logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="no", use_cpu=True, gradient_accumulation_steps=rows_per_step // world,
    )
    data = documents(num_supervised)
    trainer = Recorded(drafter, target, DFlashTrainingArguments(**{**values, **arguments}), train_dataset=data,
                       eval_dataset=data)
    trainer.counted, trainer.anchors = [], []
    result = {}
    if evaluate:
        result["metrics"] = trainer.evaluate() | trainer.state.log_history[-1]["details"]
        result["walked"] = trainer._evaluated.walk.values
    if train:
        trainer.train(resume_from_checkpoint=resume and f"{sys.argv[1]}/run/checkpoint-{resume}")
    logs = trainer.state.log_history
    result |= {
        "world": trainer.args.world_size,
        "wrapped": type(trainer.model_wrapped).__name__,
        "losses": [entry["loss"] for entry in logs if "loss" in entry],
        "accuracies": [entry["details"]["accuracy"] for entry in logs if "loss" in entry],
        "parameters": {name: p.detach().cpu().clone() for name, p in drafter.named_parameters()},
        "counted": trainer.counted,
        "anchors": trainer.anchors,
    }
    return result


CASES = {
    "two_rows": dict(num_supervised=[2, 9, 2, 9], rows_per_step=2),
    "four_rows": dict(num_supervised=[2, 9, 2, 9, 3, 9, 2, 12], rows_per_step=4),
    "silent_rows": dict(num_supervised=[0, 9, 0, 12], rows_per_step=2, num_train_epochs=2, max_steps=4),
    "only_silent_rows_in_a_step": dict(num_supervised=[0, 0, 0, 9], rows_per_step=2, max_steps=2),
    "five_rows": dict(num_supervised=[2, 9, 2, 9, 6], rows_per_step=2, max_steps=-1, num_train_epochs=1),
    "saved": dict(num_supervised=[2, 9, 6, 12], rows_per_step=2, max_steps=4, save_strategy="steps", save_steps=3),
    "resumed": dict(num_supervised=[2, 9, 6, 12], rows_per_step=2, max_steps=4, resume=3),
    "evaluation": dict(num_supervised=[2, 9, 6], rows_per_step=2, evaluate=True, train=False),
    "evaluated_first": dict(num_supervised=[2, 9, 2, 9], rows_per_step=2, evaluate=True),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Other arguments for some of the cases, by their names.
    chosen = json.loads(sys.argv[2]) if sys.argv[2:] else dict.fromkeys(CASES, {})
    results = {name: run(**CASES[name], **arguments) for name, arguments in chosen.items()}
    state = PartialState()
    torch.save(results, f"{sys.argv[1]}/{state.process_index}.pt")
    if state.num_processes > 1:
        state.wait_for_everyone()
        state.destroy_process_group()
'''


def launch(folder: Path, *launcher: str, cases: dict[str, dict] | None = None, **environment: str) -> list[dict]:
    """Run the script and return what each rank saved; `cases` holds more arguments of those to run, else all are."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    tests = str(Path(__file__).parent)
    paths = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, *launcher, str(script), str(folder), *([] if cases is None else [json.dumps(cases)])],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Plain python: one process that accumulates two rows for each rank's one."""
    (results,) = launch(tmp_path_factory.mktemp("launch") / "plain")
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two gloo ranks on the CPU; `--cpu --num_processes 2` would silently start one process."""
    results = launch(
        tmp_path_factory.mktemp("launch") / "ranks",
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
        ACCELERATE_USE_CPU="true",
    )
    assert len(results) == 2
    return results


def assert_same_run(result: dict, expected: dict, tolerance: float = 1e-6):
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["accuracies"] == pytest.approx(expected["accuracies"], rel=1e-5)
    for name, parameter in expected["parameters"].items():
        torch.testing.assert_close(result["parameters"][name], parameter, rtol=0, atol=tolerance)


def test_accelerate_launch_and_plain_python_train_the_same(alone, tmp_path):
    (launched,) = launch(
        tmp_path / "launched",
        *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    )
    for name, result in alone.items():
        assert launched[name]["world"] == 1
        assert launched[name]["losses"] == result["losses"]
        assert all(torch.equal(p, result["parameters"][n]) for n, p in launched[name]["parameters"].items())


def test_the_ranks_are_two_and_wrapped(ranks):
    for rank in ranks:
        for result in rank.values():
            assert result["world"] == 2
        for case in ("two_rows", "evaluated_first"):
            assert rank[case]["wrapped"] == "DistributedDataParallel"


@pytest.mark.parametrize("case", ["two_rows", "four_rows", "evaluated_first"])
def test_d2_two_ranks_equal_one_process_that_accumulates(alone, ranks, case):
    """Rows of few and of many labels: a mean per rank would weight them differently."""
    counted = [count for rank in ranks for count in rank[case]["counted"]]
    assert sorted(counted) == sorted(alone[case]["counted"]) and len(set(counted)) > 1
    for rank in ranks:
        assert_same_run(rank[case], alone[case])


@pytest.mark.parametrize("case", ["silent_rows", "only_silent_rows_in_a_step"])
def test_d1_a_rank_with_nothing_to_learn_from_takes_part(alone, ranks, case):
    assert_silent(ranks, case)
    for rank in ranks:
        assert_same_run(rank[case], alone[case])


def assert_silent(ranks: list[dict], case: str):
    """One rank alone, or both in the same step, have nothing to learn from."""
    pairs = list(zip(*(rank[case]["counted"] for rank in ranks), strict=True))
    if case == "silent_rows":
        assert any((a == 0) != (b == 0) for a, b in pairs)
    else:
        assert (0, 0) in pairs


def test_d1_both_ranks_hold_the_same_parameters(ranks):
    assert_same_parameters(ranks)


def assert_same_parameters(ranks: list[dict]):
    for case in ranks[0]:
        for name, parameter in ranks[0][case]["parameters"].items():
            assert torch.equal(ranks[1][case]["parameters"][name], parameter), (case, name)


def test_c3_two_ranks_draw_the_anchors_that_one_process_draws(alone, ranks):
    """A document's anchors do not depend on the rank that trains on it."""
    drawn = [anchors for rank in ranks for anchors in rank["four_rows"]["anchors"]]
    assert sorted(drawn) == sorted(alone["four_rows"]["anchors"])
    assert ranks[0]["four_rows"]["anchors"] != ranks[1]["four_rows"]["anchors"]


def test_c5_two_ranks_resume_in_the_second_epoch(alone, ranks):
    """2 steps an epoch, resumed after the third: rows and anchors of the fourth, and the weights bit for bit."""
    for rank in ranks:
        assert_same_run(rank["saved"], alone["saved"])
        assert rank["resumed"]["anchors"] == rank["saved"]["anchors"][-1:]
        assert rank["resumed"]["losses"] == rank["saved"]["losses"]
        for name, parameter in rank["saved"]["parameters"].items():
            assert torch.equal(rank["resumed"]["parameters"][name], parameter), name


def test_d2_a_last_step_that_does_not_fill_the_ranks_counts_no_row_twice(alone, ranks):
    """5 rows on 2 ranks: the loader repeats a row for the second rank, which must not change the step."""
    for rank in ranks:
        assert_same_run(rank["five_rows"], alone["five_rows"])


def test_evaluation_over_two_ranks_counts_every_row_once(alone, ranks):
    """3 rows on 2 ranks: the loader repeats a row, which must not change the figures."""
    expected = alone["evaluation"]["metrics"]
    for rank in ranks:
        for name in ("eval_loss", "eval_acceptance_length", "eval_accuracy", "eval_full_blocks"):
            assert rank["evaluation"]["metrics"][name] == pytest.approx(expected[name], rel=1e-5), name
        walked = {name: value for name, value in expected.items() if "accept" in name}
        assert len(walked) == 5 and walked.items() <= rank["evaluation"]["metrics"].items()
    counts = [run["evaluation"]["walked"] for run in (alone, *ranks)]
    assert torch.equal(counts[1] + counts[2], counts[0]) and counts[0].sum() > 0
