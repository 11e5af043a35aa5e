# SPDX-License-Identifier: Apache-2.0
"""The loss through the frozen head against its naive twins, in values, gradients and counted sums; objectives."""

import math

import pytest
import tiny
import torch
from naive import naive_distilled_sum, naive_dpace_sums, naive_metrics, naive_sums
from tiny import refused
from torch import nn

from dflash_hf import FrozenTarget, PackedDataset, losses
from dflash_hf.data_collator import DataCollatorForDFlash
from dflash_hf.losses import (
    OBJECTIVES,
    BlockSums,
    DecayedCrossEntropy,
    DPace,
    SlotTerms,
    TargetStates,
    default_gamma,
    frozen_head_loss,
    make_objective,
    running_products,
)


HIDDEN, VOCAB = 16, 23
PLAIN = {
    "gamma_2": DecayedCrossEntropy(2.0),
    "gamma_0.5": DecayedCrossEntropy(0.5),
    "dpace_0": DPace(0.0),
    "dpace_0.5": DPace(0.5),
    "dpace_1": DPace(1.0),
}
COMPARING = OBJECTIVES[2:]


class OnAccelerator(str):
    """The name of the CPU, where tensors are made, with the type of another device, which the code branches on."""

    type = "cuda"


class AcceleratorLabels(torch.Tensor):
    """Labels that say they are not on the CPU, so that the branch for accelerators runs without one."""

    device = OnAccelerator("cpu")


KINDS = pytest.mark.parametrize("kind", [torch.Tensor, AcceleratorLabels], ids=["cpu", "accelerator"])


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
def uncompiled(request, monkeypatch):
    """The stand-in for a device's labels cannot be compiled; the GPU test runs the compiled branch."""
    if request.node.get_closest_marker("gpu") is None:
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
@pytest.mark.parametrize("name", PLAIN)
def test_p4_chunked_loss_equals_the_naive_twin(name, chunk_blocks):
    labels, head, objective = ragged_labels(), frozen_head(), PLAIN[name]
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
@KINDS
@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32])
def test_p4_s1_bf16_head_and_hidden(hidden_dtype, kind, name, chunk_blocks):
    """The head multiplies in bf16; what follows its logits is fp32, and only the gradient is rounded again."""
    labels, objective = ragged_labels(), PLAIN[name]
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

    loss, _, gradient = run(
        labels.as_subclass(kind), objective, rounding_head, hidden=hidden, chunk_blocks=chunk_blocks
    )

    assert loss.dtype == torch.float32 and gradient.dtype == hidden_dtype
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    scale = expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient.float(), expected_gradient, rtol=2e-2, atol=1e-2 * scale)


@pytest.mark.parametrize("chunk_blocks", [1, 7, None])
@pytest.mark.parametrize("name", PLAIN)
def test_accelerator_branch_equals_the_cpu_branch(name, chunk_blocks):
    """On an accelerator chunks are filled up to one size, so that kernels are compiled once."""
    labels = ragged_labels()
    loss, sums, gradient = run(labels, PLAIN[name], chunk_blocks=chunk_blocks)
    seen = []

    def head(states):
        seen.append(states.shape)
        return frozen_head()(states)

    fast = run(labels.as_subclass(AcceleratorLabels), PLAIN[name], head, chunk_blocks=chunk_blocks)

    blocks = chunk_blocks or labels.shape[0] * labels.shape[1]
    assert {shape[0] for shape in seen} == {blocks * 4}
    # No chunk but the last could have held the next block too.
    assert (len(seen) - 1) * (blocks * 4 - 3) <= (labels[..., 1:] != -100).sum()
    torch.testing.assert_close(fast[0], loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fast[1].values, sums.values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fast[2], gradient, rtol=1e-5, atol=1e-5)


