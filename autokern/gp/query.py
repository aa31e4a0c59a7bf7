"""What the ops `predict` and `fantasy` take: a model's prediction strategy, and the points that are new to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Query", "Update"]


class Query(NamedTuple):
    """All that a prediction is computed from."""

    strategy: Any  # DefaultPredictionStrategy of a model with one dense kernel matrix plus noise
    mean: torch.Tensor  # prior mean of the test points, ``(..., m)``
    prior: Any  # LazyEvaluatedKernelTensor ``(..., m, m)``
    cross: Any  # likewise, with the training points, ``(..., m, n)``
    exact: bool  # whether stock would factorise, not run conjugate gradients and Lanczos
    fast: bool  # whether `fast_pred_var` is on
    in_force: bool = False  # whether its cached factor is known to be of its model, so that stock may use it


class Update(NamedTuple):
    """What gpytorch's `DefaultPredictionStrategy.get_fantasy_strategy` gets."""

    strategy: Any  # that of the model as it is
    inputs: Any
    targets: torch.Tensor
    full_inputs: Any  # old and new ones together
    full_targets: torch.Tensor
    full_output: Any  # MultivariateNormal, the prior of all of them
    noise: torch.Tensor | None  # variances of the new observations, if they have their own
    exact: bool  # whether stock would factorise instead of running Lanczos
