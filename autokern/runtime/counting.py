"""Counting: the products of conjugate gradients in the first calls of a key.

How long stock takes depends on the numbers of the caller. Where it takes so many products that an exact candidate
costs no more than it may, that one serves from then on: the one change of the key.
"""

from __future__ import annotations

from autokern.core.locks import Lock
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.runtime.memo import NEVER, Entry
from autokern.system import host

__all__ = ["Products", "counts", "due", "is_due"]

_CALLS = (4, 16, 64)
"""Calls before which the choice is made again with what was counted; hyperparameters move, and systems grow harder."""


_MANY = 10**6
"""Products that no system takes."""


class Products:
    """The most products that a call of each problem took, neighbours in size together."""

    def __init__(self) -> None:
        self._most: dict[Problem, int] = {}
        self._lock = Lock()

    def of(self, problem: Problem) -> int:
        """Return the products of a problem; 0 where none were counted."""
        return self._most.get(problem.coarse, 0)

    def note(self, entry: Entry) -> None:
        """Keep what an entry has counted."""
        cell = entry.decision.problem.coarse
        with self._lock.here():
            self._most[cell] = max(self._most.get(cell, 0), entry.products)

    def trim(self, most: int) -> None:
        """Forget all where they are of more than so many problems."""
        if len(self._most) > most:
            self._most = {}


def counts(entry: Entry, settings: Settings) -> bool:
    """Whether the products of an entry matter: stock iterates to a loose tolerance, and the choice is not frozen."""
    op, problem, candidate = entry.op, entry.decision.problem, entry.candidate
    loose = candidate.loose and entry.decision.source != "order"
    matters = op.harder(problem, candidate, _MANY) > op.harder(problem, candidate)
    frozen = settings.deterministic or settings.profile is not None
    able = problem.device == "cpu" and not (candidate.compiles or entry.trial or host.multi_rank() or host.forked())
    return loose and matters and able and not frozen


def due(entry: Entry) -> int:
    """Return the call at which the choice of an entry is made again with its products, or `NEVER`."""
    later = (call for call in _CALLS if call > entry.count)
    return next(later, NEVER) if entry.counting else NEVER


def is_due(entry: Entry, settings: Settings) -> bool:
    """Whether products were counted, and the calls are few enough for them to change the choice."""
    return entry.counting and entry.products > 0 and entry.count <= _CALLS[-1] and counts(entry, settings)
