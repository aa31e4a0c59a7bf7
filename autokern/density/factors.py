"""In-place Cholesky factors and inverses, for functions with closed-form gradients, and differentiable solves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from autokern.core.autograd import each_cotangent
from autokern.system import memory_limit

Solver = Callable[[torch.Tensor], torch.Tensor]
_SMALL = 2**14
"""Elements below which a new result is faster than working in place."""


def factorised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower Cholesky factor of a row-major matrix, of which the lower triangle is read, and LAPACK's info.

    The factor overwrites the matrix where that is faster. `torch.linalg.cholesky_ex` is called once, so patches see it.
    """
    if matrix.numel() < _SMALL or not matrix.is_cpu:
        lower, info = torch.linalg.cholesky_ex(matrix)
        return lower, info
    turned = matrix.mT  # column-major for LAPACK: its upper triangle is the matrix's lower one
    info = torch.empty(matrix.shape[:-2], dtype=torch.int32, device="cpu")
    torch.linalg.cholesky_ex(turned, upper=True, out=(turned, info))
    return matrix, info


def fits(n: int, like: Any) -> bool:
    """Whether three ``(n, n)`` matrices of the dtype and device of `like` fit: covariance, factor and a copy."""
    return memory_limit.fits(3 * n * n * like.dtype.itemsize, like.device)


def inverted(lower: torch.Tensor) -> torch.Tensor:
    """Return the symmetric inverse for a lower factor by LAPACK's potri; overwrites the factor where that is faster."""
    if lower.numel() < _SMALL:
        return torch.cholesky_inverse(lower)
    upper = lower.is_contiguous()
    turned = lower.mT if upper else lower
    return torch.cholesky_inverse(turned, upper=upper, out=turned)


def inv_quad_logdet_gradients(
    inverse: Callable[[], torch.Tensor],  # returns ``K^-1``, which is overwritten; called only if needed
    found: torch.Tensor,  # ``K^-1 B``, ``(..., n, t)``
    cotangents: tuple[torch.Tensor, torch.Tensor],  # of inv_quad ``(..., t)`` and logdet ``(...)``
    diagonal: torch.Size | None,  # shape of the diagonal that was added to the matrix
    wanted: Sequence[bool],  # of the three gradients
) -> list[torch.Tensor | None]:
    """Return the gradients of inv_quad and logdet by the matrix, the added diagonal, and the columns B."""
    by_quadratic, by_logdet = cotangents
    weighted = found * by_quadratic.unsqueeze(-2)
    grads: list[torch.Tensor | None] = [None, None, 2 * weighted if wanted[2] else None]
    if wanted[0] or wanted[1]:
        inner = inverse()
        inner.mul_(by_logdet[..., None, None])
        if inner.dim() == 2:
            inner.addmm_(weighted, found.mT, alpha=-1)
        else:
            inner.sub_(weighted @ found.mT)
        grads[0] = inner if wanted[0] else None
        if wanted[1] and diagonal is not None:
            grads[1] = inner.diagonal(dim1=-2, dim2=-1).sum_to_size(diagonal)
    return grads


class _Solved(torch.autograd.Function):
    """A solve with an existing factor, differentiable without another: ``d(K^-1 b) = K^-1 (db - dK K^-1 b)``."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, solve: Solver, rhs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(matrix, rhs)
        ctx.solve = solve
        return solve(rhs)

    @staticmethod
    @each_cotangent
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        matrix, rhs = ctx.saved_tensors
        by_rhs = solved(matrix, ctx.solve, grad)
        by_matrix = None
        if ctx.needs_input_grad[0]:
            by_matrix = -(by_rhs @ solved(matrix, ctx.solve, rhs).mT)
            by_matrix = (0.5 * (by_matrix + by_matrix.mT)).sum_to_size(matrix.shape)
        return by_matrix, None, by_rhs.sum_to_size(rhs.shape) if ctx.needs_input_grad[2] else None


def solved(matrix: torch.Tensor, solve: Solver, rhs: torch.Tensor) -> torch.Tensor:
    """Return ``matrix^-1 rhs``, differentiable to any order; `solve` need not be differentiable."""
    return cast("torch.Tensor", _Solved.apply(matrix, solve, rhs))
