# SPDX-License-Identifier: Apache-2.0
"""Tile sizes with which flex attention fits the shared memory of the GPU at hand."""

from typing import Any

import torch


# Below this, what flex attention chooses for data-centre GPUs may not fit. Workstation and consumer GPUs have 101,376.
ENOUGH_SHARED_MEMORY = 160_000


def flex_kernel_options(device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> dict[str, int] | None:
    """`kernel_options` of flex attention for a device, None where its own choice fits.

    Args:
        device: The device of the queries.
        dtype: Type of queries and keys.
        head_dim: Channels of a head.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # its type stub lacks the field
    memory = properties.shared_memory_per_block_optin
    return None if memory >= ENOUGH_SHARED_MEMORY else small_tiles(dtype, head_dim)


def small_tiles(dtype: torch.dtype, head_dim: int = 128) -> dict[str, int]:
    """Tiles that fit 100 KB of shared memory with heads of up to 256.

    Args:
        dtype: Type of queries and keys.
        head_dim: Channels of a head.

    Returns:
        Options whose names start with the pass they are for. The forward holds a tile of queries and, per stage, one
        of keys and one of values; the backward one each of keys, values, queries and output gradients.
    """
    rows = 64 if dtype.itemsize <= 2 else 32
    if head_dim > 128:
        rows //= 2
    forward = {"BLOCK_M": rows, "BLOCK_N": rows, "num_stages": 2, "num_warps": 4}
    backward = {
        "BLOCK_M1": rows,
        "BLOCK_N1": rows,
        "BLOCK_M2": rows,
        "BLOCK_N2": rows,
        "num_stages": 1,
        "num_warps": 4,
    }
    return {f"fwd_{name}": value for name, value in forward.items()} | {
        f"bwd_{name}": value for name, value in backward.items()
    }
