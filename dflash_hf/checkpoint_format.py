# SPDX-License-Identifier: Apache-2.0
"""What a drafter's config.json and weights must hold; this file ships with every saved drafter as remote code."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open


# --- What a drafter's configuration may say.


# More layers than any drafter has: a typing error must not make the reader list millions of tensors.
MAX_LAYERS = 1000

LAYER_TYPES = ("full_attention", "sliding_attention")

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

# Structure that readers would otherwise fill in from the defaults of the model type, each reader from its own.
REQUIRED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "block_size",
)

INTEGERS = (
    *(name for name in REQUIRED if name not in ("model_type", "rms_norm_eps")),
    "num_target_layers",
    "mask_token_id",
    "sliding_window",
)

NUMBERS = ("rms_norm_eps", "rope_theta")

BOOLEANS = ("attention_bias", "use_sliding_window", "is_causal")

# Field -> the values that mean "not used". Some engines apply these fields, others ignore them without a word.
APPLIED_BY_SOME_READERS: dict[str, tuple] = {
    "input_embedding_scale": (None, 1),
    "output_multiplier": (None, 1),
    "logit_scale": (None, 1),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "use_aux_hidden_state": (None, True),
    "final_logit_softcapping": (None, 0),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1),
    "eagle_aux_hidden_state_layer_ids": (None, []),
    "partial_rotary_factor": (None, 1),
    "mrope_section": (None,),
    "mrope_interleaved": (None, False),
    "hidden_act": (None, "silu"),
    "quantization_config": (None,),
}

# Field -> the layout that it announces, unless its value is empty.
OTHER_LAYOUTS = {
    "sample_from_anchor": "DSpark (slot j predicts the token after it)",
    "dspark_config": "DSpark",
    "markov_rank": "DSpark",
    "markov_head_type": "DSpark",
    "enable_confidence_head": "DSpark",
    "shift_label": "DSpark",
    "conv_kernel_size": "DFlash 2",
    "conv_group_size": "DFlash 2",
    "selector_rank": "DFlash 2",
    "selector_top_k": "DFlash 2",
    "dflare_config": "DFlare",
    "speculators_model_type": "speculators",
    "speculators_config": "speculators",
    "transformer_layer_config": "speculators",
}


def layout_problems(raw: dict[str, Any], nested: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """Fields that belong to another drafter layout, or that only some readers apply.

    Args:
        raw: Top level of `config.json`.
        nested: Its `dflash_config`.
        rope: Its RoPE parameters.

    Returns:
        One sentence for each offending field.
    """
    problems = []
    architectures = raw.get("architectures")
    if architectures is not None and architectures != ["DFlashDraftModel"]:
        problems.append(
            f"architectures is {architectures}: expected ['DFlashDraftModel'], the only layout this package trains "
            "(DFlash 2, DSpark, DFlare and others compute something else). Use the code that made the checkpoint."
        )
    for where, fields in (("", raw), ("dflash_config.", nested), ("rope_parameters.", rope)):
        for name, layout in OTHER_LAYOUTS.items():
            if fields.get(name):
                way_out = "use the code that made the checkpoint"
                if layout == "speculators":
                    way_out = "convert it with dflash_hf.convert_speculators"
                problems.append(
                    f"{where}{name} is {fields[name]!r}: this is the layout of {layout}, which is not the one trained "
                    f"here; {way_out}."
                )
        for name, neutral in APPLIED_BY_SOME_READERS.items():
            if name in fields and fields[name] not in neutral:
                problems.append(
                    f"{where}{name} is {fields[name]!r}: some readers apply it and others ignore it, so the drafter "
                    f"would compute different things in each. Only {neutral[-1]!r} is supported; remove the field if "
                    "the drafter was trained without it."
                )
        problems += _draft_vocabulary_problems(where, fields.get("draft_vocab_size"), raw.get("vocab_size"))
    return problems


def _draft_vocabulary_problems(where: str, drafted: Any, vocab_size: Any) -> list[str]:
    if drafted is None or drafted == vocab_size:
        return []
    return [
        f"{where}draft_vocab_size is {drafted} and vocab_size is {vocab_size}: a vocabulary of the drafter's own is "
        "not supported, since the target's head is used. Use the code that made the checkpoint."
    ]


def missing_problems(config: dict[str, Any]) -> list[str]:
    """Fields that a file must hold, since readers fill in different values for them."""
    problems = [
        f"{name} is missing: readers would fill in a value of their own. Write it into config.json as it was trained."
        for name in REQUIRED
        if config.get(name) is None
    ]
    foreign = config.get("model_type") not in (None, "qwen3")
    for name in ("layer_types", "attention_bias"):
        needed = foreign or (name == "layer_types" and config.get("use_sliding_window"))
        if needed and config.get(name) is None:
            problems.append(
                f"{name} is missing, which readers derive in different ways where model_type is "
                f"{config.get('model_type')!r} and use_sliding_window is {config.get('use_sliding_window')}: write it "
                "into config.json as it was trained."
            )
    return problems


def field_problems(config: dict[str, Any]) -> list[str]:
    """Values that contradict each other or the format, in a configuration of one spelling.

    Args:
        config: Fields at the top level, the drafter's own ones included; missing ones are looked at by
            [`missing_problems`], except the taps, the mask token and the depth of the target.

    Returns:
        One sentence for each violation.
    """
    problems = _type_problems({**(config.get("rope_parameters") or {}), **config})
    if problems:
        return problems
    return [
        *_shape_problems(config),
        *_window_problems(config),
        *_tap_problems(config.get("target_layer_ids"), config.get("num_target_layers")),
        *_mask_token_problems(config),
    ]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _type_problems(config: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in config.items() if value is not None}
    problems = []
    for name in INTEGERS:
        if name in given and not _is_integer(given[name]):
            problems.append(f"{name} is {given[name]!r}: expected an integer. Write the number itself.")
    if _is_integer(layers := given.get("num_hidden_layers", 1)) and layers > MAX_LAYERS:
        problems.append(f"num_hidden_layers is {layers}: expected at most {MAX_LAYERS}. Write it as it was trained.")
    for name in NUMBERS:
        number = name in given and (isinstance(given[name], float) or _is_integer(given[name]))
        if name in given and not (number and 0 < given[name] < float("inf")):
            problems.append(f"{name} is {given[name]!r}: expected a positive number. Write the number itself.")
    for name in BOOLEANS:
        if name in given and not isinstance(given[name], bool):
            problems.append(f"{name} is {given[name]!r}: expected true or false.")
    if given.get("rope_type", "default") not in ROPE_TYPES:
        problems.append(f"rope_type is {given['rope_type']!r}: expected one of {list(ROPE_TYPES)}.")
    if not isinstance(given.get("layer_types", []), list):
        problems.append(f"layer_types is {given['layer_types']!r}: expected a list with one entry per layer.")
    return problems


def _shape_problems(config: dict[str, Any]) -> list[str]:
    problems = []
    for name in (name for name in INTEGERS if name in REQUIRED and name != "block_size"):
        if config.get(name) is not None and config[name] <= 0:
            problems.append(f"{name} is {config[name]}: expected a positive number. Write it as it was trained.")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        problems.append(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}: query heads share keys "
            "in equal groups. Write both as they were trained."
        )
    layer_types, num_layers = config.get("layer_types"), config.get("num_hidden_layers")
    if layer_types is not None:
        unknown = sorted({str(t) for t in layer_types} - set(LAYER_TYPES))
        if unknown:
            problems.append(f"layer_types holds {unknown}: every layer must be one of {list(LAYER_TYPES)}.")
        if num_layers is not None and len(layer_types) != num_layers:
            problems.append(
                f"layer_types has {len(layer_types)} entries and num_hidden_layers is {num_layers}: one per layer is "
                "needed. Correct whichever is wrong."
            )
    return problems


def _window_problems(config: dict[str, Any]) -> list[str]:
    block_size, window = config.get("block_size"), config.get("sliding_window")
    problems = []
    if block_size is not None and block_size < 2:
        problems.append(
            f"block_size is {block_size}: a block holds the known anchor and at least one slot to draft, so it must "
            "be at least 2."
        )
    if "sliding_attention" not in (config.get("layer_types") or []):
        return problems
    if not config.get("use_sliding_window") or window is None:
        problems.append(
            f"layer_types holds sliding_attention but use_sliding_window={config.get('use_sliding_window')} and "
            f"sliding_window={window}: readers would drop the window silently. Set use_sliding_window=True and "
            "sliding_window, or make every layer full_attention."
        )
    elif block_size is not None and window < block_size:
        problems.append(
            f"sliding_window={window} is smaller than block_size={block_size}: slots of one block would not see their "
            "anchor. Use a window of at least one block."
        )
    return problems


def _tap_problems(taps: Any, depth: int | None) -> list[str]:
    problems = []
    if depth is None:
        problems.append("num_target_layers is missing: give the number of decoder layers of the target.")
    if not taps:
        problems.append(
            "target_layer_ids is missing: give the 0-based target layers the drafter reads, or build the "
            "configuration with DFlashDraftConfig.from_target_config(target_config, mask_token_id=...)."
        )
    elif not isinstance(taps, list) or not all(_is_integer(tap) for tap in taps):
        problems.append(f"target_layer_ids is {taps!r}: expected a list of layer indices.")
    elif any(b <= a for a, b in pairwise(taps)):
        problems.append(f"target_layer_ids={taps} must be unique and ascending, as every reader expects them.")
    elif depth is not None and (taps[0] < 0 or taps[-1] >= depth - 1):
        problems.append(
            f"target_layer_ids={taps} must lie in 0..{depth - 2} for a target of {depth} layers. The last layer "
            f"({depth - 1}) is refused because engines disagree on whether its output is read before or after "
            "the final norm."
        )
    return problems


def _mask_token_problems(config: dict[str, Any]) -> list[str]:
    mask, vocab_size = config.get("mask_token_id"), config.get("vocab_size")
    if mask is None:
        return [
            "mask_token_id is missing: give a token id within the target's vocabulary that its texts do not use "
            "(a reserved special token, or a row of the embedding past the tokenizer's last id)."
        ]
    if vocab_size is not None and not 0 <= mask < vocab_size:
        return [
            f"mask_token_id={mask} is outside the target's embedding of {vocab_size} rows; choose an id in "
            f"0..{vocab_size - 1}."
        ]
    eos, pad = config.get("eos_token_id"), config.get("pad_token_id")
    if mask == pad or mask in (eos if isinstance(eos, list) else [eos]):
        return [
            f"mask_token_id={mask} equals the eos or pad token (eos_token_id={eos}, pad_token_id={pad}): a slot to "
            "draft would look like the end of the text. Choose a reserved token that texts do not use."
        ]
    return []


# --- The tensors of a published drafter: names, shapes and dtypes, compared by headers without reading weights.


WEIGHT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

TensorHeaders = dict[str, tuple[str, tuple[int, ...]]]


def fetch_checkpoint(path_or_repo: str | Path, subfolder: str = "", **download: Any) -> Path:
    """The local folder of a drafter, downloaded where it is a repository on the Hub.

    Args:
        path_or_repo: A local folder or a repository id.
        subfolder: Folder inside it.
        **download: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`, as for
            [`~huggingface_hub.snapshot_download`].

    Raises:
        OSError: There is no such folder or repository, or it cannot be reached.
    """
    folder = Path(path_or_repo)
    if not folder.is_dir():
        # All weights that engines would read, so that a file left over in the repository is seen.
        names = ("config.json", "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt")
        patterns = [f"{subfolder}/{name}" if subfolder else name for name in names]
        try:
            folder = Path(snapshot_download(str(path_or_repo), allow_patterns=patterns, **download))
        except HFValidationError as error:
            raise FileNotFoundError(f"{path_or_repo} is neither a folder nor a repository id ({error}).") from error
        except OSError as error:
            raise OSError(
                f"The drafter {str(path_or_repo)!r} is no folder here, and the Hub does not give it to this account. "
                f"Check the spelling, the path, the login or the network. ({error})"
            ) from error
    return folder / subfolder


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a drafter, without prefix.

    Args:
        config: As [`normalize_config`] returns it.
    """
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linear = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    if config.get("attention_bias"):
        layer |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    layer |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (hidden, inner)}
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        tensors |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return tensors


def read_tensor_headers(folder: str | Path) -> TensorHeaders:
    """Name, dtype and shape of every tensor in a folder, from the headers of its safetensors files.

    Args:
        folder: A local folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Returns:
        `{name: (dtype, shape)}` with the dtype as safetensors spells it ("BF16", "F32", ...).

    Raises:
        FileNotFoundError: The folder has no safetensors file.
        ValueError: A file is broken, a tensor lies in two files, or the index and the files disagree.
    """
    folder = Path(folder)
    return joined_headers(folder, {path.name: file_headers(path) for path in sorted(folder.glob("*.safetensors"))})


def joined_headers(folder: Path, files: dict[str, TensorHeaders]) -> TensorHeaders:
    """The headers of all safetensors files of a drafter, which may lie elsewhere than the rest of its folder.

    Args:
        folder: A local folder with `model.safetensors.index.json`, if there is one.
        files: The headers of each file by its name.

    Returns:
        As [`read_tensor_headers`].

    Raises:
        FileNotFoundError: There is no tensor.
        ValueError: A tensor lies in two files, or the index and the files disagree.
    """
    headers: TensorHeaders = {}
    where: dict[str, str] = {}
    # Engines read every safetensors file of a folder, so a second copy of a tensor may win in one of them.
    for file, own in files.items():
        for name, header in own.items():
            if name in where:
                raise ValueError(
                    f"{name} lies in {where[name]} and in {file}: readers differ in which one they take. Remove the "
                    "file that is left over from an earlier save."
                )
            headers[name], where[name] = header, file
    if not headers:
        raise FileNotFoundError(_no_weights(folder))
    _check_index(folder, where)
    return headers


def file_headers(path: Path) -> TensorHeaders:
    """The headers of one safetensors file.

    Raises:
        ValueError: It is broken.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in tensors.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}): copy it again.") from error


def state_dict_headers(state_dict: dict[str, torch.Tensor]) -> TensorHeaders:
    """The headers that the tensors of a model would have in a file."""
    spelled = {getattr(torch, name): code for code, name in WEIGHT_DTYPES.items()}
    return {name: (spelled.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in state_dict.items()}


def _no_weights(folder: Path) -> str:
    pickles = ", ".join(sorted(path.name for path in folder.glob("pytorch_model*.bin")))
    found = f" ({pickles} is there, but pickles can run code and are not read)" if pickles else ""
    return (
        f"{folder} has no safetensors file with tensors{found}: expected model.safetensors or its shards. Save the "
        "drafter as safetensors with the code that made it."
    )


def _check_index(folder: Path, where: dict[str, str]) -> None:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.exists():
        shards = sorted({name for name in where.values() if name != single.name})
        if not shards:
            return
        raise ValueError(
            f"{', '.join(shards)} in {folder} is in no index: expected one file model.safetensors, or shards with "
            "model.safetensors.index.json. Remove the file, or copy the index."
        )
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{index} is not readable JSON ({error}): copy it again.") from error
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{index} has no mapping `weight_map` of tensors to files: copy the folder again.")
    missing = sorted({*listed.values()} - {*where.values()})
    if missing:
        raise ValueError(
            f"{index.name} in {folder} names files that are not there or hold no tensor: {', '.join(missing)}. Copy "
            "the folder again, or remove an index that is left over."
        )
    wrong = sorted(name for name in {*listed, *where} if listed.get(name) != where.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{index.name} in {folder} says that {name} lies in {listed.get(name)}, and it lies in {where.get(name)} "
            f"({len(wrong)} tensors differ so): copy the folder again, or remove an index that is left over."
        )


def tensor_problems(expected: dict[str, tuple[int, ...]], found: TensorHeaders) -> list[str]:
    """Compare tensors with those a configuration names.

    Args:
        expected: From [`expected_tensors`].
        found: From [`read_tensor_headers`].

    Returns:
        One sentence for each missing, unexpected or wrongly shaped tensor and for each wrong dtype.
    """
    problems = [
        f"{name} is missing: readers that do not notice would run it with random values. Copy or save the drafter "
        "again."
        for name in expected
        if name not in found
    ]
    problems += [_unexpected(name, expected) for name in found if name not in expected]
    for name, (_, shape) in found.items():
        wanted = expected.get(name, shape)
        if shape != wanted:
            transposed = ", which is its transpose" if shape == wanted[::-1] else ""
            problems.append(
                f"{name} has shape {list(shape)}{transposed}: config.json asks for {list(wanted)}. Correct whichever "
                "is wrong."
            )
    return problems + dtype_problems(found)


def _unexpected(name: str, expected: dict[str, tuple[int, ...]]) -> str:
    inner = next((n for n in expected if name.endswith(f".{n}")), None)
    if inner is not None:
        prefix = name[: -len(inner)]
        return (
            f'{name} has the prefix "{prefix}": published drafters have none and engines refuse it. Rename it to '
            f"{inner}."
        )
    if name.split(".")[-1] in ("d2t", "t2d"):
        return f"{name} maps a vocabulary of the drafter's own, which is not supported: the target's head is used."
    return f"{name} is not a tensor of this configuration. Remove it, or correct config.json."


def dtype_problems(found: TensorHeaders) -> list[str]:
    """Tensors that are not bf16, fp16 or fp32, or not all the same."""
    problems = [
        f"{name} has dtype {dtype}: expected one of {list(WEIGHT_DTYPES)}. Save the drafter in one of them."
        for name, (dtype, _) in found.items()
        if dtype not in WEIGHT_DTYPES
    ]
    kinds = sorted({dtype for dtype, _ in found.values() if dtype in WEIGHT_DTYPES})
    if len(kinds) > 1:
        examples = ", ".join(f"{next(n for n, (d, _) in found.items() if d == k)} is {k}" for k in kinds)
        problems.append(f"The tensors have different dtypes ({examples}): save the drafter in one of them.")
    return problems


# --- The files of a published drafter: two spellings of one configuration, and exactly the tensors it names.


# What a folder of an adapter holds in place of config.json and model.safetensors, as peft names it.
ADAPTER_CONFIG = "adapter_config.json"

ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Fields that stand at the top level or in `dflash_config`.
OWN_FIELDS = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers")


def normalize_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Read a drafter's `config.json` in either spelling into one.

    Args:
        raw: The file as a dictionary: flat or nested, saved by transformers 4.57 or 5.

    Returns:
        A copy with `block_size`, `target_layer_ids`, `mask_token_id`, `num_target_layers`, `is_causal`, `dtype` (a
        name such as "bfloat16", or None) and `rope_parameters` (`rope_type`, `rope_theta`, ...) at the top level, and
        what else `dflash_config` holds still in it. `rope_theta`, `rope_scaling` and `torch_dtype` are gone.

    Raises:
        ValueError: With every problem found, one a line: conflicting or missing fields, another layout, fields that
            some readers apply and others ignore.
    """
    config, problems = read_config(raw)
    if problems:
        raise ValueError(problem_report("config.json is not that of a drafter this package can load", problems))
    return config


def read_config(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """[`normalize_config`] with the problems returned, for reports that go on to the tensors."""
    if not isinstance(raw, dict):
        return {}, [f"config.json holds {raw!r}: expected an object with the fields of a drafter. Copy it again."]
    nested = raw.get("dflash_config")
    if nested is not None and not isinstance(nested, dict):
        return dict(raw), [f"dflash_config is {nested!r}: expected an object such as {{'mask_token_id': 151669}}."]
    config, problems = lift_nested(raw, nested or {})
    config["rope_parameters"], rope_problems = _read_rope(raw)
    config["dtype"], name_problems = _read_dtype(raw)
    for name in ("rope_theta", "rope_scaling", "torch_dtype"):
        config.pop(name, None)
    problems += rope_problems + name_problems
    problems += layout_problems(raw, nested or {}, config["rope_parameters"])
    problems += missing_problems(config) + field_problems(config)
    config["is_causal"], causal_problems = _read_causality(config, nested or {})
    return config, problems + causal_problems


def is_adapter_folder(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no whole drafter."""
    return not (Path(folder) / "config.json").is_file() and (Path(folder) / ADAPTER_CONFIG).is_file()


def refuse_adapter(folder: str | Path) -> None:
    """Refuse the folder of an adapter where a whole drafter is to be read.

    Args:
        folder: A local folder; anything else passes.

    Raises:
        ValueError: Saying how to make a drafter of it.
    """
    if is_adapter_folder(folder):
        raise ValueError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}) and no whole drafter. {merging_advice(folder)}"
        )


def merging_advice(folder: str | Path) -> str:
    """How to make a drafter of an adapter."""
    merged = (
        f" {folder}/merged is one, as recipes/adapt_drafter.py leaves it." if Path(folder, "merged").is_dir() else ""
    )
    return (
        f"Give the folder of the merged drafter.{merged} To make one: "
        f"dflash_hf.adapters.merge_adapter({str(folder)!r}).save_pretrained(NEW_FOLDER, "
        "dtype=torch.bfloat16)."
    )


def problem_report(headline: str, problems: list[str]) -> str:
    """One message for several problems."""
    return "\n".join([f"{headline}:", *(f"  - {problem}" for problem in problems)])


def lift_nested(raw: dict[str, Any], nested: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move the drafter's own fields out of `dflash_config`, where they may be repeated but not contradicted."""
    config, rest, problems = dict(raw), dict(nested), []
    for name, value in nested.items():
        if name != "is_causal" and None not in (raw.get(name), value) and raw[name] != value:
            problems.append(
                f"{name} is {raw[name]} at the top level and {value} in dflash_config: readers differ in which one "
                "they apply. Keep one of them, or make them equal."
            )
    for name in OWN_FIELDS:
        value = rest.pop(name, None)
        if config.get(name) is None:
            config[name] = value
    config["dflash_config"] = rest
    return config, problems


def _read_rope(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """One set of RoPE parameters out of `rope_theta`, `rope_scaling` (4.57) and `rope_parameters` (5)."""
    spellings: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = raw.get(name) or {}
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            return {}, [f"{name} is {value!r}: expected one flat set of values, since all layers rotate alike."]
        if value:
            spellings[name] = {("rope_type" if k == "type" else k): v for k, v in value.items()}
    problems = []
    thetas = {name: value["rope_theta"] for name, value in spellings.items() if value.get("rope_theta") is not None}
    if raw.get("rope_theta") is not None:
        thetas["rope_theta"] = raw["rope_theta"]
    if not thetas:
        problems.append(
            "rope_theta is missing, here and in rope_parameters: readers would fill in a base of their own. Write the "
            "base that the drafter was trained with (10000000 for Qwen3.5 and 3.6)."
        )
    elif any(theta != next(iter(thetas.values())) for theta in thetas.values()):
        problems.append(f"rope_theta has several values, {thetas}: readers differ in which one they apply. Keep one.")
    rest = [{k: v for k, v in value.items() if k != "rope_theta"} for value in spellings.values()]
    if len(rest) == 2 and rest[0] != rest[1]:
        problems.append(
            f"rope_parameters is {spellings['rope_parameters']} and rope_scaling is {spellings['rope_scaling']}: "
            "readers differ in which one they apply. Keep one, or make them equal."
        )
    scaled = [value for value in rest if value and "rope_type" not in value]
    if scaled:
        problems.append(f"RoPE has {scaled[0]} and no rope_type: readers would guess or ignore them. Write rope_type.")
    if raw.get("model_type") not in (None, "qwen3") and not any("rope_type" in value for value in rest):
        problems.append(
            f"model_type is {raw['model_type']!r} and RoPE is not written in full: readers would fill in the type's "
            "own scaling. Write rope_parameters with rope_type and rope_theta, as the drafter was trained."
        )
    merged = {"rope_type": "default", **(rest[0] if rest else {})}
    return {**merged, **({"rope_theta": next(iter(thetas.values()))} if thetas else {})}, problems


def _read_dtype(raw: dict[str, Any]) -> tuple[str | None, list[str]]:
    names = {n: str(raw[n]).removeprefix("torch.") for n in ("dtype", "torch_dtype") if raw.get(n) is not None}
    problems = []
    if len(set(names.values())) > 1:
        problems.append(f"dtype and torch_dtype differ, {names}: readers differ in which one they apply. Keep one.")
    dtype = next(iter(names.values()), None)
    if dtype is not None and dtype not in WEIGHT_DTYPES.values():
        problems.append(
            f"dtype is {dtype!r}: expected one of {list(WEIGHT_DTYPES.values())}. Save the drafter in one of them."
        )
    return dtype, problems


def _read_causality(config: dict[str, Any], nested: dict[str, Any]) -> tuple[bool | None, list[str]]:
    """`is_causal`, which only the top level spells for every reader."""
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if k not in ("causal", "is_causal")}
    top, problems = config.get("is_causal"), []
    layer_types = config.get("layer_types")
    if not isinstance(layer_types, list):
        layer_types = ["full_attention"]
    for name in ("causal", "is_causal"):
        inner = nested.get(name)
        as_the_layers = all(inner == (layer_type == "sliding_attention") for layer_type in layer_types)
        if inner is None or inner == top or (top is None and as_the_layers):
            continue
        problems.append(
            f"dflash_config.{name} is {inner} and is_causal at the top level is {top}: some readers apply the first, "
            f"others only the second. Write is_causal={inner} at the top level if the drafter was trained so, else "
            f"remove dflash_config.{name}."
        )
    return top, problems


def checkpoint_problems(folder: str | Path, config: dict[str, Any] | None = None) -> list[str]:
    """Everything that is wrong with a local folder, from its `config.json` and tensor headers.

    Args:
        folder: A drafter's folder.
        config: A configuration to use instead of `config.json`, as [`normalize_config`] returns it.

    Returns:
        One sentence for each problem; empty for a folder that loads.

    Raises:
        OSError: The folder or its `config.json` cannot be read.
    """
    folder = Path(folder)
    problems: list[str] = []
    if config is None:
        path = folder / "config.json"
        try:
            config, problems = read_config(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            return [f"{path} is not valid JSON ({error}): copy it again."]
    if (folder / "mask_embedding.pt").exists():
        problems.append(
            "mask_embedding.pt holds an embedding for mask slots that some readers apply and others ignore. Remove it "
            "if the drafter was trained with the target's own embedding of mask_token_id."
        )
    try:
        found = read_tensor_headers(folder)
    except (FileNotFoundError, ValueError) as error:
        return [*problems, str(error)]
    try:
        expected = expected_tensors(config)
    except (KeyError, TypeError):
        return problems + dtype_problems(found)
    return problems + tensor_problems(expected, found)
