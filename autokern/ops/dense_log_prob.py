"""The Op `dense_log_prob`: the log density of a Gaussian whose covariance is a matrix plus noise, with gradients.

Arguments: ``marginal, value``: the description of a Gaussian (`gp.marginal`) whose covariance the library forms as a
matrix (for example of a user's kernel, or of a product of kernels), and a value ``(n,)``. Stock factorises the matrix.

Contract: the value is that of a matrix within ``2 n eps max |K|`` of K.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DenseLinearOperator

from autokern.core.arguments import in_float64
from autokern.core.problem import Features, Problem
from autokern.gp import likelihood
from autokern.gp.array_density import matrix_log_prob
from autokern.gp.marginal import Marginal, matrix_of, read_matrix
from autokern.ops._shared import (
    EPS,
    OpOfParts,
    alike,
    density_error,
    is_ours,
    matrix_problem,
    positive_definite,
    random_matrix,
)
from autokern.ops.exact_log_prob import stock as _stock
from autokern.system.blas import one_thread

_MOST = 1000
"""Number of points above which one thread is too slow."""
_SMALL = 150
"""Number of points up to which `arrays` needs no measurement."""


class _DenseLogProb(OpOfParts):
    name = "dense_log_prob"
    summary = "log density of a Gaussian process prior with noise, of a covariance that is a matrix"
    contract = "the value is that of a matrix within 2 n eps max|K| of K"
    nesting = 3

    def key(self, marginal: Marginal, value: Any) -> Any:
        k, noise, mean = matrix_of(marginal), marginal.noise, marginal.distribution.loc
        if k is None or not isinstance(value, torch.Tensor):
            return None
        read = [(t.__class__, t.shape, t.dtype, t.device, t.requires_grad) for t in (k, noise, mean, value)]
        return *read, torch.is_grad_enabled()

    def problem_of(self, marginal: Marginal, value: torch.Tensor) -> Problem | None:
        k, noise, mean = matrix_of(marginal), marginal.noise, marginal.distribution.loc
        if k is None or k.dim() != 2 or not is_ours(k) or not torch.is_grad_enabled():
            return None
        n = len(k)
        same = alike(k, noise, mean, value)
        if not same or mean.shape != (n,) or value.shape != (n,) or noise.shape not in ((1,), (n,)):
            return None
        wanted = any(t.requires_grad for t in (k, noise, mean, value))
        return matrix_problem(self.name, k, square=True, grad="a") if wanted else None

    def reference(self, marginal: Marginal, value: torch.Tensor) -> torch.Tensor:
        k = matrix_of(marginal)
        assert k is not None
        return likelihood.of_matrix(k, marginal.noise, value - marginal.distribution.loc)

    def sample(self, problem: Problem, generator: torch.Generator) -> tuple[Any, ...]:
        k = positive_definite(problem, generator).requires_grad_()
        value = random_matrix(problem, generator, problem.n)
        with torch.enable_grad():
            prior = MultivariateNormal(torch.zeros_like(value).requires_grad_(), DenseLinearOperator(k))
            marginal = read_matrix(prior, k.new_full((1,), 0.1).requires_grad_())
        assert marginal is not None
        return marginal, value

    def check(self, problem: Problem, out: Any, args: tuple[Any, ...]) -> float:
        with torch.enable_grad():
            marginal, value = in_float64(args)
        with torch.no_grad():
            k = matrix_of(marginal)
            assert k is not None
            k, residual = k + torch.diag(marginal.noise.expand(problem.n)), value - marginal.distribution.loc
            return density_error(k, residual, out, 2 * problem.n, EPS[problem.dtype])

    def grid(self, level: str, dtype: str, device: str) -> list[Problem]:
        sizes = [20, 100, 50, 200] + ([10, 35, 70, 140, 300, 450, 700] if level == "full" else [])
        return [Problem(op=self.name, m=n, n=n, dtype=dtype, device=device, grad="a") for n in sizes]

    def features(self, problem: Problem) -> Features:
        elements = float(problem.n**2)
        return Features(100.0, elements * problem.n * 4 / 3, 20.0 * elements * problem.itemsize)

    def memory(self, problem: Problem) -> int:
        return 5 * 8 * problem.n**2

    def default_candidate(self, problem: Problem) -> str:
        """Return `arrays` for small problems, in which stock's operators and autograd nodes dominate."""
        return "arrays" if problem.n <= _SMALL and problem.device == "cpu" else "stock"


DENSE_LOG_PROB = _DenseLogProb()


@DENSE_LOG_PROB.candidate("stock", memory=lambda p: 7 * p.itemsize * p.n**2)
def stock(marginal: Marginal, value: torch.Tensor) -> torch.Tensor:
    """gpytorch's own: autograd through Cholesky."""
    return _stock(marginal, value, True)


@DENSE_LOG_PROB.candidate(
    "arrays",
    unsupported=lambda p: None if p.device == "cpu" and p.n <= _MOST else f"for {_MOST} points at most on the CPU",
)
def arrays(marginal: Marginal, value: torch.Tensor) -> torch.Tensor:
    """NumPy and LAPACK in float64, without operators and without autograd between matrix and value."""
    k = matrix_of(marginal)
    if k is None:
        return stock(marginal, value)
    with one_thread:
        found = matrix_log_prob(k, marginal.noise, marginal.distribution.loc, value)
    return stock(marginal, value) if found is None else found
