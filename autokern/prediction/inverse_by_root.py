"""Explained covariances ``rows K^-1 rows^T`` from a solver, a root or an operator, differentiable.

The classes implement the protocol `Explains` of `lazy_covariance`, as the inverse factor `Conditioned` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autokern.core.locks import once
from autokern.model.library_orders import as_now
from autokern.prediction.inverse_factor import Conditioned


class BySolving:
    """Explained covariances from `solve`, which returns ``K^-1`` times columns."""

    def __init__(self, batch: torch.Size, solve: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.batch, self._solve = batch, solve

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        return (rows * self._solve(rows.mT).mT).sum(-1)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        return rows @ self._solve(rows.mT)


class Rooted:
    """Explained covariances from the root of the inverse that the library caches: ``S S^T = K^-1``, ``(..., n, k)``."""

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


class Structured(BySolving):
    """Explained covariances from an operator that the library solves, under the settings at construction.

    `factor` is called when the first result is read; if it returns a factor, that is used instead of the operator.
    """

    def __init__(self, operator: Any, factor: Callable[[], Conditioned | None] = lambda: None) -> None:
        super().__init__(torch.Size(operator.shape[:-2]), operator.solve)
        self._make, self._as_made = factor, as_now()

    @once
    def _by(self) -> Any:
        with self._as_made():
            return self._make() or BySolving(self.batch, self._solve)

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        with self._as_made():
            return self._by.explained(rows, multiply)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        with self._as_made():
            return self._by.explained_covariance(rows, multiply)
