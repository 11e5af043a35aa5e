# SPDX-License-Identifier: Apache-2.0
"""A recipe's options: a YAML file gives the defaults, the command line overrides them, unknown names are errors.

    python recipes/train_qwen36.py --config recipes/qwen3.6-27b/config.yaml --learning_rate 6e-4 --bf16 false

transformers' `HfArgumentParser` makes the options from dataclasses. This file adds YAML 1.2, in which `6e-4` is a
number and `no` a word, with values checked by their fields' types; dicts as JSON (lists and dicts are replaced, not
merged); `null` for None; and an error for an abbreviated option. Paths, in the file too, are relative to the working
directory.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
import types
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool


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


def load_yaml_mapping(path: str | Path) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Read a file that holds one YAML mapping; return it and the line of each of its keys."""
    try:
        # In binary, so that PyYAML finds the encoding and reports bytes that are not text.
        with open(path, "rb") as file:
            loader = _Yaml12Loader(file)
            node = loader.get_single_node()
            values = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        raise FileNotFoundError(f"no config file {path} in {Path.cwd()}: name one with --config") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no usable config file: {error}") from error
    if values is None:
        return {}, {}
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path} holds a YAML {node.id}, expected a mapping: one `field: value` per line")
    return values, {loader.construct_object(key): key.start_mark.line + 1 for key, _ in node.value}


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Say a ValueError, OSError or ImportError of bad input without a traceback, and end the process."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"{sys.argv[0]}: error: {error}") from error


def refuse_unused(arguments: Any, names: Iterable[str], reason: str) -> None:
    """Raise a ValueError that names the fields of `names` which were given although they would do nothing."""
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    given = [f"{name}={vars(arguments)[name]}" for name in names if vars(arguments)[name] != defaults[name]]
    if given:
        raise ValueError(f"{', '.join(given)} has no effect {reason}. Leave it out.")


