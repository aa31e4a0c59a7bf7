"""Hooks into `ExactGP`: posteriors at a few points are computed as a whole.

BoTorch's ``model.posterior(X)`` calls `ExactGP`, whose mean and covariance are computed from the model's arrays.
"""

from __future__ import annotations

import functools
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from linear_operator.operators import ZeroLinearOperator

from autokern.core.autograd import has_duals
from autokern.core.errors import left, unless_it_fails
from autokern.core.state import Beside
from autokern.hooks import later, strategies
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook
from autokern.model.arrays import UnreadError
from autokern.model.forward import parts_of
from autokern.model.libraries import EXACT, SOLVE, regime
from autokern.prediction import factor_cache
from autokern.prediction.array_posterior import MOST, Posterior
from autokern.runtime.dispatch import in_force, route

_dispatch = route("posterior", looked=True)
_known: Beside[Posterior] = Beside()  # the arrays read of a model, by its prediction strategy
_left_alone: Beside[bool] = Beside()
"""By strategy: True for an unsupported model; False after a first prediction if the arrays are read at the second."""
_DTYPES = torch.float32, torch.float64


@hook(ExactGP, "__call__", relies=None)
def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    later.look()
    found = _read(self, args[0]) if len(args) == 1 and not kwargs and not self.training else None
    if found is None:
        return _call.__wrapped__(self, *args, **kwargs)
    predicted = _dispatch(found, args[0], functools.partial(_call.__wrapped__, self))
    if gpytorch.settings.skip_posterior_variances.on():
        return MultivariateNormal(predicted.loc, ZeroLinearOperator(*predicted.loc.shape, predicted.loc.shape[-1]))
    return predicted


@unless_it_fails
def _read(model: Any, x: torch.Tensor) -> Posterior | None:
    """Return the arrays of the model as it is now, None where stock must run."""
    before = model.prediction_strategy
    if not _is_plain(x) or has_duals() or _left_alone.get(before) or stay_out_of_models() or not _asked(model, x):
        return None
    if _known.get(before) is None:
        try:
            parts_of(type(model))  # a cheap test before the strategy is read
        except UnreadError:
            return None
    strategy = strategies.ours(model)
    if strategy is None:
        _left_alone.put(model.prediction_strategy, True)
        return None
    known = _known.get(strategy)
    if known is None or not known.holds():
        known = _made(model, strategy)
    return known if known is not None and known.fits(x) else None


def _is_plain(x: Any) -> bool:
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.dtype in _DTYPES and x.layout is torch.strided
    return plain and not x.is_meta and not x.is_neg() and not x._is_zerotensor() and x.dim() > 1


def _asked(model: Any, x: torch.Tensor) -> bool:
    """Whether the arrays compute the same as stock under the current settings."""
    settings, data = gpytorch.settings, model.train_inputs[0]
    if settings.prior_mode.on():
        return False
    if torch.is_grad_enabled() and settings.detach_test_caches.off():  # gradients pass through the weights
        return False
    if settings.observation_nan_policy.value() != "ignore" or settings.memory_efficient.on():
        return False
    if settings.debug.on() and data.shape == x.shape:
        return False  # stock may warn that these are the training points
    return regime(data.shape[-2], SOLVE) == EXACT and x.shape[:-1].numel() * x.shape[-2] <= MOST


def _is_once(model: Any, strategy: Any) -> bool:
    """Whether a strategy may predict only once, as those of fantasies and of models that are validated while trained.

    Reading arrays takes as long as two predictions. BoTorch asks its own models, which have a `posterior`, many times.
    """
    if not hasattr(type(model), "posterior") and in_force().forced("posterior") is None:
        return True
    known = factor_cache.found(strategy)
    return known is not None and known.grown


def _made(model: Any, strategy: Any) -> Posterior | None:
    """Read a model's arrays, None if any part is unsupported."""
    try:
        if not factor_cache.plain(strategy):
            raise UnreadError("a covariance of another form")
        if _left_alone.get(strategy) is None and _is_once(model, strategy):
            _left_alone.put(strategy, False)
            return None
        with torch.no_grad():
            factor = factor_cache.of(strategy)
        if factor is None:
            raise UnreadError("no factor")
        made = Posterior(model, factor)
        if not made.holds():
            raise UnreadError("a part that changed meanwhile")
    except UnreadError as reason:
        left(f"the parts of predictions of {type(model).__name__}", reason)
        _left_alone.put(strategy, True)
        return None
    return _known.put(strategy, made)
