# SPDX-License-Identifier: Apache-2.0
"""A changed argument acts from the resumed step on, or is refused with a way out; so is half a checkpoint."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from runs import make_documents, make_trainer
from safetensors.torch import load_file
from tiny import MASK_TOKEN_ID, byte_tokenizer, dense_target
from transformers import TrainerCallback

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer
from dflash_hf.callbacks import TrainingInterrupted
from dflash_hf.checkpointing import MANIFEST_NAME, make_manifest
from dflash_hf.documents import open_documents
from dflash_hf.resuming import RECORD_NAME
from dflash_hf.tokenizing import TokenizeOptions, tokenize_files


STEPS, SAVED = 10, 4


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
    make_trainer(folder, target, max_steps=STEPS, save_steps=SAVED).train()
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
    arguments = {"max_steps": STEPS, "save_steps": SAVED, **arguments}
    trainer = make_trainer(run, target, callbacks=[recorder], **arguments)
    trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{resume}") if type(resume) is int else resume)
    trainer.groups = recorder.groups
    return trainer


def weights(trainer) -> dict:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def equal(one: dict, other: dict) -> bool:
    return all(torch.equal(parameter, other[name]) for name, parameter in one.items())


# Changed arguments


@pytest.mark.parametrize(
    "change",
    [{}, {"prefetch_depth": 0}, {"logging_steps": 3}, {"optim": "adamw_torch"}, {"activation_checkpointing": True}],
)
def test_c5_what_does_not_touch_the_course_of_a_run_may_change(run, target, change, caplog):
    whole = load_file(run / f"checkpoint-{STEPS}" / "model.safetensors")
    assert equal(weights(resume(run, target, **change)), whole)
    assert not any("schedule is not that" in message for message in caplog.messages)


SETTINGS = {
    "learning_rate": (5e-3, "initial_lr", 5e-3),
    "weight_decay": (0.1, "weight_decay", 0.1),
    "adam_beta1": (0.5, "betas", (0.5, 0.999)),
    "adam_epsilon": (1e-3, "eps", 1e-3),
}


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", slow("adam_beta1"), slow("adam_epsilon")])
def test_a_changed_setting_of_the_optimizer_acts_from_the_resumed_step_on(run, target, name, caplog):
    """The loaded state holds the old one, which would rule in silence."""
    value, key, expected = SETTINGS[name]
    trainer = resume(run, target, **{name: value})
    assert len(trainer.groups) == STEPS - SAVED and all(group[key] == expected for group in trainer.groups)
    assert any(f"{name} " in message and "with changes" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": 5e-3}, slow({"max_steps": 20}), {"warmup_steps": 6}, slow({"lr_scheduler_type": "linear"})],
)
def test_c4_the_schedule_after_a_change_is_that_of_the_new_arguments_and_told_of(run, target, change, caplog):
    """In the first step already."""
    trainer = resume(run, target, **change)
    whole = make_trainer(run.parent / "whole", target, **{"max_steps": STEPS, "save_strategy": "no", **change})
    recorder = Recorder()
    whole.add_callback(recorder)
    whole.train()
    assert [group["lr"] for group in trainer.groups] == [group["lr"] for group in recorder.groups[SAVED:]]
    assert any("the learning rate goes on from" in message for message in caplog.messages)


def test_rows_split_otherwise_over_micro_batches_are_the_same_but_for_rounding(target, tmp_path, caplog):
    arguments = {"max_steps": 6, "save_steps": 2}
    whole = make_trainer(tmp_path, target, per_device_train_batch_size=2, **arguments)
    whole.train()
    trainer = resume(tmp_path, target, 2, gradient_accumulation_steps=2, **arguments)
    for name, parameter in weights(whole).items():
        torch.testing.assert_close(weights(trainer)[name], parameter, rtol=0, atol=1e-5)
    assert any("gradient_accumulation_steps 1 there and 2 here: the same but for" in m for m in caplog.messages)


REFUSED = {
    "optimizer": (
        {"optim": "sgd"},
        r"optim: adamw_torch there and sgd here.*new run from the checkpoint's drafter",
    ),
    "muon": ({"muon": True}, r"optim: adamw_torch there and muon and adamw_torch here"),
    "fewer_steps": ({"max_steps": 3}, r"is of step 4, and the run ends with step 3.*Raise max_steps"),
    "fewer_epochs": ({"max_steps": -1, "num_train_epochs": 0.1}, r"is of step 4, and the run ends with step 2"),
    "row_length": ({"row_length": 64}, "rows: row_length 32 there and 64 here"),
    "data_seed": ({"data_seed": 7}, "rows: data_seed"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_continued_is_refused_with_a_way_out(run, target, change):
    arguments, message = REFUSED[change]
    with pytest.raises(ValueError, match=message):
        resume(run, target, **arguments)


IGNORED = {
    "neftune_noise_alpha": (1.0, "context_noise"),
    "train_sampling_strategy": ("sequential", "shuffled from the seed"),
    "fp16": (True, "needs an accelerator"),
}


@pytest.mark.parametrize("name", IGNORED)
def test_an_argument_that_would_have_no_effect_is_refused(target, tmp_path, name):
    value, message = IGNORED[name]
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, target, **{name: value})


# Interrupts and evaluation


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
        "documents": make_documents(4),
        "max_steps": 8,
        "save_steps": 4,
        "save_strategy": strategy,
        "eval_strategy": strategy,
        "eval_steps": 4,
        "eval_dataset": make_documents(2),
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "load_best_model_at_end": True,
    }
    whole = make_trainer(tmp_path / "whole", target, **arguments)
    whole.train()
    interrupted = make_trainer(tmp_path / "run", target, **arguments)
    interrupted.callback_handler.callbacks.insert(0, Send(4, interrupted._interrupts))
    with pytest.raises(TrainingInterrupted):
        interrupted.train()
    assert not [entry for entry in interrupted.state.log_history if "eval_loss" in entry]
    resumed = make_trainer(tmp_path / "run", target, **arguments)
    resumed.train(resume_from_checkpoint=True)
    for trainer in (whole, resumed):
        trainer.evaluations = [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e]
    assert resumed.evaluations == whole.evaluations and len(whole.evaluations) == 2
    assert resumed.state.best_global_step == whole.state.best_global_step == 4
    assert resumed.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-4")
    assert equal(weights(resumed), weights(whole))


# Files


def test_a_checkpoint_without_its_optimizer_is_refused(target, tmp_path, caplog):
    """Trainer would begin with a new one and say nothing."""
    make_trainer(tmp_path, target, max_steps=4, save_steps=2, save_only_model=True).train()
    assert any("cannot go on" in message for message in caplog.messages)
    with pytest.raises(ValueError, match=r"has no optimizer.pt, scheduler.pt .*save_only_model"):
        resume(tmp_path, target, 2)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_part_that_is_not_there_is_refused_without_a_manifest_too(run, target, name):
    (run / "checkpoint-4" / MANIFEST_NAME).unlink()
    (run / "checkpoint-4" / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        resume(run, target)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        b"\xff\xfe\x00",
        *map(slow, ["", "null", '{"files": []}', '{"files": {}}', '{"files": {"config.json": {}}}']),
    ],
)
def test_a_manifest_of_any_wrong_shape_is_an_incomplete_checkpoint(run, target, text, caplog):
    path = run / "checkpoint-10" / MANIFEST_NAME
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert resume(run, target, True)._initial_global_step == 8
    assert any("checkpoint-10 is incomplete and skipped" in message for message in caplog.messages)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}'])
def test_a_record_of_another_format_is_refused(run, target, text):
    folder = run / "checkpoint-10"
    (folder / RECORD_NAME).write_text(text)
    (folder / MANIFEST_NAME).write_text(json.dumps(make_manifest(folder)))
    with pytest.raises(ValueError, match=f"{RECORD_NAME} is no record of format 1.*Take another checkpoint"):
        resume(run, target, True)
    # As the message says.
    (folder / RECORD_NAME).unlink()
    (folder / MANIFEST_NAME).unlink()
    assert resume(run, target, str(folder))._initial_global_step == 10


def test_without_a_record_another_drafter_is_known_by_its_configuration(run, target):
    """Its weights fit all the same."""
    folder = run / "checkpoint-10"
    (folder / RECORD_NAME).unlink()
    (folder / MANIFEST_NAME).unlink()
    shape = {"num_hidden_layers": 2, "num_taps": 2, "mask_token_id": MASK_TOKEN_ID, "block_size": 8}
    drafter = DFlashDraftModel(DFlashDraftConfig.from_target_config(target.config, **shape))
    with pytest.raises(ValueError, match=r"is of another drafter: .*block_size 4 there and 8 here.*adapt"):
        resume(run, target, str(folder), drafter=drafter)


def test_a_folder_of_checkpoints_is_taken_for_its_newest(run, target):
    assert resume(run, target, str(run))._initial_global_step == 10


@pytest.mark.parametrize("name", ["a folder é [1]*", "link"])
def test_any_name_of_the_output_folder_will_do(target, tmp_path, name):
    folder = tmp_path / name
    if name == "link":
        (tmp_path / "real").mkdir()
        folder.symlink_to(tmp_path / "real")
    make_trainer(folder, target, max_steps=2, save_steps=1, save_total_limit=1).train()
    assert resume(folder, target, True, max_steps=3, save_steps=1)._initial_global_step == 2


def test_checkpoints_of_another_run_in_the_way_are_told_of(run, target, caplog):
    resume(run, target, None, max_steps=1, learning_rate=1e-4)
    assert any(
        "holds checkpoint-4, checkpoint-8, checkpoint-10 of another run" in message for message in caplog.messages
    )
    caplog.clear()
    resume(run, target, 4)
    assert not any("of another run" in message for message in caplog.messages)


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(target, tmp_path, monkeypatch):
    def refused(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    trainer = make_trainer(tmp_path, target, max_steps=2)
    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(OSError, match=r"Nothing could be written into output_dir.*Permission denied"):
        trainer.train()
    assert trainer.state.global_step == 0


# The record


def test_the_recipe_is_in_every_checkpoint_without_credentials(target, tmp_path):
    recipe = {
        "script": "train.py",
        "completions": "s3://key:sec/ret@bucket/data",
        "others": ["https://host/file?signature=planted", "hf://datasets/me/data@main/x", None, 3],
    }

    class WithRecipe(DFlashTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, recipe=recipe, **kwargs)

    make_trainer(tmp_path, target, cls=WithRecipe, max_steps=2, save_steps=1).train()
    for step in (1, 2):
        record = json.loads((tmp_path / f"checkpoint-{step}" / RECORD_NAME).read_text())
        assert record["recipe"] == {
            "script": "train.py",
            "completions": "s3://bucket/data",
            "others": ["https://host/file", "hf://datasets/me/data@main/x", None, 3],
        }


def test_dt3_documents_of_another_manifest_are_refused(target, tmp_path, monkeypatch):
    """Also where the tokens that are hashed are the same."""
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"answer {i}" * 4}]}
        for i in range(4)
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(name: str, resume=None, select=False, **arguments):
        documents = open_documents(tmp_path / name, cache_dir=str(tmp_path / "cache"))
        make_trainer(
            tmp_path / "run",
            target,
            documents.select(range(4)) if select else documents,
            processing_class=byte_tokenizer(),
            row_length=128,
            max_steps=2,
            save_steps=1,
            **arguments,
        ).train(resume_from_checkpoint=resume and str(tmp_path / "run" / "checkpoint-1"))

    for name, options in (("out", TokenizeOptions()), ("other", TokenizeOptions(max_length=100))):
        tokenize_files(tmp_path / "in", tmp_path / name, byte_tokenizer(), options, disable_tqdm=True)
    train("out")
    record = json.loads((tmp_path / "run" / "checkpoint-1" / RECORD_NAME).read_text())
    (manifest,) = record["data"]["manifests"]
    assert len(manifest) == 64
    train("out", resume=True, select=True)
    with pytest.raises(ValueError, match=rf"data: documents of another manifest, {manifest[:12]} there"):
        train("other", resume=True)
    train("other", resume=True, allow_resume_changes=["data"])