def parse_config(
    dataclass_types: type | Sequence[type],
    argv: Sequence[str] | None = None,
    default_config: str | Path | None = None,
    description: str | None = None,
    prog: str | None = None,
) -> tuple[Any, ...]:
    """Read `--config FILE.yaml --field value ...` into one instance of each dataclass.

    Args:
        dataclass_types: The dataclasses whose fields are the options; no two may share a field name.
        argv: The words of the command line. None reads those of the process; then an error is printed on stderr and
            ends the process with exit status 2.
        default_config: The YAML file to read where `--config` is not given.
        description: The text above the options in `--help`.
        prog: The program's name in messages; by default its file's.

    Raises:
        ValueError: With `argv` given: an unknown name, a wrong type, a required field left out, a file that is not a
            YAML mapping, a key given twice in it, or whatever a dataclass itself refuses.
        OSError: With `argv` given: the config file cannot be read.
    """
    classes = (dataclass_types,) if isinstance(dataclass_types, type) else tuple(dataclass_types)
    parser = ConfigArgumentParser(classes, default_config=default_config, description=description, prog=prog)
    try:
        return parser.parse_config(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as error:
        if argv is not None:
            raise
        print(f"{parser.prog}: error: {error}\n(`{parser.prog} --help` lists all options.)", file=sys.stderr)
        raise SystemExit(2) from None


class ConfigArgumentParser(HfArgumentParser):
    """`HfArgumentParser` with a `--config` file of defaults, no abbreviations, and ValueError for every error."""

    def __init__(
        self,
        dataclass_types: Iterable[Any],
        default_config: Any = None,
        description: str | None = None,
        prog: str | None = None,
    ):
        usage = "%(prog)s [--config FILE.yaml] [--field value ...]"
        super().__init__(
            dataclass_types, prog=prog, description=description, usage=usage, allow_abbrev=False, add_help=False
        )
        fields = [field for cls in self.dataclass_types for field in dataclasses.fields(cls) if field.init]
        self.fields = {field.name: field for field in fields}
        self.hints = {name: hint for cls in self.dataclass_types for name, hint in get_type_hints(cls).items()}
        for action in self._actions:
            members = _members(self.hints[action.dest])
            if any((get_origin(member) or member) is dict for member in members):
                action.type = functools.partial(_mapping_from_text, or_text=str in members)
            if types.NoneType in members and callable(action.type):
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
        # A destination that is already set keeps argparse from filling in defaults: those are the dataclasses' own.
        unset = Namespace(**dict.fromkeys(self.fields, _NOT_GIVEN))
        namespace, unused = self.parse_known_args(list(argv), unset)
        values = {} if namespace.config is None else self._read_config(namespace.config)
        if namespace.help:
            self.set_defaults(**values)
            self.print_help()
            raise SystemExit(0)
        self._refuse_unknown(unused)
        for name in self.fields:
            if (value := vars(namespace)[name]) is not _NOT_GIVEN:
                enum = next(filter(_is_enum, _members(self.hints[name])), None)
                # `--field null` of a list field is [None].
                values[name] = None if value in (None, [None]) else value if enum is None else enum(value)
        required = [f.name for f in self.fields.values() if f.default is f.default_factory is dataclasses.MISSING]
        if missing := [name for name in required if name not in values]:
            options = " ".join(f"--{name} ..." for name in missing)
            self.error(f"no value for {', '.join(missing)}: expected in the config file or as {options}")
        own = [[field.name for field in dataclasses.fields(cls)] for cls in self.dataclass_types]
        return tuple(
            cls(**{name: values[name] for name in names if name in values})
            for cls, names in zip(self.dataclass_types, own, strict=True)
        )

    def _read_config(self, path: str | Path) -> dict[str, Any]:
        """The values of a YAML file, each checked against its field; errors name file, line and key."""
        values, lines = load_yaml_mapping(path)
        problems = []
        for name, value in values.items():
            where = f"{path}, line {lines[name]}:"
            if name not in self.fields:
                problems.append(f"{where} unknown field {name!r}{_suggestion(str(name), self.fields)}")
                continue
            try:
                values[name] = _converted(value, self.hints[name], self.fields[name].metadata.get("choices"))
            except ValueError as error:
                problems.append(f"{where} {name} is {value!r} ({type(value).__name__}), expected {error}")
        if problems:
            self.error("\n".join(problems))
        return values

    def _refuse_unknown(self, unused: list[str]) -> None:
        options = [word.partition("=")[0] for word in unused if re.match(r"--?[A-Za-z_]", word)]
        known = [option for option in self._option_string_actions if option.startswith("--")]
        if options:
            self.error("\n".join(f"unknown option {option}{_suggestion(option, known)}" for option in options))
        if unused:
            self.error(f"{' '.join(map(repr, unused))} on the command line belongs to no option.")


def _converted(value: Any, hint: Any, choices: Iterable[Any] | None = None) -> Any:
    """A YAML value as its field takes it; the message of a ValueError is what the field expects."""
    members = _members(hint)
    if any(map(_is_enum, members)):
        # `SomeEnum | str` takes the values of the enum, here as on the command line.
        members = [member for member in members if member is not str]
    if choices is not None and value is not None and value not in choices:
        raise ValueError(f"one of {', '.join(map(str, choices))}")
    for member in members:
        try:
            return _converted_to_one(value, member)
        except (TypeError, ValueError, ArgumentTypeError, StopIteration):
            continue
    quotes = " (put it in quotes)" if str in members and isinstance(value, int | float) else ""
    raise ValueError(" or ".join(map(_type_text, members)) + quotes)


def _converted_to_one(value: Any, hint: Any) -> Any:
    """A YAML value as one type that is not a union takes it; raises if it does not."""
    kind, arguments = get_origin(hint) or hint, get_args(hint) or (Any, Any)
    if kind is Any:
        return value
    if kind is Literal:
        return next(_same(value, type(choice)) for choice in arguments if choice == value)
    if kind is bool:
        return string_to_bool(_same(value, bool | str))
    if kind is float:
        return float(_same(value, int | float))
    if kind is list:
        return [_converted(item, arguments[0]) for item in _same(value, list)]
    if kind is dict:
        return {key: _converted(item, arguments[1]) for key, item in _same(value, dict).items()}
    if kind in (int, str, types.NoneType):
        return _same(value, kind)
    return kind(value if _is_enum(kind) else _same(value, str))


def _same(value: Any, kind: Any) -> Any:
    """`value` if it is a `kind`; a bool is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in _members(kind)):
        raise TypeError
    return value


def _is_enum(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, Enum)


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _type_text(hint: Any) -> str:
    if get_origin(hint) is Literal or _is_enum(hint):
        return f"one of {', '.join(str(m.value) if _is_enum(hint) else str(m) for m in get_args(hint) or hint)}"
    text = hint.__name__ if inspect.isclass(hint) and not get_args(hint) else str(hint).replace("typing.", "")
    return "null" if hint is types.NoneType else text


def _mapping_from_text(text: str, or_text: bool) -> dict[str, Any] | str:
    """The JSON of a dict option; where text is allowed too, one that does not start like an object is kept."""
    if or_text and not text.lstrip().startswith("{"):
        return text
    try:
        if isinstance(mapping := json.loads(text), dict):
            return mapping
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from None
    raise ArgumentTypeError(f"expected a JSON object, got {text!r}")


def _or_null(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    # argparse's message for a value that is no int speaks of an "invalid int value", by this name.
    @functools.wraps(convert, assigned=("__name__",), updated=())
    def convert_or_null(text: str) -> Any:
        return None if text == "null" else convert(text)

    return convert_or_null


def _suggestion(name: str, known: Iterable[str]) -> str:
    # Without the dashes, which make all options look alike.
    words = {word.lstrip("-"): word for word in known}
    closest = difflib.get_close_matches(name.lstrip("-"), words, n=1, cutoff=0.5)
    return f": did you mean {words[closest[0]]}?" if closest else ": no known name is close to it"
