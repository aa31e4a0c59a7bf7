"""Spectral mixtures by arrays: in each dimension a sum of Gaussians times cosines, multiplied over the dimensions."""

from __future__ import annotations

import math

import numpy as np

from autokern.gp.small import Array, Columns, Parameter, into

__all__ = ["SpectralMixture"]

_GAUSSIAN = -2 * math.pi**2


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
        return self._others(None).copy()

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

    def _others(self, left_out: int | None) -> Array:
        """Return the product of the sums of all dimensions but one."""
        chosen = [total for k, total in enumerate(self._factors) if k != left_out]
        found = chosen[0]
        for total in chosen[1:]:
            found = found * total
        return found

    def backward(self, g: Array, by_x: Array | None = None) -> None:
        """Add the gradients by weights, means and scales, and by the points."""
        by_weight, by_mean, by_scale = (np.zeros_like(p.value) for p in (self._weights, self._means, self._scales))
        by_z = np.zeros_like(self._z)
        for k, (_, gaps, terms) in enumerate(self._kept):
            z, own = self._z[:, k], g * self._others(k) if len(self._kept) > 1 else g
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
