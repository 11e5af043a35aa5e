# SPDX-License-Identifier: Apache-2.0
"""Numbers of the device that the host reads later, when they have long arrived."""

import torch


class HostCopy:
    """A copy of a small tensor on its way to the host, which waits only if it is read before it has arrived.

    Args:
        tensor (`torch.Tensor`): On any device; of a CPU tensor the copy is there at once.
    """

    def __init__(self, tensor: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            # Only a copy into pinned memory leaves the host free to queue the next kernels.
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor.detach().to("cpu", copy=True)

    @property
    def is_immediate(self) -> bool:
        """Whether reading never waits."""
        return self._event is None

    def read(self) -> torch.Tensor:
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


__all__ = ["HostCopy"]
