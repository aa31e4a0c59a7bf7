"""Learning from use: where a choice is uncertain and used often, candidates are compared on the user's own calls.

The problems that share a decision share a case. Its candidates, stock among them, run in turns on the arguments of some
calls, in a small share of the time that the case has served and of the process' time. The medians of paired ratios
decide. A case changes its candidate once in a process at most; results are kept in the profile.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from autokern.core.decision import Decision
from autokern.core.feasibility import Feasibility
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.runtime import beside
from autokern.runtime.case import Case
from autokern.runtime.memo import NEVER, Entry
from autokern.runtime.overlay import Overlay
from autokern.system import host, memory_limit
from autokern.tuning import store, timer
from autokern.tuning.accuracy import gap
from autokern.tuning.cost_model import CostModel
from autokern.tuning.profile import Profile, Trial, dated

__all__ = ["Learning"]

_log = logging.getLogger("autokern")

_OF_CASE, _OF_PROCESS = 0.03, 0.01
"""Shares of the time that a case has served, and of the time since the first call, that comparisons may take."""
_SAVING = 0.01
"""Seconds that are set aside for saving."""
_OVERHEAD = 3e-4
"""Seconds of a comparison apart from the candidates."""
_SAMPLE = 5e-5
"""Seconds that one sample lasts at least."""
_LEAST = 1e-8
"""Least seconds of a call."""
_TURNS = 2
"""Rounds of one comparison of short calls; each order is followed by its reverse."""
_LONG = 2e-4
"""Seconds from which a single run is a sample."""
_OVERRUN = 4.0
"""Times of the expected seconds after which a comparison is given up."""
_AGREE = {"float64": 2.0**-23, "float32": 2.0**-9}
"""Largest difference of results that still counts as rounding, relative to the largest entry."""
_HELD = 3
"""Times of a candidate's memory that a comparison may need: its results beside those of another, and a workspace."""
_MOST_CASES = 2_000

_comparing = threading.Lock()


