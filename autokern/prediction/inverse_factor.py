"""The inverse factor of a covariance, solutions with it, and its growth by new data.

`Conditioned` holds the inverse factor W of the noisy covariance, ``W^T W = K^-1``, and ``alpha = K^-1 (y - mean)``;
means, variances and fantasies all come from it. With q new points, cross covariance B and their own covariance D, the
rows ``G^-1 [-F W, I]`` are appended to W, where ``F = B W^T`` and ``G G^T = D - F F^T`` (the bordering method, Golub
and Van Loan 2013, sec. 4.2; for Gaussian processes Osborne 2010, app. B): O(q n^2), no refactorisation. As long as the
Cholesky factor is kept, F and F W come from it by substitution, which keeps more digits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NotPSDError

from autokern.density.matrices import solved
from autokern.prediction.row_blocks import RowBlocks

_LOST = {torch.float64: 1e-8, torch.float32: 3e-4}
"""A new point loses half of the digits if its variance given the others is a smaller part of its own than this."""


class Conditioned:
    """The inverse factor of a covariance, and solutions with it."""

    def __init__(
        self,
        lower: torch.Tensor | None = None,  # Cholesky factor ``(..., n, n)``, where there was a factorisation
        inverse: RowBlocks | None = None,  # W, or W without `border`; computed from `lower` on first use if None
        border: torch.Tensor | None = None,  # last rows of W, kept apart if they need gradients or more batches
        alpha: torch.Tensor | None = None,  # ``K^-1 (y - mean)``; computed from the next two on first use if None
        matrix: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        self.lower, self.border = lower, border
        self._inverse, self._alpha = inverse, alpha
        self._matrix, self._residual = matrix, residual
        self.source = matrix
        self._detached: Conditioned | None = None
        self._root: torch.Tensor | None = None

    @property
    def n(self) -> int:
        """Number of training points."""
        if self.border is not None:
            return self.border.shape[-1]
        if self.lower is not None:
            return self.lower.shape[-1]
        assert self._inverse is not None
        return self._inverse.n

    @property
    def alpha(self) -> torch.Tensor:
        """``K^-1 (y - mean)``, shape ``(..., n)``."""
        residual, matrix, alpha = self._residual, self._matrix, self._alpha  # cleared once there is an alpha
        if alpha is not None:
            return alpha
        assert self.lower is not None
        assert residual is not None
        rhs = residual.unsqueeze(-1)
        with torch.set_grad_enabled(self.requires_grad):  # grad mode of this object, not of the caller
            solve = functools.partial(_substitute, self.lower.detach())  # refers to no result: no reference cycle
            alpha = self._alpha = (solve(rhs) if matrix is None else solved(matrix, solve, rhs)).squeeze(-1)
        self._residual = self._matrix = None
        return alpha

    @property
    def inverse(self) -> RowBlocks:
        """The inverse factor of the points that are not in `border`."""
        if self._inverse is None:
            assert self.lower is not None
            n = self.lower.shape[-1]
            unit = torch.eye(n, dtype=self.lower.dtype, device=self.lower.device)
            with torch.set_grad_enabled(self.lower.requires_grad):
                self._inverse = RowBlocks(torch.linalg.solve_triangular(self.lower, unit, upper=False))
        return self._inverse

    @property
    def batch(self) -> torch.Size:
        """Batch shape of the factor."""
        matrix = self.border if self.border is not None else self.lower
        return self.inverse.batch if matrix is None else matrix.shape[:-2]

    @property
    def grown(self) -> bool:
        """Whether rows were appended to another inverse factor, so that there is no Cholesky factor."""
        return self.lower is None

    @property
    def root(self) -> torch.Tensor:
        """``W^T``, shape ``(..., n, n)``, which the library caches as the root of the inverse."""
        with torch.set_grad_enabled(self.requires_grad):
            return self._formed_root()

    def _formed_root(self) -> torch.Tensor:
        whole = self.inverse.dense() if self._root is None else self._root
        if self.border is not None:
            lead, q = self.border.shape[:-2], self.border.shape[-2]
            above = torch.nn.functional.pad(whole, (0, q)).expand(*lead, -1, -1)
            whole = torch.cat((above, self.border), dim=-2)
        elif not self.grown:
            self._root = whole
        return whole.mT

    @property
    def requires_grad(self) -> bool:
        """Whether anything here is part of a graph."""
        held = (self.lower, self.border, self._alpha, self._matrix, self._residual)
        return any(t is not None and t.requires_grad for t in held)

    def detached(self) -> Conditioned:
        """Return a copy without gradients, cached; itself if nothing requires a gradient."""
        if not self.requires_grad:
            return self
        if self._detached is None:
            with torch.no_grad():
                cut = [None if t is None else t.detach() for t in (self.lower, self.border, self.alpha)]
                if self._inverse is None or self._inverse.requires_grad:
                    inverse = None if cut[0] is not None else RowBlocks(self.inverse.dense().detach())
                else:
                    inverse = self._inverse
            self._detached = Conditioned(cut[0], inverse, cut[1], cut[2])
        return self._detached

    def whitened(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows @ W^T`` of rows ``(..., m, n)``."""
        if self.border is None:
            return self.inverse.right_transposed(rows)
        head = self.inverse.right_transposed(rows[..., : self.inverse.n])
        last = rows @ self.border.mT
        return torch.cat((head.expand(*last.shape[:-1], -1), last), dim=-1)

    def mean(self, rows: Any) -> Any:
        """Return ``rows K^-1 (y - mean)``, shape ``(..., m)``: the posterior mean less the prior mean."""
        alpha = self.alpha.squeeze(1) if self.alpha.dim() == 4 else self.alpha  # as in the library
        return (rows @ alpha.unsqueeze(-1)).squeeze(-1)

    def explained(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``: the variances that the data explain.

        It multiplies by the inverse factor if `multiply` or if there is no Cholesky factor, and else substitutes.
        """
        if multiply or self.lower is None:
            return self.whitened(rows).square().sum(-1)
        return self._substituted(rows).square().sum(-2)

    def explained_covariance(self, rows: torch.Tensor, multiply: bool = False) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``; `multiply` as in `explained`."""
        if multiply or self.lower is None:
            return _gram(self.whitened(rows))
        return _gram(self._substituted(rows).mT)

    def _substituted(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``L^-1 rows^T``, shape ``(..., n, m)``, by forward substitution."""
        assert self.lower is not None
        return _triangular_solve(self.lower, rows.mT)

    def _unwhitened(self, white: torch.Tensor) -> torch.Tensor:
        """Return ``white @ W``, which is ``rows @ K^-1`` for whitened rows."""
        first = self.inverse.n
        back = self.inverse.right(white[..., :first])
        if self.border is None:
            return back
        last = white[..., first:] @ self.border
        return torch.cat((back + last[..., :first], last[..., first:]), dim=-1)

    def solve(self, rhs: torch.Tensor) -> torch.Tensor:
        """Return ``K^-1 rhs`` for columns ``(..., n, m)``, without gradients through the factor."""
        if self.lower is not None:
            return _substitute(self.lower.detach(), rhs)
        return self._unwhitened(self.whitened(rhs.mT)).mT

    def _solved(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``rows L^-T`` and ``rows K^-1``, by substitution if L is kept, which is more accurate."""
        if self.lower is None:
            white = self.whitened(rows)
            return white, self._unwhitened(white)
        column = self._substituted(rows)
        return column.mT, _triangular_solve(self.lower.mT, column, upper=True).mT

    def extended(self, cross: torch.Tensor, corner: torch.Tensor, residual: torch.Tensor) -> Conditioned | None:
        """Return the inverse factor with q more points, None if it would be inaccurate; `corner` includes noise."""
        f, back = self._solved(cross)
        schur, own = corner - f @ f.mT, corner.detach().diagonal(dim1=-2, dim2=-1)
        if _lost(schur.detach().diagonal(dim1=-2, dim2=-1) / own):
            return None
        try:
            g = psd_safe_cholesky(schur)
        except NotPSDError:
            return None
        if _lost(g.detach().diagonal(dim1=-2, dim2=-1).square() / own):
            return None
        q = cross.shape[-2]
        unit = torch.eye(q, dtype=g.dtype, device=g.device).expand(*back.shape[:-1], q)
        rows = torch.linalg.solve_triangular(g, torch.cat((-back, unit), dim=-1), upper=False)
        news = (residual - (cross @ self.alpha.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)
        white = torch.linalg.solve_triangular(g, news, upper=False)
        last = torch.linalg.solve_triangular(g.mT, white, upper=True)  # a product with `rows` loses two more bits
        alpha = torch.cat((self.alpha - (back.mT @ last).squeeze(-1), last.squeeze(-1)), dim=-1)
        together = self.border is None and rows.shape[:-2] == self.inverse.batch
        if together and not (rows.requires_grad or self.inverse.requires_grad):
            return Conditioned(inverse=self.inverse.appended(rows), alpha=alpha)
        if self.border is not None:
            old = torch.nn.functional.pad(self.border, (0, q)).expand(*rows.shape[:-2], -1, -1)
            rows = torch.cat((old, rows), dim=-2)
        return Conditioned(inverse=self.inverse, border=rows, alpha=alpha)


def _gram(white: torch.Tensor) -> torch.Tensor:
    """Return ``white @ white^T``; in float32 torch's pairwise sum gives the diagonal, as a BLAS loses more digits."""
    found: torch.Tensor = white @ white.mT
    if white.dtype is torch.float32:
        found.diagonal(dim1=-2, dim2=-1).copy_(white.square().sum(-1))
    return found


def _lost(left: torch.Tensor) -> bool:
    """Whether any remaining share of a variance is too small, or NaN."""
    return not bool((left > _LOST[left.dtype]).all())


def _triangular_solve(triangle: torch.Tensor, columns: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """Return ``triangle^-1 columns``, by one solve for batched columns if the triangle has no batch."""
    if triangle.dim() > 2 or columns.dim() == 2:
        found: torch.Tensor = torch.linalg.solve_triangular(triangle, columns, upper=upper)
        return found
    rows = columns.mT
    flat = torch.linalg.solve_triangular(triangle, rows.reshape(-1, rows.shape[-1]).mT, upper=upper)
    folded: torch.Tensor = flat.mT.reshape(rows.shape).mT
    return folded


def _substitute(lower: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_solve(rhs, lower)
