"""Hooks into gpytorch's exact prediction: test covariances stay lazy, caches share one factor, fantasies extend it.

Only the library's own default strategy is served; strategies for structured kernels and models that override a step
keep theirs. A strategy is dropped when version counters tell that parameters or data have changed since it was made.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from typing import Any

import gpytorch
import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy, prediction_strategy
from linear_operator import settings as library
from linear_operator.operators import LinearOperator, to_linear_operator

from autokern import conditioning
from autokern.dispatch import route
from autokern.explained import Rooted, Structured
from autokern.hooks import Patch, matrixfree
from autokern.hooks.linear_operator import stay_out
from autokern.hooks.memory import guard_cache
from autokern.hooks.regime import EXACT, ITERATIVE, ORDERED, regime
from autokern.op import get
from autokern.posterior import PosteriorCovariance

__all__ = ["patches"]

_dispatch_predict = route(get("predict"))
_dispatch_fantasy = route(get("fantasy"))


def _stay_out() -> bool:
    return gpytorch.settings.trace_mode.on() or gpytorch.beta_features.checkpoint_kernel.value() or stay_out()


class _Stamp:
    """The state of a model's parameters and data, by version counters.

    What is written through ``.data``, as gpytorch's own setters do, is not counted: the library's tests rely on caches
    that outlive such changes.
    """

    __slots__ = ("_seen",)

    def __init__(self, model: Any) -> None:
        self._seen = [(weakref.ref(t), _version(t), t.data_ptr()) for t in _tensors_of(model)]

    def holds(self, model: Any) -> bool:
        """Whether everything is as it was."""
        now = _tensors_of(model)
        return len(now) == len(self._seen) and all(
            then() is t and _version(t) == version and t.data_ptr() == address
            for t, (then, version, address) in zip(now, self._seen, strict=True)
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # tensors of inference mode count no versions


def _tensors_of(model: Any) -> list[torch.Tensor]:
    return [t for t in (*(model.train_inputs or ()), model.train_targets, *model.parameters()) if t is not None]


_stamps: weakref.WeakKeyDictionary[Any, _Stamp] = weakref.WeakKeyDictionary()


def _renew(model: Any) -> None:
    """Make a model's strategy anew if what it was made of has changed; else remember what it was made of."""
    strategy = model.prediction_strategy
    if type(strategy) is not DefaultPredictionStrategy:
        return
    stamp = _stamps.get(strategy)
    if stamp is not None and not stamp.holds(model):
        prior = model._get_train_prior_distribution(list(model.train_inputs))
        strategy = model.prediction_strategy = prediction_strategy(
            train_inputs=list(model.train_inputs),
            train_prior_dist=prior,
            train_labels=model.train_targets,
            likelihood=model.likelihood,
        )
        stamp = None
    if stamp is None:
        _stamps[strategy] = _Stamp(model)


_stock_priors = ExactGP._get_test_prior_mean_and_covariances


@functools.wraps(_stock_priors)
def _get_test_prior_mean_and_covariances(self: Any, train_inputs: Any, test_inputs: Any, **kwargs: Any) -> Any:
    """Leave the covariances of the test points unevaluated: whoever reads no more than variances needs less."""
    if _stay_out():
        return _stock_priors(self, train_inputs=train_inputs, test_inputs=test_inputs, **kwargs)
    if not kwargs:
        _renew(self)
    strategy = self.prediction_strategy
    if type(strategy) is not DefaultPredictionStrategy:
        return _stock_priors(self, train_inputs=train_inputs, test_inputs=test_inputs, **kwargs)
    pairs = list(zip(train_inputs, test_inputs, strict=True))
    lead = torch.broadcast_shapes(*(t.shape[:-2] for pair in pairs for t in pair))  # type: ignore[no-untyped-call]
    full = [torch.cat([t.expand(*lead, *t.shape[-2:]) for t in pair], dim=-2) for pair in pairs]
    output = super(ExactGP, self).__call__(*full, **kwargs)
    if gpytorch.settings.debug.on() and not isinstance(output, gpytorch.distributions.MultivariateNormal):
        raise RuntimeError("ExactGP.forward must return a MultivariateNormal")
    mean, covariance, n = output.loc, output.lazy_covariance_matrix, strategy.num_train
    points = output.event_shape[0] - strategy.train_shape[0]
    test_shape = torch.Size([points, *output.event_shape[1:]])
    prior, cross = _new_and_cross(covariance, n)
    return mean[..., n:], prior, cross, output.batch_shape, test_shape, output.__class__


