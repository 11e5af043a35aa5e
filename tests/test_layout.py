# SPDX-License-Identifier: Apache-2.0
"""What README and the folders' docstrings say of the code's layout is what is there."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

import dflash_hf


PACKAGE = Path(dflash_hf.__file__).parent
FOLDERS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def test_the_readme_names_every_file_and_folder():
    text = (PACKAGE.parent / "README.md").read_text()
    (table,) = re.findall(r"^## How the code is laid out\n(.*?)^`make help`", text, flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`([\w*]+(?:\.py|/))`", table)
    there = [path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    there += [f"{folder.name}/" for folder in FOLDERS]
    assert [name for name in there if not any(fnmatch.fnmatch(name, pattern) for pattern in named)] == []
    assert [name for name in named if not fnmatch.filter([*there, "dflash_hf/", "recipes/"], name)] == []


def test_what_is_published_beside_a_drafter_lies_flat_and_is_named_so():
    """The drafter's files import nothing of the package but each other."""
    published, waiting = set(), ["modeling_dflash", "configuration_dflash"]
    while waiting:
        name = waiting.pop()
        published.add(name)
        imports = [
            n for n in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())) if isinstance(n, ast.ImportFrom)
        ]
        waiting += [n.module for n in imports if n.level == 1 and n.module and n.module not in published]
    text = (PACKAGE.parent / "README.md").read_text()
    (row,) = re.findall(r"^\| `configuration_dflash\.py`.*", text, flags=re.MULTILINE)
    named, registration = row.split("`auto_classes.py`")[0], {"auto_classes"}
    patterns = [pattern.removesuffix(".py") for pattern in re.findall(r"`([\w*]+\.py)`", named)]
    modules = {path.stem for path in PACKAGE.glob("*.py")} - registration
    assert published == {name for name in modules if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folders_docstring_lists_its_files(folder):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    listed = set(re.findall(r"`([a-z_0-9]+)`", docstring or ""))
    there = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert there - listed == set()
