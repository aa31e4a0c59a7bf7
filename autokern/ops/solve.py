"""The Op `solve`: ``K^-1 B`` of a covariance with noise, where stock iterates or factorises a Kronecker product.

Arguments: ``operator, rhs, kernel``. The operator is a sum of dense parts and diagonals, as for `inv_quad_logdet`, or
the sum of a matrix-free covariance and a diagonal; `kernel` is the embedded kernel of the latter, else None. `rhs` is
``(..., n, t)``. Callers differentiate the solution themselves, so the op supports no gradients. For a Kronecker product
plus a constant, which stock factorises, a problem's `n` is the size of the first factor, `d` the product of the others.

Solutions are exact, or to a relative residual of 1e-5 (float32 1e-4) or the library's `cg_tolerance`, whichever is
tighter.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    KroneckerProductAddedDiagLinearOperator,
    KroneckerProductLinearOperator,
)

from autokern.core.op import tensors_in
from autokern.core.problem import Error, Features, Problem
from autokern.core.state import Beside
from autokern.density import systems
from autokern.density.factors import factorised
from autokern.density.matrices import fits
from autokern.density.preconditioners import footprint
from autokern.kernels import embedded as forms
from autokern.kernels import tree as trees
from autokern.kernels.embedded import Embedded
from autokern.model import libraries
from autokern.model.libraries import SOLVES, TOLERANCE, orders, tolerance
from autokern.model.marginal import is_symmetric, is_unstructured, terms, variances
from autokern.ops._candidates import CG_VECTORS, Iterated, every, exact_up_to, of_many, only, own_obeys, to_a_residual
from autokern.ops._problems import CG_ITERATIONS, iterates, matrix_problem, positive_definite, random_matrix
from autokern.ops.inv_quad_logdet import dense_and_diagonal, is_system, system_of
from autokern.system import memory

_COLUMNS = 72  # rows per column up to which a factorisation takes fewer operations than a dozen products
_POOR = 0.01  # relative residual (the library's tolerance in predictions) from which a factor's solution is discarded
FREE, PRODUCT = "free", "kronecker"
_MANY, _SINGULAR = 128, {torch.float64: 1e-9, torch.float32: 1e-3}
"""Rows from which eigenvalues serve a Kronecker product, and the smallest one, relative to the largest, for that."""
_LEAST = 4  # least rows of the first factor, and of all others: with fewer, one factor has nearly all of the work


def _rows(problem: Problem) -> int:
    return problem.n * problem.d if PRODUCT in problem.words else problem.n


class _Solve(Iterated):
    name = "solve"
    summary = "solutions with a covariance plus noise, which is large or a Kronecker product"
    nesting = 2
    looseness = Error(
        "residual 1",
        "stock iterates to the library's tolerance, by default 1, and 0.01 in predictions, on the mean of its columns",
    )

    def key(self, operator: Any, rhs: torch.Tensor, kernel: Embedded | None) -> Any:
        return (
            operator.__class__, operator.shape, operator.dtype, operator.device, rhs.__class__, rhs.shape, rhs.dtype,
            rhs.device, None if kernel is None else forms.key(kernel), torch.is_grad_enabled(), orders(SOLVES),
            kernel is None and is_unstructured(operator), factors(operator),
        )  # fmt: skip

    def problem_of(self, operator: Any, rhs: torch.Tensor, kernel: Embedded | None) -> Problem | None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((operator, rhs))):
            return None
        sizes = factors(operator)
        if (kernel is None and not sizes and not is_unstructured(operator)) or not is_system(operator, rhs):
            return None
        batch = operator.shape[:-2]
        if batch and rhs.shape[:-2] != batch:
            return None
        columns = rhs.shape[-1] if batch else rhs.numel() // rhs.shape[-2]
        if not sizes:
            return system(rhs, columns, kernel, batch.numel())
        n, d = sizes[0], math.prod(sizes[1:])
        return matrix_problem("solve", rhs, m=n, n=n, d=d, rhs=columns, batch=batch.numel(), variant=PRODUCT, grad="")

    def reference(self, operator: Any, rhs: torch.Tensor, kernel: Embedded | None) -> torch.Tensor:
        return torch.linalg.solve(operator.to_dense(), rhs)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        if PRODUCT not in problem.words:
            return *system_of(problem, generator), None
        both = [positive_definite(problem.replace(n=size), generator) for size in (problem.n, problem.d)]
        rows = _rows(problem)
        noise = ConstantDiagLinearOperator(both[0].new_full((*both[0].shape[:-2], 1), 0.1), rows)
        operator = KroneckerProductAddedDiagLinearOperator(KroneckerProductLinearOperator(*both), noise)
        return operator, random_matrix(problem, generator, rows, problem.rhs), None

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        base = Problem(op="solve", rhs=1, dtype=dtype, device=device, variant="dense/cg")
        sizes = [(1000, 1), (1000, 100), (1500, 11), (2000, 1)]
        sizes += [(2500, 1), (2500, 300), (3600, 1), (1400, 1), (4500, 30)] if level == "full" else []
        products = [(16, 12, 1), (20, 32, 8), *([(40, 32, 1), (10, 120, 8), (8, 8, 1)] if level == "full" else [])]
        found = [base.replace(m=n, n=n, rhs=t) for n, t in sizes]
        return [*found, *(base.replace(m=n, n=n, d=d, rhs=t, variant=PRODUCT) for n, d, t in products)]

    def features(self, problem: Problem) -> Features:
        if PRODUCT in problem.words:
            rows = _rows(problem)
            return Features(300.0, problem.batch * rows**2 * (rows / 3 + 2.0 * problem.rhs), 4.0 * self.memory(problem))
        elements = problem.batch * problem.n**2
        flops = 2.0 * CG_ITERATIONS * elements * problem.rhs
        return Features(300.0, flops, 1.0 * CG_ITERATIONS * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        """Return the bytes of the factor, in place of a copy of the matrix, and of a sum of its parts."""
        rows = _rows(problem)
        return int(problem.batch * (2.1 * rows**2 + 3 * rows * problem.rhs) * problem.itemsize)

    def default_candidate(self, problem: Problem) -> str:
        if PRODUCT in problem.words:
            many = _rows(problem) >= _MANY and min(problem.n, problem.d) >= _LEAST
            return "eigenvalues" if many and problem.device == "cpu" else "stock"
        if FREE in problem.words:
            return "stock" if self["preconditioned"].unsupported(problem) else "preconditioned"
        few = problem.n <= max(exact_up_to(problem), _COLUMNS * problem.rhs)
        return "cholesky" if few and problem.device == "cpu" and not problem.orders else "stock"


SOLVE = _Solve()


def factors(operator: Any) -> tuple[int, ...]:
    """Return the sizes of the factors of a Kronecker product plus a constant, none for any other operator."""
    if operator.__class__ is not KroneckerProductAddedDiagLinearOperator or not operator._diag_is_constant:
        return ()
    product = operator.linear_op
    known = product.__class__ is KroneckerProductLinearOperator
    return tuple(one.size(-1) for one in product.linear_ops) if known else ()


def system(like: torch.Tensor, columns: int, kernel: Embedded | None, batch: int = 1) -> Problem | None:
    """Return the problem of `columns` right-hand sides, with rows, dtype and device of the tensor `like`."""
    n = like.shape[-2]
    names = ["dense"] if kernel is None else sorted(trees.leaves(kernel.node))
    words = ["+".join(names), "cg", *([FREE] if kernel is not None else [])]
    d, variant = 0 if kernel is None else sum(kernel.widths), "/".join(words) + orders(SOLVES)
    return matrix_problem("solve", like, m=n, n=n, d=d, rhs=columns, batch=batch, variant=variant, grad="")


def _bytes(problem: Problem) -> int:
    vectors = (CG_VECTORS + 10 * problem.rhs) * problem.batch * problem.n * problem.itemsize
    return vectors if iterates(problem) else SOLVE.memory(problem)


@SOLVE.candidate("stock", memory=_bytes)
def stock(operator: Any, rhs: torch.Tensor, kernel: Embedded | None) -> torch.Tensor:
    """linear_operator's conjugate gradients, preconditioned from 2,000 rows on; it factorises a Kronecker product."""
    return libraries.solve(operator, rhs)


