"""Policy: the candidate that serves a problem. Pure: everything it needs comes in as arguments.

Order of precedence: the user's orders; then the candidate predicted to be fastest among those that can run, if it beats
stock by more than the uncertainty; else stock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import msgspec

from autokern.core.decision import Cost, Decision
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.core.feasibility import Feasibility
from autokern.core.op import ACCURACIES, Candidate, Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.core.units import sized
from autokern.system.memory_limit import Limit, least, refusal, ways_out
from autokern.tuning.cost_model import CostModel, Estimate

__all__ = ["NOISE", "decide", "obstacles"]

NOISE = 0.03
"""A predicted gain below this, in log units, is no gain."""
CONFIDENCE = 1.7
"""Standard deviations that must lie between a prediction and a tie."""
LEEWAY = 0.13
"""Extra cost allowed for an exact result where stock approximates, in log units: a tenth more than NOISE."""
FEWER_THREADS = 0.05
"""Extra cost allowed for fewer threads beyond the uncertainty, in log units: beside another process every parallel
region waits for a core, and a step takes ten times as long."""
_ROUGH = "its error was measured to be"


def obstacles(table: Feasibility, model: CostModel, settings: Settings, there: Limit | None = None) -> dict[str, str]:
    """Return the reasons why candidates cannot serve a problem, by name; stock is refused for want of memory only.

    Where a recorded host is replayed, the candidates are available that were measured there.
    """
    op, problem = table.op, table.problem
    accuracies = ACCURACIES if settings.accuracy == "approximate" else ACCURACIES[:2]
    banned = {
        ban.candidate: ban.reason
        for ban in model.profile.banned
        if (ban.op, ban.dtype, ban.device) == (problem.op, problem.dtype, problem.device)
    }
    limit = least(settings.memory, there)
    found = {}
    for candidate in table.candidates:
        why = None
        if candidate is not op.stock:
            why = table.why_not(candidate)
            if why is None and settings.excludes(op.name, candidate.name):
                why = "excluded by the user"
            if why is None and candidate.accuracy not in accuracies:
                why = f"its accuracy is {candidate.accuracy}, which is not allowed"
            if why is None and candidate.accuracy == "approximate" and settings.forced(op.name) != candidate.name:
                why = _too_rough(model.relative_error(op, candidate.name, problem), settings.max_error)
            if why is None and candidate.name in banned:
                why = f"banned on this host: {banned[candidate.name]}"
            if why is None and table.recorded and not model.measured(candidate.name, problem):
                why = "it was not measured on the recorded host"
        if why is None and limit is not None and table.memory[candidate.name] > limit.bytes:
            why = f"needs {sized(table.memory[candidate.name])}, and {sized(limit.bytes)} may be taken"
        if why is not None:
            found[candidate.name] = why
    return found


def _too_rough(error: float | None, most: float) -> str | None:
    """Return why a candidate that approximates is not admitted with the error that was measured of it, or None."""
    if error is None:
        return "its error was not measured on this machine: autokern calibrate --accuracy approximate"
    return None if error <= most else f"{_ROUGH} {error:.0e}, and at most {most:.0e} is allowed"


def decide(
    table: Feasibility, model: CostModel, settings: Settings, there: Limit | None = None, seen: int = 0
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
    rough = [c for c in table.candidates if excluded.get(c.name, "").startswith(_ROUGH)]
    estimates = model.estimate(op, problem, [*feasible, *rough])
    usable = {name: estimate for name, estimate in estimates.items() if name not in excluded or name == "stock"}
    ranked = _ranked(op, problem, feasible, usable)
    name, reason, source, review = _choice(table, model, settings, seen, excluded, ranked, usable)
    flops, estimate = op.features(problem).flops, usable.get(name)

    def cost(candidate: Candidate) -> Cost:
        found, approximate = estimates.get(candidate.name), candidate.accuracy == "approximate"
        return Cost(
            seconds=found.seconds if found else None,
            flops=flops,
            memory=table.memory[candidate.name],
            relative_error=model.relative_error(op, candidate.name, problem) if approximate else None,
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
    op, stock, default = table.op, table.op.stock, table.op.default_candidate(table.problem)
    ordered = _ordered(table, settings, excluded, seen)
    if ordered is not None and ordered[0] not in excluded:
        drawn = settings.random_seed is not None and settings.forced(op.name) is None
        return *ordered, "order", max(2, seen + 1) if drawn else 0
    horizon = seen if settings.calls is None else settings.calls
    known = [c for c in ranked if c.name in estimates]
    if "stock" in excluded:
        likely = op[default] if default not in excluded else _frugal(table, excluded)
        chosen, review = _repaid(known, op, estimates, model, horizon) if known else (likely, 0)
        why = f"stock does not fit the memory: it {excluded['stock']}"
        source = _source(estimates[chosen.name]) if chosen.name in estimates else "unmeasured"
        return chosen.name, f"{ordered[1]}; {why}" if ordered else why, source, review
    if len(ranked) == 1:
        return "stock", "no other candidate can serve this problem", "only choice", 0
    another = default not in ("stock", *excluded)
    if not estimates:
        if another:
            return default, "nothing is measured yet, and stock would do far more work", "unmeasured", 0
        return "stock", "nothing is measured for this op, dtype and device", "unmeasured", 0
    known.remove(stock)
    better = [c for c in known if _cost(op, table.problem, c, estimates[c.name]) <= -NOISE]
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
    elif estimate.log_ratio + CONFIDENCE * estimate.sigma > -NOISE:
        reason = "exact where stock approximates, and no slower by more than the noise"
    elif chosen.threads and any(other.log_ratio < estimate.log_ratio for other in estimates.values()):
        reason = "as fast as any within the uncertainty, with fewer threads"
    else:
        reason = "predicted to be the fastest, by more than the uncertainty"
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
    """Candidates by cautious predicted time, of near ties the fewest threads; stock before those not measured."""

    def cost(candidate: Candidate) -> float:
        if candidate is op.stock:
            return 0.0
        estimate = estimates.get(candidate.name)
        return math.inf if estimate is None else _cost(op, problem, candidate, estimate)

    ranked = sorted(feasible, key=lambda c: (cost(c), c is not op.stock, c.name))
    first = ranked[0]
    if first is not op.stock and first.name in estimates:
        best = estimates[first.name]

        def near(estimate: Estimate) -> bool:
            return estimate.log_ratio <= best.log_ratio + FEWER_THREADS + math.hypot(estimate.sigma, best.sigma)

        few = [c for c in ranked if c.threads and c.name in estimates and near(estimates[c.name])]
        frugal = min(few, key=lambda c: c.threads, default=first)
        ranked.remove(frugal)
        ranked.insert(0, frugal)
    return ranked


def _source(estimate: Estimate) -> str:
    return "measured" if estimate.distance < 0.1 else "interpolated" if estimate.distance < 2.5 else "extrapolated"


def _ordered(table: Feasibility, settings: Settings, excluded: Mapping[str, str], seen: int) -> tuple[str, str] | None:
    """Return the candidate that the user ordered and the reason to give, if there is such an order."""
    op, problem, forced = table.op, table.problem, settings.forced(table.op.name)
    if forced is not None:
        if forced not in op.names():
            raise SettingsError(f"op {op.name} has no candidate {forced!r} to force; it has {', '.join(op.names())}")
        if forced in excluded:
            return "stock", f"{forced} was forced but cannot serve: {excluded[forced]}"
        return forced, "forced by the user"
    if settings.random_seed is not None:
        names = [
            c.name
            for c in table.candidates
            if c.name not in excluded and c.accuracy != "approximate" and not c.compiles
        ] or ["stock"]
        return random.Random(f"{settings.random_seed}:{problem}:{seen}").choice(names), "drawn at random"
    size = settings.cpu_up_to(op.name, problem.device)
    if size is None:
        return None
    wanted = "cpu" if problem.n <= size else "native"
    side = f"{problem.n} columns, threshold {size}"
    if wanted in op.names() and wanted not in excluded:
        return wanted, f"ordered by the user ({side})"
    return "stock", f"ordered by the user ({side}), which is what stock does"
