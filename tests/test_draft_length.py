# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft, from acceptance lengths and costs that are known."""

import json
import shlex

import pytest
from tiny import refused

from dflash_hf.draft_length import DraftLengths, RoundCost, read_costs


# Seconds of a forward over one token, and of each further one, for a number of sequences.
SECONDS = {1: (1.0, 0.01), 4: (1.0, 0.1), 16: (1.1, 0.1), 64: (1.0, 1.0)}
COSTS = [
    RoundCost(size, k, first + k * more, 0.1 if k else 0.0)
    for size, (first, more) in SECONDS.items()
    for k in (0, 3, 7)
]


def test_the_best_number_of_drafts_and_vllms_schedule(tmp_path):
    lengths = DraftLengths({1: 1.6, 3: 2.2, 7: 2.6, 15: 2.7}, COSTS)
    speeds = lengths.tokens_per_second()
    assert speeds[4][0] == 4 / 1.0 and speeds[4][3] == pytest.approx(4 * 2.2 / 1.4)
    # A third of the way from 1.0 to 1.4 seconds; 15 drafts lie behind all that is known.
    assert speeds[4][1] == pytest.approx(4 * 1.6 / (1.0 + 0.4 / 3)) and 15 not in speeds[4]
    assert lengths.best() == {1: 7, 4: 3, 16: 3, 64: 0}
    words = shlex.split(lengths.vllm_command("org/target", "a drafter"))
    assert words[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    told = {"method": "dflash", "model": "a drafter", "num_speculative_tokens": 7}
    # Inclusive ranges of batch sizes, the first from 1 on.
    assert json.loads(words[4]) == told | {
        "num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 16, 3], [17, 64, 0]]
    }
    one = DraftLengths({3: 2.2}, COSTS[:3])
    assert "per_batch_size" not in one.vllm_command("t", "d")
    assert DraftLengths({3: 1.0}, COSTS[:3]).vllm_command("t", "d") == "vllm serve t"
    # What was told can be read again.
    (tmp_path / "costs.json").write_text(json.dumps(lengths.to_dict()))
    assert read_costs(tmp_path / "costs.json") == COSTS
    for wrong in (
        "[]",
        '{"costs": [{"size": 1}]}',
        '{"costs": [{"batch_size": 0, "num_draft_tokens": 0}]}',
        '{"costs": []}',
    ):
        (tmp_path / "costs.json").write_text(wrong)
        with refused(ValueError, "costs.json"):
            read_costs(tmp_path / "costs.json")