@KINDS
@pytest.mark.parametrize("name", [*PLAIN, *COMPARING])
def test_l2_nothing_counts_gives_exactly_zero(name, kind):
    objective = PLAIN[name] if name in PLAIN else make_objective(name, BLOCK)
    hidden, labels, _, target = ragged_batch()
    nothing = torch.full_like(labels, -100).as_subclass(kind)
    loss, sums = frozen_head_loss(hidden, nothing, float64_head(), objective, FEW, 2, target=target)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(hidden.grad, torch.zeros_like(hidden))
    metrics = BlockSums(sums.values.detach().as_subclass(torch.Tensor)).metrics()
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


@pytest.mark.parametrize("name", PLAIN)
def test_slot_0_and_uncounted_slots_get_exactly_zero_gradient(name):
    labels, head = ragged_labels(), frozen_head().requires_grad_(True)
    loss, sums, gradient = run(labels, PLAIN[name], head)
    counted = labels != -100
    by_slot = gradient.view(*labels.shape, HIDDEN)
    assert torch.equal(by_slot[~counted], torch.zeros_like(by_slot[~counted]))
    assert (by_slot[counted].abs().sum(-1) > 0).all()
    assert head.weight.grad is None
    # A label in slot 0 is never learned.
    labels[..., 0] = 3
    again = run(labels, PLAIN[name], head)
    assert torch.equal(again[0], loss) and torch.equal(again[1].values, sums.values)
    assert torch.equal(again[2], gradient)


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


@KINDS
def test_p4_no_logits_are_kept_for_the_backward(kind):
    labels, head, sizes = ragged_labels().as_subclass(kind), frozen_head(), []

    def counting_head(states):
        logits = head(states)
        sizes.append(logits.numel())
        return logits

    hidden = nn.Linear(HIDDEN, HIDDEN)(hidden_like(labels))
    loss, _ = frozen_head_loss(hidden, labels, counting_head, DecayedCrossEntropy(4), VOCAB, chunk_blocks=3)
    kept = reachable_tensors(loss)
    assert any(t.shape[-1:] == (HIDDEN,) for t in kept), "the walk over the graph finds what is kept"
    assert not [t.shape for t in kept if VOCAB in t.shape]
    # Each chunk's own small graph is gone once its gradient is taken: no more than 3 blocks of 4 slots at a time.
    assert max(sizes) <= 3 * 4 * VOCAB


def test_p4_default_chunks_bound_the_logits(monkeypatch):
    labels, sizes, head = ragged_labels(), [], frozen_head()
    expected = run(labels, DPace(), chunk_blocks=10_000)

    def counting_head(states):
        sizes.append(math.prod(states.shape[:-1]))
        return head(states)

    # A vocabulary larger than the bound still goes block by block, since the objective needs whole blocks.
    for limit, blocks in ((2 * 4 * VOCAB, 2), (1, 1)):
        monkeypatch.setattr("dflash_hf.losses.DEVICE_CHUNK_LOGITS", limit)
        sizes.clear()
        loss, _, gradient = run(labels.as_subclass(AcceleratorLabels), DPace(), counting_head)
        assert set(sizes) == {4 * blocks} and len(sizes) >= (labels[..., 1:] != -100).sum() / (4 * blocks)
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(gradient, expected[2])


def test_the_gradient_scales_with_what_follows_and_parts_of_a_batch_add_up_to_the_whole():
    """Normalisation happens outside, on the whole optimizer step."""
    labels, objective = ragged_labels(), DecayedCrossEntropy(2)
    loss, sums, gradient = run(labels, objective)
    hidden = hidden_like(labels)
    (frozen_head_loss(hidden, labels, frozen_head(), objective, VOCAB)[0] * 3 / 7).backward()
    torch.testing.assert_close(hidden.grad, gradient * 3 / 7)
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
    # Evaluation needs no gradient.
    with torch.no_grad():
        evaluated, same = frozen_head_loss(hidden_like(labels), labels, frozen_head(), objective, VOCAB)
    assert not evaluated.requires_grad
    torch.testing.assert_close(evaluated, loss)
    torch.testing.assert_close(same.values, sums.values)


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
    assert values[2:6] == [expected[name] for name in ("anchors", "committed", "full", "committed_full")]
    assert values[6:10] == expected["slot_counted"][1:]
    assert values[10:14] == expected["slot_correct"][1:]
    assert sums.metrics()["accuracy"] == pytest.approx(sum(expected["slot_correct"]) / expected["counted"])


