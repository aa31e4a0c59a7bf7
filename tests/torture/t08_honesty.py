"""T8: calibrations of two names for one function find no winner, and those of a true gap find it, idle or disturbed."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from harness import Findings, Mutation, main
from scipy.stats import norm
from toy import GRID, believed, op_of, powers

from autokern.core.feasibility import Feasibility
from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.core.registry import registered
from autokern.core.settings import Settings
from autokern.runtime import dispatch, learning
from autokern.tuning.calibration import calibrate
from autokern.tuning.cost_model import CostModel
from autokern.tuning.policy import decide
from autokern.tuning.profile import Profile

BURST = """
import os, random, time
draw, parent = random.Random(), os.getppid()
while os.getppid() == parent:  # a torture that is killed leaves no load behind
    ends = time.perf_counter() + draw.uniform(0.002, 0.06)
    while time.perf_counter() < ends:
        pass
    time.sleep(draw.uniform(0.002, 0.06))
"""


class Size(NamedTuple):
    """How much is done: calibrations of each kind, and how often chance may refuse what just keeps the promise.

    Few calibrations give a rough share only: one whose machine was taken away for a moment may err in all its
    decisions, so they count as one. Half of the time chance would refuse is the promised share itself.
    """

    runs: int
    chance: float

    def allows(self, errors: Sequence[float]) -> bool:
        """Whether these shares, of errors in each calibration's decisions, may well be one in a hundred or fewer."""
        scatter = statistics.stdev(errors) / math.sqrt(len(errors))
        return statistics.fmean(errors) - float(norm.isf(self.chance)) * scatter <= _PROMISED


_PROMISED = 0.01
"""Share of decisions that may be wrong."""
SIZES = {"fault": Size(60, 1e-3), "ci": Size(240, 1e-3), "full": Size(1500, 0.5)}


def _op(name: str, work: tuple[int, int]) -> Op:
    """An op whose stock multiplies matrices so often, and whose other candidate as often as the second number says."""
    return op_of(name, powers(lambda: work[0]), powers(lambda: work[1]))


def _decisions(op: Op) -> list[str]:
    """Calibrate once, and decide each measured problem."""
    profile = calibrate([op], "quick", 20.0, ["cpu"], Profile(), dtypes=("float64",))
    model = CostModel(profile)
    return [decide(Feasibility(op, trial.problem), model, Settings()).candidate for trial in profile.trials]


@contextlib.contextmanager
def _neighbours() -> Iterator[None]:
    """As many processes as there are processors, at work about half of the time."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", BURST]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


SURROUNDINGS: dict[str, Callable[[], Any]] = {"idle": contextlib.nullcontext, "bursty": _neighbours}


def _shares(errors: Sequence[int], runs: Sequence[Sequence[str]]) -> list[float]:
    return [wrong / len(run) for wrong, run in zip(errors, runs, strict=True)]


def no_gap(found: Findings, size: Size) -> None:
    """Count wins of a candidate that is stock under another name: at most one in a hundred."""
    op = _op("torture.same", (10, 10))
    for name, surroundings in SURROUNDINGS.items():
        with surroundings():
            runs = [_decisions(op) for _ in range(size.runs)]
        wins = [sum(choice != "stock" for choice in run) for run in runs]
        told = f"{sum(wins)} false wins in {sum(map(len, runs))} decisions of {size.runs} calibrations"
        found.expect(size.allows(_shares(wins, runs)), f"{name}: {told}")
        found.figures[f"no gap, {name}"] = told


def gap(found: Findings, size: Size) -> None:
    """Count how often a candidate that does 10 of stock's 13 products wins: at least 99 times in a hundred."""
    op = _op("torture.gap", (13, 10))
    with SURROUNDINGS["idle"]():
        runs = [_decisions(op) for _ in range(size.runs)]
    misses = [sum(choice != "other" for choice in run) for run in runs]
    told = f"missed {sum(misses)} times in {sum(map(len, runs))} decisions of {size.runs} calibrations"
    found.expect(size.allows(_shares(misses, runs)), f"the gap was {told}")
    found.figures["a gap of 1.3"] = told


