"""Random problems off every grid: what calibrations measure, and what studies judge them by.

Both draw from one distribution with seeds of their own, so that no problem of a study was measured before.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence

from autokern.core.errors import SettingsError
from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import get, registered
from autokern.system import host

LIMITS = {"qr": {"n": 1500}, "cholesky": {"n": 3000}, "matmul": {"n": 8000, "m": 8000}, "kernel_matrix": {"n": 4000}}
"""Largest sizes that are drawn, where they are not those of the op's full grid."""
_MOST_WORK = {"cpu": (2e10, 1e9)}
_MOST_WORK_ELSEWHERE = (2e11, 2e10)
"""Most flops and bytes of one call of stock that is drawn by default: under a second on two cores; on accelerators ten
times as much, which those with slow double precision can still compute."""
_MOST_BATCH = 256
_MOST_TRUTH = 2**25
"""Elements of a problem up to which its float64 truth is formed to check a candidate that approximates."""
_TRIES = 20
"""Draws for each problem: where few sizes are allowed, most draws repeat themselves or are too large."""


def contenders(problem: Problem, compiles: bool = False, free: int | None = None) -> list[Candidate]:
    """Return the candidates that may serve a problem, stock first: feasible, not approximate, and within memory.

    Parameters
    ----------
    problem : Problem
        The problem.
    compiles : bool
        Whether those count whose first call compiles.
    free : int, optional
        Bytes of memory that are available; read here if not given.
    """
    op = get(problem.op)
    if free is None:
        free = host.available_memory(problem.device)
    usual = [c for c in op.feasible(problem) if c.accuracy != "approximate" and (compiles or not c.compiles)]
    return [c for c in usual if c.name == "stock" or c.memory(problem) <= 0.5 * free]


def measurable(op: Op, problem: Problem, level: str, accuracy: str = "same") -> list[Candidate]:
    """Return the candidates that a calibration measures on a problem; approximate ones only if `accuracy` allows."""
    rough = accuracy == "approximate" and problem.batch * problem.m * problem.n <= _MOST_TRUTH
    usual = [c for c in op.feasible(problem) if not c.tight and (level == "full" or not c.compiles)]
    return [c for c in usual if rough or c.accuracy != "approximate"]


def random_problems(
    count: int,
    seed: int = 0,
    *,
    ops: Iterable[str] | None = None,
    dtypes: Sequence[str] = ("float32", "float64"),
    device: str = "cpu",
    flops: float | None = None,
    bytes: float | None = None,
) -> list[Problem]:
    """Return random problems off the grid: sizes log-uniform, structure and gradients as the op's full grid has them.

    Parameters
    ----------
    count : int
        Number of problems, in equal parts by op.
    seed : int
        The same seed gives the same problems.
    ops : iterable of str, optional
        Names of ops; default all that offer a choice on the device.
    dtypes : sequence of str
        Taken in turn.
    device : str
        Device kind.
    flops, bytes : float, optional
        Most work of one call of stock, by the op's own count; default what takes less than a second.

    Raises
    ------
    SettingsError
        If an op is unknown, or none of them offers a choice.
    """
    chosen = registered() if ops is None else [get(name) for name in dict.fromkeys(ops)]
    found = [draw(op, count, dtypes, device, f"{seed}:{op.name}", flops, bytes) for op in chosen]
    found = [problems for problems in found if problems]
    if not found:
        raise SettingsError(f"random problems were asked for; no op offers more than one candidate on {device!r}")
    turns = itertools.chain(*itertools.zip_longest(*found))
    return [problem for problem in turns if problem is not None][:count]


def draw(
    op: Op,
    count: int,
    dtypes: Sequence[str],
    device: str,
    seed: str,
    flops: float | None = None,
    bytes: float | None = None,
) -> list[Problem]:
    """Return so many random problems of one op, fewer where its sizes do not allow for more."""
    usual = _MOST_WORK.get(device, _MOST_WORK_ELSEWHERE)
    flops, bytes = usual[0] if flops is None else flops, usual[1] if bytes is None else bytes
    grids = {dtype: grid for dtype in dtypes if (grid := op.grid("full", dtype, device))}
    dtypes, chance, free = list(grids), random.Random(seed), host.available_memory(device)
    every = grids[dtypes[0]] if grids else []
    kinds = _kinds(every, free)
    found: dict[Problem, None] = {}
    for attempt in range(_TRIES * count if kinds else 0):
        problem = _drawn(op, chance.choice(kinds), every, chance).replace(dtype=dtypes[attempt % len(dtypes)])
        work = op.stock.features(problem)
        if (
            work.flops <= flops
            and work.bytes <= bytes
            and problem not in found
            and len(contenders(problem, free=free)) > 1
        ):
            found[problem] = None
        if len(found) == count:
            break
    return list(found)


def _kinds(grid: list[Problem], free: int) -> list[list[Problem]]:
    """Return the problems of a grid that offer a choice, grouped by everything but size."""
    groups: dict[object, list[Problem]] = {}
    for problem in grid:
        if len(contenders(problem, free=free)) > 1:
            shape = (problem.variant, problem.grad, problem.m == problem.n, problem.batch > 1)
            groups.setdefault(shape, []).append(problem)
    return list(groups.values())


def _drawn(op: Op, kind: list[Problem], every: list[Problem], chance: random.Random) -> Problem:
    """Return sizes between the smallest and the largest that the grid has of a variant, in the shape of one kind."""
    base = kind[0]
    grid = [p for p in every if p.variant == base.variant]

    def size(name: str, low: int = 1) -> int:
        values = {getattr(p, name) for p in grid if getattr(p, name) > 0}
        if name in ("d", "rhs") and len(values) == 1 and values != {1}:  # of a rare variant the grid has one case only
            values = {getattr(p, name) for p in every if getattr(p, name) > 0}
        high = LIMITS.get(op.name, {}).get(name, max(values))
        low = max(low, min(values))
        return round(math.exp(chance.uniform(math.log(low), math.log(max(low, high)))))

    n = size("n")
    if base.m == base.n:
        m = n
    else:
        tall = all(p.m >= p.n for p in grid)
        m = size("m", low=n if tall else 1)
    changes = {"m": m, "n": n}
    if base.d:
        changes["d"] = size("d", low=2 if "ard" in base.words else 1)
    if base.rhs:
        changes["rhs"] = size("rhs")
    if base.batch > 1:
        changes["batch"] = min(_MOST_BATCH, size("batch", low=2))
    return op.nearest(base.replace(**changes))
