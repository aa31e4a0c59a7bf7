"""The cost model: seconds of a candidate on any problem, from the measurements of a profile.

Per op, dtype and device, each candidate gets coefficients (seconds per call, flop, byte and copied byte, fitted without
negative values), which carry over to any size, and a Gaussian process on the residuals, in octaves of the sizes. For
candidates other than stock, the paired ratio to stock is modelled: drift and noise that both share cancel. The
posterior standard deviation measures the uncertainty. Far from any measurement only the coefficients are left, with a
large deviation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.tuning.profile import Profile, Trial

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_LENGTHSCALES = (1.0, 2.0, 4.0)
"""Octaves over which measurements are correlated; the likeliest of these is taken."""
_LEAST_AMPLITUDE = 0.15
"""Least standard deviation of the residuals, which are log times."""
_WORDS = 6
"""Words of a problem that count."""
_WORD = 2.0
"""Octaves between two problems that differ in one word."""
_DRIFT = 0.06
"""Standard deviation of the coefficients' own predictions, per octave from the nearest measurement."""
_NUGGET = 0.02
"""Least standard deviation of a measured log time."""
_FLOOR = 1e-7
"""Least seconds of any call."""


class Estimate(NamedTuple):
    """Predicted time of a candidate on a problem.

    Parameters
    ----------
    seconds : float
        Predicted seconds of one call.
    log_ratio : float
        Predicted log of its time over stock's.
    sigma : float
        Standard deviation of `log_ratio`.
    distance : float
        Octaves to the nearest problem on which it was measured.
    """

    seconds: float
    log_ratio: float
    sigma: float
    distance: float


class CostModel:
    """Predicts from one profile; fits are made when first needed and kept.

    Examples
    --------
    >>> CostModel(Profile()).knows(Problem(op="qr"))
    False
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._trials: dict[tuple[str, str, str], list[Trial]] = {}
        for trial in profile.trials:
            if "stock" in trial.timings:
                self._trials.setdefault(trial.problem.group, []).append(trial)
        self._measured: dict[tuple[tuple[str, str, str], str], bool] = {}
        self._fits: dict[tuple[tuple[str, str, str], str], _Fit] = {}

    def knows(self, problem: Problem) -> bool:
        """Whether anything was measured for the op, dtype and device of a problem."""
        return problem.group in self._trials

    def knows_errors(self, problem: Problem) -> bool:
        """Whether the error of any candidate that approximates was measured for the group of a problem."""
        trials = self._trials.get(problem.group, ())
        return any(timing.relative_error is not None for t in trials for timing in t.timings.values())

    def measured(self, name: str, problem: Problem) -> bool:
        """Whether a candidate of this name was measured for the op, dtype and device of a problem."""
        if (problem.group, name) not in self._measured:
            trials = self._trials.get(problem.group, ())
            self._measured[problem.group, name] = any(name in trial.timings for trial in trials)
        return self._measured[problem.group, name]

    def estimate(self, op: Op, problem: Problem, candidates: Sequence[Candidate]) -> dict[str, Estimate]:
        """Return an Estimate by name for those of the candidates that were measured in the problem's group."""
        stock = self._fit(op, op.stock, problem.group) if self.knows(problem) else None
        if stock is None:
            return {}
        distances = _distances(_place(op, problem)[None, :], stock.places)[0]
        baseline = stock.baseline(op.stock, problem)
        base = stock.predict(distances, baseline)
        found = {"stock": Estimate(math.exp(base.mean), 0.0, 0.0, base.distance)}
        for candidate in candidates:
            fit = None if candidate.name == "stock" else self._fit(op, candidate, problem.group)
            if fit is not None:
                prior = fit.baseline(candidate, problem) - baseline
                posterior = fit.predict(distances, prior)
                found[candidate.name] = Estimate(
                    math.exp(base.mean + posterior.mean), posterior.mean, posterior.sigma, posterior.distance
                )
        return found

    def relative_error(self, op: Op, name: str, problem: Problem) -> float | None:
        """Return the expected error of an approximate candidate, or None where no like problem was measured.

        It is the worst error measured on problems of the same variant and gradients within an octave of the nearest of
        them, doubled for each octave to that nearest one.
        """
        like = [t for t in self._trials.get(problem.group, ()) if t.problem.words == problem.words]
        timings = [(t.problem, t.timings[name].relative_error) for t in like if name in t.timings]
        place = op.coordinates(problem)
        known = [(math.dist(place, op.coordinates(p)), error) for p, error in timings if error is not None]
        if not known:
            return None
        nearest = min(distance for distance, _ in known)
        return float(max(error for distance, error in known if distance <= nearest + 1) * 2.0**nearest)

    def _fit(self, op: Op, candidate: Candidate, group: tuple[str, str, str]) -> _Fit | None:
        key = (group, candidate.name)
        if key not in self._fits:
            trials = self._trials[group]
            rows = [row for row, trial in enumerate(trials) if candidate.name in trial.timings]
            if not rows:
                return None
            if candidate.name == "stock":
                self._fits[key] = _Fit.of_stock(op, trials)
            else:
                stock = self._fit(op, op.stock, group)
                assert stock is not None
                self._fits[key] = _Fit.of_ratio(candidate, [trials[row] for row in rows], stock, np.array(rows))
        return self._fits[key]


class _Posterior(NamedTuple):
    mean: float
    sigma: float
    distance: float


