# SPDX-License-Identifier: Apache-2.0
"""The benchmark at its tiny shape: what it counts, what it refuses to time, and what it writes down."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import naive
import pytest
import torch

from dflash_hf.cli import parse_config
from dflash_hf.losses import DecayedCrossEntropy, make_objective


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

import benchmark  # noqa: E402
import benchmark_parts  # noqa: E402
from benchmark_check import naive_loss  # noqa: E402
from benchmark_peers import PEERS  # noqa: E402
from benchmark_report import quantity  # noqa: E402
from benchmark_shapes import (  # noqa: E402
    Case,
    make_batch,
    make_drafter,
    make_head,
    shapes,
    uneven_lengths,
)
from benchmark_timing import Side, kernel_group, measure  # noqa: E402


CPU = torch.device("cpu")
TINY = shapes()["tiny"]
QUICK = ["--shape", "tiny", "--device", "cpu", "--repeats", "1", "--warmup", "0"]


def drafter_step(objective="cross_entropy", case=TINY.case, num_documents=1, full_attention=False):
    torch.manual_seed(0)
    drafter, head = make_drafter(TINY, CPU, full_attention), make_head(TINY, CPU, torch.float32)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:  # far from uniform attention and from equal logits
                parameter.mul_(6.0).copy_(parameter.bfloat16())
    batch = make_batch(case, drafter.config, CPU, num_documents)
    context = torch.randn(1, case.num_tokens, 2 * 64)
    objective = make_objective(objective, 4)
    return benchmark_parts.DrafterStep(drafter, head, objective, batch, context, mixed_precision=False)


@pytest.mark.parametrize("objective", ["cross_entropy", "dpace"])
@pytest.mark.parametrize("num_documents", [1, 3])
def test_the_check_is_that_of_the_naive_drafter_and_loss(objective, num_documents):
    """The benchmark's own twin against the tests' twin, which works block by block and slot by slot."""
    step = drafter_step(objective, num_documents=num_documents)
    blocks = [0, 5, 15]
    found, gradients = naive_loss(step.drafter, step.head, step.batch, step.context, step.objective, blocks)
    hidden, config = [], step.drafter.config
    for block in blocks:
        anchor = step.batch["anchor_positions"][0, block].item()
        position = step.batch["position_ids"][0, anchor].item()
        ids = torch.tensor([step.batch["input_ids"][0, anchor].item(), *[config.mask_token_id] * 3])
        taps = step.context[0, anchor - position : anchor + 1]
        hidden.append(naive.naive_drafter(step.drafter, taps, step.head.embedding_weight[ids], position))
    labels, weight = step.batch["labels"][:, blocks], step.head.head.weight
    if objective == "cross_entropy":
        expected = naive.naive_loss(torch.stack(hidden)[None], labels, weight, step.objective.gamma)
    else:
        expected = naive.naive_dpace_loss(torch.stack(hidden)[None], labels, weight, step.objective.alpha)
    assert found == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for name, gradient in gradients.items():
        own = step.drafter.get_parameter(name).grad
        torch.testing.assert_close(gradient, own, rtol=1e-3, atol=1e-5 * own.abs().max().item())


@pytest.mark.parametrize("objective", ["cross_entropy", "dpace"])
def test_the_timed_step_passes_its_check(objective):
    step = drafter_step(objective, num_documents=2)
    result = step.check(TINY.case.num_anchors)
    assert result["blocks"] == 16
    assert max(result["relative_gradient_differences"].values()) < 1e-4
    assert all(p.grad is None for p in step.drafter.parameters())
    assert step().item() == pytest.approx(result["loss"], rel=1e-6)


def test_a_wrong_step_is_not_timed(monkeypatch):
    """A leak of the anchor's own hidden state is refused."""
    step = drafter_step()
    real = step.forward
    monkeypatch.setattr(step.drafter.config, "sliding_window", 31)
    step.check(16)  # step and twin read the same window
    step.forward = lambda batch, context: real(batch, context.roll(-1, dims=1))
    with pytest.raises(ValueError, match="differs from its naive twin"):
        step.check(16)


@pytest.mark.parametrize("wrong", ["last_chunk", "weights"])
def test_a_wrong_loss_is_not_timed(wrong, monkeypatch):
    """What only the loss of all blocks shows: some of them lost, and weights that do not decay."""
    step, real = drafter_step(), benchmark_parts.drafter_loss

    def broken(model, config, batch, context, head, objective):
        if wrong == "weights":
            objective = DecayedCrossEntropy(2.1)
        elif batch["counted_slots"].sum() > 16 * 3 - 4:  # all blocks
            labels = batch["labels"].clone()
            labels[:, -2:] = -100
            batch = {**batch, "labels": labels, "counted_slots": (labels != -100).sum(-1).numpy()}
        return real(model, config, batch, context, head, objective)

    monkeypatch.setattr(benchmark_parts, "drafter_loss", broken)
    with pytest.raises(ValueError, match="differs from its naive twin"):
        step.check(2 if wrong == "last_chunk" else 16)


