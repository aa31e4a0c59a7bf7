"""Transforms of points before their distances, or inner products, are taken, with derivatives.

Parts that depend only on differences read centred points, other parts raw points; `arranged` lays both side by side.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from autokern.kernels.arrays.part import Array, Columns, Evaluated, Parameter, summed


def arranged(x: Array, raw: bool, centre: Array | None = None) -> Array:
    """Return points less their mean, or less `centre`, followed by the raw points if any part is `raw`."""
    centred: Array = x - (np.add.reduce(x, -2, keepdims=True) / x.shape[-2] if centre is None else centre)
    return np.concatenate((centred, x), -1) if raw else centred


def into(by_x: Array, columns: Columns, grad: Array) -> None:
    """Add the gradient by some columns of the points to `by_x`; a column may occur twice."""
    if isinstance(columns, slice):
        by_x[..., columns] += grad
    else:
        np.add.at(by_x, (..., columns), grad)  # type: ignore[arg-type]


class Points(Protocol):
    """A transform of points."""

    def of(self, x: Array) -> Evaluated:
        """Return the transformed points, and the intermediate results that `backward` needs."""

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add to the gradients of points, and of parameters if `theta`, given the one by the transformed points."""


class Plain:
    """Some columns of the points, unchanged."""

    __slots__ = ("_columns",)

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def of(self, x: Array) -> Evaluated:
        """Return the columns."""
        return x[..., self._columns], None

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add to the gradient of the points."""
        if by_x is not None:
            into(by_x, self._columns, by_z)


class Scaled:
    """Points divided by a lengthscale, one for each dimension or one for all."""

    __slots__ = ("_columns", "_unit")

    def __init__(self, columns: Columns, lengthscale: Parameter) -> None:
        self._columns, self._unit = columns, lengthscale

    def of(self, x: Array) -> Evaluated:
        """Return the scaled points."""
        return x[..., self._columns] / self._unit.value, None

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add to the gradients of lengthscale and points."""
        if theta:
            summed(self._unit, by_z * z / -self._unit.value)
        if by_x is not None:
            into(by_x, self._columns, by_z / self._unit.value)


class Circles:
    """Points mapped to circles, on which an RBF is the periodic kernel; the lengthscale divides squared distances."""

    __slots__ = ("_columns", "_lengthscale", "_period")

    def __init__(self, columns: Columns, lengthscale: Parameter, period: Parameter) -> None:
        self._columns, self._lengthscale, self._period = columns, lengthscale, period

    def of(self, x: Array) -> Evaluated:
        """Return two coordinates for each dimension; the circles touch the origin, so small angles have small norms."""
        angle = x[..., self._columns] * (2 * math.pi / self._period.value)
        scale = 1.0 / np.sqrt(self._lengthscale.value)
        half, sine = np.sin(0.5 * angle), np.sin(angle) * scale
        depth = half * half * (-2.0 * scale)
        return np.concatenate((sine, depth), -1), (angle, sine, depth + scale)

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add to the gradients of period, lengthscale and points."""
        angle, sine, cosine = kept
        d = angle.shape[-1]
        by_angle = by_z[..., :d] * cosine - by_z[..., d:] * sine
        if theta:
            along = by_z * z
            summed(self._lengthscale, (along[..., :d] + along[..., d:]) * (-0.5 / self._lengthscale.value))
            summed(self._period, by_angle * angle / -self._period.value)
        if by_x is not None:
            into(by_x, self._columns, by_angle * (2 * math.pi / self._period.value))


class Weighted:
    """Points times the root of a variance, one for each dimension or one for all."""

    __slots__ = ("_columns", "_variance")

    def __init__(self, columns: Columns, variance: Parameter) -> None:
        self._columns, self._variance = columns, variance

    def of(self, x: Array) -> Evaluated:
        """Return the weighted points."""
        plain = x[..., self._columns]
        return plain * np.sqrt(self._variance.value), plain

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add to the gradients of variance and points."""
        root = np.sqrt(self._variance.value)
        if theta:
            summed(self._variance, by_z * kept * (0.5 / root))
        if by_x is not None:
            into(by_x, self._columns, by_z * root)
