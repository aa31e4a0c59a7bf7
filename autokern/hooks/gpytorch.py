"""Hooks into gpytorch: the covariance matrices of exact kernel types, and the mean cache of fantasy models.

`forward` is the seam, because ScaleKernel and others call it on their base kernel directly. Only exact types are
served (a subclass may have changed the formula), never diagonals, traces or batches over input dimensions.
"""

from __future__ import annotations

import functools
from typing import Any

import gpytorch
import linear_operator
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.utils.errors import CachingError
from linear_operator.utils.memoize import add_to_cache, clear_cache_hook, get_from_cache

from autokern import kernels
from autokern.dispatch import bypassed, route
from autokern.hooks import Patch, is_enabled
from autokern.op import get

__all__ = ["patches"]

_dispatch = route(get("kernel_matrix"))


def _stay_out() -> bool:
    tracing = gpytorch.settings.trace_mode.on() or linear_operator.settings.trace_mode.on()
    return tracing or not is_enabled() or bypassed()


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


_stock_fantasy = DefaultPredictionStrategy.get_fantasy_strategy


@functools.wraps(_stock_fantasy)
def _get_fantasy_strategy(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Store the updated mean cache where it is looked up (gpytorch #2669), so that it is not solved for again.

    The library files it without the policy for missing observations that is part of the key; the next prediction then
    solves with the whole matrix, above `max_cholesky_size` by conjugate gradients to a tolerance of 0.01.
    """
    strategy = _stock_fantasy(self, *args, **kwargs)
    policy = gpytorch.settings.observation_nan_policy.value()
    if policy != "ignore" or _stay_out():
        return strategy
    try:
        cache = get_from_cache(strategy, "mean_cache")
    except CachingError:
        return strategy
    if gpytorch.settings.detach_test_caches.on():
        cache = cache.detach()
    elif cache.grad_fn is not None:
        cache.grad_fn.register_hook(functools.partial(clear_cache_hook, strategy))
    add_to_cache(strategy, "mean_cache", cache, policy)
    return strategy


_replacements = {RBFKernel: _hooked(RBFKernel), MaternKernel: _hooked(MaternKernel), ScaleKernel: _hooked_scale()}


def patches() -> list[Patch]:
    """Return the patches of gpytorch."""
    forwards = [Patch(kind, "forward", replacement) for kind, replacement in _replacements.items()]
    return [*forwards, Patch(DefaultPredictionStrategy, "get_fantasy_strategy", _get_fantasy_strategy)]
