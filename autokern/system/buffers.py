"""Large buffers that are used again, because most of the time of filling fresh memory is page faults.

The pool keeps storages, never tensors, so no autograd state stays with them. It hands a storage out only if nothing
else refers to it: a tensor or view that outlives its lease costs a reuse, never a wrong number. No code runs when a
lease ends: a ``Ctrl-C`` would be lost there. There is no lock: every step that threads, the garbage collector or a
signal could disturb is one operation of a dict, and the thread that pops an entry owns it.

Fresh memory comes in huge pages where the system has them: 128 MB cost 32,768 faults of 4 KiB pages, or 64 of 2 MiB.
Linux only (``MADV_HUGEPAGE``); elsewhere, and where the kernel forbids it, memory is left as it is.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from autokern.core.recovery import uninterrupted
from autokern.system import host

SMALLEST = 2**20
"""Bytes below which the C library recycles memory by itself, and a buffer is not kept."""
_MOST = 16
"""Buffers that are kept."""
_SPARE = 1.25
"""A buffer serves if it is at most this many times the size needed."""
_SHARE = 8
"""The pool keeps at most one part in so many of the memory that was free at first."""
_WATCHED = 32 * 2**20
"""A fresh buffer of so many bytes takes 4 ms to fill: asking for the free memory before, 0.3 ms, is cheap."""
_MARGIN = 2**29
"""Bytes of memory that must stay free beside a fresh buffer while any buffer is kept."""
_PAGED = 8 * 2**20
"""Below this many bytes the C library recycles memory by itself, so huge pages save nothing."""
_HUGE = 2 * 2**20
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


class _Buffer(NamedTuple):
    key: int
    storage: torch.UntypedStorage
    size: int


_kept: dict[int, _Buffer] = {}  # the buffer that was lent first stands first
_keys = itertools.count()
_ordered: int | None = None


class Lease:
    """A borrowed tensor; out of scope, on `release` and at the end of a ``with`` block its memory goes back."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def release(self) -> None:
        """Give the memory back, from any thread; a second call does nothing."""
        self.tensor = None  # type: ignore[assignment]

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def borrow(shape: Sequence[int], like: torch.Tensor) -> Lease:
    """Borrow an uninitialised, contiguous tensor.

    Large ones on a CPU are buffers that were used before where there is one that fits, else huge pages. Small ones are
    left to the C library, those on a GPU to torch's caching allocator. Results for the user should not be borrowed: the
    storage may be a quarter larger than the tensor.
    """
    need = math.prod(shape) * like.dtype.itemsize
    if need < SMALLEST or like.device.type != "cpu" or type(like) not in _PLAIN or _alone() is None:
        return Lease(torch.empty(shape, dtype=like.dtype, device=like.device))
    buffer = _take(need) or _fresh(need)
    lease = Lease(_tensor(buffer, tuple(shape), like.dtype))
    if buffer.size <= limit():
        _kept[buffer.key] = buffer
        _trim()
    return lease


def held() -> int:
    """Return the bytes that the pool keeps unused; `free` would return them to the system."""
    return sum(buffer.size for buffer in list(_kept.values()) if _is_unused(buffer))


def limit() -> int:
    """Return the bytes that the pool may keep."""
    return _share() if _ordered is None else min(_ordered, _share())


def set_limit(size: int | None) -> None:
    """Keep at most `size` bytes, or as many as usual."""
    global _ordered
    _ordered = size
    _trim()


def free() -> None:
    """Empty the pool. Borrowed buffers stay valid and are not kept when they come back."""
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=free)  # writing into memory that parent and child share would copy it

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # a FakeTensor, say, has no memory at all


def _take(need: int) -> _Buffer | None:
    """Return the tightest buffer that fits and that nothing else refers to."""
    best = None
    for buffer in list(_kept.values()):
        fits = need <= buffer.size <= _SPARE * need
        if fits and (best is None or buffer.size <= best.size) and _is_unused(buffer):
            best = buffer
    found = None if best is None else _kept.pop(best.key, None)
    return found if found is not None and _is_unused(found) else None  # another thread may have borrowed it meanwhile


def _fresh(need: int) -> _Buffer:
    """Allocate a buffer, up to an eighth larger than needed; kept buffers are freed where memory is short."""
    if need >= _WATCHED and _kept and host.available_memory("cpu") < need + _MARGIN:
        free()
    step = 1 << max(0, need.bit_length() - 4)
    size = -(-need // step) * step
    like = torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        flat = huge((size,), like)
    except uninterrupted(RuntimeError, MemoryError):
        free()
        size = need
        flat = huge((size,), like)
    return _Buffer(next(_keys), flat.untyped_storage(), size)


def _tensor(buffer: _Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(buffer.storage, 0, shape)  # type: ignore[call-overload,no-any-return]


def _trim() -> None:
    """Let the buffers go that were lent first until the bounds hold."""
    buffers, most = list(_kept.values()), limit()
    total = sum(buffer.size for buffer in buffers)
    for place, buffer in enumerate(buffers):
        if total <= most and len(buffers) - place <= _MOST:
            break
        _kept.pop(buffer.key, None)
        total -= buffer.size


def _is_unused(buffer: _Buffer) -> bool:
    """Whether nothing refers to a buffer, and it was neither resized nor sent to another process."""
    whole = buffer.storage.nbytes() == buffer.size and not buffer.storage.is_shared()
    return whole and _references(buffer) == _alone()


def _references(buffer: _Buffer) -> tuple[int, int]:
    """Count the tensors and views on a storage, and the Python names of the storage itself."""
    return torch._C._storage_Use_Count(buffer.storage._cdata), sys.getrefcount(buffer.storage)


@functools.cache
def _alone() -> tuple[int, int] | None:
    """Return the `_references` of a storage that nothing else refers to, or None where torch cannot count them."""
    try:
        buffer = _Buffer(0, torch.empty(8, dtype=torch.uint8, device="cpu").untyped_storage(), 8)
        alone = _references(buffer)
        tensor = _tensor(buffer, (8,), torch.uint8)
        seen = _references(buffer)
        name = tensor.untyped_storage()
        del tensor
        return alone if seen != alone and _references(buffer) != alone and name.nbytes() == 8 else None
    except uninterrupted(AttributeError, TypeError, RuntimeError):
        return None


@functools.cache
def _share() -> int:
    return host.available_memory("cpu") // _SHARE


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
