# SPDX-License-Identifier: Apache-2.0
"""Keeps the threads that run targets ahead out of the way while another thread compiles."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo import callback, convert_frame

from .compiled import THREAD, NotCompiled


# Where a thread stands that waits for a lock of the compiler.
COMPILER_DOORS = (callback.__file__, convert_frame.__file__)
POLL_SECONDS = 0.05


class CompileGate:
    """While torch compiles in one thread, no other is in its region; one for all of the process.

    torch's tracing changes `nn.Module.__call__` and a flag for all threads. A compilation therefore begins once all
    threads that are ahead have left their regions, and none enters one until it has ended. A thread that is ahead
    holds no lock of the compiler while it is waited for, since it never compiles.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._inside: set[threading.Thread] = set()
        self._closed = False

    def admit(self, thread: threading.Thread) -> None:
        """From now on compilations wait for this thread.

        To be called by the thread that compiles, and again now and then: torch._dynamo.reset() forgets whom to call.
        """
        with self._changed:
            self._threads.add(thread)
            self._install()

    def dismiss(self, thread: threading.Thread) -> None:
        """Nothing waits for this thread any more, wherever it is; without any, compilations are as they were."""
        with self._changed:
            self._threads.discard(thread)
            self._inside.discard(thread)
            if not self._threads:
                self._uninstall()
            self._changed.notify_all()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """The region: what runs in it runs ahead, at no time together with a compilation.

        Raises:
            NotCompiled: When something in it had to be compiled first.
        """
        thread = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside.add(thread)
        THREAD.ahead, THREAD.refused = True, False
        try:
            yield
        except Exception as error:
            if THREAD.refused and not isinstance(error, NotCompiled):
                # The compiler makes an error of its own of what it is refused with.
                raise NotCompiled("The target compiles functions of its own.") from error
            raise
        finally:
            THREAD.ahead = False
            with self._changed:
                self._inside.discard(thread)
                self._changed.notify_all()

    def _install(self) -> None:
        handler = torch._dynamo.callback_handler
        if self._on_start not in handler.start_callbacks:
            handler.register_start_callback(self._on_start)
        if self._on_end not in handler.end_callbacks:
            handler.register_end_callback(self._on_end)

    def _uninstall(self) -> None:
        handler = torch._dynamo.callback_handler
        if self._on_start in handler.start_callbacks:
            handler.remove_start_callback(self._on_start)
        if self._on_end in handler.end_callbacks:
            handler.remove_end_callback(self._on_end)
        self._closed = False

    def _on_start(self, args: callback.CallbackArgs) -> None:
        """Called when the first of the compilations that go on together begins."""
        if THREAD.ahead and args.callback_trigger is callback.CallbackTrigger.CUDAGRAPH_RECORDING:
            # Traces nothing, and graphs belong to the thread that records them.
            return
        if THREAD.ahead:
            # A function that the user compiled: left to the training thread, as everything that has to be compiled.
            THREAD.refused = True
            raise NotCompiled("A thread that is ahead does not compile.")
        with self._changed:
            self._closed = True
            while not all(_waits_for_compiler(thread) for thread in self._inside):
                self._changed.wait(POLL_SECONDS)

    def _on_end(self, args: callback.CallbackArgs) -> None:
        """Called when the last of them has ended, or when [`_on_start`] raised: nothing compiles any more."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()


def _waits_for_compiler(thread: threading.Thread) -> bool:
    """Whether a thread is about to compile what the user made, held up by the one that compiles: it will not move."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename in COMPILER_DOORS


GATE = CompileGate()


__all__ = ["GATE", "CompileGate"]
