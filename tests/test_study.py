# SPDX-License-Identifier: Apache-2.0
"""The study's programs on a CPU at a tiny size: their own main functions, and the step against the trainer's."""

import gzip
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import MASK_TOKEN_ID, byte_tokenizer, llama_target
from transformers import HfArgumentParser, TrainerCallback

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.acceptance import WalkSums, walk_documents
from dflash_hf.frozen_target import FrozenTarget
from dflash_hf.model_card import read_facts


FOLDER = Path(__file__).parents[1] / "recipes" / "smollm2-135m"
sys.path.insert(0, str(FOLDER))

import study  # noqa: E402
import study_data  # noqa: E402
import study_report  # noqa: E402
from study_start import starting_weights  # noqa: E402
from study_training import Run, Study, make_optimizer, train, train_step  # noqa: E402


SHAPE = {
    "num_layers": 2,
    "num_taps": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "block_size": 4,
    "mask_token_id": MASK_TOKEN_ID,
}


def chat(number: int) -> dict:
    answer = f"the number {number} comes after {number - 1} and before {number + 1}."
    return {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """A tiny target's folder and the file that study_data.py makes of a few chats."""
    folder = tmp_path_factory.mktemp("study")
    target = llama_target()
    target.generation_config.eos_token_id = 258
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    for split, numbers in (("train", range(2, 42)), ("dev_greedy", range(50, 53))):
        with gzip.open(folder / f"{split}.jsonl.gz", "wt") as lines:
            lines.writelines(json.dumps(chat(number)) + "\n" for number in numbers)
    names = {"target": str(folder / "target"), "data": str(folder / "study.npz")}
    call(study_data.main, data=str(folder), target=names["target"], output=names["data"], max_length=64)
    return names


def call(main, *flags: str, **options) -> None:
    """Run a program's main function with a command line."""
    before = sys.argv
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    sys.argv = ["program", *words, *flags]
    try:
        main()
    finally:
        sys.argv = before


def test_documents_come_back_as_they_were_tokenised(files):
    documents = study_data.read_documents(files["data"], "train")
    assert len(documents) == 40 and max(len(d["input_ids"]) for d in documents) == 64
    tokenizer = byte_tokenizer()
    ids, (start, stop) = documents[3]["input_ids"], documents[3]["supervised_spans"][0]
    assert tokenizer.decode(ids[start:stop]).startswith("the number 5 comes")
    # Evaluation answers are whole.
    dev = study_data.read_documents(files["data"], "dev_greedy")[0]
    assert len(dev["input_ids"]) > 64 and dev["input_ids"][dev["supervised_spans"][0][1] - 1] == 258


EXTRA = """
tiny-dpace: {rows: 4, num_anchors: 8, row_length: 64, seeds: [0, 1], learning_rate: 3.0e-3}
tiny-packed: {packed: true, rows: 2, num_anchors: 8, row_anchors: 16, row_length: 160, context_noise: 0.05}
tiny-kl: {rows: 4, num_anchors: 8, row_length: 64, objective: kl, temperature: 0.5, muon: true, start: last, ema: 0.9}
"""


def test_the_study_runs_reports_and_leaves_out_what_is_done(files, tmp_path, capsys):
    options = {**SHAPE, **files, "output_dir": tmp_path, "extra": EXTRA, "runs": "tiny-*", "steps": 8, "dev_rows": 2}
    call(study.main, decode_prompts=2, decode_tokens=8, save_drafters=True, **options)
    facts = read_facts(tmp_path / "drafter-tiny-kl-s0-8")
    assert facts["recipe"]["objective"] == "kl" and facts["recipe"]["max_steps"] == 8
    results = study.read_results(tmp_path / "results.jsonl")
    names = ("dpace-s0", "dpace-s1", "packed-s0", "kl-s0")
    assert [study.key_of(result) for result in results] == [f"tiny-{name}-8" for name in names]
    for result in results:
        assert list(result["acceptance_length"]) == ["1", "2", "4", "8"]
        assert all(1.0 <= tau <= 4.0 for tau in result["acceptance_length"].values())
        assert result["objective"] == "kl" or result["losses"]["8"] < result["losses"]["1"]
        assert 0 <= result["clipped"] <= 1 and result["blocks"] > 8 * 8
        assert result["decoded_acceptance_length"] == pytest.approx(result["walked_acceptance_length"], abs=0.05)
        assert result["lossless"]
    table = (tmp_path / "table.md").read_text()
    assert "| tiny-dpace | 8 | 0 1 |" in table and (tmp_path / "study.png").stat().st_size > 10_000
    capsys.readouterr()
    call(study.main, **options)
    assert "Every run that was asked for is done" in capsys.readouterr().out
    assert len(study.read_results(tmp_path / "results.jsonl")) == 4
    # Runs of another drafter have the same names.
    with pytest.raises(SystemExit, match=r"have block_size 4 \(now 8\), num_train None \(now 9\)\. Give another"):
        call(study.main, **options | {"block_size": 8, "num_train": 9})


@pytest.mark.parametrize("float8", [False, True])
def test_cheaper_steps_learn_as_the_plain_one(files, tmp_path, float8):
    common = "rows: 4, row_length: 64, num_anchors: 8, learning_rate: 2.0e-3"
    extra = f"{{plain: {{{common}}}, eight-bit: {{eight_bit: true, {common}}}}}"
    options = {**SHAPE, **files, "extra": extra, "runs": "plain,eight-bit", "steps": 16, "dev_rows": 2}
    # torchao compiles its optimizer's step for every shape, which takes a CPU minutes and changes no result.
    with torch.compiler.set_stance("force_eager"):
        call(study.main, output_dir=tmp_path / "plain", **{**options, "runs": "plain"})
        other = {"runs": "plain", "float8": True} if float8 else {"runs": "eight-bit"}
        call(study.main, output_dir=tmp_path / "other", **{**options, **other})
    plain, cheaper = (
        study.read_results(tmp_path / name / "results.jsonl")[0]["losses"] for name in ("plain", "other")
    )
    assert plain != cheaper and plain["16"] < plain["2"]
    assert cheaper["16"] == pytest.approx(plain["16"], rel=2e-2)


def test_a_folder_of_chats_is_tokenised_first_and_sampling_is_measured(files, tmp_path):
    options = {**SHAPE, "target": files["target"], "data": Path(files["data"]).parent, "output_dir": tmp_path}
    options |= {"extra": EXTRA, "runs": "tiny-packed", "steps": 2, "dev_rows": 2, "decode_prompts": 1}
    call(study.main, decode_temperature=0.7, decode_tokens=4, **options)
    (result,) = study.read_results(tmp_path / "results.jsonl")
    assert result["decode_temperature"] == 0.7 and result["walked_acceptance_length"] >= 1
    assert (tmp_path / "study.npz").is_file()


def test_no_run_is_started_that_would_end_too_late(files, tmp_path, capsys):
    options = {**SHAPE, **files, "output_dir": tmp_path, "extra": EXTRA, "runs": "tiny-dpace", "steps": 1}
    call(study.main, max_minutes=0.0, **options)
    assert capsys.readouterr().out.count("is left for the next call") == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"runs": "nothing*"}, "no run is called"),
        ({"extra": "{a: {learn_rate: 1}}"}, "learn_rate"),
    ],
)
def test_mistakes_on_the_command_line_are_named(files, tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        call(study.main, **files, output_dir=tmp_path, **options)


def test_all_runs_of_the_table_are_made_and_have_a_reason():
    runs = study.select_runs(study.StudyArguments(data=""))
    assert len({run.key for run in runs}) == len(runs) > 30
    assert all(run.reason for run in runs)
    # Equal time: as many blocks a step in all runs with one document a row.
    assert {run.rows * run.num_anchors for run in runs if not run.packed} == {32 * 128}
    references = [(run.steps, run.objective) for run in runs if run.name.startswith("reference")]
    assert set(references) == {(1024, "cross_entropy"), (1010, "dpace")}


@pytest.fixture(scope="module")
def small(files) -> Study:
    target = FrozenTarget(files["target"], [1, 3], device="cpu", final_states=True, dtype=torch.float32)
    config = DFlashDraftConfig.from_target_config(
        target.model.config,
        target_layer_ids=[1, 3],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        block_size=4,
        mask_token_id=MASK_TOKEN_ID,
    )
    drafter = DFlashDraftModel(config)
    drafter.set_attn_implementation("sdpa")
    documents, dev = (study_data.read_documents(files["data"], split) for split in ("train", "dev_greedy"))
    return Study(target, drafter, documents, dev, torch.device("cpu"), dev_row_length=256, dev_rows=2)


def test_cached_hidden_states_are_the_targets_own(small):
    batch = small.batches(Run("a", rows=4, num_anchors=8, row_length=64))[0]
    expected = small.target.all_hidden_states(batch["input_ids"], batch["document_lengths"])
    features = small.train_features
    cached = torch.cat([features.context, features.final], dim=-1)[batch["places"]]
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-4)


