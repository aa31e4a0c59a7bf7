"""Policy: the candidate that serves a problem. Pure: everything it needs comes in as arguments.

Order of precedence: the user's orders; then the candidate predicted to be fastest among those that can run, if it beats
stock by more than the uncertainty; else stock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from autokern.core.candidate import UNKNOWN, WITHIN
from autokern.core.decision import Cost, Decision
from autokern.core.errors import MemoryBudgetError
from autokern.core.feasibility import Feasibility
from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.system.memory_limit import Limit, least, refusal, ways_out
from autokern.tuning.cost_model import CostModel, Estimate
from autokern.tuning.met import met, preferred, remark
from autokern.tuning.obstacles import ROUGH, obstacles
from autokern.tuning.orders import ordered
from autokern.tuning.unmeasured import is_little, unheard

__all__ = ["NOISE", "decide"]

NOISE = 0.06
"""A predicted gain below this, in log units, is no gain."""
CONFIDENCE = 0.5
"""Standard deviations that must lie between a prediction and a tie."""
LEEWAY = 0.13
"""Extra cost allowed for an exact result where stock approximates, in log units: a tenth more than NOISE."""
FEWER_THREADS = 0.05
"""Extra cost allowed for fewer threads beyond the uncertainty, in log units: beside another process every parallel
region waits for a core, and a step takes ten times as long."""
_FAR = 2.5
"""Distance from which a prediction is an extrapolation."""


def decide(
    table: Feasibility,
    model: CostModel,
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
    model : CostModel
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
        Deterministic: the same arguments give the same decision.

    Raises
    ------
    SettingsError
        If the user forced a candidate that the op does not have.
    MemoryBudgetError
        If no candidate that could serve fits the memory.
    """
    op, problem = table.op, table.problem
    excluded = obstacles(table, model, settings, there)
    feasible = [c for c in table.candidates if c.name not in excluded]
    if not feasible:
        raise _nothing_fits(table, model, settings, there)
    rough = [c for c in table.candidates if excluded.get(c.name, "").startswith(ROUGH)]
    timed = [c for c in (*feasible, *rough) if not c.tight]
    estimates = met(op, problem, model.estimate(op, problem, timed), products)
    usable = {name: estimate for name, estimate in estimates.items() if name not in excluded or name == "stock"}
    ranked = _ranked(op, problem, feasible, usable)
    name, reason, source, review = _choice(table, model, settings, seen, excluded, ranked, usable)
    flops, estimate = op.features(problem).flops, usable.get(name)

    def cost(candidate: Candidate) -> Cost:
        found, approximate = estimates.get(candidate.name), candidate.accuracy == "approximate"
        error = op.expected_error(problem, candidate) or (UNKNOWN if approximate else WITHIN)
        return Cost(
            seconds=found.seconds if found else None,
            flops=flops,
            memory=table.memory[candidate.name],
            relative_error=model.relative_error(op, candidate.name, problem) if approximate else None,
            uncertainty=found.sigma if found else 0.0,
            error=error.word,
            meaning=error.words,
        )

    return Decision(
        problem=problem,
        candidate=name,
        reason=reason,
        source=source,
        predicted={c.name: usable[c.name].seconds for c in ranked if c.name in usable},
        margin=math.exp(-estimate.log_ratio) if estimate else 1.0,
        uncertainty=estimate.sigma if estimate else 0.0,
        excluded=excluded,
        order=(name, *(c.name for c in ranked if c.name != name)),
        review=review,
        costs={c.name: cost(c) for c in (*ranked, *rough)},
        remark=remark(op, problem, op[name], usable, products),
    )


