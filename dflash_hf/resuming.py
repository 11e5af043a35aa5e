# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from, and whether it is the same run."""

import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import SaveStrategy
from transformers.utils import CONFIG_NAME, logging

from .checkpointing import (
    MANIFEST_NAME,
    check_disk_space,
    checkpoint_bytes,
    clean_up,
    last_complete_checkpoint,
    manifest_problems,
    step_of,
)
from .configuration_dflash import DFlashDraftConfig
from .hub_pushes import STAGING_PREFIX
from .remote_checkpoints import SNAPSHOT_PREFIX
from .remote_store import describe, fetch_checkpoint, is_remote, remote_steps
from .run_record import CONFIG_FIELDS_OF_SAVING, check_record


logger = logging.get_logger(__name__)


def prepare_output(trainer: Any) -> None:
    """Tidy up what a kill left in the output folder, and check that a checkpoint fits on its disk.

    Args:
        trainer: The [`DFlashTrainer`] that is about to train.

    Raises:
        DiskSpaceError: No checkpoint would fit.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    if folder.exists():
        clean_up(folder)
        for left in [path for prefix in (SNAPSHOT_PREFIX, STAGING_PREFIX) for path in folder.glob(f"{prefix}*")]:
            shutil.rmtree(left, ignore_errors=True)
    if args.save_strategy != SaveStrategy.NO:
        folder.mkdir(parents=True, exist_ok=True)
        check_disk_space(folder, checkpoint_bytes(trainer.model, None, args.save_only_model))


def resume_folder(trainer: Any, resume: str | Path | bool | None) -> Path | None:
    """The checkpoint to go on from, complete and of the same run.

    Args:
        trainer: The [`DFlashTrainer`] that is about to train.
        resume: A checkpoint, an fsspec address, or True for the newest complete one of `output_dir` and
            `remote_checkpoint_dir`.

    Returns:
        Its folder, or None to start anew.

    Raises:
        ValueError: There is none, it is incomplete, or it is of another run.
    """
    if resume is None or resume is False:
        return None
    if resume is True:
        folder = _newest(trainer.args.output_dir, trainer.args.remote_checkpoint_dir)
    elif is_remote(resume):
        folder = fetch_checkpoint(str(resume), trainer.args.output_dir)
    else:
        folder = Path(resume)
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
    _check_drafter(folder, trainer._drafter_config)
    has_dropout = bool(trainer._drafter_config.attention_dropout)
    check_record(folder, trainer.run_record, trainer.args.allow_resume_changes or [], has_dropout)
    return folder


def _newest(output_dir: str, remote: str | None) -> Path:
    folder = last_complete_checkpoint(output_dir)
    steps = []
    if remote is not None:
        try:
            steps = remote_steps(remote)
        # Whatever a file system raises, what is here can be resumed.
        except Exception as error:
            logger.warning(f"{remote} does not answer ({describe(error)}); only output_dir is looked at.")
    if steps and (folder is None or steps[-1] > (step_of(folder) or 0)):
        return fetch_checkpoint(f"{remote}/checkpoint-{steps[-1]}", output_dir)
    if folder is None:
        raise ValueError(
            f"resume_from_checkpoint=True, and output_dir={output_dir!r} holds no complete checkpoint"
            f"{f', nor does {remote}' if remote else ''}. Name one, or leave resume_from_checkpoint out to start anew."
        )
    return folder


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


__all__ = ["prepare_output", "resume_folder"]
