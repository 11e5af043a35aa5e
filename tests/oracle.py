# SPDX-License-Identifier: Apache-2.0
"""Drafters for tests of decoding: random ones, oracles whose right slots are known, and ones that learned a little."""

import functools

import torch
from naive import random_drafter
from tiny import HIDDEN_SIZE, MASK_TOKEN_ID, VOCAB_SIZE, dense_target, hybrid_target, llama_target

from dflash_hf import DataCollatorForDFlash, DFlashDraftModel, FrozenTarget, PackedDataset
from dflash_hf.frozen_target import FrozenHead
from dflash_hf.losses import draft_blocks


TARGETS = {"dense": dense_target, "tied_llama": llama_target, "hybrid": hybrid_target}
PROMPT = [5, 80, 3, 201, 17, 42, 9]


class OracleDrafter(DFlashDraftModel):
    """A drafter that is told the answer, and which of its slots shall be right.

    Its last hidden states are rows of the target's head, so that its tokens go through all of the decoding code.
    """

    def tell(self, target, sequence, right_slots):
        """Draft `sequence[position]` where `right_slots(anchor)[k - 1]` holds for slot k, and another token else."""
        self.told = target.get_output_embeddings().weight, sequence, right_slots
        return self

    def forward(self, noise_embeds, context_hidden_states, attention_mask=None, position_ids=None, cache=None):
        past = cache.get_seq_length() if cache is not None else 0
        output = super().forward(noise_embeds, context_hidden_states, attention_mask, position_ids, cache)
        head, sequence, right_slots = self.told
        anchor = past + context_hidden_states.shape[1]
        anchor = int(anchor if position_ids is None else position_ids[0, -noise_embeds.shape[1]])
        tokens = []
        for slot, right in enumerate(right_slots(anchor), start=1):
            token = sequence[anchor + slot] if anchor + slot < len(sequence) else 0
            tokens.append(token if right else (token + 1) % 256)
        output.last_hidden_state = torch.cat([output.last_hidden_state[:, :1], head[tokens][None]], dim=1)
        return output


def drafter_for(target, **fields):
    """A random drafter of one causal sliding and one full layer."""
    fields = {
        "layer_types": ["sliding_attention", "full_attention"],
        "window": 9,
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "num_target_layers": target.config.get_text_config().num_hidden_layers,
        **fields,
    }
    return random_drafter(fields.pop("layer_types"), **fields)


def oracle_for(target, sequence, right_slots, **fields):
    """An oracle; `right_slots` is a list of booleans for slots 1 to b - 1, or a function of the anchor's position."""
    rights = right_slots if callable(right_slots) else lambda anchor: right_slots
    fields.setdefault("block_size", len(rights(0)) + 1)
    config = drafter_for(target, **fields).config
    return OracleDrafter(config).eval().tell(target, sequence, rights)


def greedy(target, prompt, max_new_tokens, **kwargs):
    """The target's own greedy answer behind its prompt."""
    ids = torch.tensor([prompt])
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **kwargs
    )
    return output[0].tolist()


@functools.cache
def target_and_answer(name):
    """A target that no test changes, and the prompt with 50 tokens of its greedy answer."""
    target = TARGETS[name]()
    return target, greedy(target, PROMPT, 50)


def written_by(target, prompts, budget, eos=()):
    """The target's own greedy answers to prompts, as documents."""
    answers = [greedy(target, prompt, budget, eos_token_id=list(eos) or None) for prompt in prompts]
    return [
        {"input_ids": ids, "supervised_spans": [[len(p), len(ids)]]} for p, ids in zip(prompts, answers, strict=True)
    ]


def trained_like(target, documents, block_size=4, steps=60, device="cpu", **fields):
    """A drafter that a few steps have taught some of the documents' tokens, so that it accepts more than one."""
    torch.manual_seed(0)
    drafter = drafter_for(target, block_size=block_size, **fields).to(device)
    frozen, head = FrozenTarget(target, drafter.config.target_layer_ids), FrozenHead(target, device)
    batch = DataCollatorForDFlash(block_size, num_anchors=64)([PackedDataset(documents, 4096)[0]])
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    context = frozen.context_hidden_states(batch["input_ids"], batch["document_lengths"])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    drafter.train()
    for _ in range(steps):
        output = draft_blocks(drafter, drafter.config, head, batch, context, batch["anchor_positions"])
        logits = head.logits(output.last_hidden_state).flatten(0, 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
        optimizer.step()
    return drafter.eval()
