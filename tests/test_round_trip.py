# SPDX-License-Identifier: Apache-2.0
"""A published drafter is read, and what is written is the same: the fields that readers use, the bytes of tensors."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from published import GPT_OSS_20B, NESTED, PUBLISHED, QWEN3_8B, QWEN36_27B, SLIDING, inputs_for, small, write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen3Config

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.checkpoint_files import fetch_checkpoint


# Names the files that a repository ships, and who wrote them: no reader computes with these.
NOT_READ = {"auto_map", "transformers_version"}


def read_json(folder):
    return json.loads((folder / "config.json").read_text())


def raw_tensors(folder):
    """Every tensor of a folder as (dtype, shape, bytes)."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            flat = tensor.contiguous().view(torch.uint8).flatten()
            tensors[name] = (tensor.dtype, tuple(tensor.shape), bytes(flat.tolist()))
    return tensors


@pytest.mark.parametrize("name", PUBLISHED)
def test_md6_a_published_folder_is_saved_as_it_was_read(tmp_path, name):
    config = small(PUBLISHED[name])
    source = write_folder(tmp_path / "published", config)
    DFlashDraftModel.from_pretrained(source).save_pretrained(tmp_path / "saved")
    saved = read_json(tmp_path / "saved")
    for field, value in config.items():
        if field == "dflash_config":
            assert value.items() <= saved[field].items()
        elif field == "torch_dtype":
            assert saved["dtype"] == value
        elif field not in NOT_READ:
            assert saved[field] == value, field
    assert raw_tensors(tmp_path / "saved") == raw_tensors(source)
    DFlashDraftModel.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "again")
    for path in (tmp_path / "saved").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize("name", PUBLISHED)
def test_md6_both_spellings_are_written_in_full(tmp_path, name):
    config = DFlashDraftConfig.from_dict(copy.deepcopy(PUBLISHED[name]))
    config.save_pretrained(tmp_path)
    saved = read_json(tmp_path)
    theta = PUBLISHED[name].get("rope_theta") or PUBLISHED[name]["rope_parameters"]["rope_theta"]
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == theta
    assert saved["block_size"] == saved["dflash_config"]["block_size"]
    assert saved["architectures"] == ["DFlashDraftModel"]
    assert "_name_or_path" not in saved
    own = {"num_target_layers", "dflash_config"}
    assert saved.keys() >= set(Qwen3Config().to_dict()) & set(QWEN36_27B) | own
    assert DFlashDraftConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_parameters"),
    [("qwen3.6-27b", 58, 1_730_213_120), ("six_layers_eight_taps", 69, None), ("gpt-oss-20b", 123, None)],
)
def test_full_size_on_the_meta_device(name, num_tensors, num_parameters):
    with torch.device("meta"):
        drafter = DFlashDraftModel(DFlashDraftConfig.from_dict(copy.deepcopy(PUBLISHED[name])))
    assert len(drafter.state_dict()) == num_tensors
    assert num_parameters is None or drafter.num_parameters() == num_parameters
    assert len(DFlashDraftModel(DFlashDraftConfig.from_dict(small(PUBLISHED[name]))).state_dict()) == num_tensors


def test_a_foreign_model_type_is_kept_and_its_rope_written_in_full(tmp_path, caplog):
    source = write_folder(tmp_path / "published", small(GPT_OSS_20B))
    drafter = DFlashDraftModel.from_pretrained(source)
    assert drafter.layers[0].self_attn.o_proj.bias is not None
    drafter.save_pretrained(tmp_path / "saved")
    saved = read_json(tmp_path / "saved")
    assert (saved["model_type"], saved["rope_scaling"]) == ("gpt_oss", {"rope_type": "default"})
    assert not caplog.records
    expected = 150000 ** -(torch.arange(0, 8, 2).float() / 8)
    torch.testing.assert_close(drafter.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_md6_scaled_rope_survives_in_both_spellings(tmp_path, model_type):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = small(QWEN36_27B, model_type=model_type, rope_scaling=scaling)
    drafter = DFlashDraftModel(DFlashDraftConfig.from_dict(config))
    plain = DFlashDraftModel(DFlashDraftConfig.from_dict(small(QWEN36_27B)))
    assert not torch.allclose(drafter.rotary_emb.inv_freq, plain.rotary_emb.inv_freq)
    drafter.save_pretrained(tmp_path)
    saved = read_json(tmp_path)
    assert saved["rope_scaling"] == scaling
    assert saved["rope_parameters"] == {**scaling, "rope_theta": 10000000}
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)


