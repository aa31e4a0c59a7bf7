"""Decision: the candidate chosen for a problem, the reason, the candidates' costs, and the residuals of solves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from autokern.core.output import Shown, duration, legible, sized
from autokern.core.problem import WITHIN, Problem
from autokern.core.state import inside


class Solved(msgspec.Struct, frozen=True):
    """One iterative solve, or the worst of several."""

    residual: float  # relative, the largest of all columns
    iterations: int  # products with the matrix
    preconditioner: str
    columns: int  # right-hand sides solved together; for a log density, its probes
    standard_error: float | None = None  # of a log density, by the spread of its probes; infinite with a single probe
    goal: float | None = None  # the requested relative residual
    solves: int = 1  # number of solves that this record sums up
    missed: int = 0  # number of solves that stopped before the goal

    def __str__(self) -> str:
        several = f", the worst of {self.solves:,} solves," if self.solves > 1 else ""
        by = f"{self.iterations} iterations, preconditioner {self.preconditioner}"
        told = f"solved to a residual of {self.residual:.2g}{several} in {by}"
        if self.missed:
            which = f"{self.missed:,} of {self.solves:,} stopped" if self.solves > 1 else "stopped"
            told += f"; {which} before the {self.goal or 0:.2g} that was asked for"
        if (error := self.standard_error) is not None:
            worth = f"known to {error:.2g}" if math.isfinite(error) else "of unknown error"
            told += f"; log density {worth} by {self.columns} probe{'s' * (self.columns != 1)}"
        return told


def joined(found: Iterable[Solved]) -> tuple[Solved, ...]:
    """Return the worst of several solves, for each preconditioner."""
    known = list(found)
    names = dict.fromkeys(one.preconditioner for one in known)
    return tuple(_worst([one for one in known if one.preconditioner == name], name) for name in names)


def overall(found: Iterable[Solved]) -> Solved | None:
    """Return the worst of several solves, whatever their preconditioners; None without solves."""
    known = list(found)
    return _worst(known, ", ".join(dict.fromkeys(one.preconditioner for one in known))) if known else None


def _worst(several: list[Solved], name: str) -> Solved:
    fields = zip(*map(msgspec.structs.astuple, several), strict=True)
    left, products, _, columns, errors, goals, solves, missed = fields
    error = max((number for number in errors if number is not None), default=None)
    goal = min((number for number in goals if number is not None), default=None)
    return Solved(max(left), max(products), name, max(columns), error, goal, sum(solves), sum(missed))


def note(*found: Solved) -> None:
    """Record solves, if this thread collects."""
    if inside.solves is not None:
        inside.solves.extend(found)


@contextlib.contextmanager
def collecting(keep: Callable[[list[Solved]], None]) -> Iterator[None]:
    """Call `keep` with the solves that this thread records in the block, if any; an outer block gets them, too."""
    outer, inside.solves = inside.solves, (found := list[Solved]())
    try:
        yield
    finally:
        inside.solves = outer
        if found:
            keep(found)
            note(*found)


_ROUGHLY = 1.5  # factor of uncertainty from which on a margin is shown with two digits


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a candidate on a problem."""

    seconds: float | None = None  # predicted, of one call; None if unmeasured
    flops: float = 0.0  # of stock, the same for all candidates
    memory: int = 0  # bytes allocated at the peak, results included
    relative_error: float | None = None  # measured, of an approximate candidate, relative to the largest entry
    uncertainty: float = 0.0  # standard deviation of log(time / stock's time)
    error: str = WITHIN.word  # the error to expect, in a word
    meaning: str = WITHIN.words  # the same in a sentence; empty for results within the op's bound

    def words(self) -> tuple[str, str, str, str]:
        """Return latency, throughput, memory and error as text; the first two are empty if unmeasured."""
        error = self.error if self.relative_error is None else f"{self.relative_error:.0e}"
        if self.seconds is None:
            return "", "", sized(self.memory), error
        rate = f"{self.flops / self.seconds / 1e9:.3g} Gflop/s" if self.flops else ""
        return duration(self.seconds), rate, sized(self.memory), error


