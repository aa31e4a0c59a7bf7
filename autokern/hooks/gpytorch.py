"""Hooks into gpytorch: densities, and steps of training loops."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import InducingPointKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from gpytorch.mlls import DeepApproximateMLL, ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood, VariationalELBO
from gpytorch.models import ApproximateGP
from gpytorch.models.deep_gps import DeepGP
from linear_operator.operators import BlockInterleavedLinearOperator, DenseLinearOperator

from autokern.core.autograd import COMPUTED, computed_share
from autokern.core.errors import unless_it_fails
from autokern.core.state import Beside, inside, repaid
from autokern.hooks import later
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook, inherited, stock_of
from autokern.model import libraries, marginal, memoized
from autokern.model.forward import evaluated, joined
from autokern.model.libraries import EXACT, density, regime
from autokern.prediction.variational import VariationalCovariance
from autokern.runtime.dispatch import in_force, route

_dispatch_step = route("objective", looked=True)
_dispatch_log_prob = route("exact_log_prob", looked=True)
_dispatch_dense = route("dense_log_prob", looked=True)
_dispatch_tasks = route("task_log_prob", looked=True)
_MOST = 1000  # number of points above which no candidate is faster than stock, whose parts are ops themselves
_MOST_VALUES, _MODELS = {torch.float64: 300, torch.float32: 200}, 16
"""The same for values without gradients, and the number of models above which torch computes all at once faster."""
_ENOUGH = 0.15  # seconds of forward passes of a marginal likelihood before it is recorded, which takes some 40 ms
_ENOUGH_VARIATIONAL = 100  # steps of a variational model before one is recorded: many loops have so many, 60 more repay
_stock_objective = stock_of(ExactMarginalLogLikelihood, "forward")


@hook(MultivariateNormal, "log_prob", relies=None)
def _log_prob(self: Any, value: Any) -> Any:
    found = None if self._validate_args or stay_out_of_models() else _described(self)
    # a covariance seen before is left to stock, which caches a factor for the densities that follow
    if found is None or "_autokern_asked" in self._covar.__dict__ or memoized.names(self._covar):
        return _log_prob.__wrapped__(self, value)
    self._covar._autokern_asked = True
    result = found(value)
    return _log_prob.__wrapped__(self, value) if result is None else result


@unless_it_fails
def _described(distribution: Any, likelihood: Any = None) -> Callable[[Any], Any] | None:
    """Return a function of the value: the log density, with a likelihood's noise; both may be None if unsupported."""
    if not torch.is_grad_enabled():
        return None
    noise = None if likelihood is None else _same_noise(likelihood, distribution)
    if noise is None and likelihood is not None:
        return None
    dense = marginal.read_matrix(distribution, noise)
    if dense is None:
        return None
    n = distribution.loc.shape[-1]
    exact = regime(n) == EXACT
    served = _served(dense if marginal.is_plain(dense.lazy) else None, exact)
    if served is not None or not exact or n > _MOST:
        return served if served is not None and density.holds() else None

    def of(value: Any) -> Any:
        covariance = evaluated(dense.lazy)  # as in stock; it may be a structured operator
        if covariance.__class__ is not DenseLinearOperator or not density.holds():
            return None
        plainly, k = lambda *_: _log_prob.__wrapped__(dense.noisy(), value), covariance.tensor
        return _dispatch_dense(plainly, k, dense.noise, distribution.loc, value)

    return of


def _served(found: marginal.Marginal | None, exact: bool) -> Callable[[Any], Any] | None:
    """Return the log density of a known kernel as a function of the value, else None."""
    if found is None:
        return None
    from autokern.density import array_density  # imported by the first exact density

    if array_density.families(found.lazy.kernel, found.lazy.x1, exact) is None:
        return None

    def remembering(value: Any) -> Any:
        computed = _dispatch_log_prob(found, value, exact)
        memoized.remember_kernel(found.lazy)
        return computed

    return remembering


_SAMPLED, _calls = 7, itertools.count()  # one of so many losses is timed, since a look at its graph takes 60 us
_spent: Beside[float] = Beside()  # by marginal likelihood, seconds of steps whose gradients the library computes
_steps: Beside[int] = Beside()  # by variational model, steps that the library has computed


def _training(kind: type, by_modules: Callable[..., Any]) -> None:
    """Hook a marginal likelihood: arrays compute it, or else modules, which long loops replay."""
    stock = stock_of(kind, "forward")

    def ours(self: Any, function_dist: Any, target: Any, *params: Any) -> Any:
        forward = functools.partial(by_modules, self)
        step = _step(self, forward, joined(self.model, function_dist), target, params)
        return forward(function_dist, target, *params) if step is None else _dispatch_step(step, None, None)

    @hook(kind, "forward", relies=None)
    def forward(self: Any, function_dist: Any, target: Any, *params: Any, **kwargs: Any) -> Any:
        later.look()
        if kwargs or stay_out_of_models():
            return stock(self, function_dist, target, *params, **kwargs)
        spent = _spent.get(self) or 0.0
        if not torch.is_grad_enabled():  # priors without a graph are not replayed
            return ours(self, function_dist, target, *params)
        if params or inside.repeated or (spent < _ENOUGH and type(self.model) not in repaid):
            if next(_calls) % _SAMPLED:
                return ours(self, function_dist, target, *params)
            began = time.thread_time()
            found = ours(self, function_dist, target, *params)
            share = type(getattr(found, "grad_fn", None)).__name__ == COMPUTED or computed_share(found)
            if share < 1:
                _spent.put(self, spent + _SAMPLED * (1 - share) * (time.thread_time() - began))
            return found
        from autokern.hooks.later.losses import loss

        return loss(self, stock, ours, function_dist, target)


