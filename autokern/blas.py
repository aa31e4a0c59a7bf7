"""Fewer threads for SciPy's and NumPy's BLAS, never for torch's, where a stretch of work is too small for them.

Most of these libraries keep one number for the whole process. Of blocks that overlap in several threads only the first
one sets and restores it: the others would save what it has lowered, and restore that. Floor 1: imports nothing of
autokern.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

__all__ = ["blas_limited"]

_turn = threading.RLock()
_found: tuple[int, Any] = (0, None)
"""How many modules there were when libraries were last looked for, and threadpoolctl's controller of those found."""


def blas_limited(count: int = 1) -> contextlib.AbstractContextManager[None]:
    """Use at most `count` threads in SciPy's and NumPy's BLAS within a ``with`` block; each object serves one block.

    What was there before is restored, after exceptions too. It takes some 15 microseconds, 2 where nothing is to be
    lowered, and half a millisecond after an import. Nothing happens while another thread is in such a block, and
    without threadpoolctl.

    Raises
    ------
    ValueError
        If `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"a number of threads must be 1 or more, not {count}")
    return _Block(count)


class _Block:
    __slots__ = ("_count", "_limiter")

    def __init__(self, count: int) -> None:
        self._count = count
        self._limiter: Any = None

    def __enter__(self) -> None:
        libraries = _libraries()
        controllers = libraries.lib_controllers if libraries else ()
        before = [(library, own) for library in controllers if (own := library.get_num_threads()) > self._count]
        if not before or not _turn.acquire(blocking=False):
            return
        try:
            self._limiter = libraries.select(filepath=[library.filepath for library, _ in before]).limit(
                limits=self._count
            )
        except BaseException:  # an interrupt half-way: there will be no `__exit__`
            for library, own in before:
                library.set_num_threads(own)
            _turn.release()
            raise

    def __exit__(self, *_: object) -> None:
        if self._limiter is not None:
            try:
                self._limiter.restore_original_limits()
            except BaseException:  # an interrupt half-way
                self._limiter.restore_original_limits()
                raise
            finally:
                _turn.release()


def _libraries() -> Any:
    """Return a controller of the BLAS libraries that are not torch's, or None; modules bring them, so imports count."""
    global _found
    if _found[0] != len(sys.modules):
        try:
            from threadpoolctl import ThreadpoolController
        except ImportError:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about OpenMP libraries that do not bear each other
            loaded = ThreadpoolController().select(user_api="blas")
        own = [library.filepath for library in loaded.lib_controllers if not _of_torch(library)]
        _found = len(sys.modules), loaded.select(filepath=own) if own else None
    return _found[1]


def _of_torch(library: Any) -> bool:
    """Whether torch computes with a library: its own copy, or the one that it shares with SciPy (conda)."""
    if Path(torch.__file__).parent in Path(library.filepath).parents:
        return True
    try:
        torch_library = ctypes.CDLL(torch._C.__file__, mode=os.RTLD_NOLOAD)  # finds names in what torch depends on
    except (OSError, AttributeError):  # Windows has no such mode
        return False
    return any(
        hasattr(library.dynlib, name)
        and hasattr(torch_library, name)
        and _address(library.dynlib, name) == _address(torch_library, name)
        for name in ("openblas_get_num_threads", "MKL_Get_Max_Threads", "bli_thread_get_num_threads")
    )


def _address(library: Any, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
