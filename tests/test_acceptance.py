# SPDX-License-Identifier: Apache-2.0
"""The acceptance length, walked and by real decoding, and what is reported about it."""

import json
import logging
import math
import warnings
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from naive import naive_drafter
from oracle import PROMPT, TARGETS, drafter_for, oracle_for, target_and_answer, trained_like, written_by
from runs import BLOCK_SIZE, make_documents, make_trainer
from tiny import MASK_TOKEN_ID, byte_tokenizer, dense_target, refused
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as hf_logging

from dflash_hf import (
    DataCollatorForDFlash,
    DFlashTrainer,
    DFlashTrainingArguments,
    FrozenTarget,
    PackedDataset,
    acceptance,
)
from dflash_hf.acceptance import (
    AcceptanceReport,
    DecodingSettings,
    PlainAnswer,
    PromptAcceptance,
    WalkedAnswer,
    bootstrap_difference,
    markdown,
    measure_acceptance,
    plain_answers,
    plot_label,
    plot_reports,
    right_drafts,
    short_names,
    walk_batch,
    walk_documents,
    walked_acceptance_length,
)
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.generation import SpeculativeOutput, speculative_generate


torch.set_num_threads(1)

IDS = torch.tensor([PROMPT])
PROMPTS = [PROMPT, [7], [9, 80, 80, 3, 6, 200], [11] * 12]


