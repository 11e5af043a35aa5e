# SPDX-License-Identifier: Apache-2.0
"""The teacher-forced walk: the same verifications as decoding, from one pass over known answers."""

import datasets
import numpy as np
import pytest
import torch
from naive import naive_drafter
from runs import BLOCK_SIZE, make_documents
from runs import make_trainer as trainer_of
from test_generation import PROMPT, drafter_for, greedy, oracle_for
from tiny import MASK_TOKEN_ID, byte_tokenizer, dense_target, hybrid_target, llama_target
from tiny import tiny_drafter as make_drafter

from dflash_hf import DataCollatorForDFlash, FrozenTarget, PackedDataset
from dflash_hf.acceptance import WalkedAnswer, WalkSums, follow, right_drafts, walk_batch, walk_documents
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.generation import speculative_generate


def make_trainer(target, folder, **arguments):
    return trainer_of(folder, target, **{"max_steps": 2, "save_strategy": "no", **arguments})


torch.set_num_threads(1)


def trained_like(target, documents, block_size=4, steps=60, device="cpu", **fields):
    """A drafter that a few steps have taught some of the documents' tokens, so that it accepts more than one."""
    torch.manual_seed(0)
    drafter = drafter_for(target, block_size=block_size, **fields).to(device)
    frozen, head = FrozenTarget(target, drafter.config.target_layer_ids), FrozenHead(target, device)
    batch = DataCollatorForDFlash(block_size, num_anchors=64)([PackedDataset(documents, 4096)[0]])
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    context = frozen.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    from dflash_hf.masking import block_position_ids, training_masks

    drafter.train()
    for _ in range(steps):
        anchors = batch["anchor_positions"]
        hidden = drafter(
            head.noise_embeds(batch["input_ids"].gather(1, anchors.clamp(min=0)), MASK_TOKEN_ID, block_size),
            context,
            training_masks(drafter.config, anchors, batch["document_ids"]),
            block_position_ids(batch["position_ids"], anchors, block_size),
        ).last_hidden_state
        loss = torch.nn.functional.cross_entropy(head.logits(hidden).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def written_by(target, prompts, budget, eos=()):
    """The target's own greedy answers to prompts, as documents."""
    documents = []
    for prompt in prompts:
        ids = greedy(target, prompt, budget, eos_token_id=list(eos) or None)
        documents.append({"input_ids": ids, "supervised_spans": [[len(prompt), len(ids)]]})
    return documents


PROMPTS = [PROMPT, [7], [9, 80, 80, 3, 6, 200], [11] * 12]


@pytest.mark.parametrize("make_target", [dense_target, llama_target, hybrid_target])
def test_e5_the_walk_visits_the_blocks_that_decoding_verifies(make_target):
    target = make_target()
    documents = written_by(target, PROMPTS, 37)
    # A token that comes up in the middle of an answer ends it there, so that the answers have different lengths.
    eos = documents[0]["input_ids"][len(PROMPT) + 21]
    documents = written_by(target, PROMPTS, 37, [eos])
    drafter = trained_like(target, documents)
    answers = walk_documents(target, drafter, documents)
    assert [answer.document for answer in answers] == [0, 1, 2, 3]
    for answer, prompt, document in zip(answers, PROMPTS, documents, strict=True):
        decoded = speculative_generate(target, drafter, torch.tensor([prompt]), 37, eos_token_id=eos)
        assert decoded.sequences[0].tolist() == document["input_ids"]
        assert answer.committed == decoded.committed
    assert len({n for answer in answers for n in answer.committed}) >= 3


def test_e4_an_answer_is_followed_from_block_to_block():
    assert follow([2, 9, 9, 0, 3, 9, 9, 9, 1, 0]) == ([3, 1, 4, 2], [2, 0, 3, 1])
    # The last block is cut at the end of the answer, where no token of the target's own follows.
    assert follow([3, 9, 9, 9, 2, 1]) == ([4, 2], [3, 2])
    assert follow([0]) == ([1], [0]) and follow([1]) == ([1], [1]) and follow([]) == ([], [])


def test_e4_blocks_are_counted_by_source():
    sums = WalkSums.zeros(4, ["a", "b", "c"])
    sums.add(WalkedAnswer(0, [4, 1, 2], [3, 0, 2]), "a")
    sums.add(WalkedAnswer(1, [2], [1]), "b")
    assert sums.metrics() == {
        "acceptance_length": 9 / 4,
        "fully_accepted_blocks": 1 / 4,
        "acceptance_slot_1": 3 / 4,
        "acceptance_slot_2": 2 / 4,
        "acceptance_slot_3": 1 / 4,
        "acceptance_length_a": 7 / 3,
        "acceptance_length_b": 2.0,
    }
    assert WalkSums.zeros(4).metrics() == {}


def test_the_walk_equals_one_block_after_the_other():
    """Packed rows of documents with several answers, in chunks of anchors, against the slow twin of the drafter."""
    target = dense_target()
    documents = make_documents(3)
    documents[1]["supervised_spans"] = [[4, 9], [9, 12], [14, 15], [16, 18]]
    drafter = trained_like(target, documents)
    head, frozen = FrozenHead(target, "cpu"), FrozenTarget(target, drafter.config.target_layer_ids)
    rows = PackedDataset(documents, 64)
    batch = DataCollatorForDFlash(4)([rows[i] for i in range(len(rows))])
    context = frozen.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    table = target.get_input_embeddings().weight

    expected = []
    for index, document in enumerate(documents):
        ids = document["input_ids"]
        taps = frozen.context_hidden_states(torch.tensor([ids]))[0]
        spans = [[4, 12], [16, 18]] if index == 1 else document["supervised_spans"]
        for start, stop in spans:
            anchor, committed = start, []
            while anchor < stop - 1:
                block = table[[ids[anchor], *[MASK_TOKEN_ID] * 3]]
                with torch.no_grad():
                    drafts = head.logits(naive_drafter(drafter, taps, block, anchor)).argmax(-1).tolist()
                right = next((k for k in range(1, 4) if anchor + k >= stop or drafts[k] != ids[anchor + k]), 4) - 1
                committed.append(min(right + 1, stop - 1 - anchor))
                anchor += committed[-1]
            expected.append((index, committed))
    for chunk in (None, 1, 5, 1000):
        answers = walk_batch(drafter, drafter.config, head, batch, context, chunk_anchors=chunk)
        assert sorted((a.document, a.committed) for a in answers) == sorted(expected)
    assert len({n for _, committed in expected for n in committed}) >= 3


def test_logits_that_are_no_numbers_are_right_about_nothing():
    labels = torch.tensor([[[-100, 3, 0, 0], [-100, 1, 0, 0]]])
    logits = torch.nn.functional.one_hot(labels.clamp(min=0), 5).float().flatten(1, 2)
    assert right_drafts(logits, labels, lambda x: x, 5).tolist() == [[3, 3]]
    # The place of a NaN is what its row's largest entry is said to be.
    logits[0, 2, 0] = torch.nan
    assert right_drafts(logits, labels, lambda x: x, 5).tolist() == [[1, 3]]


def test_rows_that_count_nothing_are_left_out():
    target = dense_target()
    documents = make_documents(2)
    drafter = drafter_for(target)
    rows = PackedDataset(documents, 32)
    batch = DataCollatorForDFlash(4)([rows[0], rows[1]])
    context = FrozenTarget(target, drafter.config.target_layer_ids).context_hidden_states(
        batch["input_ids"], batch["document_lengths"]
    )
    walked = []
    for row in (0, 1):
        labels = batch["labels"].clone()
        labels[row] = -100
        answers = walk_batch(drafter, drafter.config, FrozenHead(target, "cpu"), batch | {"labels": labels}, context)
        walked.append({answer.document for answer in answers})
    assert walked == [set(batch["documents"][1]), set(batch["documents"][0])]


# In the trainer


def test_e4_evaluation_walks_the_answers(tmp_path):
    """The trainer's numbers are those of the answers walked one by one, whatever the rows."""
    target = dense_target()
    documents = make_documents(5)
    sources = ["code", "chat", "code", "maths", "chat"]
    data = [{**document, "source": source} for document, source in zip(documents, sources, strict=True)]
    trainer = make_trainer(target, tmp_path, eval_dataset=data, drafter=trained_like(target, documents))
    metrics = trainer.evaluate() | trainer.state.log_history[-1]["details"]
    answers = walk_documents(target, trainer.model, documents)
    committed = [n for answer in answers for n in answer.committed]
    accepted = np.array([n for answer in answers for n in answer.accepted])
    assert metrics["eval_acceptance_length"] == sum(committed) / len(committed) > 1.8
    assert metrics["eval_fully_accepted_blocks"] == (accepted == BLOCK_SIZE - 1).mean()
    for slot in range(1, BLOCK_SIZE):
        assert metrics[f"eval_acceptance_slot_{slot}"] == pytest.approx((accepted >= slot).mean())
    for source in set(sources):
        own = [n for a in answers if sources[a.document] == source for n in a.committed]
        assert metrics[f"eval_acceptance_length_{source}"] == sum(own) / len(own)
    for split in ({"row_length": 128}, {"per_device_eval_batch_size": 3}):
        given = datasets.Dataset.from_list(data)
        again = make_trainer(target, tmp_path, eval_dataset=given, drafter=trainer.model, **split)
        other = again.evaluate() | again.state.log_history[-1]["details"]
        walked = [name for name in metrics if "acceptance" in name or "accepted" in name]
        assert {name: other[name] for name in walked} == {name: metrics[name] for name in walked}


@pytest.mark.parametrize("as_dataset", [False, True])
def test_chats_keep_their_source(tmp_path, as_dataset):
    """Two answers of a chat are two documents of its source; a chat that names none is of another."""
    turn = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]
    chats = [{"messages": turn * 2, "source": "talk"}, {"messages": turn, "source": None}]
    data = datasets.Dataset.from_list(chats) if as_dataset else chats
    trainer = make_trainer(
        dense_target(), tmp_path, eval_dataset=data, processing_class=byte_tokenizer(), row_length=160
    )
    assert trainer.eval_dataset.sources == ["talk", "talk", "other"]
    trainer.evaluate()
    metrics = trainer.state.log_history[-1]["details"]
    assert {name for name in metrics if name.startswith("eval_acceptance_length_")} == {
        "eval_acceptance_length_talk",
        "eval_acceptance_length_other",
    }


