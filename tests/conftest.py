# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several files share; tiny.py makes tiny targets and drafters, naive.py holds the naive twins."""

from pathlib import Path

import pytest
from tiny import byte_tokenizer, dense_target


@pytest.fixture
def tokenizer():
    """The byte-level tokenizer with a ChatML template; a test may change it."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """A folder with the dense target's weights and its tokenizer; only to be read."""
    folder = tmp_path_factory.mktemp("target")
    dense_target().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
