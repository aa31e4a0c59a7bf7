"""Prediction strategies: which of them autokern serves, and those whose training covariance is not factorised.

A strategy is adopted by the call that creates it, if kernel and likelihood are of the libraries' own classes, which
have no hidden state. Later its inputs are compared by value (`model.memoized`); a stale strategy is replaced.

With structured operators and iterative solves the mean takes one solve. Variances are deferred until they are read: a
factor computes many, if it fits the memory; iterations compute few.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy, prediction_strategy
from linear_operator.operators import BatchRepeatLinearOperator, LinearOperator
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.errors import MemoryBudgetError, left, unless_it_fails
from autokern.core.releases import is_of_libraries
from autokern.core.releases.known import Relied, relied
from autokern.core.state import Beside, inside
from autokern.density import matrices
from autokern.hooks import memory
from autokern.kernels import embedded as forms
from autokern.kernels.family import DISTANCES
from autokern.model.forward import joined_covariance
from autokern.model.libraries import PREDICTION
from autokern.model.memoized import CHANGING, State, by_kernel, frozen, is_library
from autokern.prediction import factor_cache
from autokern.prediction.lazy_covariance import PosteriorCovariance, Rooted, Structured
from autokern.runtime.dispatch import explain, in_force


class _Origin(NamedTuple):
    """The inputs of a strategy: states of model, likelihood and parent kernel, and whether grad mode was on."""

    kernel: weakref.ref[Any]
    graph: bool
    prior: State
    noise: State
    parent: State | None
    relied: Relied

    def holds(self) -> bool:
        """Whether all inputs but the noise are unchanged."""
        return self.relied.holds() and self.prior.holds() and (self.parent is None or self.parent.holds())

    def serves(self, growing: bool) -> bool:
        """Whether the strategy's caches are valid for a prediction, or for a fantasy that grows from them."""
        if not self.holds():
            return False
        plain = not self.graph and self.parent is None and not growing
        if plain and torch.is_grad_enabled() and gpytorch.settings.detach_test_caches.off():
            return False  # gradients must pass through the caches, which were computed without a graph
        # with `fast_pred_var`, stock ignores noise written past the version counters; its own tests demand that
        return self.noise.holds() or (gpytorch.settings.fast_pred_var.on() and not self.noise.counted())

    def again(self) -> _Origin | None:
        """Return the present inputs of the same model; None if any but the training data is another object."""
        prior, noise = self.prior.again(), self.noise.again()
        if prior is None or noise is None or not self.relied.holds():
            return None
        return self._replace(graph=torch.is_grad_enabled(), prior=prior, noise=noise)


_ADOPTED = "_autokern_adopted"
"""Attribute of a strategy (pickled with it) whose model holds all its inputs, so that it can be recreated."""
_ROUNDED = 256  # machine epsilons by which the same points may differ if `forward` maps them together with others
_origins: Beside[_Origin] = Beside()  # origin of each strategy that autokern serves
_latest: Beside[_Origin | None] = Beside()  # origin of the latest strategy of each model with little data
_LITTLE = 2**16  # numbers of training data up to which they are little


def adopt(model: Any, strategy: Any, parent: Any = None) -> bool:
    """Record a new strategy's inputs, and return whether all are known; a fantasy uses the `parent`'s kernel."""
    prior = strategy.train_prior_dist
    if type(prior) not in (MultivariateNormal, MultitaskMultivariateNormal):
        return False  # a subclass may redefine the mean
    covariance = prior.lazy_covariance_matrix
    if parent is None and strategy.train_inputs:
        covariance = joined_covariance(model, covariance, strategy.train_inputs[0])
    kernel = kernel_in(covariance)
    latest = _latest.get(model) or _latest.put(model, None)  # states of BoTorch's models count their attributes
    origin = latest.again() if latest is not None and kernel is not None and latest.kernel() is kernel else None
    origin = origin or _origin_of(model, strategy, kernel, parent)
    if origin is None or not _is_plain(strategy):
        return False
    _origins.put(strategy, origin)
    if parent is None:
        strategy.__dict__[_ADOPTED] = True
        _latest.put(model, origin if sum(x.numel() for x in strategy.train_inputs) <= _LITTLE else None)
    return True


def _is_plain(strategy: Any) -> bool:
    return type(strategy) is DefaultPredictionStrategy and strategy.num_train > 0


