# SPDX-License-Identifier: Apache-2.0
"""Muon for the drafter's matrices and AdamW for its norms, as one optimizer that the Trainer steps and saves."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from .training_args import DFlashTrainingArguments


class MuonWithAdamW(Optimizer):
    """Steps two-dimensional parameters with `torch.optim.Muon` and all others with `torch.optim.AdamW`.

    Muon's orthogonal steps are scaled to the root mean square of AdamW's, so that both follow one learning rate.
    `params` are parameters or groups of them; `momentum` is Muon's, `betas`, `eps` and `fused` are AdamW's. `tables`
    are those with a row for each token, few of which have a gradient in a step: Muon's would spread over all.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 6e-4,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
        tables: Iterable[torch.Tensor] = (),
    ):
        by_adamw = {id(table) for table in tables}
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        matrices = [
            {**g, "params": [p for p in g["params"] if p.dim() == 2 and id(p) not in by_adamw]} for g in groups
        ]
        others = [{**g, "params": [p for p in g["params"] if p.dim() != 2 or id(p) in by_adamw]} for g in groups]
        matrices, others = ([g for g in part if g["params"]] for part in (matrices, others))
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, lr, weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(AdamW(others, lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        self._share_groups()

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """The states of both, which nothing but `load_state_dict` replaces."""
        return defaultdict(dict, {p: state for part in self.parts for p, state in part.state.items()})

    @state.setter
    def state(self, value: Any) -> None:
        """The base class sets an empty one, which is left alone."""

    def _share_groups(self) -> None:
        # Schedulers change the groups of this optimizer, which are those of its parts.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; `closure` computes the loss once more, with gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; a `ValueError` where another optimizer saved it."""
        states = state_dict.get("parts", ())
        if len(states) != len(self.parts):
            raise ValueError(
                "Another optimizer saved this state: resume with the value of muon that the run began with."
            )
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
        self._share_groups()


def muon_with_adamw(
    args: DFlashTrainingArguments, drafter: torch.nn.Module | None = None
) -> tuple[type[Optimizer], dict[str, Any]]:
    """What the Trainer's `optimizer_cls_and_kwargs` takes, from the training arguments and the drafter."""
    named = () if drafter is None else drafter.named_parameters()
    tables = [parameter for name, parameter in named if name.endswith("_codebook")]
    settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return MuonWithAdamW, {**settings, "fused": args.device.type == "cuda" and "fused" in args.optim, "tables": tables}
