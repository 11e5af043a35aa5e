# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the target's own tokens, whatever the drafter says, and its own distribution when sampled."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from oracle import PROMPT, TARGETS, drafter_for, greedy, oracle_for, target_and_answer, trained_like, written_by
from reference import reference_drafter, reference_module
from tiny import (
    HIDDEN_SIZE,
    byte_tokenizer,
    dense_target,
    gemma3_target,
    hybrid_target,
    llama_target,
    mixed_target,
    refused,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.cache_utils import DynamicCache

from dflash_hf import generation
from dflash_hf.acceptance import walk_documents
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.generation import (
    DecodingState,
    Sampling,
    speculative_decoding,
    speculative_generate,
    speculative_generate_batch,
)


torch.set_num_threads(1)

IDS = torch.tensor([PROMPT])
VARIED = lambda n: [n % 4 > 0, n % 3 > 0, True]  # noqa: E731 - slots that are right, by the anchor's position


# --- greedy ---


@pytest.mark.parametrize(
    ("budget", "committed"), [(1, []), (2, [1]), (9, [8]), (10, [8, 1]), (14, [8, 5]), (33, [8] * 4)]
)
def test_l1_e4_a_block_is_whole_or_cut_at_the_budget(budget, committed):
    target, expected = target_and_answer("hybrid")
    output = speculative_generate(target, oracle_for(target, expected, [True] * 7), IDS, budget)
    assert output.sequences[0].tolist() == expected[: len(PROMPT) + budget]
    assert output.committed == committed


@pytest.mark.parametrize("right", [[True] * 5, [True, False, True, True, True]])
def test_e4_an_eos_token_ends_the_answer_inside_a_block(right):
    """It is given, as one id or several, or the generation config's."""
    target = hybrid_target()
    answer = greedy(target, PROMPT, 40)[len(PROMPT) :]
    # The first token that comes up new in the middle of the answer.
    end = next(i for i in range(5, 30) if answer[i] not in answer[:i])
    oracle = oracle_for(target, PROMPT + answer, right)
    target.generation_config.eos_token_id = [271, answer[end]]
    for eos in (answer[end], [271, answer[end]], None):
        output = speculative_generate(target, oracle, IDS, 30, eos_token_id=eos)
        assert output.sequences[0].tolist() == PROMPT + answer[: end + 1] and sum(output.committed) == end
    for eos in (271, []):
        assert speculative_generate(target, oracle, IDS, 30, eos).sequences[0].tolist() == PROMPT + answer[:30]


def test_a_drafter_of_another_type_than_the_target():
    target = dense_target()
    output = speculative_generate(target, drafter_for(target).to(torch.bfloat16), IDS, 12)
    assert output.sequences[0].tolist() == greedy(target, PROMPT, 12)
    output = speculative_generate(target.to(torch.bfloat16), drafter_for(target), IDS, 12)
    assert output.sequences.shape[1] == len(PROMPT) + 12


def test_models_are_as_they_were_after_decoding_and_after_an_error():
    """In training mode they decode in eval mode."""
    target = hybrid_target(attention_dropout=0.5)
    drafter = drafter_for(target, attention_dropout=0.5)
    expected = greedy(target, PROMPT, 12)
    target.train(), drafter.train()
    drafter.activation_checkpointing_enable()
    assert speculative_generate(target, drafter, IDS, 12).sequences[0].tolist() == expected
    drafter.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        speculative_generate(target, drafter, IDS, 6)
    assert not any(module._forward_pre_hooks for module in target.modules())
    assert target.training and drafter.training and drafter.layers[0].training


# What a drafter drafts: anything, a number of right tokens in each block, or differently many.
KINDS = ["random", 1, 2, 3, 4, 5, "mixed"]


def is_lossless_or_tied(name, number):
    """Compare one answer of one kind of drafter; False where it was left out for a tie."""
    kind, target = KINDS[number % len(KINDS)], TARGETS[name](seed=number % 4).double()
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(0, 272, ([1, 2, 7, 23, 64, 130][number % 6],), generator=generator).tolist()
    budget = int(torch.randint(2, 40, (1,), generator=generator))
    answer, stop = greedy(target, prompt, budget), []
    if number % 3 == 2:
        stop = [271, answer[len(prompt) + budget // 2]]
        answer = greedy(target, prompt, budget, eos_token_id=stop)
    with torch.no_grad():
        first, second = target(torch.tensor([answer])).logits[0, len(prompt) - 1 : -1].topk(2).values.T
    # The recurrent kernels work in fp32 whatever the model's type is, so equal logits can swap places there.
    if name == "hybrid" and (first - second).min() < 1e-4:
        return False
    # The mask token is one that the target writes, so that a drafted slot and a known token look alike.
    fields = {"block_size": 5, "mask_token_id": answer[len(prompt)]}
    # Slots that are right again after a wrong one count for nothing.
    right = [slot != kind for slot in range(1, 5)]
    right = (lambda n: [n % 5 > 0, n % 3 > 0, n % 2 > 0, True]) if kind == "mixed" else right
    drafter = drafter_for(target, **fields) if kind == "random" else oracle_for(target, answer, right, **fields)
    output = speculative_generate(target, drafter.double(), torch.tensor([prompt]), budget, eos_token_id=stop)
    assert output.sequences.tolist() == [answer], (name, kind, number)
    # The prefill's token is nobody's, all others are some verification's.
    assert sum(output.committed) == len(answer) - len(prompt) - 1
    assert not isinstance(kind, int) or set(output.committed[:-1]) <= {kind}
    return True


@pytest.mark.parametrize("number", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 213))])
def test_e1_a_dozen_answers_are_the_targets_own(number):
    """And two hundred more where slow tests run."""
    assert is_lossless_or_tied(list(TARGETS)[number % 3], number) or number >= 12


