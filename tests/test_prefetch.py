# SPDX-License-Identifier: Apache-2.0
"""The target runs ahead of the drafter and nothing else changes: same numbers, same order, a clean end."""

import re
import threading
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from tiny import MASK_TOKEN_ID, dense_target, hybrid_target
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.prefetch import PENDING, FeatureTransfer, Prefetcher, Throughput, known_ahead


CPU = torch.device("cpu")
# accelerate's state while nothing of its own is iterated over.
NO_DATALOADER = SimpleNamespace(active_dataloader=None)


def documents(count: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(17, 30, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(0, 256, (n,), generator=generator).tolist(), "supervised_spans": [[5, n]]}
        for n in lengths
    ]


def make_trainer(
    folder,
    depth: int,
    target=None,
    num_documents: int = 7,
    train_documents: list[dict] | None = None,
    trainer_class=DFlashTrainer,
    **arguments,
):
    target = target or dense_target()
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    values = {
        "output_dir": str(folder), "row_length": 32, "num_anchors": 8, "num_train_epochs": 2, "warmup_steps": 0,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True,
        "prefetch_depth": depth,
    }  # fmt: skip
    args = DFlashTrainingArguments(**{**values, **arguments})
    return trainer_class(
        DFlashDraftModel(config),
        target,
        args,
        train_dataset=train_documents or documents(num_documents),
        eval_dataset=documents(3),
    )


def run(folder, depth: int, resume=None, **arguments) -> dict:
    trainer = make_trainer(folder, depth, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in logs if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in logs if "grad_norm" in entry],
        "evaluations": [entry["eval_loss"] for entry in logs if "eval_loss" in entry],
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
    }


def assert_identical(result: dict, expected: dict):
    for name in ("losses", "grad_norms", "evaluations"):
        assert result[name] == expected[name]
    assert all(torch.equal(a, b) for a, b in zip(result["weights"], expected["weights"], strict=True))


