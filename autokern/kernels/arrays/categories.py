"""Constant kernels, and kernels of categories and tasks, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autokern.kernels.arrays.part import Array, Columns, Evaluated, Parameter, over_pairs, summed


class Constant:
    """The same covariance for all pairs of points."""

    def __init__(self, constant: Parameter) -> None:
        self._constant = constant

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the covariances."""
        others = x if other is None else other
        shape = np.broadcast_shapes(x.shape[:-2], others.shape[:-2], self._constant.value.shape[:-2])
        found = np.empty((*shape, x.shape[-2], others.shape[-2]))
        found[...] = self._constant.value
        return found, None

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Add to the gradient of the constant."""
        if theta:
            summed(self._constant, g)


class _LookedUp:
    """A part without a gradient by the points; results for points are cached while they are the same array."""

    def __init__(self) -> None:
        self._seen: list[Any] = [(None, None), (None, None)]

    def _kept(self, place: int, x: Array, make: Callable[[], Any]) -> Any:
        known, found = self._seen[place]
        if known is not x:
            found = make()
            self._seen[place] = x, found
        return found


class Categorical(_LookedUp):
    """``exp(-mean_i [x_i != x'_i] / lengthscale_i)``."""

    def __init__(self, columns: Columns, lengthscale: Parameter) -> None:
        super().__init__()
        self._columns, self._lengthscale = columns, lengthscale

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the covariances."""
        if other is None and x.shape[-2] == 1:
            return np.ones((*x.shape[:-1], 1)), None
        differ = self._differ(x, other) if other is not None else self._kept(0, x, lambda: self._differ(x, x))
        unit = self._lengthscale.value
        rates = np.broadcast_to(-1.0 / (len(differ) * unit), (*unit.shape[:-1], len(differ)))
        total = rates[..., :1] * differ[0]
        for i, each in enumerate(differ[1:], 1):
            total += rates[..., i : i + 1] * each
        k = np.exp(total, out=total)
        return k.copy(), (differ, k)

    def _differ(self, x: Array, other: Array) -> list[Array]:
        """Return for each column the mask of the pairs that differ."""
        one, two = (np.moveaxis(p[..., self._columns], -1, 0) for p in (x, other))
        return [p[..., None] != q[..., None, :] for p, q in zip(one, two, strict=True)]

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Add to the gradient of the lengthscale; the points get none."""
        if not theta or kept is None:
            return
        differ, k = kept
        g *= k
        by_rate = np.concatenate([np.atleast_2d(over_pairs(g, each)) for each in differ], -1)
        summed(self._lengthscale, by_rate / (len(differ) * np.square(self._lengthscale.value)))


class Index(_LookedUp):
    """Covariances of tasks, ``B B' + diag(v)``, divided by the variance of the task `unit` if that is given.

    B is ``(t, r)``, v is ``(t,)``; `column` of the points holds the task.
    """

    present: Array  # the covariances of the tasks in the last evaluation

    def __init__(self, column: int, factor: Parameter, variance: Parameter, unit: int | None = None) -> None:
        super().__init__()
        self._column, self._factor, self._variance, self._unit = column, factor, variance, unit

    def _table(self) -> Array:
        """Return the covariances of the tasks."""
        factor = self._factor.value
        table: Array = factor @ factor.swapaxes(-1, -2)
        np.einsum("...ii->...i", table)[...] += self._variance.value.reshape(table.shape[:-1])
        self._over = 1.0 if self._unit is None else 1.0 / table[..., self._unit, self._unit, None, None]
        table *= self._over
        self.present = table
        return table

    def _each(self, x: Array) -> Array:
        """Return each point's task as a one-hot row, NaN for an unknown task."""
        table = self._factor.value.shape[-2]
        each: Array = np.equal(np.trunc(x[..., self._column, None]), np.arange(table)).astype(np.float64)
        each[~each.any(-1)] = np.nan
        return each

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the covariances, NaN for unknown tasks."""
        if other is not None:
            one, (two, rows) = self._each(x), self._kept(1, other, lambda: self._rows(other))
            return one @ rows, (one, two)
        one = self._kept(0, x, lambda: self._each(x))
        table = self._table() if self._seen[1][0] is None else self.present
        return one @ table @ one.swapaxes(-1, -2), (one, one)

    def _rows(self, x: Array) -> tuple[Array, Array]:
        """Return each point's task as a one-hot row, and the covariances of all tasks with the points."""
        each = self._each(x)
        return each, self._table() @ each.swapaxes(-1, -2)

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Add to the gradients of factor and variances; the points get none."""
        if theta:
            one, two = kept
            by_table = one.swapaxes(-1, -2) @ (g @ two)
            self.accumulate(by_table if one is two else 0.5 * (by_table + by_table.swapaxes(-1, -2)))

    def accumulate(self, by_table: Array) -> None:
        """Add to the gradients of factor and variances, given the symmetric one by the tasks' covariances."""
        by_table = by_table * self._over
        if self._unit is not None:
            by_table[..., self._unit, self._unit, None, None] -= over_pairs(by_table, self.present)
        summed(self._variance, by_table.diagonal(0, -2, -1)[..., None, :])
        summed(self._factor, 2.0 * (by_table @ self._factor.value))


class Correlations:
    """The correlations between the tasks of an `Index`, each pair once, in its last evaluation."""

    def __init__(self, table: Index, tasks: int) -> None:
        self._of, self._where = table, np.tril_indices(tasks, -1)

    @property
    def value(self) -> Array:
        """The correlations of each task with the tasks before it."""
        table = self._of.present
        self._scale = 1.0 / np.sqrt(table.diagonal())
        self._all = table * np.multiply.outer(self._scale, self._scale)
        found: Array = self._all[self._where]
        return found

    def accumulate(self, grad: Array) -> None:
        """Add to the gradients of the table's parameters, given the one by the correlations."""
        each = np.zeros_like(self._all)
        each[self._where] = 0.5 * grad
        each += each.T
        by_table = each * np.multiply.outer(self._scale, self._scale)
        by_table.flat[:: len(each) + 1] -= (each * self._all).sum(1) * np.square(self._scale)
        self._of.accumulate(by_table)
