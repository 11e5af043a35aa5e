# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the target's own tokens, whatever the drafter says, and its own distribution when sampled."""

import functools
import itertools
import logging
import math
import time
from threading import Thread

import numpy as np
import pytest
import torch
from oracle import PROMPT, TARGETS, drafter_for, greedy, oracle_for, target_and_answer, trained_like, written_by
from reference import reference_drafter, reference_module
from tiny import (
    HIDDEN_SIZE,
    MASK_TOKEN_ID,
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
from transformers.cache_utils import DynamicCache, DynamicLayer

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
def test_e4_l1_a_block_is_whole_or_cut_at_the_budget(budget, committed):
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


@pytest.mark.parametrize("name", TARGETS)
def test_md1_the_drafter_reads_layer_outputs_before_the_anchor_and_raw_embeddings(name):
    target, prompt = TARGETS[name](), [7]
    # Taps as a server's hooks would read them, on a table that the target scales on its way in.
    target.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 1.5)
    taps = [0, 2, target.config.num_hidden_layers - 2]
    oracle = oracle_for(target, greedy(target, prompt, 20), lambda n: [n % 3 > 0, n % 2 > 0], target_layer_ids=taps)
    rounds = []
    oracle.register_forward_pre_hook(lambda module, args: rounds.append(args))
    output = speculative_generate(target, oracle, torch.tensor([prompt]), 20)

    outputs = {}
    for i in taps:
        target.get_decoder().layers[i].register_forward_hook(
            lambda module, args, output, i=i: outputs.__setitem__(i, output)
        )
    known, context = len(prompt) + 1, torch.empty(1, 0, len(taps) * HIDDEN_SIZE)
    assert len(set(output.committed)) > 1
    for (noise_embeds, new_context), committed in zip(rounds, output.committed, strict=True):
        # What earlier rounds have given is in the drafter's cache.
        context = torch.cat([context, new_context], dim=1)
        with torch.no_grad():
            target(output.sequences[:, : known - 1], use_cache=False)
        torch.testing.assert_close(context, torch.cat([outputs[i] for i in taps], dim=-1), rtol=1e-4, atol=1e-4)
        block = [output.sequences[0, known - 1].item(), MASK_TOKEN_ID, MASK_TOKEN_ID]
        assert torch.equal(noise_embeds, target.get_input_embeddings().weight[block][None])
        known += committed


def test_a_drafter_of_another_type_than_the_target():
    target = dense_target()
    expected = greedy(target, PROMPT, 12)
    output = speculative_generate(target, drafter_for(target).to(torch.bfloat16), IDS, 12)
    assert output.sequences[0].tolist() == expected
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


BLOCK_SIZE = 5
# The recurrent kernels work in fp32 whatever the model's type is, so equal logits can swap places there.
MIN_GAP = {"dense": 0.0, "tied_llama": 0.0, "hybrid": 1e-4}
KINDS = ["random", *range(1, BLOCK_SIZE + 1), "mixed"]


