"""What the library's conjugate gradients reach, and after how many products, is noted where a call asks for it."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import linear_operator.utils
import torch
from linear_operator import settings as library

from autokern.core.solved import Solved, is_watched, note
from autokern.hooks.install import hook, stock_of

_stock = stock_of(linear_operator.utils, "linear_cg")
_module = sys.modules.get("linear_operator.utils.linear_cg")
_signature = inspect.signature(_stock)


class _Begun(threading.local):
    """Takes the residual that iterations of this thread begin with; they write the later ones into the same tensor."""

    residuals: list[Any] | None = None

    def take(self, residual: Any) -> None:
        if self.residuals is not None:
            self.residuals[:] = [residual]


_begun = _Begun()
_stock_default = stock_of(_module, "_default_preconditioner")


@hook(_module, "_default_preconditioner")
def _default_preconditioner(x: Any) -> Any:
    _begun.take(x)
    return _stock_default(x)


@hook(linear_operator.utils, "linear_cg", relies=None)
def _linear_cg(matmul_closure: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    multiply = matmul_closure.matmul if torch.is_tensor(matmul_closure) else matmul_closure
    try:
        call = _signature.bind(multiply, rhs, *args, **kwargs) if is_watched() and callable(multiply) else None
    except TypeError:  # which stock raises too
        call = None
    return _stock(matmul_closure, rhs, *args, **kwargs) if call is None else _noted(call, multiply)


def _noted(call: inspect.BoundArguments, multiply: Callable[[Any], Any]) -> Any:
    """Run conjugate gradients, and note how large the residual was that they ended with, after how many products."""
    given, made, outer = call.arguments, -1, _begun.residuals  # the first product is that of the initial guess
    own = given.get("preconditioner")

    def counted(vectors: Any) -> Any:
        nonlocal made
        made += 1
        return multiply(vectors)

    given["matmul_closure"] = counted
    if own is not None:

        def preconditioner(x: Any) -> Any:
            _begun.take(x)
            return own(x)

        given["preconditioner"] = preconditioner
    residuals: list[Any] = []
    _begun.residuals = residuals
    try:
        found = _stock(*call.args, **call.kwargs)
    finally:
        _begun.residuals = outer
    for residual in (r for r in residuals if r.numel()):  # none where there was nothing to solve
        sizes, goal = torch.linalg.vector_norm(residual, dim=-2), given.get("tolerance")
        goal = float(library.cg_tolerance.value() if goal is None else goal)
        missed = not bool(sizes.mean() < goal)
        name = "none" if own is None else "library"
        note(Solved(float(sizes.max()), made, name, sizes.shape[-1], goal=goal, missed=int(missed)))
    return found
