# SPDX-License-Identifier: Apache-2.0
"""The same drafter step through SpecForge 0.2.0 and speculators 0.9.0: same weights, tokens and anchors.

Neither is a requirement: each is timed where it can be imported. Both draw their anchors themselves, so each gets ours
through a subclass or a patch that lives as long as the step. What differs and is left as it is: SpecForge trains bf16
weights, speculators fp32 ones under autocast; both multiply the anchors' own slots with the head; speculators computes
the target's logits for its labels and keeps all logits.
"""

from typing import Any
from unittest.mock import patch

import torch
from benchmark_timing import Side, num_bytes
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from dflash_hf import DFlashDraftModel
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import DecayedCrossEntropy, DPace, Objective


def _plain_config(drafter: DFlashDraftModel, attention: str, **fields) -> Qwen3Config:
    ours: Any = drafter.config
    return Qwen3Config(
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_attention_heads=ours.num_attention_heads,
        num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.head_dim,
        vocab_size=ours.vocab_size,
        rms_norm_eps=ours.rms_norm_eps,
        layer_types=list(ours.layer_types),
        use_sliding_window="sliding_attention" in ours.layer_types,
        sliding_window=ours.sliding_window,
        rope_parameters=dict(ours.rope_parameters),
        attn_implementation=attention,
        **fields,
    )


