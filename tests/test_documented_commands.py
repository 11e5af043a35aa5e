# SPDX-License-Identifier: Apache-2.0
"""Every command in the README files is one that the program it names understands."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from transformers import HfArgumentParser, Qwen3Config

from dflash_hf import DFlashTrainingArguments, command_evaluate, command_generate
from dflash_hf import validation as command
from dflash_hf.cli import ConfigArgumentParser, load_yaml_mapping, parse_config
from dflash_hf.validation import Checkpoint, serving_commands


ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", *sorted((ROOT / "recipes").rglob("README.md"))]
ON_CPU = ["--use_cpu", "true"]


class UnderstoodError(Exception):
    """Raised in place of the work that a program would begin after reading its options."""


def documented_commands() -> list[str]:
    """The commands of all shell blocks, without comments."""
    text = "\n".join(path.read_text() for path in READMES)
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True, posix=False)) for line in lines if line.strip()]


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
    stop_after(ConfigArgumentParser, "parse_config")
    stop_after(HfArgumentParser, "parse_args_into_dataclasses")
    stop_after(argparse.ArgumentParser, "parse_args")
    return monkeypatch


def start(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Start a program of `recipes/` or `dflash-hf` in this process."""
    if words[:2] == ["accelerate", "launch"]:
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        words = ["python", *words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]]
    if "--config" in words:
        assert (ROOT / words[words.index("--config") + 1]).is_file()
    patch.setattr(sys, "argv", words[1:])
    patch.chdir(ROOT)
    if words[0] == "dflash-hf":
        mains = {"generate": command_generate.main, "evaluate": command_evaluate.main}
        if words[1] in mains:
            mains[words[1]](words[2:])
        patch.setattr(sys, "argv", words)
        command.main()
    patch.syspath_prepend(str((ROOT / words[1]).parent))
    runpy.run_path(words[1], run_name="__main__")


PROGRAMS = [
    line for line in documented_commands() if re.match(r"(PYTHONPATH=\S+ )?(python|accelerate|dflash-hf) ", line)
]


@pytest.mark.parametrize("line", PROGRAMS)
def test_the_command_is_understood(line, stopped):
    words = shlex.split(line)
    words = words[1:] if words[0].startswith("PYTHONPATH=") else words
    stopped.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(UnderstoodError):
        start(words, stopped)


@pytest.mark.parametrize("line", ["python recipes/train_qwen36.py --no_such_option 1", "dflash-hf inspect FOLDER"])
def test_a_wrong_command_is_not_understood(line, stopped):
    with pytest.raises(SystemExit):
        start(shlex.split(line), stopped)


def test_all_other_commands_are_make_pip_and_a_server():
    others = [line.split()[0] for line in documented_commands() if line not in PROGRAMS]
    assert set(others) == {"make", "pip", "vllm"} and len(PROGRAMS) > 25


def test_the_served_drafter_is_the_trained_one_and_its_command_what_validate_prints():
    """The commands of README's first block follow from each other."""
    train, serve = (
        next(line for line in documented_commands() if word in line) for word in ("qwen3-4b/config.yaml", "vllm ")
    )
    config = load_yaml_mapping(ROOT / shlex.split(train)[shlex.split(train).index("--config") + 1])[0]
    drafter = Checkpoint(
        config["output_dir"], config={"block_size": config["block_size"]}, base_model=config["target"]
    )
    assert shlex.split(serve) == shlex.split(serving_commands(drafter)["vLLM"].replace("\\\n", ""))


def test_a_newcomer_finds_each_kind_of_command_in_the_first_screen():
    screen = "".join((ROOT / "README.md").read_text().splitlines(keepends=True)[:45])
    first, second = re.findall(r"^```bash\n(.*?)^```", screen, flags=re.DOTALL | re.MULTILINE)
    assert "pip install" in first and "make demo" in first
    train, go_on, serve = second.splitlines()
    assert "train_qwen36.py" in train and "--drafter" not in train
    assert "train_qwen36.py" in go_on and "--drafter" in go_on
    assert serve.startswith("vllm serve ")


def test_the_recipe_of_a_dense_target_makes_the_published_drafters_shape(monkeypatch):
    recipe = runpy.run_path(str(ROOT / "recipes/train_qwen36.py"))
    config = str(ROOT / "recipes/qwen3-4b/config.yaml")
    given, _ = parse_config((recipe["RecipeArguments"], DFlashTrainingArguments), ["--config", config, *ON_CPU])
    target = Qwen3Config(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36)
    monkeypatch.setitem(recipe["drafter_configuration"].__globals__, "target_config", lambda _: target)
    drafter = recipe["drafter_configuration"](given)
    assert drafter.target_layer_ids == [1, 9, 17, 25, 33] and drafter.layer_types == ["full_attention"] * 5
    assert (drafter.hidden_size, drafter.intermediate_size, drafter.head_dim) == (2560, 9728, 128)
    assert (drafter.num_attention_heads, drafter.num_key_value_heads, drafter.block_size) == (32, 8, 16)
