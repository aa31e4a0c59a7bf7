"""LAPACK on small arrays, by SciPy's bindings, and the log density of a small Gaussian.

At some tens of rows SciPy's calls take a third of NumPy's time, and NumPy lacks potri, the inverse from a factor.
Importing `scipy.linalg` takes as long as some thousand densities, so only its extension module `_flapack` is loaded, in
a few milliseconds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from typing import Any, NamedTuple

import numpy as np

from autokern.core.recovery import caught
from autokern.kernels.arrays.part import Array
from autokern.system import threads

_LOG_2_PI = math.log(2 * math.pi)


class Density(NamedTuple):
    """A log density, and its gradients times a factor."""

    value: float
    by_matrix: Array  # gradient by the covariance, ``(n, n)``, symmetric
    by_residual: Array  # gradient by the residual, ``(n,)``


def density(k: Array, residual: Array, factor: float) -> Density | None:
    """Return the log density and its gradients times `factor` by potrf, potrs and potri; None if `k` has no factor.

    `k` is symmetric, row-major and is overwritten; both arrays are float64.
    """
    lapack: Any = sys.modules.get("scipy.linalg.lapack")
    if not hasattr(lapack, "dpotri"):
        lapack = _alone()
    upper, info = lapack.dpotrf(k.T, lower=0, clean=1, overwrite_a=1)
    if info:
        return None
    a, _ = lapack.dpotrs(upper, residual, lower=0)
    logdet = 2.0 * float(np.log(upper.diagonal()).sum())
    half, info = lapack.dpotri(upper, lower=0, overwrite_c=1)
    if info:
        return None
    inverse = half + half.T  # the other triangle of each is zero
    inverse.flat[:: len(k) + 1] = half.diagonal()
    value = -0.5 * (float(residual @ a) + logdet + len(residual) * _LOG_2_PI)
    inverse -= a[:, None] * a
    inverse *= -0.5 * factor
    return Density(value, inverse, a * -factor)


@functools.cache
def _alone() -> Any:
    """Return SciPy's LAPACK extension loaded alone, or `scipy.linalg.lapack` if that fails.

    The extension alone is removed from `sys.modules`, so that a later import of SciPy is unaffected.
    """
    name = "scipy.linalg._flapack"
    try:
        spec = importlib.util.find_spec("scipy")
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        paths = [os.path.join(folders[0], "linalg", f"_flapack{suffix}") for suffix in EXTENSION_SUFFIXES]
        path = next(path for path in paths if os.path.exists(path))
        own = importlib.util.spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        found = importlib.util.module_from_spec(own)  # type: ignore[arg-type]
        found.__loader__.exec_module(found)  # type: ignore[union-attr]
    except caught(Exception):  # another file layout, or a missing library: the full import is only slower
        found = None
    if "scipy.linalg" not in sys.modules:
        sys.modules.pop(name, None)
    threads.look_for_openblas()
    return found if hasattr(found, "dpotri") else importlib.import_module("scipy.linalg.lapack")
