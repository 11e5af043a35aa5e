# SPDX-License-Identifier: Apache-2.0
"""How processes that train together end: together after a success, and at once after an error of one of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import PartialState


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


__all__ = ["end_together"]