@torch.no_grad()
def own_answer(target, prompt, budget, with_stop):
    """The target's own greedy answer with its stop tokens, and the smallest gap between its two best logits."""
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": budget, "do_sample": False}
    answer, stop = target.generate(prompt, **arguments), []
    if with_stop:
        stop = [271, answer[0, prompt.shape[1] + budget // 2].item()]
        answer = target.generate(prompt, eos_token_id=stop, **arguments)
    first, second = target(answer, use_cache=False).logits[0, prompt.shape[1] - 1 : -1].topk(2).values.T
    return answer, stop, (first - second).min().item()


def is_lossless_or_tied(name, number):
    """Compare one answer of one kind of drafter; False where it was left out for a tie."""
    kind, target = KINDS[number % len(KINDS)], TARGETS[name](seed=number % 4).double()
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(0, 272, (1, [1, 2, 7, 23, 64, 130][number % 6]), generator=generator)
    budget = int(torch.randint(2, 40, (1,), generator=generator))
    answer, stop, gap = own_answer(target, prompt, budget, with_stop=number % 3 == 2)
    if gap < MIN_GAP[name]:
        return False
    # The mask token is one that the target writes, so that a drafted slot and a known token look alike.
    mask = {"mask_token_id": answer[0, prompt.shape[1]].item()}
    right = [slot != kind for slot in range(1, BLOCK_SIZE)]
    if kind == "mixed":
        right = lambda n: [n % 5 > 0, n % 3 > 0, n % 2 > 0, True]  # noqa: E731
    if kind == "random":
        drafter = drafter_for(target, block_size=BLOCK_SIZE, **mask)
    else:
        drafter = oracle_for(target, answer[0].tolist(), right, **mask)
    output = speculative_generate(target, drafter.double(), prompt, budget, eos_token_id=stop)
    assert output.sequences.tolist() == answer.tolist(), (name, kind, number)
    assert sum(output.committed) == answer.shape[1] - prompt.shape[1] - 1
    assert not isinstance(kind, int) or set(output.committed[:-1]) <= {kind}
    return True


@pytest.mark.parametrize("number", range(12))
def test_e1_a_dozen_answers_are_the_targets_own(number):
    assert is_lossless_or_tied(list(TARGETS)[number % 3], number)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_e1_answers_of_all_kinds_are_the_targets_own(name):
    """67 answers of each target; those with a tie are counted, and must be few."""
    assert sum(not is_lossless_or_tied(name, number) for number in range(12, 79)) <= 5


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("make_target", [dense_target, hybrid_target, mixed_target])
def test_e1_several_prompts_at_once_are_answered_as_each_alone(monkeypatch, make_target, use_cache):
    """Prompts and answers of unequal lengths, blocks and waiting tokens that differ from row to row."""
    monkeypatch.setattr(generation, "MAX_WAITING", 3)
    target, prompts = make_target(), [PROMPT, [7], [9, 80, 80, 3, 6, 200] * 4, [11] * 12]
    documents = written_by(target, prompts, 40)
    stop = documents[0]["input_ids"][len(PROMPT) + 11]
    drafter = trained_like(target, documents, steps=40, target_layer_ids=[0, 2])
    rows = [torch.tensor([prompt]) for prompt in prompts]
    for settings in ({"num_draft_tokens": 2}, {}):
        outputs = speculative_generate_batch(target, drafter, rows, 40, stop, use_cache=use_cache, **settings)
        for row, output in zip(rows, outputs, strict=True):
            alone = speculative_generate(target, drafter, row, 40, stop, use_cache=use_cache, **settings)
            assert output.sequences.tolist() == [greedy(target, row[0].tolist(), 40, eos_token_id=stop)]
            assert (output.committed, output.accepted) == (alone.committed, alone.accepted)
        most = max(n for output in outputs for n in output.committed)
        assert most == 1 + settings.get("num_draft_tokens", 3)
    assert len({len(output.committed) for output in outputs}) > 2


def test_a_target_that_scales_its_embeddings_is_decoded_rightly():
    """A Gemma: drafts come from the rows of its table, as in training, so that an overfitted drafter is accepted."""
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
    documents, stops = written_by(target, prompts, 60), []
    for prompt, document in zip(prompts, documents, strict=True):
        # The reference shortens its last block near the budget: the last token that is new ends each answer earlier.
        answer = document["input_ids"][len(prompt) :]
        end = max(answer.index(token) for token in answer)
        stops.append(answer[end])
        document["input_ids"] = prompt + answer[: end + 1]
        document["supervised_spans"] = [[len(prompt), len(prompt) + end + 1]]
    window = 11 if len(layers) > 1 else None
    drafter = trained_like(target, documents, block_size=6, steps=20, layer_types=layers, window=window)
    theirs = reference_drafter(reference, drafter)
    committed, expected = [], []
    for prompt, document, stop in zip(prompts, documents, stops, strict=True):
        ids = torch.tensor([prompt])
        output = speculative_generate(target, drafter, ids, 100, stop)
        stats = reference.dflash_generate(theirs, target, ids, 100, [stop], return_stats=True)
        assert output.sequences[0].tolist() == stats.output_ids[0].tolist() == document["input_ids"]
        committed.append(output.committed)
        expected.append(stats.acceptance_lengths)
    assert committed == expected
    # An answer of one token has no verification.
    walked = [answer.committed for answer in walk_documents(target, drafter, documents)]
    assert walked == [rounds for rounds in expected if rounds]
    blocks = [n for rounds in committed for n in rounds]
    assert sum(blocks) / len(blocks) > 1.5 and len(set(blocks)) >= 4


# --- what is refused ---


def refuses(*names, input_ids=IDS, budget=5, target=None, **fields):
    target = target or dense_target(num_layers=5)
    arguments = {name: fields.pop(name) for name in ("num_draft_tokens", "use_cache") if name in fields}
    with refused(ValueError, *names):
        speculative_generate(target, drafter_for(target, **fields), input_ids, budget, **arguments)


def test_what_cannot_be_decoded_is_refused():
    refuses("[1, 0]", input_ids=torch.zeros(1, 0, dtype=torch.long))
    refuses("[2, 3]", input_ids=torch.zeros(2, 3, dtype=torch.long))
    refuses("float32", input_ids=torch.zeros(1, 3))
    refuses(272, "tokenizer", input_ids=torch.tensor([[3, 272]]))
    refuses(-1, input_ids=torch.tensor([[-1, 3]]))
    refuses("max_new_tokens", 0, budget=0)
    refuses("num_draft_tokens", 4, "1 to 3", num_draft_tokens=4)
    for field, other in {"hidden_size": 32, "vocab_size": 280, "num_target_layers": 7}.items():
        refuses(field, other, **{field: other})
    target = dense_target()
    refuses("Qwen3Model", target=target.model)
    del target.model.layers[5:]
    refuses(5, 6, target=target, num_target_layers=6)
    refuses("GPT2LMHeadModel", target=GPT2LMHeadModel(GPT2Config(vocab_size=272, n_embd=64, n_layer=6, n_head=2)))


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "sample_drafts": True}])
def test_logits_that_are_no_numbers_are_an_error(sampled):
    """Else both models' NaN would give the same token, and all drafts would seem right."""
    target = dense_target()
    oracle, drafter = oracle_for(target, greedy(target, PROMPT, 30), [True] * 3), drafter_for(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(torch.nan)
    with refused(FloatingPointError, "NaN"):
        speculative_generate(target, drafter, IDS, 9, **sampled)
    # Those of the prefill, or of the second verification.
    for first in (1, 3):
        calls = itertools.count(1)

        def damage(module, args, output, first=first, calls=calls):
            if next(calls) == first:
                output.logits.fill_(torch.nan)

        handle = target.register_forward_hook(damage)
        with refused(FloatingPointError, "target", "NaN"):
            speculative_generate(target, oracle, IDS, 30, **sampled)
        handle.remove()
        assert next(calls) == first + 1


def test_more_positions_than_the_target_knows_are_a_warning(caplog, monkeypatch):
    target = dense_target(max_position_embeddings=27)
    monkeypatch.setattr(logging.getLogger("dflash_hf"), "propagate", True)
    # 7 + 19 tokens, and three slots behind the last token but one.
    for budget, warns in ((18, False), (19, True)):
        speculative_generate(target, drafter_for(target), IDS, budget)
        assert ("max_position_embeddings=27" in caplog.text) == warns


# --- the head and the caches ---


class IntegerHead(torch.nn.Module):
    """A head that stores rounded rows."""

    def __init__(self, weight):
        super().__init__()
        self.scale = weight.abs().max().item() / 127
        self.weight = torch.nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, hidden_states):
        return hidden_states @ (self.weight.to(hidden_states.dtype) * self.scale).T


