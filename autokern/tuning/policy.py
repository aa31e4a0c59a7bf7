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
"""Extra cost allowed for an exact result where stock approximates, in log units: a tenth beyond NOISE."""
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
    for candidate in op.candidates:
        why = None
        if candidate is not op.stock:
            why = table.why_not(candidate)
            if why is None and settings.excludes(op.name, candidate.name):
                why = "excluded by the user"
            if why is None and candidate.accuracy not in accuracies:
                why = f"its accuracy is {candidate.accuracy}, and that was not asked for"
            if why is None and candidate.accuracy == "approximate" and settings.forced(op.name) != candidate.name:
                why = _too_rough(model.relative_error(op, candidate.name, problem), settings.max_error)
            if why is None and candidate.name in banned:
                why = f"banned on this host: {banned[candidate.name]}"
            if why is None and table.recorded and not model.measured(candidate.name, problem):
                why = "it was not measured on the recorded host"
        if why is None and limit is not None and table.memory(candidate) > limit.bytes:
            why = f"needs {sized(table.memory(candidate))}, and {sized(limit.bytes)} may be taken"
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
        The problem to serve, and what its candidates say to it.
    model : CostModel
        Predictions from the measurements.
    settings : Settings
        Orders of the user.
    there : Limit, optional
        The memory that is there; None means that it is no concern.
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
    feasible = [c for c in op.candidates if c.name not in excluded]
    if not feasible:
        raise _nothing_fits(table, model, settings, there)
    rough = [c for c in op.candidates if excluded.get(c.name, "").startswith(_ROUGH)]
    all_estimates = model.estimate(op, problem, [*feasible, *rough])
    estimates = {name: estimate for name, estimate in all_estimates.items() if name not in excluded or name == "stock"}
    ranked = _ranked(op, problem, feasible, estimates)
    predicted = {name: estimates[name].seconds for name in ranked if name in estimates}
    flops = op.features(problem).flops

    def cost(candidate: Candidate) -> Cost:
        estimate, approximate = all_estimates.get(candidate.name), candidate.accuracy == "approximate"
        return Cost(
            seconds=estimate.seconds if estimate else None,
            flops=flops,
            memory=table.memory(candidate),
            relative_error=model.relative_error(op, candidate.name, problem) if approximate else None,
        )

    costs = {c.name: cost(c) for c in [*(op[name] for name in ranked), *rough]}

    def decision(name: str, reason: str, source: str, review: int = 0) -> Decision:
        estimate = estimates.get(name)
        return Decision(
            problem=problem,
            candidate=name,
            reason=reason,
            source=source,
            predicted=predicted,
            margin=math.exp(-estimate.log_ratio) if estimate else 1.0,
            uncertainty=estimate.sigma if estimate else 0.0,
            excluded=excluded,
            order=(name, *(n for n in ranked if n != name)),
            review=review,
            costs=costs,
        )

    ordered = _ordered(problem, op, settings, excluded, seen)
    if ordered is not None and ordered[0] not in excluded:
        drawn = settings.random_seed is not None and settings.forced(op.name) is None
        return decision(*ordered, "order", max(2, seen + 1) if drawn else 0)
    horizon = seen if settings.calls is None else settings.calls
    known, default = [n for n in ranked if n in estimates], op.default_candidate(problem)
    if "stock" in excluded:
        likely = default if default not in excluded else _frugal(feasible, table).name
        name, review = _repaid(known, op, estimates, model, horizon) if known else (likely, 0)
        why = f"stock does not fit the memory: it {excluded['stock']}"
        source = _source(estimates[name]) if name in estimates else "unmeasured"
        return decision(name, f"{ordered[1]}; {why}" if ordered else why, source, review)
    if len(feasible) == 1:
        return decision("stock", "no other candidate can serve this problem", "only choice")
    another = default not in ("stock", *excluded)
    if not estimates:
        if another:
            return decision(default, "nothing was measured yet, and stock would do far more work", "unmeasured")
        return decision("stock", "nothing was measured for this op, dtype and device", "unmeasured")
    known.remove("stock")
    better = [n for n in known if _cost(op, problem, n, estimates[n]) <= -NOISE]
    doubtful = another and not better  # then stock must be shown to be faster
    if doubtful:
        better = [n for n in known if estimates[n].log_ratio <= -NOISE]
    name, review = _repaid([*better, "stock"], op, estimates, model, horizon)
    if name == "stock":
        reason = "no other candidate beats it by more than is uncertain"
        if review:
            reason = f"what is faster compiles first, which {review} calls would repay"
        return decision("stock", reason, _source(estimates["stock"]), review)
    estimate = estimates[name]
    if doubtful:
        reason = "likely the fastest, and stock, which does far more work, is not known to be faster"
    elif estimate.log_ratio + CONFIDENCE * estimate.sigma > -NOISE:
        reason = "exact where stock approximates, and no slower beyond noise"
    elif op[name].threads and any(other.log_ratio < estimate.log_ratio for other in estimates.values()):
        reason = "as fast as any but for what is uncertain, with fewer threads"
    else:
        reason = "the fastest as measured, by more than is uncertain"
    return decision(name, reason, _source(estimate), review)


