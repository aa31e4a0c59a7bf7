"""Several tasks observed at the same points: what their density is computed from, read off the library's operators."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from linear_operator.operators import KroneckerProductLinearOperator

from autokern.gp import originals
from autokern.hooks.reading import unless_it_fails
from autokern.hooks.solver_choice import EXACT, regime

__all__ = ["described", "known"]


@unless_it_fails
def known(distribution: Any, likelihood: Any) -> bool:
    """Whether a density of several tasks may be computed from the covariances of points and tasks."""
    if type(distribution) is not MultitaskMultivariateNormal or type(likelihood) is not MultitaskGaussianLikelihood:
        return False
    if distribution.__dict__.get("_covar").__class__ is not LazyEvaluatedKernelTensor or not distribution._interleaved:
        return False
    if not torch.is_grad_enabled() or distribution.loc.dim() != 1:
        return False
    ignored = gpytorch.settings.observation_nan_policy.value() == "ignore"
    return ignored and regime(distribution.loc.shape[-1]) == EXACT


def described(distribution: Any, likelihood: Any) -> tuple[torch.Tensor, ...] | None:
    """Return covariances of points and tasks, covariance of the noise, and mean; None if they are made otherwise.

    The kernel is evaluated, by the user's own, say, which may raise.
    """
    product = distribution._covar.evaluate_kernel()
    if product.__class__ is not KroneckerProductLinearOperator or len(product.linear_ops) != 2:
        return None
    if not originals.noise_in_place(likelihood):
        return None
    points, tasks = product.representation_tree()(*product.representation()).linear_ops  # their caches stay empty
    return points.to_dense(), tasks.to_dense(), _noise(likelihood, tasks.shape[-1]), distribution.mean


def _noise(likelihood: Any, tasks: int) -> torch.Tensor:
    parts = []
    if likelihood.has_task_noise:
        own = likelihood.task_noises if likelihood.rank == 0 else None
        parts.append(likelihood.task_noise_covar if own is None else torch.diag(own))
    if likelihood.has_global_noise or not likelihood.has_task_noise:
        noise = likelihood.noise
        parts.append(torch.diag(noise.expand(tasks)))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
