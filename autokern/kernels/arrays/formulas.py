"""Covariances as functions of squared distances, or of inner products, of points, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autokern.kernels.arrays.part import Array, Parameter

Formula = Callable[[Array], Sequence[Any]]
"""Maps squared distances, or inner products, to covariance and slope, None for a slope of 1; may overwrite its input.

A formula with a parameter returns third a function that computes the derivative by that parameter.
"""


def _rbf(s: Array) -> tuple[Array, Array]:
    s *= -0.5
    k = np.exp(s, out=s)
    return k, k * -0.5


def _matern12(s: Array) -> tuple[Array, Array]:
    r = np.sqrt(s, out=s)
    k = np.exp(-r)
    slope = k * -0.5
    slope /= np.where(r > 0.0, r, np.inf)  # at zero distance the gradient is zero
    return k, slope


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


FORMULAS: dict[str, Formula] = {
    "rbf": _rbf, "matern12": _matern12, "matern32": _matern32, "matern52": _matern52, "cosine": _cosine
}  # fmt: skip
"""All but `matern12` are smooth at distance zero, where squared distances by inner products lose digits."""


def rational(alpha: Parameter) -> Formula:
    """Return the rational quadratic ``(1 + s / 2 alpha) ** -alpha``."""

    def formula(w: Array) -> Sequence[Any]:
        w *= 0.5 / alpha.value
        log, w1 = np.log1p(w), w + 1.0
        k = np.exp(log * -alpha.value)
        slope = k * -0.5
        slope /= w1
        return k, slope, lambda: -2.0 * slope * (w - w1 * log)

    return formula


def piecewise(dims: int, q: int) -> Formula:
    """Return gpytorch's piecewise polynomial ``(1 - r)_+ ** (j + q) P(r)`` for ``q > 0``, where it is smooth."""
    j = dims // 2 + q + 1
    of = {1: (1, j + 1), 2: (1, j + 2, (j + 4 * j + 3) / 3)}
    of[3] = 1, j + 3, (6 * j**2 + 36 * j + 45) / 15, (j**3 + 9 * j**2 + 23 * j + 15) / 15
    p = np.polynomial.Polynomial(np.array(of[q], np.float64))
    e = j + q
    by_r: Any = np.polynomial.Polynomial(np.array([1.0, -1.0])) * p.deriv() - e * p  # times (1 - r) ** (e - 1)
    slopes = np.polynomial.Polynomial(0.5 * by_r.coef[1:])  # by the squared distance: divided by 2 r

    def formula(s: Array) -> Sequence[Any]:
        r = np.sqrt(s, out=s)
        gap = np.maximum(1.0 - r, 0.0)
        power = gap ** (e - 1)
        return power * gap * p(r), power * slopes(r)

    return formula


def linear(s: Array) -> tuple[Array, None]:
    """Return the inner products unchanged, with a slope of 1."""
    return s, None


def polynomial(offset: Parameter, power: float) -> Formula:
    """Return ``(s + offset) ** power``."""

    def formula(s: Array) -> Sequence[Any]:
        s += offset.value
        slope = power * s ** (power - 1)
        return s**power, slope, lambda: slope

    return formula
