# SPDX-License-Identifier: Apache-2.0
"""What README and the package's docstring say of the code's layout is what is there."""

import ast
import fnmatch
import re
import sys
import threading
from pathlib import Path

from tiny import byte_tokenizer, dense_target, tiny_drafter, write_chats

import dflash_hf
from dflash_hf import DFlashTrainer, DFlashTrainingArguments, read_completions, tokenize_completions


PACKAGE = Path(dflash_hf.__file__).parent


def test_the_readme_names_every_file():
    text = (PACKAGE.parent / "README.md").read_text()
    (table,) = re.findall(r"^## How the code is laid out\n(.*?)^`make help`", text, flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`([\w*]+(?:\.py|/))`", table)
    there = [path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
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
    (row,) = re.findall(r"^\|.*`configuration_dflash\.py`.*", text, flags=re.MULTILINE)
    assert published == {name.removesuffix(".py") for name in re.findall(r"`([\w*]+\.py)`", row)}


def test_the_packages_docstring_lists_its_files():
    listed = set(re.findall(r"`([a-z_0-9]+)`", dflash_hf.__doc__))
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} - listed == set()


def test_the_package_is_flat_and_no_folder_is_called_target():
    """Global git ignore files drop folders of that name."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {"accelerate_configs"}


def test_a_row_passes_fifteen_files_at_most_from_json_to_its_loss(tmp_path):
    """Reading, batching and the loss; what a trainer checks and writes around its steps is not the row's way."""
    target, chats = dense_target(), write_chats(tmp_path / "chats.jsonl")
    options = {"row_length": 128, "num_anchors": 6, "report_to": "none", "use_cpu": True}
    args = DFlashTrainingArguments(str(tmp_path / "run"), **options)
    passed: list[str] = []

    def seen(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == PACKAGE and path.stem not in passed:
            passed.append(path.stem)

    def traced(work):
        threading.setprofile(seen)
        sys.setprofile(seen)
        try:
            return work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    rows = traced(lambda: read_completions(str(chats)))
    documents = traced(lambda: tokenize_completions(rows, byte_tokenizer()))
    trainer = DFlashTrainer(tiny_drafter(target), target, args, train_dataset=documents)
    batch = traced(lambda: next(iter(trainer.get_train_dataloader())))
    loss = traced(lambda: trainer.compute_loss(trainer.model, batch))
    assert loss.isfinite() and loss > 0
    assert {"chats", "rendering", "data_collator", "frozen_target", "modeling_dflash", "losses"} <= set(passed)
    assert len(passed) <= 15, passed
