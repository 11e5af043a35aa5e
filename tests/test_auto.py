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
from tiny import byte_tokenizer, dense_target, refused
from transformers import AutoConfig, AutoModel, AutoTokenizer, Qwen3Config

import dflash_hf
from dflash_hf import DFlashDraftConfig, DFlashDraftModel


def python(code, *args, cache, **environment):
    """Run Python in a process of its own and return what it printed last."""
    settings = {"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cache,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Plain Qwen3: calls on it in a process of their own, which prints results, errors, warnings and log lines.

CALLS = """
import torch
from transformers import *
from transformers import CONFIG_MAPPING
import copy, json, logging, pickle, warnings

folder = sys.argv[1]
plain, tiny = f"{folder}/plain", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 99}
text, config = {"model_type": "qwen3", **tiny}, Qwen3Config.from_pretrained(plain)
bare = Qwen3Config.from_dict({**config.to_dict(), "architectures": None})

def described(result):
    if isinstance(result, PreTrainedConfig):
        subs = {k: described(v) for k, v in vars(result).items() if isinstance(v, PreTrainedConfig)}
        return [type(result).__module__, type(result).__qualname__, result.to_json_string(), repr(result), subs]
    if isinstance(result, torch.nn.Module):
        total = sum(parameter.double().sum().item() for parameter in result.parameters())
        return [type(result).__module__, type(result).__qualname__, total, described(result.config)]
    if isinstance(result, type):
        return [result.__module__, result.__qualname__, result.__name__]
    return result if isinstance(result, str | bool | list | dict) else repr(type(result))

def seeded(function, *args, **kwargs):
    torch.manual_seed(0)
    return function(*args, **kwargs)

def exact(): return [type(made) is Qwen3Config for made in (
    AutoConfig.for_model("qwen3", **tiny), CONFIG_MAPPING["qwen3"](**tiny), AutoConfig.from_pretrained(plain),
    LlavaConfig(text_config=dict(text)).text_config, pickle.loads(pickle.dumps(AutoConfig.from_pretrained(plain))))]

table = {
    "for_model": lambda: AutoConfig.for_model("qwen3", **tiny),
    "for_model_bad": lambda: AutoConfig.for_model("qwen3", hidden_size="x"),
    "mapping": lambda: CONFIG_MAPPING["qwen3"],
    "from_dict": lambda: CONFIG_MAPPING["qwen3"].from_dict(dict(tiny), unknown=1, return_unused_kwargs=True)[0],
    "from_pretrained": lambda: CONFIG_MAPPING["qwen3"].from_pretrained(plain, num_hidden_layers=3),
    "mapping_pickled": lambda: pickle.loads(pickle.dumps(CONFIG_MAPPING))["qwen3"],
    "mapping_copied": lambda: copy.deepcopy(CONFIG_MAPPING)["qwen3"],
    "mapping_keys": lambda: sorted(set(CONFIG_MAPPING.keys())),
    "exact": exact,
    "isinstance": lambda: isinstance(config, CONFIG_MAPPING["qwen3"]),
    "not_isinstance": lambda: isinstance(LlamaConfig(), CONFIG_MAPPING["qwen3"]),
    "issubclass": lambda: issubclass(Qwen3Config, CONFIG_MAPPING["qwen3"]),
    "subclass": lambda: type("Own", (CONFIG_MAPPING["qwen3"],), {})(**tiny),
    "copied": lambda: copy.deepcopy(AutoConfig.from_pretrained(plain)),
    "from_config": lambda: seeded(AutoModel.from_config, bare),
    "from_config_causal": lambda: seeded(AutoModelForCausalLM.from_config, bare),
    "from_config_classifier": lambda: seeded(AutoModelForSequenceClassification.from_config, config),
    "tokenizer": lambda: [type(AutoTokenizer.from_pretrained(plain)).__qualname__],
    "config_file": lambda: AutoConfig.from_pretrained(plain + "/config.json"),
    "override": lambda: AutoConfig.from_pretrained(plain, num_hidden_layers=7, attn_implementation="eager"),
    "no_such_folder": lambda: AutoConfig.from_pretrained(folder + "/nowhere"),
    "composite": lambda: LlavaConfig.from_dict(LlavaConfig(text_config=dict(text)).to_dict()),
    "omni": lambda: Qwen3OmniMoeConfig(),
    # A field of the drafters' in a plain configuration does not make a drafter of it.
    "block_size": lambda: CONFIG_MAPPING["qwen3"](block_size=16, dflash_config={"mask_token_id": 1}, **tiny),
    "other_drafter": lambda: AutoConfig.from_pretrained(folder + "/dspark"),
}
for name in ("plain", "coded"):
    for trust in (None, True, False):
        for auto in (AutoConfig, AutoModel, AutoModelForCausalLM):
            table[f"{name} {auto.__name__} {trust}"] = lambda n=name, t=trust, a=auto: a.from_pretrained(
                f"{folder}/{n}", trust_remote_code=t)

lines, results = [], {}
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("transformers").addHandler(handler)
for name, call in table.items():
    lines.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = described(call())
        except Exception as error:
            result = {"error": [type(error).__qualname__, str(error)]}
    said = [str(w.message) for w in caught if not issubclass(w.category, ResourceWarning)]
    results[name] = [result, [*lines], said]
print(json.dumps(results))
"""
# Classes that a Qwen3 checkpoint brings along.
OWN_CODE = """
from transformers import Qwen3Config, Qwen3Model

class OwnConfig(Qwen3Config):
    own: int = 3

class OwnModel(Qwen3Model):
    config_class = OwnConfig
"""


def test_plain_qwen3_is_as_if_the_package_were_not_imported(tmp_path):
    tables = {}
    for imports in ("import sys\n", "import sys, dflash_hf\n"):
        # One path for both, so that what they print can be compared.
        folder = tmp_path / "table"
        shutil.rmtree(folder, ignore_errors=True)
        for sub in ("plain", "coded"):
            dense_target(num_layers=2).save_pretrained(folder / sub)
            byte_tokenizer().save_pretrained(folder / sub)
        config = json.loads((folder / "coded" / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
        (folder / "coded" / "config.json").write_text(json.dumps(config))
        (folder / "coded" / "own.py").write_text(OWN_CODE)
        write_folder(folder / "dspark", small(QWEN36_27B, architectures=["DSparkDraftModel"]))
        tables[imports] = python(imports + CALLS, folder, cache=folder)
    without, imported = tables.values()
    assert imported == without
    # The table says something.
    results = {name: row[0] for name, row in without.items()}
    assert results["plain AutoModel None"][1] == "Qwen3Model" and results["coded AutoModel True"][1] == "OwnModel"
    assert results["coded AutoConfig True"][1] == "OwnConfig" and results["exact"] == [True] * 5
    assert {name for name, result in results.items() if isinstance(result, dict) and "error" in result} == {
        "for_model_bad",
        "no_such_folder",
        "coded AutoModelForCausalLM True",
    }


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
    byte_tokenizer().save_pretrained(folder)
    read = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    assert type(read) is DFlashDraftConfig and isinstance(read, Qwen3Config)
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=trust_remote_code)
    assert type(drafter) is DFlashDraftModel and drafter.dtype == torch.bfloat16
    expected = DFlashDraftModel.from_pretrained(folder)
    inputs = {name: value.bfloat16() for name, value in inputs_for(small(config)).items()}
    assert torch.equal(drafter(**inputs).last_hidden_state, expected(**inputs).last_hidden_state)
    assert type(AutoModel.from_config(read)) is DFlashDraftModel
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]


def test_arguments_reach_the_drafter(tmp_path):
    folder = write_folder(tmp_path, small(QWEN36_27B))
    drafter = AutoModel.from_pretrained(
        folder, is_causal=True, dtype=torch.float32, attn_implementation="eager", rms_norm_eps=1e-5
    )
    assert (drafter.config.is_causal, drafter.dtype, drafter.config.rms_norm_eps) == (True, torch.float32, 1e-5)
    assert drafter.config._attn_implementation == "eager"
    config, unused = AutoConfig.from_pretrained(folder, is_causal=False, nothing=1, return_unused_kwargs=True)
    assert config.is_causal is False and unused["nothing"] == 1


def test_a_wrong_folder_is_refused_by_the_auto_classes_too(tmp_path):
    folder = write_folder(tmp_path, small(QWEN36_27B, use_swa=True))
    for auto in (AutoConfig, AutoModel):
        with refused(ValueError, "use_swa"):
            auto.from_pretrained(folder)


def test_the_switch_leaves_drafters_alone(tmp_path):
    code = (
        "import json, sys, dflash_hf\n"
        "from transformers import CONFIG_MAPPING, AutoConfig, Qwen3Config\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\n"
        "print(json.dumps([type(config).__name__, CONFIG_MAPPING['qwen3'] is Qwen3Config]))"
    )
    folder = write_folder(tmp_path / "drafter", small(QWEN36_27B))
    assert python(code, folder, cache=tmp_path, DFLASH_HF_AUTO_CLASSES="0") == ["Qwen3Config", True]


# Remote code

# Makes `import dflash_hf` fail, as where the package is not installed.
BLOCKED = "import sys; sys.modules['dflash_hf'] = None\n"
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
configurations = [json.load(open(f + "/config.json")) for f in (folder, folder + "_again")]
report["same_configuration"] = configurations[0] == configurations[1]
tensors = drafter.state_dict()
del tensors["norm.weight"]
try:
    type(drafter).from_pretrained(None, config=drafter.config, state_dict=tensors)
except ValueError as error:
    report["refused"] = "norm.weight" in str(error)
print(json.dumps(report))
"""


@pytest.mark.parametrize(
    ("config", "dtype"), [(QWEN36_27B, torch.bfloat16), (GPT_OSS_20B, torch.float32)], ids=["qwen3", "gpt_oss"]
)
@pytest.mark.parametrize("code", [BLOCKED, "import sys, dflash_hf\n"], ids=["missing", "imported"])
def test_c2_a_saved_drafter_loads_as_remote_code_and_computes_the_same(tmp_path, config, dtype, code):
    folder, inputs, expected = tmp_path / "drafter", inputs_for(small(config)), {}
    DFlashDraftModel(DFlashDraftConfig.from_dict(small(config))).save_pretrained(folder, dtype=dtype)
    for name, kwargs in (
        ("plain", {}),
        ("fp32", {"dtype": torch.float32}),
        ("eager", {"attn_implementation": "eager"}),
    ):
        loaded = DFlashDraftModel.from_pretrained(folder, **kwargs)
        output = loaded(**{k: v.to(loaded.dtype) for k, v in inputs.items()})
        expected[name] = output.last_hidden_state.detach()
    torch.save((inputs, expected), tmp_path / "inputs.pt")
    report = python(code + REMOTE, folder, tmp_path / "inputs.pt", cache=tmp_path)
    ours = code != BLOCKED and config is QWEN36_27B
    assert report.pop("module").startswith("dflash_hf." if ours else "transformers_modules.")
    assert report == {
        "plain": [True, str(dtype), "sdpa"],
        "fp32": [True, "torch.float32", "sdpa"],
        "eager": [True, str(dtype), "eager"],
        "from_config": "DFlashDraftModel",
        **dict.fromkeys(("again", "same_configuration", "refused"), True),
    }


def test_c2_the_shipped_files_import_nothing_but_each_other(tmp_path):
    """They are those of the package, byte by byte, and need no package but the allowed ones."""
    # Code that the checkpoint names and we do not write would be looked for in files that are not there.
    auto_map = {"AutoModel": "dflash.DFlashDraftModel", "AutoConfig": "dflash.Config"}
    folder = write_folder(tmp_path / "published", small(QWEN36_27B, auto_map=auto_map))
    DFlashDraftModel.from_pretrained(folder).save_pretrained(tmp_path)
    shipped = sorted(tmp_path.glob("*.py"))
    names = {path.stem for path in shipped}
    assert {"modeling_dflash", "configuration_dflash"} <= names and len(names) <= 5
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
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["auto_map"] == {"AutoModel": "modeling_dflash.DFlashDraftModel"}
