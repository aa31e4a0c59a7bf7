"""Policy: the candidate that serves a problem. Pure: everything it needs comes in as arguments.

Order of precedence: the user's orders; then the candidate predicted to be fastest among those that can run, if it beats
stock by more than the uncertainty; else stock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from autokern.core.candidate import UNKNOWN, WITHIN
from autokern.core.decision import Cost, Decision
from autokern.core.errors import MemoryBudgetError
from autokern.core.feasibility import Feasibility
from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.system.memory_limit import Limit, least, refusal, ways_out
from autokern.tuning.chooser import Chooser
from autokern.tuning.forest import Estimate
from autokern.tuning.met import met, preferred, remark
from autokern.tuning.obstacles import ROUGH, obstacles
from autokern.tuning.orders import ordered

__all__ = ["CONFIDENCE", "NOISE", "decide", "described"]

NOISE = 0.05
"""A predicted gain below this, in log units, is no gain."""
CONFIDENCE = 0.3
"""Standard deviations that must lie between a prediction and a tie."""
LEEWAY = 0.13
"""Extra cost allowed for an exact result where stock approximates, in log units."""
FEWER_THREADS = 0.05
"""Extra cost allowed for fewer threads beyond the uncertainty, in log units: beside another process every parallel
region waits for a core, and a step takes ten times as long."""
_LITTLE = 10.0
"""How much less work than stock a default candidate must do to run unmeasured where others are measured."""


class _Choice(NamedTuple):
    """The name of the choice, the reason, the source of the knowledge, and the calls until a review."""

    name: str
    reason: str
    source: str
    review: int = 0


def decide(
    table: Feasibility,
    chooser: Chooser,
    settings: Settings,
    there: Limit | None = None,
    seen: int = 0,
    products: int = 0,
) -> Decision:
    """Choose a candidate.

    Parameters
    ----------
    table : Feasibility
        The problem to serve, and the reasons and bytes of its candidates.
    chooser : Chooser
        Predictions from the measurements.
    settings : Settings
        Orders of the user.
    there : Limit, optional
        The available memory; None where it does not matter.
    seen : int
        Calls of this problem so far. Unless the user has declared how many there will be, as many are expected to
        come: that costs at most twice the best choice (the ski rental of online algorithms). Where candidates are
        drawn at random, each call is drawn anew.
    products : int
        Products that stock's conjugate gradients took on the user's system; 0 where they were not counted.

    Returns
    -------
    Decision
        Deterministic: the same arguments give the same decision. Its costs are not filled in; `described` does that.

    Raises
    ------
    SettingsError
        If the user forced a candidate that the op does not have.
    MemoryBudgetError
        If no candidate that could serve fits the memory.
    """
    op, problem = table.op, table.problem
    excluded = obstacles(table, chooser, settings, there)
    feasible = [c for c in table.candidates if c.name not in excluded]
    if not feasible:
        raise _nothing_fits(table, chooser, settings, there)
    estimates = _estimates(table, chooser, settings, products)
    usable = {name: found for name, found in estimates.items() if name not in excluded or name == "stock"}
    ranked = _ranked(op, problem, feasible, usable)
    name, reason, source, review = _choice(table, chooser, settings, seen, excluded, ranked, usable)
    estimate = usable.get(name)
    return Decision(
        problem=problem,
        candidate=name,
        reason=reason,
        source=source,
        margin=math.exp(-estimate.log_ratio) if estimate else 1.0,
        uncertainty=estimate.sigma if estimate else 0.0,
        excluded=excluded,
        order=(name, *(c.name for c in ranked if c.name != name)),
        review=review,
        remark=remark(op, problem, op[name], usable, products),
    )


def _estimates(table: Feasibility, chooser: Chooser, settings: Settings, products: int) -> dict[str, Estimate]:
    """Return the estimates of candidates whose time follows from their problem."""
    op, problem = table.op, table.problem
    if settings.deterministic and settings.profile is None:
        return {}
    names = {c.name for c in table.candidates if not c.tight}
    found = {name: estimate for name, estimate in chooser.estimates(problem).items() if name in names}

    def seconds() -> float | None:
        near = chooser.nearest(op, problem)
        return None if near is None else near.seconds

    return met(op, problem, found, products, seconds)


def described(decision: Decision, chooser: Chooser, settings: Settings, products: int = 0) -> Decision:
    """Return a decision with the costs of the candidates; seconds follow from the nearest trial, which is named."""
    from autokern.core.registry import get

    op, problem = get(decision.problem.op), decision.problem
    table = Feasibility(op, problem)
    estimates, near = _estimates(table, chooser, settings, products), chooser.nearest(op, problem)
    rough = [name for name, why in decision.excluded.items() if why.startswith(ROUGH)]
    flops, harder = op.features(problem).flops, op.harder(problem, op.stock, products)

    def seconds(name: str) -> float | None:
        found = estimates.get(name)
        return None if found is None or near is None else near.seconds * harder * math.exp(found.log_ratio)

    def cost(candidate: Candidate) -> Cost:
        approximate = candidate.accuracy == "approximate"
        error = op.expected_error(problem, candidate) or (UNKNOWN if approximate else WITHIN)
        return Cost(
            seconds=seconds(candidate.name),
            flops=flops,
            memory=table.memory[candidate.name],
            relative_error=chooser.relative_error(op, candidate.name, problem) if approximate else None,
            uncertainty=estimates[candidate.name].sigma if candidate.name in estimates else 0.0,
            error=error.word,
            meaning=error.words,
        )

    names = [decision.candidate, *decision.order, *rough]
    times = {name: found for name in decision.order if (found := seconds(name)) is not None}
    told = "" if near is None or not times else _told(near.here, str(near.trial.problem), near.octaves)
    return msgspec.structs.replace(
        decision, predicted=times, costs={name: cost(op[name]) for name in dict.fromkeys(names)}, nearest=told
    )


def _told(here: bool, problem: str, octaves: float) -> str:
    where = "this machine" if here else "another machine"
    return f"times follow from {problem}, measured on {where}" + (f", {octaves:.1f} octaves away" * (octaves > 0.05))


def _choice(
    table: Feasibility,
    chooser: Chooser,
    settings: Settings,
    seen: int,
    excluded: Mapping[str, str],
    ranked: list[Candidate],
    estimates: Mapping[str, Estimate],
) -> _Choice:
    op, stock, problem = table.op, table.op.stock, table.problem
    frozen = settings.deterministic and settings.profile is None
    default = "stock" if frozen else op.default_candidate(problem)
    order = ordered(table, settings, excluded, seen)
    if order is not None and order[0] not in excluded:
        drawn = settings.random_seed is not None and settings.forced(op.name) is None
        return _Choice(*order, "order", max(2, seen + 1) if drawn else 0)
    horizon = seen if settings.calls is None else settings.calls
    known = [c for c in ranked if c.name in estimates]
    another, loose = default not in ("stock", *excluded), op.approximates(problem)
    why_default = "stock only approximates" if loose else "stock would do far more work"
    unheard = default not in estimates and (loose or not chooser.knows(problem))
    if another and default not in estimates and _is_little(op, default, problem):
        return _Choice(default, "not measured, and stock would do far more work", "unmeasured")
    if "stock" in excluded:
        likely = op[default] if default not in excluded else _frugal(table, excluded)
        if not known or (default not in excluded and unheard):
            chosen, review = likely, 0
        else:
            chosen, review = _repaid(known, table, estimates, chooser, horizon)
        why = f"stock does not fit the memory: it {excluded['stock']}"
        source = estimates[chosen.name].source if chosen.name in estimates else "unmeasured"
        return _Choice(chosen.name, f"{order[1]}; {why}" if order else why, source, review)
    if len(ranked) == 1:
        return _Choice("stock", "no other candidate can serve this problem", "only choice")
    if frozen:
        return _Choice("stock", "AUTOKERN_DETERMINISTIC=1, and no profile is pinned", "order")
    if another and (unheard or not estimates):
        return _Choice(default, f"not measured here or elsewhere, and {why_default}", "unmeasured")
    if not estimates:
        return _Choice("stock", "no such problem is measured for this op, dtype and device", "unmeasured")
    if chooser.instead(problem) == "stock" and not loose:  # the exam compares times
        return _Choice("stock", "the calibration's exam found stock faster at these sizes", "measured")
    known.remove(stock)
    better = [
        c for c in known if preferred(op, problem, c, estimates) or _cost(op, problem, c, estimates[c.name]) <= -NOISE
    ]
    doubtful = another and not better  # then stock must be shown to be faster
    if doubtful:
        better = [c for c in known if estimates[c.name].log_ratio <= -NOISE]
    chosen, review = _repaid([*better, stock], table, estimates, chooser, horizon)
    estimate = estimates[chosen.name]
    if chosen is stock and review:
        reason = f"a faster candidate compiles first, which {review} calls would repay"
    elif chosen is stock:
        reason = "no other candidate is faster by more than the uncertainty"
    elif doubtful:
        reason = "likely the fastest: stock does far more work and is not known to be faster"
    elif preferred(op, problem, chosen, estimates):
        most = op.may_cost(problem)
        reason = f"exact where stock's gradients are loose, in no more than {most:.2g} times its expected time"
    elif estimate.log_ratio + CONFIDENCE * estimate.sigma > -NOISE:
        reason = "exact where stock approximates, and no slower by more than the noise"
    elif chosen.threads and any(other.log_ratio < estimate.log_ratio for other in estimates.values()):
        reason = "as fast as any within the uncertainty, with fewer threads"
    else:
        where = " by what other hosts measured" if estimate.source == "other hosts" else ""
        reason = f"predicted to be the fastest{where}, by more than the uncertainty"
    return _Choice(chosen.name, reason, estimate.source, review)


def _is_little(op: Op, name: str, problem: Problem) -> bool:
    """Whether a candidate does so little of stock's work that it needs no measurement."""
    own, stock = (candidate.features(problem) for candidate in (op[name], op.stock))
    return _LITTLE * (own.flops + own.bytes) <= stock.flops + stock.bytes