def test_md6_the_frequencies_of_a_bf16_folder_are_those_of_fp32(tmp_path):
    source = write_folder(tmp_path, small(QWEN36_27B))
    expected = DFlashDraftModel(DFlashDraftConfig.from_dict(small(QWEN36_27B))).rotary_emb.inv_freq
    for kwargs in ({}, {"dtype": torch.float32}, {"dtype": "bfloat16"}, {"device_map": "cpu"}):
        loaded = DFlashDraftModel.from_pretrained(source, **kwargs)
        assert loaded.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(loaded.rotary_emb.inv_freq, expected)


SPELLINGS = {
    "flat_4.57": {},
    "torch_dtype": {"dtype": None, "torch_dtype": "bfloat16"},
    "transformers_5": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000}},
    "both": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000000}, "torch_dtype": "torch.bfloat16"},
    "nested": {"block_size": None, "dflash_config": {**QWEN36_27B["dflash_config"], "block_size": 16}},
    "flat_taps": {"dflash_config": None, **QWEN36_27B["dflash_config"]},
    "old_rope_key": {"rope_scaling": {"type": "default"}},
}


@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_is_read_alike(changes):
    raw = {name: value for name, value in {**QWEN36_27B, **changes}.items() if value is not None}
    given = copy.deepcopy(raw)
    config = DFlashDraftConfig.from_dict(raw)
    assert raw == given
    expected = DFlashDraftConfig.from_dict(QWEN36_27B)
    assert config == expected
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("layer_types", "is_causal", "written"),
    [
        ([SLIDING] * 5, True, None),
        ([SLIDING] * 5, False, False),
        ([SLIDING] * 4 + ["full_attention"], True, True),
        ([SLIDING] * 4 + ["full_attention"], False, False),
        (["full_attention"] * 5, False, None),
        (["full_attention"] * 5, None, None),
    ],
)
def test_causality_is_written_where_it_differs_from_the_layers_own(layer_types, is_causal, written):
    config = DFlashDraftConfig.from_dict({**QWEN36_27B, "layer_types": layer_types, "is_causal": is_causal})
    saved = config.to_dict()
    assert saved.get("is_causal") is written
    again = DFlashDraftConfig.from_dict(saved)
    assert [again.layer_is_causal(i) for i in range(5)] == [config.layer_is_causal(i) for i in range(5)]


def test_unknown_fields_are_kept():
    config = DFlashDraftConfig.from_dict({**NESTED, "trained_on": {"tokens": 3}})
    saved = config.to_dict()
    assert saved["trained_on"] == {"tokens": 3}
    assert saved["dflash_config"]["name"] == "drafter"
    assert saved["auto_map"] == QWEN36_27B["auto_map"]


def test_the_cache_is_not_written_off_after_a_trainer_switched_it_off():
    config = DFlashDraftConfig.from_dict(QWEN36_27B)
    config.use_cache = False
    assert config.to_dict()["use_cache"] is True


# Saving


def drafter_of(config=QWEN3_8B):
    torch.manual_seed(0)
    return DFlashDraftModel(DFlashDraftConfig.from_dict(small(config)))


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16, torch.float16])
def test_t5_the_dtype_asked_for_is_written_and_the_drafter_left_alone(tmp_path, held, asked):
    drafter = drafter_of().to(held)
    before = copy.deepcopy(drafter.state_dict())
    drafter.save_pretrained(tmp_path, dtype=asked)
    written = asked or held
    assert {dtype for dtype, _, _ in raw_tensors(tmp_path).values()} == {written}
    assert read_json(tmp_path)["dtype"] == str(written).removeprefix("torch.")
    assert drafter.dtype == held
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(load_file(tmp_path / "model.safetensors")[name], tensor.to(written))
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.dtype == loaded.config.dtype == written
    assert DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_t5_tensors_are_loaded_as_stored_whatever_the_configuration_says(tmp_path):
    write_folder(tmp_path, small(QWEN3_8B, dtype="float32"))
    config = {**read_json(tmp_path), "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.dtype == loaded.config.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bfloat16", True])
