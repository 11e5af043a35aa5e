# SPDX-License-Identifier: Apache-2.0
"""The end of the launcher, which a run notices although nobody tells it.

`accelerate launch` passes signals on to several ranks. For a single process (`distributed_type: NO`) it passes none: a
SIGTERM ends the launcher, and the run would train on with nobody waiting for it.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path


_PR_SET_PDEATHSIG = 1
# Nobody else sends it, so it is not taken for a second SIGTERM. None where the kernel sends nothing.
LAUNCHER_ENDED = signal.SIGRTMIN if sys.platform == "linux" else None


def watch_launcher() -> bool:
    """Have the kernel send [`LAUNCHER_ENDED`] to this process when the `accelerate launch` that started it ends.

    Returns:
        Whether it will; not where something else started it, or outside Linux.

    Raises:
        OSError: The kernel refused.
    """
    if LAUNCHER_ENDED is None or not _is_launcher(os.getppid()):
        return False
    _signal_at_end_of_parent(LAUNCHER_ENDED)
    return True


def forget_launcher() -> None:
    """Take back what [`watch_launcher`] asked for."""
    _signal_at_end_of_parent(0)


def _signal_at_end_of_parent(number: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel does not tell of the end of the launcher (PR_SET_PDEATHSIG)")


def _is_launcher(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        # It is gone, or another user's.
        return False
    # python .../accelerate launch, python .../accelerate-launch, python -m accelerate.commands.launch
    names = [Path(word).name for word in words[:4]]
    return (
        ("accelerate" in names and "launch" in words)
        or "accelerate-launch" in names
        or "accelerate.commands.launch" in names
    )


__all__ = ["LAUNCHER_ENDED", "forget_launcher", "watch_launcher"]
