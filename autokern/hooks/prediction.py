"""Hooks into gpytorch's exact prediction: test covariances stay lazy, caches share one factor, fantasies extend it.

Only `DefaultPredictionStrategy` itself is served. Strategies of structured kernels, models that override a step, and
strategies whose inputs are unknown (`strategies`) run the library's code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, gaussian_likelihood, likelihood
from gpytorch.models import ExactGP, exact_gp
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import to_linear_operator

from autokern.core.errors import unless_it_fails
from autokern.core.state import inside
from autokern.hooks import strategies
from autokern.hooks.bypass import stay_out_of_models, stay_out_of_predictions
from autokern.hooks.install import Property, hook, stock_of
from autokern.model import memoized
from autokern.model.forward import joined_covariance
from autokern.model.libraries import EXACT, ITERATIVE, ORDERED, ROOT, SOLVE, fantasy, prediction, regime
from autokern.model.memoized import frozen, thawed
from autokern.prediction import factor_cache
from autokern.prediction.factor_cache import Query, Update
from autokern.prediction.lazy_covariance import less
from autokern.runtime.dispatch import explain, route

_dispatch_predict = route("predict", looked=True)
_dispatch_fantasy = route("fantasy", looked=True)
_OURS = DefaultPredictionStrategy, type(None)


@hook(DefaultPredictionStrategy, "__init__", relies=None)
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    _init.__wrapped__(self, *args, **kwargs)
    strategies.made(None if stay_out_of_models() else self)  # `strategies.adopt` checks the rest


@hook(ExactGP, "_get_test_prior_mean_and_covariances", relies=None)
def _get_test_prior_mean_and_covariances(self: Any, train_inputs: Any, test_inputs: Any, **kwargs: Any) -> Any:
    """Leave the covariances of the test points lazy: variances do not need the whole matrix."""
    odd = kwargs or stay_out_of_models() or any(t.dim() < 2 for t in test_inputs)
    odd = odd or type(self.prediction_strategy) not in _OURS or _is_small_of_tasks(self, test_inputs)
    odd = odd or not prediction.holds()
    strategy = None if odd else strategies.ours(self)
    if strategy is None:
        strategies.made(None)  # keywords or modes may affect the strategy
        return _get_test_prior_mean_and_covariances.__wrapped__(
            self, train_inputs=train_inputs, test_inputs=test_inputs, **kwargs
        )
    pairs = list(zip(train_inputs, test_inputs, strict=True))
    leads = dict.fromkeys(t.shape[:-2] for pair in pairs for t in pair)
    lead = torch.broadcast_shapes(*leads) if len(leads) > 1 else next(iter(leads))  # type: ignore[no-untyped-call]
    full = [torch.cat([t.expand(*lead, *t.shape[-2:]) for t in pair], dim=-2) for pair in pairs]
    output = super(ExactGP, self).__call__(*full, **kwargs)
    if gpytorch.settings.debug.on() and not isinstance(output, gpytorch.distributions.MultivariateNormal):
        raise RuntimeError("ExactGP.forward must return a MultivariateNormal")
    mean, n = output.loc, strategy.num_train
    covariance = joined_covariance(self, output.lazy_covariance_matrix, full[0])
    test_shape = torch.Size([output.event_shape[0] - strategy.train_shape[0], *output.event_shape[1:]])
    prior, cross = _new_and_cross(strategies.kernel_of(strategy), covariance, n)
    return mean[..., n:], prior, cross, output.batch_shape, test_shape, output.__class__


def _is_small_of_tasks(model: Any, test_inputs: Any) -> bool:
    """Whether a multitask model has so few values that the library evaluates the joint covariance eagerly."""
    strategy, n = model.prediction_strategy, model.train_inputs[0].shape[-2]
    if not n or not isinstance(strategy.train_prior_dist, MultitaskMultivariateNormal):
        return False
    values = strategy.num_train // n * (n + test_inputs[0].shape[-2])
    return bool(values <= gpytorch.settings.max_eager_kernel_size.value())


def _new_and_cross(kernel: Any, covariance: Any, n: int) -> tuple[Any, Any]:
    """Return covariances of the test points, and of these with the training points; lazy and frozen if safe."""
    if kernel is None or kernel is not strategies.kernel_in(covariance):
        return covariance[..., n:, n:].evaluate_kernel(), covariance[..., n:, :n].evaluate_kernel()
    make = functools.partial(LazyEvaluatedKernelTensor, kernel=frozen(kernel) if torch.is_grad_enabled() else kernel)
    if kernel.num_outputs_per_input(covariance.x1, covariance.x2) != 1:
        whole = make(covariance.x1, covariance.x2)
        return whole[..., n:, n:], whole[..., n:, :n]
    new, old = covariance.x1[..., n:, :], covariance.x2[..., :n, :]
    return make(new, new), make(new, old)


@hook(DefaultPredictionStrategy, "exact_prediction", relies=None)
def _exact_prediction(self: Any, test_mean: Any, test_test_covar: Any, test_train_covar: Any) -> Any:
    known = type(test_test_covar) is LazyEvaluatedKernelTensor
    lazy = known or type(test_train_covar) is LazyEvaluatedKernelTensor
    if not lazy or not prediction.holds():  # the library evaluated the covariances itself
        return _exact_prediction.__wrapped__(self, test_mean, test_test_covar, test_train_covar)
    if not known or not strategies.is_ours(self) or stay_out_of_predictions():
        plainly = map(strategies.evaluated, (test_test_covar, test_train_covar))
        return _exact_prediction.__wrapped__(self, test_mean, *plainly)
    fast, defers = gpytorch.settings.fast_pred_var.on(), gpytorch.settings.skip_posterior_variances.off()
    found = regime(self.num_train, SOLVE, *([ROOT] if fast else []))
    if found != ORDERED and factor_cache.plain(self):
        exact = found == EXACT or factor_cache.is_exact(self)
        query = Query(self, test_mean, test_test_covar, test_train_covar, exact, fast, True)
        formless = strategies.is_formless(self)
        later = not exact and strategies.reads_later(self, formless)
        if not (formless or later) or _is_linear(query):
            return _dispatch_predict(query)
        if later and not (formless and fast) and defers:
            return strategies.read_later(self, test_mean, test_test_covar, test_train_covar)
    if sum(test_train_covar.shape[-2:]) > gpytorch.settings.max_eager_kernel_size.value() and defers:
        return strategies.structured(self, test_mean, test_test_covar, test_train_covar)
    thawn = (strategies.evaluated(covariance, thawed) for covariance in (test_test_covar, test_train_covar))
    return _exact_prediction.__wrapped__(self, test_mean, *thawn)


@unless_it_fails
def _is_linear(query: Query) -> bool | None:
    """Whether the candidate for a model too large to factorise is the state-space one, linear in the points."""
    from autokern.ops._large_models import predicts
    from autokern.ops.predict import PREDICT

    problem = PREDICT.problem_of(query)
    return problem is not None and predicts(problem) is None and explain(problem).candidate == "state-space"


@hook(DefaultPredictionStrategy, "_mean_cache", relies=None)
def _mean_cache(self: Any, nan_policy: str) -> Any:
    ours = nan_policy == "ignore" and not _is_left(self) and prediction.holds()
    known = _shared(self, "mean_cache", nan_policy) if ours else None
    if known is not None:
        with _untraced():
            return known.alpha
    there = factor_cache.mean_of(self) if ours else None
    if there is not None:
        return there
    ours = ours and not stay_out_of_predictions()
    alone = ours and strategies.is_iterated(self, strategies.is_formless(self))
    with inside.having(formless=True) if alone else contextlib.nullcontext():
        return _mean_cache.__wrapped__(self, nan_policy)


def _is_left(strategy: Any) -> bool:
    """Whether a strategy is left to the library: not adopted, without a factor, and exact or of another class."""
    known = strategies.is_ours(strategy) or factor_cache.found(strategy) is not None
    return not known and (type(strategy) not in _OURS or regime(strategy.num_train, SOLVE) == EXACT)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Suspend tracing: in stock the traced code finds this result in a cache, where it is a constant."""
    core: Any = torch._C
    tracing = core._get_tracing_state()
    core._set_tracing_state(None)
    try:
        yield
    finally:
        core._set_tracing_state(tracing)


