"""What predictions at a few points look up: covariances of tasks and of categories, and constants of the mean.

Parts of kernels, as `points` has them, that no squared distance leads to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gpytorch.means import ConstantMean, MultitaskMean, ZeroMean

from autokern.gp.botorch_inputs import Tasks
from autokern.gp.inspected import Inspected, UnreadError
from autokern.gp.small import Array, Parameter
from autokern.gp.tables import Categorical, Index

__all__ = ["Categories", "Evaluated", "Mean", "Table", "Wanted", "folded", "per_model"]


class Evaluated(NamedTuple):
    """Covariances, and what their derivatives need."""

    cross: Array  # with the training points, ``(k, B, n)``; never written again
    own: Array  # within each set, ``(k, b, m, m)``; never written again
    kept: Any  # for `Part.backward`


class Wanted(NamedTuple):
    """Which derivatives a backward pass adds up."""

    by_points: Array | None  # derivatives by the points, ``(k, B, d)``, are added to it
    by_parameters: bool  # parameters accumulate theirs


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
        self._unit = per_model(of.lengthscale.value, len(train), 1, 1, of.lengthscale.value.shape[-1])

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
        total = total / (across.shape[-1] * np.square(self._unit[:, 0, 0]))
        self._lengthscale.accumulate(folded(total, self._lengthscale))


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
        self._values = [per_model(constant.value, models, 1, 1) for constant in self._constants]
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
            constant.accumulate(folded((slopes * share).sum((1, 2)), constant))


def per_model(value: Array, models: int, *shape: int) -> Array:
    """Return a copy of a value of the last dimensions of a batch, or of none, for each of its models."""
    each = value.reshape(-1, *shape)
    return each.copy() if len(each) in (1, models) else np.tile(each, (models // len(each), *(1 for _ in shape)))


def folded(slopes: Array, parameter: Parameter) -> Array:
    """Return derivatives by what `per_model` returned, ``(k, ...)``, as those by the value of a parameter.

    Those by several dimensions that have one value are summed.
    """
    if slopes.ndim > 1 and parameter.value.shape[-1:] == (1,):
        slopes = slopes.sum(-1)
    total: Array = slopes.reshape(-1, *parameter.value.shape).sum(0)
    return total
