"""Hook into SciPy: one BLAS thread in the steps of L-BFGS-B, whose vectors and matrices are of a handful of numbers.

Since SciPy 1.15 these steps call BLAS and LAPACK, and on many cores OpenBLAS's threads make them several times slower
(scipy #22438, botorch #2668). BoTorch limits them itself; fits that call `scipy.optimize.minimize` do not. The seam is
the step, not `minimize`: the objective between two steps keeps all its threads. SciPy is never imported from here.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from autokern.blas import blas_limited
from autokern.hooks import Patch, is_enabled

__all__ = ["patches", "unwatch", "watch"]

_MODULE = "scipy.optimize._lbfgsb"


def patches() -> list[Patch]:
    """Return the patches of SciPy: none while nobody has imported its L-BFGS-B."""
    module = sys.modules.get(_MODULE)
    return [Patch(module, "setulb", _hooked(module))] if hasattr(module, "setulb") else []


@functools.cache
def _hooked(module: Any) -> Any:
    stock = module.setulb

    @functools.wraps(stock)
    def setulb(*args: Any, **kwargs: Any) -> Any:
        if not is_enabled():
            return stock(*args, **kwargs)
        with blas_limited():
            return stock(*args, **kwargs)

    return setulb


def watch(imported: Callable[[], None]) -> None:
    """Call a function when L-BFGS-B is imported, until `unwatch`; at once if it has been imported."""
    if _MODULE in sys.modules:
        imported()
    else:
        sys.meta_path.insert(0, _Watch(imported))


def unwatch() -> None:
    """Undo `watch`."""
    # A new list: an import that goes through the old one in another thread must not miss a finder.
    sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]


class _Watch:
    """Finder that finds one module, as it is always found, and tells when it has been loaded."""

    def __init__(self, imported: Callable[[], None]) -> None:
        self._imported = imported

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return nothing, but for the one module."""
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader = spec.loader

            def exec_module(module: ModuleType) -> None:
                del vars(loader)["exec_module"]
                loader.exec_module(module)
                self._imported()

            vars(loader)["exec_module"] = exec_module
        return spec
