# SPDX-License-Identifier: Apache-2.0
"""`dflash-hf validate`: whether vLLM, SGLang, z-lab's `dflash` and transformers all load a drafter as it was trained.

It reads a folder or a repository, applies the rules of [`checkpoint_format`] and prints a table of rules and readers.
What cannot be read is a finding like all others.
"""

import argparse
import copy
import dataclasses
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import (
    list_repo_files,
    metadata_load,
    parse_safetensors_file_metadata,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HFValidationError, HTTPError, SafetensorsParsingError
from safetensors import safe_open
from yaml import YAMLError

from .chats import without_secrets
from .checkpoint_files import (
    WEIGHT_DTYPES,
    TensorHeaders,
    is_adapter_folder,
    joined_headers,
    merging_advice,
    read_tensor_headers,
)
from .checkpoint_format import (
    ALL,
    CODEBOOKS,
    CONFIG_RULES,
    OURS,
    READERS,
    TENSOR_RULES,
    Checkpoint,
    Finding,
    Rule,
    Said,
    enumerate_some,
    read_config,
)
from .configuration_dflash import DFlashDraftConfig


# --- The rules that need more than `config.json` and the tensors' headers.


# Targets read at least so much; a target that is here says it exactly.
SHORTEST_CONTEXT = 2048


def _context_length(checkpoint: Checkpoint) -> Said:
    length: Any = checkpoint.raw.get("max_position_embeddings")
    wanted = _target_context(checkpoint.base_model) or SHORTEST_CONTEXT
    if isinstance(length, int) and length < wanted:
        why = "vLLM up to 0.32 crashes on texts that are longer, and its later releases may again."
        remedy = "Write the target's max_position_embeddings: the weights do not depend on it."
        yield Finding(f"max_position_embeddings is {length}", f"at least {wanted}", why, remedy, (), ("vLLM",))


def _target_context(base_model: str | None) -> int | None:
    """The number of positions of a target that lies in a folder or in the Hub's cache; None where it is not known."""
    if base_model is None:
        return None
    try:
        file: Any = Path(base_model, "config.json")
        file = file if file.is_file() else try_to_load_from_cache(base_model, "config.json")
        config = json.loads(Path(file).read_text(encoding="utf-8"))
        length = config.get("text_config", config).get("max_position_embeddings")
    except (AttributeError, OSError, TypeError, ValueError):
        # It is not here, or its configuration cannot be read.
        return None
    return length if isinstance(length, int) else None


def _loader(checkpoint: Checkpoint) -> Said:
    try:
        _, refused = read_config(checkpoint.raw)
        problems = [f"{finding.found}; expected {finding.expected}" for finding in refused]
        if not problems:
            DFlashDraftConfig.from_dict(copy.deepcopy(checkpoint.raw))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Some value is of a type that no reader expects.
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        expected = "a configuration without gaps and contradictions"
        why = "DFlashDraftModel.from_pretrained refuses it rather than guess."
        remedy = "Correct each; most have a rule of their own, which tells what the other readers make of it."
        yield Finding("\n".join(problems), expected, why, remedy, OURS)


def _values(checkpoint: Checkpoint) -> Said:
    if checkpoint.folder is None or checkpoint.headers is None:
        yield None
        return
    broken = []
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            # Another rule is about other types.
            names = [name for name in tensors.keys() if checkpoint.headers[name][0] in WEIGHT_DTYPES]  # noqa: SIM118
            broken += [name for name in names if not tensors.get_tensor(name).isfinite().all()]
    if broken:
        found = f"{len(broken)} of {len(checkpoint.headers)} tensors hold NaN or infinity: {enumerate_some(broken)}"
        why = "Readers load it without a word, and none of its drafts is accepted."
        yield Finding(found, "finite values", why, "Copy the file again, or take an earlier checkpoint of the run.")


def _dead_selector(checkpoint: Checkpoint) -> Said:
    name = CODEBOOKS[1]
    if checkpoint.folder is None or checkpoint.headers is None:
        yield None
        return
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            if name in tensors.keys() and not tensors.get_tensor(name).any():  # noqa: SIM118
                why = "The selector adds nothing, and drafts are those of the plain logits."
                yield Finding(f"{name} is zero", "a trained selector", why, "Train it.", (), ALL)


def _file_rule(rule_id: str, title: str) -> Rule:
    return Rule(rule_id, title, ALL, lambda c: (finding for name, finding in c.unreadable.items() if name == rule_id))


_FILE_RULES = (
    _file_rule("folder", "the folder or repository is there"),
    _file_rule("config_file", "config.json is a JSON object"),
    _file_rule("weights_file", "the tensor headers can be read"),
)
RULES = (
    *_FILE_RULES,
    *CONFIG_RULES,
    Rule("context_length", "room for long texts", ("vLLM",), _context_length),
    Rule("loader", "dflash_hf accepts config.json", OURS, _loader),
    *TENSOR_RULES,
    Rule("tensor_values", "no NaN, no infinity", ALL, _values),
    Rule("dead_selector", "a selector that is trained", ALL, _dead_selector, True),
)


# --- Reading a folder or a repository.


_SMALL_FILES = ["*.json", "*.py", "README.md", "mask_embedding.pt"]
# What answers in place of the Hub, such as the login page of a network, sends no JSON.
_NETWORK_ERRORS = (OSError, HTTPError, HFValidationError, json.JSONDecodeError)
_HEADERS = "The tensors' names and shapes are looked up in the headers of the safetensors files."


def read_folder(path: Path, name: str, revision: str | None = None) -> Checkpoint:
    """Read a local folder: what could be read, and what went wrong with the rest.

    Args:
        path: The folder.
        name: What to call it in reports and serving commands.
        revision: The revision of the repository it is a copy of.
    """
    if not path.is_dir():
        why = "A drafter is a folder with config.json and safetensors files."
        finding = Finding(f"{path} is a file", "a folder or a repository", why, "Give its folder.")
        return Checkpoint(name, revision, unreadable={"folder": finding})
    checkpoint = dataclasses.replace(_read_small_files(path, name, revision), folder=path)
    try:
        return dataclasses.replace(checkpoint, headers=read_tensor_headers(path))
    except (OSError, ValueError) as error:
        checkpoint.unreadable["weights_file"] = _broken_weights(str(error))
    return checkpoint


def read_repository(name: str, revision: str | None) -> Checkpoint:
    """Read a repository of the Hub: its small files, and of its weights only the headers, unless they are cached."""
    access = "the network and the access token (HF_TOKEN, or `hf auth login`)"
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES))
    except _NETWORK_ERRORS as error:
        found = f"no folder {name}, and no such repository: {without_secrets(str(error))}"
        remedy = f"Check the spelling, the revision, {access}, without which a private repository is not found."
        expected, why = "a folder, or a repository that can be reached", "There is nothing to look at."
        return Checkpoint(name, revision, unreadable={"folder": Finding(found, expected, why, remedy)})
    checkpoint = _read_small_files(folder, name, revision)
    try:
        # Engines read those of the folder itself.
        listed = list_repo_files(name, revision=revision)
        files = sorted(file for file in listed if file.endswith(".safetensors") and "/" not in file)
        if files and all((folder / file).is_file() for file in files):
            return read_folder(folder, name, revision)
        return dataclasses.replace(checkpoint, headers=_fetch_headers(name, revision, folder, files))
    except SafetensorsParsingError as error:
        checkpoint.unreadable["weights_file"] = _broken_weights(f"{name}: {without_secrets(str(error))}")
    except _NETWORK_ERRORS as error:
        cached = read_folder(folder, name, revision)
        if cached.headers is not None:
            return cached
        found = f"{name}: the tensors' headers cannot be fetched: {without_secrets(str(error))}"
        remedy = f"Check {access}, or validate a local folder."
        checkpoint.unreadable["weights_file"] = Finding(found, "headers that can be fetched", _HEADERS, remedy)
    return checkpoint


