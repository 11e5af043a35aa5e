# SPDX-License-Identifier: Apache-2.0
"""Two sequences of a tiny target learned by heart, and then drafted by real decoding: the whole chain in one test."""

import pytest
import torch
from tiny import VOCAB_SIZE, dense_target, hybrid_target

from dflash_hf import DFlashDraftConfig, DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments
from dflash_hf.acceptance import measure_acceptance


BLOCK_SIZE = 4
PROMPT_LENGTHS = (9, 14)
# The first token is the prefill's; then 8 verifications of a whole block commit 4 tokens each. So nothing is cut at
# the budget, and a drafter that knows both answers by heart reaches exactly the block size.
NEW_TOKENS = 1 + 8 * BLOCK_SIZE
# Seeds whose greedy answers hold many different tokens: others of these random targets repeat one token for ever.
TARGETS = {"dense": lambda: dense_target(seed=53), "hybrid": lambda: hybrid_target(seed=0)}
SEEDS = {"dense": 53, "hybrid": 0}


def written_documents(target, seed: int) -> list[dict]:
    """Random prompts with the target's own greedy answers."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(0, 256, (1, length), generator=generator)
        ids = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        documents.append({"input_ids": ids, "supervised_spans": [[length, len(ids)]]})
    return documents


@pytest.mark.parametrize("kind", TARGETS)
def test_e5_a_drafter_that_overfits_two_answers_drafts_them(kind, tmp_path):
    target = TARGETS[kind]()
    documents = written_documents(target, SEEDS[kind])
    prompts = [document["input_ids"][: document["supervised_spans"][0][0]] for document in documents]
    for document, prompt in zip(documents, prompts, strict=True):
        assert len(document["input_ids"]) == len(prompt) + NEW_TOKENS
        assert len(set(document["input_ids"][len(prompt) :])) > 10, "the answer is worth learning"
    # These targets may write any token, so the mask is one that these answers do not hold.
    reserved = {target.config.eos_token_id, target.config.pad_token_id}
    used = {token for document in documents for token in document["input_ids"]} | reserved
    mask_token_id = max(set(range(VOCAB_SIZE)) - used)
    torch.manual_seed(0)
    drafter = DFlashDraftModel(
        DFlashDraftConfig.from_target_config(
            target.config, num_hidden_layers=2, block_size=BLOCK_SIZE, mask_token_id=mask_token_id
        )
    )
    before = measure_acceptance(target, drafter, prompts, NEW_TOKENS, eos_token_id=[], progress=False)
    arguments = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=150,
        learning_rate=3e-3,
        row_length=128,
        max_anchors_per_row=128,
        logging_steps=50,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = DFlashTrainer(drafter, target, arguments, train_dataset=documents, eval_dataset=documents)
    trainer.train()
    forced = trainer.evaluate()["eval_acceptance_length"]
    after = measure_acceptance(target, drafter, prompts, NEW_TOKENS, eos_token_id=[], progress=False)

    assert before.acceptance_length < 1.5
    assert after.acceptance_length >= 0.9 * BLOCK_SIZE, (after.acceptance_length, forced)
    assert after.lossless and [p.output_ids for p in after.prompts] == [
        document["input_ids"][len(prompt) :] for document, prompt in zip(documents, prompts, strict=True)
    ]
    # Accuracy on given text must not promise what decoding does not keep.
    assert abs(forced - after.acceptance_length) < 0.1 * BLOCK_SIZE
