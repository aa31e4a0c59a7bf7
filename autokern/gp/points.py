"""Covariances of a few points with the training points and with each other, by arrays, and their derivatives.

The counterpart of `small` for predictions: a kernel is a tree of parts that hold what they need of the training points
at one state of the model. Arrays are float64 with three axes or four: ``k`` outputs (1 where there is no batch), then
``B = b m`` points in ``b`` sets of ``m``. Nothing here changes after it was made but the gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from autokern.gp import small
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.leaves import Made, called, leaf
from autokern.gp.looked_up import Categories, Evaluated, Table, Wanted, folded, per_model
from autokern.gp.small import Array, Parameter
from autokern.gp.tables import Categorical, Index

__all__ = ["Part", "part_of"]


class Part(Protocol):
    """A part of a kernel, for the training points that it was made for."""

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the covariances of points ``(k, B, d)``, or ``(1, B, d)`` of the same for all outputs."""

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Add the derivatives, of ``g = dL/dcross``, which may be overwritten, and ``h = dL/down``."""


class Leaf:
    """A stationary covariance of points in units of a lengthscale, from the training points' centre.

    A squared distance is one product of points to which their norms are appended.
    """

    __slots__ = ("_back", "_centre", "_columns", "_formula", "_lengthscale", "_right", "_train", "_unit")

    def __init__(self, of: small.Leaf, train: Array) -> None:
        self._formula, self._columns, self._lengthscale = of.formula, of.columns, of.lengthscale
        self._unit = per_model(of.lengthscale.value, len(train), 1, of.lengthscale.value.shape[-1])
        self._centre = train[..., self._columns].mean((0, 1))
        z = self._train = self._scaled(train)
        ones = np.ones((*z.shape[:-1], 1))
        norms = np.einsum("kij,kij->ki", z, z)[..., None]
        self._right = np.ascontiguousarray(np.concatenate((z * -2.0, ones, norms), -1).swapaxes(-1, -2))
        self._back = np.concatenate((z, ones), -1)

    def _scaled(self, x: Array) -> Array:
        scaled: Array = (x[..., self._columns] - self._centre) / self._unit
        return scaled

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the covariances; those of a point with itself are exact."""
        z = self._scaled(x)
        k, points, d = z.shape
        left = np.empty((k, points, d + 2))
        left[..., :d] = z
        norms = np.einsum("kij,kij->ki", z, z, out=left[..., d])
        left[..., d + 1] = 1.0
        s = left @ self._right
        cross, slope = self._formula(np.maximum(s, 0.0, out=s))
        if m == 1:
            return Evaluated(cross, np.ones((k, points, 1, 1)), (z, slope, None))
        sets = z.reshape(k, points // m, m, d)  # without dimensions as well
        s = sets @ sets.swapaxes(-1, -2)
        s *= -2.0
        norms = norms.reshape(k, -1, m)
        s += norms[..., None]
        s += norms[..., None, :]
        np.maximum(s, 0.0, out=s)
        s.reshape(k, -1, m * m)[..., :: m + 1] = 0.0
        own, own_slope = self._formula(s)
        return Evaluated(cross, own, (z, slope, own_slope))

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Add the derivatives by the points and by the lengthscale."""
        z, slope, own_slope = kept
        d = z.shape[-1]
        g *= slope
        across = g @ self._back
        rows, moved = across[..., d:], across[..., :d]
        if own_slope is not None:
            both = h + h.swapaxes(-1, -2)
            both *= own_slope
            own_rows = both.sum(-1).reshape(rows.shape)
            own_moved = (both @ z.reshape(len(z), *both.shape[1:3], d)).reshape(moved.shape)
        if wanted.by_points is not None:
            by_z = z * rows
            by_z -= moved
            if own_slope is not None:
                by_z += z * own_rows
                by_z -= own_moved
            by_z *= 2.0
            by_z /= self._unit
            wanted.by_points[..., self._columns] += by_z
        if wanted.by_parameters:
            total = (z * (z * rows - 2.0 * moved)).sum(1, keepdims=True)
            total += g.sum(1, keepdims=True) @ np.square(self._train)
            if own_slope is not None:
                total += (z * (z * own_rows - own_moved)).sum(1, keepdims=True)
            total *= -2.0
            total /= self._unit
            self._lengthscale.accumulate(folded(total, self._lengthscale))


class Scale:
    """A part times an output scale."""

    __slots__ = ("_part", "_scale", "_value")

    def __init__(self, part: Part, scale: Parameter, models: int) -> None:
        self._part, self._scale = part, scale
        self._value = per_model(scale.value, models, 1, 1)

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the scaled covariances."""
        inner = self._part.evaluate(x, m)
        return Evaluated(inner.cross * self._value, inner.own * self._value[..., None], inner)

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Add the derivative by the scale, and hand the rest on."""
        if wanted.by_parameters:
            total = (g * kept.cross).sum((1, 2)) + (h * kept.own).sum((1, 2, 3))
            self._scale.accumulate(folded(total, self._scale))
        g *= self._value
        self._part.backward(kept.kept, g, h * self._value[..., None], wanted)


class Sum:
    """A sum of parts."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the sums of the covariances."""
        found = [part.evaluate(x, m) for part in self._parts]
        cross, own, kept = found[0].cross.copy(), found[0].own.copy(), [one.kept for one in found]
        for one in found[1:]:
            cross += one.cross
            own += one.own
        return Evaluated(cross, own, kept)

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Hand the derivatives to all parts."""
        for part, own in zip(self._parts, kept, strict=True):
            part.backward(own, g.copy(), h, wanted)


class Product:
    """An elementwise product of parts."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the products of the covariances."""
        found = [part.evaluate(x, m) for part in self._parts]
        crosses, owns = [one.cross for one in found[1:]], [one.own for one in found[1:]]
        return Evaluated(math.prod(crosses, start=found[0].cross), math.prod(owns, start=found[0].own), found)

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Hand each part the derivatives times the covariances of the others."""
        for index, (part, own) in enumerate(zip(self._parts, kept, strict=True)):
            others = kept[:index] + kept[index + 1 :]
            by_cross = math.prod((one.cross for one in others), start=g)
            part.backward(own.kept, by_cross, math.prod((one.own for one in others), start=h), wanted)


def part_of(seen: Inspected, kernel: Any, train: Array) -> Part:
    """Return the evaluation of a kernel that is called, for training points ``(k, n, d)``.

    UnreadError where anything is not exactly known.
    """

    def made(seen: Inspected, kernel: Any, columns: Array | None, dims: int) -> Part:
        found = leaf(seen, kernel, columns, dims)
        if type(found) is Index:
            return Table(found, train)
        if type(found) is Categorical:
            return Categories(found, train)
        if type(found) is not small.Leaf:
            raise UnreadError(f"a kernel {type(kernel).__name__}")
        if columns is not None and len(set(columns.tolist())) < len(columns):
            raise UnreadError("an active dimension that is chosen twice")
        return Leaf(found, train)

    def scaled(seen: Inspected, kernel: Any, inner: Part) -> Part:
        return Scale(inner, seen.parameter(kernel, "raw_outputscale"), len(train))

    whole: Part = called(seen, kernel, None, train.shape[-1], Made(made, scaled, Sum, Product))
    return whole
