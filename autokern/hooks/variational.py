"""Hook of the strategies of sparse variational models, in training."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ApproximateGP
from gpytorch.settings import _linalg_dtype_cholesky
from gpytorch.variational import VariationalStrategy

from autokern.core.errors import unless_it_fails
from autokern.core.state import inside
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook, stock_of
from autokern.kernels import tree as trees
from autokern.model import marginal
from autokern.model.libraries import ALGEBRA
from autokern.prediction.variational import DIAGONAL, Sparse, by_library
from autokern.runtime.dispatch import route

_dispatch = route("variational", looked=True)
_KIND = f"{VariationalStrategy.__module__}:VariationalStrategy"
_METHODS = "_cholesky_factor", "_compute_predictive_updates", "prior_distribution"
_stock = stock_of(VariationalStrategy, "forward")


@hook(VariationalStrategy, "forward", relies=(*(f"{_KIND}.{name}" for name in _METHODS), *ALGEBRA))
def _forward(
    self: Any, x: Any, inducing_points: Any, inducing_values: Any, variational_inducing_covar: Any = None, **more: Any
) -> Any:
    """Let an op compute the distribution; the model's `forward` method is called once, whoever computes the rest."""
    given = inducing_values, variational_inducing_covar
    plain = self.training and type(self) is VariationalStrategy and self.__dict__.keys().isdisjoint(_METHODS)
    usual = _linalg_dtype_cholesky.value() is torch.float64 and (not more or (DIAGONAL and more == {"diag": True}))
    plain = plain and usual and isinstance(self.model, ApproximateGP)
    if not plain or inside.formal or stay_out_of_models():
        return _stock(self, x, inducing_points, *given, **more)
    full = torch.cat([inducing_points, x], dim=-2)
    prior = self.model.forward(full)
    found = _described(self, prior, full, x, inducing_points, given, more)
    return by_library(self, prior, inducing_points, x, *given, **more) if found is None else _dispatch(found)


@unless_it_fails
def _described(strategy: Any, prior: Any, full: Any, x: Any, z: Any, given: Any, more: Any) -> Sparse | None:
    """Return a call of a strategy for the op, None if the prior is unsupported."""
    if type(prior) is not MultivariateNormal or prior.loc.shape[-1] != full.shape[-2]:
        return None
    lazy = prior.__dict__.get("_covar")
    if not marginal.is_plain(lazy) or trees.form(lazy.kernel) is None:
        return None

    def forward(of: Sparse) -> Any:
        return by_library(strategy, of.prior, z, x, of.values, of.covariance, **more)

    own = strategy.inducing_points if lazy.x1 is full else None
    cache = strategy.__dict__.setdefault("_memoize_cache", {})
    values, covariance = given
    return Sparse(forward, prior, own, values, covariance, strategy.jitter_val, cache)
