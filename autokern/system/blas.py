"""One thread for NumPy's and SciPy's OpenBLAS, while small matrices are computed.

At some hundred rows its threads cost more than they save, and where other processes use the cores, many times more.
OpenBLAS keeps one number for the process, so it is lowered once for all threads that are inside, and restored by the
last to leave.
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

if _given is None:  # child processes inherit what the import sets
    os.environ.pop(_KMP, None)

from autokern.core.locks import Lock  # noqa: E402
from autokern.system import threads  # noqa: E402

_WHAT = ("get", "set")
Get = Callable[[], int]
Put = Callable[[int], object]


class _OneThread:
    """Lowers the number of threads on the way in, and restores it on the way out, unless it was set meanwhile.

    It does not nest. A thread that an interrupt kept from leaving leaves when it is inside the next time.
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
        """Restore the number in a child process: the threads that were inside are not there."""
        self._restore()
        self._in_new_process()


one_thread = _OneThread()
"""A context manager that any number of threads may be inside of at a time; it costs some microseconds."""


@functools.cache
def _libraries(scipy: bool) -> list[tuple[Get, Put]]:
    """Return getter and setter of each OpenBLAS of this process whose number is the process's: NumPy's, and SciPy's.

    threadpoolctl's own setter obeys one thread only.
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
    """Note that a library may have been loaded."""
    _libraries.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=one_thread.after_fork)
