"""Locks on which neither a signal handler nor a forked process deadlocks.

Python runs a signal handler in the main thread between any two steps of its work. A handler that computes with the
same model must not wait for a lock of that very thread. A forked process lacks the threads that hold the locks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

_process = 0  # number of forks between the first process and this one


def _count_fork() -> None:
    global _process
    _process += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def forked() -> bool:
    """Whether this process was forked after the import of autokern (a DataLoader worker, say)."""
    return _process > 0


class Lock:
    """A reentrant lock, one for each process: ``with lock.here()``."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    def here(self) -> Any:
        """Return the lock of this process."""
        return self._of.get(_process) or self._of.setdefault(_process, threading.RLock())

    def entered(self) -> bool:
        """Whether this thread holds the lock: a signal handler that asks then must not touch the guarded state."""
        return any(lock._is_owned() for lock in list(self._of.values()))


if TYPE_CHECKING:
    once = functools.cached_property
else:

    def once(function: Any) -> Any:
        """Return a cached property without the lock over all instances that Python has before 3.12."""
        made = functools.cached_property(function)
        made.lock = contextlib.nullcontext()
        return made
