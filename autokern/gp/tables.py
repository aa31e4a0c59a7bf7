"""Parts of kernels that are looked up: constants, and covariances of categories and of tasks."""

from __future__ import annotations

import numpy as np

from autokern.gp.parts import Sizeless, summed
from autokern.gp.small import Array, Columns, Parameter

__all__ = ["Categorical", "Constant", "Correlations", "Index"]


class Constant(Sizeless):
    """The same covariance of all points."""

    def __init__(self, constant: Parameter) -> None:
        self._constant = constant

    def evaluate(self, x: Array) -> Array:
        """Return the matrix."""
        return np.full((len(x), len(x)), self._constant.value[0])

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by the constant."""
        self._constant.accumulate(g.sum())


class Categorical(Sizeless):
    """``exp(-mean_i [x_i != x'_i] / lengthscale_i)``."""

    def __init__(self, columns: Columns, lengthscale: Parameter) -> None:
        self.columns, self.lengthscale = columns, lengthscale
        self._seen: Array | None = None

    def evaluate(self, x: Array) -> Array:
        """Return the matrix; where the points differ is kept for as long as they are the same array."""
        if x is not self._seen:
            points = np.ascontiguousarray(x[:, self.columns].T)
            self._differ = np.not_equal(points[:, :, None], points[:, None, :])
            self._seen = x
        d = len(self._differ)
        rates = np.broadcast_to(1.0 / self.lengthscale.value[0], d) / -d
        total = rates[0] * self._differ[0]
        for rate, differ in zip(rates[1:], self._differ[1:], strict=True):
            total += rate * differ
        self._k = np.exp(total, out=total)
        return total.copy()

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by the lengthscale; there is none by the points."""
        g *= self._k
        by_rate = np.array([np.vdot(g, differ) for differ in self._differ])
        summed(self.lengthscale, by_rate / (len(by_rate) * np.square(self.lengthscale.value[0])))


class Index(Sizeless):
    """Covariances of tasks, looked up: ``B B' + diag(v)``, divided by the entry of one task if there is one.

    B is ``(t, r)``, v ``(t,)``, `column` of the points holds the task, `unit` is the task whose variance is 1.
    """

    present: Array  # the covariances of the tasks as of the last evaluation

    def __init__(self, column: int, factor: Parameter, variance: Parameter, unit: int | None = None) -> None:
        self.column, self._factor, self._variance, self._unit = column, factor, variance, unit
        self._seen: Array | None = None

    def table(self) -> Array:
        """Return the covariances of the tasks."""
        factor = self._factor.value
        table: Array = factor @ factor.T
        table.flat[:: len(table) + 1] += self._variance.value
        self._over = 1.0 if self._unit is None else 1.0 / table[self._unit, self._unit]
        table *= self._over
        self.present = table
        return table

    def evaluate(self, x: Array) -> Array:
        """Return the matrix, not a number where a point's task is none."""
        table = self.table()
        if x is not self._seen:
            tasks = x[:, self.column]
            if not (np.abs(tasks) < len(table)).all() or (tasks <= -1).any():
                self._each = np.zeros((len(x), len(table)))
                return np.full((len(x), len(x)), np.nan)
            self._tasks = tasks.astype(np.int64)
            self._each = np.equal(self._tasks[:, None], np.arange(len(table))).astype(np.float64)
            self._seen = x
        return table[self._tasks][:, self._tasks]

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradients by factor and variances; there is none by the points."""
        self.accumulate(self._each.T @ (g @ self._each))

    def accumulate(self, by_table: Array) -> None:
        """Add a derivative by the covariances of the tasks, symmetric."""
        by_table = by_table * self._over
        if self._unit is not None:
            by_table[self._unit, self._unit] -= np.vdot(by_table, self.present)
        self._variance.accumulate(by_table.diagonal())
        self._factor.accumulate(2.0 * (by_table @ self._factor.value))


class Correlations:
    """The correlations between the tasks of a table, each pair once, as of its last evaluation."""

    def __init__(self, table: Index, tasks: int) -> None:
        self._of, self._where = table, np.tril_indices(tasks, -1)

    @property
    def value(self) -> Array:
        """Return the correlations of each task with those before it."""
        table = self._of.present
        self._scale = 1.0 / np.sqrt(table.diagonal())
        self._all = table * np.multiply.outer(self._scale, self._scale)
        found: Array = self._all[self._where]
        return found

    def accumulate(self, grad: Array) -> None:
        """Add a derivative by the correlations to the parameters of the table."""
        each = np.zeros_like(self._all)
        each[self._where] = 0.5 * grad
        each += each.T
        by_table = each * np.multiply.outer(self._scale, self._scale)
        by_table.flat[:: len(each) + 1] -= (each * self._all).sum(1) * np.square(self._scale)
        self._of.accumulate(by_table)
