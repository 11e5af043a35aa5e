# SPDX-License-Identifier: Apache-2.0
"""The trainer: one loss per step however its rows are split, exact resumes, easy data, and errors before training."""

import copy
import functools
import json
import logging
import math
import multiprocessing
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from naive import naive_drafter, naive_loss, pack_rows, packed_forward, random_drafter, random_inputs
from runs import finish, make_documents, make_trainer, start
from safetensors.torch import load_file
from tiny import (
    CHATML_TEMPLATE,
    MASK_TOKEN_ID,
    VOCAB_SIZE,
    byte_tokenizer,
    dense_target,
    hybrid_target,
    refused,
    tiny_drafter,
    write_chats,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainingArguments

import dflash_hf.trainer
from dflash_hf import (
    DataCollatorForDFlash,
    DFlashDraftModel,
    DFlashTrainer,
    FrozenTarget,
    PackedDataset,
    TokenizeOptions,
    load_documents,
    tokenize_files,
)
from dflash_hf.acceptance import measure_acceptance
from dflash_hf.data_collator import document_seed
from dflash_hf.losses import add_context_noise
from dflash_hf.masking import block_position_ids, training_masks
from dflash_hf.packing import RowSampler
from dflash_hf.trainer import compile_layers


BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def target():
    return dense_target()


class Recorded(DFlashTrainer):
    """Keeps every training batch and gradient, so that runs can be compared."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches: list[dict] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.add_callback(GradientRecorder(self.gradients))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            self.batches.append(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class GradientRecorder(TrainerCallback):
    def __init__(self, gradients: list):
        self.gradients = gradients

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})


def make(folder, target=None, documents=None, cls=Recorded, **arguments):
    """A trainer of 8 rows and 2 steps that saves nothing, unless it is said otherwise."""
    documents = make_documents(8) if documents is None else documents
    return make_trainer(folder, target, documents, cls=cls, **{"max_steps": 2, "save_strategy": "no", **arguments})


def make_new(folder, target, **arguments) -> DFlashTrainer:
    """A trainer that is given no drafter."""

    def cls(drafter, *args, **kwargs):
        return DFlashTrainer(None, *args, **kwargs)

    stand_in = tiny_drafter(dense_target())
    return make_trainer(folder, target, chats(), drafter=stand_in, cls=cls, max_length=32, **arguments)


def trained(folder, target=None, **arguments) -> Recorded:
    trainer = make(folder, target, **arguments)
    trainer.train()
    return trainer


def parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def logged(trainer, name: str) -> list[float]:
    entries = [{**entry, **entry.get("details", {})} for entry in trainer.state.log_history]
    return [entry[name] for entry in entries if name in entry]


def evaluated(trainer, *data) -> dict[str, float]:
    """All figures of an evaluation, those that are only in the state's log included."""
    return trainer.evaluate(*data) | trainer.state.log_history[-1]["details"]


def assert_gradients_equal(actual: dict, expected: dict, tolerance: float = 1e-5):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: n + m)


# One optimizer step, however its rows are split

ROWS = 16
# One optimizer step is one epoch, so that every split sees all documents in each step, in its own order. The last step
# is not logged, so that the mean loss of the run has a remainder.
COMMON = {"max_steps": 5, "num_train_epochs": 5, "context_noise": 0.05, "max_grad_norm": 0.0, "logging_steps": 2}
KINDS = {
    "sgd": {"optim": "sgd", "learning_rate": 0.5},
    # Over its usual epsilon, AdamW makes steps out of gradients that are nothing but rounding.
    "dpace by adamw": {"learning_rate": 6e-4, "adam_epsilon": 1e-3, "objective": "dpace"},
    "hybrid": {"optim": "sgd", "learning_rate": 0.5},
}
SPLITS = {
    "1 x 16": {"per_device_train_batch_size": 16},
    "4 x 4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "packed": {"row_length": 70, "gradient_accumulation_steps": 16},
    "packed, 3 at a time": {"row_length": 70, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 16},
}


def half_silent_documents() -> list[dict]:
    """16 documents, of which those that the second of two ranks gets in the first step have nothing to learn from."""
    order = [row for _, row in RowSampler(ROWS, seed=42)]
    rows = PackedDataset(make_documents(ROWS), 32, seed=42)
    silent = [d["document"] for row in order[1::2] for d in rows[(0, row)]["documents"]]
    assert len(rows) == ROWS and len(silent) == ROWS // 2
    return make_documents(ROWS, silent=tuple(silent))


def run(folder, kind: str, **split) -> dict:
    target = hybrid_target() if kind == "hybrid" else dense_target()
    trainer = make(folder, target, half_silent_documents(), **COMMON, **KINDS[kind], **split)
    output = trainer.train()
    assert output.training_loss == logged(trainer, "train_loss")[0]
    assert trainer._trained.blocks.values.abs().sum() > 0, "the last step is not logged"
    names = ("loss", "grad_norm", "acceptance_length", "accuracy", "full_blocks", "accuracy_slot_1", "train_loss")
    return {
        "gradients": trainer.gradients,
        "parameters": {name: p.clone() for name, p in parameters(trainer).items()},
        "logs": {name: logged(trainer, name) for name in names},
        "counted": [int((batch["labels"] != -100).sum()) for batch in trainer.batches],
    }


