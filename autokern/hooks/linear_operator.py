"""Hooks into linear_operator: Cholesky, QR, inv_quad_logdet, solves, small Toeplitz products, and roots of sums.

Each wrapper runs the library's own function where the dispatcher must stay out: in compiled, traced or transformed
code, under a library setting that the user changed, and for arguments that the op does not support.

``dense + root`` updates a root and an inverse root of the dense matrix (Stanton et al., AISTATS 2021): a Cholesky
factor or Lanczos iterations, a triangular solve and a full singular value decomposition, each time that a kernel such
as ``RBFKernel() + LinearKernel()`` is evaluated. A training step or a prediction reads no root, so roots are deferred.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from linear_operator import operators, utils
from linear_operator import settings as library
from linear_operator.operators import DenseLinearOperator, KroneckerProductAddedDiagLinearOperator, LinearOperator
from linear_operator.utils import qr as qr_module

from autokern.core.errors import suppressed, unless_it_fails
from autokern.core.releases.known import relied
from autokern.core.state import inside
from autokern.hooks.bypass import is_recorded, stay_out, stay_out_of_operators
from autokern.hooks.install import hook, stock_of
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator
from autokern.kernels.embedded import Embedded
from autokern.model import memoized
from autokern.model.libraries import ALGEBRA, DENSITY, EXACT, MEMORY, ORDERED, ROOT, SOLVE, as_now, regime
from autokern.model.marginal import is_unstructured
from autokern.prediction.factor_cache import kinds_of_terms
from autokern.runtime.dispatch import in_force, is_small, route

_THRESHOLD = 128  # linear_operator's own default of `stable_qr_cpu_threshold`; another value is the user's order
_TINY = 1e-6
_PLAIN = {(torch.Tensor, dtype, torch.strided, "cpu") for dtype in (torch.float32, torch.float64)}
_FEW = 512  # rows of a Toeplitz matrix up to which a product by the matrix itself was always faster
_product = relied(*ALGEBRA, KroneckerProductAddedDiagLinearOperator, operators.KroneckerProductLinearOperator)
_FACTORS = ("cholesky", "root_decomposition", "lanczos", "symeig", "diagonalization")
_cholesky_module = sys.modules.get("linear_operator.utils.cholesky")
_sparse_module = sys.modules.get("linear_operator.utils.sparse")
_solve_module: Any = sys.modules.get("linear_operator.functions._solve")
_dispatch_cholesky, _dispatch_inv_quad_logdet, _dispatch_qr, _dispatch_solve = (
    route(op, looked=True) for op in ("cholesky", "inv_quad_logdet", "qr", "solve")
)


@hook(_cholesky_module, "_psd_safe_cholesky", idle=lambda A, *_, **__: is_small("cholesky", A))
def _psd_safe_cholesky(A: Any, out: Any = None, jitter: float | None = None, max_tries: int | None = None) -> Any:
    if out is not None or stay_out():
        return _psd_safe_cholesky.__wrapped__(A, out=out, jitter=jitter, max_tries=max_tries)
    return _dispatch_cholesky(A, jitter, max_tries)


@hook(qr_module, "stable_qr", idle=lambda mat, *_, **__: is_small("qr", mat))
def _stable_qr(mat: Any) -> Any:
    if stay_out() or library.stable_qr_cpu_threshold.value() != _THRESHOLD:
        return _stable_qr.__wrapped__(mat)
    q, r = _dispatch_qr(mat)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    tiny = diagonal.abs() < _TINY
    if not torch.any(tiny):
        return q, r
    away_from_zero = torch.where(diagonal < 0, -_TINY, _TINY)
    return q, r + torch.diag_embed(torch.where(tiny, away_from_zero, 0.0).to(r.dtype))


for _importing in (utils, sys.modules.get("linear_operator.utils.pinverse")):
    if stock_of(_importing, "stable_qr") is _stable_qr.__wrapped__:
        hook(_importing, "stable_qr", relies=None)(_stable_qr)


def _is_not_dense(self: Any, inv_quad_rhs: Any = None, logdet: bool | None = False, *_: Any, **__: Any) -> bool:
    return inv_quad_rhs is None or not logdet or not is_unstructured(self, lazy=True)


@hook(LinearOperator, "inv_quad_logdet", relies=(*DENSITY, *MEMORY), idle=_is_not_dense)
def _inv_quad_logdet(
    self: Any, inv_quad_rhs: Any = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
) -> Any:
    if stay_out() or _factorised_already(self):
        return _inv_quad_logdet.__wrapped__(self, inv_quad_rhs, logdet, reduce_inv_quad)
    exact = regime(self.size(-1)) == EXACT
    lazy = any(p.__class__.__name__ == "LazyEvaluatedKernelTensor" for p in (self, *self._args))
    evaluated = self.evaluate_kernel() if lazy else self
    graded = torch.is_grad_enabled() and (evaluated.requires_grad or inv_quad_rhs.requires_grad)
    ordered = in_force().forced("inv_quad_logdet") is not None
    left = exact and not graded and not ordered  # stock caches the factor for later calls
    if left or _factorised_already(evaluated) or not is_unstructured(evaluated):
        return _inv_quad_logdet.__wrapped__(self, inv_quad_rhs, logdet, reduce_inv_quad)
    return _dispatch_inv_quad_logdet(evaluated, inv_quad_rhs, bool(reduce_inv_quad), exact)


def _factorised_already(operator: Any) -> bool:
    return any(name in _FACTORS for name in memoized.names(operator))


def _factorises(linear_op: Any, *_: Any, **__: Any) -> bool:
    plain = inside.differentiated is None and linear_op.__class__ is not KroneckerProductAddedDiagLinearOperator
    return plain and regime(linear_op.size(-1), SOLVE) == EXACT


@hook(_solve_module, "_solve", idle=_factorises)
def _solve(linear_op: Any, rhs: Any) -> Any:
    known = inside.differentiated
    if type(known) is type(linear_op) and [*map(id, known.representation())] == [*map(id, linear_op.representation())]:
        linear_op = known  # it consists of the identical tensors, and autograd checks their versions
    if stay_out():
        return _solve.__wrapped__(linear_op, rhs)
    kernel = None
    if regime(linear_op.size(-1), SOLVE) == EXACT:
        product = linear_op.__class__ is KroneckerProductAddedDiagLinearOperator
        served = product and not _factorised_already(linear_op) and _product.holds()
    else:
        kernel = _kernel_of(linear_op)
        served = kernel is not None or is_unstructured(linear_op)
    if not served:
        return _solve.__wrapped__(linear_op, rhs)
    if rhs.dim() == 2 < linear_op.dim() and len(rhs) == linear_op.size(-1):  # a batch shares it in backward passes
        rhs = rhs.expand(*linear_op.batch_shape, *rhs.shape[-2:])
    return _dispatch_solve(linear_op, rhs, kernel)


@unless_it_fails
def _kernel_of(operator: Any) -> Embedded | None:
    """Return the kernel of a matrix-free covariance plus noise, None for any other operator."""
    noisy = operator.__class__ is operators.AddedDiagLinearOperator and operator.preconditioner_override is None
    covariance = operator._linear_op if noisy and operator.dim() == 2 else None
    return covariance._kernel if covariance.__class__ is MatrixFreeKernelOperator and covariance._same else None


@hook(_solve_module.Solve, "backward")
def _solve_backward(ctx: Any, grad_output: Any) -> Any:
    """Solve with the factor of the forward pass; the library rebuilds its operator and factorises again."""
    with inside.having(differentiated=None if stay_out() else getattr(ctx, "_linear_op", None)):
        return _solve_backward.__wrapped__(ctx, grad_output)


@hook(sys.modules.get("linear_operator.utils.toeplitz"), "toeplitz_matmul")
def _toeplitz_matmul(toeplitz_column: Any, toeplitz_row: Any, tensor: Any) -> Any:
    """Multiply a small symmetric matrix as a whole, since Fourier transforms of its columns take longer."""
    kinds = {(type(t), t.dtype, t.layout, t.device.type) for t in (toeplitz_column, toeplitz_row, tensor)}
    plain = toeplitz_column is toeplitz_row and len(kinds) == 1 and kinds <= _PLAIN
    several = plain and toeplitz_column.dim() == 1 < tensor.dim()
    if not several or not 0 < len(toeplitz_column) == tensor.shape[-2] <= _FEW or stay_out_of_operators():
        return _toeplitz_matmul.__wrapped__(toeplitz_column, toeplitz_row, tensor)
    diagonals = torch.cat([toeplitz_column[1:].flip(0), toeplitz_column])
    return diagonals.unfold(0, len(toeplitz_column), 1).flip(0) @ tensor


@hook(sys.modules.get("linear_operator.operators.interpolated_linear_operator"), "left_t_interp")
def _left_t_interp(interp_indices: Any, interp_values: Any, rhs: Any, output_dim: Any) -> Any:
    """Add up rows that have the same index; the library multiplies by a sparse matrix, which no recording takes."""
    kinds = {(type(t), t.dtype, t.layout, t.device.type) for t in (interp_values, rhs)}
    plain = len(kinds) == 1 and kinds <= _PLAIN and rhs.numel() and rhs.dim() > 1
    alike = interp_indices.dtype is torch.int64 and interp_indices.shape == interp_values.shape
    if plain and alike and rhs.shape[-2] == interp_values.shape[-2] and (is_recorded() or not stay_out_of_operators()):
        with suppressed(RuntimeError):  # of indices or shapes for which the library raises its own
            return _added_up(rhs.unsqueeze(-2) * interp_values.unsqueeze(-1), interp_indices, output_dim)
    return _left_t_interp.__wrapped__(interp_indices, interp_values, rhs, output_dim)


def _added_up(terms: Any, indices: Any, count: int) -> Any:
    """Return `count` rows, each the sum of the terms ``(..., n, k, columns)`` with its index ``(..., n, k)``."""
    terms = terms.flatten(-3, -2)
    rows = indices.flatten(-2).unsqueeze(-1).expand(terms.shape)
    return terms.new_zeros(*terms.shape[:-2], count, terms.shape[-1]).scatter_add(-2, rows, terms)


class _Interpolation:
    """A transposed interpolation matrix, or with `mT` the matrix itself, whose products can be recorded."""

    def __init__(self, indices: Any, values: Any, count: int, transposed: bool = True) -> None:
        self._of, self._transposed = (indices, values, count), transposed

    @property
    def mT(self) -> _Interpolation:
        """The other of both."""
        return _Interpolation(*self._of, not self._transposed)

    def times(self, dense: Any) -> Any:
        """Return the product with columns; terms of weight zero do not count, as in a sparse matrix."""
        indices, values, count = self._of
        weights = values.unsqueeze(-1)
        if self._transposed:
            return _added_up((dense.unsqueeze(-2) * weights).where(weights != 0, 0.0), indices, count)
        batch = torch.broadcast_shapes(indices.shape[:-2], dense.shape[:-2])  # type: ignore[no-untyped-call]
        places = indices.flatten(-2).unsqueeze(-1).expand(*batch, -1, dense.shape[-1])
        rows = dense.expand(*batch, -1, -1).gather(-2, places)
        return (rows.unflatten(-2, values.shape[-2:]) * weights).where(weights != 0, 0.0).sum(-2)


def _interpolated(name: str, axis: int) -> None:
    """Hook a method of interpolated operators, which returns a sparse matrix, while it is recorded."""

    @hook(operators.InterpolatedLinearOperator, name, relies=["linear_operator.utils.sparse:bdsmm"])
    def interpolation(self: Any, indices: Any, values: Any) -> Any:
        if not is_recorded():
            return interpolation.__wrapped__(self, indices, values)
        return _Interpolation(indices, values, self.base_linear_op.size(axis))


_interpolated("_sparse_left_interp_t", -2)
_interpolated("_sparse_right_interp_t", -1)


@hook(_sparse_module, "bdsmm")
def _bdsmm(sparse: Any, dense: Any) -> Any:
    return sparse.times(dense) if type(sparse) is _Interpolation else _bdsmm.__wrapped__(sparse, dense)


_KEYS = tuple((name, (), pickle.dumps({})) for name in ("root_decomposition", "root_inv_decomposition"))
_CACHE = "_memoize_cache"


class _Roots(dict[Any, Any]):
    """The cache of a sum: it has the keys of both roots as in stock, and computes them when the library reads one."""

    def __init__(self, compute: Callable[[], dict[Any, Any]]) -> None:
        super().__init__(dict.fromkeys(_KEYS))
        self._compute = compute

    def __getitem__(self, key: Any) -> Any:
        if key in _KEYS and super().__getitem__(key) is None:
            found = self._compute()
            self.update({one: found[one] for one in _KEYS if super(_Roots, self).get(one, one) is None})
        return super().__getitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove an entry and return it."""
        if key in self:
            self[key]
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        return dict, ({key: self[key] for key in self},)


