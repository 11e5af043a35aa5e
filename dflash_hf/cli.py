# SPDX-License-Identifier: Apache-2.0
"""The options of a command: a YAML file gives the defaults, the command line overrides them, unknown names are errors.

    dflash-hf train --config recipes/qwen3.6-27b/config.yaml --learning_rate 6e-4 --bf16 false

transformers' `HfArgumentParser` makes the options from dataclasses; the file's values are converted as words of the
command line are: `6e-4` is a number and `no` a word. Dicts are JSON or a YAML mapping; lists and dicts are replaced,
not merged; `null` is None; abbreviations are errors. Paths are relative to the working directory, in the file too.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser


_NOT_GIVEN = object()


class _Yaml12Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2, and an error for a key given twice."""

    # Emptied, since a subclass otherwise starts from YAML 1.1's patterns.
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in lines:
                problem = f"{key.value!r} is given twice, first on line {lines[key.value]}"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf)|\.nan", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


@contextmanager
def errors_in_one_line(command: str) -> Iterator[None]:
    """Say a ValueError, OSError or ImportError of bad input without a traceback, and end the process."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"{command}: error: {error}") from error


def refuse_unused(arguments: Any, names: Iterable[str], reason: str) -> None:
    """Raise a ValueError that names the fields of `names` which were given although they would do nothing."""
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    given = [f"{name}={vars(arguments)[name]}" for name in names if vars(arguments)[name] != defaults[name]]
    if given:
        raise ValueError(f"{', '.join(given)} has no effect {reason}. Leave it out.")


def parse_config(
    dataclass_types: type | Sequence[type],
    argv: Sequence[str] | None = None,
    default_config: Any = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Read `--config FILE.yaml --field value ...` into one instance of each dataclass.

    `argv` is by default the process's; `prog` and `description` are those of ArgumentParser. An error (an unknown
    name, a wrong type, a required field left out, a key given twice, whatever a dataclass refuses) is printed on
    stderr and ends the process with exit status 2.
    """
    parser = ConfigArgumentParser(dataclass_types, default_config, **kwargs)
    try:
        return parser.parse_config(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}\n(`{parser.prog} --help` lists all options.)", file=sys.stderr)
        raise SystemExit(2) from error


