# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are deleted once there are more than `save_total_limit`."""

import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .checkpointing import step_of


logger = logging.get_logger(__name__)


def rotate(trainer: Any, run_dir: Path) -> None:
    """Delete the checkpoints beyond `save_total_limit`, never the newest or the best.

    Trainer goes by the time of their last change. A clock that is set back, or a copy, makes that another one, and the
    newest checkpoint would be deleted. Here the order is that of the steps; those beyond the present step are of
    another run and go first.

    Args:
        trainer: That has just written a checkpoint.
        run_dir: Folder of the checkpoints.
    """
    limit, now = trainer.args.save_total_limit, trainer.state.global_step
    if not trainer.args.should_save or limit is None or limit <= 0:
        return
    folders = {step: f for f in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (step := step_of(f)) is not None}
    best = trainer.state.best_model_checkpoint
    kept = {step for step, folder in folders.items() if step == now or (best and folder == Path(best))}
    others = sorted(folders.keys() - kept, key=lambda step: (step <= now, step))
    for step in others[: max(0, len(folders) - max(limit, len(kept)))]:
        try:
            shutil.rmtree(folders[step])
        # The new checkpoint is there; other ranks would wait for one that stops here.
        except OSError as error:
            logger.warning(f"The old checkpoint {folders[step]} could not be deleted: {error}")


__all__ = ["rotate"]
