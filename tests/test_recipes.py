# SPDX-License-Identifier: Apache-2.0
"""Each program of `recipes/` runs at a tiny shape, in this process, and writes what it says; so does README's own."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache

from dflash_hf import DFlashDraftModel, FrozenTarget
from dflash_hf.model_card import read_facts
from dflash_hf.validation import validate_checkpoint


ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "recipes" / "smollm2-135m"
sys.path[:0] = [str(ROOT / "recipes"), str(SMOLLM2)]

import adaptation  # noqa: E402
import benchmark  # noqa: E402
import benchmark_decoding  # noqa: E402
import demo  # noqa: E402
import report_pairs  # noqa: E402
import study  # noqa: E402
import study_report  # noqa: E402
from code_prompts import code_prompts  # noqa: E402
from remembering_target import RememberingTarget  # noqa: E402


MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY = benchmark.SHAPES["tiny"]
QUICK = ["--shape", "tiny", "--device", "cpu", "--repeats", "1", "--warmup", "0"]


def words(**options) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target with its tokenizer, a drafter for it, and chats: with a split, and for the studies."""
    root = tmp_path_factory.mktemp("recipes")
    target = tiny.llama_target(num_layers=9)
    target.generation_config.eos_token_id = 258
    target.save_pretrained(root / "target")
    tiny.byte_tokenizer().save_pretrained(root / "target")
    tiny.tiny_drafter(target, num_hidden_layers=1, num_taps=5).save_pretrained(root / "drafter", dtype=torch.bfloat16)
    tiny.write_chats(root / "completions.jsonl")
    for split, numbers in (("train", range(2, 22)), ("dev_greedy", range(50, 54))):
        answers = [f"the number {n} comes after {n - 1} and before {n + 1}." for n in numbers]
        chats = [
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
            for answer in answers
        ]
        with gzip.open(root / f"{split}.jsonl.gz", "wt") as lines:
            lines.writelines(json.dumps(chat) + "\n" for chat in chats)
    return root


# --- The demo


def small_demo(folder: Path, output_dir: Path, drafter: str | Path) -> list[str]:
    given = words(target=folder / "target", completions=folder / "completions.jsonl", drafter=drafter)
    given += words(output_dir=output_dir, mask_token_id=260, num_train_chats=4, num_train_epochs=2, continue_epochs=3)
    return [*given, *words(max_new_tokens=8, num_seen_prompts=2, num_unseen_prompts=3, use_cpu=True, logging_steps=1)]


def test_the_demo_plays_two_acts_and_ends_in_one_table(folder, tmp_path, capsys, monkeypatch):
    """The target answers each prompt once, and runs over each chat once."""
    computed, answered = [], []
    all_hidden_states, plain_answers = FrozenTarget.all_hidden_states, demo.plain_answers

    def counted_states(self, input_ids, document_lengths=None):
        for ids, lengths in zip(input_ids, document_lengths, strict=True):
            computed.extend(tuple(part.tolist()) for part in ids[: sum(lengths)].split(lengths))
        return all_hidden_states(self, input_ids, document_lengths)

    def counted_answers(target, prompts, settings):
        answered.extend(map(tuple, prompts))
        return plain_answers(target, prompts, settings)

    monkeypatch.setattr(FrozenTarget, "all_hidden_states", counted_states)
    monkeypatch.setattr(demo, "plain_answers", counted_answers)
    demo.main(small_demo(folder, tmp_path, folder / "drafter"))
    assert len(computed) == len(set(computed)) == 8 and len(answered) == len(set(answered)) == 5
    for path, block_size in ((tmp_path, 8), (tmp_path / "continued", 4)):
        results = json.loads((path / "results.json").read_text())
        assert results["answers"] and all(answer["equal"] for answer in results["answers"])
        assert results["evaluation"]["eval_acceptance_length"] >= 1 and (path / "training.png").stat().st_size > 0
        for name, number in (("seen", 2), ("unseen", 3)):
            after, (low, high) = results[name]["after"], results[name]["after_interval"]
            assert after["num_prompts"] == number and after["lossless"] and after["speed_up"] > 0
            assert 1 <= low <= after["acceptance_length"] <= high <= block_size
        assert DFlashDraftModel.from_pretrained(path).config.block_size == block_size
    # The second act starts as the drafter came, and trains all of it.
    assert results["seen"]["before"]["num_prompts"] == 2
    came, went = (DFlashDraftModel.from_pretrained(path) for path in (folder / "drafter", tmp_path / "continued"))
    assert all(not torch.equal(a.float(), b) for a, b in zip(came.parameters(), went.parameters(), strict=True))
    settings = torch.load(tmp_path / "continued" / "training_args.bin", weights_only=False)
    assert (settings.objective, settings.learning_rate, settings.num_train_epochs) == ("dpace", 1.2e-3, 3)
    shown = capsys.readouterr().out
    assert shown.count(" s left") == 2 * 1 + 3 * 1 and len(re.findall(r"^\| .*\d\.\d\d \(", shown, re.MULTILINE)) == 3
    assert len(shown[shown.index("Acceptance length:") :].splitlines()) < 24


