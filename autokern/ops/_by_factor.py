"""Candidates of `predict` by a model's one factor: joint, lazily and in blocks. Where there is none, stock iterates."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from linear_operator.operators import LinearOperator, to_linear_operator

from autokern.core.op import Op
from autokern.gp import factor_cache
from autokern.gp.inverse_factor import Conditioned
from autokern.gp.lazy_covariance import Explains, PosteriorCovariance, by_blocks, evaluated, less
from autokern.gp.query import Query
from autokern.ops import _predict_costs as costs
from autokern.ops._iterations import or_iterate

__all__ = ["Prediction", "complete", "explains", "factor", "register"]

Prediction = tuple[torch.Tensor, LinearOperator]


def factor(strategy: Any) -> Conditioned:
    """Return the factor of a plain strategy."""
    known = factor_cache.of(strategy)
    assert known is not None
    return known


def complete() -> bool:
    """Whether no observation counts as missing."""
    return bool(gpytorch.settings.observation_nan_policy.value() == "ignore")


def explains(query: Query, known: Conditioned) -> Explains:
    """Return what computes the covariances that the training data explain."""
    return factor_cache.for_covariances(query.strategy, known, query.fast, query.prior.kernel)


def _mean(query: Query, known: Conditioned, rows: torch.Tensor, which: slice = slice(None)) -> torch.Tensor:
    """Return the posterior mean of some points; where observations are missing, as the library has it."""
    own = query.mean[..., which]
    found: torch.Tensor = known.mean(rows) + own if complete() else query.strategy.exact_predictive_mean(own, rows)
    return found


def _kept(query: Query, multiply: bool) -> Prediction:
    known, rows = factor(query.strategy), evaluated(query.cross)
    covariance = PosteriorCovariance.deferred(query.prior, rows, explains(query, known), multiply)
    return _mean(query, known, rows), covariance


def register(op: Op) -> None:
    """Add the candidates to the op."""

    def anew(query: Query) -> Prediction:
        factor_cache.forget(query.strategy)
        found: Prediction = op.stock.run(query)
        return found

    or_anew = or_iterate(anew, is_exact=lambda query: query.exact, numbers=lambda found: found[:1])

    @op.candidate(
        "eager", accuracy="better", features=costs.joint_features, memory=costs.memory_of(3, 1, 1, kept=2), parts=True
    )
    @or_anew
    def eager(query: Query) -> Prediction:
        """The joint covariance of all test points at once, from the model's one factor."""
        known, rows = factor(query.strategy), evaluated(query.cross)
        mean, explained = _mean(query, known, rows), explains(query, known).explained_covariance(rows, False)
        own = evaluated(query.prior)
        small = sum(rows.shape[-2:]) <= gpytorch.settings.max_eager_kernel_size.value()
        return mean, to_linear_operator(own - explained) if small else less(own, explained)

    @op.candidate("lazy", accuracy="better", parts=True)
    @or_anew
    def lazy(query: Query) -> Prediction:
        """Covariances with the training points are kept, variances and the joint computed when they are read."""
        return _kept(query, multiply=False)

    @op.candidate(
        "lazy-product",
        accuracy="better",
        unsupported=costs.only_grown,
        memory=costs.memory_of(0, 2, 2, kept=1),
        parts=True,
    )
    @or_anew
    def lazy_product(query: Query) -> Prediction:
        """The same with products by the inverse factor, which is formed once, in place of substitution."""
        return _kept(query, multiply=True)

    @op.candidate(
        "rows",
        accuracy="better",
        unsupported=costs.rows_unsupported,
        memory=costs.rows_memory,
        features=costs.rows_features,
        parts=True,
    )
    @or_anew
    def rows(query: Query) -> Prediction:
        """In blocks of test points, whose covariances with the training points are never kept."""
        known = factor(query.strategy)

        def mean_of(block: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return _mean(query, known, block, slice(start, stop))

        covariance = PosteriorCovariance.deferred(query.prior, query.cross, explains(query, known), block=costs.BLOCK)
        return by_blocks(query.cross, costs.BLOCK, mean_of), covariance
