# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf`, and one training by python, by `accelerate launch` and as two gloo ranks: the same each time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import killing
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.other import get_free_port
from runs import make_trainer
from tiny import hybrid_target, refused, write_chats
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from dflash_hf import DFlashDraftModel, DFlashTrainer, callbacks, commands
from dflash_hf.callbacks import INTERRUPTED_STATUS
from dflash_hf.topology import place


ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "recipes" / "accelerate"


def process(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=cwd, env=environment, **pipes)


def finished(started: subprocess.Popen, timeout: float = 300, status: int | None = 0) -> str:
    try:
        output = started.communicate(timeout=timeout)[0]
    finally:
        if started.poll() is None:
            started.kill()
    assert status is None or started.returncode == status, output[-3000:]
    return output


# --- The commands


def test_help_lists_every_command_and_each_has_its_own(capsys):
    assert commands.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for command in commands.COMMANDS:
        assert command in printed
        with pytest.raises(SystemExit) as stopped:
            commands.main([command, "--help"])
        assert stopped.value.code == 0 and f"dflash-hf {command}" in capsys.readouterr().out


def test_version_and_wrong_commands(capsys):
    assert commands.main(["--version"]) == 0 and "dflash_hf" in capsys.readouterr().out
    assert commands.main(["trian"]) == 2 and "train" in capsys.readouterr().err
    with refused(SystemExit, "three_pairs", "two_pairs"):
        commands.main(["train", "--accelerate_config", "three_pairs"])


@pytest.mark.parametrize(("text", "devices"), [("gpu_ids: 1,0", "1,0"), ("gpu_ids: all", None), ("", None)])
def test_a_configuration_of_ones_own_names_the_gpus(text, devices, tmp_path, monkeypatch):
    # Set first, so that what the command sets is undone too.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    (tmp_path / "own.yaml").write_text(text)
    rest = commands.launch(
        "train", ["--target", "t", "--accelerate_config", str(tmp_path / "own.yaml"), "--seed", "1"]
    )
    assert rest == ["--target", "t", "--seed", "1"] and os.environ.get("CUDA_VISIBLE_DEVICES") == devices


SMALL = ["--num_layers", "1", "--num_attention_heads", "2", "--num_key_value_heads", "1", "--head_dim", "32"]
SMALL += ["--intermediate_size", "64", "--block_size", "4", "--row_length", "128", "--max_length", "96"]
SMALL += ["--num_anchors", "8", "--logging_steps", "1", "--use_cpu", "true", "--report_to", "none"]


