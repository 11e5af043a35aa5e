# SPDX-License-Identifier: Apache-2.0
"""What a round costs beside a forward of a block, in floating-point operations, and the benchmark of its time."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from oracle import drafter_for
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import DynamicCache

from dflash_hf.generation import DecodingState


torch.set_num_threads(1)

# Qwen3.6-27B's proportions: of the hidden size 3.4 for the MLP, 0.4 for keys and 1.2 for values of recurrent layers.
PROPORTIONS = {
    "hidden_size": 256,
    "intermediate_size": 870,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 48,
    "head_dim": 64,
}
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def operations(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@torch.no_grad()
def cost_of_rounds(target, drafter, prompt_length):
    """Operations of rounds that commit 1 to b tokens in turn, over those of the target's forward of a block."""
    prompt = torch.arange(prompt_length)[None] % 250
    block = torch.arange(16)[None]
    cache = DynamicCache(config=target.config)
    target(prompt, cache=cache, use_cache=True, logits_to_keep=1)
    forward = operations(lambda: target(block, cache=cache, use_cache=True))
    total = 0
    with DecodingState(target, drafter) as state:
        state.prefill(prompt)
        # The first draft reads the prompt.
        state.draft(block[:, :1])
        state.verify(block[:, :1], block[0, 1:])
        state.commit(block[:, :5])
        commits = [1 + 5 * i % 16 for i in range(16)]
        for committed in commits:
            total += operations(lambda: state.draft(block[:, :1]))
            total += operations(lambda: state.verify(block[:, :1], block[0, 1:]))
            state.commit(block[:, :committed])
    return total / len(commits) / forward


def test_a_round_with_a_hybrid_target_costs_little_more_than_a_forward_whatever_the_prompt():
    target = tiny.hybrid_target(num_layers=16, **PROPORTIONS)
    sizes = {name: PROPORTIONS[name] for name in ("hidden_size", "intermediate_size")}
    drafter = drafter_for(target, layer_types=["full_attention"], window=None, block_size=16, **sizes)
    short, long = cost_of_rounds(target, drafter, 40), cost_of_rounds(target, drafter, 1500)
    assert 1.0 < short <= 1.4 and 1.0 < long <= 1.4
    # In proportion to the forward, which itself attends to the prompt.
    assert long <= short + 0.02


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    spec = importlib.util.spec_from_file_location("benchmark_decoding", RECIPES / "benchmark_decoding.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_decoding", module)
    spec.loader.exec_module(module)
    return module


def run(monkeypatch, module, *words):
    monkeypatch.setattr(sys, "argv", ["benchmark_decoding.py", *map(str, words)])
    module.main()


@pytest.mark.parametrize("make_target", [tiny.hybrid_target, tiny.dense_target])
def test_the_benchmark_prints_and_writes_the_parts_of_a_round(benchmark, monkeypatch, capsys, tmp_path, make_target):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    drafter_for(target).save_pretrained(tmp_path / "drafter")
    run(
        monkeypatch, benchmark, "--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--device", "cpu",
        "--prompt_lengths", 8, 30, "--num_rounds", 3, "--output", tmp_path / "results.json",
    )  # fmt: skip
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["prompt_length"] for row in rows] == [8, 30]
    for row in rows:
        assert row["round"] == pytest.approx(row["draft"] + row["verify"] + row["commit"])
        assert row["ratio"] == pytest.approx(row["round"] / row["forward"]) and row["ratio"] > 0
        assert row["token"] > 0 and row["snapshot"] >= 0 and row["rollback"] >= 0
    printed = capsys.readouterr().out
    assert "| 30 |" in printed and "On average a round takes" in printed


def test_what_the_benchmark_cannot_run_is_refused(benchmark, monkeypatch, capsys):
    for words, message in (
        (["--target", "x"], "Give a target together with its drafter"),
        (["--shape", "huge"], "choose small-hybrid or qwen3.6-27b"),
        (["--num_rounds", "0"], "must be at least 1"),
        (["--dtype", "float17"], "dtype is 'float17'"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, benchmark, *words)
        assert message in capsys.readouterr().err


def test_the_benchmark_refuses_the_drafter_of_another_target(benchmark, monkeypatch, tmp_path):
    target = tiny.dense_target()
    target.save_pretrained(tmp_path / "target")
    drafter_for(target, num_target_layers=9).save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match="num_target_layers is 9, the target's is 6"):
        run(monkeypatch, benchmark, "--target", tmp_path / "target", "--drafter", tmp_path / "drafter")


def test_the_states_that_the_benchmark_copies_are_those_of_the_recurrent_layers(benchmark):
    for make_target in (tiny.hybrid_target, tiny.dense_target):
        target = make_target()
        cache = DynamicCache(config=target.config)
        target(torch.arange(12)[None], cache=cache, use_cache=True)
        layers = sum("linear" in kind for kind in target.config.to_dict().get("layer_types") or [])
        # A convolution's inputs and a matrix per head.
        assert len(benchmark.recurrent_states(cache)) == 2 * layers
        assert layers > 0 or make_target is tiny.dense_target
