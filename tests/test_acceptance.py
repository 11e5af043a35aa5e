# SPDX-License-Identifier: Apache-2.0
"""The acceptance length by real decoding, and what is reported about it."""

import json
import logging
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_generation import PROMPT, drafter_for, greedy, oracle_for, target_and_answer
from test_walk import trained_like
from tiny import dense_target
from transformers.generation import BaseStreamer
from transformers.utils import logging as hf_logging

from dflash_hf import acceptance
from dflash_hf.acceptance import (
    AcceptanceReport,
    DecodingSettings,
    PlainAnswer,
    PromptAcceptance,
    WalkedAnswer,
    bootstrap_difference,
    measure_acceptance,
    plain_answers,
    walked_acceptance_length,
)
from dflash_hf.generation import SpeculativeOutput, speculative_generate


torch.set_num_threads(1)

IDS = torch.tensor([PROMPT])


def report_of(*committed, prompts=None, max_new_tokens=100):
    """A report of prompts whose verifications committed the given numbers."""
    prompts = prompts or [[i] for i in range(len(committed))]
    answers = [
        PromptAcceptance(prompt, list(range(sum(tokens) + 1)), list(tokens), [n - 1 for n in tokens], True)
        for prompt, tokens in zip(prompts, committed, strict=True)
    ]
    return AcceptanceReport(answers, block_size=4, max_new_tokens=max_new_tokens)


class CommitRecorder(BaseStreamer):
    """Keeps the number of tokens in each piece that `generate` streams: the prompt, the prefill's, each round's."""

    def __init__(self):
        self.sizes = []

    def put(self, value):
        self.sizes.append(value.numel())

    def end(self):
        pass


def native(target, drafter, budget, **arguments):
    """transformers' own speculative decoding with a drafter: the sequence and what each verification committed."""
    recorder = CommitRecorder()
    sequences = target.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=budget,
        do_sample=False,
        assistant_model=drafter,
        speculation_type="dflash",
        streamer=recorder,
        **arguments,
    )
    return sequences, recorder.sizes[2:]


@pytest.fixture
def hugging_face_log(caplog):
    """What transformers logs at warning level and above."""
    hf_logging.warning_once.cache_clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


# --- beside transformers' own decoding ---


@pytest.mark.parametrize("name", ["dense", "tied_llama"])
@pytest.mark.parametrize("budget", [2, 20, 23, 50])
def test_e4_both_ways_of_decoding_commit_alike(name, budget):
    target, answer = target_and_answer(name)
    # Right for 0 to 3 slots, by a pattern over the anchor's position.
    oracle = oracle_for(target, answer, lambda n: [n * n % 7 > 1, n % 3 > 0, True])
    sequences, committed = native(target, oracle, budget)
    ours = speculative_generate(target, oracle, IDS, budget)
    assert sequences[0].tolist() == ours.sequences[0].tolist() == answer[: len(PROMPT) + budget]
    assert committed == ours.committed
    if budget == 50:
        assert set(ours.committed[:-1]) == {1, 2, 4}


@pytest.mark.parametrize("eos_index", [1, 6, 7])
def test_e4_both_ways_of_decoding_stop_alike(eos_index):
    target = dense_target(seed=3)
    answer = greedy(target, PROMPT, 30)
    eos = [271, answer[len(PROMPT) + eos_index]]
    oracle = oracle_for(target, answer, [True, True, False])
    sequences, committed = native(target, oracle, 30, eos_token_id=eos)
    ours = speculative_generate(target, oracle, IDS, 30, eos_token_id=eos)
    assert torch.equal(sequences, ours.sequences)
    assert ours.sequences.shape[1] <= len(PROMPT) + eos_index + 1
    assert committed == ours.committed