def stepped(study: Study, run: Run, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The drafter's weights after four steps of the study from `start`."""
    study.drafter.load_state_dict(start)
    study.drafter.train()
    optimizer, scheduler = make_optimizer(run, study.drafter, False)
    for step in range(4):
        train_step(study, run, study.batches(run)[step], optimizer, scheduler)
    return {name: parameter.detach().clone() for name, parameter in study.drafter.named_parameters()}


def largest_difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in others)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "dpace", "context_noise": 0.05, "max_grad_norm": 0.1},
        {"objective": "kl", "temperature": 0.5, "muon": True, "schedule": "warmup_stable_decay"},
    ],
)
def test_s1_a_step_is_the_trainers_step(small, tmp_path, settings, monkeypatch):
    """As near as one rounding of the first weights leaves it, whatever the CPU."""
    # Muon's own products are in bfloat16, where one rounding changes a step by a third of itself: in float32 here.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    run = Run("a", steps=6, packed=True, rows=2, row_length=160, num_anchors=8, row_anchors=16, **settings)
    run = replace(run, learning_rate=3e-3, warmup=0.2, decay=0.5)
    start = small.weights(run)
    parameters = stepped(small, run, start)
    noise = torch.Generator().manual_seed(0)
    rounded = {n: w * (1 + 2.0**-23 * torch.randn(w.shape, generator=noise).sign()) for n, w in start.items()}
    rounding = largest_difference(stepped(small, run, rounded), parameters)
    twin = DFlashDraftModel(small.config)
    twin.load_state_dict(start)
    wsd = {"lr_scheduler_kwargs": {"num_decay_steps": 3}} if run.schedule != "cosine" else {}
    arguments = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=2,
        row_length=160,
        num_anchors=8,
        max_anchors_per_row=16,
        objective=run.objective,
        loss_temperature=run.temperature,
        context_noise=run.context_noise,
        max_grad_norm=run.max_grad_norm,
        learning_rate=run.learning_rate,
        muon=run.muon,
        lr_scheduler_type=run.schedule,
        warmup_steps=0.2,
        **wsd,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    documents = [{name: value.tolist() for name, value in d.items()} for d in small.train]
    trainer = DFlashTrainer(twin, small.target, arguments, train_dataset=documents)
    trainer.add_callback(_StopAfter(4))
    trainer.train()
    difference = largest_difference(parameters, dict(twin.named_parameters()))
    assert 0 < rounding < 1e-5 and difference < 8 * rounding
    assert largest_difference(parameters, start) > 1e-3


