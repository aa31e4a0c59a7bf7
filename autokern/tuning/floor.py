"""Floor: the number of elements below which the trees of an op choose nothing but stock, whatever else a problem is.

Trees compare several sizes, so no single threshold says it. The problems of the op's grid are asked for instead, each
of them halved until it is as small as can be.
"""

from __future__ import annotations

from autokern.core.op import Op
from autokern.core.problem import Problem
from autokern.tuning.forest import Forest
from autokern.tuning.policy import CONFIDENCE, NOISE

HIGHEST = 2**19
"""No floor is higher: the memory of larger calls is looked at, whoever serves them."""


def floor(op: Op, forest: Forest, device: str) -> int:
    """Return the number of elements; 0 for ops that may choose something unmeasured."""
    if type(op).default_candidate is not Op.default_candidate:
        return 0
    smaller: dict[Problem, None] = {}
    for dtype in ("float64", "float32"):
        for problem in op.grid("full", dtype, device):
            for octaves in range(min(problem.m, problem.n).bit_length()):
                smaller[problem.replace(m=problem.m >> octaves, n=problem.n >> octaves)] = None
    won = (_elements(p) for p in sorted(smaller, key=_elements) if _is_won(op, forest, p))
    return min(HIGHEST, next(won, 2 * HIGHEST) // 2)  # halved: problems in between are not asked for


def _elements(problem: Problem) -> int:
    return problem.batch * problem.m * problem.n


def _is_won(op: Op, forest: Forest, problem: Problem) -> bool:
    """Whether a candidate is predicted to be faster than stock by more than the uncertainty."""
    faster = {n for n, e in forest.estimates(problem).items() if e.log_ratio + CONFIDENCE * e.sigma <= -NOISE}
    return any(c.name in faster and c.unsupported(problem) is None for c in op.candidates)
