"""The memo: for each decided key, an Entry with its candidate and number of calls."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

from autokern.core.decision import Decision, Solved, collecting, joined
from autokern.core.errors import AutokernWarning
from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.core.state import Lock, inside

NEVER = sys.maxsize  # a call number that no key reaches
_keeping = Lock()


class Entry:
    """A decided key: its candidate and number of calls. Dispatch increments `count`; methods change everything else."""

    def __init__(self, decision: Decision, op: Op, needs: dict[str, int] | None = None) -> None:
        self.decision, self.op = decision, op
        self.needs = needs  # bytes of each candidate if they are many: each call is checked, and decided again
        self.fitting = frozenset[str]()  # when other candidates fit than before
        self.failed = frozenset[str]()  # which are not chosen again
        self.count = 0  # calls that this entry has served
        self.nested = Counter[tuple[str, ...]]()  # calls within composite calls, by `inside.within`
        self.before = 0  # calls that earlier entries of the problem served by the same candidate
        self.trial = inside.measuring  # created by a calibration: its calls are not the user's, and are not reported
        self.solved: tuple[Solved, ...] = ()  # reports of its iterative solves
        self.ledger: Any = None  # accumulates the time of its calls, while its op is not measured yet
        self.serve(op[decision.candidate])

    def resume(self, count: int, before: int) -> None:
        """Continue the counts of earlier entries of the same key and problem."""
        self.count, self.before, self.solved = count, before, ()
        self.nested.clear()

    def serve(self, candidate: Candidate) -> None:
        """Run a candidate from now on; an approximate one is checked on its next call (`checks`)."""
        self.candidate = candidate
        self.check_at(self.count + 1 if candidate.accuracy == "approximate" else NEVER)  # other threads may skip it
        self.parts, own, name = candidate.parts, candidate.run, f"{self.op.name} by {candidate.name}"

        def noting(*args: Any) -> Any:  # keeps the reports of iterative solves
            with collecting(self._keep):
                return own(*args)

        run = noting if self.op.approximates(self.decision.problem) else own

        def around(*args: Any) -> Any:  # names this call to the calls within it
            before = inside.within
            inside.within = (*before, name)
            try:
                return run(*args)
            finally:
                inside.within = before

        self.run = around if candidate.parts else run

    def _keep(self, found: Iterable[Solved]) -> None:
        with _keeping.here():
            self.solved = joined((*self.solved, *found))

    def time_into(self, ledger: Any) -> None:
        """Time the calls, and schedule a check when they have taken long enough to measure the op."""
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
        """Set the call at which the next check is due; with `needs`, every call is checked too."""
        self.due_at, self.due = call, call if self.needs is None else 0

    def schedule(self) -> None:
        """Schedule the next check, for approximate candidates at the next power of two of the problem's calls."""
        review = self.decision.review
        if self.candidate.accuracy == "approximate":
            self.check_at((1 << (self.before + self.count).bit_length()) - self.before)
        else:
            self.check_at(review if review > self.count else NEVER)

    def demote(self, successor: Candidate, reason: str, level: int, more: str = "") -> None:
        """Replace a failed candidate by another from now on, and warn; the decision states the reason."""
        order, problem = f"{self.op.name}={self.candidate.name}", self.decision.problem
        self.failed |= {order}
        self.serve(successor)
        changed = {"candidate": successor.name, "reason": reason}
        self.decision = msgspec.structs.replace(self.decision, **changed, margin=1.0, uncertainty=0.0)
        told = f"autokern: {self.op.name}.{reason} on {problem}; {successor.name} runs from now on. "
        warnings.warn(f"{told}AUTOKERN_EXCLUDE={order} avoids it{more}", AutokernWarning, level)


def stock_entry(op: Op, reason: str) -> Entry:
    """Return an entry that runs stock without a decision."""
    return Entry(Decision(problem=Problem(op=op.name), candidate="stock", reason=reason, source="only choice"), op)


Memo = dict[str, dict[Any, Entry]]  # the entries of decided keys, by op and key
Served = dict[tuple[Problem, str, tuple[str, ...]], tuple[Decision, int]]
"""Decision and number of calls by problem, candidate and `within`, the most recent last."""


def counted(memo: Memo) -> Counter[tuple[str, str]]:
    """Count the user's calls in a memo, by op and candidate."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, entry in _called(memo):
        counts[name, entry.candidate.name] += entry.count
    return counts


def served(memo: Memo, earlier: Served) -> Served:
    """Merge earlier decisions with those of a memo: their calls, and the reports of iterative solves."""
    found = dict(earlier)
    for _, entry in _called(memo):
        several = [((), entry.count - entry.nested.total()), *entry.nested.items()]
        for within, count in [(within, count) for within, count in several if count > 0]:
            key = (entry.decision.problem, entry.decision.candidate, within)
            known, before = found.pop(key, (entry.decision, 0))
            solved = joined((*known.solved, *entry.solved))
            found[key] = msgspec.structs.replace(entry.decision, solved=solved, within=within), before + count
    return found


def _called(memo: Memo) -> Iterator[tuple[str, Entry]]:
    """Yield op name and entry of all keys that the user has called; other threads may add keys meanwhile."""
    for name, table in list(memo.items()):
        for entry in list(table.values()):
            if entry.count and not entry.trial:
                yield name, entry


class Overlay(msgspec.Struct, eq=False):
    """The settings and the memo of one `using` block; `outer` is the enclosing block."""

    settings: Settings
    outer: Overlay | None
    memo: Memo = {}


current: ContextVar[Overlay | None] = ContextVar("autokern_using", default=None)


@contextlib.contextmanager
def apart(settings: Settings) -> Iterator[None]:
    """Run measurements in a memo of their own, which is discarded: their calls are not the user's."""
    token = current.set(Overlay(settings, current.get()))
    try:
        with inside.having(solves=None):
            yield
    finally:
        current.reset(token)
