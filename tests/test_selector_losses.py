# SPDX-License-Identifier: Apache-2.0
"""The selector's loss equals a naive twin in chunks of any size, and what it counts is what a walk accepts."""

import math
from types import SimpleNamespace

import pytest
import torch
from naive import naive_divergence, naive_sums
from test_losses import AcceleratorLabels

from dflash_hf import losses
from dflash_hf.losses import (
    BlockSums,
    DecayedCrossEntropy,
    Distillation,
    DPace,
    TargetStates,
    frozen_head_loss,
    make_objective,
)
from dflash_hf.modeling_dflash2 import CandidateSelector
from dflash_hf.selector_losses import SelectorTerms, selector_terms, true_predecessors


HIDDEN, VOCAB, BLOCK, TOP_K = 12, 23, 5, 4


def make_selector() -> CandidateSelector:
    torch.manual_seed(1)
    selector = CandidateSelector(
        SimpleNamespace(selector_top_k=TOP_K, vocab_size=VOCAB, selector_rank=3, hidden_size=HIDDEN)
    )
    for parameter in selector.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return selector.double()


def make_batch():
    """Hidden states, labels whose chains end early in some blocks, anchors' tokens, a head and the target's states."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCAB, (2, 4, BLOCK), generator=generator)
    labels[..., 0] = -100
    for block, length in ((1, 2), (3, 0)):
        labels[0, block, 1 + length :] = -100
    anchors = torch.randint(VOCAB, (2, 4), generator=generator)
    hidden = torch.randn(2, 4 * BLOCK, HIDDEN, generator=generator, dtype=torch.float64)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False).double().requires_grad_(False)
    head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
    # A label in two is among the largest logits.
    hidden = hidden + 0.3 * head.weight[labels.clamp(min=0)].flatten(1, 2)
    states = TargetStates(torch.randn(2, 30, HIDDEN, generator=generator).double(), torch.arange(8).view(2, 4))
    return hidden.requires_grad_(), labels, anchors, head, states


def naive_selector(selector, hidden, labels, anchors, head, states, weight_of, inject, divergence):
    """Sum over slots of the selector's weighted loss, and what is right in each by choice, logit and candidates."""
    total, rights = hidden.sum() * 0.0, []
    blocks = hidden.reshape(-1, BLOCK, HIDDEN)
    for n, (row, targets) in enumerate(zip(blocks, labels.reshape(-1, BLOCK).tolist(), strict=True)):
        rights.append([])
        accepted = 1.0
        for k in range(1, BLOCK):
            if targets[k] == -100:
                continue
            before = anchors.flatten()[n].item() if k == 1 else targets[k - 1]
            logits = head.weight @ row[k]
            top = sorted(range(VOCAB), key=lambda j: -logits[j].item())[:TOP_K]
            inside = targets[k] in top
            if inject and not inside:
                top[-1] = targets[k]
            query = selector.hidden_projection.weight @ row[k]
            scores = torch.stack(
                [
                    logits[j] + (selector.predecessor_codebook[before] * query * selector.successor_codebook[j]).sum()
                    for j in top
                ]
            )
            log_q = scores - scores.exp().sum().log()
            rights[-1].append(
                (inside and top[log_q.argmax()] == targets[k], int(logits.argmax()) == targets[k], inside)
            )
            if divergence is not None:
                p = torch.softmax(head.weight @ states.at(torch.tensor([n * BLOCK + k]), BLOCK)[0], 0)[top]
                value = naive_divergence(
                    "overlap" if divergence == "expected_acceptance" else divergence, p, log_q.exp()
                )
                accepted = accepted * value
                total = total + (
                    1 - accepted if divergence == "expected_acceptance" else weight_of(k, logits, targets) * value
                )
            elif targets[k] in top:
                total = total - weight_of(k, logits, targets) * log_q[top.index(targets[k])]
    return total, rights


def decayed(k, logits, targets):
    return math.exp(-(k - 1) / 2)