def _fetch_headers(name: str, revision: str | None, folder: Path, files: list[str]) -> TensorHeaders:
    """The headers of a repository; a `SafetensorsParsingError` where it does not hold the weights of a drafter."""
    if not files:
        raise SafetensorsParsingError("there is no safetensors file. Push the drafter saved as safetensors")
    parsed = {file: parse_safetensors_file_metadata(name, file, revision=revision).tensors for file in files}
    headers: dict[str, TensorHeaders] = {
        file: {tensor: (info.dtype, tuple(info.shape)) for tensor, info in tensors.items()}
        for file, tensors in parsed.items()
    }
    try:
        return joined_headers(folder, headers)
    except (FileNotFoundError, ValueError) as error:
        raise SafetensorsParsingError(str(error)) from error


def _broken_weights(found: str) -> Finding:
    expected = "model.safetensors, or all shards with model.safetensors.index.json"
    return Finding(found, expected, _HEADERS, "Copy the files again, or save the drafter again.")


def _read_small_files(path: Path, name: str, revision: str | None) -> Checkpoint:
    """What is known of a drafter without its weights."""
    config, found, file = None, None, path / "config.json"
    remedy = "Copy it again, from the folder the drafter was saved to."
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            found, config = f"{file} holds {type(config).__name__}, not an object", None
    except OSError as error:
        if is_adapter_folder(path):
            remedy = f"It is the folder of an adapter. {merging_advice(path)}"
        found = f"no file {file}" if isinstance(error, FileNotFoundError) else f"{file}: {error}"
    except ValueError as error:
        found = f"{file} is not valid JSON: {error}"
    unreadable = {}
    if found is not None:
        why = "Every reader starts with it."
        unreadable["config_file"] = Finding(found, "config.json with an object", why, remedy)
    files = frozenset(entry.name for entry in path.iterdir())
    return Checkpoint(name, revision, files, config, None, _base_model(path, config or {}), unreadable)


