# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints for the validator: sound ones, one or more that break each rule, and unreadable ones.

`tests/contract/record.py` records the validator's report on each, by these names.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from published import FULL, QWEN36_27B, SLIDING, small_tensors
from safetensors.torch import save_file


# The layout of z-lab/Qwen3.6-27B-DFlash at small sizes.
CONFIG = {
    **{name: value for name, value in QWEN36_27B.items() if name != "auto_map"},
    "block_size": 4,
    "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3]},
    "eos_token_id": 98,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "layer_types": [SLIDING, FULL],
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "pad_token_id": 98,
    "sliding_window": 8,
    "vocab_size": 100,
}
ROPE = {"rope_type": "default", "rope_theta": 10000000}
NESTED = CONFIG["dflash_config"]
GPT_OSS = {"model_type": "gpt_oss", "rope_parameters": ROPE}


def zlab_tensors(bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The tensors of `CONFIG`."""
    return small_tensors({**CONFIG, "attention_bias": bias}, dtype)


def write(folder: Path, config=None, tensors=None) -> Path:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Example:
    """A folder that breaks one rule: for whom it is an error and a warning, and what differs from `CONFIG`."""

    rule: str
    errors: str = ""
    warnings: str = ""
    fields: dict | None = None
    drop: tuple[str, ...] = ()
    nested: dict | None = None
    tensors: object = None
    file: str | None = None

    def write(self, folder: Path) -> Path:
        config = {**CONFIG, **({"dflash_config": {**NESTED, **self.nested}} if self.nested else {})}
        config = {name: value for name, value in {**config, **(self.fields or {})}.items() if name not in self.drop}
        tensors = zlab_tensors()
        write(folder, config, self.tensors(tensors) if self.tensors else tensors)
        if self.file:
            (folder / self.file).write_bytes(b"x")
        return folder


ALL = "vLLM SGLang z-lab transformers"
STRICT, ENGINES, SERVERS = "vLLM SGLang transformers", "vLLM SGLang z-lab", "vLLM SGLang"
OURS, ZLAB, NOT_VLLM, NOT_SERVERS = "transformers", "z-lab", "SGLang z-lab transformers", "z-lab transformers"


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def changed(name, change):
    return lambda tensors: {**tensors, name: change(tensors.get(name))}


def rope(**changes):
    return {"rope_parameters": {**ROPE, **changes}}


DFLASH2 = {"architectures": ["DFlash2DraftModel"]}
GEOMETRY = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}


def dflash2_tensors(tensors):
    """Those of a DFlash 2 drafter whose selector does nothing."""
    own = {"candidate_selector.hidden_projection.weight": torch.ones(3, 16)}
    own |= {f"candidate_selector.{name}_codebook": torch.zeros(100, 3) for name in ("predecessor", "successor")}
    for i in range(2):
        for name in ("attention", "mlp"):
            own[f"layers.{i}.{name}_conv.base_kernel"] = torch.ones(2, 2, 16)
            own[f"layers.{i}.{name}_conv.kernel_projection.weight"] = torch.zeros(8, 16)
    return tensors | {name: tensor.bfloat16() for name, tensor in own.items()}


def embedded_codebook(tensors):
    name = "candidate_selector.successor_codebook"
    return {n + ".weight" * (n == name): t + (n == name) for n, t in dflash2_tensors(tensors).items()}


SOUND_DFLASH2 = {"fields": DFLASH2, "nested": GEOMETRY, "tensors": dflash2_tensors}

EXAMPLES = {
    "no architectures": Example("architectures", SERVERS, drop=("architectures",)),
    "plain qwen3": Example("architectures", STRICT, fields={"architectures": ["Qwen3Model"]}),
    "another drafter": Example("architectures", STRICT, fields={"architectures": ["LiLiCorrDraftModel"]}),
    "dflash 2": Example("dflash2", ALL, fields={"architectures": ["DFlash2DraftModel"]}),
    "flat dflash 2": Example("dflash2_fields", ALL, fields={**DFLASH2, **GEOMETRY}, tensors=dflash2_tensors),
    "embedded codebook": Example("codebook_names", STRICT, **SOUND_DFLASH2 | {"tensors": embedded_codebook}),
    "dead selector": Example("dead_selector", "", ALL, **SOUND_DFLASH2),
    "conv kernel": Example("layout", STRICT, ZLAB, nested={"conv_kernel_size": 2}),
    "dspark": Example("layout", ALL, fields={"sample_from_anchor": True}),
    "dflare": Example("layout", ALL, fields={"dflare_config": {"a": 1}}),
    "lilicorr": Example("layout", "vLLM z-lab transformers", "SGLang", {"lilicorr_rank": 8}),
    "domino": Example("layout", ALL, nested={"gru_hidden_dim": 64}),
    "projector": Example("layout", ALL, nested={"projector_type": "domino"}),
    "speculators": Example("layout", NOT_VLLM, "vLLM", {"speculators_model_type": "dflash"}),
    "draft vocabulary": Example("layout", NOT_VLLM, "vLLM", {"draft_vocab_size": 50}),
    "no model type": Example("model_type", STRICT, ZLAB, drop=("model_type",)),
    "unknown model type": Example("model_type", SERVERS, NOT_SERVERS, {"model_type": "dflash", **rope()}),
    "null dflash_config": Example(
        "dflash_config", ZLAB, fields={"dflash_config": None, "target_layer_ids": [1, 3], "mask_token_id": 90}
    ),
    "list as dflash_config": Example("dflash_config", ALL, fields={"dflash_config": [1]}),
    "no head_dim": Example("sizes", ALL, drop=("head_dim",)),
    "no eps": Example("sizes", ALL, drop=("rms_norm_eps",)),
    "size as text": Example("sizes", ALL, fields={"hidden_size": "16"}),
    "no layers": Example("sizes", ALL, fields={"num_hidden_layers": 0}),
    "uneven groups": Example("sizes", ALL, fields={"num_key_value_heads": 3}),
    "gelu": Example("activation", STRICT, fields={"hidden_act": "gelu"}),
    "one layer type": Example("layer_types", ALL, fields={"layer_types": [FULL]}),
    "linear layer": Example("layer_types", ALL, fields={"layer_types": ["linear_attention", FULL]}),
    "word as layer types": Example("layer_types", ALL, fields={"layer_types": FULL}),
    "derived layer types": Example("layer_types", OURS, ENGINES, drop=("layer_types",)),
    "foreign layer types": Example("layer_types", STRICT, ZLAB, GPT_OSS, ("layer_types",)),
    "no window": Example("sliding_window", ALL, fields={"sliding_window": None}),
    "window switched off": Example("sliding_window", ALL, fields={"use_sliding_window": False}),
    "foreign window switch": Example("sliding_window", NOT_SERVERS, SERVERS, GPT_OSS, ("use_sliding_window",)),
    "window below block": Example("sliding_window", OURS, ENGINES, {"sliding_window": 3}),
    "nested causal": Example("causality", OURS, "SGLang z-lab", nested={"causal": True}),
    "nested is_causal": Example("causality", OURS, ENGINES, nested={"is_causal": False}),
    "causal twice": Example("causality", OURS, ENGINES, {"is_causal": False}, nested={"causal": True}),
    "causal as text": Example("causality", ALL, fields={"is_causal": "false"}),
    "no rope base": Example("rope_theta", ALL, drop=("rope_theta",)),
    "two rope bases": Example("rope_theta", ALL, fields=rope(rope_theta=10000)),
    "two rope scalings": Example(
        "rope_theta", ALL, fields={**rope(), "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    ),
    "rope per layer type": Example("rope_theta", ALL, fields={"rope_parameters": {FULL: ROPE, SLIDING: ROPE}}),
    "foreign rope": Example("rope_in_full", STRICT, fields={"model_type": "gpt_oss"}),
    "partial rope": Example("whole_heads", ALL, fields=rope(partial_rotary_factor=0.5)),
    "mrope": Example("whole_heads", ALL, fields=rope(mrope_section=[2, 1, 1])),
    "no block size": Example("block_size", NOT_VLLM, "vLLM", drop=("block_size",)),
    "block of one": Example("block_size", ALL, fields={"block_size": 1}),
    "no taps": Example("target_layer_ids", ALL, fields={"dflash_config": {"mask_token_id": 90}}),
    "one tap as number": Example("target_layer_ids", ALL, nested={"target_layer_ids": 3}),
    "taps descend": Example("tap_order", STRICT, nested={"target_layer_ids": [3, 1]}),
    "tap twice": Example("tap_order", STRICT, nested={"target_layer_ids": [3, 3]}),
    "negative tap": Example("tap_range", ALL, nested={"target_layer_ids": [-1, 3]}),
    "tap past the end": Example("tap_range", ALL, nested={"target_layer_ids": [1, 6]}),
    "last layer": Example("tap_range", "SGLang transformers", "vLLM z-lab", nested={"target_layer_ids": [1, 5]}),
    "no depth": Example("num_target_layers", NOT_SERVERS, "SGLang", drop=("num_target_layers",)),
    "nested depth": Example("num_target_layers", ZLAB, drop=("num_target_layers",), nested={"num_target_layers": 6}),
    "depth as text": Example("num_target_layers", NOT_VLLM, fields={"num_target_layers": "6"}),
    "no mask": Example("mask_token_id", ALL, fields={"dflash_config": {"target_layer_ids": [1, 3]}}),
    "mask as text": Example("mask_token_id", ALL, nested={"mask_token_id": "<|MASK|>"}),
    "empty mask token": Example("mask_token_id", "SGLang", nested={"mask_token": ""}),
    "mask past the vocabulary": Example("mask_token_id", ALL, nested={"mask_token_id": 100}),
    "mask is eos": Example("mask_token_id", OURS, ENGINES, nested={"mask_token_id": 98}),
    "two block sizes": Example("same_spelling", NOT_VLLM, nested={"block_size": 8}),
    "two tap lists": Example("same_spelling", ALL, fields={"target_layer_ids": [1, 2]}),
    "two masks": Example("same_spelling", ALL, fields={"mask_token_id": 91}),
    "two depths": Example("same_spelling", NOT_VLLM, nested={"num_target_layers": 7}),
    "null beside a value": Example("same_spelling", "SGLang z-lab", nested={"block_size": None}),
    "only nested block size": Example("both_spellings", "", OURS, drop=("block_size",), nested={"block_size": 4}),
    "only flat taps": Example(
        "both_spellings", "", "vLLM", {"dflash_config": {}, "target_layer_ids": [1, 3], "mask_token_id": 90}
    ),
    "only rope parameters": Example("both_spellings", "", ENGINES, rope(), ("rope_theta",)),
    "embedding scale": Example("partly_read", STRICT, fields={"input_embedding_scale": 2.0}),
    "output multiplier": Example("partly_read", STRICT, nested={"output_multiplier": 0.5}),
    "soft cap": Example("partly_read", STRICT, fields={"final_logit_softcapping": 30.0}),
    "logit scale": Example("partly_read", NOT_VLLM, fields={"logit_scale": 0.5}),
    "swa": Example("partly_read", NOT_VLLM, nested={"use_swa": True}),
    "swa window": Example("partly_read", NOT_VLLM, nested={"swa_window_size": 8}),
    "sinks": Example("partly_read", NOT_SERVERS, nested={"attention_sink_bias": True}),
    "old sinks": Example("partly_read", NOT_VLLM, fields={"add_swa_attention_sink_bias": True}),
    "value scale": Example("partly_read", NOT_SERVERS, nested={"attention_value_scale": 0.7}),
    "no features": Example("partly_read", NOT_VLLM, fields={"use_aux_hidden_state": False}),
    "interleaved rope": Example("partly_read", NOT_SERVERS, fields={"is_neox_style": False}),
    "other interleaved rope": Example("partly_read", "vLLM z-lab transformers", fields={"rope_is_neox_style": False}),
    "quantized": Example(
        "partly_read", "SGLang transformers", fields={"quantization_config": {"quant_method": "fp8"}}
    ),
    "mask embedding": Example("mask_embedding", NOT_SERVERS, "SGLang", file="mask_embedding.pt"),
    "eagle taps": Example("eagle_taps", OURS, "vLLM", {"eagle_aux_hidden_state_layer_ids": [2, 4]}),
    "other eagle taps": Example(
        "eagle_taps", "vLLM transformers", fields={"eagle_aux_hidden_state_layer_ids": [1, 3]}
    ),
    "no dflash.py": Example("remote_code", "", OURS, {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}),
    "no configuration.py": Example("remote_code", "", STRICT, {"auto_map": {"AutoConfig": "configuration.C"}}),
    "few positions": Example("context_length", "", "vLLM", {"max_position_embeddings": 64}),
    "null bias": Example("field_types", ALL, fields={"attention_bias": None}),
    "number as text": Example("field_types", ALL, fields={"attention_dropout": "0.0", "use_cache": "yes"}),
    "two dtypes said": Example("loader", OURS, fields={"torch_dtype": "float32"}),
    "tensor missing": Example("tensors_missing", ALL, tensors=without("layers.1.mlp.up_proj.weight")),
    "fc missing": Example("tensors_missing", ALL, tensors=without("fc.weight")),
    "biases missing": Example("tensors_missing", ALL, fields={"attention_bias": True}),
    "a layer more": Example(
        "tensors_missing", ALL, fields={"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
    ),
    "prefix": Example("tensor_prefix", "vLLM transformers", tensors=lambda t: {f"model.{n}": x for n, x in t.items()}),
    "tensor more": Example(
        "tensors_unexpected",
        "vLLM transformers",
        "SGLang z-lab",
        tensors=changed("layers.0.self_attn.q_proj.bias", lambda _: torch.ones(32).bfloat16()),
    ),
    "head": Example(
        "tensors_unexpected",
        OURS,
        ENGINES,
        tensors=changed("lm_head.weight", lambda _: torch.ones(100, 16).bfloat16()),
    ),
    "transposed": Example("tensor_shapes", ALL, tensors=changed("fc.weight", lambda tensor: tensor.T.contiguous())),
    "a tap more": Example("tensor_shapes", ALL, nested={"target_layer_ids": [1, 2, 3]}),
    "one norm too long": Example(
        "tensor_shapes", ALL, tensors=changed("norm.weight", lambda _: torch.ones(17).bfloat16())
    ),
    "fp8": Example("tensor_dtypes", ALL, tensors=changed("norm.weight", lambda t: t.to(torch.float8_e4m3fn))),
    "nan": Example("tensor_values", ALL, tensors=changed("norm.weight", lambda tensor: tensor * float("nan"))),
    "fp64": Example("tensor_dtypes", ALL, tensors=changed("norm.weight", torch.Tensor.double)),
    "two dtypes": Example("tensor_dtypes", OURS, ENGINES, tensors=changed("norm.weight", torch.Tensor.float)),
}

NEWER = {"num_hidden_layers": 2, "dflash_config": {**NESTED, "block_size": 4}, "rope_parameters": ROPE}
# Like published ones: changed fields, dropped fields, arguments of the tensors.
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
        {
            "input_embedding_scale": 1.0,
            "final_logit_softcapping": None,
            "draft_vocab_size": 100,
            "use_swa": False,
            "attention_sink_bias": False,
            "attention_value_scale": 1.0,
            "mask_token": "<|MASK|>",
        },
        (),
        {"dtype": torch.float32},
    ),
}


def cut(folder: Path, kept: int) -> None:
    """Keep the first bytes of the weights."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])


def lose_a_shard(folder: Path) -> None:
    names, tensors = [*zlab_tensors()], zlab_tensors()
    (folder / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in names[:9]}, folder / "model-00001-of-00002.safetensors")
    shards = {n: f"model-0000{1 if n in names[:9] else 2}-of-00002.safetensors" for n in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))


