"""Run a function with fewer OpenMP and MKL threads, one for OpenBLAS, or a piece of work in a few Python threads.

`torch.set_num_threads` also writes a process-wide default, which every thread that first uses torch meanwhile keeps for
good. So OpenMP and MKL are set directly: each has a count per thread. OpenBLAS has one count for the process; at some
hundred rows its threads cost more than they save. For small pieces (a tile that fits a core's cache), Python threads
with one thread of torch each are faster than OpenMP's, which wait for each other after every operation.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from autokern.core.errors import uninterrupted
from autokern.core.state import Lock, forked, permitted
from autokern.system import host

_WHAT = ("get_num_threads", "set_num_threads", "get_parallel")
_linked: list[str] = []  # extensions besides NumPy's that are linked with an OpenBLAS
Setting = tuple[Callable[[], int], Callable[[int], object]]  # the functions that return and set a number of threads
_Run = TypeVar("_Run", bound=Callable[..., Any])

_ended: deque[int] = deque(maxlen=256)  # native ids of threads that ended lately
_TASKS = Path("/proc/self/task")


def ceiling() -> int:
    """Return the most useful threads in the calling thread: the least of quota, affinity and torch's own number."""
    most = torch.get_num_threads()
    return most if most == 1 else min(most, host.thread_ceiling())


def limited(run: _Run, count: int) -> _Run:
    """Wrap `run` so that it uses at most `count` threads in the calling thread; calls may nest, and overlap.

    It takes a microsecond. Unless `count` is one, GNU's OpenMP ends surplus workers; the next team starts them anew.
    """

    @functools.wraps(run)
    def limited_run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_num_threads()  # initialises torch's threads now: later it would undo the settings below
        if count >= before or "threads" not in permitted:
            return run(*args, **kwargs)
        set_openmp, set_mkl = _setters()
        mkl_before = before  # for an interrupt before `set_mkl` returns
        try:
            set_openmp(count)
            mkl_before = set_mkl(count)
            return run(*args, **kwargs)
        finally:
            try:
                set_mkl(mkl_before)
            finally:  # an interrupt may come in the line above
                set_openmp(before)

    return limited_run  # type: ignore[return-value]


@functools.cache
def _setters() -> tuple[Callable[[int], object], Callable[[int], int]]:
    """Return the setters of OpenMP's and MKL's count for this thread, else torch's; MKL's returns the former count."""
    library = _loaded(torch._C.__file__)
    set_openmp = getattr(library, "omp_set_num_threads", None)
    set_mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    if set_openmp is None or (set_mkl is None and torch._C.has_mkl):
        return torch.set_num_threads, int
    set_openmp.argtypes, set_openmp.restype = [ctypes.c_int], None
    if set_mkl is not None:
        set_mkl.argtypes, set_mkl.restype = [ctypes.c_int], ctypes.c_int
    before = torch.get_num_threads()
    set_openmp(before + 1)  # starts no thread
    obeyed = torch.get_num_threads() == before + 1
    set_openmp(before)
    return (set_openmp, set_mkl or int) if obeyed else (torch.set_num_threads, int)


def _loaded(path: str) -> ctypes.PyDLL | None:
    """Return a loaded library, in which symbols of its dependencies are found, too; calls hold the GIL."""
    try:
        return ctypes.PyDLL(path, mode=os.RTLD_NOLOAD)
    except uninterrupted(OSError, AttributeError):  # Windows has no such mode
        return None


class _OneThread:
    """One thread for OpenBLAS: the first to enter lowers the count, the last to leave restores it if unchanged."""

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), set[int]()
        self._lowered: list[tuple[Setting, int]] = []

    def __enter__(self) -> None:
        if self._lock.entered():
            return
        with self._lock.here():
            if not self._inside and "threads" in permitted:
                for get, put in _libraries():
                    before = get()
                    if before > 1:
                        self._lowered.append(((get, put), before))
                        put(1)
            self._inside.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        if self._lock.entered():
            return
        with self._lock.here():
            self._inside.discard(threading.get_ident())  # an exit that was interrupted is made up for by the next one
            if not self._inside:
                self.restore()

    def restore(self) -> None:
        """Restore the thread count, also in a child process, which lacks the threads that were inside."""
        self._inside.clear()
        while self._lowered:
            (get, put), before = self._lowered.pop()
            if get() == 1:
                put(before)


