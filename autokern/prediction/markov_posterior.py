"""The posterior of one-dimensional Matérn processes: means and variances in time linear in training and test points."""

from __future__ import annotations

import math

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky

from autokern.density.markov import Chained, conditional, has_digits, responses
from autokern.density.markov_chain import Element, around, cut, resolvent
from autokern.prediction.lazy_covariance import BySolving

_DENSE = 4000  # most training points for which joint covariances of test points come from a Cholesky factor
_ROWS = 2048  # test points that are evaluated at a time


class LinePosterior(BySolving):
    """The posterior given training data on a line, without gradients.

    `valid` says whether all factorisations succeeded and the relative residual is at most `most` (`has_digits`).
    """

    def __init__(self, data: Chained, most: float = math.inf) -> None:
        data = data._replace(noise=data.noise.clone())  # joint covariances read it later; a buffer may change
        self.batch, self.data, self.n, self.most = torch.Size(), data, len(data.residual), most
        blocks = self._blocks = cut(data.families, data.weights, data.points)
        of = self._of = conditional(blocks, data.noise.expand(self.n), data.residual)
        self._beside = around(of.element, blocks.stationary)
        self._told = responses(of, self._beside)
        self._columns = of.root.mT @ of.white
        self.valid = of.valid and (most == math.inf or has_digits(data, self._told.values.reshape(-1)[: self.n], most))

    def at(self, points: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and variances at unsorted points ``(m)``, given for each leaf."""
        blocks = self._blocks
        scaled = [z.double() * c.root for c, z in zip(blocks.chains, points, strict=True)]
        block = torch.searchsorted(blocks.starts[0][1:-1], scaled[0], right=True)
        mean, variance = (torch.empty_like(scaled[0]) for _ in range(2))
        for start in range(0, len(block), _ROWS):
            rows = slice(start, start + _ROWS)
            mean[rows], variance[rows] = self._inside([z[rows] for z in scaled], block[rows])
        before = scaled[0] < blocks.starts[0][0]
        if before.any():
            mean[before], variance[before] = self._before([z[before] for z in scaled])
        return mean, variance

    def _inside(self, points: list[torch.Tensor], block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and variances at points not before the first training point; `block` is the block of each."""
        blocks, told, d = self._blocks, self._told, len(self._blocks.stationary)
        leaves = list(zip(blocks.chains, blocks.weights, blocks.starts, blocks.inside, points, strict=True))
        seen = torch.cat([c.seen((z - t[block]).clamp_min(0)) for c, _, t, _, z in leaves], -1).unsqueeze(-2)
        ahead = torch.cat([c.ahead((t[block + 1] - z).clamp_min(0)) * w for c, w, t, _, z in leaves], -1)
        values = sum(c.correlation((z.unsqueeze(-1) - y[block]).abs()) * w for c, w, _, y, z in leaves)
        # condition on the state at the block's start, then on the values of the block, then on the later data
        before = seen @ blocks.stationary
        rows = values.unsqueeze(-2) - before @ blocks.seen[block].mT
        k, size = blocks.inside[0].shape
        rows[(block == k - 1).nonzero().squeeze(-1), :, self.n - k * size + size :] = 0
        ahead = ahead.unsqueeze(-2) - before @ blocks.transition[block].mT
        by_state, by_next, by_data = (rows @ self._columns[block]).split((d, d, 1), -1)
        seen_still, left = seen - by_state, ahead - by_next
        left = left + seen_still @ told.carried[block].mT
        mean = seen_still @ told.mean[block] + by_data + left @ told.next[block]
        own = blocks.weights.sum() - (before * seen).sum(-1) - (rows @ self._of.root[block].mT).square().sum(-1)
        own = own + _quadratic(seen_still, told.covariance[block]) - _quadratic(left, told.curved[block])
        return mean.flatten(), own.flatten()

    def _before(self, points: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and variances at points before all data, which depend on the data through the first state."""
        blocks, beside = self._blocks, self._beside
        leaves = zip(blocks.chains, blocks.weights, blocks.starts, points, strict=True)
        ahead = torch.cat([c.ahead(t[0] - z) * w for c, w, t, z in leaves], -1)
        told = resolvent(beside.whole_j @ blocks.stationary)
        explained = _quadratic(ahead.unsqueeze(-2), told @ beside.whole_j)
        return (ahead @ told @ beside.whole_h).squeeze(-1), blocks.weights.sum() - explained.flatten()

    def solve(self, columns: torch.Tensor) -> torch.Tensor:
        """Return ``K^-1`` times columns ``(n, c)``, in the training points' original order."""
        order, of, (k, size) = self.data.order, self._of, self._blocks.inside[0].shape
        sorted_columns = columns.double() if order is None else columns.double()[order]
        filled = torch.nn.functional.pad(sorted_columns, (0, 0, 0, k * size - self.n)).view(k, size, -1)
        white, d = of.root @ filled, of.seen.shape[-1]
        gram = of.white[..., : 2 * d].mT @ white
        a, _, q, _, j = of.element
        element = Element(a, gram[:, d:], q, gram[:, :d], j)
        other = of._replace(element=element, white=torch.cat((of.white[..., : 2 * d], white), -1))
        found = responses(other, around(element, self._blocks.stationary)).values.flatten(0, 1)[: self.n]
        return found if order is None else torch.empty_like(found).index_copy_(0, order, found)

    def explained_covariance(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows K^-1 rows^T``, shape ``(m, m)``; up to `_DENSE` points by a factor, which is more accurate."""
        columns = rows.mT.double()
        if self.n > _DENSE:
            found = columns.mT @ self.solve(columns)
            return ((found + found.mT) * 0.5).to(rows.dtype)
        data = self.data
        columns = columns if data.order is None else columns[data.order]
        k = torch.diag_embed(data.noise.expand(self.n))
        for one, weight, z in zip(self._blocks.chains, data.weights, data.points, strict=True):
            scaled = z * one.root
            k = k + one.correlation((scaled.unsqueeze(-1) - scaled).abs()) * weight
        white = torch.linalg.solve_triangular(psd_safe_cholesky(k), columns, upper=False)
        return (white.mT @ white).to(rows.dtype)


def _quadratic(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``r M r^T`` of rows ``(m, 1, d)``, shape ``(m, 1)``."""
    return (rows @ matrix * rows).sum(-1)
