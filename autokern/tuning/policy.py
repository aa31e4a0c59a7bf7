"""Policy: the candidate that serves a problem. Pure: everything it needs comes in as arguments.

Order of precedence: the user's orders; then the candidate predicted to be fastest among those that can run, if it beats
stock by more than the uncertainty; else stock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from autokern.core.candidate import UNKNOWN, WITHIN
from autokern.core.decision import Cost, Decision
from autokern.core.errors import MemoryBudgetError, SettingsError
from autokern.core.feasibility import Feasibility
from autokern.core.op import ACCURACIES, Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.core.units import sized
from autokern.system.memory_limit import Limit, least, refusal, ways_out
from autokern.tuning.chooser import Chooser
from autokern.tuning.forest import Estimate

__all__ = ["CONFIDENCE", "NOISE", "decide", "described"]

NOISE = 0.05  # a predicted gain below this, in log units, is no gain
CONFIDENCE = 0.3  # standard deviations that must lie between a prediction and a tie
LEEWAY = 0.13  # extra cost allowed for an exact result where stock approximates, in log units
# Extra cost allowed for fewer threads beyond the uncertainty, in log units: beside another process every parallel
# region waits for a core, and a step takes ten times as long.
FEWER_THREADS = 0.05
_LITTLE = 10.0  # how much less work than stock a default candidate must do to run unmeasured where others are measured
_ROUGH = "its error was measured to be"

Estimates = Mapping[str, Estimate]


class _Choice(NamedTuple):
    """The name of the choice, the reason, the source of the knowledge, and the calls until a review."""

    name: str
    reason: str
    source: str
    review: int = 0


def decide(
    table: Feasibility, chooser: Chooser, settings: Settings, there: Limit | None = None, seen: int = 0,
    products: int = 0,
) -> Decision:  # fmt: skip
    """Choose a candidate under the available memory; the same arguments give the same decision, without costs.

    Unless the user has declared how many calls there will be, as many as were seen are expected to come: that costs at
    most twice the best choice (the ski rental of online algorithms). `products` are those that stock's conjugate
    gradients took on the user's system; 0 where they were not counted.
    """
    op, problem = table.op, table.problem
    excluded = _excluded(table, chooser, settings, there)
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
        remark=_remark(op, problem, op[name], usable, products),
    )


def described(decision: Decision, chooser: Chooser, settings: Settings, products: int = 0) -> Decision:
    """Return a decision with the costs of the candidates; seconds follow from the nearest trial, which is named."""
    op, problem = get(decision.problem.op), decision.problem
    table = Feasibility(op, problem)
    estimates, near = _estimates(table, chooser, settings, products), chooser.nearest(op, problem)
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

    rough = [name for name, why in decision.excluded.items() if why.startswith(_ROUGH)]
    names = dict.fromkeys([decision.candidate, *decision.order, *rough])
    times, told = {name: found for name in decision.order if (found := seconds(name)) is not None}, ""
    if near is not None and times:
        told = f"times follow from {near.trial.problem}, measured on {'this' if near.here else 'another'} machine"
        told += f", {near.octaves:.1f} octaves away" * (near.octaves > 0.05)
    costs = {name: cost(op[name]) for name in names}
    return msgspec.structs.replace(decision, predicted=times, costs=costs, nearest=told)


def _excluded(table: Feasibility, chooser: Chooser, settings: Settings, there: Limit | None = None) -> dict[str, str]:
    """Return the reasons why candidates cannot serve a problem, by name; stock is refused for want of memory only.

    Where a recorded host is replayed, the candidates are available that were measured there.
    """
    op, problem, limit = table.op, table.problem, least(settings.memory, there)
    accuracies = ACCURACIES if settings.accuracy == "approximate" else ACCURACIES[:2]
    bans = {b.candidate: b.reason for b in chooser.profile.banned if (b.op, b.dtype, b.device) == problem.group}

    def reason(candidate: Candidate) -> str | None:
        name, need = candidate.name, table.memory[candidate.name] if limit is not None else 0
        if candidate is not op.stock:
            if (why := table.why_not(candidate)) is not None:
                return why
            if settings.excludes(op.name, name):
                return "excluded by the user"
            if candidate.accuracy not in accuracies:
                return f"its accuracy is {candidate.accuracy}, which is not allowed"
            if candidate.accuracy == "approximate" and settings.forced(op.name) != name:
                error, most = chooser.relative_error(op, name, problem), settings.max_error
                if error is None:
                    return "its error was not measured on this machine: autokern calibrate --accuracy approximate"
                if error > most:
                    return f"{_ROUGH} {error:.0e}, and at most {most:.0e} is allowed"
            if name in bans:
                return f"banned on this host: {bans[name]}"
            if table.recorded and not chooser.measured(name, problem):
                return "it was not measured on the recorded host"
        if limit is not None and need > limit.bytes:
            return f"needs {sized(need)}, and {sized(limit.bytes)} may be taken"
        return None

    return {c.name: why for c in table.candidates if (why := reason(c)) is not None}


def _estimates(table: Feasibility, chooser: Chooser, settings: Settings, products: int) -> dict[str, Estimate]:
    """Return the estimates for systems as users have them: the time of iterative solvers depends on the numbers.

    Estimates of candidates that are not measured by themselves follow from the others.
    """
    op, problem = table.op, table.problem
    if settings.deterministic and settings.profile is None:
        return {}
    names = {c.name for c in table.candidates if not c.tight}
    found = {name: estimate for name, estimate in chooser.estimates(problem).items() if name in names}
    derived = [c for c in op.listed if c.derived is not None and c.why_not(problem) is None] if found else []
    near = chooser.nearest(op, problem) if derived else None
    if near is not None:
        times = {name: near.seconds * math.exp(estimate.log_ratio) for name, estimate in found.items()}
        own = {c.name: c.derived(problem, times) for c in derived if c.derived is not None}
        ratios = {name: math.log(seconds / near.seconds) for name, seconds in own.items() if seconds is not None}
        found |= {name: found["stock"]._replace(log_ratio=ratio) for name, ratio in ratios.items()}
    harder = {name: math.log(op.harder(problem, op[name], products)) for name in found}
    return {n: e._replace(log_ratio=e.log_ratio + harder[n] - harder["stock"]) for n, e in found.items()}


def _choice(
    table: Feasibility, chooser: Chooser, settings: Settings, seen: int, excluded: Mapping[str, str],
    ranked: list[Candidate], estimates: Estimates,
) -> _Choice:  # fmt: skip
    op, stock, problem = table.op, table.op.stock, table.problem
    frozen = settings.deterministic and settings.profile is None
    default = "stock" if frozen else op.default_candidate(problem)
    order = _ordered(table, settings, excluded, seen)
    if order is not None and order.name not in excluded:
        return order
    horizon = seen if settings.calls is None else settings.calls
    known = [c for c in ranked if c.name in estimates]
    another, loose = default not in ("stock", *excluded), op.approximates(problem)
    unheard = default not in estimates and (loose or not chooser.knows(problem))
    if another and default not in estimates:
        work, of_stock = op[default].features(problem), stock.features(problem)
        if _LITTLE * (work.flops + work.bytes) <= of_stock.flops + of_stock.bytes:
            return _Choice(default, "not measured, and stock would do far more work", "unmeasured")
    if "stock" in excluded:
        chosen, review = op[default] if default not in excluded else _frugal(table, excluded), 0
        if known and (default in excluded or not unheard):
            chosen, review = _repaid(known, table, estimates, chooser, horizon)
        why = f"stock does not fit the memory: it {excluded['stock']}"
        source = estimates[chosen.name].source if chosen.name in estimates else "unmeasured"
        return _Choice(chosen.name, f"{order.reason}; {why}" if order else why, source, review)
    if len(ranked) == 1:
        return _Choice("stock", "no other candidate can serve this problem", "only choice")
    if frozen:
        return _Choice("stock", "AUTOKERN_DETERMINISTIC=1, and no profile is pinned", "order")
    if another and (unheard or not estimates):
        why = "stock only approximates" if loose else "stock would do far more work"
        return _Choice(default, f"not measured here or elsewhere, and {why}", "unmeasured")
    if not estimates:
        return _Choice("stock", "no such problem is measured for this op, dtype and device", "unmeasured")
    if chooser.instead(problem) == "stock" and not loose:  # the exam compares times
        return _Choice("stock", "the calibration's exam found stock faster at these sizes", "measured")
    known.remove(stock)
    better = [
        c for c in known if _is_preferred(op, problem, c, estimates) or _cost(op, problem, c, estimates) <= -NOISE
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
    elif _is_preferred(op, problem, chosen, estimates):
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


def _ordered(table: Feasibility, settings: Settings, excluded: Mapping[str, str], seen: int) -> _Choice | None:
    """Return the candidate that the user asks for by force, by chance or by a threshold, if there is such an order."""
    op, problem, forced = table.op, table.problem, settings.forced(table.op.name)
    if forced is not None:
        if forced not in op.names():
            raise SettingsError(f"op {op.name} has no candidate {forced!r} to force; it has {', '.join(op.names())}")
        if forced in excluded:
            return _Choice("stock", f"{forced} was forced but cannot serve: {excluded[forced]}", "order")
        return _Choice(forced, "forced by the user", "order")
    if settings.random_seed is not None:  # each call is drawn anew
        able = [c for c in table.candidates if c.name not in excluded and c.accuracy != "approximate"]
        names = [c.name for c in able if not c.compiles] or ["stock"]
        name = random.Random(f"{settings.random_seed}:{problem}:{seen}").choice(names)
        return _Choice(name, "drawn at random", "order", max(2, seen + 1))
    size = settings.cpu_up_to(op.name, problem.device)
    if size is None:
        return None
    wanted, side = "cpu" if problem.n <= size else "native", f"{problem.n} columns, threshold {size}"
    if wanted in op.names() and wanted not in excluded:
        return _Choice(wanted, f"ordered by the user ({side})", "order")
    return _Choice("stock", f"ordered by the user ({side}), which is what stock does", "order")


def _repaid(
    ranked: list[Candidate], table: Feasibility, estimates: Estimates, chooser: Chooser, horizon: int
) -> tuple[Candidate, int]:
    """Return the first candidate whose set-up time so many calls repay, and the calls after which to decide again.

    Savings count against the best candidate without set-up time; the last one is taken if no other is.
    """
    ready, review = next((c for c in ranked if not c.compiles), ranked[-1]), 0
    faster = ranked[: ranked.index(ready)]
    near = chooser.nearest(table.op, table.problem) if faster else None
    for candidate in faster:
        gain = math.exp(estimates[ready.name].log_ratio) - math.exp(estimates[candidate.name].log_ratio)
        saving = 0.0 if near is None else near.seconds * gain
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
    frugal = _frugal(table, _excluded(table, chooser, msgspec.structs.replace(settings, memory=None)))
    asked = f"{problem} by its most frugal candidate ({frugal.name})"
    ways = ways_out(problem.dtype, bool(problem.d), tiles=problem.op != "kernel_matmul")
    return refusal(asked, table.memory[frugal.name], limit, ways)


def _is_preferred(op: Op, problem: Problem, candidate: Candidate, estimates: Estimates) -> bool:
    """Whether a candidate is exact, and expected to take no longer than it may where stock's answer is loose."""
    found = estimates.get(candidate.name)
    if found is None or candidate.accuracy != "better" or candidate.as_stock or not op.approximates(problem):
        return False
    most = op.may_cost(problem)
    return most > 1.0 and found.log_ratio <= math.log(most)


