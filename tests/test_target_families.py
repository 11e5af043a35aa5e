# SPDX-License-Identifier: Apache-2.0
"""Targets of many families: their features, their logits and their answers are their own, whatever is odd in them."""

import random

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, FrozenTarget
from dflash_hf import generation as decoding_state
from dflash_hf.acceptance import DecodingSettings, plain_answers
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.generation import speculative_generate


torch.set_num_threads(1)

SMALL = {
    "vocab_size": 277, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "head_dim": 16, "shared_expert_intermediate_size": 32,
}  # fmt: skip
WINDOW = {"sliding_window": 6}
FAMILIES = {
    "Qwen3": {"head_dim": 20, "hidden_size": 60, "vocab_size": 271},
    "Qwen3Moe": {**EXPERTS, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "Gemma2": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "Gemma3Text": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "GptOss": {**WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo3": WINDOW,
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 12.0},
    "Cohere2": {**WINDOW, "logit_scale": 0.25},
    "Mistral": WINDOW,
    "Starcoder2": WINDOW,
    "Nemotron": {},
    "StableLm": {},
    "Qwen3Next": {**EXPERTS, **DELTA},
    "Qwen3_5MoeText": {**EXPERTS, **DELTA},
}
LENGTHS = [[1, 1, 2, 5, 3, 17, 9], [38], [1] * 38, [0, 5, 0, 33]]


def make(family, **overrides):
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.generation_config.eos_token_id = None
    return model


def check_features(model, packed):
    taps, generator = [0, 2], torch.Generator().manual_seed(0)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, rows, (len(LENGTHS), 38), generator=generator)
    features = FrozenTarget(model, taps, packed=packed).context_hidden_states(ids, LENGTHS)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in filter(None, lengths):
            alone = model(ids[row : row + 1, start : start + length], output_hidden_states=True, use_cache=False)
            expected = torch.cat([alone.hidden_states[tap + 1] for tap in taps], dim=-1)[0]
            actual = features[row, start : start + length]
            assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max(), (row, start)
            start += length


@pytest.mark.parametrize("family", ["Nemotron", "StableLm"])
def test_layers_that_hand_nothing_on_to_their_attention_are_not_packed(family):
    check_features(make(family), packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_documents_features_are_those_of_the_document_alone(family, packed):
    check_features(make(family, **FAMILIES[family]), packed)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Granite", {"logits_scaling": 4.0}),
        ("HyperCLOVAX", {"logits_scaling": 4.0}),
        ("Cohere2", {"logit_scale": 0.25}),
        ("FalconH1", {"lm_head_multiplier": 0.25, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
        ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_drafted_logits_are_scaled_as_the_targets_are(family, overrides):
    model, seen = make(family, **overrides), []
    with model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])):
        logits = model(torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(FrozenHead(model, "cpu").logits(seen[0]), logits)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_targets_own_whatever_is_accepted(family, block_size, monkeypatch):
    """Drafts are right up to a random slot, from prompts shorter than any window or convolution on."""
    model, draws, budget = make(family, **FAMILIES[family]), random.Random(7), 40
    rows = model.get_input_embeddings().weight.shape[0]
    config = DFlashDraftConfig.from_target_config(
        model.config, block_size=block_size, mask_token_id=rows - 1, target_layer_ids=[1], num_hidden_layers=1
    )
    drafter, place = DFlashDraftModel(config).eval(), {}
    original_draft, original_commit = decoding_state.draft_forward, decoding_state.DecodingState.commit

    def draft(*args, **kwargs):
        logits = torch.zeros_like(original_draft(*args, **kwargs))
        right = draws.choice([0, 1, block_size - 1, draws.randrange(block_size)])
        for k, token in enumerate(place["answer"][place["at"] + 1 : place["at"] + block_size]):
            logits[k, (token + (k >= right)) % rows] = 5.0
        return logits

    def commit(self, new_tokens):
        place["at"] += new_tokens.shape[1]
        original_commit(self, new_tokens)

    prompts = [[draws.randrange(rows) for _ in range(length)] for length in (1, 2, 3, 4, 7, 20)]
    answers = plain_answers(model, prompts, DecodingSettings(budget + block_size), progress=False)
    monkeypatch.setattr(decoding_state, "draft_forward", draft)
    monkeypatch.setattr(decoding_state.DecodingState, "commit", commit)
    for prompt, answer in zip(prompts, answers, strict=True):
        place.update(at=0, answer=answer.output_ids)
        output = speculative_generate(model, drafter, torch.tensor([prompt]), budget)
        assert output.sequences[0, len(prompt) :].tolist() == answer.output_ids[:budget]
        assert max(output.committed) > 1
