# SPDX-License-Identifier: Apache-2.0
"""Guards against training in vain: steps that are not finite, and a loss that cannot fall.

A loss that is not finite makes the gradients of its micro-batch NaN, the sum of gradients carries that to every rank,
and Trainer takes their norm in every step anyway: so all ranks see the same flag without a collective of its own. A
fused optimizer leaves the step out on the device (`found_inf`, as under a gradient scaler), so that nothing waits; the
host reads the flag one step later. Other optimizers are given no gradients, for which the host has to read the flag:
on a CPU that is free, on a GPU it costs a wait per step.

A step that is left out changes neither weights nor optimizer; it still counts as a step, so data order and learning
rate stay those of the plan.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from .host_copies import HostCopy


logger = logging.get_logger(__name__)

# Documents named in a message; a step may hold hundreds.
MAX_NAMED = 20


class NonFiniteTrainingError(RuntimeError):
    """Too many steps in a row whose loss or gradients were not finite, or weights that are not finite themselves."""


@dataclass
class _MicroBatch:
    """What the device knows of one micro-batch, read only when its step was left out."""

    documents: list[list[int]]
    lengths: list[list[int]]
    context_sums: torch.Tensor  # [B, T], not finite where any of a token's hidden states is not
    loss_is_finite: torch.Tensor | None = None

    def broken_documents(self) -> list[int]:
        """The documents that have a token with non-finite hidden states."""
        finite = torch.isfinite(self.context_sums).cpu()
        broken = []
        for row, (documents, lengths) in enumerate(zip(self.documents, self.lengths, strict=True)):
            parts = finite[row, : sum(lengths)].split(lengths)
            broken += [document for document, part in zip(documents, parts, strict=True) if not part.all()]
        return broken


@dataclass
class _Step:
    number: int
    flag: HostCopy
    micro_batches: list[_MicroBatch] = field(default_factory=list)


class StepGuard(TrainerCallback):
    """Leaves out every step whose loss or gradients are not finite, names it, and stops after too many in a row.

    Args:
        drafter (`nn.Module`): Whose parameters are looked at once a step was left out.
        max_in_a_row (`int`): Steps left out one after the other that stop the run.
        scaled (`bool`): Whether a gradient scaler (fp16) decides on the device; then steps are only counted here.
    """

    def __init__(self, drafter: nn.Module, max_in_a_row: int, scaled: bool = False):
        self.drafter, self.max_in_a_row, self.scaled = drafter, max_in_a_row, scaled
        self.in_a_row = 0
        self.left_out: list[int] = []
        self.evaluated: list[_MicroBatch] = []
        self._settled = self._num_left_out = 0
        self._flag: torch.Tensor | None = None
        self._current: list[_MicroBatch] = []
        self._pending: list[_Step] = []
        self._hook: Any = None

    def see(
        self, context: torch.Tensor, documents: list[list[int]], lengths: list[list[int]], training: bool = True
    ) -> None:
        """Remember a micro-batch's hidden states `[B, T, K * D]` by one sum per token."""
        seen = _MicroBatch(documents, lengths, context.detach().sum(-1, dtype=torch.float32))
        (self._current if training else self.evaluated).append(seen)

    def marked(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, with gradients that are NaN throughout where it is not finite itself."""
        finite = torch.isfinite(loss.detach())
        if self._current:
            self._current[-1].loss_is_finite = finite
        return loss * torch.where(finite, 1.0, float("nan"))

    def judge(self, grad_norm: torch.Tensor | float, step: int) -> torch.Tensor:
        """Whether a step is left out, on the device, from the norm of its summed gradients.

        Args:
            grad_norm: As Trainer computed it, the same on every rank.
            step: The step's number, from 1.
        """
        self._flag = ~torch.isfinite(torch.as_tensor(grad_norm).detach())
        self._pending.append(_Step(step, HostCopy(self._flag), self._current))
        self._current = []
        return self._flag

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self.in_a_row, self.left_out, self._settled, self._num_left_out = 0, [], 0, 0

    def finish(self) -> None:
        """Read every flag at the end of a run, which has to have taken a step and left finite weights.

        Raises:
            NonFiniteTrainingError: All its steps were left out, or the last one spoilt the weights.
        """
        self.flush()
        if self._settled and self._num_left_out == self._settled:
            raise NonFiniteTrainingError(
                f"All {self._settled} steps of this run were left out, since their losses or gradients are not "
                "finite: nothing was trained. Look at the documents named above and at the target's dtype."
            )
        parameter = first_nonfinite_parameter(self.drafter)
        if parameter is not None:
            raise NonFiniteTrainingError(
                f"The run ended with a drafter whose {parameter} is not finite. Resume from the last checkpoint; "
                "checkpoints are written of finite weights only."
            )

    def report_evaluation(self, loss: float) -> None:
        """Name the documents of an evaluation whose loss is not finite, and forget what was seen of it."""
        if not math.isfinite(loss):
            broken = [document for batch in self.evaluated for document in batch.broken_documents()]
            whose = f"not finite in {_named(broken)} of those evaluated" if broken else "finite in this process"
            logger.warning(f"The loss of the evaluation is not finite: the target's hidden states are {whose}.")
        self.evaluated.clear()

    def close(self) -> None:
        """Let go of the optimizer and of what was remembered."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._current, self._pending = None, [], []

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._flag is None or self.scaled:
            return
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = self._flag.float()
        elif self._flag.item():
            # Without gradients an optimizer touches neither a parameter nor its state.
            optimizer.zero_grad(set_to_none=True)

    def on_step_end(self, args, state, control, **kwargs):
        # The newest flag may still be on its way.
        keep = 0 if not self._pending or self._pending[-1].flag.is_immediate else 1
        self._settle(len(self._pending) - keep)

    def flush(self) -> None:
        """Read every flag, waiting for the device.

        Raises:
            NonFiniteTrainingError: As for any step.
        """
        self._settle(len(self._pending))

    def take_left_out(self) -> list[int]:
        """The steps left out since this was last asked."""
        steps, self.left_out = self.left_out, []
        return steps

    def _settle(self, count: int) -> None:
        settled, self._pending = self._pending[:count], self._pending[count:]
        self._settled += len(settled)
        for step in settled:
            if not step.flag.read().item():
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            self._num_left_out += 1
            self.left_out.append(step.number)
            self._report(step)

    def _report(self, step: _Step) -> None:
        message = (
            f"Step {step.number} was left out: its loss or gradients are not finite. {_blame(step.micro_batches)}"
        )
        parameter = first_nonfinite_parameter(self.drafter)
        if parameter is not None:
            raise NonFiniteTrainingError(
                f"{message} The drafter's own {parameter} is not finite, so no later step can be. Resume from the "
                "last checkpoint; checkpoints are written of finite weights only."
            )
        if self.in_a_row >= self.max_in_a_row:
            raise NonFiniteTrainingError(
                f"{message} It is the last of {self.in_a_row} in a row (max_nonfinite_steps={self.max_in_a_row}), so "
                "the run stops; weights and checkpoints are those from before. Look at the named documents and at "
                "the target's dtype, or lower the learning rate."
            )
        logger.warning(f"{message} {self.in_a_row} in a row; {self.max_in_a_row} stop the run.")


def _blame(batches: list[_MicroBatch]) -> str:
    broken = [document for batch in batches for document in batch.broken_documents()]
    if broken:
        return f"The target's hidden states are not finite in {_named(broken)}."
    lost = [batch for batch in batches if batch.loss_is_finite is not None]
    lost = [batch for batch in lost if not batch.loss_is_finite.item()]  # type: ignore[union-attr]
    documents = [d for batch in lost or batches for row in batch.documents for d in row]
    what = "The loss is not finite" if lost else "The losses of this process are finite; the step trained here"
    return f"{what} on {_named(documents)}."


def _named(documents: list[int]) -> str:
    shown = ", ".join(map(str, documents[:MAX_NAMED]))
    more = f" and {len(documents) - MAX_NAMED} more" if len(documents) > MAX_NAMED else ""
    return f"document{'s' if len(documents) != 1 else ''} {shown}{more}"


def first_nonfinite_parameter(model: nn.Module) -> str | None:
    """Name of a parameter that holds an infinity or NaN, or None (reads the device once)."""
    named = dict(model.named_parameters())
    finite = torch.stack([torch.isfinite(p.detach()).all() for p in named.values()]).tolist()
    return next((name for name, is_finite in zip(named, finite, strict=True) if not is_finite), None)


def check_can_learn(drafter: nn.Module, groups: list[dict[str, Any]], partial: bool = False) -> None:
    """Raises for a loss that cannot fall, whatever the data; warns of parameters that are frozen.

    Args:
        drafter: The model to be trained.
        groups: Of the optimizer: `lr` (or `initial_lr`, before the schedule), and `params` where it exists already.
        partial: Whether a part of the drafter was meant to be frozen.

    Raises:
        ValueError: Every learning rate is 0, no parameter requires a gradient, or the optimizer has none of them.
    """
    if not any(group.get("initial_lr", group["lr"]) for group in groups):
        raise ValueError(
            "The learning rate is 0, so no step would change the drafter. Set learning_rate (the paper: 6e-4), or "
            "call evaluate() if nothing is to be trained."
        )
    named = dict(drafter.named_parameters())
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    if len(frozen) == len(named):
        raise ValueError(
            f"None of the drafter's {len(named)} parameters requires a gradient, so no step would change it. Call "
            "drafter.requires_grad_(True), or freeze fewer of them."
        )
    held = {id(parameter) for group in groups for parameter in group.get("params", named.values())}
    if not any(id(parameter) in held for parameter in named.values() if parameter.requires_grad):
        raise ValueError(
            "The optimizer holds none of the drafter's parameters that require a gradient, so no step would change "
            "them. Make it from drafter.parameters(), or leave it out."
        )
    if frozen and not partial:
        logger.warning(
            f"{len(frozen)} of the drafter's {len(named)} parameters are frozen and will not be trained: "
            f"{', '.join(frozen[:MAX_NAMED])}{', ...' if len(frozen) > MAX_NAMED else ''}."
        )


__all__ = ["NonFiniteTrainingError", "StepGuard", "check_can_learn", "first_nonfinite_parameter"]