@pytest.mark.parametrize("drafter", ["missing", "null"])
def test_without_a_trained_drafter_the_demo_ends_after_its_first_act(folder, tmp_path, monkeypatch, capsys, drafter):
    """It says so once where the drafter is missing, and keeps quiet where none is wanted."""
    missing = tmp_path / "missing"
    monkeypatch.setattr(demo, "TRAINED_DRAFTER", missing)
    demo.main(small_demo(folder, tmp_path / "run", missing if drafter == "missing" else drafter))
    assert not (tmp_path / "run" / "continued").exists()
    assert capsys.readouterr().out.count(str(missing)) == (drafter == "missing")


def test_a_drafter_of_another_target_is_refused_before_the_first_act(folder, tmp_path, monkeypatch):
    tiny.tiny_drafter(tiny.llama_target(num_layers=6)).save_pretrained(tmp_path / "other")
    monkeypatch.setattr(demo.Stage, "play", lambda *args: pytest.fail("an act began"))
    with tiny.refused(ValueError, "num_target_layers"):
        demo.main(small_demo(folder, tmp_path / "run", tmp_path / "other"))


def test_the_shipped_drafter_is_sound_small_and_of_the_demos_target():
    shipped = SMOLLM2 / "drafter"
    assert sorted(path.name for path in shipped.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    report = validate_checkpoint(shipped)
    assert report.ok and "0 warning(s)" in str(report)
    assert (shipped / "model.safetensors").stat().st_size < 20e6
    assert "*.safetensors binary" in (ROOT / ".gitattributes").read_text().splitlines()
    config, target = (
        json.loads(path.read_text()) for path in (shipped / "config.json", SMOLLM2 / "target-config.json")
    )
    assert config["num_target_layers"] == target["num_hidden_layers"]
    assert [config[name] for name in ("hidden_size", "vocab_size")] == [target["hidden_size"], target["vocab_size"]]


def test_remembered_states_are_those_of_the_target(monkeypatch):
    target, taps = tiny.llama_target(), [1, 4]
    plain, remembering = FrozenTarget(target, taps), RememberingTarget(target, taps)
    rows = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    lengths = [[5, 4], [12]]
    expected = plain.context_hidden_states(rows, lengths)
    remembering.remember([{"input_ids": ids} for ids in (rows[0, :5].tolist(), rows[0, 5:9], rows[1])])
    runs, read_taps = [], FrozenTarget._read_taps
    monkeypatch.setattr(FrozenTarget, "_read_taps", lambda self, **kw: runs.append(1) or read_taps(self, **kw))
    # In rows of another order and shape; what a caller does to its tensor stays its own.
    for _ in range(2):
        states = remembering.context_hidden_states(rows, lengths)
        torch.testing.assert_close(states[0, :9], expected[0, :9], rtol=1e-4, atol=1e-4)
        states.zero_()
    moved = torch.cat([rows[:1, 5:9], rows[:1, :5], torch.zeros(1, 2, dtype=torch.long)], dim=1)
    states = remembering.context_hidden_states(moved, [[4, 5]])
    torch.testing.assert_close(states[0, :9], torch.cat([expected[0, 5:9], expected[0, :5]]), rtol=1e-4, atol=1e-4)
    assert not states[0, 9:].any() and not runs
    # One document that is new makes the target run again.
    remembering.context_hidden_states(rows, [[5, 5], [12]])
    assert runs


# --- The study


SHAPE = {"num_layers": 2, "num_taps": 2, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE |= {"intermediate_size": 96, "block_size": 4, "mask_token_id": 260, "dev_rows": 2}
EXTRA = """
tiny-dpace: {rows: 4, num_anchors: 8, row_length: 80, seeds: [0, 1], learning_rate: 3.0e-3}
tiny-packed: {packed: true, rows: 2, num_anchors: 8, row_anchors: 16, row_length: 160, context_noise: 0.05}
tiny-kl: {rows: 4, num_anchors: 8, row_length: 80, objective: kl, temperature: 0.5, muon: true,
          schedule: warmup_stable_decay}
tiny-dflash2: {rows: 4, num_anchors: 8, row_length: 80, dflash2: true, selector_rank: 4, restart_at: 0.5,
               selector_objective: expected_acceptance}
tiny-eight-bit: {rows: 4, num_anchors: 8, row_length: 80, seeds: [0], learning_rate: 3.0e-3, eight_bit: true}
"""


def study_words(folder: Path, output_dir: Path, **options) -> list[str]:
    given = SHAPE | {"target": folder / "target", "data": folder, "output_dir": output_dir, "extra": EXTRA}
    return words(**given | {"runs": "tiny-*", "steps": 8} | options)


def test_the_study_runs_reports_and_leaves_out_what_is_done(folder, tmp_path, capsys):
    # torchao compiles its optimizer's step for every shape, which takes a CPU minutes and changes no result.
    with torch.compiler.set_stance("force_eager"):
        study.main(study_words(folder, tmp_path, decode_prompts=1, decode_tokens=8, save_drafters=True))
    results = {study.key_of(result): result for result in study.read_results(tmp_path / "results.jsonl")}
    names = ("dpace-s0", "dpace-s1", "packed-s0", "kl-s0", "eight-bit-s0", "dflash2-s0")
    assert {*results} == {f"tiny-{name}-8" for name in names}
    bounds = [results["tiny-dflash2-s0-8"]["metrics"][f"acceptance_length{by}"] for by in ("", "_by_candidates")]
    assert 1 <= bounds[0] <= bounds[1] and results["tiny-dflash2-s0-8"]["seed"] == 0
    for result in results.values():
        assert list(result["acceptance_length"]) == ["1", "2", "4", "8"]
        assert all(1.0 <= tau <= 4.0 for tau in result["acceptance_length"].values())
        # That of the selector is added from the middle on.
        assert result["objective"] == "kl" or result["dflash2"] or result["losses"]["8"] < result["losses"]["1"]
        assert 0 <= result["clipped"] <= 1 and result["tokens"]["8"] > 8 * 4 * 40
        assert result["decoded_acceptance_length"] == pytest.approx(result["walked_acceptance_length"], abs=0.05)
        assert result["lossless"] and result["seconds_per_step"] > 0
    plain, other, eight_bit = (results[f"tiny-{name}-8"]["losses"] for name in (names[0], names[1], names[4]))
    assert plain != other and plain != eight_bit and eight_bit["8"] == pytest.approx(plain["8"], rel=2e-2)
    facts = read_facts(tmp_path / "drafter-tiny-kl-s0-8")
    assert facts["recipe"]["objective"] == "kl" and facts["recipe"]["max_steps"] == 8
    assert "| tiny-dpace | 8 | 0 1 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "study.png").stat().st_size > 10_000
    capsys.readouterr()
    study.main(study_words(folder, tmp_path))
    assert "is done" in capsys.readouterr().out and len(study.read_results(tmp_path / "results.jsonl")) == 6
    # Runs of another drafter have the same names.
    with tiny.refused(SystemExit, "block_size", "num_train"):
        study.main(study_words(folder, tmp_path, block_size=8, num_train=9))


def test_s1_a_run_takes_the_documents_in_the_order_of_seed_and_epoch(folder, tmp_path):
    arguments = study.StudyArguments(
        data=str(folder), target=str(folder / "target"), output_dir=str(tmp_path), **SHAPE
    )
    (tmp_path / "run").mkdir()
    one = study.Study(arguments, final_states=False)
    trainer = one.trainer(study.Run("a", rows=6, num_anchors=8, row_length=80, seed=3), str(tmp_path / "run"))
    loader = trainer.get_train_dataloader()
    batches = list(loader)
    seen = [document for batch in batches for row in batch["documents"] for document in row]
    assert len(batches) == 3 and len(set(seen)) == 18 and all(len(row) == 1 for row in batches[0]["documents"])
    assert {batch["labels"].shape for batch in batches} == {(6, 8, 4)}
    assert {batch["input_ids"].shape for batch in batches} == {(6, 80)}
    loader.base_dataloader.batch_sampler.sampler.set_epoch(1)
    assert [batch["documents"] for batch in loader] != [batch["documents"] for batch in batches]
    walked = one.walk(trainer.model)
    assert 1 <= walked["acceptance_length"] <= 4 and trainer.model.training


def test_the_study_makes_its_file_of_tokens_and_starts_no_run_that_would_end_too_late(folder, tmp_path, capsys):
    study.main(study_words(folder, tmp_path, only_data=True))
    path = tmp_path / "study.npz"
    documents, dev = (study.read_documents(path, split) for split in study.SPLITS)
    assert len(documents) == 20 and len(dev) == 4
    ids, (start, stop) = documents[3]["input_ids"], documents[3]["supervised_spans"][0]
    assert tiny.byte_tokenizer().decode(ids[start:stop]).startswith("the number 5 comes") and ids[stop - 1] == 258
    study.main(study_words(folder, tmp_path, data=path, runs="tiny-dpace", max_minutes=0.0))
    assert capsys.readouterr().out.count("is left for the next call") == 2


def test_mistakes_in_the_studys_runs_are_named(folder, tmp_path):
    for options, named in (({"runs": "nothing*"}, "nothing*"), ({"runs": "a", "extra": "{a: {rate: 1}}"}, "rate")):
        with tiny.refused(ValueError, named):
            study.main(study_words(folder, tmp_path, **options))


def test_all_runs_of_the_table_are_made_and_have_a_reason():
    other = Path(study.HERE, "dflash2_runs.yaml")
    runs = study.select_runs(study.StudyArguments(data="")) + study.select_runs(
        study.StudyArguments("", table=str(other))
    )
    assert len({run.key for run in runs}) == len(runs) > 40 and all(run.reason for run in runs)
    # Equal time: as many blocks a step in all runs with one document a row.
    assert {run.rows * run.num_anchors for run in runs if not run.packed} == {32 * 128}
    for run in runs:
        run.arguments("unused", on_cuda=False)


def study_result(name: str, steps: int, tau: float, seed: int = 0) -> dict:
    points = {str(steps): tau}
    shared = {
        "name": name,
        "seed": seed,
        "steps": steps,
        "acceptance_length": points,
        "tokens": {str(steps): 100 * steps},
    }
    return shared | {"seconds_per_step": 0.1, "clipped": 0.5}


def test_the_studys_table_compares_seed_by_seed(tmp_path):
    runs = [("dpace", 2.0, 0), ("dpace", 4.0, 1), ("new", 2.2, 0), ("new", 4.4, 1), ("once", 3.0, 1)]
    for name, part in (("a", runs[:2]), ("b", runs[2:])):
        lines = [json.dumps(study_result(run, 8, tau, seed)) for run, tau, seed in part]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    documents = {"new": [[30, 10], [24, 10]], "dpace": [[20, 10], [22, 10]], "once": [[3, 1], [3, 1]]}
    for name in "ab":
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        own = [json.dumps(line | {"documents": documents[line["name"]]}) for line in lines]
        (tmp_path / f"known-{name}.jsonl").write_text("\n".join(own))
    known = [str(tmp_path / f"known-{name}.jsonl") for name in "ab"]
    study_report.main(["--files", *known, "--output_dir", str(tmp_path), "--baseline", "dpace"])
    assert "+10.0% (+9.1% to +50.0%)" in (tmp_path / "table.md").read_text()
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    study_report.main(["--files", *files, "--output_dir", str(tmp_path)])
    table = (tmp_path / "table.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    assert list(rows) == ["new", "dpace", "once"]
    assert "+10.0%" in rows["new"] and "-25.0%" in rows["once"] and "+0.0%" in rows["dpace"]


def test_the_learning_curve_says_what_twice_the_tokens_add(tmp_path):
    path = tmp_path / "curve.png"
    # 3 - 1.5 / tokens ** 0.5 has a ceiling, which the line does not see.
    runs = [study_result("a", tokens, 3 - 1.5 / tokens**0.5) for tokens in (1, 4, 16)]
    curve = study_report.learning_curve(runs, "a", path)
    assert curve["expected"]["saturating"] == pytest.approx(3 - 1.5 / 8, abs=0.005) and curve["expected"]["line"] > 3.2
    assert path.stat().st_size > 5_000 and json.loads((tmp_path / "curve.json").read_text()) == curve
    line = study_report.learning_curve([study_result("a", 2, 1.5), study_result("a", 4, 1.8)], "a", path)
    # Two budgets fit any curve, so only the line is drawn.
    assert line["per_doubling"] == pytest.approx(0.3) and line["expected"].keys() == {"line"}
    with tiny.refused(ValueError, "a"):
        study_report.learning_curve(runs[:1], "a", path)


def test_an_adapter_is_compared_with_whole_training(folder, tmp_path, capsys):
    adaptation.main(
        [
            *words(target=folder / "target", general=folder / "train.jsonl.gz"),
            *words(general_eval=folder / "dev_greedy.jsonl.gz", general_drafter=folder / "drafter"),
            *words(output_dir=tmp_path, replay=2, num_prompts=2, max_new_tokens=8, epochs=13, lora_rank=2),
            *words(row_length=512, rows_per_step=2, bf16="false", whole_rates=1e-3),
            *("--lora_rates", "1e-3", "1e30"),
        ]
    )
    results = json.loads((tmp_path / "adaptation.json").read_text())
    assert results["adapter"][0]["trained_parameters"] < results["whole"][0]["trained_parameters"]
    # A rate at which training diverges costs its own figures only.
    assert "error" in results["adapter"][1] and results["summary"]["adapter"]["learning_rate"] == pytest.approx(1e-3)
    for run in (results["general"], results["adapter"][0], *results["whole"]):
        assert len(run["acceptance_length"]) == 4 and all(1 <= tau <= 4 for tau in run["acceptance_length"].values())
    assert "of the whole drafter's gain on code" in capsys.readouterr().out


def test_an_adapters_rates_are_chosen_by_validation_alone():
    def run(rate, *values):
        names = ("code_validation", "code_test", "general_validation", "general_test")
        return {"learning_rate": rate, "acceptance_length": dict(zip(names, values, strict=True))}

    results = {"general": run(0.0, 2.0, 2.0, 2.0, 4.0), "adapter": [{"learning_rate": 1.0, "error": "not finite"}]}
    assert adaptation.summarise({**results, "whole": []}) == {}
    # The best on code loses too much of the general chats; the best of the test would be another one.
    results["adapter"] += [run(0.1, 2.4, 2.3, 1.99, 3.9), run(0.2, 2.3, 2.9, 1.99, 4.0), run(0.3, 2.9, 2.8, 1.9, 3.6)]
    results["whole"] = [run(0.4, 2.5, 2.6, 1.9, 3.8), run(0.5, 2.4, 2.4, 1.9, 3.9)]
    summary = adaptation.summarise(results)
    assert summary["adapter"]["learning_rate"] == 0.1 and summary["adapter"]["keeps_general"]
    assert summary["whole"]["learning_rate"] == 0.4 and not summary["whole"]["keeps_general"]
    assert summary["share_of_gain"] == pytest.approx(0.3 / 0.6)
    assert summary["adapter"]["change_on_general"] == pytest.approx(-0.025)


def test_no_tested_condition_is_trained_on():
    prompts = {split: code_prompts(split) for split in ("train", "validation", "test")}
    assert {split: len(texts) for split, texts in prompts.items()} == {"train": 152, "validation": 38, "test": 38}
    assert len({text for texts in prompts.values() for text in texts}) == 228
    assert not any("repeated" in text or "more than once" in text for text in prompts["train"])
    compile(prompts["test"][0].split("```python\n")[1].split("```")[0], "prompt", "exec")


# --- The benchmarks, and the comparison of finished runs


def test_the_benchmark_times_all_parts_and_writes_them(tmp_path, capsys):
    output = tmp_path / "new" / "results.json"
    given = [
        "--parts",
        "target,transfer,drafter,step",
        "--optimizer",
        "adamw,muon",
        "--profile",
        "--activation_checkpointing",
    ]
    given += ["--context_noise", "0.05", "--epoch_tokens", "1e6", "--cases", "64x8,128x16", "--output", str(output)]
    given += ["--dflash2_rank", "8"]
    benchmark.main([*QUICK, *given])
    results = json.loads(output.read_text())
    rows = {(row["case"], row["part"]): row for row in results["rows"]}
    parts = ["dflash2", "drafter", "drafter+adamw", "drafter+muon", "target", benchmark.ONE_BY_ONE, "transfer", "step"]
    assert set(rows) == {(case, part) for case in ("64x8", "128x16") for part in parts}
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(row["num_tokens"] / row["seconds"])
        assert row["hours_per_epoch"] == pytest.approx(1e6 / row["tokens_per_second"] / 3600)
        if row["part"] in ("drafter", "step"):
            rate = results["product_tflops"] * row["share_of_product"]
            assert rate == pytest.approx(row["tflop"] / row["seconds"])
    assert rows["128x16", "step"]["tflop"] > rows["128x16", "drafter"]["tflop"]
    weights = sum(p.numel() for p in benchmark.make_drafter(TINY, torch.device("cpu")).parameters())
    held = [rows["64x8", f"drafter+{name}"]["optimizer_state_bytes"] for name in ("adamw", "muon")]
    assert held == [pytest.approx(8 * weights, rel=0.01), pytest.approx(4 * weights, rel=0.02)]
    assert 0 <= rows["128x16", benchmark.ONE_BY_ONE]["feature_difference"] < 1e-5
    shown = capsys.readouterr().out
    assert "| 128 | 16 | step |" in shown and "aten::" in shown


@pytest.mark.parametrize("objective", ["cross_entropy", "dpace"])
def test_specforges_step_is_the_same_work(objective):
    """Same weights, tokens and anchors: loss and gradients equal SpecForge's, sliding layers included."""
    torch.manual_seed(0)
    args = benchmark.BenchmarkArguments(shape="tiny", objective=objective)
    cpu = torch.device("cpu")
    drafter, head = benchmark.make_drafter(TINY, cpu), benchmark.make_head(TINY, cpu, torch.float32)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:  # far from uniform attention and from equal logits
                parameter.mul_(6.0).copy_(parameter.bfloat16())
    batch = benchmark.make_batch(TINY.case, drafter.config, cpu)
    ours = benchmark.DrafterStep(drafter, head, args, batch, torch.randn(1, 128, 2 * 64), mixed_precision=False)
    peer = benchmark.PEERS["specforge"](ours)
    found = benchmark.compare(ours, peer)
    assert found["equal"]
    assert max(found["relative_gradient_differences"].values()) < 1e-4
    with torch.no_grad():
        drafter.layers[0].mlp.down_proj.weight.mul_(1.01)
    assert not benchmark.compare(ours, peer)["equal"]


def test_sides_are_timed_in_turns_and_gradients_dropped():
    calls, weight = [], torch.nn.Parameter(torch.ones(3))

    def step(name):
        def call():
            assert weight.grad is None
            calls.append(name)
            weight.sum().backward()

        return call

    sides = [benchmark.Side("a", step("a"), [weight], shared_bytes=8), benchmark.Side("b", step("b"), [weight])]
    results = benchmark.measure(sides, repeats=2, warmup=1, device=torch.device("cpu"))
    assert "".join(calls) == "abababab" and [len(results[name]["all_seconds"]) for name in "ab"] == [2, 2]
    assert results["a"]["resident_memory_gb"] == pytest.approx(20e-9)


def test_a_sweep_that_breaks_keeps_its_rows(tmp_path, monkeypatch):
    output, real = tmp_path / "sweep.json", benchmark.make_batch

    def failing(case, *args):
        if case == TINY.sweep[2]:
            raise RuntimeError("out of memory")
        return real(case, *args)

    monkeypatch.setattr(benchmark, "make_batch", failing)
    with tiny.refused(RuntimeError, "out of memory"):
        benchmark.main([*QUICK, "--sweep", "--output", str(output)])
    assert [row["case"] for row in json.loads(output.read_text())["rows"]] == [str(c) for c in TINY.sweep[:2]]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--parts", "drafter,head"], "head"),
        (["--peers", "axolotl"], "axolotl"),
        (["--cases", "2048"], "2048"),
        (["--repeats", "0"], "repeats"),
        (["--peers", "specforge", "--num_documents", "2"], "num_documents"),
    ],
)
def test_what_cannot_be_timed_is_refused(capsys, given, named):
    with pytest.raises(SystemExit):
        benchmark.main([*QUICK, *given])
    assert named in capsys.readouterr().err
    with tiny.refused(ValueError, "64x62"):
        benchmark.main([*QUICK, "--cases", "64x62"])


@pytest.mark.parametrize("make_target", [tiny.hybrid_target, tiny.dense_target])
def test_the_decoding_benchmark_prints_and_writes_the_parts_of_a_round(capsys, tmp_path, make_target):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    tiny.tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    given = words(target=tmp_path / "target", drafter=tmp_path / "drafter", device="cpu", num_rounds=3)
    given += ["--prompt_lengths", "8", "30", "--output", str(tmp_path / "results.json")]
    benchmark_decoding.main(given)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["prompt_length"] for row in rows] == [8, 30] and "| 30 |" in capsys.readouterr().out
    for row in rows:
        assert row["round"] == pytest.approx(row["draft"] + row["verify"] + row["commit"])
        assert row["ratio"] == pytest.approx(row["round"] / row["forward"]) and row["ratio"] > 0
    cache = DynamicCache(config=target.config)
    target(torch.arange(12)[None], cache=cache, use_cache=True)
    # A convolution's inputs and a matrix for each recurrent layer.
    layers = sum("linear" in kind for kind in target.config.to_dict().get("layer_types") or [])
    assert len(benchmark_decoding.recurrent_states(cache)) == 2 * layers
    with pytest.raises(SystemExit):
        benchmark_decoding.main(["--target", "x"])


