# SPDX-License-Identifier: Apache-2.0
"""What torchao adds, on a CPU: 8-bit AdamW in the trainer."""

import sys
from pathlib import Path

import pytest
import torch
from runs import make_trainer


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from benchmark import state_tensors


EIGHT_BIT = {"optim": "adamw_torch_8bit", "max_steps": 4, "save_steps": 2}


@pytest.fixture(autouse=True)
def uncompiled():
    """torchao compiles its optimizers' step for every shape, which takes a CPU minutes and changes no result."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_c5_a_resumed_run_with_8_bit_adamw_is_the_same_run(tmp_path):
    """transformers' own argument, over fp32 masters; a changed learning rate acts as with other optimizers."""
    straight = make_trainer(tmp_path / "straight", **EIGHT_BIT)
    straight.train()
    optimizer = straight.optimizer.optimizer
    assert type(optimizer).__name__ == "AdamW8bit"
    states = [state["exp_avg"] for state in optimizer.state.values()]
    assert {type(state).__name__ for state in states if state.numel() >= 4096} == {"OptimState8bit"}
    assert all(p.dtype == torch.float32 for p in straight.model.parameters())
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    resumed = make_trainer(tmp_path / "resumed", **EIGHT_BIT)
    resumed.train(resume_from_checkpoint=checkpoint)
    for (name, parameter), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    faster = make_trainer(tmp_path / "faster", learning_rate=2e-3, **EIGHT_BIT)
    faster.train(resume_from_checkpoint=checkpoint)
    rates = [[e["learning_rate"] for e in t.state.log_history if "learning_rate" in e][-2:] for t in (faster, resumed)]
    assert rates[0] == pytest.approx([2 * rate for rate in rates[1]])


def test_a_step_that_is_not_finite_leaves_8_bit_adamw_alone(tmp_path):
    trainer = make_trainer(tmp_path, **EIGHT_BIT)
    weight, seen = trainer.model.norm.weight, []
    # The norm's gradient comes before that of the projection, so this is the second step.
    trainer.model.fc.weight.register_hook(lambda grad: grad * (float("nan") if len(seen) == 2 else 1.0))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))
    trainer.train()
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])
    states = state_tensors(trainer.optimizer.optimizer)
    assert states and all(tensor.isfinite().all() for tensor in states)
