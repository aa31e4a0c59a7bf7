"""Chooser: what is known of the candidates on a problem, from the trees of a profile and those that the package ships.

A new problem costs a walk through a few trees. Trials are read only where seconds or errors are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from autokern.core.locks import once
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning import recorded, store
from autokern.tuning.forest import Estimate, Forest, words
from autokern.tuning.profile import ENOUGH, SCHEMA, Profile, Trial, group_key

__all__ = ["Chooser", "Estimate", "Nearest", "fitted", "key_of", "load"]

_WORD, _DTYPE = 2.0, 1.0
"""Octaves between problems that differ in one word, and in the dtype."""
_CALL, _FLOPS, _BYTES = 5e-6, 2e10, 1e10
"""Seconds of a library call, and flops and bytes a second, by which seconds are carried to another size."""


class Nearest(NamedTuple):
    """The trial nearest to a problem, its distance, stock's seconds on the problem, and whether this machine ran it."""

    trial: Trial
    octaves: float
    seconds: float
    here: bool


class Chooser:
    """Answers from one profile and from what the package ships.

    Parameters
    ----------
    profile : Profile
        Measurements of this host, with their trees.
    shipped : mapping, optional
        Trees of other hosts by ``"op@device"``; default those of the package.

    Examples
    --------
    >>> Chooser(Profile(), {}).knows(Problem(op="qr"))
    False
    """

    def __init__(self, profile: Profile, shipped: Mapping[str, Forest] | None = None) -> None:
        self.profile = profile
        self.shipped = recorded.forests() if shipped is None else shipped
        self._others: dict[str, list[Trial]] = {}

    @once
    def _trials(self) -> dict[str, list[Trial]]:
        """The trials of this machine by ``"op@device"``."""
        found: dict[str, list[Trial]] = {}
        for trial in self.profile.trials:
            found.setdefault(key_of(trial.problem), []).append(trial)
        return found

    def estimates(self, problem: Problem) -> dict[str, Estimate]:
        """Return an Estimate by name for those candidates that this host or another one measured on such problems."""
        key = key_of(problem)
        own, shipped = self.profile.forests.get(key), self.shipped.get(key)
        forest = shipped if own is None or self.instead(problem) == "shipped" else own
        return {} if forest is None else forest.estimates(problem)

    def instead(self, problem: Problem) -> str:
        """Return the choices that serve a problem by the exam, ``"shipped"`` or ``"stock"``; empty for those here."""
        return next((kept.instead for kept in self.profile.kept if kept.holds(problem)), "")

    def knows(self, problem: Problem) -> bool:
        """Whether enough was measured for the op, dtype and device of a problem."""
        forest = self.profile.forests.get(key_of(problem))
        trials = 0 if forest is None else forest.trials.get(problem.dtype, 0)
        return trials >= ENOUGH or (trials > 0 and group_key(*problem.group) in self.profile.levels)

    def knows_errors(self, problem: Problem) -> bool:
        """Whether the error of any candidate that approximates was measured for the group of a problem."""
        return any(timing.relative_error is not None for t in self._like(problem) for timing in t.timings.values())

    def measured(self, name: str, problem: Problem) -> bool:
        """Whether a candidate of this name was measured for the op, dtype and device of a problem."""
        return any(name in trial.timings for trial in self._like(problem))

    def _like(self, problem: Problem) -> list[Trial]:
        """Return the trials of the group of a problem."""
        return [t for t in self._trials.get(key_of(problem), ()) if t.problem.dtype == problem.dtype]

    def relative_error(self, op: Op, name: str, problem: Problem) -> float | None:
        """Return the expected error of an approximate candidate, or None where no like problem was measured.

        It is the worst error measured on problems of the same variant and gradients within an octave of the nearest of
        them, doubled for each octave to that nearest one.
        """
        like = [t for t in self._like(problem) if t.problem.words == problem.words and name in t.timings]
        timings, place = [(t.problem, t.timings[name].relative_error) for t in like], op.coordinates(problem)
        known = [(math.dist(place, op.coordinates(p)), error) for p, error in timings if error is not None]
        if not known:
            return None
        nearest = min(distance for distance, _ in known)
        return float(max(error for distance, error in known if distance <= nearest + 1) * 2.0**nearest)

    def nearest(self, op: Op, problem: Problem) -> Nearest | None:
        """Return the trial nearest to a problem, of this machine if it has any of the op, and stock's seconds."""
        key = key_of(problem)
        own = [t for t in self._trials.get(key, ()) if "stock" in t.timings]
        if not own and self.shipped and key not in self._others:
            self._others[key] = [t for host in recorded.hosts() for t in host.trials(op.name, problem.device)]
        trials = own or self._others.get(key)
        if not trials:
            return None
        place, there = op.coordinates(problem), words(problem)

        def distance(trial: Trial) -> float:
            other, here = trial.problem, words(trial.problem)
            unlike = _WORD**2 * len(there ^ here) + _DTYPE**2 * (other.dtype != problem.dtype)
            return math.hypot(math.dist(place, op.coordinates(other)), math.sqrt(unlike))

        trial = min(trials, key=distance)
        scale = _supposed(op, problem) / _supposed(op, trial.problem)
        return Nearest(trial, distance(trial), trial.timings["stock"].seconds * scale, bool(own))


def key_of(problem: Problem) -> str:
    """Return the key of the trees that choose for a problem: ``"op@device"``."""
    return f"{problem.op}@{problem.device}"


def _supposed(op: Op, problem: Problem) -> float:
    """Return seconds of one call of stock by rates that are assumed."""
    work = op.stock.features(problem)
    return work.calls * _CALL + work.flops / _FLOPS + work.bytes / _BYTES


def load(settings: Settings) -> Profile:
    """Return the profile that the settings name, or that of this host in the home folder, or an empty one.

    Trees of a profile that an earlier version wrote are fitted here, and kept.
    """
    here = host.current()
    kept = None if store.leaves_aside(settings) else store.in_force(settings, here.fingerprint)
    if kept is not None and kept.trials and not kept.forests:
        kept = fitted(kept)
        if settings.profile is None and kept.forests:
            store.save(settings, kept)
    return kept or Profile(host=here.fields, fingerprint=here.fingerprint)


def fitted(profile: Profile, keys: Mapping[str, object] | set[str] | None = None) -> Profile:
    """Return a profile with trees fitted to its trials, of some ``"op@device"`` or of all."""
    import msgspec

    from autokern.core.registry import get, known
    from autokern.tuning.fitting import fit_own

    groups: dict[str, list[Trial]] = {}
    for trial in profile.trials:
        if known(trial.problem.op):
            groups.setdefault(key_of(trial.problem), []).append(trial)
    found, shipped = dict(profile.forests), recorded.forests()
    for key, trials in groups.items():
        if keys is None or key in keys:
            forest = fit_own(get(trials[0].problem.op), trials, shipped.get(key))
            if forest is not None and forest.own:
                found[key] = forest
    return msgspec.structs.replace(profile, forests=found, schema=SCHEMA)
