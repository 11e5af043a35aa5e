# SPDX-License-Identifier: Apache-2.0
"""A run that is killed or interrupted, and resumed, ends with the weights of the run that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import finish, start, train, wait_for_step

import dflash_hf.checkpointing
import dflash_hf.writing
from dflash_hf.callbacks import INTERRUPTED_STATUS
from dflash_hf.checkpointing import last_complete_checkpoint, manifest_problems


STEPS, SAVE_STEPS = 60, 10


def slow(value):
    """A parameter that `make test-all` adds."""
    return pytest.param(value, marks=pytest.mark.slow)


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


def weights(folder: Path, rank: int = 0) -> dict:
    return torch.load(folder / f"final-{rank}.pt")


def assert_same_end(folder: Path, expected: Path, world: int, note: str = "") -> None:
    want = weights(expected)
    for rank in range(world):
        got = weights(folder, rank)
        assert got["losses"] == want["losses"], note
        for name, parameter in want["parameters"].items():
            assert torch.equal(got["parameters"][name], parameter), (name, note)


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
    assert "Send it once more" in (tmp_path / "log").read_text()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_finished_run_takes_no_further_step_when_it_is_resumed(whole):
    """60 steps of 16 rows end in the middle of an epoch, where Trainer alone would go on to step 61."""
    folder = whole[1]
    before = weights(folder)
    assert finish(start(train, str(folder), resume=True, log=folder / "log")) == [0]
    assert (folder / "step-0").read_text() == str(STEPS)
    for name, parameter in weights(folder)["parameters"].items():
        assert torch.equal(parameter, before["parameters"][name]), name


def test_a_run_of_two_ranks_goes_on_as_one_that_accumulates_and_back(whole, tmp_path):
    """Two rows per step each time: the same run but for rounding."""
    processes = start(train, str(tmp_path), world=2, log=tmp_path / "log", seconds=0.01)
    wait_for_step(tmp_path, 21, processes)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert finish(processes) == [INTERRUPTED_STATUS] * 2
    alone = start(train, str(tmp_path), resume=True, log=tmp_path / "log", gradient_accumulation_steps=2, seconds=0.01)
    wait_for_step(tmp_path, 40, alone)
    os.kill(alone[0].pid, signal.SIGTERM)
    assert finish(alone) == [INTERRUPTED_STATUS]
    assert finish(start(train, str(tmp_path), resume=True, world=2, log=tmp_path / "log")) == [0] * 2
    assert "the same but for rounding" in (tmp_path / "log").read_text()
    got, want = weights(tmp_path), weights(whole[2])
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)
    for name, parameter in want["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], parameter, rtol=0, atol=1e-5, msg=name)


TWO_GLOO_RANKS = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
TWO_GLOO_RANKS += ("--dynamo_backend", "no")


def launched(folder: Path, launcher: tuple[str, ...], environment: dict[str, str], **arguments) -> subprocess.Popen:
    """`runs.train` by `accelerate launch`, with its output in `log`."""
    script = folder / "script.py"
    words = "".join(f", {name}={value!r}" for name, value in arguments.items())
    script.write_text(f"import runs\nif __name__ == '__main__':\n    runs.train({str(folder)!r}{words})\n")
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--main_process_port", "0", str(script)]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=log,
        )


def signal_launcher(
    folder: Path, number: int, launcher: tuple[str, ...], environment: dict[str, str], **arguments
) -> Path:
    """Start two ranks, send the launcher a signal once they train, and return their newest complete checkpoint."""
    process = launched(folder, launcher, environment, seconds=0.05, **arguments)
    while not (folder / "step-1").exists():
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        time.sleep(0.05)
    process.send_signal(number)
    # The launcher passes it on, waits 30 s for the ranks, and has a status of its own.
    assert process.wait(60) == 1
    newest = last_complete_checkpoint(folder / "run")
    assert newest is not None, (folder / "log").read_text()[-2000:]
    assert {(folder / f"step-{rank}").read_text() for rank in (0, 1)} == {newest.name.split("-")[1]}
    return newest


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_the_ranks(tmp_path, number):
    signal_launcher(tmp_path, number, TWO_GLOO_RANKS, {"ACCELERATE_USE_CPU": "true"})


def run_with_workers(folder: Path, **arguments) -> tuple[subprocess.Popen, Path]:
    """A run of its own process group whose batches two workers make."""
    script, log = folder / "script.py", folder / "log"
    words = ", ".join(f"{name}={value!r}" for name, value in {"dataloader_num_workers": 2, **arguments}.items())
    script.write_text(f"import runs\nif __name__ == '__main__':\n    runs.train({str(folder)!r}, {words})\n")
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    return run, log


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
