"""Lower bounds on the memory, in matrices, of evaluating a lazy kernel or operator of the libraries densely.

Kernels count as the candidate of `kernel_matrix` with the least memory. The counts follow the libraries' code and were
measured by ``calibration/memory.py``. Unknown parts count zero, so that the memory guard never refuses wrongly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel, SpectralMixtureKernel
from gpytorch.kernels.keops import keops_kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import operators

from autokern.kernels.family import family
from autokern.kernels.tree import family_name
from autokern.model import memoized


class Held(NamedTuple):
    """Number of matrices that a computation allocates."""

    peak: float  # during the computation
    live: float  # after it: the result, and tensors that autograd keeps


_NOTHING = Held(0, 0)


def of_dense(operator: Any) -> Held:
    """Return the matrices held while `to_dense` of an operator runs."""
    kind = type(operator)
    kept = memoized.names(operator)
    if "kernel_eval" in kept or any(name.endswith("to_dense") for name in kept):
        return _NOTHING
    if isinstance(operator, (operators.DiagLinearOperator, operators.IdentityLinearOperator)):
        return Held(1, 1)  # before triangular ones: a diagonal is one
    if isinstance(operator, (operators.DenseLinearOperator, operators.TriangularLinearOperator)):
        return _NOTHING
    if kind is LazyEvaluatedKernelTensor:
        x1, x2 = operator.x1, operator.x2
        grad = operator._is_grad_enabled and operator.requires_grad
        d = 1 if operator.last_dim_is_batch else x1.shape[-1]
        return _of_kernel(operator.kernel, d, grad, keops_kernel._use_keops(x1, x2))
    if kind.to_dense is operators.SumLinearOperator.to_dense:
        peak = live = 0.0
        for number, part in enumerate(operator.linear_ops):
            inner = of_dense(part)
            peak = max(peak, live + inner.peak, live + inner.live + 1)
            live += inner.live + (number == 0)
        return Held(peak, live)
    if kind is operators.ConstantMulLinearOperator:
        inner = of_dense(operator.base_linear_op)
        return Held(max(inner.peak, inner.live + 1), inner.live + 1)
    return Held(2, 1) if kind.to_dense is operators.LinearOperator.to_dense else Held(1, 1)


def _of_kernel(kernel: Kernel, d: int, grad: bool, keops: bool) -> Held:
    """Return the matrices of a kernel with `d` active dimensions; `keops` says whether KeOps runs."""
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
    """Return the matrices of a sum or product that is evaluated part after part, with operands and results."""
    if _NOTHING in parts:  # a part stays lazy, so no dense sum is formed
        return Held(max(part.peak for part in parts), 0)
    (peak, live), kept = parts[0], _kept_of_sums(parts[0])
    for part in parts[1:]:
        peak = max(peak, live + part.peak, live + part.live + 1)
        kept += _kept_of_sums(part)
        with_gradients = live + part.live + 1 if product else kept + 1
        live = with_gradients if grad else 1.0
    return Held(peak, live)


def _kept_of_sums(part: Held) -> float:
    """Return the matrices that autograd keeps of an operand after a sum, whose backward reads no operands."""
    return max(1.0, part.live - 1)
