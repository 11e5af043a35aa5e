# SPDX-License-Identifier: Apache-2.0
"""Batches of the study's runs, collated once for all runs that share their data and kept on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from study_features import Features

from dflash_hf.data.collator import DataCollatorForDFlash
from dflash_hf.data.packing import PackedDataset, RowSampler, seeded_permutation


class Batches:
    """The steps' batches of one data setting, every tensor of one shape.

    Unpacked, a row holds one document and rows come in an order drawn from (seed, epoch); packed, rows and their
    order are those of `DFlashTrainer`.

    Args:
        documents: Documents with `input_ids` and `supervised_spans`.
        features: Their hidden states.
        rows: Rows of a step.
        row_length: Tokens of a row.
        num_anchors: Anchors per document.
        row_anchors: Cap on the anchors of a row, shared by its documents in proportion.
        padded_anchors: Anchors that every row is padded to.
        packed: Whether documents share rows.
        block_size: Slots of a block.
        seed: Of the order, the anchors and the noise.
    """

    def __init__(
        self,
        documents: Sequence[dict[str, Any]],
        features: Features,
        rows: int,
        row_length: int,
        num_anchors: int,
        row_anchors: int,
        padded_anchors: int,
        packed: bool,
        block_size: int,
        seed: int,
    ):
        self.documents, self.features, self.rows, self.seed = documents, features, rows, seed
        self.dataset = PackedDataset(documents, row_length, seed) if packed else None
        self.collator = DataCollatorForDFlash(
            block_size,
            num_anchors,
            seed,
            row_anchors,
            row_length,
            pad_anchors_to_multiple_of=padded_anchors,
        )
        self._made: dict[int, dict[str, Any]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Full batches; the rows that are left over wait for the next epoch's order."""
        return (len(self.documents) if self.dataset is None else len(self.dataset)) // self.rows

    def __getitem__(self, step: int) -> dict[str, Any]:
        if step not in self._made:
            self._made[step] = self._make(step)
        return self._made[step]

    def _make(self, step: int) -> dict[str, Any]:
        epoch, index = divmod(step, self.steps_per_epoch)
        part = slice(index * self.rows, (index + 1) * self.rows)
        if self.dataset is not None:
            sampler = RowSampler(len(self.dataset), self.seed)
            sampler.set_epoch(epoch)
            items = [self.dataset[item] for item in list(sampler)[part]]
        else:
            order = seeded_permutation(len(self.documents), [self.seed, epoch])[part].tolist()
            items = [{"epoch": epoch, "documents": [{"document": i, **self.documents[i]}]} for i in order]
        batch = self.collator(items)
        batch["places"] = self.features.places(batch)
        return on_device(batch, self.features.context.device)


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch whose tensors are on a device; nothing waits for the copies."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    return {name: moved(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
