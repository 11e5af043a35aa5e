# SPDX-License-Identifier: Apache-2.0
"""Publishing to a Hub on loopback: what a repository holds, one commit, the trainer's own pushes, and no secret."""

import copy
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import huggingface_hub
import pytest
import torch
from hub_server import Repository
from runs import make_documents, make_trainer
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import byte_tokenizer, dense_target, refused, tiny_drafter

import dflash_hf.publishing
from dflash_hf import DFlashDraftModel, validate_checkpoint
from dflash_hf.adapters import add_adapter, lora_config, merge_adapter
from dflash_hf.adapting import plain_drafter
from dflash_hf.checkpointing import MANIFEST_NAME, manifest_problems, sha256_of
from dflash_hf.frozen_target import load_model
from dflash_hf.model_card import CardOptions, write_facts
from dflash_hf.publishing import Publication, PublishError, build_repository, main, publish, without_local_paths
from dflash_hf.resuming import target_identity


REPO, RUN = "me/tiny-DFlash", "me/drafter"
REPORT = {"acceptance_length": 2.5, "num_prompts": 3, "max_new_tokens": 16, "slot_acceptance": [0.7, 0.3]}
RESULTS = {"seen": {"after": REPORT, "after_interval": [2.0, 3.0]}}


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target).eval()


