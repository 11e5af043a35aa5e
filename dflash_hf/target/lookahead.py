# SPDX-License-Identifier: Apache-2.0
"""Batches known before they are due, with the training loop seeing nothing of it."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.state import GradientState


class LookAhead:
    """Iterates over an epoch's batches, fetching `depth` more than it has handed out.

    accelerate's dataloader says with its last batch that it is the last one, and the loop, the loss and the metrics
    read that. So the mark is taken off when the batch is fetched and put back when it is handed out.

    Args:
        batches: The epoch's batches, from a dataloader that accelerate prepared.
        depth: Batches to know in advance.
        gradient_state: accelerate's state, which names the dataloader in use.
        on_fetch: Called with every batch when it is fetched, in order; gives the batch to hand out.
    """

    def __init__(
        self,
        batches: Iterator[dict[str, Any]],
        depth: int,
        gradient_state: GradientState,
        on_fetch: Callable[[dict[str, Any]], dict[str, Any]],
    ):
        self.batches = batches
        self._depth = depth
        self._gradient_state = gradient_state
        self._on_fetch = on_fetch
        self._waiting: deque[tuple[dict[str, Any], bool]] = deque()
        self._dataloader: Any = None
        self._all_fetched = False

    def __iter__(self) -> "LookAhead":
        return self

    def __next__(self) -> dict[str, Any]:
        while len(self._waiting) <= self._depth and not self._all_fetched:
            self._fetch()
        if not self._waiting:
            # Lets the dataloader take itself off accelerate's list.
            next(self.batches, None)
            raise StopIteration
        batch, is_last = self._waiting.popleft()
        if is_last:
            self._dataloader.end_of_dataloader = True
        return batch

    def _fetch(self) -> None:
        batch = next(self.batches, None)
        if batch is None:
            self._all_fetched = True
            return
        if self._dataloader is None:
            # The dataloader has made itself the active one with its first batch.
            self._dataloader = self._gradient_state.active_dataloader
        is_last = self._dataloader is not None and self._dataloader.end_of_dataloader
        if is_last:
            self._dataloader.end_of_dataloader = False
            self._all_fetched = True
        self._waiting.append((self._on_fetch(batch), is_last))


__all__ = ["LookAhead"]
