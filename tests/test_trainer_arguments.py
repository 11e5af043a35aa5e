# SPDX-License-Identifier: Apache-2.0
"""Every argument of transformers' Trainer acts as it says, or is refused with a way out before anything is loaded."""

import logging
import multiprocessing
from dataclasses import fields
from functools import partial

import pytest
import torch
from runs import make_documents, make_trainer
from tiny import dense_target
from transformers import TrainerCallback, TrainingArguments

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.callbacks import TrainingInterrupted
from dflash_hf.training_args import REFUSED, REFUSED_FIRST, check_before


# Fields that act as transformers documents them, by what shows it: the parent's code that is used as it is, or a test.
ACTING = {
    *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("gradient_accumulation_steps", "bf16", "fp16", "tf32", "torch_empty_cache_steps", "full_determinism"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cache"),
    *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
    *("include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name"),
    *("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics", "debug"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
    # No logits are kept in any case, so that these two have what they ask for.
    *("prediction_loss_only", "eval_accumulation_steps", "eval_use_gather_object"),
    *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
    *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
    *("hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("ignore_data_skip", "restore_callback_states_from_checkpoint", "resume_from_checkpoint"),
    *("seed", "data_seed", "use_cpu", "accelerator_config", "local_rank"),
    *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("ddp_backend", "ddp_timeout"),
    # For scripts, as transformers says; fsdp_config does nothing without fsdp.
    *("do_train", "do_eval", "do_predict", "fsdp_config", "liger_kernel_config"),
}


@pytest.fixture(scope="module")
def target():
    return dense_target()


def arguments(tmp_path, **values):
    return DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **values)


def test_every_argument_of_transformers_has_been_looked_at():
    """One that a new release brings is neither known to act nor refused."""
    refused = {name for refusal in (*REFUSED_FIRST, *REFUSED) for name in refusal.names}
    assert not ACTING & refused
    assert {field.name for field in fields(TrainingArguments)} == ACTING | refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, r"deepspeed=.* would cut the drafter.*DDP"),
        ({"fsdp": True}, "fsdp=True would cut"),
        ({"fsdp": "full_shard"}, "fsdp='full_shard' would cut"),
        ({"parallelism_config": object()}, "parallelism_config=.* would cut"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True.*compile_layers"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False has no effect"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*another run"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics=True is about predictions"),
        ({"include_for_metrics": ["inputs"]}, "include_for_metrics=.*is about predictions"),
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches=False is about predictions"),
        ({"label_names": ["foo"]}, "label_names=.*has no effect"),
        ({"length_column_name": "n"}, "length_column_name='n' has no effect"),
        ({"dataloader_in_order": False, "dataloader_num_workers": 2}, "dataloader_in_order=False.*overtake"),
        ({"accelerator_config": {"split_batches": True}}, r"accelerator_config\.split_batches=True"),
        ({"accelerator_config": {"dispatch_batches": True}}, r"accelerator_config\.dispatch_batches=True"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches=False.*would wait"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler=False has no effect"),
        ({"compile_layers": True, "torch_compile": True}, "contradict"),
        ({"optim": "lomo"}, "optim='lomo' steps within the backward"),
        ({"optim": "galore_adamw_layerwise"}, "steps within the backward"),
        ({"muon": True, "optim": "adamw_torch_8bit"}, "muon=True.*optim='adamw_torch_8bit' would have no effect"),
        ({"muon": True, "optim_args": "foo=1"}, "muon=True.*optim_args"),
        ({"objective": "dpace", "loss_gamma": 3.0}, "loss_gamma=3.0 has no effect on objective='dpace'"),
        ({"dpace_alpha": 0.3}, "dpace_alpha=0.3 has no effect on objective='cross_entropy'"),
        ({"objective": "kl", "loss_gamma": 3.0}, "loss_gamma=3.0 has no effect on objective='kl' with slot_weights"),
        ({"objective": "kl", "slot_weights": "decay", "dpace_alpha": 0.3}, "dpace_alpha=0.3 has no effect"),
        ({"objective": "expected_acceptance", "slot_weights": "decay"}, "slot_weights=decay has no effect"),
        ({"max_steps": 0}, "max_steps=0 would train nothing"),
    ],
)
def test_arguments_that_would_do_something_else_are_refused(values, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"label_names": ["labels"]},
        {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
        {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=False"},
        {"optim": "adafactor"},
        {"muon": True, "optim": "adamw_torch", "adam_beta2": 0.95},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 300}},
        {"objective": "kl", "slot_weights": "decay", "loss_gamma": 2.0},
        {"objective": "expected_acceptance", "cross_entropy_share": 0.5, "dpace_alpha": 0.2},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"accelerator_config": {"non_blocking": True}},
    ],
)
def test_arguments_that_act_are_taken(values, tmp_path):
    arguments(tmp_path, **values)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_a_launcher_that_shards_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=f"The launcher set {name}=true, which would cut"):
        arguments(tmp_path)


def test_a_launchers_mixed_precision_acts_on_all_of_the_step(target, tmp_path, monkeypatch):
    """accelerate alone would run the drafter in bf16, and leave its inputs, the loss and the record in fp32."""
    given = make_trainer(tmp_path / "given", target, bf16=True, max_steps=2, save_strategy="no")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    launched = make_trainer(tmp_path / "launched", target, max_steps=2, save_strategy="no")
    assert launched.args.bf16
    for trainer in (given, launched):
        trainer.train()
    assert [e["loss"] for e in launched.state.log_history[:2]] == [e["loss"] for e in given.state.log_history[:2]]


