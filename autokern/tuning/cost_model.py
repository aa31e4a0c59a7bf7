"""The cost model: seconds of a candidate on any problem, from the measurements of this host and of others like it.

Per op and device, the log of a candidate's time over stock's is a Gaussian process in octaves of the sizes; drift and
noise that both share cancel in the ratio. Its mean is what the models of other hosts predict, and where there are
none, coefficients (seconds per call, flop, byte and copied byte, fitted without negative values). So other hosts say
what is likely here, this host's own measurements correct them, and far from any measurement the deviation is large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.system import threads
from autokern.tuning.profile import ENOUGH, Profile, Trial, group_key
from autokern.tuning.residuals import (
    Array,
    Fit,
    Posterior,
    correlation,
    distances,
    features_of,
    fit_coefficients,
    log_seconds,
    places_of,
)
from autokern.tuning.tells import Kin, KinOf, Tells, alone

__all__ = ["DRIFT", "CostModel", "Estimate", "Kin", "KinOf", "Tells", "alone"]

Pool = tuple[str, str]
"""Problems of one op on one kind of device: their measurements tell of each other."""

_EXPECTED, _EXPECTED_OF_KIN = 0.6, 0.15
"""Standard deviation of log ratios around coefficients, and around what an equal host gives, before any is measured."""
_UNLIKE = 0.35
"""What it grows by for hosts that have nothing in common."""
_SPEEDS = 0.5
"""Standard deviation of the log of one factor that all times of this host may have over those of others."""
DRIFT = 0.06
"""Standard deviation of what coefficients give, per octave from the nearest measurement."""
_PLENTY = 50
"""Trials of a candidate in a pool from which on other hosts add nothing."""
_MOST_TOLD = 1000
"""Posteriors that are kept."""


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
        Octaves to the nearest problem on which this host measured it; infinite where it did not.
    """

    seconds: float
    log_ratio: float
    sigma: float
    distance: float


