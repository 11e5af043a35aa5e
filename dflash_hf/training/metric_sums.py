# SPDX-License-Identifier: Apache-2.0
"""What training and an evaluation add up over batches: blocks at random anchors, and the walks of whole answers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..data.packing import PackedDataset
from ..decoding.walk import WalkSums, walk_batch
from ..target.head import FrozenHead
from .losses import BlockSums


logger = logging.get_logger(__name__)


class TrainingSums:
    """Sums of the blocks trained on since the last log, from which its metrics are made.

    Args:
        block_size: Slots of a block.
        device: Where the loss is.
    """

    def __init__(self, block_size: int, device: torch.device):
        self.blocks = BlockSums.zeros(block_size, device)
        self._step = BlockSums.zeros(block_size, device)

    def add(self, sums: BlockSums) -> None:
        """Add a micro-batch of the present step."""
        self._step.add(sums)

    def end_step(self, left_out: torch.Tensor) -> None:
        """Keep the present step's sums, unless the step is left out, which the device knows."""
        values = self._step.values
        self.blocks.values += torch.where(left_out, torch.zeros_like(values), values)
        values.zero_()

    def take(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The metrics, whose loss is NaN where no step was kept; the next ones begin anew.

        Args:
            reduce: Adds a tensor up over the ranks.
        """
        sums = BlockSums(reduce(self.blocks.values.clone()))
        self.blocks.values.zero_()
        metrics = sums.metrics()
        return metrics if sums.values[1] > 0 else metrics | {"loss": float("nan")}


class EvaluationSums:
    """Sums of one evaluation, from which its metrics are made once.

    Args:
        block_size: Slots of a block.
        device: Where the loss is.
    """

    def __init__(self, block_size: int, device: torch.device):
        self.block_size = block_size
        self.blocks = BlockSums.zeros(block_size, device)
        self.walk = WalkSums.zeros(block_size)
        self._sources: list[str] | None = None

    def restart(self, dataset: Any) -> None:
        """Forget the last evaluation; the next one is of this data set, which may name its documents' sources."""
        self.blocks.values.zero_()
        self._sources = dataset.sources if isinstance(dataset, PackedDataset) else None
        self.walk = WalkSums.zeros(self.block_size, sorted(set(self._sources or [])))

    def walk_answers(
        self, model: nn.Module, config: Any, head: FrozenHead, inputs: dict[str, Any], context: torch.Tensor
    ) -> None:
        """Walk the answers of a batch; arguments as for [`walk_batch`]."""
        if "supervised_runs" not in inputs:
            logger.warning_once(
                "The collator gives no `supervised_runs`, so no answer can be walked: the acceptance length is "
                "that at random anchors."
            )
            return
        for answer in walk_batch(model, config, head, inputs, context):
            self.walk.add(answer, None if self._sources is None else self._sources[answer.document])

    def metrics(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Loss and acceptance as ratios of sums over all blocks.

        Args:
            reduce: Adds a tensor up over the ranks.
        """
        walked = reduce(self.walk.values.to(self.blocks.values.device))
        blocks = BlockSums(reduce(self.blocks.values.clone()))
        return blocks.metrics() | WalkSums(walked, self.walk.sources).metrics()


__all__ = ["EvaluationSums"]
