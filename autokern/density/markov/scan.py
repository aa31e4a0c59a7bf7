"""Parallel scans over the blocks of a Markov chain, in logarithmically many steps (Särkkä and García-Fernández 2021).

An element summarises consecutive data, given the state s before them: the state after them is Gaussian with the mean
``A s + b`` and the covariance ``Q``, and the density of the data is ``exp(h^T s - s^T J s / 2)`` up to a factor.
Neighbouring elements combine to one, up a binary tree; the states and the later data at each element come down it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Element(NamedTuple):
    """A batch of k consecutive elements."""

    a: torch.Tensor  # ``(k, d, d)``, as q and j
    b: torch.Tensor  # ``(k, d, c)`` for c columns of data, as h
    q: torch.Tensor
    h: torch.Tensor
    j: torch.Tensor

    def part(self, which: slice) -> Element:
        """Return a slice of the elements."""
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
    found: torch.Tensor = torch.linalg.inv_ex(_unit(product) + product).inverse
    return found


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
    """Return an even number of elements, adding if need be one without data that leaves the state unchanged."""
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