def test_e7_a_hybrid_target_is_decoded_although_generate_refuses_it():
    target, answer = target_and_answer("hybrid")
    oracle = oracle_for(target, answer, [True, False, True])
    with pytest.raises(ValueError, match="stateful"):
        native(target, oracle, 12)
    output = speculative_generate(target, oracle, IDS, 12)
    assert output.sequences[0].tolist() == answer[: len(PROMPT) + 12]
    assert output.committed == [2, 2, 2, 2, 2, 1]


# --- measure_acceptance ---


def test_nothing_of_the_generation_config_bends_greedy_decoding(hugging_face_log):
    _, answer = target_and_answer("dense")
    expected = answer[: len(PROMPT) + 20]
    target = dense_target()
    config = target.generation_config
    config.update(
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        repetition_penalty=1.5,
        no_repeat_ngram_size=2,
        suppress_tokens=[expected[-1]],
        begin_suppress_tokens=[expected[len(PROMPT)]],
        bad_words_ids=[[expected[len(PROMPT) + 1]]],
        forced_eos_token_id=7,
        num_beams=3,
        max_length=9,
        min_new_tokens=15,
        cache_implementation="static",
        use_cache=False,
    )
    before = config.to_dict()
    hugging_face_log.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = measure_acceptance(target, oracle_for(target, answer, [True] * 3), [PROMPT], 20, progress=False)
    assert report.prompts[0].output_ids == expected[len(PROMPT) :]
    assert report.lossless is True
    assert report.prompts[0].committed == [4, 4, 4, 4, 3]
    assert target.generation_config is config and config.to_dict() == before
    assert not hugging_face_log.records


@pytest.mark.parametrize("pad", [None, 259])
def test_decoding_prints_no_warning(hugging_face_log, pad):
    target = dense_target()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = [271, 270], pad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_acceptance(target, drafter_for(target), [PROMPT], 6, progress=False)
        measure_acceptance(
            target,
            drafter_for(target),
            [PROMPT],
            progress=False,
            settings=DecodingSettings(6, temperature=0.7, top_p=0.9, top_k=20),
        )
    assert not hugging_face_log.records


def test_the_end_of_sequence_tokens_of_the_generation_config_hold_unless_given():
    target, answer = dense_target(), target_and_answer("dense")[1]
    target.generation_config.eos_token_id = answer[len(PROMPT)]
    drafter = drafter_for(target)
    report = measure_acceptance(target, drafter, [PROMPT], 5, progress=False)
    assert (report.prompts[0].output_ids, report.lossless) == ([answer[len(PROMPT)]], True)
    assert math.isnan(report.acceptance_length)
    assert report.to_dict()["acceptance_length"] is None
    report = measure_acceptance(target, drafter, [PROMPT], 5, eos_token_id=[], progress=False)
    assert len(report.prompts[0].output_ids) == 5 and report.lossless is True


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_e4_an_oracle_reaches_the_block_size_and_a_random_drafter_one(name):
    target, answer = target_and_answer(name)
    oracle = oracle_for(target, answer, [True] * 3)
    assert measure_acceptance(target, oracle, [PROMPT], 21, progress=False).acceptance_length == 4.0
    report = measure_acceptance(
        target, drafter_for(target), [PROMPT, torch.tensor([3]), torch.tensor([[8, 9]])], 12, progress=False
    )
    assert 1.0 <= report.acceptance_length < 1.3
    assert [prompt.prompt_ids for prompt in report.prompts] == [PROMPT, [3], [8, 9]]
    assert report.lossless is True


