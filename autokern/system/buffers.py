"""Fresh memory in huge pages where the system has them: 128 MB cost 32,768 faults of 4 KiB pages, or 64 of 2 MiB.

And recycled memory: until a program has freed a large block, glibc gives each freed array of 128 KiB and more back to
the system, and the next one faults anew.

Linux only (``MADV_HUGEPAGE``); elsewhere, and where the kernel forbids it, memory is left as it is.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from autokern.core.recovery import suppressed, uninterrupted

_PAGED = 8 * 2**20
"""Below this many bytes the C library recycles memory, so huge pages save nothing."""
_HUGE = 2 * 2**20
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"
_RECYCLED = 2**25 - 2**16
"""A little less than the largest block, 32 MiB, that glibc's thresholds follow."""


def recycle() -> None:
    """Let glibc keep freed blocks for the next ones, as it does once a program has freed a block of 32 MiB.

    The thresholds from which it maps blocks, and gives them back, follow the largest block that was freed. This one is
    never touched, so it takes no memory. Nothing changes where ``MALLOC_...`` variables are set, or by another library.
    """
    with suppressed(MemoryError):
        np.empty(_RECYCLED, np.uint8)


def has_huge() -> bool:
    """Whether this system provides huge pages on request."""
    return _madvise() is not None


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        with open(_SETTING, encoding="utf-8") as file:
            if "[never]" in file.read():
                return None
        madvise = ctypes.CDLL(None).madvise
    except uninterrupted(OSError, AttributeError):
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def huge(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised ordinary tensor, in huge pages where that is possible and faster."""
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    size = out.numel() * out.element_size()
    if size >= _PAGED and out.device.type == "cpu" and (madvise := _madvise()) is not None:
        start = -(-out.data_ptr() // _HUGE) * _HUGE
        length = (out.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            madvise(start, length, mmap.MADV_HUGEPAGE)
    return out
