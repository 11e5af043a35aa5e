# SPDX-License-Identifier: Apache-2.0
"""Rules on the drafter's own fields: block, taps, mask token, and where each of them is written."""

import copy
from itertools import pairwise

from ..checkpoint_format import read_config
from ..configuration_dflash import DFlashDraftConfig
from .checkpoint import (
    ALL,
    ENGINES,
    SERVERS,
    STRICT,
    Checkpoint,
    Finding,
    Rule,
    absent,
    enumerate_some,
    is_integer,
    is_size,
    others,
    show,
)


# Field -> (values that mean "not used", readers that apply it, readers of which only some releases do).
_PARTLY_READ: dict[str, tuple[tuple, tuple[str, ...], tuple[str, ...]]] = {
    "input_embedding_scale": ((None, 1), ("z-lab",), ()),
    "output_multiplier": ((None, 1), ("z-lab",), ()),
    "final_logit_softcapping": ((None, 0), ("z-lab",), ()),
    "logit_scale": ((None, 1), ("vLLM",), ()),
    "use_swa": ((None, False), ("vLLM",), ("SGLang",)),
    "swa_window_size": ((None,), ("vLLM",), ("SGLang",)),
    "attention_sink_bias": ((None, False), ("vLLM",), ("SGLang",)),
    "add_swa_attention_sink_bias": ((None, False), ("vLLM",), ()),
    "attention_value_scale": ((None, 1), (), ("SGLang",)),
    "use_aux_hidden_state": ((None, True), ("vLLM",), ()),
    "is_neox_style": ((None, True), SERVERS, ()),
    "rope_is_neox_style": ((None, True), ("SGLang",), ()),
    "quantization_config": ((None,), ENGINES, ()),
}


def _check_block_size(checkpoint: Checkpoint) -> list[Finding]:
    value = checkpoint.value("block_size")
    if value is None:
        why = "dflash and SGLang then draft 16 slots; vLLM is told a number, and nothing says which."
        return [absent("block_size", why, "Write it as it was trained.", others("vLLM"), ("vLLM",))]
    if checkpoint.block_size is not None:
        return []
    why = "A block holds the known anchor and at least one slot to draft."
    return [Finding(f"block_size={show(value)}", "an integer of at least 2", why, "Correct it.", errors=ALL)]


def _check_target_layer_ids(checkpoint: Checkpoint) -> list[Finding]:
    value, remedy = checkpoint.value("target_layer_ids"), "Write the layers that the drafter was trained on."
    if value is None:
        why = "dflash and SGLang guess layers from the depths, and vLLM has a default: the features are others."
        return [absent("dflash_config.target_layer_ids", why, remedy)]
    if checkpoint.taps is not None:
        return []
    why = "They index the target's layers."
    return [Finding(f"target_layer_ids={show(value)}", "a list of layer indices", why, remedy, errors=ALL)]


def _check_tap_order(checkpoint: Checkpoint) -> list[Finding] | None:
    taps = checkpoint.taps
    if taps is None:
        return None
    if all(a < b for a, b in pairwise(taps)):
        return []
    why = "vLLM and SGLang collect features in the order of the layers, whatever the order of this list."
    remedy = "Sort the list, and the column blocks of fc.weight with it."
    return [Finding(f"target_layer_ids={taps}", "ascending, each layer once", why, remedy, errors=STRICT)]


def _check_tap_range(checkpoint: Checkpoint) -> list[Finding] | None:
    taps, depth = checkpoint.taps, checkpoint.value("num_target_layers")
    if taps is None:
        return None
    found = f"target_layer_ids={taps}, num_target_layers={show(depth)}"
    remedy = "Correct whichever is wrong. A drafter trained on the last layer has to be trained again."
    if min(taps) < 0:
        why = "Some read a negative index from the end, others refuse it."
        return [Finding(found, "indices from 0", why, remedy, errors=ALL)]
    if not is_integer(depth):
        return None
    expected = f"indices up to {depth - 2}"
    if max(taps) >= depth:
        return [Finding(found, expected, "The target has no such layer.", remedy, errors=ALL)]
    if max(taps) == depth - 1:
        why = "SGLang cannot read after the last layer; vLLM reads before the final norm, dflash after it."
        return [Finding(found, expected, why, remedy, ("SGLang", "transformers"), ("vLLM", "z-lab"))]
    return []


