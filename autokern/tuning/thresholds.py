"""Thresholds: the choices of the trees along one size, for people to read: "n up to 371: cdist, up to 648: stock"."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from autokern.core.feasibility import Feasibility
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.tuning.chooser import Chooser
from autokern.tuning.policy import decide
from autokern.tuning.profile import Trial

__all__ = ["Line", "lines"]

_MOST = 24
"""Kinds of problems of an op that are shown, those with the most trials."""
_LEAST = 3
"""Trials of a kind below which nothing is shown of it."""


class Line(msgspec.Struct, frozen=True):
    """The choices for one kind of problem by its number of columns or points.

    Parameters
    ----------
    problem : Problem
        The kind: every size but n (and m, which goes with it) is its usual one.
    steps : list
        Pairs of the largest n and the candidate that serves up to it, in order; the last n is the largest measured.
    """

    problem: Problem
    steps: list[tuple[int, str]]

    def __str__(self) -> str:
        *steps, (_, last) = self.steps
        if not steps:
            return f"{last} throughout"
        return "; ".join([*(f"n ≤ {size}: {name}" for size, name in steps), f"above: {last}"])


def lines(op: Op, chooser: Chooser, settings: Settings, device: str = "cpu") -> list[Line]:
    """Return the choices for the kinds of problems that this machine measured most, each by its number of columns."""
    kinds: dict[tuple[object, ...], list[Trial]] = {}
    for trial in chooser.profile.trials:
        p = trial.problem
        if (p.op, p.device) == (op.name, device) and "stock" in trial.timings:
            kinds.setdefault((p.dtype, p.variant, p.grad, p.batch > 1, p.m == p.n), []).append(trial)
    often = sorted((found for found in kinds.values() if len(found) >= _LEAST), key=len, reverse=True)[:_MOST]
    forest = chooser.profile.forests.get(f"{op.name}@{device}")
    splits = forest.sizes if forest is not None else set()
    found = [_line(op, chooser, settings, [t.problem for t in trials], splits) for trials in often]
    return sorted(found, key=lambda line: (line.problem.dtype, line.problem.variant, line.problem.grad))


def _line(op: Op, chooser: Chooser, settings: Settings, problems: Sequence[Problem], splits: set[int]) -> Line:
    def usual(size: str) -> int:
        return int(statistics.median_low([getattr(p, size) for p in problems]))

    first, ratio = problems[0], statistics.median(p.m / p.n for p in problems)
    base = first.replace(d=usual("d"), rhs=usual("rhs"), batch=usual("batch"))
    low, high = min(p.n for p in problems), max(p.n for p in problems)
    sizes = sorted({low, high, *(s for s in splits if low < s < high), *(s + 1 for s in splits if low < s + 1 < high)})
    steps: list[tuple[int, str]] = []
    for n in sizes:
        problem = op.nearest(base.replace(n=n, m=n if first.m == first.n else max(1, round(ratio * n))))
        name = decide(Feasibility(op, problem), chooser, settings).candidate
        if steps and steps[-1][1] == name:
            steps[-1] = n, name
        else:
            steps.append((n, name))
    return Line(base, steps)
