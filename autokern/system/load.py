"""Load: how busy other programs keep the cores that this process may use, read without waiting.

Load averages react after minutes. So two readings of the busy time of the cores are compared, less that of this
process. A single timing is judged by the time that threads were ready to run and had no core
(`/proc/self/task/*/schedstat`). Where the system keeps no such counter, nothing is known.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from autokern.core.recovery import suppressed, uninterrupted
from autokern.system.cgroups import text_of

_STAT, _TASKS = Path("/proc/stat"), Path("/proc/self/task")
_LEAST = 0.08
"""Seconds below which ticks of 10 ms tell nothing about the cores."""
_SPARE = 0.3
"""Cores that others may use beyond those that are free: a desktop at rest uses some."""
_MOST_THREADS = 16
"""Threads that are looked at: of many workers that meet at barriers, some tell of all, and each costs 2 µs."""


class Load(NamedTuple):
    """How busy a machine was over an interval."""

    cores: int  # that this process may use
    others: float | None = None  # how many of them others kept busy

    def crowded(self, threads: int) -> bool:
        """Whether a process that computes in so many threads is disturbed; False where nothing is known."""
        return self.others is not None and self.others + min(threads, self.cores) > self.cores + _SPARE

    def __str__(self) -> str:
        return f"others use {min(self.others or 0.0, self.cores):.1f} of {self.cores} cores"


class Snapshot(NamedTuple):
    """Counters at one time; None for those that the system does not keep."""

    at: float
    cores: int
    busy: float | None
    own: float


class Watch:
    """Compares the counters of two times."""

    def __init__(self, read: Callable[[], Snapshot] | None = None) -> None:
        self._read = read or snapshot
        self.begin()

    def begin(self) -> None:
        """Begin an interval."""
        self._start = self._read()

    def reading(self) -> Load:
        """Return the load of the interval until now, which goes on."""
        start, now = self._start, self._read()
        seconds, own = now.at - start.at, now.own - start.own
        if seconds < _LEAST or now.busy is None or start.busy is None:
            return Load(now.cores)
        return Load(now.cores, max(0.0, (now.busy - start.busy - own) / seconds))


class Waited:
    """Seconds that the present threads of this process have waited for a core; a context manager, cheap to read."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._files: list[int] = []
        with suppressed(OSError):
            for folder in itertools.islice(tasks.iterdir(), _MOST_THREADS):  # the oldest first
                with suppressed(OSError):  # the thread has ended
                    self._files.append(os.open(folder / "schedstat", os.O_RDONLY | os.O_CLOEXEC))

    def __enter__(self) -> Waited:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            os.close(self._files.pop())

    def __call__(self) -> float:
        """Return the seconds until now, 0 where they are not known."""
        total = 0
        for file in self._files:
            with suppressed(OSError, ValueError):
                _, waited, _ = os.pread(file, 80, 0).split()
                total += int(waited)
        return total / 1e9


def snapshot() -> Snapshot:
    """Return the counters now."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = len(cpus) if cpus else os.cpu_count() or 1
    return Snapshot(time.perf_counter(), cores, busy_seconds(text_of(_STAT), cpus), time.process_time())


def busy_seconds(text: str, cpus: set[int] | None) -> float | None:
    """Return the seconds that some CPUs have been busy, taken by other virtual machines included.

    The text is that of `/proc/stat`; where it is empty, psutil is asked for all CPUs.
    """
    ticks, found = 0, False
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and (cpus is None or int(name[3:]) in cpus):
            user, nice, system, _, _, *more = map(int, fields[:8])  # neither idle nor waiting for a disk
            ticks, found = ticks + user + nice + system + sum(more), True
    if found:
        return ticks / os.sysconf("SC_CLK_TCK")
    try:
        import psutil

        times = psutil.cpu_times()
    except uninterrupted(Exception):  # whatever the system refuses
        return None
    return float(times.user + times.system + getattr(times, "nice", 0.0))
