"""Sweeps: one kind of problem over its sizes, as a plot of each candidate's predicted time and of the choices."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autokern.cli.report.page import Line, Plot
from autokern.core.decision import Decision
from autokern.core.errors import AutokernError
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.tuning.profile import Trial

__all__ = ["commonest", "kind", "sweep"]

_Point = tuple[float, float]
_POINTS = 33
"""Sizes of a sweep: crossovers are then known to a tenth, over a factor of thirty."""


def kind(problem: Problem) -> tuple[Any, ...]:
    """Return all that problems have in common which one plot shows: everything but ``m`` and ``n``."""
    p = problem
    return p.op, p.device, p.dtype, p.variant, p.grad, p.batch, p.d, p.rhs


def commonest(trials: Iterable[Trial], group: tuple[str, str, str]) -> list[Trial]:
    """Return those trials of a group whose kind of problem has most sizes, by size; of equal kinds the first."""
    kinds: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        if trial.problem.group == group:
            kinds.setdefault(kind(trial.problem), []).append(trial)
    found = max(kinds.values(), key=lambda of: len({(t.problem.n, t.problem.m) for t in of}), default=[])
    return sorted(found, key=lambda trial: (trial.problem.n, trial.problem.m))


def sweep(
    problem: Problem,
    low: int,
    high: int,
    decide: Callable[[Problem], Decision],
    trials: Iterable[Trial] = (),
    marks: Iterable[int] = (),
) -> Plot:
    """Return the predictions for one kind of problem from one size to another, each with a band.

    The band is one standard deviation of the ratio to stock, by which candidates are chosen; stock has none.
    A square problem stays square, a tall one keeps its ratio, of a wide one ``m`` is kept. Sizes for which `decide`
    raises AutokernError, for want of memory, are left out. Marks are sizes that the program asked.

    Examples
    --------
    >>> from autokern.runtime.dispatch import explain
    >>> choices = sweep(Problem(op="qr", m=100, n=50), 10, 100, explain).choices
    >>> choices[0][0], choices[-1][1]
    (10.0, 100.0)
    """
    p, decisions = problem, _decided(problem, low, high, decide)
    measured: dict[str, list[_Point]] = {}
    for trial in trials:
        within = kind(trial.problem) == kind(p) and low <= trial.problem.n <= high
        if within and _alike(trial.problem, p):
            for name, timing in trial.timings.items():
                measured.setdefault(name, []).append((float(trial.problem.n), timing.seconds))
    choices = []
    for name, group in itertools.groupby(decisions, lambda decision: decision.candidate):
        sizes = [float(decision.problem.n) for decision in group]
        choices.append((sizes[0], sizes[-1], name))
    names = dict.fromkeys(name for decision in decisions for name in decision.predicted)
    lines = [_line(name, decisions, sorted(measured.get(name, [])), choices) for name in names]
    lines.sort(key=lambda line: (not line.stock, not line.note))  # stable: then those fastest at the smallest size
    shape = "" if p.m == p.n else f"; m = {p.m / p.n:.3g} n" if p.m > p.n else f"; m = {p.m:,}"
    return Plot(
        title=p.family + shape, xlabel="n", ylabel="time of a call", lines=lines, choices=choices,
        marks=[float(n) for n in sorted(set(marks))],
    )  # fmt: skip


def _decided(problem: Problem, low: int, high: int, decide: Callable[[Problem], Decision]) -> list[Decision]:
    op, found = get(problem.op), dict[int, Decision]()
    for n in dict.fromkeys(round(low * (high / low) ** (k / (_POINTS - 1))) for k in range(_POINTS)):
        at = op.nearest(_at(problem, n))
        if at.n not in found:
            with contextlib.suppress(AutokernError):  # no candidate fits the memory
                found[at.n] = decide(at)
    return [found[n] for n in sorted(found)]


def _at(problem: Problem, n: int) -> Problem:
    if problem.m > problem.n:
        return problem.replace(m=max(n, round(problem.m * n / problem.n)), n=n)
    return problem.replace(m=n if problem.m == problem.n else problem.m, n=n)


def _alike(one: Problem, other: Problem) -> bool:
    """Whether two problems lie in one sweep: square both, or of like proportions."""
    expected = _at(other, one.n).m
    return (one.m == one.n) == (other.m == other.n) and abs(math.log(one.m / expected)) < math.log(1.5)


def _line(
    name: str, decisions: Sequence[Decision], points: list[_Point], choices: Sequence[tuple[float, float, str]]
) -> Line:
    there = [d for d in decisions if name in d.predicted]
    at = [(d.predicted[name], math.exp(d.costs[name].uncertainty if name in d.costs else 0.0)) for d in there]
    ranges = [f"{a:,.0f}" if a == b else f"{a:,.0f} to {b:,.0f}" for a, b, chosen in choices if chosen == name]
    return Line(
        name=name, x=[float(d.problem.n) for d in there], y=[seconds for seconds, _ in at], points=points,
        low=[seconds / band for seconds, band in at], high=[seconds * band for seconds, band in at],
        stock=name == "stock", note=f"runs at n = {', '.join(ranges)}" if ranges else "",
    )  # fmt: skip
