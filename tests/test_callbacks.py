# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite are left out on all ranks alike, signals end a run with a checkpoint, ranks stay equal."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from killing import TWO_GLOO_RANKS, script_of, signal_launcher
from runs import finish, make_documents, make_trainer, start, train, wait_for_step
from tiny import dense_target, refused
from torch.distributed.launcher.api import LaunchConfig
from transformers import TrainerCallback

from dflash_hf import DFlashTrainer, callbacks
from dflash_hf.callbacks import (
    GRACE,
    INTERRUPTED_STATUS,
    LAUNCHED,
    HostCopy,
    Interrupts,
    NonFiniteTrainingError,
    ProfileCallback,
    StepGuard,
    TrainingInterrupted,
    copy_overlap,
    tell_of_grace,
)
from dflash_hf.checkpointing import last_complete_checkpoint, manifest_problems
from dflash_hf.planning import RanksCallback, RanksDifferError, rank_differences


@pytest.fixture(scope="module")
def target():
    return dense_target()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-*"))


# Steps that are not finite


class PoisonedTrainer(DFlashTrainer):
    """The hidden states of some documents hold one infinity."""

    poisoned: tuple[int, ...] = ()

    def train(self, *args, **kwargs):
        original = self.target.context_hidden_states
        documents = {index: self.train_dataset.documents[index]["input_ids"] for index in self.poisoned}

        def context_hidden_states(input_ids, lengths):
            context = original(input_ids, lengths).clone()
            for row, ids in enumerate(input_ids.tolist()):
                if any(ids[: len(own)] == own for own in documents.values()):
                    context[row, 3, 7] = float("inf")
            return context

        self.target.context_hidden_states = context_hidden_states
        return super().train(*args, **kwargs)


class WeightRecorder(TrainerCallback):
    """Copies of the weights after each step."""

    def __init__(self):
        self.after: list[dict] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append({name: p.detach().clone() for name, p in model.named_parameters()})


def poisoned_trainer(folder, target, poisoned, **arguments):
    recorder = WeightRecorder()
    arguments = {"save_strategy": "no", "max_steps": 6, "documents": make_documents(4), **arguments}
    trainer = make_trainer(folder, target, cls=PoisonedTrainer, callbacks=[recorder], **arguments)
    trainer.poisoned = poisoned
    trainer.after = recorder.after
    return trainer


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def equal(one: dict, other: dict) -> bool:
    return all(torch.equal(parameter, other[name]) for name, parameter in one.items())


def unchanged(trainer) -> list[int]:
    """Steps from the second on that changed no weight."""
    return [step + 1 for step in range(1, len(trainer.after)) if equal(trainer.after[step], trainer.after[step - 1])]


def reported(caplog) -> list[int]:
    """Steps that were left out, each of which names document 2."""
    reports = [message for message in caplog.messages if "was left out" in message]
    assert all("document 2." in message for message in reports)
    return [int(message.split()[1]) for message in reports]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_l4_an_infinite_hidden_state_names_the_document_and_leaves_the_step_out(target, tmp_path, caplog, optim):
    """4 documents, one a step: document 2 comes once in each epoch. `found_inf` is what a GPU takes too."""
    trainer = poisoned_trainer(tmp_path, target, (2,), optim=optim, learning_rate=0.01, optim_args=None)
    trainer.train()
    steps = reported(caplog)
    assert 1 <= len(steps) <= 2 and [step for step in steps if step > 1] == unchanged(trainer)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.after[-1].values())
    if optim != "sgd":
        assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {6 - len(steps)}
    # A step left out is a step of the plan: the schedule goes on.
    assert trainer.state.global_step == 6 and trainer.lr_scheduler.last_epoch == 6
    assert logged(trainer, "nonfinite_steps") == [1] * len(steps)
    losses = torch.tensor(logged(trainer, "loss"))
    assert [step + 1 for step in torch.isnan(losses).nonzero().flatten().tolist()] == steps
    assert torch.isfinite(torch.tensor(logged(trainer, "train_loss"))).all()


@pytest.mark.parametrize(
    "arguments",
    [{"max_grad_norm": 0.0}, {"optim": "adafactor"}, {"gradient_accumulation_steps": 3}, {"bf16": True}],
    ids=str,
)
def test_l4_the_step_is_left_out_whatever_the_arguments(target, tmp_path, caplog, arguments):
    """Without clipping, with any optimizer, and where only one micro-batch, perhaps of a shorter last step, has it."""
    trainer = poisoned_trainer(tmp_path, target, (2,), **arguments)
    trainer.train()
    steps = reported(caplog)
    assert steps and unchanged(trainer) == [step for step in steps if step > 1]


