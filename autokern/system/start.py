"""The start of a program: importing the libraries costs what it must, and no more.

torch, gpytorch and BoTorch make some 400,000 objects that live as long as the process. Python's garbage collector walks
through them again and again while they are made, in a program now and then, and once more at its end: a fifth to a
third of a second, and half a second more at the end, of a program of four seconds. This module is imported before them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["importing", "is_postponed", "settle"]

_KERNEL = "gpytorch.kernels.keops.keops_kernel"
_IMPORTERS = ("importlib", "runpy", "autokern")
_CODE = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
_NAMES = ("__future__", "typing")

_torch_was_there = False


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import the libraries inside the block: the collector pauses, and gpytorch postpones the import of pykeops.

    pykeops looks for compilers and a GPU when it is imported, which takes 0.15 s; gpytorch imports it for the kernels
    in `gpytorch.kernels.keops`. They import it when they first need it.
    """
    global _torch_was_there
    _torch_was_there = "torch" in sys.modules
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _without_pykeops():
            yield
    finally:
        if collecting:
            gc.enable()


def settle() -> None:
    """Take what lives as long as the process out of the collector's sight, if the program has no data of its own yet.

    ``gc.unfreeze()`` takes it back.
    """
    if gc.isenabled() and not gc.get_freeze_count() and _at_its_imports():
        if _torch_was_there:  # what became garbage lately shall not stay
            gc.collect(1)
        gc.freeze()


def _at_its_imports() -> bool:
    """Whether the program has come no further than its import statements."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name != "<module>" and package not in _IMPORTERS:
            return False
        frame = frame.f_back
    main = vars(sys.modules.get("__main__", types))
    return not any(_is_data(value) for name, value in main.items() if not name.startswith("__"))


def _is_data(value: Any) -> bool:
    return gc.is_tracked(value) and not isinstance(value, _CODE) and type(value).__module__ not in _NAMES


@contextlib.contextmanager
def _without_pykeops() -> Iterator[None]:
    """Let gpytorch find `_LazyTensor` where it imports pykeops, if neither has been imported and pykeops is there."""
    if _KERNEL in sys.modules or "pykeops" in sys.modules or importlib.util.find_spec("pykeops") is None:
        yield
        return
    whole, part = types.ModuleType("pykeops"), types.ModuleType("pykeops.torch")
    whole.torch, part.LazyTensor = part, _LazyTensor  # type: ignore[attr-defined]
    ours = {"pykeops": whole, "pykeops.torch": part}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name, module in ours.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def is_postponed() -> bool:
    """Whether gpytorch has yet to import pykeops."""
    return getattr(sys.modules.get(_KERNEL), "LazyTensor", None) is _LazyTensor


class _LazyTensor:
    """Stands for pykeops' class in gpytorch until it is first called."""

    def __new__(cls, x: Any) -> Any:
        """Import pykeops, put its class here, and call it; where that fails return x, as gpytorch then does itself."""
        try:
            from pykeops.torch import LazyTensor
        except ImportError:
            warnings.warn(
                "KeOps is not installed, or importing it fails. The kernel reverts to the non-KeOps version.",
                RuntimeWarning,
                stacklevel=4,
            )
            return x
        sys.modules[_KERNEL].LazyTensor = LazyTensor  # type: ignore[attr-defined]
        return LazyTensor(x)
