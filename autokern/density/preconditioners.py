"""Preconditioners of kernel matrices with noise: pivoted Cholesky, and the choice between it and Vecchia's factor.

Pivoted Cholesky is ``P = D + K_nI K_II^-1 K_In``, the noise plus the covariance that greedily chosen pivots I explain
(Harbrecht, Peters and Schneider 2012). It is computed in double precision, and the ranks of a job share the rows.

The choice is made by trial on the caller's own system and cached for its kernel, with pivots and neighbours; factors
are not, since hyperparameters change at each step. A stale cache only slows convergence, and residuals are checked.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autokern.core.state import Weak
from autokern.density.block_cg import Preconditioner, Probed, UnfitError, cholesky, in_double
from autokern.density.vecchia import Conditioning, Vecchia, conditioning
from autokern.kernels import matmul, products
from autokern.kernels import tree as trees
from autokern.kernels.tiles import usual
from autokern.kernels.tree import Tree

_JITTER = 1e-9
_ELEMENTS = 2**24
_CANDIDATES = 2048
_LEFT = 1e-3  # largest unexplained variance, in units of the noise, at which no more pivots are chosen
_COST, _BACKWARD = 8, 4
"""Numbers of pivots at which solves and products cost as much as evaluating the entries: forward, and gradients."""
_NEIGHBOURS = 30
"""Neighbours for more than `_SOME` points, where a product costs far more than a small covariance for each point."""
_FEW = 16  # neighbours for at most `_SOME` points
_SOME = 8000
_NUMBERS = 6  # numbers of 8 bytes for each neighbour: sets, their coefficients, and both sparse factors
_STRETCHED = 1.5  # change of the ratio of two lengthscales after which neighbours are searched again
_RESTS = 50  # steps without another attempt after all preconditioners failed
_EXPLAINED = 3.0
"""Variance in units of the noise, unexplained by the pivots, from which Vecchia's approximation is tried first."""