@pytest.mark.parametrize("use_cache", [True, False])
def test_drafts_go_through_the_head_as_in_training(use_cache):
    """In its own type where it stores integers, with the target's scale and cap on logits."""
    target = dense_target()
    target.set_output_embeddings(IntegerHead(target.get_output_embeddings().weight.detach()))
    target.config.logit_scale, target.config.final_logit_softcapping = 4.0, 3.0
    drafter, hidden = drafter_for(target), []
    drafter.norm.register_forward_hook(lambda module, args, output: hidden.append(output))
    with torch.no_grad(), DecodingState(target, drafter, use_cache) as state:
        state.prefill(IDS)
        logits = state.draft(torch.tensor([[8]]))
        expected = FrozenHead(target, "cpu").logits(hidden[-1][0, 1:])
    torch.testing.assert_close(logits, expected)
    assert 1.0 < logits.abs().max() < 3.0


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_e6_cached_and_uncached_decoding_draft_the_same_hidden_states(name):
    target, answer = target_and_answer(name)
    oracle = oracle_for(target, answer, VARIED)
    drafted, outputs = {True: [], False: []}, []
    for use_cache, hidden in drafted.items():
        handle = oracle.norm.register_forward_hook(lambda module, args, output, hidden=hidden: hidden.append(output))
        outputs.append(speculative_generate(target, oracle, IDS, 30, use_cache=use_cache))
        handle.remove()
    assert outputs[0].committed == outputs[1].committed and set(outputs[0].committed) >= {1, 2, 4}
    for one, other in zip(drafted[True], drafted[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "max_waiting"), [("dense", 48), ("hybrid", 48), ("hybrid", 2), ("hybrid", 0)])
