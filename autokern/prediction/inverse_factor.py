"""The inverse factor of a covariance, solutions with it, and its growth by new data.

`Conditioned` holds the inverse factor W of the noisy covariance, ``W^T W = K^-1``, and ``alpha = K^-1 (y - mean)``;
means, variances and fantasies all come from it. With q new points, cross covariance B and their own covariance D, the
rows ``G^-1 [-F W, I]`` are appended to W, where ``F = B W^T`` and ``G G^T = D - F F^T`` (the bordering method, Golub
and Van Loan 2013, sec. 4.2; for Gaussian processes Osborne 2010, app. B): O(q n^2), no refactorisation. As long as the
Cholesky factor is kept, F and F W come from it by substitution, which keeps more digits.

W lies in blocks of rows. New rows go to spare rows of the last block, or to a new one: old and new W share memory.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NotPSDError

from autokern.core.state import Lock
from autokern.density.factors import triangle_inverted
from autokern.density.matrices import solved
from autokern.system import memory

_ROWS = 256  # rows of a block: products are as fast per element as with the whole matrix, and skip half of the elements
_SPARE = 16  # fewest rows that a new block has space for
_claiming = Lock()


class _Block:
    """Rows from `start` on, in a storage ``(..., capacity, width)``; rows before `claimed` are in use."""

    def __init__(self, start: int, storage: torch.Tensor, claimed: int) -> None:
        self.start, self.storage, self.claimed = start, storage, claimed

    def claims(self, stop: int, new: int) -> bool:
        """Claim the rows from `stop` to `new`; returns False if they are in use or do not fit."""
        fits = new <= self.start + self.storage.shape[-2] and new <= self.storage.shape[-1]
        if not fits or (self.storage.is_inference() and not torch.is_inference_mode_enabled()):
            return False
        with _claiming.here():
            free = self.claimed == stop
            if free:
                self.claimed = new
        return free


class RowBlocks:
    """Blocks that share the memory of a lower triangular matrix ``(..., n, n)``; one block if it requires gradients."""

    def __init__(self, matrix: torch.Tensor) -> None:
        n = matrix.shape[-1]
        rows = n if matrix.requires_grad else _ROWS
        steps = [(start, min(n, start + rows)) for start in range(0, n, max(1, rows))]
        self._blocks = tuple(_Block(start, matrix[..., start:stop, :stop], stop) for start, stop in steps)
        self.n, self.batch, self.requires_grad = n, matrix.shape[:-2], matrix.requires_grad

    def _pieces(self) -> list[tuple[int, int, torch.Tensor]]:
        """Return for each block its first row, the row after its last, and its values."""
        pairs = zip(self._blocks, [*(block.start for block in self._blocks[1:]), self.n], strict=True)
        return [(block.start, stop, block.storage[..., : stop - block.start, :stop]) for block, stop in pairs]

    def right_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """Return ``b @ matrix.mT`` for b ``(..., m, n)``."""
        return torch.cat([b[..., :stop] @ piece.mT for _, stop, piece in self._pieces()], dim=-1)

    def right(self, c: torch.Tensor) -> torch.Tensor:
        """Return ``c @ matrix`` for c ``(..., m, n)``."""
        (start, stop, last), *others = reversed(self._pieces())
        out = c[..., start:stop] @ last
        for start, stop, piece in others:
            out[..., :stop] += c[..., start:stop] @ piece
        return out

    def appended(self, rows: torch.Tensor) -> RowBlocks:
        """Return the matrix with q lower triangular rows ``(..., q, n + q)`` appended, without gradients."""
        n, new = self.n, rows.shape[-1]
        last = self._blocks[-1]
        blocks = self._blocks
        if not last.claims(n, new):
            spare = max(new - n, min(_ROWS, max(_SPARE, n // 8)))
            last = _Block(n, rows.new_zeros((*self.batch, spare, n + spare)), new)
            blocks = (*blocks, last)
        place = last.storage.data  # has its own version counter, so that graphs that hold earlier rows stay valid
        place[..., n - last.start : new - last.start, :new] = rows.detach()
        made = RowBlocks.__new__(RowBlocks)
        made._blocks, made.n, made.batch, made.requires_grad = blocks, new, self.batch, False
        return made

    def dense(self) -> torch.Tensor:
        """Return the matrix in one piece."""
        pieces = self._pieces()
        if len(pieces) == 1 and pieces[0][2].shape[-1] == self.n:
            return pieces[0][2]
        whole = pieces[0][2].new_zeros((*self.batch, self.n, self.n))
        for start, stop, piece in pieces:
            whole[..., start:stop, :stop] = piece
        return whole


_LOST = {torch.float64: 1e-8, torch.float32: 3e-4}
"""Share of a new point's prior variance: if the other points leave less, half of the digits are lost."""


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
        last = self.border if self.border is not None else self.lower
        return self.inverse.n if last is None else last.shape[-1]

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
            solve = functools.partial(torch.cholesky_solve, input2=self.lower.detach())  # without a reference cycle
            alpha = self._alpha = (solve(rhs) if matrix is None else solved(matrix, solve, rhs)).squeeze(-1)
        self._residual = self._matrix = None
        return alpha

    @property
    def inverse(self) -> RowBlocks:
        """The inverse factor of the points that are not in `border`."""
        if self._inverse is None:
            assert self.lower is not None
            with torch.set_grad_enabled(self.lower.requires_grad):
                self._inverse = RowBlocks(triangle_inverted(self.lower))
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
        """Whether any of its tensors requires a gradient."""
        held = (self.lower, self.border, self._alpha, self._matrix, self._residual)
        return any(t is not None and t.requires_grad for t in held)

    def detached(self) -> Conditioned:
        """Return a copy without gradients, cached; itself if nothing requires a gradient."""
        if not self.requires_grad:
            return self
        if self._detached is None:
            with torch.no_grad():
                lower, border, alpha = (t if t is None else t.detach() for t in (self.lower, self.border, self.alpha))
                inverse = self._inverse
                if inverse is None or inverse.requires_grad:
                    inverse = None if lower is not None else RowBlocks(self.inverse.dense().detach())
            self._detached = Conditioned(lower, inverse, border, alpha)
        return self._detached

    def whitened(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows @ W^T`` of rows ``(..., m, n)``; by substitution, which is more accurate, if L is kept."""
        if self.lower is not None:
            return _triangular_solve(self.lower, rows.mT).mT
        if self.border is None:
            return self.inverse.right_transposed(rows)
        head = self.inverse.right_transposed(rows[..., : self.inverse.n])
        last = rows @ self.border.mT
        return torch.cat((head.expand(*last.shape[:-1], -1), last), dim=-1)

    def mean(self, rows: Any) -> Any:
        """Return ``rows K^-1 (y - mean)``, shape ``(..., m)``: the posterior mean less the prior mean."""
        alpha = self.alpha.squeeze(1) if self.alpha.dim() == 4 else self.alpha  # as in the library
        return (rows @ alpha.unsqueeze(-1)).squeeze(-1)

    def explained(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the diagonal of ``rows K^-1 rows^T``, shape ``(..., m)``; by substitution if L is kept."""
        return self.whitened(rows).square().sum(-1)

    def explained_covariance(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(..., m, m)``."""
        return _gram(self.whitened(rows))

    def _unwhitened(self, white: torch.Tensor) -> torch.Tensor:
        """Return ``white @ W``, which is ``rows @ K^-1`` for whitened rows."""
        if self.lower is not None:
            return _triangular_solve(self.lower.mT, white.mT, upper=True).mT
        first = self.inverse.n
        back = self.inverse.right(white[..., :first])
        if self.border is None:
            return back
        last = white[..., first:] @ self.border
        return torch.cat((back + last[..., :first], last[..., first:]), dim=-1)

    def solve(self, rhs: torch.Tensor) -> torch.Tensor:
        """Return ``K^-1 rhs`` for columns ``(..., n, m)``, without gradients through the factor."""
        if self.lower is not None:
            return torch.cholesky_solve(rhs, self.lower.detach())
        return self._unwhitened(self.whitened(rhs.mT)).mT

    def extended(self, cross: torch.Tensor, corner: torch.Tensor, residual: torch.Tensor) -> Conditioned | None:
        """Return the inverse factor with q more points, None if it would be inaccurate; `corner` includes noise."""
        f = self.whitened(cross)
        back = self._unwhitened(f)
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
    n = white.shape[-2]
    large = white.dim() == 2 and not (white.requires_grad and torch.is_grad_enabled())
    found = torch.matmul(white, white.mT, out=memory.huge((n, n), white) if large else None)
    if white.dtype is torch.float32:
        found.diagonal(dim1=-2, dim2=-1).copy_(white.square().sum(-1))
    return found


def _lost(left: torch.Tensor) -> bool:
    """Whether any remaining share of a variance is too small, or NaN."""
    return not bool((left > _LOST[left.dtype]).all())


def _triangular_solve(triangle: torch.Tensor, columns: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """Return ``triangle^-1 columns``, by one solve for batched columns if the triangle has no batch."""
    if triangle.dim() > 2 or columns.dim() == 2:
        return torch.linalg.solve_triangular(triangle, columns, upper=upper)
    rows = columns.mT
    flat = torch.linalg.solve_triangular(triangle, rows.reshape(-1, rows.shape[-1]).mT, upper=upper)
    return flat.mT.reshape(rows.shape).mT
