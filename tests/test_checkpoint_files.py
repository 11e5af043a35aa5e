# SPDX-License-Identifier: Apache-2.0
"""Where the files of a drafter lie, what their headers say, and files that are broken or disagree."""

import json
import shutil

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from published import FULL, QWEN3_8B, QWEN36_27B, small, small_tensors, write_folder
from safetensors.torch import load_file, save_file
from tiny import refused
from transformers import AutoModel

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.checkpoint_files import fetch_checkpoint, read_tensor_headers, state_dict_headers
from dflash_hf.checkpoint_format import checkpoint_problems


SMALL = small(QWEN3_8B, num_hidden_layers=2, layer_types=[FULL] * 2)


def not_loaded(folder, *names):
    """None of the ways to load takes the folder, and each says these names."""
    assert any(all(name in problem for name in names) for problem in checkpoint_problems(folder))
    for load in (DFlashDraftModel.from_pretrained, AutoModel.from_pretrained):
        with refused(ValueError, *names):
            load(folder)


@pytest.mark.parametrize("subfolder", ["", "drafter"])
def test_all_that_engines_would_read_is_downloaded_and_no_more(tmp_path, monkeypatch, subfolder):
    repository = write_folder(tmp_path / "hub" / subfolder, SMALL)
    wanted = {"config.json", "model.safetensors", "extra.safetensors", "model.safetensors.index.json"}
    wanted |= {"mask_embedding.pt"}
    for name in (wanted | {"dflash.py", "optimizer.pt"}) - {"config.json", "model.safetensors"}:
        (repository / name).write_text("{}")

    def download(repo_id, allow_patterns, **kwargs):
        assert (repo_id, kwargs) == ("z-lab/Drafter", {"revision": "b16"})
        files = [str(f.relative_to(tmp_path / "hub")) for f in (tmp_path / "hub").rglob("*") if f.is_file()]
        for name in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "hub" / name, tmp_path / "cache" / name)
        return str(tmp_path / "cache")

    monkeypatch.setattr("dflash_hf.checkpoint_files.snapshot_download", download)
    folder = fetch_checkpoint("z-lab/Drafter", subfolder, revision="b16")
    assert {path.name for path in folder.iterdir()} == wanted


@pytest.mark.parametrize("path", ["/nowhere/drafter", "z-lab/Nothing"])
def test_what_is_not_there_is_an_os_error(tmp_path, path):
    with refused(OSError, path):
        DFlashDraftModel.from_pretrained(path, cache_dir=str(tmp_path), local_files_only=True)


def test_headers_are_those_of_the_tensors_in_one_file_or_several(tmp_path):
    tensors = small_tensors(SMALL)
    write_folder(tmp_path / "one", SMALL, tensors)
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "one")
    drafter.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for headers in (read_tensor_headers(tmp_path / "one"), read_tensor_headers(tmp_path / "shards")):
        assert headers == state_dict_headers(tensors)
        assert headers == {name: ("BF16", tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    not_loaded(tmp_path, "safetensors")
    torch.save(small_tensors(SMALL), tmp_path / "pytorch_model.bin")
    not_loaded(tmp_path, "pytorch_model.bin")


@pytest.mark.parametrize("kept", [0, 5, 400, -1])
def test_a_broken_file_is_named(tmp_path, kept):
    path = write_folder(tmp_path, SMALL) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    not_loaded(tmp_path, "model.safetensors")


def leave_out_a_shard(folder, shards, index):
    shards[1].unlink()
    return shards[1].name, index.name


def leave_out_the_index(folder, shards, index):
    index.unlink()
    return shards[0].name, index.name


def leave_an_old_file(folder, shards, index):
    write_folder(folder / "old", small(QWEN3_8B, dtype="float32"))
    shutil.copy(folder / "old" / "model.safetensors", folder / "model.safetensors")
    return "model.safetensors", shards[0].name


def leave_an_old_index(folder, shards, index):
    write_folder(folder, small(QWEN3_8B, dtype="float32"))
    for shard in shards:
        shard.unlink()
    return (index.name,)


def name_another_shard(folder, shards, index):
    content = json.loads(index.read_text())
    content["weight_map"]["norm.weight"] = shards[0].name
    index.write_text(json.dumps(content))
    return index.name, "norm.weight", shards[0].name


def double_a_tensor(folder, shards, index):
    tensors, more = load_file(shards[0]), load_file(shards[1])
    save_file({**more, **dict(list(tensors.items())[:1])}, shards[1], metadata={"format": "pt"})
    return next(iter(tensors)), shards[0].name, shards[1].name


@pytest.mark.parametrize(
    "spoil",
    [
        *(leave_out_a_shard, leave_out_the_index, leave_an_old_file, leave_an_old_index),
        *(name_another_shard, double_a_tensor),
    ],
)
def test_shards_that_disagree_are_refused(tmp_path, spoil):
    DFlashDraftModel(DFlashDraftConfig.from_dict(small(QWEN3_8B))).save_pretrained(tmp_path, max_shard_size="60KB")
    names = spoil(tmp_path, sorted(tmp_path.glob("model-*.safetensors")), tmp_path / "model.safetensors.index.json")
    not_loaded(tmp_path, *names)


def hub_cache(root, config, subfolder=""):
    """A repository with one commit in a cache as the Hub's client lays it out."""
    repository, commit = root / "models--z-lab--Drafter", "a" * 40
    write_folder(repository / "snapshots" / commit / subfolder, config)
    for branch in ("main", "b16"):
        (repository / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    return {"cache_dir": str(root), "local_files_only": True}


@pytest.mark.parametrize("where", [{}, {"revision": "b16"}, {"revision": "a" * 40}, {"subfolder": "drafter"}])
def test_a_repository_on_the_hub_is_checked_and_loaded(tmp_path, monkeypatch, where):
    # AutoModel looks for an adapter without passing local_files_only on.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    kwargs = {**hub_cache(tmp_path, small(QWEN36_27B), where.get("subfolder", "")), **where}
    drafter = DFlashDraftModel.from_pretrained("z-lab/Drafter", **kwargs)
    assert drafter.name_or_path == "z-lab/Drafter"
    weights = next(tmp_path.rglob("model.safetensors"))
    tensors = load_file(weights)
    assert torch.equal(drafter.fc.weight, tensors["fc.weight"])
    assert type(AutoModel.from_pretrained("z-lab/Drafter", **kwargs)) is DFlashDraftModel
    del tensors["norm.weight"]
    save_file(tensors, weights)
    with refused(ValueError, "z-lab/Drafter", "norm.weight"):
        DFlashDraftModel.from_pretrained("z-lab/Drafter", **kwargs)
