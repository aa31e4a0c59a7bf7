"""A float64 matrix factorised and inverted in float32, its solutions refined to float64.

Conjugate gradients in float64, with the float32 factor as preconditioner, reach float64 solutions in a few products for
condition numbers far above the 1e7 at which plain iterative refinement ends (Carson and Higham 2018, "Accelerating the
solution of linear systems by iterative refinement in three precisions", with CG in place of GMRES as the matrix is
positive definite). Log determinant and inverse stay those of the float32 factor: their error is what a calibration
measures. Beside `likelihood`: may import `factors` and `threads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from autokern.core.autograd import each_cotangent, plain_gradients
from autokern.gp.factors import factorised, inv_quad_logdet_gradients, inverted
from autokern.system import threads

__all__ = ["inv_quad_logdet", "solved"]

_ROUNDS = 40
"""Products after which a solution is given up."""
_RESIDUAL = 1e-10
"""Norm of a residual, relative to the right-hand side, at which its column is done."""
_ALLOWED = 1e-8
"""The same for the residual that is computed anew at the end."""

Values = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], Any]


class Exact(NamedTuple):
    """What takes over where float32 does not do, and for second derivatives.

    Parameters
    ----------
    factorise : callable
        ``factorise(matrix, diagonal)``: the lower float64 factor, with the library's own jitter, warnings and errors.
    values : callable
        ``values(matrix, diagonal, rhs)``: quadratic forms and log determinant by plain differentiable steps.
    """

    factorise: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    values: Values


def inv_quad_logdet(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor, exact: Exact
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``b^T K^-1 b`` for each column b, and ``log |K|``, of a matrix with a diagonal added.

    Parameters
    ----------
    matrix : Tensor
        Symmetric, ``(..., n, n)``, float64.
    diagonal : Tensor or None
        Added to its diagonal, ``(..., 1)`` or ``(..., n)``.
    rhs : Tensor
        Columns, ``(..., n, t)``, with the batch shape of the matrix.
    exact : Exact
        What takes over where the matrix has no float32 factor, or refinement does not end.

    Returns
    -------
    tuple of Tensor
        Shapes ``(..., t)`` and ``(...)``.
    """
    return cast("tuple[torch.Tensor, torch.Tensor]", _InvQuadLogdet.apply(matrix, diagonal, rhs, exact))


def _low_factor(matrix: torch.Tensor, diagonal: torch.Tensor | None) -> torch.Tensor | None:
    """Return the lower float32 factor in memory of its own, or None if there is none."""
    low = matrix.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if diagonal is not None:
        low.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    lower, info = factorised(low)
    return None if torch.any(info) else lower


def solved(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor, low: torch.Tensor
) -> torch.Tensor | None:
    """Return the float64 solution for every column, or None where it does not converge.

    Parameters
    ----------
    matrix, diagonal, rhs
        As `inv_quad_logdet` has them.
    low : Tensor
        A lower float32 factor of about the sum of matrix and diagonal; what stands above its diagonal is not read.
    """

    def times(x: torch.Tensor) -> torch.Tensor:
        y = matrix @ x
        return y if diagonal is None else y.addcmul_(diagonal.unsqueeze(-1), x)

    def preconditioned(r: torch.Tensor) -> torch.Tensor:
        white = torch.linalg.solve_triangular(low, r.to(low.dtype), upper=False)  # cholesky_solve copies the factor
        return torch.linalg.solve_triangular(low.mT, white, upper=True).to(r.dtype)

    largest = rhs.abs().amax(-2, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)  # float32 has no room for columns that are minute or huge
    b = rhs / largest
    sizes = b.norm(dim=-2, keepdim=True)
    x, r, z = torch.zeros_like(b), b, preconditioned(b)
    p, rz = z, (r * z).sum(-2, keepdim=True)
    for _ in range(_ROUNDS):
        q = times(p)
        step = _quotient(rz, (p * q).sum(-2, keepdim=True))
        x, r = x + step * p, r - step * q
        if bool((r.norm(dim=-2, keepdim=True) <= _RESIDUAL * sizes).all()):
            break
        z = preconditioned(r)
        before, rz = rz, (r * z).sum(-2, keepdim=True)
        p = z + _quotient(rz, before) * p
    left = (b - times(x)).norm(dim=-2, keepdim=True)
    return x * largest if bool((left <= _ALLOWED * sizes).all()) else None


def _quotient(over: torch.Tensor, under: torch.Tensor) -> torch.Tensor:
    """Return a quotient, 0 where a column is done and its divisor 0."""
    return torch.where(under > 0, over / under, 0.0)


class _InvQuadLogdet(torch.autograd.Function):
    """One float32 factorisation; the backward pass inverts it in its memory."""

    @staticmethod
    def forward(ctx, matrix, diagonal, rhs, exact):  # type: ignore[no-untyped-def]
        lower, found = _both(matrix, diagonal, rhs, exact)
        if any(ctx.needs_input_grad):
            ctx.lower, ctx.found, ctx.exact, ctx.threads = lower, found, exact, threads.current()
            ctx.save_for_backward(matrix, diagonal, rhs)
        logdet = lower.diagonal(dim1=-2, dim2=-1).to(rhs.dtype).log().sum(-1).mul_(2)
        return (found * rhs).sum(-2), logdet

    @staticmethod
    @each_cotangent
    def backward(ctx, by_quadratic, by_logdet):  # type: ignore[no-untyped-def]
        matrix, diagonal, rhs = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            cotangents = (by_quadratic, by_logdet)
            return *plain_gradients(ctx.exact.values, (matrix, diagonal, rhs), wanted[:3], cotangents), None
        with threads.scope(ctx.threads):
            if ctx.lower is None:  # a second backward pass: the first one has used the memory of the factor
                ctx.lower, ctx.found = _both(matrix, diagonal, rhs, ctx.exact)

            def inverse() -> torch.Tensor:
                lower, ctx.lower = ctx.lower, None
                return inverted(lower).to(rhs.dtype)

            shape = None if diagonal is None else diagonal.shape

            grads = inv_quad_logdet_gradients(inverse, ctx.found, (by_quadratic, by_logdet), shape, wanted)
            return *grads, None


def _both(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor, exact: Exact
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a lower factor, in float32 where that does, and the float64 solutions."""
    lower = _low_factor(matrix, diagonal)
    found = None if lower is None else solved(matrix, diagonal, rhs, lower)
    if lower is None or found is None:
        lower = None  # its memory is wanted
        lower = exact.factorise(matrix, diagonal)
        found = torch.cholesky_solve(rhs, lower)
    return lower, found
