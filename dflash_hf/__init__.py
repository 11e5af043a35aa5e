# SPDX-License-Identifier: Apache-2.0
"""Train DFlash drafters with Hugging Face transformers.

Importing the package makes `AutoConfig` and `AutoModel` read drafters, without remote code; set the environment
variable `DFLASH_HF_AUTO_CLASSES=0` to leave them as they are. It also keeps transformers' sdpa attention from a fault
of torch on CUDA ([`masking.whole_heads_attention`]).

Files, in the order in which data flows:

- the drafter: `masking` (who sees whom), `checkpoint_files` (its folder and the headers of its tensors),
  `checkpoint_format` (what they must hold), `configuration_dflash`, `modeling_dflash` (these five are published beside
  it as remote code), `configuration_dflash2`, `modeling_dflash2` (what DFlash 2 adds), `auto` (registers it),
  `validation` (`dflash-hf validate`), `convert_speculators` (from another format);
- from chats to batches: `chats` (files to rows to chats), `rendering` (chats to token ids), `packing` (documents to
  rows), `data_collator` (rows to tensors), `tokenizing` (rows to documents, in memory or by a job over files),
  `documents` (the folder that it writes and training opens), `command_tokenize` (`dflash-hf tokenize`);
- the target: `topology` (which devices), `packed_targets`, `frozen_target`, `prefetch` (ahead of the drafter);
- training: `training_args`, `losses`, `selector_losses` (of DFlash 2), `optimizers`, `adapters` (LoRA), `adapting`
  (going on from a published drafter), `operations` (how much work a step is), `callbacks`, `writing` (one process a
  folder), `checkpointing`, `remote_checkpoints`, `resuming`, `trainer`, `planning` (a run before its first step),
  `command_adapt`;
- decoding: `generation`, `prompts`, `serving` (vLLM and SGLang servers), `acceptance`, `draft_length` (how many tokens
  to draft), `command_generate` (the target answers prompts), `command_evaluate` (what drafters save);
- to the Hub: `model_card` (facts and results of a run), `publishing`;
- `cli`: options from the command line and YAML; `commands` (`dflash-hf`), `command_train` (its `train` and `plan`).
"""

import os

from .adapting import adapt
from .auto import register_auto_classes
from .configuration_dflash import DFlashDraftConfig, default_target_layer_ids
from .configuration_dflash2 import DFlash2DraftConfig
from .convert_speculators import convert_speculators
from .data_collator import DataCollatorForDFlash
from .frozen_target import FrozenTarget
from .modeling_dflash import DFlashDraftModel
from .modeling_dflash2 import DFlash2DraftModel
from .packing import PackedDataset
from .tokenizing import (
    TokenizeOptions,
    load_documents,
    read_completions,
    tokenize_completions,
    tokenize_conversation,
    tokenize_files,
)
from .trainer import DFlashTrainer
from .training_args import DFlashTrainingArguments
from .validation import validate_checkpoint


__version__ = "0.1.0"

if os.environ.get("DFLASH_HF_AUTO_CLASSES") != "0":
    register_auto_classes()

__all__ = [
    "DFlash2DraftConfig",
    "DFlash2DraftModel",
    "DFlashDraftConfig",
    "DFlashDraftModel",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "DataCollatorForDFlash",
    "FrozenTarget",
    "PackedDataset",
    "TokenizeOptions",
    "adapt",
    "convert_speculators",
    "default_target_layer_ids",
    "load_documents",
    "read_completions",
    "tokenize_completions",
    "tokenize_conversation",
    "tokenize_files",
    "validate_checkpoint",
]
