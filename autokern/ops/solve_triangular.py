"""The Op `solve_triangular`: a lower triangular matrix solved against several right-hand sides.

Contract: ``|L X - B|`` within ``10 n eps |L| |X|`` (backward stability of substitution, Higham 2002, thm 8.5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autokern import host
from autokern.op import Op
from autokern.ops._shared import (
    EPS,
    is_ours,
    matrix_problem,
    moved,
    needs_accelerator,
    needs_cpu_detour,
    positive_definite,
    random_matrix,
    with_copies,
)
from autokern.problem import Features, Problem

__all__ = ["SOLVE_TRIANGULAR"]


def _key(lower: torch.Tensor, rhs: torch.Tensor) -> Any:
    grad = torch.is_grad_enabled() and (lower.requires_grad or rhs.requires_grad)
    return (*_facts(lower), *_facts(rhs), grad)


def _facts(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.__class__, t.shape, t.dtype, t.device, t.layout)


def _problem_of(lower: torch.Tensor, rhs: torch.Tensor) -> Problem | None:
    if not is_ours(lower, rhs) or lower.shape[:-1] != rhs.shape[:-1] or lower.shape[-1] != lower.shape[-2]:
        return None
    grad = "a" if torch.is_grad_enabled() and (lower.requires_grad or rhs.requires_grad) else ""
    return matrix_problem("solve_triangular", lower, rhs=rhs.shape[-1], grad=grad)


def _sample(problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
    lower = torch.linalg.cholesky(positive_definite(problem, generator)).contiguous()
    rhs = random_matrix(problem, generator, problem.n, problem.rhs)
    return lower.requires_grad_(bool(problem.grad)), rhs.requires_grad_(bool(problem.grad))


def _check(problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
    x, lower, rhs = (t.detach().double() for t in (out, *args))
    gap = (lower @ x - rhs).abs().max().item()
    size = torch.linalg.matrix_norm(lower).max().item() * torch.linalg.matrix_norm(x).max().item()
    return gap / (10 * problem.n * EPS[problem.dtype] * size)


def _grid(level: str, dtype: str, device: str) -> list[Problem]:
    shapes = [(100, 1), (1000, 11), (400, 400), (1000, 1), (2000, 100)]
    if level == "full":
        shapes += [(20, 1), (100, 11), (100, 100), (400, 1), (400, 11), (1000, 1000), (2000, 1), (3000, 30), (50, 2000)]
    problems = [Problem(op="solve_triangular", m=n, n=n, rhs=t, dtype=dtype, device=device) for n, t in shapes]
    if level == "full":
        problems += [
            problems[0].replace(m=n, n=n, rhs=t, batch=b)
            for b, n, t in [(16, 50, 1), (64, 20, 20), (9, 150, 1000), (30, 60, 300)]
        ]
    return problems + [p.replace(grad="a") for p in problems]


def _features(problem: Problem) -> Features:
    backward = 4 if problem.grad else 1
    return Features(
        calls=1 + problem.batch * backward,
        flops=backward * problem.batch * problem.n**2 * problem.rhs * 1.0,
        bytes=backward * problem.batch * problem.itemsize * (problem.n**2 + 4.0 * problem.n * problem.rhs),
    )


def _memory_of(copies: float) -> Callable[[Problem], int]:
    """Return the memory for so many matrices of the size of the solution; gradients take a solution and a product."""

    def memory(problem: Problem) -> int:
        backward = problem.n**2 + problem.n * problem.rhs if problem.grad else 0
        return int(problem.batch * problem.itemsize * (copies * problem.n * problem.rhs + backward))

    return memory


SOLVE_TRIANGULAR = Op(
    "solve_triangular",
    summary="lower triangular system with several right-hand sides",
    contract="|LX - B| within 10 n eps |L| |X|",
    key=_key,
    problem_of=_problem_of,
    reference=lambda lower, rhs: torch.linalg.solve_triangular(lower, rhs, upper=False),
    sample=_sample,
    check=_check,
    grid=_grid,
    features=_features,
    memory=_memory_of(1.15),
)


@SOLVE_TRIANGULAR.candidate("stock")
def stock(lower: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """torch.linalg.solve_triangular where the data lies (trsm)."""
    return torch.linalg.solve_triangular(lower, rhs, upper=False)


@SOLVE_TRIANGULAR.candidate("from-right")
def from_right(lower: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """The transposed system solved from the right: row-major right-hand sides need no copy."""
    return torch.linalg.solve_triangular(lower.mT, rhs.mT, upper=True, left=False).mT


@SOLVE_TRIANGULAR.candidate("column-major", memory=_memory_of(2.15))
def column_major(lower: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Right-hand sides turned to column-major order first."""
    return torch.linalg.solve_triangular(lower, rhs.mT.contiguous().mT, upper=False)


_copied = with_copies(_features, lambda p: p.n**2 + 2 * p.n * p.rhs)
on_cpu = moved(stock, lambda: torch.device("cpu"))
on_cpu.__doc__ = "Solved on the CPU, all copies charged."
SOLVE_TRIANGULAR.candidate("cpu", why_not=needs_cpu_detour, features=_copied)(on_cpu)
on_accelerator = moved(stock, host.accelerator)
on_accelerator.__doc__ = "Solved on the accelerator, all copies charged."
SOLVE_TRIANGULAR.candidate("accelerator", why_not=needs_accelerator, features=_copied)(on_accelerator)
