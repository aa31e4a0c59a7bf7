"""T8: calibrations of two names for one function find no winner, and those of a true gap find it, idle or disturbed.

What they decide is judged by a clock that only the candidates and their neighbours move, so that the machine at hand
has no say.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from harness import Findings, Mutation, main
from scipy.stats import norm

from autokern.core.op import Op
from autokern.core.problem import Feasibility, Features, Problem
from autokern.core.settings import Settings
from autokern.tuning import calibration, measuring, timer
from autokern.tuning.chooser import Chooser
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile


class Size(NamedTuple):
    """How much is done: calibrations of each kind, and what chance may refuse.

    Few calibrations give a rough share only: one whose machine was taken away for a moment may err in all its
    decisions, so they count as one. Half of the time chance would refuse is the promised share itself.
    """

    runs: int
    chance: float

    def allows(self, errors: Sequence[float]) -> bool:
        """Whether these shares, of errors in each calibration's decisions, may well be one in a hundred or fewer."""
        scatter = statistics.stdev(errors) / math.sqrt(len(errors))
        return statistics.fmean(errors) - float(norm.isf(self.chance)) * scatter <= _PROMISED


GRID = (16, 64, 160)
_PROMISED = 0.01
"""Share of decisions that may be wrong."""
_COLD = 1e-3
"""Seconds that a function loses in the caches of another."""
SIZES = {"fault": Size(12, 1e-3), "ci": Size(40, 1e-3), "full": Size(400, 0.5)}


class Clock:
    """A clock that work moves: its speed wanders, single calls scatter, and neighbours take the core for a while.

    A function that follows another one finds the caches cold, whatever it does.
    """

    def __init__(self, bursty: bool) -> None:
        self._draw, self._bursty = random.Random(8), bursty
        self.now, self.waited, self._speed = 1000.0, 0.0, 0.0
        self._alone = self._until_taken()
        self._last = ""

    def __call__(self) -> float:
        return self.waited

    def _until_taken(self) -> float:
        return self._draw.uniform(0.002, 0.06) if self._bursty else math.inf

    def work(self, name: str, seconds: float) -> None:
        """Let time pass that a call takes alone, and that which neighbours make of it."""
        seconds, self._last = seconds + _COLD * (name != self._last), name
        self._speed = 0.999 * self._speed + self._draw.gauss(0, 0.002)
        left = seconds * math.exp(self._speed + self._draw.gauss(0, 0.03))
        while left > self._alone:
            taken = self._draw.uniform(0.001, 0.03)
            self.now, self.waited = self.now + self._alone + taken, self.waited + taken
            left, self._alone = left - self._alone, self._until_taken()
        self.now, self._alone = self.now + left, self._alone - left

    def op(self, name: str, stock: int, other: int) -> Op:
        """An op that multiplies a matrix by itself, whose two candidates take the time of so many products."""

        class Square(Op):
            key = staticmethod(lambda a: (a.__class__, a.shape, a.dtype))
            problem_of = staticmethod(lambda a: Problem(op=name, m=a.shape[0], n=a.shape[1]))
            reference = staticmethod(lambda a: a @ a)
            check = staticmethod(lambda problem, out, args: float((out - args[0] @ args[0]).abs().max() * 1e9))
            grid = staticmethod(lambda level, dtype, device: [Problem(op=name, m=n, n=n, dtype=dtype) for n in GRID])
            features = staticmethod(lambda problem: Features(calls=1.0, flops=2.0 * problem.m * problem.n**2))
            memory = staticmethod(lambda problem: 8 * problem.m * problem.n)

            def sample(self, problem, generator):
                return (torch.rand(problem.m, problem.n, generator=generator, dtype=torch.float64),)

        Square.name, Square.summary = name, "the square of a matrix"
        op = Square()
        for candidate, times in (("stock", stock), ("other", other)):

            def run(a: torch.Tensor, candidate: str = candidate, times: int = times) -> torch.Tensor:
                self.work(candidate, 2e-6 + times * 2e-10 * a.shape[0] ** 3)
                return a @ a

            op.candidate(candidate)(run)
        return op


def _calibrated(op: Op) -> Chooser:
    return Chooser(calibration.calibrate([op], "quick", 20.0, ["cpu"], Profile(), dtypes=("float64",)))


def _decisions(op: Op, chance: random.Random) -> dict[str, list[str]]:
    """Calibrate once, and decide each measured problem, and as many of other sizes."""
    chooser = _calibrated(op)
    measured = [trial.problem for trial in chooser.profile.trials]
    sizes = [round(math.exp(chance.uniform(math.log(GRID[0]), math.log(GRID[-1])))) for _ in measured]
    asked = {"measured": measured, "between": [Problem(op=op.name, m=n, n=n) for n in sizes]}
    return {
        place: [decide(Feasibility(op, problem), chooser, Settings()).candidate for problem in problems]
        for place, problems in asked.items()
    }


@contextlib.contextmanager
def _by(clock: Clock) -> Iterator[None]:
    """Let calibrations read a clock of their own."""
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    with (
        mock.patch.object(calibration, "time", time),
        mock.patch.object(measuring, "time", time),
        mock.patch.multiple(timer, time=time, Waited=lambda: contextlib.nullcontext(clock)),
    ):
        yield


def _wrong(op: Op, runs: int, right: str) -> Iterator[tuple[str, list[float], str]]:
    """Yield places, the share of wrong decisions of each calibration there, and how many they are in words."""
    chance = random.Random(8)
    found = [_decisions(op, chance) for _ in range(runs)]
    for place in ("measured", "between"):
        wrong = [[choice != right for choice in run[place]] for run in found]
        shares, every = [statistics.fmean(run) for run in wrong if run], [choice for run in wrong for choice in run]
        yield place, shares, f"{sum(every)} of {len(every)} decisions of {runs} calibrations are not {right}"


def no_gap(found: Findings, size: Size) -> None:
    """Count wins of a candidate that is stock under another name: at most one in a hundred."""
    _judged(found, size, "no gap", 10, "stock")


def gap(found: Findings, size: Size) -> None:
    """Count how often a candidate that does 10 of stock's 13 products wins: at least 99 times in a hundred."""
    _judged(found, size, "a gap of 1.3", 13, "other")


def _judged(found: Findings, size: Size, what: str, stock: int, right: str) -> None:
    for name, bursty in {"idle": False, "bursty": True}.items():
        clock = Clock(bursty)
        op = clock.op(f"torture.{right}.{name}", stock, 10)
        with _by(clock):
            for place, shares, told in _wrong(op, size.runs, right):
                found.expect(len(shares) == size.runs and size.allows(shares), f"{what}, {name}, {place}: {told}")
                found.figures[f"{what}, {name}, {place}"] = told


MUTATIONS = [
    Mutation("what is slower by a little wins", "tuning/forest.py", "NOISE = 0.05  #", "NOISE = -0.05  #", "no_gap"),
    Mutation(
        "trees are fitted to stock's time over a candidate's", "tuning/forest.py", "else math.log(timing.ratio)\n",
        "else -math.log(timing.ratio)\n", "gap",
    ),
    Mutation(
        "a sample begins in the caches of another function", "tuning/timer.py",
        "        if lead:\n            call()\n", "", "gap",
    ),
]  # fmt: skip

if __name__ == "__main__":
    main({"no_gap": no_gap, "gap": gap}, SIZES)
