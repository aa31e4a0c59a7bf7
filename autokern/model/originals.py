"""The libraries' own functions: those that computations depend on, and those that candidates ``stock`` call.

`relied.json` lists the functions that stock runs for a density, a prediction or a fantasy, besides the classes of a
model; `calibration/record_routes.py` writes it. Ops are imported on first use, when hooks, or a test's mocks, may have
replaced functions, so these are taken when autokern is imported. A function that a release lacks is None here, and its
hook is not installed.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import LinearOperator

from autokern.core.releases.known import Relied, relied

_routes: dict[str, list[str]] = json.loads(Path(__file__).with_name("relied.json").read_text(encoding="utf-8"))
ALGEBRA = tuple(_routes["algebra"])
"""Functions that form and factorise a covariance."""
DENSITY = tuple(_routes["density"])
"""Functions that compute a marginal likelihood from a prior."""
TASKS = tuple(_routes["tasks"])
"""Functions that compute the marginal likelihood of several tasks observed at the same points."""
PREDICTION = tuple(_routes["prediction"])
"""Functions that compute a prediction from a prior and a factor."""
MEMORY = tuple(_routes["memory"])
"""Functions that take operators apart and cache results on them."""
density: Relied = relied(*DENSITY)
prediction: Relied = relied(*PREDICTION)
fantasy: Relied = relied(*_routes["fantasy"])
"""Functions that compute a fantasy from the caches of its model."""


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
