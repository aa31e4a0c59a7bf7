"""The Op `cholesky_inverse`: the inverse of a matrix from its lower Cholesky factor.

Contract: ``X`` is within ``10 n eps |X| kappa(L)^2`` of ``(L L^T)^-1``, measured as ``|X L L^T - I|``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autokern import host
from autokern.op import Op
from autokern.ops._shared import (
    EPS,
    matrix_key,
    matrix_problem,
    moved,
    needs_accelerator,
    needs_cpu_detour,
    positive_definite,
    with_copies,
)
from autokern.ops._triangular import inverse_from_cholesky, inverse_lower
from autokern.problem import Features, Problem

__all__ = ["CHOLESKY_INVERSE"]


def _problem_of(lower: torch.Tensor) -> Problem | None:
    problem = matrix_problem("cholesky_inverse", lower)
    return problem if problem is None or problem.m == problem.n else None


def _sample(problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
    lower = torch.linalg.cholesky(positive_definite(problem, generator))
    return (lower.contiguous().requires_grad_(bool(problem.grad)),)


def _check(problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
    x, lower = out.detach().double(), args[0].detach().double()
    a = lower @ lower.mT
    gap = (x @ a - torch.eye(problem.n, dtype=x.dtype, device=x.device)).abs().max().item()
    size = torch.linalg.matrix_norm(x).max().item() * torch.linalg.matrix_norm(a).max().item()
    return gap / (10 * problem.n * EPS[problem.dtype] * size)


def _grid(level: str, dtype: str, device: str) -> list[Problem]:
    sizes = [100, 400, 1000, 2000] if level == "quick" else [20, 100, 200, 300, 400, 600, 1000, 1500, 2000, 3000]
    problems = [Problem(op="cholesky_inverse", m=n, n=n, dtype=dtype, device=device) for n in sizes]
    batched = (
        [(8, 50), (4, 250)]
        if level == "quick"
        else [(8, 50), (4, 250), (64, 20), (16, 400), (30, 40), (4, 420), (100, 100), (6, 1000), (16, 180)]
    )
    return problems + [
        Problem(op="cholesky_inverse", m=n, n=n, batch=b, dtype=dtype, device=device) for b, n in batched
    ]


def _features(problem: Problem) -> Features:
    elements = problem.batch * problem.n**2
    return Features(
        calls=1 + problem.batch * max(1, problem.n / 96),
        flops=elements * problem.n * 5 / 6,
        bytes=4.0 * elements * problem.itemsize,
    )


def _memory_of(matrices: float) -> Callable[[Problem], int]:
    def memory(problem: Problem) -> int:
        return int(matrices * problem.batch * problem.n**2 * problem.itemsize)

    return memory


def _reference(lower: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(lower @ lower.mT)


CHOLESKY_INVERSE = Op(
    "cholesky_inverse",
    summary="inverse of a positive definite matrix from its lower Cholesky factor",
    contract="XA = I within 10 n eps |X| |A|",
    key=matrix_key,
    problem_of=_problem_of,
    reference=_reference,
    sample=_sample,
    check=_check,
    grid=_grid,
    features=_features,
    memory=_memory_of(1.02),
)


def _no_gradients(problem: Problem) -> str | None:
    return "works in place, without gradients" if problem.grad else None


@CHOLESKY_INVERSE.candidate("stock")
def stock(lower: torch.Tensor) -> torch.Tensor:
    """LAPACK's potri."""
    return torch.cholesky_inverse(lower)


def _is_singular(lower: torch.Tensor) -> bool:
    """Whether LAPACK would refuse a factor."""
    return not bool(lower.diagonal(dim1=-2, dim2=-1).all())


@CHOLESKY_INVERSE.candidate("recursive", why_not=_no_gradients, memory=_memory_of(1.85))
def recursive(lower: torch.Tensor) -> torch.Tensor:
    """Recursion on halves, nearly all of it products."""
    return stock(lower) if _is_singular(lower) else inverse_from_cholesky(lower)


@CHOLESKY_INVERSE.candidate("triangular", why_not=_no_gradients, memory=_memory_of(2.1))
def triangular(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of the factor by recursion, then one product."""
    if _is_singular(lower):
        return stock(lower)
    x = inverse_lower(lower)
    return x.mT @ x


_copied = with_copies(_features, lambda p: 2 * p.n**2)
on_cpu = moved(stock, lambda: torch.device("cpu"))
on_cpu.__doc__ = "potri on the CPU, both copies charged."
CHOLESKY_INVERSE.candidate("cpu", why_not=needs_cpu_detour, features=_copied, memory=_memory_of(2))(on_cpu)
on_accelerator = moved(stock, host.accelerator)
on_accelerator.__doc__ = "potri on the accelerator, both copies charged."
CHOLESKY_INVERSE.candidate("accelerator", why_not=needs_accelerator, features=_copied, memory=_memory_of(2))(
    on_accelerator
)