def test_no_other_dtype_is_written(tmp_path, dtype):
    with pytest.raises(ValueError, match="dtype is"):
        drafter_of().save_pretrained(tmp_path, dtype=dtype)
    assert not list(tmp_path.iterdir())


def wrapped_layer():
    drafter = drafter_of()
    drafter.layers[1] = torch.compile(drafter.layers[1])
    return drafter, None


WRAPPED = {
    "compiled": lambda: (torch.compile(drafter_of()), None),
    "compiled_as_the_trainer_saves_it": lambda: (drafter_of(), torch.compile(drafter_of()).state_dict()),
    "data_parallel": lambda: (drafter_of(), torch.nn.DataParallel(drafter_of()).state_dict()),
    "compiled_layer": wrapped_layer,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapper_leaves_no_prefix(tmp_path, wrap):
    drafter, state_dict = wrap()
    names = drafter.state_dict() if state_dict is None else state_dict
    assert any("_orig_mod." in name or name.startswith("module.") for name in names)
    drafter.save_pretrained(tmp_path, state_dict=state_dict)
    for name, tensor in drafter_of().state_dict().items():
        assert torch.equal(load_file(tmp_path / "model.safetensors")[name], tensor)
    assert len(load_file(tmp_path / "model.safetensors")) == 58


def test_nothing_but_the_expected_tensors_is_saved(tmp_path):
    drafter = drafter_of()
    state_dict = drafter.state_dict()
    del state_dict["norm.weight"]
    with pytest.raises(ValueError, match=r"norm.weight is missing"):
        drafter.save_pretrained(tmp_path, state_dict=state_dict)
    drafter.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"extra.weight is not a tensor of this configuration"):
        drafter.save_pretrained(tmp_path)
    del drafter.extra
    drafter.norm.to(torch.bfloat16)
    with pytest.raises(ValueError, match="different dtypes"):
        drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    drafter.save_pretrained(tmp_path, dtype=torch.bfloat16)


def test_shards_are_read_back(tmp_path):
    drafter = drafter_of()
    drafter.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_c2_a_checkpoint_loads_into_a_drafter_as_the_trainer_resumes(tmp_path):
    """Resuming and loading the best model read the file and load it without a prefix, key by key."""
    trained = drafter_of()
    with torch.no_grad():
        trained.fc.weight.add_(1e-7)
    trained.save_pretrained(tmp_path)
    drafter = drafter_of()
    result = drafter.load_state_dict(load_file(tmp_path / "model.safetensors"), False)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(drafter.fc.weight, trained.fc.weight)


# Loading


def test_a_state_dict_and_a_configuration_of_the_users_own(tmp_path):
    drafter = drafter_of()
    loaded = DFlashDraftModel.from_pretrained(None, config=drafter.config, state_dict=drafter.state_dict())
    inputs = inputs_for(small(QWEN3_8B))
    assert torch.equal(loaded(**inputs).last_hidden_state, drafter.eval()(**inputs).last_hidden_state)
    state_dict = drafter.state_dict()
    state_dict["model.fc.weight"] = state_dict.pop("fc.weight")
    with pytest.raises(ValueError, match=r'fc.weight has the prefix "model."'):
        DFlashDraftModel.from_pretrained(None, config=drafter.config, state_dict=state_dict)
    drafter.save_pretrained(tmp_path)
    other = DFlashDraftConfig.from_dict({**drafter.config.to_dict(), "rms_norm_eps": 1e-5})
    assert DFlashDraftModel.from_pretrained(tmp_path, config=other).config.rms_norm_eps == 1e-5
    with pytest.raises(ValueError, match=r"fc.weight has shape \[32, 160\].*\[32, 96\]"):
        DFlashDraftModel.from_pretrained(tmp_path, target_layer_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="mask_token_id=151645 equals the eos"):
        DFlashDraftModel.from_pretrained(tmp_path, mask_token_id=151645)


