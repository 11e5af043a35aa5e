# SPDX-License-Identifier: Apache-2.0
"""Parts of the trainer: compiled layers, 8-bit AdamW, and NCCL ranks, which only two GPUs can show."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import killing
import numpy as np
import pytest
import test_launch
import torch
import torch.distributed as dist
from naive import pack_rows, packed_forward, random_drafter, random_inputs
from runs import make_trainer
from test_pair_recipe import load_recipe
from test_pairs_launch import CONFIGS, ROOT, environment, largest_difference, launch, results, train
from tiny import dense_target
from torch.nn.parallel import DistributedDataParallel

from dflash_hf.data_collator import DataCollatorForDFlash, num_valid_anchors
from dflash_hf.masking import block_position_ids, training_masks
from dflash_hf.packing import PackedDataset
from dflash_hf.trainer import compile_layers


FULL, SLIDING = "full_attention", "sliding_attention"


def mixed_documents(count: int, seed: int = 0) -> list[dict]:
    """Documents of 5 to 120 tokens with one or two supervised stretches."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        n = int(random.integers(5, 120))
        cut = int(random.integers(1, n))
        spans = [[1, cut], [min(cut + 2, n), n]] if cut > 1 else [[1, n]]
        documents.append({"input_ids": random.integers(0, 200, n).tolist(), "supervised_spans": spans})
    return documents


def test_valid_anchors_are_counted_for_all_documents_at_once():
    documents = [*mixed_documents(40), {"input_ids": [1, 2], "supervised_spans": []}]
    collator = DataCollatorForDFlash(block_size=4, num_anchors=1000, max_anchors_per_row=1000)
    expected = [sum(b - a - 1 for a, b in _merged(document["supervised_spans"])) for document in documents]
    assert num_valid_anchors(documents).tolist() == expected
    rows = [{"epoch": 0, "documents": [{"document": i, **documents[i]}]} for i in range(40)]
    found = (collator(rows)["anchor_positions"] >= 0).sum(1).tolist()
    assert found == expected[:40]


def _merged(spans: list[list[int]]) -> list[tuple[int, int]]:
    supervised = {t for a, b in spans for t in range(a, b)}
    runs, start = [], None
    for t in range(max(supervised, default=-1) + 2):
        if t in supervised and start is None:
            start = t
        if t not in supervised and start is not None:
            runs.append((start, t))
            start = None
    return runs


def test_the_largest_row_sum_bounds_every_row_of_every_epoch():
    documents = mixed_documents(60)
    # Documents of equal length change places, with other numbers of anchors.
    documents += [{"input_ids": [1] * 50, "supervised_spans": [[0, n]]} for n in range(2, 50, 4)]
    rows = PackedDataset(documents, row_length=200, seed=3)
    values = num_valid_anchors(documents)
    bound = rows.largest_row_sum(values)
    sums = [
        sum(values[d["document"]] for d in rows[epoch, row]["documents"])
        for epoch in range(6)
        for row in range(len(rows))
    ]
    assert max(sums) <= bound < 2 * max(sums)


