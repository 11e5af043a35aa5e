# SPDX-License-Identifier: Apache-2.0
"""On GPUs: the prefetcher changes no loss, keeps its memory bound and really runs both halves at the same time."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import test_kills
import test_launch
import tiny
import torch
from test_pair_recipe import load_recipe
from test_pairs_launch import CONFIGS, ROOT, environment, largest_difference, launch, results, train
from test_prefetch import NO_DATALOADER, batches, documents, target_threads

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.packed_targets import PackedDense
from dflash_hf.planning import check_copy
from dflash_hf.prefetch import FeatureTransfer, Prefetcher, Throughput


pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LAYOUTS = ["shared", pytest.param("paired", marks=two_gpus)]


def run(folder, depth: int, layout: str, target: str = "dense_target", **arguments) -> dict:
    torch.manual_seed(0)
    model = getattr(tiny, target)()
    config = DFlashDraftConfig.from_target_config(
        model.config, num_hidden_layers=2, num_taps=2, mask_token_id=tiny.MASK_TOKEN_ID, block_size=4
    )
    args = DFlashTrainingArguments(
        output_dir=str(folder), row_length=64, num_anchors=8, num_train_epochs=2, logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="no", bf16=True, prefetch_depth=depth, target_layout=layout,
        **{"drafter_attn_implementation": "sdpa", "compile_layers": False, **arguments},
    )  # fmt: skip
    trainer = DFlashTrainer(DFlashDraftModel(config), model, args, train_dataset=documents(24))
    trainer.train()
    devices = {p.device for p in trainer.target.model.parameters()}
    assert devices == {torch.device("cuda", 0 if layout == "shared" else 1)}
    assert not target_threads()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "logs": [{**entry, **entry["details"]} for entry in trainer.state.log_history if "loss" in entry],
    }


# No weight changes, so that losses are of forwards alone: the backward of sdpa sums in the order in which its blocks
# come, in turn or not (torch's "non-deterministic algorithm" of memory-efficient attention).
STILL = {"learning_rate": 1e-30}
# What is trained with by default repeats to the bit, backward included.
COMPILED = {"drafter_attn_implementation": "flex_attention", "compile_layers": True}


@pytest.mark.parametrize("copies", ["peer", "host"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_g2_depth_changes_no_bit_of_a_loss(layout, copies, tmp_path):
    """cuDNN's attention was left out of the drafter's forward just when the target's thread was in its own."""
    expected = run(tmp_path, 0, layout, **STILL)["losses"]
    for depth in (1, 2):
        assert run(tmp_path, depth, layout, feature_copies=copies, **STILL)["losses"] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_g2_depth_changes_no_bit_of_training_with_flex_attention(layout, tmp_path):
    assert run(tmp_path, 2, layout, **COMPILED)["losses"] == run(tmp_path, 0, layout, **COMPILED)["losses"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_holds_times_of_the_devices(layout, tmp_path):
    logs = run(tmp_path, 2, layout, measure_alone_steps=3)["logs"]
    for name in ("step_seconds", "target_seconds", "drafter_seconds", "tokens_per_second", "drafter_peak_gigabytes"):
        assert all(entry[name] > 0 for entry in logs[:-1])
    assert ("target_peak_gigabytes" in logs[-1]) == (layout == "paired")


def grown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class CompilesInEveryStep(DFlashTrainer):
    """A trainer that compiles something in every step, beside what the drafter's layers and the target need."""

    def compute_loss(self, *args, **kwargs):
        torch.compile(grown, backend="aot_eager", dynamic=False)(torch.zeros(self.state.global_step + 2))
        return super().compute_loss(*args, **kwargs)


def run_compiled(folder, depth: int) -> tuple[list[float], int, set[str]]:
    """Losses of 30 steps on documents of very different lengths, batches left to the training thread, compilers."""
    torch._dynamo.reset()
    compilers: set[str] = set()
    torch._dynamo.callback.on_compile_start(lambda args: compilers.add(threading.current_thread().name))
    generator = torch.Generator().manual_seed(0)
    # More than half a row each, so that every row holds one, in rows of 640 to 1,280 tokens.
    lengths = torch.randint(601, 1200, (30,), generator=generator).tolist()
    rows = [
        {"input_ids": torch.randint(0, 256, (n,), generator=generator).tolist(), "supervised_spans": [[5, n]]}
        for n in lengths
    ]
    torch.manual_seed(0)
    model = tiny.dense_target()
    config = DFlashDraftConfig.from_target_config(
        model.config, num_hidden_layers=2, num_taps=2, mask_token_id=tiny.MASK_TOKEN_ID, block_size=4
    )
    args = DFlashTrainingArguments(
        output_dir=str(folder), row_length=1200, num_anchors=8, max_steps=30, logging_steps=1, report_to="none",
        disable_tqdm=True, save_strategy="no", bf16=True, prefetch_depth=depth, target_layout="shared",
        compile_target=True,
    )  # fmt: skip
    trainer = CompilesInEveryStep(DFlashDraftModel(config), model, args, train_dataset=rows)
    # Without shapes that stand for any length the target compiles for each one, late ones too.
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, recompile_limit=1000, accumulated_recompile_limit=1000
    ):
        trainer.train()
    assert isinstance(trainer.target._packed, PackedDense)
    assert not target_threads()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.prefetcher._num_left, compilers


