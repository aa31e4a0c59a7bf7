"""The log density of one-dimensional Matérn processes as an autograd function, in time and memory linear in points."""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import torch

from autokern.core.autograd import computed
from autokern.density.markov.blocks import BLOCK, conditional, cut, density, root_of
from autokern.density.markov.gradients import gradients
from autokern.density.markov.scan import around
from autokern.kernels.state_space import Leaf, chain, leaves_of
from autokern.kernels.tree import Tree

__all__ = ["BLOCK", "MOST", "Chained", "chained", "has_digits", "is_clear", "log_prob"]

_LEAST, _LEAST_ITERATED = 1e-8, 1e-12
"""Shares of the prior variance that the noise must exceed if stock factorises, and if it iterates."""
MOST = {torch.float64: 2e-11, torch.float32: 1e-7}
"""Largest relative residual of a solution if stock factorises, by dtype; a Cholesky factor leaves about 1e-15."""
_ROWS = 8
"""Rows of the system at which a solution is checked."""


class _Order(threading.local):
    """The permutation that sorted the previous points of this thread; `sorting` checks it before it is used again."""

    last: torch.Tensor | None = None


_order = _Order()


def _sorted(points: torch.Tensor) -> bool:
    return bool((points[1:] >= points[:-1]).all())


def sorting(points: torch.Tensor) -> torch.Tensor | None:
    """Return a permutation that sorts points ``(n)``, None if they are sorted."""
    if _sorted(points):
        return None
    last = _order.last
    if last is None or last.shape != points.shape or not _sorted(points[last]):
        last = _order.last = points.argsort()
    return last


def plain(
    families: tuple[str, ...], noise: torch.Tensor, residual: torch.Tensor, weights: torch.Tensor, *points: torch.Tensor
) -> torch.Tensor:
    """Return the log density by plain torch steps, differentiable to any order."""
    blocks = cut(families, weights, list(points))
    of = conditional(blocks, noise.expand(len(residual)), residual)
    return density(of, around(of.element, blocks.stationary), len(residual))


class Chained(NamedTuple):
    """The arguments of a density, sorted by point and in double precision."""

    families: tuple[str, ...]  # of the leaves
    order: torch.Tensor | None  # the permutation that sorts the given points, None if they are sorted
    noise: torch.Tensor  # ``(1)`` or ``(n)``
    residual: torch.Tensor
    weights: torch.Tensor  # variances of the leaves
    points: list[torch.Tensor]  # of each leaf, ``(n)``


def chained(tree: Tree, noise: torch.Tensor, residual: torch.Tensor) -> Chained:
    """Return the arguments of `log_prob`, sorted by point and in double precision."""
    leaves = leaves_of(tree.node)
    assert leaves is not None
    weights = torch.stack([_variance(leaf, tree.weights, residual) for leaf in leaves]).double()
    points = [z.squeeze(-1).double() for z in tree.points]
    noise, residual = noise.double(), residual.double()
    with torch.no_grad():
        order = sorting(points[0])
    if order is not None:
        points, residual = [z[order] for z in points], residual[order]
        noise = noise if noise.shape[-1] == 1 else noise[order]
    return Chained(tuple(leaf.family for leaf in leaves), order, noise, residual, weights, points)


def is_clear(data: Chained, exact: bool) -> bool:
    """Whether the noise is a large enough share of the prior variance for states to be accurate.

    `exact` says that stock factorises; less noise suffices if it iterates.
    """
    least = _LEAST if exact else _LEAST_ITERATED
    return bool(data.noise.detach().amin() > least * data.weights.detach().sum())


def has_digits(data: Chained, solved: torch.Tensor, most: float) -> bool:
    """Whether ``K solved`` equals the residual at `_ROWS` rows, up to the share `most` of ``|K| |solved|``.

    The scan may lose as many digits as the ratio of variance to noise has, and more with several leaves.
    """
    n = len(solved)
    rows = torch.linspace(0, n - 1, _ROWS).long()
    kernel = solved.new_zeros(len(rows), n)
    for family, weight, z in zip(data.families, data.weights.detach(), data.points, strict=True):
        one = chain(family)
        kernel += one.correlation((z.detach() - z.detach()[rows, None]).abs_().mul_(root_of(one))) * weight
    own = (data.noise.detach().expand(n) * solved)[rows]
    left = kernel @ solved + own - data.residual.detach()[rows]
    return bool((left.abs() <= most * (kernel @ solved.abs() + own.abs())).all())


def log_prob(tree: Tree, noise: torch.Tensor, residual: torch.Tensor, exact: bool = False) -> torch.Tensor | None:
    """Return the log density of a residual, None if it is inaccurate or the covariance is not positive definite.

    The tree is a sum of Matérn leaves of points ``(n, 1)``; `noise` is ``(1)`` or ``(n)``; `exact` says that stock
    factorises.
    """
    data = chained(tree, noise, residual)
    if not is_clear(data, exact):
        return None
    families, _, own, values, weights, points = data
    n = len(values)
    with torch.no_grad():
        blocks = cut(families, weights, points)
        of = conditional(blocks, own.expand(n), values)
        beside = around(of.element, blocks.stationary)
        value = density(of, beside, n).item()
        if not of.valid or math.isnan(value):
            return None
        found = gradients(blocks, of, beside, n)
        if exact and not has_digits(data, found.residual.neg(), MOST[residual.dtype]):
            return None
        by_noise = found.noise.sum(0, keepdim=True) if own.shape[-1] < n else found.noise
    listed = (by_noise, found.residual, found.weights, *found.points)
    differentiable = functools.partial(plain, families)
    return computed(value, listed, differentiable, own, values, weights, *points).to(residual.dtype)


def _variance(leaf: Leaf, weights: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    found = like.new_ones(())
    for number in leaf.weights:
        found = found * weights[number]
    return found
