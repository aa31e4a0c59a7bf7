"""Plans of a calibration: which problem is measured next, with which candidates, and what that takes.

The next trial is the one that promises most: expected regret removed per second. The regret expected on a problem is
what the choice may lose there to another candidate, given the cost model's means and deviations; a trial removes it on
the problems near by. Candidates without a chance are left out of a trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.tuning.cost_model import CostModel
from autokern.tuning.drawing import draw
from autokern.tuning.residuals import Posterior, nearness

__all__ = ["Ask", "Pool", "contenders"]

Array = npt.NDArray[np.float64]

_DRAWN = {"quick": 32, "full": 160}
"""Problems that are drawn for each op, dtype and device."""
_PRIOR_RATE = 4e9
"""Flops and bytes a second that are assumed before the first measurement: pessimistic."""
_FAR = 3.0
"""Octaves from the nearest measurement beyond which a trial is not expected to take less than that rate allows."""
_UNKNOWN = 0.7
"""Regret that is expected where nothing is known, in log units."""
_CHANCE = 0.002
"""Regret below which a candidate is not worth a place in a trial, in log units."""
_ROUNDS, _ONCE = 8.0, 3e-3
"""Calls of each candidate in a trial, and seconds that a trial takes beside them."""
_MOST_TRUTH = 2**25
"""Elements of a problem up to which its float64 truth is formed to check a candidate that approximates."""
_NEVER = 10
"""Trials of other hosts in which a candidate never won that leave it out, unless all are asked for."""


class Ask(NamedTuple):
    """A trial: the problem, the candidates, the regret that it removes, and the seconds that it is expected to take."""

    problem: Problem
    candidates: list[Candidate]
    removed: float
    seconds: float

    @property
    def promise(self) -> float:
        """Regret removed per second."""
        return self.removed / self.seconds


@dataclass
class Pool:
    """The problems of one op and kind of device: those that count, and those that may be measured.

    Parameters
    ----------
    op : Op
        The op.
    device : str
        Kind of the device.
    level : {"quick", "full"}
        Candidates that compile are measured in a full calibration only.
    dtypes : sequence of str
        Dtypes to measure.
    accuracy : {"same", "approximate"}
        Whether candidates that approximate are measured too.
    near : Problem, optional
        The problem at hand: it is the first, and what is near to it counts most.
    thorough : bool
        Whether candidates are measured that never won on another host of this kind.
    banned : callable
        Whether a candidate must not run on a problem; it is asked each time, for calibrations ban candidates.
    """

    op: Op
    device: str
    level: str
    dtypes: Sequence[str]
    accuracy: str = "same"
    near: Problem | None = None
    thorough: bool = False
    banned: Callable[[Candidate, Problem], bool] = lambda candidate, problem: False
    skipped: set[Problem] = field(default_factory=set)
    disturbed: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = [] if self.near is None else [self.near]
        able = {p: contenders(self.op, p, self.level, self.accuracy) for p in dict.fromkeys([*first, *self._drawn()])}
        self.able = {problem: found for problem, found in able.items() if len(found) > 1}
        self._problems, self._tried_twice = tuple(self.able), set[Problem]()
        self._near = nearness(self.op, self._problems) if self._problems else np.zeros((0, 0))
        at_hand = self._problems.index(self.near) if self.near in self.able else None
        self._weights = np.ones(len(self._problems)) if at_hand is None else self._near[at_hand]

    def _drawn(self) -> list[Problem]:
        """Return random problems, and those of the grid where its sizes do not allow for as many."""
        count = _DRAWN[self.level] * len(self.dtypes)
        drawn = draw(self.op, count, self.dtypes, self.device, "calibration")
        grid = (p for dtype in self.dtypes for p in self.op.grid(self.level, dtype, self.device))
        return list(dict.fromkeys([*drawn, *grid]))[:count]

    def asks(self, model: CostModel, known: Mapping[Problem, Set[str]], most: float, count: int = 1) -> list[Ask]:
        """Return the trials that promise most per second among those of at most so many seconds, the best first.

        A problem of which all that may win is known, by names of candidates, is not asked again.
        """
        if not self._problems:
            return []
        looks = self._looks(model)
        left = np.array([max(gains.values(), default=_UNKNOWN) for gains, _ in looks]) * self._weights
        every = [self._ask(model, problem, *look) for problem, look in zip(self._problems, looks, strict=True)]
        seconds = np.array([ask.seconds for ask in every])
        usable = np.array([ask.seconds <= most and self._is_open(ask, known) for ask in every])
        found: list[Ask] = []
        at_hand = self._problems.index(self.near) if self.near in self.able else None
        for _ in range(count):
            removed = self._near @ left
            promise = np.where(usable, removed / seconds, 0.0)
            if at_hand is not None and usable[at_hand]:  # what the program waits for comes first
                promise[at_hand] = math.inf
            best = int(promise.argmax())
            if not promise[best] > 0:
                break
            found.append(every[best]._replace(removed=float(removed[best])))
            usable[best] = False
            left = left * (1 - self._near[best])
        return found

    def _is_open(self, ask: Ask, known: Mapping[Problem, Set[str]]) -> bool:
        names = {candidate.name for candidate in ask.candidates}
        return len(names) > 1 and ask.problem not in self.skipped and not names <= known.get(ask.problem, frozenset())

    def asks_again(self, model: CostModel, known: Mapping[Problem, Set[str]], most: float) -> list[Ask]:
        """Return the trials of problems that were disturbed, once."""
        again, self.disturbed = self.disturbed, []
        self.skipped.difference_update(problem for problem in again if problem not in self._tried_twice)
        self._tried_twice.update(again)
        return self.asks(model, known, most) if again else []

    @property
    def was_disturbed(self) -> bool:
        """Whether trials were disturbed."""
        return bool(self.disturbed or self._tried_twice)

    def expected_regret(self, model: CostModel) -> float:
        """Return the mean over all problems that count of what the choice may lose there, in log units."""
        if not self._problems:
            return 0.0
        return float(np.mean([max(gains.values(), default=_UNKNOWN) for gains, _ in self._looks(model)]))

    def _looks(self, model: CostModel) -> list[tuple[dict[str, float], dict[str, float]]]:
        names = {c.name: c for found in self.able.values() for c in found}
        estimates = model.estimates(self.op, self._problems, list(names.values()))
        looks = [_look(self._there(problem), estimates, row) for row, problem in enumerate(self._problems)]
        if "stock" in estimates:
            for row in np.flatnonzero((estimates["stock"].distance > _FAR) & np.isfinite(estimates["stock"].distance)):
                gains, seconds = looks[row]
                least = _supposed(self.op, self._problems[row])
                looks[row] = gains, {name: max(likely, least) for name, likely in seconds.items()}
        return looks

    def _there(self, problem: Problem) -> list[Candidate]:
        return [candidate for candidate in self.able[problem] if not self.banned(candidate, problem)]

    def _ask(self, model: CostModel, problem: Problem, gains: dict[str, float], seconds: dict[str, float]) -> Ask:
        there = [c for c in self._there(problem) if self._may_win(model, c, problem, gains)]
        likely = max(seconds.values(), default=0.0) or _supposed(self.op, problem)
        once = sum(seconds.get(c.name, likely) for c in there)
        return Ask(problem, there, 0.0, _ONCE + _ROUNDS * once)

    def _may_win(self, model: CostModel, candidate: Candidate, problem: Problem, gains: dict[str, float]) -> bool:
        always = candidate is self.op.stock or candidate.accuracy == "approximate"  # errors are wanted everywhere
        if always or candidate.name not in gains:
            return True
        if not self.thorough and model.never_won(candidate.name, problem, _NEVER):
            return False
        return gains[candidate.name] > _CHANCE


def _look(
    candidates: Sequence[Candidate], found: dict[str, Posterior], row: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what each candidate is expected to gain on the likely choice where it is faster, and likely seconds.

    The likely choice among candidates within the op's bound is one of them, however fast those are that approximate.
    """
    if len(candidates) < 2:
        return {"stock": 0.0}, {}
    if "stock" not in found:
        return {}, {}
    base = float(found["stock"].mean[row] + min(math.sqrt(found["stock"].variance[row]), 1.0))
    mean, sigma = {"stock": 0.0}, {"stock": 0.0}
    for candidate in candidates:
        if candidate.name in found and candidate.name != "stock":
            mean[candidate.name] = float(found[candidate.name].mean[row])
            sigma[candidate.name] = math.sqrt(found[candidate.name].variance[row])
    gains: dict[str, float] = {}
    for names in ([c.name for c in candidates], [c.name for c in candidates if c.accuracy != "approximate"]):
        known = [name for name in names if name in mean]
        best = min(known, key=lambda name: mean[name] + 0.5 * sigma[name])
        here = {n: _exceeding(mean[best] - mean[n], math.hypot(sigma[n], sigma[best])) for n in known if n != best}
        least = 0.1 * _UNKNOWN if len(known) < len(names) else 0.0  # some candidates are not known at all
        gains |= here | {best: max([least, *here.values()])}
    return gains, {name: math.exp(base + mean[name]) for name in mean}


def _exceeding(mean: float, sigma: float) -> float:
    """Return the expectation of the positive part of a normal variable."""
    if sigma <= 0:
        return max(mean, 0.0)
    z = mean / sigma
    return mean * 0.5 * math.erfc(-z / math.sqrt(2)) + sigma * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def contenders(op: Op, problem: Problem, level: str, accuracy: str = "same") -> list[Candidate]:
    """Return the candidates that are measured on a problem; those that approximate only if `accuracy` allows them."""
    rough = accuracy == "approximate" and problem.batch * problem.m * problem.n <= _MOST_TRUTH
    usual = [c for c in op.feasible(problem) if not c.tight and (level == "full" or not c.compiles)]
    return [c for c in usual if rough or c.accuracy != "approximate"]


def _supposed(op: Op, problem: Problem) -> float:
    """Return pessimistic seconds of one call of stock where nothing was measured."""
    work = op.stock.features(problem)
    return 1e-4 + (work.flops + work.bytes) / _PRIOR_RATE
