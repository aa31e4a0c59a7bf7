"""Several tasks observed at the same points: the covariances of their density, read from the library's operators.

Independent tasks form a batch, in which each has its own kernel and noise.
"""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from linear_operator.operators import BlockInterleavedLinearOperator, KroneckerProductLinearOperator

from autokern.model import marginal, originals
from autokern.model.library_orders import ORDERED, regime

_OPERATORS = (LazyEvaluatedKernelTensor, BlockInterleavedLinearOperator)


def known(distribution: Any, likelihood: Any) -> bool:
    """Whether a density of tasks is supported: differentiable, unbatched, interleaved, and no order to iterate."""
    if type(distribution) is not MultitaskMultivariateNormal or type(likelihood) is not MultitaskGaussianLikelihood:
        return False
    if distribution.__dict__.get("_covar").__class__ not in _OPERATORS or not distribution._interleaved:
        return False
    plain = torch.is_grad_enabled() and distribution.loc.dim() == 1
    ignored = gpytorch.settings.observation_nan_policy.value() == "ignore"
    return plain and ignored and regime(distribution.loc.shape[-1]) != ORDERED


def described(distribution: Any, likelihood: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the covariances of points, tasks and noise, and the mean, None if there is no Kronecker product."""
    product = distribution._covar.evaluate_kernel()
    pair = product.__class__ is KroneckerProductLinearOperator and len(product.linear_ops) == 2
    if not pair or not originals.noise_in_place(likelihood):
        return None
    noise = _noise(likelihood, distribution.num_tasks)
    points, tasks = product.representation_tree()(*product.representation()).linear_ops  # a copy: its caches stay empty
    return points.to_dense(), tasks.to_dense(), noise if noise.dim() == 2 else torch.diag(noise), distribution.mean


def independent(distribution: Any, likelihood: Any) -> marginal.Marginal | None:
    """Return the marginal of tasks in blocks as a batch over tasks, None if the noise is unsupported."""
    noise = _noise(likelihood, distribution.num_tasks) if originals.noise_in_place(likelihood) else None
    if noise is None or noise.dim() != 1:  # noise is correlated between tasks
        return None
    batch = MultivariateNormal(distribution.mean.mT, distribution._covar.base_linear_op)
    return marginal.read(batch, noise.unsqueeze(-1))


def _noise(likelihood: Any, tasks: int) -> torch.Tensor:
    """Return the variances of the tasks' noise ``(t,)``, or its covariance ``(t, t)``."""
    if not likelihood.has_task_noise:
        alone: torch.Tensor = likelihood.noise.expand(tasks)
        return alone
    own: torch.Tensor = likelihood.task_noises if likelihood.rank == 0 else likelihood.task_noise_covar
    if not likelihood.has_global_noise:
        return own
    common = likelihood.noise.expand(tasks)
    return own + (common if own.dim() == 1 else torch.diag(common))