def test_a_report_holds_outputs_and_counts_and_is_json():
    target, answer = target_and_answer("dense")
    oracle = oracle_for(target, answer, [True, False, True])
    report = measure_acceptance(target, oracle, [PROMPT], 10, check_lossless=False, progress=False)
    data = json.loads(json.dumps(report.to_dict()))
    (prompt,) = data.pop("prompts")
    assert data.pop("tokens_per_second") == pytest.approx(10 / prompt["seconds"])
    assert prompt.pop("seconds") > 0
    assert data == {
        "acceptance_length": 9 / 5,
        "acceptance_length_without_last_block": 2.0,
        "plain_tokens_per_second": None,
        "speed_up": None,
        "slot_acceptance": [1.0, 0.0, 0.0],
        "committed_histogram": [1, 4, 0, 0],
        "committed_tokens": 9,
        "forwards": 5,
        "num_prompts": 1,
        "lossless": None,
        "num_ties": 0,
        "block_size": 4,
        "max_new_tokens": 10,
    }
    missing = (
        "lossless",
        "first_difference",
        "top2_gap",
        "tie",
        "plain_seconds",
        "plain_tokens",
        "source",
        "language",
    )
    assert prompt == {
        "prompt_ids": PROMPT,
        "output_ids": answer[len(PROMPT) : len(PROMPT) + 10],
        "committed": [2, 2, 2, 2, 1],
        # The budget cuts off the target's own token behind the last draft.
        "accepted": [1, 1, 1, 1, 1],
        "forwards": 5,
        **dict.fromkeys(missing),
    }


@pytest.mark.parametrize("tamper", [{4: 7}, {9: 7, 6: 7}, {0: 7}, "shorter"])
def test_a_difference_is_found_with_the_gap_of_the_targets_logits_there(monkeypatch, tamper):
    target, answer = target_and_answer("dense")
    output = torch.tensor([answer[: len(PROMPT) + 10]])
    if tamper == "shorter":
        output, first = output[:, :-2], 8
    else:
        first = min(tamper)
        for index, token in tamper.items():
            output[0, len(PROMPT) + index] = token
    monkeypatch.setattr(
        acceptance, "speculative_generate", lambda *args, **kwargs: SpeculativeOutput(output, [4, 5], [3, 4])
    )
    report = measure_acceptance(target, drafter_for(target), [PROMPT], 10, progress=False)
    (prompt,) = report.prompts
    assert (report.lossless, prompt.lossless, prompt.first_difference) == (False, False, first)
    with torch.no_grad():
        logits = target(torch.tensor([answer[: len(PROMPT) + first]])).logits[0, -1].sort(descending=True).values
    assert prompt.top2_gap == pytest.approx((logits[0] - logits[1]).item(), abs=1e-3)
    json.dumps(report.to_dict())


def test_the_bar_shows_tokens_per_second(capsys):
    target, _ = target_and_answer("dense")
    measure_acceptance(target, drafter_for(target), [PROMPT], 3, check_lossless=False, progress=False)
    assert capsys.readouterr() == ("", "")
    measure_acceptance(target, drafter_for(target), [PROMPT], 3, check_lossless=False)
    assert "tokens/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "budget", "message"),
    [
        ([], 5, "There is no prompt"),
        ([PROMPT, []], 5, r"Prompt 1 has the shape \[0\]"),
        ([torch.zeros(2, 4)], 5, r"Prompt 0 has the shape \[2, 4\]"),
        ([[1.5, 2.0]], 5, r"Prompt 0 has the shape \[2\] and the type torch.float32; expected token ids"),
        ([[3, 272]], 5, "Prompt 0 holds the ids 3 to 272.*272 rows.*another tokenizer"),
        ([[-1]], 5, "Prompt 0 holds the ids -1"),
        ([PROMPT], 1, "max_new_tokens is 1; expected at least 2"),
    ],
)
def test_bad_prompts_and_budgets_are_refused_before_decoding(monkeypatch, prompts, budget, message):
    target, _ = target_and_answer("dense")
    monkeypatch.setattr(acceptance, "speculative_generate", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=message):
        measure_acceptance(target, drafter_for(target), prompts, budget, progress=False)


