# SPDX-License-Identifier: Apache-2.0
"""Rows to tensors, held against twins that look at one token at a time; and documents that cannot be learnt from."""

import itertools

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import refused
from torch._dynamo.testing import CompileCounter
from torch.utils.data import BatchSampler, DataLoader

from dflash_hf.data_collator import (
    DataCollatorForDFlash,
    check_documents,
    check_token_ids,
    document_seed,
    draw_anchors,
    num_valid_anchors,
    share_of_countable_slots,
    shorten_draws,
    valid_anchors,
)
from dflash_hf.packing import PackedDataset, RowSampler


UNCAPPED = 10**6


def make_row(*documents: tuple[int, list[list[int]]], epoch: int = 0, first: int = 0) -> dict:
    """A row of documents given as (length, spans), whose token ids are all different."""
    items, token = [], 100
    for index, (length, spans) in enumerate(documents, start=first):
        items.append({"document": index, "input_ids": list(range(token, token + length)), "supervised_spans": spans})
        token += length
    return {"epoch": epoch, "documents": items}


@st.composite
def drawn_documents(draw) -> tuple[int, list[list[int]]]:
    """(length, spans): spans that touch or leave gaps, of one token, none at all, at the very end of the document."""
    spans, position = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = position + draw(st.integers(0, 3))
        position = start + draw(st.integers(0, 7))
        spans.append([start, position])
    return max(1, position + draw(st.sampled_from([0, 0, 1, 4]))), spans


# --- Twins that look at one token at a time ---


def supervised_flags(length: int, spans: list[list[int]]) -> list[bool]:
    flags = [False] * length
    for start, stop in spans:
        for position in range(start, stop):
            flags[position] = True
    return flags


def naive_valid(length: int, spans: list[list[int]]) -> list[int]:
    flags = supervised_flags(length, spans)
    return [a for a in range(length - 1) if flags[a] and flags[a + 1]]


def naive_permutation(valid: list[int], seed: int, epoch: int, document: int) -> list[int]:
    stream = np.random.PCG64(document_seed(seed, epoch, document, "anchors"))
    keys = [int(stream.random_raw()) for _ in valid]
    return [valid[i] for i in sorted(range(len(valid)), key=keys.__getitem__)]


def naive_labels(token_ids: list[int], flags: list[bool], anchor: int, block_size: int) -> list[int]:
    labels = [-100] * block_size
    for slot in range(1, block_size):
        position = anchor + slot
        if position >= len(token_ids) or not flags[position]:
            break
        labels[slot] = token_ids[position]
    return labels


def naive_row(row: dict, collator: DataCollatorForDFlash) -> dict:
    out = {name: [] for name in ("input_ids", "position_ids", "document_ids", "anchor_positions", "labels")}
    shapes = [(len(item["input_ids"]), item["supervised_spans"]) for item in row["documents"]]
    draws = [min(collator.num_anchors, len(naive_valid(*shape))) for shape in shapes]
    counts = shorten_draws(np.array(draws), collator.max_anchors_per_row)
    for index, (item, shape, count) in enumerate(zip(row["documents"], shapes, counts, strict=True)):
        start, flags = len(out["input_ids"]), supervised_flags(*shape)
        drawn = naive_permutation(naive_valid(*shape), collator.seed, row["epoch"], item["document"])
        for anchor in sorted(drawn[:count]):
            out["anchor_positions"].append(start + anchor)
            out["labels"].append(naive_labels(item["input_ids"], flags, anchor, collator.block_size))
        for position, token in enumerate(item["input_ids"]):
            out["input_ids"].append(token)
            out["position_ids"].append(position)
            out["document_ids"].append(index)
    return out


rows_of_documents = st.lists(st.lists(drawn_documents(), min_size=1, max_size=5), min_size=1, max_size=3)


