"""Contenders: the candidates that may well be faster than the choice, and what was learnt of them from use. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.tuning.cost_model import Estimate
from autokern.tuning.profile import Trial

__all__ = ["ENOUGH", "NOISE", "contenders", "told"]

NOISE = 0.03
"""A predicted gain below this, in log units, is no gain."""
CONTENDERS = 3
"""Most candidates that are worth comparing with the choice on the user's calls."""
CHANCE = 2.0
"""Standard deviations of a prediction within which a candidate may still be faster than the choice."""
ENOUGH = 6
"""Comparisons on the user's calls after which they settle what is faster."""


def told(learnt: Trial) -> dict[str, Estimate]:
    """Return what comparisons on the user's calls say of each candidate."""
    timings = learnt.timings.items()
    return {name: Estimate(t.seconds, math.log(t.ratio), t.noise, 0.0) for name, t in timings}


def contenders(
    op: Op,
    problem: Problem,
    chosen: Candidate,
    source: str,
    feasible: list[Candidate],
    estimates: Mapping[str, Estimate],
    learnt: Trial | None,
) -> tuple[str, ...]:
    """Return the candidates with a fair chance to be faster than the choice by more than noise, likely ones first.

    Where stock approximates, results agree only among candidates that do not, nor iterate as stock does. A default that
    was never measured is compared with stock.
    """
    stock, approximates = op.stock, op.approximates(problem)
    classes = ("better",) if approximates else ("same", "better")
    if source in ("order", "only choice") or chosen.compiles or chosen.accuracy not in classes or stock not in feasible:
        return ()
    able = [c for c in feasible if c is not chosen and not c.compiles and c.accuracy in classes]
    if approximates:
        able = [c for c in able if c.as_stock == chosen.as_stock]
    if not estimates:
        return () if chosen is stock or approximates else ("stock",)
    here = estimates.get(chosen.name)
    if here is None:
        return ()
    found = []
    for candidate in able:
        there = estimates.get(candidate.name)
        if there is None or (candidate is stock and approximates):
            continue
        gap, sigma = there.log_ratio - here.log_ratio, math.hypot(there.sigma, here.sigma)
        known = learnt is not None and {candidate.name, chosen.name} <= learnt.timings.keys() | {"stock"}
        if gap - CHANCE * sigma < -NOISE and not (known and learnt is not None and learnt.calls >= ENOUGH):
            found.append((gap - sigma, candidate.name))
    return tuple(name for _, name in sorted(found)[:CONTENDERS])
