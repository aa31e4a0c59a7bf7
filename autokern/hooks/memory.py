"""Guards before the calls of gpytorch and linear_operator that allocate most: a result that cannot fit is refused.

Without them a matrix that is too large is filled page by page until the system kills the process. A guard reads the
available memory only where it predicts `memory_limit.LARGE` bytes or more, and refuses only what it knows not to fit.
`evaluate_kernel` also restores the active dimensions of a kernel that raises: the library loses them for good.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from gpytorch.kernels import Kernel, SpectralMixtureKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import (
    CatLinearOperator,
    ConstantMulLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    MaskedLinearOperator,
    MatmulLinearOperator,
    MulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    ZeroLinearOperator,
)
from linear_operator.utils.memoize import add_to_cache

from autokern.gp import footprint, memoized, prior_state
from autokern.gp.relied import MEMORY
from autokern.hooks import matrixfree
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, stock_of
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator
from autokern.hooks.reading import unless_it_fails
from autokern.system import memory_limit

__all__ = ["guard_cache", "needed"]

_WORTH_A_LOOK = 2**17
"""Elements of a matrix below which no count of matrices reaches `memory_limit.LARGE`: 512 times eight bytes each."""
_CACHES = {"mean_cache": 2.0, "covar_cache": 3.0}
"""Matrices held for caches: noisy covariance, factor, inverse root; kernels have their own guards."""


def needed(position: str, subject: Any, dispatched: bool = True) -> int:
    """Return the bytes that a guarded call takes at its peak, as far as they are known.

    `position` is the method, one of ``evaluate_kernel``, ``to_dense``, ``_cholesky``, ``mean_cache`` and
    ``covar_cache``, `subject` its object. If `dispatched`, kernel matrices are those of the most frugal candidate, else
    gpytorch's own.
    """
    operator = subject.lik_train_train_covar if position in _CACHES else subject
    if position in _CACHES:
        held = _CACHES[position]
    elif position == "_cholesky":
        held = footprint.of_factor(operator, dispatched).peak
    else:
        held = footprint.of_dense(operator, dispatched).peak
    itemsize: int = operator.dtype.itemsize
    return int(held * operator.shape.numel()) * itemsize


_needed = unless_it_fails(needed)


def _refuse(position: str, subject: Any, need: int) -> None:
    operator = subject.lik_train_train_covar if position in _CACHES else subject
    kernel = getattr(operator, "kernel", None)
    of = type(operator).__name__ if kernel is None else type(kernel).__name__
    shape = " x ".join(map(str, operator.shape))
    asked = f"{position} of {of}, {shape}, {operator.dtype}, {operator.device},"
    ways = memory_limit.ways_out(str(operator.dtype), kernel is not None or position in _CACHES)
    memory_limit.refuse(asked, need, operator.device, ways)


def _guard(position: str, subject: Any) -> None:
    """Refuse a call that is known not to fit; unreadable arguments are left to the library."""
    need = _needed(position, subject)
    device = subject.lik_train_train_covar.device if position in _CACHES else subject.device
    if need is not None and not memory_limit.fits(need, device):
        _refuse(position, subject, need)


_KERNEL = (
    "gpytorch.lazy.lazy_evaluated_kernel_tensor:LazyEvaluatedKernelTensor.__init__",
    "gpytorch.kernels.kernel:Kernel",
)
_stock_evaluate_kernel = stock_of(LazyEvaluatedKernelTensor, "evaluate_kernel")


@hook(LazyEvaluatedKernelTensor, "evaluate_kernel", relies=(*MEMORY, *_KERNEL))
def _evaluate_kernel(self: Any) -> Any:
    """Replace the matrix by an operator where called for, else guard; restore the kernel if it raises."""
    if prior_state.is_past(self):
        return prior_state.evaluate(self)
    kernel = self.kernel
    if not (stay_out() or memoized.is_kept(self, "kernel_eval")):
        pairs = self.x1.shape[:-1].numel() * self.x2.shape[-2]
        large = pairs * math.prod(kernel._batch_shape) >= _WORTH_A_LOOK  # which may be a plain tuple
        with torch.set_grad_enabled(self._is_grad_enabled):
            free = matrixfree.instead_of_dense(self, large)
        if free is not None:
            add_to_cache(self, "kernel_eval", free)
            return free
        if large:
            _guard("evaluate_kernel", self)
    if torch.compiler.is_compiling():
        return _stock_evaluate_kernel(self)
    active = kernel.active_dims
    try:
        return _stock_evaluate_kernel(self)
    except BaseException:
        kernel.active_dims = active
        raise


_stock_covar_dist = stock_of(Kernel, "covar_dist")


@hook(Kernel, "covar_dist")
def _covar_dist(self: Any, x1: Any, x2: Any, diag: bool = False, last_dim_is_batch: bool = False, **more: Any) -> Any:
    if not (diag or stay_out()) and x1.numel() * x2.shape[-2] >= _WORTH_A_LOOK:
        per_dimension = x1.shape[-1] if last_dim_is_batch else 1
        _guard_points("covar_dist", self, x1, x2, per_dimension)
    return _stock_covar_dist(self, x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **more)


def _guard_points(position: str, kernel: Any, x1: Any, x2: Any, per_pair: int) -> None:
    """Refuse `per_pair` elements for each pair of points, if they do not fit."""
    try:
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError:
        return
    pairs = batch.numel() * x1.shape[-2] * x2.shape[-2]
    need = pairs * per_pair * x1.element_size()
    if not memory_limit.fits(need, x1.device):
        of = "" if kernel is None else f" of {type(kernel).__name__}"
        asked = f"{position}{of}, {x1.shape[-2]} x {x2.shape[-2]} points, {x1.shape[-1]} dimensions, {x1.dtype},"
        memory_limit.refuse(asked, need, x1.device, memory_limit.ways_out(str(x1.dtype), of_kernel=True))


_keops = sys.modules.get("gpytorch.kernels.keops.keops_kernel")
_stock_lazify: Any = stock_of(_keops, "_lazify_and_expand_inputs")


@hook(_keops, "_lazify_and_expand_inputs", everywhere="gpytorch.kernels.keops")
def _lazify_and_expand_inputs(x1: Any, x2: Any) -> Any:
    """Guard the differences of all points, and their squares, where KeOps is not in use."""
    if not stay_out() and x1.numel() * x2.shape[-2] >= _WORTH_A_LOOK and not vars(_keops)["_use_keops"](x1, x2):
        _guard_points("a KeOps kernel without KeOps", None, x1, x2, 2 * x1.shape[-1])
    return _stock_lazify(x1, x2)


_stock_mixture = stock_of(SpectralMixtureKernel, "forward")


@hook(SpectralMixtureKernel, "forward")
def _mixture(self: Any, x1: Any, x2: Any, diag: bool = False, last_dim_is_batch: bool = False, **params: Any) -> Any:
    if not (diag or stay_out()) and x1.numel() * x2.shape[-2] * self.num_mixtures >= _WORTH_A_LOOK:
        grad = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        held = footprint.of_mixture(self, x1.shape[-1], grad).peak
        _guard_points("forward", self, x1, x2, int(held))
    return _stock_mixture(self, x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **params)


def _guarded(kind: type, name: str) -> Any:
    """Return a method of an operator with a guard in front of it."""
    stock = stock_of(kind, name)

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **more: Any) -> Any:
        if not (stay_out() or memoized.is_kept(self, stock.__qualname__)) and self.shape.numel() >= _WORTH_A_LOOK:
            _guard(name, self)
        return stock(self, *args, **more)

    return method


_DENSE = (
    LinearOperator,
    CatLinearOperator,
    ConstantMulLinearOperator,
    DiagLinearOperator,
    MaskedLinearOperator,
    MatmulLinearOperator,
    MatrixFreeKernelOperator,
    MulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    ZeroLinearOperator,
)
"""Classes with a `to_dense` of their own that allocates; others inherit it, or have their matrix already."""

for _kind in _DENSE:
    hook(_kind, "to_dense", relies=MEMORY)(_guarded(_kind, "to_dense"))
hook(LinearOperator, "_cholesky", relies=MEMORY)(_guarded(LinearOperator, "_cholesky"))


def guard_cache(strategy: DefaultPredictionStrategy, name: str) -> None:
    """Refuse a cache of predictions, made from the factor of the training covariance, if it does not fit."""
    if not stay_out() and strategy.num_train**2 >= _WORTH_A_LOOK:
        _guard(name, strategy)