INDEX = "model.safetensors.index.json"
# What spoils a folder, giving a path to validate in its place or not; the rule that tells; a name that it tells.
UNREADABLE = {
    "no_folder": (lambda folder: folder / "missing", "folder", "missing"),
    "a_file": (lambda folder: folder / "config.json", "folder", "config.json"),
    "no_config": (lambda folder: (folder / "config.json").unlink(), "config_file", "config.json"),
    "broken_json": (lambda f: (f / "config.json").write_text('{"block_size": 16,'), "config_file", "config.json"),
    "json_list": (lambda folder: (folder / "config.json").write_text("[]"), "config_file", "list"),
    "not_text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "config_file", "config.json"),
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights_file", "safetensors"),
    "pickled": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "weights_file",
        "pytorch_model.bin",
    ),
    "truncated": (lambda folder: cut(folder, 6000), "weights_file", "model.safetensors"),
    "truncated_header": (lambda folder: cut(folder, 30), "weights_file", "model.safetensors"),
    "empty_weights": (lambda folder: cut(folder, 0), "weights_file", "model.safetensors"),
    "lost_shard": (lose_a_shard, "weights_file", "model-00002-of-00002.safetensors"),
    "broken_index": (lambda folder: (folder / INDEX).write_text("{"), "weights_file", INDEX),
    "index_of_another_kind": (lambda f: (f / INDEX).write_text('{"weight_map": []}'), "weights_file", INDEX),
}


def unreadable(name: str, folder: Path) -> Path:
    """A folder that cannot be read, or what is given in its place."""
    other = UNREADABLE[name][0](write(folder, CONFIG, zlab_tensors()))
    return other if UNREADABLE[name][1] == "folder" else folder
