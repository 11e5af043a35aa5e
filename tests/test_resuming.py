# SPDX-License-Identifier: Apache-2.0
"""A run that is killed or interrupted, and resumed, ends as the run left alone; another run is refused or told of."""

import json
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from killing import STEPS, weights
from runs import finish, make_documents, make_trainer, start, train, wait_for_step
from safetensors.torch import load_file
from tiny import CHATML_TEMPLATE, byte_tokenizer, chat, dense_target, json_lines, refused, tiny_drafter
from transformers import TrainerCallback

import dflash_hf.checkpointing
import dflash_hf.writing
from dflash_hf import DFlashTrainer
from dflash_hf.callbacks import INTERRUPTED_STATUS, TrainingInterrupted
from dflash_hf.checkpointing import MANIFEST_NAME, last_complete_checkpoint, make_manifest, manifest_problems
from dflash_hf.documents import open_documents
from dflash_hf.resuming import RECORD_NAME
from dflash_hf.tokenizing import TokenizeOptions, tokenize_files


SAVE_STEPS = 10
LAST, SAVED = 10, 4


def slow(value):
    """A parameter that `make test-all` adds."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """Folder of a run of 10 steps with checkpoints at 4, 8 and 10."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer(folder, target, max_steps=LAST, save_steps=SAVED, processing_class=byte_tokenizer()).train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


class Recorder(TrainerCallback):
    """Settings of the optimizer in each step."""

    def __init__(self):
        self.groups: list[dict] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.groups.append({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})


def resume(run, target, resume=SAVED, **arguments):
    recorder = Recorder()
    arguments = {"max_steps": LAST, "save_steps": SAVED, "processing_class": byte_tokenizer(), **arguments}
    trainer = make_trainer(run, target, callbacks=[recorder], **arguments)
    trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{resume}") if type(resume) is int else resume)
    trainer.groups = recorder.groups
    return trainer


def parameters(trainer) -> dict:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def equal(one: dict, other: dict) -> bool:
    return all(torch.equal(parameter, other[name]) for name, parameter in one.items())


# Killed and interrupted


def resumed_training(folder: str, **kwargs) -> None:
    """Target of a process: go on from the newest complete checkpoint, if there is one."""
    newest = last_complete_checkpoint(f"{folder}/run")
    train(folder, resume=None if newest is None else True, **kwargs)


def training_that_stalls(folder: str, step: int, where: str, **kwargs) -> None:
    """Target of a process: while the checkpoint of a step is written, say so and wait to be killed."""
    module = dflash_hf.writing if where == "_flush" else dflash_hf.checkpointing
    original = getattr(module, where)

    def stalled(*args, **options):
        if any(f"checkpoint-{step}" in str(value) for value in args):
            Path(folder, "stalled").write_text("")
            time.sleep(600)
        return original(*args, **options)

    setattr(module, where, stalled)
    resumed_training(folder, **kwargs)


