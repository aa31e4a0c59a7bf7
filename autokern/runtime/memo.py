"""Entries of a memo: what runs for a decided key, whether each call looks at the memory first, what users are told."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from autokern.core.decision import Decision
from autokern.core.op import Candidate, Op, get, inside
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.system import memory_limit

__all__ = ["NEVER", "Entry", "LargeEntry", "Memo", "Told", "counted", "is_large", "told"]

NEVER = sys.maxsize
"""A number of calls that no key reaches."""

Decide = Callable[[Op, Problem, Settings], Decision]


class Entry:
    """A decided key: what runs, and how often it did.

    Attributes
    ----------
    due : int
        The call from which on it is looked at again, as `drift` and `spotcheck` schedule it; `NEVER` for none. Threads
        may count past it.
    before : int
        Calls of the problem that earlier entries served by the candidate.
    strikes : int
        Checks running in which stock was faster.
    trial : bool
        Whether only a calibration has called it: that is not the user's doing, and neither counted nor told.
    """

    __slots__ = ("before", "candidate", "count", "decision", "due", "parts", "run", "strikes", "trial")

    def __init__(self, decision: Decision, candidate: Candidate) -> None:
        self.decision = decision
        self.count = self.before = 0
        self.strikes = 0
        self.trial = False
        self.serve(candidate)

    def serve(self, candidate: Candidate) -> None:
        """Let a candidate run from now on; one that approximates is looked at on its next call (`spotcheck`)."""
        self.candidate = candidate
        self.due = self.count + 1 if candidate.accuracy == "approximate" else NEVER
        self.run = candidate.run
        self.parts = candidate.parts

    def demote(self, successor: Candidate) -> None:
        """Let another candidate run from now on in place of one that failed."""
        self.serve(successor)


class LargeEntry(Entry):
    """A decided key whose calls take so much memory that each one looks at what is there first.

    It is decided again whenever other candidates fit than before: a call that nothing fits raises, and what was chosen
    for want of memory does not stay for good.
    """

    __slots__ = ("_decide", "_failed", "_fitting", "_needs", "_plan", "_settings")

    def __init__(self, decision: Decision, op: Op, settings: Settings, decide: Decide) -> None:
        problem = decision.problem
        self._settings = settings
        self._needs = {c.name: c.memory(problem) for c in op.feasible(problem)}
        self._fitting = self._fit(memory_limit.current(problem.device, settings.memory))
        self._decide = decide
        self._failed: list[str] = []
        super().__init__(decision, op[decision.candidate])

    def _fit(self, there: memory_limit.Limit) -> frozenset[str]:
        return frozenset(name for name, need in self._needs.items() if need <= there.bytes)

    def serve(self, candidate: Candidate) -> None:
        """Let a candidate run from now on, wherever it fits."""
        super().serve(candidate)
        self._plan = (candidate, self.run)  # one object: another thread may decide again
        self.run = self._run_if_it_fits

    def demote(self, successor: Candidate) -> None:
        """Let another candidate run from now on; the one that failed is not chosen again."""
        self._failed.append(f"{self.decision.problem.op}={self.candidate.name}")
        super().demote(successor)

    def _run_if_it_fits(self, *args: Any) -> Any:
        there = memory_limit.current(self.decision.problem.device, self._settings.memory)
        fitting = self._fit(there)
        if fitting != self._fitting or self._plan[0].name not in fitting:
            settings = msgspec.structs.replace(self._settings, exclude=self._settings.exclude.union(self._failed))
            op = get(self.decision.problem.op)
            self.decision = self._decide(op, self.decision.problem, settings)
            self._fitting = fitting
            self.serve(op[self.decision.candidate])
            if self.decision.review > self.count:
                self.due = min(self.due, self.decision.review)
        candidate, run = self._plan
        memory_limit.claim(self._needs[candidate.name], there)
        inside.active = not candidate.parts
        return run(*args)


def is_large(op: Op, decision: Decision) -> bool:
    """Whether calls of a decided problem take so much that it matters what is there: by the choice, or by stock."""
    problem = decision.problem
    names = {decision.candidate, "stock"} & {decision.candidate, *decision.excluded}
    return max(op[name].memory(problem) for name in names) >= memory_limit.LARGE


Memo = dict[str, dict[Any, Entry]]
"""Decided keys by op."""
Told = dict[tuple[Problem, str], tuple[Decision, int]]
"""Decisions and calls by problem and candidate, those made last at the end."""


def counted(memo: Memo) -> Counter[tuple[str, str]]:
    """Return the number of calls that the entries of a memo served, by op and candidate."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, entry in _called(memo):
        counts[name, entry.candidate.name] += entry.count
    return counts


def told(memo: Memo, earlier: Told) -> Told:
    """Return what was decided earlier and what a memo holds."""
    found = dict(earlier)
    for _, entry in _called(memo):
        key = (entry.decision.problem, entry.decision.candidate)
        _, before = found.pop(key, (None, 0))
        found[key] = (entry.decision, before + entry.count)
    return found


def _called(memo: Memo) -> Iterator[tuple[str, Entry]]:
    """Yield the entries that the user has called, with the name of their op; other threads may add some meanwhile."""
    for name, table in list(memo.items()):
        for entry in list(table.values()):
            if entry.count and not entry.trial:
                yield name, entry
