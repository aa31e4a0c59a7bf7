"""Hook into `LinearOperator.add_low_rank`: the roots of the sum are computed when they are read.

``dense + root`` updates a root and an inverse root of the dense matrix (Stanton et al., AISTATS 2021): a Cholesky
factor or Lanczos iterations, a triangular solve and a full singular value decomposition, each time that a kernel such
as ``RBFKernel() + LinearKernel()`` is evaluated. A training step or a prediction reads no root.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from linear_operator.operators import (
    ConstantMulLinearOperator,
    DenseLinearOperator,
    LinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)

from autokern.hooks.bypass import stay_out_of_operators
from autokern.hooks.install import hook, stock_of
from autokern.model import memoized
from autokern.model.library_orders import ORDERED, ROOT, as_now, regime
from autokern.model.relied import MEMORY

_TERMS = {DenseLinearOperator, LowRankRootLinearOperator, MatmulLinearOperator, RootLinearOperator}
"""Operators that hold tensors only, no kernel that is still to be evaluated."""
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


_stock_add_low_rank = stock_of(LinearOperator, "add_low_rank")


@hook(LinearOperator, "add_low_rank", relies=MEMORY)
def _add_low_rank(self: Any, low_rank_mat: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or stay_out_of_operators() or not _waits(self):
        return _stock_add_low_rank(self, low_rank_mat, *args, **kwargs)
    rootless = copy.copy(self)
    rootless.__dict__[_CACHE] = {}
    total = _stock_add_low_rank(rootless, low_rank_mat, generate_roots=False)
    graph, as_then = torch.is_grad_enabled(), as_now()

    def compute() -> dict[Any, Any]:
        with torch.set_grad_enabled(graph), as_then():
            found: dict[Any, Any] = _stock_add_low_rank(self, low_rank_mat).__dict__[_CACHE]
        return found

    total.__dict__[_CACHE] = _Roots(compute)
    return total


def _waits(operator: Any) -> bool:
    """Whether the roots of a sum may be deferred; never iterations that the user ordered: they draw random numbers."""
    terms = operator.linear_ops if type(operator) is SumLinearOperator else (operator,)
    held = (t.base_linear_op if type(t) is ConstantMulLinearOperator else t for t in terms)
    known = type(operator) in (SumLinearOperator, DenseLinearOperator) and all(type(t) in _TERMS for t in held)
    if not known or regime(operator.shape[-1], ROOT) == ORDERED:
        return False
    return type(operator.__dict__.get(_CACHE)) is _Roots or not memoized.names(operator)