one_thread = _OneThread()  # a context that many threads may enter at a time, but none twice; it costs microseconds


@functools.cache
def _libraries() -> list[Setting]:
    """Return the getter and setter of each pthreads OpenBLAS that NumPy and the known extensions are linked with."""
    found = []
    for path in (getattr(sys.modules.get("numpy.linalg._umath_linalg"), "__file__", ""), *_linked):
        library = _loaded(path)
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
            get, put, kind = (getattr(library, f"{prefix}openblas_{what}{suffix}", None) for what in _WHAT)
            if get is not None and put is not None and kind is not None and kind() == 1:  # 2 is OpenMP
                found.append((get, put))
                break
    return found


def look_for_openblas(path: str) -> None:
    """Let `one_thread` also lower the count of the OpenBLAS with which the extension at `path` is linked."""
    _linked.append(path)
    _libraries.cache_clear()


class Member:
    """One of the `count` threads that share a piece of work; `number` counts from 0."""

    def __init__(self, number: int, count: int, barrier: threading.Barrier) -> None:
        self.number, self.count, self._barrier = number, count, barrier

    def wait(self) -> None:
        """Wait until every member has reached this barrier."""
        self._barrier.wait()

    def check(self) -> None:
        """Raise if another member has failed or the call was interrupted; `work` asks every few milliseconds."""
        if self._barrier.broken:
            raise threading.BrokenBarrierError


def members(device: torch.device) -> int:
    """Return the most members to use: torch's threads within affinity and quota, or one for an accelerator."""
    # in a forked process, MKL's allocator may loop for ever as soon as two threads multiply; modes see one thread only
    alone = device.type != "cpu" or "threads" not in permitted or forked() or _get_current_dispatch_mode() is not None
    return 1 if alone else ceiling()


def together(work: Callable[[Member], None], count: int) -> None:
    """Call `work` in `count` threads, this one too, each with grad mode off; raise the first error when all ended."""
    barrier = threading.Barrier(count)
    if count == 1:
        with torch.no_grad():
            return work(Member(0, 1, barrier))
    errors: list[BaseException] = []
    inference = torch.is_inference_mode_enabled()

    def share(number: int) -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():  # both modes belong to a thread
                work(Member(number, count, barrier))
        except threading.BrokenBarrierError:  # another member has failed, or the whole call was interrupted
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()
        finally:
            if number:
                _ended.append(threading.get_native_id())
                done[number - 1].set()

    alone, done = limited(share, 1), [threading.Event() for _ in range(1, count)]
    others = [threading.Thread(target=alone, args=(number,), daemon=True) for number in range(1, count)]
    try:
        for thread in others:
            thread.start()
        alone(0)
        _join(others, done)
    except BaseException:  # an interrupt in this thread, or no more threads can be started
        barrier.abort()
        raise
    finally:
        _join(others, done)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # else an out-of-memory error would keep its own frame alive, and its tensors
    return None


def _join(others: list[threading.Thread], done: list[threading.Event]) -> None:
    """Join the started threads; in Python 3.11 an interrupted `Thread.join` may return while its thread runs."""
    for thread, ended in zip(others, done, strict=True):
        if thread.ident is not None:  # an interrupt may have come before it was started
            while not ended.wait(0.1) and thread.is_alive():  # interrupted at its start, a thread never sets its event
                pass
            thread.join()


def _wait_for_ended() -> None:
    """Wait some 50 µs until ended threads have left MKL's list of buffers, else a child's first product never ends."""
    until = time.monotonic() + 0.1  # the system may have given the id to another thread
    while _ended:  # another thread may fork, too, and an interrupt may end this
        try:
            number = _ended.popleft()
        except IndexError:
            break
        while (_TASKS / str(number)).exists() and time.monotonic() < until:
            time.sleep(0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_ended, after_in_child=one_thread.restore)
