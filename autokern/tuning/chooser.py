"""Chooser: estimates of the candidates' times on a problem, by the trees of a profile and the shipped trees.

`calibration/ship.py` packs trees and rounded trials of other machines into `recorded.msgpack`.
"""

from __future__ import annotations

import functools
import math
import pkgutil
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from autokern.core.errors import suppressed
from autokern.core.op import Op
from autokern.core.problem import Feasibility, Problem
from autokern.core.registry import get, known
from autokern.core.settings import Settings
from autokern.core.state import once
from autokern.system import host
from autokern.tuning import store
from autokern.tuning.forest import CONFIDENCE, NOISE, Estimate, Forest, fit_own, words
from autokern.tuning.profile import ENOUGH, Profile, Timing, Trial, group_key, key_of, pools

_WORD, _DTYPE = 2.0, 1.0  # distance in octaves of problems that differ in one word, and in the dtype
_CALL, _FLOPS, _BYTES = 5e-6, 2e10, 1e10  # seconds of a call, flops and bytes a second, to scale times to other sizes
_FULL_RATE = {"6.0", "7.0", "8.0", "9.0", "10.0"}  # compute capabilities with float64 at half the rate of float32
HIGHEST = 2**19  # highest floor in elements: larger calls are dispatched, because their memory is checked
_FEW, MANY = 4, "/many"  # threads, and the suffix of keys for machines with more
UNIT = 0.01  # log units of the integers that store stock's seconds, and the ratios of other candidates to them


class Shipped(msgspec.Struct, frozen=True):
    """Other machines' trees and compressed trials by ``"op@device"``, and descriptions of these hosts."""

    forests: dict[str, Forest] = {}
    trials: dict[str, bytes] = {}
    hosts: list[dict[str, Any]] = []

    def told(self, fields: Mapping[str, Any]) -> Shipped:
        """Return the trees and trials that apply to a machine, under keys without suffixes."""
        many = has_many(fields)

        def own(found: dict[str, Any]) -> dict[str, Any]:
            few = {key: value for key, value in found.items() if not key.endswith(MANY)}
            return {key: found.get(key + MANY, value) for key, value in few.items()} if many else few

        return msgspec.structs.replace(self, forests=own(self.forests), trials=own(self.trials))


def has_many(fields: Mapping[str, Any]) -> bool:
    """Whether a machine has so many threads that its CPU has keys of its own: small pieces of work gain less."""
    cpu = fields.get("cpu")  # a profile may have any fields
    count = cpu.get("torch_threads") if isinstance(cpu, Mapping) else None
    return isinstance(count, int | float) and count > _FEW


@functools.cache
def recorded() -> Shipped:
    """Return the measurements of other machines; empty if the file is missing, which a bundler may drop."""
    data = None
    with suppressed(OSError):
        data = pkgutil.get_data("autokern.tuning", "recorded.msgpack")
    return Shipped() if data is None else msgspec.msgpack.decode(data, type=Shipped)


@functools.cache
def unpacked(data: bytes) -> Sequence[Trial]:
    """Return the trials in compressed data."""

    def trial(problem: Problem, logs: dict[str, int]) -> Trial:
        seconds = math.exp(UNIT * logs.pop("stock"))
        ratios = {"stock": 1.0} | {name: math.exp(UNIT * log) for name, log in logs.items()}
        return Trial(problem, {name: Timing(seconds * ratio, ratio) for name, ratio in ratios.items()})

    rows = msgspec.msgpack.decode(zlib.decompress(data), type=list[tuple[Problem, dict[str, int]]])
    return [trial(*row) for row in rows]


class Nearest(NamedTuple):
    """The trial nearest to a problem."""

    trial: Trial
    octaves: float  # its distance
    seconds: float  # of stock on the problem, scaled from the trial
    here: bool  # whether this machine ran the trial


