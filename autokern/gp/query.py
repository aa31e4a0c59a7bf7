"""What the ops `predict` and `fantasy` take: a model's prediction strategy, and the points that are new to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Query", "Update"]


class Query(NamedTuple):
    """All that a prediction is computed from.

    Parameters
    ----------
    strategy : DefaultPredictionStrategy
        gpytorch's, of a model whose training covariance is one dense kernel matrix plus noise.
    mean : Tensor
        Prior mean of the test points, ``(..., m)``.
    prior, cross : LazyEvaluatedKernelTensor
        Their covariance ``(..., m, m)``, and those with the training points ``(..., m, n)``.
    exact : bool
        Whether stock would factorise instead of running conjugate gradients and Lanczos.
    fast : bool
        Whether `fast_pred_var` is on.
    in_force : bool
        Whether the factor that is kept for the strategy is known to be that of its model, so that stock may use it.
    """

    strategy: Any
    mean: torch.Tensor
    prior: Any
    cross: Any
    exact: bool
    fast: bool
    in_force: bool = False


class Update(NamedTuple):
    """What gpytorch's `DefaultPredictionStrategy.get_fantasy_strategy` gets.

    Parameters
    ----------
    strategy : DefaultPredictionStrategy
        That of the model as it is.
    inputs, targets : list of Tensor, Tensor
        The new points and their targets.
    full_inputs, full_targets : list of Tensor, Tensor
        Old and new ones together.
    full_output : MultivariateNormal
        The prior of all of them.
    noise : Tensor or None
        Variances of the new observations, if they have their own.
    exact : bool
        Whether stock would factorise instead of running Lanczos.
    """

    strategy: Any
    inputs: Any
    targets: torch.Tensor
    full_inputs: Any
    full_targets: torch.Tensor
    full_output: Any
    noise: torch.Tensor | None
    exact: bool
