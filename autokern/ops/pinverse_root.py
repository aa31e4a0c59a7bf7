"""The Op `pinverse_root`: the pseudo-inverse of a root with appended rows (`cat_rows`, fantasy models).

The root of a covariance is usually lower triangular, and then its pseudo-inverse is its inverse, without a QR. The
library does not mark a root with an appended row as triangular; the op tests the entries.

Contract: ``X A = I`` for a tall or square root of full column rank, to 100 n eps |X| |A|. Near-singular roots are left
to stock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from autokern.core.autograd import each_cotangent
from autokern.core.op import Op, Run
from autokern.core.problem import Features, Problem
from autokern.model import originals
from autokern.ops._shared.problems import (
    EPS,
    matrix_key,
    matrix_problem,
    needs_tall,
    only,
    positive_definite,
    random_matrix,
)
from autokern.ops.qr import cholesky_qr2
from autokern.system import buffers

_stock_pinverse = originals.stable_pinverse
_SINGULAR = 1e-6
"""Stock changes a diagonal of R below this; the smallest singular value is a lower bound of that diagonal."""
_BASE = 96
"""Size up to which LAPACK's triangular solve is as fast as recursion."""


class _Seen(threading.local):
    """The last root, held weakly, with its structure: key, problem and candidate of one call ask for it."""

    root: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)
    version = 0
    kind = ""


_seen = _Seen()


def structure(a: torch.Tensor) -> str:
    """Return ``lower`` for a lower triangular root, else ``general``."""
    if a.is_inference():  # no version counter
        return _structure(a)
    if _seen.root() is not a or _seen.version != a._version:
        _seen.kind = _structure(a)
        _seen.root, _seen.version = weakref.ref(a), a._version
    return _seen.kind


def _structure(a: torch.Tensor) -> str:
    square = a.dim() == 2 and a.shape[0] == a.shape[1]
    return "lower" if square and not bool(a.triu(1).any()) else "general"


class _PinverseRoot(Op):
    name = "pinverse_root"
    summary = "pseudo-inverse of a root with appended rows"
    contract = "XA = I within 100 eps |X| |A|; near-singular roots as stock"

    def key(self, a: torch.Tensor) -> Any:
        return (*matrix_key(a), structure(a) if type(a) in (torch.Tensor, torch.nn.Parameter) and a.dim() == 2 else "")

    def problem_of(self, a: torch.Tensor) -> Problem | None:
        problem = matrix_problem("pinverse_root", a)
        return problem and problem.replace(variant=structure(a))

    def reference(self, a: torch.Tensor) -> torch.Tensor:
        if a.shape[-1] == a.shape[-2]:
            return torch.linalg.inv(a)
        q, r = torch.linalg.qr(a)
        return torch.linalg.solve_triangular(r, q.mT, upper=True)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        if problem.variant == "general":
            a = random_matrix(problem, generator, problem.m, problem.n)
            if problem.m == problem.n:
                a = a + 2 * problem.n**0.5 * torch.eye(problem.n, dtype=a.dtype, device=a.device)
        else:
            a = torch.linalg.cholesky(positive_definite(problem, generator))
        return (a.requires_grad_(bool(problem.grad)),)

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        x, a = out.detach().double(), args[0].detach().double()
        if a.shape[-2] < a.shape[-1]:
            x, a = x.mT, a.mT
        gap = (x @ a - torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)).abs().max().item()
        size = torch.linalg.matrix_norm(x).max().item() * torch.linalg.matrix_norm(a).max().item()
        return gap / (100 * EPS[problem.dtype] * size)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full = level == "full"
        base = Problem(op="pinverse_root", dtype=dtype, device=device, variant="lower")
        sizes = [5, 20, 50, 100, 200, 400, 800, 1600] if full else [20, 100, 400, 1000]
        problems = [base.replace(m=n, n=n) for n in sizes]
        tall = [(400, 100), (1000, 10)] + [(60, 6), (1600, 400), (3000, 40)] * full
        problems += [base.replace(variant="general", m=m, n=n) for m, n in tall]
        graded = [p.replace(grad="a") for p in problems if p.n <= (800 if full else 400)]
        return problems + (graded if full else graded[::2])

    def features(self, problem: Problem) -> Features:
        backward = 3 if problem.grad else 1
        elements = problem.elements
        return Features(
            calls=2 + problem.batch * backward,
            flops=backward * 5.0 * elements * min(problem.m, problem.n),
            bytes=backward * 8.0 * elements * problem.itemsize,
        )

    def memory(self, problem: Problem) -> int:
        return 4 * problem.elements * problem.itemsize


PINVERSE_ROOT = _PinverseRoot()


@PINVERSE_ROOT.candidate("stock")
def stock(a: torch.Tensor) -> torch.Tensor:
    """linear_operator: a QR decomposition and a triangular solve."""
    return _stock_pinverse(a)


_triangular_unsupported = only("the root is not triangular", lambda p: p.variant == "lower")


class _Inverse(torch.autograd.Function):
    """The inverse of a root by any method, with the gradient d(A^-1) = -A^-1 dA A^-1 by all entries of A."""

    @staticmethod
    def forward(ctx, a, invert):  # type: ignore[no-untyped-def]
        x = invert(a)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @each_cotangent
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return -(x.mT @ (grad @ x.mT)), None


def _inverse(a: torch.Tensor, invert: Run) -> torch.Tensor:
    """Return the inverse of a triangular root, stock's result if the root is nearly singular."""
    x = _Inverse.apply(a, invert)
    smallest = 1 / torch.linalg.matrix_norm(x.detach())
    return x if bool(smallest > _SINGULAR) else _stock_pinverse(a)


def _solve_identity(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a lower triangular matrix by one solve (LAPACK's trtrs)."""
    unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, unit.expand(lower.shape), upper=False)


def _inverse_lower(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse ``(..., n, n)`` by recursion on halves, nearly all of it GEMM (Higham 2002, ch. 14)."""
    inverse = buffers.huge(lower.shape, lower).zero_()
    _invert_into(lower, inverse)
    return inverse


def _invert_into(lower: torch.Tensor, inverse: torch.Tensor) -> None:
    n = lower.shape[-1]
    if n <= _BASE:
        inverse.copy_(_solve_identity(lower))
        return
    half = (n // 2 + 15) // 16 * 16
    _invert_into(lower[..., :half, :half], inverse[..., :half, :half])
    _invert_into(lower[..., half:, half:], inverse[..., half:, half:])
    product = lower[..., half:, :half] @ inverse[..., :half, :half]
    inverse[..., half:, :half] = torch.matmul(inverse[..., half:, half:], product).neg_()


@PINVERSE_ROOT.candidate("triangular", unsupported=_triangular_unsupported)
def triangular(a: torch.Tensor) -> torch.Tensor:
    """One triangular solve, for a triangular root."""
    return _inverse(a, _solve_identity)


@PINVERSE_ROOT.candidate("recursive", unsupported=_triangular_unsupported)
def recursive(a: torch.Tensor) -> torch.Tensor:
    """Recursion on halves, mostly matrix products, for a triangular root."""
    return _inverse(a, _inverse_lower)


@PINVERSE_ROOT.candidate("choleskyqr2", unsupported=needs_tall)
def by_cholesky_qr2(a: torch.Tensor) -> torch.Tensor:
    """CholeskyQR2 and a triangular solve, for a tall root."""
    q, r = cholesky_qr2(a)
    if bool((r.detach().diagonal(dim1=-2, dim2=-1).abs() < _SINGULAR).any()):
        return _stock_pinverse(a)
    return torch.linalg.solve_triangular(r, q.mT, upper=True)
