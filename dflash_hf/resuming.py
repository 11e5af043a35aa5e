# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, from which checkpoint it goes on, and whether it is the same run."""

import hashlib
import json
import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
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
from .packing import PackedDataset
from .remote_checkpoints import fetch_checkpoint, remote_steps
from .tokenizing import manifest_hashes
from .training_args import CHANGES, LEARNING_ARGUMENTS


# --- What a run is made of, written into every checkpoint and compared when one is resumed.


logger = logging.get_logger(__name__)

RECORD_NAME = "dflash_run.json"

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


# --- Which checkpoint a run goes on from, and whether it is the same run.


def prepare_output(trainer: Any) -> None:
    """Tidy up what a kill left in the output folder, and check that a checkpoint fits on its disk.

    Args:
        trainer: The [`DFlashTrainer`] that is about to train, which holds its output folder alone.

    Raises:
        DiskSpaceError: No checkpoint would fit.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    if folder.exists():
        clean_up(folder)
        for left in [path for prefix in (SNAPSHOT_PREFIX, STAGING_PREFIX) for path in folder.glob(f"{prefix}*")]:
            shutil.rmtree(left, ignore_errors=True)
    num_bytes = checkpoint_bytes(trainer.model, None, args.save_only_model)
    if args.save_strategy != SaveStrategy.NO:
        check_disk_space(folder, num_bytes)
    # An interrupted run writes one whatever its strategy.
    tell_of_grace(num_bytes)
    if args.save_only_model:
        logger.warning(
            "save_only_model=True: checkpoints hold no optimizer, so a run that is killed or interrupted cannot go on."
        )


def resume_folder(trainer: Any, resume: str | Path | bool | None) -> Path | None:
    """The checkpoint to go on from, complete and of the same run.

    Args:
        trainer: The [`DFlashTrainer`] that is about to train.
        resume: A checkpoint or a folder of them, an fsspec address of either, or True for the newest complete one of
            `output_dir` and `remote_checkpoint_dir`; None for what the arguments say.

    Returns:
        Its folder, or None to start anew.

    Raises:
        ValueError: There is none, it is incomplete, or it is of another run.
    """
    output_dir = trainer.args.output_dir
    if resume is None:
        resume = trainer.args.resume_from_checkpoint
    # On the command line both are words.
    resume = {"true": True, "false": False}.get(str(resume).lower(), resume)
    if resume is None or resume is False:
        _tell_of_newer(trainer, 0)
        _tell_of_own(trainer)
        return None
    if resume is True:
        folder = _newest(output_dir, trainer.args.remote_checkpoint_dir)
    elif is_remote(resume):
        check_address(str(resume))
        folder = fetch_checkpoint(str(resume), output_dir)
    else:
        folder = Path(resume)
        if step_of(folder) is None and folder.is_dir():
            folder = last_complete_checkpoint(folder) or folder
    if not folder.is_dir():
        raise ValueError(
            f"resume_from_checkpoint={str(resume)!r} is no folder. Give a checkpoint-N of an earlier run, or True for "
            "the newest complete one of output_dir."
        )
    problems = manifest_problems(folder)
    if problems and (folder / MANIFEST_NAME).exists():
        raise ValueError(
            f"The checkpoint {folder} is incomplete: {'; '.join(problems)}. Give an older one, or "
            "resume_from_checkpoint=True for the newest complete one of output_dir."
        )
    if problems:
        logger.warning(f"{folder} has no {MANIFEST_NAME}; whether it is complete is unknown.")
    _check_files(folder)
    _check_drafter(folder, trainer._drafter_config)
    has_dropout = bool(trainer._drafter_config.attention_dropout)
    check_record(folder, trainer.run_record, trainer.args.allow_resume_changes or [], has_dropout)
    _tell_of_newer(trainer, step_of(folder) or 0)
    return folder


def _newest(output_dir: str, remote: str | None) -> Path:
    folder = last_complete_checkpoint(output_dir)
    fetched = None if remote is None else _newest_remote(remote, output_dir, (step_of(folder) or 0) if folder else -1)
    if fetched is None and folder is None:
        raise ValueError(
            f"resume_from_checkpoint=True, and output_dir={output_dir!r} holds no complete checkpoint"
            f"{f', nor could one be fetched from {remote}' if remote else ''}. Name one, or leave "
            "resume_from_checkpoint out to start anew."
        )
    return fetched or folder  # type: ignore[return-value]


def _newest_remote(remote: str, output_dir: str, newer_than: int) -> Path | None:
    """The newest complete checkpoint of an address beyond a step, saying which are skipped and why."""
    try:
        steps = remote_steps(remote)
    # Whatever a file system raises, what is here can be resumed.
    except Exception as error:
        logger.warning(f"{remote} does not answer ({describe(error)}); only output_dir is looked at.")
        return None
    for step in sorted((step for step in steps if step > newer_than), reverse=True):
        try:
            return fetch_checkpoint(f"{remote.rstrip('/')}/checkpoint-{step}", output_dir)
        except (OSError, ValueError) as error:
            logger.warning(f"checkpoint-{step} at {remote} is skipped: {describe(error)}")
    return None


def _tell_of_newer(trainer: Any, step: int) -> None:
    """Checkpoints of another run that went further would be taken by the next resume_from_checkpoint=True."""
    output_dir = trainer.args.output_dir
    newer = sorted(
        (step_of(f) or 0, f.name) for f in Path(output_dir).glob("checkpoint-*") if (step_of(f) or 0) > step
    )
    others = [name for _, name in newer if not is_same_run(Path(output_dir, name), trainer.run_record)]
    if others:
        logger.warning(
            f"{output_dir} holds {', '.join(others)} of another run, beyond step {step} where this one begins. "
            "resume_from_checkpoint=True would take the last of them: delete them, or give another output_dir."
        )


def _tell_of_own(trainer: Any) -> None:
    """Whoever starts the same command again after an interrupt may expect it to go on."""
    folder = last_complete_checkpoint(trainer.args.output_dir)
    if folder is not None and is_same_run(folder, trainer.run_record):
        logger.warning(
            f"This run starts anew and will write over the checkpoints of the same run in {trainer.args.output_dir}, "
            f"up to {folder.name}. To go on from there, give resume_from_checkpoint=True (to recipes "
            "--resume_from_checkpoint true)."
        )


def _check_files(folder: Path) -> None:
    """Trainer starts parts anew whose files are not there, and says nothing of it."""
    missing = [n for n in (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME) if not (folder / n).exists()]
    # Sharded optimizers are folders of their own.
    if OPTIMIZER_NAME in missing and [path for path in folder.iterdir() if path.is_dir()]:
        missing = [name for name in missing if name == TRAINER_STATE_NAME]
    if missing:
        raise ValueError(
            f"The checkpoint {folder} has no {', '.join(missing)} (save_only_model leaves them out), so the run "
            "cannot go on from it. Take another one, or start a new run from its drafter (model=FOLDER, without "
            "resume_from_checkpoint)."
        )


def _check_drafter(folder: Path, config: DFlashDraftConfig) -> None:
    if not (folder / CONFIG_NAME).exists():
        return
    saved, own = DFlashDraftConfig.from_pretrained(folder).to_dict(), config.to_dict()
    names = sorted(name for name in saved.keys() & own.keys() if saved[name] != own[name])
    names = [name for name in names if name not in CONFIG_FIELDS_OF_SAVING]
    if names:
        differences = ", ".join(f"{name} {saved[name]} there and {own[name]} here" for name in names)
        raise ValueError(
            f"The checkpoint {folder} is of another drafter: {differences}. Resume with the drafter it was "
            "made from, or load it with from_pretrained, change it with dflash_hf.adapt, and train anew."
        )


# --- What a resumed run does beyond loading states: its own arguments act, and a due evaluation is made up for.


# What arguments give an optimizer's groups, and no optimizer changes by itself.
SETTINGS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")

EVALUATION_DUE = "evaluation_due"


class GivenSettings:
    """Learning rate, weight decay and the like as this run's arguments give them.

    The state of an optimizer and of its schedule holds those of the run that saved it, and loading it would let them
    rule, so that a changed argument is ignored.

    Args:
        optimizer (`torch.optim.Optimizer`): Before a state is loaded.
        scheduler: Its schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any):
        self.groups = [{k: group[k] for k in SETTINGS if k in group} for group in optimizer.param_groups]
        self.rates = list(scheduler.base_lrs) if type(scheduler) is LambdaLR else None

    def put_back(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[tuple[float, float]]:
        """Let them act from the next step on.

        Returns:
            The learning rates of the groups, as loaded and as they are now; equal where nothing has changed.
        """
        before = [float(group["lr"]) for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(own)
        if self.rates is not None:
            scheduler.base_lrs = self.rates
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            scheduler._last_lr = [rate * factor for rate, factor in zip(self.rates, factors, strict=True)]
            for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate
        return list(zip(before, (float(group["lr"]) for group in optimizer.param_groups), strict=True))


def check_steps_left(folder: Path, num_steps: int) -> None:
    """Raises for a checkpoint of a later step than the run's last one.

    Raises:
        ValueError: Naming both.
    """
    step = json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"]
    if step > num_steps:
        raise ValueError(
            f"The checkpoint {folder} is of step {step}, and the run ends with step {num_steps}: there is nothing to "
            "train. Raise max_steps or num_train_epochs, or resume from an earlier checkpoint."
        )


def tell_of_schedule(folder: Path, num_steps: int, rates: list[tuple[float, float]]) -> None:
    """Warn of a schedule that is not the saved one, with the learning rate before and after."""
    state = json.loads((folder / TRAINER_STATE_NAME).read_text())
    before, now = rates[0]
    if state["max_steps"] != num_steps or not math.isclose(before, now, rel_tol=1e-9):
        logger.warning(
            f"The schedule is not that of {folder}: {state['max_steps']} steps there and {num_steps} here; after step "
            f"{state['global_step']} the learning rate goes on from {now:.4g} instead of {before:.4g}."
        )


@contextmanager
def own_settings(trainer: Any, checkpoint: str | None) -> Iterator[None]:
    """Around the loading of a checkpoint's optimizer and schedule, after which this run's own arguments act.

    Args:
        trainer: The [`DFlashTrainer`] that loads.
        checkpoint: The checkpoint's folder, or None.

    Raises:
        ValueError: The checkpoint is of a later step than the run's last one.
    """
    if checkpoint is not None:
        check_steps_left(Path(checkpoint), trainer.state.max_steps)
    if checkpoint is None or trainer.is_deepspeed_enabled:
        yield
        return
    given = GivenSettings(trainer.optimizer, trainer.lr_scheduler)
    yield
    rates = given.put_back(trainer.optimizer, trainer.lr_scheduler)
    if trainer.is_world_process_zero():
        tell_of_schedule(Path(checkpoint), trainer.state.max_steps, rates)


class DueEvaluation(TrainerCallback):
    """Makes up for the evaluation that an interrupt left out, so that the best checkpoint is chosen among the same.

    Args:
        trainer: The [`DFlashTrainer`] that trains.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.folder: Path | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        folder, self.folder = self.folder, None
        if folder is None or not (folder / RECORD_NAME).exists() or not read_record(folder).get(EVALUATION_DUE):
            return
        # The parent's own two halves of an evaluation in training; together they are part of its step.
        metrics = self.trainer._evaluate(None, None)
        if self.trainer._determine_best_metric(metrics, None):
            state.best_model_checkpoint = str(folder)
