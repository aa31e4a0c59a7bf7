"""The Ops `cholesky` and `qr`: decompositions of one matrix or a batch.

Contract of `cholesky`: ``L L^T = A`` to 20 n eps max |A|, with jitter where the matrix is not numerically positive
definite. Where the plain factorisation fails, the library's own code adds jitter, warns and raises NanError or
NotPSDError.

Contract of `qr`: ``A = Q R`` with orthonormal columns in ``Q (..., m, k)``, ``k = min(m, n)``, and upper triangular
``R (..., k, n)``, both to 50 k eps. The signs of R's rows are free: LAPACK, cuSOLVER and MAGMA differ in them, and no
caller in linear_operator depends on them.
"""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import settings as library
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.autograd import each_cotangent
from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.model import libraries
from autokern.ops._candidates import every, moved, needs_cpu_detour, needs_tall, on_other_devices, only, squares
from autokern.ops._problems import EPS, matrix_key, matrix_problem, positive_definite, random_matrix
from autokern.system import memory

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
        flops, passed = backward * elements * problem.n / 3, backward * 4.0 * elements * problem.itemsize
        return Features(2 + problem.batch * backward, flops, passed)

    def memory(self, problem: Problem) -> int:
        return squares(problem, 1.05, 5.2)


CHOLESKY = _Cholesky()


@CHOLESKY.candidate("stock")
def stock_cholesky(a: torch.Tensor, jitter: float | None = None, max_tries: int | None = None) -> torch.Tensor:
    """The library's psd_safe_cholesky on the tensor's own device."""
    return libraries.psd_safe_cholesky(a, jitter=jitter, max_tries=max_tries)


on_other_devices(
    CHOLESKY,
    stock_cholesky,
    "Cholesky factorisation on the {}; the time includes both copies.",
    memory=lambda p: squares(p, 2.05, 6.2),
)
_WITHIN = "only for a single matrix on the CPU, without gradients"


@CHOLESKY.candidate(
    "huge-pages",
    unsupported=every(
        only(_WITHIN, lambda p: not p.grad and p.device == "cpu" and p.batch == 1),
        only("below 1,000 rows huge pages gain nothing", lambda p: p.n >= 1000),
    ),
    unavailable=lambda device: None if memory.has_huge() else "this system provides no huge pages",
)
def in_huge_pages(a: torch.Tensor, jitter: float | None = None, max_tries: int | None = None) -> torch.Tensor:
    """The same factorisations, retries with jitter included, with the factor in huge pages."""
    return libraries.psd_safe_cholesky(a, memory.huge(a.shape, a).mT, jitter, max_tries)


def _memory_of(problem: Problem, matrices: float) -> int:
    elements = matrices * problem.m * problem.n + min(problem.m, problem.n) * problem.n
    return int(problem.batch * problem.itemsize * elements) * (2 if problem.grad else 1)