def write_run(folder: Path, seconds: dict[int, float], every: int, in_turn: int, profiled=None, loss=1.0) -> Path:
    """A finished run whose step n took `seconds[n]`, logged every so many steps."""
    logs = []
    for last in range(every, len(seconds) + 1, every):
        inside = range(last - every + 1, last + 1)
        share = sum(n <= in_turn for n in inside) / every
        entry = {"step": last, "loss": loss, "in_turn": share, "step_seconds": sum(seconds[n] for n in inside) / every}
        logs.append(entry | {"target_seconds": 0.5, "details": {"drafter_seconds": 0.75, "wait_seconds": 0.0}})
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [*logs, {"train_runtime": 9, "step": 99}]}))
    if profiled:
        (folder / "profile_copies.json").write_text(json.dumps({"steps": profiled, "copies": {}}))
    return folder


@pytest.mark.parametrize("every", [1, 5])
def test_the_report_of_runs_leaves_out_steps_and_not_logs(tmp_path, every):
    """Slow steps: 5 in turn, 3 behind them while the pipe fills, 11 to 13 profiled, 14 with the writing."""
    seconds = {n: 9.0 if n <= 8 or 11 <= n <= 14 else 1.0 for n in range(1, 31)}
    run = write_run(tmp_path / "run", seconds, every, in_turn=5, profiled=[11, 13])
    figures = report_pairs.read_run(run, 3)
    assert figures["step_seconds"] == pytest.approx(1.0) and figures["ratio"] == pytest.approx(1 / 0.75)
    # Of single steps 9, 10 and 18 to 30; of logs 21 to 30, since 10, 15 and 20 each hold a step that is left out.
    assert figures["steps"] == {1: 15, 5: 10}[every]
    turns = write_run(tmp_path / "turns", dict.fromkeys(range(1, 31), 1.0), every, in_turn=30)
    assert report_pairs.read_run(turns, 3)["steps"] == {1: 27, 5: 25}[every]
    with tiny.refused(SystemExit, "run"):
        report_pairs.read_run(run, 30)
    with tiny.refused(SystemExit, "trainer_state.json"):
        report_pairs.read_run(tmp_path, 3)


