"""Parts of kernels beyond those of `small`: rough, rational, periodic, linear, polynomial ones, spectral mixtures.

What depends on differences alone takes points that are centred, the rest takes the points as they are; `arranged` lays
both side by side.
"""

from __future__ import annotations

import math

import numpy as np

from autokern.gp.small import Array, Columns, Parameter, Sized, into, squared

__all__ = [
    "Linear", "Periodic", "Polynomial", "RationalQuadratic", "Rough", "Sizeless", "SpectralMixture", "arranged",
    "summed",
]  # fmt: skip

_GAUSSIAN = -2 * math.pi**2
_NEAR = 1e-3
"""Squared distances below this part of the largest squared norm are computed from differences."""


def arranged(x: Array, raw: bool) -> Array:
    """Return points centred, which moves no difference; beside them the points as they are if any part is `raw`."""
    centred: Array = x - np.add.reduce(x, -2, keepdims=True) / x.shape[-2]
    return np.concatenate((centred, x), -1) if raw else centred


def _by_points(h: Array, z: Array) -> Array:
    """Return the derivative by points from ``h = dL/ds``, symmetric, by their squared distances."""
    h.flat[:: len(z) + 1] = 0.0
    found: Array = (h.sum(1)[:, None] * z - h @ z) * 4.0
    return found


def summed(parameter: Parameter, by_dimension: Array) -> None:
    """Add a derivative by each dimension to a parameter of each dimension, or of all."""
    parameter.accumulate(by_dimension.sum() if parameter.value.size == 1 else by_dimension)


class Sizeless:
    """A part whose entries are products of what it is made of, wherever the points are."""

    def size(self) -> float:
        """Return zero."""
        return 0.0


class Rough(Sized):
    """The Matérn 1/2, whose derivative by squared distances is infinite where points meet.

    Distances of points that are near each other, and their share of the derivatives, are computed from differences.
    """

    def __init__(self, columns: Columns, lengthscale: Parameter) -> None:
        self._columns, self._lengthscale = columns, lengthscale

    def evaluate(self, x: Array) -> Array:
        """Return the matrix."""
        z = self._z = x[:, self._columns] / self._lengthscale.value
        s = squared(z)
        rows, others = self._pairs = np.nonzero(np.triu(s < _NEAR * np.einsum("ij,ij->i", z, z).max(), 1))
        self._gaps = z[rows] - z[others]
        s[rows, others] = s[others, rows] = np.square(self._gaps).sum(-1)
        self._r = np.sqrt(s, out=s)
        self._k = np.exp(-s)
        return self._k.copy()

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by the lengthscale, and by the points."""
        z, (rows, others), gaps = self._z, self._pairs, self._gaps
        g *= self._k
        g *= -0.5
        g /= np.where(self._r > 0.0, self._r, np.inf)  # meets a difference of zero
        near = g[rows, others]
        g[rows, others] = g[others, rows] = 0.0
        by_z = _by_points(g, z)
        by_dimension = np.einsum("ij,ij->j", by_z, z) + 4.0 * (near @ (gaps * gaps))
        value = self._lengthscale.value
        summed(self._lengthscale, by_dimension / -value)
        if by_x is not None:
            apart = 4.0 * near[:, None] * gaps
            np.add.at(by_z, rows, apart)
            np.subtract.at(by_z, others, apart)
            into(by_x, self._columns, by_z / value)


class RationalQuadratic(Sized):
    """``(1 + s / 2 alpha) ** -alpha``."""

    def __init__(self, columns: Columns, lengthscale: Parameter, alpha: Parameter) -> None:
        self._columns, self._lengthscale, self._alpha = columns, lengthscale, alpha

    def evaluate(self, x: Array) -> Array:
        """Return the matrix."""
        z = self._z = x[:, self._columns] / self._lengthscale.value
        alpha = float(self._alpha.value[0])
        w = self._w = squared(z)
        w *= 0.5 / alpha
        self._log = np.log1p(w)
        self._k = np.exp(self._log * -alpha)
        return self._k.copy()

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by shape and lengthscale, and by the points."""
        w = self._w
        g *= self._k
        w1 = w + 1.0
        self._alpha.accumulate((g * (w / w1 - self._log)).sum())
        g /= w1
        g *= -0.5
        by_z, value = _by_points(g, self._z), self._lengthscale.value
        summed(self._lengthscale, np.einsum("ij,ij->j", by_z, self._z) / -value)
        if by_x is not None:
            into(by_x, self._columns, by_z / value)


