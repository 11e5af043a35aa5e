# SPDX-License-Identifier: Apache-2.0
"""Whole decodings against the published reference implementation (tests/reference.txt)."""

import time

import pytest
import torch
from test_reference import reference, reference_drafter  # noqa: F401 (a fixture)
from test_walk import trained_like, written_by
from tiny import dense_target, llama_target

from dflash_hf.acceptance import walk_documents
from dflash_hf.generation import speculative_generate


torch.set_num_threads(1)

FULL, SLIDING = "full_attention", "sliding_attention"
PROMPTS = [[7], [5, 80, 3, 201, 17, 42, 9], list(range(40, 63)), [90] * 9]


def own_ends(target, prompts):
    """Documents of prompts and answers that end by themselves, and the stop token of each.

    The reference shortens its last block near the budget, so the budget must be out of reach.
    """
    documents, stops = written_by(target, prompts, 60), []
    for prompt, document in zip(prompts, documents, strict=True):
        answer = document["input_ids"][len(prompt) :]
        # The last token that is new to the answer.
        end = max(answer.index(token) for token in answer)
        stops.append(answer[end])
        document["input_ids"] = prompt + answer[: end + 1]
        document["supervised_spans"] = [[len(prompt), len(prompt) + end + 1]]
    return documents, stops


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("make_target", [dense_target, llama_target], ids=["qwen3_untied", "llama_tied"])
@pytest.mark.parametrize("layers", [[FULL], [SLIDING, FULL]], ids=["full", "mix"])
def test_e4_tokens_and_acceptance_length_are_the_references(reference, monkeypatch, make_target, layers):  # noqa: F811
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    target = make_target(seed=2)
    documents, stops = own_ends(target, PROMPTS)
    drafter = trained_like(
        target, documents, block_size=6, steps=20, layer_types=layers, window=11 if SLIDING in layers else None
    )
    theirs = reference_drafter(reference, drafter)
    committed, expected = [], []
    for prompt, document, stop in zip(PROMPTS, documents, stops, strict=True):
        ids = torch.tensor([prompt])
        output = speculative_generate(target, drafter, ids, 100, stop)
        stats = reference.dflash_generate(theirs, target, ids, 100, [stop], return_stats=True)
        assert output.sequences[0].tolist() == stats.output_ids[0].tolist() == document["input_ids"]
        committed.append(output.committed)
        expected.append(stats.acceptance_lengths)
    assert committed == expected
    # An answer of one token has no verification.
    assert [answer.committed for answer in walk_documents(target, drafter, documents)] == [
        rounds for rounds in expected if rounds
    ]
    blocks = [n for prompt in committed for n in prompt]
    assert sum(blocks) / len(blocks) > 1.5 and len(set(blocks)) >= 4