class _StopAfter(TrainerCallback):
    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.steps


def test_decoding_leaves_the_drafter_that_trains_alone(small):
    small.drafter.set_attn_implementation("eager")
    report = study.decode(small, study.StudyArguments(data="", decode_prompts=1, decode_tokens=4))
    assert report["decoded_prompts"] == 1 and small.drafter.config._attn_implementation == "eager"
    small.drafter.set_attn_implementation("sdpa")


def test_the_walk_is_the_packages_own(small):
    small.drafter.load_state_dict(small.weights(Run("a", start="last")))
    documents = [{name: value.tolist() for name, value in d.items()} for d in small.dev]
    sums = WalkSums.zeros(4)
    for answer in walk_documents(small.target.model, small.drafter, documents):
        sums.add(answer)
    metrics = small.walk()
    assert metrics["acceptance_length"] == pytest.approx(sums.metrics()["acceptance_length"])
    assert metrics.keys() == sums.metrics().keys()


def test_equal_runs_are_equal_and_seeds_differ(small):
    run = Run("a", steps=3, rows=4, num_anchors=8, row_length=64)
    first, again, other = (train(small, replace(run, seed=seed))["losses"] for seed in (0, 0, 1))
    assert first == again and first != other


def test_batches_go_through_all_documents_and_have_one_shape(small):
    batches = small.batches(Run("a", rows=4, num_anchors=8, row_length=64))
    seen = [d for step in range(batches.steps_per_epoch) for row in batches[step]["documents"] for d in row]
    assert sorted(seen) == list(range(40))
    packed = small.batches(Run("b", packed=True, rows=2, num_anchors=8, row_anchors=16, row_length=160))
    assert {packed[step]["labels"].shape for step in range(5)} == {(2, 16, 4)}
    epoch = [batches[step]["documents"] for step in (0, batches.steps_per_epoch)]
    assert epoch[0] != epoch[1]


def test_batches_made_ahead_are_those_made_when_due(small):
    run = Run(name="a", rows=4, row_length=64, num_anchors=8, seed=7)
    batches = small.batches(run)
    batches.prepare(3)
    for step in range(3):
        batch, due = batches[step], batches.collated(step)
        assert batch.keys() == due.keys()
        for name, value in due.items():
            same = (
                torch.equal
                if isinstance(value, torch.Tensor)
                else lambda a, b: type(a) is type(b) and repr(a) == repr(b)
            )
            assert same(batch[name], value), name