@given(rows_of_documents, st.integers(2, 9), st.integers(1, 12), st.sampled_from([1, 2, 5, 9, UNCAPPED]))
@settings(deadline=None, max_examples=200)
def test_batch_equals_the_twin(rows, block_size, num_anchors, cap):
    collator = DataCollatorForDFlash(block_size, num_anchors, 7, max_anchors_per_row=cap, pad_token_id=5)
    rows = [make_row(*documents, epoch=2, first=10 * i) for i, documents in enumerate(rows)]
    batch = collator(rows)
    expected = [naive_row(row, collator) for row in rows]
    num_tokens = max(len(row["input_ids"]) for row in expected)
    anchors = max(1, *(len(row["anchor_positions"]) for row in expected))
    assert anchors <= max(1, cap)
    padding = {"input_ids": 5, "position_ids": 0, "document_ids": -1, "anchor_positions": -1}
    padding["labels"] = [-100] * block_size
    for name, pad in padding.items():
        size = anchors if name in ("anchor_positions", "labels") else num_tokens
        assert batch[name].dtype == torch.int64
        assert batch[name].tolist() == [row[name] + [pad] * (size - len(row[name])) for row in expected], name
    assert batch["document_lengths"] == [[len(item["input_ids"]) for item in row["documents"]] for row in rows]
    seeds = [[document_seed(7, 2, item["document"], "noise") for item in row["documents"]] for row in rows]
    assert batch["noise_seeds"] == seeds
    assert "attention_mask" not in batch


@given(drawn_documents(), st.integers(0, 30))
@settings(deadline=None)
def test_valid_and_drawn_anchors_equal_the_twin(document, num_anchors):
    valid = naive_valid(*document)
    assert valid_anchors(document[1]).tolist() == valid
    drawn = sorted(naive_permutation(valid, 1, 2, 3)[:num_anchors])
    assert draw_anchors(document[1], num_anchors, 1, 2, 3).tolist() == drawn


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 200))
@settings(deadline=None)
def test_row_cap_is_shared_in_proportion(draws, cap):
    counts = shorten_draws(np.array(draws), cap)
    assert counts.sum() == min(cap, sum(draws)) and (counts <= draws).all()
    assert (counts[np.array(draws) > 0] >= 1).all() or np.count_nonzero(draws) > cap
    if (np.array(draws) * min(cap, sum(draws)) >= sum(draws)).all() and sum(draws):
        assert (np.abs(counts - np.array(draws) * min(1, cap / sum(draws))) < 1).all()


# --- Anchors ---


@pytest.mark.parametrize(
    ("spans", "expected"),
    [([[0, 4], [4, 6]], [0, 1, 2, 3, 4]), ([[0, 4], [5, 7]], [0, 1, 2, 5]), ([[3, 4]], []), ([[3, 3]], []), ([], [])],
)
def test_m7_valid_anchors_and_their_next_token_are_supervised(spans, expected):
    assert valid_anchors(spans).tolist() == expected
    # All of them are drawn where the budget is larger.
    assert draw_anchors(spans, 8, 0, 0, 0).tolist() == expected


@pytest.mark.parametrize("vary", ["epoch", "document", "seed"])
def test_m7_anchors_are_uniform(vary):
    """Chi-square over 2000 draws of 5 of 20 positions; 4 and 50 are the 0.01% quantiles for 19 degrees of freedom."""
    counts = np.zeros(30)
    for i in range(2000):
        anchors = draw_anchors([[3, 13], [14, 26]], 5, **({"seed": 0, "epoch": 0, "document": 0} | {vary: i}))
        assert len(set(anchors.tolist())) == 5
        counts[anchors] += 1
    valid = valid_anchors([[3, 13], [14, 26]])
    assert len(valid) == 20 and counts[valid].sum() == counts.sum()
    # Without replacement the counts vary by 1 - 5/20 less than the statistic's distribution assumes.
    statistic = ((counts[valid] - 500) ** 2 / 500).sum() * (19 / 20) / (1 - 5 / 20)
    assert 4 < statistic < 50


