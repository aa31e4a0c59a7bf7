"""Covariances as functions of squared distances, or of inner products, of points, and their derivatives."""

from __future__ import annotations

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


FORMULAS: dict[str, Formula] = {"rbf": _rbf, "matern12": _matern12, "matern32": _matern32, "matern52": _matern52}
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


def linear(s: Array) -> tuple[Array, None]:
    """Return the inner products unchanged, with a slope of 1."""
    return s, None
