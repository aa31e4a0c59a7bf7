"""Summaries of a profile as plain data, for tables, pages and JSON."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from autokern.core.op import Op
from autokern.core.problem import Feasibility, Problem
from autokern.core.registry import registered
from autokern.core.settings import Settings
from autokern.system import host
from autokern.tuning.chooser import Chooser
from autokern.tuning.policy import decide
from autokern.tuning.profile import Ban, Examined, Profile, Trial, group_key, key_of

_TIE = 0.97  # a ratio above this is no gain: stock wins ties
_MOST_NAMED = 3
_MOST_KINDS = 24  # most kinds of problems of an op whose thresholds are shown, by number of trials
_LEAST_TRIALS = 3  # fewest trials of a kind that is shown


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the measurements of one op, device and dtype."""

    op: str
    device: str
    dtype: str
    level: str  # of its calibration; empty if too little was measured
    problems: int
    disturbed: int
    speedup: float  # geometric mean over the problems of stock's time over the fastest candidate's
    banned: list[str]
    won: dict[str, int]  # number of problems on which each candidate is the fastest, largest first

    @property
    def fastest(self) -> str:
        """The fastest candidates in words; if there are several, with the number of problems of each."""
        (first, most), *others = self.won.items()
        named = [f"{first} ({most} of {self.problems})", *(f"{name} ({count})" for name, count in others[:_MOST_NAMED])]
        more = [f"{len(others) - _MOST_NAMED} more"] if len(others) > _MOST_NAMED else []
        return ", ".join(named + more) if others else first


class Winner(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest candidate of one measured problem."""

    problem: Problem
    candidate: str
    speedup: float  # paired ratio of stock's time to this candidate's
    seconds: float
    stock_seconds: float


class Line(msgspec.Struct, frozen=True):
    """The choices for one kind of problem."""

    problem: Problem  # m grows with n; all other sizes are the medians of the measured problems
    steps: list[tuple[int, str]]  # each largest n with its candidate, up to the largest n measured

    def __str__(self) -> str:
        *steps, (_, last) = self.steps
        if not steps:
            return f"{last} throughout"
        return "; ".join([*(f"n ≤ {size}: {name}" for size, name in steps), f"above: {last}"])


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a profile as `autokern show` prints it."""

    fingerprint: str
    created: str
    ops: list[Summary]
    banned: list[Ban]
    setup: dict[str, float]
    winners: list[Winner] = []
    exam: list[Examined] = []
    thresholds: list[Line] = []


def present(profile: Profile, ops: Collection[str] | None = None) -> Profile:
    """Return a profile without unregistered ops and candidates, which an earlier version may have measured."""
    there = {(op.name, name) for op in registered() if ops is None or op.name in ops for name in op.names()}
    trials = [
        Trial(t.problem, {name: timing for name, timing in t.timings.items() if (t.problem.op, name) in there})
        for t in profile.trials
    ]
    banned = [ban for ban in profile.banned if (ban.op, ban.candidate) in there]
    setup = {key: seconds for key, seconds in profile.setup.items() if key.partition(".")[::2] in there}
    return msgspec.structs.replace(profile, trials=[t for t in trials if t.timings], banned=banned, setup=setup)


def known(profile: Profile, ops: Collection[str] | None = None) -> Known:
    """Summarise a profile: all ops, or these ops with the winner of every problem."""
    profile = present(profile, ops)
    best = winners(profile)
    return Known(
        fingerprint=profile.fingerprint, created=profile.created, ops=summaries(profile, best), banned=profile.banned,
        setup=profile.setup, winners=[] if ops is None else best,
        exam=profile.exam if ops is None else [],
    )  # fmt: skip


def summaries(profile: Profile, best: Sequence[Winner]) -> list[Summary]:
    """Return a summary of each measured op, device and dtype, from the winners of its problems."""
    disturbed = Counter(trial.problem.group for trial in profile.trials if trial.disturbed)
    groups = itertools.groupby(best, lambda winner: winner.problem.group)
    return [
        Summary(
            op=op, device=device, dtype=dtype, level=profile.levels.get(group_key(*group), ""), problems=len(of),
            disturbed=disturbed[group], speedup=statistics.geometric_mean(winner.speedup for winner in of),
            banned=sorted({b.candidate for b in profile.banned if (b.op, b.dtype, b.device) == group}),
            won=dict(Counter(sorted(winner.candidate for winner in of)).most_common()),
        )
        for group, (op, dtype, device), of in ((group, group, list(winning)) for group, winning in groups)
    ]  # fmt: skip


def winners(profile: Profile) -> list[Winner]:
    """Return the fastest candidate of every measured problem, sorted by kind of problem, then by size."""

    def place(p: Problem) -> tuple[object, ...]:
        return (p.op, p.device, p.dtype, p.grad, p.batch > 1, p.variant, p.n, p.m, p.rhs, p.d, p.batch)

    found = []
    for trial in sorted(profile.trials, key=lambda trial: place(trial.problem)):
        timings = trial.usual
        name, best = min(timings.items(), key=lambda item: item[1].ratio)
        if best.ratio > _TIE and "stock" in timings:
            name, best = "stock", timings["stock"]
        stock = timings["stock"].seconds if "stock" in timings else best.seconds / best.ratio
        times = {"speedup": 1 / best.ratio, "seconds": best.seconds, "stock_seconds": stock}
        found.append(Winner(problem=trial.problem, candidate=name, **times))
    return found


def thresholds(op: Op, chooser: Chooser, settings: Settings) -> list[Line]:
    """Return the choices by number of columns for the kinds of problems that this machine measured most."""
    kinds: dict[tuple[str, str, str, str, bool, bool], list[Problem]] = {}
    for trial in chooser.profile.trials:
        p = trial.problem
        if p.op == op.name and p.device in host.current().devices and "stock" in trial.timings:
            kinds.setdefault((p.device, p.dtype, p.variant, p.grad, p.batch > 1, p.m == p.n), []).append(p)
    often = sorted(kinds, key=lambda kind: len(kinds[kind]), reverse=True)[:_MOST_KINDS]
    lines = []
    for problems in (kinds[kind] for kind in sorted(often) if len(kinds[kind]) >= _LEAST_TRIALS):
        first, ratio = problems[0], statistics.median(p.m / p.n for p in problems)
        usual = {size: int(statistics.median_low(getattr(p, size) for p in problems)) for size in ("d", "rhs", "batch")}
        base, low, high = first.replace(**usual), min(p.n for p in problems), max(p.n for p in problems)
        forest = chooser.profile.forests.get(key_of(first))
        splits = {n for size in (forest.sizes if forest else ()) for n in (size, size + 1) if low < n < high}
        steps: list[tuple[int, str]] = []
        for n in sorted({low, high, *splits}):
            problem = base.replace(n=n, m=n if first.m == first.n else max(1, round(ratio * n)))
            name = decide(Feasibility(op, problem), chooser, settings).candidate
            if steps and steps[-1][1] == name:
                steps.pop()
            steps.append((n, name))
        lines.append(Line(base, steps))
    return lines
