# SPDX-License-Identifier: Apache-2.0
"""Slow twins of the drafter, its mask and its losses, written from the rules alone: loops, no cache, no packing.

At the end of the file: random drafters, packed rows and an oracle for decoding, to compare them on.

Shapes: B rows, T packed tokens, N anchors, b block size, K taps, D hidden, V vocabulary; -1 marks an unused anchor
and the document of a padded token; -100 marks a label that does not count.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_hf import DFlashDraftConfig, DFlashDraftModel
from dflash_hf.masking import block_position_ids, training_masks


IGNORED = -100


def visible(
    query: int,
    key: int,
    anchors: Sequence[int],
    documents: Sequence[int],
    block_size: int,
    causal: bool,
    window: int | None,
) -> bool:
    """Whether the noise slot `query` of one row sees `key`, an index into [context T | blocks N*b].

    The slots of an unused anchor see their own block by the same rule as any other, and no context.
    """
    block, slot = divmod(query, block_size)
    anchor = anchors[block]
    if key < len(documents):
        if anchor < 0 or documents[key] < 0 or documents[key] != documents[anchor] or key >= anchor:
            return False
        return window is None or anchor + slot - key < window
    key_block, key_slot = divmod(key - len(documents), block_size)
    if key_block != block:
        return False
    if not causal:
        return True
    return key_slot <= slot and (window is None or slot - key_slot < window)


def naive_mask(
    anchor_positions: Tensor, document_ids: Tensor, block_size: int, causal: bool, window: int | None
) -> Tensor:
    """The dense boolean mask [B, N*b, T + N*b], True where seen, from `visible` of every pair."""
    rows = []
    for anchors, documents in zip(anchor_positions.tolist(), document_ids.tolist(), strict=True):
        queries = range(len(anchors) * block_size)
        keys = range(len(documents) + len(anchors) * block_size)
        rows.append([[visible(q, k, anchors, documents, block_size, causal, window) for k in keys] for q in queries])
    return torch.tensor(rows, dtype=torch.bool)


def rms_norm(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    """x over the root of its mean square, times the plain weight of `norm`."""
    return norm.weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps))


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE over a whole head vector [head_dim]: element i turns with element i + head_dim / 2."""
    half = x.shape[-1] // 2
    angles = [position * theta ** (-2 * i / x.shape[-1]) for i in range(half)]
    cos = torch.tensor([math.cos(angle) for angle in angles], dtype=x.dtype)
    sin = torch.tensor([math.sin(angle) for angle in angles], dtype=x.dtype)
    first, second = x[:half], x[half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def _sees(slot: int, key: int, anchor: int, causal: bool, window: int | None) -> bool:
    # Keys are the context rows 0 .. anchor - 1 and then the block's own slots, so a key's index is its position.
    if key < anchor:
        return window is None or anchor + slot - key < window
    if not causal:
        return True
    return key - anchor <= slot and (window is None or anchor + slot - key < window)


def _head(queries: Tensor, keys: Tensor, values: Tensor, anchor: int, causal: bool, window: int | None) -> Tensor:
    """Softmax attention of one head: queries [b, head_dim] over keys and values [anchor + b, head_dim]."""
    slots = []
    for slot, q in enumerate(queries):
        seen = [key for key in range(len(keys)) if _sees(slot, key, anchor, causal, window)]
        scores = torch.stack([torch.dot(q, keys[key]) for key in seen]) / math.sqrt(len(q))
        exponents = torch.exp(scores - scores.max())
        slots.append(sum(e / exponents.sum() * values[key] for e, key in zip(exponents, seen, strict=True)))
    return torch.stack(slots)


def _attention(attention: nn.Module, config, x: Tensor, context: Tensor, causal: bool, window: int | None) -> Tensor:
    anchor, theta, eps = len(context), config.rope_parameters["rope_theta"], config.rms_norm_eps
    both = torch.cat([context, x])
    queries = attention.q_proj(x).view(len(x), -1, config.head_dim)
    keys = attention.k_proj(both).view(len(both), -1, config.head_dim)
    values = attention.v_proj(both).view(len(both), -1, config.head_dim)
    heads = []
    for head in range(config.num_attention_heads):
        kv = head // (config.num_attention_heads // config.num_key_value_heads)
        q = [rotate(rms_norm(v, attention.q_norm, eps), anchor + i, theta) for i, v in enumerate(queries[:, head])]
        k = [rotate(rms_norm(v, attention.k_norm, eps), i, theta) for i, v in enumerate(keys[:, kv])]
        heads.append(_head(torch.stack(q), torch.stack(k), values[:, kv], anchor, causal, window))
    return attention.o_proj(torch.cat(heads, dim=-1))


def naive_drafter(model: nn.Module, taps: Tensor, noise_embeds: Tensor, anchor: int) -> Tensor:
    """Hidden states [b, D] of one block of one document, from a drafter's parameters and nothing else of it.

    Args:
        model: the drafter whose parameters and config fields are read.
        taps: the document's target features, [tokens >= anchor, K*D]; rows from `anchor` on are not read.
        noise_embeds: the target's embedding of [anchor token, mask, ...], [b, D].
        anchor: document-local position of the block's first slot.
    """
    config = model.config
    context = rms_norm(taps[:anchor] @ model.fc.weight.T, model.hidden_norm, config.rms_norm_eps)
    hidden = noise_embeds
    for layer, layer_type in zip(model.layers, config.layer_types, strict=True):
        sliding = layer_type == "sliding_attention"
        causal = sliding if config.is_causal is None else config.is_causal
        x = rms_norm(hidden, layer.input_layernorm, config.rms_norm_eps)
        window = config.sliding_window if sliding else None
        hidden = hidden + _attention(layer.self_attn, config, x, context, causal, window)
        x = rms_norm(hidden, layer.post_attention_layernorm, config.rms_norm_eps)
        gate, up = x @ layer.mlp.gate_proj.weight.T, x @ layer.mlp.up_proj.weight.T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
    return rms_norm(hidden, model.norm, config.rms_norm_eps)


def _blocks(hidden: Tensor, labels: Tensor) -> list[tuple[Tensor, list[int]]]:
    """The anchors of all rows as (hidden states [b, D], labels of length b)."""
    block_size = labels.shape[-1]
    flat = hidden.reshape(-1, block_size, hidden.shape[-1])
    return list(zip(flat, labels.reshape(-1, block_size).tolist(), strict=True))


def naive_sums(hidden: Tensor, labels: Tensor, head_weight: Tensor, gamma: float) -> tuple[Tensor, float]:
    """Sum of w * cross-entropy and sum of w over the counted slots, w = exp(-(k-1)/gamma).

    Args:
        hidden: the drafter's output, [B, N*b, D] or [B, N, b, D].
        labels: [B, N, b], -100 where a slot does not count.
        head_weight: the target's head, [V, D].
        gamma: decay length in slots.
    """
    total, normaliser = hidden.sum() * 0.0, 0.0
    for states, targets in _blocks(hidden, labels):
        for k in range(1, len(targets)):
            if targets[k] != IGNORED:
                weight = math.exp(-(k - 1) / gamma)
                total = total - weight * F.log_softmax(head_weight @ states[k], dim=-1)[targets[k]]
                normaliser += weight
    return total, normaliser


def naive_loss(hidden: Tensor, labels: Tensor, head_weight: Tensor, gamma: float) -> Tensor:
    """The decayed cross-entropy sum(w * ce) / sum(w); a connected zero where nothing counts. Arguments: naive_sums."""
    total, normaliser = naive_sums(hidden, labels, head_weight, gamma)
    return total / normaliser if normaliser else total


def naive_dpace_sums(
    hidden: Tensor, labels: Tensor, head_weight: Tensor, alpha: float = 0.5
) -> tuple[Tensor, int, list[list[float]]]:
    """Sum of w * cross-entropy with D-PACE's weights, the counted slots, and the weights themselves [B*N][b].

    s_k = (1 - alpha) * q_k + alpha with q_k the drafter's detached probability of the label, and
    w_k = sum over m >= k of prod over i <= m of s_i; an uncounted slot is 1 in products and 0 in sums.
    """
    total, counted, weights = hidden.sum() * 0.0, 0, []
    for states, targets in _blocks(hidden, labels):
        slots = [k for k in range(1, len(targets)) if targets[k] != IGNORED]
        log_q = {k: F.log_softmax(head_weight @ states[k], dim=-1)[targets[k]] for k in slots}
        s = {k: (1 - alpha) * math.exp(log_q[k].item()) + alpha for k in slots}
        weights.append([0.0] * len(targets))
        for k in slots:
            weights[-1][k] = sum(math.prod(s[i] for i in slots if i <= m) for m in slots if m >= k)
            total = total - weights[-1][k] * log_q[k]
        counted += len(slots)
    return total, counted, weights


def naive_dpace_loss(hidden: Tensor, labels: Tensor, head_weight: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE: sum(w * ce) / C with C the counted slots; a connected zero where nothing counts."""
    total, counted, _ = naive_dpace_sums(hidden, labels, head_weight, alpha)
    return total / counted if counted else total


def naive_divergence(name: str, p: Tensor, q: Tensor) -> Tensor:
    """A divergence of two distributions [V], token by token; "overlap" is the probability of acceptance."""
    overlap = sum(torch.minimum(a, b) for a, b in zip(p, q, strict=True))
    kl = sum(a * (torch.log(a) - torch.log(b)) for a, b in zip(p, q, strict=True))
    half_l1 = sum(torch.abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    if name == "lk_hybrid":
        share = math.exp(-3 * overlap.item())
        return share * kl + (1 - share) * half_l1
    return {"kl": kl, "total_variation": half_l1, "lk": -torch.log(overlap), "overlap": overlap}[name]


def naive_distilled_sum(
    hidden: Tensor,
    labels: Tensor,
    head_weight: Tensor,
    target_states: Callable[[int, int], Tensor],
    name: str,
    weights: list[list[float]],
    temperature: float = 1.0,
    share: float = 0.0,
) -> Tensor:
    """Sum over blocks and slots of the mixture of weighted cross-entropy and a divergence or expected acceptance.

    Args:
        hidden, labels, head_weight: As for `naive_sums`.
        target_states: The target's final hidden state [D] that predicts slot k of block n, as a function of (n, k).
        name: The objective.
        weights: Weight of each slot of each block.
        temperature: Of the target's distribution.
        share: Of the cross-entropy.
    """
    total = hidden.sum() * 0.0
    for n, (states, targets) in enumerate(_blocks(hidden, labels)):
        accepted: Tensor | float = 1.0
        for k in (k for k in range(1, len(targets)) if targets[k] != IGNORED):
            q = torch.softmax(head_weight @ states[k], dim=-1)
            p = torch.softmax(head_weight @ target_states(n, k) / temperature, dim=-1)
            total = total - share * weights[n][k] * torch.log(q[targets[k]])
            if name == "expected_acceptance":
                accepted = accepted * naive_divergence("overlap", p, q)
                total = total + (1 - share) * (1 - accepted)
            else:
                total = total + (1 - share) * weights[n][k] * naive_divergence(name, p, q)
    return total


def naive_metrics(hidden: Tensor, labels: Tensor, head_weight: Tensor) -> dict[str, int | list[int]]:
    """Counts over all anchors that have a counted slot.

    A verification commits the drafts before the first wrong one and one token of the target's own. Where the slots
    that count end early, the text ends there too, and nothing after its last token is committed.

    Returns:
        A dict of `anchors`; `counted` slots; `accepted` drafts, those before the first wrong one; `committed` tokens;
        `full`, the anchors whose slots all count, and `committed_full`, what those commit; `slot_correct` and
        `slot_counted`, lists of length b.
    """
    block_size = labels.shape[-1]
    names = ("anchors", "accepted", "committed", "full", "committed_full")
    totals, correct, counted = dict.fromkeys(names, 0), [0] * block_size, [0] * block_size
    for states, targets in _blocks(hidden, labels):
        slots = [k for k in range(1, block_size) if targets[k] != IGNORED]
        hits = {k: int((head_weight @ states[k]).argmax()) == targets[k] for k in slots}
        for k in slots:
            counted[k] += 1
            correct[k] += hits[k]
        accepted = next((i for i, k in enumerate(slots) if not hits[k]), len(slots))
        full = len(slots) == block_size - 1
        committed = accepted + 1 if full or accepted < len(slots) else accepted
        for name, value in zip(names, (bool(slots), accepted, committed, full, full * committed), strict=True):
            totals[name] += int(value)
    return {**totals, "counted": sum(counted), "slot_correct": correct, "slot_counted": counted}


def random_drafter(
    layer_types: Sequence[str], *, window: int | None = None, attention: str = "sdpa", seed: int = 0, **fields
) -> DFlashDraftModel:
    """A drafter of 32 hidden units, 4 heads and 2 KV heads whose attention is far from uniform.

    Args:
        layer_types: Attention type of each layer, "full_attention" or "sliding_attention".
        window: The sliding layers' window in tokens.
        attention: Attention backend.
        seed: Of the weights.
        **fields: Any field of the configuration.
    """
    config = DFlashDraftConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": len(layer_types),
            "layer_types": list(layer_types),
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 50,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            "block_size": 4,
            "target_layer_ids": [1, 3],
            "num_target_layers": 6,
            "mask_token_id": 49,
            "attn_implementation": attention,
            **fields,
        }
    )
    drafter = DFlashDraftModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.normal_(generator=generator)
            if parameter.dim() == 2:
                parameter.mul_(parameter.shape[1] ** -0.5)
            elif name.endswith("norm.weight"):
                parameter.mul_(0.2).add_(1.0)
    return drafter


@dataclass
class PackedRows:
    """Rows of documents with anchors: tensors as the collator makes them, and where each block came from.

    `blocks` holds (row, index among the row's anchors, first token of the document in the row, document-local anchor).
    """

    document_ids: Tensor
    position_ids: Tensor
    anchor_positions: Tensor
    blocks: list[tuple[int, int, int, int]]


def pack_rows(rows: Sequence[Sequence[tuple[int, Sequence[int]]]], padding: int = 0, unused: int = 0) -> PackedRows:
    """Lay out rows of documents given as (length, document-local anchors).

    Args:
        rows: For each row its documents.
        padding: Padded tokens at the end of the longest row.
        unused: Unused anchors at the end of the row with the most anchors.
    """
    length = max(sum(n for n, _ in row) for row in rows) + padding
    num_anchors = max(sum(len(anchors) for _, anchors in row) for row in rows) + unused
    document_ids = torch.full((len(rows), length), -1)
    position_ids = torch.zeros(len(rows), length, dtype=torch.long)
    anchor_positions = torch.full((len(rows), num_anchors), -1)
    blocks = []
    for r, row in enumerate(rows):
        start, used = 0, 0
        for d, (size, anchors) in enumerate(row):
            document_ids[r, start : start + size] = d
            position_ids[r, start : start + size] = torch.arange(size)
            for anchor in anchors:
                anchor_positions[r, used] = start + anchor
                blocks.append((r, used, start, anchor))
                used += 1
            start += size
    return PackedRows(document_ids, position_ids, anchor_positions, blocks)


def random_inputs(drafter: DFlashDraftModel, rows: PackedRows, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise embeddings [B, N*b, D] and context [B, T, K*D]; padding is filled too, so that a leak shows."""
    config, generator = drafter.config, torch.Generator().manual_seed(seed)
    num_rows, num_anchors = rows.anchor_positions.shape
    noise = torch.randn(num_rows, num_anchors * config.block_size, config.hidden_size, generator=generator)
    width = len(config.target_layer_ids) * config.hidden_size
    return noise, torch.randn(*rows.document_ids.shape, width, generator=generator)


def packed_forward(drafter: DFlashDraftModel, rows: PackedRows, noise_embeds: Tensor, context: Tensor) -> Tensor:
    """Hidden states [B, N*b, D] of all blocks of packed rows, by the drafter's own training forward."""
    config = drafter.config
    return drafter(
        noise_embeds=noise_embeds,
        context_hidden_states=context,
        attention_mask=training_masks(config, rows.anchor_positions, rows.document_ids, dtype=noise_embeds.dtype),
        position_ids=block_position_ids(rows.position_ids, rows.anchor_positions, config.block_size),
    ).last_hidden_state


def oracle_forward(
    model: nn.Module,
    target: nn.Module,
    greedy: Sequence[int],
    accepts: Sequence[int],
    rounds: list[dict],
    states_of: Callable = lambda output: output.last_hidden_state,
) -> Callable:
    """A forward of `model` that records each drafting round and then makes some of its drafts right.

    Drafts of a random drafter are almost never accepted, so rounds of several tokens need right ones from outside;
    what is recorded is the model's own output.

    Args:
        model: The drafter.
        target: The target whose head turns hidden states into drafts.
        greedy: Token ids of the prompt and the target's own greedy answer.
        accepts: Number of right drafts in each round; starts again at its end.
        rounds: Receives a dict per round: the call's arguments, `hidden` [1, b, D] and `anchor`, its position.
        states_of: Gets the hidden states out of the model's output.
    """
    original, head = model.forward, target.get_output_embeddings().weight

    def forward(**kwargs):
        output = original(**kwargs)
        hidden = states_of(output)
        anchor = kwargs["position_ids"][0, -hidden.shape[1]].item()
        right = min(accepts[len(rounds) % len(accepts)], len(greedy) - 1 - anchor)
        rounds.append({**kwargs, "hidden": hidden.clone(), "anchor": anchor})
        for slot in range(1, right + 1):
            hidden[0, slot] = head[greedy[anchor + slot]]
            assert (head @ hidden[0, slot]).argmax() == greedy[anchor + slot]
        return output

    return forward