@pytest.mark.parametrize("make_target", [dense_target, hybrid_target, mixed_target])
@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_e6_e1_several_prompts_at_once_are_answered_as_each_alone(monkeypatch, make_target, num_draft_tokens):
    """Prompts and answers of unequal lengths, blocks and waiting tokens that differ from row to row."""
    monkeypatch.setattr(generation, "MAX_WAITING", 3)
    target, prompts = make_target(), [PROMPT, [7], [9, 80, 80, 3, 6, 200] * 4, [11] * 12]
    documents = written_by(target, prompts, 40)
    stop = documents[0]["input_ids"][len(PROMPT) + 11]
    drafter = trained_like(target, documents, steps=40, target_layer_ids=[0, 2])
    rows = [torch.tensor([prompt]) for prompt in prompts]
    settings = {"eos_token_id": stop, "num_draft_tokens": num_draft_tokens}
    alone = [speculative_generate(target, drafter, row, 40, **settings) for row in rows]
    assert [a.sequences[0].tolist() for a in alone] == [greedy(target, p, 40, eos_token_id=stop) for p in prompts]
    # With caches and without, the drafter reads the same and drafts the same.
    for use_cache in (True, False):
        outputs = speculative_generate_batch(target, drafter, rows, 40, use_cache=use_cache, **settings)
        for one, output in zip(alone, outputs, strict=True):
            assert torch.equal(one.sequences, output.sequences)
            assert (one.committed, one.accepted) == (output.committed, output.accepted)
    assert {n for one in alone for n in one.committed} == set(range(1, 2 + (num_draft_tokens or 3)))
    assert len({len(one.committed) for one in alone}) > 2


def test_md1_a_target_that_scales_its_embeddings_is_decoded_rightly():
    """A Gemma: drafts come from the rows of its table and from the walk's taps, or nothing would be accepted."""
    target = gemma3_target()
    documents = written_by(target, [PROMPT, [7]], 40)
    drafter = trained_like(target, documents, steps=80, target_layer_ids=[0, 2])
    output = speculative_generate(target, drafter, IDS, 40)
    assert output.sequences[0].tolist() == documents[0]["input_ids"]
    walked, _ = walk_documents(target, drafter, documents)
    assert output.committed == walked.committed and sum(walked.committed) > 2 * len(walked.committed)


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("make_target", [dense_target, llama_target], ids=["qwen3_untied", "llama_tied"])
@pytest.mark.parametrize("layers", [["full_attention"], ["sliding_attention", "full_attention"]], ids=["full", "mix"])
def test_e4_tokens_and_acceptance_length_are_the_references(monkeypatch, make_target, layers):
    """The published implementation (tests/reference.txt), our decoding and our walk over the answers."""
    reference = reference_module()
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    target, prompts = make_target(seed=2), [[7], PROMPT, list(range(40, 63)), [90] * 9]
    documents, rounds = written_by(target, prompts, 60), []
    for prompt, document in zip(prompts, documents, strict=True):
        # The reference shortens its last block near the budget: the last token that is new ends each answer earlier.
        answer = document["input_ids"][len(prompt) :]
        end = len(prompt) + max(answer.index(token) for token in answer) + 1
        document |= {"input_ids": document["input_ids"][:end], "supervised_spans": [[len(prompt), end]]}
    window = 11 if len(layers) > 1 else None
    drafter = trained_like(target, documents, block_size=6, steps=20, layer_types=layers, window=window)
    theirs = reference_drafter(reference, drafter)
    for prompt, document in zip(prompts, documents, strict=True):
        ids, stop = torch.tensor([prompt]), document["input_ids"][-1]
        output = speculative_generate(target, drafter, ids, 100, stop)
        stats = reference.dflash_generate(theirs, target, ids, 100, [stop], return_stats=True)
        assert output.sequences[0].tolist() == stats.output_ids[0].tolist() == document["input_ids"]
        assert output.committed == stats.acceptance_lengths
        # An answer of one token has no verification.
        rounds += [output.committed] if output.committed else []
    assert [answer.committed for answer in walk_documents(target, drafter, documents)] == rounds
    blocks = [n for committed in rounds for n in committed]
    assert sum(blocks) / len(blocks) > 1.5 and len(set(blocks)) >= 4


