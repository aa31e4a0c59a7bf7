"""Products of the library's conjugate gradients are counted, and what they reach is noted where a call asks for it.

How long they take depends on the numbers, not on the sizes alone.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any

import linear_operator.utils
import torch
from linear_operator import settings as library

from autokern.core.op import inside
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


@hook(linear_operator.utils, "linear_cg")
def _linear_cg(matmul_closure: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    multiply = matmul_closure.matmul if torch.is_tensor(matmul_closure) else matmul_closure
    if not callable(multiply):
        return _stock(matmul_closure, rhs, *args, **kwargs)

    def counted(vectors: Any) -> Any:
        inside.products += 1
        return multiply(vectors)

    try:
        call = _signature.bind(counted, rhs, *args, **kwargs) if is_watched() else None
    except TypeError:  # which stock raises too
        call = None
    return _stock(counted, rhs, *args, **kwargs) if call is None else _noted(call)


def _noted(call: inspect.BoundArguments) -> Any:
    """Run conjugate gradients, and note how large the residual was that they ended with."""
    given, before, outer = call.arguments, inside.products, _begun.residuals
    own = given.get("preconditioner")
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
    made = inside.products - before - 1
    for residual in (r for r in residuals if r.numel()):  # none where there was nothing to solve
        sizes, goal = torch.linalg.vector_norm(residual, dim=-2), given.get("tolerance")
        goal = float(library.cg_tolerance.value() if goal is None else goal)
        missed = not bool(sizes.mean() < goal)
        name = "none" if own is None else "library"
        note(Solved(float(sizes.max()), made, name, sizes.shape[-1], goal=goal, missed=int(missed)))
    return found
