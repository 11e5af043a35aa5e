# SPDX-License-Identifier: Apache-2.0
"""Which devices each rank gets: never one twice, and an error that says what fits where the counts do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import refused

from dflash_hf.topology import LAYOUTS, check_world_size, local_world_size, place, planned_placements


@pytest.mark.parametrize(
    ("rank", "ranks", "num_visible", "layout", "drafter", "target"),
    [
        (3, 4, 8, "paired", 3, [7]),
        (1, 2, 4, "auto", 1, [3]),
        (1, 2, 2, "auto", 1, [1]),
        (0, 1, 2, "auto", 0, [1]),
        (0, 1, 2, "shared", 0, [0]),
        (1, 2, 6, "spread", 1, [4, 5]),
        (0, 1, 4, "spread", 0, [1, 2, 3]),
    ],
)
def test_d4_devices_of_a_rank(rank, ranks, num_visible, layout, drafter, target):
    placement = place(rank, ranks, num_visible, layout)
    assert placement.drafter.index == drafter and [device.index for device in placement.target] == target


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((0, 2, 3, "auto"), ("2 processes", "3 GPUs", "--num_processes 1")),
        ((0, 2, 3, "paired"), ("2 processes", "3 GPUs", "--num_processes 1")),
        ((0, 2, 5, "spread"), ("3 GPUs", "4 of the 5", "CUDA_VISIBLE_DEVICES")),
        ((2, 2, 4), ("rank 2",)),
        ((0, 1, 1, "split"), ("target_layout", "split", "spread")),
    ],
)
def test_d4_three_gpus_do_not_make_two_pairs(arguments, names):
    with refused(ValueError, *names):
        place(*arguments)


@pytest.mark.parametrize(
    ("num_gpus", "layout", "expected"),
    [
        (1, "auto", [("shared", 0, [0])]),
        (4, "paired", [("paired", 0, [2]), ("paired", 1, [3])]),
        (3, "spread", [("spread", 0, [1, 2])]),
        (2, "shared", [("shared", 0, [0]), ("shared", 1, [1])]),
    ],
)
def test_a_machine_that_is_not_here_is_planned(num_gpus, layout, expected):
    planned = planned_placements(num_gpus, layout)
    assert [(p.layout, p.drafter.index, [d.index for d in p.target]) for p in planned] == expected


@given(local_world_size=st.integers(1, 16), num_visible=st.integers(0, 16), layout=st.sampled_from(LAYOUTS))
def test_every_count_gives_disjoint_devices_or_an_error(local_world_size, num_visible, layout):
    try:
        placements = [place(rank, local_world_size, num_visible, layout) for rank in range(local_world_size)]
    except ValueError:
        fits = {
            "shared": num_visible >= local_world_size,
            "paired": num_visible >= 2 * local_world_size,
            "spread": num_visible >= 2 * local_world_size and num_visible % local_world_size == 0,
            "auto": num_visible == local_world_size or num_visible >= 2 * local_world_size,
        }
        assert num_visible > 0 and not fits[layout]
        return
    if num_visible == 0:
        assert all(p.layout == "cpu" and p.target == (torch.device("cpu"),) for p in placements)
        return
    drafters = [p.drafter.index for p in placements]
    targets = [device.index for p in placements for device in p.target]
    assert drafters == list(range(local_world_size))  # where accelerate puts them
    assert len(set(targets)) == len(targets) and all(0 <= index < num_visible for index in targets)
    if placements[0].layout == "shared":
        assert targets == drafters
    else:
        assert not set(targets) & set(drafters)
    assert placements[0].layout != "spread" or len({*drafters, *targets}) == num_visible


def test_two_silent_single_runs_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused(ValueError, 2, 1, "--use_cpu"):
        check_world_size(1)
    check_world_size(2)


def test_d4_the_rank_on_the_machine_counts(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_world_size(8) == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert local_world_size(2) == 2
