# SPDX-License-Identifier: Apache-2.0
"""Checkpoints mirrored to an object store over HTTP on loopback: outages, wrong credentials, a bucket that is gone."""

import json
import os
import shutil
import threading
import time
import urllib.request
from pathlib import Path

import boto3
import fsspec
import pytest
import torch
from botocore.config import Config
from moto.server import ThreadedMotoServer
from runs import finish, make_trainer, start, train
from tiny import dense_target, refused

import dflash_hf.remote_checkpoints
from dflash_hf.checkpointing import MANIFEST_NAME, DiskSpaceError, manifest_problems
from dflash_hf.remote_checkpoints import (
    RemoteCheckpointCallback,
    RemoteCheckpointError,
    fetch_checkpoint,
    remote_steps,
    upload_checkpoint,
)


SECRET = "planted-secret-0123456789"
BUCKET = "drafters"
ADDRESS = f"s3://{BUCKET}/run"


class Store:
    """A server of buckets that can be switched off and on at one port."""

    def __init__(self):
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.is_up = True
        _, self.port = self.server.get_host_and_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.client = boto3.client("s3", endpoint_url=self.endpoint, config=Config(retries={"max_attempts": 1}))

    def down(self) -> None:
        self.server.stop()
        self.is_up = False

    def up(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()
        self.is_up = True

    def ask(self, path: str, body: bytes = b"") -> None:
        url = f"{self.endpoint}/moto-api/{path}"
        urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "text/plain"})).read()

    def names(self) -> list[str]:
        return [entry["Key"] for entry in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]


ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "planted-key-0123456789",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    # The client's own tries come on top of those here.
    "AWS_MAX_ATTEMPTS": "1",
}


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        server = Store()
    yield server
    server.down()


@pytest.fixture
def store(server, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": server.endpoint}.items():
        monkeypatch.setenv(name, value)
    server.client.create_bucket(Bucket=BUCKET)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield server
    if not server.is_up:
        server.up()
    server.ask("reset-auth", b"inf")
    # The buckets outlive a server that is switched off and on.
    server.ask("reset")


@pytest.fixture(scope="module")
def target():
    return dense_target()


def patient(cls=RemoteCheckpointCallback, address=ADDRESS, **overrides) -> RemoteCheckpointCallback:
    callback = cls(address)
    vars(callback).update({"first_wait": 0.05, "longest_wait": 0.1, **overrides})
    return callback


def mirrored(folder, target, callback, **arguments):
    return make_trainer(folder, target, callbacks=[callback], **{"max_steps": 6, "save_steps": 2, **arguments})


def assert_equal(one: dict, other: dict) -> None:
    assert all(torch.equal(one[name], parameter) for name, parameter in other.items())


def weights(trainer) -> dict:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_each_checkpoint_arrives_and_one_restored_elsewhere_resumes_bit_identically(store, target, tmp_path):
    class Slow(RemoteCheckpointCallback):
        def on_save(self, args, state, control, **kwargs):
            super().on_save(args, state, control, **kwargs)
            deadline = time.monotonic() + 30
            while len(self.arrived) < state.global_step // 2 and time.monotonic() < deadline:
                time.sleep(0.01)

    callback = Slow(ADDRESS)
    trainer = mirrored(tmp_path / "here", target, callback)
    trainer.train()
    assert callback.arrived == ["checkpoint-2", "checkpoint-4", "checkpoint-6"] and callback.missing is None
    assert remote_steps(ADDRESS) == [2, 4, 6]
    manifest = json.loads(
        store.client.get_object(Bucket=BUCKET, Key=f"run/checkpoint-4/{MANIFEST_NAME}")["Body"].read()
    )
    assert all(len(entry["sha256"]) == 64 for entry in manifest["files"].values())
    assert not [key for key in store.names() if key.endswith("training_args.bin")]
    assert not list((tmp_path / "here").glob("_*")) and not _threads()

    elsewhere = make_trainer(tmp_path / "there", target, max_steps=6, save_steps=2)
    elsewhere.train(resume_from_checkpoint=f"{ADDRESS}/checkpoint-4")
    assert elsewhere._initial_global_step == 4
    assert_equal(weights(elsewhere), weights(trainer))
    assert manifest_problems(tmp_path / "there" / "checkpoint-4") == []
    newest = make_trainer(tmp_path / "newest", target, max_steps=7, save_steps=2, remote_checkpoint_dir=ADDRESS)
    newest.train(resume_from_checkpoint=True)
    assert newest._initial_global_step == 6


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("remote-checkpoints", "interrupts")]