def _origin_of(model: Any, strategy: Any, theirs: Any, parent: Any) -> _Origin | None:
    """Return the inputs of a new strategy with the kernel `theirs`, None if any may change unnoticed."""
    if any(p.is_inference() for p in model.parameters()):
        return None  # autograd cannot save inference tensors
    kernel = theirs
    if kernel is not None and parent is not None:
        names = [name for name, module in parent.named_modules() if module is theirs]
        kernel = model.get_submodule(names[0]) if names else None
    if kernel is None:
        return None
    if not (is_library(kernel) and is_library(model.likelihood)):
        parts = [*kernel.modules(), *model.likelihood.modules()]
        own = [type(part) for part in parts if not is_library(part)][-1]  # a part follows the module that has it
        why = f"a class or function of your own ({own.__name__})"
        if is_of_libraries(own.__module__) and own.__name__ in CHANGING:
            why = f"the library's {own.__name__}, which keeps or draws numbers"
        left("predictions", f"{why}, whose results may change between calls")
        return None
    if not _is_plain(strategy):
        return None
    code = relied(*PREDICTION, *DISTANCES, *map(type, model.modules()))
    if not code.holds():
        made(None)
        return None
    states = State(model, but=model.likelihood), State(model.likelihood), None if parent is None else State(theirs)
    return _Origin(weakref.ref(kernel), torch.is_grad_enabled(), *states, code)


def kernel_in(covariance: Any) -> Any:
    """Return the kernel of a lazily evaluated covariance, None for any other."""
    covariance = _unrepeated(covariance)
    plain = type(covariance) is LazyEvaluatedKernelTensor and not covariance.params and not covariance.last_dim_is_batch
    return covariance.kernel if plain else None


def _unrepeated(covariance: Any) -> Any:
    return covariance.base_linear_op if type(covariance) is BatchRepeatLinearOperator else covariance


@unless_it_fails
def keeps_points(strategy: Any, beside: Any) -> bool:
    """Whether a prior at training and new points has the strategy's mean and points, unaffected by the new ones."""
    for one, other in zip(*map(_points_of, (strategy.train_prior_dist, beside)), strict=True):
        apart, rounding = other[..., : one.shape[-2], :] - one, _ROUNDED * torch.finfo(one.dtype).eps
        if not (apart.norm(dim=-2) <= rounding * one.norm(dim=-2)).all():
            return False
    return True


def _points_of(prior: Any) -> list[torch.Tensor]:
    """Return the mean and the points of a prior with a lazy covariance, with a row for each point."""
    x = _unrepeated(prior.lazy_covariance_matrix).x1.detach()
    return [prior.mean.detach().reshape(*prior.batch_shape, x.shape[-2], -1), x]


@unless_it_fails
def ours(model: Any, growing: bool = False) -> Any:
    """Return the model's strategy, created if missing or stale, None if unsupported; `growing` means for a fantasy."""
    strategy = model.prediction_strategy
    if _redefines(strategy):
        return None
    known = None if strategy is None else _origins.get(strategy)
    if known is not None and known.serves(growing):
        return strategy
    if strategy is None or known is not None or _ADOPTED in strategy.__dict__:  # an unpickled one has the attribute
        inputs = list(model.train_inputs)
        prior = model._get_train_prior_distribution(inputs)
        strategy = prediction_strategy(inputs, prior, model.train_targets, model.likelihood)
        model.prediction_strategy = strategy
    elif not just_made(strategy):
        return None
    return strategy if adopt(model, strategy) else None


def made(strategy: Any) -> None:
    """Record the strategy that this thread has just created, None if its inputs are unknown."""
    inside.newest = None if strategy is None else weakref.ref(strategy)


def just_made(strategy: Any) -> bool:
    """Whether this is the strategy that this thread created last."""
    return inside.newest is not None and inside.newest() is strategy


def is_ours(strategy: Any) -> bool:
    """Whether a strategy was adopted, and no instance attribute shadows one of its class."""
    return _origins.get(strategy) is not None and not _redefines(strategy)


def _redefines(thing: Any) -> bool:
    kind = type(thing)
    return any(hasattr(kind, name) for name in getattr(thing, "__dict__", ()))


