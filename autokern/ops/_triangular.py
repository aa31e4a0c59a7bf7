"""Inverses of a triangular matrix and from a Cholesky factor, by recursion on halves: nearly all work is GEMM.

The block formulae are those of Higham (2002, ch. 14) and Bientinesi et al. (2008, ACM TOMS 35(1)).
"""

from __future__ import annotations

import torch

from autokern.system import pages

_BASE = 96
"""Size up to which LAPACK's own routine is as fast as a product."""


def solve_identity(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a lower triangular matrix by one solve (LAPACK's trtrs)."""
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, unit.expand(lower.shape), upper=False)


def inverse_lower(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a lower triangular matrix ``(..., n, n)``, without gradients."""
    inverse = pages.empty(lower.shape, lower).zero_()
    _invert_into(lower, inverse)
    return inverse


def _invert_into(lower: torch.Tensor, inverse: torch.Tensor) -> None:
    n = lower.shape[-1]
    if n <= _BASE:
        inverse.copy_(solve_identity(lower))
        return
    half = _half(n)
    _invert_into(lower[..., :half, :half], inverse[..., :half, :half])
    _invert_into(lower[..., half:, half:], inverse[..., half:, half:])
    product = lower[..., half:, :half] @ inverse[..., :half, :half]
    inverse[..., half:, :half] = torch.matmul(inverse[..., half:, half:], product).neg_()


def inverse_from_cholesky(lower: torch.Tensor) -> torch.Tensor:
    """Return ``(L L^T)^-1`` for a lower Cholesky factor ``(..., n, n)``; the result is exactly symmetric."""
    inverse = pages.empty(lower.shape, lower)
    _invert_product_into(lower, inverse)
    return inverse


def _invert_product_into(lower: torch.Tensor, inverse: torch.Tensor) -> None:
    n = lower.shape[-1]
    if n <= 2 * _BASE:
        inverse.copy_(torch.cholesky_inverse(lower))
        return
    half = _half(n)
    first, corner = lower[..., :half, :half], lower[..., half:, :half]
    _invert_product_into(lower[..., half:, half:], inverse[..., half:, half:])
    carried = torch.linalg.solve_triangular(first, corner, upper=False, left=False)
    below = inverse[..., half:, :half]
    below.copy_(torch.matmul(inverse[..., half:, half:], carried).neg_())
    _invert_product_into(first, inverse[..., :half, :half])
    update = carried.mT @ below
    inverse[..., :half, :half].sub_(update.add_(update.mT.clone()).mul_(0.5))
    inverse[..., :half, half:].copy_(below.mT)


def _half(n: int) -> int:
    return (n // 2 + 15) // 16 * 16
