# SPDX-License-Identifier: Apache-2.0
"""Objectives that compare the drafter's distribution with the target's, against their unoptimised twins."""

import math

import pytest
import tiny
import torch
from naive import naive_distilled_sum, naive_dpace_sums
from runs import make_trainer
from torch import nn

from dflash_hf.data_collator import DataCollatorForDFlash
from dflash_hf.frozen_target import FrozenTarget
from dflash_hf.losses import (
    OBJECTIVES,
    DecayedCrossEntropy,
    DPace,
    SlotTerms,
    TargetStates,
    frozen_head_loss,
    make_objective,
    running_products,
)
from dflash_hf.packing import PackedDataset


HIDDEN, VOCAB, BLOCK = 8, 11, 5
COMPARING = OBJECTIVES[2:]


def head() -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64).requires_grad_(False)
    layer.weight.mul_(4.0)
    return layer


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TargetStates]:
    """Hidden states, labels with chains of every length, anchors (one unused) and the target's states."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 2, 20
    anchors = torch.tensor([[0, 3, 7, 14], [2, 4, 15, -1]])
    lengths = torch.tensor([[4, 2, 1, 3], [4, 0, 4, 0]])
    labels = torch.randint(0, VOCAB, (*anchors.shape, BLOCK), generator=generator)
    slots = torch.arange(BLOCK)
    labels = labels.masked_fill((slots == 0) | (slots > lengths[..., None]), -100)
    hidden = torch.randn(rows, anchors.shape[1] * BLOCK, HIDDEN, generator=generator, dtype=torch.float64)
    states = torch.randn(rows, width, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), labels, anchors, TargetStates(states, anchors)


def naive_weights(weighting, hidden, labels, weight) -> list[list[float]]:
    if isinstance(weighting, DPace):
        return naive_dpace_sums(hidden, labels, weight, weighting.alpha)[2]
    flat = labels.reshape(-1, BLOCK).tolist()
    return [[math.exp(-(k - 1) / weighting.gamma) if k else 0.0 for k in range(BLOCK)] for _ in flat]


@pytest.mark.parametrize("chunk_blocks", [1, 3, None])
@pytest.mark.parametrize(("slot_weights", "temperature", "share"), [("dpace", 1.0, 0.0), ("decay", 0.5, 0.3)])
@pytest.mark.parametrize("name", COMPARING)
def test_p4_chunked_loss_equals_the_naive_twin(name, slot_weights, temperature, share, chunk_blocks):
    objective = make_objective(
        name, BLOCK, gamma=2.0, slot_weights=slot_weights, temperature=temperature, cross_entropy_share=share
    )
    hidden, labels, anchors, target = ragged_batch()
    weights = naive_weights(objective.weighting, hidden, labels, head().weight)

    def states_before(n: int, k: int) -> torch.Tensor:
        row, column = divmod(n, anchors.shape[1])
        return target.hidden_states[row, anchors[row, column] + k - 1]

    expected = naive_distilled_sum(hidden, labels, head().weight, states_before, name, weights, temperature, share)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)

    loss, _ = frozen_head_loss(hidden, labels, head(), objective, VOCAB, chunk_blocks, target=target)
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
    sure = torch.zeros(2, 20, VOCAB, dtype=torch.float64)
    logits = torch.randn(*hidden.shape[:2], VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    row_labels = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(4))
    sure[:, :-1] = 200.0 * nn.functional.one_hot(row_labels[:, 1:], VOCAB).double()
    positions = anchors.clamp(min=0)[..., None] + torch.arange(BLOCK)
    consistent = row_labels.gather(1, positions.clamp(max=19).flatten(1)).view(positions.shape)
    labels = torch.where(labels == -100, -100, consistent)
    gradients = []
    for objective in (make_objective("expected_acceptance", BLOCK), DPace(0.0)):
        leaf = logits.clone().requires_grad_()
        loss, _ = frozen_head_loss(leaf, labels, nn.Identity(), objective, VOCAB, target=TargetStates(sure, anchors))
        loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", COMPARING)
def test_a_drafter_that_agrees_with_the_target_has_no_loss_and_no_gradient(name):
    _, labels, anchors, target = ragged_batch()
    slots = torch.arange(anchors.numel() * BLOCK)
    hidden = target.at(slots, BLOCK).view(2, -1, HIDDEN).clone().requires_grad_()
    loss, _ = frozen_head_loss(hidden, labels, head(), make_objective(name, BLOCK), VOCAB, target=target)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-9)
    if name == "kl":  # the others have a kink there
        torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden.grad))


def test_l2_nothing_counts_gives_exactly_zero():
    hidden, labels, _, target = ragged_batch()
    for name in COMPARING:
        hidden.grad = None
        nothing = torch.full_like(labels, -100)
        loss, _ = frozen_head_loss(hidden, nothing, head(), make_objective(name, BLOCK), VOCAB, target=target)
        loss.backward()
        assert loss.item() == 0.0 and torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_only_counted_slots_meet_the_head():
    hidden, labels, _, target = ragged_batch()
    seen = []

    def counting(states):
        seen.append(states.shape[0])
        return head()(states)

    frozen_head_loss(hidden, labels, counting, make_objective("kl", BLOCK), VOCAB, 2, target=target)
    assert sum(seen) == 2 * (labels != -100).sum()


def test_missing_target_states_are_named():
    hidden, labels, _, _ = ragged_batch()
    with pytest.raises(ValueError, match="final_states=True"):
        frozen_head_loss(hidden, labels, head(), make_objective("kl", BLOCK), VOCAB)


@pytest.mark.parametrize("divergence", [None, "kl", "total_variation", "lk", "lk_hybrid", "overlap"])
def test_slot_terms_are_one_graph_with_the_same_values_and_gradients(divergence):
    terms = SlotTerms(divergence, 0.7)
    generator = torch.Generator().manual_seed(0)
    logits, target_logits = (torch.randn(6, VOCAB, generator=generator, dtype=torch.bfloat16) for _ in range(2))
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": "kl", "temperature": 0.0}, "loss_temperature=0.0"),
        ({"name": "kl", "temperature": float("inf")}, "loss_temperature=inf"),
        ({"name": "kl", "temperature": float("nan")}, "loss_temperature=nan"),
        ({"name": "kl", "temperature": 1e-39}, r"loss_temperature=1e-39 must be .* at least 0\.001"),
        ({"name": "lk", "cross_entropy_share": 1.5}, "cross_entropy_share=1.5"),
        ({"name": "kl", "slot_weights": "flat"}, "slot_weights='flat'"),
        ({"name": "dpace", "temperature": 0.5}, "have no effect"),
        ({"name": "cross_entropy", "cross_entropy_share": 0.5}, "have no effect"),
        ({"name": "kl", "gamma": 0.0}, "loss_gamma=0.0"),
        ({"name": "expected_acceptance", "alpha": 2.0}, "dpace_alpha=2.0"),
    ],
)
def test_make_objective_refuses(arguments, named):
    with pytest.raises(ValueError, match=named):
        make_objective(block_size=8, **arguments)


def test_weights_follow_their_names():
    assert make_objective("kl", 16).weighting == DPace(0.5)
    assert make_objective("kl", 16, slot_weights="decay").weighting == DecayedCrossEntropy(7)
    assert make_objective("lk", 16, alpha=0.2).weighting == DPace(0.2)


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


def test_a_trainer_learns_the_targets_distribution(tmp_path):
    """And a FrozenTarget that stops early is refused."""
    arguments = {
        "objective": "kl",
        "max_steps": 30,
        "save_strategy": "no",
        "context_noise": 0.0,
        "learning_rate": 3e-3,
    }
    trainer = make_trainer(tmp_path, **arguments)
    assert trainer.target.final_states
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(ValueError, match="final_states=True"):
        make_trainer(tmp_path, target=FrozenTarget(tiny.dense_target(), [1, 3]), drafter=trainer.model, **arguments)


def test_running_products_equal_cumprod_with_zeros_too():
    factors = torch.tensor([[0.5, 0.0, 0.25, 1.0], [0.3, 0.2, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(running_products(factors), factors.cumprod(-1))
    weights = torch.arange(1.0, 9.0, dtype=torch.float64).view(2, 4)
    (fast,) = torch.autograd.grad((running_products(factors) * weights).sum(), factors)
    (naive,) = torch.autograd.grad((factors.cumprod(-1) * weights).sum(), factors)
    torch.testing.assert_close(fast, naive)


@pytest.mark.parametrize("ruled_out", ["a_token", "a_label"])
@pytest.mark.parametrize("name", COMPARING)
def test_a_token_that_the_head_rules_out_spoils_nothing(name, ruled_out):
    """A head may give -inf for ids that it never wants; both sides go through it."""
    hidden, labels, _, target = ragged_batch()
    unused = VOCAB - 1
    labels = torch.where(labels == unused, 0, labels)
    if ruled_out == "a_label":
        labels = torch.where(labels == 1, unused, labels)
        assert (labels == unused).any()

    def without(states):
        return head()(states).index_fill(-1, torch.tensor([unused]), -math.inf)

    def small(states):
        return head()(states)[..., :unused]

    losses, gradients = [], []
    for one, vocab, given in ((without, VOCAB, labels), (small, unused, torch.where(labels == unused, 0, labels))):
        hidden.grad = None
        # With "dpace" weights the probability of the label matters too.
        objective = make_objective(name, BLOCK, slot_weights="decay")
        loss, _ = frozen_head_loss(hidden, given, one, objective, vocab, target=target)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(hidden.grad)
    assert losses[0].isfinite()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)
