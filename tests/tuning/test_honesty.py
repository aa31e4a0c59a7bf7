"""T8: calibrations of two names for one function find no winner, and those of a true gap find it, idle or disturbed.

What they decide is judged by a clock that only the candidates and their neighbours move, so that the machine at hand
has no say.
"""

import contextlib
import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import norm

from autokern.core.problem import Feasibility, Features, Problem
from autokern.core.settings import Settings
from autokern.tuning import calibration, measuring, timer
from autokern.tuning.chooser import Chooser
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile

GRID = (16, 64, 160)
PROMISED = 0.01
"""Share of decisions that may be wrong."""
COLD = 1e-3
"""Seconds that a function loses in the caches of another."""


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
        seconds, self._last = seconds + COLD * (name != self._last), name
        self._speed = 0.999 * self._speed + self._draw.gauss(0, 0.002)
        left = seconds * math.exp(self._speed + self._draw.gauss(0, 0.03))
        while left > self._alone:
            taken = self._draw.uniform(0.001, 0.03)
            self.now, self.waited = self.now + self._alone + taken, self.waited + taken
            left, self._alone = left - self._alone, self._until_taken()
        self.now, self._alone = self.now + left, self._alone - left

    def takes(self, name: str, times: int):
        """A function that squares a matrix, and takes the time of so many products."""
        return lambda a: self.work(name, 2e-6 + times * 2e-10 * a.shape[0] ** 3) or a @ a


@pytest.fixture(params=[False, True], ids=["idle", "bursty"])
def clock(request, monkeypatch):
    made = Clock(request.param)
    time = SimpleNamespace(perf_counter=lambda: made.now)
    for module in (calibration, measuring, timer):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(timer, "Waited", lambda: contextlib.nullcontext(made))
    return made


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("stock", "right"), [(10, "stock"), (13, "other")], ids=["no gap", "a gap of 1.3"])
def test_a_candidate_wins_if_it_is_faster_but_for_one_decision_in_a_hundred(make_op, clock, in_earnest, stock, right):
    op = make_op(
        "torture",
        reference=lambda a: a @ a,
        sample=lambda p, generator: (torch.rand(p.m, p.n, generator=generator, dtype=torch.float64),),
        check=lambda problem, out, args: float((out - args[0] @ args[0]).abs().max() * 1e9),
        grid=lambda level, dtype, device: [Problem(op="torture", m=n, n=n, dtype=dtype) for n in GRID],
        features=lambda problem: Features(calls=1.0, flops=2.0 * problem.m * problem.n**2),
    )
    for name, times in (("stock", stock), ("other", 10)):
        op.candidate(name)(clock.takes(name, times))
    chance, wrong = random.Random(8), {"measured": [], "between": []}
    for _ in range(400 if in_earnest else 40):
        known = calibration.calibrate([op], "quick", 20.0, ["cpu"], Profile(), dtypes=("float64",))
        measured = [trial.problem for trial in known.trials]
        sizes = [round(math.exp(chance.uniform(math.log(GRID[0]), math.log(GRID[-1])))) for _ in measured]
        for place, asked in (("measured", measured), ("between", [Problem(op=op.name, m=n, n=n) for n in sizes])):
            found = [decide(Feasibility(op, problem), Chooser(known), Settings()).candidate for problem in asked]
            assert found
            wrong[place].append(statistics.fmean(name != right for name in found))
    for place, shares in wrong.items():
        # a calibration whose machine was taken away may err in all its decisions, so these count as one
        scatter = statistics.stdev(shares) / math.sqrt(len(shares))
        allowed = PROMISED + float(norm.isf(0.5 if in_earnest else 1e-3)) * scatter
        assert statistics.fmean(shares) <= allowed, place