def test_evaluation_runs_the_target_once_per_batch(tmp_path, monkeypatch):
    target = dense_target()
    trainer = make_trainer(target, tmp_path, eval_dataset=make_documents(3), drafter=make_drafter(target))
    calls, original = [], trainer.target.context_hidden_states
    monkeypatch.setattr(trainer.target, "context_hidden_states", lambda *a: calls.append(1) or original(*a))
    trainer.evaluate()
    assert len(calls) == len(trainer.eval_dataset)


def test_an_oracle_is_walked_in_whole_blocks():
    target = dense_target()
    (document,) = written_by(target, [PROMPT], 30)
    oracle = oracle_for(target, document["input_ids"], [True] * 3)
    decoded = speculative_generate(target, oracle, torch.tensor([PROMPT]), 30)
    assert decoded.committed == follow([3] * 29)[0]


def test_a_collator_of_ones_own_keeps_the_acceptance_at_random_anchors(tmp_path, caplog):
    target = dense_target()
    trainer = make_trainer(target, tmp_path, eval_dataset=make_documents(3), drafter=make_drafter(target))
    whole = trainer.data_collator
    trainer.data_collator = lambda rows: {k: v for k, v in whole(rows).items() if k != "supervised_runs"}
    metrics = trainer.evaluate()
    assert "no `supervised_runs`" in caplog.text
    details = trainer.state.log_history[-1]["details"]
    assert metrics["eval_acceptance_length"] >= 1 and "eval_acceptance_slot_1" not in details
