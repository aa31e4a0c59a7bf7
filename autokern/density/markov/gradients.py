"""The gradients of the log density of a chain of blocks by noise, residual, weights and points."""

from __future__ import annotations

from typing import NamedTuple

import torch

from autokern.density.markov.blocks import Blocks, Conditional, root_of
from autokern.density.markov.scan import Around, filtered, inverse_of_unit_plus


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


def responses(of: Conditional, beside: Around) -> Responses:
    """Return the responses of all blocks."""
    element, d = of.element, of.element.b.shape[1]
    columns = of.root.mT @ of.white
    by_state, by_next, by_data = columns[..., :d], columns[..., d : 2 * d], columns[..., 2 * d :]
    mean, covariance = filtered(beside.mean, beside.covariance, of.element)
    carried = element.a @ covariance
    next_covariance = carried @ element.a.mT + element.q
    told = inverse_of_unit_plus(beside.j @ next_covariance)
    following = told @ (beside.h - beside.j @ (element.a @ mean + element.b))
    curved = told @ beside.j
    gain = torch.baddbmm(by_next, by_state, carried.mT)
    values = by_data - by_state @ mean - gain @ following
    return Responses(values, following, by_state, gain, (curved + curved.mT) * 0.5, mean, covariance, carried)


class Curvature(NamedTuple):
    """Derivatives of the log density by the joint covariance of values and next state, and by their coefficients.

    With the first derivative ``g`` and the second ``-N`` by the mean, the one by the covariance is ``(g g^T - N) / 2``.
    """

    left: torch.Tensor  # with `right`, factors of ``g g^T - N + R^-1`` for the values, R their conditional covariance
    right: torch.Tensor  # ``(k, size, 2 d + 1)``, as `left`; the first column of each is g
    between: torch.Tensor  # ``g g^T - N`` between values and next state
    of_next: torch.Tensor  # ``(g g^T - N) / 2`` of the next state
    by_seen: torch.Tensor  # derivative by `Blocks.seen`
    by_transition: torch.Tensor  # derivative by `Blocks.transition`


def curvature(of: Conditional, beside: Around) -> Curvature:
    """Return the derivatives by covariances and coefficients of each block."""
    g, g_next, by_state, gain, curved, mean, covariance, carried = responses(of, beside)
    known, spread = gain @ curved, by_state @ covariance
    smooth = (mean + carried.mT @ g_next).mT
    return Curvature(
        left=torch.cat((g, spread, -known), -1),
        right=torch.cat((g, by_state, gain), -1),
        between=g @ g_next.mT + known,
        of_next=0.5 * (g_next @ g_next.mT - curved),
        by_seen=g @ smooth - spread + known @ carried,
        by_transition=g_next @ smooth - curved @ carried,
    )


class Gradients(NamedTuple):
    """Derivatives of the log density by noise and residual ``(n)``, weights ``(leaves)`` and points, each ``(n)``."""

    noise: torch.Tensor
    residual: torch.Tensor
    weights: torch.Tensor
    points: list[torch.Tensor]


def gradients(blocks: Blocks, of: Conditional, beside: Around, n: int) -> Gradients:
    """Return the derivatives by noise, residual, weights and points."""
    found = curvature(of, beside)
    k, size, _ = blocks.seen.shape
    stationary, transition = blocks.stationary, blocks.transition
    weighted, by_noise = torch.empty_like(of.seen), stationary.new_empty(k, size)
    by_weights = torch.zeros_like(blocks.weights)
    by_inside = [torch.empty_like(by_noise) for _ in blocks.chains]
    for part in blocks.parts:
        root = of.root[part]
        s = torch.baddbmm(root.mT @ root, found.left[part], found.right[part].mT, beta=-0.5, alpha=0.5)
        if part.stop == k and k * size > n:
            s[-1, n - k * size :] = 0
            s[-1, :, n - k * size :] = 0
        weighted[part] = s @ of.seen[part]
        by_noise[part] = s.diagonal(dim1=-2, dim2=-1)
        for i, (one, inside) in enumerate(zip(blocks.chains, blocks.inside, strict=True)):
            correlation, slope = one.with_slope(inside[part].unsqueeze(-1) - inside[part].unsqueeze(-2))
            by_weights[i] += torch.dot(s.flatten(), correlation.flatten())
            by_inside[i][part] = slope.mul_(s).sum(-1)
    crossed = found.between.mT @ of.seen
    by_seen = found.by_seen - 2 * (weighted @ stationary) - found.between @ (transition @ stationary)
    by_transition = found.by_transition - (crossed + 2 * (found.of_next @ transition)) @ stationary
    by_stationary = found.of_next - of.seen.mT @ weighted - (transition.mT @ found.of_next + crossed.mT) @ transition
    by_stationary = by_stationary.sum(0) + _by_first(beside, stationary)
    by_points = []
    for i, own in enumerate(blocks.own):
        one, weight, start = blocks.chains[i], blocks.weights[i], blocks.starts[i]
        behind = one.ahead(start[1:, None] - blocks.inside[i])
        by_weights[i] += (found.between[..., own] * behind).sum() + (by_stationary[own, own] * one.stationary).sum()
        since = (by_seen[..., own] * (blocks.seen[..., own] @ one.feedback)).sum(-1)
        until = (found.between[..., own] * (behind @ one.feedback.mT)).sum(-1) * weight
        step = (by_transition[:, own, own] * (transition[:, own, own] @ one.feedback)).sum((-2, -1))
        total = by_inside[i].mul_(2 * weight).add_(since - until)
        total[:, 0] -= since.sum(-1) + step
        after = until.sum(-1) + step
        total[1:, 0] += after[:-1]
        flat = total.view(-1)
        flat[n - 1] += flat[n:].sum() + after[-1]
        by_points.append(flat[:n] * root_of(one))
    residual = found.left[..., 0].reshape(-1)[:n].neg()
    return Gradients(by_noise.view(-1)[:n], residual, by_weights, by_points)


def _by_first(beside: Around, stationary: torch.Tensor) -> torch.Tensor:
    """Return the derivative by the covariance of the first state."""
    told = inverse_of_unit_plus(beside.whole_j @ stationary)
    g = told @ beside.whole_h
    return 0.5 * (g @ g.mT - told @ beside.whole_j)
