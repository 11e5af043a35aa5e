# SPDX-License-Identifier: Apache-2.0
"""What torchao adds, on a CPU: 8-bit AdamW in the trainer, the study and the benchmark, fp8 products in the latter."""

import json
import sys
from pathlib import Path

import pytest
import torch
from runs import make_trainer


RECIPES = Path(__file__).resolve().parents[1] / "recipes"
sys.path[:0] = [str(RECIPES), str(RECIPES / "smollm2-135m")]

import benchmark  # noqa: E402
import benchmark_variants  # noqa: E402
import study_training  # noqa: E402
from benchmark_arguments import BenchmarkArguments  # noqa: E402
from benchmark_shapes import make_drafter, shapes  # noqa: E402
from benchmark_variants import check_variant, make_variant, state_tensors  # noqa: E402
from study_training import Run, make_optimizer  # noqa: E402


CPU = torch.device("cpu")
TINY = shapes()["tiny"]
QUICK = ["--shape", "tiny", "--device", "cpu", "--repeats", "1", "--warmup", "0"]
EIGHT_BIT = {"optim": "adamw_torch_8bit", "max_steps": 4, "save_steps": 2}


@pytest.fixture(autouse=True)
def uncompiled():
    """torchao compiles its optimizers' step for every shape, which takes a CPU minutes and changes no result."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_c5_a_resumed_run_with_8_bit_adamw_is_the_same_run(tmp_path):
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


def test_a_step_that_is_not_finite_leaves_8_bit_adamw_alone(tmp_path):
    trainer = make_trainer(tmp_path, **EIGHT_BIT)
    weight, seen = trainer.model.norm.weight, []
    # The norm's gradient comes before that of the projection, so this is the second step.
    trainer.model.fc.weight.register_hook(lambda grad: grad * (float("nan") if len(seen) == 2 else 1.0))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))
    trainer.train()
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])
    states = state_tensors(trainer.optimizer.optimizer)
    assert states and all(tensor.isfinite().all() for tensor in states)


def test_variants_and_optimizers_are_timed_beside_the_plain_step(tmp_path):
    output = tmp_path / "results.json"
    variants = "plain,activation_checkpointing,float8,activation_checkpointing+float8_rowwise"
    words = ["--variants", variants, "--optimizer", "adamw,muon,adamw_8bit", "--output", str(output)]
    benchmark.main([*QUICK, *words])
    rows = {row["part"]: row for row in json.loads(output.read_text())["rows"]}
    names = [f"drafter+{name}" for name in variants.split(",")[1:]]
    assert set(rows) == {"drafter", "drafter+adamw", "drafter+muon", "drafter+adamw_8bit", *names}
    for name in names:
        against = rows[name]["against"]
        assert against["name"] == "drafter"
        assert against["time_ratio"] == pytest.approx(rows[name]["seconds"] / rows["drafter"]["seconds"])
        assert rows[name]["check"]["within"]
        worst = max(against["relative_gradient_differences"].values())
        if "float8" in name:
            assert 1e-3 < worst < 0.3 and 0 < against["relative_loss_difference"] < 1e-2
        else:
            assert worst < 1e-5 and against["relative_loss_difference"] < 1e-6
    weights = sum(p.numel() for p in make_drafter(TINY, CPU).parameters())
    held = {name: rows[f"drafter+{name}"]["optimizer_state_bytes"] for name in ("adamw", "muon", "adamw_8bit")}
    assert held["adamw"] == pytest.approx(8 * weights, rel=0.01)
    assert held["muon"] == pytest.approx(4 * weights, rel=0.02)
    assert 2 * weights < held["adamw_8bit"] < 4 * weights  # small matrices and qmaps stay in 32 bits


def test_fp8_is_of_the_layers_alone_and_trains_the_very_parameters():
    drafter = make_drafter(TINY, CPU)
    other = make_variant(drafter, "float8")
    converted = [name for name, module in other.named_modules() if type(module).__name__ == "Float8Linear"]
    assert len(converted) == 2 * 7 and all(name.startswith("layers.") for name in converted)
    own = dict(drafter.named_parameters())
    assert all(parameter is own[name] for name, parameter in other.named_parameters())
    assert type(drafter.layers[0].mlp.up_proj) is torch.nn.Linear


def test_fp8_beyond_its_tolerance_is_told_and_not_refused(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "FLOAT8_TOLERANCES", (2e-2, 1e-4))
    benchmark.main([*QUICK, "--variants", "float8"])
    assert "BEYOND" in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["float16", "plain+float8", "float8+float8_rowwise", "float8+float8", ""])
def test_what_is_no_variant_is_refused(variant):
    with pytest.raises(ValueError, match="activation_checkpointing"):
        check_variant(variant)


def test_no_variant_or_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="names none"):
        BenchmarkArguments(variants=",")
    with pytest.raises(ValueError, match="sgd"):
        BenchmarkArguments(optimizer="adamw,sgd")


@pytest.mark.parametrize("run, kind", [(Run("a", eight_bit=True), "AdamW8bit"), (Run("b"), "AdamW")])
def test_the_study_takes_8_bit_adamw(run, kind):
    layer = torch.nn.Linear(64, 64)
    optimizer, scheduler = make_optimizer(run, layer, on_cuda=False)
    assert type(optimizer).__name__ == kind
    before = layer.weight.detach().clone()
    for _ in range(2):
        layer(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert not torch.equal(before, layer.weight)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(2 / 11 * run.learning_rate)


def test_the_study_refuses_two_optimizers():
    with pytest.raises(ValueError, match="choose one"):
        make_optimizer(Run("a", muon=True, eight_bit=True), torch.nn.Linear(4, 4), on_cuda=False)


def test_without_torchao_its_name_is_told(monkeypatch):
    for module in ("torchao", "torchao.optim", "torchao.float8"):
        monkeypatch.setitem(sys.modules, module, None)
    drafter = make_drafter(TINY, CPU)
    calls = [
        lambda: make_variant(drafter, "float8"),
        lambda: benchmark_variants.OPTIMIZERS["adamw_8bit"](list(drafter.parameters()), False),
        lambda: make_optimizer(Run("a", eight_bit=True), drafter, False),
        lambda: study_training.convert_to_float8(drafter, False),
    ]
    for call in calls:
        with pytest.raises(ImportError, match="pip install --no-deps torchao"):
            call()
    make_optimizer(Run("a"), drafter, False)
