"""Partial pivoted Cholesky of a matrix that is there: some of its columns explain it, noise the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autokern.gp.preconditioners.base import UnfitError, cholesky
from autokern.gp.preconditioners.pivoted import candidates, factor, greedy, most

__all__ = ["by_columns"]


def by_columns(matrix: torch.Tensor, noise: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product with the inverse of ``K_nI K_II^-1 K_In + D``, by Woodbury's formula in double precision.

    UnfitError if there is no pivot, or the covariance of the pivots is not positive definite.
    """
    chosen = _pivots(matrix, float(noise.min()), most(len(noise)))
    if not len(chosen):
        raise UnfitError
    cross = matrix[:, chosen].double()
    root = noise.double().rsqrt().unsqueeze(-1)
    wide = torch.linalg.solve_triangular(factor(cross[chosen]).mT, cross, upper=True, left=False).mul_(root)
    inner = wide.mT @ wide
    inner.diagonal().add_(1)
    thin = torch.linalg.solve_triangular(cholesky(inner).mT, wide, upper=True, left=False).to(matrix.dtype)
    scale = root.to(matrix.dtype)

    def inverse(v: torch.Tensor) -> torch.Tensor:
        scaled = v * scale
        return torch.addmm(scaled, thin, thin.mT @ scaled, alpha=-1).mul_(scale)

    return inverse


def _pivots(matrix: torch.Tensor, least: float, rank: int) -> torch.Tensor:
    """Return the places of pivots."""
    places = candidates(len(matrix), rank)
    among = matrix[places][:, places].double()
    return places[greedy(among.__getitem__, among.diagonal().clone(), least, rank)]
