# SPDX-License-Identifier: Apache-2.0
"""The trainer: one loss per optimizer step however its rows are split, exact resumes, and errors before training."""

import copy
import json
import logging
import math

import datasets
import numpy as np
import pytest
import torch
from naive import naive_drafter, naive_loss
from safetensors.torch import load_file
from tiny import MASK_TOKEN_ID, VOCAB_SIZE, byte_tokenizer, dense_target, hybrid_target
from transformers import TrainerCallback, TrainingArguments

import dflash_hf.trainer
from dflash_hf import (
    DataCollatorForDFlash,
    DFlashDraftConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    FrozenTarget,
    PackedDataset,
)
from dflash_hf.data_collator import document_seed
from dflash_hf.trainer import add_context_noise


BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def target():
    return dense_target()


def make_documents(count: int = 8, shortest: int = 17, longest: int = 30, seed: int = 0) -> list[dict]:
    """Documents of random lengths, most with two answers; no two of them fit into one row of 32 tokens."""
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(generator.integers(shortest, longest + 1))
        first = int(generator.integers(2, max(3, length // 2 - 2)))
        documents.append(
            {
                "input_ids": generator.integers(0, 256, length).tolist(),
                "supervised_spans": [[first, first + 3], [first + 5, length]],
            }
        )
    return documents


def make_drafter(target, seed: int = 0, **overrides) -> DFlashDraftModel:
    values = {"num_hidden_layers": 2, "num_taps": 2, "mask_token_id": MASK_TOKEN_ID, "block_size": BLOCK_SIZE}
    torch.manual_seed(seed)
    return DFlashDraftModel(DFlashDraftConfig.from_target_config(target.config, **{**values, **overrides}))


def make_arguments(folder, **overrides) -> DFlashTrainingArguments:
    values = {
        "output_dir": str(folder),
        "row_length": 32,
        "num_anchors": 6,
        "max_anchors_per_row": 64,
        "max_steps": 2,
        "warmup_steps": 0,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
    }
    return DFlashTrainingArguments(**{**values, **overrides})


class RecordedTrainer(DFlashTrainer):
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


def make_trainer(target, folder, documents=None, drafter=None, eval_dataset=None, callbacks=None, **arguments):
    return RecordedTrainer(
        make_drafter(target) if drafter is None else drafter,
        target,
        make_arguments(folder, **arguments),
        train_dataset=make_documents() if documents is None else documents,
        eval_dataset=eval_dataset,
        callbacks=callbacks,
    )


def trained(target, folder, **kwargs) -> RecordedTrainer:
    trainer = make_trainer(target, folder, **kwargs)
    trainer.train()
    return trainer


def parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_gradients_equal(actual: dict, expected: dict, tolerance: float = 1e-5):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: n + m)


# One optimizer step, however its rows are split


@pytest.mark.parametrize("objective", ["cross_entropy", "dpace"])
def test_t1_accumulation_gives_the_same_parameters_and_logs(target, tmp_path, objective):
    """Plain SGD on 8 rows: 2 steps of 1 x 4 rows and of 4 x 1 rows, padded and masked differently."""
    common = {"optim": "sgd", "learning_rate": 0.5, "context_noise": 0.05, "objective": objective}
    one = trained(target, tmp_path, per_device_train_batch_size=4, **common)
    four = trained(target, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **common)
    assert len(one.batches) == 2 and len(four.batches) == 8
    for name, parameter in parameters(one).items():
        torch.testing.assert_close(parameters(four)[name], parameter, rtol=0, atol=1e-6)
    assert logged(four, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert logged(four, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)


def test_t8_accumulation_logs_the_same_metrics(target, tmp_path):
    """Sums since the last log, over all micro-batches: neither multiplied by them nor the last one's alone."""
    common = {"optim": "sgd", "logging_steps": 2, "max_steps": 4}
    one = trained(target, tmp_path, per_device_train_batch_size=4, **common)
    four = trained(target, tmp_path, gradient_accumulation_steps=4, **common)
    for name in ("loss", "acceptance_length", "accuracy", "full_blocks"):
        assert len(logged(one, name)) == 2
        assert logged(four, name) == pytest.approx(logged(one, name), rel=1e-5)
    assert all(1.0 <= value <= BLOCK_SIZE for value in logged(one, "acceptance_length"))
    # Logs of the second half hold nothing of the first.
    assert one._trained.blocks.values.abs().sum() == 0


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_the_same_documents_give_the_same_gradients_however_they_are_split(kind, tmp_path):
    """8 documents as 1 x 8, as 4 x 2 accumulated and packed into other rows, noise on; every epoch's own draws."""
    target = {"dense": dense_target, "hybrid": hybrid_target}[kind]()
    documents = make_documents(8, shortest=9, longest=16)
    common = {"documents": documents, "max_steps": 1, "context_noise": 0.05, "num_anchors": 5, "max_grad_norm": 0.0}
    rows = len(PackedDataset(documents, 40))
    assert rows < 5
    splits = {
        "1 x 8": {"row_length": 16, "per_device_train_batch_size": 8},
        "4 x 2": {"row_length": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "packed": {"row_length": 40, "gradient_accumulation_steps": rows},
        "one row": {"row_length": 128},
    }
    runs = {name: trained(target, tmp_path, **common, **split) for name, split in splits.items()}
    expected = runs["1 x 8"]
    assert {name: len(run.batches) for name, run in runs.items()} == {
        "1 x 8": 1,
        "4 x 2": 4,
        "packed": rows,
        "one row": 1,
    }
    for run in runs.values():
        assert_gradients_equal(run.gradients[0], expected.gradients[0])
        assert logged(run, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-5)
        assert logged(run, "accuracy") == pytest.approx(logged(expected, "accuracy"))


def test_the_step_equals_naive_forwards_of_every_block(target, tmp_path):
    """Gradients of one step, against separate naive forwards of each anchor through the whole chain."""
    trainer = trained(
        target, tmp_path, max_steps=1, per_device_train_batch_size=8, context_noise=0.0, max_grad_norm=0.0
    )
    drafter, (batch,) = make_drafter(target), trainer.batches
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
    documents = make_documents(3)
    silent = {"input_ids": list(range(20)), "supervised_spans": []}
    split = {"gradient_accumulation_steps": 4, "max_steps": 1}
    with_silent = trained(target, tmp_path, documents=[*documents, silent], **split)
    without = trained(target, tmp_path, documents=documents, gradient_accumulation_steps=3, max_steps=1)
    assert_gradients_equal(with_silent.gradients[0], without.gradients[0], tolerance=1e-6)
    assert logged(with_silent, "loss") == pytest.approx(logged(without, "loss"), rel=1e-6)


def test_l2_a_step_with_nothing_supervised_leaves_zero_gradients(target, tmp_path):
    documents = [{"input_ids": list(range(20)), "supervised_spans": []}, *make_documents(1)]
    trainer = trained(target, tmp_path, documents=documents, max_steps=2, num_train_epochs=1)
    assert len(trainer.gradients) == 2
    silent = [step for step, batch in enumerate(trainer.batches) if (batch["labels"] == -100).all()]
    assert len(silent) == 1
    assert all(torch.equal(g, torch.zeros_like(g)) for g in trainer.gradients[silent[0]].values())
    assert logged(trainer, "loss")[silent[0]] == 0.0
    assert all(torch.isfinite(p).all() for p in parameters(trainer).values())


@pytest.mark.parametrize("packed", [False, True])
def test_l2_a_data_set_with_nothing_to_learn_from_is_an_error_before_training(target, tmp_path, packed):
    silent = [{"input_ids": list(range(20)), "supervised_spans": [[4, 5]]} for _ in range(3)]
    with pytest.raises(ValueError, match=r"nothing to\s+learn from"):
        make_trainer(target, tmp_path, documents=PackedDataset(silent, 32) if packed else silent)


def test_every_drafter_parameter_moves_in_two_steps(target, tmp_path):
    before = make_drafter(target).state_dict()
    trainer = trained(target, tmp_path, max_steps=2, warmup_steps=0.04)
    for name, parameter in parameters(trainer).items():
        assert not torch.equal(parameter, before[name]), name


def test_activation_checkpointing_changes_nothing(target, tmp_path):
    plain = trained(target, tmp_path)
    checkpointed = trained(target, tmp_path, activation_checkpointing=True)
    for step in range(2):
        assert_gradients_equal(checkpointed.gradients[step], plain.gradients[step], tolerance=1e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_backends_train_the_same(target, tmp_path, implementation):
    trainer = trained(target, tmp_path, drafter_attn_implementation=implementation)
    assert trainer.model.config._attn_implementation == implementation
    assert_gradients_equal(trainer.gradients[1], trained(target, tmp_path).gradients[1])


# Columns, devices and types


def test_t2_the_collator_receives_every_column(target, tmp_path):
    seen = []

    class Collator(DataCollatorForDFlash):
        def __call__(self, rows):
            seen.extend(rows)
            return super().__call__(rows)

    documents = datasets.Dataset.from_list(make_documents(4)).add_column("row", list(range(4)))
    trainer = DFlashTrainer(
        make_drafter(target),
        target,
        make_arguments(tmp_path, max_steps=4),
        data_collator=Collator(block_size=BLOCK_SIZE),
        train_dataset=documents,
    )
    trainer.train()
    assert sorted(d["document"] for row in seen for d in row["documents"]) == [0, 1, 2, 3]
    for row in seen:
        for document in row["documents"]:
            assert document["input_ids"] == documents[document["document"]]["input_ids"]
            assert document["supervised_spans"] == documents[document["document"]]["supervised_spans"]


def test_t2_remove_unused_columns_is_refused(tmp_path):
    with pytest.raises(ValueError, match="remove_unused_columns=True"):
        make_arguments(tmp_path, remove_unused_columns=True)


def test_t4_two_visible_gpus_never_mean_data_parallel(target, tmp_path):
    arguments = make_arguments(tmp_path, per_device_train_batch_size=3)
    assert arguments.device.type == "cpu"
    # What the arguments write down when they find two GPUs.
    arguments._n_gpu = 2
    trainer = RecordedTrainer(make_drafter(target), target, arguments, train_dataset=make_documents())
    assert trainer.args.n_gpu == 1 and arguments.parallel_mode.value == "not_parallel"
    assert arguments.train_batch_size == 3 and arguments.eval_batch_size == 1
    assert trainer._wrap_model(trainer.model) is trainer.model
    trainer.train()
    assert [len(batch["input_ids"]) for batch in trainer.batches] == [3, 3]
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)


@pytest.mark.parametrize("autocast", [False, True])
def test_t5_a_bf16_drafter_gets_fp32_masters_whose_norms_move(target, tmp_path, autocast):
    make_drafter(target).bfloat16().save_pretrained(tmp_path / "bf16")
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "bf16")
    assert drafter.dtype == torch.bfloat16
    before = {name: parameter.detach().float() for name, parameter in drafter.named_parameters()}
    trainer = trained(target, tmp_path, drafter=drafter, bf16=autocast, max_steps=3, learning_rate=6e-4)
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


def test_t5_autocast_is_used(target, tmp_path):
    fp32 = trained(target, tmp_path)
    bf16 = trained(target, tmp_path, bf16=True)
    assert logged(bf16, "loss") == pytest.approx(logged(fp32, "loss"), rel=2e-2)
    assert logged(bf16, "loss") != logged(fp32, "loss")


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bf16_target_trains_an_fp32_drafter(tmp_path, autocast):
    """Targets load in the type of their files, mostly bf16; the drafter's masters are fp32."""
    trainer = make_trainer(dense_target().bfloat16(), tmp_path, eval_dataset=make_documents(2), bf16=autocast)
    before = trainer.evaluate()
    trainer.train()
    assert math.isfinite(before["eval_loss"]) and math.isfinite(trainer.evaluate()["eval_loss"])
    assert trainer.target.model.dtype == torch.bfloat16


# Evaluation


def test_t3_evaluation_reports_loss_acceptance_and_accuracy_per_slot(target, tmp_path):
    trainer = make_trainer(target, tmp_path, eval_dataset=make_documents(4, seed=1))
    metrics = trainer.evaluate()
    names = ["loss", "acceptance_length", "accuracy", *(f"accuracy_slot_{k}" for k in range(1, BLOCK_SIZE))]
    for name in names:
        assert math.isfinite(metrics[f"eval_{name}"]), name
    assert "eval_accuracy_slot_0" not in metrics and f"eval_accuracy_slot_{BLOCK_SIZE}" not in metrics
    assert 1.0 <= metrics["eval_acceptance_length"] <= BLOCK_SIZE
    assert metrics["eval_loss"] == pytest.approx(math.log(VOCAB_SIZE), rel=0.3)


def test_t3_evaluation_is_a_ratio_of_sums_whatever_the_batches(target, tmp_path):
    """Rows with many and with few labels: a mean over batches would depend on how they are grouped."""
    documents = make_documents(4, seed=1)
    documents[0]["supervised_spans"] = [[10, 12]]
    results = [
        make_trainer(target, tmp_path, eval_dataset=documents, **split).evaluate()
        for split in ({}, {"per_device_eval_batch_size": 3}, {"row_length": 128})
    ]
    for name in ("eval_loss", "eval_acceptance_length", "eval_accuracy", "eval_full_blocks"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5)
        assert results[2][name] == pytest.approx(results[0][name], rel=1e-5)


def test_t7_evaluation_repeats_itself_without_noise_and_keeps_no_logits(target, tmp_path, monkeypatch):
    trainer = make_trainer(target, tmp_path, eval_dataset=make_documents(4, seed=1), context_noise=0.5)
    trainer.train()
    monkeypatch.setattr(dflash_hf.trainer, "add_context_noise", None)
    kept = []
    original = trainer.prediction_step

    def prediction_step(*args, **kwargs):
        output = original(*args, **kwargs)
        kept.append(output)
        return output

    monkeypatch.setattr(trainer, "prediction_step", prediction_step)
    first, second = trainer.evaluate(), trainer.evaluate()
    timings = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    assert {k: v for k, v in first.items() if k not in timings} == {
        k: v for k, v in second.items() if k not in timings
    }
    assert all(logits is None and labels is None and not loss.requires_grad for loss, logits, labels in kept)


def test_t7_evaluation_between_steps_leaves_training_alone(target, tmp_path):
    plain = trained(target, tmp_path, max_steps=4)
    evaluated = trained(
        target, tmp_path, max_steps=4, eval_dataset=make_documents(4, seed=1), eval_strategy="steps", eval_steps=1
    )
    assert logged(evaluated, "loss") == logged(plain, "loss")
    assert logged(evaluated, "acceptance_length") == logged(plain, "acceptance_length")
    assert len(logged(evaluated, "eval_loss")) == 4
    for name, parameter in parameters(plain).items():
        assert torch.equal(parameters(evaluated)[name], parameter)


def test_several_evaluation_sets_are_reported_apart(target, tmp_path):
    sets = {"a": make_documents(2, seed=1), "b": make_documents(3, seed=2)}
    metrics = make_trainer(target, tmp_path, eval_dataset=sets).evaluate()
    alone = make_trainer(target, tmp_path, eval_dataset=sets["b"]).evaluate()
    assert metrics["eval_b_acceptance_length"] == alone["eval_acceptance_length"]
    assert metrics["eval_b_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
    assert metrics["eval_a_loss"] != metrics["eval_b_loss"]


def test_evaluation_takes_documents_given_to_it(target, tmp_path):
    """`evaluate(documents)` takes the same kinds of data as the constructor."""
    documents = make_documents(3, seed=2)
    expected = make_trainer(target, tmp_path, eval_dataset=documents).evaluate()
    trainer = make_trainer(target, tmp_path, eval_dataset=make_documents(2, seed=1))
    assert trainer.evaluate(PackedDataset(documents, 32))["eval_loss"] == pytest.approx(expected["eval_loss"])
    assert trainer.evaluate(documents)["eval_loss"] == pytest.approx(expected["eval_loss"])
    assert trainer.evaluate({"a": documents})["eval_a_loss"] == pytest.approx(expected["eval_loss"])


class Spoil(TrainerCallback):
    """Undoes all learning after a step, so that the best checkpoint is not the last."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()


def test_t3_load_best_model_at_end_by_acceptance_length(target, tmp_path):
    """Documents of one token are learned in a few steps; then the drafter is spoiled and the best one comes back."""
    documents = [{"input_ids": [65] * 20, "supervised_spans": [[4, 20]]} for _ in range(4)]
    trainer = make_trainer(
        target,
        tmp_path,
        documents=documents,
        eval_dataset=documents[:1],
        callbacks=[Spoil(step=24)],
        max_steps=25,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        metric_for_best_model="acceptance_length",
        load_best_model_at_end=True,
    )
    trainer.train()
    history = logged(trainer, "eval_acceptance_length")
    assert max(history) > 2.0 > history[-1]
    assert trainer.state.best_metric == max(history)
    best_step = 5 * (history.index(max(history)) + 1)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best_step}")
    assert trainer.evaluate()["eval_acceptance_length"] == max(history)
    saved = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert all(torch.equal(parameter, saved[name]) for name, parameter in parameters(trainer).items())


# Checkpoints and resuming


def test_c1_the_target_is_in_no_checkpoint_and_no_optimizer(tmp_path):
    target = dense_target()
    before = copy.deepcopy(target.state_dict())
    trainer = trained(target, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.save_model(tmp_path / "final")
    expected = {name for name, _ in make_drafter(target).named_parameters()}
    size = sum(4 * parameter.numel() for parameter in parameters(trainer).values())
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        assert set(load_file(folder / "model.safetensors")) == expected
        assert (folder / "model.safetensors").stat().st_size < 1.1 * size
    # AdamW keeps two moments per parameter.
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").stat().st_size < 2.2 * size
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trainer.model.parameters()}
    assert not optimized & {id(p) for p in target.parameters()}
    assert target.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert not target.training and not any(p.requires_grad or p.grad is not None for p in target.parameters())
    assert not any("target" in name or "head" in name for name, _ in trainer.model.named_modules())


RESUMES = {
    # 10 rows: step 7 is in the middle of the first epoch.
    "within_an_epoch": {"rows": 10, "save": 7},
    "two_workers": {"rows": 10, "save": 7, "dataloader_num_workers": 2},
    # 5 rows: step 5 ends the first epoch, step 7 is in the second, whose rows, anchors and noise are other ones.
    "at_the_border_of_an_epoch": {"rows": 5, "save": 5},
    "in_the_second_epoch": {"rows": 5, "save": 7},
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
    whole = trained(dense_target(), tmp_path, **options)
    expected_noises = noises.copy()
    noises.clear()

    target = dense_target()
    resumed = make_trainer(target, tmp_path, drafter=make_drafter(target, seed=77), **options)
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


def test_c3_workers_do_not_change_the_run(target, tmp_path):
    plain, workers = trained(target, tmp_path), trained(target, tmp_path, dataloader_num_workers=2)
    assert logged(workers, "loss") == logged(plain, "loss")


def test_c4_learning_rates_follow_the_closed_form(target, tmp_path):
    """Cosine with a warm-up share of 0.2: 2 of 10 steps; the rate of step n is that after n - 1 updates."""
    trainer = trained(target, tmp_path, max_steps=10, warmup_steps=0.2, learning_rate=6e-4)
    expected = [6e-4 * n / 2 if n < 2 else 3e-4 * (1 + math.cos(math.pi * (n - 2) / 8)) for n in range(10)]
    assert logged(trainer, "learning_rate") == pytest.approx(expected, rel=1e-6)
    assert max(trainer.lr_scheduler.get_last_lr()) == pytest.approx(0.0, abs=1e-12)


def test_every_epoch_sees_all_rows_in_another_order_with_other_anchors(target, tmp_path):
    trainer = trained(target, tmp_path, max_steps=16)
    epochs = [trainer.batches[:8], trainer.batches[8:]]
    orders = [[batch["input_ids"][0].tolist() for batch in epoch] for epoch in epochs]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    anchors = [{str(b["input_ids"].tolist()): b["anchor_positions"].tolist() for b in epoch} for epoch in epochs]
    assert sum(anchors[0][row] != anchors[1][row] for row in anchors[0]) >= 6
    seeds = [{seed for batch in epoch for seed in batch["noise_seeds"][0]} for epoch in epochs]
    assert not seeds[0] & seeds[1] and len(seeds[0]) == 8


def test_a_second_train_call_starts_with_the_first_epoch(target, tmp_path):
    trainer = make_trainer(target, tmp_path, max_steps=12)
    trainer.train()
    first = [batch["anchor_positions"].tolist() for batch in trainer.batches]
    trainer.batches.clear()
    trainer.train()
    assert [batch["anchor_positions"].tolist() for batch in trainer.batches] == first


def test_data_seed_decides_over_the_data_alone(target, tmp_path):
    runs = [trained(target, tmp_path, seed=s, data_seed=d) for s, d in ((1, 5), (2, 5), (1, 6))]
    batches = [[batch["anchor_positions"].tolist() for batch in run.batches] for run in runs]
    assert batches[0] == batches[1] != batches[2]


# Noise


def noise_of(lengths, seeds, half_width=0.05, width=24, fill=1.0):
    context = torch.full((len(lengths), width, 128), fill)
    return add_context_noise(context, lengths, seeds, half_width) - context


def test_noise_is_uniform_within_its_bounds():
    noise = noise_of([[20]], [[3]], half_width=0.5, width=20, fill=0.0)
    assert noise.abs().max() < 0.5
    assert noise.min() < -0.49 and noise.max() > 0.49
    assert noise.mean().abs() < 0.02
    assert noise.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.03)


def test_noise_of_a_document_depends_on_its_seed_alone():
    packed = noise_of([[9, 13], [5]], [[1, 2], [3]], fill=0.0)
    other = noise_of([[13], [5, 9]], [[2], [3, 1]], fill=0.0)
    assert torch.equal(packed[0, :9], other[1, 5:14])
    assert torch.equal(packed[0, 9:22], other[0, :13])
    assert torch.equal(packed[1, :5], other[1, :5])
    assert not torch.equal(packed[0, :5], packed[1, :5])
    assert torch.equal(packed[0, 22:], torch.zeros(2, 128)) and torch.equal(packed[1, 5:], torch.zeros(19, 128))


def test_noise_is_added_out_of_place_and_leaves_the_global_generator_alone():
    context = torch.randn(1, 8, 128)
    before, state = context.clone(), torch.get_rng_state()
    noisy = add_context_noise(context, [[8]], [[1]], 0.05)
    assert torch.equal(context, before) and not torch.equal(noisy, context)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_of_zero_is_the_input_itself(target, tmp_path, monkeypatch):
    context = torch.randn(1, 8, 128)
    assert add_context_noise(context, [[8]], [[1]], 0.0) is context
    received = []
    trainer = make_trainer(target, tmp_path, context_noise=0.0)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: received.append(kwargs["context_hidden_states"]), with_kwargs=True
    )
    trainer.train()
    for states, batch in zip(received, trainer.batches, strict=True):
        expected = trainer.target.context_hidden_states(batch["input_ids"], batch["document_lengths"])
        assert torch.equal(states, expected)


def test_noise_in_training_is_that_of_seed_epoch_and_document(target, tmp_path):
    received = []
    trainer = make_trainer(target, tmp_path, documents=make_documents(1), context_noise=0.05, seed=11)
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: received.append(kwargs["context_hidden_states"]), with_kwargs=True
    )
    trainer.train()
    clean = trainer.target.context_hidden_states(trainer.batches[0]["input_ids"])
    length = clean.shape[1]
    for epoch, states in enumerate(received):
        expected = add_context_noise(clean, [[length]], [[document_seed(11, epoch, 0, "noise")]], 0.05)
        assert torch.equal(states, expected)
    assert len(received) == 2 and not torch.equal(*received)


# What may be given as data, target and arguments


def chats(count: int = 4) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}."},
                {"role": "assistant", "content": f"{n} " * 20},
            ]
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("as_dataset", [False, True])
def test_chats_go_in_directly_with_the_tokenizer(target, tmp_path, as_dataset):
    data = datasets.Dataset.from_list(chats()) if as_dataset else chats()
    tokenizer = byte_tokenizer()
    trainer = RecordedTrainer(
        make_drafter(target),
        target,
        make_arguments(tmp_path, row_length=128, max_steps=4),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    texts = {
        tokenizer.decode(ids[:length])
        for b in trainer.batches
        for ids, (length, *_) in zip(b["input_ids"], b["document_lengths"], strict=True)
    }
    assert len(texts) > 1 and all("Say" in text and "assistant" in text for text in texts)
    labelled = trainer.batches[0]["labels"]
    assert "user" not in tokenizer.decode(labelled[labelled != -100].tolist())
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_chats_are_cut_at_max_length(target, tmp_path):
    options = {"processing_class": byte_tokenizer(), "train_dataset": chats()}
    short = DFlashTrainer(
        make_drafter(target), target, make_arguments(tmp_path, row_length=64, max_length=50), **options
    )
    assert max(len(d["input_ids"]) for d in short.train_dataset.documents) == 50
    rows = DFlashTrainer(make_drafter(target), target, make_arguments(tmp_path, row_length=64), **options)
    assert max(len(d["input_ids"]) for d in rows.train_dataset.documents) == 64


DATA_ERRORS = {
    "chats_without_tokenizer": (chats, "no tokenizer was given"),
    "other_columns": (lambda: [{"text": "a"}], r"columns \['text'\].*input_ids"),
    "no_spans": (lambda: [{"input_ids": [1, 2, 3]}], "supervised_spans"),
    "empty": (list, "expected"),
    "empty_dataset": (lambda: datasets.Dataset.from_list(make_documents(1)).select([]), "no documents|nothing to"),
    "iterable": (lambda: datasets.Dataset.from_list(make_documents()).to_iterable_dataset(), "IterableDataset"),
    "too_long": (
        lambda: [*make_documents(2), {"input_ids": [1] * 33, "supervised_spans": [[0, 33]]}],
        "Document 2 has 33",
    ),
    "span_outside": (lambda: [{"input_ids": [1] * 9, "supervised_spans": [[2, 10]]}], r"Document 0 .*\[2, 10\]"),
}


@pytest.mark.parametrize("case", DATA_ERRORS)
@pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
def test_data_that_cannot_be_trained_on_is_refused_at_once(target, tmp_path, case, argument):
    make, message = DATA_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        DFlashTrainer(make_drafter(target), target, make_arguments(tmp_path), **{argument: make()})


def test_an_iterable_torch_dataset_is_refused(target, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(make_documents())

    with pytest.raises(ValueError, match=r"Stream.*PackedDataset"):
        make_trainer(target, tmp_path, documents=Stream())


def test_answers_shorter_than_the_block_warn_with_the_share_of_slots(target, tmp_path, caplog):
    documents = [{"input_ids": list(range(20)), "supervised_spans": [[10, 13]]}]
    drafter = make_drafter(target, block_size=16)
    with caplog.at_level(logging.WARNING):
        make_trainer(target, tmp_path, documents=documents, drafter=drafter)
    assert "10.0% of the drafted slots" in caplog.text and "block of 16" in caplog.text


def test_arguments_of_the_wrong_class_are_refused(target, tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match=r"args is a TrainingArguments.*DFlashTrainingArguments"):
        DFlashTrainer(make_drafter(target), target, arguments)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 128}, "hidden_size .*128.* 64"),
        ({"num_target_layers": 8}, "num_target_layers .*8.* 6"),
        ({"mask_token_id": 272, "vocab_size": 300}, "mask_token_id=272 .* 272 rows"),
        ({"vocab_size": 300}, "vocab_size .*300.* 272"),
    ],
)
def test_a_drafter_for_another_target_is_refused(target, tmp_path, overrides, message):
    values = make_drafter(target).config.to_dict() | overrides
    if "mask_token_id" in overrides:
        values["dflash_config"] |= {"mask_token_id": overrides["mask_token_id"]}
    drafter = DFlashDraftModel(DFlashDraftConfig.from_dict(values))
    with pytest.raises(ValueError, match=message):
        make_trainer(target, tmp_path, drafter=drafter)


def test_a_model_that_is_no_drafter_is_refused(target, tmp_path):
    """As when drafter and target are given in the wrong order."""
    with pytest.raises(ValueError, match=r"model is a Qwen3ForCausalLM.*DFlashDraftModel"):
        make_trainer(target, tmp_path, drafter=dense_target())


def test_a_frozen_target_with_other_taps_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match="target_layer_ids"):
        make_trainer(FrozenTarget(target, [0, 1]), tmp_path, drafter=make_drafter(target))


@pytest.mark.parametrize("given", ["folder", "frozen", "model"])
def test_a_target_by_folder_model_or_frozen_target_trains_the_same(target, tmp_path, given):
    target.save_pretrained(tmp_path / "target")
    taps = make_drafter(target).config.target_layer_ids
    targets = {"folder": str(tmp_path / "target"), "frozen": FrozenTarget(target, taps), "model": target}
    trainer = trained(targets[given], tmp_path, drafter=make_drafter(target))
    assert logged(trainer, "loss") == logged(trained(target, tmp_path), "loss")


@pytest.mark.parametrize(
    "kwargs", [{"dtype": "bfloat16"}, '{"dtype": "bfloat16"}', {"dtype": torch.bfloat16}], ids=str
)
def test_target_model_init_kwargs_reach_the_target(target, tmp_path, kwargs):
    target.save_pretrained(tmp_path / "target")
    trainer = make_trainer(
        str(tmp_path / "target"), tmp_path, drafter=make_drafter(target), target_model_init_kwargs=kwargs, bf16=True
    )
    assert trainer.target.model.dtype == torch.bfloat16
    trainer.train()
    # Loggers write the arguments as JSON.
    assert "bfloat16" in trainer.args.to_json_string()


def test_target_model_init_kwargs_with_a_loaded_target_are_refused(target, tmp_path):
    taps = make_drafter(target).config.target_layer_ids
    for given in (target, FrozenTarget(target, taps)):
        with pytest.raises(ValueError, match="target_model_init_kwargs"):
            make_trainer(given, tmp_path, drafter=make_drafter(target), target_model_init_kwargs={"dtype": "bfloat16"})


def test_a_target_that_does_not_exist_is_an_error(target, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="'no-such/target' cannot be loaded"):
        make_trainer("no-such/target", tmp_path, drafter=make_drafter(target))
    with pytest.raises(ValueError, match="target_model is a NoneType"):
        make_trainer(None, tmp_path, drafter=make_drafter(target))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_anchors": 0}, "num_anchors=0"),
        ({"row_length": 0}, "row_length=0"),
        ({"max_anchors_per_row": 0}, "max_anchors_per_row=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"loss_chunk_blocks": 0}, "loss_chunk_blocks=0"),
        ({"context_noise": -0.1}, "context_noise=-0.1"),
        ({"context_noise": float("nan")}, "context_noise=nan"),
        ({"context_noise": float("inf")}, "context_noise=inf"),
    ],
)
def test_arguments_outside_their_range_are_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        make_arguments(tmp_path, **overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"objective": "mse"}, "objective='mse'"),
        ({"loss_gamma": 0.0}, "loss_gamma=0.0"),
        ({"objective": "dpace", "dpace_alpha": 2.0}, "dpace_alpha=2.0"),
        ({"drafter_attn_implementation": "flex_attention"}, "no backward on CPU"),
    ],
)
def test_a_trainer_refuses_what_it_cannot_do(target, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(target, tmp_path, **overrides)


def test_the_defaults_are_the_papers(tmp_path):
    arguments = DFlashTrainingArguments(output_dir=str(tmp_path), report_to="none")
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.num_train_epochs) == (6e-4, 0.04, 6)
    assert (arguments.lr_scheduler_type, arguments.max_grad_norm, arguments.num_anchors) == ("cosine", 1.0, 512)
    assert (arguments.context_noise, arguments.row_length, arguments.objective) == (0.05, 4096, "cross_entropy")
    assert arguments.remove_unused_columns is False
