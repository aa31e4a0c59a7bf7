"""Hooks into linear_operator's `Solve`: the op `solve` for large noisy covariances, instead of conjugate gradients.

The library's own backward pass solves again; it gets the operator of the forward pass, and thereby its factor.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from linear_operator.operators import AddedDiagLinearOperator

from autokern.core.errors import unless_it_fails
from autokern.hooks.bypass import stay_out
from autokern.hooks.install import hook, stock_of
from autokern.hooks.kernel_operator import MatrixFreeKernelOperator
from autokern.kernels.embedded import Embedded
from autokern.model.library_orders import EXACT, SOLVE, regime
from autokern.model.marginal import is_unstructured
from autokern.runtime.dispatch import route

__all__: list[str] = []


_dispatch = route("solve", looked=True)
_solve_module: Any = sys.modules.get("linear_operator.functions._solve")


class _Reuse(threading.local):
    """The operator whose solve this thread is differentiating; it caches its factor."""

    operator: Any = None


_reuse = _Reuse()
_stock_solve = stock_of(_solve_module, "_solve")


def _factorises(linear_op: Any, *_: Any, **__: Any) -> bool:
    return _reuse.operator is None and regime(linear_op.size(-1), SOLVE) == EXACT


@hook(_solve_module, "_solve", idle=_factorises)
def _solve(linear_op: Any, rhs: Any) -> Any:
    known = _reuse.operator
    if known is not None and _same_tensors(known, linear_op):
        linear_op = known
    found = _asked(linear_op)
    if found is None:
        return _stock_solve(linear_op, rhs)
    if rhs.dim() < linear_op.dim():  # all matrices of a batch share them, as in backward passes
        rhs = rhs.expand(*linear_op.batch_shape, *rhs.shape[-2:])
    return _dispatch(linear_op, rhs, *found)


def _asked(operator: Any) -> tuple[Embedded | None] | None:
    """Return a tuple of the system's kernel (None for a formed matrix), or None where stock must run."""
    if stay_out() or regime(operator.size(-1), SOLVE) == EXACT:
        return None
    kernel = _kernel_of(operator)
    return None if kernel is None and not is_unstructured(operator) else (kernel,)


@unless_it_fails
def _kernel_of(operator: Any) -> Embedded | None:
    """Return the kernel of a matrix-free covariance plus noise, None for any other operator."""
    if operator.__class__ is not AddedDiagLinearOperator or operator.preconditioner_override is not None:
        return None
    covariance = operator._linear_op
    if covariance.__class__ is not MatrixFreeKernelOperator or not covariance._same or operator.dim() > 2:
        return None
    return covariance._kernel


def _same_tensors(one: Any, other: Any) -> bool:
    """Whether two operators consist of the identical tensors; autograd checks their versions."""
    mine, yours = one.representation(), other.representation()
    return (
        type(one) is type(other) and len(mine) == len(yours) and all(a is b for a, b in zip(mine, yours, strict=True))
    )


_stock_solve_backward = stock_of(_solve_module.Solve, "backward")


@hook(_solve_module.Solve, "backward")
def _solve_backward(ctx: Any, grad_output: Any) -> Any:
    """Solve with the factor of the forward pass; the library rebuilds its operator and factorises again."""
    before = _reuse.operator
    _reuse.operator = None if stay_out() else getattr(ctx, "_linear_op", None)
    try:
        return _stock_solve_backward(ctx, grad_output)
    finally:
        _reuse.operator = before
