# SPDX-License-Identifier: Apache-2.0
"""Every rule of the validator with an example that breaks it, the real readers beside them, and the command."""

import importlib
import json
import re
import shlex
import shutil
from configparser import ConfigParser
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from hub_server import Handler, HubServer, Repository
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from tiny import MASK_TOKEN_ID, dense_target
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf import validation as validation_reading
from dflash_hf.checkpoint_format import SIZES
from dflash_hf.validation import (
    READERS,
    RULES,
    Checkpoint,
    RuleResult,
    ValidationReport,
    main,
    validate_checkpoint,
)


FULL, SLIDING = "full_attention", "sliding_attention"
# The layout of z-lab/Qwen3.6-27B-DFlash at small sizes.
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 4,
    "bos_token_id": None,
    "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3]},
    "dtype": "bfloat16",
    "eos_token_id": 98,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "layer_types": [SLIDING, FULL],
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "pad_token_id": 98,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "transformers_version": "5.5.3",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 100,
}
ROPE = {"rope_type": "default", "rope_theta": 10000000}
NESTED = CONFIG["dflash_config"]
GPT_OSS = {"model_type": "gpt_oss", "rope_parameters": ROPE}
DEPTHLESS = ("num_target_layers",)


def zlab_tensors(bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The tensors of `CONFIG`, written down apart from the package's own list of them."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (16, 32), "hidden_norm.weight": (16,), "norm.weight": (16,)}
    for layer in ("layers.0.", "layers.1."):
        shapes |= {f"{layer}{name}_layernorm.weight": (16,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (16, 24)}
        for name, rows in {"q": 32, "k": 16, "v": 16, "o": 16}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, 32 if name == "o" else 16)
            if bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (8,) for name in "qk"}
    return {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}


def write(folder: Path, config=None, tensors=None) -> Path:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Example:
    """A folder that breaks one rule, and for whom."""

    rule: str
    fields: dict | None = None
    drop: tuple[str, ...] = ()
    nested: dict | None = None
    tensors: object = None
    file: str | None = None
    errors: str = ""
    warnings: str = ""

    def write(self, folder: Path) -> Path:
        config = {**CONFIG, **({"dflash_config": {**NESTED, **self.nested}} if self.nested else {})}
        config = {name: value for name, value in {**config, **(self.fields or {})}.items() if name not in self.drop}
        tensors = zlab_tensors()
        write(folder, config, self.tensors(tensors) if self.tensors else tensors)
        if self.file:
            (folder / self.file).write_bytes(b"x")
        return folder


ALL = "vLLM SGLang z-lab transformers"
STRICT = "vLLM SGLang transformers"
ENGINES = "vLLM SGLang z-lab"


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def changed(name, change):
    return lambda tensors: {**tensors, name: change(tensors.get(name))}


