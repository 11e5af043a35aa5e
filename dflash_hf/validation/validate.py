# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM, SGLang, z-lab's `dflash` and transformers will all load a drafter as it was trained.

A wrongly loaded drafter fails nowhere: its drafts are just accepted less often. So each requirement is a rule of its
own (`structure.py`, `rotary.py`, `fields.py`, `tensors.py`, `values.py`), and all of them are looked at. The weights
are read from a local folder alone, and of a repository only their headers are fetched.
"""

import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .checkpoint import ALL, READERS, Checkpoint, Finding, Rule
from .fields import FIELD_RULES
from .reading import read_folder, read_repository
from .rotary import ROTARY_RULES
from .structure import STRUCTURE_RULES
from .tensors import TENSOR_RULES
from .values import VALUE_RULES


_WIDTH = 100
_CELLS = {"ok": "ok", "warning": "warning", "error": "ERROR", "unchecked": "?", "unconcerned": "-"}


def _unreadable(rule_id: str):
    return lambda checkpoint: [checkpoint.unreadable[rule_id]] if rule_id in checkpoint.unreadable else []


_FILE_RULES = tuple(
    Rule(rule_id, title, ALL, _unreadable(rule_id))
    for rule_id, title in (
        ("folder", "the folder or repository is there"),
        ("config_file", "config.json is a JSON object"),
        ("weights_file", "the tensor headers can be read"),
    )
)
RULES = (*_FILE_RULES, *STRUCTURE_RULES, *ROTARY_RULES, *FIELD_RULES, *TENSOR_RULES, *VALUE_RULES)


@dataclass(frozen=True)
class RuleResult:
    """What became of one rule.

    Args:
        rule: The rule.
        findings: What violates it; None where that could not be told.
    """

    rule: Rule
    findings: list[Finding] | None

    def status(self, reader: str) -> str:
        """One of "ok", "warning", "error", "unchecked" and "unconcerned" for one of `READERS`."""
        if any(reader in finding.errors for finding in self.findings or []):
            return "error"
        if any(reader in finding.warnings for finding in self.findings or []):
            return "warning"
        if reader not in self.rule.readers:
            return "unconcerned"
        return "unchecked" if self.findings is None else "ok"


@dataclass(frozen=True)
class ValidationReport:
    """All rules, what they found, and how to serve the drafter; `print` it for a table.

    Args:
        checkpoint: What was looked at.
        results: One result per rule, in the order of `RULES`.
    """

    checkpoint: Checkpoint
    results: list[RuleResult]

    @property
    def ok(self) -> bool:
        """Whether no reader has an error. Warnings do not count."""
        return not any(finding.errors for result in self.results for finding in result.findings or [])

    def ok_for(self, reader: str) -> bool:
        """Whether one of `READERS` has no error."""
        return all(result.status(reader) != "error" for result in self.results)

    def findings(self, rule_id: str) -> list[Finding]:
        """What violates one rule."""
        return next(result for result in self.results if result.rule.id == rule_id).findings or []

    def status(self, rule_id: str, reader: str) -> str:
        """What became of one rule for one of `READERS`, as in [`RuleResult.status`]."""
        return next(result for result in self.results if result.rule.id == rule_id).status(reader)

    def serving_commands(self) -> dict[str, str]:
        """For each of `READERS`, the command or snippet that drafts with this checkpoint."""
        return serving_commands(self.checkpoint)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "checkpoint": self.checkpoint.name,
            "revision": self.checkpoint.revision,
            "ok": self.ok,
            "readers": {name: {"version": READERS[name], "ok": self.ok_for(name)} for name in READERS},
            "summary": _summary(self.checkpoint),
            "rules": [_result_to_dict(result) for result in self.results],
            "serving": self.serving_commands(),
        }

    def __str__(self) -> str:
        return "\n".join(_report_lines(self))


def validate_checkpoint(folder_or_repo: str | Path, revision: str | None = None) -> ValidationReport:
    """Check a drafter against what each of its readers needs.

    Args:
        folder_or_repo: A local folder, whose weights are looked through for NaN, or a repository of the Hub, of which
            the small files and the headers of the tensors are fetched.
        revision: Branch, tag or commit of a repository.

    Returns:
        A report with every problem of every rule; `.ok` says whether there is no error, `print` shows a table and the
        serving commands. What cannot be read (no such folder, broken files) is a problem like the others.

    Raises:
        ValueError: `revision` is given for a local folder.

    Example:
        >>> print(validate_checkpoint("z-lab/Qwen3.6-27B-DFlash"))  # doctest: +SKIP
    """
    path = Path(folder_or_repo)
    if path.exists():
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} was given for the local {path}: only repositories of the Hub have revisions. "
                "Leave it out, or give a repository."
            )
        checkpoint = read_folder(path, str(folder_or_repo))
    else:
        checkpoint = read_repository(str(folder_or_repo), revision)
    return ValidationReport(checkpoint, [RuleResult(rule, _apply(rule, checkpoint)) for rule in RULES])


def _apply(rule: Rule, checkpoint: Checkpoint) -> list[Finding] | None:
    if rule in _FILE_RULES:
        skipped = "folder" in checkpoint.unreadable and rule.id != "folder"
    else:
        skipped = (checkpoint.headers if rule in TENSOR_RULES else checkpoint.config) is None
    return None if skipped else rule.check(checkpoint)


def serving_commands(checkpoint: Checkpoint) -> dict[str, str]:
    """For each of `READERS`, the command or snippet that drafts with this checkpoint.

    Args:
        checkpoint: The drafter. Where its block size is unknown the commands say `BLOCK_SIZE`, and `TARGET` stands for
            a target that neither the configuration nor the card names.

    Returns:
        Text by reader; empty without a readable `config.json`.
    """
    if checkpoint.config is None:
        return {}
    name, revision, size = checkpoint.name, checkpoint.revision, checkpoint.block_size
    target = checkpoint.base_model or "TARGET"
    speculative = {
        "method": "dflash",
        "model": name,
        **({"revision": revision} if revision else {}),
        "num_speculative_tokens": "BLOCK_SIZE - 1" if size is None else size - 1,
    }
    speculative_config = shlex.quote(json.dumps(speculative))
    gap = " " if len(speculative_config) < _WIDTH - 30 else " \\\n        "
    draft_revision = f" \\\n    --speculative-draft-model-revision {shlex.quote(revision)}" if revision else ""
    return {
        "vLLM": f"vllm serve {shlex.quote(target)} \\\n    --speculative-config{gap}{speculative_config}",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
            f"    --speculative-algorithm DFLASH \\\n"
            f"    --speculative-draft-model-path {shlex.quote(name)} \\\n"
            f"    --speculative-num-draft-tokens {size or 'BLOCK_SIZE'}{draft_revision}"
        ),
        "z-lab": _snippet(checkpoint, target, "dflash", "dense targets only")
        + "output_ids = drafter.spec_generate(\n"
        + "    target, input_ids, max_new_tokens=256, stop_token_ids=[tokenizer.eos_token_id]\n)",
        "transformers": _snippet(
            checkpoint, target, "dflash_hf", "for targets that generate() accepts: no hybrid ones"
        )
        + "output_ids = target.generate(\n"
        + '    input_ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=256\n)',
    }


def _snippet(checkpoint: Checkpoint, target: str, package: str, note: str) -> str:
    revision = f", revision={checkpoint.revision!r}" if checkpoint.revision else ""
    return (
        f"from {package} import DFlashDraftModel  # {note}\n"
        f"target = AutoModelForCausalLM.from_pretrained({target!r}, dtype=torch.bfloat16)\n"
        f"drafter = DFlashDraftModel.from_pretrained({checkpoint.name!r}{revision}, dtype=torch.bfloat16)\n"
    )


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    headers = checkpoint.headers
    return {
        "tensors": None if headers is None else len(headers),
        "parameters": None if headers is None else sum(prod(shape) for _, shape in headers.values()),
        "dtypes": None if headers is None else sorted({dtype for dtype, _ in headers.values()}),
        "values_read": headers is not None and checkpoint.folder is not None,
        "block_size": checkpoint.block_size,
        "target_layer_ids": checkpoint.taps,
        "num_target_layers": checkpoint.value("num_target_layers"),
        "base_model": checkpoint.base_model,
    }


def _result_to_dict(result: RuleResult) -> dict[str, Any]:
    findings = [
        {
            "errors": list(finding.errors),
            "warnings": list(finding.warnings),
            "found": finding.found,
            "expected": finding.expected,
            "why": finding.why,
            "remedy": finding.remedy,
        }
        for finding in result.findings or []
    ]
    status = {reader: result.status(reader) for reader in READERS}
    return {"id": result.rule.id, "title": result.rule.title, "status": status, "findings": findings}


def _report_lines(report: ValidationReport) -> Iterator[str]:
    yield from _wrap(_headline(report.checkpoint), "")
    yield ""
    yield f"{'':<18}  {'':<34}  {'vLLM':<8} {'SGLang':<8} {'z-lab':<8} transformers"
    for result in report.results:
        cells = [f"{_CELLS[result.status(reader)]:<8}" for reader in READERS]
        yield f"{result.rule.id:<18}  {result.rule.title:<34}  {' '.join(cells)}".rstrip()
    yield ""
    yield from _wrap(f"Checked against {', '.join(READERS.values())}. -: not concerned. ?: could not be told.", "")
    if report.checkpoint.headers is not None and report.checkpoint.folder is None:
        yield from _wrap(_values_not_read(report.checkpoint), "")
    for result in report.results:
        for finding in result.findings or []:
            yield from _finding_lines(result.rule, finding)
    yield ""
    yield _verdict(report)
    for reader, command in report.serving_commands().items():
        yield ""
        yield f"{READERS[reader]}{'' if report.ok_for(reader) else ' (has errors, see above)'}:"
        yield from textwrap.indent(command, "    ").splitlines()


def _values_not_read(checkpoint: Checkpoint) -> str:
    revision = f" --revision {shlex.quote(checkpoint.revision)}" if checkpoint.revision else ""
    return (
        "Only the headers of the tensors were fetched: the values were not read, and may hold NaN. They are looked "
        f"through once they are here: `hf download {shlex.quote(checkpoint.name)}{revision}`, then this again."
    )


def _headline(checkpoint: Checkpoint) -> str:
    summary = _summary(checkpoint)
    parts = []
    if summary["tensors"] is not None:
        parts.append(
            f"{summary['tensors']} tensors, {summary['parameters']:,} parameters, {'/'.join(summary['dtypes'])}"
        )
    if summary["block_size"] is not None:
        parts.append(f"block size {summary['block_size']}")
    if summary["target_layer_ids"] is not None:
        taps = ", ".join(str(tap) for tap in summary["target_layer_ids"])
        parts.append(f"reads layers {taps} of {summary['num_target_layers'] or '?'}")
    name = f"{checkpoint.name}{f' at {checkpoint.revision}' if checkpoint.revision else ''}"
    return f"{name}: {'; '.join(parts) or 'nothing could be read'}"


def _finding_lines(rule: Rule, finding: Finding) -> Iterator[str]:
    yield ""
    for label, readers in (("ERROR", finding.errors), ("warning", finding.warnings)):
        if readers:
            yield f"{label} for {', '.join(readers)}: {rule.id}"
    rows = (("found", finding.found), ("expected", finding.expected), ("why", finding.why), ("do", finding.remedy))
    for label, text in rows:
        lines = text.splitlines()
        for number, line in enumerate(lines):
            head = f"    {label + ':' if number == 0 else '':<10}{'- ' if len(lines) > 1 else ''}"
            yield from _wrap(line, head)


def _wrap(text: str, head: str) -> list[str]:
    later = " " * len(head)
    wrapper = textwrap.TextWrapper(_WIDTH, initial_indent=head, subsequent_indent=later, break_on_hyphens=False)
    return wrapper.wrap(text) or [head.rstrip()]


def _verdict(report: ValidationReport) -> str:
    findings = [finding for result in report.results for finding in result.findings or []]
    errors = sum(bool(finding.errors) for finding in findings)
    warnings = sum(bool(finding.warnings) and not finding.errors for finding in findings)
    if errors:
        bad = ", ".join(reader for reader in READERS if not report.ok_for(reader))
        return f"NOT OK: {errors} error(s), {warnings} warning(s). Do not use it with {bad}."
    return f"OK: no errors, {warnings} warning(s)."
