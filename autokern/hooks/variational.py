"""Hook of the strategies of sparse variational models, in training."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models import ApproximateGP
from gpytorch.settings import _linalg_dtype_cholesky
from gpytorch.variational import VariationalStrategy, variational_strategy

from autokern.core.errors import unless_it_fails
from autokern.core.state import inside
from autokern.hooks.bypass import stay_out_of_models
from autokern.hooks.install import hook
from autokern.kernels import tree as trees
from autokern.model import marginal
from autokern.model.libraries import ALGEBRA, variational_forward
from autokern.prediction.variational import DIAGONAL, Sparse, by_library
from autokern.runtime.dispatch import route

_dispatch = route("variational", looked=True)
_HOME = VariationalStrategy.__module__
_METHODS = "_cholesky_factor", "_compute_predictive_updates", "prior_distribution"
_NAMES = (
    "psd_safe_cholesky", "ComputePredictiveUpdates", "MultivariateNormal", "DiagLinearOperator", "MatmulLinearOperator",
    "SumLinearOperator", "TriangularLinearOperator",
)  # fmt: skip
"""What the library's method finds in its module."""
_found = [vars(variational_strategy).get(name) for name in _NAMES]
_own = *(f"VariationalStrategy.{name}" for name in _METHODS), "ComputePredictiveUpdates"
_relied = *(f"{_HOME}:{name}" for name in _own), *ALGEBRA, LazyEvaluatedKernelTensor


@hook(VariationalStrategy, "forward", relies=_relied)
def _forward(
    self: Any, x: Any, inducing_points: Any, inducing_values: Any, variational_inducing_covar: Any = None, *rest: Any,
    **more: Any,
) -> Any:  # fmt: skip
    """Let an op compute the distribution; the model's `forward` method is called once, whoever computes the rest."""
    given = inducing_values, variational_inducing_covar, *rest
    usual = not rest and (not more or (DIAGONAL and more.keys() == {"diag"} and type(more["diag"]) is bool))
    if not (usual and self.training and _is_plain(self)) or inside.formal or stay_out_of_models():
        return variational_forward(self, x, inducing_points, *given, **more)
    whole = torch.cat([inducing_points, x], dim=-2)
    version, prior = whole._version, self.model.forward(whole)
    found = _described(self, prior, (whole, version), x, inducing_points, given, more)
    return by_library(self, prior, inducing_points, x, *given, **more) if found is None else _dispatch(found)


def _is_plain(strategy: Any) -> bool:
    """Whether a strategy and the present modes are those that the op serves."""
    own = type(strategy) is VariationalStrategy and strategy.__dict__.keys().isdisjoint(_METHODS)
    if not own or not isinstance(strategy.model, ApproximateGP) or torch.is_inference_mode_enabled():
        return False
    patched = [vars(variational_strategy).get(name) for name in _NAMES] != _found
    return not patched and _linalg_dtype_cholesky.value() is torch.float64 and type(strategy.jitter_val) is float


@unless_it_fails
def _described(strategy: Any, prior: Any, of: Any, x: Any, z: Any, given: Any, more: Any) -> Sparse | None:
    """Return a call of a strategy for the op, None if the prior is unsupported; `of` has its points as they were."""
    whole, version = of
    count = whole.shape[-2]
    if type(prior) is not MultivariateNormal or prior.loc.shape[-1] != count:
        return None
    lazy = prior.__dict__.get("_covar")
    if not marginal.is_plain(lazy) or trees.form(lazy.kernel) is None or lazy.x1.shape[-2] != count:
        return None

    def forward(of: Sparse) -> Any:
        return by_library(strategy, of.prior, z, x, of.values, of.covariance, **more)

    _ = strategy.prior_distribution  # which the library caches here
    own, (values, covariance) = strategy.inducing_points, given
    same = z is own or (z._base is own and z.requires_grad == own.requires_grad)
    same = same and lazy.x1 is whole and whole._version == version  # else the model maps its points
    cache = strategy.__dict__.setdefault("_memoize_cache", {})
    joint = DIAGONAL and more.get("diag", True) and z.shape[-2] < x.shape[-2]
    return Sparse(forward, prior, own if same else None, values, covariance, strategy.jitter_val, joint, cache)