@hook(LinearOperator, "add_low_rank", relies=MEMORY)
def _add_low_rank(self: Any, low_rank_mat: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not inside.evaluated or stay_out_of_operators() or not _waits(self):
        return _add_low_rank.__wrapped__(self, low_rank_mat, *args, **kwargs)
    rootless = copy.copy(self)
    rootless.__dict__[_CACHE] = {}
    total = _add_low_rank.__wrapped__(rootless, low_rank_mat, generate_roots=False)
    graph, as_then = torch.is_grad_enabled(), as_now()

    def compute() -> dict[Any, Any]:
        with torch.set_grad_enabled(graph), as_then():
            found: dict[Any, Any] = _add_low_rank.__wrapped__(self, low_rank_mat).__dict__[_CACHE]
        return found

    total.__dict__[_CACHE] = _Roots(compute)
    return total


def _waits(operator: Any) -> bool:
    """Whether the roots of a kernel's sum may be deferred; not by ordered iterations, which draw random numbers."""
    rootless = type(operator.__dict__.get(_CACHE)) is _Roots or not memoized.names(operator)
    return rootless and bool(kinds_of_terms(operator)) and regime(operator.shape[-1], ROOT) != ORDERED


@hook(LinearOperator, "_mul_matrix", relies=MEMORY)
def _mul_matrix(self: Any, other: Any) -> Any:
    """Multiply matrix-free operators and tables of task covariances element by element without approximation."""
    if stay_out():
        return _mul_matrix.__wrapped__(self, other)
    both = self.evaluate_kernel(), other.evaluate_kernel()
    for one, two in (both, both[::-1]):
        if isinstance(one, MatrixFreeKernelOperator):
            return one._mul_matrix(two)
        if one.__class__ is DenseLinearOperator and (entries := _looked_up(two)) is not None:
            return DenseLinearOperator(one.tensor * entries)
    return _mul_matrix.__wrapped__(self, other)


@unless_it_fails
def _looked_up(operator: Any) -> torch.Tensor | None:
    """Return the exact matrix of an operator that looks up entries of a table (task covariances), else None."""
    if operator.__class__ is not operators.InterpolatedLinearOperator:
        return None
    base, left, right = operator.base_linear_op, operator.left_interp_indices, operator.right_interp_indices
    table = base.tensor if base.__class__ is DenseLinearOperator else None
    if type(table) is not torch.Tensor or table.dim() != 2 or not table.is_cpu:
        return None
    single = left.dim() == 2 == right.dim() and left.shape[1] == 1 == right.shape[1]
    weights = operator.left_interp_values, operator.right_interp_values
    if not single or any(w.requires_grad or bool((w != 1).any()) for w in weights):
        return None
    return table.index_select(0, left[:, 0]).index_select(1, right[:, 0])