def _repaid(
    ranked: list[Candidate], table: Feasibility, estimates: Mapping[str, Estimate], chooser: Chooser, horizon: int
) -> tuple[Candidate, int]:
    """Return the first candidate whose set-up time so many calls repay, and the calls after which to decide again.

    Savings count against the best candidate without set-up time; the last one is taken if no other is.
    """
    ready, review = next((c for c in ranked if not c.compiles), ranked[-1]), 0
    if ranked[0] is ready:
        return ready, 0
    near = chooser.nearest(table.op, table.problem)
    for candidate in ranked[: ranked.index(ready)]:
        times = (math.exp(estimates[c.name].log_ratio) for c in (ready, candidate))
        saving = 0.0 if near is None else near.seconds * (next(times) - next(times))
        setup = chooser.profile.setup.get(f"{table.op.name}.{candidate.name}", math.inf)
        if saving * horizon > setup:
            return candidate, 0
        if saving > 0 and math.isfinite(setup / saving):
            calls = int(setup / saving) + 1
            review = min(review or calls, calls)
    return ready, review


def _frugal(table: Feasibility, excluded: Mapping[str, str]) -> Candidate:
    """Return the candidate that takes the least memory, the first of equals; one without set-up time if possible."""
    able = (c for c in table.candidates if c.name not in excluded)
    return min(able, key=lambda c: (c.compiles, table.memory[c.name]))


