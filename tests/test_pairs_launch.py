# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks by `accelerate launch` with the shipped configurations: prefetching, failures, gradients, exits."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.utils.other import get_free_port
from test_prefetch import FailsAtBatch5, make_trainer, target_threads
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashTrainer, callbacks


ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "recipes" / "accelerate"

# Trains with every set of arguments it is given and saves losses and weights of each.
SCRIPT = """
import json
import sys

import torch
from accelerate import PartialState
from test_pairs_launch import train

from dflash_hf.callbacks import end_together

if __name__ == "__main__":
    folder, runs, fails = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:] == ["fail"]
    torch.set_num_threads(1)
    with end_together():
        results = {name: train(folder, name, fails=fails, **arguments) for name, arguments in runs.items()}
        torch.save(results, f"{folder}/{PartialState().process_index}.pt")
"""


def train(folder, name, depth, rows_per_step=2, resume=None, fails=False, target=None, **arguments) -> dict:
    """One run of plain SGD, with which a wrong factor of the gradients shows; `target` is a folder."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    breaks = fails and int(os.environ["RANK"]) == world - 1
    values = {"num_documents": 5, "num_train_epochs": 2, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    model = target and AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    trainer = make_trainer(
        f"{folder}/{name}", depth, target=model, trainer_class=FailsAtBatch5 if breaks else DFlashTrainer,
        gradient_accumulation_steps=rows_per_step // world, **{**values, **arguments},
    )  # fmt: skip
    exchanges = []

    def counted(state, bucket):
        exchanges.append(bucket.index())
        return bf16_compress_hook(state, bucket)

    callbacks.bf16_compress_hook = counted
    trainer.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
    return {
        "exchanges": exchanges.count(0),
        "world": trainer.args.world_size,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "parameters": {n: p.detach().cpu().clone() for n, p in trainer.model.named_parameters()},
        "threads": len(target_threads()),
    }


CASES = {
    "in_turn": {"depth": 0},
    "ahead": {"depth": 2},
    "in_turn_accumulating": {"depth": 0, "rows_per_step": 6},
    "ahead_accumulating": {"depth": 2, "rows_per_step": 6},
    "adamw": {"depth": 2, "optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 10, "num_train_epochs": 9},
    "saved": {"depth": 2, "save_strategy": "steps", "save_steps": 1},
    "resumed": {"depth": 2, "resume": "saved/checkpoint-1"},
}
COMPRESSED = {
    "compressed": {"depth": 2, "ddp_bf16_compression": True},
    "compressed_accumulating": {"depth": 2, "ddp_bf16_compression": True, "rows_per_step": 6},
}


def command(folder: Path, config: str, runs: dict, *words: str, launcher: tuple[str, ...] = ()) -> list[str]:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config), *launcher]
    return [sys.executable, *launch, str(script), str(folder), json.dumps(runs), *words]


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def launch(
    folder: Path, config: str, runs: dict, *words: str, timeout: float = 300, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    launcher = (*launcher, "--main_process_port", "0")
    return subprocess.run(
        command(folder, config, runs, *words, launcher=launcher),
        env=environment(), cwd=folder.parent, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def results(folder: Path, finished: subprocess.CompletedProcess) -> list[dict]:
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {name: train(folder, name, **arguments) for name, arguments in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return results(folder, launch(folder, "two_pairs.yaml", CASES | COMPRESSED))


def largest_difference(result: dict, expected: dict) -> float:
    return max((result["parameters"][n] - p).abs().max().item() for n, p in expected["parameters"].items())


def test_the_shipped_configuration_makes_two_ranks_with_equal_weights(alone, ranks):
    assert len(ranks) == 2 and all(r["world"] == 1 for r in alone.values())
    for name, result in ranks[0].items():
        assert result["world"] == ranks[1][name]["world"] == 2
        assert result["threads"] == 0
        assert largest_difference(ranks[1][name], result) == 0


@pytest.mark.parametrize("case", sorted(CASES))
def test_d2_two_pairs_train_as_one_process_with_the_same_rows(case, alone, ranks):
    assert len(ranks[0][case]["losses"]) == len(alone[case]["losses"])
    assert ranks[0][case]["losses"] == pytest.approx(alone[case]["losses"], rel=1e-5)
    assert largest_difference(ranks[0][case], alone[case]) <= 1e-6


def test_depth_changes_no_bit_on_one_and_two_ranks(alone, ranks):
    for result in (alone, *ranks):
        for ahead, in_turn in (("ahead", "in_turn"), ("ahead_accumulating", "in_turn_accumulating")):
            assert result[ahead]["losses"] == result[in_turn]["losses"]
            assert largest_difference(result[ahead], result[in_turn]) == 0


def test_c3_an_epoch_resumed_on_two_ranks_counts_no_row_twice(alone, ranks):
    """5 rows on 2 ranks, resumed after the first step: the last step's repeated row counts nothing."""
    for result in (alone, *ranks):
        assert result["resumed"]["losses"] == result["saved"]["losses"]
        assert largest_difference(result["resumed"], result["saved"]) == 0


def test_compressed_gradients_change_the_loss_by_rounding_only(ranks):
    """bf16 keeps 8 bits: weights differ, and losses agree to its rounding after 6 steps."""
    exact, compressed = ranks[0]["ahead"], ranks[0]["compressed"]
    assert 0 < largest_difference(compressed, exact) < 2e-2
    assert compressed["losses"] == pytest.approx(exact["losses"], rel=2e-2)


def test_gradients_cross_once_per_optimizer_step(ranks):
    """5 rows on 2 ranks over two epochs: 6 steps of one row, or 2 of three."""
    for result in ranks:
        assert result["compressed"]["exchanges"] == len(result["compressed"]["losses"]) == 6
        assert result["compressed_accumulating"]["exchanges"] == 2


def test_a_failing_rank_ends_both_with_its_own_traceback(tmp_path):
    """The last rank's target breaks at the fifth batch, whose step the other rank waits for."""
    start = time.monotonic()
    finished = launch(tmp_path, "two_pairs.yaml", {"fails": {"depth": 2, "num_train_epochs": 9}}, "fail", timeout=90)
    assert finished.returncode != 0
    assert "the fifth forward breaks" in finished.stderr and "in counted" in finished.stderr
    assert time.monotonic() - start < 60  # of which importing takes most


@pytest.mark.slow
def test_two_launches_on_loopback_make_the_machines_of_multi_node_pairs(tmp_path, alone):
    port = str(get_free_port())
    runs = {"in_turn": CASES["in_turn"]}
    launches = [
        subprocess.Popen(
            command(tmp_path, "multi_node_pairs.yaml", runs,
                    launcher=("--machine_rank", rank, "--num_processes", "2", "--main_process_port", port)),
            env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=200)[0] for process in launches]
    finally:
        for process in launches:
            if process.poll() is None:
                process.kill()
    assert [process.returncode for process in launches] == [0, 0], outputs
    saved = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    assert [result["in_turn"]["world"] for result in saved] == [2, 2]
    for result in saved:
        assert largest_difference(result["in_turn"], alone["in_turn"]) <= 1e-6


def exits_cleanly(folder: Path, count: int) -> None:
    for _ in range(count):
        finished = launch(folder, "two_pairs.yaml", {"short": {"depth": 2, "max_steps": 1}})
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert "abort" not in finished.stderr.lower() and "terminate called" not in finished.stderr


@pytest.mark.slow
def test_no_run_of_twenty_aborts_at_its_exit(tmp_path):
    exits_cleanly(tmp_path, 20)
