"""Calibration: check and time the candidates on random problems, innermost ops first, then fit the trees.

The budget is hard: a trial that is predicted not to fit it is skipped, one that takes far longer is given up.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from autokern.core.errors import SettingsError, recoverable
from autokern.core.op import Candidate, Op
from autokern.core.output import Progress
from autokern.core.problem import Problem, nothing
from autokern.core.registry import get, registered
from autokern.core.state import inside
from autokern.system import host, memory
from autokern.tuning.chooser import Chooser, fitted, nearest
from autokern.tuning.forest import CONFIDENCE, NOISE, Estimate
from autokern.tuning.measuring import Measurer, draw, measurable
from autokern.tuning.profile import ENOUGH, Profile, Timing, Trial, dated, group_key, key_of, pools

DTYPES = ("float64", "float32")
_DRAWN = {"quick": 24, "full": 120}  # problems drawn for each op, dtype and device
_WORK = {"quick": (2e9, 2e8), "full": None}  # most flops and bytes of stock on a problem; None: `draw`'s defaults
_SHARE = {"quick": 0.02, "full": 0.012}  # part of the budget that one problem may take
_NEAR_SHARE = 0.5  # the same for the problem at hand, at first use
_TIMING_SHARE = 0.005  # part of the budget after which the timing of a problem ends with the current round
_HOPELESS = math.log(1.6)  # a candidate whose log ratio on other hosts is larger is not measured
_PROVEN = 6  # a quick calibration leaves an op after this many problems in a row with a right shipped choice
_RATES = 4e9, 4e10  # flops and bytes a second of a CPU and an accelerator before the first measurement: pessimistic
_COMPILING = 0.05  # part of the budget that an op's candidates on a device may spend on compiling
_SHORT, _LONG = 0.002, 0.2  # parts of the budget: shorter compilations count as free, longer ones are not begun
_ROUNDS, _ONCE = 10.0, 3e-3  # expected calls of each candidate in a trial, and further seconds of a trial
_OUTERMOST = 10  # nesting of plugins' composite ops that do not state it


def chosen_ops(names: str | Iterable[str] | None) -> list[Op]:
    """Return the ops of these names, all for None; SettingsError if one is unknown."""
    names = [names] if isinstance(names, str) else names
    return registered() if names is None else [get(name) for name in dict.fromkeys(names)]


def chosen_devices(names: str | Iterable[str] | None) -> list[str]:
    """Return the device kinds to measure on, all of this host for None; SettingsError if one is absent."""
    device = host.accelerator()
    there = ["cpu"] if device is None else ["cpu", device.type]
    names = [names] if isinstance(names, str) else names
    kinds = there if names is None else [str(name).partition(":")[0] for name in names]
    if absent := [kind for kind in kinds if kind not in there]:
        raise SettingsError(f"device {absent[0]!r} was asked for; torch finds {', '.join(there)} on this machine")
    return kinds


def calibrate(
    ops: list[Op],
    level: str,
    budget: float,
    devices: list[str],
    known: Profile,
    *,
    dtypes: Iterable[str] = DTYPES,
    accuracy: str = "same",
    near: Problem | None = None,
    progress: Progress | None = None,
    publish: Callable[[Profile], object] = lambda profile: None,
) -> Profile:
    """Measure for `budget` seconds; return the `known` profile with the new measurements and trees fitted to them.

    The problem `near` comes first, then similar ones. `publish` gets the profile after each level of nesting.
    """
    run, nesting = _Calibration(level, budget, known, progress or nothing), operator.attrgetter("nesting")
    profile = run.profile()
    memory.recycle()  # as in programs
    with inside.having(active=True, measuring=True), host.random_states_kept(), _without_torchs_warning():
        form = tuple(dtypes), level, accuracy, near
        waiting = sorted((_Pool(op, device, *form) for device in devices for op in ops), key=nesting)
        left = sum(pool.weight for pool in waiting)
        for _, group in itertools.groupby(waiting, key=nesting):
            here = list(group)
            weight = sum(pool.weight for pool in here)
            run.measure(here, weight / max(left, weight, 1.0))
            left -= weight
            profile = run.profile()
            publish(profile)
        run.progress(1.0, "done")
    return profile


@contextlib.contextmanager
def _without_torchs_warning() -> Iterator[None]:
    """Ignore torch's warning in the first backward pass on a GPU; `catch_warnings` would undo others' filters."""
    filters: Any = warnings.filters
    filters.insert(0, entry := ("ignore", re.compile("Attempting to run cuBLAS"), UserWarning, None, 0))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread may have put other filters in place
            filters.remove(entry)


class _Pool:
    """The problems of one op on one device kind that a calibration may measure."""

    def __init__(self, op: Op, device: str, dtypes: tuple[str, ...], level: str, accuracy: str, near: Any) -> None:
        self.op, self.device, self.dtypes, self.near = op, device, dtypes, near
        self.nesting = op.nesting or _OUTERMOST * op.composite
        problems = draw(op, _DRAWN[level] * len(dtypes), dtypes, device, "calibration", _WORK[level])
        if near is not None and near.op == op.name:
            place = op.coordinates(near)
            unlike = {p: 2.0 * len({*p.words} ^ {*near.words}) for p in problems}
            problems.sort(key=lambda p: unlike[p] + math.dist(place, op.coordinates(p)))
            problems.insert(0, near)
        self.able = {p: found for p in problems if len(found := measurable(op, p, level, accuracy)) > 1}
        kinds = {(p.variant, p.grad, p.batch > 1) for p in self.able}
        self.weight = math.sqrt(len(kinds) * max(map(len, self.able.values()), default=0))
        self.waiting, self.later = list(self.able), set[Problem]()
        self.disturbed = set[Problem]()  # problems that are repeated at the end
        self.spent, self.compiling, self.proven, self.slower = 0.0, 0.0, 0, 1.0


class _Calibration:
    """One run: its deadline and its measurements so far."""

    def __init__(self, level: str, budget: float, known: Profile, progress: Progress) -> None:
        self._level, self._budget, self.progress, self._known = level, budget, progress, known
        self._deadline = self._ends = time.perf_counter() + budget
        self._found = Profile(host=host.current().fields, fingerprint=host.current().fingerprint)
        self._measurer = Measurer(level, known.banned)
        self._others = Chooser(Profile())
        self._fresh: set[str] = set()
        self._timed = pools(known.trials)

    def profile(self) -> Profile:
        """Return the known profile merged with this run's measurements, with trees for the ops that were measured."""
        self._found.banned, self._found.setup = self._measurer.banned, self._measurer.setup
        self._found.created = dated()
        whole = self._known.merge(self._found)
        if self._fresh:
            kept = [k for k in whole.kept if key_of(k) not in self._fresh]
            self._known = whole = msgspec.structs.replace(fitted(whole, self._fresh), kept=kept)
            self._fresh = set()
        return whole

    @property
    def _left(self) -> float:
        return self._ends - time.perf_counter()

    def _clock(self) -> float:
        """Return the time of a clock that stops while candidates compile."""
        return time.perf_counter() - self._measurer.compiling

    def measure(self, here: list[_Pool], share: float) -> None:
        """Measure within a share of the time left; the pool with the least time spent by weight is next."""
        self._ends = time.perf_counter() + share * (self._deadline - time.perf_counter())
        self._half = 0.5 * self._left
        pending = list(here)
        while pending and self._left > 0:
            pool = min(pending, key=lambda each: each.spent / max(each.weight, 1.0))
            began, may_stop = self._clock(), self._level == "quick" and pool.near is None
            if pool.waiting:
                compiled = self._measurer.compiling
                self._try(pool, pool.waiting.pop(0))
                pool.spent += self._clock() - began
                pool.compiling += self._measurer.compiling - compiled
            if not pool.waiting or (may_stop and pool.proven >= _PROVEN * len(pool.dtypes)):
                pending.remove(pool)
        for pool, dtype in ((each, dtype) for each in here for dtype in each.dtypes):
            group = pool.op.name, dtype, pool.device
            trials = sum(t.problem.group == group for of in self._timed.values() for t in of)
            if trials >= ENOUGH or (trials and (not pool.waiting or pool.proven)):
                self._found.levels[group_key(*group)] = self._level
            elif not (trials or pool.disturbed):
                self._found.fruitless[group_key(*group)] = dated()

    def _may_compile(self, pool: _Pool, candidate: Candidate) -> bool:
        """Whether to compile a candidate now: at once if that is short on record, else in the second half."""
        told = self._known.setup | self._measurer.setup
        takes = told.get(f"{pool.op.name}.{candidate.name}", _SHORT * self._budget)
        usual = takes <= min(_LONG * self._budget, self._left) and pool.compiling <= _COMPILING * self._budget
        return takes < _SHORT * self._budget or (usual and self._left < self._half)

    def _try(self, pool: _Pool, problem: Problem) -> None:
        """Run a trial and keep its trustworthy timings; a problem that others disturbed is repeated once at the end."""
        timed, told = self._timed.setdefault(key_of(problem), []), self._others.estimates(problem)

        def may_win(candidate: Candidate) -> bool:
            most, one = -NOISE if candidate.compiles else _HOPELESS, told.get(candidate.name)
            hopeful = one is None or one.log_ratio - CONFIDENCE * one.sigma < most
            return hopeful or candidate.accuracy == "approximate"

        promising = (c for c in filter(may_win, pool.able[problem]) if not c.compiles or self._may_compile(pool, c))
        candidates = self._measurer.runnable(problem, promising)
        known = next((t for t in timed if t.problem == problem), None)
        if len(candidates) < 2 or (known and not known.disturbed and {c.name for c in candidates} <= {*known.timings}):
            return
        share = _NEAR_SHARE if problem == pool.near else _SHARE[self._level]
        near, work = nearest(pool.op, problem, timed), pool.op.features(problem)
        if near is None and problem.device == "cpu":  # accelerators differ by orders of magnitude
            near = self._others.nearest(pool.op, problem)
        rate = _RATES[problem.device != "cpu"]
        once = 1e-4 + (work.flops + work.bytes) / rate if near is None else near.seconds * 2 ** (0.2 * near.octaves)
        ratios = (math.exp(min(told[c.name].log_ratio, _HOPELESS)) if c.name in told else 1.0 for c in candidates)
        expected = _ONCE + _ROUNDS * once * sum(ratios)
        if pool.slower * expected > min(self._left, share * self._budget):
            if near is None and problem not in pool.later:  # a neighbour measured meanwhile may lower the prediction
                pool.later.add(problem)
                pool.waiting.append(problem)
            return
        began, timings, seconds = self._clock(), dict[str, Timing](), min(self._left, _TIMING_SHARE * self._budget)
        self.progress(1 - max(0.0, self._deadline - time.perf_counter()) / self._budget, str(problem))
        try:
            timings = self._measurer.timings(pool.op, problem, candidates, seconds, self._ends + share * self._budget)
        except (MemoryError, torch.OutOfMemoryError):
            pass
        except Exception as error:  # the op may be unable to make a sample of the problem at hand
            if problem != pool.near or not recoverable(error, pool.op):
                raise
        pool.slower = max(1.0, math.sqrt(pool.slower * (self._clock() - began) / expected))
        if timings:
            trial = Trial(problem, timings)
            self._found.trials.append(trial)
            timed.append(trial)
            self._fresh.add(key_of(problem))
            pool.proven = pool.proven + 1 if _is_right(told, timings) else 0
        undone = not timings and len(self._measurer.runnable(problem, candidates)) > 1
        if problem not in pool.disturbed and (undone or any(timing.disturbed for timing in timings.values())):
            pool.disturbed.add(problem)
            pool.waiting.append(problem)


def _is_right(told: Mapping[str, Estimate], timings: Mapping[str, Timing]) -> bool:
    """Whether the choice by other hosts' estimates is within the noise of the fastest measured candidate."""
    if not told or any(name not in told for name in timings):
        return False
    chosen = min((name for name in told if name in timings), key=lambda name: told[name].log_ratio)
    chosen = chosen if told[chosen].log_ratio < -NOISE else "stock"
    return timings[chosen].ratio <= math.exp(NOISE) * min(timing.ratio for timing in timings.values())
