"""Bytes that candidates of `kernel_matrix` take at their peak, from the matrices that live at once.

``calibration/memory.py`` measures them. A backward pass counts with its forward pass, its cotangent does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autokern.core.problem import Problem
from autokern.kernels import analytic

__all__ = ["by_family", "of_compiled", "of_differences", "of_each", "of_stock", "of_strips"]


def by_family(forward: Mapping[str, int], with_gradients: Mapping[str, int]) -> Callable[[Problem], int]:
    """Return the memory of a candidate from the matrices that live at once at its peak, counted for each family.

    ``calibration/memory.py`` measures them; a backward pass counts with its forward pass, its cotangent does not.
    """

    def memory(problem: Problem) -> int:
        counts = with_gradients if problem.grad else forward
        family = problem.variant.split("/")[0]
        return problem.batch * problem.m * problem.n * problem.itemsize * counts.get(family, max(counts.values()))

    return memory


def of_each(rbf: int, matern12: int, matern32: int, matern52: int) -> dict[str, int]:
    return {"rbf": rbf, "matern12": matern12, "matern32": matern32, "matern52": matern52}


_IN_ONE_FUNCTION = by_family(of_each(2, 2, 2, 3), of_each(5, 5, 5, 5))
_BY_AUTOGRAD = by_family(of_each(2, 3, 4, 5), of_each(5, 6, 7, 10))
_EQUAL_BY_AUTOGRAD = by_family(of_each(2, 3, 4, 5), of_each(5, 8, 9, 11))


def of_stock(problem: Problem) -> int:
    """gpytorch has a function of its own for one lengthscale and no gradients by points; else autograd keeps steps."""
    _, points, ard = (*problem.variant.split("/"), "", "")[:3]
    if ard != "ard" and "x" not in problem.grad.split("/"):
        return _IN_ONE_FUNCTION(problem)
    return (_EQUAL_BY_AUTOGRAD if points == "same" else _BY_AUTOGRAD)(problem)


def of_strips(problem: Problem) -> int:
    """A few strips of rows beside the matrix, which themselves do not grow with it."""
    return _whole(problem) + 2 * min(analytic.block_bytes(problem.device), problem.m * problem.n * problem.itemsize)


_whole = by_family(of_each(1, 1, 1, 1), of_each(1, 2, 2, 2))


def of_differences(problem: Problem) -> int:
    """All differences at once, and what becomes of them."""
    return problem.batch * problem.m * problem.n * problem.itemsize * (2 * problem.d + 1) * (2 if problem.grad else 1)


def of_compiled(problem: Problem) -> int:
    """What distances are multiplied by, to clear the diagonal, is a matrix of its own."""
    return problem.batch * problem.m * problem.n * problem.itemsize * (2 if "same" in problem.variant.split("/") else 1)
