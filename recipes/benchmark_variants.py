# SPDX-License-Identifier: Apache-2.0
"""Other ways to take the drafter's step, timed beside the plain one: recomputed layers, fp8 products, optimizers.

torchao, of which fp8 products and 8-bit Adam are, is no requirement of this package and is imported when asked for.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from benchmark_check import checked_parameters, relative_difference
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dflash_hf import DFlashDraftModel
from dflash_hf.optimizers import MuonWithAdamW


NO_TORCHAO = "{} needs torchao, which cannot be imported ({}). Run `pip install --no-deps torchao`, or leave it out."
CHECKPOINTING = "activation_checkpointing"
# Scales per tensor or per row (and column); the last one computes the gradients of weights in bf16.
FLOAT8_RECIPES = {"float8": "tensorwise", "float8_rowwise": "rowwise", "float8_rowwise_gw_hp": "rowwise_with_gw_hp"}
VARIANTS = ("plain", CHECKPOINTING, *FLOAT8_RECIPES)
# What fp8 may add to a loss and to a gradient's norm and still pass for rounding: its products carry two or three
# bits of fraction, and errors add up over the layers.
FLOAT8_TOLERANCES = (2e-2, 0.4)


def float8_recipe(variant: str) -> str | None:
    """Name of torchao's recipe, None for a variant without fp8."""
    return next((FLOAT8_RECIPES[word] for word in variant.split("+") if word in FLOAT8_RECIPES), None)


def check_variant(variant: str) -> None:
    """Refuse a variant that is none.

    Raises:
        ValueError: Naming those that there are.
    """
    words = variant.split("+")
    several = len(words) != len(set(words)) or sum(word in FLOAT8_RECIPES for word in words) > 1
    if set(words) - set(VARIANTS) or several or (len(words) > 1 and "plain" in words):
        raise ValueError(
            f"variants has {variant!r}; choose from {', '.join(VARIANTS)}, with commas between, or join one kind of "
            f"fp8 and checkpointing: {CHECKPOINTING}+float8."
        )


def make_variant(drafter: DFlashDraftModel, variant: str) -> DFlashDraftModel:
    """A drafter that takes the step in its own way with the very parameters of another one.

    Raises:
        ImportError: fp8 is asked for without torchao.
    """
    with torch.device("meta"):
        other = DFlashDraftModel(drafter.config).train()
    other.load_state_dict(dict(drafter.named_parameters()), assign=True)
    other.rotary_emb = drafter.rotary_emb
    if CHECKPOINTING in variant.split("+"):
        other.activation_checkpointing_enable()
    recipe = float8_recipe(variant)
    return other if recipe is None else convert_to_float8(other, recipe)


def convert_to_float8(drafter: DFlashDraftModel, recipe: str) -> DFlashDraftModel:
    """Let the layers' matrix products run in fp8, in place; the projection of the context stays as it is.

    Args:
        drafter: The drafter; its parameters stay the same.
        recipe: tensorwise, rowwise or rowwise_with_gw_hp.

    Raises:
        ImportError: There is no torchao.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ImportError(NO_TORCHAO.format("fp8", error)) from error
    # On a CPU, fp8's rounding is all that can be had.
    on_cpu = next(drafter.parameters()).device.type == "cpu"
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=on_cpu)

    def converts(module: nn.Module, name: str) -> bool:
        # The kernels take rows and columns by 16.
        return name.startswith("layers.") and isinstance(module, nn.Linear) and not any(_odd(module.weight.shape))

    converted: Any = convert_to_float8_training(drafter, module_filter_fn=converts, config=config)
    return converted


def _odd(sizes: Iterable[int]) -> list[bool]:
    return [size % 16 > 0 for size in sizes]


def compare_steps(step: Any, reference: Any) -> dict[str, Any]:
    """Loss and gradients of one step against another's, for the same weights, tokens and anchors."""
    losses, gradients = [], []
    names = checked_parameters(reference.drafter)
    for one in (step, reference):
        one.drafter.zero_grad(set_to_none=True)
        losses.append(one.take_gradients().item())
        gradients.append({name: one.drafter.get_parameter(name).grad for name in names})
        one.drafter.zero_grad(set_to_none=True)
    ours, theirs = gradients
    return {
        "loss": losses[0],
        "reference_loss": losses[1],
        "relative_loss_difference": abs(losses[0] - losses[1]) / abs(losses[1]),
        "relative_gradient_differences": {n: relative_difference(ours[n], theirs[n]) for n in names},
    }


def _adamw(parameters: list[nn.Parameter], fused: bool) -> Optimizer:
    return AdamW(parameters, lr=0.0, weight_decay=0.0, fused=fused)


def _muon(parameters: list[nn.Parameter], fused: bool) -> Optimizer:
    return MuonWithAdamW(parameters, lr=0.0, fused=fused)


def _adamw_8bit(parameters: list[nn.Parameter], fused: bool) -> Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(NO_TORCHAO.format("adamw_8bit", error)) from error
    optimizer: Optimizer = AdamW8bit(parameters, lr=0.0, weight_decay=0.0)
    return optimizer


# As the trainer makes them of `optim: adamw_torch_fused`, `muon: true` and `optim: adamw_torch_8bit`. A rate of 0
# takes as long as any other and leaves all repeats and peers the same weights.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], bool], Optimizer]] = {
    "adamw": _adamw,
    "muon": _muon,
    "adamw_8bit": _adamw_8bit,
}


def state_tensors(optimizer: Optimizer | None) -> list[torch.Tensor]:
    """What an optimizer keeps between steps, quantised states as the plain tensors that they consist of."""
    states = [] if optimizer is None else optimizer.state.values()
    return [part for state in states for tensor in state.values() for part in _parts(tensor)]


def _parts(tensor: Any) -> list[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        return []
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
