"""Parts of kernels that are functions of the squared distance, or of the inner product, of two points.

The points are transformed first. Parts that depend only on differences read centred points, other parts raw points;
`arranged` lays both side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autokern.kernels.array_formulas import Formula
from autokern.kernels.array_parts import Array, Columns, Evaluated, Parameter, Same, clear_diagonal, into, summed

Map = Callable[..., Sequence[Any]]
_NEAR = 1e-3  # squared distances below this share of the largest squared norm are computed from differences


def arranged(x: Array, raw: bool, centre: Array | None = None) -> Array:
    """Return points less their mean, or less `centre`, followed by the raw points if any part is `raw`."""
    centred: Array = x - (np.add.reduce(x, -2, keepdims=True) / x.shape[-2] if centre is None else centre)
    return np.concatenate((centred, x), -1) if raw else centred


class Mapped:
    """Columns of the points, transformed by a function with parameters if one is given.

    The function returns the transformed points and its vector-Jacobian products, by the columns and by each parameter.
    """

    def __init__(self, columns: Columns, function: Map | None = None, *parameters: Parameter) -> None:
        self._columns, self._function, self.parameters = columns, function, parameters

    def of(self, x: Array) -> Evaluated:
        """Return the transformed points, and the vector-Jacobian products for `backward`."""
        z = x[..., self._columns]
        if self._function is None:
            return z, ()
        z, *pulls = self._function(z, *[p.value for p in self.parameters])
        return z, pulls

    def backward(self, pulls: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        if theta:
            for parameter, pull in zip(self.parameters, pulls[1:], strict=True):
                summed(parameter, pull(by_z))
        if by_x is not None:
            into(by_x, self._columns, pulls[0](by_z) if pulls else by_z)


def scaled(x: Array, lengthscale: Array) -> Sequence[Any]:
    """Return points divided by a lengthscale, one for each dimension or one for all."""
    z = x / lengthscale
    return z, lambda g: g / lengthscale, lambda g: g * z / -lengthscale


def weighted(x: Array, variance: Array) -> Sequence[Any]:
    """Return points times the root of a variance, one for each dimension or one for all."""
    root = np.sqrt(variance)
    return x * root, lambda g: g * root, lambda g: g * x * (0.5 / root)


def raised(x: Array, power: Array) -> Sequence[Any]:
    """Return ``(1 - x) ** (1 + power)``."""
    rest, up = 1.0 - x, 1.0 + power
    z = rest**up
    return z, lambda g: g * -up * rest**power, lambda g: g * z * np.log(np.where(rest == 0.0, 1.0, rest))


def clamped(x: Array) -> Sequence[Any]:
    """Return the points clamped to [0, 1]."""
    z = np.minimum(np.maximum(x, 0.0), 1.0)
    return z, lambda g: g * (z == x)


def short(x: Array) -> Sequence[Any]:
    """Return 1 minus the points clamped to [0, 1]."""
    z, pull = clamped(x)
    return 1.0 - z, lambda g: -pull(g)


def circled(x: Array, lengthscale: Array, period: Array) -> Sequence[Any]:
    """Return points on circles, on which an RBF is the periodic kernel; the lengthscale divides squared distances.

    There are two coordinates for each dimension; the circles touch the origin, so small angles have small norms.
    """
    turn, scale, d = 2 * math.pi / period, 1.0 / np.sqrt(lengthscale), x.shape[-1]
    angle = x * turn
    half, sine = np.sin(0.5 * angle), np.sin(angle) * scale
    depth = half * half * (-2.0 * scale)
    z = np.concatenate((sine, depth), -1)

    def by_angle(g: Array) -> Array:
        found: Array = g[..., :d] * (depth + scale) - g[..., d:] * sine
        return found

    def by_lengthscale(g: Array) -> Any:
        along = g * z
        return (along[..., :d] + along[..., d:]) * (-0.5 / lengthscale)

    return z, lambda g: by_angle(g) * turn, by_lengthscale, lambda g: by_angle(g) * angle / -period


class Distances:
    """A formula of squared distances that is 1 at distance zero.

    Squared distances to other points are one matrix product, of points with their squared norms appended.
    """

    _one = True  # whether the covariance of a point with itself is 1

    def __init__(self, points: Mapped, formula: Formula, *shape: Parameter) -> None:
        self._points, self._formula, self._shape = points, formula, shape
        self._others = Same()

    def _prepared(self, x: Array) -> tuple[Any, ...]:
        z, kept = self._points.of(x)
        return z, kept, *self._forms(z)

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        z, kept = self._points.of(x)
        if other is None and z.shape[-2] == 1 and self._one:
            return np.ones((*z.shape[:-1], 1)), None
        others = None if other is None else self._others.of(other, self._prepared)
        s, apart = self._between(z, others)
        k, slope, *by_shape = self._formula(s, *[p.value for p in self._shape])
        return k, (z, kept, others, apart, slope, by_shape)

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        if kept is None:
            return
        z, of_points, others, apart, slope, by_shape = kept
        if theta and by_shape:
            summed(self._shape[0], g * by_shape[0]())
        if by_x is None and not (theta and self._points.parameters):
            return
        if slope is not None:
            g *= slope
        by_z, by_others = self._pulled(g, z, others, apart, theta)
        self._points.backward(of_points, by_z, by_x, theta)
        if by_others is not None:
            self._points.backward(others[1], by_others, None, True)

    def _forms(self, z: Array) -> tuple[Array, ...]:
        ones = np.ones((*z.shape[:-1], 1))
        norms = np.einsum("...ij,...ij->...i", z, z)[..., None]
        right = np.ascontiguousarray(np.concatenate((z * -2.0, ones, norms), -1).swapaxes(-1, -2))
        return right, np.concatenate((z, ones), -1)

    def _between(self, z: Array, others: Any) -> tuple[Array, Any]:
        if others is None:
            s: Array = z @ z.swapaxes(-1, -2)
            norms = s.diagonal(0, -2, -1).copy()  # from the product itself, so that the diagonal becomes zero
            s *= -2.0
            s += norms[..., None, :]
            s += norms[..., None]
        else:
            d = z.shape[-1]
            left = np.empty((*z.shape[:-1], d + 2))
            left[..., :d] = z
            np.einsum("...ij,...ij->...i", z, z, out=left[..., d])
            left[..., d + 1] = 1.0
            s = left @ others[2]
        return np.maximum(s, 0.0, out=s), None

    def _pulled(self, g: Array, z: Array, others: Any, apart: Any, theta: bool) -> tuple[Array, Array | None]:
        if others is None:
            clear_diagonal(g)
            by_z = np.add.reduce(g, -1)[..., None] * z
            by_z -= g @ z
            by_z *= 4.0
            return by_z, None
        d = z.shape[-1]
        across = g @ others[3]
        by_z = z * across[..., d:]
        by_z -= across[..., :d]
        by_z *= 2.0
        if not theta:
            return by_z, None
        return by_z, 2.0 * (others[0] * np.add.reduce(g, -2)[..., None] - g.swapaxes(-1, -2) @ z)


class Products(Distances):
    """A formula of inner products in place of squared distances."""

    _one = False

    def _forms(self, z: Array) -> tuple[Array, ...]:
        return ()

    def _between(self, z: Array, others: Any) -> tuple[Array, Any]:
        s: Array = z @ (z if others is None else others[0]).swapaxes(-1, -2)
        return s, None

    def _pulled(self, g: Array, z: Array, others: Any, apart: Any, theta: bool) -> tuple[Array, Array | None]:
        if others is None:
            return 2.0 * (g @ z), None
        return g @ others[0], g.swapaxes(-1, -2) @ z if theta else None


class Sums(Products):
    """A formula of sums of two numbers, one of each point."""

    def _between(self, z: Array, others: Any) -> tuple[Array, Any]:
        s: Array = z + (z if others is None else others[0]).swapaxes(-1, -2)
        return s, None

    def _pulled(self, g: Array, z: Array, others: Any, apart: Any, theta: bool) -> tuple[Array, Array | None]:
        by_z, by_others = np.add.reduce(g, -1)[..., None], np.add.reduce(g, -2)[..., None]
        return (by_z + by_others, None) if others is None else (by_z, by_others if theta else None)


class Rough(Distances):
    """A formula with a kink at distance zero: distances of near points are computed from differences."""

    def _between(self, z: Array, others: Any) -> tuple[Array, Any]:
        s, _ = super()._between(z, others)
        far = max(float(np.einsum("...ij,...ij->...i", p, p).max()) for p in (z, z if others is None else others[0]))
        near = s < _NEAR * far
        where, gaps = _gaps(near, z, z if others is None else others[0])
        s[where] = np.square(gaps).sum(-1)
        return s, near

    def _pulled(self, g: Array, z: Array, others: Any, apart: Any, theta: bool) -> tuple[Array, Array | None]:
        where, gaps = _gaps(np.broadcast_to(apart, g.shape), z, z if others is None else others[0])
        pull = 2.0 * g[where][:, None] * gaps
        g[where] = 0.0
        by_z, by_others = super()._pulled(g, z, others, None, theta)
        *lead, rows, columns = where
        np.add.at(by_z, (*lead, rows), pull if others is not None else 2.0 * pull)
        if by_others is not None:
            np.subtract.at(by_others, (*lead, columns), pull)
        return by_z, by_others


def _gaps(near: Array, z: Array, other: Array) -> tuple[tuple[Array, ...], Array]:
    """Return the indices of the pairs that are `near`, and their differences."""
    where = np.nonzero(near)
    *lead, rows, columns = where
    one, two = (np.broadcast_to(p, (*near.shape[:-2], *p.shape[-2:])) for p in (z, other))
    return where, one[(*lead, rows)] - two[(*lead, columns)]
