# SPDX-License-Identifier: Apache-2.0
"""Auto classes read drafters once the package is imported, all else as before, and what it saved also without it."""

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from published import GPT_OSS_20B, QWEN3_8B, QWEN36_27B, inputs_for, small, write_folder
from tiny import byte_tokenizer, dense_target
from transformers import AutoConfig, AutoModel, AutoTokenizer, Qwen3Config

import dflash_hf
from dflash_hf import DFlashDraftConfig, DFlashDraftModel


TESTS = Path(__file__).parent

# Classes that a Qwen3 checkpoint brings along.
CODE = """
from transformers import Qwen3Config, Qwen3Model

class OwnConfig(Qwen3Config):
    own: int = 3

class OwnModel(Qwen3Model):
    config_class = OwnConfig
"""
# Makes `import dflash_hf` fail, as where the package is not installed.
BLOCKED = "import sys; sys.modules['dflash_hf'] = None\n"


def python(code_or_file, *args, cache, **environment):
    """Run Python in a process of its own and return what it printed last."""
    command = [code_or_file] if str(code_or_file).endswith(".py") else ["-c", code_or_file]
    settings = {"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *command, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cache,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Plain Qwen3


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The table of calls in a process without the import and in one with it."""
    tables = {}
    for name, args in (("without", []), ("with", ["--import"])):
        # One path for both, so that what they print can be compared.
        folder = tmp_path_factory.getbasetemp() / "table"
        shutil.rmtree(folder, ignore_errors=True)
        for sub in ("plain", "coded"):
            dense_target(num_layers=2).save_pretrained(folder / sub)
            byte_tokenizer().save_pretrained(folder / sub)
        config = json.loads((folder / "coded" / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
        (folder / "coded" / "config.json").write_text(json.dumps(config))
        (folder / "coded" / "own.py").write_text(CODE)
        write_folder(folder / "dflash2", small(QWEN36_27B, architectures=["DFlash2DraftModel"]))
        tables[name] = python(TESTS / "auto_class_table.py", folder, *args, cache=folder)
    return tables


def test_the_table_says_something(results):
    table = results["without"]
    assert len(table) > 45
    assert table["plain_model_None"]["result"][1] == "Qwen3Model"
    assert table["coded_config_True"]["result"][1] == "OwnConfig"
    assert table["coded_model_True"]["result"][1] == "OwnModel"
    assert table["coded_config_False"]["result"][1] == "Qwen3Config"
    assert table["composite"]["result"][4]["text_config"][1] == "Qwen3Config"
    assert table["classes"]["result"] == [True] * 5
    assert table["isinstance"]["result"] is table["issubclass"]["result"] is True
    first = {name: row["result"][0] for name, row in table.items() if isinstance(row["result"], list)}
    errors = {name for name, kind in first.items() if str(kind).endswith("Error")}
    assert errors == {"for_model_bad", "no_such_folder", "coded_causal_True"}


def test_plain_qwen3_is_as_if_the_package_were_not_imported(results):
    assert results["with"].keys() == results["without"].keys()
    for name, row in results["without"].items():
        assert results["with"][name] == row, name


# Drafters


@pytest.fixture
def no_log(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    yield
    assert not caplog.records


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("trust_remote_code", [None, False, True])
@pytest.mark.parametrize("config", [QWEN36_27B, QWEN3_8B], ids=["qwen3.6-27b", "qwen3-8b"])
def test_a_published_folder_is_read_as_a_drafter_without_a_word(tmp_path, no_log, config, trust_remote_code):
    folder = write_folder(tmp_path, small(config))
    read = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    assert type(read) is DFlashDraftConfig and isinstance(read, Qwen3Config)
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=trust_remote_code)
    assert type(drafter) is DFlashDraftModel and drafter.dtype == torch.bfloat16
    expected = DFlashDraftModel.from_pretrained(folder)
    inputs = {name: value.bfloat16() for name, value in inputs_for(small(config)).items()}
    assert torch.equal(drafter(**inputs).last_hidden_state, expected(**inputs).last_hidden_state)
    assert type(AutoModel.from_config(read)) is DFlashDraftModel


def test_arguments_reach_the_drafter(tmp_path):
    folder = write_folder(tmp_path, small(QWEN36_27B))
    drafter = AutoModel.from_pretrained(
        folder, is_causal=True, dtype=torch.float32, attn_implementation="eager", rms_norm_eps=1e-5
    )
    assert (drafter.config.is_causal, drafter.dtype, drafter.config.rms_norm_eps) == (True, torch.float32, 1e-5)
    assert drafter.config._attn_implementation == "eager"
    assert AutoConfig.from_pretrained(folder, is_causal=False).is_causal is False
    config, unused = AutoConfig.from_pretrained(folder, nothing=1, return_unused_kwargs=True)
    assert type(config) is DFlashDraftConfig and unused["nothing"] == 1


def test_a_wrong_folder_is_refused_by_the_auto_classes_too(tmp_path):
    folder = write_folder(tmp_path, small(QWEN36_27B, use_swa=True))
    for auto in (AutoConfig, AutoModel):
        with pytest.raises(ValueError, match="use_swa is True"):
            auto.from_pretrained(folder)


def test_a_tokenizer_beside_a_drafter_is_found(tmp_path):
    folder = write_folder(tmp_path, small(QWEN36_27B))
    byte_tokenizer().save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]


def test_the_switch_leaves_drafters_alone(tmp_path):
    code = (
        "import json, sys, dflash_hf\n"
        "from transformers import CONFIG_MAPPING, AutoConfig, Qwen3Config\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\n"
        "print(json.dumps([type(config).__name__, CONFIG_MAPPING['qwen3'] is Qwen3Config]))"
    )
    folder = write_folder(tmp_path / "drafter", small(QWEN36_27B))
    assert python(code, folder, cache=tmp_path, DFLASH_HF_AUTO_CLASSES="0") == ["Qwen3Config", True]
    assert "DFLASH_HF_AUTO_CLASSES=0" in dflash_hf.__doc__


# Remote code

REMOTE = """
import json
import torch
from transformers import AutoConfig, AutoModel

folder, inputs_file = sys.argv[1:]
inputs, expected = torch.load(inputs_file)
report = {}
for name, kwargs in (
    ("plain", {}),
    ("fp32", {"dtype": torch.float32}),
    ("eager", {"attn_implementation": "eager", "dtype": "auto"}),
):
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=True, **kwargs)
    output = drafter(**{k: v.to(drafter.dtype) for k, v in inputs.items()}).last_hidden_state
    report[name] = [torch.equal(output, expected[name]), str(drafter.dtype), drafter.config._attn_implementation]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