def test_settings_given_twice_and_answers_to_other_prompts_are_refused():
    target, _ = target_and_answer("dense")
    drafter, settings = drafter_for(target), DecodingSettings(4)
    for twice in ({"max_new_tokens": 8}, {"eos_token_id": 5}):
        with pytest.raises(ValueError, match=r"beside settings, which have their own\. Give either"):
            measure_acceptance(target, drafter, [PROMPT], settings=settings, **twice)
    with pytest.raises(ValueError, match="1 plain answers for 2 prompts"):
        measure_acceptance(target, drafter, [PROMPT, [1]], settings=settings, plain=[PlainAnswer([1], 1.0)])


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_a_drafter_of_another_target_is_refused(name):
    target, _ = target_and_answer(name)
    drafter = drafter_for(target, num_target_layers=30)
    with pytest.raises(ValueError, match="num_target_layers is 30, the target's is"):
        measure_acceptance(target, drafter, [PROMPT], 5)


# --- statistics ---


def test_e4_the_acceptance_length_is_pooled_over_unequal_prompts():
    report = report_of([4, 4, 4, 4, 4, 4], [1, 1], [])
    assert report.acceptance_length == 26 / 8
    assert report.acceptance_length_without_last_block == 21 / 6
    assert report.lossless is True
    unchecked = PromptAcceptance([1], [2, 3], [1], [0])
    assert AcceptanceReport([*report.prompts, unchecked], 4, 9).lossless is None
    assert math.isnan(report_of([], [3]).acceptance_length_without_last_block)


def test_the_bootstrap_draws_prompts_and_repeats_itself():
    report = report_of([4] * 10, [1] * 10, [2] * 3, [3, 1], [])
    low, high = report.bootstrap_interval()
    assert 1.0 <= low < report.acceptance_length < high <= 4.0
    assert report.bootstrap_interval() == (low, high)
    assert report.bootstrap_interval(seed=1) != (low, high)
    inner = report.bootstrap_interval(confidence=0.5)
    assert low < inner[0] < inner[1] < high
    # All prompts alike, or one prompt: no spread, however unequal the blocks within it are.
    assert report_of([1, 3], [1, 3], [3, 1]).bootstrap_interval() == (2.0, 2.0)
    assert report_of([1, 4, 4]).bootstrap_interval() == (3.0, 3.0)
    assert all(math.isnan(x) for x in report_of([], []).bootstrap_interval())


def timed(*times):
    """A report of prompts with the seconds of either decoding; their answers have 2, 3, 4, .. tokens."""
    prompts = [
        PromptAcceptance([1], [0] * n, [1], [0], seconds=own, plain_seconds=plain, plain_tokens=n)
        for n, (own, plain) in enumerate(times, start=2)
    ]
    return AcceptanceReport(prompts, 4, 9)


def test_the_interval_of_the_speed_up_is_that_of_its_resamples():
    report = timed((1.0, 2.0), (1.5, 2.0), (0.5, 2.0), (3.0, 2.0))
    draws = np.random.default_rng(3).integers(0, 4, (50, 4))
    drawn = [replace(report, prompts=[report.prompts[i] for i in draw]).speed_up for draw in draws]
    assert report.speed_up_interval(0.9, 50, seed=3) == pytest.approx(tuple(np.quantile(drawn, [0.05, 0.95])))
    low, high = report.speed_up_interval()
    assert low < report.speed_up < high
    assert timed((1.0, 2.0)).speed_up_interval() == pytest.approx((2.0, 2.0))


@pytest.mark.filterwarnings("error")
def test_a_speed_up_that_is_not_known_has_no_interval():
    for report in (timed(), timed((None, None)), timed((1.0, 2.0), (1.0, None)), timed((0.0, 0.0))):
        assert math.isnan(report.speed_up) and all(math.isnan(x) for x in report.speed_up_interval())
    # A clock may be too coarse for a prompt, but not for all.
    low, high = timed((0.0, 0.0), (1.0, 2.0), (1.0, 1.5)).speed_up_interval()
    assert low == pytest.approx(1.5) and high == pytest.approx(2.0)