def test_a_log_over_several_steps_is_the_ratio_over_those_that_were_taken(target, tmp_path):
    poisoned = poisoned_trainer(tmp_path, target, (2,), max_steps=4, logging_steps=4)
    poisoned.train()
    assert logged(poisoned, "nonfinite_steps") == [1]
    each = poisoned_trainer(tmp_path, target, (2,), max_steps=4)
    each.train()
    taken = [loss for loss in logged(each, "loss") if loss == loss]
    assert len(taken) == 3 and min(taken) < logged(poisoned, "loss")[0] < max(taken)


def test_l4_too_many_in_a_row_stop_the_run_and_keep_the_last_good_checkpoint(target, tmp_path, caplog):
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 9}
    trainer = poisoned_trainer(tmp_path, target, (0, 1, 2, 3), max_nonfinite_steps=3, **saves)
    with refused(NonFiniteTrainingError, "Step 3", "max_nonfinite_steps=3"):
        trainer.train()
    assert sum("was left out" in message for message in caplog.messages) == 2
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("spoilt_after", [0, 3, 4])
def test_nan_in_a_weight_of_the_drafter_is_named_and_never_saved(target, tmp_path, spoilt_after):
    """Before the first step, in the middle, and after the last one."""

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == spoilt_after:
                model.norm.weight.data[0] = float("nan")

    saves = {"save_steps": 1, "save_total_limit": 1, "max_steps": 4}
    trainer = make_trainer(tmp_path, target, callbacks=[Spoil()], **saves)
    if spoilt_after == 0:
        trainer.model.norm.weight.data.fill_(float("nan"))
    with refused(NonFiniteTrainingError, "norm.weight", {0: "Step 1 ", 3: "Step 4 ", 4: "ended"}[spoilt_after]):
        trainer.train()
    # Of the steps behind the fault none was saved, and the one before it was not rotated away.
    assert names(tmp_path) == ([f"checkpoint-{spoilt_after - 1}"] if spoilt_after else [])


def test_a_run_whose_every_step_was_left_out_is_an_error(target, tmp_path):
    """Fewer steps than those in a row that stop a run."""
    with refused(NonFiniteTrainingError, "All 6 steps"):
        poisoned_trainer(tmp_path, target, (0, 1, 2, 3)).train()


def test_an_evaluation_that_is_not_finite_names_the_documents(target, tmp_path, caplog):
    trainer = poisoned_trainer(tmp_path, target, (2,), max_steps=1, eval_dataset=make_documents(4))
    assert trainer.evaluate()["eval_loss"] > 0
    assert not any("evaluation" in message for message in caplog.messages)
    trainer.train()
    assert torch.isnan(torch.tensor(trainer.evaluate()["eval_loss"]))
    assert any("evaluation" in message and "document 2" in message for message in caplog.messages)


def poisoned_training(folder: str, poisoned: tuple[int, ...], **arguments) -> None:
    """Target of a process: what a rank has after 4 steps."""
    trainer = poisoned_trainer(Path(folder) / "run", dense_target(), poisoned, max_steps=4, **arguments)
    trainer.train()
    torch.save(trainer.after, Path(folder) / f"after-{trainer.args.process_index}.pt")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.state.destroy_process_group()


def test_l4_two_ranks_leave_out_the_same_step(target, tmp_path):
    """Only one rank's documents are not finite; the other rank's weights stay as well."""
    processes = start(poisoned_training, str(tmp_path), (2,), world=2, log=tmp_path / "log")
    assert finish(processes) == [0, 0]
    alone = poisoned_trainer(tmp_path, target, (2,), max_steps=4, gradient_accumulation_steps=2)
    alone.train()
    still = [equal(alone.after[step], alone.after[step - 1]) for step in range(1, 4)]
    for rank in (0, 1):
        after = torch.load(tmp_path / f"after-{rank}.pt")
        assert [equal(after[step], after[step - 1]) for step in range(1, 4)] == still
        for name, parameter in alone.after[-1].items():
            torch.testing.assert_close(after[-1][name], parameter, rtol=0, atol=1e-6)
    assert "document 2." in (tmp_path / "log").read_text()


def test_the_flag_is_read_one_step_later_where_it_travels(target):
    """As on a GPU: a step's flag is on its way while the next step is queued."""

    class Travelling(HostCopy):
        is_immediate = False
        reads = 0

        def read(self):
            Travelling.reads += 1
            return super().read()

    guard = StepGuard(torch.nn.Linear(1, 1), max_in_a_row=2)
    for step, norm in enumerate((1.0, float("nan"), 1.0, float("inf")), start=1):
        guard.judge(torch.tensor(norm), step)
        guard._pending[-1].flag = Travelling(guard._flag)
        guard.on_step_end(None, None, None)
        assert Travelling.reads == step - 1
    assert guard.take_left_out() == [2]
    guard.flush()
    assert guard.take_left_out() == [4] and Travelling.reads == 4


