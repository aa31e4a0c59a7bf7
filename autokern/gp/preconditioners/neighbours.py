"""Orderings of points, and of each point some of the nearest that come before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from autokern.system import threads

__all__ = ["Conditioning", "conditioning"]

_FEW = 512
"""Points at the beginning of an order, whose predecessors are all compared."""


class Conditioning(NamedTuple):
    """An ordering of n points, and for each point a set of predecessors."""

    sets: torch.Tensor  # ``(n, k + 1)``: places of the predecessors of each point in order, and last its own
    there: torch.Tensor  # whether each of these counts: the first points have fewer predecessors


def conditioning(points: torch.Tensor, k: int) -> Conditioning:
    """Return a random order of points, always the same for their number, and near predecessors of each.

    In a random order the predecessors of a point are spread as all points are. Points are asked in blocks that double:
    of the nearest points up to the end of a block, about half or more come before a point, so a few may be missed.
    Points are ``(n, d)`` in double precision, predecessors at most k.
    """
    from scipy.spatial import cKDTree

    n = len(points)
    order = np.random.default_rng(0).permutation(n)
    z = points.numpy()[order]
    found = np.full((n, k + 1), -1)
    found[:, k] = np.arange(n)
    start = 1
    while start < n:
        stop = min(n, max(_FEW, 2 * start))
        if stop <= _FEW:
            _by_distances(z[:stop], k, found)
        else:
            tree: Any = cKDTree(z[:stop])
            _by_tree(tree, z[start:stop], start, k, found)
        start = stop
    missing = found < 0
    found = order[np.where(missing, np.arange(n)[:, None], found)]
    return Conditioning(torch.from_numpy(found), torch.from_numpy(~missing))


def _by_distances(z: Any, k: int, found: Any) -> None:
    square = ((z[:, None] - z[None]) ** 2).sum(-1)
    square[np.triu_indices(len(z))] = np.inf
    nearest = np.argsort(square, axis=1, kind="stable")[:, :k]
    known = np.isfinite(np.take_along_axis(square, nearest, axis=1))
    found[: len(z), : nearest.shape[1]] = np.where(known, nearest, -1)


def _by_tree(tree: Any, z: Any, start: int, k: int, found: Any) -> None:
    """Write the first k predecessors among the nearest points of some rows."""
    count = min(tree.n, 2 * k + 8)
    _, near = tree.query(z, k=count, workers=threads.current())
    rows = np.arange(start, start + len(z))[:, None]
    before = near < rows
    place = np.cumsum(before, axis=1) - 1
    row, column = np.nonzero(before & (place < k))
    found[start + row, place[row, column]] = near[row, column]
