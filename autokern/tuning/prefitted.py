"""What a recorded host predicts, from the fits that the package ships: a program that starts fits nothing.

Means are those of `CostModel`. Variances follow from the nearest trials alone, by sixteen equations in place of one for
each trial; they come out larger by a hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.tuning.cost_model import DRIFT
from autokern.tuning.recorded import NOISE, RecordedHost, Recording
from autokern.tuning.residuals import (
    NUGGET,
    Array,
    Posterior,
    correlation,
    distances,
    features_of,
    log_seconds,
    places_of,
)

__all__ = ["Prefitted"]

_NEAREST = 16
"""Trials that variances follow from."""
_MOST_TOLD = 100
"""Sets of problems whose posteriors are kept: a calibration asks for the same ones again."""


_Asked = tuple[Problem, ...]


class _Pool(NamedTuple):
    """What was recorded of one op on one kind of device, the places of its problems, and their correlations."""

    recording: Recording
    places: Array
    like: Array


class _Near(NamedTuple):
    """Some problems and the trials of some rows.

    Parameters
    ----------
    like : array
        Correlations of each problem with all the trials.
    nearest : array
        Those with the nearest ones.
    among : array
        Correlations of the nearest ones with each other, for each problem.
    distance : array
        Octaves to the nearest one.
    """

    like: Array
    nearest: Array
    among: Array
    distance: Array


class Prefitted:
    """The predictions of a recorded host (the protocol `Tells`).

    Parameters
    ----------
    host : RecordedHost
        The host, as the package ships it.
    """

    def __init__(self, host: RecordedHost) -> None:
        self._host = host
        self._pools: dict[tuple[str, str], _Pool | None] = {}
        self._won: dict[tuple[str, str, str], list[bool]] = {}
        self._told: dict[_Asked, dict[str, Posterior | None]] = {}
        self._latest: tuple[_Asked, Array, dict[tuple[int, ...], _Near]] = (), np.empty(0), {}

    def told(self, op: Op, candidate: Candidate, problems: Sequence[Problem], places: Array) -> Posterior | None:
        """Return the posterior on problems of one pool, or None of a candidate that was not measured."""
        asked = tuple(problems)
        if asked not in self._told and len(self._told) >= _MOST_TOLD:
            self._told.clear()
        kept = self._told.setdefault(asked, {})
        if candidate.name not in kept:
            kept[candidate.name] = self._posterior(op, candidate, asked, places)
        return kept[candidate.name]

    def wins(self, op: str, device: str, name: str) -> list[bool]:
        """Return, for each trial of a candidate, whether it was as fast as any within what could be measured."""
        key = op, device, name
        if key not in self._won:
            self._won[key] = [trial.won(name) for trial in self._host.trials(op, device) if name in trial.timings]
        return self._won[key]

    def _pool(self, op: Op, device: str) -> _Pool | None:
        """Return what was recorded of an op on a kind of device; it is read when first asked for."""
        key = op.name, device
        if key not in self._pools:
            recording, pool = self._host.recording(*key), None
            if recording is not None:
                places = places_of(op, recording.problems)
                pool = _Pool(recording, places, correlation(distances(places, places)))
            self._pools[key] = pool
        return self._pools[key]

    def _posterior(self, op: Op, candidate: Candidate, problems: _Asked, places: Array) -> Posterior | None:
        pool, is_stock = self._pool(op, problems[0].device), candidate is op.stock
        if pool is None or candidate.name not in pool.recording.fits:
            return None
        fits, rows = pool.recording.fits, pool.recording.rows[candidate.name]
        fit, near = fits[candidate.name], self._near(problems, places, pool, rows)
        mean, expected = log_seconds(np.array(fit.coefficients), features_of(candidate, problems)), fit.amplitude**2
        if not is_stock:
            mean = mean - log_seconds(np.array(fits["stock"].coefficients), features_of(op.stock, problems))
        cross, noise = expected * near.nearest, NUGGET**2 + (0.0 if is_stock else NOISE**2)
        gram = expected * near.among + noise * np.eye(cross.shape[1])
        explained = (cross * np.linalg.solve(gram, cross[..., None])[..., 0]).sum(axis=1)
        variance = np.maximum(expected - explained, 0.0) + (DRIFT * near.distance) ** 2
        return Posterior(mean + expected * near.like @ np.frombuffer(fit.weights, "<f4"), variance, near.distance)

    def _near(self, problems: _Asked, places: Array, pool: _Pool, rows: tuple[int, ...]) -> _Near:
        """Return how near some problems are to the trials of some rows, which most candidates share."""
        latest = self._latest
        if latest[0] != problems:
            latest = self._latest = problems, distances(places, pool.places), {}
        _, every, known = latest
        if rows not in known:
            numbers = np.array(rows)
            distance = every[:, numbers]
            nearest = np.argsort(distance, axis=1)[:, :_NEAREST]
            among = pool.like[numbers[nearest][:, :, None], numbers[nearest][:, None, :]]
            like, one = correlation(distance), np.arange(len(problems))[:, None]
            known[rows] = _Near(like, like[one, nearest], among, distance.min(axis=1))
        return known[rows]
