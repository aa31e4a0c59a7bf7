"""Summaries of a profile as plain data, for tables and JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable

import msgspec

from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.tuning.grade import grades
from autokern.tuning.profile import Ban, Crossover, Profile, Trial, group_key

_TIE = 0.97
"""A ratio above this is no gain: stock wins ties."""
_MOST_NAMED = 3


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one op, device and dtype in short.

    Parameters
    ----------
    op, device, dtype : str
        Their group.
    level : str
        Level of its calibration; empty where the grid is not complete.
    grade : str
        How far they can be trusted, one of `grade.GRADES`.
    problems, disturbed : int
        Number of problems measured, and of those among them that were disturbed by other programs.
    speedup : float
        Geometric mean over them of stock's time over that of the fastest candidate.
    banned : list of str
        Candidates that gave wrong numbers or failed.
    won : dict
        Number of problems on which each candidate is the fastest, most first.
    crossovers : list of Crossover
        Sizes at which the fastest candidate changes, for single matrices without gradients.
    """

    op: str
    device: str
    dtype: str
    level: str
    grade: str
    problems: int
    disturbed: int
    speedup: float
    banned: list[str]
    won: dict[str, int]
    crossovers: list[Crossover]

    @property
    def fastest(self) -> str:
        """The fastest candidates in words, with the number of problems of each if there are several."""
        (first, most), *others = self.won.items()
        if not others:
            return first
        named = [f"{name} ({count})" for name, count in others[:_MOST_NAMED]]
        more = f", {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        return ", ".join([f"{first} ({most} of {self.problems})", *named]) + more


class Winner(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest candidate of one measured problem: its seconds, stock's, and the paired ratio of the two."""

    problem: Problem
    candidate: str
    speedup: float
    seconds: float
    stock_seconds: float


class Rough(msgspec.Struct, frozen=True, kw_only=True):
    """Gain and error of a candidate of lower precision.

    Parameters
    ----------
    op, device, dtype, candidate : str
        The candidate, and the group of its problems.
    problems : int
        Number of problems measured.
    speedup : float
        Geometric mean over them of the time of the fastest candidate within the bound over that of this one.
    relative_error : float
        Largest error measured.
    """

    op: str
    device: str
    dtype: str
    candidate: str
    problems: int
    speedup: float
    relative_error: float


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a profile as `autokern show` prints it."""

    fingerprint: str
    created: str
    ops: list[Summary]
    banned: list[Ban]
    setup: dict[str, float]
    winners: list[Winner] = []
    rough: list[Rough] = []


def present(profile: Profile) -> Profile:
    """Return a profile without ops and candidates that are not registered, as an earlier version had them."""
    there = {(op.name, name) for op in registered() for name in op.names()}
    trials = [
        Trial(t.problem, {name: timing for name, timing in t.timings.items() if (t.problem.op, name) in there})
        for t in profile.trials
    ]
    return msgspec.structs.replace(
        profile,
        trials=[trial for trial in trials if trial.timings],
        banned=[ban for ban in profile.banned if (ban.op, ban.candidate) in there],
        setup={key: seconds for key, seconds in profile.setup.items() if key.partition(".")[::2] in there},
    )


def known(profile: Profile, ops: Iterable[str] | None = None) -> Known:
    """Return a profile in short: some ops problem by problem, or all ops."""
    names = {op.name for op in registered()} if ops is None else set(ops)
    profile = present(profile)
    profile = msgspec.structs.replace(profile, trials=[t for t in profile.trials if t.problem.op in names])
    return Known(
        fingerprint=profile.fingerprint,
        created=profile.created,
        ops=summaries(profile),
        banned=[ban for ban in profile.banned if ban.op in names],
        setup={key: seconds for key, seconds in profile.setup.items() if key.partition(".")[0] in names},
        winners=[] if ops is None else winners(profile),
        rough=rough(profile),
    )


def rough(profile: Profile) -> list[Rough]:
    """Return gains and errors of all candidates of lower precision."""
    found: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for trial in profile.trials:
        p, best = trial.problem, min((t.ratio for t in trial.usual.values()), default=1.0)
        for name, timing in trial.timings.items():
            if timing.relative_error is not None:
                pairs = found.setdefault((p.op, p.device, p.dtype, name), [])
                pairs.append((best / timing.ratio, timing.relative_error))
    return [
        Rough(
            op=op,
            device=device,
            dtype=dtype,
            candidate=name,
            problems=len(pairs),
            speedup=statistics.geometric_mean(gain for gain, _ in pairs),
            relative_error=max(error for _, error in pairs),
        )
        for (op, device, dtype, name), pairs in sorted(found.items())
    ]


def summaries(profile: Profile) -> list[Summary]:
    """Return a summary of each op, device and dtype that was measured."""
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in profile.trials:
        groups.setdefault((trial.problem.op, trial.problem.device, trial.problem.dtype), []).append(trial)
    found, graded = [], grades(profile)
    for (op, device, dtype), trials in sorted(groups.items()):
        key = group_key(op, dtype, device)
        best = [_winner(trial) for trial in trials]
        line = Summary(
            op=op,
            device=device,
            dtype=dtype,
            level=profile.levels.get(key, ""),
            grade=graded[key].grade,
            problems=len(trials),
            disturbed=graded[key].disturbed,
            speedup=statistics.geometric_mean(winner.speedup for winner in best),
            banned=sorted({b.candidate for b in profile.banned if (b.op, b.device, b.dtype) == (op, device, dtype)}),
            won=dict(Counter(sorted(winner.candidate for winner in best)).most_common()),
            crossovers=profile.thresholds(op, device, dtype),
        )
        found.append(line)
    return found


def winners(profile: Profile) -> list[Winner]:
    """Return the fastest candidate of every measured problem, like beside like, by size."""

    def place(winner: Winner) -> tuple[object, ...]:
        p = winner.problem
        return (p.op, p.device, p.dtype, p.grad, p.batch > 1, p.variant, p.n, p.m, p.rhs, p.d, p.batch)

    return sorted(map(_winner, profile.trials), key=place)


def _winner(trial: Trial) -> Winner:
    timings = trial.usual
    name = min(timings, key=lambda n: timings[n].ratio)
    if timings[name].ratio > _TIE and "stock" in timings:
        name = "stock"
    best = timings[name]
    stock = timings["stock"].seconds if "stock" in timings else best.seconds / best.ratio
    times = {"speedup": 1 / best.ratio, "seconds": best.seconds, "stock_seconds": stock}
    return Winner(problem=trial.problem, candidate=name, **times)
