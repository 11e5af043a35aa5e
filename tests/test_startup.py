# SPDX-License-Identifier: Apache-2.0
"""Where tuned kernels are kept for the next run, and what is said before they are tuned."""

import os
from pathlib import Path

import pytest
import torch
from tiny import dense_target, hybrid_target
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from dflash_hf.frozen_target import FrozenTarget, keep_tuned_kernels


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


@pytest.mark.parametrize("is_there", [False, True])
def test_a_home_that_cannot_be_written_is_told_of_and_left_alone(is_there, triton_home, caplog, monkeypatch):
    if is_there:
        (triton_home / ".triton" / "cache").mkdir(parents=True)
        # As for another user, which the superuser's own rights would hide.
        monkeypatch.setattr("os.access", lambda path, mode: False)
    else:
        (triton_home / ".triton").write_text("a file")
    assert keep_tuned_kernels() is None and "TRITON_CACHE_DIR" not in os.environ
    (record,) = caplog.records
    assert "cannot be written" in record.message and "Set TRITON_CACHE_DIR to a folder" in record.message


@pytest.mark.parametrize(("make", "tunes"), [(hybrid_target, True), (dense_target, False)])
def test_only_a_target_that_tunes_kernels_settles_their_folder_and_says_so(make, tunes, triton_home, monkeypatch):
    monkeypatch.setattr(FrozenTarget, "device", property(lambda self: torch.device("cuda")))
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
