"""Products with a kernel matrix plus noise without blocks that are nearly zero, for iterations that are checked.

Points are ordered so that consecutive ones lie together, by halving at medians as a k-d tree does (Bentley 1975). The
largest entry of a block is the kernel at the distance of two boxes. Blocks are left out while their sums over any row
are small beside the noise, so what is left out is too by its spectral norm (Gershgorin), and the rest stays definite.
"""

from __future__ import annotations

import torch

from autokern.kernels import partition, products
from autokern.kernels import tree as trees
from autokern.kernels.family import Family, family
from autokern.kernels.partition import Bounds, Pairs, Plan
from autokern.kernels.tree import Tree

__all__ = ["Near"]

_LEFT_OUT = 1e-3
"""Largest sum of a row that is left out, in units of the noise."""
_TILE = 512


class Near:
    """The near part of a covariance plus noise, evaluated in single precision.

    The tree has no batch; `share` is the part of the elements of the matrix that are evaluated.
    """

    def __init__(self, tree: Tree, noise: torch.Tensor) -> None:
        n, self._noise = len(noise), noise.unsqueeze(-1)
        blocks = partition.bounds(n, _TILE, 1)
        self._order = _compact(torch.cat(tree.points, -1).double(), blocks[0][1])
        tree = tree.at(self._order)
        near = _near(tree, blocks, _LEFT_OUT * float(noise.min()))
        sizes = torch.tensor([stop - start for start, stop in blocks], dtype=torch.float64, device="cpu")
        self.share = float(sizes @ near.double() @ sizes) / n**2
        self._tree, self._only = tree.each(lambda t: t.float()), _rounds(blocks, near)

    def multiply(self, v: torch.Tensor) -> torch.Tensor:
        """Return the product with columns ``(n, t)``, in their precision."""
        image = products.product(self._tree, None, v[self._order].float(), Plan(_TILE), self._only)
        return torch.empty_like(v).index_copy_(0, self._order, image.to(v.dtype)).addcmul_(self._noise, v)


def _compact(z: torch.Tensor, each: int) -> torch.Tensor:
    """Return an order of points whose blocks of `each` fill small boxes."""
    order, open_ = torch.arange(len(z), device="cpu"), [(0, len(z))]
    while open_:
        start, stop = open_.pop()
        half = -(-(stop - start) // each) // 2
        if half:
            own = order[start:stop]
            axes = z[own]
            widest = axes[:, (axes.amax(0) - axes.amin(0)).argmax()]
            order[start:stop] = own[widest.argsort(stable=True)]
            open_ += [(start, start + half * each), (start + half * each, stop)]
    return order


def _near(tree: Tree, blocks: Bounds, enough: float) -> torch.Tensor:
    """Return which pairs of blocks are needed, so that what is left out of any row has a sum of `enough` at most."""
    if not all(family(name).decreasing for name in trees.leaves(tree.node)):
        return torch.ones(len(blocks), len(blocks), dtype=torch.bool, device="cpu")
    points, shapes, weights = iter(tree.points), iter(tree.shapes), iter(tree.weights)

    def largest(of: Family) -> torch.Tensor:
        z = next(points).double()
        low, high = (torch.stack([f(z[a:b], 0) for a, b in blocks]) for f in (torch.amin, torch.amax))
        apart = torch.maximum(low.unsqueeze(1) - high, low - high.unsqueeze(1)).clamp_min(0).square().sum(-1)
        return of(apart * of.gamma, next(shapes).double()) if of.shape is not None else of(apart * of.gamma)

    found = trees.evaluated(tree.node, largest, lambda: next(weights).double()[..., None, None])
    each = max(stop - start for start, stop in blocks)
    ordered = found.sort(-1).values
    small = (ordered.cumsum(-1) * each <= enough).sum(-1, keepdim=True)
    limits = torch.where(small < len(blocks), ordered.gather(-1, small.clamp_max(len(blocks) - 1)), torch.inf)
    return (found >= limits.min()) | torch.eye(len(blocks), dtype=torch.bool, device="cpu")


def _rounds(blocks: Bounds, near: torch.Tensor) -> list[Pairs]:
    place, needed = {block: i for i, block in enumerate(blocks)}, near.tolist()
    kept = ([(a, b) for a, b in pairs if needed[place[a]][place[b]]] for pairs in partition.round_robin(blocks))
    return [pairs for pairs in kept if pairs]
