"""The Op `predict`: posterior mean and covariance at test points; callers mostly read the variances.

The argument is a `Query`, the result a mean and a covariance operator, whose diagonal trials compute, too.
Where stock iterates, the first prediction, which fills the caches, and a second one are measured together; else one
prediction with filled caches, because all candidates share the factor.
"""

from __future__ import annotations

import contextlib
from typing import Any

import gpytorch
import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import DenseLinearOperator, LinearOperator, MatmulLinearOperator, to_linear_operator

from autokern.core.problem import Error, Features, Problem
from autokern.model import libraries
from autokern.ops import _large_models as large_models
from autokern.ops._candidates import OpOfParts, as_asked, every, only, or_iterate
from autokern.ops._problems import is_ours, iterates, matrix_problem, random_matrix, trained
from autokern.prediction import factor_cache
from autokern.prediction.factor_cache import Query
from autokern.prediction.inverse_factor import Conditioned, RowBlocks
from autokern.prediction.lazy_covariance import Explains, PosteriorCovariance, by_blocks, evaluated, less

Prediction = tuple[torch.Tensor, LinearOperator]
_BLOCK = 1024  # number of test points in a block
_skipped = gpytorch.settings.skip_posterior_variances.on
_JOINT = 16  # number of test points up to which measurements read the joint covariance


def _memory_of(problem: Problem, joint: int, rows: float, factors: int, kept: int = 1) -> int:
    """Return the bytes of `joint` matrices ``(m, m)``, `rows` of ``(m, n)`` and `factors` of ``(n, n)``."""
    m, n, b = problem.m, problem.n, problem.batch
    # where stock iterates, no factor is cached yet; gradients keep `kept` more
    made = factors + (2 if iterates(problem) else 0) + (kept if problem.grad else 0)
    each = rows + (1 if problem.grad else 0)
    return int(joint * b * m * m + each * b * m * n + made * n * n) * problem.itemsize + 2**22


def _graph(prior: Any) -> str:
    """Return the required gradients: ``x`` by the test points, ``theta`` by hyperparameters only, or none."""
    if not torch.is_grad_enabled():
        return ""
    if prior.x1.requires_grad:
        return "x"
    return "theta" if any(p.requires_grad for p in prior.kernel.parameters()) else ""


def _grown(strategy: Any, problem: Problem) -> Conditioned:
    """Return a model's factor as if its last point had been added later, once for each matrix of a batch."""
    known = _factor(strategy)
    if problem.batch == 1 or problem.n == 1:
        return Conditioned(inverse=known.inverse, alpha=known.alpha)
    whole = known.inverse.dense()
    border = whole[-1:].expand(problem.batch, 1, -1).contiguous()
    return Conditioned(inverse=RowBlocks(whole[:-1, :-1]), border=border, alpha=known.alpha)


