# SPDX-License-Identifier: Apache-2.0
"""A folder that we saved, read by others' code: the published reference (tests/reference.txt) and transformers."""

import json
from itertools import pairwise

import pytest
import torch
from naive import oracle_forward
from test_reference import reference as reader  # noqa: F401 (a fixture)
from tiny import MASK_TOKEN_ID, dense_target
from transformers import Qwen3Config

from dflash_hf import DFlashDraftConfig, DFlashDraftModel


pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK_SIZE = 6
PROMPT_LENGTH = 13
# The window is shorter than the prompt, so that it hides something from the first block on.
MIX = {"layer_types": [SLIDING, FULL], "sliding_window": 11, "use_sliding_window": True}
FIELDS = {
    "full": {},
    "sliding_and_full": MIX,
    "all_causal": {**MIX, "is_causal": True},
    "all_bidirectional": {**MIX, "is_causal": False},
    "full_made_causal": {"is_causal": True},
    "biases": {**MIX, "attention_bias": True},
}


@pytest.fixture(scope="module")
def target():
    return dense_target()


@pytest.fixture(scope="module")
def text(target) -> tuple[torch.Tensor, list[int], int]:
    """A prompt, prompt and greedy answer, and a token that ends the answer at its first occurrence.

    The reference shortens its last block at the budget, so the answer ends well before it.
    """
    prompt = torch.randint(0, 256, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(3))
    greedy = target.generate(prompt, max_new_tokens=80, do_sample=False)[0].tolist()
    stop = next(token for i, token in enumerate(greedy) if i >= 45 and token not in greedy[PROMPT_LENGTH:i])
    return prompt, greedy, stop


def saved_drafter(target, folder, dtype=None, **fields) -> DFlashDraftModel:
    config = DFlashDraftConfig.from_target_config(
        target.config, num_hidden_layers=2, mask_token_id=MASK_TOKEN_ID, block_size=BLOCK_SIZE, **fields
    )
    torch.manual_seed(1)
    drafter = DFlashDraftModel(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            # Attention far from uniform, so that slots draft different tokens; norms and biases not at their start.
            parameter.add_(torch.randn_like(parameter) * (parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.2))
            if name.endswith("q_norm.weight"):
                parameter.mul_(8.0)
    drafter.save_pretrained(folder, dtype=dtype)
    return drafter


def drafts(rounds: list[dict], target) -> list[list[int]]:
    """The tokens that each round drafts, before the oracle made some of them right."""
    head = target.get_output_embeddings().weight
    with torch.inference_mode():
        return [(r["hidden"][0, 1:] @ head.T).argmax(-1).tolist() for r in rounds]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FIELDS), ("full", torch.bfloat16), ("sliding_and_full", torch.bfloat16)],
)
def test_a_saved_folder_drafts_the_same_in_the_reference_and_in_generate(
    reader,  # noqa: F811
    monkeypatch,
    tmp_path,
    target,
    text,
    name,
    dtype,
):
    saved_drafter(target, tmp_path, dtype, **FIELDS[name])
    # As published in bf16; both readers compute in fp32, so that their tokens can be compared.
    ours = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    theirs, info = reader.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert type(theirs.config) is Qwen3Config
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.eval()

    prompt, greedy, stop = text
    our_rounds, their_rounds, accepts = [], [], [0, 5, 2, 3, 5, 1]
    monkeypatch.setattr(ours, "forward", oracle_forward(ours, target, greedy, accepts, our_rounds))
    oracle = oracle_forward(theirs, target, greedy, accepts, their_rounds, states_of=lambda output: output)
    monkeypatch.setattr(theirs, "forward", oracle)
    generated = target.generate(
        prompt,
        max_new_tokens=80,
        do_sample=False,
        eos_token_id=stop,
        assistant_model=ours,
        speculation_type="dflash",
    )
    spoken = theirs.spec_generate(target, prompt, max_new_tokens=80, stop_token_ids=[stop])
    answer = greedy[: greedy.index(stop, PROMPT_LENGTH) + 1]
    assert generated[0].tolist() == spoken[0].tolist() == answer
    assert drafts(our_rounds, target) == drafts(their_rounds, target)
    assert len({token for tokens in drafts(our_rounds, target) for token in tokens}) > 2, "the drafts say something"
    anchors = [r["anchor"] for r in our_rounds]
    assert anchors == [r["anchor"] for r in their_rounds]
    assert len({b - a for a, b in pairwise(anchors)}) >= 4
    for our, their in zip(our_rounds, their_rounds, strict=True):
        torch.testing.assert_close(our["hidden"], their["hidden"], rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["all_causal", "all_bidirectional", "full_made_causal"])
def test_the_reference_follows_the_saved_causality(reader, tmp_path, target, text, name):  # noqa: F811
    """Without `is_causal` in the file the reference computes something else, so the test above sees it."""
    saved_drafter(target, tmp_path, **FIELDS[name])
    prompt, greedy, stop = text
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["is_causal"] is FIELDS[name]["is_causal"]
    rounds: dict[str, list[dict]] = {"with": [], "without": []}
    for kind in rounds:
        theirs = reader.DFlashDraftModel.from_pretrained(tmp_path).eval()
        theirs.forward = oracle_forward(theirs, target, greedy, [1, 2], rounds[kind], states_of=lambda output: output)
        theirs.spec_generate(target, prompt, max_new_tokens=20, stop_token_ids=[stop])
        path.write_text(json.dumps({k: v for k, v in config.items() if k != "is_causal"}))
    with torch.inference_mode():
        gap = (rounds["with"][0]["hidden"] - rounds["without"][0]["hidden"]).abs().max().item()
    # The test above compares to 5e-5.
    assert gap > 1e-3
