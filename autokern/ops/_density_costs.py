"""What the candidates of `exact_log_prob` take that factorise, and which problems arrays serve."""

from __future__ import annotations

from collections.abc import Callable

from autokern.core.problem import Problem
from autokern.gp import array_density, leaves, likelihood
from autokern.ops._shared import LOW_RANK, families

__all__ = ["arrays_unsupported", "in_place"]


def in_place(single: float, batched: float) -> Callable[[Problem], int]:
    """Return the memory of so many matrices and of strips of rows, which do not grow; a batch is taken whole.

    What is then formed beside the matrices: their derivative, once for each family; values and slopes of each, of which
    an RBF's are the same; and a product of two of those, but for a single RBF.
    """

    def memory(problem: Problem) -> int:
        elements, names = problem.batch * problem.n**2 * problem.itemsize, families(problem)
        if problem.batch == 1:
            block = min(elements, likelihood.block_bytes(problem.device))
            copies = 0 if problem.device == "cpu" else 2 * elements  # factor and inverse are not made in place there
            return int(single * elements) + copies + 12 * block * min(2, len(names))
        each = len(names) + sum(1 if name == "rbf" else 2 for name in names) + (names != ["rbf"])
        return int((batched + each) * elements)

    return memory


def arrays_unsupported(problem: Problem) -> str | None:
    """Return why a problem is none for `arrays`, or None."""
    most = array_density.MOST.get(problem.dtype, 0)
    if problem.device != "cpu" or problem.n > most or problem.batch * problem.n > array_density.MOST_ROWS:
        return f"for {most} points at most on the CPU, and batches of {array_density.MOST_ROWS} together"
    if families(problem) == ["linear"]:
        return LOW_RANK
    return None if set(families(problem)) <= leaves.FAMILIES else "for kernels that are taken apart"
