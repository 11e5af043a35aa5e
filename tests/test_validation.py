# SPDX-License-Identifier: Apache-2.0
"""Every rule of the validator with an example that breaks it, the real readers beside them, and the command."""

import importlib
import json
import shlex
import shutil
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from examples import CONFIG, EXAMPLES, GOOD, NESTED, UNREADABLE, unreadable, write, zlab_tensors
from hub_server import Handler, HubServer, Repository
from safetensors.torch import save_file
from tiny import dense_target, refused, tiny_drafter
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoint_format import SIZES
from dflash_hf.validation import READERS, RULES, ValidationReport, main, validate_checkpoint


def sound(folder: Path) -> Path:
    return write(folder / "drafter", CONFIG, zlab_tensors())


@pytest.fixture(scope="module", params=EXAMPLES.values(), ids=EXAMPLES)
def broken(request, tmp_path_factory):
    """An example with its folder and report, which the tests share."""
    folder = request.param.write(tmp_path_factory.mktemp("broken") / "drafter")
    return SimpleNamespace(example=request.param, folder=folder, report=validate_checkpoint(folder))


def test_each_rule_is_broken_for_the_readers_it_says(broken):
    example, report = broken.example, broken.report
    result = next(result for result in report.results if result.rule.id == example.rule)
    for severity, expected in (("error", example.errors), ("warning", example.warnings)):
        assert [reader for reader in READERS if result.status(reader) == severity] == expected.split()
    assert report.ok == (not example.errors)
    for finding in result.findings:
        assert finding.found and finding.expected and finding.why and finding.remedy
        assert {*finding.errors, *finding.warnings} <= {*result.rule.readers}
    shown = ValidationReport(replace(report.checkpoint, name="drafter"), report.results)
    assert max(map(len, str(shown).replace(str(broken.folder), "drafter").splitlines())) <= 100


def test_what_our_loader_refuses_is_an_error_for_transformers(broken):
    try:
        DFlashDraftModel.from_pretrained(broken.folder)
    except (ValueError, OSError):
        assert not broken.report.ok_for("transformers")
    else:
        # The loader reads no values.
        assert broken.report.ok_for("transformers") or broken.example.rule == "tensor_values"


def test_what_dflash_refuses_is_an_error_for_it(broken):
    """Against z-lab's own package (tests/reference.txt), which must load what the report calls good."""
    reference = importlib.import_module("dflash.model")
    try:
        name = "DFlash2DraftModel" if broken.report.checkpoint.is_dflash2 else "DFlashDraftModel"
        drafter, info = getattr(reference, name).from_pretrained(broken.folder, output_loading_info=True)
    # Whatever it stops with, it stops.
    except Exception:
        assert not broken.report.ok_for("z-lab")
        return
    if info["missing_keys"] or not isinstance(drafter.mask_token_id, int) or drafter.block_size < 2:
        assert not broken.report.ok_for("z-lab")
    elif broken.report.ok_for("z-lab"):
        assert drafter.block_size == broken.report.checkpoint.block_size
        assert drafter.target_layer_ids == broken.report.checkpoint.taps


def test_every_rule_has_a_broken_example():
    files = {"folder", "config_file", "weights_file"}
    assert {rule.id for rule in RULES} == {example.rule for example in EXAMPLES.values()} | files
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("fields", "drop", "tensors"), GOOD.values(), ids=GOOD)
def test_folders_like_the_published_ones_have_no_error(fields, drop, tensors, tmp_path):
    config = {name: value for name, value in {**CONFIG, **fields}.items() if name not in drop}
    folder = write(tmp_path / "drafter", config, zlab_tensors(**tensors))
    report = validate_checkpoint(folder)
    assert report.ok and not [finding for finding in report.findings() if finding.errors]
    assert main(["validate", str(folder)]) == main([str(folder)]) == 0
    assert all(result.status(reader) != "unchecked" for result in report.results for reader in READERS)
    assert fields or not report.findings()
    DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("length", [64, 512, 2047, 2048, 8192])