def target_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dflash-target"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_depth_changes_no_bit(accumulation, tmp_path):
    """Over two epochs with a last step that is not full, with an evaluation between the steps of an epoch."""
    arguments = {"gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 2}
    expected = run(tmp_path, 0, **arguments)
    assert len(expected["losses"]) == {1: 14, 3: 6}[accumulation] and expected["evaluations"]
    assert not target_threads()
    for depth in (1, 2, 5):
        assert_identical(run(tmp_path, depth, **arguments), expected)
        assert not target_threads()


def test_measuring_each_half_alone_changes_no_bit(tmp_path):
    expected = run(tmp_path, 0)
    assert_identical(run(tmp_path, 2, measure_alone_steps=9), expected)


def test_c3_what_was_prefetched_but_not_trained_on_is_not_done_on_resume(tmp_path):
    whole = run(tmp_path / "whole", 0, save_strategy="steps", save_steps=4)
    run(tmp_path / "stopped", 2, save_strategy="steps", save_steps=4)
    resumed = run(tmp_path / "stopped", 2, resume=str(tmp_path / "stopped" / "checkpoint-4"))
    assert resumed["losses"] == whole["losses"]
    assert all(torch.equal(a, b) for a, b in zip(resumed["weights"], whole["weights"], strict=True))


@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("depth", [0, 1, 3, 20])
def test_the_last_batch_is_marked_when_it_is_handed_out(depth, skipped):
    """7 rows in batches of 2: the loop must see end and remainder exactly as without look-ahead, twice over."""
    accelerator = Accelerator(cpu=True)
    state = accelerator.gradient_state
    loader = accelerator.prepare(DataLoader([{"x": i} for i in range(7)], batch_size=2))
    loader = skip_first_batches(loader, skipped)
    plain = [(batch["x"].tolist(), state.end_of_dataloader, state.remainder) for batch in loader]
    assert [end for _, end, _ in plain] == [False] * (3 - skipped) + [True]
    for _ in range(2):
        fetched = []
        batches = known_ahead(iter(loader), depth, state, lambda batch, seen=fetched: seen.append(batch) or batch)
        handed_out = []
        for batch in batches:
            handed_out.append((batch["x"].tolist(), state.end_of_dataloader, state.remainder))
            assert len(fetched) == min(4 - skipped, len(handed_out) + depth)
        assert handed_out == plain
        assert state.active_dataloader is not loader


class Recorder:
    """A target whose hidden states are its batch's number, and which says when it started and ended."""

    device = CPU

    def __init__(self, log: list, fail_at: int = -1, seconds: float = 0.0):
        self.log, self.fail_at, self.seconds = log, fail_at, seconds

    def context_hidden_states(self, input_ids, document_lengths=None):
        number = int(input_ids[0, 0])
        self.log.append(("start", number))
        time.sleep(self.seconds)
        if number == self.fail_at:
            raise ArithmeticError(f"batch {number} cannot be read")
        self.log.append(("end", number))
        return torch.full((1, 1, 1), float(number))


def batches(count: int):
    for number in range(count):
        yield {
            "input_ids": torch.tensor([[number]]), "document_lengths": [[1]], "anchor_positions": torch.tensor([[0]])
        }  # fmt: skip


def prefetcher(target, depth: int) -> Prefetcher:
    throughput = Throughput(CPU, [CPU])
    return Prefetcher(FeatureTransfer(target, [CPU], CPU, "peer"), CPU, depth, throughput)


def until(condition, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to this"
        time.sleep(0.002)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_never_more_than_depth_batches_wait(depth):
    """While the drafter is at one batch, the target starts on exactly `depth` later ones and then waits."""
    log = []
    ahead = prefetcher(Recorder(log), depth)
    state = NO_DATALOADER
    for number, batch in enumerate(ahead.look_ahead(batches(9), state)):
        states = ahead.context_hidden_states(batch)
        assert states.item() == number
        expected = min(9, number + 1 + depth)
        until(lambda expected=expected: log.count(("end", expected - 1)))
        time.sleep(0.02)
        assert [event for event in log if event[0] == "start"] == [("start", i) for i in range(expected)]
    ahead.close()
    assert not target_threads()


@pytest.mark.parametrize("depth", [1, 2])
def test_micro_batches_handed_out_together_are_bounded_too(depth):
    """An accumulating step takes its batches before it trains on the first: the target may not run through all."""
    log = []
    ahead = prefetcher(Recorder(log), depth)
    batches_ahead = ahead.look_ahead(batches(6), NO_DATALOADER)
    step = [next(batches_ahead) for _ in range(4)]
    for taken in range(5):
        started = min(6, taken + depth)
        until(lambda started=started: ("end", started - 1) in log)
        time.sleep(0.02)
        assert [event for event in log if event[0] == "start"] == [("start", i) for i in range(started)]
        if taken < 4:
            assert ahead.context_hidden_states(step[taken]).item() == taken
    ahead.close()


def test_the_target_works_while_the_drafter_does():
    """In the order of events alone: the next batch begins before the drafter is done, and batches keep their order."""
    log = []
    ahead = prefetcher(Recorder(log), 2)
    for number, batch in enumerate(ahead.look_ahead(batches(5), NO_DATALOADER)):
        ahead.context_hidden_states(batch)
        if number < 4:
            until(lambda number=number: ("end", number + 1) in log)
        log.append(("trained", number))
    ahead.close()
    for number in range(4):
        assert log.index(("end", number + 1)) < log.index(("trained", number))
    assert [n for kind, n in log if kind == "start"] == list(range(5))


def test_depth_zero_takes_turns_without_a_thread():
    log = []
    ahead = prefetcher(Recorder(log), 0)
    for number, batch in enumerate(ahead.look_ahead(batches(3), NO_DATALOADER)):
        assert ahead.context_hidden_states(batch).item() == number
        log.append(("trained", number))
        assert not target_threads()
    assert log == [(kind, n) for n in range(3) for kind in ("start", "end", "trained")]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_batches_may_be_left_out_and_read_twice(depth):
    """A loop that skips a step, or computes one again, waits for nothing that will not come."""
    ahead = prefetcher(Recorder([]), depth)
    got = []
    for number, batch in enumerate(ahead.look_ahead(batches(12), NO_DATALOADER)):
        if number % 4 != 1 and number not in (6, 7):
            got += [ahead.context_hidden_states(batch).item() for _ in range(2 if number == 4 else 1)]
    ahead.close()
    assert got == [0, 2, 3, 4, 4, 8, 10, 11]


def test_another_epoch_drops_what_was_prefetched():
    log = []
    ahead = prefetcher(Recorder(log), 2)
    state = NO_DATALOADER
    first = batches(9)
    ahead.context_hidden_states(next(ahead.look_ahead(first, state)))
    second = batches(2)
    got = [ahead.context_hidden_states(batch).item() for batch in ahead.look_ahead(second, state)]
    assert got == [0, 1]
    ahead.close()


def test_an_error_comes_when_its_batch_is_due_with_its_own_traceback():
    ahead = prefetcher(Recorder([], fail_at=3), 2)
    done = []
    with pytest.raises(ArithmeticError, match="batch 3 cannot be read") as caught:
        for batch in ahead.look_ahead(batches(9), NO_DATALOADER):
            done.append(ahead.context_hidden_states(batch).item())
    assert done == [0, 1, 2]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "context_hidden_states" and "_work" in frames
    ahead.close()
    assert not target_threads()


class FailsAtBatch5(DFlashTrainer):
    """A trainer whose target breaks in its fifth forward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = 0
        read_taps = self.target._read_taps

        def counted(**inputs):
            self.calls += 1
            if self.calls == 5:
                raise ArithmeticError("the fifth forward breaks")
            return read_taps(**inputs)

        self.target._read_taps = counted


@pytest.mark.parametrize(("depth", "workers"), [(0, 0), (2, 0), (2, 1)])
def test_a_failing_target_ends_the_run_cleanly(depth, workers, tmp_path):
    """Workers of the dataloader are alive then, since the traceback holds what iterates over them."""
    arguments = {"num_documents": 20, "dataloader_num_workers": workers}
    trainer = make_trainer(tmp_path, depth, trainer_class=FailsAtBatch5, **arguments)
    start = time.monotonic()
    with pytest.raises(ArithmeticError, match="fifth forward breaks"):
        trainer.train()
    assert time.monotonic() - start < 10
    assert trainer.state.global_step == 4
    assert not target_threads()
    assert not any(module._forward_hooks for module in trainer.target.model.modules())


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_an_interrupt_leaves_neither_thread_nor_hook_and_training_can_go_on(tmp_path):
    trainer = make_trainer(tmp_path, 2)
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not target_threads()
    assert not any(module._forward_hooks for module in trainer.target.model.modules())
    trainer.remove_callback(Interrupt)
    trainer.train()
    assert trainer.state.global_step == 14 and not target_threads()


class StopEarly(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 3
        return control


def test_an_epoch_that_is_stopped_early_leaves_nothing_for_the_next(tmp_path):
    losses = []
    for depth in (0, 3):
        trainer = make_trainer(tmp_path, depth)
        trainer.add_callback(StopEarly())
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 10


class RunsTheTarget(TrainerCallback):
    """Uses the target itself between two steps, as an evaluation by decoding does."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.prefetcher.wait_until_idle()
        model = self.trainer.target.model
        model(input_ids=torch.arange(9)[None])
        assert not any(module._forward_hooks for module in model.modules())


def test_the_target_can_be_used_between_steps(tmp_path):
    trainer = make_trainer(tmp_path, 2, target=hybrid_target())
    trainer.add_callback(RunsTheTarget(trainer))
    trainer.train()
    assert trainer.state.global_step == 14


def test_a_batch_that_nobody_ordered_is_computed_at_once(tmp_path):
    trainer = make_trainer(tmp_path, 2)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert PENDING not in batch
    expected = trainer.target.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    assert torch.equal(trainer.prefetcher.context_hidden_states(batch), expected)


def test_the_log_says_where_the_time_goes(tmp_path, caplog):
    trainer = make_trainer(tmp_path, 2, measure_alone_steps=3, logging_steps=2)
    trainer.train()
    entries = [{**entry, **entry["details"]} for entry in trainer.state.log_history if "loss" in entry]
    names = ("step_seconds", "target_seconds", "wait_seconds", "drafter_seconds", "tokens_per_second")
    for entry in entries:
        assert all(entry[name] > 0 for name in (*names, "anchors_per_second"))
        assert entry["wait_seconds"] + entry["drafter_seconds"] == pytest.approx(entry["step_seconds"], rel=0.5)
    assert {"target_seconds_alone", "drafter_seconds_alone"} <= entries[-1].keys()
    said = [m for m in caplog.messages if re.search("limits the step|share the CPU", m)]
    assert said


def test_time_is_not_counted_while_evaluating(tmp_path):
    class Slow(DFlashTrainer):
        def evaluation_loop(self, *args, **kwargs):
            time.sleep(0.5)
            return super().evaluation_loop(*args, **kwargs)

    trainer = make_trainer(tmp_path, 2, trainer_class=Slow, eval_strategy="steps", eval_steps=1, max_steps=4)
    trainer.train()
    assert all(entry["details"]["step_seconds"] < 0.5 for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize(
    ("name", "value"), [("prefetch_depth", -1), ("target_layout", "split"), ("feature_copies", "fast")]
)
def test_arguments_out_of_range_are_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name}="):
        DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_that_survives_an_error_goes_on(depth):
    """Whether it leaves the batch out or starts anew, as a search for a batch size that fits does."""
    ahead = prefetcher(Recorder([], fail_at=3), depth)
    got = []
    for _ in range(2):
        for batch in ahead.look_ahead(batches(6), NO_DATALOADER):
            try:
                got.append(ahead.context_hidden_states(batch).item())
            except ArithmeticError:
                got.append("error")
    with pytest.raises(ArithmeticError):
        for batch in ahead.look_ahead(batches(6), NO_DATALOADER):
            ahead.context_hidden_states(batch)
    anew = [ahead.context_hidden_states(batch).item() for batch in ahead.look_ahead(batches(3), NO_DATALOADER)]
    ahead.close()
    assert got == [0, 1, 2, "error", 4, 5] * 2 and anew == [0, 1, 2] and not target_threads()


def test_a_forward_that_outlives_its_run_takes_no_part_in_the_next(monkeypatch):
    monkeypatch.setattr("dflash_hf.prefetch.CLOSING_SECONDS", 0.01)
    log, may_end = [], threading.Event()

    class Stuck(Recorder):
        def context_hidden_states(self, input_ids, document_lengths=None):
            if not log:
                log.append("stuck")
                may_end.wait(20)
            return super().context_hidden_states(input_ids, document_lengths)

    ahead = prefetcher(Stuck(log), 1)
    next(ahead.look_ahead(batches(3), NO_DATALOADER))
    until(lambda: log == ["stuck"])
    (old,) = target_threads()
    ahead.close()
    got = []
    for batch in ahead.look_ahead(batches(3), NO_DATALOADER):
        got.append(ahead.context_hidden_states(batch).item())
        may_end.set()
        old.join(20)
        assert old not in target_threads() and len(target_threads()) == 1
    ahead.close()
    assert got == [0, 1, 2] and not target_threads()
