# SPDX-License-Identifier: Apache-2.0
"""Signals are taken during training only, and what they ask for is what a resumed run goes on from."""

import os
import signal
import threading
import time

import pytest
import torch
from runs import make_documents, make_trainer
from tiny import dense_target
from torch.distributed.launcher.api import LaunchConfig
from transformers import TrainerCallback

from dflash_hf import callbacks as launching
from dflash_hf.callbacks import GRACE, INTERRUPTED_STATUS, LAUNCHED, Interrupts, TrainingInterrupted, tell_of_grace
from dflash_hf.checkpointing import manifest_problems


@pytest.fixture(scope="module")
def target():
    return dense_target()


class Send(TrainerCallback):
    """Sends a signal to this process while a step runs."""

    def __init__(self, step: int, number=signal.SIGTERM):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)
            time.sleep(0.1)


def folders(path) -> list[str]:
    return sorted(folder.name for folder in path.glob("*-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_step_is_finished_saved_and_the_status_is_distinct(target, tmp_path, number):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    trainer = make_trainer(tmp_path, target, callbacks=[Send(3, number)], save_strategy="no")
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert isinstance(caught.value, TrainingInterrupted)
    assert caught.value.code == INTERRUPTED_STATUS == 75 and caught.value.step == 3
    assert folders(tmp_path) == ["checkpoint-3"]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "interrupts"]
    assert not trainer.is_in_train


def test_what_a_finished_run_does_at_its_end_does_not_happen(target, tmp_path, caplog):
    """Not the reload of the best checkpoint, nor the removal of all others but it; a due evaluation waits."""
    trainer = make_trainer(
        tmp_path,
        target,
        callbacks=[Send(3)],
        save_steps=1,
        save_total_limit=1,
        eval_dataset=make_documents(2),
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="acceptance_length",
        load_best_model_at_end=True,
        learning_rate=1e-9,
    )
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1, 2]
    assert any("evaluation that is due at step 3 is left out" in message for message in caplog.messages)


def test_an_interrupt_in_the_last_step_lets_the_run_end_and_is_passed_on(target, tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        trainer = make_trainer(tmp_path, target, callbacks=[Send(3)], max_steps=3)
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [1] and folders(tmp_path) == ["checkpoint-3"]
    assert any("train_loss" in entry for entry in trainer.state.log_history)


def test_an_error_in_training_gives_the_signals_back(target, tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("broken")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(tmp_path, target, callbacks=[Fail()]).train()
    assert signal.getsignal(signal.SIGINT) is before


def test_training_outside_the_main_thread_takes_no_signals(target, tmp_path, caplog):
    trainer = make_trainer(tmp_path, target, max_steps=1)
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1 and signal.getsignal(signal.SIGTERM) is before
    assert any("outside the main thread" in message for message in caplog.messages)


def test_several_ranks_stop_once_the_sum_of_their_flags_says_so():
    class Control:
        should_evaluate = should_save = should_training_stop = False

    class State:
        global_step, max_steps = 1, 10

    interrupts, control = Interrupts(world_size=2), Control()
    interrupts.received = signal.SIGTERM
    assert interrupts.flag("cpu").item() == 1.0
    interrupts.agree(torch.tensor(0.0))
    interrupts.on_step_end(None, State, control)
    assert not control.should_training_stop
    interrupts.received = None
    interrupts.agree(torch.tensor(1.0))
    interrupts.on_step_end(None, State, control)
    assert control.should_training_stop and control.should_save


@pytest.mark.parametrize(
    ("launched", "grace", "num_bytes", "told"),
    [(True, None, 20e9, True), (True, None, 10e9, False), (True, "300", 20e9, False), (False, None, 20e9, False)],
)
def test_a_launcher_that_may_kill_before_a_checkpoint_is_written_is_told_of(
    monkeypatch, caplog, launched, grace, num_bytes, told
):
    monkeypatch.delenv(LAUNCHED, raising=False)
    monkeypatch.delenv(GRACE, raising=False)
    if launched:
        monkeypatch.setenv(LAUNCHED, "none")
    if grace is not None:
        monkeypatch.setenv(GRACE, grace)
    tell_of_grace(int(num_bytes))
    said = "A checkpoint takes 20.0 GB, and the launcher kills its ranks 30 s after it gets SIGTERM"
    assert (said in caplog.text and f"{GRACE}=300" in caplog.text) == told
    assert told or not caplog.text


def test_a_grace_that_this_torch_does_not_read_is_not_counted_on(monkeypatch, caplog):
    monkeypatch.setenv(LAUNCHED, "none")
    monkeypatch.setenv(GRACE, "300")
    monkeypatch.delitem(LaunchConfig.__dataclass_fields__, "shutdown_timeout", raising=False)
    tell_of_grace(20 * 10**9)
    assert "the launcher kills its ranks 30 s after it gets SIGTERM" in caplog.text


def test_a_run_says_it_before_its_first_step(target, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(LAUNCHED, "none")
    monkeypatch.setattr(launching, "BYTES_PER_SECOND", 1e3)
    make_trainer(tmp_path, target, max_steps=1, save_strategy="no").train()
    assert "the launcher kills its ranks" in caplog.text


def test_a_closed_terminal_ends_a_run_with_a_checkpoint_unless_it_runs_under_nohup(target, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(TrainingInterrupted):
            make_trainer(tmp_path / "a", target, callbacks=[Send(2, signal.SIGHUP)]).train()
        assert (tmp_path / "a" / "checkpoint-2").exists() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        trainer = make_trainer(tmp_path / "b", target, callbacks=[Send(2, signal.SIGHUP)], max_steps=3)
        trainer.train()
        assert trainer.state.global_step == 3 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class SendEvaluating(TrainerCallback):
    """Sends SIGTERM to this process in the evaluation behind the last step."""

    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)


@pytest.mark.parametrize("callback", [Send(2, signal.SIGTERM), SendEvaluating()])
def test_a_signal_at_the_end_of_a_run_without_checkpoints_writes_one(target, tmp_path, callback):
    """The signal is passed on once training is done, and may end the process before anything else is saved."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    evaluates = {"eval_dataset": make_documents(1), "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(tmp_path, target, callbacks=[callback], max_steps=2, save_strategy="no", **evaluates)
    try:
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [1] and not manifest_problems(tmp_path / "checkpoint-2")
