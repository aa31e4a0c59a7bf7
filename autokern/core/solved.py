"""Solved: the residuals that iterative solvers reached, recorded by thread where they run."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator

import msgspec


class Solved(msgspec.Struct, frozen=True):
    """One iterative solve, or the worst of several.

    Examples
    --------
    >>> print(Solved(3.2e-6, 14, "vecchia", 10, 0.0123, 1e-5))
    solved to a residual of 3.2e-06 in 14 iterations, preconditioner vecchia; log density known to 0.012 by 10 probes
    """

    residual: float  # relative, the largest of all columns
    iterations: int  # products with the matrix
    preconditioner: str
    columns: int  # right-hand sides solved together; for a log density, its probes
    standard_error: float | None = None  # of a log density, by the spread of its probes; infinite with a single probe
    goal: float | None = None  # the requested relative residual
    solves: int = 1  # number of solves that this record sums up
    missed: int = 0  # number of these that stopped before the goal

    def __str__(self) -> str:
        several = f", the worst of {self.solves:,} solves," if self.solves > 1 else ""
        by = f"{self.iterations} iterations, preconditioner {self.preconditioner}"
        parts = [f"solved to a residual of {self.residual:.2g}{several} in {by}"]
        if self.missed:
            which = f"{self.missed:,} of {self.solves:,} stopped" if self.solves > 1 else "stopped"
            parts.append(f"{which} before the {self.goal or 0:.2g} that was asked for")
        if self.standard_error is not None:
            known = math.isfinite(self.standard_error)
            worth = f"known to {self.standard_error:.2g}" if known else "of unknown error"
            parts.append(f"log density {worth} by {self.columns} probe{'s' * (self.columns != 1)}")
        return "; ".join(parts)


def joined(found: Iterable[Solved]) -> tuple[Solved, ...]:
    """Return the worst of several solves, for each preconditioner.

    Examples
    --------
    >>> joined([Solved(1e-6, 9, "pivoted", 1), Solved(2e-6, 7, "pivoted", 3)])[0].iterations
    9
    """
    worst: dict[str, Solved] = {}
    for one in found:
        other = worst.get(one.preconditioner)
        worst[one.preconditioner] = one if other is None else _worse(other, one)
    return tuple(worst.values())


def overall(found: Iterable[Solved]) -> Solved | None:
    """Return the worst of several solves over all preconditioners; None without solves."""
    known = list(found)
    names = ", ".join(dict.fromkeys(one.preconditioner for one in known))
    return next(iter(joined(msgspec.structs.replace(one, preconditioner=names) for one in known)), None)


def _worse(one: Solved, other: Solved) -> Solved:
    errors = [error for error in (one.standard_error, other.standard_error) if error is not None]
    goals = [goal for goal in (one.goal, other.goal) if goal is not None]
    return Solved(
        max(one.residual, other.residual),
        max(one.iterations, other.iterations),
        one.preconditioner,
        max(one.columns, other.columns),
        max(errors, default=None),
        min(goals, default=None),
        one.solves + other.solves,
        one.missed + other.missed,
    )


class _Own(threading.local):
    """The records of this thread; None while nothing collects them."""

    seen: list[Solved] | None = None


_own = _Own()


def note(found: Solved) -> None:
    """Record a solve, if this thread collects."""
    if _own.seen is not None:
        _own.seen.append(found)


@contextlib.contextmanager
def collecting(keep: Callable[[list[Solved]], None]) -> Iterator[None]:
    """Call `keep` with the solves that this thread records in the block, if any; an outer block gets them, too."""
    outer, _own.seen = _own.seen, []
    try:
        yield
    finally:
        found, _own.seen = _own.seen or [], outer
        if found:
            keep(found)
            if outer is not None:
                outer.extend(found)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Collect nothing in the block, for solves that the user did not ask for."""
    before, _own.seen = _own.seen, None
    try:
        yield
    finally:
        _own.seen = before
