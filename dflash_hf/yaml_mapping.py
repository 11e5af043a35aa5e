# SPDX-License-Identifier: Apache-2.0
"""A YAML file of one mapping, read by the rules of YAML 1.2.

PyYAML follows YAML 1.1, where `6e-4` is a string and `no` is false; in 1.2 the first is a number and the second a
word.
"""

import re
from pathlib import Path
from typing import Any

import yaml


def load_yaml_mapping(path: str | Path) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Read a file that holds one YAML mapping; return it and the line of each of its keys."""
    try:
        # In binary, so that PyYAML finds the encoding and reports bytes that are none.
        with open(path, "rb") as file:
            loader = _Yaml12Loader(file)
            node = loader.get_single_node()
            values = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no config file {path} (working directory: {Path.cwd()}): give an existing one with --config"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no usable config file: {error}") from error
    if values is None:
        return {}, {}
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path} holds a YAML {node.id}, expected a mapping: one `field: value` per line")
    return values, {loader.construct_object(key): key.start_mark.line + 1 for key, _ in node.value}


class _Yaml12Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2, and an error for a key given twice."""

    # Emptied, since a subclass otherwise starts from YAML 1.1's patterns.
    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in lines:
                raise yaml.composer.ComposerError(
                    None, None, f"{key.value!r} is given twice, first on line {lines[key.value]}", key.start_mark
                )
            lines[key.value] = key.start_mark.line + 1
        return node


_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
