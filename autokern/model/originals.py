"""The libraries' own functions as they were when autokern was imported, for the candidates ``stock``.

Ops are imported on first use, when hooks, or a test's mocks, may have replaced these functions. A function that a
release lacks is None here, and its hook is not installed.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import LinearOperator

from autokern.core.releases.known import Relied, relied
from autokern.model.relied import TASKS


def _of(owner: Any, name: str) -> Any:
    return getattr(sys.modules.get(owner) if isinstance(owner, str) else owner, name, None)


log_prob = _of(MultivariateNormal, "log_prob")
inv_quad_logdet = _of(LinearOperator, "inv_quad_logdet")
exact_call = _of(ExactGP, "__call__")
exact_prediction = _of(DefaultPredictionStrategy, "exact_prediction")
get_fantasy_strategy = _of(DefaultPredictionStrategy, "get_fantasy_strategy")
psd_safe_cholesky = _of("linear_operator.utils.cholesky", "_psd_safe_cholesky")
solve = _of("linear_operator.functions._solve", "_solve")


def noise_in_place(likelihood: Any) -> bool:
    """Whether a likelihood, and its noise model, add noise by unpatched code of a known version."""
    covariance = likelihood._modules.get("noise_covar")
    for owner in (likelihood, covariance):
        if owner is not None and any(name in owner.__dict__ for name in _NOISE):
            return False
    kinds: Any = type(likelihood), None if covariance is None else type(covariance)
    return _code(*kinds).holds()


@functools.lru_cache(64)
def _code(likelihood: Any, covariance: Any) -> Relied:
    return relied(likelihood, *(TASKS if covariance is None else (covariance,)))


_NOISE = ("__call__", "_shaped_noise_covar", "forward", "marginal", "noise", "task_noise_covar", "task_noises")
