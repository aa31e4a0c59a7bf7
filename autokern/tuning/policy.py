"""Policy: choose the candidate that serves a problem, as a pure function of its arguments.

Order of precedence: the user's orders; the fastest feasible candidate, if faster than stock by more than the
uncertainty; stock.
"""

from __future__ import annotations

import math
import random

import msgspec

from autokern.core.decision import Cost, Decision
from autokern.core.op import ACCURACIES, Candidate
from autokern.core.output import sized
from autokern.core.problem import UNKNOWN, WITHIN, Feasibility
from autokern.core.registry import get
from autokern.core.settings import Settings
from autokern.system.memory import Limit, least, refusal
from autokern.tuning.chooser import Chooser, expected
from autokern.tuning.forest import CONFIDENCE, NOISE, Estimate
from autokern.tuning.store import leaves_aside

LEEWAY = 0.13  # extra cost allowed for an exact result where stock approximates, in log units
FEWER_THREADS = 0.05  # the same for one thread: beside another process every parallel region waits for a core
_ROUGH = "its error was measured to be"


def decide(
    table: Feasibility, chooser: Chooser, settings: Settings, there: Limit | None = None, seen: int = 0
) -> Decision:
    """Choose a candidate within the memory limit; the same arguments give the same decision, without costs."""
    case = _Case(table, chooser, settings, least(settings.memory, there), seen)
    if not case.ranked:
        problem, frugal = case.problem, case.frugal(case.able)
        assert case.limit is not None
        asked, tiles = f"{problem} by its most frugal candidate ({frugal.name})", problem.op != "kernel_matmul"
        need = table.memory[frugal.name]
        raise refusal(asked, need, case.limit, problem.device, problem.dtype, bool(problem.d), tiles)
    return case.choice()


def described(decision: Decision, chooser: Chooser, settings: Settings) -> Decision:
    """Return a decision with the candidates' costs; seconds are scaled from the nearest trial, which is named."""
    op, problem = get(decision.problem.op), decision.problem
    table = Feasibility(op, problem)
    estimates, near = expected(table, chooser, settings), chooser.nearest(op, problem)
    flops = op.features(problem).flops
    rough = [name for name, why in decision.excluded.items() if why.startswith(_ROUGH)]
    costs = dict[str, Cost]()
    for name in dict.fromkeys([*decision.order, *rough]):
        candidate, found = op[name], estimates.get(name)
        approximate = candidate.accuracy == "approximate"
        error = op.expected_error(problem, candidate) or (UNKNOWN if approximate else WITHIN)
        costs[name] = Cost(
            seconds=near.seconds * math.exp(found.log_ratio) if found and near else None,
            flops=flops,
            memory=table.memory[name],
            relative_error=chooser.relative_error(op, name, problem) if approximate else None,
            uncertainty=found.sigma if found else 0.0,
            error=error.word,
            meaning=error.words,
        )
    times, told = {name: s for name in decision.order if (s := costs[name].seconds) is not None}, ""
    if near and times:
        told = f"times follow from {near.trial.problem}, measured on {'this' if near.here else 'another'} machine"
        told += f", {near.octaves:.1f} octaves away" * (near.octaves > 0.05)
    return msgspec.structs.replace(decision, predicted=times, costs=costs, nearest=told)


