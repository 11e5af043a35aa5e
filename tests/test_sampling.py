# SPDX-License-Identifier: Apache-2.0
"""Sampled speculative decoding keeps the target's distribution."""

import itertools
import math

import numpy as np
import pytest
import torch
from test_generation import PROMPT, drafter_for, oracle_for, target_and_answer
from tiny import dense_target, hybrid_target

from dflash_hf.generation import Greedy, Sampling, draft_forward, speculative_generate, target_forward


torch.set_num_threads(1)

SETTINGS = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 1.7},
    "warm_top_p": {"temperature": 1.5, "top_p": 0.8},
    "top_k_top_p": {"temperature": 1.3, "top_k": 3, "top_p": 0.9},
}


def distribution(logits, temperature, top_p=1.0, top_k=0):
    """The probabilities of one position [V], by hand."""
    logits = [x / temperature for x in logits.tolist()]
    kept = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    total, mass, nucleus = sum(math.exp(logits[i]) for i in kept), 0.0, []
    for i in kept:
        if mass < top_p:
            nucleus.append(i)
        mass += math.exp(logits[i]) / total
    total = sum(math.exp(logits[i]) for i in nucleus)
    return np.array([math.exp(x) / total if i in nucleus else 0.0 for i, x in enumerate(logits)])


def assert_drawn_from(counts, probabilities):
    """Chi-square over the cells that are expected five times or more, the others pooled."""
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    assert degrees >= 3
    # The 1 - 1e-4 quantile by Wilson and Hilferty, 3.719 being the normal one; the seeds are fixed.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    assert ((observed - wanted) ** 2 / wanted).sum() < limit


def three_tokens(sampling, target_logits, draft_logits, first, rows):
    """Three tokens after the first one for many rows at once, by rounds of two drafts.

    Args:
        target_logits: Logits [.., V] after each string of tokens, as a function of strings [rows, length].
        draft_logits: Logits [rows, 2, V] of two drafts after each string.
    """
    known, done = torch.full((rows, 1), first), torch.zeros(rows, 3, dtype=torch.long)
    counts = torch.zeros(rows, dtype=torch.long)
    for length in (1, 2, 3):
        # All rows that know as many tokens; those that know more wait.
        index = torch.nonzero(counts == length - 1)[:, 0]
        if not len(index):
            continue
        strings = torch.cat([known[index], done[index, : length - 1]], dim=1)
        drafts, proposed_from = sampling.propose(draft_logits(strings))
        logits = torch.stack([target_logits(torch.cat([strings, drafts[:, :k]], dim=1)) for k in range(3)], dim=1)
        accepted, tokens = sampling.verify(drafts, proposed_from, logits)
        for k in range(4 - length):
            done[index[accepted >= k], length - 1 + k] = tokens[accepted >= k, k]
        counts[index] = (length + accepted).clamp(max=3)
    return done


def cell_counts(tokens, vocab_size):
    cells = (tokens * torch.tensor([vocab_size**2, vocab_size, 1])).sum(dim=1)
    return torch.bincount(cells, minlength=vocab_size**3)


@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_verification_keeps_the_distribution_of_a_markov_chain(settings, sample_drafts):
    """30,000 rows whose target knows the last token alone and whose drafter knows a little of it."""
    vocab_size, generator = 5, torch.Generator().manual_seed(1)
    table = torch.randn(vocab_size, vocab_size, generator=generator) * 1.5
    guesses = table.mean(dim=0) + torch.randn(vocab_size, 2, vocab_size, generator=generator)
    sampling = Sampling.of(**settings, sample_drafts=sample_drafts, generator=generator)
    tokens = three_tokens(sampling, lambda s: table[s[:, -1]], lambda s: guesses[s[:, -1]], 2, 30_000)
    rows = [distribution(row, **settings) for row in table]
    expected = [rows[2][a] * rows[a][b] * rows[b][c] for a, b, c in itertools.product(range(vocab_size), repeat=3)]
    assert_drawn_from(cell_counts(tokens, vocab_size), expected)


def test_a_drafter_that_is_the_target_is_always_accepted():
    logits = torch.randn(500, 4, 7, generator=torch.Generator().manual_seed(0))
    sampling = Sampling.of(0.9, top_p=0.8, sample_drafts=True)
    drafts, proposed_from = sampling.propose(logits[:, :3])
    accepted, tokens = sampling.verify(drafts, proposed_from, logits)
    assert (accepted == 3).all() and torch.equal(tokens[:, :3], drafts)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_probabilities_are_those_of_transformers_settings(settings):
    logits = torch.randn(3, 2, 9, generator=torch.Generator().manual_seed(0)) * 2
    ours = Sampling.of(**settings).probabilities(logits)
    for row in range(3):
        for slot in range(2):
            np.testing.assert_allclose(ours[row, slot], distribution(logits[row, slot], **settings), atol=1e-6)