def _cost(op: Op, problem: Problem, candidate: Candidate, estimates: Estimates) -> float:
    """Return the cautious log ratio to stock's time, less what an exact result may cost where stock approximates."""
    if candidate is op.stock:
        return 0.0
    estimate = estimates.get(candidate.name)
    favoured = candidate.accuracy == "better" and op.approximates(problem)
    return math.inf if estimate is None else estimate.log_ratio + CONFIDENCE * estimate.sigma - LEEWAY * favoured


def _ranked(op: Op, problem: Problem, feasible: list[Candidate], estimates: Estimates) -> list[Candidate]:
    """Candidates by cautious predicted time, preferred exact ones first, of near ties the fewest threads.

    Stock comes before those that are not measured.
    """

    def rank(candidate: Candidate) -> tuple[bool, float, bool, str]:
        first = _is_preferred(op, problem, candidate, estimates)
        return not first, _cost(op, problem, candidate, estimates), candidate is not op.stock, candidate.name

    ranked = sorted(feasible, key=rank)
    first = ranked[0]
    if first is not op.stock and first.name in estimates:
        most = estimates[first.name].log_ratio + FEWER_THREADS
        few = [c for c in ranked if c.threads and c.name in estimates and estimates[c.name].log_ratio <= most]
        frugal = min(few, key=lambda c: c.threads, default=first)
        ranked.remove(frugal)
        ranked.insert(0, frugal)
    return ranked


def _remark(op: Op, problem: Problem, chosen: Candidate, estimates: Estimates, products: int) -> str:
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
