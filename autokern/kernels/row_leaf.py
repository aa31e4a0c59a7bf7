"""One leaf of a kernel tree on blocks of rows: squared distances by GEMM, and the sums of its gradients."""

from __future__ import annotations

import torch

from autokern.kernels.family import Family, Reach

Rows = tuple[int, int]  # first row of a block and the row after its last; its columns start at 0


class RowLeaf:
    """The centred points of one leaf, of rows and columns, their squared norms, and the sums for their gradients."""

    def __init__(
        self, of: Family, points: torch.Tensor, shape: torch.Tensor | None, look: bool,
        others: torch.Tensor | None = None, same: bool = True,
    ) -> None:  # fmt: skip
        self.family, self.shape, self.dtype, self.same = of, shape, points.dtype, same
        self._set(points, points if others is None else others)
        self.seen = Reach()
        if look and (points.dtype is not torch.float64 or of.kinked):
            self.seen = of.reach(*((self.row,) if others is None else (self.row, self.column)))
        if self.seen.far and points.dtype is not torch.float64:
            z = points.double()
            self._set(z, z if others is None else others.double())

    def _set(self, z: torch.Tensor, y: torch.Tensor) -> None:
        self.z, self.y, self.row = z, y, torch.linalg.vecdot(z, z).unsqueeze(-1)
        self.column = self.row.mT if y is z else torch.linalg.vecdot(y, y).unsqueeze(-2)

    def distances(self, at: Rows, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with u for a block; the diagonal of equal points becomes 0, or NaN for NaN points."""
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
        self.family.settled(u, self.seen, u.diagonal(start, -2, -1) if self.same else None)
        return out if u is out else out.copy_(u)

    def started(self, mirrored: bool = False) -> RowLeaf:
        """Return this leaf without sums; if `mirrored`, entries left of the diagonal blocks count twice."""
        self._mirrored = mirrored
        self._rows: list[torch.Tensor] = []
        self._columns: torch.Tensor | None = None
        return self

    def accumulate(self, at: Rows, w: torch.Tensor) -> None:
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
        # both sums are transposed, which a BLAS adds faster
        self._rows.append((y if y.shape[-1] == w.shape[-1] else y[:, :stop]) @ w.mT)
        if not self._mirrored:
            if self._columns is None:
                self._columns = z[..., start:stop] @ w
            else:
                self._columns.addmm_(z[:, start:stop], w)
        elif start:
            if self._columns is None:
                self._columns = torch.zeros_like(z)
            self._columns[:, :start].addmm_(z[:, start:stop], w[:, :start])

    def gradients(self, factor: torch.Tensor | float) -> list[torch.Tensor]:
        """Return the gradients of the points times `factor`, one for each set of points."""
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