@pytest.fixture
def hugging_face_log(caplog):
    """What transformers and this package log at warning level and above."""
    hf_logging.warning_once.cache_clear()
    loggers = [logging.getLogger(name) for name in ("transformers", "dflash_hf.acceptance")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


# --- the walk ---


@pytest.mark.parametrize("num_draft_tokens", [None, 2])
@pytest.mark.parametrize("name", TARGETS)
def test_e5_the_walk_visits_the_blocks_that_decoding_verifies(name, num_draft_tokens):
    target = TARGETS[name]()
    # A token that comes up in the middle of an answer ends it there, so that the answers have different lengths.
    eos = written_by(target, PROMPTS[:1], 37)[0]["input_ids"][len(PROMPT) + 21]
    documents = written_by(target, PROMPTS, 37, [eos])
    drafter = trained_like(target, documents)
    answers = walk_documents(target, drafter, documents, num_draft_tokens=num_draft_tokens)
    assert [answer.document for answer in answers] == [0, 1, 2, 3]
    for answer, prompt, document in zip(answers, PROMPTS, documents, strict=True):
        settings = {"eos_token_id": eos, "num_draft_tokens": num_draft_tokens}
        decoded = speculative_generate(target, drafter, torch.tensor([prompt]), 37, **settings)
        assert decoded.sequences[0].tolist() == document["input_ids"]
        assert (answer.committed, answer.accepted) == (decoded.committed, decoded.accepted)
    assert len({n for answer in answers for n in answer.committed}) >= 3


def test_the_walk_equals_one_block_after_the_other():
    """Packed rows of documents with several answers, in chunks of anchors, against the slow twin of the drafter."""
    target, documents = dense_target(), make_documents(3)
    documents[1]["supervised_spans"] = [[4, 9], [9, 12], [14, 15], [16, 18]]
    drafter = trained_like(target, documents)
    head, frozen = FrozenHead(target, "cpu"), FrozenTarget(target, drafter.config.target_layer_ids)
    rows = PackedDataset(documents, 64)
    batch = DataCollatorForDFlash(4)([rows[i] for i in range(len(rows))])
    context = frozen.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    table, expected = target.get_input_embeddings().weight, []
    for index, document in enumerate(documents):
        ids = document["input_ids"]
        taps = frozen.context_hidden_states(torch.tensor([ids]))[0]
        for start, stop in [[4, 12], [16, 18]] if index == 1 else document["supervised_spans"]:
            anchor, committed = start, []
            while anchor < stop - 1:
                block = table[[ids[anchor], *[MASK_TOKEN_ID] * 3]]
                with torch.no_grad():
                    drafts = head.logits(naive_drafter(drafter, taps, block, anchor)).argmax(-1).tolist()
                right = next((k for k in range(1, 4) if anchor + k >= stop or drafts[k] != ids[anchor + k]), 4) - 1
                committed.append(min(right + 1, stop - 1 - anchor))
                anchor += committed[-1]
            expected.append((index, committed))
    for chunk in (None, 1, 5, 1000):
        answers = walk_batch(drafter, drafter.config, head, batch, context, chunk_anchors=chunk)
        assert sorted((a.document, a.committed) for a in answers) == sorted(expected)
    assert len({n for _, committed in expected for n in committed}) >= 3
    # Rows whose labels count nothing are left out.
    batch["labels"][0] = -100
    left = {answer.document for answer in walk_batch(drafter, drafter.config, head, batch, context)}
    assert left == {document for row in batch["documents"][1:] for document in row}


def test_logits_that_are_no_numbers_are_right_about_nothing():
    labels = torch.tensor([[[-100, 3, 0, 0], [-100, 1, 0, 0]]])
    logits = torch.nn.functional.one_hot(labels.clamp(min=0), 5).float().flatten(1, 2)
    assert right_drafts(logits, labels, lambda x: x, 5).tolist() == [[3, 3]]
    # The place of a NaN is what its row's largest entry is said to be.
    logits[0, 2, 0] = torch.nan
    assert right_drafts(logits, labels, lambda x: x, 5).tolist() == [[1, 3]]


def test_e4_evaluation_walks_the_answers(tmp_path, monkeypatch):
    """The trainer's numbers are those of the answers walked one by one, whatever the rows."""
    target, documents = dense_target(), make_documents(5)
    sources = ["code", "chat", "code", "maths", "chat"]
    data = [{**document, "source": source} for document, source in zip(documents, sources, strict=True)]
    trainer = make_trainer(tmp_path, target, eval_dataset=data, drafter=trained_like(target, documents))
    calls, original = [], trainer.target.context_hidden_states
    monkeypatch.setattr(trainer.target, "context_hidden_states", lambda *a: calls.append(1) or original(*a))
    metrics = trainer.evaluate() | trainer.state.log_history[-1]["details"]
    # Loss and walk share the target's forward.
    assert len(calls) == len(trainer.eval_dataset)
    answers = walk_documents(target, trainer.model, documents)
    committed = [n for answer in answers for n in answer.committed]
    accepted = np.array([n for answer in answers for n in answer.accepted])
    assert metrics["eval_acceptance_length"] == sum(committed) / len(committed) > 1.8
    assert metrics["eval_fully_accepted_blocks"] == (accepted == BLOCK_SIZE - 1).mean()
    for slot in range(1, BLOCK_SIZE):
        assert metrics[f"eval_acceptance_slot_{slot}"] == pytest.approx((accepted >= slot).mean())
    for source in set(sources):
        own = [n for a in answers if sources[a.document] == source for n in a.committed]
        assert metrics[f"eval_acceptance_length_{source}"] == sum(own) / len(own)
    for split in ({"row_length": 128}, {"per_device_eval_batch_size": 3}):
        given = datasets.Dataset.from_list(data)
        again = make_trainer(tmp_path, target, eval_dataset=given, drafter=trainer.model, **split)
        other = again.evaluate() | again.state.log_history[-1]["details"]
        walked = [name for name in metrics if "acceptance" in name or "accepted" in name]
        assert {name: other[name] for name in walked} == {name: metrics[name] for name in walked}


def test_chats_keep_their_source(tmp_path):
    """Two answers of a chat are two documents of its source; a chat that names none is of another."""
    turn = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]
    chats = [{"messages": turn * 2, "source": "talk"}, {"messages": turn, "source": None}]
    given = {"eval_dataset": datasets.Dataset.from_list(chats), "processing_class": byte_tokenizer()}
    trainer = make_trainer(tmp_path, row_length=160, **given)
    assert trainer.eval_dataset.sources == ["talk", "talk", "other"]
    trainer.evaluate()
    names = {name for name in trainer.state.log_history[-1]["details"] if name.startswith("eval_acceptance_length_")}
    assert names == {"eval_acceptance_length_talk", "eval_acceptance_length_other"}


