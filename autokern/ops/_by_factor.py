"""Candidates of `predict` that use a model's cached factor: joint, lazy and in blocks.

Where stock would iterate and the factorisation fails, stock serves.
"""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from linear_operator.operators import LinearOperator, to_linear_operator

from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.ops._iterations import or_iterate
from autokern.ops._problems import Bytes, iterates, only
from autokern.prediction import factor_cache
from autokern.prediction.factor_cache import Query
from autokern.prediction.inverse_factor import Conditioned
from autokern.prediction.lazy_covariance import Explains, PosteriorCovariance, by_blocks, evaluated, less

Prediction = tuple[torch.Tensor, LinearOperator]
BLOCK = 1024
"""Number of test points in a block."""
_LANCZOS = 100
"""Steps of the library's Lanczos root."""
_SOLVING = 30
"""Iterations of conjugate gradients on the samples, to the library's tolerance for predictions."""


def stock_features(problem: Problem) -> Features:
    """Return the cost of stock, which forms the joint covariance, and iterates above `max_cholesky_size`."""
    joint, square = problem.batch * problem.m**2, float(problem.n**2)
    flops = problem.elements * (problem.n + 2.0 * problem.d) + joint * 2.0 * (problem.n + problem.d)
    bytes = ((12.0 if problem.grad else 6.0) * problem.elements + 6.0 * joint) * problem.itemsize
    if "grown" in problem.words:  # no Cholesky factor exists, and its root must be assembled
        return Features(60.0, flops, bytes + 4.0 * problem.batch * square * problem.itemsize)
    if not iterates(problem):
        return Features(60.0, flops, bytes)
    columns, steps = (1.0, _LANCZOS) if "fast" in problem.words else (1.0 + problem.m, _SOLVING)
    flops += 2.0 * steps * square * columns
    return Features(60.0 + 20.0 * steps, flops, bytes + steps * square * problem.itemsize)


def memory_of(joint: int, rows: float, factors: int, kept: int = 1) -> Bytes:
    """Return a memory rule: matrices ``(m, m)``, ``(m, n)`` and ``(n, n)``, as many as `joint`, `rows` and `factors`.

    Where stock iterates, no factor is cached yet: matrix and factor are added. Gradients keep `kept` more factors.
    """

    def memory(problem: Problem) -> int:
        m, n, b = problem.m, problem.n, problem.batch
        made = factors + (2 if iterates(problem) else 0) + (kept if problem.grad else 0)
        each = rows + (1 if problem.grad else 0)
        return int(joint * b * m * m + each * b * m * n + made * n * n) * problem.itemsize + 2**22

    return memory


def factor(strategy: Any) -> Conditioned:
    known = factor_cache.of(strategy)
    assert known is not None
    return known


def complete() -> bool:
    """Whether `observation_nan_policy` has its default: no observation counts as missing."""
    return bool(gpytorch.settings.observation_nan_policy.value() == "ignore")


def explains(query: Query, known: Conditioned) -> Explains:
    return factor_cache.for_covariances(query.strategy, known, query.fast, query.prior.kernel)


def _mean(query: Query, known: Conditioned, rows: torch.Tensor, which: slice = slice(None)) -> torch.Tensor:
    """Return the posterior mean of the points `which`, by the library if observations are missing."""
    own = query.mean[..., which]
    return known.mean(rows) + own if complete() else query.strategy.exact_predictive_mean(own, rows)


def _kept(query: Query, multiply: bool) -> Prediction:
    known, rows = factor(query.strategy), evaluated(query.cross)
    covariance = PosteriorCovariance.deferred(query.prior, rows, explains(query, known), multiply)
    return _mean(query, known, rows), covariance


def register(op: Op) -> None:
    def anew(query: Query) -> Prediction:
        factor_cache.forget(query.strategy)
        return op.stock.run(query)

    gathered = "gradients keep the blocks anyway"
    or_anew = or_iterate(anew, numbers=lambda found: found[:1])

    @op.candidate("eager", accuracy="better", memory=memory_of(3, 1, 1, kept=2), parts=True)
    @or_anew
    def eager(query: Query) -> Prediction:
        """The joint covariance of all test points at once, from the model's cached factor."""
        known, rows = factor(query.strategy), evaluated(query.cross)
        mean, explained = _mean(query, known, rows), explains(query, known).explained_covariance(rows, False)
        own = evaluated(query.prior)
        small = sum(rows.shape[-2:]) <= gpytorch.settings.max_eager_kernel_size.value()
        return mean, to_linear_operator(own - explained) if small else less(own, explained)

    @op.candidate("lazy", accuracy="better", parts=True)
    @or_anew
    def lazy(query: Query) -> Prediction:
        """The cross covariance is kept; variances and the joint covariance are computed when they are read."""
        return _kept(query, multiply=False)

    @op.candidate(
        "lazy-product",
        accuracy="better",
        unsupported=only("the inverse factor is all there is", lambda p: "grown" not in p.words),
        memory=memory_of(0, 2, 2, kept=1),
        parts=True,
    )
    @or_anew
    def lazy_product(query: Query) -> Prediction:
        """The same by products with the inverse factor, formed once, instead of substitution."""
        return _kept(query, multiply=True)

    @op.candidate(
        "rows",
        accuracy="better",
        unsupported=lambda p: gathered if p.grad else None if p.m > BLOCK else f"no more than {BLOCK} test points",
        memory=lambda p: memory_of(0, 3.5, 1)(p.replace(m=min(p.m, BLOCK))),
        parts=True,
    )
    @or_anew
    def rows(query: Query) -> Prediction:
        """In blocks of test points; the cross covariance is never kept."""
        known = factor(query.strategy)

        def mean_of(block: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            return _mean(query, known, block, slice(start, stop))

        covariance = PosteriorCovariance.deferred(query.prior, query.cross, explains(query, known), block=BLOCK)
        return by_blocks(query.cross, BLOCK, mean_of), covariance
