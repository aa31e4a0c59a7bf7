"""The Op `cholesky`: the lower Cholesky factor, with jitter where the matrix is not numerically positive definite.

Contract: ``L L^T = A`` to 20 n eps max |A|. Where the plain factorisation fails, the library's own code adds jitter,
warns and raises NanError or NotPSDError.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.op import Op, Run
from autokern.core.problem import Features, Problem
from autokern.model import originals
from autokern.ops._shared.problems import (
    EPS,
    matrix_key,
    matrix_problem,
    moved,
    on_other_devices,
    positive_definite,
    squares,
)
from autokern.system import buffers

_stock_cholesky = originals.psd_safe_cholesky
Pair = tuple[torch.Tensor, torch.Tensor]


class _Cholesky(Op):
    name = "cholesky"
    summary = "lower Cholesky factor, with jitter where the library adds it"
    raises = (NanError, NotPSDError)

    key = staticmethod(matrix_key)

    def problem_of(self, a: torch.Tensor, *options: Any) -> Problem | None:
        return matrix_problem("cholesky", a, square=True)

    def reference(self, a: torch.Tensor, *options: Any) -> torch.Tensor:
        return torch.linalg.cholesky(a)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        return (positive_definite(problem, generator).requires_grad_(bool(problem.grad)),)

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        lower, a = out.detach().double(), args[0].detach().double()
        scale = a.diagonal(dim1=-2, dim2=-1).abs().max().item() or 1.0
        gap = (lower @ lower.mT - a).abs().max().item()
        return max(gap, lower.triu(1).abs().max().item()) / (20 * problem.n * EPS[problem.dtype] * scale)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full = level == "full"
        single = [(1, n) for n in ([4, 10, 50, 200, 800, 1500, 3500] if full else [50, 200, 800, 2000])]
        batched = [(8, 400), (32, 20), (4, 100), (256, 10)] + [(4, 900), (500, 4)] * full
        base = Problem(op="cholesky", dtype=dtype, device=device)
        problems = [base.replace(m=n, n=n, batch=b) for b, n in single + batched]
        return problems + [p.replace(grad="a") for p in problems if p.n <= 1500]

    def features(self, problem: Problem) -> Features:
        backward = 4 if problem.grad else 1
        elements = problem.batch * problem.n**2
        return Features(
            calls=2 + problem.batch * backward,
            flops=backward * elements * problem.n / 3,
            bytes=backward * 4.0 * elements * problem.itemsize,
        )

    memory = staticmethod(squares(1.05, 5.2))


CHOLESKY = _Cholesky()


@CHOLESKY.candidate("stock")
def stock(a: torch.Tensor, jitter: float | None = None, max_tries: int | None = None) -> torch.Tensor:
    """The library's psd_safe_cholesky on the tensor's own device."""
    return _stock_cholesky(a, jitter=jitter, max_tries=max_tries)


def with_ladder(factor: Run) -> Run:
    """Return a candidate that runs `factor`, and stock if the info that it returns reports a failure."""

    @functools.wraps(factor)
    def run(a: torch.Tensor, jitter: float | None = None, max_tries: int | None = None) -> torch.Tensor:
        lower, info = factor(a)
        return stock(a, jitter, max_tries) if torch.any(info) else lower

    return run


def _factor(a: torch.Tensor) -> Pair:
    lower, info = torch.linalg.cholesky_ex(a)
    return lower, info


def _elsewhere(there: torch.device, a: torch.Tensor, *options: Any) -> Any:
    return with_ladder(functools.partial(moved(_factor), there))(a, *options)


on_other_devices(
    CHOLESKY,
    _elsewhere,
    "Cholesky factorisation on the {}; the time includes both copies.",
    memory=squares(2.05, 6.2),
)


def _pages_unsupported(problem: Problem) -> str | None:
    if problem.grad or problem.device != "cpu" or problem.batch != 1:
        return "only for a single matrix on the CPU, without gradients"
    return None if problem.n >= 1000 else "below 1,000 rows huge pages gain nothing"


@CHOLESKY.candidate(
    "huge-pages",
    unsupported=_pages_unsupported,
    unavailable=lambda device: None if buffers.has_huge() else "this system provides no huge pages",
)
@with_ladder
def in_huge_pages(a: torch.Tensor) -> Pair:
    """The same factorisation with the factor in huge pages."""
    out = (buffers.huge(a.shape, a).mT, torch.empty(a.shape[:-2], dtype=torch.int32, device="cpu"))
    lower, info = torch.linalg.cholesky_ex(a, out=out)
    return lower, info
