# SPDX-License-Identifier: Apache-2.0
"""Runs of a function that are killed: in processes forked from a clean one, since pytest's own has threads."""

import multiprocessing
import time
from collections.abc import Callable


CONTEXT = multiprocessing.get_context("forkserver")
# The clean process imports once what all others need.
CONTEXT.set_forkserver_preload(["dflash_hf", "tiny"])


def run_and_kill(is_time: Callable[[], bool], function: Callable, *args, seconds: float = 120.0) -> None:
    """Runs `function(*args)` in a process of its own, and ends it by SIGKILL once `is_time()`, if it is not done."""
    process = CONTEXT.Process(target=function, args=args)
    process.start()
    deadline = time.monotonic() + seconds
    while process.is_alive() and not is_time():
        assert time.monotonic() < deadline, "the run takes too long"
        time.sleep(0.002)
    process.kill()
    process.join()
