"""Posterior covariances from a root or an operator instead of an inverse factor, with gradients, and made when read.

Each class has a batch shape, `explained` (the variances that the data explain) and `explained_covariance`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from linear_operator import settings as library

from autokern.core.locks import once
from autokern.gp.factors import solved
from autokern.gp.inverse_factor import Conditioned

__all__ = ["Differentiated", "ReadLater", "Rooted", "Structured"]


class Differentiated:
    """Explained covariances with gradients by the kernel; the library detaches the noise.

    Parameters
    ----------
    known : Conditioned
        Its factor.
    matrix : Tensor
        The covariance ``(..., n, n)`` itself, part of a graph.
    """

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
    """Explained covariances from a root of the inverse that the library keeps, of any shape.

    Parameters
    ----------
    root : Tensor
        S with ``S S^T = K^-1``, shape ``(..., n, k)``.
    """

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


_SETTINGS = (
    library.cg_tolerance, library.max_cg_iterations, library.max_cholesky_size, library.max_preconditioner_size,
    library.min_preconditioning_size,
)  # fmt: skip
"""Settings that decide how the library solves, and how accurately."""


class Structured:
    """Explained covariances from a structured operator (Kronecker, Toeplitz), as in the library.

    It solves under the settings that were in force when it was made.

    Parameters
    ----------
    operator : LinearOperator
        Noisy covariance of the training data.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self.batch = torch.Size(operator.shape[:-2])
        self._settings = [(kind, kind.value()) for kind in _SETTINGS]
        self._solves = library.fast_computations.solves.on()

    def _solved(self, rhs: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            for kind, value in self._settings:
                stack.enter_context(kind(value))
            stack.enter_context(library.fast_computations.solves(self._solves))
            solution: torch.Tensor = self._operator.solve(rhs)
        return solution

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        return (rows * self._solved(rows.mT).mT).sum(-1)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        return rows @ self._solved(rows.mT)


class ReadLater:
    """Explained covariances by a factor that is made when the first of them is read.

    Parameters
    ----------
    factor : callable
        Returns the factor of the training covariance as it was, None where it cannot be had.
    otherwise : Structured
        What serves then.
    """

    def __init__(self, factor: Callable[[], Conditioned | None], otherwise: Structured) -> None:
        self._factor, self._otherwise = factor, otherwise
        self.batch = otherwise.batch

    @once
    def _known(self) -> Conditioned | Structured:
        return self._factor() or self._otherwise

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``."""
        return self._known.explained(rows, multiply)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        return self._known.explained_covariance(rows, multiply)