def _choice(
    table: Feasibility,
    model: CostModel,
    settings: Settings,
    seen: int,
    excluded: Mapping[str, str],
    ranked: list[Candidate],
    estimates: Mapping[str, Estimate],
) -> tuple[str, str, str, int]:
    """Return the name of the choice, the reason, where the knowledge came from, and the calls until a review."""
    op, stock = table.op, table.op.stock
    frozen = settings.deterministic and settings.profile is None
    default = "stock" if frozen else op.default_candidate(table.problem)
    order = ordered(table, settings, excluded, seen)
    if order is not None and order[0] not in excluded:
        drawn = settings.random_seed is not None and settings.forced(op.name) is None
        return *order, "order", max(2, seen + 1) if drawn else 0
    horizon = seen if settings.calls is None else settings.calls
    known = [c for c in ranked if c.name in estimates]
    another, loose = default not in ("stock", *excluded), op.approximates(table.problem)
    why_default = "stock only approximates" if loose else "stock would do far more work"
    if another and default not in estimates and is_little(op, default, table.problem):
        return default, "not measured, and stock would do far more work", "unmeasured", 0
    if "stock" in excluded:
        likely = op[default] if default not in excluded else _frugal(table, excluded)
        if not known or (default not in excluded and unheard(default, estimates, 0.0 if loose else _FAR)):
            chosen, review = likely, 0
        else:
            chosen, review = _repaid(known, op, estimates, model, horizon)
        why = f"stock does not fit the memory: it {excluded['stock']}"
        source = _source(estimates[chosen.name]) if chosen.name in estimates else "unmeasured"
        return chosen.name, f"{order[1]}; {why}" if order else why, source, review
    if len(ranked) == 1:
        return "stock", "no other candidate can serve this problem", "only choice", 0
    if not estimates:
        if frozen:
            return "stock", "AUTOKERN_DETERMINISTIC=1, and no profile is pinned", "order", 0
        if another:
            return default, f"nothing is measured yet, and {why_default}", "unmeasured", 0
        return "stock", "nothing is measured for this op, dtype and device", "unmeasured", 0
    if another and unheard(default, estimates, 0.0 if loose else math.inf):
        return default, f"not measured here or elsewhere, and {why_default}", "unmeasured", 0
    known.remove(stock)
    better = [
        c
        for c in known
        if preferred(op, table.problem, c, estimates) or _cost(op, table.problem, c, estimates[c.name]) <= -NOISE
    ]
    doubtful = another and not better  # then stock must be shown to be faster
    if doubtful:
        better = [c for c in known if estimates[c.name].log_ratio <= -NOISE]
    chosen, review = _repaid([*better, stock], op, estimates, model, horizon)
    estimate = estimates[chosen.name]
    if chosen is stock and review:
        reason = f"a faster candidate compiles first, which {review} calls would repay"
    elif chosen is stock:
        reason = "no other candidate is faster by more than the uncertainty"
    elif doubtful:
        reason = "likely the fastest: stock does far more work and is not known to be faster"
    elif preferred(op, table.problem, chosen, estimates):
        most = op.may_cost(table.problem)
        reason = f"exact where stock's gradients are loose, in no more than {most:.2g} times its expected time"
    elif estimate.log_ratio + CONFIDENCE * estimate.sigma > -NOISE:
        reason = "exact where stock approximates, and no slower by more than the noise"
    elif chosen.threads and any(other.log_ratio < estimate.log_ratio for other in estimates.values()):
        reason = "as fast as any within the uncertainty, with fewer threads"
    else:
        where = " by what other hosts measured" if math.isinf(estimate.distance) else ""
        reason = f"predicted to be the fastest{where}, by more than the uncertainty"
    return chosen.name, reason, _source(estimate), review


def _repaid(
    ranked: list[Candidate], op: Op, estimates: Mapping[str, Estimate], model: CostModel, horizon: int
) -> tuple[Candidate, int]:
    """Return the first candidate whose set-up time so many calls repay, and the calls after which to decide again.

    Savings count against the best candidate without set-up time; the last one is taken if no other is.
    """
    ready = next((c for c in ranked if not c.compiles), ranked[-1])
    review = 0
    for candidate in ranked:
        if candidate is ready:
            break
        saving = estimates[ready.name].seconds - estimates[candidate.name].seconds
        setup = model.profile.setup.get(f"{op.name}.{candidate.name}", math.inf)
        if saving * horizon > setup:
            return candidate, 0
        if saving > 0 and math.isfinite(setup):
            calls = int(setup / saving) + 1
            review = min(review or calls, calls)
    return ready, review


def _frugal(table: Feasibility, excluded: Mapping[str, str]) -> Candidate:
    """Return the candidate that takes the least memory, the first of equals; one without set-up time if possible."""
    able = (c for c in table.candidates if c.name not in excluded)
    return min(able, key=lambda c: (c.compiles, table.memory[c.name]))


def _nothing_fits(table: Feasibility, model: CostModel, settings: Settings, there: Limit | None) -> MemoryBudgetError:
    problem, limit = table.problem, least(settings.memory, there)
    assert limit is not None
    others = obstacles(table, model, msgspec.structs.replace(settings, memory=None))
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
        best = estimates[first.name]

        def near(estimate: Estimate) -> bool:
            return estimate.log_ratio <= best.log_ratio + FEWER_THREADS

        few = [c for c in ranked if c.threads and c.name in estimates and near(estimates[c.name])]
        frugal = min(few, key=lambda c: c.threads, default=first)
        ranked.remove(frugal)
        ranked.insert(0, frugal)
    return ranked


def _source(estimate: Estimate) -> str:
    if math.isinf(estimate.distance):
        return "other hosts"
    return "measured" if estimate.distance < 0.1 else "interpolated" if estimate.distance < _FAR else "extrapolated"
