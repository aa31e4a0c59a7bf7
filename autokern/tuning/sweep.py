"""Sweeps: one kind of problem over a range of sizes, with the predicted time of each candidate and the choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from autokern.core.decision import Decision
from autokern.core.errors import AutokernError
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.tuning.profile import Trial

__all__ = ["Curve", "Sweep", "commonest", "kind", "sweep"]

_POINTS = 33
"""Sizes of a sweep: crossovers are then known to a tenth, over a factor of thirty."""


class Curve(msgspec.Struct, frozen=True):
    """The predicted seconds of a candidate by size, with their band, and its measured seconds by size.

    The band is one standard deviation of the ratio to stock, which decisions are made by; stock has none.
    """

    candidate: str
    sizes: list[int]
    seconds: list[float]
    low: list[float]
    high: list[float]
    measured: list[tuple[int, float]]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of problem over its size.

    Parameters
    ----------
    problem : Problem
        The problem whose ``n``, and ``m`` with it, varies.
    curves : list of Curve
        Those candidates that may serve it at some size.
    choices : list of (int, int, str)
        First size, last size and name of each choice in turn.
    """

    problem: Problem
    curves: list[Curve]
    choices: list[tuple[int, int, str]]


def kind(problem: Problem) -> tuple[Any, ...]:
    """Return all that problems have in common which one plot shows: everything but ``m`` and ``n``."""
    p = problem
    return p.op, p.device, p.dtype, p.variant, p.grad, p.batch, p.d, p.rhs


def commonest(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials of the kind of problem that has most sizes, by size; of equals the first."""
    kinds: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        kinds.setdefault(kind(trial.problem), []).append(trial)
    found = max(kinds.values(), key=lambda of: len({(t.problem.n, t.problem.m) for t in of}), default=[])
    return sorted(found, key=lambda trial: (trial.problem.n, trial.problem.m))


def sweep(
    problem: Problem,
    low: int,
    high: int,
    decide: Callable[[Problem], Decision],
    trials: Iterable[Trial] = (),
    points: int = _POINTS,
) -> Sweep:
    """Return the predictions for one kind of problem from one size to another.

    Parameters
    ----------
    problem : Problem
        One problem of the kind. A square one stays square, a tall one keeps its ratio, of a wide one ``m`` is kept.
    low, high : int
        Smallest and largest ``n``.
    decide : callable
        Maps a Problem to its Decision; sizes for which it raises AutokernError, for want of memory, are left out.
    trials : iterable of Trial
        Measurements; those of the kind are shown.
    points : int
        Most sizes.

    Examples
    --------
    >>> from autokern.runtime.dispatch import explain
    >>> choices = sweep(Problem(op="qr", m=100, n=50), 10, 100, explain).choices
    >>> choices[0][0], choices[-1][1]
    (10, 100)
    """
    decisions = _decided(problem, low, high, decide, points)
    measured: dict[str, list[tuple[int, float]]] = {}
    for trial in trials:
        within = kind(trial.problem) == kind(problem) and low <= trial.problem.n <= high
        if within and _alike(trial.problem, problem):
            for name, timing in trial.timings.items():
                measured.setdefault(name, []).append((trial.problem.n, timing.seconds))
    names = dict.fromkeys(name for decision in decisions for name in decision.predicted)
    curves = [_curve(name, decisions, sorted(measured.get(name, []))) for name in names]
    choices: list[tuple[int, int, str]] = []
    for decision in decisions:
        n, name = decision.problem.n, decision.candidate
        if choices and choices[-1][2] == name:
            choices[-1] = (choices[-1][0], n, name)
        else:
            choices.append((n, n, name))
    return Sweep(problem=problem, curves=curves, choices=choices)


def _decided(
    problem: Problem, low: int, high: int, decide: Callable[[Problem], Decision], points: int
) -> list[Decision]:
    op, found = get(problem.op), dict[int, Decision]()
    step = math.log(max(high, 1) / max(low, 1)) / max(1, points - 1)
    for n in dict.fromkeys(round(max(low, 1) * math.exp(k * step)) for k in range(points)):
        at = op.nearest(_at(problem, n))
        if at.n in found:
            continue
        try:
            found[at.n] = decide(at)
        except AutokernError:  # no candidate fits the memory
            continue
    return [found[n] for n in sorted(found)]


def _at(problem: Problem, n: int) -> Problem:
    if problem.m > problem.n:
        return problem.replace(m=max(n, round(problem.m * n / problem.n)), n=n)
    return problem.replace(m=n if problem.m == problem.n else problem.m, n=n)


def _alike(one: Problem, other: Problem) -> bool:
    """Whether two problems lie in one sweep: square both, or of like proportions."""
    expected = _at(other, one.n).m
    return (one.m == one.n) == (other.m == other.n) and abs(math.log(one.m / expected)) < math.log(1.5)


def _curve(name: str, decisions: Sequence[Decision], measured: list[tuple[int, float]]) -> Curve:
    at = [(d.problem.n, d.predicted[name], _sigma(d, name)) for d in decisions if name in d.predicted]
    sizes, seconds = [n for n, *_ in at], [time for _, time, _ in at]
    low, high = ([time * math.exp(sign * sigma) for _, time, sigma in at] for sign in (-1, 1))
    return Curve(name, sizes, seconds, low, high, measured)


def _sigma(decision: Decision, name: str) -> float:
    costs: Mapping[str, Any] = decision.costs
    return costs[name].uncertainty if name in costs else 0.0
