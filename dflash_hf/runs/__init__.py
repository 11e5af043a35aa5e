# SPDX-License-Identifier: Apache-2.0
"""A run from its plan to its last checkpoint: what lets it be planned, watched, stopped and resumed.

In reading order:

- before: `operations` (how much work a step is), `model_shapes` (and memory), `planning` (devices, steps, hours),
  `preflight` (every part once, on the machine itself), `launching`;
- during: `guards` (steps that are not finite, losses that cannot fall), `host_copies`, `interrupts` (signals),
  `launcher_end` (a launcher that passed none on), `profiling`, `rank_comparison` (weights over the ranks);
- behind: `checkpoint_differences` (weights of several runs);
- its checkpoints: `output_lock` (one run at a time writes them), `checkpoint_manifest` (their files and checksums),
  `checkpointing` (complete or absent), `rotation` (old ones are deleted), `remote_store` (at an fsspec address),
  `remote_checkpoints` (mirrored while training goes on);
- `lifecycle`: what is done before its first step, at a checkpoint and after its last step;
- going on: `record` (what a run is made of), `resuming` (from which checkpoint, and whether it is the same run),
  `resumed_state`.

The files of a drafter itself, trained or published, are `checkpoint_format.py` and its neighbours, one folder up.
"""