def _shared(strategy: Any, *cached: str) -> Any:
    """Return a strategy's factor if one is kept or stock would factorise; None if stock has `cached` the result."""
    known = factor_cache.found(strategy)
    if type(strategy) is not DefaultPredictionStrategy or stay_out_of_predictions():
        return known
    if cached[0] == "covar_cache" and _iterates_by_order(strategy, ROOT):
        return None
    if known is not None or memoized.is_kept(strategy, *cached):
        return known
    found = regime(strategy.num_train, SOLVE)
    if found == EXACT or (found == ITERATIVE and factor_cache.is_exact(strategy)):
        return factor_cache.of(strategy) if strategies.is_ours(strategy) else None
    return None


def _read_covar_cache(self: Any) -> Any:
    known = _shared(self, "covar_cache") if not _is_left(self) and prediction.holds() else None
    if known is None:
        return _covar_cache.__wrapped__.fget(self)
    with _untraced():
        return known.root


_covar_cache = Property(_read_covar_cache)
hook(DefaultPredictionStrategy, "covar_cache", relies=None)(_covar_cache)


@hook(DefaultPredictionStrategy, "exact_predictive_covar", relies=None)
def _exact_predictive_covar(self: Any, test_test_covar: Any, test_train_covar: Any) -> Any:
    """Use the kept factor while it is valid; the library factorises at each call."""
    settings = gpytorch.settings
    known = None if settings.fast_pred_var.on() or settings.skip_posterior_variances.on() else _in_force(self)
    if known is None:
        return _exact_predictive_covar.__wrapped__(self, test_test_covar, test_train_covar)
    rows = test_train_covar if isinstance(test_train_covar, torch.Tensor) else test_train_covar.to_dense()
    explained = factor_cache.for_covariances(self, known, fast=False).explained_covariance(rows)
    if isinstance(test_test_covar, torch.Tensor):
        return to_linear_operator(test_test_covar - explained)
    return less(test_test_covar, explained)