def test_default_gammas_are_the_papers_and_weights_follow_their_names():
    assert [default_gamma(b) for b in (16, 10, 8, 32, 4)] == [7, 5, 4, 7, 2]
    assert make_objective("cross_entropy", 10) == DecayedCrossEntropy(5)
    assert make_objective("cross_entropy", 16, gamma=3.5) == DecayedCrossEntropy(3.5)
    assert make_objective("dpace", 16) == DPace(0.5) and make_objective("dpace", 16, alpha=0.0) == DPace(0.0)
    assert make_objective("kl", 16).weighting == DPace(0.5)
    assert make_objective("kl", 16, slot_weights="decay").weighting == DecayedCrossEntropy(7)
    assert make_objective("lk", 16, alpha=0.2).weighting == DPace(0.2)
    with refused(ValueError, "mse", "dpace"):
        make_objective("mse", 8)


# Objectives that compare with the target's distribution

NARROW, FEW, BLOCK = 8, 11, 5


def float64_head() -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(NARROW, FEW, bias=False, dtype=torch.float64).requires_grad_(False)
    layer.weight.mul_(4.0)
    return layer


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TargetStates]:
    """Hidden states, labels with chains of every length, anchors (one unused) and the target's states."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 2, 20
    anchors = torch.tensor([[0, 3, 7, 14], [2, 4, 15, -1]])
    lengths = torch.tensor([[4, 2, 1, 3], [4, 0, 4, 0]])
    labels = torch.randint(0, FEW, (*anchors.shape, BLOCK), generator=generator)
    slots = torch.arange(BLOCK)
    labels = labels.masked_fill((slots == 0) | (slots > lengths[..., None]), -100)
    hidden = torch.randn(rows, anchors.shape[1] * BLOCK, NARROW, generator=generator, dtype=torch.float64)
    states = torch.randn(rows, width, NARROW, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), labels, anchors, TargetStates(states, anchors)


def naive_weights(weighting, hidden, labels, weight) -> list[list[float]]:
    if isinstance(weighting, DPace):
        return naive_dpace_sums(hidden, labels, weight, weighting.alpha)[2]
    flat = labels.reshape(-1, BLOCK).tolist()
    return [[math.exp(-(k - 1) / weighting.gamma) if k else 0.0 for k in range(BLOCK)] for _ in flat]


@pytest.mark.parametrize("chunk_blocks", [1, 3, None])
@pytest.mark.parametrize(("slot_weights", "temperature", "share"), [("dpace", 1.0, 0.0), ("decay", 0.5, 0.3)])
@pytest.mark.parametrize("name", COMPARING)
def test_p4_divergences_equal_the_naive_twin(name, slot_weights, temperature, share, chunk_blocks):
    objective = make_objective(
        name, BLOCK, gamma=2.0, slot_weights=slot_weights, temperature=temperature, cross_entropy_share=share
    )
    hidden, labels, anchors, target = ragged_batch()
    weights = naive_weights(objective.weighting, hidden, labels, float64_head().weight)

    def states_before(n: int, k: int) -> torch.Tensor:
        row, column = divmod(n, anchors.shape[1])
        return target.hidden_states[row, anchors[row, column] + k - 1]

    expected = naive_distilled_sum(
        hidden, labels, float64_head().weight, states_before, name, weights, temperature, share
    )
    (expected_gradient,) = torch.autograd.grad(expected, hidden)

    loss, _ = frozen_head_loss(hidden, labels, float64_head(), objective, FEW, chunk_blocks, target=target)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, expected_gradient)
    counted = labels[..., 1:] != -100
    if name != "expected_acceptance" and slot_weights == "decay":
        assert objective.normalizer(counted).item() == pytest.approx(
            sum(math.exp(-k / 2) * counted[..., k].sum().item() for k in range(BLOCK - 1))
        )
    else:
        assert objective.normalizer(counted).item() == counted.sum().item()


def test_dpace_without_smoothing_has_the_gradient_of_the_expected_acceptance_of_the_labels():
    """A target that is sure of the labels turns the overlap into the drafter's probability of the label."""
    hidden, labels, anchors, _ = ragged_batch()
    sure = torch.zeros(2, 20, FEW, dtype=torch.float64)
    logits = torch.randn(*hidden.shape[:2], FEW, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    row_labels = torch.randint(0, FEW, (2, 20), generator=torch.Generator().manual_seed(4))
    sure[:, :-1] = 200.0 * nn.functional.one_hot(row_labels[:, 1:], FEW).double()
    positions = anchors.clamp(min=0)[..., None] + torch.arange(BLOCK)
    consistent = row_labels.gather(1, positions.clamp(max=19).flatten(1)).view(positions.shape)
    labels = torch.where(labels == -100, -100, consistent)
    gradients = []
    for objective in (make_objective("expected_acceptance", BLOCK), DPace(0.0)):
        leaf = logits.clone().requires_grad_()
        loss, _ = frozen_head_loss(leaf, labels, nn.Identity(), objective, FEW, target=TargetStates(sure, anchors))
        loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", COMPARING)
def test_a_drafter_that_agrees_with_the_target_has_no_loss_and_no_gradient(name):
    _, labels, anchors, target = ragged_batch()
    slots = torch.arange(anchors.numel() * BLOCK)
    hidden = target.at(slots, BLOCK).view(2, -1, NARROW).clone().requires_grad_()
    loss, _ = frozen_head_loss(hidden, labels, float64_head(), make_objective(name, BLOCK), FEW, target=target)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-9)
    if name == "kl":  # the others have a kink there
        torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden.grad))