def most(n: int) -> int:
    """Return the largest rank that costs at most a few products with the matrix, and little memory."""
    return min(n // 4, math.isqrt(20 * n), _ELEMENTS // n, 512)


def pivots(tree: Tree, noise: torch.Tensor, rank: int) -> tuple[torch.Tensor, float]:
    """Return the indices of at most `rank` pivots, and the mean unexplained variance in units of the noise.

    Each is at the largest variance that is left, until that is small beside the noise.
    """
    n, least = len(noise), float(noise.detach().min())
    places = torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu")[: max(_CANDIDATES, 4 * rank)]
    tree = in_double(tree).at(places)
    variance = float(trees.dense(tree.at(slice(1))))
    left = torch.full((len(places),), variance, dtype=torch.float64, device="cpu")
    rows, chosen = left.new_empty(rank, len(left)), list[int]()
    for step in range(rank):
        at = int(left.argmax())
        value = float(left[at])
        if not value > max(_LEFT * least, 1e-12 * variance):
            break
        row = trees.dense(tree, [z[at : at + 1] for z in tree.points]).squeeze(-1)
        rows[step] = torch.addmv(row, rows[:step].mT, rows[:step, at], alpha=-1).div_(math.sqrt(value))
        left.addcmul_(rows[step], rows[step], value=-1)
        left[at] = 0
        chosen.append(at)
    return places[chosen], float(left.mean()) / least


class Pivoted(Preconditioner):
    """``S = D^-1/2 (I + B C B^T)`` with ``B = D^-1/2 K_nI L^-T`` and ``L L^T = K_II``; may raise UnfitError."""

    def __init__(self, tree: Tree, noise: torch.Tensor, chosen: torch.Tensor) -> None:
        if not len(chosen):
            raise UnfitError
        self._tree, self._chosen, self._dtype = in_double(tree), chosen, noise.dtype
        self._inner = self._tree.at(chosen)
        self._noise = noise.detach().double()
        square = trees.dense(self._inner)
        square.diagonal().add_(_JITTER * float(square.diagonal().max()))
        self._lower = cholesky(square)
        self._root = self._noise.rsqrt().unsqueeze(-1)
        n, r = len(noise), len(chosen)

        def write(out: torch.Tensor, first: int, end: int) -> None:
            wide, part = out[: n * r].view(n, r)[first:end], slice(first, end)
            products.filled(self._tree.at(part), self._inner.points, wide, usual(wide.device))
            wide.copy_(torch.linalg.solve_triangular(self._lower.mT, wide, upper=True, left=False))
            wide.mul_(self._root[part])
            torch.mm(wide.mT, wide, out=out[n * r :].view(r, r))

        elements, data = n * r * (1 + r / _COST), matmul.agreed(self._tree, None, None, self._noise, chosen)
        found = matmul.by_points(n, elements, n * r + r * r, self._noise, data, write)
        self._b = found[: n * r].view(n, r)
        values, vectors = torch.linalg.eigh(found[n * r :].view(r, r))
        values.clamp_min_(0)
        self.logdet = float(self._noise.log().sum() + values.log1p().sum())
        grown = (1 + values).sqrt()
        self._inverse = (vectors * -(1 / (1 + values))) @ vectors.mT
        c = (vectors * (-1 / (grown * (1 + grown)))) @ vectors.mT
        self._thin, self._c = self._b.to(self._dtype), c.to(self._dtype)
        self._scale = self._root.to(self._dtype)

    def apply(self, v: torch.Tensor) -> torch.Tensor:
        """Return ``S v``."""
        return self._within(v).mul_(self._scale)

    def turned(self, v: torch.Tensor) -> torch.Tensor:
        """Return ``S^T v``."""
        return self._within(v * self._scale)

    def _within(self, v: torch.Tensor) -> torch.Tensor:
        return torch.addmm(v, self._thin, self._c @ (self._thin.mT @ v))

    def gradients(self, by: Probed) -> list[torch.Tensor]:
        """Return the gradients of ``log |P|`` less those of the mean of ``(S w)^T P (S w)`` over the probes."""
        sw = by.sw.double() / math.sqrt(by.sw.shape[1])
        n, r = self._b.shape
        of_probes = self._explained((sw / self._root).mT @ self._b)

        def write(totals: list[torch.Tensor], first: int, end: int) -> None:
            noise, *found = self._stretch(slice(first, end), sw, of_probes)
            totals[0][first:end] = noise
            for total, one in zip(totals[1:], found, strict=True):
                total.copy_(one.view_as(total))

        return self._summed(n * r * (_BACKWARD + r / _BACKWARD), write, sw, self._chosen)

    def _stretch(self, part: slice, sw: torch.Tensor, of_probes: torch.Tensor) -> list[torch.Tensor]:
        b, root, plan = self._b[part], self._root[part], usual(self._b.device)
        turned = b @ self._inverse
        noise = (1 + (turned * b).sum(-1)) / self._noise[part] - sw[part].square().sum(-1)
        by_cross = self._explained(turned).mul_(-root)  # P^-1 K_nI K_II^-1
        by_cross.sub_(sw[part] @ of_probes).mul_(2)
        by_square = (self._explained(b / root).mT @ by_cross).mul_(-0.5)
        count = len(self._tree.points)
        first = products.gradients_from(self._tree.at(part), self._inner.points, by_cross, plan)
        rows, columns, rest = first[:count], first[count : 2 * count], first[2 * count :]
        second = products.gradients_from(self._inner, None, by_square, plan)
        points = [torch.zeros_like(z) for z in self._tree.points]
        for whole, own, one, two in zip(points, rows, columns, second[:count], strict=True):
            whole[part] = own
            whole.index_add_(0, self._chosen, one + two)
        return [noise, *points, *(one + two for one, two in zip(rest, second[count:], strict=True))]

    def _explained(self, v: torch.Tensor) -> torch.Tensor:
        """Return ``v L^-1``, which is ``K_iI K_II^-1`` for ``v = K_iI L^-T``."""
        return torch.linalg.solve_triangular(self._lower, v, upper=False, left=False)


class Kept:
    """The cache of preconditioners for one kernel and its points."""

    def __init__(self, points: torch.Tensor) -> None:
        self.points = points.detach().clone()
        self.served: str | None = None  # name of the chosen preconditioner
        self.products = 0  # products that it needed when it was chosen, 0 without a choice
        self.single = True  # whether products in single precision have served whenever those in double did
        self._rest = 0
        self._sets: tuple[Conditioning, torch.Tensor] | None = None
        self._pivots: tuple[torch.Tensor, float] | None = None

    def choose(self, name: str | None, products: int) -> None:
        """Cache a choice and drop the pivots of an earlier one; for None, skip the next `_RESTS` steps."""
        if self.served or not name:
            self._pivots = None
        self.served, self.products = name, products
        self._rest = 0 if name else _RESTS

    def rests(self) -> bool:
        """Whether to skip this step; counts it."""
        self._rest -= 1
        return self._rest >= 0

    def names(self, tree: Tree, noise: torch.Tensor) -> list[str]:
        """Return the names of preconditioners: first the chosen one, or else by the variance that pivots explain."""
        first = self.served or ("vecchia" if self.leaves_much(tree, noise) else "pivoted")
        return sorted(("pivoted", "vecchia"), key=lambda name: name != first)

    def leaves_much(self, tree: Tree, noise: torch.Tensor) -> bool:
        """Whether pivots leave so much variance unexplained that Vecchia's approximation needs fewer products."""
        return self._chosen(tree, noise)[1] >= _EXPLAINED

    def made(self, name: str, tree: Tree, noise: torch.Tensor) -> Preconditioner:
        """Return the preconditioner of this name."""
        if name == "pivoted":
            return Pivoted(tree, noise, self._chosen(tree, noise)[0])
        points = torch.cat([z.detach().double() for z in tree.points], -1)
        spread = points.std(0).clamp_min(1e-300)
        sets = self._sets  # read once, since another thread may replace it
        ratio = spread / sets[1] if sets is not None and len(sets[1]) == len(spread) else None
        if sets is None or ratio is None or ratio.max() > _STRETCHED * ratio.min():
            k = _FEW if len(points) <= _SOME else _NEIGHBOURS
            sets = self._sets = conditioning(points, min(k, len(points) - 1)), spread
        return Vecchia(tree, noise, sets[0])

    def _chosen(self, tree: Tree, noise: torch.Tensor) -> tuple[torch.Tensor, float]:
        found = self._pivots
        if found is None:
            found = self._pivots = pivots(tree, noise, most(len(noise)))
        return found


def footprint(n: int) -> int:
    """Return the approximate peak memory in bytes of the larger preconditioner for n points."""
    return n * 8 * max(6 * most(n), 2 * _NUMBERS * (_NEIGHBOURS + 1))


_kept: Weak[Kept] = Weak()


def kept_for(owner: Any, points: torch.Tensor) -> Kept:
    """Return the cache of a kernel, an empty one if the points have changed."""
    found = _kept.get(owner)
    if found is not None and found.points.dtype is points.dtype and torch.equal(found.points, points):
        return found
    return _kept.put(owner, Kept(points))
