"""Footprint: how many matrices a kernel or an operator of the libraries holds at least while it becomes dense.

Kernels count as by the most frugal candidate of `kernel_matrix`. Counts come from the libraries' code and were measured
by ``calibration/memory.py``. Unknown parts count nothing: a guard must not refuse without knowing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel, SpectralMixtureKernel
from gpytorch.kernels.keops import keops_kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import (
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    IdentityLinearOperator,
    LinearOperator,
    SumLinearOperator,
    TriangularLinearOperator,
)

from autokern.gp import memoized
from autokern.kernels.family import family
from autokern.kernels.tree import family_name

__all__ = ["Held", "of_dense"]


class Held(NamedTuple):
    """Number of matrices that a computation holds, beyond those before it."""

    peak: float
    live: float  # after it: the result, and tensors that autograd keeps


_NOTHING = Held(0, 0)


def of_dense(operator: Any) -> Held:
    """Return the matrices held while an operator becomes dense, its parts included.

    The library's own `to_dense` multiplies by an identity unless a class overrides it.
    """
    kind = type(operator)
    if _is_kept(operator):
        return _NOTHING
    if isinstance(operator, (DiagLinearOperator, IdentityLinearOperator)):  # a diagonal is triangular, too
        return Held(1, 1)
    if isinstance(operator, (DenseLinearOperator, TriangularLinearOperator)):
        return _NOTHING
    if kind is LazyEvaluatedKernelTensor:
        x1, x2 = operator.x1, operator.x2
        grad = operator._is_grad_enabled and operator.requires_grad
        d = 1 if operator.last_dim_is_batch else x1.shape[-1]
        return _of_kernel(operator.kernel, d, grad, keops_kernel._use_keops(x1, x2))
    if kind.to_dense is SumLinearOperator.to_dense:
        peak = live = 0.0
        for number, part in enumerate(operator.linear_ops):
            inner = of_dense(part)
            peak = max(peak, live + inner.peak, live + inner.live + 1)
            live += inner.live + (number == 0)
        return Held(peak, live)
    if kind is ConstantMulLinearOperator:
        inner = of_dense(operator.base_linear_op)
        return Held(max(inner.peak, inner.live + 1), inner.live + 1)
    return Held(2, 1) if kind.to_dense is LinearOperator.to_dense else Held(1, 1)


def _is_kept(operator: Any) -> bool:
    """Whether the library keeps the dense form already, or the evaluated kernel."""
    kept = memoized.names(operator)
    return "kernel_eval" in kept or any(name.endswith("to_dense") for name in kept)


def _of_kernel(kernel: Kernel, d: int, grad: bool, keops: bool) -> Held:
    """Return the matrices of a kernel at points of `d` dimensions, its active ones; `keops` says whether KeOps runs."""
    if (name := family_name(kernel)) is not None:
        of = family(name)
        return Held(2, 2) if grad and of.shape is None and not of.slope_is_value else Held(1, 1)
    kind = type(kernel)
    if kind is ScaleKernel:
        inner = _of_kernel(kernel.base_kernel, d, grad, keops)
        scaled = Held(max(inner.peak, inner.live + 1), inner.live + 1 if grad else 1)
        return scaled if inner.peak else _NOTHING
    if kind in (AdditiveKernel, ProductKernel):
        dimensions = [d if part.active_dims is None else len(part.active_dims) for part in kernel.kernels]
        parts = [_of_kernel(k, own, grad, keops) for k, own in zip(kernel.kernels, dimensions, strict=True)]
        return _combined(parts, grad, kind is ProductKernel)
    if kind is SpectralMixtureKernel:  # grids of all mixtures, points and dimensions
        grid = kernel.num_mixtures * d
        return Held(6 * grid + d, 5 * grid + d + 1) if grad else Held(4 * grid + d, 1)
    if isinstance(kernel, keops_kernel.KeOpsKernel) and not keops:  # all differences, and their squares
        return Held(2 * d, 1)
    return _NOTHING


def _combined(parts: list[Held], grad: bool, product: bool) -> Held:
    """Return the matrices of a sum or product, one part after another: both operands and their result."""
    if _NOTHING in parts:  # something stays lazy: nothing is added up
        return Held(max(part.peak for part in parts), 0)
    (peak, live), kept = parts[0], _kept_of_sums(parts[0])
    for part in parts[1:]:
        peak = max(peak, live + part.peak, live + part.live + 1)
        kept += _kept_of_sums(part)
        with_gradients = live + part.live + 1 if product else kept + 1
        live = with_gradients if grad else 1.0
    return Held(peak, live)


def _kept_of_sums(part: Held) -> float:
    """Return the matrices of an operand that autograd keeps after a sum, which needs no operands itself."""
    return max(1.0, part.live - 1)