def test_n10_a_drafter_for_shorter_texts_than_its_target_reads_is_warned_of(length, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    config = {**CONFIG, "max_position_embeddings": length}
    folder = write(tmp_path / "drafter", config, zlab_tensors())
    assert validate_checkpoint(folder).status("context_length", "vLLM") == ("warning" if length < 2048 else "ok")
    # A target that is here says how long its texts get.
    cached = tmp_path / "cache" / "models--org--target"
    for name, place in ((tmp_path / "target", tmp_path / "target"), ("org/target", cached / "snapshots" / "abc")):
        for fields, needed in (({"text_config": {"max_position_embeddings": 4096}}, 4096), ({"text_config": 0}, 2048)):
            place.mkdir(parents=True, exist_ok=True)
            (cached / "refs").mkdir(parents=True, exist_ok=True)
            (cached / "refs" / "main").write_text("abc")
            write(place, fields)
            report = validate_checkpoint(write(folder, {**config, "base_model": str(name)}))
            assert report.ok and bool(report.findings("context_length")) == (length < needed)


def test_all_problems_are_collected_at_once(tmp_path):
    fields = {"sliding_window": None, "rope_theta": None, "block_size": 1, "architectures": ["Other"]}
    tensors = zlab_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    del tensors["norm.weight"]
    report = validate_checkpoint(write(tmp_path / "drafter", {**CONFIG, **fields}, tensors))
    assert {result.rule.id for result in report.results if result.findings} >= {
        *("sliding_window", "rope_theta", "block_size", "architectures", "loader", "tensor_shapes", "tensors_missing")
    }


@pytest.mark.parametrize("example", UNREADABLE)
def test_what_cannot_be_read_is_an_error_for_every_reader(example, tmp_path, capsys):
    path = unreadable(example, tmp_path / "drafter")
    _, rule, name = UNREADABLE[example]
    report = validate_checkpoint(path)
    assert [report.status(rule, reader) for reader in READERS] == ["error"] * 4
    assert name in report.findings(rule)[0].found
    assert main([str(path)]) == 1 and rule in capsys.readouterr().out
    # Nothing is called good that was not looked at.
    assert rule == "weights_file" or report.status("block_size", "vLLM") == "unchecked"
    assert rule == "config_file" or report.status("tensor_dtypes", "vLLM") == "unchecked"


def test_an_absurd_number_of_layers_is_not_listed_tensor_by_tensor(tmp_path):
    report = validate_checkpoint(write(tmp_path / "drafter", {**CONFIG, "num_hidden_layers": 10**9}, zlab_tensors()))
    assert report.status("sizes", "vLLM") == "error"
    assert report.status("tensors_missing", "vLLM") == "unchecked"


@pytest.mark.parametrize("value", [None, True, -1, 1.5, 10**12, "word", [], [None], {"a": {}}, [1, "2"]], ids=repr)
def test_no_value_of_any_field_breaks_the_report(value, tmp_path):
    folder = sound(tmp_path)
    names = [*CONFIG, "rope_parameters", "is_causal", "eagle_aux_hidden_state_layer_ids", "auto_map", "base_model"]
    places = [*((name, None) for name in names), *((name, "dflash_config") for name in ("causal", *NESTED, *SIZES))]
    for name, where in places:
        changed = {**NESTED, name: value} if where else value
        (folder / "config.json").write_text(json.dumps({**CONFIG, where or name: changed}))
        report = validate_checkpoint(folder)
        assert json.dumps(report.to_dict()) and str(report)


# Serving commands


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))


def test_commands_have_the_right_numbers(tmp_path):
    folder = write(tmp_path / "my drafter", CONFIG, zlab_tensors())
    commands = validate_checkpoint(folder).serving_commands()
    assert list(commands) == list(READERS)
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    assert words(commands["vLLM"]) == ["vllm", "serve", "TARGET", "--speculative-config", json.dumps(speculative)]
    assert words(commands["SGLang"])[3:] == [
        *("--model-path", "TARGET", "--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(folder), "--speculative-num-draft-tokens", "4"),
    ]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "block_size": None}))
    commands = validate_checkpoint(folder).serving_commands()
    assert '"BLOCK_SIZE - 1"' in commands["vLLM"] and words(commands["SGLang"])[-1] == "BLOCK_SIZE"


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("reader", ["z-lab", "transformers"])
def test_the_snippets_draft(reader, tmp_path):
    target = dense_target()
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter", dtype=torch.bfloat16)
    (tmp_path / "drafter" / "README.md").write_text(f"---\nbase_model: {tmp_path / 'target'}\n---\n")
    report = validate_checkpoint(tmp_path / "drafter")
    assert not report.findings()
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "torch": torch,
        "tokenizer": SimpleNamespace(eos_token_id=258),
        "input_ids": torch.arange(7)[None],
    }
    exec(report.serving_commands()[reader].replace("256", "12"), names)
    assert names["output_ids"].shape[1] > 8 and names["output_ids"][0, :7].tolist() == list(range(7))


