"""Calibration: plans trials, checks every candidate against float64 truth, and times candidates side by side.

The budget is hard: the length of a trial is extrapolated before it runs, and a trial that does not fit is skipped. Time
left after the grid is spent between neighbours with different winners. A calibration that ends early leaves a valid
profile of all measurements until then.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from autokern.core.errors import SettingsError
from autokern.core.op import LEVELS, Candidate, Op, inside
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.core.settings import LEVELS_OF_ACCURACY
from autokern.system import host, keops, randomness, subprocess_probe
from autokern.system.progress import Progress, silent
from autokern.tuning import timer
from autokern.tuning.accuracy import gradient_errors, relative_error, truth
from autokern.tuning.plans import Group, between_winners, contenders, expected_seconds, plan
from autokern.tuning.profile import Ban, Profile, Timing, Trial, dated
from autokern.tuning.trial import Trialled, trial

DTYPES = ("float64", "float32")
_TRYING, _TRYING_SHARE = 40.0, 0.25
"""Most seconds for trying a tool, and their largest part of the budget."""
_log = logging.getLogger("autokern")

_MIN_TIME = {"quick": 1e-4, "full": 5e-4}
_ROUNDS = {"quick": (3, 7), "full": (5, 15)}
_SHARE = {"quick": 0.04, "full": 0.08}
"""Part of the budget that one problem may take."""
_NEAR_SHARE = 0.3
"""The same where the problems of one call are wanted."""
_PARTS_SHARE = 0.6
"""Part of the budget for ops that are no composites, where there are both."""
_TIMING_SHARE = 0.005
"""Part of the budget after which timing a problem goes on only until the round is complete."""
_CHECKED_ELEMENTS = 300_000
"""Larger results are checked only once in their group: truth costs more than timing."""


def chosen_ops(names: Iterable[str] | None) -> list[Op]:
    """Return the ops of these names, all for None; raises SettingsError for an unknown one."""
    return registered() if names is None else [get(name) for name in dict.fromkeys(names)]


def chosen_devices(names: Iterable[str] | None) -> list[str]:
    """Return device kinds to measure on, all of this host for None; raises SettingsError for an absent one."""
    device = host.accelerator()
    there = ["cpu"] if device is None else ["cpu", device.type]
    if names is None:
        return there
    kinds = [str(name).partition(":")[0] for name in names]
    for kind in kinds:
        if kind not in there:
            raise SettingsError(f"device {kind!r} was asked for; torch finds {', '.join(there)} on this machine")
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
    """Measure, and return a profile of the new measurements merged into the known ones.

    Parameters
    ----------
    ops, devices, dtypes
        Ops, device kinds and dtypes to measure.
    level : {"quick", "full"}
        How many sizes, and how often.
    budget : float
        Seconds; a trial that would exceed it does not begin.
    known : Profile
        Measurements of the same host; problems that they lack are measured first.
    accuracy : {"same", "approximate"}
        Whether candidates of lower precision are measured too, and their errors.
    near : Problem, optional
        Measured first, then what is nearest to it; one problem may then take a large part of the budget.
    progress : callable, optional
        Called with the fraction done and a line of text.
    publish : callable, optional
        Called with the merged profile at the end, and also when the calibration is interrupted.

    Returns
    -------
    Profile
    """
    if level not in LEVELS:
        raise SettingsError(f"level {level!r} was asked for; there are {', '.join(LEVELS)}")
    if not budget > 0:
        raise SettingsError(f"a budget of {budget} seconds was given; measuring takes more than none")
    if accuracy not in LEVELS_OF_ACCURACY:
        raise SettingsError(f"accuracy {accuracy!r} was asked for; there are {', '.join(LEVELS_OF_ACCURACY)}")
    run = _Calibration(level, accuracy, budget, known, progress or silent)
    if near is not None:
        run.share = _NEAR_SHARE
    parts, wholes = [op for op in ops if not op.composite], [op for op in ops if op.composite]

    def plans(chosen: list[Op]) -> list[Group]:
        groups = itertools.product(devices, chosen, dtypes)
        return [plan(op, level, dtype, device, known, accuracy, near) for device, op, dtype in groups]

    inside.active = inside.measuring = True
    try:
        with randomness.untouched():
            if any(candidate.compiles for op in ops for candidate in op.candidates):
                run.try_tools()
            if parts:
                run.measure(plans(parts), share=_PARTS_SHARE if wholes else 1.0)
            if wholes:
                if parts:  # from here on, parts are dispatched as in real calls
                    publish(run.profile())
                run.measure(plans(wholes))
    finally:
        inside.active = inside.measuring = False
        profile = run.profile()
        publish(profile)
    return profile


class _Calibration:
    """One run: its deadline and its measurements until now."""

    def __init__(self, level: str, accuracy: str, budget: float, known: Profile, progress: Progress) -> None:
        self._level, self._accuracy, self._budget, self._progress = level, accuracy, budget, progress
        self.share = _SHARE[level]
        self._deadline = self._ends = time.perf_counter() + budget
        self._known = known
        self._found = Profile(host=host.current().fields, fingerprint=host.current().fingerprint)
        self._banned = {(b.op, b.candidate, b.dtype, b.device) for b in known.banned}
        self._measured = {trial.problem: trial.timings for trial in known.trials}

    def profile(self) -> Profile:
        """Return the known measurements and those of this run."""
        return self._known.merge(msgspec.structs.replace(self._found, created=dated()))

    def try_tools(self) -> None:
        """Try the tools of candidates that compile, in a full calibration without a good verdict on them."""
        known = self._known.tools.get("keops")
        settled = known is not None and known.works and known.setting == keops.setting()
        keops.believe(known if settled else None)
        if self._level != "full" or settled or _TRYING_SHARE * self._left < _TRYING or keops.keops_problem():
            return
        self._progress(0.0, "KeOps")
        verdict = self._found.tools["keops"] = subprocess_probe.try_keops(_TRYING)
        keops.believe(verdict)
        if not verdict.works:
            _log.info("KeOps does not work on this host: %s", verdict.found)

    @property
    def _left(self) -> float:
        return self._ends - time.perf_counter()

    def measure(self, groups: list[Group], share: float = 1.0) -> None:
        """Work through the grids in turns, then between neighbours whose winners differ, in a share of the time."""
        self._ends = time.perf_counter() + share * (self._deadline - time.perf_counter())
        total, done = sum(len(g.queue) for g in groups), 0
        while self._left > 0 and (pending := [g for g in groups if g.queue]):
            for group in pending:
                self._try(group, group.queue.pop(0), done / total)
                done += 1
        for group in groups:
            if group.trials and not group.skipped and not group.queue:
                self._found.levels[group.key] = self._level
            if not group.trials:
                self._found.fruitless[group.key] = dated()
        refinable = [g for g in groups if g.trials]
        while refinable and self._left > 0.05 * self._budget:
            refinable = [g for g in refinable if self._refine(g)]
        self._progress(1.0, "done")

    def _refine(self, group: Group) -> bool:
        problem = between_winners(group)
        if problem is None or self._left <= 0.05 * self._budget:
            return False
        return self._try(group, problem, 1 - max(0.0, self._left) / self._budget)

    def _try(self, group: Group, problem: Problem, fraction: float) -> bool:
        candidates = contenders(group.op, problem, self._level, self._accuracy)
        expected = expected_seconds(group, problem) * len(candidates) * 3
        if expected > min(self._left, self.share * self._budget):
            group.skipped += 1
            return False
        self._progress(max(fraction, 1 - self._left / self._budget), str(problem))
        try:
            timings = self._trial(group, problem, candidates)
        except (MemoryError, torch.OutOfMemoryError):
            group.skipped += 1
            return False
        if timings:
            if self._accuracy == "approximate" and self._level == "quick":
                timings |= self._measured.get(problem, {})  # an earlier timing may be the better one
            for trials in (self._found.trials, group.trials):
                trials.append(Trial(problem, timings))
        return bool(timings)

    def _trial(self, group: Group, problem: Problem, candidates: list[Candidate]) -> dict[str, Timing]:
        op, kind = group.op, host.current().devices[-1]

        def synchronize() -> None:
            host.synchronize(kind)

        with torch.device("cpu"):  # the caller may have set another default
            args = op.sample(problem, torch.Generator().manual_seed(1234 + problem.n))
        calls: dict[str, Callable[[], Trialled]] = {}
        errors: dict[str, float] = {}
        warm: dict[str, float] = {}
        relative: dict[str, float] = {}
        gradient_error = exact = None
        for candidate in candidates:
            banned = (op.name, candidate.name, problem.dtype, problem.device) in self._banned
            if banned or group.hopeless(candidate, 5 if self._level == "quick" else 10):
                continue
            call = trial(op, candidate.run, problem, args)
            try:
                if candidate.compiles:
                    key, seconds = f"{op.name}.{candidate.name}", timer.once(call, lambda: None)
                    self._found.setup[key] = max(self._found.setup.get(key, 0.0), seconds)
                first = call()
                if candidate.accuracy == "approximate":
                    exact = exact or truth(op, problem, args)
                    relative[candidate.name] = relative_error(op, first, exact)
                elif self._must_check(group, candidate, problem):
                    gradient_error = gradient_error or gradient_errors(op, problem, args, first)
                    errors[candidate.name] = float(max(op.check(problem, first.out, args), gradient_error(first)))
                del first
                warm[candidate.name] = timer.once(call, synchronize)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                _log.debug("candidate %s.%s failed on %s", op.name, candidate.name, problem, exc_info=True)
                if candidate.name == "stock":
                    return {}
                self._ban(op, candidate, problem, f"raised {type(error).__name__} on {problem}")
                continue
            if errors.get(candidate.name, 0.0) > 1 and not candidate.as_stock:
                self._ban(op, candidate, problem, f"error {errors[candidate.name]:.3g} times its bound on {problem}")
                continue
            calls[candidate.name] = call
        if len(calls) < 2:
            return {}
        timings = timer.compare(
            calls,
            synchronize=synchronize,
            seconds=min(self._left, _TIMING_SHARE * self._budget),
            min_time=_MIN_TIME[self._level],
            rounds=_ROUNDS[self._level],
            warm=warm,
        )
        return {
            n: msgspec.structs.replace(t, error=errors.get(n, 0.0), relative_error=relative.get(n))
            for n, t in timings.items()
        }

    def _must_check(self, group: Group, candidate: Candidate, problem: Problem) -> bool:
        """Whether this candidate has not been checked yet on such a variant, with a result this large."""
        large = problem.batch * problem.m * problem.n > _CHECKED_ELEMENTS
        kind = (candidate.name, () if large else problem.words, problem.batch > 1)
        seen = kind in group.checked
        group.checked.add(kind)
        return not seen

    def _ban(self, op: Op, candidate: Candidate, problem: Problem, reason: str) -> None:
        _log.info("banned %s.%s on this host: %s", op.name, candidate.name, reason)
        self._banned.add((op.name, candidate.name, problem.dtype, problem.device))
        self._found.banned.append(Ban(op.name, candidate.name, problem.dtype, problem.device, reason))