def test_a_shipped_configuration_trains_and_a_signal_ends_it_with_a_checkpoint(target_folder, tmp_path):
    chats, output = write_chats(tmp_path / "chats.jsonl"), tmp_path / "drafter"
    words = ["-m", "dflash_hf.commands", "train", "--accelerate_config=cpu", "--target", str(target_folder)]
    words += ["--completions", str(chats), *SMALL, "--output_dir", str(output), "--max_steps", "9999"]
    started = process(*words, "--save_steps", "2", "--save_total_limit", "2")
    deadline = time.monotonic() + 90
    while not list(output.glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    finished(started, timeout=60, status=INTERRUPTED_STATUS)
    steps = sorted(int(path.name.rpartition("-")[2]) for path in output.glob("checkpoint-*"))
    assert json.loads((output / f"checkpoint-{steps[-1]}" / "trainer_state.json").read_text())["global_step"] >= 2


def test_every_accelerate_configuration_says_what_it_is_and_places_pairs():
    files = sorted(CONFIGS.glob("*.yaml"))
    assert [file.stem for file in files] == ["cpu", "multi_node_pairs", "one_gpu", "one_pair", "two_pairs"]
    for file in files:
        lines = file.read_text().splitlines()
        assert lines[0].startswith("# ") and lines[1].startswith("# Memory")
        values = yaml.safe_load(file.read_text())
        assert load_config_from_file(str(file)).num_processes == values["num_processes"]
        ranks = values["num_processes"] // values["num_machines"]
        gpus = str(values.get("gpu_ids", "")).split(",") if "gpu_ids" in values else []
        placement = [place(rank, ranks, len(gpus)) for rank in range(ranks)]
        if "pair" in file.stem:  # drafters first in the order of gpu_ids, targets on GPUs 0 and 1
            assert [gpus[p.target[0].index] for p in placement] == [str(i) for i in range(ranks)]


# --- One training on one process and on two

SCRIPT = """
import sys
from test_commands import train_cases

if __name__ == "__main__":
    train_cases(*sys.argv[1:])
"""

CASES = {
    "two_rows": {"num_supervised": [2, 9, 2, 9], "rows_per_step": 2},
    "four_rows": {"num_supervised": [2, 9, 2, 9, 3, 9, 2, 12], "rows_per_step": 4},
    "silent_rows": {"num_supervised": [0, 9, 0, 12], "rows_per_step": 2, "num_train_epochs": 2, "max_steps": 4},
    "only_silent_rows_in_a_step": {"num_supervised": [0, 0, 0, 9], "rows_per_step": 2},
    "ahead": {"num_supervised": [2, 9, 2, 9, 6], "rows_per_step": 2, "max_steps": -1, "num_train_epochs": 2},
    "accumulating": {"num_supervised": [2, 9, 2, 9, 6], "rows_per_step": 6, "max_steps": -1, "num_train_epochs": 2},
    "adamw": {
        "num_supervised": [2, 9, 2, 9], "rows_per_step": 2, "optim": "adamw_torch", "learning_rate": 1e-3,
        "max_steps": 8,
    },
    "saved": {"num_supervised": [2, 9, 6, 12], "rows_per_step": 2, "max_steps": 4, "save_steps": 3},
    "resumed": {"num_supervised": [2, 9, 6, 12], "rows_per_step": 2, "max_steps": 4, "resume": 3},
    "evaluation": {"num_supervised": [2, 9, 6], "rows_per_step": 2, "evaluate": True, "train": False},
    "evaluated_first": {"num_supervised": [2, 9, 2, 9], "rows_per_step": 2, "evaluate": True},
}  # fmt: skip
CASES |= {f"{name}_in_turn": {**CASES[name], "prefetch_depth": 0} for name in ("ahead", "accumulating")}
COMPRESSED = {f"{n}_compressed": {**CASES[n], "ddp_bf16_compression": True} for n in ("ahead", "accumulating")}


# By the shipped configuration, each with target and drafter on its own GPU; kernels' compilation is not the point.
ON_GPUS = {"use_cpu": False, "bf16": True, "target_layout": "shared", "drafter_attn_implementation": "sdpa"}
ON_GPUS |= {"compile_layers": False, "learning_rate": 0.05}
NCCL = {
    f"{name}_nccl": {**CASES[name], **ON_GPUS} for name in ("two_rows", "silent_rows", "only_silent_rows_in_a_step")
}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def make_rows(num_supervised: list[int]) -> list[dict]:
    """Documents that fill a row each, with that many supervised tokens."""
    generator, rows = torch.Generator().manual_seed(0), []
    for number in num_supervised:
        length = int(torch.randint(17, 30, (1,), generator=generator))
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "supervised_spans": [[length - number, length]] if number else []})
    return rows