def test_the_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        # Prompts of unequal length and ease; blocks of an easy one commit more. The pooled truth is E[sum] / E[count].
        counts, eases = rng.integers(1, 12, 60), rng.uniform(0.1, 0.9, 60)
        report = report_of(*[(1 + rng.binomial(3, p, n)).tolist() for n, p in zip(counts, eases, strict=True)])
        low, high = report.bootstrap_interval(confidence=0.9, resamples=300)
        hits += low <= 2.5 <= high
    assert 0.82 <= hits / 200 <= 0.97


def test_the_difference_pairs_the_prompts():
    before, after = report_of([1, 1], [3, 3], [2, 2]), report_of([2, 2], [4, 4], [3, 3])
    # Unpaired draws would spread from -1 to 3.
    low, high = bootstrap_difference(before, after)
    assert (low, high) == pytest.approx((1.0, 1.0))
    assert bootstrap_difference(after, before) == pytest.approx((-1.0, -1.0))
    low, high = bootstrap_difference(before, report_of([1, 2], [3, 3], [2, 1]))
    assert low < 0 < high
    assert bootstrap_difference(before, after, seed=3, resamples=10, confidence=0.5) == pytest.approx((1.0, 1.0))


def test_reports_that_cannot_be_compared_are_refused():
    report = report_of([1], [2])
    with pytest.raises(ValueError, match="different prompts"):
        bootstrap_difference(report, report_of([1], [2], prompts=[[0], [9]]))
    with pytest.raises(ValueError, match=r"different prompts \(2 and 1"):
        bootstrap_difference(report, report_of([1]))
    with pytest.raises(ValueError, match="budgets of 100 and 50"):
        bootstrap_difference(report, report_of([1], [2], max_new_tokens=50))
    for wrong in ({"confidence": 95}, {"confidence": 0}, {"resamples": 0}):
        with pytest.raises(ValueError, match="expected a share between 0 and 1"):
            report.bootstrap_interval(**wrong)


def test_a_target_that_scales_its_embeddings_drafts_from_plain_rows(monkeypatch):
    """`generate` would call the scaling module; the drafter was trained on the rows themselves."""
    target = dense_target()
    drafter = drafter_for(target)
    expected = speculative_generate(target, drafter, IDS, 20)
    embedding = target.get_input_embeddings()
    monkeypatch.setattr(embedding, "forward", lambda ids: 8 * torch.nn.functional.embedding(ids, embedding.weight))
    seen = []
    handle = drafter.register_forward_hook(lambda m, args, kwargs, out: seen.append(args[0]), with_kwargs=True)
    scaled = speculative_generate(target, drafter, IDS, 20)
    handle.remove()
    mask_row = embedding.weight[drafter.config.mask_token_id]
    assert seen and all(torch.equal(noise[0, 1], mask_row) for noise in seen)
    assert scaled.sequences.shape == expected.sequences.shape


# --- what reports show ---


def test_slots_positions_and_groups_of_a_report():
    prompts = [
        PromptAcceptance([0], [0] * 9, [4, 1, 3], [3, 0, 3], True, source="a", language="en", seconds=1.0),
        PromptAcceptance([1], [0] * 3, [2], [1], True, source="b", language="en", seconds=2.0),
        PromptAcceptance([2], [0], [], [], True, source="a", seconds=1.0),
    ]
    report = AcceptanceReport(prompts, block_size=4, max_new_tokens=9)
    assert report.slot_acceptance == [3 / 4, 2 / 4, 2 / 4]
    assert report.committed_histogram == [1, 1, 1, 1]
    assert report.by_position(4) == [
        {"position": 0, "blocks": 2, "acceptance_length": 3.0},
        {"position": 4, "blocks": 2, "acceptance_length": 2.0},
    ]
    assert {name: len(group.prompts) for name, group in report.groups(lambda p: p.source).items()} == {"a": 2, "b": 1}
    assert report.groups(lambda p: p.language)["en"].acceptance_length == 10 / 4
    assert report.tokens_per_second == 13 / 4
    assert math.isnan(report.plain_tokens_per_second) and math.isnan(report.speed_up)


