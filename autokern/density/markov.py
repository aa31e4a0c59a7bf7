"""The log density of one-dimensional Matérn processes as an autograd function, in time and memory linear in points."""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import torch

from autokern.core.autograd import computed
from autokern.density import markov_chain
from autokern.kernels.state_space import chain, leaves_of
from autokern.kernels.tree import Tree

_LEAST, _LEAST_ITERATED = 1e-8, 1e-12
"""Shares of the prior variance that the noise must exceed if stock factorises, and if it iterates."""
MOST = {torch.float64: 2e-11, torch.float32: 1e-7}
"""Largest relative residual of a solution if stock factorises, by dtype; a Cholesky factor leaves about 1e-15."""
_ROWS = 8
"""Rows of the system at which a solution is checked."""


_order = threading.local()
"""Its `last` is the permutation that sorted this thread's previous points, checked before it is used again."""


def _sorting(points: torch.Tensor) -> torch.Tensor | None:
    """Return a permutation that sorts points ``(n)``, None if they are sorted."""

    def is_sorted(points: torch.Tensor) -> bool:
        return bool((points[1:] >= points[:-1]).all())

    if is_sorted(points):
        return None
    last: torch.Tensor | None = getattr(_order, "last", None)
    if last is None or last.shape != points.shape or not is_sorted(points[last]):
        last = _order.last = points.argsort()
    return last


def plain(
    families: tuple[str, ...], noise: torch.Tensor, residual: torch.Tensor, weights: torch.Tensor, *points: torch.Tensor
) -> torch.Tensor:
    """Return the log density by plain torch steps, differentiable to any order."""
    blocks = markov_chain.cut(families, weights, list(points))
    of = markov_chain.conditional(blocks, noise.expand(len(residual)), residual)
    return markov_chain.density(of, markov_chain.around(of.element, blocks.stationary), len(residual))


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
    one = residual.new_ones(())
    variances = [functools.reduce(torch.mul, (tree.weights[number] for number in leaf.weights), one) for leaf in leaves]
    weights = torch.stack(variances).double()
    points = [z.squeeze(-1).double() for z in tree.points]
    noise, residual = noise.double(), residual.double()
    with torch.no_grad():
        order = _sorting(points[0])
    if order is not None:
        points, residual = [z[order] for z in points], residual[order]
        noise = noise if noise.shape[-1] == 1 else noise[order]
    return Chained(tuple(leaf.family for leaf in leaves), order, noise, residual, weights, points)


def is_clear(data: Chained, exact: bool) -> bool:
    """Whether the noise is a large enough share of the prior variance; less suffices where stock iterates."""
    least = _LEAST if exact else _LEAST_ITERATED
    return bool(data.noise.detach().amin() > least * data.weights.detach().sum())


def has_digits(data: Chained, solved: torch.Tensor, most: float) -> bool:
    """Whether ``K solved`` equals the residual at `_ROWS` rows, up to the share `most` of ``|K| |solved|``."""
    n = len(solved)
    rows = torch.linspace(0, n - 1, _ROWS).long()
    kernel = solved.new_zeros(len(rows), n)
    for family, weight, z in zip(data.families, data.weights.detach(), data.points, strict=True):
        one = chain(family)
        kernel += one.correlation((z.detach() - z.detach()[rows, None]).abs_().mul_(markov_chain.root_of(one))) * weight
    own = (data.noise.detach().expand(n) * solved)[rows]
    left = kernel @ solved + own - data.residual.detach()[rows]
    return bool((left.abs() <= most * (kernel @ solved.abs() + own.abs())).all())


class Responses(NamedTuple):
    """Derivatives of the log density by the values and the next state of each block, with their ingredients."""

    values: torch.Tensor  # first derivative by the mean of the values, ``(k, size, c)`` for c columns of residuals
    next: torch.Tensor  # first derivative by the mean of the next state, ``(k, d, c)``
    by_state: torch.Tensor  # ``R^-1 seen``, with R the conditional covariance of the values, ``(k, size, d)``
    gain: torch.Tensor  # regression coefficients of the next state on the values, transposed, ``(k, size, d)``
    curved: torch.Tensor  # negative second derivative by the mean of the next state, ``(k, d, d)``
    mean: torch.Tensor  # of the state at the block's start given the data up to the block's end, ``(k, d, c)``
    covariance: torch.Tensor  # likewise, ``(k, d, d)``
    carried: torch.Tensor  # covariance of the next state with that state, ``(k, d, d)``


def responses(of: markov_chain.Conditional, beside: markov_chain.Around) -> Responses:
    """Return the responses of all blocks."""
    element, d = of.element, of.element.b.shape[1]
    columns = of.root.mT @ of.white
    by_state, by_next, by_data = columns[..., :d], columns[..., d : 2 * d], columns[..., 2 * d :]
    mean, covariance = markov_chain.filtered(beside.mean, beside.covariance, of.element)
    carried = element.a @ covariance
    next_covariance = carried @ element.a.mT + element.q
    told = markov_chain.inverse_of_unit_plus(beside.j @ next_covariance)
    following = told @ (beside.h - beside.j @ (element.a @ mean + element.b))
    curved = told @ beside.j
    gain = torch.baddbmm(by_next, by_state, carried.mT)
    values = by_data - by_state @ mean - gain @ following
    return Responses(values, following, by_state, gain, (curved + curved.mT) * 0.5, mean, covariance, carried)


