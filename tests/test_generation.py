# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the target's own tokens, whatever the drafter says."""

import functools
import logging

import pytest
import torch
from naive import random_drafter
from tiny import HIDDEN_SIZE, MASK_TOKEN_ID, VOCAB_SIZE, dense_target, hybrid_target, llama_target
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from dflash_hf import DFlashDraftModel
from dflash_hf import generation as decoding_state
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.generation import DecodingState, speculative_decoding, speculative_generate


torch.set_num_threads(1)

TARGETS = {"dense": dense_target, "tied_llama": llama_target, "hybrid": hybrid_target}
PROMPT = [5, 80, 3, 201, 17, 42, 9]


class OracleDrafter(DFlashDraftModel):
    """A drafter that is told the answer, and which of its slots shall be right.

    Its last hidden states are rows of the target's head, so that its tokens go through all of the decoding code.
    """

    def tell(self, target, sequence, right_slots):
        """Draft `sequence[position]` where `right_slots(anchor)[k - 1]` holds for slot k, and another token else."""
        self.told = target.get_output_embeddings().weight, sequence, right_slots
        return self

    def forward(self, noise_embeds, context_hidden_states, attention_mask=None, position_ids=None, cache=None):
        past = cache.get_seq_length() if cache is not None else 0
        output = super().forward(noise_embeds, context_hidden_states, attention_mask, position_ids, cache)
        head, sequence, right_slots = self.told
        anchor = past + context_hidden_states.shape[1]
        anchor = anchor if position_ids is None else position_ids[0, -noise_embeds.shape[1]]
        anchor = int(anchor)
        tokens = []
        for slot, right in enumerate(right_slots(anchor), start=1):
            token = sequence[anchor + slot] if anchor + slot < len(sequence) else 0
            tokens.append(token if right else (token + 1) % 256)
        output.last_hidden_state = torch.cat([output.last_hidden_state[:, :1], head[tokens][None]], dim=1)
        return output


def drafter_for(target, **fields):
    """A random drafter of one causal sliding and one full layer."""
    fields = {
        "layer_types": ["sliding_attention", "full_attention"],
        "window": 9,
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "num_target_layers": target.config.get_text_config().num_hidden_layers,
        **fields,
    }
    return random_drafter(fields.pop("layer_types"), **fields)


def oracle_for(target, sequence, right_slots, **fields):
    """An oracle; `right_slots` is a list of booleans for slots 1 to b - 1, or a function of the anchor's position."""
    rights = right_slots if callable(right_slots) else lambda anchor: right_slots
    fields.setdefault("block_size", len(rights(0)) + 1)
    config = drafter_for(target, **fields).config
    return OracleDrafter(config).eval().tell(target, sequence, rights)


def greedy(target, prompt, max_new_tokens, **kwargs):
    ids = torch.tensor([prompt])
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **kwargs
    )
    return output[0].tolist()


@functools.cache
def target_and_answer(name):
    """A target that no test changes, and the prompt with 50 tokens of its greedy answer."""
    target = TARGETS[name]()
    return target, greedy(target, PROMPT, 50)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("prompt", "block_size", "budget"), [(PROMPT, 4, 50), ([7], 9, 20)])
def test_e1_random_drafters_change_no_token(name, prompt, block_size, budget):
    target, _ = target_and_answer(name)
    drafter = drafter_for(target, block_size=block_size)
    output = speculative_generate(target, drafter, torch.tensor([prompt]), budget)
    assert output.sequences[0].tolist() == greedy(target, prompt, budget)
    # The prefill's token is nobody's, all others are some verification's.
    assert sum(output.committed) == budget - 1
    assert all(1 <= n <= block_size for n in output.committed)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_e1_every_acceptance_length_is_lossless_and_counted(name, accepted):
    target, answer = target_and_answer(name)
    expected = answer[: len(PROMPT) + 30]
    # Slots that are right again after a wrong one count for nothing.
    right = [slot != accepted for slot in range(1, 4)]
    output = speculative_generate(target, oracle_for(target, expected, right), torch.tensor([PROMPT]), 30)
    assert output.sequences[0].tolist() == expected
    assert set(output.committed[:-1]) == {accepted}
    assert sum(output.committed) == 29


def test_e4_two_right_one_wrong_one_right_is_three():
    target, answer = target_and_answer("dense")
    oracle = oracle_for(target, answer, [True, True, False, True])
    assert speculative_generate(target, oracle, torch.tensor([PROMPT]), 31).committed == [3] * 10


