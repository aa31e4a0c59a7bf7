"""Peak bytes of candidates of `kernel_matrix`, from the number of matrices that live at once.

``calibration/memory.py`` measures these. Forward and backward pass count together, without the cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autokern.core.problem import Problem
from autokern.kernels import matrix
from autokern.kernels.blocks import bytes_on
from autokern.kernels.family import known_family
from autokern.ops._shared.problems import families

_MAIN = ("rbf", "matern12", "matern32", "matern52")


def by_family(forward: Sequence[int], with_gradients: Sequence[int], **others: int) -> Callable[[Problem], int]:
    """Return a memory rule from the number of matrices at the peak, without and with gradients, of each main family.

    `others` are numbers of further families with gradients; the rest counts as the largest.
    """

    def memory(problem: Problem) -> int:
        counts = dict(zip(_MAIN, with_gradients if problem.grad else forward, strict=True))
        counts |= others if problem.grad else {}
        each = [counts.get(name, max(counts.values())) for name in families(problem)]
        return problem.elements * problem.itemsize * (sum(each) + (len(each) > 1))

    return memory


_IN_ONE_FUNCTION = by_family((2, 2, 2, 3), (5, 5, 5, 5))
_BY_AUTOGRAD = by_family((2, 3, 4, 5), (5, 6, 7, 10))
_EQUAL_BY_AUTOGRAD = by_family((2, 3, 4, 5), (5, 8, 9, 11))


def of_stock(problem: Problem) -> int:
    """Return stock's bytes: with one lengthscale and no gradients by points one function, else what autograd keeps."""
    others = [of for name in families(problem) if name not in _MAIN and (of := known_family(name)) is not None]
    if others:
        kept = [of.kept(problem.d) for of in others]
        most = sum(2 * k for k in kept) + 1 if problem.grad else sum(max(4, 2 * k // 3) for k in kept)
        most += 10 * (len(families(problem)) - len(others))
        return problem.elements * problem.itemsize * most
    _, points, ard = (*problem.variant.split("/"), "", "")[:3]
    if ard != "ard" and "x" not in problem.grad.split("/"):
        return _IN_ONE_FUNCTION(problem)
    return (_EQUAL_BY_AUTOGRAD if points == "same" else _BY_AUTOGRAD)(problem)


def of_strips(problem: Problem) -> int:
    """Return the bytes of the matrix, of its slopes, and of a few strips of rows, of constant size."""
    whole, name = problem.m * problem.n * problem.itemsize, problem.words[0]
    each = min(bytes_on(matrix.CACHED, problem.device), whole)
    kept = problem.grad and name in ("matern12", "matern32", "matern52")
    return whole * (2 if kept else 1) + (2 if name in _MAIN else 8 * len(families(problem))) * each


def of_differences(problem: Problem) -> int:
    """Return the bytes of all coordinate differences ``(m, n, d)`` and of their squares."""
    wide = sum(2 if name == "periodic" else 1 for name in families(problem))
    each = problem.elements * problem.itemsize * (2 if problem.grad else 1)
    return each * (2 * problem.d * wide + 1)


def of_compiled(problem: Problem) -> int:
    """Return the bytes of the matrix, and of a mask that clears the diagonal of distances between the same points."""
    return problem.elements * problem.itemsize * (2 if "same" in problem.words else 1)
