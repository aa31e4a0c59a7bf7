"""What candidates of `predict` cost: time by operations, memory by matrices, and where they cannot serve."""

from __future__ import annotations

from collections.abc import Callable

from autokern.core.problem import Features, Problem
from autokern.ops._shared import iterates

BLOCK = 1024
"""Test points of a block."""
_LANCZOS = 100
"""Steps of the library's Lanczos root."""
_SOLVING = 30
"""Steps of conjugate gradients at the library's tolerance for predictions, as they are on the samples."""


def is_fast(problem: Problem) -> bool:
    """Whether `fast_pred_var` is on."""
    return "fast" in problem.words


def is_grown(problem: Problem) -> bool:
    """Whether the inverse factor grew by new data, so that there is no other."""
    return "grown" in problem.words


def features(problem: Problem) -> Features:
    """Return what variances cost without the joint covariance."""
    elements = problem.batch * problem.m * problem.n
    first = problem.n**3 / 3 if iterates(problem) else 0.0
    passes = 12.0 if problem.grad else 6.0
    return Features(60.0, elements * (problem.n + 2.0 * problem.d) + first, passes * elements * problem.itemsize)


def joint_features(problem: Problem) -> Features:
    """Return the same with the joint covariance of all test points."""
    plain, joint = features(problem), problem.batch * problem.m**2
    flops = plain.flops + joint * 2.0 * (problem.n + problem.d)
    return Features(plain.calls, flops, plain.bytes + 6.0 * joint * problem.itemsize)


def stock_features(problem: Problem) -> Features:
    """Return what the library does: it forms the joint covariance, and above `max_cholesky_size` it iterates."""
    joint, square = joint_features(problem), float(problem.n**2)
    if is_grown(problem):  # its root has to be put together
        return Features(joint.calls, joint.flops, joint.bytes + 4.0 * problem.batch * square * problem.itemsize)
    if not iterates(problem):
        return joint
    columns, steps = (1.0, _LANCZOS) if is_fast(problem) else (1.0 + problem.m, _SOLVING)
    flops = joint.flops + 2.0 * steps * square * columns - problem.n**3 / 3
    return Features(joint.calls + 20.0 * steps, max(flops, 0.0), joint.bytes + steps * square * problem.itemsize)


def memory_of(joint: int, rows: float, factors: int, kept: int = 1) -> Callable[[Problem], int]:
    """Return the memory for so many joint matrices, rows of all test points, and factors of the training covariance.

    Where stock iterates, the factor is not there yet and is made from the matrix; gradients keep `kept` more factors.
    """

    def memory(problem: Problem) -> int:
        m, n, b = problem.m, problem.n, problem.batch
        made = factors + (2 if iterates(problem) else 0) + (kept if problem.grad else 0)
        each = rows + (1 if problem.grad else 0)
        return int(joint * b * m * m + each * b * m * n + made * n * n) * problem.itemsize + 2**22

    return memory


def stock_memory(problem: Problem) -> int:
    """Return rows of the cross covariance and what multiplies them; prior, what is explained, and what is left."""
    return memory_of(3, 2 if is_fast(problem) else 3, 2, kept=2)(problem)


def only_grown(problem: Problem) -> str | None:
    """Reason against products by the inverse factor as an alternative."""
    return "the inverse factor is all there is" if is_grown(problem) else None


def rows_unsupported(problem: Problem) -> str | None:
    """Reason against blocks of test points."""
    if problem.grad:
        return "gradients keep the blocks anyway"
    return None if problem.m > BLOCK else f"no more than {BLOCK} test points"


def rows_memory(problem: Problem) -> int:
    """Return the memory of one block."""
    return memory_of(0, 3.5, 1)(problem.replace(m=min(problem.m, BLOCK)))


def rows_features(problem: Problem) -> Features:
    """Return what variances cost in blocks."""
    plain = features(problem)
    return Features(plain.calls * (1 + problem.m / BLOCK), plain.flops, plain.bytes)
