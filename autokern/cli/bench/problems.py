"""Random problems off the grid, and which candidates may serve a problem."""

from __future__ import annotations

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
_MOST_BATCH = 256


def contenders(problem: Problem, compiles: bool = False) -> list[Candidate]:
    """Return the candidates that may serve a problem, stock first: feasible, not approximate, and within memory.

    Parameters
    ----------
    problem : Problem
        The problem.
    compiles : bool
        Whether those count whose first call compiles.
    """
    op, free = get(problem.op), host.available_memory(problem.device)
    usual = [c for c in op.feasible(problem) if c.accuracy != "approximate" and (compiles or not c.compiles)]
    return [c for c in usual if c.name == "stock" or c.memory(problem) <= 0.5 * free]


def random_problems(
    count: int,
    seed: int = 0,
    *,
    ops: Iterable[str] | None = None,
    dtypes: Sequence[str] = ("float32", "float64"),
    device: str = "cpu",
    flops: float = 2e10,
    bytes: float = 1e9,
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
    flops, bytes : float
        Most work of one call of stock, by the op's own count: 2e10 flops are under a second on two cores.

    Raises
    ------
    SettingsError
        If an op is unknown, or none of them offers a choice.
    """
    draw = random.Random(seed)
    chosen = registered() if ops is None else [get(name) for name in dict.fromkeys(ops)]
    kinds = {op.name: _kinds(op, dtypes, device) for op in chosen}
    chosen = [op for op in chosen if kinds[op.name]]
    if not chosen:
        raise SettingsError(f"random problems were asked for; no op offers more than one candidate on {device!r}")
    found: dict[Problem, None] = {}
    tries = 0
    while len(found) < count and tries < 1000 * count:
        op = chosen[len(found) % len(chosen)]
        problem = _drawn(op, draw.choice(kinds[op.name]), draw).replace(dtype=dtypes[tries % len(dtypes)])
        tries += 1
        work = op.stock.features(problem)
        if work.flops <= flops and work.bytes <= bytes and len(contenders(problem)) > 1:
            found[problem] = None
    return list(found)


def _kinds(op: Op, dtypes: Sequence[str], device: str) -> list[list[Problem]]:
    """Return the problems of the full grid that offer a choice, grouped by everything but size."""
    groups: dict[object, list[Problem]] = {}
    grids = (op.grid("full", dtype, device) for dtype in dtypes)  # an op may serve one of them only
    for problem in next(filter(None, grids), []):
        if len(contenders(problem)) > 1:
            shape = (problem.variant, problem.grad, problem.m == problem.n, problem.batch > 1)
            groups.setdefault(shape, []).append(problem)
    return list(groups.values())


def _drawn(op: Op, kind: list[Problem], draw: random.Random) -> Problem:
    """Draw sizes between the smallest and the largest that the grid has of a variant, in the shape of one kind."""
    base = kind[0]
    grid = [p for p in op.grid("full", base.dtype, base.device) if p.variant == base.variant]

    def size(name: str, low: int = 1) -> int:
        values = [getattr(p, name) for p in grid if getattr(p, name) > 0]
        high = LIMITS.get(op.name, {}).get(name, max(values))
        low = max(low, min(values))
        return round(math.exp(draw.uniform(math.log(low), math.log(max(low, high)))))

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
    return base.replace(**changes)


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    device = host.accelerator()
    host.synchronize("cpu" if device is None else device.type)
