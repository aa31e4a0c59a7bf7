"""Hooks into gpytorch: the covariance matrices of exact kernel types.

`forward` is the seam, because ScaleKernel and others call it on their base kernel directly. Only exact types are
served (a subclass may have changed the formula), never diagonals, traces or batches over input dimensions.
"""

from __future__ import annotations

import functools
from typing import Any

import gpytorch
import linear_operator
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

from autokern import kernels
from autokern.dispatch import bypassed, route
from autokern.hooks import Patch
from autokern.op import get

__all__ = ["patches"]

_dispatch = route(get("kernel_matrix"))


def _stay_out() -> bool:
    return bypassed() or gpytorch.settings.trace_mode.on() or linear_operator.settings.trace_mode.on()


def _hooked(kind: type) -> Any:
    stock = vars(kind)["forward"]

    @functools.wraps(stock)
    def forward(self: Any, x1: Any, x2: Any, diag: bool = False, **params: Any) -> Any:
        plain = type(self) is kind and not diag and not any(params.values())
        if not plain or kernels.family_name(self) is None or _stay_out():
            return stock(self, x1, x2, diag=diag, **params)
        return _dispatch(self, x1, x2)

    return forward


def _hooked_scale() -> Any:
    stock = vars(ScaleKernel)["forward"]

    @functools.wraps(stock)
    def forward(self: Any, x1: Any, x2: Any, last_dim_is_batch: bool = False, diag: bool = False, **params: Any) -> Any:
        plain = type(self) is ScaleKernel and not (diag or last_dim_is_batch or any(params.values()))
        if not plain or kernels.family_name(self) is None or _stay_out():
            return stock(self, x1, x2, last_dim_is_batch=last_dim_is_batch, diag=diag, **params)
        return _dispatch(self, x1, x2)

    return forward


_replacements = {RBFKernel: _hooked(RBFKernel), MaternKernel: _hooked(MaternKernel), ScaleKernel: _hooked_scale()}


def patches() -> list[Patch]:
    """Return the patches of gpytorch."""
    return [Patch(kind, "forward", replacement) for kind, replacement in _replacements.items()]
