# SPDX-License-Identifier: Apache-2.0
"""The target runs ahead of the drafter and nothing else changes: same numbers, same order, a clean end."""

import threading
import time
import traceback
from functools import partial
from types import SimpleNamespace

import pytest
import runs
import torch
from accelerate import Accelerator, skip_first_batches
from runs import make_documents
from tiny import hybrid_target, refused
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from dflash_hf import DFlashTrainer, DFlashTrainingArguments, packed_targets
from dflash_hf.packed_targets import (
    THREAD,
    NotCompiled,
    PackedDense,
    PackedQwen35,
    Piece,
    compiled_function,
    flex_documents,
    packed_row,
    refuse_uncompiled,
)
from dflash_hf.planning import check_copy
from dflash_hf.prefetch import GATE, PENDING, Features, FeatureTransfer, Prefetcher, Span, Throughput, known_ahead


CPU, OTHER = torch.device("cpu"), torch.device("meta")
# accelerate's state while nothing of its own is iterated over.
NO_DATALOADER = SimpleNamespace(active_dataloader=None)


def make_trainer(
    folder,
    depth: int,
    target=None,
    num_documents: int = 7,
    train_documents=None,
    trainer_class=DFlashTrainer,
    **values,
):
    """Two epochs of documents that each fill a row."""
    values = {"num_anchors": 8, "num_train_epochs": 2, "max_steps": -1, "save_strategy": "no", **values}
    data = train_documents or make_documents(num_documents)
    values |= {"cls": trainer_class, "eval_dataset": make_documents(3), "prefetch_depth": depth}
    return runs.make_trainer(folder, target, data, **values)


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


def prefetcher(target, depth: int, device: torch.device = CPU, copies: str = "peer") -> Prefetcher:
    transfer = FeatureTransfer(target, [target.device], device, copies)
    return Prefetcher(transfer, device, depth, Throughput(device, [target.device]))