class _Case:
    """One problem and everything that determines its decision."""

    def __init__(
        self, table: Feasibility, chooser: Chooser, settings: Settings, limit: Limit | None, seen: int
    ) -> None:
        self.table, self.op, self.problem, self.chooser = table, table.op, table.problem, chooser
        self.settings, self.limit, self.seen = settings, limit, seen
        self.able, self.excluded = list[Candidate](), dict[str, str]()  # the able may exceed the memory limit
        for c in table.candidates:
            why = None if c is self.op.stock else self._why_not(c)
            if why is None:
                self.able.append(c)
                if limit is not None and (need := table.memory[c.name]) > limit.bytes:
                    why = f"needs {sized(need)}, and {sized(limit.bytes)} may be taken"
            if why is not None:
                self.excluded[c.name] = why
        found = expected(table, chooser, settings)
        self.estimates = {n: e for n, e in found.items() if n == "stock" or n not in self.excluded}
        self.loose = self.op.approximates(self.problem)
        self.may_cost = self.op.may_cost(self.problem) if self.loose else 1.0
        feasible, stock = [c for c in self.able if c.name not in self.excluded], self.op.stock
        self.ranked = sorted(feasible, key=lambda c: (not self._preferred(c), self._cost(c), c is not stock, c.name))

    def _why_not(self, candidate: Candidate) -> str | None:
        """Return why a candidate other than stock cannot serve, apart from memory, or None."""
        op, name, problem, settings, chooser = self.op, candidate.name, self.problem, self.settings, self.chooser
        approximate = settings.accuracy == "approximate"
        if (why := self.table.why_not(candidate)) is not None:
            return why
        if not {name, f"{op.name}={name}"}.isdisjoint(settings.exclude):
            return "excluded by the user"
        if candidate.accuracy not in (ACCURACIES if approximate else ACCURACIES[:2]):
            return f"its accuracy is {candidate.accuracy}, which is not allowed"
        if candidate.accuracy == "approximate" and settings.forced(op.name) != name:
            error = chooser.relative_error(op, name, problem)
            if error is None:
                return "its error was not measured on this machine: autokern calibrate --accuracy approximate"
            if error > settings.max_error:
                return f"{_ROUGH} {error:.0e}, and at most {settings.max_error:.0e} is allowed"
        bans = {(ban.op, ban.dtype, ban.device, ban.candidate): ban.reason for ban in reversed(chooser.profile.banned)}
        reason = bans.get((*problem.group, name))
        return None if reason is None else f"banned on this host: {reason}"

    def _preferred(self, candidate: Candidate) -> bool:
        """Whether a candidate is exact where stock approximates, in at most `may_cost` times stock's time."""
        found = self.estimates.get(candidate.name)
        exact = candidate.accuracy == "better" and not candidate.as_stock
        return found is not None and exact and self.may_cost > 1.0 and found.log_ratio <= math.log(self.may_cost)

    def _cost(self, candidate: Candidate) -> float:
        """Return the cautious log ratio to stock's time, less the leeway of an exact result and of one thread."""
        if candidate is self.op.stock:
            return 0.0
        found, favoured = self.estimates.get(candidate.name), candidate.accuracy == "better" and self.loose
        leeway = LEEWAY * favoured + FEWER_THREADS * (candidate.threads == 1 and self.problem.device == "cpu")
        return math.inf if found is None else found.log_ratio + CONFIDENCE * found.sigma - leeway

    def _decision(self, name: str, reason: str, source: str = "unmeasured", review: int = 0) -> Decision:
        estimate = self.estimates.get(name, Estimate(0.0, 0.0, source))
        order, remark = tuple(dict.fromkeys([name, *(c.name for c in self.ranked)])), self._remark(self.op[name])
        return Decision(
            problem=self.problem, candidate=name, reason=reason, source=source, margin=math.exp(-estimate.log_ratio),
            uncertainty=estimate.sigma, excluded=self.excluded, order=order, review=review, remark=remark,
        )  # fmt: skip

    def choice(self) -> Decision:
        """Return the decision for the chosen candidate."""
        op, stock, problem, estimates, excluded = self.op, self.op.stock, self.problem, self.estimates, self.excluded
        frozen, order = leaves_aside(self.settings), self._ordered()
        if order is not None and order.candidate not in excluded:
            return order
        default = "stock" if frozen else op.default_candidate(problem)
        known = [c for c in self.ranked if c.name in estimates]
        another = default not in ("stock", *excluded)
        if another and default not in estimates:
            why = "stock only approximates" if self.loose else "stock would do far more work"
            return self._decision(default, f"not measured here or elsewhere, and {why}")
        if "stock" in excluded:
            chosen, review = self._repaid(known) if known else (self.frugal(self.ranked), 0)
            why = f"stock does not fit the memory: it {excluded['stock']}"
            source = estimates[chosen.name].source if chosen.name in estimates else "unmeasured"
            return self._decision(chosen.name, f"{order.reason}; {why}" if order else why, source, review)
        if len(self.ranked) == 1:
            return self._decision("stock", "no other candidate can serve this problem", "only choice")
        if frozen:
            return self._decision("stock", "AUTOKERN_DETERMINISTIC=1, and no profile is pinned", "order")
        if not estimates:
            return self._decision("stock", "no such problem is measured for this op, dtype and device")
        if self.chooser.instead(problem) == "stock" and not self.loose:  # the exam compares times
            return self._decision("stock", "the calibration's exam found stock faster at these sizes", "measured")
        known.remove(stock)
        better = [c for c in known if self._preferred(c) or self._cost(c) <= -NOISE]
        doubtful = another and not better  # the default is not stock: stock must be shown to be faster
        if doubtful:
            doubt = CONFIDENCE * estimates[default].sigma
            better = [c for c in known if estimates[c.name].log_ratio - doubt * (c.name == default) <= -NOISE]
        chosen, review = self._repaid([*better, stock])
        reason = self._reason(chosen, review, doubtful)
        return self._decision(chosen.name, reason, estimates[chosen.name].source, review)

    def _reason(self, chosen: Candidate, review: int, doubtful: bool) -> str:
        """Return in words why a measured candidate is chosen."""
        estimate = self.estimates[chosen.name]
        if chosen is self.op.stock:
            later = f"a faster candidate compiles first, which {review} calls would repay"
            return later if review else "no other candidate is faster by more than the uncertainty"
        if doubtful:
            return "likely the fastest: stock does far more work and is not known to be faster"
        if self._preferred(chosen):
            most = f"{self.may_cost:.2g} times its time on a sample"
            return f"exact where stock's gradients are loose, in no more than {most}"
        if self.loose and estimate.log_ratio + CONFIDENCE * estimate.sigma > -NOISE:
            return "exact where stock approximates, and no slower by more than the noise"
        near, favoured = estimate.log_ratio + FEWER_THREADS, chosen.threads == 1 and self.problem.device == "cpu"
        if favoured and any(e.log_ratio < near for name, e in self.estimates.items() if name != chosen.name):
            return "as fast as any within the uncertainty, with fewer threads"
        where = " by what other hosts measured" if estimate.source == "other hosts" else ""
        return f"predicted to be the fastest{where}, by more than the uncertainty"

    def _ordered(self) -> Decision | None:
        """Return the decision by the user's order (force or random seed), or None without an order."""
        op, settings = self.op, self.settings
        forced = settings.forced(op.name)
        if forced in self.excluded:
            return self._decision("stock", f"{forced} was forced but cannot serve: {self.excluded[forced]}", "order")
        if forced is not None:
            return self._decision(forced, "forced by the user", "order")
        if settings.random_seed is not None:  # each call is drawn anew
            able = [c for c in self.table.candidates if c.name not in self.excluded and c.accuracy != "approximate"]
            names = [c.name for c in able if not c.compiles] or ["stock"]
            name = random.Random(f"{settings.random_seed}:{self.problem}:{self.seen}").choice(names)
            return self._decision(name, "drawn at random", "order", max(2, self.seen + 1))
        return None

    def _repaid(self, ranked: list[Candidate]) -> tuple[Candidate, int]:
        """Return the first candidate whose compilation the calls repay, and the calls after which to decide again."""
        # as many calls as were seen, unless declared: at most twice the best choice's cost (the ski-rental problem)
        ready, review = next((c for c in ranked if not c.compiles), ranked[-1]), 0
        faster = ranked[: ranked.index(ready)]
        near, horizon = self.chooser.nearest(self.op, self.problem) if faster else None, self.settings.calls
        seconds = 0.0 if near is None else near.seconds
        for c in faster:
            gain = math.exp(self.estimates[ready.name].log_ratio) - math.exp(self.estimates[c.name].log_ratio)
            saving = seconds * gain
            setup = self.chooser.profile.setup.get(f"{self.op.name}.{c.name}", math.inf)
            if saving * (self.seen if horizon is None else horizon) > setup:
                return c, 0
            if saving > 0 and math.isfinite(setup / saving):
                calls = int(setup / saving) + 1
                review = min(review or calls, calls)
        return ready, review

    def frugal(self, candidates: list[Candidate]) -> Candidate:
        """Return the candidate with the least memory, if possible one that does not compile."""
        there = [c for c in self.table.candidates if c in candidates]
        return min(there, key=lambda c: (c.compiles, self.table.memory[c.name]))

    def _remark(self, chosen: Candidate) -> str:
        """Return how accurate stock's answer is where it approximates, and the cost of an exact one if not chosen."""
        error, estimates = self.op.expected_error(self.problem, self.op.stock), self.estimates
        worth = self.op.remark(self.problem) if error is None else error.words
        exact = [n for n in estimates if self.op[n].accuracy == "better"]
        if not worth or not chosen.loose or chosen.name not in estimates or not exact:
            return worth
        best = min(exact, key=lambda n: estimates[n].log_ratio)
        times = math.exp(estimates[best].log_ratio - estimates[chosen.name].log_ratio)
        return f"{worth}; {best} would be exact, in {times:.2g} times its time"
