"""Covariances in NumPy as functions of squared distances, inner products or differences of points, with derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autokern.kernels import array_parts as parts
from autokern.kernels.array_parts import Array, Columns, Evaluated, Parameter, clear_diagonal, into, over_pairs, summed

_GAUSSIAN = -2 * math.pi**2
Formula = Callable[..., Sequence[Any]]
"""Maps squared distances or inner products to covariance and slope (None for 1), and may overwrite its input.

A formula with a parameter takes its value as second argument. Its third result is a function that returns the
derivative by this parameter.
"""


def _rbf(s: Array) -> tuple[Array, Array]:
    s *= -0.5
    k = parts.exponential(s)
    return k, k * -0.5


def _matern12(s: Array) -> tuple[Array, Array]:
    r = np.sqrt(s, out=s)
    k = parts.exponential(-r)
    slope = k * -0.5
    slope /= np.where(r > 0.0, r, np.inf)  # at zero distance the gradient is zero
    return k, slope


def _matern32(s: Array) -> tuple[Array, Array]:
    s *= 3.0
    r = np.sqrt(s, out=s)
    e = parts.exponential(-r)
    slope = e * -1.5
    r += 1.0
    r *= e
    return r, slope


def _matern52(s: Array) -> tuple[Array, Array]:
    s *= 5.0
    r = np.sqrt(s)
    e = parts.exponential(-r)
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


def rational(w: Array, alpha: Array) -> Sequence[Any]:
    """Return the rational quadratic ``(1 + s / 2 alpha) ** -alpha``."""
    w *= 0.5 / alpha
    log, w1 = np.log1p(w), w + 1.0
    k = parts.exponential(log * -alpha)
    slope = k * -0.5
    slope /= w1
    return k, slope, lambda: -2.0 * slope * (w - w1 * log)


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


def polynomial(s: Array, offset: Array, power: float) -> Sequence[Any]:
    """Return ``(s + offset) ** power``."""
    s = s + offset  # offsets of several models broadcast over points that the models share
    slope = power * s ** (power - 1)
    return s**power, slope, lambda: slope


def powered(s: Array, power: Array, sign: float = 1.0) -> Sequence[Any]:
    """Return ``(1 + |s|) ** power``, or its reciprocal if the `sign` is -1."""
    log, rate = np.log1p(np.abs(s)), sign * power
    slope = rate * parts.exponential(log * (rate - 1.0))
    if sign < 0:
        slope *= np.sign(s)  # at a sum of zero the gradient is zero
    return parts.exponential(log * rate), slope, lambda: parts.exponential(log * rate) * (sign * log)


class SpectralMixture:
    """``prod_d sum_q w_q exp(-2 pi^2 v_qd^2 t_d^2) cos(2 pi mu_qd t_d)`` of differences ``t`` (Wilson and Adams 2013).

    The cosine of a difference is a sum of products of cosines and sines of the points, so a pair of points costs only
    an exponential. Weights are ``(q,)``, means and scales ``(q, 1, d)``.
    """

    def __init__(self, columns: Columns, weights: Parameter, means: Parameter, scales: Parameter) -> None:
        self._columns, self._weights, self._means, self._scales = columns, weights, means, scales
        self._others = parts.Same()

    def _of(self, x: Array) -> tuple[Array, Array, Array]:
        """Return the columns of the points, their angles ``(..., q, n, d)``, and the angles' cosines and sines."""
        z = x[..., self._columns]
        angles = 2 * math.pi * self._means.value * z[..., None, :, :]
        return z, angles, np.stack((np.cos(angles), np.sin(angles)), -1)

    def evaluate(self, x: Array, other: Array | None = None) -> Evaluated:
        one = self._of(x)
        two = one if other is None else self._others.of(other, self._of)
        kept = [self._dimension(k, one, two) for k in range(one[0].shape[-1])]
        factors = [total for total, _, _ in kept]
        return math.prod(factors[1:], start=factors[0]), (one, two, factors, kept)

    def _dimension(self, k: int, one: Any, two: Any) -> tuple[Array, Array, list[tuple[Array, Array]]]:
        """Return for a dimension the sum over the mixture, the differences, and each term without and with cosine."""
        gaps = one[0][..., k, None] - two[0][..., None, :, k]
        apart = gaps * gaps
        total, terms = 0.0, []
        for q in range(one[1].shape[-3]):
            weight, _, scale = self._at(q, k)
            gaussian = apart * (_GAUSSIAN * scale * scale)
            parts.exponential(gaussian)
            wave = one[2][..., q, :, k, :] @ two[2][..., q, :, k, :].swapaxes(-1, -2)
            wave *= gaussian
            total = total + weight * wave
            terms.append((gaussian, wave))
        return total, gaps, terms  # type: ignore[return-value]

    def backward(self, kept: Any, g: Array, by_x: Array | None = None, theta: bool = True) -> None:
        one, two, factors, dimensions = kept
        alike, count = two is one, one[1].shape[-3]
        grads = np.zeros((3, len(dimensions), count, *g.shape[:-2]))
        by_z = np.zeros((*g.shape[:-1], len(dimensions)))
        for k, (_, gaps, terms) in enumerate(dimensions):
            own, here, there = math.prod(factors[:k] + factors[k + 1 :], start=g), one[0][..., [k]], two[0][..., [k]]
            for q, (gaussian, wave) in enumerate(terms):
                weight, mean, scale = self._at(q, k)
                sides, others = one[2][..., q, :, k, :], two[2][..., q, :, k, :]
                pull, turn = wave * own, gaussian * own
                if theta:
                    grads[0, k, q] = pull.sum((-1, -2))
                pull *= gaps
                if alike:
                    clear_diagonal(turn)
                turned = _turned(turn, sides, others)
                if theta:
                    back = turned if alike else _turned(turn.swapaxes(-1, -2), others, sides)
                    moved = (here * turned).sum(-2, keepdims=True) + (there * back).sum(-2, keepdims=True)
                    grads[1, k, q] = (-2 * math.pi * weight * moved)[..., 0, 0]
                    grads[2, k, q] = (2 * weight * _GAUSSIAN * scale * over_pairs(pull, gaps))[..., 0, 0]
                slope = 2 * weight * (_GAUSSIAN * scale * scale * pull.sum(-1, keepdims=True) - math.pi * mean * turned)
                by_z[..., k] += slope[..., 0]
        if theta:
            by_weight, by_mean, by_scale = (np.moveaxis(each, (1, 0), (-2, -1)) for each in grads)
            summed(self._weights, by_weight.sum(-1)[..., None, :])
            summed(self._means, by_mean[..., None, :])
            summed(self._scales, by_scale[..., None, :])
        if by_x is not None:
            into(by_x, self._columns, 2.0 * by_z if alike else by_z)

    def _at(self, q: int, k: int) -> tuple[Array, Array, Array]:
        """Return weight, mean and scale of a term and a dimension, which broadcast over a matrix."""
        means, scales = (p.value[..., q, :, k : k + 1] for p in (self._means, self._scales))
        return self._weights.value[..., q : q + 1], means, scales


def _turned(turn: Array, sides: Array, others: Array) -> Array:
    """Return for each point the sum over the others of ``turn`` times the sine of the angles' difference."""
    both = turn @ others
    return sides[..., 1:] * both[..., :1] - sides[..., :1] * both[..., 1:]
