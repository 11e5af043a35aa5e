# SPDX-License-Identifier: Apache-2.0
"""A command's options: precedence, types in YAML and as words, and every error."""

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from transformers import TrainingArguments

from dflash_hf.cli import parse_config


class Objective(Enum):
    CROSS_ENTROPY = "cross_entropy"
    D_PACE = "d_pace"


@dataclass
class MoreArguments:
    num_anchors: int = 512
    learning_rate: float = 5e-5


@dataclass
class DrafterArguments:
    """One field of each type that a command uses."""

    target_model: str = field(metadata={"help": "An id or a folder."})
    block_size: int = field(default=16, metadata={"help": "Slots per block."})
    context_noise: float = 0.05
    gamma: float | None = None
    redraw: bool = True
    packed: bool | None = None
    target_layer_ids: list[int] | None = None
    datasets: list[str] = field(default_factory=lambda: ["a.jsonl"])
    target_model_init_kwargs: dict[str, Any] | None = None
    context: dict[str, int] = field(default_factory=dict)
    objective: Objective = Objective.CROSS_ENTROPY
    layout: Literal["paired", "shared"] = "paired"
    dtype: str | None = field(default="auto", metadata={"choices": ["auto", "bfloat16", "float32"]})
    cache_dir: Path | None = None
    derived: int = field(default=0, init=False)

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, expected at least 1")


@pytest.fixture
def parse(tmp_path):
    """Write text to a config file and read it with further words."""

    def read(text: str, *argv: str, types=DrafterArguments):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        words = [] if "target_model:" in text or types is not DrafterArguments else ["--target_model", "t"]
        return parse_config(types, ["--config", str(path), *words, *argv])[0]

    return read


def refused(capsys, parse, *names: str, status: int = 2) -> str:
    """The error names everything in `names` on stderr, and ends the process."""
    with pytest.raises(SystemExit) as stopped:
        parse()
    printed = capsys.readouterr()
    assert stopped.value.code == status and not printed.out
    assert all(name in printed.err for name in names), (names, printed.err)
    return printed.err


def test_command_line_over_file_over_dataclass(parse):
    arguments = parse("block_size: 8\ncontext_noise: 0.1", "--block_size", "4")
    assert (arguments.block_size, arguments.context_noise, arguments.gamma) == (4, 0.1, None)
    # A value equal to the default overrides the file too.
    assert parse("block_size: 8", "--block_size", "16").block_size == 16
    assert parse("block_size: 8", "--block-size=4").block_size == 4


def test_a_config_replaces_the_default_config(tmp_path):
    default, other = tmp_path / "default.yaml", tmp_path / "other.yaml"
    default.write_text("target_model: default\nblock_size: 4")
    other.write_text("target_model: other")
    assert parse_config(DrafterArguments, [], default)[0] == DrafterArguments("default", block_size=4)
    assert parse_config(DrafterArguments, ["--config", str(other)], default)[0] == DrafterArguments("other")


def test_several_dataclasses_share_one_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("target_model: t\nnum_anchors: 7\nlearning_rate: 6e-4")
    arguments, more = parse_config((DrafterArguments, MoreArguments), ["--config", str(path)])
    assert (arguments.target_model, more) == ("t", MoreArguments(7, 6e-4))


def test_lists_and_dicts_are_replaced_whole_and_not_shared(parse):
    text = "datasets: [x, y, z]\ncontext: {a: 1, b: 2}"
    arguments = parse(text, "--datasets", "p", "q", "--context", '{"c": 3}')
    assert (arguments.datasets, arguments.context) == (["p", "q"], {"c": 3})
    assert parse("").datasets is not parse("").datasets


@pytest.mark.parametrize("text", ["6e-4", "6E-4", "0.6e-3", "+6e-4", "6.e-4", ".0006"])
def test_floats_in_every_spelling(parse, text):
    assert parse(f"context_noise: {text}").context_noise == pytest.approx(6e-4)
    assert parse(f"target_model_init_kwargs: {{lr: {text}}}").target_model_init_kwargs["lr"] == pytest.approx(6e-4)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gamma: 7", 7.0),
        ("block_size: 1_000", 1000),
        ("redraw: no", False),
        ("packed: true", True),
        ("dtype: null", None),
        ("dtype:", None),
        ("target_layer_ids: [1, 8]", [1, 8]),
        ("datasets: []", []),
        ("datasets:\n- x\n- '1'", ["x", "1"]),
        ("objective: d_pace", Objective.D_PACE),
        ("layout: shared", "shared"),
        ("cache_dir: a/b", Path("a/b")),
        ("target_model: 2026-01-31", "2026-01-31"),
        ("target_model: 0123", "0123"),
        ("target_model: no", "no"),
        ("context: {a: 1}", {"a": 1}),
    ],
)
def test_values_of_a_file(parse, line, expected):
    value = vars(parse(line))[line.partition(":")[0]]
    assert value == expected and type(value) is type(expected)


def test_values_inside_a_mapping_are_yaml_1_2(parse):
    text = "context: &base {a: 1, b: 2}\ntarget_model_init_kwargs: {<<: *base, b: [1e3, -.inf, '1e3', no, true, ~]}"
    assert parse(text).target_model_init_kwargs == {"a": 1, "b": [1e3, -math.inf, "1e3", "no", True, None]}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_gives_no_values(parse, text):
    assert parse(text) == DrafterArguments("t")


def test_values_of_the_command_line(parse):
    assert parse("redraw: false", "--redraw").redraw is True
    assert parse("redraw: true", "--redraw", "false").redraw is False
    assert parse("", "--no_redraw").redraw is False
    assert parse("", "--objective", "d_pace").objective is Objective.D_PACE
    nested = parse("", "--target_model_init_kwargs", '{"lr": 6e-4, "deep": {"on": true}}')
    assert nested.target_model_init_kwargs == {"lr": 6e-4, "deep": {"on": True}}
    assert parse("target_model: t", "--target_model", "null").target_model == "null"


