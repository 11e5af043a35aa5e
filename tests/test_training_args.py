# SPDX-License-Identifier: Apache-2.0
"""Arguments act as transformers documents them, or are refused before anything is loaded."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import make_trainer
from tiny import dense_target, refused
from transformers import SchedulerType

from dflash_hf import DFlashTrainer, DFlashTrainingArguments
from dflash_hf.prefetch import placements
from dflash_hf.training_args import check_before, check_scripted


def arguments(tmp_path, **values):
    return DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **values)


def test_the_defaults_are_the_papers(tmp_path):
    args = DFlashTrainingArguments(output_dir=str(tmp_path))
    assert (args.learning_rate, args.warmup_steps, args.num_train_epochs) == (6e-4, 0.04, 6)
    assert (args.lr_scheduler_type, args.max_grad_norm, args.num_anchors) == ("cosine", 1.0, 512)
    assert (args.context_noise, args.row_length, args.objective) == (0.05, 4096, "cross_entropy")
    assert args.remove_unused_columns is False


def test_every_argument_has_a_help_text():
    for name, field in DFlashTrainingArguments.__dataclass_fields__.items():
        assert name.startswith("_") or field.metadata.get("help") or name in ("deepspeed_plugin",), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", math.nan),
        ("learning_rate", -6e-4),
        ("max_grad_norm", -1.0),
        ("adam_beta2", 1.0),
        ("adam_epsilon", 0.0),
        ("num_train_epochs", math.nan),
        ("max_steps", 0),
        ("per_device_train_batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("num_anchors", 0),
        ("row_length", 0),
        ("context_noise", math.inf),
        ("logging_steps", -5),
        ("seed", -1),
        ("data_seed", 2**32),
        ("loss_gamma", 0.0),
        ("dpace_alpha", 1.5),
        ("loss_temperature", 1e-30),
        ("objective", "cross-entropy"),
        ("drafter_attn_implementation", "flash_attention_2"),
        ("metric_for_best_model", "acceptance"),
    ],
)
def test_values_that_no_run_can_use_are_refused(name, value, tmp_path):
    with refused(ValueError, f"{name}=", value):
        arguments(tmp_path, **{name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        {"fsdp": "full_shard"},
        {"parallelism_config": "tensor"},
        {"use_liger_kernel": True},
        {"remove_unused_columns": True},
        {"bf16_full_eval": True},
        {"label_smoothing_factor": 0.1},
        {"average_tokens_across_devices": False},
        {"auto_find_batch_size": True},
        {"dataloader_in_order": False, "dataloader_num_workers": 2},
        {"accelerator_config": {"split_batches": True}},
        {"accelerator_config": {"even_batches": False}},
        {"compile_layers": True, "torch_compile": True},
        {"optim": "galore_adamw_layerwise"},
        {"muon": True, "optim": "adamw_torch_8bit"},
        {"muon": True, "optim_args": "foo=1"},
        {"loss_gamma": 3.0, "objective": "dpace"},
        {"dpace_alpha": 0.3},
        {"cross_entropy_share": 0.5},
        {"loss_gamma": 3.0, "objective": "kl"},
        {"dpace_alpha": 0.3, "objective": "kl", "slot_weights": "decay"},
        {"slot_weights": "decay", "objective": "expected_acceptance"},
    ],
    ids=str,
)
def test_arguments_that_would_train_something_else_are_refused(values, tmp_path):
    name, value = next(iter(values.items()))
    name = next(iter(value)) if name == "accelerator_config" else name
    with refused(ValueError, f"{name}="):
        arguments(tmp_path, **values)


def test_t2_remove_unused_columns_is_refused(tmp_path):
    with refused(ValueError, "remove_unused_columns=True"):
        arguments(tmp_path, remove_unused_columns=True)


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_t5_casting_the_masters_for_evaluation_is_refused(tmp_path, name):
    with refused(ValueError, f"{name}=True", "fp32"):
        arguments(tmp_path, **{name: True})


def test_hb1_a_token_among_the_arguments_is_refused(tmp_path):
    with pytest.raises(ValueError) as error:
        arguments(tmp_path, target_model_init_kwargs={"token": "planted-secret"})
    assert "HF_TOKEN" in str(error.value) and "planted-secret" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"max_grad_norm": math.inf, "learning_rate": 0.0, "max_steps": 3, "num_train_epochs": 0.0},
        {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
        {"optim": "adafactor"},
        {"muon": True, "optim": "adamw_torch", "adam_beta2": 0.95},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 300}},
        {"objective": "kl", "slot_weights": "decay", "loss_gamma": 2.0},
        {"objective": "expected_acceptance", "cross_entropy_share": 0.5, "dpace_alpha": 0.2},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"label_names": ["labels"], "metric_for_best_model": "code_acceptance_length"},
    ],
    ids=str,
)
def test_arguments_that_act_are_taken(values, tmp_path):
    arguments(tmp_path, **values)


def test_a_schedule_that_cannot_be_made_is_refused_before_a_target_is_loaded(tmp_path):
    with refused((TypeError, ValueError), "num_cycle"):
        arguments(tmp_path, lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycle": 2})
    for kind in ("linear", "polynomial", "inverse_sqrt", "constant", "cosine_with_restarts"):
        assert arguments(tmp_path, lr_scheduler_type=kind).lr_scheduler_type == SchedulerType(kind)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launcher_that_shards_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv(name, "true")
    with refused(ValueError, name):
        arguments(tmp_path)


def test_a_launchers_mixed_precision_acts_on_all_of_the_step(tmp_path, monkeypatch):
    """accelerate alone would run the drafter in bf16, and leave its inputs, the loss and the record in fp32."""
    target, common = dense_target(), {"max_steps": 2, "save_strategy": "no"}
    given = make_trainer(tmp_path / "given", target, bf16=True, **common)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    launched = make_trainer(tmp_path / "launched", target, **common)
    assert launched.args.bf16
    for trainer in (given, launched):
        trainer.train()
    assert [e["loss"] for e in launched.state.log_history[:2]] == [e["loss"] for e in given.state.log_history[:2]]


def test_a_launchers_compilation_is_that_of_the_arguments(tmp_path):
    args = arguments(tmp_path)
    check_before(args, {"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_MIXED_PRECISION": "no"})
    assert (args.torch_compile, args.torch_compile_backend, args.bf16) == (True, "eager", False)
    with refused(ValueError, "mixed_precision=fp8"):
        check_before(args, {"ACCELERATE_MIXED_PRECISION": "fp8"})


@pytest.mark.parametrize(
    "given",
    [
        {"compute_metrics": print},
        {"compute_loss_func": print},
        {"model_init": print},
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})},
        {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_options_of_the_trainer_that_would_do_nothing_are_refused(tmp_path, given):
    name = next(iter(given))
    with refused(ValueError, "muon=True" if name.startswith("optimizer") else name):
        make_trainer(tmp_path, muon=True, cls=partial(DFlashTrainer, **given))


@pytest.mark.parametrize(
    "given", [{"do_predict": True}, {"do_eval": True}, {"eval_strategy": "steps"}, {"eval_on_start": True}], ids=str
)
def test_evaluations_of_nothing_are_refused(given):
    values = {"do_predict": False, "do_eval": False, "eval_on_start": False, "eval_strategy": "no", **given}
    args = SimpleNamespace(**{**values, "eval_strategy": SimpleNamespace(value=values["eval_strategy"])})
    with refused(ValueError, f"{next(iter(given))}={next(iter(given.values()))}"):
        check_scripted(args, has_evaluation_data=False)
    if not args.do_predict:
        check_scripted(args, has_evaluation_data=True)


def test_no_recipe_turns_trackers_off():
    """`report_to` is transformers' own, and what ships leaves it to the user."""
    recipes = Path(__file__).resolve().parents[1] / "recipes"
    assert [path for path in recipes.rglob("*.yaml") if "report_to" in path.read_text()] == []


def test_a_given_target_device_asks_for_no_second_gpu_per_drafter(tmp_path, monkeypatch):
    """Three GPUs make no two pairs, but two drafters and a target device that both share."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("dflash_hf.prefetch.local_world_size", lambda world_size: 2)
    cuda = SimpleNamespace(type="cuda")
    args = SimpleNamespace(target_device="cuda:2", target_layout="auto", world_size=2, device=cuda)
    found = [(p.layout, str(p.drafter), [str(d) for d in p.target]) for p in placements(args)]
    assert found == [("paired", "cuda:0", ["cuda:2"]), ("paired", "cuda:1", ["cuda:2"])]
    args.target_device = None
    with refused(ValueError, "2", "3"):
        placements(args)
    monkeypatch.undo()
    (placement,) = placements(arguments(tmp_path, target_device="cpu"))
    assert (placement.layout, str(placement.target[0])) == ("shared", "cpu")
