"""Regret: how much slower the chosen candidate is than the best one, on random problems that were never calibrated.

The best of several noisy timings is mostly the luckiest. So the choice, the apparent best and stock are timed once more
side by side, and only these fresh timings count.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from autokern.cli.bench.problems import contenders, synchronize
from autokern.core.errors import SettingsError
from autokern.core.op import Candidate, Op, inside
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.system.progress import Progress, silent
from autokern.tuning import timer
from autokern.tuning.trial import Trialled, trial

_log = logging.getLogger("autokern")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, timed with every candidate that could serve it.

    Parameters
    ----------
    problem : Problem
        The problem.
    chosen : str
        The candidate that was chosen for it.
    best : str
        The fastest candidate; the chosen one where that is as fast within the uncertainty.
    regret : float
        Time of the chosen candidate over that of the best one, at least 1.
    over_stock : float
        Time of the chosen candidate over stock's.
    seconds : dict
        Median seconds of one call, by candidate.
    ratios : dict
        Median of the paired ratios to stock, by candidate.
    noise : dict
        Standard error of the log of each ratio.
    """

    problem: Problem
    chosen: str
    best: str
    regret: float
    over_stock: float
    seconds: dict[str, float]
    ratios: dict[str, float]
    noise: dict[str, float]


class Verdict(msgspec.Struct, frozen=True):
    """Summary of a set of rows.

    Parameters
    ----------
    problems : int
        Number of rows.
    regret_geomean, regret_p95 : float
        Geometric mean and 95th percentile of the regret.
    slower_share : float
        Share of the problems on which the choice is more than 5 % slower than stock.
    speedup : float
        Geometric mean of stock's time over that of the choice.
    """

    problems: int
    regret_geomean: float
    regret_p95: float
    slower_share: float
    speedup: float


def regret(
    problems: Sequence[Problem],
    deadline: float,
    choose: Callable[[Problem], str],
    *,
    seconds: float = 2.0,
    rounds: tuple[int, int] = (5, 15),
    compiles: bool = False,
    progress: Progress = silent,
) -> list[Row]:
    """Time every candidate of each problem, and compare the chosen one with the best.

    Parameters
    ----------
    problems : sequence of Problem
        Problems; each must offer a choice.
    deadline : float
        Time of `time.perf_counter` after which no further problem begins.
    choose : callable
        Maps a Problem to the name of the chosen candidate.
    seconds : float
        Time for the comparison of all candidates, and again for that of the last three; a round is never cut.
    rounds : tuple of int
        Fewest and most rounds of each comparison.
    compiles : bool
        Whether candidates take part whose first call compiles.
    progress : callable, optional
        Called with the fraction done and a line of text.

    Returns
    -------
    list of Row
        In the order of the problems; those on which memory ran out are left out.
    """
    rows = []
    began = time.perf_counter()
    for index, problem in enumerate(problems):
        now = time.perf_counter()
        if now >= deadline:
            break
        used = (now - began) / (deadline - began) if math.isfinite(deadline) else 0.0
        progress(max(index / len(problems), used), str(problem))
        with contextlib.suppress(MemoryError, torch.OutOfMemoryError):
            rows.append(_row(problem, choose(problem), min(seconds, deadline - now), rounds, compiles))
    progress(1.0, "done")
    return [row for row in rows if row is not None]


def _row(problem: Problem, chosen: str, seconds: float, rounds: tuple[int, int], compiles: bool) -> Row | None:
    op = get(problem.op)
    candidates = contenders(problem, compiles)
    if chosen not in [c.name for c in candidates]:
        candidates.append(op[chosen])
    args = op.sample(problem, torch.Generator().manual_seed(4321 + problem.n))
    inside.active = True  # calls made by a candidate are not dispatched
    try:
        calls, warm = _warmed(op, problem, args, candidates)
        if "stock" not in calls or chosen not in calls:
            return None
        options: dict[str, Any] = {"synchronize": synchronize, "seconds": seconds, "rounds": rounds, "warm": warm}
        first = timer.compare(calls, **options)
        apparent = min(first, key=lambda name: first[name].ratio)
        last = {name: calls[name] for name in dict.fromkeys(("stock", chosen, apparent))}
        fresh = timer.compare(last, **options) if len(last) > 1 else first
    finally:
        inside.active = False
    timings = {**first, **fresh}
    ratio = {name: timings[name].ratio for name in last}
    best = min(last, key=lambda name: (ratio[name], name != chosen))
    return Row(
        problem=problem,
        chosen=chosen,
        best=best,
        regret=ratio[chosen] / ratio[best],
        over_stock=ratio[chosen],
        seconds={name: t.seconds for name, t in timings.items()},
        ratios={name: t.ratio for name, t in timings.items()},
        noise={name: t.noise for name, t in timings.items()},
    )


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
            warm[candidate.name] = timer.once(call, synchronize)
            calls[candidate.name] = call
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            _log.debug("candidate %s.%s failed on %s", op.name, candidate.name, problem, exc_info=True)
    return calls, warm


def verdict(rows: Sequence[Row]) -> Verdict:
    """Return the summary of rows.

    Raises
    ------
    SettingsError
        If there are none.
    """
    if not rows:
        raise SettingsError("a verdict over no problem was asked for; allow more time")
    regrets = sorted(row.regret for row in rows)
    return Verdict(
        problems=len(rows),
        regret_geomean=statistics.geometric_mean(regrets),
        regret_p95=regrets[min(len(regrets) - 1, math.ceil(0.95 * len(regrets)) - 1)],
        slower_share=sum(row.over_stock > 1.05 for row in rows) / len(rows),
        speedup=1 / statistics.geometric_mean(row.over_stock for row in rows),
    )
