"""Session: the settings in force, the profile, and the memo of decided keys, which `dispatch` reads in its hot path.

The first call that is not in the memo imports the modules that measure and choose. Names in settings must exist.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from autokern.core import output, registry
from autokern.core.decision import Decision
from autokern.core.errors import AutokernError, AutokernWarning, SettingsError, nearest, recoverable
from autokern.core.op import Op
from autokern.core.problem import Feasibility, Problem
from autokern.core.settings import Settings, from_environment
from autokern.core.state import Lock, inside, permitted
from autokern.runtime.memo import Entry, Memo, Served, counted, served, stock_entry
from autokern.system import host, memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autokern.runtime.review import FirstUse
    from autokern.tuning.chooser import Chooser
    from autokern.tuning.profile import Profile

_log = logging.getLogger("autokern")
_MOST_KEYS = 10_000  # a memo of this size is emptied: random shapes must not leak memory
_MOST_EARLIER = 200  # decisions that are still reported after the memo was emptied, the latest ones


class Session:
    """State of a process: its settings, the profile in force, and its decisions."""

    def __init__(self, settings: Settings, profile: Profile | None = None, asked: Settings | None = None) -> None:
        self.settings, self.asked = existing(settings), asked or settings  # those before ranks agreed on others
        self.agreed = profile is not None  # by ranks: this process's own memory then affects no decision
        self.memo: Memo = {}
        self._alike: dict[tuple[Problem, Settings], Decision] = {}  # shared by sizes with the same leading digits
        self.past: Counter[tuple[str, str]] = Counter()
        self._earlier: Served = {}
        self._chooser: Chooser | None = None
        self.floors: dict[tuple[str, str], int] = {}  # by op and kind of device, of the choices in force
        self._lock = Lock()
        self._first_use: FirstUse | None = None
        self._seen: Counter[tuple[Problem, str]] = Counter()
        self.errors: dict[tuple[Problem, str], float] = {}
        output.log_from(settings.log)
        (permitted.add if settings.graphs == "on" else permitted.discard)("graphs")
        registry.announce(settings.strict)
        if profile is not None:
            self._put_in_force(profile)

    @property
    def chooser(self) -> Chooser:
        """The chooser of the profile in force, loaded on first access."""
        if self._chooser is None:
            from autokern.tuning.chooser import load

            with self._lock.here():
                return self._chooser or self._put_in_force(load(self.settings))
        return self._chooser

    @property
    def profile(self) -> Profile:
        """The profile in force."""
        return self.chooser.profile

    def adopt(self, profile: Profile) -> None:
        """Put another profile in force, and forget all decisions."""
        with self._lock.here():
            self._put_in_force(profile)
            self._alike.clear()
            self.forget()

    def _put_in_force(self, profile: Profile) -> Chooser:
        from autokern.tuning.chooser import Chooser

        self._chooser = chooser = Chooser(profile)
        self.floors = {}
        return chooser

    def floor(self, op: str, device: str) -> int:
        """Return the number of elements below which stock serves an op, 0 if unknown or if settings affect choices."""
        floors = self.floors  # those of another profile, if one is put in force meanwhile
        if self._chooser is None:  # the first decision loads it
            return 0
        of = self.settings
        named = of.force or of.exclude or (of.random_seed, of.memory, of.calls) != (None, None, None)
        dispatched = named or of.accuracy != "same" or of.calibrate == "first-use"
        floors[op, device] = floor = 0 if dispatched else self._chooser.floor(op, device)
        return floor

    def remember(self, memo: Memo, name: str, key: Any, entry: Entry, renewed: bool = False) -> Entry:
        """Put a decided key into a memo, emptied if full; return the entry in force: the first, unless `renewed`."""
        table = memo.setdefault(name, {})
        if len(table) >= _MOST_KEYS and key not in table:
            self.forget(memo)
        present = table.setdefault(key, entry)  # threads may decide a key at once; all calls of the first are counted
        if renewed:
            entry.nested = present.nested
        if renewed or present.trial != entry.trial:
            table[key] = present = entry
        return present

    def decisions(self, open_memos: Iterable[Memo] = ()) -> list[tuple[Decision, int]]:
        """Return all decisions, those of `open_memos` too, each with the number of calls that it served."""
        with self._lock.here():
            found = functools.reduce(lambda found, memo: served(memo, found), (*open_memos, self.memo), self._earlier)
        return [(self.described(decision), calls) for decision, calls in found.values()]

    def described(self, decision: Decision) -> Decision:
        """Return a decision with the costs of its candidates; undecided calls have none."""
        from autokern.tuning import policy

        if not decision.order or decision.costs:
            return decision
        return policy.described(decision, self.chooser, self.settings)

    def forget(self, memo: Memo | None = None) -> None:
        """Empty the session's memo, or that of a `using` block; counts of calls are kept."""
        memo = self.memo if memo is None else memo
        with self._lock.here():
            self.past += counted(memo)
            self._earlier = dict(list(served(memo, self._earlier).items())[-_MOST_EARLIER:])
            for table in list(memo.values()):
                for entry in list(table.values()):
                    if entry.candidate.accuracy == "approximate":
                        self._seen[entry.decision.cell] = entry.before + entry.count
                    entry.resume(0, entry.before + entry.count)  # its calls are in `past` now
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
        except Exception as error:  # stock raises its own error for inconsistent arguments
            if self.settings.strict or not recoverable(error, op):
                raise
            _log.debug("arguments of %s cannot be read: %r", op.name, error)
            problem = None
        if problem is None:
            return stock_entry(op, "autokern does not serve such a call")
        try:
            table = Feasibility(op, problem)
            registry.announce(self.settings.strict)
            if inside.measuring:  # a measurement must be valid under all settings
                settings = msgspec.structs.replace(settings, accuracy="same")
            table = self.measured(table)
            decision = self.decide_alike(table, settings)
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

    def made(self, table: Feasibility, decision: Decision, settings: Settings, earlier: Entry | None = None) -> Entry:
        """Return the entry of a decided problem, which continues an earlier one of its key."""
        ordered, count = settings, 0 if earlier is None else earlier.count
        while self.errors and self.errors.get(decision.cell, 0.0) > settings.max_error:  # it has erred too much
            failed = f"{table.op.name}={decision.candidate}"
            ordered = msgspec.structs.replace(ordered, exclude=ordered.exclude | {failed})
            decision = self.decide(table, ordered, count)
        before = self._seen[decision.cell] if self._seen else 0
        needs, most = table.memory, {decision.candidate} | {"stock"} & decision.excluded.keys()  # stock, if left out
        large = not self.agreed and max(needs[name] for name in most) >= memory.LARGE
        entry = Entry(decision, table.op, {c.name: needs[c.name] for c in table.feasible()} if large else None)
        entry.resume(count, before)
        if earlier is not None:
            entry.failed, entry.solved = earlier.failed, earlier.solved
        ledger = None if self._first_use is None else self._first_use.ledger(table)
        if ledger is not None and entry.candidate.accuracy != "approximate":
            entry.time_into(ledger)
        entry.schedule()
        return entry

    def measured(self, table: Feasibility) -> Feasibility:
        """Measure the op now if it is due; return the table, a fresh one if that was tried."""
        if self._first_use is None:
            from autokern.runtime.review import FirstUse

            self._first_use = FirstUse(self)
        return Feasibility(table.op, table.problem) if self._first_use.measure(table) else table

    def decide_alike(self, table: Feasibility, settings: Settings) -> Decision:
        """Decide a problem like its neighbours in size, or by itself where memory or a drawn candidate matters."""
        exact = settings.memory is not None or settings.random_seed is not None
        if exact or max(table.memory.values()) >= memory.LARGE:
            return self.decide(table, settings)
        problem, coarse = table.problem, table.problem.coarse
        decision = self._alike.get((coarse, settings))
        if decision is None:
            decision = self.decide(table if coarse == problem else Feasibility(table.op, coarse), settings)
            if len(self._alike) >= _MOST_KEYS:
                self._alike.clear()
            self._alike[coarse, settings] = decision
        forced = settings.forced(table.op.name)  # the neighbour's decision left it out, and it can serve this problem
        ordered = forced not in (None, decision.candidate) and table.why_not(table.op[str(forced)]) is None
        if ordered or table.why_not(table.op[decision.candidate]) is not None:
            return self.decide(table, settings)
        return msgspec.structs.replace(decision, problem=problem)

    def decide(self, table: Feasibility, settings: Settings, seen: int = 0) -> Decision:
        """Decide a problem under settings and the memory that is free now; `seen` is its number of calls so far."""
        from autokern.tuning import policy

        there, device = None, table.problem.device
        large = not self.agreed and max(table.memory.values()) >= memory.LARGE
        if large and device in host.current().devices:
            there = memory.current(device)  # on a device of this host, not of a replayed recording
        return policy.decide(table, self.chooser, settings, there, seen)


def existing(settings: Settings) -> Settings:
    """Return settings; SettingsError if an op or candidate that they name does not exist."""
    for name, candidate in settings.force:
        registry.get(name)[candidate]
    for order in settings.exclude:
        name, equals, candidate = order.rpartition("=")
        if equals:
            registry.get(name)[candidate]
        elif not any(candidate in _names(ops()) for ops in (registry.present, registry.registered)):  # plugins last
            near = nearest(candidate, _names(registry.registered()))
            advice = near or "; `autokern show` and `autokern explain OP` name them"
            raise SettingsError(f"{candidate!r} was excluded, and no op has a candidate of that name{advice}")
    return settings


def _names(ops: Iterable[Op]) -> set[str]:
    return {found.name for op in ops for found in op.listed}


def why_off() -> str:
    """Return why autokern is off, or what enables it."""
    try:
        settings = existing(from_environment())
    except SettingsError as error:
        return str(error)
    order = "AUTOKERN=0" if not settings.enabled else "AUTOKERN_UNKNOWN=stock" if settings.unknown == "stock" else ""
    return f"{order} keeps it off" if order else "`import autokern.auto` or autokern.enable() enables it"
