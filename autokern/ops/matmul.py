"""The Op `matmul`: a dense matrix times a few columns, the inner loop of conjugate gradients and Lanczos.

A GEMM with few columns is the worst shape for every BLAS. The fastest layout depends on dtype, size and number of
columns, so layouts and paddings are candidates.

Contract: ``|K V - out|`` within ``4 (n + 10)^0.5 eps (|K| |V|)``, entry by entry. Any order of summation stays within
``n eps``; rounding errors of random sign add up to the square root of that.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autokern.core.op import Op, Run
from autokern.core.problem import Features, Problem
from autokern.ops._shared import EPS, is_ours, matrix_problem, moved, on_other_devices, random_matrix

__all__ = ["MATMUL"]

_MOST_COLUMNS = 64


def _memory_of(problem: Problem, rows: int) -> int:
    """Bytes of `rows` columns as long as the product, and of a copy of the right-hand sides."""
    return problem.batch * problem.itemsize * (problem.m * rows + 2 * problem.n * problem.rhs)


class _Matmul(Op):
    name = "matmul"
    summary = "dense matrix times few columns"
    contract = "entries within 4 sqrt(n + 10) eps |K| |V|"

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
        columns = [11, 2, 4, 8, 16, 3, 5, 7, 12, 6, 9, 10, 13, 14, 15, 20, 32, 24, 17, 28, 40, 48, 64, 22, 27, 35, 56]
        base = Problem(op="matmul", m=1000, n=1000, rhs=11, dtype=dtype, device=device, variant="rows")

        def square(n: int, counts: list[int], variant: str = "rows", batch: int = 1) -> list[Problem]:
            return [base.replace(m=n, n=n, rhs=t, variant=variant, batch=batch) for t in counts]

        problems = square(1000, columns[:9]) + square(100, [11, 4], batch=8) + square(800, columns[:8], "columns")
        problems += square(300, columns[:10:2]) + square(2500, [11, 3, 16]) + square(250, [3, 7, 16], batch=40)
        problems += square(1000, columns[9:]) + square(5000, [11, 3]) + square(300, columns[1::2])
        problems += [base.replace(m=m, n=n, rhs=t) for m, n, t in ((200, 2000, 11), (2000, 200, 11), (3000, 500, 5))]
        problems += square(800, columns[8:], "columns") + square(50, [11, 3, 8, 20]) + square(2500, columns[3:16:3])
        if level == "full":
            problems += [p for n in (60, 150, 600, 2000, 4000) for p in square(n, columns)]
            problems += (
                square(7500, columns[::2]) + square(2500, columns[::2], "columns") + square(200, columns, "columns")
            )
            more = [18, 19, 21, 23, 25, 26, 30, 33, 37, 44, 52, 60, 61, 63]
            problems += [p for n in (500, 1500) for p in square(n, more)]
            batches = ((4, 500), (64, 60), (16, 200), (150, 30), (12, 800), (80, 170), (6, 140))
            problems += [p for b, n in batches for p in square(n, [2, 4, 7, 11, 16, 24, 50], batch=b)]
            by_columns = ((20, 300), (50, 60), (110, 210), (6, 1300))
            problems += [p for b, n in by_columns for p in square(n, [2, 4, 6, 7, 11, 16, 22, 40], "columns", batch=b)]
            problems += square(7500, [3, 11, 21, 40], "columns") + square(100, columns[:20:2], batch=120)
            shapes = ((100, 5000), (5000, 100), (1000, 4000), (4000, 1000), (300, 900))
            problems += [base.replace(m=m, n=n, rhs=t) for m, n in shapes for t in (2, 5, 11, 16, 17, 30, 37)]
        return list(dict.fromkeys(problems))

    def features(self, problem: Problem) -> Features:
        entries = problem.batch * problem.m * problem.n
        return Features(
            calls=1 + problem.batch * 0.2, flops=2.0 * entries * problem.rhs, bytes=float(entries * problem.itemsize)
        )

    def memory(self, problem: Problem) -> int:
        """The product, and a copy of the right-hand sides."""
        return _memory_of(problem, problem.rhs)

    def extra_features(self, problem: Problem) -> tuple[float, ...]:
        """Remainders of the columns by 4, 8, 12 and 16 (a BLAS computes them slowly), layout and batch."""
        t = problem.rhs
        aligned = tuple(1.5 if t % width else 0.0 for width in (4, 8, 12, 16))
        return (*aligned, 4.0 if problem.variant == "columns" else 0.0, 1.5 if problem.batch > 1 else 0.0)


MATMUL = _Matmul()


def _small_batch(problem: Problem) -> str | None:
    return None if problem.device == "cpu" or problem.batch == 1 else "for a batch only on a CPU"


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
        """The padded product, and its first columns or its transpose."""
        other = wide(problem.rhs) if product is transposed else problem.rhs
        return _memory_of(problem, wide(problem.rhs) + other)

    run.__doc__ = f"The same as {product.__name__}, with columns padded with zeros to a multiple of {width}."
    MATMUL.candidate(name, unsupported=unsupported, memory=memory)(run)


_add_padded("padded-4", 4, stock)
_add_padded("padded-16", 16, stock)
_add_padded("transposed-padded-4", 4, transposed)

on_other_devices(
    MATMUL,
    moved(stock),
    "torch.matmul on the {}; the time includes all copies.",
    elements=lambda p: p.m * p.n + p.rhs * (p.m + p.n),
)