def test_l1_an_oracle_commits_whole_blocks():
    target, answer = target_and_answer("hybrid")
    oracle = oracle_for(target, answer, [True] * 7)
    assert speculative_generate(target, oracle, torch.tensor([PROMPT]), 33).committed == [8] * 4


@pytest.mark.parametrize(
    ("budget", "committed"), [(1, []), (2, [1]), (8, [7]), (9, [8]), (10, [8, 1]), (14, [8, 5]), (17, [8, 8])]
)
def test_e4_a_block_is_cut_at_the_budget(budget, committed):
    target, expected = target_and_answer("dense")
    output = speculative_generate(target, oracle_for(target, expected, [True] * 7), torch.tensor([PROMPT]), budget)
    assert output.sequences[0].tolist() == expected[: len(PROMPT) + budget]
    assert output.committed == committed


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("right", [[True] * 5, [True, False, True, True, True]])
def test_e4_an_eos_token_ends_the_answer_inside_a_block(name, right):
    target, answer = target_and_answer(name)
    answer = answer[len(PROMPT) :]
    # The first token that comes up new in the middle of the answer.
    end = next(i for i in range(5, 30) if answer[i] not in answer[:i])
    oracle = oracle_for(target, PROMPT + answer, right)
    for eos in (answer[end], [answer[end]], [answer[end], 271], [271, answer[end]]):
        output = speculative_generate(target, oracle, torch.tensor([PROMPT]), 30, eos_token_id=eos)
        assert output.sequences[0].tolist() == PROMPT + answer[: end + 1]
        assert sum(output.committed) == end
    assert greedy(target, PROMPT, 30, eos_token_id=[271, answer[end]]) == PROMPT + answer[: end + 1]


def test_an_answer_that_is_an_eos_token_has_no_verification():
    target = dense_target()
    first = greedy(target, PROMPT, 1)[-1]
    output = speculative_generate(target, drafter_for(target), torch.tensor([PROMPT]), 30, eos_token_id=first)
    assert output.sequences[0].tolist() == [*PROMPT, first]
    assert output.committed == []


def test_eos_tokens_come_from_the_generation_config_unless_given():
    target = dense_target()
    first = greedy(target, PROMPT, 1)[-1]
    target.generation_config.eos_token_id = [271, first]
    drafter, ids = drafter_for(target), torch.tensor([PROMPT])
    assert speculative_generate(target, drafter, ids, 5).sequences.shape[1] == len(PROMPT) + 1
    assert speculative_generate(target, drafter, ids, 5, eos_token_id=271).sequences.shape[1] == len(PROMPT) + 5
    assert speculative_generate(target, drafter, ids, 5, eos_token_id=[]).sequences.shape[1] == len(PROMPT) + 5


@pytest.mark.parametrize("name", TARGETS)
def test_the_mask_token_is_a_token_like_any_other(name):
    target, expected = target_and_answer(name)
    oracle = oracle_for(target, expected, [True] * 3, mask_token_id=expected[len(PROMPT) + 2])
    output = speculative_generate(target, oracle, torch.tensor([PROMPT]), 21)
    assert output.sequences[0].tolist() == expected[: len(PROMPT) + 21]
    assert output.committed == [4] * 5
    prompt = [expected[len(PROMPT) + 2]] * 3
    assert speculative_generate(target, drafter_for(target), torch.tensor([prompt]), 9).sequences[0].tolist() == (
        greedy(target, prompt, 9)
    )


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
    assert len(rounds) == len(output.committed)
    assert len(set(output.committed)) > 1
    for (noise_embeds, new_context), committed in zip(rounds, output.committed, strict=True):
        # What earlier rounds have given is in the drafter's cache.
        context = torch.cat([context, new_context], dim=1)
        with torch.no_grad():
            target(output.sequences[:, : known - 1], use_cache=False)
        expected = torch.cat([outputs[i] for i in taps], dim=-1)
        assert context.shape == expected.shape
        torch.testing.assert_close(context, expected, rtol=1e-4, atol=1e-4)
        block = [output.sequences[0, known - 1].item(), MASK_TOKEN_ID, MASK_TOKEN_ID]
        assert torch.equal(noise_embeds, target.get_input_embeddings().weight[block][None])
        known += committed


def test_a_drafter_of_another_type_than_the_target():
    target = dense_target()
    expected = greedy(target, PROMPT, 12)
    for drafter_type, target_type in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        output = speculative_generate(
            target.to(target_type), drafter_for(target).to(drafter_type), torch.tensor([PROMPT]), 12
        )
        if target_type == torch.float32:
            assert output.sequences[0].tolist() == expected
        assert output.sequences.shape[1] == len(PROMPT) + 12


