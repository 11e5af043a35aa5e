# SPDX-License-Identifier: Apache-2.0
"""The recipes' options: precedence, types as YAML and as words, and every error."""

import math
import sys
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
class DrafterArguments:
    """One field of each type that a recipe uses."""

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


@dataclass
class TinyTrainingArguments(TrainingArguments):
    num_anchors: int = 512
    made: int = field(default=0, init=False)

    def __post_init__(self):
        super().__post_init__()
        type(self).instances = [*getattr(type(self), "instances", []), self]
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors is {self.num_anchors}, expected at least 1")


@pytest.fixture
def config(tmp_path):
    """Write text to a config file; return `parse`, which reads it with further words."""

    def write(text: str, types=DrafterArguments):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return lambda *argv: parse_config(types, ["--config", str(path), *argv])

    return write


def drafter(config, text: str, *argv: str) -> DrafterArguments:
    text = text if "target_model:" in text else f"target_model: t\n{text}"
    (arguments,) = config(text)(*argv)
    return arguments


def error_of(parse, *argv: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse(*argv)
    return str(caught.value)


class TestPrecedence:
    def test_command_line_over_file_over_dataclass(self, config):
        arguments = drafter(config, "block_size: 8\ncontext_noise: 0.1", "--block_size", "4")
        assert (arguments.block_size, arguments.context_noise, arguments.gamma) == (4, 0.1, None)

    def test_a_value_equal_to_the_default_still_overrides_the_file(self, config):
        assert drafter(config, "block_size: 8", "--block_size", "16").block_size == 16

    def test_order_of_config_and_options_does_not_matter(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text("block_size: 8")
        for argv in (["--target_model", "t", f"--config={path}"], ["--config", str(path), "--target-model", "t"]):
            assert parse_config(DrafterArguments, argv)[0] == DrafterArguments("t", block_size=8)

    def test_without_a_config(self):
        assert parse_config(DrafterArguments, ["--target_model", "t"]) == (DrafterArguments("t"),)

    def test_config_option_replaces_the_default_config(self, config, tmp_path):
        default = tmp_path / "default.yaml"
        default.write_text("target_model: default\nblock_size: 4")
        other = tmp_path / "other.yaml"
        other.write_text("target_model: other")
        assert parse_config(DrafterArguments, [], default)[0] == DrafterArguments("default", block_size=4)
        replaced = parse_config(DrafterArguments, ["--config", str(other)], default_config=default)[0]
        assert replaced == DrafterArguments("other")

    def test_several_dataclasses_share_one_file(self, config, tmp_path):
        parse = config("target_model: t\nnum_anchors: 7", (DrafterArguments, TinyTrainingArguments))
        arguments, training = parse("--output_dir", str(tmp_path))
        assert (arguments.target_model, training.num_anchors, training.output_dir) == ("t", 7, str(tmp_path))

    def test_lists_and_dicts_are_replaced_whole(self, config):
        text = "datasets: [x, y, z]\ncontext: {a: 1, b: 2}"
        arguments = drafter(config, text, "--datasets", "p", "q", "--context", '{"c": 3}')
        assert (arguments.datasets, arguments.context) == (["p", "q"], {"c": 3})

    def test_mutable_defaults_are_not_shared(self):
        first, second = (parse_config(DrafterArguments, ["--target_model", "t"])[0] for _ in range(2))
        assert first.datasets == second.datasets and first.datasets is not second.datasets


class TestYamlValues:
    @pytest.mark.parametrize("text", ["6e-4", "6E-4", "0.6e-3", "+6e-4", "6.e-4", "0.0006", ".0006", "0.06e-2"])
    def test_floats_in_every_spelling(self, config, text):
        assert drafter(config, f"context_noise: {text}").context_noise == pytest.approx(6e-4)
        if text == "6e-4":  # PyYAML alone reads a string here: the reason for our own patterns.
            assert isinstance(yaml.safe_load(text), str)

    def test_floats_inside_lists_and_dicts(self, config):
        arguments = drafter(config, "target_model_init_kwargs: {lr: 6e-4, list: [1e3, -.inf, 1, '1e3', no]}")
        expected = {"lr": 6e-4, "list": [1e3, -math.inf, 1, "1e3", "no"]}
        assert arguments.target_model_init_kwargs == expected

    def test_an_integer_becomes_a_float_as_on_the_command_line(self, config):
        value = drafter(config, "gamma: 7").gamma
        assert value == 7.0 and type(value) is float

    def test_integers(self, config):
        assert drafter(config, "block_size: 1_000").block_size == 1000
        assert drafter(config, "block_size: -1").block_size == -1

    @pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("yes", True), ("no", False)])
    def test_bools(self, config, text, value):
        assert drafter(config, f"redraw: {text}").redraw is value
        assert drafter(config, f"packed: {text}").packed is value

    def test_no_is_a_word_where_a_word_is_expected(self, config, tmp_path):
        parse = config("eval_strategy: no\nsave_strategy: no\nrun_name: on", TinyTrainingArguments)
        (training,) = parse("--output_dir", str(tmp_path))
        assert (training.eval_strategy, training.save_strategy, training.run_name) == ("no", "no", "on")

    @pytest.mark.parametrize("text", ["null", "~", ""])
    def test_null(self, config, text):
        assert drafter(config, f"dtype: {text}").dtype is None

    def test_lists(self, config):
        assert drafter(config, "target_layer_ids: [1, 8]").target_layer_ids == [1, 8]
        assert drafter(config, "datasets:\n- x\n- y").datasets == ["x", "y"]
        assert drafter(config, "datasets: []").datasets == []

    def test_enum_literal_choice_and_path(self, config):
        arguments = drafter(config, "objective: d_pace\nlayout: shared\ndtype: bfloat16\ncache_dir: a/b")
        assert (arguments.objective, arguments.layout) == (Objective.D_PACE, "shared")
        # Relative to the working directory, not to the file: nothing is put before it.
        assert (arguments.dtype, arguments.cache_dir) == ("bfloat16", Path("a/b"))

    def test_dates_and_leading_zeros_are_text(self, config):
        assert drafter(config, "target_model: 2026-01-31").target_model == "2026-01-31"
        assert drafter(config, "target_model: 0123").target_model == "0123"

    def test_merge_keys_may_override(self, config):
        text = "context: &base {a: 1, b: 2}\ntarget_model_init_kwargs: {<<: *base, b: 3}"
        assert drafter(config, text).target_model_init_kwargs == {"a": 1, "b": 3}

    @pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
    def test_an_empty_file_gives_no_values(self, config, text):
        assert config(text)("--target_model", "t")[0] == DrafterArguments("t")