def assert_same_end(folder: Path, expected: Path, world: int, note: str = "") -> None:
    want = weights(expected)
    for rank in range(world):
        got = weights(folder, rank)
        assert got["losses"] == want["losses"], note
        assert equal(want["parameters"], got["parameters"]), note


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders of runs that were left alone, by the number of ranks."""
    folders = {}
    for world in (1, 2):
        folders[world] = tmp_path_factory.mktemp(f"whole{world}")
        assert finish(start(train, str(folders[world]), world=world, log=folders[world] / "log")) == [0] * world
    return folders


def kill(folder: Path, world: int, generator: random.Random) -> str:
    """Start or go on, and end all ranks by SIGKILL at a random moment; returns the moment in words."""
    newest = last_complete_checkpoint(folder / "run") if (folder / "run").exists() else None
    done = int(newest.name.split("-")[1]) if newest else 0
    step, delay = generator.randint(done + 1, min(done + 2 * SAVE_STEPS, STEPS - 1)), generator.uniform(0, 0.05)
    for path in folder.glob("step-*"):
        path.unlink()
    processes = start(resumed_training, str(folder), world=world, log=folder / "log", seconds=0.01)
    wait_for_step(folder, step, processes)
    time.sleep(delay)
    for process in processes:
        process.kill()
    finish(processes)
    return f"after step {step} and {delay:.4f} s"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kills", [1, slow(5)])
def test_a_run_killed_at_random_moments_ends_with_the_same_weights(whole, tmp_path, world, kills):
    """Also two ranks, which a spot instance loses together."""
    seed = random.SystemRandom().randrange(2**32)
    generator = random.Random(seed)
    moments = [kill(tmp_path, world, generator) for _ in range(kills)]
    assert finish(start(resumed_training, str(tmp_path), world=world, log=tmp_path / "log")) == [0] * world
    assert_same_end(tmp_path, whole[world], world, f"seed {seed}: killed {', '.join(moments)}")


@pytest.mark.parametrize("where", ["make_manifest", slow("publish"), slow("_flush")])
def test_a_run_killed_while_a_checkpoint_is_written_goes_on_from_a_complete_one(whole, tmp_path, where):
    """Before the manifest, before the name, and while files are flushed, which get their name afterwards."""
    processes = start(training_that_stalls, str(tmp_path), 20, where, log=tmp_path / "log")
    deadline = time.monotonic() + 60
    while not (tmp_path / "stalled").exists():
        assert time.monotonic() < deadline and processes[0].is_alive()
        time.sleep(0.01)
    processes[0].kill()
    finish(processes)
    names = sorted(path.name for path in (tmp_path / "run").glob("*-*"))
    assert names == ["_incomplete-checkpoint-20", "checkpoint-10"]
    complete = "checkpoint-10" if where == "make_manifest" else "_incomplete-checkpoint-20"
    assert not manifest_problems(tmp_path / "run" / complete)
    assert finish(start(train, str(tmp_path), resume=True, log=tmp_path / "log")) == [0]
    assert_same_end(tmp_path, whole[1], 1)
    assert not list((tmp_path / "run").glob("_*"))


@pytest.mark.parametrize(("world", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_ends_a_run_with_a_checkpoint_and_its_own_status(whole, tmp_path, world, number):
    """Of two ranks only one gets the signal; both stop after the same step."""
    processes = start(train, str(tmp_path), world=world, log=tmp_path / "log", seconds=0.01)
    wait_for_step(tmp_path, 13, processes)
    os.kill(processes[-1].pid, number)
    assert finish(processes) == [INTERRUPTED_STATUS] * world
    newest = last_complete_checkpoint(tmp_path / "run")
    step = int(newest.name.split("-")[1])
    assert 13 < step < 20 or (world == 1 and step == 13)
    assert {(tmp_path / f"step-{rank}").read_text() for rank in range(world)} == {str(step)}
    assert finish(start(train, str(tmp_path), resume=True, world=world, log=tmp_path / "log")) == [0] * world
    assert_same_end(tmp_path, whole[world], world)


def test_a_finished_run_takes_no_further_step_when_it_is_resumed(whole):
    """60 steps of 16 rows end in the middle of an epoch, where Trainer alone would go on to step 61."""
    folder = whole[1]
    before = weights(folder)
    assert finish(start(train, str(folder), resume=True, log=folder / "log")) == [0]
    assert (folder / "step-0").read_text() == str(STEPS)
    assert equal(weights(folder)["parameters"], before["parameters"])


def test_a_run_of_two_ranks_goes_on_as_one_that_accumulates_and_back(whole, tmp_path):
    """Two rows per step each time: the same run but for rounding."""
    for world, step, split in ((2, 21, {}), (1, 40, {"gradient_accumulation_steps": 2})):
        resume = True if world == 1 else None
        arguments = {"resume": resume, "world": world, "log": tmp_path / "log", "seconds": 0.01, **split}
        processes = start(train, str(tmp_path), **arguments)
        wait_for_step(tmp_path, step, processes)
        os.kill(processes[0].pid, signal.SIGTERM)
        assert finish(processes) == [INTERRUPTED_STATUS] * world
    assert finish(start(train, str(tmp_path), resume=True, world=2, log=tmp_path / "log")) == [0] * 2
    got, want = weights(tmp_path), weights(whole[2])
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)
    for name, parameter in want["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], parameter, rtol=0, atol=1e-5, msg=name)


class Send(TrainerCallback):
    def __init__(self, step: int, interrupts):
        self.step, self.interrupts = step, interrupts

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            # The reading thread takes it before the step's other callbacks are called.
            while not self.interrupts.received:
                pass


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_an_evaluation_that_an_interrupt_left_out_is_made_up_for(target, tmp_path, strategy):
    """So that the best checkpoint is chosen among the same evaluations."""
    arguments = {
        "eval_strategy": strategy, "eval_steps": 4, "eval_dataset": make_documents(2), "metric_for_best_model": "loss",
        "greater_is_better": True, "load_best_model_at_end": True, "max_steps": 8, "save_steps": 4,
        "save_strategy": strategy, "documents": make_documents(4),
    }  # fmt: skip
    whole, interrupted, resumed = (
        make_trainer(tmp_path / name, target, **arguments) for name in ("whole", "run", "run")
    )
    whole.train()
    interrupted.callback_handler.callbacks.insert(0, Send(4, interrupted._interrupts))
    with pytest.raises(TrainingInterrupted):
        interrupted.train()
    resumed.train(resume_from_checkpoint=True)
    evaluations = [
        [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
        for trainer in (interrupted, resumed, whole)
    ]
    assert evaluations[0] == [] and evaluations[1] == evaluations[2] and len(evaluations[2]) == 2
    assert resumed.state.best_global_step == whole.state.best_global_step == 4
    assert resumed.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-4")
    assert equal(parameters(resumed), parameters(whole))


# Changed arguments


@pytest.mark.parametrize("change", [{}, {"prefetch_depth": 0, "logging_steps": 3}, {"activation_checkpointing": True}])
def test_c5_what_does_not_touch_the_course_of_a_run_may_change(run, target, change, caplog, recwarn):
    """Nor does a tokenizer that was used in between with padding, which it keeps."""
    whole = load_file(run / f"checkpoint-{LAST}" / "model.safetensors")
    tokenizer = byte_tokenizer()
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert equal(parameters(resume(run, target, processing_class=tokenizer, **change)), whole)
    assert not any("with changes" in message or "schedule" in message for message in caplog.messages)
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [("learning_rate", 5e-3, "initial_lr"), ("weight_decay", 0.1, "weight_decay")],
)
def test_a_changed_setting_of_the_optimizer_acts_from_the_resumed_step_on(run, target, name, value, key, caplog):
    """The loaded state holds the old one, which would rule in silence."""
    trainer = resume(run, target, **{name: value})
    assert len(trainer.groups) == LAST - SAVED and all(group[key] == value for group in trainer.groups)
    assert any(f"{name} " in message and f"{value} here" in message for message in caplog.messages)


@pytest.mark.parametrize("change", [{"learning_rate": 5e-3}, {"warmup_steps": 6}])
def test_c4_the_schedule_after_a_change_is_that_of_the_new_arguments_and_told_of(run, target, change, caplog):
    """In the first step already."""
    trainer = resume(run, target, **change)
    recorder = Recorder()
    arguments = {"callbacks": [recorder], "max_steps": LAST, "save_strategy": "no", **change}
    make_trainer(run.parent / "whole", target, **arguments).train()
    assert [group["lr"] for group in trainer.groups] == [group["lr"] for group in recorder.groups[SAVED:]]
    assert any("schedule" in message and "learning rate" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"optim": "sgd"}, ["optim", "adamw_torch", "sgd"]),
        ({"muon": True}, ["optim", "muon"]),
        ({"max_steps": 3}, ["step 4", "step 3", "max_steps"]),
        ({"max_steps": -1, "num_train_epochs": 0.1}, ["step 4", "step 2", "num_train_epochs"]),
        ({"row_length": 64}, ["rows", "row_length 32 there and 64 here"]),
        # Its weights fit all the same.
        ({"drafter": 8}, ["block_size 4 there and 8 here", "adapt"]),
    ],
)
def test_what_cannot_be_continued_is_refused_with_a_way_out(run, target, arguments, names):
    if "drafter" in arguments:
        arguments = {"drafter": tiny_drafter(target, block_size=8)}
    with refused(ValueError, "checkpoint-4", *names):
        resume(run, target, **arguments)


def other_token() -> list[dict]:
    documents = make_documents(16)
    documents[11]["input_ids"][5] ^= 1
    return documents


CHANGES = {
    "target": {},
    "target dtype": {},
    "tokenizer": {"processing_class": byte_tokenizer(CHATML_TEMPLATE + " ")},
    "data": {"documents": make_documents(17)},
    "data token": {"documents": other_token()},
    "rows": {"seed": 7},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_of_another_run_is_refused_unless_said_otherwise(run, target, caplog, change):
    """Also where one token of the data changed, or the target's dtype."""
    used = {"target": dense_target(seed=1), "target dtype": dense_target().bfloat16()}.get(change, target)
    kind, arguments = change.split()[0], CHANGES[change]
    with refused(ValueError, "checkpoint-4", f"{kind}: ", "allow_resume_changes"):
        resume(run, used, **arguments)
    resume(run, used, allow_resume_changes=[kind], **arguments)
    assert any("checkpoint-4" in message and f"{kind}: " in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("name", "value"), [("fp16", True), ("enable_jit_checkpoint", True), ("allow_resume_changes", ["drafter"])]
)
def test_an_argument_that_would_have_no_effect_is_refused(target, tmp_path, name, value):
    with refused(ValueError, name):
        make_trainer(tmp_path, target, **{name: value})