_factors: Beside[torch.Tensor] = Beside()  # factors with which a backward pass will solve again, by operator


@SOLVE.candidate(
    "cholesky",
    accuracy="better",
    unsupported=only("the covariance is not formed", lambda p: not {FREE, PRODUCT} & {*p.words}),
)
def cholesky(operator: Any, rhs: torch.Tensor, kernel: Embedded | None) -> torch.Tensor:
    """One Cholesky factorisation, and two triangular solves; the residual is checked."""
    matrix, diagonal = dense_and_diagonal(operator)
    lower = _factors.get(operator)
    if lower is None:
        k = memory.huge(matrix.shape, matrix).copy_(matrix)
        if diagonal is not None:
            k.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        lower, info = factorised(k)
        if torch.any(info):
            return stock(operator, rhs, kernel)
    found = _refined(matrix, diagonal, lower, rhs)
    if found is None:
        return stock(operator, rhs, kernel)
    if any(t.requires_grad for t in tensors_in((operator, rhs))):
        _factors.put(operator, lower)
    return found


def _refined(
    matrix: torch.Tensor, diagonal: torch.Tensor | None, lower: torch.Tensor, rhs: torch.Tensor
) -> torch.Tensor | None:
    """Solve, refined up to three times towards the stated residual; None if the residual stays poor."""
    found, best, least = _substituted(lower, rhs), None, _POOR
    size = torch.linalg.vector_norm(rhs, dim=-2).clamp_min(torch.finfo(rhs.dtype).tiny)
    for _ in range(3):
        left = rhs - matrix @ found
        if diagonal is not None:
            left = left.addcmul_(diagonal.unsqueeze(-1), found, value=-1)
        residual = float((torch.linalg.vector_norm(left, dim=-2) / size).max())
        if not residual < least:
            break
        best, least = found, residual
        if residual <= TOLERANCE[rhs.dtype]:
            break
        found = found + _substituted(lower, left)
    return best


