# SPDX-License-Identifier: Apache-2.0
"""The hidden states of a batch while they are still to come."""

from collections.abc import Sequence
from typing import Any

import torch

from .feature_transfer import Features


# Key of a batch under which its hidden states to come travel to the loss.
PENDING = "pending_context"


class PendingContext:
    """The hidden states of one batch, to come.

    Args:
        batch: A batch of [`DataCollatorForDFlash`], best on the host: on the drafter's device its token ids are only
            known once the device has come to them.
    """

    def __init__(self, batch: dict[str, Any]):
        self.input_ids: torch.Tensor = batch["input_ids"].cpu()
        self.document_lengths: Sequence[Sequence[int]] = batch["document_lengths"]
        self.num_tokens = sum(sum(lengths) for lengths in self.document_lengths)
        self.num_anchors = int((batch["anchor_positions"].cpu() >= 0).sum())
        self.features: Features | None = None
        self.error: BaseException | None = None
        self.is_done = self.is_taken = False
        # Whether the thread that runs ahead left it to the training thread, since something has to be compiled.
        self.is_left = False
        # Its place among the batches that were ordered.
        self.number = 0
        # Where the drafter's device must be before the target starts, so that it does not run ahead of a slow drafter.
        self.start_after: torch.cuda.Event | None = None


__all__ = ["PENDING", "PendingContext"]
