# SPDX-License-Identifier: Apache-2.0
"""What Trainer's own switches push to the Hub: the publishable bf16 drafter, and complete checkpoints."""

import fnmatch
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from runs import make_trainer
from safetensors.torch import load_file
from tiny import byte_tokenizer, dense_target

import dflash_hf.publishing
from dflash_hf import DFlashDraftModel
from dflash_hf.checkpointing import manifest_problems


@pytest.fixture(scope="module")
def target():
    return dense_target()


class Hub:
    """Keeps what is uploaded as folders, in a thread that may be held up or fail."""

    def __init__(self, root: Path):
        self.root, self.commits, self.tokens, self.error = root, [], set(), None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.thread = ThreadPoolExecutor(1)

    def create_repo(self, api, repo_id, token=None, **kwargs):
        self.tokens.add(token)
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def publish(self, publication, *, commit_message, token, **kwargs):
        self.tokens.add(token)
        shutil.copytree(publication.folder, self.root / str(len(self.commits)))
        self.commits.append(commit_message)

    def upload_folder(self, api, *, folder_path, path_in_repo=None, run_as_future=False, ignore_patterns=(), **kwargs):
        def copy() -> None:
            self.may_go_on.wait(30)
            if self.error:
                raise self.error
            commit = self.root / str(len(self.commits)) / (path_in_repo or "")
            for path in Path(folder_path).rglob("*"):
                name = path.relative_to(folder_path).as_posix()
                if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                    (commit / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, commit / name)
            self.commits.append(kwargs["commit_message"])

        # One after the other, as the client does it.
        future = self.thread.submit(copy)
        return future if run_as_future else future.result()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(HfApi, "create_repo", lambda api, *args, **kwargs: hub.create_repo(api, *args, **kwargs))
    monkeypatch.setattr(HfApi, "upload_folder", lambda api, **kwargs: hub.upload_folder(api, **kwargs))
    monkeypatch.setattr("dflash_hf.publishing.publish", hub.publish)
    yield hub
    hub.thread.shutdown()


def pushing(folder, target, **arguments):
    arguments = {"max_steps": 4, "save_steps": 2, "push_to_hub": True, "hub_token": "hf_planted", **arguments}
    return make_trainer(folder / "drafter", target, processing_class=byte_tokenizer(), **arguments)


def assert_publishable(folder: Path, tokenizer: bool = True) -> dict:
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert DFlashDraftModel.from_pretrained(folder).dtype == torch.bfloat16
    assert (folder / "tokenizer.json").exists() == tokenizer and (folder / "modeling_dflash.py").exists()
    assert not list(folder.rglob("training_args.bin")) and not list(folder.rglob("optimizer.pt"))
    return tensors


def test_every_save_pushes_the_bf16_drafter_and_keeps_fp32_masters(hub, target, tmp_path):
    trainer = pushing(tmp_path, target, hub_strategy="every_save", hub_always_push=True)
    trainer.train()
    assert hub.commits == ["Training in progress, step 2", "Training in progress, step 4"]
    for commit, step in ((0, 2), (1, 4)):
        pushed = assert_publishable(hub.root / str(commit))
        masters = load_file(tmp_path / "drafter" / f"checkpoint-{step}" / "model.safetensors")
        assert all(torch.equal(pushed[name], master.bfloat16()) for name, master in masters.items())
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    names = sorted(path.name for path in (tmp_path / "drafter").iterdir())
    assert names == ["checkpoint-2", "checkpoint-4", "training.json"]


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_checkpoints_are_pushed_complete_even_if_rotated_away_meanwhile(hub, target, tmp_path, strategy):
    hub.may_go_on.clear()
    trainer = pushing(tmp_path, target, hub_strategy=strategy, hub_always_push=True, save_total_limit=1, save_steps=1)
    original = trainer._finish_current_push

    def finish():
        assert [p.name for p in (tmp_path / "drafter").glob("checkpoint-*")] == ["checkpoint-4"]
        hub.may_go_on.set()
        original()

    trainer._finish_current_push = finish
    trainer.train()
    assert len(hub.commits) == 8
    names = {path.parent.name for path in hub.root.rglob("optimizer.pt")}
    assert names == ({"last-checkpoint"} if strategy == "checkpoint" else {f"checkpoint-{n}" for n in (1, 2, 3, 4)})
    pushed = [path.parent for path in hub.root.rglob("optimizer.pt")]
    assert len(pushed) == 4
    for folder in pushed:
        assert manifest_problems(folder) == []
        assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.float32}
    for path in hub.root.rglob("*"):
        assert not path.is_file() or b"hf_planted" not in path.read_bytes(), path


def test_a_push_that_fails_is_told_of_and_loses_nothing(hub, target, tmp_path, caplog):
    hub.error = ConnectionError("no route for hf_planted_in_the_environment")
    trainer = pushing(tmp_path, target, hub_strategy="checkpoint")
    trainer.train()
    assert any("did not arrive at me/" in message and "ConnectionError" in message for message in caplog.messages)
    assert manifest_problems(tmp_path / "drafter" / "checkpoint-4") == []
    assert not list((tmp_path / "drafter").glob("_*"))


def test_a_drafter_that_cannot_be_set_aside_is_told_of_and_training_goes_on(
    hub, target, tmp_path, monkeypatch, caplog
):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dflash_hf.publishing, "linked_copy", full)
    pushing(tmp_path, target, hub_strategy="checkpoint").train()
    assert any("checkpoint-4 cannot be set aside to be pushed" in message for message in caplog.messages)
    assert manifest_problems(tmp_path / "drafter" / "checkpoint-4") == [] and hub.commits == []
    assert not list((tmp_path / "drafter").glob("_*"))


def test_hb1_push_to_hub_and_save_model_push_bf16_and_save_fp32(hub, target, tmp_path):
    trainer = pushing(tmp_path, target, hub_strategy="end", save_strategy="no")
    trainer.train()
    assert hub.commits == []
    trainer.save_model()
    assert hub.commits == ["Model save"] and trainer.args.output_dir == str(tmp_path / "drafter")
    assert_publishable(hub.root / "0", tokenizer=False)
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert trainer.model.dtype == torch.float32
    assert trainer.hub_model_id == "me/drafter" and hub.tokens == {"hf_planted"}
    assert "drafter" in (hub.root / "0" / "README.md").read_text()
    assert not list((tmp_path / "drafter").glob("_*"))
