# SPDX-License-Identifier: Apache-2.0
"""Every objective on a GPU: compiled terms and filled-up chunks give the CPU's loss and gradient, without waiting."""

import pytest
import torch
from torch import nn

from dflash_hf.losses import OBJECTIVES, TargetStates, frozen_head_loss, make_objective


pytestmark = pytest.mark.gpu
ROWS, WIDTH, ANCHORS, BLOCK, HIDDEN, VOCAB = 3, 90, 20, 8, 64, 1000


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.rand(ROWS, WIDTH - BLOCK, generator=generator).argsort(dim=1)[:, :ANCHORS].sort(dim=1).values
    lengths = torch.randint(0, BLOCK, anchors.shape, generator=generator)
    labels = torch.randint(0, VOCAB, (*anchors.shape, BLOCK), generator=generator)
    slots = torch.arange(BLOCK)
    labels = labels.masked_fill((slots == 0) | (slots > lengths[..., None]), -100)
    hidden = torch.randn(ROWS, ANCHORS * BLOCK, HIDDEN, generator=generator)
    states = torch.randn(ROWS, WIDTH, HIDDEN, generator=generator)
    head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3)
    return hidden, labels, anchors, states, head


@pytest.mark.parametrize("name", OBJECTIVES)
def test_p4_a_gpu_gives_the_cpus_loss_and_gradient_without_waiting(name):
    objective = make_objective(name, BLOCK)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        hidden, labels, anchors, states, head = (value.to(device) for value in batch())
        hidden.requires_grad_()
        counted = (labels != -100).sum(-1).cpu().numpy().ravel()
        # The third time everything is compiled, and nothing may wait for the device.
        torch.cuda.set_sync_debug_mode("error" if len(results) == 2 else "default")
        try:
            target = TargetStates(states, anchors)
            loss, sums = frozen_head_loss(hidden, labels, head, objective, VOCAB, 16, counted, target)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([value.detach().cpu() for value in (loss, sums.values, hidden.grad)])
    for fast in results[1:]:
        for expected, value in zip(results[0], fast, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)