def until(condition, seconds: float = 10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to this"
        time.sleep(0.002)


@pytest.mark.parametrize("handed_out", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_never_more_than_depth_batches_wait(depth, handed_out):
    """While the drafter is at one batch, the target starts on exactly `depth` later ones and then waits.

    Also where an accumulating step takes its batches before it trains on the first.
    """
    log = []
    ahead = prefetcher(Recorder(log), depth)
    batches_ahead, taken = ahead.look_ahead(batches(8), NO_DATALOADER), 0
    while step := [batch for batch in (next(batches_ahead, None) for _ in range(handed_out)) if batch]:
        for batch in step:
            assert ahead.context_hidden_states(batch).item() == taken
            taken += 1
            expected = min(8, taken + depth)
            if handed_out > 1:
                # Only what was fetched can have been ordered.
                expected = min(expected, ahead._ordered)
            until(lambda expected=expected: ("end", expected - 1) in log)
            time.sleep(0.02)
            assert [event for event in log if event[0] == "start"] == [("start", i) for i in range(expected)]
    ahead.close()
    assert taken == 8 and not target_threads()


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
    with pytest.raises(ArithmeticError, match="batch 3") as caught:
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
    with pytest.raises(ArithmeticError, match="fifth"):
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
    assert any("s of target" in message for message in caplog.messages)


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
    with refused(ValueError, name):
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


# --- What the log says about the time of a step, and the sentence about what limits it.


def span(seconds: float) -> Span:
    measured = Span(CPU).end()
    measured._end = measured._start + seconds
    return measured


def train(throughput: Throughput, target: float, drafter: float, steps: int = 3, accumulation: int = 1, alone=False):
    for _ in range(steps):
        for micro_batch in range(accumulation):
            throughput.waiting(num_tokens=100, num_anchors=7)
            spans = [("target_seconds", span(target)), ("copy_seconds", span(0.5))]
            throughput.received(Features(torch.zeros(1), spans), alone)
            time.sleep(drafter)
            end = throughput.on_step_end if micro_batch == accumulation - 1 else throughput.on_substep_end
            end(None, None, None)


def test_figures_are_means_per_optimizer_step_and_rates_of_all_ranks():
    throughput = Throughput(CPU, [OTHER], world_size=2)
    train(throughput, target=0.25, drafter=0.01, steps=3, accumulation=2)
    figures = throughput.metrics()
    assert figures["target_seconds"] == pytest.approx(0.5)
    assert figures["copy_seconds"] == pytest.approx(1.0)
    assert 0.02 <= figures["drafter_seconds"] <= figures["step_seconds"] < 1
    assert figures["tokens_per_second"] == pytest.approx(2 * 200 / figures["step_seconds"])
    assert figures["anchors_per_second"] == pytest.approx(2 * 14 / figures["step_seconds"])
    assert figures["in_turn"] == 0 and "target_seconds_alone" not in figures
    for seconds in (9.0, 0.25, 0.25):
        train(throughput, seconds, 0.0, steps=1, alone=True)
    figures = throughput.metrics()
    assert figures["target_seconds"] == pytest.approx(9.5 / 3)
    # Medians of each half alone.
    assert figures["target_seconds_alone"] == pytest.approx(0.25) and figures["in_turn"] == 1


def test_what_a_device_has_not_reached_counts_in_the_next_log():
    throughput, late = Throughput(CPU, [OTHER]), Span(CPU)
    throughput.waiting(1, 1)
    throughput.received(Features(torch.zeros(1), [("target_seconds", late)]), alone=False)
    throughput.on_step_end(None, None, None)
    assert throughput.metrics()["target_seconds"] == 0
    late._end = late._start + 0.25
    assert throughput.metrics()["target_seconds"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("target", "drafter", "target_device", "depth", "said"),
    [
        (1.0, 0.0, OTHER, 2, "target limits"),
        (0.0, 0.02, OTHER, 2, "drafter limits"),
        (1.0, 0.0, CPU, 2, "CPU"),
        (1.0, 0.0, OTHER, 0, "prefetch_depth"),
    ],
)
def test_one_sentence_says_what_limits_and_what_to_change(target, drafter, target_device, depth, said):
    throughput = Throughput(CPU, [target_device])
    assert throughput.advice(depth) is None
    train(throughput, target, drafter)
    throughput.metrics()
    assert said in throughput.advice(depth)


# --- What runs ahead never compiles, and rests while the training thread does; nothing else changes.

MANY = {"recompile_limit": 10000, "accumulated_recompile_limit": 10000}
BODIES = {
    packed_targets._delta_inputs: 3,
    packed_targets._delta_outputs: 4,
    packed_targets._attention_inputs: 4,
    packed_targets._attention_outputs: 4,
    packed_targets._feed_forward: 2,
    flex_documents: 8,
}


@pytest.fixture
def fresh_compiler():
    """No variants that other tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Runs graphs as they stand; remembers the threads that compiled, and what it saw of those that were ahead."""

    def __init__(self, seconds: float = 0.0):
        self.threads: list[str] = []
        self.seconds = seconds
        self.compiling = self.inside = False
        self.overlaps = 0

    def __call__(self, graph, inputs):
        self.threads.append(threading.current_thread().name)
        self.compiling = True
        for _ in range(3):
            self.overlaps += self.inside
            time.sleep(self.seconds / 3)
        self.compiling = False
        return graph.forward


def doubled(x: torch.Tensor) -> torch.Tensor:
    refuse_uncompiled()
    return x * 2


def foreign(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def grown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def in_thread(function, *args, name: str = "other", seconds: float = 60.0):
    """What a function gives or raises in a thread that has to end in time, with room for many variants."""
    outcome = []

    def work():
        try:
            with torch._dynamo.config.patch(**MANY):
                outcome.append((function(*args), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"stuck for {seconds} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def ahead(function, *args):
    def region():
        with GATE.ahead():
            return function(*args)

    return in_thread(region, name="ahead")


def test_a_thread_that_is_ahead_runs_what_is_compiled_and_nothing_else(fresh_compiler):
    backend = Backend()
    function = compiled_function(doubled, backend=backend, dynamic=False)
    for size in (4, 7):
        x = torch.arange(size)
        with pytest.raises(NotCompiled):
            ahead(function, x)
        expected = function(x)
        assert torch.equal(ahead(function, x), expected)
        # Uncompiled on purpose.
        assert torch.equal(ahead(doubled, x), expected)
    assert backend.threads == ["MainThread"] * 2
    with torch._dynamo.config.patch(disable=True):
        assert compiled_function(doubled) is doubled


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_compiled_function_of_a_target_refuses_to_run_as_it_stands(body, monkeypatch):
    monkeypatch.setattr(THREAD, "run_only", True)
    with pytest.raises(NotCompiled):
        body(*[None] * BODIES[body])


def test_layers_that_the_training_thread_compiled_serve_the_one_ahead(monkeypatch, fresh_compiler):
    """Whatever autocast the training thread is under."""
    backend = Backend()
    monkeypatch.setattr(
        packed_targets, "compiled_function", partial(compiled_function, backend=backend, fullgraph=True)
    )
    decoder = hybrid_target().get_decoder()
    layers, plain = (PackedQwen35(decoder, [2, 6], is_compiled) for is_compiled in (True, False))

    @torch.no_grad()
    def states(stack, row):
        with torch.autocast("cpu", enabled=False, cache_enabled=True):
            return stack.hidden_states(torch.zeros_like(row.position_ids), row)

    for lengths in ([100], [200, 90]):
        row = packed_row([Piece(i, 0, n) for i, n in enumerate(lengths)], 600, 128, torch.device("cpu"))
        with pytest.raises(NotCompiled):
            ahead(states, layers, row)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            expected = states(layers, row)
        for stack in (layers, plain):
            for actual, tap in zip(ahead(states, stack, row), expected, strict=True):
                torch.testing.assert_close(actual, tap)
    assert set(backend.threads) == {"MainThread"}


class CompilesInEveryStep(DFlashTrainer):
    """A trainer whose target compiles for each length of a row, and whose loss compiles in every step."""

    backend: Backend

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        flex = compiled_function(flex_documents, backend=self.backend, fullgraph=True, dynamic=False)
        self.target._unchecked = PackedDense(self.target.model.get_decoder(), self.target._read_taps, flex)
        self.grown = torch.compile(grown, backend=self.backend, dynamic=False)

    def compute_loss(self, *args, **kwargs):
        self.grown(torch.zeros(self.state.global_step + 2))
        return super().compute_loss(*args, **kwargs)


def test_p2_s1_a_target_that_compiles_late_changes_no_loss(tmp_path, fresh_compiler):
    """One document a row; rows of 256, 384 and 512 tokens come as the shuffle has it."""
    generator = torch.Generator().manual_seed(0)
    lengths = [270, 300, 390, 251, 380, 480, 255]
    train_documents = [
        {"input_ids": torch.randint(0, 256, (n,), generator=generator).tolist(), "supervised_spans": [[5, n]]}
        for n in lengths
    ]
    runs = {}
    for depth in (0, 2):
        torch._dynamo.reset()
        backend = CompilesInEveryStep.backend = Backend()
        # No weight moves: on some CPUs a bfloat16 gradient rounds otherwise in each run, whatever the target does.
        trainer = make_trainer(
            tmp_path, depth, train_documents=train_documents, trainer_class=CompilesInEveryStep, row_length=500,
            num_train_epochs=1, bf16=True, learning_rate=1e-30,
        )  # fmt: skip
        in_thread(trainer.train, name="training")
        assert trainer.target._packed is not None
        assert set(backend.threads) == {"training"}
        runs[depth] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        # The first batch, with which the target is checked, and those of other lengths than the check's row.
        assert trainer.prefetcher._num_left == (0 if depth == 0 else 3)
        assert not target_threads()
    assert runs[2] == runs[0] and len(runs[0]) == len(lengths)


class Watched(Recorder):
    """Looks all through its forwards whether anything compiles."""

    def __init__(self, backend: Backend, **kwargs):
        super().__init__([], **kwargs)
        self.backend = backend

    def context_hidden_states(self, input_ids, document_lengths=None):
        self.backend.inside = True
        for _ in range(5):
            self.backend.overlaps += self.backend.compiling
            time.sleep(0.001)
        self.backend.inside = False
        return super().context_hidden_states(input_ids, document_lengths)


def gate_is_open() -> bool:
    return not target_threads() and not GATE._closed and not GATE._inside


@pytest.mark.parametrize("reset", [False, True])
def test_a_compilation_never_meets_the_threads_that_are_ahead(reset, fresh_compiler):
    """Those of two prefetchers, which share the gate."""
    backend = Backend(seconds=0.006)
    pair = [prefetcher(Watched(backend), 2) for _ in range(2)]
    function = torch.compile(grown, backend=backend, dynamic=False)

    def train():
        both = [one.look_ahead(batches(15), NO_DATALOADER) for one in pair]
        for number, ready in enumerate(zip(*both, strict=True)):
            if reset and number == 3:
                for one in pair:
                    one.wait_until_idle()
                torch._dynamo.reset()
            for one, batch in zip(pair, ready, strict=True):
                assert one.context_hidden_states(batch).item() == number
            function(torch.zeros(number + 2))
            assert len(torch._dynamo.callback_handler.start_callbacks) == 1
            time.sleep(0.002)

    in_thread(train)
    for one in pair:
        one.close()
    assert len(backend.threads) == 15 and backend.overlaps == 0 and gate_is_open()


class Compiling(Recorder):
    """Its hidden states are those of [`Recorder`], doubled by a compiled function whose shapes change."""

    def __init__(self, function, sizes, **kwargs):
        super().__init__([], **kwargs)
        self.function, self.sizes = function, sizes

    def context_hidden_states(self, input_ids, document_lengths=None):
        states = super().context_hidden_states(input_ids, document_lengths)
        return self.function(states.expand(1, self.sizes[int(input_ids[0, 0])], 1))


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("of_the_user", [False, True])
def test_random_compilations_end_and_none_is_ahead(of_the_user, count, fresh_compiler):
    """A function that the user compiled waits for the compiler's lock where ours asks for none."""
    backend = Backend()
    sizes = torch.randint(2, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    made = torch.compile if of_the_user else compiled_function
    target = Compiling(made(foreign if of_the_user else doubled, backend=backend, dynamic=False), sizes)
    runs_ahead = prefetcher(target, 3)
    function = torch.compile(grown, backend=backend, dynamic=False)

    def train():
        for number, batch in enumerate(runs_ahead.look_ahead(batches(count), NO_DATALOADER)):
            states = runs_ahead.context_hidden_states(batch)
            assert states.shape == (1, sizes[number], 1) and (states == 2 * number).all()
            function(torch.zeros(number + 2))

    in_thread(train, name="training")
    runs_ahead.close()
    assert set(backend.threads) == {"training"}
    # The thread that is ahead has the compiler's own limit of variants, behind which the user's function is plain.
    assert of_the_user or len(backend.threads) == count + len(set(sizes))
    assert gate_is_open()


@pytest.mark.parametrize("fail_at", [-1, 3])
def test_batches_that_wait_for_a_compilation_may_be_left_out_or_fail(fail_at, fresh_compiler):
    """Every batch has a shape of its own, so that each is left to the training thread."""
    target = Compiling(compiled_function(doubled, backend=Backend(), dynamic=False), range(2, 20), fail_at=fail_at)
    runs_ahead = prefetcher(target, 2)
    got = []

    def train():
        for number, batch in enumerate(runs_ahead.look_ahead(batches(9), NO_DATALOADER)):
            runs_ahead.wait_until_idle()
            if number in (1, 4, 5):
                continue
            try:
                got.append(int(runs_ahead.context_hidden_states(batch)[0, 0, 0]))
            except ArithmeticError:
                got.append("error")

    in_thread(train)
    runs_ahead.close()
    assert got == [0, 4, "error" if fail_at == 3 else 6, 12, 14, 16] and gate_is_open()


def test_a_compilation_that_fails_leaves_the_gate_open(fresh_compiler):
    def broken(graph, inputs):
        raise ArithmeticError("no kernel")

    runs_ahead = prefetcher(Recorder([]), 2)
    function = torch.compile(grown, backend=broken)

    def train():
        for number, batch in enumerate(runs_ahead.look_ahead(batches(6), NO_DATALOADER)):
            assert runs_ahead.context_hidden_states(batch).item() == number
            with pytest.raises(Exception, match="no kernel"):
                function(torch.zeros(number + 2))

    in_thread(train)
    runs_ahead.close()
    assert gate_is_open()


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_target_apart_is_measured_under_its_own_load(is_apart):
    target = Recorder([])
    transfer, throughput = FeatureTransfer(target, [CPU], CPU, "peer"), Throughput(CPU, [CPU])
    transfer.is_apart = is_apart
    runs_ahead = Prefetcher(transfer, CPU, 2, throughput, 2)
    for number, batch in enumerate(runs_ahead.look_ahead(batches(5), NO_DATALOADER)):
        assert runs_ahead.context_hidden_states(batch).item() == number
        throughput.on_step_end(None, None, None)
    runs_ahead.close()
    started = [number for kind, number in target.log if kind == "start"]
    assert started == [0] * (3 if is_apart else 1) + [1] * (3 if is_apart else 1) + [2, 3, 4]
    throughput.metrics()
    # Three forwards of a batch are one measurement.
    assert len(throughput._alone["target_seconds"]) == 2


# --- On GPUs: no loss changes, memory keeps its bound, and both halves really run at the same time.

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LAYOUTS = ["shared", pytest.param("paired", marks=two_gpus)]


def run_on_gpu(folder, depth: int, layout: str, **arguments) -> dict:
    values = {"drafter_attn_implementation": "sdpa", "compile_layers": False, **arguments}
    trainer = make_trainer(
        folder, depth, num_documents=24, row_length=64, bf16=True, use_cpu=False, target_layout=layout, **values
    )
    trainer.train()
    devices = {p.device for p in trainer.target.model.parameters()}
    assert devices == {torch.device("cuda", 0 if layout == "shared" else 1)}
    assert not target_threads()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "logs": [entry | entry["details"] for entry in trainer.state.log_history if "loss" in entry],
    }


# No weight changes, so that losses are of forwards alone: the backward of sdpa sums in the order in which its blocks
# come, in turn or not (torch's "non-deterministic algorithm" of memory-efficient attention).
STILL = {"learning_rate": 1e-30}
# What is trained with by default repeats to the bit, backward included.
COMPILED = {"drafter_attn_implementation": "flex_attention", "compile_layers": True}


@pytest.mark.gpu
@pytest.mark.parametrize("copies", ["peer", "host"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_g2_depth_changes_no_bit_of_a_loss(layout, copies, tmp_path):
    """cuDNN's attention was left out of the drafter's forward just when the target's thread was in its own."""
    expected = run_on_gpu(tmp_path, 0, layout, **STILL)["losses"]
    for depth in (1, 2):
        assert run_on_gpu(tmp_path, depth, layout, feature_copies=copies, **STILL)["losses"] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_g2_depth_changes_no_bit_of_training_with_flex_attention(layout, tmp_path):
    ahead, in_turn = (run_on_gpu(tmp_path, depth, layout, **COMPILED)["losses"] for depth in (2, 0))
    assert ahead == in_turn


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_log_holds_times_of_the_devices(layout, tmp_path):
    logs = run_on_gpu(tmp_path, 2, layout, measure_alone_steps=3)["logs"]
    for name in ("step_seconds", "target_seconds", "drafter_seconds", "tokens_per_second", "drafter_peak_gigabytes"):
        assert all(entry[name] > 0 for entry in logs[:-1])
    assert ("target_peak_gigabytes" in logs[-1]) == (layout == "paired")


class CompilesOnGpu(DFlashTrainer):
    """A trainer that compiles something in every step, beside what the drafter's layers and the target need."""

    def compute_loss(self, *args, **kwargs):
        torch.compile(grown, backend="aot_eager", dynamic=False)(torch.zeros(self.state.global_step + 2))
        return super().compute_loss(*args, **kwargs)


def run_compiled(folder, depth: int) -> tuple[list[float], int, set[str]]:
    """Losses of 30 steps on documents of very different lengths, batches left to the training thread, compilers."""
    torch._dynamo.reset()
    compilers: set[str] = set()
    torch._dynamo.callback.on_compile_start(lambda args: compilers.add(threading.current_thread().name))
    generator = torch.Generator().manual_seed(0)
    # More than half a row each, so that every row holds one, in rows of 640 to 1,280 tokens.
    lengths = torch.randint(601, 1200, (30,), generator=generator).tolist()
    rows = [
        {"input_ids": torch.randint(0, 256, (n,), generator=generator).tolist(), "supervised_spans": [[5, n]]}
        for n in lengths
    ]
    trainer = make_trainer(
        folder, depth, train_documents=rows, trainer_class=CompilesOnGpu, row_length=1200, max_steps=30, bf16=True,
        use_cpu=False, target_layout="shared", compile_target=True,
    )  # fmt: skip
    # Without shapes that stand for any length the target compiles for each one, late ones too.
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, recompile_limit=1000, accumulated_recompile_limit=1000
    ):
        trainer.train()
    assert isinstance(trainer.target._packed, PackedDense)
    assert not target_threads()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.prefetcher._num_left, compilers


@pytest.mark.gpu
def test_p2_both_halves_may_compile_late(tmp_path):
    expected, *_ = run_compiled(tmp_path, 0)
    losses, num_left, compilers = run_compiled(tmp_path, 2)
    assert len(losses) == 30 and losses == pytest.approx(expected, rel=1e-3)
    assert 1 <= num_left <= 8
    assert "MainThread" in compilers and "dflash-target" not in compilers


class BusyTarget:
    """Multiplies matrices on its device, then gives its batch's number; remembers the most memory it saw."""

    def __init__(self, device: torch.device, size: int = 4096, repeats: int = 30, width: int = 2**22):
        self.device = device
        self.matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self.repeats, self.width = repeats, width

    def work(self, matrix: torch.Tensor) -> None:
        for _ in range(self.repeats):
            torch.matmul(matrix, matrix)

    def context_hidden_states(self, input_ids, document_lengths=None):
        number = input_ids.to(self.device, non_blocking=True)[0, 0]
        self.work(self.matrix)
        return torch.ones(1, 1, self.width, device=self.device, dtype=torch.bfloat16) * number


def step_milliseconds(target: BusyTarget, device: torch.device, depth: int, copies: str, steps: int = 30) -> float:
    runs_ahead = prefetcher(target, depth, device, copies)
    matrix = target.matrix.to(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wrong = torch.zeros((), device=device)
    for number, batch in enumerate(runs_ahead.look_ahead(batches(steps), NO_DATALOADER)):
        if number == 5:
            start.record(torch.cuda.current_stream(device))
        states = runs_ahead.context_hidden_states(batch)
        wrong += (states != number).sum()
        target.work(matrix)
        del states
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    runs_ahead.close()
    assert wrong.item() == 0
    return start.elapsed_time(end) / (steps - 5)


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("copies", ["peer", "host"])
def test_two_gpus_work_at_the_same_time(copies):
    target, device = BusyTarget(torch.device("cuda", 1)), torch.device("cuda", 0)
    step_milliseconds(target, device, 2, copies)
    in_turn, ahead = (step_milliseconds(target, device, depth, copies) for depth in (0, 2))
    assert ahead < 0.7 * in_turn


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_a_step_waits_for_a_device(layout, depth):
    """Token ids in pinned memory, as the dataloader gives them; torch raises where the host would wait."""
    device = torch.device("cuda", 0)
    target = BusyTarget(torch.device("cuda", 0 if layout == "shared" else 1), size=256, repeats=2)
    runs_ahead = prefetcher(target, depth, device)
    pinned = ({**batch, "input_ids": batch["input_ids"].pin_memory()} for batch in batches(9))
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = sum(runs_ahead.context_hidden_states(b)[0, 0, 0] for b in runs_ahead.look_ahead(pinned, NO_DATALOADER))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runs_ahead.close()
    assert total.item() == sum(range(9))


@pytest.mark.gpu
def test_one_gpu_is_not_slowed_down():
    device = torch.device("cuda", 0)
    target = BusyTarget(device)
    step_milliseconds(target, device, 2, "peer")
    in_turn, ahead = (step_milliseconds(target, device, depth, "peer") for depth in (0, 2))
    assert ahead < 1.15 * in_turn


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_memory_is_bounded_by_the_depth(layout, depth):
    """A slow drafter whose host runs far ahead: no more hidden states than the depth, the one in use and a margin."""
    device = torch.device("cuda", 0)
    target = BusyTarget(torch.device("cuda", 0 if layout == "shared" else 1), repeats=1, width=2**25)
    size = 2 * target.width
    runs_ahead = prefetcher(target, depth, device)
    matrix = target.matrix.to(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["active_bytes.all.current"]
    for batch in runs_ahead.look_ahead(batches(20), NO_DATALOADER):
        states = runs_ahead.context_hidden_states(batch)
        for _ in range(40):
            torch.matmul(matrix, matrix)
        del states
    torch.cuda.synchronize(device)
    runs_ahead.close()
    # On a shared GPU the target's own product is twice there while it is made.
    allowed = depth + 1 + (2 if layout == "shared" else 0)
    # Active memory: what was freed but is still used by another stream counts.
    peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"]
    assert peak - before <= allowed * size + 3 * matrix.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("copies", ["peer", "host"])
def test_bytes_arrive_unchanged(copies):
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    check_copy(last, torch.device("cuda", 0), copies, num_bytes=2**24)


def test_both_halves_of_a_step_run_at_the_same_time():
    """They meet: the target inside the forward of a batch, the drafter at the batch before."""
    together, count = threading.Barrier(2, timeout=30), 6

    class Meets(Recorder):
        def context_hidden_states(self, input_ids, document_lengths=None):
            if input_ids[0, 0]:
                together.wait()
            return super().context_hidden_states(input_ids, document_lengths)

    runs_ahead = prefetcher(Meets([]), 1)
    for number, batch in enumerate(runs_ahead.look_ahead(batches(count), NO_DATALOADER)):
        assert runs_ahead.context_hidden_states(batch).item() == number
        if number < count - 1:
            together.wait()
    runs_ahead.close()
