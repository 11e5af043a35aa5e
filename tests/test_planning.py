# SPDX-License-Identifier: Apache-2.0
"""A run before its first step: its plan for GPUs that need not be there, and the checks of the preflight."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tiny import refused
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashDraftConfig, DFlashTrainingArguments
from dflash_hf.frozen_target import read_target_config, synthetic_documents
from dflash_hf.planning import (
    GPU_TFLOPS,
    REACHED_SHARE,
    TARGET_EFFICIENCY,
    check_copy,
    check_memory,
    check_upload,
    make_plan,
)
from dflash_hf.topology import planned_placements


QWEN36 = Path(__file__).resolve().parents[1] / "recipes" / "qwen3.6-27b"


def plan_for(gpus: int, gigabytes: float, tmp_path, layout="auto", vocab_size=1000, gpu=None, **arguments):
    """A plan of the Qwen3.6-27B recipe for GPUs that need not exist, and what makes it anew with other arguments."""
    target = read_target_config(str(QWEN36 / "target-config.json"))
    values = yaml.safe_load((QWEN36 / "config.yaml").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "layer_types")
    names += ("mask_token_id", "block_size", "sliding_window", "target_layer_ids")
    shape = {name: values[name] for name in names} | {"num_hidden_layers": 5, "use_sliding_window": True}
    config = DFlashDraftConfig.from_target_config(target, **shape)
    documents = synthetic_documents(16, 2048, vocab_size, 7)

    def replan(**changes):
        values = {"output_dir": str(tmp_path), "row_length": 8192, "use_cpu": True, **arguments, **changes}
        places = planned_placements(gpus, values.get("target_layout", layout))
        args = DFlashTrainingArguments(**values)
        return make_plan(target, config, args, places, documents, len(places), gpu, gigabytes * 1e9)

    return replan(), replan


def verdicts(plan) -> list[str]:
    return [need.verdict(plan.capacity) for need in plan.needs()]


def test_a_plan_of_a_pair_and_of_one_gpu(tmp_path):
    """62 layers of 23.6 billion weights, 47.2 GB in bf16, 52.3 GB with embedding and head, on 8,192 tokens."""
    pair, replan = plan_for(2, 96, tmp_path)
    assert pair.drafter_parameters == 1_730_213_120
    assert pair.target_seconds * pair.rate * TARGET_EFFICIENCY == pytest.approx(2 * 23_597_668_128 * 8192)
    assert pair.target_bytes / 1e9 == pytest.approx(56, abs=5)
    assert pair.step_seconds == max(pair.target_seconds, pair.drafter_seconds)
    shared, _ = plan_for(1, 141, tmp_path)
    assert shared.layout == "shared"
    assert shared.step_seconds == pytest.approx(pair.target_seconds + pair.drafter_seconds)
    assert replan(prefetch_depth=0).step_seconds == pytest.approx(shared.step_seconds)
    spread, _ = plan_for(3, 96, tmp_path, layout="spread")
    assert spread.target_bytes == pytest.approx(pair.target_bytes / 2)


@pytest.mark.parametrize(
    ("gpus", "gigabytes", "arguments", "expected"),
    [
        (4, 96, {}, ["fits", "fits"]),
        (2, 96, {}, ["fits", "fits"]),
        (1, 141, {}, ["fits"]),
        (4, 80, {}, ["fits", "fits"]),
        (4, 70, {}, ["fits", "may fit"]),
        (4, 64, {}, ["fits", "does not fit"]),
        (1, 112, {}, ["does not fit"]),
        (4, 48, {"activation_checkpointing": True, "max_anchors_per_row": 512}, ["does not fit", "fits"]),
    ],
)
def test_n1_each_device_fits_or_not(gpus, gigabytes, arguments, expected, tmp_path):
    """Weights are exact and have no margin; what is estimated has one."""
    plan, replan = plan_for(gpus, gigabytes, tmp_path, **arguments)
    assert verdicts(plan) == expected
    assert all(text in plan.report() for text in (*expected, f"{gigabytes} GB"))
    if "does not fit" in expected:
        with refused(ValueError, "does not fit", f"{gigabytes} GB", "--check_memory"):
            check_memory(plan, replan, gpus)
    else:
        check_memory(plan, replan, gpus)


def test_n1_only_remedies_that_act_are_named(tmp_path):
    plan, replan = plan_for(4, 48, tmp_path, activation_checkpointing=True, max_anchors_per_row=512)
    with refused(ValueError, "target device", "target_layout spread", "load_in_4bit"):
        check_memory(plan, replan, 4)
    plan, replan = plan_for(4, 64, tmp_path)
    with pytest.raises(ValueError, match="activation_checkpointing") as caught:
        check_memory(plan, replan, 4)
    assert "drafter device" in str(caught.value) and "max_anchors_per_row 1024" in str(caught.value)
    assert "target_layout" not in str(caught.value) and "num_anchors" not in str(caught.value)
    plan, replan = plan_for(4, 96, tmp_path, layout="shared")
    with refused(ValueError, "target_layout paired"):
        check_memory(plan, replan, 4)


def test_n2_the_rate_is_that_of_the_gpu_or_as_given(tmp_path):
    default, named, given = (plan_for(4, 96, tmp_path, gpu=gpu)[0] for gpu in (None, "A100", "400"))
    assert "H200" in default.rate_source and "--gpu" in default.rate_source
    assert named.rate == pytest.approx(GPU_TFLOPS["A100"] * REACHED_SHARE * 1e12) and given.rate == 400e12
    assert given.total_hours * 400e12 == pytest.approx(named.total_hours * named.rate)
    with refused(ValueError, "V1000", "A100"):
        plan_for(4, 96, tmp_path, gpu="V1000")


def test_n2_the_plan_says_hours_disk_memory_and_the_drafter(tmp_path):
    plan, replan = plan_for(4, 96, tmp_path, num_train_epochs=3, save_steps=1)
    assert plan.total_hours == pytest.approx(plan.total_steps * plan.step_seconds / 3600)
    # A checkpoint holds fp32 weights and AdamW's two moments; the finished drafter stays beside them.
    assert plan.disk_bytes == (plan.total_steps + 1) * 12 * plan.drafter_parameters
    limited = replan(save_total_limit=1, num_train_epochs=9)
    assert limited.disk_bytes == 3 * 12 * plan.drafter_parameters
    for text in ("1.73B", "32/8 heads of 128", "[1, 16, 31, 46, 61]", "248070", "disk", "host memory"):
        assert text in plan.report()


def test_a_quantised_target_fits_beside_the_drafter(tmp_path):
    quantised = {"dtype": "bfloat16", "quantization_config": {"load_in_4bit": True}}
    plan, _ = plan_for(1, 96, tmp_path, target_model_init_kwargs=quantised, max_anchors_per_row=1024)
    assert plan.target_bytes / 1e9 == pytest.approx(22, abs=3) and verdicts(plan) == ["fits"]


def test_tokens_that_the_target_does_not_know_are_refused(tmp_path):
    with refused(ValueError, "248320"):
        plan_for(2, 96, tmp_path, vocab_size=300_000)


def test_the_shape_of_the_shipped_target_is_that_of_qwen36():
    config = read_target_config(str(QWEN36 / "target-config.json"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == 26_895_998_464
    assert config.layer_types[:4] == ["linear_attention"] * 3 + ["full_attention"]


def test_a_copy_that_changes_bytes_is_found(monkeypatch):
    check_copy(torch.device("cpu"), torch.device("cpu"), "peer", num_bytes=2**12)

    def corrupted(self, features):
        features.states[17] ^= 1
        return features.states

    monkeypatch.setattr("dflash_hf.planning.FeatureTransfer.receive", corrupted)
    with refused(RuntimeError, "feature_copies=host", "NCCL_P2P_DISABLE=1"):
        check_copy(torch.device("cpu"), torch.device("cpu"), "peer", num_bytes=2**12)


def test_an_upload_that_fails_names_the_address(tmp_path):
    args = SimpleNamespace(process_index=0, output_dir=str(tmp_path), push_to_hub=False)
    check_upload(args, "memory://bucket/run")
    (tmp_path / "file").write_text("")
    # Without an address, where checkpoints will be copied to is tried.
    args.remote_checkpoint_dir = f"{tmp_path}/file"
    for address in (None, f"{tmp_path}/file"):
        with refused(RuntimeError, f"{tmp_path}/file"):
            check_upload(args, address)