def _base_model(folder: Path, config: dict[str, Any]) -> str | None:
    """The target, where `config.json` or the model card names it."""
    named = config.get("base_model")
    if named is None and (folder / "README.md").is_file():
        try:
            named = (metadata_load(folder / "README.md") or {}).get("base_model")
        except (ValueError, YAMLError):
            # A card that cannot be read names nothing; no reader of the drafter looks at it.
            return None
    named = named[0] if isinstance(named, list) and named else named
    return named if isinstance(named, str) else None


# --- The report.


_WIDTH = 100
_CELLS = {"ok": "ok", "warning": "warning", "error": "ERROR", "unchecked": "?", "unconcerned": "-"}
# Tensors that are named one a line in a printed report; JSON has all.
_MOST_LINES = 8


@dataclass(frozen=True)
class RuleResult:
    """What became of one rule: what violates it, or None where that could not be told."""

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

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        status = {reader: self.status(reader) for reader in READERS}
        findings = []
        for finding in self.findings or []:
            concerned = {"errors": [*finding.errors], "warnings": [*finding.warnings]}
            # They stand first, and stay lists.
            findings.append({**concerned, **dataclasses.asdict(finding), **concerned})
        return {"id": self.rule.id, "title": self.rule.title, "status": status, "findings": findings}


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
        return all(self.ok_for(reader) for reader in READERS)

    def ok_for(self, reader: str) -> bool:
        """Whether one of `READERS` has no error."""
        return all(result.status(reader) != "error" for result in self.results)

    def findings(self, rule_id: str | None = None) -> list[Finding]:
        """What violates one rule, or any."""
        concerned = [result for result in self.results if rule_id in (None, result.rule.id)]
        return [finding for result in concerned for finding in result.findings or []]

    def status(self, rule_id: str, reader: str) -> str:
        """What became of one rule for one of `READERS`, as in [`RuleResult.status`]."""
        return next(result for result in self.results if result.rule.id == rule_id).status(reader)

    def serving_commands(self) -> dict[str, str]:
        """For each of `READERS`, the command or snippet that drafts with this checkpoint."""
        return serving_commands(self.checkpoint)

    def summary(self) -> dict[str, Any]:
        """What drafter it is."""
        checkpoint, headers = self.checkpoint, self.checkpoint.headers
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

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "checkpoint": self.checkpoint.name,
            "revision": self.checkpoint.revision,
            "ok": self.ok,
            "readers": {name: {"version": READERS[name], "ok": self.ok_for(name)} for name in READERS},
            "summary": self.summary(),
            "rules": [result.to_dict() for result in self.results],
            "serving": self.serving_commands(),
        }

    def __str__(self) -> str:
        return "\n".join(_report_lines(self))


