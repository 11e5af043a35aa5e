# SPDX-License-Identifier: Apache-2.0
"""Train DFlash drafters with Hugging Face transformers.

Importing the package makes `AutoConfig` and `AutoModel` read drafters, without remote code; set the environment
variable `DFLASH_HF_AUTO_CLASSES=0` to leave them as they are. It also keeps transformers' sdpa attention from a fault
of torch on CUDA ([`sdpa_attention`]).
"""

import os

from .auto_classes import register_auto_classes
from .configuration_dflash import DFlashDraftConfig, default_target_layer_ids
from .data.collator import DataCollatorForDFlash
from .data.conversations import read_completions, tokenize_completions, tokenize_conversation
from .data.loading import load_documents
from .data.packing import PackedDataset
from .data.tokenize_job import tokenize_files
from .data.tokenizing import TokenizeOptions
from .modeling_dflash import DFlashDraftModel
from .target.frozen_target import FrozenTarget
from .trainer import DFlashTrainer
from .training.adapting import adapt
from .training.speculators_conversion import convert_speculators
from .training_args import DFlashTrainingArguments
from .validation.validate import validate_checkpoint


__version__ = "0.1.0"

if os.environ.get("DFLASH_HF_AUTO_CLASSES") != "0":
    register_auto_classes()

__all__ = [
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
