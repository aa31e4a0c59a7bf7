"""Feasibility: for one problem, the reason against each candidate of its op, and the bytes that each takes."""

from __future__ import annotations

from autokern.core.candidate import Candidate
from autokern.core.op import Op
from autokern.core.problem import Problem


class Feasibility:
    """The table of one problem that a decision is made from: each entry is evaluated at most once, when first read.

    If `recorded`, a recorded host is replayed: `unavailable`, which asks this machine, is not evaluated.
    """

    __slots__ = ("_memory", "_reasons", "candidates", "op", "problem", "recorded")

    def __init__(self, op: Op, problem: Problem, recorded: bool = False) -> None:
        self.op, self.problem, self.recorded = op, problem, recorded
        self.candidates = tuple(op.candidates)
        self._reasons: dict[str, str | None] = {}
        self._memory: dict[str, int] | None = None

    def why_not(self, candidate: Candidate) -> str | None:
        """Return why a candidate cannot serve the problem, or None where it can."""
        name = candidate.name
        if name not in self._reasons:
            why = candidate.unsupported(self.problem)
            if why is None and not self.recorded:
                why = candidate.unavailable(self.problem.device)
            self._reasons[name] = why
        return self._reasons[name]

    def feasible(self) -> list[Candidate]:
        """Candidates that can serve the problem, stock first, whatever their accuracy and memory."""
        return [c for c in self.candidates if self.why_not(c) is None]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that each candidate takes at its peak, results included, whether it can serve the problem or not."""
        if self._memory is None:
            self._memory = {c.name: c.memory(self.problem) for c in self.candidates}
        return self._memory
