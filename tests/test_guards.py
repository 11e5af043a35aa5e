# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite are named and left out, on all ranks alike; a loss that cannot fall is an error."""

from pathlib import Path

import pytest
import torch
from runs import finish, make_documents, make_trainer, start
from tiny import dense_target
from transformers import TrainerCallback

from dflash_hf import DFlashTrainer
from dflash_hf.callbacks import HostCopy, NonFiniteTrainingError, StepGuard


@pytest.fixture(scope="module")
def target():
    return dense_target()


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


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_l4_an_infinite_hidden_state_names_the_document_and_leaves_the_step_out(target, tmp_path, caplog, optim):
    """4 documents, one a step: document 2 comes once in each epoch. `found_inf` is what a GPU takes too."""
    trainer = poisoned_trainer(tmp_path, target, (2,), optim=optim, learning_rate=0.01, optim_args=None)
    trainer.train()
    same = [step for step in range(1, 6) if equal(trainer.after[step], trainer.after[step - 1])]
    reports = [message for message in caplog.messages if "was left out" in message]
    steps = [int(message.split()[1]) for message in reports]
    assert 1 <= len(steps) <= 2 and [step - 1 for step in steps if step > 1] == same
    assert all("hidden states are not finite in document 2." in message for message in reports)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.after[-1].values())
    if optim != "sgd":
        taken = {int(state["step"]) for state in trainer.optimizer.state.values()}
        assert taken == {6 - len(steps)}
    # A step left out is a step of the plan: the schedule goes on.
    assert trainer.state.global_step == 6 and trainer.lr_scheduler.last_epoch == 6
    assert logged(trainer, "nonfinite_steps") == [1] * len(steps)
    losses = torch.tensor(logged(trainer, "loss"))
    assert [step + 1 for step in torch.isnan(losses).nonzero().flatten().tolist()] == steps
    assert torch.isfinite(torch.tensor(logged(trainer, "train_loss"))).all()


def test_the_other_steps_are_those_of_a_run_without_the_step(target, tmp_path):
    """The log over several steps is the ratio over those that were taken."""
    clean = poisoned_trainer(tmp_path, target, (), max_steps=2)
    clean.train()
    poisoned = poisoned_trainer(tmp_path, target, (2,), max_steps=4, logging_steps=4)
    poisoned.train()
    assert logged(poisoned, "nonfinite_steps") == [1]
    assert torch.isfinite(torch.tensor(logged(poisoned, "loss"))).all()
    each = poisoned_trainer(tmp_path, target, (2,), max_steps=4)
    each.train()
    taken = [loss for loss in logged(each, "loss") if loss == loss]
    assert len(taken) == 3 and min(taken) < logged(poisoned, "loss")[0] < max(taken)


def test_l4_too_many_in_a_row_stop_the_run_and_keep_the_last_good_checkpoint(target, tmp_path, caplog):
    trainer = poisoned_trainer(
        tmp_path, target, (0, 1, 2, 3), max_nonfinite_steps=3, save_strategy="steps", save_steps=1, max_steps=9
    )
    with pytest.raises(
        NonFiniteTrainingError, match=r"Step 3 was left out.*last of 3 in a row.*max_nonfinite_steps=3"
    ):
        trainer.train()
    assert sum("was left out" in message for message in caplog.messages) == 2
    assert {path.name for path in tmp_path.glob("*-*")} == {"checkpoint-1", "checkpoint-2"}
    assert trainer._guard._hook is None and trainer._guard._pending == []


def test_nan_in_a_weight_of_the_drafter_is_named_and_never_saved(target, tmp_path):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")

    trainer = make_trainer(tmp_path, target, callbacks=[Spoil()], save_steps=1, save_total_limit=1, max_steps=9)
    with pytest.raises(NonFiniteTrainingError, match=r"Step 4 .*drafter's own layers.0.mlp.up_proj.weight"):
        trainer.train()
    # Neither step 3 nor 4 was saved, and step 2 was not rotated away.
    assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-2"]


def test_nan_in_a_weight_from_the_start_is_an_error_in_the_first_step(target, tmp_path):
    trainer = make_trainer(tmp_path, target)
    trainer.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteTrainingError, match=r"Step 1 .*drafter's own norm.weight"):
        trainer.train()


