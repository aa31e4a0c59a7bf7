"""The building blocks of kernels in NumPy: the interface of a part, and scales, sums and products of parts.

At some tens of points a step's time is call overhead: thirty calls on arrays replace hundreds on tensors. A kernel is a
tree of parts; each evaluates itself, and then adds to the gradients of its parameters (Rasmussen and Williams 2006,
eq. 5.8 and 5.9). All arrays are float64. This module does not depend on torch modules.

Points are ``(..., n, d)``. Parameters of one model have no batch axes; those of several have as many as the points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Columns = Array | slice
"""The columns of the points that a part reads."""
Evaluated = tuple[Array, Any]
"""Covariances, which the caller may overwrite, and the intermediate results for `backward`."""


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
        """Add to the gradient of the scale, and run the part's backward pass."""
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
        """Run the backward passes of all parts."""
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
        """Run each part's backward pass with the derivative times the other parts' covariances."""
        for index, (part, (_, own)) in enumerate(zip(self._parts, kept, strict=True)):
            others = kept[:index] + kept[index + 1 :]
            part.backward(own, math.prod((value for value, _ in others), start=g), by_x, theta)
