# SPDX-License-Identifier: Apache-2.0
"""Attention over lengths that change from call to call."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class VariedLengths:
    """Leaves cuDNN out of `scaled_dot_product_attention` while someone works on lengths that change.

    On Hopper GPUs recent versions of torch prefer cuDNN's attention, which plans anew for each shape it has not seen:
    some 40 ms on the host, in every round of decoding, and for every new length of a document. Flash attention and the
    memory-efficient kernel need no plan. The choice is one of the whole process, so that threads which work at the
    same time share it: the first one switches cuDNN off, the last one gives back what was there. Whoever runs
    attention beside them holds it too, as a trainer does all along: otherwise its kernels would change with theirs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    torch.backends.cuda.enable_cudnn_sdp(self._before)


varied_lengths = VariedLengths()


__all__ = ["VariedLengths", "varied_lengths"]