def nothing_known(found: Findings, size: Size) -> None:
    """Far from every measurement, a candidate that was a tenth faster is not believed."""
    op = _op("torture.far", (11, 10))
    model = CostModel(calibrate([op], "quick", 20.0, ["cpu"], Profile(), dtypes=("float64",)))
    far = decide(Feasibility(op, Problem(op=op.name, m=2**15, n=2**15)), model, Settings())
    found.expect(far.candidate == "stock", f"extrapolated over {math.log2(2**15 / GRID[-1]):.0f} octaves: {far}")
    found.figures["far away"] = far.reason


def learnt(found: Findings, size: Size) -> None:
    """Learn from use, from a profile that knows nothing: no win of stock under another name, and every true gap."""
    for (name, work), (where, surroundings) in itertools.product(
        {"same": (10, 10), "gap": (13, 10)}.items(), SURROUNDINGS.items()
    ):
        if name == "gap" and where != "idle":
            continue
        op = _op(f"torture.learnt.{name}.{where}", work)
        with surroundings():
            runs = [_learnt(op) for _ in range(size.runs)]
        wins = [sum(choice != "stock" for choice in run) for run in runs]
        told = f"{sum(wins)} of {sum(map(len, runs))} changed in {size.runs} times of learning"
        errors = wins if name == "same" else [len(run) - won for won, run in zip(wins, runs, strict=True)]
        found.expect(size.allows(_shares(errors, runs)), f"learnt, {name}, {where}: {told}")
        found.figures[f"learnt, {name}, {where}"] = told


def _learnt(op: Op) -> list[str]:
    """Compare at every call until the verdicts are there, and return the choices."""
    always = {"_OF_CASE": 1e9, "_OF_PROCESS": 1e9, "_SAVING": 0.0, "_OVERRUN": 1e9}
    with mock.patch.multiple(learning, **always):
        call = believed(op, ratio=1.0, noise=0.5, learn="on")
        for n in GRID:
            a = torch.rand(n, n, dtype=torch.float64)
            for _ in range(30):
                call(a)
        dispatch.session().learning._registered = False  # nothing is kept of it
    return [decision.candidate for decision, _ in dispatch.decisions()]


def drift(found: Findings, size: Size) -> None:
    """A candidate that slows down in the middle of its life is noticed and gives way; one that stays ahead goes on."""
    noticed: list[int] = []
    turns = max(3, size.runs // 80)
    for _ in range(turns):
        noticed.append(_calls_until_demoted(found, slower=3.0))
        found.expect(_calls_until_demoted(found, slower=0.9) == 0, "a candidate that is faster was demoted")
    found.expect(0 not in noticed, f"{noticed.count(0)} of {turns} candidates that slowed down went on")
    found.figures["drift"] = f"{turns} of {turns} noticed, after {min(noticed)} to {max(noticed)} calls"


_LIFE = 9000


def _calls_until_demoted(found: Findings, slower: float) -> int:
    """Return how many calls after its slowing down a candidate gave way to stock; 0 for never."""
    speed = {"times": 6}
    call = believed(op_of(f"torture.drift{len(registered())}", powers(lambda: 10), powers(lambda: speed["times"])))
    a = torch.rand(48, 48, dtype=torch.float64)
    for number in range(_LIFE):
        if number == 1500:
            speed["times"] = int(10 * slower)
        call(a)
        ((decision, _),) = dispatch.decisions()
        if decision.candidate == "stock":
            found.expect(number >= 1500, "a candidate was demoted before it slowed down")
            return number - 1499
    return 0


MUTATIONS = [
    Mutation("nobody looks again", "runtime/dispatch.py", "if entry.count >= entry.due:", "if False:", "drift"),
    Mutation(
        "whatever is measured to be faster wins",
        "tuning/policy.py",
        "    return estimate.log_ratio + CONFIDENCE * estimate.sigma - (LEEWAY if favoured else 0.0)",
        "    return estimate.log_ratio - 0.05",
        "no_gap",
    ),
    Mutation(
        "whatever was faster in the middle is promoted",
        "runtime/case.py",
        "enough and self.median + _SURE * self.error <= required",
        "self.median < 0",
        "learnt",
    ),
    Mutation(
        "what was measured makes nothing more certain",
        "tuning/residuals.py",
        "np.maximum(amplitudes**2 + self._shift - (cross**2).sum(axis=0), 0.0)",
        "amplitudes**2 + 1.0",
        "gap",
    ),
]

if __name__ == "__main__":
    main({"no_gap": no_gap, "gap": gap, "nothing_known": nothing_known, "learnt": learnt, "drift": drift}, SIZES)