def anchors_per_document(batch: dict) -> dict[tuple[int, int], list[int]]:
    """(row, document of the row) -> anchors in tokens from the document's start."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, anchors in enumerate(batch["anchor_positions"].tolist()):
        for anchor in (a for a in anchors if a >= 0):
            key = (i, int(batch["document_ids"][i, anchor]))
            found.setdefault(key, []).append(int(batch["position_ids"][i, anchor]))
    return found


def test_m2_packing_leaves_the_anchors_of_a_document_alone():
    collator = DataCollatorForDFlash(8, num_anchors=16, max_anchors_per_row=64)
    documents = [(25, [[5, 25]])] * 4
    packed = anchors_per_document(collator([make_row(*documents, epoch=3)]))
    separate = anchors_per_document(collator([make_row(documents[i], epoch=3, first=i) for i in range(4)]))
    assert [len(anchors) for anchors in packed.values()] == [16] * 4
    assert [packed[0, i] for i in range(4)] == [separate[i, 0] for i in range(4)]


def test_row_cap_keeps_a_subset_and_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(DataCollatorForDFlash, "_cap_is_logged", False)
    row = make_row((60, [[0, 60]]), (4, [[1, 3]]), (20, [[0, 20]]))
    full = anchors_per_document(DataCollatorForDFlash(4, max_anchors_per_row=UNCAPPED)([row]))
    assert not caplog.records
    for _ in range(2):
        capped = anchors_per_document(DataCollatorForDFlash(4, max_anchors_per_row=21)([row]))
    assert {key: len(anchors) for key, anchors in capped.items()} == {(0, 0): 15, (0, 1): 1, (0, 2): 5}
    assert all(set(anchors) <= set(full[key]) for key, anchors in capped.items())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "3 documents of a row draw 79 anchors" in caplog.text and "keep 21" in caplog.text


@pytest.mark.parametrize(("row_length", "anchors"), [(None, 10), (100, 25)])
def test_row_cap_is_a_quarter_of_the_row(row_length, anchors):
    collator = DataCollatorForDFlash(4, row_length=row_length)
    batch = collator([make_row((40, [[0, 40]])), make_row((2, [[0, 2]]))])
    assert (batch["anchor_positions"] >= 0).sum(dim=1).tolist() == [anchors, 1]


# --- Labels ---


def test_l1_m4_slot_k_has_the_kth_token_after_the_anchor_and_nothing_is_shifted():
    batch = DataCollatorForDFlash(4, max_anchors_per_row=UNCAPPED)([make_row((7, [[2, 7]]), (5, [[1, 4]]))])
    ids, anchors = batch["input_ids"][0], batch["anchor_positions"][0]
    assert ids.tolist() == list(range(100, 112)) and anchors[0] == 2
    assert batch["position_ids"][0].tolist() == [*range(7), *range(5)]
    assert batch["labels"][0, 0].tolist() == [-100, 103, 104, 105]
    assert batch["labels"][0, :, 1].tolist() == ids[anchors + 1].tolist()


def test_m3_labels_stop_at_the_end_of_the_document_and_at_a_gap_for_good():
    batch = DataCollatorForDFlash(4, max_anchors_per_row=UNCAPPED)(
        [make_row((10, [[0, 3], [8, 10]]), (10, [[0, 10]]))]
    )
    assert batch["anchor_positions"][0, :4].tolist() == [0, 1, 8, 10]
    nothing = [-100, -100, -100]
    assert batch["labels"][0, :4].tolist() == [
        [-100, 101, 102, -100], [-100, 102, *nothing[1:]], [-100, 109, *nothing[1:]], [-100, 111, 112, 113]
    ]  # fmt: skip


def test_m6_unused_anchors_come_last_and_have_no_labels():
    batch = DataCollatorForDFlash(4, max_anchors_per_row=UNCAPPED)([make_row((6, [[0, 6]])), make_row((3, [[0, 2]]))])
    assert batch["anchor_positions"].tolist() == [[0, 1, 2, 3, 4], [0, -1, -1, -1, -1]]
    assert (batch["labels"][1, 1:] == -100).all()


@pytest.mark.parametrize("spans", [[], [[2, 3], [4, 5]]])
def test_l2_a_row_with_nothing_to_learn_from(spans):
    batch = DataCollatorForDFlash(4)([make_row((6, spans))])
    assert batch["anchor_positions"].tolist() == [[-1]]
    assert batch["labels"].tolist() == [[[-100] * 4]]


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_l2_a_data_set_with_nothing_to_learn_from_is_an_error(make):
    documents = [{"input_ids": [1, 2, 3, 4], "supervised_spans": spans} for spans in ([], [[0, 1], [2, 3]])]
    with refused(ValueError, "2 documents", "max_length"):
        check_documents(make(documents), 4)


def test_dt7_an_answer_cut_off_by_max_length_is_still_learnt():
    collator = DataCollatorForDFlash(4, max_anchors_per_row=UNCAPPED)
    batch = collator([make_row((12, [[4, 12]]))])
    assert batch["anchor_positions"][0].tolist() == list(range(4, 11))
    assert batch["labels"][0, -1].tolist() == [-100, 111, -100, -100]
    with refused(ValueError, "Document 0", [4, 13], "12 tokens"):
        collator([make_row((12, [[4, 13]]))])


# --- Reproducibility ---


def packed_rows(row_length: int = 96) -> PackedDataset:
    generator = np.random.default_rng(0)
    lengths = generator.integers(4, 60, 40).tolist()
    documents = [{"input_ids": [7] * length, "supervised_spans": [[1, length]]} for length in lengths]
    return PackedDataset(documents, row_length)


def drawn_by_document(batches, dataset: PackedDataset, orders: list[list[tuple[int, int]]]) -> dict:
    """(epoch, document) -> (anchors, noise seed), for batches of rows in the given orders."""
    found = {}
    for batch, order in zip(batches, orders, strict=True):
        anchors = anchors_per_document(batch)
        for i, (epoch, row) in enumerate(order):
            for j, item in enumerate(dataset[row]["documents"]):
                found[epoch, item["document"]] = (anchors.get((i, j), []), batch["noise_seeds"][i][j])
    return found


@pytest.mark.parametrize("row_length", [None, 96])
@pytest.mark.parametrize("workers", [0, 2])
def test_c3_workers_batches_and_ranks_do_not_enter(workers, row_length):
    """The default cap bites in these rows, so it must not look at the other rows of the batch either."""
    dataset, sampler = packed_rows(), RowSampler(len(packed_rows()), seed=1)
    sampler.set_epoch(2)
    collator = DataCollatorForDFlash(4, num_anchors=9, seed=3, row_length=row_length)
    one_by_one = drawn_by_document([collator([dataset[index]]) for index in sampler], dataset, [[i] for i in sampler])
    assert len(one_by_one) == len(dataset.documents)
    for ranks, size in ((1, 3), (2, 2)):
        for rank in range(ranks):
            shard = BatchSamplerShard(BatchSampler(sampler, size, drop_last=False), ranks, rank)
            loader = DataLoader(dataset, batch_sampler=shard, collate_fn=collator, num_workers=workers)
            drawn = drawn_by_document(loader, dataset, list(shard))
            assert drawn.items() <= {key: one_by_one[key] for key in drawn}.items()


def test_c3_epochs_and_seeds_draw_anew_where_they_may_and_leave_global_states_alone():
    np.random.seed(0)
    torch.manual_seed(0)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state()
    row, drawn = make_row((200, [[0, 200]])), {}
    for redraw, seed, epoch in itertools.product((True, False), (0, 1), (0, 5)):
        batch = DataCollatorForDFlash(4, 8, seed, redraw=redraw)([row | {"epoch": epoch}])
        drawn[redraw, seed, epoch] = (*batch["anchor_positions"][0].tolist(), *batch["noise_seeds"][0])
    assert len({drawn[True, seed, epoch] for seed in (0, 1) for epoch in (0, 5)}) == 4
    assert all(drawn[False, seed, epoch] == drawn[True, seed, 0] for seed in (0, 1) for epoch in (0, 5))
    assert np.random.get_state()[1].tolist() == before[0] and torch.get_rng_state().equal(before[1])


def test_c3_seeds_never_change():
    """A checkpoint is resumed by later releases too: these values are part of the format."""
    assert document_seed(0, 0, 0, "anchors") == 7803041139055444755
    assert document_seed(1, 2, 3, "noise") == 30464123198232563
    assert draw_anchors([[10, 60]], 6, 1, 2, 3).tolist() == [12, 13, 24, 28, 30, 47]


# --- Shapes ---


def test_p2_few_shapes_few_compilations():
    """Rows of one length and anchors in steps of 32: ten batches of varied documents compile at most twice."""
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=False)
    def step(input_ids, anchor_positions, labels):
        return input_ids.gather(1, anchor_positions.clamp(min=0)).sum() + labels.sum()

    collator = DataCollatorForDFlash(4, 16, row_length=256, pad_anchors_to_multiple_of=32)
    generator, used = np.random.default_rng(0), set()
    for _ in range(10):
        lengths = generator.integers(2, 51, 5).tolist()
        batch = collator([make_row(*((length, [[length // 4, length]]) for length in lengths)) for _ in range(2)])
        used.add(int((batch["anchor_positions"] >= 0).sum(dim=1).max()))
        step(batch["input_ids"], batch["anchor_positions"], batch["labels"])
    assert len(used) > 4 and counter.frame_count <= 2


# --- Checks ---


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"input_ids": []}, ["input_ids"]),
        ({"input_ids": [0.5, 1.5]}, ["input_ids", "float64"]),
        ({"supervised_spans": [[-1, 2]]}, [[-1, 2]]),
        ({"supervised_spans": [[1, 5]]}, [[1, 5], "4 tokens"]),
        ({"supervised_spans": [[0, 3], [2, 4]]}, [[2, 4], "from 3 on"]),
        ({"supervised_spans": [[3, 1]]}, [[3, 1]]),
        ({"supervised_spans": [1, 3]}, ["(2,)"]),
    ],
)
def test_a_bad_document_is_named(change, names):
    row = make_row((4, [[0, 4]]), (4, [[0, 4]]), first=4)
    row["documents"][1].update(change)
    with refused(ValueError, "Document 5", *names):
        DataCollatorForDFlash(4)([row])


def test_a_row_that_is_too_long_is_refused():
    with refused(ValueError, [3, 4], "12 tokens", "row_length=10"):
        DataCollatorForDFlash(4, row_length=10)([make_row((8, [])), make_row((8, []), (4, []), first=3)])


def test_arguments_are_checked():
    for name in ("block_size", "num_anchors", "max_anchors_per_row", "row_length"):
        with refused(ValueError, name, 0):
            DataCollatorForDFlash(**({"block_size": 4} | {name: 0}))


@given(st.lists(drawn_documents(), min_size=1, max_size=5), st.integers(2, 9))
@settings(deadline=None)
def test_share_of_countable_slots_equals_the_twin(documents, block_size):
    labels = [
        naive_labels(list(range(length)), supervised_flags(length, spans), anchor, block_size)
        for length, spans in documents
        for anchor in naive_valid(length, spans)
    ]
    slots = [label >= 0 for block in labels for label in block[1:]]
    data = [{"input_ids": [0] * length, "supervised_spans": spans} for length, spans in documents]
    assert share_of_countable_slots(data, block_size) == (sum(slots) / len(slots) if slots else 0.0)


@pytest.mark.parametrize(("answer", "warned"), [(5, True), (40, False)])
def test_answers_shorter_than_the_block_are_warned_about(answer, warned, caplog):
    documents = [{"input_ids": [1] * 60, "supervised_spans": [[10, 10 + answer]]}] * 3
    check_documents(datasets.Dataset.from_list(documents).shuffle(seed=0), 16)
    assert ("16.7% of the drafted slots" in caplog.text and "block of 16" in caplog.text) is warned


GOOD = {"input_ids": [1, 2, 3], "supervised_spans": [[0, 3]]}


@pytest.mark.parametrize(
    "make",
    [list, datasets.Dataset.from_list, lambda rows: datasets.Dataset.from_list(rows[::-1]).select([1, 0])],
    ids=["list", "data set", "selected"],
)
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"supervised_spans": [[0, 4]]}, ["Document 0", [0, 4], "3 tokens"]),
        ({"input_ids": [1, None, 3]}, ["Document 0", "input_ids"]),
        ({"supervised_spans": [[0, None]]}, ["Document 0", "supervised_spans"]),
        ({"supervised_spans": [None]}, ["Document 0", "[start, stop]"]),
        ({"input_ids": [1.5, 2.0, 3.0]}, ["input_ids", "whole numbers"]),
        ({"input_ids": ["1", "2", "3"], "supervised_spans": []}, ["input_ids", "whole numbers"]),
        ({"input_ids": [[1, 2], [3, 4]]}, ["input_ids", "whole numbers"]),
        ({"supervised_spans": [[0.0, 2.0]]}, ["supervised_spans", "whole numbers"]),
    ],
)
def test_documents_of_other_types_and_spans_are_named(make, change, names):
    bad = {**GOOD, **change}
    # Arrow knows one type of a column.
    documents = [bad, bad if "whole numbers" in names else GOOD]
    with refused(ValueError, *names):
        check_documents(make(documents), 4)


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_a_document_whose_spans_are_null_has_none(make):
    documents = make([GOOD, {"input_ids": [5, 6], "supervised_spans": None}])
    check_documents(documents, 4)
    check_token_ids(documents, 272, 260)
    batch = DataCollatorForDFlash(4, max_anchors_per_row=8)([PackedDataset(documents, 8)[0]])
    assert batch["anchor_positions"].tolist() == [[0, 1]]


def mixed_rows(count: int, seed: int = 0) -> list[dict]:
    """Documents of 5 to 120 tokens with one or two supervised stretches."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        n = int(random.integers(5, 120))
        cut = int(random.integers(1, n))
        spans = [[1, cut], [min(cut + 2, n), n]] if cut > 1 else [[1, n]]
        documents.append({"input_ids": random.integers(0, 200, n).tolist(), "supervised_spans": spans})
    return documents


def test_valid_anchors_are_counted_for_all_documents_at_once():
    documents = [*mixed_rows(40), {"input_ids": [1, 2], "supervised_spans": []}]
    collator = DataCollatorForDFlash(block_size=4, num_anchors=1000, max_anchors_per_row=1000)
    expected = [sum(b - a - 1 for a, b in _merged(document["supervised_spans"])) for document in documents]
    assert num_valid_anchors(documents).tolist() == expected
    rows = [{"epoch": 0, "documents": [{"document": i, **documents[i]}]} for i in range(40)]
    found = (collator(rows)["anchor_positions"] >= 0).sum(1).tolist()
    assert found == expected[:40]


def _merged(spans: list[list[int]]) -> list[tuple[int, int]]:
    supervised = {t for a, b in spans for t in range(a, b)}
    runs, start = [], None
    for t in range(max(supervised, default=-1) + 2):
        if t in supervised and start is None:
            start = t
        if t not in supervised and start is not None:
            runs.append((start, t))
            start = None
    return runs
