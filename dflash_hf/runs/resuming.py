# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from, and whether it is the same run."""

import shutil
from pathlib import Path
from typing import Any

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy
from transformers.utils import CONFIG_NAME, logging

from ..configuration_dflash import DFlashDraftConfig
from ..data.addresses import describe, is_remote
from ..publishing.hub_pushes import STAGING_PREFIX
from .checkpoint_manifest import MANIFEST_NAME, manifest_problems
from .checkpointing import (
    ASIDE_PREFIX,
    check_disk_space,
    checkpoint_bytes,
    clean_up,
    last_complete_checkpoint,
    step_of,
)
from .launching import tell_of_grace
from .record import CONFIG_FIELDS_OF_SAVING, check_record, is_same_run
from .remote_checkpoints import SNAPSHOT_PREFIX
from .remote_store import check_address, fetch_checkpoint, remote_steps


logger = logging.get_logger(__name__)


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


def check_writable(folder: Path) -> None:
    """Make a folder and something in it, and remove the latter.

    Raises:
        OSError: Nothing could be written there.
    """
    probe = folder / f"{ASIDE_PREFIX}probe"
    try:
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()
    except OSError as error:
        raise OSError(
            f"Nothing could be written into output_dir={str(folder)!r} ({error}). Make it writable, or give "
            "another one."
        ) from error


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


__all__ = ["check_writable", "prepare_output", "resume_folder"]
