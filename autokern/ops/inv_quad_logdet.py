"""The Op `inv_quad_logdet`: ``B^T K^-1 B`` and ``log |K|`` of a dense positive definite matrix, as one operation.

Arguments: ``operator, rhs, reduce, exact`` as `LinearOperator.inv_quad_logdet` gets them: an operator without
structure (dense, sums, added diagonals; a plain tensor too), right-hand sides ``(..., n, t)``, whether their quadratic
forms are added up, and whether stock would factorise (at most `max_cholesky_size` rows, say) instead of running
conjugate gradients to tolerance 1.

Contract: both values are those of a matrix within ``2 n eps max |K|`` of K; derivatives are
``dL/dK = g K^-1 - A h A^T`` with ``A = K^-1 B``. Jitter, warnings and errors are the library's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    LinearOperator,
    SumLinearOperator,
)
from linear_operator.utils import cholesky as cholesky_module
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.arguments import tensors_in
from autokern.core.autograd import Taken, each_cotangent, plain_gradients
from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.gp.arguments import DIAGONAL, variances
from autokern.gp.factors import factorised, inv_quad_logdet_gradients, inverted
from autokern.ops._shared import (
    CG_ITERATIONS,
    EPS,
    as_asked,
    is_ours,
    iterates,
    matrix_problem,
    needs_accelerator,
    needs_cpu_detour,
    no_accelerator,
    positive_definite,
    random_matrix,
    regime_features,
    with_copies,
    with_fewer_threads,
)
from autokern.ops._triangular import inverse_from_cholesky
from autokern.system import host, threads

__all__ = ["INV_QUAD_LOGDET", "dense_and_diagonal", "factorise", "is_unstructured", "plain", "summed"]

_stock = LinearOperator.inv_quad_logdet
_ladder = cholesky_module._psd_safe_cholesky

Pair = tuple[torch.Tensor, torch.Tensor]


def is_unstructured(operator: Any) -> bool:
    """Whether an operator is made of dense matrices, diagonals, sums and factors alone."""
    kind = type(operator)
    if kind in (SumLinearOperator, AddedDiagLinearOperator):
        if operator._kwargs.get("preconditioner_override") is not None:
            return False  # the user's own way to iterate
        parts = operator.linear_ops
        return any(type(p) not in DIAGONAL for p in parts) and all(
            type(p) in DIAGONAL or is_unstructured(p) for p in parts
        )
    return kind is DenseLinearOperator or (
        kind is ConstantMulLinearOperator and type(operator.base_linear_op) is DenseLinearOperator
    )


def _parts(operator: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return an operator as a dense matrix and diagonals ``(..., 1 or n)`` to be added, all differentiable."""
    if isinstance(operator, torch.Tensor):
        return operator, []
    if type(operator) in (SumLinearOperator, AddedDiagLinearOperator):
        matrix, diagonals = None, []
        for part in operator.linear_ops:
            if type(part) in DIAGONAL:
                diagonals.append(variances(part))
                continue
            one, more = _parts(part)
            matrix = one if matrix is None else matrix + one
            diagonals += more
        assert matrix is not None
        return matrix, diagonals
    return operator.to_dense(), []