def test_losses_are_compared_over_the_same_steps_alone(tmp_path, capsys):
    seconds = dict.fromkeys(range(1, 21), 1.0)
    cases = ((1, 5, 1.0), (2, 5, 2.0), (3, 1, 3.0), (4, 5, float("nan")))
    runs = [write_run(tmp_path / f"{n}", seconds, every, 0, loss=loss) for n, every, loss in cases]
    report_pairs.main([*map(str, runs), "--output", str(tmp_path / "figures.json")])
    figures = list(json.loads((tmp_path / "figures.json").read_text()).values())
    assert [run["largest_loss_difference"] for run in figures[:3]] == [0.0, 1.0, None]
    assert figures[3]["largest_loss_difference"] != figures[3]["largest_loss_difference"]


def test_the_report_compares_the_newest_weights_that_all_runs_have(tmp_path):
    weights = {"fc.weight": torch.full((4, 4), 2.0, dtype=torch.bfloat16), "norm.weight": torch.zeros(4)}
    for name, steps in (("a", (5, 10, 15)), ("b", (5, 10))):
        for step in steps:
            (tmp_path / name / f"checkpoint-{step}").mkdir(parents=True)
            save_file(weights, tmp_path / name / f"checkpoint-{step}" / "model.safetensors")
    path = tmp_path / "b" / "checkpoint-10" / "model.safetensors"
    save_file(weights | {"norm.weight": torch.tensor([0.0, -0.5, 0.0, 0.0])}, path)
    given = [str(tmp_path / "a"), str(tmp_path / "b"), "--weights", "--output", str(tmp_path / "figures.json")]
    report_pairs.main(given)
    figures = json.loads((tmp_path / "figures.json").read_text())
    found = {"relative_difference": 0.5 / 8, "largest_difference": 0.5, "largest_in": "norm.weight"}
    assert figures[str(tmp_path / "b")]["weights"] == {"step": 10, **found}
    # Neither has logs, which comparing weights does not need.
    assert "trainer_state.json" in figures[str(tmp_path / "a")]["not_measured"]
    save_file(weights | {"norm.weight": torch.full((4,), float("nan"))}, path)
    with tiny.refused(SystemExit, "norm.weight", "not finite"):
        report_pairs.main(given)
    path.unlink()
    with tiny.refused(SystemExit, "checkpoint-10"):
        report_pairs.main(given)


# --- README's program and the Makefile


def test_the_readme_program_runs_on_a_tiny_target(folder, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = "".join(blocks).replace(MODEL_ID, str(folder / "target"))
    program = program.replace("recipes/smollm2-135m/completions.jsonl", str(folder / "completions.jsonl"))
    program = program.replace("mask_token_id=15", "mask_token_id=260").replace("row_length=1024", "max_steps=1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "drafter" / "model.safetensors").exists()


def test_the_readme_commands_are_targets_of_the_makefile():
    commands = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets
