# SPDX-License-Identifier: Apache-2.0
"""The frozen target: from packed token ids to the hidden states that a drafter reads.

In reading order:

- the target itself: `loading`, `checks` (is it the drafter's?), `head` (what the drafter shares with it),
  `frozen_target` (cut, place, call), `tapping` (layers' outputs out of its own forward), `features` (of each
  document), `packing` (which documents share a forward), `startup_check` (documents must not see each other);
- the packed forwards: `kernels` (what mixes tokens), `kernel_cache` (where they stay once tuned), `varied_lengths`
  (no plan for each), `document_masks`, `dense`, `qwen3_5`;
- beside the drafter: `topology` (which devices), `pairs` (from the training arguments to a target beside each one),
  `feature_transfer` (across to the drafter's device), `lookahead`, `pending` and `prefetch` (later batches
  meanwhile), `compiled` and `compile_gate` (its thread never compiles, and rests while another one does),
  `throughput` (where the time of a step goes), `startup_times` (and that of the start);
- `synthetic`: a target of random weights, for measuring without any download.
"""