def test_p2_both_halves_may_compile_late(tmp_path):
    expected, *_ = run_compiled(tmp_path, 0)
    losses, num_left, compilers = run_compiled(tmp_path, 2)
    assert len(losses) == 30 and losses == pytest.approx(expected, rel=1e-3)
    assert 1 <= num_left <= 8
    assert "MainThread" in compilers and "dflash-target" not in compilers


class BusyTarget:
    """Multiplies matrices on its device, then gives its batch's number; remembers the most memory it saw."""

    def __init__(self, device: torch.device, size: int = 4096, repeats: int = 30, width: int = 2**22):
        self.device = device
        self.matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self.repeats, self.width = repeats, width

    def work(self, matrix: torch.Tensor) -> None:
        for _ in range(self.repeats):
            torch.matmul(matrix, matrix)

    def context_hidden_states(self, input_ids, document_lengths=None):
        number = input_ids.to(self.device, non_blocking=True)[0, 0]
        self.work(self.matrix)
        return torch.ones(1, 1, self.width, device=self.device, dtype=torch.bfloat16) * number


def step_milliseconds(target: BusyTarget, device: torch.device, depth: int, copies: str, steps: int = 30) -> float:
    prefetcher = Prefetcher(
        FeatureTransfer(target, [target.device], device, copies), device, depth, Throughput(device, [target.device])
    )
    matrix = target.matrix.to(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wrong = torch.zeros((), device=device)
    for number, batch in enumerate(prefetcher.look_ahead(batches(steps), NO_DATALOADER)):
        if number == 5:
            start.record(torch.cuda.current_stream(device))
        states = prefetcher.context_hidden_states(batch)
        wrong += (states != number).sum()
        target.work(matrix)
        del states
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    prefetcher.close()
    assert wrong.item() == 0
    return start.elapsed_time(end) / (steps - 5)


@two_gpus
@pytest.mark.parametrize("copies", ["peer", "host"])
def test_two_gpus_work_at_the_same_time(copies):
    target, device = BusyTarget(torch.device("cuda", 1)), torch.device("cuda", 0)
    step_milliseconds(target, device, 2, copies)
    in_turn, ahead = (step_milliseconds(target, device, depth, copies) for depth in (0, 2))
    assert ahead < 0.7 * in_turn


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_a_step_waits_for_a_device(layout, depth):
    """Token ids in pinned memory, as the dataloader gives them; torch raises where the host would wait."""
    device = torch.device("cuda", 0)
    target = BusyTarget(torch.device("cuda", 0 if layout == "shared" else 1), size=256, repeats=2)
    prefetcher = Prefetcher(
        FeatureTransfer(target, [target.device], device, "peer"), device, depth, Throughput(device, [target.device])
    )
    pinned = ({**batch, "input_ids": batch["input_ids"].pin_memory()} for batch in batches(9))
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = sum(prefetcher.context_hidden_states(b)[0, 0, 0] for b in prefetcher.look_ahead(pinned, NO_DATALOADER))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        prefetcher.close()
    assert total.item() == sum(range(9))


def test_one_gpu_is_not_slowed_down():
    device = torch.device("cuda", 0)
    target = BusyTarget(device)
    step_milliseconds(target, device, 2, "peer")
    in_turn, ahead = (step_milliseconds(target, device, depth, "peer") for depth in (0, 2))
    assert ahead < 1.15 * in_turn


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_memory_is_bounded_by_the_depth(layout, depth):
    """A slow drafter whose host runs far ahead: no more hidden states than the depth, the one in use and a margin."""
    device = torch.device("cuda", 0)
    target = BusyTarget(torch.device("cuda", 0 if layout == "shared" else 1), repeats=1, width=2**25)
    size = 2 * target.width
    prefetcher = Prefetcher(
        FeatureTransfer(target, [target.device], device, "peer"), device, depth, Throughput(device, [target.device])
    )
    matrix = target.matrix.to(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["active_bytes.all.current"]
    for batch in prefetcher.look_ahead(batches(20), NO_DATALOADER):
        states = prefetcher.context_hidden_states(batch)
        for _ in range(40):
            torch.matmul(matrix, matrix)
        del states
    torch.cuda.synchronize(device)
    prefetcher.close()
    # On a shared GPU the target's own product is twice there while it is made.
    allowed = depth + 1 + (2 if layout == "shared" else 0)
    # Active memory: what was freed but is still used by another stream counts.
    peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"]
    assert peak - before <= allowed * size + 3 * matrix.nbytes


SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"


@two_gpus
@pytest.mark.parametrize("target", [None, SMOLLM2], ids=["tiny", "smollm2"])
def test_two_nccl_ranks_equal_one_that_accumulates(target, tmp_path):
    """Each rank with target and drafter on its own GPU, by the shipped configuration with two visible GPUs."""
    if target is not None and not target.is_dir():
        pytest.skip(f"{target} is not there; recipes/smollm2-135m/get_target.py makes it")
    runs = {"run": {"depth": 2, "use_cpu": False, "bf16": True, "learning_rate": 0.05, "target_layout": "shared"}}
    runs["run"] |= {"num_documents": 8, "target": target and str(target)}
    # What is compared is the sum over ranks, not kernels, whose compilation would take most of the time.
    runs["run"] |= {"drafter_attn_implementation": "sdpa", "compile_layers": False}
    finished = launch(tmp_path / "ranks", "two_pairs.yaml", runs, launcher=("--gpu_ids", "0,1"))
    first, second = (rank["run"] for rank in results(tmp_path / "ranks", finished))
    alone = train(tmp_path / "alone", "run", **runs["run"])
    assert first["world"] == second["world"] == 2 and alone["world"] == 1
    assert largest_difference(first, second) == 0
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-2)
    assert largest_difference(first, alone) < 1e-2


# By the shipped configuration, each rank with target and drafter on its own GPU.
TWO_NCCL_RANKS = ("--config_file", str(CONFIGS / "two_pairs.yaml"), "--gpu_ids", "0,1")
ON_GPUS = {"use_cpu": False, "bf16": True, "target_layout": "shared", "drafter_attn_implementation": "sdpa"}
ON_GPUS |= {"compile_layers": False}


@two_gpus
def test_d1_an_nccl_rank_with_nothing_to_learn_from_takes_part(tmp_path):
    """One rank's row, and both ranks' in a step, hold nothing: all steps are taken, and the weights stay equal."""
    cases = dict.fromkeys(("silent_rows", "only_silent_rows_in_a_step"), ON_GPUS)
    module = ("-m", "accelerate.commands.launch")
    ranks = test_launch.launch(tmp_path / "ranks", *module, *TWO_NCCL_RANKS, "--main_process_port", "0", cases=cases)
    assert len(ranks) == 2
    for case, steps in (("silent_rows", 4), ("only_silent_rows_in_a_step", 2)):
        test_launch.assert_silent(ranks, case)
        assert all(rank[case]["world"] == 2 and len(rank[case]["losses"]) == steps for rank in ranks)
    test_launch.assert_same_parameters(ranks)


@two_gpus
def test_sigterm_to_the_launcher_of_nccl_ranks_leaves_a_checkpoint_that_resumes(tmp_path):
    newest = test_kills.signal_launcher(tmp_path, signal.SIGTERM, TWO_NCCL_RANKS, {}, **ON_GPUS)
    assert int(newest.name.split("-")[1]) < test_kills.STEPS
    resumed = test_kills.launched(tmp_path, TWO_NCCL_RANKS, {}, resume=True, **ON_GPUS)
    assert resumed.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    first, second = (test_kills.weights(tmp_path, rank) for rank in (0, 1))
    assert (tmp_path / "step-0").read_text() == str(test_kills.STEPS) == str(len(first["losses"]))
    assert all(torch.equal(p, second["parameters"][name]) for name, p in first["parameters"].items())


@two_gpus
def test_the_recipe_compares_nccl_ranks_and_their_weights_with_one_that_accumulates(tmp_path, monkeypatch):
    tiny.dense_target().config.save_pretrained(tmp_path / "target")
    words = ["--target_model_init_kwargs", '{"dtype": "bfloat16"}']
    words += [word for name, value in ON_GPUS.items() for word in (f"--{name}", str(value).lower())]
    script, folders = tmp_path / "script.py", [tmp_path / "two", tmp_path / "one"]
    script.write_text(
        "import sys\nimport test_rank_comparison\nif __name__ == '__main__':\n"
        f"    test_rank_comparison.recipe({str(tmp_path)!r}, *sys.argv[1:])\n"
    )
    two = [*TWO_NCCL_RANKS, "--main_process_port", "0", str(script), "--compare_ranks_steps", "2"]
    one = ["--config_file", str(CONFIGS / "one_gpu.yaml"), str(script), "--gradient_accumulation_steps", "2"]
    for folder, launcher in zip(folders, (two, one), strict=True):
        command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, *words, "--output_dir", str(folder)]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads((folders[0] / "ranks.json").read_text())
    assert found == {"steps": [2, 4], "largest_difference": [0.0, 0.0], "world_size": 2}
    weights = load_recipe(monkeypatch, "report_pairs.py").weight_differences(
        *(folder / "checkpoint-4" for folder in folders)
    )
    # Other rows would give about 1e-2, another precision 3e-4.
    assert weights["relative_difference"] < 2e-3


@pytest.mark.parametrize("copies", ["peer", "host"])
def test_bytes_arrive_unchanged(copies):
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    check_copy(last, torch.device("cuda", 0), copies, num_bytes=2**24)