@pytest.mark.parametrize(("chunk_blocks", "kind"), [(1, torch.Tensor), (3, AcceleratorLabels), (100, torch.Tensor)])
@pytest.mark.parametrize(
    ("inject", "cut_off", "divergence"),
    [
        (False, False, None),
        (True, False, None),
        (False, True, None),
        (False, False, "expected_acceptance"),
        (True, False, "kl"),
    ],
)
def test_values_and_gradients_equal_the_naive_twins(chunk_blocks, kind, inject, cut_off, divergence, monkeypatch):
    monkeypatch.setattr(losses, "_compiled_slot_terms", lambda terms: terms)
    hidden, labels, anchors, head, states = make_batch()
    selector, base = make_selector(), DecayedCrossEntropy(2)
    objective = None if divergence is None else make_objective(divergence, BLOCK, 2, 0.5, "decay")
    terms = SelectorTerms(selector, true_predecessors(anchors, labels), 0.6, inject, cut_off, objective)
    target = None if divergence is None else states
    given = (hidden, labels.as_subclass(kind), head, base, VOCAB, chunk_blocks)
    loss, values = (
        t.as_subclass(torch.Tensor) if isinstance(t, torch.Tensor) else t.values.as_subclass(torch.Tensor)
        for t in frozen_head_loss(*given, target=target, selection=terms)
    )
    seen = hidden.detach() if cut_off else hidden
    own, rights = naive_selector(selector, seen, labels, anchors, head, states, decayed, inject, divergence)
    plain, normalizer = naive_sums(hidden, labels, head.weight, 2)
    torch.testing.assert_close(loss, plain + 0.6 * own)
    weights = [hidden, *selector.parameters()]
    pairs = zip(
        torch.autograd.grad(3 * loss, weights), torch.autograd.grad(3 * (plain + 0.6 * own), weights), strict=True
    )
    for actual, expected in pairs:
        assert expected.abs().max() > 0
        torch.testing.assert_close(actual, expected)
    metrics = BlockSums(values).metrics()
    assert metrics["selector_loss"] == pytest.approx(own.item() / normalizer)
    slots = [right for block in rights for right in block]
    shares = {"accuracy": 0, "accuracy_argmax": 1, "candidate_recall": 2}
    assert 0 < metrics["candidate_recall"] < 1
    for name, kind in shares.items():
        assert metrics[name] == pytest.approx(sum(right[kind] for right in slots) / len(slots))
    lengths = {"acceptance_length": 0, "acceptance_length_argmax": 1, "acceptance_length_oracle": 2}
    whole = [block for block in rights if len(block) == BLOCK - 1]
    for name, kind in lengths.items():
        accepted = [next((i for i, right in enumerate(block) if not right[kind]), BLOCK - 1) for block in whole]
        assert metrics[name] == pytest.approx(1 + sum(accepted) / len(whole))


@pytest.mark.parametrize("base", [DPace(0.5), Distillation("kl", DPace(0.5))], ids=["dpace", "kl"])
@pytest.mark.parametrize("own", [None, DPace(0.5)], ids=["weights_of_the_base", "weights_of_its_own"])
def test_it_adds_to_any_objective_with_its_weights(base, own):
    """Each block by itself adds up to the batch, and a selector whose loss counts nothing leaves the base alone."""
    hidden, labels, anchors, head, states = make_batch()
    selector, before = make_selector(), true_predecessors(anchors, labels)

    def run(alpha, kind=own):
        terms = SelectorTerms(selector, before, alpha, objective=kind)
        return frozen_head_loss(hidden, labels, head, base, VOCAB, target=states, selection=terms)

    (zero, _), (one, sums) = run(0.0), run(1.0)
    alone, _ = frozen_head_loss(hidden, labels, head, base, VOCAB, target=states)
    assert torch.equal(zero, alone)
    torch.testing.assert_close((one - zero).float(), sums.values[-5])
    assert one > zero
    different = run(1.0, DPace(0.9) if own else DPace(0.5))[0]
    assert different != one


def test_only_a_selector_learns_where_the_body_is_frozen_and_nothing_counts_gives_zeros():
    hidden, labels, anchors, head, _ = make_batch()
    selector = make_selector()
    selector.predecessor_codebook.requires_grad_(False)
    terms = SelectorTerms(selector, true_predecessors(anchors, labels))
    loss, _ = frozen_head_loss(hidden.detach(), labels, head, DPace(), VOCAB, selection=terms)
    loss.backward()
    assert selector.predecessor_codebook.grad is None and selector.successor_codebook.grad.abs().max() > 0
    nothing = torch.full_like(labels, -100)
    terms = SelectorTerms(selector, true_predecessors(anchors, nothing))
    loss, sums = frozen_head_loss(hidden, nothing, head, DPace(), VOCAB, selection=terms)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss == 0 and gradient.abs().max() == 0 and sums.values.abs().max() == 0


def test_teacher_forced_choices_are_accepted_exactly_as_a_walk_is():
    """The drafts before the first wrong one, of the true predecessors and of the walk."""
    hidden, labels, anchors, head, _ = make_batch()
    selector = make_selector()
    blocks = hidden.detach().reshape(-1, BLOCK, HIDDEN)[:, 1:]
    with torch.no_grad():
        walked, _ = selector.walk(blocks, head(blocks), anchors.flatten())
        # Texts that the walk follows for some slots.
        labels = labels.flatten(0, 1)
        for n in range(8):
            labels[n, 1 : 1 + n % BLOCK] = walked[n, : n % BLOCK]
        labels = labels.clamp(min=0)
        labels[:, 0] = -100
        accepted = (walked == labels[:, 1:]).long().cumprod(1).sum(1)
        labels = labels.view(2, 4, BLOCK)
        inputs = {"input_ids": anchors, "anchor_positions": torch.arange(4).expand(2, 4), "labels": labels}
        terms = selector_terms(SimpleNamespace(candidate_selector=selector), inputs)
        _, sums = frozen_head_loss(hidden, labels, head, DPace(), VOCAB, selection=terms)
    assert sums.metrics()["acceptance_length"] == pytest.approx(1 + accepted.float().mean().item())
    assert selector_terms(SimpleNamespace(), inputs) is None
