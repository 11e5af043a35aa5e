# SPDX-License-Identifier: Apache-2.0
"""Publishing over HTTP to a Hub on loopback, and what the repository holds."""

import copy
import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import HubServer, Repository
from runs import make_trainer
from safetensors.torch import load_file
from tiny import MASK_TOKEN_ID, dense_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, validate_checkpoint
from dflash_hf.adapters import lora_config
from dflash_hf.adapting import plain_drafter
from dflash_hf.model_card import CardOptions
from dflash_hf.publishing import PublishError, build_repository, publish, without_local_paths


REPO = "me/tiny-DFlash"
RESULTS = {
    "seen": {
        "after": {
            "acceptance_length": 2.5,
            "num_prompts": 3,
            "max_new_tokens": 16,
            "slot_acceptance": [0.7, 0.5, 0.3],
            "prompts": [],
        },
        "after_interval": [2.0, 3.0],
    }
}


@pytest.fixture(scope="module")
def drafter():
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        dense_target().config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=4
    )
    return DFlashDraftModel(config).eval()


@pytest.fixture(scope="module")
def publication(drafter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("publication")
    results = RESULTS | {"settings": {"drafters": [str(folder)], "output": "/somewhere/else"}}
    options = CardOptions(base_model="org/target", license="apache-2.0", languages=["en"])
    return build_repository(drafter, folder, REPO, results=results, options=options, fp32=True)


@pytest.fixture
def hub(monkeypatch, tmp_path):
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


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def remote(hub, revision="main"):
    return {name: data for name, data in hub.repositories[REPO].tree(revision).items() if name != ".gitattributes"}


def test_a_repository_holds_what_users_need_and_nothing_else(publication, drafter, tmp_path):
    files = publication.files
    code = {name for name in files if name.endswith(".py") and "/" not in name}
    assert "modeling_dflash.py" in code
    others = {"README.md", "config.json", "model.safetensors", "results.json", "acceptance.png"}
    assert {name for name in files if not name.startswith("fp32/")} == code | others
    weights = load_file(publication.folder / "model.safetensors")
    assert all(torch.equal(weights[name], p.bfloat16()) for name, p in drafter.state_dict().items())
    masters = load_file(publication.folder / "fp32" / "model.safetensors")
    assert all(torch.equal(masters[name], p) for name, p in drafter.state_dict().items())
    assert publication.report.ok and "in all" in str(publication)
    for name, data in contents(publication.folder).items():
        assert str(publication.folder.parent).encode() not in data and b"/somewhere" not in data, name


def test_hb1_push_then_load_in_a_fresh_process_by_this_package_and_by_dflash(hub, publication, drafter, tmp_path):
    url = publish(publication, private=True, commit_message="First drafter", tag="v1")
    assert url.startswith(hub.url) and hub.repositories[REPO].private
    assert remote(hub) == remote(hub, "v1") == contents(publication.folder)
    assert [message for _, message, _ in hub.repositories[REPO].commits] == ["initial commit", "First drafter"]
    program = f"""
import torch
from dflash.model import DFlashDraftModel as Published
import dflash_hf
drafter = dflash_hf.DFlashDraftModel.from_pretrained("{REPO}", revision="v1")
other = Published.from_pretrained("{REPO}", dtype=torch.bfloat16)
ours, theirs = drafter.state_dict(), other.state_dict()
assert ours.keys() <= theirs.keys(), ours.keys() - theirs.keys()
assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
assert drafter.dtype == torch.bfloat16 and drafter.config.block_size == other.block_size == 4
print("sum", sum(t.double().sum().item() for t in ours.values()))
assert dflash_hf.validate_checkpoint("{REPO}").ok
"""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_writer", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    expected = sum(p.bfloat16().double().sum().item() for p in drafter.state_dict().values())
    assert float(done.stdout.split()[-1]) == pytest.approx(expected)


@pytest.mark.parametrize("break_off", ["cut", 500])
def test_an_interrupted_push_shows_nothing_and_is_resumed(hub, publication, break_off):
    before = contents(publication.folder)
    hub.fail["PUT", f"/{digest(publication, 'model.safetensors')}"] = break_off
    with pytest.raises(PublishError, match=r"was not sent \(sending the files\).*Run the same again"):
        publish(publication)
    assert remote(hub) == {} and contents(publication.folder) == before
    arrived = set(hub.repositories[REPO].blobs)
    assert arrived == {digest(publication, name) for name in ("acceptance.png", "fp32/model.safetensors")}
    hub.fail.clear()
    hub.calls.clear()
    publish(publication)
    assert remote(hub) == before
    # Only what was missing travelled.
    assert hub.count("PUT", "/lfs/") == 1
    # And once all is there, nothing changes: no commit, no upload.
    hub.calls.clear()
    publish(publication)
    assert hub.count("PUT", "/lfs/") == 0 and len(hub.repositories[REPO].commits) == 2


def digest(publication, name: str) -> str:
    return hashlib.sha256((publication.folder / name).read_bytes()).hexdigest()


def test_a_server_error_at_the_commit_shows_nothing(hub, publication):
    hub.fail["POST", "/commit/main"] = 500
    with pytest.raises(PublishError, match="Others see all files of a commit or none, and nothing here has changed"):
        publish(publication)
    assert remote(hub) == {} and len(hub.repositories[REPO].commits) == 1


@pytest.mark.parametrize(
    ("token", "message"),
    [("hf_wrong", "does not accept the access token.*HF_TOKEN"), ("hf_reader", "may not write to me/tiny-DFlash")],
)
def test_a_token_that_does_not_do_is_said_before_anything_is_sent(hub, publication, monkeypatch, token, message):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PublishError, match=message) as error:
        publish(publication)
    assert token not in str(error.value)
    assert not hub.repositories and hub.count("PUT", "") == 0