NAN = float("nan")
EXAMPLES = {
    "no architectures": Example("architectures", drop=("architectures",), errors="vLLM SGLang"),
    "plain qwen3": Example("architectures", {"architectures": ["Qwen3Model"]}, errors=STRICT),
    "dflash 2": Example(
        "architectures", {"architectures": ["DFlash2DraftModel"]}, errors="transformers", warnings="vLLM SGLang"
    ),
    "conv kernel": Example("layout", nested={"conv_kernel_size": 2}, errors="transformers", warnings=ENGINES),
    "dspark": Example("layout", {"sample_from_anchor": True}, errors=ALL),
    "dflare": Example("layout", {"dflare_config": {"a": 1}}, errors=ALL),
    "speculators": Example(
        "layout", {"speculators_model_type": "dflash"}, errors="SGLang z-lab transformers", warnings="vLLM"
    ),
    "draft vocabulary": Example(
        "layout", {"draft_vocab_size": 50}, errors="SGLang z-lab transformers", warnings="vLLM"
    ),
    "no model type": Example("model_type", drop=("model_type",), errors=STRICT, warnings="z-lab"),
    "unknown model type": Example(
        "model_type",
        {"model_type": "dflash", "rope_parameters": ROPE},
        errors="vLLM SGLang",
        warnings="z-lab transformers",
    ),
    "null dflash_config": Example(
        "dflash_config", {"dflash_config": None, "target_layer_ids": [1, 3], "mask_token_id": 90}, errors="z-lab"
    ),
    "list as dflash_config": Example("dflash_config", {"dflash_config": [1]}, errors=ALL),
    "no head_dim": Example("sizes", drop=("head_dim",), errors=ALL),
    "no eps": Example("sizes", drop=("rms_norm_eps",), errors=ALL),
    "size as text": Example("sizes", {"hidden_size": "16"}, errors=ALL),
    "no layers": Example("sizes", {"num_hidden_layers": 0}, errors=ALL),
    "uneven groups": Example("sizes", {"num_key_value_heads": 3}, errors=ALL),
    "gelu": Example("activation", {"hidden_act": "gelu"}, errors=STRICT),
    "one layer type": Example("layer_types", {"layer_types": [FULL]}, errors=ALL),
    "linear layer": Example("layer_types", {"layer_types": ["linear_attention", FULL]}, errors=ALL),
    "word as layer types": Example("layer_types", {"layer_types": FULL}, errors=ALL),
    "derived layer types": Example("layer_types", drop=("layer_types",), errors="transformers", warnings=ENGINES),
    "foreign layer types": Example("layer_types", GPT_OSS, ("layer_types",), errors=STRICT, warnings="z-lab"),
    "no window": Example("sliding_window", {"sliding_window": None}, errors=ALL),
    "window switched off": Example("sliding_window", {"use_sliding_window": False}, errors=ALL),
    "foreign window switch": Example(
        "sliding_window", GPT_OSS, ("use_sliding_window",), errors="z-lab transformers", warnings="vLLM SGLang"
    ),
    "window below block": Example("sliding_window", {"sliding_window": 3}, errors="transformers", warnings=ENGINES),
    "nested causal": Example("causality", nested={"causal": True}, errors="transformers", warnings="SGLang z-lab"),
    "nested is_causal": Example("causality", nested={"is_causal": False}, errors="transformers", warnings=ENGINES),
    "causal twice": Example(
        "causality", {"is_causal": False}, nested={"causal": True}, errors="transformers", warnings=ENGINES
    ),
    "causal as text": Example("causality", {"is_causal": "false"}, errors=ALL),
    "no rope base": Example("rope_theta", drop=("rope_theta",), errors=ALL),
    "two rope bases": Example("rope_theta", {"rope_parameters": {**ROPE, "rope_theta": 10000}}, errors=ALL),
    "two rope scalings": Example(
        "rope_theta",
        {"rope_parameters": ROPE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        errors=ALL,
    ),
    "rope per layer type": Example("rope_theta", {"rope_parameters": {FULL: ROPE, SLIDING: ROPE}}, errors=ALL),
    "foreign rope": Example("rope_in_full", {"model_type": "gpt_oss"}, errors=STRICT),
    "partial rope": Example("whole_heads", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, errors=ALL),
    "mrope": Example("whole_heads", {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}, errors=ALL),
    "no block size": Example("block_size", drop=("block_size",), errors="SGLang z-lab transformers", warnings="vLLM"),
    "block of one": Example("block_size", {"block_size": 1}, errors=ALL),
    "no taps": Example("target_layer_ids", {"dflash_config": {"mask_token_id": 90}}, errors=ALL),
    "one tap as number": Example("target_layer_ids", nested={"target_layer_ids": 3}, errors=ALL),
    "taps descend": Example("tap_order", nested={"target_layer_ids": [3, 1]}, errors=STRICT),
    "tap twice": Example("tap_order", nested={"target_layer_ids": [3, 3]}, errors=STRICT),
    "negative tap": Example("tap_range", nested={"target_layer_ids": [-1, 3]}, errors=ALL),
    "tap past the end": Example("tap_range", nested={"target_layer_ids": [1, 6]}, errors=ALL),
    "last layer": Example(
        "tap_range", nested={"target_layer_ids": [1, 5]}, errors="SGLang transformers", warnings="vLLM z-lab"
    ),
    "no depth": Example("num_target_layers", drop=DEPTHLESS, errors="z-lab transformers", warnings="SGLang"),
    "nested depth": Example("num_target_layers", drop=DEPTHLESS, nested={"num_target_layers": 6}, errors="z-lab"),
    "depth as text": Example("num_target_layers", {"num_target_layers": "6"}, errors="SGLang z-lab transformers"),
    "no mask": Example("mask_token_id", {"dflash_config": {"target_layer_ids": [1, 3]}}, errors=ALL),
    "mask as text": Example("mask_token_id", nested={"mask_token_id": "<|MASK|>"}, errors=ALL),
    "mask past the vocabulary": Example("mask_token_id", nested={"mask_token_id": 100}, errors=ALL),
    "mask is eos": Example("mask_token_id", nested={"mask_token_id": 98}, errors="transformers", warnings=ENGINES),
    "two block sizes": Example("same_spelling", nested={"block_size": 8}, errors="SGLang z-lab transformers"),
    "two tap lists": Example("same_spelling", {"target_layer_ids": [1, 2]}, errors=ALL),
    "two masks": Example("same_spelling", {"mask_token_id": 91}, errors=ALL),
    "two depths": Example("same_spelling", nested={"num_target_layers": 7}, errors="SGLang z-lab transformers"),
    "null beside a value": Example("same_spelling", nested={"block_size": None}, errors="SGLang z-lab"),
    "only nested block size": Example(
        "both_spellings", drop=("block_size",), nested={"block_size": 4}, warnings="transformers"
    ),
    "only flat taps": Example(
        "both_spellings",
        {"dflash_config": {}, "target_layer_ids": [1, 3], "mask_token_id": 90},
        warnings="vLLM",
    ),
    "only rope parameters": Example(
        "both_spellings", {"rope_parameters": ROPE}, drop=("rope_theta",), warnings=ENGINES
    ),
    "embedding scale": Example("partly_read", {"input_embedding_scale": 2.0}, errors=STRICT),
    "output multiplier": Example("partly_read", nested={"output_multiplier": 0.5}, errors=STRICT),
    "soft cap": Example("partly_read", {"final_logit_softcapping": 30.0}, errors=STRICT),
    "logit scale": Example("partly_read", {"logit_scale": 0.5}, errors="SGLang z-lab transformers"),
    "swa": Example("partly_read", nested={"use_swa": True}, errors="z-lab transformers", warnings="SGLang"),
    "swa window": Example(
        "partly_read", nested={"swa_window_size": 8}, errors="z-lab transformers", warnings="SGLang"
    ),
    "sinks": Example(
        "partly_read", nested={"attention_sink_bias": True}, errors="z-lab transformers", warnings="SGLang"
    ),
    "old sinks": Example("partly_read", {"add_swa_attention_sink_bias": True}, errors="SGLang z-lab transformers"),
    "value scale": Example(
        "partly_read",
        nested={"attention_value_scale": 0.7},
        errors="vLLM z-lab transformers",
        warnings="SGLang",
    ),
    "no features": Example("partly_read", {"use_aux_hidden_state": False}, errors="SGLang z-lab transformers"),
    "interleaved rope": Example("partly_read", {"is_neox_style": False}, errors="z-lab transformers"),
    "other interleaved rope": Example("partly_read", {"rope_is_neox_style": False}, errors="vLLM z-lab transformers"),
    "quantized": Example("partly_read", {"quantization_config": {"quant_method": "fp8"}}, errors="transformers"),
    "mask embedding": Example(
        "mask_embedding", file="mask_embedding.pt", errors="z-lab transformers", warnings="SGLang"
    ),
    "eagle taps": Example(
        "eagle_taps",
        {"eagle_aux_hidden_state_layer_ids": [2, 4]},
        errors="transformers",
        warnings="vLLM",
    ),
    "other eagle taps": Example(
        "eagle_taps", {"eagle_aux_hidden_state_layer_ids": [1, 3]}, errors="vLLM transformers"
    ),
    "no dflash.py": Example(
        "remote_code", {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, warnings="transformers"
    ),
    "no configuration.py": Example("remote_code", {"auto_map": {"AutoConfig": "configuration.C"}}, warnings=STRICT),
    "null bias": Example("field_types", {"attention_bias": None}, errors=ALL),
    "number as text": Example("field_types", {"attention_dropout": "0.0", "use_cache": "yes"}, errors=ALL),
    "two dtypes said": Example("loader", {"torch_dtype": "float32"}, errors="transformers"),
    "tensor missing": Example("tensors_missing", tensors=without("layers.1.mlp.up_proj.weight"), errors=ALL),
    "fc missing": Example("tensors_missing", tensors=without("fc.weight"), errors=ALL),
    "biases missing": Example("tensors_missing", {"attention_bias": True}, errors=ALL),
    "a layer more": Example(
        "tensors_missing", {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}, errors=ALL
    ),
    "prefix": Example(
        "tensor_prefix",
        tensors=lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()},
        errors="vLLM transformers",
    ),
    "tensor more": Example(
        "tensors_unexpected",
        tensors=changed("layers.0.self_attn.q_proj.bias", lambda _: torch.ones(32).bfloat16()),
        errors="vLLM transformers",
        warnings="SGLang z-lab",
    ),
    "head": Example(
        "tensors_unexpected",
        tensors=changed("lm_head.weight", lambda _: torch.ones(100, 16).bfloat16()),
        errors="transformers",
        warnings=ENGINES,
    ),
    "transposed": Example(
        "tensor_shapes", tensors=changed("fc.weight", lambda tensor: tensor.T.contiguous()), errors=ALL
    ),
    "a tap more": Example("tensor_shapes", nested={"target_layer_ids": [1, 2, 3]}, errors=ALL),
    "one norm too long": Example(
        "tensor_shapes", tensors=changed("norm.weight", lambda _: torch.ones(17).bfloat16()), errors=ALL
    ),
    "fp8": Example(
        "tensor_dtypes", tensors=changed("norm.weight", lambda tensor: tensor.to(torch.float8_e4m3fn)), errors=ALL
    ),
    "nan": Example("tensor_values", tensors=changed("norm.weight", lambda tensor: tensor * NAN), errors=ALL),
    "fp64": Example("tensor_dtypes", tensors=changed("norm.weight", torch.Tensor.double), errors=ALL),
    "two dtypes": Example(
        "tensor_dtypes",
        tensors=changed("norm.weight", torch.Tensor.float),
        errors="transformers",
        warnings=ENGINES,
    ),
}


def readers(result, severity: str) -> list[str]:
    return [reader for reader in READERS if result.status(reader) == severity]


@pytest.fixture(scope="module", params=EXAMPLES.values(), ids=EXAMPLES)
def broken(request, tmp_path_factory):
    """An example with its folder and report, which the tests share."""
    folder = request.param.write(tmp_path_factory.mktemp("broken") / "drafter")
    return SimpleNamespace(example=request.param, folder=folder, report=validate_checkpoint(folder))


def test_each_rule_is_broken_for_the_readers_it_says(broken):
    example, report = broken.example, broken.report
    result = next(result for result in report.results if result.rule.id == example.rule)
    assert readers(result, "error") == example.errors.split()
    assert readers(result, "warning") == example.warnings.split()
    assert report.ok == (not example.errors)
    for finding in result.findings:
        assert finding.found and finding.expected and finding.why and finding.remedy
        assert {*finding.errors, *finding.warnings} <= {*result.rule.readers}
    for reader in example.errors.split():
        assert not report.ok_for(reader)


def test_what_our_loader_refuses_is_an_error_for_transformers(broken):
    try:
        DFlashDraftModel.from_pretrained(broken.folder)
    except (ValueError, OSError):
        assert not broken.report.ok_for("transformers")
    else:
        # Fields that vLLM or SGLang apply and the loader ignores as it ignores every unknown one, and values.
        assert broken.report.ok_for("transformers") or broken.example.rule in ("partly_read", "tensor_values")


def test_what_dflash_refuses_is_an_error_for_it(broken):
    """Against z-lab's own package (tests/reference.txt), which must load what the report calls good."""
    reference = importlib.import_module("dflash.model")
    try:
        drafter, info = reference.DFlashDraftModel.from_pretrained(broken.folder, output_loading_info=True)
    # Whatever it stops with, it stops.
    except Exception:
        assert not broken.report.ok_for("z-lab")
        return
    if info["missing_keys"] or not isinstance(drafter.mask_token_id, int) or drafter.block_size < 2:
        assert not broken.report.ok_for("z-lab")
    elif broken.report.ok_for("z-lab"):
        assert drafter.block_size == broken.report.checkpoint.block_size
        assert drafter.target_layer_ids == broken.report.checkpoint.taps


def test_the_report_fits_100_columns(broken):
    shown = ValidationReport(replace(broken.report.checkpoint, name="drafter"), broken.report.results)
    lines = str(shown).replace(str(broken.folder), "drafter").splitlines()
    assert [line for line in lines if len(line) > 100] == []


def test_every_rule_has_a_broken_example():
    files = {"folder", "config_file", "weights_file"}
    assert {rule.id for rule in RULES} == {example.rule for example in EXAMPLES.values()} | files
    assert len({rule.id for rule in RULES}) == len(RULES)


NEWER = {
    "num_hidden_layers": 2,
    "dflash_config": {**NESTED, "block_size": 4},
    "rope_parameters": ROPE,
}
GOOD = {
    "qwen3.6": ({}, (), {}),
    "full attention": ({"layer_types": [FULL, FULL], "use_sliding_window": False, "sliding_window": None}, (), {}),
    "no layer types": ({"use_sliding_window": False}, ("layer_types",), {}),
    "transformers 4.57": ({"torch_dtype": "bfloat16"}, ("dtype",), {}),
    "nested": (NEWER, ("block_size", "rope_theta", "rope_scaling"), {}),
    "both spellings": ({**NEWER, "block_size": 4}, (), {}),
    "flat": ({"target_layer_ids": [1, 3], "mask_token_id": 90}, ("dflash_config",), {}),
    "gpt-oss": ({**GPT_OSS, "attention_bias": True, "block_size": 8}, (), {"bias": True}),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1000000}, (), {}),
    "all causal": ({"is_causal": True}, (), {}),
    "neutral": (
        {"input_embedding_scale": 1.0, "final_logit_softcapping": None, "draft_vocab_size": 100},
        (),
        {"dtype": torch.float32},
    ),
}


