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
_known: Beside[Posterior | bool] = Beside()
"""By strategy: a model's arrays; False after a first prediction if the second reads them; True if it is unsupported."""
_earlier: Beside[list[Posterior]] = Beside()  # arrays read of a model at earlier states, two if graphs need the first
_states: Beside[int] = Beside()  # number of a model's states that predicted once
_WAITS, _PAUSE = 3, 20  # of such states before a first prediction reads arrays, and more of them if these were in vain
_DTYPES = torch.float32, torch.float64


@hook(ExactGP, "__call__", relies=None)
def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    later.look()
    graph = torch.is_grad_enabled()
    try:
        found = _read(self, args[0]) if len(args) == 1 and not kwargs and not self.training else None
    except BaseException:
        torch.set_grad_enabled(graph)  # an interrupt within `no_grad` may have left it off
        raise
    if found is None:
        return _call.__wrapped__(self, *args, **kwargs)
    predicted = _dispatch(found, args[0], functools.partial(_call.__wrapped__, self))
    if gpytorch.settings.skip_posterior_variances.on():
        return MultivariateNormal(predicted.loc, ZeroLinearOperator(*predicted.loc.shape, predicted.loc.shape[-1]))
    return predicted


@unless_it_fails
def _read(model: Any, x: torch.Tensor) -> Posterior | None:
    """Return the arrays of the model as it is now, None where stock must run."""
    known = _known.get(model.prediction_strategy)
    if not _is_plain(x) or has_duals() or known is True or stay_out_of_models() or not _asked(model, x):
        return None
    if known is None:
        try:
            parts_of(type(model))  # a cheap test before the strategy is read
        except UnreadError:
            return None
    strategy = strategies.ours(model)
    if strategy is None:
        _known.put(model.prediction_strategy, True)
        return None
    known = _known.get(strategy)
    if not isinstance(known, Posterior) or not known.holds():
        known = _known.put(strategy, _made(model, strategy, known is None))
    return known if isinstance(known, Posterior) and known.fits(x) else None


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


def _made(model: Any, strategy: Any, first: bool) -> Posterior | bool:
    """Renew or read a model's arrays; False if the second prediction shall, True if any part is unsupported."""
    try:
        if not factor_cache.plain(strategy):
            raise UnreadError("a covariance of another form")
        earlier = _earlier.get(model) or []
        made = next(filter(None, (one.renewed(model) for one in earlier)), None)
        wanted = [one for one in earlier if one.is_wanted()]
        if len(wanted) < len(earlier):
            _earlier.put(model, wanted)
            _states.put(model, -_PAUSE)
        if made is not None:
            return made
        lead, n = model.train_inputs[0].shape[:-2], model.train_inputs[0].shape[-2]
        small = lead.numel() * n * n <= MOST
        if first and _is_once(model, strategy):
            states = _states.put(model, (_states.get(model) or 0) + small)
            if states <= _WAITS:
                return False
        with torch.no_grad():
            factor = factor_cache.of(strategy)
        if factor is None:
            raise UnreadError("no factor")
        made = Posterior(model, factor)
        if not made.holds():
            raise UnreadError("a part that changed meanwhile")
    except UnreadError as reason:
        left(f"the parts of predictions of {type(model).__name__}", reason)
        _states.put(model, -_PAUSE)
        return True
    if small:
        _states.put(model, 0 if len(wanted) < 2 else -_PAUSE)
        _earlier.put(model, [made.kept(), *wanted][:2])
    return made