def test_names_that_are_taken(hub, publication):
    hub.repositories[REPO] = other = Repository()
    other.commit("main", "something else", {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'})
    with pytest.raises(PublishError, match="taken: the repository holds a LlamaForCausalLM, no drafter"):
        publish(publication)
    assert len(other.commits) == 1
    # Another one's private repository is not there for this token until it tries to make it.
    hub.writers = {"hf_writer": {"me"}}
    hub.repositories["team/drafter"] = Repository(private=True)
    foreign = type(publication)(publication.folder, "team/drafter", publication.report)
    with pytest.raises(PublishError, match="team/drafter"):
        publish(foreign)


def test_updates_replace_old_weights_and_keep_what_is_not_theirs(hub, publication):
    publish(publication, commit_message="first")
    repository = hub.repositories[REPO]
    tree = {**repository.tree(), "model-00001-of-00002.safetensors": b"old", "NOTES.md": b"mine", "README.md": b"mine"}
    repository.commit("main", "by hand", tree)
    publish(publication, commit_message="second", keep_card=True)
    assert "model-00001-of-00002.safetensors" not in remote(hub)
    assert remote(hub)["NOTES.md"] == remote(hub)["README.md"] == b"mine"
    with pytest.raises(PublishError, match="there and public, and private=True was asked"):
        publish(publication, private=True)
    publish(publication, revision="experiment", tag="v2")
    assert remote(hub)["README.md"] == b"mine" and remote(hub, "experiment")["README.md"] != b"mine"
    assert repository.tags["v2"] == repository.branches["experiment"]
    with pytest.raises(PublishError, match="has a tag v2 already"):
        publish(publication, tag="v2")


def test_what_cannot_be_published_is_refused_before_the_network(drafter, tmp_path):
    with pytest.raises(ValueError, match="has no owner"):
        build_repository(drafter, tmp_path / "a", "tiny")
    with pytest.raises(ValueError, match="no name of a repository"):
        build_repository(drafter, tmp_path / "a", "me/ti ny")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "optimizer.pt").touch()
    with pytest.raises(ValueError, match="not empty, and all that is in it would be published"):
        build_repository(drafter, tmp_path / "full", REPO)
    with pytest.raises(ValueError, match="no repository of the Hub but a local path"):
        build_repository(drafter, tmp_path / "b", REPO, options=CardOptions(base_model="./target"))
    broken = json.loads((build_repository(drafter, tmp_path / "c", REPO).folder / "config.json").read_text())
    assert validate_checkpoint(tmp_path / "c").ok and "_name_or_path" not in broken


def test_what_a_server_would_not_load_is_not_sent(drafter, tmp_path, monkeypatch):
    original = DFlashDraftModel.save_pretrained

    def save_without_architectures(self, folder, **kwargs):
        original(self, folder, **kwargs)
        config = json.loads((Path(folder) / "config.json").read_text())
        del config["architectures"]
        (Path(folder) / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(DFlashDraftModel, "save_pretrained", save_without_architectures)
    with pytest.raises(ValueError, match=r"(?s)is not sent, since not every reader would load it.*ERROR for vLLM"):
        build_repository(drafter, tmp_path / "repository", REPO)


def test_local_paths_are_cut_to_their_last_part(tmp_path):
    value = {
        "target": str(tmp_path),
        "text": "either/or",
        "id": "org/model",
        f"{tmp_path}/x": ["./a/b", "~/c"],
        "n": 1,
    }
    cut = {"target": tmp_path.name, "text": "either/or", "id": "org/model", "x": ["b", "c"], "n": 1}
    assert without_local_paths(value) == cut


def test_hb1_a_run_publishes_its_merged_adapter_and_tells_of_itself(hub, tmp_path, drafter):
    """The target is a local folder, of which nothing is told."""
    drafter.save_pretrained(tmp_path / "base")
    dense_target().save_pretrained(tmp_path / "target")
    trainer = make_trainer(
        tmp_path / "run",
        tmp_path / "target",
        drafter=DFlashDraftModel.from_pretrained(tmp_path / "base"),
        peft_config=lora_config(2),
        max_steps=2,
        save_strategy="no",
        learning_rate=1e-2,
    )
    trainer.train()
    trainer.save_model()
    options = CardOptions(base_model="org/target")
    url = trainer.push_to_hub("Adapted", tag="v1", options=options)
    assert "/me/run/commit/" in url and not list((tmp_path / "run").glob("_*"))
    files = hub.repositories["me/run"].tree("v1")
    assert "adapter_model.safetensors" not in files and not [name for name in files if "optimizer" in name]
    card = files["README.md"].decode()
    for told in (
        "org/target",
        "LoRA of rank 2, merged",
        "learning_rate: 0.01",
        "16, taken for the target's own answers",
        "2 steps",
    ):
        assert told in card
    assert not [name for name, data in files.items() if str(tmp_path).encode() in data]
    (tmp_path / "pushed").mkdir()
    for name, data in files.items():
        (tmp_path / "pushed" / name).write_bytes(data)
    pushed = DFlashDraftModel.from_pretrained(tmp_path / "pushed", dtype=torch.float32)
    expected = plain_drafter(trainer.model).state_dict()
    assert all(torch.equal(p, expected[name].bfloat16().float()) for name, p in pushed.state_dict().items())
    hub.fail["POST", "/commit/"] = 500
    with pytest.raises(PublishError, match="Run the same again"):
        trainer.push_to_hub("Again", options=CardOptions(base_model="org/other"))
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_hb1_offline_a_run_saves_and_writes_its_card(tmp_path, drafter, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    dense_target().save_pretrained(tmp_path / "target")
    trainer = make_trainer(
        tmp_path / "run", tmp_path / "target", drafter=copy.deepcopy(drafter), max_steps=1, save_strategy="no"
    )
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    text = (tmp_path / "run" / "README.md").read_text()
    card = huggingface_hub.ModelCard(text)
    assert card.data.base_model is None and str(tmp_path) not in text and "`TARGET` is the target" in text
    assert {"dflash", "speculative-decoding"} <= set(card.data.tags)


def test_the_recipe_shows_what_it_would_send_and_sends_it(hub, tmp_path, drafter, monkeypatch, capsys):
    drafter.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "results.json").write_text(json.dumps(RESULTS))
    (tmp_path / "run" / "optimizer.pt").write_bytes(b"large")
    words = ["publish.py", "--drafter", str(tmp_path / "run"), "--repo_id", REPO, "--base_model", "org/target"]
    monkeypatch.setattr(sys, "argv", [*words, "--dry_run", "true"])
    main = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "publish.py"))["main"]
    main()
    shown = capsys.readouterr().out
    sizes = dict(line.rsplit(None, 2)[:2] for line in shown.splitlines() if line.endswith(" kB"))
    assert 150 < float(sizes["model.safetensors"]) < 170 and "| chats it was trained on | 3 | 2.50 |" in shown
    assert "Nothing was sent" in shown and not hub.calls
    monkeypatch.setattr(sys, "argv", [*words, "--private", "true", "--tag", "v1"])
    main()
    assert "Published: " in capsys.readouterr().out
    assert "optimizer.pt" not in remote(hub) and json.loads(remote(hub)["results.json"]) == RESULTS
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SystemExit, match=r"error: me/tiny-DFlash was not sent.*does not accept the access token"):
        main()
