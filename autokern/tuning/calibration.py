"""Calibration: plans trials, checks every candidate against float64 truth, and times candidates side by side.

The next trial is always the one that promises most (`plans`), so a calibration that ends early leaves the best that
could be had in its time. The budget is hard: the length of a trial is predicted before it runs, and one that does not
fit is skipped.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from autokern.core.errors import SettingsError
from autokern.core.op import LEVELS, Candidate, Op, inside
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.core.settings import LEVELS_OF_ACCURACY
from autokern.system import host, keops, randomness, subprocess_probe
from autokern.system.progress import Progress, silent
from autokern.tuning.cost_model import CostModel, KinOf, alone
from autokern.tuning.measuring import Measurer
from autokern.tuning.plans import Ask, Pool
from autokern.tuning.profile import ENOUGH, Profile, Trial, dated, group_key

DTYPES = ("float64", "float32")
_TRYING, _TRYING_SHARE = 40.0, 0.25
"""Most seconds for trying a tool, and their largest part of the budget."""
_log = logging.getLogger("autokern")

_SHARE = {"quick": 0.04, "full": 0.08}
"""Part of the budget that one problem may take."""
_NEAR_SHARE = 0.3
"""The same where one problem is at hand."""
_LAST_SHARE = 0.5
"""Part of the time left that one problem may take where no other is left that takes less."""
_PARTS_SHARE = 0.6
"""Part of the budget for ops that are no composites, where there are both."""
_TIMING_SHARE = 0.005
"""Part of the budget after which timing a problem goes on only until the round is complete."""
_LITTLE = 0.03
"""Expected regret, in log units, below which an op is known well enough however few its trials are."""
_UNPUBLISHED = 20.0
"""Seconds after which measurements are published in between."""
_AT_ONCE = 12
"""Known trials for which one more trial is chosen at once: choosing takes longer the more is known."""


def chosen_ops(names: str | Iterable[str] | None) -> list[Op]:
    """Return the ops of these names, all for None; raises SettingsError for an unknown one."""
    names = [names] if isinstance(names, str) else names
    return registered() if names is None else [get(name) for name in dict.fromkeys(names)]


def chosen_devices(names: str | Iterable[str] | None) -> list[str]:
    """Return device kinds to measure on, all of this host for None; raises SettingsError for an absent one."""
    device = host.accelerator()
    there = ["cpu"] if device is None else ["cpu", device.type]
    if names is None:
        return there
    kinds = [str(name).partition(":")[0] for name in ([names] if isinstance(names, str) else names)]
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
    kin: KinOf = alone,
    thorough: bool = False,
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
        What is near to it counts most; one problem may then take a large part of the budget.
    kin : callable
        Maps a kind of device to models of other hosts, which say what is likely before anything is measured.
    thorough : bool
        Whether candidates are measured that never won on another host of this kind.
    progress : callable, optional
        Called with the fraction done and a line of text.
    publish : callable, optional
        Called with the merged profile from time to time, at the end, and also when the calibration is interrupted.

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
    run = _Calibration(level, accuracy, budget, known, kin, progress or silent, publish)
    if near is not None:
        run.share = _NEAR_SHARE
    parts, wholes = [op for op in ops if not op.composite], [op for op in ops if op.composite]

    def pools(chosen: list[Op]) -> list[Pool]:
        options: dict[str, Any] = {"dtypes": tuple(dtypes), "accuracy": accuracy, "near": near, "thorough": thorough}
        options["banned"] = run.is_banned
        return [Pool(op, device, level, **options) for device, op in itertools.product(devices, chosen)]

    inside.active = inside.measuring = True
    try:
        with randomness.untouched():
            if any(candidate.compiles for op in ops for candidate in op.candidates):
                run.try_tools()
            if parts:
                run.measure(pools(parts), share=_PARTS_SHARE if wholes else 1.0)
            if wholes:
                if parts:  # from here on, parts are dispatched as in real calls
                    publish(run.profile())
                run.measure(pools(wholes))
            run.progress(1.0, "done")
    finally:
        inside.active = inside.measuring = False
        profile = run.profile()
        publish(profile)
    return profile


class _Calibration:
    """One run: its deadline and its measurements until now."""

    def __init__(
        self,
        level: str,
        accuracy: str,
        budget: float,
        known: Profile,
        kin: KinOf,
        progress: Progress,
        publish: Callable[[Profile], object],
    ) -> None:
        self._level, self._accuracy, self._budget, self.progress = level, accuracy, budget, progress
        self.share = _SHARE[level]
        self._deadline = self._ends = time.perf_counter() + budget
        self._publish, self._published = publish, time.perf_counter()
        self._known, self._kin = known, functools.cache(kin)
        self._found = Profile(host=host.current().fields, fingerprint=host.current().fingerprint)
        self._measurer = Measurer(level, known.banned)
        self._measured = {trial.problem: trial.timings for trial in known.trials}

    def profile(self) -> Profile:
        """Return the known measurements and those of this run."""
        measured = {"banned": self._measurer.banned, "setup": self._measurer.setup, "created": dated()}
        return self._known.merge(msgspec.structs.replace(self._found, **measured))

    def try_tools(self) -> None:
        """Try the tools of candidates that compile, in a full calibration without a good verdict on them."""
        known = self._known.tools.get("keops")
        settled = known is not None and known.works and known.setting == keops.setting()
        keops.believe(known if settled else None)
        if self._level != "full" or settled or _TRYING_SHARE * self._left < _TRYING or keops.keops_problem():
            return
        self.progress(0.0, "KeOps")
        verdict = self._found.tools["keops"] = subprocess_probe.try_keops(_TRYING)
        keops.believe(verdict)
        if not verdict.works:
            _log.info("KeOps does not work on this host: %s", verdict.found)

    def is_banned(self, candidate: Candidate, problem: Problem) -> bool:
        """Whether a candidate does not run on a problem, as far as is known by now."""
        return self._measurer.is_banned(candidate, problem)

    @property
    def _left(self) -> float:
        return self._ends - time.perf_counter()

    def measure(self, pools: list[Pool], share: float = 1.0) -> None:
        """Run the trials that promise most, in a share of the time."""
        self._ends = time.perf_counter() + share * (self._deadline - time.perf_counter())
        asks = {id(pool): self._asked(pool) if self._left > 0 else [] for pool in pools}
        while self._left > 0:
            pending = [pool for pool in pools if asks[id(pool)]]
            if not pending:
                break
            pool = max(pending, key=lambda pool: asks[id(pool)][0].promise)
            self._try(pool, asks[id(pool)].pop(0))
            if not asks[id(pool)]:
                asks[id(pool)] = self._asked(pool)
            if time.perf_counter() - self._published > _UNPUBLISHED:  # so much is lost if the process is killed
                self._publish(self.profile())
                self._published = time.perf_counter()
        for pool in pools:
            self._mark(pool)

    def _mark(self, pool: Pool) -> None:
        """Note which dtypes of an op are known now, and which were tried in vain."""
        enough = pool.expected_regret(self._model(pool)) < _LITTLE
        for dtype in pool.dtypes:
            key, group = group_key(pool.op.name, dtype, pool.device), (pool.op.name, dtype, pool.device)
            trials = [problem for problem in self._measured if problem.group == group]
            if len(trials) >= ENOUGH or (trials and enough):
                self._found.levels[key] = self._level
            elif not (trials or pool.was_disturbed):
                self._found.fruitless[key] = dated()

    def _model(self, pool: Pool) -> CostModel:
        known = [Trial(p, t) for p, t in self._measured.items() if (p.op, p.device) == (pool.op.name, pool.device)]
        return CostModel(Profile(trials=known), self._kin)

    def _asked(self, pool: Pool) -> list[Ask]:
        """Return the next trials of a pool: one, and more at once where so many are known that each changes little."""
        model = self._model(pool)
        known = {p: self._measured[p] for p in pool.able if p in self._measured}
        quiet = {p: found.keys() for p, found in known.items() if not any(t.disturbed for t in found.values())}
        most, count = min(self._left, self.share * self._budget), 1 + len(known) // _AT_ONCE
        found = pool.asks(model, quiet, most, count) or pool.asks_again(model, quiet, most)
        return found or pool.asks(model, quiet, _LAST_SHARE * self._left)

    def _try(self, pool: Pool, ask: Ask) -> None:
        """Run a trial and keep what can be trusted of it; a problem that others disturbed is tried once more later."""
        if ask.seconds > min(self._left, max(self.share * self._budget, _LAST_SHARE * self._left)):
            pool.skipped.add(ask.problem)
            return
        if len(self._measurer.runnable(ask.problem, ask.candidates)) < 2:
            pool.skipped.add(ask.problem)
            return
        self.progress(1 - max(0.0, self._deadline - time.perf_counter()) / self._budget, str(ask.problem))
        seconds, problem = min(self._left, _TIMING_SHARE * self._budget), ask.problem
        try:
            timings = self._measurer.timings(pool.op, problem, ask.candidates, seconds)
        except (MemoryError, torch.OutOfMemoryError):
            timings = {}
        except Exception:
            if problem != pool.near:
                raise
            timings = {}  # a program asked a kind of problem that the op makes no sample of
        pool.skipped.add(problem)
        if timings:
            known = self._measured.get(problem, {})
            if self._accuracy == "approximate" and self._level == "quick":
                timings |= known  # an earlier timing may be the better one
            self._found.trials.append(Trial(problem, timings))
            self._measured[problem] = {**known, **timings}
        is_left = len(self._measurer.runnable(problem, ask.candidates)) > 1
        if any(timing.disturbed for timing in timings.values()) or (is_left and not timings):
            pool.disturbed.append(problem)
