"""The candidate `merged` of `exact_log_prob`, for points that repeat (`gp.repeats`)."""

from __future__ import annotations

import torch

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.gp import repeats
from autokern.gp.marginal import Marginal
from autokern.gp.originals import psd_safe_cholesky as ladder
from autokern.ops._iterations import or_iterate
from autokern.ops._shared import merged_rows, of_trees

__all__ = ["register"]


def _unsupported(problem: Problem) -> str | None:
    if problem.n < repeats.LEAST or not 0 < merged_rows(problem) <= repeats.MOST_DISTINCT * problem.n:
        return "too few points repeat"
    if problem.device != "cpu" or problem.batch > 1 or "x" in problem.grad.split("/"):
        return "for single models on the CPU, without gradients by the points"
    return of_trees(problem)


def _of_points(problem: Problem) -> int:
    return 12 * problem.n * (problem.d + 4) * problem.itemsize


def register(op: Op) -> None:
    """Register the candidate."""

    def rows_features(problem: Problem) -> Features:
        few = op.features(problem.replace(n=merged_rows(problem)))
        return Features(few.calls + 40, few.flops, few.bytes + _of_points(problem))

    def rows_memory(problem: Problem) -> int:
        return op.memory(problem.replace(n=merged_rows(problem))) + _of_points(problem)

    @op.candidate("merged", accuracy="better", unsupported=_unsupported, features=rows_features, memory=rows_memory)
    @or_iterate(op.stock.run)
    def merged(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """The density of each point's mean observation, with the noise of that: one row for equal points."""
        found = repeats.log_prob(marginal, value, exact, ladder)
        return op["fused" if exact else "stock"].run(marginal, value, exact) if found is None else found