class ConfigArgumentParser(HfArgumentParser):
    """`HfArgumentParser` with a `--config` file of defaults, no abbreviations, and ValueError for every error."""

    def __init__(self, dataclass_types: Any, default_config: Any = None, **kwargs: Any):
        usage = "%(prog)s [--config FILE.yaml] [--field value ...]"
        super().__init__(dataclass_types, usage=usage, allow_abbrev=False, add_help=False, **kwargs)
        self.fields = {f.name: f for cls in self.dataclass_types for f in dataclasses.fields(cls) if f.init}
        hints = {name: hint for cls in self.dataclass_types for name, hint in get_type_hints(cls).items()}
        self.members = {name: _members(hints[name]) for name in self.fields}
        self.options = {action.dest: action for action in self._actions}
        for name, action in self.options.items():
            kinds = [get_origin(member) or member for member in self.members[name]]
            if dict in kinds:
                action.type = _json_object_or_text if str in kinds else _json_object
            elif {bool, str} <= {*kinds}:
                action.type = lambda text: {"true": True, "false": False}.get(text.lower(), text)
            if NoneType in kinds and callable(action.type):
                action.type = _or_null(action.type)
                action.choices = None if action.choices is None else [*action.choices, None]
            # What is missing shows only once the file has been read.
            action.required = False
        # Help is an ordinary switch, so that it can show the config file's values as the defaults.
        self.add_argument("-h", "--help", action="store_true", default=False, help="Show this text and stop.")
        self.add_argument("--config", default=default_config, help="YAML file with values for the fields.")

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse_config(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """Merge the file's values and `argv`'s and make one instance per dataclass."""
        given, namespace, unused = self._given(argv)
        values = {} if namespace.config is None else self._read_config(namespace.config)
        if namespace.help:
            self.set_defaults(**values)
            self.print_help()
            raise SystemExit(0)
        known = [option for option in self._option_string_actions if option.startswith("--")]
        if options := [word.partition("=")[0] for word in unused if re.match(r"--?[A-Za-z_]", word)]:
            self.error("\n".join(f"unknown option {option}{_suggestion(option, known)}" for option in options))
        if unused:
            self.error(f"unrecognized: {' '.join(map(repr, unused))}")
        values |= given
        required = [f.name for f in self.fields.values() if f.default is f.default_factory is dataclasses.MISSING]
        if missing := [f"--{name} ..." for name in required if name not in values]:
            self.error(f"no value for {' '.join(missing)}: expected here or in the config file")
        return tuple(
            cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
            for cls in self.dataclass_types
        )

    def _given(self, argv: Sequence[str]) -> tuple[dict[str, Any], Namespace, list[str]]:
        """The values that words of the command line give, with what argparse makes of the other words."""
        # A destination that is already set keeps argparse from filling in defaults: those are the dataclasses' own.
        namespace, unused = self.parse_known_args(list(argv), Namespace(**dict.fromkeys(self.fields, _NOT_GIVEN)))
        values = {name: value for name in self.fields if (value := vars(namespace)[name]) is not _NOT_GIVEN}
        for name, value in values.items():
            enums = [kind for kind in self.members[name] if inspect.isclass(kind) and issubclass(kind, Enum)]
            # `--field null` of a list field is [None].
            values[name] = None if value in (None, [None]) else enums[0](value) if enums else value
        return values, namespace, unused

    def _read_config(self, path: str | Path) -> dict[str, Any]:
        """The values of a YAML file, converted like words of the command line; errors name file, line and key."""
        try:
            # In binary, so that PyYAML finds the encoding and reports bytes that are not text.
            with open(path, "rb") as file:
                loader = _Yaml12Loader(file)
                root = loader.get_single_node() or yaml.MappingNode("", [])
        except FileNotFoundError:
            raise FileNotFoundError(f"no config file {path} in {Path.cwd()}: name one with --config") from None
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"could not parse {path}: {error}") from error
        if root.value == "":  # an empty document
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(f"{path} holds a YAML {root.id}, expected a mapping: one `field: value` per line")
        values, problems = {}, []
        for key, node in root.value:
            try:
                if key.value not in self.fields:
                    raise ValueError(f"unknown field {key.value!r}{_suggestion(key.value, self.fields)}")
                values[key.value] = self._converted(key.value, node, loader)
            except (ValueError, TypeError, yaml.YAMLError) as error:
                problems.append(f"{path}, line {key.start_mark.line + 1}, {key.value}: {error}")
        if problems:
            self.error("\n".join(problems))
        return values

    def _converted(self, name: str, node: Any, loader: _Yaml12Loader) -> Any:
        """The value of one field of the file, by the option of that name."""
        kinds = [get_origin(member) or member for member in self.members[name]]
        is_null = node.tag.endswith(":null")
        if isinstance(node, yaml.MappingNode) and dict in kinds:
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode) and list in kinds:
            if self.options[name].nargs is None or not node.value:
                return loader.construct_sequence(node, deep=True)
            return self._given([f"--{name}", *[str(item.value) for item in node.value]])[0][name]
        if is_null and NoneType in kinds:
            return None
        if isinstance(node, yaml.ScalarNode) and not is_null:
            return self._given([f"--{name}={node.value}"])[0][name]
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"got {'null' if is_null else f'a YAML {node.id}'}, expected {expected}")


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _json_object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ArgumentTypeError(f"expected a JSON object, got {text!r} ({error})") from None


def _json_object_or_text(text: str) -> dict[str, Any] | str:
    return _json_object(text) if text.lstrip().startswith("{") else text


def _or_null(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    # argparse's message for a value that is not an int speaks of an "invalid int value", by this name.
    return functools.wraps(convert)(lambda text: None if text == "null" else convert(text))


def _suggestion(name: str, known: Iterable[str]) -> str:
    # Without the dashes, which make all options look alike.
    words = {word.lstrip("-"): word for word in known}
    closest = difflib.get_close_matches(name.lstrip("-"), words, n=1, cutoff=0.5)
    return f": did you mean {words[closest[0]]}?" if closest else ": no known name is close to it"
