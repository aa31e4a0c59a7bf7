"""Kernels of small models in NumPy: parts that evaluate themselves and take their derivatives.

At some tens of points a step's time is call overhead: thirty calls on arrays replace hundreds on tensors. A kernel is a
tree of parts; each evaluates itself, and then adds to the gradients of its parameters (Rasmussen and Williams 2006,
eq. 5.8 and 5.9). All arrays are float64. No part is a torch module.

Points are ``(..., n, d)``. Parameters of one model have no batch axes; those of several have as many as the points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from autokern.kernels.stationary import exp_

Array = np.ndarray[Any, Any]
Columns = Array | slice  # the columns of the points that a part reads
Evaluated = tuple[Array, Any]  # covariances, which the caller may overwrite, and intermediate results for `backward`
_MANY = 2**13  # elements from which torch's calls pay


class Parameter(Protocol):
    """A constrained parameter of a model."""

    value: Array

    def accumulate(self, grad: Any) -> None:
        """Add a derivative of the loss by the value."""


class Part(Protocol):
    """A part of a kernel."""

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the covariances of points with each other, or with `other` points.

        Results that depend on `other` alone are cached while it is the same array; parameters must not change then.
        """

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Add to the gradients of the parameters if `theta`, and to `by_x` if it is given, from ``g = dL/dK``.

        `g` is symmetric if there were no other points, and may be overwritten. Other points get no gradient.
        """


def exponential(a: Array) -> Array:
    """Replace the elements of an array by their exponentials, and return it."""
    if a.size < _MANY:
        return np.exp(a, out=a)
    exp_(torch.from_numpy(a))  # without AVX-512, NumPy's exponential takes three times as long
    return a


def over_pairs(g: Array, k: Array) -> Any:
    """Return ``sum(g * k)`` over the last two axes, in a shape that broadcasts over the matrices."""
    return np.vdot(g, k) if g.ndim == 2 else np.einsum("...ij,...ij->...", g, k)[..., None, None]


def summed(parameter: Parameter, grad: Array) -> None:
    """Add a gradient to a parameter, summed over the axes along which the parameter was broadcast."""
    shape = parameter.value.shape
    if parameter.value.size == 1:
        grad = np.add.reduce(grad, None)
    elif grad.shape != shape and grad.ndim == 2:
        grad = np.add.reduce(grad, 0)
    elif grad.shape != shape:
        more = grad.ndim - len(shape)
        axes = tuple([i for i in range(grad.ndim) if i < more or shape[i - more] == 1])
        grad = np.add.reduce(grad, axes).reshape(shape)
    parameter.accumulate(grad)


def clear_diagonal(g: Array) -> None:
    """Set the diagonals of matrices to zero."""
    if g.ndim == 2:
        g.flat[:: len(g) + 1] = 0.0
    else:
        np.einsum("...ii->...i", g)[...] = 0.0


def into(by_x: Array, columns: Columns, grad: Array) -> None:
    """Add the gradient by some columns of the points to `by_x`; a column may occur twice."""
    if isinstance(columns, slice):
        by_x[..., columns] += grad
    else:
        np.add.at(by_x, (..., columns), grad)  # type: ignore[arg-type]


class Scale:
    """A part times an output scale."""

    def __init__(self, part: Part, scale: Parameter) -> None:
        self._part, self._scale = part, scale

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        inner = self._part.evaluate(x, other)
        return inner[0] * self._scale.value, inner

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        inner, below = kept
        if theta:
            summed(self._scale, over_pairs(g, inner))
        g *= self._scale.value
        self._part.backward(below, g, by_x, theta)


class _Several:
    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)


class Sum(_Several):
    """A sum of parts."""

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        found = [part.evaluate(x, other) for part in self._parts]
        total = found[0][0]
        for value, _ in found[1:]:
            total = total + value if total.shape != value.shape else np.add(total, value, out=total)
        return total, [kept for _, kept in found]

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        for part, own in zip(self._parts[1:], kept[1:], strict=True):
            part.backward(own, g.copy(), by_x, theta)
        self._parts[0].backward(kept[0], g, by_x, theta)


class Product(_Several):
    """An elementwise product of parts."""

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        found = [part.evaluate(x, other) for part in self._parts]
        return math.prod((value for value, _ in found[1:]), start=found[0][0]), found

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        for index, (part, (_, own)) in enumerate(zip(self._parts, kept, strict=True)):
            others = kept[:index] + kept[index + 1 :]
            part.backward(own, math.prod((value for value, _ in others), start=g), by_x, theta)


class Constant:
    """The same covariance for all pairs of points."""

    def __init__(self, constant: Parameter) -> None:
        self._constant = constant

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        others = x if other is None else other
        shape = np.broadcast_shapes(x.shape[:-2], others.shape[:-2], self._constant.value.shape[:-2])
        return np.broadcast_to(self._constant.value, (*shape, x.shape[-2], others.shape[-2])).copy(), None

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        if theta:
            summed(self._constant, g)


class Same:
    """A function's result, cached while its argument is the same array."""

    held: tuple[Array | None, Any] = None, None

    def of(self, x: Array, make: Callable[[Array], Any]) -> Any:
        """Return ``make(x)``, or the cached result."""
        known, found = self.held
        if known is not x:
            found = make(x)
            self.held = x, found
        return found