def _report_lines(report: ValidationReport) -> Iterator[str]:
    """The table, each finding, the verdict and the serving commands."""
    checkpoint = report.checkpoint
    name, revision = checkpoint.name, checkpoint.revision
    yield from _wrap(f"{name}{f' at {revision}' if revision else ''}: {_headline(report.summary())}")
    yield ""
    yield f"{'':<18}  {'':<34}  {'vLLM':<8} {'SGLang':<8} {'z-lab':<8} transformers"
    for result in report.results:
        cells = [f"{_CELLS[result.status(reader)]:<8}" for reader in READERS]
        yield f"{result.rule.id:<18}  {result.rule.title:<34}  {' '.join(cells)}".rstrip()
    yield ""
    yield from _wrap(f"Checked against {', '.join(READERS.values())}. -: not concerned. ?: could not be told.")
    if checkpoint.headers is not None and checkpoint.folder is None:
        flag = f" --revision {shlex.quote(revision)}" if revision else ""
        yield from _wrap(
            "Only the headers of the tensors were fetched: the values were not read, and may hold NaN. To check them, "
            f"run `hf download {shlex.quote(name)}{flag}` and then this again."
        )
    for result in report.results:
        for finding in result.findings or []:
            yield from _finding_lines(result.rule, finding)
    errors = sum(bool(finding.errors) for finding in report.findings())
    warnings = sum(bool(finding.warnings) and not finding.errors for finding in report.findings())
    bad = ", ".join(reader for reader in READERS if not report.ok_for(reader))
    yield ""
    yield (
        f"NOT OK: {errors} error(s), {warnings} warning(s). Do not use it with {bad}."
        if errors
        else (f"OK: no errors, {warnings} warning(s).")
    )
    for reader, command in report.serving_commands().items():
        yield from ("", f"{READERS[reader]}{'' if report.ok_for(reader) else ' (has errors, see above)'}:")
        yield from textwrap.indent(command, "    ").splitlines()


def _headline(summary: dict[str, Any]) -> str:
    parts = []
    if summary["tensors"] is not None:
        dtypes = "/".join(summary["dtypes"])
        parts.append(f"{summary['tensors']} tensors, {summary['parameters']:,} parameters, {dtypes}")
    if summary["block_size"] is not None:
        parts.append(f"block size {summary['block_size']}")
    if summary["target_layer_ids"] is not None:
        taps = ", ".join(map(str, summary["target_layer_ids"]))
        parts.append(f"reads layers {taps} of {summary['num_target_layers'] or '?'}")
    return "; ".join(parts) or "nothing could be read"


def _finding_lines(rule: Rule, finding: Finding) -> Iterator[str]:
    yield ""
    for label, readers in (("ERROR", finding.errors), ("warning", finding.warnings)):
        if readers:
            yield f"{label} for {', '.join(readers)}: {rule.id}"
    rows = (("found", finding.found), ("expected", finding.expected), ("why", finding.why), ("do", finding.remedy))
    for label, text in rows:
        lines = text.splitlines()
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
        for number, line in enumerate(lines):
            yield from _wrap(line, f"    {label + ':' if number == 0 else '':<10}{'- ' if len(lines) > 1 else ''}")