def test_quantities_have_a_prefix_that_fits():
    values = {0: "0 B", 45: "45 B", 1000: "1 kB", 45.47e6: "45.47 MB", 122.5e12: "122.5 TB", 3e15: "3000 TB"}
    assert {value: quantity(value, "B") for value in values} == values


def test_sides_are_timed_in_turns_and_gradients_dropped():
    calls, weight = [], torch.nn.Parameter(torch.ones(3))

    def step(name):
        def call():
            assert weight.grad is None
            calls.append(name)
            weight.sum().backward()

        return call

    sides = [Side("a", step("a"), [weight], shared_bytes=8), Side("b", step("b"), [weight])]
    results = measure(sides, repeats=2, warmup=1, device=CPU)
    assert "".join(calls) == "abababab"
    assert [len(results[name]["all_seconds"]) for name in "ab"] == [2, 2]
    assert results["a"]["resident_memory_gb"] == pytest.approx(20e-9)


def test_all_parts_are_timed_and_written(tmp_path, capsys):
    output = tmp_path / "new" / "results.json"
    words = ["--parts", "target,transfer,drafter,step", "--optimizer", "--profile", "--context_noise", "0.05"]
    benchmark.main([*QUICK, *words, "--epoch_tokens", "1e6", "--cases", "64x8,128x16", "--output", str(output)])
    results = json.loads(output.read_text())
    rows = {(row["case"], row["part"]): row for row in results["rows"]}
    parts = ["drafter", "drafter+adamw", "target", "target, documents one by one", "transfer", "step"]
    assert set(rows) == {(case, part) for case in ("64x8", "128x16") for part in parts}
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(row["num_tokens"] / row["seconds"])
        assert row["hours_per_epoch"] == pytest.approx(1e6 / row["tokens_per_second"] / 3600)
        if row["part"] in ("drafter", "step"):
            assert row["anchors_per_second"] == pytest.approx(row["num_anchors"] / row["seconds"])
            rate = results["product_tflops"] * row["share_of_product"]
            assert rate == pytest.approx(row["tflop"] / row["seconds"])
    drafter = rows["128x16", "drafter"]
    assert drafter["check"]["loss"] == pytest.approx(drafter["check"]["naive_loss"], rel=1e-5)
    assert drafter["first_step_seconds"] == drafter["check"]["seconds"]
    assert rows["128x16", "step"]["tflop"] > drafter["tflop"]
    groups = drafter["profile"]["seconds_by_group"]
    assert {"matrix products", "attention", "elementwise", "loss"} <= set(groups)
    assert "| 128 | 16 | step |" in capsys.readouterr().out


def test_a_dense_target_is_timed_beside_documents_one_by_one(capsys):
    words = ["--parts", "target", "--num_documents", "5", "--cases", "128x16"]
    target, twin = benchmark.main([*QUICK, *words])["rows"]
    assert (target["part"], twin["part"]) == ("target", benchmark.ONE_BY_ONE)
    assert twin["target_time_over_this"] == pytest.approx(target["seconds"] / twin["seconds"])
    assert 0 <= twin["feature_difference"] < 1e-5 and "features within" in capsys.readouterr().out
    lengths = uneven_lengths(128, 5)
    assert sum(lengths) == 128 and len(set(lengths)) == 5 and min(lengths) > 0


def test_a_target_that_computes_something_else_is_seen(monkeypatch):
    real = benchmark.make_targets
    monkeypatch.setattr(benchmark, "make_targets", lambda *args: (real(*args)[0], real(*args)[1]))
    assert benchmark.main([*QUICK, "--parts", "target"])["rows"][1]["feature_difference"] > 0.1