def _check_num_target_layers(checkpoint: Checkpoint) -> list[Finding]:
    depth, name = checkpoint.value("num_target_layers"), "num_target_layers"
    remedy = "Write the number of decoder layers of the target at the top level."
    if depth is None:
        why = "dflash stops without it, and SGLang checks target_layer_ids against it."
        return [absent(name, why, remedy, ("z-lab", "transformers"), ("SGLang",))]
    if not is_integer(depth) or depth < 2:
        return [Finding(f"{name}={show(depth)}", "a number of layers", "It is a depth.", remedy, others("vLLM"))]
    if checkpoint.raw.get(name) is None:
        return [absent(f"{name} at the top level", "dflash reads it only there.", remedy, ("z-lab",))]
    return []


def _check_mask_token_id(checkpoint: Checkpoint) -> list[Finding]:
    mask, vocab_size = checkpoint.value("mask_token_id"), checkpoint.raw.get("vocab_size")
    remedy = "Write the id that the drafter was trained with."
    if mask is None:
        why = "vLLM and dflash stop; SGLang takes the id of a token <|MASK|>, which it may add to the tokenizer."
        return [absent("dflash_config.mask_token_id", why, remedy)]
    found = f"mask_token_id={show(mask)}"
    if not is_integer(mask) or mask < 0 or (is_integer(vocab_size) and mask >= vocab_size):
        why = "Its row of the target's embedding stands for a slot to be drafted."
        return [Finding(found, f"an id below vocab_size={vocab_size}", why, remedy, errors=ALL)]
    ends = checkpoint.raw.get("eos_token_id")
    if mask in (ends if isinstance(ends, list) else [ends]) or mask == checkpoint.raw.get("pad_token_id"):
        why = "A slot to be drafted looks like the end of the text."
        expected = "a reserved token that texts do not use"
        return [Finding(f"{found}, the eos or pad token", expected, why, remedy, ("transformers",), ENGINES)]
    return []


def _check_same_spelling(checkpoint: Checkpoint) -> list[Finding]:
    # vLLM takes the block size from its command line and the depth from the target.
    unread = {"block_size": ("vLLM",), "num_target_layers": ("vLLM",)}
    findings = []
    for name, inner in checkpoint.nested.items():
        top = checkpoint.raw.get(name)
        if top is None or inner == top or name == "is_causal":
            continue
        skipped = (*unread.get(name, ()), *(("transformers",) if inner is None else ()))
        findings.append(
            Finding(
                f"{name}={show(top)} at the top level and {show(inner)} in dflash_config",
                "one value",
                "Readers differ in which one they apply, and nothing says which one was trained.",
                "Remove one of them.",
                errors=others(*skipped),
            )
        )
    return findings


def _check_both_spellings(checkpoint: Checkpoint) -> list[Finding]:
    raw, nested, findings = checkpoint.raw, checkpoint.nested, []
    if raw.get("block_size") is None and nested.get("block_size") is not None:
        why = "generate() reads config.block_size, which only this package's configuration finds in dflash_config."
        findings.append(absent("block_size at the top level", why, "Write it there too.", (), ("transformers",)))
    flat = [n for n in ("target_layer_ids", "mask_token_id") if nested.get(n) is None and raw.get(n) is not None]
    if flat:
        why = "Published drafters have it there, and releases of vLLM differ in whether they look elsewhere."
        name = f"{enumerate_some(flat)} in dflash_config"
        findings.append(absent(name, why, "Write it there too.", (), ("vLLM",)))
    parameters = raw.get("rope_parameters")
    if raw.get("rope_theta") is None and isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        why = "Readers on transformers 4 do not know rope_parameters and rotate with a base of 10,000."
        findings.append(absent("rope_theta at the top level", why, "Write it there too.", (), ENGINES))
    return findings


def _check_partly_read(checkpoint: Checkpoint) -> list[Finding]:
    findings = []
    for where, fields in (("", checkpoint.raw), ("dflash_config.", checkpoint.nested)):
        for name, (neutral, applying, in_part) in _PARTLY_READ.items():
            if fields.get(name) in neutral:
                continue
            reading = " and ".join((*applying, *(f"some releases of {reader}" for reader in in_part)))
            findings.append(
                Finding(
                    f"{where}{name}={show(fields[name])}",
                    f"no such field, or {show(neutral[-1])}",
                    f"Only {reading} would apply it; the others ignore it without a word.",
                    "Remove it if the drafter was trained without it; else use only readers that apply it.",
                    errors=others(*applying, *in_part),
                    warnings=in_part,
                )
            )
    return findings