class Recorded(DFlashTrainer):
    """Notes the labels and anchors of each batch; `fails` breaks the target in its fifth forward."""

    fails = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            self.counted.append(int((inputs["labels"] != -100).sum()))
            self.anchors.append(inputs["anchor_positions"].tolist())
            if self.fails and len(self.counted) == 5:
                raise ArithmeticError("the fifth step breaks")
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def train(folder, num_supervised, rows_per_step, evaluate=False, train=True, resume=None, **arguments) -> dict:
    """Train with plain SGD, so that a wrong factor of the gradients shows."""
    # Asking accelerate before the arguments have set it up would make this one process.
    world = int(os.environ.get("WORLD_SIZE", 1))
    values = {
        "num_anchors": 8, "max_steps": 2, "learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 0.0,
        "save_strategy": "steps" if "save_steps" in arguments else "no",
        "gradient_accumulation_steps": rows_per_step // world,
    }  # fmt: skip
    rows, exchanges = make_rows(num_supervised), []

    def counted(state, bucket):
        exchanges.append(bucket.index())
        return bf16_compress_hook(state, bucket)

    callbacks.bf16_compress_hook = counted
    trainer = make_trainer(f"{folder}/run", documents=rows, cls=Recorded, eval_dataset=rows, **{**values, **arguments})
    trainer.counted, trainer.anchors, result = [], [], {}
    if evaluate:
        result["metrics"] = trainer.evaluate()
    if train:
        trainer.train(resume_from_checkpoint=resume and f"{folder}/run/checkpoint-{resume}")
    return result | {
        "world": trainer.args.world_size,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "parameters": {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters()},
        "counted": trainer.counted,
        "anchors": trainer.anchors,
        "exchanges": exchanges.count(0),
    }


def train_cases(folder: str, names: str, fails: str = "") -> None:
    """What the ranks run: the named cases, and what each rank saw as a file."""
    from accelerate import PartialState

    from dflash_hf.callbacks import end_together

    torch.set_num_threads(1)
    Recorded.fails = fails == "fails" and os.environ["RANK"] == "1"
    with end_together():
        results = {name: train(folder, **(CASES | COMPRESSED | NCCL)[name]) for name in names.split(",")}
        torch.save(results, f"{folder}/{PartialState().process_index}.pt")


def launch(folder: Path, *launcher: str, cases=(*CASES,), config: str = "two_pairs.yaml", fails: str = "") -> list:
    """Start the script as processes of a shipped configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    launcher = launcher or ("--main_process_port", "0")
    words = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config), *launcher]
    return process(*words, str(folder / "script.py"), str(folder), ",".join(cases), fails, cwd=folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """This process: it accumulates two rows for each rank's one."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: train(folder, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    finished(launch(folder, cases=[*CASES, *COMPRESSED]))
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))]


def largest_difference(result: dict, expected: dict) -> float:
    return max((result["parameters"][n] - p).abs().max().item() for n, p in expected["parameters"].items())


def test_accelerate_launch_and_plain_python_train_the_same(alone, tmp_path):
    finished(launch(tmp_path, cases=["two_rows", "ahead"], config="cpu.yaml"))
    launched = torch.load(tmp_path / "0.pt")
    for name, result in launched.items():
        assert result["world"] == 1 and result["losses"] == alone[name]["losses"]
        assert largest_difference(result, alone[name]) == 0


def test_the_ranks_are_two_and_hold_the_same_weights(alone, ranks):
    assert len(ranks) == 2
    for name, result in ranks[0].items():
        assert result["world"] == ranks[1][name]["world"] == 2
        assert largest_difference(ranks[1][name], result) == 0


@pytest.mark.parametrize("case", sorted(set(CASES) - {"evaluation"}))
def test_d2_two_ranks_equal_one_process_that_accumulates(case, alone, ranks):
    """Rows of few and of many labels, a last step that does not fill the ranks, a resume: each counts once."""
    for rank in ranks:
        assert rank[case]["losses"] == pytest.approx(alone[case]["losses"], rel=1e-5)
        assert largest_difference(rank[case], alone[case]) <= 1e-6
    if case in ("two_rows", "four_rows"):
        counted = [count for rank in ranks for count in rank[case]["counted"]]
        assert sorted(counted) == sorted(alone[case]["counted"]) and len(set(counted)) > 1


def test_d1_a_rank_with_nothing_to_learn_from_takes_part(ranks):
    """One rank alone, or both in the same step; that they train as one process is shown above."""
    pairs = list(zip(*(rank["silent_rows"]["counted"] for rank in ranks), strict=True))
    assert any((a == 0) != (b == 0) for a, b in pairs)
    assert (0, 0) in list(zip(*(rank["only_silent_rows_in_a_step"]["counted"] for rank in ranks), strict=True))


