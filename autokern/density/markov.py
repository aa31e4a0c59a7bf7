"""The log density of one-dimensional Matérn processes as an autograd function, in time and memory linear in points.

Sorted points are cut into blocks. Given the state at its first point, the values of a block and the state at the first
point of the next block are jointly Gaussian with dense covariances, which are factorised as one batch.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from autokern.core.autograd import computed
from autokern.density.markov_chain import Around, Blocks, Element, around, chain, cut, filtered, leaves_of, resolvent
from autokern.density.matrices import LOG_2_PI
from autokern.kernels.tree import Tree

_LEAST, _LEAST_ITERATED = 1e-8, 1e-12
"""Shares of the prior variance that the noise must exceed if stock factorises, and if it iterates."""
MOST = {torch.float64: 2e-11, torch.float32: 1e-7}
"""Largest relative residual of a solution if stock factorises, by dtype; a Cholesky factor leaves about 1e-15."""
_ROWS = 8  # rows of the system at which a solution is checked


class Conditional(NamedTuple):
    """Values and next state of each block, conditional on the state at its start."""

    seen: torch.Tensor  # coefficients of the values by the state at the start, zero for padding
    root: torch.Tensor  # ``L^-1`` of the noisy covariances of the values, ``(k, size, size)``
    white: torch.Tensor  # ``L^-1`` times ``[seen, covariances with the next state, residual]``
    element: Element  # the blocks as elements of the scan
    constant: torch.Tensor  # log density of each block's values if the state at its start is zero, ``(k)``
    valid: bool  # whether all factorisations succeeded


def conditional(blocks: Blocks, noise: torch.Tensor, residual: torch.Tensor) -> Conditional:
    """Return blocks with noise and residual ``(n)``, conditional on the states at their starts."""
    k, size, d = blocks.seen.shape
    empty = k * size - len(residual)
    seen, moved = blocks.seen, blocks.transition @ blocks.stationary
    between = blocks.ahead - seen @ moved.mT
    after = blocks.stationary - moved @ blocks.transition.mT
    keep = torch.ones(k, size, 1, dtype=seen.dtype, device=seen.device)
    keep[-1, size - empty :] = 0
    seen, between = seen * keep, between * keep
    noise = torch.cat((noise, noise.new_ones(empty)))
    residual = torch.cat((residual, residual.new_zeros(empty)))
    columns = torch.cat((seen, between, residual.view(k, size, 1)), -1)
    noise, weighted = noise.view(k, size), seen @ blocks.stationary
    unit = torch.eye(size, dtype=seen.dtype, device=seen.device)
    found = []
    for part in blocks.parts:
        leaves = zip(blocks.chains, blocks.weights, (z[part] for z in blocks.inside), strict=True)
        each = (one.correlation((z.unsqueeze(-1) - z.unsqueeze(-2)).abs()) * weight for one, weight, z in leaves)
        values = torch.baddbmm(functools.reduce(torch.add, each), weighted[part], seen[part].mT, alpha=-1)
        if part.stop == k:
            values = values * keep[part] * keep[part].mT
        values.diagonal(dim1=-2, dim2=-1).add_(noise[part])
        lower, info = torch.linalg.cholesky_ex(values)
        root = torch.linalg.solve_triangular(lower, unit, upper=False)
        found.append((root, root @ columns[part], lower.diagonal(dim1=-2, dim2=-1).log().sum(-1), info))
    root, white, logs, info = (torch.cat(each) for each in zip(*found, strict=True))
    gram = white.mT @ white
    state, behind, data = slice(0, d), slice(d, 2 * d), slice(2 * d, None)
    element = Element(
        blocks.transition - gram[:, behind, state],
        gram[:, behind, data],
        after - gram[:, behind, behind],
        gram[:, state, data],
        gram[:, state, state],
    )
    return Conditional(seen, root, white, element, -0.5 * gram[:, -1, -1] - logs, not info.any())


def density(of: Conditional, beside: Around, n: int) -> torch.Tensor:
    """Return the log density of n residuals: the sum over blocks, each conditional on all blocks before it."""
    _, _, _, h, j = of.element
    mean, covariance = beside.mean, beside.covariance
    later, _ = filtered(mean, covariance, of.element)
    # h^T m - m^T J m / 2 + (h - J m)^T (m' - m) / 2, with the mean m' given the data of the block too
    quadratic = (h * (mean + later) - (j @ mean) * later).sum()
    logdet = torch.linalg.slogdet(torch.eye(j.shape[-1]).to(j) + j @ covariance).logabsdet.sum()
    return of.constant.sum() + 0.5 * (quadratic - logdet) - 0.5 * n * LOG_2_PI


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
    one = residual.new_ones(())
    variances = [functools.reduce(torch.mul, (tree.weights[i] for i in weights), one) for _, weights in leaves]
    weights = torch.stack(variances).double()
    points = [z.squeeze(-1).double() for z in tree.points]
    noise, residual = noise.double(), residual.double()
    first, order = points[0].detach(), None
    if not (first[1:] >= first[:-1]).all():
        order = first.argsort()
        points, residual = [z[order] for z in points], residual[order]
        noise = noise if noise.shape[-1] == 1 else noise[order]
    return Chained(tuple(family for family, _ in leaves), order, noise, residual, weights, points)


def is_clear(data: Chained, exact: bool) -> bool:
    """Whether the noise is a large enough share of the prior variance; less suffices where stock iterates."""
    return bool(data.noise.detach().amin() > (_LEAST if exact else _LEAST_ITERATED) * data.weights.detach().sum())


def has_digits(data: Chained, solved: torch.Tensor, most: float) -> bool:
    """Whether ``K solved`` equals the residual at `_ROWS` rows, up to the share `most` of ``|K| |solved|``."""
    n = len(solved)
    rows = torch.linspace(0, n - 1, _ROWS).long()
    kernel = solved.new_zeros(len(rows), n)
    for family, weight, z in zip(data.families, data.weights.detach(), data.points, strict=True):
        one = chain(family)
        kernel += one.correlation((z.detach() - z.detach()[rows, None]).abs_().mul_(one.root)) * weight
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
    carried: torch.Tensor  # covariance of the next state with the state at the block's start, ``(k, d, d)``


def responses(of: Conditional, beside: Around) -> Responses:
    """Return the responses of all blocks."""
    element, d = of.element, of.element.b.shape[1]
    columns = of.root.mT @ of.white
    by_state, by_next, by_data = columns[..., :d], columns[..., d : 2 * d], columns[..., 2 * d :]
    mean, covariance = filtered(beside.mean, beside.covariance, of.element)
    carried = element.a @ covariance
    told = resolvent(beside.j @ (carried @ element.a.mT + element.q))
    following = told @ (beside.h - beside.j @ (element.a @ mean + element.b))
    curved = told @ beside.j
    gain = torch.baddbmm(by_next, by_state, carried.mT)
    values = by_data - by_state @ mean - gain @ following
    return Responses(values, following, by_state, gain, (curved + curved.mT) * 0.5, mean, covariance, carried)


def gradients(
    blocks: Blocks, of: Conditional, beside: Around, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the derivatives by noise and residual ``(n)``, weights ``(leaves)`` and points, each ``(n)``.

    If ``g`` and ``-N`` are the first and second derivative by the mean of a block's values and next state, the
    derivative by their covariance is ``(g g^T - N) / 2``; all other derivatives follow by the chain rule.
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
    told = resolvent(beside.whole_j @ stationary)
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
        by_points.append(flat[:n] * one.root)
    return by_noise.view(-1)[:n], g[..., 0].reshape(-1)[:n].neg(), by_weights, by_points


def log_prob(tree: Tree, noise: torch.Tensor, residual: torch.Tensor, exact: bool = False) -> torch.Tensor | None:
    """Return the log density of a residual, None if it is inaccurate or not defined; `exact`: stock factorises."""
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
        by_noise, by_residual, by_weights, by_points = gradients(blocks, of, beside, n)
        if exact and not has_digits(data, by_residual.neg(), MOST[residual.dtype]):
            return None
        by_noise = by_noise.sum(0, keepdim=True) if own.shape[-1] < n else by_noise
    listed = (by_noise, by_residual, by_weights, *by_points)
    differentiable = functools.partial(plain, families)
    return computed(value, listed, differentiable, own, values, weights, *points).to(residual.dtype)