class CostModel:
    """Predicts from one profile and from other hosts; fits are made when first needed and kept.

    Parameters
    ----------
    profile : Profile
        Measurements of this host.
    kin : callable
        Maps a kind of device to other hosts; asked when first needed.

    Examples
    --------
    >>> CostModel(Profile()).knows(Problem(op="qr"))
    False
    """

    def __init__(self, profile: Profile, kin: KinOf = alone) -> None:
        self.profile, self._kin_of = profile, kin
        self._kin: dict[str, Sequence[Kin]] = {}
        self._trials: dict[tuple[str, str, str], list[Trial]] = {}
        self._pools: dict[Pool, list[Trial]] = {}
        for trial in profile.trials:
            if "stock" in trial.timings:
                self._trials.setdefault(trial.problem.group, []).append(trial)
                self._pools.setdefault(_pool(trial.problem), []).append(trial)
        self._measured: dict[tuple[tuple[str, str, str], str], bool] = {}
        self._rows: dict[tuple[Pool, str], list[int]] = {}
        self._fits: dict[tuple[Pool, str], Fit | None] = {}
        self._coefficients: dict[tuple[Pool, str], Array] = {}
        self._places: dict[Pool, Array] = {}
        self._like: dict[Pool, Array] = {}
        self._work: dict[tuple[Pool, object], Array] = {}
        self._won: dict[tuple[Pool, str], list[bool]] = {}
        self._told: dict[tuple[str, tuple[Problem, ...]], Posterior | None] = {}

    def kin(self, device: str) -> Sequence[Kin]:
        """Return the other hosts that tell something about a kind of device."""
        if device not in self._kin:
            self._kin[device] = self._kin_of(device)
        return self._kin[device]

    def _of(self, pool: Pool) -> list[Trial]:
        """Return the trials of a pool."""
        return self._pools.get(pool, [])

    def knows(self, problem: Problem) -> bool:
        """Whether enough was measured for the op, dtype and device of a problem."""
        trials = len(self._trials.get(problem.group, ()))
        return trials >= ENOUGH or (trials > 0 and group_key(*problem.group) in self.profile.levels)

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

    def never_won(self, name: str, problem: Problem, least: int) -> bool:
        """Whether a candidate won none of at least so many trials of other hosts, and none of this one."""
        op, device = pool = _pool(problem)
        told = [won for model, _ in self.kin(device) for won in model.wins(op, device, name)]
        return len(told) >= least and not any(told) and not any(self.wins(*pool, name))

    def wins(self, op: str, device: str, name: str) -> list[bool]:
        """Return, for each trial of a candidate, whether it was as fast as any within what could be measured."""
        pool = op, device
        if (pool, name) not in self._won:
            self._won[pool, name] = [trial.won(name) for trial in self._of(pool) if name in trial.timings]
        return self._won[pool, name]

    def estimate(self, op: Op, problem: Problem, candidates: Sequence[Candidate]) -> dict[str, Estimate]:
        """Return an Estimate by name for those of the candidates that this host or another one measured."""
        found = self.estimates(op, [problem], candidates)
        base = found.pop("stock", None)
        if base is None:
            return {}
        time = float(base.mean[0])
        made = {"stock": Estimate(math.exp(time), 0.0, 0.0, float(base.distance[0]))}
        for name, (mean, variance, distance) in found.items():
            ratio = float(mean[0])
            made[name] = Estimate(math.exp(time + ratio), ratio, math.sqrt(variance[0]), float(distance[0]))
        return made

    def estimates(self, op: Op, problems: Sequence[Problem], candidates: Sequence[Candidate]) -> dict[str, Posterior]:
        """Return, for problems of one pool, the posterior of stock's log time and of each candidate's log ratio."""
        with threads.scope(1):  # beside other programs, two threads wait longer for each other than one computes
            return self._estimates(op, problems, candidates)

    def _estimates(self, op: Op, problems: Sequence[Problem], candidates: Sequence[Candidate]) -> dict[str, Posterior]:
        places = places_of(op, problems)
        base = self._posterior(op, op.stock, problems, places)
        if base is None:
            return {}
        found = {"stock": base}
        for candidate in candidates:
            if candidate.name != "stock":
                posterior = self._posterior(op, candidate, problems, places)
                if posterior is not None:
                    found[candidate.name] = posterior
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

    def told(self, op: Op, candidate: Candidate, problems: Sequence[Problem], places: Array) -> Posterior | None:
        """Return the posterior on problems of one pool, which is kept: a calibration asks for the same ones again."""
        key = (candidate.name, tuple(problems))
        if key not in self._told:
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told[key] = self._posterior(op, candidate, problems, places)
        return self._told[key]

    def _posterior(self, op: Op, candidate: Candidate, problems: Sequence[Problem], places: Array) -> Posterior | None:
        """Return the posterior on problems of one pool: that of other hosts, corrected by this one's measurements."""
        prior, pool = self._prior(op, candidate, problems, places), _pool(problems[0])
        fit = self._fit(op, candidate, pool)
        if fit is None:
            return prior
        work = None if prior is not None else (features_of(candidate, problems), features_of(op.stock, problems))
        mean, expected = self._expected(op, candidate, pool, work, prior)
        found = fit.predict(distances(places, self._places[pool][self._measured_rows(pool, candidate.name)]), expected)
        drift = (DRIFT * found.distance) ** 2 if prior is None else 0.0
        return Posterior(mean + found.mean, found.variance + drift, found.distance)

    def _expected(
        self, op: Op, candidate: Candidate, pool: Pool, work: tuple[Array, Array] | None, prior: Posterior | None
    ) -> tuple[Array, Array]:
        """Return mean and variance before this host measured anything, by other hosts or else by coefficients."""
        if prior is not None:
            return prior.mean, prior.variance
        assert work is not None
        mean = log_seconds(self._coefficients[pool, candidate.name], work[0])
        if candidate is not op.stock:
            mean = mean - log_seconds(self._coefficients[pool, "stock"], work[1])
        return mean, np.full(len(mean), _EXPECTED**2)

    def _worked(self, candidate: Candidate, pool: Pool) -> Array:
        """Return the counts of a candidate's work on the trials of a pool; several candidates may share them."""
        key = (pool, candidate.features)
        if key not in self._work:
            self._work[key] = features_of(candidate, [trial.problem for trial in self._of(pool)])
        return self._work[key]

    def _prior(self, op: Op, candidate: Candidate, problems: Sequence[Problem], places: Array) -> Posterior | None:
        """Return what other hosts predict, weighted by likeness and certainty, widened by how they differ.

        Where much was measured here, they are not asked.
        """
        found: list[tuple[Posterior, float]] = []
        if len(self._measured_rows(_pool(problems[0]), candidate.name)) >= _PLENTY:
            return None
        for model, likeness in self.kin(problems[0].device):
            posterior = model.told(op, candidate, problems, places)
            if posterior is not None:
                found.append((posterior, likeness))
        if not found:
            return None
        spread = _EXPECTED_OF_KIN + _UNLIKE * (1 - max(likeness for _, likeness in found))
        weights = np.array([likeness / (posterior.variance + 0.01) for posterior, likeness in found])
        weights /= weights.sum(axis=0)
        means = np.array([posterior.mean for posterior, _ in found])
        mean = (weights * means).sum(axis=0)
        variance = (weights * np.array([posterior.variance for posterior, _ in found])).sum(axis=0)
        between = (weights * (means - mean) ** 2).sum(axis=0)
        return Posterior(mean, variance + between + spread**2, np.full(len(problems), math.inf))

    def _measured_rows(self, pool: Pool, name: str) -> list[int]:
        """Return the numbers of the trials of a pool that have a candidate."""
        if (pool, name) not in self._rows:
            self._rows[pool, name] = [row for row, trial in enumerate(self._of(pool)) if name in trial.timings]
        return self._rows[pool, name]

    def _fit(self, op: Op, candidate: Candidate, pool: Pool) -> Fit | None:
        """Return the fit of a candidate; None where it was not measured."""
        key = (pool, candidate.name)
        if key not in self._fits:
            rows = self._measured_rows(*key)
            self._fits[key] = self._fitted(op, candidate, pool, rows) if rows else None
        return self._fits[key]

    def fitted(self, op: Op, candidate: Candidate, device: str) -> tuple[Array, Fit] | None:
        """Return coefficients and fit of a candidate by the measurements of this host alone."""
        fit = self._fit(op, candidate, (op.name, device))
        return None if fit is None else (self._coefficients[(op.name, device), candidate.name], fit)

    def _fitted(self, op: Op, candidate: Candidate, pool: Pool, rows: list[int]) -> Fit:
        trials = self._of(pool)
        if pool not in self._places:
            self._places[pool] = places_of(op, [trial.problem for trial in trials])
            self._like[pool] = correlation(distances(self._places[pool], self._places[pool]))
        places, problems = self._places[pool][rows], [trials[row].problem for row in rows]
        timings = [trials[row].timings[candidate.name] for row in rows]
        seconds, ratios = (np.array([getattr(t, field) for t in timings]) for field in ("seconds", "ratio"))
        work = self._worked(candidate, pool)[rows], self._worked(op.stock, pool)[rows]
        prior, is_stock = self._prior(op, candidate, problems, places), candidate is op.stock
        if prior is None or is_stock:
            self._coefficients[pool, candidate.name] = fit_coefficients(work[0], seconds)
        if not is_stock:
            self._fit(op, op.stock, pool)
        mean, expected = self._expected(op, candidate, pool, work, prior)
        noise = np.zeros(len(rows)) if is_stock else np.array([timing.noise for timing in timings])
        shift = _SPEEDS**2 if is_stock and prior is not None else 0.0
        return Fit(
            self._like[pool][np.ix_(rows, rows)], np.log(seconds if is_stock else ratios) - mean, expected, noise, shift
        )


def _pool(problem: Problem) -> Pool:
    return problem.op, problem.device