def test_both_speeds_come_from_the_same_run():
    target, _ = target_and_answer("dense")
    drafter, settings = drafter_for(target), DecodingSettings(12)
    answers = plain_answers(target, [PROMPT, [3]], settings, progress=False)
    report = measure_acceptance(target, drafter, [PROMPT, [3]], progress=False, settings=settings, plain=answers)
    assert report.lossless is True
    assert [p.output_ids for p in report.prompts] == [a.output_ids for a in answers]
    assert report.plain_tokens_per_second == pytest.approx(24 / sum(a.seconds for a in answers))
    assert report.speed_up == pytest.approx(report.tokens_per_second / report.plain_tokens_per_second)


@pytest.mark.parametrize(("gap", "tie"), [(1e-6, True), (1e-2, False)])
def test_a_difference_at_a_tie_is_counted_apart(monkeypatch, gap, tie):
    target, answer = target_and_answer("dense")
    output = torch.tensor([answer[: len(PROMPT) + 10]])
    output[0, len(PROMPT) + 3] = 7
    logits = torch.zeros(1, 1, 272)
    logits[..., 5], logits[..., 9] = 1.0, 1.0 - gap
    monkeypatch.setattr(
        acceptance, "speculative_generate", lambda *args, **kwargs: SpeculativeOutput(output, [4, 5], [3, 4])
    )
    plain = [PlainAnswer(answer[len(PROMPT) : len(PROMPT) + 10], 1.0)]
    monkeypatch.setattr(target, "forward", lambda **kwargs: type("Output", (), {"logits": logits}))
    report = measure_acceptance(
        target, drafter_for(target), [PROMPT], progress=False, settings=DecodingSettings(10), plain=plain
    )
    assert (report.prompts[0].lossless, report.prompts[0].tie) == (False, tie)
    assert (report.lossless, report.num_ties) == (tie, int(tie))


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_e5_walk_and_decoding_agree_on_a_reports_answers(name, hugging_face_log):
    target, _ = target_and_answer(name)
    drafter = drafter_for(target)
    report = measure_acceptance(target, drafter, [PROMPT, [3, 9]], 20, check_lossless=False, progress=False)
    hugging_face_log.clear()
    assert walked_acceptance_length(target, drafter, report, progress=False) == report.acceptance_length
    assert not hugging_face_log.records


def test_e5_walk_and_decoding_agree_on_sampled_answers():
    """A rejected draft is never drawn in its place, so the answer holds a draft where it was accepted."""
    target, answer = target_and_answer("dense")
    documents = [{"input_ids": answer, "supervised_spans": [[len(PROMPT), len(answer)]]}]
    settings = DecodingSettings(24, temperature=0.6)
    drafter = trained_like(target, documents)
    report = measure_acceptance(target, drafter, [PROMPT, PROMPT[:2], [3, 9]], progress=False, settings=settings)
    assert report.acceptance_length > 1.1
    assert walked_acceptance_length(target, drafter, report, progress=False) == report.acceptance_length


@pytest.mark.parametrize(("decoded", "warns"), [(0.975, False), (0.965, True), (1.029, False), (1.035, True)])
def test_e5_a_gap_between_walk_and_decoding_is_a_warning(monkeypatch, caplog, decoded, warns):
    """The walk commits one token per block; decoding is made to say otherwise."""
    target, _ = target_and_answer("dense")
    report = report_of([1] * 35)
    monkeypatch.setattr(AcceptanceReport, "acceptance_length", decoded)
    monkeypatch.setattr(acceptance, "walk_documents", lambda *args: [WalkedAnswer(0, [1] * 35, [0] * 35)])
    logger = logging.getLogger("dflash_hf.acceptance")
    logger.addHandler(caplog.handler)
    walked_acceptance_length(target, drafter_for(target), report, progress=False)
    logger.removeHandler(caplog.handler)
    assert bool(caplog.records) == warns
    if warns:
        assert "the walk gives an acceptance length of 1.000" in caplog.text