def test_temperature_zero_is_greedy_and_little_temperature_nearly_so():
    target, answer = target_and_answer("dense")
    oracle, prompt = oracle_for(target, answer, [True, False, True]), torch.tensor([PROMPT])
    assert isinstance(Sampling.of(0.0, top_p=0.5, top_k=3, sample_drafts=True), Greedy)
    for arguments in ({"temperature": 0.0, "top_p": 0.5}, {"temperature": 1e-4}, {"temperature": 3.0, "top_k": 1}):
        output = speculative_generate(target, oracle, prompt, 21, **arguments)
        assert output.sequences[0].tolist() == answer[: len(PROMPT) + 21]
        assert output.committed == [2] * 10


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "top_k": -1},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="expected temperature >= 0"):
        Sampling.of(**settings)


def test_a_generator_makes_samples_repeat_themselves():
    target, _ = target_and_answer("dense")
    drafter, prompt = drafter_for(target), torch.tensor([PROMPT])
    outputs = [
        speculative_generate(
            target, drafter, prompt, 12, temperature=4.0, generator=torch.Generator().manual_seed(seed)
        ).sequences
        for seed in (0, 0, 1)
    ]
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def small_models(name, vocab_size):
    """A target of a few tokens with far from certain answers, and a random drafter of three slots."""
    make = {"dense": dense_target, "hybrid": hybrid_target}[name]
    fields = {"vocab_size": vocab_size, "pad_token_id": None, "eos_token_id": None}
    target = make(num_layers=4, **fields)
    target.get_output_embeddings().weight.data *= 0.4
    drafter = drafter_for(target, vocab_size=vocab_size, mask_token_id=1, block_size=3, target_layer_ids=[0, 2])
    return target, drafter


def exact(target, prompt, vocab_size, settings):
    """The probabilities of all strings of three tokens after a prompt, and the target's logits after any string."""
    table = {}
    for length in range(6):
        strings = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)), dtype=torch.long)
        strings = strings.view(vocab_size**length, length)
        ids = torch.cat([torch.tensor([prompt]).expand(len(strings), -1), strings], dim=1)
        table[length] = torch.cat([target(part, use_cache=False).logits[:, -1] for part in ids.split(2000)])

    def logits(strings):
        powers = vocab_size ** torch.arange(strings.shape[1]).flip(0)
        return table[strings.shape[1]][(strings * powers).sum(dim=1)]

    def probability(*tokens):
        rows = [distribution(logits(torch.tensor([tokens[:k]], dtype=torch.long))[0], **settings) for k in range(3)]
        return math.prod(row[token] for row, token in zip(rows, tokens, strict=True))

    return [probability(*tokens) for tokens in itertools.product(range(vocab_size), repeat=3)], logits


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_next_three_tokens_of_a_target_in_100000_copies(settings, sample_drafts):
    """The target's and the drafter's own logits, 100,000 copies of one prompt at once."""
    vocab_size, rows = 5, 100_000
    target, drafter = small_models("dense", vocab_size)
    expected, logits = exact(target, PROMPT_OF_FEW, vocab_size, settings)
    sampling = Sampling.of(**settings, sample_drafts=sample_drafts, generator=torch.Generator().manual_seed(0))
    guesses = {}

    def draft_logits(strings):
        """The drafter's logits, once for each string."""
        unique, index = strings.unique(dim=0, return_inverse=True)
        for string in unique.tolist():
            ids = torch.tensor([PROMPT_OF_FEW + string])
            taps, _ = target_forward(target, drafter, ids, num_logits=1, use_cache=False)
            guesses[tuple(string)] = draft_forward(target, drafter, ids[:, -1:], taps[:, :-1])
        return torch.stack([guesses[tuple(string)] for string in unique.tolist()])[index]

    no_drafts = torch.empty(rows, 0, dtype=torch.long)
    first = sampling.verify(no_drafts, None, logits(no_drafts)[:, None])[1][:, 0]
    tokens = torch.empty(rows, 3, dtype=torch.long)
    for token in range(vocab_size):
        chosen = first == token
        after = three_tokens(sampling, logits, draft_logits, token, int(chosen.sum()))
        tokens[chosen] = torch.cat([torch.full((len(after), 1), token), after[:, :2]], dim=1)
    assert_drawn_from(cell_counts(tokens, vocab_size), expected)


PROMPT_OF_FEW = [2, 0, 1, 1, 2]


def decoded_samples(name, count, sample_drafts, vocab_size):
    settings = {"temperature": 1.3, "top_p": 0.95}
    target, drafter = small_models(name, vocab_size)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        expected, _ = exact(target, PROMPT_OF_FEW, vocab_size, settings)
    prompt = torch.tensor([PROMPT_OF_FEW])
    tokens = torch.cat(
        [
            speculative_generate(
                target, drafter, prompt, 3, [], **settings, sample_drafts=sample_drafts, generator=generator
            ).sequences[:, -3:]
            for _ in range(count)
        ]
    )
    return cell_counts(tokens, vocab_size), expected


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_decoded_samples_have_the_targets_distribution(name):
    assert_drawn_from(*decoded_samples(name, 220, sample_drafts=name == "dense", vocab_size=3))


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_many_decoded_samples_have_the_targets_distribution(name, sample_drafts):
    assert_drawn_from(*decoded_samples(name, 3000, sample_drafts, vocab_size=5))