def test_e6_the_caches_hold_the_committed_tokens_and_nothing_else(monkeypatch, name, max_waiting):
    """Whether committed tokens wait long, a round or two, or not at all in front of recurrent layers."""
    monkeypatch.setattr(generation, "MAX_WAITING", max_waiting)
    target, answer = target_and_answer(name)
    oracle = oracle_for(target, answer, VARIED)
    known = torch.tensor([answer])
    with torch.no_grad(), DecodingState(target, oracle) as state:
        state.prefill(known[:, : len(PROMPT)])
        length = len(PROMPT) + 1
        for committed in (1, 3, 4, 4, 2, 1, 1, 4):
            anchor = known[:, length - 1 : length]
            state.draft(anchor)
            # The slots after those that are committed hold anything.
            drafts = known[:, length : length + 3].clone()
            drafts[:, committed - 1 :] = 7
            logits = state.verify(anchor, drafts)
            state.commit([committed])
            expected = target(torch.cat([known[:, :length], drafts], dim=1), use_cache=False).logits[0, -4:]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            length += committed
            # The drafter reads the new ones in the next round.
            assert (
                state.drafter_cache.get_seq_length() == length - 1 - committed == length - 1 - state.context.shape[1]
            )
            assert all(len(x.waiting[0]) <= max_waiting + 4 for x in state.recurrent)
            attention = [layer for layer in state.target_cache.layers if isinstance(layer, DynamicLayer)]
            assert {layer.get_seq_length() for layer in attention} == {length - 1}


# --- inside generate ---


def generate(target, drafter, input_ids=IDS, **arguments):
    arguments = {"max_new_tokens": 21, **arguments}
    return target.generate(input_ids, custom_generate=speculative_decoding, drafter=drafter, **arguments)


@pytest.mark.parametrize("name", TARGETS)
def test_generate_takes_it_as_custom_generate(name):
    target, answer = target_and_answer(name)
    oracle, forwards = oracle_for(target, answer, [True, False, True]), []
    handle = target.register_forward_hook(lambda *args: forwards.append(1))
    output = generate(target, oracle)
    handle.remove()
    assert output[0].tolist() == answer[: len(PROMPT) + 21]
    assert len(forwards) == 11
    stop = answer[len(PROMPT) + 4]
    stopped = generate(target, oracle, eos_token_id=[271, stop])
    assert stopped[0].tolist() == answer[: answer.index(stop, len(PROMPT)) + 1]


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_generate_takes_padded_prompts(name):
    target, answer = target_and_answer(name)
    prompts, stop = torch.tensor([PROMPT, [259] * 5 + [3, 9]]), answer[len(PROMPT) + 4]
    mask = (prompts != 259).long()
    output = generate(target, drafter_for(target), prompts, attention_mask=mask, eos_token_id=stop)
    expected = target.generate(prompts, attention_mask=mask, eos_token_id=stop, max_new_tokens=21, do_sample=False)
    assert output.tolist() == expected.tolist() and (output[0] == 259).any() and output[1, 2:].tolist()[3:] != [259]


