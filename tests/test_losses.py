# SPDX-License-Identifier: Apache-2.0
"""The loss through the frozen head against its unoptimised twin, in values, gradients and counted sums."""

import math

import pytest
import torch
from naive import naive_dpace_sums, naive_loss, naive_metrics, naive_sums
from torch import nn

from dflash_hf import losses
from dflash_hf.losses import (
    BlockSums,
    DecayedCrossEntropy,
    DPace,
    default_gamma,
    frozen_head_loss,
    make_objective,
)


HIDDEN, VOCAB = 16, 23
OBJECTIVES = {
    "gamma_2": DecayedCrossEntropy(2.0),
    "gamma_7": DecayedCrossEntropy(7.0),
    "gamma_0.5": DecayedCrossEntropy(0.5),
    "dpace_0": DPace(0.0),
    "dpace_0.5": DPace(0.5),
    "dpace_1": DPace(1.0),
}


class OnAccelerator(str):
    """The name of the CPU, where tensors are made, with the type of another device, which the code branches on."""

    type = "cuda"


class AcceleratorLabels(torch.Tensor):
    """Labels that say they are not on the CPU, so that the branch for accelerators runs without one."""

    device = OnAccelerator("cpu")


def frozen_head(dtype=torch.float32, seed=1) -> nn.Linear:
    torch.manual_seed(seed)
    head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    # Large logits: a drafter that is sure of some tokens has probabilities near 0 and 1.
    head.weight.mul_(8.0)
    return head.to(dtype)


def ragged_labels(rows=2, anchors=9, block_size=5, seed=0) -> torch.Tensor:
    """Labels [B, N, b] whose chains have every length from 0 to b-1, in no order; unused blocks among them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCAB, (rows, anchors, block_size), generator=generator)
    lengths = torch.arange(rows * anchors)[torch.randperm(rows * anchors, generator=generator)] % block_size
    slots = torch.arange(block_size)
    counts = (slots > 0) & (slots <= lengths.view(rows, anchors, 1))
    return labels.masked_fill(~counts, -100)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """The stand-in for a device's labels cannot be compiled; tests/test_gpu.py runs the compiled branch."""
    monkeypatch.setattr(losses, "_compiled_slot_terms", lambda terms: terms)


def hidden_like(labels: torch.Tensor, dtype=torch.float32, seed=2) -> torch.Tensor:
    rows, anchors, block_size = labels.shape
    hidden = torch.randn(rows, anchors * block_size, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return hidden.to(dtype).requires_grad_()


def naive_sum(hidden, labels, weight, objective) -> tuple[torch.Tensor, float]:
    """The twin's weighted sum and normaliser for either objective."""
    if isinstance(objective, DPace):
        return naive_dpace_sums(hidden, labels, weight, objective.alpha)[:2]
    return naive_sums(hidden, labels, weight, objective.gamma)


def run(labels, objective, head=None, hidden=None, chunk_blocks=None):
    """Loss, sums and gradient of fresh hidden states."""
    head = frozen_head() if head is None else head
    hidden = hidden_like(labels) if hidden is None else hidden
    loss, sums = frozen_head_loss(hidden, labels, head, objective, VOCAB, chunk_blocks)
    loss.backward()
    loss, values, gradient = (t.detach().as_subclass(torch.Tensor) for t in (loss, sums.values, hidden.grad))
    return loss, BlockSums(values), gradient


@pytest.mark.parametrize("chunk_blocks", [1, 7, None])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_p4_chunked_loss_equals_the_naive_twin(name, chunk_blocks):
    labels, head, objective = ragged_labels(), frozen_head(), OBJECTIVES[name]
    expected_hidden = hidden_like(labels)
    expected, normalizer = naive_sum(expected_hidden, labels, head.weight, objective)
    expected.backward()

    loss, sums, gradient = run(labels, objective, head, chunk_blocks=chunk_blocks)

    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_hidden.grad, rtol=1e-5, atol=1e-5)
    assert objective.normalizer(labels[..., 1:] != -100).item() == pytest.approx(normalizer, rel=1e-6)
    assert sums.metrics()["loss"] == pytest.approx(expected.item() / normalizer, rel=1e-5)


