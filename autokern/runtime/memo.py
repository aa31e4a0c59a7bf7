"""Entries of a memo: the candidate of a decided key, and counts of calls; decisions that neighbours in size share.

Neighbours are decided together, so that a stream of growing sizes does not pay for each.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

from autokern.core.decision import Decision
from autokern.core.locks import Lock
from autokern.core.op import Candidate, Feasibility, Op, inside
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.core.solved import Solved, aside, collecting, joined
from autokern.system import memory_limit

NEVER = sys.maxsize
"""A number of calls that no key reaches."""
_keeping = Lock()

Decide = Callable[[Feasibility, Settings], Decision]


class Entry:
    """A decided key: the candidate that runs, and its calls, which dispatch counts; its methods change all else.

    Where its calls take much memory, `needs` are the bytes of each candidate that can serve: each call is checked, and
    decided again where not the same candidates fit as before. Those that failed are not chosen again.
    """

    __slots__ = (
        "_due", "before", "candidate", "count", "decision", "due", "failed", "fitting", "ledger", "needs", "op",
        "parts", "run", "solved", "trial",
    )  # fmt: skip

    def __init__(self, decision: Decision, op: Op, needs: dict[str, int] | None = None) -> None:
        self.decision, self.op, self.needs = decision, op, needs
        self.fitting, self.failed = frozenset[str](), frozenset[str]()
        self.count = 0  # calls that it has served
        self.before = 0  # calls of the problem that earlier entries served by the candidate
        self.trial = inside.measuring  # whether a calibration made it: its calls are not the user's, and do not count
        self.solved: tuple[Solved, ...] = ()  # how systems were solved in its calls, where stock iterates
        self.ledger: Any = None  # where its calls are timed, while its op is not measured yet
        self.serve(op[decision.candidate])

    def resume(self, count: int, before: int) -> None:
        """Continue the counts of earlier entries of the key and of its problem."""
        self.count, self.before, self.solved = count, before, ()

    def serve(self, candidate: Candidate) -> None:
        """Let a candidate run from now on; one that approximates is checked on its next call (`spotcheck`)."""
        self.candidate = candidate
        self.check_at(self.count + 1 if candidate.accuracy == "approximate" else NEVER)  # threads may count past it
        self.run = self._noting(candidate.run) if self.op.approximates(self.decision.problem) else candidate.run
        self.parts = candidate.parts

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that keeps how it solved systems."""

        def noting(*args: Any) -> Any:
            with collecting(self._keep):
                return run(*args)

        return noting

    def _keep(self, found: Iterable[Solved]) -> None:
        with _keeping.here():
            self.solved = joined((*self.solved, *found))

    def time_into(self, ledger: Any) -> None:
        """Time the calls, and have the entry checked when they have taken long enough for its op to be measured."""
        self.ledger, run = ledger, self.run

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*args)
            finally:
                ledger.seconds += time.perf_counter() - began
                if ledger.seconds >= ledger.enough:
                    self.check_at(self.count + 1)

        self.run = timed

    def check_at(self, call: int) -> None:
        """Set the call from which on the entry is checked."""
        self._due, self.due = call, call if self.needs is None else 0

    def take_check(self) -> int:
        """Return the call at which a check was due and cancel it, so that one thread makes it; `NEVER` for none."""
        due = self._due
        if self.count < due:
            return NEVER
        self.check_at(NEVER)
        return due

    def demote(self, successor: Candidate, reason: str) -> None:
        """Let another candidate run from now on in place of one that failed; the decision gives the reason."""
        self.failed |= {f"{self.op.name}={self.candidate.name}"}
        self.serve(successor)
        changed = {"candidate": successor.name, "reason": reason}
        self.decision = msgspec.structs.replace(self.decision, **changed, margin=1.0, uncertainty=0.0)


def stock_entry(op: Op, reason: str) -> Entry:
    """Return an entry of stock for calls that are not decided."""
    return Entry(Decision(problem=Problem(op=op.name), candidate="stock", reason=reason, source="only choice"), op)


