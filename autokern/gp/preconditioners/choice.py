"""Which preconditioner serves a covariance: tried on the caller's own system, and kept for its kernel while it serves.

Neighbours, pivots and the name of what served are kept; factors are not, as hyperparameters change at each step. What
is kept is never wrong: it only makes a preconditioner worse, and residuals are checked on the matrix itself.
"""

from __future__ import annotations

from typing import Any

import torch

from autokern.core.beside import Weak
from autokern.gp.preconditioners.base import Preconditioner
from autokern.gp.preconditioners.pivoted import Pivoted, most, pivots
from autokern.gp.preconditioners.vecchia import Conditioning, Vecchia, conditioning
from autokern.kernels.tree import Tree

__all__ = ["Kept", "footprint", "kept_for"]

_NEIGHBOURS = 30
"""Neighbours where a product costs far more than a few small covariances for each point."""
_FEW = 16
"""Neighbours of up to `_SOME` points."""
_SOME = 8000
_NUMBERS = 6
"""Numbers of 8 bytes for each neighbour: sets, their coefficients, and both sparse factors."""
_STRETCHED = 1.5
"""Change of the ratio of two lengthscales that asks for other neighbours."""
_RESTS = 50
_EXPLAINED = 1.0
"""Variance in units of the noise that pivots may leave before neighbours are tried first."""


class Kept:
    """What a fit keeps of its preconditioners."""

    def __init__(self, points: torch.Tensor) -> None:
        self._points = points.detach().clone()
        self.served: str | None = None  # name of the preconditioner that served last
        self.products = 0  # that it took when it was chosen, 0 while there is none
        self._rest = 0
        self._sets: tuple[Conditioning, torch.Tensor] | None = None
        self._pivots: tuple[torch.Tensor, float] | None = None

    def is_of(self, points: torch.Tensor) -> bool:
        """Whether the points are the same by value."""
        return self._points.dtype is points.dtype and torch.equal(self._points, points)

    def choose(self, name: str | None, products: int) -> None:
        """Keep the best of those tried, and drop the pivots of an earlier choice; where none served, let steps pass."""
        if self.served or not name:
            self._pivots = None
        self.served, self.products = name, products
        self._rest = 0 if name else _RESTS

    def rests(self) -> bool:
        """Whether this step is one of those to let pass."""
        self._rest -= 1
        return self._rest >= 0

    def names(self, tree: Tree, noise: torch.Tensor) -> list[str]:
        """Return the names of preconditioners, the likeliest first: what served, or what pivots leave tells."""
        first = self.served or ("pivoted" if self._chosen(tree, noise)[1] < _EXPLAINED else "vecchia")
        return sorted(("pivoted", "vecchia"), key=lambda name: name != first)

    def leaves_much(self, tree: Tree, noise: torch.Tensor) -> bool:
        """Whether pivots leave more variance than the noise: then neighbours that converge need fewer products."""
        return self._chosen(tree, noise)[1] >= _EXPLAINED

    def made(self, name: str, tree: Tree, noise: torch.Tensor) -> Preconditioner:
        """Return the preconditioner of a name for a tree and its noise, both plain and without a batch."""
        if name == "pivoted":
            return Pivoted(tree, noise, self._chosen(tree, noise)[0])
        points = torch.cat([z.detach().double() for z in tree.points], -1)
        spread = points.std(0).clamp_min(1e-300)
        sets = self._sets  # another thread may replace them
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
    """Return the bytes of the larger preconditioner of n points while it is made, about."""
    return n * 8 * max(6 * most(n), 2 * _NUMBERS * (_NEIGHBOURS + 1))


_kept = Weak[Kept]()


def kept_for(owner: Any, points: torch.Tensor) -> Kept:
    """Return what is kept for an owner, a kernel, and points; nothing yet where the points are others."""
    found = _kept.get(owner)
    return found if found is not None and found.is_of(points) else _kept.put(owner, Kept(points))
