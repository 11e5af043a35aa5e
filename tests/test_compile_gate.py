# SPDX-License-Identifier: Apache-2.0
"""What runs ahead never compiles, and rests while the training thread does; nothing else changes."""

import threading
import time
from functools import partial

import pytest
import torch
from test_prefetch import NO_DATALOADER, Recorder, batches, make_trainer, prefetcher, target_threads
from tiny import hybrid_target

from dflash_hf import DFlashTrainer
from dflash_hf import packed_targets as dense
from dflash_hf import packed_targets as qwen3_5
from dflash_hf.packed_targets import THREAD, NotCompiled, Piece, packed_row, refuse_uncompiled
from dflash_hf.packed_targets import compiled_function as compiled
from dflash_hf.prefetch import GATE, FeatureTransfer


MANY = {"recompile_limit": 10000, "accumulated_recompile_limit": 10000}
BODIES = {
    qwen3_5._delta_inputs: 3, qwen3_5._delta_outputs: 4, qwen3_5._attention_inputs: 4, qwen3_5._attention_outputs: 4,
    qwen3_5._feed_forward: 2, dense.flex_documents: 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variants_of_other_tests():
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

    try:
        return in_thread(region, name="ahead")
    finally:
        GATE._uninstall()


def test_a_thread_that_is_ahead_runs_what_is_compiled_and_nothing_else():
    backend = Backend()
    function = compiled(doubled, backend=backend, dynamic=False)
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
        assert compiled(doubled) is doubled


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_compiled_function_of_a_target_refuses_to_run_as_it_stands(body, monkeypatch):
    monkeypatch.setattr(THREAD, "run_only", True)
    with pytest.raises(NotCompiled):
        body(*[None] * BODIES[body])


def test_layers_that_the_training_thread_compiled_serve_the_one_ahead(monkeypatch):
    """Whatever autocast the training thread is under."""
    backend = Backend()
    monkeypatch.setattr(qwen3_5, "compiled_function", partial(compiled, backend=backend, fullgraph=True))
    decoder = hybrid_target().get_decoder()
    layers, plain = (qwen3_5.PackedQwen35(decoder, [2, 6], is_compiled) for is_compiled in (True, False))

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
        packed = dense.PackedDense(self.target.model.get_decoder(), self.target._read_taps)
        packed.attention = packed.all_at_once(
            compiled(dense.flex_documents, backend=self.backend, fullgraph=True, dynamic=False)
        )
        self.target._unchecked = packed
        self.grown = torch.compile(grown, backend=self.backend, dynamic=False)

    def compute_loss(self, *args, **kwargs):
        self.grown(torch.zeros(self.state.global_step + 2))
        return super().compute_loss(*args, **kwargs)


def test_p2_s1_a_target_that_compiles_late_changes_no_loss(tmp_path):
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


@pytest.mark.parametrize("reset", [False, True])
def test_a_compilation_never_meets_the_thread_that_is_ahead(reset):
    backend = Backend(seconds=0.006)
    runs_ahead = prefetcher(Watched(backend), 2)
    function = torch.compile(grown, backend=backend, dynamic=False)

    def train():
        for number, batch in enumerate(runs_ahead.look_ahead(batches(20), NO_DATALOADER)):
            if reset and number == 3:
                runs_ahead.wait_until_idle()
                torch._dynamo.reset()
            assert runs_ahead.context_hidden_states(batch).item() == number
            function(torch.zeros(number + 2))
            time.sleep(0.002)

    in_thread(train)
    runs_ahead.close()
    assert len(backend.threads) == 20 and backend.overlaps == 0


def gate_is_gone() -> bool:
    handler = torch._dynamo.callback_handler
    return not target_threads() and not handler.start_callbacks and not handler.end_callbacks and not GATE._closed


def test_two_prefetchers_share_the_gate():
    backend = Backend(seconds=0.003)
    pair = [prefetcher(Watched(backend), 2) for _ in range(2)]
    function = torch.compile(grown, backend=backend, dynamic=False)

    def train():
        both = [one.look_ahead(batches(12), NO_DATALOADER) for one in pair]
        for number, (first, second) in enumerate(zip(*both, strict=True)):
            for one, batch in zip(pair, (first, second), strict=True):
                assert one.context_hidden_states(batch).item() == number
            function(torch.zeros(number + 2))
            if number == 6:
                assert len(torch._dynamo.callback_handler.start_callbacks) == 1

    in_thread(train)
    pair[0].close()
    assert not gate_is_gone()
    pair[1].close()
    assert gate_is_gone() and backend.overlaps == 0 and len(backend.threads) == 12


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
def test_random_compilations_end_and_none_is_ahead(of_the_user, count):
    """A function that the user compiled waits for the compiler's lock where ours asks for none."""
    backend = Backend()
    sizes = torch.randint(2, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    made = torch.compile if of_the_user else compiled
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
    assert gate_is_gone()


@pytest.mark.parametrize("fail_at", [-1, 3])
def test_batches_that_wait_for_a_compilation_may_be_left_out_or_fail(fail_at):
    """Every batch has a shape of its own, so that each is left to the training thread."""
    target = Compiling(compiled(doubled, backend=Backend(), dynamic=False), range(2, 20), fail_at=fail_at)
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
    assert got == [0, 4, "error" if fail_at == 3 else 6, 12, 14, 16] and gate_is_gone()


def test_a_compilation_that_fails_leaves_the_gate_open():
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
    assert gate_is_gone()


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_target_apart_is_measured_under_its_own_load(is_apart, monkeypatch):
    monkeypatch.setattr(FeatureTransfer, "is_apart", is_apart)
    target = Recorder([])
    runs_ahead = prefetcher(target, 2)
    runs_ahead._measures_alone, runs_ahead._alone_batches, runs_ahead._alone_left = True, 2, 2
    for number, batch in enumerate(runs_ahead.look_ahead(batches(5), NO_DATALOADER)):
        assert runs_ahead.context_hidden_states(batch).item() == number
        runs_ahead._throughput.trained(step_is_over=True)
    runs_ahead.close()
    started = [number for kind, number in target.log if kind == "start"]
    assert started == [0] * (3 if is_apart else 1) + [1] * (3 if is_apart else 1) + [2, 3, 4]
    runs_ahead._throughput.metrics()
    # Three forwards of a batch are one measurement.
    assert len(runs_ahead._throughput._alone["target_seconds"]) == 2
