"""Plans of a calibration: the problems of each group, their contenders, the predicted cost, the sizes to refine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autokern.core.op import Candidate, Op
from autokern.core.problem import SIZES, Problem
from autokern.tuning.profile import Profile, Trial, group_key

__all__ = ["Group", "between_winners", "contenders", "expected_seconds", "plan"]

_PRIOR_RATE = 4e9
"""Flops and bytes a second that are assumed before the first measurement: pessimistic."""


@dataclass
class Group:
    """The problems of one op, dtype and device, and their results so far."""

    op: Op
    dtype: str
    device: str
    queue: list[Problem]
    trials: list[Trial] = field(default_factory=list)
    skipped: int = 0
    checked: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def key(self) -> str:
        """Name of the group in a profile."""
        return group_key(self.op.name, self.dtype, self.device)

    def hopeless(self, candidate: Candidate, enough: int) -> bool:
        """Whether a candidate has lost so often and so clearly that the model knows it well enough."""
        ratios = [t.timings[candidate.name].ratio for t in self.trials if candidate.name in t.timings]
        return len(ratios) >= enough and min(ratios) > 1.2


def plan(
    op: Op, level: str, dtype: str, device: str, known: Profile, accuracy: str = "same", near: Problem | None = None
) -> Group:
    """Return the group of an op: problems without a measurement first, of those `near` and what is nearest to it."""
    problems = op.grid(level, dtype, device) if near is None else [near, *op.grid(level, dtype, device)]
    grid = {p: contenders(op, p, level, accuracy) for p in dict.fromkeys(problems)}
    wanted = {p: {c.name for c in found if c.accuracy == "approximate"} for p, found in grid.items() if len(found) > 1}
    done = {t.problem for t in known.trials if wanted.get(t.problem, set()) <= t.timings.keys()}
    place = None if near is None else op.coordinates(near)

    def distance(problem: Problem) -> float:
        return 0.0 if place is None else math.dist(place, op.coordinates(problem))

    queue = sorted(wanted, key=lambda problem: (problem in done, distance(problem)))
    group = Group(op, dtype, device, queue)
    group.trials = [t for t in known.trials if t.problem.group == (op.name, dtype, device) and "stock" in t.timings]
    return group


_MOST_TRUTH = 2**25
"""Elements of a problem up to which its float64 truth is formed to check a candidate that approximates."""


def contenders(op: Op, problem: Problem, level: str, accuracy: str = "same") -> list[Candidate]:
    """Return the candidates that are measured on a problem; those that approximate only if `accuracy` allows them."""
    rough = accuracy == "approximate" and problem.batch * problem.m * problem.n <= _MOST_TRUTH
    usual = [c for c in op.feasible(problem) if level == "full" or not c.compiles]
    return [c for c in usual if rough or c.accuracy != "approximate"]


def expected_seconds(group: Group, problem: Problem) -> float:
    """Return pessimistic seconds of one stock call, scaled up from the nearest trial by flops or bytes."""
    work = group.op.stock.features(problem)
    if not group.trials:
        return 1e-4 + (work.flops + work.bytes) / _PRIOR_RATE
    place = group.op.coordinates(problem)
    nearest = min(
        group.trials,
        key=lambda t: sum((a - b) ** 2 for a, b in zip(place, group.op.coordinates(t.problem), strict=True)),
    )
    known = group.op.stock.features(nearest.problem)
    growth = max(work.flops / max(known.flops, 1.0), work.bytes / max(known.bytes, 1.0), 1.0)
    return nearest.timings["stock"].seconds * growth


_NEAR = 0.2
"""Octaves within which a measured problem needs no neighbour."""


def between_winners(group: Group) -> Problem | None:
    """Return a problem halfway between neighbours whose measured winners differ, the widest gap first."""
    places = [(t, group.op.coordinates(t.problem)) for t in group.trials]
    gaps: list[tuple[float, Problem]] = []
    for index, (one, here) in enumerate(places):
        for other, there in places[index + 1 :]:
            if one.problem.words != other.problem.words or not (_differ(one, other) and _differ(other, one)):
                continue
            distance = math.dist(here, there)
            if 0.4 < distance < 3:
                sizes = {s: round((getattr(one.problem, s) * getattr(other.problem, s)) ** 0.5) for s in SIZES}
                gaps.append((distance, one.problem.replace(**sizes)))

    def settled(middle: Problem) -> bool:
        place = group.op.coordinates(middle)
        return any(t.problem.words == middle.words and math.dist(place, other) < _NEAR for t, other in places)

    widest = sorted(gaps, key=lambda gap: gap[0], reverse=True)
    return next((middle for _, middle in widest if not settled(middle)), None)


def _differ(one: Trial, other: Trial) -> bool:
    """Whether the winner of one trial clearly lost the other; candidates that are always close do not differ."""
    here, there = one.usual, other.usual
    lost = there.get(min(here, key=lambda n: here[n].ratio))
    return lost is not None and lost.ratio > 1.05 * min(t.ratio for t in there.values())
