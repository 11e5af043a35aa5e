# SPDX-License-Identifier: Apache-2.0
"""The same documents, however they are spread over rows, micro-batches and ranks: the same training, noise on."""

from pathlib import Path

import pytest
import torch
from runs import finish, make_documents, make_trainer, start
from tiny import dense_target
from transformers import TrainerCallback

from dflash_hf import PackedDataset
from dflash_hf.packing import RowSampler


ROWS = 16
# One optimizer step is one epoch, so that every split sees all documents in each step, in its own order.
COMMON = {"max_steps": 5, "num_train_epochs": 5, "save_strategy": "no", "context_noise": 0.05, "max_grad_norm": 0.0}
OPTIMIZERS = {
    "sgd": {"optim": "sgd", "learning_rate": 0.5},
    # Over its usual epsilon, AdamW makes steps out of gradients that are nothing but rounding.
    "adamw": {"optim": "adamw_torch_fused", "learning_rate": 6e-4, "adam_epsilon": 1e-3},
}


def documents() -> list[dict]:
    """16 documents, of which those that the second of two ranks gets in the first step have nothing to learn from."""
    order = [row for _, row in RowSampler(ROWS, seed=42)]
    lengths = [len(document["input_ids"]) for document in make_documents(ROWS)]
    rows = PackedDataset(make_documents(ROWS), 32, seed=42)
    silent = [d["document"] for row in order[1::2] for d in rows[(0, row)]["documents"]]
    assert len(lengths) == len(rows) == ROWS and len(silent) == ROWS // 2
    return make_documents(ROWS, silent=tuple(silent))


SPLITS = {
    "1 x 16": {"per_device_train_batch_size": 16},
    "4 x 4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "packed": {"row_length": 70, "gradient_accumulation_steps": 16},
    "packed, 3 rows at a time": {
        "row_length": 70,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 16,
    },
}


class Recorder(TrainerCallback):
    def __init__(self):
        self.gradients: list[dict] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})


def run(folder, target, optimizer: str, **split) -> dict:
    recorder = Recorder()
    arguments = {**COMMON, **OPTIMIZERS[optimizer], **split}
    trainer = make_trainer(folder, target, documents(), callbacks=[recorder], **arguments)
    counted = []
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        counted.append(int((inputs["labels"] != -100).sum()))
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    history = trainer.state.log_history
    return {
        "gradients": recorder.gradients,
        "parameters": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "logs": {name: [e[name] for e in history if name in e] for name in ("loss", "acceptance_length", "accuracy")},
        "counted": counted,
    }


def run_rank(folder: str, optimizer: str) -> None:
    """Target of a process: two ranks of 8 rows each."""
    from accelerate import PartialState

    result = run(Path(folder) / "run", dense_target(), optimizer, gradient_accumulation_steps=ROWS // 2)
    torch.save(result, Path(folder) / f"rank-{PartialState().process_index}.pt")
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


@pytest.fixture(scope="module", params=OPTIMIZERS)
def expected(request, tmp_path_factory):
    """One row after the other, accumulated: the plainest split."""
    folder = tmp_path_factory.mktemp("expected")
    return request.param, run(folder, dense_target(), request.param, gradient_accumulation_steps=ROWS)


def assert_same(result: dict, expected: dict) -> None:
    assert len(result["gradients"]) == len(expected["gradients"]) == 5
    for own, other in zip(result["gradients"], expected["gradients"], strict=True):
        for name, gradient in other.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-5, atol=1e-5, msg=name)
    for name, parameter in expected["parameters"].items():
        torch.testing.assert_close(result["parameters"][name], parameter, rtol=0, atol=1e-5, msg=name)
    for name, values in expected["logs"].items():
        assert len(values) == 5 and result["logs"][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("split", SPLITS)
def test_s1_the_same_documents_train_the_same_however_they_are_split(expected, tmp_path, split):
    optimizer, plain = expected
    result = run(tmp_path, dense_target(), optimizer, **SPLITS[split])
    assert sum(result["counted"]) == sum(plain["counted"])
    assert_same(result, plain)


def test_d2_two_ranks_train_the_same_with_nothing_to_learn_from_on_one_of_them(expected, tmp_path):
    optimizer, plain = expected
    assert finish(start(run_rank, str(tmp_path), optimizer, world=2, log=tmp_path / "log")) == [0, 0]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    assert sum(ranks[0]["counted"][: ROWS // 2]) > 0 == sum(ranks[1]["counted"][: ROWS // 2])
    assert sum(ranks[1]["counted"]) > 0
    for result in ranks:
        assert_same(result, plain)
