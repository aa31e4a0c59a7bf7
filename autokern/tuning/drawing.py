"""Random problems off the ops' grids, which calibrations measure; studies judge calibrations by other seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from autokern.core.op import Candidate, Op
from autokern.core.problem import Problem
from autokern.core.registry import get
from autokern.system import host

# Largest sizes drawn, where these are not the largest of the op's full grid.
LIMITS = {"qr": {"n": 1500}, "cholesky": {"n": 3000}, "kernel_matrix": {"n": 4000}}
# Default limits of flops and bytes of one call of stock: on the CPU (under a second on two cores), and elsewhere.
_MOST_WORK, _MOST_WORK_ELSEWHERE = (2e10, 1e9), (2e11, 2e10)
_MOST_BATCH = 256
_MOST_TRUTH = 2**25  # elements of a problem up to which float64 truth is computed to check approximate candidates
_TRIES = 20  # draws for each problem: where few sizes are allowed, most draws are repetitions or too large


def contenders(problem: Problem, compiles: bool = False, free: int | None = None) -> list[Candidate]:
    """Return the candidates that may serve a problem within memory, stock first, without approximate ones."""
    free = host.available_memory(problem.device) if free is None else free
    exact = (c for c in get(problem.op).feasible(problem) if c.accuracy != "approximate" and c.compiles <= compiles)
    return [c for c in exact if c.name == "stock" or c.memory(problem) <= 0.5 * free]


def measurable(op: Op, problem: Problem, level: str, accuracy: str = "same") -> list[Candidate]:
    """Return the candidates that a calibration measures on a problem; approximate ones only if `accuracy` allows."""
    rough = accuracy == "approximate" and problem.elements <= _MOST_TRUTH
    usual = [c for c in op.feasible(problem) if not c.tight and (level == "full" or not c.compiles)]
    return [c for c in usual if rough or c.accuracy != "approximate"]


def draw(
    op: Op, count: int, dtypes: Sequence[str], device: str, seed: str, flops: float | None = None,
    bytes: float | None = None,
) -> list[Problem]:  # fmt: skip
    """Return up to `count` random problems with log-uniform sizes, kinds from the full grid, stock's work limited."""
    usual = _MOST_WORK if device == "cpu" else _MOST_WORK_ELSEWHERE
    most = usual[0] if flops is None else flops, usual[1] if bytes is None else bytes
    grids = {dtype: grid for dtype in dtypes if (grid := op.grid("full", dtype, device))}
    dtypes, chance, free = list(grids), random.Random(seed), host.available_memory(device)
    every, found = grids[dtypes[0]] if grids else [], dict[Problem, None]()
    kinds: dict[object, Problem] = {}
    for p in every:
        if len(contenders(p, free=free)) > 1:
            kinds.setdefault((p.variant, p.grad, p.m == p.n, p.batch > 1), p)
    shapes = list(kinds.values())
    for attempt in range(_TRIES * count if shapes else 0):
        problem = _drawn(op, chance.choice(shapes), every, chance)
        problem = problem.replace(dtype=dtypes[attempt % len(dtypes)])
        work = op.features(problem)
        small = work.flops <= most[0] and work.bytes <= most[1]
        if small and problem not in found and len(contenders(problem, free=free)) > 1:
            found[problem] = None
        if len(found) == count:
            break
    return list(found)


def _drawn(op: Op, base: Problem, every: list[Problem], chance: random.Random) -> Problem:
    """Return a problem shaped as `base`, with random sizes between the smallest and largest of its variant's grid."""
    grid = [p for p in every if p.variant == base.variant]

    def size(name: str, low: int = 1) -> int:
        values = {getattr(p, name) for p in grid if getattr(p, name) > 0}
        if name in ("d", "rhs") and len(values) == 1 and values != {1}:  # the grid has one case of a rare variant
            values = {getattr(p, name) for p in every if getattr(p, name) > 0}
        high = LIMITS.get(op.name, {}).get(name, max(values))
        low = max(low, min(values))
        return round(math.exp(chance.uniform(math.log(low), math.log(max(low, high)))))

    n = size("n")
    tall = all(p.m >= p.n for p in grid)
    changes = {"n": n, "m": n if base.m == base.n else size("m", low=n if tall else 1)}
    if base.d:
        changes["d"] = size("d", low=2 if "ard" in base.words else 1)
    if base.rhs:
        changes["rhs"] = size("rhs")
    if base.batch > 1:
        changes["batch"] = min(_MOST_BATCH, size("batch", low=2))
    return base.replace(**changes)