def test_a_sweep_that_breaks_keeps_its_rows(tmp_path, monkeypatch):
    output, real = tmp_path / "sweep.json", benchmark.make_batch

    def failing(case, *args):
        if case == TINY.sweep[2]:
            raise RuntimeError("out of memory")
        return real(case, *args)

    monkeypatch.setattr(benchmark, "make_batch", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        benchmark.main([*QUICK, "--sweep", "--output", str(output)])
    assert [row["case"] for row in json.loads(output.read_text())["rows"]] == [str(c) for c in TINY.sweep[:2]]


@pytest.mark.parametrize("objective", ["cross_entropy", "dpace"])
def test_specforges_step_is_the_same_work(objective):
    """Same weights, tokens and anchors: loss and gradients equal SpecForge's, sliding layers included."""
    try:
        import specforge  # noqa: F401
    except ImportError as error:
        pytest.fail(f"SpecForge cannot be imported ({error}): run `pip install --no-deps -r tests/reference.txt`.")
    ours = drafter_step(objective)
    peer = PEERS["specforge"](ours.drafter, ours.head, ours.objective, ours.batch, ours.context, False)
    found = benchmark.compare(ours, peer, mixed_precision=False)
    assert found["comparable"] and found["equal"]
    assert max(found["relative_gradient_differences"].values()) < 1e-4
    with torch.no_grad():
        ours.drafter.layers[0].mlp.down_proj.weight.mul_(1.01)
    assert not benchmark.compare(ours, peer, mixed_precision=False)["equal"]


def test_a_peer_without_documents_is_refused():
    ours = drafter_step(num_documents=2)
    with pytest.raises(ValueError, match="2 documents"):
        PEERS["specforge"](ours.drafter, ours.head, DecayedCrossEntropy(2.0), ours.batch, ours.context, False)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--parts", "drafter,head"], "head"),
        (["--peers", "axolotl"], "axolotl"),
        (["--cases", "2048"], "TOKENSxANCHORS"),
        (["--cases", "64x8", "--num_tokens", "64"], "leave them out"),
        (["--cases", "64x62"], "room for 59 anchors"),
        (["--shape", "huge"], "qwen3.6-27b"),
        (["--repeats", "0"], "repeats"),
        (["--parts", ","], "parts names none"),
        (["--cases", ","], "one or more cases"),
        (["--cases", "64x8", "--sweep"], "one or more cases"),
        (["--num_anchors", "0"], "num_anchors is 0"),
        (["--num_tokens", "-5"], "num_tokens is -5"),
        (["--context_noise", "nan"], "context_noise is nan"),
        (["--epoch_tokens", "0"], "epoch_tokens is 0"),
        (["--objective", "kl"], "cross_entropy, dpace"),
        (["--device", "gpu"], "device is 'gpu'"),
        (["--target_device", "cuda:99"], "target_device is cuda:99, and torch sees"),
    ],
)
def test_what_cannot_be_timed_is_refused(words, message, monkeypatch):
    monkeypatch.setattr(benchmark, "product_rate", lambda device: pytest.fail("time is spent before the refusal"))
    with pytest.raises(ValueError, match=message):
        benchmark.main([*QUICK, *words])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--peers", "speculators"], "speculators, which is not installed"),
        (["--optimizer", "adamw,adamw_8bit"], "adamw_8bit needs torchao"),
        (["--variants", "plain,activation_checkpointing+float8"], "float8 needs torchao"),
    ],
)
def test_what_is_not_installed_is_told_before_anything_is_timed(words, message, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        parse_config(benchmark.BenchmarkArguments, words)


def test_peers_that_would_not_be_timed_or_do_other_work_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    for words, message in (
        (["--parts", "step"], "add drafter to parts"),
        (["--num_documents", "2"], "see each other"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_config(benchmark.BenchmarkArguments, ["--peers", "specforge", *words])


def test_an_output_that_cannot_be_written_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "product_rate", lambda device: pytest.fail("time is spent before the refusal"))
    (tmp_path / "file").write_text("")
    for output in (tmp_path, tmp_path / "file" / "results.json"):
        with pytest.raises(OSError, match="cannot be written"):
            benchmark.main([*QUICK, "--output", str(output)])


def test_a_run_killed_while_it_writes_keeps_the_rows_it_had(tmp_path, monkeypatch):
    output, real = tmp_path / "results.json", Path.write_text

    def cut_short(path, text):
        if text.count('"part"') > 1:
            real(path, text[: len(text) // 2])
            raise KeyboardInterrupt
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*QUICK, "--cases", "64x8,128x16", "--output", str(output)])
    assert [row["case"] for row in json.loads(output.read_text())["rows"]] == ["64x8"]


def test_batches_have_the_anchors_asked_for_within_the_row():
    batch = make_batch(Case(256, 40), drafter_step().drafter.config, CPU, num_documents=2)
    anchors = batch["anchor_positions"][0]
    assert len(anchors) == 40 and (anchors[1:] > anchors[:-1]).all()
    assert (anchors + 4 <= 256).all()
    assert batch["document_lengths"] == [[128, 128]]
    counted = batch["labels"] != -100
    assert batch["loss_mask"][0, anchors[:, None] + torch.arange(1, 4)].bool().equal(counted[0, :, 1:])


@pytest.mark.parametrize(
    "kernel, group",
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNN", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16>", "matrix products"),
        ("triton_tem_fused_flex_attention_backward_zeros_3", "attention"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_1", "elementwise"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "loss"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_kernels_are_grouped_by_name(kernel, group):
    assert kernel_group(kernel) == group


def test_the_documented_commands_parse(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    text = (ROOT / "recipes/qwen3.6-27b/README.md").read_text() + benchmark.__doc__
    commands = re.findall(r"python recipes/benchmark\.py[^#\n]*", text.replace("\\\n", " "))
    assert len(commands) >= 4
    for command in commands:
        (args,) = parse_config(benchmark.BenchmarkArguments, shlex.split(command)[2:])
        assert args.shape in (None, *shapes())
