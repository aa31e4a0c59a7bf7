"""The Op `eigh`: eigenvalues in ascending order and eigenvectors of a symmetric matrix.

Contract: ``A V = V diag(w)`` and ``V^T V = I`` to 20 n eps (relative to max |A|); signs of eigenvectors are free.
"""

from __future__ import annotations

from typing import Any

import torch

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.ops._shared import EPS, matrix_key, matrix_problem, moved, on_other_devices, positive_definite

__all__ = ["EIGH"]

Pair = tuple[torch.Tensor, torch.Tensor]


def _native(a: torch.Tensor) -> Pair:
    values, vectors = torch.linalg.eigh(a)
    return values, vectors


class _Eigh(Op):
    name = "eigh"
    summary = "eigenvalues and eigenvectors of a symmetric matrix"
    contract = "AV = V diag(w), V orthonormal, within 20 n eps; w ascending; signs of V free"

    key = staticmethod(matrix_key)

    def problem_of(self, a: torch.Tensor) -> Problem | None:
        return matrix_problem("eigh", a, square=True)

    def reference(self, a: torch.Tensor) -> Pair:
        return _native(a)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        return (positive_definite(problem, generator).requires_grad_(bool(problem.grad)),)

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        values, vectors, a = out[0].detach().double(), out[1].detach().double(), args[0].detach().double()
        scale = a.abs().max().item() or 1.0
        unit = 20 * problem.n * EPS[problem.dtype]
        gap = (a @ vectors - vectors * values.unsqueeze(-2)).abs().max().item() / scale
        gram = (vectors.mT @ vectors - torch.eye(problem.n, dtype=a.dtype, device=a.device)).abs().max().item()
        descent = (values[..., :-1] - values[..., 1:]).clamp_min(0).max().item() / scale if problem.n > 1 else 0.0
        return max(gap, gram, descent) / unit

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        sizes = [10, 30, 100, 400] if level == "quick" else [3, 10, 20, 32, 50, 100, 200, 400, 800, 1500]
        batched = [(16, 30)] if level == "quick" else [(16, 30), (100, 10), (8, 100), (256, 5)]
        problems = [Problem(op="eigh", m=n, n=n, dtype=dtype, device=device) for n in sizes]
        return problems + [Problem(op="eigh", m=n, n=n, batch=b, dtype=dtype, device=device) for b, n in batched]

    def features(self, problem: Problem) -> Features:
        elements = problem.batch * problem.n**2
        backward = 2 if problem.grad else 1
        return Features(
            calls=1 + problem.batch * backward,
            flops=backward * 9.0 * elements * problem.n,
            bytes=backward * 8.0 * elements * problem.itemsize,
        )

    def memory(self, problem: Problem) -> int:
        """The vectors of all matrices, and LAPACK's workspace of two matrices (divide and conquer)."""
        return int((problem.batch + 2.1) * problem.n**2 * problem.itemsize) * (2 if problem.grad else 1)

    def canonical(self, out: Any) -> Any:
        """Eigenvalues and squared entries of eigenvectors, which do not depend on signs."""
        values, vectors = out
        return values, vectors.square()


EIGH = _Eigh()


@EIGH.candidate("stock")
def stock(a: torch.Tensor) -> Pair:
    """torch.linalg.eigh on the tensor's own device."""
    return _native(a)


on_other_devices(
    EIGH, moved(_native), "torch.linalg.eigh on the {}; the time includes both copies.", lambda p: 2 * p.n**2 + p.n
)