report["from_config"] = type(AutoModel.from_config(config, trust_remote_code=True)).__name__
report["module"] = type(drafter).__module__
drafter.save_pretrained(folder + "_again")
again = AutoModel.from_pretrained(folder + "_again", trust_remote_code=True)
report["again"] = torch.equal(again.fc.weight, drafter.fc.weight)
report["configurations"] = [json.load(open(f + "/config.json")) for f in (folder, folder + "_again")]
try:
    import dflash_hf
    report["imported"] = True
except ImportError:
    report["imported"] = False
print(json.dumps(report))
"""


def save_with_expected(tmp_path, config, dtype):
    """A drafter as we save it, and what it computes as it is loaded by [`REMOTE`]."""
    drafter = DFlashDraftModel(DFlashDraftConfig.from_dict(small(config)))
    drafter.save_pretrained(tmp_path / "drafter", dtype=dtype)
    inputs, expected = inputs_for(small(config)), {}
    for name, kwargs in (
        ("plain", {}),
        ("fp32", {"dtype": torch.float32}),
        ("eager", {"attn_implementation": "eager"}),
    ):
        loaded = DFlashDraftModel.from_pretrained(tmp_path / "drafter", **kwargs)
        output = loaded(**{k: v.to(loaded.dtype) for k, v in inputs.items()})
        expected[name] = output.last_hidden_state.detach()
    torch.save((inputs, expected), tmp_path / "inputs.pt")
    return tmp_path / "drafter", tmp_path / "inputs.pt"


@pytest.mark.parametrize(
    ("config", "dtype"), [(QWEN36_27B, torch.bfloat16), (GPT_OSS_20B, torch.float32)], ids=["qwen3", "gpt_oss"]
)
@pytest.mark.parametrize("code", [BLOCKED, "import sys, dflash_hf\n"], ids=["missing", "imported"])
def test_c2_a_saved_drafter_loads_as_remote_code_and_computes_the_same(tmp_path, config, dtype, code):
    folder, inputs = save_with_expected(tmp_path, config, dtype)
    report = python(code + REMOTE, folder, inputs, cache=tmp_path)
    stored = str(dtype)
    assert report["plain"] == [True, stored, "sdpa"]
    assert report["fp32"] == [True, "torch.float32", "sdpa"]
    assert report["eager"] == [True, stored, "eager"]
    assert report["from_config"] == "DFlashDraftModel"
    assert report["again"] is True
    assert report["configurations"][0] == report["configurations"][1]
    assert report["imported"] == (code != BLOCKED)
    ours = code != BLOCKED and config is QWEN36_27B
    assert report["module"].startswith("dflash_hf." if ours else "transformers_modules.")


def test_c2_the_shipped_files_import_nothing_but_each_other(tmp_path):
    """They are those of the package, byte by byte, and need no package but the allowed ones."""
    DFlashDraftModel(DFlashDraftConfig.from_dict(small(QWEN36_27B))).save_pretrained(tmp_path)
    shipped = sorted(tmp_path.glob("*.py"))
    names = {path.stem for path in shipped}
    assert {"modeling_dflash", "configuration_dflash"} <= names
    allowed = {"torch", "transformers", "safetensors", "huggingface_hub"} | sys.stdlib_module_names
    for path in shipped:
        assert path.read_bytes() == (Path(dflash_hf.__file__).parent / path.name).read_bytes()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in names
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in allowed
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoModel": "modeling_dflash.DFlashDraftModel"
    }


def test_c2_code_that_a_checkpoint_named_but_we_do_not_write_is_not_named_again(tmp_path):
    """The configuration would otherwise be looked for in a file that is not there."""
    auto_map = {"AutoModel": "dflash.DFlashDraftModel", "AutoConfig": "dflash.Config"}
    folder = write_folder(tmp_path / "published", small(QWEN36_27B, auto_map=auto_map))
    DFlashDraftModel.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["auto_map"] == {"AutoModel": "modeling_dflash.DFlashDraftModel"}
