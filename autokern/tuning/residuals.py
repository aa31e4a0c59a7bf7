"""Residuals: a Gaussian process on what log times are beyond their mean, in octaves of the sizes of problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem

__all__ = [
    "NUGGET",
    "Array",
    "Fit",
    "Posterior",
    "correlation",
    "distances",
    "features_of",
    "fit_coefficients",
    "log_seconds",
    "nearness",
    "places_of",
    "spread",
]

Array = npt.NDArray[np.float64]

_LENGTHSCALE = 4.0
"""Octaves over which measurements are correlated."""
_WORDS = 6
"""Words of a problem that count."""
_WORD = 2.0
"""Octaves between two problems that differ in one word."""
_DTYPE = 1.0
"""Octaves between two dtypes."""
NUGGET = 0.02
"""Least standard deviation of a measured log time."""
_WORTH = 6.0
"""Measurements that the expected deviation counts for, beside those that were taken."""
_FLOOR = 1e-7
"""Least seconds of any call."""
_MANY = 16
"""Equations from which on least squares are reduced to as many as there are unknowns first."""


class Posterior(NamedTuple):
    """Means and variances of log times or log ratios, and octaves to the nearest measurement; a number each problem."""

    mean: Array
    variance: Array
    distance: Array


class Fit:
    """A Gaussian process conditioned on residuals (Rasmussen and Williams 2006, alg. 2.1).

    Parameters
    ----------
    like : array
        Correlations of the places where it was measured, shape (n, n).
    residuals : array
        Log times or log ratios less their mean, shape (n,).
    expected : array
        Their variances before anything was measured; how large residuals are scales them.
    noise : array
        Standard deviations of the measurements.
    shift : float
        Variance of one amount that all residuals share.

    Attributes
    ----------
    amplitudes : array
        Standard deviations of the residuals, scaled by how large they are.
    """

    def __init__(self, like: Array, residuals: Array, expected: Array, noise: Array, shift: float) -> None:
        self._shift = shift
        counted = _WORTH + float(np.sum(residuals**2 / expected))
        self._scale = math.sqrt(counted / (_WORTH + len(residuals)))
        self.amplitudes = self._scale * np.sqrt(expected)
        gram = np.outer(self.amplitudes, self.amplitudes) * like + shift
        gram[np.diag_indices_from(gram)] += noise**2 + NUGGET**2
        self._factor = torch.ops.aten.linalg_cholesky_ex(torch.from_numpy(gram))[0]
        self._white = self._whitened(residuals[:, None])

    def _whitened(self, columns: Array) -> Array:
        """Return the inverse of the factor times some columns (NumPy has no triangular solve)."""
        with torch.no_grad():
            found = torch.ops.aten.linalg_solve_triangular(self._factor, torch.from_numpy(columns), upper=False)
        return np.asarray(found.numpy(), dtype=np.float64)

    @property
    def weights(self) -> Array:
        """The inverse of the covariance times the residuals: a number for each measurement."""
        upper, white = self._factor.mT, torch.from_numpy(self._white)
        found = torch.ops.aten.linalg_solve_triangular(upper, white, upper=True)
        return np.asarray(found.numpy()[:, 0], dtype=np.float64)

    def predict(self, distance: Array, expected: Array) -> Posterior:
        """Return the posterior of residuals, so far from all measurements and of so much variance beforehand."""
        amplitudes = self._scale * np.sqrt(expected)
        cross = self._whitened((amplitudes[:, None] * self.amplitudes * correlation(distance) + self._shift).T)
        variance = np.maximum(amplitudes**2 + self._shift - (cross**2).sum(axis=0), 0.0)
        return Posterior(cross.T @ self._white[:, 0], variance, distance.min(axis=1))


def nearness(op: Op, problems: Sequence[Problem]) -> Array:
    """Return how much a measurement of one problem tells of each other: squares of correlations."""
    places = places_of(op, problems)
    return np.asarray(correlation(2 * distances(places, places)) ** 2)


def correlation(distance: Array) -> Array:
    """Return the correlation of residuals so many octaves apart: Matérn 3/2."""
    a = math.sqrt(3) / _LENGTHSCALE * distance
    found = np.exp(-a)
    found *= 1 + a
    return np.asarray(found)


def places_of(op: Op, problems: Sequence[Problem]) -> Array:
    """Return the coordinates of problems: sizes, dtype, and hashes of words."""
    return np.array([_place(op, problem) for problem in problems])


def _place(op: Op, problem: Problem) -> list[float]:
    words = [float(hash(word)) for word in problem.words[:_WORDS]]
    dtype = _DTYPE * (problem.dtype == "float64")
    return [*op.coordinates(problem), dtype, *words, *[0.0] * (_WORDS - len(words))]


def distances(places: Array, others: Array) -> Array:
    """Return the distances of places in octaves: sizes by difference, words by whether they differ."""
    found = np.zeros((len(places), len(others)))
    columns = [(np.ascontiguousarray(a), np.ascontiguousarray(b)) for a, b in zip(places.T, others.T, strict=True)]
    for one, other in columns[:-_WORDS]:
        found += (one[:, None] - other) ** 2
    for one, other in columns[-_WORDS:]:
        if one.min() != one.max() or other.min() != other.max() or one[0] != other[0]:
            found += np.where(one[:, None] != other, _WORD**2, 0.0)
    return np.sqrt(found, out=found)


def features_of(candidate: Candidate, problems: Sequence[Problem]) -> Array:
    """Return the counts of a candidate's work: calls, flops, bytes and copied bytes, a row for each problem."""
    features = map(candidate.features, problems)
    return np.array([(f.calls, f.flops, f.bytes, f.copied) for f in features], dtype=np.float64)


def spread(op: Op, problems: Sequence[Problem], count: int) -> list[int]:
    """Return the numbers of so many problems that lie farthest from each other, the first one among them."""
    places = places_of(op, problems)
    chosen, nearest = [0], distances(places, places[:1])[:, 0]
    while len(chosen) < min(count, len(problems)):
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, distances(places, places[chosen[-1:]])[:, 0])
    return sorted(chosen)


def fit_coefficients(features: Array, seconds: Array) -> Array:
    """Return seconds per call, flop, byte and copied byte, none negative, that minimise squared relative errors.

    With four coefficients the best of the fifteen sub-problems without negative ones is found by solving them all at
    once (scipy's NNLS gives the same, but importing it takes longer than everything else at a first call).
    """
    relative = features / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    columns, ones = relative / scale, np.ones(len(seconds))
    if len(seconds) > _MANY:
        whole = np.asarray(np.linalg.qr(np.column_stack([columns, ones]), mode="r"))
        columns, ones = whole[:, :-1], whole[:, -1]
    subsets = np.array(list(itertools.product((0.0, 1.0), repeat=columns.shape[1]))[1:])
    least = len(seconds) * np.finfo(np.float64).eps
    solutions = np.linalg.pinv(columns * subsets[:, None], rcond=least) @ ones
    residuals = np.sum((solutions @ columns.T - ones) ** 2, axis=1)
    residuals[solutions.min(axis=1) < 0] = math.inf
    return np.asarray(solutions[residuals.argmin()] / scale)


def log_seconds(coefficients: Array, features: Array) -> Array:
    """Return the logs of the seconds that coefficients give."""
    return np.asarray(np.log(np.maximum(features @ coefficients, _FLOOR)))
