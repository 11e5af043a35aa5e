# SPDX-License-Identifier: Apache-2.0
"""Training arguments of a DFlash drafter; the defaults are the paper's where it gives them."""

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from .runs.remote_store import check_address
from .target.feature_transfer import FEATURE_COPIES
from .target.topology import LAYOUTS, check_world_size
from .training.argument_checks import check_values, refuse_options
from .training.objectives import OBJECTIVES
from .training.refused_options import check_before
from .training.trainer_arguments import check_effects


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    r"""
    [`~transformers.TrainingArguments`] plus what training a drafter needs.

    Defaults that differ from the parent's: the paper's learning rate, schedule, warm-up and epochs, one packed row
    per micro-batch, and `remove_unused_columns=False`, since the drafter's forward names none of the data's columns.

    Args:
        num_anchors (`int`, *optional*, defaults to 512):
            Anchors per document and epoch, i.e. blocks that the drafter learns to draft.
        max_anchors_per_row (`int`, *optional*):
            Cap on the anchors of one packed row; by default a quarter of its tokens.
        row_length (`int`, *optional*, defaults to 4096):
            Tokens of a packed row. Longer documents are refused; cut them when tokenising.
        max_length (`int`, *optional*):
            Tokens kept of each document when the data holds chats that are tokenised here; `row_length` by default.
        enable_thinking (`bool`, *optional*):
            Handed to the chat template where chats are tokenised here; the template's own default if unset.
        allow_other_template (`bool`, *optional*, defaults to `False`):
            Train on documents that another chat template has written than the tokenizer's, with a warning.
        context_noise (`float`, *optional*, defaults to 0.05):
            Half-width of the uniform noise on the target's hidden states in training; 0 switches it off.
        objective (`str`, *optional*, defaults to `"cross_entropy"`):
            `"cross_entropy"` (the paper's decayed cross-entropy), `"dpace"`, or one that compares with the target's
            distribution, for which all of the target's layers run: `"kl"`, `"total_variation"`, `"lk"`,
            `"lk_hybrid"`, `"expected_acceptance"`.
        loss_gamma (`float`, *optional*):
            Decay length in slots of `"cross_entropy"`; `min(block_size / 2, 7)` by default.
        dpace_alpha (`float`, *optional*, defaults to 0.5):
            Smoothing of `"dpace"`.
        slot_weights (`str`, *optional*):
            Weights of the slots where distributions are compared: `"dpace"` (the default) or `"decay"`.
        loss_temperature (`float`, *optional*, defaults to 1.0):
            Temperature of the target's distribution that the drafter is compared with.
        cross_entropy_share (`float`, *optional*, defaults to 0.0):
            Share of the cross-entropy in an objective that compares distributions.
        muon (`bool`, *optional*, defaults to `False`):
            Train the matrices with Muon and the norms with AdamW; both take `learning_rate`, as Muon's steps are
            scaled to the size of AdamW's.
        loss_chunk_blocks (`int`, *optional*):
            Blocks per chunk of the loss; by default as many as keep 2**27 logits.
        target_device (`str`, *optional*):
            Device of the frozen target, in place of the one that `target_layout` gives.
        target_layout (`str`, *optional*, defaults to `"auto"`):
            Where the target of local rank r is: `"paired"` on GPU r + W of W local ranks, `"shared"` on the drafter's
            own, `"spread"` over an equal part of the GPUs from W on; `"auto"` is shared where every rank sees one
            GPU, and paired where there are two or more for each.
        prefetch_depth (`int`, *optional*, defaults to 2):
            Batches that the target works ahead of the drafter, whose hidden states wait in memory; 0 takes turns.
        feature_copies (`str`, *optional*, defaults to `"auto"`):
            `"peer"` copies hidden states from GPU to GPU, `"host"` through pinned host memory; `"auto"` is host where
            the environment has `NCCL_P2P_DISABLE=1`.
        measure_alone_steps (`int`, *optional*, defaults to 0):
            So many first steps run target and drafter in turn, so that the log says how long each takes by itself. A
            target on GPUs of its own runs each of their batches three times and the last one counts, since a GPU that
            has rested is faster for a while than under load.
        ddp_bf16_compression (`bool`, *optional*, defaults to False):
            Send gradients between ranks in bf16: half the bytes, rounded to 8 bits of mantissa.
        target_model_init_kwargs (`dict`, *optional*):
            Arguments of `from_pretrained` for a target given by id or folder.
        compile_target (`bool`, *optional*, defaults to `True`):
            Whether to compile, on CUDA, the layers of a Qwen3.5/3.6 target, which takes up to a minute at the start,
            or the attention of other targets over packed documents, which takes some seconds.
        allow_slow_target (`bool`, *optional*, defaults to `False`):
            Whether a hybrid target may run on CUDA without flash-linear-attention.
        drafter_attn_implementation (`str`, *optional*):
            `"flex_attention"`, `"sdpa"` or `"eager"`; by default flex on CUDA and sdpa elsewhere.
        trainable_modules (`list[str]`, *optional*):
            Modules of the drafter that are trained, such as `["fc", "hidden_norm"]` or `["layers.4"]`; the rest keeps
            its weights. By default all.
        max_nonfinite_steps (`int`, *optional*, defaults to 10):
            Steps in a row with a loss or gradients that are not finite, each of them left out, that stop the run.
        remote_checkpoint_dir (`str`, *optional*):
            fsspec address (`s3://bucket/run`) to which each finished checkpoint is copied in the background. Its
            package takes the credentials from the environment or its own files; none belong into the address.
        allow_resume_changes (`list[str]`, *optional*):
            What may differ from the resumed checkpoint's run: `"target"`, `"tokenizer"`, `"data"`, `"rows"`.
        compile_layers (`bool`, *optional*):
            Compile the drafter's layers one by one, which takes seconds instead of the minutes of a whole model; by
            default on CUDA. `torch_compile` keeps its meaning, the whole model, and switches this off.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "target_model_init_kwargs"]  # noqa: RUF012

    num_anchors: int = field(default=512, metadata={"help": "Anchors per document and epoch."})
    max_anchors_per_row: int | None = field(
        default=None, metadata={"help": "Cap on the anchors of a packed row; a quarter of its tokens."}
    )
    row_length: int = field(default=4096, metadata={"help": "Tokens of a packed row."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens kept of each document when chats are tokenised by the trainer."}
    )
    enable_thinking: bool | None = field(default=None, metadata={"help": "Handed to the chat template if given."})
    allow_other_template: bool = field(
        default=False, metadata={"help": "Train on documents written by another chat template, with a warning."}
    )
    context_noise: float = field(
        default=0.05, metadata={"help": "Half-width of the uniform noise on the target's hidden states."}
    )
    objective: str = field(
        default="cross_entropy",
        metadata={"help": f"Objective: {', '.join(OBJECTIVES)}.", "choices": [*OBJECTIVES]},
    )
    loss_gamma: float | None = field(
        default=None, metadata={"help": "Decay length of cross_entropy in slots; min(block_size / 2, 7)."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of dpace."})
    slot_weights: str | None = field(
        default=None, metadata={"help": "Weights of the slots where distributions are compared: dpace or decay."}
    )
    loss_temperature: float = field(default=1.0, metadata={"help": "Temperature of the target's distribution."})
    cross_entropy_share: float = field(
        default=0.0, metadata={"help": "Share of the cross-entropy where distributions are compared."}
    )
    muon: bool = field(default=False, metadata={"help": "Train the matrices with Muon, the norms with AdamW."})
    loss_chunk_blocks: int | None = field(default=None, metadata={"help": "Blocks per chunk of the loss."})
    target_device: str | None = field(
        default=None, metadata={"help": "Device of the frozen target, in place of target_layout's."}
    )
    target_layout: str = field(
        default="auto", metadata={"help": "Where targets are: auto, paired, shared or spread.", "choices": [*LAYOUTS]}
    )
    prefetch_depth: int = field(default=2, metadata={"help": "Batches that the target works ahead; 0 takes turns."})
    feature_copies: str = field(
        default="auto",
        metadata={"help": "How hidden states cross: auto, peer or host.", "choices": [*FEATURE_COPIES]},
    )
    measure_alone_steps: int = field(
        default=0, metadata={"help": "First steps that run in turn, to measure each half by itself."}
    )
    ddp_bf16_compression: bool = field(default=False, metadata={"help": "Send gradients between ranks in bf16."})
    target_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained for a target given by id or folder."}
    )
    compile_target: bool = field(
        default=True, metadata={"help": "Compile on CUDA a Qwen3.5/3.6 target's layers, others' attention."}
    )
    allow_slow_target: bool = field(
        default=False, metadata={"help": "Run a hybrid target on CUDA without flash-linear-attention."}
    )
    drafter_attn_implementation: str | None = field(default=None, metadata={"help": "flex_attention, sdpa or eager."})
    trainable_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules of the drafter that are trained; by default all."}
    )
    max_nonfinite_steps: int = field(
        default=10, metadata={"help": "Steps in a row that are not finite and left out, after which the run stops."}
    )
    remote_checkpoint_dir: str | None = field(
        default=None, metadata={"help": "fsspec address to which each finished checkpoint is copied."}
    )
    allow_resume_changes: list[str] | None = field(
        default=None, metadata={"help": "What may differ on resuming: target, tokenizer, data, rows."}
    )
    compile_layers: bool | None = field(
        default=None, metadata={"help": "Compile the drafter's layers one by one; by default on CUDA."}
    )

    learning_rate: float = field(default=6e-4, metadata={"help": "Initial learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Steps of warm-up, or their share of all steps when below 1."}
    )
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the data."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Packed rows per micro-batch."})
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Packed rows per evaluation batch."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Kept False: the drafter's forward names none of the data's columns."}
    )
    # The parent's filter would log a broken step as a harmless one, and waits for the device in every micro-batch.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave non-finite losses out of the log."})
    # The drafter's configuration is published: training must not write use_cache=False into it.
    use_cache: bool = field(default=True, metadata={"help": "Written into the drafter's configuration."})

    def __post_init__(self):
        # The parent checks a GPU's types before it hears that accelerate was told to keep to the CPU, and where there
        # is none at all, ranks would each train alone.
        told = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        self.use_cpu = self.use_cpu or told
        self.cpu_for_want_of_gpu = not self.use_cpu and not torch.accelerator.is_available()
        self.use_cpu = self.use_cpu or self.cpu_for_want_of_gpu
        check_before(self)
        super().__post_init__()
        if self.device.type == "cpu":
            # Pinned memory speeds up copies to an accelerator; without one, torch warns at every dataloader.
            self.dataloader_pin_memory = False
        check_values(self)
        refuse_options(self)
        check_effects(self)
        check_world_size(self.world_size)
        if self.remote_checkpoint_dir is not None:
            check_address(self.remote_checkpoint_dir)

    def __getstate__(self) -> dict[str, Any]:
        # Every checkpoint holds a pickle of the arguments, which must not hold a token.
        return {name: None if name.endswith("_token") else value for name, value in vars(self).items()}

    @property
    def n_gpu(self) -> int:
        """1 with any GPU: one process trains one drafter, so several visible GPUs never mean `nn.DataParallel`."""
        return min(super().n_gpu, 1)


__all__ = ["DFlashTrainingArguments"]
