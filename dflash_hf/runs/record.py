# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, written into every checkpoint and compared when one is resumed."""

import hashlib
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.addresses import without_credentials
from ..data.manifest import manifest_hashes
from ..data.packing import PackedDataset


logger = logging.get_logger(__name__)

RECORD_NAME = "dflash_run.json"
FORMAT = 1
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "numpy")
# Documents of a large data set whose every token enters the hash; of the others the length does.
SAMPLED_DOCUMENTS = 4096
# What may differ on resuming once `allow_resume_changes` names it.
CHANGES = ("target", "tokenizer", "data", "rows")
# Arguments that decide which rows a step sees.
ROW_ARGUMENTS = ("seed", "data_seed", "row_length", "dataloader_drop_last")
# Arguments that spread a step's rows over micro-batches.
SPLIT_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Arguments that decide what is learned from them: changing one on the way is a choice, of which a resume tells.
LEARNING_ARGUMENTS = (
    *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("muon", "num_anchors", "max_anchors_per_row", "context_noise", "objective", "loss_gamma", "dpace_alpha"),
    *("slot_weights", "loss_temperature", "cross_entropy_share"),
    *("bf16", "fp16", "tf32", "ignore_data_skip", "target_model_init_kwargs"),
)
# Optimizers whose state is the same.
ADAMW = ("adamw_torch", "adamw_torch_fused")
# Fields of a saved configuration that say how it was saved, or that Trainer takes from the tokenizer when it starts.
CONFIG_FIELDS_OF_SAVING = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Hash of what turns chats into token ids: vocabulary, rules, special tokens and chat template."""
    if tokenizer is None:
        return None
    parts: dict[str, Any] = {"vocabulary": tokenizer.get_vocab(), "template": tokenizer.chat_template}
    parts["special"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
        # A call with padding or truncation leaves its settings there.
        parts["rules"] = {k: v for k, v in rules.items() if k not in ("model", "padding", "truncation")}
        parts["merges"] = rules["model"].get("merges")
    return _digest(json.dumps(parts, sort_keys=True).encode())


def data_digest(rows: PackedDataset) -> str:
    """Hash of the number of documents, their lengths, and tokens and spans of up to 4096 of them, evenly spread."""
    documents = rows.documents
    lengths = np.asarray(rows._lengths, dtype=np.int64)
    count = len(lengths)
    sampled = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_DOCUMENTS)).astype(np.int64))
    parts = [lengths.tobytes()]
    for index in sampled.tolist():
        document = documents[index]
        parts.append(np.asarray(document["input_ids"], dtype=np.int64).tobytes())
        parts.append(np.asarray(document["supervised_spans"], dtype=np.int64).tobytes())
    return _digest(*parts)


def target_identity(model: PreTrainedModel) -> dict[str, Any]:
    """Where a target came from, and a hash of the ends of each of its tensors."""
    parts = []
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        ends = [flat[:8].float().cpu().numpy().tobytes(), flat[-8:].float().cpu().numpy().tobytes()]
        parts += [f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), *ends]
    # A configuration made in memory has neither.
    origin = vars(model.config)
    return {
        "id": origin.get("_name_or_path"),
        "revision": origin.get("_commit_hash"),
        "digest": _digest(*parts),
    }


def git_commit(folder: Path) -> str | None:
    """The commit that a folder is at, with "+changes" if files differ from it; None outside a repository."""
    outputs = []
    for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        outputs.append(done.stdout.strip())
    return outputs[0] + ("+changes" if outputs[1] else "")


def run_record(trainer: Any) -> dict[str, Any]:
    """What decides the course of a run, as JSON; no secret is in it.

    Args:
        trainer: The [`DFlashTrainer`] that trains.
    """
    args, rows = trainer.args, trainer.train_dataset
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    drafter = trainer._drafter_config.to_dict()
    record = {
        "format": FORMAT,
        "recipe": trainer.recipe,
        "drafter": {k: v for k, v in drafter.items() if k not in CONFIG_FIELDS_OF_SAVING},
        "target": target_identity(trainer.target.model),
        "tokenizer": tokenizer_digest(trainer._tokenizer),
        "data": None,
        "rows": {"rows_per_step": per_step, **{name: getattr(args, name) for name in ROW_ARGUMENTS}},
        "ranks": args.world_size,
        "arguments": args.to_dict(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "git_commit": git_commit(Path(__file__).parent),
        "script_git_commit": git_commit(Path(sys.argv[0]).resolve().parent),
    }
    if isinstance(rows, PackedDataset):
        record["data"] = {"documents": len(rows.documents), "rows": len(rows), "digest": data_digest(rows)}
        record["data"]["manifests"] = manifest_hashes(rows.documents)
    return without_credentials(json.loads(json.dumps(record, default=str)))


def write_record(record: dict[str, Any], folder: Path) -> None:
    """Write a record into a checkpoint."""
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a checkpoint.

    Raises:
        ValueError: It cannot be read, or is of another format.
    """
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(
            f"{folder / RECORD_NAME} is no record of format {FORMAT}, so what run the checkpoint is of cannot be "
            "told. Take another checkpoint; or delete this file and the checkpoint's manifest, which lists it, and "
            "name the checkpoint to resume it without the comparison."
        )
    return record


