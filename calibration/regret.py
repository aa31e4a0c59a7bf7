"""Regret: how much slower the chosen candidate is than the best one, on random problems that were never calibrated.

The best of several noisy timings is mostly the luckiest. So each problem is timed twice: one half of the rounds says
which candidate is the best, the other half how long it and the choice take, and the halves change places. Stock runs
under two names; what the second loses to the first is the noise floor of every figure. `study.py` and `gpu.py` measure
by these functions.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.core.state import inside
from autokern.hooks import install
from autokern.system import host
from autokern.tuning import timer
from autokern.tuning.measuring import Trialled, contenders, draw, trial

AGAIN = "stock, again"
"""The second name of stock."""
LEAST = 3e-5
"""Seconds of stock from which a problem counts: below, what surrounds a call takes longer than the call."""
_SHORT = 0.01
"""Seconds of a call up to which a sample holds two, so that an uncounted one comes first."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, timed twice with every candidate that could serve it."""

    problem: Problem
    seconds: float  # seconds of one call of stock
    # By candidate, the medians of the paired ratios to stock in both halves of the rounds.
    ratios: dict[str, tuple[float, float]]

    def best(self, half: int) -> str:
        """Return the fastest candidate in one half of the rounds."""
        return min((name for name in self.ratios if name != AGAIN), key=lambda name: self.ratios[name][half])

    @property
    def fastest(self) -> str:
        """The fastest candidate over all rounds."""
        return min((name for name in self.ratios if name != AGAIN), key=lambda name: math.prod(self.ratios[name]))

    def regret(self, chosen: str) -> float:
        """Return the time of a candidate over that of the best one of the other half."""
        found = self.ratios[chosen if chosen in self.ratios else "stock"]
        return math.sqrt(math.prod(found[half] / self.ratios[self.best(1 - half)][half] for half in (0, 1)))

    def over_stock(self, chosen: str) -> float:
        """Return the time of a candidate over stock's."""
        return math.sqrt(math.prod(self.ratios.get(chosen, self.ratios["stock"])))


class Verdict(msgspec.Struct, frozen=True):
    """Summary of a way of choosing, over a set of rows."""

    problems: int
    regret_geomean: float  # geometric mean and 95th percentile of the regret
    regret_p95: float
    slower_share: float  # share of the problems on which the choice is more than 5 % slower than stock
    speedup: float  # geometric mean of stock's time over that of the choice


def random_problems(
    count: int,
    seed: int = 0,
    *,
    ops: Iterable[str] | None = None,
    device: str = "cpu",
    most: tuple[float, float] | None = None,
) -> list[Problem]:
    """Return random problems of some ops, by default all that offer a choice on the device, in turn; see `draw`."""
    chosen = registered() if ops is None else [get(name) for name in ops]
    found = [draw(op, count, ("float32", "float64"), device, f"{seed}:{op.name}", most) for op in chosen]
    turns = itertools.chain(*itertools.zip_longest(*filter(None, found)))
    return [problem for problem in turns if problem is not None][:count]


def timed(
    problems: Sequence[Problem],
    deadline: float,
    *,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (4, 8),
    compiles: bool = False,
) -> list[Row]:
    """Time every candidate of each problem.

    No further problem begins after the deadline, and a round is never cut. Problems that cannot be sampled, or on which
    memory ran out, are left out. `seconds` and `rounds`, fewest and most, are those of each half.
    """
    rows = []
    for problem in problems:
        now = time.perf_counter()
        if now >= deadline:
            break
        with contextlib.suppress(MemoryError, torch.OutOfMemoryError), install.enabled():  # parts are dispatched
            rows.append(_row(problem, min(seconds, deadline - now), rounds, compiles))
    return [row for row in rows if row is not None]


def _row(problem: Problem, seconds: float, rounds: tuple[int, int], compiles: bool) -> Row | None:
    op = get(problem.op)
    try:
        args = op.sample(problem, torch.Generator().manual_seed(4321 + problem.n))
    except Exception:
        return None  # a program asked a kind of problem that the op makes no sample of
    inside.active = True  # calls made by a candidate are not dispatched
    try:
        calls, warm = _warmed(op, problem, args, contenders(problem, compiles))
        if "stock" not in calls:
            return None
        calls[AGAIN], warm[AGAIN] = trial(op, op.stock.run, problem, args), warm["stock"]
        least = max(1e-3, 1.5 * warm["stock"]) if warm["stock"] < _SHORT else 1e-3
        options: dict[str, Any] = {"seconds": seconds, "rounds": rounds, "warm": warm, "min_time": least}
        halves = [timer.compare(calls, synchronize=host.settle, **options) for _ in range(2)]
    finally:
        inside.active = False
    ratios = {name: (halves[0][name].ratio, halves[1][name].ratio) for name in calls}
    return Row(problem=problem, seconds=min(half["stock"].seconds for half in halves), ratios=ratios)


def _warmed(
    op: Op, problem: Problem, args: tuple[object, ...], candidates: Sequence[Candidate]
) -> tuple[dict[str, Callable[[], Trialled]], dict[str, float]]:
    """Return the calls that work, and the seconds of a warm call of each."""
    calls: dict[str, Callable[[], Trialled]] = {}
    warm: dict[str, float] = {}
    for candidate in candidates:
        call = trial(op, candidate.run, problem, args)
        try:
            call()
            warm[candidate.name] = timer.once(call, host.settle)
            calls[candidate.name] = call
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # it takes no part
            continue
    return calls, warm


def verdict(rows: Iterable[Row], choose: Callable[[Problem], str]) -> Verdict:
    """Return how well a way of choosing does on rows, of which those below `LEAST` seconds do not count.

    Raises ValueError if none is left.
    """
    chosen = [(row, choose(row.problem)) for row in rows if row.seconds >= LEAST]
    if not chosen:
        raise ValueError("a verdict over no problem was asked for; allow more time")
    regrets = sorted(lost(row, name) for row, name in chosen)
    over_stock = [row.over_stock(name) for row, name in chosen]
    return Verdict(
        problems=len(chosen),
        regret_geomean=statistics.geometric_mean(regrets),
        regret_p95=regrets[math.ceil(0.95 * len(regrets)) - 1],
        slower_share=sum(ratio > 1.05 for ratio in over_stock) / len(over_stock),
        speedup=1 / statistics.geometric_mean(over_stock),
    )


def apart(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Return rows on which what is fastest is wanted, and those on which exact candidates may cost more than stock."""
    fastest: list[Row] = []
    exact: list[Row] = []
    for row in rows:
        (exact if _prefers_exact(row.problem) else fastest).append(row)
    return fastest, exact


def _prefers_exact(problem: Problem) -> bool:
    return get(problem.op).may_cost(problem) > 1.0


def lost(row: Row, name: str) -> float:
    """Return the regret of a choice; that of an exact one which may cost more than stock is beside exact ones."""
    op = get(row.problem.op)
    if not _prefers_exact(row.problem) or name not in row.ratios or name == AGAIN or op[name].accuracy != "better":
        return row.regret(name)
    exact = {n: r for n, r in row.ratios.items() if n != AGAIN and op[n].accuracy == "better"}
    return msgspec.structs.replace(row, ratios=exact).regret(name)


def noise_floor(rows: Iterable[Row]) -> Verdict:
    """Return the verdict on stock under another name, where stock alone is there to choose from."""
    pairs = [msgspec.structs.replace(row, ratios={n: row.ratios[n] for n in ("stock", AGAIN)}) for row in rows]
    return verdict(pairs, lambda problem: AGAIN)
