# SPDX-License-Identifier: Apache-2.0
"""What only a CUDA device can show: the loss and the training step run there as on a CPU."""

import pytest
import tiny
import torch

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.losses import frozen_head_loss, make_objective


pytestmark = pytest.mark.gpu


def make_drafter(implementation: str, target: str = "dense_target", **overrides) -> DFlashDraftModel:
    config = getattr(tiny, target)().config
    torch.manual_seed(0)
    config = DFlashDraftConfig.from_target_config(
        config, num_hidden_layers=2, block_size=16, mask_token_id=tiny.MASK_TOKEN_ID, **overrides
    )
    drafter = DFlashDraftModel(config).cuda()
    drafter.set_attn_implementation(implementation)
    return drafter


def documents(count: int = 8) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 90, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(0, 256, (n,), generator=generator).tolist(), "supervised_spans": [[5, n]]}
        for n in lengths
    ]


@pytest.mark.parametrize("objective", ["cross_entropy", "dpace"])
def test_loss_on_the_device_equals_the_cpu(objective):
    torch.manual_seed(0)
    hidden = torch.randn(1, 12 * 8, 32)
    labels = torch.randint(0, 50, (1, 12, 8))
    labels[..., 0] = -100
    labels[0, 3, 4:] = -100
    labels[0, 5] = -100
    head = torch.nn.Linear(32, 50, bias=False).requires_grad_(False)
    results = []
    for device in ("cpu", "cuda"):
        states = hidden.to(device, copy=True).requires_grad_()
        loss, sums = frozen_head_loss(
            states, labels.to(device), head.to(device), make_objective(objective, 8), 50, chunk_blocks=5
        )
        loss.backward()
        results.append([loss.detach().cpu(), states.grad.cpu(), sums.values.cpu()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_training_on_the_device_follows_the_cpu(tmp_path):
    losses = {}
    for use_cpu in (True, False):
        drafter = make_drafter("sdpa").cpu()
        args = DFlashTrainingArguments(
            output_dir=str(tmp_path), max_steps=4, row_length=256, num_anchors=16, logging_steps=1, use_cpu=use_cpu,
            bf16=not use_cpu, context_noise=0.0, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = DFlashTrainer(drafter, tiny.dense_target(), args, train_dataset=documents())
        trainer.train()
        losses[use_cpu] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        assert trainer.model.config._attn_implementation == ("sdpa" if use_cpu else "flex_attention")
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert losses[False] == pytest.approx(losses[True], rel=2e-2)


def test_p2_training_steps_neither_recompile_nor_wait_for_the_device(tmp_path):
    """After warm-up on mixed documents, forward, backward and optimizer are launched without a look at the device."""
    drafter = make_drafter("flex_attention", layer_types=["sliding_attention", "full_attention"], sliding_window=24,
                           use_sliding_window=True)  # fmt: skip
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), max_steps=50, row_length=512, num_anchors=16, logging_steps=1000, bf16=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_first_step=False, prefetch_depth=0,
    )  # fmt: skip
    trainer = DFlashTrainer(drafter, tiny.dense_target(), args, train_dataset=documents(400))
    read_target = trainer.target.context_hidden_states

    def unwatched(*args):
        # transformers' own masks of a dense target look at the device; tests/test_gpu_target.py watches hybrid ones.
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        states = read_target(*args)
        torch.cuda.set_sync_debug_mode(mode)
        return states

    trainer.target.context_hidden_states = unwatched
    steps, graphs = [], []
    training_step = trainer.training_step

    def watched(model, inputs, *rest):
        steps.append(None)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 5 else "default")
        try:
            return training_step(model, inputs, *rest)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.training_step = watched
    trainer.train()
    assert len(steps) == 50 and graphs[-1] == graphs[5]