def test_a_collator_of_ones_own_keeps_the_acceptance_at_random_anchors(tmp_path, caplog):
    trainer = make_trainer(tmp_path, eval_dataset=make_documents(3))
    whole = trainer.data_collator
    trainer.data_collator = lambda rows: {k: v for k, v in whole(rows).items() if k != "supervised_runs"}
    metrics = trainer.evaluate()
    assert "supervised_runs" in caplog.text
    assert metrics["eval_acceptance_length"] >= 1 and "eval_acceptance_slot_1" not in metrics


# --- decoding ---


def test_e7_a_hybrid_target_is_decoded_although_generate_refuses_it():
    target, answer = target_and_answer("hybrid")
    oracle = oracle_for(target, answer, [True, False, True])
    with refused(ValueError, "stateful"):
        target.generate(IDS, assistant_model=oracle, speculation_type="dflash", max_new_tokens=12)
    output = speculative_generate(target, oracle, IDS, 12)
    assert output.sequences[0].tolist() == answer[: len(PROMPT) + 12] and output.committed == [2, 2, 2, 2, 2, 1]


def test_nothing_of_the_generation_config_bends_greedy_decoding(hugging_face_log):
    """Nor is anything of it a warning, greedy or sampled."""
    target, answer = dense_target(), target_and_answer("dense")[1]
    expected = answer[len(PROMPT) : len(PROMPT) + 20]
    config, unused = target.generation_config, next(token for token in range(272) if token not in answer)
    config.update(do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.5, suppress_tokens=[expected[-1]])
    config.update(forced_eos_token_id=7, num_beams=3, max_length=9, min_new_tokens=15, cache_implementation="static")
    config.update(use_cache=False, eos_token_id=[unused], pad_token_id=None)
    before, sampled = config.to_dict(), DecodingSettings(6, temperature=0.7, top_p=0.9, top_k=20)
    hugging_face_log.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = measure_acceptance(target, oracle_for(target, answer, [True] * 3), [PROMPT], 20, progress=False)
        measure_acceptance(target, drafter_for(target), [PROMPT], progress=False, settings=sampled)
    assert report.prompts[0].output_ids == expected and report.lossless is True
    assert report.prompts[0].committed == [4, 4, 4, 4, 3]
    assert target.generation_config is config and config.to_dict() == before
    assert not hugging_face_log.records


def test_n7_texts_and_chats_are_taken(tmp_path):
    """By the target's tokenizer or one that is given; a base model's, without template, reads texts as they are."""
    dense_target().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = Qwen3ForCausalLM.from_pretrained(tmp_path)
    drafter, chat = drafter_for(target), [{"role": "user", "content": "Hi"}]

    def rows(*prompts, tokenizer=None):
        report = measure_acceptance(target, drafter, prompts, 4, progress=False, processing_class=tokenizer)
        assert report.lossless
        return [prompt.prompt_ids for prompt in report.prompts]

    written = byte_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    texts = ["Hi", chat, {"prompt": "Hi"}, {"messages": chat}]
    assert rows(*texts, PROMPT, IDS, IDS[0]) == [written] * 4 + [PROMPT] * 3
    plain = byte_tokenizer(chat_template=None)
    assert rows("Hi", tokenizer=plain) == [plain("Hi")["input_ids"]]
    with refused(ValueError, "prompt"):
        rows(*chat)
    with refused(ValueError, "chat template"):
        rows(chat, tokenizer=plain)
    # N11: in the mode that the drafter was trained in.
    (tmp_path / "training.json").write_text('{"recipe": {"enable_thinking": false}}')
    drafter.config.name_or_path = drafter.name_or_path = str(tmp_path)
    thinking = byte_tokenizer("{{ enable_thinking }}")
    assert thinking.decode(rows("Hi", tokenizer=thinking)[0]) == "False"


