"""Predictions with a training covariance that is not factorised: structured operators, and iterative solves.

The mean takes one solve. Variances are deferred until they are read: a factor computes many, if it fits the memory;
iterations compute few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import LinearOperator
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.errors import MemoryBudgetError, unless_it_fails
from autokern.core.state import inside
from autokern.density import matrices
from autokern.hooks import memory, origin
from autokern.kernels import embedded as forms
from autokern.model.memoized import by_kernel, frozen
from autokern.prediction import factor_cache
from autokern.prediction.lazy_covariance import PosteriorCovariance, Rooted, Structured
from autokern.runtime.dispatch import explain, forced

_FEW = 150
"""Training points per test point from which iterations take fewer operations for the variances than a factor."""
_ELEMENTS = 2**24
"""Largest number of elements of the right-hand sides that are solved together."""


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
    return forced("predict") is None and factor_cache.found(strategy) is None and is_iterated(strategy, formless)


def evaluated(covariance: Any, of: Callable[[Any], Any] = lambda kernel: kernel) -> Any:
    """Return a covariance evaluated as in stock; if it is lazy, with `of` applied to its kernel."""
    return _with(of, covariance).evaluate_kernel() if isinstance(covariance, LinearOperator) else covariance


def _with(of: Callable[[Any], Any], covariance: Any) -> Any:
    """Apply `of` to the kernel of a covariance, if it is lazy."""
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
    with inside.without_matrices():
        mean = strategy.exact_predictive_mean(test_mean, evaluated(cross))
        many = {"factor": functools.partial(_factor_when_read, strategy)} if n < _FEW * m else {}
        known = Structured(_noisy(strategy), **many)
    return mean, PosteriorCovariance.deferred(prior, cross, known, block=max(1, _ELEMENTS // n))


def _factor_when_read(strategy: Any) -> Any:
    """Return the factor of a strategy, None if it is stale, does not fit the memory, or fails."""
    if not origin.holds(strategy) or not matrices.fits(strategy.num_train, strategy.lik_train_train_covar):
        return None
    try:
        return factor_cache.of(strategy)
    except (MemoryBudgetError, NanError, NotPSDError):
        return None
