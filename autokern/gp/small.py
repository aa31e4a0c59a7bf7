"""What kernels as arrays are made of, and the log density of a small Gaussian process by NumPy and LAPACK.

At some tens of points a step is made of calls, not of operations: thirty calls on arrays take the place of hundreds on
tensors. A kernel is a tree of parts; each evaluates itself and then adds its part of the gradient to its parameters
(Rasmussen and Williams 2006, eq. 5.8 and 5.9). All arrays are float64; nothing here knows modules.

Points are ``(..., n, d)``. Parameters of one model have no axes in front; those of several have as many as the points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from autokern.gp.lapack import Array, solved

__all__ = [
    "Array", "Columns", "Density", "Evaluated", "Parameter", "Part", "Product", "Scale", "Sum", "clear_diagonal",
    "density", "over_pairs", "summed",
]  # fmt: skip

Columns = Array | slice
"""Which columns of the points a part takes."""
_LOG_2_PI = math.log(2 * math.pi)
Evaluated = tuple[Array, Any]
"""Covariances, which the caller may overwrite, and what their derivatives need."""


class Parameter(Protocol):
    """A constrained parameter of a model."""

    value: Array

    def accumulate(self, grad: Any) -> None:
        """Add a derivative of the loss by the value."""


class Part(Protocol):
    """A part of a kernel."""

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the covariances of points with each other, or with others.

        What is computed from the others alone is kept for as long as they are the same array, and the parameters too.
        """

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Add ``g = dL/dK``, symmetric without other points, to the gradients of the parameters if `theta`.

        The derivative by the points is added to `by_x` where that is an array of their shape; there is none by other
        points. `g` may be overwritten.
        """


def over_pairs(g: Array, k: Array) -> Any:
    """Return the sums of products of matrices, which stretch over those."""
    return np.vdot(g, k) if g.ndim == 2 else np.einsum("...ij,...ij->...", g, k)[..., None, None]


def summed(parameter: Parameter, grad: Array) -> None:
    """Add a derivative to a parameter, summed over what all share that it stands for."""
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
    """Put zeros on the diagonals of matrices."""
    if g.ndim == 2:
        g.flat[:: len(g) + 1] = 0.0
    else:
        np.einsum("...ii->...i", g)[...] = 0.0


class Scale:
    """A part times an output scale."""

    __slots__ = ("_part", "_scale")

    def __init__(self, part: Part, scale: Parameter) -> None:
        self._part, self._scale = part, scale

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the scaled covariances."""
        inner = self._part.evaluate(x, other)
        return inner[0] * self._scale.value, inner

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Add the gradient by the scale, and hand the rest on."""
        inner, below = kept
        if theta:
            summed(self._scale, over_pairs(g, inner))
        g *= self._scale.value
        self._part.backward(below, g, by_x, theta)


class Sum:
    """A sum of parts."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the sum of the covariances."""
        found = [part.evaluate(x, other) for part in self._parts]
        total = found[0][0]
        for value, _ in found[1:]:
            total = total + value if total.shape != value.shape else np.add(total, value, out=total)
        return total, [kept for _, kept in found]

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Hand the derivative to all parts."""
        for part, own in zip(self._parts[1:], kept[1:], strict=True):
            part.backward(own, g.copy(), by_x, theta)
        self._parts[0].backward(kept[0], g, by_x, theta)


class Product:
    """An elementwise product of parts."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        """Return the product of the covariances."""
        found = [part.evaluate(x, other) for part in self._parts]
        return math.prod((value for value, _ in found[1:]), start=found[0][0]), found

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        """Hand each part the derivative times the other covariances."""
        for index, (part, (_, own)) in enumerate(zip(self._parts, kept, strict=True)):
            others = kept[:index] + kept[index + 1 :]
            part.backward(own, math.prod((value for value, _ in others), start=g), by_x, theta)


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