def test_a_report_holds_outputs_and_counts_and_is_json():
    target, answer = target_and_answer("dense")
    oracle = oracle_for(target, answer, [True, False, True])
    report = measure_acceptance(target, oracle, [PROMPT], 10, check_lossless=False, progress=False)
    data = json.loads(json.dumps(report.to_dict()))
    (prompt,) = data.pop("prompts")
    assert data.pop("tokens_per_second") == pytest.approx(10 / prompt.pop("seconds"))
    known = {name: value for name, value in data.items() if value is not None}
    assert known.pop("acceptance_length") == 9 / 5 and known.pop("acceptance_length_without_last_block") == 2.0
    assert known.pop("slot_acceptance") == [1.0, 0.0, 0.0] and known.pop("committed_histogram") == [1, 4, 0, 0]
    own = {"block_size": 4, "max_new_tokens": 10, "batch_size": 1}
    assert known == {"committed_tokens": 9, "forwards": 5, "num_prompts": 1, "num_ties": 0, **own}
    assert {name: value for name, value in prompt.items() if value is not None} == {
        "prompt_ids": PROMPT,
        "output_ids": answer[len(PROMPT) : len(PROMPT) + 10],
        "committed": [2, 2, 2, 2, 1],
        # The budget cuts off the target's own token behind the last draft.
        "accepted": [1, 1, 1, 1, 1],
        "forwards": 5,
    }


@pytest.mark.parametrize("gap", [None, 1e-6, 1e-2])
@pytest.mark.parametrize("first", [3, 8])
def test_a_difference_at_a_tie_is_counted_apart(monkeypatch, gap, first):
    """The first token that differs, and the gap of the target's logits there; an end too early is no tie."""
    target, answer = target_and_answer("dense")
    ids = answer[: len(PROMPT) + (10 if first == 3 else first)]
    if first == 3:
        ids[len(PROMPT) + 3 :: 4] = [7, 7]
    with torch.no_grad():
        logits = target(torch.tensor([answer[: len(PROMPT) + first]])).logits[:, -1:]
    if gap is not None:
        logits = torch.zeros(1, 1, 272)
        logits[..., 5], logits[..., 9] = 1.0, 1.0 - gap
    monkeypatch.setattr(target, "forward", lambda **kwargs: type("Output", (), {"logits": logits}))
    given = [SpeculativeOutput(torch.tensor([ids]), [4, 5], [3, 4])]
    monkeypatch.setattr(acceptance, "speculative_generate_batch", lambda *args, **kwargs: given)
    settings = {"settings": DecodingSettings(10), "plain": [PlainAnswer(answer[len(PROMPT) : len(PROMPT) + 10], 1.0)]}
    report = measure_acceptance(target, drafter_for(target), [PROMPT], progress=False, **settings)
    (prompt,), (best, second), tie = report.prompts, logits[0, 0].topk(2).values.tolist(), gap == 1e-6 and first == 3
    assert (prompt.lossless, prompt.first_difference, prompt.tie) == (False, first, tie)
    assert prompt.top2_gap == pytest.approx(best - second, abs=1e-6) and (report.lossless, report.num_ties) == (
        tie,
        tie,
    )


