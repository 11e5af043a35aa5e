# SPDX-License-Identifier: Apache-2.0
"""The operations of a step: counted by hand, as torch multiplies, and the same for plan, benchmark and trainer."""

import sys
from pathlib import Path

import pytest
import torch
from runs import make_documents, make_trainer
from tiny import dense_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dflash_hf.losses import drafter_loss, make_objective
from dflash_hf.operations import count_operations, drafter_weights, passed_weights
from dflash_hf.planning import DRAFTER_EFFICIENCY, TARGET_EFFICIENCY, make_plan
from dflash_hf.topology import place


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from benchmark import SHAPES, Case, make_batch, make_drafter, make_head, step_operations


CPU, META = torch.device("cpu"), torch.device("meta")
TINY, QWEN = SHAPES["tiny"], SHAPES["qwen3.6-27b"]
HEAD = 248320 * 5120


class Products(TorchDispatchMode):
    """Adds up the operations of matrix products; those of attention are batched ones, which are left out."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.operations += 2 * result.numel() * args[0].shape[1]
        return result


def test_the_published_drafter_counted_by_hand():
    """119.4 TFLOP for 2,048 tokens and 512 blocks that lie within their answers."""
    drafter = make_drafter(QWEN, META)
    assert sum(p.numel() for p in drafter.parameters()) == 1_730_213_120
    layers = 5 * (5120 * 128 * (32 + 8 + 8 + 32) + 3 * 5120 * 17408)
    kv, fc = 5 * 2 * 5120 * 1024, 25600 * 5120
    operations = count_operations(
        drafter_weights(drafter), HEAD, 2048, 512 * 16, 512 * 15, target_weights=23_597_668_128
    )
    assert operations.target == 2 * 23_597_668_128 * 2048
    assert operations.layers == 6 * layers * 512 * 16
    assert operations.context == (6 * kv + 4 * fc) * 2048
    assert operations.head == 4 * HEAD * 512 * 15
    assert operations.drafter == pytest.approx(119.4e12, rel=1e-3)


@pytest.mark.parametrize("name", ["cross_entropy", "kl"])
def test_a_step_multiplies_what_is_counted(name):
    """No slot 0 goes through the head, nor slots after an answer; the target's hidden states get no gradient."""
    drafter, head = make_drafter(TINY, CPU), make_head(TINY, CPU, torch.float32)
    batch = make_batch(Case(128, 16), drafter.config, CPU)
    batch["labels"][0, :5, 2:] = -100  # answers that end within a block
    batch["counted_slots"] = (batch["labels"] != -100).sum(-1).numpy()
    assert 5 < batch["counted_slots"].sum() < 16 * 3
    objective = make_objective(name, drafter.config.block_size)
    context, final = torch.randn(1, 128, 2 * 64), torch.randn(1, 128, 64)
    with Products() as products:
        drafter_loss(drafter, drafter.config, batch, context, head, objective, None, final)[0].backward()
    weights, head_slots = drafter_weights(drafter), batch["counted_slots"].sum()
    counted = count_operations(weights, 272 * 64, 128, 16 * 4, head_slots, compares=objective.slot_terms.divergence)
    assert products.operations == counted.drafter
    if name == "cross_entropy":
        assert step_operations(drafter, batch) == counted


def test_a_target_multiplies_what_is_counted():
    """But for its norms, which are no products."""
    target = dense_target()
    with torch.no_grad(), Products() as products:
        target.model(torch.randint(0, 200, (1, 50)))
    weights = sum(p.numel() for p in target.model.layers.parameters())
    counted = count_operations(drafter_weights(make_drafter(TINY, META)), 0, 50, 0, 0, target_weights=weights)
    assert products.operations == pytest.approx(counted.target, rel=0.02)


def test_a_mixture_multiplies_the_experts_that_a_token_is_sent_to():
    config = Qwen3MoeConfig(
        vocab_size=200,
        hidden_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=16,
        num_experts_per_tok=3,
    )
    target = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad(), Products() as products:
        target.model(torch.randint(0, 200, (1, 50)))
    layers = target.model.layers
    counted = 2 * 50 * passed_weights(layers, config)
    assert products.operations == pytest.approx(counted, rel=0.02)
    assert counted < 0.4 * 2 * 50 * sum(p.numel() for p in layers.parameters())
    # Dense layers are passed whole; a configuration that does not say how many experts work has them all counted.
    dense = dense_target()
    whole = sum(p.numel() for p in dense.model.layers.parameters())
    assert passed_weights(dense.model.layers, dense.config) == whole
    assert passed_weights(layers, dense.config) == sum(p.numel() for p in layers.parameters())


def test_the_shares_that_were_published_counted_more():
    """The factors that recipes/qwen3.6-27b/README.md names beside them, to what is counted now."""
    drafter = make_drafter(QWEN, META)
    layers, kv, fc = (
        sum(p.numel() for name, p in drafter.named_parameters() if any(part in name for part in parts))
        for parts in (("layers.",), ("k_proj", "v_proj"), ("fc.",))
    )
    factors = {}
    for row in ((2048, 512), (8192, 256), (8192, 512), (8192, 1536), (8192, 4096), (32768, 512), (32768, 4096)):
        tokens, anchors = row
        published = 6 * layers * anchors * 16 + 6 * (kv + fc) * tokens + 4 * HEAD * anchors * 16
        factors[row] = (
            count_operations(drafter_weights(drafter), HEAD, tokens, anchors * 16, anchors * 15).drafter / published
        )
    assert factors.pop((32768, 512)) == pytest.approx(0.928, abs=5e-4)
    assert (min(factors.values()), max(factors.values())) == pytest.approx((0.950, 0.976), abs=5e-4)


def test_the_plan_takes_what_is_counted(tmp_path):
    trainer = make_trainer(tmp_path, documents=make_documents(8))
    args, drafter, target = trainer.args, trainer.model, dense_target()
    plan = make_plan(target.config, drafter.config, args, [place(0, 1, 0, "auto")], trainer.train_dataset.documents)
    layers = target.model.layers[: drafter.config.target_layer_ids[-1] + 1]
    weights, blocks = sum(p.numel() for p in layers.parameters()), plan.anchors_per_row
    tokens = plan.tokens / plan.rows
    counted = count_operations(
        drafter_weights(drafter), 272 * 64, tokens, blocks * 4, blocks * 3, target_weights=weights
    )
    rate = plan.rate / args.train_batch_size
    assert plan.drafter_seconds * rate * DRAFTER_EFFICIENCY == pytest.approx(counted.drafter)
    assert plan.target_seconds * rate * TARGET_EFFICIENCY == pytest.approx(counted.target)


def test_the_trainer_takes_what_is_counted(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    counted = step_operations(trainer.model, batch)
    assert trainer.floating_point_ops(batch) == counted.drafter
    # A batch of another collator has no counts on the host: all slots but 0 are taken.
    blocks = len(batch["labels"][0])
    assert batch["counted_slots"].sum() < blocks * 3
    del batch["counted_slots"]
    head = count_operations(drafter_weights(trainer.model), 272 * 64, 0, 0, blocks * 3).head
    assert trainer.floating_point_ops(batch) == counted.drafter - counted.head + head