def is_large(decision: Decision, table: Feasibility) -> bool:
    """Whether calls of a decided problem take so much that the memory matters: by the choice, or by stock."""
    names = {decision.candidate, "stock"} & {decision.candidate, *decision.excluded}
    return max(table.memory[name] for name in names) >= memory_limit.LARGE


Memo = dict[str, dict[Any, Entry]]
"""Decided keys by op."""
Served = dict[tuple[Problem, str], tuple[Decision, int]]
"""Decisions and calls by problem and candidate, those made last at the end."""


def counted(memo: Memo) -> Counter[tuple[str, str]]:
    """Return the number of calls that the entries of a memo served, by op and candidate."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, entry in _called(memo):
        counts[name, entry.candidate.name] += entry.count
    return counts


def served(memo: Memo, earlier: Served) -> Served:
    """Return earlier decisions and those of a memo, with their calls and how those solved systems."""
    found = dict(earlier)
    for _, entry in _called(memo):
        decision, key = entry.decision, (entry.decision.problem, entry.decision.candidate)
        known, before = found.pop(key, (decision, 0))
        solved = joined((*known.solved, *entry.solved))
        found[key] = (msgspec.structs.replace(decision, solved=solved) if solved else decision, before + entry.count)
    return found


def _called(memo: Memo) -> Iterator[tuple[str, Entry]]:
    """Yield the entries that the user has called, with the name of their op; other threads may add some meanwhile."""
    for name, table in list(memo.items()):
        for entry in list(table.values()):
            if entry.count and not entry.trial:
                yield name, entry


class Shared:
    """The decisions that problems share whose sizes agree in their first binary digits.

    Beyond `most` decisions all are forgotten.
    """

    def __init__(self, decide: Decide, most: int) -> None:
        self._decide, self._most = decide, most
        self._known: dict[tuple[Problem, Settings], Decision] = {}
        self._lock = Lock()

    def decision(self, table: Feasibility, settings: Settings) -> Decision:
        """Decide a problem as its neighbours are decided.

        Where memory or an order by exact size or problem matters, it is decided for itself.
        """
        exact = settings.memory is not None or settings.threshold or settings.random_seed is not None
        if exact or max(table.memory.values()) >= memory_limit.LARGE:
            return self._decide(table, settings)
        problem, coarse = table.problem, table.problem.coarse
        decision = self._known.get((coarse, settings))
        if decision is None:
            decision = self._decide(table if coarse == problem else Feasibility(table.op, coarse), settings)
            with self._lock.here():
                if len(self._known) >= self._most:
                    self._known.clear()
                self._known[coarse, settings] = decision
        if table.why_not(table.op[decision.candidate]) is not None or _is_ordered(table, settings, decision):
            return self._decide(table, settings)
        return msgspec.structs.replace(decision, problem=problem)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock.here():
            self._known.clear()


def _is_ordered(table: Feasibility, settings: Settings, decision: Decision) -> bool:
    """Whether the user orders a candidate that can serve a problem, if not those that share a decision with it."""
    name = settings.forced(table.op.name)
    return name is not None and name != decision.candidate and table.why_not(table.op[name]) is None


class Overlay:
    """The settings of one block, with a memo of its own, inside of another block or of none."""

    def __init__(self, settings: Settings, outer: Overlay | None) -> None:
        self.settings = settings
        self.outer = outer
        self.memo: Memo = {}


current: ContextVar[Overlay | None] = ContextVar("autokern_using", default=None)


@contextlib.contextmanager
def apart(settings: Settings) -> Iterator[None]:
    """Keep calls out of the memo of the program: measurements call what the program calls, and are not the user's.

    What they decide is forgotten.
    """
    token = current.set(Overlay(settings, current.get()))
    try:
        with aside():
            yield
    finally:
        current.reset(token)