@pytest.mark.parametrize("name", ["dense", "hybrid"])
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "temperature": 2.0}])
def test_a_streamer_gets_the_tokens_of_each_round_and_an_end(name, sampled):
    """Also where decoding fails: its reader would wait for ever."""
    target, answer = target_and_answer(name)
    oracle, texts = oracle_for(target, answer, [True, False, True]), []
    streamer = TextIteratorStreamer(byte_tokenizer(), skip_prompt=True, timeout=20)
    reader = Thread(target=lambda: texts.extend(streamer))
    reader.start()
    output = generate(target, oracle, token_streamer=streamer, **sampled)
    reader.join(20)
    assert "".join(texts) == byte_tokenizer().decode(output[0, len(PROMPT) :])
    puts = []
    streamer.put, streamer.end = lambda tokens: puts.append(tokens.flatten().tolist()), lambda: puts.append("end")
    if not sampled:
        generate(target, oracle, token_streamer=streamer)
        new = answer[len(PROMPT) : len(PROMPT) + 21]
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
    expected = greedy(target, PROMPT, 20)
    oracle = oracle_for(target, expected, [True, False, True])
    for use_cache in (True, False):
        output = speculative_generate(target, oracle, IDS, 20, use_cache=use_cache)
        assert output.sequences[0].tolist() == expected and set(output.committed[:-1]) == {2}
    assert generate(target, oracle, max_new_tokens=20)[0].tolist() == expected
    outputs = speculative_generate_batch(target, drafter_for(target), [IDS, torch.tensor([[7]])], 20)
    assert [output.sequences[0].tolist() for output in outputs] == [expected, greedy(target, [7], 20)]
    with refused(ValueError, "mm_encoder_outputs"):
        generate(target, oracle, mm_encoder_outputs={"image": torch.zeros(1)})


def test_generate_samples_with_its_own_settings():
    target, answer = target_and_answer("dense")
    call = functools.partial(generate, target, drafter_for(target), max_new_tokens=12, do_sample=True, temperature=5.0)
    torch.manual_seed(0)
    first = call(top_k=0)
    assert not torch.equal(first, call(top_k=0))
    torch.manual_seed(0)
    assert torch.equal(first, call(top_k=0))
    # One token kept is greedy, by top-k as by min-p.
    assert call(top_k=1)[0].tolist() == call(top_k=0, min_p=1.0)[0].tolist() == answer[: len(PROMPT) + 12]


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


def test_temperature_zero_is_greedy_and_little_temperature_nearly_so():
    target, answer = target_and_answer("dense")
    oracle = oracle_for(target, answer, [True, False, True])
    for arguments in ({"temperature": 0.0, "top_p": 0.5}, {"temperature": 1e-4}, {"temperature": 3.0, "top_k": 1}):
        output = speculative_generate(target, oracle, IDS, 21, **arguments)
        assert output.sequences[0].tolist() == answer[: len(PROMPT) + 21]
        assert output.committed == [2] * 10
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}):
        with refused(ValueError, *wrong, *wrong.values()):
            Sampling.of(**{"temperature": 1.0, **wrong})


def test_a_generator_makes_samples_repeat_themselves():
    target, _ = target_and_answer("dense")
    call = functools.partial(speculative_generate, target, drafter_for(target), IDS, 12, temperature=4.0)
    outputs = [call(generator=torch.Generator().manual_seed(seed)).sequences for seed in (0, 0, 1)]
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def small_models(name, vocab_size):
    """A target of a few tokens with far from certain answers, and a random drafter of three slots."""
    target = TARGETS[name](num_layers=4, vocab_size=vocab_size, pad_token_id=None, eos_token_id=None)
    target.get_output_embeddings().weight.data *= 0.4
    drafter = drafter_for(target, vocab_size=vocab_size, mask_token_id=1, block_size=3, target_layer_ids=[0, 2])
    return target, drafter