def _wrap(text: str, head: str = "") -> list[str]:
    later = " " * len(head)
    lines = textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=later, break_on_hyphens=False)
    return lines or [head.rstrip()]


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
    if not path.exists():
        checkpoint = read_repository(str(folder_or_repo), revision)
    elif revision is None:
        checkpoint = read_folder(path, str(folder_or_repo))
    else:
        raise ValueError(f"{path} is a local folder and has no revision={revision!r}: leave it out.")
    rules = [rule for rule in RULES if checkpoint.is_dflash2 or not rule.of_dflash2]
    return ValidationReport(checkpoint, [RuleResult(rule, _apply(rule, checkpoint)) for rule in rules])


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
    speculative: dict[str, Any] = {"method": "dflash", "model": name, "revision": revision}
    speculative["num_speculative_tokens"] = "BLOCK_SIZE - 1" if size is None else size - 1
    given = shlex.quote(json.dumps({key: value for key, value in speculative.items() if value is not None}))
    gap = " " if len(given) < _WIDTH - 30 else " \\\n        "
    draft_revision = f" \\\n    --speculative-draft-model-revision {shlex.quote(revision)}" if revision else ""
    hybrid = "for targets that generate() accepts: no hybrid ones"
    way = 'assistant_model=drafter, speculation_type="dflash", '
    if checkpoint.is_dflash2:
        # transformers knows no selector.
        way = "custom_generate=generation.speculative_decoding, drafter=drafter,\n    "
    return {
        "vLLM": f"vllm serve {shlex.quote(target)} \\\n    --speculative-config{gap}{given}",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
            f"    --speculative-algorithm DFLASH \\\n"
            f"    --speculative-draft-model-path {shlex.quote(name)} \\\n"
            f"    --speculative-num-draft-tokens {size or 'BLOCK_SIZE'}{draft_revision}"
        ),
        "z-lab": _snippet(checkpoint, target, "dflash", "dense targets only")
        + "output_ids = drafter.spec_generate(\n"
        + "    target, input_ids, max_new_tokens=256, stop_token_ids=[tokenizer.eos_token_id]\n)",
        "transformers": _snippet(checkpoint, target, "dflash_hf", "" if checkpoint.is_dflash2 else hybrid)
        + f"output_ids = target.generate(\n    input_ids, {way}max_new_tokens=256\n)",
    }


def _snippet(checkpoint: Checkpoint, target: str, package: str, note: str) -> str:
    revision = f", revision={checkpoint.revision!r}" if checkpoint.revision else ""
    name = "DFlash2DraftModel" if checkpoint.is_dflash2 else "DFlashDraftModel"
    more = ", generation" if checkpoint.is_dflash2 and package == "dflash_hf" else ""
    return (
        f"from {package} import {name}{more}{f'  # {note}' if note else ''}\n"
        f"target = AutoModelForCausalLM.from_pretrained({target!r}, dtype=torch.bfloat16)\n"
        f"drafter = {name}.from_pretrained({checkpoint.name!r}{revision}, dtype=torch.bfloat16)\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dflash-hf validate FOLDER_OR_REPO`.

    Args:
        argv: The words behind `dflash-hf validate`, or behind `dflash-hf`; None reads those of the process.

    Returns:
        Exit status: 0, or 1 where a checkpoint has errors. Bad usage ends the process with 2.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    parser = argparse.ArgumentParser(
        prog="dflash-hf validate",
        description="Check a drafter's config.json and tensor headers against what each of its readers needs, and "
        "print the serving command for each. The weights of a local folder are looked through for NaN, those of a "
        "repository are not fetched. Exit status: 0 without errors, 1 with errors.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="FOLDER_OR_REPO", help="a local folder or a repository of the Hub")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(words[1:] if words[:1] == ["validate"] else words)
    try:
        report = validate_checkpoint(args.checkpoint, revision=args.revision)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
