"""The Op `inv_quad_logdet`: ``B^T K^-1 B`` and ``log |K|`` of a dense positive definite matrix, as one operation.

Arguments: ``operator, rhs, reduce, exact``. The operator has no structure: it is a tensor, a dense operator, or a sum
of those with diagonals. `rhs` is ``(..., n, t)``. `reduce` says whether the quadratic forms are summed. `exact` says
that stock factorises (up to `max_cholesky_size` rows); otherwise it runs conjugate gradients to a tolerance of 1.

Derivatives are ``dL/dK = g K^-1 - A h A^T`` with ``A = K^-1 B``. Jitter, warnings and errors are the library's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    LinearOperator,
)

from autokern.core.autograd import Unsaved, each_cotangent, plain_gradients
from autokern.core.op import tensors_in
from autokern.core.problem import Features, Problem
from autokern.density.factors import factorised, inverted
from autokern.model import libraries
from autokern.model.libraries import TRACES, words
from autokern.model.marginal import DIAGONAL, SUMS, is_unstructured, variances
from autokern.ops import _candidates as shared
from autokern.ops._problems import CG_ITERATIONS, is_ours, iterates, matrix_problem, positive_definite, random_matrix
from autokern.system import threads

Pair = tuple[torch.Tensor, torch.Tensor]


def plain(matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor) -> Pair:
    """Return the quadratic form of each column and the log determinant, by autograd through Cholesky."""
    added = 0.0 if diagonal is None else torch.diag_embed(diagonal.expand(matrix.shape[:-1]))
    lower = torch.linalg.cholesky(matrix + added)
    white = torch.linalg.solve_triangular(lower, rhs, upper=False)
    return white.square().sum(-2), 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def summed(pair: Pair, reduce: bool) -> Pair:
    """Return the pair with its quadratic forms summed if `reduce`."""
    return (pair[0].sum(-1), pair[1]) if reduce else pair


class _ClosedForm(torch.autograd.Function):
    """One factorisation; the backward pass inverts in the factor's memory, and returns this as the gradient by K."""

    @staticmethod
    def forward(ctx, matrix, diagonal, rhs):  # type: ignore[no-untyped-def]
        lower, white, quadratic = _white(matrix, diagonal, rhs)
        if any(ctx.needs_input_grad):
            ctx.factor, ctx.threads = [lower], torch.get_num_threads()
            ctx.arguments, ctx.shape = Unsaved(matrix, diagonal, rhs), None if diagonal is None else diagonal.shape
            ctx.save_for_backward(white)
        return quadratic, lower.diagonal(dim1=-2, dim2=-1).log().sum(-1).mul_(2)

    @staticmethod
    @each_cotangent
    def backward(ctx, *cotangents):  # type: ignore[no-untyped-def]
        (kept,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return tuple(plain_gradients(plain, ctx.arguments.unchanged(), wanted, cotangents))

        def gradients() -> list[torch.Tensor | None]:
            try:
                lower, white = ctx.factor.pop(), kept  # another thread may differentiate the same graph
            except IndexError:  # a second backward pass: the first one overwrote the factor
                lower, white, _ = _white(*ctx.arguments.unchanged())
            solved = torch.linalg.solve_triangular(lower.mT, white, upper=True)
            weighted = solved * cotangents[0].unsqueeze(-2)
            found: list[torch.Tensor | None] = [None, None, 2 * weighted if wanted[2] else None]
            if not (wanted[0] or wanted[1]):
                ctx.factor.append(lower)
                return found
            inner = inverted(lower).mul_(cotangents[1][..., None, None])
            if inner.dim() == 2:
                inner.addmm_(weighted, solved.mT, alpha=-1)
            else:
                inner.sub_(weighted @ solved.mT)
            found[0] = inner if wanted[0] else None
            if wanted[1] and ctx.shape is not None:
                found[1] = inner.diagonal(dim1=-2, dim2=-1).sum_to_size(ctx.shape)
            return found

        return tuple(threads.limited(gradients, ctx.threads)())


def closed_form(matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor, reduce: bool = False) -> Pair:
    """Return the quadratic forms and the log determinant of ``matrix + diag(diagonal)``, with closed-form gradients."""
    return summed(_ClosedForm.apply(matrix, diagonal, rhs), reduce)


def _white(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, rhs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the factor L in new memory, with the library's jitter if needed, ``L^-1 B`` and the quadratic forms."""

    def assembled() -> torch.Tensor:
        k = matrix.clone(memory_format=torch.contiguous_format)
        if diagonal is not None:
            k.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return k

    lower, info = factorised(assembled())
    if torch.any(info):
        lower = libraries.psd_safe_cholesky(assembled())
    white = torch.linalg.solve_triangular(lower, rhs, upper=False)
    return lower, white, white.square().sum(-2)


def _terms(operator: Any) -> list[Any]:
    """Return the terms of a sum of operators, and of the sums in it."""
    return [t for part in operator.linear_ops for t in _terms(part)] if type(operator) in SUMS else [operator]


def dense_and_diagonal(operator: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the dense part in the full batch shape, and the sum of the diagonals or None; differentiable."""
    parts, shape = _terms(operator), operator.shape
    matrices = [t if isinstance(t, torch.Tensor) else t.to_dense() for t in parts if type(t) not in DIAGONAL]
    diagonals = [variances(t) for t in parts if type(t) in DIAGONAL]
    diagonal = functools.reduce(torch.add, diagonals) if diagonals else None
    matrix = functools.reduce(torch.add, matrices).expand(shape)
    return matrix, None if diagonal is None else diagonal.expand(*shape[:-2], diagonal.shape[-1])


def is_system(operator: Any, rhs: torch.Tensor) -> bool:
    """Whether a covariance, of two rows or more, and columns ``(..., n, t)`` agree in rows, dtype and device."""
    if not is_ours(rhs) or operator.dim() < 2:
        return False
    same = all(t.dtype is rhs.dtype and t.device == rhs.device for t in tensors_in((operator, rhs)))
    return same and operator.shape[-2] == operator.shape[-1] == rhs.shape[-2] >= 2


def system_of(problem: Problem, generator: torch.Generator) -> tuple[AddedDiagLinearOperator, torch.Tensor]:
    """Return a covariance of random points plus noise, and random columns."""
    k, wanted = positive_definite(problem, generator), bool(problem.grad)
    k.diagonal(dim1=-2, dim2=-1).sub_(0.1)
    diagonal = ConstantDiagLinearOperator(k.new_full((*k.shape[:-2], 1), 0.1).requires_grad_(wanted), problem.n)
    operator = AddedDiagLinearOperator(DenseLinearOperator(k.requires_grad_(wanted)), diagonal)
    return operator, random_matrix(problem, generator, problem.n, problem.rhs).requires_grad_(wanted)


class _InvQuadLogdet(shared.Iterated):
    name = "inv_quad_logdet"
    summary = "quadratic forms with the inverse of a dense positive definite matrix, and its log determinant"
    nesting = 2

    def key(self, operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Any:
        grad = torch.is_grad_enabled() and (operator.requires_grad or rhs.requires_grad)
        return (
            operator.__class__, operator.shape, operator.dtype, operator.device, rhs.__class__, rhs.shape, rhs.dtype,
            rhs.device, exact, words(exact, TRACES), grad,
            is_unstructured(operator) if isinstance(operator, LinearOperator) else True,
        )  # fmt: skip

    def problem_of(self, operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Problem | None:
        dense = isinstance(operator, torch.Tensor) or is_unstructured(operator)
        if not dense or rhs.shape[:-1] != operator.shape[:-1] or not is_system(operator, rhs):
            return None
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((operator, rhs)))
        variant = "cholesky" if exact else "cg" + words(exact, TRACES)
        columns, word = rhs.shape[-1], "a" if grad else ""
        return matrix_problem(self.name, rhs, n=rhs.shape[-2], rhs=columns, grad=word, variant=variant)

    def reference(self, operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
        return summed(plain(*dense_and_diagonal(operator), rhs), reduce)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        return *system_of(problem, generator), True, not iterates(problem)

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
        elements, backward = problem.batch * problem.n**2, 3 if problem.grad else 1
        if iterates(problem):
            passes = 2.0 * CG_ITERATIONS + 4.0 * backward
            return Features(300.0, 2.0 * CG_ITERATIONS * elements, passes * elements * problem.itemsize)
        flops = elements * problem.n / 3 * (4 if problem.grad else 1)
        return Features(10.0 * backward, flops, 8.0 * elements * backward)

    def remark(self, problem: Problem) -> str:
        left = not problem.grad and not iterates(problem)
        return "in a program, the library serves calls without gradients: it caches the factor" if left else ""

    def memory(self, problem: Problem) -> int:
        return shared.squares(problem, 1.1)

    def default_candidate(self, problem: Problem) -> str:
        return "potri" if problem.device == "cpu" and problem.n <= shared.exact_up_to(problem) else "stock"


INV_QUAD_LOGDET = _InvQuadLogdet()


@INV_QUAD_LOGDET.candidate(
    "stock", memory=lambda p: shared.squares(p, 2.1) if iterates(p) else shared.squares(p, 4.1, 7.2)
)
def stock(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
    """linear_operator: Cholesky with autograd, or conjugate gradients above `max_cholesky_size`."""
    whole = to_linear_operator(operator)
    with shared.as_asked(exact, operator.shape[-1]):
        return libraries.inv_quad_logdet(whole, inv_quad_rhs=rhs, logdet=True, reduce_inv_quad=reduce)


@INV_QUAD_LOGDET.candidate("potri", accuracy="better")
@shared.or_iterate(stock)
def potri(operator: Any, rhs: torch.Tensor, reduce: bool, exact: bool) -> Pair:
    """One Cholesky factorisation; gradients in closed form from LAPACK's potri, in place."""
    return closed_form(*dense_and_diagonal(operator), rhs, reduce)


shared.with_one_thread(INV_QUAD_LOGDET, "potri")


shared.on_other_devices(
    INV_QUAD_LOGDET,
    closed_form,
    "potri on the {}; the time includes all copies.",
    read=lambda operator, rhs, reduce, exact: (*dense_and_diagonal(operator), rhs, reduce),
    accuracy="better",
)