def _substituted(lower: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    white = torch.linalg.solve_triangular(lower, rhs, upper=False)
    return torch.linalg.solve_triangular(lower.mT, white, upper=True)


@SOLVE.candidate(
    "preconditioned",
    accuracy="better",
    unsupported=every(of_many, only("the covariance is formed, and factorised", lambda p: FREE in p.words)),
    memory=lambda p: footprint(p.n) + 2**26 + 8 * min(p.n * p.rhs, 2**24 + p.n) * p.itemsize,
    parts=True,
    as_stock=True,
    error=to_a_residual,
    obeys=own_obeys,
)
def preconditioned(operator: Any, rhs: torch.Tensor, kernel: Embedded | None) -> torch.Tensor:
    """Conjugate gradients to a stated residual; the preconditioner (neighbours or pivots) is chosen per system."""
    with torch.no_grad():
        found = None if kernel is None else _iterated(operator, rhs, kernel)
    return stock(operator, rhs, kernel) if found is None else found


def _iterated(operator: Any, rhs: torch.Tensor, kernel: Embedded) -> torch.Tensor | None:
    if (found := terms(operator)) is None:
        return None
    lazy, diagonal = found
    n, points, noise = operator.shape[-1], lazy.x1, variances(diagonal)
    if noise.dim() > 1 or not (noise > 0).all() or not torch.isfinite(rhs).all():
        return None
    columns, tree = rhs.movedim(-2, 0).reshape(n, -1), forms.read(kernel, points)
    solved = systems.of_tree(operator._matmul, tree, noise.expand(n), columns, tolerance(rhs.dtype), points)
    if solved is not None:
        return solved.view(n, *rhs.shape[:-2], rhs.shape[-1]).movedim(0, -2).contiguous()
    if not fits(n, rhs):
        return None
    return cholesky(AddedDiagLinearOperator(DenseLinearOperator(lazy.covar_mat), diagonal), rhs, None)


@SOLVE.candidate(
    "eigenvalues",
    unsupported=only(
        f"only for a Kronecker product of factors of {_LEAST} rows or more",
        lambda p: PRODUCT in p.words and min(p.n, p.d) >= _LEAST,
    ),
    memory=lambda p: 8 * p.batch * (4 * (p.n**2 + p.d**2) + 5 * p.n * p.d * p.rhs),
)
def eigenvalues(operator: Any, rhs: torch.Tensor, kernel: Embedded | None) -> torch.Tensor:
    """Eigenvalues of each factor (Bonilla et al. 2008); stock for nearly singular matrices, as it may add jitter."""
    matrices = [one.to_dense().to(torch.float64) for one in operator.linear_op.linear_ops]
    if not all(is_symmetric(one, rhs.dtype) for one in matrices):  # a factorisation reads one triangle
        return stock(operator, rhs, kernel)
    each, bases = zip(*map(torch.linalg.eigh, matrices), strict=True)
    values = functools.reduce(lambda a, b: (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2), each)
    values, vectors = values + operator.diag_tensor._diagonal(), KroneckerProductLinearOperator(*bases)
    if not bool((values.amin(-1) > _SINGULAR[rhs.dtype] * values.amax(-1)).all()):
        return stock(operator, rhs, kernel)
    found = vectors.matmul(vectors.mT.matmul(rhs.to(torch.float64)) / values.unsqueeze(-1)).to(rhs.dtype)
    return found.mT.contiguous().mT if found.isfinite().all() else stock(operator, rhs, kernel)  # in LAPACK's order