@pytest.mark.parametrize(
    "line", ["gamma: 3.0", "packed: true", "target_layer_ids: [1]", "target_model_init_kwargs: {a: 1}", "cache_dir: x"]
)
def test_null_unsets_what_the_file_gives(parse, line):
    name = line.partition(":")[0]
    assert vars(parse(line))[name] is not None
    assert vars(parse(line, f"--{name}", "null"))[name] is None


def test_fields_of_the_training_arguments(parse, tmp_path):
    text = f"""
        output_dir: {tmp_path}
        lr_scheduler_kwargs: {{min_lr_rate: 1e-1}}
        warmup_steps: 0.04
        report_to: [tensorboard, wandb]
        accelerator_config: {{split_batches: true}}
        include_num_input_tokens_seen: all
        eval_strategy: no
        save_strategy: no
        bf16_full_eval: no
        debug: [underflow_overflow]
    """
    training = parse(text, "--label-names", "labels", types=TrainingArguments)
    assert training.lr_scheduler_kwargs == {"min_lr_rate": 0.1} and training.warmup_steps == 0.04
    assert training.report_to == ["tensorboard", "wandb"] and training.label_names == ["labels"]
    assert training.accelerator_config.split_batches is True and training.include_num_input_tokens_seen == "all"
    assert (training.eval_strategy, training.save_strategy, training.bf16_full_eval) == ("no", "no", False)
    assert [option.value for option in training.debug] == ["underflow_overflow"]
    words = ["--output_dir", str(tmp_path), "--lr_scheduler_kwargs", "file.json"]
    assert parse("", *words, types=TrainingArguments).lr_scheduler_kwargs == "file.json"


def test_every_option_takes_a_yaml_round_trip(parse, tmp_path):
    plain = TrainingArguments(str(tmp_path), report_to=["tensorboard"]).to_dict()
    assert parse(yaml.safe_dump(plain), types=TrainingArguments).to_dict() == plain


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("target_model: t\nblok_size: 8\nqqqq: 1", ["line 2", "blok_size", "block_size", "line 3", "qqqq"]),
        ("derived: 1", ["line 1", "derived"]),
        ("block_size: 8.5", ["line 1", "block_size", "8.5"]),
        ("block_size: true", ["block_size", "true"]),
        ("block_size:", ["block_size", "null"]),
        ("context_noise: no", ["context_noise", "no"]),
        ("gamma: [1]", ["gamma", "float"]),
        ("redraw: maybe", ["redraw", "maybe"]),
        ("target_layer_ids: [1, a]", ["target_layer_ids", "a"]),
        ("context: [1]", ["context", "dict"]),
        ("objective: dpace", ["objective", "dpace", "cross_entropy"]),
        ("layout: spread", ["layout", "spread", "paired"]),
        ("dtype: fp32", ["dtype", "fp32", "bfloat16"]),
        ("- a\n- b", ["config.yaml", "mapping"]),
        ("a: 1\n b: [", ["config.yaml"]),
        ("a: 1\n---\nb: 2", ["config.yaml"]),
        ("block_size: 1\nredraw: no\nblock_size: 2", ["block_size", "line 1"]),
        ("context: {a: 1, b: 2, a: 3}", ["'a'"]),
        ("target_model_init_kwargs: {a: !!python/name:print ''}", ["target_model_init_kwargs"]),
        ("block_size: 0", ["block_size", "0"]),
    ],
)
def test_errors_of_a_file_name_line_and_field(parse, capsys, tmp_path, text, names):
    refused(capsys, lambda: parse(text), *names)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--blok_size=8"], ["--blok_size", "--block_size"]),
        (["--block_siz", "8"], ["--block_siz", "--block_size"]),
        (["--gama", "1", "--redrew", "-zzz"], ["--gamma", "--redraw", "-zzz"]),
        (["--block_size", "8", "9"], ["'9'"]),
        (["--block_size", "x"], ["--block_size", "'x'"]),
        (["--block_size"], ["--block_size"]),
        (["--redraw", "maybe"], ["--redraw"]),
        (["--context", "{a"], ["--context", "JSON"]),
        (["--context", "[1]"], ["--context", "JSON"]),
        (["--objective", "dpace"], ["--objective", "dpace"]),
        (["--block_size", "0"], ["block_size", "0"]),
    ],
)
def test_errors_of_the_command_line_name_the_option(parse, capsys, words, names):
    assert "--help" in refused(capsys, lambda: parse("", *words), *names)


def test_missing_fields_and_files_are_named(parse, capsys, tmp_path):
    refused(capsys, lambda: parse_config(DrafterArguments, []), "target_model")
    refused(capsys, lambda: parse_config(DrafterArguments, ["--config", "none.yaml"]), "none.yaml", "--config")
    refused(capsys, lambda: parse_config(DrafterArguments, ["--config", str(tmp_path)]), str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"target_model: \xff\xfe\x00")
    binary = ["--config", str(tmp_path / "binary.yaml")]
    refused(capsys, lambda: parse_config(DrafterArguments, binary), "binary.yaml")


def test_help_shows_the_files_values_as_defaults(monkeypatch, capsys, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("block_size: 11")
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as stopped:
        parse_config((DrafterArguments, TrainingArguments), ["-h"], path, description="Trains.", prog="dflash-hf x")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and "Trains." in printed and "dflash-hf x" in printed
    assert "An id or a folder." in printed and "(default: 11)" in printed and path.name in printed
