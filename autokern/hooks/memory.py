"""Guards before the calls of gpytorch and linear_operator that allocate most: a result that cannot fit is refused.

Without a guard, a matrix that is too large is filled page by page until the system kills the process. A guard reads the
available memory only where it predicts `memory.LARGE` bytes or more, and its prediction is a lower bound.
The hook of `evaluate_kernel` also restores the active dimensions of a kernel that raises; stock loses them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import operators
from linear_operator.operators import (
    CholLinearOperator,
    DenseLinearOperator,
    SumBatchLinearOperator,
    TriangularLinearOperator,
)
from linear_operator.utils.memoize import add_to_cache

from autokern.core.errors import caught, unless_it_fails
from autokern.core.releases.known import full_name, relied
from autokern.hooks import later, matrixfree
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, stock_of
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator
from autokern.model import footprint, memoized, prior_state
from autokern.model.relied import MEMORY
from autokern.system import memory

_WORTH_A_LOOK = 2**17
"""Elements below which no guard is needed: `memory.LARGE` is 64 such matrices in double precision."""


@unless_it_fails
def needed(operator: Any) -> int:
    """Return a lower bound of the bytes for an operator's dense matrix, None if it cannot be read."""
    itemsize: int = operator.dtype.itemsize
    return int(footprint.of_dense(operator).peak * operator.shape.numel()) * itemsize


def _guard(position: str, operator: Any) -> None:
    """Refuse to form an operator's dense matrix if it cannot fit; an operator that cannot be read is not refused."""
    if (need := needed(operator)) is not None:
        kernel = getattr(operator, "kernel", None)
        of, shape = type(operator if kernel is None else kernel).__name__, " x ".join(map(str, operator.shape))
        _refuse_beyond(need, f"{position} of {of}, {shape}", operator, kernel is not None)


def _refuse_beyond(need: int, asked: str, like: Any, of_kernel: bool) -> None:
    """Refuse a call whose `need` in bytes does not fit the memory of `like`'s device."""
    if not memory.fits(need, like.device):
        asked = f"{asked}, {like.dtype}, {like.device},"
        memory.refuse(asked, need, like.device, str(like.dtype), of_kernel)


_KERNEL = (
    "gpytorch.lazy.lazy_evaluated_kernel_tensor:LazyEvaluatedKernelTensor.__init__",
    "gpytorch.kernels.kernel:Kernel",
)
_stock_evaluate_kernel = stock_of(LazyEvaluatedKernelTensor, "evaluate_kernel")


_known = relied((full_name(LazyEvaluatedKernelTensor, "evaluate_kernel"), _stock_evaluate_kernel), *MEMORY, *_KERNEL)


@hook(LazyEvaluatedKernelTensor, "evaluate_kernel", relies=None)
def _evaluate_kernel(self: Any) -> Any:
    """Replace the matrix by an operator where that is better, else guard; restore the kernel if it raises."""
    compiling = torch.compiler.is_compiling()  # a compiler cannot trace `_known.holds`
    if prior_state.is_past(self) and (compiling or _known.holds()):
        return prior_state.evaluate(self)
    if compiling or memoized.is_kept(self, "kernel_eval"):
        return _stock_evaluate_kernel(self)
    free, large = (None if stay_out() else _instead(self)) or (None, False)
    if free is not None and _known.holds():
        add_to_cache(self, "kernel_eval", free)
        return free
    if large and _known.holds():
        _guard("evaluate_kernel", self)
    kernel = self.kernel
    active = kernel.active_dims
    try:
        return _stock_evaluate_kernel(self)
    except BaseException:
        kernel.active_dims = active
        raise


@unless_it_fails
def _instead(lazy: Any) -> tuple[Any, bool]:
    """Return the operator that replaces a kernel matrix (None to form it), and whether the matrix is large."""
    later.look()  # the first call of a program of models that are not exact
    pairs = lazy.x1.shape[:-1].numel() * lazy.x2.shape[-2]
    large = pairs * math.prod(lazy.kernel._batch_shape) >= _WORTH_A_LOOK  # it may be a plain tuple
    with torch.set_grad_enabled(lazy._is_grad_enabled):
        return matrixfree.instead_of_dense(lazy, large), large


_stock_covar_dist = stock_of(Kernel, "covar_dist")


def _is_small(self: Any, x1: Any, x2: Any, diag: bool = False, *rest: Any, **more: Any) -> bool:
    return diag or stay_out() or x1.numel() * x2.shape[-2] < _WORTH_A_LOOK


@hook(Kernel, "covar_dist", idle=_is_small)
def _covar_dist(self: Any, x1: Any, x2: Any, diag: bool = False, last_dim_is_batch: bool = False, **more: Any) -> Any:
    _guard_distances(self, x1, x2, x1.shape[-1] if last_dim_is_batch else 1)
    return _stock_covar_dist(self, x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **more)


def _guard_distances(kernel: Any, x1: Any, x2: Any, matrices: int) -> None:
    """Refuse matrices of distances that do not fit; for mismatched shapes the library raises its own error."""
    try:
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])  # type: ignore[no-untyped-call]
    except caught(RuntimeError):
        return
    need = matrices * batch.numel() * x1.shape[-2] * x2.shape[-2] * x1.element_size()
    points = f"{x1.shape[-2]} x {x2.shape[-2]} points, {x1.shape[-1]} dimensions"
    _refuse_beyond(need, f"covar_dist of {type(kernel).__name__}, {points}", x1, of_kernel=True)


def _guard_dense(kind: type) -> None:
    """Put a guard in front of a class's `to_dense`."""
    stock = stock_of(kind, "to_dense")

    def idle(self: Any, *args: Any, **more: Any) -> bool:
        return stay_out() or memoized.is_kept(self, stock.__qualname__) or self.shape.numel() < _WORTH_A_LOOK

    @hook(kind, "to_dense", relies=MEMORY, idle=idle)
    def _to_dense(self: Any, *args: Any, **more: Any) -> Any:
        _guard("to_dense", self)
        return stock(self, *args, **more)


_HOLD = (CholLinearOperator, DenseLinearOperator, SumBatchLinearOperator, TriangularLinearOperator)
"""Classes whose own `to_dense` allocates nothing before that of a part does, which is guarded."""

for _kind in (MatrixFreeKernelOperator, *vars(operators).values()):
    if isinstance(_kind, type) and "to_dense" in vars(_kind) and _kind not in _HOLD:
        _guard_dense(_kind)