def test_p2_s1_fifty_batches_of_mixed_documents_compile_two_graphs():
    rows = PackedDataset(mixed_documents(120), row_length=256)
    collator = DataCollatorForDFlash(4, num_anchors=16, row_length=256, pad_anchors_to_multiple_of=64)
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=8)
    drafter.set_attn_implementation("flex_attention")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(drafter, backend="eager")
    width = drafter.fc.in_features
    for step in range(50):
        batch = collator([rows[step // len(rows), step % len(rows)]])
        anchors, documents = batch["anchor_positions"], batch["document_ids"]
        masks = training_masks(drafter.config, anchors, documents)
        positions = block_position_ids(batch["position_ids"], anchors, 4)
        context, noise = torch.randn(1, 256, width), torch.randn(1, anchors.shape[1] * 4, drafter.config.hidden_size)
        with torch.no_grad():
            compiled = drafter(noise, context, masks, positions).last_hidden_state
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one graph per kind of layer"
    for layer in drafter.layers:
        layer._compiled_call_impl = None
    # Uncompiled layers would call Inductor's flex attention, whose cached kernels fit the CPU that wrote them.
    drafter.set_attn_implementation("sdpa")
    masks = training_masks(drafter.config, anchors, documents)
    with torch.no_grad():
        expected = drafter(noise, context, masks, positions).last_hidden_state
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.fixture
def one_rank():
    """A process group of this process alone, in which DDP acts as among several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_training_compiles_the_graphs_of_one_rank(one_rank):
    """DDP's parameters are in buckets, here smaller than a matrix, which is not to cut the layers' graphs."""
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=8)
    rows = pack_rows([[(40, [3, 20])]])
    noise, context = random_inputs(drafter, rows)
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_layers(drafter, backend=count)
    wrapped = DistributedDataParallel(drafter, bucket_cap_mb=0.001)
    masks = training_masks(drafter.config, rows.anchor_positions, rows.document_ids)
    positions = block_position_ids(rows.position_ids, rows.anchor_positions, drafter.config.block_size)
    wrapped(noise, context, masks, positions).last_hidden_state.sum().backward()
    assert len(graphs) == 2, "one graph per kind of layer"
    torch.compiler.reset()


def test_the_attention_benchmark_compares_equal_work(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "recipes")
    import benchmark_attention

    output = tmp_path / "attention.json"
    benchmark_attention.main(["--num_tokens", "256", "--num_anchors", "32", "--repeats", "1", "--output", str(output)])
    report = json.loads(output.read_text())
    assert report["queries"] == 512 and report["keys"] == 768
    assert report["largest_relative_difference"] < 1e-5


def test_activation_checkpointing_changes_nothing_and_keeps_less():
    rows = pack_rows([[(30, [2, 7, 9, 25]), (16, [0, 5, 6])]], padding=3, unused=1)
    drafter = random_drafter([SLIDING, FULL], window=9).train()
    noise, context = random_inputs(drafter, rows)
    results, kept = [], []
    for checkpointing in (False, True):
        if checkpointing:
            drafter.activation_checkpointing_enable()
        drafter.zero_grad()
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            output = packed_forward(drafter, rows, noise, context)
        kept.append(sum(saved))
        output.pow(3).sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in drafter.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[1] < 0.5 * kept[0]


EIGHT_BIT = {"optim": "adamw_torch_8bit", "max_steps": 4, "save_steps": 2}


@pytest.fixture
def uncompiled():
    """torchao compiles its optimizers' step for every shape, which takes a CPU minutes and changes no result."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_c5_a_resumed_run_with_8_bit_adamw_is_the_same_run(tmp_path, uncompiled):
    """transformers' own argument, over fp32 masters; a changed learning rate acts as with other optimizers."""
    straight = make_trainer(tmp_path / "straight", **EIGHT_BIT)
    straight.train()
    optimizer = straight.optimizer.optimizer
    assert type(optimizer).__name__ == "AdamW8bit"
    states = [state["exp_avg"] for state in optimizer.state.values()]
    assert {type(state).__name__ for state in states if state.numel() >= 4096} == {"OptimState8bit"}
    assert all(p.dtype == torch.float32 for p in straight.model.parameters())
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    resumed = make_trainer(tmp_path / "resumed", **EIGHT_BIT)
    resumed.train(resume_from_checkpoint=checkpoint)
    for (name, parameter), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    faster = make_trainer(tmp_path / "faster", learning_rate=2e-3, **EIGHT_BIT)
    faster.train(resume_from_checkpoint=checkpoint)
    rates = [[e["learning_rate"] for e in t.state.log_history if "learning_rate" in e][-2:] for t in (faster, resumed)]
    assert rates[0] == pytest.approx([2 * rate for rate in rates[1]])


def test_a_step_that_is_not_finite_leaves_8_bit_adamw_alone(tmp_path, uncompiled):
    trainer = make_trainer(tmp_path, **EIGHT_BIT)
    weight, seen = trainer.model.norm.weight, []
    # The norm's gradient comes before that of the projection, so this is the second step.
    trainer.model.fc.weight.register_hook(lambda grad: grad * (float("nan") if len(seen) == 2 else 1.0))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))
    trainer.train()
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])
    states = [t for state in trainer.optimizer.optimizer.state.values() for t in state.values()]
    tensors = [t.dequantize() if hasattr(t, "dequantize") else t for t in states if isinstance(t, torch.Tensor)]
    assert tensors and all(tensor.isfinite().all() for tensor in tensors)


def test_variants_and_optimizers_are_timed_beside_the_plain_step(tmp_path, uncompiled, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    import benchmark

    output = tmp_path / "results.json"
    words = ["--shape", "tiny", "--device", "cpu", "--repeats", "1", "--warmup", "0", "--output", str(output)]
    benchmark.main([*words, "--variants", "plain,activation_checkpointing,float8", "--optimizer", "adamw,adamw_8bit"])
    rows = {row["part"]: row for row in json.loads(output.read_text())["rows"]}
    names = ["drafter+activation_checkpointing", "drafter+float8"]
    assert set(rows) == {"drafter", "drafter+adamw", "drafter+adamw_8bit", *names}
    assert all(rows[name]["check"]["within"] and rows[name]["against"]["name"] == "drafter" for name in names)
    held = {name: rows[f"drafter+{name}"]["optimizer_state_bytes"] for name in ("adamw", "adamw_8bit")}
    assert held["adamw_8bit"] < 0.5 * held["adamw"]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@two_gpus
def test_sigterm_to_the_launcher_of_nccl_ranks_leaves_a_checkpoint_that_resumes(tmp_path):
    newest = killing.signal_launcher(tmp_path, signal.SIGTERM, TWO_NCCL_RANKS, {}, **ON_GPUS)
    assert int(newest.name.split("-")[1]) < killing.STEPS
    resumed = killing.launched(tmp_path, TWO_NCCL_RANKS, {}, resume=True, **ON_GPUS)
    assert resumed.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    first, second = (killing.weights(tmp_path, rank) for rank in (0, 1))
    assert (tmp_path / "step-0").read_text() == str(killing.STEPS) == str(len(first["losses"]))
    assert all(torch.equal(p, second["parameters"][name]) for name, p in first["parameters"].items())


@pytest.mark.gpu
@two_gpus
def test_the_recipe_compares_nccl_ranks_and_their_weights_with_one_that_accumulates(tmp_path, monkeypatch):
    dense_target().config.save_pretrained(tmp_path / "target")
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