def test_nan_in_a_weight_after_the_last_step_is_an_error_too(target, tmp_path):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                model.norm.weight.data[0] = float("nan")

    trainer = make_trainer(tmp_path, target, callbacks=[Spoil()], save_steps=2, max_steps=4)
    with pytest.raises(NonFiniteTrainingError, match=r"ended with a drafter whose norm.weight is not finite"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-2"]


def test_a_run_whose_every_step_was_left_out_is_an_error(target, tmp_path):
    """Fewer steps than those in a row that stop a run."""
    with pytest.raises(NonFiniteTrainingError, match=r"All 6 steps of this run were left out.*nothing was trained"):
        poisoned_trainer(tmp_path, target, (0, 1, 2, 3)).train()


@pytest.mark.parametrize(
    "arguments",
    [{"max_grad_norm": 0.0}, {"optim": "adafactor"}, {"gradient_accumulation_steps": 3}, {"bf16": True}],
    ids=str,
)
def test_l4_the_step_is_left_out_whatever_the_arguments(target, tmp_path, caplog, arguments):
    """Without clipping, with any optimizer, and where only one micro-batch, perhaps of a shorter last step, has it."""
    trainer = poisoned_trainer(tmp_path, target, (2,), **arguments)
    trainer.train()
    steps = [int(message.split()[1]) for message in caplog.messages if "was left out" in message]
    same = [step + 1 for step in range(1, 6) if equal(trainer.after[step], trainer.after[step - 1])]
    assert steps and same == [step for step in steps if step > 1]
    assert all("not finite in document 2." in message for message in caplog.messages if "was left out" in message)


def test_an_evaluation_that_is_not_finite_names_the_documents(target, tmp_path, caplog):
    trainer = poisoned_trainer(tmp_path, target, (2,), max_steps=1, eval_dataset=make_documents(4))
    assert trainer.evaluate()["eval_loss"] > 0
    assert not any("evaluation" in message for message in caplog.messages)
    trainer.train()
    assert torch.isnan(torch.tensor(trainer.evaluate()["eval_loss"]))
    assert any("not finite in document 2 of those evaluated" in message for message in caplog.messages)
    assert trainer._guard.evaluated == []


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
    ranks = [torch.load(tmp_path / f"after-{rank}.pt") for rank in (0, 1)]
    alone = poisoned_trainer(tmp_path, target, (2,), max_steps=4, gradient_accumulation_steps=2)
    alone.train()
    still = [equal(alone.after[step], alone.after[step - 1]) for step in range(1, 4)]
    for after in ranks:
        assert [equal(after[step], after[step - 1]) for step in range(1, 4)] == still
        for name, parameter in alone.after[-1].items():
            torch.testing.assert_close(after[-1][name], parameter, rtol=0, atol=1e-6)
    log = (tmp_path / "log").read_text()
    assert "not finite in document 2." in log and "The losses of this process are finite" in log


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


def test_training_does_not_ask_the_device_in_each_step(target, tmp_path, monkeypatch):
    """With a fused optimizer and travelling copies, no step calls `.item()` or `.tolist()` on a tensor of its own."""
    calls = []
    trainer = poisoned_trainer(tmp_path, target, (), max_steps=3, logging_strategy="no")
    monkeypatch.setattr(HostCopy, "is_immediate", property(lambda self: False))
    monkeypatch.setattr(HostCopy, "read", lambda self: calls.append("read") or self._tensor)
    trainer.train()
    # Each step's flag is read in the step after it, and the last one at the end.
    assert len(calls) == 3


@pytest.mark.parametrize("given", ["argument", "optimizer"])
def test_a_learning_rate_of_zero_is_an_error_at_the_start(target, tmp_path, given):
    trainer = make_trainer(tmp_path, target, learning_rate=0.0 if given == "argument" else 1e-3)
    if given == "optimizer":
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="learning rate is 0"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_frozen_drafter_is_an_error_at_the_start(target, tmp_path, caplog):
    trainer = make_trainer(tmp_path, target, max_steps=1)
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"None of the drafter's \d+ parameters requires a gradient"):
        trainer.train()
    trainer.model.fc.requires_grad_(True)
    trainer.train()
    assert any("are frozen and will not be trained: hidden_norm.weight, " in message for message in caplog.messages)


def test_an_optimizer_of_another_model_is_an_error_at_the_start(target, tmp_path):
    trainer = make_trainer(tmp_path, target, max_steps=1)
    trainer.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="The optimizer holds none of the drafter's parameters"):
        trainer.train()


def test_max_nonfinite_steps_must_be_positive(target, tmp_path):
    with pytest.raises(ValueError, match="max_nonfinite_steps=0"):
        make_trainer(tmp_path, target, max_nonfinite_steps=0)


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
    steps = [int(message.split()[1]) for message in caplog.messages if "was left out" in message]
    assert len(steps) == (2 if poisoned else 0)
    same = [step + 1 for step in range(1, 8) if equal(trainer.after[step], trainer.after[step - 1])]
    assert same == [step for step in steps if step > 1]
    assert all("not finite in document 2." in message for message in caplog.messages if "was left out" in message)


def test_a_loss_that_is_not_finite_marks_its_gradients_even_where_they_would_be_finite():
    """So the sum of gradients tells every rank of it."""
    guard = StepGuard(torch.nn.Linear(1, 1), max_in_a_row=2)
    for value, marked in ((1.0, False), (float("inf"), True), (float("nan"), True)):
        parameter = torch.ones(3, requires_grad=True)
        guard.marked(parameter.sum() + value).backward()
        assert torch.isnan(parameter.grad).all().item() is marked
        assert marked or torch.equal(parameter.grad, torch.ones(3))