def _repaid(
    ranked: list[str], op: Op, estimates: Mapping[str, Estimate], model: CostModel, horizon: int
) -> tuple[str, int]:
    """Return the first name whose set-up time so many calls repay, and the calls after which to look again.

    What is saved is counted against the best that needs no set-up; the last name is taken if nothing else is.
    """
    ready = next((n for n in ranked if not op[n].compiles), ranked[-1])
    review = 0
    for name in ranked:
        if name == ready:
            break
        saving = estimates[ready].seconds - estimates[name].seconds
        setup = model.profile.setup.get(f"{op.name}.{name}", math.inf)
        if saving * horizon > setup:
            return name, 0
        if saving > 0 and math.isfinite(setup):
            calls = int(setup / saving) + 1
            review = min(review or calls, calls)
    return ready, review


def _frugal(candidates: list[Candidate], table: Feasibility) -> Candidate:
    """Return the candidate that takes the least memory, the first of equals; one without set-up time if possible."""
    return min(candidates, key=lambda c: (c.compiles, table.memory(c)))


def _nothing_fits(table: Feasibility, model: CostModel, settings: Settings, there: Limit | None) -> MemoryBudgetError:
    problem, limit = table.problem, least(settings.memory, there)
    assert limit is not None
    others = obstacles(table, model, msgspec.structs.replace(settings, memory=None))
    frugal = _frugal([c for c in table.op.candidates if c.name not in others], table)
    asked = f"{problem} by its most frugal candidate ({frugal.name})"
    ways = ways_out(problem.dtype, bool(problem.d), tiles=problem.op != "kernel_matmul")
    return refusal(asked, table.memory(frugal), limit, ways)


def _cost(op: Op, problem: Problem, name: str, estimate: Estimate) -> float:
    """Return the cautious log ratio to stock's time, less what an exact result may cost where stock approximates."""
    favoured = op[name].accuracy == "better" and op.approximates(problem)
    return estimate.log_ratio + CONFIDENCE * estimate.sigma - (LEEWAY if favoured else 0.0)


def _ranked(op: Op, problem: Problem, feasible: list[Candidate], estimates: Mapping[str, Estimate]) -> list[str]:
    """Names by cautious predicted time, of near ties the fewest threads; stock before all that nothing is known of."""

    def cost(name: str) -> float:
        if name in estimates and name != "stock":
            return _cost(op, problem, name, estimates[name])
        return 0.0 if name == "stock" else math.inf

    ranked = sorted(feasible, key=lambda c: (cost(c.name), c.name != "stock", c.name))
    first = ranked[0]
    if first.name != "stock" and first.name in estimates:
        best = estimates[first.name]

        def near(estimate: Estimate) -> bool:
            return estimate.log_ratio <= best.log_ratio + FEWER_THREADS + math.hypot(estimate.sigma, best.sigma)

        few = [c for c in ranked if c.threads and c.name in estimates and near(estimates[c.name])]
        frugal = min(few, key=lambda c: c.threads, default=first)
        ranked.remove(frugal)
        ranked.insert(0, frugal)
    return [c.name for c in ranked]


def _source(estimate: Estimate) -> str:
    return "measured" if estimate.distance < 0.1 else "interpolated" if estimate.distance < 2.5 else "extrapolated"


def _ordered(
    problem: Problem, op: Op, settings: Settings, excluded: Mapping[str, str], seen: int
) -> tuple[str, str] | None:
    """Return the candidate that the user ordered and the reason to give, if there is such an order."""
    forced = settings.forced(op.name)
    if forced is not None:
        if forced not in op.names():
            raise SettingsError(f"op {op.name} has no candidate {forced!r} to force; it has {', '.join(op.names())}")
        if forced in excluded:
            return "stock", f"{forced} was forced but cannot serve: {excluded[forced]}"
        return forced, "forced by the user"
    if settings.random_seed is not None:
        names = [
            c.name for c in op.candidates if c.name not in excluded and c.accuracy != "approximate" and not c.compiles
        ] or ["stock"]
        return random.Random(f"{settings.random_seed}:{problem}:{seen}").choice(names), "drawn at random"
    size = settings.cpu_up_to(op.name, problem.device)
    if size is None:
        return None
    wanted = "cpu" if problem.n <= size else "native"
    side = f"{problem.n} columns, threshold {size}"
    if wanted in op.names() and wanted not in excluded:
        return wanted, f"ordered by the user ({side})"
    return "stock", f"ordered by the user ({side}), and stock does just this"
