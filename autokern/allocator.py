"""Allocator: glibc told to keep what is freed, where the user ordered it (``AUTOKERN_ALLOCATOR=retain``).

glibc gives every freed block above a threshold back to the system; the next large matrix then pays the page faults of
fresh memory again, which is half its cost. While `retain` is in force, blocks up to 1 GiB of every library in this
process come from a heap that is never trimmed. Small blocks that land in a hole between two large ones make the heap
grow, to several times what is in use. Floor 1: imports nothing of autokern.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["restore", "retain", "retained", "why_not"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 2**30
"""Bytes of the largest block that is kept."""
_NEVER = -1
_ADJUSTED = 32 * 2**20
"""Where glibc's own adjustment of its thresholds ends: DEFAULT_MMAP_THRESHOLD_MAX, and twice that for trimming."""
_ORDERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")

_retained = False


def retained() -> bool:
    """Whether `retain` is in force."""
    return _retained


def why_not() -> str | None:
    """Return why the allocator cannot be told to keep freed memory, or None where it can."""
    try:
        process = ctypes.CDLL(None)
        if not sys.platform.startswith("linux") or not hasattr(process, "gnu_get_libc_version"):
            return "the C library is not glibc"
        address, own = (ctypes.cast(c.malloc, ctypes.c_void_p).value for c in (process, ctypes.CDLL("libc.so.6")))
    except (OSError, TypeError, AttributeError):  # TypeError: Windows has no name for the process itself
        return "the C library is not glibc"
    if address != own:
        return "another allocator takes the place of glibc's"
    orders = [name for name in _ORDERS if os.environ.get(name)]
    orders += ["GLIBC_TUNABLES"] if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") else []
    return f"{orders[0]} orders otherwise" if orders else None


def retain() -> str | None:
    """Let glibc keep the pages of what is freed; return why that cannot be, or None."""
    global _retained
    if _retained:
        return None
    if (reason := why_not()) is None:
        _retained = _set(mmap=_KEPT, trim=_NEVER)
        return None if _retained else "glibc refused"
    return reason


def restore() -> None:
    """Undo `retain` and give the system what was kept; without a `retain`, do nothing.

    glibc adjusts its thresholds to the blocks that are freed, until somebody sets one; nothing switches that on again.
    They are therefore left where the adjustment ends in a process that frees large blocks: 32 MiB, 64 MiB for trimming.
    """
    global _retained
    if _retained:
        _set(mmap=_ADJUSTED, trim=2 * _ADJUSTED)
        ctypes.CDLL("libc.so.6").malloc_trim(ctypes.c_size_t(0))
        _retained = False


def _set(mmap: int, trim: int) -> bool:
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    return bool(mallopt(_MMAP_THRESHOLD, mmap)) and bool(mallopt(_TRIM_THRESHOLD, trim))
