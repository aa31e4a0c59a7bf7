"""Session: the settings in force, the profile, the memo of decided keys, apart from the hot path that reads it.

Measuring, predicting and choosing are imported by the first call that is not in the memo: a warm call needs none of it.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from autokern.backends import graphs
from autokern.core import registry
from autokern.core.decision import Decision
from autokern.core.errors import AutokernError, AutokernWarning
from autokern.core.locks import Lock
from autokern.core.op import Feasibility, Op, inside
from autokern.core.problem import Problem
from autokern.core.recovery import recoverable
from autokern.core.settings import Settings
from autokern.runtime import checks, floors, orders
from autokern.runtime.memo import Entry, Memo, Served, Shared, counted, is_large, served, stock_entry
from autokern.system import host, logs, memory_limit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autokern.runtime.first_use import FirstUse
    from autokern.tuning.chooser import Chooser
    from autokern.tuning.profile import Profile

_log = logging.getLogger("autokern")
_MOST_KEYS = 10_000  # a memo of this size is emptied: random shapes must not leak memory
_MOST_EARLIER = 200  # the latest decisions, which are still reported after the memo was emptied


class Session:
    """State of a process: its settings, the profile in force, and the decisions taken.

    Where ranks have agreed, on the profile and on orders beside those `asked`, what this process alone finds decides
    nothing.
    """

    def __init__(self, settings: Settings, profile: Profile | None = None, asked: Settings | None = None) -> None:
        self.settings, self.asked, self.agreed = orders.checked(settings), asked or settings, profile is not None
        self.memo: Memo = {}
        self.shared = Shared(self.decide, _MOST_KEYS)
        self.past: Counter[tuple[str, str]] = Counter()
        self._earlier: Served = {}
        self._chooser: Chooser | None = None
        self._lock = Lock()
        self._first_use: FirstUse | None = None
        self._seen: Counter[tuple[Problem, str]] = Counter()
        self.errors: dict[tuple[Problem, str], float] = {}
        logs.apply(settings.log)
        graphs.allow(settings.graphs == "on")
        registry.announce(settings.strict)
        if profile is not None:
            self._put_in_force(profile)

    @property
    def chooser(self) -> Chooser:
        """What chooses, from the profile in force; loaded when first asked for."""
        if self._chooser is None:
            with self._lock.here():
                if self._chooser is None:
                    from autokern.tuning.chooser import load

                    self._put_in_force(load(self.settings))
        assert self._chooser is not None
        return self._chooser

    @property
    def profile(self) -> Profile:
        """The profile in force."""
        return self.chooser.profile

    def adopt(self, profile: Profile) -> None:
        """Put another profile in force; decisions are taken afresh."""
        with self._lock.here():
            self._put_in_force(profile)
            self.shared.clear()
            self.forget()

    def _put_in_force(self, profile: Profile) -> None:
        from autokern.tuning.chooser import Chooser

        self._chooser = Chooser(profile)
        floors.publish(self)

    def floor(self, op: str, device: str) -> int:
        """Return the number of elements below which stock serves an op; 0 while that is not known, or under orders."""
        return 0 if self._chooser is None or self.settings.order_choices else self._chooser.floor(op, device)

    def remember(self, memo: Memo, name: str, key: Any, entry: Entry, renewed: bool = False) -> Entry:
        """Put a decided key into a memo, which is emptied first if it has grown too large; return the entry in force.

        Of threads that decide a key at once the first one's entry stays, so that no call of it goes uncounted.
        """
        table = memo.setdefault(name, {})
        if len(table) >= _MOST_KEYS and key not in table:
            self.forget(memo)
        present = entry if renewed else table.setdefault(key, entry)
        if renewed or present.trial != entry.trial:
            table[key] = present = entry
        return present

    def decisions(self, open_memos: Iterable[Memo] = ()) -> list[tuple[Decision, int]]:
        """Return the decisions taken, with the number of calls each one served; `using` blocks that are open count."""
        with self._lock.here():
            found = self._earlier
            for memo in (*open_memos, self.memo):
                found = served(memo, found)
            counted = list(found.values())
        return [(self.described(decision), calls) for decision, calls in counted]

    def described(self, decision: Decision) -> Decision:
        """Return a decision with the costs of its candidates; calls that no op serves have none."""
        from autokern.tuning import policy

        if not decision.order or decision.costs:
            return decision
        return policy.described(decision, self.chooser, self.settings)

    def forget(self, memo: Memo | None = None) -> None:
        """Empty the memo, or that of a `using` block; counts of calls are kept."""
        memo = self.memo if memo is None else memo
        with self._lock.here():
            self.past += counted(memo)
            self._earlier = dict(list(served(memo, self._earlier).items())[-_MOST_EARLIER:])
            for table in list(memo.values()):
                for entry in list(table.values()):
                    if entry.candidate.accuracy == "approximate":
                        self._seen[entry.decision.cell] = entry.before + entry.count
                    entry.resume(0, entry.before + entry.count)  # its calls are counted
                table.clear()
            if max(len(self._seen), len(self.errors)) > _MOST_KEYS:
                self._seen.clear()
                self.errors.clear()

    def entry(self, op: Op, args: tuple[Any, ...], settings: Settings) -> Entry:
        """Decide a call that is not in the memo; if deciding fails, stock runs."""
        if not settings.enabled:
            return stock_entry(op, "autokern is off (AUTOKERN=0)")
        try:
            problem = op.problem_of(*args)
        except Exception as error:  # stock raises its own error for arguments that do not fit together
            if self.settings.strict or not recoverable(error, op):
                raise
            _log.debug("arguments of %s cannot be read: %r", op.name, error)
            problem = None
        if problem is None:
            return stock_entry(op, "autokern does not serve such a call")
        try:
            table = Feasibility(op, problem)
            registry.announce(self.settings.strict)
            if inside.measuring:  # a measurement holds for all settings
                settings = msgspec.structs.replace(settings, accuracy="same")
            table = self.measured(table)
            decision = self.shared.decision(table, settings)
        except AutokernError:
            raise
        except Exception as error:
            if self.settings.strict or not recoverable(error, op):
                raise
            words = f"autokern could not decide a call of {op.name}, so stock runs: {error!r}"
            warnings.warn(words, AutokernWarning, stacklevel=3)
            return stock_entry(op, "the decision failed")
        _log.debug("%s", decision)
        return self.made(table, decision, settings)

    def made(self, table: Feasibility, decision: Decision, settings: Settings, count: int = 0) -> Entry:
        """Return the entry of a decided problem, whose key has been called so many times."""
        ordered = settings
        while self.errors and self.errors.get(decision.cell, 0.0) > settings.max_error:  # it failed before
            failed = f"{table.op.name}={decision.candidate}"
            ordered = msgspec.structs.replace(ordered, exclude=ordered.exclude | {failed})
            decision = self.decide(table, ordered, count)
        before = self._seen[decision.cell] if self._seen else 0
        large = is_large(decision, table) and not self.agreed
        entry = Entry(decision, table.op, {c.name: table.memory[c.name] for c in table.feasible()} if large else None)
        entry.resume(count, before)
        ledger = None if self._first_use is None else self._first_use.ledger(table)
        if ledger is not None and entry.candidate.accuracy != "approximate":
            entry.time_into(ledger)
        checks.schedule(entry)
        return entry

    def measured(self, table: Feasibility) -> Feasibility:
        """Let an op be measured at its first use; return the table, a fresh one if that took place."""
        if self._first_use is None:
            from autokern.runtime.first_use import FirstUse

            self._first_use = FirstUse(self)
        return Feasibility(table.op, table.problem) if self._first_use.measure(table) else table

    def decide(self, table: Feasibility, settings: Settings, seen: int = 0) -> Decision:
        """Decide a problem under settings, with the memory that is free now; it was called `seen` times."""
        from autokern.tuning import policy

        there, device = None, table.problem.device
        large = not self.agreed and max(table.memory.values()) >= memory_limit.LARGE
        if large and device in host.current().devices:
            there = memory_limit.current(device)  # the memory of a recorded host is only explained here
        return policy.decide(table, self.chooser, settings, there, seen)
