"""One thread for NumPy's and SciPy's OpenBLAS during computations with small matrices.

At some hundred rows its threads cost more than they save, and many times more where other processes use the cores.
OpenBLAS keeps one thread count for the process: the first thread that enters lowers it, the last that leaves restores
it.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable

_KMP = "KMP_DUPLICATE_LIB_OK"
_given = os.environ.get(_KMP)
from threadpoolctl import ThreadpoolController  # noqa: E402

if _given is None:  # the import sets the variable, which child processes would inherit
    os.environ.pop(_KMP, None)

from autokern.core.locks import Lock  # noqa: E402
from autokern.system import threads  # noqa: E402

_WHAT = ("get", "set")
Get = Callable[[], int]
Put = Callable[[int], object]


class _OneThread:
    """Lowers the thread count on entry, and restores it on exit unless other code has set it since.

    It does not nest. A thread whose exit was interrupted leaves at its next exit.
    """

    def __init__(self) -> None:
        self._in_new_process()

    def _in_new_process(self) -> None:
        self._lock = Lock()
        self._inside: set[int] = set()
        self._lowered: list[tuple[Get, Put, int]] = []

    def __enter__(self) -> None:
        if self._lock.entered():
            return
        with self._lock.here():
            if not self._inside and threads.allowed():
                for get, put in _libraries("scipy.linalg" in sys.modules):
                    before = get()
                    if before > 1:
                        self._lowered.append((get, put, before))
                        put(1)
            self._inside.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        if self._lock.entered():
            return
        with self._lock.here():
            self._inside.discard(threading.get_ident())
            if not self._inside:
                self._restore()

    def _restore(self) -> None:
        while self._lowered:
            get, put, before = self._lowered.pop()
            if get() == 1:
                put(before)

    def after_fork(self) -> None:
        """Restore the thread count in a child process, which lacks the threads that were inside."""
        self._restore()
        self._in_new_process()


one_thread = _OneThread()
"""A context manager that any number of threads may enter at a time; it costs some microseconds."""


@functools.cache
def _libraries(scipy: bool) -> list[tuple[Get, Put]]:
    """Return the getter and setter of each pthreads OpenBLAS of this process: NumPy's, and SciPy's.

    threadpoolctl's own setter affects only the calling thread.
    """
    found = []
    for library in ThreadpoolController().select(internal_api="openblas").lib_controllers:
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
            get, put = (getattr(library.dynlib, f"{prefix}openblas_{what}_num_threads{suffix}", None) for what in _WHAT)
            if library.threading_layer == "pthreads" and get is not None and put is not None:
                found.append((get, put))
                break
    return found


def look_again() -> None:
    """Search for libraries again at the next entry, because another one may be loaded."""
    _libraries.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=one_thread.after_fork)