class TestCommandLineValues:
    def test_bools(self, config):
        assert drafter(config, "redraw: false", "--redraw").redraw is True
        assert drafter(config, "redraw: true", "--redraw", "false").redraw is False
        assert drafter(config, "redraw: true", "--no_redraw").redraw is False

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("gamma", "gamma: 3.0"),
            ("packed", "packed: true"),
            ("target_layer_ids", "target_layer_ids: [1]"),
            ("target_model_init_kwargs", "target_model_init_kwargs: {a: 1}"),
            ("dtype", "dtype: float32"),
            ("cache_dir", "cache_dir: x"),
        ],
    )
    def test_null_unsets_what_the_file_gives(self, config, name, text):
        assert vars(drafter(config, text))[name] is not None
        assert vars(drafter(config, text, f"--{name}", "null"))[name] is None

    def test_enums_are_members(self, config):
        assert drafter(config, "", "--objective", "d_pace").objective is Objective.D_PACE

    def test_null_is_a_plain_word_where_none_is_not_allowed(self, config):
        assert drafter(config, "", "--target_model", "null").target_model == "null"

    def test_dicts_are_json(self, config):
        arguments = drafter(config, "", "--target_model_init_kwargs", '{"lr": 6e-4, "deep": {"on": true}}')
        assert arguments.target_model_init_kwargs == {"lr": 6e-4, "deep": {"on": True}}

    def test_last_config_wins(self, config, tmp_path):
        last = tmp_path / "last.yaml"
        last.write_text("target_model: last")
        assert drafter(config, "block_size: 4", "--config", str(last)) == DrafterArguments("last")