def test_an_outage_in_the_middle_does_not_stop_training(store, target, tmp_path, caplog):
    """The store goes down before the second checkpoint and comes back at the end."""

    class Outage(RemoteCheckpointCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 4:
                store.down()
            super().on_save(args, state, control, **kwargs)
            if state.global_step == 4:
                time.sleep(0.3)

        def on_train_end(self, args, state, control, **kwargs):
            store.up()

    callback = patient(Outage)
    trainer = mirrored(tmp_path, target, callback)
    trainer.train()
    assert trainer.state.global_step == 6 and callback.arrived[-1] == "checkpoint-6"
    assert any("checkpoint-4 could not be copied" in m and "trying again" in m for m in caplog.messages)
    assert any("newer one takes its place" in m for m in caplog.messages)
    plain = make_trainer(tmp_path / "plain", target, max_steps=6, save_strategy="no")
    plain.train()
    assert_equal(weights(trainer), weights(plain))


@pytest.mark.parametrize("fault", ["down", "no bucket"])
def test_a_store_that_never_answers_ends_in_an_error_after_training(store, target, tmp_path, fault):
    if fault == "down":
        store.down()
    else:
        store.client.delete_bucket(Bucket=BUCKET)
    trainer = mirrored(tmp_path, target, patient(final_attempts=2))
    with refused(RemoteCheckpointError, "checkpoint-6", ADDRESS):
        trainer.train()
    assert trainer.state.global_step == 6 and manifest_problems(tmp_path / "checkpoint-6") == []
    assert not _threads() and not list(tmp_path.glob("_*"))


@pytest.mark.parametrize("told_by", ["the store", "a talkative store"])
def test_wrong_credentials_end_in_an_error_that_does_not_repeat_them(
    store, target, tmp_path, monkeypatch, caplog, told_by
):
    def forbidden(self, *args, **kwargs):
        raise PermissionError(f"The key {os.environ['AWS_ACCESS_KEY_ID']} with {SECRET} is not known")

    store.ask("reset-auth", b"0")
    if told_by == "a talkative store":
        monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "exists", forbidden)
    trainer = mirrored(tmp_path, target, patient(final_attempts=1))
    with pytest.raises(RemoteCheckpointError):
        trainer.train()
    text = "\n".join(caplog.messages)
    assert told_by == "the store" or "The key <AWS_ACCESS_KEY_ID> with <AWS_SECRET_ACCESS_KEY> is not known" in text
    assert SECRET not in text and "planted-key" not in text
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert not any(word in path.read_bytes() for word in (SECRET.encode(), b"planted-key")), path


def train_mirrored(folder: str, stall: str = "", **kwargs) -> None:
    """Target of a process; `stall` names a file during whose upload it waits to be killed."""
    if stall:
        system = fsspec.get_filesystem_class("s3")
        original = system.put_file

        def put_file(self, local, remote, *args, **options):
            if remote.endswith(stall):
                Path(folder, "stalled").write_text("")
                time.sleep(600)
            return original(self, local, remote, *args, **options)

        system.put_file = put_file
    train(folder, remote_checkpoint_dir=ADDRESS, **kwargs)


