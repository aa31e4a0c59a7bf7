"""The libraries' own functions as they were when autokern was imported, for the candidates ``stock`` and for readings.

Ops are imported when they are first asked for. The hooks may be installed by then, or a test may have put a mock there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpytorch import constraints, kernels, likelihoods, means, mlls
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import noise_models
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.module import Module
from linear_operator.operators import LinearOperator
from linear_operator.utils import cholesky, pinverse

from autokern.kernels.unpatched import HERE, is_ours

__all__ = [
    "exact_call",
    "exact_prediction",
    "get_fantasy_strategy",
    "hold",
    "in_place",
    "inv_quad_logdet",
    "log_prob",
    "noise_in_place",
    "noise_of_tasks_in_place",
    "predictions_in_place",
    "psd_safe_cholesky",
    "solve",
    "stable_pinverse",
    "undisturbed",
]

Function = Callable[..., Any]

log_prob: Function = MultivariateNormal.log_prob
inv_quad_logdet: Function = LinearOperator.inv_quad_logdet
exact_call: Function = ExactGP.__call__
exact_prediction: Function = DefaultPredictionStrategy.exact_prediction
get_fantasy_strategy: Function = DefaultPredictionStrategy.get_fantasy_strategy
psd_safe_cholesky: Function = sys.modules[cholesky.__name__]._psd_safe_cholesky
solve: Function = sys.modules["linear_operator.functions._solve"]._solve
stable_pinverse: Function = sys.modules[pinverse.__name__].stable_pinverse

_NOISE: tuple[tuple[Any, str], ...] = (
    (likelihoods.GaussianLikelihood, "__call__"), (likelihoods.GaussianLikelihood, "marginal"),
    (_GaussianLikelihoodBase, "marginal"), (likelihoods.GaussianLikelihood, "_shaped_noise_covar"),
    (noise_models.HomoskedasticNoise, "__call__"), (noise_models.HomoskedasticNoise, "forward"),
    (noise_models.HomoskedasticNoise, "noise"), (Module, "__call__"), (MultivariateNormal, "log_prob"),
)  # fmt: skip
"""What adds homoskedastic noise and asks for the density, wherever the class has it from."""
_NOISE_OF_TASKS: tuple[tuple[Any, str], ...] = tuple(
    (kind, name)
    for kind in likelihoods.MultitaskGaussianLikelihood.__mro__[:2]
    for name in ("__call__", "marginal", "_shaped_noise_covar", "noise", "task_noises", "task_noise_covar")
    if hasattr(kind, name)
)
_BYPASSED: tuple[tuple[Any, str], ...] = (
    (kernels.Kernel, "__call__"), (kernels.Kernel, "covar_dist"), (kernels.Kernel, "lengthscale"),
    (kernels.RBFKernel, "forward"), (kernels.MaternKernel, "forward"), (kernels.ScaleKernel, "forward"),
    (kernels.ScaleKernel, "outputscale"), (kernels.AdditiveKernel, "forward"), (kernels.ProductKernel, "forward"),
    (kernels.RBFKernel, "__call__"), (kernels.MaternKernel, "__call__"), (kernels.ScaleKernel, "__call__"),
    (means.Mean, "__call__"), (means.ConstantMean, "forward"), (means.ZeroMean, "forward"),
    (constraints.Interval, "transform"), (constraints.GreaterThan, "transform"), (constraints.Positive, "transform"),
    (constraints.LessThan, "transform"), (mlls.ExactMarginalLogLikelihood, "forward"),
    (mlls.ExactMarginalLogLikelihood, "_add_other_terms"),
    (likelihoods.GaussianLikelihood, "noise"), (likelihoods.FixedNoiseGaussianLikelihood, "marginal"),
    (likelihoods.FixedNoiseGaussianLikelihood, "_shaped_noise_covar"), (noise_models.FixedGaussianNoise, "__call__"),
    (noise_models.FixedGaussianNoise, "forward"), (ExactGP, "__call__"),
    (mlls.ExactMarginalLogLikelihood, "__call__"), (mlls.MarginalLogLikelihood, "__call__"),
    (ExactGP, "_get_test_prior_mean_and_covariances"), (DefaultPredictionStrategy, "exact_prediction"),
    (DefaultPredictionStrategy, "exact_predictive_mean"), (DefaultPredictionStrategy, "exact_predictive_covar"),
)  # fmt: skip
"""What a reading computes in place of, where the class itself defines it."""
_known = [(vars(kind), name, vars(kind).get(name)) for kind, name in _BYPASSED]
_predictions = [
    (vars(DefaultPredictionStrategy), name, vars(DefaultPredictionStrategy).get(name))
    for name in ("_mean_cache", "exact_predictive_covar", "exact_predictive_mean")
]
_noise, _noise_of_tasks = ([(*of, getattr(*of)) for of in several] for several in (_NOISE, _NOISE_OF_TASKS))


def in_place() -> bool:
    """Whether all that readings compute in place of is as it was, or a hook of autokern; class by class."""
    return hold(_known) and _inherited(_noise)


def predictions_in_place() -> bool:
    """Whether predictions are what they were: they are computed in place of several methods at once."""
    return hold(_predictions)


def noise_in_place(likelihood: Any) -> bool:
    """Whether a homoskedastic likelihood of one task adds noise as its class did."""
    own = likelihood.__dict__
    if "marginal" in own or "_shaped_noise_covar" in own or "forward" in own["_modules"]["noise_covar"].__dict__:
        return False
    return _inherited(_noise)


def noise_of_tasks_in_place(likelihood: Any) -> bool:
    """Whether a likelihood of several tasks adds noise as its class did."""
    own = likelihood.__dict__
    return not any(name in own for _, name in _NOISE_OF_TASKS) and _inherited(_noise_of_tasks)


def _inherited(known: list[tuple[Any, str, Any]]) -> bool:
    for kind, name, function in known:
        if getattr(kind, name) is not function and not is_ours(getattr(kind, name)):
            return False
    return True


def hold(known: list[tuple[Any, str, Any]]) -> bool:
    """Whether functions are where they were, by space and name, or hooks of autokern in their place."""
    for space, name, function in known:
        if space.get(name) is not function and not is_ours(space.get(name)):
            return False
    return True


def undisturbed(space: Any, name: str, file: str | None) -> Any:
    """Return a function or property of a class or module if it is the code of a file or a hook of autokern."""
    found = space.get(name)
    path = getattr(getattr(found, "fget", found), "__code__", _NONE).co_filename
    return found if path and (path == file or path.startswith(HERE)) else None


_NONE = in_place.__code__.replace(co_filename="")