def _repeats(model: Any) -> bool:
    waited = (_steps.get(model) or 0) >= _ENOUGH_VARIATIONAL or type(model) in repaid
    return waited and torch.is_grad_enabled() and not inside.repeated


def _approximate(kind: type, stock: Callable[..., Any]) -> None:
    """Hook the calls of variational models."""

    @hook(kind, "__call__", relies=None)
    def call(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if kwargs or len(inputs) != 1 or not self.training or not _repeats(self) or stay_out_of_models():
            return stock(self, *inputs, **kwargs)
        from autokern.hooks.later import variational

        return variational.called(self, stock, *inputs)


def _call_deep(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    return super(DeepGP, self).__call__(*inputs, **kwargs)


inherited.add((DeepGP, "__call__"))
_approximate(ApproximateGP, stock_of(ApproximateGP, "__call__"))
_approximate(DeepGP, stock_of(DeepGP, "__call__") or _call_deep)


def _variational(kind: type) -> None:
    """Hook the marginal likelihoods of variational models."""
    stock = stock_of(kind, "forward")

    @hook(kind, "forward", relies=None)
    def forward(self: Any, approximate_dist_f: Any, target: Any, **kwargs: Any) -> Any:
        model = self.model
        if kwargs or not isinstance(model, (ApproximateGP, DeepGP)) or stay_out_of_models():
            return stock(self, approximate_dist_f, target, **kwargs)
        if type(getattr(approximate_dist_f, "_covar", None)) is VariationalCovariance:
            return stock(self, approximate_dist_f, target)  # a replay of the library's step is slower
        if not _repeats(model):
            steps = _steps.get(model) or 0
            found = stock(self, approximate_dist_f, target)
            _steps.put(model, steps + 1)  # once, although the loss of a deep model calls that of its last layer
            return found
        from autokern.hooks.later import variational

        return variational.loss(self, stock, approximate_dist_f, target)


for _kind in (VariationalELBO.__base__, DeepApproximateMLL):
    _variational(_kind)


@unless_it_fails
def _step(mll: Any, forward: Any, prior: Any, target: Any, params: tuple[Any, ...]) -> Any:
    """Return the evaluation of the whole marginal likelihood, None if any part of the model is unsupported."""
    if type(prior) is not MultivariateNormal:
        return None
    mean, n = prior.loc, prior.loc.shape[-1]
    covariance = prior.__dict__.get("_covar")
    if not marginal.is_plain(covariance):
        return None
    if type(covariance.kernel) is not InducingPointKernel and (n > _MOST or regime(n) != EXACT):
        return None
    few = mean.is_cpu and n <= _MOST_VALUES.get(mean.dtype, 0) and mean.numel() <= min(n * _MODELS, _MOST)
    masked = gpytorch.settings.observation_nan_policy.value() != "ignore"
    if masked or not (torch.is_grad_enabled() or few):
        return None
    order = in_force()  # the user may force the density's op
    if order.forced("exact_log_prob") is not None and order.forced("objective") is None:
        return None
    from autokern.density import array_density

    return array_density.step_of(mll, lambda prior, target: forward(prior, target, *params), prior, target)


def _by_modules(self: Any, function_dist: Any, target: Any, *params: Any) -> Any:
    """Compute the density from prior and noise, without a noisy distribution; this noise ignores `params`."""
    whole = joined(self.model, function_dist)
    found = _described(whole, self.likelihood) or _of_tasks(self.likelihood, function_dist, params)
    result = None if found is None else found(target)
    if result is None:
        return _stock_objective(self, function_dist, target, *params)
    return self._add_other_terms(result, params).div_(function_dist.loc.shape[-1])


@unless_it_fails
def _of_tasks(likelihood: Any, distribution: Any, params: tuple[Any, ...]) -> Callable[[Any], Any] | None:
    """Return the log density of several tasks as a function of the value, None if unsupported."""
    if not marginal.are_tasks(distribution, likelihood):
        return None
    if type(likelihood) is GaussianLikelihood and _same_noise(likelihood, distribution) is None:
        return None
    if distribution._covar.__class__ is BlockInterleavedLinearOperator:
        apart, shape = marginal.of_independent_tasks(distribution, likelihood), distribution.mean.shape
        one = _served(apart, regime(shape[0]) == EXACT) if density.holds() else None
        return one and (lambda value: one(value.mT).sum(-1) if getattr(value, "shape", None) == shape else None)

    def of(value: Any) -> Any:
        found = marginal.of_tasks(distribution, likelihood)
        if found is None or getattr(value, "shape", None) != distribution.mean.shape:
            return None
        by_point = value.view_as(found[-1])
        return _dispatch_tasks(lambda *_: likelihood(distribution, *params).log_prob(value), *found, by_point)

    return of


def _same_noise(likelihood: Any, distribution: Any) -> Any:
    """Return the noise of a homoskedastic Gaussian likelihood of a plain prior, else None."""
    plain = type(likelihood) is GaussianLikelihood and type(distribution) is MultivariateNormal
    if not plain or type(likelihood.noise_covar) is not HomoskedasticNoise:
        return None
    if gpytorch.settings.observation_nan_policy.value() != "ignore" or not libraries.noise_in_place(likelihood):
        return None
    noise = likelihood.noise_covar.noise
    return noise if noise.shape[-1:] == (1,) else None


_training(ExactMarginalLogLikelihood, _by_modules)
_training(LeaveOneOutPseudoLikelihood, stock_of(LeaveOneOutPseudoLikelihood, "forward"))
