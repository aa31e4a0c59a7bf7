"""Session: the settings in force, the profile, the memo of decided keys, apart from the hot path that reads it.

Measuring, predicting and choosing are imported by the first call that is not in the memo: a warm call needs none of it.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from autokern.backends import graphs
from autokern.core import plugins
from autokern.core.decision import Decision
from autokern.core.errors import AutokernError, AutokernWarning, MemoryBudgetError
from autokern.core.feasibility import Feasibility
from autokern.core.op import Op, inside
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.runtime import overlay
from autokern.runtime.memo import NEVER, Entry, LargeEntry, Memo, Served, counted, is_large, served
from autokern.system import host, keops, memory_limit

if TYPE_CHECKING:
    from autokern.runtime.first_use import FirstUse
    from autokern.tuning.cost_model import CostModel
    from autokern.tuning.profile import Profile

__all__ = ["Session"]

_log = logging.getLogger("autokern")
_MOST_KEYS = 10_000
"""A memo of this size is emptied: random shapes must not leak memory."""
_MOST_EARLIER = 200
"""Decisions that are still reported after the memo was emptied, the latest."""


def _stock_entry(op: Op, reason: str) -> Entry:
    table = Feasibility(op, Problem(op=op.name))
    return Entry(Decision(problem=table.problem, candidate="stock", reason=reason, source="only choice"), table)


class Session:
    """State of a process: its settings, the profile in force, and the decisions taken.

    Parameters
    ----------
    settings : Settings
        Orders of the user.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memo: Memo = {}
        self._decided: dict[tuple[Problem, Settings], Decision] = {}
        self.past: Counter[tuple[str, str]] = Counter()
        self._earlier: Served = {}
        self._model: CostModel | None = None
        self._lock = threading.RLock()
        self._first_use: FirstUse | None = None
        self._seen: Counter[tuple[Problem, str]] = Counter()
        self._errors: dict[tuple[Problem, str], float] = {}
        _log.setLevel(settings.log.upper())
        graphs.allow(settings.graphs == "on")
        plugins.announce(settings.strict)
        for name, candidate in settings.force:
            get(name)[candidate]

    @property
    def model(self) -> CostModel:
        """The cost model of the profile in force, loaded when first asked for."""
        if self._model is None:
            with self._lock:
                if self._model is None:
                    from autokern.runtime.first_use import load

                    self._model = _in_force(load(self.settings))
        return self._model

    @property
    def profile(self) -> Profile:
        """The profile in force."""
        return self.model.profile

    def adopt(self, profile: Profile) -> None:
        """Put another profile in force; decisions are taken afresh."""
        with self._lock:
            self._model = _in_force(profile)
            self._decided.clear()
            self.forget()

    def remember(self, memo: Memo, name: str, key: Any, entry: Entry) -> None:
        """Put a decided key into a memo, which is emptied first if it has grown too large."""
        table = memo.setdefault(name, {})
        if len(table) >= _MOST_KEYS and key not in table:
            self.forget(memo)
        table[key] = entry

    def decisions(self) -> list[tuple[Decision, int]]:
        """Return the decisions taken outside of `using` blocks, with the number of calls each one served."""
        with self._lock:
            return list(served(self.memo, self._earlier).values())

    def forget(self, memo: Memo | None = None) -> None:
        """Empty the memo, or that of a `using` block; counts of calls are kept."""
        memo = self.memo if memo is None else memo
        with self._lock:
            self.past += counted(memo)
            if memo is self.memo:
                self._earlier = dict(list(served(memo, self._earlier).items())[-_MOST_EARLIER:])
            for table in list(memo.values()):
                for entry in list(table.values()):
                    if entry.candidate.accuracy == "approximate":
                        self._seen[_watched(entry.decision)] = entry.before + entry.count
                    entry.resume(0, entry.before + entry.count)  # its calls are counted
                table.clear()
            if max(len(self._seen), len(self._errors)) > _MOST_KEYS:
                self._seen.clear()
                self._errors.clear()

    def entry(self, op: Op, args: tuple[Any, ...], settings: Settings) -> Entry:
        """Decide a call that is not in the memo; if deciding fails, stock runs."""
        if not settings.enabled:
            return _stock_entry(op, "autokern is off (AUTOKERN=0)")
        try:
            problem = op.problem_of(*args)
        except Exception as error:  # stock raises its own error for arguments that do not fit together
            if self.settings.strict:
                raise
            _log.debug("arguments of %s cannot be read: %r", op.name, error)
            problem = None
        if problem is None:
            return _stock_entry(op, "autokern does not serve such a call")
        try:
            if inside.measuring:  # a measurement holds for all settings
                settings = msgspec.structs.replace(settings, accuracy="same")
            table = self._measured(Feasibility(op, problem), settings.accuracy)
            decision = self._shared(table, settings)
        except AutokernError:
            raise
        except Exception as error:
            if self.settings.strict:
                raise
            words = f"autokern could not decide a call of {op.name}, so stock runs: {error!r}"
            warnings.warn(words, AutokernWarning, stacklevel=3)
            return _stock_entry(op, "the decision failed")
        _log.debug("%s", decision)
        return self._made(table, decision, settings)

    def _made(self, table: Feasibility, decision: Decision, settings: Settings, count: int = 0) -> Entry:
        from autokern.runtime import drift, spotcheck

        ordered = settings
        while self._errors and self._errors.get(_watched(decision), 0.0) > settings.max_error:  # it failed before
            failed = f"{table.op.name}={decision.candidate}"
            ordered = msgspec.structs.replace(ordered, exclude=ordered.exclude | {failed})
            decision = self.decide(table, ordered, count)
        before = self._seen[_watched(decision)] if self._seen else 0
        if is_large(decision, table):
            entry: Entry = LargeEntry(decision, table, settings, self.decide)
        else:
            entry = Entry(decision, table)
        entry.resume(count, before)
        if entry.candidate.accuracy == "approximate":
            entry.check_at(spotcheck.due(before + count) - before)
        else:
            entry.check_at(drift.due(entry, settings))
            ledger = None if self._first_use is None else self._first_use.ledger(table, settings.accuracy)
            if ledger is not None:
                entry.time_into(ledger)
        return entry

    def checked(self, entry: Entry, args: tuple[Any, ...], settings: Settings) -> Entry:
        """Check a key that has reached the call at which a check was due, or passed it, and return its entry.

        The decision may be due for review, since compiling may repay itself by now; or the machine may have drifted; or
        lower precision may no longer suffice for the data.
        """
        from autokern.runtime import drift, spotcheck

        due = entry.take_check()
        if due == NEVER:  # another thread is at it
            return entry
        if entry.ledger is not None:
            return self._reconsidered(entry, settings)
        if entry.candidate.accuracy == "approximate":
            key = _watched(entry.decision)
            self._errors[key] = max(self._errors.get(key, 0.0), spotcheck.check(entry, args, settings))
            return entry
        if due != entry.decision.review:
            drift.check(entry, args)
            return entry
        table = Feasibility(entry.op, entry.decision.problem)
        return self._made(table, self.decide(table, settings, entry.count), settings, entry.count)

    def _reconsidered(self, entry: Entry, settings: Settings) -> Entry:
        """Measure the op of an entry whose calls have taken long enough, and decide again."""
        try:
            table = self._measured(Feasibility(entry.op, entry.decision.problem), settings.accuracy)
            return self._made(table, self._shared(table, settings), settings, entry.count)
        except AutokernError:
            raise
        except Exception as error:
            if self.settings.strict:
                raise
            _log.debug("%s could not be decided again: %r", entry.decision.problem, error)
            return entry

    def _measured(self, table: Feasibility, accuracy: str) -> Feasibility:
        """Let an op be measured at its first use; return the table, a fresh one if that took place."""
        if self._first_use is None:
            from autokern.runtime.first_use import FirstUse

            plugins.load()
            plugins.announce(self.settings.strict)
            apart = functools.partial(overlay.apart, self.settings)
            self._first_use = FirstUse(self.settings, lambda: self.model, self.adopt, apart)
        return Feasibility(table.op, table.problem) if self._first_use.measure(table, accuracy) else table

    def _shared(self, table: Feasibility, settings: Settings) -> Decision:
        """Decide a problem as its neighbours are decided: a stream of growing sizes must not pay for each of them.

        Where memory or an order by exact size or problem matters, it is decided for itself.
        """
        exact = settings.memory is not None or settings.threshold or settings.random_seed is not None
        if exact or max(table.memory.values()) >= memory_limit.LARGE:
            return self.decide(table, settings)
        problem, coarse = table.problem, table.problem.coarse
        decision = self._decided.get((coarse, settings))
        if decision is None:
            if len(self._decided) >= _MOST_KEYS:
                self._decided.clear()
            near = table if coarse == problem else Feasibility(table.op, coarse)
            decision = self._decided[coarse, settings] = self.decide(near, settings)
        if table.why_not(table.op[decision.candidate]) is not None:
            return self.decide(table, settings)
        return msgspec.structs.replace(decision, problem=problem)

    def decide(self, table: Feasibility, settings: Settings, seen: int = 0) -> Decision:
        """Decide a problem under settings, with the memory that is free now; it was called `seen` times."""
        from autokern.tuning import policy

        there, device = None, table.problem.device
        if max(table.memory.values()) >= memory_limit.LARGE and device in host.current().devices:
            there = memory_limit.current(device)  # the memory of a recorded host is only explained here
        try:
            return policy.decide(table, self.model, settings, there, seen)
        except MemoryBudgetError:
            if there is None or there.source:
                raise
        return policy.decide(table, self.model, settings, memory_limit.named(there, device), seen)


def _watched(decision: Decision) -> tuple[Problem, str]:
    """Return the key by which errors of a candidate are remembered; neighbours in size share it."""
    return decision.problem.coarse, decision.candidate


def _in_force(profile: Profile) -> CostModel:
    from autokern.tuning.cost_model import CostModel

    keops.believe(profile.tools.get("keops"))
    return CostModel(profile)