def test_models_in_training_mode_decode_in_eval_mode_and_get_it_back():
    target = dense_target(attention_dropout=0.5)
    drafter = drafter_for(target, attention_dropout=0.5)
    expected = greedy(target, PROMPT, 12)
    target.train(), drafter.train()
    drafter.activation_checkpointing_enable()
    output = speculative_generate(target, drafter, torch.tensor([PROMPT]), 12)
    assert output.sequences[0].tolist() == expected
    assert target.training and drafter.training and drafter.layers[0].training
    target.eval()
    speculative_generate(target, drafter, torch.tensor([PROMPT]), 2)
    assert drafter.training and not target.training


@pytest.mark.parametrize(
    ("input_ids", "budget", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), 5, r"shape \[1, 0\].*n >= 1"),
        (torch.zeros(2, 3, dtype=torch.long), 5, r"shape \[2, 3\].*one by one"),
        (torch.zeros(3, dtype=torch.long), 5, r"shape \[3\]"),
        (torch.zeros(1, 3, dtype=torch.long), 0, "max_new_tokens is 0"),
        (torch.zeros(1, 3), 5, "the type torch.float32; expected token ids"),
        (torch.tensor([[3, 272]]), 5, "ids 3 to 272, the target's embedding has 272 rows: .*another tokenizer"),
        (torch.tensor([[-1, 3]]), 5, "ids -1 to 3"),
    ],
)
def test_bad_requests_are_refused(input_ids, budget, message):
    target = dense_target(num_layers=5)
    drafter = drafter_for(target)
    with pytest.raises(ValueError, match=message):
        speculative_generate(target, drafter, input_ids, budget)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, the target's is 64"),
        ({"vocab_size": 280}, "vocab_size is 280, the target's is 272"),
        ({"num_target_layers": 7}, "num_target_layers is 7, the target's is 6"),
    ],
)
def test_a_drafter_of_another_target_is_refused(fields, message):
    target = dense_target()
    with pytest.raises(ValueError, match=message):
        speculative_generate(target, drafter_for(target, **fields), torch.tensor([PROMPT]), 5)


def test_a_target_without_head_or_cut_for_training_is_refused():
    target = dense_target()
    drafter = drafter_for(target)
    with pytest.raises(ValueError, match="Qwen3Model has no output head"):
        speculative_generate(target.model, drafter, torch.tensor([PROMPT]), 5)
    del target.model.layers[5:]
    with pytest.raises(ValueError, match="5 of its 6 layers"):
        speculative_generate(target, drafter, torch.tensor([PROMPT]), 5)


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0}, {"temperature": 1.0, "sample_drafts": True}])
@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_that_are_no_numbers_are_an_error(sampled, use_cache):
    """Else both models' NaN would give the same token, and all drafts would seem right."""
    target = dense_target()
    drafter = drafter_for(target)
    with torch.no_grad():
        drafter.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"drafter's logits hold NaN|There is nothing to draw from"):
        speculative_generate(target, drafter, torch.tensor([PROMPT]), 9, use_cache=use_cache, **sampled)
    with torch.no_grad():
        target.get_output_embeddings().weight[3].fill_(torch.inf)
    with pytest.raises(FloatingPointError, match=r"target's logits hold NaN .*float16 ends at 65504"):
        speculative_generate(target, drafter, torch.tensor([PROMPT]), 9, use_cache=use_cache, **sampled)


def test_logits_of_a_verification_are_looked_at_too():
    target, calls = dense_target(), []

    def damage(module, args, output):
        calls.append(1)
        if len(calls) == 3:
            output.logits.fill_(torch.nan)

    oracle = oracle_for(target, greedy(target, PROMPT, 30), [True] * 3)
    target.register_forward_hook(damage)
    with pytest.raises(FloatingPointError, match="target's logits"):
        speculative_generate(target, oracle, torch.tensor([PROMPT]), 30)
    assert len(calls) == 3


def test_more_positions_than_the_target_knows_are_a_warning(caplog):
    target = dense_target(max_position_embeddings=27)
    drafter = drafter_for(target)
    logger = logging.getLogger("dflash_hf.generation")
    logger.addHandler(caplog.handler)
    # 7 + 19 tokens, and three slots behind the last token but one.
    assert speculative_generate(target, drafter, torch.tensor([PROMPT]), 18).sequences.shape[1] == 25
    assert not caplog.records
    for budget in (19, 20):
        speculative_generate(target, drafter, torch.tensor([PROMPT]), budget)
    logger.removeHandler(caplog.handler)
    assert caplog.text.count("max_position_embeddings=27") == len(caplog.records) > 0
    assert len({id(record) for record in caplog.records}) == 1


