"""The candidate ``preconditioned`` of `exact_log_prob`: large systems solved to a stated residual."""

from __future__ import annotations

import torch
from linear_operator import settings as library

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.gp import iterated_density
from autokern.gp.marginal import Marginal, ingredients
from autokern.gp.preconditioners.choice import footprint, kept_for
from autokern.gp.preconditioners.pivoted import most
from autokern.gp.solved import tolerance
from autokern.ops._iterations import as_own_iterations, to_a_residual
from autokern.ops._shared import families, iterates, of_trees

__all__ = ["register"]

_LEAST = 1000
"""Points below which a factorisation takes less."""
_PRODUCTS = 12
"""Products that a density takes, about."""


def _unsupported(problem: Problem) -> str | None:
    if not iterates(problem):
        return "the covariance is factorised"
    if problem.n < _LEAST or problem.batch > 1 or problem.device != "cpu":
        return f"for one matrix of {_LEAST} points or more on the CPU"
    return of_trees(problem) or ("the points require gradients" if "x" in problem.grad.split("/") else None)


def _is_held(problem: Problem) -> bool:
    return problem.n**2 * problem.itemsize <= iterated_density.DENSE


def _memory(problem: Problem) -> int:
    matrix = problem.n**2 * problem.itemsize if _is_held(problem) else 2**26
    return matrix + footprint(problem.n) + problem.n * 210 * 8


def _features(problem: Problem) -> Features:
    elements, leaves = float(problem.n**2), len(families(problem))
    kernel = elements * 6.0 * problem.d * leaves
    evaluated = 4.0 if _is_held(problem) else 3.0 + _PRODUCTS / 2
    flops = kernel * evaluated + elements * 22.0 * _PRODUCTS + problem.n * (30.0 + most(problem.n) ** 2 * 6.0)
    moved = elements * problem.itemsize * (evaluated * 3.0 * leaves + (_PRODUCTS if _is_held(problem) else 0.0))
    return Features(3000.0, flops, moved)


def register(op: Op) -> None:
    """Register the candidate; `matrix-free` serves where iterations do not converge."""

    @op.candidate(
        "preconditioned",
        accuracy="better",
        unsupported=_unsupported,
        features=_features,
        memory=_memory,
        parts=True,
        as_stock=True,
        obeys=as_own_iterations,
        error=to_a_residual("; the log determinant and its gradient by probes, whose standard error calls tell"),
    )
    def preconditioned(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """Conjugate gradients to a stated residual, preconditioned by neighbours or pivots as this system needs it."""
        kernel, x = marginal.lazy.kernel, marginal.lazy.x1
        found = iterated_density.log_prob(
            *ingredients(marginal, value), kept_for(kernel, x), library.num_trace_samples.value(), tolerance(x.dtype)
        )
        return op["matrix-free"].run(marginal, value, exact) if found is None else found