@torch.no_grad()
def exact(target, prompt, vocab_size, settings):
    """The probabilities of all strings of three tokens after a prompt, by the target's own forwards."""
    rows = {}
    for length in range(3):
        strings = list(itertools.product(range(vocab_size), repeat=length))
        logits = target(torch.tensor([[*prompt, *string] for string in strings]), use_cache=False).logits[:, -1]
        rows |= {string: distribution(row, **settings) for string, row in zip(strings, logits, strict=True)}
    strings = itertools.product(range(vocab_size), repeat=3)
    return [math.prod(rows[tokens[:k]][tokens[k]] for k in range(3)) for tokens in strings]


def check_samples(name, count, sample_drafts, vocab_size):
    settings = {"temperature": 1.3, "top_p": 0.95}
    target, drafter = small_models(name, vocab_size)
    expected = exact(target, PROMPT_OF_FEW, vocab_size, settings)
    settings |= {"sample_drafts": sample_drafts, "generator": torch.Generator().manual_seed(0)}
    # Several at once, from one generator.
    rows = [torch.tensor([PROMPT_OF_FEW])] * count
    outputs = speculative_generate_batch(target, drafter, rows, 3, [], **settings)
    tokens = torch.cat([output.sequences[:, -3:] for output in outputs])
    assert_drawn_from(cell_counts(tokens, vocab_size), expected)


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_decoded_samples_have_the_targets_distribution(name):
    check_samples(name, 1000, sample_drafts=name == "dense", vocab_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_many_decoded_samples_have_the_targets_distribution(name, sample_drafts):
    check_samples(name, 3000, sample_drafts, vocab_size=5)


@pytest.mark.gpu
def test_sampling_draws_on_the_device():
    target = dense_target().cuda()
    settings = {"temperature": 2.0, "top_p": 0.9, "generator": torch.Generator("cuda").manual_seed(0)}
    output = speculative_generate(target, drafter_for(target).cuda(), IDS, 12, **settings)
    assert output.sequences.shape == (1, len(PROMPT) + 12) and output.sequences.device.type == "cuda"


# --- What a round costs beside a forward of a block, in floating-point operations


# Qwen3.6-27B's proportions: of the hidden size 3.4 for the MLP, 0.4 for keys and 1.2 for values of recurrent layers.
PROPORTIONS = {
    "hidden_size": 256,
    "intermediate_size": 870,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 48,
    "head_dim": 64,
}


def operations(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@torch.no_grad()
def cost_of_rounds(target, drafter, prompt_length):
    """Operations of rounds that commit 1 to b tokens in turn, over those of the target's forward of a block."""
    prompt = torch.arange(prompt_length)[None] % 250
    block = torch.arange(16)[None]
    cache = DynamicCache(config=target.config)
    target(prompt, cache=cache, use_cache=True, logits_to_keep=1)
    forward = operations(lambda: target(block, cache=cache, use_cache=True))
    total = 0
    with DecodingState(target, drafter) as state:
        state.prefill(prompt)
        # The first draft reads the prompt.
        state.draft(block[:, :1])
        state.verify(block[:, :1], block[0, 1:])
        state.commit(block[:, :5])
        commits = [1 + 5 * i % 16 for i in range(16)]
        for committed in commits:
            total += operations(lambda: state.draft(block[:, :1]))
            total += operations(lambda: state.verify(block[:, :1], block[0, 1:]))
            state.commit(block[:, :committed])
    return total / len(commits) / forward


def test_a_round_with_a_hybrid_target_costs_little_more_than_a_forward_whatever_the_prompt():
    target = hybrid_target(num_layers=16, **PROPORTIONS)
    sizes = {name: PROPORTIONS[name] for name in ("hidden_size", "intermediate_size")}
    drafter = drafter_for(target, layer_types=["full_attention"], window=None, block_size=16, **sizes)
    short, long = cost_of_rounds(target, drafter, 40), cost_of_rounds(target, drafter, 1500)
    assert 1.0 < short <= 1.4 and 1.0 < long <= 1.4
    # In proportion to the forward, which itself attends to the prompt.
    assert long <= short + 0.02
