"""The log density of Matérn processes on a line as a function of autograd, in time and memory linear in the points."""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import torch

from autokern.core.autograd import computed
from autokern.gp.markov_blocks import BLOCK, conditional, cut, density, root_of
from autokern.gp.markov_gradients import gradients
from autokern.gp.markov_scan import around
from autokern.kernels.state_space import Leaf, chain, leaves_of
from autokern.kernels.tree import Tree

__all__ = ["BLOCK", "MOST", "Chained", "chained", "has_digits", "is_clear", "log_prob"]

_LEAST, _LEAST_ITERATED = 1e-8, 1e-12
"""Shares of the variance that the noise must exceed where stock factorises, and where it iterates."""
MOST = {torch.float64: 2e-11, torch.float32: 1e-7}
"""Largest residual of a solution where stock factorises, by the dtype of the arguments; a factor leaves about 1e-15."""
_ROWS = 8
"""Rows of the matrix by which a solution is checked."""


class _Order(threading.local):
    """The permutation that sorted the last points; whether it sorts others, their values say."""

    last: torch.Tensor | None = None


_order = _Order()


def _sorted(points: torch.Tensor) -> bool:
    return bool((points[1:] >= points[:-1]).all())


def sorting(points: torch.Tensor) -> torch.Tensor | None:
    """Return a permutation that sorts points ``(n)``, None where they are sorted."""
    if _sorted(points):
        return None
    last = _order.last
    if last is None or last.shape != points.shape or not _sorted(points[last]):
        last = _order.last = points.argsort()
    return last


def plain(
    families: tuple[str, ...], noise: torch.Tensor, residual: torch.Tensor, weights: torch.Tensor, *points: torch.Tensor
) -> torch.Tensor:
    """Return the log density by steps that autograd differentiates, any number of times."""
    blocks = cut(families, weights, list(points))
    of = conditional(blocks, noise.expand(len(residual)), residual)
    return density(of, around(of.element, blocks.stationary), len(residual))


class Chained(NamedTuple):
    """The arguments of a density as a chain has them: sorted, in double precision."""

    families: tuple[str, ...]  # of the leaves
    order: torch.Tensor | None  # the permutation that sorts the points, None where they are sorted
    noise: torch.Tensor  # ``(1)`` or ``(n)``
    residual: torch.Tensor
    weights: torch.Tensor  # variances of the leaves
    points: list[torch.Tensor]  # of each leaf, ``(n)``


def chained(tree: Tree, noise: torch.Tensor, residual: torch.Tensor) -> Chained:
    """Return the arguments of `log_prob` as a chain has them."""
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
    """Whether states may keep the digits of a factor, for which the noise must be more than a share of the variance.

    Where stock iterates, more may be lost.
    """
    least = _LEAST if exact else _LEAST_ITERATED
    return bool(data.noise.detach().amin() > least * data.weights.detach().sum())


def has_digits(data: Chained, solved: torch.Tensor, most: float) -> bool:
    """Whether ``K solved`` is the residual at some rows, up to a share of ``|K| |solved|``.

    Steps may lose as many digits as the ratio of variance to noise has, and more with several leaves.
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
    """Return the log density of a residual, None where it has no digits or the covariance is not positive definite.

    The tree is a sum of Matérn leaves of points ``(n, 1)``, `noise` ``(1)`` or ``(n)``; `exact` says that stock
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
