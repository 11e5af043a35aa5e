# SPDX-License-Identifier: Apache-2.0
"""How processes that train together end: together after a success, and at once after an error of one of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import PartialState
from torch.distributed.launcher.api import LaunchConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

# torch.distributed.elastic, by which `accelerate launch` starts several ranks, sets the first for each. The second is
# how long it waits between passing SIGTERM on and killing.
LAUNCHED = "TORCHELASTIC_RUN_ID"
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
GRACE_SECONDS = 30.0
# By which weights went from an H200 into a file; half of the grace is left for the steps that end first.
BYTES_PER_SECOND = 1e9


@contextmanager
def end_together() -> Iterator[None]:
    """Put round a training script: all ranks leave the group together when it is done.

    Without it, a rank that ends first takes the connection from the others and some runs abort at their exit. After
    an error nothing is waited for, so that the launcher sees it at once and ends the other ranks.
    """
    yield
    state = PartialState()
    if state.num_processes > 1:
        state.wait_for_everyone()
        state.destroy_process_group()


def tell_of_grace(checkpoint_bytes: int) -> None:
    """Warn of a launcher that may kill its ranks before a checkpoint is written, once it has passed SIGTERM on.

    Args:
        checkpoint_bytes: What a checkpoint takes.
    """
    # Of the launcher that this torch has; earlier ones wait as long as they do.
    grace = float(vars(LaunchConfig(1, 1, 1)).get("shutdown_timeout", GRACE_SECONDS))
    if LAUNCHED in os.environ and checkpoint_bytes / BYTES_PER_SECOND > grace / 2:
        logger.warning(
            f"A checkpoint takes {checkpoint_bytes / 1e9:.1f} GB, and the launcher kills its ranks {grace:g} s after "
            "it gets SIGTERM, within which up to two steps end and the checkpoint is written. Give it more with "
            f"{GRACE}=300 in its environment (torch 2.13 reads it, 2.11 does not), or send SIGTERM to the ranks."
        )


__all__ = ["end_together", "tell_of_grace"]