def test_a_run_killed_during_an_upload_goes_on_from_what_arrived_before(store, target, tmp_path):
    """The unfinished copy has no manifest, so it is not there."""
    processes = start(
        train_mirrored,
        str(tmp_path),
        stall="checkpoint-4/optimizer.pt",
        max_steps=8,
        log=tmp_path / "log",
        # Time for the copy of checkpoint 2 to arrive, on a busy machine too: a newer one would take its place.
        seconds=1.5,
        save_steps=2,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "stalled").exists():
        assert time.monotonic() < deadline and processes[0].is_alive()
        time.sleep(0.01)
    processes[0].kill()
    finish(processes)
    assert remote_steps(ADDRESS) == [2] and any("checkpoint-4/" in key for key in store.names())
    # The machine is gone with its disk.
    shutil.rmtree(tmp_path / "run")
    resumed = start(train_mirrored, str(tmp_path), resume=True, log=tmp_path / "log", save_steps=2, max_steps=8)
    assert finish(resumed) == [0]
    assert remote_steps(ADDRESS)[-1] == 8
    plain = make_trainer(tmp_path / "plain", target, max_steps=8, save_strategy="no")
    plain.train()
    ended = torch.load(tmp_path / "final-0.pt")
    assert ended["losses"] == [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert_equal(ended["parameters"], weights(plain))


# What else a store does


MEMORY = "memory://faults/run"


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/faults"):
        system.rm("/faults", recursive=True)


@pytest.fixture(scope="module")
def checkpoints(target, tmp_path_factory):
    """Checkpoints 2 and 4 of a run without a mirror."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_trainer(folder, target, max_steps=4, save_steps=2).train()
    return folder / "checkpoint-2", folder / "checkpoint-4"


def memory_run(folder, target, **arguments):
    return make_trainer(
        folder, target, **{"max_steps": 4, "save_steps": 2, "remote_checkpoint_dir": MEMORY, **arguments}
    )


def test_a_store_that_hangs_is_not_waited_for_without_end(memory, target, tmp_path, monkeypatch):
    goes_on = threading.Event()
    original = type(memory).put_file

    def put_file(self, local, remote, **kwargs):
        if remote.endswith("checkpoint-4/optimizer.pt"):
            goes_on.wait(60)
        return original(self, local, remote, **kwargs)

    monkeypatch.setattr(type(memory), "put_file", put_file)
    trainer = mirrored(tmp_path, target, patient(address=MEMORY, stalled_after=0.5), max_steps=4)
    with refused(RemoteCheckpointError, "checkpoint-4", MEMORY):
        trainer.train()
    goes_on.set()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("optimizer.pt", None, "optimizer.pt"),
        ("optimizer.pt", b"half", "optimizer.pt"),
        ("optimizer.pt", "flip a bit", "hash"),
        (MANIFEST_NAME, None, MANIFEST_NAME),
        (MANIFEST_NAME, b"[]", MANIFEST_NAME),
        (MANIFEST_NAME, b"\xff", MANIFEST_NAME),
        (MANIFEST_NAME, b'{"files": {"/etc/planted": {"size": 1}}}', "outside"),
        (MANIFEST_NAME, b'{"files": {"../../planted": {"size": 1}}}', "outside"),
    ],
)
def test_a_broken_remote_checkpoint_is_an_error_by_name_and_skipped_otherwise(
    memory, checkpoints, target, tmp_path, caplog, name, data, said
):
    for folder in checkpoints:
        upload_checkpoint(folder, MEMORY)
    path = f"/faults/run/checkpoint-4/{name}"
    if data == "flip a bit":
        whole = memory.cat_file(path)
        data = whole[:-1] + bytes([whole[-1] ^ 1])
    memory.rm_file(path) if data is None else memory.pipe_file(path, data)
    with refused(ValueError, "checkpoint-4", said):
        fetch_checkpoint(f"{MEMORY}/checkpoint-4", tmp_path / "other")
    assert not list((tmp_path / "other").glob("*"))
    trainer = memory_run(tmp_path / "other", target)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 2
    is_there = (name, data) != (MANIFEST_NAME, None)
    assert any(f"checkpoint-4 at {MEMORY}" in m and said in m for m in caplog.messages) is is_there


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://key:planted@bucket/run", "credentials"),
        ("s3://bucket/run?X-Amz-Signature=planted", "credentials"),
        *((address, repr(address)) for address in ("bucket/run", "s3:/bucket", "s3://", "", "s3://b/run\n")),
        ("nosuch://bucket/run", "nosuch"),
    ],
)
def test_an_address_with_credentials_is_refused_without_repeating_them(target, tmp_path, address, said):
    """So is what is no address, at the start."""
    with pytest.raises(ValueError) as caught:
        make_trainer(tmp_path, target, remote_checkpoint_dir=address)
    assert said in str(caught.value) and "planted" not in str(caught.value)
    if "planted" in address:
        with pytest.raises(ValueError) as caught:
            make_trainer(tmp_path, target).train(resume_from_checkpoint=address)
        assert "planted" not in str(caught.value)


@pytest.mark.parametrize("address", [MEMORY, ADDRESS])
def test_a_checkpoint_comes_back_as_it_was_sent(store, memory, checkpoints, tmp_path, address):
    upload_checkpoint(checkpoints[0], address)
    fetched = fetch_checkpoint(address, tmp_path / "fetched")
    for path in checkpoints[0].iterdir():
        if path.name not in (MANIFEST_NAME, "training_args.bin"):
            assert (fetched / path.name).read_bytes() == path.read_bytes(), path.name
    before = (fetched / "model.safetensors").stat().st_ino
    assert fetch_checkpoint(f"{address}/checkpoint-2/", tmp_path / "fetched") == fetched
    assert (fetched / "model.safetensors").stat().st_ino == before


def test_two_runs_at_one_address_are_told_of(memory, checkpoints, target, tmp_path, caplog):
    def is_told() -> bool:
        return any(MEMORY in message and "later steps" in message for message in caplog.messages)

    memory_run(tmp_path / "one", target, max_steps=1, save_steps=1).train()
    assert not is_told()
    upload_checkpoint(checkpoints[1], MEMORY)
    memory_run(tmp_path / "two", target, max_steps=1, save_steps=1).train()
    assert is_told()


def test_a_checkpoint_that_cannot_be_set_aside_does_not_stop_training(memory, target, tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dflash_hf.remote_checkpoints, "linked_copy", full)
    with refused(RemoteCheckpointError, "checkpoint-4"):
        memory_run(tmp_path, target).train()
    assert any("checkpoint-2" in message and "No space left" in message for message in caplog.messages)
    assert not manifest_problems(tmp_path / "checkpoint-4")


def test_a_disk_without_room_for_what_is_fetched_is_an_error_before_it(memory, checkpoints, tmp_path, monkeypatch):
    upload_checkpoint(checkpoints[1], MEMORY)
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DiskSpaceError):
        fetch_checkpoint(f"{MEMORY}/checkpoint-4", tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