class Learning:
    """What a session learns from its calls.

    Parameters
    ----------
    settings : Settings
        Orders of the user.
    model : callable
        Returns the cost model in force.
    """

    def __init__(self, settings: Settings, model: Callable[[], CostModel]) -> None:
        self._settings, self._model = settings, model
        pinned = settings.deterministic or settings.profile is not None or settings.random_seed is not None
        self._active = settings.learn != "off" and not pinned
        self._cases: dict[Problem, Case] = {}
        self._banned: set[tuple[str, str]] = set()
        self._began, self._spent = time.perf_counter(), 0.0
        self._registered = False
        self._apart = Overlay(settings, None)

    def attach(self, entry: Entry, settings: Settings) -> int:
        """Give an entry the case of its problem; return the call from which on candidates are compared, or `NEVER`."""
        decision = entry.decision
        case = self._cases.get(decision.problem.coarse)
        if case is None and decision.contenders and self._may_learn(entry, settings):
            if len(self._cases) >= _MOST_CASES:
                self._cases = {cell: known for cell, known in self._cases.items() if known.rounds or not known.open}
            case = self._cases[decision.problem.coarse] = Case(decision)
        if case is None or settings is not self._settings or entry.trial:
            return NEVER
        entry.case = case
        case.meet(entry)
        return self._due(entry, case)

    def restart(self) -> None:
        """Forget what is not settled: the choices that it is about are taken anew."""
        self._cases = {cell: case for cell, case in self._cases.items() if not case.open}
        self._apart.memo.clear()

    def _may_learn(self, entry: Entry, settings: Settings) -> bool:
        usual = self._active and settings is self._settings and not entry.trial
        return usual and entry.decision.problem.device == "cpu" and not (host.multi_rank() or host.forked())

    def _due(self, entry: Entry, case: Case) -> int:
        """Return the call at which the case will have served long enough for a comparison."""
        if not case.open or entry.candidate.name != case.current:
            return NEVER
        missing = (case.spent + self._cost(case)) / _OF_CASE - case.served
        return entry.count + max(1, math.ceil(missing / case.seconds(case.current)))

    def _cost(self, case: Case) -> float:
        """Return the seconds that a comparison is expected to take."""
        known = [case.seconds(name) for name in case.names]
        turns = 0 if min(known) >= _LONG else _TURNS
        return _OVERHEAD + sum(t + turns * (t if t >= _SAMPLE else _SAMPLE + 2 * t) for t in known)

    def check(self, entry: Entry, args: tuple[Any, ...]) -> int:
        """Compare candidates on the arguments of a call if that fits; return the call of the next check, or `NEVER`.

        The case of the entry knows the winner then, if there is one.
        """
        case, began = entry.case, time.perf_counter()
        case.meet(entry)
        due = self._due(entry, case)
        if due > entry.count + 1:
            return due
        cost, names = self._cost(case), self._names(entry, case)
        if len(names) < 2 or case.current not in names:
            case.open = False
            return NEVER
        # until the process has run long enough, if it goes on as it began
        wait = (self._spent + cost + _SAVING) / _OF_PROCESS / max(began - self._began, _LEAST)
        fits = wait <= 1 and self._may_learn(entry, self._settings) and self._fits(entry, names)
        if not fits or not beside.harmless(args) or not _comparing.acquire(blocking=False):
            return math.ceil(entry.count * (min(max(wait, 1.05), 1.5) if wait > 1 else 1.5)) + 1
        try:
            self._compare(entry, case, names, args, began + _OVERRUN * cost)
            self._conclude(entry.op, case)
        except Exception:
            case.open = False
            _log.debug("could not compare candidates of %s", entry.decision.problem, exc_info=True)
        finally:
            _comparing.release()
            spent = time.perf_counter() - began
            case.spent += spent
            self._spent += spent
        return self._due(entry, case)

    def _names(self, entry: Entry, case: Case) -> list[str]:
        table = Feasibility(entry.op, entry.decision.problem)
        able = [n for n in case.names if (entry.op.name, n) not in self._banned]
        return [n for n in able if n in entry.op.names() and table.why_not(entry.op[n]) is None]

    def _fits(self, entry: Entry, names: list[str]) -> bool:
        problem = entry.decision.problem
        need = _HELD * max(entry.op[name].memory(problem) for name in names)
        return memory_limit.fits(need, problem.device)

    def _compare(self, entry: Entry, case: Case, names: list[str], args: tuple[Any, ...], ends: float) -> None:
        """Run all candidates once and compare what they give; time them in turns where one run is too short."""
        op, problem = entry.op, entry.decision.problem
        self._keep_at_exit()
        order = names if len(case.rounds) % 2 == 0 else names[::-1]
        with beside.unseen(self._settings, args, self._apart):
            calls = beside.trials(op, problem, order, args)
            seconds, faults = self._run(op, problem, case, calls, ends)
            agreed = self._agreeing(op, problem, case, seconds, faults)
            known, case.warm = case.warm, case.warm | set(agreed)
            if len(agreed) < 2 or time.perf_counter() > ends:
                return
            if min(seconds[name] for name in agreed) >= _LONG:
                found = [{name: seconds[name] for name in agreed}] if known >= set(agreed) else []
            else:
                found = [self._timed(calls, case, agreed[:: 1 - 2 * (turn % 2)]) for turn in range(_TURNS)]
        case.rounds += found
        case.calls += bool(found)
        case.problem = problem

    def _timed(self, calls: dict[str, Callable[[], Any]], case: Case, order: list[str]) -> dict[str, float]:
        """Return the seconds of each candidate in one round."""
        warm = {name: case.seconds(name) for name in order}
        timings = timer.compare({n: calls[n] for n in order}, warm=warm, rounds=(1, 1), min_time=_SAMPLE)
        return {name: max(timing.seconds, _LEAST) for name, timing in timings.items()}

    def _once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of one call and its seconds; of a call that was interrupted, those of another one."""
        results: list[Any] = []

        def kept() -> None:
            results[:] = [call()]

        timing = timer.compare({"": kept}, warm={"": math.inf}, rounds=(1, 1))[""]
        return results[0], max(timing.seconds, _LEAST)

    def _run(
        self, op: Op, problem: Problem, case: Case, calls: dict[str, Callable[[], Any]], ends: float
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Run each candidate once; return seconds, and in words how its result differs from the current one's."""
        seconds, given, faults = {}, {}, {}
        for name, call in calls.items():
            if time.perf_counter() > ends:
                break
            try:
                result, seconds[name] = self._once(call)
                given[name] = beside.values(op, result)
            except Exception as error:
                if name == case.current:
                    raise
                faults[name] = f"raised {type(error).__name__}"
        ours = given.get(case.current)
        if ours is None or not all(bool(t.isfinite().all()) for t in ours if t.is_floating_point()):
            return {}, {}
        for name, theirs in given.items():
            if fault := "" if name == case.current else _difference(ours, theirs, _AGREE[problem.dtype]):
                faults[name] = fault
        return seconds, faults

    def _agreeing(
        self, op: Op, problem: Problem, case: Case, seconds: dict[str, float], faults: dict[str, str]
    ) -> list[str]:
        """Return the candidates that give what the current one gives; others are left out for the rest of the process.

        A candidate that is exact where stock may approximate need not agree with stock: it is not compared with it, or
        stock is timed beside it and cannot win. Else the case is closed where the current one differs from stock, since
        which of them is closer to the truth is not known.
        """
        exact = op[case.current].accuracy == "better"
        agreed = [name for name in seconds if name not in faults]
        for name, fault in faults.items():
            if name != "stock":
                case.drop(name)
                if case.current == "stock" and op[name].accuracy == "better" and not fault.startswith("raised"):
                    continue
                self._banned.add((op.name, name))
                _log.info("%s.%s is left out from now on: beside %s it %s", op.name, name, case.current, fault)
            elif exact and name in seconds:
                case.reference = True
                agreed.append(name)
            else:
                case.open = False
                _log.info("%s is not compared any more: %s beside stock %s", problem, case.current, fault)
                return []
        return agreed

    def _conclude(self, op: Op, case: Case) -> None:
        """Close the case if it is known what is fastest."""
        if case.open and case.rounds:
            winner = case.verdict(op)
            if winner and self._settings.learn == "on":
                case.changed(winner)
                self._apart.memo.clear()
                _log.info("%s", case.told)

    def close(self, entry: Entry, changed: bool = False) -> None:
        """Note that the candidate of an entry has changed for another reason, so that no comparison changes it again.

        With `changed`, others of its case get the same candidate when they are decided.
        """
        case = self._cases.setdefault(entry.decision.problem.coarse, Case(entry.decision))
        case.open = False
        if changed and not case.winner:
            case.changed(entry.candidate.name, entry.decision.reason)

    def applied(self, decision: Decision, settings: Settings) -> Decision:
        """Return a decision with what was learnt in this process in place of the choice."""
        case = self._cases.get(decision.problem.coarse)
        usual = case is not None and case.winner in decision.order and decision.source != "order"
        return case.decided(decision) if case is not None and usual and settings == self._settings else decision

    def _keep_at_exit(self) -> None:
        if not self._registered:
            self._registered = True
            atexit.register(self.save)

    def save(self) -> None:
        """Keep what was learnt in the profile of this host, once, if the time for it is there."""
        if not self._registered:
            return
        self._registered = False
        atexit.unregister(self.save)
        elapsed = time.perf_counter() - self._began
        if host.forked() or self._spent + _SAVING > _OF_PROCESS * elapsed:
            return
        try:
            trials = [trial for case in self._cases.values() if (trial := case.trial(self._before)) is not None]
            if trials:  # to the profile that the choices came from: the number of threads may have changed since
                here = self._model().profile
                found = Profile(host=here.host, fingerprint=here.fingerprint, trials=trials, created=dated())
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    store.save(self._settings, found)
        except Exception:
            _log.debug("could not keep what was learnt", exc_info=True)

    def _before(self, problem: Problem) -> Trial | None:
        """Return what was learnt of a problem in earlier processes."""
        return next((t for t in self._model().profile.trials if t.calls and t.problem == problem), None)


def _difference(ours: list[Any], others: list[Any], allowed: float) -> str:
    """Return in words how results differ; empty if they agree."""
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in others]:
        return "gives another form of result"
    error = gap(others, ours)
    return "" if error <= allowed else f"differs by {error:.0e}"
