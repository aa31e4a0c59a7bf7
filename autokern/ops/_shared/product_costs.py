"""Costs of products with kernel matrices: work, and peak bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autokern.core.problem import Features, Problem
from autokern.kernels.family import known_family
from autokern.ops._shared.problems import Bytes, families
from autokern.system import thread_pool


def is_same(problem: Problem) -> bool:
    """Whether both sets are the same points."""
    return "same" in problem.words


def leaves(problem: Problem) -> int:
    """Return the number of leaves of the kernel's tree."""
    return len(families(problem))


def of_passes(problem: Problem, passes: float) -> Features:
    """Return the work of a product that makes `passes` passes over all elements of the matrix."""
    backward = 1 + 2 * bool(problem.grad)
    count, parts = problem.elements * backward, leaves(problem)
    flops = 2.0 * count * (parts * (problem.d + 2) + problem.rhs)
    return Features(10.0 * parts * backward * problem.batch, flops, count * problem.itemsize * passes)


def of_stock(problem: Problem) -> Features:
    """Return the work of gpytorch's matrix and a product with it."""
    each = (
        of.stock_passes(problem.d) if (of := known_family(name)) else 60.0 * problem.d for name in families(problem)
    )
    return of_passes(problem, sum(each))


def of_outputs(problem: Problem) -> int:
    """Return the bytes of results and of copies of the points, embedded and centred with norms, also for gradients."""
    sets = (3 if problem.grad else 2) if is_same(problem) else (5 if problem.grad else 3)
    sides = sets * (problem.m + problem.n) * (problem.d + 2) * leaves(problem)
    return problem.itemsize * (sides + problem.batch * 3 * problem.rhs * (problem.m + problem.n))


def in_tiles(tile: int) -> Callable[[Problem], int]:
    """Return the memory rule of a product tile by tile."""

    def memory(problem: Problem) -> int:
        held = leaves(problem) * (1 + 3 * bool(problem.grad)) + bool(problem.grad)
        workers = thread_pool.size(torch.device(problem.device))
        one = min(tile, problem.m) * min(tile, problem.n) * problem.itemsize
        return of_outputs(problem) + workers * held * one

    return memory


def in_matrices(matrices: float) -> Bytes:
    """Return the memory rule of a product with the whole matrix; gradients take `matrices` matrices."""

    def memory(problem: Problem) -> int:
        each = matrices if problem.grad else 1.0
        return int(each * problem.elements * problem.itemsize) + of_outputs(problem)

    return memory