@pytest.mark.gpu
@pytest.mark.parametrize("poisoned", [(), (2,)])
def test_on_a_gpu_the_step_is_left_out_without_a_wait(target, tmp_path, caplog, poisoned):
    """From the norm of the gradients to the end of the optimizer's step, nothing looks at the device."""

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("error")

        def on_optimizer_step(self, args, state, control, **kwargs):
            torch.cuda.set_sync_debug_mode("default")

    trainer = poisoned_trainer(tmp_path, dense_target(), poisoned, use_cpu=False, logging_strategy="no", max_steps=8)
    trainer.add_callback(Watch())
    judge = trainer._guard.judge

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return judge(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer._guard.judge = watched
    trainer.train()
    steps = reported(caplog)
    assert len(steps) == (2 if poisoned else 0)
    assert unchanged(trainer) == [step for step in steps if step > 1]


def test_a_loss_that_is_not_finite_marks_its_gradients_even_where_they_would_be_finite():
    """So the sum of gradients tells every rank of it."""
    guard = StepGuard(torch.nn.Linear(1, 1), max_in_a_row=2)
    for value, marked in ((1.0, False), (float("inf"), True), (float("nan"), True)):
        parameter = torch.ones(3, requires_grad=True)
        guard.marked(parameter.sum() + value).backward()
        assert torch.isnan(parameter.grad).all().item() is marked
        assert marked or torch.equal(parameter.grad, torch.ones(3))


# A loss that cannot fall


@pytest.mark.parametrize("given", ["argument", "optimizer"])
def test_a_learning_rate_of_zero_is_an_error_at_the_start(target, tmp_path, given):
    trainer = make_trainer(tmp_path, target, learning_rate=0.0 if given == "argument" else 1e-3)
    if given == "optimizer":
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    with refused(ValueError, "learning_rate"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_frozen_drafter_is_an_error_at_the_start(target, tmp_path, caplog):
    trainer = make_trainer(tmp_path, target, max_steps=1)
    trainer.model.requires_grad_(False)
    with refused(ValueError, "requires_grad_"):
        trainer.train()
    trainer.model.fc.requires_grad_(True)
    trainer.train()
    assert any("frozen" in message and "hidden_norm.weight" in message for message in caplog.messages)


def test_an_optimizer_of_another_model_is_an_error_at_the_start(target, tmp_path):
    trainer = make_trainer(tmp_path, target, max_steps=1)
    trainer.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with refused(ValueError, "optimizer", "drafter.parameters()"):
        trainer.train()


def test_max_nonfinite_steps_must_be_positive(target, tmp_path):
    with refused(ValueError, "max_nonfinite_steps", 0):
        make_trainer(tmp_path, target, max_nonfinite_steps=0)


# Signals


class Send(TrainerCallback):
    """Sends a signal to this process while a step runs."""

    def __init__(self, step: int, number=signal.SIGTERM):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)
            time.sleep(0.1)


class SendEvaluating(TrainerCallback):
    """Sends SIGTERM to this process in the evaluation behind the last step."""

    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)


