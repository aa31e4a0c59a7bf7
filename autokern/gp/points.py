"""Covariances of a few points with the training points and with each other, by arrays, and their derivatives.

The counterpart of `small` for predictions: a kernel is a tree of parts that hold what they need of the training points
at one state of the model. Arrays are float64 with three axes or four: ``k`` outputs (1 where there is no batch), then
``B = b m`` points in ``b`` sets of ``m``. Nothing here changes after it was made but the gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from gpytorch.means import ConstantMean, MultitaskMean, ZeroMean

from autokern.gp import small
from autokern.gp.botorch_inputs import Tasks
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.leaves import Made, called, leaf
from autokern.gp.small import Array, Parameter
from autokern.gp.tables import Categorical, Index

__all__ = ["Evaluated", "Mean", "Part", "Wanted", "part_of"]


class Evaluated(NamedTuple):
    """Covariances, and what their derivatives need."""

    cross: Array  # with the training points, ``(k, B, n)``; never written again
    own: Array  # within each set, ``(k, b, m, m)``; never written again
    kept: Any  # for `Part.backward`


class Wanted(NamedTuple):
    """Which derivatives a backward pass adds up."""

    by_points: Array | None  # derivatives by the points, ``(k, B, d)``, are added to it
    by_parameters: bool  # parameters accumulate theirs


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
        self._unit = _per_model(of.lengthscale.value, len(train), 1, of.lengthscale.value.shape[-1])
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
            if self._unit.shape[-1] == 1:
                total = total.sum(-1)
            self._lengthscale.accumulate(_folded(total, self._lengthscale))


class Scale:
    """A part times an output scale."""

    __slots__ = ("_part", "_scale", "_value")

    def __init__(self, part: Part, scale: Parameter, models: int) -> None:
        self._part, self._scale = part, scale
        self._value = _per_model(scale.value, models, 1, 1)

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the scaled covariances."""
        inner = self._part.evaluate(x, m)
        return Evaluated(inner.cross * self._value, inner.own * self._value[..., None], inner)

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Add the derivative by the scale, and hand the rest on."""
        if wanted.by_parameters:
            total = (g * kept.cross).sum((1, 2)) + (h * kept.own).sum((1, 2, 3))
            self._scale.accumulate(_folded(total, self._scale))
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


class Table:
    """Covariances of tasks, looked up."""

    __slots__ = ("_column", "_each", "_index", "_rows", "_table")

    def __init__(self, of: Index, train: Array) -> None:
        self._index, self._column, self._table = of, of.column, of.table().copy()
        self._each = self._of(train)
        self._rows = (self._each @ self._table).swapaxes(-1, -2)

    def _of(self, x: Array) -> Array:
        """Return for each point, in a row of its own, 1 for its task and 0 for the others."""
        each: Array = np.equal(np.trunc(x[..., self._column, None]), np.arange(len(self._table))).astype(np.float64)
        each[~each.any(-1)] = np.nan  # no task of these: the library decides
        return each

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the covariances."""
        each = self._of(x)
        sets = each.reshape(len(each), -1, m, each.shape[-1])
        return Evaluated(each @ self._rows, sets @ self._table @ sets.swapaxes(-1, -2), each)

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Add the derivatives by factor and variances; there is none by the points."""
        if not wanted.by_parameters:
            return
        sets = kept.reshape(len(kept), *h.shape[1:3], -1)
        total = (kept.swapaxes(-1, -2) @ (g @ self._each)).sum(0)
        total += (sets.swapaxes(-1, -2) @ (h @ sets)).sum((0, 1))
        self._index.accumulate(0.5 * (total + total.T))


class Categories:
    """``exp(-mean_i [x_i != x'_i] / lengthscale_i)``."""

    __slots__ = ("_columns", "_lengthscale", "_train", "_unit")

    def __init__(self, of: Categorical, train: Array) -> None:
        self._columns, self._lengthscale = of.columns, of.lengthscale
        self._train = train[..., None, :, self._columns]
        self._unit = _per_model(of.lengthscale.value, len(train), 1, 1, of.lengthscale.value.shape[-1])

    def evaluate(self, x: Array, m: int) -> Evaluated:
        """Return the covariances."""
        z = x[..., self._columns]
        sets = z.reshape(len(z), -1, m, z.shape[-1])
        across, within = z[..., None, :] != self._train, sets[..., None, :] != sets[..., None, :, :]
        cross = np.exp((across / -self._unit).mean(-1))
        own = np.exp((within / -self._unit[:, None]).mean(-1))
        return Evaluated(cross, own, (across, within, cross, own))

    def backward(self, kept: Any, g: Array, h: Array, wanted: Wanted) -> None:
        """Add the derivative by the lengthscale; there is none by the points."""
        if not wanted.by_parameters:
            return
        across, within, cross, own = kept
        total = ((g * cross)[..., None] * across).sum((1, 2)) + ((h * own)[..., None] * within).sum((1, 2, 3))
        unit = self._unit[:, 0, 0]
        total = total / (across.shape[-1] * np.square(unit))
        if unit.shape[-1] == 1:
            total = total.sum(-1)
        self._lengthscale.accumulate(_folded(total, self._lengthscale))


class Mean:
    """The mean of a model: zero, a constant, or a constant for each task."""

    def __init__(self, seen: Inspected, mean: Any, models: int, tasks: Tasks | None) -> None:
        self._column, constants = None, [mean]
        if tasks is not None and type(mean) is MultitaskMean:
            self._column = tasks.column
            several = seen.module(mean, "base_means")
            constants = [seen.module(several, name) for name in several._modules]
            if len(constants) < len(tasks.values):
                raise UnreadError("tasks without a mean")
        if type(mean) is ZeroMean:
            constants = []
        for constant in constants or [mean]:
            if type(constant) not in (ConstantMean, ZeroMean) or constant.batch_shape != seen.batch:
                raise UnreadError(f"a mean {type(constant).__name__}, or one of another batch")
        self._constants = [seen.parameter(constant, "raw_constant") for constant in constants]
        self._values = [_per_model(constant.value, models, 1, 1) for constant in self._constants]
        self.tensors = {id(constant._parameters["raw_constant"]) for constant in constants}

    def _shares(self, x: Array) -> list[Any]:
        """Return which points have each constant."""
        if self._column is None:
            return [1.0] * len(self._constants)
        return [np.equal(x[..., self._column, None], task) for task in range(len(self._constants))]

    def add(self, x: Array, values: Array) -> None:
        """Add the mean at points ``(k, B, d)`` to values ``(k, B, 1)``."""
        for share, value in zip(self._shares(x), self._values, strict=True):
            values += share * value

    def backward(self, x: Array, slopes: Array) -> None:
        """Add the derivatives by the constants, of those by each point's mean."""
        for share, constant in zip(self._shares(x), self._constants, strict=True):
            constant.accumulate(_folded((slopes * share).sum((1, 2)), constant))


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


def _per_model(value: Array, models: int, *shape: int) -> Array:
    """Return a copy of a value of the last dimensions of a batch, or of none, for each of its models."""
    each = value.reshape(-1, *shape)
    return each.copy() if len(each) in (1, models) else np.tile(each, (models // len(each), *(1 for _ in shape)))


def _folded(slopes: Array, parameter: Parameter) -> Array:
    """Return derivatives by what `_per_model` returned, ``(k, ...)``, as those by the value of a parameter."""
    total: Array = slopes.reshape(-1, *parameter.value.shape).sum(0)
    return total
