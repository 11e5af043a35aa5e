# SPDX-License-Identifier: Apache-2.0
"""Quantised targets are the frozen half: nothing is cast or trained, and the head multiplies in a type that can."""

import pytest
import torch
from tiny import HIDDEN_SIZE, MASK_TOKEN_ID, VOCAB_SIZE, dense_target, hybrid_target
from torch import nn
from transformers import QuantoConfig

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, FrozenTarget
from dflash_hf.frozen_target import FrozenHead, _quantised


LENGTHS = [[9, 13]]
IDS = torch.arange(24)[None]


class Int8Linear(nn.Module):
    """A linear layer that stores integers, as most quantisers replace one."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Buffer(scale.detach())

    def forward(self, x):
        if x.dtype != self.scale.dtype:
            raise TypeError(f"the layer multiplies in {self.scale.dtype}, not {x.dtype}")
        return nn.functional.linear(x, self.weight.to(self.scale.dtype) * self.scale)


def in_int8(model, head: bool = True):
    """All linear layers replaced, and a cast of the whole model refused."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (head or name != "lm_head"):
                setattr(parent, name, Int8Linear(child))

    def to(*args, **kwargs):
        raise ValueError("this quantised model cannot be moved or cast")

    model.to = model.float = model.bfloat16 = to
    return model


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def drafter_of(target) -> DFlashDraftModel:
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=1, block_size=4, mask_token_id=MASK_TOKEN_ID, target_layer_ids=[1, 3]
    )
    return DFlashDraftModel(config)


@pytest.mark.parametrize(
    ("packed", "quantisation"),
    [(False, QuantoConfig(weights="int8")), (True, {"quant_method": "quanto", "weights": "int8"})],
)
def test_a_target_that_transformers_quantises_at_loading(packed, quantisation, tmp_path):
    """quanto's int8 weights; features near the exact ones, and a packed document still has its own."""
    dense_target().save_pretrained(tmp_path)
    quantised = FrozenTarget(tmp_path, [1, 3], packed=packed, quantization_config=quantisation)
    assert type(quantised.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    features = quantised.context_hidden_states(IDS, LENGTHS)
    assert (quantised._packed is not None) == packed
    exact = FrozenTarget(tmp_path, [1, 3]).context_hidden_states(IDS, LENGTHS)
    assert 1e-4 < relative_error(features, exact) < 0.05
    alone = quantised.context_hidden_states(IDS[:, 9:22])
    torch.testing.assert_close(features[:, 9:22], alone, rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in quantised.model.parameters())
    assert _quantised(quantised.model)


@pytest.mark.parametrize("make", [dense_target, hybrid_target])
@pytest.mark.parametrize("packed", [False, True])
def test_integer_weights_in_layers_that_cannot_be_cast(make, packed):
    exact = FrozenTarget(make(), [1, 3]).context_hidden_states(IDS, LENGTHS)
    quantised = FrozenTarget(in_int8(make()), [1, 3], packed=packed)
    features = quantised.context_hidden_states(IDS, LENGTHS)
    assert _quantised(quantised.model) and not _quantised(make())
    assert features.dtype == torch.float32 and (quantised._packed is not None) == packed
    assert 1e-4 < relative_error(features, exact) < 0.05


def test_the_head_multiplies_in_a_type_that_can(monkeypatch):
    """An integer weight names no type to multiply in, so the embedding's is taken; copied or not."""
    hidden, exact = torch.randn(3, HIDDEN_SIZE).bfloat16(), FrozenHead(dense_target(), "cpu")
    model = in_int8(dense_target())
    for on_device in (True, False):
        monkeypatch.setattr("dflash_hf.frozen_target.is_on", lambda parameter, device, answer=on_device: answer)
        head = FrozenHead(model, "cpu")
        assert (head.head is model.lm_head) == on_device
        assert head.head_dtype == torch.float32 and head.vocab_size == VOCAB_SIZE
        assert relative_error(head.logits(hidden), exact.logits(hidden)) < 0.05
        assert not any(p.requires_grad for p in head.head.parameters())


def test_an_embedding_stored_as_integers_is_refused():
    model = dense_target()
    model.get_input_embeddings().weight = nn.Parameter(
        torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"embedding is stored as torch.int8.*without its embedding"):
        FrozenHead(model, "cpu")


@pytest.mark.parametrize("packed", [False, True])
def test_a_drafter_trains_beside_a_quantised_target(packed, tmp_path):
    model = in_int8(hybrid_target())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, row_length=64, num_anchors=4, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, logging_steps=1, learning_rate=1e-2,
    )  # fmt: skip
    documents = [{"input_ids": torch.randint(0, 256, (30,)).tolist(), "supervised_spans": [[5, 30]]} for _ in range(4)]
    drafter = drafter_of(model)
    start = drafter.fc.weight.clone()
    trainer = DFlashTrainer(drafter, FrozenTarget(model, [1, 3], packed=packed), args, train_dataset=documents)
    trainer.train()
    assert not torch.equal(drafter.fc.weight, start)
    assert all(torch.isfinite(torch.tensor(log["loss"])) for log in trainer.state.log_history if "loss" in log)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
