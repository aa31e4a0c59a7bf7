"""Met: estimates for systems as users have them, where time depends on the numbers and not on the sizes alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.tuning.forest import Estimate

__all__ = ["met", "preferred", "remark"]


def met(
    op: Op, problem: Problem, estimates: Mapping[str, Estimate], products: int, seconds: Callable[[], float | None]
) -> dict[str, Estimate]:
    """Return the estimates for systems as users have them: the time of iterative solvers depends on the numbers.

    Estimates of candidates that are not measured by themselves follow from the others.
    """
    estimates = {**estimates, **_derived(op, problem, estimates, seconds)}
    harder = {name: math.log(op.harder(problem, op[name], products)) for name in estimates}
    if not any(harder.values()):
        return dict(estimates)
    return {
        name: found._replace(log_ratio=found.log_ratio + harder[name] - harder["stock"])
        for name, found in estimates.items()
    }


def _derived(
    op: Op, problem: Problem, estimates: Mapping[str, Estimate], seconds: Callable[[], float | None]
) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    derived = [c for c in op.listed if c.derived is not None and c.why_not(problem) is None] if estimates else []
    base = seconds() if derived else None
    for candidate in derived:
        if base is not None and candidate.derived is not None:
            others = {name: base * math.exp(estimate.log_ratio) for name, estimate in estimates.items()}
            own = candidate.derived(problem, others)
            if own is not None:
                found[candidate.name] = estimates["stock"]._replace(log_ratio=math.log(own / base))
    return found


def preferred(op: Op, problem: Problem, candidate: Candidate, estimates: Mapping[str, Estimate]) -> bool:
    """Whether a candidate is exact, and expected to take no longer than it may where stock's answer is loose."""
    found = estimates.get(candidate.name)
    exact = candidate.accuracy == "better" and not candidate.as_stock
    if found is None or not exact or not op.approximates(problem):
        return False
    most = op.may_cost(problem)
    return most > 1.0 and found.log_ratio <= math.log(most)


def remark(op: Op, problem: Problem, chosen: Candidate, estimates: Mapping[str, Estimate], products: int) -> str:
    """Return what stock's answer is worth where it approximates, and what an exact one costs if none was chosen."""
    worth = op.remark(problem)
    if worth and products:
        worth = f"{worth}; on yours it takes {products} products"
    exact = [n for n in estimates if op[n].accuracy == "better"]
    if not worth or not chosen.loose or chosen.name not in estimates or not exact:
        return worth
    best = min(exact, key=lambda n: estimates[n].log_ratio)
    times = math.exp(estimates[best].log_ratio - estimates[chosen.name].log_ratio)
    return f"{worth}; {best} would be exact, in {times:.2g} times its time"