@pytest.mark.parametrize("chunk_blocks", [1, 7, None])
@pytest.mark.parametrize("name", ["gamma_2", "dpace_0.5"])
@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32])
def test_p4_s1_bf16_head_and_hidden(hidden_dtype, accelerator, name, chunk_blocks):
    """The head multiplies in bf16; what follows its logits is fp32, and only the gradient is rounded again."""
    labels, objective = ragged_labels(), OBJECTIVES[name]
    head = frozen_head(torch.bfloat16)

    def rounding_head(states):
        # Summed in float64, so that one rounding to bf16 is left, which is the same for all shapes on all CPUs.
        return nn.functional.linear(states.to(torch.bfloat16).double(), head.weight.double()).to(torch.bfloat16)

    hidden = hidden_like(labels, hidden_dtype)
    # The twin multiplies by the identity what the head has multiplied already.
    logits = rounding_head(hidden.detach()).float().requires_grad_()
    expected, _ = naive_sum(logits, labels, torch.eye(VOCAB), objective)
    expected.backward()
    expected_gradient = logits.grad @ head.weight.float()

    kind = AcceleratorLabels if accelerator else torch.Tensor
    loss, _, gradient = run(
        labels.as_subclass(kind), objective, rounding_head, hidden=hidden, chunk_blocks=chunk_blocks
    )

    assert loss.dtype == torch.float32 and gradient.dtype == hidden_dtype
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    scale = expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient.float(), expected_gradient, rtol=2e-2, atol=1e-2 * scale)


@pytest.mark.parametrize("chunk_blocks", [1, 7, None])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_accelerator_branch_equals_the_cpu_branch(name, chunk_blocks):
    """On an accelerator chunks are filled up to one size, so that kernels are compiled once."""
    labels = ragged_labels()
    loss, sums, gradient = run(labels, OBJECTIVES[name], chunk_blocks=chunk_blocks)
    seen = []

    def head(states):
        seen.append(states.shape)
        return frozen_head()(states)

    fast = run(labels.as_subclass(AcceleratorLabels), OBJECTIVES[name], head, chunk_blocks=chunk_blocks)

    blocks = chunk_blocks or labels.shape[0] * labels.shape[1]
    assert {shape[0] for shape in seen} == {blocks * 4}
    # No chunk but the last could have held the next block too.
    assert (len(seen) - 1) * (blocks * 4 - 3) <= (labels[..., 1:] != -100).sum()
    torch.testing.assert_close(fast[0], loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fast[1].values, sums.values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fast[2], gradient, rtol=1e-5, atol=1e-5)


def test_only_counted_slots_meet_the_head_on_cpu():
    labels, seen = ragged_labels(), []

    def head(states):
        seen.append(states.shape[0])
        return frozen_head()(states)

    run(labels, DecayedCrossEntropy(4), head, chunk_blocks=7)
    assert sum(seen) == (labels != -100).sum()


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_l2_nothing_counts_gives_exactly_zero(name, accelerator):
    labels = torch.full((2, 3, 4), -100)
    kind = AcceleratorLabels if accelerator else torch.Tensor
    loss, sums, gradient = run(labels.as_subclass(kind), OBJECTIVES[name], chunk_blocks=2)
    assert loss.item() == 0.0
    assert gradient is not None and torch.equal(gradient, torch.zeros_like(gradient))
    metrics = sums.metrics()
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["loss"] == 0.0


def test_l2_zero_loss_reaches_the_parameters_behind_it():
    """DistributedDataParallel waits for a gradient of every parameter, also on a rank with nothing to learn from."""
    layer = nn.Linear(HIDDEN, HIDDEN)
    loss, _ = frozen_head_loss(
        layer(torch.randn(1, 8, HIDDEN)), torch.full((1, 2, 4), -100), frozen_head(), DPace(), VOCAB
    )
    loss.backward()
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_slot_0_and_uncounted_slots_get_exactly_zero_gradient(name):
    labels = ragged_labels()
    _, _, gradient = run(labels, OBJECTIVES[name])
    gradient = gradient.view(*labels.shape, HIDDEN)
    counted = labels != -100
    assert torch.equal(gradient[~counted], torch.zeros_like(gradient[~counted]))
    assert (gradient[counted].abs().sum(-1) > 0).all()


def test_a_label_in_slot_0_is_never_learned():
    labels = ragged_labels()
    expected = run(labels, DecayedCrossEntropy(4))
    labels[..., 0] = 3
    loss, sums, gradient = run(labels, DecayedCrossEntropy(4))
    assert torch.equal(loss, expected[0]) and torch.equal(gradient, expected[2])
    assert torch.equal(sums.values, expected[1].values)


def test_the_head_gets_no_gradient_and_keeps_its_weights():
    head, labels = frozen_head(), ragged_labels()
    head.requires_grad_(True)
    before = head.weight.detach().clone()
    run(labels, DPace(), head)
    assert head.weight.grad is None and torch.equal(head.weight, before)