@pytest.mark.parametrize(
    ("prompts", "given", "names"),
    [
        ([], {}, ["prompt"]),
        ("Hi", {}, ["prompts", "Hi"]),
        ([PROMPT, []], {}, ["Prompt 1", "[1, 0]"]),
        ([torch.zeros(2, 4)], {}, ["Prompt 0", "[2, 4]"]),
        ([[3, 272]], {}, ["Prompt 0", 272]),
        ([PROMPT], {"max_new_tokens": 1}, ["max_new_tokens", 1]),
        ([PROMPT], {"max_new_tokens": 8, "settings": DecodingSettings(4)}, ["max_new_tokens", "settings"]),
        ([PROMPT], {"eos_token_id": 5, "settings": DecodingSettings(4)}, ["eos_token_id", "settings"]),
        ([PROMPT], {"settings": DecodingSettings(4, num_draft_tokens=4)}, ["num_draft_tokens", 4]),
        ([PROMPT, [1]], {"plain": [PlainAnswer([1], 1.0)]}, ["1 plain answers", "2 prompts"]),
    ],
)
def test_bad_prompts_and_settings_are_refused_before_decoding(monkeypatch, prompts, given, names):
    target, _ = target_and_answer("dense")
    monkeypatch.setattr(acceptance, "speculative_generate_batch", lambda *args, **kwargs: pytest.fail("decoded"))
    with refused(ValueError, *names):
        measure_acceptance(target, drafter_for(target), prompts, progress=False, **given)


@pytest.mark.parametrize("name", ["dense", "hybrid"])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.6}, {"batch_size": 2, "num_draft_tokens": 2}])
def test_e5_walk_and_decoding_agree_on_sampled_answers(name, given, hugging_face_log):
    """And on greedy ones, of several prompts at once too; both speeds come from the same run."""
    target, answer = target_and_answer(name)
    documents = [{"input_ids": answer, "supervised_spans": [[len(PROMPT), len(answer)]]}]
    settings, prompts = DecodingSettings(24, **given), [PROMPT, PROMPT[:2], [3, 9]]
    drafter = trained_like(target, documents)
    plain = plain_answers(target, prompts, settings, progress=False)
    hugging_face_log.clear()
    report = measure_acceptance(target, drafter, prompts, progress=False, settings=settings, plain=plain)
    assert report.acceptance_length > 1
    assert walked_acceptance_length(target, drafter, report, progress=False) == report.acceptance_length
    assert not hugging_face_log.records
    # The seed is the settings'.
    again = measure_acceptance(target, drafter, prompts, progress=False, settings=settings, plain=plain)
    assert [p.output_ids for p in again.prompts] == [p.output_ids for p in report.prompts]
    if "temperature" not in given:
        assert report.lossless and [p.output_ids for p in report.prompts] == [a.output_ids for a in plain]
    assert report.plain_tokens_per_second == pytest.approx(72 / sum(a.seconds for a in plain))
    assert report.speed_up == pytest.approx(report.tokens_per_second / report.plain_tokens_per_second)
    assert f"{given.get('batch_size', 'one')} sequence" in markdown({"d": report}, {})


@pytest.mark.parametrize(("decoded", "warns"), [(0.975, False), (0.965, True), (1.029, False), (1.035, True)])
def test_e5_a_gap_between_walk_and_decoding_is_a_warning(monkeypatch, hugging_face_log, decoded, warns):
    """The walk commits one token per block; decoding is made to say otherwise."""
    target, _ = target_and_answer("dense")
    report = report_of([1] * 35)
    monkeypatch.setattr(AcceptanceReport, "acceptance_length", decoded)
    monkeypatch.setattr(acceptance, "walk_documents", lambda *args: [WalkedAnswer(0, [1] * 35, [0] * 35)])
    walked_acceptance_length(target, drafter_for(target), report, progress=False)
    assert ("1.000" in hugging_face_log.text) == warns


# --- statistics ---


def report_of(*committed, prompts=None, max_new_tokens=100):
    """A report of prompts whose verifications committed the given numbers."""
    prompts = prompts or [[i] for i in range(len(committed))]
    answers = [
        PromptAcceptance(prompt, list(range(sum(tokens) + 1)), list(tokens), [n - 1 for n in tokens], True)
        for prompt, tokens in zip(prompts, committed, strict=True)
    ]
    return AcceptanceReport(answers, block_size=4, max_new_tokens=max_new_tokens)


def test_e4_the_acceptance_length_is_pooled_over_unequal_prompts():
    report = report_of([4, 4, 4, 4, 4, 4], [1, 1], [])
    assert report.acceptance_length == 26 / 8
    assert report.acceptance_length_without_last_block == 21 / 6
    assert report.lossless is True
    unchecked = PromptAcceptance([1], [2, 3], [1], [0])
    assert AcceptanceReport([*report.prompts, unchecked], 4, 9).lossless is None
    assert math.isnan(report_of([], [3]).acceptance_length_without_last_block)


