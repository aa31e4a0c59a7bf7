"""One-dimensional Matérn kernels as Markov chains (Hartikainen and Särkkä 2010), their blocks, and scans over these.

The state of a leaf is the process and its derivatives by the distance ``a = sqrt(2 nu) |z - z'|``. Its feedback matrix
``F`` has the only eigenvalue -1, so the transition is ``exp(F a) = exp(-a) (I + N a + N^2 a^2 / 2)``, ``N = F + I``.
States are carried by covariances, since precisions lose all digits at small gaps.

A scan joins the blocks in logarithmically many steps (Särkkä and García-Fernández 2021). An element summarises
consecutive data, given the state s before them: the state after them is Gaussian with the mean ``A s + b`` and the
covariance ``Q``, and the density of the data is ``exp(h^T s - s^T J s / 2)`` up to a factor. Neighbouring elements
combine to one, up a binary tree; the states and the later data at each element come down it.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import torch

from autokern.kernels.tree import Node

BLOCK = 16  # points of a block
_CACHED = 2**15  # elements of a batch of matrices that fits a CPU's cache together with a few others
_FEEDBACK = {
    "matern12": [[-1.0]],
    "matern32": [[0.0, 1.0], [-1.0, -2.0]],
    "matern52": [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, -3.0, -3.0]],
}
_STATIONARY = {
    "matern12": [[1.0]],
    "matern32": [[1.0, 0.0], [0.0, 1.0]],
    "matern52": [[1.0, 0.0, -1 / 3], [0.0, 1 / 3, 0.0], [-1 / 3, 0.0, 1.0]],
}


Leaf = tuple[str, tuple[int, ...]]  # a leaf of a sum: its family, and the indices of the weights that multiply it


def leaves_of(node: Node) -> list[Leaf] | None:
    """Return the leaves of a tree of sums and scales over Matérn families, None for any other tree."""
    numbers = itertools.count()

    def collect(node: Node, above: tuple[int, ...]) -> list[Leaf] | None:
        if node.kind == "leaf":
            return [(node.family, above)] if node.family in _FEEDBACK else None
        if node.kind == "scale":
            return collect(node.children[0], (*above, next(numbers)))
        if node.kind != "sum":
            return None
        parts = [collect(child, above) for child in node.children]
        return None if None in parts else [leaf for part in parts for leaf in part or ()]

    return collect(node, ())


class Chain(NamedTuple):
    """The Markov chain of a family."""

    order: int  # size of the state
    feedback: torch.Tensor  # ``F``, ``(order, order)``
    powers: torch.Tensor  # ``I, N, N^2 / 2``, ``(3, order, order)``
    stationary: torch.Tensor  # covariance of the state

    @property
    def root(self) -> float:
        """``sqrt(2 nu)``, the distance between points that are one lengthscale apart."""
        return math.sqrt(2 * self.order - 1)

    def transition(self, a: torch.Tensor) -> torch.Tensor:
        """Return ``exp(F a)``, shape ``(..., order, order)``."""
        return self._decayed(a, self.powers.flatten(1)).unflatten(-1, (self.order, self.order))

    def seen(self, a: torch.Tensor) -> torch.Tensor:
        """Return the first row of ``exp(F a)``, the process's coefficients by a state before it, ``(..., order)``."""
        return self._decayed(a, self.powers[:, 0])

    def ahead(self, a: torch.Tensor) -> torch.Tensor:
        """Return the covariances of the process with a state after it, ``(..., order)``."""
        return self._decayed(a, self.powers @ self.stationary[0])

    def _decayed(self, a: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
        a = a.unsqueeze(-1)
        polynomial = powers[0] + a * powers[1]
        if self.order > 2:
            polynomial = polynomial + a * a * powers[2]
        return (-a).exp() * polynomial

    def correlation(self, a: torch.Tensor) -> torch.Tensor:
        """Return the correlation of the process at distances `a`."""
        decay = a.neg().exp_()
        if self.order == 1:
            return decay
        if self.order == 2:
            return (a + 1) * decay
        return torch.addcmul(a, a, a, value=1 / 3).add_(1) * decay

    def with_slope(self, difference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return correlations at signed differences, and their derivatives, 0 at distance 0; not differentiable."""
        a = difference.abs()
        decay = a.neg().exp_()
        if self.order == 1:
            return decay, difference.sign_().mul_(decay).neg_()
        if self.order == 2:
            return torch.addcmul(decay, a, decay), difference.mul_(decay).neg_()
        slope = torch.addcmul(difference, difference, a).mul_(decay).mul_(-1 / 3)
        return torch.addcmul(a, a, a, value=1 / 3).add_(1).mul_(decay), slope


@functools.cache
def chain(name: str) -> Chain:
    """Return the chain of a family, on the CPU in double precision."""
    like = {"dtype": torch.float64, "device": "cpu"}
    feedback = torch.tensor(_FEEDBACK[name], **like)  # type: ignore[arg-type]
    order = len(feedback)
    unit = torch.eye(order, **like)  # type: ignore[call-overload]
    nilpotent = feedback + unit
    powers = torch.stack([unit, nilpotent, nilpotent @ nilpotent / 2])
    return Chain(order, feedback, powers, torch.tensor(_STATIONARY[name], **like))  # type: ignore[arg-type]


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
        scaled = z * one.root
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
    """Summaries of the data before and after each element, and of all data."""

    mean: torch.Tensor  # of the state before an element given the data before it, ``(k, d, c)``
    covariance: torch.Tensor  # of that state, ``(k, d, d)``
    h: torch.Tensor  # with j, log density of the data after an element by the state after it, ``(k, d, c)``
    j: torch.Tensor  # ``(k, d, d)``
    whole_h: torch.Tensor  # with whole_j, log density of all data by the first state, ``(d, c)``
    whole_j: torch.Tensor  # ``(d, d)``


def _unit(like: torch.Tensor) -> torch.Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def resolvent(product: torch.Tensor) -> torch.Tensor:
    """Return ``(I + product)^-1``."""
    return torch.linalg.inv_ex(_unit(product) + product).inverse


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix + matrix.mT) * 0.5


def filtered(mean: torch.Tensor, covariance: torch.Tensor, of: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and covariance of the states before elements, conditioned on each element's data too."""
    gain = covariance @ resolvent(of.j @ covariance)
    return mean + gain @ (of.h - of.j @ mean), _symmetric(gain)


def _after(mean: torch.Tensor, covariance: torch.Tensor, of: Element) -> tuple[torch.Tensor, torch.Tensor]:
    mean, covariance = filtered(mean, covariance, of)
    return of.a @ mean + of.b, _symmetric(of.a @ covariance @ of.a.mT + of.q)


def pulled(of: Element, h: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h and j of the state before elements, given each element and h and j of the state after it."""
    turned = of.a.mT @ resolvent(j @ of.q)
    return turned @ (h - j @ of.b) + of.h, _symmetric(turned @ j @ of.a + of.j)


def _combined(one: Element, two: Element) -> Element:
    inverse = resolvent(one.q @ two.j)
    a = inverse @ one.a
    h = a.mT @ (two.h - two.j @ one.b) + one.h
    j = a.mT @ (two.j @ one.a) + one.j
    b = two.a @ (inverse @ (one.b + one.q @ two.h)) + two.b
    q = two.a @ (inverse @ one.q) @ two.a.mT + two.q
    return Element(two.a @ a, b, _symmetric(q), h, _symmetric(j))


def _side_by_side(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    return torch.stack((one, two), 1).flatten(0, 1)


def around(elements: Element, stationary: torch.Tensor) -> Around:
    """Return the summaries for each element of a chain whose first state is stationary."""
    levels, left, right = [], slice(None, None, 2), slice(1, None, 2)
    of, count = elements, len(elements.b)
    while len(of.b) > 1:
        if len(of.b) % 2:  # an element without data leaves the state unchanged
            none, nothing = torch.zeros_like(of.b[:1]), torch.zeros_like(of.q[:1])
            added = _unit(of.a).unsqueeze(0), none, nothing, none, nothing
            of = Element(*(torch.cat(pair) for pair in zip(of, added, strict=True)))
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
