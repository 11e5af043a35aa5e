# SPDX-License-Identifier: Apache-2.0
"""Every command of every document is one that the program it names understands, up to its options."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from dflash_hf import commands
from dflash_hf.cli import ConfigArgumentParser


ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
DOCUMENTS += sorted((ROOT / "model_cards").glob("*.md"))
PROGRAM = re.compile(r"(PYTHONPATH=\S+ )?(python recipes/|accelerate launch|dflash-hf )")


class UnderstoodError(Exception):
    """Raised in place of the work that a program would begin after reading its options."""


def documented_commands() -> list[str]:
    """The commands of all shell blocks, without comments, and those with options in sentences."""
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines = [" ".join(shlex.split(line, comments=True, posix=False)) for line in lines if line.strip()]
    inline = re.findall(r"`((?:python recipes/|dflash-hf |accelerate launch )[^`]*--[^`]*)`", text)
    lines += [" ".join(line.split()) for line in inline if "..." not in line]
    return list(dict.fromkeys(line for line in lines if line))


PROGRAMS = [line for line in documented_commands() if PROGRAM.match(line)]


@pytest.fixture
def stopped(monkeypatch):
    """Programs end with UnderstoodError once they have read their options."""

    def stop_after(owner: type, name: str) -> None:
        original = vars(owner)[name]

        def read_and_stop(*args, **kwargs):
            original(*args, **kwargs)
            raise UnderstoodError

        monkeypatch.setattr(owner, name, read_and_stop)

    # The benchmark refuses peers that are not installed; its commands are understood all the same.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(ROOT)
    stop_after(ConfigArgumentParser, "parse_config")
    stop_after(argparse.ArgumentParser, "parse_args")
    return monkeypatch


def start(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Start a program of `recipes/` or `dflash-hf` in this process."""
    if words[0].startswith("PYTHONPATH="):
        words = words[1:]
    for option in ("--config_file", "--config"):
        if option in words:
            assert (ROOT / words[words.index(option) + 1]).is_file()
    if words[:2] == ["accelerate", "launch"]:
        words = ["python", *words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]]
    if words[0] == "dflash-hf":
        if "--accelerate_config" in words:
            # Accelerate's launcher would take this process's place.
            at = words.index("--accelerate_config")
            assert (commands.CONFIGS / f"{words[at + 1]}.yaml").is_file()
            words = words[:at] + words[at + 2 :]
        raise SystemExit(commands.main(words[1:]))
    patch.setattr(sys, "argv", words[1:])
    patch.syspath_prepend(str((ROOT / words[1]).parent))
    runpy.run_path(words[1], run_name="__main__")


@pytest.mark.parametrize("line", PROGRAMS)
def test_the_command_is_understood(line, stopped):
    with pytest.raises(UnderstoodError):
        start(shlex.split(line), stopped)


@pytest.mark.parametrize(
    "line",
    [
        "python recipes/train_qwen36.py --no_such_option 1",
        "python recipes/benchmark.py --variants plain",
        "dflash-hf inspect FOLDER",
        "dflash-hf validate",
    ],
)
def test_a_wrong_command_is_not_understood(line, stopped):
    with pytest.raises(SystemExit):
        start(shlex.split(line), stopped)


def test_all_other_commands_are_make_pip_and_a_server():
    others = [line.split()[0] for line in documented_commands() if line not in PROGRAMS]
    assert set(others) <= {"make", "pip", "vllm", "python"} and len(PROGRAMS) > 25
