# SPDX-License-Identifier: Apache-2.0
"""What the log says about the time of a step, and the sentence about what limits it."""

import time

import pytest
import torch

from dflash_hf.prefetch import Features, Span, Throughput


CPU, OTHER = torch.device("cpu"), torch.device("meta")


def span(seconds: float) -> Span:
    measured = Span(CPU)
    measured.mark()
    measured.mark()
    measured._points[1] = measured._points[0] + seconds
    return measured


def train(throughput: Throughput, target: float, drafter: float, steps: int = 3, accumulation: int = 1, alone=False):
    for _ in range(steps):
        for micro_batch in range(accumulation):
            throughput.waiting(num_tokens=100, num_anchors=7)
            throughput.received(Features(torch.zeros(1), target_span=span(target), copy_spans=[span(0.5)]), alone)
            time.sleep(drafter)
            throughput.trained(step_is_over=micro_batch == accumulation - 1)


def test_figures_are_means_per_optimizer_step_and_rates_of_all_ranks():
    throughput = Throughput(CPU, [OTHER], world_size=2)
    train(throughput, target=0.25, drafter=0.01, steps=3, accumulation=2)
    figures = throughput.metrics()
    assert figures["target_seconds"] == pytest.approx(0.5)
    assert figures["copy_seconds"] == pytest.approx(1.0)
    assert 0.02 <= figures["drafter_seconds"] <= figures["step_seconds"] < 1
    assert figures["tokens_per_second"] == pytest.approx(2 * 200 / figures["step_seconds"])
    assert figures["anchors_per_second"] == pytest.approx(2 * 14 / figures["step_seconds"])
    assert figures["in_turn"] == 0 and "target_seconds_alone" not in figures
    train(throughput, target=0.125, drafter=0.0, steps=1)
    assert throughput.metrics()["target_seconds"] == pytest.approx(0.125)


def test_what_a_device_has_not_reached_counts_in_the_next_log():
    throughput = Throughput(CPU, [OTHER])
    late = span(0.25)
    end = late._points.pop()
    throughput.waiting(1, 1)
    throughput.received(Features(torch.zeros(1), target_span=late), alone=False)
    throughput.trained(step_is_over=True)
    assert throughput.metrics()["target_seconds"] == 0
    late._points.append(end)
    assert throughput.metrics()["target_seconds"] == pytest.approx(0.25)


def test_halves_measured_alone_are_medians():
    throughput = Throughput(CPU, [OTHER])
    for seconds in (9.0, 0.25, 0.25):
        train(throughput, seconds, 0.0, steps=1, alone=True)
    figures = throughput.metrics()
    assert figures["target_seconds_alone"] == pytest.approx(0.25) and figures["in_turn"] == 1


@pytest.mark.parametrize(
    ("target", "drafter", "target_device", "depth", "said"),
    [
        (1.0, 0.0, OTHER, 2, "The target limits the step"),
        (0.0, 0.02, OTHER, 2, "The drafter limits the step"),
        (1.0, 0.0, CPU, 2, "share the CPU"),
        (1.0, 0.0, OTHER, 0, "set prefetch_depth to 2"),
    ],
)
def test_one_sentence_says_what_limits_and_what_to_change(target, drafter, target_device, depth, said):
    throughput = Throughput(CPU, [target_device])
    assert throughput.advice(depth) is None
    train(throughput, target, drafter)
    throughput.metrics()
    assert said in throughput.advice(depth)