def holds(strategy: Any) -> bool:
    """Whether a strategy was adopted and is still valid: its inputs are unchanged."""
    origin = _origins.get(strategy)
    return origin is not None and origin.holds() and origin.noise.holds()


def kernel_of(strategy: Any) -> Any:
    """Return the kernel of the model of an adopted strategy, else None."""
    origin = _origins.get(strategy)
    return None if origin is None else origin.kernel()


_FEW = 150  # training points per test point from which iterations take fewer operations for the variances than a factor
_ELEMENTS = 2**24  # largest number of elements of the right-hand sides that are solved together


def is_formless(strategy: Any) -> bool:
    """Whether the training covariance is too large to be factorised, so that solves must iterate."""
    parts = factor_cache.parts(strategy)
    return parts is not None and memory.too_large(parts[0])


@unless_it_fails
def is_iterated(strategy: Any, formless: bool) -> bool:
    """Whether the mean is computed by preconditioned iterations without the training covariance matrix."""
    parts = factor_cache.parts(strategy)
    if parts is None or not memory.is_iterated(lazy := parts[0], formless):
        return False
    from autokern.ops.solve import system

    problem = system(lazy.x1, 1, forms.embed(lazy.kernel, lazy.x1, None)[0])
    return problem is not None and explain(problem).candidate == "preconditioned"


def reads_later(strategy: Any, formless: bool) -> bool:
    """Whether to defer the factor: none exists yet, and iterations compute the mean much sooner."""
    if torch.is_grad_enabled() or gpytorch.settings.observation_nan_policy.value() != "ignore":
        return False
    ordered = in_force().forced("predict") is not None
    return not ordered and factor_cache.found(strategy) is None and is_iterated(strategy, formless)


def evaluated(covariance: Any, of: Callable[[Any], Any] = lambda kernel: kernel) -> Any:
    """Return a covariance evaluated as in stock; if it is lazy, with `of` applied to its kernel."""
    return _with(of, covariance).evaluate_kernel() if isinstance(covariance, LinearOperator) else covariance


def _with(of: Callable[[Any], Any], covariance: Any) -> Any:
    if type(covariance) is not LazyEvaluatedKernelTensor:
        return covariance
    kernel = of(covariance.kernel)
    return covariance if kernel is covariance.kernel else by_kernel(kernel, covariance)


def structured(strategy: Any, test_mean: Any, prior: Any, cross: Any) -> Any:
    """Predict with a covariance that the library solves by its structure; variances are deferred."""
    mean = strategy.exact_predictive_mean(test_mean, evaluated(cross))
    if gpytorch.settings.fast_pred_var.on():
        return mean, PosteriorCovariance.deferred(prior, cross, Rooted(strategy.covar_cache))
    return mean, PosteriorCovariance.deferred(prior, cross, Structured(_noisy(strategy)))


def _noisy(strategy: Any) -> Any:
    """Return the noisy training covariance with frozen hyperparameters, which may change before it is used."""
    prior_dist = strategy.train_prior_dist
    nothing = prior_dist.__class__(torch.zeros_like(prior_dist.mean), _with(frozen, prior_dist.lazy_covariance_matrix))
    operator = strategy.likelihood(nothing, strategy.train_inputs).lazy_covariance_matrix
    if gpytorch.settings.detach_test_caches.on():
        operator = operator.detach()
    return operator.evaluate_kernel()


def read_later(strategy: Any, test_mean: Any, prior: Any, cross: Any) -> Any:
    """Predict by matrix-free iterations; variances, and the factor for many of them, are deferred."""
    m, n = cross.shape[-2:]
    with inside.having(formless=True):
        mean = strategy.exact_predictive_mean(test_mean, evaluated(cross))
        many = {"factor": functools.partial(_factor_when_read, strategy)} if n < _FEW * m else {}
        known = Structured(_noisy(strategy), **many)
    return mean, PosteriorCovariance.deferred(prior, cross, known, block=max(1, _ELEMENTS // n))


def _factor_when_read(strategy: Any) -> Any:
    """Return the factor of a strategy, None if it is stale, does not fit the memory, or fails."""
    if not holds(strategy) or not matrices.fits(strategy.num_train, strategy.lik_train_train_covar):
        return None
    try:
        return factor_cache.of(strategy)
    except (MemoryBudgetError, NanError, NotPSDError):
        return None
