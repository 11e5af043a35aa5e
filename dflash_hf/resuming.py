# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, from which checkpoint it goes on, and whether it is the same run.

The record, `dflash_run.json` in every checkpoint, says what decides the course of a run. A checkpoint whose record
differs in target, tokenizer, data or rows is refused unless `allow_resume_changes` names what may differ.
"""

import hashlib
import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy
from transformers.utils import CONFIG_NAME, logging

from .callbacks import tell_of_grace
from .chats import check_address, describe, is_remote, without_credentials
from .checkpointing import (
    MANIFEST_NAME,
    SNAPSHOT_PREFIX,
    STAGING_PREFIX,
    check_disk_space,
    checkpoint_bytes,
    clean_up,
    last_complete_checkpoint,
    manifest_problems,
    step_of,
)
from .configuration_dflash import DFlashDraftConfig
from .documents import manifest_hashes
from .packing import PackedDataset
from .remote_checkpoints import fetch_checkpoint, remote_steps
from .training_args import CHANGES, LEARNING_ARGUMENTS, DFlashTrainingArguments
from .writing import remove


logger = logging.get_logger(__name__)

RECORD_NAME = "dflash_run.json"
EVALUATION_DUE = "evaluation_due"
FORMAT = 1

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "numpy")
# Documents of a large data set whose every token enters the hash; of the others the length does.
SAMPLED_DOCUMENTS = 4096
# Arguments that decide which rows a step sees.
ROW_ARGUMENTS = ("seed", "data_seed", "row_length", "dataloader_drop_last")
# Arguments that spread a step's rows over micro-batches.
SPLIT_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Optimizers whose state is the same.
ADAMW = ("adamw_torch", "adamw_torch_fused")
# Fields of a saved configuration that say how it was saved, or that Trainer takes from the tokenizer when it starts.
CONFIG_FIELDS_OF_SAVING = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# What arguments give an optimizer's groups, and no optimizer changes by itself.
SETTINGS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")


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
    lengths = np.asarray(rows._lengths, dtype=np.int64)
    count = len(lengths)
    sampled = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_DOCUMENTS)).astype(np.int64))
    parts = [lengths.tobytes()]
    for index in sampled.tolist():
        document = rows.documents[index]
        parts += [np.asarray(document[k], dtype=np.int64).tobytes() for k in ("input_ids", "supervised_spans")]
    return _digest(*parts)


def target_identity(model: PreTrainedModel) -> dict[str, Any]:
    """Where a target came from, and a hash of the ends of each of its tensors."""
    parts = []
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        ends = [flat[:8].float().cpu().numpy().tobytes(), flat[-8:].float().cpu().numpy().tobytes()]
        parts += [f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), *ends]
    # A configuration made in memory has neither id nor revision.
    origin = vars(model.config)
    return {"id": origin.get("_name_or_path"), "revision": origin.get("_commit_hash"), "digest": _digest(*parts)}


def git_commit(folder: Path) -> str | None:
    """The commit that a folder is at, with "+changes" if files differ from it; None outside a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _drafter_fields(config: DFlashDraftConfig) -> dict[str, Any]:
    """What of a drafter's configuration makes it another drafter, as JSON values."""
    fields = {k: v for k, v in config.to_dict().items() if k not in CONFIG_FIELDS_OF_SAVING}
    return json.loads(json.dumps(fields, default=str))


