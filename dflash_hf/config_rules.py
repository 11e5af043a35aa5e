# SPDX-License-Identifier: Apache-2.0
"""What a drafter's configuration may say: rules over plain dictionaries, each violation one sentence with a way out.

This file ships with every saved drafter as remote code, so it imports nothing of the package.
"""

from itertools import pairwise
from typing import Any


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
