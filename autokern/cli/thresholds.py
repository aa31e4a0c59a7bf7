"""Thresholds for people to read: sizes at which the measured winner changes, and the choices of the trees by size."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from autokern.core.op import Feasibility, Op
from autokern.core.problem import Problem
from autokern.core.settings import Settings
from autokern.tuning.chooser import Chooser
from autokern.tuning.policy import decide
from autokern.tuning.profile import Crossover, Profile, Trial, key_of

_TIE = 0.05  # log ratio within which stock wins, or the winner at the size below
_MOST = 24  # kinds of problems of an op that are shown, those with the most trials
_LEAST = 3  # trials of a kind below which nothing is shown of it


class Line(msgspec.Struct, frozen=True):
    """The choices for one kind of problem: pairs of the largest n and the candidate that serves up to it, in order.

    Every other size of the kind but m, which goes with n, is its usual one; the last n is the largest measured.
    """

    problem: Problem
    steps: list[tuple[int, str]]

    def __str__(self) -> str:
        *steps, (_, last) = self.steps
        if not steps:
            return f"{last} throughout"
        return "; ".join([*(f"n ≤ {size}: {name}" for size, name in steps), f"above: {last}"])


def lines(op: Op, chooser: Chooser, settings: Settings, device: str = "cpu") -> list[Line]:
    """Return the choices for the kinds of problems that this machine measured most, each by its number of columns."""
    kinds: dict[tuple[object, ...], list[Problem]] = {}
    for trial in chooser.profile.trials:
        p = trial.problem
        if (p.op, p.device) == (op.name, device) and "stock" in trial.timings:
            kinds.setdefault((p.dtype, p.variant, p.grad, p.batch > 1, p.m == p.n), []).append(p)
    often = sorted((found for found in kinds.values() if len(found) >= _LEAST), key=len, reverse=True)[:_MOST]
    found = [_line(op, chooser, settings, problems) for problems in often]
    return sorted(found, key=lambda line: (line.problem.dtype, line.problem.variant, line.problem.grad))


def _line(op: Op, chooser: Chooser, settings: Settings, problems: Sequence[Problem]) -> Line:
    first, ratio = problems[0], statistics.median(p.m / p.n for p in problems)
    usual = {size: int(statistics.median_low(getattr(p, size) for p in problems)) for size in ("d", "rhs", "batch")}
    base, low, high = first.replace(**usual), min(p.n for p in problems), max(p.n for p in problems)
    forest = chooser.profile.forests.get(key_of(first))
    splits = {n for size in (forest.sizes if forest else ()) for n in (size, size + 1) if low < n < high}
    steps: list[tuple[int, str]] = []
    for n in sorted({low, high, *splits}):
        problem = op.nearest(base.replace(n=n, m=n if first.m == first.n else max(1, round(ratio * n))))
        name = decide(Feasibility(op, problem), chooser, settings).candidate
        if steps and steps[-1][1] == name:
            steps.pop()
        steps.append((n, name))
    return Line(base, steps)


def crossovers(profile: Profile, op: str, device: str, dtype: str) -> list[Crossover]:
    """Return the sizes at which the measured winner changes; see `Profile.thresholds`."""
    group = op, str(dtype).removeprefix("torch."), str(device).partition(":")[0]
    line = [t for t in profile.trials if t.problem.group == group and t.problem.batch == 1 and not t.problem.grad]
    line = [trial for trial in line if "stock" in trial.timings]
    usual = Counter(trial.problem.variant for trial in line).most_common(1)
    sizes: dict[int, list[Trial]] = {}
    for trial in line:
        if trial.problem.variant == usual[0][0]:
            sizes.setdefault(max(trial.problem.m, trial.problem.n), []).append(trial)
    steps = [(size, _mean_log_ratios(trials)) for size, trials in sorted(sizes.items())]
    found = []
    below = _winner(steps[0][1]) if steps else "stock"
    for (size, ratios), (next_size, next_ratios) in itertools.pairwise(steps):
        above = _winner(next_ratios, holder=below)
        if below != above:  # the lead of one over the other is interpolated in log(size)
            gap = ratios.get(above, 0.0) - ratios[below]
            next_gap = next_ratios[above] - next_ratios.get(below, 0.0)
            share = gap / (gap - next_gap) if gap > 0 > next_gap else 0.5
            found.append(Crossover(size * (next_size / size) ** share, below, above))
        below = above
    return found


def _mean_log_ratios(trials: list[Trial]) -> dict[str, float]:
    names = set.intersection(*(set(t.usual) for t in trials))
    return {name: sum(math.log(t.timings[name].ratio) for t in trials) / len(trials) for name in sorted(names)}


def _winner(ratios: dict[str, float], holder: str = "stock") -> str:
    """Return the fastest candidate; within a tie stock, or the `holder`, the fastest at the size below."""
    best = min(ratios, key=ratios.__getitem__, default="stock")
    most = ratios.get(best, math.inf) + _TIE
    return next((name for name in ("stock", holder) if ratios.get(name, math.inf) <= most), best)
