# SPDX-License-Identifier: Apache-2.0
"""One key head under a mask: torch's memory-efficient kernel would read the wrong rows of the mask on CUDA."""

import copy

import pytest
import torch
from naive import pack_rows, packed_forward, random_drafter, random_inputs
from oracle import drafter_for
from tiny import gemma3_target, mixed_target, windowed_target
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_hf import FrozenTarget
from dflash_hf import masking as sdpa_attention
from dflash_hf.frozen_target import varied_lengths
from dflash_hf.generation import DecodingState
from dflash_hf.masking import register_sdpa_attention, whole_heads_attention


class Layer(torch.nn.Module):
    num_key_value_groups = 4


@pytest.mark.parametrize(
    ("queries", "key_heads", "masked", "device", "copied"),
    [
        (65, 1, True, "cuda", True),
        (65, 1, False, "cuda", False),
        (65, 2, True, "cuda", False),
        (1, 1, True, "cuda", False),
        (65, 1, True, "cpu", False),
    ],
)
def test_g1_one_key_head_is_copied_only_where_a_mask_on_cuda_needs_it(
    queries, key_heads, masked, device, copied, monkeypatch
):
    calls = []
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", lambda *args, **options: calls.append(args))
    with FakeTensorMode():
        query = torch.empty(2, 4, queries, 8, device=device)
        key, value = (torch.empty(2, key_heads, 65, 8, device=device) for _ in range(2))
        mask = torch.empty(2, 1, queries, 65, dtype=torch.bool, device=device) if masked else None
        whole_heads_attention(Layer(), query, key, value, mask)
    (module, _, given_key, given_value, _) = calls[0]
    assert (given_key is not key) is (given_value is not value) is copied
    # Neither expanded without a copy, nor once more by transformers.
    assert not copied or (given_key.shape == (2, 4, 65, 8) and given_key.is_contiguous())
    assert hasattr(module, "num_key_value_groups") is not copied


def test_g1_all_models_attend_by_it_unless_somebody_else_has_registered_another(monkeypatch):
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is whole_heads_attention
    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setitem(mapping, "sdpa", sdpa_attention_forward)
    register_sdpa_attention()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is whole_heads_attention
    monkeypatch.setitem(mapping, "sdpa", eager := lambda: None)
    register_sdpa_attention()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is eager


# 1 more than a multiple of 64, and of 32 for the tiles of large heads.
LENGTHS = [33, 65, 129]
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
EACH = [pytest.mark.gpu, pytest.mark.parametrize("length", LENGTHS), pytest.mark.parametrize("dtype", TOLERANCES)]


def each(test):
    """On a GPU, at every length and in both precisions."""
    for mark in EACH:
        test = mark(test)
    return test


TARGETS = {"mixed": mixed_target, "windowed": windowed_target, "gemma 3": gemma3_target}


def on_device(name, dtype):
    """A target with sdpa, and its twin with eager attention."""
    model = TARGETS[name]().to("cuda", dtype)
    model.set_attn_implementation("sdpa")
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return model, twin


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).cuda()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Row by row `[..., D]`: one wrong row among many right ones would hide in a whole."""
    errors = (actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert errors.max() < TOLERANCES[actual.dtype] * 2, errors.max()


@each
@pytest.mark.parametrize("head_dim", [32, 256])
@torch.no_grad()
def test_g1_attention_with_one_key_head_sees_its_own_rows_of_the_mask(head_dim, length, dtype):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, length, head_dim, device="cuda", dtype=dtype) for h in (4, 1, 1))
    index = torch.arange(length, device="cuda")
    mask = (index <= index[:, None]) & (index > index[:, None] - 8)
    scores = (query.float() @ key.float().mT * head_dim**-0.5).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ value.float()).transpose(1, 2)
    with varied_lengths():
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), query, key, value, mask.expand(2, 1, -1, -1))
    assert_close(output, expected)


@each
@pytest.mark.parametrize("name", TARGETS)
def test_g1_documents_one_per_row_have_the_features_of_eager_attention(name, length, dtype):
    targets = [FrozenTarget(model, [1, 2], packed=False) for model in on_device(name, dtype)]
    assert_close(*(target.context_hidden_states(ids(3, length)) for target in targets))


@each
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_g1_decoding_reads_a_prompt_as_eager_attention_does(use_cache, name, length, dtype):
    results = []
    for model in on_device(name, dtype):
        drafter = drafter_for(model, target_layer_ids=[1, 2], num_key_value_heads=1).to("cuda", dtype).eval()
        drafter.set_attn_implementation(model.config._attn_implementation)
        with DecodingState(model, drafter, use_cache) as state, varied_lengths():
            logits, context = state.prefill(ids(1, length)), state.context
            results.append([context, torch.cat([logits, state.draft(ids(1, 1)), state.verify(ids(1, 1), ids(3))])])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@each
@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_g1_padded_prompts_end_as_with_eager_attention(name, length, dtype):
    prompts, mask = ids(3, length), torch.ones(3, length, dtype=torch.long, device="cuda")
    mask[1, :20] = 0
    logits = [model(prompts, attention_mask=mask, logits_to_keep=5).logits for model in on_device(name, dtype)]
    assert_close(*logits)


@each
@torch.no_grad()
def test_g1_a_drafter_with_one_key_head_drafts_as_with_eager_attention(length, dtype):
    """One block of so many slots after each other anchor of two rows."""
    block_size = {33: 11, 65: 13, 129: 43}[length]
    anchors = [7 * i + 3 for i in range(length // block_size)]
    rows = pack_rows([[(90, anchors)], [(90, anchors)]])
    rows.document_ids, rows.position_ids = rows.document_ids.cuda(), rows.position_ids.cuda()
    rows.anchor_positions = rows.anchor_positions.cuda()
    results = []
    for attention in ("sdpa", "eager"):
        fields = {"num_key_value_heads": 1, "block_size": block_size, "attention": attention, "window": 48}
        drafter = random_drafter(["sliding_attention", "full_attention"], **fields).to("cuda", dtype)
        inputs = (tensor.to("cuda", dtype) for tensor in random_inputs(drafter, rows))
        with varied_lengths():
            results.append(packed_forward(drafter, rows, *inputs))
    assert results[0].shape[1] == length
    assert_close(*results)
