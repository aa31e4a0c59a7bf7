"""CPU time and memory that Linux control groups (v1 and v2) leave to this process.

A container sees all CPUs and all memory of its machine, but its groups' limits throttle or kill it; every group from
the process's own up to the root counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from autokern.core.recovery import uninterrupted

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cpu_quota(root: Path = _ROOT, proc: Path = _OWN) -> float | None:
    """Return the CPU quota of this process in CPUs, or None without a limit."""
    quotas = []
    for folder in _groups("cpu", root, proc):
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        quota = quota or text_of(folder / "cpu.cfs_quota_us")
        period = period or text_of(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:  # neither `max` nor -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_left(root: Path = _ROOT, proc: Path = _OWN) -> int | None:
    """Return the bytes up to the nearest memory limit, or None without a limit.

    Inactive file cache counts as free: the kernel drops it before it kills a process.
    """
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
    """Yield the folders of this process's groups for a controller, from its own up to the root.

    In a container the listed path may be the host's while the mount shows only a part of it, so folders may not exist.
    """
    for line in text_of(proc).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # v2: "0::/path", mounted beside v1's folders on hybrid systems
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / name for name in sorted({controllers, controller})]
        else:
            continue
        parts = [] if ".." in path.split("/") else [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield from (mount.joinpath(*parts[:depth]) for mount in mounts)


def text_of(path: Path) -> str:
    """Return the text of a system file, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except uninterrupted(OSError):
        return ""