class Periodic(Sized):
    """``exp(-2 sum_i sin(pi (x_i - x'_i) / p_i) ** 2 / lengthscale_i)``: an RBF of points that are laid on circles."""

    def __init__(self, columns: Columns, lengthscale: Parameter, period: Parameter) -> None:
        self._columns, self._lengthscale, self._period = columns, lengthscale, period

    def evaluate(self, x: Array) -> Array:
        """Return the matrix."""
        angle = self._angle = x[:, self._columns] * (2 * math.pi / self._period.value)
        scale = 1.0 / np.sqrt(self._lengthscale.value)
        half = np.sin(0.5 * angle)
        self._sides = np.sin(angle) * scale, (half * half - 0.5) * (-2.0 * scale)
        self._z = np.hstack((self._sides[0], half * half * (-2.0 * scale)))  # touches the origin: short norms nearby
        s = squared(self._z)
        s *= -0.5
        self._k = np.exp(s, out=s)
        return s.copy()

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradients by period and lengthscale, and by the points."""
        angle, (sine, cosine) = self._angle, self._sides
        g *= self._k
        g *= -0.5
        by_z, d = _by_points(g, self._z), angle.shape[1]
        along = np.einsum("ij,ij->j", by_z, self._z)
        summed(self._lengthscale, (along[:d] + along[d:]) * (-0.5 / self._lengthscale.value))
        by_angle = by_z[:, :d] * cosine - by_z[:, d:] * sine
        summed(self._period, np.einsum("ij,ij->j", by_angle, angle) / -self._period.value)
        if by_x is not None:
            into(by_x, self._columns, by_angle * (2 * math.pi / self._period.value))


class Linear(Sizeless):
    """Products of points, each dimension with a variance."""

    def __init__(self, columns: Columns, variance: Parameter) -> None:
        self._columns, self._variance = columns, variance

    def evaluate(self, x: Array) -> Array:
        """Return the matrix."""
        self._x = x[:, self._columns]
        z = self._x * np.sqrt(self._variance.value)
        k: Array = z @ z.T
        return k

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by the variance, and by the points."""
        mixed = g @ self._x
        summed(self._variance, np.einsum("ij,ij->j", self._x, mixed))
        if by_x is not None:
            into(by_x, self._columns, mixed * (2.0 * self._variance.value))


class Polynomial(Sizeless):
    """``(x . x' + offset) ** power``."""

    def __init__(self, columns: Columns, offset: Parameter, power: float) -> None:
        self._columns, self._offset, self._power = columns, offset, power

    def evaluate(self, x: Array) -> Array:
        """Return the matrix."""
        z = self._z = x[:, self._columns]
        base = z @ z.T
        base += self._offset.value
        self._slope = self._power * base ** (self._power - 1)
        k: Array = base**self._power
        return k

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradient by the offset, and by the points."""
        g *= self._slope
        self._offset.accumulate(g.sum())
        if by_x is not None:
            into(by_x, self._columns, 2.0 * (g @ self._z))


class SpectralMixture:
    """``prod_d sum_q w_q exp(-2 pi^2 v_qd^2 t_d^2) cos(2 pi mu_qd t_d)`` of differences ``t`` (Wilson and Adams 2013).

    The cosine of a difference is a product of cosines and sines of the points, so a pair costs an exponential alone.
    Weights are ``(q,)``, means and scales ``(q, 1, d)``.
    """

    def __init__(self, columns: Columns, weights: Parameter, means: Parameter, scales: Parameter) -> None:
        self._columns, self._weights, self._means, self._scales = columns, weights, means, scales

    def evaluate(self, x: Array) -> Array:
        """Return the matrix."""
        z = self._z = x[:, self._columns]
        angles = self._angles = 2 * math.pi * self._means.value * z  # (q, n, d)
        self._sides = np.stack((np.cos(angles), np.sin(angles)), -1)
        self._kept = [self._dimension(k) for k in range(z.shape[1])]
        self._factors = [total for total, _, _ in self._kept]
        return math.prod(self._factors[1:], start=self._factors[0])

    def _dimension(self, k: int) -> tuple[Array, Array, list[tuple[Array, Array]]]:
        """Return of a dimension the sum over the mixture, the differences, and each term without and with cosine."""
        gaps = np.subtract.outer(self._z[:, k], self._z[:, k])
        apart = gaps * gaps
        total, terms = np.zeros_like(apart), []
        for weight, scale, sides in zip(self._weights.value, self._scales.value[:, 0, k], self._sides, strict=True):
            gaussian = apart * (_GAUSSIAN * scale * scale)
            np.exp(gaussian, out=gaussian)
            wave = sides[:, k] @ sides[:, k].T
            wave *= gaussian
            total += weight * wave
            terms.append((gaussian, wave))
        return total, gaps, terms

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradients by weights, means and scales, and by the points."""
        by_weight, by_mean, by_scale = (np.zeros_like(p.value) for p in (self._weights, self._means, self._scales))
        by_z = np.zeros_like(self._z)
        for k, (_, gaps, terms) in enumerate(self._kept):
            z, own = self._z[:, k], math.prod(self._factors[:k] + self._factors[k + 1 :], start=g)
            for q, (gaussian, wave) in enumerate(terms):
                weight, mean, scale = self._weights.value[q], self._means.value[q, 0, k], self._scales.value[q, 0, k]
                pull = np.multiply(wave, own, out=wave)  # each term is read once
                by_weight[q] += pull.sum()
                pull *= gaps
                by_scale[q, 0, k] = 2 * weight * _GAUSSIAN * scale * np.vdot(pull, gaps)
                turn = np.multiply(gaussian, own, out=gaussian)
                turn.flat[:: len(z) + 1] = 0.0
                cosine, sine = self._sides[q, :, k].T
                by_cosine, by_sine = (turn @ self._sides[q, :, k]).T
                turned = weight * (sine * by_cosine - cosine * by_sine)
                by_mean[q, 0, k] = -4 * math.pi * (z @ turned)
                if by_x is not None:
                    by_z[:, k] += 4 * weight * _GAUSSIAN * scale * scale * pull.sum(1)
                    by_z[:, k] -= 4 * math.pi * mean * turned
        for parameter, found in ((self._weights, by_weight), (self._means, by_mean), (self._scales, by_scale)):
            parameter.accumulate(found)
        if by_x is not None:
            into(by_x, self._columns, by_z)

    def size(self) -> float:
        """Return the largest angle, of which each cosine loses the digits."""
        return float(np.abs(self._angles).sum(-1).max())
