# SPDX-License-Identifier: Apache-2.0
"""One run at a time writes checkpoints into a folder."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers.trainer_utils import SaveStrategy

from ..one_writer import only_writer
from .checkpointing import decided_by_main
from .resuming import check_writable


def writes_alone(train: Callable[..., Any]) -> Callable[..., Any]:
    """Round a trainer's `train`: the next run would take what this one has half written for what a kill left.

    Raises:
        AnotherWriterError: On all ranks, when another process trains into the same `output_dir`.
    """

    @functools.wraps(train)
    def alone(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            decided_by_main(trainer, lambda: _hold_output(trainer, stack))
            return train(trainer, *args, **kwargs)

    return alone


def _hold_output(trainer: Any, stack: ExitStack) -> None:
    folder = Path(trainer.args.output_dir)
    if trainer.args.save_strategy != SaveStrategy.NO:
        check_writable(folder)
    if folder.is_dir():
        stack.enter_context(only_writer(folder, "output_dir"))


__all__ = ["writes_alone"]
