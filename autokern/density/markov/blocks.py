"""The log density of one-dimensional Matérn processes by blocks, in time and memory linear in the points.

Sorted points are cut into blocks. Given the state at its first point, the values of a block and the state at the first
point of the next block are jointly Gaussian with dense covariances, which are factorised as one batch; a scan joins the
blocks. States are carried by covariances, since precisions lose all digits at small gaps. The gradients by mean and
covariance of a block's values and next state are ``g`` and ``(g g^T - N) / 2``, where N is the negative curvature of
the log density by that mean; all other gradients follow by the chain rule.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from autokern.density.markov.scan import Around, Element, filtered
from autokern.kernels.state_space import Chain, chain

BLOCK = 16
"""Points of a block."""
_CACHED = 2**15
"""Elements of a batch of matrices that fits a CPU's cache together with a few others."""
_LOG_2_PI = math.log(2 * math.pi)
_ROOTS = {1: 1.0, 2: math.sqrt(3.0), 3: math.sqrt(5.0)}


def root_of(one: Chain) -> float:
    """Return ``sqrt(2 nu)``, the chain's distance between points that are one lengthscale apart."""
    return _ROOTS[one.order]


class Blocks(NamedTuple):
    """Blocks of sorted points as a Markov chain."""

    chains: list[Chain]  # of the leaves; the state concatenates their states
    weights: torch.Tensor  # variances of the leaves
    starts: list[torch.Tensor]  # scaled points of each leaf: the first of each block, then the last of all, ``(k + 1)``
    inside: list[torch.Tensor]  # all scaled points of each leaf, ``(k, size)``
    stationary: torch.Tensor  # stationary covariance of the state, ``(d, d)``
    transition: torch.Tensor  # from the start of each block to the next, ``(k, d, d)``
    seen: torch.Tensor  # coefficients of the values by the state at the block's start, ``(k, size, d)``
    ahead: torch.Tensor  # covariances of the values with the state at the next block's start, ``(k, size, d)``

    @property
    def own(self) -> list[slice]:
        """The slice of the state that belongs to each leaf."""
        stops = [sum(c.order for c in self.chains[: i + 1]) for i in range(len(self.chains))]
        return [slice(stop - c.order, stop) for stop, c in zip(stops, self.chains, strict=True)]

    @property
    def parts(self) -> list[slice]:
        """Slices of blocks whose covariances fit a CPU's cache together."""
        k, size = self.seen.shape[:2]
        step = max(1, _CACHED // size**2)
        return [slice(start, min(start + step, k)) for start in range(0, k, step)]


def cut(families: tuple[str, ...], weights: torch.Tensor, points: list[torch.Tensor]) -> Blocks:
    """Return the sorted points ``(n)`` of each leaf in blocks; copies of the last point pad the last block."""
    chains = [chain(name) for name in families]
    n = len(points[0])
    k = -(-n // BLOCK)
    starts, inside = [], []
    for one, z in zip(chains, points, strict=True):
        scaled = z * root_of(one)
        scaled = torch.cat((scaled, scaled[-1:].expand(k * BLOCK - n))).view(k, BLOCK)
        inside.append(scaled)
        starts.append(torch.cat((scaled[:, 0], scaled[-1:, -1])))
    seen = [c.seen(y - t[:-1, None]) for c, y, t in zip(chains, inside, starts, strict=True)]
    ahead = [c.ahead(t[1:, None] - y) * w for c, y, t, w in zip(chains, inside, starts, weights, strict=True)]
    moved = [c.transition(t[1:] - t[:-1]) for c, t in zip(chains, starts, strict=True)]
    stationary = torch.block_diag(*(c.stationary * w for c, w in zip(chains, weights, strict=True)))
    transition = moved[0]
    if len(moved) > 1:
        sizes = [c.order for c in chains]
        rows = [torch.nn.functional.pad(one, (sum(sizes[:i]), sum(sizes[i + 1 :]))) for i, one in enumerate(moved)]
        transition = torch.cat(rows, -2)
    return Blocks(chains, weights, starts, inside, stationary, transition, torch.cat(seen, -1), torch.cat(ahead, -1))


class Conditional(NamedTuple):
    """Values and next state of each block, conditional on the state at its start."""

    seen: torch.Tensor  # coefficients of the values by that state, zero for padding
    root: torch.Tensor  # ``L^-1`` of the noisy covariances of the values, ``(k, size, size)``
    white: torch.Tensor  # ``L^-1`` times ``[seen, covariances with the next state, residual]``
    element: Element  # the blocks as elements of the scan
    constant: torch.Tensor  # log density of each block's values if that state is zero, ``(k)``
    valid: bool  # whether all factorisations succeeded


def conditional(blocks: Blocks, noise: torch.Tensor, residual: torch.Tensor) -> Conditional:
    """Return blocks with noise and residual ``(n)``, conditional on the states at their starts."""
    k, size, d = blocks.seen.shape
    empty = k * size - len(residual)
    seen, moved = blocks.seen, blocks.transition @ blocks.stationary
    between = blocks.ahead - seen @ moved.mT
    after = blocks.stationary - moved @ blocks.transition.mT
    keep = None
    if empty:
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
        values = torch.baddbmm(_covariances(blocks, part), weighted[part], seen[part].mT, alpha=-1)
        if keep is not None and part.stop == k:
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


def _covariances(blocks: Blocks, part: slice) -> torch.Tensor:
    """Return the prior covariances of the values inside some blocks, without noise."""
    total: torch.Tensor | None = None
    for one, weight, inside in zip(blocks.chains, blocks.weights, blocks.inside, strict=True):
        own = one.correlation((inside[part].unsqueeze(-1) - inside[part].unsqueeze(-2)).abs()) * weight
        total = own if total is None else total + own
    assert total is not None
    return total


def density(of: Conditional, beside: Around, n: int) -> torch.Tensor:
    """Return the log density of n residuals, summed over blocks that are each conditional on all before."""
    _, _, _, h, j = of.element
    mean, covariance = beside.mean, beside.covariance
    unit = torch.eye(j.shape[-1], dtype=j.dtype, device=j.device)
    later, _ = filtered(mean, covariance, of.element)
    # h^T m - m^T J m / 2 + (h - J m)^T (m' - m) / 2, with the mean m' given the data of the block too
    quadratic = (h * (mean + later) - (j @ mean) * later).sum()
    logdet = torch.linalg.slogdet(unit + j @ covariance).logabsdet.sum()
    found: torch.Tensor = of.constant.sum() + 0.5 * (quadratic - logdet) - 0.5 * n * _LOG_2_PI
    return found