def test_c3_two_ranks_draw_the_anchors_that_one_process_draws(alone, ranks):
    drawn = [anchors for rank in ranks for anchors in rank["four_rows"]["anchors"]]
    assert sorted(drawn) == sorted(alone["four_rows"]["anchors"])
    assert ranks[0]["four_rows"]["anchors"] != ranks[1]["four_rows"]["anchors"]


def test_c5_two_ranks_resume_in_the_second_epoch(ranks):
    """2 steps an epoch, resumed after the third: rows and anchors of the fourth, and the weights bit for bit."""
    for rank in ranks:
        assert rank["resumed"]["anchors"] == rank["saved"]["anchors"][-1:]
        assert rank["resumed"]["losses"] == rank["saved"]["losses"]
        assert largest_difference(rank["resumed"], rank["saved"]) == 0


def test_depth_changes_no_bit_on_one_and_two_ranks(alone, ranks):
    for result in (alone, *ranks):
        for name in ("ahead", "accumulating"):
            assert result[name]["losses"] == result[f"{name}_in_turn"]["losses"]
            assert largest_difference(result[name], result[f"{name}_in_turn"]) == 0


def test_evaluation_over_two_ranks_counts_every_row_once(alone, ranks):
    """3 rows on 2 ranks: the loader repeats a row, which must not change the figures."""
    expected = alone["evaluation"]["metrics"]
    for rank in ranks:
        for name in ("eval_loss", "eval_acceptance_length", "eval_accuracy"):
            assert rank["evaluation"]["metrics"][name] == pytest.approx(expected[name], rel=1e-5), name


def test_compressed_gradients_change_the_loss_by_rounding_only_and_cross_once_a_step(ranks):
    """bf16 keeps 8 bits: weights differ, and losses agree to its rounding. 5 rows, two epochs: 6 steps, or 2."""
    exact, compressed = ranks[0]["ahead"], ranks[0]["ahead_compressed"]
    assert 0 < largest_difference(compressed, exact) < 2e-2
    assert compressed["losses"] == pytest.approx(exact["losses"], rel=2e-2)
    for rank in ranks:
        assert rank["ahead_compressed"]["exchanges"] == len(compressed["losses"]) == 6
        assert rank["accumulating_compressed"]["exchanges"] == 2


def test_a_failing_rank_ends_both_with_its_own_traceback(tmp_path):
    started = launch(tmp_path, cases=["adamw"], fails="fails")
    output = finished(started, timeout=90, status=None)
    assert started.returncode != 0 and "the fifth step breaks" in output and "compute_loss" in output


@pytest.mark.slow
def test_two_launches_on_loopback_make_the_machines_of_multi_node_pairs(tmp_path, alone):
    port = str(get_free_port())
    launches = [
        launch(tmp_path, "--machine_rank", rank, "--num_processes", "2", "--main_process_port", port,
               cases=["ahead"], config="multi_node_pairs.yaml")
        for rank in ("0", "1")
    ]  # fmt: skip
    for started in launches:
        finished(started, timeout=200)
    saved = [torch.load(path)["ahead"] for path in sorted(tmp_path.glob("*.pt"))]
    assert [result["world"] for result in saved] == [2, 2]
    for result in saved:
        assert largest_difference(result, alone["ahead"]) <= 1e-6


@pytest.mark.slow
def test_two_ranks_plan_and_try_out_by_the_shipped_configuration(tmp_path):
    hybrid_target().config.save_pretrained(tmp_path / "target")
    words = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "two_pairs.yaml")]
    words += ["--main_process_port", "0", "recipes/train_qwen36.py", *SMALL, "--output_dir", str(tmp_path / "out")]
    words += ["--random_target_config", str(tmp_path / "target" / "config.json"), "--num_synthetic_documents", "12"]
    words += ["--synthetic_length", "32", "--target", "none", "--mask_token_id", "260"]
    finished(process(*words, "--dry_run", "true"))
    assert json.loads((tmp_path / "out" / "dry_run.json").read_text())["world_size"] == 2
    assert finished(process(*words, "--preflight", "true")).count(": ok") == 4


