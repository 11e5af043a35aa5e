# SPDX-License-Identifier: Apache-2.0
"""What `trainer.py` is made of: models, batches, losses and optimizers.

In reading order:

- what it is told: `argument_checks` (which values are refused), `refused_options` (which options of transformers),
  `trainer_arguments` (whether the rest acts);
- which drafter is trained: `model_preparation` (placed, frozen, compiled), `adapting` (going on from a published one),
  `speculators_conversion` (from another format), `partial_training` (some of its modules), `adapter_checks` (what an
  adapter must be), `drafter_adapters` (LoRA);
- on what: `batches` (from what a trainer was given to packed rows and their order), `context_noise`;
- for what: `drafter_loss` (from a batch to the loss), `losses` (through the target's frozen head), `slot_terms`
  (what single slots are held to), `objectives` (how they are weighted), `metric_sums` (what is added up for
  metrics);
- `optimizers`: Muon beside AdamW.
"""
