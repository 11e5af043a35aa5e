# SPDX-License-Identifier: Apache-2.0
"""The operations of a step: counted by hand, as torch multiplies, and the same for plan and trainer."""

import pytest
import torch
from runs import make_documents, make_trainer
from tiny import dense_target, tiny_drafter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import drafter_loss, make_objective
from dflash_hf.operations import batch_operations, count_operations, drafter_weights, passed_weights, product_rate
from dflash_hf.planning import DRAFTER_EFFICIENCY, TARGET_EFFICIENCY, make_plan
from dflash_hf.topology import place


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


def published_drafter() -> DFlashDraftModel:
    """The shape of the published drafter of Qwen3.6-27B, without weights."""
    with torch.device("meta"):
        return DFlashDraftModel(
            DFlashDraftConfig(
                hidden_size=5120, intermediate_size=17408, num_hidden_layers=5, num_attention_heads=32,
                num_key_value_heads=8, head_dim=128, block_size=16, target_layer_ids=[1, 16, 31, 46, 61],
                mask_token_id=248070, vocab_size=248320, num_target_layers=64,
            )
        )  # fmt: skip


def test_the_published_drafter_counted_by_hand():
    """119.4 TFLOP for 2,048 tokens and 512 blocks that lie within their answers."""
    drafter = published_drafter()
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
def test_a_step_multiplies_what_is_counted(name, tmp_path):
    """No slot 0 goes through the head, nor slots after an answer; the target's hidden states get no gradient."""
    target = dense_target()
    trainer = make_trainer(tmp_path, target)
    batch, drafter = trainer.data_collator([trainer.train_dataset[0]]), trainer.model
    blocks, head_slots = batch["labels"].shape[1], batch["counted_slots"].sum()
    assert 5 < head_slots < blocks * 3
    objective = make_objective(name, drafter.config.block_size)
    tokens = batch["input_ids"].shape[1]
    context, final = torch.randn(1, tokens, 2 * 64), torch.randn(1, tokens, 64)
    head = FrozenHead(target, "cpu")
    with Products() as products:
        drafter_loss(drafter, drafter.config, batch, context, head, objective, None, final)[0].backward()
    weights, compares = drafter_weights(drafter), objective.slot_terms.divergence
    counted = count_operations(weights, 272 * 64, tokens, blocks * 4, head_slots, compares=compares)
    assert products.operations == counted.drafter
    assert batch_operations(weights, 272 * 64, batch, compares) == counted


def test_a_target_multiplies_what_is_counted():
    """But for its norms, which are no products; of a mixture the experts that a token is sent to."""
    config = Qwen3MoeConfig(
        vocab_size=200, hidden_size=64, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=16, num_experts_per_tok=3,
    )  # fmt: skip
    mixture = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    weights = drafter_weights(tiny_drafter(dense_target()))
    for target in (dense_target(), mixture):
        with torch.no_grad(), Products() as products:
            target.model(torch.randint(0, 200, (1, 50)))
        passed = passed_weights(target.model.layers, target.config)
        counted = count_operations(weights, 0, 50, 0, 0, target_weights=passed)
        assert products.operations == pytest.approx(counted.target, rel=0.02)
    # Where the configuration does not say how many experts work, all are counted.
    layers = mixture.model.layers
    assert passed_weights(layers, dense_target().config) == sum(p.numel() for p in layers.parameters()) > 2.5 * passed


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
    counted = batch_operations(drafter_weights(trainer.model), 272 * 64, batch)
    assert trainer.floating_point_ops(batch) == counted.drafter
    # A batch of another collator has no counts on the host: all slots but 0 are taken.
    blocks = len(batch["labels"][0])
    assert batch["counted_slots"].sum() < blocks * 3
    del batch["counted_slots"]
    head = count_operations(drafter_weights(trainer.model), 272 * 64, 0, 0, blocks * 3).head
    assert trainer.floating_point_ops(batch) == counted.drafter - counted.head + head


def test_the_rate_of_products_is_measured():
    assert 1e8 < product_rate(torch.device("cpu")) < 1e14