def _new_and_cross(covariance: Any, n: int) -> tuple[Any, Any]:
    """Return the covariance of the points after the first n, and theirs with those, both as lazy as the whole."""
    lazy = type(covariance) is LazyEvaluatedKernelTensor and not covariance.last_dim_is_batch
    if not lazy or covariance.kernel.num_outputs_per_input(covariance.x1, covariance.x2) != 1:
        return covariance[..., n:, n:], covariance[..., n:, :n]
    new, old = covariance.x1[..., n:, :], covariance.x2[..., :n, :]
    make = functools.partial(LazyEvaluatedKernelTensor, kernel=covariance.kernel, **covariance.params)
    return make(new, new), make(new, old)


_stock_prediction = DefaultPredictionStrategy.exact_prediction


@functools.wraps(_stock_prediction)
def _exact_prediction(self: Any, test_mean: Any, test_test_covar: Any, test_train_covar: Any) -> Any:
    lazy = type(test_test_covar) is LazyEvaluatedKernelTensor
    if type(self) is not DefaultPredictionStrategy or _stay_out():
        return _stock_prediction(self, test_mean, _evaluated(test_test_covar), _evaluated(test_train_covar))
    found = regime(self.num_train, library.fast_computations.solves)
    if lazy and found != ORDERED and conditioning.plain(self) and not _formless(self):
        fast = gpytorch.settings.fast_pred_var.on()
        exact = found == EXACT or conditioning.is_exact(self)
        return _dispatch_predict(self, test_mean, test_test_covar, test_train_covar, exact, fast)
    if sum(test_train_covar.shape[-2:]) > gpytorch.settings.max_eager_kernel_size.value() and _defers():
        return _structured(self, test_mean, test_test_covar, test_train_covar)
    return _stock_prediction(self, test_mean, _evaluated(test_test_covar), _evaluated(test_train_covar))


def _formless(strategy: Any) -> bool:
    """Whether the training covariance cannot even be formed: solves are iterations, and a factor is out of reach."""
    parts = conditioning.parts(strategy)
    return parts is not None and matrixfree.too_large(parts[0])


def _evaluated(covariance: Any) -> Any:
    return covariance.evaluate_kernel() if isinstance(covariance, LinearOperator) else covariance


def _defers() -> bool:
    return bool(gpytorch.settings.skip_posterior_variances.off())


def _structured(strategy: Any, test_mean: Any, prior: Any, cross: Any) -> Any:
    """Predict with a covariance that the library solves by its structure; variances when they are read."""
    mean = strategy.exact_predictive_mean(test_mean, _evaluated(cross))
    if gpytorch.settings.fast_pred_var.on():
        return mean, PosteriorCovariance(prior, cross, Rooted(strategy.covar_cache))
    nothing = strategy.train_prior_dist.__class__(
        torch.zeros_like(strategy.train_prior_dist.mean), strategy.train_prior_dist.lazy_covariance_matrix
    )
    operator = strategy.likelihood(nothing, strategy.train_inputs).lazy_covariance_matrix
    if gpytorch.settings.detach_test_caches.on():
        operator = operator.detach()
    operator = operator.evaluate_kernel()  # hyperparameters may change before it is used
    return mean, PosteriorCovariance(prior, cross, Structured(operator))


_NO_ARGUMENTS = pickle.dumps({})
"""How the library's cache files keyword arguments."""
_stock_mean_cache = DefaultPredictionStrategy._mean_cache


@functools.wraps(_stock_mean_cache)
def _mean_cache(self: Any, nan_policy: str) -> Any:
    known = _shared(self, "mean_cache", nan_policy) if nan_policy == "ignore" else None
    if known is None:
        return _stock_mean_cache(self, nan_policy)
    return known.alpha


def _shared(strategy: Any, *cached: str) -> Any:
    """Return the factor of a strategy where stock would factorise, or where there is one already.

    None where the library keeps what it is needed for, in its cache under the name and arguments of `cached`.
    """
    if type(strategy) is not DefaultPredictionStrategy:
        return None
    known = conditioning.found(strategy)
    if known is not None or _stay_out():
        return known
    if cached and (cached[0], cached[1:], _NO_ARGUMENTS) in strategy.__dict__.get("_memoize_cache", ()):
        return None
    found = regime(strategy.num_train, library.fast_computations.solves)
    if found == EXACT or (found == ITERATIVE and conditioning.is_exact(strategy)):
        guard_cache(strategy, "covar_cache" if "covar_cache" in cached else "mean_cache")
        return conditioning.of(strategy)
    return None


