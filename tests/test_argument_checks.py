# SPDX-License-Identifier: Apache-2.0
"""Values that no run can use are refused with the arguments, before anything is loaded."""

import pytest

from dflash_hf import DFlashTrainingArguments
from dflash_hf.prefetch import placements


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learning_rate", NAN, "learning_rate=nan must be 0 or more"),
        ("learning_rate", -6e-4, "learning_rate=-0.0006 must be 0 or more"),
        ("learning_rate", INFINITY, "learning_rate=inf must be"),
        ("weight_decay", NAN, "weight_decay=nan"),
        ("warmup_steps", NAN, "warmup_steps=nan"),
        ("max_grad_norm", NAN, "max_grad_norm=nan"),
        ("max_grad_norm", -1.0, "max_grad_norm=-1.0 must be 0"),
        ("adam_beta2", 1.0, r"adam_beta2=1.0 must be in \[0, 1\)"),
        ("adam_epsilon", 0.0, "adam_epsilon=0.0 must be more than 0"),
        ("num_train_epochs", 0.0, "nothing would be trained"),
        ("num_train_epochs", NAN, "num_train_epochs=nan"),
        ("per_device_train_batch_size", 0, "per_device_train_batch_size=0 must be at least 1"),
        ("per_device_eval_batch_size", -2, "per_device_eval_batch_size=-2"),
        ("gradient_accumulation_steps", 0, "gradient_accumulation_steps=0"),
        ("dataloader_num_workers", -1, "dataloader_num_workers=-1"),
        ("logging_steps", -5, "logging_steps=-5 must be a number of steps"),
        ("save_steps", NAN, "save_steps=nan"),
        ("seed", -1, "seed=-1 must be in 0 to 4294967295"),
        ("data_seed", 2**32, "data_seed=4294967296"),
        ("loss_gamma", NAN, "loss_gamma=nan"),
        ("dpace_alpha", 1.5, "dpace_alpha=1.5"),
        ("objective", "cross-entropy", "objective='cross-entropy' is unknown"),
        ("cross_entropy_share", 0.5, "have no effect"),
        ("loss_temperature", 1e-30, "loss_temperature=1e-30"),
        ("drafter_attn_implementation", "flash_attention_2", "flex_attention, sdpa, eager"),
    ],
)
def test_values_that_no_run_can_use_are_refused(name, value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


def test_unusual_values_that_work_are_taken(tmp_path):
    values = {"max_grad_norm": INFINITY, "learning_rate": 0.0, "max_steps": 3, "num_train_epochs": 0.0}
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, target_device="cpu", **values)
    (placement,) = placements(args)
    assert (placement.layout, str(placement.target[0])) == ("shared", "cpu")


def test_a_given_target_device_asks_for_no_second_gpu_per_drafter(tmp_path, monkeypatch):
    """Three GPUs make no two pairs, but two drafters and a target device that both share."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, target_device="cuda:2")
    monkeypatch.setattr("dflash_hf.prefetch.local_world_size", lambda world_size: 2)

    class OnGpu:
        target_device, target_layout, world_size = args.target_device, args.target_layout, 2
        device = type("Cuda", (), {"type": "cuda"})

    found = [(p.layout, str(p.drafter), [str(d) for d in p.target]) for p in placements(OnGpu)]
    assert found == [("paired", "cuda:0", ["cuda:2"]), ("paired", "cuda:1", ["cuda:2"])]
    OnGpu.target_device = None
    with pytest.raises(ValueError, match="2 processes see 3 GPUs"):
        placements(OnGpu)
