"""Thresholds for people to read: the candidate that the policy chooses at each size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from autokern.core.op import Feasibility, Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning.chooser import Chooser
from autokern.tuning.policy import decide
from autokern.tuning.profile import key_of

_MOST = 24  # most kinds of problems of an op to show, by number of trials
_LEAST = 3  # fewest trials of a kind that is shown


class Line(msgspec.Struct, frozen=True):
    """The choices for one kind of problem: pairs of a largest n and the candidate that serves up to it, in order.

    m grows with n; all other sizes are the medians of the measured problems. The last n is the largest measured.
    """

    problem: Problem
    steps: list[tuple[int, str]]

    def __str__(self) -> str:
        *steps, (_, last) = self.steps
        if not steps:
            return f"{last} throughout"
        return "; ".join([*(f"n ≤ {size}: {name}" for size, name in steps), f"above: {last}"])


def lines(op: Op, chooser: Chooser, settings: Settings) -> list[Line]:
    """Return the choices by number of columns for the kinds of problems that this machine measured most."""
    kinds: dict[tuple[object, ...], list[Problem]] = {}
    for trial in chooser.profile.trials:
        p = trial.problem
        if p.op == op.name and p.device in host.current().devices and "stock" in trial.timings:
            kinds.setdefault((p.device, p.dtype, p.variant, p.grad, p.batch > 1, p.m == p.n), []).append(p)
    often = sorted((found for found in kinds.values() if len(found) >= _LEAST), key=len, reverse=True)[:_MOST]
    found = [_line(op, chooser, settings, problems) for problems in often]
    return sorted(
        found, key=lambda line: (line.problem.device, line.problem.dtype, line.problem.variant, line.problem.grad)
    )


def _line(op: Op, chooser: Chooser, settings: Settings, problems: Sequence[Problem]) -> Line:
    first, ratio = problems[0], statistics.median(p.m / p.n for p in problems)
    usual = {size: int(statistics.median_low(getattr(p, size) for p in problems)) for size in ("d", "rhs", "batch")}
    base, low, high = first.replace(**usual), min(p.n for p in problems), max(p.n for p in problems)
    forest = chooser.profile.forests.get(key_of(first))
    splits = {n for size in (forest.sizes if forest else ()) for n in (size, size + 1) if low < n < high}
    steps: list[tuple[int, str]] = []
    for n in sorted({low, high, *splits}):
        problem = op.nearest(base.replace(n=n, m=n if first.m == first.n else max(1, round(ratio * n))))
        name = decide(Feasibility(op, problem), chooser, settings).candidate
        if steps and steps[-1][1] == name:
            steps.pop()
        steps.append((n, name))
    return Line(base, steps)
