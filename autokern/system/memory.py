"""Memory: the limit of a call, the error of a call that exceeds it, and fresh memory in huge pages.

The limit is the least of the user's order and the available memory, which takes 0.3 ms to read. Fresh memory of 128 MiB
costs 32,768 faults of 4 KiB pages, or 64 of 2 MiB pages on Linux (``MADV_HUGEPAGE``).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from autokern.core.errors import MemoryBudgetError, suppressed, uninterrupted
from autokern.core.output import sized
from autokern.system import host

LARGE = 64 * 2**20  # calls below this many bytes run without reading the available memory
ORDER = "AUTOKERN_MEMORY or using(memory=...)"

Device = torch.device | str


class Limit(NamedTuple):
    """The memory that a call may take."""

    bytes: int  # at its peak
    source: str  # the cause of the limit, in words; empty for the available memory


ordered_here: Callable[[], int | None] = lambda: None  # noqa: E731  (the user's limit in this thread; `dispatch` sets it)


def least(ordered: int | None, there: Limit | None) -> Limit | None:
    """Return the lower of the user's limit and the available memory; None means no limit."""
    return Limit(ordered, ORDER) if ordered is not None and (there is None or ordered < there.bytes) else there


def current(device: Device, ordered: int | None = None) -> Limit:
    """Return the present limit of a call on a device; `ordered` is the user's limit in bytes."""
    there = Limit(host.available_memory(str(device)), "")
    return least(ordered, there) or there


def fits(need: int, device: Device) -> bool:
    """Whether a call in this thread may take `need` bytes on a device; below `LARGE`, always."""
    return need < LARGE or need <= current(device, ordered_here()).bytes


def refuse(asked: str, need: int, device: Device, dtype: str, of_kernel: bool) -> NoReturn:
    """Raise the `refusal` of a call in this thread on a device, before it allocates anything."""
    raise refusal(asked, need, current(device, ordered_here()), device, dtype, of_kernel)


def refusal(
    asked: str, need: int, found: Limit, device: Device, dtype: str, of_kernel: bool, tiles: bool = True
) -> MemoryBudgetError:
    """Return the error of a call whose peak exceeds the limit, with advice; `tiles`: whether tiled products may fit."""
    ways = ["fewer points at once, or more memory"]
    if of_kernel:
        ways.insert(0, "inducing points (SGPR, SVGP)")
    if dtype.removeprefix("torch.") == "float64" and need <= 2 * found.bytes:
        ways.insert(0, "float32, which takes half of it")
    if of_kernel and tiles:
        ways.insert(0, "tiled products, which never form the kernel matrix (kernel_matmul)")
    cause = found.source or host.memory_limited_by(str(device))  # reads the available memory again
    there, instead = f"{sized(found.bytes)} may be taken ({cause})", "; ".join(ways)
    return MemoryBudgetError(f"{asked} needs {sized(need)} at its peak, and {there}. What would work: {instead}")


_PAGED = 8 * 2**20  # below this many bytes the C library recycles memory, so huge pages save nothing
_HUGE = 2 * 2**20
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"
_RECYCLED = 2**25 - 2**16  # a little less than the largest block, 32 MiB, to which glibc adapts its thresholds


def recycle() -> None:
    """Let glibc keep freed blocks for the next ones, which would fault anew, as it does once 32 MiB have been freed."""
    with suppressed(MemoryError):
        np.empty(_RECYCLED, np.uint8)  # never touched, so it takes no memory; void under ``MALLOC_...`` variables


def has_huge() -> bool:
    """Whether this system provides huge pages on request."""
    return _madvise() is not None


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # outside of Linux
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
