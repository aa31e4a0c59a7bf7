"""Load: how busy other programs keep the cores that this process may use, read without waiting.

Load averages react after minutes. So the load is the difference of two readings of the cores' busy time, less this
process's own. A single timing is judged by the time that its threads were ready to run and had no core
(`/proc/self/task/*/schedstat`). Without these counters the load is unknown.
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
"""Shortest interval in seconds: counters tick every 10 ms."""
_SPARE = 0.3
"""Cores that others may use beyond the free ones before a process counts as disturbed: an idle desktop uses some."""
_MOST_THREADS = 16
"""Most threads to read, at 2 µs each: workers that meet at barriers wait alike."""


class Load(NamedTuple):
    """How busy a machine was over an interval."""

    cores: int  # that this process may use
    others: float | None = None  # how many of them others kept busy; None if unknown

    def crowded(self, threads: int) -> bool:
        """Whether others disturb a process of so many threads; False if the load is unknown."""
        return self.others is not None and self.others + min(threads, self.cores) > self.cores + _SPARE

    def __str__(self) -> str:
        return f"others use {min(self.others or 0.0, self.cores):.1f} of {self.cores} cores"


class Snapshot(NamedTuple):
    """Counters in seconds at one time."""

    at: float  # wall clock
    cores: int
    busy: float | None  # of all cores that this process may use; None if the system has no such counter
    own: float  # CPU time of this process


class Watch:
    """Measures the load since `begin`."""

    def __init__(self, read: Callable[[], Snapshot] | None = None) -> None:
        self._read = read or snapshot
        self.begin()

    def begin(self) -> None:
        """Begin an interval."""
        self._start = self._read()

    def reading(self) -> Load:
        """Return the load since the beginning of the interval, without ending it."""
        start, now = self._start, self._read()
        seconds, own = now.at - start.at, now.own - start.own
        if seconds < _LEAST or now.busy is None or start.busy is None:
            return Load(now.cores)
        return Load(now.cores, max(0.0, (now.busy - start.busy - own) / seconds))


class Waited:
    """Seconds for which the present threads of this process have waited for a core; a context manager."""

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
        """Return the seconds until now; 0 if unknown."""
        total = 0
        for file in self._files:
            with suppressed(OSError, ValueError):
                _, waited, _ = os.pread(file, 80, 0).split()
                total += int(waited)
        return total / 1e9


def look(seconds: float = 0.25) -> Load:
    """Measure how busy other programs keep the cores."""
    watch = Watch()
    time.sleep(seconds)
    return watch.reading()


def snapshot() -> Snapshot:
    """Read the counters."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = len(cpus) if cpus else os.cpu_count() or 1
    return Snapshot(time.perf_counter(), cores, busy_seconds(text_of(_STAT), cpus), time.process_time())


def busy_seconds(text: str, cpus: set[int] | None) -> float | None:
    """Return the busy seconds of some CPUs, time stolen by other virtual machines included; None if unknown.

    `text` is that of `/proc/stat`; if it lacks CPUs, psutil's total over all CPUs is returned.
    """
    ticks, found = 0, False
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and (cpus is None or int(name[3:]) in cpus):
            user, nice, system, _, _, *more = map(int, fields[:8])  # without idle and iowait
            ticks, found = ticks + user + nice + system + sum(more), True
    if found:
        return ticks / os.sysconf("SC_CLK_TCK")
    try:
        import psutil

        times = psutil.cpu_times()
    except uninterrupted(Exception):  # the system may refuse to tell
        return None
    return float(times.user + times.system + getattr(times, "nice", 0.0))