@pytest.mark.slow
def test_no_run_of_twenty_aborts_at_its_exit(tmp_path):
    for number in range(20):
        output = finished(launch(tmp_path / str(number), cases=["two_rows"]))
        assert "abort" not in output.lower() and "terminate called" not in output


@pytest.mark.gpu
@two_gpus
def test_two_nccl_ranks_equal_one_that_accumulates(tmp_path):
    """A rank with nothing to learn from takes part there too (d1)."""
    finished(launch(tmp_path, "--gpu_ids", "0,1", "--main_process_port", "0", cases=NCCL))
    first, second = (torch.load(path) for path in sorted(tmp_path.glob("*.pt")))
    for name in NCCL:
        alone = train(tmp_path / "alone", **NCCL[name])
        assert first[name]["world"] == second[name]["world"] == 2 and alone["world"] == 1
        assert largest_difference(first[name], second[name]) == 0
        assert first[name]["losses"] == pytest.approx(alone["losses"], rel=1e-2)
        assert largest_difference(first[name], alone) < 1e-2


@pytest.mark.gpu
@two_gpus
def test_sigterm_to_the_launcher_of_nccl_ranks_leaves_a_checkpoint_that_resumes(tmp_path):
    config = ("--config_file", str(CONFIGS / "two_pairs.yaml"), "--gpu_ids", "0,1")
    newest = killing.signal_launcher(tmp_path, signal.SIGTERM, config, {}, **ON_GPUS)
    assert int(newest.name.split("-")[1]) < killing.STEPS
    resumed = killing.launched(tmp_path, config, {}, resume=True, **ON_GPUS)
    assert resumed.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    first, second = (killing.weights(tmp_path, rank) for rank in (0, 1))
    assert (tmp_path / "step-0").read_text() == str(killing.STEPS) == str(len(first["losses"]))
    assert all(torch.equal(p, second["parameters"][name]) for name, p in first["parameters"].items())


def test_two_ranks_of_the_command_compare_their_weights(target_folder, tmp_path):
    words = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "two_pairs.yaml")]
    words += ["--main_process_port", "0", "recipes/train_qwen36.py", *SMALL, "--output_dir", str(tmp_path / "out")]
    words += ["--target", str(target_folder), "--completions", str(write_chats(tmp_path / "chats.jsonl"))]
    output = finished(process(*words, "--compare_ranks_steps", "1", "--max_steps", "2", "--save_strategy", "no"))
    found = json.loads((tmp_path / "out" / "ranks.json").read_text())
    assert found == {"steps": [1, 2], "largest_difference": [0.0, 0.0], "world_size": 2}
    assert "between the 2 ranks" in output


def test_the_recipe_trains_and_continues_by_accelerate_launch(target_folder, tmp_path):
    chats, first, second = str(write_chats(tmp_path / "chats.jsonl")), tmp_path / "first", tmp_path / "second"
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu", "recipes/train_qwen36.py"]
    common = ["--target", str(target_folder), "--completions", chats, "--max_steps", "2"]
    finished(process(*launch, *common, *SMALL, "--eval_completions", chats, "--output_dir", str(first)))
    assert json.loads((first / "eval_results.json").read_text())["eval_acceptance_length"] >= 1
    more = ["--config", "recipes/qwen3.6-27b/continue.yaml", "--drafter", str(first), "--output_dir", str(second)]
    more += ["--bf16", "false", "--target_model_init_kwargs", '{"dtype": "float32"}', "--num_anchors", "8"]
    finished(process("-m", "dflash_hf.commands", "train", *common, *more, "--use_cpu", "true", "--row_length", "128"))
    drafters = [DFlashDraftModel.from_pretrained(folder) for folder in (first, second)]
    written = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    assert written[0] == written[1]
    assert all(not torch.equal(a, b) for a, b in zip(*(d.parameters() for d in drafters), strict=True))