class _Predict(OpOfParts):
    name = "predict"
    summary = "posterior mean and variances at test points"
    nesting = 3
    looseness = Error("residual 0.01", "stock iterates, by default to a residual of 0.01 on the mean of its columns")

    def key(self, query: Query) -> Any:
        strategy, test_mean, prior, cross, exact, fast, _ = query
        if prior.__class__ is not LazyEvaluatedKernelTensor or cross.__class__ is not LazyEvaluatedKernelTensor:
            return None
        x = prior.x1
        return (
            strategy.__class__, strategy.train_labels.shape, test_mean.shape, x.__class__, x.shape, x.dtype, x.device,
            cross.x2.shape, prior.shape, _graph(prior), exact, fast, factor_cache.plain(strategy),
            factor_cache.is_exact(strategy), _skipped(), prior.last_dim_is_batch, large_models.prediction_word(query),
        )  # fmt: skip

    def problem_of(self, query: Query) -> Problem | None:
        strategy, _, prior, cross, exact, fast, _ = query
        if type(strategy) is not DefaultPredictionStrategy or {type(prior), type(cross)} != {LazyEvaluatedKernelTensor}:
            return None
        if prior.last_dim_is_batch or _skipped() or not factor_cache.plain(strategy):
            return None
        x, n = prior.x1, strategy.num_train
        if not is_ours(x) or prior.shape[-1] != x.shape[-2] or cross.shape[-1] != n:
            return None
        (m, d), batch, line = x.shape[-2:], prior.shape[:-2].numel(), large_models.prediction_word(query)
        how = "grown" if factor_cache.is_exact(strategy) else "cholesky" if exact else "cg"
        variant = f"{'fast' if fast else 'solve'}/{how}{line}"
        return matrix_problem(self.name, x, m=m, n=n, d=d, batch=batch, grad=_graph(prior), variant=variant)

    def reference(self, query: Query) -> Prediction:
        strategy, test_mean, prior, cross, _, fast, _ = query
        k = strategy.lik_train_train_covar.to_dense()
        lower = torch.linalg.cholesky(k.detach())
        through = torch.linalg.cholesky(k) if not fast else lower  # as the library differentiates
        residual = (strategy.train_labels - strategy.train_prior_dist.loc).unsqueeze(-1)
        rows = cross.to_dense()
        mean = test_mean + (rows @ torch.cholesky_solve(residual, lower)).squeeze(-1)
        white = torch.linalg.solve_triangular(through, rows.mT, upper=False)
        return mean, DenseLinearOperator(prior.to_dense() - white.mT @ white)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        strategy = trained(problem, generator)
        kernel, (known,) = strategy.train_prior_dist.lazy_covariance_matrix.kernel, strategy.train_inputs
        if "grown" in problem.words:
            factor_cache.attach(strategy, _grown(strategy, problem), attached=False)
        x = random_matrix(problem, generator, problem.m, problem.d).requires_grad_("x" in problem.grad.split("/"))
        with torch.set_grad_enabled(bool(problem.grad)):
            prior = LazyEvaluatedKernelTensor(x, x, kernel=kernel)
            cross = LazyEvaluatedKernelTensor(x, known, kernel=kernel)
        mean = x.detach().new_zeros(x.shape[:-1])
        return (Query(strategy, mean, prior, cross, not iterates(problem), "fast" in problem.words),)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full = level == "full"
        base = Problem(op="predict", d=6, dtype=dtype, device=device, variant="solve/cholesky")
        sizes = [(100, 100), (1000, 100), (1000, 400), (10, 400), (6000, 100), (1, 60)]
        sizes += [(3000, 700), (20000, 200), (20, 20)] if full else []
        iterated = [(60, 900), (1, 1000)] + ([(400, 1000), (10, 1600), (1, 2500)] if full else [])
        kinds = [*((size, "cholesky") for size in sizes), *((size, "cg") for size in iterated)]
        problems = [
            base.replace(m=m, n=n, variant=f"{how}/{state}") for (m, n), state in kinds for how in ("fast", "solve")
        ]
        small = [(4, 1, 200), (1, 16, 200)] + ([(1, 5, 50), (4, 20, 100)] if full else [])
        batched = [base.replace(m=m, n=n, batch=b, grad="x") for m, b, n in small]
        problems += [p.replace(variant=f"fast/{state}") for p in batched for state in ("cholesky", "grown")]
        grown = [(10, 500), (100, 1500)] + ([(1, 100), (1000, 300), (10, 3000)] if full else [])
        problems += [base.replace(m=m, n=n, variant="fast/grown") for m, n in grown]
        return problems + [base.replace(m=m, n=n, grad="theta") for m, n in sizes[: 3 if full else 1]]

    def features(self, problem: Problem) -> Features:
        joint, square = problem.batch * problem.m**2, float(problem.n**2)
        flops = problem.elements * (problem.n + 2.0 * problem.d) + joint * 2.0 * (problem.n + problem.d)
        bytes = ((12.0 if problem.grad else 6.0) * problem.elements + 6.0 * joint) * problem.itemsize
        if "grown" in problem.words:  # no Cholesky factor exists, and its root must be assembled
            return Features(60.0, flops, bytes + 4.0 * problem.batch * square * problem.itemsize)
        if not iterates(problem):
            return Features(60.0, flops, bytes)
        # operations of a Lanczos root, and of conjugate gradients on samples to the tolerance of predictions
        columns, steps = (1.0, 100) if "fast" in problem.words else (1.0 + problem.m, 30)
        flops += 2.0 * steps * square * columns
        return Features(60.0 + 20.0 * steps, flops, bytes + steps * square * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return _memory_of(problem, 0, 2, 1)

    def materialize(self, out: Prediction) -> tuple[torch.Tensor, torch.Tensor]:
        mean, covariance = out
        if covariance.shape[-1] <= _JOINT:  # acquisition functions read these joint covariances
            covariance = DenseLinearOperator(covariance.to_dense())
        return mean, covariance.diagonal(dim1=-2, dim2=-1)

    def warm_repeats(self, problem: Problem) -> int:
        return int(iterates(problem))

    def default_candidate(self, problem: Problem) -> str:
        if "grown" in problem.words:
            return "lazy"  # stock cannot use such a factor
        if large_models.predicts(problem) is None:
            return "state-space"
        if problem.m < 1024 or problem.n > 4000:
            return "stock"
        return "rows" if self.memory(problem) > 2**28 else "lazy"


PREDICT = _Predict()


@PREDICT.candidate("stock", memory=lambda p: _memory_of(p, 3, 2 if "fast" in p.words else 3, 2, kept=2))
def stock(query: Query) -> Prediction:
    """gpytorch's own: the joint covariance of all test points; above `max_cholesky_size` by conjugate gradients."""
    strategy, mean, prior, cross, exact, fast, in_force = query
    known = factor_cache.found(strategy) if in_force and _complete() and not _skipped() else None
    if known is not None:
        found = _as_stock(query, known)
        if exact or found[0].isfinite().all():  # with NaN, stock's iterations raise an error
            return found
        factor_cache.forget(strategy)
    asked = gpytorch.settings.fast_pred_var
    with as_asked(exact, strategy.num_train), contextlib.nullcontext() if asked.on() == fast else asked(fast):
        return libraries.exact_prediction(strategy, mean, prior.evaluate_kernel(), cross.evaluate_kernel())


def _as_stock(query: Query, known: Conditioned) -> Prediction:
    """Predict as the library does with filled caches: by tensors at small sizes, else by operators."""
    small = _is_small(query)
    own, rows = (evaluated(lazy) if small else lazy.evaluate_kernel() for lazy in (query.prior, query.cross))
    mean = known.mean(rows) + query.mean
    if not query.fast:
        return mean, _joint(query, known, own, evaluated(rows))
    query.strategy._last_test_train_covar = rows
    root = rows.matmul(known.root)
    if small:
        return mean, to_linear_operator(torch.add(own, root @ root.mT, alpha=-1))
    return mean, own + MatmulLinearOperator(root, root.mT.mul(-1))


def _is_small(query: Query) -> bool:
    return bool(sum(query.cross.shape[-2:]) <= gpytorch.settings.max_eager_kernel_size.value())


def _joint(query: Query, known: Conditioned, own: Any, rows: torch.Tensor) -> LinearOperator:
    explained = _explains(query, known).explained_covariance(rows)
    return to_linear_operator(own - explained) if _is_small(query) else less(own, explained)


def _factor(strategy: Any) -> Conditioned:
    known = factor_cache.of(strategy)
    assert known is not None
    return known


def _complete() -> bool:
    """Whether `observation_nan_policy` has its default: no observation counts as missing."""
    return bool(gpytorch.settings.observation_nan_policy.value() == "ignore")


def _explains(query: Query, known: Conditioned) -> Explains:
    return factor_cache.for_covariances(query.strategy, known, query.fast, query.prior.kernel)


def _mean(query: Query, known: Conditioned, rows: torch.Tensor, which: slice = slice(None)) -> torch.Tensor:
    """Return the posterior mean of the points `which`, by the library if observations are missing."""
    own = query.mean[..., which]
    return known.mean(rows) + own if _complete() else query.strategy.exact_predictive_mean(own, rows)


def _anew(query: Query) -> Prediction:
    factor_cache.forget(query.strategy)
    return stock(query)


_or_anew = or_iterate(_anew, numbers=lambda found: found[:1])


@PREDICT.candidate("eager", accuracy="better", memory=lambda p: _memory_of(p, 3, 1, 1, kept=2), parts=True)
@_or_anew
def eager(query: Query) -> Prediction:
    """The joint covariance of all test points at once, from the model's cached factor."""
    known, rows = _factor(query.strategy), evaluated(query.cross)
    return _mean(query, known, rows), _joint(query, known, evaluated(query.prior), rows)


@PREDICT.candidate("lazy", accuracy="better", parts=True)
@_or_anew
def lazy(query: Query) -> Prediction:
    """The cross covariance is kept; variances and the joint covariance are computed when they are read."""
    known, rows = _factor(query.strategy), evaluated(query.cross)
    return _mean(query, known, rows), PosteriorCovariance.deferred(query.prior, rows, _explains(query, known))


@PREDICT.candidate(
    "rows",
    accuracy="better",
    unsupported=every(
        only("gradients keep the blocks anyway", lambda p: not p.grad),
        only(f"no more than {_BLOCK} test points", lambda p: p.m > _BLOCK),
    ),
    memory=lambda p: _memory_of(p.replace(m=min(p.m, _BLOCK)), 0, 3.5, 1),
    parts=True,
)
@_or_anew
def rows(query: Query) -> Prediction:
    """In blocks of test points; the cross covariance is never kept."""
    known = _factor(query.strategy)
    covariance = PosteriorCovariance.deferred(query.prior, query.cross, _explains(query, known), block=_BLOCK)
    mean = by_blocks(query.cross, _BLOCK, lambda block, *place: _mean(query, known, block, slice(*place)))
    return mean, covariance


large_models.register_prediction(PREDICT)
