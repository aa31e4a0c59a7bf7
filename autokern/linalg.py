"""Dispatched linear algebra for direct use, without hooks.

Each function takes plain tensors, batched or not, is differentiable, and runs the fastest candidate measured on this
machine. Dtypes other than float32 and float64, and compiled, traced or vmapped calls, run stock.
"""

from __future__ import annotations

from typing import cast

import torch
from linear_operator.operators import LinearOperator

from autokern import ops as _ops  # noqa: F401  (declares every op)
from autokern.core.registry import get
from autokern.runtime.dispatch import route

__all__ = ["cholesky", "inv_quad_logdet", "qr"]

_cholesky = route(get("cholesky"))
_inv_quad_logdet = route(get("inv_quad_logdet"))
_qr = route(get("qr"))


def qr(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reduced QR decomposition ``A = Q R``, differentiable.

    Parameters
    ----------
    a : Tensor
        Shape ``(..., m, n)``, float32 or float64.

    Returns
    -------
    Q, R : Tensor
        Shapes ``(..., m, k)`` and ``(..., k, n)`` with ``k = min(m, n)``; the signs of R's rows are free.

    Raises
    ------
    RuntimeError
        If `a` has fewer than two dimensions.

    Notes
    -----
    Stock is LAPACK's geqrf and orgqr (`torch.linalg.qr`). For tall matrices CholeskyQR2 is a candidate (Fukaya et al.
    2014, "CholeskyQR2: a simple and communication-avoiding algorithm").

    Examples
    --------
    >>> a = torch.arange(6.0).reshape(3, 2)
    >>> q, r = autokern.linalg.qr(a)
    >>> torch.allclose(q @ r, a, atol=1e-5)
    True
    """
    return cast("tuple[torch.Tensor, torch.Tensor]", _qr(a))


def cholesky(a: torch.Tensor, jitter: float | None = None, max_tries: int | None = None) -> torch.Tensor:
    """Return the lower Cholesky factor, with the jitter of linear_operator's `psd_safe_cholesky`.

    Parameters
    ----------
    a : Tensor
        Symmetric positive (semi-)definite, shape ``(..., n, n)``, float32 or float64.
    jitter : float, optional
        The first jitter, in units of `a`'s entries; default linear_operator's setting.
    max_tries : int, optional
        Number of tries, each with ten times the jitter of the last; default linear_operator's setting.

    Returns
    -------
    Tensor
        L with ``L L^T = A``, shape ``(..., n, n)``, of `a`'s dtype, zero above the diagonal.

    Raises
    ------
    linear_operator.utils.errors.NanError
        If the matrix holds NaN.
    linear_operator.utils.errors.NotPSDError
        If the matrix is not positive definite even with the largest jitter.
    RuntimeError
        If the matrix is not square.

    Notes
    -----
    Stock is LAPACK's potrf (`torch.linalg.cholesky_ex`).

    Examples
    --------
    >>> autokern.linalg.cholesky(torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
    tensor([[2., 0.],
            [1., 1.]])
    """
    return cast("torch.Tensor", _cholesky(a, jitter, max_tries))


def inv_quad_logdet(
    matrix: torch.Tensor | LinearOperator, rhs: torch.Tensor, reduce: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``B^T K^-1 B`` and ``log |K|`` of a positive definite matrix, exactly, from one factorisation.

    Parameters
    ----------
    matrix : Tensor or LinearOperator
        K, shape ``(..., n, n)``, float32 or float64.
    rhs : Tensor
        B, shape ``(..., n, t)``, of the same dtype.
    reduce : bool
        Whether the quadratic forms of the t columns are summed.

    Returns
    -------
    inv_quad, logdet : Tensor
        Shapes ``(...)``, or ``(..., t)`` without `reduce`, and ``(...)``; of the same dtype.

    Raises
    ------
    linear_operator.utils.errors.NanError
        If the matrix holds NaN.
    linear_operator.utils.errors.NotPSDError
        If the matrix is not positive definite even with the largest jitter.
    RuntimeError
        If the shapes do not fit each other.
    MemoryBudgetError
        If no candidate fits the memory limit.

    Notes
    -----
    LAPACK's potrf factorises. Its potri gives the gradients ``dL/dK = g K^-1 - A h A^T`` with ``A = K^-1 B`` (Rasmussen
    and Williams 2006, eq. 5.9).

    Examples
    --------
    >>> inv_quad, logdet = autokern.linalg.inv_quad_logdet(2.0 * torch.eye(3), torch.ones(3, 1))
    >>> round(inv_quad.item(), 4), round(logdet.item(), 4)
    (1.5, 2.0794)
    """
    return cast("tuple[torch.Tensor, torch.Tensor]", _inv_quad_logdet(matrix, rhs, reduce, True))
