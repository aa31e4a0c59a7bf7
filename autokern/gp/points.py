"""What points become before their distances, or products, are taken, and the derivatives of that.

What depends on differences alone takes points that are centred, the rest takes the points as they are; `arranged` lays
both side by side.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from autokern.gp.small import Array, Columns, Evaluated, Parameter, summed

__all__ = ["Circles", "Plain", "Points", "Scaled", "Weighted", "arranged", "into"]


def arranged(x: Array, raw: bool, centre: Array | None = None) -> Array:
    """Return points from their mean, or from a centre; beside them the points as they are if any part is `raw`."""
    centred: Array = x - (np.add.reduce(x, -2, keepdims=True) / x.shape[-2] if centre is None else centre)
    return np.concatenate((centred, x), -1) if raw else centred


def into(by_x: Array, columns: Columns, grad: Array) -> None:
    """Add derivatives by some columns of the points to those by all; a column may be named twice."""
    if isinstance(columns, slice):
        by_x[..., columns] += grad
    else:
        np.add.at(by_x, (..., columns), grad)  # type: ignore[arg-type]


class Points(Protocol):
    """What points become before their distances, or products, are taken."""

    def of(self, x: Array) -> Evaluated:
        """Return points as a part takes them, and what their derivatives need."""

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add derivatives by what `of` returned to those by the points, and by parameters."""


class Plain:
    """Some columns."""

    __slots__ = ("_columns",)

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def of(self, x: Array) -> Evaluated:
        """Return the columns."""
        return x[..., self._columns], None

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add the derivative by the points."""
        if by_x is not None:
            into(by_x, self._columns, by_z)


class Scaled:
    """Points in units of a lengthscale, of each dimension or of all."""

    __slots__ = ("_columns", "_unit")

    def __init__(self, columns: Columns, lengthscale: Parameter) -> None:
        self._columns, self._unit = columns, lengthscale

    def of(self, x: Array) -> Evaluated:
        """Return the scaled points."""
        return x[..., self._columns] / self._unit.value, None

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add the derivatives by lengthscale and points."""
        if theta:
            summed(self._unit, by_z * z / -self._unit.value)
        if by_x is not None:
            into(by_x, self._columns, by_z / self._unit.value)


class Circles:
    """Points on circles of a period, of which an RBF is a periodic kernel; a lengthscale divides squared distances."""

    __slots__ = ("_columns", "_lengthscale", "_period")

    def __init__(self, columns: Columns, lengthscale: Parameter, period: Parameter) -> None:
        self._columns, self._lengthscale, self._period = columns, lengthscale, period

    def of(self, x: Array) -> Evaluated:
        """Return two coordinates for each dimension; the circles touch the origin: short norms nearby."""
        angle = x[..., self._columns] * (2 * math.pi / self._period.value)
        scale = 1.0 / np.sqrt(self._lengthscale.value)
        half, sine = np.sin(0.5 * angle), np.sin(angle) * scale
        depth = half * half * (-2.0 * scale)
        return np.concatenate((sine, depth), -1), (angle, sine, depth + scale)

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add the derivatives by period, lengthscale and points."""
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
    """Points times the root of a variance, of each dimension or of all."""

    __slots__ = ("_columns", "_variance")

    def __init__(self, columns: Columns, variance: Parameter) -> None:
        self._columns, self._variance = columns, variance

    def of(self, x: Array) -> Evaluated:
        """Return the weighted points."""
        plain = x[..., self._columns]
        return plain * np.sqrt(self._variance.value), plain

    def backward(self, z: Array, kept: Any, by_z: Array, by_x: Array | None, theta: bool) -> None:
        """Add the derivatives by variance and points."""
        root = np.sqrt(self._variance.value)
        if theta:
            summed(self._variance, by_z * kept * (0.5 / root))
        if by_x is not None:
            into(by_x, self._columns, by_z * root)