def is_same_run(folder: Path, own: dict[str, Any]) -> bool:
    """Whether a checkpoint is one that the run with a record comes to as well, or that says nothing of itself."""
    try:
        saved = read_record(folder)
    except (OSError, ValueError):
        return True
    different = [kind for kind in CHANGES if _difference(kind, saved[kind], own[kind])]
    learning = [name for name in LEARNING_ARGUMENTS if name in saved["arguments"]]
    return not different and not _differences(saved["arguments"], own["arguments"], learning)


def check_record(folder: Path, own: dict[str, Any], allowed: list[str], has_random_layers: bool) -> None:
    """Refuse to resume a checkpoint of a run that this one would not continue.

    Args:
        folder: The checkpoint.
        own: The record of this run.
        allowed: Which of "target", "tokenizer", "data" and "rows" may differ.
        has_random_layers: Whether the drafter draws random numbers on each rank (dropout).

    Raises:
        ValueError: Naming every difference.
    """
    path = folder / RECORD_NAME
    if not path.exists():
        logger.warning(f"{folder} has no {RECORD_NAME}: whether it is of this target, tokenizer and data is unknown.")
        return
    saved = read_record(folder)
    refused: list[str] = []
    notes: list[str] = []
    for kind in CHANGES:
        difference = _difference(kind, saved[kind], own[kind])
        if difference:
            (notes if kind in allowed else refused).append(f"{kind}: {difference}")
    there, here = (_optimizer(record["arguments"]) for record in (saved, own))
    if there != here:
        refused.append(
            f"optim: {there} there and {here} here, which cannot take its state; for another optimizer start a new "
            "run from the checkpoint's drafter (model=FOLDER, without resume_from_checkpoint)"
        )
    if saved["ranks"] != own["ranks"]:
        if has_random_layers and "rows" not in allowed:
            refused.append(f"rows: {saved['ranks']} ranks there and {own['ranks']} here, and dropout draws per rank")
        else:
            notes.append(f"{saved['ranks']} ranks there and {own['ranks']} here: the same but for rounding")
    elif saved["rows"] == own["rows"]:
        splits = _differences(saved["arguments"], own["arguments"], list(SPLIT_ARGUMENTS))
        notes += [f"{', '.join(splits)}: the same but for rounding"] if splits else []
    if refused:
        raise ValueError(
            f"The checkpoint {folder} is of another run, which this one would not continue:\n  "
            + "\n  ".join(refused)
            + f"\nResume with what it was made with, or name what may differ in allow_resume_changes ({CHANGES})."
        )
    learning = [name for name in LEARNING_ARGUMENTS if name in saved["arguments"]]
    notes += _differences(saved["arguments"], own["arguments"], learning)
    notes += _differences(saved["versions"], own["versions"], list(own["versions"]))
    if notes:
        logger.warning(f"Resuming {folder} with changes: {'; '.join(notes)}.")


def _difference(kind: str, saved: Any, own: Any) -> str:
    if saved == own or saved is None or own is None:
        return ""
    if kind == "rows":
        return ", ".join(_differences(saved, own, list(own)))
    if kind == "target":
        if saved["digest"] == own["digest"]:
            return ""
        return (
            f"{saved['id']} (revision {saved['revision']}) there and {own['id']} (revision {own['revision']}) here: "
            "other weights or another dtype"
        )
    if kind == "data":
        return _data_difference(saved, own)
    return "another vocabulary, other rules or another chat template"


def _optimizer(arguments: dict[str, Any]) -> str:
    """Name of the optimizer whose state a checkpoint holds."""
    name = arguments["optim"]
    return ("muon and " if arguments.get("muon") else "") + (ADAMW[0] if name in ADAMW else name)


def _data_difference(saved: dict[str, Any], own: dict[str, Any]) -> str:
    if saved["digest"] != own["digest"]:
        return (
            f"{saved['documents']} documents in {saved['rows']} rows there and {own['documents']} in {own['rows']} "
            "here, or other tokens in them"
        )
    # Only some tokens of a large data set are hashed, and the manifest knows of them all.
    if saved.get("manifests", own["manifests"]) != own["manifests"]:
        there, here = (", ".join(h[:12] for h in d["manifests"]) or "none" for d in (saved, own))
        return f"documents of another manifest, {there} there and {here} here"
    return ""


def _differences(saved: dict[str, Any], own: dict[str, Any], names: list[str]) -> list[str]:
    names = [name for name in names if saved.get(name) != own[name]]
    return [f"{name} {saved.get(name)} there and {own[name]} here" for name in names]


__all__ = [
    "check_record",
    "data_digest",
    "git_commit",
    "is_same_run",
    "read_record",
    "run_record",
    "tokenizer_digest",
    "write_record",
]
