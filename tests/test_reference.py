# SPDX-License-Identifier: Apache-2.0
"""The drafter and its decoding against the published reference implementation (tests/reference.txt)."""

from itertools import pairwise
from types import ModuleType

import pytest
import torch
from naive import oracle_forward, pack_rows, packed_forward, random_drafter, random_inputs
from reference import reference_drafter, reference_module
from tiny import MASK_TOKEN_ID, dense_target, llama_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel


FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS = {
    "full": {"layer_types": [FULL] * 3},
    "sliding": {"layer_types": [SLIDING] * 2, "window": 6},
    "qwen36_mix": {"layer_types": [SLIDING] * 4 + [FULL], "window": 6},
    "window_of_one_block": {"layer_types": [SLIDING, FULL], "window": 4},
    "all_causal": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": True},
    "all_bidirectional": {"layer_types": [SLIDING, FULL], "window": 6, "is_causal": False},
    "biases": {"layer_types": [FULL, SLIDING], "window": 6, "attention_bias": True},
}
# One rounding of each product comes to 1.6e-5 of hidden states as large as these (S1).
ROUNDING = 5e-5


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return reference_module()


@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
def test_hidden_states_equal_the_references(reference, fields):
    """All blocks of packed documents in one forward of ours against one block at a time of the reference's."""
    drafter = random_drafter(**fields)
    theirs = reference_drafter(reference, drafter)
    rows = pack_rows([[(21, [1, 3, 8, 20]), (9, [4])], [(13, [6, 12])]], padding=2, unused=1)
    noise, context = random_inputs(drafter, rows)
    with torch.no_grad():
        packed = packed_forward(drafter, rows, noise, context)
        for row, index, start, anchor in rows.blocks:
            slots = slice(index * 4, index * 4 + 4)
            inputs = {
                "noise_embedding": noise[row : row + 1, slots],
                "target_hidden": context[row : row + 1, start : start + anchor],
                "position_ids": torch.arange(anchor + 4)[None],
            }
            expected = theirs(**inputs)
            torch.testing.assert_close(packed[row : row + 1, slots], expected, rtol=0, atol=ROUNDING)
            single = drafter(inputs["noise_embedding"], inputs["target_hidden"]).last_hidden_state
            torch.testing.assert_close(single, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
def test_gradients_equal_the_references(reference, fields):
    drafter = random_drafter(**fields)
    theirs = reference_drafter(reference, drafter)
    rows = pack_rows([[(15, [9])]])
    noise, context = random_inputs(drafter, rows)
    packed_forward(drafter, rows, noise, context).pow(3).mean().backward()
    hidden = theirs(noise_embedding=noise, target_hidden=context[:, :9], position_ids=torch.arange(13)[None])
    hidden.pow(3).mean().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in drafter.named_parameters():
        assert expected[name].grad.abs().max() > 0
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("make_target", [dense_target, llama_target], ids=["qwen3_untied", "llama_tied"])
@pytest.mark.parametrize("fields", [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 11}], ids=["full", "mix"])
def test_decoding_commits_the_references_tokens_round_by_round(reference, monkeypatch, make_target, fields):
    target = make_target()
    fields = {**fields, "use_sliding_window": bool(fields), "num_hidden_layers": 2}
    config = DFlashDraftConfig.from_target_config(target.config, mask_token_id=MASK_TOKEN_ID, block_size=6, **fields)
    torch.manual_seed(1)
    drafter = DFlashDraftModel(config).eval()
    theirs = reference_drafter(reference, drafter)
    prompt = torch.randint(0, 256, (1, 13), generator=torch.Generator().manual_seed(3))
    # The reference shortens its last block at the budget, so a stop token ends the answer well before it.
    greedy = target.generate(prompt, max_new_tokens=80, do_sample=False)[0].tolist()
    stop = next(token for i, token in enumerate(greedy) if i >= 45 and token not in greedy[13:i])
    answer = greedy[: greedy.index(stop, 13) + 1]

    our_rounds, their_rounds, accepts = [], [], [0, 5, 2, 3, 5, 1]
    ours = oracle_forward(drafter, target, greedy, accepts, our_rounds)
    monkeypatch.setattr(drafter, "forward", ours)
    oracle = oracle_forward(theirs, target, greedy, accepts, their_rounds, states_of=lambda output: output)
    monkeypatch.setattr(theirs, "forward", oracle)
    generated = target.generate(
        prompt,
        max_new_tokens=80,
        do_sample=False,
        eos_token_id=stop,
        assistant_model=drafter,
        speculation_type="dflash",
    )
    expected = reference.dflash_generate(theirs, target, prompt, max_new_tokens=80, stop_token_ids=[stop])
    assert generated[0].tolist() == expected[0].tolist() == answer
    anchors = [r["anchor"] for r in our_rounds]
    assert anchors == [r["anchor"] for r in their_rounds]
    assert len({b - a for a, b in pairwise(anchors)}) >= 4
    for our, their in zip(our_rounds, their_rounds, strict=True):
        torch.testing.assert_close(our["hidden"], their["hidden"], rtol=0, atol=ROUNDING)