class Chooser:
    """Estimates by a profile, and by trees of other hosts by ``"op@device"``, by default the shipped ones."""

    def __init__(self, profile: Profile, shipped: Mapping[str, Forest] | None = None) -> None:
        self.profile = profile
        self._told = recorded().told(profile.host or host.current().fields)  # of the profile's machine, or of this one
        self.shipped = self._told.forests if shipped is None else shipped

    @once
    def _trials(self) -> dict[str, list[Trial]]:
        return pools(self.profile.trials)

    def estimates(self, problem: Problem) -> dict[str, Estimate]:
        """Return Estimates by candidate, where this host or another one measured similar problems."""
        key = key_of(problem)
        own, shipped = self.profile.forests.get(key), self.shipped.get(key)
        if problem.device != "cpu" and problem.dtype == "float64":  # others' GPUs are alike if these are fast at it
            there = (self.profile.host or host.current().fields).get("accelerators", ())
            shipped = shipped if any(gpu.get("capability") in _FULL_RATE for gpu in there) else None
        forest = shipped if own is None or self.instead(problem) == "shipped" else own
        return {} if forest is None else forest.estimates(problem)

    def instead(self, problem: Problem) -> str:
        """Return whose choices the exam found faster on a problem: ``"shipped"``, ``"stock"``, or empty for its own."""
        return next((kept.instead for kept in self.profile.kept if kept.holds(problem)), "")

    def floor(self, op: str, device: str) -> int:
        """Return the number of elements below which only stock is chosen; 0 if unknown."""
        key = f"{op}@{device}"
        own, shipped = self.profile.forests.get(key), self.shipped.get(key)
        used = [own or shipped] + [shipped for kept in self.profile.kept if key_of(kept) == key]
        return min(0 if forest is None else forest.floor for forest in used)

    def knows(self, problem: Problem) -> bool:
        """Whether enough was measured for the op, dtype and device of a problem."""
        forest = self.profile.forests.get(key_of(problem))
        trials = 0 if forest is None else forest.trials.get(problem.dtype, 0)
        return trials >= ENOUGH or (trials > 0 and group_key(*problem.group) in self.profile.levels)

    def relative_error(self, op: Op, name: str, problem: Problem) -> float | None:
        """Return a candidate's worst error on the nearest problems of its kind, doubled for each octave between."""
        trials, place = self._trials.get(key_of(problem), ()), op.coordinates(problem)
        like = (t for t in trials if (t.problem.dtype, t.problem.words) == (problem.dtype, problem.words))
        timings = ((t.problem, t.timings[name].relative_error) for t in like if name in t.timings)
        found = [(math.dist(place, op.coordinates(p)), error) for p, error in timings if error is not None]
        closest = min((distance for distance, _ in found), default=0.0)
        errors = (error for distance, error in found if distance <= closest + 1)
        return float(max(errors) * 2.0**closest) if found else None

    def nearest(self, op: Op, problem: Problem) -> Nearest | None:
        """Return the trial nearest to a problem, of this machine if it has trials of the op, else of other hosts."""
        key = key_of(problem)
        own = nearest(op, problem, self._trials.get(key, ()))
        others = self._told.trials.get(key) if self.shipped else None
        return own or nearest(op, problem, () if others is None else unpacked(others), here=False)


def nearest(op: Op, problem: Problem, trials: Collection[Trial], here: bool = True) -> Nearest | None:
    """Return the trial of an op that is nearest to a problem, or None without trials of stock."""
    place, there = op.coordinates(problem), words(problem)

    def distance(trial: Trial) -> float:
        other = trial.problem
        unlike = _WORD**2 * len(there ^ words(other)) + _DTYPE**2 * (other.dtype != problem.dtype)
        return math.hypot(math.dist(place, op.coordinates(other)), math.sqrt(unlike))

    def supposed(at: Problem) -> float:
        work = op.features(at)
        return work.calls * _CALL + work.flops / _FLOPS + work.bytes / _BYTES

    trial = min((t for t in trials if "stock" in t.timings), key=distance, default=None)
    if trial is None:
        return None
    seconds = trial.timings["stock"].seconds * supposed(problem) / supposed(trial.problem)
    return Nearest(trial, distance(trial), seconds, here)


def expected(table: Feasibility, chooser: Chooser, settings: Settings) -> dict[str, Estimate]:
    """Return the estimates of all candidates whose time on samples predicts their time on other data."""
    if store.leaves_aside(settings):
        return {}
    names = {c.name for c in table.candidates if not c.tight}
    return {name: estimate for name, estimate in chooser.estimates(table.problem).items() if name in names}


def load(settings: Settings) -> Profile:
    """Return the pinned profile, or that of this host in the home folder, or an empty one."""
    here = host.current()
    kept = None if store.leaves_aside(settings) else store.in_force(settings, here.fingerprint)
    if kept is not None and not kept.forests and kept.trials:  # a recorded host, as in `calibration/hosts`
        kept = fitted(kept)
    return kept or Profile(host=here.fields, fingerprint=here.fingerprint)


def fitted(profile: Profile, keys: Collection[str] | None = None) -> Profile:
    """Return a profile with trees fitted to its trials, for these ``"op@device"`` keys or for all."""
    found, shipped = dict(profile.forests), Chooser(profile).shipped
    for key, trials in pools(profile.trials).items():
        name, _, device = key.partition("@")
        if known(name) and (keys is None or key in keys):
            forest = fit_own(get(name), trials, shipped.get(key))
            if forest is not None and forest.own:
                found[key] = msgspec.structs.replace(forest, floor=floor(get(name), forest, device))
    return msgspec.structs.replace(profile, forests=found)


def floor(op: Op, forest: Forest, device: str) -> int:
    """Return the number of elements below which the trees choose only stock; 0 if the op's default is not stock."""
    if type(op).default_candidate is not Op.default_candidate:
        return 0
    grid = (p for dtype in ("float64", "float32") for p in op.grid("full", dtype, device))
    halved = {p.replace(m=p.m >> k, n=p.n >> k) for p in grid for k in range(min(p.m, p.n).bit_length())}

    def is_won(problem: Problem) -> bool:
        faster = {n for n, e in forest.estimates(problem).items() if e.log_ratio + CONFIDENCE * e.sigma <= -NOISE}
        return any(c.name in faster and c.unsupported(problem) is None for c in op.candidates)

    won = (p.elements for p in sorted(halved, key=lambda p: p.elements) if is_won(p))
    return min(HIGHEST, next(won, 2 * HIGHEST) // 2)  # halved: problems in between are not tried