class Categorical:
    """``exp(-mean_i [x_i != x'_i] / lengthscale_i)``."""

    def __init__(self, columns: Columns, lengthscale: Parameter) -> None:
        self._columns, self._lengthscale, self._alike = columns, lengthscale, Same()

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        if other is None and x.shape[-2] == 1:
            return np.ones((*x.shape[:-1], 1)), None
        differ = self._alike.of(x, lambda x: self._differ(x, x)) if other is None else self._differ(x, other)
        unit = self._lengthscale.value
        rates = np.broadcast_to(-1.0 / (len(differ) * unit), (*unit.shape[:-1], len(differ)))
        total = rates[..., :1] * differ[0]
        for i, each in enumerate(differ[1:], 1):
            total += rates[..., i : i + 1] * each
        k = exponential(total)
        return k.copy(), (differ, k)

    def _differ(self, x: Array, other: Array) -> list[Array]:
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


class Index:
    """Covariances of tasks, ``B B' + diag(v)``, divided by the variance of the task `unit` if that is given.

    B is ``(t, r)``, v is ``(t,)``; `column` of the points holds the task.
    """

    present: Array  # the covariances of the tasks in the last evaluation

    def __init__(self, column: int, factor: Parameter, variance: Parameter, unit: int | None = None) -> None:
        self._column, self._factor, self._variance, self._unit = column, factor, variance, unit
        self._own, self._others = Same(), Same()

    def _table(self) -> Array:
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
            one, (two, rows) = self._each(x), self._others.of(other, self._rows)
            return one @ rows, (one, two)
        one = self._own.of(x, self._each)
        table = self._table() if self._others.held[0] is None else self.present
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
        """Add to the gradients of factor and variances, from the symmetric gradient by the tasks' covariances."""
        by_table = by_table * self._over
        if self._unit is not None:
            by_table[..., self._unit, self._unit, None, None] -= over_pairs(by_table, self.present)
        summed(self._variance, by_table.diagonal(0, -2, -1)[..., None, :])
        summed(self._factor, 2.0 * (by_table @ self._factor.value))


class Correlations:
    """The correlations between the tasks of an `Index`, as of its last evaluation; each pair occurs once."""

    def __init__(self, table: Index, tasks: int) -> None:
        self._of, self._where = table, np.tril_indices(tasks, -1)

    @property
    def value(self) -> Array:
        """The correlations of each task with the tasks before it."""
        table = self._of.present
        self._scale = 1.0 / np.sqrt(table.diagonal())
        self._all = table * np.multiply.outer(self._scale, self._scale)
        return self._all[self._where]

    def accumulate(self, grad: Array) -> None:
        """Add to the gradients of the table's parameters, from the gradient by the correlations."""
        each = np.zeros_like(self._all)
        each[self._where] = 0.5 * grad
        each += each.T
        by_table = each * np.multiply.outer(self._scale, self._scale)
        by_table.flat[:: len(each) + 1] -= (each * self._all).sum(1) * np.square(self._scale)
        self._of.accumulate(by_table)