class TestTrainingArguments:
    def test_post_init_runs_once_and_only_when_all_is_right(self, config, tmp_path):
        TinyTrainingArguments.instances = []
        error_of(config("lerning_rate: 1", TinyTrainingArguments), "--output_dir", str(tmp_path))
        assert TinyTrainingArguments.instances == []
        (training,) = config("learning_rate: 6e-4", TinyTrainingArguments)("--output_dir", str(tmp_path))
        assert len(TinyTrainingArguments.instances) == 1 and TinyTrainingArguments.instances[0] is training
        assert training.learning_rate == 6e-4

    def test_its_fields(self, config, tmp_path):
        text = f"""
            output_dir: {tmp_path}
            lr_scheduler_type: cosine_with_min_lr
            lr_scheduler_kwargs: {{min_lr_rate: 1e-1}}
            warmup_steps: 0.04
            report_to: [tensorboard, wandb]
            accelerator_config: {{split_batches: true}}
            include_num_input_tokens_seen: all
            logging_steps: 10
            log_level: error
            optim: adamw_torch
            max_steps: 20
            bf16_full_eval: no
            metric_for_best_model: acceptance_length
            debug: [underflow_overflow]
        """
        (training,) = config(text, TinyTrainingArguments)("--max_steps", "-1", "--label-names", "labels")
        assert training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
        assert (training.lr_scheduler_type, training.optim) == ("cosine_with_min_lr", "adamw_torch")
        assert (training.warmup_steps, training.logging_steps, training.max_steps) == (0.04, 10, -1)
        assert training.report_to == ["tensorboard", "wandb"]
        assert training.accelerator_config.split_batches is True
        assert (training.include_num_input_tokens_seen, training.log_level) == ("all", "error")
        assert training.label_names == ["labels"]
        assert training.bf16_full_eval is False and training.greater_is_better is True
        assert [option.value for option in training.debug] == ["underflow_overflow"]

    def test_json_replaces_a_mapping_and_a_file_name_stays_text(self, config, tmp_path):
        parse = config("lr_scheduler_kwargs: {num_cycles: 2}", TinyTrainingArguments)
        argv = ["--output_dir", str(tmp_path), "--lr_scheduler_kwargs"]
        assert parse(*argv, '{"min_lr_rate": 0.1}')[0].lr_scheduler_kwargs == {"min_lr_rate": 0.1}
        assert parse(*argv, "file.json")[0].lr_scheduler_kwargs == "file.json"

    def test_untouched_fields_equal_those_of_a_plain_instance(self, tmp_path):
        (parsed,) = parse_config(TrainingArguments, ["--output_dir", str(tmp_path)])
        assert parsed.to_dict() == TrainingArguments(str(tmp_path)).to_dict()

    def test_every_option_takes_a_yaml_round_trip(self, config, tmp_path):
        plain = TrainingArguments(str(tmp_path), report_to=["tensorboard"]).to_dict()
        (parsed,) = config(yaml.safe_dump(plain), TrainingArguments)()
        assert parsed.to_dict() == plain