def run_rank(folder: str, kind: str) -> None:
    """Target of a process: two ranks of 8 rows each."""
    result = run(Path(folder) / "run", kind, gradient_accumulation_steps=ROWS // 2)
    torch.save(result, Path(folder) / f"rank-{PartialState().process_index}.pt")
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


def assert_same(result: dict, expected: dict) -> None:
    assert len(result["gradients"]) == len(expected["gradients"]) == 5
    for own, other in zip(result["gradients"], expected["gradients"], strict=True):
        assert_gradients_equal(own, other)
    for name, parameter in expected["parameters"].items():
        torch.testing.assert_close(result["parameters"][name], parameter, rtol=0, atol=1e-5, msg=name)
    for name, values in expected["logs"].items():
        assert len(values) == (1 if name == "train_loss" else 2)
        assert result["logs"][name] == pytest.approx(values, rel=1e-4 if name == "grad_norm" else 1e-5), name


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """One row after the other, accumulated: the plainest split."""
    folder = tmp_path_factory.mktemp("plain")
    return functools.cache(lambda kind: run(folder, kind, gradient_accumulation_steps=ROWS))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_s1_t1_t8_the_same_documents_train_the_same_however_they_are_split(plain_run, tmp_path, kind, split):
    """Gradients, weights, and logs of the sums over all micro-batches since the last log."""
    result = run(tmp_path, kind, **SPLITS[split])
    assert sum(result["counted"]) == sum(plain_run(kind)["counted"])
    assert_same(result, plain_run(kind))


def test_n9_d2_two_ranks_train_the_same_with_nothing_to_learn_from_on_one_of_them(plain_run, tmp_path):
    """Each rank's last log has the mean loss of both."""
    assert finish(start(run_rank, str(tmp_path), "sgd", world=2, log=tmp_path / "log")) == [0, 0]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    assert sum(ranks[0]["counted"][: ROWS // 2]) > 0 == sum(ranks[1]["counted"][: ROWS // 2])
    assert sum(ranks[1]["counted"]) > 0
    for result in ranks:
        assert_same(result, plain_run("sgd"))


def test_the_step_equals_naive_forwards_of_every_block(target, tmp_path):
    """Gradients of one step, against separate naive forwards of each anchor through the whole chain."""
    arguments = {"max_steps": 1, "per_device_train_batch_size": 8, "context_noise": 0.0, "max_grad_norm": 0.0}
    trainer = trained(tmp_path, target, **arguments)
    drafter, (batch,) = tiny_drafter(target), trainer.batches
    head, frozen = target.lm_head.weight, FrozenTarget(target, drafter.config.target_layer_ids)
    embedding = target.get_input_embeddings().weight
    hidden, labels = [], []
    for row, lengths in enumerate(batch["document_lengths"]):
        assert len(lengths) == 1
        context = frozen.context_hidden_states(batch["input_ids"][row : row + 1, : lengths[0]])[0]
        for anchor, label in zip(batch["anchor_positions"][row].tolist(), batch["labels"][row], strict=True):
            if anchor >= 0:
                ids = torch.tensor([batch["input_ids"][row, anchor], *[MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
                hidden.append(naive_drafter(drafter, context, embedding[ids], anchor))
                labels.append(label)
    loss = naive_loss(torch.stack(hidden), torch.stack(labels), head, gamma=BLOCK_SIZE / 2)
    loss.backward()
    assert logged(trainer, "loss") == pytest.approx([loss.item()], rel=1e-5)
    assert_gradients_equal(trainer.gradients[0], {name: p.grad for name, p in drafter.named_parameters()})


def test_l2_a_row_with_nothing_supervised_contributes_exactly_nothing(target, tmp_path):
    documents, silent = make_documents(3), {"input_ids": list(range(20)), "supervised_spans": []}
    added = trained(tmp_path, target, documents=[*documents, silent], gradient_accumulation_steps=4, max_steps=1)
    without = trained(tmp_path, target, documents=documents, gradient_accumulation_steps=3, max_steps=1)
    assert_gradients_equal(added.gradients[0], without.gradients[0], tolerance=1e-6)
    assert logged(added, "loss") == pytest.approx(logged(without, "loss"), rel=1e-6)


def test_l2_a_step_with_nothing_supervised_leaves_zero_gradients(target, tmp_path):
    documents = [{"input_ids": list(range(20)), "supervised_spans": []}, *make_documents(1)]
    trainer = trained(tmp_path, target, documents=documents, num_train_epochs=1)
    (silent,) = [step for step, batch in enumerate(trainer.batches) if (batch["labels"] == -100).all()]
    assert len(trainer.gradients) == 2
    assert all(torch.equal(g, torch.zeros_like(g)) for g in trainer.gradients[silent].values())
    assert logged(trainer, "loss")[silent] == 0.0
    assert all(torch.isfinite(p).all() for p in parameters(trainer).values())


@pytest.mark.parametrize("packed", [False, True])
def test_l2_a_data_set_with_nothing_to_learn_from_is_an_error_before_training(target, tmp_path, packed):
    silent = [{"input_ids": list(range(20)), "supervised_spans": [[4, 5]]} for _ in range(3)]
    with refused(ValueError, "learn"):
        make(tmp_path, target, PackedDataset(silent, 32) if packed else silent)


def test_activation_checkpointing_and_attention_backends_change_nothing_and_all_parameters_move(target, tmp_path):
    plain = trained(tmp_path, target)
    for name, parameter in parameters(plain).items():
        assert not torch.equal(parameter, tiny_drafter(target).state_dict()[name]), name
    other = trained(tmp_path, target, activation_checkpointing=True)
    for step in range(2):
        assert_gradients_equal(other.gradients[step], plain.gradients[step], tolerance=1e-6)
    for implementation in ("sdpa", "eager"):
        other = trained(tmp_path, target, drafter_attn_implementation=implementation)
        assert other.model.config._attn_implementation == implementation
        assert_gradients_equal(other.gradients[1], plain.gradients[1])
    with refused(ValueError, "flex_attention", "CPU"):
        make(tmp_path, target, drafter_attn_implementation="flex_attention")


# Columns, devices and types


def test_t2_the_collator_receives_every_column(target, tmp_path):
    seen = []

    class Collator(DataCollatorForDFlash):
        def __call__(self, rows):
            seen.extend(rows)
            return super().__call__(rows)

    documents = datasets.Dataset.from_list(make_documents(4)).add_column("row", list(range(4)))
    cls = partial(DFlashTrainer, data_collator=Collator(block_size=BLOCK_SIZE))
    make(tmp_path, target, documents, cls, max_steps=4).train()
    assert sorted(d["document"] for row in seen for d in row["documents"]) == [0, 1, 2, 3]
    for document in (document for row in seen for document in row["documents"]):
        expected = documents[document["document"]]
        assert all(document[name] == expected[name] for name in ("input_ids", "supervised_spans"))
    cls = partial(DFlashTrainer, data_collator=DataCollatorForDFlash(block_size=8))
    with refused(ValueError, "block_size", 8, BLOCK_SIZE):
        make(tmp_path, target, documents, cls).train()


def test_t4_two_visible_gpus_never_mean_data_parallel(target, tmp_path):
    trainer = make(tmp_path, target, per_device_train_batch_size=3)
    # What the arguments write down when they find two GPUs.
    trainer.args._n_gpu = 2
    assert trainer.args.n_gpu == 1 and trainer.args.parallel_mode.value == "not_parallel"
    assert trainer.args.train_batch_size == 3 and trainer.args.eval_batch_size == 1
    trainer.train()
    assert [len(batch["input_ids"]) for batch in trainer.batches] == [3, 3]
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)


@pytest.mark.parametrize("autocast", [False, True])
def test_t5_a_bf16_drafter_gets_fp32_masters_whose_norms_move(target, tmp_path, autocast):
    tiny_drafter(target).bfloat16().save_pretrained(tmp_path / "bf16")
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "bf16")
    assert drafter.dtype == torch.bfloat16
    before = {name: parameter.detach().float() for name, parameter in drafter.named_parameters()}
    trainer = trained(tmp_path, target, drafter=drafter, bf16=autocast, max_steps=3, learning_rate=6e-4)
    for name, parameter in parameters(trainer).items():
        assert parameter.dtype == torch.float32, name
        assert not torch.equal(parameter, before[name]), name
    assert all(gradient.dtype == torch.float32 for gradient in trainer.gradients[0].values())
    states = trainer.optimizer.state.values()
    assert all(s["exp_avg"].dtype == s["exp_avg_sq"].dtype == torch.float32 for s in states)
    norms = [(name, p) for name, p in parameters(trainer).items() if "norm" in name]
    assert norms and all((p - before[name]).abs().max() > 1e-4 for name, p in norms)
    trainer.save_model(tmp_path / "saved")
    assert {t.dtype for t in load_file(tmp_path / "saved" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"


def test_t5_autocast_is_used_also_beside_a_bf16_target(target, tmp_path):
    fp32, bf16 = trained(tmp_path, target), trained(tmp_path, target, bf16=True)
    assert logged(bf16, "loss") == pytest.approx(logged(fp32, "loss"), rel=2e-2)
    assert logged(bf16, "loss") != logged(fp32, "loss")
    for autocast in (False, True):
        trainer = make(tmp_path, dense_target().bfloat16(), eval_dataset=make_documents(2), bf16=autocast)
        trainer.train()
        assert math.isfinite(trainer.evaluate()["eval_loss"]) and trainer.target.model.dtype == torch.bfloat16


# Logs and evaluation


def test_a_log_shows_a_handful_of_figures_and_keeps_the_others_as_details(target, tmp_path):
    shown = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            shown.append(set(logs))

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            shown.append(set(metrics))

    data = {"eval_dataset": make_documents(2), "eval_strategy": "steps", "eval_steps": 2}
    trainer = trained(tmp_path, target, callbacks=[Tracker()], **data)
    step = {"loss", "grad_norm", "learning_rate", "acceptance_length", "tokens_per_second", "epoch"}
    timing = {f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")}
    evaluation = {"eval_loss", "eval_acceptance_length", "eval_accuracy", "epoch"} | timing
    assert shown[:2] == [step, step] and shown[2] == shown[3] == evaluation
    trainer.save_state()
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    details = {"accuracy", "full_blocks", "accuracy_slot_3", "step_seconds", "target_seconds", "anchors_per_second"}
    assert details <= history[0]["details"].keys()
    assert {"eval_acceptance_slot_3", "eval_accuracy_slot_1", "eval_full_blocks"} <= history[2]["details"].keys()


def test_a_pair_logs_how_long_the_drafter_waits_for_the_target(target, tmp_path):
    trainer = make(tmp_path, target)
    times = {"step_seconds": 2.0, "wait_seconds": 0.5, "tokens_per_second": 10.0}
    trainer.throughput.metrics = lambda: dict(times)
    logs = {"loss": 1.0}
    trainer.log(logs)
    assert "target_wait_share" not in logs and logs["tokens_per_second"] == 10.0
    trainer._is_pair = True
    trainer.log(logs := {"loss": 1.0})
    assert logs["target_wait_share"] == 0.25


def test_n6_a_run_that_taught_its_drafter_nothing_says_so(target, tmp_path):
    trainer = trained(tmp_path, target)
    assert "2 steps" in trainer.learned_nothing() and "chats" in trainer.learned_nothing()
    trainer.state.global_step = 600
    assert "1.0" in trainer.learned_nothing()
    trainer.state.log_history.append({"eval_acceptance_length": 2.5})
    assert trainer.learned_nothing() is None
    trainer.state.global_step = 3
    assert "3 steps" in trainer.learned_nothing()


def test_t3_evaluation_reports_loss_acceptance_and_accuracy_per_slot(target, tmp_path):
    metrics = evaluated(make(tmp_path, target, eval_dataset=make_documents(4)))
    names = ["loss", "acceptance_length", "accuracy", *(f"accuracy_slot_{k}" for k in range(1, BLOCK_SIZE))]
    assert all(math.isfinite(metrics[f"eval_{name}"]) for name in names)
    assert "eval_accuracy_slot_0" not in metrics and f"eval_accuracy_slot_{BLOCK_SIZE}" not in metrics
    assert 1.0 <= metrics["eval_acceptance_length"] <= BLOCK_SIZE
    assert metrics["eval_loss"] == pytest.approx(math.log(VOCAB_SIZE), rel=0.3)


def test_t3_evaluation_is_a_ratio_of_sums_whatever_the_batches(target, tmp_path):
    """Rows with many and with few labels: a mean over batches would depend on how they are grouped."""
    documents = make_documents(4)
    documents[0]["supervised_spans"] = [[10, 12]]
    splits = ({}, {"per_device_eval_batch_size": 3}, {"row_length": 128})
    results = [evaluated(make(tmp_path, target, eval_dataset=documents, **split)) for split in splits]
    for name in ("eval_loss", "eval_acceptance_length", "eval_accuracy", "eval_full_blocks"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5)
        assert results[2][name] == pytest.approx(results[0][name], rel=1e-5)


def test_t7_evaluation_repeats_itself_without_noise_and_keeps_no_logits(target, tmp_path, monkeypatch):
    trainer = make(tmp_path, target, eval_dataset=make_documents(4), context_noise=0.5)
    trainer.train()
    monkeypatch.setattr(dflash_hf.trainer, "add_context_noise", None)
    kept, original = [], trainer.prediction_step
    monkeypatch.setattr(trainer, "prediction_step", lambda *a, **k: kept.append(original(*a, **k)) or kept[-1])
    runs = [evaluated(trainer), evaluated(trainer)]
    timings = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    first, second = ({k: v for k, v in metrics.items() if k not in timings} for metrics in runs)
    assert first == second
    assert all(logits is None and labels is None and not loss.requires_grad for loss, logits, labels in kept)


def test_t7_evaluation_between_steps_leaves_training_alone(target, tmp_path):
    plain = trained(tmp_path, target, max_steps=4)
    data = {"eval_dataset": make_documents(4), "eval_strategy": "steps", "eval_steps": 1}
    between = trained(tmp_path, target, max_steps=4, **data)
    assert logged(between, "loss") == logged(plain, "loss")
    assert logged(between, "acceptance_length") == logged(plain, "acceptance_length")
    assert len(logged(between, "eval_loss")) == 4
    assert all(torch.equal(parameters(between)[name], p) for name, p in parameters(plain).items())


def test_several_evaluation_sets_are_reported_apart(target, tmp_path):
    sets = {"a": make_documents(2), "b": make_documents(5)[2:]}
    metrics = make(tmp_path, target, eval_dataset=sets).evaluate()
    alone = make(tmp_path, target, eval_dataset=sets["b"]).evaluate()
    assert metrics["eval_b_acceptance_length"] == alone["eval_acceptance_length"]
    assert metrics["eval_b_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
    assert metrics["eval_a_loss"] != metrics["eval_b_loss"]


def test_evaluation_takes_documents_given_to_it(target, tmp_path):
    """`evaluate(documents)` and `predict` take the same kinds of data as the constructor."""
    documents = make_documents(3)
    expected = make(tmp_path, target, eval_dataset=documents).evaluate()
    trainer = make(tmp_path, target, eval_dataset=make_documents(5)[3:])
    assert trainer.evaluate(PackedDataset(documents, 32))["eval_loss"] == pytest.approx(expected["eval_loss"])
    assert trainer.evaluate(documents)["eval_loss"] == pytest.approx(expected["eval_loss"])
    assert trainer.evaluate({"a": documents})["eval_a_loss"] == pytest.approx(expected["eval_loss"])
    output = trainer.predict(documents)
    assert output.predictions is output.label_ids is None
    assert output.metrics["test_acceptance_length"] == expected["eval_acceptance_length"]


def test_data_given_to_evaluate_is_evaluated_beside_persistent_workers(target, tmp_path):
    values = {"eval_dataset": make_documents(3), "dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer, other = make(tmp_path, target, **values), make_documents(9)
    own = [trainer.evaluate()["eval_loss"], trainer.evaluate(other)["eval_loss"], trainer.evaluate()["eval_loss"]]
    assert own[0] == own[2] != own[1]
    # The workers of the trainer's own data stay, those of the others do not.
    assert len(multiprocessing.active_children()) == 1
    assert own[1] == make(tmp_path, target).evaluate(other)["eval_loss"]
    # Left to the garbage collector, torch waits five seconds for it.
    trainer._eval_dataloaders["eval"].base_dataloader._iterator._shutdown_workers()


class Spoil(TrainerCallback):
    """Undoes all learning after step 24, so that the best checkpoint is not the last."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 24:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()


def test_t3_load_best_model_at_end_by_acceptance_length(target, tmp_path):
    """Documents of one token are learned in a few steps; then the drafter is spoiled and the best one comes back."""
    documents = [{"input_ids": [65] * 20, "supervised_spans": [[4, 20]]} for _ in range(4)]
    schedule = {"max_steps": 25, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "callbacks": [Spoil()]}
    saving = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    best = {"metric_for_best_model": "acceptance_length", "load_best_model_at_end": True}
    trainer = trained(tmp_path, target, documents=documents, eval_dataset=documents[:1], **schedule, **saving, **best)
    history = logged(trainer, "eval_acceptance_length")
    assert max(history) > 2.0 > history[-1]
    assert trainer.state.best_metric == max(history)
    best_step = 5 * (history.index(max(history)) + 1)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best_step}")
    assert trainer.evaluate()["eval_acceptance_length"] == max(history)
    saved = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert all(torch.equal(parameter, saved[name]) for name, parameter in parameters(trainer).items())


def test_tokens_are_counted_with_and_without_padding(target, tmp_path):
    lengths, counted = [len(document["input_ids"]) for document in make_documents(8)], {}
    for what in ("all", "non_padding"):
        values = {"per_device_train_batch_size": 4, "include_num_input_tokens_seen": what}
        trainer = trained(tmp_path, target, max_steps=-1, num_train_epochs=1, **values)
        counted[what] = trainer.state.num_input_tokens_seen
        assert trainer.state.log_history[0]["num_input_tokens_seen"] > 0
    assert counted["non_padding"] == sum(lengths) < counted["all"]


# Checkpoints and resuming


def test_c1_the_target_is_in_no_checkpoint_and_no_optimizer(tmp_path):
    target = dense_target()
    before = copy.deepcopy(target.state_dict())
    trainer = trained(tmp_path, target, save_strategy="steps", save_steps=2)
    trainer.save_model(tmp_path / "final")
    size = sum(4 * parameter.numel() for parameter in parameters(trainer).values())
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        assert set(load_file(folder / "model.safetensors")) == set(parameters(trainer))
        assert (folder / "model.safetensors").stat().st_size < 1.1 * size
    # AdamW keeps two moments per parameter.
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").stat().st_size < 2.2 * size
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trainer.model.parameters()}
    assert not optimized & {id(p) for p in target.parameters()}
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert not target.training and not any(p.requires_grad or p.grad is not None for p in target.parameters())


RESUMES = {
    # 10 rows: step 7 is in the middle of the first epoch.
    "within_an_epoch": {"rows": 10, "save": 7},
    # 5 rows: step 5 ends the first epoch, step 7 is in the second, whose rows, anchors and noise are other ones.
    "at_the_border_of_an_epoch": {"rows": 5, "save": 5},
    "two_workers_in_the_second_epoch": {"rows": 5, "save": 7, "dataloader_num_workers": 2},
    # 3 steps an epoch, the last of one row.
    "accumulating": {"rows": 5, "save": 4, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("case", RESUMES)
def test_c3_c5_a_resumed_run_is_the_same_run(case, tmp_path, monkeypatch):
    """Batches, anchors, noise, losses, learning rates and weights bit for bit; another seed for the new objects."""
    options = dict(RESUMES[case])
    rows, save = options.pop("rows"), options.pop("save")
    noises: list[torch.Tensor] = []

    def recorded_noise(context, *args):
        noisy = add_context_noise(context, *args)
        noises.append(noisy - context)
        return noisy

    monkeypatch.setattr(dflash_hf.trainer, "add_context_noise", recorded_noise)
    options |= {"documents": make_documents(rows), "max_steps": 9, "save_strategy": "steps", "save_steps": save}
    whole = trained(tmp_path, **options)
    expected_noises = noises.copy()
    noises.clear()
    resumed = make(tmp_path, drafter=tiny_drafter(dense_target(), seed=77), **options)
    torch.manual_seed(1234)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save}"))

    count = len(resumed.batches)
    assert 0 < count < len(whole.batches)
    for batch, expected in zip(resumed.batches, whole.batches[-count:], strict=True):
        for name in ("input_ids", "anchor_positions", "labels"):
            assert torch.equal(batch[name], expected[name]), name
        assert batch["noise_seeds"] == expected["noise_seeds"]
    assert all(torch.equal(a, b) for a, b in zip(noises, expected_noises[-count:], strict=True))
    for name in ("loss", "learning_rate", "grad_norm", "acceptance_length"):
        assert logged(resumed, name) == logged(whole, name), name
    for name, parameter in parameters(whole).items():
        assert torch.equal(parameters(resumed)[name], parameter), name


@pytest.mark.parametrize("change", [{"block_size": 8}, {"target_layer_ids": [2, 4]}], ids=str)
def test_a_checkpoint_of_another_drafter_is_not_resumed(target, tmp_path, change):
    trained(tmp_path, target, save_strategy="steps", save_steps=1, max_steps=1)
    other = make(tmp_path, target, drafter=tiny_drafter(target, **change), save_strategy="steps", save_steps=1)
    with refused(ValueError, "checkpoint-1", "drafter"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("word", [True, "true"])
def test_a_checkpoint_in_the_arguments_is_resumed(target, tmp_path, word):
    trained(tmp_path, target, save_strategy="steps", save_steps=4, max_steps=4)
    resumed = trained(tmp_path, target, max_steps=6, resume_from_checkpoint=word)
    assert len(resumed.batches) == 2 and resumed.state.global_step == 6


def test_c3_workers_do_not_change_the_run(target, tmp_path):
    plain, workers = trained(tmp_path, target), trained(tmp_path, target, dataloader_num_workers=2)
    assert logged(workers, "loss") == logged(plain, "loss")


def test_c4_learning_rates_follow_the_closed_form(target, tmp_path):
    """Cosine with a warm-up share of 0.2: 2 of 10 steps; the rate of step n is that after n - 1 updates."""
    trainer = trained(tmp_path, target, max_steps=10, warmup_steps=0.2, learning_rate=6e-4)
    expected = [6e-4 * n / 2 if n < 2 else 3e-4 * (1 + math.cos(math.pi * (n - 2) / 8)) for n in range(10)]
    assert logged(trainer, "learning_rate") == pytest.approx(expected, rel=1e-6)
    assert max(trainer.lr_scheduler.get_last_lr()) == pytest.approx(0.0, abs=1e-12)


def test_every_epoch_sees_all_rows_in_another_order_with_other_anchors(target, tmp_path):
    trainer = trained(tmp_path, target, max_steps=16)
    epochs = [trainer.batches[:8], trainer.batches[8:]]
    orders = [[batch["input_ids"][0].tolist() for batch in epoch] for epoch in epochs]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    anchors = [{str(b["input_ids"].tolist()): b["anchor_positions"].tolist() for b in epoch} for epoch in epochs]
    assert sum(anchors[0][row] != anchors[1][row] for row in anchors[0]) >= 6
    seeds = [{seed for batch in epoch for seed in batch["noise_seeds"][0]} for epoch in epochs]
    assert not seeds[0] & seeds[1] and len(seeds[0]) == 8
    # A second call of `train` starts with the first epoch.
    first = [batch["anchor_positions"].tolist() for batch in trainer.batches]
    trainer.batches.clear()
    trainer.train()
    assert [batch["anchor_positions"].tolist() for batch in trainer.batches] == first


def test_data_seed_decides_over_the_data_alone(target, tmp_path):
    runs = [trained(tmp_path, target, seed=s, data_seed=d) for s, d in ((1, 5), (2, 5), (1, 6))]
    batches = [[batch["anchor_positions"].tolist() for batch in run.batches] for run in runs]
    assert batches[0] == batches[1] != batches[2]


class _AtTwoPoints(torch.optim.SGD):
    """Steps one to the side of the weights that it evaluates, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.aside = 0

    def _move(self, aside):
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                parameter.add_(aside - self.aside)
        self.aside = aside

    def train(self):
        self._move(1)

    def eval(self):
        self._move(0)


def test_what_a_schedule_free_optimizer_evaluates_is_what_is_saved(target, tmp_path):
    cls = partial(DFlashTrainer, optimizer_cls_and_kwargs=(_AtTwoPoints, {"lr": 0.0}))
    trainer = make(tmp_path, target, cls=cls, save_strategy="steps", save_steps=1)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert trainer.optimizer.optimizer.aside == 0
    for folder in ("checkpoint-1", "checkpoint-2", "saved"):
        saved = DFlashDraftModel.from_pretrained(tmp_path / folder).state_dict()
        for name, value in before.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-5)


# Noise


def noise_of(lengths, seeds, half_width=0.05, width=24):
    context = torch.zeros(len(lengths), width, 128)
    return add_context_noise(context, lengths, seeds, half_width)


def test_noise_is_uniform_within_its_bounds():
    noise = noise_of([[20]], [[3]], half_width=0.5, width=20)
    assert noise.abs().max() < 0.5
    assert noise.min() < -0.49 and noise.max() > 0.49
    assert noise.mean().abs() < 0.02
    assert noise.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.03)


def test_noise_of_a_document_depends_on_its_seed_alone_and_on_no_global_generator():
    state = torch.get_rng_state()
    packed = noise_of([[9, 13], [5]], [[1, 2], [3]])
    other = noise_of([[13], [5, 9]], [[2], [3, 1]])
    assert torch.equal(packed[0, :9], other[1, 5:14])
    assert torch.equal(packed[0, 9:22], other[0, :13])
    assert torch.equal(packed[1, :5], other[1, :5])
    assert not torch.equal(packed[0, :5], packed[1, :5])
    assert torch.equal(packed[0, 22:], torch.zeros(2, 128)) and torch.equal(packed[1, 5:], torch.zeros(19, 128))
    context = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(0))
    before = context.clone()
    assert not torch.equal(add_context_noise(context, [[8]], [[1]], 0.05), before) and torch.equal(context, before)
    assert add_context_noise(context, [[8]], [[1]], 0.0) is context
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("half_width", [0.0, 0.05])
def test_noise_in_training_is_that_of_seed_epoch_and_document(target, tmp_path, half_width):
    received = []
    trainer = make(tmp_path, target, make_documents(1), context_noise=half_width, seed=11)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: received.append(kwargs["context_hidden_states"]), with_kwargs=True
    )
    trainer.train()
    clean = trainer.target.context_hidden_states(trainer.batches[0]["input_ids"])
    for epoch, states in enumerate(received):
        seeds = [[document_seed(11, epoch, 0, "noise")]]
        assert torch.equal(states, add_context_noise(clean, [[clean.shape[1]]], seeds, half_width))
    assert len(received) == 2 and torch.equal(*received) == (half_width == 0)


def test_l4_noise_reaches_large_hidden_states_of_a_bf16_target(tmp_path):
    """In bf16 a step of 0.05 beside a value of 32 is rounded away."""
    trainer, seen = make(tmp_path, dense_target().bfloat16(), context_noise=0.05), []
    trainer.model.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    trainer.target.context_hidden_states = lambda ids, lengths: torch.full((*ids.shape, 128), 32.0).bfloat16()
    trainer.train()
    assert (seen[0] != 32.0).float().mean() > 0.9
    assert (seen[0] - 32.0).abs().max() <= 0.05 + 1e-6


# What may be given as data


def chats(count: int = 4) -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n} " * 20}]}
        for n in range(count)
    ]


def asked_and_answered() -> list[tuple[str, str]]:
    return [(chat["messages"][0]["content"], chat["messages"][1]["content"]) for chat in chats()]


COLUMNS = {
    "messages": chats(),
    "texts": [{"prompt": asked, "completion": answered} for asked, answered in asked_and_answered()],
    "chat": [{"prompt": chat["messages"][:1], "completion": chat["messages"][1:]} for chat in chats()],
    "conversations": [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]}
        for asked, answered in asked_and_answered()
    ],
}


@pytest.mark.parametrize("columns", COLUMNS)
def test_chats_go_in_directly_however_their_columns_are_called(target, tmp_path, columns):
    given = {"row_length": 128, "processing_class": byte_tokenizer()}
    expected = list(make(tmp_path, target, chats(), **given).train_dataset.documents)
    for data in (COLUMNS[columns], datasets.Dataset.from_list(COLUMNS[columns])):
        assert list(make(tmp_path, target, data, **given).train_dataset.documents) == expected
    trainer = trained(tmp_path, target, documents=data, eval_dataset=data, **given)
    labelled = trainer.batches[0]["labels"]
    assert "user" not in byte_tokenizer().decode(labelled[labelled != -100].tolist())
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_the_quick_start_needs_two_names_and_a_data_set(tmp_path, target_folder, monkeypatch):
    """Drafter and target by name, the tokenizer of the target, a DatasetDict as `load_dataset` gives it."""
    monkeypatch.chdir(tmp_path)
    tiny_drafter(dense_target()).save_pretrained(tmp_path / "drafter")
    data = datasets.load_dataset("json", data_files={"train": str(write_chats(tmp_path / "chats.jsonl"))})
    trainer = DFlashTrainer(str(tmp_path / "drafter"), str(target_folder), train_dataset=data)
    assert trainer._tokenizer.get_vocab() == trainer.processing_class.get_vocab() == byte_tokenizer().get_vocab()
    assert len(trainer.train_dataset.documents) == 12
    for given, expected in zip(trainer.model.parameters(), tiny_drafter(dense_target()).parameters(), strict=True):
        assert torch.equal(given, expected)
    loaded, template = dense_target(), " " + CHATML_TEMPLATE
    loaded.name_or_path = str(target_folder)
    assert make(tmp_path, loaded, data["train"], row_length=128)._tokenizer.chat_template == CHATML_TEMPLATE
    given = {"processing_class": byte_tokenizer(template), "drafter": tiny_drafter(loaded), "row_length": 128}
    assert make(tmp_path, str(target_folder), data["train"], **given)._tokenizer.chat_template == template


def test_of_a_dataset_dict_one_split_is_taken(target, tmp_path):
    train, test = (datasets.Dataset.from_list(rows) for rows in (make_documents(3), make_documents(2)))
    both = datasets.DatasetDict({"train": train, "test": test})
    alone = datasets.DatasetDict({"test": test})
    trainer = make(tmp_path, target, both, eval_dataset=alone)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (3, 2)
    with refused(ValueError, "train", "test"):
        make(tmp_path, target, both, eval_dataset=both)


def test_a_new_drafter_is_made_for_the_target(tmp_path, target_folder):
    one, same, other = (make_new(tmp_path, str(target_folder), seed=seed) for seed in (1, 1, 7))
    config = one.model.config
    assert (config.hidden_size, config.num_target_layers, config.mask_token_id) == (64, 6, 260)
    assert torch.equal(one.model.fc.weight, same.model.fc.weight)
    assert not torch.equal(one.model.fc.weight, other.model.fc.weight)
    frozen = make_new(tmp_path, FrozenTarget(dense_target(), [2]), processing_class=byte_tokenizer())
    assert frozen.model.config.target_layer_ids == [2]
    with refused(ValueError, "processing_class", "mask_token_id"):
        make_new(tmp_path, dense_target())


def test_chats_are_cut_at_max_length(target, tmp_path):
    for given, expected in (({"max_length": 50}, 50), ({}, 64)):
        trainer = make(tmp_path, target, chats(), row_length=64, processing_class=byte_tokenizer(), **given)
        assert max(len(d["input_ids"]) for d in trainer.train_dataset.documents) == expected


LONG = {"input_ids": [1] * 33, "supervised_spans": [[0, 33]]}
STREAM = datasets.Dataset.from_list(make_documents(2)).to_iterable_dataset
DATA_ERRORS = {
    "chats_without_tokenizer": (chats, ["processing_class"]),
    "other_columns": (lambda: [{"text": "a"}], ["Row 0", "text", "messages", "input_ids"]),
    "no_spans": (lambda: [*make_documents(1), {"input_ids": [1, 2]}], ["Row 1", "input_ids", "supervised_spans"]),
    "empty": (list, ["list"]),
    "a_text": (lambda: "completions.jsonl", ["str", "load_documents"]),
    "a_stream": (STREAM, ["IterableDataset", "dflash-hf tokenize"]),
    "streams": (lambda: datasets.IterableDatasetDict({"train": STREAM()}), ["Iterable", "dflash-hf tokenize"]),
    "too_long": (lambda: [*make_documents(2), LONG], ["Document 2", 33]),
    "span_outside": (lambda: [{"input_ids": [1] * 9, "supervised_spans": [[2, 10]]}], ["Document 0", "[2, 10]"]),
    "unknown_token": (lambda: [{"input_ids": [272] * 9, "supervised_spans": [[2, 9]]}], ["272"]),
    "mask_token": (lambda: [{"input_ids": [260] * 9, "supervised_spans": [[2, 9]]}], ["mask_token_id=260"]),
    "in_rows": (lambda: PackedDataset([{"input_ids": [272] * 9, "supervised_spans": [[2, 9]]}], 9), ["272"]),
}


@pytest.mark.parametrize("case", DATA_ERRORS)
@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_data_that_cannot_be_trained_on_is_refused_at_once(target, tmp_path, case, argument):
    data, names = DATA_ERRORS[case]
    with refused(ValueError, *names):
        if argument == "train_dataset":
            make(tmp_path, target, data())
        else:
            make(tmp_path, target, eval_dataset=data())


def test_n10_documents_beyond_the_drafters_positions_are_refused(target, tmp_path):
    """They train and validate, and servers fail on them."""
    drafter = tiny_drafter(target, max_position_embeddings=24)
    with refused(ValueError, "max_position_embeddings=24", "30"):
        make(tmp_path, target, make_documents(8, longest=30, shortest=30), drafter=drafter)
    make(tmp_path, target, make_documents(8, longest=24), drafter=drafter)


def test_answers_shorter_than_the_block_warn_with_the_share_of_slots(target, tmp_path, caplog):
    documents = [{"input_ids": list(range(20)), "supervised_spans": [[10, 13]]}]
    with caplog.at_level(logging.WARNING):
        make(tmp_path, target, documents, drafter=tiny_drafter(target, block_size=16))
    assert "10.0%" in caplog.text and "16" in caplog.text


def thinking_tokenizer():
    """Writes T before each answer where it is told to think."""
    written = "{% if enable_thinking %}T{% endif %}"
    template = CHATML_TEMPLATE.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n" + written + "{%")
    answer = "\n{% if message['role'] == 'assistant' %}" + written + "{% endif %}{{ message['content'] }}"
    return byte_tokenizer(template.replace("\n{{ message['content'] }}", answer))


def test_thinking_is_handed_to_the_template(target, tmp_path):
    starts = []
    for enable_thinking in (True, False):
        given = {"row_length": 96, "enable_thinking": enable_thinking, "processing_class": thinking_tokenizer()}
        trainer = make(tmp_path, target, chats(1), **given)
        starts.append(trainer.train_dataset[0]["documents"][0]["supervised_spans"][0][0])
    # With thinking the generation prompt itself writes the "T".
    assert starts[0] == starts[1] + 1


def test_dt3_a_mode_that_documents_were_not_tokenised_in_is_refused(tmp_path):
    file, tokenizer = write_chats(tmp_path / "chats.jsonl"), byte_tokenizer()
    tokenize_files(file, tmp_path / "any", tokenizer, TokenizeOptions(), num_proc=1)
    tokenize_files(file, tmp_path / "off", tokenizer, TokenizeOptions(enable_thinking=False), num_proc=1)
    with refused(ValueError, "enable_thinking=True", "enable_thinking=False", tmp_path / "off"):
        load_documents(tmp_path / "off", tokenizer, enable_thinking=True)
    with refused(ValueError, "enable_thinking=False", "enable_thinking=None"):
        load_documents(tmp_path / "any", tokenizer, enable_thinking=False)
    assert len(load_documents(tmp_path / "off", tokenizer, enable_thinking=False, max_length=8)) == 12


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("make_target", [dense_target, hybrid_target])
def test_h1_a_documents_context_is_its_own_whatever_side_the_tokenizer_pads(tmp_path, make_target, padding_side):
    target, tokenizer = make_target(), byte_tokenizer()
    tokenizer.padding_side = padding_side
    rows = [
        {"messages": [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "cde" * n}]}
        for n in (1, 2, 4)
    ]
    trainer = make(tmp_path, target, rows, row_length=512, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    context = trainer.target.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    (lengths,), first = batch["document_lengths"], 0
    assert len(lengths) == 3 and len(set(lengths)) == 3
    for length in lengths:
        part = slice(first, first + length)
        states = target(batch["input_ids"][:, part], output_hidden_states=True, use_cache=False).hidden_states
        alone = torch.cat([states[i + 1] for i in trainer.target.target_layer_ids], dim=-1)
        torch.testing.assert_close(context[:, part], alone, rtol=1e-5, atol=1e-5)
        first += length


# What may be given as drafter and target


def test_models_and_arguments_of_the_wrong_kind_are_refused(target, tmp_path, monkeypatch):
    with refused(ValueError, "TrainingArguments", "DFlashTrainingArguments"):
        DFlashTrainer(tiny_drafter(target), target, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    # As when drafter and target are given in the wrong order.
    with refused(ValueError, "Qwen3ForCausalLM", "DFlashDraftModel"):
        make(tmp_path, target, drafter=dense_target())
    with refused(ValueError, "NoneType", "target_model"):
        DFlashTrainer(tiny_drafter(target), None)
    with refused(ValueError, "target_layer_ids"):
        make(tmp_path, FrozenTarget(target, [0, 1]), drafter=tiny_drafter(target))
    with refused(ValueError, "final_states=True"):
        make(tmp_path, FrozenTarget(target, [1, 3]), drafter=tiny_drafter(target), objective="kl")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused(OSError, "no-such/target"):
        make(tmp_path, "no-such/target", drafter=tiny_drafter(target))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"hidden_size": 128}, ["hidden_size", 128, 64]),
        ({"num_target_layers": 8}, ["num_target_layers", 8, 6]),
        ({"vocab_size": 300}, ["vocab_size", 300, 272]),
        ({"vocab_size": 300, "mask_token_id": 272}, ["mask_token_id=272", 272]),
    ],
)
def test_a_drafter_for_another_target_is_refused(target, tmp_path, fields, names):
    other = dense_target(hidden_size=fields.pop("hidden_size", 64))
    drafter = tiny_drafter(other, **fields)
    with refused(ValueError, *names):
        make(tmp_path, target, drafter=drafter)