def test_a_target_whose_layers_are_elsewhere_says_so():
    target = GPT2LMHeadModel(GPT2Config(vocab_size=272, n_embd=64, n_layer=6, n_head=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel keeps its decoder layers in another place"):
        speculative_generate(target, drafter_for(target), torch.tensor([PROMPT]), 5)


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
        state.prefill(torch.tensor([PROMPT]))
        logits = state.draft(torch.tensor([[8]]))
        expected = FrozenHead(target, "cpu").logits(hidden[-1][0, 1:])
    torch.testing.assert_close(logits, expected)
    assert 1.0 < logits.abs().max() < 3.0


# --- caches ---


@pytest.mark.parametrize("name", TARGETS)
def test_e6_cached_and_uncached_decoding_draft_the_same_hidden_states(name):
    target, answer = target_and_answer(name)
    # Half of the slots follow the answer, so that the caches are cropped by different numbers.
    oracle = oracle_for(target, answer, lambda n: [n % 4 > 0, n % 3 > 0, True])
    rounds, outputs = [], []
    handle = oracle.norm.register_forward_hook(lambda module, args, output: rounds.append(output))
    for use_cache in (True, False):
        rounds.append([])
        outputs.append(speculative_generate(target, oracle, torch.tensor([PROMPT]), 30, use_cache=use_cache))
    handle.remove()
    middle = next(i for i, item in enumerate(rounds) if i and isinstance(item, list))
    cached, uncached = rounds[1:middle], rounds[middle + 1 :]
    assert outputs[0].committed == outputs[1].committed and set(outputs[0].committed) >= {1, 2, 4}
    for one, other in zip(cached, uncached, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "max_waiting"), [("dense", 48), ("tied_llama", 48), ("hybrid", 48), ("hybrid", 2), ("hybrid", 0)]
)
def test_e6_the_caches_hold_the_committed_tokens_and_nothing_else(monkeypatch, name, max_waiting):
    """Whether committed tokens wait long, a round or two, or not at all in front of recurrent layers."""
    monkeypatch.setattr(decoding_state, "MAX_WAITING", max_waiting)
    target, answer = target_and_answer(name)
    oracle = oracle_for(target, answer, lambda n: [n % 4 > 0, n % 3 > 0, True])
    known = torch.tensor([answer])
    with torch.no_grad(), DecodingState(target, oracle) as state:
        state.prefill(known[:, : len(PROMPT)])
        length = len(PROMPT) + 1
        for committed in (1, 3, 4, 4, 2, 1, 1, 4):
            anchor = known[:, length - 1 : length]
            state.draft(anchor)
            assert state.drafter_cache.get_seq_length() == length - 1
            # The slots after those that are committed hold anything.
            drafts = known[0, length : length + 3].clone()
            drafts[committed - 1 :] = 7
            logits = state.verify(anchor, drafts)
            state.commit(known[:, length : length + committed])
            expected = target(torch.cat([known[:, :length], drafts[None]], dim=1), use_cache=False).logits[0, -4:]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            length += committed
            assert all(x.waiting is None or x.waiting.shape[1] <= max_waiting + 4 for x in state.recurrent)
            attention = [layer for layer in state.target_cache.layers if isinstance(layer, DynamicLayer)]
            assert {layer.get_seq_length() for layer in attention} == {length - 1}
    assert not any(module._forward_pre_hooks for module in target.modules())


def test_a_verification_reads_one_block_whatever_the_prompt():
    """Committed tokens come back in the recurrent layers alone, and no forward is theirs."""
    target, answer = target_and_answer("hybrid")
    oracle = oracle_for(target, answer, lambda n: [n % 4 > 0, n % 3 > 0, True])
    lengths = []
    handle = target.register_forward_pre_hook(
        lambda m, a, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output = speculative_generate(target, oracle, torch.tensor([PROMPT]), 30)
    handle.remove()
    assert lengths == [len(PROMPT)] + [4] * len(output.committed)


def test_a_sliding_target_is_rolled_back_behind_its_window():
    target = dense_target(use_sliding_window=True, sliding_window=6, max_window_layers=0)
    assert set(target.config.layer_types) == {"sliding_attention"}
    expected = greedy(target, PROMPT, 40)
    oracle = oracle_for(target, expected, lambda n: [n % 4 > 0, n % 3 > 0, True])
    output = speculative_generate(target, oracle, torch.tensor([PROMPT]), 40)
    assert output.sequences[0].tolist() == expected
    assert set(output.committed) >= {1, 2, 4}


def test_a_target_whose_states_cannot_be_rolled_back_says_so(monkeypatch):
    target, answer = target_and_answer("hybrid")
    monkeypatch.setattr(decoding_state, "LinearAttentionLayer", DynamicLayer)
    drafter = drafter_for(target)
    with pytest.raises(ValueError, match=r"Layer 0 of Qwen3_5ForCausalLM keeps its state .*use_cache=False"):
        speculative_generate(target, drafter, torch.tensor([PROMPT]), 9)
    output = speculative_generate(target, drafter, torch.tensor([PROMPT]), 9, use_cache=False)
    assert output.sequences[0].tolist() == answer[: len(PROMPT) + 9]


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_everything_put_on_the_models_is_taken_off_after_an_error(name):
    target = TARGETS[name]()
    drafter = drafter_for(target)
    target.train(), drafter.train()
    failing = drafter.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        speculative_generate(target, drafter, torch.tensor([PROMPT]), 6)
    failing.remove()
    assert not any(module._forward_pre_hooks for module in target.modules())
    assert target.training and drafter.training


# --- inside generate ---


@pytest.mark.parametrize("name", TARGETS)
def test_generate_takes_it_as_custom_generate(name):
    target, answer = target_and_answer(name)
    oracle = oracle_for(target, answer, [True, False, True])
    ids, forwards = torch.tensor([PROMPT]), []
    handle = target.register_forward_hook(lambda *args: forwards.append(1))
    output = target.generate(ids, custom_generate=speculative_decoding, drafter=oracle, max_new_tokens=21)
    handle.remove()
    assert output[0].tolist() == answer[: len(PROMPT) + 21]
    assert len(forwards) == 11
    stop = answer[len(PROMPT) + 4]
    output = target.generate(
        ids, custom_generate=speculative_decoding, drafter=oracle, max_new_tokens=21, eos_token_id=[271, stop]
    )
    assert output[0].tolist() == answer[: answer.index(stop, len(PROMPT)) + 1]


def test_a_multimodal_target_decodes_texts_and_refuses_images():
    """Its own positions have three or four rows, and its forwards get what encoders made of images."""
    text = hybrid_target().config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": HIDDEN_SIZE}
    torch.manual_seed(0)
    target = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    ids, expected = torch.tensor([PROMPT]), greedy(target, PROMPT, 20)
    oracle = oracle_for(target, expected, [True, False, True])
    for use_cache in (True, False):
        output = speculative_generate(target, oracle, ids, 20, use_cache=use_cache)
        assert output.sequences[0].tolist() == expected and set(output.committed[:-1]) == {2}
    call = functools.partial(
        target.generate, ids, custom_generate=speculative_decoding, drafter=oracle, max_new_tokens=20
    )
    assert call()[0].tolist() == expected
    with pytest.raises(ValueError, match="generate was called with mm_encoder_outputs, whose effect would be lost"):
        call(mm_encoder_outputs={"image": torch.zeros(1)})


def test_generate_samples_with_its_own_settings():
    target, _ = target_and_answer("dense")
    call = functools.partial(
        target.generate,
        torch.tensor([PROMPT]),
        custom_generate=speculative_decoding,
        drafter=drafter_for(target),
        max_new_tokens=12,
        do_sample=True,
    )
    torch.manual_seed(0)
    first = call(temperature=5.0, top_k=0)
    assert not torch.equal(first, call(temperature=5.0, top_k=0))
    torch.manual_seed(0)
    assert torch.equal(first, call(temperature=5.0, top_k=0))
    # One token kept is greedy.
    assert call(temperature=5.0, top_k=1)[0].tolist() == target_and_answer("dense")[1][: len(PROMPT) + 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"max_time": 100.0}, "MaxTimeCriteria"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])}, "without padding"),
        ({"drafter": None}, "without a drafter"),
        ({"position_ids": torch.arange(7)[None] + 3}, "position_ids other than 0, 1, 2, .."),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_generate_refuses_what_would_be_lost(arguments, message):
    target, _ = target_and_answer("dense")
    arguments = {"drafter": drafter_for(target), **arguments}
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([PROMPT]), custom_generate=speculative_decoding, max_new_tokens=5, **arguments)
