# SPDX-License-Identifier: Apache-2.0
"""What the start of a run says of its time, and where tuned kernels are kept for the next one."""

import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch
from runs import BLOCK_SIZE, make_trainer
from tiny import MASK_TOKEN_ID, dense_target, hybrid_target
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf import frozen_target as startup_times
from dflash_hf.frozen_target import STAGES, FrozenTarget, StartupTimes, keep_tuned_kernels, random_target
from dflash_hf.publishing import FACTS_NAME
from dflash_hf.resuming import RECORD_NAME


CPU = torch.device("cpu")


@pytest.fixture
def triton_home(tmp_path, monkeypatch):
    # Set first, so that what the code sets is taken back.
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    return tmp_path


def test_kernels_tuned_for_any_device_and_by_any_library_lie_in_one_folder(triton_home):
    """Without it inductor chooses a folder by the device, and only in processes that compile a kernel themselves."""
    assert triton_cache_dir(0) != triton_cache_dir(1)
    folder = keep_tuned_kernels()
    assert folder == triton_home / ".triton" / "cache" and folder.is_dir()
    assert {triton_cache_dir(0), triton_cache_dir(1), os.environ["TRITON_CACHE_DIR"]} == {str(folder)}
    assert keep_tuned_kernels() == folder


def test_the_users_own_folder_of_kernels_stays(triton_home, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/some/where")
    assert keep_tuned_kernels() == Path("/some/where") and os.environ["TRITON_CACHE_DIR"] == "/some/where"
    assert not (triton_home / ".triton").exists()


def test_a_home_that_cannot_be_written_is_told_of_and_left_alone(triton_home, caplog):
    (triton_home / ".triton").write_text("a file")
    assert keep_tuned_kernels() is None and "TRITON_CACHE_DIR" not in os.environ
    (record,) = caplog.records
    assert "cannot be written" in record.message and "Set TRITON_CACHE_DIR to a folder" in record.message


@pytest.mark.parametrize(("make", "tunes"), [(hybrid_target, True), (dense_target, False)])
def test_only_a_target_that_tunes_kernels_settles_their_folder_and_says_so(make, tunes, triton_home, monkeypatch):
    monkeypatch.setattr(FrozenTarget, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(StartupTimes, "end", lambda self, stage, device: None)
    target = FrozenTarget(make(), [1, 4], compile_target=True, allow_slow_target=True)
    assert ("TRITON_CACHE_DIR" in os.environ) == tunes
    notice = target.tuning_notice()
    if not tunes:
        assert notice is None
        return
    assert notice and f"once per machine (kept in {triton_home / '.triton' / 'cache'})" in notice
    # Nobody waits for it a second time.
    target._unchecked = None
    assert target.tuning_notice() is None


def test_a_stage_is_measured_once_and_without_those_within_it():
    times = StartupTimes()
    for _ in range(2):
        times.begin("check_target")
        time.sleep(0.02)
        times.begin("tune_target")
        time.sleep(0.2)
        times.end("tune_target", CPU)
        times.end("check_target", CPU)
    times.end("first_batch", CPU)
    assert list(times.rounded()) == ["tune_target", "check_target"]
    assert 0.2 <= times.seconds["tune_target"] < 0.4
    assert 0.02 <= times.seconds["check_target"] < 0.2


def packed_trainer(folder, **overrides):
    """A trainer of a tiny drafter beside a hybrid target whose documents share rows, after its check."""
    model = hybrid_target()
    config = DFlashDraftConfig.from_target_config(
        model.config, num_hidden_layers=2, num_taps=2, mask_token_id=MASK_TOKEN_ID, block_size=BLOCK_SIZE
    )
    target = FrozenTarget(model, config.target_layer_ids, packed=True)
    overrides = {"max_steps": 2, "save_steps": 1, "gradient_accumulation_steps": 2, **overrides}
    return make_trainer(folder, target, drafter=DFlashDraftModel(config), **overrides)


def test_the_record_and_the_log_say_how_long_each_stage_of_the_start_took(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger=startup_times.__name__)
    start = time.perf_counter()
    trainer = packed_trainer(tmp_path)
    trainer.train()
    wall = time.perf_counter() - start
    seconds = json.loads((tmp_path / "checkpoint-1" / RECORD_NAME).read_text())["startup_seconds"]
    assert list(STAGES) == [stage for stage in STAGES if seconds[stage] >= 0] and len(seconds) == len(STAGES)
    assert 0 < sum(seconds.values()) < wall
    assert seconds["tune_target"] > 0 and seconds["check_target"] > 0 and seconds["first_drafter_step"] > 0
    assert json.loads((tmp_path / FACTS_NAME).read_text())["startup_seconds"] == seconds
    *stages, summary = [r for r in caplog.records if r.name == startup_times.__name__]
    assert len(stages) == len(STAGES) and all(r.message.startswith("Start-up: ") for r in stages)
    assert summary.levelno == logging.INFO and all(name in summary.message for name in STAGES.values())
    # A second training of the same trainer starts at once, and its checkpoints know how the first one started.
    caplog.clear()
    trainer.args.max_steps = 3
    trainer.train()
    assert not [r for r in caplog.records if r.name == startup_times.__name__]
    again = json.loads((tmp_path / "checkpoint-3" / RECORD_NAME).read_text())["startup_seconds"]
    assert again == seconds


def test_a_long_start_is_told_of_before_and_after_without_asking(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(startup_times, "LONG_SECONDS", 0)
    monkeypatch.setattr(FrozenTarget, "tuning_notice", lambda self: "This takes a minute.")
    packed_trainer(tmp_path, max_steps=1, save_strategy="no").train()
    notice, summary = [r.message for r in caplog.records if r.name == startup_times.__name__ and r.levelno > 20]
    assert notice == "This takes a minute." and summary.startswith("The start took ")


def test_making_random_weights_counts_as_loading(monkeypatch):
    def slow(config, dtype):
        time.sleep(0.2)
        return hybrid_target()

    monkeypatch.setattr("dflash_hf.frozen_target.AutoModelForCausalLM.from_config", slow)
    target = random_target(hybrid_target().config, [1, 4], "cpu")
    assert 0.2 <= target.startup.seconds["load_target"] < 2


def test_a_stage_that_another_thread_goes_on_with_takes_no_seconds_from_the_next(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 3.0, 5.0, 6.0])
    monkeypatch.setattr(startup_times, "perf_counter", lambda: next(clock))
    times, cpu = StartupTimes(), torch.device("cpu")
    times.begin("first_batch")
    times.begin("first_target_forward")
    times.end("first_batch", cpu)
    times.begin("first_drafter_step")
    times.end("first_target_forward", cpu)
    times.end("first_drafter_step", cpu)
    assert times.seconds == {"first_batch": 3.0, "first_target_forward": 4.0, "first_drafter_step": 3.0}