def test_only_counted_slots_meet_the_head():
    hidden, labels, _, target = ragged_batch()
    seen = []

    def counting(states):
        seen.append(states.shape[0])
        return float64_head()(states)

    frozen_head_loss(hidden, labels, counting, DecayedCrossEntropy(4), FEW, 2)
    assert sum(seen) == (labels != -100).sum()
    seen.clear()
    frozen_head_loss(hidden, labels, counting, make_objective("kl", BLOCK), FEW, 2, target=target)
    assert sum(seen) == 2 * (labels != -100).sum()
    with refused(ValueError, "final_states=True"):
        frozen_head_loss(hidden, labels, float64_head(), make_objective("kl", BLOCK), FEW)


@pytest.mark.parametrize("divergence", [None, "kl", "total_variation", "lk", "lk_hybrid", "overlap"])
def test_slot_terms_are_one_graph_with_the_same_values_and_gradients(divergence):
    terms = SlotTerms(divergence, 0.7)
    generator = torch.Generator().manual_seed(0)
    logits, target_logits = (torch.randn(6, FEW, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    labels = torch.tensor([0, 3, -100, 5, -100, 10])
    results = []
    for function in (terms, torch.compile(terms.__call__, dynamic=False, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        values, right = function(leaf, labels, None if divergence is None else target_logits)
        values.sum().backward()
        results.append((values.detach(), right, leaf.grad))
    assert results[0][0].dtype == torch.float32 and results[0][0].shape == (6, terms.count)
    assert not results[0][0][labels == -100].any() and not results[0][2][labels == -100].any()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama_target", "hybrid_target"])
def test_final_states_are_those_behind_the_targets_own_logits(family, packed):
    model = getattr(tiny, family)()
    target = FrozenTarget(model, [1, 3], packed=packed, final_states=True)
    documents = [{"input_ids": list(range(i, i + n)), "supervised_spans": [[2, n]]} for i, n in ((5, 9), (40, 13))]
    batch = DataCollatorForDFlash(4)([PackedDataset(documents, 32)[0]])
    states = target.all_hidden_states(batch["input_ids"], batch["document_lengths"])
    context = target.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    assert torch.equal(context, states[..., : -tiny.HIDDEN_SIZE])
    stopping = FrozenTarget(model, [1, 3], packed=packed)
    torch.testing.assert_close(context, stopping.context_hidden_states(batch["input_ids"], batch["document_lengths"]))
    start = 0
    for length in batch["document_lengths"][0]:
        part = slice(start, start + length)
        with torch.no_grad():
            expected = model(batch["input_ids"][:, part]).logits
        logits = model.lm_head(states[:, part, -tiny.HIDDEN_SIZE :])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        start += length


def test_running_products_equal_cumprod_with_zeros_too():
    factors = torch.tensor([[0.5, 0.0, 0.25, 1.0], [0.3, 0.2, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(running_products(factors), factors.cumprod(-1))
    weights = torch.arange(1.0, 9.0, dtype=torch.float64).view(2, 4)
    (fast,) = torch.autograd.grad((running_products(factors) * weights).sum(), factors)
    (naive,) = torch.autograd.grad((factors.cumprod(-1) * weights).sum(), factors)
    torch.testing.assert_close(fast, naive)


@pytest.mark.parametrize("name", COMPARING)
def test_a_token_that_the_head_rules_out_spoils_nothing(name):
    """A head may give -inf for ids that it never wants; both sides go through it, also where one is the label."""
    hidden, labels, _, target = ragged_batch()
    unused = FEW - 1
    labels = torch.where(labels == unused, 0, labels)
    objective, found = make_objective(name, BLOCK, slot_weights="decay"), []
    heads = {
        FEW: lambda states: float64_head()(states).index_fill(-1, torch.tensor([unused]), -math.inf),
        unused: lambda states: float64_head()(states)[..., :unused],
    }
    for vocab, head in heads.items():
        hidden.grad = None
        given = torch.where(labels == 1, unused if vocab == FEW else 0, labels)
        loss, _ = frozen_head_loss(hidden, given, head, objective, vocab, target=target)
        loss.backward()
        found.append((loss.detach(), hidden.grad))
    assert found[0][0].isfinite()
    torch.testing.assert_close(*found)


def wide_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, nn.Linear]:
    """Hidden states, labels, anchors and the target's states of many blocks of 8, and a head of 1,000 tokens."""
    rows, width, count, block, hidden_size, vocab = 3, 90, 20, 8, 64, 1000
    generator = torch.Generator().manual_seed(0)
    anchors = torch.rand(rows, width - block, generator=generator).argsort(dim=1)[:, :count].sort(dim=1).values
    lengths = torch.randint(0, block, anchors.shape, generator=generator)
    labels = torch.randint(0, vocab, (*anchors.shape, block), generator=generator)
    slots = torch.arange(block)
    labels = labels.masked_fill((slots == 0) | (slots > lengths[..., None]), -100)
    hidden = torch.randn(rows, count * block, hidden_size, generator=generator)
    states = torch.randn(rows, width, hidden_size, generator=generator)
    head = nn.Linear(hidden_size, vocab, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(vocab, hidden_size, generator=generator) * 0.3)
    return hidden, labels, anchors, states, head


@pytest.mark.gpu
@pytest.mark.parametrize("name", OBJECTIVES)
def test_p4_a_gpu_gives_the_cpus_loss_and_gradient_without_waiting(name):
    objective = make_objective(name, 8)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        hidden, labels, anchors, states, head = (value.to(device) for value in wide_batch())
        hidden.requires_grad_()
        counted = (labels != -100).sum(-1).cpu().numpy().ravel()
        # The third time everything is compiled, and nothing may wait for the device.
        torch.cuda.set_sync_debug_mode("error" if len(results) == 2 else "default")
        try:
            target = TargetStates(states, anchors)
            loss, sums = frozen_head_loss(hidden, labels, head, objective, 1000, 16, counted, target)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([value.detach().cpu() for value in (loss, sums.values, hidden.grad)])
    for fast in results[1:]:
        for expected, value in zip(results[0], fast, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)
