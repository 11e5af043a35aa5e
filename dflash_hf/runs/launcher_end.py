# SPDX-License-Identifier: Apache-2.0
"""The end of the launcher, which a run notices although nobody tells it.

`accelerate launch` passes signals on to several ranks. For a single process (`distributed_type: NO`) it passes none: a
SIGTERM ends the launcher, and the run would train on with nobody waiting for it. So would the ranks of any launcher
that SIGKILL ends.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path


_PR_SET_PDEATHSIG = 1
# Scripts and modules.
_LAUNCHERS = (
    "accelerate-launch",
    "accelerate.commands.launch",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
)
_WITH_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli")
# Nobody else sends it, so it is not taken for a second SIGTERM. None where the kernel sends nothing.
LAUNCHER_ENDED = signal.SIGRTMIN if sys.platform == "linux" else None


def watch_launcher() -> bool:
    """Have the kernel send [`LAUNCHER_ENDED`] to this process when the launcher that started it ends, or has ended.

    Returns:
        Whether it will; not where something else started it, or outside Linux.

    Raises:
        OSError: The kernel refused.
    """
    if LAUNCHER_ENDED is None:
        return False
    process, parent, is_launched = _AT_START
    if process != os.getpid():
        # Forked since.
        _, parent, is_launched = _started_by()
    if not is_launched:
        return False
    _signal_at_end_of_parent(LAUNCHER_ENDED)
    if os.getppid() != parent:
        signal.raise_signal(LAUNCHER_ENDED)
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
    return is_launcher_command(words)


def is_launcher_command(words: list[str]) -> bool:
    """Whether a command line is that of a process that starts the ranks of a run and waits for them."""
    program = _python_program(words)
    return program in _LAUNCHERS or (program in _WITH_COMMANDS and "launch" in words)


def _python_program(words: list[str]) -> str:
    """The script or module that a command line of Python runs; empty for another command."""
    if not Path(words[0]).name.startswith("python"):
        return ""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            return Path(word).name
        if word.endswith("m"):
            return next(rest, "")
        if word.endswith("c"):
            return ""
        if word in ("-W", "-X"):
            next(rest, "")
    return ""


def _started_by() -> tuple[int, int, bool]:
    """This process, the one that started it, and whether that is a launcher."""
    parent = os.getppid()
    return os.getpid(), parent, _is_launcher(parent)


# By the time that training begins, the launcher of a run that loads a target may be gone.
_AT_START = _started_by()

__all__ = ["LAUNCHER_ENDED", "forget_launcher", "is_launcher_command", "watch_launcher"]
