# SPDX-License-Identifier: Apache-2.0
"""Batches of the study's runs, collated once for all runs that share their data and kept on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from study_features import Features
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from dflash_hf.data_collator import DataCollatorForDFlash
from dflash_hf.packing import PackedDataset, RowSampler, seeded_permutation


# Processes that collate on a machine with a GPU, whose steps are faster than one of them.
WORKERS = 6


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

    def prepare(self, num_steps: int) -> None:
        """Make the batches of the first steps that are not there yet, so that steps need not wait for them."""
        device = self.features.context.device
        missing = [step for step in range(num_steps) if step not in self._made]
        # Forked, since the documents and their states are in this process; no worker touches the device.
        on_cuda = device.type == "cuda"
        collated: Any = _Collated(self)
        batches: DataLoader = DataLoader(
            collated,
            batch_size=None,
            sampler=missing,
            num_workers=WORKERS if on_cuda else 0,
            multiprocessing_context="fork" if on_cuda else None,
            # As they are: the loader would make a tensor of every number in their lists.
            collate_fn=lambda batch: batch,
        )
        for step, batch in zip(missing, tqdm(batches, desc="batches", unit="step", mininterval=2), strict=True):
            self._made[step] = on_device(batch, device)

    def __getitem__(self, step: int) -> dict[str, Any]:
        if step not in self._made:
            self._made[step] = on_device(self.collated(step), self.features.context.device)
        return self._made[step]

    def collated(self, step: int) -> dict[str, Any]:
        """A step's batch on the host."""
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
        return batch


class _Collated:
    """The batches on the host, as a data set of steps."""

    def __init__(self, batches: Batches):
        self.batches = batches

    def __getitem__(self, step: int) -> dict[str, Any]:
        return self.batches.collated(step)


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch whose tensors are on a device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
