"""A float64 matrix factorised and inverted in float32, its solutions refined to float64.

Conjugate gradients in float64 with the float32 factor as preconditioner reach float64 solutions in a few products. They
do so for condition numbers far above the 1e7 at which plain iterative refinement ends (Carson and Higham 2018,
"Accelerating the solution of linear systems by iterative refinement in three precisions", with CG in place of GMRES, as
the matrix is positive definite). Log determinant and inverse are those of the float32 factor; calibration measures
their error.
"""

from __future__ import annotations

import torch

from autokern.gp.factors import factorised, inverted
from autokern.ops._quadratic_forms import Method, factorise

_ROUNDS = 40
"""The largest number of products."""
_RESIDUAL = 1e-10
"""Norm of the residual, relative to the right-hand side, at which a column has converged."""
_ALLOWED = 1e-8
"""The same for the true residual, which is computed at the end."""


def _low_factor(matrix: torch.Tensor, diagonal: torch.Tensor | None) -> torch.Tensor | None:
    """Return the lower float32 factor in new memory, or None if there is none."""
    low = matrix.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if diagonal is not None:
        low.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    lower, info = factorised(low)
    return None if torch.any(info) else lower


def solved(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor, low: torch.Tensor
) -> torch.Tensor | None:
    """Return the float64 solutions, or None if one does not converge; `low` is a lower float32 factor of the sum."""

    def times(x: torch.Tensor) -> torch.Tensor:
        y = matrix @ x
        return y if diagonal is None else y.addcmul_(diagonal.unsqueeze(-1), x)

    def preconditioned(r: torch.Tensor) -> torch.Tensor:
        white = torch.linalg.solve_triangular(low, r.to(low.dtype), upper=False)  # cholesky_solve copies the factor
        return torch.linalg.solve_triangular(low.mT, white, upper=True).to(r.dtype)

    largest = rhs.abs().amax(-2, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)  # minute or huge columns leave the range of float32
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
    """Return a quotient, 0 for columns that have converged to a divisor of 0."""
    return torch.where(under > 0, over / under, 0.0)


def _factorise(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a lower factor (float32 where that suffices), the float64 solutions and the quadratic forms."""
    lower = _low_factor(matrix, diagonal)
    found = None if lower is None else solved(matrix, diagonal, rhs, lower)
    if lower is None or found is None:
        lower = None  # frees its memory
        lower = factorise(matrix, diagonal)
        found = torch.cholesky_solve(rhs, lower)
    return lower, found, (found * rhs).sum(-2)


MIXED = Method(_factorise, lambda lower, found: found, lambda lower: inverted(lower).to(torch.float64))
