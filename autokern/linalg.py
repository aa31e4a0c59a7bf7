"""Dispatched linear algebra for direct use, without hooks: `autokern.linalg.qr(A)` and its siblings.

Each function takes plain tensors, batched or not, is differentiable, and runs the fastest candidate measured on this
machine. Stock runs for dtypes other than float32 and float64 and for compiled, traced or vmapped calls.
"""

from __future__ import annotations

from typing import cast

import torch
from linear_operator.operators import LinearOperator

from autokern.core.op import get
from autokern.runtime.dispatch import route

__all__ = ["cholesky", "eigh", "inv_quad_logdet", "matmul", "pinverse", "qr"]

_cholesky = route(get("cholesky"))
_eigh = route(get("eigh"))
_inv_quad_logdet = route(get("inv_quad_logdet"))
_matmul = route(get("matmul"))
_pinverse = route(get("pinverse_root"))
_qr = route(get("qr"))


def qr(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reduced QR decomposition.

    Parameters
    ----------
    a : Tensor
        Shape ``(..., m, n)``.

    Returns
    -------
    Q, R : Tensor
        Shapes ``(..., m, k)`` and ``(..., k, n)`` with ``k = min(m, n)``; signs of the rows of R are free.

    Examples
    --------
    >>> q, r = autokern.linalg.qr(torch.eye(3))  # doctest: +SKIP
    """
    return cast("tuple[torch.Tensor, torch.Tensor]", _qr(a))


def cholesky(a: torch.Tensor, jitter: float | None = None, max_tries: int | None = None) -> torch.Tensor:
    """Return the lower Cholesky factor, with jitter added as linear_operator's psd_safe_cholesky adds it.

    Parameters
    ----------
    a : Tensor
        Symmetric positive (semi-)definite, shape ``(..., n, n)``.
    jitter : float, optional
        First jitter to try; default linear_operator's setting.
    max_tries : int, optional
        Number of tries, each with ten times the jitter; default linear_operator's setting.

    Raises
    ------
    linear_operator.utils.errors.NanError
        If the matrix holds NaN.
    linear_operator.utils.errors.NotPSDError
        If it is not positive definite with the largest jitter.
    """
    return cast("torch.Tensor", _cholesky(a, jitter, max_tries))


def pinverse(root: torch.Tensor) -> torch.Tensor:
    """Return the pseudo-inverse ``(..., n, m)`` of a root of full rank ``(..., m, n)``, cheaply if it is triangular."""
    return cast("torch.Tensor", _pinverse(root))


def eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ascending eigenvalues ``(..., n)`` and eigenvectors ``(..., n, n)`` of a symmetric matrix."""
    return cast("tuple[torch.Tensor, torch.Tensor]", _eigh(a))


def matmul(matrix: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Return the product of a dense matrix ``(..., m, n)`` and a few columns ``(..., n, k)``."""
    return cast("torch.Tensor", _matmul(matrix, rhs))


def inv_quad_logdet(
    matrix: torch.Tensor | LinearOperator, rhs: torch.Tensor, reduce: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``B^T K^-1 B`` and ``log |K|`` of a positive definite matrix, exactly, from one factorisation.

    Parameters
    ----------
    matrix : Tensor or LinearOperator
        K, shape ``(..., n, n)``.
    rhs : Tensor
        B, shape ``(..., n, t)``.
    reduce : bool
        Whether the quadratic forms of the t columns are added up.

    Returns
    -------
    inv_quad, logdet : Tensor
        Shapes ``(...)``, or ``(..., t)`` for the first without `reduce`, and ``(...)``.

    Raises
    ------
    linear_operator.utils.errors.NanError
        If the matrix holds NaN.
    linear_operator.utils.errors.NotPSDError
        If it is not positive definite with the largest jitter.

    Examples
    --------
    >>> inv_quad, logdet = autokern.linalg.inv_quad_logdet(torch.eye(3), torch.ones(3, 1))  # doctest: +SKIP
    """
    return cast("tuple[torch.Tensor, torch.Tensor]", _inv_quad_logdet(matrix, rhs, reduce, True))
