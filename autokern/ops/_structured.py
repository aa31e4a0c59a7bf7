"""Candidates of `exact_log_prob` for points with structure (`gp.structure`): those that repeat, and grids."""

from __future__ import annotations

import torch

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.gp import grids, repeats, structure
from autokern.gp.marginal import Marginal
from autokern.gp.originals import psd_safe_cholesky as ladder
from autokern.ops._iterations import or_iterate
from autokern.ops._shared import is_grid, merged_rows, of_trees

__all__ = ["register"]


def _unsupported(problem: Problem) -> str | None:
    if problem.device != "cpu" or problem.batch > 1 or "x" in problem.grad.split("/"):
        return "for single models on the CPU, without gradients by the points"
    return of_trees(problem)


def _merged_unsupported(problem: Problem) -> str | None:
    if problem.n < structure.LEAST or not 0 < merged_rows(problem) <= structure.MOST_DISTINCT * problem.n:
        return "too few points repeat"
    return _unsupported(problem)


def _of_points(problem: Problem) -> int:
    return 12 * problem.n * (problem.d + 4) * problem.itemsize


def _kronecker_unsupported(problem: Problem) -> str | None:
    fits = is_grid(problem) and problem.n >= structure.LEAST and problem.m <= structure.LONGEST * problem.n
    return _unsupported(problem) if fits else "the points are no grid of short axes to the kernel"


def _kronecker_features(problem: Problem) -> Features:
    """Eigenvectors of an axis take about twenty times the cube of its length, and two axes are the usual number."""
    return Features(
        300.0, 40.0 * problem.m**3 + 8.0 * problem.n * problem.m, 30.0 * 8 * problem.n + _of_points(problem)
    )


def _kronecker_memory(problem: Problem) -> int:
    return 8 * (20 * problem.m**2 * problem.d + 20 * problem.n) + _of_points(problem)


def register(op: Op) -> None:
    """Register the candidates."""

    def rows_features(problem: Problem) -> Features:
        few = op.features(problem.replace(n=merged_rows(problem)))
        return Features(few.calls + 40, few.flops, few.bytes + _of_points(problem))

    def rows_memory(problem: Problem) -> int:
        return op.memory(problem.replace(n=merged_rows(problem))) + _of_points(problem)

    @op.candidate(
        "merged", accuracy="better", unsupported=_merged_unsupported, features=rows_features, memory=rows_memory
    )
    @or_iterate(op.stock.run)
    def merged(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """The density of each point's mean observation, with the noise of that: one row for equal points."""
        found = repeats.log_prob(marginal, value, exact, ladder)
        return op["fused" if exact else "stock"].run(marginal, value, exact) if found is None else found

    @op.candidate(
        "kronecker",
        accuracy="better",
        unsupported=_kronecker_unsupported,
        features=_kronecker_features,
        memory=_kronecker_memory,
    )
    @or_iterate(op.stock.run)
    def kronecker(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """On a grid, under a product over its axes: eigenvectors of one small matrix for each axis."""
        found = grids.log_prob(marginal, value, exact)
        return op["fused" if exact else "stock"].run(marginal, value, exact) if found is None else found
