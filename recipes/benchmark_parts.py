# SPDX-License-Identifier: Apache-2.0
"""What the benchmark times of this package: the drafter's step as the trainer runs it, the target, the transfer."""

import time
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from benchmark_check import checked_parameters, naive_head_loss, naive_loss, only_blocks, relative_difference, spread
from benchmark_shapes import Shape
from benchmark_timing import Side, num_bytes, synchronize
from benchmark_variants import OPTIMIZERS, state_tensors
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashDraftModel, FrozenTarget
from dflash_hf.data_collator import IGNORE_INDEX
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import Objective, drafter_loss
from dflash_hf.packed_targets import PackedDense
from dflash_hf.trainer import add_context_noise, compile_layers


class DrafterStep:
    """Forward and backward of the drafter on one batch; with an optimizer, clipping and its step too.

    Args:
        drafter: The drafter with fp32 masters on its device.
        head: The target's embedding and head there.
        objective: Weights of the slots.
        batch: A batch of the collator there.
        context: The target's hidden states `[1, T, K * D]` there, as the target gives them.
        mixed_precision: Whether the forward runs under bf16 autocast, as with the trainer's `bf16=True`.
        context_noise: Half-width of the noise on the hidden states.
        compiled: Whether each layer is compiled, once for all layers of a kind.
        optimizer: Name of the optimizer whose step belongs to it.
        tolerances: What of the loss and of a gradient's norm passes for rounding; that of the type by default, with
            which a larger difference is an error.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        head: FrozenHead,
        objective: Objective,
        batch: dict[str, Any],
        context: torch.Tensor,
        mixed_precision: bool,
        context_noise: float = 0.0,
        compiled: bool = False,
        optimizer: str | None = None,
        tolerances: tuple[float, float] | None = None,
    ):
        self.drafter, self.head, self.objective = drafter, head, objective
        self.batch, self.context, self.context_noise = batch, context, context_noise
        self.mixed_precision = mixed_precision
        self.dtype = torch.bfloat16 if mixed_precision else torch.float32
        if compiled:
            compile_layers(drafter)
        self.model: Any = drafter
        if mixed_precision:
            # As accelerate prepares it for the trainer: autocast around the forward, fp32 out of it.
            autocast = torch.autocast(context.device.type, torch.bfloat16)
            self.model = convert_outputs_to_fp32(autocast(drafter.forward))
        self.tolerances = tolerances
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = OPTIMIZERS[optimizer](list(drafter.parameters()), context.device.type == "cuda")

    def forward(self, batch: dict[str, Any], context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised loss, as `DFlashTrainer.compute_loss` has it from the hidden states on, and the output."""
        if self.context_noise > 0:
            noise = (batch["document_lengths"], batch["noise_seeds"], self.context_noise, self.dtype)
            context = add_context_noise(context, *noise)
        config: Any = self.drafter.config
        loss, _, outputs = drafter_loss(self.model, config, batch, context.to(self.dtype), self.head, self.objective)
        normalizer = self.objective.normalizer(batch["labels"][..., 1:] != IGNORE_INDEX)
        return loss / normalizer.clamp(min=1e-12), outputs.last_hidden_state

    def __call__(self, context: torch.Tensor | None = None) -> torch.Tensor:
        loss = self.take_gradients(context)
        if self.optimizer is not None:
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            self.optimizer.step()
        return loss

    def take_gradients(self, context: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward alone."""
        loss, _ = self.forward(self.batch, self.context if context is None else context)
        loss.backward()
        return loss.detach()

    def side(self, name: str, step: Any = None, others: list[torch.Tensor] | None = None) -> Side:
        """This step, or one around it, for timing; `others` are further tensors that it needs on the device."""
        tensors = [t for t in self.batch.values() if isinstance(t, torch.Tensor)]
        head = [*self.head.embedding.parameters(), *self.head.head.parameters()]
        parameters = list(self.drafter.parameters())
        shared = num_bytes([self.context, *tensors, *head, *(others or [])])
        return Side(name, step or self, parameters, shared, lambda: state_tensors(self.optimizer))

    def check(self, num_blocks: int) -> dict[str, Any]:
        """Hold the step against naive twins, through the code and at the shape that is timed.

        Some blocks, spread over the row, are drafted and learned alone: loss and gradients of parameters. Then all
        blocks go through the head: the loss, and the gradient of those blocks of the drafter's output.

        Returns:
            The losses, the differences, their `tolerances`, and whether they are `within` them.

        Raises:
            ValueError: When they differ by more than the rounding of the type; tolerances of one's own raise nothing.
        """
        noise, self.context_noise = self.context_noise, 0.0
        blocks = spread(self.batch["anchor_positions"].shape[1], num_blocks)
        result = self._check_drafter(blocks) | self._check_head(blocks)
        self.context_noise = noise
        loss_tolerance, tolerance = self.tolerances or ((5e-3, 8e-2) if self.mixed_precision else (1e-4, 1e-3))
        of_loss = max(result["relative_loss_difference"], result["relative_head_loss_difference"])
        of_gradients = max(
            result["relative_hidden_gradient_difference"], *result["relative_gradient_differences"].values()
        )
        result["tolerances"] = [loss_tolerance, tolerance]
        result["within"] = of_loss <= loss_tolerance and of_gradients <= tolerance
        if not result["within"] and self.tolerances is None:
            raise ValueError(
                f"The drafter's step differs from its naive twin by more than rounding ({loss_tolerance} of the loss, "
                f"{tolerance} of a gradient's norm), so its time means nothing: {result}"
            )
        return result

    def _check_drafter(self, blocks: list[int]) -> dict[str, Any]:
        batch = only_blocks(self.batch, blocks)
        start = time.perf_counter()
        loss, _ = self.forward(batch, self.context)
        loss.backward()
        synchronize(self.context.device)
        seconds = time.perf_counter() - start
        names = checked_parameters(self.drafter)
        gradients = {name: self.drafter.get_parameter(name).grad for name in names}
        self.drafter.zero_grad(set_to_none=True)
        expected, naive = naive_loss(self.drafter, self.head, batch, self.context, self.objective, blocks)
        return {
            "blocks": len(blocks),
            "seconds": seconds,
            "loss": loss.item(),
            "naive_loss": expected,
            "relative_loss_difference": abs(loss.item() - expected) / abs(expected),
            "relative_gradient_differences": {n: relative_difference(gradients[n], naive[n]) for n in names},
        }

    def _check_head(self, blocks: list[int]) -> dict[str, Any]:
        loss, hidden = self.forward(self.batch, self.context)
        (gradient,) = torch.autograd.grad(loss, hidden)
        labels = self.batch["labels"][0]
        shape = (*labels.shape, -1)
        expected, naive = naive_head_loss(hidden.view(shape), self.head, labels, self.objective, blocks)
        return {
            "head_loss": loss.item(),
            "naive_head_loss": expected,
            "relative_head_loss_difference": abs(loss.item() - expected) / abs(expected),
            "relative_hidden_gradient_difference": relative_difference(gradient.view(shape)[blocks], naive),
        }


def make_targets(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[FrozenTarget, FrozenTarget | None]:
    """A random target of the shape, without the layers that no tap needs, and its twin.

    The twin runs the same layers with a call of attention for each document; None where not all attention is full.
    """
    with device:
        model = AutoModelForCausalLM.from_config(shape.target, dtype=dtype)
    taps = shape.drafter["target_layer_ids"]
    target = FrozenTarget(model, taps, compile_target=True)
    twin = FrozenTarget(model, taps, packed=True) if PackedDense.fits(model.get_decoder()) else None
    del model.get_decoder().layers[taps[-1] + 1 :]
    return target, twin


def feature_difference(
    target: FrozenTarget, twin: FrozenTarget, input_ids: torch.Tensor, lengths: list[list[int]]
) -> float:
    """By how much the features of both differ, relative to their size."""
    features, expected = (t.context_hidden_states(input_ids, lengths) for t in (target, twin))
    return relative_difference(features.float(), expected.float())


def target_side(target: FrozenTarget, input_ids: torch.Tensor, lengths: list[list[int]], name: str = "target") -> Side:
    """The target's forward to the hidden states of a batch."""
    input_ids = input_ids.to(target.device)
    shared = num_bytes(list(target.model.parameters()))
    return Side(name, lambda: target.context_hidden_states(input_ids, lengths), (), shared)


def transfer_side(context: torch.Tensor, source: torch.device, device: torch.device) -> Side:
    """The hidden states' way from the target's device: straight, or through pinned memory on a single GPU."""
    states = context.to(source, copy=True)
    if source != device:
        return Side("transfer", lambda: states.to(device, non_blocking=True), (), num_bytes([states]))
    if device.type != "cuda":
        return Side("transfer", states.clone, (), num_bytes([states]))
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)

    def through_host():
        host.copy_(states, non_blocking=True)
        return host.to(device, non_blocking=True)

    return Side("transfer", through_host, (), num_bytes([states]))


def step_side(target: FrozenTarget, drafter_step: DrafterStep) -> Side:
    """Target, transfer, drafter and optimizer one after the other, launched without waiting in between."""
    input_ids = drafter_step.batch["input_ids"].to(target.device)
    lengths, device = drafter_step.batch["document_lengths"], drafter_step.context.device

    def step():
        context = target.context_hidden_states(input_ids, lengths)
        return drafter_step(context.to(device, non_blocking=True))

    here = list(target.model.parameters()) if target.device == device else []
    return drafter_step.side("step", step, here)