def test_a_mask_token_that_ends_the_targets_texts_is_refused(tmp_path):
    target = dense_target()
    target.generation_config.eos_token_id = [258, MASK_TOKEN_ID]
    with refused(ValueError, f"mask_token_id={MASK_TOKEN_ID}"):
        make(tmp_path, target)


def test_a_target_by_folder_model_or_frozen_target_trains_the_same(target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    frozen = FrozenTarget(target, tiny_drafter(target).config.target_layer_ids)
    losses = [
        logged(trained(tmp_path, given, drafter=tiny_drafter(target)), "loss")
        for given in (target, frozen, str(tmp_path / "target"), tmp_path / "target")
    ]
    assert losses.count(losses[0]) == 4


@pytest.mark.parametrize("kwargs", ['{"dtype": "bfloat16"}', {"dtype": torch.bfloat16}], ids=str)
def test_target_model_init_kwargs_reach_the_target(target, tmp_path, kwargs):
    target.save_pretrained(tmp_path / "target")
    given = {"drafter": tiny_drafter(target), "target_model_init_kwargs": kwargs, "bf16": True}
    trainer = trained(tmp_path, str(tmp_path / "target"), **given)
    assert trainer.target.model.dtype == torch.bfloat16
    # Loggers write the arguments as JSON.
    assert "bfloat16" in trainer.args.to_json_string()
    for loaded in (target, FrozenTarget(target, [1, 3])):
        with refused(ValueError, "target_model_init_kwargs"):
            make(tmp_path, loaded, **given)


def test_a_cpu_that_was_not_asked_for_is_told_of(target, tmp_path, caplog, monkeypatch):
    """bf16 on a machine whose GPU torch cannot reach would train for weeks without a word."""
    seen = logging.getLogger("seen")
    seen.warning_once = seen.warning
    monkeypatch.setattr("dflash_hf.trainer.logger", seen)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    make(tmp_path, target)
    assert not caplog.text
    assert make(tmp_path, target, use_cpu=False, bf16=True).args.use_cpu
    assert caplog.text.count("use_cpu=True") == 1


# The whole chain


def test_a_trainer_learns_the_targets_distribution(target, tmp_path):
    trainer = make(tmp_path, target, objective="kl", max_steps=30, context_noise=0.0, learning_rate=3e-3)
    assert trainer.target.final_states
    trainer.train()
    assert logged(trainer, "loss")[-1] < 0.8 * logged(trainer, "loss")[0]


PROMPT_LENGTHS = (9, 14)
# The first token is the prefill's; then 8 verifications of a whole block commit 4 tokens each. So nothing is cut at
# the budget, and a drafter that knows both answers by heart reaches exactly the block size.
NEW_TOKENS = 1 + 8 * BLOCK_SIZE
# Seeds whose greedy answers hold many different tokens: others of these random targets repeat one token for ever.
SEEDS = {"dense": 53, "hybrid": 0}


def written_documents(target, seed: int) -> list[dict]:
    """Random prompts with the target's own greedy answers."""
    generator, documents = torch.Generator().manual_seed(seed), []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(0, 256, (1, length), generator=generator)
        ids = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        assert len(ids) == length + NEW_TOKENS and len(set(ids[length:])) > 10, "the answer is worth learning"
        documents.append({"input_ids": ids, "supervised_spans": [[length, len(ids)]]})
    return documents


@pytest.mark.parametrize("kind", SEEDS)
def test_e5_a_drafter_that_overfits_two_answers_drafts_them(kind, tmp_path):
    target = {"dense": dense_target, "hybrid": hybrid_target}[kind](seed=SEEDS[kind])
    documents = written_documents(target, SEEDS[kind])
    prompts = [document["input_ids"][: document["supervised_spans"][0][0]] for document in documents]
    # These targets may write any token, so the mask is one that these answers do not hold.
    used = {target.config.eos_token_id, target.config.pad_token_id, *documents[0]["input_ids"]}
    mask_token_id = max(set(range(VOCAB_SIZE)) - used - {*documents[1]["input_ids"]})
    drafter = tiny_drafter(target, mask_token_id=mask_token_id)
    measured = partial(measure_acceptance, eos_token_id=[], progress=False)
    before = measured(target, drafter, prompts, NEW_TOKENS)
    arguments = {"num_train_epochs": 150, "max_steps": -1, "learning_rate": 3e-3, "row_length": 128}
    arguments |= {"max_anchors_per_row": 128, "num_anchors": 512, "logging_steps": 50, "warmup_steps": 0.04}
    trainer = trained(tmp_path, target, documents=documents, drafter=drafter, eval_dataset=documents, **arguments)
    forced = trainer.evaluate()["eval_acceptance_length"]
    after = measured(target, drafter, prompts, NEW_TOKENS)
    assert before.acceptance_length < 1.5
    assert after.acceptance_length >= 0.9 * BLOCK_SIZE, (after.acceptance_length, forced)
    assert after.lossless and [p.output_ids for p in after.prompts] == [
        document["input_ids"][len(prompt) :] for document, prompt in zip(documents, prompts, strict=True)
    ]
    # Accuracy on given text must not promise what decoding does not keep.
    assert abs(forced - after.acceptance_length) < 0.1 * BLOCK_SIZE


FULL, SLIDING = "full_attention", "sliding_attention"


def mixed_rows(count: int, seed: int = 0) -> list[dict]:
    """Documents of 5 to 120 tokens with one or two supervised stretches."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        n = int(random.integers(5, 120))
        cut = int(random.integers(1, n))
        spans = [[1, cut], [min(cut + 2, n), n]] if cut > 1 else [[1, n]]
        documents.append({"input_ids": random.integers(0, 200, n).tolist(), "supervised_spans": spans})
    return documents


def test_p2_s1_fifty_batches_of_mixed_rows_compile_two_graphs():
    rows = PackedDataset(mixed_rows(120), row_length=256)
    collator = DataCollatorForDFlash(4, num_anchors=16, row_length=256, pad_anchors_to_multiple_of=64)
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=8)
    drafter.set_attn_implementation("flex_attention")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(drafter, backend="eager")
    width = drafter.fc.in_features
    for step in range(50):
        batch = collator([rows[step // len(rows), step % len(rows)]])
        anchors, documents = batch["anchor_positions"], batch["document_ids"]
        masks = training_masks(drafter.config, anchors, documents)
        positions = block_position_ids(batch["position_ids"], anchors, 4)
        context, noise = torch.randn(1, 256, width), torch.randn(1, anchors.shape[1] * 4, drafter.config.hidden_size)
        with torch.no_grad():
            compiled = drafter(noise, context, masks, positions).last_hidden_state
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one graph per kind of layer"
    for layer in drafter.layers:
        layer._compiled_call_impl = None
    # Uncompiled layers would call Inductor's flex attention, whose cached kernels fit the CPU that wrote them.
    drafter.set_attn_implementation("sdpa")
    masks = training_masks(drafter.config, anchors, documents)
    with torch.no_grad():
        expected = drafter(noise, context, masks, positions).last_hidden_state
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.fixture
def one_rank():
    """A process group of this process alone, in which DDP acts as among several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_training_compiles_the_graphs_of_one_rank(one_rank):
    """DDP's parameters are in buckets, here smaller than a matrix, which is not to cut the layers' graphs."""
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=8)
    rows = pack_rows([[(40, [3, 20])]])
    noise, context = random_inputs(drafter, rows)
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_layers(drafter, backend=count)
    wrapped = DistributedDataParallel(drafter, bucket_cap_mb=0.001)
    masks = training_masks(drafter.config, rows.anchor_positions, rows.document_ids)
    positions = block_position_ids(rows.position_ids, rows.anchor_positions, drafter.config.block_size)
    wrapped(noise, context, masks, positions).last_hidden_state.sum().backward()
    assert len(graphs) == 2, "one graph per kind of layer"
    torch.compiler.reset()


