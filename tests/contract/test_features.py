# SPDX-License-Identifier: Apache-2.0
"""Every feature that the documents name stands in features.md beside a test that is there."""

import ast
import functools
import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
FEATURES = (Path(__file__).parent / "features.md").read_text()


def rows() -> list[tuple[str, str]]:
    """Sentence and test of each line of the tables."""
    lines = [line for line in FEATURES.splitlines() if line.startswith("|")]
    lines = [line for line in lines if line not in ("| feature | test |", "|---|---|")]
    found = [re.fullmatch(r"\| (.+\.) \| `(tests/[\w/]+\.py(?:::\w+)+)` \|", line) for line in lines]
    assert [line for line, match in zip(lines, found, strict=True) if match is None] == []
    return [(match[1], match[2]) for match in found if match]


@functools.cache
def functions_of(path: str) -> set[str]:
    """Test functions of a file, those of a class as CLASS::NAME."""
    if not (ROOT / path).is_file():
        return set()
    body = ast.parse((ROOT / path).read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for owner in body:
        if isinstance(owner, ast.ClassDef):
            functions |= {f"{owner.name}::{node.name}" for node in owner.body if isinstance(node, ast.FunctionDef)}
    return {name for name in functions if name.rpartition("::")[2].startswith("test_")}


def test_each_feature_has_a_test_that_is_there():
    named = [test.split("::", 1) for _, test in rows()]
    assert len(named) > 400
    assert ["::".join(test) for test in named if test[1] not in functions_of(test[0])] == []


def test_no_feature_stands_twice():
    sentences = rows()
    assert len(set(sentences)) == len(sentences)


def test_each_public_name_is_a_feature():
    package = ast.parse((ROOT / "dflash_hf/__init__.py").read_text())
    (public,) = (
        ast.literal_eval(node.value)
        for node in package.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    )
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", " ".join(sentence for sentence, _ in rows())))))
    assert public and sorted(set(public) - words) == []
