# SPDX-License-Identifier: Apache-2.0
"""Where compiled and tuned Triton kernels stay from one launch to the next."""

import logging
import os
from pathlib import Path


logger = logging.getLogger(__name__)

VARIABLE = "TRITON_CACHE_DIR"


def keep_tuned_kernels() -> Path | None:
    """Settle the folder of Triton's kernels for this process, before any is compiled.

    Inductor sets `TRITON_CACHE_DIR` to a folder of its own, for each device another, but only in a process that
    compiles a kernel itself: neither where its workers compile nor where its own cache has the graph. Kernels that
    other libraries tune would lie in one folder after the first launch and be looked for in another at the second.

    Returns:
        The folder of `TRITON_CACHE_DIR`, by default Triton's own (`TRITON_HOME/.triton/cache`, in the home of the
        user); None where that cannot be written, and every launch may tune anew.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    # As Triton has it, which takes "~" itself where a user has no home.
    folder = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        logger.warning(
            "%s cannot be written, so kernels may be tuned again at each launch, for a minute. Set %s to a folder "
            "that stays.",
            folder,
            VARIABLE,
        )
        return None
    os.environ[VARIABLE] = str(folder)
    return folder


__all__ = ["keep_tuned_kernels"]