def test_a_launchers_compilation_is_that_of_the_arguments(tmp_path):
    args = arguments(tmp_path)
    check_before(args, {"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_MIXED_PRECISION": "no"})
    assert (args.torch_compile, args.torch_compile_backend, args.bf16) == (True, "eager", False)
    with pytest.raises(ValueError, match="mixed_precision=fp8"):
        check_before(args, {"ACCELERATE_MIXED_PRECISION": "fp8"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preprocess_logits_for_metrics": print}, "preprocess_logits_for_metrics would never be called"),
        ({"compute_loss_func": print}, "compute_loss_func would never be called"),
        ({"model_init": print}, "model_init would make another drafter"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})}, "muon=True would have no effect"),
        ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "muon=True would have no effect"),
    ],
)
def test_options_of_the_trainer_that_would_do_nothing_are_refused(target, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, target, muon=True, cls=partial(DFlashTrainer, **given))


def test_tokens_are_counted_with_and_without_padding(target, tmp_path):
    lengths = [len(document["input_ids"]) for document in make_documents()]
    counted = {}
    for what in ("all", "non_padding"):
        values = {"per_device_train_batch_size": 4, "include_num_input_tokens_seen": what, "save_strategy": "no"}
        trainer = make_trainer(tmp_path, target, max_steps=-1, num_train_epochs=1, **values)
        trainer.train()
        counted[what] = trainer.state.num_input_tokens_seen
        assert trainer.state.log_history[0]["num_input_tokens_seen"] > 0
    assert counted["non_padding"] == sum(lengths) < counted["all"]


def test_data_given_to_evaluate_is_evaluated_beside_persistent_workers(target, tmp_path):
    values = {"eval_dataset": make_documents(3), "dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer, other = make_trainer(tmp_path, target, **values), make_documents(9)
    own = [trainer.evaluate()["eval_loss"], trainer.evaluate(other)["eval_loss"], trainer.evaluate()["eval_loss"]]
    assert own[0] == own[2] != own[1]
    # The workers of the trainer's own data stay, those of the others do not.
    assert len(multiprocessing.active_children()) == 1
    assert own[1] == make_trainer(tmp_path, target).evaluate(other)["eval_loss"]
    # Left to the garbage collector, torch waits five seconds for it.
    trainer._eval_dataloaders["eval"].base_dataloader._iterator._shutdown_workers()


def test_predict_gives_the_metrics_of_its_data(target, tmp_path):
    trainer = make_trainer(tmp_path, target)
    output, metrics = trainer.predict(make_documents(3)), trainer.evaluate(make_documents(3))
    assert output.predictions is output.label_ids is None
    assert output.metrics["test_acceptance_length"] == metrics["eval_acceptance_length"]
    assert output.metrics["test_loss"] == metrics["eval_loss"]


class _Interrupt(TrainerCallback):
    def __init__(self, step):
        self.step, self.trainer = step, None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.trainer._interrupts.received = 2


def _interrupted(folder, target, step):
    interrupt = _Interrupt(step)
    interrupt.trainer = make_trainer(folder, target, callbacks=[interrupt], max_steps=6)
    with pytest.raises(TrainingInterrupted):
        interrupt.trainer.train()


@pytest.mark.parametrize("word", [True, "true"])
def test_a_checkpoint_in_the_arguments_is_resumed(target, tmp_path, word):
    _interrupted(tmp_path, target, 4)
    steps = []

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    make_trainer(tmp_path, target, callbacks=[Steps()], max_steps=6, resume_from_checkpoint=word).train()
    assert steps == [5, 6]


def test_an_interrupted_run_says_how_to_go_on_and_warns_when_it_does_not(target, tmp_path, caplog, monkeypatch):
    for name in ("callbacks", "resuming"):
        monkeypatch.setattr(f"dflash_hf.{name}.logger", logging.getLogger("seen"))
    _interrupted(tmp_path, target, 2)
    assert f"interrupted after step 2 of 6. resume_from_checkpoint=True goes on from {tmp_path}/checkpoint-2" in (
        caplog.text
    )
    caplog.clear()
    make_trainer(tmp_path, target, max_steps=6, resume_from_checkpoint=True).train()
    # A run that is finished has nothing to say of its steps.
    monkeypatch.setattr("dflash_hf.prefetch.logger.warning_once", lambda said: caplog.handler.stream.write(said))
    before = caplog.text
    make_trainer(tmp_path, target, max_steps=6, resume_from_checkpoint=True).train()
    assert caplog.text == before
    make_trainer(tmp_path, target, max_steps=6, resume_from_checkpoint="false").train()
    # checkpointing tells where they are now.
    assert (tmp_path / "_earlier_1" / "checkpoint-6").exists()


def test_a_cpu_that_was_not_asked_for_is_told_of(target, tmp_path, caplog, monkeypatch):
    """bf16 on a machine whose GPU torch cannot reach would train for weeks without a word."""
    seen = logging.getLogger("seen")
    seen.warning_once = seen.warning
    monkeypatch.setattr("dflash_hf.trainer.logger", seen)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    make_trainer(tmp_path, target)
    assert not caplog.text
    assert make_trainer(tmp_path, target, use_cpu=False, bf16=True).args.use_cpu
    assert caplog.text.count("torch finds no GPU") == 1


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
    given = {"optimizer_cls_and_kwargs": (_AtTwoPoints, {"lr": 0.0})}
    values = {"save_steps": 1, "max_steps": 2, "learning_rate": 1e-3}
    trainer = make_trainer(tmp_path, target, cls=partial(DFlashTrainer, **given), **values)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert trainer.optimizer.optimizer.aside == 0
    for folder in ("checkpoint-1", "checkpoint-2", "saved"):
        saved = DFlashDraftModel.from_pretrained(tmp_path / folder).state_dict()
        for name, value in before.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-5)