def gradients(
    blocks: markov_chain.Blocks, of: markov_chain.Conditional, beside: markov_chain.Around, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the derivatives by noise and residual ``(n)``, weights ``(leaves)`` and points, each ``(n)``.

    With the first derivative ``g`` and the second ``-N`` by the mean of a block's values and next state, the one by
    their covariance is ``(g g^T - N) / 2``; all other derivatives follow by the chain rule.
    """
    g, g_next, by_state, gain, curved, mean, covariance, carried = responses(of, beside)
    known, spread = gain @ curved, by_state @ covariance
    smooth = (mean + carried.mT @ g_next).mT
    # factors of ``g g^T - N + R^-1`` for the values, with R their conditional covariance
    left, right = torch.cat((g, spread, -known), -1), torch.cat((g, by_state, gain), -1)
    between = g @ g_next.mT + known  # between values and next state
    of_next = 0.5 * (g_next @ g_next.mT - curved)
    k, size, _ = blocks.seen.shape
    stationary, transition = blocks.stationary, blocks.transition
    weighted, by_noise = torch.empty_like(of.seen), stationary.new_empty(k, size)
    by_weights = torch.zeros_like(blocks.weights)
    by_inside = [torch.empty_like(by_noise) for _ in blocks.chains]
    for part in blocks.parts:
        root = of.root[part]
        s = torch.baddbmm(root.mT @ root, left[part], right[part].mT, beta=-0.5, alpha=0.5)
        if part.stop == k and k * size > n:
            s[-1, n - k * size :] = 0
            s[-1, :, n - k * size :] = 0
        weighted[part] = s @ of.seen[part]
        by_noise[part] = s.diagonal(dim1=-2, dim2=-1)
        for i, (one, inside) in enumerate(zip(blocks.chains, blocks.inside, strict=True)):
            correlation, slope = one.with_slope(inside[part].unsqueeze(-1) - inside[part].unsqueeze(-2))
            by_weights[i] += torch.dot(s.flatten(), correlation.flatten())
            by_inside[i][part] = slope.mul_(s).sum(-1)
    crossed = between.mT @ of.seen
    by_seen = g @ smooth - spread + known @ carried - 2 * (weighted @ stationary) - between @ (transition @ stationary)
    by_transition = g_next @ smooth - curved @ carried - (crossed + 2 * (of_next @ transition)) @ stationary
    by_stationary = of_next - of.seen.mT @ weighted - (transition.mT @ of_next + crossed.mT) @ transition
    told = markov_chain.inverse_of_unit_plus(beside.whole_j @ stationary)
    first = told @ beside.whole_h
    by_stationary = by_stationary.sum(0) + 0.5 * (first @ first.mT - told @ beside.whole_j)
    by_points = []
    for i, own in enumerate(blocks.own):
        one, weight, start = blocks.chains[i], blocks.weights[i], blocks.starts[i]
        behind = one.ahead(start[1:, None] - blocks.inside[i])
        by_weights[i] += (between[..., own] * behind).sum() + (by_stationary[own, own] * one.stationary).sum()
        since = (by_seen[..., own] * (blocks.seen[..., own] @ one.feedback)).sum(-1)
        until = (between[..., own] * (behind @ one.feedback.mT)).sum(-1) * weight
        step = (by_transition[:, own, own] * (transition[:, own, own] @ one.feedback)).sum((-2, -1))
        total = by_inside[i].mul_(2 * weight).add_(since - until)
        total[:, 0] -= since.sum(-1) + step
        after = until.sum(-1) + step
        total[1:, 0] += after[:-1]
        flat = total.view(-1)
        flat[n - 1] += flat[n:].sum() + after[-1]
        by_points.append(flat[:n] * markov_chain.root_of(one))
    residual = g[..., 0].reshape(-1)[:n].neg()
    return by_noise.view(-1)[:n], residual, by_weights, by_points


def log_prob(tree: Tree, noise: torch.Tensor, residual: torch.Tensor, exact: bool = False) -> torch.Tensor | None:
    """Return the log density of a residual, None if it is inaccurate or not defined; `exact`: stock factorises."""
    data = chained(tree, noise, residual)
    if not is_clear(data, exact):
        return None
    families, _, own, values, weights, points = data
    n = len(values)
    with torch.no_grad():
        blocks = markov_chain.cut(families, weights, points)
        of = markov_chain.conditional(blocks, own.expand(n), values)
        beside = markov_chain.around(of.element, blocks.stationary)
        value = markov_chain.density(of, beside, n).item()
        if not of.valid or math.isnan(value):
            return None
        by_noise, by_residual, by_weights, by_points = gradients(blocks, of, beside, n)
        if exact and not has_digits(data, by_residual.neg(), MOST[residual.dtype]):
            return None
        by_noise = by_noise.sum(0, keepdim=True) if own.shape[-1] < n else by_noise
    listed = (by_noise, by_residual, by_weights, *by_points)
    differentiable = functools.partial(plain, families)
    return computed(value, listed, differentiable, own, values, weights, *points).to(residual.dtype)
