# SPDX-License-Identifier: Apache-2.0
"""What a run makes of its launcher's end, of signals that follow it, and of a terminal that is closed."""

import os
import signal
import time

import pytest
from runs import make_documents, make_trainer
from tiny import dense_target
from transformers import TrainerCallback

from dflash_hf import callbacks as interrupts
from dflash_hf import callbacks as launcher_end
from dflash_hf.callbacks import LAUNCHER_ENDED, TrainingInterrupted, is_launcher_command
from dflash_hf.checkpointing import manifest_problems


# A process that does not exist.
GONE = 2**22 + 1


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture
def exits(monkeypatch):
    """Statuses of processes that would have ended at once."""
    found: list[int] = []
    monkeypatch.setattr(interrupts.os, "_exit", found.append)
    monkeypatch.setattr(interrupts, "SAME_REQUEST_S", 0.05)
    return found


class Send(TrainerCallback):
    """Sends signals to this process while a step runs, and waits after each for so long that the next is another."""

    def __init__(self, step: int, *numbers):
        self.step, self.numbers = step, numbers

    def on_step_begin(self, args, state, control, **kwargs):
        for number in self.numbers if state.global_step == self.step - 1 else ():
            os.kill(os.getpid(), number)
            time.sleep(0.15)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/venv/bin/python /venv/bin/accelerate launch --cpu train.py", True),
        ("python3.11 -u -X dev -W ignore /venv/bin/accelerate launch train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("python -um accelerate.commands.accelerate_cli launch train.py", True),
        ("python /venv/bin/accelerate-launch train.py", True),
        ("python /venv/bin/torchrun train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python /venv/bin/accelerate env", False),
        ("python scheduler.py accelerate launch train.py", False),
        ("python -c pass accelerate launch", False),
        ("bash run.sh accelerate launch", False),
        ("python -m", False),
        ("", False),
    ],
)
def test_only_a_launcher_is_taken_for_one(command, expected):
    assert is_launcher_command([*command.split(" "), ""]) == expected


def test_a_launcher_that_ended_while_the_target_was_loaded_ends_the_run_with_a_checkpoint(
    target, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(launcher_end, "_AT_START", (os.getpid(), GONE, True))
    with pytest.raises(TrainingInterrupted):
        make_trainer(tmp_path, target).train()
    assert (tmp_path / "checkpoint-1").exists() and "The launcher has ended" in caplog.text


@pytest.mark.parametrize("start", [(os.getpid(), GONE, False), (GONE, GONE, True)])
def test_another_parent_that_ended_ends_nothing(target, tmp_path, monkeypatch, caplog, start):
    """Also not the launcher of a process that forked this one."""
    monkeypatch.setattr(launcher_end, "_AT_START", start)
    make_trainer(tmp_path, target, max_steps=1).train()
    assert "launcher" not in caplog.text


def test_a_kernel_that_does_not_tell_of_it_keeps_nobody_from_training(target, tmp_path, monkeypatch, caplog):
    def refuse(number):
        raise OSError(22, "no PR_SET_PDEATHSIG")

    monkeypatch.setattr(launcher_end, "_AT_START", (os.getpid(), os.getppid(), True))
    monkeypatch.setattr(launcher_end, "_signal_at_end_of_parent", refuse)
    make_trainer(tmp_path, target, max_steps=1).train()
    assert "The run goes on after the end of a launcher" in caplog.text and "no PR_SET_PDEATHSIG" in caplog.text


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((LAUNCHER_ENDED, signal.SIGTERM), []),
        ((signal.SIGTERM, LAUNCHER_ENDED), []),
        ((LAUNCHER_ENDED, signal.SIGTERM, signal.SIGTERM), [128 + signal.SIGTERM]),
    ],
)
def test_one_signal_beside_the_end_of_the_launcher_does_not_end_a_run_at_once(
    target, tmp_path, exits, numbers, expected
):
    with pytest.raises(TrainingInterrupted):
        make_trainer(tmp_path, target, callbacks=[Send(2, *numbers)]).train()
    assert exits == expected and (tmp_path / "checkpoint-2").exists()


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