# Files


@pytest.mark.parametrize("missing", ["all", "optimizer.pt", "trainer_state.json"])
def test_a_checkpoint_without_its_optimizer_is_refused(run, target, tmp_path, caplog, missing):
    """Trainer would begin with a new one and say nothing; a manifest is not needed to see it."""
    if missing == "all":
        make_trainer(run, target, max_steps=4, save_steps=2, save_only_model=True).train()
        assert any("save_only_model" in message for message in caplog.messages)
    else:
        (run / "checkpoint-4" / MANIFEST_NAME).unlink()
        (run / "checkpoint-4" / missing).unlink()
    with refused(
        ValueError, "checkpoint-4", *(["optimizer.pt", "save_only_model"] if missing == "all" else [missing])
    ):
        resume(run, target)


@pytest.mark.parametrize("text", ["{", '{"format": 2}'])
def test_a_record_of_another_format_is_refused(run, target, text):
    folder = run / "checkpoint-10"
    (folder / RECORD_NAME).write_text(text)
    (folder / MANIFEST_NAME).write_text(json.dumps(make_manifest(folder)))
    with refused(ValueError, folder / RECORD_NAME, "format 1"):
        resume(run, target, True)
    # As the message says.
    (folder / RECORD_NAME).unlink()
    (folder / MANIFEST_NAME).unlink()
    assert resume(run, target, str(folder))._initial_global_step == 10
    # What has no record is known by its configuration.
    with refused(ValueError, "block_size 4 there and 8 here"):
        resume(run, target, str(folder), drafter=tiny_drafter(target, block_size=8))


