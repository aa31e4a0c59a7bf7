"""Posterior covariances from a root or an operator instead of an inverse factor, with gradients, and made when read.

Each class has a batch shape, `explained` (the variances that the data explain) and `explained_covariance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autokern.core.locks import once
from autokern.gp.factors import solved
from autokern.gp.inverse_factor import Conditioned
from autokern.gp.library_orders import as_now

__all__ = ["Differentiated", "Rooted", "Structured"]


class Differentiated:
    """Explained covariances with gradients by the kernel; the library detaches the noise."""

    def __init__(self, known: Conditioned, matrix: torch.Tensor) -> None:
        self._known, self._matrix = known, matrix
        self.batch = matrix.shape[:-2]

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        return (rows * solved(self._matrix, self._known.solve, rows.mT).mT).sum(-1)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        return rows @ solved(self._matrix, self._known.solve, rows.mT)


class Rooted:
    """Explained covariances from a root of the inverse that the library keeps: ``S S^T = K^-1``, S ``(..., n, k)``."""

    def __init__(self, root: torch.Tensor) -> None:
        self._root = root
        self.batch = root.shape[:-2]

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        return (rows @ self._root).square().sum(-1)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        white = rows @ self._root
        return white @ white.mT


class Structured:
    """Explained covariances from an operator that the library solves by structure or by iterations.

    It solves under the settings that were in force when it was made. `factor` is asked when the first of them is read,
    and serves in place of the operator unless it returns None.
    """

    def __init__(self, operator: Any, factor: Callable[[], Conditioned | None] = lambda: None) -> None:
        self._operator, self._make = operator, factor
        self.batch = torch.Size(operator.shape[:-2])
        self._as_made = as_now()

    @once
    def _factor(self) -> Conditioned | None:
        with self._as_made():
            return self._make()

    def _solved(self, rhs: torch.Tensor) -> torch.Tensor:
        with self._as_made():
            solution: torch.Tensor = self._operator.solve(rhs)
        return solution

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        if self._factor is not None:
            return self._factor.explained(rows, multiply)
        return (rows * self._solved(rows.mT).mT).sum(-1)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        if self._factor is not None:
            return self._factor.explained_covariance(rows, multiply)
        return rows @ self._solved(rows.mT)