def test_activation_checkpointing_changes_nothing_and_keeps_less():
    rows = pack_rows([[(30, [2, 7, 9, 25]), (16, [0, 5, 6])]], padding=3, unused=1)
    drafter = random_drafter([SLIDING, FULL], window=9).train()
    noise, context = random_inputs(drafter, rows)
    results, kept = [], []
    for checkpointing in (False, True):
        if checkpointing:
            drafter.activation_checkpointing_enable()
        drafter.zero_grad()
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            output = packed_forward(drafter, rows, noise, context)
        kept.append(sum(saved))
        output.pow(3).sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in drafter.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[1] < 0.5 * kept[0]


EIGHT_BIT = {"optim": "adamw_torch_8bit", "max_steps": 4, "save_steps": 2}


@pytest.fixture
def uncompiled():
    """torchao compiles its optimizers' step for every shape, which takes a CPU minutes and changes no result."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_c5_a_resumed_run_with_8_bit_adamw_is_the_same_run(tmp_path, uncompiled):
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


def test_a_step_that_is_not_finite_leaves_8_bit_adamw_alone(tmp_path, uncompiled):
    trainer = make_trainer(tmp_path, **EIGHT_BIT)
    weight, seen = trainer.model.norm.weight, []
    # The norm's gradient comes before that of the projection, so this is the second step.
    trainer.model.fc.weight.register_hook(lambda grad: grad * (float("nan") if len(seen) == 2 else 1.0))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().clone()))
    trainer.train()
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])
    states = [t for state in trainer.optimizer.optimizer.state.values() for t in state.values()]
    tensors = [t.dequantize() if hasattr(t, "dequantize") else t for t in states if isinstance(t, torch.Tensor)]
    assert tensors and all(tensor.isfinite().all() for tensor in tensors)