def run_record(
    args: DFlashTrainingArguments,
    drafter_config: DFlashDraftConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: Any,
    recipe: dict[str, Any] | None,
) -> dict[str, Any]:
    """What decides the course of a run, as JSON without any secret; `rows` are what it trains on."""
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    arguments = args.to_dict()
    record = {
        "format": FORMAT,
        "recipe": recipe,
        "drafter": _drafter_fields(drafter_config),
        "target": target_identity(target),
        "tokenizer": tokenizer_digest(tokenizer),
        "data": None,
        "rows": {"rows_per_step": per_step, **{name: arguments[name] for name in ROW_ARGUMENTS}},
        "ranks": args.world_size,
        "arguments": arguments,
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
    """The record of a checkpoint; a ValueError says that it cannot be read, or is of another format."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(
            f"{folder / RECORD_NAME} is no record of format {FORMAT}. Take another checkpoint; or delete this file "
            "and the checkpoint's manifest, which lists it, and name the checkpoint to resume it uncompared."
        )
    return record


def is_evaluation_due(folder: Path | None) -> bool:
    """Whether an interrupt left out the evaluation of a checkpoint."""
    return folder is not None and (folder / RECORD_NAME).exists() and bool(read_record(folder).get(EVALUATION_DUE))


def _differences(saved: dict[str, Any], own: dict[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{name} {saved.get(name)} there and {own[name]} here" for name in names if saved.get(name) != own[name]]


def _changes(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, str]:
    """What of `CHANGES` differs between two records, and how; what one of them does not know is taken for equal."""
    known = {kind: (saved[kind], own[kind]) for kind in CHANGES if saved[kind] is not None and own[kind] is not None}
    changes = {kind: _change(kind, there, here) for kind, (there, here) in known.items() if there != here}
    return {kind: change for kind, change in changes.items() if change}


def _change(kind: str, there: Any, here: Any) -> str:
    """How two entries of records differ, empty where they tell of the same."""
    if kind == "rows":
        return ", ".join(_differences(there, here, here))
    if kind == "tokenizer":
        return "another vocabulary, other rules or another chat template"
    same = there["digest"] == here["digest"]
    if kind == "target":
        names = [f"{model['id']} (revision {model['revision']})" for model in (there, here)]
        return "" if same else f"{names[0]} there and {names[1]} here: other weights or another dtype"
    if not same:
        told = f"{there['documents']} documents in {there['rows']} rows there and {here['documents']} in "
        return f"{told}{here['rows']} here, or other tokens in them"
    # Only some tokens of a large data set are hashed, and the manifest knows of them all.
    if there.get("manifests", here["manifests"]) == here["manifests"]:
        return ""
    names = [", ".join(h[:12] for h in data["manifests"]) or "none" for data in (there, here)]
    return f"documents of another manifest, {names[0]} there and {names[1]} here"


def _optimizer(record: dict[str, Any]) -> str:
    """Name of the optimizer whose state a checkpoint holds."""
    name = record["arguments"]["optim"]
    return ("muon and " if record["arguments"].get("muon") else "") + (ADAMW[0] if name in ADAMW else name)


def check_record(folder: Path, own: dict[str, Any], allowed: list[str]) -> None:
    """Refuse to resume a checkpoint of a run that the one with a record would not continue, naming every difference.

    What of `CHANGES` is allowed to differ, and what else has changed, is warned of.
    """
    if not (folder / RECORD_NAME).exists():
        logger.warning(f"{folder} has no {RECORD_NAME}: whether it is of this target, tokenizer and data is unknown.")
        if (folder / CONFIG_NAME).exists():
            _check_drafter(folder, _drafter_fields(DFlashDraftConfig.from_pretrained(folder)), own["drafter"])
        return
    saved = read_record(folder)
    _check_drafter(folder, saved["drafter"], own["drafter"])
    changes = _changes(saved, own)
    refused = [f"{kind}: {change}" for kind, change in changes.items() if kind not in allowed]
    notes = [f"{kind}: {change}" for kind, change in changes.items() if kind in allowed]
    if _optimizer(saved) != _optimizer(own):
        refused.append(
            f"optim: {_optimizer(saved)} there and {_optimizer(own)} here, which cannot take its state; for another "
            "optimizer start a new run from the checkpoint's drafter (model=FOLDER, without resume_from_checkpoint)"
        )
    ranks = f"{saved['ranks']} ranks there and {own['ranks']} here"
    splits = _differences(saved["arguments"], own["arguments"], SPLIT_ARGUMENTS)
    if saved["ranks"] != own["ranks"] and own["drafter"]["attention_dropout"] and "rows" not in allowed:
        refused.append(f"rows: {ranks}, and dropout draws per rank")
    elif saved["ranks"] != own["ranks"]:
        notes.append(f"{ranks}: the same but for rounding")
    elif splits and saved["rows"] == own["rows"]:
        notes.append(f"{', '.join(splits)}: the same but for rounding")
    if refused:
        raise ValueError(
            "\n  ".join([f"The checkpoint {folder} is of another run, which this one would not continue:", *refused])
            + f"\nResume with what it was made with, or name what may differ in allow_resume_changes ({CHANGES})."
        )
    names = [name for name in LEARNING_ARGUMENTS if name in saved["arguments"]]
    notes += _differences(saved["arguments"], own["arguments"], names)
    notes += _differences(saved["versions"], own["versions"], own["versions"])
    if notes:
        logger.warning(f"Resuming {folder} with changes: {'; '.join(notes)}.")


def _check_drafter(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    # Its weights may fit all the same, with another window or other layers of the target.
    if differences := _differences(saved, own, sorted(saved.keys() & own.keys())):
        raise ValueError(
            f"The checkpoint {folder} is of another drafter: {', '.join(differences)}. Resume with the drafter it was "
            "made from, or load it with from_pretrained, change it with dflash_hf.adapt, and train anew."
        )


def prepare_output(args: DFlashTrainingArguments, model: torch.nn.Module) -> None:
    """Tidy up what a kill left in the output folder, and raise [`DiskSpaceError`] where no checkpoint would fit."""
    folder = Path(str(args.output_dir))
    clean_up(folder)
    for prefix in (SNAPSHOT_PREFIX, STAGING_PREFIX):
        for left in folder.glob(f"{prefix}*"):
            remove(left)
    num_bytes = checkpoint_bytes(model, None, args.save_only_model)
    if args.save_strategy != SaveStrategy.NO:
        check_disk_space(folder, num_bytes)
    # An interrupted run writes one whatever its strategy.
    tell_of_grace(num_bytes)
    if args.save_only_model:
        logger.warning(
            "save_only_model=True: checkpoints hold no optimizer, so a run that is killed or interrupted cannot go on."
        )


def resume_folder(
    args: DFlashTrainingArguments, record: dict[str, Any], resume: str | Path | bool | None
) -> Path | None:
    """The checkpoint to go on from, complete and of the run that the record is of; None to start anew.

    `resume` is a checkpoint or a folder of them, an fsspec address of either, or True for the newest complete one of
    `output_dir` and `remote_checkpoint_dir`; None for what the arguments say. A ValueError says that there is none,
    that it is incomplete, or that it is of another run.
    """
    output_dir = str(args.output_dir)
    resume = args.resume_from_checkpoint if resume is None else resume
    # On the command line both are words.
    resume = {"true": True, "false": False}.get(str(resume).lower(), resume)
    if resume is None or resume is False:
        return None
    if resume is True:
        folder = _newest(output_dir, args.remote_checkpoint_dir)
    elif is_remote(resume):
        check_address(str(resume))
        folder = fetch_checkpoint(str(resume), output_dir)
    else:
        folder = _given(Path(resume))
    # Trainer would start them anew in silence.
    missing = [n for n in (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME) if not (folder / n).exists()]
    if missing:
        raise ValueError(
            f"The checkpoint {folder} has no {', '.join(missing)} (save_only_model leaves them out). Take another "
            "one, or start a new run from its drafter (model=FOLDER, without resume_from_checkpoint)."
        )
    check_record(folder, record, args.allow_resume_changes or [])
    return folder


def _newest(output_dir: str, remote: str | None) -> Path:
    """The newest complete checkpoint of a folder and of an address, saying which are skipped and why."""
    folder, steps = last_complete_checkpoint(output_dir), []
    if remote is not None:
        here = -1 if folder is None else step_of(folder) or 0
        try:
            steps = [step for step in remote_steps(remote) if step > here]
        # Whatever a file system raises, what is here can be resumed.
        except Exception as error:
            logger.warning(f"{remote} does not answer ({describe(error)}); only output_dir is looked at.")
    for step in reversed(steps):
        try:
            return fetch_checkpoint(f"{str(remote).rstrip('/')}/checkpoint-{step}", output_dir)
        except (OSError, ValueError) as error:
            logger.warning(f"checkpoint-{step} at {remote} is skipped: {describe(error)}")
    if folder is None:
        raise ValueError(
            f"resume_from_checkpoint=True, and output_dir={output_dir!r} holds no complete checkpoint"
            f"{f', nor could one be fetched from {remote}' if remote else ''}. Name one, or leave "
            "resume_from_checkpoint out to start anew."
        )
    return folder


def _given(folder: Path) -> Path:
    """A checkpoint that was named, or the newest complete one of a folder of them."""
    if not folder.is_dir():
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} is no folder. Give a checkpoint-N of an earlier run, or True for "
            "the newest complete one of output_dir."
        )
    newest = last_complete_checkpoint(folder) if step_of(folder) is None else None
    if newest is not None:
        return newest
    problems = manifest_problems(folder)
    if problems and (folder / MANIFEST_NAME).exists():
        raise ValueError(
            f"The checkpoint {folder} is incomplete: {'; '.join(problems)}. Give an older one, or "
            "resume_from_checkpoint=True for the newest complete one of output_dir."
        )
    if problems:
        logger.warning(f"{folder} has no {MANIFEST_NAME}; whether it is complete is unknown.")
    return folder


@contextmanager
def own_settings(optimizer: Any, scheduler: Any, state: TrainerState, checkpoint: str | None) -> Iterator[None]:
    """Around the loading of a checkpoint's optimizer and schedule, after which a run's own arguments act.

    The loaded states hold learning rate, weight decay and the like of the run that saved them, which would rule in
    silence. `state` is the run's own. A checkpoint beyond its last step is refused.
    """
    if checkpoint is None:
        yield
        return
    saved, num_steps = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))), state.max_steps
    step = saved.global_step
    if step > num_steps:
        raise ValueError(
            f"The checkpoint {checkpoint} is of step {step}, and the run ends with step {num_steps}. Raise max_steps "
            "or num_train_epochs, or resume from an earlier checkpoint."
        )
    settings = [{k: group[k] for k in SETTINGS if k in group} for group in optimizer.param_groups]
    rates = list(scheduler.base_lrs) if type(scheduler) is LambdaLR else None
    yield
    before = float(optimizer.param_groups[0]["lr"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    if rates is not None:
        # Schedules of this kind scale the rates of the arguments.
        scheduler.base_lrs = rates
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler._last_lr = [rate * factor for rate, factor in zip(rates, factors, strict=True)]
        for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate
    now = float(optimizer.param_groups[0]["lr"])
    is_other = saved.max_steps != num_steps or not math.isclose(before, now, rel_tol=1e-9)
    if is_other and state.is_world_process_zero:
        logger.warning(
            f"The schedule is not that of {checkpoint}: {saved.max_steps} steps there and {num_steps} here; after "
            f"step {step} the learning rate goes on from {now:.4g} instead of {before:.4g}."
        )