class Decision(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """The candidate chosen for a problem, and the reason.

    Parameters
    ----------
    problem : Problem
        The problem.
    candidate, reason : str
        Name of the chosen candidate, and the reason in words.
    source : str
        Source of the prediction: ``order``, ``measured``, ``extrapolated``, ``other hosts``, ``unmeasured`` or
        ``only choice``.
    predicted : dict
        Predicted seconds of the candidates that may serve, the choice first; empty where nothing was measured.
    margin, uncertainty : float
        Predicted time of stock over the choice's (1 for stock), and the standard deviation of its logarithm.
    excluded : dict
        Why other candidates could not serve, by name.
    order : tuple of str
        All feasible candidates, the choice first: the order in which they are tried if memory runs out.
    review : int
        Calls that would repay compiling, after which the problem is decided again; 0 for never.
    costs : dict
        Cost of each candidate that may serve, then of each candidate that is excluded only for its error.
    remark, nearest : str
        The accuracy of stock's answer where stock approximates; the measured problem that the seconds are scaled from.
    solved : tuple of Solved
        The worst iterative solve for each preconditioner; empty before the first call, and for direct methods.
    within : tuple of str
        The composite calls around these calls, outermost first, as ``op by candidate``; empty for direct calls.
    """

    problem: Problem
    candidate: str
    reason: str
    source: str
    predicted: dict[str, float] = {}
    margin: float = 1.0
    uncertainty: float = 0.0
    excluded: dict[str, str] = {}
    order: tuple[str, ...] = ()
    review: int = 0
    costs: dict[str, Cost] = {}
    remark: str = ""
    nearest: str = ""
    solved: tuple[Solved, ...] = ()
    within: tuple[str, ...] = ()

    @property
    def cell(self) -> tuple[Problem, str]:
        """The problem with coarse sizes, and the candidate: the key under which its errors are remembered."""
        return self.problem.coarse, self.candidate

    @property
    def saved(self) -> float | None:
        """Predicted seconds that a call saves against stock, negative for a slower exact result; None if unmeasured."""
        own = self.predicted.get(self.candidate)
        return None if own is None else own * (self.margin - 1.0)

    def notes(self) -> list[str]:
        """Return a line each on the choice, its speedup, stock's accuracy, the nearest measurement and the solves."""
        notes = [f"runs {self.candidate}: {self.reason}"]
        if self.margin != 1.0:
            spread = math.exp(self.uncertainty)
            doubt = f"known to {100 * (spread - 1):.0f} %" if spread < _ROUGHLY else f"within a factor of {spread:.1f}"
            margin = f"{self.margin:.2f}" if spread < _ROUGHLY else f"about {float(f'{self.margin:.2g}'):g}"
            notes.append(f"{margin} times as fast as stock, {doubt} ({self.source})")
        return [*notes, *filter(None, (self.remark, self.nearest)), *map(str, self.solved)]

    def meanings(self) -> list[str]:
        """Return a line on each expected error and its meaning, unless the remark states it."""
        told: dict[str, list[str]] = {}
        for name, cost in self.costs.items():
            if cost.meaning and cost.meaning not in self.remark:
                told.setdefault(cost.meaning, []).append(name)
        return [f"error of {', '.join(names)}: {meaning}" for meaning, names in told.items()]

    def __str__(self) -> str:
        lines = [str(self.problem), *(f"  {note}" for note in self.notes())]
        rows = [("", ("latency", "throughput", "memory", "error"))] if self.costs else []
        rows += [(name, cost.words()) for name, cost in self.costs.items()]
        width = max([9, *(len(words[-1]) for _, words in rows)])
        for name, (latency, throughput, memory, error) in rows:
            mark = "→" if name == self.candidate else " "
            lines.append(f"  {mark} {name:<20} {latency:>10} {throughput:>14} {memory:>10} {error:>{width}}".rstrip())
        lines += [f"    {meaning}" for meaning in self.meanings()]
        lines += [f"    {name:<20} cannot: {why}" for name, why in self.excluded.items()]
        return legible("\n".join(lines))

    def candidates(self) -> list[tuple[str, Cost | None, str]]:
        """Return each candidate, its cost (None if unknown), and why it cannot serve (empty if it can)."""
        names = dict.fromkeys((*self.costs, *self.excluded))
        return [(name, self.costs.get(name), self.excluded.get(name, "")) for name in names]
