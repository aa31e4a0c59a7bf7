"""A few Python threads that share a piece of work, each with one thread of torch.

For small pieces (a tile of a kernel matrix that fits a core's cache), independent threads are faster than OpenMP's,
which wait for each other after every operation; the gain grows with the number of cores. Threads are started for a call
and end with it, and a fork waits until the operating system has ended them, too.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from autokern.core.locks import forked
from autokern.system import threads

_ended: deque[int] = deque(maxlen=256)  # native ids of threads that ended lately
_TASKS = Path("/proc/self/task")


class _StoppedError(Exception):
    """Another member has failed, or the whole call was interrupted."""


class Member:
    """One of the `count` threads that share a piece of work; `number` counts from 0."""

    __slots__ = ("_barrier", "count", "number")

    def __init__(self, number: int, count: int, barrier: threading.Barrier) -> None:
        self.number, self.count, self._barrier = number, count, barrier

    def wait(self) -> None:
        """Wait until every member has reached this barrier."""
        if self.count > 1:
            try:
                self._barrier.wait()
            except threading.BrokenBarrierError:
                raise _StoppedError from None

    def check(self) -> None:
        """Raise if another member has failed or the call was interrupted."""
        if self._barrier.broken:
            raise _StoppedError


def size(device: torch.device) -> int:
    """Return the number of members to use: torch's number of threads, or one for an accelerator.

    A forked process gets one, too: there MKL's allocator may loop for ever as soon as two threads multiply.
    """
    return threads.current() if device.type == "cpu" and threads.allowed() and not forked() else 1


def run(work: Callable[[Member], None], count: int) -> None:
    """Call `work` in `count` threads, this one included, each with grad mode off.

    `work` should call `check` every few milliseconds. The first error of any member, or an interrupt, is raised when
    all have stopped.
    """
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
        except _StoppedError:
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    alone = threads.limited(share, 1)
    done = [threading.Event() for _ in range(1, count)]

    def in_thread(number: int) -> None:
        try:
            alone(number)
        finally:
            _ended.append(threading.get_native_id())
            done[number - 1].set()

    others = [threading.Thread(target=in_thread, args=(number,), daemon=True) for number in range(1, count)]
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
    """Wait until threads that ended for Python have ended for the system, too, which takes some 50 µs.

    Up to Python 3.12, `Thread.join` returns before thread-local data are destroyed. MKL's allocator then changes its
    list of buffers; a child forked meanwhile gets a half-changed list, and its first matrix product never ends.
    """
    until = time.monotonic() + 0.1  # the system may have given the id to another thread
    while _ended:  # another thread may fork, too, and an interrupt may end this
        try:
            number = _ended.popleft()
        except IndexError:
            break
        while (_TASKS / str(number)).exists() and time.monotonic() < until:
            time.sleep(0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_ended)
