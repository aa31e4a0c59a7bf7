"""Fewer threads for one stretch of work, in the thread that does it and in no other.

`torch.set_num_threads` also writes a process-wide default, which every thread that first uses torch meanwhile keeps for
good. So OpenMP and MKL are set directly: each keeps a number per thread. Counts are lowered, never raised.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autokern.core.recovery import uninterrupted
from autokern.system import host

_Run = TypeVar("_Run", bound=Callable[..., Any])

_allowed = True


def allow(yes: bool) -> None:
    """Allow or forbid this module to change any count; ``AUTOKERN_THREADS=off`` forbids it."""
    global _allowed
    _allowed = yes


def allowed() -> bool:
    """Whether this module may change counts."""
    return _allowed


def current() -> int:
    """Return the number of threads that torch's operations use in the calling thread."""
    return torch.get_num_threads()


def ceiling() -> int:
    """Return the most threads that make sense in the calling thread: by quota, affinity and torch's own number."""
    most = torch.get_num_threads()
    return most if most == 1 else min(most, host.thread_ceiling())


def limited(run: _Run, count: int) -> _Run:
    """Return a function that does the same as `run`, with at most `count` threads in the calling thread.

    The former number is restored, after exceptions too. It costs about a microsecond; where torch has no more than
    `count` threads anyway, `run` is called as it is. One thread leaves OpenMP's workers waiting where they are; with
    another number GNU's OpenMP ends those beyond it, and the next full team starts them anew. Calls of `run` may nest,
    and overlap in several threads.
    """

    @functools.wraps(run)
    def limited_run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_num_threads()  # also initialises torch's threads, which would undo the settings below
        if count >= before or not _allowed:
            return run(*args, **kwargs)
        set_openmp, set_mkl = _setters()
        mkl_before = before  # an interrupt may come before the next value does
        try:
            set_openmp(count)
            mkl_before = set_mkl(count)
            return run(*args, **kwargs)
        finally:
            try:
                set_mkl(mkl_before)
            finally:  # an interrupt may have come out of the line above
                set_openmp(before)

    return limited_run  # type: ignore[return-value]


@functools.cache
def _setters() -> tuple[Callable[[int], object], Callable[[int], int]]:
    """Return the setters of OpenMP's and MKL's number for the calling thread; MKL's returns the number it replaces.

    Where one of them cannot be found (Windows, say), `torch.set_num_threads` serves for both: threads that first use
    torch inside a block then keep its number, and those that set the default elsewhere meanwhile are overruled.
    """
    library = _torch_library()
    set_openmp = getattr(library, "omp_set_num_threads", None)
    set_mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    if set_openmp is None or (set_mkl is None and torch._C.has_mkl):
        return torch.set_num_threads, int
    set_openmp.argtypes, set_openmp.restype = [ctypes.c_int], None
    if set_mkl is not None:
        set_mkl.argtypes, set_mkl.restype = [ctypes.c_int], ctypes.c_int
    before = torch.get_num_threads()
    set_openmp(before + 1)  # a number only; no thread is started
    obeyed = torch.get_num_threads() == before + 1
    set_openmp(before)
    return (set_openmp, set_mkl or int) if obeyed else (torch.set_num_threads, int)


def _torch_library() -> ctypes.PyDLL | None:
    """Return torch as it is loaded; names looked up in it are found in the libraries that it depends on, too.

    ``PyDLL`` keeps the interpreter's lock over a call, which is right for calls that take nanoseconds.
    """
    try:
        return ctypes.PyDLL(torch._C.__file__, mode=os.RTLD_NOLOAD)
    except uninterrupted(OSError, AttributeError):  # Windows has no such mode
        return None
