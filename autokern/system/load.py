"""How busy other programs keep the cores that this process may use, and the limits of its control groups.

The load is the difference of two readings of the cores' busy time, less this process's own. A single timing is judged
by the time that its threads were ready to run and had no core. Processes in containers see the whole machine, but the
limits of their control groups, from the process's own up to the root, throttle or kill them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from autokern.core.errors import suppressed, uninterrupted

_STAT, _TASKS = Path("/proc/stat"), Path("/proc/self/task")
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LEAST = 0.08  # shortest interval in seconds: counters tick every 10 ms
_SPARE = 0.3  # cores that others may use beyond the free ones before they disturb: an idle desktop uses some
_MOST_THREADS = 16  # most threads to read, at 2 µs each: workers that meet at barriers wait alike


class Load(NamedTuple):
    """How busy a machine was over an interval."""

    cores: int  # that this process may use
    others: float | None = None  # cores that other programs kept busy; None if unknown

    def crowded(self) -> bool:
        """Whether others disturb the threads of this process; False if the load is unknown."""
        threads = min(torch.get_num_threads(), self.cores)
        return self.others is not None and self.others + threads > self.cores + _SPARE

    def __str__(self) -> str:
        return f"others use {min(self.others or 0.0, self.cores):.1f} of {self.cores} cores"


class Snapshot(NamedTuple):
    """Counters in seconds at one time."""

    at: float  # wall clock
    cores: int
    busy: float | None  # of all cores that this process may use; None if the system has no such counter
    own: float  # CPU time of this process and of its ended children


class Watch:
    """Measures the load since its creation."""

    def __init__(self) -> None:
        self._start = snapshot()

    def reading(self) -> Load:
        """Return the load until now."""
        start, now = self._start, snapshot()
        seconds, own = now.at - start.at, now.own - start.own
        if seconds < _LEAST or now.busy is None or start.busy is None:
            return Load(now.cores)
        return Load(now.cores, max(0.0, (now.busy - start.busy - own) / seconds))


class Waited(contextlib.ExitStack):
    """Seconds for which the present threads of this process have waited for a core; a context manager."""

    def __init__(self, tasks: Path = _TASKS) -> None:
        super().__init__()
        self._files: list[int] = []
        with suppressed(OSError):
            for folder in itertools.islice(tasks.iterdir(), _MOST_THREADS):  # the oldest first
                with suppressed(OSError):  # the thread has ended
                    self._files.append(os.open(folder / "schedstat", os.O_RDONLY | os.O_CLOEXEC))
                    self.callback(os.close, self._files[-1])

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
    own = time.process_time() + os.times().children_user + os.times().children_system
    return Snapshot(time.perf_counter(), cores, busy_seconds(text_of(_STAT), cpus), own)


def busy_seconds(text: str, cpus: set[int] | None) -> float | None:
    """Return the busy seconds of some CPUs by the text of `/proc/stat`, else of all by psutil; None if unknown."""
    lines = re.findall(r"^cpu(\d+) (.*)$", text, re.MULTILINE)
    ticks = [list(map(int, fields.split()[:8])) for cpu, fields in lines if cpus is None or int(cpu) in cpus]
    if ticks:  # without idle and iowait
        return sum(sum(one[:3] + one[5:]) for one in ticks) / os.sysconf("SC_CLK_TCK")
    try:
        import psutil

        times = psutil.cpu_times()
    except uninterrupted(Exception):  # the system may refuse to tell
        return None
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def cpu_quota(root: Path = _ROOT, proc: Path = _OWN) -> float | None:
    """Return the CPU quota of this process in CPUs, or None without a limit."""
    quotas = []
    for folder in _groups("cpu", root, proc):
        first = " ".join(text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota, _, period = (text_of(folder / "cpu.max") or first).partition(" ")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:  # neither `max` nor -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_left(root: Path = _ROOT, proc: Path = _OWN) -> int | None:
    """Return the bytes left below the nearest memory limit, inactive file cache included; None without a limit."""
    left = []
    for folder in _groups("memory", root, proc):
        limit = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")
        used = text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            pages = dict(re.findall(r"^(\w+) (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE))
            cache = int(pages.get("total_inactive_file") or pages.get("inactive_file") or 0)  # v1 has both
            left.append(max(0, int(limit) - int(used) + cache))
    return min(left, default=None)


def _groups(controller: str, root: Path, proc: Path) -> Iterator[Path]:
    """Yield the possible folders of this process's groups for a controller, from the innermost up to the root."""
    for line in text_of(proc).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # v2: "0::/path", mounted beside v1's folders on hybrid systems
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / name for name in sorted({controllers, controller})]
        else:
            continue
        inner = Path("." if ".." in path.split("/") else path.strip("/"))
        for folder in (inner, *inner.parents):
            yield from (mount / folder for mount in mounts)


def text_of(path: Path) -> str:
    """Return the text of a system file, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except uninterrupted(OSError):
        return ""
