# SPDX-License-Identifier: Apache-2.0
"""Training arguments of a DFlash drafter; the defaults are the paper's where it gives them."""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments


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
        context_noise (`float`, *optional*, defaults to 0.05):
            Half-width of the uniform noise on the target's hidden states in training; 0 switches it off.
        objective (`str`, *optional*, defaults to `"cross_entropy"`):
            `"cross_entropy"` (the paper's decayed cross-entropy) or `"dpace"`.
        loss_gamma (`float`, *optional*):
            Decay length in slots of `"cross_entropy"`; `min(block_size / 2, 7)` by default.
        dpace_alpha (`float`, *optional*, defaults to 0.5):
            Smoothing of `"dpace"`.
        loss_chunk_blocks (`int`, *optional*):
            Blocks per chunk of the loss; by default as many as keep 2**27 logits.
        target_device (`str`, *optional*):
            Device of the frozen target; the drafter's by default.
        target_model_init_kwargs (`dict`, *optional*):
            Arguments of `from_pretrained` for a target given by id or folder.
        drafter_attn_implementation (`str`, *optional*):
            `"flex_attention"`, `"sdpa"` or `"eager"`; by default flex on CUDA and sdpa elsewhere.
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
    context_noise: float = field(
        default=0.05, metadata={"help": "Half-width of the uniform noise on the target's hidden states."}
    )
    objective: str = field(default="cross_entropy", metadata={"help": "Objective: cross_entropy or dpace."})
    loss_gamma: float | None = field(
        default=None, metadata={"help": "Decay length of cross_entropy in slots; min(block_size / 2, 7)."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of dpace."})
    loss_chunk_blocks: int | None = field(default=None, metadata={"help": "Blocks per chunk of the loss."})
    target_device: str | None = field(
        default=None, metadata={"help": "Device of the frozen target; the drafter's by default."}
    )
    target_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of from_pretrained for a target given by id or folder."}
    )
    drafter_attn_implementation: str | None = field(default=None, metadata={"help": "flex_attention, sdpa or eager."})
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
        super().__post_init__()
        if self.device.type == "cpu":
            # Pinned memory speeds up copies to an accelerator; without one, torch warns at every dataloader.
            self.dataloader_pin_memory = False
        if self.remove_unused_columns:
            raise ValueError(
                "remove_unused_columns=True would drop every column before the collator, since the drafter's forward "
                "takes hidden states, not token ids. Leave it False."
            )
        for name in ("num_anchors", "row_length", "max_anchors_per_row", "max_length", "loss_chunk_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}=True casts the drafter itself, so that a later training step would have no fp32 masters. "
                    "Leave it False; with bf16=True evaluation runs under autocast already."
                )
        if isinstance(self.target_model_init_kwargs, dict) and "token" in self.target_model_init_kwargs:
            raise ValueError(
                "target_model_init_kwargs holds a token, which would be written into every checkpoint with the "
                "arguments. Set the environment variable HF_TOKEN, or log in with `hf auth login`."
            )
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} has no effect on a drafter's objective, which "
                "follows the target's own tokens. Leave it 0."
            )
        if not 0 <= self.context_noise < float("inf"):
            raise ValueError(f"context_noise={self.context_noise} must be 0 or a positive half-width, such as 0.05.")

    @property
    def n_gpu(self) -> int:
        """1 with any GPU: one process trains one drafter, so several visible GPUs never mean `nn.DataParallel`."""
        return min(super().n_gpu, 1)


__all__ = ["DFlashTrainingArguments"]
