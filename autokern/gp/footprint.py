"""Footprint: how many matrices a kernel or an operator of the libraries holds at once while it becomes dense.

Counts of matrices at the peak and of matrices that stay: temporaries of a formula, and tensors saved for its backward
pass. They are counted from the libraries' code and measured by ``calibration/memory.py``. Unknown parts count nothing:
a guard must not refuse without knowing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gpytorch.kernels import (
    AdditiveKernel,
    CosineKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
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
from autokern.kernels.family import Family, family
from autokern.kernels.tree import family_name

__all__ = ["Held", "of_dense", "of_factor", "of_kernel", "of_mixture"]


class Held(NamedTuple):
    """Number of matrices that a computation holds, beyond those before it."""

    peak: float
    live: float  # after it: the result, and tensors that autograd keeps
    saved: bool = False  # whether autograd keeps the result itself


_NOTHING = Held(0, 0)


def _served(of: Family, grad: bool) -> Held:
    """Return the matrices of the most frugal candidate of `kernel_matrix`, which keeps the slope of a plain family."""
    if not grad or of.shape is not None:
        return Held(1, 1)
    return Held(1, 1, True) if of.slope_is_value else Held(2, 2)


def of_kernel(kernel: Kernel, d: int, grad: bool, dispatched: bool = True) -> Held:
    """Return the matrices that the evaluation of a kernel at points of `d` dimensions holds.

    Its own active dimensions are taken as selected already. If `dispatched`, the most frugal candidate of
    `kernel_matrix` counts for what it serves, else gpytorch does.
    """
    kind = type(kernel)
    if dispatched and (served := family_name(kernel)) is not None:
        return _served(family(served), grad)
    if kind is ScaleKernel:
        return _scaled(of_kernel(kernel.base_kernel, d, grad, dispatched), grad)
    if kind in (AdditiveKernel, ProductKernel):
        parts = [of_kernel(part, _dimensions(part, d), grad, dispatched) for part in kernel.kernels]
        return _combined(parts, grad and kind is ProductKernel)
    leaf = _LEAVES.get(kind)
    return _NOTHING if leaf is None else leaf(kernel, d, grad)


def _dimensions(kernel: Kernel, d: int) -> int:
    return d if kernel.active_dims is None else len(kernel.active_dims)


def _scaled(inner: Held, grad: bool) -> Held:
    """One more matrix; autograd keeps the one that is scaled."""
    if inner is _NOTHING:
        return inner
    live = inner.live + 1
    return Held(max(inner.peak, live), live if grad else 1)


def _combined(parts: list[Held], both_saved: bool) -> Held:
    """Sums and products one after another: both operands and their result; a product keeps its operands."""
    if _NOTHING in parts:  # something stays lazy: nothing is added up
        return Held(max(part.peak for part in parts), sum(part.live for part in parts)) if any(parts) else _NOTHING
    kept, peak, first = 0.0, parts[0].peak, parts[0]
    live, saved = first.live, first.saved
    for part in parts[1:]:
        both = kept + live + part.live
        peak = max(peak, kept + live + part.peak, both + 1)
        if both_saved:
            kept, live, saved = both, 1, False
        else:
            kept, live, saved = both - (not saved) - (not part.saved), 1, False
    return Held(peak, kept + live, saved)


def _rbf(kernel: Any, d: int, grad: bool) -> Held:
    return Held(2, 2, _has_several_lengthscales(kernel)) if grad else Held(1, 1)


def _has_several_lengthscales(kernel: Any) -> bool:
    return (kernel.ard_num_dims or 1) > 1


def _matern(kernel: Any, d: int, grad: bool) -> Held:
    several = _has_several_lengthscales(kernel)
    peaks = {(0.5, False): (1, 2), (1.5, False): (2, 3), (2.5, False): (3, 4)}
    peaks |= {(0.5, True): (3, 5), (1.5, True): (4, 6), (2.5, True): (5, 7)}
    forward, with_gradients = peaks.get((kernel.nu, several), (1, 1))
    if not grad:
        return Held(forward, 1)
    return Held(with_gradients, {0.5: 5, 1.5: 6, 2.5: 6}.get(kernel.nu, 1) if several else 2)


def _rq(kernel: Any, d: int, grad: bool) -> Held:
    return Held(4, 4) if grad else Held(3, 1)


def _periodic(kernel: Any, d: int, grad: bool) -> Held:
    return Held(7 * d, 5 * d + 1) if grad else Held(3 * d, 1)


def _cosine(kernel: Any, d: int, grad: bool) -> Held:
    return Held(5, 5) if grad else Held(3, 1)


def of_mixture(kernel: Any, d: int, grad: bool) -> Held:
    """Return the matrices of a spectral mixture: several grids of all mixtures, points and dimensions."""
    grid = kernel.num_mixtures * d
    return Held(6 * grid + d, 5 * grid + d + 1) if grad else Held(4 * grid + d, 1)


_LEAVES: dict[type, Callable[[Any, int, bool], Held]] = {
    RBFKernel: _rbf,
    MaternKernel: _matern,
    RQKernel: _rq,
    PeriodicKernel: _periodic,
    CosineKernel: _cosine,
    SpectralMixtureKernel: of_mixture,
}


def of_dense(operator: Any, dispatched: bool = True) -> Held:
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
        x = operator.x1
        grad = operator._is_grad_enabled and operator.requires_grad
        return of_kernel(operator.kernel, 1 if operator.last_dim_is_batch else x.shape[-1], grad, dispatched)
    if kind.to_dense is SumLinearOperator.to_dense:
        peak = live = 0.0
        for number, part in enumerate(operator.linear_ops):
            inner = of_dense(part, dispatched)
            peak = max(peak, live + inner.peak, live + inner.live + 1)
            live += inner.live + (number == 0)
        return Held(peak, live)
    if kind is ConstantMulLinearOperator:
        inner = of_dense(operator.base_linear_op, dispatched)
        return Held(max(inner.peak, inner.live + 1), inner.live + 1)
    return Held(2, 1) if kind.to_dense is LinearOperator.to_dense else Held(1, 1)


def _is_kept(operator: Any) -> bool:
    """Whether the library keeps the dense form already, or the evaluated kernel."""
    kept = memoized.names(operator)
    return "kernel_eval" in kept or any(name.endswith("to_dense") for name in kept)


def of_factor(operator: Any, dispatched: bool = True) -> Held:
    """Return the matrices of the library's Cholesky factorisation of an operator: the factor, and a row-major copy."""
    inner = of_dense(operator, dispatched)
    return Held(max(inner.peak, inner.live + 2), inner.live + 1)