def test_any_name_of_the_output_folder_will_do(target, tmp_path):
    """And a folder of checkpoints is taken for its newest."""
    (tmp_path / "real").mkdir()
    folder = tmp_path / "a folder é [1]*"
    folder.symlink_to(tmp_path / "real")
    make_trainer(folder, target, max_steps=2, save_steps=1, save_total_limit=1).train()
    arguments = {"max_steps": 3, "save_steps": 1, "processing_class": None}
    assert resume(folder, target, str(folder), **arguments)._initial_global_step == 2


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(target, tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    trainer = make_trainer(tmp_path, target, max_steps=2)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with refused(OSError, "output_dir", tmp_path, "Permission denied"):
        trainer.train()
    assert trainer.state.global_step == 0


# The record


def test_a_checkpoint_says_what_run_it_is_of(trained):
    record = json.loads((trained / "checkpoint-4" / RECORD_NAME).read_text())
    rows = {"rows_per_step": 1, "seed": 42, "data_seed": None, "row_length": 32, "dataloader_drop_last": False}
    assert record["rows"] == rows and record["drafter"]["block_size"] == 4
    assert record["data"]["documents"] == 16 and len(record["data"]["digest"]) == len(record["tokenizer"]) == 64
    assert record["arguments"]["learning_rate"] == 1e-3 and record["ranks"] == 1
    assert record["versions"]["torch"] == torch.__version__ and record["target"]["id"] is not None
    assert record["git_commit"] is None or len(record["git_commit"].split("+")[0]) == 40


def test_the_recipe_is_in_every_checkpoint_without_credentials(target, tmp_path):
    address = "hf://datasets/me/data@main/x"
    others = ["https://host/file?signature=planted", address, None, 3]
    recipe = {"script": "train.py", "completions": "s3://key:sec/ret@bucket/data", "others": others}
    trainer_class = partial(DFlashTrainer, recipe=recipe)
    make_trainer(tmp_path, target, cls=trainer_class, max_steps=2, save_steps=1).train()
    cleaned = {"completions": "s3://bucket/data", "others": ["https://host/file", address, None, 3]}
    for step in (1, 2):
        record = json.loads((tmp_path / f"checkpoint-{step}" / RECORD_NAME).read_text())
        assert record["recipe"] == {**recipe, **cleaned}


def test_dt3_documents_of_another_manifest_are_refused(target, tmp_path):
    """Also where the tokens that are hashed are the same."""
    (tmp_path / "a.jsonl").write_bytes(json_lines([chat("q", "answer " * 4)] * 4))

    def train(name: str, resume=None, select=False, **arguments):
        documents = open_documents(tmp_path / name, cache_dir=str(tmp_path / "cache"))
        chosen = documents.select(range(4)) if select else documents
        arguments = {"processing_class": byte_tokenizer(), "row_length": 128, "max_steps": 2, **arguments}
        trainer = make_trainer(tmp_path / "run", target, chosen, save_steps=1, **arguments)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / "run" / "checkpoint-1"))

    for name, options in (("out", TokenizeOptions()), ("other", TokenizeOptions(max_length=100))):
        tokenize_files(tmp_path / "a.jsonl", tmp_path / name, byte_tokenizer(), options, disable_tqdm=True)
    train("out")
    record = json.loads((tmp_path / "run" / "checkpoint-1" / RECORD_NAME).read_text())
    (manifest,) = record["data"]["manifests"]
    train("out", resume=True, select=True)
    with refused(ValueError, "data: ", "manifest", manifest[:12]):
        train("other", resume=True)
    train("other", resume=True, allow_resume_changes=["data"])