class _Cache(property):
    """A property that wraps the library's own."""

    __wrapped__: property


_stock_covar_cache = vars(DefaultPredictionStrategy)["covar_cache"]


def _read_covar_cache(self: Any) -> Any:
    known = _shared(self, "covar_cache")
    return _stock_covar_cache.fget(self) if known is None else known.root


_covar_cache = _Cache(_read_covar_cache)
_covar_cache.__wrapped__ = _stock_covar_cache


_stock_covariance = DefaultPredictionStrategy.exact_predictive_covar


@functools.wraps(_stock_covariance)
def _exact_predictive_covar(self: Any, test_test_covar: Any, test_train_covar: Any) -> Any:
    settings = gpytorch.settings
    known = None if settings.fast_pred_var.on() or settings.skip_posterior_variances.on() else _shared(self)
    if known is None:
        return _stock_covariance(self, test_test_covar, test_train_covar)
    rows = test_train_covar if isinstance(test_train_covar, torch.Tensor) else test_train_covar.to_dense()
    explained = conditioning.for_covariances(self, fast=False).explained_covariance(rows)
    if isinstance(test_test_covar, torch.Tensor):
        return to_linear_operator(test_test_covar - explained)
    return test_test_covar + to_linear_operator(-explained)


def _keeps_noise(likelihood: Any) -> bool:
    """Whether a likelihood takes up the noise of new observations, and has no other."""
    fixed = isinstance(likelihood, FixedNoiseGaussianLikelihood)
    return fixed and getattr(likelihood, "second_noise_covar", None) is None


_stock_fantasy = DefaultPredictionStrategy.get_fantasy_strategy


@functools.wraps(_stock_fantasy)
def _get_fantasy_strategy(
    self: Any, inputs: Any, targets: Any, full_inputs: Any, full_targets: Any, full_output: Any, **kwargs: Any
) -> Any:
    args = (self, inputs, targets, full_inputs, full_targets, full_output)
    served = type(self) is DefaultPredictionStrategy and not kwargs.keys() - {"noise"}
    if "noise" in kwargs and not _keeps_noise(self.likelihood) and not _stay_out():
        made = _stock_fantasy(*args, **kwargs)  # this noise is in the caches only: nothing may be computed anew
        conditioning.decline(made)
        return made
    if not served or gpytorch.settings.observation_nan_policy.value() != "ignore" or _stay_out():
        return _stock_fantasy(*args, **kwargs)
    found = regime(self.num_train, library.fast_computations.covar_root_decomposition)
    if found == ORDERED:
        return _stock_fantasy(*args, **kwargs)
    return _dispatch_fantasy(*args, kwargs.get("noise"), found == EXACT or conditioning.is_exact(self))


_stock_fantasy_model = ExactGP.get_fantasy_model


@functools.wraps(_stock_fantasy_model)
def _get_fantasy_model(self: Any, inputs: Any, targets: Any, **kwargs: Any) -> Any:
    if _stay_out() or self.prediction_strategy is None:
        return _stock_fantasy_model(self, inputs, targets, **kwargs)
    _renew(self)
    made = _stock_fantasy_model(self, inputs, targets, **kwargs)
    if made.prediction_strategy is not None:
        _stamps[made.prediction_strategy] = _Stamp(made)
    return made


def patches() -> list[Patch]:
    """Return the patches of exact prediction."""
    strategy = DefaultPredictionStrategy
    return [
        Patch(ExactGP, "_get_test_prior_mean_and_covariances", _get_test_prior_mean_and_covariances),
        Patch(ExactGP, "get_fantasy_model", _get_fantasy_model),
        Patch(strategy, "exact_prediction", _exact_prediction),
        Patch(strategy, "exact_predictive_covar", _exact_predictive_covar),
        Patch(strategy, "_mean_cache", _mean_cache),
        Patch(strategy, "covar_cache", _covar_cache),
        Patch(strategy, "get_fantasy_strategy", _get_fantasy_strategy),
    ]