@pytest.mark.parametrize(
    ("card", "field", "target"),
    [
        (None, None, "TARGET"),
        ("---\nbase_model:\n- org/target\n- other\n---\n", None, "org/target"),
        ("---\nbase_model: org/target\n---\n", "org/first", "org/first"),
        ("---\nbase_model: [org/target\n---\n", None, "TARGET"),
        ("---\nbase_model: 3\n---\n", None, "TARGET"),
    ],
)
def test_the_target_is_named_by_the_configuration_or_the_card(card, field, target, tmp_path):
    folder = write(tmp_path / "drafter", {**CONFIG, **({"base_model": field} if field else {})}, zlab_tensors())
    if card is not None:
        (folder / "README.md").write_text(card)
    commands = validate_checkpoint(folder).serving_commands()
    assert words(commands["vLLM"])[2] == target and words(commands["SGLang"])[4] == target
    assert repr(target) in commands["transformers"]


# The command


def test_the_report_is_a_table_of_rules_and_readers(tmp_path, capsys):
    assert main([str(EXAMPLES["nested causal"].write(tmp_path / "drafter"))]) == 1
    printed = capsys.readouterr().out
    flowing = " ".join(printed.split())
    rows = {line.split()[0]: line.split()[-4:] for line in printed.splitlines() if line[:1].isalpha() and "  " in line}
    assert rows["causality"] == ["ok", "warning", "warning", "ERROR"]
    assert rows["loader"] == ["-", "-", "-", "ERROR"]
    assert rows["tensors_missing"] == ["ok"] * 4
    assert {rule.id for rule in RULES if not rule.of_dflash2} <= set(rows)
    for told in ("NOT OK", "2 error(s)", "0 warning(s)", "25 tensors", "6,016 parameters", "block size 4"):
        assert told in flowing


