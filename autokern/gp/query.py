"""The argument of the op `predict`: a model's prediction strategy, and the prior of its test points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Query"]


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
