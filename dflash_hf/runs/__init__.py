# SPDX-License-Identifier: Apache-2.0
"""A run from its plan to its last checkpoint: what lets it be planned, watched, stopped and resumed.

In reading order:

- before: `planning` (devices, memory, hours), `preflight` (every part once, on the machine itself), `launching`;
- during: `guards` (steps that are not finite, losses that cannot fall), `host_copies`, `interrupts`, `profiling`;
- its checkpoints: `output_lock` (one run at a time writes them), `checkpointing` (complete or absent), `rotation` (old
  ones are deleted), `remote_store` (at an fsspec address), `remote_checkpoints` (mirrored while training goes on);
- going on: `record` (what a run is made of), `resuming` (from which checkpoint, and whether it is the same run),
  `resumed_state`.

The files of a drafter itself, trained or published, are `checkpoint_format.py` and its neighbours, one folder up.
"""
