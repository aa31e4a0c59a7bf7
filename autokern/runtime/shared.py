"""Shared decisions: neighbours in size are decided together, so a stream of growing sizes does not pay for each."""

from __future__ import annotations

import msgspec

from autokern.core.decision import Decision
from autokern.core.feasibility import Feasibility
from autokern.core.locks import Lock
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.runtime.memo import Decide
from autokern.system import memory_limit

__all__ = ["Shared"]


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