def _check_mask_embedding(checkpoint: Checkpoint) -> list[Finding]:
    if "mask_embedding.pt" not in checkpoint.files:
        return []
    return [
        Finding(
            "a file mask_embedding.pt",
            "slots that use the target's embedding of mask_token_id",
            "Only vLLM and some releases of SGLang put this vector in place of the target's own.",
            "Remove it if the drafter was trained without it; else use only readers that apply it.",
            errors=("z-lab", "transformers"),
            warnings=("SGLang",),
        )
    ]


def _check_eagle_taps(checkpoint: Checkpoint) -> list[Finding]:
    name, taps = "eagle_aux_hidden_state_layer_ids", checkpoint.taps
    shifted = checkpoint.value(name)
    if not shifted:
        return []
    agrees = taps is not None and shifted == [tap + 1 for tap in taps]
    return [
        Finding(
            f"{name}={show(shifted)}, target_layer_ids={taps}",
            f"no {name}",
            "vLLM prefers it and counts from the embeddings, that is one higher; the others ignore it.",
            "Remove it, after checking that target_layer_ids holds the layers the drafter was trained on.",
            errors=("transformers",) if agrees else ("vLLM", "transformers"),
            warnings=("vLLM",) if agrees else (),
        )
    ]


def _check_remote_code(checkpoint: Checkpoint) -> list[Finding]:
    auto_map, findings = checkpoint.raw.get("auto_map"), []
    for name, reference in auto_map.items() if isinstance(auto_map, dict) else ():
        path = f"{str(reference).split('.')[0]}.py"
        # "owner/name--module.Class" lies in another repository.
        if not isinstance(reference, str) or path in checkpoint.files or "--" in path:
            continue
        findings.append(
            Finding(
                f"auto_map names {show(reference)} for {name}, and there is no {path}",
                f"the file {path}, or no such entry",
                "trust_remote_code=True fails on it; without it AutoModel needs `import dflash_hf` before.",
                f"Remove the entry, or copy {path}.",
                # The servers read the configuration through AutoConfig, but bring a model class of their own.
                warnings=STRICT if name == "AutoConfig" else ("transformers",),
            )
        )
    return findings


def _check_loader(checkpoint: Checkpoint) -> list[Finding]:
    try:
        _, problems = read_config(checkpoint.raw)
        if not problems and is_size(checkpoint.raw["num_hidden_layers"], "num_hidden_layers"):
            DFlashDraftConfig.from_dict(copy.deepcopy(checkpoint.raw))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Some value is of a type that no reader expects.
        problems = [f"{type(error).__name__}: {error}"]
    if not problems:
        return []
    return [
        Finding(
            "\n".join(problems),
            "a configuration without gaps and contradictions",
            "DFlashDraftModel.from_pretrained refuses it rather than guess.",
            "Follow each line; the other rules tell what the other readers make of it.",
            errors=("transformers",),
        )
    ]


FIELD_RULES = (
    Rule("block_size", "at least two slots", ALL, _check_block_size),
    Rule("target_layer_ids", "a list of layers", ALL, _check_target_layer_ids),
    Rule("tap_order", "ascending, each layer once", STRICT, _check_tap_order),
    Rule("tap_range", "layers before the last one", ALL, _check_tap_range),
    Rule("num_target_layers", "the target's depth", others("vLLM"), _check_num_target_layers),
    Rule("mask_token_id", "an id inside the vocabulary", ALL, _check_mask_token_id),
    Rule("same_spelling", "two spellings agree", ALL, _check_same_spelling),
    Rule("both_spellings", "written where each reader looks", ALL, _check_both_spellings),
    Rule("partly_read", "no field that only some apply", ALL, _check_partly_read),
    Rule("mask_embedding", "no file mask_embedding.pt", others("vLLM"), _check_mask_embedding),
    Rule("eagle_taps", "no second list of taps", ("vLLM", "transformers"), _check_eagle_taps),
    Rule("remote_code", "auto_map names files that exist", STRICT, _check_remote_code),
    Rule("loader", "dflash_hf accepts config.json", ("transformers",), _check_loader),
)
