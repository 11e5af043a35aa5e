# SPDX-License-Identifier: Apache-2.0
"""Compilation happens once: batches of mixed documents have one shape and reuse the graphs of the first."""

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from naive import pack_rows, packed_forward, random_drafter, random_inputs
from torch.nn.parallel import DistributedDataParallel

from dflash_hf.data_collator import DataCollatorForDFlash, num_valid_anchors
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.masking import block_position_ids, training_masks
from dflash_hf.packing import PackedDataset
from dflash_hf.trainer import compile_layers


FULL, SLIDING = "full_attention", "sliding_attention"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def mixed_documents(count: int, seed: int = 0) -> list[dict]:
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
    documents = [*mixed_documents(40), {"input_ids": [1, 2], "supervised_spans": []}]
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


def test_the_largest_row_sum_bounds_every_row_of_every_epoch():
    documents = mixed_documents(60)
    # Documents of equal length change places, with other numbers of anchors.
    documents += [{"input_ids": [1] * 50, "supervised_spans": [[0, n]]} for n in range(2, 50, 4)]
    rows = PackedDataset(documents, row_length=200, seed=3)
    values = num_valid_anchors(documents)
    bound = rows.largest_row_sum(values)
    sums = [
        sum(values[d["document"]] for d in rows[epoch, row]["documents"])
        for epoch in range(6)
        for row in range(len(rows))
    ]
    assert max(sums) <= bound < 2 * max(sums)


def test_p2_s1_fifty_batches_of_mixed_documents_compile_two_graphs():
    rows = PackedDataset(mixed_documents(120), row_length=256)
    collator = DataCollatorForDFlash(4, num_anchors=16, row_length=256, pad_anchors_to_multiple_of=64)
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=8)
    drafter.set_attn_implementation("flex_attention")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(drafter, backend="eager")
    width = drafter.fc.in_features
    for step in range(50):
        batch = collator([rows[step // len(rows), step % len(rows)]])
        anchors, documents = batch["anchor_positions"], batch["document_ids"]
        masks = training_masks(drafter.config, anchors, documents)
        positions = block_position_ids(batch["position_ids"], anchors, 4)
        context, noise = torch.randn(1, 256, width), torch.randn(1, anchors.shape[1] * 4, drafter.config.hidden_size)
        with torch.no_grad():
            compiled = drafter(noise, context, masks, positions).last_hidden_state
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one graph per kind of layer"
    for layer in drafter.layers:
        layer._compiled_call_impl = None
    # Uncompiled layers would call Inductor's flex attention, whose cached kernels fit the CPU that wrote them.
    drafter.set_attn_implementation("sdpa")
    masks = training_masks(drafter.config, anchors, documents)
    with torch.no_grad():
        expected = drafter(noise, context, masks, positions).last_hidden_state
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


@pytest.fixture
def one_rank():
    """A process group of this process alone, in which DDP acts as among several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_training_compiles_the_graphs_of_one_rank(one_rank):
    """DDP's parameters are in buckets, here smaller than a matrix, which is not to cut the layers' graphs."""
    drafter = random_drafter([SLIDING, SLIDING, FULL], window=8)
    rows = pack_rows([[(40, [3, 20])]])
    noise, context = random_inputs(drafter, rows)
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_layers(drafter, backend=count)
    wrapped = DistributedDataParallel(drafter, bucket_cap_mb=0.001)
    masks = training_masks(drafter.config, rows.anchor_positions, rows.document_ids)
    positions = block_position_ids(rows.position_ids, rows.anchor_positions, drafter.config.block_size)
    wrapped(noise, context, masks, positions).last_hidden_state.sum().backward()
    assert len(graphs) == 2, "one graph per kind of layer"
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale", "logits_scaling", None])
def test_capped_and_scaled_logits_of_the_target_are_the_drafters_too(name):
    target = tiny.dense_target()
    hidden = torch.randn(2, 3, tiny.HIDDEN_SIZE) * 5
    plain = FrozenHead(target, "cpu").logits(hidden)
    if name is None:
        assert torch.equal(plain, target.lm_head(hidden))
        return
    setattr(target.config, name, 4.0)
    expected = {
        "final_logit_softcapping": 4 * torch.tanh(plain / 4), "logit_scale": plain * 4, "logits_scaling": plain / 4
    }[name]  # fmt: skip
    torch.testing.assert_close(FrozenHead(target, "cpu").logits(hidden), expected)


def test_activation_checkpointing_changes_nothing_and_keeps_less():
    rows = pack_rows([[(30, [2, 7, 9, 25]), (16, [0, 5, 6])]], padding=3, unused=1)
    drafter = random_drafter([SLIDING, FULL], window=9).train()
    noise, context = random_inputs(drafter, rows)
    results, kept = [], []
    for checkpointing in (False, True):
        if checkpointing:
            drafter.activation_checkpointing_enable()
        drafter.zero_grad()
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            output = packed_forward(drafter, rows, noise, context)
        kept.append(sum(saved))
        output.pow(3).sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in drafter.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[1] < 0.5 * kept[0]
