# SPDX-License-Identifier: Apache-2.0
"""Muon beside AdamW and the warm-up, stable, decay schedule, through the Trainer."""

import copy

import pytest
import torch
from runs import make_trainer
from tiny import refused
from torch import nn
from torch.optim import AdamW, Muon

from dflash_hf.optimizers import MuonWithAdamW


WSD = {
    "lr_scheduler_type": "warmup_stable_decay",
    "lr_scheduler_kwargs": {"num_decay_steps": 4, "min_lr_ratio": 0.0},
    "warmup_steps": 2,
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def take_steps(model: nn.Module, optimizers: list, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        (model(x) - x[:, :3]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_matrices_take_muons_steps_and_all_else_adamws():
    model, expected = small_model(), small_model()
    take_steps(model, [MuonWithAdamW(model.parameters(), lr=1e-2)], 5)
    matrices = [p for p in expected.parameters() if p.dim() == 2]
    others = [p for p in expected.parameters() if p.dim() != 2]
    muon = Muon(matrices, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    take_steps(expected, [muon, AdamW(others, lr=1e-2, weight_decay=0.0)], 5)
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    assert len(MuonWithAdamW(nn.LayerNorm(3).parameters()).parts) == 1


def test_a_schedule_reaches_both_parts_also_after_loading():
    model = small_model()
    optimizer = MuonWithAdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    take_steps(model, [optimizer], 1)
    scheduler.step()
    before = copy.deepcopy(model.state_dict())
    take_steps(model, [optimizer], 1, first=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_c5_loading_continues_exactly_and_refuses_another_optimizers_state():
    straight, resumed = small_model(), small_model()
    take_steps(straight, [MuonWithAdamW(straight.parameters(), lr=1e-2)], 6)
    first = MuonWithAdamW(resumed.parameters(), lr=1e-2)
    take_steps(resumed, [first], 3)
    second = MuonWithAdamW(resumed.parameters(), lr=5.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(resumed, [second], 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    with refused(ValueError, "muon"):
        second.load_state_dict(AdamW(resumed.parameters()).state_dict())


def test_c5_a_resumed_run_with_muon_and_wsd_is_the_same_run(tmp_path):
    arguments = {**WSD, "muon": True, "max_steps": 8, "save_steps": 4, "learning_rate": 2e-3}
    straight = make_trainer(tmp_path / "straight", **arguments)
    straight.train()
    rates = [entry["learning_rate"] for entry in straight.state.log_history if "learning_rate" in entry]
    assert rates[:2] == pytest.approx([0.0, 1e-3]) and rates[2:5] == pytest.approx([2e-3] * 3)
    assert rates[5] < 2e-3 and rates[-1] < rates[5]
    resumed = make_trainer(tmp_path / "resumed", **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-4"))
    for (name, parameter), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    assert isinstance(resumed.optimizer.optimizer, MuonWithAdamW)