def test_layers_taken_over_read_the_context_as_the_target_does(small):
    tap = small.train_features.context[:200, -64:]
    weights = starting_weights(small.drafter, small.target.model, "last", 0, tap)
    drafter = DFlashDraftModel(small.config)
    drafter.load_state_dict(weights)
    source = small.target.model.get_decoder().layers[-1]
    context = drafter.hidden_norm(drafter.fc(small.train_features.context[:200]))
    with torch.no_grad():
        expected = source.self_attn.k_proj(source.input_layernorm(tap))
        key = drafter.layers[-1].self_attn.k_proj(context)
        torch.testing.assert_close(key, expected, rtol=1e-3, atol=1e-3)
        normed = drafter.layers[-1].self_attn.k_norm(key.view(200, -1, 16))
        ratio = normed.square().mean().sqrt() / expected.square().mean().sqrt()
    assert ratio.item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drafter.norm.weight, small.target.model.get_decoder().norm.weight)
    with pytest.raises(ValueError, match="start='middle'"):
        starting_weights(small.drafter, small.target.model, "middle", 0, tap)


def test_the_table_compares_seed_by_seed():
    def result(name: str, seed: int, tau: float) -> dict:
        taus = {"32": 1.1, "64": 1.2, "128": 1.3, "256": tau}
        return {
            "name": name,
            "seed": seed,
            "steps": 256,
            "acceptance_length": taus,
            "seconds_per_step": 0.1,
            "clipped": 0.5,
        }

    results = [result("dpace", 0, 1.5), result("dpace", 1, 1.6), result("kl", 1, 1.76)]
    table = study_report.table(results)
    assert "| kl | 256 | 1 | 1.100 | 1.200 | 1.300 | 1.760 | 1.760 | +10.0% | 0.1000 | 50% |" in table
    assert "| dpace | 256 | 0 1 | 1.100 | 1.200 | 1.300 | 1.550 | 1.500 1.600 | +0.0% |" in table
    assert np.argmax([line.startswith("| kl") for line in table.splitlines()]) == 2, "the best comes first"


def test_the_learning_curve_says_what_twice_the_tokens_add(tmp_path):
    def result(steps: int, tau: float) -> dict:
        return {
            "name": "a",
            "steps": steps,
            "acceptance_length": {str(steps): tau},
            "tokens": {str(steps): 100 * steps},
        }

    runs = [result(2, 1.5), result(4, 1.8), result(8, 2.1)]
    curve = study_report.learning_curve(runs, "a", tmp_path / "curve.png")
    assert curve["per_doubling"] == pytest.approx(0.3) and curve["expected"]["line"] == pytest.approx(2.7)
    assert curve["expected"]["saturating"] == pytest.approx(2.7, abs=0.02)
    assert (tmp_path / "curve.png").stat().st_size > 5_000
    assert json.loads((tmp_path / "curve.json").read_text()) == curve
    # 3 - 1.5 / tokens ** 0.5 has a ceiling, which the line does not see.
    runs = [result(tokens, 3 - 1.5 / tokens**0.5) for tokens in (1, 4, 16)]
    expected = study_report.learning_curve(runs, "a", tmp_path / "curve.png")["expected"]
    assert expected["saturating"] == pytest.approx(3 - 1.5 / 8, abs=0.005) and expected["line"] > 3.2
    # Two budgets fit any curve, so only the line is drawn.
    assert study_report.learning_curve(runs[:2], "a", tmp_path / "curve.png")["expected"].keys() == {"line"}
    with pytest.raises(ValueError, match="two or more numbers of steps"):
        study_report.learning_curve([result(2, 1.5)], "a", tmp_path / "curve.png")


def readme_commands() -> list[list[str]]:
    """The words of every command of the README that runs one of the study's programs."""
    text = (FOLDER / "README.md").read_text().replace("\\\n", " ")
    commands = [
        shlex.split(line) for line in text.splitlines() if line.startswith("python recipes/smollm2-135m/study")
    ]
    return [words[1:] for words in commands]


@pytest.mark.parametrize("words", readme_commands(), ids=lambda words: " ".join(words)[22:70])
def test_the_readmes_commands_are_understood(words):
    kinds = {
        "study.py": study.StudyArguments,
        "study_data.py": study_data.DataArguments,
        "study_report.py": study_report.ReportArguments,
    }
    parser = HfArgumentParser(kinds[Path(words[0]).name])
    (arguments,) = parser.parse_args_into_dataclasses(words[1:])
    if isinstance(arguments, study.StudyArguments):
        assert study.select_runs(arguments)


def test_the_readme_shows_every_program():
    assert {Path(words[0]).name for words in readme_commands()} == {"study.py", "study_data.py", "study_report.py"}
