"""Calibration: plan the trials, check every candidate against float64 truth, time them side by side, keep the timings.

A budget is hard: the length of a trial is extrapolated before it runs, and a trial that does not fit is skipped. Time
left after the grid is spent between neighbours with different winners. A calibration that ends early leaves a valid
profile of everything measured until then.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from autokern.core.errors import SettingsError
from autokern.core.op import LEVELS, Candidate, Op, Trialled, get, inside, registered
from autokern.core.problem import Problem
from autokern.core.settings import LEVELS_OF_ACCURACY
from autokern.core.tool import Tool
from autokern.system import host, keops, randomness, subprocess_probe
from autokern.system.progress import Progress, silent
from autokern.tuning import accuracy as accuracies
from autokern.tuning import timer
from autokern.tuning.plans import Group, between_winners, contenders, expected_seconds, plan
from autokern.tuning.profile import Ban, Profile, Timing, Trial, dated

__all__ = ["DTYPES", "calibrate", "chosen_devices", "chosen_ops", "gradient_errors"]

DTYPES = ("float64", "float32")
_TRYING, _TRYING_SHARE = 40.0, 0.25
"""Most seconds for trying a tool, and their largest part of the budget."""
_log = logging.getLogger("autokern")

_MIN_TIME = {"quick": 1e-4, "full": 5e-4}
_ROUNDS = {"quick": (3, 7), "full": (5, 15)}
_SHARE = {"quick": 0.04, "full": 0.08}
"""Part of the budget that one problem may take."""
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
    """Return device kinds to measure on, all that are there for None; raises SettingsError for an absent one."""
    there = ["cpu"] if host.accelerator() is None else ["cpu", host.accelerator().type]  # type: ignore[union-attr]
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
    run = _Calibration(level, accuracy, time.perf_counter() + budget, budget, known, progress or silent)
    parts, wholes = [op for op in ops if not op.composite], [op for op in ops if op.composite]

    def plans(chosen: list[Op]) -> list[Group]:
        groups = itertools.product(devices, chosen, dtypes)
        return [plan(op, level, dtype, device, known, accuracy) for device, op, dtype in groups]

    inside.active = inside.measuring = True
    try:
        with randomness.untouched():
            if any(candidate.compiles for op in ops for candidate in op.candidates):
                run.try_tools()
            if parts:
                run.measure(plans(parts), share=_PARTS_SHARE if wholes else 1.0)
            if wholes:
                if parts:  # from here on, parts are dispatched as in real calls
                    publish(known.merge(run.found()))
                run.measure(plans(wholes))
    finally:
        inside.active = inside.measuring = False
        profile = known.merge(run.found())
        publish(profile)
    return profile


class _Calibration:
    """One run: its deadline, and everything found so far."""

    def __init__(
        self, level: str, accuracy: str, deadline: float, budget: float, known: Profile, progress: Progress
    ) -> None:
        self._level, self._accuracy = level, accuracy
        self._deadline, self._budget, self._progress = deadline, budget, progress
        self._ends = deadline
        self._banned = {(b.op, b.candidate, b.dtype, b.device): b for b in known.banned}
        self._trials: list[Trial] = []
        self._setup: dict[str, float] = {}
        self._levels: dict[str, str] = {}
        self._fruitless: dict[str, str] = {}
        self._tools: dict[str, Tool] = {}
        self._tried = known.tools
        self._measured = {trial.problem: trial.timings for trial in known.trials}

    def found(self) -> Profile:
        """Return the measurements of this run."""
        return Profile(
            host=host.current().fields,
            fingerprint=host.current().fingerprint,
            trials=self._trials,
            banned=list(self._banned.values()),
            setup=self._setup,
            levels=self._levels,
            tools=self._tools,
            fruitless=self._fruitless,
            created=dated(),
        )

    def try_tools(self) -> None:
        """Try the tools of candidates that compile, in a full calibration without a good verdict on them."""
        known = self._tried.get("keops")
        settled = known is not None and known.works and known.setting == keops.setting()
        keops.believe(known if settled else None)
        if self._level != "full" or settled or _TRYING_SHARE * self._left < _TRYING or keops.keops_problem():
            return
        self._progress(0.0, "KeOps")
        verdict = self._tools["keops"] = subprocess_probe.try_keops(_TRYING)
        keops.believe(verdict)
        if not verdict.works:
            _log.info("KeOps does not work on this host: %s", verdict.found)

    @property
    def _left(self) -> float:
        return self._ends - time.perf_counter()

    def measure(self, groups: list[Group], share: float = 1.0) -> None:
        """Work through the grids in turns, then between neighbours whose winners differ, in a share of what is left."""
        self._ends = time.perf_counter() + share * (self._deadline - time.perf_counter())
        total = sum(len(g.queue) for g in groups) or 1
        done = 0
        pending = [g for g in groups if g.queue]
        while pending and self._left > 0:
            for group in pending:
                problem = group.queue.pop(0)
                self._try(group, problem, done / total)
                done += 1
            pending = [g for g in pending if g.queue]
        for group in groups:
            if group.trials and not group.skipped and not group.queue:
                self._levels[group.key] = self._level
            if not group.trials:
                self._fruitless[group.key] = dated()
        refinable = [g for g in groups if g.trials]
        while refinable and self._left > 0.05 * self._budget:
            refinable = [g for g in refinable if self._refine(g)]
        self._progress(1.0, "done")

    def _refine(self, group: Group) -> bool:
        problem = between_winners(group)
        if problem is None or self._left <= 0.05 * self._budget:
            return False
        return self._try(group, problem, 1 - max(0.0, self._left) / self._budget)

    def _contenders(self, op: Op, problem: Problem) -> list[Candidate]:
        return contenders(op, problem, self._level, self._accuracy)

    def _try(self, group: Group, problem: Problem, fraction: float) -> bool:
        expected = expected_seconds(group, problem) * len(self._contenders(group.op, problem)) * 3
        if expected > min(self._left, _SHARE[self._level] * self._budget):
            group.skipped += 1
            return False
        self._progress(max(fraction, 1 - self._left / self._budget), str(problem))
        try:
            timings = self._trial(group, problem)
        except (MemoryError, torch.OutOfMemoryError):
            group.skipped += 1
            return False
        if timings:
            if self._accuracy == "approximate" and self._level == "quick":
                timings |= self._measured.get(problem, {})  # what was known may be known better
            trial = Trial(problem, timings)
            self._trials.append(trial)
            group.trials.append(trial)
        return bool(timings)

    def _trial(self, group: Group, problem: Problem) -> dict[str, Timing]:
        op = group.op
        generator = torch.Generator().manual_seed(1234 + problem.n)
        with torch.device("cpu"):  # whatever the caller's default is, samples say where they go
            args = op.sample(problem, generator)
        calls: dict[str, Callable[[], Trialled]] = {}
        errors: dict[str, float] = {}
        warm: dict[str, float] = {}
        relative: dict[str, float] = {}
        truth = exact = None
        for candidate in self._contenders(op, problem):
            banned = (op.name, candidate.name, problem.dtype, problem.device) in self._banned
            if banned or group.hopeless(candidate, 5 if self._level == "quick" else 10):
                continue
            call = op.trial(candidate.run, problem, args)
            try:
                if candidate.compiles:
                    self._charge_setup(op, candidate, call)
                first = call()
                if candidate.accuracy == "approximate":
                    exact = exact or accuracies.truth(op, problem, args)
                    relative[candidate.name] = accuracies.relative_error(op, first, exact)
                elif self._must_check(group, candidate, problem):
                    truth = truth or gradient_errors(op, problem, args, first)
                    errors[candidate.name] = max(op.check(problem, first.out, args), truth(first))
                del first
                warm[candidate.name] = timer.once(call, self._synchronize(problem))
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
            synchronize=self._synchronize(problem),
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

    def _charge_setup(self, op: Op, candidate: Candidate, call: Callable[[], object]) -> None:
        key = f"{op.name}.{candidate.name}"
        self._setup[key] = max(self._setup.get(key, 0.0), timer.once(call, lambda: None))

    def _synchronize(self, problem: Problem) -> Callable[[], None]:
        kind = problem.device if host.accelerator() is None else host.accelerator().type  # type: ignore[union-attr]
        return lambda: host.synchronize(kind)

    def _ban(self, op: Op, candidate: Candidate, problem: Problem, reason: str) -> None:
        _log.info("banned %s.%s on this host: %s", op.name, candidate.name, reason)
        key = (op.name, candidate.name, problem.dtype, problem.device)
        self._banned[key] = Ban(*key[:2], dtype=problem.dtype, device=problem.device, reason=reason)


def gradient_errors(op: Op, problem: Problem, args: tuple[Any, ...], stock: Trialled) -> Callable[[Trialled], float]:
    """Return a function that gives the error of gradients against float64 truth.

    The unit is ten times stock's own error, and never less than 1000 eps of the largest gradient: a candidate may not
    be worse than the library by more than a small factor, however the problem is conditioned.
    """
    if not problem.grad:
        return lambda trialled: 0.0
    exact = accuracies.truth(op, problem, args).grads
    eps = 2.0**-52 if problem.dtype == "float64" else 2.0**-23
    unit = max(10 * accuracies.gap(stock.grads, exact), 1000 * eps)
    return lambda trialled: accuracies.gap(trialled.grads, exact) / unit
