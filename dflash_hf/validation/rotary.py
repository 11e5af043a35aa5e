# SPDX-License-Identifier: Apache-2.0
"""Rules on the rotary embedding that `config.json` describes."""

from typing import Any

from .checkpoint import ALL, STRICT, Checkpoint, Finding, Rule, absent, is_number, show


def _check_rope_theta(checkpoint: Checkpoint) -> list[Finding]:
    raw = checkpoint.raw
    remedy = "Write rope_theta and rope_parameters with the base that the drafter was trained with."
    spelled = {name: raw[name] for name in ("rope_parameters", "rope_scaling") if raw.get(name)}
    for name, value in spelled.items():
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            why = "A drafter's layers all rotate alike."
            return [Finding(f"{name}={show(value)}", "one flat set of values", why, remedy, errors=ALL)]
    bases = {f"{name}.rope_theta": value["rope_theta"] for name, value in spelled.items() if "rope_theta" in value}
    if raw.get("rope_theta") is not None:
        bases["rope_theta"] = raw["rope_theta"]
    if not bases:
        return [absent("rope_theta", "Readers fill in 10,000, or the base of a foreign model_type.", remedy)]
    valid = all(is_number(base) and base > 0 for base in bases.values())
    kinds = [_without_theta(value) for value in spelled.values()]
    if valid and len(set(bases.values())) == 1 and (len(kinds) < 2 or kinds[0] == kinds[1]):
        return []
    found = ", ".join(f"{name}={show(value)}" for name, value in {**spelled, **bases}.items())
    why = "Readers differ in which one they apply."
    return [Finding(found, "one positive base and one kind of scaling", why, remedy, errors=ALL)]


def _without_theta(parameters: dict[str, Any]) -> dict[str, Any]:
    return {("rope_type" if k == "type" else k): v for k, v in parameters.items() if k != "rope_theta"}


def _check_rope_in_full(checkpoint: Checkpoint) -> list[Finding]:
    raw = checkpoint.raw
    spelled = [raw.get(name) for name in ("rope_parameters", "rope_scaling")]
    if not checkpoint.is_foreign or any(isinstance(v, dict) and {"rope_type", "type"} & {*v} for v in spelled):
        return []
    return [
        Finding(
            f"model_type={show(raw.get('model_type'))} without rope_parameters.rope_type",
            'rope_parameters={"rope_type": "default", "rope_theta": ...}',
            "AutoConfig fills in the scaling of the model type (YaRN for gpt_oss), and dflash does not.",
            "Write rope_parameters in full, as the drafter was trained.",
            errors=STRICT,
        )
    ]


def _check_whole_heads(checkpoint: Checkpoint) -> list[Finding]:
    raw, findings = checkpoint.raw, []
    inner = {f"{n}.": raw.get(n) for n in ("rope_parameters", "rope_scaling", "dflash_config")}
    places = {"": raw, **{where: fields for where, fields in inner.items() if isinstance(fields, dict)}}
    neutral = {"partial_rotary_factor": (None, 1), "mrope_section": (None,), "mrope_interleaved": (None, False)}
    for where, fields in places.items():
        for name, values in neutral.items():
            if fields.get(name) not in values:
                why = "SGLang and dflash rotate the whole head by one position, whatever the target does."
                remedy = "Remove it if it was copied from the target; no reader serves a drafter trained with it."
                expected = "a plain rotary embedding"
                findings.append(Finding(f"{where}{name}={show(fields[name])}", expected, why, remedy, errors=ALL))
    return findings


ROTARY_RULES = (
    Rule("rope_theta", "one base of the rotary embedding", ALL, _check_rope_theta),
    Rule("rope_in_full", "no scaling of a foreign type", STRICT, _check_rope_in_full),
    Rule("whole_heads", "no partial rotary embedding", ALL, _check_whole_heads),
)
