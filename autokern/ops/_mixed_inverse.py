"""The candidate ``mixed-inverse`` of `exact_log_prob`: a factor in double precision, its inverse in single.

Bound: the value is that of `fused`; the inverse misses ``tr(K^-1 K) = n`` by at most 1e-4 effective degrees of freedom,
the solution by at most 1e-3 of its norm, and the gradient by the log of each hyperparameter by an estimated 1e-3 of its
terms, on the caller's own system, else an inverse in double precision serves.
"""

from __future__ import annotations

import torch

from autokern.core.candidate import Error
from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.gp import likelihood
from autokern.gp.library_orders import TIGHT
from autokern.gp.marginal import Marginal, ingredients
from autokern.gp.mixed_inverse import OF_EACH, OF_SOLUTION, OF_TRACE, mixed_for
from autokern.gp.originals import psd_safe_cholesky as ladder
from autokern.ops._iterations import or_iterate
from autokern.ops._shared import families, iterates, of_trees

__all__ = ["register"]

_LEAST = 1000
"""Points below which other candidates take as long."""
_CANCELLED = 10.0
"""How much larger the terms of a gradient may be than the gradient."""
_TILES = 2**26
"""Bytes of the tiles on which derivatives are formed."""


def _unsupported(problem: Problem) -> str | None:
    if not iterates(problem):
        return "the covariance is factorised, and gradients to the last digit are expected"
    if TIGHT in problem.words:
        return "its check lets more pass than your cg_tolerance"
    if problem.n < _LEAST or problem.batch > 1 or problem.device != "cpu" or problem.dtype != "float64":
        return f"for one matrix of {_LEAST} points or more in double precision on the CPU"
    return of_trees(problem) or ("the points require gradients" if "x" in problem.grad.split("/") else None)


def _memory(problem: Problem) -> int:
    """A matrix in double precision, one in single, and the tiles of a few threads."""
    return int(1.55 * problem.n**2 * problem.itemsize) + _TILES * min(2, len(families(problem)))


def _features(problem: Problem) -> Features:
    elements, leaves = float(problem.n**2), len(families(problem))
    flops = elements * (2 / 3 * problem.n + 4.0 * problem.d * leaves)
    return Features(60.0 + 20 * leaves, flops, (6.0 + 4.0 * leaves) * elements * problem.itemsize)


def _error(problem: Problem) -> Error:
    check = (
        f"tr(K^-1 K) to {OF_TRACE:.0e} degrees of freedom, the solution to {OF_SOLUTION:.0e}, "
        f"each gradient to {OF_EACH:.0e} of its terms by an estimate"
    )
    words = f"the value is exact; the single-precision inverse of the gradients is checked on your system ({check})"
    return Error("checked", f"{words}, else one in double precision serves", gradients=_CANCELLED * OF_EACH)


def register(op: Op) -> None:
    """Register the candidate."""

    @op.candidate(
        "mixed-inverse", accuracy="better", unsupported=_unsupported, features=_features, memory=_memory, error=_error
    )
    @or_iterate(op.stock.run)
    def by_single(marginal: Marginal, value: torch.Tensor, exact: bool) -> torch.Tensor:
        """`fused` with an inverse in single precision: the value exact, and gradients whose error is seen."""
        own = mixed_for(marginal.lazy.kernel)
        return likelihood.log_prob(*ingredients(marginal, value), ladder, gradients=own)
