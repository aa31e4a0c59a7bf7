"""The Op `matmul`: a dense matrix times a few columns, the inner loop of conjugate gradients and Lanczos.

A GEMM with few columns is a bad shape for every BLAS. The fastest layout depends on dtype, size and number of columns,
so layouts and paddings are candidates.

Contract: ``|K V - out|`` within ``4 (n + 10)^0.5 eps (|K| |V|)``, entry by entry. Any order of summation stays within
``n eps``; rounding errors of random sign add up to the square root of that.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autokern.core.op import Op, Run
from autokern.core.problem import Features, Problem
from autokern.ops._shared.problems import EPS, is_ours, matrix_problem, moved, on_other_devices, only, random_matrix

_MOST_COLUMNS = 64


def _memory_of(problem: Problem, rows: int) -> int:
    """Return the bytes of `rows` columns of length m, and of a padded copy of the right-hand sides."""
    return problem.batch * problem.itemsize * (problem.m * rows + 2 * problem.n * problem.rhs)


class _Matmul(Op):
    name = "matmul"
    summary = "dense matrix times few columns"

    def key(self, matrix: torch.Tensor, rhs: torch.Tensor) -> Any:
        return (
            matrix.__class__, rhs.__class__, matrix.shape, rhs.shape, matrix.dtype, rhs.dtype, matrix.device,
            rhs.device, rhs.layout, matrix.stride(-1) == 1 if matrix.layout is torch.strided else None,
            torch.is_grad_enabled() and (matrix.requires_grad or rhs.requires_grad),
        )  # fmt: skip

    def problem_of(self, matrix: torch.Tensor, rhs: torch.Tensor) -> Problem | None:
        if not is_ours(matrix, rhs) or matrix.shape[:-2] != rhs.shape[:-2] or not 2 <= rhs.shape[-1] <= _MOST_COLUMNS:
            return None
        if matrix.shape[-1] < 8 or matrix.shape[-2] < 8:
            return None
        if torch.is_grad_enabled() and (matrix.requires_grad or rhs.requires_grad):
            return None
        layout = "rows" if matrix.stride(-1) == 1 else "columns"
        return matrix_problem("matmul", matrix, rhs=rhs.shape[-1], variant=layout)

    def reference(self, matrix: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        return torch.matmul(matrix, rhs)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        if problem.variant == "columns":
            matrix = random_matrix(problem, generator, problem.n, problem.m).mT
        else:
            matrix = random_matrix(problem, generator, problem.m, problem.n)
        return matrix, random_matrix(problem, generator, problem.n, problem.rhs)

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        matrix, rhs = args
        rows = slice(None) if problem.m * problem.n * problem.batch <= 2**22 else slice(0, problem.m, problem.m // 64)
        exact = matrix[..., rows, :].double() @ rhs.double()
        reach = matrix[..., rows, :].double().abs() @ rhs.double().abs()
        gap = (out[..., rows, :].double() - exact).abs() / reach.clamp_min(1e-300)
        return gap.max().item() / (4 * math.sqrt(problem.n + 10) * EPS[problem.dtype])

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full, both = level == "full", ("rows", "columns")
        columns = [11, 2, 4, 8, 16, 3, 5, 7] + ([12, 9, 32, 17, 64, 40] if full else [])
        base = Problem(op="matmul", m=1000, n=1000, rhs=11, dtype=dtype, device=device, variant="rows")
        sizes = [1000, 300, 2500] + ([50, 600, 7500] if full else [])
        problems = [base.replace(m=n, n=n, rhs=t, variant=v) for n in sizes for v in both for t in columns]
        batches = [(8, 100), (40, 250)] + ([(150, 30), (6, 1300)] if full else [])
        problems += [
            base.replace(m=n, n=n, rhs=t, variant=v, batch=b) for b, n in batches for v in both for t in (11, 4)
        ]
        shapes = [(200, 2000), (2000, 200)] + ([(100, 5000), (5000, 100), (300, 900)] if full else [])
        return problems + [base.replace(m=m, n=n, rhs=t) for m, n in shapes for t in (11, 5)]

    def features(self, problem: Problem) -> Features:
        entries = problem.elements
        return Features(
            calls=1 + problem.batch * 0.2, flops=2.0 * entries * problem.rhs, bytes=float(entries * problem.itemsize)
        )

    def memory(self, problem: Problem) -> int:
        """Return the bytes of the product and of a copy of the right-hand sides."""
        return _memory_of(problem, problem.rhs)


MATMUL = _Matmul()


_small_batch = only("for a batch only on a CPU", lambda p: p.device == "cpu" or p.batch == 1)


@MATMUL.candidate("stock")
def stock(matrix: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """torch.matmul."""
    return torch.matmul(matrix, rhs)


@MATMUL.candidate("transposed", unsupported=_small_batch, memory=lambda problem: _memory_of(problem, 2 * problem.rhs))
def transposed(matrix: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """(V^T K^T)^T with V in column-major order."""
    return torch.matmul(rhs.mT.contiguous(), matrix.mT).mT.contiguous()


@MATMUL.candidate("column-major", unsupported=_small_batch)
def column_major(matrix: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """K V with V in column-major order."""
    return torch.matmul(matrix, rhs.mT.contiguous().mT)


def _add_padded(name: str, width: int, product: Run) -> None:
    """Register a product with columns padded to a multiple of `width`."""

    def wide(columns: int) -> int:
        return -(-columns // width) * width

    def run(matrix: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        columns = rhs.shape[-1]
        padded = rhs.new_zeros(*rhs.shape[:-1], wide(columns))
        padded[..., :columns] = rhs
        return product(matrix, padded)[..., :columns].contiguous()

    def unsupported(problem: Problem) -> str | None:
        if problem.rhs % width == 0:
            return f"the number of columns is a multiple of {width} already"
        doubled = wide(problem.rhs) > 2 * max(problem.rhs, 4)
        return "padding more than doubles the work" if doubled else _small_batch(problem)

    def memory(problem: Problem) -> int:
        """Return the bytes of the padded product, and of its first columns or its transpose."""
        other = wide(problem.rhs) if product is transposed else problem.rhs
        return _memory_of(problem, wide(problem.rhs) + other)

    run.__doc__ = f"The same as {product.__name__}, with columns padded with zeros to a multiple of {width}."
    MATMUL.candidate(name, unsupported=unsupported, memory=memory)(run)


_add_padded("padded-4", 4, stock)
_add_padded("padded-16", 16, stock)
_add_padded("transposed-padded-4", 4, transposed)

on_other_devices(MATMUL, moved(stock), "torch.matmul on the {}; the time includes all copies.")
