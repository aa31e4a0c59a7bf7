"""The Op `predict`: mean and covariance of the posterior at test points, of which callers read the variances.

Arguments: ``strategy, test_mean, prior, cross, exact, fast``: gpytorch's prediction strategy of a model whose training
covariance is one dense kernel matrix plus noise, the prior mean ``(..., m)`` and covariance ``(..., m, m)`` of the test
points, their covariances ``(..., m, n)`` with the training points, both lazy, whether stock would factorise instead of
running conjugate gradients and Lanczos, and whether `fast_pred_var` is on. The result is a mean and a covariance
operator; reading its diagonal is part of what is measured. Where stock iterates, the first prediction with all it
leaves in caches and a second one are measured together, else one with the caches there: the factor is shared by all.

Contract: mean and variances are those of a training covariance within ``2 (n + s) eps max|K|`` of K and covariances
with the test points within ``4 (1 + s) eps max|K|``, where s is the largest scaled squared norm of the points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import DenseLinearOperator, LinearOperator, to_linear_operator
from linear_operator.utils.errors import NanError, NotPSDError

from autokern.core.arguments import in_float64
from autokern.core.op import Op
from autokern.core.problem import Features, Problem
from autokern.gp import factor_cache
from autokern.gp.inverse_factor import Conditioned
from autokern.gp.lazy_covariance import PosteriorCovariance, by_blocks
from autokern.gp.row_blocks import RowBlocks
from autokern.kernels import tree as trees
from autokern.ops._models import trained
from autokern.ops._shared import EPS, PAGED, as_asked, is_ours, iterates, matrix_problem, random_matrix

__all__ = ["PREDICT"]

_stock = DefaultPredictionStrategy.exact_prediction
_BLOCK = 1024
"""Test points of a block."""
_JOINT = 16
"""Test points whose joint covariance is read."""
_LANCZOS = 100
"""Steps of the library's Lanczos root."""
_SOLVING = 30
"""Steps of conjugate gradients at the library's tolerance for predictions, as they are on the samples."""
Prediction = tuple[torch.Tensor, LinearOperator]


def _graph(prior: Any) -> str:
    """Which gradients are wanted: by the test points, or by the hyperparameters only."""
    if not torch.is_grad_enabled():
        return ""
    if prior.x1.requires_grad:
        return "x"
    return "theta" if any(p.requires_grad for p in prior.kernel.parameters()) else ""


def _grown(strategy: Any, problem: Problem) -> Conditioned:
    """Return a model's factor as if its last point had come later, for every matrix of a batch apart."""
    known = factor_cache.of(strategy)
    assert known is not None
    if problem.batch == 1 or problem.n == 1:
        return Conditioned(inverse=known.inverse, alpha=known.alpha)
    whole = known.inverse.dense()
    border = whole[-1:].expand(problem.batch, 1, -1).contiguous()
    return Conditioned(inverse=RowBlocks(whole[:-1, :-1]), border=border, alpha=known.alpha)


def _joint_features(problem: Problem) -> Features:
    plain, joint = PREDICT.features(problem), problem.batch * problem.m**2
    flops = plain.flops + joint * 2.0 * (problem.n + problem.d)
    return Features(plain.calls, flops, plain.bytes + 6.0 * joint * problem.itemsize)


def _stock_features(problem: Problem) -> Features:
    joint, square = _joint_features(problem), float(problem.n**2)
    if problem.variant.endswith("grown"):  # its root has to be put together
        return Features(joint.calls, joint.flops, joint.bytes + 4.0 * problem.batch * square * problem.itemsize)
    if not iterates(problem):
        return joint
    columns = 1.0 if problem.variant.startswith("fast") else 1.0 + problem.m
    steps = _LANCZOS if problem.variant.startswith("fast") else _SOLVING
    flops = joint.flops + 2.0 * steps * square * columns - problem.n**3 / 3
    return Features(joint.calls + 20.0 * steps, max(flops, 0.0), joint.bytes + steps * square * problem.itemsize)


