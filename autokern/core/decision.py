"""Decision: the candidate chosen for a problem, the reason, and the costs of the others."""

from __future__ import annotations

import math

import msgspec

from autokern.core.problem import Problem
from autokern.core.units import sized

__all__ = ["Cost", "Decision"]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a candidate on a problem.

    Parameters
    ----------
    seconds : float or None
        Predicted time of one call; None where nothing was measured.
    flops : float
        Floating-point operations of the op's plain implementation, the same for all candidates.
    memory : int
        Bytes that it allocates at its peak, results included.
    relative_error : float or None
        Measured error of a candidate that approximates, relative to the largest entry. None for one within the op's
        bound, and where none was measured.
    """

    seconds: float | None = None
    flops: float = 0.0
    memory: int = 0
    relative_error: float | None = None

    def words(self) -> tuple[str, str, str, str]:
        """Return latency, throughput, memory and error in words."""
        assert self.seconds is not None
        rate = f"{self.flops / self.seconds / 1e9:.3g} Gflop/s" if self.flops else ""
        error = "in bound" if self.relative_error is None else f"{self.relative_error:.0e}"
        return _duration(self.seconds), rate, sized(self.memory), error


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate chosen for a problem, and the reason.

    Parameters
    ----------
    problem : Problem
        The problem.
    candidate : str
        Name of the chosen candidate.
    reason : str
        The reason, in words.
    source : str
        Source of the prediction: ``order``, ``measured``, ``interpolated``, ``extrapolated``, ``unmeasured``
        or ``only choice``.
    predicted : dict
        Predicted seconds of the candidates that may serve, fastest first; empty where nothing was measured.
    margin : float
        Predicted time of stock over that of the choice (1 for stock).
    uncertainty : float
        Standard deviation of log(margin).
    excluded : dict
        Reasons why other candidates could not serve.
    order : tuple of str
        All feasible candidates, the choice first: the order in which they are tried if memory runs out.
    review : int
        Calls that would repay compiling, after which the problem is decided again; 0 for never.
    costs : dict
        Cost of each candidate that may serve, then of each that only its error excludes.
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

    def __str__(self) -> str:
        lines = [str(self.problem), f"  runs {self.candidate}: {self.reason}"]
        if self.margin != 1.0:
            spread = 100 * math.expm1(self.uncertainty)
            lines.append(f"  {self.margin:.2f} times as fast as stock, known to {spread:.0f} % ({self.source})")
        timed = {name: cost for name, cost in self.costs.items() if cost.seconds is not None}
        if timed:
            lines.append(_row("", "latency", "throughput", "memory", "error"))
            lines += [_row(n, *c.words(), mark="→" if n == self.candidate else " ") for n, c in timed.items()]
        lines += [f"    {name:<20} cannot: {why}" for name, why in self.excluded.items()]
        return "\n".join(lines)


def _row(name: str, latency: str, throughput: str, memory: str, error: str, mark: str = " ") -> str:
    return f"  {mark} {name:<20} {latency:>10} {throughput:>14} {memory:>10} {error:>9}".rstrip()


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
