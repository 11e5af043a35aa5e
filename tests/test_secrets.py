# SPDX-License-Identifier: Apache-2.0
"""Secrets are written nowhere, and nothing that came over the network is unpickled."""

import json
import os
import pickle
import shutil

import fsspec
import pytest
import torch
from runs import make_documents, make_trainer
from test_hub_pushes import Hub
from tiny import byte_tokenizer, dense_target

from dflash_hf.checkpointing import MANIFEST_NAME, sha256_of


PLANTED = {
    "HF_TOKEN": "hf_planted_in_the_environment",
    "AWS_SECRET_ACCESS_KEY": "aws_planted_in_the_environment",
    "WANDB_API_KEY": "wandb_planted_in_the_environment",
}


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture
def mirror():
    address = "memory://mirror"
    system = fsspec.filesystem("memory")
    yield address
    system.rm("/mirror", recursive=True)


def test_planted_secrets_are_in_no_file_no_log_and_no_push(target, tmp_path, monkeypatch, caplog, capfd, mirror):
    """Checkpoints, pickled arguments, records, cards, mirrored and pushed files, logs and what is printed."""
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: hub.create_repo(*args, **kwargs))
    monkeypatch.setattr(
        "huggingface_hub.HfApi.upload_folder", lambda *args, **kwargs: hub.upload_folder(*args, **kwargs)
    )
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("dflash_hf.publishing.publish", hub.publish)
    caplog.set_level("DEBUG", logger="dflash_hf")
    trainer = make_trainer(
        tmp_path / "run",
        target,
        max_steps=2,
        save_steps=1,
        push_to_hub=True,
        hub_token="hf_planted_as_argument",
        hub_strategy="all_checkpoints",
        hub_always_push=True,
        remote_checkpoint_dir=mirror,
        processing_class=byte_tokenizer(),
        eval_dataset=make_documents(1),
    )
    trainer.train()
    trainer.save_model()
    hub.thread.shutdown()
    assert hub.tokens == {"hf_planted_as_argument"}
    system = fsspec.filesystem("memory")
    texts = {path: system.cat_file(path) for path in system.find("/mirror")}
    texts |= {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    texts["log"] = caplog.text.encode()
    printed = capfd.readouterr()
    texts["printed"] = (printed.out + printed.err).encode()
    texts["arguments"] = trainer.args.to_json_string().encode()
    names = {os.path.basename(name) for name in texts}
    assert {"training_args.bin", "dflash_run.json", "README.md", MANIFEST_NAME, "trainer_state.json"} <= names
    for name, text in texts.items():
        assert not [value for value in (*PLANTED.values(), "hf_planted_as_argument") if value.encode() in text], name


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_remote_checkpoint_with_a_harmful_pickle_is_refused(target, tmp_path, mirror, name):
    """Its hash is right: whoever can write the store can write the manifest."""
    make_trainer(tmp_path / "run", target, max_steps=2, save_steps=1, remote_checkpoint_dir=mirror).train()
    system, evil = fsspec.filesystem("memory"), tmp_path / "evil"
    torch.save({"state": Payload(tmp_path / "executed"), "param_groups": []}, evil)
    manifest = json.loads(system.cat_file(f"/mirror/checkpoint-2/{MANIFEST_NAME}"))
    manifest["files"][name] = {"size": evil.stat().st_size, "sha256": sha256_of(evil)}
    system.pipe_file(f"/mirror/checkpoint-2/{name}", evil.read_bytes())
    system.pipe_file(f"/mirror/checkpoint-2/{MANIFEST_NAME}", json.dumps(manifest).encode())
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        make_trainer(tmp_path / "run", target, max_steps=4).train(resume_from_checkpoint=f"{mirror}/checkpoint-2")
    assert not (tmp_path / "executed").exists()