def _memory_of(joint: int, rows: float, factors: int, kept: int = 1) -> Callable[[Problem], int]:
    """Return the memory for so many joint matrices, rows of all test points, and factors of the training covariance.

    Where stock iterates, the factor is not there yet and is made from the matrix; gradients keep `kept` more factors.
    """

    def memory(problem: Problem) -> int:
        m, n, b = problem.m, problem.n, problem.batch
        made = factors + (2 if iterates(problem) else 0) + (kept if problem.grad else 0)
        each = rows + (1 if problem.grad else 0)
        return int(joint * b * m * m + each * b * m * n + made * n * n) * problem.itemsize + 2**22

    return memory


def _stock_memory(problem: Problem) -> int:
    """Rows of the cross covariance and what they are multiplied with; prior, what is explained, and what is left."""
    fast = problem.variant.startswith("fast")
    return _memory_of(3, 2 if fast else 3, 2, kept=2)(problem)


class _Predict(Op):
    name = "predict"
    summary = "posterior mean and variances at test points"
    contract = "those of a training covariance within 2 (n + s) eps max|K| of K"
    raises = (NanError, NotPSDError)
    composite = True

    def key(self, strategy: Any, test_mean: Any, prior: Any, cross: Any, exact: bool, fast: bool) -> Any:
        if prior.__class__ is not LazyEvaluatedKernelTensor or cross.__class__ is not LazyEvaluatedKernelTensor:
            return None
        x = prior.x1
        return (
            strategy.__class__, strategy.train_labels.shape, test_mean.shape, x.__class__, x.shape, x.dtype, x.device,
            cross.x2.shape, prior.shape, _graph(prior), exact, fast, factor_cache.plain(strategy),
            factor_cache.is_exact(strategy), gpytorch.settings.skip_posterior_variances.on(), prior.last_dim_is_batch,
        )  # fmt: skip

    def problem_of(
        self, strategy: Any, test_mean: Any, prior: Any, cross: Any, exact: bool, fast: bool
    ) -> Problem | None:
        lazy = LazyEvaluatedKernelTensor
        if type(strategy) is not DefaultPredictionStrategy or type(prior) is not lazy or type(cross) is not lazy:
            return None
        if (
            prior.last_dim_is_batch
            or gpytorch.settings.skip_posterior_variances.on()
            or not factor_cache.plain(strategy)
        ):
            return None
        x, n = prior.x1, strategy.num_train
        if not is_ours(x) or prior.shape[-1] != x.shape[-2] or cross.shape[-1] != n:
            return None
        grown = factor_cache.is_exact(strategy)
        return matrix_problem(
            "predict",
            x,
            m=x.shape[-2],
            n=n,
            d=x.shape[-1],
            batch=prior.shape[:-2].numel(),
            grad=_graph(prior),
            variant=f"{'fast' if fast else 'solve'}/{'grown' if grown else 'cholesky' if exact else 'cg'}",
        )

    def reference(self, strategy: Any, test_mean: Any, prior: Any, cross: Any, exact: bool, fast: bool) -> Prediction:
        k = strategy.lik_train_train_covar.to_dense()
        lower = torch.linalg.cholesky(k.detach())
        through = torch.linalg.cholesky(k) if not fast else lower  # as the library differentiates
        residual = (strategy.train_labels - strategy.train_prior_dist.loc).unsqueeze(-1)
        rows = cross.to_dense()
        mean = test_mean + (rows @ torch.cholesky_solve(residual, lower)).squeeze(-1)
        white = torch.linalg.solve_triangular(through, rows.mT, upper=False)
        return mean, DenseLinearOperator(prior.to_dense() - white.mT @ white)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        model = trained(problem, generator)
        if problem.variant.endswith("grown"):
            factor_cache.attach(model.strategy, _grown(model.strategy, problem), attached=False)
        x = random_matrix(problem, generator, problem.m, problem.d).requires_grad_("x" in problem.grad.split("/"))
        with torch.set_grad_enabled(bool(problem.grad)):
            prior = LazyEvaluatedKernelTensor(x, x, kernel=model.kernel)
            cross = LazyEvaluatedKernelTensor(x, model.x, kernel=model.kernel)
        mean = x.detach().new_zeros(x.shape[:-1])
        return model.strategy, mean, prior, cross, not iterates(problem), problem.variant.startswith("fast")

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        with torch.enable_grad():  # what is lazy keeps the grad mode that it was made in
            exact = in_float64(args)
        with torch.no_grad():
            strategy, _, prior, cross, _, _ = exact
            mean, covariance = self.reference(*exact)
            k, rows = strategy.lik_train_train_covar.to_dense(), cross.to_dense()
            residual = (strategy.train_labels - strategy.train_prior_dist.loc).unsqueeze(-1)
            weights = torch.cholesky_solve(rows.mT, torch.linalg.cholesky(k)).mT
            alpha = torch.linalg.solve(k, residual).squeeze(-1)
            scaled = [trees.read(prior.kernel, x).points[0] for x in (prior.x1, cross.x2)]
            size = max((z - scaled[1].mean(-2, keepdim=True)).square().sum(-1).max().item() for z in scaled)
            eps = EPS[problem.dtype] * k.abs().max()
            inside, across = 2 * (problem.n + size) * eps, 4 * (1 + size) * eps
            of_mean = inside * weights.norm(dim=-1) * alpha.norm() + across * alpha.abs().sum() + eps
            of_variance = inside * weights.square().sum(-1) + across * (2 * weights.abs().sum(-1) + 1)
            variances = covariance.diagonal(dim1=-2, dim2=-1)
            gaps = (out[0].double() - mean).abs() / of_mean, (out[1].double() - variances).abs() / of_variance
            return max(gap.max().item() for gap in gaps)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        full = level == "full"
        base = Problem(op="predict", d=6, dtype=dtype, device=device, variant="solve/cholesky")
        sizes = [(100, 100), (1000, 100), (1000, 400), (10, 400), (6000, 100), (1, 60)]
        sizes += [(3000, 700), (300, 300), (100, 700), (20000, 200), (20, 20)] if full else []
        iterated = [(60, 900), (1, 1000)] + ([(400, 1000), (10, 1600), (100, 2000), (1, 2500)] if full else [])
        problems = [base.replace(m=m, n=n, variant=f"{how}/cholesky") for m, n in sizes for how in ("fast", "solve")]
        problems += [base.replace(m=m, n=n, variant=f"{how}/cg") for m, n in iterated for how in ("solve", "fast")]
        small = [(4, 1, 200), (1, 16, 200)] + ([(1, 5, 50), (4, 20, 100), (2, 200, 100)] if full else [])
        problems += [
            base.replace(m=m, n=n, batch=b, grad="x", variant=f"fast/{state}")
            for m, b, n in small
            for state in ("cholesky", "grown")
        ]
        grown = [(10, 500), (100, 1500)] + ([(1, 100), (1000, 300), (10, 3000)] if full else [])
        problems += [base.replace(m=m, n=n, variant="fast/grown") for m, n in grown]
        graded = sizes[:3] if full else sizes[1:2]
        return problems + [base.replace(m=m, n=n, grad="theta") for m, n in graded]

    def features(self, problem: Problem) -> Features:
        elements = problem.batch * problem.m * problem.n
        first = problem.n**3 / 3 if iterates(problem) else 0.0
        passes = 12.0 if problem.grad else 6.0
        return Features(60.0, elements * (problem.n + 2.0 * problem.d) + first, passes * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return _memory_of(0, 2, 1)(problem)

    def extra_features(self, problem: Problem) -> tuple[float, ...]:
        """What stock does when it iterates says nothing of solving; large joint matrices are paged memory."""
        joint = problem.batch * problem.m**2 * problem.itemsize > PAGED
        return (6.0 if iterates(problem) else 0.0, 1.0 if problem.variant[:4] == "fast" else 0.0, 1.5 if joint else 0.0)

    def materialize(self, out: Prediction) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variances; of few points, the joint covariance is formed, as acquisition functions do."""
        mean, covariance = out
        if covariance.shape[-1] <= _JOINT:
            covariance = DenseLinearOperator(covariance.to_dense())
        return mean, covariance.diagonal(dim1=-2, dim2=-1)

    def warm_repeats(self, problem: Problem) -> int:
        return int(iterates(problem))

    def approximates(self, problem: Problem) -> bool:
        return iterates(problem)

    def default_candidate(self, problem: Problem) -> str:
        """Variances of many points need no joint matrix, and a factor that grew is in no form that stock can use."""
        if problem.variant.endswith("grown"):
            return "lazy"
        if problem.m < 1024 or problem.n > 4000:
            return "stock"
        return "rows" if self.memory(problem) > 2**28 else "lazy"


PREDICT = _Predict()


@PREDICT.candidate("stock", features=_stock_features, memory=_stock_memory)
def stock(strategy: Any, test_mean: torch.Tensor, prior: Any, cross: Any, exact: bool, fast: bool) -> Prediction:
    """gpytorch's own: the joint covariance of all test points; above `max_cholesky_size` by conjugate gradients."""
    with as_asked(exact, strategy.num_train), gpytorch.settings.fast_pred_var(fast):
        made: Prediction = _stock(strategy, test_mean, prior.evaluate_kernel(), cross.evaluate_kernel())
        return made


@PREDICT.candidate("eager", accuracy="better", features=_joint_features, memory=_memory_of(3, 1, 1, kept=2), parts=True)
def eager(strategy: Any, test_mean: torch.Tensor, prior: Any, cross: Any, exact: bool, fast: bool) -> Prediction:
    """The joint covariance of all test points at once, from the model's one factor."""
    known, rows = factor_cache.for_covariances(strategy, fast, prior.kernel), cross.to_dense()
    mean = strategy.exact_predictive_mean(test_mean, rows)
    return mean, to_linear_operator(prior.to_dense() - known.explained_covariance(rows))


def _kept(strategy: Any, test_mean: torch.Tensor, prior: Any, cross: Any, fast: bool, multiply: bool) -> Prediction:
    known, rows = factor_cache.for_covariances(strategy, fast, prior.kernel), cross.to_dense()
    return strategy.exact_predictive_mean(test_mean, rows), PosteriorCovariance.deferred(prior, rows, known, multiply)


@PREDICT.candidate("lazy", accuracy="better", parts=True)
def lazy(strategy: Any, test_mean: torch.Tensor, prior: Any, cross: Any, exact: bool, fast: bool) -> Prediction:
    """Covariances with the training points are kept, variances computed when they are read, the joint when it is."""
    return _kept(strategy, test_mean, prior, cross, fast, multiply=False)


def _factored(problem: Problem) -> str | None:
    return "the inverse factor is all there is" if problem.variant.endswith("grown") else None


@PREDICT.candidate(
    "lazy-product", accuracy="better", unsupported=_factored, memory=_memory_of(0, 2, 2, kept=1), parts=True
)
def lazy_product(strategy: Any, test_mean: torch.Tensor, prior: Any, cross: Any, exact: bool, fast: bool) -> Prediction:
    """The same with products by the inverse factor, which is formed once, in place of substitution."""
    return _kept(strategy, test_mean, prior, cross, fast, multiply=True)


def _rows_unsupported(problem: Problem) -> str | None:
    if problem.grad:
        return "gradients keep the blocks anyway"
    return None if problem.m > _BLOCK else f"no more than {_BLOCK} test points"


def _rows_memory(problem: Problem) -> int:
    return _memory_of(0, 3.5, 1)(problem.replace(m=min(problem.m, _BLOCK)))


def _rows_features(problem: Problem) -> Features:
    plain = PREDICT.features(problem)
    return Features(plain.calls * (1 + problem.m / _BLOCK), plain.flops, plain.bytes)


@PREDICT.candidate(
    "rows", accuracy="better", unsupported=_rows_unsupported, memory=_rows_memory, features=_rows_features, parts=True
)
def rows(strategy: Any, test_mean: torch.Tensor, prior: Any, cross: Any, exact: bool, fast: bool) -> Prediction:
    """In blocks of test points, whose covariances with the training points are never kept."""
    known = factor_cache.for_covariances(strategy, fast, prior.kernel)

    def mean_of(block: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        part: torch.Tensor = strategy.exact_predictive_mean(test_mean[..., start:stop], block)
        return part

    mean = by_blocks(cross, _BLOCK, mean_of)
    return mean, PosteriorCovariance.deferred(prior, cross, known, block=_BLOCK)
