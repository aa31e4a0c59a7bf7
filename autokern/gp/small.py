"""The log density of a small Gaussian process by NumPy and LAPACK, and its gradients, without autograd.

At some tens of points a step is made of calls, not of operations: thirty calls on arrays take the place of hundreds on
tensors. A kernel is a tree of parts; each evaluates itself and then adds its part of the gradient to its parameters
(Rasmussen and Williams 2006, eq. 5.8 and 5.9). All arrays are float64; nothing here knows modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from autokern.gp.lapack import Array, solved

__all__ = [
    "FAMILIES", "Array", "Columns", "Density", "Formula", "Leaf", "Parameter", "Part", "Product", "Scale", "Sized",
    "Sum", "density", "into", "squared",
]  # fmt: skip

Formula = Callable[[Array], tuple[Array, Array]]
"""Maps squared distances to the covariance and its derivative by them; may overwrite its argument."""
Columns = Array | slice
"""Which columns of the points a part takes."""
_LOG_2_PI = math.log(2 * math.pi)
_sum = np.add.reduce


class Parameter(Protocol):
    """A constrained parameter of a model."""

    value: Array

    def accumulate(self, grad: Any) -> None:
        """Add a derivative of the loss by the value."""


class Part(Protocol):
    """A part of a kernel."""

    def evaluate(self, x: Array) -> Array:
        """Return the matrix of points ``(n, d)``; it may be overwritten by the caller."""

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add ``g = dL/dK``, symmetric, to the gradients of the parameters; `g` may be overwritten.

        The derivative by the points is added to `by_x` where that is an array of their shape.
        """

    def size(self) -> float:
        """Return the largest scaled squared norm of the points of the last evaluation."""


def squared(z: Array) -> Array:
    """Return the squared distances of points; the diagonal is exact."""
    s: Array = z @ z.T
    norms = s.diagonal().copy()
    s *= -2.0
    s += norms
    s += norms[:, None]
    return np.maximum(s, 0.0, out=s)


def into(by_x: Array, columns: Columns, grad: Array) -> None:
    """Add derivatives by some columns of the points to those by all; a column may be named twice."""
    if isinstance(columns, slice):
        by_x[:, columns] += grad
    else:
        np.add.at(by_x.T, columns, grad.T)


def _rbf(s: Array) -> tuple[Array, Array]:
    s *= -0.5
    k = np.exp(s, out=s)
    return k, k * -0.5


def _matern32(s: Array) -> tuple[Array, Array]:
    s *= 3.0
    r = np.sqrt(s, out=s)
    e = np.exp(-r)
    slope = e * -1.5
    r += 1.0
    r *= e
    return r, slope


def _matern52(s: Array) -> tuple[Array, Array]:
    s *= 5.0
    r = np.sqrt(s)
    e = np.exp(-r)
    r += 1.0
    slope = r * e
    slope *= -5 / 6
    s *= 1 / 3
    s += r
    s *= e
    return s, slope


def _cosine(s: Array) -> tuple[Array, Array]:
    r = np.sqrt(s, out=s)
    slope = np.sinc(r)
    slope *= -0.5 * math.pi**2
    r *= math.pi
    return np.cos(r, out=r), slope


FAMILIES: dict[str, Formula] = {"rbf": _rbf, "matern32": _matern32, "matern52": _matern52, "cosine": _cosine}
"""Those that are smooth where points meet: squared distances by products of points have lost digits there."""


class Sized:
    """A part of scaled points, kept from the last evaluation."""

    __slots__ = ()
    _z: Array

    def size(self) -> float:
        """Return the largest scaled squared norm of the points."""
        return float(np.square(self._z).sum(-1).max())


class Leaf(Sized):
    """A stationary covariance (`FAMILIES`) of points in units of a lengthscale ``(1, d)`` or ``(1, 1)``."""

    __slots__ = ("_slope", "_z", "columns", "formula", "lengthscale")

    def __init__(self, formula: Formula, columns: Columns, lengthscale: Parameter) -> None:
        self.formula, self.columns, self.lengthscale = formula, columns, lengthscale

    def evaluate(self, x: Array) -> Array:
        """Return the matrix; the diagonal is exact."""
        self._z = x[:, self.columns] / self.lengthscale.value
        k, self._slope = self.formula(squared(self._z))
        return k

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by the lengthscale, and by the points."""
        z, lengthscale = self._z, self.lengthscale
        g *= self._slope
        g.flat[:: len(z) + 1] = 0.0
        sums, mixed = _sum(g, 1), g @ z
        by_dimension = (sums @ (z * z) - _sum(z * mixed, 0)) * -4.0
        if by_x is not None:
            into(by_x, self.columns, (sums[:, None] * z - mixed) * (4.0 / lengthscale.value))
        if lengthscale.value.size == 1:
            by_dimension = _sum(by_dimension)
        lengthscale.accumulate(by_dimension / lengthscale.value)


class Scale:
    """A part times an output scale, shape ``()``."""

    __slots__ = ("_inner", "_part", "_scale")

    def __init__(self, part: Part, scale: Parameter) -> None:
        self._part, self._scale = part, scale

    def evaluate(self, x: Array) -> Array:
        """Return the scaled matrix."""
        self._inner = self._part.evaluate(x)
        return self._inner * self._scale.value

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by the scale, and hand the rest on."""
        self._scale.accumulate(np.vdot(g, self._inner))
        g *= self._scale.value
        self._part.backward(g, by_x)

    def size(self) -> float:
        """Return the largest scaled squared norm of the points."""
        return self._part.size()


class _Several:
    """Parts that are combined."""

    __slots__ = ("_parts", "_values")

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def size(self) -> float:
        """Return the largest scaled squared norm of the points."""
        return max(part.size() for part in self._parts)


class Sum(_Several):
    """A sum of parts."""

    __slots__ = ()

    def evaluate(self, x: Array) -> Array:
        """Return the sum of the matrices."""
        total = self._parts[0].evaluate(x)
        for part in self._parts[1:]:
            total += part.evaluate(x)
        return total

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Hand the derivative to all parts."""
        for part in self._parts[1:]:
            part.backward(g.copy(), by_x)
        self._parts[0].backward(g, by_x)


class Product(_Several):
    """An elementwise product of parts."""

    __slots__ = ()

    def evaluate(self, x: Array) -> Array:
        """Return the product of the matrices."""
        values = self._values = [part.evaluate(x) for part in self._parts]
        return math.prod(values[1:], start=values[0])

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Hand each part the derivative times the other matrices."""
        for index, part in enumerate(self._parts):
            others = self._values[:index] + self._values[index + 1 :]
            part.backward(math.prod(others, start=g), by_x)


class Density(NamedTuple):
    """A log density, and its derivatives times a factor."""

    value: float
    by_matrix: Array  # by the covariance, ``(n, n)``, symmetric
    by_residual: Array  # ``(n,)``


def density(k: Array, residual: Array, factor: float) -> Density | None:
    """Return the log density of a residual under a covariance, None where the covariance cannot be factorised.

    `k` is row-major and with noise, and is overwritten; `factor` is that of the derivatives.
    """
    found = solved(k, residual)
    if found is None:
        return None
    logdet, a, w = found
    value = -0.5 * (float(residual @ a) + logdet + len(residual) * _LOG_2_PI)
    w -= a[:, None] * a
    w *= -0.5 * factor
    return Density(value, w, a * -factor)