def test_overrides_and_the_loading_report(tmp_path):
    write_folder(tmp_path, small(QWEN36_27B))
    loaded, info = DFlashDraftModel.from_pretrained(
        tmp_path, attn_implementation="eager", is_causal=True, output_loading_info=True
    )
    assert loaded.config._attn_implementation == "eager"
    assert loaded.layers[4].self_attn.is_causal is True
    assert not info["missing_keys"]
    with pytest.raises(ValueError, match="leave out key_mapping"):
        DFlashDraftModel.from_pretrained(tmp_path, key_mapping={"^norm": "hidden_norm"})


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
    with pytest.raises(ValueError, match=r"z-lab/Drafter is not a drafter.*\n.*norm.weight is missing"):
        DFlashDraftModel.from_pretrained("z-lab/Drafter", **kwargs)


@pytest.mark.parametrize("subfolder", ["", "drafter"])
def test_all_that_engines_would_read_is_downloaded_and_no_more(tmp_path, monkeypatch, subfolder):
    repository = write_folder(tmp_path / "hub" / subfolder, small(QWEN36_27B))
    for name in (
        "mask_embedding.pt",
        "extra.safetensors",
        "model.safetensors.index.json",
        "dflash.py",
        "optimizer.pt",
    ):
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
    fetched = {"config.json", "model.safetensors", "extra.safetensors", "model.safetensors.index.json"}
    assert {path.name for path in folder.iterdir()} == fetched | {"mask_embedding.pt"}


@pytest.mark.parametrize("path", ["/nowhere/drafter", "z-lab/Nothing"])
def test_what_is_not_there_is_an_os_error(tmp_path, path):
    with pytest.raises(OSError):
        DFlashDraftModel.from_pretrained(path, cache_dir=str(tmp_path), local_files_only=True)


# Publishing


@pytest.fixture
def uploads(monkeypatch):
    """Commits to the Hub, as the files they would carry at the time of the call."""
    commits = []

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": repo_id})

        def create_commit(self, repo_id, operations, **kwargs):
            commits.append({o.path_in_repo: Path(o.path_or_fileobj).read_bytes() for o in operations})

    monkeypatch.setattr("transformers.utils.hub.hf_api", Api)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", Api)
    card = type("Card", (), {"save": lambda self, path: Path(path).write_text("card")})
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *args, **kwargs: card())
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", lambda *args, **kwargs: card())
    return commits


@pytest.mark.parametrize(
    ("kwargs", "dtype"), [({}, "bfloat16"), ({"dtype": torch.float16}, "float16"), ({"dtype": None}, "float32")]
)
def test_c2_pushing_uploads_one_finished_folder_in_bf16_by_default(tmp_path, monkeypatch, kwargs, dtype):
    drafter, files = drafter_of(), {}
    monkeypatch.setattr(
        "dflash_hf.publishing.publish",
        lambda publication, **kwargs: files.update({p.name: p.read_bytes() for p in publication.folder.iterdir()}),
    )
    drafter.push_to_hub("me/drafter", **kwargs)
    assert json.loads(files["config.json"])["dtype"] == dtype
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    assert {str(d) for d, _, _ in raw_tensors(tmp_path).values()} == {f"torch.{dtype}"}
    assert {"modeling_dflash.py", "configuration_dflash.py"} <= files.keys()
    assert drafter.dtype == torch.float32


def test_c2_saving_with_a_push_uploads_what_was_written(tmp_path, uploads):
    drafter_of().save_pretrained(tmp_path, dtype=torch.bfloat16, push_to_hub=True, repo_id="me/drafter")
    (files,) = uploads
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    assert files["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()


def test_an_index_of_an_earlier_sharded_save_does_not_stay(tmp_path):
    drafter = DFlashDraftModel.from_pretrained(write_folder(tmp_path / "published", small(QWEN3_8B)))
    drafter.save_pretrained(tmp_path / "saved", max_shard_size=1000)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    drafter.save_pretrained(tmp_path / "saved")
    again = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


def test_a_configuration_that_was_made_wrong_is_not_saved(tmp_path):
    drafter = DFlashDraftModel.from_pretrained(write_folder(tmp_path / "published", small(QWEN3_8B)))
    drafter.config.mask_token_id = 10**6
    with pytest.raises(ValueError, match="mask_token_id=1000000 is outside"):
        drafter.save_pretrained(tmp_path / "saved")