def timed(*times):
    """A report of prompts with the seconds of either decoding; their answers have 2, 3, 4, .. tokens."""
    prompts = [
        PromptAcceptance([1], [0] * n, [1], [0], seconds=own, plain_seconds=plain, plain_tokens=n)
        for n, (own, plain) in enumerate(times, start=2)
    ]
    return AcceptanceReport(prompts, 4, 9)


def test_the_interval_of_the_speed_up_is_that_of_its_resamples():
    report = timed((1.0, 2.0), (1.5, 2.0), (0.5, 2.0), (3.0, 2.0))
    draws = np.random.default_rng(0).integers(0, 4, (acceptance.RESAMPLES, 4))
    drawn = [replace(report, prompts=[report.prompts[i] for i in draw]).speed_up for draw in draws]
    assert report.speed_up_interval(0.9) == pytest.approx(tuple(np.quantile(drawn, [0.05, 0.95])))
    assert timed((1.0, 2.0)).speed_up_interval() == pytest.approx((2.0, 2.0))
    assert all(math.isnan(x) for x in timed().speed_up_interval())


def test_the_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        # Prompts of unequal length and ease; blocks of an easy one commit more. The pooled truth is E[sum] / E[count].
        counts, eases = rng.integers(1, 12, 60), rng.uniform(0.1, 0.9, 60)
        report = report_of(*[(1 + rng.binomial(3, p, n)).tolist() for n, p in zip(counts, eases, strict=True)])
        low, high = report.bootstrap_interval(confidence=0.9)
        hits += low <= 2.5 <= high
    assert 0.82 <= hits / 200 <= 0.97


def test_the_difference_pairs_the_prompts():
    before, after = report_of([1, 1], [3, 3], [2, 2]), report_of([2, 2], [4, 4], [3, 3])
    # Unpaired draws would spread from -1 to 3.
    assert bootstrap_difference(before, after) == pytest.approx((1.0, 1.0))
    low, high = bootstrap_difference(before, report_of([1, 2], [3, 3], [2, 1]))
    assert low < 0 < high
    for other in (report_of([1, 1], [3, 3], [2, 2], max_new_tokens=50), report_of([1]), replace(after, prompts=[])):
        with refused(ValueError, "max_new_tokens=100", f"{len(other.prompts)} prompts"):
            bootstrap_difference(before, other)
    with refused(ValueError, "confidence", 95):
        before.bootstrap_interval(confidence=95)


# --- what reports show ---


def test_slots_positions_and_groups_of_a_report():
    prompts = [
        PromptAcceptance([0], [0] * 9, [4, 1, 3], [3, 0, 3], True, source="a", language="en", seconds=1.0),
        PromptAcceptance([1], [0] * 3, [2], [1], True, source="b|\nc", language="en", seconds=2.0),
        PromptAcceptance([2], [0], [], [], True, source="a", seconds=1.0),
    ]
    report = AcceptanceReport(prompts, block_size=4, max_new_tokens=9)
    assert report.slot_acceptance == [3 / 4, 2 / 4, 2 / 4] and report.committed_histogram == [1, 1, 1, 1]
    assert report.by_position(4) == [
        {"position": 0, "blocks": 2, "acceptance_length": 3.0},
        {"position": 4, "blocks": 2, "acceptance_length": 2.0},
    ]
    assert [len(group.prompts) for group in report.groups("source").values()] == [2, 1]
    assert report.groups("language")["en"].acceptance_length == 10 / 4
    assert (
        report.tokens_per_second == 13 / 4
        and math.isnan(report.speed_up)
        and math.isnan(report.speed_up_interval()[0])
    )
    # Names do not break the tables.
    text = markdown({"x|y": report}, {})
    assert "| b\\| c | 1 | 2.00 |" in text and "| x\\|y | 2.50 |" in text
    assert all(line.startswith("|") for line in text.split("\n\n", 1)[1].splitlines() if line)


