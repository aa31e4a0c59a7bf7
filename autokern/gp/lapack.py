"""LAPACK on small arrays: SciPy's functions where a program has imported SciPy, else torch's.

SciPy's calls take a third of the time at some tens of rows. Importing `scipy.linalg` takes as long as some thousand
densities, so it is never imported for this alone. NumPy has no inverse by a factor.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import torch

from autokern.gp.formulas import Array

__all__ = ["Solved", "solved"]


class Solved(NamedTuple):
    """Log determinant, solution and inverse of a symmetric positive definite matrix.

    Parameters
    ----------
    logdet : float
        Log determinant.
    solution : array
        Solution of the linear system, ``(n,)``.
    inverse : array
        The inverse, ``(n, n)``, symmetric.
    """

    logdet: float
    solution: Array
    inverse: Array


def solved(k: Array, rhs: Array) -> Solved | None:
    """Factorise a matrix and return what a density needs of it, by potrf, potrs and potri; None if there is no factor.

    Parameters
    ----------
    k : array
        Symmetric, ``(n, n)``, row-major, float64; may be overwritten.
    rhs : array
        Shape ``(n,)``, float64.
    """
    scipy = sys.modules.get("scipy.linalg.lapack")
    return _by_torch(k, rhs) if not hasattr(scipy, "dpotri") else _by_scipy(scipy, k, rhs)


def _by_scipy(lapack: Any, k: Array, rhs: Array) -> Solved | None:
    upper, info = lapack.dpotrf(k.T, lower=0, clean=1, overwrite_a=1)
    if info:
        return None
    solution, _ = lapack.dpotrs(upper, rhs, lower=0)
    logdet = 2.0 * float(np.log(upper.diagonal()).sum())
    half, info = lapack.dpotri(upper, lower=0, overwrite_c=1)
    if info:
        return None
    inverse = half + half.T  # the other triangle of each is zero
    inverse.flat[:: len(k) + 1] = half.diagonal()
    return Solved(logdet, solution, inverse)


def _by_torch(k: Array, rhs: Array) -> Solved | None:
    lower, info = torch.linalg.cholesky_ex(torch.from_numpy(k))
    if info.item():
        return None
    solution = torch.cholesky_solve(torch.from_numpy(rhs[:, None]), lower).numpy()[:, 0]
    logdet = 2.0 * float(np.log(lower.numpy().diagonal()).sum())
    return Solved(logdet, solution, torch.cholesky_inverse(lower).numpy())
