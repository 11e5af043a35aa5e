# SPDX-License-Identifier: Apache-2.0
"""Runs of a function that are killed: in processes forked from a clean one, since pytest's own has threads."""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path


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