@unless_it_fails
def _in_force(strategy: Any) -> Any:
    """Return the kept factor of a strategy if it is valid, else None."""
    known = factor_cache.found(strategy)
    if known is None or not prediction.holds() or _iterates_by_order(strategy, SOLVE):
        return None
    return known if strategies.holds(strategy) else None


def _iterates_by_order(strategy: Any, switch: Any) -> bool:
    """Whether the user ordered iterations; false for a strategy that grew from an exact one (see `is_exact`)."""
    return regime(strategy.num_train, switch) == ORDERED and not factor_cache.is_exact(strategy)


@hook(DefaultPredictionStrategy, "get_fantasy_strategy", relies=None)
def _get_fantasy_strategy(
    self: Any, inputs: Any, targets: Any, full_inputs: Any, full_targets: Any, full_output: Any, **kwargs: Any
) -> Any:
    args = (self, inputs, targets, full_inputs, full_targets, full_output)
    found = regime(self.num_train, ROOT, SOLVE)
    ours = found != ORDERED and _grows(self, inputs, targets, kwargs)
    ours = ours and not stay_out_of_predictions() and fantasy.holds()
    if not ours or not strategies.keeps_points(self, full_output):
        found = _get_fantasy_strategy.__wrapped__(*args, **kwargs)
        strategies.made(None)
        return found
    grown = _dispatch_fantasy(Update(*args, kwargs.get("noise"), found == EXACT or factor_cache.is_exact(self)))
    strategies.made(grown)
    return grown


def _grows(strategy: Any, inputs: Any, targets: Any, kwargs: dict[str, Any]) -> bool:
    """Whether autokern computes a fantasy: its strategy is adopted, and the new model holds all inputs."""
    noise = kwargs.get("noise")  # the library ignores or refuses noise of a shape unlike that of points and targets
    if noise is not None and (noise.dim() >= inputs[0].dim() or noise.shape[-1:] != targets.shape[-1:]):
        return False
    if not strategies.is_ours(strategy) or gpytorch.settings.observation_nan_policy.value() != "ignore":
        return False
    likelihood = strategy.likelihood  # noise that the likelihood does not store exists in the caches only
    keeps = isinstance(likelihood, FixedNoiseGaussianLikelihood) and not getattr(likelihood, "second_noise_covar", None)
    return not kwargs or (kwargs.keys() == {"noise"} and keeps)


@hook(ExactGP, "get_fantasy_model")
def _get_fantasy_model(self: Any, inputs: Any, targets: Any, **kwargs: Any) -> Any:
    if stay_out_of_predictions() or self.prediction_strategy is None:
        return _get_fantasy_model.__wrapped__(self, inputs, targets, **kwargs)
    strategies.ours(self, growing=True)
    made = _get_fantasy_model.__wrapped__(self, inputs, targets, **kwargs)
    if strategies.just_made(made.prediction_strategy):
        strategies.adopt(made, made.prediction_strategy, parent=self)
    return made


_EMPTY = {OrderedDict, dict, list, set}


def _deepcopy(x: Any, memo: Any = None, **kwargs: Any) -> Any:
    """Copy a module as `copy.deepcopy` does, which takes half of its time for the empty containers of hooks."""
    if memo is None and isinstance(x, torch.nn.Module):
        empty, stack = list[Any](), [x]
        while stack:  # `modules()` may be the user's
            own = vars(stack.pop())
            stack += [part for part in own.get("_modules", {}).values() if part is not None]
            empty += [value for value in own.values() if type(value) in _EMPTY and not value]
        memo = {id(value): type(value)() for value in empty}
        memo[id(memo)] = empty  # as `copy` does, to keep these alive: another object might get the address of one
    return _deepcopy.__wrapped__(x, memo, **kwargs)  # type: ignore[attr-defined]


for _module in (exact_gp, likelihood, gaussian_likelihood):  # fantasies copy the model and twice its likelihood
    if stock_of(_module, "deepcopy") is copy.deepcopy:
        hook(_module, "deepcopy", relies=None)(_deepcopy)
