# SPDX-License-Identifier: Apache-2.0
"""Rules on the tensors, by their headers."""

from ..checkpoint_format import TensorHeaders, tensor_problems
from ..checkpoint_tensors import WEIGHT_DTYPES
from .checkpoint import ALL, ENGINES, Checkpoint, Finding, Rule, enumerate_some, others


def _some(problems: list[str], limit: int = 3) -> str:
    more = [f"... and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n".join(problems[:limit] + more)


def _shapes(headers: TensorHeaders) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in headers.items()}


def _check_tensors_missing(checkpoint: Checkpoint) -> list[Finding] | None:
    expected = checkpoint.expected
    if expected is None:
        return None
    missing = {name: shape for name, shape in expected.items() if name not in checkpoint.bare_headers}
    if not missing:
        return []
    return [
        Finding(
            f"{len(missing)} of {len(expected)} tensors missing: {enumerate_some(missing)}",
            "every tensor that config.json asks for",
            "vLLM, SGLang and dflash go on with random values in their place and say little or nothing.",
            "Copy or save the drafter again, or correct config.json.",
            errors=ALL,
        )
    ]


def _check_tensor_prefix(checkpoint: Checkpoint) -> list[Finding]:
    prefixed = [name for name in checkpoint.headers or {} if name.startswith("model.")]
    if not prefixed:
        return []
    return [
        Finding(
            f'{len(prefixed)} names with the prefix "model.": {enumerate_some(prefixed)}',
            "names without prefix",
            "vLLM puts the prefix there itself and knows no such name; SGLang and dflash strip it.",
            "Rename the tensors.",
            errors=("vLLM", "transformers"),
        )
    ]


def _check_tensors_unexpected(checkpoint: Checkpoint) -> list[Finding] | None:
    expected = checkpoint.expected
    if expected is None:
        return None
    unexpected = {name: header for name, header in checkpoint.bare_headers.items() if name not in expected}
    own = {name: header for name, header in unexpected.items() if "embed_tokens" in name or "lm_head" in name}
    unknown = {name: header for name, header in unexpected.items() if name not in own}
    findings = []
    for part, errors, why in (
        (unknown, ("vLLM", "transformers"), "vLLM refuses unknown names; SGLang and dflash ignore them."),
        (own, ("transformers",), "vLLM drafts with this embedding or head; SGLang and dflash ignore it."),
    ):
        if part:
            remedy = "Remove them if the drafter was trained without them, or correct config.json."
            found = f"{len(part)} tensor(s) that config.json does not ask for: {enumerate_some(part)}"
            findings.append(Finding(found, "no other tensors", why, remedy, errors, others(*errors)))
    return findings


def _check_tensor_shapes(checkpoint: Checkpoint) -> list[Finding] | None:
    expected = checkpoint.expected
    if expected is None:
        return None
    shapes = {name: shape for name, shape in _shapes(checkpoint.bare_headers).items() if name in expected}
    # One dtype for all, since a rule of its own looks at dtypes.
    problems = tensor_problems({n: expected[n] for n in shapes}, {n: ("BF16", shape) for n, shape in shapes.items()})
    if not problems:
        return []
    why = "Readers stop while they load the weights, most of them naming a fused parameter."
    remedy = "Correct whichever is wrong: config.json, or the code that saved the tensors."
    return [Finding(_some(problems), "the shapes that config.json asks for", why, remedy, errors=ALL)]


def _check_tensor_dtypes(checkpoint: Checkpoint) -> list[Finding]:
    headers = checkpoint.headers or {}
    strange = {name: header for name, header in headers.items() if header[0] not in WEIGHT_DTYPES}
    usual = {name: header for name, header in headers.items() if name not in strange}
    findings = []
    for part, errors, warnings, why in (
        (strange, ALL, (), "Readers cast it without its scales, so that the values mean something else."),
        (usual, ("transformers",), ENGINES, "The engines cast all of them to the dtype that they serve in."),
    ):
        problems = tensor_problems(_shapes(part), part)
        if problems:
            expected = f"one of {enumerate_some(WEIGHT_DTYPES)} for all tensors"
            remedy = "Save the drafter in one dtype; published ones are in bfloat16."
            findings.append(Finding(_some(problems), expected, why, remedy, errors, warnings))
    return findings


TENSOR_RULES = (
    Rule("tensors_missing", "all tensors", ALL, _check_tensors_missing),
    Rule("tensor_prefix", "names without prefix", ("vLLM", "transformers"), _check_tensor_prefix),
    Rule("tensors_unexpected", "no other tensors", ALL, _check_tensors_unexpected),
    Rule("tensor_shapes", "shapes as config.json says", ALL, _check_tensor_shapes),
    Rule("tensor_dtypes", "bf16, fp16 or fp32, all alike", ALL, _check_tensor_dtypes),
)