@pytest.mark.parametrize(("fields", "drop", "tensors"), GOOD.values(), ids=GOOD)
def test_folders_like_the_published_ones_have_no_error(fields, drop, tensors, tmp_path):
    config = {name: value for name, value in {**CONFIG, **fields}.items() if name not in drop}
    folder = write(tmp_path / "drafter", config, zlab_tensors(**tensors))
    report = validate_checkpoint(folder)
    errors = [finding for result in report.results for finding in result.findings if finding.errors]
    assert report.ok and errors == []
    assert main(["validate", str(folder)]) == 0
    assert all(result.status(reader) != "unchecked" for result in report.results for reader in READERS)
    DFlashDraftModel.from_pretrained(folder)


def test_qwen36_has_no_warning_either(tmp_path):
    report = validate_checkpoint(write(tmp_path / "drafter", CONFIG, zlab_tensors()))
    assert [result.findings for result in report.results if result.findings] == []


def test_all_problems_are_collected_at_once(tmp_path):
    fields = {"sliding_window": None, "rope_theta": None, "block_size": 1, "architectures": ["Other"]}
    tensors = zlab_tensors()
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()
    del tensors["norm.weight"]
    report = validate_checkpoint(write(tmp_path / "drafter", {**CONFIG, **fields}, tensors))
    broken = {result.rule.id for result in report.results if result.findings}
    assert broken >= {
        *("sliding_window", "rope_theta", "block_size", "architectures", "loader", "tensor_shapes", "tensors_missing")
    }


