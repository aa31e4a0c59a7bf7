"""The choice of a preconditioner, made by trial on the caller's own system and cached for its kernel.

Neighbours, pivots and the name of the chosen preconditioner are cached; factors are not, since hyperparameters change
at each step. A stale cache never gives a wrong result: it only slows convergence, and residuals are checked.
"""

from __future__ import annotations

from typing import Any

import torch

from autokern.core.beside import Weak
from autokern.density.preconditioners.base import Preconditioner
from autokern.density.preconditioners.pivoted import Pivoted, most, pivots
from autokern.density.preconditioners.vecchia import Conditioning, Vecchia, conditioning
from autokern.kernels.tree import Tree

_NEIGHBOURS = 30
"""Neighbours for more than `_SOME` points, where a product costs far more than a small covariance for each point."""
_FEW = 16
"""Neighbours for at most `_SOME` points."""
_SOME = 8000
_NUMBERS = 6
"""Numbers of 8 bytes for each neighbour: sets, their coefficients, and both sparse factors."""
_STRETCHED = 1.5
"""Change of the ratio of two lengthscales after which neighbours are searched again."""
_RESTS = 50
"""Steps without another attempt after all preconditioners failed."""
_EXPLAINED = 1.0
"""Variance in units of the noise, unexplained by the pivots, from which Vecchia's approximation is tried first."""


class Kept:
    """The cache of preconditioners for one kernel and its points."""

    def __init__(self, points: torch.Tensor) -> None:
        self._points = points.detach().clone()
        self.served: str | None = None  # name of the chosen preconditioner
        self.products = 0  # products that it needed when it was chosen, 0 without a choice
        self._rest = 0
        self._sets: tuple[Conditioning, torch.Tensor] | None = None
        self._pivots: tuple[torch.Tensor, float] | None = None

    def is_of(self, points: torch.Tensor) -> bool:
        """Whether these points have the same values."""
        return self._points.dtype is points.dtype and torch.equal(self._points, points)

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
        first = self.served or ("pivoted" if self._chosen(tree, noise)[1] < _EXPLAINED else "vecchia")
        return sorted(("pivoted", "vecchia"), key=lambda name: name != first)

    def leaves_much(self, tree: Tree, noise: torch.Tensor) -> bool:
        """Whether pivots leave as much variance as the noise; Vecchia's approximation needs fewer products then."""
        return self._chosen(tree, noise)[1] >= _EXPLAINED

    def made(self, name: str, tree: Tree, noise: torch.Tensor) -> Preconditioner:
        """Return the preconditioner of this name for a tree and its noise, both detached and without a batch."""
        if name == "pivoted":
            return Pivoted(tree, noise, self._chosen(tree, noise)[0])
        points = torch.cat([z.detach().double() for z in tree.points], -1)
        spread = points.std(0).clamp_min(1e-300)
        sets = self._sets  # read once, since another thread may replace it
        if sets is None or len(sets[1]) != len(spread) or _stretched(spread / sets[1]):
            k = _FEW if len(points) <= _SOME else _NEIGHBOURS
            sets = self._sets = conditioning(points, min(k, len(points) - 1)), spread
        return Vecchia(tree, noise, sets[0])

    def _chosen(self, tree: Tree, noise: torch.Tensor) -> tuple[torch.Tensor, float]:
        found = self._pivots
        if found is None:
            found = self._pivots = pivots(tree, noise, most(len(noise)))
        return found


def _stretched(ratio: torch.Tensor) -> bool:
    return bool(ratio.max() > _STRETCHED * ratio.min())


def footprint(n: int) -> int:
    """Return the approximate peak memory in bytes of the larger preconditioner for n points."""
    return n * 8 * max(6 * most(n), 2 * _NUMBERS * (_NEIGHBOURS + 1))


_kept = Weak[Kept]()


def kept_for(owner: Any, points: torch.Tensor) -> Kept:
    """Return the cache of a kernel for these points; an empty one if its points were others."""
    found = _kept.get(owner)
    return found if found is not None and found.is_of(points) else _kept.put(owner, Kept(points))