class _Fit:
    """Coefficients, and a Gaussian process on the residuals of log times at some of the places of a group."""

    def __init__(self, coefficients: Array, places: Array, residuals: Array, noise: Array, rows: Rows) -> None:
        self._coefficients, self.places, self._rows = coefficients, places, rows
        between = _distances(places[rows], places[rows])
        fits = (_condition(between, lengthscale, residuals, noise) for lengthscale in _LENGTHSCALES)
        self._fit = max(fits, key=lambda fit: fit.likelihood)
        self.baselines = np.zeros(0)

    @classmethod
    def of_stock(cls, op: Op, trials: list[Trial]) -> _Fit:
        """Fit the times of stock themselves."""
        seconds, problems = np.array([t.timings["stock"].seconds for t in trials]), [t.problem for t in trials]
        features = _features(op.stock, problems)
        coefficients = _fit_coefficients(features, seconds)
        residuals = np.log(seconds) - np.log(_seconds(coefficients, features))
        places = np.array([_place(op, problem) for problem in problems])
        fit = cls(coefficients, places, residuals, np.zeros(len(trials)), np.arange(len(trials)))
        fit.baselines = np.array([fit.baseline(op.stock, problem) for problem in problems])
        return fit

    @classmethod
    def of_ratio(cls, candidate: Candidate, trials: list[Trial], stock: _Fit, rows: Rows) -> _Fit:
        """Fit the ratios of a candidate to stock, measured on some rows of stock's trials."""
        features, timings = (
            _features(candidate, [t.problem for t in trials]),
            [t.timings[candidate.name] for t in trials],
        )
        coefficients = _fit_coefficients(features, np.array([t.seconds for t in timings]))
        prior = np.log(_seconds(coefficients, features)) - stock.baselines[rows]
        residuals = np.log([t.ratio for t in timings]) - prior
        return cls(coefficients, stock.places, residuals, np.array([t.noise for t in timings]), rows)

    def baseline(self, candidate: Candidate, problem: Problem) -> float:
        """Return the log of the seconds by the coefficients alone."""
        return float(np.log(_seconds(self._coefficients, _features(candidate, [problem]))[0]))

    def predict(self, distances: Array, prior: float) -> _Posterior:
        """Return the posterior of the log time or log ratio; `prior` comes from the coefficients.

        `distances` are those of the problem from all places of the group.
        """
        distance = distances[self._rows]
        cross = self._fit.amplitude**2 * _matern32(distance / self._fit.lengthscale)
        nearest = float(distance.min())
        explained = float(cross @ self._fit.precision @ cross)
        variance = max(self._fit.amplitude**2 - explained, 0.0) + (_DRIFT * nearest) ** 2
        return _Posterior(prior + float(cross @ self._fit.weights), math.sqrt(variance), nearest)


class _Conditioned(NamedTuple):
    """A Gaussian process conditioned on residuals."""

    lengthscale: float
    amplitude: float
    precision: Array
    weights: Array
    likelihood: float


def _condition(between: Array, lengthscale: float, residuals: Array, noise: Array) -> _Conditioned:
    """Condition on residuals, given the lengthscale (Rasmussen and Williams 2006, alg. 2.1)."""
    amplitude = max(_LEAST_AMPLITUDE, float(np.sqrt(np.mean(residuals**2))))
    gram = amplitude**2 * _matern32(between / lengthscale)
    gram[np.diag_indices_from(gram)] += noise**2 + _NUGGET**2
    factor = np.linalg.cholesky(gram)
    inverse = np.linalg.inv(factor)
    precision = np.asarray(inverse.T @ inverse, dtype=np.float64)
    weights = precision @ residuals
    likelihood = -0.5 * float(residuals @ weights) - float(np.log(np.diag(factor)).sum())
    return _Conditioned(lengthscale, amplitude, precision, weights, likelihood)


def _matern32(distance: Array) -> Array:
    a = math.sqrt(3) * distance
    return (1 + a) * np.exp(-a)


def _place(op: Op, problem: Problem) -> Array:
    """Return the coordinates of a problem: sizes, and hashes of its words."""
    words = [float(hash(word)) for word in problem.words[:_WORDS]]
    return np.array([*op.coordinates(problem), *words, *[0.0] * (_WORDS - len(words))])


def _distances(places: Array, others: Array) -> Array:
    """Return the distances of places in octaves: sizes by difference, words by whether they differ."""
    sizes = places[:, None, :-_WORDS] - others[None, :, :-_WORDS]
    differing = places[:, None, -_WORDS:] != others[None, :, -_WORDS:]
    return np.asarray(np.sqrt((sizes**2).sum(-1) + _WORD**2 * differing.sum(-1)), dtype=np.float64)


def _features(candidate: Candidate, problems: list[Problem]) -> Array:
    features = map(candidate.features, problems)
    return np.array([(f.calls, f.flops, f.bytes, f.copied) for f in features], dtype=np.float64)


def _fit_coefficients(features: Array, seconds: Array) -> Array:
    """Return non-negative coefficients that minimise squared relative errors.

    With four coefficients the best of the fifteen sub-problems without negative ones is found by trying them all
    (scipy's NNLS gives the same, but importing it takes longer than everything else at a first call).
    """
    relative = features / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    best, coefficients = math.inf, np.zeros(features.shape[1])
    used = [i for i in range(features.shape[1]) if features[:, i].any()]
    for size in range(1, len(used) + 1):
        for subset in itertools.combinations(used, size):
            columns = relative[:, subset] / scale[list(subset)]
            solution = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
            residuals = float(np.sum((columns @ solution - 1) ** 2))
            if solution.min() >= 0 and residuals < best:
                best, coefficients = residuals, np.zeros(features.shape[1])
                coefficients[list(subset)] = solution / scale[list(subset)]
    return coefficients


def _seconds(coefficients: Array, features: Array) -> Array:
    return np.maximum(features @ coefficients, _FLOOR)