# --- what is refused ---


def test_what_cannot_be_decoded_is_refused():
    target, drafter = dense_target(), drafter_for(dense_target())
    for ids, budget, settings, names in (
        (torch.zeros(1, 0, dtype=torch.long), 5, {}, ["[1, 0]"]),
        (torch.zeros(2, 3, dtype=torch.long), 5, {}, ["[2, 3]"]),
        (torch.zeros(1, 3), 5, {}, ["float32"]),
        (torch.tensor([[3, 272]]), 5, {}, [272, "tokenizer"]),
        (torch.tensor([[-1, 3]]), 5, {}, [-1]),
        (IDS, 0, {}, ["max_new_tokens", 0]),
        (IDS, 5, {"num_draft_tokens": 4}, ["num_draft_tokens", 4, "1 to 3"]),
    ):
        with refused(ValueError, *names):
            speculative_generate(target, drafter, ids, budget, **settings)
    others = [
        drafter_for(target, **field) for field in ({"hidden_size": 32}, {"vocab_size": 280}, {"num_target_layers": 7})
    ]
    other = GPT2LMHeadModel(GPT2Config(vocab_size=272, n_embd=64, n_layer=6, n_head=2))
    pairs = [*((target, d) for d in others), (target.model, drafter), (other, drafter_for(other)), (target, drafter)]
    for pair, names in zip(
        pairs, ("hidden_size", "vocab_size", "num_target_layers", "Qwen3Model", "GPT2", "5 of its 6"), strict=True
    ):
        if pair == pairs[-1]:
            del target.model.layers[5:]
        with refused(ValueError, names):
            speculative_generate(*pair, IDS, 5)


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "sample_drafts": True}])
def test_logits_that_are_no_numbers_are_an_error(sampled):
    """Else both models' NaN would give the same token, and all drafts would seem right."""
    target, drafter = dense_target(), drafter_for(dense_target())
    # Those of the prefill, or of the second verification.
    for first in (1, 3):
        calls = itertools.count(1)

        def damage(module, args, output, first=first, calls=calls):
            output.logits.fill_(torch.nan if next(calls) == first else 1)

        handle = target.register_forward_hook(damage)
        with refused(FloatingPointError, "target", "NaN"):
            speculative_generate(target, drafter, IDS, 30, **sampled)
        handle.remove()
        assert next(calls) == first + 1
    with torch.no_grad(), refused(FloatingPointError, "NaN"):
        drafter.norm.weight.fill_(torch.nan)
        speculative_generate(target, drafter, IDS, 9, **sampled)


@pytest.mark.parametrize("use_cache", [True, False])
def test_drafts_go_through_the_head_as_in_training(use_cache):
    """With the target's scale and cap on logits."""
    target = dense_target()
    target.config.logit_scale, target.config.final_logit_softcapping = 4.0, 3.0
    drafter, hidden = drafter_for(target), []
    drafter.norm.register_forward_hook(lambda module, args, output: hidden.append(output))
    with torch.no_grad(), DecodingState(target, drafter, use_cache) as state:
        state.prefill(IDS)
        logits = state.draft(torch.tensor([[8]]))
        expected = FrozenHead(target, "cpu").logits(hidden[-1][0, 1:])
    torch.testing.assert_close(logits, expected)
    assert 1.0 < logits.abs().max() < 3.0