@pytest.fixture
def received():
    """Signals that reach this process's own handler of SIGTERM."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    yield received
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_step_is_finished_saved_and_the_status_is_distinct(target, tmp_path, number, caplog):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    trainer = make_trainer(tmp_path, target, callbacks=[Send(3, number)], save_strategy="no")
    with pytest.raises(SystemExit) as caught:
        trainer.train()
    assert isinstance(caught.value, TrainingInterrupted)
    assert caught.value.code == INTERRUPTED_STATUS == 75 and caught.value.step == 3
    assert names(tmp_path) == ["checkpoint-3"] and any(f"{tmp_path}/checkpoint-3" in m for m in caplog.messages)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "interrupts"]
    assert not trainer.is_in_train


def test_n5_what_an_interrupted_run_says_it_goes_on_from_is_what_it_goes_on_from(target, tmp_path, caplog):
    """In a folder with later checkpoints of another run."""
    make_trainer(tmp_path, target, max_steps=5, save_steps=2, learning_rate=1e-4).train()
    with pytest.raises(TrainingInterrupted):
        make_trainer(tmp_path, target, callbacks=[Send(3, signal.SIGINT)]).train()
    assert f"resume_from_checkpoint=True goes on from {tmp_path}/checkpoint-3" in caplog.text
    resumed = make_trainer(tmp_path, target, max_steps=60, callbacks=[Send(5)])
    with pytest.raises(TrainingInterrupted):
        resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 3


def test_what_a_finished_run_does_at_its_end_does_not_happen(target, tmp_path):
    """Not the reload of the best checkpoint, nor the removal of all others but it; a due evaluation waits."""
    evaluates = {"eval_dataset": make_documents(2), "eval_strategy": "steps", "eval_steps": 1}
    best = {"metric_for_best_model": "acceptance_length", "load_best_model_at_end": True, "learning_rate": 1e-9}
    trainer = make_trainer(
        tmp_path, target, callbacks=[Send(3)], save_steps=1, save_total_limit=1, **evaluates, **best
    )
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1, 2]


def test_an_interrupt_in_the_last_step_lets_the_run_end_and_is_passed_on(target, tmp_path, received):
    trainer = make_trainer(tmp_path, target, callbacks=[Send(3)], max_steps=3)
    trainer.train()
    assert received == [1] and names(tmp_path) == ["checkpoint-3"]
    assert any("train_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("callback", [Send(2), SendEvaluating()], ids=["step", "evaluation"])
def test_a_signal_at_the_end_of_a_run_without_checkpoints_writes_one(target, tmp_path, received, callback):
    """The signal is passed on once training is done, and may end the process before anything else is saved."""
    evaluates = {"eval_dataset": make_documents(1), "eval_strategy": "steps", "eval_steps": 2}
    make_trainer(tmp_path, target, callbacks=[callback], max_steps=2, save_strategy="no", **evaluates).train()
    assert received == [1] and not manifest_problems(tmp_path / "checkpoint-2")


def test_an_error_in_training_gives_the_signals_back(target, tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("broken")

    before = signal.getsignal(signal.SIGINT)
    with refused(RuntimeError, "broken"):
        make_trainer(tmp_path, target, callbacks=[Fail()]).train()
    assert signal.getsignal(signal.SIGINT) is before


def test_training_outside_the_main_thread_takes_no_signals(target, tmp_path):
    trainer = make_trainer(tmp_path, target, max_steps=1)
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1 and signal.getsignal(signal.SIGTERM) is before


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
    ("launched", "grace", "is_read", "num_bytes", "told"),
    [
        (True, None, True, 20e9, True),
        (True, None, True, 10e9, False),
        (True, "300", True, 20e9, False),
        (True, "300", False, 20e9, True),
        (False, None, True, 20e9, False),
    ],
)
def test_a_launcher_that_may_kill_before_a_checkpoint_is_written_is_told_of(
    monkeypatch, caplog, launched, grace, is_read, num_bytes, told
):
    """Earlier versions of torch do not read the variable."""
    for name, value in ((LAUNCHED, "none" if launched else None), (GRACE, grace)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    fields = dict(LaunchConfig.__dataclass_fields__)
    fields.pop("shutdown_timeout", None)
    monkeypatch.setattr(
        LaunchConfig, "__dataclass_fields__", {**fields, **({"shutdown_timeout": 0} if is_read else {})}
    )
    tell_of_grace(int(num_bytes))
    assert all(word in caplog.text for word in ("20.0 GB", "30 s", f"{GRACE}=300")) == told
    assert told or not caplog.text


def test_a_run_says_it_before_its_first_step(target, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(LAUNCHED, "none")
    monkeypatch.setattr(callbacks, "BYTES_PER_SECOND", 1e3)
    make_trainer(tmp_path, target, max_steps=1, save_strategy="no").train()
    assert GRACE in caplog.text


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


def test_a_second_signal_ends_a_run_at_once(tmp_path):
    processes = start(train, str(tmp_path), log=tmp_path / "log", seconds=30)
    wait_for_step(tmp_path, 1, processes)
    os.kill(processes[0].pid, signal.SIGTERM)
    time.sleep(0.3)
    # A launcher passes on a signal that its ranks have got too: the same request.
    os.kill(processes[0].pid, signal.SIGTERM)
    time.sleep(1.0)
    assert processes[0].is_alive()
    begin = time.monotonic()
    os.kill(processes[0].pid, signal.SIGTERM)
    assert finish(processes, timeout=10) == [128 + signal.SIGTERM] and time.monotonic() - begin < 5
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_the_ranks(tmp_path, number):
    signal_launcher(tmp_path, number, TWO_GLOO_RANKS, {"ACCELERATE_USE_CPU": "true"})


def run_with_workers(folder: Path, **arguments) -> tuple[subprocess.Popen, Path]:
    """A run of its own process group whose batches two workers make."""
    script, environment = script_of(folder, dataloader_num_workers=2, **arguments)
    log = folder / "log"
    with log.open("w") as output:
        environment["ACCELERATE_USE_CPU"] = "true"
        command = [sys.executable, script]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True), log


def test_a_signal_to_all_processes_spares_the_workers_of_the_dataloader(tmp_path):
    """Schedulers send it to the whole group, and torch ends a run whose worker died."""
    run, log = run_with_workers(tmp_path, seconds=0.05)
    while not (tmp_path / "step-0").exists():
        assert run.poll() is None, log.read_text()[-2000:]
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(60) == INTERRUPTED_STATUS, log.read_text()[-2000:]
    newest = last_complete_checkpoint(tmp_path / "run")
    assert (tmp_path / "step-0").read_text() == newest.name.split("-")[1]


def test_a_run_that_fails_ends_although_workers_live(tmp_path):
    run, log = run_with_workers(tmp_path, seconds=-1.0)
    assert run.wait(60) == 1
    assert "ValueError" in log.read_text().splitlines()[-1], log.read_text()[-2000:]


# Profiles


@pytest.mark.parametrize("begin", [0, 2])
def test_a_profile_is_written_of_the_steps_asked_for(target, tmp_path, begin):
    trainer = make_trainer(tmp_path, target, callbacks=[ProfileCallback(tmp_path, 2, begin)], max_steps=6)
    trainer.train()
    found = json.loads((tmp_path / "profile_copies.json").read_text())
    assert found["steps"] == [begin + 1, begin + 2]
    assert json.loads((tmp_path / "profile.json").read_text())["traceEvents"]


def test_copies_are_covered_where_a_kernel_runs_on_the_drafters_device():
    def event(category, name, begin, seconds, device=0, **arguments):
        return {"cat": category, "name": name, "ts": begin, "dur": seconds, "args": {"device": device, **arguments}}

    kernels = [event("kernel", "a", 0, 1e6), event("kernel", "b", 5e5, 1e6), event("kernel", "c", 2e6, 1e6, device=1)]
    copies = [
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1e6, 1e6, bytes=1e9),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 2e6, 1e6, bytes=1e9),
    ]
    (found,) = copy_overlap([*kernels, *copies]).values()
    assert found == {"count": 2, "gigabytes": 2.0, "seconds": 2.0, "covered_seconds": 0.5}


# Ranks


CHANGED = "layers.1.mlp.down_proj.weight"


class Change(TrainerCallback):
    """Changes a weight of the last rank, as a faulty copy would."""

    def __init__(self, step: int, value: float):
        self.step, self.value = step, value

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step and args.process_index == args.world_size - 1:
            with torch.no_grad():
                dict(model.named_parameters())[CHANGED][3, 2] += self.value


def changed(folder: str, value: float) -> None:
    """Target of a process: train until the ranks are found to differ, and write down what each one is told."""
    paused: list[int] = []
    watch = [Change(3, value), RanksCallback(folder, 2, lambda: paused.append(trainer.state.global_step))]
    trainer = make_trainer(f"{folder}/run", callbacks=watch, documents=make_documents(4), save_strategy="no")
    try:
        trainer.train()
    except RanksDifferError as error:
        told = f"{trainer.state.global_step}, {paused}: {error}"
        Path(folder, f"told-{trainer.args.process_index}").write_text(told)


@pytest.mark.parametrize("value", [2.0**-20, float("nan")])
def test_a_difference_ends_both_ranks_and_names_the_parameter(tmp_path, value):
    assert finish(start(changed, str(tmp_path), value, world=2, log=tmp_path / "log"), timeout=60) == [0, 0]
    for rank in (0, 1):
        told = (tmp_path / f"told-{rank}").read_text()
        assert told.startswith("4, [2]: ") and CHANGED in told
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert found["steps"] == [2, 4] and found["largest_difference"][0] == 0.0 < found["largest_difference"][1]


def test_one_rank_has_nothing_to_compare(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[RanksCallback(tmp_path, 2)], documents=make_documents(2))
    with refused(ValueError, "two_pairs"):
        trainer.train()


def test_what_is_equal_on_all_ranks_has_no_difference_whatever_it_is(tmp_path):
    """Infinities and NaNs too; parameters that are not trained are left out."""
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("inf"), float("nan"), 1.0], [-float("inf"), 0.0, -0.0]]))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert rank_differences(model) == {"weight": 0.0}
    finally:
        torch.distributed.destroy_process_group()