def test_json_holds_everything(tmp_path, capsys):
    folder = EXAMPLES["tensor missing"].write(tmp_path / "drafter")
    assert main(["validate", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report == validate_checkpoint(folder).to_dict()
    assert report["ok"] is False and report["readers"]["SGLang"]["ok"] is False
    rules = {rule["id"]: rule for rule in report["rules"]}
    assert rules["tensors_missing"]["status"] == dict.fromkeys(READERS, "error")
    (finding,) = rules["tensors_missing"]["findings"]
    assert "layers.1.mlp.up_proj.weight" in finding["found"]
    assert list(finding) == ["errors", "warnings", "found", "expected", "why", "remedy"]
    assert rules["tap_order"]["status"]["z-lab"] == "unconcerned" and set(report["serving"]) == set(READERS)


@pytest.mark.parametrize("argv", [[], ["x", "--unknown"], [".", "--revision", "main"], ["check", "x"]])
def test_bad_usage_ends_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and "dflash-hf" in capsys.readouterr().err


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with refused(ValueError, "revision", "main"):
        validate_checkpoint(tmp_path, revision="main")


def test_the_console_command_is_this_function():
    parser = ConfigParser()
    parser.read(Path(__file__).parents[1] / "setup.cfg")
    module, _, name = parser["options.entry_points"]["console_scripts"].split("=")[1].strip().partition(":")
    with pytest.raises(SystemExit) as end:
        getattr(importlib.import_module(module), name)(["validate", "--help"])
    assert end.value.code == 0


# Repositories


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub with a drafter as `me/drafter`, with its files as `server.files`."""
    with HubServer() as server:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        # Made when the package was imported, with the endpoint of that time.
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        server.files = {path.name: path.read_bytes() for path in sound(tmp_path).iterdir()}
        put(server, server.files)
        yield server


def put(server, files, private=False, message="first"):
    server.repositories["me/drafter"] = Repository(private)
    server.repositories["me/drafter"].commit("main", message, files)


def test_of_a_repository_only_headers_are_fetched(server, tmp_path, capsys):
    assert main(["me/drafter", "--revision", "main"]) == 0
    assert "hf download me/drafter --revision main" in " ".join(capsys.readouterr().out.split())
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    report = validate_checkpoint("me/drafter", revision="main")
    assert report.status("tensor_values", "vLLM") == "unchecked" and not report.summary()["values_read"]
    commands = report.serving_commands()
    assert '"revision": "main"' in commands["vLLM"] and "revision='main'" in commands["transformers"]
    assert words(commands["SGLang"])[-2:] == ["--speculative-draft-model-revision", "main"]
    tensors = zlab_tensors()
    del tensors["norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"].to(torch.int8)
    spoilt = write(tmp_path / "broken", tensors=tensors) / "model.safetensors"
    put(server, server.files | {"model.safetensors": spoilt.read_bytes()}, message="spoilt")
    report = validate_checkpoint("me/drafter")
    assert {report.status(f"tensor{rule}", "vLLM") for rule in ("s_missing", "_shapes", "_dtypes")} == {"error"}


def test_a_cached_repository_is_read_from_its_files(server, tmp_path, monkeypatch):
    """Once all of its files are there: a part of the shards is no cache, and without a network that is told."""
    put(server, server.files | shards(tmp_path) | {"README.md": b"---\nbase_model: a/b\n---\n"})
    del server.repositories["me/drafter"].commits[0][2]["model.safetensors"]
    huggingface_hub.hf_hub_download("me/drafter", "model-1.safetensors")
    report = validate_checkpoint("me/drafter")
    assert report.ok and not report.summary()["values_read"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (finding,) = validate_checkpoint("me/drafter").findings("weights_file")
    assert "me/drafter" in finding.found and "offline" in finding.found
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.snapshot_download("me/drafter")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    report = validate_checkpoint("me/drafter")
    assert report.ok and report.summary()["values_read"] and report.status("tensor_values", "vLLM") == "ok"


def test_what_a_hub_refuses_is_told_apart(server, monkeypatch):
    def told(rule, *names, repository="me/drafter"):
        (finding,) = validate_checkpoint(repository).findings(rule)
        text = f"{finding.found} {finding.remedy}"
        assert [name for name in names if name not in text] == []

    told("folder", "me/none", "Repository Not Found", "HF_TOKEN", repository="me/none")
    for status, name in ((403, "403"), (503, "503"), ("cut", "disconnected")):
        server.fail = {(method, "model.safetensors"): status for method in ("GET", "HEAD")}
        told("weights_file", name, "network")
    server.fail = {}
    put(server, server.files | {"model.safetensors": b"\xff" * 64})
    told("weights_file", "me/drafter", "parse safetensors header")
    put(server, {"config.json": server.files["config.json"]})
    told("weights_file", "me/drafter", "safetensors")
    put(server, server.files, private=True)
    shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE)
    told("folder", "Repository Not Found", "private")
    # The login page of a network, which answers in place of the Hub.
    monkeypatch.setattr(Handler, "answer", lambda self, method: self.send(b"<html>", kind="text/html"))
    told("folder", "me/drafter", "network")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    told("folder", "HF_HUB_OFFLINE")
    assert validate_checkpoint("me/drafter").serving_commands() == {}


def shards(folder: Path) -> dict[str, bytes]:
    """Two files of the tensors, and their index."""
    tensors, files, index = zlab_tensors(), {}, {}
    names = sorted(tensors)
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        files[file] = (folder / file).read_bytes()
        index |= dict.fromkeys(part, file)
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": index}).encode()}


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (lambda f: {n: b for n, b in f.items() if n != "model-2.safetensors"}, ["model-2.safetensors"]),
        (lambda f: {n: b for n, b in f.items() if "index" not in n}, ["model-2.safetensors", "index"]),
        (lambda f: f | {"a.safetensors": f["model-1.safetensors"]}, ["a.safetensors", "model-1"]),
        (lambda f: f | {"model.safetensors.index.json": b'{"weight_map": {"norm.weight": 3}}'}, ["weight_map"]),
    ],
)
def test_shards_of_a_repository_are_held_to_its_index_as_those_of_a_folder(server, tmp_path, spoil, names):
    config = {"config.json": server.files["config.json"]}
    put(server, config | shards(tmp_path))
    assert validate_checkpoint("me/drafter").ok
    put(server, config | spoil(shards(tmp_path)), message="spoilt")
    local = tmp_path / "local"
    huggingface_hub.snapshot_download("me/drafter", local_dir=local)
    for place in ("me/drafter", local):
        (finding,) = validate_checkpoint(place).findings("weights_file")
        assert [name for name in names if name not in finding.found] == []
