"""The Op `variational`: the distribution of a sparse variational Gaussian process at data, in training.

The argument is a `Sparse`, the result a distribution. A problem's `m` is the number of inducing points, `n` that of the
data. Trials compute and check means and variances, which the bounds of all likelihoods take.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from linear_operator.operators import CholLinearOperator, TriangularLinearOperator

from autokern.core.problem import Features, Problem
from autokern.kernels import tree as trees
from autokern.ops._candidates import OpOfParts
from autokern.ops._problems import alike, is_ours, kernel_of, kernel_problem, random_matrix
from autokern.prediction import variational
from autokern.prediction.variational import Sparse, by_library

_JITTER = 1e-4


class _Variational(OpOfParts):
    name = "variational"
    summary = "distribution of a sparse variational Gaussian process at data, in training"
    nesting = 4

    def key(self, of: Sparse) -> Any:
        lazy, graph, spread = of.prior._covar, torch.is_grad_enabled(), of.covariance
        kernel, x, z = lazy.kernel, lazy.x1, of.inducing
        each = ((t.__class__, t.shape, t.dtype, t.device, graph and t.requires_grad) for t in (x, of.values))
        own = kernel.__dict__.get("_batch_shape"), None if z is None else z.shape
        return trees.key(kernel), *own, *each, spread.__class__, getattr(spread, "shape", None), of.joint

    def problem_of(self, of: Sparse) -> Problem | None:
        lazy, values, m = of.prior._covar, of.values, of.values.shape[-1]
        x, node = lazy.x1, trees.form(lazy.kernel)
        if node is None or not is_ours(x) or not alike(x, values) or x.shape[-2] <= m:
            return None
        return kernel_problem(self.name, node, lazy.kernel, x[..., :m, :], x[..., m:, :])

    def reference(self, of: Sparse) -> tuple[torch.Tensor, torch.Tensor]:
        k, m = of.prior.covariance_matrix, of.values.shape[-1]
        mean, variance, *_ = variational.plain(k[..., :m, :], of.values, *of.spread(), of.jitter)
        return of.prior.loc[..., m:] + mean, k.diagonal(dim1=-2, dim2=-1)[..., m:] + of.jitter + variance

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        m, theta = problem.m, "theta" in problem.grad.split("/")
        kernel = kernel_of(problem, generator).requires_grad_(theta)
        x = random_matrix(problem, generator, m + problem.n, problem.d).requires_grad_("x" in problem.grad.split("/"))
        values = random_matrix(problem, generator, m).requires_grad_(theta)
        root = random_matrix(problem, generator, m, m).mul_(0.1 * m**-0.5).tril_(-1)
        root.diagonal(dim1=-2, dim2=-1).add_(0.5)
        covariance = CholLinearOperator(TriangularLinearOperator(root.requires_grad_(theta)))
        with torch.set_grad_enabled(bool(problem.grad)):
            prior = MultivariateNormal(x[..., 0], LazyEvaluatedKernelTensor(x, x, kernel=kernel))
        own = CholeskyVariationalDistribution(m, batch_shape=values.shape[:-1])
        strategy = VariationalStrategy(None, x[..., :m, :].detach(), own, jitter_val=_JITTER).to(x)

        def forward(of: Sparse) -> Any:
            strategy._clear_cache()
            points = of.prior.loc.unsqueeze(-1)
            return by_library(strategy, of.prior, points[..., :m, :], points[..., m:, :], of.values, of.covariance)

        joint = variational.DIAGONAL and m < problem.n
        return (Sparse(forward, prior, None, values, covariance, _JITTER, joint, {}),)

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        sizes = [(20, 100), (200, 500), (50, 128)]
        if level == "full":
            sizes += [(10, 30), (100, 256), (128, 1000), (300, 300), (400, 100), (500, 1024)]
        base = Problem(op="variational", d=4, dtype=dtype, device=device, grad="theta/x")
        problems = [base.replace(m=m, n=n, variant=f"{of}/cross") for m, n in sizes for of in ("rbf", "matern52")]
        return problems + [base.replace(m=30, n=100, batch=b, variant="rbf/cross") for b in (4, 16)]

    def features(self, problem: Problem) -> Features:
        m, elements = problem.m, float(problem.elements)
        flops = 12.0 * m * elements + 10.0 * problem.batch * m**3
        return Features(150.0, flops, 20.0 * (elements + problem.batch * m**2) * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        squares, rows = (17 if problem.itemsize == 8 else 26, 9.2) if problem.grad else (6, 3.5)
        return _bytes(problem, squares, rows)

    def materialize(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return out if isinstance(out, tuple) else (out.mean, out.variance)

    def default_candidate(self, problem: Problem) -> str:
        return "closed_form" if problem.device == "cpu" else "stock"


def _bytes(problem: Problem, squares: float, rows: float) -> int:
    """Return the bytes of so many matrices of the inducing points, and of so many of them and the data."""
    return int(problem.batch * problem.m * (squares * problem.m + rows * problem.n) * problem.itemsize)


def _stock_memory(problem: Problem) -> int:
    squares, rows = (5.5, 19.0) if problem.m < problem.n else (17.0, 25.0)  # the library's function has fewer
    return _bytes(problem, squares, rows) if problem.grad else _bytes(problem, 0.5 * squares, 0.5 * rows)


VARIATIONAL = _Variational()


@VARIATIONAL.candidate("stock", memory=_stock_memory)
def stock(of: Sparse) -> Any:
    """gpytorch's own."""
    return of.forward(of)


@VARIATIONAL.candidate("closed_form")
def closed_form(of: Sparse) -> Any:
    """One autograd function with closed-form gradients; samples of points share a factor."""
    return variational.distribution(of)
