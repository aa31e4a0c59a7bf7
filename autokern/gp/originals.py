"""The libraries' own functions as they were when autokern was imported, for the candidates ``stock``.

Ops are imported when they are first asked for. The hooks may be installed by then, or a test may have put a mock there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import LinearOperator
from linear_operator.utils import cholesky, pinverse

__all__ = [
    "exact_prediction",
    "get_fantasy_strategy",
    "inv_quad_logdet",
    "log_prob",
    "psd_safe_cholesky",
    "stable_pinverse",
]

Function = Callable[..., Any]

log_prob: Function = MultivariateNormal.log_prob
inv_quad_logdet: Function = LinearOperator.inv_quad_logdet
exact_prediction: Function = DefaultPredictionStrategy.exact_prediction
get_fantasy_strategy: Function = DefaultPredictionStrategy.get_fantasy_strategy
psd_safe_cholesky: Function = sys.modules[cholesky.__name__]._psd_safe_cholesky
stable_pinverse: Function = sys.modules[pinverse.__name__].stable_pinverse