class TestErrors:
    def test_unknown_key_names_key_file_line_and_the_closest_name(self, config, tmp_path):
        message = error_of(config("target_model: t\nblok_size: 8\nqqqq: 1"))
        assert f"{tmp_path / 'config.yaml'}, line 2: unknown field 'blok_size': did you mean block_size?" in message
        assert "line 3: unknown field 'qqqq': no known name is close to it" in message

    @pytest.mark.parametrize("key", ["block-size", "derived", "config", "1"])
    def test_keys_that_are_no_fields(self, config, key):
        assert f"unknown field {yaml.safe_load(key)!r}" in error_of(config(f"target_model: t\n{key}: 1"))

    @pytest.mark.parametrize("words", [["--blok_size", "8"], ["--blok_size=8"], ["--block_siz", "8"]])
    def test_unknown_option_names_the_closest(self, config, words):
        message = error_of(config("target_model: t"), *words)
        assert message == f"unknown option {words[0].split('=')[0]}: did you mean --block_size?"

    def test_all_unknown_options_are_named(self, config):
        message = error_of(config("target_model: t"), "--gama", "1", "--redrew", "-zzz")
        assert "--gama: did you mean --gamma?" in message and "--redrew: did you mean --redraw?" in message
        assert "unknown option -zzz: no known name" in message

    def test_stray_words(self, config):
        message = error_of(config("target_model: t"), "--block_size", "8", "9", "-3")
        assert message == "'9' '-3' on the command line belongs to no option."

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("block_size: 8.5", "block_size is 8.5 (float), expected int"),
            ("block_size: 1e3", "block_size is 1000.0 (float), expected int"),
            ("block_size: '8'", "block_size is '8' (str), expected int"),
            ("block_size: true", "block_size is True (bool), expected int"),
            ("block_size:", "block_size is None (NoneType), expected int"),
            ("context_noise: no", "context_noise is 'no' (str), expected float"),
            ("context_noise: true", "context_noise is True (bool), expected float"),
            ("gamma: [1]", "gamma is [1] (list), expected float or null"),
            ("redraw: 1", "redraw is 1 (int), expected bool"),
            ("redraw: maybe", "redraw is 'maybe' (str), expected bool"),
            ("redraw:", "redraw is None (NoneType), expected bool"),
            ("target_layer_ids: 1", "target_layer_ids is 1 (int), expected list[int] or null"),
            ("target_layer_ids: [1, a]", "target_layer_ids is [1, 'a'] (list), expected list[int] or null"),
            ("datasets: x.jsonl", "datasets is 'x.jsonl' (str), expected list[str]"),
            ("datasets: [1]", "datasets is [1] (list), expected list[str]"),
            ("context: [1]", "context is [1] (list), expected dict[str, int]"),
            ("context: {a: b}", "context is {'a': 'b'} (dict), expected dict[str, int]"),
            ("objective: dpace", "objective is 'dpace' (str), expected one of cross_entropy, d_pace"),
            ("layout: spread", "layout is 'spread' (str), expected one of paired, shared"),
            ("dtype: fp32", "dtype is 'fp32' (str), expected one of auto, bfloat16, float32"),
            ("cache_dir: 5", "cache_dir is 5 (int), expected Path or null"),
        ],
    )
    def test_wrong_type_in_the_file(self, config, tmp_path, line, expected):
        message = error_of(config(f"target_model: t\n{line}"))
        assert message == f"{tmp_path / 'config.yaml'}, line 2: {expected}"

    def test_a_number_for_text_says_to_quote_it(self, config):
        assert "target_model is 5 (int), expected str (put it in quotes)" in error_of(config("target_model: 5"))

    def test_an_enum_that_also_takes_text_is_checked(self, config):
        message = error_of(config("eval_strategy: stepz", TinyTrainingArguments))
        assert "eval_strategy is 'stepz' (str), expected one of no, steps, epoch" in message

    def test_a_wrong_value_in_the_file_is_an_error_even_if_overridden(self, config):
        assert "block_size" in error_of(config("target_model: t\nblock_size: x"), "--block_size", "8")

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["--block_size", "x"], "--block_size/--block-size: invalid int value: 'x'"),
            (["--block_size"], "--block_size/--block-size: expected one argument"),
            (["--gamma", "x"], "--gamma: invalid float value: 'x'"),
            (["--redraw", "maybe"], "--redraw: Truthy value expected"),
            (["--target_layer_ids", "1", "x"], "invalid int value: 'x'"),
            (["--context", "{a"], "--context: expected a JSON object, got '{a'"),
            (["--context", "[1]"], "--context: expected a JSON object, got '[1]'"),
            (["--objective", "dpace"], "--objective: invalid choice: 'dpace'"),
            (["--dtype", "fp32"], "--dtype: invalid choice: 'fp32'"),
            (["--config"], "--config: expected one argument"),
        ],
    )
    def test_wrong_value_on_the_command_line(self, config, words, expected):
        assert expected in error_of(config("target_model: t"), *words)

    def test_missing_required_field(self, config):
        message = error_of(config("block_size: 8"))
        assert message == "no value for target_model: expected in the config file or as --target_model ..."

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no config file .*none\.yaml .*--config"):
            parse_config(DrafterArguments, ["--config", str(tmp_path / "none.yaml")])
        with pytest.raises(FileNotFoundError, match=r"default\.yaml"):
            parse_config(DrafterArguments, [], default_config=tmp_path / "default.yaml")

    def test_a_folder_is_no_file(self, tmp_path):
        with pytest.raises(OSError, match="directory"):
            parse_config(DrafterArguments, ["--config", str(tmp_path)])

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("- a\n- b", "holds a YAML sequence, expected a mapping"),
            ("just text", "holds a YAML scalar, expected a mapping"),
            ("a: 1\n b: [", "mapping values are not allowed here"),
            ("a: 1\n---\nb: 2", "expected a single document"),
            ("block_size: 1\nredraw: no\nblock_size: 2", "'block_size' is given twice, first on line 1"),
            ("{block_size: 1, block_size: 2}", "'block_size' is given twice, first on line 1"),
            ("context: {a: 1, b: 2, a: 3}", "'a' is given twice"),
            ("redraw: !!python/name:print ''", "could not determine a constructor"),
            ("block_size: !!int x", "invalid literal for int"),
        ],
    )
    def test_unusable_files(self, config, tmp_path, text, expected):
        message = error_of(config(text))
        assert str(tmp_path / "config.yaml") in message and expected in message

    def test_bytes_that_are_no_text(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_bytes(b"target_model: \xff\xfe\x00")
        assert "config.yaml is no usable config file" in error_of(
            lambda: parse_config(DrafterArguments, ["--config", str(path)])
        )

    def test_what_a_dataclass_refuses_passes_through(self, config, tmp_path):
        parse = config("num_anchors: 0", TinyTrainingArguments)
        assert error_of(parse, "--output_dir", str(tmp_path)) == "num_anchors is 0, expected at least 1"


class TestProcess:
    """With `argv` left out: the command line of the process."""

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["--config", "none.yaml"], "no config file none.yaml"),
            (["--blok_size", "8"], "unknown option --blok_size: did you mean --block_size?"),
            (["--nonsense", "8"], "unknown option --nonsense: no known name is close to it"),
            (["--block_size", "x"], "invalid int value: 'x'"),
            ([], "no value for target_model"),
        ],
    )
    def test_errors_go_to_stderr_with_exit_status_2(self, monkeypatch, capsys, words, expected):
        monkeypatch.setattr(sys, "argv", ["recipe.py", *words])
        with pytest.raises(SystemExit) as stopped:
            parse_config(DrafterArguments)
        printed = capsys.readouterr()
        assert stopped.value.code == 2 and printed.out == ""
        assert printed.err.startswith("recipe.py: error: ") and expected in printed.err
        assert "`recipe.py --help` lists all options" in printed.err

    def test_reads_the_words_of_the_process(self, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["recipe.py", "--target_model", "t"])
        assert parse_config(DrafterArguments)[0] == DrafterArguments("t")

    def test_help_shows_the_files_values_as_defaults(self, monkeypatch, capsys, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text("block_size: 11")
        monkeypatch.setattr(sys, "argv", ["recipe.py", "--help"])
        monkeypatch.setenv("COLUMNS", "500")
        with pytest.raises(SystemExit) as stopped:
            parse_config((DrafterArguments, TinyTrainingArguments), default_config=path, description="Trains.")
        printed = capsys.readouterr().out
        assert stopped.value.code == 0 and "Trains." in printed
        assert "An id or a folder." in printed and "(default: 11)" in printed and str(path.name) in printed
