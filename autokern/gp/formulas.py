"""Stationary covariances as functions of squared distances, by NumPy, with their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["FAMILIES", "Array", "Formula"]

Array = np.ndarray[Any, Any]
Formula = Callable[[Array], tuple[Array, Array]]
"""Maps squared distances to the covariance and its derivative by them; may overwrite its argument."""


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
