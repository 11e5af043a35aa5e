# SPDX-License-Identifier: Apache-2.0
"""What mixes tokens in a target, for packed rows: convolution, gated delta rule and attention within documents.

Shapes: N packed tokens, C channels, H heads, Hk key heads, d head size.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import metadata
from itertools import groupby
from unittest.mock import patch

import torch
from packaging.version import Version
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.utils.import_utils import is_flash_linear_attention_available

from .packing import CHUNK_SIZE, PackedRow


# The first release whose kernels take the chunks of packed documents from the caller.
LINEAR_ATTENTION_FLOOR = "0.6"


@cache
def delta_kernels_available() -> bool:
    """Whether flash-linear-attention is there, recent enough, and has a GPU to run on."""
    if not is_flash_linear_attention_available():
        return False
    versions = [metadata.version(name) for name in metadata.packages_distributions().get("fla", [])]
    return all(Version(version) >= Version(LINEAR_ATTENTION_FLOOR) for version in versions)


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, position_ids: torch.Tensor
) -> torch.Tensor:
    """Depthwise causal convolution that starts anew in each document.

    A sum of shifted products, so that a compiler makes one kernel of it and of what surrounds it; the layout stays
    that of the projections before and behind.

    Args:
        x (`torch.Tensor` of shape `[1, N, C]`): Inputs, N at least the kernel's width.
        weight (`torch.Tensor` of shape `[C, 1, W]`): Kernel, its last column for the token itself.
        bias (`torch.Tensor` of shape `[C]`, *optional*): Added to the sum.
        position_ids (`torch.Tensor` of shape `[1, N]`): Positions in the document.

    Returns:
        `torch.Tensor` of shape `[1, N, C]` in the type of `x`, summed in fp32.
    """
    kernel = weight[:, 0].float()
    total = x.float() * kernel[:, -1]
    for back in range(1, kernel.shape[-1]):
        earlier = nn.functional.pad(x[:, :-back], (0, 0, back, 0)).float()
        inside = (position_ids >= back)[..., None]
        total = total + torch.where(inside, earlier, 0.0) * kernel[:, -1 - back]
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype)


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """Gated delta rule whose state starts anew in each document; queries and keys are normalised in it.

    Args:
        query (`torch.Tensor` of shape `[1, N, Hk, d]`): Queries.
        key (`torch.Tensor` of shape `[1, N, Hk, d]`): Keys.
        value (`torch.Tensor` of shape `[1, N, H, d]`): Values.
        g (`torch.Tensor` of shape `[1, N, H]`): Logarithm of the decay.
        beta (`torch.Tensor` of shape `[1, N, H]`): How much of a value is written.
        row: The documents.

    Returns:
        `torch.Tensor` of shape `[1, N, H, d]`.
    """
    if query.device.type == "cuda" and delta_kernels_available():
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        # The chunks are handed over, since the kernel would wait for the device to count them.
        output, _ = chunk_gated_delta_rule(
            query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=row.boundaries,
            chunk_indices=row.chunks, chunk_size=CHUNK_SIZE,
        )  # fmt: skip
        return output
    return reference_delta_rule(query, key, value, g, beta, row)


def reference_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """[`delta_rule`] by transformers' own loop, one document after another."""
    # What the module exports is the loop only where no kernel is installed; behind it lies the loop itself.
    loop = inspect.unwrap(torch_chunk_gated_delta_rule)
    parts = (tensor.split(row.lengths, dim=1) for tensor in (query, key, value, g, beta))
    outputs = [
        loop(q, k, v, g=decay, beta=b, use_qk_l2norm_in_kernel=True)[0]
        for q, k, v, decay, b in zip(*parts, strict=True)
    ]
    return torch.cat(outputs, dim=1)


@contextmanager
def transformers_delta_rule() -> Iterator[None]:
    """transformers' Qwen3.5/3.6 layers with the loop in place of a kernel.

    A kernel would be tuned once more for what only a check calls, for a minute, and could not vouch for itself. The
    layers look the rule up in their module, which offers no other way to choose it.
    """
    with ExitStack() as stack:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
            loop = inspect.unwrap(module.torch_chunk_gated_delta_rule)
            stack.enter_context(patch.object(module, "torch_chunk_gated_delta_rule", loop))
        yield


def document_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scaling: float | None = None
) -> torch.Tensor:
    """Causal attention of each document to itself, without a mask over the whole row.

    Args:
        query (`torch.Tensor` of shape `[1, N, H, d]`): Queries.
        key (`torch.Tensor` of shape `[1, N, Hk, d]`): Keys.
        value (`torch.Tensor` of shape `[1, N, Hk, d]`): Values.
        lengths: Lengths in tokens of the documents; neighbours of one length share a call.
        scaling: Factor of the scores; `d ** -0.5` by default.

    Returns:
        `torch.Tensor` of shape `[1, N, H, d]`.
    """
    outputs = []
    start = 0
    for length, neighbours in groupby(lengths):
        count = len(list(neighbours))
        part = slice(start, start + count * length)
        q, k, v = (t[0, part].unflatten(0, (count, length)).transpose(1, 2) for t in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
        start = part.stop
    return torch.cat(outputs)[None]
