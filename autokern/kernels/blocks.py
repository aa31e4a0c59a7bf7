"""A kernel matrix of one set of points evaluated block by block, and its gradients accumulated block by block.

Temporaries are blocks that fit the cache. For each leaf, the backward pass accumulates the product ``W [x 1]`` of
``W = g k'(u)``, which gives the gradient of the points as ``4 gamma (rows(W) x - W x)``; no ``n x n x d`` temporary
exists. The matrix is symmetric, so the lower triangle of blocks suffices: entries left of the diagonal count twice.
"""

from __future__ import annotations

import torch

from autokern.kernels.family import Family
from autokern.kernels.far import UNSEEN, reach, settled
from autokern.kernels.tree import Tree, by_leaf
from autokern.kernels.walk import Walk

_Rows = tuple[int, int]
"""First row of a block and the row after its last; its columns start at 0."""
_LAUNCHED = 2**26
"""Bytes of a block on an accelerator: much work compared to a dozen kernel launches, little of its memory."""


def bytes_on(cached: int, device: str) -> int:
    """Return the bytes of a block on a device type: `cached` on a CPU."""
    return cached if device == "cpu" else _LAUNCHED


def row_blocks(matrix: torch.Tensor, cached: int) -> list[_Rows]:
    """Return the bounds of row blocks of at most `bytes_on` bytes, but at least 16 rows; a batch is one block."""
    n, m = matrix.shape[-2:]
    if matrix.dim() > 2:
        return [(0, n)]
    row_bytes = max(1, m * matrix.element_size())
    each = max(16, bytes_on(cached, matrix.device.type) // row_bytes // 16 * 16)
    return [(start, min(n, start + each)) for start in range(0, n, each)]


class Leaf:
    """The row and column points of one leaf with their squared norms, and the sums for their gradients.

    Points ``(..., n, d)`` are centred (`tree.read`), which keeps the norms small. `others` ``(..., m, d)`` are the
    columns' points, None for the same. `look` allows reading the largest norm back from the device; `same` says that
    both sets are equal, so that the diagonal is known. The sums ``W [x' 1]`` and ``W^T [x 1]`` over blocks are
    transposed, which a BLAS adds faster.
    """

    __slots__ = (
        "_columns", "_extended", "_mirrored", "_rows", "column", "dtype", "family", "row", "same", "seen", "shape", "y",
        "z",
    )  # fmt: skip

    def __init__(
        self, of: Family, points: torch.Tensor, shape: torch.Tensor | None, look: bool,
        others: torch.Tensor | None = None, same: bool = True,
    ) -> None:  # fmt: skip
        self.family, self.shape, self.dtype, self.same = of, shape, points.dtype, same
        self._set(points, points if others is None else others)
        self.seen = UNSEEN
        if look and (points.dtype is not torch.float64 or of.kinked):
            self.seen = reach(of, of.gamma, *((self.row,) if others is None else (self.row, self.column)))
        if self.seen.far and points.dtype is not torch.float64:
            z = points.double()
            self._set(z, z if others is None else others.double())

    def _set(self, z: torch.Tensor, y: torch.Tensor) -> None:
        self.z, self.y, self.row = z, y, torch.linalg.vecdot(z, z).unsqueeze(-1)
        self.column = self.row.mT if y is z else torch.linalg.vecdot(y, y).unsqueeze(-2)

    def distances(self, at: _Rows, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with u for some rows and its width of columns; a known diagonal is 0, or NaN for NaN points."""
        start, stop = at
        gamma, z, y, row, width = self.family.gamma, self.z, self.y, self.row, out.shape[-1]
        u = out if out.dtype is z.dtype else torch.empty_like(out, dtype=z.dtype)
        if out.dim() == 3:
            torch.baddbmm(self.column, z, y.mT, beta=gamma, alpha=-2 * gamma, out=u).add_(row, alpha=gamma)
        elif stop - start == z.shape[0]:
            torch.addmm(self.column, z, y.mT, beta=gamma, alpha=-2 * gamma, out=u).add_(row, alpha=gamma)
        else:
            torch.addmm(self.column[:, :width], z[start:stop], y[:width].mT, beta=gamma, alpha=-2 * gamma, out=u)
            u.add_(row[start:stop], alpha=gamma)
        settled(self.family, u, self.seen, u.diagonal(start, -2, -1) if self.same else None)
        return out if u is out else out.copy_(u)

    def started(self, mirrored: bool = False) -> Leaf:
        """Return this leaf without sums; `mirrored` says that entries left of the diagonal's blocks count twice."""
        self._mirrored = mirrored
        self._rows: list[torch.Tensor] = []
        self._columns: torch.Tensor | None = None
        return self

    def accumulate(self, at: _Rows, w: torch.Tensor) -> None:
        """Accumulate ``dL/du``; its diagonal cancels for equal points and is set to 0, or stays NaN."""
        (start, stop), w = at, w.to(self.z.dtype)
        if self.same:
            diagonal = w.diagonal(start, -2, -1)
            diagonal.sub_(diagonal)
        if not self._rows:
            z = torch.cat((self.z, torch.ones_like(self.row)), -1).mT
            y = z if self.y is self.z else torch.cat((self.y, torch.ones_like(self.column.mT)), -1).mT
            self._extended = z, y
        z, y = self._extended
        self._rows.append((y if y.shape[-1] == w.shape[-1] else y[:, :stop]) @ w.mT)
        if not self._mirrored:
            if self._columns is None:
                self._columns = z[..., :stop] @ w
            else:
                self._columns.addmm_(z[:, start:stop], w)
        elif start:
            if self._columns is None:
                self._columns = torch.zeros_like(z)
            self._columns[:, :start].addmm_(z[:, start:stop], w[:, :start])

    def gradients(self, factor: torch.Tensor | float) -> list[torch.Tensor]:
        """Return the gradient of the rows' points, and of the columns' if they are another tensor."""
        rows = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows, -1)
        if self._columns is None:
            pairs = [(self.z, rows)]
        elif self.y is self.z:
            pairs = [(self.z, rows + self._columns)]
        else:
            pairs = [(self.z, rows), (self.y, self._columns)]
        scale = factor * ((4 if self._mirrored else 2) * self.family.gamma)
        found = ((p, s.mT) for p, s in pairs)
        return [(s[..., -1:] * p).sub_(s[..., :-1]).mul_(scale).to(self.dtype) for p, s in found]


class Blocks(Walk[_Rows]):
    """A tree of detached tensors with at most one batch dimension, the same for all.

    Without `look`, nothing is read back from the device, as a recorded (CUDA graph) step requires.
    """

    def __init__(self, tree: Tree, look: bool = True) -> None:
        found = [Leaf(*leaf, look).started(mirrored=True) for leaf in by_leaf(tree)]
        super().__init__(tree.node, found, [w if not w.dim() else w[:, None, None] for w in tree.weights])

    def _total(self, g: torch.Tensor, by: torch.Tensor | None, at: _Rows) -> torch.Tensor:
        """Return the sum over a block, counting its columns before its first row twice."""
        product = g if by is None else g * by
        total, start = product.sum((-2, -1), keepdim=True), at[0]
        return total + product[..., :start].sum((-2, -1), keepdim=True) if start else total