# --- inside generate ---


def generate(target, drafter, input_ids=IDS, **arguments):
    arguments = {"max_new_tokens": 21, **arguments}
    return target.generate(input_ids, custom_generate=speculative_decoding, drafter=drafter, **arguments)


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_generate_takes_it_as_custom_generate(name):
    target, answer = target_and_answer(name)
    oracle, forwards = oracle_for(target, answer, [True, False, True]), []
    handle = target.register_forward_hook(lambda *args: forwards.append(1))
    assert generate(target, oracle)[0].tolist() == answer[: len(PROMPT) + 21] and len(forwards) == 11
    handle.remove()
    # Prompts are padded on the left and answers on the right.
    prompts = torch.tensor([PROMPT, [259] * 5 + [3, 9]])
    settings = {"attention_mask": (prompts != 259).long(), "eos_token_id": [271, answer[len(PROMPT) + 4]]}
    output = generate(target, drafter_for(target), prompts, **settings)
    expected = target.generate(prompts, max_new_tokens=21, do_sample=False, **settings)
    assert output.tolist() == expected.tolist() and (output[:, len(PROMPT) :] == 259).any()


@pytest.mark.parametrize("name", ["dense", "hybrid"])
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "temperature": 2.0}])
def test_a_streamer_gets_the_tokens_of_each_round_and_an_end(name, sampled):
    """Also where decoding fails: its reader would wait for ever."""
    target, answer = target_and_answer(name)
    oracle, puts = oracle_for(target, answer, [True, False, True]), []
    streamer = TextIteratorStreamer(byte_tokenizer(), skip_prompt=True, timeout=20)
    output = generate(target, oracle, token_streamer=streamer, **sampled)[0, len(PROMPT) :]
    assert "".join(streamer) == byte_tokenizer().decode(output)
    streamer.put, streamer.end = lambda tokens: puts.append(tokens.flatten().tolist()), lambda: puts.append("end")
    if not sampled:
        generate(target, oracle, token_streamer=streamer)
        new = output.tolist()
        assert puts == [PROMPT, new[:1], *(new[i : i + 2] for i in range(1, 21, 2)), "end"]
    with refused(ValueError, "num_draft_tokens"):
        generate(target, oracle, token_streamer=streamer, num_draft_tokens=9)
    assert puts[-2:] == [PROMPT, "end"]


def test_a_multimodal_target_decodes_texts_and_refuses_images():
    """Its own positions have three or four rows, and its forwards get what encoders made of images."""
    text = hybrid_target().config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": HIDDEN_SIZE}
    torch.manual_seed(0)
    target = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    drafter, prompts = drafter_for(target), [PROMPT, [7]]
    expected = [greedy(target, prompt, 20) for prompt in prompts]
    for use_cache in (True, False):
        rows = [torch.tensor([prompt]) for prompt in prompts]
        outputs = speculative_generate_batch(target, drafter, rows, 20, use_cache=use_cache)
        assert [output.sequences[0].tolist() for output in outputs] == expected
    assert generate(target, drafter, max_new_tokens=20)[0].tolist() == expected[0]
    with refused(ValueError, "mm_encoder_outputs"):
        generate(target, drafter, mm_encoder_outputs={"image": torch.zeros(1)})


def test_generate_samples_with_its_own_settings():
    target, answer = target_and_answer("dense")
    drafter = drafter_for(target)

    def call(seed, **settings):
        settings |= {"generator": torch.Generator().manual_seed(seed), "do_sample": True, "temperature": 5.0}
        return generate(target, drafter, **settings)[0].tolist()

    assert call(0, top_k=0) == call(0, top_k=0) != call(1, top_k=0)
    # One token kept is greedy, by top-k as by min-p.
    assert call(0, top_k=1) == call(0, top_k=0, min_p=1.0) == answer[: len(PROMPT) + 21]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"max_time": 100.0}, "MaxTimeCriteria"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1]])}, "attention_mask"),
        ({"position_ids": torch.arange(7)[None] + 3}, "position_ids"),
        ({"output_attentions": True}, "output_attentions"),
        ({"drafter": None}, "drafter"),
        ({"input_ids": IDS.repeat(2, 1), "token_streamer": 1}, "token_streamer"),
    ],
)
def test_generate_refuses_what_would_be_lost(arguments, name):
    target, _ = target_and_answer("dense")
    with refused(ValueError, name):
        generate(target, **{"drafter": drafter_for(target), **arguments})


# --- sampling ---


