"""One-dimensional Matérn processes as Markov chains of blocks, and scans over the blocks.

Sorted points are cut into blocks. Given the state at its first point, the values of a block and the state at the first
point of the next block are jointly Gaussian with dense covariances, which are factorised as one batch. States are
carried by covariances, since precisions lose all digits at small gaps.

A scan joins the blocks in logarithmically many steps (Särkkä and García-Fernández 2021). An element summarises
consecutive data, given the state s before them: the state after them is Gaussian with the mean ``A s + b`` and the
covariance ``Q``, and the density of the data is ``exp(h^T s - s^T J s / 2)`` up to a factor. Neighbouring elements
combine to one, up a binary tree; the states and the later data at each element come down it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from autokern.kernels.state_space import Chain, chain

BLOCK = 16
"""Points of a block."""
_CACHED = 2**15
"""Elements of a batch of matrices that fits a CPU's cache together with a few others."""
_LOG_2_PI = math.log(2 * math.pi)


class Element(NamedTuple):
    """A batch of k consecutive elements."""

    a: torch.Tensor  # ``(k, d, d)``, as q and j
    b: torch.Tensor  # ``(k, d, c)`` for c columns of data, as h
    q: torch.Tensor
    h: torch.Tensor
    j: torch.Tensor

    def part(self, which: slice) -> Element:
        """Return some of the elements."""
        return Element(*(t[which] for t in self))


class Around(NamedTuple):
    """The data before and after each element, and all data."""

    mean: torch.Tensor  # of the state before an element given the data before it, ``(k, d, c)``
    covariance: torch.Tensor  # of that state, ``(k, d, d)``
    h: torch.Tensor  # with j, log density of the data after an element by the state after it, ``(k, d, c)``
    j: torch.Tensor  # ``(k, d, d)``
    whole_h: torch.Tensor  # with whole_j, log density of all data by the first state, ``(d, c)``
    whole_j: torch.Tensor  # ``(d, d)``


def _unit(like: torch.Tensor) -> torch.Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def inverse_of_unit_plus(product: torch.Tensor) -> torch.Tensor:
    """Return ``(I + product)^-1``."""
    return torch.linalg.inv_ex(_unit(product) + product).inverse


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix + matrix.mT) * 0.5


def filtered(mean: torch.Tensor, covariance: torch.Tensor, of: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and covariance of the states before elements, conditioned on each element's data too."""
    gain = covariance @ inverse_of_unit_plus(of.j @ covariance)
    return mean + gain @ (of.h - of.j @ mean), _symmetric(gain)


def _after(mean: torch.Tensor, covariance: torch.Tensor, of: Element) -> tuple[torch.Tensor, torch.Tensor]:
    mean, covariance = filtered(mean, covariance, of)
    return of.a @ mean + of.b, _symmetric(of.a @ covariance @ of.a.mT + of.q)


def pulled(of: Element, h: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h and j of the state before elements, given each element and h and j of the state after it."""
    turned = of.a.mT @ inverse_of_unit_plus(j @ of.q)
    return turned @ (h - j @ of.b) + of.h, _symmetric(turned @ j @ of.a + of.j)


def _combined(one: Element, two: Element) -> Element:
    inverse = inverse_of_unit_plus(one.q @ two.j)
    a = inverse @ one.a
    h = a.mT @ (two.h - two.j @ one.b) + one.h
    j = a.mT @ (two.j @ one.a) + one.j
    b = two.a @ (inverse @ (one.b + one.q @ two.h)) + two.b
    q = two.a @ (inverse @ one.q) @ two.a.mT + two.q
    return Element(two.a @ a, b, _symmetric(q), h, _symmetric(j))


def _even(of: Element) -> Element:
    """Return an even number of elements: one without data, which leaves the state unchanged, may be added."""
    k, d = of.b.shape[:2]
    if k % 2 == 0:
        return of
    none, nothing = torch.zeros_like(of.b[:1]), of.b.new_zeros(1, d, d)
    added = _unit(of.a).unsqueeze(0), none, nothing, none, nothing
    return Element(*(torch.cat(pair) for pair in zip(of, added, strict=True)))


def _side_by_side(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    return torch.stack((one, two), 1).flatten(0, 1)


def around(elements: Element, stationary: torch.Tensor) -> Around:
    """Return the data before and after each element of a chain whose first state is stationary."""
    levels, left, right = [], slice(None, None, 2), slice(1, None, 2)
    of, count = elements, len(elements.b)
    while len(of.b) > 1:
        of = _even(of)
        levels.append(of)
        of = _combined(of.part(left), of.part(right))
    mean, covariance = torch.zeros_like(of.b), stationary.unsqueeze(0)
    h, j = torch.zeros_like(of.b), torch.zeros_like(of.j)
    for level in reversed(levels):
        half = len(level.b) // 2
        mean, covariance, h, j = mean[:half], covariance[:half], h[:half], j[:half]
        next_mean, next_covariance = _after(mean, covariance, level.part(left))
        mean, covariance = _side_by_side(mean, next_mean), _side_by_side(covariance, next_covariance)
        earlier_h, earlier_j = pulled(level.part(right), h, j)
        h, j = _side_by_side(earlier_h, h), _side_by_side(earlier_j, j)
    return Around(mean[:count], covariance[:count], h[:count], j[:count], of.h[0], of.j[0])


def root_of(one: Chain) -> float:
    """Return ``sqrt(2 nu)``, the chain's distance between points that are one lengthscale apart."""
    return math.sqrt(2 * one.order - 1)


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
    later, _ = filtered(mean, covariance, of.element)
    # h^T m - m^T J m / 2 + (h - J m)^T (m' - m) / 2, with the mean m' given the data of the block too
    quadratic = (h * (mean + later) - (j @ mean) * later).sum()
    logdet = torch.linalg.slogdet(_unit(j) + j @ covariance).logabsdet.sum()
    return of.constant.sum() + 0.5 * (quadratic - logdet) - 0.5 * n * _LOG_2_PI
