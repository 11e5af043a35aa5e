# SPDX-License-Identifier: Apache-2.0
"""Runs of a function that are killed: in processes forked from a clean one, since pytest's own has threads."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import torch

from dflash_hf.checkpointing import last_complete_checkpoint


def clean_context() -> multiprocessing.context.ForkServerContext:
    """Processes forked from a clean one, which imports once what all others need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runs"])
    # Python 3.11 does not hand its own path on to that process, which leaves out what it cannot import.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def run_and_kill(is_time: Callable[[], bool], function: Callable, *args, seconds: float = 120.0) -> None:
    """Runs `function(*args)` in a process of its own, and ends it by SIGKILL once `is_time()`, if it is not done."""
    process = clean_context().Process(target=function, args=args)
    process.start()
    deadline = time.monotonic() + seconds
    while process.is_alive() and not is_time():
        assert time.monotonic() < deadline, "the run takes too long"
        time.sleep(0.002)
    process.kill()
    process.join()


# Runs of several ranks by `accelerate launch`, and what their ranks leave behind.

STEPS = 60
TWO_GLOO_RANKS = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
TWO_GLOO_RANKS += ("--dynamo_backend", "no")


def weights(folder: Path, rank: int = 0) -> dict:
    """Weights and losses of a finished `runs.train`."""
    return torch.load(folder / f"final-{rank}.pt")


def script_of(folder: Path, **arguments) -> tuple[str, dict[str, str]]:
    """A program that calls `runs.train`, and the environment that it needs."""
    words = "".join(f", {name}={value!r}" for name, value in arguments.items())
    text = f"import runs\nif __name__ == '__main__':\n    runs.train({str(folder)!r}{words})\n"
    (folder / "script.py").write_text(text)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return str(folder / "script.py"), {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def launched(folder: Path, launcher: tuple[str, ...], environment: dict[str, str], **arguments) -> subprocess.Popen:
    """`runs.train` by `accelerate launch`, with its output in `log`."""
    script, inherited = script_of(folder, **arguments)
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--main_process_port", "0", script]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command, env={**inherited, **environment}, stdout=log, stderr=log)


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