class SpecForgeStep:
    """Forward and backward of SpecForge's online DFlash model, in the type that its trainer uses on the device.

    Raises:
        ImportError: When it is not installed.
        ValueError: For more than one document, which it cannot keep apart.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        head: FrozenHead,
        objective: Objective,
        batch: dict[str, Any],
        context: torch.Tensor,
        mixed_precision: bool,
    ):
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDrafter

        _check_one_document(batch)
        ours: Any = drafter.config
        anchors = batch["anchor_positions"]

        class FixedAnchors(OnlineDFlashModel):
            def _sample_anchor_positions(self, seq_len, loss_mask, device):
                return anchors, torch.ones_like(anchors, dtype=torch.bool)

        device = context.device
        attention = "flex_attention" if device.type == "cuda" else "sdpa"
        config = _plain_config(
            drafter,
            attention,
            block_size=ours.block_size,
            num_target_layers=ours.num_target_layers,
            dflash_config={"mask_token_id": ours.mask_token_id, "target_layer_ids": ours.target_layer_ids},
        )
        with device:
            model = SpecForgeDrafter(config).train()
        model.load_state_dict(drafter.state_dict())
        if mixed_precision:
            model.to(torch.bfloat16)
            with device:
                # The cast rounds the rotary frequencies too, which would change the loss but not the time.
                model.rotary_emb = Qwen3RotaryEmbedding(config)
        kind, gamma = _objective_fields(objective, "dflash")
        self.online = FixedAnchors(
            model,
            head.head,
            head.embedding,
            mask_token_id=ours.mask_token_id,
            block_size=ours.block_size,
            attention_backend=attention,
            num_anchors=anchors.shape[1],
            loss_decay_gamma=gamma,
            loss_type=kind,
            dpace_alpha=objective.alpha if isinstance(objective, DPace) else 0.5,
        )
        self.model, self.batch, self.context = model, batch, context
        # D-PACE's sum is divided by the rows there and by the counted slots here.
        counted = (batch["labels"][..., 1:] != -100).sum().item()
        self.factor = 1.0 if kind == "dflash" else 1.0 / counted
        self.comparable = True

    def __call__(self) -> torch.Tensor:
        loss, _, _ = self.online(self.batch["input_ids"], self.context, self.batch["loss_mask"])
        loss.backward()
        return loss.detach() * self.factor

    def side(self, name: str) -> Side:
        return _side(name, self, self.model, self.online, self.batch, self.context)


class SpeculatorsStep:
    """Forward and backward of speculators' DFlash model, fp32 weights under autocast as its trainer has them.

    Its labels are the tokens that the target's own logits favour, so the target's last hidden states are made such
    that these are the batch's tokens. On sliding layers its window is one of its own, so losses are equal only where
    all layers are full.

    Raises:
        ImportError: When it, or something that it imports, is not installed.
        ValueError: For more than one row.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        head: FrozenHead,
        objective: Objective,
        batch: dict[str, Any],
        context: torch.Tensor,
        mixed_precision: bool,
    ):
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashSpeculatorConfig, core

        ours: Any = drafter.config
        device, cuda = context.device, context.device.type == "cuda"
        config = DFlashSpeculatorConfig(
            transformer_layer_config=_plain_config(drafter, "simple_flex_attention" if cuda else "sdpa"),
            draft_vocab_size=ours.vocab_size,
            block_size=ours.block_size,
            aux_hidden_state_layer_ids=list(ours.target_layer_ids),
            mask_token_id=ours.mask_token_id,
        )
        config.transformer_layer_config._attn_implementation = "simple_flex_attention" if cuda else "sdpa"
        with torch.device("meta"):
            model = core.DFlashDraftModel(config).train()
        own = {name: p.detach().clone() for name, p in drafter.named_parameters()}
        missing, unexpected = model.load_state_dict(own, strict=False, assign=True)
        assert not unexpected and all(n.split(".")[0] in _TARGETS_OWN for n in missing), (missing, unexpected)
        with device:
            model.rotary_emb = Qwen3RotaryEmbedding(config.transformer_layer_config)
            model.verifier_norm = Qwen3RMSNorm(ours.hidden_size).requires_grad_(False)
        model.embed_tokens, model.lm_head, model.verifier_lm_head = head.embedding, head.head, head.head
        self.model, self.core, self.batch, self.context = model, core, batch, context
        anchors = batch["anchor_positions"][0]
        self.anchors = (anchors, torch.ones_like(anchors, dtype=torch.bool))
        kind, gamma = _objective_fields(objective, "fixed-exp-decay")
        self.arguments: dict[str, Any] = {
            "loss_config": resolve_loss_config("ce", "fused" if cuda else "eager"),
            "gamma": gamma or 1.0,
            "max_anchors": len(anchors),
            "per_position_loss_weight": kind,
            "dpace_alpha": objective.alpha if isinstance(objective, DPace) else 0.5,
        }
        following = batch["input_ids"].roll(-1, dims=1)
        self.last_hidden_states = head.head.weight[following].to(context.dtype)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision)
        # The sum of weighted losses is divided by the counted slots there, by the sum of weights here.
        counted = batch["labels"][..., 1:] != -100
        self.factor = (counted.sum() / objective.normalizer(counted)).item()
        self.comparable = "sliding_attention" not in ours.layer_types

    def __call__(self) -> torch.Tensor:
        batch = self.batch
        with patch.object(self.core, "select_anchors", lambda *_: self.anchors), self.autocast:
            _, loss, _ = self.model(
                hidden_states=self.context,
                input_ids=batch["input_ids"],
                loss_mask=batch["loss_mask"],
                verifier_last_hidden_states=self.last_hidden_states,
                document_ids=batch["document_ids"],
                position_ids=batch["position_ids"],
                **self.arguments,
            )
        loss.backward()
        return loss.detach() * self.factor

    def side(self, name: str) -> Side:
        return _side(name, self, self.model, self.model, self.batch, self.context, self.last_hidden_states)


_TARGETS_OWN = ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")

PEERS = {"specforge": SpecForgeStep, "speculators": SpeculatorsStep}


def _objective_fields(objective: Objective, decayed: str) -> tuple[str, float | None]:
    """A peer's name of the objective, and its decay length."""
    if isinstance(objective, DecayedCrossEntropy):
        return decayed, objective.gamma
    if isinstance(objective, DPace):
        return "dpace", None
    raise ValueError(f"The peers know no {type(objective).__name__}; choose cross_entropy or dpace.")


def _check_one_document(batch: dict[str, Any]) -> None:
    lengths = batch["document_lengths"]
    if any(len(row) != 1 for row in lengths):
        raise ValueError(
            f"The row has {len(lengths[0])} documents, which SpecForge would let see each other: the work would not "
            "be the same. Give num_documents 1, or leave this peer out."
        )


def _side(
    name: str, step: Any, model: nn.Module, whole: nn.Module, batch: dict[str, Any], *others: torch.Tensor
) -> Side:
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in whole.parameters() if not p.requires_grad]
    tensors = [t for t in batch.values() if isinstance(t, torch.Tensor)]
    return Side(name, step, trained, num_bytes([*frozen, *tensors, *others]))
