# SPDX-License-Identifier: Apache-2.0
"""Compiled functions that a thread beside the training one may call: there they run, and never compile."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


class NotCompiled(Exception):
    """What runs ahead of the training thread needs something compiled, which only the training thread may do."""


class _Marks(threading.local):
    # Whether the thread is ahead, whether it is within a function that may only run what is compiled, and whether it
    # came upon something that it would have had to compile.
    ahead = run_only = refused = False


THREAD = _Marks()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` of a function, which in a thread that is ahead only runs what other threads have compiled.

    While torch traces in one thread, modules and compiled functions that another thread calls are traced with it, or
    raise. `torch._dynamo.run` traces nothing; where nothing compiled fits it runs the function as it stands, so that
    one begins with [`refuse_uncompiled`]. A wrapper cannot do that here: all would share its code, which the compiler
    keeps only a few variants of.

    Args:
        function: Begins with [`refuse_uncompiled`].
        **options: Arguments of `torch.compile`.
    """
    made = torch.compile(function, **options)
    if made is function or torch._dynamo.config.disable:
        # The compiler is switched off, so that nothing can be compiled in any thread.
        return function
    existing = torch._dynamo.run(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not THREAD.ahead:
            return made(*args, **kwargs)
        THREAD.run_only = True
        try:
            return existing(*args, **kwargs)
        finally:
            THREAD.run_only = False

    return call


def refuse_uncompiled() -> None:
    """First line of a function for [`compiled`]: its body must not run as it stands where it had to be compiled.

    Raises:
        NotCompiled: In a thread that is ahead, when nothing compiled fits the arguments.
    """
    # In this order a compiler sees nothing of threads in it. Whether Dynamo traces this very call is asked, since
    # is_compiling is true in all threads while one compiles.
    if not torch.compiler.is_dynamo_compiling() and THREAD.run_only:
        raise NotCompiled("Nothing that is compiled fits these arguments.")


def refuse_ahead(what: str) -> None:
    """Leave something to the training thread.

    Args:
        what: What it is.

    Raises:
        NotCompiled: In a thread that is ahead.
    """
    if THREAD.ahead:
        raise NotCompiled(f"{what} belongs into the training thread.")


__all__ = ["THREAD", "NotCompiled", "compiled", "refuse_ahead", "refuse_uncompiled"]