@pytest.fixture(scope="module")
def publication(drafter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("publication")
    results = RESULTS | {"settings": {"drafters": [str(folder)], "output": "/somewhere/else"}}
    options = CardOptions(base_model="org/target", license="apache-2.0", languages=["en"])
    return build_repository(drafter, folder, REPO, results=results, options=options, fp32=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def remote(hub, revision="main", repo_id=REPO):
    return {n: data for n, data in hub.repositories[repo_id].tree(revision).items() if n != ".gitattributes"}


def messages(hub, repo_id=REPO) -> list[str]:
    return [message for _, message, _ in hub.repositories[repo_id].commits if message != "initial commit"]


def full_disk(*args, **kwargs):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


# --- The files.


def test_a_repository_holds_what_users_need_and_nothing_else(publication, drafter):
    files = publication.files
    code = {name for name in files if name.endswith(".py") and "/" not in name}
    others = {"README.md", "config.json", "model.safetensors", "results.json", "acceptance.png"}
    assert "modeling_dflash.py" in code and {name for name in files if not name.startswith("fp32/")} == code | others
    weights, masters = (load_file(publication.folder / part / "model.safetensors") for part in ("", "fp32"))
    for name, parameter in drafter.state_dict().items():
        assert torch.equal(weights[name], parameter.bfloat16()) and torch.equal(masters[name], parameter)
    assert validate_checkpoint(publication.folder).ok and "in all" in str(publication)
    for name, data in contents(publication.folder).items():
        assert str(publication.folder.parent).encode() not in data and b"/somewhere" not in data, name
    assert (publication.folder / "acceptance.png").stat().st_size > 5000


def without_architectures(original):
    def save_pretrained(self, folder, **kwargs):
        original(self, folder, **kwargs)
        config = json.loads((Path(folder) / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k[:4] != "arch"}))

    return save_pretrained


@pytest.mark.parametrize("fault", ["no owner", "name", "folder", "base_model", "NaN", "reader", "disk"])
def test_what_a_server_would_not_load_is_not_sent(drafter, tmp_path, monkeypatch, fault):
    """It is refused before the network, and leaves no half repository."""
    folder, repo_id, options, model, error = tmp_path / "new", REPO, None, drafter, ValueError
    if fault in ("no owner", "name"):
        repo_id = said = {"no owner": "tiny", "name": "me/ti ny"}[fault]
    if fault == "folder":
        folder = said = tmp_path
        (tmp_path / "optimizer.pt").touch()
    if fault == "base_model":
        options, said = CardOptions(base_model="./target"), "base_model='./target'"
    if fault == "NaN":
        model, said = copy.deepcopy(drafter), "fc.weight"
        model.fc.weight.data[0, 0] = float("nan")
    if fault == "reader":
        said = "ERROR for vLLM"
        monkeypatch.setattr(
            DFlashDraftModel, "save_pretrained", without_architectures(DFlashDraftModel.save_pretrained)
        )
    if fault == "disk":
        error, said = OSError, "No space left"
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
    with refused(error, said):
        build_repository(model, folder, repo_id, options=options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("names", [["a/p.png", "b/p.png"], ["config.json"], ["acceptance.png"]])
def test_a_plot_takes_the_place_of_no_other_file(tmp_path, drafter, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with refused(ValueError, tmp_path / names[0], ".png"):
        build_repository(drafter, tmp_path / "new", "me/x", results=RESULTS, plots=[tmp_path / n for n in names])


def test_local_paths_are_cut_to_their_last_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = {"target": str(tmp_path), "text": "either/or", "id": "org/model", f"{tmp_path}/x": ["./a/b", "~/c"]}
    cut = {"target": tmp_path.name, "text": "either/or", "id": "org/model", "x": ["b", "c"]}
    assert without_local_paths(value) == cut
    # Drafters in folders of one name all stay.
    results = {"drafters": {str(tmp_path / part / "merged"): part for part in "abc"}}
    assert without_local_paths(results) == {"drafters": {"merged": "a", "merged (2)": "b", "merged (3)": "c"}}


# --- Sending.


def test_hb1_push_then_load_in_a_fresh_process_by_this_package_and_by_dflash(hub, publication, drafter, tmp_path):
    url = publish(publication, private=True, commit_message="First drafter", tag="v1")
    assert url.startswith(hub.url) and hub.repositories[REPO].private
    assert remote(hub) == remote(hub, "v1") == contents(publication.folder)
    assert messages(hub) == ["First drafter"]
    program = f"""
import torch
from dflash.model import DFlashDraftModel as Published
import dflash_hf
drafter = dflash_hf.DFlashDraftModel.from_pretrained("{REPO}", revision="v1")
other = Published.from_pretrained("{REPO}", dtype=torch.bfloat16)
ours, theirs = drafter.state_dict(), other.state_dict()
assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
assert drafter.dtype == torch.bfloat16 and drafter.config.block_size == other.block_size == 4
print("sum", sum(t.double().sum().item() for t in ours.values()))
assert dflash_hf.validate_checkpoint("{REPO}").ok
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_writer", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = sum(p.bfloat16().double().sum().item() for p in drafter.state_dict().values())
    assert float(done.stdout.split()[-1]) == pytest.approx(expected)


@pytest.mark.parametrize("break_off", ["cut", 500, "commit"])
def test_an_interrupted_push_shows_nothing_and_is_resumed(hub, publication, break_off):
    before = contents(publication.folder)
    digests = {n: hashlib.sha256(d).hexdigest() for n, d in before.items() if n.endswith((".png", ".safetensors"))}
    late = digests["model.safetensors"]
    part = ("POST", "/commit/main") if break_off == "commit" else ("PUT", f"/{late}")
    hub.fail[part] = 500 if break_off == "commit" else break_off
    with refused(PublishError, REPO):
        publish(publication)
    assert remote(hub) == {} and messages(hub) == [] and contents(publication.folder) == before
    missing = {late} - hub.repositories[REPO].blobs.keys()
    assert set(hub.repositories[REPO].blobs) | missing == set(digests.values())
    for uploads in (len(missing), 0):
        hub.fail.clear()
        hub.calls.clear()
        publish(publication)
        # Only what was missing travels, and once all is there, nothing changes: no commit, no upload.
        assert remote(hub) == before and hub.count("PUT", "/lfs/") == uploads and len(messages(hub)) == 1


@pytest.mark.parametrize(("token", "status"), [("hf_wrong", 401), ("hf_reader", 403)])
def test_a_token_that_does_not_do_is_said_before_anything_is_sent(hub, publication, monkeypatch, token, status):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PublishError) as error:
        publish(publication)
    assert all(word in str(error.value) for word in (REPO, str(status), "HF_TOKEN")) and token not in str(error.value)
    assert not hub.repositories and hub.count("PUT", "") == 0


def test_names_that_are_taken(hub, publication):
    hub.repositories[REPO] = other = Repository()
    other.commit("main", "something else", {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'})
    with refused(PublishError, REPO, "LlamaForCausalLM"):
        publish(publication)
    assert messages(hub) == ["something else"] and len(other.branches) == 1
    # Another one's private repository is not there for this token.
    hub.writers = {"hf_writer": {"me"}}
    hub.repositories["team/drafter"] = Repository(private=True)
    with refused(PublishError, "team/drafter"):
        publish(Publication(publication.folder, "team/drafter"))


def test_updates_replace_old_weights_and_keep_what_is_not_theirs(hub, publication):
    publish(publication, commit_message="first")
    repository = hub.repositories[REPO]
    tree = {**repository.tree(), "model-00001-of-00002.safetensors": b"old", "NOTES.md": b"mine", "README.md": b"mine"}
    repository.commit("main", "by hand", tree)
    publish(publication, commit_message="second", keep_card=True)
    assert "model-00001-of-00002.safetensors" not in remote(hub)
    assert remote(hub)["NOTES.md"] == remote(hub)["README.md"] == b"mine"
    publish(publication, revision="experiment", tag="v2")
    assert remote(hub)["README.md"] == b"mine" and remote(hub, "experiment")["README.md"] != b"mine"
    assert repository.tags["v2"] == repository.branches["experiment"]
    for asked, said in (({"private": True}, "private=False"), ({"tag": "v2"}, "v2")):
        with refused(PublishError, REPO, said):
            publish(publication, **asked)


def test_the_commit_of_a_target_from_the_hub_is_known(hub, target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    hub.repositories["me/target"] = Repository()
    commit = hub.repositories["me/target"].commit("main", "Target", contents(tmp_path / "target"))
    assert target_identity(load_model("me/target", None, {}))["revision"] == commit
    assert target_identity(load_model(tmp_path / "target", None, {}))["revision"] is None


def test_offline_the_cache_serves_and_what_it_lacks_is_named(hub, drafter, tmp_path, monkeypatch):
    drafter.push_to_hub("me/base")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    online = DFlashDraftModel.from_pretrained("me/base")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert DFlashDraftModel.from_pretrained("me/base").config._commit_hash == online.config._commit_hash
    with refused(OSError, "me/other"):
        DFlashDraftModel.from_pretrained("me/other")
    (weights,) = (tmp_path / "elsewhere").glob("models--me--base/snapshots/*/model.safetensors")
    weights.resolve().write_bytes(weights.read_bytes()[:100])
    with refused(ValueError, "model.safetensors"):
        DFlashDraftModel.from_pretrained("me/base")


@pytest.mark.parametrize("kind", ["loaded", "fp32", "merged", "trained", "grown", "gone"])
def test_a_drafter_that_was_trained_since_is_not_published_with_the_record_of_its_folder(
    target, drafter, tmp_path, monkeypatch, kind
):
    folder = tmp_path / "drafter"
    drafter.save_pretrained(folder, dtype=torch.bfloat16)
    if kind == "merged":
        adapter = add_adapter(DFlashDraftModel.from_pretrained(folder), lora_config(2))
        folder = tmp_path / "adapter"
        adapter.save_pretrained(str(folder))
        pushed = merge_adapter(folder)
    else:
        pushed = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32 if kind == "fp32" else None)
    facts = {"format": 1, "recipe": {}}
    write_facts(facts, folder)
    if kind == "trained":
        pushed.layers[1].mlp.up_proj.weight.data[3, 4] += 1
    if kind == "grown":
        tiny_drafter(target, num_hidden_layers=3).save_pretrained(folder)
    if kind == "gone":
        (folder / "config.json").unlink()
    built = []
    monkeypatch.setattr("dflash_hf.publishing.build_repository", lambda *args, **kwargs: built.append(kwargs))
    monkeypatch.setattr("dflash_hf.publishing.publish", lambda publication, **kwargs: "address")
    pushed.push_to_hub("me/x")
    assert [kwargs["facts"] for kwargs in built] == [None if kind in ("trained", "grown", "gone") else facts]


# --- The trainer's pushes.


def pushing(folder, target, **arguments):
    arguments = {"max_steps": 4, "save_steps": 2, "push_to_hub": True, "hub_token": "hf_writer", **arguments}
    return make_trainer(folder / "drafter", target, processing_class=byte_tokenizer(), **arguments)


def downloaded(hub, folder: Path, repo_id: str = RUN, revision: str = "main") -> Path:
    for name, data in remote(hub, revision, repo_id).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_every_save_pushes_the_bf16_drafter_and_keeps_fp32_masters(hub, target, tmp_path):
    pushing(tmp_path, target, hub_strategy="every_save", hub_always_push=True).train()
    assert messages(hub, RUN) == ["Training in progress, step 2", "Training in progress, step 4"]
    for oid, message, _ in hub.repositories[RUN].commits[1:]:
        step = message.split()[-1]
        folder = downloaded(hub, tmp_path / f"pushed-{step}", revision=oid)
        pushed = load_file(folder / "model.safetensors")
        masters = load_file(tmp_path / "drafter" / f"checkpoint-{step}" / "model.safetensors")
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
        assert all(torch.equal(pushed[name], master.bfloat16()) for name, master in masters.items())
        assert DFlashDraftModel.from_pretrained(folder).dtype == torch.bfloat16
        names = contents(folder).keys()
        assert {"tokenizer.json", "modeling_dflash.py"} <= names and not {"training_args.bin", "optimizer.pt"} & names
    left = {path.name for path in (tmp_path / "drafter").iterdir()}
    assert left == {"checkpoint-2", "checkpoint-4", "training.json"}


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_checkpoints_are_pushed_complete_even_if_rotated_away_meanwhile(hub, target, tmp_path, strategy):
    trainer = pushing(tmp_path, target, hub_strategy=strategy, hub_always_push=True, save_total_limit=1, save_steps=1)
    # Until training is over, nothing arrives.
    hub.may_go_on.clear()
    original = trainer._finish_current_push

    def finish():
        assert [p.name for p in (tmp_path / "drafter").glob("checkpoint-*")] == ["checkpoint-4"]
        hub.may_go_on.set()
        original()

    trainer._finish_current_push = finish
    trainer.train()
    # The drafter and its checkpoint come in one commit.
    assert messages(hub, RUN) == [f"Training in progress, step {n}" for n in (1, 2, 3, 4)]
    folder = downloaded(hub, tmp_path / "pushed")
    pushed = {path.parent.name: path.parent for path in folder.rglob("optimizer.pt")}
    steps = [f"checkpoint-{n}" for n in (1, 2, 3, 4)]
    assert sorted(pushed) == (["last-checkpoint"] if strategy == "checkpoint" else steps)
    for checkpoint in pushed.values():
        assert manifest_problems(checkpoint) == []
        assert {t.dtype for t in load_file(checkpoint / "model.safetensors").values()} == {torch.float32}
    assert not list(folder.rglob("training_args.bin")) and not list((tmp_path / "drafter").glob("_*"))


@pytest.mark.parametrize("fault", ["500", "linked_copy", "write_publishable"])
def test_a_push_that_fails_is_told_of_and_loses_nothing(hub, target, tmp_path, monkeypatch, caplog, fault):
    """Nor does a drafter that cannot be set aside, or a record of the training that cannot be written."""

    def full(*args):
        # As the tokenizers say it.
        raise Exception("No space left on device (os error 28)")

    said = {RUN, "500"} if fault == "500" else {"checkpoint-4", "No space left", "training.json"}
    if fault == "500":
        hub.fail["POST", "/commit/"] = 500
    else:
        monkeypatch.setattr(dflash_hf.publishing, fault, full)
        (tmp_path / "drafter" / "training.json.part").mkdir(parents=True)
    pushing(tmp_path, target, hub_strategy="checkpoint").train()
    assert all(word in caplog.text for word in said) and messages(hub, RUN) == []
    assert manifest_problems(tmp_path / "drafter" / "checkpoint-4") == []
    assert not list((tmp_path / "drafter").glob("_*"))


def test_hb1_push_to_hub_and_save_model_push_bf16_and_save_fp32(hub, target, tmp_path):
    trainer = pushing(tmp_path, target, hub_strategy="end", save_strategy="no")
    trainer.train()
    assert messages(hub, RUN) == []
    trainer.save_model()
    assert messages(hub, RUN) == ["Model save"] and trainer.hub_model_id == RUN
    assert DFlashDraftModel.from_pretrained(downloaded(hub, tmp_path / "pushed")).dtype == torch.bfloat16
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32} and trainer.model.dtype == torch.float32
    assert trainer.push_to_hub("Later", blocking=False).result().startswith(hub.url)
    assert not list((tmp_path / "drafter").glob("_*"))


@pytest.mark.parametrize("hinder", ["network", "token"])
def test_n8_a_push_that_cannot_be_is_refused_before_the_target_is_loaded(hub, tmp_path, monkeypatch, hinder):
    if hinder == "network":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    token = "hf_wrong" if hinder == "token" else "hf_writer"
    # This target could not be loaded.
    with pytest.raises(PublishError) as error:
        pushing(tmp_path, "no/target", drafter=tiny_drafter(dense_target()), hub_token=token)
    told = str(error.value)
    assert "push_to_hub" in told and "HF_TOKEN" in told and token not in told and "\n" not in told


def test_hb1_a_run_publishes_its_merged_adapter_and_tells_of_itself(hub, tmp_path, drafter, target):
    """The target is a local folder, of which nothing is told."""
    drafter.save_pretrained(tmp_path / "base")
    target.save_pretrained(tmp_path / "target")
    trainer = make_trainer(
        tmp_path / "run", tmp_path / "target", drafter=DFlashDraftModel.from_pretrained(tmp_path / "base"),
        peft_config=lora_config(2), max_steps=2, save_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    url = trainer.push_to_hub("Adapted", tag="v1", options=CardOptions(base_model="org/target"))
    assert "/me/run/commit/" in url and not list((tmp_path / "run").glob("_*"))
    files = remote(hub, "v1", "me/run")
    assert not {"adapter_model.safetensors", "optimizer.pt"} & files.keys()
    card = files["README.md"].decode()
    for told in ("org/target", "LoRA of rank 2, merged", "learning_rate: 0.01", "| 16, ", "2 steps"):
        assert told in card, told
    assert not [name for name, data in files.items() if str(tmp_path).encode() in data]
    pushed = load_file(downloaded(hub, tmp_path / "pushed", "me/run", "v1") / "model.safetensors")
    expected = plain_drafter(trainer.model).state_dict()
    assert all(torch.equal(p, expected[name].bfloat16()) for name, p in pushed.items())
    hub.fail["POST", "/commit/"] = 500
    with refused(PublishError, "me/run"):
        trainer.push_to_hub("Again", options=CardOptions(base_model="org/other"))
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_hb1_n12_offline_a_run_saves_and_writes_its_card(tmp_path, drafter, target, monkeypatch):
    """The Hub id of its target is unknown: the card names neither a path nor a placeholder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    target.save_pretrained(tmp_path / "target")
    arguments = {"drafter": copy.deepcopy(drafter), "max_steps": 1, "save_strategy": "no"}
    trainer = make_trainer(tmp_path / "run", tmp_path / "target", **arguments)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    text = (tmp_path / "run" / "README.md").read_text()
    card = huggingface_hub.ModelCard(text)
    assert card.data.base_model is None and str(tmp_path) not in text and "TARGET" not in text
    assert {"dflash", "speculative-decoding"} <= set(card.data.tags)


# --- Secrets, and what comes over the network.

PLANTED = {name: f"{name}-planted" for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")}


@pytest.fixture
def mirror():
    system = fsspec.filesystem("memory")
    yield "memory://mirror"
    system.rm("/mirror", recursive=True)


def test_planted_secrets_are_in_no_file_no_log_and_no_push(hub, target, tmp_path, monkeypatch, caplog, capfd, mirror):
    """Checkpoints, pickled arguments, records, cards, mirrored and pushed files, logs and what is printed."""
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    given = "hf_planted_as_argument"
    hub.users, hub.writers = {given: "me"}, {given: {"me"}}
    caplog.set_level("DEBUG", logger="dflash_hf")
    trainer = pushing(
        tmp_path, target, hub_token=given, hub_strategy="all_checkpoints", hub_always_push=True, max_steps=2,
        save_steps=1, remote_checkpoint_dir=mirror, eval_dataset=make_documents(1),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    hub.fail["POST", "/commit/"] = 500
    with refused(PublishError, RUN):
        trainer.push_to_hub(options=CardOptions(base_model="org/other"))
    system = fsspec.filesystem("memory")
    texts = {path: system.cat_file(path) for path in system.find("/mirror")} | contents(tmp_path)
    texts |= {f"pushed {name}": data for name, data in remote(hub, repo_id=RUN).items()}
    printed = capfd.readouterr()
    texts["printed"] = (caplog.text + printed.out + printed.err + trainer.args.to_json_string()).encode()
    names = {os.path.basename(name) for name in texts}
    assert {"training_args.bin", "dflash_run.json", "pushed README.md", MANIFEST_NAME, "trainer_state.json"} <= names
    for name, text in texts.items():
        assert not [value for value in (*PLANTED.values(), given) if value.encode() in text], name


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
    with pytest.raises(pickle.UnpicklingError):
        make_trainer(tmp_path / "run", target, max_steps=4).train(resume_from_checkpoint=f"{mirror}/checkpoint-2")
    assert not (tmp_path / "executed").exists()


# --- The command.


@pytest.fixture
def run(drafter, tmp_path, monkeypatch):
    """The folder of a run: a drafter, its results, and what is not published."""
    monkeypatch.chdir(tmp_path)
    drafter.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "results.json").write_text(json.dumps(RESULTS))
    (tmp_path / "run" / "optimizer.pt").write_bytes(b"large")
    (tmp_path / "run" / "curve.png").write_bytes(b"x")
    return tmp_path / "run"


@pytest.fixture
def adapter(run, tmp_path):
    """A new adapter, which changes nothing, of the drafter in that folder."""
    add_adapter(DFlashDraftModel.from_pretrained(run), lora_config(2)).save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def test_dflash_hf_publish_shows_what_it_would_send_and_sends_it(hub, run, capsys):
    words = ["--drafter", str(run), "--repo_id", REPO, "--base_model", "org/target"]
    main([*words, "--dry_run", "true", "--limits", "A limit.", "--fp32", "true", "--output_dir", "kept"])
    shown = capsys.readouterr().out
    sizes = dict(line.rsplit(None, 2)[:2] for line in shown.splitlines() if line.endswith(" kB"))
    assert 150 < float(sizes["model.safetensors"]) < 170 < float(sizes["fp32/model.safetensors"])
    assert "| chats it was trained on | 3 | 2.50 |" in shown and "- A limit." in shown and "![curve]" in shown
    assert not hub.calls and (run.parent / "kept" / "README.md").is_file()
    main([*words, "--private", "true", "--tag", "v1", "--commit_message", "Mine", "--revision", "try"])
    assert "Published: " in capsys.readouterr().out
    repository = hub.repositories[REPO]
    assert messages(hub) == ["Mine"] and repository.private and repository.tags["v1"] == repository.branches["try"]
    files = repository.tree("v1")
    assert "optimizer.pt" not in files and json.loads(files["results.json"]) == RESULTS and "curve.png" in files


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "401"),
        (["--base", "run"], "base"),
        (["--adapted_from", "run"], "adapted_from"),
        (["--base_model", "https://huggingface.co/org/target"], "OWNER/NAME"),
        (["--base_model", REPO], REPO),
        (["--license", "Apache 2.0"], "Apache 2.0"),
        (["--languages", "en", "English"], "English"),
        (["--drafter", "output"], "output/checkpoint-10"),
        (["--results", "nowhere.json"], "nowhere.json"),
    ],
)
def test_n12_what_fails_is_said_in_one_line(hub, run, tmp_path, monkeypatch, words, said):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for step in (9, 10):
        shutil.copytree(run, tmp_path / "output" / f"checkpoint-{step}")
    with refused(SystemExit, said):
        main(["--drafter", str(run), "--repo_id", REPO, *words])
    assert not hub.repositories


def test_an_adapter_whose_base_has_moved_is_published_by_naming_it(run, adapter, tmp_path, capsys, monkeypatch):
    expected = DFlashDraftModel.from_pretrained(run).bfloat16().state_dict()
    shutil.move(run, tmp_path / "moved")
    write_facts({"format": 1, "adapter": {"default": {"r": 2, "type": "LORA"}}, "recipe": {}}, adapter)
    words = ["--drafter", str(adapter), "--repo_id", REPO, "--dry_run", "true"]
    with refused(SystemExit, run, "--base"):
        main(words)
    words += ["--base", str(tmp_path / "moved")]
    # Without the name of the first drafter the card still says that there was one.
    main([*words, "--output_dir", "out"])
    assert "adapted from a drafter that" in capsys.readouterr().out
    merged = load_file("out/model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())
    main([*words, "--adapted_from", "org/first-DFlash"])
    shown = capsys.readouterr().out
    assert "adapted from [org/first-DFlash](https://hugging" in shown and str(tmp_path) not in shown
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "dflash_hf.adapters")
    with refused(SystemExit, "peft", "pip install"):
        main(words)
