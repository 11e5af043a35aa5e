# SPDX-License-Identifier: Apache-2.0
"""Noise on the target's hidden states: a document's own, however documents are spread over rows and ranks."""

import torch


def add_context_noise(
    context_hidden_states: torch.Tensor,
    document_lengths: list[list[int]],
    noise_seeds: list[list[int]],
    half_width: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Add uniform noise in `(-half_width, half_width)`, drawn per document from the document's own seed.

    Args:
        context_hidden_states (`torch.Tensor` of shape `[B, T, K * D]`): The target's hidden states, left as they are.
        document_lengths: Lengths in tokens of the documents of each row.
        noise_seeds: One seed per document.
        half_width: Bound of the noise; 0 returns the input itself.
        dtype: Type of the result, by default that of the input; the sum is taken in fp32 at least.

    Returns:
        `torch.Tensor` of shape `[B, T, K * D]`. However documents are spread over rows, batches and ranks, each sees
        the same noise.
    """
    if half_width == 0:
        return context_hidden_states
    # Document by document, so that no more than one of them is held in fp32.
    noisy = context_hidden_states.to(dtype or context_hidden_states.dtype, copy=True)
    generator = torch.Generator(device=noisy.device)
    wide = torch.promote_types(context_hidden_states.dtype, torch.float32)
    for row, (lengths, seeds) in enumerate(zip(document_lengths, noise_seeds, strict=True)):
        start = 0
        for length, seed in zip(lengths, seeds, strict=True):
            part = (row, slice(start, start + length))
            generator.manual_seed(seed)
            noise = torch.empty_like(context_hidden_states[part], dtype=torch.float32)
            # Noise is small beside large hidden states: summed in bf16 most of it would be rounded away.
            noise = noise.uniform_(-half_width, half_width, generator=generator)
            noisy[part] = (context_hidden_states[part].to(wide) + noise).to(noisy.dtype)
            start += length
    return noisy


__all__ = ["add_context_noise"]
