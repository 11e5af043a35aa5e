# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several files share; tiny.py makes tiny targets and drafters, naive.py holds the naive twins."""

from pathlib import Path

import huggingface_hub
import pytest
from hub_server import HubServer
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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on loopback that huggingface_hub and transformers talk to, with a token that may write."""
    with HubServer() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        # transformers keeps the client that it made first, and that one its endpoint.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        yield server