class _Qr(Op):
    name = "qr"
    summary = "reduced QR decomposition"

    key = staticmethod(matrix_key)

    def problem_of(self, a: torch.Tensor) -> Problem | None:
        return matrix_problem("qr", a)

    def reference(self, a: torch.Tensor) -> Pair:
        return torch.linalg.qr(a)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        return (random_matrix(problem, generator, problem.m, problem.n).requires_grad_(bool(problem.grad)),)

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        q, r = (t.detach().double() for t in out)
        a = args[0].detach().double()
        k = q.shape[-1]
        unit = 50 * k * EPS[problem.dtype]
        gram = q.mT @ q - torch.eye(k, dtype=q.dtype, device=q.device)
        scale = torch.linalg.matrix_norm(a).max().item() or 1.0
        residual = torch.linalg.matrix_norm(a - q @ r).max().item() / scale
        return max(gram.abs().max().item(), residual, torch.tril(r, -1).abs().max().item() / scale) / unit

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full, elsewhere = level == "full", device != "cpu"
        shapes = [(32, 32), (128, 128), (512, 512), (1024, 1024)] * elsewhere
        shapes += [(8, 8), (2048, 2048)] * (elsewhere and full)
        shapes += [(256, 16), (2000, 50), (64, 8), (1000, 250), (4000, 16), (512, 128)]
        shapes += [(16, 2), (300, 100), (1500, 700), (20000, 30)] * full
        batched = [(8, 64, 8), (64, 200, 20)] + [(256, 16, 4), (16, 1000, 30), (5, 150, 34)] * full
        problems = [Problem(op="qr", m=m, n=n, dtype=dtype, device=device) for m, n in shapes]
        problems += [Problem(op="qr", batch=b, m=m, n=n, dtype=dtype, device=device) for b, m, n in batched]
        return problems + [p.replace(grad="a") for p in problems]

    def features(self, problem: Problem) -> Features:
        backward = 3 if problem.grad else 1
        each = backward * 4.0 * problem.elements
        return Features(1 + 2 * problem.batch * backward, each * min(problem.m, problem.n), each * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        """Return the bytes of both factors, and of LAPACK's workspace, a quarter of the matrix."""
        return _memory_of(problem, 1.25)

    def canonical(self, out: Any) -> Any:
        q, r = out
        signs = r.detach().diagonal(dim1=-2, dim2=-1).sign()
        return q * signs.unsqueeze(-2), r * signs.unsqueeze(-1)


QR = _Qr()
_SAME = "the same as stock for this problem"


def _library_uses_cpu(problem: Problem) -> bool:
    return problem.device != "cpu" and problem.n <= library.stable_qr_cpu_threshold.value()


@QR.candidate("stock")
def stock_qr(a: torch.Tensor) -> Pair:
    """The library's rule: on the CPU up to 128 columns, else on the tensor's own device."""
    if a.device.type != "cpu" and a.shape[-1] <= library.stable_qr_cpu_threshold.value():
        return moved(native, torch.device("cpu"), (a,))
    return native(a)


@QR.candidate("native", unsupported=only(_SAME, _library_uses_cpu))
def native(a: torch.Tensor) -> Pair:
    """Householder QR on the tensor's own device (geqrf and orgqr)."""
    q, r = torch.linalg.qr(a)
    return q, r


on_other_devices(
    QR,
    native,
    "Householder QR on the {}; the time includes both copies.",
    on_cpu=every(needs_cpu_detour, only(_SAME, lambda p: not _library_uses_cpu(p))),
)


@QR.candidate("choleskyqr2", unsupported=needs_tall, memory=lambda p: _memory_of(p, 2.35))  # both Q, and a copy
def cholesky_qr2(a: torch.Tensor) -> Pair:
    """CholeskyQR2 for tall, well-conditioned matrices; Householder QR for all others."""
    return _QR.apply(a) if a.requires_grad and torch.is_grad_enabled() else _cholesky_qr2(a)


def _round(a: torch.Tensor, gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    upper, info = torch.linalg.cholesky_ex(gram, upper=True)
    return torch.linalg.solve_triangular(upper, a, upper=True, left=False), upper, info


def _cholesky_qr2(a: torch.Tensor) -> Pair:
    """Return Q and R by two rounds of Gram matrix, Cholesky factor and solve (Yamamoto et al. 2015, ETNA 44)."""
    q, first, info = _round(a, a.mT @ a)
    gram = q.mT @ q
    defect = (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().amax()
    if torch.any(info) or not defect < 0.05 / gram.shape[-1]:  # a second round would not be enough
        return native(a)
    q, second, _ = _round(q, gram)  # succeeds: no eigenvalue of this matrix differs from 1 by more than 0.05
    return q, second @ first


class _QR(torch.autograd.Function):
    """CholeskyQR2, differentiable to any order, with the gradient of Seeger et al. (2017, arXiv:1710.08717)."""

    @staticmethod
    def forward(ctx, a):  # type: ignore[no-untyped-def]
        q, r = _cholesky_qr2(a)
        ctx.save_for_backward(q, r)
        return q, r

    @staticmethod
    @each_cotangent
    def backward(ctx, grad_q, grad_r):  # type: ignore[no-untyped-def]
        q, r = ctx.saved_tensors
        core = r @ grad_r.mT - grad_q.mT @ q
        symmetric = core.tril() + core.tril(-1).mT
        return torch.linalg.solve_triangular(r, (grad_q + q @ symmetric).mT, upper=True).mT