def test_n12_a_plot_names_target_drafters_and_prompts_without_paths(tmp_path, monkeypatch):
    figures, make = [], acceptance.new_figure
    monkeypatch.setattr(acceptance, "new_figure", lambda *args: figures.append(make(*args)) or figures[-1])
    reports = {name: report_of([2, 3], [1]) for name in ("/home/me/runs/a$x^$b", "z-lab/_own", "old/b/merged")}
    plot_reports(reports, tmp_path / "plot.png", "/models/Qwen3-4B/")
    ((figure, (slots, *_)),) = figures
    title = figure.get_suptitle()
    legend = [text.get_text() for text in slots.get_legend().get_texts()]
    assert legend == [r"a\$x^\$b", " _own", "merged"]
    assert "Qwen3-4B" in title and "_own" in title and "2 prompts" in title and "/" not in title
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert plot_label("_own") == " _own" and plot_label("a$b") == r"a\$b"
    assert short_names(["one/merged", "two/merged"]) == ["one merged", "two merged"]
    assert short_names(["http://h:1/v1", "http://h:2/v1"]) == ["h:1 v1", "h:2 v1"]


# --- on a GPU, where the fast kernels of hybrid targets roll back too ---


# Logits that are nearer than this may change places with the order of summation, which differs between a verification
# and a single token; recurrent kernels multiply fp32 in TF32. A wrong state moves logits by about 1.
NEARLY_EQUAL = {torch.float32: 5e-3, torch.bfloat16: 0.1}


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e1_e5_answers_are_the_targets_own_up_to_ties_and_walked_alike(name, dtype, batch_size):
    # The recurrent kernels take heads of no less than this; where they are, hybrid targets run on a GPU alone.
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if name == "hybrid" else {}
    target, prompts = TARGETS[name](**heads).to("cuda", dtype), [PROMPT, [7], PROMPT[:3]]
    settings = DecodingSettings(40, batch_size=batch_size)
    plain = plain_answers(target, prompts, settings, progress=False)
    rows = [(prompt, prompt + answer.output_ids) for prompt, answer in zip(prompts, plain, strict=True)]
    documents = [{"input_ids": ids, "supervised_spans": [[len(prompt), len(ids)]]} for prompt, ids in rows]
    drafter = trained_like(target.float(), documents, device="cuda").to(dtype)
    target.to(dtype)
    report = measure_acceptance(target, drafter, prompts, progress=False, settings=settings, plain=plain)
    for prompt in report.prompts:
        assert prompt.lossless or prompt.top2_gap <= NEARLY_EQUAL[dtype], (prompt.first_difference, prompt.top2_gap)
    sampled = replace(settings, temperature=2.0, top_p=0.9)
    assert measure_acceptance(target, drafter, prompts, progress=False, settings=sampled).acceptance_length >= 1
    if dtype == torch.float32:
        assert report.acceptance_length > 1.3
        walked = walked_acceptance_length(target, drafter, report, progress=False)
        assert walked == pytest.approx(report.acceptance_length, rel=0.1)


@pytest.mark.gpu
def test_evaluation_walks_with_compiled_layers(tmp_path):
    """The walk's blocks come in the shapes that the layers are compiled for."""
    documents = [{"input_ids": list(range(60)), "supervised_spans": [[5, 60]]} for _ in range(6)]
    target = dense_target()
    drafter = drafter_for(target, block_size=16, layer_types=["full_attention"], window=None)
    arguments = DFlashTrainingArguments(
        output_dir=str(tmp_path), row_length=128, num_anchors=16, max_steps=2, report_to="none", save_strategy="no"
    )
    trainer = DFlashTrainer(drafter, target, arguments, train_dataset=documents, eval_dataset=documents)
    trainer.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_acceptance_length"] == second["eval_acceptance_length"] >= 1