def reachable_tensors(loss: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor that the autograd graph behind a loss keeps."""
    tensors, pending, seen = [], [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved") or name == "saved_tensors":
                saved = getattr(node, name)
                tensors += [t for t in (saved if isinstance(saved, tuple) else [saved]) if torch.is_tensor(t)]
        pending += [parent for parent, _ in node.next_functions]
    return tensors


@pytest.mark.parametrize("accelerator", [False, True])
def test_p4_no_logits_are_kept_for_the_backward(accelerator):
    labels = ragged_labels().as_subclass(AcceleratorLabels if accelerator else torch.Tensor)
    packed, sizes = [], []
    head = frozen_head()

    def counting_head(states):
        logits = head(states)
        sizes.append(logits.numel())
        return logits

    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        layer = nn.Linear(HIDDEN, HIDDEN)
        hidden = layer(hidden_like(labels))
        packed.clear()
        loss, _ = frozen_head_loss(hidden, labels, counting_head, DecayedCrossEntropy(4), VOCAB, chunk_blocks=3)
    kept = reachable_tensors(loss)
    assert any(t.shape[-1:] == (HIDDEN,) for t in kept), "the walk over the graph finds what is kept"
    assert not [t.shape for t in kept if VOCAB in t.shape]
    # Each chunk's own small graph is gone once its gradient is taken: no more than 3 blocks of 4 slots at a time.
    assert max(sizes) <= 3 * 4 * VOCAB


def test_p4_default_chunks_bound_the_logits(monkeypatch):
    monkeypatch.setattr("dflash_hf.losses.DEVICE_CHUNK_LOGITS", 2 * 4 * VOCAB)
    labels, sizes, head = ragged_labels(), [], frozen_head()

    def counting_head(states):
        sizes.append(math.prod(states.shape[:-1]))
        return head(states)

    loss, _, gradient = run(labels.as_subclass(AcceleratorLabels), DPace(), counting_head)
    assert set(sizes) == {2 * 4} and len(sizes) < 9
    expected = run(labels, DPace(), chunk_blocks=10_000)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradient, expected[2])
    # A vocabulary larger than the bound still goes block by block, since the objective needs whole blocks.
    monkeypatch.setattr("dflash_hf.losses.DEVICE_CHUNK_LOGITS", 1)
    sizes.clear()
    run(labels.as_subclass(AcceleratorLabels), DPace(), counting_head)
    assert set(sizes) == {4} and len(sizes) >= (labels[..., 1:] != -100).sum() / 4


def test_the_gradient_scales_with_what_follows():
    """Normalisation happens outside, on the whole optimizer step."""
    labels = ragged_labels()
    _, _, gradient = run(labels, DPace())
    hidden = hidden_like(labels)
    loss, _ = frozen_head_loss(hidden, labels, frozen_head(), DPace(), VOCAB)
    (loss * 3 / 7).backward()
    torch.testing.assert_close(hidden.grad, gradient * 3 / 7)


def test_parts_of_a_batch_add_up_to_the_whole():
    labels, objective = ragged_labels(), DecayedCrossEntropy(2)
    loss, sums, gradient = run(labels, objective)
    halves = [
        run(labels[i : i + 1], objective, hidden=hidden_like(labels)[i : i + 1].detach().requires_grad_())
        for i in range(2)
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], loss)
    torch.testing.assert_close(torch.cat([halves[0][2], halves[1][2]]), gradient)
    total = BlockSums.zeros(5)
    for half in halves:
        total.add(half[1])
    torch.testing.assert_close(total.values, sums.values)


def test_evaluation_needs_no_gradient():
    labels = ragged_labels()
    expected, sums, _ = run(labels, DPace())
    with torch.no_grad():
        loss, evaluated = frozen_head_loss(hidden_like(labels), labels, frozen_head(), DPace(), VOCAB)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(evaluated.values, sums.values)


def sums_of(hits: list[list[int]], labels_count: list[int], block_size: int) -> BlockSums:
    """Sums over blocks whose drafts are right where `hits` is 1 and whose first `labels_count` slots count."""
    head = nn.Linear(VOCAB, VOCAB, bias=False).requires_grad_(False)
    head.weight.copy_(10 * torch.eye(VOCAB))
    labels = torch.full((1, len(hits), block_size), -100)
    hidden = torch.zeros(1, len(hits), block_size, VOCAB)
    for n, (pattern, count) in enumerate(zip(hits, labels_count, strict=True)):
        for k, hit in enumerate(pattern, start=1):
            if k <= count:
                labels[0, n, k] = k
            hidden[0, n, k, k if hit else k + 5] = 1.0
    _, sums = frozen_head_loss(hidden.flatten(1, 2), labels, head, DecayedCrossEntropy(4), VOCAB)
    return sums


@pytest.mark.parametrize(
    ("hits", "committed"),
    [([1, 1, 0, 1], 3), ([0, 0, 0, 0], 1), ([1, 1, 1, 1], 5), ([0, 1, 1, 1], 1), ([1, 0, 1, 1], 2)],
)
def test_e4_committed_are_accepted_plus_the_bonus(hits, committed):
    metrics = sums_of([hits], [4], block_size=5).metrics()
    assert metrics["acceptance_length"] == committed
    assert metrics["full_blocks"] == 1.0
    assert [metrics[f"accuracy_slot_{k}"] for k in range(1, 5)] == hits
    assert metrics["accuracy"] == sum(hits) / 4


def test_e4_sums_of_hand_made_blocks():
    """Blocks: full with pattern 1 1 0 1; full and all right; two slots count, both right; unused."""
    sums = sums_of([[1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], [4, 4, 2, 0], block_size=5)
    _, normalizer, blocks, committed, full, committed_full = sums.values[:6].tolist()
    decay = [math.exp(-k / 4) for k in range(4)]
    assert normalizer == pytest.approx(2 * sum(decay) + sum(decay[:2]))
    # The block cut after two slots commits two tokens: the answer ends there, so there is no bonus token.
    assert (blocks, committed, full, committed_full) == (3, 3 + 5 + 2, 2, 3 + 5)
    assert sums.values[6:].tolist() == [3, 3, 2, 2, 3, 3, 1, 2]
    metrics = sums.metrics()
    # Pooled over the blocks that are full: (3 + 5) / 2, not over all three.
    assert metrics["acceptance_length"] == 4.0
    assert metrics["full_blocks"] == pytest.approx(2 / 3)
    assert metrics["accuracy"] == pytest.approx(9 / 10)


def test_e4_cut_blocks_count_only_where_none_is_full():
    assert sums_of([[1, 1], [0, 1]], [2, 2], block_size=5).metrics()["acceptance_length"] == (2 + 1) / 2
    assert sums_of([[1, 0]], [2], block_size=5).metrics()["acceptance_length"] == 2.0
    assert BlockSums.zeros(5).metrics()["acceptance_length"] == 0.0


def test_sums_agree_with_the_naive_counts():
    labels, head = ragged_labels(), frozen_head()
    hidden = hidden_like(labels).detach()
    # Right answers in half of the slots, since a random drafter has almost none.
    right = torch.rand(labels.shape, generator=torch.Generator().manual_seed(3)) < 0.6
    answers = head.weight[labels.clamp(min=0)]
    hidden = torch.where(right[..., None], answers, hidden.view(*labels.shape, HIDDEN)).flatten(1, 2)
    expected = naive_metrics(hidden, labels, head.weight)
    _, sums = frozen_head_loss(hidden, labels, head, DPace(), VOCAB, chunk_blocks=4)
    values = sums.values.tolist()
    assert values[2] == expected["anchors"]
    assert values[6:10] == expected["slot_counted"][1:]
    assert values[10:] == expected["slot_correct"][1:]
    assert sums.metrics()["accuracy"] == pytest.approx(sum(expected["slot_correct"]) / expected["counted"])


def test_naive_loss_is_the_ratio_of_the_sums():
    labels, head = ragged_labels(), frozen_head()
    _, sums, _ = run(labels, DecayedCrossEntropy(4), head)
    expected = naive_loss(hidden_like(labels), labels, head.weight, gamma=4)
    assert sums.metrics()["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_default_gammas_are_the_papers():
    assert [default_gamma(b) for b in (16, 10, 8)] == [7, 5, 4]
    assert default_gamma(32) == 7 and default_gamma(4) == 2
    assert make_objective("cross_entropy", 16) == DecayedCrossEntropy(7)
    assert make_objective("cross_entropy", 10) == DecayedCrossEntropy(5)
    assert make_objective("cross_entropy", 16, gamma=3.5) == DecayedCrossEntropy(3.5)
    assert make_objective("dpace", 16) == DPace(0.5)
    assert make_objective("dpace", 16, alpha=0.0) == DPace(0.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": "mse"}, "mse"),
        ({"name": "cross_entropy", "gamma": 0.0}, "loss_gamma=0.0"),
        ({"name": "cross_entropy", "gamma": -1.0}, "loss_gamma=-1.0"),
        ({"name": "cross_entropy", "gamma": float("nan")}, "loss_gamma=nan"),
        ({"name": "dpace", "alpha": -0.1}, "dpace_alpha=-0.1"),
        ({"name": "dpace", "alpha": 1.5}, "dpace_alpha=1.5"),
        ({"name": "dpace", "alpha": float("nan")}, "dpace_alpha=nan"),
    ],
)
def test_make_objective_refuses(arguments, named):
    with pytest.raises(ValueError, match=named):
        make_objective(block_size=8, **arguments)