def test_weights_are_never_loaded(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the weights were read")

    folder = write(tmp_path / "drafter", CONFIG, zlab_tensors())
    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    monkeypatch.setattr("torch.load", refuse)
    # A file whose header is whole and whose last tensor is not is not read past its header.
    assert validate_checkpoint(folder).ok


def test_configuration_rules_are_told_apart_from_unreadable_weights(tmp_path):
    folder = write(tmp_path / "drafter", {**CONFIG, "block_size": 1})
    report = validate_checkpoint(folder)
    assert report.status("weights_file", "vLLM") == "error"
    assert report.status("block_size", "vLLM") == "error"
    assert report.status("tensors_missing", "vLLM") == "unchecked"
    assert "no safetensors file" in report.findings("weights_file")[0].found


def no_folder(folder):
    return folder / "missing"


def a_file(folder):
    return folder / "config.json"


def no_config(folder):
    (folder / "config.json").unlink()


def broken_json(folder):
    (folder / "config.json").write_text('{"block_size": 16,')


def json_list(folder):
    (folder / "config.json").write_text("[]")


def not_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def truncated_header(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:30])


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")


def lost_shard(folder):
    tensors = zlab_tensors()
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in names[:9]}, folder / "model-00001-of-00002.safetensors")
    shards = {n: f"model-0000{1 if n in names[:9] else 2}-of-00002.safetensors" for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def broken_index(folder):
    (folder / "model.safetensors.index.json").write_text("{")


def index_of_another_kind(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


UNREADABLE = {
    no_folder: ("folder", "no folder"),
    a_file: ("folder", "is a file"),
    no_config: ("config_file", "no file"),
    broken_json: ("config_file", "not valid JSON"),
    json_list: ("config_file", "list, not an object"),
    not_text: ("config_file", "not valid JSON"),
    no_weights: ("weights_file", "no safetensors file"),
    pickled: ("weights_file", "pytorch_model.bin"),
    truncated: ("weights_file", "model.safetensors"),
    truncated_header: ("weights_file", "model.safetensors"),
    empty_weights: ("weights_file", "model.safetensors"),
    lost_shard: ("weights_file", "model-00002-of-00002.safetensors"),
    broken_index: ("weights_file", "index.json"),
    index_of_another_kind: ("weights_file", "index.json"),
}


@pytest.mark.parametrize(("spoil", "expected"), UNREADABLE.items(), ids=lambda v: getattr(v, "__name__", None))
def test_what_cannot_be_read_is_an_error_for_every_reader(spoil, expected, tmp_path, capsys):
    folder = write(tmp_path / "drafter", CONFIG, zlab_tensors())
    path = spoil(folder) or folder
    rule, text = expected
    report = validate_checkpoint(path)
    assert not report.ok
    assert [report.status(rule, reader) for reader in READERS] == ["error"] * 4
    assert text in report.findings(rule)[0].found
    assert main(["validate", str(path)]) == 1
    assert rule in capsys.readouterr().out
    # Nothing is called good that was not looked at.
    if rule != "weights_file":
        assert report.status("block_size", "vLLM") == "unchecked"
    if rule != "config_file":
        assert report.status("tensor_dtypes", "vLLM") == "unchecked"


def test_shards_with_an_index_are_read(tmp_path):
    folder, tensors = write(tmp_path / "drafter", CONFIG), zlab_tensors()
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in {*shards.values()}:
        save_file({n: t for n, t in tensors.items() if shards[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert validate_checkpoint(folder).ok


def test_an_absurd_number_of_layers_is_not_listed_tensor_by_tensor(tmp_path):
    config = {**CONFIG, "num_hidden_layers": 10**9}
    report = validate_checkpoint(write(tmp_path / "drafter", config, zlab_tensors()))
    assert report.status("sizes", "vLLM") == "error"
    assert report.status("tensors_missing", "vLLM") == "unchecked"


ODD_VALUES = (None, True, -1, 0, 1.5, 10**12, "word", [], [None], {"a": {}}, [1, "2"])


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
def test_no_value_of_any_field_breaks_the_report(value, tmp_path):
    folder = write(tmp_path / "drafter", CONFIG, zlab_tensors())
    names = [*CONFIG, "rope_parameters", "is_causal", "eagle_aux_hidden_state_layer_ids", "auto_map", "base_model"]
    places = [*((name, None) for name in names), *((name, "dflash_config") for name in ("causal", *NESTED, *SIZES))]
    for name, where in places:
        changed = {**NESTED, name: value} if where else value
        (folder / "config.json").write_text(json.dumps({**CONFIG, where or name: changed}))
        report = validate_checkpoint(folder)
        json.dumps(report.to_dict())
        assert str(report)


def test_commands_have_the_right_numbers(tmp_path):
    folder = write(tmp_path / "my drafter", CONFIG, zlab_tensors())
    commands = validate_checkpoint(folder).serving_commands()
    assert list(commands) == list(READERS)
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    assert shlex.split(commands["vLLM"].replace("\\\n", "")) == [
        "vllm",
        "serve",
        "TARGET",
        "--speculative-config",
        json.dumps(speculative),
    ]
    assert shlex.split(commands["SGLang"].replace("\\\n", ""))[3:] == [
        *("--model-path", "TARGET", "--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", str(folder), "--speculative-num-draft-tokens", "4"),
    ]
    assert "spec_generate" in commands["z-lab"] and "from dflash import" in commands["z-lab"]
    assert 'speculation_type="dflash"' in commands["transformers"] and "assistant_model" in commands["transformers"]
    for reader in ("z-lab", "transformers"):
        compile(commands[reader], reader, "exec")
        assert repr(str(folder)) in commands[reader]


def test_qwen36_27b_at_full_size():
    sizes = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320, "num_target_layers": 64}
    own = {"block_size": 16, "layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 2048}
    nested = {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}
    config = {**CONFIG, **sizes, **own, "dflash_config": nested, "eos_token_id": 248044, "pad_token_id": 248044}
    checkpoint = Checkpoint("z-lab/Qwen3.6-27B-DFlash", config=config)
    headers = {name: ("BF16", shape) for name, shape in (checkpoint.expected or {}).items()}
    checkpoint = replace(checkpoint, headers=headers)
    report = ValidationReport(checkpoint, [RuleResult(rule, rule.check(checkpoint)) for rule in RULES])
    assert report.ok
    summary = report.to_dict()["summary"]
    assert (summary["tensors"], summary["parameters"]) == (58, 1_730_213_120)
    assert '"num_speculative_tokens": 15' in report.serving_commands()["vLLM"]
    assert "--speculative-num-draft-tokens 16" in report.serving_commands()["SGLang"]


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("reader", ["z-lab", "transformers"])
def test_the_snippets_draft(reader, tmp_path):
    target = dense_target()
    target.save_pretrained(tmp_path / "target")
    config = DFlashDraftConfig.from_target_config(target.config, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=2)
    DFlashDraftModel(config).save_pretrained(tmp_path / "drafter", dtype=torch.bfloat16)
    card = f"---\nbase_model: {tmp_path / 'target'}\n---\n"
    (tmp_path / "drafter" / "README.md").write_text(card)
    report = validate_checkpoint(tmp_path / "drafter")
    assert [result.findings for result in report.results if result.findings] == []
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "torch": torch,
        "tokenizer": SimpleNamespace(eos_token_id=258),
        "input_ids": torch.arange(7)[None],
    }
    exec(report.serving_commands()[reader].replace("256", "12"), names)
    assert names["output_ids"].shape[1] > 8 and names["output_ids"][0, :7].tolist() == list(range(7))


def test_an_unknown_block_size_is_a_placeholder(tmp_path):
    config = {name: value for name, value in CONFIG.items() if name != "block_size"}
    commands = validate_checkpoint(write(tmp_path / "drafter", config, zlab_tensors())).serving_commands()
    assert '"num_speculative_tokens": "BLOCK_SIZE - 1"' in commands["vLLM"]
    assert "--speculative-num-draft-tokens BLOCK_SIZE" in commands["SGLang"]


@pytest.mark.parametrize(
    ("card", "field", "target"),
    [
        (None, None, "TARGET"),
        ("---\nbase_model: org/target\n---\n", None, "org/target"),
        ("---\nbase_model:\n- org/target\n- other\n---\n", None, "org/target"),
        ("---\nbase_model: org/target\n---\n", "org/first", "org/first"),
        ("---\nbase_model: [org/target\n---\n", None, "TARGET"),
        ("no metadata", None, "TARGET"),
        ("---\nbase_model: 3\n---\n", None, "TARGET"),
    ],
)
def test_the_target_is_named_by_the_configuration_or_the_card(card, field, target, tmp_path):
    folder = write(tmp_path / "drafter", {**CONFIG, **({"base_model": field} if field else {})}, zlab_tensors())
    if card is not None:
        (folder / "README.md").write_text(card)
    commands = validate_checkpoint(folder).serving_commands()
    assert f"vllm serve {target} " in commands["vLLM"]
    assert f"--model-path {target} " in commands["SGLang"]
    assert f"({target!r}, dtype" in commands["transformers"]


def test_the_report_is_a_table_of_rules_and_readers(tmp_path, capsys):
    example = EXAMPLES["nested causal"]
    assert main(["validate", str(example.write(tmp_path / "drafter"))]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[-4:] for line in lines if line[:1].isalpha() and "  " in line}
    assert rows["causality"] == ["ok", "warning", "warning", "ERROR"]
    assert rows["loader"] == ["-", "-", "-", "ERROR"]
    assert rows["tensors_missing"] == ["ok"] * 4
    assert {rule.id for rule in RULES} <= set(rows)
    text = "\n".join(lines)
    assert "ERROR for transformers: causality" in text and "warning for SGLang, z-lab: causality" in text
    assert "NOT OK: 2 error(s), 0 warning(s). Do not use it with transformers." in text
    assert "25 tensors, 6,016 parameters, BF16; block size 4; reads layers 1, 3 of 6" in " ".join(text.split())


def test_json_holds_everything(tmp_path, capsys):
    folder = EXAMPLES["tensor missing"].write(tmp_path / "drafter")
    assert main(["validate", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report == validate_checkpoint(folder).to_dict()
    assert report["ok"] is False and report["checkpoint"] == str(folder)
    assert report["readers"]["SGLang"] == {"version": "SGLang 0.5.23", "ok": False}
    assert report["summary"]["tensors"] == 24 and report["summary"]["block_size"] == 4
    rules = {rule["id"]: rule for rule in report["rules"]}
    assert rules["tensors_missing"]["status"] == dict.fromkeys(READERS, "error")
    assert "layers.1.mlp.up_proj.weight" in rules["tensors_missing"]["findings"][0]["found"]
    assert set(rules["tensors_missing"]["findings"][0]) == {"errors", "warnings", "found", "expected", "why", "remedy"}
    assert rules["tap_order"]["status"]["z-lab"] == "unconcerned"
    assert set(report["serving"]) == set(READERS)


@pytest.mark.parametrize(
    "argv", [[], ["validate"], ["check", "x"], ["validate", "x", "--unknown"], ["validate", ".", "--revision", "main"]]
)
def test_bad_usage_ends_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "dflash-hf" in capsys.readouterr().err


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only repositories of the Hub have revisions"):
        validate_checkpoint(tmp_path, revision="main")


def test_the_console_command_is_this_function():
    parser = ConfigParser()
    parser.read(Path(__file__).parents[1] / "setup.cfg")
    assert parser["options.entry_points"]["console_scripts"].strip() == "dflash-hf = dflash_hf.validation:main"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository of which the small files are downloaded to a folder and the headers are fetched."""
    folder = write(tmp_path / "snapshot", CONFIG)
    tensors = {
        name: SimpleNamespace(dtype="BF16", shape=list(tensor.shape)) for name, tensor in zlab_tensors().items()
    }
    calls = []

    def download(repo_id, revision=None, allow_patterns=None):
        calls.append((repo_id, revision))
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(folder)

    def listed(repo_id, revision=None):
        calls.append((repo_id, revision))
        return files

    def metadata(repo_id, file, revision=None):
        calls.append((repo_id, revision))
        return SimpleNamespace(tensors=tensors)

    files = ["config.json", "model.safetensors"]
    monkeypatch.setattr(validation_reading, "snapshot_download", download)
    monkeypatch.setattr(validation_reading, "list_repo_files", listed)
    monkeypatch.setattr(validation_reading, "parse_safetensors_file_metadata", metadata)
    return SimpleNamespace(folder=folder, tensors=tensors, calls=calls, files=files)


def test_of_a_repository_only_headers_are_fetched(hub):
    report = validate_checkpoint("owner/drafter", revision="v1")
    assert report.ok and hub.calls == [("owner/drafter", "v1")] * 3
    commands = report.serving_commands()
    assert '"model": "owner/drafter", "revision": "v1", "num_speculative_tokens": 3' in commands["vLLM"]
    assert "--speculative-draft-model-revision v1" in commands["SGLang"]
    assert "from_pretrained('owner/drafter', revision='v1'" in commands["transformers"]
    del hub.tensors["norm.weight"]
    assert validate_checkpoint("owner/drafter").status("tensors_missing", "SGLang") == "error"


def test_a_cached_repository_is_read_from_its_files(hub):
    write(hub.folder, tensors=zlab_tensors())
    report = validate_checkpoint("owner/drafter")
    assert report.ok and len(hub.calls) == 2
    assert report.to_dict()["summary"]["values_read"] and "values were not read" not in str(report)


def test_a_repository_that_cannot_be_reached_is_a_clear_error(hub, monkeypatch):
    def refuse(*args, **kwargs):
        raise LocalEntryNotFoundError("no network\nand more")

    monkeypatch.setattr(validation_reading, "snapshot_download", refuse)
    report = validate_checkpoint("owner/drafter")
    assert "no folder owner/drafter, and no such repository: no network" in report.findings("folder")[0].found
    assert report.serving_commands() == {} and "NOT OK" in str(report)


def test_a_repository_without_safetensors_is_a_clear_error(hub):
    hub.files[:] = ["config.json", "old/model.safetensors"]
    report = validate_checkpoint("owner/drafter")
    assert "owner/drafter: there is no safetensors file" in report.findings("weights_file")[0].found
    assert report.status("block_size", "vLLM") == "ok"


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
        folder = write(tmp_path / "drafter", CONFIG, tensors=zlab_tensors())
        server.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        put(server, server.files)
        yield server


def put(server, files, private=False, message="first"):
    server.repositories["me/drafter"] = Repository(private)
    server.repositories["me/drafter"].commit("main", message, files)


def test_names_shapes_and_dtypes_of_a_repository_are_checked_by_its_headers(server, tmp_path, capsys):
    assert main(["validate", "me/drafter"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the values were not read" in printed and "`hf download me/drafter`, then this again" in printed
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    report = validate_checkpoint("me/drafter", revision="main")
    assert report.status("tensor_values", "vLLM") == "unchecked" and not report.to_dict()["summary"]["values_read"]
    assert "`hf download me/drafter --revision main`" in " ".join(str(report).split())
    huggingface_hub.snapshot_download("me/drafter", revision="main")
    assert validate_checkpoint("me/drafter", revision="main").status("tensor_values", "vLLM") == "ok"
    shutil.rmtree(tmp_path / "cache")
    tensors = zlab_tensors()
    del tensors["norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"].to(torch.int8)
    broken = write(tmp_path / "broken", tensors=tensors) / "model.safetensors"
    put(server, server.files | {"model.safetensors": broken.read_bytes()})
    report = validate_checkpoint("me/drafter")
    for rule in ("tensors_missing", "tensor_shapes", "tensor_dtypes"):
        assert report.status(rule, "vLLM") == "error", rule


def test_what_a_hub_refuses_is_told_apart(server, monkeypatch):
    def found(rule, name="me/drafter"):
        (finding,) = validate_checkpoint(name).findings(rule)
        return f"{finding.found} DO {finding.remedy}"

    assert re.search("me/none, .*Repository Not Found .*DO .*HF_TOKEN", found("folder", "me/none"))
    for status, text in ((403, "403 Forbidden.*token"), (503, "503 Service"), ("cut", "disconnected")):
        server.fail = {(method, "model.safetensors"): status for method in ("GET", "HEAD")}
        assert re.search(f"cannot be fetched: .*{text}.* DO Check the network", found("weights_file"))
    server.fail = {}
    put(server, server.files | {"model.safetensors": b"\xff" * 64})
    assert re.search("Failed to parse safetensors header .*DO Copy the files again", found("weights_file"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert re.search("cannot be fetched: .*offline mode is enabled.* DO Check the net", found("weights_file"))
    assert re.search("HF_HUB_OFFLINE=0.* DO Check the spelling", found("folder", "me/none"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    put(server, {name: data for name, data in server.files.items() if name == "config.json"})
    assert re.search("there is no safetensors file. Push .* DO Copy", found("weights_file"))
    put(server, server.files, private=True)
    shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE)
    assert re.search("Repository Not Found .* private repository is not found", found("folder"))


def shards(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, bytes]:
    """Two files of the tensors, and their index."""
    names, files, index = sorted(tensors), {}, {}
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        files[file] = (folder / file).read_bytes()
        index |= dict.fromkeys(part, file)
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": index}).encode()}


def spoilt_index(change) -> object:
    def spoil(files):
        content = json.loads(files["model.safetensors.index.json"])
        return files | {"model.safetensors.index.json": json.dumps(change(content)).encode()}

    return spoil


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda f: {n: b for n, b in f.items() if n != "model-2.safetensors"}, "not there .*: model-2.safetensors"),
        (lambda f: {n: b for n, b in f.items() if n.endswith(".json")}, "there is no safetensors file"),
        (lambda f: {n: b for n, b in f.items() if "index" not in n}, "model-2.safetensors in .* is in no index"),
        (lambda f: f | {"a.safetensors": f["model-1.safetensors"]}, "lies in a.safetensors and in model-1"),
        (lambda f: f | {"model.safetensors.index.json": b"{"}, "index.json is not readable JSON"),
        (spoilt_index(lambda c: [c]), "has no mapping `weight_map`"),
        (spoilt_index(lambda c: {"weight_map": {"norm.weight": 3}}), "has no mapping `weight_map`"),
        (spoilt_index(lambda c: {"weight_map": c["weight_map"] | {"x": "model-1.safetensors"}}), "says that x lies"),
        (spoilt_index(lambda c: {"weight_map": c["weight_map"] | {"x": "../x"}}), "not there .*: ../x"),
    ],
)
def test_shards_of_a_repository_are_held_to_its_index_as_those_of_a_folder(server, tmp_path, spoil, expected):
    config = {"config.json": server.files["config.json"]}
    put(server, config | shards(zlab_tensors(), tmp_path))
    assert validate_checkpoint("me/drafter").ok
    put(server, config | spoil(shards(zlab_tensors(), tmp_path)), message="spoilt")
    (finding,) = validate_checkpoint("me/drafter").findings("weights_file")
    assert re.search(expected, finding.found), finding.found
    local = tmp_path / "local"
    huggingface_hub.snapshot_download("me/drafter", local_dir=local)
    assert validate_checkpoint(local).findings("weights_file")
    # Once all of it is in the cache, from which it is read.
    huggingface_hub.snapshot_download("me/drafter")
    assert validate_checkpoint("me/drafter").findings("weights_file")


def test_what_is_in_the_cache_in_part_is_fetched(server, tmp_path, monkeypatch):
    put(server, server.files | shards(zlab_tensors(), tmp_path) | {"README.md": b"---\nbase_model: a/b\n---\n"})
    del server.repositories["me/drafter"].commits[0][2]["model.safetensors"]
    huggingface_hub.hf_hub_download("me/drafter", "model-1.safetensors")
    report = validate_checkpoint("me/drafter")
    assert report.ok and not report.to_dict()["summary"]["values_read"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (finding,) = validate_checkpoint("me/drafter").findings("weights_file")
    assert "cannot be fetched" in finding.found and "offline mode" in finding.found
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.snapshot_download("me/drafter")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    report = validate_checkpoint("me/drafter")
    assert report.ok and report.to_dict()["summary"]["values_read"]


def test_a_page_that_answers_in_place_of_the_hub_is_a_clear_error(server, monkeypatch):
    monkeypatch.setattr(Handler, "answer", lambda self, method: self.send(b"<html>", kind="text/html"))
    (finding,) = validate_checkpoint("me/drafter").findings("folder")
    assert "no such repository" in finding.found and "network" in finding.remedy
