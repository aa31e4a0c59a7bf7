"""Vecchia's approximation: a sparse factor of the inverse, from each point conditioned on a few near predecessors.

Column i of ``S`` has entries at the set of point i and its predecessors: the last column of ``L^-T`` of the set's small
covariance ``L L^T`` (Vecchia 1988; Katzfuss and Guinness 2021). The diagonal of ``S^T K S`` is exactly one. The small
covariances are factorised in double precision, a few hundred at a time, by several threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from autokern.density.block_cg import Preconditioner, Probed, UnfitError, cholesky, in_double
from autokern.kernels import matmul
from autokern.kernels import tree as trees
from autokern.kernels.tree import Tree, apart
from autokern.system import threads
from autokern.system.threads import Member

_CACHED = 2**18  # elements of the small covariances that are computed together
_COST, _BACKWARD = 8, 3
"""Approximate costs of an element of a small covariance, in elements of a product; factor of its gradients."""


class Conditioning(NamedTuple):
    """An ordering of n points, and for each point a set of predecessors."""

    sets: torch.Tensor  # ``(n, k + 1)``: for each point in order, indices of its predecessors, and last its own
    there: torch.Tensor  # whether each entry of `sets` counts, as the first points have fewer predecessors


def conditioning(points: torch.Tensor, k: int) -> Conditioning:
    """Return a random order of points ``(n, d)``, fixed for each n, and at most k near predecessors of each point.

    Neighbours are searched in blocks that double in size: about half or more of the nearest points up to a block's end
    precede a point, so a few near predecessors may be missed.
    """
    from scipy.spatial import cKDTree

    n, count = len(points), 2 * k + 8
    order = np.random.default_rng(0).permutation(n)
    z = points.numpy()[order]
    found = np.full((n, k + 1), -1)
    found[:, k] = np.arange(n)
    start = 0
    while start < n:
        stop = min(n, max(count, 2 * start))
        rows = np.arange(start, stop)[:, None]
        _, near = cKDTree(z[:stop]).query(
            z[start:stop], k=np.arange(1, min(stop, count) + 1), workers=torch.get_num_threads()
        )
        before = near < rows
        place = np.cumsum(before, axis=1) - 1
        row, column = np.nonzero(before & (place < k))
        found[start + row, place[row, column]] = near[row, column]
        start = stop
    missing = found < 0
    found = order[np.where(missing, np.arange(n)[:, None], found)]
    return Conditioning(torch.from_numpy(found), torch.from_numpy(~missing))


class Vecchia(Preconditioner):
    """The factor for a tree without a batch; raises UnfitError if a small covariance is not positive definite."""

    def __init__(self, tree: Tree, noise: torch.Tensor, given: Conditioning) -> None:
        from scipy.sparse import csr_array

        self._tree, self._noise, self._given = in_double(tree), noise.detach().double(), given
        n, size = given.sets.shape
        data = matmul.agreed(self._tree, None, None, self._noise)
        elements, unit = _COST * n * size**2, self._noise.new_zeros(size, 1)
        unit[-1] = 1

        def columns(out: torch.Tensor, first: int, end: int) -> None:
            def column(start: int, stop: int) -> None:
                lower, info = torch.linalg.cholesky_ex(self._covariances(self._tree, start, stop))
                last = torch.linalg.solve_triangular(lower.mT, unit.expand(*lower.shape[:-1], 1), upper=True)
                out.view(n, size)[start:stop] = torch.where(info.unsqueeze(-1) > 0, math.nan, last.squeeze(-1))

            self._in_chunks(lambda _: column, first, end)

        found = matmul.by_points(n, elements, n * size, self._noise, data, columns)
        if found.isnan().any():
            raise UnfitError
        self._coefficients = found.view(n, size)
        self.logdet = -2 * float(self._coefficients[:, -1].log().sum())
        entries = self._coefficients.to(noise.dtype).mul_(given.there).view(-1).numpy()
        starts = torch.arange(0, n * size + 1, size, dtype=torch.int32, device="cpu").numpy()
        self._rows: Any = csr_array((entries, given.sets.view(-1).int().numpy(), starts), shape=(n, n))
        self._columns: Any = self._rows.T

    def apply(self, v: torch.Tensor) -> torch.Tensor:
        """Return ``S v``."""
        return torch.from_numpy(self._columns @ v.contiguous().numpy())

    def turned(self, v: torch.Tensor) -> torch.Tensor:
        """Return ``S^T v``."""
        return torch.from_numpy(self._rows @ v.contiguous().numpy())

    def gradients(self, by: Probed) -> list[torch.Tensor]:
        """Return the gradients through S: of ``-2 sum log S_ii`` and ``u^T dS^T K S w + u^T S^T K dS w``."""
        parts, own = apart(self._tree)
        points = len(self._tree.points)
        like = (self._noise, *own)
        sums = [[torch.zeros_like(t) for t in like] for _ in range(threads.members(own[0].device))]
        double = Probed(*(t.double() for t in by))

        def chunk(number: int) -> Callable[[int, int], None]:
            noise, *totals = sums[number]

            def add(start: int, stop: int) -> None:
                sets = self._given.sets[start:stop]
                with torch.enable_grad():
                    copies = [t[sets] for t in own[:points]] + [t.clone() for t in own[points:]]
                    copies = [t.requires_grad_() for t in copies]
                    covariance = self._covariances(parts.tree(copies), start, stop)
                cotangent = self._cotangent(double, covariance.detach(), start, stop)
                noise.index_add_(0, sets.view(-1), cotangent.diagonal(dim1=-2, dim2=-1).reshape(-1))
                found = torch.autograd.grad(covariance, copies, cotangent, materialize_grads=True)
                for total, one in zip(totals[:points], found[:points], strict=True):
                    total.index_add_(0, sets.view(-1), one.reshape(-1, one.shape[-1]))
                for total, one in zip(totals[points:], found[points:], strict=True):
                    total.add_(one)

            return add

        def write(totals: list[torch.Tensor], first: int, end: int) -> None:
            self._in_chunks(chunk, first, end)
            for total, each in zip(totals, zip(*sums, strict=True), strict=True):
                total.copy_(sum(each[1:], each[0]))

        elements = _BACKWARD * _COST * self._given.sets.numel() * self._given.sets.shape[1]
        return self._summed(elements, write, double.u, double.ku)

    def _cotangent(self, by: Probed, covariance: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the gradient by some small covariances, zero at missing points of a set."""
        sets, there = self._given.sets[start:stop], self._given.there[start:stop]
        c = self._coefficients[start:stop]
        u, w = by.u[start:stop], by.w[start:stop]
        g = (torch.bmm(by.kw[sets], u.unsqueeze(-1)) + torch.bmm(by.ku[sets], w.unsqueeze(-1))).squeeze(-1)
        g = g.div_(by.w.shape[1]).mul_(there)
        last = c[:, -1:]
        g[:, -1:] -= 2 / last
        by_solution = g / last
        by_solution[:, -1:] -= torch.linalg.vecdot(g, c).unsqueeze(-1) / (2 * last.square())
        turned = torch.cholesky_solve(by_solution.unsqueeze(-1), cholesky(covariance))
        return turned.mul_(-last.unsqueeze(-1)) @ (c * there).unsqueeze(-2) * there.unsqueeze(-1)

    def _covariances(self, tree: Tree, start: int, stop: int) -> torch.Tensor:
        """Return the noisy covariances of some sets, the identity at missing points."""
        sets, there = self._given.sets[start:stop], self._given.there[start:stop]
        if tree is self._tree:
            tree = tree.at(sets)
        found = trees.dense(tree) + torch.diag_embed(self._noise[sets])
        if there.all():
            return found
        return found * (there.unsqueeze(-1) & there.unsqueeze(-2)) + torch.diag_embed((~there).double())

    def _in_chunks(self, of: Callable[[int], Callable[[int, int], None]], first: int, end: int) -> None:
        each = max(16, _CACHED // self._given.sets.shape[1] ** 2)

        def work(member: Member) -> None:
            step = of(member.number)
            for start in range(first + member.number * each, end, member.count * each):
                member.check()
                step(start, min(end, start + each))

        threads.together(work, threads.members(self._noise.device))
