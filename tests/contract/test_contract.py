# SPDX-License-Identifier: Apache-2.0
"""What the package computes is what `record.py` wrote down, whose docstring says how a record is made anew."""

import ast
import json
from pathlib import Path

import pytest
import record

import dflash_hf


HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", record.RECORDS)
def test_what_is_computed_is_what_was_recorded(name):
    recorded = json.loads(record.path_of(name).read_text())
    found = list(record.differences(recorded, record.compute(name)))
    assert not found, "\n".join(
        [f"{len(found)} differences from {record.path_of(name).name}:", *found[:15], f"(see {record.__file__})"]
    )


def test_each_record_has_a_function_and_all_are_small():
    files = sorted(HERE.glob("*.json"))
    assert [path.stem for path in files] == sorted(record.RECORDS)
    assert sum(path.stat().st_size for path in files) < 1_000_000


def test_a_record_keeps_neither_this_machine_nor_its_versions():
    texts = {path.name: path.read_text() for path in HERE.glob("*.json")}
    for text in ("/tmp/", str(record.ROOT), record.torch.__version__):
        assert [name for name, content in texts.items() if text in content] == []


def test_the_package_is_reached_by_names_that_stay():
    modules = {"dflash_hf": set(dflash_hf.__all__), "dflash_hf.generation": set(dflash_hf.generation.__all__)}
    modules["dflash_hf"] |= {"publishing", "command_evaluate", "command_generate", "command_tokenize"}
    for node in ast.walk(ast.parse((HERE / "record.py").read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dflash_hf"):
            assert {*names} <= modules[node.module]
        else:
            assert not [name for name in names if name.startswith("dflash_hf")]


@pytest.mark.parametrize(
    ("recorded", "now", "count"),
    [
        ({"a": [1, 2.0]}, {"a": [1, 2.0001]}, 0),
        ({"a": [1, 2.0]}, {"a": [1, 2.001]}, 1),
        ({"a": 1}, {"a": 1.0}, 1),
        ({"a": True}, {"a": 1}, 1),
        ([1, 2], [1, 2, 3], 1),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, 0),
        ({"a": 1, "b": 2}, {"a": 2, "c": 2}, 2),
        (0.0, 1e-9, 1),
        ("text", "texts", 1),
        (None, 0, 1),
    ],
)
def test_differences_are_found(recorded, now, count):
    assert len(list(record.differences(recorded, now))) == count