def _nothing_fits(table: Feasibility, chooser: Chooser, settings: Settings, there: Limit | None) -> MemoryBudgetError:
    problem, limit = table.problem, least(settings.memory, there)
    assert limit is not None
    others = obstacles(table, chooser, msgspec.structs.replace(settings, memory=None))
    frugal = _frugal(table, others)
    asked = f"{problem} by its most frugal candidate ({frugal.name})"
    ways = ways_out(problem.dtype, bool(problem.d), tiles=problem.op != "kernel_matmul")
    return refusal(asked, table.memory[frugal.name], limit, ways)


def _cost(op: Op, problem: Problem, candidate: Candidate, estimate: Estimate) -> float:
    """Return the cautious log ratio to stock's time, less what an exact result may cost where stock approximates."""
    favoured = candidate.accuracy == "better" and op.approximates(problem)
    return estimate.log_ratio + CONFIDENCE * estimate.sigma - (LEEWAY if favoured else 0.0)


def _ranked(op: Op, problem: Problem, feasible: list[Candidate], estimates: Mapping[str, Estimate]) -> list[Candidate]:
    """Candidates by cautious predicted time, of near ties the fewest threads; stock before those not measured.

    Those that are exact come first where they are preferred.
    """

    def cost(candidate: Candidate) -> float:
        if candidate is op.stock:
            return 0.0
        estimate = estimates.get(candidate.name)
        return math.inf if estimate is None else _cost(op, problem, candidate, estimate)

    def rank(candidate: Candidate) -> tuple[bool, float, bool, str]:
        first = preferred(op, problem, candidate, estimates)
        return not first, cost(candidate), candidate is not op.stock, candidate.name

    ranked = sorted(feasible, key=rank)
    first = ranked[0]
    if first is not op.stock and first.name in estimates:
        most = estimates[first.name].log_ratio + FEWER_THREADS
        few = [c for c in ranked if c.threads and c.name in estimates and estimates[c.name].log_ratio <= most]
        frugal = min(few, key=lambda c: c.threads, default=first)
        ranked.remove(frugal)
        ranked.insert(0, frugal)
    return ranked