def dense_and_diagonal(operator: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the dense part in the full batch shape, and the sum of the diagonals or None."""
    matrix, diagonals = _parts(operator)
    shape = operator.shape
    diagonal = None
    for one in diagonals:
        diagonal = one if diagonal is None else diagonal + one
    if diagonal is not None:
        diagonal = diagonal.expand(*shape[:-2], diagonal.shape[-1])
    return matrix.expand(shape), diagonal


def _with_diagonal(matrix: torch.Tensor, diagonal: torch.Tensor | None) -> torch.Tensor:
    if diagonal is None:
        return matrix
    return matrix + torch.diag_embed(diagonal.expand(matrix.shape[:-1]))


def plain(matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor) -> Pair:
    """Return the quadratic forms column by column and the log determinant by autograd through Cholesky."""
    lower = torch.linalg.cholesky(_with_diagonal(matrix, diagonal))
    white = torch.linalg.solve_triangular(lower, rhs, upper=False)
    return white.square().sum(-2), 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def summed(pair: Pair, reduce: bool) -> Pair:
    """Return a pair with its quadratic forms added up, if that is asked for."""
    return (pair[0].sum(-1), pair[1]) if reduce else pair


def _stock_features(problem: Problem) -> Features:
    elements = problem.batch * problem.n**2
    backward = 3 if problem.grad else 1
    if iterates(problem):
        return Features(300.0, 0.0, (2.0 * CG_ITERATIONS + 4.0 * backward) * elements * problem.itemsize)
    return Features(10.0 * backward, elements * problem.n / 3 * (4 if problem.grad else 1), 8.0 * elements * backward)


def _memory_of(matrices: float) -> Callable[[Problem], int]:
    def memory(problem: Problem) -> int:
        return int(matrices * problem.batch * problem.n**2 * problem.itemsize)

    return memory


def _stock_memory(problem: Problem) -> int:
    """The noisy matrix, its factor and what is made of it; iterating, the matrix in the order that products want."""
    if iterates(problem):
        return _memory_of(2.1)(problem)
    return _memory_of(7.2 if problem.grad else 4.1)(problem)


class _InvQuadLogdet(Op):
    name = "inv_quad_logdet"
    summary = "quadratic forms with the inverse of a dense positive definite matrix, and its log determinant"
    contract = "values are those of a matrix within 2 n eps max|K| of K"
    raises = (NanError, NotPSDError)
    composite = True

    def key(self, operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Any:
        grad = torch.is_grad_enabled() and (operator.requires_grad or rhs.requires_grad)
        return (
            operator.__class__, operator.shape, operator.dtype, operator.device, rhs.__class__, rhs.shape, rhs.dtype,
            rhs.device, exact, grad, is_unstructured(operator) if isinstance(operator, LinearOperator) else True,
        )  # fmt: skip

    def problem_of(self, operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Problem | None:
        tensors = list(tensors_in((operator, rhs)))
        dense = isinstance(operator, torch.Tensor)
        if not (dense or is_unstructured(operator)) or not rhs.dim() == operator.dim() >= 2:
            return None
        rows, columns = operator.shape[-2:]
        if rows != columns or rows < 2 or rhs.shape[:-1] != operator.shape[:-1] or not is_ours(rhs):
            return None
        if any(t.dtype is not rhs.dtype or t.device != rhs.device for t in tensors):
            return None
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return matrix_problem(
            "inv_quad_logdet",
            rhs,
            m=rows,
            n=rows,
            rhs=rhs.shape[-1],
            grad="a" if grad else "",
            variant="cholesky" if exact else "cg",
        )

    def reference(self, operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
        return summed(plain(*dense_and_diagonal(operator), rhs), reduce)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        k = positive_definite(problem, generator)
        k.diagonal(dim1=-2, dim2=-1).sub_(0.1)
        noise = k.new_full((*k.shape[:-2], 1), 0.1)
        wanted = bool(problem.grad)
        diagonal = ConstantDiagLinearOperator(noise.requires_grad_(wanted), problem.n)
        operator = AddedDiagLinearOperator(DenseLinearOperator(k.requires_grad_(wanted)), diagonal)
        rhs = random_matrix(problem, generator, problem.n, problem.rhs).requires_grad_(wanted)
        return operator, rhs, True, problem.variant == "cholesky"

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        operator, rhs, reduce, _ = args
        with torch.no_grad():
            matrix, diagonal = dense_and_diagonal(operator)
            k = _with_diagonal(matrix.double(), None if diagonal is None else diagonal.double())
            lower = torch.linalg.cholesky(k)
            inverse = torch.cholesky_inverse(lower)
            solved = inverse @ rhs.double()
            quadratic = (solved * rhs.double()).sum(-2)
            logdet = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            change = 2 * problem.n * EPS[problem.dtype] * k.abs().amax((-2, -1))
            by_column = solved.square().sum(-2) * change[..., None] + EPS[problem.dtype] * quadratic.abs()
            exact, unit = (quadratic.sum(-1), by_column.sum(-1)) if reduce else (quadratic, by_column)
            errors = [(out[0].double() - exact).abs() / unit]
            trace = inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
            errors.append((out[1].double() - logdet).abs() / (change * trace + EPS[problem.dtype] * logdet.abs()))
        return max(e.max().item() for e in errors)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full = level == "full"
        base = Problem(op="inv_quad_logdet", rhs=1, dtype=dtype, device=device, variant="cholesky", grad="a")
        sizes = [300, 50, 800] + ([20, 100, 150, 500, 650] if full else [])
        large = [1000, 1500, 2600] + ([1900, 3600, 4500] if full else [])
        problems = [base.replace(m=sizes[0], n=sizes[0]), base.replace(m=large[0], n=large[0], variant="cg")]
        problems += [base.replace(m=n, n=n) for n in sizes[1:]]
        problems += [base.replace(m=n, n=n, variant="cg") for n in large[1:]]
        problems += [base.replace(m=n, n=n, grad="") for n in sizes[:2]]
        problems += [base.replace(m=n, n=n, grad="", variant="cg") for n in large[: 4 if full else 2]]
        problems += [base.replace(m=n, n=n, batch=b) for b, n in ((16, 50), (4, 200), *(((64, 20), (8, 400)) * full))]
        return problems + [base.replace(m=n, n=n, rhs=10) for n in sizes[:1]]

    def features(self, problem: Problem) -> Features:
        elements = problem.batch * problem.n**2
        return Features(
            calls=6.0 + problem.batch * (2 if problem.grad else 1),
            flops=elements * problem.n * (1.0 if problem.grad else 1 / 3),
            bytes=(6.0 if problem.grad else 3.0) * elements * problem.itemsize,
        )

    def memory(self, problem: Problem) -> int:
        return _memory_of(1.1)(problem)

    def extra_features(self, problem: Problem) -> tuple[float, ...]:
        return regime_features(problem)


INV_QUAD_LOGDET = _InvQuadLogdet()


@INV_QUAD_LOGDET.candidate("stock", features=_stock_features, memory=_stock_memory)
def stock(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
    """linear_operator's own: Cholesky by autograd, or conjugate gradients above `max_cholesky_size`."""
    whole = to_linear_operator(operator)
    with as_asked(exact, operator.shape[-1]):
        return _stock(whole, inv_quad_rhs=rhs, logdet=True, reduce_inv_quad=reduce)


def factorise(matrix: torch.Tensor, diagonal: torch.Tensor | None) -> torch.Tensor:
    """Return the lower factor of the sum in memory of its own, by stock's ladder where it is not plain."""

    def assembled() -> torch.Tensor:
        k = matrix.clone(memory_format=torch.contiguous_format)
        if diagonal is not None:
            k.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return k

    lower, info = factorised(assembled())
    return _ladder(assembled()) if torch.any(info) else lower


class _Potri(torch.autograd.Function):
    """One factorisation; the backward pass inverts in its memory and returns that memory as the gradient."""

    @staticmethod
    def forward(ctx, matrix, diagonal, rhs, inverse):  # type: ignore[no-untyped-def]
        lower = factorise(matrix, diagonal)
        white = torch.linalg.solve_triangular(lower, rhs, upper=False)
        if any(ctx.needs_input_grad):
            ctx.lower, ctx.inverse, ctx.threads = lower, inverse, threads.current()
            ctx.taken, ctx.shape = Taken(matrix, diagonal, rhs), None if diagonal is None else diagonal.shape
            ctx.save_for_backward(white)
        return white.square().sum(-2), lower.diagonal(dim1=-2, dim2=-1).log().sum(-1).mul_(2)

    @staticmethod
    @each_cotangent
    def backward(ctx, by_quadratic, by_logdet):  # type: ignore[no-untyped-def]
        (white,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            cotangents = (by_quadratic, by_logdet)
            return *plain_gradients(plain, ctx.taken.unchanged(), wanted[:3], cotangents), None
        with threads.scope(ctx.threads):
            if ctx.lower is None:  # a second backward pass: the first one has used the memory of the factor
                matrix, diagonal, _ = ctx.taken.unchanged()
                ctx.lower = factorise(matrix, diagonal)
            solved = torch.linalg.solve_triangular(ctx.lower.mT, white, upper=True)

            def inverse() -> torch.Tensor:
                lower, ctx.lower = ctx.lower, None
                return ctx.inverse(lower)

            grads = inv_quad_logdet_gradients(inverse, solved, (by_quadratic, by_logdet), ctx.shape, wanted)
            return *grads, None


def _exactly(inverse: Any, operator: Any, rhs: torch.Tensor, reduce: bool) -> Pair:
    return summed(_Potri.apply(*dense_and_diagonal(operator), rhs, inverse), reduce)


def _no_gradients(problem: Problem) -> str | None:
    return None if problem.grad else "without gradients nothing is inverted"


@INV_QUAD_LOGDET.candidate("potri", accuracy="better")
def potri(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
    """One Cholesky factorisation; gradients in closed form from LAPACK's potri, in place."""
    return _exactly(inverted, operator, rhs, reduce)


@INV_QUAD_LOGDET.candidate("recursive", accuracy="better", unsupported=_no_gradients, memory=_memory_of(2.9))
def recursive(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
    """The same with the inverse by recursion on halves, nearly all of it products."""
    return _exactly(inverse_from_cholesky, operator, rhs, reduce)


with_fewer_threads(INV_QUAD_LOGDET, "potri")


def _elsewhere(operator: Any, rhs: torch.Tensor, reduce: bool, there: torch.device | None) -> Pair:
    matrix, diagonal = dense_and_diagonal(operator)
    away = None if diagonal is None else diagonal.to(there)
    pair = summed(_Potri.apply(matrix.to(there), away, rhs.to(there), inverted), reduce)
    return pair[0].to(rhs.device), pair[1].to(rhs.device)


_copied = with_copies(INV_QUAD_LOGDET.features, lambda p: p.n**2 * (2 if p.grad else 1))


@INV_QUAD_LOGDET.candidate("cpu", accuracy="better", unsupported=needs_cpu_detour, features=_copied)
def on_cpu(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
    """potri on the CPU, all copies charged."""
    return _elsewhere(operator, rhs, reduce, torch.device("cpu"))


@INV_QUAD_LOGDET.candidate(
    "accelerator", accuracy="better", unsupported=needs_accelerator, unavailable=no_accelerator, features=_copied
)
def on_accelerator(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
    """potri on the accelerator, all copies charged."""
    return _elsewhere(operator, rhs, reduce, host.accelerator())
