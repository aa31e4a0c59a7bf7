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
_stock = stock_of(VariationalStrategy, "forward")


@hook(VariationalStrategy, "forward", relies=(f"{_KIND}._compute_predictive_updates", *ALGEBRA))
def _forward(
    self: Any, x: Any, inducing_points: Any, inducing_values: Any, variational_inducing_covar: Any = None, **more: Any
) -> Any:
    """Let an op compute the distribution; the model's `forward` method is called once, whoever computes the rest."""
    given = inducing_values, variational_inducing_covar
    plain = self.training and type(self) is VariationalStrategy and isinstance(self.model, ApproximateGP)
    usual = _linalg_dtype_cholesky.value() is torch.float64 and (not more or (DIAGONAL and more == {"diag": True}))
    if not (plain and usual) or inside.formal or stay_out_of_models():
        return _stock(self, x, inducing_points, *given, **more)
    full = torch.cat([inducing_points, x], dim=-2)
    prior = self.model.forward(full)
    found = _described(self, prior, full, x, inducing_points, given, more)
    return by_library(self, prior, inducing_points, x, *given, **more) if found is None else _dispatch(found)


@unless_it_fails
def _described(strategy: Any, prior: Any, full: Any, x: Any, z: Any, given: Any, more: Any) -> Sparse | None:
    """Return a call of a strategy for the op, None if the model's prior is none at all its points."""
    if type(prior) is not MultivariateNormal or prior.loc.shape[-1] != full.shape[-2] or not prior.islazy:
        return None

    def forward(of: Sparse) -> Any:
        return by_library(strategy, of.prior, z, x, of.values, of.covariance, **more)

    lazy, cache = prior._covar, strategy.__dict__.setdefault("_memoize_cache", {})
    known = marginal.is_plain(lazy) and trees.form(lazy.kernel) is not None
    own = strategy.inducing_points if known and lazy.x1 is full else None
    values, covariance = given
    kernel = lazy.kernel if known else None
    return Sparse(forward, prior, kernel, own, values, covariance, strategy.jitter_val, cache)