SETTINGS = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 1.7},
    "warm_top_p": {"temperature": 1.5, "top_p": 0.8},
    "top_k_top_p": {"temperature": 1.3, "top_k": 3, "top_p": 0.9},
}
PROMPT_OF_FEW = [2, 0, 1, 1, 2]


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


def test_a_drafter_that_is_the_target_is_always_accepted():
    logits = torch.randn(500, 4, 7, generator=torch.Generator().manual_seed(0))
    sampling = Sampling.of(0.9, top_p=0.8, sample_drafts=True)
    drafts, proposed_from = sampling.propose(logits[:, :3])
    accepted, tokens = sampling.verify(drafts, proposed_from, logits)
    assert (accepted == 3).all() and torch.equal(tokens[:, :3], drafts)


@torch.no_grad()
def exact(target, settings):
    """The probabilities of all strings of three tokens after the prompt, by the target's own forwards."""
    rows, vocab_size = {}, target.config.vocab_size
    for length in range(3):
        strings = list(itertools.product(range(vocab_size), repeat=length))
        logits = target(torch.tensor([[*PROMPT_OF_FEW, *string] for string in strings])).logits[:, -1]
        rows |= {string: distribution(row, **settings) for string, row in zip(strings, logits, strict=True)}
    strings = itertools.product(range(vocab_size), repeat=3)
    return [math.prod(rows[tokens[:k]][tokens[k]] for k in range(3)) for tokens in strings]


@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize(("name", "settings"), [*(("dense", key) for key in SETTINGS), ("hybrid", "warm_top_p")])
def test_decoded_samples_have_the_targets_distribution(name, settings, sample_drafts):
    """Answers, decoded together from one generator, of a target of few tokens and far from certain answers."""
    few = {"vocab_size": 4, "pad_token_id": None, "eos_token_id": None}
    target, count, settings = TARGETS[name](num_layers=4, **few), 2000 if name == "dense" else 400, SETTINGS[settings]
    target.get_output_embeddings().weight.data *= 0.4
    drafter = drafter_for(target, vocab_size=4, mask_token_id=3, block_size=3, target_layer_ids=[0, 2])
    how = {"sample_drafts": sample_drafts, "generator": torch.Generator().manual_seed(0), **settings}
    outputs = speculative_generate_batch(target, drafter, [torch.tensor([PROMPT_OF_FEW])] * count, 3, [], **how)
    tokens = torch.cat([output.sequences[:, -3:] for output in outputs])
    cells = (tokens * torch.tensor([16, 4, 1])).sum(dim=1)
    assert_drawn_from(torch.bincount(cells, minlength=64), exact(target, settings))
    assert len({tuple(output.committed) for output in outputs}) > 1


# --- What a round costs beside a forward of a block, in floating-point operations


# Qwen3.6-27B's proportions: of the hidden size 3.4 for the MLP, 0.4 for keys and 1.2 for values of recurrent layers.
SIZES = {"hidden_size": 256, "intermediate_size": 870}
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 48,
}


def operations(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@torch.no_grad()
def cost_of_rounds(target, drafter, prompt_length):
    """Operations of rounds that commit 1 to b tokens in turn, over those of the target's forward of a block."""
    prompt, block, total = torch.arange(prompt_length)[None] % 250, torch.arange(16)[None], 0
    cache = DynamicCache(config=target.config)
    target(prompt, cache=cache, use_cache=True, logits_to_keep=1)
    forward = operations(lambda: target(block, cache=cache, use_cache=True))
    with DecodingState(target, drafter) as state:
        state.prefill(prompt)
        # The first round's draft reads the prompt.
        for index in range(17):
            cost = operations(lambda: state.draft(block[:, :1]))
            cost += operations(lambda: state.verify(block[:, :1], block[:, 1:]))
            state.commit(block[:, : 1 + 5 * index % 16])
            total += cost if index else 0
    return total / 16 / forward


def test_a_round_with_a_hybrid_target_costs_little_more_than_a_forward_whatever_the_prompt():
    target = hybrid_target(num_layers=16, head_dim=64, **SIZES, **HEADS)
    drafter = drafter_for(target, layer_types=["full_attention"], window=None, block_size=16, **SIZES)
    short, long = cost_of_rounds(target, drafter, 40), cost_of_rounds(target, drafter, 1500)
    assert 1.0 < short <= 1.4 and 1.0 < long <= 1.4
    # In proportion to the forward, which itself attends to the prompt.
    assert long <= short + 0.02
